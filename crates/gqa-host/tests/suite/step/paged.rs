//! Calls over a paged KV cache: three sequences with new tokens after 5, 30 and 0 rows.

use super::{int, random};
use gqa_host::backend::{Backend, Io};
use gqa_host::engine::{Heads, Layer, Paged, Rope};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{DType, Problem, RowStrides, Tensor};

/// The call with contiguous tensors, and with slices of larger ones: one that holds the tokens'
/// heads of query, key and value side by side, and one that holds keys and values.
pub fn problems(rotated: bool, new: [i32; 3]) -> [Problem; 2] {
    let layer = Layer::new(DType::F16, Heads { query: 4, kv: 2, size: 64 });
    let layer = if rotated { layer.rope(Rope::new(64, 64)) } else { layer };
    let tokens = new.iter().sum::<i32>() as usize;
    let most = new.into_iter().max().unwrap_or_default() as usize;
    let call = Paged::new(3, tokens, [16, 16, 3]).most_tokens(most).longest(48);
    let strides = RowStrides { batch: 0, head: 64, row: (4 + 2 * 2) * 64 + 8 };
    let strided = call.query_strides(strides).key_value_strides(strides);
    // Keys and values of a block side by side, head by head, with something behind each block.
    let cache = RowStrides { batch: 2 * 16 * 128 + 8, head: 16 * 128, row: 128 };
    let strided = strided.cache_strides(cache);
    [call, strided].map(|call| layer.paged(call).unwrap())
}

/// Output and caches of three sequences with these numbers of new tokens after 5, 30 and 0 rows.
pub fn run(problem: &Problem, new: [i32; 3], backend: &dyn Backend) -> [Tensor; 3] {
    let cache = |seed| random(DType::F16, &[16, 16, 2, 64], seed);
    run_over(problem, new, [cache(4), cache(5)], backend)
}

/// The same over caches that hold something.
pub fn run_over(
    problem: &Problem,
    new: [i32; 3],
    [key_cache, value_cache]: [Tensor; 2],
    backend: &dyn Backend,
) -> [Tensor; 3] {
    let tokens = new.iter().sum::<i32>();
    let f16 = |shape: &[usize], seed| random(DType::F16, shape, seed);
    let of_tokens = |width, seed| f16(&[tokens as usize, width], seed);
    let [query, key, value] = [(256, 1), (128, 2), (128, 3)].map(|(n, seed)| of_tokens(n, seed));
    let (starts, past) = (int(&[0, new[0], new[0] + new[1], tokens]), int(&[5, 30, 0]));
    let table = (0..9).map(|i| (i * 7 + 3) % 16).collect::<Vec<i32>>();
    let table = Tensor::from(ndarray::Array::from_shape_vec((3, 3), table).unwrap());
    let (cos, sin) = (f16(&[64, 32], 6), f16(&[64, 32], 7));
    let mut outputs = [Tensor::zeros(DType::F16, query.shape()), key_cache, value_cache];
    let [output, present_key, present_value] = &mut outputs;
    let inputs = Tensors::default()
        .with(TensorId::Query, &query)
        .with(TensorId::Key, (problem.new_len > 0).then_some(&key))
        .with(TensorId::Value, (problem.new_len > 0).then_some(&value))
        .with(TensorId::SeqlensK, &past)
        .with(TensorId::CumulativeSequenceLength, &starts)
        .with(TensorId::BlockTable, &table)
        .with(TensorId::CosCache, problem.rotary.map(|_| &cos))
        .with(TensorId::SinCache, problem.rotary.map(|_| &sin));
    let mut io = Io {
        inputs,
        output,
        present_key,
        present_value,
        row_scales: None,
        output_qk: None,
        lse: None,
    };
    backend.run(problem, &mut io).unwrap();
    outputs
}
