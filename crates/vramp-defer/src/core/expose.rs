//! Pins, exposed pointers, and hints.

use super::{
    Access, BufferId, BufferLeaseId, Deferrables, ExposeError, Hint, RangeId, StaleCopy,
    UnknownBuffer, UnknownBufferLease, UseToken,
};
use smallvec::SmallVec;

/// How long an exposed pointer is used after its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerScope {
    /// Not at all: only under leases.
    Leased,
    /// By work on known streams: the uses at the lease's end, and those recorded by
    /// [`Deferrables::note_use`] before that work is complete.
    StreamScoped,
    /// Until [`Deferrables::end_epoch`].
    Quiesced,
    /// Until [`Deferrables::release`], once for each exposure.
    Opaque,
}

impl Deferrables {
    /// Records that a leased buffer's pointer was exposed. Scopes add up.
    ///
    /// The lease must allow what is written through the pointer: contents of a buffer that is
    /// exposed under a shared lease count as unchanged.
    ///
    /// # Errors
    /// The lease does not exist, does not hold the buffer, or reads it in place.
    pub fn expose(
        &mut self,
        lease: BufferLeaseId,
        buffer: BufferId,
        grade: PointerScope,
    ) -> Result<(), ExposeError> {
        self.check_leased(lease, buffer)?;
        let exposed = &mut self.buffers[buffer].exposed;
        match grade {
            PointerScope::Leased => {}
            PointerScope::StreamScoped => exposed.stream_scoped = true,
            PointerScope::Quiesced => {
                exposed.quiesced = true;
                self.quiesced.insert(buffer);
            }
            PointerScope::Opaque => exposed.opaque += 1,
        }
        self.refresh(buffer);
        Ok(())
    }

    /// Records work that uses an exposed buffer after its lease. Returns the stale copies, for work
    /// that writes.
    ///
    /// # Errors
    /// The buffer may have left: it is not exposed, or its uses are complete. Or it is leased
    /// exclusively: record the use where that lease ends.
    pub fn note_use(
        &mut self,
        buffer: BufferId,
        token: UseToken,
        access: Access,
    ) -> Result<Vec<StaleCopy>, ExposeError> {
        let known = self.get_mut(buffer)?;
        let exposed = known.exposed;
        let outside = exposed.stream_scoped || exposed.quiesced || exposed.opaque > 0;
        let excluded = known.holders.is_exclusive();
        if !outside || excluded {
            return Err(ExposeError::NotExposed { buffer });
        }
        self.note_use_of(buffer, token, access);
        self.refresh(buffer);
        Ok(match access {
            Access::Shared => Vec::new(),
            Access::Exclusive | Access::Overwrite => self.note_written(buffer, |_| true),
        })
    }

    /// Ends the epoch: pointers of scope [`PointerScope::Quiesced`] are no longer used, and work on
    /// them is complete. Returns their buffers. O(log n) for each.
    pub fn end_epoch(&mut self) -> Vec<BufferId> {
        let quiesced: Vec<BufferId> = std::mem::take(&mut self.quiesced).into_iter().collect();
        for &id in &quiesced {
            self.buffers[id].exposed.quiesced = false;
            self.refresh(id);
        }
        quiesced
    }

    /// Ends one exposure of scope [`PointerScope::Opaque`]. Returns how many are left.
    ///
    /// # Errors
    /// There was none.
    pub fn release(&mut self, buffer: BufferId) -> Result<u32, ExposeError> {
        let exposed = &mut self.get_mut(buffer)?.exposed;
        exposed.opaque = exposed.opaque.checked_sub(1).ok_or(ExposeError::NotOpaque { buffer })?;
        let left = exposed.opaque;
        self.refresh(buffer);
        Ok(left)
    }

    /// Keeps a leased buffer on the card after the lease's end, until it is unpinned as often.
    ///
    /// # Errors
    /// The lease does not exist, does not hold the buffer, or reads it in place: a pinned buffer
    /// must be on the card, within the capacity.
    pub fn pin(&mut self, lease: BufferLeaseId, buffer: BufferId) -> Result<(), ExposeError> {
        self.check_leased(lease, buffer)?;
        self.buffers[buffer].pins += 1;
        self.refresh(buffer);
        Ok(())
    }

    fn check_leased(&self, lease: BufferLeaseId, buffer: BufferId) -> Result<(), ExposeError> {
        let known = self.leases.get(&lease).ok_or(UnknownBufferLease { lease })?;
        if known.access(buffer).is_none() {
            return Err(ExposeError::NotLeased { buffer });
        }
        if self.buffers[buffer].holders.read_in_place() {
            return Err(ExposeError::InPlace { buffer });
        }
        Ok(())
    }

    /// Removes one pin. Returns how many are left.
    ///
    /// # Errors
    /// There was none.
    pub fn unpin(&mut self, buffer: BufferId) -> Result<u32, ExposeError> {
        let pinned = self.get_mut(buffer)?;
        pinned.pins = pinned.pins.checked_sub(1).ok_or(ExposeError::NotPinned { buffer })?;
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
