//! What is in lengths, positions and scales. Checked where that is in host memory; kernels clamp it where it is not.

use super::pattern::shape;
use crate::op::Inputs;
use crate::{Error, Phase, Problem, QkOutput, Result, Tensor};

/// The value of total_sequence_length.
pub(super) fn total_sequence_length(tensor: &Tensor) -> Result<usize> {
    const ARGUMENT: &str = "total_sequence_length";
    let Tensor::I32(array) = tensor else {
        return Err(Error::invalid(ARGUMENT, tensor.dtype(), "int32"));
    };
    match array.as_slice() {
        Some(&[total]) if total >= 0 => Ok(total as usize),
        Some(&[total]) => Err(Error::invalid(ARGUMENT, total, "0 or more")),
        _ => Err(Error::invalid(ARGUMENT, shape(array.shape()), "one element")),
    }
}

/// Errs unless every length and every position of a token leads into the tensors they index.
pub(super) fn check(p: &Problem, inputs: &Inputs<'_>) -> Result<()> {
    let (Tensor::I32(last), bounds) = (inputs.seqlens_k, Bounds::of(p, inputs)) else {
        return Err(Error::invalid("seqlens_k", inputs.seqlens_k.dtype(), "int32"));
    };
    if p.quantised.is_some() {
        check_scale("k_scale", inputs.k_scale)?;
        check_scale("v_scale", inputs.v_scale)?;
    }
    for (b, &last) in last.iter().enumerate() {
        let length = bounds.length(b, last)?;
        check_positions(p, inputs, b, length)?;
    }
    Ok(())
}

/// Errs unless numbers can be divided by every scale.
fn check_scale(argument: &'static str, scale: Option<&Tensor>) -> Result<()> {
    let Some(Tensor::F32(scales)) = scale else { return Ok(()) };
    match scales.iter().position(|scale| !scale.is_normal()) {
        None => Ok(()),
        Some(i) => {
            let got = format!("{} at element {i}", scales.iter().nth(i).unwrap_or(&0.0));
            Err(Error::invalid(argument, got, "finite numbers other than 0, none subnormal"))
        }
    }
}

/// Lengths a sequence can have after the call, and what limits them.
struct Bounds {
    least: usize,
    most: (usize, &'static str),
}

impl Bounds {
    fn of(p: &Problem, inputs: &Inputs<'_>) -> Self {
        let first_prompt = p.phase == Phase::FirstPrompt;
        let (slides, rows) = (p.sliding().is_some(), (p.capacity, "rows of present_key"));
        let limits = [
            Some(if slides { (p.total_len, "rows by total_sequence_length") } else { rows }),
            (first_prompt && p.new_len > 0).then_some((p.q_len, "tokens of a first prompt")),
            p.bias.map(|_| (p.total_len, "columns of attention_bias")),
            (p.output_qk != QkOutput::None).then_some((p.total_len, "columns of output_qk")),
            inputs.cos_cache.and_then(|cos| Some((*cos.shape().first()?, "rows of cos_cache"))),
        ];
        let most = limits.into_iter().flatten().min_by_key(|limit| limit.0);
        let padded = first_prompt && !p.slides;
        let least = if padded { p.q_len.min(1) } else { p.q_len };
        Self { least, most: most.unwrap_or_default() }
    }

    /// The length of entry `b`, whose last valid token has index `last`.
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

/// Errs unless the explicit positions of entry `b`'s tokens are rows of cos_cache. Padding may have any position.
fn check_positions(p: &Problem, inputs: &Inputs<'_>, b: usize, length: usize) -> Result<()> {
    let (Some(rotary), Some(Tensor::I64(ids))) = (p.rotary, inputs.position_ids) else {
        return Ok(());
    };
    let tokens = if p.phase == Phase::FirstPrompt { length.min(p.q_len) } else { p.q_len };
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
