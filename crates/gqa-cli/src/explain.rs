//! `gqa explain`: the plan of a call, without running it.

mod lengths;
mod values;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use gqa_host::Problem;
use gqa_host::plan::{Arg, DeviceInfo, Plan, PlanOptions, TensorId, TensorMap, plan};
use gqa_onnx::Model;
use serde_json::{Map, Value, json};

use crate::input;
use crate::options::count;
use crate::shape::{Layer, Sizes};
use crate::usage::Usage;
use lengths::{Lengths, Schedule};
use values::Values;

/// Arguments of `gqa explain`.
#[derive(clap::Args)]
pub struct Args {
    /// A model file; without it the options describe the call.
    #[arg(conflicts_with_all = ["Sizes", "Layer", "Values"])]
    model: Option<PathBuf>,
    /// The model's data set: shapes come from there [default: test_data_set_0 beside the model].
    #[arg(long, requires = "model")]
    data: Option<PathBuf>,
    /// GPU to plan for, by name.
    #[arg(long, default_value = "h200")]
    device: String,
    /// Past and present are different tensors, as in a model that is not told to share them.
    #[arg(long, conflicts_with_all = ["model", "block_size"])]
    separate_cache: bool,
    /// New tokens of all sequences together, where some have fewer than --query-length.
    #[arg(long, requires = "block_size", conflicts_with = "model", value_parser = count(1 << 31))]
    tokens: Option<u64>,
    /// Rows of each sequence before the call, such as 5000,17,30x900: how a decode step over a
    /// paged KV cache divides their keys among CTAs. Blocks have 16 rows, unless --block-size says
    /// otherwise, and the cache has as many as the sequences need.
    #[arg(long, value_delimiter = ',', value_parser = lengths::parse, conflicts_with_all = [
        "model", "batch", "past_length", "tokens", "separate_cache", "latent", "value_size",
        "cached", "prefetch_cache", "float32_output", "float8_output", "sliding_cache",
        "smooth_softmax"])]
    lengths: Vec<Lengths>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sizes: Sizes,
    #[command(flatten)]
    layer: Layer,
    #[command(flatten)]
    values: Values,
}

/// Prints the plan.
pub fn run(args: &Args) -> Result<ExitCode> {
    let device = DeviceInfo::known(&args.device).ok_or_else(|| {
        let names: Vec<_> = DeviceInfo::known_names().collect();
        Usage(format!("--device: got {:?}; allowed: {}", args.device, names.join(", ")))
    })?;
    let problem = match &args.model {
        Some(model) => from_model(model, args.data.as_deref())?,
        None if args.separate_cache => args.sizes.shape(args.layer).separate_problem()?,
        None => described(args)?,
    };
    let plan = plan(&problem, &device, &PlanOptions::from_env()?)?;
    let lengths = lengths::all(&args.lengths)?;
    let has_lengths = !lengths.is_empty();
    let schedule = if has_lengths { Schedule::of(&plan, lengths)? } else { None };
    if args.json {
        let mut explained = json(&plan);
        if has_lengths {
            explained["division"] = schedule.as_ref().map_or(Value::Null, Schedule::json);
        }
        say!("{}", serde_json::to_string_pretty(&explained)?);
        return Ok(ExitCode::SUCCESS);
    }
    say!("{}", plan.explain());
    match schedule {
        Some(schedule) => say!("{}", schedule.text().trim_end()),
        None if has_lengths => {
            say!("\nkeys are not divided by lengths: every sequence has as many CTAs as any other");
        }
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// The call that options describe, whose past and present are one tensor.
fn described(args: &Args) -> Result<Problem> {
    if !args.lengths.is_empty() {
        let lengths = lengths::all(&args.lengths)?;
        let block_size = Some(args.layer.block_size.unwrap_or(lengths::BLOCK_SIZE));
        let layer = Layer { block_size, ..args.layer };
        return lengths::problem(&args.sizes.of_lengths(layer, &lengths), &lengths);
    }
    let shape = args.sizes.shape(args.layer);
    if let Some(problem) = args.values.problem(&shape, args.tokens)? {
        return Ok(problem);
    }
    match args.tokens {
        Some(tokens) => shape.ragged_problem(tokens as usize),
        None => shape.problem(),
    }
}

fn from_model(path: &std::path::Path, data: Option<&std::path::Path>) -> Result<Problem> {
    let model = Model::read(path)?;
    let beside = path.parent().unwrap_or(path).join("test_data_set_0");
    let data = match data {
        Some(data) => input::data_set(data),
        None if beside.is_dir() => beside,
        None => bail!(Usage(
            "--data: got nothing; allowed: the folder with input_K.pb, which gives the shapes"
                .into()
        )),
    };
    Ok(model.call(&data)?.problem()?)
}

/// The explanation's fields under their names, and of each launch all that it takes to repeat it
/// (`bench/launches.py` does); `bound` is memory or arithmetic.
fn json(plan: &Plan) -> Value {
    let explanation = plan.explain();
    let launches = explanation.launches.iter().zip(plan.launches()).map(|(explained, launch)| {
        let arguments: Map<_, _> = explained
            .arguments
            .iter()
            .map(|(name, bound)| ((*name).to_owned(), json!(bound)))
            .collect();
        json!({
            "entry": explained.entry,
            "grid": explained.grid,
            "cluster": explained.cluster,
            "max_cluster": launch.entry().max_cluster,
            "programmatic": launch.programmatic(),
            "concurrent": launch.concurrent(),
            "overlaps": launch.overlaps(),
            "threads": explained.threads,
            "shared_bytes": explained.shared_bytes,
            "arguments": arguments,
            "values": launch.args().iter().map(value).collect::<Vec<_>>(),
            "params": launch.params(),
            "constants": gqa_host::driver::constants(launch, plan.fold()).bytes().collect::<Vec<_>>(),
        })
    });
    let decisions = explanation.decisions.iter();
    let decisions = decisions.map(|(name, outcome)| json!({ "family": name, "outcome": outcome }));
    json!({
        "problem": explanation.problem,
        "device": explanation.device,
        "sm": plan.device().sm,
        "positions": explanation.positions,
        "decisions": decisions.collect::<Vec<_>>(),
        "launches": launches.collect::<Vec<_>>(),
        "workspace_bytes": explanation.workspace_bytes,
        "counters": plan.counters(),
        "flops": explanation.cost.flops,
        "bytes": explanation.cost.bytes,
        "roofline_us": explanation.roofline_seconds * 1e6,
        "bound": if explanation.memory_bound { "memory" } else { "arithmetic" },
    })
}

/// What an argument is, offsets and strides in bytes: of a tensor by its role, of the workspace
/// without one.
fn value(arg: &Arg) -> Value {
    match arg {
        Arg::Null => Value::Null,
        Arg::Tensor { id, offset } => json!({ "tensor": id.name(), "offset": offset }),
        Arg::Workspace { offset, .. } => json!({ "tensor": null, "offset": offset }),
        Arg::Counters { .. } => json!({ "counters": true }),
        Arg::Map(map) => json!({
            "tensor": map.id.map(TensorId::name),
            "offset": map.offset,
            "size": map.size,
            "stride": map.stride,
            "box": [TensorMap::TILE_COLUMNS, map.tile[0], map.tile[1], 1],
        }),
    }
}
