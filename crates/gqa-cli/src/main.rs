//! The `gqa` program.

/// Prints a line on stdout. A reader that goes away is an error for [`main`] to judge, where
/// `println!` would panic.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        writeln!(std::io::stdout(), $($text)*)?
    }};
}

mod backend;
mod bench;
mod check;
mod demo;
mod doctor;
mod explain;
mod gpu;
mod input;
mod options;
mod oracle;
mod profile;
mod run;
mod selftest;
mod shape;
mod usage;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use gqa_host::plan::environment;
use usage::{Usage, one_line};

/// GroupQueryAttention in Rust: on a GPU through CUDA, on a CPU, on a simulated GPU.
///
/// Without a command, shows what it does: a prefill and some decode steps of a layer of the shape
/// of Llama 3 8B.
#[derive(Parser)]
#[command(name = "gqa", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run cases in ONNX backend-test layout and compare with their expected outputs.
    Check(check::Args),
    /// Run a model file and write its outputs.
    Run(run::Args),
    /// Say which kernels a call gets, why, and what it costs; needs no GPU.
    Explain(explain::Args),
    /// Measure.
    #[command(subcommand)]
    Bench(bench::Mode),
    /// Time each launch of a call on the GPU, and print the command lines of NVIDIA's profilers.
    Profile(profile::Args),
    /// Report driver, devices and kernels, and what will be used.
    Doctor(doctor::Args),
    /// Compare small calls of every kind with the reference, and time them: a report to share.
    Selftest(selftest::Args),
    /// A prefill and some decode steps of a layer of the shape of Llama 3 8B.
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let parsed = options::signed(Cli::command()).try_get_matches();
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return report_usage(&error),
    };
    let result = log().and_then(|()| run(cli.command));
    match result {
        Ok(code) => code,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gqa: {}", one_line(&format!("{error:#}")));
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

fn run(command: Option<Command>) -> anyhow::Result<ExitCode> {
    match command.unwrap_or_else(|| Command::Demo(demo::Args::default())) {
        Command::Check(args) => check::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Bench(mode) => bench::run(&mode),
        Command::Profile(args) => profile::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Selftest(args) => selftest::run(&args),
        Command::Demo(args) => demo::run(&args),
    }
}

/// Log lines go to stderr: warnings, or what GQA_LOG asks for.
fn log() -> anyhow::Result<()> {
    let level = environment::log_level().map_err(|error| Usage(error.to_string()))?;
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
    lines.without_time().init();
    Ok(())
}

/// Help goes to stdout as it is; a mistake becomes one line.
fn report_usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return if error.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if let Some(reason) = options::wrong_value(error) {
        eprintln!("gqa: {} (see gqa --help)", one_line(&reason));
        return ExitCode::from(2);
    }
    let text = error.render().to_string();
    let reason = match error.kind() {
        clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "bench: got nothing; allowed: prefill or decode"
        }
        _ => text.split("\n\n").next().unwrap_or_default(),
    };
    // What is like it, where something is.
    let tips = text.split("\n\n").map(str::trim).filter(|part| part.starts_with("tip: "));
    let tip = tips.map(|tip| format!("; {}", one_line(tip))).collect::<String>();
    let reason = one_line(reason.trim_start_matches("error: "));
    eprintln!("gqa: {reason}{tip} (see gqa --help)");
    ExitCode::from(2)
}

/// The reader of our output went away, as `head` does.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}
