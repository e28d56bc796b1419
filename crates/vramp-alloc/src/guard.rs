//! Blocks that free themselves.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use vramp_core::{Bytes, StreamId};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::error::{AllocError, FreeError};

/// A block that is freed on its stream when it is dropped, in stream order and without waiting.
/// [`Allocator::malloc_guard`] makes it.
///
/// It keeps its allocator open, and may be moved to other threads. Work on the memory that is queued on
/// another stream is recorded as for any block, with [`Allocator::record_use`], or the block is moved there
/// with [`set_stream`](AllocationGuard::set_stream). A drop costs what [`Allocator::free`] does, and has no
/// result: [`free`](AllocationGuard::free) reports a driver call that failed.
///
/// ```
/// use std::sync::Arc;
/// use vramp_alloc::{Allocator, Bytes, Config};
///
/// let allocator = Arc::new(Allocator::new(vramp_alloc::open("sim:h200")?, Config::default())?);
/// let stream = allocator.create_stream()?;
/// let block = allocator.malloc_guard(Bytes::mib(64), stream)?;
/// assert_eq!(allocator.live(), block.len());
/// drop(block);
/// assert_eq!(allocator.live(), Bytes::ZERO);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AllocationGuard {
    allocator: Arc<Allocator>,
    /// `None` once the block is given away.
    block: Option<Allocation>,
    stream: StreamId,
}

/// # Allocating blocks that free themselves
impl Allocator {
    /// Allocates as [`Allocator::malloc`] does. The block frees itself on `stream` when it is dropped.
    ///
    /// # Errors
    /// As of [`Allocator::malloc`].
    pub fn malloc_guard(
        self: &Arc<Allocator>,
        size: Bytes,
        stream: StreamId,
    ) -> Result<AllocationGuard, AllocError> {
        let block = Some(self.malloc(size, stream)?);
        Ok(AllocationGuard { allocator: Arc::clone(self), block, stream })
    }
}

impl AllocationGuard {
    /// Returns the stream that the block is freed on.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Frees the block on another stream in the end: one whose work on it comes last.
    pub fn set_stream(&mut self, stream: StreamId) {
        self.stream = stream;
    }

    /// Returns the allocator of the block.
    pub fn allocator(&self) -> &Arc<Allocator> {
        &self.allocator
    }

    /// Returns the block, which no drop frees any more: [`Allocator::free`] does.
    #[must_use = "the block leaks until the allocator is closed"]
    pub fn leak(mut self) -> Allocation {
        self.block.take().expect("a guard has its block until it ends")
    }

    /// Frees the block, and reports what a drop would not.
    ///
    /// # Errors
    /// As of [`Allocator::free`].
    pub fn free(mut self) -> Result<(), FreeError> {
        let block = self.block.take().expect("a guard has its block until it ends");
        self.allocator.free(block, self.stream)
    }
}

impl Deref for AllocationGuard {
    type Target = Allocation;

    fn deref(&self) -> &Allocation {
        self.block.as_ref().expect("a guard has its block until it ends")
    }
}

impl Drop for AllocationGuard {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            // A drop reports no error. After a failed driver call the memory is free all the same.
            drop(self.allocator.free(block, self.stream));
        }
    }
}

impl fmt::Debug for AllocationGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocationGuard")
            .field("block", &self.block)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn allocator() -> (Arc<Allocator>, StreamId) {
        let device = crate::open("sim:h200").expect("it is simulated");
        let allocator = Arc::new(Allocator::new(device, Config::default()).expect("defaults work"));
        let stream = allocator.create_stream().expect("the card has streams");
        (allocator, stream)
    }

    #[test]
    fn a_guard_frees_once_also_while_a_panic_unwinds_and_after_a_move_to_another_thread() {
        let (allocator, stream) = allocator();
        let block = |size| allocator.malloc_guard(Bytes::mib(size), stream).expect("there is room");
        let (kept, moved) = (block(2), block(4));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = block(8);
            panic!("planted");
        }));
        assert!(panicked.is_err());
        assert_eq!(allocator.live(), kept.len() + moved.len());
        std::thread::spawn(move || drop(moved)).join().expect("a drop does not panic");
        assert_eq!(allocator.live(), kept.len());
        kept.free().expect("the stream is there");
        assert_eq!(allocator.live(), Bytes::ZERO);
        allocator.audit().expect("nothing is lost");
    }

    #[test]
    fn a_leaked_block_is_freed_by_hand_on_any_stream_and_a_guard_keeps_its_allocator() {
        let (allocator, stream) = allocator();
        let other = allocator.create_stream().expect("the card has streams");
        let mut block = allocator.malloc_guard(Bytes::mib(2), stream).expect("there is room");
        block.set_stream(other);
        assert_eq!((block.stream(), Arc::strong_count(&allocator)), (other, 2));
        let leaked = block.leak();
        assert_eq!((allocator.live(), Arc::strong_count(&allocator)), (leaked.len(), 1));
        allocator.free(leaked, other).expect("it is live");
        assert_eq!(allocator.live(), Bytes::ZERO);
    }

    #[test]
    fn a_guard_outlives_its_stream() {
        let (allocator, stream) = allocator();
        let other = allocator.create_stream().expect("the card has streams");
        let mut blocks =
            [0, 1].map(|_| allocator.malloc_guard(Bytes::mib(2), stream).expect("there is room"));
        blocks.iter_mut().for_each(|block| block.set_stream(other));
        allocator.destroy_stream(other).expect("it is idle");
        let [dropped, freed] = blocks;
        drop(dropped);
        freed.free().expect("frees accept a stream that ended");
        assert_eq!(allocator.live(), Bytes::ZERO);
        allocator.audit().expect("nothing is lost");
    }
}
