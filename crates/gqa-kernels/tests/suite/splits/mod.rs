//! Kernels that may cut the keys into splits, with the merge, on the simulator.

use crate::flash::{Case, Tensors, check, lse, start};
use crate::support::optional;
use gqa_kernels::attention::{combine, split_kv};
use gqa_kernels::num::MmaElement;
use gqa_kernels::params::{AttentionParams, sink};
use gqa_kernels::registry::{Entry, entries};
use gqa_sim::{Arg, Report};
use proptest::test_runner::TestCaseError;

/// Runs the kernel with a number of splits, and the merge if there is more than one. Returns the
/// kernel's report.
pub fn run_in_splits<T: MmaElement>(
    case: &Case,
    entry: &'static Entry,
    splits: u32,
    grid: impl Fn(&AttentionParams) -> [u32; 3],
) -> Result<Report, TestCaseError> {
    let (p, mut t) = (case.params(splits), Tensors::<T>::new(case));
    let (out_len, lse_len) = split_kv::partial_elements(&p);
    let (mut partial_out, mut partial_lse) = (vec![f32::NAN; out_len], vec![f32::NAN; lse_len]);
    let head_sink =
        || if case.sink == sink::PER_HEAD { Arg::read(&t.head_sink) } else { Arg::null() };
    let [q, k, v] = [&t.q, &t.k, &t.v].map(|tensor| Arg::read(tensor));
    let mut arguments =
        vec![q, k, v, Arg::read(&t.seqlens_k), optional(&t.query_seqlens), head_sink()];
    if splits == 1 {
        arguments.extend([Arg::write(&mut t.out), lse(case, &mut t.lse), Arg::null(), Arg::null()]);
    } else {
        let partial = [Arg::write(&mut partial_out), Arg::write(&mut partial_lse)];
        arguments.extend([Arg::null(), Arg::null()].into_iter().chain(partial));
    }
    arguments.push(Arg::params(&p));
    let report = start(case, entry, grid(&p), &arguments)?;
    drop(arguments);
    if splits > 1 {
        let arguments = [
            Arg::read(&partial_out),
            Arg::read(&partial_lse),
            Arg::read(&t.seqlens_k),
            optional(&t.query_seqlens),
            head_sink(),
            Arg::write(&mut t.out),
            Arg::null(),
            lse(case, &mut t.lse),
            Arg::params(&p),
        ];
        start(case, merge_entry(case), combine::grid(&p, 3), &arguments)?;
    }
    check(case, &t)?;
    Ok(report)
}

fn merge_entry(case: &Case) -> &'static Entry {
    let mut merges = entries().filter(|entry| entry.name.starts_with("gqa_combine"));
    merges.find(|entry| entry.dtype == case.dtype).expect("a kernel")
}
