//! Variables of the environment, which the first call of a process reads.

use crate::refusal::refusal;
use candle::{DType, Device, Tensor};
use gqa_candle::flash::flash_attn;
use std::process::Command;

/// The first call of the process that [`wrong_values_are_refused_on_the_cpu`] starts.
#[test]
#[ignore = "called by another test, in a process of its own"]
fn a_call() {
    let q = Tensor::zeros((1, 2, 2, 8), DType::F32, &Device::Cpu).expect("memory");
    println!("refused: {}", refusal(flash_attn(&q, &q, &q, 1., true)));
}

#[test]
fn wrong_values_are_refused_on_the_cpu() {
    for (name, value, allowed) in
        [("GQA_SPLITS", "0", "1 to 128"), ("GQA_CPU_INSTRUCTIONS", "abacus", "")]
    {
        let mut call = Command::new(std::env::current_exe().expect("a program"));
        call.args(["--exact", "environment::a_call", "--ignored", "--nocapture"]);
        let output = call.env(name, value).output().expect("a process");
        let said = String::from_utf8_lossy(&output.stdout);
        let wanted = format!("{name}: got \"{value}\"; allowed: {allowed}");
        assert!(output.status.success() && said.contains(&wanted), "{said}");
    }
}
