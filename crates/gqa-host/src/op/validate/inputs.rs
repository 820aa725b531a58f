//! Reads a call's sizes from the inputs' types and shapes, and checks that they agree.

use super::pattern::{Dim, Pattern};
use super::quantization::check_row_scales;
use crate::op::Shapes;
use gqa_plan::limits::{MAX_HEAD_SIZE, addressable, shape};
use gqa_plan::{Bias, CacheBinding, Layout, QkNorm, Quantization};
use gqa_tensor::{DType, Error, Result, TensorDesc};

/// Head counts.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    /// N
    pub(super) query: usize,
    /// Nk
    pub(super) kv: usize,
}

/// The properties that the query's shape determines; every other input must agree.
pub(super) struct Query {
    pub(super) dtype: DType,
    heads: Heads,
    pub(super) batch: usize,
    /// S
    pub(super) rows: usize,
    pub(super) head_size: usize,
    pub(super) packed: bool,
    layout: Layout,
}

impl Query {
    /// N
    pub(super) fn heads(&self) -> usize {
        self.heads.query
    }

    /// Nk
    pub(super) fn kv_heads(&self) -> usize {
        self.heads.kv
    }

    pub(super) fn of(inputs: &Shapes<'_>, heads: Heads, layout: Layout) -> Result<Self> {
        let TensorDesc { dtype, shape: got } = inputs.query;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid("query", dtype, "float32, float16 or bfloat16"));
        }
        let packed = is_packed(inputs, layout)?;
        let (in_row, what) = match packed {
            true => (heads.query + 2 * heads.kv, "(num_heads + 2 * kv_num_heads)"),
            false => (heads.query, "num_heads"),
        };
        let (batch, rows, width, in_row) = match (layout, got) {
            (Layout::Bsnh, &[batch, rows, width]) => (batch, rows, width, in_row),
            (Layout::Bnsh, &[batch, n, rows, width]) if n == heads.query => (batch, rows, width, 1),
            _ => {
                let heads = match layout {
                    Layout::Bsnh => format!("sequence_length, {what} * head_size"),
                    Layout::Bnsh => {
                        format!("num_heads = {}, sequence_length, head_size", heads.query)
                    }
                };
                let allowed = format!("(batch_size, {heads})");
                return Err(Error::invalid("query", shape(got), allowed));
            }
        };
        if width % in_row != 0 {
            let allowed = format!("a last dimension that is a multiple of {what} = {in_row}");
            return Err(Error::invalid("query", shape(got), allowed));
        }
        let head_size = width / in_row;
        if head_size % 8 != 0 || !(8..=MAX_HEAD_SIZE).contains(&head_size) {
            let allowed = format!("a head_size that is a multiple of 8 from 8 to {MAX_HEAD_SIZE}");
            return Err(Error::invalid(
                "query",
                format!("{}, so head_size = {head_size}", shape(got)),
                allowed,
            ));
        }
        addressable("query", got)?;
        Ok(Self { dtype, heads, batch, rows, head_size, packed, layout })
    }

    /// Checks that the input has query's type and these dimensions.
    fn check(&self, argument: &'static str, got: TensorDesc<'_>, dims: &[Dim]) -> Result<()> {
        Pattern { argument, dtype: self.dtype, why: ", the type of query", dims }.check(got)
    }

    /// Dimensions of key and value.
    fn kv_dims(&self, rows: Dim) -> Vec<Dim> {
        let (batch, heads) = (Dim::Is("batch_size", self.batch), self.heads.kv);
        match self.layout {
            Layout::Bsnh => {
                vec![batch, rows, Dim::Is("kv_num_heads * head_size", heads * self.head_size)]
            }
            Layout::Bnsh => {
                vec![
                    batch,
                    Dim::Is("kv_num_heads", heads),
                    rows,
                    Dim::Is("head_size", self.head_size),
                ]
            }
        }
    }

    /// Rows of key and value.
    pub(super) fn new_rows(&self, inputs: &Shapes<'_>) -> Result<usize> {
        const NAME: &str = "kv_sequence_length";
        let (Some(key), Some(value)) = (inputs.key, inputs.value) else { return Ok(self.rows) };
        let rows = match inputs.past_key {
            Some(_) => Dim::Either(NAME, self.rows, 0),
            None => Dim::Is(NAME, self.rows),
        };
        self.check("key", key, &self.kv_dims(rows))?;
        let rows = key.shape[if self.layout == Layout::Bsnh { 1 } else { 2 }];
        self.check("value", value, &self.kv_dims(Dim::Is(NAME, rows)))?;
        Ok(rows)
    }

    /// Rows of past_key and past_value; 0 where absent.
    pub(super) fn past_rows(
        &self,
        inputs: &Shapes<'_>,
        quantized: Option<Quantization>,
        cache: CacheBinding,
    ) -> Result<usize> {
        const NAME: &str = "past_sequence_length";
        let Some((key, value)) =
            both(("past_key", inputs.past_key), ("past_value", inputs.past_value))?
        else {
            return match cache {
                CacheBinding::Shared => {
                    Err(Error::invalid("past_key", "no input", "the cache that present shares"))
                }
                CacheBinding::Separate | CacheBinding::External => Ok(0),
            };
        };
        let (dtype, why) = match quantized {
            Some(codes) => (codes.dtype(), ", the type of past_key"),
            None => (self.dtype, ", the type of query"),
        };
        let element = match quantized.map_or(1, Quantization::codes_per_element) {
            1 => Dim::Is("head_size", self.head_size),
            codes => Dim::Is("head_size / 2", self.head_size / codes),
        };
        let check = |argument, got, rows| {
            let (batch, heads) =
                (Dim::Is("batch_size", self.batch), Dim::Is("kv_num_heads", self.heads.kv));
            Pattern { argument, dtype, why, dims: &[batch, heads, rows, element] }.check(got)
        };
        check("past_key", key, Dim::Any(NAME))?;
        let rows = key.shape[2];
        check("past_value", value, Dim::Is(NAME, rows))?;
        Ok(rows)
    }

    /// Checks that per-token scales, if the cache has them, have its shape with `rows` rows.
    pub(super) fn check_row_scales(
        &self,
        inputs: &Shapes<'_>,
        quantized: Option<Quantization>,
        rows: usize,
    ) -> Result<()> {
        let [batch, heads] =
            [Dim::Is("batch_size", self.batch), Dim::Is("kv_num_heads", self.heads.kv)];
        let dims = [batch, heads, Dim::Is("past_sequence_length", rows)];
        check_row_scales(quantized, [inputs.k_scale, inputs.v_scale], dims)
    }

    /// One length per batch entry, in any shape.
    pub(super) fn check_seqlens_k(&self, inputs: &Shapes<'_>) -> Result<()> {
        let TensorDesc { dtype, shape: got } = inputs.seqlens_k;
        if dtype != DType::I32 {
            return Err(Error::invalid("seqlens_k", dtype, "int32"));
        }
        let b = self.batch;
        let mut longer = got.iter().filter(|&&n| n != 1);
        let fits = match b {
            1 => longer.next().is_none(),
            _ => longer.next() == Some(&b) && longer.next().is_none(),
        };
        if fits && !got.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(
            "seqlens_k",
            shape(got),
            format!("(batch_size = {b}), or with further dimensions of 1"),
        ))
    }

    /// Rows of cos_cache and sin_cache, and their length.
    pub(super) fn rotary_caches(&self, inputs: &Shapes<'_>) -> Result<Option<(usize, usize)>> {
        let Some((cos, sin)) =
            both(("cos_cache", inputs.cos_cache), ("sin_cache", inputs.sin_cache))?
        else {
            return Ok(None);
        };
        if self.head_size % 16 != 0 {
            let got = format!("a tensor, with head_size = {}", self.head_size);
            return Err(Error::invalid(
                "cos_cache",
                got,
                "no input, or a head_size that is a multiple of 16",
            ));
        }
        let positions = Dim::AtLeast("total_sequence_length", inputs.total_sequence_length);
        self.check("cos_cache", cos, &[positions, Dim::Any("rotary_dim / 2")])?;
        let (positions, half) = (cos.shape[0], cos.shape[1]);
        let largest = self.head_size / 2;
        if half % 8 != 0 || !(8..=largest).contains(&half) {
            let allowed = format!("rotary_dim / 2 a multiple of 8 from 8 to {largest}");
            return Err(Error::invalid("cos_cache", shape(cos.shape), allowed));
        }
        let dims = [Dim::Is("rows of cos_cache", positions), Dim::Is("rotary_dim / 2", half)];
        self.check("sin_cache", sin, &dims)?;
        Ok(Some((positions, half)))
    }

    /// Row length of position_ids.
    pub(super) fn position_ids(&self, inputs: &Shapes<'_>) -> Result<Option<usize>> {
        let Some(ids) = inputs.position_ids else { return Ok(None) };
        let dims = [Dim::Is("batch_size", self.batch), Dim::AtLeast("sequence_length", self.rows)];
        Pattern { argument: "position_ids", dtype: DType::I64, why: "", dims: &dims }.check(ids)?;
        Ok(Some(ids.shape[1]))
    }

    /// Broadcasts of attention_bias.
    pub(super) fn bias(&self, inputs: &Shapes<'_>) -> Result<Option<Bias>> {
        let Some(bias) = inputs.attention_bias else { return Ok(None) };
        let dims = [
            Dim::Either("batch_size", self.batch, 1),
            Dim::Either("num_heads", self.heads.query, 1),
            Dim::Is("sequence_length", self.rows),
            Dim::Is("total_sequence_length", inputs.total_sequence_length),
        ];
        self.check("attention_bias", bias, &dims)?;
        Ok(Some(Bias {
            batch: bias.shape[0] != self.batch,
            head: bias.shape[1] != self.heads.query,
            row: false,
            columns: inputs.total_sequence_length,
            boolean: false,
        }))
    }

    /// QK-norm, where its weights are given.
    pub(super) fn qk_norm(&self, inputs: &Shapes<'_>, norm: QkNorm) -> Result<Option<QkNorm>> {
        const NAMES: [&str; 2] = ["q_norm_weight", "k_norm_weight"];
        let weights = both((NAMES[0], inputs.q_norm_weight), (NAMES[1], inputs.k_norm_weight))?;
        let Some((query, key)) = weights else { return Ok(None) };
        for (argument, weight) in NAMES.into_iter().zip([query, key]) {
            self.check(argument, weight, &[Dim::Is("head_size", self.head_size)])?;
        }
        Ok(Some(norm))
    }

    /// Whether there is a head_sink.
    pub(super) fn head_sink(&self, inputs: &Shapes<'_>) -> Result<bool> {
        let dims = [Dim::Is("num_heads", self.heads.query)];
        inputs
            .head_sink
            .map(|sink| self.check("head_sink", sink, &dims))
            .transpose()
            .map(|sink| sink.is_some())
    }
}

/// Whether query holds keys and values too.
fn is_packed(inputs: &Shapes<'_>, layout: Layout) -> Result<bool> {
    match both(("key", inputs.key), ("value", inputs.value))? {
        Some(_) => Ok(false),
        None if layout == Layout::Bsnh => Ok(true),
        None => Err(Error::invalid(
            "key",
            "no input",
            "key and value: packed QKV is (batch, sequence, heads) only",
        )),
    }
}

/// An optional input under its name.
pub(in crate::op) type Named<'a> = (&'static str, Option<TensorDesc<'a>>);

/// Two inputs that come together or not at all.
pub(in crate::op) fn both<'a>(
    first: Named<'a>,
    second: Named<'a>,
) -> Result<Option<(TensorDesc<'a>, TensorDesc<'a>)>> {
    let missing = |argument, given| {
        Err(Error::invalid(argument, "no input", format!("a tensor, as {given} is given")))
    };
    match (first.1, second.1) {
        (Some(a), Some(b)) => Ok(Some((a, b))),
        (None, None) => Ok(None),
        (Some(_), None) => missing(second.0, first.0),
        (None, Some(_)) => missing(first.0, second.0),
    }
}
