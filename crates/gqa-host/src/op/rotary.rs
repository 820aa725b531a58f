//! ONNX `RotaryEmbedding`, as operator set 23 defines it.

use super::validate::{Dim, Pattern};
use crate::backend::{Backend, Io, run};
use gqa_plan::limits::{MAX_HEAD_SIZE, MAX_HEADS, addressable, check_rows, shape};
use gqa_plan::plan::{TensorId, Tensors};
use gqa_plan::{CallKind, Layout, Problem, ProblemFields, Rotary};
use gqa_tensor::{DType, Error, Result, Tensor, TensorDesc};
use ndarray::{Array1, Array2};

/// The operator's attributes, with ONNX's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RotaryEmbedding {
    interleaved: i64,
    num_heads: i64,
    rotary_embedding_dim: i64,
}

impl RotaryEmbedding {
    /// Every attribute as if it were not given.
    pub fn new() -> Self {
        Self::default()
    }

    /// 1: pairs are (2i, 2i+1). 0: pairs are (i, i + dim/2).
    pub fn interleaved(self, interleaved: i64) -> Self {
        Self { interleaved, ..self }
    }

    /// Heads; required with three dimensions. With four they must match X; 0: not given.
    pub fn num_heads(self, num_heads: i64) -> Self {
        Self { num_heads, ..self }
    }

    /// Leading elements of each head that rotate; 0: all.
    pub fn rotary_embedding_dim(self, rotary_embedding_dim: i64) -> Self {
        Self { rotary_embedding_dim, ..self }
    }

    /// Applies the operator. The result has the shape of X.
    ///
    /// # Errors
    ///
    /// Those of [`problem`](Self::problem), and the back end's.
    pub fn run(&self, inputs: &RotaryInputs<'_>, backend: &dyn Backend) -> Result<Tensor> {
        let problem = self.problem(inputs)?;
        let mut output = Tensor::try_zeros("Y", problem.dtype, &problem.output_shape())?;
        if problem.is_empty() {
            return Ok(output);
        }
        let rows = (problem.batch, problem.q_len);
        let (b, s) = rows;
        let every_row: Tensor = Array2::from_shape_fn(rows, |(b, row)| (b * s + row) as i64).into();
        let seqlens_k: Tensor = Array1::from(vec![s as i32 - 1; b]).into();
        let mut no_cache = [(); 2].map(|()| Tensor::zeros(DType::F32, &[0]));
        let [present_key, present_value] = &mut no_cache;
        run(
            backend,
            &problem,
            &mut Io {
                inputs: Tensors::default()
                    .with(TensorId::Query, inputs.x)
                    .with(TensorId::SeqlensK, &seqlens_k)
                    .with(TensorId::CosCache, inputs.cos_cache)
                    .with(TensorId::SinCache, inputs.sin_cache)
                    .with(TensorId::PositionIds, inputs.position_ids.unwrap_or(&every_row)),
                output: &mut output,
                present_key,
                present_value,
                row_scales: None,
                output_qk: None,
                lse: None,
            },
        )?;
        Ok(output)
    }

    /// Checks the call.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] names the input or attribute that is not allowed, what was got and what
    /// is allowed.
    pub fn problem(&self, inputs: &RotaryInputs<'_>) -> Result<Problem> {
        let x = inputs.x.desc();
        let (layout, [batch, heads, rows, size]) = self.sizes(x)?;
        let dim = self.dim(size)?;
        let max_positions = check_caches(inputs, x.dtype, [batch, rows, dim / 2])?;
        check_rows("X", &[batch, heads, rows])?;
        Problem::new(ProblemFields {
            computes: CallKind::Rotation,
            batch,
            q_heads: heads,
            kv_heads: heads,
            head_size: size,
            v_head_size: size,
            q_len: rows,
            total_len: rows,
            capacity: rows,
            layout,
            rotary: Some(Rotary {
                dim,
                offset: 0,
                interleaved: self.interleaved == 1,
                max_positions,
                explicit: Some(rows),
            }),
            ..ProblemFields::plain("RotaryEmbedding", x.dtype)
        })
    }

    /// Batch entries, heads, rows and head size of X.
    fn sizes(&self, x: TensorDesc<'_>) -> Result<(Layout, [usize; 4])> {
        if !matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid("X", x.dtype, "float32, float16 or bfloat16"));
        }
        addressable("X", x.shape)?;
        let heads = usize::try_from(self.num_heads).ok().filter(|heads| *heads <= MAX_HEADS);
        let heads = heads.ok_or_else(|| {
            Error::invalid("num_heads", self.num_heads, format!("0 to {MAX_HEADS}"))
        })?;
        let sizes = match *x.shape {
            [batch, n, rows, size] if heads == 0 || heads == n => {
                (Layout::Bnsh, [batch, n, rows, size])
            }
            [_, n, _, _] => {
                let allowed = format!("no attribute, or {n}, the heads of X");
                return Err(Error::invalid("num_heads", heads, allowed));
            }
            [_, _, _] if heads == 0 => {
                let allowed = "one, as X has three dimensions";
                return Err(Error::invalid("num_heads", "no attribute", allowed));
            }
            [batch, rows, width] if width % heads == 0 => {
                (Layout::Bsnh, [batch, heads, rows, width / heads])
            }
            [_, _, _] => {
                let allowed = format!("a last dimension that is a multiple of num_heads = {heads}");
                return Err(Error::invalid("X", shape(x.shape), allowed));
            }
            _ => return Err(Error::invalid("X", shape(x.shape), "3 or 4 dimensions")),
        };
        match sizes.1 {
            [_, heads, ..] if heads > MAX_HEADS => {
                Err(Error::invalid("X", format!("{heads} heads"), format!("1 to {MAX_HEADS}")))
            }
            [.., size] if size > MAX_HEAD_SIZE => {
                let got = format!("{}, so a head size of {size}", shape(x.shape));
                Err(Error::invalid("X", got, format!("up to {MAX_HEAD_SIZE}")))
            }
            _ => Ok(sizes),
        }
    }

    /// Elements of a head that rotate.
    fn dim(&self, size: usize) -> Result<usize> {
        if !(0..=1).contains(&self.interleaved) {
            return Err(Error::invalid("interleaved", self.interleaved, "0 or 1"));
        }
        match usize::try_from(self.rotary_embedding_dim) {
            Ok(0) if size % 2 == 0 => Ok(size),
            Ok(0) => {
                let got = format!("none, with a head size of {size}");
                Err(Error::invalid("rotary_embedding_dim", got, "an even number, or an even size"))
            }
            Ok(dim) if dim <= size && dim % 2 == 0 => Ok(dim),
            _ => {
                let allowed = format!("an even number up to the head size of {size}");
                Err(Error::invalid("rotary_embedding_dim", self.rotary_embedding_dim, allowed))
            }
        }
    }
}

/// Rows of the caches: any number with position_ids, without one for each row of X.
fn check_caches(
    inputs: &RotaryInputs<'_>,
    dtype: DType,
    [batch, rows, half]: [usize; 3],
) -> Result<usize> {
    let (cos, sin) = (inputs.cos_cache.desc(), inputs.sin_cache.desc());
    let check = |argument, tensor: TensorDesc<'_>, dims: &[Dim]| {
        Pattern { argument, dtype, why: ", the type of X", dims }.check(tensor)
    };
    let width = Dim::Is("rotary_embedding_dim / 2", half);
    let entries = [Dim::Is("batch_size", batch), Dim::Is("sequence_length", rows)];
    let Some(ids) = inputs.position_ids else {
        let dims = [entries[0], entries[1], width];
        check("cos_cache", cos, &dims)?;
        check("sin_cache", sin, &dims)?;
        return Ok(batch * rows);
    };
    check("cos_cache", cos, &[Dim::Any("max_position_id_plus_1"), width])?;
    let positions = cos.shape[0];
    check("sin_cache", sin, &[Dim::Is("max_position_id_plus_1", positions), width])?;
    Pattern { argument: "position_ids", dtype: DType::I64, why: "", dims: &entries }
        .check(ids.desc())?;
    let Tensor::I64(ids) = ids else { return Ok(positions) };
    match ids.iter().find(|&&id| !usize::try_from(id).is_ok_and(|id| id < positions)) {
        Some(id) => {
            let allowed = match positions.checked_sub(1) {
                Some(last) => format!("0 to {last}, the last row of cos_cache"),
                None => "none, as cos_cache has no rows".to_owned(),
            };
            Err(Error::invalid("position_ids", id, allowed))
        }
        None => Ok(positions),
    }
}

/// The operator's inputs under their ONNX names; checked when the operator is applied.
#[derive(Clone, Copy, Debug)]
pub struct RotaryInputs<'a> {
    /// (B, N, S, H) or (B, S, N·H)
    pub x: &'a Tensor,
    /// (positions, dim/2), or without position_ids (B, S, dim/2)
    pub cos_cache: &'a Tensor,
    /// As cos_cache
    pub sin_cache: &'a Tensor,
    /// int64 (B, S)
    pub position_ids: Option<&'a Tensor>,
}
