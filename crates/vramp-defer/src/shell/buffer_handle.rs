//! Buffers as their users hold them: owners, views, pins and hints.

use std::sync::Arc;

use crate::planner::{Access, BufferId, Hint, PieceState};
use vramp_alloc::StreamId;
use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::acquire::InPlaceMode;
use super::lease_set::LeaseSet;
use super::spill_error::SpillError;
use super::state::Shared;
use vramp_tiers::Deadline;

/// What all handles of a buffer share. With the last one the buffer goes.
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
        // What cannot be asked counts as in use.
        let _ = state.poll();
        drop(state);
        self.shared.notify();
    }
}

/// Contents that may leave the card while nobody uses them, at an address that stays. Clones and
/// views are the same buffer: it leaves and comes back as a whole, and goes with the last of them.
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

    /// How long it is.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Never: a buffer has a length. A view may have none.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Where it lies, for its whole life. Only a lease says that something is there: whoever reads
    /// the address without one loses the device.
    pub fn addresses(&self) -> AddrRange {
        AddrRange::new(self.owner.start() + self.offset, self.len)
    }

    /// Its name in records and reports.
    pub fn id(&self) -> BufferId {
        self.owner.id
    }

    /// A part of it, as a buffer: it shares leases, place and life with the whole.
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

    /// A lease on it alone, for work on `stream`; waits as long as the manager's patience.
    ///
    /// # Errors
    /// As [`SpillManager::lease`](super::SpillManager::lease).
    pub fn lease(&self, access: Access, stream: StreamId) -> Result<LeaseSet, SpillError> {
        let deadline = Deadline::from(self.owner.shared.config.patience);
        self.owner.shared.lease(&[(self, access)], &[stream], deadline, InPlaceMode::Never)
    }

    /// Lets it be read at its address also while it is spilled: its copies are then kept in host
    /// memory that is mapped there, and [`read_in_place`](DeferrableBuffer::read_in_place) brings
    /// nothing back. For the buffer's life; what is spilled by now is so once it was back.
    ///
    /// Such copies count against the host's space, and take driver calls for each piece that
    /// leaves: create, map and allow, and those that end its handle. Where the host is short they
    /// go to the disk after all others, and what is there cannot be read in place until it was back
    /// and left again.
    ///
    /// # Errors
    /// The device maps no host memory, or the buffer is one of a group.
    pub fn readable_while_spilled(&self) -> Result<(), SpillError> {
        self.owner.shared.make_readable(self.owner.id)
    }

    /// A shared lease that leaves each piece where it is: what is spilled is read over the bus.
    /// While it is held nothing of the buffer moves. Where that cannot be, and once it was read so
    /// [often](super::SpillConfig::promote_after) that it should be on the card and can be, it is a
    /// usual lease. For sets see [`lease_in_place`](super::SpillManager::lease_in_place).
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease).
    pub fn read_in_place(&self, stream: StreamId) -> Result<LeaseSet, SpillError> {
        let deadline = Deadline::from(self.owner.shared.config.patience);
        self.owner.shared.lease_in_place(&[(self, Access::Shared)], &[stream], deadline)
    }

    /// What each of its pieces is and does.
    pub fn states(&self) -> Vec<PieceState> {
        self.owner.shared.lock().core.states(self.owner.id).unwrap_or_default()
    }

    /// True if all that it contains is on the card now. Without a lease that may change at once.
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

    /// Says that it is needed soon: others leave first.
    pub fn will_need(&self) {
        self.hint(Hint::WillNeed);
    }

    /// Says that it is not needed soon: it leaves before others.
    pub fn wont_need(&self) {
        self.hint(Hint::WontNeed);
    }

    fn hint(&self, hint: Hint) {
        let hinted = self.owner.shared.lock().core.hint(self.owner.id, hint);
        hinted.expect("a buffer lives as long as its handles");
    }

    /// Buffers of lower priority leave first. At first it is 0.
    pub fn set_priority(&self, priority: i32) {
        let set = self.owner.shared.lock().core.set_priority(self.owner.id, priority);
        set.expect("a buffer lives as long as its handles");
    }

    /// Brings it to the card ahead of need, without a lease. Nobody waits for the copies.
    ///
    /// # Errors
    /// As [`lease`](DeferrableBuffer::lease), but it does not wait for others.
    pub fn prefetch(&self) -> Result<(), SpillError> {
        let now = Deadline::from(std::time::Instant::now());
        let wanted = [(self, Access::Shared)];
        let lease = self.owner.shared.lease(&wanted, &[], now, InPlaceMode::Never)?;
        lease.cancel();
        Ok(())
    }

    /// Says that what it contains is not needed: it is neither copied out nor in any more until it
    /// is written.
    ///
    /// # Errors
    /// Somebody holds it.
    pub fn discard(&self) -> Result<(), SpillError> {
        let mut state = self.owner.shared.lock();
        state.poll()?;
        let stale = state.core.discard(self.owner.id)?;
        state.drop_copies(&stale);
        Ok(())
    }

    /// Replaces the bytes from `offset` on by `bytes`, from the host, and waits until they are there.
    /// It is brought to the card for that.
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
        let mut lease = self.lease(Access::Exclusive, shared.stream.0)?;
        lease.wrote_only(0, offset, len)?;
        let range = AddrRange::new(self.addresses().start + offset, len);
        let mut host = shared.blocks(len)?;
        host.write(Bytes::ZERO, bytes).expect("as many blocks were asked for");
        let after = vramp_tiers::movers::CopyDependency::Stream(shared.stream.1);
        shared.mover.to_device(range, host).after(after).start()?.wait()?;
        Ok(())
    }

    /// Copies the bytes from `offset` on into `into`, to the host, behind the work that writes them.
    /// It is brought to the card for that.
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
        let lease = self.lease(Access::Shared, shared.stream.0)?;
        let range = AddrRange::new(self.addresses().start + offset, len);
        let host = shared.blocks(len)?;
        let after = vramp_tiers::movers::CopyDependency::Stream(shared.stream.1);
        let mut transfer = shared.mover.to_host(range, host).after(after).start()?;
        transfer.wait()?;
        transfer.into_host().read(Bytes::ZERO, into).expect("as many blocks were asked for");
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
