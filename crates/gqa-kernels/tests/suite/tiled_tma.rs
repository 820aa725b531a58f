//! `tiled_tma` on the simulator.

use crate::flash::{Case, Tensors, case, check, lse, start, with_type};
use crate::support::optional;
use gqa_kernels::attention::tiled;
use gqa_kernels::num::{DType, MmaElement};
use gqa_kernels::params::{Strides, sink};
use gqa_sim::{Arg, Report, Swizzle, TensorLayout};
use proptest::prelude::*;

fn run<T: MmaElement>(case: &Case) -> Result<Report, TestCaseError> {
    let (entry, p, mut t) = (case.entry("gqa_tiled_tma"), case.params(1), Tensors::<T>::new(case));
    let layout = |strides: Strides| TensorLayout {
        size: [p.head_size, p.capacity, p.kv_heads, p.batch],
        stride: [strides.row, strides.head, strides.batch].map(|elements| 2 * elements),
        tile: [64, entry.keys, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let arguments = [
        Arg::read(&t.k).tensor_map(layout(p.k)),
        Arg::read(&t.v).tensor_map(layout(p.v)),
        Arg::read(&t.q),
        Arg::read(&t.seqlens_k),
        optional(&t.query_seqlens),
        if case.sink == sink::PER_HEAD { Arg::read(&t.head_sink) } else { Arg::null() },
        Arg::write(&mut t.out),
        lse(case, &mut t.lse),
        Arg::params(&p),
    ];
    let report = start(case, entry, tiled::grid(&p, entry.rows), &arguments)?;
    drop(arguments);
    check(case, &t)?;
    Ok(report)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) })]

    #[test]
    fn any_call(case in case(150, 400)) {
        with_type!(&case, run)?;
    }

    #[test]
    fn small_calls(case in case(12, 20)) {
        with_type!(&case, run)?;
    }
}
