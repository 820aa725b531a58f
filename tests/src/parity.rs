//! One test body for every back end: random calls, poisoned outputs, compared with the f64
//! reference.

use crate::call::Results;
use crate::compare::{codes_rounded_before, equal_codes, row_scales, tensors, unrounded};
use crate::{Call, Case, Errors, Tolerance, compare};
use gqa_host::backend::Backend;
use gqa_host::op::{KvCache, Outputs};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;

/// A call that is compared with the reference.
pub trait Parity: std::fmt::Debug {
    /// Its element type.
    fn dtype(&self) -> DType;

    /// What the operator makes of it.
    fn problem(&self) -> gqa_host::Result<Problem>;

    /// Draws its data and computes the reference, once for all back ends.
    fn judge(&self) -> Result<Judge<'_>, String>;

    /// Runs the call on `backend` and the reference and compares all outputs.
    fn check(&self, backend: &dyn Backend) -> Result<Errors, String> {
        self.judge()?(backend)
    }
}

/// Runs a call on a back end and compares all outputs with those of the reference.
pub type Judge<'a> = Box<dyn Fn(&dyn Backend) -> Result<Errors, String> + 'a>;

/// Overrides how many calls a test runs.
const CASES: &str = "PARITY_CASES";
/// Makes tests run all of their calls on back ends without a GPU, too.
const FULL: &str = "PARITY_FULL";
/// By default tests without a GPU run one call in this many. Calls are new in each run, so many
/// short runs find what a long one does.
const SHARE: u32 = 4;

/// Runs `cases` random calls on `backend`; where that is no GPU a quarter of them, unless
/// `PARITY_FULL` is set. `PARITY_CASES` overrides their number. A mismatch is shrunk and panics
/// with the smallest call that shows it. Prints how many calls ran and the error of `output` per
/// element type.
pub fn parity<C: Parity + 'static>(
    name: &str,
    cases: u32,
    strategy: impl Strategy<Value = C> + 'static,
    backend: &dyn Backend,
) {
    run(name, cases, strategy.prop_map(|case| Rc::new(case) as Rc<dyn Parity>).boxed(), backend);
}

/// As above, for any call: not generic, so that it is compiled once for all strategies.
fn run(name: &str, cases: u32, strategy: BoxedStrategy<Rc<dyn Parity>>, backend: &dyn Backend) {
    let seen: RefCell<BTreeMap<String, (usize, Errors)>> = RefCell::default();
    let config = config(name, cases, backend.name());
    let seed = config.rng_seed;
    let result = TestRunner::new(config).run(&strategy, |case| {
        let errors = case.check(backend).map_err(TestCaseError::fail)?;
        let mut seen = seen.borrow_mut();
        let entry = seen.entry(case.dtype().to_string()).or_default();
        entry.0 += 1;
        entry.1.merge(&errors);
        Ok(())
    });
    for (dtype, (calls, errors)) in seen.borrow().iter() {
        println!(
            "{name} {dtype}: {calls} calls, {} values, max error {:.2e}, rms error {:.2e}",
            errors.count,
            errors.max,
            errors.rms()
        );
    }
    if let Err(error) = result {
        panic!("{name}, {SEED}={seed}: {error}");
    }
}

/// Runs `cases` random calls on both back ends, which must give the same bytes.
pub fn identical(
    name: &str,
    cases: u32,
    strategy: BoxedStrategy<Case>,
    backends: [&dyn Backend; 2],
) {
    let config = config(name, cases, backends[0].name());
    let (cases, seed) = (config.cases, config.rng_seed);
    let result = TestRunner::new(config).run(&strategy, |case| {
        let call = Call::new(&case);
        let run = |backend: &dyn Backend| {
            call.run(backend).map_err(|e| TestCaseError::fail(format!("{}: {e}", backend.name())))
        };
        let [a, b] = [run(backends[0])?, run(backends[1])?];
        for (name, a, b) in [
            ("present_key", &a.present_key, &b.present_key),
            ("present_value", &a.present_value, &b.present_value),
            ("output", &a.output, &b.output),
        ] {
            equal_codes(name, a, b).map_err(TestCaseError::fail)?;
        }
        Ok(())
    });
    match result {
        Ok(()) => println!("{name}: {cases} calls"),
        Err(error) => panic!("{name}, {SEED}={seed}: {error}"),
    }
}

/// The variable of proptest that says what random calls are drawn from.
pub(crate) const SEED: &str = "PROPTEST_RNG_SEED";

/// The configuration of proptest for a back end: all `cases` on a GPU or if `PARITY_FULL` is set,
/// else a quarter of them; `PARITY_CASES` overrides the number. The seed is `PROPTEST_RNG_SEED`, or
/// a new one in each run; it is printed.
pub(crate) fn config(name: &str, cases: u32, backend: &str) -> Config {
    let share = if backend == "cuda" || std::env::var_os(FULL).is_some() { 1 } else { SHARE };
    let cases = count(cases.div_ceil(share));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().hash_one(name),
    };
    println!("{name}: {SEED}={seed}");
    Config { rng_seed: RngSeed::Fixed(seed), ..config }
}

/// This many cases, or the number in the environment.
fn count(cases: u32) -> u32 {
    std::env::var(CASES).ok().and_then(|n| n.parse().ok()).unwrap_or(cases)
}

impl Parity for Case {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn problem(&self) -> gqa_host::Result<Problem> {
        Call::new(self).problem()
    }

    fn judge(&self) -> Result<Judge<'_>, String> {
        let call = Call::new(self);
        // Callers force kernels that use float8 products. The reference gets rounded queries.
        if self.float8_products {
            let want = by_reference(&call.with_float8_queries())?;
            let tolerance = Tolerance::of_float8(self);
            return Ok(Box::new(move |backend| {
                let got = run_on(&call, backend)?;
                compare(&got, &want, tolerance)
            }));
        }
        let want = by_reference(&call)?;
        Ok(Box::new(move |backend| self.compare(&call, &run_on(&call, backend)?, &want)))
    }
}

impl Case {
    fn compare(&self, call: &Call, got: &Results, want: &Results) -> Result<Errors, String> {
        let errors = compare_with_cache(call, got, want)?;
        // Most kernels round dequantized values, and with one key the output is its value.
        let widens = self.float32_output && self.output_scale.is_none();
        if widens && self.dtype != DType::F32 && self.quantized.is_none() {
            unrounded(&got.output, &want.output, self.dtype)?;
        }
        Ok(errors)
    }
}

fn by_reference(call: &Call) -> Result<Results, String> {
    run_on(call, &Reference)
}

fn run_on(call: &Call, backend: &dyn Backend) -> Result<Results, String> {
    call.run(backend).map_err(|error| format!("{}: {error}", backend.name()))
}

/// Compares a call's outputs. Near a tie a new key's quantized value may round either way, which
/// the output reflects: so caches are compared value for value, and the rest with the reference for
/// the cache that the back end left.
fn compare_with_cache(call: &Call, got: &Results, want: &Results) -> Result<Errors, String> {
    let (dtype, rounds) = (call.case.dtype, call.case.rounds_before_codes());
    let of_keys = row_scales(&got.scales, &want.scales, dtype, rounds)?;
    if !rounds {
        return compare_outputs(call, got, want);
    }
    codes_rounded_before("present_key", &got.present_key, &want.present_key, of_keys, dtype)?;
    equal_codes("present_value", &got.present_value, &want.present_value)?;
    let want = call.reference_after(got).map_err(|e| format!("reference: {e}"))?;
    compare_outputs(call, got, &want)
}

/// Compares outputs; one of them may be quantized.
fn compare_outputs(call: &Call, got: &Outputs, want: &Outputs) -> Result<Errors, String> {
    let tolerance = Tolerance::of(&call.case);
    let Some(scale) = call.case.output_scale else { return compare(got, want, tolerance) };
    let others = Outputs { output: want.output.clone(), ..got.clone() };
    compare(&others, want, tolerance)?;
    tensors("output", &got.output, &want.output, tolerance.quantized(scale))
}

/// As [`parity`], for sequences of `steps` steps on a shared cache that goes from step to step;
/// every step is compared. Each sequence has a back end of its own.
pub fn sequences<B: Backend>(
    name: &str,
    cases: u32,
    steps: usize,
    strategy: BoxedStrategy<Case>,
    backend: impl Fn() -> B,
) {
    let config = config(name, cases, backend().name());
    let (cases, seed) = (config.cases, config.rng_seed);
    let grow = |case: Case| Case {
        shared: true,
        first_prompt: false,
        no_new_rows: false,
        past: if case.first_prompt { vec![1; case.batch()] } else { case.past.clone() },
        spare_rows: case.spare_rows + steps * case.q_len,
        ..case
    };
    let result = TestRunner::new(config).run(&strategy.prop_map(grow), |case| {
        check_sequence(&case, steps, &backend()).map_err(TestCaseError::fail)
    });
    match result {
        Ok(()) => println!("{name}: {cases} sequences of {steps} steps"),
        Err(error) => panic!("{name}, {SEED}={seed}: {error}"),
    }
}

/// Runs `steps` steps on `backend` and the reference, and compares all outputs and the cache after
/// each.
fn check_sequence(case: &Case, steps: usize, backend: &dyn Backend) -> Result<(), String> {
    let mut call = Call::new(case);
    for step in 0..steps {
        let want = call.run(&Reference).map_err(|e| format!("step {step}: reference: {e}"))?;
        let got = call.run(backend).map_err(|e| format!("step {step}: {}: {e}", backend.name()))?;
        compare_with_cache(&call, &got, &want).map_err(|e| format!("step {step}: {e}"))?;
        if step + 1 < steps {
            let Results { outputs, scales } = got;
            let (key, value) = (outputs.present_key, outputs.present_value);
            call = call.next(KvCache { key, value, scales });
        }
    }
    Ok(())
}

/// All element types of the operator.
pub fn any_dtype() -> BoxedStrategy<DType> {
    prop_oneof![Just(DType::F32), half_dtype()].boxed()
}

/// The element types of the tensor cores.
pub fn half_dtype() -> BoxedStrategy<DType> {
    prop_oneof![Just(DType::F16), Just(DType::BF16)].boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{any_dtype, case, heads_up_to};
    use gqa_host::Error;
    use gqa_host::backend::Io;
    use proptest::strategy::ValueTree;

    /// A back end that is always wrong.
    struct Refuses;

    impl Backend for Refuses {
        fn name(&self) -> &'static str {
            "refuses"
        }

        fn run(&self, _: &Problem, _: &mut Io<'_>) -> gqa_host::Result<()> {
            Err(Error::invalid("query", "a call", "none"))
        }
    }

    #[test]
    fn what_a_failure_prints_repeats_it() {
        let calls = || case(any_dtype(), heads_up_to(64), 8);
        let failure = std::panic::catch_unwind(|| parity("random calls", 1, calls(), &Refuses));
        let message = *failure.unwrap_err().downcast::<String>().unwrap();
        let seed = message.strip_prefix("random calls, PROPTEST_RNG_SEED=").unwrap();
        let seed: u64 = seed.split(':').next().unwrap().parse().unwrap();
        let config = Config { rng_seed: RngSeed::Fixed(seed), ..config("again", 1, "refuses") };
        let first = |config: &Config| {
            let call = calls().new_tree(&mut TestRunner::new(config.clone())).unwrap();
            format!("{:?}", call.current())
        };
        assert_eq!(first(&config), first(&config));
        assert_ne!(first(&config), first(&Config { rng_seed: RngSeed::Fixed(!seed), ..config }));
    }
}
