//! Listing the pieces that changed, see `lists.rs`.

use smallvec::SmallVec;

use super::buffer_state::{Buffer, Hint};
use super::cost::{BucketKey, EvictionClass, Unit};
use super::lists::{Listed, Listing};
use super::{BufferId, Deferrables, PieceId, RangeId};
use vramp_core::Bytes;

impl Deferrables {
    /// Marks a piece as changed. O(1) if it is marked already, else O(log n).
    pub(super) fn note_changed(&mut self, id: PieceId) {
        let piece = &mut self.buffers[id.buffer].pieces[id.index as usize];
        if !std::mem::replace(&mut piece.is_changed, true) {
            self.lists.changed.insert(id);
        }
    }

    /// Marks all pieces of a buffer as changed.
    pub(super) fn note_buffer_changed(&mut self, buffer: BufferId) {
        self.pieces_of(buffer).for_each(|id| self.note_changed(id));
    }

    /// Begins the cooldown of a buffer that is being restored.
    pub(super) fn begin_cooldown(&mut self, id: BufferId, now_ns: u64) {
        let end = now_ns.saturating_add(self.config.cooldown_ns);
        let before = self.buffers[id].cools_at.replace(end);
        self.lists.cooling.extend([(end, id)]);
        if let Some(before) = before.filter(|&before| before != end) {
            self.lists.cooling.remove(&(before, id));
        }
        self.note_buffer_changed(id);
    }

    /// Ends the cooldowns that are over. O(log n) for each.
    pub(super) fn end_cooldowns(&mut self, now_ns: u64) {
        while let Some(&(end, id)) = self.lists.cooling.first()
            && end <= now_ns
        {
            self.lists.cooling.pop_first();
            self.counters.looked_at += 1;
            self.buffers[id].cools_at = None;
            self.note_buffer_changed(id);
        }
    }

    /// Lists what changed. O(log n) for each changed piece, and O(tenants) for a changed group.
    pub(super) fn relist(&mut self) {
        let mut groups = std::mem::take(&mut self.lists.changed_groups);
        for id in std::mem::take(&mut self.lists.changed) {
            self.counters.looked_at += 1;
            self.buffers[id.buffer].pieces[id.index as usize].is_changed = false;
            self.list_dirty(id);
            let range = self.buffers[id.buffer].range;
            if self.ranges[range].leaves_together() {
                groups.insert(range);
            } else {
                self.list_unit(Unit::Piece(id));
            }
        }
        for group in groups {
            self.counters.looked_at += self.ranges[group].tenants.len() as u64;
            self.list_unit(Unit::Group(group));
        }
    }

    fn list_unit(&mut self, unit: Unit) {
        let now = self.listing_of(unit);
        self.lists.set(unit, now);
    }

    fn list_dirty(&mut self, id: PieceId) {
        let now = self.clean_key(id);
        let piece = &mut self.buffers[id.buffer].pieces[id.index as usize];
        let before = std::mem::replace(&mut piece.clean_key, now);
        if before == now {
            return;
        }
        if let Some(last_use_ns) = before {
            self.lists.dirty.remove(&(last_use_ns, id));
        }
        if let Some(last_use_ns) = now {
            self.lists.dirty.insert((last_use_ns, id));
        }
    }

    /// Returns the last use of a dirty piece that may be copied out ahead of need.
    pub(super) fn clean_key(&self, id: PieceId) -> Option<u64> {
        let (piece, buffer) = (self.piece(id), &self.buffers[id.buffer]);
        let is_idle = !buffer.stays() && buffer.uses.is_empty() && buffer.hint != Hint::WillNeed;
        let may_go = piece.is_dirty() && piece.motion.is_none() && is_idle;
        may_go.then_some(buffer.last_use_ns)
    }

    /// Takes a buffer that is removed out of all lists.
    pub(super) fn unlist(&mut self, id: BufferId) {
        let range = self.buffers[id].range;
        for piece in self.pieces_of(id) {
            self.lists.changed.remove(&piece);
            let known = &mut self.buffers[id].pieces[piece.index as usize];
            if let Some(last_use_ns) = known.clean_key.take() {
                self.lists.dirty.remove(&(last_use_ns, piece));
            }
            self.lists.set(Unit::Piece(piece), None);
        }
        if let Some(end) = self.buffers[id].cools_at.take() {
            self.lists.cooling.remove(&(end, id));
        }
        if self.ranges[range].is_group {
            self.lists.changed_groups.insert(range);
        }
    }

    /// Takes a group that is removed out of all lists.
    pub(super) fn unlist_group(&mut self, group: RangeId) {
        self.lists.changed_groups.remove(&group);
        self.lists.set(Unit::Group(group), None);
    }

    /// Returns the pieces of a unit that have memory.
    pub(super) fn backed_pieces(&self, unit: Unit) -> SmallVec<[PieceId; 1]> {
        let all: SmallVec<[PieceId; 1]> = match unit {
            Unit::Piece(id) => SmallVec::from_elem(id, 1),
            Unit::Group(range) => {
                self.tenants(range).flat_map(|buffer| self.pieces_of(buffer)).collect()
            }
        };
        all.into_iter().filter(|&id| self.piece(id).backed).collect()
    }

    /// Returns how a unit is to be listed; `None` if it has no memory. O(1), and O(tenants) in a group.
    pub(super) fn listing_of(&self, unit: Unit) -> Option<Listed> {
        let pieces = self.backed_pieces(unit);
        let first = *pieces.first()?;
        let range = &self.ranges[self.buffers[first.buffer].range];
        let frees = match unit {
            Unit::Group(_) => range.len,
            Unit::Piece(_) => self.config.pages(self.piece(first).len),
        };
        let mut tenants = range.tenants.values().map(|tenant| &self.buffers[tenant.buffer]);
        let listing = if let Some(stays) = tenants.find(|buffer| buffer.stays()) {
            reason_to_stay(stays)
        } else if pieces.iter().any(|&id| self.piece(id).motion.is_some()) {
            Listing::Moving
        } else {
            self.as_candidate(&pieces, frees)
        };
        Some(Listed { frees, listing })
    }

    fn as_candidate(&self, pieces: &[PieceId], frees: Bytes) -> Listing {
        let mut bucket = BucketKey {
            standing: EvictionClass::Idle,
            priority: i32::MIN,
            hint: Hint::WontNeed,
            frees,
            dirty: Bytes::ZERO,
            clean: Bytes::ZERO,
            from: None,
            may_use_peers: true,
        };
        let mut last_use_ns = 0;
        for &id in pieces {
            let (piece, buffer) = (self.piece(id), &self.buffers[id.buffer]);
            bucket.add(piece, buffer);
            last_use_ns = last_use_ns.max(buffer.last_use_ns);
        }
        let step = Bytes::new((frees.count() / 16).max(1));
        let rounded = |len: Bytes| len.checked_round_up(step).unwrap_or(len);
        bucket.dirty = rounded(bucket.dirty);
        bucket.clean = rounded(bucket.clean);
        Listing::Candidate { bucket, last_use_ns }
    }
}

/// Returns the sum in which a buffer that cannot leave is counted.
fn reason_to_stay(buffer: &Buffer) -> Listing {
    match buffer.holders.is_empty() {
        false => Listing::Leased,
        true => Listing::Pinned,
    }
}
