//! Reclaiming host memory: which host copies are dropped, pushed to the disk, or made ahead of
//! need. `peer_reclaim.rs` does so for other cards.

use super::copy_index::HostCopyUse;
use super::cover::TRIES;
use super::piece::{ContentPlace, PieceMove};
use super::spill_room::TierOrder;
use super::{CopyOut, Deferrables, PieceId, Push, SpillDemand, SpillRoom, SpillTier, StaleCopy};
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
    /// that are elsewhere as well; then copies that only the host has, the least recently used
    /// first, which are pushed unless the buffer is leased; at last copies that are mapped to be
    /// read in place, but none while it is read. O(log n) for each copy chosen, O(1) for each that
    /// stays.
    pub fn reclaim_host(&mut self, short: &HostDemand) -> Reclaim {
        let mut choice = Reclaim { missing: short.deficit, ..Reclaim::default() };
        let needless = self.needless_host_copies(short.deficit);
        for id in needless {
            choice.missing = choice.missing.saturating_sub(self.piece(id).len);
            choice.stale.push(self.drop_host_copy(id));
        }
        let disk_room = short.disk_room.saturating_sub(self.promised.disk);
        for id in self.host_copies_to_move(choice.missing, disk_room) {
            let len = self.piece(id).len;
            choice.missing = choice.missing.saturating_sub(len);
            if self.piece(id).copies.disk {
                choice.stale.push(self.drop_host_copy(id));
                continue;
            }
            let (from, to) = (SpillTier::Host, SpillTier::Disk);
            let push = self.begin(id, |id| PieceMove::Push { id, from, to });
            choice.pushes.push(Push { id: push, piece: id, len, from, to });
        }
        choice
    }

    /// Returns copies of contents that are elsewhere too, until they have the bytes.
    fn needless_host_copies(&mut self, deficit: Bytes) -> Vec<PieceId> {
        let (mut left, mut looked_at, mut chosen) = (deficit, 0, Vec::new());
        let on_card = self.host_copies_for(HostCopyUse::OnCard).rev();
        for id in on_card.chain(self.host_copies_for(HostCopyUse::Elsewhere)) {
            if left.is_zero() {
                break;
            }
            looked_at += 1;
            if self.is_at_rest(id) {
                left = left.saturating_sub(self.piece(id).len);
                chosen.push(id);
            }
        }
        self.counters.looked_at += looked_at;
        chosen
    }

    /// Returns copies that only the host has, and mapped ones, until they have the bytes or the disk is
    /// full.
    fn host_copies_to_move(&mut self, deficit: Bytes, mut disk_room: Bytes) -> Vec<PieceId> {
        let (mut left, mut looked_at) = (deficit, 0);
        let mut chosen = Vec::new();
        for kept_for in [HostCopyUse::Sole, HostCopyUse::MappedAndOnDisk, HostCopyUse::Mapped] {
            let mut lacked = 0;
            for id in self.host_copies_for(kept_for) {
                if left.is_zero() || lacked == TRIES {
                    break;
                }
                looked_at += 1;
                let (piece, buffer) = (self.piece(id), &self.buffers[id.buffer]);
                let is_dropped = piece.copies.disk;
                if !self.is_at_rest(id) || !is_dropped && !buffer.holders.is_empty() {
                    continue;
                }
                if !is_dropped && piece.len > disk_room {
                    lacked += 1;
                    continue;
                }
                if !is_dropped {
                    disk_room -= piece.len;
                }
                left = left.saturating_sub(piece.len);
                chosen.push(id);
            }
        }
        self.counters.looked_at += looked_at;
        chosen
    }

    /// Returns true if a host copy does not move, and is not read in place.
    fn is_at_rest(&self, id: PieceId) -> bool {
        let piece = self.piece(id);
        let is_read = self.buffers[id.buffer].holders.read_in_place()
            && piece.place == ContentPlace::SpillTier;
        piece.motion.is_none() && !is_read
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
    /// O(cards).
    pub fn host_deficit(&self, leaving: Bytes, room: &SpillRoom) -> Bytes {
        leaving.saturating_sub(room.of_peers() + room.host + self.clean_bytes())
    }

    /// Returns true if more than a part of the capacity is occupied, so that contents should be
    /// copied out ahead of need. `above` is from 0 to 1.
    pub fn is_above(&self, capacity: Bytes, above: f64) -> bool {
        self.occupied > Bytes::new((capacity.count() as f64 * above) as u64)
    }

    /// Chooses dirty idle contents to copy out ahead of need, and marks them: the least recently
    /// used first, within the budget and the room of `short`, whose deficit has no meaning here. They
    /// stay on the card; a later spill copies nothing. O(log n) for each piece chosen.
    pub fn clean(&mut self, budget: Bytes, short: &SpillDemand, now_ns: u64) -> Vec<CopyOut> {
        self.relist();
        let until =
            |last_use_ns: u64| last_use_ns.saturating_add(self.config.clean_after_ns) <= now_ns;
        let mut bytes = Bytes::ZERO;
        let dirty = self.lists.dirty.iter().take_while(|&&(last_use_ns, _)| until(last_use_ns));
        let dirty = dirty.map(|&(_, id)| id).take_while(|&id| {
            bytes += self.piece(id).len;
            bytes <= budget
        });
        let dirty: Vec<PieceId> = dirty.collect();
        self.counters.looked_at += dirty.len() as u64;
        let mut room = short.room.beside(self.promised);
        let order = TierOrder::by_rate(&room, &short.rates);
        let mut left = budget;
        let mut chosen = Vec::new();
        for id in dirty {
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
}
