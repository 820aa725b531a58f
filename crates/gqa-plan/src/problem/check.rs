//! Checks every call: consistent heads, countable and addressable sizes, and no contradicting
//! features. Errors use the names of [`engine`](crate::engine). The checks of a valid call allocate
//! no memory.

use super::{
    Alignment, CacheBinding, CallKind, Layout, Pages, Phase, Problem, ProblemFields, QkOutput,
    Quantization, RowStrides, Scales, Sink, Strided, greatest_unit,
};
use crate::limits::{MAX_HEAD_SIZE, MAX_HEADS, addressable, check_rows};
use gqa_tensor::{DType, Error, Result};

/// Errs where a rule is broken; `why` has the value and the allowed ones.
fn refuse<G: ToString, A: ToString>(
    broken: bool,
    argument: &'static str,
    why: impl FnOnce() -> (G, A),
) -> Result<()> {
    if !broken {
        return Ok(());
    }
    let (got, allowed) = why();
    Err(Error::invalid(argument, got, allowed))
}

impl ProblemFields {
    /// Errs unless the call can be computed as it is described.
    pub(super) fn check(&self) -> Result<()> {
        self.check_types()?;
        self.check_heads()?;
        self.check_latent()?;
        self.check_sizes()?;
        self.check_scores()?;
        self.check_tree()?;
        self.check_padded_chunk()?;
        self.check_rotation()?;
        self.check_cache()?;
        self.check_pages()?;
        self.check_strides()
    }

    fn attends(&self) -> bool {
        matches!(self.computes, CallKind::Attention | CallKind::Cache)
    }

    fn is_external(&self) -> bool {
        self.attends() && self.cache == CacheBinding::External
    }

    fn check_types(&self) -> Result<()> {
        if matches!(self.computes, CallKind::Update(_)) {
            return Ok(());
        }
        let allowed = "float32, float16, bfloat16, or float64 on the CPU";
        refuse(!self.dtype.is_float(), "dtype", || (self.dtype, allowed))?;
        refuse(!self.v_dtype.is_float(), "dtype", || (self.v_dtype, allowed))?;
        let wider = self.pages.is_none() && matches!(self.out_dtype, DType::F32 | DType::F8E4M3);
        refuse(self.out_dtype != self.dtype && !wider, "output", || {
            (self.out_dtype, format!("{}; float32 or float8e4m3fn in dense calls", self.dtype))
        })
    }

    fn check_heads(&self) -> Result<()> {
        let (query, kv, size) = (self.q_heads, self.kv_heads, self.head_size.max(self.v_head_size));
        if !self.attends() {
            return refuse(query != kv, "heads.query", || (query, format!("heads.kv = {kv}")));
        }
        let counts = || format!("1 to {MAX_HEADS}");
        refuse(!(1..=MAX_HEADS).contains(&query), "heads.query", || (query, counts()))?;
        refuse(!(1..=MAX_HEADS).contains(&kv), "heads.kv", || (kv, counts()))?;
        refuse(query % kv != 0, "heads.kv", || {
            (kv, format!("a divisor of heads.query = {query}"))
        })?;
        refuse(size > MAX_HEAD_SIZE, "heads.size", || (size, format!("up to {MAX_HEAD_SIZE}")))
    }

    /// Errs unless a latent call has one KV head and its values are a part of the keys.
    fn check_latent(&self) -> Result<()> {
        if !self.latent {
            return Ok(());
        }
        let (keys, values) = (self.head_size, self.v_head_size);
        let none = || ("one", "none, in a latent call");
        let types = [DType::F32, DType::F16, DType::BF16];
        let one_type = types.contains(&self.dtype) && self.v_dtype == self.dtype;
        refuse(!self.attends(), "latent", || {
            (format!("{:?}", self.computes), "attention, or its cache alone")
        })?;
        refuse(!one_type, "dtype", || {
            let got = format!("keys of {}, values of {}", self.dtype, self.v_dtype);
            (got, "float32, float16 or bfloat16, in a latent call")
        })?;
        refuse(self.kv_heads != 1, "heads.kv", || (self.kv_heads, "1, in a latent call"))?;
        refuse(keys % 8 != 0 || keys == 0, "heads.size", || {
            (keys, "a multiple of 8, in a latent call")
        })?;
        refuse(values % 8 != 0 || !(8..=keys).contains(&values), "heads.values", || {
            (values, format!("a multiple of 8 from 8 to heads.size = {keys}"))
        })?;
        refuse(self.packed, "packed", || ("true", "false, in a latent call"))?;
        refuse(self.slides, "slides", || ("true", "false, in a latent call"))?;
        refuse(self.qk_norm.is_some(), "qk_norm", none)?;
        refuse(self.strided.value.is_some(), "value", || {
            ("strides", "none, as the values of a latent call are a part of its keys")
        })
    }

    /// Errs unless every tensor can be addressed, and its rows can be counted.
    fn check_sizes(&self) -> Result<()> {
        let size = self.head_size.max(self.v_head_size);
        let Self { batch, q_heads, kv_heads, q_len, new_len, capacity, .. } = *self;
        let columns = self.bias.map_or(0, |bias| bias.columns);
        addressable("query", &[batch, q_heads, q_len, size])?;
        addressable("key", &[batch, kv_heads, new_len, size])?;
        addressable("present_key", &[batch, kv_heads, capacity, size])?;
        addressable("attention_bias", &[batch, q_heads, q_len, columns])?;
        addressable("longest", &[self.total_len])?;
        if self.output_qk != QkOutput::None {
            addressable("output_qk", &[batch, q_heads, q_len, self.total_len])?;
        }
        if matches!(self.computes, CallKind::Update(_)) {
            return Ok(());
        }
        check_rows("query", &[batch, q_heads, q_len])?;
        check_rows("key", &[batch, kv_heads, new_len])?;
        check_rows("present_key", &[batch, kv_heads, capacity])
    }

    /// Checks that scores stay finite, and that the features that mask keys do not contradict each
    /// other.
    fn check_scores(&self) -> Result<()> {
        let softcap = self.softcap.unwrap_or(1.0);
        refuse(!self.scale.is_finite(), "scale", || (self.scale, "a finite number"))?;
        refuse(!(softcap.is_finite() && softcap > 0.0), "softcap", || {
            (softcap, "a finite number, 0 for none, or more")
        })?;
        refuse(self.window == Some(0), "window", || {
            (0, "1 or more keys, the query's own included")
        })?;
        refuse(self.causal && self.right_window.is_some(), "right_window", || {
            ("one", "none, as the call is causal")
        })
    }

    fn check_tree(&self) -> Result<()> {
        const MOST: usize = u64::BITS as usize;
        if !self.tree_mask {
            return Ok(());
        }
        let none = || ("one", "none, with tree_mask");
        refuse(self.causal, "causal", || ("true", "false, with tree_mask"))?;
        refuse(self.window.is_some(), "window", none)?;
        refuse(self.bias.is_some(), "attention_bias", none)?;
        refuse(self.output_qk != QkOutput::None, "output_qk", none)?;
        refuse(self.q_len > MOST, "tree_mask", || {
            (format!("{} new tokens of a sequence", self.q_len), "64 or fewer")
        })
    }

    /// Checks QK-norm and RoPE.
    fn check_rotation(&self) -> Result<()> {
        let read = || ("one", "none, as keys and values are read where they are");
        refuse(self.is_external() && self.rotary.is_some(), "rope", read)?;
        refuse(self.is_external() && self.qk_norm.is_some(), "qk_norm", read)?;
        let epsilons = self.qk_norm.map_or([1.0; 2], |norm| [norm.q_epsilon, norm.k_epsilon]);
        for epsilon in epsilons {
            refuse(!(epsilon.is_finite() && epsilon > 0.0), "qk_norm", || {
                (epsilon, "a finite number greater than 0")
            })?;
        }
        let Some(rotary) = self.rotary else { return Ok(()) };
        let (dim, size) = (rotary.dim, self.head_size);
        let vectors = dim.is_multiple_of(16) && size.is_multiple_of(16) && dim > 0;
        refuse(self.attends() && size % 16 != 0, "heads.size", || {
            (size, "a multiple of 16, with rope")
        })?;
        refuse(
            !dim.is_multiple_of(2) || dim > size || self.attends() && !vectors,
            "rope.dim",
            || (dim, format!("a multiple of 16 from 16 to heads.size = {size}")),
        )?;
        let (offset, most) = (rotary.offset, size - dim);
        let whole = offset == 0 || self.attends() && offset % 8 == 0;
        refuse(!whole || offset > most, "rope.offset", || {
            (offset, format!("a multiple of 8 up to heads.size - rope.dim = {most}"))
        })?;
        let columns = rotary.explicit.unwrap_or(self.q_len);
        refuse(columns < self.q_len, "position_ids", || {
            (format!("rows of {columns}"), format!("{} or more, the call's rows", self.q_len))
        })?;
        addressable("rope.positions", &[rotary.max_positions, dim / 2])
    }

    /// Whether values are like keys, or a part of them, so that kernels that move rows of keys can
    /// move both.
    fn has_like_values(&self) -> bool {
        self.latent || (self.v_head_size, self.v_dtype) == (self.head_size, self.dtype)
    }

    /// Checks the KV cache.
    fn check_cache(&self) -> Result<()> {
        if !self.attends() {
            return self.check_plain();
        }
        let (capacity, external) = (self.capacity, self.is_external());
        let holds = self.slides || self.pages.is_some() || self.total_len <= capacity;
        refuse(!holds, "longest", || {
            (self.total_len, format!("up to {capacity}, the rows of the cache"))
        })?;
        refuse(
            external && (self.past_capacity > 0 || capacity != self.new_len),
            "capacity",
            || (capacity, format!("{}, the keys, as there is no cache", self.new_len)),
        )?;
        let brings = [0, self.q_len].contains(&self.new_len);
        let packs = self.layout == Layout::Bsnh && !external && self.has_like_values() && brings;
        refuse(self.packed && !packs, "packed", || {
            (
                "true",
                "false, except in layout Bsnh over a cache with keys and values of one type and \
                 size",
            )
        })?;
        self.check_appended()?;
        let window = self.window.unwrap_or(capacity);
        refuse(self.slides && window > capacity, "window", || {
            (window, format!("up to {capacity}, the rows of a rolling KV cache"))
        })?;
        refuse(self.slides && self.output_qk != QkOutput::None, "output_qk", || {
            ("one", "none, over a rolling KV cache")
        })?;
        let columns = self.bias.map_or(self.total_len, |bias| bias.columns);
        refuse(self.slides && columns != self.total_len, "attention_bias", || {
            (format!("{columns} columns"), format!("{}, over a rolling KV cache", self.total_len))
        })?;
        self.check_quantized()
    }

    /// Errs where a call of RoPE alone, or a cache update alone, has a feature of attention.
    fn check_plain(&self) -> Result<()> {
        let plain = Self {
            computes: self.computes,
            v_dtype: self.v_dtype,
            batch: self.batch,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            v_head_size: self.v_head_size,
            q_len: self.q_len,
            new_len: self.new_len,
            total_len: self.total_len,
            past_capacity: self.past_capacity,
            capacity: self.capacity,
            phase: self.phase,
            cache: self.cache,
            layout: self.layout,
            strided: self.strided,
            rotary: self.rotary,
            ..Self::plain(self.operator, self.dtype)
        };
        let rotates = self.computes == CallKind::Rotation;
        let explicit = self.rotary.is_some_and(|rotary| rotary.explicit.is_some());
        let rows = match rotates {
            true => self.cache == CacheBinding::External && explicit && self.has_like_values(),
            false => self.cache == CacheBinding::Shared && self.rotary.is_none(),
        };
        refuse(!rows || *self != plain, "computes", || {
            (format!("{:?}", self.computes), "a call that has nothing of attention's")
        })
    }

    /// Errs unless new rows can be appended. Heads that are not whole vectors, and values that
    /// differ from keys in size, can only follow a past of the same length in every sequence.
    fn check_appended(&self) -> Result<()> {
        let (past, new, capacity) = (self.past_capacity, self.new_len, self.capacity);
        let rolls_wrongly = past != capacity || new != self.q_len && new != 0;
        refuse(self.slides && rolls_wrongly, "capacity", || {
            (capacity, "that of the past, with new keys of all rows, in a rolling KV cache")
        })?;
        let is_read_only = new == 0 && self.cache == CacheBinding::Shared && !self.slides;
        if self.is_external() || is_read_only {
            return Ok(());
        }
        let own_rows = self.alignment == Alignment::Phase;
        refuse(own_rows && new != self.q_len && new != 0, "new_len", || {
            (new, format!("{}, the rows of queries, or 0", self.q_len))
        })?;
        if self.head_size.is_multiple_of(8) && self.has_like_values() && own_rows {
            return Ok(());
        }
        let plain = self.rotary.is_none() && self.qk_norm.is_none() && self.quantized.is_none();
        let copied = self.cache == CacheBinding::Separate && !self.slides && capacity == past + new;
        refuse(!(plain && copied), "heads.size", || {
            let sizes = format!("{} and {}", self.head_size, self.v_head_size);
            (sizes, "a multiple of 8 for keys and values alike, but where past is only copied")
        })
    }

    /// Errs where query_seqlens has no meaning: rows are counted from the end of the keys.
    fn check_padded_chunk(&self) -> Result<()> {
        let counts = self.has_counted_rows();
        refuse(self.phase == Phase::PaddedChunk && !counts, "query_seqlens", || {
            ("one", "none, except without a cache, or in causal calls over one that is not paged")
        })
    }

    /// Whether the query rows are the last tokens of their sequence, in order.
    fn has_counted_rows(&self) -> bool {
        let ordered = self.causal || self.tree_mask || self.is_external();
        let own_keys = self.attends() && self.pages.is_none();
        ordered && own_keys && self.alignment == Alignment::Phase
    }

    fn check_quantized(&self) -> Result<()> {
        let Some(quantized) = self.quantized else { return Ok(()) };
        let (size, elements) = (self.head_size, quantized.codes_per_element());
        refuse(self.is_external() || !self.has_like_values(), "quantized", || {
            ("one", "none, except over a cache with keys and values of one type and size")
        })?;
        let is_whole = quantized.format.bits() != 4 || size.is_multiple_of(2);
        refuse(!is_whole, "heads.size", || (size, "an even number, over 4-bit values"))?;
        let moves_vectors = self.slides || self.pages.is_some();
        let vectors = (size / elements).is_multiple_of(Problem::VECTOR_BYTES);
        refuse(moves_vectors && !vectors, "heads.size", || {
            let least = Problem::VECTOR_BYTES * elements;
            (size, format!("a multiple of {least}, 16 bytes of quantized values"))
        })?;
        // Rows that are quantized apart, as a cache alone, have their scales beside them. No kernel
        // moves scales in a rolling cache.
        let is_apart = self.computes == CallKind::Cache && self.pages.is_none();
        let is_beside = (self.cache == CacheBinding::Shared || is_apart) && !self.slides;
        refuse(quantized.scales == Scales::PerToken && !is_beside, "quantized", || {
            (
                "scales per token",
                "other scales, unless past and present are one cache that does not roll",
            )
        })
    }

    /// Errs where a call over a paged KV cache has a feature of contiguous calls.
    fn check_pages(&self) -> Result<()> {
        let Some(pages) = self.pages else { return Ok(()) };
        let none = || ("one", "none, over a paged KV cache");
        let explicit = self.rotary.is_some_and(|rotary| rotary.explicit.is_some());
        refuse(self.sink == Sink::Zero, "sink", || {
            ("Sink::Zero", "Sink::None or Sink::PerHead over a paged KV cache")
        })?;
        refuse(self.bias.is_some(), "attention_bias", none)?;
        refuse(self.output_qk != QkOutput::None, "output_qk", none)?;
        refuse(explicit, "position_ids", none)?;
        let as_long = self.past_capacity == self.capacity && self.capacity == self.total_len;
        let begun = self.phase != Phase::FirstPrompt && as_long;
        let shared = self.cache == CacheBinding::Shared && !self.slides && begun;
        let rows = self.layout == Layout::Bsnh && self.alignment == Alignment::Phase;
        let values = self.has_like_values() || pages.consecutive && self.v_dtype == self.dtype;
        refuse(!(shared && rows && values), "pages", || {
            (
                "pages",
                "none, except in layout Bsnh with a shared cache, keys and values of one type and \
                 size",
            )
        })?;
        self.check_consecutive(pages)?;
        let most = pages.per_sequence.saturating_mul(pages.block_size);
        refuse(pages.tokens > 0 && pages.block_size == 0, "block_size", || (0, "1 or more"))?;
        // Kernels look for the block of a token's row.
        refuse(pages.tokens > 0 && pages.columns() == 0, "blocks_per_sequence", || {
            (0, "1 or more, as there are tokens")
        })?;
        refuse(self.total_len > most.max(1), "longest", || {
            (self.total_len, format!("up to {most}, the rows of a sequence's blocks"))
        })?;
        refuse(self.q_len > pages.tokens, "most_tokens", || {
            (self.q_len, format!("up to {}, the tokens of all sequences", pages.tokens))
        })?;
        let is_each = self.q_len == 1 && pages.tokens == self.batch;
        refuse(pages.one_each && !is_each, "one_each", || {
            let (tokens, sequences) = (pages.tokens, self.batch);
            (format!("{tokens} tokens of {sequences} sequences"), "one token of each sequence")
        })?;
        let size = self.head_size.max(self.v_head_size);
        addressable("cache", &[pages.blocks, pages.block_size, self.kv_heads, size])?;
        check_rows("cache", &[pages.blocks, pages.block_size, self.kv_heads])?;
        check_rows("block_table", &[self.batch, pages.columns()])?;
        // An upper bound on the row tiles of all sequences: the last tile of each may be partly
        // filled.
        check_rows("query", &[pages.tokens.saturating_add(self.batch), self.q_heads])
    }

    /// Errs where a cache of consecutive rows has blocks of several, or is written.
    fn check_consecutive(&self, pages: Pages) -> Result<()> {
        if !pages.consecutive {
            return Ok(());
        }
        let none = || ("one", "none, as keys and values are read where they are");
        refuse(pages.block_size != 1, "block_size", || (pages.block_size, "1"))?;
        refuse(self.new_len > 0, "key", none)?;
        refuse(pages.slots, "slot_mapping", none)?;
        refuse(self.quantized.is_some(), "quantized", none)?;
        refuse(self.latent, "latent", none)?;
        refuse(self.v_head_size == 0, "value_size", || (0, "1 or more"))
    }

    fn check_strides(&self) -> Result<()> {
        let Self { q_heads, kv_heads, q_len, new_len, head_size, v_head_size, .. } = *self;
        let strided = self.strided;
        let keys = self.row_dims(kv_heads, new_len, head_size);
        let values = self.row_dims(kv_heads, new_len, v_head_size);
        let outputs = self.row_dims(q_heads, q_len, v_head_size);
        let queries = self.row_dims(q_heads, q_len, head_size);
        self.check_tensor_strides("query", self.dtype, queries, strided.query)?;
        self.check_tensor_strides("key", self.dtype, keys, strided.key)?;
        self.check_tensor_strides("value", self.v_dtype, values, strided.value)?;
        self.check_tensor_strides("output", self.out_dtype, outputs, strided.output)?;
        self.check_pages_strides()?;
        let Some(strides) = strided.output else { return Ok(()) };
        let got = || format!("{strides:?} of {outputs:?}");
        refuse(self.pages.is_some(), "output", || (got(), "contiguous, over a paged KV cache"))?;
        refuse(!strides.is_injective(outputs), "output", || {
            (got(), "strides with which no elements overlap")
        })
    }

    /// Errs unless kernels can read and write a paged KV cache with the strides that it has.
    fn check_pages_strides(&self) -> Result<()> {
        let Strided { pages, page_values, .. } = self.strided;
        let of_values = |size| page_values.map(|strides| ("present_value", strides, size));
        let of_keys = pages.map(|strides| ("present_key", strides, self.head_size));
        for (name, strides, size) in of_keys.into_iter().chain(of_values(self.v_head_size)) {
            self.check_page_strides(name, strides, size)?;
        }
        let is_apart = self.pages.is_none_or(|pages| !pages.consecutive);
        refuse(page_values.is_some() && is_apart, "present_value", || {
            ("strides", "those of present_key, but where rows are consecutive")
        })
    }

    /// The same of keys or values, whose heads have `size` elements.
    fn check_page_strides(
        &self,
        name: &'static str,
        strides: RowStrides,
        size: usize,
    ) -> Result<()> {
        let Some(pages) = self.pages else {
            let got = format!("{strides:?}");
            return Err(Error::invalid(name, got, "contiguous, as there are no blocks"));
        };
        let dtype = self.quantized.map_or(self.dtype, Quantization::dtype);
        let width = size / self.quantized.map_or(1, Quantization::codes_per_element);
        let dims = [pages.blocks, self.kv_heads, pages.block_size, width];
        self.check_tensor_strides(name, dtype, dims, Some(strides))?;
        let got = || format!("{strides:?} of {dims:?}");
        let RowStrides { batch, head, row } = strides;
        let refuse = |broken, allowed| refuse(broken, name, || (got(), allowed));
        let most = batch.max(head).max(row) * dtype.size();
        refuse(u32::try_from(most).is_err(), "strides below 2^32 bytes")?;
        let unit = greatest_unit([batch as u64, row as u64]) as usize;
        let rows = RowStrides { batch: batch / unit, head: 0, row: row / unit };
        let places = rows.extent([pages.blocks, 1, pages.block_size, 1]).unwrap_or(usize::MAX);
        refuse(
            i32::try_from(places).is_err(),
            "strides of blocks and rows that are multiples of a larger number: there are fewer \
             than 2^31 of that in the cache",
        )?;
        let by_token = self.quantized.is_some_and(|how| how.scales == Scales::PerToken);
        refuse(by_token, "contiguous, with scales per token")?;
        refuse(!strides.is_injective(dims), "strides with which no elements overlap")
    }

    /// Checks the strides of a tensor, if it has some: multiples of 16 bytes that can be addressed.
    fn check_tensor_strides(
        &self,
        name: &'static str,
        dtype: DType,
        dims: [usize; 4],
        strides: Option<RowStrides>,
    ) -> Result<()> {
        const MOST: usize = isize::MAX as usize / 8;
        let Some(strides) = strides else { return Ok(()) };
        let apart = [strides.batch, strides.head, strides.row];
        let refuse = |broken, allowed: &'static str| {
            refuse(broken, name, || (format!("{strides:?} of {dims:?}"), allowed))
        };
        let is_new = !matches!(name, "output" | "present_key" | "present_value");
        refuse(self.packed && is_new, "contiguous, as the call is packed")?;
        let vectors = apart.iter().all(|n| n % 16 * dtype.size() % 16 == 0);
        refuse(!vectors, "strides of multiples of 16 bytes")?;
        let mut extents = apart.map(Some).into_iter().chain([strides.extent(dims)]);
        let addressable = extents.all(|extent| extent.is_some_and(|elements| elements <= MOST));
        refuse(!addressable, "what can be addressed")
    }
}
