//! Pins, pointers that were handed outside, and hints.

use super::{
    Access, BufferId, BufferLeaseId, Deferrables, ExposeError, Hint, StaleCopy, UnknownBuffer,
    UnknownBufferLease, UseToken,
};

/// What is known of a pointer that outlives its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerScope {
    /// It does not: the leases tell everything.
    Leased,
    /// It is used on streams that are known: by the uses at the lease's end, and those noted by
    /// [`Deferrables::note_use`] before they are over.
    StreamScoped,
    /// Until [`Deferrables::end_epoch`].
    Quiesced,
    /// Nobody knows: until [`Deferrables::release`], once for each time.
    Opaque,
}

impl Deferrables {
    /// Notes that a leased buffer's pointer was handed outside. Grades add up.
    ///
    /// What is written through it has to be allowed by the lease: contents of a buffer that is
    /// exposed under a shared lease count as unchanged.
    ///
    /// # Errors
    /// The lease does not exist, or does not hold the buffer.
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
            PointerScope::Quiesced => exposed.quiesced = true,
            PointerScope::Opaque => exposed.opaque += 1,
        }
        self.refresh(buffer);
        Ok(())
    }

    /// Notes work that uses an exposed buffer behind its lease. Returns the copies to drop, for
    /// work that writes.
    ///
    /// # Errors
    /// The buffer may have left: it is not exposed, or its uses are over. Or a lease excludes all
    /// others: note the use where that ends.
    pub fn note_use(
        &mut self,
        buffer: BufferId,
        token: UseToken,
        access: Access,
    ) -> Result<Vec<StaleCopy>, ExposeError> {
        let known = self.get_mut(buffer)?;
        let exposed = known.exposed;
        let outside = exposed.stream_scoped || exposed.quiesced || exposed.opaque > 0;
        let excluded = known.holders.iter().any(|&(_, access)| access == Access::Exclusive);
        if !outside || excluded {
            return Err(ExposeError::NotExposed { buffer });
        }
        known.uses.note(token, access);
        self.refresh(buffer);
        Ok(match access {
            Access::Shared => Vec::new(),
            Access::Exclusive => self.note_written(buffer, |_| true),
        })
    }

    /// Ends the epoch: pointers of the grade [`PointerScope::Quiesced`] are not used any more, and work on
    /// them is complete. Returns the buffers that were exposed so. O(buffers).
    pub fn end_epoch(&mut self) -> Vec<BufferId> {
        let quiesced = self.buffers.iter().filter(|(_, buffer)| buffer.exposed.quiesced);
        let quiesced: Vec<BufferId> = quiesced.map(|(id, _)| id).collect();
        for &id in &quiesced {
            self.buffers[id].exposed.quiesced = false;
            self.refresh(id);
        }
        quiesced
    }

    /// One unknown holder is done with the pointer. Returns how many are left.
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

    /// Keeps a leased buffer on the card behind the lease's end, until it is unpinned as often.
    ///
    /// # Errors
    /// The lease does not exist, or does not hold the buffer: it may be off the card, and what is
    /// pinned has to fit beside what is leased.
    pub fn pin(&mut self, lease: BufferLeaseId, buffer: BufferId) -> Result<(), ExposeError> {
        self.check_leased(lease, buffer)?;
        self.buffers[buffer].pins += 1;
        self.refresh(buffer);
        Ok(())
    }

    fn check_leased(&self, lease: BufferLeaseId, buffer: BufferId) -> Result<(), ExposeError> {
        let known = self.leases.get(&lease).ok_or(UnknownBufferLease { lease })?;
        if known.in_place.contains(&buffer) {
            return Err(ExposeError::InPlace { buffer });
        }
        if !known.buffers.iter().any(|&(held, _)| held == buffer) {
            return Err(ExposeError::NotLeased { buffer });
        }
        Ok(())
    }

    /// Takes one pin off. Returns how many are left.
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

    /// Says when the next use comes. Forgotten with the next lease.
    pub fn hint(&mut self, buffer: BufferId, hint: Hint) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.hint = hint;
        Ok(())
    }

    /// Buffers of lower priority leave first. At first it is 0.
    pub fn set_priority(&mut self, buffer: BufferId, priority: i32) -> Result<(), UnknownBuffer> {
        self.get_mut(buffer)?.priority = priority;
        Ok(())
    }
}
