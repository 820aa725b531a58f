//! What a processor computes by.

use pulp::Arch;

#[cfg(target_arch = "x86_64")]
use super::amx::Amx;

/// The vector instructions of this processor, and its matrix instructions for bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct Instructions {
    pub(super) vectors: Arch,
    /// What multiplies pairs of bfloat16.
    #[cfg(target_arch = "x86_64")]
    pub(super) tiles: Option<Amx>,
}

impl Default for Instructions {
    /// The widest.
    fn default() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = Amx::try_new() {
            return Self::of_tiles(tiles);
        }
        Self::of_vectors(Arch::new())
    }
}

impl Instructions {
    /// All instruction sets that this processor has, the widest first, down to `scalar`.
    pub fn all() -> Vec<Self> {
        let mut vectors = Vec::new();
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use pulp::x86::{V3, V4};
            all.extend(Amx::try_new().map(Self::of_tiles));
            vectors.extend(V4::try_new().map(Arch::V4));
            vectors.extend(V3::try_new().map(Arch::V3));
        }
        #[cfg(target_arch = "aarch64")]
        vectors.extend(pulp::aarch64::Neon::try_new().map(Arch::Neon));
        vectors.push(Arch::Scalar);
        all.extend(vectors.into_iter().map(Self::of_vectors));
        all
    }

    fn of_vectors(vectors: Arch) -> Self {
        Self {
            vectors,
            #[cfg(target_arch = "x86_64")]
            tiles: None,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn of_tiles(tiles: Amx) -> Self {
        Self { vectors: Arch::V4(tiles.vectors), tiles: Some(tiles) }
    }

    /// `amx` (AVX-512 and tiles of bfloat16), `avx512`, `avx2` (with FMA and F16C), `neon` or
    /// `scalar`.
    pub fn name(&self) -> &'static str {
        #[cfg(target_arch = "x86_64")]
        if self.tiles.is_some() {
            return "amx";
        }
        match self.vectors {
            Arch::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Arch::V4(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Arch::Neon(_) => "neon",
            _ => "other",
        }
    }
}
