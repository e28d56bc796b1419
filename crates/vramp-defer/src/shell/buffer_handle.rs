//! Handles of buffers: owners, views, pins and hints.

use std::sync::Arc;

use crate::planner::{Access, BufferId, Hint, PieceState};
use vramp_alloc::StreamId;
use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::acquire::InPlaceMode;
use super::lease_set::LeaseSet;
use super::spill_error::SpillError;
use super::state::Shared;
use vramp_tiers::Deadline;
use vramp_tiers::movers::MoveError;

/// Shared by all handles of a buffer. The buffer ends with the last of them.
pub(super) struct Owner {
    pub shared: Arc<Shared>,
    pub id: BufferId,
    range: AddrRange,
}

impl Owner {
    pub fn new(shared: &Arc<Shared>, id: BufferId, range: AddrRange) -> Owner {
        Owner { shared: Arc::clone(shared), id, range }
    }

    pub fn start(&self) -> DeviceAddr {
        self.range.start
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.orphans.push(self.id);
        // Work that cannot be queried counts as in flight.
        let _ = state.poll();
        drop(state);
        self.shared.notify();
    }
}

/// A buffer whose contents may leave the card while no lease holds it. Its address stays. Clones
/// and views are the same buffer: it is evicted and restored as a whole, and ends with the last of
/// them.
#[derive(Clone)]
pub struct DeferrableBuffer {
    pub(super) owner: Arc<Owner>,
    offset: Bytes,
    len: Bytes,
}

/// Keeps a buffer on the card until it is dropped: for memory that is registered with a network
/// card, or shared with another process.
#[must_use = "the pin is taken off when this is dropped"]
pub struct Pin {
    pub(super) owner: Arc<Owner>,
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
    pub fn addresses(&self) -> AddrRange {
        AddrRange::new(self.owner.start() + self.offset, self.len)
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
        self.owner.shared.lease(&[(self, access)], &[stream], deadline, InPlaceMode::Never)
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
        self.owner.shared.lease_in_place(&[(self, Access::Shared)], &[stream], deadline)
    }

    /// Returns the state of each piece.
    pub fn states(&self) -> Vec<PieceState> {
        self.owner.shared.lock().core.states(self.owner.id).unwrap_or_default()
    }

    /// Returns true if all its contents are on the card now. Without a lease that may change at
    /// once.
    pub fn is_resident(&self) -> bool {
        self.states().iter().all(|state| {
            matches!(
                state,
                PieceState::Empty
                    | PieceState::Resident { .. }
                    | PieceState::Cleaning { .. }
                    | PieceState::Leaving { .. }
            )
        })
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

    /// Restores it ahead of need, without a lease. The calling thread does not wait for the copies.
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease), but without waiting for other leases.
    pub fn prefetch(&self) -> Result<(), SpillError> {
        let now = Deadline::from(std::time::Instant::now());
        let wanted = [(self, Access::Shared)];
        let lease = self.owner.shared.lease(&wanted, &[], now, InPlaceMode::Never)?;
        lease.cancel();
        Ok(())
    }

    /// Discards its contents: they are neither copied out nor restored until it is written.
    ///
    /// # Errors
    /// A lease, a pin, an exposure or a move holds it.
    pub fn discard(&self) -> Result<(), SpillError> {
        let mut state = self.owner.shared.lock();
        state.poll()?;
        let stale = state.core.discard(self.owner.id)?;
        state.drop_copies(&stale);
        Ok(())
    }

    /// Writes `bytes` at `offset` from the host, and waits until they are there. The buffer is
    /// restored for that.
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
        let mut lease = self.lease(Access::Exclusive, shared.stream.id)?;
        lease.wrote_only(0, offset, len)?;
        let range = AddrRange::new(self.addresses().start + offset, len);
        let mut host = shared.blocks(len)?;
        host.write(Bytes::ZERO, bytes).expect("as many blocks were asked for");
        let after = vramp_tiers::movers::CopyDependency::Stream(shared.stream.raw);
        let moved = shared.mover.to_device(range, host).after(after).start();
        let moved = moved.map_err(MoveError::from).and_then(|mut transfer| transfer.wait());
        // Before the lease ends.
        shared.keep_unsettled(self.id(), moved)
    }

    /// Reads from `offset` into `into` on the host, after work in flight that writes the buffer. It
    /// is restored for that.
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
        let lease = self.lease(Access::Shared, shared.stream.id)?;
        let range = AddrRange::new(self.addresses().start + offset, len);
        let host = shared.blocks(len)?;
        let after = vramp_tiers::movers::CopyDependency::Stream(shared.stream.raw);
        let moved = shared.mover.to_host(range, host).after(after).start();
        let moved = moved.map_err(MoveError::from).and_then(|mut transfer| {
            transfer.wait()?;
            Ok(transfer.into_host())
        });
        let host = shared.keep_unsettled(self.id(), moved)?;
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

impl Drop for Pin {
    fn drop(&mut self) {
        let unpinned = self.owner.shared.lock().core.unpin(self.owner.id);
        debug_assert!(unpinned.is_ok(), "a pin is taken off once: {unpinned:?}");
        self.owner.shared.notify();
    }
}
