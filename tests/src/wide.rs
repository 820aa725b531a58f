//! Random calls with heads of 512, without what `hopper_wide` does not take.

use crate::case::heads_in;
use crate::{Case, PagedCase, Parity, case, half_dtype, paged};
use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
use gqa_kernels::registry::Family;
use proptest::prelude::*;

/// Calls over contiguous caches with up to `most` rows in a sequence.
pub fn wide(most: usize) -> BoxedStrategy<Case> {
    case(half_dtype(), heads_in(512..=512), most).prop_map(plain).boxed()
}

/// Calls over paged caches with up to `most` rows and as many new tokens in a sequence. Queries
/// rotate where all sequences have as many tokens.
pub fn wide_paged(most: usize) -> BoxedStrategy<PagedCase> {
    let blocks = prop::sample::select(vec![16usize, 32, 64, 128]);
    let around = prop_oneof![Just(0usize), Just(1), 15..=17usize, 63..=65usize, 0..=most];
    let sequences = prop::collection::vec((around, 1..=8usize), 1..=4);
    let few = (paged(wide(most), most), sequences, any::<bool>()).prop_map(
        |(case, sequences, is_even)| {
            let new = sequences[0].1;
            let tokens = |(past, own)| [past, if is_even { new } else { own }];
            PagedCase { sequences: sequences.into_iter().map(tokens).collect(), ..case }
        },
    );
    let cases = prop_oneof![3 => few, 1 => paged(wide(most), most)];
    (cases, blocks)
        .prop_map(|(case, block_size)| {
            let new = case.sequences[0][1];
            let is_even = case.sequences.iter().all(|[_, own]| *own == new);
            let rotary = case.case.rotary.filter(|_| is_even);
            PagedCase { case: Case { rotary, ..case.case }, block_size, ..case }
        })
        .boxed()
}

fn plain(case: Case) -> Case {
    Case {
        window: -1,
        head_sink: false,
        smooth_softmax: false,
        bias: None,
        qk_output: 0,
        float32_output: false,
        ..case
    }
}

/// Of these calls the ones for which a kernel of that family is planned.
pub fn taken_by<C: Parity + 'static>(
    cases: BoxedStrategy<C>,
    device: &DeviceInfo,
    family: Family,
) -> BoxedStrategy<C> {
    let device = device.clone();
    let is_taken = move |case: &C| {
        let plan = case.problem().and_then(|p| plan(&p, &device, &PlanOptions::default()));
        plan.is_ok_and(|plan| plan.launches().iter().any(|launch| launch.entry().family == family))
    };
    cases.prop_filter("taken by another kernel", is_taken).boxed()
}
