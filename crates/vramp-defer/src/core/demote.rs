//! Host copies that make room for new victims, when the host is full and there is a disk.
//!
//! A victim that finds no room on the host would go to the disk, through blocks of the host, while older copies
//! keep the host's memory. Moving an older copy to the disk instead costs the same write and the same copy of the
//! victim to the host, and what is needed sooner is restored from the faster tier. So copies that are less likely
//! needed than the victim make room for it, and of those as likely needed the ones that were used before it, the
//! least recently used first. None is moved where the disk is as fast as the host.

use super::copy_index::HostCopyUse;
use super::spill_room::TierOrder;
use super::{Deferrables, PieceId, Push, SpillDemand, SpillTier};
use vramp_core::Bytes;

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
            let push = self.begin(id, |id| super::piece::PieceMove::Push { id, from, to });
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
