//! The simulated GPU as a back end: it agrees with the reference for every simulated device.

use crate::step;
use crate::step::{
    CAPACITY, HEADS, KV_HEADS, SIZE, Step, assert_close, int, operator, random, tolerance,
};
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io, Machine};
use gqa_host::engine::{Dense, Heads, Layer, Paged, Rope};
use gqa_host::op::{Inputs, Outputs};
use gqa_host::plan::{DeviceInfo, Plan, PlanOptions, TensorId, TensorSpec, Tensors, plan};
use gqa_host::reference::Reference;
use gqa_host::{DType, Error, Problem, QuantFormat, Quantization, RowStrides, Scales, Tensor};
use ndarray::arr1;

fn device(name: &str) -> DeviceInfo {
    DeviceInfo::known(name).unwrap()
}

/// Output and cache of `sim` against the reference.
fn agrees(sim: &Sim, step: &Step, dtype: DType, what: &str) {
    let ((got, got_cache), (want, want_cache)) = (step.run(sim), step.run(&Reference));
    assert_close(&got, &want, tolerance(dtype), what);
    assert_close(&got_cache.key, &want_cache.key, tolerance(dtype), what);
    assert_close(&got_cache.value, &want_cache.value, tolerance(dtype), what);
}

#[test]
fn any_gpu_in_any_phase_agrees_with_the_reference() {
    for name in ["h200", "v100"] {
        let sim = Sim::default().with_device(device(name));
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (rows, lengths, total) in [(9, [9, 4], 9), (1, [71, 30], 71), (3, [40, 7], 40)] {
                agrees(
                    &sim,
                    &Step::new(dtype, rows, &lengths, total),
                    dtype,
                    &format!("{name}, {dtype}, {rows} rows"),
                );
            }
        }
    }
}

#[test]
fn a_tensor_that_the_problem_lacks_is_refused() {
    let layer = Layer::new(DType::F16, Heads { query: 4, kv: 2, size: 64 });
    let problem = layer.dense(Dense::prefill(1, 3, 3)).unwrap();
    let all = TensorSpec::all(&problem);
    let tensors: Vec<_> =
        all.iter().map(|(id, spec)| (*id, Tensor::zeros(spec.dtype, &spec.shape))).collect();
    let sinks = Tensor::zeros(DType::F16, &[4]);
    let inputs = tensors.iter().filter(|(id, _)| !id.is_output()).map(|(id, t)| (*id, t));
    let inputs: Tensors<&Tensor> = inputs.collect();
    let cache = || Tensor::zeros(DType::F16, &problem.key_cache_shape(3));
    let (mut output, mut key, mut value) =
        (Tensor::zeros(DType::F16, &[1, 3, 256]), cache(), cache());
    let mut io = Io {
        inputs: inputs.with(TensorId::HeadSink, &sinks),
        output: &mut output,
        present_key: &mut key,
        present_value: &mut value,
        row_scales: None,
        output_qk: None,
        lse: None,
    };
    let (sim, want) = (Sim::default(), "head_sink: got a tensor; allowed: none, as the problem");
    let plan = plan(&problem, sim.target(), &PlanOptions::default()).unwrap();
    for refused in [sim.run(&problem, &mut io), sim.execute(&plan, &mut io)] {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.starts_with(want), "{refused}");
    }
}

/// A row whose scores overflow float32, so that its sums are NaN or infinite, is computed in one
/// tile with others and does not change them.
#[test]
fn a_row_whose_scores_overflow_leaves_the_others() {
    const LARGE_ROW: usize = 5;
    let force = PlanOptions { force: Some("gqa_hopper_bf16_d128"), ..PlanOptions::default() };
    let sim = Sim::default().with_options(force);
    let mut step = Step::new(DType::BF16, 30, &[290], 290);
    let want = step.run(&Reference).0.to_f64();
    let row = HEADS as usize * SIZE;
    let mut query: Vec<_> = step.query.to_f64().into_iter().map(|number| number as f32).collect();
    query[LARGE_ROW * row..(LARGE_ROW + 1) * row].fill(3e38);
    step.query = Tensor::from_f32(DType::BF16, step.query.shape(), &query).unwrap();
    let got = step.run(&sim).0.to_f64();
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let close = (got - want).abs() <= tolerance(DType::BF16) * (1.0 + want.abs());
        assert!(close || i / row == LARGE_ROW, "element {i} is {got}, not {want}");
    }
}

/// Slices of larger tensors, as an engine has them: all heads of query, key and value side by side
/// in one row, some of the heads of a larger output, batch entries apart.
#[test]
fn tensors_may_be_slices_of_larger_ones() {
    let (heads, kv_heads) = (HEADS as usize, KV_HEADS as usize);
    let all = (heads + 2 * kv_heads) * SIZE;
    let strides = |row| RowStrides { batch: 100 * row + 8, head: SIZE, row };
    for (name, rows, lengths) in
        [("h200", 1, [71, 30]), ("h200", 70, [70, 33]), ("a100", 1, [71, 30])]
            .into_iter()
            .chain([("a100", 40, [70, 50]), ("v100", 5, [9, 5])])
    {
        let step = Step::new(DType::F16, rows, &lengths, lengths[0] as usize);
        let layer = Layer::new(DType::F16, Heads { query: heads, kv: kv_heads, size: SIZE })
            .rope(Rope::new(SIZE, CAPACITY));
        let call = if rows == lengths[0] as usize {
            Dense::prefill(2, rows, CAPACITY)
        } else {
            Dense::chunk(2, rows, CAPACITY).longest(lengths[0] as usize)
        };
        let contiguous = layer.dense(call).unwrap();
        let call = call.query_strides(strides(all)).key_value_strides(strides(all));
        let strided = layer.dense(call.output_strides(strides(2 * heads * SIZE))).unwrap();
        let run = |backend: &dyn Backend, problem: &Problem| {
            let (mut cache, inputs) = (step.cache.clone(), step.inputs());
            let mut outputs = Outputs::new(problem).unwrap();
            let mut io = outputs.io(&inputs);
            (io.present_key, io.present_value) = (&mut cache.key, &mut cache.value);
            backend.run(problem, &mut io).unwrap();
            (outputs.output, cache)
        };
        let sim = Sim::default().with_device(device(name));
        let want = run(&sim, &contiguous);
        assert!(run(&sim, &strided) == want, "{name}, {rows} rows");
        for backend in [&Reference as &dyn Backend, &Cpu::default()] {
            let ((got, _), name) = (run(backend, &strided), backend.name());
            assert_close(&got, &want.0, tolerance(DType::F16), &format!("{name}, {rows} rows"));
        }
    }
}

/// A call that appends rows, and one whose cache already holds them: kernels that read blocks in
/// place, for few and for many tokens, and a GPU that gathers rows.
#[test]
fn what_was_appended_to_blocks_may_be_read_again() {
    for (name, rotated, new) in [
        ("h200", true, [2, 1, 1]),
        ("h200", false, [33, 1, 40]),
        ("v100", false, [1, 1, 1]),
        ("v100", true, [3, 1, 2]),
    ] {
        let [problem, _] = step::paged::problems(rotated, new);
        let sim = Sim::default().with_device(device(name));
        let [want, key, value] = step::paged::run(&problem, new, &sim);
        let caches = [key.clone(), value.clone()];
        let got = step::paged::run_over(&problem.appended(), new, caches, &sim);
        assert_close(&got[0], &want, tolerance(DType::F16), name);
        assert!(got[1..] == [key, value], "{name}: a cache was written");
    }
}

/// The same over a paged KV cache: kernels that read blocks in place, for few and for many tokens,
/// and a GPU that gathers rows, where single unrotated tokens are read in place.
#[test]
fn tokens_of_paged_calls_may_be_slices_of_larger_ones() {
    for (device_name, rotated, new) in [
        ("h200", false, [1, 1, 1]),
        ("h200", true, [3, 1, 20]),
        ("a100", false, [1, 1, 1]),
        ("a100", true, [1, 1, 1]),
        ("v100", false, [1, 1, 1]),
        ("v100", true, [1, 1, 1]),
        ("v100", false, [3, 1, 9]),
    ] {
        let [contiguous, strided] = step::paged::problems(rotated, new);
        let sim = Sim::default().with_device(device(device_name));
        let want = step::paged::run(&contiguous, new, &sim);
        let name = format!("{device_name}, {new:?} tokens");
        assert!(step::paged::run(&strided, new, &sim) == want, "{name}");
        for backend in [&Reference as &dyn Backend, &Cpu::default()] {
            let got = step::paged::run(&strided, new, backend);
            assert_close(&got[0], &want[0], tolerance(DType::F16), &name);
        }
    }
}

/// The root mean square of zeros is 0, and GPUs flush the smallest epsilon to 0.
#[test]
fn rows_of_zeros_are_normalised_to_zeros() {
    let (heads, size) = (HEADS as usize, SIZE);
    let query = Tensor::zeros(DType::F32, &[1, 1, heads * size]);
    let key = Tensor::zeros(DType::F32, &[1, 1, KV_HEADS as usize * size]);
    let (value, weight) = (random(DType::F32, key.shape(), 1), random(DType::F32, &[size], 2));
    let (last, total) = (int(&[0]), int(&[1]));
    let inputs = Inputs {
        key: Some(&key),
        value: Some(&value),
        q_norm_weight: Some(&weight),
        k_norm_weight: Some(&weight),
        ..Inputs::new(&query, &last, &total)
    };
    let operator = operator().do_rotary(false).qk_norm_epsilon(f32::from_bits(1));
    for backend in [&Reference as &dyn Backend, &Cpu::default(), &Sim::default()] {
        let got = operator.run(&inputs, backend).unwrap();
        assert!(got.present_key.to_f64().iter().all(|&x| x == 0.0), "{}", backend.name());
        assert!(got.output.to_f64().iter().all(|x| x.is_finite()), "{}", backend.name());
    }
}

#[test]
fn the_order_of_threads_does_not_matter() {
    let step = Step::new(DType::F16, 1, &[CAPACITY as i32, 40], CAPACITY);
    let outputs = [0, 1, 2].map(|seed| step.run(&Sim::default().with_seed(seed)).0);
    assert!(outputs.iter().all(|output| *output == outputs[0]));
}

/// The output of a plan, which does not check lengths as an applied operator does.
fn executed(plan: &Plan, step: &Step) -> Vec<f64> {
    let mut cache = step.cache.clone();
    let inputs = step.inputs();
    let mut outputs = Outputs::new(plan.problem()).unwrap();
    let mut io = outputs.io(&inputs);
    (io.present_key, io.present_value) = (&mut cache.key, &mut cache.value);
    let machine: &dyn Machine = &Sim::default();
    machine.execute(plan, &mut io).unwrap();
    outputs.output.to_f64()
}

#[test]
fn lengths_that_lead_outside_the_cache_are_clamped() {
    let step = Step::new(DType::F16, 1, &[20, 20], 20);
    let problem = step.problem();
    let plan = plan(&problem, &DeviceInfo::h200(), &PlanOptions::default()).unwrap();
    // Lengths are checked when the operator is applied, but not when a graph replays.
    let wild = Step { seqlens_k: int(&[i32::MAX, -5]), ..step };
    let outputs = executed(&plan, &wild);
    let (full, empty) = outputs.split_at(outputs.len() / 2);
    assert!(full.iter().all(|x| x.is_finite()) && empty.iter().all(|x| *x == 0.0));
}

/// Queries that `hopper` rotates itself, with all keys in the cache.
#[test]
fn rows_behind_the_last_angles_are_nan() {
    const ANGLES: usize = 100;
    let table = |seed| random(DType::BF16, &[ANGLES, SIZE / 2], seed);
    let step = Step::new(DType::BF16, 70, &[100, 90], ANGLES);
    let none = || random(DType::BF16, &[2, 0, KV_HEADS as usize * SIZE], 0);
    let step = Step { key: none(), value: none(), cos: table(4), sin: table(5), ..step };
    let plan = plan(&step.problem(), &DeviceInfo::h200(), &PlanOptions::default()).unwrap();
    assert!(plan.launches()[0].entry().arguments.contains(&"cos"), "{:?}", plan.launches());
    // Positions 40 to 109 of the first sequence; as above, unchecked.
    let wild = Step { seqlens_k: int(&[109, 89]), ..step };
    let outputs = executed(&plan, &wild);
    let (wild, tame) = outputs.split_at(outputs.len() / 2);
    let (inside, outside) = wild.split_at(60 * HEADS as usize * SIZE);
    assert!(inside.iter().chain(tame).all(|x| x.is_finite()));
    assert!(outside.iter().all(|x| x.is_nan()));
}

#[test]
fn what_the_planner_refuses_is_an_error() {
    let wrong_type = PlanOptions { force: Some("gqa_general_f32"), ..PlanOptions::default() };
    let step = Step::new(DType::F16, 1, &[20], 20);
    let sim = Sim::default().with_options(wrong_type);
    assert_eq!(sim.name(), "sim");
    let result = operator().run_in_place(&step.inputs(), &mut step.cache.clone(), &sim);
    assert!(matches!(result, Err(Error::NoKernel(_))), "{result:?}");
}

/// Output and caches of a call over a paged KV cache of three sequences with 3, 1 and 20 new
/// tokens, whose token tensors have `rows` rows: padding rows after the last sequence hold NaN.
fn padded(
    rows: usize,
    slots: bool,
    longest: [usize; 2],
    device: &DeviceInfo,
    options: &PlanOptions,
) -> [Vec<f64>; 3] {
    let (new, past) = ([3, 1, 20], [5, 30, 0]);
    let (tokens, blocks, block_size) = (24, 16, 16);
    let layer = Layer::new(DType::F16, Heads { query: 4, kv: 2, size: 64 });
    let call = Paged::new(3, rows, [blocks, block_size, 3]);
    let call = call.most_tokens(longest[0]).longest(longest[1]);
    let problem = layer.paged(if slots { call.slot_mapping() } else { call }).unwrap();
    let of_tokens = |width: usize, seed| {
        let mut all = random(DType::F16, &[tokens, width], seed).bytes().to_vec();
        all.resize(rows * width * 2, 0xff);
        let all = bytemuck::allocation::pod_collect_to_vec::<u8, half::f16>(&all);
        Tensor::from(ndarray::Array::from_shape_vec((rows, width), all).unwrap())
    };
    let [query, key, value] = [(256, 1), (128, 2), (128, 3)].map(|(n, seed)| of_tokens(n, seed));
    let (starts, past_seqlens) = (int(&[0, new[0], new[0] + new[1], 24]), int(&past));
    let table: Vec<_> = (0..9).map(|i| (i * 7 + 3) % 16).collect();
    let table = ndarray::Array::from_shape_vec((3, 3), table).unwrap();
    let row = |sequence: usize, row: i32| table[(sequence, row as usize / 16)] * 16 + row % 16;
    let rows_of = |b: usize| (past[b]..past[b] + new[b]).map(move |i| (b, i));
    let mut slot_mapping: Vec<_> = (0..3).flat_map(rows_of).map(|(b, i)| row(b, i)).collect();
    // Rows of the first sequence.
    slot_mapping.resize(rows, slot_mapping[0]);
    let (table, slot_mapping) = (Tensor::from(table.clone()), int(&slot_mapping));
    let cache = |seed| random(DType::F16, &[blocks, block_size, 2, 64], seed);
    let (mut present_key, mut present_value) = (cache(4), cache(5));
    let mut output = Tensor::zeros(DType::F16, &[rows, 256]);
    let mut io = Io {
        inputs: Tensors::default()
            .with(TensorId::Query, &query)
            .with(TensorId::Key, &key)
            .with(TensorId::Value, &value)
            .with(TensorId::SeqlensK, &past_seqlens)
            .with(TensorId::CumulativeSequenceLength, &starts)
            .with(TensorId::BlockTable, &table)
            .with(TensorId::SlotMapping, slots.then_some(&slot_mapping)),
        output: &mut output,
        present_key: &mut present_key,
        present_value: &mut present_value,
        row_scales: None,
        output_qk: None,
        lse: None,
    };
    let plan = plan(&problem, device, options).unwrap();
    Sim::default().execute(&plan, &mut io).unwrap();
    let output = output.to_f64()[..tokens * 256].to_vec();
    [output, present_key.to_f64(), present_value.to_f64()]
}

/// Padded as engines do, so that calls with similar numbers of tokens share a plan, and rounded as
/// the planner does.
#[test]
fn rows_of_padding_are_nobodys() {
    let unfused = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let prompts = PlanOptions { force: Some("gqa_hopper_paged_f16_d64"), ..PlanOptions::default() };
    let plain = PlanOptions::default;
    for (options, name) in
        [(plain(), "h200"), (unfused, "h200"), (prompts, "h200"), (plain(), "a100")]
    {
        for slots in [false, true] {
            let [output, key, value] = padded(24, slots, [20, 31], &device(name), &options);
            assert!(output.iter().all(|x| x.is_finite()));
            let got = padded(32, slots, [28, 48], &device(name), &options);
            assert_close_f64(&got[0], &output);
            assert_eq!((&got[1], &got[2]), (&key, &value));
        }
    }
}

fn assert_close_f64(got: &[f64], want: &[f64]) {
    let worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
    assert!(got.len() == want.len() && worst < 2e-3, "off by {worst}");
}

/// An infinite query cannot be a sum of float8 values, or one: its row becomes NaN, and the others
/// are unchanged.
#[test]
fn an_infinite_query_is_no_number_in_float8() {
    const ROWS: usize = 40;
    const SIZE: usize = 128;
    let how = Quantization { format: QuantFormat::Float8, scales: Scales::PerTensor };
    let layer = Layer::new(DType::BF16, Heads { query: 1, kv: 1, size: SIZE }).quantized(how);
    let call = Dense::prefill(1, ROWS, ROWS);
    let numbers: Vec<f32> = (0..ROWS * SIZE).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut queries = numbers.clone();
    queries[5 * SIZE + 7] = f32::INFINITY;
    let of = |numbers: &[f32]| Tensor::from_f32(DType::BF16, &[1, ROWS, SIZE], numbers).unwrap();
    let (query, rows) = (of(&queries), of(&numbers));
    let (last, one) = (Tensor::from(arr1(&[ROWS as i32 - 1])), Tensor::from(arr1(&[1.0f32])));
    let inputs = Tensors::default()
        .with(TensorId::Query, &query)
        .with(TensorId::Key, &rows)
        .with(TensorId::Value, &rows)
        .with(TensorId::SeqlensK, &last)
        .with(TensorId::KScale, &one)
        .with(TensorId::VScale, &one);
    for (kernel, call) in [
        ("gqa_hopper_quantized_f8_bf16_d128", call),
        ("gqa_hopper_float8_bf16_d128", call.float8_products()),
    ] {
        let problem = layer.dense(call).unwrap();
        let cache = || Tensor::zeros(problem.key_cache_dtype(), &problem.key_cache_shape(ROWS));
        let (mut key, mut value) = (cache(), cache());
        let mut output = Tensor::zeros(DType::BF16, &problem.output_shape());
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key: &mut key,
            present_value: &mut value,
            row_scales: None,
            output_qk: None,
            lse: None,
        };
        let force = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        Sim::default().with_options(force).run(&problem, &mut io).unwrap();
        for (i, row) in output.to_f64().chunks(SIZE).enumerate() {
            assert!(row.iter().all(|x| x.is_nan() == (i == 5)), "{kernel}, row {i}");
        }
    }
}
