//! The program as its users see it: what it prints, and how it exits.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use gqa_onnx::{Tolerance, compare, read_tensor};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// What a run of the program left.
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn gqa<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Run> {
    let output = Command::new(env!("CARGO_BIN_EXE_gqa")).args(arguments).output()?;
    Ok(Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}

fn words(line: &str) -> Result<Run> {
    gqa(line.split_whitespace())
}

fn cases(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases").join(kind)
}

/// Checks that the program refuses its arguments: exit code, and one line on stderr with these fragments.
fn refused(run: &Run, code: i32, fragments: &[&str]) {
    assert_eq!(run.code, Some(code), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    for fragment in fragments {
        assert!(run.stderr.contains(fragment), "{fragment} in {}", run.stderr);
    }
}

#[test]
fn mistakes_in_the_command_line_are_one_line_and_exit_code_2() -> Result {
    refused(&words("check")?, 2, &["<PATH>..."]);
    refused(&words("check --rtol nan x")?, 2, &["--rtol", "nan", "finite number"]);
    refused(&words("check --atol -1 x")?, 2, &["-1"]);
    refused(
        &words("check --backend gpu x")?,
        2,
        &["--backend", "gpu", "cpu, sim, cuda, reference"],
    );
    refused(&words("check /no/such/folder")?, 2, &["/no/such/folder"]);
    refused(&words("frobnicate")?, 2, &["frobnicate"]);
    refused(&words("run")?, 2, &["<MODEL>"]);
    refused(&words("explain --device voodoo2")?, 2, &["--device", "voodoo2", "h200"]);
    refused(&words("explain --head-size 0")?, 2, &["--head-size", "0"]);
    refused(&words("bench prompt --size 3by4")?, 2, &["--size", "3by4", "BATCHxLENGTH"]);
    refused(&words("bench token --backend sim")?, 2, &["--backend", "sim"]);
    Ok(())
}

#[test]
fn a_folder_without_cases_is_a_mistake() -> Result {
    let folder = tempfile::tempdir()?;
    let run = gqa(["check".as_ref(), folder.path().as_os_str()])?;
    refused(&run, 2, &["no case", &folder.path().display().to_string()]);
    Ok(())
}

/// All stored cases pass on a back end, one line each, then the totals.
fn stored_cases_pass(backend: &str) -> Result {
    let folder = cases("gqa");
    let run = gqa(["check".as_ref(), "--backend".as_ref(), backend.as_ref(), folder.as_os_str()])?;
    let count = std::fs::read_dir(&folder)?.count();
    let broken: Vec<_> = run.stdout.lines().filter(|line| !line.starts_with("ok ")).collect();
    assert_eq!(broken, [format!("{count} passed, 0 failed")], "{}", run.stderr);
    assert_eq!(run.code, Some(0));
    assert!(
        run.stdout
            .lines()
            .take(count)
            .all(|line| line.contains(" max_abs=") && line.contains(" max_rel="))
    );
    Ok(())
}

#[test]
fn stored_cases_pass_on_reference() -> Result {
    stored_cases_pass("reference")
}

#[test]
fn stored_cases_pass_on_cpu() -> Result {
    stored_cases_pass("cpu")
}

#[test]
fn stored_cases_pass_on_sim() -> Result {
    stored_cases_pass("sim")
}

/// expect.json of a bad case.
#[derive(serde::Deserialize)]
struct Expect {
    outcome: String,
    error_contains: Vec<String>,
    #[serde(default)]
    not_supported_yet: bool,
}

impl Expect {
    /// Whether the line reports the case as it should be reported.
    fn is_met_by(&self, name: &str, line: &str) -> bool {
        let (error, fail) = (
            line.starts_with(&format!("error {name}: ")),
            line.starts_with(&format!("FAIL {name} ")),
        );
        let outcome = match self.outcome.as_str() {
            "error" => error,
            "fail" => fail,
            _ => error || fail,
        };
        let named = self.error_contains.iter().all(|fragment| line.contains(fragment));
        outcome && named && (!self.not_supported_yet || line.contains("not supported yet"))
    }
}

#[test]
fn bad_cases_are_reported_and_never_pass() -> Result {
    let run =
        gqa(["check".as_ref(), "--backend".as_ref(), "cpu".as_ref(), cases("bad").as_os_str()])?;
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in std::fs::read_dir(cases("bad"))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let expect: Expect =
            serde_json::from_slice(&std::fs::read(entry.path().join("expect.json"))?)?;
        let line = run
            .stdout
            .lines()
            .find(|line| line.split([' ', ':']).nth(1) == Some(&name))
            .unwrap_or("(no line)");
        count += 1;
        if !expect.is_met_by(&name, line) {
            wrong.push(format!(
                "{name}: {} {:?}, got {line}",
                expect.outcome, expect.error_contains
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(run.stdout.lines().last(), Some(format!("0 passed, {count} failed").as_str()));
    Ok(())
}

#[test]
fn a_run_that_is_refused_leaves_nothing_behind() -> Result {
    let out = tempfile::tempdir()?;
    for entry in std::fs::read_dir(cases("bad"))? {
        let path = entry?.path();
        let expect: Expect = serde_json::from_slice(&std::fs::read(path.join("expect.json"))?)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if expect.outcome != "error"
            || ["output_", "ignore_", "meta_"].iter().any(|prefix| name.starts_with(prefix))
        {
            continue;
        }
        let target = out.path().join(&name);
        let (model, data) = (path.join("model.onnx"), path.join("test_data_set_0"));
        let run = gqa([
            "run".as_ref(),
            model.as_os_str(),
            "--data".as_ref(),
            data.as_os_str(),
            "--out".as_ref(),
            target.as_os_str(),
            "--backend=cpu".as_ref(),
        ])?;
        refused(&run, 1, &[]);
        assert!(!target.exists(), "{name}");
    }
    Ok(())
}

#[test]
fn what_run_writes_is_what_check_expects() -> Result {
    let out = tempfile::tempdir()?;
    let case = cases("gqa").join("decode_static_ragged");
    let run = gqa([
        "run".as_ref(),
        case.join("model.onnx").as_os_str(),
        "--data".as_ref(),
        case.as_os_str(),
        "--out".as_ref(),
        out.path().as_os_str(),
        "--backend=cpu".as_ref(),
    ])?;
    assert_eq!((run.code, run.stdout.lines().count()), (Some(0), 3), "{}", run.stderr);
    assert_eq!(std::fs::read_dir(out.path())?.count(), 3);
    for file in ["output_0.pb", "output_1.pb", "output_2.pb"] {
        let got = read_tensor(&out.path().join(file), file)?;
        let want = read_tensor(&case.join("test_data_set_0").join(file), file)?;
        assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()));
        assert_eq!(compare(&got, &want, &[], Tolerance::of(want.dtype()))?.failed, 0);
    }
    Ok(())
}

#[test]
fn tolerances_on_the_command_line_win() -> Result {
    let wrong = cases("bad").join("output_slightly_wrong");
    let check = |tolerance: &[&str]| {
        let fixed = ["check", "--backend=cpu"]
            .into_iter()
            .chain(tolerance.iter().copied())
            .map(std::ffi::OsStr::new);
        gqa(fixed.chain([wrong.as_os_str()]))
    };
    assert_eq!(check(&[])?.code, Some(1));
    let run = check(&["--atol", "1e-2"])?;
    assert_eq!(run.code, Some(0), "{}", run.stdout);
    assert!(run.stdout.starts_with("ok output_slightly_wrong max_abs=5"), "{}", run.stdout);
    Ok(())
}

#[test]
fn explain_names_a_kernel_for_every_phase_and_type() -> Result {
    for dtype in ["f32", "f16", "bf16"] {
        for (query, past) in [(1, 0), (300, 0), (20, 1000), (1, 131_071)] {
            for device in ["h200", "a100", "v100"] {
                let run = words(&format!(
                    "explain --batch 128 --query-length {query} --past-length {past} --dtype {dtype} --device {device} --rotary half"
                ))?;
                assert_eq!(run.code, Some(0), "{}", run.stderr);
                assert!(run.stdout.contains("chosen: gqa_"), "{}", run.stdout);
            }
        }
    }
    Ok(())
}

#[test]
fn explain_reads_models() -> Result {
    let model = cases("gqa").join("chunk_static/model.onnx");
    let run = gqa(["explain".as_ref(), model.as_os_str()])?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stdout.contains("chosen: gqa_"), "{}", run.stdout);
    let mixed = gqa(["explain".as_ref(), model.as_os_str(), "--batch=2".as_ref()])?;
    refused(&mixed, 2, &["--batch"]);
    Ok(())
}

#[test]
fn explain_refuses_what_the_operator_refuses() -> Result {
    refused(&words("explain --heads 6 --kv-heads 4")?, 1, &["num_heads", "6"]);
    refused(&words("explain --head-size 520")?, 1, &["head_size", "520"]);
    refused(&words("explain --scale nan")?, 1, &["scale", "NaN"]);
    refused(&words("explain --window 0")?, 1, &["local_window_size", "0"]);
    refused(
        &words("explain --batch 16777216 --past-length 2000000000")?,
        1,
        &["past_key", "16777216"],
    );
    Ok(())
}

#[test]
fn doctor_is_content_without_a_gpu() -> Result {
    let run = words("doctor")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for word in ["driver", "ptx", "used"] {
        assert!(run.stdout.lines().any(|line| line.starts_with(word)), "{word} in {}", run.stdout);
    }
    Ok(())
}

#[test]
fn bench_prints_json_and_checks_its_results() -> Result {
    for mode in [
        "prompt --size 1x40,2x9 --packed",
        "prompt --size 1x16 --past-length 20",
        "token --size 2x65 --rotary half",
    ] {
        let run = words(&format!(
            "bench {mode} --backend cpu --heads 4 --kv-heads 2 --head-size 32 --dtype f16 --runs 3 --json"
        ))?;
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let report: serde_json::Value = serde_json::from_str(&run.stdout)?;
        let results = report["results"].as_array().ok_or("results")?;
        assert!(!results.is_empty());
        for result in results {
            assert!(result["median_us"].as_f64() > Some(0.0));
            assert_eq!(result["elements_out_of_tolerance"], 0);
            assert_eq!(result["checked_rows"], 32);
        }
    }
    Ok(())
}

#[test]
fn demo_shows_a_prompt_and_tokens() -> Result {
    let run = words("demo --backend cpu --prompt 20 --tokens 3")?;
    assert_eq!(run.code, Some(0), "{}{}", run.stdout, run.stderr);
    for word in ["plan for the prompt", "plan for a token", "prompt of 20 rows", "3 tokens", ": ok"]
    {
        assert!(run.stdout.contains(word), "{word} in {}", run.stdout);
    }
    Ok(())
}
