//! One validated call: plain numbers, no data.

use crate::DType;

/// What `seqlens_k` means for this call's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// `sequence_length == total_sequence_length`: no past, right-padded.
    FirstPrompt,
    /// More than one new row after a past (chunked prefill, speculative decoding).
    SubsequentPrompt,
    /// One new row after a past.
    TokenGeneration,
}

/// Where present_key and present_value live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheBinding {
    /// Present is past: new rows are appended in place, all other rows stay untouched.
    Shared,
    /// Past is copied, new rows follow, rows behind the sequence's length are zero.
    Separate,
}

/// Order of the dimensions of query, key, value and output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// (batch, sequence, heads · head_size), as ONNX has it.
    #[default]
    Bsnh,
    /// (batch, heads, sequence, head_size).
    Bnsh,
}

/// Rotary embedding of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// Leading elements of each head that rotate.
    pub dim: usize,
    /// Pairs are (2i, 2i+1) rather than (i, i + dim/2).
    pub interleaved: bool,
    /// Rows of cos_cache and sin_cache.
    pub max_positions: usize,
    /// Row length of position_ids where given; else position = past + row.
    pub explicit: Option<usize>,
}

/// The extra logit in the softmax denominator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sink {
    /// None.
    None,
    /// Zero for every head: smooth softmax.
    Zero,
    /// `head_sink[query head]`.
    PerHead,
}

/// Which leading dimensions of attention_bias are 1 and repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasBroadcast {
    /// One bias for all batch entries.
    pub batch: bool,
    /// One bias for all query heads.
    pub head: bool,
}

/// What output_qk receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkOutput {
    /// Not wanted.
    None,
    /// After scale, softcap and bias; masked entries 0.
    BeforeSoftmax,
    /// Softmax weights; masked entries 0.
    AfterSoftmax,
}

/// Element distances of a (batch, head, row) tensor and where its first element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowLayout {
    /// Index of (0, 0, 0).
    pub offset: usize,
    /// From one batch entry to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one row to the next.
    pub row: usize,
}

impl RowLayout {
    /// Index of the first element of a head's row.
    pub fn at(&self, batch: usize, head: usize, row: usize) -> usize {
        self.offset + batch * self.batch + head * self.head + row * self.row
    }
}

/// A GroupQueryAttention call whose shapes and attributes are legal and agree. Made by
/// [`GroupQueryAttention::problem`](crate::op::GroupQueryAttention::problem) only.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// Type of query, key, value, caches, bias, sink, output.
    pub dtype: DType,
    /// B
    pub batch: usize,
    /// N
    pub q_heads: usize,
    /// Nk; divides N.
    pub kv_heads: usize,
    /// H, a multiple of 8 up to 512.
    pub head_size: usize,
    /// S: query rows per batch entry.
    pub q_len: usize,
    /// L: new K and V rows per batch entry: S, or 0 where the cache already holds all rows.
    pub new_len: usize,
    /// T: total_sequence_length, the batch maximum; columns of attention_bias and output_qk.
    pub total_len: usize,
    /// P: rows of past_key and past_value; 0 where absent.
    pub past_capacity: usize,
    /// Rows of present_key and present_value.
    pub capacity: usize,
    /// What the rows are.
    pub phase: Phase,
    /// Where present lives.
    pub cache: CacheBinding,
    /// Query, key and value are one tensor, all Q heads, then all K heads, then all V heads.
    pub packed: bool,
    /// Order of the dimensions of query, key, value and output.
    pub layout: Layout,
    /// Rotary embedding.
    pub rotary: Option<Rotary>,
    /// Factor on q·k, resolved (never 0).
    pub scale: f32,
    /// Scores become softcap · tanh(score / softcap).
    pub softcap: Option<f32>,
    /// Newest visible keys, the query's own included.
    pub window: Option<usize>,
    /// A query at position p sees keys 0..=p; otherwise all valid keys.
    pub causal: bool,
    /// Extra logit.
    pub sink: Sink,
    /// Additive bias (B or 1, N or 1, S, T).
    pub bias: Option<BiasBroadcast>,
    /// Score output.
    pub output_qk: QkOutput,
    /// Whether log-sum-exp is wanted.
    pub lse: bool,
}

impl Problem {
    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Shape of query-like tensors with `heads` heads and `rows` rows in this call's layout.
    pub fn rows_shape(&self, heads: usize, rows: usize) -> Vec<usize> {
        match self.layout {
            Layout::Bsnh => vec![self.batch, rows, heads * self.head_size],
            Layout::Bnsh => vec![self.batch, heads, rows, self.head_size],
        }
    }

    /// Shape of present_key and present_value.
    pub fn present_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.capacity, self.head_size]
    }

    /// Layout of a dense query-like tensor.
    fn rows_layout(&self, heads: usize, rows: usize) -> RowLayout {
        let h = self.head_size;
        match self.layout {
            Layout::Bsnh => {
                RowLayout { offset: 0, batch: rows * heads * h, head: h, row: heads * h }
            }
            Layout::Bnsh => {
                RowLayout { offset: 0, batch: heads * rows * h, head: rows * h, row: h }
            }
        }
    }

    /// Where head number `first` of the packed tensor starts, and its strides.
    fn packed_layout(&self, first: usize) -> RowLayout {
        let row = (self.q_heads + 2 * self.kv_heads) * self.head_size;
        RowLayout {
            offset: first * self.head_size,
            batch: self.q_len * row,
            head: self.head_size,
            row,
        }
    }

    /// Query heads inside the `query` input.
    pub fn query_layout(&self) -> RowLayout {
        if self.packed { self.packed_layout(0) } else { self.output_layout() }
    }

    /// New keys: inside `key`, or inside `query` where packed.
    pub fn key_layout(&self) -> RowLayout {
        if self.packed {
            self.packed_layout(self.q_heads)
        } else {
            self.rows_layout(self.kv_heads, self.new_len)
        }
    }

    /// New values: inside `value`, or inside `query` where packed.
    pub fn value_layout(&self) -> RowLayout {
        if self.packed {
            self.packed_layout(self.q_heads + self.kv_heads)
        } else {
            self.rows_layout(self.kv_heads, self.new_len)
        }
    }

    /// The output (and an unpacked, rotated query).
    pub fn output_layout(&self) -> RowLayout {
        self.rows_layout(self.q_heads, self.q_len)
    }

    /// A BNSH cache of `rows` rows.
    pub fn cache_layout(&self, rows: usize) -> RowLayout {
        let h = self.head_size;
        RowLayout { offset: 0, batch: self.kv_heads * rows * h, head: rows * h, row: h }
    }
}
