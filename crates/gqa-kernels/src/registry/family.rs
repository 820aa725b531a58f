//! Families of kernels, and what they are compiled for.

/// What some of a family's kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Such as `sm_80`; with an `a` it runs on that architecture only, with an `f` on those of the
    /// same major number that are not older.
    pub arch: &'static str,
    /// PTX module that has these kernels, without the GPU: they are compiled where
    /// `cfg(ptx_module)` is it.
    pub module: &'static str,
    /// PTX version, times ten, where the target's first one does not know all that they use.
    pub ptx: Option<u32>,
}

impl Target {
    /// Whether GPUs of that compute capability, times ten, run what is compiled for it.
    pub fn runs_on(&self, sm: u32) -> bool {
        runs_on(self.arch, sm)
    }
}

/// Whether GPUs of that compute capability, times ten, run PTX for a target such as `sm_80`.
pub fn runs_on(arch: &str, sm: u32) -> bool {
    match number(arch) {
        (number, true) if arch.ends_with('f') => number <= sm && number / 10 == sm / 10,
        (number, true) => number == sm,
        (number, false) => number <= sm,
    }
}

/// A target's compute capability, times ten, and whether it is for that one or its family only.
/// Where two targets run on a GPU, the greater one knows more of it.
pub fn number(arch: &str) -> (u32, bool) {
    let digits = arch.trim_start_matches("sm_");
    let plain = digits.trim_end_matches(['a', 'f']);
    (plain.parse().unwrap_or(u32::MAX), plain != digits)
}

/// The families: for each file of tables its families, with their rows in `TABLES` of that file.
/// A row is `VARIANT: NAME, MODULE, TARGETS, oldest first`; behind a target `ptx` (times ten) where
/// its first version of PTX does not know all that the family uses. A target that has kernels of
/// its own, and not those of the others, names their module.
macro_rules! families {
    ($($file:ident { $(
        $(#[$doc:meta])*
        $family:ident: $name:literal, $module:literal,
        [$($arch:literal $(ptx $ptx:literal)? $(=> $own:literal)?),*];
    )* })*) => {
        /// Kernels that are compiled into one PTX module.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Family {
            $($($(#[$doc])* $family,)*)*
        }

        impl Family {
            /// All families.
            pub const ALL: [Self; [$($(Self::$family,)*)*].len()] = [$($(Self::$family,)*)*];

            /// As plans and documentation call it.
            pub const fn name(self) -> &'static str {
                match self {
                    $($(Self::$family => $name,)*)*
                }
            }

            /// Its PTX module, without the GPU.
            pub const fn module(self) -> &'static str {
                match self {
                    $($(Self::$family => $module,)*)*
                }
            }

            /// Targets the family is shipped for, oldest first.
            pub const fn targets(self) -> &'static [Target] {
                match self {
                    $($(Self::$family => &[$(
                        Target {
                            arch: $arch,
                            module: optional!($module $(, $own)?),
                            ptx: optional!(None $(, Some($ptx))?),
                        },
                    )*],)*)*
                }
            }
        }

        /// Every table, one per argument list.
        static TABLES: &[&[&[Entry]]] = &[$($file::TABLES),*];
    };
}
