//! Locks: leases without a handle, which the manager keeps by stream until they are unlocked.
//!
//! For callers that lock and unlock in different places, such as an interface to another language. A
//! lock belongs to no thread. Growth: O(log n) in the locks for each call.
//!
//! The table belongs to the manager's handles and not to its buffers: a lease keeps its buffers, so a
//! table that buffers kept would never end. Dropping the last handle of the manager unlocks all.

use std::collections::BTreeMap;

use vramp_alloc::StreamId;
use vramp_core::AddrRange;

use super::lease_set::LeaseSet;
use crate::sync::{Mutex, lock};

/// A lock that the manager keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamLock {
    /// Id of the lock, for [`SpillManager::unlock`](super::SpillManager::unlock). Never reused.
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
    pub fn keep(&self, stream: StreamId, lease: LeaseSet) -> LockId {
        let mut table = lock(&self.table);
        table.last += 1;
        let id = LockId { stream, number: table.last };
        table.locks.insert(id, lease);
        id
    }

    pub fn take(&self, id: LockId) -> Option<LeaseSet> {
        lock(&self.table).locks.remove(&id)
    }

    pub fn take_all(&self, stream: StreamId) -> BTreeMap<LockId, LeaseSet> {
        let mut table = lock(&self.table);
        let mut taken = table.locks.split_off(&LockId { stream, number: 0 });
        let mut later = taken.split_off(&LockId { stream, number: u64::MAX });
        table.locks.append(&mut later);
        taken
    }

    pub fn put_back(&self, mut locks: BTreeMap<LockId, LeaseSet>) {
        lock(&self.table).locks.append(&mut locks);
    }

    pub fn len(&self, stream: StreamId) -> usize {
        let all = LockId { stream, number: 0 }..=LockId { stream, number: u64::MAX };
        lock(&self.table).locks.range(all).count()
    }
}
