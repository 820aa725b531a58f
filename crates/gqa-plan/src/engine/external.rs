//! Calls over given keys and values, without a KV cache.

use super::Layer;
use crate::problem::{Alignment, Bias, CacheBinding, Phase, Problem, ProblemFields, Strided};
use gqa_tensor::{Error, Result};

/// Attention over given keys and values, which stay in place: `query` has shape (batch, rows, heads
/// · size), `key` and `value` (batch, keys, KV heads · size), with any [`strides`](Self::strides).
/// There is no KV cache and no RoPE. A [latent](Layer::latent) layer has no `value`.
///
/// The query rows are the last positions of a sequence: row `i` of `n`, over `m` keys, has position
/// `i + m - n`. The int32 tensor `seqlens_k`, of shape (batch), has the index of each sequence's
/// last key. The output of rows without a visible key is 0, and their log-sum-exp is -inf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct External {
    batch: usize,
    rows: usize,
    keys: usize,
    shortest: usize,
    value_size: Option<usize>,
    padded: bool,
    right_window: Option<usize>,
    bias: Option<ExternalBias>,
    bias_columns: Option<usize>,
    strided: Strided,
    lse: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExternalBias {
    per_sequence: bool,
    per_head: bool,
    boolean: bool,
}

impl External {
    /// `rows` query rows of each of `batch` sequences, all of `keys` keys.
    pub const fn new(batch: usize, rows: usize, keys: usize) -> Self {
        Self {
            batch,
            rows,
            keys,
            shortest: keys,
            value_size: None,
            padded: false,
            right_window: None,
            bias: None,
            bias_columns: None,
            strided: Strided::NONE,
            lse: false,
        }
    }

    /// Sequences may have as few keys as this; `seqlens_k` has the actual numbers.
    pub const fn shortest(self, keys: usize) -> Self {
        Self { shortest: keys, ..self }
    }

    /// Heads of `value` and `output` have this many elements, rather than as many as the layer's
    /// queries and keys: 128 beside 192 in prefill of multi-head latent attention.
    pub const fn value_size(self, size: usize) -> Self {
        Self { value_size: Some(size), ..self }
    }

    /// The int32 tensor `query_seqlens`, of shape (batch), has the number of tokens of each
    /// sequence, at most the number of its keys. The rows after them are padding, whose output is
    /// 0. The last token has the position of the last key.
    pub const fn padded(self) -> Self {
        Self { padded: true, ..self }
    }

    /// In a bidirectional layer, a query attends to at most this many keys after its own position.
    pub const fn right_window(self, keys: usize) -> Self {
        Self { right_window: Some(keys), ..self }
    }

    /// `attention_bias`, of shape (batch or 1, heads or 1, rows, keys), is added to scores. It is
    /// of the layer's element type.
    pub const fn bias(self, per_sequence: bool, per_head: bool) -> Self {
        Self { bias: Some(ExternalBias { per_sequence, per_head, boolean: false }), ..self }
    }

    /// The same tensor as a boolean mask: keys are hidden where it is false.
    pub const fn mask(self, per_sequence: bool, per_head: bool) -> Self {
        Self { bias: Some(ExternalBias { per_sequence, per_head, boolean: true }), ..self }
    }

    /// Rows of that tensor have this many elements, `keys` or more; the rest is ignored. The
    /// fastest kernels need rows of a multiple of 16 bytes.
    pub const fn bias_columns(self, columns: usize) -> Self {
        Self { bias_columns: Some(columns), ..self }
    }

    /// Strides of the tensors that are not contiguous: multiples of 16 bytes.
    pub const fn strides(self, strided: Strided) -> Self {
        Self { strided, ..self }
    }

    /// `lse`, float32 of shape (batch, heads, rows), receives natural logarithms of the softmax
    /// denominators.
    pub const fn log_sum_exp(self) -> Self {
        Self { lse: true, ..self }
    }

    /// The positions in the form that flash attention kernels support, where that is equivalent.
    fn alignment(&self) -> (Phase, Alignment) {
        match self.rows {
            _ if self.padded => (Phase::PaddedChunk, Alignment::Phase),
            rows if rows == self.keys && self.shortest >= rows => {
                (Phase::FirstPrompt, Alignment::Phase)
            }
            1 => (Phase::TokenGeneration, Alignment::Phase),
            rows if self.shortest >= rows => (Phase::SubsequentPrompt, Alignment::Phase),
            _ => (Phase::SubsequentPrompt, Alignment::End),
        }
    }
}

impl Layer {
    /// Checks a call over given keys and values.
    ///
    /// # Errors
    ///
    /// As [`dense`](Self::dense), and where the layer has RoPE, QK-norm or a quantized KV cache.
    pub fn external(&self, call: External) -> Result<Problem> {
        let External { batch, rows, keys, .. } = call;
        let right_window = call.right_window.filter(|_| !self.causal);
        let (phase, alignment) = call.alignment();
        let fields = self.fields("Attention", 1)?;
        self.check_external()?;
        let v_head_size = match call.value_size {
            Some(0) => return Err(Error::invalid("value_size", 0, "1 or more")),
            Some(_) if self.latent.is_some() => {
                return Err(Error::invalid("value_size", "one", "none, in a latent layer"));
            }
            size => size.unwrap_or(fields.v_head_size),
        };
        Problem::new(ProblemFields {
            v_head_size,
            batch,
            q_len: rows,
            new_len: keys,
            total_len: keys,
            capacity: keys,
            phase,
            alignment,
            cache: CacheBinding::External,
            strided: self.strided(call.strided),
            window: self.window,
            // A token that sees none behind it is causal.
            causal: self.causal || right_window == Some(0),
            right_window: right_window.filter(|&keys| keys > 0),
            bias: call.bias_of_rows(self.heads.query)?,
            lse: call.lse,
            ..fields
        })
    }

    /// Errs where the layer's KV cache is quantized: there is none.
    fn check_external(&self) -> Result<()> {
        match self.quantized {
            Some(_) => {
                let allowed = "none, as keys and values are read where they are";
                Err(Error::invalid("quantized", "one", allowed))
            }
            None => Ok(()),
        }
    }
}

impl External {
    /// The bias or mask, whose rows have as many elements as keys, or more.
    fn bias_of_rows(&self, heads: usize) -> Result<Option<Bias>> {
        let columns = self.bias_columns.unwrap_or(self.keys);
        if columns < self.keys {
            let allowed = format!("{} keys or more", self.keys);
            return Err(Error::invalid("bias_columns", columns, allowed));
        }
        Ok(self.bias.map(|bias| Bias {
            batch: !bias.per_sequence && self.batch != 1,
            head: !bias.per_head && heads != 1,
            row: false,
            columns,
            boolean: bias.boolean,
        }))
    }
}
