//! A random but legal ONNX Attention call, described by small numbers so that proptest can shrink
//! it, and its tensors.

use crate::call::Data;
use crate::case::{SUBNORMAL, extreme_softcap};
use crate::compare::{optional, tensors};
use crate::parity::{Judge, Parity};
use crate::{Errors, Tolerance};
use gqa_host::backend::Backend;
use gqa_host::op::{Attention, AttentionInputs, AttentionOutputs};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem, Result, Tensor};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// What a mask hides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hides {
    /// Nothing; numbers are added.
    Nothing,
    /// Masks some keys, and all keys of some rows, by false or -inf.
    Some,
    /// Masks some keys by the lowest finite value, or by false.
    Lowest,
}

/// attn_mask.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// bool.
    pub boolean: bool,
    /// 1 to 4 dimensions.
    pub rank: usize,
    /// Which of batch, head and row broadcast.
    pub repeats: [bool; 3],
    /// Columns missing at the end, as far as lengths allow.
    pub short: usize,
    /// What it hides.
    pub hides: Hides,
}

/// Where keys come from.
#[derive(Clone, Debug)]
pub enum Cache {
    /// K and V alone.
    None,
    /// past_key and past_value with that number of rows.
    Past(usize),
    /// K and V are a whole cache; each batch entry has this many valid rows, and NaN in the others.
    Nonpad(Vec<usize>),
}

/// One call. Data follows from `seed`.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    /// Type of all floating-point tensors but V's.
    pub dtype: DType,
    /// Type of V and its cache.
    pub v_dtype: DType,
    /// Batch entries.
    pub batch: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Of Q and K.
    pub head_size: usize,
    /// Of V.
    pub v_head_size: usize,
    /// Query rows.
    pub q_len: usize,
    /// Rows of K and V.
    pub new_len: usize,
    /// Past, or lengths.
    pub cache: Cache,
    /// Four dimensions.
    pub four_d: bool,
    /// is_causal.
    pub causal: bool,
    /// left_window_size and right_window_size.
    pub windows: [i64; 2],
    /// Multiple of the default.
    pub scale: Option<f32>,
    /// 0: off.
    pub softcap: f32,
    /// attn_mask.
    pub mask: Option<AttentionMask>,
    /// qk_matmul_output.
    pub mode: Option<i64>,
    /// Of all data.
    pub seed: u64,
}

impl AttentionCase {
    fn past(&self) -> usize {
        if let Cache::Past(rows) = self.cache { rows } else { 0 }
    }

    fn total(&self) -> usize {
        self.past() + self.new_len
    }

    fn q_heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// The operator.
    pub fn op(&self) -> Attention {
        let mut op = Attention::new()
            .is_causal(self.causal.into())
            .left_window_size(self.windows[0])
            .right_window_size(self.windows[1])
            .softcap(self.softcap)
            .qk_matmul_output(self.mode.is_some())
            .qk_matmul_output_mode(self.mode.unwrap_or(0));
        if let Some(scale) = self.scale {
            op = op.scale(scale / (self.head_size as f32).sqrt());
        }
        if !self.four_d {
            op = op.num_heads(self.q_heads() as i64, self.kv_heads as i64);
        }
        op
    }

    /// The nearest call that flash attention may support.
    pub fn for_flash(self) -> Self {
        let head_size = self.head_size.next_multiple_of(8);
        Self {
            head_size,
            v_head_size: head_size,
            windows: [if self.causal { self.windows[0] } else { -1 }, -1],
            mask: None,
            mode: None,
            ..self
        }
    }

    /// The nearest call with enough rows for flash attention with a mask; the mask may end tiles
    /// before the keys do.
    pub fn for_masked_flash(self, rows: usize) -> Self {
        let mask = AttentionMask {
            boolean: false,
            rank: 4,
            repeats: [false; 3],
            short: 0,
            hides: Hides::Some,
        };
        let mask = self.mask.unwrap_or(mask);
        let cache = match self.cache {
            Cache::Past(rows) => Cache::Past(rows),
            Cache::None | Cache::Nonpad(_) => Cache::None,
        };
        Self {
            q_len: rows,
            new_len: rows,
            cache,
            mask: Some(AttentionMask { short: 45 * mask.short, ..mask }),
            ..self.for_flash()
        }
    }

    /// Its tensors by name.
    pub(crate) fn named(&self) -> Vec<(&'static str, Option<Tensor>)> {
        let Tensors { q, k, v, mask, past, nonpad } = Tensors::new(self);
        let [past_key, past_value] = past.map_or([None, None], |past| past.map(Some));
        vec![
            ("q", Some(q)),
            ("k", Some(k)),
            ("v", Some(v)),
            ("attn_mask", mask),
            ("past_key", past_key),
            ("past_value", past_value),
            ("nonpad_kv_seqlen", nonpad),
        ]
    }

    fn shape(&self, heads: usize, rows: usize, size: usize) -> Vec<usize> {
        match self.four_d {
            true => vec![self.batch, heads, rows, size],
            false => vec![self.batch, rows, heads * size],
        }
    }

    fn tolerance(&self) -> Tolerance {
        let scores = f64::from(self.scale.unwrap_or(1.0)).max(1.0);
        match self.dtype {
            DType::F64 if self.v_dtype == DType::F64 => {
                Tolerance { absolute: 1e-12, relative: 1e-12 }
            }
            DType::F32 | DType::F64 => Tolerance { absolute: 2e-5 * scores, relative: 1e-4 },
            DType::F16 => Tolerance { absolute: 4e-3, relative: 4e-3 },
            _ => Tolerance { absolute: 2e-2, relative: 2e-2 },
        }
    }
}

/// A case's tensors.
struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Option<Tensor>,
    past: Option<[Tensor; 2]>,
    nonpad: Option<Tensor>,
}

impl Tensors {
    fn new(case: &AttentionCase) -> Self {
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let (heads, new) = (case.kv_heads, case.new_len);
        let q = data.normal(&case.shape(case.q_heads(), case.q_len, case.head_size), 1.0);
        let k = data.rows(case, heads, new, case.head_size);
        let mask = case.mask.map(|mask| data.mask(case, mask));
        let cache = |size| [case.batch, heads, case.past(), size];
        let past_key = data.normal(&cache(case.head_size), 1.0);
        data.dtype = case.v_dtype;
        let v = data.rows(case, heads, new, case.v_head_size);
        let past_value = data.normal(&cache(case.v_head_size), 1.0);
        let past = matches!(case.cache, Cache::Past(_)).then_some([past_key, past_value]);
        let nonpad = match &case.cache {
            Cache::Nonpad(lengths) => {
                let lengths: Vec<i64> = lengths.iter().map(|&n| n as i64).collect();
                Some(ndarray::Array1::from(lengths).into())
            }
            _ => None,
        };
        Self { q, k, v, mask, past, nonpad }
    }

    fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs {
            attn_mask: self.mask.as_ref(),
            past_key: self.past.as_ref().map(|[key, _]| key),
            past_value: self.past.as_ref().map(|[_, value]| value),
            nonpad_kv_seqlen: self.nonpad.as_ref(),
            ..AttentionInputs::new(&self.q, &self.k, &self.v)
        }
    }

    /// Runs the call with every output poisoned first.
    fn run(&self, op: &Attention, backend: &dyn Backend) -> Result<AttentionOutputs> {
        let inputs = self.inputs();
        let problem = op.problem(&inputs)?;
        let mut outputs = AttentionOutputs::new(&problem)?;
        for tensor in [
            Some(&mut outputs.y),
            outputs.present_key.as_mut(),
            outputs.present_value.as_mut(),
            outputs.qk_matmul_output.as_mut(),
        ] {
            tensor.into_iter().for_each(|t| t.with_bytes_mut(|bytes| bytes.fill(0xff)));
        }
        let seqlens_k = inputs.seqlens_k(&problem);
        let mut no_cache = [(); 2].map(|()| Tensor::zeros(DType::F32, &[0]));
        backend.run(&problem, &mut outputs.io(&inputs, &seqlens_k, &mut no_cache))?;
        Ok(outputs)
    }
}

impl Data {
    /// K or V: NaN behind each entry's valid rows.
    fn rows(&mut self, case: &AttentionCase, heads: usize, rows: usize, size: usize) -> Tensor {
        let shape = case.shape(heads, rows, size);
        let mut values = self.values(shape.iter().product(), 1.0);
        if let Cache::Nonpad(lengths) = &case.cache {
            for (i, value) in values.iter_mut().enumerate() {
                let (b, i) = (i / (heads * rows * size), i % (heads * rows * size));
                let row = if case.four_d { i / size % rows } else { i / (heads * size) };
                if row >= lengths[b] {
                    *value = f32::NAN;
                }
            }
        }
        self.tensor(&shape, &values)
    }

    fn mask(&mut self, case: &AttentionCase, mask: AttentionMask) -> Tensor {
        let least = match &case.cache {
            Cache::Nonpad(lengths) => lengths.iter().copied().max().unwrap_or(1).max(1),
            _ => 1,
        };
        let columns = case.total().saturating_sub(mask.short).max(least);
        let full = [case.batch, case.q_heads(), case.q_len];
        let dims: Vec<usize> =
            (0..3).map(|i| if mask.repeats[i] { 1 } else { full[i] }).chain([columns]).collect();
        let shape = &dims[4 - mask.rank..];
        let count: usize = shape.iter().product();
        if mask.boolean {
            let hides = mask.hides != Hides::Nothing;
            let row_hidden: Vec<bool> =
                (0..count / columns).map(|_| hides && self.rng.random_range(0..5) == 0).collect();
            let seen = |i: usize, rng: &mut SmallRng| {
                !(row_hidden[i / columns] || hides && rng.random_range(0..4) == 0)
            };
            let values = (0..count).map(|i| seen(i, &mut self.rng)).collect();
            return match ArrayD::from_shape_vec(IxDyn(shape), values) {
                Ok(array) => Tensor::from(array),
                Err(error) => unreachable!("{error}"),
            };
        }
        let hidden = match (mask.hides, self.dtype) {
            (Hides::Nothing, _) => None,
            (Hides::Some, _) => Some(f32::NEG_INFINITY),
            (Hides::Lowest, DType::F16) => Some(-65504.0),
            (Hides::Lowest, DType::BF16) => Some(f32::from_bits(0xff7f_0000)),
            (Hides::Lowest, _) => Some(f32::MIN),
        };
        let mut values = self.values(count, 1.0);
        for row in values.chunks_exact_mut(columns) {
            let all = mask.hides == Hides::Some && self.rng.random_range(0..5) == 0;
            for x in row {
                if let Some(hidden) = hidden.filter(|_| all || self.rng.random_range(0..4) == 0) {
                    *x = hidden;
                }
            }
        }
        self.tensor(shape, &values)
    }
}

impl Parity for AttentionCase {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn problem(&self) -> Result<Problem> {
        self.op().problem(&Tensors::new(self).inputs())
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let (op, given, tolerance) = (self.op(), Tensors::new(self), self.tolerance());
        let run = move |backend: &dyn Backend| {
            given.run(&op, backend).map_err(|e| format!("{}: {e}", backend.name()))
        };
        let want = run(&Reference)?;
        Ok(Box::new(move |backend| compare(&run(backend)?, &want, tolerance)))
    }
}

fn compare(
    got: &AttentionOutputs,
    want: &AttentionOutputs,
    tolerance: Tolerance,
) -> std::result::Result<Errors, String> {
    let errors = tensors("Y", &got.y, &want.y, tolerance)?;
    let exact = Tolerance { absolute: 0.0, relative: 0.0 };
    optional("present_key", &got.present_key, &want.present_key, exact)?;
    optional("present_value", &got.present_value, &want.present_value, exact)?;
    optional("qk_matmul_output", &got.qk_matmul_output, &want.qk_matmul_output, tolerance)?;
    Ok(errors)
}

/// Legal calls with up to `max_rows` query rows and keys, and head sizes up to `max_head_size`.
pub fn attention_case(
    dtype: BoxedStrategy<DType>,
    max_head_size: usize,
    max_rows: usize,
) -> BoxedStrategy<AttentionCase> {
    let size = move || {
        prop_oneof![
            3 => (1..=max_head_size / 8).prop_map(|eighths| eighths * 8),
            1 => 1..=max_head_size,
        ]
    };
    let heads = (1..=2usize, 1..=6usize, size(), proptest::option::weighted(0.3, size()));
    let rows = (1..=max_rows, 1..=max_rows, any::<bool>(), 1..=3usize);
    let cache = (0..3u8, 0..=max_rows, proptest::collection::vec(0..=max_rows, 3));
    let window = || prop_oneof![2 => Just(-1i64), 1 => 0..=max_rows as i64];
    let scores = (
        any::<bool>(),
        [window(), window()],
        proptest::option::weighted(
            0.3,
            prop_oneof![8 => 0.3f32..3.0, 1 => Just(0.0), 1 => Just(SUBNORMAL)],
        ),
        prop_oneof![12 => Just(0.0f32), 6 => 0.5f32..30.0, 1 => extreme_softcap()],
        proptest::option::weighted(0.3, 0..=3i64),
    );
    let hides = prop_oneof![Just(Hides::Nothing), Just(Hides::Some), Just(Hides::Lowest)];
    let mask = (any::<bool>(), 1..=4usize, any::<[bool; 3]>(), 0..3usize, hides).prop_map(
        |(boolean, rank, repeats, short, hides)| AttentionMask {
            boolean,
            rank,
            repeats,
            short,
            hides,
        },
    );
    let rest = (proptest::option::of(mask), any::<bool>(), any::<u64>());
    (dtype, heads, rows, cache, scores, rest)
        .prop_map(
            |(
                dtype,
                heads,
                (q_len, new_len, square, batch),
                cache,
                scores,
                (mask, four_d, seed),
            )| {
                let (kv_heads, group, head_size, v_head_size) = heads;
                let (causal, windows, scale, softcap, mode) = scores;
                let new_len = if square { q_len } else { new_len };
                AttentionCase {
                    dtype,
                    v_dtype: dtype,
                    batch,
                    kv_heads,
                    group,
                    head_size,
                    v_head_size: v_head_size.unwrap_or(head_size),
                    q_len,
                    new_len,
                    cache: match cache {
                        (0, _, _) => Cache::None,
                        (1, past, _) => Cache::Past(past),
                        (_, _, lengths) => {
                            let valid = lengths.into_iter().take(batch).map(|n| n % (new_len + 1));
                            Cache::Nonpad(valid.collect())
                        }
                    },
                    four_d,
                    causal,
                    windows,
                    scale,
                    softcap,
                    mask,
                    mode,
                    seed,
                }
            },
        )
        .boxed()
}
