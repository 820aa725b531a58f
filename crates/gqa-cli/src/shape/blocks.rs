//! Calls whose cache consists of blocks: PagedAttention of sequences of equal lengths, whose blocks
//! lie scattered.

use anyhow::{Result, bail};
use gqa_host::op::{Bounds, PagedAttention, PagedShapes};
use gqa_host::plan::TensorId;
use gqa_host::{DType, Problem, Tensor, TensorDesc};
use ndarray::{Array1, Array2};

use super::{Codes, Layer, Rotation, Shape, Tensors};
use crate::input::Noise;
use crate::usage::Usage;

impl Layer {
    /// The operator over blocks.
    fn paged_op(&self) -> PagedAttention {
        PagedAttention::new(self.heads as i64, self.kv_heads as i64)
            .scale(self.scale)
            .softcap(self.softcap)
            .local_window_size(self.window)
            .is_causal(i64::from(!self.bidirectional))
            .do_rotary(self.rotary != Rotation::None)
            .rotary_interleaved(self.rotary == Rotation::Interleaved)
            .k_quant_type(self.quant_type())
            .v_quant_type(self.quant_type())
            .k_cache_dtype(self.cache_dtype())
            .v_cache_dtype(self.cache_dtype())
    }

    fn cache_dtype(&self) -> &'static str {
        match self.kv_cache {
            Some(Codes::Int4) => "int4",
            Some(Codes::Float4) => "float4e2m1",
            Some(Codes::Int8 | Codes::Float8) | None => "",
        }
    }
}

impl Shape {
    /// Blocks of a sequence.
    fn blocks(&self, block_size: usize) -> usize {
        self.total().div_ceil(block_size)
    }

    /// The validated call over blocks of that many rows, with that many tokens of all sequences
    /// together.
    pub(super) fn paged_problem(&self, block_size: usize, tokens: usize) -> Result<Problem> {
        let Layer { heads, kv_heads, head_size, window, bidirectional, .. } = self.layer;
        if bidirectional && window >= 0 {
            let allowed =
                "without --bidirectional: what is computed is checked as GroupQueryAttention";
            bail!(Usage(format!("--window: got {window} over blocks; allowed: {allowed}")));
        }
        let dtype = self.layer.dtype.into();
        let desc = |shape| TensorDesc { dtype, shape };
        let codes = self.layer.kv_cache;
        let codes_of = |shape| TensorDesc { dtype: codes.map_or(dtype, Codes::dtype), shape };
        let integers = |shape| TensorDesc { dtype: DType::I32, shape };
        let tokens = |heads: u64| [tokens, (heads * head_size) as usize];
        let [query, key, packed] = [heads, kv_heads, heads + 2 * kv_heads].map(tokens);
        let per_sequence = self.blocks(block_size);
        let width = head_size as usize / codes.map_or(1, Codes::of_element);
        let cache = [self.batch * per_sequence, block_size, kv_heads as usize, width];
        let scale = self.layer.scale_shape(cache);
        let scale = codes.map(|_| TensorDesc { dtype: DType::F32, shape: &scale });
        let table = [self.total(), head_size as usize / 2];
        let weight = [head_size as usize];
        let separate = (!self.layer.packed).then_some(desc(&key));
        let table = (self.layer.rotary != Rotation::None).then_some(desc(&table));
        let weight = self.layer.qk_norm.then_some(desc(&weight));
        let (starts, past, blocks) = ([self.batch + 1], [self.batch], [self.batch, per_sequence]);
        let shapes = PagedShapes {
            query: desc(if self.layer.packed { &packed } else { &query }),
            key: separate,
            value: separate,
            key_cache: codes_of(&cache),
            value_cache: Some(codes_of(&cache)),
            cumulative_sequence_length: integers(&starts),
            past_seqlens: integers(&past),
            block_table: integers(&blocks),
            cos_cache: table,
            sin_cache: table,
            slot_mapping: None,
            head_sink: None,
            q_norm_weight: weight,
            k_norm_weight: weight,
            k_scale: scale,
            v_scale: scale,
            bounds: Bounds { query_rows: self.query_length, keys: self.total() },
        };
        let problem = self.layer.paged_op().problem_from_shapes(&shapes);
        problem.map_err(|error| self.layer.by_option(error))
    }

    /// The tensors that say where sequences are: their blocks in random order.
    pub(super) fn set_pages(
        &self,
        block_size: usize,
        tensors: &mut Tensors,
        noise: &mut Noise,
    ) -> Result<()> {
        let integer = |n: usize| Ok::<_, anyhow::Error>(i32::try_from(n)?);
        let starts: Result<Vec<_>> =
            (0..=self.batch).map(|b| integer(b * self.query_length)).collect();
        let blocks = self.batch * self.blocks(block_size);
        let mut table = (0..blocks).map(integer).collect::<Result<Vec<_>>>()?;
        for i in 1..blocks {
            table.swap(i, noise.below(i + 1));
        }
        let table = Array2::from_shape_vec((self.batch, self.blocks(block_size)), table)?;
        let past = Array1::from_elem(self.batch, integer(self.past_length)?);
        tensors.set(TensorId::CumulativeSequenceLength, Array1::from(starts?).into());
        tensors.set(TensorId::BlockTable, Tensor::from(table.into_dyn()));
        tensors.set(TensorId::SeqlensK, past.into());
        Ok(())
    }
}
