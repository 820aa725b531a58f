//! Plan options from environment variables: one table serves parsing and documentation.

use super::families::{CONTIGUOUS, PAGED};
use super::family::Family;
use super::options::{Fold, PlanOption, PlanOptions, is_cluster, is_splits};
use super::trust::Trust;
use gqa_tensor::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// An environment variable that sets a plan option.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// The option that it sets.
    pub option: PlanOption,
    /// ONNX Runtime's variable for the same option, which is read if this one is not set.
    pub alias: Option<&'static str>,
    /// The values that it takes.
    pub values: &'static str,
    /// Its effect; `{}` stands for the families that it affects.
    meaning: &'static str,
    set: fn(&mut PlanOptions, &str) -> Option<()>,
}

impl Variable {
    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.option.variable()
    }

    /// What it does.
    pub fn meaning(&self) -> String {
        let concerns = |family: &&dyn Family| family.options().contains(&self.option);
        let mut names = Vec::new();
        let paged = PAGED.iter().map(|paged| paged.family);
        for family in paged.chain(CONTIGUOUS).filter(concerns) {
            let name = format!("`{}`", family.module().name());
            // A family for contiguous and paged caches is there twice.
            if !names.contains(&name) {
                names.push(name);
            }
        }
        self.meaning.replace("{}", &names.join(", "))
    }
}

/// Every variable.
pub static TABLE: [Variable; 9] = [
    Variable {
        option: PlanOption::DisableFlashAttention,
        alias: Some("ORT_DISABLE_FLASH_ATTENTION"),
        values: "0 or 1",
        meaning: "1: none of {} is considered",
        set: |s, v| flag(&mut s.disable_flash_attention, v),
    },
    Variable {
        option: PlanOption::DisableFlashDecode,
        alias: Some("ORT_DISABLE_FLASH_DECODE"),
        values: "0 or 1",
        meaning: "1: none of {} is considered",
        set: |s, v| flag(&mut s.disable_flash_decode, v),
    },
    Variable {
        option: PlanOption::DisableMemoryEfficientAttention,
        alias: Some("ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION"),
        values: "0 or 1",
        meaning: "1: {} is not considered",
        set: |s, v| flag(&mut s.disable_memory_efficient_attention, v),
    },
    Variable {
        option: PlanOption::DisableFusedKv,
        alias: Some("ORT_DISABLE_FUSED_KV"),
        values: "0 or 1",
        meaning: "1: unpacking, rotation and cache update are separate launches, and none of {} is \
                  considered",
        set: |s, v| flag(&mut s.disable_fused_kv, v),
    },
    Variable {
        option: PlanOption::Splits,
        alias: None,
        values: "1 to 128",
        meaning: "number of key splits in {}, instead of their heuristics",
        set: |s, v| {
            s.splits = Some(v.parse().ok().filter(|&n| is_splits(n))?);
            Some(())
        },
    },
    Variable {
        option: PlanOption::Cluster,
        alias: None,
        values: "1, 2, 4, 8 or 16",
        meaning: "CTAs per cluster in {}, instead of their heuristic",
        set: |s, v| {
            s.cluster = Some(v.parse().ok().filter(|&n| is_cluster(n))?);
            Some(())
        },
    },
    Variable {
        option: PlanOption::Force,
        alias: None,
        values: "the name of a kernel entry",
        meaning: "use that kernel or fail with the reason why it cannot be used",
        set: |s, v| {
            s.force = Some(gqa_kernels::registry::find(v)?.name);
            Some(())
        },
    },
    Variable {
        option: PlanOption::Fold,
        alias: None,
        values: "0, layer or call",
        meaning: "the kernel parameters that are folded into the PTX as constants: none; those \
                  that a layer of a model fixes (the default); or all but addresses, with a module \
                  for each plan",
        set: |s, v| {
            s.fold = match v {
                "0" => Fold::Off,
                "layer" => Fold::Layer,
                "call" => Fold::Call,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        option: PlanOption::Trust,
        alias: None,
        values: "all, tested or none",
        meaning: "on GPUs of another compute capability than 9.0, the only one on which kernels \
                  ran: use all kernels untested; test each at its first use, and leave it out \
                  unless it agrees with the simplest ones (the default); or use only the simplest \
                  ones, `general` and `unfused`",
        set: |s, v| {
            s.trust = match v {
                "all" => Trust::All,
                "tested" => Trust::Tested,
                "none" => Trust::None,
                _ => return None,
            };
            Some(())
        },
    },
];

/// The folder to which every call writes its tensors.
pub const DUMP: &str = "GQA_DUMP";

/// Enables checks of counters, lengths and tables in calls on a GPU.
pub const CHECK: &str = "GQA_CHECK";

/// Selects the instructions of attention on the CPU.
pub const CPU: &str = "GQA_CPU_INSTRUCTIONS";

/// Sets the log level of the program and the packages.
const LOG: &str = "GQA_LOG";

/// Variables that set no plan option: name, values, meaning.
pub static AIDS: [(&str, &str, &str); 4] = [
    (
        DUMP,
        "a folder, which is created if missing",
        "every call of an operator writes its tensors there as `.npy` files",
    ),
    (
        CHECK,
        "0 or 1",
        "1: before each call on a GPU the library waits for the stream and reads counters, \
         lengths, positions, block tables and schedules. The call is an error that names the \
         tensor if counters are not zero, as after a failed call or one that shared them, if a \
         schedule (`scheduler_metadata` in Python) is for other lengths, or if a value leads \
         outside of the tensor that it indexes. Slow: for debugging. Such a call cannot be \
         captured in a graph. Read when a plan is loaded",
    ),
    (
        CPU,
        "`amx`, `avx512`, `avx2`, `neon` or `scalar`",
        "instruction set of attention on the CPU, by default the widest that the processor has; \
         type conversions always use that one. `amx` is `avx512` with AMX tiles for prefill in \
         bfloat16. The program, candle's crate and the packages for Python and ONNX Runtime read \
         it, the library in `Instructions::from_env`",
    ),
    (
        LOG,
        "`error`, `warn`, `info`, `debug` or `trace`",
        "log level, on stderr, of the program `gqa` and the packages for Python and ONNX Runtime. \
         `debug` logs the sizes of each call, and for each launch its entry, grid, threads and \
         bytes of shared memory. Read when the program starts, the package is imported, or the \
         library registered",
    ),
];

/// The log level that `GQA_LOG` sets; warnings by default. Programs and packages that log read it;
/// the library does not.
///
/// # Errors
///
/// [`Error::Switch`] where it is no such level.
pub fn log_level() -> Result<tracing::Level> {
    let wanted = std::env::var_os(LOG).unwrap_or_else(|| "warn".into());
    let known = wanted.to_str().filter(|wanted| !wanted.contains(|c: char| c.is_ascii_digit()));
    known.and_then(|wanted| wanted.parse().ok()).ok_or_else(|| Error::Switch {
        name: LOG,
        got: wanted.to_string_lossy().into_owned(),
        allowed: "error, warn, info, debug, trace",
    })
}

impl PlanOptions {
    /// Reads the process environment. Unknown `GQA_*` names are warnings through `tracing`, each
    /// once. Programs that compute on the CPU, where plan options have no effect, should also call
    /// this once, so that misspelt names and wrong values are reported on every machine.
    ///
    /// # Errors
    ///
    /// Where a variable has an invalid value; the error names it.
    pub fn from_env() -> Result<Self> {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        });
        Self::from_variables(variables)
    }

    /// Reads the options among `variables`.
    ///
    /// # Errors
    /// [`Error::Switch`] where a variable does not take its value.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let variables: BTreeMap<_, _> = variables.into_iter().collect();
        let mut options = Self::default();
        for variable in &TABLE {
            let names = [Some(variable.name()), variable.alias];
            let found =
                names.into_iter().flatten().find_map(|name| Some((name, variables.get(name)?)));
            if let Some((name, value)) = found {
                (variable.set)(&mut options, value.trim()).ok_or_else(|| Error::Switch {
                    name,
                    got: value.clone(),
                    allowed: variable.values,
                })?;
            }
        }
        for name in first_told(variables.into_keys().filter(|name| unknown(name))) {
            tracing::warn!(
                "environment variable {name} is no option of this library and has no effect"
            );
        }
        Ok(options)
    }
}

/// The names that this process has not reported yet: options are read once for each GPU, and again
/// for the CPU.
fn first_told(names: impl Iterator<Item = String>) -> Vec<String> {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    names.filter(|name| told.insert(name.clone())).collect()
}

/// Both tables as Markdown, for the documentation.
pub fn markdown() -> String {
    let rows = TABLE.iter().map(|variable| {
        let Variable { alias, values, .. } = variable;
        let (name, meaning) = (variable.name(), variable.meaning());
        let alias = alias.map(|a| format!("`{a}`")).unwrap_or_default();
        format!("| `{name}` | {alias} | {values} | {meaning} |\n")
    });
    let aids = AIDS
        .iter()
        .map(|(name, values, meaning)| format!("| `{name}` | | {values} | {meaning} |\n"));
    format!(
        "| variable | alias | values | meaning |\n|---|---|---|---|\n{}",
        rows.chain(aids).collect::<String>()
    )
}

fn unknown(name: &str) -> bool {
    let known = TABLE.iter().map(Variable::name).chain(AIDS.map(|(name, ..)| name));
    name.starts_with("GQA_") && known.into_iter().all(|known| known != name)
}

fn flag(switch: &mut bool, value: &str) -> Option<()> {
    *switch = match value {
        "0" => false,
        "1" => true,
        _ => return None,
    };
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<PlanOptions> {
        PlanOptions::from_variables(variables.iter().map(|(n, v)| (n.to_string(), v.to_string())))
    }

    #[test]
    fn every_option_is_off_by_default() {
        assert_eq!(read(&[("PATH", "/bin")]).unwrap(), PlanOptions::default());
    }

    #[test]
    fn flags_are_read_by_either_name_and_ours_wins() {
        for variable in TABLE.iter().filter(|v| v.values == "0 or 1") {
            let (name, alias) = (variable.name(), variable.alias.unwrap());
            let on = read(&[(name, "1")]).unwrap();
            assert_ne!(on, PlanOptions::default(), "{name}");
            assert_eq!(read(&[(alias, "1")]).unwrap(), on);
            assert_eq!(read(&[(alias, "1"), (name, "0")]).unwrap(), PlanOptions::default());
        }
    }

    #[test]
    fn values_are_read_and_bad_ones_refused() {
        assert_eq!(read(&[("GQA_SPLITS", "7")]).unwrap().splits, Some(7));
        for (value, fold) in [("0", Fold::Off), ("layer", Fold::Layer), ("call", Fold::Call)] {
            assert_eq!(read(&[("GQA_FOLD", value)]).unwrap().fold, fold);
        }
        for (value, trust) in
            [("all", Trust::All), ("none", Trust::None), ("tested", Trust::Tested)]
        {
            assert_eq!(read(&[("GQA_TRUST", value)]).unwrap().trust, trust);
        }
        for (name, value) in [
            ("GQA_SPLITS", "0"),
            ("GQA_SPLITS", "129"),
            ("GQA_CLUSTER", "3"),
            ("GQA_CLUSTER", "32"),
            ("ORT_DISABLE_FUSED_KV", "yes"),
            ("GQA_FORCE", "no_such_kernel"),
            ("GQA_FOLD", "1"),
            ("GQA_TRUST", "some"),
        ] {
            let message = read(&[(name, value)]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(value), "{message}");
        }
    }

    #[test]
    fn unknown_names_have_no_effect() {
        assert_eq!(read(&[("GQA_TURBO", "1")]).unwrap(), PlanOptions::default());
        assert!(unknown("GQA_TURBO") && !unknown("GQA_SPLITS") && !unknown("HOME"));
        assert!(!unknown("GQA_DUMP") && !unknown("GQA_LOG"));
    }

    #[test]
    fn unknown_names_are_told_once() {
        let names = ["GQA_TELL_A", "GQA_TELL_B"];
        let told = |names: &[&str]| first_told(names.iter().map(|name| name.to_string()));
        assert_eq!(told(&names[..1]), names[..1]);
        assert_eq!(told(&names), names[1..]);
        assert!(told(&names).is_empty());
    }
}
