//! The instruction sets of attention.

use gqa_tensor::{Error, Result};
use std::fmt;

/// The instruction set of attention's inner loops: vectors, and matrix instructions for bfloat16.
/// Type conversions always use the widest set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Instructions(pub(super) gqa_cpu::Instructions);

impl Instructions {
    /// The environment variable that [`Instructions::from_env`] reads.
    pub const VARIABLE: &str = gqa_plan::plan::environment::CPU;

    /// All instruction sets of this processor, from the widest to `scalar`.
    pub fn all() -> Vec<Self> {
        gqa_cpu::Instructions::all().into_iter().map(Self).collect()
    }

    /// The instruction set named by the environment; by default the widest.
    ///
    /// # Errors
    ///
    /// Where this processor lacks the one that `GQA_CPU_INSTRUCTIONS` names.
    pub fn from_env() -> Result<Self> {
        match std::env::var_os(Self::VARIABLE) {
            Some(name) => Self::named(&name.to_string_lossy()),
            None => Ok(Self::default()),
        }
    }

    /// The instruction set of that name.
    ///
    /// # Errors
    ///
    /// Where this processor lacks it.
    pub fn named(name: &str) -> Result<Self> {
        let all = Self::all();
        all.iter().find(|one| one.name() == name).copied().ok_or_else(|| {
            let allowed = all.iter().map(Self::to_string).collect::<Vec<_>>().join(", ");
            Error::invalid(Self::VARIABLE, format!("{name:?}"), format!("{allowed} here"))
        })
    }

    /// `amx` (AVX-512, and tiles for prefill in bfloat16), `avx512`, `avx2` (with FMA and F16C),
    /// `neon` or `scalar`.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_this_processor() {
        for one in Instructions::all() {
            assert_eq!(Instructions::named(one.name()).unwrap().name(), one.name());
        }
        let refused = Instructions::named("avx1024").unwrap_err().to_string();
        assert!(
            refused.contains("GQA_CPU_INSTRUCTIONS") && refused.contains("scalar"),
            "{refused}"
        );
    }
}
