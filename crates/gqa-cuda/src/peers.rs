//! Merges attention results of several GPUs, through memory that they map of each other.

use super::device::Device;
use super::kernel::Kernel;
use super::loaded::launch_failed;
use super::raw::module::{self, Shape};
use super::stream::Stream;
use gqa_kernels::attention::merge_peers::{BLOCKS, RANKS, SLOTS, STATE_WORDS, THREADS};
use gqa_kernels::params::{PeersParams, Strides};
use gqa_kernels::registry::{self, Entry};
use gqa_plan::plan::Capability;
use gqa_ptx::Constants;
use gqa_tensor::{DType, Error, Result};
use std::ffi::c_void;

/// The memory through which GPUs exchange their parts, on one of them. All of it is zero before
/// the first merge.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// This GPU's number.
    pub rank: usize,
    /// The inboxes of all ranks, 2 to 8, this GPU's own included, at the addresses where this GPU
    /// maps them. Each has [`inbox_bytes`](Self::inbox_bytes).
    pub inboxes: Vec<u64>,
    /// Room for the 16-byte pairs that one GPU sends in a merge.
    pub capacity: usize,
    /// [`STATE_BYTES`](Self::STATE_BYTES) of this GPU's memory.
    pub state: u64,
    /// A 32-bit word that this GPU can write, in its own memory or the host's. 0 until a merge has
    /// timed out; then it has a bit for each rank that did not send.
    pub late: u64,
}

impl Exchange {
    /// Bytes of the state.
    pub const STATE_BYTES: usize = 4 * STATE_WORDS as usize;
    /// Most GPUs.
    pub const MOST: usize = RANKS;

    /// Bytes of an inbox for that number of GPUs.
    pub const fn inbox_bytes(count: usize, capacity: usize) -> usize {
        SLOTS as usize * count * capacity * 16
    }

    /// All parameters of a merge, given those of its parts.
    fn params(&self, of_part: PeersParams, timeout: u32) -> Result<PeersParams> {
        let (rank, count, pairs) = (self.rank, self.inboxes.len(), of_part.pairs() as usize);
        if !(2..=RANKS).contains(&count) || rank >= count {
            let got = format!("rank {rank} of {count}");
            return Err(Error::invalid("exchange", got, format!("one of 2 to {RANKS} ranks")));
        }
        let most = u32::MAX as usize / (SLOTS as usize * count);
        if !(pairs..=most).contains(&self.capacity) {
            let allowed = format!("{pairs} to {most} pairs");
            return Err(Error::invalid("exchange", format!("{} pairs", self.capacity), allowed));
        }
        let (rank, count, capacity) = (rank as u32, count as u32, self.capacity as u32);
        Ok(PeersParams { rank, count, capacity, timeout, ..of_part })
    }
}

/// Outputs of shape (batch, rows, heads, size), contiguous, with log-sum-exps of shape (batch,
/// heads, rows).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartShape {
    /// float32, float16 or bfloat16.
    pub dtype: DType,
    /// Sequences.
    pub batch: usize,
    /// Rows of a sequence.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a head: whole units of 8 bytes.
    pub size: usize,
    /// Distances of the part's log-sum-exps, in elements: batch, head and row.
    pub lse: [usize; 3],
}

impl PartShape {
    /// 16-byte pairs that a GPU sends of such a part.
    ///
    /// # Errors
    /// Where no kernel merges such parts.
    pub fn pairs(&self) -> Result<usize> {
        Ok(self.params()?.pairs() as usize)
    }

    /// The kernel parameters that follow from the shape.
    fn params(&self) -> Result<PeersParams> {
        let bytes = self.size * self.dtype.size();
        if bytes == 0 || !bytes.is_multiple_of(8) {
            return Err(Error::invalid("size", self.size, "heads of whole units of 8 bytes"));
        }
        // The kernel indexes an inbox in 32 bits.
        let rows = self.batch.checked_mul(self.rows).and_then(|n| n.checked_mul(self.heads));
        let units = rows.and_then(|rows| rows.checked_mul(bytes / 8 + 1));
        if rows == Some(0) || units.is_none_or(|units| units > 1 << 28) {
            return Err(Error::invalid("shape", format!("{self:?}"), "1 to 2^28 units of 8 bytes"));
        }
        let [batch, head, row] = self.lse.map(|stride| stride as u64);
        Ok(PeersParams {
            part_lse: Strides { batch, head, row },
            rows: rows.unwrap_or_default() as u32,
            heads: self.heads as u32,
            q_len: self.rows as u32,
            row_units: (bytes / 8) as u32,
            rank: 0,
            count: 0,
            capacity: 0,
            timeout: 0,
        })
    }
}

/// Tensors of a merge on one GPU, by their addresses.
#[derive(Clone, Copy, Debug)]
pub struct PartTensors {
    /// This GPU's output.
    pub part: u64,
    /// Its log-sum-exps.
    pub part_lse: u64,
    /// The merged output.
    pub out: u64,
    /// Its log-sum-exps, contiguous.
    pub lse: u64,
}

/// The kernel that merges parts of one shape, loaded on a GPU.
pub struct PeerMerge {
    device: Device,
    entry: &'static Entry,
    kernel: Kernel,
    params: PeersParams,
}

impl Device {
    /// Compiles the kernel that merges parts of a shape.
    ///
    /// # Errors
    /// Where no kernel merges such parts, or the driver is too old for it.
    pub fn peer_merge(&self, shape: &PartShape) -> Result<PeerMerge> {
        let name = match shape.dtype {
            DType::F32 => "gqa_merge_peers_f32",
            DType::F16 => "gqa_merge_peers_f16",
            DType::BF16 => "gqa_merge_peers_bf16",
            other => return Err(Error::invalid("dtype", other, "float32, float16 or bfloat16")),
        };
        let params = shape.params()?;
        let entry = registry::find(name).ok_or_else(|| Error::NoKernel(name.to_owned()))?;
        let _entered = self.enter()?;
        let (kernel, _) = self.modules().kernel(entry, self.info().sm, &Constants::default())?;
        Ok(PeerMerge { device: self.clone(), entry, kernel, params })
    }
}

impl PeerMerge {
    /// Puts the merge into `stream`, behind what makes the part. Every other rank does the same:
    /// the merge waits for their parts, each of its warps for `timeout` microseconds at most. After
    /// a timeout its rows are NaN, the exchange's `late` is set, and all further merges through
    /// this exchange fail without waiting long. Allocates no memory and does not wait. The stream
    /// may be captured.
    ///
    /// # Errors
    /// Where the exchange has other than 2 to 8 ranks or too small a capacity, and where the stream
    /// belongs to another device. Nothing is launched then.
    ///
    /// # Safety
    /// - The tensors are device memory of the shape, and the exchange's of its sizes, until the
    ///   work is done; of another GPU's inbox, until nobody sends to it.
    /// - Merges through one exchange follow each other, in one order on all ranks, whose parts have
    ///   the same shape but for the distances of log-sum-exps.
    pub unsafe fn enqueue(
        &self,
        exchange: &Exchange,
        tensors: &PartTensors,
        timeout: u32,
        stream: &Stream,
    ) -> Result<()> {
        stream.expect_on(&self.device)?;
        let params = exchange.params(self.params, timeout)?;
        let Exchange { rank, inboxes, state, late, .. } = exchange;
        let peers: [u64; RANKS] = std::array::from_fn(|peer| match inboxes.get(peer) {
            Some(inbox) if peer != *rank => *inbox,
            _ => 0,
        });
        let mut pointers = vec![tensors.part, tensors.part_lse, inboxes[*rank]];
        pointers.extend(peers);
        pointers.extend([*state, *late, tensors.out, tensors.lse]);
        let mut arguments: Vec<*mut c_void> =
            pointers.iter().map(|pointer| std::ptr::from_ref(pointer).cast_mut().cast()).collect();
        arguments.push(std::ptr::from_ref(&params).cast_mut().cast());
        debug_assert_eq!(pointers.len(), self.entry.arguments.len());
        let shape = Shape {
            grid: [BLOCKS, 1, 1],
            threads: THREADS,
            shared_bytes: self.entry.shared_bytes,
            cluster: 0,
            // It waits for the launch ahead itself.
            programmatic: Capability::ProgrammaticLaunch.is_of(self.device.info().sm),
            urgent: false,
        };
        let _entered = self.device.enter()?;
        // SAFETY: one value for each pointer of the entry, then its parameters; the rest is the
        // caller's.
        unsafe { module::launch(self.kernel.function, &shape, &mut arguments, stream.raw()) }
            .map_err(|failure| launch_failed(self.entry, failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(size: usize, dtype: DType) -> PartShape {
        PartShape { dtype, batch: 3, rows: 2, heads: 5, size, lse: [10, 2, 1] }
    }

    #[test]
    fn a_part_is_its_log_sum_exps_and_its_units() {
        assert_eq!(shape(128, DType::BF16).pairs().unwrap(), 32 + 30 * 32);
        assert_eq!(shape(128, DType::F32).pairs().unwrap(), 32 + 30 * 64);
    }

    #[test]
    fn heads_of_no_whole_units_are_refused() {
        assert!(shape(6, DType::F16).pairs().is_err());
        assert!(shape(3, DType::F32).pairs().is_err());
        assert!(shape(0, DType::F32).pairs().is_err());
        assert!(PartShape { batch: 1 << 40, ..shape(64, DType::F32) }.pairs().is_err());
    }

    #[test]
    fn parts_fit_the_exchange() {
        let of_part = shape(128, DType::BF16).params().unwrap();
        let params = |rank, count, capacity| {
            let (inboxes, state, late) = (vec![1 << 40; count], 1 << 41, 1 << 42);
            let exchange = Exchange { rank, inboxes, capacity, state, late };
            exchange.params(of_part, 9).map(|p| [p.rank, p.count, p.capacity, p.timeout, p.rows])
        };
        let pairs = shape(128, DType::BF16).pairs().unwrap();
        assert_eq!(params(7, 8, pairs).unwrap(), [7, 8, pairs as u32, 9, 30]);
        for (rank, count, capacity) in
            [(0, 1, pairs), (0, 9, pairs), (2, 2, pairs), (0, 2, pairs - 1), (0, 8, 1 << 28)]
        {
            let told = params(rank, count, capacity).unwrap_err().to_string();
            assert!(told.starts_with("exchange: got "), "{told}");
        }
        assert_eq!(Exchange::inbox_bytes(8, 1 << 14), 4 << 20);
    }

    #[test]
    fn the_entries_take_what_is_launched() {
        for name in ["gqa_merge_peers_f32", "gqa_merge_peers_f16", "gqa_merge_peers_bf16"] {
            let entry = registry::find(name).unwrap();
            assert_eq!(entry.arguments.len(), 3 + RANKS + 4);
            assert_eq!(entry.arguments[3 + RANKS..], ["state", "late", "out", "lse"]);
            assert_eq!((entry.threads, entry.params_bytes), (THREADS, size_of::<PeersParams>()));
        }
    }
}
