//! Whether outputs of a call overlap other memory of the call.

use super::views::{DeviceView, Views, Workspace};
use gqa_plan::Problem;
use gqa_plan::plan::{Plan, TensorId, TensorSpec};
use gqa_tensor::{Error, Result};

/// At least the number of tensors of any call, its workspace and its counters.
const MOST: usize = TensorId::ALL.len() + 2;

/// Errs where an output, the workspace or the counters overlap any other memory of the call. Inputs
/// may overlap, as key and value or the parts of a packed tensor do. Elements between the rows of a
/// strided tensor may belong to another tensor.
pub(super) fn check(plan: &Plan, views: &Views<'_>, workspace: Workspace) -> Result<()> {
    let mut regions = [Region::NONE; MOST];
    let tensors = plan.tensors().iter().filter(|(_, spec)| !spec.is_empty());
    let tensors = tensors.filter_map(|(id, spec)| Some((id, spec, views.get(*id)?)));
    let tensors = tensors.map(|(id, spec, view)| Region::of(plan.problem(), *id, spec, view));
    let all = tensors.chain(Region::scratch(plan, workspace));
    for (count, region) in all.enumerate() {
        if let Some(other) = regions[..count].iter().find(|other| region.overlaps(other)) {
            let (written, other) = if region.written { (&region, other) } else { (other, &region) };
            return Err(written.refused(other, views));
        }
        regions[count] = region;
    }
    Ok(())
}

/// Errs where the plan's schedule overlaps another tensor, where it is written.
pub(super) fn check_schedule(plan: &Plan, views: &Views<'_>) -> Result<()> {
    let tensors = plan.tensors().iter().filter(|(_, spec)| !spec.is_empty());
    let tensors = tensors.filter_map(|(id, spec)| Some((*id, spec, views.get(*id)?)));
    let regions = tensors.map(|(id, spec, view)| Region::of(plan.problem(), id, spec, view));
    let is_schedule = |region: &Region| region.id == Some(TensorId::Schedule);
    let Some(schedule) = regions.clone().find(is_schedule) else { return Ok(()) };
    let schedule = Region { written: true, ..schedule };
    let mut others = regions.filter(|region| !is_schedule(region));
    let overlapped = others.find(|other| schedule.overlaps(other));
    overlapped.map_or(Ok(()), |other| Err(schedule.refused(&other, views)))
}

/// The memory of a tensor of the call, or of scratch memory.
#[derive(Clone, Copy)]
struct Region {
    name: &'static str,
    /// `None`: scratch memory.
    id: Option<TensorId>,
    written: bool,
    place: Place,
}

impl Region {
    const NONE: Self = Self { name: "", id: None, written: false, place: Place::solid(0, 0) };

    fn of(problem: &Problem, id: TensorId, spec: &TensorSpec, view: &DeviceView<'_>) -> Self {
        let place = match spec.strides {
            None => Place::solid(view.pointer, spec.bytes() as u64),
            Some(strides) => {
                let (dims, size) = (id.row_dims(problem), spec.dtype.size() as u64);
                let steps = [strides.batch, strides.head, strides.row];
                let steps = std::array::from_fn(|i| (steps[i] as u64 * size, dims[i] as u64));
                Place::new(view.pointer, dims[3] as u64 * size, steps)
            }
        };
        Self { name: id.name(), id: Some(id), written: id.is_output(), place }
    }

    /// The workspace and the counters, each with memory of its own.
    fn scratch(plan: &Plan, workspace: Workspace) -> [Self; 2] {
        let region = |name, pointer, bytes: usize| Self {
            name,
            id: None,
            written: true,
            place: Place::solid(pointer, bytes as u64),
        };
        [
            region("workspace", workspace.pointer, plan.workspace_bytes()),
            region("workspace.counters", workspace.counters, 4 * plan.counters()),
        ]
    }

    /// Whether they overlap and either of them is written.
    fn overlaps(&self, other: &Self) -> bool {
        (self.written || other.written) && self.place.overlaps(&other.place)
    }

    fn refused(&self, other: &Self, views: &Views<'_>) -> Error {
        let shown = |region: &Self| {
            let view = region.id.and_then(|id| views.get(id));
            let Place { start, run, .. } = region.place;
            view.map_or_else(|| format!("{run} bytes at {start:#x}"), DeviceView::to_string)
        };
        let got = format!("{}, which overlaps {} ({})", shown(self), other.name, shown(other));
        Error::invalid(self.name, got, "memory of its own, as the call writes it")
    }
}

/// The bytes of a tensor: runs of `run` bytes, repeated with up to three strides.
#[derive(Clone, Copy, Debug)]
struct Place {
    start: u64,
    /// Behind the last byte.
    end: u64,
    run: u64,
    /// The stride from one run to the next, and the number of runs.
    steps: [(u64, u64); 3],
}

impl Place {
    /// One run.
    const fn solid(start: u64, bytes: u64) -> Self {
        Self { start, end: start.saturating_add(bytes), run: bytes, steps: [(0, 1); 3] }
    }

    fn new(start: u64, run: u64, steps: [(u64, u64); 3]) -> Self {
        let last = steps.iter().map(|&(stride, count)| stride * (count - 1)).sum::<u64>();
        Self { start, end: start.saturating_add(last).saturating_add(run), run, steps }
    }

    fn is_solid(&self) -> bool {
        self.steps.iter().all(|&(_, count)| count == 1)
    }

    /// Whether the two share a byte.
    fn overlaps(&self, other: &Self) -> bool {
        let apart = self.end <= other.start || other.end <= self.start;
        if apart || self.run == 0 || other.run == 0 {
            return false;
        }
        self.is_solid() && other.is_solid() || self.meets(other)
    }

    /// The exact test, if the ranges from first to last byte overlap. A run of this region begins
    /// at `start + sum(i * stride)`. It meets a run of the other where their distance is less than
    /// a run: where a sum of multiples of both regions' strides, within their counts, falls in an
    /// interval.
    fn meets(&self, other: &Self) -> bool {
        let apart = i128::from(other.start) - i128::from(self.start);
        let wanted = [apart - i128::from(self.run) + 1, apart + i128::from(other.run) - 1];
        let mut terms = [Term::default(); 6];
        for (term, (stride, count)) in
            terms.iter_mut().zip(self.steps.into_iter().chain(other.steps))
        {
            *term = Term { stride: stride.into(), range: [0, i128::from(count) - 1] };
        }
        terms[3..].iter_mut().for_each(|term| term.range = [-term.range[1], 0]);
        terms.sort_unstable_by_key(|term| std::cmp::Reverse(term.stride));
        // Equal strides are merged; only the difference of their multiples counts.
        for i in 1..terms.len() {
            if terms[i].stride == terms[i - 1].stride {
                let [low, high] = terms[i - 1].range;
                terms[i].range = [terms[i].range[0] + low, terms[i].range[1] + high];
                terms[i - 1].range = [0, 0];
            }
        }
        Term::reach(&terms, wanted, &mut 0)
    }
}

/// Multiples of a stride.
#[derive(Clone, Copy, Default)]
struct Term {
    stride: i128,
    /// The least factor and the greatest.
    range: [i128; 2],
}

impl Term {
    /// Whether a sum of one multiple of each term falls in the interval. Strides of a tensor are
    /// usually nested, so that few multiples must be tried. Otherwise `tried` limits the search,
    /// and the regions count as overlapping.
    fn reach(terms: &[Self], [low, high]: [i128; 2], tried: &mut u32) -> bool {
        const MOST_TRIED: u32 = 1 << 14;
        let Some((term, rest)) = terms.split_first() else { return low <= 0 && 0 <= high };
        let sum = |end: usize| rest.iter().map(|term| term.stride * term.range[end]).sum::<i128>();
        let (least, most) = (low - sum(1), high - sum(0));
        let [first, last] = match term.stride {
            0 => [0, 0],
            stride => [-(-least).div_euclid(stride), most.div_euclid(stride)],
        };
        (first.max(term.range[0])..=last.min(term.range[1])).any(|factor| {
            *tried += 1;
            let step = factor * term.stride;
            *tried > MOST_TRIED || Self::reach(rest, [low - step, high - step], tried)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All bytes of a place.
    fn bytes(place: &Place) -> Vec<u64> {
        let [(a, n), (b, m), (c, k)] = place.steps;
        let starts = (0..n).flat_map(|i| (0..m).flat_map(move |j| (0..k).map(move |l| (i, j, l))));
        let starts = starts.map(|(i, j, l)| place.start + a * i + b * j + c * l);
        starts.flat_map(|start| start..start + place.run).collect()
    }

    fn place() -> impl Strategy<Value = Place> {
        let step = (0u64..40, 1u64..5);
        (0u64..200, 0u64..6, [step.clone(), step.clone(), step])
            .prop_map(|(start, run, steps)| Place::new(start, run, steps))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn places_overlap_where_they_share_a_byte(a in place(), b in place()) {
            let of_a = bytes(&a);
            let shared = bytes(&b).iter().any(|byte| of_a.contains(byte));
            prop_assert_eq!(a.overlaps(&b), shared);
            prop_assert_eq!(b.overlaps(&a), shared);
        }
    }

    /// Query and output interleaved in the rows of one buffer, at the largest sizes.
    #[test]
    fn rows_of_one_buffer_are_told_apart_without_a_search() {
        const HEAD: u64 = 256;
        let at = |start, heads: u64| {
            let row = 48 * HEAD;
            let steps = [((1 << 20) * row, 64), (HEAD, heads), (row, 1 << 20)];
            Place::new((1 << 40) + start * HEAD, HEAD, steps)
        };
        assert!(!at(0, 32).overlaps(&at(32, 16)));
        assert!(at(0, 33).overlaps(&at(32, 16)));
    }

    #[test]
    fn a_search_without_end_is_given_up() {
        let steps = [(6, 1 << 40), (10, 1 << 40), (14, 1 << 40)];
        let [even, odd] = [0, 1].map(|start| Place::new(start, 1, steps));
        assert!(even.overlaps(&odd));
    }
}
