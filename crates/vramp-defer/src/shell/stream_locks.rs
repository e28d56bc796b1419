//! Locks: leases without a handle, which the manager keeps by stream until they are unlocked.
//!
//! For callers that lock and unlock in different places, such as an interface to another language. A
//! lock belongs to no thread. Growth: O(log n) in the locks for each call.
//!
//! The table belongs to the manager's handles and not to its buffers: a lease keeps its buffers, so a
//! table that buffers kept would never end. Dropping the last handle of the manager unlocks all.

use std::collections::BTreeMap;

use vramp_alloc::{Driver, StreamId, StreamWork};
use vramp_core::AddrRange;

use super::buffer_handle::DeferrableBuffer;
use super::lease_set::LeaseSet;
use super::manager::SpillManager;
use super::spill_error::SpillError;
use crate::planner::Access;
use crate::sync::{Mutex, lock};

/// A lock that the manager keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamLock {
    /// Id of the lock, for [`SpillManager::unlock`]. Never reused.
    pub id: LockId,
    /// Addresses of the buffers, in the order of the request.
    pub addresses: Vec<AddrRange>,
}

/// Id of a lock; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockId {
    stream: StreamId,
    number: u64,
}

impl LockId {
    /// Returns the stream whose locks it belongs to.
    pub fn stream(self) -> StreamId {
        self.stream
    }
}

/// The locks of one manager, by stream in the order in which they were taken.
#[derive(Default)]
pub(super) struct StreamLocks {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    locks: BTreeMap<LockId, LeaseSet>,
    last: u64,
}

impl StreamLocks {
    fn keep(&self, stream: StreamId, lease: LeaseSet) -> LockId {
        let mut table = lock(&self.table);
        table.last += 1;
        let id = LockId { stream, number: table.last };
        table.locks.insert(id, lease);
        id
    }

    fn take(&self, id: LockId) -> Option<LeaseSet> {
        lock(&self.table).locks.remove(&id)
    }

    fn take_all(&self, stream: StreamId) -> BTreeMap<LockId, LeaseSet> {
        let mut table = lock(&self.table);
        let mut taken = table.locks.split_off(&LockId { stream, number: 0 });
        let mut later = taken.split_off(&LockId { stream, number: u64::MAX });
        table.locks.append(&mut later);
        taken
    }

    fn put_back(&self, mut locks: BTreeMap<LockId, LeaseSet>) {
        lock(&self.table).locks.append(&mut locks);
    }

    fn len(&self, stream: StreamId) -> usize {
        let all = LockId { stream, number: 0 }..=LockId { stream, number: u64::MAX };
        lock(&self.table).locks.range(all).count()
    }
}

impl SpillManager {
    /// Locks all of the buffers for work on `stream`: a lease as of [`lease`](SpillManager::lease), kept
    /// by the manager. It ends by [`unlock`](SpillManager::unlock) with its id, by
    /// [`unlock_stream`](SpillManager::unlock_stream) or [`sync_and_unlock`](SpillManager::sync_and_unlock)
    /// of the stream, from any thread, or with the last handle of the manager.
    ///
    /// # Errors
    /// As [`lease`](SpillManager::lease).
    pub fn lock(
        &self,
        buffers: &[(&DeferrableBuffer, Access)],
        stream: StreamId,
    ) -> Result<StreamLock, SpillError> {
        let lease = self.lease(buffers, stream)?;
        let addresses = lease.addresses().collect();
        Ok(StreamLock { id: self.locks.keep(stream, lease), addresses })
    }

    /// Ends a lock at the work queued on its stream so far. Waits for nothing: the buffers stay where
    /// they are until the work is complete.
    ///
    /// # Errors
    /// The lock was ended before, or belongs to another manager.
    pub fn unlock(&self, id: LockId) -> Result<(), SpillError> {
        // Its lease ends after the table's lock is free.
        let lease = self.locks.take(id);
        lease.map(LeaseSet::end).ok_or(SpillError::UnknownLock { stream: id.stream })
    }

    /// Ends all locks of a stream, as [`unlock`](SpillManager::unlock) does. Returns their number.
    pub fn unlock_stream(&self, stream: StreamId) -> usize {
        self.locks.take_all(stream).len()
    }

    /// Returns the number of locks of a stream. O(locks of the stream).
    pub fn locks_of(&self, stream: StreamId) -> usize {
        self.locks.len(stream)
    }

    /// Waits for the work queued on `stream`, which may have been destroyed, and ends the locks that
    /// the stream had when the call began. Leases are values: they end when they are dropped.
    ///
    /// # Errors
    /// The work failed, or the stream is unknown or captures a graph. The locks stay.
    pub fn sync_and_unlock(&self, stream: StreamId) -> Result<(), SpillError> {
        // Locks that other threads take meanwhile stay: their work may not be queued yet.
        let locks = self.locks.take_all(stream);
        if let Err(error) = self.synchronize(stream) {
            self.locks.put_back(locks);
            return Err(error);
        }
        drop(locks);
        self.shared.lock().poll()?;
        Ok(())
    }

    pub(super) fn synchronize(&self, stream: StreamId) -> Result<(), SpillError> {
        let work = self.shared.allocator.stream_work(stream);
        match work.ok_or_else(|| SpillError::UnknownStream(stream.to_string()))? {
            StreamWork::Open(raw) => self.shared.driver.synchronize_stream(raw)?,
            StreamWork::Ended(end) => end.synchronize()?,
            StreamWork::Over => {}
        }
        Ok(())
    }
}
