//! Calls over given keys and values without a cache, on the CPU against the reference.

use gqa_host::backend::{Backend, Io, IoViews, cpu::Cpu};
use gqa_host::engine::{External, Heads, Layer, Rope};
use gqa_host::plan::{DeviceInfo, PlanOptions, Planner, TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{
    CacheView, DType, Result, RowStrides, Sink, Strided, Tensor, TensorView, TensorViewMut,
};

const HEADS: Heads = Heads { query: 4, kv: 2, size: 24 };

fn noise(shape: &[usize], seed: usize) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|i: usize| ((i * 7919 + seed * 31) * 104_729 % 10_007) as f32 / 5003.5 - 1.0)
        .collect();
    Tensor::from_f32(DType::F32, shape, &values).unwrap()
}

/// The bias; columns past the keys are NaN.
fn bias(shape: &[usize], keys: usize) -> Tensor {
    let mut values: Vec<f32> = noise(shape, 5).to_f64().into_iter().map(|x| x as f32).collect();
    values.chunks_mut(shape[3]).for_each(|row| row[keys..].fill(f32::NAN));
    Tensor::from_f32(DType::F32, shape, &values).unwrap()
}

/// Output and log-sum-exp of a call of 2 sequences.
fn run(backend: &dyn Backend, layer: &Layer, call: External, lengths: [i32; 2]) -> [Tensor; 2] {
    let problem = layer.external(call.log_sum_exp()).unwrap();
    let [batch, rows, width] = problem.query_shape()[..] else { unreachable!() };
    let query = noise(&[batch, rows, width], 1);
    let [key, value] = [2, 3].map(|seed| noise(&problem.key_shape(), seed));
    let last = Tensor::from(ndarray::arr1(&lengths.map(|length| length - 1)));
    let sinks = noise(&[HEADS.query], 4);
    let bias = problem.bias_shape().map(|shape| bias(&shape, problem.key_shape()[1]));
    let mut output = Tensor::zeros(DType::F32, &[batch, rows, width]);
    let mut lse = Tensor::zeros(DType::F32, &[batch, HEADS.query, rows]);
    let mut none = [0; 2].map(|_| Tensor::zeros(DType::F32, &[0]));
    let [present_key, present_value] = &mut none;
    let inputs = Tensors::default()
        .with(TensorId::Query, &query)
        .with(TensorId::Key, &key)
        .with(TensorId::Value, &value)
        .with(TensorId::SeqlensK, &last)
        .with(TensorId::AttentionBias, bias.as_ref())
        .with(TensorId::HeadSink, (problem.sink == Sink::PerHead).then_some(&sinks));
    let mut io = Io {
        inputs,
        output: &mut output,
        present_key,
        present_value,
        row_scales: None,
        output_qk: None,
        lse: Some(&mut lse),
    };
    backend.run(&problem, &mut io).unwrap();
    [output, lse]
}

#[test]
fn lengths_windows_and_sinks_are_those_of_the_definition() {
    let layer = Layer::new(DType::F32, HEADS);
    let calls = [
        (layer.clone(), External::new(2, 5, 5), [5, 5]),
        (layer.clone(), External::new(2, 3, 9), [9, 9]),
        (layer.clone(), External::new(2, 9, 3), [3, 3]),
        (layer.clone(), External::new(2, 3, 9).shortest(0), [9, 1]),
        (layer.clone().window(2).sink(Sink::PerHead), External::new(2, 4, 9), [9, 9]),
        (layer.clone().bidirectional(), External::new(2, 4, 9).right_window(2), [9, 9]),
        (layer.clone(), External::new(2, 4, 9).bias(true, false).bias_columns(12), [9, 9]),
        (layer.clone(), External::new(2, 4, 9).bias(false, true).shortest(4), [5, 9]),
        (layer.bidirectional().window(3).softcap(2.0), External::new(2, 6, 6), [6, 6]),
    ];
    for (layer, call, lengths) in calls {
        let got = run(&Cpu::default(), &layer, call, lengths);
        let wanted = run(&Reference, &layer, call, lengths);
        for (got, wanted) in got.iter().zip(&wanted) {
            for (got, wanted) in got.to_f64().into_iter().zip(wanted.to_f64()) {
                let near = got == wanted || (got - wanted).abs() < 1e-5;
                assert!(near, "{got} instead of {wanted}: {layer:?}, {call:?}");
            }
        }
    }
}

/// Rows of keys and values that all share the same memory (stride 0).
#[test]
fn keys_may_have_a_stride_of_0() -> Result<()> {
    let heads = Heads { query: 1, kv: 1, size: 8 };
    let one = RowStrides { batch: 0, head: 8, row: 0 };
    let mut strided = Strided::default();
    (strided.key, strided.value) = (Some(one), Some(one));
    let problem =
        Layer::new(DType::F32, heads).external(External::new(1, 1, 70).strides(strided))?;
    let (row, mut output) = ([0.0f32, 1., 2., 3., 4., 5., 6., 7.], [0.0f32; 8]);
    let tensor = TensorView::F32(&row);
    let inputs = Tensors::default()
        .with(TensorId::Query, tensor)
        .with(TensorId::Key, tensor)
        .with(TensorId::Value, tensor)
        .with(TensorId::SeqlensK, TensorView::I32(&[69]));
    let [present_key, present_value] = [CacheView::NONE; 2];
    Cpu::default().run_on(
        &problem,
        &mut IoViews {
            inputs,
            output: TensorViewMut::F32(&mut output),
            present_key,
            present_value,
            row_scales: None,
            output_qk: None,
            lse: None,
        },
    )?;
    assert!(output.iter().zip(row).all(|(got, wanted)| (got - wanted).abs() < 1e-5), "{output:?}");
    Ok(())
}

#[test]
fn prefill_takes_the_fast_kernels_of_a_gpu() -> Result<()> {
    let heads = Heads { query: 32, kv: 8, size: 128 };
    let layer = Layer::new(DType::BF16, heads).sink(Sink::PerHead);
    let planner = Planner::new(DeviceInfo::h200(), PlanOptions::default());
    for (call, family) in [
        (External::new(2, 2048, 2048), "hopper"),
        (External::new(2, 512, 4096).shortest(512).log_sum_exp(), "hopper"),
        (External::new(2, 512, 4096).shortest(511), "general"),
        (External::new(2, 512, 512).mask(true, false), "hopper_masked"),
        (External::new(2, 256, 509).mask(true, false), "tiled_masked"),
        (External::new(2, 256, 509).mask(true, false).bias_columns(512), "hopper_masked"),
        (External::new(2, 256, 509).bias(true, false).bias_columns(512), "hopper_masked"),
    ] {
        let plan = planner.plan(&layer.external(call)?)?;
        let entry = plan.launches()[0].entry();
        assert!(
            entry.name.starts_with(&format!("gqa_{family}")),
            "{} instead of {family}",
            entry.name
        );
    }
    Ok(())
}

#[test]
fn what_keys_in_place_cannot_have_is_refused() {
    let layer = Layer::new(DType::F32, HEADS);
    let call = External::new(1, 1, 1);
    for (layer, named) in [
        (layer.clone().rope(Rope::new(16, 8)), "rope"),
        (layer.qk_norm(1e-6), "qk_norm"),
        (Layer::new(DType::F64, HEADS), "dtype"),
        (Layer::new(DType::F32, Heads { query: 3, ..HEADS }), "heads.kv"),
        (Layer::new(DType::F32, Heads { size: 0, ..HEADS }), "heads.size: got 0; allowed: 1 to "),
    ] {
        let error = layer.external(call).unwrap_err().to_string();
        assert!(error.starts_with(named), "{error}");
    }
    let short = External::new(1, 1, 9).mask(false, false).bias_columns(8);
    let error = Layer::new(DType::F32, HEADS).external(short).unwrap_err().to_string();
    assert!(error.starts_with("bias_columns: got 8"), "{error}");
}
