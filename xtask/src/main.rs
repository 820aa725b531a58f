//! `cargo xtask VERB`: build, check, test and bundle.

mod bundle;
mod cargo;
mod columns;
mod deny;
mod doctor;
mod embed;
mod folder;
mod gpu;
mod integrations;
mod loops;
mod module;
mod pages;
mod parallel;
mod pip;
mod place;
mod ptx;
mod ptxas;
mod ratchet;
mod release;
mod step;
mod targets;
mod test;
mod wheel;

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
    /// Run all checks of CI; installs the device toolchain if it is missing.
    Test(test::Args),
    /// Compile the kernels to PTX, and write crates/gqa-cuda/ptx/ or compare with it.
    Ptx(ptx::Args),
    /// Assemble the shipped PTX; print registers, spills and shared memory of each entry.
    Ptxas(ptxas::Args),
    /// Compare instruction counts of the shipped PTX with xtask/ratchet.json.
    Ratchet {
        /// Write the counts as they are now.
        #[arg(long)]
        bless: bool,
    },
    /// Write bundle/: programs, tests and cases for a GPU machine without Rust or network.
    Bundle,
    /// Run the commands that pages print.
    Pages,
    /// Package the crates and build a program with them outside of this workspace.
    Embed,
    /// Build wheels in dist/, and test each in a fresh virtual environment.
    Wheel {
        /// Which ones; without a name all of them.
        which: Vec<wheel::Package>,
    },
    /// Give the unreleased section of CHANGELOG.md a version and a date, commit and tag it.
    Release,
    /// Show which tools were found.
    Doctor,
}

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Test(args) => test::run(&args),
        Verb::Ptx(args) => ptx::run(&args),
        Verb::Ptxas(args) => ptxas::run(&args),
        Verb::Ratchet { bless } => ratchet::run(bless),
        Verb::Bundle => bundle::run(),
        Verb::Pages => pages::check(),
        Verb::Embed => embed::run(),
        Verb::Wheel { which } => wheel::run(&which),
        Verb::Release => release::run(),
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
