//! Buffers without handles: each ends once nothing holds it.
//!
//! A buffer is looked at again only when something that held it has ended: a lease, a pin,
//! work or a move. O(log n) for each of these.

use super::{BufferId, Deferrables};

impl Deferrables {
    /// Records that no handle of a buffer is left. [`take_ending`](Deferrables::take_ending) returns it,
    /// now and whenever something that holds it has ended, until it is removed. O(log n).
    pub fn release_handles(&mut self, buffer: BufferId) {
        if let Some(known) = self.buffers.get_mut(buffer) {
            let before = std::mem::replace(&mut known.is_ending, true);
            self.without_handles += usize::from(!before);
            self.ending.insert(buffer);
        }
    }

    /// Returns the buffers without handles that may be removed now.
    pub fn take_ending(&mut self) -> Vec<BufferId> {
        let ending = std::mem::take(&mut self.ending);
        self.counters.looked_at += ending.len() as u64;
        ending.into_iter().collect()
    }

    /// Returns true if [`take_ending`](Deferrables::take_ending) returns some.
    pub fn has_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    /// Records that something which held a buffer may have ended.
    pub(super) fn note_let_go(&mut self, buffer: BufferId) {
        if self.buffers[buffer].is_ending {
            self.ending.insert(buffer);
        }
    }
}
