//! Streams: created or adopted, and shared by the pools of a group.

use std::sync::Arc;

use vramp_core::StreamId;
use vramp_driver::{Call, DriverError, Stream};

use super::Allocator;
use crate::error::{StreamError, Unusable};
use crate::shared::{Inner, Shared};
use crate::stream_end::{StreamEnd, StreamWork};
use crate::thread_streams;

/// Code of the driver for want of memory.
const OUT_OF_MEMORY: i32 = 2;

/// # Streams
impl Allocator {
    /// Creates a stream on the device. One driver call.
    ///
    /// # Errors
    /// The driver's, and [`ErrorKind::OutOfMemory`](vramp_driver::ErrorKind::OutOfMemory) if the host
    /// has no memory for the allocator's own records.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        Unusable::check_fork_before(Call::CreateStream)?;
        vramp_host::check_host().map_err(|short| {
            DriverError::from_code(Call::CreateStream, OUT_OF_MEMORY, short.to_string())
        })?;
        let stream = self.shared.driver.create_stream()?;
        Ok(self.shared.group.add_stream(stream, true))
    }

    /// Registers a stream that was created elsewhere on the device. No driver call. The allocator
    /// never destroys it; call [`Allocator::destroy_stream`] before its owner destroys it. Register
    /// it once: each call returns another id, whose work is observed on the same stream.
    pub fn adopt_stream(&self, stream: Stream) -> StreamId {
        self.shared.group.add_stream(stream, false)
    }

    /// Returns the stream that stands for the calling thread's per-thread default stream, which CUDA names
    /// `cudaStreamPerThread`. It is the same at each call of a thread, in all pools of the group, and ends
    /// with the thread. Two driver calls at the first one.
    ///
    /// Requests for it are the thread's own. Another thread may free its blocks, also with this id, which
    /// means that all work on them was queued on that stream. What is free there serves other threads once
    /// the thread itself made a request or a free with the pool's lock after it; or where memory runs out,
    /// which is waited for.
    ///
    /// # Errors
    /// The driver's, and [`ErrorKind::NotSupported`](vramp_driver::ErrorKind::NotSupported) on a thread
    /// that is ending.
    pub fn thread_stream(&self) -> Result<StreamId, DriverError> {
        Unusable::check_fork_before(Call::CreateStream)?;
        vramp_host::check_host().map_err(|short| {
            DriverError::from_code(Call::CreateStream, OUT_OF_MEMORY, short.to_string())
        })?;
        thread_streams::of(&self.shared)
    }

    /// Returns the open streams of [`Allocator::thread_stream`], of all threads. O(streams).
    pub fn thread_streams(&self) -> Vec<StreamId> {
        self.shared.group.thread_streams(&*self.shared.driver)
    }

    /// Destroys a stream: no request may be made for it any more. Its free memory serves all other
    /// streams as its work completes, without waiting. Blocks allocated for it may be used and
    /// freed as before.
    ///
    /// Queued work runs on. The event recorded here stands for it from now on: no memory that the
    /// work may use is reused, unmapped or copied before that event is reached.
    ///
    /// Cost: a query whether the stream captures, an event, and the destruction; a query for each
    /// earlier end about once.
    ///
    /// # Errors
    /// [`StreamError::Unknown`] for a stream of another allocator or one destroyed before, and
    /// [`StreamError::Capturing`] for one that captures a graph. If recording the event fails the
    /// stream is as before. If only the driver's destruction fails the stream has ended for the
    /// allocator; calling again retries the destruction, and closing does too.
    pub fn destroy_stream(&self, stream: StreamId) -> Result<(), StreamError> {
        self.shared.destroy_stream(stream)
    }

    /// Returns the driver's handle of a stream, to queue work on it. `None` if the stream is
    /// another allocator's or was destroyed.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        self.shared.group.open_stream(id)
    }

    /// Returns where the work queued on a stream can be observed, also of one that was destroyed:
    /// for what has to outlive the stream, such as copies after its work. `None` if the stream is
    /// another allocator's. No driver call.
    pub fn stream_work(&self, id: StreamId) -> Option<StreamWork> {
        self.shared.group.work_of(id)
    }

    /// Returns true if a stream of this allocator captures a graph. While it does, work queued on the
    /// stream does not run and cannot be waited for. One driver call for each stream.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn any_captures(&self) -> Result<bool, DriverError> {
        Unusable::check_fork_before(Call::IsCapturing)?;
        Ok(!self.shared.capturing_streams()?.is_empty())
    }
}

impl Shared {
    /// Ends a stream for all pools of the group: see [`Allocator::destroy_stream`].
    pub(crate) fn destroy_stream(&self, stream: StreamId) -> Result<(), StreamError> {
        let (group, driver) = (&self.group, &self.driver);
        let Some((guard, raw)) = group.begin_end(stream) else {
            return match group.destroy_ended(stream, &**driver)? {
                true => Ok(()),
                false => Err(StreamError::Unknown(stream)),
            };
        };
        // A pool that a panic left unusable refuses all requests anyway.
        let _ = self.for_members(|inner| inner.begin_end(stream));
        let end = match self.record_end(stream, raw) {
            Ok(end) => end,
            Err(error) => {
                // The group first: a pool that is created now learns that the stream is open.
                group.cancel_end(stream);
                let _ = self.for_members(|inner| inner.cancel_end(stream));
                return Err(error);
            }
        };
        let sweep = group.finish_end(stream, &end);
        let told = self.for_members(|inner| inner.end_stream(stream, &end));
        drop(guard);
        if sweep {
            group.sweep_ends();
        }
        group.destroy_ended(stream, &**driver)?;
        Ok(told?)
    }

    /// Calls `change` for every pool of the group, with its lock held. Goes on after one that a panic
    /// left unusable, and returns that error.
    fn for_members(&self, mut change: impl FnMut(&mut Inner)) -> Result<(), Unusable> {
        let mut first = Ok(());
        for member in self.group.members() {
            match member.lock_open() {
                Ok(Some(mut inner)) => change(&mut inner),
                Ok(None) => {}
                Err(error) => first = first.and(Err(error)),
            }
        }
        first
    }

    /// Records a stream's last event.
    fn record_end(&self, stream: StreamId, raw: Stream) -> Result<Arc<StreamEnd>, StreamError> {
        let end = StreamEnd::record(&self.driver, raw)?;
        end.ok_or(StreamError::Capturing(stream))
    }
}
