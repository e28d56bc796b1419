//! Pins: memory that keeps its address because something outside holds it physically.
//!
//! 1. [`Pool::pin`] pins the chunks that a range lies in, and returns them.
//! 2. Blocks come and go in them. No plan moves or releases them, and no arena lends them.
//! 3. [`Pool::unpin`] of the same chunks ends it. Pins are counted.
//!
//! The owner of an arena refuses pins there while its contents are elsewhere ([`Pool::refuse_pins`]).
//!
//! Growth: O(log n) for each chunk of the range. A pinned chunk costs other requests nothing; in the
//! preset `vpmm` the free region that it lies in is not harvested.

use super::Pool;
use crate::Bytes;
use crate::ids::{ArenaId, PoolAddr};
use crate::pool::block::{ChunkAt, NotPoolMemory};
use crate::pool::chunks::Mapped;
use crate::pool::ops::Range;

impl Pool {
    /// Pins the chunks that a range lies in, and returns them in address order. The first and the last
    /// may reach beyond the range.
    ///
    /// # Errors
    /// Part of the range has no memory of the pool: nothing is mapped there, or an old mapping, or
    /// memory that is not the pool's; or an arena there refuses pins. Nothing is pinned.
    pub fn pin(&mut self, range: Range) -> Result<Vec<ChunkAt>, NotPoolMemory> {
        let len = range.len.max(Bytes::new(1));
        if self.refuses_pins(range) {
            return Err(NotPoolMemory);
        }
        let chunks = self.chunks.covering(range.at, len).ok_or(NotPoolMemory)?;
        for &Mapped { chunk, .. } in &chunks {
            if self.chunks.pin(chunk) {
                self.free_chunks.note_pins_changed(chunk);
            }
        }
        let at = |Mapped { chunk, home, len }| ChunkAt { chunk, at: home, len };
        Ok(chunks.into_iter().map(at).collect())
    }

    /// Returns true if [`Pool::refuse_pins`] holds for some of the addresses. O(log n) for each arena
    /// there.
    pub fn refuses_pins(&self, range: Range) -> bool {
        self.arenas.refuses_pins(range)
    }

    /// Returns true if some memory of an arena is pinned. O(log n).
    pub fn has_pins(&self, arena: ArenaId) -> bool {
        let Range { at, len } = self.arenas.get(arena).range();
        self.chunks.has_pinned_within(at, len)
    }

    /// Refuses pins of an arena's memory until [`Pool::allow_pins`]. Returns false, and refuses none, if
    /// some of it is pinned. O(log n).
    pub fn refuse_pins(&mut self, arena: ArenaId) -> bool {
        let refuses = !self.has_pins(arena);
        self.arenas.get_mut(arena).refuses_pins |= refuses;
        refuses
    }

    /// Allows pins of an arena's memory again.
    pub fn allow_pins(&mut self, arena: ArenaId) {
        self.arenas.get_mut(arena).refuses_pins = false;
    }

    /// Removes one pin from each of these chunks.
    ///
    /// # Panics
    /// If one of them is not pinned.
    pub fn unpin(&mut self, chunks: &[ChunkAt]) {
        for pinned in chunks {
            if self.chunks.unpin(pinned.chunk) {
                self.free_chunks.note_pins_changed(pinned.chunk);
            }
        }
    }

    /// Returns the number of pinned chunks and their bytes. O(1).
    pub fn pinned(&self) -> (u64, Bytes) {
        self.chunks.pinned()
    }

    /// Returns the addresses of pinned chunks, sorted. O(1) for each.
    pub fn pinned_handles(&self) -> impl Iterator<Item = PoolAddr> {
        self.chunks.pinned_homes()
    }
}
