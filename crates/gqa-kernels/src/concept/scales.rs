//! Which scale of a quantized KV cache applies to an element.

use crate::params::scales::{PER_CHANNEL, PER_HEAD, PER_TOKEN};

/// Whether `number`, one of [`params::scales`](crate::params::scales), means per-token scales.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn are_of_rows(number: u32) -> bool {
    number == PER_TOKEN
}

/// Granularity of the scales, unless they are per token: per KV head, per channel, or one for all.
#[derive(Clone, Copy)]
pub struct ScalesPer {
    /// One scale per KV head.
    pub head: bool,
    /// One scale per channel, an element of a KV head.
    pub channel: bool,
}

impl ScalesPer {
    /// From one of [`params::scales`](crate::params::scales).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn new(number: u32) -> Self {
        Self { head: number == PER_HEAD, channel: number == PER_CHANNEL }
    }

    /// Whether one scale applies to the whole cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn is_one(self) -> bool {
        !self.head && !self.channel
    }

    /// Index of the scale of a channel of a KV head.
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
