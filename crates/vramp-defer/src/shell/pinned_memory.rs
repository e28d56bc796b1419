//! Memory that is pinned in the pool: a network card or another process holds it physically.
//!
//! 1. A buffer is leased, and its memory is pinned ([`Allocator::pin_range`]). It stays on the card, also
//!    after the lease, until it is unpinned.
//! 2. Before victims are chosen, the planner records which ranges are pinned
//!    ([`State::note_pins`]).
//! 3. Before a copy out starts, the range refuses pins from then on. If one came in between, the piece
//!    stays. So a pin finds all of a buffer's memory with its contents, or is refused.
//! 4. The next lease on the card allows pins again.
//!
//! Growth: no call while nothing is pinned, else O(log n) for each pinned handle, each time memory is
//! short.
//!
//! [`Allocator::pin_range`]: vramp_alloc::Allocator::pin_range

use std::collections::BTreeSet;

use crate::planner::{CopyOut, GrantedLease, RangeId};
use vramp_alloc::Allocator;

use super::spill_error::SpillError;
use super::state::State;

impl State {
    /// Records which ranges have pinned memory.
    pub fn note_pins(&mut self, allocator: &Allocator) {
        if allocator.pinned().0 == 0 && !self.has_pinned_memory {
            return;
        }
        let handles = allocator.pinned_handles().into_iter();
        let pinned: BTreeSet<RangeId> = handles.filter_map(|at| self.homes.at(at)).collect();
        for &range in self.pinned_ranges.difference(&pinned) {
            self.core.set_pinned_memory(range, false);
        }
        for &range in &pinned {
            self.core.set_pinned_memory(range, true);
        }
        self.has_pinned_memory = !pinned.is_empty();
        self.pinned_ranges = pinned;
    }

    /// Refuses pins of a piece's range from now on.
    ///
    /// # Errors
    /// Memory of it is pinned: it stays.
    pub fn refuse_pins(&mut self, out: &CopyOut) -> Result<(), SpillError> {
        let home = self.homes.get_mut(&out.at.range).expect("each range has addresses");
        if home.range.refuse_pins() {
            home.refuses_pins = true;
            return Ok(());
        }
        self.core.set_pinned_memory(out.at.range, true);
        self.pinned_ranges.insert(out.at.range);
        self.has_pinned_memory = true;
        Err(SpillError::PinnedMemory { buffer: out.piece.buffer })
    }

    /// Allows pins of what a lease has on the card.
    pub fn allow_pins(&mut self, granted: &GrantedLease) {
        for range in &granted.ranges {
            if let Some(home) = self.homes.get_mut(range).filter(|home| home.refuses_pins) {
                home.refuses_pins = false;
                home.range.allow_pins();
            }
        }
    }
}
