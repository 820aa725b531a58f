//! Which scale of a quantized KV cache is whose.

use crate::params::scales::{PER_CHANNEL, PER_HEAD, PER_TOKEN};

/// What each of them is for.
#[derive(Clone, Copy)]
pub struct ScalesPer {
    /// A KV head.
    pub head: bool,
    /// A channel, which is an element of a KV head.
    pub channel: bool,
    /// A row of the cache.
    pub row: bool,
}

impl ScalesPer {
    /// By the number of one of [`params::scales`](crate::params::scales).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn new(number: u32) -> Self {
        Self { head: number == PER_HEAD, channel: number == PER_CHANNEL, row: number == PER_TOKEN }
    }

    /// Whether there is one for all of the cache, unless each row has its own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn is_one(self) -> bool {
        !self.head && !self.channel
    }

    /// Number of the scale of a channel of a KV head, unless each row has its own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn number(self, kv_head: u32, head_size: u32, channel: u32) -> usize {
        let number = match self {
            Self { channel: true, .. } => kv_head * head_size + channel,
            Self { head: true, .. } => kv_head,
            _ => 0,
        };
        number as usize
    }
}
