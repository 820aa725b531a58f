//! Calls over keys and values that are all there are.

use super::{Layer, count};
use crate::op::{Attention, AttentionShapes};
use crate::{
    Alignment, Bias, DType, Error, Phase, Problem, ProblemFields, Result, Strided, TensorDesc,
};

/// Attention to keys and values that are there already and stay where they are: `query` has shape
/// (batch, rows, heads · size), `key` and `value` (batch, keys, KV heads · size), with any
/// [`strides`](Self::strides). There is no KV cache, and nothing rotates.
///
/// The rows of a sequence are its last ones: row `i` of `n`, over `m` keys, stands at `i + m - n`.
/// The int32 tensor `seqlens_k`, of shape (batch), has the index of each sequence's last key. Rows
/// that see no key are 0, and their log-sum-exp is -inf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct External {
    batch: usize,
    rows: usize,
    keys: usize,
    shortest: usize,
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
            right_window: None,
            bias: None,
            bias_columns: None,
            strided: Strided { query: None, key: None, value: None, output: None },
            lse: false,
        }
    }

    /// Sequences may be as short as that, as `seqlens_k` says.
    pub const fn shortest(self, keys: usize) -> Self {
        Self { shortest: keys, ..self }
    }

    /// A query of a bidirectional layer sees at most so many keys behind its own position.
    pub const fn right_window(self, keys: usize) -> Self {
        Self { right_window: Some(keys), ..self }
    }

    /// `attention_bias`, of shape (batch or 1, heads or 1, rows, keys), is added to scores. It is
    /// of the layer's element type.
    pub const fn bias(self, per_sequence: bool, per_head: bool) -> Self {
        Self { bias: Some(ExternalBias { per_sequence, per_head, boolean: false }), ..self }
    }

    /// The same tensor, of booleans: keys are hidden where it is false.
    pub const fn mask(self, per_sequence: bool, per_head: bool) -> Self {
        Self { bias: Some(ExternalBias { per_sequence, per_head, boolean: true }), ..self }
    }

    /// Rows of that tensor have so many elements, `keys` or more; those behind the keys are not
    /// looked at. The fastest kernels want rows of a multiple of 16 bytes.
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

    /// In the terms that flash attention knows, wherever rows stand where they do in these.
    fn alignment(&self) -> (Phase, Alignment) {
        match self.rows {
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
    /// Checks a call over keys and values that are all there are.
    ///
    /// # Errors
    ///
    /// As [`dense`](Self::dense), and where the layer rotates, normalizes or has a quantized KV
    /// cache.
    pub fn external(&self, call: External) -> Result<Problem> {
        self.check_external()?;
        let External { batch, rows, keys, .. } = call;
        let heads = self.heads;
        let query = [batch, rows, heads.query.saturating_mul(heads.size)];
        let key = [batch, keys, heads.kv.saturating_mul(heads.size)];
        let extent = |own, n| if own { n } else { 1 };
        let mask = call.bias.map(|bias| {
            let (sequences, heads) =
                (extent(bias.per_sequence, batch), extent(bias.per_head, heads.query));
            (if bias.boolean { DType::Bool } else { self.dtype }, [sequences, heads, rows, keys])
        });
        let mut operator = Attention::new()
            .num_heads(count(heads.query), count(heads.kv))
            .is_causal(self.causal.into())
            .softcap(self.softcap.unwrap_or_default())
            .left_window_size(self.window.map_or(-1, |keys| count(keys).saturating_sub(1)))
            .right_window_size(call.right_window.map_or(-1, count));
        if let Some(scale) = self.scale {
            operator = operator.scale(scale);
        }
        let problem = operator.problem_from_shapes(&AttentionShapes {
            q: self.desc(&query),
            k: self.desc(&key),
            v: self.desc(&key),
            attn_mask: mask.as_ref().map(|(dtype, shape)| TensorDesc { dtype: *dtype, shape }),
            past_key: None,
            past_value: None,
            nonpad_kv_seqlen: None,
        })?;
        let columns = call.bias_columns.unwrap_or(keys);
        if columns < keys {
            return Err(Error::invalid("bias_columns", columns, format!("{keys} keys or more")));
        }
        let (phase, alignment) = call.alignment();
        let fields = ProblemFields {
            phase,
            alignment,
            sink: self.sink,
            bias: problem.bias.map(|bias| Bias { columns, ..bias }),
            lse: call.lse,
            ..(*problem).clone()
        };
        Problem::new(fields)?.with_strides(call.strided)
    }

    /// Errs where the layer changes keys or values, and where no kernel has its element type.
    fn check_external(&self) -> Result<()> {
        let changes = [
            ("rope", self.rope.is_some()),
            ("qk_norm", self.qk_norm.is_some()),
            ("quantized", self.quantized.is_some()),
        ];
        if let Some((argument, _)) = changes.into_iter().find(|(_, has)| *has) {
            let allowed = "none, as keys and values are read where they are";
            return Err(Error::invalid(argument, "one", allowed));
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::BF16 => Ok(()),
            other => Err(Error::invalid("query", other, "float32, float16 or bfloat16")),
        }
    }
}
