//! Output in float8e4m3fn with a scale: every back end rounds the reference's result, by kernels
//! that write float8 and by a launch that quantizes afterwards.

use crate::step::{int, random, tolerance};
use gqa_host::backend::Backend;
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::engine::{Dense, Heads, Layer};
use gqa_host::op::{GroupQueryAttention, Inputs, KvCache, Outputs, Shapes};
use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
use gqa_host::reference::Reference;
use gqa_host::{CacheBinding, DType, Layout, Tensor, TensorDesc};

const CAPACITY: usize = 200;

/// `rows` new rows in two sequences, the longer with `total` rows afterwards, in heads of `size`.
#[derive(Clone, Copy, Debug)]
struct Call {
    dtype: DType,
    size: usize,
    rows: usize,
    total: usize,
    scale: f32,
    layout: Layout,
    lse: bool,
}

impl Call {
    const fn new(dtype: DType, size: usize, rows: usize, total: usize) -> Self {
        Self { dtype, size, rows, total, scale: 0.01, layout: Layout::Bsnh, lse: false }
    }

    fn operator(&self) -> GroupQueryAttention {
        GroupQueryAttention::new(8, 2).do_rotary(true).layout(self.layout).log_sum_exp(self.lse)
    }

    /// The outputs with a scale, and in float32.
    fn run(&self, backend: &dyn Backend, with_scale: bool) -> Outputs {
        let Self { dtype, size, rows, .. } = *self;
        let new = |heads: usize, seed| match self.layout {
            Layout::Bsnh => random(dtype, &[2, rows, heads * size], seed),
            Layout::Bnsh => random(dtype, &[2, heads, rows, size], seed),
        };
        let (query, key, value) = (new(8, 1), new(2, 2), new(2, 3));
        let [cos, sin] = [4, 5].map(|seed| random(dtype, &[CAPACITY, size / 2], seed));
        let cache = |seed| random(dtype, &[2, 2, CAPACITY, size], seed);
        let mut cache = KvCache { key: cache(6), value: cache(7), scales: None };
        let shorter = (self.total / 2).max(if self.total == rows { 1 } else { rows });
        let seqlens_k = int(&[self.total as i32 - 1, shorter as i32 - 1]);
        let (total, scale) =
            (int(&[self.total as i32]), Tensor::from(ndarray::arr1(&[self.scale])));
        let inputs = Inputs {
            key: Some(&key),
            value: Some(&value),
            cos_cache: Some(&cos),
            sin_cache: Some(&sin),
            output_scale: with_scale.then_some(&scale),
            ..Inputs::new(&query, &seqlens_k, &total)
        };
        let operator = self.operator().float32_output(!with_scale);
        operator.run_in_place(&inputs, &mut cache, backend).unwrap()
    }

    /// Errs at the first element that is not one of the two neighbours of the expected value.
    fn check(&self, backend: &dyn Backend, what: &str) {
        const LARGEST: f64 = 448.0;
        let (got, want) = (self.run(backend, true), self.run(&Reference, false));
        assert_eq!(got.output.dtype(), DType::F8E4M3, "{what}");
        assert_eq!(got.output.shape(), want.output.shape(), "{what}");
        let scale = f64::from(self.scale);
        for (i, (got, want)) in
            got.output.to_f64().into_iter().zip(want.output.to_f64()).enumerate()
        {
            let off = (got - (want / scale).clamp(-LARGEST, LARGEST)).abs() * scale;
            // Half of the distance to the next value, for normal and for small ones.
            let rounding = (want.abs() / 16.0).max(scale / 1024.0);
            let allowed = rounding + 2.0 * tolerance(self.dtype) * (1.0 + want.abs());
            assert!(off <= allowed, "{what}, {self:?}: element {i} is {got} · {scale}, not {want}");
        }
        if self.lse {
            let [got, want] = [got, want].map(|outputs| outputs.lse.unwrap().to_f64());
            let is_close = |(got, want): (f64, f64)| {
                got == want || (got - want).abs() <= 20.0 * tolerance(self.dtype)
            };
            assert!(got.into_iter().zip(want).all(is_close), "{what}: lse");
        }
    }

    /// Names of the kernels of a plan.
    fn kernels(&self, device: &DeviceInfo, options: &PlanOptions) -> Vec<&'static str> {
        let layer = Layer::new(self.dtype, Heads { query: 8, kv: 2, size: self.size })
            .rope(gqa_host::engine::Rope::new(self.size, CAPACITY));
        let call = match self.rows == self.total {
            true => Dense::prefill(2, self.rows, CAPACITY),
            false => Dense::chunk(2, self.rows, CAPACITY).longest(self.total),
        };
        let call = call.layout(self.layout).float8_output();
        let problem = layer.dense(if self.lse { call.log_sum_exp() } else { call }).unwrap();
        let plan = plan(&problem, device, options).unwrap();
        plan.launches().iter().map(|launch| launch.entry().name).collect()
    }
}

#[test]
fn back_ends_without_kernels_round_what_the_definition_gives() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, total) in [(1, 150), (9, 9), (5, 60)] {
            let call = Call::new(dtype, 32, rows, total);
            call.check(&Reference, "reference");
            call.check(&Cpu::default(), "cpu");
            // All but the smallest are the largest.
            Call { scale: 1e-4, ..call }.check(&Cpu::default(), "cpu");
        }
    }
}

#[test]
fn kernels_of_hopper_write_it() {
    let h200 = DeviceInfo::h200();
    let shaped = |cluster, splits| PlanOptions {
        cluster: Some(cluster),
        splits: Some(splits),
        ..PlanOptions::default()
    };
    let off = PlanOptions::default;
    for (call, options, kernel) in [
        (Call::new(DType::F16, 128, 1, 150), off(), "gqa_decode_f16_d128_r8"),
        (Call::new(DType::BF16, 64, 1, 150), shaped(2, 1), "gqa_decode_bf16_d64_r8"),
        (Call::new(DType::F16, 96, 3, 190), shaped(1, 3), "gqa_decode_f16_d96_r16"),
        (Call::new(DType::BF16, 256, 2, 150), shaped(2, 2), "gqa_decode_bf16_d256_r8"),
        (Call::new(DType::F16, 64, 100, 100), off(), "gqa_hopper_f16_d64_r128"),
        (Call::new(DType::BF16, 128, 70, 190), off(), "gqa_hopper_bf16_d128"),
        (Call::new(DType::F16, 80, 66, 66), off(), "gqa_hopper_f16_d80_r128"),
        (Call::new(DType::BF16, 256, 64, 64), off(), "gqa_hopper_bf16_d256"),
        (Call::new(DType::BF16, 96, 70, 70), off(), "gqa_hopper_bf16_d96_r128"),
        (Call::new(DType::F16, 160, 64, 64), off(), "gqa_hopper_f16_d160"),
        (Call::new(DType::F16, 192, 66, 66), off(), "gqa_hopper_f16_d192"),
        (Call::new(DType::BF16, 224, 64, 64), off(), "gqa_hopper_bf16_d224"),
    ] {
        for layout in [Layout::Bsnh, Layout::Bnsh] {
            let call = Call { layout, ..call };
            let kernels = call.kernels(&h200, &options);
            assert_eq!(kernels.last(), Some(&kernel), "{call:?}: {kernels:?}");
            call.check(&Sim::default().with_options(options.clone()), kernel);
        }
    }
}

#[test]
fn behind_other_kernels_a_launch_does() {
    let name = |name: &str| DeviceInfo::known(name).unwrap();
    let with_lse = |call| Call { lse: true, ..call };
    for (call, device, before) in [
        (Call::new(DType::F32, 64, 20, 20), name("h200"), "gqa_tiled_f32_d64"),
        (Call::new(DType::F16, 112, 100, 150), name("a100"), "gqa_tiled_f16_d128_k64"),
        (Call::new(DType::BF16, 64, 3, 60), name("v100"), "gqa_general_bf16"),
        (with_lse(Call::new(DType::BF16, 128, 64, 64)), name("h200"), "gqa_hopper_bf16_d128"),
    ] {
        let kernels = call.kernels(&device, &PlanOptions::default());
        assert!(kernels.contains(&before), "{kernels:?}");
        assert!(kernels.last().unwrap().starts_with("gqa_quantize_output_"), "{kernels:?}");
        call.check(&Sim::default().with_device(device), before);
    }
}

#[test]
fn a_scale_that_is_none_is_refused() {
    let query = Tensor::zeros(DType::F16, &[1, 1, 64]);
    let (last, total) = (int(&[0]), int(&[1]));
    let refused = |scale: Tensor, float32: bool| {
        let inputs = Inputs {
            key: Some(&query),
            value: Some(&query),
            output_scale: Some(&scale),
            ..Inputs::new(&query, &last, &total)
        };
        let operator = GroupQueryAttention::new(1, 1).float32_output(float32);
        operator.problem(&inputs, CacheBinding::Separate).unwrap_err().to_string()
    };
    let numbers = |values: &[f32]| Tensor::from(ndarray::arr1(values));
    for (scale, float32, want) in [
        (numbers(&[1.0, 2.0]), false, "float32, one element"),
        (Tensor::zeros(DType::F16, &[1]), false, "float32, one element"),
        (numbers(&[0.0]), false, "finite numbers other than 0"),
        (numbers(&[f32::NAN]), false, "finite numbers other than 0"),
        (numbers(&[1.0]), true, "no input, with float32_output"),
    ] {
        let got = refused(scale, float32);
        assert!(got.contains("output_scale") && got.contains(want), "{got}");
    }
}

/// Shapes alone may say anything.
#[test]
fn the_scale_is_one_element_however_large_its_shape() {
    let new = TensorDesc { dtype: DType::F32, shape: &[1, 1, 16] };
    let last = TensorDesc { dtype: DType::I32, shape: &[1] };
    let of = |scale: &[usize]| {
        let shapes = Shapes {
            key: Some(new),
            value: Some(new),
            output_scale: Some(TensorDesc { dtype: DType::F32, shape: scale }),
            ..Shapes::new(new, last, 1)
        };
        let operator = GroupQueryAttention::new(1, 1);
        operator.problem_from_shapes(&shapes, CacheBinding::Separate).map(|p| p.out_dtype)
    };
    for odd in [&[usize::MAX, usize::MAX][..], &[2, 0], &[3]] {
        let error = of(odd).unwrap_err().to_string();
        assert!(error.starts_with("output_scale: got float32 "), "{error}");
    }
    assert_eq!(of(&[1, 1]).unwrap(), DType::F8E4M3);
    assert_eq!(of(&[]).unwrap(), DType::F8E4M3);
}
