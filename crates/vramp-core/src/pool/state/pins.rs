//! Pins: memory that keeps its address because something outside holds it physically.
//!
//! 1. [`Pool::pin`] pins the chunks that a range lies in, and returns them.
//! 2. Blocks come and go in them. No plan moves or releases them, and no arena lends them.
//! 3. [`Pool::unpin`] of the same chunks ends it. Pins are counted.
//!
//! Growth: O(log n) for each chunk of the range. A pinned chunk costs other requests nothing; in the
//! preset `vpmm` the free region that it lies in is not harvested.

use super::Pool;
use crate::Bytes;
use crate::ids::{ChunkId, PoolAddr};
use crate::pool::chunks::Mapped;
use crate::pool::ops::Range;

/// A chunk at its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkAt {
    /// Id of the chunk.
    pub chunk: ChunkId,
    /// Address of its first byte.
    pub at: PoolAddr,
    /// Length in bytes.
    pub len: Bytes,
}

/// A range that cannot be pinned: not all of it is memory of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not all of the range is memory of the pool: pin what was allocated and not freed")]
pub struct NotPoolMemory;

impl Pool {
    /// Pins the chunks that a range lies in, and returns them in address order. The first and the last
    /// may reach beyond the range.
    ///
    /// # Errors
    /// Part of the range has no memory of the pool: nothing is mapped there, or an old mapping, or
    /// memory that is not the pool's. Nothing is pinned.
    pub fn pin(&mut self, range: Range) -> Result<Vec<ChunkAt>, NotPoolMemory> {
        let len = range.len.max(Bytes::new(1));
        let chunks = self.chunks.covering(range.at, len).ok_or(NotPoolMemory)?;
        for &Mapped { chunk, .. } in &chunks {
            if self.chunks.pin(chunk) {
                self.free_chunks.note_pins_changed(chunk);
            }
        }
        let at = |Mapped { chunk, home, len }| ChunkAt { chunk, at: home, len };
        Ok(chunks.into_iter().map(at).collect())
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
}
