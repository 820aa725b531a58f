//! What a launch is, and what it did.

use crate::instruction::Collective;

/// Dynamic shared memory a CTA can have: 227 KiB, as on Hopper.
pub const MAX_SHARED_BYTES: u32 = 227 * 1024;

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Named in faults.
    pub name: &'a str,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA: whole warps, at most 1024.
    pub threads: u32,
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// Determines the order in which threads run. The results of a launch, including its faults,
    /// depend on nothing else.
    pub seed: u64,
    /// CTAs of a cluster, neighbours in x; 1: no clusters. At most 16.
    pub cluster: u32,
    /// CTAs communicate through global memory: atomic operations are allowed, and accesses to
    /// writable global memory are checked. CTAs then run on one core, in an order that the seed
    /// determines.
    pub communicates: bool,
    /// Programmatic dependent launch: the launch may start before earlier grids have ended. Until
    /// `grid_dependency_wait` it may only read, and only [early](crate::Arg::early) arguments.
    pub programmatic: bool,
}

impl Default for Launch<'_> {
    /// One CTA of one warp without shared memory.
    fn default() -> Self {
        Self {
            name: "kernel",
            grid: [1, 1, 1],
            threads: 32,
            shared_bytes: 0,
            seed: 0,
            cluster: 1,
            communicates: false,
            programmatic: false,
        }
    }
}

/// What a launch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// CTAs run.
    pub blocks: u64,
    /// Scheduler turns: runs of a warp until all its lanes wait.
    pub turns: u64,
    /// CTA barriers passed.
    pub barriers: u64,
    /// Other warp-level instructions, counted once per warp.
    pub warp_instructions: u64,
    /// `ldmatrix`, once per warp.
    pub matrix_loads: u64,
    /// `mma`, once per warp.
    pub matrix_products: u64,
    /// `wgmma`, once per warp.
    pub warpgroup_products: u64,
    /// `tcgen05.mma`, once per instruction.
    pub tensor_products: u64,
    /// Copies of boxes into shared memory.
    pub tensor_loads: u64,
}

impl Report {
    pub(crate) fn count(&mut self, instruction: Collective) {
        *match instruction {
            Collective::LoadMatrices(_) => &mut self.matrix_loads,
            Collective::Product(_) | Collective::ProductTf32 => &mut self.matrix_products,
            Collective::Wgmma(_) => &mut self.warpgroup_products,
            _ => &mut self.warp_instructions,
        } += 1;
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            turns: self.turns + other.turns,
            barriers: self.barriers + other.barriers,
            warp_instructions: self.warp_instructions + other.warp_instructions,
            matrix_loads: self.matrix_loads + other.matrix_loads,
            matrix_products: self.matrix_products + other.matrix_products,
            warpgroup_products: self.warpgroup_products + other.warpgroup_products,
            tensor_products: self.tensor_products + other.tensor_products,
            tensor_loads: self.tensor_loads + other.tensor_loads,
        }
    }
}
