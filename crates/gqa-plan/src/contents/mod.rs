//! Checks of lengths, positions and scales that are in host memory. Kernels clamp what is on the
//! device.

mod lengths;
mod written;

use crate::problem::{Alignment, CacheBinding, CallKind, Phase, Problem, QkOutput, WriteMode};
use crate::tensors::{TensorId, Tensors};
use gqa_kernels::concept::sliding::{Slide, Sliding};
use gqa_tensor::{Error, Result, TensorView};
pub use lengths::{Bounds, PagedLengths};

const TOKENS: &str = "query_seqlens";

/// Errs unless all lengths, positions and blocks are inside of the tensors that they index, and all
/// scales are finite and not 0.
///
/// # Errors
/// Names the tensor, the element and the allowed values.
pub fn check(p: &Problem, inputs: &Tensors<TensorView<'_>>) -> Result<()> {
    let scales = [TensorId::KScale, TensorId::VScale, TensorId::OutputScale];
    for id in scales.into_iter().filter(|id| id.spec(p).is_some()) {
        check_scale(inputs, id)?;
    }
    check_indices(p, inputs, |_| false)
}

/// The same for the tensors of a call on a GPU, without scales. There a sequence may be empty,
/// because engines pad batches with such sequences.
///
/// # Errors
/// As [`check`].
pub fn check_on_device(p: &Problem, inputs: &Tensors<TensorView<'_>>) -> Result<()> {
    check_indices(p, inputs, |last| last == -1)?;
    match p.pages {
        Some(pages) => PagedLengths::of_call(p, pages, inputs)?.check_blocks(p, pages, inputs),
        None => Ok(()),
    }
}

/// Checks lengths, positions and block indices. `empty` says which last-token index marks a
/// sequence without rows.
fn check_indices(
    p: &Problem,
    inputs: &Tensors<TensorView<'_>>,
    empty: impl Fn(i32) -> bool,
) -> Result<()> {
    if let Some(pages) = p.pages {
        return PagedLengths::of_call(p, pages, inputs)?.check(p, pages, inputs);
    }
    if let CallKind::Update(mode) = p.computes {
        return check_first_rows(p, mode, inputs.need(TensorId::WriteIndices)?);
    }
    let bounds = Limits::of(p);
    let lengths = lengths(p, inputs)?;
    for (b, lengths) in lengths.into_iter().enumerate().filter(|(_, of)| !empty(of.last)) {
        let length = bounds.length(b, lengths.last)?;
        if p.phase == Phase::PaddedChunk {
            check_tokens(p, inputs.need(TensorId::QuerySeqlens)?, b, length)?;
        }
        let tokens = match p.phase {
            Phase::FirstPrompt => length.min(lengths.rows),
            _ => lengths.rows,
        };
        check_positions(p, inputs.input(TensorId::PositionIds), b, tokens)?;
    }
    Ok(())
}

/// The lengths of a sequence with its own cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Index of the last token after the call.
    pub last: i32,
    /// Rows of the call that are tokens; rows of padding follow them. In a first prompt: all rows,
    /// padding included.
    pub rows: usize,
}

impl Problem {
    /// The effect of a call on a sequence of these lengths; never more new rows than the sequence
    /// has.
    pub fn slide(&self, sliding: Sliding, lengths: Lengths) -> Slide {
        let rows = u32::try_from(lengths.rows).unwrap_or(u32::MAX);
        let total = u32::try_from(i64::from(lengths.last) + 1).unwrap_or(0);
        match self.phase {
            Phase::FirstPrompt => sliding.slide(0, total.min(rows)),
            _ => sliding.slide(total.saturating_sub(rows), total),
        }
    }
}

/// The lengths of all sequences.
///
/// # Errors
/// Where a tensor of lengths is absent, or has another type.
pub fn lengths(p: &Problem, inputs: &Tensors<TensorView<'_>>) -> Result<Vec<Lengths>> {
    let last = integers("seqlens_k", inputs.need(TensorId::SeqlensK)?)?;
    let tokens = match p.phase {
        Phase::PaddedChunk => integers(TOKENS, inputs.need(TensorId::QuerySeqlens)?)?,
        _ => &[],
    };
    let rows = |b, last: i32| {
        let most = usize::try_from(i64::from(last) + 1).unwrap_or(0).min(p.q_len);
        let of = |&tokens: &i32| usize::try_from(tokens).unwrap_or(0).min(most);
        tokens.get(b).map_or(p.q_len, of)
    };
    Ok(last.iter().enumerate().map(|(b, &last)| Lengths { last, rows: rows(b, last) }).collect())
}

/// Checks the number of tokens of batch entry `b`, which has `length` tokens after the call: it is
/// at most the number of rows, and unless the cache rolls, the cache holds the past and has room
/// for all rows after it.
fn check_tokens(p: &Problem, tokens: TensorView<'_>, b: usize, length: usize) -> Result<()> {
    let tokens = integers(TOKENS, tokens)?.get(b).copied().unwrap_or_default();
    let most = p.q_len.min(length);
    let has_room = p.slides || p.new_len == 0 || p.cache == CacheBinding::External;
    let past_rows = if p.cache == CacheBinding::Shared { p.capacity } else { p.past_capacity };
    let held = if has_room { 0 } else { length.saturating_sub(past_rows) };
    let fitting = if has_room { 0 } else { (length + p.q_len).saturating_sub(p.capacity) };
    let least = held.max(fitting);
    if usize::try_from(tokens).is_ok_and(|tokens| (least..=most).contains(&tokens)) {
        return Ok(());
    }
    let why = match least {
        0 => format!("the rows of query, and of {length} tokens by seqlens_k"),
        _ if held >= fitting => {
            format!("as past_key has {past_rows} rows, of {length} tokens by seqlens_k")
        }
        _ => format!(
            "as {} rows have to fit behind the past of {length} tokens by seqlens_k, in {} rows of \
             present_key",
            p.q_len, p.capacity
        ),
    };
    let got = format!("{tokens} for batch entry {b}");
    Err(Error::invalid(TOKENS, got, format!("{least} to {most}, {why}")))
}

/// The elements of an int32 tensor.
///
/// # Errors
/// Where it has another type.
pub fn integers<'a>(argument: &'static str, tensor: TensorView<'a>) -> Result<&'a [i32]> {
    match tensor {
        TensorView::I32(integers) => Ok(integers),
        _ => Err(Error::invalid(argument, tensor.dtype(), "int32")),
    }
}

/// Checks that all rows of an update go into the cache.
fn check_first_rows(p: &Problem, mode: WriteMode, first: TensorView<'_>) -> Result<()> {
    const NAME: &str = "write_indices";
    let last = match mode {
        WriteMode::Linear => p.capacity.checked_sub(p.new_len),
        WriteMode::Circular => Some(p.capacity.saturating_sub(1)),
    };
    for (b, &first) in integers(NAME, first)?.iter().enumerate() {
        if !usize::try_from(first).is_ok_and(|first| last.is_some_and(|last| first <= last)) {
            let allowed = format!("where {} rows fit into {}", p.new_len, p.capacity);
            return Err(Error::invalid(NAME, format!("{first} for batch entry {b}"), allowed));
        }
    }
    Ok(())
}

/// Checks that every scale is a finite nonzero number.
fn check_scale(inputs: &Tensors<TensorView<'_>>, id: TensorId) -> Result<()> {
    let Some(TensorView::F32(scales)) = inputs.input(id) else { return Ok(()) };
    match scales.iter().position(|scale| !scale.is_normal()) {
        None => Ok(()),
        Some(i) => {
            let got = format!("{} at element {i}", scales[i]);
            Err(Error::invalid(id.name(), got, "finite numbers other than 0, none subnormal"))
        }
    }
}

/// The range of a sequence's length after the call, and the reason for its limit.
struct Limits {
    least: usize,
    most: (usize, &'static str),
}

impl Limits {
    fn of(p: &Problem) -> Self {
        let padded = p.phase == Phase::FirstPrompt && p.alignment == Alignment::Phase;
        let counted = p.phase == Phase::PaddedChunk;
        let (slides, rows) = (p.sliding().is_some(), (p.capacity, "rows of present_key"));
        let implicit = p.rotary.filter(|rotary| rotary.explicit.is_none());
        let limits = [
            Some(if slides { (p.total_len, "rows by total_sequence_length") } else { rows }),
            (padded && p.new_len > 0).then_some((p.q_len, "tokens of a first prompt")),
            p.bias.map(|_| (p.total_len, "columns of attention_bias")),
            (p.output_qk != QkOutput::None).then_some((p.total_len, "columns of output_qk")),
            implicit.map(|rotary| (rotary.max_positions, "rows of cos_cache")),
            counted.then_some((p.total_len, "rows by total_sequence_length")),
        ];
        let most = limits.into_iter().flatten().min_by_key(|limit| limit.0);
        let least = match p.alignment {
            // Rows that no key is appended for need none.
            _ if !p.has_present() => 0,
            Alignment::Past(past) => past,
            _ if padded && !p.slides || counted => p.q_len.min(1),
            _ => p.q_len,
        };
        Self { least, most: most.unwrap_or_default() }
    }

    /// The length of batch entry `b`; its last valid token has index `last`.
    fn length(&self, b: usize, last: i32) -> Result<usize> {
        let (least, (most, what)) = (self.least, self.most);
        match usize::try_from(i64::from(last) + 1) {
            Ok(length) if (least..=most).contains(&length) => Ok(length),
            length => {
                let reason = match length {
                    Ok(length) if length > most => format!("at most {most} {what}"),
                    _ => format!("{least} or more tokens"),
                };
                let [from, to] = [least, most].map(|length| length as i64 - 1);
                let allowed = format!("{from} to {to}, the last of {reason}");
                Err(Error::invalid("seqlens_k", format!("{last} for batch entry {b}"), allowed))
            }
        }
    }
}

/// Checks that explicit positions of batch entry `b`'s tokens, its first rows, are rows of
/// cos_cache. Padding may have any position.
fn check_positions(
    p: &Problem,
    position_ids: Option<TensorView<'_>>,
    b: usize,
    tokens: usize,
) -> Result<()> {
    let (Some(rotary), Some(TensorView::I64(ids))) = (p.rotary, position_ids) else {
        return Ok(());
    };
    let row_length = rotary.explicit.unwrap_or_default();
    for (s, &id) in ids.iter().skip(b * row_length).take(tokens).enumerate() {
        if !usize::try_from(id).is_ok_and(|id| id < rotary.max_positions) {
            let allowed = format!(
                "0 to {}, the last row of cos_cache",
                rotary.max_positions.saturating_sub(1)
            );
            return Err(Error::invalid("position_ids", format!("{id} at ({b}, {s})"), allowed));
        }
    }
    Ok(())
}
