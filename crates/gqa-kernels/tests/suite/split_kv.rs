//! `split_kv` and `combine` on the simulator.

use crate::flash::{Case, case, with_type};
use crate::splits::run_in_splits;
use gqa_kernels::attention::split_kv;
use gqa_kernels::num::{DType, MmaElement};
use proptest::prelude::*;

fn run<T: MmaElement>(case: &Case, splits: u32) -> Result<(), TestCaseError> {
    run_in_splits::<T>(case, case.entry("gqa_split_kv"), splits, split_kv::grid).map(|_| ())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) })]

    #[test]
    fn one_split(case in case(40, 400)) {
        with_type!(&case, run, 1)?;
    }

    #[test]
    fn many_splits((case, splits) in (case(40, 400), 2..=12u32)) {
        with_type!(&case, run, splits)?;
    }

    #[test]
    fn more_splits_than_keys((case, splits) in (case(8, 30), 30..=split_kv::MAX_SPLITS)) {
        with_type!(&case, run, splits)?;
    }
}
