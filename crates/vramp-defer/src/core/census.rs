//! Sums over all buffers, the number of entries of each table, and whether memory can become free without a
//! call of the caller that lacks it.

use std::collections::BTreeSet;

use super::buffer_state::{ContentPlace, PieceMove};
use super::{Access, BufferId, DeferCounters, Deferrables, HolderKey, RangeId, SpillTier};
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
    fn add(&mut self, piece: &super::buffer_state::Piece) {
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

impl Deferrables {
    /// Returns true if nothing ends by which memory could become free: no move, no lease of other
    /// holders than these, no pin and no buffer without handles. Idle buffers count as
    /// there to stay. O(holders log holders).
    pub fn are_all_idle(&self, holders: &[HolderKey]) -> bool {
        self.moves.is_empty()
            && self.kept.is_zero()
            && self.held_by(holders) == self.leases.len()
            && self.without_handles == 0
    }

    /// Returns the number of leases of some holders.
    fn held_by(&self, holders: &[HolderKey]) -> usize {
        let distinct: BTreeSet<HolderKey> = holders.iter().copied().collect();
        let of = |key| self.wait_queue.holders.get(&key).map_or(0, |holder| holder.leases.len());
        distinct.into_iter().map(of).sum()
    }
}

impl Deferrables {
    /// Returns the number of entries of each table. O(entries).
    #[doc(hidden)]
    pub fn footprint(&self) -> Vec<(&'static str, usize)> {
        let in_sets: usize = self.group_sets.values().map(std::collections::BTreeSet::len).sum();
        vec![
            ("buffers", self.buffers.len()),
            ("ranges", self.ranges.len()),
            ("leases", self.leases.len()),
            ("waiting requests", self.wait_queue.waiters.len()),
            ("entries of waiting requests", self.wait_queue.entries()),
            ("moves", self.moves.len()),
            ("uses by work", self.uses.len()),
            ("buffers to end", self.ending.len()),
            ("sets of groups", self.group_sets.len() + in_sets),
            ("lists of victims", self.lists.len()),
            ("copies on cards", self.peer_copies.len()),
            ("copies on the host", self.host_copies.len()),
        ]
    }
}

impl Deferrables {
    /// Returns the memory of the pool that these buffers need, resident or not. O(buffers).
    pub fn needed_by(&self, buffers: &[(BufferId, Access)]) -> Bytes {
        self.ranges_of(buffers).into_iter().map(|range| self.ranges[range].needs()).sum()
    }

    /// Returns the memory of the pool that leases of some holders keep on the card. O(their buffers).
    pub fn kept_by(&self, holders: &[HolderKey]) -> Bytes {
        let leases = self.leases_of(holders).filter(|lease| lease.has_room());
        let ranges = leases.flat_map(|lease| self.ranges_of(&lease.buffers));
        let ranges: BTreeSet<RangeId> = ranges.collect();
        ranges.into_iter().map(|range| self.ranges[range].needs()).sum()
    }

    /// Returns the occupied memory that nothing keeps on the card.
    pub fn idle(&self) -> Bytes {
        self.occupied.saturating_sub(self.committed)
    }

    /// Returns true if `holder` holds a lease. O(log holders).
    pub fn holds_lease(&self, holder: HolderKey) -> bool {
        let known = self.wait_queue.holders.get(&holder);
        known.is_some_and(|holder| !holder.leases.is_empty())
    }
}
