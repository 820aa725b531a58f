//! Which scale of a quantized KV cache is whose.

use crate::params::scales::{PER_CHANNEL, PER_HEAD, PER_TOKEN};

/// Whether each row of the cache has its own, by the number of one of
/// [`params::scales`](crate::params::scales).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn are_of_rows(number: u32) -> bool {
    number == PER_TOKEN
}

/// What each of them is for, if not for a row.
#[derive(Clone, Copy)]
pub struct ScalesPer {
    /// A KV head.
    pub head: bool,
    /// A channel, which is an element of a KV head.
    pub channel: bool,
}

impl ScalesPer {
    /// By the number of one of [`params::scales`](crate::params::scales).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn new(number: u32) -> Self {
        Self { head: number == PER_HEAD, channel: number == PER_CHANNEL }
    }

    /// Whether there is one for all of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn is_one(self) -> bool {
        !self.head && !self.channel
    }

    /// Number of the scale of a channel of a KV head.
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
