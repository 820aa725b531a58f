//! Environment switches: one table, from which they are read and documented.

use crate::{Error, Result};
use gqa_kernels::attention::{decode::MAX_RANKS, split_kv::MAX_SPLITS};

/// One environment variable.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// Its name.
    pub name: &'static str,
    /// ONNX Runtime's name for the same thing; used where `name` is not set.
    pub alias: Option<&'static str>,
    /// What values it takes.
    pub values: &'static str,
    /// What it does.
    pub meaning: &'static str,
    set: fn(&mut Switches, &str) -> Option<()>,
}

/// Every switch.
pub static TABLE: [Switch; 7] = [
    Switch {
        name: "GQA_DISABLE_FLASH_ATTENTION",
        alias: Some("ORT_DISABLE_FLASH_ATTENTION"),
        values: "0 or 1",
        meaning: "1: none of `hopper`, `hopper_float8`, `hopper_masked`, `hopper_paged`, `tiled`, `tiled_masked`, `tiled_f32`, `tiled_wide`, `decode_codes`, `decode_paged`, `decode_paged_codes`, `decode` and `split_kv` is considered",
        set: |s, v| flag(&mut s.disable_flash_attention, v),
    },
    Switch {
        name: "GQA_DISABLE_FLASH_DECODE",
        alias: Some("ORT_DISABLE_FLASH_DECODE"),
        values: "0 or 1",
        meaning: "1: none of `decode_codes`, `decode_paged`, `decode_paged_codes`, `decode` and `split_kv` is considered",
        set: |s, v| flag(&mut s.disable_flash_decode, v),
    },
    Switch {
        name: "GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION",
        alias: Some("ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION"),
        values: "0 or 1",
        meaning: "1: `general` is not considered",
        set: |s, v| flag(&mut s.disable_memory_efficient_attention, v),
    },
    Switch {
        name: "GQA_DISABLE_FUSED_KV",
        alias: Some("ORT_DISABLE_FUSED_KV"),
        values: "0 or 1",
        meaning: "1: unpacking, rotation and cache update are separate launches, and none of `decode_codes`, `decode_paged`, `decode_paged_codes` and `hopper_paged` is considered",
        set: |s, v| flag(&mut s.disable_fused_kv, v),
    },
    Switch {
        name: "GQA_SPLITS",
        alias: None,
        values: "1 to 128",
        meaning: "parts that `decode`, `split_kv`, `hopper` and `tiled_wide` cut the keys into, instead of their heuristics' choice",
        set: |s, v| {
            s.splits = Some(v.parse().ok().filter(|n| (1..=MAX_SPLITS).contains(n))?);
            Some(())
        },
    },
    Switch {
        name: "GQA_CLUSTER",
        alias: None,
        values: "1, 2, 4, 8 or 16",
        meaning: "blocks of a cluster of `decode`, instead of its heuristic's choice",
        set: |s, v| {
            let possible = |n: &u32| n.is_power_of_two() && *n <= MAX_RANKS;
            s.cluster = Some(v.parse().ok().filter(possible)?);
            Some(())
        },
    },
    Switch {
        name: "GQA_FORCE",
        alias: None,
        values: "the name of a kernel entry",
        meaning: "use that kernel or fail with the reason why it cannot be used",
        set: |s, v| {
            s.force = Some(gqa_kernels::registry::find(v)?.name);
            Some(())
        },
    },
];

/// Variables that help to find mistakes and decide nothing: name, values, meaning.
pub static AIDS: [(&str, &str, &str); 2] = [
    (
        crate::backend::dump::VARIABLE,
        "a folder, made if it is not there",
        "every call of an operator of the library writes its tensors there as `.npy`",
    ),
    (
        "GQA_LOG",
        "`error`, `warn`, `info`, `debug` or `trace`",
        "the program `gqa` logs to stderr; `debug` gives the sizes of each call, and entry, grid, threads and shared bytes before each launch",
    ),
];

/// Choices that a person makes against the planner's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// GQA_DISABLE_FLASH_ATTENTION
    pub disable_flash_attention: bool,
    /// GQA_DISABLE_FLASH_DECODE
    pub disable_flash_decode: bool,
    /// GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION
    pub disable_memory_efficient_attention: bool,
    /// GQA_DISABLE_FUSED_KV
    pub disable_fused_kv: bool,
    /// GQA_SPLITS
    pub splits: Option<u32>,
    /// GQA_CLUSTER
    pub cluster: Option<u32>,
    /// GQA_FORCE
    pub force: Option<&'static str>,
}

impl Switches {
    /// Reads the process environment. Unknown `GQA_*` names are reported through `tracing` as warnings.
    pub fn from_env() -> Result<Self> {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        });
        Self::from_variables(variables)
    }

    /// Reads the switches among `variables`; a value that its switch does not take is an error.
    pub fn from_variables(variables: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let variables: std::collections::BTreeMap<_, _> = variables.into_iter().collect();
        let mut switches = Self::default();
        for switch in &TABLE {
            let names = [Some(switch.name), switch.alias];
            let found =
                names.into_iter().flatten().find_map(|name| Some((name, variables.get(name)?)));
            if let Some((name, value)) = found {
                (switch.set)(&mut switches, value.trim()).ok_or_else(|| Error::Switch {
                    name,
                    got: value.clone(),
                    allowed: switch.values,
                })?;
            }
        }
        for name in variables.keys().filter(|name| unknown(name)) {
            tracing::warn!(
                "environment variable {name} is no switch of this library and has no effect"
            );
        }
        Ok(switches)
    }
}

/// Both tables as Markdown, for the documentation.
pub fn markdown() -> String {
    let rows = TABLE.iter().map(|s| {
        let alias = s.alias.map(|a| format!("`{a}`")).unwrap_or_default();
        format!("| `{}` | {alias} | {} | {} |\n", s.name, s.values, s.meaning)
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
    let known = TABLE.iter().map(|switch| switch.name).chain(AIDS.map(|(name, ..)| name));
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

    fn read(variables: &[(&str, &str)]) -> Result<Switches> {
        Switches::from_variables(variables.iter().map(|(n, v)| (n.to_string(), v.to_string())))
    }

    #[test]
    fn every_switch_is_off_by_default() {
        assert_eq!(read(&[("PATH", "/bin")]).unwrap(), Switches::default());
    }

    #[test]
    fn flags_are_read_by_either_name_and_ours_wins() {
        for switch in TABLE.iter().filter(|s| s.values == "0 or 1") {
            let alias = switch.alias.unwrap();
            let on = read(&[(switch.name, "1")]).unwrap();
            assert_ne!(on, Switches::default(), "{}", switch.name);
            assert_eq!(read(&[(alias, "1")]).unwrap(), on);
            assert_eq!(read(&[(alias, "1"), (switch.name, "0")]).unwrap(), Switches::default());
        }
    }

    #[test]
    fn values_are_read_and_bad_ones_refused() {
        assert_eq!(read(&[("GQA_SPLITS", "7")]).unwrap().splits, Some(7));
        for (name, value) in [
            ("GQA_SPLITS", "0"),
            ("GQA_SPLITS", "129"),
            ("GQA_CLUSTER", "3"),
            ("GQA_CLUSTER", "32"),
            ("ORT_DISABLE_FUSED_KV", "yes"),
            ("GQA_FORCE", "no_such_kernel"),
        ] {
            let message = read(&[(name, value)]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(value), "{message}");
        }
    }

    #[test]
    fn unknown_names_have_no_effect() {
        assert_eq!(read(&[("GQA_TURBO", "1")]).unwrap(), Switches::default());
        assert!(unknown("GQA_TURBO") && !unknown("GQA_SPLITS") && !unknown("HOME"));
        assert!(!unknown("GQA_DUMP") && !unknown("GQA_LOG"));
    }
}
