//! Locking and unlocking buffers, by streams.

use vramp_alloc::{Driver, StreamId, StreamWork};

use super::buffer_handle::DeferrableBuffer;
use super::lease_set::LeaseSet;
use super::manager::SpillManager;
use super::spill_error::SpillError;
use super::stream_locks::{LockId, StreamLock};
use crate::planner::Access;

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
        lease.map(LeaseSet::end).ok_or(SpillError::UnknownLock { stream: id.stream() })
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
