//! Steps of a longer task: each is announced, timed and listed at the end, and a failure does not
//! hide later steps.

use anyhow::{Context, Result, bail};
use std::process::Command;
use std::time::{Duration, Instant};

/// How a step ended.
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// The steps so far.
#[derive(Default)]
pub struct Steps(Vec<(&'static str, Outcome, Duration)>);

impl Steps {
    /// Runs a step, which may fail.
    pub fn run(&mut self, name: &'static str, step: impl FnOnce() -> Result<()>) {
        self.run_or_skip(name, || step().map(|()| None));
    }

    /// Runs a step, which may fail or return the reason why it was skipped.
    pub fn run_or_skip(
        &mut self,
        name: &'static str,
        step: impl FnOnce() -> Result<Option<String>>,
    ) {
        println!("\n== {name}");
        let started = Instant::now();
        let outcome = match step() {
            Ok(None) => Outcome::Passed,
            Ok(Some(reason)) => Outcome::Skipped(reason),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        let (seconds, said) = (started.elapsed(), describe(&outcome));
        println!("== {name}: {said}, {:.1} s", seconds.as_secs_f32());
        self.0.push((name, outcome, seconds));
    }

    /// Prints all steps; an error if one failed.
    pub fn finish(self) -> Result<()> {
        println!("\n== summary");
        for (name, outcome, seconds) in &self.0 {
            println!(
                "{:7.1} s  {name:24} {}",
                seconds.as_secs_f32(),
                describe(outcome).lines().next().unwrap_or_default()
            );
        }
        let failed = self.0.iter().filter(|(_, outcome, _)| matches!(outcome, Outcome::Failed(_)));
        let failed: Vec<&str> = failed.map(|(name, ..)| *name).collect();
        if failed.is_empty() {
            return Ok(());
        }
        bail!("failed: {}", failed.join(", "))
    }
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Passed => "ok".into(),
        Outcome::Skipped(reason) => format!("SKIPPED: {reason}"),
        Outcome::Failed(reason) => format!("FAILED: {reason}"),
    }
}

/// Runs a program with its output shown.
pub fn shown(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot start {program}"))?;
    if status.success() {
        return Ok(());
    }
    bail!("{program} {} ended with {status}", words(command))
}

fn words(command: &Command) -> String {
    command.get_args().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_fails_the_whole_and_is_named() {
        let mut steps = Steps::default();
        steps.run("good", || Ok(()));
        steps.run("bad", || bail!("no"));
        steps.run_or_skip("absent", || Ok(Some("not installed".into())));
        assert_eq!(steps.finish().unwrap_err().to_string(), "failed: bad");
    }

    #[test]
    fn skipped_steps_do_not_fail() {
        let mut steps = Steps::default();
        steps.run_or_skip("absent", || Ok(Some("not installed".into())));
        assert!(steps.finish().is_ok());
    }

    #[test]
    fn a_program_that_fails_is_named() {
        let error = shown(Command::new("false").arg("x")).unwrap_err().to_string();
        assert!(error.starts_with("false x ended with"), "{error}");
        assert!(
            shown(&mut Command::new("no-such-program"))
                .unwrap_err()
                .to_string()
                .contains("no-such-program")
        );
    }
}
