//! Adopted buffers: contents in memory that was allocated elsewhere, until they leave the card.
//!
//! 1. [`Deferrables::add_adopted`] adds a buffer whose contents are on the card already, in memory that
//!    is not the pool's. A lease uses them there.
//! 2. The memory can be given back only as a whole, so all pieces leave together. If a lease comes in
//!    between, what left is restored to the adopted memory.
//! 3. When no piece has memory any more the adoption is over. From then on the buffer is like any other.
//!
//! Adopted memory is its allocator's: it counts neither as occupied, nor against the capacity of leases.

use super::buffer_state::ContentPlace;
use super::{Access, AddError, AddedBuffer, BufferId, Deferrables, PieceId, RangeId, UseToken};
use vramp_core::Bytes;

impl Deferrables {
    /// Adds a buffer whose contents are in memory of others. The work of `token` writes them.
    /// O(pieces).
    ///
    /// # Errors
    /// As [`add_buffer`](Deferrables::add_buffer).
    pub fn add_adopted(
        &mut self,
        len: Bytes,
        token: UseToken,
        now_ns: u64,
    ) -> Result<AddedBuffer, AddError> {
        let added = self.add_buffer(len)?;
        let buffer = added.buffer;
        self.ranges[added.at.range].is_adopted = true;
        for id in self.pieces_of(buffer) {
            self.set_backed(id, true);
            self.piece_mut(id).place = ContentPlace::Card;
        }
        self.buffers[buffer].last_use_ns = now_ns;
        self.note_use_of(buffer, token, Access::Exclusive);
        self.reindex_buffer(buffer);
        self.refresh(buffer);
        Ok(added)
    }

    /// Returns true while the contents of a range are in adopted memory, or part of them.
    pub fn is_adopted(&self, range: RangeId) -> bool {
        self.ranges.get(range).is_some_and(|range| range.is_adopted)
    }

    /// Ends the adoption of a buffer: no piece is in the adopted memory.
    pub(super) fn end_adoption(&mut self, buffer: BufferId) {
        let id = self.buffers[buffer].range;
        let range = &mut self.ranges[id];
        range.is_adopted = false;
        if range.unevictable_count > 0 {
            self.committed += range.len;
        }
        if range.kept_count > 0 {
            self.kept += range.len;
        }
        self.touch(buffer);
        self.unlist_group(id);
        self.pieces_of(buffer).for_each(|piece: PieceId| self.note_changed(piece));
    }
}
