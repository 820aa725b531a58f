//! A test of a kernel on a GPU.

use super::Verdict;
use crate::call::Call;
use crate::device::Device;
use crate::error::DriverError;
use crate::raw::module::relaxed;
use crate::stream::Stream;
use gqa_plan::plan::{Plan, TensorId};
use gqa_plan::sample::{Trial, agree, tensors};
use gqa_tensor::{Error, Result, Tensor};
use std::mem;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a kernel waits for a barrier in shared memory.
const WAIT_NANOSECONDS: u32 = 300_000_000;
/// How long a call may take, without the time to assemble its kernels.
const CALL: Duration = Duration::from_secs(10);
/// Seed of the random tensors.
const SEED: u64 = 1;

/// Computes the trial's call with both plans, and compares the outputs. `change` is applied to the
/// PTX first: the tests below use it to make kernels wrong.
pub(super) fn run(
    device: &Device,
    trial: &Trial,
    change: impl Fn(&str, String) -> String + Send + Sync + 'static,
) -> Verdict {
    let rewrite =
        move |entry: &str, text: String| gqa_ptx::bound(&change(entry, text), WAIT_NANOSECONDS);
    let compared = relaxed(|| compared(device, device.apart(Box::new(rewrite))?, trial));
    match compared.map_err(Error::from).flatten() {
        Ok(verdict) => verdict,
        Err(error) => match error.cause::<DriverError>() {
            Some(DriverError::LaunchFailed { .. } | DriverError::PtxRejected { .. }) => {
                Verdict::Wrong(error.to_string().replace('\n', " "))
            }
            _ => Verdict::Unknown(error.to_string().replace('\n', " ")),
        },
    }
}

fn compared(device: &Device, apart: Device, trial: &Trial) -> Result<Verdict> {
    let stream = Stream::new(&apart)?;
    let problem = trial.tested.problem();
    let read = tensors(problem, SEED)?;
    let want = Computed::of(&apart, &stream, &trial.plain, &read)?;
    let got = Computed::of(&apart, &stream, &trial.tested, &read)?;
    let (Computed::Done(got), Computed::Done(want)) = (got, want) else {
        // Leaked: freeing its context would wait for the kernel, and so would the last release of
        // the GPU's primary context.
        mem::forget((apart, stream, device.clone()));
        let seconds = CALL.as_secs();
        return Ok(Verdict::Wrong(format!("does not end within {seconds} s")));
    };
    let differs = got
        .iter()
        .zip(&want)
        .find_map(|((id, got), (_, want))| agree(problem, *id, got, want).err());
    Ok(differs.map_or(Verdict::Agrees, Verdict::Wrong))
}

/// How a call ended.
enum Computed {
    /// It ended; its outputs.
    Done(Vec<(TensorId, Tensor)>),
    /// It is still running.
    Hangs,
}

impl Computed {
    fn of(
        device: &Device,
        stream: &Stream,
        plan: &Plan,
        read: &[(TensorId, Tensor)],
    ) -> Result<Self> {
        let call = Call::new(device, Arc::new(plan.clone()))?;
        call.poison(stream)?;
        for (id, tensor) in read {
            call.upload(*id, tensor, stream)?;
        }
        call.enqueue(stream)?;
        let started = Instant::now();
        while !stream.is_done()? {
            if started.elapsed() > CALL {
                mem::forget(call);
                return Ok(Self::Hangs);
            }
            sleep(Duration::from_micros(200));
        }
        let written = plan.tensors().iter().map(|(id, _)| *id).filter(|id| id.is_output());
        let written = written.map(|id| Ok((id, call.download(id, stream)?)));
        Ok(Self::Done(written.collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::{Tests, Verdict};
    use gqa_plan::engine::{Dense, Heads, Layer};
    use gqa_plan::plan::{DeviceInfo, PlanOptions, Planner, plan};
    use gqa_plan::{DType, Problem};

    const HOPPER: &str = "gqa_hopper_bf16_d128";

    fn layer() -> Layer {
        Layer::new(DType::BF16, Heads { query: 8, kv: 2, size: 128 })
    }

    fn trial(problem: &Problem, entry: &str) -> Trial {
        let entry = gqa_kernels::registry::find(entry).unwrap();
        let options = PlanOptions { force: Some(entry.name), ..PlanOptions::default() };
        Trial::of(entry, &plan(problem, &DeviceInfo::h200(), &options).unwrap()).unwrap()
    }

    fn prefill() -> Problem {
        layer().dense(Dense::chunk(2, 400, 1000).longest(900)).unwrap()
    }

    /// Runs the test with changed PTX of the kernel, and checks that the GPU still computes in
    /// other contexts.
    fn run_changed(
        problem: &Problem,
        entry: &'static str,
        change: impl Fn(String) -> String + Send + Sync + 'static,
    ) -> Verdict {
        let device = Device::open(0).unwrap();
        let started = Instant::now();
        let change = move |name: &str, text: String| match name == entry {
            true => change(text),
            false => text,
        };
        let verdict = run(&device, &trial(problem, entry), change);
        println!("{entry}: {verdict:?} after {:.2} s", started.elapsed().as_secs_f64());
        let stream = Stream::new(&device).unwrap();
        let read = tensors(problem, 2).unwrap();
        let plan = plan(problem, &DeviceInfo::h200(), &PlanOptions::default()).unwrap();
        assert!(matches!(Computed::of(&device, &stream, &plan, &read), Ok(Computed::Done(_))));
        verdict
    }

    /// The text without the part from `start` to `end`.
    fn without(text: &str, start: &str, end: char) -> String {
        let (before, from) = text.split_once(start).expect("the text has it");
        format!("{before}{}", from.split_once(end).expect("and its end").1)
    }

    #[test]
    #[ignore = "needs a GPU of compute capability 9.0"]
    fn kernels_agree_with_simpler_ones() {
        let step = layer().dense(Dense::decode(2, 1000)).unwrap();
        for (problem, entry) in [
            (prefill(), HOPPER),
            (prefill(), "gqa_tiled_bf16_d128"),
            (step.clone(), "gqa_decode_bf16_d128_r8"),
            (step, "gqa_split_kv_bf16_d128"),
        ] {
            assert_eq!(run_changed(&problem, entry, |text| text), Verdict::Agrees, "{entry}");
        }
    }

    #[test]
    #[ignore = "needs a GPU of compute capability 9.0"]
    fn a_wrong_kernel_is_found() {
        for entry in [HOPPER, "gqa_tiled_bf16_d128"] {
            let change = |text: String| text.replace("ex2.approx", "sin.approx");
            let verdict = run_changed(&prefill(), entry, change);
            let Verdict::Wrong(why) = verdict else { panic!("{entry}: {verdict:?}") };
            assert!(why.starts_with("output, row "), "{why}");
        }
    }

    /// A kernel whose copies are never announced to their mbarriers would wait for ever without the
    /// time limit.
    #[test]
    #[ignore = "needs a GPU of compute capability 9.0"]
    fn a_kernel_that_waits_for_ever_is_found() {
        let started = Instant::now();
        let change = |text: String| without(&text, "mbarrier.arrive.expect_tx", ';');
        let verdict = run_changed(&prefill(), HOPPER, change);
        assert!(matches!(verdict, Verdict::Wrong(_)), "{verdict:?}");
        assert!(started.elapsed() < CALL, "{:?}", started.elapsed());
    }

    /// A kernel that hangs in another way is abandoned, and other kernels still run. Its name makes
    /// this the last test, because the abandoned kernel takes half of the GPU's time.
    #[test]
    #[ignore = "needs a GPU of compute capability 9.0"]
    fn z_a_kernel_that_never_ends_is_found() {
        let change = |text: String| {
            let start = text.find("\n{\n").expect("the kernel's body") + 3;
            format!("{}FOREVER: bra FOREVER;\n{}", &text[..start], &text[start..])
        };
        let verdict = run_changed(&prefill(), "gqa_tiled_bf16_d128", change);
        assert_eq!(verdict, Verdict::Wrong("does not end within 10 s".to_owned()));
    }

    /// A process that plans for a GPU on which nothing is proven: an A100, as Hopper runs its
    /// kernels.
    #[test]
    #[ignore = "needs a GPU of compute capability 8.0 or newer"]
    fn the_first_plan_tests_its_kernels() {
        let device = Device::open(0).unwrap();
        let name = format!("a100 of {}", std::process::id()).into();
        let info = DeviceInfo { name, ..DeviceInfo::known("a100").unwrap() };
        let tests = || Arc::new(Tests(device.clone()));
        let planner = Planner::new(info.clone(), PlanOptions::default()).proven_by(tests());
        let step = layer().dense(Dense::decode(2, 1000)).unwrap();
        for (problem, family) in [(step, "decode"), (prefill(), "tiled")] {
            let families = |planner: &Planner, captured: bool| {
                let started = Instant::now();
                let plan = match captured {
                    true => planner.plan_in_capture(&problem).unwrap(),
                    false => planner.plan(&problem).unwrap(),
                };
                println!("planned in {:.3} s", started.elapsed().as_secs_f64());
                let launches = plan.launches().iter().map(|launch| launch.entry().family.name());
                launches.collect::<Vec<_>>()
            };
            assert_eq!(families(&planner, true).last(), Some(&"general"));
            assert_eq!(families(&planner, false).last(), Some(&family));
            // Another planner, as in another process, finds the result in memory or in the file.
            let other = Planner::new(info.clone(), PlanOptions::default()).proven_by(tests());
            assert_eq!(families(&other, true).last(), Some(&family));
        }
        let told = crate::trust::remembered();
        println!("{told:?}");
    }
}
