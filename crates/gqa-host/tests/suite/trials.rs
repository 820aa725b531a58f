//! The small calls by which kernels are tested on GPUs that the project never ran on, on the
//! simulated GPU: right kernels agree with simpler ones, and wrong results are found.

use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Io, Machine};
use gqa_host::engine::{Dense, Heads, Layer, Paged, Rope};
use gqa_host::plan::{DeviceInfo, Plan, PlanOptions, TensorId, TensorSpec, Tensors, plan};
use gqa_host::sample::{Trial, agree, tensors};
use gqa_host::{DType, Problem, QuantFormat, Quantization, Scales, Sink, Tensor};
use std::collections::BTreeSet;

/// What a plan writes.
fn computed(plan: &Plan, read: &[(TensorId, Tensor)]) -> Vec<(TensorId, Tensor)> {
    let problem = plan.problem();
    let given = |id| read.iter().find(|(known, _)| *known == id).map(|(_, tensor)| tensor.clone());
    let written = |id: TensorId| {
        let spec = id.spec(problem)?;
        given(id).or_else(|| Some(Tensor::zeros(spec.dtype, &spec.shape)))
    };
    let ids = [TensorId::Output, TensorId::PresentKey, TensorId::PresentValue];
    let [mut output, mut key, mut value] = ids.map(|id| written(id).unwrap());
    let scales = [TensorId::KRowScale, TensorId::VRowScale];
    let mut row_scales = scales.map(written);
    let inputs = read.iter().filter(|(id, _)| !id.is_output()).map(|(id, tensor)| (*id, tensor));
    let [k_scale, v_scale] = &mut row_scales;
    let mut io = Io {
        inputs: inputs.collect::<Tensors<_>>(),
        output: &mut output,
        present_key: &mut key,
        present_value: &mut value,
        row_scales: k_scale.as_mut().zip(v_scale.as_mut()).map(|(k, v)| [k, v]),
        output_qk: None,
        lse: None,
    };
    let sim = Sim::default().with_device(plan.device().clone());
    sim.execute(plan, &mut io).unwrap();
    let written = ids.into_iter().zip([output, key, value]);
    let scales = scales.into_iter().zip(row_scales);
    written.chain(scales.filter_map(|(id, tensor)| Some((id, tensor?)))).collect()
}

/// Whether a trial's plans agree, by the difference that is found.
fn difference(trial: &Trial, spoil: impl Fn(&mut [u8])) -> Option<String> {
    let problem = trial.tested.problem();
    let read = tensors(problem, 3).unwrap();
    let (mut got, want) = (computed(&trial.tested, &read), computed(&trial.plain, &read));
    got.iter_mut().for_each(|(_, tensor)| tensor.with_bytes_mut(&spoil));
    got.iter().zip(&want).find_map(|((id, got), (_, want))| agree(problem, *id, got, want).err())
}

/// Calls with few heads.
fn calls() -> Vec<(&'static str, Problem)> {
    let plain = |dtype, size| Layer::new(dtype, Heads { query: 4, kv: 2, size });
    let layer = |dtype, size| plain(dtype, size).rope(Rope::new(16, 2000));
    let (half, single) = (layer(DType::BF16, 64), layer(DType::F32, 64));
    let quantized =
        |format, scales| layer(DType::F16, 64).quantized(Quantization { format, scales });
    let dense = |layer: &Layer, rows| layer.dense(Dense::chunk(2, rows, 500).longest(200)).unwrap();
    let paged = |layer: &Layer| {
        layer.paged(Paged::new(3, 70, [90, 16, 20]).most_tokens(68).longest(200)).unwrap()
    };
    let ragged =
        |layer: &Layer| layer.paged(Paged::new(3, 160, [90, 16, 20]).most_tokens(150)).unwrap();
    vec![
        ("b200", dense(&half, 1)),
        ("b200", dense(&half, 70)),
        ("b200", dense(&half, 150)),
        ("b200", ragged(&plain(DType::BF16, 64))),
        ("b200", paged(&half)),
        ("b200", half.paged(Paged::decode(3, [90, 16, 20])).unwrap()),
        ("b300", dense(&quantized(QuantFormat::Float8, Scales::PerHead), 1)),
        ("rtx5090", half.paged(Paged::decode(3, [90, 16, 20])).unwrap()),
        ("a100", dense(&half.clone().window(60).sink(Sink::PerHead), 1)),
        ("a100", dense(&half.clone().softcap(20.0), 70)),
        ("a100", dense(&single, 40)),
        ("rtx4090", dense(&layer(DType::F16, 288), 20)),
        ("rtx4090", dense(&quantized(QuantFormat::Int8, Scales::PerToken), 1)),
        ("rtx4090", dense(&quantized(QuantFormat::Float4, Scales::PerChannel), 1)),
        ("rtx4090", paged(&quantized(QuantFormat::Float8, Scales::PerTensor))),
        ("t4", dense(&layer(DType::F16, 64), 70)),
    ]
}

#[test]
fn right_kernels_agree_with_simpler_ones_and_wrong_results_are_found() {
    let mut tested = BTreeSet::new();
    for (name, problem) in calls() {
        let device = DeviceInfo::known(name).unwrap();
        let call = plan(&problem, &device, &PlanOptions::default()).unwrap();
        assert!(!call.unproven().is_empty(), "{name}: {problem}");
        for entry in call.unproven() {
            let trial = Trial::of(entry, &call).unwrap();
            let bytes = |(_, spec): &(TensorId, TensorSpec)| spec.bytes();
            let all: usize = trial.tested.tensors().iter().map(bytes).sum();
            assert!(all < 8 << 20, "{}: {all} bytes", entry.name);
            assert_eq!(difference(&trial, |_| ()), None, "{name}: {}", entry.name);
            // The last element: its sign.
            let found = difference(&trial, |bytes| {
                if let Some(last) = bytes.last_mut() {
                    *last ^= 0xc0;
                }
            });
            assert!(found.is_some(), "{name}: {}", entry.name);
            tested.insert(entry.family.name());
        }
    }
    let want = [
        "blackwell",
        "blackwell_decode",
        "blackwell_decode_paged",
        "blackwell_paged",
        "decode",
        "decode_quantized",
        "tiled",
        "tiled_f32",
        "tiled_paged",
    ];
    assert!(want.iter().all(|family| tested.contains(family)), "{tested:?}");
}
