//! `cargo xtask VERB`: build, check, test and bundle.

mod bundle;
mod doctor;
mod module;
mod parallel;
mod place;
mod ptx;
mod ptxas;
mod ratchet;
mod step;
mod test;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Build, check, test and bundle.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Everything CI runs; installs a device toolchain first if there is none.
    Test,
    /// Compile the kernels to PTX and write ptx/, or compare with it.
    Ptx(ptx::Args),
    /// Assemble the shipped PTX and show what each entry costs.
    Ptxas,
    /// Compare instruction counts of the shipped PTX with ptx/ratchet.json.
    Ratchet {
        /// Write the counts as they are now.
        #[arg(long)]
        bless: bool,
    },
    /// Make bundle/: programs, tests and cases for a GPU machine without Rust or network.
    Bundle,
    /// Show which tools were found.
    Doctor,
}

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Test => test::run(),
        Verb::Ptx(args) => ptx::run(&args),
        Verb::Ptxas => ptxas::run(),
        Verb::Ratchet { bless } => ratchet::run(bless),
        Verb::Bundle => bundle::run(),
        Verb::Doctor => doctor::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
