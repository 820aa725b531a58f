//! Constants folded into a plan's kernels: which bytes they are, and that the folded text gives
//! every register the value that the general text loads.

use gqa_host::driver::{Shipped, shipped};
use gqa_host::engine::{Dense, Heads, Layer, Paged};
use gqa_host::plan::{Arg, DeviceInfo, Fold, Plan, PlanOptions, plan};
use gqa_host::{DType, Problem, QuantFormat, Quantization, Result, Scales};
use gqa_ptx::{Constants, Ptxas, fold};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// More parameters, and larger ones, than any kernel has.
const PARAMETERS: usize = 32;
const BYTES: usize = 512;

/// What is in a kernel's parameters.
type Memory = Vec<[u8; BYTES]>;

/// Registers that a text loads from parameters, directly or as constants, and their values. The
/// interpreter knows `ld.param`, and `mov` of a constant or of two halves.
fn loaded(text: &str, kernel: &str, memory: &Memory) -> BTreeMap<String, u64> {
    let mut registers = BTreeMap::new();
    for line in text.lines().filter(|line| line.contains("ld.param") || line.contains("mov.b")) {
        let is_block = line.trim_start().starts_with('{');
        let body = line.trim().trim_start_matches("{ .reg .b32 lo, hi;").trim_end_matches('}');
        let mut local = BTreeMap::new();
        for statement in body.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            let Some((register, value)) = value(statement, kernel, memory, &local) else { break };
            local.insert(register, value);
        }
        local.retain(|register, _| !is_block || register.starts_with('%'));
        registers.extend(local);
    }
    registers
}

fn value(
    statement: &str,
    kernel: &str,
    memory: &Memory,
    local: &BTreeMap<String, u64>,
) -> Option<(String, u64)> {
    let (operation, operands) = statement.split_once(char::is_whitespace)?;
    let (register, source) = operands.trim().split_once(", ")?;
    let bits: u32 = operation.rsplit_once(".b")?.1.parse().ok()?;
    let value = if operation.starts_with("ld.param.") {
        let place = source.strip_prefix(&format!("[{kernel}_param_"))?.strip_suffix(']')?;
        let (parameter, offset) = place.split_once('+').unwrap_or((place, "0"));
        let (parameter, offset): (usize, usize) = (parameter.parse().ok()?, offset.parse().ok()?);
        let mut bytes = [0; 8];
        let count = bits as usize / 8;
        bytes[..count].copy_from_slice(&memory[parameter][offset..offset + count]);
        u64::from_le_bytes(bytes)
    } else if let Some(halves) = source.strip_prefix("{lo, hi") {
        assert_eq!(halves, "}");
        local["lo"] | local["hi"] << 32
    } else {
        u64::from_str_radix(source.strip_prefix("0x")?, 16).ok()?
    };
    Some((register.to_owned(), value))
}

fn kernels() -> Vec<(&'static Shipped, &'static str)> {
    let of = |module: &'static Shipped| module.kernels().map(move |name| (module, name));
    shipped().iter().flat_map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any kernel, and any words of its parameters.
    #[test]
    fn registers_have_the_values_that_they_had(
        kernel in 0..kernels().len(),
        bytes in prop::collection::vec(any::<u8>(), PARAMETERS * BYTES),
        known in prop::collection::vec(0..4u8, PARAMETERS * BYTES / 4),
    ) {
        let (module, name) = kernels()[kernel];
        let text = module.ptx(name).unwrap().unwrap();
        let memory: Memory = bytes.chunks(BYTES).map(|bytes| bytes.try_into().unwrap()).collect();
        let mut constants = Constants::default();
        // Small kernels load little: the first parameter is always known.
        let is_known = |(word, known): &(usize, &u8)| **known == 0 || *word < 2;
        for (word, _) in known.iter().enumerate().filter(is_known) {
            let (parameter, offset) = (4 * word / BYTES, 4 * word % BYTES);
            constants.insert(parameter, offset, &memory[parameter][offset..offset + 4]);
        }
        let folded = fold(&text, name, &constants);
        let (before, after) = (loaded(&text, name, &memory), loaded(&folded, name, &memory));
        let loads = |text: &str| text.matches("\tld.param").count();
        prop_assert!(loads(&folded) < loads(&text), "{name}: nothing was folded");
        // Both texts also have the constants of the kernel itself.
        prop_assert_eq!(before, after, "{} of {}", name, module.name());
        let rest = |text: &str| text.lines().filter(|line| !line.contains("_param_")).count();
        prop_assert!(rest(&folded) >= rest(&text));
        prop_assert_eq!(folded.lines().count(), text.lines().count());
    }
}

fn planned(layer: &Layer, call: Dense) -> Result<Plan> {
    let problem = layer.dense(call)?;
    plan(&problem, &DeviceInfo::known("h200").unwrap(), &PlanOptions::default())
}

fn constants(plan: &Plan, fold: Fold) -> Vec<Constants> {
    plan.launches().iter().map(|launch| gqa_host::driver::constants(launch, fold)).collect()
}

fn layer(window: Option<usize>) -> Layer {
    let layer = Layer::new(DType::BF16, Heads { query: 32, kv: 8, size: 128 });
    match window {
        Some(window) => layer.window(window),
        None => layer,
    }
}

#[test]
fn calls_of_a_layer_share_their_constants_and_other_layers_do_not() {
    let decode =
        |window, batch, capacity| planned(&layer(window), Dense::decode(batch, capacity)).unwrap();
    let first = decode(None, 2, 2048);
    let longer = decode(None, 2, 4096);
    let entries = |plan: &Plan| plan.launches().iter().map(|l| l.entry().name).collect::<Vec<_>>();
    assert_eq!(entries(&first), entries(&longer));
    assert!(constants(&first, Fold::Layer) == constants(&longer, Fold::Layer));
    assert!(constants(&first, Fold::Call) != constants(&longer, Fold::Call));
    let windowed = decode(Some(100), 2, 2048);
    assert_eq!(entries(&first), entries(&windowed));
    assert!(constants(&first, Fold::Layer) != constants(&windowed, Fold::Layer));
    assert!(constants(&first, Fold::Off).iter().all(Constants::is_empty));
}

/// One kernel takes int8 and float8, with scales of any kind.
#[test]
fn formats_of_eight_bits_are_constants_of_one_kernel() {
    let of = |format, scales| {
        let layer = layer(None).quantized(Quantization { format, scales });
        planned(&layer, Dense::decode(2, 2048)).unwrap()
    };
    let int8 = of(QuantFormat::Int8, Scales::PerHead);
    let entry = |plan: &Plan| plan.launches()[0].entry().name;
    for (format, scales) in [
        (QuantFormat::Float8, Scales::PerHead),
        (QuantFormat::Int8, Scales::PerTensor),
        (QuantFormat::Int8, Scales::PerToken),
    ] {
        let other = of(format, scales);
        assert_eq!(entry(&int8), entry(&other), "{format}, {scales:?}");
        let [of_int8, of_other] = [&int8, &other].map(|plan| constants(plan, Fold::Layer));
        assert!(of_int8 != of_other, "{format}, {scales:?}");
    }
}

#[test]
fn constants_are_null_pointers_and_bytes_of_the_parameters() {
    let plan = planned(&layer(None), Dense::decode(1, 4096)).unwrap();
    for launch in plan.launches() {
        let (layer, call) = (
            gqa_host::driver::constants(launch, Fold::Layer),
            gqa_host::driver::constants(launch, Fold::Call),
        );
        let call: Vec<_> = call.bytes().collect();
        assert!(layer.bytes().count() < call.len() && layer.bytes().all(|b| call.contains(&b)));
        for (parameter, offset, byte) in call {
            match launch.args().get(parameter) {
                Some(arg) => assert_eq!((*arg, byte), (Arg::Null, 0)),
                None => assert_eq!(byte, launch.params()[offset]),
            }
        }
        assert!(launch.args().contains(&Arg::Null));
    }
}

/// Calls of models' layers.
fn calls() -> Vec<Problem> {
    let heads = [(32, 8, 128), (64, 8, 64), (16, 4, 256), (40, 8, 128)];
    let layers = heads.map(|(query, kv, size)| Layer::new(DType::BF16, Heads { query, kv, size }));
    let dense = [Dense::decode(1, 4096), Dense::decode(8, 4096), Dense::prefill(4, 512, 512)];
    let paged = [Paged::decode(8, [256, 64, 64]), Paged::new(4, 2048, [256, 64, 64])];
    let of = |layer: &Layer| {
        let dense = dense.iter().map(|call| layer.dense(*call).unwrap());
        dense.chain(paged.iter().map(|call| layer.paged(*call).unwrap())).collect::<Vec<_>>()
    };
    layers.iter().flat_map(of).chain(over_quantized_caches()).collect()
}

/// Calls over each format of quantized caches: decode with scales of each kind that its kernels
/// tell apart, and prefill.
fn over_quantized_caches() -> impl Iterator<Item = Problem> {
    let formats = QuantFormat::ALL;
    let each = formats.into_iter().flat_map(|format| {
        [Scales::PerHead, Scales::PerToken].map(|scales| Quantization { format, scales })
    });
    let layers = each.flat_map(|quantization| {
        let layer = |(query, kv, size)| Layer::new(DType::BF16, Heads { query, kv, size });
        let heads = [(32, 8, 128), (16, 4, 256), (16, 1, 256)];
        heads.map(|heads| (layer(heads).quantized(quantization), quantization.scales))
    });
    layers.flat_map(|(layer, scales)| {
        let mut calls = vec![
            layer.dense(Dense::decode(1, 4096)),
            layer.dense(Dense::decode(32, 1024)),
            layer.paged(Paged::decode(8, [256, 64, 64])),
            layer.paged(Paged::new(4, 1024, [256, 64, 64])),
        ];
        if scales == Scales::PerHead {
            calls.push(layer.dense(Dense::chunk(4, 256, 4096)));
        }
        calls.into_iter().map(|call| call.unwrap())
    })
}

const GPUS: [(&str, &str); 3] = [("h200", "sm_90a"), ("a100", "sm_80"), ("b200", "sm_100a")];

/// The hot kernels of these calls with the layers' constants, as three GPUs' drivers get them; on
/// the third those that the first does not run.
fn folded_kernels() -> BTreeSet<(&'static str, &'static str, String)> {
    let mut found = BTreeSet::new();
    for (problem, (name, arch)) in calls().iter().flat_map(|call| GPUS.map(|gpu| (call, gpu))) {
        let device = DeviceInfo::known(name).unwrap();
        let plan = plan(problem, &device, &PlanOptions::default()).unwrap();
        for launch in plan.launches().iter().filter(|launch| launch.entry().hot) {
            let (entry, constants) =
                (launch.entry().name, gqa_host::driver::constants(launch, Fold::Layer));
            if constants.is_empty() || name == "b200" && launch.entry().runs_on(90) {
                continue;
            }
            let holds = |module: &&Shipped| module.kernels().any(|kernel| kernel == entry);
            let modules = shipped().iter().filter(holds).filter(|m| m.runs_on(device.sm));
            let module = modules.max_by_key(|module| module.arch).unwrap();
            let text = module.ptx(entry).unwrap().unwrap();
            found.insert((entry, arch, fold(&text, entry, &constants)));
        }
    }
    found
}

/// Folded kernels that lack a few registers on a GPU, and the most bytes that they spill there,
/// stored and loaded together. `paged_gaps` computes rows that hardly any call has, and
/// `hopper_paged_split` spills in the warps that copy, which have 40 registers.
const SPILLS: [(&str, &str, u32); 4] = [
    ("gqa_paged_gaps_bf16", "sm_80", 84),
    ("gqa_paged_gaps_bf16", "sm_90a", 72),
    ("gqa_decode_i4_bf16_d256_r16", "sm_90a", 40),
    ("gqa_hopper_paged_split_bf16_d256", "sm_90a", 24),
];

#[test]
fn the_assembler_takes_folded_kernels_without_more_spills() {
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("cuda-tools");
    let Ok(ptxas) = Ptxas::find(&tools) else {
        println!("SKIPPED: no ptxas; `cargo xtask ptxas` installs it");
        return;
    };
    let mut worse = Vec::new();
    for (number, (name, arch, text)) in folded_kernels().into_iter().enumerate() {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("folded-{number}.ptx"));
        fs::write(&file, text).unwrap();
        let report = ptxas.assemble(&file, arch).unwrap();
        let [usage] = &report.usage[..] else { panic!("{name}: {report:?}") };
        let spilled = usage.spill_stores + usage.spill_loads;
        let tolerated = SPILLS.iter().find(|(entry, gpu, _)| (*entry, *gpu) == (name, arch));
        let tolerated = tolerated.map_or(0, |(.., bytes)| *bytes);
        if spilled > tolerated || usage.stack > spilled {
            worse.push(format!("{name} on {arch}: {usage:?}"));
        }
        assert!(report.warnings.is_empty(), "{name} on {arch}: {:?}", report.warnings);
    }
    assert!(worse.is_empty(), "{worse:#?}");
}
