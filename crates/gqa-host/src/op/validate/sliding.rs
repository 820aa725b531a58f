//! What a rolling KV cache asks of a call.

use super::Rows;
use crate::op::{GroupQueryAttention, Shapes};
use gqa_plan::limits::shape;
use gqa_plan::{Problem, Quantization};
use gqa_tensor::{Error, Result};

impl GroupQueryAttention {
    /// Checks that sliding_window_cache agrees with the other attributes and inputs.
    pub(super) fn check_sliding(
        &self,
        inputs: &Shapes<'_>,
        quantized: Option<Quantization>,
        rows: Rows,
    ) -> Result<()> {
        if !self.sliding_window_cache {
            return Ok(());
        }
        let refuse = |argument, got: String, allowed: String| {
            Err(Error::invalid(argument, got, format!("{allowed}, as sliding_window_cache is 1")))
        };
        let Some(window) = usize::try_from(self.local_window_size).ok().filter(|&size| size > 0)
        else {
            let got = self.local_window_size.to_string();
            return refuse("local_window_size", got, "1 or more".to_owned());
        };
        if self.qk_output != 0 {
            return refuse("qk_output", self.qk_output.to_string(), "0".to_owned());
        }
        let Some(past) = inputs.past_key else {
            return refuse("past_key", "no input".to_owned(), "a tensor".to_owned());
        };
        if rows.past < window {
            let allowed = format!("local_window_size = {window} rows or more");
            return refuse("past_key", shape(past.shape), allowed);
        }
        if rows.new < rows.query {
            let allowed = format!("kv_sequence_length = {}", rows.query);
            return refuse("key", "kv_sequence_length = 0".to_owned(), allowed);
        }
        // Rows move as vectors.
        let width = past.shape.last().copied().unwrap_or_default() * past.dtype.size();
        match quantized {
            Some(_) if !width.is_multiple_of(Problem::VECTOR_BYTES) => refuse(
                "past_key",
                format!("{}, rows of {width} bytes", shape(past.shape)),
                format!("rows of a multiple of {} bytes", Problem::VECTOR_BYTES),
            ),
            _ => Ok(()),
        }
    }
}
