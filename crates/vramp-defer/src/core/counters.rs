//! What is counted since the start.

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferCounters {
    /// Leases granted.
    pub leases: u64,
    /// Leases refused, except for an unknown buffer. A request in the queue counts once.
    pub leases_refused: u64,
    /// Victims chosen.
    pub victims: u64,
    /// Victim pieces that were leased before they left, and stayed.
    pub evictions_cancelled: u64,
    /// Bytes of contents that left the card.
    pub spilled_bytes: u64,
    /// Bytes of those that left without a copy being made.
    pub spilled_clean_bytes: u64,
    /// Bytes copied out, for spills and ahead of them. Stale copies do not count.
    pub copied_out_bytes: u64,
    /// Bytes of contents restored.
    pub restored_bytes: u64,
    /// Bytes of contents moved from another card to the host or the disk, or from host to disk.
    pub pushed_bytes: u64,
    /// Copies dropped because contents changed, or the host was full.
    pub copies_dropped: u64,
    /// Moves that failed or were given up.
    pub moves_abandoned: u64,
    /// Copies on other cards that [`Deferrables::reclaim_peer`](super::Deferrables::reclaim_peer) looked at.
    pub peer_copies_looked_at: u64,
    /// Waiters that requests and changes looked at.
    pub queue_steps: u64,
    /// Table entries that were looked at to choose victims and host copies, to complete work, and to
    /// end leases and buffers.
    pub looked_at: u64,
}
