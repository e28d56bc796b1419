//! Handles of buffers: views and hints.

use std::sync::Arc;

use crate::planner::{Access, BufferId, BufferProgress, BufferStatus, Hint, PieceState, SpillTier};
use vramp_alloc::StreamId;
use vramp_core::{AddrRange, Bytes};

use super::buffer_events::BufferChange;
use super::buffer_owner::Owner;
use super::lease_set::{LeaseSet, Named};
use super::spill_error::SpillError;
use vramp_tiers::Deadline;
use vramp_tiers::movers::MoveError;

/// A buffer whose contents may leave the card while no lease holds it. Its address stays. Clones
/// and views are the same buffer: it is evicted and restored as a whole, and ends with the last of
/// them.
#[derive(Clone)]
pub struct DeferrableBuffer {
    pub(super) owner: Arc<Owner>,
    offset: Bytes,
    len: Bytes,
}

impl DeferrableBuffer {
    pub(super) fn new(owner: Owner) -> DeferrableBuffer {
        let len = owner.range.len;
        DeferrableBuffer { owner: Arc::new(owner), offset: Bytes::ZERO, len }
    }

    /// Returns its length.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Returns true for an empty view. A buffer is never empty.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Returns its addresses, which never change. Memory is behind them only under a lease: work
    /// that uses the addresses without one loses the device.
    ///
    /// An adopted buffer gets to these addresses when it first comes back to the card. Until then
    /// [`LeaseSet::address`] returns those that were adopted.
    pub fn addresses(&self) -> AddrRange {
        AddrRange::new(self.owner.start() + self.offset, self.len)
    }

    /// Returns true while its contents are in memory that was [adopted](super::SpillManager::adopt).
    /// False from the time on when all of it left the card, and for other buffers.
    pub fn is_adopted(&self) -> bool {
        self.owner.adopted_memory().is_some()
    }

    /// Returns the access that a lease on it gets: to overwrite a part, the rest has to be restored.
    pub(super) fn granted(&self, access: Access) -> Access {
        let is_part = self.len != self.owner.range.len;
        if is_part && access == Access::Overwrite { Access::Exclusive } else { access }
    }

    /// Returns it as it is named in a request.
    pub(super) fn named(&self, access: Access) -> Named {
        Named::new(Arc::clone(&self.owner), self.addresses(), self.offset, access)
    }

    /// Returns its id in records and reports.
    pub fn id(&self) -> BufferId {
        self.owner.id
    }

    /// Returns a part of it as a buffer, which shares leases, place and lifetime with the whole.
    ///
    /// # Errors
    /// The part does not lie inside.
    pub fn view(&self, offset: Bytes, len: Bytes) -> Result<DeferrableBuffer, SpillError> {
        self.check(offset, len)?;
        let owner = Arc::clone(&self.owner);
        Ok(DeferrableBuffer { owner, offset: self.offset + offset, len })
    }

    fn check(&self, offset: Bytes, len: Bytes) -> Result<(), SpillError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(SpillError::Outside { offset, len, whole: self.len }),
        }
    }

    /// Leases this buffer alone, for work on `stream`; waits for at most the manager's patience.
    ///
    /// # Errors
    /// As [`SpillManager::lease`](super::SpillManager::lease).
    pub fn lease(&self, access: Access, stream: StreamId) -> Result<LeaseSet, SpillError> {
        let deadline = Deadline::from(self.owner.shared.config.patience);
        self.owner.shared.lease(&[(self, access)], &[stream], deadline, false)
    }

    /// Allows reading it in place while it is spilled: its copies lie in host memory that is mapped
    /// at its addresses, and [`read_in_place`](DeferrableBuffer::read_in_place) restores nothing.
    /// For the buffer's lifetime. What is spilled already can be read in place only after it was
    /// restored and left again.
    ///
    /// Such copies count against the host's space. Each piece that leaves costs a create, a map and
    /// a set-access, and later the calls that release the handle. When the host is short they are
    /// the last copies to be pushed to the disk. What is there can be read in place only after it
    /// was restored and left again.
    ///
    /// # Errors
    /// The device maps no host memory, or the buffer is part of a group.
    pub fn readable_while_spilled(&self) -> Result<(), SpillError> {
        self.owner.shared.make_readable(self.owner.id)
    }

    /// Leases it shared without moving it: spilled pieces are read over the bus, and no piece moves
    /// while the lease is held. If that is not possible, or after enough [reads in
    /// place](super::SpillConfig::promote_after) if it can be restored, this is a usual lease. For
    /// sets see [`lease_in_place`](super::SpillManager::lease_in_place).
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease).
    pub fn read_in_place(&self, stream: StreamId) -> Result<LeaseSet, SpillError> {
        let deadline = Deadline::from(self.owner.shared.config.patience);
        self.owner.shared.lease(&[(self, Access::Shared)], &[stream], deadline, true)
    }

    /// Returns the state of each piece.
    pub fn states(&self) -> Vec<PieceState> {
        self.owner.shared.lock().core.states(self.owner.id).unwrap_or_default()
    }

    /// Returns true if all its contents are on the card now. Without a lease that may change at
    /// once.
    pub fn is_resident(&self) -> bool {
        !self.status().is_deferred()
    }

    /// Returns true if contents are below the card only: the next lease restores them.
    pub fn is_deferred(&self) -> bool {
        self.status().is_deferred()
    }

    /// Returns true if a lease holds the buffer. [`status`](DeferrableBuffer::status) says how many.
    pub fn is_locked(&self) -> bool {
        self.status().is_locked()
    }

    /// Returns how much of it is deferred, and how many leases hold it. O(1).
    pub fn status(&self) -> BufferStatus {
        let status = self.owner.shared.lock().core.status(self.owner.id);
        status.expect("a buffer lives as long as its handles")
    }

    /// Hints that it is needed soon: others leave first.
    pub fn will_need(&self) {
        self.hint(Hint::WillNeed);
    }

    /// Hints that it is not needed soon: it leaves before others.
    pub fn wont_need(&self) {
        self.hint(Hint::WontNeed);
    }

    fn hint(&self, hint: Hint) {
        let hinted = self.owner.shared.lock().core.hint(self.owner.id, hint);
        hinted.expect("a buffer lives as long as its handles");
    }

    /// Sets the priority, 0 at first. Buffers of lower priority leave first.
    pub fn set_priority(&self, priority: i32) {
        let set = self.owner.shared.lock().core.set_priority(self.owner.id, priority);
        set.expect("a buffer lives as long as its handles");
    }

    /// Restores it ahead of need, without a lease. The calling thread waits neither for work on the
    /// buffer nor for copies from the host or another card. It waits for contents on the disk, for
    /// evictions that make room, and for work that reads the buffer in place.
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease), but without waiting for other leases.
    pub fn prefetch(&self) -> Result<(), SpillError> {
        self.owner.shared.prefetch(self)
    }

    /// Evicts it now: all of it leaves the card, for the fastest tier with room. The members of a group
    /// leave together. Returns the bytes of the card that became free; zero if it has no memory there.
    /// Waits for the copies, and for work in flight on it.
    ///
    /// # Errors
    /// A lease, a pin or a move holds it; there is no room; a move failed; or a stream
    /// captures a graph. Contents are whole, on the card or below.
    pub fn spill(&self) -> Result<Bytes, SpillError> {
        self.owner.shared.spill_buffer(self.owner.id, None)
    }

    /// Evicts it as [`spill`](DeferrableBuffer::spill) does, and moves its copies down to `tier`: those
    /// that lie on faster tiers are moved or dropped. What is on a slower tier already stays there. Pinned memory that
    /// is wholly free when the contents are on the disk is unpinned, down to the floor of the host's pool.
    ///
    /// # Errors
    /// As [`spill`](DeferrableBuffer::spill).
    pub fn spill_to(&self, tier: SpillTier) -> Result<Bytes, SpillError> {
        let shared = &self.owner.shared;
        let spilled = shared.spill_buffer(self.owner.id, Some(tier))?;
        if tier == SpillTier::Disk {
            let pool = shared.mover.pool();
            pool.trim(pool.floor());
        }
        Ok(spilled)
    }

    /// Returns the bytes in moves that are in flight.
    pub fn progress(&self) -> BufferProgress {
        let progress = self.owner.shared.lock().core.progress(self.owner.id);
        progress.expect("a buffer lives as long as its handles")
    }

    /// Returns the stream of the last lease on it; `None` before the first. It may have been
    /// destroyed since.
    pub fn last_stream(&self) -> Option<StreamId> {
        let key = self.owner.shared.lock().core.last_stream(self.owner.id);
        let key = key.expect("a buffer lives as long as its handles")?;
        Some(StreamId::new(u32::try_from(key.0).expect("keys of leases are stream ids")))
    }

    /// Discards its contents: they are neither copied out nor restored until it is written.
    ///
    /// # Errors
    /// A lease, a pin or a move holds it.
    pub fn discard(&self) -> Result<(), SpillError> {
        let mut state = self.owner.shared.lock();
        state.poll()?;
        let stale = state.core.discard(self.owner.id)?;
        state.emit(self.owner.id, BufferChange::Discarded);
        state.drop_copies(&stale);
        state.note_freed();
        drop(state);
        // Copies that went made room below the card, and the memory on it leaves without a copy.
        self.owner.shared.notify_spillable();
        Ok(())
    }

    /// Writes `bytes` at `offset` from the host, and waits until they are there. The buffer is
    /// restored for that, unless all of it is written.
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease), or the bytes do not fit.
    pub fn write(&self, offset: Bytes, bytes: &[u8]) -> Result<(), SpillError> {
        let len = Bytes::new(bytes.len() as u64);
        self.check(offset, len)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let shared = &self.owner.shared;
        // Before the lease: if there are none, nothing is written.
        let mut host = shared.blocks(len)?;
        host.write(Bytes::ZERO, bytes).expect("as many blocks were asked for");
        let access = if len == self.len { Access::Overwrite } else { Access::Exclusive };
        let mut lease = self.lease(access, shared.stream.id)?;
        lease.wrote_only(0, offset, len)?;
        let range = AddrRange::new(lease.address(0).start + offset, len);
        let after = vramp_tiers::movers::CopyDependency::Stream(shared.stream.raw);
        let moved = shared.mover.to_device(range, host).after(after).start();
        let moved = moved.map_err(MoveError::from).and_then(|mut transfer| transfer.wait());
        // Before the lease ends.
        shared.keep_unsettled(self.id(), moved)
    }

    /// Reads from `offset` into `into` on the host, after work in flight that writes the buffer. If
    /// contents left the card for the host, they are read there, as they are when the call begins; other
    /// calls go on meanwhile. Else the buffer is restored.
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease), or there are not so many bytes.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), SpillError> {
        let len = Bytes::new(into.len() as u64);
        self.check(offset, len)?;
        if into.is_empty() {
            return Ok(());
        }
        let shared = &self.owner.shared;
        if self.is_deferred()
            && let Some(copies) = shared.host_copies(self.id(), self.offset + offset, len)
        {
            copies.read(into);
            return Ok(());
        }
        let lease = self.lease(Access::Shared, shared.stream.id)?;
        let range = AddrRange::new(lease.address(0).start + offset, len);
        let after = vramp_tiers::movers::CopyDependency::Stream(shared.stream.raw);
        let host = shared.copy_to_blocks(self.id(), range, Some(after))?;
        host.read(Bytes::ZERO, into).expect("as many blocks were asked for");
        lease.end();
        Ok(())
    }
}

impl std::fmt::Debug for DeferrableBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} at {}", self.owner.id, self.len, self.addresses())
    }
}
