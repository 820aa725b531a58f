//! What becomes of scores.

use gqa_host::DType;
use gqa_host::Sink;
use gqa_host::engine::{Heads, Layer};
use pyo3::prelude::*;

/// In Python an object of these attributes.
#[derive(Clone, Copy, FromPyObject)]
pub struct Scores {
    pub scale: f32,
    /// 0: none
    pub softcap: f32,
    /// Keys before and behind a row's place that it sees; negative: no bound. Causal calls have 0
    /// behind.
    pub window: [i64; 2],
    /// Whether a sequence's bits must not depend on the others.
    pub batch_invariant: bool,
}

impl Scores {
    /// The window's side before, or behind, a row's place; `None`: no bound.
    pub fn before(&self) -> Option<usize> {
        self.window[0].try_into().ok()
    }

    pub fn behind(&self) -> Option<usize> {
        self.window[1].try_into().ok()
    }

    /// A layer of that.
    pub fn layer(&self, dtype: DType, heads: Heads, sinks: bool) -> Layer {
        let mut layer = Layer::new(dtype, heads).scale(self.scale).softcap(self.softcap);
        if let Some(before) = self.before() {
            layer = layer.window(before.saturating_add(1));
        }
        if self.behind() != Some(0) {
            layer = layer.bidirectional();
        }
        let layer = layer.sink(if sinks { Sink::PerHead } else { Sink::None });
        if self.batch_invariant { layer.batch_invariant() } else { layer }
    }
}
