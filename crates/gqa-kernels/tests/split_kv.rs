//! `split_kv` and `combine` on the simulator.

mod flash;

use flash::{Case, Tensors, case, check, lse, start};
use gqa_kernels::attention::{combine, split_kv};
use gqa_kernels::num::{DType, MmaElement};
use gqa_kernels::params::sink;
use gqa_kernels::registry::{Entry, entries};
use gqa_sim::Arg;
use proptest::prelude::*;

fn run<T: MmaElement>(case: &Case, splits: u32) -> Result<(), TestCaseError> {
    let (entry, p, mut t) =
        (case.entry("gqa_split_kv"), case.params(splits), Tensors::<T>::new(case));
    let (out_len, lse_len) = split_kv::partial_elements(&p);
    let (mut partial_out, mut partial_lse) = (vec![f32::NAN; out_len], vec![f32::NAN; lse_len]);
    let head_sink =
        || if case.sink == sink::PER_HEAD { Arg::read(&t.head_sink) } else { Arg::null() };
    let mut direct = vec![
        Arg::read(&t.q),
        Arg::read(&t.k),
        Arg::read(&t.v),
        Arg::read(&t.seqlens_k),
        head_sink(),
    ];
    if splits == 1 {
        direct.extend([Arg::write(&mut t.out), lse(case, &mut t.lse), Arg::null(), Arg::null()]);
    } else {
        direct.extend([
            Arg::null(),
            Arg::null(),
            Arg::write(&mut partial_out),
            Arg::write(&mut partial_lse),
        ]);
    }
    direct.push(Arg::params(&p));
    start(case, entry, split_kv::grid(&p), &direct)?;
    drop(direct);
    if splits > 1 {
        let arguments = [
            Arg::read(&partial_out),
            Arg::read(&partial_lse),
            Arg::read(&t.seqlens_k),
            head_sink(),
            Arg::write(&mut t.out),
            lse(case, &mut t.lse),
            Arg::params(&p),
        ];
        start(case, merge_entry(case), combine::grid(&p, 3), &arguments)?;
    }
    check(case, &t)
}

fn merge_entry(case: &Case) -> &'static Entry {
    entries()
        .find(|e| e.name.starts_with("gqa_combine") && e.dtype == case.dtype)
        .expect("a kernel")
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
