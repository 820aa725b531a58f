//! Operators that only move or rotate rows: RotaryEmbedding, and cache updates outside of
//! attention.

use gqa_host::backend::Backend;
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::op::{KvCache, RotaryEmbedding, RotaryInputs, ScatterInputs, TensorScatter};
use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
use gqa_host::reference::Reference;
use gqa_host::{DType, Tensor};
use ndarray::{Array1, ArrayD, IxDyn};

/// Different everywhere, between -1 and 1.
fn numbers(dtype: DType, shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> =
        (0..count).map(|i| ((i * 37 + seed * 101) % 509) as f32 / 254.5 - 1.0).collect();
    Tensor::from_f32(dtype, shape, &values).unwrap()
}

fn long(shape: &[usize], values: Vec<i64>) -> Tensor {
    Tensor::from(ArrayD::from_shape_vec(IxDyn(shape), values).unwrap())
}

fn near(got: &Tensor, want: &Tensor, what: &str) {
    let tolerance = match want.dtype() {
        DType::F32 => 1e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    };
    assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()), "{what}");
    for (got, want) in got.to_f64().iter().zip(want.to_f64()) {
        assert!((got - want).abs() <= tolerance, "{what}: got {got}, want {want}");
    }
}

#[test]
fn rows_of_any_size_rotate_alike_everywhere() {
    let (batch, heads, rows, positions) = (2, 3, 5, 11);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (size, dim) in
            [(16, 16), (64, 32), (8, 8), (8, 4), (10, 6), (7, 2), (18, 0), (700, 640)]
        {
            for (interleaved, flat, explicit) in
                [(0, false, true), (1, false, true), (0, true, false), (1, true, true)]
            {
                let half = if dim == 0 { size / 2 } else { dim / 2 };
                let x = match flat {
                    true => numbers(dtype, &[batch, rows, heads * size], 1),
                    false => numbers(dtype, &[batch, heads, rows, size], 1),
                };
                let shape = match explicit {
                    true => vec![positions, half],
                    false => vec![batch, rows, half],
                };
                let (cos, sin) = (numbers(dtype, &shape, 2), numbers(dtype, &shape, 3));
                let ids = (0..batch * rows).map(|i| (i * 7 % positions) as i64).collect();
                let ids = long(&[batch, rows], ids);
                let inputs = RotaryInputs {
                    x: &x,
                    cos_cache: &cos,
                    sin_cache: &sin,
                    position_ids: explicit.then_some(&ids),
                };
                let op = RotaryEmbedding::new()
                    .interleaved(interleaved)
                    .rotary_embedding_dim(dim as i64)
                    .num_heads(if flat { heads as i64 } else { 0 });
                let want = op.run(&inputs, &Reference).unwrap();
                let what = format!("{dtype} {size} {dim} {interleaved} {flat}");
                near(&op.run(&inputs, &Cpu::default()).unwrap(), &want, &what);
                near(&op.run(&inputs, &Sim::default()).unwrap(), &want, &what);
            }
        }
    }
}

#[test]
fn a_pair_turns_by_its_angle() {
    let x = Tensor::from_f32(DType::F32, &[1, 1, 1, 4], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    let cos = Tensor::from_f32(DType::F32, &[2, 2], &[1.0, 1.0, 0.0, -1.0]).unwrap();
    let sin = Tensor::from_f32(DType::F32, &[2, 2], &[0.0, 0.0, 1.0, 0.0]).unwrap();
    let ids = long(&[1, 1], vec![1]);
    let inputs = RotaryInputs { x: &x, cos_cache: &cos, sin_cache: &sin, position_ids: Some(&ids) };
    // By 90 degrees and by 180.
    let half_split = RotaryEmbedding::new().run(&inputs, &Reference).unwrap();
    assert_eq!(half_split.to_f64(), [-3.0, -2.0, 1.0, -4.0]);
    let interleaved = RotaryEmbedding::new().interleaved(1).run(&inputs, &Reference).unwrap();
    assert_eq!(interleaved.to_f64(), [-2.0, 1.0, -3.0, -4.0]);
}

#[test]
fn refusals_of_rotary_embedding() {
    let zeros = |shape: &[usize]| Tensor::zeros(DType::F32, shape);
    let refuses = |op: RotaryEmbedding,
                   x: &[usize],
                   cos: &[usize],
                   ids: Option<i64>,
                   want: &str| {
        let (x, cos) = (zeros(x), zeros(cos));
        let ids = ids.map(|id| long(&[2, 3], vec![id; 6]));
        let inputs =
            RotaryInputs { x: &x, cos_cache: &cos, sin_cache: &cos, position_ids: ids.as_ref() };
        let got = op.problem(&inputs).map_or_else(|e| e.to_string(), |_| "accepted".to_owned());
        assert_eq!(got, want);
    };
    let op = RotaryEmbedding::new;
    let four = [2, 4, 3, 8];
    refuses(op(), &four, &[9, 4], Some(8), "accepted");
    refuses(op(), &four, &[2, 3, 4], None, "accepted");
    refuses(op(), &[2, 8], &[9, 4], Some(0), "X: got (2, 8); allowed: 3 or 4 dimensions");
    refuses(
        op(),
        &[2, 3, 32],
        &[9, 4],
        Some(0),
        "num_heads: got no attribute; allowed: one, as X has three dimensions",
    );
    refuses(
        op().num_heads(5),
        &[2, 3, 32],
        &[9, 4],
        Some(0),
        "X: got (2, 3, 32); allowed: a last dimension that is a multiple of num_heads = 5",
    );
    refuses(
        op().num_heads(3),
        &four,
        &[9, 4],
        Some(0),
        "num_heads: got 3; allowed: no attribute, or 4, the heads of X",
    );
    refuses(
        op().rotary_embedding_dim(5),
        &four,
        &[9, 4],
        Some(0),
        "rotary_embedding_dim: got 5; allowed: an even number up to the head size of 8",
    );
    refuses(
        op().rotary_embedding_dim(10),
        &four,
        &[9, 4],
        Some(0),
        "rotary_embedding_dim: got 10; allowed: an even number up to the head size of 8",
    );
    refuses(op().interleaved(2), &four, &[9, 4], Some(0), "interleaved: got 2; allowed: 0 or 1");
    refuses(
        op(),
        &four,
        &[9, 3],
        Some(0),
        "cos_cache: got (9, 3); allowed: (max_position_id_plus_1, rotary_embedding_dim / 2 = 4)",
    );
    refuses(
        op(),
        &four,
        &[9, 4],
        None,
        "cos_cache: got (9, 4); allowed: (batch_size = 2, sequence_length = 3, rotary_embedding_dim / 2 = 4)",
    );
    refuses(
        op(),
        &four,
        &[9, 4],
        Some(9),
        "position_ids: got 9; allowed: 0 to 8, the last row of cos_cache",
    );
}

#[test]
fn rotation_is_one_launch() {
    let kernels = |size: usize| {
        let (x, cos) = (numbers(DType::F16, &[1, 2, 3, size], 1), [5, size / 2]);
        let (cos, ids) = (numbers(DType::F16, &cos, 2), long(&[1, 3], vec![0; 3]));
        let inputs =
            RotaryInputs { x: &x, cos_cache: &cos, sin_cache: &cos, position_ids: Some(&ids) };
        let problem = RotaryEmbedding::new().problem(&inputs).unwrap();
        let plan = plan(&problem, &DeviceInfo::h200(), &PlanOptions::default()).unwrap();
        assert_eq!(plan.workspace_bytes(), 0);
        plan.launches().iter().map(|launch| launch.entry().role.name()).collect::<Vec<_>>()
    };
    assert_eq!(kernels(64), ["rotary_embedding"]);
    assert_eq!(kernels(24), ["rotary_rows"]);
}

#[test]
fn new_rows_go_where_they_are_told_and_nowhere_else() {
    let (batch, heads, capacity, rows, size) = (3, 2, 9, 4, 12);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for (flat, circular) in [(false, false), (true, false), (false, true), (true, true)] {
            let cache = [batch, heads, capacity, size];
            let before = KvCache {
                key: numbers(dtype, &cache, 1),
                value: numbers(dtype, &cache, 2),
                scales: None,
            };
            let shape = match flat {
                true => vec![batch, rows, heads * size],
                false => vec![batch, heads, rows, size],
            };
            let (key, value) = (numbers(dtype, &shape, 3), numbers(dtype, &shape, 4));
            let first = if circular { [7i64, 5, 9_000_000_000_008] } else { [0, 5, 3] };
            let indices: Tensor = Array1::from(first.to_vec()).into();
            let want = |old: &Tensor, new: &Tensor| {
                let (mut all, new) = (old.to_f64(), new.to_f64());
                for (i, x) in all.iter_mut().enumerate() {
                    let (e, row, head) = (i % size, i / size % capacity, i / size / capacity);
                    let (b, head) = (head / heads, head % heads);
                    let behind = row as i64 - first[b];
                    let s = if circular { behind.rem_euclid(capacity as i64) } else { behind };
                    let Ok(s @ 0..=3) = usize::try_from(s) else { continue };
                    *x = match flat {
                        true => new[((b * rows + s) * heads + head) * size + e],
                        false => new[((b * heads + head) * rows + s) * size + e],
                    };
                }
                all
            };
            for backend in [&Reference as &dyn Backend, &Cpu::default(), &Sim::default()] {
                let mut after = before.clone();
                match circular {
                    false => after.write(&key, &value, &indices, backend).unwrap(),
                    true => after.write_circular(&key, &value, &indices, backend).unwrap(),
                }
                let name = backend.name();
                assert_eq!(after.key.to_f64(), want(&before.key, &key), "{name} {dtype} {flat}");
                assert_eq!(after.value.to_f64(), want(&before.value, &value), "{name} {dtype}");
            }
        }
    }
}

#[test]
fn refusals_of_cache_updates() {
    let zeros = |shape: &[usize]| Tensor::zeros(DType::F16, shape);
    let refuses = |size: usize, key: &[usize], first: &[i64], want: &str| {
        let cache = zeros(&[2, 2, 9, size]);
        let mut cache = KvCache { key: cache.clone(), value: cache, scales: None };
        let first: Tensor = Array1::from(first.to_vec()).into();
        let (key, cpu) = (zeros(key), Cpu::default());
        let result = cache.write(&key, &key, &first, &cpu);
        assert_eq!(result.map_or_else(|e| e.to_string(), |()| "accepted".to_owned()), want);
    };
    refuses(8, &[2, 2, 4, 8], &[0, 5], "accepted");
    refuses(
        8,
        &[2, 2, 4, 8],
        &[0, 6],
        "write_indices: got 6 for batch entry 1; allowed: 0 to 5, so that 4 rows fit into the cache",
    );
    refuses(
        8,
        &[2, 2, 4, 8],
        &[-1, 0],
        "write_indices: got -1 for batch entry 0; allowed: 0 to 5, so that 4 rows fit into the cache",
    );
    refuses(8, &[2, 2, 4, 8], &[0], "write_indices: got (1); allowed: (batch_size = 2)");
    refuses(
        8,
        &[2, 2, 10, 8],
        &[0, 0],
        "key: got (2, 2, 10, 8); allowed: up to 9 rows, those of the cache",
    );
    refuses(
        8,
        &[2, 4, 8],
        &[0, 0],
        "key: got (2, 4, 8); allowed: (batch_size = 2, rows = 4, kv_num_heads * head_size = 16)",
    );
    refuses(12, &[2, 2, 4, 12], &[0, 0], "accepted");
    refuses(8, &[2, 2, 0, 8], &[0, 9], "accepted");
    let circular = |first: &[i64]| {
        let mut cache =
            KvCache { key: zeros(&[2, 2, 9, 8]), value: zeros(&[2, 2, 9, 8]), scales: None };
        let (key, first) = (zeros(&[2, 2, 4, 8]), Array1::from(first.to_vec()).into());
        let result = cache.write_circular(&key, &key, &first, &Cpu::default());
        result.map_or_else(|e| e.to_string(), |()| "accepted".to_owned())
    };
    assert_eq!(circular(&[8, i64::MAX]), "accepted");
    assert_eq!(circular(&[8, -1]), "write_indices: got -1 for batch entry 1; allowed: 0 or more");
}

#[test]
fn refusals_of_tensor_scatter() {
    let refuses = |op: TensorScatter, update: &[usize], indices: Option<&[i64]>, want: &str| {
        let (past_cache, update) = (numbers(DType::F32, &[2, 3, 7, 4], 1), update);
        let update = numbers(DType::F32, update, 2);
        let indices = indices.map(|indices| Tensor::from(Array1::from(indices.to_vec())));
        let inputs = ScatterInputs {
            past_cache: &past_cache,
            update: &update,
            write_indices: indices.as_ref(),
        };
        let result = op.run(&inputs, &Cpu::default());
        assert_eq!(result.map_or_else(|e| e.to_string(), |_| "accepted".to_owned()), want);
    };
    let op = TensorScatter::new;
    refuses(op(), &[2, 3, 7, 4], None, "accepted");
    refuses(op().axis(1), &[2, 1, 7, 4], Some(&[2, 0]), "accepted");
    let axis =
        "of 4 dimensions of past_cache; allowed: a dimension after the first, which is the batch";
    for bad in [0, 4, -4, i64::MIN, i64::MAX] {
        refuses(op().axis(bad), &[2, 3, 7, 4], None, &format!("axis: got {bad} {axis}"));
    }
    refuses(
        op(),
        &[2, 3, 8, 4],
        None,
        "update: got (2, 3, 8, 4); allowed: (batch_size = 2, as past_cache = 3, up to max_sequence_length = 7, as past_cache = 4)",
    );
    refuses(
        op(),
        &[2, 3, 7],
        None,
        "update: got (2, 3, 7); allowed: (batch_size = 2, as past_cache = 3, up to max_sequence_length = 7, as past_cache = 4)",
    );
    refuses(
        op(),
        &[2, 3, 2, 4],
        Some(&[0, 6]),
        "write_indices: got 6 for batch entry 1; allowed: 0 to 5, so that 2 rows fit into the cache",
    );
    refuses(op(), &[2, 3, 2, 4], Some(&[0]), "write_indices: got (1); allowed: (batch_size = 2)");
}
