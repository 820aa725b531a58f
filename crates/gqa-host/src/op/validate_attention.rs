//! Checks ONNX Attention's attributes and inputs, and makes a [`Problem`] of them.

use super::validate::{Dim, Pattern, both, head_count, scale};
use super::{Attention, AttentionInputs};
use gqa_plan::limits::{MAX_HEAD_SIZE, MAX_HEADS, addressable, check_rows, shape};
use gqa_plan::{Alignment, Bias, CacheBinding, Layout, Phase, Problem, ProblemFields, QkOutput};
use gqa_tensor::{DType, Error, Result, Tensor, TensorDesc};

/// softmax_precision: float32, float16, float64, bfloat16.
const PRECISIONS: [i64; 4] = [1, 10, 11, 16];

impl Attention {
    /// Checks the call.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] names the input or attribute that is not allowed, what was got and what
    /// is allowed.
    pub fn problem(&self, inputs: &AttentionInputs<'_>) -> Result<Problem> {
        let problem = self.problem_from_shapes(&AttentionShapes::of(inputs))?;
        check_lengths(&problem, inputs)?;
        Ok(problem)
    }

    /// Checks types and shapes, but not the contents of nonpad_kv_seqlen.
    ///
    /// # Errors
    ///
    /// As [`problem`](Self::problem), except for contents.
    pub fn problem_from_shapes(&self, inputs: &AttentionShapes<'_>) -> Result<Problem> {
        self.check_numbers()?;
        let sizes = self.sizes(inputs)?;
        let (past, cache) = sizes.past(inputs, self.present)?;
        sizes.check_lengths(inputs)?;
        let total = past + sizes.new_len;
        let window = Window::of(self);
        let (phase, alignment) =
            sizes.alignment(past, cache, inputs.nonpad_kv_seqlen.is_some(), window.is_some());
        sizes.check_rows(total, self.qk_matmul_output)?;
        Problem::new(ProblemFields {
            v_dtype: inputs.v.dtype,
            batch: sizes.batch,
            q_heads: sizes.q_heads,
            kv_heads: sizes.kv_heads,
            head_size: sizes.head_size,
            v_head_size: sizes.v_head_size,
            q_len: sizes.q_len,
            new_len: sizes.new_len,
            total_len: total,
            past_capacity: past,
            capacity: total,
            phase,
            alignment,
            cache,
            layout: sizes.layout,
            scale: scale(self.scale, sizes.head_size),
            softcap: (self.softcap > 0.0).then_some(self.softcap),
            window: window.left.map(|left| left.saturating_add(1)),
            right_window: window.right.filter(|&right| right > 0),
            causal: window.right == Some(0),
            bias: sizes.mask(inputs, total, self.broadcast_columns)?,
            output_qk: self.output_qk(),
            ..ProblemFields::plain("Attention", inputs.q.dtype)
        })
    }

    /// Checks of single attributes.
    fn check_numbers(&self) -> Result<()> {
        let number = |argument, x: f32| match x {
            x if x.is_finite() && x >= 0.0 => Ok(()),
            x => Err(Error::invalid(argument, x, "a finite number, 0 or more")),
        };
        number("scale", self.scale.unwrap_or(0.0))?;
        number("softcap", self.softcap)?;
        let within = |argument, n: i64, allowed: std::ops::RangeInclusive<i64>, text| match n {
            n if allowed.contains(&n) => Ok(()),
            n => Err(Error::invalid(argument, n, text)),
        };
        within("is_causal", self.is_causal, 0..=1, "0 or 1")?;
        within("qk_matmul_output_mode", self.qk_matmul_output_mode, 0..=3, "0, 1, 2 or 3")?;
        let bound = "0 or more, or -1 for no bound";
        within("left_window_size", self.left_window_size, -1..=i64::MAX, bound)?;
        within("right_window_size", self.right_window_size, -1..=i64::MAX, bound)?;
        match self.softmax_precision {
            Some(precision) if !PRECISIONS.contains(&precision) => {
                let allowed = "1 (float32), 10 (float16), 11 (float64) or 16 (bfloat16)";
                Err(Error::invalid("softmax_precision", precision, allowed))
            }
            _ => Ok(()),
        }
    }

    fn output_qk(&self) -> QkOutput {
        match self.qk_matmul_output_mode {
            _ if !self.qk_matmul_output => QkOutput::None,
            0 => QkOutput::Scaled,
            1 => QkOutput::Capped,
            2 => QkOutput::Biased,
            _ => QkOutput::AfterSoftmax,
        }
    }

    fn sizes(&self, inputs: &AttentionShapes<'_>) -> Result<Sizes> {
        let AttentionShapes { q, k, v, .. } = *inputs;
        for (argument, tensor) in [("Q", q), ("V", v)] {
            if !tensor.dtype.is_float() {
                let allowed = "float32, float16, bfloat16 or float64";
                return Err(Error::invalid(argument, tensor.dtype, allowed));
            }
        }
        let layout = Layout::of_rank(q.shape.len())
            .ok_or_else(|| Error::invalid("Q", shape(q.shape), "3 or 4 dimensions"))?;
        for (argument, tensor) in [("K", k), ("V", v)] {
            if tensor.shape.len() != q.shape.len() {
                let allowed = format!("{} dimensions, as many as Q has", q.shape.len());
                return Err(Error::invalid(argument, shape(tensor.shape), allowed));
            }
        }
        for (argument, tensor) in [("Q", q), ("K", k), ("V", v)] {
            addressable(argument, tensor.shape)?;
        }
        match layout {
            Layout::Bsnh => self.sizes_3d(inputs),
            Layout::Bnsh => self.sizes_4d(inputs),
        }
    }

    /// Heads come from the attributes.
    fn sizes_3d(&self, inputs: &AttentionShapes<'_>) -> Result<Sizes> {
        let AttentionShapes { q, k, v, .. } = *inputs;
        let count = |argument, given: Option<i64>| match given {
            Some(given) => head_count(argument, given),
            None => Err(Error::invalid(argument, "no attribute", "one, as Q has three dimensions")),
        };
        let q_heads = count("q_num_heads", self.q_num_heads)?;
        let kv_heads = count("kv_num_heads", self.kv_num_heads)?;
        let size = |argument, tensor: TensorDesc<'_>, name, heads| {
            let width = tensor.shape[2];
            if width % heads != 0 {
                let allowed = format!("a last dimension that is a multiple of {name} = {heads}");
                return Err(Error::invalid(argument, shape(tensor.shape), allowed));
            }
            Ok(width / heads)
        };
        Sizes {
            dtype: q.dtype,
            v_dtype: v.dtype,
            layout: Layout::Bsnh,
            batch: q.shape[0],
            q_heads,
            kv_heads,
            head_size: size("Q", q, "q_num_heads", q_heads)?,
            v_head_size: size("V", v, "kv_num_heads", kv_heads)?,
            q_len: q.shape[1],
            new_len: k.shape[1],
        }
        .check(inputs)
    }

    /// Heads come from the shapes; the attributes may repeat them.
    fn sizes_4d(&self, inputs: &AttentionShapes<'_>) -> Result<Sizes> {
        let AttentionShapes { q, k, v, .. } = *inputs;
        let (q_heads, kv_heads) = (q.shape[1], k.shape[1]);
        for (argument, given, heads, tensor) in [
            ("q_num_heads", self.q_num_heads, q_heads, "Q"),
            ("kv_num_heads", self.kv_num_heads, kv_heads, "K"),
        ] {
            if heads == 0 {
                return Err(Error::invalid(tensor, "no heads", "1 or more heads"));
            }
            if given.is_some_and(|given| usize::try_from(given) != Ok(heads)) {
                let allowed = format!("no attribute, or {heads}, the heads of {tensor}");
                return Err(Error::invalid(argument, given.unwrap_or_default(), allowed));
            }
        }
        Sizes {
            dtype: q.dtype,
            v_dtype: v.dtype,
            layout: Layout::Bnsh,
            batch: q.shape[0],
            q_heads,
            kv_heads,
            head_size: q.shape[3],
            v_head_size: v.shape[3],
            q_len: q.shape[2],
            new_len: k.shape[2],
        }
        .check(inputs)
    }
}

/// Types and shapes of the operator's inputs, which is all that the host knows of tensors in GPU
/// memory. ONNX names, as in [`AttentionInputs`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionShapes<'a> {
    /// Q
    pub q: TensorDesc<'a>,
    /// K
    pub k: TensorDesc<'a>,
    /// V
    pub v: TensorDesc<'a>,
    /// attn_mask
    pub attn_mask: Option<TensorDesc<'a>>,
    /// past_key
    pub past_key: Option<TensorDesc<'a>>,
    /// past_value
    pub past_value: Option<TensorDesc<'a>>,
    /// nonpad_kv_seqlen
    pub nonpad_kv_seqlen: Option<TensorDesc<'a>>,
}

impl<'a> AttentionShapes<'a> {
    /// Of tensors in host memory.
    fn of(inputs: &AttentionInputs<'a>) -> Self {
        let desc = |tensor: Option<&'a Tensor>| tensor.map(Tensor::desc);
        Self {
            q: inputs.q.desc(),
            k: inputs.k.desc(),
            v: inputs.v.desc(),
            attn_mask: desc(inputs.attn_mask),
            past_key: desc(inputs.past_key),
            past_value: desc(inputs.past_value),
            nonpad_kv_seqlen: desc(inputs.nonpad_kv_seqlen),
        }
    }
}

/// The window combined with is_causal: keys p - left to p + right.
struct Window {
    left: Option<usize>,
    right: Option<usize>,
}

impl Window {
    fn of(op: &Attention) -> Self {
        let bound = |size: i64| usize::try_from(size).ok();
        let right = if op.is_causal == 1 { Some(0) } else { bound(op.right_window_size) };
        Self { left: bound(op.left_window_size), right }
    }

    fn is_some(&self) -> bool {
        self.left.is_some() || self.right.is_some()
    }
}

/// What Q, K and V fix.
struct Sizes {
    dtype: DType,
    v_dtype: DType,
    layout: Layout,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    head_size: usize,
    v_head_size: usize,
    q_len: usize,
    new_len: usize,
}

impl Sizes {
    /// Whether Q, K and V agree.
    fn check(self, inputs: &AttentionShapes<'_>) -> Result<Self> {
        let AttentionShapes { q, k, v, .. } = *inputs;
        for (argument, tensor, size) in [("Q", q, self.head_size), ("V", v, self.v_head_size)] {
            if !(1..=MAX_HEAD_SIZE).contains(&size) {
                let got = format!("{}, so a head size of {size}", shape(tensor.shape));
                return Err(Error::invalid(argument, got, format!("1 to {MAX_HEAD_SIZE}")));
            }
        }
        if self.q_heads > MAX_HEADS {
            let got = format!("{} heads", self.q_heads);
            return Err(Error::invalid("Q", got, format!("1 to {MAX_HEADS}")));
        }
        if self.q_heads % self.kv_heads != 0 {
            let allowed = format!("a multiple of the {} KV heads", self.kv_heads);
            return Err(Error::invalid("Q", format!("{} heads", self.q_heads), allowed));
        }
        let rows = Dim::Is("kv_sequence_length", self.new_len);
        let kv = |argument, dtype, why, size: usize, name, tensor| {
            let (batch, heads) = (Dim::Is("batch_size", self.batch), self.kv_heads);
            let dims = match self.layout {
                Layout::Bsnh => {
                    vec![batch, rows, Dim::Is("kv_num_heads * head size", heads * size)]
                }
                Layout::Bnsh => {
                    vec![batch, Dim::Is("kv_num_heads", heads), rows, Dim::Is(name, size)]
                }
            };
            Pattern { argument, dtype, why, dims: &dims }.check(tensor)
        };
        kv("K", self.dtype, ", the type of Q", self.head_size, "head_size", k)?;
        kv("V", self.v_dtype, "", self.v_head_size, "v_head_size", v)?;
        Ok(self)
    }

    /// Rows of past_key and past_value, and the binding of K and V: without a past they are read in
    /// place, unless `present` requests a copy.
    fn past(&self, inputs: &AttentionShapes<'_>, present: bool) -> Result<(usize, CacheBinding)> {
        let past = both(("past_key", inputs.past_key), ("past_value", inputs.past_value))?;
        if present && inputs.nonpad_kv_seqlen.is_some() {
            let allowed = "no output, as nonpad_kv_seqlen is given";
            return Err(Error::invalid("present_key, present_value", "an output", allowed));
        }
        let Some((key, value)) = past else {
            let cache = if present { CacheBinding::Separate } else { CacheBinding::External };
            return Ok((0, cache));
        };
        if inputs.nonpad_kv_seqlen.is_some() {
            let allowed = "no input, as past_key is given";
            return Err(Error::invalid("nonpad_kv_seqlen", "a tensor", allowed));
        }
        let dims = |rows, name, size| {
            let (batch, heads) = ("batch_size", "kv_num_heads");
            [Dim::Is(batch, self.batch), Dim::Is(heads, self.kv_heads), rows, Dim::Is(name, size)]
        };
        let rows = Dim::Any("past_sequence_length");
        Pattern {
            argument: "past_key",
            dtype: self.dtype,
            why: ", the type of K",
            dims: &dims(rows, "head_size", self.head_size),
        }
        .check(key)?;
        let rows = Dim::Is("past_sequence_length", key.shape[2]);
        Pattern {
            argument: "past_value",
            dtype: self.v_dtype,
            why: ", the type of V",
            dims: &dims(rows, "v_head_size", self.v_head_size),
        }
        .check(value)?;
        Ok((key.shape[2], CacheBinding::Separate))
    }

    /// Errs where the rows or elements of a tensor of the call exceed the kernels' limits.
    fn check_rows(&self, total: usize, scores: bool) -> Result<()> {
        let Self { batch, q_heads, kv_heads, q_len, .. } = *self;
        check_rows("Q", &[batch, q_heads, q_len])?;
        check_rows("K", &[batch, kv_heads, total])?;
        addressable("K", &[batch, kv_heads, total, self.head_size])?;
        addressable("V", &[batch, kv_heads, total, self.v_head_size])?;
        let of_scores = if scores { "qk_matmul_output" } else { "K" };
        addressable(of_scores, &[batch, q_heads, q_len, total])
    }

    fn check_lengths(&self, inputs: &AttentionShapes<'_>) -> Result<()> {
        let Some(lengths) = inputs.nonpad_kv_seqlen else { return Ok(()) };
        let dims = [Dim::Is("batch_size", self.batch)];
        Pattern { argument: "nonpad_kv_seqlen", dtype: DType::I64, why: "", dims: &dims }
            .check(lengths)
    }

    /// Positions, expressed as a [`Phase`] where some GroupQueryAttention call has the same,
    /// because flash attention kernels know these only.
    fn alignment(
        &self,
        past: usize,
        cache: CacheBinding,
        nonpad: bool,
        window: bool,
    ) -> (Phase, Alignment) {
        let (rows, new) = (self.q_len, self.new_len);
        let later = match rows {
            1 => Phase::TokenGeneration,
            _ => Phase::SubsequentPrompt,
        };
        match (nonpad, past) {
            (true, _) if rows == 1 => (later, Alignment::Phase),
            (true, _) => (later, Alignment::End),
            (false, 0) if rows == new => (Phase::FirstPrompt, Alignment::Phase),
            (false, _) if rows == new => (later, Alignment::Phase),
            // Without a window or causality positions do not matter, unless new rows are appended.
            (false, 0) if rows < new && !window && cache == CacheBinding::External => {
                (later, Alignment::Phase)
            }
            (false, 0) => (Phase::FirstPrompt, Alignment::Past(0)),
            (false, past) => (later, Alignment::Past(past)),
        }
    }

    /// attn_mask's broadcasts.
    fn mask(
        &self,
        inputs: &AttentionShapes<'_>,
        total: usize,
        broadcast_columns: bool,
    ) -> Result<Option<Bias>> {
        const ARGUMENT: &str = "attn_mask";
        let Some(mask) = inputs.attn_mask else { return Ok(None) };
        if mask.dtype != DType::Bool && mask.dtype != self.dtype {
            let allowed = format!("bool, or {}, the type of Q", self.dtype);
            return Err(Error::invalid(ARGUMENT, mask.dtype, allowed));
        }
        let full = [self.batch, self.q_heads, self.q_len];
        let (columns, leading) = match mask.shape {
            [leading @ .., columns] if leading.len() <= 3 => (*columns, leading),
            [] if broadcast_columns => (1, &[][..]),
            _ => return Err(Error::invalid(ARGUMENT, shape(mask.shape), "1 to 4 dimensions")),
        };
        let columns = if broadcast_columns && columns == 1 { total } else { columns };
        let mut repeats = [true; 3];
        let first = 3 - leading.len();
        let mut fits = match broadcast_columns {
            true => columns == total,
            false => columns <= total && (columns > 0 || total == 0),
        };
        for (i, &n) in leading.iter().enumerate() {
            let whole = full[first + i];
            fits &= n == whole || n == 1;
            repeats[first + i] = n != whole;
        }
        if !fits {
            let [b, n, s] = full;
            let short = match broadcast_columns {
                true => String::new(),
                false => format!(", the last dimension {total} or less"),
            };
            let allowed = format!(
                "what broadcasts to (batch_size = {b}, q_num_heads = {n}, q_sequence_length = {s}, \
                 total_sequence_length = {total}){short}"
            );
            return Err(Error::invalid(ARGUMENT, shape(mask.shape), allowed));
        }
        addressable(ARGUMENT, mask.shape)?;
        let [batch, head, row] = repeats;
        let boolean = mask.dtype == DType::Bool;
        Ok(Some(Bias { batch, head, row, columns, boolean }))
    }
}

/// Checks that every length is within K, and that attn_mask covers it.
fn check_lengths(p: &Problem, inputs: &AttentionInputs<'_>) -> Result<()> {
    let Some(Tensor::I64(lengths)) = inputs.nonpad_kv_seqlen else { return Ok(()) };
    let (most, what) = match p.bias {
        Some(bias) if bias.columns < p.capacity => (bias.columns, "columns of attn_mask"),
        _ => (p.capacity, "rows of K"),
    };
    for (b, &length) in lengths.iter().enumerate() {
        if !usize::try_from(length).is_ok_and(|length| length <= most) {
            let got = format!("{length} for batch entry {b}");
            return Err(Error::invalid(
                "nonpad_kv_seqlen",
                got,
                format!("0 to {most}, the {what}"),
            ));
        }
    }
    Ok(())
}
