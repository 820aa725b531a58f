//! Writes a warp's columns of the output.

use super::cached::Cached;
use super::{ABSENT, Work};
use crate::attention::latent::VALUE_SIZE;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::simt::{Global, lane};
use crate::tile::fragment::Fragments;
use crate::tile::rows::{Row, close};

/// Finishes a lane's row: writes its columns of the output or of the split's result, from `column`
/// on. The group's first warp also writes the log-sum-exp. If the row sees no key of the split, its
/// columns of the split's result are not written.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn write<C: Cached, T: MmaElement, const D8: usize>(
    work: &Work<'_, T, C::Cell<T>>,
    row: Row,
    half: usize,
    state: SoftmaxState,
    out: &Fragments<1, D8>,
    (column, is_first): (u32, bool),
) {
    let a = &work.p.attention;
    let exists = row.s != ABSENT;
    let is_split = a.splits > 1;
    let (factor, log_sum_exp) = close::<T>(a, row.is_token(), row.head, Global::null(), state);
    let lse = if is_split { work.to.partial_lse } else { work.to.lse };
    if is_first && lane() % 4 == 0 && exists && !lse.is_null() {
        lse.store(work.index(row), log_sum_exp);
    }
    let factor = if C::CONVERTS { factor * work.to.scale.load(0) } else { factor };
    if is_split {
        if exists && state.sum != 0.0 {
            let at = work.index(row) * VALUE_SIZE as usize + column as usize;
            C::store_part(out, half, factor, work.to.partial_out, at);
        }
    } else {
        let [entry, head, s] = work.indices(row);
        let at = exists.then(|| a.out.at(entry, head, s) + column as usize);
        C::store(out, half, factor, work.to.out, at);
    }
}
