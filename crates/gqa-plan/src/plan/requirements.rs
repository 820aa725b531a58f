//! Requirements that several families share.

use super::decision::Rejection;
use crate::problem::{Alignment, CacheBinding, Pages, Problem, QkOutput};
use gqa_kernels::registry::{Entry, Output};

/// Flash attention without a bias.
pub(super) fn flash(p: &Problem) -> Result<(), Rejection> {
    match p.bias {
        None => any_flash(p),
        Some(_) => Err(Rejection::Argument { name: "attention_bias" }),
    }
}

/// Flash attention with a bias or a mask.
pub(super) fn masked_flash(p: &Problem) -> Result<(), Rejection> {
    /// Columns of a mask whose tiles are counted in 32 bits.
    const COLUMNS: usize = 1 << 24;
    match p.bias {
        Some(bias) if bias.columns > COLUMNS => Err(Rejection::TooLarge),
        Some(_) => any_flash(p),
        None => Err(Rejection::NoMask),
    }
}

/// A bias or a mask whose rows the TMA takes.
pub(super) fn mask_of_vectors(p: &Problem) -> Result<(), Rejection> {
    match p.bias.map(|bias| bias.row_bytes(p.dtype)) {
        Some(got) if got % Problem::VECTOR_BYTES != 0 => Err(Rejection::MaskRows { got }),
        _ => Ok(()),
    }
}

/// Flash attention has no score outputs, and only GroupQueryAttention's positions, windows and head
/// sizes.
fn any_flash(p: &Problem) -> Result<(), Rejection> {
    if p.total_len == 0 {
        return Err(Rejection::NoKeys);
    }
    if p.output_qk != QkOutput::None {
        return Err(Rejection::Argument { name: "output_qk" });
    }
    if let Some(got) = [p.head_size, p.v_head_size].into_iter().find(|size| size % 8 != 0) {
        return Err(Rejection::Vectors { got });
    }
    if p.right_window.is_some() || p.window.is_some() && !p.causal {
        return Err(Rejection::Window);
    }
    match p.alignment {
        Alignment::Phase => Ok(()),
        got => Err(Rejection::Alignment { got }),
    }
}

/// A quantized cache that the kernel appends to and reads in place.
pub(super) fn shared_and_quantized(p: &Problem) -> Result<(), Rejection> {
    match (p.quantized, p.cache) {
        (None, _) => Err(Rejection::NotQuantized),
        (Some(_), CacheBinding::Shared) => Ok(()),
        (Some(_), _) => Err(Rejection::NotShared),
    }
}

/// A quantized cache that TMA can load, for kernels that apply key scales to scores.
pub(super) fn quantized_vectors(p: &Problem) -> Result<(), Rejection> {
    if p.quantized.is_none() {
        return Err(Rejection::NotQuantized);
    }
    if p.softcap.is_some() {
        return Err(Rejection::Argument { name: "softcap" });
    }
    let [.., width] = p.key_cache_shape(0);
    match width * p.key_cache_dtype().size() % Problem::VECTOR_BYTES {
        0 => Ok(()),
        _ => Err(Rejection::OtherHeadSize { got: p.head_size }),
    }
}

/// Scales that are the same for many rows.
pub(super) fn no_row_scales(p: &Problem) -> Result<(), Rejection> {
    if p.has_row_scales() { Err(Rejection::RowScales) } else { Ok(()) }
}

/// Blocks of a paged cache that are multiples of a tile piece. Of a cache without blocks there is
/// nothing to load.
pub(super) fn blocks_of(p: &Problem, need: u32) -> Result<(), Rejection> {
    match p.pages {
        Some(Pages { blocks: 0, .. }) => Err(Rejection::NoKeys),
        Some(Pages { consecutive: true, .. }) => Err(Rejection::Consecutive),
        Some(Pages { block_size: got, .. }) if !got.is_power_of_two() || got < need as usize => {
            Err(Rejection::BlockSize { got, need })
        }
        _ => Ok(()),
    }
}

/// No kernel mixes element types.
pub(super) fn one_type(p: &Problem) -> Result<(), Rejection> {
    match p.v_dtype == p.dtype {
        true => Ok(()),
        false => Err(Rejection::Values { dtype: p.v_dtype, size: p.v_head_size }),
    }
}

/// Output in the element type.
pub(super) fn narrow_output(p: &Problem) -> Result<(), Rejection> {
    match output(p) {
        Output::Element => Ok(()),
        _ => Err(Rejection::OutputType { got: p.out_dtype }),
    }
}

/// Output that a forced kernel writes.
pub(super) fn output_of(forced: Option<&Entry>, p: &Problem) -> Result<(), Rejection> {
    match forced {
        Some(forced) if !writes(forced, p) => Err(Rejection::OutputType { got: p.out_dtype }),
        _ => Ok(()),
    }
}

/// The type of the call's output.
pub(super) fn output(p: &Problem) -> Output {
    match (p.quantizes_output(), p.widens_output()) {
        (true, _) => Output::E4M3,
        (false, true) => Output::F32,
        (false, false) => Output::Element,
    }
}

/// Whether the kernel writes output in the call's type.
pub(super) fn writes(entry: &Entry, p: &Problem) -> bool {
    entry.outputs.contains(&output(p))
}
