//! Random tensors, and kernels launched by name.

use gqa_kernels::num::{DType, Element};
use gqa_kernels::params::Strides;
use gqa_kernels::registry::{Entry, entries};
use gqa_sim::{Arg, Launch, launch};
use proptest::test_runner::TestCaseError;

/// xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// In 0 .. 1.
    pub fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In -1.7 .. 1.7, with variance 1.
    pub fn value<T: Element>(&mut self) -> T {
        T::from_f32(((self.unit() - 0.5) * 12f64.sqrt()) as f32)
    }

    pub fn values<T: Element>(&mut self, count: usize) -> Vec<T> {
        (0..count).map(|_| self.value()).collect()
    }

    /// In 0 .. n.
    pub fn below(&mut self, n: u32) -> u32 {
        (self.unit() * f64::from(n)) as u32
    }
}

/// Order and spacing of a tensor's rows.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Heads before rows in memory.
    pub bnsh: bool,
    /// Elements between rows that belong to nobody.
    pub gap: u32,
}

pub const CACHE: Layout = Layout { bnsh: true, gap: 0 };

/// A (batch, head, row, width) tensor.
#[derive(Clone)]
pub struct Rows<T> {
    pub data: Vec<T>,
    pub strides: Strides,
    width: usize,
}

impl<T: Element> Rows<T> {
    /// Filled with NaN.
    pub fn nan([batch, heads, rows, width]: [u32; 4], layout: Layout) -> Self {
        let [b, h, r, w] = [batch, heads, rows, width + layout.gap].map(u64::from);
        let strides = match layout.bnsh {
            true => Strides { batch: h * r * w, head: r * w, row: w },
            false => Strides { batch: h * r * w, head: w, row: h * w },
        };
        let data = vec![T::from_f32(f32::NAN); (b * h * r * w) as usize];
        Self { data, strides, width: width as usize }
    }

    /// Filled with random values, gaps with NaN.
    pub fn random(shape: [u32; 4], layout: Layout, random: &mut Random) -> Self {
        let mut rows = Self::nan(shape, layout);
        for [b, h, r] in places(shape) {
            rows.row_mut(b, h, r).fill_with(|| random.value());
        }
        rows
    }

    pub fn row(&self, b: u32, h: u32, r: u32) -> &[T] {
        &self.data[self.strides.at(b, h, r)..][..self.width]
    }

    /// Whether nothing was written between rows.
    pub fn gaps_are_nan(&self, shape: [u32; 4]) -> bool {
        let mut rows = vec![false; self.data.len()];
        for [b, h, r] in places(shape) {
            rows[self.strides.at(b, h, r)..][..self.width].fill(true);
        }
        rows.iter().zip(&self.data).all(|(row, x)| *row || wide(*x).is_nan())
    }

    pub fn row_mut(&mut self, b: u32, h: u32, r: u32) -> &mut [T] {
        &mut self.data[self.strides.at(b, h, r)..][..self.width]
    }
}

/// All (batch, head, row).
pub fn places([batch, heads, rows, _]: [u32; 4]) -> impl Iterator<Item = [u32; 3]> {
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..rows).map(move |r| [b, h, r])))
}

/// Exact.
pub fn wide<T: Element>(x: T) -> f64 {
    f64::from(x.to_f32())
}

/// A bound on the relative error of rounding to `T`.
pub fn unit<T: Element>() -> f64 {
    match T::DTYPE {
        DType::F32 => 0.5f64.powi(24),
        DType::F16 => 0.5f64.powi(11),
        DType::BF16 => 0.5f64.powi(8),
    }
}

pub fn entry(kernel: &str, dtype: DType) -> &'static Entry {
    let type_name = format!("{dtype:?}").to_lowercase();
    let names = [format!("gqa_{kernel}"), format!("gqa_{kernel}_{type_name}")];
    let is_it = |entry: &&Entry| entry.dtype == dtype && names.iter().any(|n| n == entry.name);
    entries().find(is_it).expect("a kernel")
}

/// Runs a kernel.
pub fn start(
    entry: &Entry,
    blocks: u32,
    seed: u64,
    arguments: &[Arg<'_>],
) -> Result<(), TestCaseError> {
    let Entry { name, threads, shared_bytes, .. } = *entry;
    let shape =
        Launch { name, grid: [blocks, 1, 1], threads, shared_bytes, seed, ..Launch::default() };
    let fault = |fault: gqa_sim::Fault| TestCaseError::fail(fault.to_string());
    launch(&shape, &entry.simulate, arguments).map(|_| ()).map_err(fault)
}

/// Calls a generic function with an element type named at run time.
macro_rules! with_type {
    ($dtype:expr, $f:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $f::<f32>($($argument),*),
            DType::F16 => $f::<gqa_kernels::num::f16>($($argument),*),
            DType::BF16 => $f::<gqa_kernels::num::bf16>($($argument),*),
        }
    };
}
pub(crate) use with_type;

/// query_seqlens of a third of the cases: tokens among each sequence's rows, none and all too.
pub fn some_tokens(seed: u64, q_len: u32, totals: &[u32]) -> Option<Vec<u32>> {
    let mut random = Random::new(seed);
    let mut some = |&total: &u32| {
        let most = q_len.min(total);
        if random.below(3) == 0 { most } else { random.below(most + 1) }
    };
    seed.is_multiple_of(3).then(|| totals.iter().map(&mut some).collect())
}

/// The tensor query_seqlens.
pub fn query_seqlens(tokens: &Option<Vec<u32>>) -> Option<Vec<i32>> {
    tokens.as_ref().map(|tokens| tokens.iter().map(|&tokens| tokens as i32).collect())
}

/// An optional tensor of integers.
pub fn optional(tensor: &Option<Vec<i32>>) -> Arg<'_> {
    tensor.as_ref().map_or_else(Arg::null, |tensor| Arg::read(tensor))
}
