//! Query heads that share a KV head, packed as rows of one tile so that K and V are read once for
//! the group.

/// Rows of a group's tile: row `r` is query head `r % group` of the group at query row `r / group`.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Query heads per KV head.
    pub size: u32,
}

impl Group {
    /// Query heads per KV head. Neither count is 0; max(1) spares the division by zero check.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(q_heads: u32, kv_heads: u32) -> Self {
        Self { size: (q_heads / kv_heads.max(1)).max(1) }
    }

    /// Packed rows of `q_len` query rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rows(self, q_len: u32) -> u32 {
        q_len * self.size
    }

    /// (query row, query head) of packed row `r` under `kv_head`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn unpack(self, kv_head: u32, r: u32) -> (u32, u32) {
        (r / self.size, kv_head * self.size + r % self.size)
    }
}
