//! The instructions that a warp executes together, with their immediate operands.

/// Which instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    SyncWarp,
    ShflXor,
    ShflIdx,
    AnySync,
    LoadMatrices(Matrices),
    Transpose,
    Product(Product),
    ProductTf32,
    NamedBarrier { id: u32, threads: u32, waits: bool },
    Registers(Change),
    Wgmma(Wgmma),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u64),
    ClusterArrive { relaxed: bool },
    ClusterWait,
    TensorAlloc,
    TensorDealloc,
    TensorRelinquish,
    TensorMove(Move),
    TensorWait { stores: bool },
}

impl Collective {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SyncWarp => "sync_warp",
            Self::ShflXor => "shfl_xor",
            Self::ShflIdx => "shfl_idx",
            Self::AnySync => "any_sync",
            Self::LoadMatrices(matrices) => matrices.name(),
            Self::Transpose => "movmatrix_trans",
            Self::Product(product) => product.name(),
            Self::ProductTf32 => "mma_m16n8k8_tf32",
            Self::NamedBarrier { waits: true, .. } => "named_barrier_sync",
            Self::NamedBarrier { waits: false, .. } => "named_barrier_arrive",
            Self::Registers(change) => change.name(),
            Self::Wgmma(form) => form.name(),
            Self::WgmmaFence => "wgmma_fence",
            Self::WgmmaCommit => "wgmma_commit",
            Self::WgmmaWait(_) => "wgmma_wait",
            Self::ClusterArrive { relaxed: false } => "cluster_arrive",
            Self::ClusterArrive { relaxed: true } => "cluster_arrive_relaxed",
            Self::ClusterWait => "cluster_wait",
            Self::TensorAlloc => "tcgen05_alloc",
            Self::TensorDealloc => "tcgen05_dealloc",
            Self::TensorRelinquish => "tcgen05_relinquish",
            Self::TensorMove(form) => form.name(),
            Self::TensorWait { stores: false } => "tcgen05_wait_ld",
            Self::TensorWait { stores: true } => "tcgen05_wait_st",
        }
    }

    /// Whether the instruction orders memory accesses among the lanes. Shuffles, votes and matrix
    /// instructions do not.
    pub(crate) fn orders_memory(self) -> bool {
        self == Self::SyncWarp
    }
}

/// A form of `ldmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrices {
    pub(crate) count: usize,
    pub(crate) transposed: bool,
}

impl Matrices {
    pub(crate) fn name(self) -> &'static str {
        match (self.count, self.transposed) {
            (4, false) => "ldmatrix_x4",
            (4, true) => "ldmatrix_x4_trans",
            (_, false) => "ldmatrix_x2",
            (_, true) => "ldmatrix_x2_trans",
        }
    }
}

/// A form of `mma` with 16-bit elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    F16,
    Bf16,
}

impl Product {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "mma_m16n8k16_f16",
            Self::Bf16 => "mma_m16n8k16_bf16",
        }
    }
}

/// A change of a warpgroup's registers per thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Raise(u32),
    Lower(u32),
}

impl Change {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Raise(_) => "registers_raise",
            Self::Lower(_) => "registers_lower",
        }
    }
}

/// A form of `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wgmma {
    pub(crate) element: Element,
    pub(crate) a: Source,
    /// Whether the accumulators count.
    pub(crate) adds: bool,
    pub(crate) columns: u32,
}

/// What is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    /// 16 bits.
    Half(Product),
    /// 8 bits.
    E4m3,
}

/// Where A comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Shared memory; A and B are K-major.
    Shared,
    /// Registers; B is MN-major, or K-major where elements have 8 bits.
    Registers,
    /// Registers; B is K-major though elements have 16 bits.
    RegistersByK,
}

impl Wgmma {
    pub(crate) fn name(self) -> &'static str {
        match (self.element, self.a, self.adds) {
            (Element::Half(Product::F16), Source::Shared, false) => "wgmma_f16",
            (Element::Half(Product::F16), Source::Shared, true) => "wgmma_add_f16",
            (Element::Half(Product::F16), Source::Registers, _) => "wgmma_registers_f16",
            (Element::Half(Product::F16), Source::RegistersByK, _) => "wgmma_k_major_f16",
            (Element::Half(Product::Bf16), Source::RegistersByK, _) => "wgmma_k_major_bf16",
            (Element::Half(Product::Bf16), Source::Shared, false) => "wgmma_bf16",
            (Element::Half(Product::Bf16), Source::Shared, true) => "wgmma_add_bf16",
            (Element::Half(Product::Bf16), Source::Registers, _) => "wgmma_registers_bf16",
            (Element::E4m3, Source::Shared, false) => "wgmma_e4m3",
            (Element::E4m3, Source::Shared, true) => "wgmma_add_e4m3",
            (Element::E4m3, Source::Registers | Source::RegistersByK, _) => "wgmma_registers_e4m3",
        }
    }
}

/// A form of `tcgen05.ld` or `tcgen05.st`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) shape: MoveShape,
    pub(crate) stores: bool,
    /// Registers of a lane.
    pub(crate) registers: u32,
}

/// Lanes and bits of tensor memory that a warp moves at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveShape {
    Lanes32Bits32,
    Lanes16Bits256,
}

impl Move {
    pub(crate) fn name(self) -> &'static str {
        match (self.shape, self.stores) {
            (MoveShape::Lanes32Bits32, false) => "tcgen05_ld_32x32b",
            (MoveShape::Lanes32Bits32, true) => "tcgen05_st_32x32b",
            (MoveShape::Lanes16Bits256, false) => "tcgen05_ld_16x256b",
            (MoveShape::Lanes16Bits256, true) => "tcgen05_st_16x256b",
        }
    }
}
