//! The prologue kernels on the simulator, against what they are defined to write.

use crate::support::{
    CACHE, Layout, Random, Rows, entry, optional, places, query_seqlens, some_tokens, start, unit,
    wide, with_type,
};
use bytemuck::Zeroable;
use gqa_kernels::num::{DType, Element};
use gqa_kernels::params::{PrologueParams, RotaryParams, Strides};
use gqa_kernels::prologue;
use gqa_kernels::registry::prologue_grid;
use gqa_sim::Arg;
use proptest::prelude::*;

/// One call.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    kv_heads: u32,
    group: u32,
    head_size: u32,
    rotary_dim: u32,
    interleaved: bool,
    /// Where given, position_ids have rows of this length more than q_len, and some lead outside
    /// the caches.
    explicit: Option<u32>,
    q_len: u32,
    /// False: the cache is complete already.
    appends: bool,
    first_prompt: bool,
    tokens: Option<Vec<u32>>,
    totals: Vec<u32>,
    past_capacity: u32,
    packed: bool,
    layout: Layout,
    blocks: u32,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let dtype = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let heads = (1..=3u32, 1..=4u32, prop_oneof![4 => 1..=16u32, 1 => 1..=64u32], any::<u32>());
    let rows = (1..=6u32, any::<bool>(), prop::collection::vec(0..=9u32, 1..=3), 0..=10u32);
    let rope = (any::<bool>(), prop::option::of(0..=2u32));
    let layout = (any::<bool>(), any::<bool>(), prop_oneof![Just(0), Just(8)]);
    (dtype, heads, rows, (any::<bool>(), layout), rope, (1..=4u32, any::<u64>())).prop_map(
        |(dtype, heads, rows, (appends, (packed, bnsh, gap)), (interleaved, explicit), (blocks, seed))| {
            let ((kv_heads, group, eighths, rotary), (q_len, first_prompt, lengths, past_capacity)) = (heads, rows);
            let (head_size, first_prompt) = (8 * eighths, first_prompt && appends);
            let most = if first_prompt { q_len } else { 9 };
            let totals: Vec<_> = lengths.into_iter().map(|length| length.min(most)).collect();
            let tokens = some_tokens(seed, q_len, &totals);
            Case {
                dtype,
                kv_heads,
                group,
                head_size,
                rotary_dim: rotary % (head_size / 16 + 1) * 16,
                interleaved,
                explicit,
                q_len,
                appends,
                first_prompt: first_prompt && tokens.is_none(),
                tokens,
                totals,
                past_capacity,
                packed: packed && appends,
                layout: Layout { bnsh, gap },
                blocks,
                seed,
            }
        },
    )
}

/// The tensors of a call.
struct Tensors<T> {
    q: Rows<T>,
    k: Rows<T>,
    v: Rows<T>,
    cos: Vec<T>,
    sin: Vec<T>,
    position_ids: Vec<i64>,
    seqlens_k: Vec<i32>,
    query_seqlens: Option<Vec<i32>>,
}

impl Case {
    fn batch(&self) -> u32 {
        self.totals.len() as u32
    }

    fn q_heads(&self) -> u32 {
        self.kv_heads * self.group
    }

    fn new_len(&self) -> u32 {
        if self.appends { self.q_len } else { 0 }
    }

    /// The longest sequence decides, as in the operator.
    fn capacity(&self) -> u32 {
        self.totals.iter().copied().max().unwrap_or(0).max(self.past_capacity).max(1)
    }

    /// Too few for some of the explicit positions.
    fn max_positions(&self) -> u32 {
        self.capacity().max(self.q_len)
    }

    fn q_shape(&self) -> [u32; 4] {
        [self.batch(), self.q_heads(), self.q_len, self.head_size]
    }

    fn new_shape(&self) -> [u32; 4] {
        [self.batch(), self.kv_heads, self.new_len(), self.head_size]
    }

    fn cache_shape(&self, rows: u32) -> [u32; 4] {
        [self.batch(), self.kv_heads, rows, self.head_size]
    }

    /// Rows before this call's.
    fn past(&self, b: u32) -> u32 {
        let total = self.totals[b as usize];
        let tokens = self.tokens.as_ref().map_or(self.q_len, |tokens| tokens[b as usize]);
        if self.first_prompt { 0 } else { total.saturating_sub(tokens) }
    }

    fn tensors<T: Element>(&self) -> Tensors<T> {
        let random = &mut Random::new(self.seed);
        let angles = (self.max_positions() * self.rotary_dim / 2) as usize;
        let ids = (self.batch() * (self.q_len + self.explicit.unwrap_or(0))) as usize;
        let positions = i64::from(self.max_positions());
        let mut tensors = Tensors {
            q: Rows::random(self.q_shape(), self.layout, random),
            k: Rows::random(self.new_shape(), self.layout, random),
            v: Rows::random(self.new_shape(), self.layout, random),
            cos: random.values(angles),
            sin: random.values(angles),
            position_ids: (0..ids)
                .map(|_| i64::from(random.below(positions as u32 + 4)) - 2)
                .collect(),
            seqlens_k: self.totals.iter().map(|&total| total as i32 - 1).collect(),
            query_seqlens: query_seqlens(&self.tokens),
        };
        if self.packed {
            self.pack(&mut tensors);
        }
        tensors
    }

    /// Moves Q, K and V into one tensor.
    fn pack<T: Element>(&self, t: &mut Tensors<T>) {
        let heads = self.q_heads() + 2 * self.kv_heads;
        let mut all = Rows::<T>::nan(
            [self.batch(), heads, self.q_len, self.head_size],
            Layout { bnsh: false, gap: 0 },
        );
        for [b, h, s] in places([self.batch(), heads, self.q_len, 0]) {
            let row = match h.checked_sub(self.q_heads()) {
                None => t.q.row(b, h, s),
                Some(h) if h < self.kv_heads => t.k.row(b, h, s),
                Some(h) => t.v.row(b, h - self.kv_heads, s),
            };
            all.row_mut(b, h, s).copy_from_slice(row);
        }
        for strides in [&mut t.q.strides, &mut t.k.strides, &mut t.v.strides] {
            *strides = all.strides;
        }
        let head = self.head_size as usize;
        let (q, k) =
            (self.q_heads() as usize * head, (self.q_heads() + self.kv_heads) as usize * head);
        (t.k.data, t.v.data) = (all.data[q..].to_vec(), all.data[k..].to_vec());
        t.q.data = all.data;
    }

    fn params<T: Element>(
        &self,
        t: &Tensors<T>,
        q_out: Strides,
        kv_out: Strides,
        past: Strides,
    ) -> PrologueParams {
        PrologueParams {
            scales: 0,
            format: 0,
            q: t.q.strides,
            k: t.k.strides,
            v: t.v.strides,
            q_out,
            kv_out,
            past,
            batch: self.batch(),
            q_heads: self.q_heads(),
            kv_heads: self.kv_heads,
            value_heads: self.kv_heads,
            head_size: self.head_size,
            q_len: self.q_len,
            new_len: self.new_len(),
            past_capacity: self.past_capacity,
            capacity: self.capacity(),
            first_prompt: self.first_prompt.into(),
            rotary: RotaryParams {
                dim: self.rotary_dim,
                interleaved: self.interleaved.into(),
                max_positions: self.max_positions(),
                position_stride: self.explicit.map_or(0, |more| self.q_len + more),
            },
            ..Zeroable::zeroed()
        }
    }

    /// Position of a new row.
    fn position<T>(&self, t: &Tensors<T>, b: u32, s: u32) -> i64 {
        match self.explicit {
            Some(more) => t.position_ids[(b * (self.q_len + more) + s) as usize],
            None => i64::from(self.past(b) + s),
        }
    }

    /// What a row becomes at a position.
    fn rotated<T: Element>(&self, t: &Tensors<T>, row: &[T], position: i64) -> Vec<Want<T>> {
        let half = self.rotary_dim as usize / 2;
        let mut want: Vec<_> = row.iter().map(|&x| Want::Same(x)).collect();
        for i in 0..half {
            let (first, second) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let inside = (0..i64::from(self.max_positions())).contains(&position);
            let angle = |cache: &[T]| wide(cache[position as usize * half + i]);
            (want[first], want[second]) = match inside {
                false => (Want::Nan, Want::Nan),
                true => {
                    let (a, b, cos, sin) =
                        (wide(row[first]), wide(row[second]), angle(&t.cos), angle(&t.sin));
                    (Want::sum(a * cos, -b * sin), Want::sum(b * cos, a * sin))
                }
            };
        }
        want
    }
}

/// What an element must be.
#[derive(Clone, Debug)]
enum Want<T> {
    Same(T),
    Near(f64, f64),
    Nan,
}

impl<T: Element> Want<T> {
    /// The sum of two products, in f32, rounded once to T.
    fn sum(a: f64, b: f64) -> Self {
        let computed = 2.0 * 0.5f64.powi(24) * (a.abs() + b.abs());
        Self::Near(a + b, computed + unit::<T>() * (a + b).abs() * 1.01 + 1e-7)
    }

    fn accepts(&self, got: T) -> bool {
        match self {
            Self::Same(want) => bytemuck::bytes_of(want) == bytemuck::bytes_of(&got),
            Self::Near(want, tolerance) => (wide(got) - want).abs() <= *tolerance,
            Self::Nan => wide(got).is_nan(),
        }
    }
}

fn same<T: Element>(row: &[T]) -> Vec<Want<T>> {
    row.iter().map(|&x| Want::Same(x)).collect()
}

/// Compares every row with what `want(batch, head, row)` says; between rows nothing may be written.
fn check<T: Element>(
    what: &str,
    got: &Rows<T>,
    shape: [u32; 4],
    want: impl Fn(u32, u32, u32) -> Vec<Want<T>>,
) -> Result<(), TestCaseError> {
    for [b, h, r] in places(shape) {
        for (e, (got, want)) in got.row(b, h, r).iter().zip(want(b, h, r)).enumerate() {
            let name = format!("{what} batch {b} head {h} row {r} element {e}");
            prop_assert!(
                want.accepts(*got),
                "{name}: got {}, want {}",
                wide(*got),
                match want {
                    Want::Same(x) => wide(x).to_string(),
                    Want::Near(x, tolerance) => format!("{x} within {tolerance}"),
                    Want::Nan => "NaN".to_owned(),
                }
            );
        }
    }
    prop_assert!(got.gaps_are_nan(shape), "{what}: a gap was written");
    Ok(())
}

/// Present key or value of a shared cache after the call.
fn appended<T: Element>(
    case: &Case,
    before: &Rows<T>,
    [b, h, j]: [u32; 3],
    new: impl Fn(u32) -> Vec<Want<T>>,
) -> Vec<Want<T>> {
    let past = case.past(b);
    let is_new = case.appends && j >= past && j < case.totals[b as usize];
    if is_new { new(j - past) } else { same(before.row(b, h, j)) }
}

/// Present key or value of a separate cache after the call.
fn concatenated<T: Element>(
    case: &Case,
    past_rows: &Rows<T>,
    [b, h, j]: [u32; 3],
    new: impl Fn(u32) -> Vec<Want<T>>,
) -> Vec<Want<T>> {
    let (past, total) = (case.past(b), case.totals[b as usize]);
    let copied = if case.appends { past } else { total };
    let zeros = || same(&vec![T::from_f32(0.0); case.head_size as usize]);
    match j {
        j if j < copied && j < case.past_capacity => same(past_rows.row(b, h, j)),
        j if j >= copied && j < total => new(j - past),
        _ => zeros(),
    }
}

fn ids<'a, T>(case: &Case, t: &'a Tensors<T>) -> Arg<'a> {
    if case.explicit.is_some() { Arg::read(&t.position_ids) } else { Arg::null() }
}

fn concat_kv_in_place<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let (t, shape) = (case.tensors::<T>(), case.cache_shape(case.capacity()));
    let random = &mut Random::new(case.seed ^ 1);
    let (mut k, mut v) = (Rows::random(shape, CACHE, random), Rows::random(shape, CACHE, random));
    let (k_before, v_before) = (k.clone(), v.clone());
    let p = case.params(&t, Strides::default(), k.strides, Strides::default());
    start(
        entry("concat_kv_in_place", T::DTYPE),
        case.blocks,
        case.seed,
        &[
            Arg::read(&t.k.data),
            Arg::read(&t.v.data),
            Arg::read(&t.cos),
            Arg::read(&t.sin),
            ids(case, &t),
            Arg::read(&t.seqlens_k),
            optional(&t.query_seqlens),
            Arg::write(&mut k.data),
            Arg::write(&mut v.data),
            Arg::params(&p),
        ],
    )?;
    check_appended(case, &t, [&k_before, &v_before], [&k, &v])
}

fn check_appended<T: Element>(
    case: &Case,
    t: &Tensors<T>,
    [k_before, v_before]: [&Rows<T>; 2],
    [k, v]: [&Rows<T>; 2],
) -> Result<(), TestCaseError> {
    let shape = case.cache_shape(case.capacity());
    check("present_k", k, shape, |b, h, j| {
        appended(case, k_before, [b, h, j], |s| {
            case.rotated(t, t.k.row(b, h, s), case.position(t, b, s))
        })
    })?;
    check("present_v", v, shape, |b, h, j| {
        appended(case, v_before, [b, h, j], |s| same(t.v.row(b, h, s)))
    })
}

fn concat_new_to_past_kv<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let (t, shape) = (case.tensors::<T>(), case.cache_shape(case.capacity()));
    let random = &mut Random::new(case.seed ^ 1);
    let past_shape = case.cache_shape(case.past_capacity);
    let past_k = Rows::random(past_shape, CACHE, random);
    let past_v = Rows::random(past_shape, CACHE, random);
    let (mut k, mut v) = (Rows::nan(shape, CACHE), Rows::nan(shape, CACHE));
    let p = case.params(&t, Strides::default(), k.strides, past_k.strides);
    let past = |rows| if case.past_capacity == 0 { Arg::null() } else { Arg::read(rows) };
    start(
        entry("concat_new_to_past_kv", T::DTYPE),
        case.blocks,
        case.seed,
        &[
            past(&past_k.data),
            past(&past_v.data),
            Arg::read(&t.k.data),
            Arg::read(&t.v.data),
            Arg::read(&t.cos),
            Arg::read(&t.sin),
            ids(case, &t),
            Arg::read(&t.seqlens_k),
            optional(&t.query_seqlens),
            Arg::write(&mut k.data),
            Arg::write(&mut v.data),
            Arg::params(&p),
        ],
    )?;
    check("present_k", &k, shape, |b, h, j| {
        let new = |s| case.rotated(&t, t.k.row(b, h, s), case.position(&t, b, s));
        concatenated(case, &past_k, [b, h, j], new)
    })?;
    check("present_v", &v, shape, |b, h, j| {
        concatenated(case, &past_v, [b, h, j], |s| same(t.v.row(b, h, s)))
    })
}

fn unpack_qkv<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let t = case.tensors::<T>();
    let mut q = Rows::nan(case.q_shape(), case.layout);
    let (mut k, mut v) =
        (Rows::nan(case.new_shape(), case.layout), Rows::nan(case.new_shape(), case.layout));
    let p = case.params(&t, q.strides, k.strides, Strides::default());
    start(
        entry("unpack_qkv", T::DTYPE),
        case.blocks,
        case.seed,
        &[
            Arg::read(&t.q.data),
            Arg::read(&t.k.data),
            Arg::read(&t.v.data),
            Arg::write(&mut q.data),
            Arg::write(&mut k.data),
            Arg::write(&mut v.data),
            Arg::params(&p),
        ],
    )?;
    check("q_out", &q, case.q_shape(), |b, h, s| same(t.q.row(b, h, s)))?;
    check("k_out", &k, case.new_shape(), |b, h, s| same(t.k.row(b, h, s)))?;
    check("v_out", &v, case.new_shape(), |b, h, s| same(t.v.row(b, h, s)))
}

fn unpack_qkv_with_rope_and_append_kv<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let (t, shape) = (case.tensors::<T>(), case.cache_shape(case.capacity()));
    let random = &mut Random::new(case.seed ^ 1);
    let mut q = Rows::nan(case.q_shape(), case.layout);
    let (mut k, mut v) = (Rows::random(shape, CACHE, random), Rows::random(shape, CACHE, random));
    let (k_before, v_before) = (k.clone(), v.clone());
    let p = case.params(&t, q.strides, k.strides, Strides::default());
    start(
        entry("unpack_qkv_with_rope_and_append_kv", T::DTYPE),
        case.blocks,
        case.seed,
        &[
            Arg::read(&t.q.data),
            Arg::read(&t.k.data),
            Arg::read(&t.v.data),
            Arg::read(&t.cos),
            Arg::read(&t.sin),
            ids(case, &t),
            Arg::read(&t.seqlens_k),
            optional(&t.query_seqlens),
            Arg::write(&mut q.data),
            Arg::write(&mut k.data),
            Arg::write(&mut v.data),
            Arg::params(&p),
        ],
    )?;
    check_query(case, &t, &q)?;
    check_appended(case, &t, [&k_before, &v_before], [&k, &v])
}

fn check_query<T: Element>(case: &Case, t: &Tensors<T>, q: &Rows<T>) -> Result<(), TestCaseError> {
    check("q_out", q, case.q_shape(), |b, h, s| {
        case.rotated(t, t.q.row(b, h, s), case.position(t, b, s))
    })
}

fn rotary_embedding<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let t = case.tensors::<T>();
    let mut q = Rows::nan(case.q_shape(), case.layout);
    let p = case.params(&t, q.strides, Strides::default(), Strides::default());
    start(
        entry("rotary_embedding", T::DTYPE),
        case.blocks,
        case.seed,
        &[
            Arg::read(&t.q.data),
            Arg::read(&t.cos),
            Arg::read(&t.sin),
            ids(case, &t),
            Arg::read(&t.seqlens_k),
            optional(&t.query_seqlens),
            Arg::write(&mut q.data),
            Arg::params(&p),
        ],
    )?;
    check_query(case, &t, &q)
}

fn qk_norm<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    const EPSILONS: [f32; 2] = [0.01, 0.3];
    let t = case.tensors::<T>();
    let random = &mut Random::new(case.seed ^ 1);
    let weights = [(); 2].map(|()| random.values::<T>(case.head_size as usize));
    let mut q = Rows::nan(case.q_shape(), case.layout);
    let mut k = Rows::nan(case.new_shape(), case.layout);
    let p = case.params(&t, q.strides, k.strides, Strides::default());
    let p = PrologueParams { q_epsilon: EPSILONS[0], k_epsilon: EPSILONS[1], ..p };
    let k_out = if case.appends { Arg::write(&mut k.data) } else { Arg::null() };
    let tensors = [
        Arg::read(&t.q.data),
        if case.appends { Arg::read(&t.k.data) } else { Arg::null() },
        Arg::read(&weights[0]),
        Arg::read(&weights[1]),
        Arg::write(&mut q.data),
        k_out,
        Arg::params(&p),
    ];
    start(entry("qk_norm", T::DTYPE), case.blocks, case.seed, &tensors)?;
    let normed = |row: &[T], weight: &[T], epsilon: f32| -> Vec<Want<T>> {
        let mean = row.iter().map(|&x| wide(x).powi(2)).sum::<f64>() / row.len() as f64;
        let root = (mean + f64::from(epsilon)).sqrt();
        let y = row.iter().zip(weight).map(|(&x, &weight)| wide(x) / root * wide(weight));
        y.map(|y| Want::Near(y, y.abs() * (1.01 * unit::<T>() + 2e-6) + 1e-7)).collect()
    };
    check("q_out", &q, case.q_shape(), |b, h, s| {
        normed(t.q.row(b, h, s), &weights[0], EPSILONS[0])
    })?;
    check("k_out", &k, case.new_shape(), |b, h, s| {
        normed(t.k.row(b, h, s), &weights[1], EPSILONS[1])
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(250) })]

    #[test]
    fn concat_kv_in_place_appends(case in case()) {
        with_type!(case.dtype, concat_kv_in_place(&case))?;
    }

    #[test]
    fn concat_new_to_past_kv_writes_every_row(case in case()) {
        with_type!(case.dtype, concat_new_to_past_kv(&case))?;
    }

    #[test]
    fn unpack_qkv_copies(case in case()) {
        with_type!(case.dtype, unpack_qkv(&case))?;
    }

    #[test]
    fn unpack_qkv_with_rope_and_append_kv_does_everything(case in case()) {
        with_type!(case.dtype, unpack_qkv_with_rope_and_append_kv(&case))?;
    }

    #[test]
    fn qk_norm_divides_by_the_root_mean_square(case in case()) {
        with_type!(case.dtype, qk_norm(&case))?;
    }

    #[test]
    fn rotary_embedding_rotates(case in case()) {
        with_type!(case.dtype, rotary_embedding(&case))?;
    }

    #[test]
    fn positions_follow_lengths(case in case()) {
        let t = case.tensors::<f32>();
        let mut p = case.params(&t, Strides::default(), Strides::default(), Strides::default());
        p.rotary.position_stride = case.q_len + 1;
        let mut ids = vec![-7; case.totals.len() * p.rotary.position_stride as usize];
        let positions = [Arg::read(&t.seqlens_k), optional(&t.query_seqlens), Arg::write(&mut ids), Arg::params(&p)];
        start(entry("seqlens_to_pos_ids", DType::F32), case.blocks, case.seed, &positions)?;
        for b in 0..case.totals.len() {
            let before = i64::from(case.past(b as u32));
            let row: Vec<i64> = (0..case.q_len).map(|s| before + i64::from(s)).chain([-7]).collect();
            prop_assert_eq!(&ids[b * row.len()..][..row.len()], row);
        }
    }

    /// The simulator faults on any access outside a tensor.
    #[test]
    fn no_length_leads_outside(case in case(), lengths in prop::collection::vec(any::<i32>(), 6)) {
        let mut t = case.tensors::<f32>();
        t.seqlens_k.clone_from_slice(&lengths[..case.totals.len()]);
        if let Some(tokens) = &mut t.query_seqlens {
            tokens.clone_from_slice(&lengths[3..][..case.totals.len()]);
        }
        let shape = case.cache_shape(case.capacity());
        let (mut k, mut v) = (Rows::<f32>::nan(shape, CACHE), Rows::<f32>::nan(shape, CACHE));
        let mut q = Rows::<f32>::nan(case.q_shape(), case.layout);
        let past = Rows::<f32>::nan(case.cache_shape(case.past_capacity), CACHE);
        let p = case.params(&t, q.strides, k.strides, past.strides);
        start(entry("unpack_qkv_with_rope_and_append_kv", DType::F32), case.blocks, case.seed, &[
            Arg::read(&t.q.data), Arg::read(&t.k.data), Arg::read(&t.v.data), Arg::read(&t.cos), Arg::read(&t.sin),
            ids(&case, &t), Arg::read(&t.seqlens_k), optional(&t.query_seqlens), Arg::write(&mut q.data), Arg::write(&mut k.data),
            Arg::write(&mut v.data), Arg::params(&p),
        ])?;
        start(entry("concat_new_to_past_kv", DType::F32), case.blocks, case.seed, &[
            Arg::read(&past.data), Arg::read(&past.data), Arg::read(&t.k.data), Arg::read(&t.v.data), Arg::read(&t.cos),
            Arg::read(&t.sin), ids(&case, &t), Arg::read(&t.seqlens_k), optional(&t.query_seqlens), Arg::write(&mut k.data),
            Arg::write(&mut v.data), Arg::params(&p),
        ])?;
    }

    #[test]
    fn a_grid_has_a_thread_for_each_item_until_it_is_capped(case in case(), multiprocessors in 0..=200u32) {
        let t = case.tensors::<f32>();
        let p = case.params(&t, Strides::default(), Strides::default(), Strides::default());
        let items = |rows: u32, heads: u32, each: u32| u64::from(rows * heads * case.batch() * each);
        let vectors = |rows, heads| items(rows, heads, case.head_size / 4);
        let pairs = |rows, heads| items(rows, heads, (case.head_size / 4).div_ceil(2));
        let new_heads = if case.appends { 2 * case.kv_heads } else { 0 };
        for (kernel, work) in [
            ("concat_kv_in_place", pairs(case.new_len(), case.kv_heads)),
            ("concat_new_to_past_kv", vectors(case.capacity(), 2 * case.kv_heads)),
            ("unpack_qkv", vectors(case.q_len, case.q_heads() + new_heads)),
            ("unpack_qkv_with_rope_and_append_kv", pairs(case.q_len, case.q_heads() + new_heads)),
            ("rotary_embedding", pairs(case.q_len, case.q_heads())),
            ("seqlens_to_pos_ids", u64::from(case.batch() * case.q_len)),
        ] {
            let [x, y, z] = prologue_grid::grid(entry(kernel, DType::F32), &p, multiprocessors);
            let wanted = work.div_ceil(u64::from(prologue::THREADS)).max(1);
            prop_assert_eq!([y, z], [1, 1]);
            prop_assert!(u64::from(x) == wanted || u64::from(x) < wanted && x >= 16, "{}: {} of {}", kernel, x, wanted);
        }
    }
}
