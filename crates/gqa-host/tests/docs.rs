//! docs/env.md and docs/support.md match the options, the registry and the planner; files named in
//! documents and comments exist; and ARCHITECTURE.md's rule about `asm!` holds.
//!
//! `BLESS=1 cargo test -p gqa-host --test docs` writes the first two.

use gqa_host::engine::{Dense, Heads, Layer, Paged, Rope};
use gqa_host::op::{GroupQueryAttention, Shapes};
use gqa_host::plan::{DeviceInfo, Plan, PlanOptions, environment, is_proven, plan};
use gqa_host::{CacheBinding, DType, Problem, QuantFormat, Quantization, Scales, TensorDesc};
use gqa_kernels::registry::{Entry, Family, Role, entries};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The repository's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compares the file with `text`; with BLESS set, writes it.
fn check(name: &str, text: &str) {
    let path = root().join("docs").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == text,
        "docs/{name} is out of date: BLESS=1 cargo test -p gqa-host --test docs"
    );
}

#[test]
fn environment_variables_are_documented() {
    let text = format!(
        "# Environment variables\n\n\
         <!-- Written by crates/gqa-host/tests/docs.rs. -->\n\n\
         An alias is ONNX Runtime's variable for the same option, and is read if the variable itself\n\
         is not set. A wrong value is an error. An unknown `GQA_*` name is a warning in the log.\n\n{}\n\
         `cargo gqa doctor` lists the variables that are set. They affect plans that are made after\n\
         they were read: the program reads them when it starts, the library in\n\
         `PlanOptions::from_env`. The packages for Python and ONNX Runtime report unknown names and\n\
         wrong values when they are imported or registered, candle's crate at its first call, on a\n\
         GPU or on the CPU.\n",
        environment::markdown()
    );
    check("env.md", &text);
}

/// A call for the table of the planner's choices.
struct Call {
    name: &'static str,
    rows: usize,
    past: usize,
    dtype: DType,
    head_size: usize,
    op: fn(GroupQueryAttention) -> GroupQueryAttention,
    bias: bool,
    sink: bool,
}

impl Call {
    const fn new(name: &'static str, rows: usize, past: usize) -> Self {
        Self {
            name,
            rows,
            past,
            dtype: DType::BF16,
            head_size: 128,
            op: |op| op,
            bias: false,
            sink: false,
        }
    }

    /// 32 query heads over 8 KV heads, two sequences, a shared cache that is full afterwards.
    fn plan(&self, device: &DeviceInfo) -> Plan {
        let (total, size) = (self.rows + self.past, self.head_size);
        let desc = |shape| TensorDesc { dtype: self.dtype, shape };
        let (query, new) = ([2, self.rows, 32 * size], [2, self.rows, 8 * size]);
        let (cache, bias, sink) = ([2, 8, total, size], [1, 1, self.rows, total], [32]);
        let shapes = Shapes {
            key: Some(desc(&new)),
            value: Some(desc(&new)),
            past_key: Some(desc(&cache)),
            past_value: Some(desc(&cache)),
            attention_bias: self.bias.then_some(desc(&bias)),
            head_sink: self.sink.then_some(desc(&sink)),
            ..Shapes::new(desc(&query), TensorDesc { dtype: DType::I32, shape: &[2] }, total)
        };
        let op = (self.op)(GroupQueryAttention::new(32, 8));
        let problem = op.problem_from_shapes(&shapes, CacheBinding::Shared).unwrap();
        plan(&problem, device, &PlanOptions::default()).unwrap()
    }

    /// The chosen way to compute attention.
    fn chosen(&self, device: &str) -> &'static str {
        let plan = self.plan(&DeviceInfo::known(device).unwrap());
        let chosen = plan.decisions().iter().find(|decision| decision.outcome.is_ok());
        chosen.unwrap().family.name()
    }
}

const DEVICES: [&str; 6] = ["h200", "b200", "rtx5090", "a100", "rtx4090", "v100"];

/// Where decode steps are counted.
const DECODING: [&str; 12] = [
    "h100", "b200", "b300", "thor", "rtx5090", "gb10", "a100", "orin", "l4", "rtx4090", "rtx3090",
    "t4",
];

/// Launches of a decode step, of 8 sequences of up to 8192 keys.
fn decode_steps() -> Vec<(&'static str, Problem)> {
    let sized = |dtype, size| {
        Layer::new(dtype, Heads { query: 32, kv: 8, size }).rope(Rope::new(size, 8192))
    };
    let rotated = |dtype| sized(dtype, 128);
    let int8 = Quantization { format: QuantFormat::Int8, scales: Scales::PerTensor };
    let dense = |layer: Layer| layer.dense(Dense::decode(8, 8192)).unwrap();
    let paged = |layer: Layer, tokens| {
        let cache = [4096, 16, 512];
        let call = match tokens {
            1 => Paged::decode(8, cache),
            _ => Paged::new(8, 8 * tokens, cache).most_tokens(tokens),
        };
        let call = call.longest(8192);
        layer.paged(call).unwrap()
    };
    let (bf16, f32) = (DType::BF16, DType::F32);
    vec![
        ("a KV cache in one piece", dense(rotated(bf16))),
        ("the same, heads of 112", dense(sized(bf16, 112))),
        ("the same, float32", dense(rotated(f32))),
        ("an int8 KV cache", dense(rotated(bf16).quantized(int8))),
        ("a paged KV cache", paged(rotated(bf16), 1)),
        ("the same, 4 tokens of each sequence", paged(rotated(bf16), 4)),
        ("a paged int8 KV cache", paged(rotated(bf16).quantized(int8), 1)),
        ("a paged KV cache, heads of 96", paged(sized(bf16, 96), 1)),
        ("an int8 KV cache, heads of 80", dense(sized(bf16, 80).quantized(int8))),
        ("a paged int8 KV cache, heads of 192", paged(sized(bf16, 192).quantized(int8), 1)),
    ]
}

/// A row of a table.
fn row(text: &mut String, cells: impl IntoIterator<Item = String>) -> std::fmt::Result {
    cells.into_iter().try_for_each(|cell| write!(text, "| {cell} "))?;
    writeln!(text, "|")
}

/// Launches of decode steps, by GPU.
fn launches(text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "\n## Launches of a decode step\n\n\
         bfloat16, 8 sequences with one new token each, RoPE, 32 query heads over 8 KV heads of 128,\n\
         unless a row says otherwise. Plans for the H100 have run on an H100 and an H200, plans for an\n\
         RTX 5090 on an H200, and plans for an A100 and an RTX 4090 on an H100, with the kernels of\n\
         these GPUs. No other GPU was available. `cargo xtask test` runs plans for an A100, a B200 and\n\
         an RTX 5090 on the simulator.\n"
    )?;
    let devices = DECODING.map(|name| (name, DeviceInfo::known(name).unwrap()));
    row(text, ["decode over".to_owned()].into_iter().chain(DECODING.map(str::to_owned)))?;
    writeln!(text, "|---|{}", "---|".repeat(DECODING.len()))?;
    for (name, problem) in decode_steps() {
        let count =
            |device| plan(&problem, device, &PlanOptions::default()).unwrap().launches().len();
        let counts = devices.iter().map(|(_, device)| count(device).to_string());
        row(text, [name.to_owned()].into_iter().chain(counts))?;
    }
    Ok(())
}

fn calls() -> Vec<Call> {
    let (prefill, decode) = (|name| Call::new(name, 2048, 0), |name| Call::new(name, 1, 8191));
    vec![
        prefill("prefill of 2048 tokens"),
        Call::new("chunked prefill, 128 tokens after 8064", 128, 8064),
        Call::new("speculative decoding, 16 tokens after 8176", 16, 8176),
        decode("decode after 8191 tokens"),
        Call { dtype: DType::F16, ..prefill("prefill, float16") },
        Call { dtype: DType::F32, ..prefill("prefill, float32") },
        Call { dtype: DType::F32, ..decode("decode, float32") },
        Call { op: |op| op.local_window_size(512), ..prefill("prefill, window 512") },
        Call { op: |op| op.softcap(30.0), ..prefill("prefill, softcap") },
        Call { sink: true, ..prefill("prefill, head_sink") },
        Call { op: |op| op.do_rotary(false).causal(0), ..prefill("prefill, not causal") },
        Call { op: |op| op.float32_output(true), ..prefill("prefill, float32_output") },
        Call { op: |op| op.float32_output(true), ..decode("decode, float32_output") },
        Call { op: |op| op.scale(-1.0), ..prefill("prefill, negative scale") },
        Call { bias: true, ..prefill("prefill, attention_bias") },
        Call { bias: true, ..decode("decode, attention_bias") },
        Call { op: |op| op.qk_output(2), ..prefill("prefill, output_qk") },
        Call { head_size: 64, ..prefill("prefill, head size 64") },
        Call { head_size: 72, ..decode("decode, head size 72") },
        Call { head_size: 256, ..prefill("prefill, head size 256") },
        Call { head_size: 512, ..prefill("prefill, head size 512") },
        Call { head_size: 512, ..decode("decode, head size 512") },
        Call { head_size: 576, ..decode("decode, head size 576") },
    ]
}

/// The kernel's name without prefix, element type and, where it ends the name, head size.
fn stem(entry: &Entry) -> String {
    let name = entry.name.trim_start_matches("gqa_").trim_end_matches("_f32");
    let kernel = name.replace("_bf16", "").replace("_f16", "");
    let size = kernel.rfind("_d").filter(|at| kernel[at + 2..].bytes().all(|b| b.is_ascii_digit()));
    size.map_or(kernel.as_str(), |at| &kernel[..at]).to_owned()
}

/// What follows the oldest compute capability of a kernel that newer ones do not run.
fn only(entry: &Entry) -> String {
    if entry.runs_on(u32::MAX) {
        return String::new();
    }
    let known = DeviceInfo::known_names().filter_map(DeviceInfo::known);
    let others: BTreeSet<u32> = known
        .map(|device| device.sm)
        .filter(|sm| *sm > entry.min_sm && entry.runs_on(*sm))
        .collect();
    let others = others.into_iter().map(|sm| format!(" and {}", capability(sm)));
    others.chain([" only".to_owned()]).collect()
}

/// A compute capability as it is written.
fn capability(sm: u32) -> String {
    format!("{}.{}", sm / 10, sm % 10)
}

fn kernels(text: &mut String, family: Family) -> std::fmt::Result {
    let mut rows: Vec<(String, String)> = Vec::new();
    for entry in entries().filter(|entry| entry.family == family) {
        let tile = if entry.rows > 0 {
            format!("{} x {}", entry.rows, entry.keys)
        } else {
            "-".to_owned()
        };
        let size = match (entry.head_size, entry.value_size) {
            (0, _) => "any".to_owned(),
            (keys, values) if keys == values => keys.to_string(),
            (keys, values) => format!("{keys}, values {values}"),
        };
        let shape = format!(
            "{size} | {tile} | {} | {} | {}{}",
            entry.threads,
            entry.shared_bytes,
            capability(entry.min_sm),
            only(entry)
        );
        let dtype = match entry.role {
            Role::GeneratePositions | Role::RollingLengths => "integers".to_owned(),
            Role::RollingKv | Role::PagedGather | Role::PagedScatter => "all".to_owned(),
            _ => format!("{:?}", entry.dtype).to_lowercase(),
        };
        match rows.iter_mut().find(|(have, types)| {
            *have == format!("`{}` | {{}} | {shape}", stem(entry)) && !types.contains(&dtype)
        }) {
            Some((_, types)) => write!(types, ", {dtype}")?,
            None => rows.push((format!("`{}` | {{}} | {shape}", stem(entry)), dtype)),
        }
    }
    for (row, types) in rows {
        writeln!(text, "| {} |", row.replace("{}", &types))?;
    }
    Ok(())
}

/// On which GPUs families ran.
fn trusted(text: &mut String) -> std::fmt::Result {
    let of = |proven: bool, sm: u32| {
        let families = Family::ALL.into_iter().filter(|family| is_proven(*family, sm) == proven);
        families.map(|family| format!("`{}`", family.name())).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(of(false, 90), "");
    writeln!(
        text,
        "\n## Trust\n\n\
         The kernels for compute capability 9.0 ran on an H100 and an H200, and their results were\n\
         compared there. No kernel has run on another GPU. The kernels for other GPUs were simulated\n\
         and assembled, and most run on Hopper, too. On other GPUs kernels are tested at first use\n\
         ([debugging.md](debugging.md#a-gpu-that-nobody-has-tried)), except for the simplest ones,\n\
         with which they are compared: {}.",
        of(true, 80)
    )
}

fn support() -> Result<String, std::fmt::Error> {
    let mut text = String::from(
        "# Support\n\n\
         <!-- Written by crates/gqa-host/tests/docs.rs. -->\n\n\
         ## What the planner takes for attention\n\n\
         bfloat16, 2 sequences, 32 query heads over 8 KV heads of 128 and a shared cache, unless a\n\
         row says otherwise. `cargo gqa explain` says for any call which kernel is chosen, and why\n\
         the others are not.\n\n| call |",
    );
    for device in DEVICES {
        write!(text, " {device} |")?;
    }
    writeln!(text, "\n|---|{}", "---|".repeat(DEVICES.len()))?;
    for call in calls() {
        write!(text, "| {} |", call.name)?;
        for device in DEVICES {
            write!(text, " `{}` |", call.chosen(device))?;
        }
        writeln!(text)?;
    }
    launches(&mut text)?;
    trusted(&mut text)?;
    writeln!(
        text,
        "\n## Kernels\n\n\
         The entries of `crates/gqa-kernels/src/registry`. A head size takes the smallest tile that\n\
         holds it. *shared* is the shared memory of a CTA in bytes, *compute capability* the oldest or\n\
         the only one. A heading names the targets for which PTX is shipped."
    )?;
    for family in Family::ALL {
        let name = family.name();
        writeln!(
            text,
            "\n### {name}: {}\n",
            family.targets().iter().map(|target| target.arch).collect::<Vec<_>>().join(", ")
        )?;
        if !entries().any(|entry| entry.family == family && entry.runs_on(90)) {
            writeln!(text, "Simulated and assembled, never run.\n")?;
        }
        writeln!(
            text,
            "| kernel | types | head size | rows x keys | threads | shared | compute capability |"
        )?;
        writeln!(text, "|---|---|---|---|---|---|---|")?;
        kernels(&mut text, family)?;
    }
    Ok(text)
}

#[test]
fn kernels_and_choices_are_documented() {
    check("support.md", &support().unwrap());
}

/// Files and folders below `folder`, by their paths from the repository's own.
fn paths(folder: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if matches!(&*name, ".git" | "target") {
            continue;
        }
        let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
        if entry.file_type().unwrap().is_dir() {
            paths.extend(self::paths(&path));
        }
        paths.push(path);
    }
    paths
}

/// Text between backquotes that looks like a file or a folder of the repository.
fn named(line: &str) -> impl Iterator<Item = &str> {
    const ENDS: [&str; 6] = [".rs", ".py", ".md", ".sh", ".toml", ".json"];
    let is_path = |word: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
        // Capitals are placeholders.
        let is_example = !word.ends_with(".md") && word.contains(|c: char| c.is_ascii_uppercase());
        let is_file = ENDS.iter().any(|end| word.ends_with(end));
        let is_folder = word.contains('/') && word.starts_with(|c: char| c.is_ascii_lowercase());
        word.chars().all(plain) && (is_file || is_folder) && !is_example
    };
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.flat_map(str::split_whitespace).map(|word| word.trim_end_matches('/')).filter(is_path)
}

#[test]
fn files_that_are_named_are_there() {
    let all = paths("");
    let exists = |name: &str| {
        let is_end =
            |path: &String| path.strip_suffix(name).is_some_and(|rest| rest.ends_with('/'));
        all.iter().any(|path| path == name || is_end(path))
    };
    // Measured results keep the names that files had then.
    let is_history = |path: &str| {
        path.starts_with("docs/results/") || matches!(path, "docs/perf-log.md" | "CHANGELOG.md")
    };
    let (mut lines, mut missing) = (0, Vec::new());
    for path in all.iter().filter(|path| !is_history(path)) {
        let is_document = path.ends_with(".md");
        if !is_document && !path.ends_with(".rs") {
            continue;
        }
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        for (number, line) in text.lines().enumerate() {
            let is_comment = line.trim_start().starts_with("//");
            if !is_document && !is_comment {
                continue;
            }
            lines += 1;
            let nowhere = named(line).filter(|name| is_document || name.ends_with(".rs"));
            let nowhere = nowhere.filter(|name| !exists(name));
            missing.extend(nowhere.map(|name| format!("{path}:{}: {name}", number + 1)));
        }
    }
    assert!(lines > 1000, "only {lines} lines were read");
    assert!(missing.is_empty(), "files that are not there:\n{}", missing.join("\n"));
}

/// All other kernel code is Rust that also runs on the simulated machine.
#[test]
fn only_one_folder_has_assembly() {
    let folder = "crates/gqa-kernels/src";
    let has_assembly = |path: &String| {
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        ["asm!(", "core::arch", "extern \"C\""].iter().any(|what| text.contains(what))
    };
    let with: Vec<_> = paths(folder)
        .into_iter()
        .filter(|path| path.ends_with(".rs") && has_assembly(path))
        .collect();
    assert!(with.len() > 1, "{with:?}");
    let own = format!("{folder}/simt/nvptx");
    let elsewhere: Vec<_> = with.iter().filter(|path| !path.starts_with(&own)).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}
