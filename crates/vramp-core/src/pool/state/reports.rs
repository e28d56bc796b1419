//! What a pool reports of itself: sums, checks, layouts. Nothing changes.

use std::fmt;

use super::Pool;
use crate::Bytes;
use crate::ids::BlockId;
use crate::pool::audit::Inconsistency;
use crate::pool::block::{ChunkAt, Slab};
use crate::pool::census::{Census, Quarantined, Share, Stretch};
use crate::pool::config::PoolConfig;
use crate::pool::counters::Counters;
use crate::pool::free_parts::{FreeParts, PartCount};
use crate::pool::ops::Range;

impl Pool {
    /// The pool's configuration.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Totals since the pool was created.
    pub fn counters(&self) -> Counters {
        let Quarantined { memory, addresses } = self.quarantined();
        Counters {
            reserved: self.chunks.bytes(),
            quarantined: memory,
            quarantined_addresses: addresses,
            looked_at: self.looked_at.get(),
            ..self.counters
        }
    }

    /// Bytes by state, with slabs counted as free: [`StreamHeap::count_into`] adds what is in them.
    /// O(n).
    ///
    /// [`StreamHeap::count_into`]: crate::StreamHeap::count_into
    pub fn census(&self) -> Census {
        self.view().census()
    }

    /// Freed and free memory by whether a trim can release it, without what is in slabs:
    /// [`StreamHeap::free_parts`] has that. O(n).
    ///
    /// [`StreamHeap::free_parts`]: crate::StreamHeap::free_parts
    pub fn free_parts(&self) -> FreeParts {
        self.view().free_parts()
    }

    /// Freed regions that wait for work of other streams, slabs left out. O(n) in these regions alone.
    pub fn waiting_parts(&self) -> PartCount {
        let mut counted = PartCount::default();
        for entry in self.waiting.iter() {
            counted.add(self.regions.get(entry.item).len);
        }
        counted
    }

    /// Checks every invariant. O(n log n): for tests, `--audit` and after an error.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        self.view().audit()
    }

    /// The pool's side of a slab, for the audit of the heap that has it.
    pub(crate) fn check_slab(&self, slab: &Slab) -> Result<(), String> {
        self.view().check_slab(slab)
    }

    /// True if old mappings are left that may be unmapped once their work is over.
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Free memory of no stream: no work uses it, and every stream may take it. O(1).
    pub fn idle(&self) -> Bytes {
        self.view().streams.idle().bytes()
    }

    /// Memory of each stream. O(n).
    pub fn shares(&self) -> Vec<Share> {
        self.view().shares()
    }

    /// All memory in use or free, by address. O(n).
    pub fn stretches(&self) -> Vec<Stretch> {
        self.view().stretches()
    }

    /// All mapped addresses, homes and retired mappings alike, neighbours joined. O(n).
    pub fn mapped_ranges(&self) -> Vec<Range> {
        self.view().mapped_ranges()
    }

    /// Returns the ranges whose contents matter, in address order, neighbours joined: blocks, slabs, and
    /// memory of arenas. O(regions).
    pub fn contents(&self) -> Vec<Range> {
        self.view().contents()
    }

    /// Returns every usable chunk at its home, in address order, and whether it is pinned. O(chunks).
    pub fn homes(&self) -> impl Iterator<Item = (ChunkAt, bool)> {
        self.chunks.homes().map(|mapped| {
            let at = ChunkAt { chunk: mapped.chunk, at: mapped.home, len: mapped.len };
            (at, self.chunks.is_pinned(mapped.chunk))
        })
    }

    /// Returns the ranges that the device may access, in address order, each as long as possible: blocks,
    /// free memory, old mappings and memory that is not the pool's. O(regions).
    pub fn accessible_ranges(&self) -> Vec<Range> {
        self.view().accessible_ranges()
    }

    /// The mapped part of the first span in VPMM's notation: one bracket for each region, holes at
    /// the end left out, neighbours of one kind drawn as one. Sizes are whole pages. `newest` is
    /// drawn with a plus.
    pub fn layout(&self, newest: Option<BlockId>) -> String {
        self.view().layout(newest)
    }
}

impl fmt::Debug for Pool {
    /// The census and every region in address order.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view().describe(f)
    }
}
