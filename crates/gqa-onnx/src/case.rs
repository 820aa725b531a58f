//! Test cases in the layout of ONNX's backend tests.
//!
//! ```text
//! NAME/model.onnx                     one node
//! NAME/test_data_set_0/input_0.pb     for input 0 of the graph, and so on
//! NAME/test_data_set_0/output_0.pb    as input_K.pb; the last outputs may be left out
//! NAME/meta.json                      optional: {"tolerance": {"atol": 1e-3, "rtol": 1e-3}}
//! NAME/ignore.json                    optional: {"version": 1, "outputs": {"output_0": [
//!                                         {"start": [0, 2, 0], "stop": [1, 4, 8]}]}}
//! ```

use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use gqa_host::Tensor;
use gqa_host::backend::Backend;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::compare::{Comparison, Limits, Region, compare};
use crate::error::{Error, Result};
use crate::file;
use crate::model::Model;
use crate::model::numbered_files;
use crate::tensor::read_tensor;

/// What meta.json looks like.
const META: &str = r#"{"tolerance": {"atol": 1e-3, "rtol": 1e-3}} and other fields"#;
/// What ignore.json looks like.
const IGNORE: &str =
    r#"{"version": 1, "outputs": {"output_0": [{"start": [0, 2, 0], "stop": [1, 4, 8]}]}}"#;
/// Folders below a given one that are searched.
const MAX_DEPTH: usize = 8;

/// A folder with a model, inputs and expected outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Path below the folder that was searched, or the folder's own name.
    pub name: String,
    /// The folder.
    pub path: PathBuf,
}

/// What [`Case::check`] found: one entry per expected output of each data set.
#[derive(Clone, Debug)]
pub struct Checked {
    /// Outputs in order.
    pub outputs: Vec<OutputCheck>,
}

impl Checked {
    /// Whether every output is as expected.
    pub fn passed(&self) -> bool {
        self.outputs.iter().all(|output| output.found.as_ref().is_ok_and(|found| found.failed == 0))
    }
}

/// One output of a case.
#[derive(Clone, Debug)]
pub struct OutputCheck {
    /// Name in the graph; with several data sets, behind the data set's.
    pub name: String,
    /// The comparison, or the difference in shape or element type.
    pub found: Result<Comparison, String>,
}

/// meta.json; fields about the origin of a case are ignored.
#[derive(Deserialize, Default)]
struct Meta {
    tolerance: Option<MetaTolerance>,
}

#[derive(Deserialize, Default)]
struct MetaTolerance {
    atol: Option<f64>,
    rtol: Option<f64>,
}

/// ignore.json.
#[derive(Deserialize)]
struct Ignore {
    version: u32,
    outputs: BTreeMap<String, Vec<Region>>,
}

/// The cases at a path: the folder itself if it is one, else those in folders below it, sorted.
///
/// # Errors
///
/// Where a folder cannot be listed, and where there is no case.
pub fn find_cases(path: &Path) -> Result<Vec<Case>> {
    if is_case(path)? {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = real.file_name().unwrap_or(real.as_os_str()).to_string_lossy().into_owned();
        return Ok(vec![Case { name, path: path.to_owned() }]);
    }
    let mut cases = Vec::new();
    search(path, path, &mut HashSet::new(), &mut cases)?;
    cases.sort_by(|a, b| a.path.cmp(&b.path));
    if cases.is_empty() {
        let allowed = "a folder with model.onnx and test_data_set_0, or a folder of such folders";
        return Err(Error::invalid(path.display(), "no case", allowed));
    }
    Ok(cases)
}

/// A model or a data set makes a folder a case, even an incomplete one.
fn is_case(path: &Path) -> Result<bool> {
    Ok(file::has(path, "model.onnx")? || file::has(path, "test_data_set_0")?)
}

fn search(
    root: &Path,
    folder: &Path,
    seen: &mut HashSet<PathBuf>,
    cases: &mut Vec<Case>,
) -> Result<()> {
    let real = folder.canonicalize().map_err(|e| Error::io(folder, e))?;
    let depth = folder.strip_prefix(root).map_or(0, |below| below.components().count());
    if depth > MAX_DEPTH || !seen.insert(real) {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        if is_case(&path)? {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            cases.push(Case { name, path });
        } else if file::is_folder(&path)? {
            search(root, &path, seen, cases)?;
        }
    }
    Ok(())
}

impl Case {
    /// Runs the case and compares. `limits` win over the case's meta.json, which wins over the
    /// defaults.
    ///
    /// # Errors
    ///
    /// Where a file cannot be read, and the operator's and the back end's own.
    pub fn check(&self, backend: &dyn Backend, limits: Limits) -> Result<Checked> {
        let limits = limits.or(self.limits()?);
        let model = Model::read(&self.path.join("model.onnx"))?;
        let ignored = self.ignored(model.output_names().len())?;
        let sets = self.data_sets()?;
        let mut outputs = Vec::new();
        for set in &sets {
            let prefix =
                if sets.len() > 1 { format!("{}/", file_name(set)) } else { String::new() };
            for mut output in check_set(&model, set, backend, limits, &ignored)? {
                output.name.insert_str(0, &prefix);
                outputs.push(output);
            }
        }
        // For empty outputs, only shape and type are compared.
        let of = |is: fn(&Comparison) -> bool| {
            move |output: &OutputCheck| output.found.as_ref().is_ok_and(is)
        };
        if outputs.iter().all(of(|found| found.compared == 0))
            && outputs.iter().any(of(|found| found.ignored > 0))
        {
            return Err(Error::invalid(
                "ignore.json",
                "every element ignored",
                "some element to compare",
            ));
        }
        Ok(Checked { outputs })
    }

    /// The folders test_data_set_*.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be listed.
    pub fn data_sets(&self) -> Result<Vec<PathBuf>> {
        let mut sets = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(|e| Error::io(&self.path, e))? {
            let path = entry.map_err(|e| Error::io(&self.path, e))?.path();
            let is_set = file_name(&path).starts_with("test_data_set_");
            if is_set && path.metadata().map_err(|e| Error::io(&path, e))?.is_dir() {
                sets.push(path);
            }
        }
        if sets.is_empty() {
            return Err(Error::invalid("case", "no test_data_set_*", "at least test_data_set_0"));
        }
        sets.sort();
        Ok(sets)
    }

    /// The tolerance in meta.json.
    fn limits(&self) -> Result<Limits> {
        let meta = self.json::<Meta>("meta.json", META)?.unwrap_or_default();
        let MetaTolerance { atol, rtol } = meta.tolerance.unwrap_or_default();
        for (name, value) in [("atol", atol), ("rtol", rtol)] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
                return Err(Error::invalid(
                    format_args!("meta.json {name}"),
                    value,
                    "a finite number, 0 or more",
                ));
            }
        }
        Ok(Limits { absolute: atol, relative: rtol })
    }

    /// The boxes in ignore.json, for each output of the graph.
    fn ignored(&self, outputs: usize) -> Result<Vec<Vec<Region>>> {
        let mut regions = vec![Vec::new(); outputs];
        let Some(ignore) = self.json::<Ignore>("ignore.json", IGNORE)? else { return Ok(regions) };
        if ignore.version != 1 {
            return Err(Error::invalid("ignore.json version", ignore.version, 1));
        }
        for (name, boxes) in ignore.outputs {
            let number =
                name.strip_prefix("output_").and_then(|number| number.parse::<usize>().ok());
            match number.and_then(|number| regions.get_mut(number)) {
                Some(regions) => *regions = boxes,
                None => {
                    let allowed = format!("output_K for the {outputs} outputs of the graph");
                    return Err(Error::invalid("ignore.json", format_args!("{name:?}"), allowed));
                }
            }
        }
        Ok(regions)
    }

    /// A JSON file of the case, if it is there.
    fn json<T: DeserializeOwned>(&self, file: &str, form: &str) -> Result<Option<T>> {
        let path = self.path.join(file);
        match file::read_file(&path, file::JSON_BYTES) {
            Err(Error::Io { reason, .. }) if reason.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(value) => Ok(Some(value)),
                Err(e) => Err(Error::invalid(file, e, form)),
            },
        }
    }
}

/// One data set's outputs.
fn check_set(
    model: &Model,
    set: &Path,
    backend: &dyn Backend,
    limits: Limits,
    ignored: &[Vec<Region>],
) -> Result<Vec<OutputCheck>> {
    let expected = expected(model.output_names(), set)?;
    let computed = model.run(&model.call(set)?, backend)?;
    let outputs = model.output_names().iter().zip(expected).zip(computed.iter().zip(ignored));
    let outputs = outputs.map(|((name, want), (got, ignored))| {
        let found = check_output(got, &want, ignored, limits)?;
        Ok(OutputCheck { name: name.clone(), found })
    });
    outputs.collect()
}

/// output_0.pb and so on. Files of the last outputs may be missing; these outputs are not compared.
fn expected(names: &[String], set: &Path) -> Result<Vec<Tensor>> {
    let files = numbered_files(set, "output")?;
    if files.is_empty() {
        return Err(Error::invalid(file_name(set), "no expected outputs", "output_0.pb and so on"));
    }
    let read = |(position, (number, path)): (usize, (usize, PathBuf))| match names.get(number) {
        None => {
            let allowed = format!("the {} outputs of the graph", names.len());
            Err(Error::invalid(file_name(set), format_args!("output_{number}.pb"), allowed))
        }
        Some(_) if number != position => {
            let got = format!("output_{number}.pb without output_{position}.pb");
            Err(Error::invalid(file_name(set), got, "no gap between expected outputs"))
        }
        Some(name) => read_tensor(&path, &format!("{name} (output_{number}.pb)")),
    };
    files.into_iter().enumerate().map(read).collect()
}

fn check_output(
    got: &Tensor,
    want: &Tensor,
    ignored: &[Region],
    limits: Limits,
) -> Result<Result<Comparison, String>> {
    if got.dtype() != want.dtype() || got.shape() != want.shape() {
        let describe = |tensor: &Tensor| format!("{} {:?}", tensor.dtype(), tensor.shape());
        return Ok(Err(format!("got {}, want {}", describe(got), describe(want))));
    }
    compare(got, want, ignored, limits.tolerance(want.dtype())).map(Ok)
}

/// Last component of a path, as text.
fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::io;

    use gqa_host::backend::Io;
    use gqa_host::{DType, Problem};
    use prost::Message;

    use super::*;
    use crate::model::tests::small_model;
    use crate::tensor::encode_tensor;

    /// Writes the same value everywhere.
    struct Constant(f32);

    impl Backend for Constant {
        fn name(&self) -> &'static str {
            "constant"
        }

        fn run(&self, _: &Problem, io: &mut Io<'_>) -> gqa_host::Result<()> {
            for tensor in [&mut *io.output, &mut *io.present_key, &mut *io.present_value] {
                let values = vec![self.0; tensor.len()];
                *tensor = Tensor::from_f32(tensor.dtype(), tensor.shape(), &values)
                    .unwrap_or_else(|_| tensor.clone());
            }
            Ok(())
        }
    }

    /// Writes the small model's case, expecting `want` everywhere in its first output.
    fn write_case(path: &Path, want: f32) -> io::Result<()> {
        let set = path.join("test_data_set_0");
        std::fs::create_dir_all(&set)?;
        std::fs::write(path.join("model.onnx"), small_model().encode_to_vec())?;
        for (index, width) in [16, 8, 8].into_iter().enumerate() {
            let tensor = Tensor::zeros(DType::F32, &[1, 1, width]);
            std::fs::write(set.join(format!("input_{index}.pb")), encode_tensor("", &tensor))?;
        }
        let seqlens = Tensor::zeros(DType::I32, &[1]);
        std::fs::write(set.join("input_3.pb"), encode_tensor("", &seqlens))?;
        let want = Tensor::from(ndarray::Array3::from_elem((1, 1, 16), want));
        std::fs::write(set.join("output_0.pb"), encode_tensor("", &want))
    }

    fn check(path: &Path) -> Result<Checked> {
        Case { name: "case".into(), path: path.into() }.check(&Constant(1.0), Limits::default())
    }

    fn error(path: &Path) -> String {
        check(path).err().map_or_else(|| "no error".into(), |e| e.to_string())
    }

    fn passed(path: &Path) -> Option<bool> {
        check(path).ok().map(|checked| checked.passed())
    }

    #[test]
    fn outputs_with_a_file_are_compared() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        write_case(folder.path(), 1.0)?;
        assert_eq!(passed(folder.path()), Some(true));
        write_case(folder.path(), 1.5)?;
        assert_eq!(passed(folder.path()), Some(false));
        let other = encode_tensor("", &Tensor::zeros(DType::F16, &[1, 1, 16]));
        std::fs::write(folder.path().join("test_data_set_0/output_0.pb"), other)?;
        let found =
            check(folder.path()).ok().and_then(|checked| checked.outputs[0].found.clone().err());
        assert_eq!(found.as_deref(), Some("got float32 [1, 1, 16], want float16 [1, 1, 16]"));
        Ok(())
    }

    #[test]
    fn a_case_without_expected_outputs_never_passes() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        write_case(folder.path(), 1.0)?;
        let set = folder.path().join("test_data_set_0");
        std::fs::rename(set.join("output_0.pb"), set.join("output_7.pb"))?;
        assert_eq!(
            error(folder.path()),
            "test_data_set_0: got output_7.pb; allowed: the 2 outputs of the graph"
        );
        std::fs::rename(set.join("output_7.pb"), set.join("output_1.pb"))?;
        assert_eq!(
            error(folder.path()),
            "test_data_set_0: got output_1.pb without output_0.pb; allowed: no gap between expected outputs"
        );
        std::fs::remove_file(set.join("output_1.pb"))?;
        assert_eq!(
            error(folder.path()),
            "test_data_set_0: got no expected outputs; allowed: output_0.pb and so on"
        );
        Ok(())
    }

    #[test]
    fn meta_and_ignore_are_honoured_and_checked() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        write_case(folder.path(), 1.5)?;
        let meta = |text: &str| std::fs::write(folder.path().join("meta.json"), text);
        meta(r#"{"description": "loose", "tolerance": {"atol": 0.5}}"#)?;
        assert_eq!(passed(folder.path()), Some(true));
        meta(r#"{"tolerance": {"atol": -1}}"#)?;
        assert_eq!(
            error(folder.path()),
            "meta.json atol: got -1; allowed: a finite number, 0 or more"
        );
        meta("{")?;
        assert!(error(folder.path()).starts_with("meta.json: got EOF"));
        meta("{}")?;
        let ignore = |outputs: &str| {
            let text = format!(r#"{{"version": 1, "outputs": {{{outputs}}}}}"#);
            std::fs::write(folder.path().join("ignore.json"), text)
        };
        ignore(r#""output_0": [{"start": [0, 0, 0], "stop": [1, 1, 15]}]"#)?;
        assert_eq!(passed(folder.path()), Some(false));
        ignore(r#""output_0": [{"start": [0, 0, 0], "stop": [1, 1, 16]}]"#)?;
        assert_eq!(
            error(folder.path()),
            "ignore.json: got every element ignored; allowed: some element to compare"
        );
        ignore(r#""output_0": [{"start": [0, 0, 0], "stop": [1, 1, 17]}]"#)?;
        assert_eq!(
            error(folder.path()),
            "ignore.json: got box [0, 0, 0] to [1, 1, 17]; allowed: boxes inside [1, 1, 16]"
        );
        ignore(r#""output_2": []"#)?;
        assert_eq!(
            error(folder.path()),
            "ignore.json: got \"output_2\"; allowed: output_K for the 2 outputs of the graph"
        );
        Ok(())
    }

    #[test]
    fn cases_are_found_below_a_folder_in_order() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        assert!(find_cases(folder.path()).is_err());
        for name in ["b", "a/deeper", "a/case"] {
            write_case(&folder.path().join(name), 0.0)?;
        }
        let names = |path: &Path| {
            find_cases(path)
                .map(|cases| cases.into_iter().map(|case| case.name).collect::<Vec<_>>())
        };
        assert_eq!(
            names(folder.path()).ok(),
            Some(vec!["a/case".into(), "a/deeper".into(), "b".into()])
        );
        assert_eq!(names(&folder.path().join("b")).ok(), Some(vec!["b".into()]));
        Ok(())
    }
}
