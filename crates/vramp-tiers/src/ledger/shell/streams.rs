//! A pool of streams, each lent to one borrower at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use vramp_alloc::{Allocator, DriverError, StreamId};

use crate::ledger::core::SpaceId;
use crate::sync::{Mutex, lock};
use crate::wait::{Deadline, WaitSlot};

/// What [`StreamPool::acquire`] does when all streams are lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquirePolicy {
    /// Wait for a stream, in order of arrival.
    Block,
    /// Create one more stream.
    Grow,
}

/// Why no stream was acquired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamPoolError {
    /// The deadline passed.
    #[error(
        "all {streams} streams were lent until the deadline: wait longer, or let the pool grow"
    )]
    TimedOut {
        /// Number of streams of the pool.
        streams: usize,
    },
    /// The pool was shut down.
    #[error("the stream pool is shut down")]
    ShutDown,
    /// The pool has no stream: a wait would never end.
    #[error("the stream pool has no stream: create it with at least one, or let it grow")]
    Empty,
    /// The space has no allocator that could create streams.
    #[error("{space} has no tracked allocator: create one for it and keep it, or use a StreamPool")]
    NoAllocator {
        /// The space.
        space: SpaceId,
    },
    /// The driver created no stream.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The stream for a waiter; `None` after a shutdown.
type Completion = Option<StreamId>;

#[derive(Default)]
struct State {
    idle: VecDeque<StreamId>,
    waiters: VecDeque<Arc<WaitSlot<Completion>>>,
    /// Idle and lent streams.
    streams: usize,
    shut_down: bool,
}

struct Shared {
    allocator: Arc<Allocator>,
    state: Mutex<State>,
}

/// Pool of streams of one allocator. Clones are handles of one pool. The streams are destroyed with
/// the last handle and borrower.
#[derive(Clone)]
pub struct StreamPool {
    shared: Arc<Shared>,
}

/// A stream lent to one borrower until this is dropped. Work queued on it may still run then; the
/// next borrower's work is ordered after it.
#[must_use = "the stream goes back to its pool when this is dropped"]
pub struct BorrowedStream {
    shared: Arc<Shared>,
    stream: StreamId,
}

impl StreamPool {
    /// Returns a pool of `streams` streams. One driver call each.
    ///
    /// # Errors
    /// The driver created no stream. Those created before are destroyed.
    pub fn new(allocator: Arc<Allocator>, streams: usize) -> Result<StreamPool, DriverError> {
        let shared = Arc::new(Shared { allocator, state: Mutex::default() });
        for _ in 0..streams {
            let stream = shared.allocator.create_stream()?;
            let mut state = lock(&shared.state);
            state.idle.push_back(stream);
            state.streams += 1;
        }
        Ok(StreamPool { shared })
    }

    /// Returns a pool without streams.
    pub(crate) fn empty(allocator: Arc<Allocator>) -> StreamPool {
        StreamPool { shared: Arc::new(Shared { allocator, state: Mutex::default() }) }
    }

    /// Returns the number of streams, lent ones included.
    pub fn streams(&self) -> usize {
        lock(&self.shared.state).streams
    }

    /// Returns the number of streams that are not lent.
    pub fn idle(&self) -> usize {
        lock(&self.shared.state).idle.len()
    }

    /// Acquires a stream: the one that was returned first, whose work is most likely complete.
    ///
    /// # Errors
    /// The pool was shut down, or the driver created no stream.
    pub fn acquire(&self, how: AcquirePolicy) -> Result<BorrowedStream, StreamPoolError> {
        self.acquire_until(how, Deadline::NEVER)
    }

    /// As [`acquire`](StreamPool::acquire), with a deadline.
    ///
    /// # Errors
    /// As [`acquire`](StreamPool::acquire), or the deadline passed.
    pub fn acquire_until(
        &self,
        how: AcquirePolicy,
        deadline: impl Into<Deadline>,
    ) -> Result<BorrowedStream, StreamPoolError> {
        let slot = {
            let mut state = lock(&self.shared.state);
            if state.shut_down {
                return Err(StreamPoolError::ShutDown);
            }
            // A returned stream goes to the first waiter, so an idle one means that none waits.
            if let Some(stream) = state.idle.pop_front() {
                return Ok(self.lend(stream));
            }
            if how == AcquirePolicy::Grow {
                drop(state);
                return self.grow();
            }
            if state.streams == 0 {
                return Err(StreamPoolError::Empty);
            }
            let slot = Arc::new(WaitSlot::default());
            state.waiters.push_back(Arc::clone(&slot));
            slot
        };
        let completion = slot.wait(deadline.into().instant()).or_else(|| self.leave_queue(&slot));
        match completion {
            Some(Some(stream)) => Ok(self.lend(stream)),
            Some(None) => Err(StreamPoolError::ShutDown),
            None => Err(StreamPoolError::TimedOut { streams: self.streams() }),
        }
    }

    fn grow(&self) -> Result<BorrowedStream, StreamPoolError> {
        let stream = self.shared.allocator.create_stream()?;
        lock(&self.shared.state).streams += 1;
        Ok(self.lend(stream))
    }

    fn lend(&self, stream: StreamId) -> BorrowedStream {
        BorrowedStream { shared: Arc::clone(&self.shared), stream }
    }

    /// Ends a wait after its deadline. Takes a stream that was handed over at the last moment.
    fn leave_queue(&self, slot: &Arc<WaitSlot<Completion>>) -> Option<Completion> {
        let mut state = lock(&self.shared.state);
        let before = state.waiters.len();
        state.waiters.retain(|other| !Arc::ptr_eq(other, slot));
        let left = state.waiters.len() < before;
        drop(state);
        if left { None } else { slot.wait(None) }
    }

    /// Ends every wait, and lends no stream from now on. Lent streams stay with their borrowers.
    pub fn shutdown(&self) {
        let waiters = {
            let mut state = lock(&self.shared.state);
            state.shut_down = true;
            std::mem::take(&mut state.waiters)
        };
        waiters.iter().for_each(|slot| slot.complete(None));
    }
}

impl BorrowedStream {
    /// Returns the id of the stream.
    pub fn id(&self) -> StreamId {
        self.stream
    }
}

impl Drop for BorrowedStream {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        match state.waiters.pop_front() {
            Some(slot) => {
                drop(state);
                slot.complete(Some(self.stream));
            }
            None => state.idle.push_back(self.stream),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let streams = std::mem::take(&mut lock(&self.state).idle);
        for stream in streams {
            // A drop cannot report an error. The allocator destroys remaining streams.
            let _ = self.allocator.destroy_stream(stream);
        }
    }
}

impl std::fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = lock(&self.shared.state);
        write!(f, "{} of {} streams idle", state.idle.len(), state.streams)
    }
}

impl std::fmt::Debug for BorrowedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, borrowed", self.stream)
    }
}
