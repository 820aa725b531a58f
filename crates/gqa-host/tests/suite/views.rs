//! The CPU back end on memory of the caller's.

use gqa_host::backend::{Backend, Io, IoViews, cpu::Cpu};
use gqa_host::engine::{Dense, Heads, Layer, Paged};
use gqa_host::op::{Attention, AttentionInputs, AttentionShapes};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{
    CacheView, DType, Problem, RowStrides, Strided, Tensor, TensorDesc, TensorView, TensorViewMut,
};

fn noise(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 31) * 104_729 % 10_007) as f32 / 5003.5 - 1.0).collect()
}

fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_f32(DType::F32, shape, values).unwrap()
}

fn views<'a>(
    inputs: Tensors<TensorView<'a>>,
    output: &'a mut [f32],
    [present_key, present_value]: [CacheView<'a>; 2],
) -> IoViews<'a> {
    IoViews {
        inputs,
        output: TensorViewMut::F32(output),
        present_key,
        present_value,
        row_scales: None,
        output_qk: None,
        lse: None,
    }
}

#[test]
fn a_decode_step_appends_to_memory_of_the_callers() {
    let layer = Layer::new(DType::F32, Heads { query: 4, kv: 2, size: 16 });
    let step = layer.dense(Dense::decode(2, 40)).unwrap();
    let (query, key, value) = (noise(128, 1), noise(64, 2), noise(64, 3));
    let [mut keys, mut values] = [noise(2 * 2 * 40 * 16, 4), noise(2 * 2 * 40 * 16, 5)];
    let last = [30, 7];

    let mut output = tensor(&[2, 1, 64], &[0.0; 128]);
    let [mut present_key, mut present_value] =
        [&keys, &values].map(|cache| tensor(&[2, 2, 40, 16], cache));
    let [q, k, v] = [(&query, 64), (&key, 32), (&value, 32)].map(|(x, n)| tensor(&[2, 1, n], x));
    let lengths = Tensor::from(ndarray::arr1(&last));
    let inputs = Tensors::default()
        .with(TensorId::Query, &q)
        .with(TensorId::Key, &k)
        .with(TensorId::Value, &v)
        .with(TensorId::SeqlensK, &lengths);
    let mut io = Io {
        inputs,
        output: &mut output,
        present_key: &mut present_key,
        present_value: &mut present_value,
        row_scales: None,
        output_qk: None,
        lse: None,
    };
    Cpu::default().run(&step, &mut io).unwrap();

    let inputs = Tensors::default()
        .with(TensorId::Query, TensorView::F32(&query))
        .with(TensorId::Key, TensorView::F32(&key))
        .with(TensorId::Value, TensorView::F32(&value))
        .with(TensorId::SeqlensK, TensorView::I32(&last));
    let mut got = vec![0.0; 128];
    let mut io = views(
        inputs,
        &mut got,
        [&mut keys[..], &mut values[..]].map(|x| TensorViewMut::from(x).into()),
    );
    Cpu::default().run_on(&step, &mut io).unwrap();
    assert_eq!(tensor(&[2, 1, 64], &got), output);
    assert_eq!(tensor(&[2, 2, 40, 16], &keys), present_key);
    assert_eq!(tensor(&[2, 2, 40, 16], &values), present_value);
    assert_eq!(values[30 * 16..31 * 16], value[..16]);
}

const SHAPE: [usize; 4] = [2, 5, 4, 24];

/// Attention of (batch, rows, heads, size) as [`SHAPE`] says to 9 keys of 2 heads.
fn attention(strided: Strided) -> Problem {
    let [batch, rows, heads, size] = SHAPE;
    let (query, key) = ([batch, rows, heads * size], [batch, 9, 2 * size]);
    let desc = |shape| TensorDesc { dtype: DType::F32, shape };
    let shapes = AttentionShapes {
        q: desc(&query),
        k: desc(&key),
        v: desc(&key),
        attn_mask: None,
        past_key: None,
        past_value: None,
        nonpad_kv_seqlen: Some(TensorDesc { dtype: DType::I64, shape: &[2] }),
    };
    let op = Attention::new().num_heads(4, 2).is_causal(1);
    op.problem_from_shapes(&shapes).unwrap().with_strides(strided).unwrap()
}

/// (batch, rows, heads, size) as (batch, heads, rows, size), with 8 elements between rows.
fn transposed(values: &[f32], [batch, rows, heads, size]: [usize; 4]) -> (Vec<f32>, RowStrides) {
    let row = size + 8;
    let strides = RowStrides { batch: heads * rows * row, head: rows * row, row };
    let mut to = vec![f32::NAN; batch * strides.batch];
    for (i, from) in values.chunks_exact(size).enumerate() {
        let [b, s, n] = [i / heads / rows, i / heads % rows, i % heads];
        let at = b * strides.batch + n * strides.head + s * strides.row;
        to[at..at + size].copy_from_slice(from);
    }
    (to, strides)
}

#[test]
fn query_key_and_value_may_have_strides() {
    let [batch, rows, heads, size] = SHAPE;
    let key_shape = [batch, 9, 2, size];
    let query = noise(SHAPE.iter().product(), 1);
    let [key, value] = [2, 3].map(|seed| noise(key_shape.iter().product(), seed));
    let nonpad = Tensor::from(ndarray::arr1(&[9i64, 6]));
    let (q, k, v) = (
        tensor(&[batch, rows, heads * size], &query),
        tensor(&[batch, 9, 2 * size], &key),
        tensor(&[batch, 9, 2 * size], &value),
    );
    let inputs =
        AttentionInputs { nonpad_kv_seqlen: Some(&nonpad), ..AttentionInputs::new(&q, &k, &v) };
    let op = Attention::new().num_heads(4, 2).is_causal(1);
    let want = op.run(&inputs, &Cpu::default()).unwrap().y;

    let (query, query_strides) = transposed(&query, SHAPE);
    let (key, key_strides) = transposed(&key, key_shape);
    let (value, value_strides) = transposed(&value, key_shape);
    let strided = Strided {
        query: Some(query_strides),
        key: Some(key_strides),
        value: Some(value_strides),
        ..Strided::default()
    };
    let inputs = Tensors::default()
        .with(TensorId::Query, TensorView::F32(&query))
        .with(TensorId::Key, TensorView::F32(&key))
        .with(TensorId::Value, TensorView::F32(&value))
        .with(TensorId::SeqlensK, TensorView::I32(&[8, 5]));
    let mut got = vec![f32::NAN; SHAPE.iter().product()];
    let problem = attention(strided);
    let mut io = views(inputs, &mut got, [CacheView::NONE; 2]);
    Cpu::default().run_on(&problem, &mut io).unwrap();
    assert_eq!(tensor(&[batch, rows, heads * size], &got), want);
}

#[test]
fn tensors_that_are_not_the_problems_are_refused() {
    let problem = attention(Strided::default());
    let elements = [noise(SHAPE.iter().product(), 1), noise(2 * 9 * 2 * 24, 2)];
    let refusal = |problem: &Problem, query: TensorView<'_>, key: &[f32]| {
        let inputs = Tensors::default()
            .with(TensorId::Query, query)
            .with(TensorId::Key, TensorView::F32(key))
            .with(TensorId::Value, TensorView::F32(&elements[1]))
            .with(TensorId::SeqlensK, TensorView::I32(&[8, 8]));
        let mut got = vec![0.0; SHAPE.iter().product()];
        let mut io = views(inputs, &mut got, [CacheView::NONE; 2]);
        Cpu::default().run_on(problem, &mut io).map_err(|error| error.to_string())
    };
    let (query, key) = (TensorView::F32(&elements[0]), &elements[1][..]);
    assert_eq!(refusal(&problem, query, key), Ok(()));
    let short =
        "key: got 863 elements of float32; allowed: float32 [2, 9, 48], as the problem says";
    assert_eq!(refusal(&problem, query, &key[1..]), Err(short.to_owned()));
    let bytes = "query: got 3 elements of uint8; allowed: float32 [2, 5, 96], as the problem says";
    assert_eq!(refusal(&problem, TensorView::U8(&[1, 2, 3]), key), Err(bytes.to_owned()));

    let row = RowStrides { batch: 9 * 96, head: 24, row: 96 };
    let mut strided = Strided { key: Some(row), ..Strided::default() };
    let wide = noise(2 * 9 * 96 - 48, 3);
    assert_eq!(refusal(&attention(strided), query, &wide), Ok(()));
    let got = refusal(&attention(strided), query, &wide[1..]).unwrap_err();
    assert!(got.starts_with("key: got 1679 elements of float32"), "{got}");
    strided.output = Some(RowStrides { batch: 5 * 96, head: 24, row: 96 });
    let got = refusal(&attention(strided), query, &wide).unwrap_err();
    assert!(got.starts_with("output: got RowStrides") && got.ends_with("on the CPU"), "{got}");
}

/// What the caller gave and the call has no use for would be left out without a word.
#[test]
fn tensors_that_the_problem_lacks_are_refused() {
    let problem = attention(Strided::default());
    let query = noise(SHAPE.iter().product(), 1);
    let key = noise(2 * 9 * 2 * 24, 2);
    let refusal = |id, extra, cache, lse| {
        let inputs = Tensors::default()
            .with(TensorId::Query, TensorView::F32(&query))
            .with(TensorId::Key, TensorView::F32(&key))
            .with(TensorId::Value, TensorView::F32(&key))
            .with(TensorId::SeqlensK, TensorView::I32(&[8, 8]))
            .with(id, TensorView::F32(extra));
        let mut got = vec![0.0; SHAPE.iter().product()];
        let mut io = IoViews { lse, ..views(inputs, &mut got, cache) };
        Cpu::default().run_on(&problem, &mut io).map_err(|error| error.to_string())
    };
    let of = |name| Err(format!("{name}: got a tensor; allowed: none, as the problem has none"));
    let none = || [CacheView::NONE; 2];
    assert_eq!(refusal(TensorId::HeadSink, &[0.5; 4], none(), None), of("head_sink"));
    assert_eq!(refusal(TensorId::KScale, &[0.5], none(), None), of("k_scale"));
    assert_eq!(refusal(TensorId::PastKey, &key, none(), None), of("past_key"));
    let present = [TensorView::F32(&key).into(), CacheView::NONE];
    assert_eq!(refusal(TensorId::Query, &query, present, None), of("present_key"));
    let lse = Some(TensorViewMut::F32(&mut [0.0; 40]));
    assert_eq!(refusal(TensorId::Query, &query, none(), lse), of("lse"));
    // One without elements says nothing.
    assert_eq!(refusal(TensorId::HeadSink, &[], none(), None), Ok(()));

    let layer = Layer::new(DType::F32, Heads { query: 1, kv: 1, size: 8 });
    let reads = layer.dense(Dense::decode(1, 4).nothing_new()).unwrap();
    let (row, keys) = ([1.0f32; 8], [1.0f32; 32]);
    let inputs = Tensors::default()
        .with(TensorId::Query, TensorView::F32(&row))
        .with(TensorId::Key, TensorView::F32(&row))
        .with(TensorId::SeqlensK, TensorView::I32(&[3]));
    let (mut got, cache) = ([0.0; 8], [TensorView::F32(&keys); 2].map(Into::into));
    let refused = Cpu::default().run_on(&reads, &mut views(inputs, &mut got, cache)).unwrap_err();
    let want = "key: got 8 elements of float32; allowed: float32 [1, 0, 8], as the problem says";
    assert_eq!(refused.to_string(), want);
}

#[test]
fn a_cache_that_is_only_read_need_not_be_writable() {
    let layer = Layer::new(DType::F32, Heads { query: 4, kv: 2, size: 16 });
    let (query, key) = (noise(64, 1), noise(32, 2));
    let [mut keys, mut values] = [noise(2 * 40 * 16, 4), noise(2 * 40 * 16, 5)];
    let of_cache = || {
        Tensors::default()
            .with(TensorId::Query, TensorView::F32(&query))
            .with(TensorId::SeqlensK, TensorView::I32(&[30]))
    };
    let inputs = || {
        of_cache()
            .with(TensorId::Key, TensorView::F32(&key))
            .with(TensorId::Value, TensorView::F32(&key))
    };
    let appends = layer.dense(Dense::decode(1, 40)).unwrap();
    let (mut want, mut got) = (vec![0.0; 64], vec![f32::NAN; 64]);
    let cache = [&mut keys[..], &mut values[..]].map(|x| TensorViewMut::from(x).into());
    Cpu::default().run_on(&appends, &mut views(inputs(), &mut want, cache)).unwrap();

    let read = || [&keys, &values].map(|cache| TensorView::F32(cache).into());
    let reads = layer.dense(Dense::decode(1, 40).nothing_new()).unwrap();
    Cpu::default().run_on(&reads, &mut views(of_cache(), &mut got, read())).unwrap();
    assert_eq!(got, want);
    let refused = Cpu::default().run_on(&appends, &mut views(inputs(), &mut got, read()));
    let text = "present_key: got a read-only tensor; allowed: a mutable one, as the call \
                appends to it";
    assert_eq!(refused.unwrap_err().to_string(), text);
}

#[test]
fn a_paged_cache_to_which_no_token_goes_is_only_read() {
    let layer = Layer::new(DType::F32, Heads { query: 4, kv: 2, size: 16 });
    // Two sequences, of 20 and 3 keys, in blocks of 8 rows, and one token each.
    let call = Paged::new(2, 2, [5, 8, 3]).slot_mapping();
    let (query, key) = (noise(2 * 64, 1), vec![f32::NAN; 2 * 32]);
    let [keys, values] = [noise(5 * 8 * 32, 4), noise(5 * 8 * 32, 5)];
    let table = [3, 1, 4, 0, -1, -1];
    let inputs = Tensors::default()
        .with(TensorId::Query, TensorView::F32(&query))
        .with(TensorId::Key, TensorView::F32(&key))
        .with(TensorId::Value, TensorView::F32(&key))
        .with(TensorId::SeqlensK, TensorView::I32(&[19, 2]))
        .with(TensorId::CumulativeSequenceLength, TensorView::I32(&[0, 1, 2]))
        .with(TensorId::SlotMapping, TensorView::I32(&[-1, -1]))
        .with(TensorId::BlockTable, TensorView::I32(&table));
    let mut got = vec![f32::NAN; 2 * 64];
    let cache = [&keys, &values].map(|cache| TensorView::F32(cache).into());
    let problem = layer.paged(call).unwrap();
    Cpu::default().run_on(&problem, &mut views(inputs, &mut got, cache)).unwrap();

    for (b, length) in [(0, 20), (1, 3)] {
        // The same rows in a contiguous cache of the sequence: (KV heads, rows, size).
        let gathered = |cache: &[f32]| -> Vec<f32> {
            let place = |row: usize| table[b * 3 + row / 8] as usize * 8 + row % 8;
            let rows = (0..2).flat_map(|head| (0..length).map(move |row| (head, row)));
            let start = |(head, row)| (place(row) * 2 + head) * 16;
            rows.map(start).flat_map(|start| cache[start..start + 16].to_vec()).collect()
        };
        let (keys, values) = (gathered(&keys), gathered(&values));
        let problem = layer.dense(Dense::decode(1, length).nothing_new()).unwrap();
        let last = [length as i32 - 1];
        let inputs = Tensors::default()
            .with(TensorId::Query, TensorView::F32(&query[b * 64..][..64]))
            .with(TensorId::SeqlensK, TensorView::I32(&last));
        let mut want = vec![0.0; 64];
        let cache = [&keys, &values].map(|cache| TensorView::F32(cache).into());
        Cpu::default().run_on(&problem, &mut views(inputs, &mut want, cache)).unwrap();
        let apart = got[b * 64..][..64].iter().zip(&want).map(|(got, want)| (got - want).abs());
        assert!(apart.fold(0.0, f32::max) < 1e-5, "sequence {b}");
    }
}
