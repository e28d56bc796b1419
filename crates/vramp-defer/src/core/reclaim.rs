//! Reclaiming host memory: which host copies are dropped, pushed to the disk, or made ahead of
//! need. And memory of other cards: which copies there are dropped, and which move on.
//!
//! Older host copies make room for new victims, when the host is full and there is a disk.
//!
//! A victim that finds no room on the host would go to the disk, through blocks of the host, while older copies
//! keep the host's memory. Moving an older copy to the disk instead costs the same write and the same copy of the
//! victim to the host, and what is needed sooner is restored from the faster tier. So copies that are less likely
//! needed than the victim make room for it, and of those as likely needed the ones that were used before it, the
//! least recently used first. None is moved where the disk is as fast as the host.

use super::buffer_state::{ContentPlace, HostCopyUse, PieceMove};
use super::cover::TRIES;
use super::spill_room::{Outgoing, TierOrder};
use super::{
    CopyOut, Deferrables, PeerId, PieceId, Push, SpillDemand, SpillRoom, SpillTier, StaleCopy,
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

/// Bytes of another card to reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerDemand {
    /// The card.
    pub peer: PeerId,
    /// Bytes of copies to remove from it.
    pub deficit: Bytes,
    /// Free space below the card, promises to moves in flight included. No copy moves to another
    /// card.
    pub room: SpillRoom,
}

impl Deferrables {
    /// Chooses copies on another card to drop or to push to the host or the disk, and marks them. In
    /// this order: copies of contents that are elsewhere too, the most recently used first, since
    /// those leave their card last; then the others, the least recently used first. Copies in flight
    /// and those of leased buffers stay. O(log n) for each copy chosen, O(1) for each that stays.
    pub fn reclaim_peer(&mut self, short: &PeerDemand) -> Reclaim {
        let mut choice = Reclaim { missing: short.deficit, ..Reclaim::default() };
        let mut room = short.room.beside(self.promised);
        let mut needless: Vec<PieceId> = Vec::new();
        let mut sole: Vec<PieceId> = Vec::new();
        let mut left = short.deficit;
        let (mut looked_at, bounds) = (0, |is_sole| Deferrables::peer_bounds(short.peer, is_sole));
        for &(_, id) in self.peer_copies.range(bounds(false)).rev() {
            if left.is_zero() {
                break;
            }
            looked_at += 1;
            let piece = self.piece(id);
            if piece.motion.is_none() {
                left = left.saturating_sub(piece.len);
                needless.push(id);
            }
        }
        for &(_, id) in self.peer_copies.range(bounds(true)) {
            if left.is_zero() {
                break;
            }
            looked_at += 1;
            let (piece, buffer) = (self.piece(id), &self.buffers[id.buffer]);
            if piece.motion.is_none() && buffer.holders.is_empty() {
                left = left.saturating_sub(piece.len);
                sole.push(id);
            }
        }
        self.counters.peer_copies_looked_at += looked_at;
        for id in needless {
            choice.missing = choice.missing.saturating_sub(self.piece(id).len);
            choice.stale.extend(self.drop_peer_copy(id));
        }
        for id in sole {
            let len = self.piece(id).len;
            let out = Outgoing { len, may_use_peers: false };
            let Some(to) = room.take(out, &TierOrder::default()) else { continue };
            let from = SpillTier::Peer(short.peer);
            choice.missing = choice.missing.saturating_sub(len);
            let id_of_move = self.begin(id, |id| PieceMove::Push { id, from, to });
            choice.pushes.push(Push { id: id_of_move, piece: id, len, from, to });
        }
        choice
    }

    /// Returns the number of copies on a card. O(copies there).
    pub fn copies_on(&self, peer: PeerId) -> usize {
        let on = |is_sole| self.peer_copies.range(Deferrables::peer_bounds(peer, is_sole)).count();
        on(false) + on(true)
    }

    fn drop_peer_copy(&mut self, id: PieceId) -> Option<StaleCopy> {
        let from = SpillTier::Peer(self.piece_mut(id).copies.peer.take()?);
        self.reindex(id);
        self.counters.copies_dropped += 1;
        Some(StaleCopy { piece: id, from, after: self.buffers[id.buffer].uses.writes() })
    }
}

/// How much contents are needed: more likely, or as likely and used later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Need {
    per_mille: u32,
    idle_ns: std::cmp::Reverse<u64>,
}

impl Need {
    fn of(per_mille: u32, idle_ns: u64) -> Need {
        Need { per_mille, idle_ns: std::cmp::Reverse(idle_ns) }
    }
}

impl Deferrables {
    /// Chooses host copies to push to the disk so that victims of this demand find room on the host,
    /// if they are needed less than the victims are. The least recently used first. Each
    /// has to be settled or abandoned. O(1) if the other tiers have room; else as
    /// [`choose`](Deferrables::choose), and O(log n) for each copy looked at.
    pub fn demote(&mut self, short: &SpillDemand, now_ns: u64) -> Vec<Push> {
        let room = short.room.beside(self.promised);
        let is_full = room.host + room.of_peers() < short.deficit && !room.disk.is_zero();
        if !is_full || self.host_copies_for(HostCopyUse::Sole).next().is_none() {
            return Vec::new();
        }
        let short = SpillDemand { room, ..*short };
        self.end_cooldowns(now_ns);
        self.relist();
        let (chosen, looked_at) = self.copies_to_demote(&short, now_ns);
        self.counters.looked_at += looked_at;
        let (from, to) = (SpillTier::Host, SpillTier::Disk);
        let push = |id: PieceId| {
            let len = self.piece(id).len;
            let push = self.begin(id, |id| super::buffer_state::PieceMove::Push { id, from, to });
            Push { id: push, piece: id, len, from, to }
        };
        chosen.into_iter().map(push).collect()
    }

    fn copies_to_demote(&self, short: &SpillDemand, now_ns: u64) -> (Vec<PieceId>, u64) {
        let SpillDemand { deficit, rates, room } = short;
        let order = TierOrder::by_rate(room, rates);
        let model = self.cost_model(short, &order, now_ns);
        let cover = self.cover(*deficit, &model);
        let mut left = *room;
        let mut to_disk: Vec<(Need, Bytes)> = Vec::new();
        for candidate in &cover.picked {
            for &out in &candidate.dirty {
                if left.take(out, &order) == Some(SpillTier::Disk) {
                    let need = Need::of(candidate.cost.need_per_mille, candidate.cost.idle_ns);
                    to_disk.push((need, out.len));
                }
            }
        }
        to_disk.sort_by_key(|&(need, _)| std::cmp::Reverse(need));
        let mut looked_at = cover.looked_at;
        let mut copies = self.host_copies_for(HostCopyUse::Sole).filter(|&id| {
            looked_at += 1;
            self.piece(id).motion.is_none() && self.buffers[id.buffer].holders.is_empty()
        });
        let (mut chosen, mut disk_room) = (Vec::new(), room.disk);
        for (need, len) in to_disk {
            let (mut taken, mut bytes, mut need_of_copies) = (Vec::new(), Bytes::ZERO, None);
            while bytes < len
                && let Some(id) = copies.next()
            {
                let buffer = &self.buffers[id.buffer];
                let idle_ns = now_ns.saturating_sub(buffer.last_use_ns);
                let of_copy = Need::of(model.need_per_mille(buffer.hint, idle_ns), idle_ns);
                need_of_copies = Some(of_copy).max(need_of_copies);
                bytes += self.piece(id).len;
                taken.push(id);
            }
            let is_slower = rates.in_ns(SpillTier::Disk, len) > rates.in_ns(SpillTier::Host, len);
            let pays = is_slower && Some(need) > need_of_copies;
            if bytes < len || bytes > disk_room || !pays {
                break;
            }
            disk_room -= bytes;
            chosen.append(&mut taken);
        }
        drop(copies);
        (chosen, looked_at)
    }
}
