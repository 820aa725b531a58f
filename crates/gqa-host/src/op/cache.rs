//! Updating a cache outside of attention, as ONNX `TensorScatter` does in its linear mode.

use super::KvCache;
use super::validate::{Dim, MAX_HEAD_SIZE, Pattern, check_rows, shape};
use crate::backend::{Backend, Io, run};
use crate::plan::{TensorId, Tensors};
use crate::{
    CacheBinding, Computes, DType, Error, Layout, Phase, Problem, ProblemFields, Result, Tensor,
};
use ndarray::Array1;

impl KvCache {
    /// Writes the rows of `key` and `value`, (B, Nk, L, H) or (B, L, Nk·H), into the cache in place: those of batch entry `b` to
    /// rows `write_indices[b] ..`, int64 (B). With `nonpad_kv_seqlen = write_indices + L`, ONNX Attention then attends to the cache.
    /// H is a multiple of 8.
    pub fn write(
        &mut self,
        key: &Tensor,
        value: &Tensor,
        write_indices: &Tensor,
        backend: &dyn Backend,
    ) -> Result<()> {
        let problem = self.update(key, value)?;
        let seqlens_k = last_rows(&problem, write_indices)?;
        let mut output = Tensor::zeros(problem.dtype, &[0]);
        run(
            backend,
            &problem,
            &mut Io {
                inputs: Tensors::default()
                    .with(TensorId::Key, key)
                    .with(TensorId::Value, value)
                    .with(TensorId::SeqlensK, &seqlens_k),
                output: &mut output,
                present_key: &mut self.key,
                present_value: &mut self.value,
                output_qk: None,
                lse: None,
            },
        )
    }

    /// The validated update.
    fn update(&self, key: &Tensor, value: &Tensor) -> Result<Problem> {
        let cache = self.key.desc();
        if !matches!(cache.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid("past_key", cache.dtype, "float32, float16 or bfloat16"));
        }
        let &[batch, heads, capacity, size] = cache.shape else {
            return Err(Error::invalid("past_key", shape(cache.shape), "4 dimensions"));
        };
        if size % 8 != 0 || !(8..=MAX_HEAD_SIZE).contains(&size) {
            let allowed = format!("a head_size that is a multiple of 8 from 8 to {MAX_HEAD_SIZE}");
            return Err(Error::invalid("past_key", shape(cache.shape), allowed));
        }
        let rows = Dim::Is("capacity", capacity);
        let dims = |rows| {
            let [batch, heads] = [Dim::Is("batch_size", batch), Dim::Is("kv_num_heads", heads)];
            [batch, heads, rows, Dim::Is("head_size", size)]
        };
        let check = |argument, tensor: &Tensor, dims: &[Dim]| {
            Pattern { argument, dtype: cache.dtype, why: ", the type of past_key", dims }
                .check(tensor.desc())
        };
        check("past_value", &self.value, &dims(rows))?;
        if capacity == 0 {
            return Err(Error::invalid("past_key", shape(cache.shape), "1 row or more"));
        }
        let new_len = key.shape().get(if key.shape().len() == 3 { 1 } else { 2 }).copied();
        let new_len = new_len.filter(|n| (1..=capacity).contains(n)).ok_or_else(|| {
            let allowed = format!("1 to {capacity} rows, those of the cache");
            Error::invalid("key", shape(key.shape()), allowed)
        })?;
        let layout = Layout::of_rank(key.shape().len())
            .ok_or_else(|| Error::invalid("key", shape(key.shape()), "3 or 4 dimensions"))?;
        let rows = Dim::Is("rows", new_len);
        let dims = match layout {
            Layout::Bnsh => dims(rows).to_vec(),
            Layout::Bsnh => {
                let width = Dim::Is("kv_num_heads * head_size", heads * size);
                vec![Dim::Is("batch_size", batch), rows, width]
            }
        };
        check("key", key, &dims)?;
        check("value", value, &dims)?;
        check_rows("past_key", &[batch, heads, capacity])?;
        Problem::new(ProblemFields {
            computes: Computes::Cache,
            batch,
            q_heads: heads,
            kv_heads: heads,
            head_size: size,
            v_head_size: size,
            q_len: new_len,
            new_len,
            total_len: capacity,
            past_capacity: capacity,
            capacity,
            phase: Phase::SubsequentPrompt,
            cache: CacheBinding::Shared,
            layout,
            causal: true,
            ..ProblemFields::plain("TensorScatter", cache.dtype)
        })
    }
}

/// The last row that each batch entry's update writes.
fn last_rows(p: &Problem, write_indices: &Tensor) -> Result<Tensor> {
    let dims = [Dim::Is("batch_size", p.batch)];
    Pattern { argument: "write_indices", dtype: DType::I64, why: "", dims: &dims }
        .check(write_indices.desc())?;
    let Tensor::I64(first) = write_indices else {
        return Err(Error::invalid("write_indices", write_indices.dtype(), "int64"));
    };
    let most = p.capacity - p.new_len;
    let last = first.iter().enumerate().map(|(b, &first)| match usize::try_from(first) {
        Ok(first) if first <= most => Ok((first + p.new_len) as i32 - 1),
        _ => {
            let got = format!("{first} for batch entry {b}");
            let allowed = format!("0 to {most}, so that {} rows fit into the cache", p.new_len);
            Err(Error::invalid("write_indices", got, allowed))
        }
    });
    Ok(Array1::from(last.collect::<Result<Vec<i32>>>()?).into())
}
