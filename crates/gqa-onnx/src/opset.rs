//! Operator sets: the versions of an operator.
//!
//! A model imports one version of each domain. An operator changes in some versions only, so that
//! an import selects the newest definition up to that version.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::proto::OperatorSetIdProto;

/// ONNX's own domain, which is also written as "".
pub(crate) const ONNX: &str = "ai.onnx";
/// ONNX Runtime's domain.
pub(crate) const MICROSOFT: &str = "com.microsoft";

/// A domain by its full name.
pub(crate) fn domain_name(domain: &str) -> &str {
    if domain.is_empty() { ONNX } else { domain }
}

/// The version of each domain that a model imports.
#[derive(Debug)]
pub(crate) struct Imports<'a>(BTreeMap<&'a str, i64>);

impl<'a> Imports<'a> {
    /// Errs where a domain is imported with two versions.
    pub fn of(imports: &'a [OperatorSetIdProto]) -> Result<Self> {
        let mut versions = BTreeMap::new();
        for OperatorSetIdProto { domain, version } in imports {
            let domain = domain_name(domain);
            match versions.insert(domain, *version) {
                Some(other) if other != *version => {
                    let got = format!("{other} and {version}");
                    return Err(Error::invalid(import_of(domain), got, "one version"));
                }
                _ => {}
            }
        }
        Ok(Self(versions))
    }

    /// The newest of an ONNX operator's `definitions`, in ascending order, up to the imported
    /// version.
    pub fn definition(&self, definitions: &[i64]) -> Result<i64> {
        let import = self.0.get(ONNX);
        let definition =
            import.and_then(|import| definitions.iter().rfind(|&version| version <= import));
        definition.copied().ok_or_else(|| {
            let allowed = format!("{} or later", definitions.first().unwrap_or(&1));
            Error::invalid(import_of(ONNX), printed(import), allowed)
        })
    }

    /// Errs unless the model imports version 1, the only one, of ONNX Runtime's operators.
    pub fn check_microsoft(&self) -> Result<()> {
        match self.0.get(MICROSOFT) {
            Some(1) => Ok(()),
            import => Err(Error::invalid(import_of(MICROSOFT), printed(import), 1)),
        }
    }
}

fn import_of(domain: &str) -> String {
    format!("opset_import of {domain}")
}

fn printed(import: Option<&i64>) -> String {
    import.map_or_else(|| "none".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(list: &[(&str, i64)]) -> Vec<OperatorSetIdProto> {
        let import = |&(domain, version): &(&str, i64)| OperatorSetIdProto {
            domain: domain.to_owned(),
            version,
        };
        list.iter().map(import).collect()
    }

    /// An operator with definitions in sets 23, 24 and 26.
    fn definition(list: &[(&str, i64)]) -> Result<i64, String> {
        let imports = imports(list);
        let found = Imports::of(&imports).and_then(|imports| imports.definition(&[23, 24, 26]));
        found.map_err(|e| e.to_string())
    }

    #[test]
    fn an_import_means_the_newest_definition_not_above_it() {
        let versions = [(23, 23), (24, 24), (25, 24), (26, 26), (27, 26), (i64::MAX, 26)];
        for (import, want) in versions {
            assert_eq!(definition(&[("", import)]), Ok(want));
            assert_eq!(definition(&[("com.microsoft", 1), ("ai.onnx", import)]), Ok(want));
        }
        assert_eq!(definition(&[("", 24), ("ai.onnx", 24)]), Ok(24));
    }

    #[test]
    fn refusals_of_imports() {
        let error = |list: &[(&str, i64)]| definition(list).unwrap_err();
        let early = "opset_import of ai.onnx: got 22; allowed: 23 or later";
        assert_eq!(error(&[("", 22)]), early);
        let negative = "opset_import of ai.onnx: got -1; allowed: 23 or later";
        assert_eq!(error(&[("ai.onnx", -1)]), negative);
        let none = "opset_import of ai.onnx: got none; allowed: 23 or later";
        assert_eq!(error(&[]), none);
        assert_eq!(error(&[("ai.onnx.ml", 24)]), none);
        let two = "opset_import of ai.onnx: got 24 and 23; allowed: one version";
        assert_eq!(error(&[("", 24), ("ai.onnx", 23)]), two);
    }

    #[test]
    fn the_operators_of_onnx_runtime_have_one_version() {
        let check = |list: &[(&str, i64)]| {
            let imports = imports(list);
            let checked = Imports::of(&imports).and_then(|imports| imports.check_microsoft());
            checked.err().map_or_else(|| "accepted".to_owned(), |e| e.to_string())
        };
        assert_eq!(check(&[("com.microsoft", 1)]), "accepted");
        assert_eq!(check(&[("", 5), ("com.microsoft", 1)]), "accepted");
        let refused = |got| format!("opset_import of com.microsoft: got {got}; allowed: 1");
        assert_eq!(check(&[("", 24)]), refused("none"));
        assert_eq!(check(&[("com.microsoft", 2)]), refused("2"));
        assert_eq!(check(&[("com.microsoft", 0)]), refused("0"));
    }
}
