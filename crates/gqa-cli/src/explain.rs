//! `gqa explain`: the plan of a call, without running it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use gqa_host::Problem;
use gqa_host::plan::{DeviceInfo, Switches, plan};
use gqa_onnx::Model;

use crate::shape::{Layer, Shape, count};
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
    #[command(flatten)]
    sizes: Sizes,
    #[command(flatten)]
    layer: Layer,
}

/// Sizes of a call.
#[derive(clap::Args)]
struct Sizes {
    /// Sequences.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 24))]
    batch: u64,
    /// New rows of each sequence.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 31))]
    query_length: u64,
    /// Rows in the cache before.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1 << 31))]
    past_length: u64,
    /// Past and present are different tensors, as in a model that is not told to share them.
    #[arg(long)]
    separate_cache: bool,
}

/// Prints the plan.
pub fn run(args: &Args) -> Result<ExitCode> {
    let device = DeviceInfo::known(&args.device).ok_or_else(|| {
        let names: Vec<_> = DeviceInfo::known_names().collect();
        Usage(format!("--device: got {:?}; allowed: {}", args.device, names.join(", ")))
    })?;
    let problem = match &args.model {
        Some(model) => from_model(model, args.data.as_deref())?,
        None => from_sizes(&args.sizes, args.layer)?,
    };
    say!("{}", plan(&problem, &device, &Switches::from_env()?)?.explain());
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

fn from_sizes(sizes: &Sizes, layer: Layer) -> Result<Problem> {
    let [batch, query, past] =
        [sizes.batch, sizes.query_length, sizes.past_length].map(|n| n as usize);
    let shape = Shape::new(layer, batch, query, past);
    if sizes.separate_cache { shape.separate_problem() } else { shape.problem() }
}
