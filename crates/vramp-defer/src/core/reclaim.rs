//! Reclaiming host memory: which host copies are dropped, pushed to the disk, or made ahead of
//! need. `peer_reclaim.rs` does so for other cards.

use super::buffer_state::{Buffer, Hint};
use super::piece::{ContentPlace, PieceMove};
use super::spill_room::TierOrder;
use super::{
    Copies, CopyOut, Deferrables, PieceId, Push, SpillDemand, SpillRoom, SpillTier, StaleCopy,
};
use vramp_core::Bytes;

/// Host bytes to reclaim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostDemand {
    /// Bytes of pinned memory to free.
    pub deficit: Bytes,
    /// Free disk space, promises to moves in flight included.
    pub disk_room: Bytes,
}

/// How memory of the host or of another card is reclaimed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaim {
    /// Copies to drop; they are invalid already.
    pub stale: Vec<StaleCopy>,
    /// Copies to move to another tier: each has to be settled or abandoned.
    pub pushes: Vec<Push>,
    /// Bytes that are missing after all of them.
    pub missing: Bytes,
}

impl Deferrables {
    /// Chooses host copies to drop or to push to the disk, and marks them. In this order: copies of
    /// pieces on the card, the most recently used first, since those leave last; copies of pieces
    /// that are on the disk as well; then copies that only the host has, the least recently used
    /// first, which are pushed unless the buffer is leased; at last copies that are mapped to be
    /// read in place, but none while it is read. O(n log n) in pieces.
    pub fn reclaim_host(&mut self, short: &HostDemand) -> Reclaim {
        let mut choice = Reclaim { missing: short.deficit, ..Reclaim::default() };
        let mut on_host: Vec<(PieceId, u64)> = self
            .all_pieces()
            .filter(|&(id, _)| {
                let piece = self.piece(id);
                let is_read =
                    self.buffers[id.buffer].in_place > 0 && piece.place == ContentPlace::SpillTier;
                piece.copies.host && piece.motion.is_none() && !is_read
            })
            .collect();
        on_host.sort_by_key(|&(id, last_use_ns)| (last_use_ns, id));
        let place = |core: &Deferrables, id: PieceId| core.piece(id).place;
        let resident =
            on_host.iter().rev().filter(|(id, _)| place(self, *id) == ContentPlace::Card);
        let spilled = on_host.iter().filter(|(id, _)| place(self, *id) == ContentPlace::SpillTier);
        let (readable, others): (Vec<PieceId>, Vec<PieceId>) =
            spilled.map(|&(id, _)| id).partition(|id| self.buffers[id.buffer].readable);
        let (twice, once): (Vec<PieceId>, Vec<PieceId>) = others.into_iter().partition(|&id| {
            let Copies { peer, disk, .. } = self.piece(id).copies;
            peer.is_some() || disk
        });
        let needless: Vec<PieceId> = resident.map(|&(id, _)| id).chain(twice).collect();
        for id in needless {
            if choice.missing.is_zero() {
                return choice;
            }
            choice.missing = choice.missing.saturating_sub(self.piece(id).len);
            choice.stale.push(self.drop_host_copy(id));
        }
        let mut disk_room = short.disk_room.saturating_sub(self.promised.disk);
        for id in once.into_iter().chain(readable) {
            let len = self.piece(id).len;
            if self.piece(id).copies.disk && !choice.missing.is_zero() {
                choice.missing = choice.missing.saturating_sub(len);
                choice.stale.push(self.drop_host_copy(id));
                continue;
            }
            let leased = !self.buffers[id.buffer].holders.is_empty();
            if choice.missing.is_zero() || len > disk_room || leased {
                continue;
            }
            disk_room -= len;
            choice.missing = choice.missing.saturating_sub(len);
            let (from, to) = (SpillTier::Host, SpillTier::Disk);
            let push = self.begin(id, |id| PieceMove::Push { id, from, to });
            choice.pushes.push(Push { id: push, piece: id, len, from, to });
        }
        choice
    }

    pub(super) fn drop_host_copy(&mut self, id: PieceId) -> StaleCopy {
        self.piece_mut(id).copies.host = false;
        self.reindex(id);
        self.counters.copies_dropped += 1;
        let after = self.buffers[id.buffer].uses.writes();
        StaleCopy { piece: id, from: SpillTier::Host, after }
    }

    /// Returns the host bytes to reclaim before `leaving` bytes leave the card. Clean contents take
    /// no room, and their copies are needed for that. Other cards take what they have room for.
    /// O(pieces).
    pub fn host_deficit(&self, leaving: Bytes, room: &SpillRoom) -> Bytes {
        leaving.saturating_sub(room.of_peers() + room.host + self.census().clean)
    }

    /// Returns true if more than a part of the capacity is occupied, so that contents should be
    /// copied out ahead of need. `above` is from 0 to 1.
    pub fn is_above(&self, capacity: Bytes, above: f64) -> bool {
        self.occupied > Bytes::new((capacity.count() as f64 * above) as u64)
    }

    /// Chooses dirty idle contents to copy out ahead of need, and marks them: the least recently
    /// used first, within the budget and the room of `short`, whose deficit has no meaning here. They
    /// stay on the card; a later spill copies nothing. O(n log n) in pieces.
    pub fn clean(&mut self, budget: Bytes, short: &SpillDemand, now_ns: u64) -> Vec<CopyOut> {
        let is_idle = |buffer: &Buffer| {
            let since = buffer.last_use_ns.saturating_add(self.config.clean_after_ns);
            let wanted = buffer.hint == Hint::WillNeed;
            !buffer.stays() && buffer.uses.is_empty() && !wanted && since <= now_ns
        };
        let may_go = |&(id, _): &(PieceId, u64)| {
            let piece = self.piece(id);
            piece.is_dirty() && piece.motion.is_none() && is_idle(&self.buffers[id.buffer])
        };
        let mut dirty: Vec<(PieceId, u64)> = self.all_pieces().filter(may_go).collect();
        dirty.sort_by_key(|&(id, last_use_ns)| (last_use_ns, id));
        let mut room = short.room.beside(self.promised);
        let order = TierOrder::by_rate(&room, &short.rates);
        let mut left = budget;
        let mut chosen = Vec::new();
        for (id, _) in dirty {
            let len = self.piece(id).len;
            if len > left {
                break;
            }
            let Some(to) = room.take(self.outgoing(id), &order) else { break };
            left -= len;
            chosen.push(self.begin_out(id, Some(to), false));
        }
        chosen
    }

    /// Returns all pieces, and when their buffers were used last.
    fn all_pieces(&self) -> impl Iterator<Item = (PieceId, u64)> {
        let of = |(id, buffer): (_, &Buffer)| {
            let last_use_ns = buffer.last_use_ns;
            self.pieces_of(id).map(move |piece| (piece, last_use_ns))
        };
        self.buffers.iter().flat_map(of)
    }
}
