//! All buffers, summed.

use super::Deferrables;
use super::piece::{ContentPlace, PieceMove};
use vramp_core::Bytes;

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferCounters {
    /// Leases given.
    pub leases: u64,
    /// Leases refused, for whatever reason but a wrong name; whoever waits in line is counted once.
    pub leases_refused: u64,
    /// Victims chosen.
    pub victims: u64,
    /// Pieces that were chosen and stayed.
    pub evictions_cancelled: u64,
    /// Contents that left the card.
    pub spilled_bytes: u64,
    /// Of those, what left without a copy being made.
    pub spilled_clean_bytes: u64,
    /// Contents copied out, for spills and ahead of them. Copies that came too late not counted.
    pub copied_out_bytes: u64,
    /// Contents brought back.
    pub restored_bytes: u64,
    /// Contents moved from the host to the disk.
    pub pushed_bytes: u64,
    /// Copies dropped because contents changed, or the host was short.
    pub copies_dropped: u64,
    /// Moves that failed or were given up.
    pub moves_abandoned: u64,
}

/// Contents in bytes by state. `empty + resident + spilled + filling` is `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferCensus {
    /// How many buffers.
    pub buffers: usize,
    /// How many leases.
    pub leases: usize,
    /// How many requests wait in line.
    pub waiting: usize,
    /// How many moves are neither settled nor abandoned.
    pub moves: usize,
    /// The lengths of all buffers.
    pub total: Bytes,
    /// Without contents.
    pub empty: Bytes,
    /// On the card: `dirty + clean`.
    pub resident: Bytes,
    /// On the card only.
    pub dirty: Bytes,
    /// On the card and below.
    pub clean: Bytes,
    /// Of the resident, what is being copied out and stays.
    pub cleaning: Bytes,
    /// Of all with memory, what was chosen to leave.
    pub leaving: Bytes,
    /// Below the card only, and not on the way back: `spilled_host + spilled_disk`.
    pub spilled: Bytes,
    /// Of that, what the host has.
    pub spilled_host: Bytes,
    /// Of that, what only the disk has.
    pub spilled_disk: Bytes,
    /// Of the spilled, what is being pushed from the host to the disk.
    pub pushing: Bytes,
    /// On the way back.
    pub restoring: Bytes,
    /// All copies on the host that count.
    pub host_copies: Bytes,
    /// All copies on the disk that count.
    pub disk_copies: Bytes,
    /// In leased buffers.
    pub leased: Bytes,
    /// In buffers that are pinned or exposed.
    pub held: Bytes,
    /// Memory on the card, in whole pages and whole groups.
    pub occupied: Bytes,
    /// Ranges of which something may not leave, whole.
    pub committed: Bytes,
}

impl Deferrables {
    /// What happened since the start.
    pub fn counters(&self) -> DeferCounters {
        self.counters
    }

    /// Everything, summed anew. O(pieces).
    pub fn census(&self) -> DeferCensus {
        let mut sum = DeferCensus {
            buffers: self.buffers.len(),
            leases: self.leases.len(),
            waiting: self.wait_queue.len(),
            moves: self.moves.len(),
            occupied: self.occupied,
            committed: self.committed,
            ..DeferCensus::default()
        };
        for buffer in self.buffers.values() {
            sum.total += buffer.len;
            let leased = !buffer.holders.is_empty();
            sum.leased += if leased { buffer.len } else { Bytes::ZERO };
            let exposed = buffer.exposed;
            let out = exposed.stream_scoped || exposed.quiesced || exposed.opaque > 0;
            sum.held += if out || buffer.pins > 0 { buffer.len } else { Bytes::ZERO };
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
                self.spilled_host += when(piece.copies.host);
                self.spilled_disk += when(!piece.copies.host);
                self.pushing += when(matches!(piece.motion, Some(PieceMove::Push { .. })));
            }
        }
    }
}
