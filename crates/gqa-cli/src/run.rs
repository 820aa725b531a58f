//! `gqa run`: computes a model's outputs and writes them, all or none.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use gqa_onnx::{Model, encode_tensor};

use crate::backend::{self, Choice};
use crate::input;

/// Arguments of `gqa run`.
#[derive(clap::Args)]
pub struct Args {
    /// A model file with one node.
    model: PathBuf,
    /// Folder with input_K.pb for each input of the graph, or with a test_data_set_0 that has them.
    #[arg(long)]
    data: PathBuf,
    /// Folder for output_K.pb; made if it is not there.
    #[arg(long)]
    out: PathBuf,
    /// Where to compute; auto is the GPU if there is a usable one, else the CPU.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
}

/// Runs the model.
pub fn run(args: &Args) -> Result<ExitCode> {
    let model = Model::read(&args.model)?;
    let call = model.call(&input::data_set(&args.data))?;
    let backend = backend::select(args.backend)?;
    let outputs = model.run(&call, backend.as_ref())?;
    let files: Vec<_> = outputs
        .iter()
        .zip(model.output_names())
        .enumerate()
        .map(|(k, (tensor, name))| (format!("output_{k}.pb"), encode_tensor(name, tensor)))
        .collect();
    write_all(&args.out, &files)?;
    for ((file, _), (tensor, name)) in files.iter().zip(outputs.iter().zip(model.output_names())) {
        let shown = crate::usage::one_line(name);
        say!("{}: {shown} {} {:?}", args.out.join(file).display(), tensor.dtype(), tensor.shape());
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes every file under another name first; a failure leaves none of them behind.
fn write_all(folder: &Path, files: &[(String, Vec<u8>)]) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("--out {}", folder.display()))?;
    let staged = |file: &str| folder.join(format!(".{file}.{}", std::process::id()));
    let result = files.iter().try_for_each(|(file, bytes)| {
        std::fs::write(staged(file), bytes).with_context(|| folder.join(file).display().to_string())
    });
    let result = result.and_then(|()| {
        files.iter().try_for_each(|(file, _)| {
            let path = folder.join(file);
            std::fs::rename(staged(file), &path).with_context(|| path.display().to_string())
        })
    });
    if result.is_err() {
        for (file, _) in files {
            // Those that were renamed, or never written, are not there.
            let _ = std::fs::remove_file(staged(file));
        }
    }
    result
}
