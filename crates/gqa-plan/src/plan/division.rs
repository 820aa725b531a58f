//! How a decode step over a paged KV cache divides the keys of all sequences, for lengths that the
//! host knows: what the kernels find by themselves on the device.

use super::families::{division, work_division};
use super::launch::Plan;
use crate::tensors::{TensorId, Tensors};
use gqa_kernels::attention::decode::{
    Part, SHAPE_WORDS, scheduled, scheduled_parts, scheduled_tiles, scheduled_words,
};
use gqa_kernels::attention::hopper;
use gqa_kernels::params::{DecodeScheduleParams, PagedHopperParams};
use gqa_tensor::{Error, Result, TensorView};

/// The division of a plan's decode step. All KV heads and row tiles have the same.
#[derive(Clone, Debug)]
pub struct Division {
    /// The tensor [`schedule`](crate::plan::TensorId::Schedule), as the kernel writes it.
    pub schedule: Vec<u32>,
    /// Key tiles of each sequence, of [`keys`](Self::keys) keys.
    pub tiles: Vec<u32>,
    /// The part of each CTA that has one, in the order in which CTAs start.
    pub parts: Vec<Part>,
    /// Keys of a tile.
    pub keys: u32,
    /// CTAs of a KV head and row tile that run at a time.
    pub slots: u32,
}

impl Division {
    /// Key tiles of a part. Tile by tile, a sequence's parts take turns.
    pub fn tiles_of(&self, part: &Part) -> u32 {
        let all = self.tiles.get(part.batch as usize).copied().unwrap_or_default();
        all.saturating_sub(part.split).div_ceil(part.splits.max(1))
    }
}

impl Plan {
    /// The division of the plan's decode step for sequences of these lengths: `seqlens_k`, and
    /// `cumulative_sequence_length` unless each sequence has one token. The code is the kernels'
    /// own, on the simulated machine. `None` where the plan divides no keys by lengths.
    ///
    /// # Errors
    /// If the number of lengths differs from the number of sequences.
    pub fn division(
        &self,
        cumulative_sequence_length: Option<&[i32]>,
        seqlens_k: &[i32],
    ) -> Result<Option<Division>> {
        let Some(params) = self.launches.iter().find_map(division) else { return Ok(None) };
        let sequences = self.problem.batch;
        if seqlens_k.len() != sequences {
            return Err(Error::invalid("seqlens_k", seqlens_k.len(), format!("{sequences}")));
        }
        let starts = cumulative_sequence_length;
        if let Some(starts) = starts.filter(|starts| starts.len() != sequences + 1) {
            let allowed = format!("{}", sequences + 1);
            return Err(Error::invalid("cumulative_sequence_length", starts.len(), allowed));
        }
        let one_each = self.problem.pages.is_some_and(|pages| pages.one_each);
        let schedule = scheduled(starts.filter(|_| !one_each), seqlens_k, &params);
        Division::of(schedule.map_err(Error::machine)?, sequences, &params).map(Some)
    }
}

impl Division {
    fn of(schedule: Vec<u32>, sequences: usize, params: &DecodeScheduleParams) -> Result<Self> {
        Ok(Self {
            tiles: scheduled_tiles(&schedule, sequences).to_vec(),
            parts: scheduled_parts(&schedule, sequences),
            keys: params.keys,
            slots: params.step.decode.parts,
            schedule,
        })
    }
}

impl Plan {
    /// Errs unless the call's schedule, if the plan reads one, is that of its lengths: with another
    /// one kernels divide the work themselves, in every layer.
    ///
    /// # Errors
    /// Names `schedule`, and the sequence or CTA where it differs.
    pub fn check_schedule(&self, inputs: &Tensors<TensorView<'_>>) -> Result<()> {
        let integers = |id| match inputs.get(id) {
            Some(TensorView::I32(values)) => Some(*values),
            _ => None,
        };
        let (Some(given), Some(lengths), Some(_)) =
            (integers(TensorId::Schedule), integers(TensorId::SeqlensK), self.schedule())
        else {
            return Ok(());
        };
        let starts = integers(TensorId::CumulativeSequenceLength);
        let given = given.iter().map(|&word| word as u32).collect::<Vec<_>>();
        let difference = match self.division(starts, lengths)? {
            Some(division) => division.difference(&given),
            None => match (starts, self.launches.iter().find_map(work_division)) {
                (Some(starts), Some(params)) => work_difference(&given, starts, lengths, &params)?,
                _ => None,
            },
        };
        match difference {
            Some(got) => {
                let allowed = "what its launch writes for these lengths and this plan, and nothing \
                               else";
                Err(Error::invalid(TensorId::Schedule.name(), got, allowed))
            }
            None => Ok(()),
        }
    }
}

impl Division {
    /// What is wrong with that schedule, among the words that kernels read.
    fn difference(&self, given: &[u32]) -> Option<String> {
        let (sequences, right) = (self.tiles.len(), &self.schedule);
        let shapes = SHAPE_WORDS as usize;
        if given[..shapes] != right[..shapes] {
            return Some("one for a call of other shapes or another GPU, or none".to_owned());
        }
        let tiles = scheduled_tiles(given, sequences);
        if let Some(b) = (0..sequences).find(|&b| tiles[b] != self.tiles[b]) {
            let [given, right, keys] = [tiles[b], self.tiles[b], self.keys];
            return Some(format!(
                "{given} tiles of {keys} keys for sequence {b}, which has {right}"
            ));
        }
        let words = scheduled_words(right, sequences);
        let changed = words.into_iter().find(|&i| given[i] != right[i])?;
        Some(format!("a changed word {changed}"))
    }
}

/// What is wrong with a schedule that divides the work of kernels which split keys.
fn work_difference(
    given: &[u32],
    starts: &[i32],
    lengths: &[i32],
    params: &PagedHopperParams,
) -> Result<Option<String>> {
    let right = hopper::made(starts, lengths, params, 0).map_err(Error::machine)?;
    let read = 0..hopper::words_read(lengths.len(), params.ctas);
    let changed = read.into_iter().find(|&i| given.get(i) != right.get(i));
    Ok(changed.map(|i| format!("another word {i}")))
}
