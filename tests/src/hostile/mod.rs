//! Calls by careless and hostile callers: legal ones, most often with one or two mistakes, on every
//! part of the public API that needs no GPU. The answer is always a result or an error that names
//! the argument: no panic, no abort, no overflow, no allocation by an unchecked size, and no
//! undefined behaviour of a kernel.

mod draw;
mod engine;
mod machine;
mod named;
mod operators;
mod parts;

use crate::parity::{SEED, config};
use draw::Draw;
use gqa_host::{Error, Result};
use proptest::test_runner::RngSeed;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Failures after which a run stops.
const MOST_FAILURES: usize = 8;
/// A call that takes longer probably has a loop whose length depends on an unchecked number.
const LONGEST: Duration = Duration::from_secs(20);

/// Makes `calls` calls, or only a part of them without `PARITY_FULL`; `PARITY_CASES` overrides the
/// number. Each call follows from a seed alone. The seeds are consecutive; the first one is
/// printed, and `PROPTEST_RNG_SEED` sets it. With `HOSTILE_TRACE` the seed is printed before each
/// call, in case the process ends without a message.
///
/// # Panics
///
/// Where a call panics, takes long, or is answered by an error that does not name what was given.
pub fn hostile(name: &str, calls: u32) {
    let config = config(name, calls, "cpu");
    let RngSeed::Fixed(first) = config.rng_seed else { unreachable!("it fixes the seed") };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let seeds = (0..config.cases).map(|number| first.wrapping_add(number.into()));
    let of_thread = |thread| {
        let mut report = Report::default();
        for seed in seeds.clone().skip(thread).step_by(threads) {
            if report.failures.len() < MOST_FAILURES {
                report.call(seed);
            }
        }
        report
    };
    let report = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|i| scope.spawn(move || of_thread(i))).collect();
        let reports = running.into_iter().map(|thread| thread.join().expect("calls are caught"));
        reports.reduce(Report::join).expect("there is a thread")
    });
    println!("{name}: {report}");
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n\n"));
    assert_eq!(report.calls, config.cases);
}

/// One way to call the library.
trait Scenario: fmt::Debug {
    /// Makes the call, and records the result of each of its steps.
    fn make(&self, report: &mut Report);
}

/// What is drawn from the seed.
fn scenario(seed: u64) -> Box<dyn Scenario> {
    let draw = &mut Draw::new(seed);
    match draw.below(20) {
        0..11 => Box::new(operators::Applied::draw(draw)),
        11..14 => Box::new(operators::Described::draw(draw)),
        14..16 => Box::new(engine::Planned::draw(draw)),
        16..18 => Box::new(operators::Confused::draw(draw)),
        18 => Box::new(parts::Bytes::draw(draw)),
        _ => Box::new(parts::Made::draw(draw)),
    }
}

/// What came of calls.
#[derive(Debug, Default)]
struct Report {
    calls: u32,
    /// How often each step ended in each way.
    outcomes: BTreeMap<(String, &'static str), u32>,
    /// The longest call and its seed.
    slowest: (Duration, u64),
    /// The first failures, each with the seed that repeats it.
    failures: Vec<String>,
    /// What errors of this call may name.
    names: Vec<&'static str>,
    /// What must not be, of this call.
    faults: Vec<String>,
}

/// What errors of each call may name.
const ALWAYS: &str = "workspace query key value present_key present_value output attention_bias \
                      total_sequence_length device.multiprocessors options.splits options.cluster";

impl Report {
    /// Makes one call.
    fn call(&mut self, seed: u64) {
        if std::env::var_os("HOSTILE_TRACE").is_some() {
            eprintln!("{SEED}={seed}");
        }
        let began = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| scenario(seed).make(self))).is_err() {
            self.fault("it panicked, as said above");
        }
        let took = began.elapsed();
        if took > LONGEST {
            self.fault(format!("it took {took:?}"));
        }
        self.calls += 1;
        self.slowest = self.slowest.max((took, seed));
        for fault in std::mem::take(&mut self.faults) {
            let call = catch_unwind(|| format!("{:#?}", scenario(seed))).unwrap_or_default();
            let repeat = format!("{SEED}={seed} PARITY_CASES=1");
            self.failures.push(format!("{repeat}: {fault}\n{call}"));
        }
    }

    /// From now on errors must name one of these arguments.
    fn expect(&mut self, attributes: &'static str, inputs: impl Iterator<Item = &'static str>) {
        self.names = ALWAYS.split(' ').chain(attributes.split(' ')).chain(inputs).collect();
    }

    /// Records how a step ended, and returns its result.
    fn note<T>(&mut self, step: impl Into<String>, result: Result<T>) -> Option<T> {
        let step = step.into();
        let outcome = match &result {
            Ok(_) => "done",
            Err(error @ Error::Invalid { argument, got, allowed }) => {
                let knows =
                    |one: &str| self.names.iter().any(|name| name.eq_ignore_ascii_case(one));
                let is_known = argument.split(", ").all(knows);
                if !is_known || got.is_empty() || allowed.is_empty() {
                    self.fault(format!("{step}: an error that names no argument: {error}"));
                }
                "refused"
            }
            Err(Error::NoKernel(_)) => "no kernel",
            Err(Error::OutOfMemory { .. }) => "out of memory",
            Err(Error::Switch { .. }) => "refused",
            Err(error) => {
                self.fault(format!("{step}: {error}"));
                "failed"
            }
        };
        *self.outcomes.entry((step, outcome)).or_default() += 1;
        result.ok()
    }

    /// Notes that something must not be.
    fn fault(&mut self, what: impl Into<String>) {
        self.faults.push(what.into());
    }

    fn join(mut self, other: Self) -> Self {
        for (outcome, count) in other.outcomes {
            *self.outcomes.entry(outcome).or_default() += count;
        }
        self.failures.extend(other.failures);
        self.slowest = self.slowest.max(other.slowest);
        Self { calls: self.calls + other.calls, ..self }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (time, seed) = self.slowest;
        writeln!(f, "{} calls, the slowest of seed {seed} in {time:?}", self.calls)?;
        for ((step, outcome), count) in &self.outcomes {
            writeln!(f, "{count:>10}  {step}: {outcome}")?;
        }
        Ok(())
    }
}
