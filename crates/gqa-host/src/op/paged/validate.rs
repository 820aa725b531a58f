//! Checks PagedAttention's attributes and inputs, and makes a [`Problem`] of them.

use super::quantization::quantization;
use super::{LATENT, PagedAttention, PagedShapes, SEPARATE};
use crate::op::QuantType;
use crate::op::validate::{
    Dim, Pattern, both, check_epsilon, check_factors, check_row_scales, head_count, scale,
};
use gqa_plan::limits::{MAX_HEAD_SIZE, addressable, check_rows, shape};
use gqa_plan::{
    CacheBinding, Pages, Phase, Problem, ProblemFields, QkNorm, Quantization, Rotary, Sink,
};
use gqa_tensor::{DType, Error, Result, TensorDesc};

/// What the tensors' shapes fix.
struct Sizes {
    dtype: DType,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    v_head_size: usize,
    tokens: usize,
    batch: usize,
    packed: bool,
    quantized: Option<Quantization>,
}

impl PagedAttention {
    /// Checks types and shapes, without contents.
    ///
    /// # Errors
    ///
    /// As [`problem`](Self::problem), except for contents.
    pub fn problem_from_shapes(&self, inputs: &PagedShapes<'_>) -> Result<Problem> {
        self.check_numbers()?;
        self.check_layout(inputs)?;
        let sizes = self.sizes(inputs)?;
        let pages = sizes.pages(inputs)?;
        let rows = pages.per_sequence * pages.block_size;
        let bound = |bound: usize, most: usize| if bound == 0 { most } else { bound.min(most) };
        let q_len = bound(inputs.bounds.query_rows, sizes.tokens);
        let total_len = bound(inputs.bounds.keys, rows).max(1);
        sizes.check_rows(pages, q_len, total_len)?;
        Problem::new(ProblemFields {
            batch: sizes.batch,
            q_heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_size: sizes.head_size,
            v_head_size: sizes.v_head_size,
            latent: self.is_latent(),
            q_len,
            new_len: q_len,
            total_len,
            past_capacity: total_len,
            capacity: total_len,
            phase: if q_len == 1 { Phase::TokenGeneration } else { Phase::SubsequentPrompt },
            cache: CacheBinding::Shared,
            pages: Some(pages),
            packed: sizes.packed,
            quantized: sizes.quantized,
            qk_norm: sizes.qk_norm(inputs, self.qk_norm_epsilon)?,
            rotary: self.rotary(inputs, &sizes)?,
            scale: scale(Some(self.scale).filter(|&scale| scale != 0.0), sizes.head_size),
            softcap: (self.softcap > 0.0).then_some(self.softcap),
            window: usize::try_from(self.local_window_size).ok().filter(|&size| size < total_len),
            causal: self.is_causal == 1,
            sink: if sizes.head_sink(inputs)? { Sink::PerHead } else { Sink::None },
            lse: self.lse,
            ..ProblemFields::plain("PagedAttention", sizes.dtype)
        })
    }

    fn check_numbers(&self) -> Result<()> {
        check_factors(self.scale, self.softcap)?;
        check_epsilon("qk_norm_epsilon", self.qk_norm_epsilon)?;
        if !(0..=1).contains(&self.is_causal) {
            return Err(Error::invalid("is_causal", self.is_causal, "0 or 1"));
        }
        if self.local_window_size == 0 {
            return Err(Error::invalid("local_window_size", 0, "1 or more, or -1 for no window"));
        }
        Ok(())
    }

    fn sizes(&self, inputs: &PagedShapes<'_>) -> Result<Sizes> {
        let heads = head_count("num_heads", self.num_heads)?;
        let kv_heads = head_count("kv_num_heads", self.kv_num_heads)?;
        if heads % kv_heads != 0 {
            let allowed = format!("a multiple of kv_num_heads = {kv_heads}");
            return Err(Error::invalid("num_heads", heads, allowed));
        }
        let TensorDesc { dtype, shape: got } = inputs.query;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid("query", dtype, "float32, float16 or bfloat16"));
        }
        let packed = match self.is_latent() {
            true => false,
            false => both(("key", inputs.key), ("value", inputs.value))?.is_none(),
        };
        let (in_row, what) = match packed {
            true => (heads + 2 * kv_heads, "(num_heads + 2 * kv_num_heads)"),
            false => (heads, "num_heads"),
        };
        let (tokens, width) = match *got {
            [tokens, width] => (tokens, width),
            _ => {
                let allowed = format!("(num_tokens, {what} * head_size)");
                return Err(Error::invalid("query", shape(got), allowed));
            }
        };
        let head_size = width / in_row;
        if width % in_row != 0 || head_size % 8 != 0 || !(8..=MAX_HEAD_SIZE).contains(&head_size) {
            let allowed = format!(
                "a last dimension of {what} = {in_row} times a head_size that is a multiple of 8 from 8 to {MAX_HEAD_SIZE}"
            );
            return Err(Error::invalid("query", shape(got), allowed));
        }
        addressable("query", got)?;
        let TensorDesc { dtype: lengths, shape: past } = inputs.past_seqlens;
        addressable("past_seqlens", past)?;
        let batch = match *past {
            [batch] if batch > 0 || tokens == 0 => batch,
            _ => return Err(Error::invalid("past_seqlens", shape(past), "(batch_size >= 1)")),
        };
        if lengths != DType::I32 {
            return Err(Error::invalid("past_seqlens", lengths, "int32"));
        }
        let quantized = quantization(self, inputs, kv_heads, head_size)?;
        let v_head_size = self.value_size(head_size)?;
        let sizes = Sizes {
            dtype,
            heads,
            kv_heads,
            head_size,
            v_head_size,
            tokens,
            batch,
            packed,
            quantized,
        };
        let width = Dim::Is("kv_num_heads * head_size", kv_heads * head_size);
        let dims = [Dim::Is("num_tokens", tokens), width];
        for (argument, rows) in [("key", inputs.key), ("value", inputs.value)] {
            rows.map_or(Ok(()), |rows| sizes.check(argument, rows, &dims))?;
        }
        Ok(sizes)
    }

    /// Errs where a call has tensors that its layout of the cache lacks, or lacks some.
    fn check_layout(&self, inputs: &PagedShapes<'_>) -> Result<()> {
        let layout = &self.kv_cache_layout;
        let missing = |argument| {
            Error::invalid(
                argument,
                "no input",
                format!("a tensor, as kv_cache_layout is {layout}"),
            )
        };
        match &layout[..] {
            SEPARATE if self.v_head_size != 0 => {
                let allowed = "0, as kv_cache_layout is SEPARATE";
                Err(Error::invalid("v_head_size", self.v_head_size, allowed))
            }
            SEPARATE if inputs.value_cache.is_none() => Err(missing("value_cache")),
            SEPARATE => Ok(()),
            LATENT if inputs.key.is_none() => Err(missing("key")),
            LATENT => self.check_latent(inputs),
            _ => {
                let allowed = format!("{SEPARATE:?} or {LATENT:?}");
                Err(Error::invalid("kv_cache_layout", format!("{layout:?}"), allowed))
            }
        }
    }

    /// Errs where a call in the latent layout has what only others have.
    fn check_latent(&self, inputs: &PagedShapes<'_>) -> Result<()> {
        let but = |what: &str| format!("{what}, as kv_cache_layout is LATENT");
        if self.kv_num_heads != 1 {
            return Err(Error::invalid("kv_num_heads", self.kv_num_heads, but("1")));
        }
        for (name, how) in
            [("k_quant_type", self.k_quant_type), ("v_quant_type", self.v_quant_type)]
        {
            if how != QuantType::None {
                return Err(Error::invalid(name, how, but("NONE")));
            }
        }
        if !self.v_cache_dtype.is_empty() {
            let got = format!("{:?}", self.v_cache_dtype);
            return Err(Error::invalid("v_cache_dtype", got, but("\"\"")));
        }
        let absent = [
            ("value", inputs.value),
            ("value_cache", inputs.value_cache),
            ("v_scale", inputs.v_scale),
            ("q_norm_weight", inputs.q_norm_weight),
            ("k_norm_weight", inputs.k_norm_weight),
        ];
        match absent.into_iter().find(|(_, tensor)| tensor.is_some()) {
            Some((name, _)) => Err(Error::invalid(name, "a tensor", but("no input"))),
            None => Ok(()),
        }
    }

    /// The head size of values.
    fn value_size(&self, head_size: usize) -> Result<usize> {
        let size = match usize::try_from(self.v_head_size) {
            Ok(0) => return Ok(head_size),
            Ok(size) if size % 8 == 0 && size <= head_size => size,
            _ => {
                let allowed = format!("0, or a multiple of 8 up to head_size = {head_size}");
                return Err(Error::invalid("v_head_size", self.v_head_size, allowed));
            }
        };
        if size != head_size && self.scale == 0.0 {
            let allowed = format!(
                "a scale other than 0, as v_head_size = {size} is not head_size = {head_size}"
            );
            return Err(Error::invalid("scale", self.scale, allowed));
        }
        Ok(size)
    }

    fn rotary(&self, inputs: &PagedShapes<'_>, sizes: &Sizes) -> Result<Option<Rotary>> {
        let caches = both(("cos_cache", inputs.cos_cache), ("sin_cache", inputs.sin_cache))?;
        let Some((cos, sin)) = caches else {
            let allowed = "cos_cache and sin_cache, which do_rotary = 1 needs";
            return match self.do_rotary {
                true => Err(Error::invalid("cos_cache", "no input", allowed)),
                false => Ok(None),
            };
        };
        // A sequence need not fill its blocks.
        let positions = Dim::AtLeast("max_positions", sizes.tokens.min(1));
        sizes.check("cos_cache", cos, &[positions, Dim::Any("rotary_dim / 2")])?;
        let (max_positions, half) = (cos.shape[0], cos.shape[1]);
        let largest = sizes.head_size / 2;
        if half % 8 != 0 || !(8..=largest).contains(&half) {
            let allowed = format!("rotary_dim / 2 a multiple of 8 from 8 to {largest}");
            return Err(Error::invalid("cos_cache", shape(cos.shape), allowed));
        }
        let dims = [Dim::Is("rows of cos_cache", max_positions), Dim::Is("rotary_dim / 2", half)];
        sizes.check("sin_cache", sin, &dims)?;
        if !self.do_rotary {
            return Ok(None);
        }
        let (dim, interleaved) = (2 * half, self.rotary_interleaved);
        let most = sizes.head_size - dim;
        let offset = usize::try_from(self.rotary_offset).ok();
        let offset =
            offset.filter(|offset| offset % 8 == 0 && *offset <= most).ok_or_else(|| {
                let allowed = format!("a multiple of 8 from 0 to head_size - rotary_dim = {most}");
                Error::invalid("rotary_offset", self.rotary_offset, allowed)
            })?;
        Ok(Some(Rotary { dim, offset, interleaved, max_positions, explicit: None }))
    }
}

impl Sizes {
    /// Errs where rows cannot be counted.
    fn check_rows(&self, pages: Pages, q_len: usize, total_len: usize) -> Result<()> {
        // An upper bound on the row tiles of all sequences: the last tile of each may be partly
        // filled.
        check_rows("query", &[self.tokens + self.batch, self.heads])?;
        check_rows("query", &[self.batch, self.heads, q_len])?;
        check_rows("block_table", &[self.batch, pages.per_sequence])?;
        check_rows("block_table", &[self.batch, self.kv_heads, total_len])
    }

    fn check(&self, argument: &'static str, got: TensorDesc<'_>, dims: &[Dim]) -> Result<()> {
        Pattern { argument, dtype: self.dtype, why: ", the type of query", dims }.check(got)
    }

    /// A pattern for a cache, which may hold quantized values.
    fn check_cache(
        &self,
        argument: &'static str,
        got: TensorDesc<'_>,
        [blocks, rows]: [Dim; 2],
    ) -> Result<()> {
        let (dtype, why) = match self.quantized {
            None => (self.dtype, ", the type of query"),
            Some(quantized) => (quantized.dtype(), ", the type of key_cache"),
        };
        let width = match self.quantized.map_or(1, Quantization::codes_per_element) {
            1 => Dim::Is("head_size", self.head_size),
            codes => Dim::Is("head_size / 2", self.head_size / codes),
        };
        let dims = [blocks, rows, Dim::Is("kv_num_heads", self.kv_heads), width];
        Pattern { argument, dtype, why, dims: &dims }.check(got)
    }

    /// The cache's blocks, and the tensors that assign them.
    fn pages(&self, inputs: &PagedShapes<'_>) -> Result<Pages> {
        // Without tokens nothing is looked up.
        let least = |name| Dim::AtLeast(name, self.tokens.min(1));
        let any = [least("num_blocks"), least("block_size")];
        self.check_cache("key_cache", inputs.key_cache, any)?;
        let (blocks, block_size) = (inputs.key_cache.shape[0], inputs.key_cache.shape[1]);
        let of_key = [Dim::Is("num_blocks", blocks), Dim::Is("block_size", block_size)];
        inputs
            .value_cache
            .map_or(Ok(()), |values| self.check_cache("value_cache", values, of_key))?;
        let heads = Dim::Is("kv_num_heads", self.kv_heads);
        let [of_blocks, of_rows] = of_key;
        let given = [inputs.k_scale, inputs.v_scale];
        check_row_scales(self.quantized, given, [of_blocks, of_rows, heads])?;
        check_rows("key_cache", &[blocks, block_size, self.kv_heads])?;
        let int32 = |argument, got, dims: &[Dim]| {
            Pattern { argument, dtype: DType::I32, why: "", dims }.check(got)
        };
        let starts = [Dim::Is("batch_size + 1", self.batch + 1)];
        int32("cumulative_sequence_length", inputs.cumulative_sequence_length, &starts)?;
        let dims = [Dim::Is("batch_size", self.batch), least("max_blocks_per_sequence")];
        int32("block_table", inputs.block_table, &dims)?;
        if let Some(slots) = inputs.slot_mapping {
            int32("slot_mapping", slots, &[Dim::Is("num_tokens", self.tokens)])?;
        }
        Ok(Pages {
            tokens: self.tokens,
            blocks,
            block_size,
            per_sequence: inputs.block_table.shape[1],
            slots: inputs.slot_mapping.is_some(),
            counts_new: false,
            one_each: false,
            scheduled: false,
            consecutive: false,
        })
    }

    fn qk_norm(&self, inputs: &PagedShapes<'_>, epsilon: f32) -> Result<Option<QkNorm>> {
        let [query, key] = ["q_norm_weight", "k_norm_weight"];
        let weights = both((query, inputs.q_norm_weight), (key, inputs.k_norm_weight))?;
        let Some(weights) = weights else { return Ok(None) };
        for (argument, weight) in [(query, weights.0), (key, weights.1)] {
            self.check(argument, weight, &[Dim::Is("head_size", self.head_size)])?;
        }
        Ok(Some(QkNorm { q_epsilon: epsilon, k_epsilon: epsilon }))
    }

    fn head_sink(&self, inputs: &PagedShapes<'_>) -> Result<bool> {
        let dims = [Dim::Is("num_heads", self.heads)];
        let check = |sink| self.check("head_sink", sink, &dims);
        Ok(inputs.head_sink.map(check).transpose()?.is_some())
    }
}
