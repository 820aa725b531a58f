//! Operators applied to tensors, or to types and shapes only.

use super::draw::Draw;
use super::machine::Machine;
use super::named::{Desc, Named, Spoil, with_other_values};
use super::{Report, Scenario};
use crate::{
    Case, any_dtype, attention_case, case, latent_operators, padded, paged, quantized,
    quantized_output, sliding,
};
use gqa_host::backend::{Backend, Machine as _};
use gqa_host::op::{
    Attention, AttentionInputs, AttentionOutputs, AttentionShapes, Bounds, GroupQueryAttention,
    Inputs, KvCache, Outputs, PagedAttention, PagedCache, PagedInputs, PagedShapes, QuantType,
    RotaryEmbedding, RotaryInputs, ScatterInputs, Shapes, TensorScatter,
};
use gqa_host::plan::{TensorId, plan};
use gqa_host::{CacheBinding, DType, Layout, Problem, Result, Tensor, WriteMode};
use ndarray::{Array1, Array2};
use proptest::prelude::{Just, Strategy};
use proptest::{prop_oneof, sample};

#[derive(Clone, Debug)]
enum Op {
    Gqa(GroupQueryAttention, CacheBinding),
    Attention(Attention),
    Paged(PagedAttention),
    Rotary(RotaryEmbedding),
    Scatter(TensorScatter),
    /// Rows written into a KV cache.
    Write(WriteMode),
}

impl Op {
    const fn name(&self) -> &'static str {
        match self {
            Self::Gqa(..) => "gqa",
            Self::Attention(_) => "attention",
            Self::Paged(_) => "paged",
            Self::Rotary(_) => "rotary",
            Self::Scatter(_) => "scatter",
            Self::Write(_) => "cache write",
        }
    }

    /// What errors may name besides the inputs.
    const fn attributes(&self) -> &'static str {
        match self {
            Self::Gqa(..) => GQA,
            Self::Attention(_) => ATTENTION,
            Self::Paged(_) => PAGED,
            Self::Rotary(_) => "Y num_heads rotary_embedding_dim interleaved",
            Self::Scatter(_) => "axis",
            Self::Write(_) => "",
        }
    }
}

pub const GQA: &str = "num_heads kv_num_heads scale softcap local_window_size causal qk_output \
                       qk_norm_epsilon k_quant_type v_quant_type kv_cache_bit_width float4_cache \
                       output_qk lse";
const ATTENTION: &str = "Y is_causal q_num_heads kv_num_heads softcap scale softmax_precision \
                         qk_matmul_output_mode qk_matmul_output left_window_size output_qk \
                         right_window_size seqlens_k";
pub const PAGED: &str = "num_heads kv_num_heads scale softcap local_window_size is_causal sink \
                         qk_norm_epsilon k_quant_type v_quant_type k_cache_dtype v_cache_dtype \
                         kv_cache_layout v_head_size rotary_offset";

/// A legal call.
fn legal(draw: &mut Draw) -> (Op, Named<Tensor>) {
    let (op, inputs) = match draw.below(12) {
        0..4 => {
            let (case, call) = gqa(draw);
            (Op::Gqa(case.op(), case.cache()), call.named())
        }
        4..7 => {
            let types = prop_oneof![3 => any_dtype(), 1 => Just(DType::F64)];
            let mut case = draw.any(attention_case(types.boxed(), 24, 5));
            if draw.one_in(6) {
                case.v_dtype = draw.of(&[DType::F32, DType::F16, DType::BF16, DType::F64]);
            }
            (Op::Attention(case.op()), case.named())
        }
        7 => {
            let sizes = [[32, 16], [24, 8], [16, 16]];
            let (op, inputs) = draw.any(latent_operators(&sizes, 5)).named();
            (Op::Paged(op), inputs)
        }
        8..10 => {
            let case = small(draw);
            let case = draw.any(paged(Just(case).boxed(), 5));
            (Op::Paged(case.op()), case.named())
        }
        10 => rotary(draw),
        _ => cache_update(draw),
    };
    (op, Named(inputs))
}

/// A call with few small heads and rows, and possibly a quantized cache.
fn small(draw: &mut Draw) -> Case {
    let sizes = sample::select(vec![8usize, 16, 16, 24, 32, 64]);
    let case = draw.any(case(any_dtype(), sizes.boxed(), 6));
    let case = Case { kv_heads: 1 + case.kv_heads % 2, group: 1 + case.group % 3, ..case };
    if draw.one_in(4) { draw.any(quantized(Just(case).boxed())) } else { case }
}

fn gqa(draw: &mut Draw) -> (Case, crate::Call) {
    let mut case = small(draw);
    if draw.one_in(4) {
        case = draw.any(sliding(Just(case).boxed(), 5));
    } else if draw.one_in(4) {
        case = draw.any(quantized_output(Just(case).boxed()));
    }
    if draw.one_in(4) {
        case = draw.any(padded(Just(case).boxed()));
    }
    let call = crate::Call::new(&case);
    (case, call)
}

type Given = Vec<(&'static str, Option<Tensor>)>;

fn rotary(draw: &mut Draw) -> (Op, Given) {
    let [b, n, s, positions] = [(); 4].map(|()| 1 + draw.below(3));
    let size = draw.of(&[2usize, 4, 8, 16, 18, 64]);
    let (four, explicit) = (draw.flag(), draw.flag());
    let dtype = draw.of(&[DType::F32, DType::F16, DType::BF16]);
    let dim = 2 * (1 + draw.below(size / 2));
    let x = if four { vec![b, n, s, size] } else { vec![b, s, n * size] };
    let angles = if explicit { vec![positions, dim / 2] } else { vec![b, s, dim / 2] };
    let zeros = |shape: &[usize]| Some(Tensor::zeros(dtype, shape));
    let ids = Array2::from_shape_fn((b, s), |_| draw.below(positions) as i64);
    let op = RotaryEmbedding::new()
        .num_heads(if four { 0 } else { n as i64 })
        .rotary_embedding_dim(if dim == size { 0 } else { dim as i64 })
        .interleaved(draw.flag().into());
    let inputs = vec![
        ("x", zeros(&x)),
        ("cos_cache", zeros(&angles)),
        ("sin_cache", zeros(&angles)),
        ("position_ids", explicit.then(|| ids.into())),
    ];
    (Op::Rotary(op), inputs)
}

fn cache_update(draw: &mut Draw) -> (Op, Given) {
    let [b, n, capacity] = [(); 3].map(|()| 1 + draw.below(3));
    let (size, rows) = (draw.of(&[8usize, 16, 24, 64]), 1 + draw.below(capacity));
    let dtype = draw.of(&[DType::F32, DType::F16, DType::BF16]);
    let mode = draw.of(&[WriteMode::Linear, WriteMode::Circular]);
    let first = Array1::from_shape_fn(b, |_| draw.below(capacity - rows + 1) as i64);
    let zeros = |shape: &[usize]| Some(Tensor::zeros(dtype, shape));
    let [cache, new] = [capacity, rows].map(|rows| zeros(&[b, n, rows, size]));
    let indices = ("write_indices", Some(first.into()));
    if draw.flag() {
        let op = Op::Scatter(TensorScatter::new().mode(mode));
        return (op, vec![("past_cache", cache), ("update", new), indices]);
    }
    let new = if draw.flag() { new } else { zeros(&[b, rows, n * size]) };
    let inputs = vec![("key", new.clone()), ("value", new), indices];
    let caches = ["past_key", "past_value"].map(|name| (name, cache.clone()));
    (Op::Write(mode), inputs.into_iter().chain(caches).collect())
}

impl Op {
    /// The operator with an attribute spoilt.
    fn spoilt(self, draw: &mut Draw) -> Self {
        let how = draw.of(&[
            QuantType::None,
            QuantType::PerTensor,
            QuantType::PerHead,
            QuantType::PerChannel,
            QuantType::PerToken,
        ]);
        let name =
            draw.of(&["", "int4", "float4e2m1", "int8", "float8e4m3fn", "float16", "no type"]);
        let (i, j, x, flag) = (draw.integer(), draw.integer(), draw.float(), draw.flag());
        match self {
            Self::Gqa(op, cache) => {
                let [external, shared] = [CacheBinding::External, CacheBinding::Shared];
                let cache = if draw.one_in(16) { draw.of(&[external, shared]) } else { cache };
                let op = match draw.below(19) {
                    0 => GroupQueryAttention::new(i, draw.of(&[1, 2, j])),
                    1 => GroupQueryAttention::new(draw.of(&[1, 2, 4, i]), j),
                    2 => op.scale(x),
                    3 => op.softcap(x),
                    4 => op.local_window_size(i),
                    5 => op.sliding_window_cache(flag),
                    6 => op.causal(i),
                    7 => op.do_rotary(flag),
                    8 => op.rotary_interleaved(flag),
                    9 => op.smooth_softmax(flag),
                    10 => op.qk_output(i),
                    11 => op.qk_norm_epsilon(x),
                    12 => op.k_quant_type(how),
                    13 => op.v_quant_type(how),
                    14 => op.k_quant_type(how).v_quant_type(how),
                    15 => op.kv_cache_bit_width(i),
                    16 => op.layout(draw.of(&[Layout::Bsnh, Layout::Bnsh])),
                    17 => op.log_sum_exp(flag).prefetch_cache(draw.flag()),
                    _ => op.float32_output(flag).float8_products(draw.flag()),
                };
                Self::Gqa(op, cache)
            }
            Self::Attention(op) => Self::Attention(match draw.below(10) {
                0 => op.is_causal(i),
                1 => op.num_heads(i, j),
                2 => op.q_num_heads(i),
                3 => op.kv_num_heads(i),
                4 => op.scale(x),
                5 => op.softcap(x),
                6 => op.softmax_precision(i),
                7 => op.qk_matmul_output_mode(i).qk_matmul_output(flag),
                8 => op.left_window_size(i).present(flag),
                _ => op.right_window_size(i),
            }),
            Self::Paged(op) => Self::Paged(match draw.below(14) {
                0 => PagedAttention::new(draw.of(&[1, 2, i]), draw.of(&[1, 2, j])),
                1 => op.scale(x),
                2 => op.softcap(x),
                3 => op.local_window_size(i),
                4 => op.is_causal(i),
                5 => op.do_rotary(flag),
                6 => op.rotary_interleaved(flag),
                7 => op.qk_norm_epsilon(x),
                8 => op.k_quant_type(how),
                9 => op.k_quant_type(how).v_quant_type(how),
                10 => op.kv_cache_layout(draw.of(&["SEPARATE", "LATENT", name])),
                11 => op.v_head_size(draw.of(&[0, 8, 16, i])),
                12 => op.rotary_offset(draw.of(&[0, 8, 16, i])),
                _ => op.k_cache_dtype(name).v_cache_dtype(name),
            }),
            Self::Rotary(op) => Self::Rotary(match draw.below(3) {
                0 => op.num_heads(i),
                1 => op.rotary_embedding_dim(i),
                _ => op.interleaved(i),
            }),
            Self::Scatter(op) => Self::Scatter(op.axis(i)),
            Self::Write(_) => Self::Write(draw.of(&[WriteMode::Linear, WriteMode::Circular])),
        }
    }
}

/// Spoils up to three things of a call.
fn spoil<T: Spoil>(op: Op, inputs: &mut Named<T>, draw: &mut Draw) -> Op {
    (0..draw.of(&[0, 1, 1, 1, 2, 2, 3])).fold(op, |op, _| {
        if draw.one_in(3) {
            return op.spoilt(draw);
        }
        inputs.spoil(draw);
        op
    })
}

/// A struct of inputs, each filled by name.
macro_rules! filled {
    ($made:ident of $from:expr, need $($need:ident)*, may $($may:ident)*, $($rest:tt)*) => {
        $made {
            $($need: $from.need(stringify!($need)),)*
            $($may: $from.get(stringify!($may)),)*
            $($rest)*
        }
    };
}

/// Whether scales have the cache's dimensions except the last.
fn has_scales_of_rows(inputs: &Named<Tensor>) -> bool {
    inputs.get("k_scale").is_some_and(|scales| scales.shape().len() == 3)
}

/// An operator applied by every back end that needs no GPU.
#[derive(Debug)]
pub struct Applied {
    op: Op,
    inputs: Named<Tensor>,
    /// k_scale and v_scale are the cache's.
    are_scales_of_rows: bool,
    machine: Machine,
}

impl Applied {
    pub fn draw(draw: &mut Draw) -> Self {
        let (op, mut inputs) = legal(draw);
        // What the operator takes, most often.
        let are_scales_of_rows = has_scales_of_rows(&inputs) != draw.one_in(16);
        let op = spoil(op, &mut inputs, draw);
        Self { op, inputs, are_scales_of_rows, machine: Machine::draw(draw) }
    }

    /// Those that a cache has.
    fn row_scales(&self) -> Option<[Tensor; 2]> {
        let scale = |name| self.inputs.get(name).filter(|_| self.are_scales_of_rows).cloned();
        Some([scale("k_scale")?, scale("v_scale")?])
    }

    fn gqa(&self, cache: CacheBinding) -> Inputs<'_> {
        let inputs = filled!(Inputs of self.inputs,
            need query seqlens_k total_sequence_length,
            may key value past_key past_value cos_cache sin_cache position_ids attention_bias
                head_sink k_scale v_scale q_norm_weight k_norm_weight query_seqlens output_scale,
        );
        let given = |scale| if self.are_scales_of_rows { None } else { scale };
        let (k_scale, v_scale) = (given(inputs.k_scale), given(inputs.v_scale));
        match cache {
            CacheBinding::Shared => {
                Inputs { past_key: None, past_value: None, k_scale, v_scale, ..inputs }
            }
            _ => inputs,
        }
    }

    fn attention(&self) -> AttentionInputs<'_> {
        filled!(AttentionInputs of self.inputs,
            need q k v,
            may attn_mask past_key past_value nonpad_kv_seqlen,
        )
    }

    fn paged(&self) -> PagedInputs<'_> {
        let inputs = filled!(PagedInputs of self.inputs,
            need query cumulative_sequence_length past_seqlens block_table,
            may key value cos_cache sin_cache slot_mapping head_sink q_norm_weight k_norm_weight
                k_scale v_scale attention_metadata,
        );
        match self.are_scales_of_rows {
            true => PagedInputs { k_scale: None, v_scale: None, ..inputs },
            false => inputs,
        }
    }

    fn rotary(&self) -> RotaryInputs<'_> {
        filled!(RotaryInputs of self.inputs, need x cos_cache sin_cache, may position_ids,)
    }

    fn scatter(&self) -> ScatterInputs<'_> {
        filled!(ScatterInputs of self.inputs, need past_cache update, may write_indices,)
    }

    fn cache(&self) -> KvCache {
        let [key, value] = ["past_key", "past_value"].map(|name| self.inputs.need(name).clone());
        KvCache { key, value, scales: self.row_scales() }
    }

    fn pages(&self) -> PagedCache {
        let key = self.inputs.need("key_cache").clone();
        let value = self.inputs.get("value_cache").cloned();
        PagedCache { key, value, scales: self.row_scales() }
    }

    fn problem(&self) -> Option<Result<Problem>> {
        Some(match &self.op {
            Op::Gqa(op, cache @ CacheBinding::Shared) => {
                op.problem_in_place(&self.gqa(*cache), &self.cache())
            }
            Op::Gqa(op, cache) => op.problem(&self.gqa(*cache), *cache),
            Op::Attention(op) => op.problem(&self.attention()),
            Op::Paged(op) => op.problem(&self.paged(), &self.pages()),
            Op::Rotary(op) => op.problem(&self.rotary()),
            Op::Scatter(op) => op.problem(&self.scatter()),
            Op::Write(_) => return None,
        })
    }

    fn run(&self, backend: &dyn Backend) -> Result<()> {
        let need = |name| self.inputs.need(name);
        let cache = &mut self.cache();
        match &self.op {
            Op::Gqa(op, shared @ CacheBinding::Shared) => {
                op.run_in_place(&self.gqa(*shared), cache, backend).map(drop)
            }
            Op::Gqa(op, binding) => op.run(&self.gqa(*binding), backend).map(drop),
            Op::Attention(op) => op.run(&self.attention(), backend).map(drop),
            Op::Paged(op) => op.run(&self.paged(), &mut self.pages(), backend).map(drop),
            Op::Rotary(op) => op.run(&self.rotary(), backend).map(drop),
            Op::Scatter(op) => op.run(&self.scatter(), backend).map(drop),
            Op::Write(WriteMode::Linear) => {
                cache.write(need("key"), need("value"), need("write_indices"), backend)
            }
            Op::Write(_) => {
                cache.write_circular(need("key"), need("value"), need("write_indices"), backend)
            }
        }
    }
}

impl Scenario for Applied {
    fn make(&self, report: &mut Report) {
        let name = self.op.name();
        report.expect(self.op.attributes(), self.inputs.names());
        let problem = self.problem().and_then(|problem| report.note(name, problem));
        if let Some(problem) = &problem {
            self.machine.plans(problem, report);
        }
        for backend in self.machine.backends(problem.as_ref()) {
            report.note(format!("{name} on {}", backend.name()), self.run(&*backend));
        }
    }
}

/// An operator with types and shapes only, of any size.
#[derive(Debug)]
pub struct Described {
    op: Op,
    inputs: Named<Desc>,
    total: usize,
    bounds: Bounds,
    machine: Machine,
}

impl Described {
    pub fn draw(draw: &mut Draw) -> Self {
        let (op, given) = legal(draw);
        let [mut total, query_rows, keys] = [6, 4, 8].map(|n| draw.below(n));
        let mut inputs = given.descs();
        // Replaces a number wherever it is a dimension, so that shapes stay consistent.
        let dims: Vec<usize> = inputs.dims().map(|n| *n).collect();
        if !dims.is_empty() && draw.flag() {
            let old = draw.of(&dims);
            let new = draw.size(old);
            inputs.dims().chain([&mut total]).filter(|n| **n == old).for_each(|n| *n = new);
        }
        let op = spoil(op, &mut inputs, draw);
        let mut bound = |n| if draw.one_in(8) { draw.size(n) } else { n };
        let bounds = Bounds { query_rows: bound(query_rows), keys: bound(keys) };
        Self { op, inputs, total: bound(total), bounds, machine: Machine::draw(draw) }
    }

    fn problem(&self) -> Option<Result<Problem>> {
        Some(match &self.op {
            Op::Gqa(op, cache) => {
                let shapes = filled!(Shapes of self.inputs,
                    need query seqlens_k,
                    may key value past_key past_value cos_cache sin_cache position_ids
                        attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight query_seqlens
                        output_scale,
                    total_sequence_length: self.total
                );
                op.problem_from_shapes(&shapes, *cache)
            }
            Op::Attention(op) => op.problem_from_shapes(&filled!(AttentionShapes of self.inputs,
                need q k v,
                may attn_mask past_key past_value nonpad_kv_seqlen,
            )),
            Op::Paged(op) => op.problem_from_shapes(&filled!(PagedShapes of self.inputs,
                need query key_cache cumulative_sequence_length past_seqlens block_table,
                may value_cache key value cos_cache sin_cache slot_mapping head_sink q_norm_weight
                    k_norm_weight k_scale v_scale,
                bounds: self.bounds
            )),
            Op::Rotary(_) | Op::Scatter(_) | Op::Write(_) => return None,
        })
    }
}

impl Scenario for Described {
    fn make(&self, report: &mut Report) {
        report.expect(self.op.attributes(), self.inputs.names().chain(["attention_metadata"]));
        let step = format!("shapes of {}", self.op.name());
        let problem = self.problem().and_then(|problem| report.note(step, problem));
        let Some(problem) = problem else { return };
        self.machine.plans(&problem, report);
        match &self.op {
            Op::Attention(_) => {
                report.note("room for outputs", AttentionOutputs::new(&problem).map(drop))
            }
            _ => report.note("room for outputs", Outputs::new(&problem).map(drop)),
        };
    }
}

/// A back end that runs a problem with some tensors of another call, and a plan on another device,
/// without a check of lengths and positions before kernels use them.
#[derive(Debug)]
pub struct Confused {
    calls: [Applied; 2],
    /// Tensors that are the other call's.
    foreign: Vec<TensorId>,
    lengths: [Tensor; 2],
    machine: Machine,
}

impl Confused {
    pub fn draw(draw: &mut Draw) -> Self {
        let mut call = || {
            let (case, call) = gqa(draw);
            let op = Op::Gqa(case.op(), CacheBinding::Separate);
            let inputs = Named(call.named());
            let are_scales_of_rows = has_scales_of_rows(&inputs);
            Applied { op, inputs, are_scales_of_rows, machine: Machine::draw(draw) }
        };
        let calls = [call(), call()];
        let lengths = ["seqlens_k", "position_ids"]
            .map(|name| with_other_values(calls[0].inputs.need(name), draw));
        let count = draw.of(&[0, 0, 1, 2, TensorId::ALL.len()]);
        let foreign = (0..count).map(|_| draw.of(&TensorId::ALL)).collect();
        Self { calls, foreign, lengths, machine: Machine::draw(draw) }
    }
}

impl Scenario for Confused {
    fn make(&self, report: &mut Report) {
        report.expect(GQA, self.calls[0].inputs.names());
        let [Some(Ok(problem)), Some(Ok(other))] = self.calls.each_ref().map(Applied::problem)
        else {
            return;
        };
        let [Ok(mut own), Ok(mut others)] = [&problem, &other].map(Outputs::new) else { return };
        let [inputs, foreign] = self.calls.each_ref().map(|call| call.gqa(CacheBinding::Separate));
        let mut io = own.io(&inputs);
        let foreign = others.io(&foreign);
        for &id in &self.foreign {
            match id {
                TensorId::Output => *io.output = foreign.output.clone(),
                TensorId::PresentKey => *io.present_key = foreign.present_key.clone(),
                TensorId::PresentValue => *io.present_value = foreign.present_value.clone(),
                TensorId::OutputQk => io.output_qk = None,
                TensorId::Lse => io.lse = None,
                TensorId::KRowScale | TensorId::VRowScale => io.row_scales = None,
                _ => io.inputs = io.inputs.with(id, foreign.input(id)),
            }
        }
        let [seqlens, positions] = &self.lengths;
        io.inputs = io.inputs.with(TensorId::SeqlensK, seqlens);
        io.inputs = io
            .inputs
            .with(TensorId::PositionIds, io.inputs.get(TensorId::PositionIds).map(|_| positions));
        for backend in self.machine.backends(Some(&problem)) {
            let step = format!("other tensors on {}", backend.name());
            report.note(step, backend.run(&problem, &mut io));
        }
        let Some(sim) = self.machine.sim(&problem) else { return };
        let device = &self.calls[0].machine.device;
        if let Ok(plan) = plan(&problem, device, &Default::default()) {
            report.note("plan of another device on sim", sim.execute(&plan, &mut io));
        }
    }
}
