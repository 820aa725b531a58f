//! Pipeline stages in shared memory: TMA fills a stage, the consumers release it, in turn.

/// Position in the pipeline: a stage and its phase.
#[derive(Clone, Copy)]
pub struct Ring {
    /// The stage's number.
    pub stage: u32,
    /// Parity of the phase in which the stage is filled. The empty barrier's phase before it has
    /// the opposite parity.
    pub parity: u32,
}

impl Ring {
    /// The first stage, which is empty.
    pub const START: Self = Self { stage: 0, parity: 0 };

    /// The next position in a pipeline of `stages` stages.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn next(self, stages: u32) -> Self {
        let wraps = self.stage + 1 == stages;
        Self { stage: if wraps { 0 } else { self.stage + 1 }, parity: self.parity ^ wraps as u32 }
    }

    /// Byte offset of the stage's barrier in an array of barriers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn barrier(self) -> u32 {
        self.stage * 8
    }
}
