//! The CPU back end against the f64 reference, on random calls.

use gqa_host::DType;
use gqa_host::backend::cpu::Cpu;
use gqa_host::reference::Reference;
use gqa_tests::{Call, Case, case, compare, heads_up_to};
use proptest::prelude::*;

fn check(case: &Case) -> Result<(), TestCaseError> {
    let call = Call::new(case);
    let want = call.run(&Reference).map_err(|e| TestCaseError::fail(format!("reference: {e}")))?;
    let got = call.run(&Cpu::default()).map_err(|e| TestCaseError::fail(format!("cpu: {e}")))?;
    compare(&got, &want, case.dtype).map_err(TestCaseError::fail)?;
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn cpu_is_reference(case in case(any_dtype(), heads_up_to(256), 70)) {
        check(&case)?;
    }

    #[test]
    fn cpu_is_reference_for_large_heads(case in case(any_dtype(), (33..=64usize).prop_map(|e| e * 8), 20)) {
        check(&case)?;
    }
}

fn any_dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)]
}
