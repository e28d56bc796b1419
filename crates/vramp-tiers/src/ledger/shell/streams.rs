//! Streams to borrow, each by one borrower at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use vramp_alloc::{Allocator, DriverError, StreamId};

use crate::ledger::shell::wait::Deadline;
use crate::ledger::shell::wait::WaitSlot;
use crate::sync::{Mutex, lock};

/// What to do when all streams are lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquirePolicy {
    /// Wait for one, behind those who wait already.
    Block,
    /// Make one more.
    Grow,
}

/// Why no stream was lent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamPoolError {
    /// The deadline passed.
    #[error(
        "no stream came back by the deadline, all {streams} are lent: wait longer, or let the pool grow"
    )]
    TimedOut {
        /// How many the pool has.
        streams: usize,
    },
    /// The pool was shut down.
    #[error("the pool of streams is shut down: nobody may wait any more")]
    ShutDown,
    /// A pool without streams, in which everybody would wait for ever.
    #[error("a pool of streams that does not grow needs at least one: ask for some")]
    Empty,
    /// The stream could not be made.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

type Completion = Option<StreamId>;

#[derive(Default)]
struct State {
    idle: VecDeque<StreamId>,
    waiters: VecDeque<Arc<WaitSlot<Completion>>>,
    /// Idle and lent ones.
    streams: usize,
    shut_down: bool,
}

struct Shared {
    allocator: Arc<Allocator>,
    state: Mutex<State>,
}

/// Streams of one allocator. Clones are the same pool. The streams end with the last of the pool
/// and its borrowers.
#[derive(Clone)]
pub struct StreamPool {
    shared: Arc<Shared>,
}

/// A stream that nobody else has until this is dropped. Work queued on it may then still run; the
/// next borrower's comes behind it.
#[must_use = "the stream goes back to its pool when this is dropped"]
pub struct BorrowedStream {
    shared: Arc<Shared>,
    stream: StreamId,
}

impl StreamPool {
    /// A pool of so many streams. One driver call each.
    ///
    /// # Errors
    /// A stream could not be made; those made before are ended.
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

    /// How many streams there are, lent ones included.
    pub fn streams(&self) -> usize {
        lock(&self.shared.state).streams
    }

    /// How many are not lent.
    pub fn idle(&self) -> usize {
        lock(&self.shared.state).idle.len()
    }

    /// Lends a stream: the one that came back first, so that its work is most likely over.
    ///
    /// # Errors
    /// The pool was shut down, or the driver made no stream.
    pub fn acquire(&self, how: AcquirePolicy) -> Result<BorrowedStream, StreamPoolError> {
        self.acquire_until(how, Deadline::NEVER)
    }

    /// The same, waiting no longer than this.
    ///
    /// # Errors
    /// As [`acquire`](StreamPool::acquire), or the deadline passed.
    pub fn acquire_until(
        &self,
        how: AcquirePolicy,
        deadline: impl Into<Deadline>,
    ) -> Result<BorrowedStream, StreamPoolError> {
        let seat = {
            let mut state = lock(&self.shared.state);
            if state.shut_down {
                return Err(StreamPoolError::ShutDown);
            }
            // Whoever came before is served before; streams come back into waiting hands.
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
            let seat = Arc::new(WaitSlot::default());
            state.waiters.push_back(Arc::clone(&seat));
            seat
        };
        let gift = seat.wait(deadline.into().instant()).or_else(|| self.leave(&seat));
        match gift {
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

    /// Gets up after the deadline. What was given at the last moment is taken along.
    fn leave(&self, seat: &Arc<WaitSlot<Completion>>) -> Option<Completion> {
        let mut state = lock(&self.shared.state);
        let before = state.waiters.len();
        state.waiters.retain(|other| !Arc::ptr_eq(other, seat));
        let left = state.waiters.len() < before;
        drop(state);
        if left { None } else { seat.wait(None) }
    }

    /// Ends every wait, and lends nothing from now on. What is lent stays its borrower's.
    pub fn shutdown(&self) {
        let waiters = {
            let mut state = lock(&self.shared.state);
            state.shut_down = true;
            std::mem::take(&mut state.waiters)
        };
        waiters.iter().for_each(|seat| seat.give(None));
    }
}

impl BorrowedStream {
    /// The stream.
    pub fn id(&self) -> StreamId {
        self.stream
    }
}

impl Drop for BorrowedStream {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        match state.waiters.pop_front() {
            Some(seat) => {
                drop(state);
                seat.give(Some(self.stream));
            }
            None => state.idle.push_back(self.stream),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let streams = std::mem::take(&mut lock(&self.state).idle);
        for stream in streams {
            // Nobody is left to tell; the allocator ends what stays open.
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
