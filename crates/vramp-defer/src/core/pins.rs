//! Pins and hints.
//!
//! Buffers without handles: each ends once nothing holds it.
//!
//! A buffer is looked at again only when something that held it has ended: a lease, a pin,
//! work or a move. O(log n) for each of these.

use smallvec::SmallVec;

use super::{
    BufferId, BufferLeaseId, Deferrables, Hint, PinError, RangeId, UnknownBuffer,
    UnknownBufferLease,
};

impl Deferrables {
    /// Keeps a leased buffer on the card after the lease's end, until it is unpinned as often.
    ///
    /// # Errors
    /// The lease does not exist, does not hold the buffer, or reads it in place: a pinned buffer
    /// must be on the card, within the capacity.
    pub fn pin(&mut self, lease: BufferLeaseId, buffer: BufferId) -> Result<(), PinError> {
        self.check_leased(lease, buffer)?;
        self.buffers[buffer].pins += 1;
        self.refresh(buffer);
        Ok(())
    }

    fn check_leased(&self, lease: BufferLeaseId, buffer: BufferId) -> Result<(), PinError> {
        let known = self.leases.get(&lease).ok_or(UnknownBufferLease { lease })?;
        if known.access(buffer).is_none() {
            return Err(PinError::NotLeased { buffer });
        }
        if self.buffers[buffer].holders.read_in_place() {
            return Err(PinError::InPlace { buffer });
        }
        Ok(())
    }

    /// Removes one pin. Returns how many are left.
    ///
    /// # Errors
    /// There was none.
    pub fn unpin(&mut self, buffer: BufferId) -> Result<u32, PinError> {
        let pinned = self.get_mut(buffer)?;
        pinned.pins = pinned.pins.checked_sub(1).ok_or(PinError::NotPinned { buffer })?;
        let left = pinned.pins;
        self.refresh(buffer);
        Ok(left)
    }

    /// Records whether memory of a range is pinned in the pool: something outside holds it physically.
    /// Its buffers stay on the card until it is not. A piece that was chosen to leave stays too. O(1),
    /// and O(tenants) in a group.
    pub fn set_pinned_memory(&mut self, range: RangeId, is_pinned: bool) {
        let mut changed = false;
        for buffer in self.tenants(range).collect::<SmallVec<[BufferId; 4]>>() {
            let before = &mut self.buffers[buffer].has_pinned_memory;
            changed |= std::mem::replace(before, is_pinned) != is_pinned;
            self.refresh(buffer);
        }
        if changed && is_pinned {
            self.cancel_evictions(range);
        }
    }

    /// Returns true after [`set_pinned_memory`](Deferrables::set_pinned_memory).
    pub fn has_pinned_memory(&self, range: RangeId) -> bool {
        self.tenants(range).any(|buffer| self.buffers[buffer].has_pinned_memory)
    }

    /// Sets when the next use comes. The next lease resets it.
    pub fn hint(&mut self, buffer: BufferId, hint: Hint) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.hint = hint;
        self.note_buffer_changed(buffer);
        Ok(())
    }

    /// Sets the priority, 0 at first. Buffers of lower priority leave first.
    pub fn set_priority(&mut self, buffer: BufferId, priority: i32) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.priority = priority;
        self.note_buffer_changed(buffer);
        Ok(())
    }
}

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
