//! Sums over all buffers.

use super::piece::{ContentPlace, PieceMove};
use super::{DeferCounters, Deferrables, SpillTier};
use vramp_core::Bytes;

/// Bytes of contents by state. `empty + resident + spilled + restoring` is `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferCensus {
    /// Number of buffers.
    pub buffers: usize,
    /// Number of leases.
    pub leases: usize,
    /// Number of requests in the queue.
    pub waiting: usize,
    /// Number of moves that are neither settled nor abandoned.
    pub moves: usize,
    /// Length of all buffers.
    pub total: Bytes,
    /// Without contents.
    pub empty: Bytes,
    /// On the card: `dirty + clean`.
    pub resident: Bytes,
    /// On the card only.
    pub dirty: Bytes,
    /// On the card, with a copy below.
    pub clean: Bytes,
    /// Resident, and being copied out ahead of need.
    pub cleaning: Bytes,
    /// Mapped, and chosen to leave.
    pub leaving: Bytes,
    /// Below the card only, and not being restored: `spilled_peer + spilled_host + spilled_disk`.
    pub spilled: Bytes,
    /// Spilled, with a copy on another card.
    pub spilled_peer: Bytes,
    /// Spilled, with a copy on the host and none on another card.
    pub spilled_host: Bytes,
    /// Spilled, with a copy on the disk only.
    pub spilled_disk: Bytes,
    /// Spilled, and being pushed to another tier.
    pub pushing: Bytes,
    /// Being restored.
    pub restoring: Bytes,
    /// Valid copies on other cards.
    pub peer_copies: Bytes,
    /// Valid copies on the host.
    pub host_copies: Bytes,
    /// Valid copies on the disk.
    pub disk_copies: Bytes,
    /// In leased buffers.
    pub leased: Bytes,
    /// In pinned buffers.
    pub held: Bytes,
    /// Memory on the card, in whole pages and whole groups, without adopted memory.
    pub occupied: Bytes,
    /// Length of the buffers that are in adopted memory.
    pub adopted: Bytes,
    /// Whole ranges with an unevictable tenant.
    pub committed: Bytes,
}

impl Deferrables {
    /// Returns the counters since the start.
    pub fn counters(&self) -> DeferCounters {
        DeferCounters { queue_steps: self.wait_queue.steps.get(), ..self.counters }
    }

    /// Sums all buffers anew. O(pieces).
    pub fn census(&self) -> DeferCensus {
        let mut sum = DeferCensus {
            buffers: self.buffers.len(),
            leases: self.leases.len(),
            waiting: self.wait_queue.waiters.len() - self.wait_queue.of_pool.len(),
            moves: self.moves.len(),
            occupied: self.occupied,
            committed: self.committed,
            ..DeferCensus::default()
        };
        for buffer in self.buffers.values() {
            sum.total += buffer.len;
            let adopted = self.ranges[buffer.range].is_adopted;
            sum.adopted += if adopted { buffer.len } else { Bytes::ZERO };
            let leased = !buffer.holders.is_empty();
            sum.leased += if leased { buffer.len } else { Bytes::ZERO };
            sum.held += if buffer.is_pinned() { buffer.len } else { Bytes::ZERO };
            for piece in &buffer.pieces {
                sum.add(piece);
            }
        }
        sum
    }
}

impl DeferCensus {
    fn add(&mut self, piece: &super::piece::Piece) {
        let len = piece.len;
        let when = |is: bool| if is { len } else { Bytes::ZERO };
        self.peer_copies += when(piece.copies.peer.is_some());
        self.host_copies += when(piece.copies.host);
        self.disk_copies += when(piece.copies.disk);
        let leaving = matches!(piece.motion, Some(PieceMove::Out { leaving: true, .. }));
        let copying = matches!(piece.motion, Some(PieceMove::Out { to: Some(_), .. }));
        self.leaving += when(leaving);
        self.cleaning += when(copying && !leaving);
        let restoring = matches!(piece.motion, Some(PieceMove::Restore { .. }));
        match piece.place {
            ContentPlace::Empty => self.empty += len,
            ContentPlace::Card => {
                self.resident += len;
                self.dirty += when(piece.is_dirty());
                self.clean += when(!piece.is_dirty());
            }
            ContentPlace::SpillTier if restoring => self.restoring += len,
            ContentPlace::SpillTier => {
                self.spilled += len;
                match piece.copies.best() {
                    Some(SpillTier::Peer(_)) => self.spilled_peer += len,
                    Some(SpillTier::Host) => self.spilled_host += len,
                    Some(SpillTier::Disk) | None => self.spilled_disk += len,
                }
                self.pushing += when(matches!(piece.motion, Some(PieceMove::Push { .. })));
            }
        }
    }
}
