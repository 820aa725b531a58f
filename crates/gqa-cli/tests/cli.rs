//! The program as its users see it: what it prints, and how it exits.

use std::error::Error;
use std::ffi::OsStr;
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

impl Run {
    fn of(command: &mut Command) -> Result<Self> {
        let output = command.output()?;
        Ok(Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout)?,
            stderr: String::from_utf8(output.stderr)?,
        })
    }
}

fn gqa<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Run> {
    Run::of(Command::new(env!("CARGO_BIN_EXE_gqa")).args(arguments))
}

fn words(line: &str) -> Result<Run> {
    gqa(line.split_whitespace())
}

fn cases(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases").join(kind)
}

/// Checks that the program refuses its arguments: exit code, and one line on stderr with these
/// fragments.
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
    refused(&words("check --atol -1 x")?, 2, &["--atol", "-1", "finite number"]);
    refused(
        &words("check --backend gpu x")?,
        2,
        &["--backend", "gpu", "cpu, sim, cuda, reference"],
    );
    refused(&words("check /no/such/folder")?, 2, &["/no/such/folder: No such file or directory"]);
    refused(&words("frobnicate")?, 2, &["frobnicate"]);
    refused(&words("explian")?, 2, &["explian", "tip: a similar subcommand exists: 'explain'"]);
    refused(
        &words("bench decode --lenght 64")?,
        2,
        &["tip: a similar argument exists: '--length'"],
    );
    refused(&words("explain --device h200 --dtype bf61")?, 2, &["bf61", "tip: ", "'bf16'"]);
    refused(&words("run")?, 2, &["<MODEL>"]);
    refused(&words("explain --device voodoo2")?, 2, &["--device", "voodoo2", "h200"]);
    refused(&words("explain --head-size 0")?, 2, &["--head-size", "0"]);
    refused(&words("bench prefill --size 3by4")?, 2, &["--size", "3by4", "BATCHxLENGTH"]);
    refused(&words("bench decode --length 64..8")?, 2, &["--length", "64..8", "FIRST..LAST"]);
    refused(&words("bench decode --model gpt-2")?, 2, &["--model", "gpt-2", "llama3-8b"]);
    refused(&words("bench decode --model llama3-8b --heads 8")?, 2, &["--model", "--heads"]);
    refused(&words("bench")?, 2, &["bench: got nothing; allowed: prefill or decode"]);
    refused(&words("bench decode --size 1x16 --batch 3")?, 2, &["--size", "--batch"]);
    refused(
        &words("bench decode --model llama3-8b --size 1x1000000")?,
        2,
        &["--size", "allowed: 8192"],
    );
    let twice = words("run /no/such/model --data x --out y")?;
    refused(&twice, 1, &["/no/such/model: No such file or directory"]);
    assert_eq!(twice.stderr.matches("No such file").count(), 1, "{}", twice.stderr);
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let run = words(&format!("run {manifest} --data x --out y"))?;
    refused(&run, 1, &[&format!("{manifest}: got malformed protobuf")]);
    refused(&words("bench prefill --against /no/such/file")?, 1, &["--against", "/no/such/file"]);
    Ok(())
}

/// Every option that takes numbers, with numbers that it does not take: one line names it as it was
/// typed, what was got, and what is allowed.
#[test]
fn numbers_that_an_option_does_not_take_name_it() -> Result {
    let layer = ["--heads", "--kv-heads", "--head-size", "--sliding-cache", "--block-size"];
    let sizes = ["--batch", "--query-length", "--past-length"];
    let bench = ["--batch", "--length", "--size", "--runs", "--checked-rows"];
    let of = |command: &'static str, options: &[&'static str]| {
        options.iter().map(|option| (command, *option)).collect::<Vec<_>>()
    };
    let options = [
        of("explain", &layer),
        of("explain", &sizes),
        of("explain", &["--window", "--softcap", "--scale"]),
        of("explain --block-size 16", &["--tokens"]),
        of("explain --query-length 8", &["--latent", "--value-size"]),
        of("profile", &["--runs", "--only-launch", "--heads", "--past-length"]),
        of("demo", &["--prefill", "--decode"]),
        of("selftest", &["--checked-rows"]),
        of("bench prefill", &["--past-length"]),
        of("bench decode", &["--query-length"]),
        of("bench prefill", &bench),
        of("bench decode", &bench),
        of("bench decode", &layer),
        of("check /no/such/folder", &["--rtol", "--atol"]),
    ];
    for (command, option) in options.concat() {
        let is_float = ["--softcap", "--scale", "--rtol", "--atol"].contains(&option);
        let may_be_zero = is_float || option == "--past-length";
        let huge = "99999999999999999999999999";
        let mut wrong = vec!["-2", "ten", ""];
        wrong.extend((!may_be_zero).then_some("0"));
        if !is_float {
            wrong.extend(["1e30", "1.5", huge, "-9e9"]);
        }
        for value in wrong {
            if command == "explain" && option == "--scale" && value == "-2" {
                continue;
            }
            let arguments = command.split(' ').chain([option, value]);
            let run = gqa(arguments)?;
            refused(&run, 2, &[&format!("gqa: {option}: got "), value, "; allowed: "]);
        }
    }
    refused(&words("explain --heads -5")?, 2, &["--heads: got \"-5\"; allowed: 1 to 65535 (see "]);
    Ok(())
}

/// Calls whose values have another head size than keys, and what they cannot be.
#[test]
fn values_of_another_head_size_are_explained() -> Result {
    let latent = "explain --heads 128 --head-size 576 --latent 512 --rotary interleaved";
    let paged = format!("{latent} --block-size 64 --batch 16 --past-length 4095");
    let prefill = "explain --heads 16 --kv-heads 16 --head-size 192 --query-length 2048";
    for (command, printed) in [
        (paged.as_str(), ["gqa_latent_bf16", "values are the leading 512 elements of keys"]),
        (latent, ["gqa_latent_mma_bf16_r32", "values are the leading 512 elements of keys"]),
        (&format!("{paged} --device rtx4090"), ["gqa_latent_mma_bf16_r32", "leading 512 elements"]),
        (&format!("{paged} --kv-cache float8"), ["gqa_latent_float8_bf16", "float8e4m3fn"]),
        (&format!("{prefill} --value-size 128"), ["gqa_hopper_bf16_d192_v128", "of size 128"]),
    ] {
        let run = words(command)?;
        assert_eq!(run.code, Some(0), "{command}: {}", run.stderr);
        for word in printed {
            assert!(run.stdout.contains(word), "{word} in\n{}", run.stdout);
        }
    }
    let tokens = format!("{paged} --tokens 17");
    for (command, message) in [
        (tokens.as_str(), "--tokens: got 17; allowed: 1 to 16"),
        ("explain --head-size 64 --latent 128", "--latent: got 128; allowed: up to --head-size"),
        ("explain --head-size 576 --latent 508", "--latent: got 508; allowed: "),
        ("explain --head-size 576 --latent 576 --rotary half", "--rotary: got 0; allowed: "),
    ] {
        refused(&words(command)?, 2, &[message]);
    }
    Ok(())
}

#[test]
fn a_selftest_writes_what_it_prints() -> Result {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("report.txt");
    let calls = ["selftest", "--backend", "cpu", "--only", "64/8 x 64: 8 x 1", "--report"];
    let run = gqa(calls.map(OsStr::new).into_iter().chain([file.as_os_str()]))?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stdout.contains(" ok, ") && run.stdout.ends_with("1 calls, all right\n"));
    assert_eq!(std::fs::read_to_string(file)?, run.stdout);
    let none = gqa(["selftest", "--only", "no such call"])?;
    refused(&none, 2, &["--only: got \"no such call\"; allowed: "]);
    Ok(())
}

#[test]
fn a_folder_without_cases_is_a_mistake() -> Result {
    let folder = tempfile::tempdir()?;
    let run = gqa(["check".as_ref(), folder.path().as_os_str()])?;
    refused(&run, 2, &["no case", &folder.path().display().to_string()]);
    Ok(())
}

/// Runs the program, which has ten seconds.
#[cfg(unix)]
fn quick(command: &mut Command) -> Result<Run> {
    use std::process::Stdio;
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    for _ in 0..1000 {
        if child.try_wait()?.is_some() {
            let output = child.wait_with_output()?;
            return Ok(Run {
                code: output.status.code(),
                stdout: String::from_utf8(output.stdout)?,
                stderr: String::from_utf8(output.stderr)?,
            });
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    child.kill()?;
    Err(format!("{command:?} does not end").into())
}

#[cfg(unix)]
fn check(path: &Path) -> Result<Run> {
    let arguments =
        ["check".as_ref(), "--backend".as_ref(), "reference".as_ref(), path.as_os_str()];
    quick(Command::new(env!("CARGO_BIN_EXE_gqa")).args(arguments))
}

/// A stored case, copied.
#[cfg(unix)]
fn a_case(folder: &Path) -> Result<PathBuf> {
    let stored = std::fs::read_dir(cases("gqa"))?.next().ok_or("no case")??.path();
    let case = folder.join("case");
    let set = |case: &Path| case.join("test_data_set_0");
    std::fs::create_dir_all(set(&case))?;
    std::fs::copy(stored.join("model.onnx"), case.join("model.onnx"))?;
    for file in std::fs::read_dir(set(&stored))? {
        let file = file?;
        std::fs::copy(file.path(), set(&case).join(file.file_name()))?;
    }
    Ok(case)
}

#[cfg(unix)]
fn pipe(path: &Path) -> Result {
    let made = Command::new("mkfifo").arg(path).status()?;
    if made.success() { Ok(()) } else { Err("mkfifo failed".into()) }
}

/// `gqa check` ends and names the problem if a case's files are folders, pipes, links or the like.
#[cfg(unix)]
#[test]
fn files_that_are_none_are_refused() -> Result {
    use std::os::unix::fs::symlink;
    type Make = fn(&Path) -> Result;
    let makes: [(Make, &str); 6] = [
        (pipe, "got a pipe; allowed: a regular file of at most"),
        (|path| Ok(symlink("/dev/zero", path)?), "got a device; allowed: a regular file"),
        (|path| Ok(std::fs::create_dir(path)?), "got a folder; allowed: a regular file"),
        (|path| Ok(std::fs::File::create(path)?.set_len(1 << 40)?), "got 1099511627776 bytes"),
        (|path| Ok(symlink(path, path)?), "Too many levels of symbolic links"),
        (|path| Ok(symlink("nowhere", path)?), "No such file or directory"),
    ];
    for file in ["model.onnx", "meta.json", "test_data_set_0/input_0.pb"] {
        for (make, reason) in makes {
            let folder = tempfile::tempdir()?;
            let case = a_case(folder.path())?;
            if case.join(file).exists() {
                std::fs::remove_file(case.join(file))?;
            }
            make(&case.join(file))?;
            let run = check(folder.path())?;
            if (file, reason) == ("meta.json", "No such file or directory") {
                assert_eq!(run.code, Some(0), "{}", run.stdout);
                continue;
            }
            assert_eq!(run.code, Some(1), "{file}: {}{}", run.stdout, run.stderr);
            let line = run.stdout.lines().next().unwrap_or_default();
            assert!(line.starts_with("error case: "), "{line}");
            let tensor = file.ends_with(".pb") && line.contains(&reason.replace("got ", ", "));
            assert!(line.contains(reason) || tensor, "{file}, {reason}: {line}");
            let place = case.join(file).display().to_string();
            assert!(line.contains(&place), "{place}: {line}");
        }
    }
    Ok(())
}

/// A path that is not a readable folder of cases is an error that names it with the reason.
#[cfg(unix)]
#[test]
fn folders_that_are_none_are_refused() -> Result {
    use std::os::unix::fs::{PermissionsExt, symlink};
    refused(&check(Path::new("/dev/zero"))?, 2, &["/dev/zero: Not a directory"]);
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    pipe(&at("pipe"))?;
    refused(&check(&at("pipe"))?, 2, &["/pipe: Not a directory"]);
    std::fs::remove_file(at("pipe"))?;
    symlink(at("loop"), at("loop"))?;
    refused(&check(&at("loop"))?, 2, &["Too many levels of symbolic links"]);
    refused(&check(folder.path())?, 2, &["/loop", "Too many levels of symbolic links"]);
    std::fs::remove_file(at("loop"))?;
    let case = a_case(&at("more"))?;
    for mode in [0o000, 0o444, 0o111] {
        std::fs::set_permissions(at("more"), std::fs::Permissions::from_mode(mode))?;
        let readable = std::fs::read_dir(at("more")).is_ok() && case.join("model.onnx").exists();
        let run = check(folder.path())?;
        std::fs::set_permissions(at("more"), std::fs::Permissions::from_mode(0o755))?;
        if readable {
            println!("SKIPPED: permissions do not count for this user");
            break;
        }
        refused(&run, 2, &["/more", "Permission denied"]);
    }
    // A data set that leads nowhere is not left out in silence.
    symlink("nowhere", case.join("test_data_set_1"))?;
    let run = check(folder.path())?;
    assert_eq!(run.code, Some(1), "{}", run.stdout);
    assert!(run.stdout.contains("test_data_set_1: No such file or directory"), "{}", run.stdout);
    Ok(())
}

/// All stored cases pass on a back end, one line each, then the totals.
fn stored_cases_pass(backend: &str) -> Result {
    for operator in ["gqa", "paged"] {
        cases_pass(backend, &cases(operator))?;
    }
    Ok(())
}

fn cases_pass(backend: &str, folder: &Path) -> Result {
    let run = gqa(["check".as_ref(), "--backend".as_ref(), backend.as_ref(), folder.as_os_str()])?;
    let count = std::fs::read_dir(folder)?.count();
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
        outcome && named
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
        let fixed =
            ["check", "--backend=cpu"].into_iter().chain(tolerance.iter().copied()).map(OsStr::new);
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
fn explain_tells_the_type_of_the_output() -> Result {
    let run = words("explain --query-length 1 --past-length 1000 --device h200 --float32-output")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for words in ["output float32", "chosen: gqa_decode_bf16_d128_r8", "out_f32=output"] {
        assert!(run.stdout.contains(words), "{words} is not in\n{}", run.stdout);
    }
    Ok(())
}

#[test]
fn explain_tells_what_a_cache_holds() -> Result {
    let step = "explain --query-length 1 --past-length 1000 --device h200 --kv-cache float8";
    let run = words(step)?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for words in
        ["float8e4m3fn cache with a scale per tensor", "chosen: gqa_decode_q8_bf16_d128_r8"]
    {
        assert!(run.stdout.contains(words), "{words} is not in\n{}", run.stdout);
    }
    let run = words(&format!("{step} --scales head"))?;
    assert!(run.stdout.contains("float8e4m3fn cache with a scale per head"), "{}", run.stdout);
    let run = words(&format!("{step} --scales channel --head-size 72"))?;
    for words in ["with a scale per channel", "gqa_append_dequantized_bf16"] {
        assert!(run.stdout.contains(words), "{words} is not in\n{}", run.stdout);
    }
    let run = words(&format!("{step} --scales token"))?;
    for words in ["float8e4m3fn cache with a scale per token", "gqa_decode_q8_bf16_d128_r8"] {
        assert!(run.stdout.contains(words), "{words} is not in\n{}", run.stdout);
    }
    let run = words(&format!("{step} --scales token --separate-cache"))?;
    refused(&run, 1, &["k_quant_type", "PER_TOKEN", "past and present are not one cache"]);
    refused(&words("explain --scales channel")?, 2, &["--kv-cache"]);
    let prompt = "explain --query-length 8192 --device h200 --kv-cache float8";
    let run = words(&format!("{prompt} --float8-products"))?;
    for words in ["float8 products", "chosen: gqa_hopper_float8_bf16_d128", "gqa_float8_operands"] {
        assert!(run.stdout.contains(words), "{words} is not in\n{}", run.stdout);
    }
    let run = words(prompt)?;
    assert!(run.stdout.contains("the call does not allow float8 products"), "{}", run.stdout);
    refused(&words("explain --float8-products")?, 2, &["--kv-cache"]);
    Ok(())
}

#[test]
fn explain_tells_how_a_cache_slides() -> Result {
    let step = "explain --query-length 1 --past-length 5000 --device h200 --sliding-cache 2048";
    let run = words(&format!("{step} --window 1024 --rotary half"))?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for words in [
        "cache of 2048 rows that slides",
        "generated where the cache slides",
        "gqa_rolling_kv",
        "chosen: gqa_decode_bf16_d128_r8",
    ] {
        assert!(run.stdout.contains(words), "{words} is not in\n{}", run.stdout);
    }
    refused(&words(step)?, 2, &["--window: got -1", "--sliding-cache"]);
    Ok(())
}

#[test]
fn explain_tells_what_reads_blocks() -> Result {
    let step = words("explain --batch 8 --past-length 5000 --block-size 64 --rotary half")?;
    assert_eq!(step.code, Some(0), "{}", step.stderr);
    assert!(step.stdout.contains("chosen: gqa_decode_bf16_d128_r8"), "{}", step.stdout);
    let prompt = words("explain --query-length 512 --block-size 64")?;
    assert!(prompt.stdout.contains("chosen: gqa_hopper_paged_bf16_d128"), "{}", prompt.stdout);
    let ampere = words("explain --query-length 512 --block-size 16 --device a100")?;
    assert!(ampere.stdout.contains("chosen: gqa_tiled_paged_bf16_d128"), "{}", ampere.stdout);
    let odd = words("explain --query-length 512 --block-size 48")?;
    assert!(odd.stdout.contains("gqa_paged_gather"), "{}", odd.stdout);
    let call = "explain --batch 32 --query-length 512 --past-length 3584";
    let mixed = words(&format!("{call} --block-size 64 --tokens 543"))?;
    let (prompt, token) = ("hopper_paged_bf16_d128:", "decode_bf16_d128_r8_w4:");
    for kernel in [prompt, token, "concurrent with the preceding launch"] {
        assert!(mixed.stdout.contains(kernel), "{}", mixed.stdout);
    }
    for tokens in [511, 32 * 512 + 1] {
        let run = words(&format!("{call} --block-size 64 --tokens {tokens}"))?;
        refused(&run, 2, &[&format!("--tokens: got {tokens}"), "512 to 16384"]);
    }
    refused(&words(&format!("{call} --tokens 543"))?, 2, &["--block-size"]);
    refused(&words("explain --block-size 0")?, 2, &["--block-size", "0"]);
    let sliding = words("explain --block-size 16 --window 9 --sliding-cache 9")?;
    refused(&sliding, 2, &["--block-size", "--sliding-cache"]);
    let codes = words("explain --head-size 24 --block-size 16 --kv-cache int4")?;
    refused(&codes, 2, &["--head-size: got 24;", "a multiple of 32"]);
    let window = words("explain --block-size 16 --bidirectional --window 8")?;
    refused(&window, 2, &["--window: got 8", "--bidirectional"]);
    Ok(())
}

/// The picture of a division, which is the kernels' own.
#[test]
fn explain_draws_how_lengths_divide_keys() -> Result {
    let call = "explain --batch 1";
    refused(&words(&format!("{call} --lengths 5"))?, 2, &["--lengths", "--batch"]);
    for wrong in ["-5", "x", "5000,", "0x9", "1x1x1", "5000x1"] {
        refused(&words(&format!("explain --lengths {wrong}"))?, 2, &["--lengths: got ", "900"]);
    }
    let many = words("explain --lengths 4000x5,97x6")?;
    refused(&many, 2, &["--lengths: got 4097 sequences; allowed: up to 4096"]);
    let few = words("explain --lengths 5000,17,900")?;
    assert!(few.stdout.contains("keys are not divided by lengths"), "{}", few.stdout);
    let run = words("explain --device h200 --lengths 20000,3x300,40x2000 --block-size 16")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let picture = run.stdout.split_once("\ndivision").unwrap_or_default().1;
    assert_eq!(picture.trim_end(), include_str!("division.txt").trim_end(), "{}", run.stdout);
    Ok(())
}

/// Each sequence's tiles are in its parts, once, and no place has two parts at a time.
#[test]
fn explained_parts_are_all_keys() -> Result {
    for lengths in ["9000,5x100,70", "100x100,50000,100x100,2x9000", "0,1,33x6000"] {
        let run = words(&format!("explain --lengths {lengths} --json"))?;
        let explained: serde_json::Value = serde_json::from_str(&run.stdout)?;
        let division = &explained["division"];
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let parts = division["parts"].as_array().unwrap();
        let (sequences, keys) =
            (division["sequences"].as_array().unwrap(), &division["keys_of_a_tile"]);
        for (b, sequence) in sequences.iter().enumerate() {
            let own = || parts.iter().filter(|part| number(&part["sequence"]) == b as u64);
            let tiles = own().map(|part| number(&part["tiles"])).sum::<u64>();
            // And the new token.
            let rows = number(&sequence["rows"]) + 1;
            assert_eq!(tiles, rows.div_ceil(number(keys)), "{lengths}: sequence {b}");
            let numbers = own().map(|part| number(&part["part"]));
            assert!(numbers.eq(0..number(&sequence["parts"])), "{lengths}: sequence {b}");
        }
        let mut places = vec![0; number(&division["places"]) as usize];
        for part in parts {
            let place = &mut places[number(&part["place"]) as usize];
            assert_eq!(*place, number(&part["start"]), "{lengths}");
            *place += number(&part["tiles"]);
        }
        let (most, all) = (places.iter().max().unwrap(), places.iter().sum::<u64>());
        let share = *most as f64 * places.len() as f64 / all as f64;
        let told = division["busiest_over_mean"].as_f64().unwrap();
        assert!((share - told).abs() < 1e-9 && told >= 1.0, "{lengths}: {told}, {share}");
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
    for (words_of_it, fragments) in [
        ("--kv-heads 7", &["--kv-heads: got 7; allowed: a divisor of --heads = 32"][..]),
        ("--heads 6 --kv-heads 4 --block-size 16", &["--kv-heads: got 4; ", "--heads = 6"]),
        ("--head-size 516", &["--head-size: got 516; allowed: a multiple of 8"]),
        ("--head-size 24 --rotary half", &["--rotary: got ", "a --head-size that is a multiple"]),
        ("--scale nan", &["--scale: got NaN"]),
        ("--scale 1e39", &["--scale: got inf"]),
        ("--softcap inf", &["--softcap: got \"inf\""]),
        ("--query-length 2147483648", &["--batch, --query-length: got (1, 2147483648, "]),
        ("--sliding-cache 2147483648 --window 5", &["--batch, --sliding-cache: got (1, 8, 2"]),
        (
            "--sliding-cache 5 --window 6",
            &["--batch, --sliding-cache: got (1, 8, 5, ", "6 rows or more, as there is --sliding"],
        ),
        ("--window 0", &["--window: got 0"]),
        ("--window 0 --block-size 16", &["--window: got 0"]),
        ("--batch 16777216 --past-length 2000000000", &["--batch, --past-length: got (16777216"]),
    ] {
        refused(&words(&format!("explain {words_of_it}"))?, 2, fragments);
    }
    Ok(())
}

/// Most people begin so.
#[test]
fn explain_without_sizes_is_a_decode_step() -> Result {
    let problem = |words_of_it: &str| -> Result<String> {
        let run = words(&format!("explain --json {words_of_it}"))?;
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let explained: serde_json::Value = serde_json::from_str(&run.stdout)?;
        assert!(!explained["problem"].is_null());
        Ok(explained["problem"].to_string())
    };
    let step = problem("--query-length 1 --past-length 8191")?;
    assert_eq!(problem("")?, step);
    assert_eq!(problem("--dtype bfloat16")?, step);
    assert_eq!(problem("--dtype float32")?, problem("--dtype f32")?);
    assert_eq!(problem("--query-length 512")?, problem("--query-length 512 --past-length 0")?);
    assert_ne!(problem("--past-length 100")?, step);
    Ok(())
}

#[test]
fn doctor_is_content_without_a_gpu() -> Result {
    let run = words("doctor")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for word in ["driver", "ptx", "used"] {
        assert!(run.stdout.lines().any(|line| line.starts_with(word)), "{word} in {}", run.stdout);
    }
    let report = std::env::temp_dir().join(format!("gqa-doctor-{}.txt", std::process::id()));
    let run = words(&format!("doctor --report {}", report.display()))?;
    let text = std::fs::read_to_string(&report)?;
    std::fs::remove_file(&report)?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(text.starts_with(&run.stdout), "{text}");
    Ok(())
}

#[test]
fn bench_checks_float32_output_by_the_type_of_the_call() -> Result {
    let run = words(
        "bench decode --float32-output --backend sim --size 1x64 --heads 4 --kv-heads 2 --head-size 64 --runs 1",
    )?;
    assert_eq!(run.code, Some(0), "{}{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("gqa_decode_bf16_d64_r8"), "{}", run.stdout);
    Ok(())
}

#[test]
fn bench_prints_json_and_checks_its_results() -> Result {
    for mode in [
        "prefill --size 1x40,2x9 --packed",
        "prefill --size 1x16 --past-length 20",
        "decode --size 2x65 --rotary half",
        "prefill --size 1x40 --cached",
        "decode --size 2x65 --rotary half --cached",
        "decode --size 2x65 --rotary half --qk-norm",
        "decode --size 2x65 --rotary half --kv-cache int8",
        "decode --size 1x40 --kv-cache int4 --scales channel",
        "decode --size 2x65 --kv-cache float8 --scales head",
        "decode --size 2x65 --rotary half --kv-cache int8 --scales token",
        "prefill --size 1x40 --packed --kv-cache int4 --scales token --block-size 16",
        "prefill --size 1x40 --packed --rotary half --kv-cache float8",
        "prefill --size 1x40 --packed --qk-norm",
        "decode --size 2x65 --rotary half --float8-output",
        "prefill --size 1x40 --packed --kv-cache int8 --float8-output",
        "decode --size 2x65 --rotary half --window 20 --sliding-cache 33",
        "prefill --size 1x40 --packed --window 9 --sliding-cache 16",
        "prefill --size 1x16 --past-length 50 --window 20 --sliding-cache 40 --kv-cache int8",
        "decode --size 3x65 --rotary half --block-size 16 --window 30",
        "prefill --size 2x40 --past-length 9 --packed --qk-norm --block-size 7",
        "decode --size 2x65 --rotary half --block-size 16 --kv-cache int4 --scales channel",
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
fn bench_does_not_compare_codes_with_numbers() -> Result {
    let run = words("bench decode --size 1x8 --kv-cache int8 --against peers.json")?;
    refused(&run, 2, &["--kv-cache", "--against"]);
    Ok(())
}

#[test]
fn bench_runs_on_every_back_end() -> Result {
    for backend in ["cpu", "reference", "sim"] {
        let run = words(&format!(
            "bench prefill --backend {backend} --heads 2 --kv-heads 1 --head-size 32 --size 1x70 --runs 1 --json"
        ))?;
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let report: serde_json::Value = serde_json::from_str(&run.stdout)?;
        let result = &report["results"][0];
        let kernels = result["kernels"].as_array().ok_or("kernels")?;
        assert_eq!(result["launches"], kernels.len());
        assert_eq!(kernels.is_empty(), backend != "sim", "{kernels:?}");
        assert_eq!(result["elements_out_of_tolerance"], 0);
        assert_eq!(report["ceilings"].is_null(), backend != "cpu");
        for known in ["device", "commit", "command", "date", "cpu"] {
            assert!(
                report["provenance"][known].as_str().is_some_and(|text| !text.is_empty()),
                "{known}"
            );
        }
    }
    Ok(())
}

/// Names of the files in a folder, in order.
fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder)?;
    let names =
        entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

#[test]
fn bench_writes_tables_and_figures_of_a_sweep_beside_peers() -> Result {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let timing = |query_length| {
        serde_json::json!({"peer": "Nobody <1>", "dtype": "float32", "batch": 1, "query_length": query_length, "past_length": 0,
            "heads": 2, "kv_heads": 1, "head_size": 32, "causal": true, "window": -1, "median_us": 1e9})
    };
    let peers = serde_json::json!({"provenance": {"device": "none"}, "results": [timing(16), timing(32), timing(999)]});
    std::fs::write(path("peers.json"), peers.to_string())?;
    let run = words(&format!(
        "bench prefill --backend cpu --heads 2 --kv-heads 1 --head-size 32 --dtype f32,bf16 --batch 1,2 --length 16..32 --runs 1 \
         --against {} --csv {} --report {} --plots {}",
        path("peers.json"),
        path("t.csv"),
        path("r.html"),
        path("plots")
    ))?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(run.stdout.matches("2/1 x 32").count(), 10, "{}", run.stdout);
    assert_eq!(run.stdout.matches("1000000000.0 (").count(), 2, "{}", run.stdout);

    let csv = std::fs::read_to_string(path("t.csv"))?;
    assert_eq!(csv.lines().count(), 9);
    assert_eq!(csv.matches("Nobody <1>=1000000000.000").count(), 2, "{csv}");
    assert_eq!(csv.matches("gqa bench prefill --backend cpu").count(), 8, "{csv}");

    let html = std::fs::read_to_string(path("r.html"))?;
    assert_eq!(html.matches("<figure>").count(), 4, "time, rate, roofline, ratio");
    assert!(html.contains("Nobody &lt;1&gt;") && !html.contains("Nobody <1>"));
    assert!(!html.contains("src=") && !html.contains("href="), "the file refers to no other");

    let plots = names_in(&folder.path().join("plots"))?;
    let names = ["latency", "rate", "ratio", "roofline"]
        .map(|name| [format!("{name}.png"), format!("{name}.svg")]);
    assert_eq!(plots, names.concat());
    Ok(())
}

/// What takes minutes is not measured for a file that cannot be written.
#[test]
fn bench_tries_its_files_before_it_measures() -> Result {
    let call = "bench decode --backend cpu --model llama3-70b --length 8192 --runs 100000";
    for option in ["--report", "--csv", "--plots"] {
        let run = words(&format!("{call} {option} /proc/no-such-folder/file"))?;
        refused(&run, 1, &[option, "/proc/no-such-folder/file", "No such file or directory"]);
    }
    let folder = tempfile::tempdir()?;
    let report = folder.path().join("r.html");
    let run = words(&format!("bench decode --size 1x0 --report {}", report.display()))?;
    refused(&run, 2, &["--size", "1x0"]);
    assert!(!report.exists());
    Ok(())
}

/// A machine without a GPU is none with an error.
#[test]
fn what_computed_is_a_processor_or_a_gpu() -> Result {
    let call = "--size 1x16 --heads 2 --kv-heads 1 --head-size 32 --runs 1 --checked-rows 1";
    let run = words(&format!("bench decode {call}"))?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let device = run.stdout.lines().find(|line| line.starts_with("Device "));
    let device = device.ok_or("no device")?;
    assert!(!device.contains("libcuda") && !device.contains("driver"), "{device}");
    Ok(())
}

#[test]
fn models_give_heads_and_longest_sequence() -> Result {
    let run = words(
        "bench decode --backend cpu --model phi3-mini,llama3-8b --length 8,9000 --runs 1 --checked-rows 2 --json",
    )?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let report: serde_json::Value = serde_json::from_str(&run.stdout)?;
    let results = report["results"].as_array().ok_or("results")?;
    let got: Vec<_> = results
        .iter()
        .map(|r| {
            (
                r["model"].as_str(),
                r["past_length"].as_u64(),
                r["heads"].as_u64(),
                r["head_size"].as_u64(),
            )
        })
        .collect();
    let phi = |length| (Some("phi3-mini"), Some(length), Some(32), Some(96));
    assert_eq!(got, [phi(8), phi(9000), (Some("llama3-8b"), Some(8), Some(32), Some(128))]);
    Ok(())
}

#[test]
fn profile_needs_a_gpu_and_says_so() -> Result {
    let run = words("profile --query-length 1 --past-length 100 --runs 2")?;
    match run.code {
        Some(0) => {
            assert!(run.stdout.contains("  gqa_") && run.stdout.contains("ncu "), "{}", run.stdout)
        }
        _ => refused(&run, 1, &["gqa profile", "GPU"]),
    }
    Ok(())
}

#[test]
fn explanations_are_json_too() -> Result {
    let run = words("explain --query-length 4096 --json")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let explained: serde_json::Value = serde_json::from_str(&run.stdout)?;
    let launches = explained["launches"].as_array().ok_or("launches")?;
    assert_eq!(
        launches.last().map(|launch| &launch["arguments"]["seqlens_k"]),
        Some(&"seqlens_k".into())
    );
    // All that it takes to repeat a launch.
    for launch in launches {
        let count = |name: &str| launch[name].as_array().map(Vec::len);
        assert_eq!(count("values"), launch["arguments"].as_object().map(serde_json::Map::len));
        assert!(count("params") > Some(0));
    }
    let map = &launches[launches.len() - 1]["values"][0];
    assert_eq!((&map["tensor"], &map["size"][0]), (&"query".into(), &128.into()));
    let candidates = gqa_host::plan::candidates().count();
    assert_eq!(explained["decisions"].as_array().map(Vec::len), Some(candidates));
    assert_eq!(explained["bound"], "arithmetic");
    Ok(())
}

/// A stored case: a decode step of sequences of different lengths.
const RAGGED: &str = "gqa/decode_static_ragged";

/// The program with one environment variable set.
fn with_variable<S: AsRef<OsStr>>(
    name: &str,
    value: &OsStr,
    arguments: impl IntoIterator<Item = S>,
) -> Result<Run> {
    Run::of(Command::new(env!("CARGO_BIN_EXE_gqa")).env(name, value).args(arguments))
}

/// `gqa run` on a stored case, with one environment variable set.
fn run_with(name: &str, value: &OsStr, case: &str, backend: &str) -> Result<Run> {
    let out = tempfile::tempdir()?;
    let case = cases(case);
    let model = case.join("model.onnx");
    let files = [model.as_os_str(), "--data".as_ref(), case.as_os_str()];
    let rest = ["--out".as_ref(), out.path().as_os_str(), "--backend".as_ref(), backend.as_ref()];
    with_variable(name, value, ["run".as_ref()].into_iter().chain(files).chain(rest))
}

#[test]
fn the_log_names_call_and_launches() -> Result {
    let run = run_with("GQA_LOG", "debug".as_ref(), RAGGED, "sim")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for word in
        ["call=GroupQueryAttention float32", "entry=\"gqa_", "grid=[", "threads=", "shared_bytes="]
    {
        assert!(run.stderr.contains(word), "{word} in {}", run.stderr);
    }
    refused(
        &run_with("GQA_LOG", "loud".as_ref(), RAGGED, "cpu")?,
        2,
        &["GQA_LOG", "loud", "debug"],
    );
    Ok(())
}

#[test]
fn a_dump_has_every_tensor_of_the_call() -> Result {
    let folder = tempfile::tempdir()?;
    let run = run_with("GQA_DUMP", folder.path().as_os_str(), RAGGED, "cpu")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let call = folder.path().join("000000-cpu");
    let names = names_in(&call)?;
    let npy = [
        "key",
        "output",
        "past_key",
        "past_value",
        "present_key",
        "present_value",
        "query",
        "seqlens_k",
        "value",
    ];
    let want: Vec<_> =
        ["call.txt".to_owned()].into_iter().chain(npy.map(|name| format!("{name}.npy"))).collect();
    assert_eq!(names, want);
    assert!(
        std::fs::read_to_string(call.join("call.txt"))?
            .starts_with("GroupQueryAttention float32: batch ")
    );
    for name in npy {
        assert!(
            std::fs::read(call.join(name).with_extension("npy"))?.starts_with(b"\x93NUMPY\x01\x00")
        );
    }
    Ok(())
}

#[test]
fn every_operator_dumps_its_calls() -> Result {
    let folder = tempfile::tempdir()?;
    let run = run_with("GQA_DUMP", folder.path().as_os_str(), "attention/3d", "cpu")?;
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let call = std::fs::read_to_string(folder.path().join("000000-cpu/call.txt"))?;
    assert!(call.starts_with("Attention float32: batch "), "{call}");
    let run = run_with("GQA_DUMP", "".as_ref(), "attention/3d", "cpu")?;
    refused(&run, 1, &["GQA_DUMP: got \"\"; allowed: a folder"]);
    Ok(())
}

/// A wrong switch is a mistake, and no reason to take the CPU instead of a GPU.
#[test]
fn a_wrong_switch_is_refused_whatever_the_machine() -> Result {
    let run = with_variable(
        "GQA_SPLITS",
        "abc".as_ref(),
        "bench decode --size 1x16 --runs 1".split(' '),
    )?;
    refused(&run, 1, &["GQA_SPLITS: got \"abc\"; allowed: 1 to 128"]);
    Ok(())
}

#[test]
fn demo_shows_prefill_and_decode_steps() -> Result {
    let run = words("demo --backend cpu --prefill 20 --decode 3")?;
    assert_eq!(run.code, Some(0), "{}{}", run.stdout, run.stderr);
    for word in [
        "plan for prefill",
        "plan for a decode step",
        "prefill of 20 tokens",
        "3 decode steps",
        ": ok",
    ] {
        assert!(run.stdout.contains(word), "{word} in {}", run.stdout);
    }
    Ok(())
}
