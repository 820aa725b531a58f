//! What happens before attention: unpacking, normalisation, rotation, and the cache update.

use super::build::{element, find, launch, seqlens, strides, tensor, u32_of};
use super::device::DeviceInfo;
use super::family::FusedPrologue;
use super::launch::{Arg, Launch};
use super::params::{format, position_stride, rope_offset, rotary_params, scale_tensors, scales};
use super::positions::{Positions, positions};
use super::rows::{Operand, Rows};
use super::scratch::Scratch;
use crate::tensors::TensorId;
use crate::{Alignment, CacheBinding, CallKind, DType, Error, Phase, Problem, Result, RowLayout};
use bytemuck::Zeroable;
use gqa_kernels::params::{PrologueParams, Strides};
use gqa_kernels::registry::{Entry, Role};

/// One launch before attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Normalise Q and K.
    Normalise,
    /// Rotate Q and K and append K and V to a shared cache, from packed or separate inputs.
    UnpackRotateAppend,
    /// Append K and V to a shared cache, K rotated if `rotate`.
    Append { rotate: bool },
    /// Append K and V to a shared and quantized cache, K rotated if `rotate`.
    AppendQuantized { rotate: bool },
    /// The same, and dequantize all of it into scratch.
    AppendDequantized {
        rotate: bool,
        /// Whether scales are per token.
        by_row: bool,
    },
    /// Copy the past and append K and V, K rotated if `rotate`.
    Concat { rotate: bool },
    /// Copy the past and append K and V, whatever the sizes of their rows.
    ConcatRows,
    /// Quantize new rows into the cache, and dequantize all of it into scratch.
    Quantize,
    /// Packed QKV to Q, K and V.
    Unpack,
    /// Positions to memory.
    GeneratePositions,
    /// Rotate Q.
    RotateQuery,
    /// Rotate K.
    RotateKey,
    /// Rotate Q into the output.
    RotateOutput {
        /// Whether rows and their rotated halves are whole vectors.
        whole: bool,
    },
}

/// The launches for a call: as few as possible, or one per task if `fused` is false.
fn steps(p: &Problem, fused: bool, by_attention: FusedPrologue) -> Vec<Step> {
    if let (CallKind::Rotation, Some(rotary)) = (p.computes, p.rotary) {
        let vector = 16 / p.dtype.size();
        let whole = p.head_size % vector == 0 && rotary.dim / 2 % vector == 0;
        return vec![Step::RotateOutput { whole }];
    }
    let (rotate, new) = (p.rotary.is_some(), p.new_len > 0);
    // New rows are first appended to a dequantized copy of a quantized cache in scratch memory, as
    // to a shared cache.
    let shared = p.cache == CacheBinding::Shared || p.quantized.is_some();
    let alike = p.latent || p.v_head_size == p.head_size;
    let whole = alike && p.head_size * p.dtype.size() % 16 == 0;
    let (concat, rows) = match p.cache {
        CacheBinding::Separate if !shared => (whole, !whole),
        _ => (false, false),
    };
    // If attention reads quantized values, nothing is dequantized.
    let reads_codes = p.quantized.is_some() && by_attention.reads_quantized;
    let dequantizes = p.quantized.is_some() && !reads_codes;
    // In place one pass does everything. A separate past is copied by the last launch.
    let at_once = dequantizes && p.cache == CacheBinding::Shared;
    let append = |rotate| match (reads_codes, at_once) {
        (true, _) => Step::AppendQuantized { rotate },
        (false, true) => {
            Step::AppendDequantized { rotate: rotate && new, by_row: p.has_row_scales() }
        }
        (false, false) => Step::Append { rotate },
    };
    let appends = shared && new || at_once;
    let mut steps = Vec::new();
    let mut push = |wanted: bool, step| steps.extend(wanted.then_some(step));
    push(p.qk_norm.is_some(), Step::Normalise);
    if by_attention.new_rows {
        return steps;
    }
    if fused {
        let rotate_query = rotate && !by_attention.query_rotation;
        let all_in_one = shared && new && rotate_query && !reads_codes && !at_once;
        push(all_in_one, Step::UnpackRotateAppend);
        push(concat, Step::Concat { rotate });
        push(rows, Step::ConcatRows);
        push(appends && !all_in_one, append(rotate));
        push(rotate_query && !all_in_one, Step::RotateQuery);
    } else {
        push(p.packed, Step::Unpack);
        push(positions(p, fused) == Some(Positions::Generated), Step::GeneratePositions);
        push(rotate, Step::RotateQuery);
        push(rotate && new, Step::RotateKey);
        push(appends, append(false));
        push(concat, Step::Concat { rotate: false });
        push(rows, Step::ConcatRows);
    }
    steps.extend((dequantizes && !at_once).then_some(Step::Quantize));
    steps
}

impl Step {
    /// The role of its kernels.
    const fn role(self) -> Role {
        match self {
            Self::Normalise => Role::QkNorm,
            Self::UnpackRotateAppend => Role::UnpackRotateAppend,
            Self::Append { .. } => Role::AppendInPlace,
            Self::AppendQuantized { .. } => Role::AppendQuantized,
            Self::AppendDequantized { by_row: false, .. } => Role::AppendDequantized,
            Self::AppendDequantized { by_row: true, .. } => Role::AppendDequantizedRows,
            Self::Concat { .. } => Role::ConcatNewToPast,
            Self::ConcatRows => Role::ConcatRows,
            Self::Quantize => Role::QuantizeKv,
            Self::Unpack => Role::Unpack,
            Self::GeneratePositions => Role::GeneratePositions,
            Self::RotateQuery | Self::RotateKey | Self::RotateOutput { whole: true } => {
                Role::RotaryEmbedding
            }
            Self::RotateOutput { whole: false } => Role::RotaryRows,
        }
    }

    /// Its kernel for the call's element type.
    fn entry(self, dtype: DType) -> Result<&'static Entry> {
        let typed = match self {
            Self::GeneratePositions => None,
            _ => Some(element(dtype).ok_or_else(|| {
                let name = self.role().name();
                Error::NoKernel(format!("{name} has no kernel for {dtype}"))
            })?),
        };
        find(self.role(), typed)
    }
}

/// The launches before attention, and where attention finds the rows. Unless it appends them
/// itself, K and V are in the present cache.
pub(super) fn prologue(
    p: &Problem,
    device: &DeviceInfo,
    fused: bool,
    by_attention: FusedPrologue,
    scratch: &mut Scratch,
) -> Result<(Vec<Launch>, Rows)> {
    let mut builder = Builder::new(p, device, scratch)?;
    if p.quantized.is_some() && !by_attention.new_rows && !by_attention.reads_quantized {
        builder.take_room_for_dequantized()?;
    }
    for step in steps(p, fused, by_attention) {
        builder.step(step)?;
    }
    Ok((builder.launches, builder.rows))
}

/// The QK-norm launch, if the call has QK-norm, and where the rows are after it.
pub(super) fn normalise(
    p: &Problem,
    device: &DeviceInfo,
    scratch: &mut Scratch,
) -> Result<(Vec<Launch>, Rows)> {
    let mut builder = Builder::new(p, device, scratch)?;
    if p.qk_norm.is_some() {
        builder.step(Step::Normalise)?;
    }
    Ok((builder.launches, builder.rows))
}

/// Where the rows of this call are after the steps so far.
struct Builder<'a> {
    problem: &'a Problem,
    device: &'a DeviceInfo,
    scratch: &'a mut Scratch,
    launches: Vec<Launch>,
    rows: Rows,
    /// position_ids, null where implicit, and the distance between its rows.
    positions: (Arg, u32),
}

impl<'a> Builder<'a> {
    fn new(p: &'a Problem, device: &'a DeviceInfo, scratch: &'a mut Scratch) -> Result<Self> {
        Ok(Self {
            problem: p,
            device,
            scratch,
            launches: Vec::new(),
            rows: Rows::given(p),
            positions: (tensor(p, TensorId::PositionIds, 0), position_stride(p)?),
        })
    }

    fn step(&mut self, step: Step) -> Result<()> {
        let p = self.problem;
        match step {
            Step::Normalise => self.normalise(step)?,
            Step::UnpackRotateAppend => {
                let query = self.scratch_rows(p.q_heads, p.q_len)?;
                self.launch(step, &[("q_out", query.arg)], |params| params.q_out = query.strides)?;
                self.rows.query = query;
            }
            Step::Append { .. } | Step::Concat { .. } => self.launch(step, &[], |_| {})?,
            Step::AppendQuantized { .. } => self.launch(step, &scale_tensors(p), |_| {})?,
            Step::AppendDequantized { .. } => self.append_dequantized(step)?,
            Step::ConcatRows => self.concat_rows(step)?,
            Step::RotateOutput { .. } => {
                let output = tensor(p, TensorId::Output, 0);
                let to = strides(p.output_layout());
                self.launch(step, &[("q_out", output)], |params| params.q_out = to)?;
            }
            Step::Quantize => self.quantize(step)?,
            Step::Unpack => self.unpack(step)?,
            Step::GeneratePositions => self.generate_positions(step)?,
            Step::RotateQuery => {
                self.rows.query = self.rotate(step, self.rows.query, p.q_heads, p.q_len)?
            }
            Step::RotateKey => {
                self.rows.key = self.rotate(step, self.rows.key, p.kv_heads, p.new_len)?
            }
        }
        Ok(())
    }

    fn normalise(&mut self, step: Step) -> Result<()> {
        let p = self.problem;
        let query = self.scratch_rows(p.q_heads, p.q_len)?;
        // No new keys: nothing to normalise.
        let key =
            if p.new_len == 0 { self.rows.key } else { self.scratch_rows(p.kv_heads, p.new_len)? };
        let arguments = [
            ("q_out", query.arg),
            ("k_out", key.arg),
            ("q_norm_weight", tensor(p, TensorId::QNormWeight, 0)),
            ("k_norm_weight", tensor(p, TensorId::KNormWeight, 0)),
        ];
        self.launch(step, &arguments, |params| {
            params.q_out = query.strides;
            params.kv_out = key.strides;
        })?;
        self.rows = Rows { query, key, ..self.rows };
        Ok(())
    }

    /// Scratch for a quantized cache dequantized.
    fn take_room_for_dequantized(&mut self) -> Result<()> {
        let p = self.problem;
        let layout = p.cache_layout(p.capacity);
        let mut room = || self.scratch.take(p.batch * layout.batch, p.dtype.size());
        let keys = room()?;
        self.rows.attended = [keys, if p.latent { keys } else { room()? }];
        Ok(())
    }

    fn append_dequantized(&mut self, step: Step) -> Result<()> {
        let p = self.problem;
        let [k, v] = self.rows.attended;
        let [k_scale, v_scale] = scale_tensors(p);
        let arguments = [
            ("k_numbers", k),
            ("v_numbers", v),
            ("present_k", tensor(p, TensorId::PresentKey, 0)),
            ("present_v", tensor(p, TensorId::PresentValue, 0)),
            k_scale,
            v_scale,
        ];
        self.launch(step, &arguments, |_| {})
    }

    fn quantize(&mut self, step: Step) -> Result<()> {
        let p = self.problem;
        let [k, v] = self.rows.attended;
        let [k_scale, v_scale] = scale_tensors(p);
        let arguments = [
            ("k", k),
            ("v", v),
            ("present_k", tensor(p, TensorId::PresentKey, 0)),
            ("present_v", tensor(p, TensorId::PresentValue, 0)),
            k_scale,
            v_scale,
        ];
        self.launch(step, &arguments, |_| {})
    }

    /// K and V one after the other.
    fn concat_rows(&mut self, step: Step) -> Result<()> {
        let p = self.problem;
        let tensor = |id| tensor(p, id, 0);
        let ids = [
            (TensorId::PastKey, self.rows.key, TensorId::PresentKey, p.head_size),
            (TensorId::PastValue, self.rows.value, TensorId::PresentValue, p.v_head_size),
        ];
        for (past, new, present, size) in ids {
            let arguments =
                [("past", tensor(past)), ("new", new.arg), ("present", tensor(present))];
            let rows = |rows: usize| Strides {
                batch: (p.kv_heads * rows * size) as u64,
                head: (rows * size) as u64,
                row: size as u64,
            };
            let head_size = u32_of("head size", size)?;
            self.launch(step, &arguments, |params| {
                params.k = new.strides;
                params.past = rows(p.past_capacity);
                params.kv_out = rows(p.capacity);
                params.head_size = head_size;
            })?;
        }
        Ok(())
    }

    fn unpack(&mut self, step: Step) -> Result<()> {
        let p = self.problem;
        let query = self.scratch_rows(p.q_heads, p.q_len)?;
        let [key, value] =
            [self.scratch_rows(p.kv_heads, p.new_len)?, self.scratch_rows(p.kv_heads, p.new_len)?];
        let outputs = [("q_out", query.arg), ("k_out", key.arg), ("v_out", value.arg)];
        self.launch(step, &outputs, |params| {
            params.q_out = query.strides;
            params.kv_out = key.strides;
        })?;
        self.rows = Rows { query, key, value, ..self.rows };
        Ok(())
    }

    fn generate_positions(&mut self, step: Step) -> Result<()> {
        let rows = self.problem.q_len;
        let ids = self.scratch.take(self.problem.batch * rows, DType::I64.size())?;
        let stride = u32_of("query rows", rows)?;
        self.launch(step, &[("position_ids", ids)], |params| {
            params.rotary.position_stride = stride
        })?;
        self.positions = (ids, stride);
        Ok(())
    }

    /// `rotary_embedding` takes any rows as its query.
    fn rotate(&mut self, step: Step, from: Operand, heads: usize, rows: usize) -> Result<Operand> {
        let to = self.scratch_rows(heads, rows)?;
        let heads = u32_of("heads", heads)?;
        self.launch(step, &[("q", from.arg), ("q_out", to.arg)], |params| {
            params.q = from.strides;
            params.q_out = to.strides;
            params.q_heads = heads;
        })?;
        Ok(to)
    }

    /// Scratch for dense rows, (batch, row, head) in this order.
    fn scratch_rows(&mut self, heads: usize, rows: usize) -> Result<Operand> {
        let h = self.problem.head_size;
        let layout = RowLayout { offset: 0, batch: rows * heads * h, head: h, row: heads * h };
        let arg =
            self.scratch.take(self.problem.batch * layout.batch, self.problem.dtype.size())?;
        Ok(Operand { arg, strides: strides(layout) })
    }

    /// Launches a step's kernel with everything bound as it is now, except `arguments` and what
    /// `adjust` changes.
    fn launch(
        &mut self,
        step: Step,
        arguments: &[(&'static str, Arg)],
        adjust: impl FnOnce(&mut PrologueParams),
    ) -> Result<()> {
        let entry = step.entry(self.problem.dtype)?;
        let mut params = self.params(step)?;
        adjust(&mut params);
        let bound = [arguments, &self.arguments(step), &seqlens(self.problem)].concat();
        let grid =
            gqa_kernels::registry::prologue_grid::grid(entry, &params, self.device.multiprocessors);
        self.launches.push(launch(entry, grid, &bound, &params)?);
        Ok(())
    }

    /// Everything a kernel may ask for; what only rotation needs is null where nothing rotates.
    fn arguments(&self, step: Step) -> [(&'static str, Arg); 10] {
        let p = self.problem;
        let rotation = |arg| if step.rotates() { arg } else { Arg::Null };
        [
            ("q", self.rows.query.arg),
            ("k", self.rows.key.arg),
            ("v", self.rows.value.arg),
            ("past_k", tensor(p, TensorId::PastKey, 0)),
            ("past_v", tensor(p, TensorId::PastValue, 0)),
            ("present_k", self.rows.attended[0]),
            ("present_v", self.rows.attended[1]),
            ("cos", rotation(tensor(p, TensorId::CosCache, 0))),
            ("sin", rotation(tensor(p, TensorId::SinCache, 0))),
            ("position_ids", rotation(self.positions.0)),
        ]
    }

    /// Rows at each sequence's end that are this call's: the query's, unless the call says where
    /// these stand.
    fn rows_appended(&self) -> usize {
        match self.problem.alignment {
            Alignment::Past(_) => self.problem.new_len,
            Alignment::Phase | Alignment::End => self.problem.q_len,
        }
    }

    fn params(&self, step: Step) -> Result<PrologueParams> {
        let p = self.problem;
        let rotary = p.rotary.filter(|_| step.rotates());
        Ok(PrologueParams {
            q: self.rows.query.strides,
            k: self.rows.key.strides,
            v: self.rows.value.strides,
            q_out: Strides::zeroed(),
            kv_out: strides(p.cache_layout(p.capacity)),
            past: strides(p.cache_layout(p.past_capacity)),
            batch: u32_of("batch", p.batch)?,
            q_heads: u32_of("query heads", p.q_heads)?,
            kv_heads: u32_of("KV heads", p.kv_heads)?,
            head_size: u32_of("head size", p.head_size)?,
            q_len: u32_of("query rows", self.rows_appended())?,
            new_len: u32_of("new keys", p.new_len)?,
            past_capacity: u32_of("past rows", p.past_capacity)?,
            capacity: u32_of("present rows", p.capacity)?,
            first_prompt: (p.phase == Phase::FirstPrompt).into(),
            rotary: rotary_params(rotary, self.positions.1)?,
            // Kernels flush smaller ones to 0, and a row of zeros would become NaN.
            q_epsilon: p.qk_norm.map_or(0.0, |norm| norm.q_epsilon.max(f32::MIN_POSITIVE)),
            k_epsilon: p.qk_norm.map_or(0.0, |norm| norm.k_epsilon.max(f32::MIN_POSITIVE)),
            scales: scales(p),
            format: format(p),
            rope_offset: rope_offset(rotary)?,
            value_heads: u32_of("KV heads", p.value_heads())?,
            reserved: 0,
        })
    }
}

impl Step {
    const fn rotates(self) -> bool {
        matches!(
            self,
            Self::UnpackRotateAppend
                | Self::Append { rotate: true }
                | Self::AppendQuantized { rotate: true }
                | Self::AppendDequantized { rotate: true, .. }
                | Self::Concat { rotate: true }
                | Self::RotateQuery
                | Self::RotateKey
                | Self::RotateOutput { .. }
        )
    }
}
