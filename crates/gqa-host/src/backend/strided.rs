//! Strided copies of a call's tensors, for plans with strides, on the simulated GPU.

use super::Io;
use gqa_plan::plan::TensorId;
use gqa_plan::{Problem, RowLayout, RowStrides, Strided};
use gqa_tensor::POISON;
use gqa_tensor::{Error, Result, Tensor};

/// Rows of a strided tensor and of its contiguous copy.
struct Rows {
    dims: [usize; 4],
    element: usize,
    strided: RowLayout,
    contiguous: RowLayout,
}

impl Rows {
    /// The rows of a tensor that is strided in the problem.
    fn of(p: &Problem, id: TensorId) -> Option<Self> {
        id.spec(p)?;
        let (dense, Strided { query, key, value, output, pages, .. }) = (p.contiguous(), p.strided);
        let of_pages = |p: &Problem| {
            let strides = match id {
                TensorId::PresentKey => p.pages_strides(p.pages?),
                _ => p.page_values_strides(p.pages?),
            };
            let RowStrides { batch, head, row } = strides;
            Some(RowLayout { offset: 0, batch, head, row })
        };
        let (strides, element, strided, contiguous) = match id {
            TensorId::Query => (query, p.dtype, p.query_layout(), dense.query_layout()),
            TensorId::Key => (key, p.dtype, p.key_layout(), dense.key_layout()),
            TensorId::Value => (value, p.v_dtype, p.value_layout(), dense.value_layout()),
            TensorId::Output => (output, p.out_dtype, p.output_layout(), dense.output_layout()),
            TensorId::PresentKey | TensorId::PresentValue => {
                let strides = match id {
                    TensorId::PresentKey => pages,
                    _ => p.strided.values_of_pages(),
                };
                (strides, p.key_cache_dtype(), of_pages(p)?, of_pages(&dense)?)
            }
            _ => return None,
        };
        let dims = id.row_dims(p);
        strides.map(|_| Self { dims, element: element.size(), strided, contiguous })
    }

    /// Poisoned memory for the strided tensor.
    fn memory(&self) -> Vec<u8> {
        let strides = RowStrides::from(self.strided);
        vec![POISON; strides.extent(self.dims).unwrap_or_default() * self.element]
    }

    /// Calls `f` with the byte offset of each head's row in the strided and in the contiguous
    /// tensor, and the row's bytes.
    fn for_each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let [batch, heads, rows, size] = self.dims;
        for (b, n) in (0..batch).flat_map(|b| (0..heads).map(move |n| (b, n))) {
            for s in 0..rows {
                let [to, from] = [self.strided, self.contiguous].map(|at| at.at(b, n, s));
                f(to * self.element, from * self.element, size * self.element);
            }
        }
    }
}

/// A tensor with the problem's strides; `None` where it is contiguous.
pub(super) fn scattered(p: &Problem, id: TensorId, tensor: &Tensor) -> Option<Vec<u8>> {
    let rows = Rows::of(p, id)?;
    let (mut memory, bytes) = (rows.memory(), tensor.bytes());
    rows.for_each(|to, from, n| memory[to..to + n].copy_from_slice(&bytes[from..from + n]));
    Some(memory)
}

/// Strided outputs: poisoned memory for the output, and a copy of a paged KV cache.
pub(super) fn outputs(p: &Problem, io: &Io<'_>) -> Vec<(TensorId, Vec<u8>)> {
    let output = Rows::of(p, TensorId::Output).map(|rows| rows.memory());
    let outputs = [
        (TensorId::Output, output),
        (TensorId::PresentKey, scattered(p, TensorId::PresentKey, io.present_key)),
        (TensorId::PresentValue, scattered(p, TensorId::PresentValue, io.present_value)),
    ];
    outputs.into_iter().filter_map(|(id, memory)| Some((id, memory?))).collect()
}

/// Copies a strided output into the call's tensor. Errs where a kernel wrote between rows.
pub(super) fn gather(
    p: &Problem,
    id: TensorId,
    mut memory: Vec<u8>,
    tensor: &mut Tensor,
) -> Result<()> {
    let Some(rows) = Rows::of(p, id) else { return Ok(()) };
    let bytes = tensor.bytes_mut()?;
    rows.for_each(|from, to, n| {
        bytes[to..to + n].copy_from_slice(&memory[from..from + n]);
        memory[from..from + n].fill(POISON);
    });
    if memory.iter().all(|&byte| byte == POISON) {
        return Ok(());
    }
    Err(Error::invalid(id.name(), "bytes written between its rows", "none"))
}
