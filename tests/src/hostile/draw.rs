//! Numbers that callers may come up with.

use gqa_host::DType;
use gqa_host::plan::{DeviceInfo, Fold, PlanOptions, Trust};
use gqa_kernels::registry::{Family, entries};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestRunner};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The random source of a call.
pub struct Draw(SmallRng);

/// Element types.
pub const TYPES: [DType; 10] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::I64,
    DType::F64,
    DType::Bool,
    DType::I8,
    DType::U8,
    DType::F8E4M3,
];

impl Draw {
    /// What one call is drawn from.
    pub fn new(seed: u64) -> Self {
        Self(SmallRng::seed_from_u64(seed))
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n)
    }

    /// Whether it is the one of `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Either.
    pub fn flag(&mut self) -> bool {
        self.0.random()
    }

    /// One of these.
    pub fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        self.0.random()
    }

    /// A seed of other data.
    pub fn seed(&mut self) -> u64 {
        self.0.random()
    }

    /// A value of the strategy.
    pub fn any<S: Strategy>(&mut self, strategy: S) -> S::Value {
        let config = Config { rng_seed: RngSeed::Fixed(self.seed()), ..Config::default() };
        strategy.new_tree(&mut TestRunner::new(config)).expect("few are filtered").current()
    }

    /// A wrong dimension for `n`: a number next to it, a small one, or one at which a count
    /// overflows.
    pub fn size(&mut self, n: usize) -> usize {
        match self.below(8) {
            0 => n.wrapping_add(1),
            1 => n.saturating_sub(1),
            2 => n.wrapping_mul(2),
            3 => n / 2,
            4 | 5 => self.of(&[0, 0, 1, 1, 2, 3, 7, 8, 9, 63, 65, 512, 520]),
            _ => {
                let power = 1usize << self.of(&[15, 16, 31, 32, 40, 61, 62, 63]);
                self.of(&[power - 1, power, power + 1, usize::MAX])
            }
        }
    }

    /// What somebody may take for an integer.
    pub fn integer(&mut self) -> i64 {
        let integer = self.size(4) as i64;
        if self.flag() { integer } else { integer.wrapping_neg() }
    }

    /// What somebody may take for a number.
    pub fn float(&mut self) -> f32 {
        self.of(&[
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1e-3,
            30.0,
            448.0,
            1e-30,
            1e-39,
            -1e-39,
            1e30,
            f32::MAX,
            f32::MIN,
            1.0 / 0.0,
            -1.0 / 0.0,
            f32::NAN,
        ])
    }

    /// A GPU, most often one that there is.
    pub fn device(&mut self) -> DeviceInfo {
        let names: Vec<_> = DeviceInfo::known_names().collect();
        let mut device = DeviceInfo::known(self.of(&names)).expect("its name is known");
        if self.one_in(4) {
            let count = self.of(&[0, 1, 2, 75, 132, 65_536, u32::MAX - 1, u32::MAX]);
            let rate = self.of(&[0.0, -0.0, 1.0, -1e12, 1e300, f64::INFINITY, f64::NAN]);
            match self.below(7) {
                0 => device.sm = count,
                1 => device.multiprocessors = count,
                2 => device.shared_bytes = count,
                3 => device.l2_bytes = self.of(&[0, 1, u64::MAX / 2, u64::MAX]),
                4 => device.bandwidth = rate,
                5 => device.tensor_flops = rate,
                _ => device.f32_flops = rate,
            }
        }
        device
    }

    /// Options, most often none.
    pub fn options(&mut self) -> PlanOptions {
        if !self.one_in(4) {
            return PlanOptions::default();
        }
        let counts = [None, None, Some(0), Some(1), Some(2), Some(3), Some(128), Some(u32::MAX)];
        let forced = entries().nth(self.below(entries().count())).map(|entry| entry.name);
        PlanOptions {
            disable_flash_attention: self.one_in(4),
            disable_flash_decode: self.one_in(4),
            disable_memory_efficient_attention: self.one_in(4),
            disable_fused_kv: self.one_in(4),
            splits: self.of(&counts),
            cluster: self.of(&counts),
            force: self.of(&[None, None, forced, Some(""), Some("no such kernel")]),
            fold: self.of(&[Fold::Off, Fold::Layer, Fold::Call]),
            trust: self.of(&[Trust::All, Trust::Tested, Trust::None]),
            distrusted: Family::ALL.into_iter().filter(|_| self.one_in(8)).collect(),
        }
    }
}
