//! `gqa explain`: the plan of a call, without running it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use gqa_host::Problem;
use gqa_host::plan::{DeviceInfo, Explanation, Switches, plan};
use gqa_onnx::Model;
use serde_json::{Map, Value, json};

use crate::shape::{Layer, Sizes};
use crate::{Usage, input};

/// Arguments of `gqa explain`.
#[derive(clap::Args)]
pub struct Args {
    /// A model file; without it the options describe the call.
    #[arg(conflicts_with_all = ["Sizes", "Layer"])]
    model: Option<PathBuf>,
    /// The model's data set: shapes come from there [default: test_data_set_0 beside the model].
    #[arg(long, requires = "model")]
    data: Option<PathBuf>,
    /// GPU to plan for, by name.
    #[arg(long, default_value = "h200")]
    device: String,
    /// Past and present are different tensors, as in a model that is not told to share them.
    #[arg(long, conflicts_with = "model")]
    separate_cache: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sizes: Sizes,
    #[command(flatten)]
    layer: Layer,
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
        None => args.sizes.shape(args.layer).problem()?,
    };
    let explanation = plan(&problem, &device, &Switches::from_env()?)?.explain();
    if args.json {
        say!("{}", serde_json::to_string_pretty(&json(&explanation))?);
    } else {
        say!("{explanation}");
    }
    Ok(ExitCode::SUCCESS)
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

/// The explanation's fields under their names; `bound` is memory or arithmetic.
fn json(explanation: &Explanation) -> Value {
    let launches = explanation.launches.iter().map(|launch| {
        let arguments: Map<_, _> = launch
            .arguments
            .iter()
            .map(|(name, bound)| ((*name).to_owned(), json!(bound)))
            .collect();
        json!({
            "entry": launch.entry,
            "grid": launch.grid,
            "cluster": launch.cluster,
            "threads": launch.threads,
            "shared_bytes": launch.shared_bytes,
            "arguments": arguments,
        })
    });
    let decisions = explanation.decisions.iter();
    let decisions =
        decisions.map(|(name, outcome)| json!({ "candidate": name, "outcome": outcome }));
    json!({
        "problem": explanation.problem,
        "device": explanation.device,
        "positions": explanation.positions,
        "decisions": decisions.collect::<Vec<_>>(),
        "launches": launches.collect::<Vec<_>>(),
        "workspace_bytes": explanation.workspace_bytes,
        "flops": explanation.cost.flops,
        "bytes": explanation.cost.bytes,
        "roofline_us": explanation.roofline_seconds * 1e6,
        "bound": if explanation.memory_bound { "memory" } else { "arithmetic" },
    })
}
