//! Back ends check the tensors of a call against its problem: any other tensor is an error that
//! names it.

use gqa_host::backend::{Backend, Io, cpu::Cpu};
use gqa_host::op::{
    GroupQueryAttention, Inputs, Outputs, PagedAttention, PagedCache, PagedInputs, QuantType,
};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{CacheBinding, DType, Problem, Tensor};
use ndarray::{Array, Array1, Array2};

/// Two new rows of two sequences behind three rows, 4 query heads over 2 KV heads of 16, which
/// rotate.
struct Call {
    problem: Problem,
    tensors: Given,
}

struct Given {
    query: Tensor,
    new: Tensor,
    past: Tensor,
    seqlens_k: Tensor,
    total: Tensor,
    angles: Tensor,
    position_ids: Tensor,
    scale: Tensor,
    outputs: Option<Outputs>,
}

fn float(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape)
}

fn ints(values: &[i32]) -> Tensor {
    Array1::from(values.to_vec()).into()
}

impl Given {
    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            key: Some(&self.new),
            value: Some(&self.new),
            past_key: Some(&self.past),
            past_value: Some(&self.past),
            cos_cache: Some(&self.angles),
            sin_cache: Some(&self.angles),
            position_ids: Some(&self.position_ids),
            k_scale: Some(&self.scale),
            v_scale: Some(&self.scale),
            ..Inputs::new(&self.query, &self.seqlens_k, &self.total)
        }
    }
}

impl Call {
    fn new() -> Self {
        let tensors = Given {
            query: float(&[2, 2, 64]),
            new: float(&[2, 2, 32]),
            past: Tensor::zeros(DType::I8, &[2, 2, 3, 16]),
            seqlens_k: ints(&[4, 3]),
            total: ints(&[5]),
            angles: float(&[7, 8]),
            position_ids: Array2::from_elem((2, 2), 6i64).into(),
            scale: Array::from_elem(1, 0.5f32).into(),
            outputs: None,
        };
        let op = GroupQueryAttention::new(4, 2)
            .do_rotary(true)
            .k_quant_type(QuantType::PerTensor)
            .v_quant_type(QuantType::PerTensor)
            .kv_cache_bit_width(8)
            .log_sum_exp(true);
        let problem = op.problem(&tensors.inputs(), CacheBinding::Separate).unwrap();
        let outputs = Outputs::new(&problem).unwrap();
        Self { problem, tensors: Given { outputs: Some(outputs), ..tensors } }
    }

    /// The error of each back end after `spoil` has changed the call's tensors.
    fn run(&mut self, spoil: impl Fn(&mut Io<'_>)) -> [String; 2] {
        let mut outputs = self.tensors.outputs.clone().unwrap();
        let backends: [&dyn Backend; 2] = [&Cpu::default(), &Reference];
        backends.map(|backend| {
            let inputs = self.tensors.inputs();
            let mut io = outputs.io(&inputs);
            spoil(&mut io);
            backend.run(&self.problem, &mut io).map_or_else(|e| e.to_string(), |()| "done".into())
        })
    }
}

#[track_caller]
fn answers(got: [String; 2], want: &str) {
    assert_eq!(got, [want, want]);
}

#[test]
fn the_tensors_of_a_problem_are_computed_with() {
    answers(Call::new().run(|_| ()), "done");
}

#[test]
fn a_tensor_of_another_size_or_type_is_refused() {
    let mut call = Call::new();
    call.tensors.query = float(&[2, 1, 64]);
    answers(
        call.run(|_| ()),
        "query: got float32 [2, 1, 64]; allowed: float32 [2, 2, 64], as the problem says",
    );
    let mut call = Call::new();
    call.tensors.past = Tensor::zeros(DType::I8, &[2, 2, 2, 16]);
    answers(
        call.run(|_| ()),
        "past_key: got int8 [2, 2, 2, 16]; allowed: int8 [2, 2, 3, 16], as the problem says",
    );
    let mut call = Call::new();
    call.tensors.angles = Tensor::zeros(DType::F16, &[7, 8]);
    answers(
        call.run(|_| ()),
        "cos_cache: got float16 [7, 8]; allowed: float32 [7, 8], as the problem says",
    );
    let mut call = Call::new();
    call.tensors.outputs.as_mut().unwrap().output = float(&[2, 2, 63]);
    answers(
        call.run(|_| ()),
        "output: got float32 [2, 2, 63]; allowed: float32 [2, 2, 64], as the problem says",
    );
    let mut call = Call::new();
    call.tensors.outputs.as_mut().unwrap().present_value = float(&[0]);
    answers(
        call.run(|_| ()),
        "present_value: got float32 [0]; allowed: int8 [2, 2, 5, 16], as the problem says",
    );
}

#[test]
fn a_tensor_that_is_missing_or_not_wanted_is_refused() {
    answers(
        Call::new().run(|io| io.inputs = io.inputs.with(TensorId::Value, None)),
        "value: got no tensor; allowed: float32 [2, 2, 32], as the problem says",
    );
    answers(
        Call::new().run(|io| io.lse = None),
        "lse: got no tensor; allowed: float32 [2, 4, 2], as the problem says",
    );
    let mut call = Call::new();
    call.tensors.outputs.as_mut().unwrap().output_qk = Some(float(&[2, 4, 2, 5]));
    answers(call.run(|_| ()), "output_qk: got a tensor; allowed: none, as the problem has none");
}

/// A back end that left it out would compute something else than its caller means.
#[test]
fn an_input_that_the_problem_lacks_is_refused() {
    use TensorId::{AttentionBias, BlockTable, HeadSink, OutputScale, QNormWeight, TreeMask};
    for id in [HeadSink, AttentionBias, TreeMask, QNormWeight, OutputScale, BlockTable] {
        let want = format!("{}: got a tensor; allowed: none, as the problem has none", id.name());
        let with = |io: &mut Io<'_>| io.inputs = io.inputs.with(id, io.input(TensorId::Query));
        answers(Call::new().run(with), &want);
    }
    let mut call = Call::new();
    call.tensors.scale = float(&[0]);
    let with = |io: &mut Io<'_>| {
        let empty = io.input(TensorId::KScale);
        io.inputs = io.inputs.with(TensorId::HeadSink, empty).with(TensorId::KScale, None);
    };
    let want = "k_scale: got no tensor; allowed: float32 [1], as the problem says";
    answers(call.run(with), want);
}

/// The attributes of an operator may have no use for one of its inputs, as those without do_rotary
/// have none for cos_cache. It is left out before a back end sees it.
#[test]
fn an_operator_may_have_inputs_that_it_does_not_use() {
    let float = |shape: &[usize]| {
        let values = (0..shape.iter().product()).map(|i: usize| (i as f32).sin());
        Tensor::from_f32(DType::F32, shape, &values.collect::<Vec<_>>()).unwrap()
    };
    let (query, new, angles) = (float(&[1, 1, 64]), float(&[1, 1, 32]), float(&[9, 8]));
    let (last, total) = (ints(&[0]), ints(&[1]));
    let inputs =
        Inputs { key: Some(&new), value: Some(&new), ..Inputs::new(&query, &last, &total) };
    let op = GroupQueryAttention::new(4, 2);
    let backends: [&dyn Backend; 2] = [&Cpu::default(), &Reference];
    for backend in backends {
        let given = Inputs { cos_cache: Some(&angles), sin_cache: Some(&angles), ..inputs };
        let of = |inputs: &Inputs<'_>| op.run(inputs, backend).unwrap().output;
        assert_eq!(of(&given), of(&inputs));
        let problem = op.problem(&given, CacheBinding::Separate).unwrap();
        let mut outputs = Outputs::new(&problem).unwrap();
        let refused = backend.run(&problem, &mut outputs.io(&given)).unwrap_err();
        let want = "cos_cache: got a tensor; allowed: none, as the problem has none";
        assert_eq!(refused.to_string(), want);
    }
}

#[test]
fn lengths_and_positions_that_lead_outside_are_refused() {
    let mut call = Call::new();
    call.tensors.seqlens_k = ints(&[4, 5]);
    answers(
        call.run(|_| ()),
        "seqlens_k: got 5 for batch entry 1; allowed: 1 to 4, the last of at most 5 rows of present_key",
    );
    let mut call = Call::new();
    call.tensors.position_ids = Array2::from_elem((2, 2), 7i64).into();
    answers(
        call.run(|_| ()),
        "position_ids: got 7 at (0, 0); allowed: 0 to 6, the last row of cos_cache",
    );
    let mut call = Call::new();
    call.tensors.scale = float(&[1]);
    answers(
        call.run(|_| ()),
        "k_scale: got 0 at element 0; allowed: finite numbers other than 0, none subnormal",
    );
}

/// One sequence of three tokens behind one row, in two blocks of two rows, of the three that its
/// table has.
#[test]
fn lengths_that_lead_outside_of_the_blocks_are_refused() {
    let (query, past, starts) = (float(&[3, 8]), ints(&[1]), ints(&[0, 3]));
    let table = |blocks: [i32; 3]| Tensor::from(Array2::from(vec![blocks]));
    let mut cache =
        PagedCache { key: float(&[2, 2, 1, 8]), value: Some(float(&[2, 2, 1, 8])), scales: None };
    let right = table([1, 0, 1]);
    let inputs = PagedInputs {
        key: Some(&query),
        value: Some(&query),
        ..PagedInputs::new(&query, &starts, &past, &right)
    };
    let problem = PagedAttention::new(1, 1).problem(&inputs, &cache).unwrap();
    let mut run = |past: &Tensor, starts: &Tensor, table: &Tensor| {
        let backends: [&dyn Backend; 2] = [&Cpu::default(), &Reference];
        backends.map(|backend| {
            let mut output = float(&[3, 8]);
            let mut io = Io {
                inputs: Tensors::default()
                    .with(TensorId::Query, &query)
                    .with(TensorId::Key, &query)
                    .with(TensorId::Value, &query)
                    .with(TensorId::SeqlensK, past)
                    .with(TensorId::CumulativeSequenceLength, starts)
                    .with(TensorId::BlockTable, table),
                output: &mut output,
                present_key: &mut cache.key,
                present_value: cache.value.as_mut().unwrap(),
                row_scales: None,
                output_qk: None,
                lse: None,
            };
            backend.run(&problem, &mut io).map_or_else(|e| e.to_string(), |()| "done".into())
        })
    };
    answers(run(&past, &starts, &right), "done");
    // A block outside of the cache holds nothing.
    answers(run(&past, &starts, &table([1, 2, 0])), "done");
    answers(
        run(&ints(&[2]), &starts, &right),
        "past_seqlens: got a sequence of 5 tokens; allowed: up to 4",
    );
    answers(
        run(&past, &ints(&[0, 2]), &right),
        "cumulative_sequence_length: got [0, 2]; allowed: 2 integers from 0 to num_tokens = 3",
    );
    answers(
        run(&past, &ints(&[0, 1, 3]), &right),
        "cumulative_sequence_length: got int32 [3]; allowed: int32 [2], as the problem says",
    );
}
