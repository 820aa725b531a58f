//! Per-token scales of a quantized KV cache: rows with extreme values.

use gqa_host::backend::cpu::Cpu;
#[cfg(feature = "sim")]
use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io};
use gqa_host::engine::{Dense, Heads, Layer, Paged};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem, QuantFormat, Quantization, Scales, Tensor};
use ndarray::{Array1, Array2};

const SIZE: usize = 32;

/// Rows whose largest number is 6.35, 0, subnormal when divided, infinite, and next to NaN.
fn rows() -> Vec<f32> {
    let mut rows = Array2::from_shape_fn((5, SIZE), |(_, i)| i as f32 * 0.1 - 3.0);
    rows[[0, 31]] = -6.35;
    rows.row_mut(1).fill(0.0);
    rows.row_mut(2).mapv_inplace(|x| x * f32::MIN_POSITIVE);
    rows[[3, 4]] = f32::INFINITY;
    rows[[4, 5]] = f32::NAN;
    rows.into_iter().collect()
}

fn backends() -> Vec<Box<dyn Backend>> {
    vec![
        Box::new(Reference),
        Box::new(Cpu::default()),
        #[cfg(feature = "sim")]
        Box::new(Sim::default()),
    ]
}

fn layer(format: QuantFormat) -> Layer {
    let how = Quantization { format, scales: Scales::PerToken };
    Layer::new(DType::F32, Heads { query: 1, kv: 1, size: SIZE }).quantized(how)
}

/// Quantized keys and the scales of all rows after the call.
fn appended(problem: &Problem, inputs: Tensors<&Tensor>, backend: &dyn Backend) -> [Tensor; 2] {
    let poisoned = |dtype, shape: &[usize]| {
        let mut tensor = Tensor::zeros(dtype, shape);
        tensor.with_bytes_mut(|bytes| bytes.fill(0xff));
        tensor
    };
    let zeros = || Tensor::zeros(problem.key_cache_dtype(), &problem.key_cache_shape(8));
    let scales = || poisoned(DType::F32, &problem.row_scales_shape().unwrap());
    let (mut key, mut value, mut k_scale, mut v_scale) = (zeros(), zeros(), scales(), scales());
    let mut output = poisoned(DType::F32, &problem.output_shape());
    let mut io = Io {
        inputs,
        output: &mut output,
        present_key: &mut key,
        present_value: &mut value,
        row_scales: Some([&mut k_scale, &mut v_scale]),
        output_qk: None,
        lse: None,
    };
    backend.run(problem, &mut io).unwrap();
    assert_eq!(k_scale.bytes(), v_scale.bytes(), "keys are values");
    [key, k_scale]
}

/// What is where rows 0 to 4 are.
#[track_caller]
fn check(backend: &str, format: QuantFormat, [codes, scales]: [Tensor; 2]) {
    let Tensor::F32(scales) = scales else { panic!("float32") };
    let scales: Vec<f32> = scales.iter().copied().collect();
    let most = match format {
        QuantFormat::Int8 => 127.0,
        QuantFormat::Int4 => 7.0,
        QuantFormat::Float4 => 6.0,
        QuantFormat::Float8 => 448.0,
    };
    assert_eq!(&scales[..5], [6.35 / most, 1.0, 1.0, 1.0, 1.0], "{backend} {format}");
    assert!(scales[5..].iter().all(|scale| scale.is_nan()), "{backend} {format}");
    let bytes = codes.bytes().chunks(codes.bytes().len() / 8).collect::<Vec<_>>();
    let zero = if format == QuantFormat::Int4 { 0x88 } else { 0 };
    for row in [1, 2] {
        // Zeros of floats may have a sign.
        let sizes = if format == QuantFormat::Float4 { 0x77 } else { 0x7f };
        assert!(bytes[row].iter().all(|byte| byte & sizes == zero & sizes), "{backend} {format}");
    }
    let last = bytes[0][bytes[0].len() - 1];
    match format {
        QuantFormat::Int8 => assert_eq!(last as i8, -127, "{backend}"),
        QuantFormat::Int4 => assert_eq!(last >> 4, 1, "{backend}"),
        QuantFormat::Float8 => assert_eq!(last, 0xfe, "{backend}"),
        QuantFormat::Float4 => assert_eq!(last >> 4, 0xf, "{backend}"),
    }
    // Finite values next to an infinity or NaN are quantized with scale 1.
    assert_eq!(bytes[3][15], bytes[4][15], "{backend} {format}");
}

const FORMATS: [QuantFormat; 4] = QuantFormat::ALL;

#[test]
fn of_a_cache_of_each_sequence() {
    for format in FORMATS {
        let problem = layer(format).dense(Dense::prefill(1, 5, 8)).unwrap();
        let rows = Tensor::from_f32(DType::F32, &[1, 5, SIZE], &rows()).unwrap();
        let last = Tensor::from(Array1::from(vec![4]));
        let inputs = Tensors::default()
            .with(TensorId::Query, &rows)
            .with(TensorId::Key, &rows)
            .with(TensorId::Value, &rows)
            .with(TensorId::SeqlensK, &last);
        for backend in backends() {
            check(backend.name(), format, appended(&problem, inputs, &*backend));
        }
    }
}

#[test]
fn of_a_paged_cache() {
    for format in FORMATS {
        let problem = layer(format).paged(Paged::new(1, 5, [1, 8, 1])).unwrap();
        let rows = Tensor::from_f32(DType::F32, &[5, SIZE], &rows()).unwrap();
        let [starts, past, table] =
            [vec![0, 5], vec![0], vec![0]].map(|x| Tensor::from(Array1::from(x)));
        let inputs = Tensors::default()
            .with(TensorId::Query, &rows)
            .with(TensorId::Key, &rows)
            .with(TensorId::Value, &rows)
            .with(TensorId::CumulativeSequenceLength, &starts)
            .with(TensorId::SeqlensK, &past)
            .with(TensorId::BlockTable, &table);
        for backend in backends() {
            check(backend.name(), format, appended(&problem, inputs, &*backend));
        }
    }
}
