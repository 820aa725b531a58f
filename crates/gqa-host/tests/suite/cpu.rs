//! The CPU back end in cases that random calls rarely reach: long and split work, edges of tiles,
//! NaN in hidden rows.

use gqa_host::backend::IoViews;
use gqa_host::backend::cpu::Cpu;
use gqa_host::engine::{Heads, Layer, Paged};
use gqa_host::op::{GroupQueryAttention, Inputs, KvCache, Outputs};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{DType, Error, Tensor, TensorView, TensorViewMut};
use ndarray::Array;

/// Numbers between -1 and 1.
struct Noise(u32);

impl Noise {
    fn numbers(&mut self, count: usize) -> Vec<f32> {
        let next = || {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (self.0 >> 8) as f32 / 8_388_608.0 - 1.0
        };
        std::iter::repeat_with(next).take(count).collect()
    }
}

/// A call with a shared cache: 8 query heads over 2 KV heads.
struct Call {
    op: GroupQueryAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: KvCache,
    seqlens_k: Tensor,
    total: Tensor,
}

const HEADS: usize = 8;
const KV_HEADS: usize = 2;

impl Call {
    /// `rows` new rows behind `past` old ones in each sequence; NaN behind them.
    fn new(dtype: DType, head_size: usize, rows: usize, past: &[usize]) -> Self {
        let mut noise = Noise(past.len() as u32);
        let batch = past.len();
        let mut tensor = |shape: &[usize]| {
            let numbers = noise.numbers(shape.iter().product());
            Tensor::from_f32(dtype, shape, &numbers).unwrap()
        };
        let longest = past.iter().max().unwrap() + rows;
        let shape = [batch, KV_HEADS, longest + 3, head_size];
        let lengths: Vec<i32> = past.iter().map(|past| (past + rows) as i32 - 1).collect();
        Self {
            op: GroupQueryAttention::new(HEADS as i64, KV_HEADS as i64).log_sum_exp(true),
            query: tensor(&[batch, rows, HEADS * head_size]),
            key: tensor(&[batch, rows, KV_HEADS * head_size]),
            value: tensor(&[batch, rows, KV_HEADS * head_size]),
            cache: KvCache {
                key: cache(dtype, shape, past, 1),
                value: cache(dtype, shape, past, 2),
                scales: None,
            },
            seqlens_k: Tensor::from(Array::from(lengths)),
            total: Tensor::from(Array::from(vec![longest as i32])),
        }
    }

    fn run(&self, backend: &dyn gqa_host::backend::Backend) -> (Outputs, KvCache) {
        let inputs = Inputs {
            key: Some(&self.key),
            value: Some(&self.value),
            ..Inputs::new(&self.query, &self.seqlens_k, &self.total)
        };
        let mut cache = self.cache.clone();
        let outputs = self.op.run_in_place(&inputs, &mut cache, backend).unwrap();
        (outputs, cache)
    }

    /// Asserts that the CPU's results match the reference.
    #[track_caller]
    fn check(&self, tolerance: f64) {
        let (got, cache) = self.run(&Cpu::default());
        let (want, want_cache) = self.run(&Reference);
        assert_eq!(cache.key.bytes(), want_cache.key.bytes());
        assert_eq!(cache.value.bytes(), want_cache.value.bytes());
        near(&got.output, &want.output, tolerance);
        near(&got.lse.unwrap(), &want.lse.unwrap(), 1e-4);
        assert_eq!(got.output_qk.is_some(), want.output_qk.is_some());
        got.output_qk
            .iter()
            .zip(&want.output_qk)
            .for_each(|(got, want)| near(got, want, tolerance));
    }
}

fn cache(dtype: DType, shape: [usize; 4], past: &[usize], seed: u32) -> Tensor {
    let [_, heads, rows, size] = shape;
    let mut numbers = Noise(seed).numbers(shape.iter().product());
    for (i, row) in numbers.chunks_exact_mut(size).enumerate() {
        if i % rows >= past[i / rows / heads] {
            row.fill(f32::NAN);
        }
    }
    Tensor::from_f32(dtype, &shape, &numbers).unwrap()
}

#[track_caller]
fn near(got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.shape(), want.shape());
    for (i, (got, want)) in got.to_f64().into_iter().zip(want.to_f64()).enumerate() {
        assert!(got == want || (got - want).abs() <= tolerance, "element {i}: {got}, want {want}");
    }
}

/// One token after thousands: keys in several parts, in different numbers for each sequence.
#[test]
fn tokens_after_long_pasts() {
    for past in [&[3000][..], &[1023, 1024, 2500], &[2047, 5]] {
        Call::new(DType::F32, 64, 1, past).check(2e-6);
    }
    let windowed = Call::new(DType::F32, 64, 1, &[2500, 1100]);
    Call { op: windowed.op.clone().local_window_size(1500).smooth_softmax(true), ..windowed }
        .check(2e-6);
}

/// Rows and keys one less and one more than a tile, a panel and a task.
#[test]
fn edges_of_tiles() {
    for rows in [15, 16, 17, 63, 64, 65] {
        Call::new(DType::F32, 24, rows, &[1, 62, 63, 64]).check(2e-6);
    }
    Call::new(DType::F32, 40, 130, &[0]).check(2e-6);
    let windowed = Call::new(DType::F32, 32, 150, &[0, 40]);
    Call { op: windowed.op.clone().local_window_size(66), ..windowed }.check(2e-6);
}

#[test]
fn half_types_and_scores() {
    for (dtype, ulp) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
        for (mode, rows) in [(1, 70), (2, 3)] {
            let call = Call::new(dtype, 128, rows, &[100, 7]);
            Call { op: call.op.clone().qk_output(mode).softcap(2.0), ..call }.check(ulp);
        }
    }
}

/// NaN in the newest row reaches the last token only, though rows are computed side by side.
#[test]
fn what_a_row_does_not_see_does_not_matter() {
    for rows in [2, 20] {
        let mut call = Call::new(DType::F32, 16, rows, &[50]);
        let last = (rows - 1) * KV_HEADS * 16;
        for tensor in [&mut call.key, &mut call.value] {
            let mut numbers: Vec<f32> = tensor.to_f64().into_iter().map(|x| x as f32).collect();
            numbers[last..].fill(f32::NAN);
            *tensor = Tensor::from_f32(DType::F32, &[1, rows, KV_HEADS * 16], &numbers).unwrap();
        }
        let (got, _) = call.run(&Cpu::default());
        let (want, _) = call.run(&Reference);
        let (got, want) = (got.output.to_f64(), want.output.to_f64());
        let finite = (rows - 1) * HEADS * 16;
        assert!(got[..finite].iter().zip(&want).all(|(got, want)| (got - want).abs() < 2e-6));
        assert!(got[finite..].iter().all(|x| x.is_nan()));
    }
}

/// The number of threads does not change the result.
#[test]
fn results_do_not_depend_on_threads() {
    for (rows, past) in [(1, 3000), (100, 300)] {
        let call = Call::new(DType::F32, 64, rows, &[past]);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| call.run(&Cpu::default()).0)
        };
        assert_eq!(run(1), run(3));
    }
}

#[test]
fn sequences_share_blocks_that_are_only_read() {
    // Two sequences of three tokens, the last two of them queries, in one block of four.
    let layer = Layer::new(DType::F32, Heads { query: 1, kv: 1, size: 8 });
    let call = Paged::new(2, 4, [1, 4, 1]).most_tokens(2).longest(3);
    let values: Vec<f32> = (0..4 * 8).map(|i| (i / 8) as f32).collect();
    let (query, mut keys, mut output) = (vec![0f32; 4 * 8], vec![0f32; 4 * 8], vec![9f32; 4 * 8]);
    let inputs = Tensors::default()
        .with(TensorId::Query, TensorView::from(&query[..]))
        .with(TensorId::SeqlensK, TensorView::I32(&[1, 1]))
        .with(TensorId::CumulativeSequenceLength, TensorView::I32(&[0, 2, 4]))
        .with(TensorId::BlockTable, TensorView::I32(&[0, 0]));
    let mut run = |call: Paged, inputs| {
        let mut values = values.clone();
        let problem = layer.paged(call)?;
        Cpu::default().run_on(
            &problem,
            &mut IoViews {
                inputs,
                output: TensorViewMut::F32(&mut output),
                present_key: TensorViewMut::F32(&mut keys).into(),
                present_value: TensorViewMut::F32(&mut values).into(),
                row_scales: None,
                output_qk: None,
                lse: None,
            },
        )?;
        Ok::<_, Error>([output[0], output[8], output[16], output[24]])
    };
    assert_eq!(run(call.appended(), inputs).unwrap(), [0.5, 1.0, 0.5, 1.0]);
    let new = TensorView::from(&query[..]);
    let inputs = inputs.with(TensorId::Key, new).with(TensorId::Value, new);
    let error = run(call, inputs).unwrap_err().to_string();
    assert!(error.starts_with("block_table: got row 1 of the cache for new token 1"), "{error}");
}
