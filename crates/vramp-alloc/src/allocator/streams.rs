//! Streams: created or adopted, and shared by the pools of a group.

use vramp_core::StreamId;
use vramp_driver::{DriverError, Stream};

use super::Allocator;
use crate::error::StreamError;
use crate::shared::Inner;

impl Allocator {
    /// Creates a stream on the device. One driver call.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        let stream = self.shared.driver.create_stream()?;
        Ok(self.shared.group.add_stream(stream, true))
    }

    /// Registers a stream that was created elsewhere on the device. No driver call. The allocator
    /// never destroys it; call [`Allocator::destroy_stream`] before its owner destroys it.
    pub fn adopt_stream(&self, stream: Stream) -> StreamId {
        self.shared.group.add_stream(stream, false)
    }

    /// Destroys a stream: no request may be made for it any more. Its free memory serves all other
    /// streams as its work completes, without waiting. Blocks allocated for it may be used and
    /// freed as before.
    ///
    /// Cost: an event record in each pool that shares the stream, a query whether it captures, and
    /// the destruction.
    ///
    /// # Errors
    /// [`StreamError::Unknown`] for a stream of another allocator or one destroyed before, and
    /// [`StreamError::Capturing`] for one that captures a graph. If recording an event fails the
    /// stream is as before.
    pub fn destroy_stream(&self, stream: StreamId) -> Result<(), StreamError> {
        let known = self.shared.group.stream(stream).filter(|known| !known.ended);
        let known = known.ok_or(StreamError::Unknown(stream))?;
        if self.shared.driver.is_capturing(known.raw)? {
            return Err(StreamError::Capturing(stream));
        }
        for member in self.shared.group.members() {
            let mut inner = member.lock()?;
            let Some(raw) = inner.open_stream(stream, &member.group) else { continue };
            inner.manager.end_stream(stream, raw)?;
            inner.ended[stream.index()] = true;
        }
        Ok(self.shared.group.end_stream(stream, &*self.shared.driver)?)
    }

    /// Returns the driver's handle of a stream, to queue work on it. `None` if the stream is
    /// another allocator's or was destroyed.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        self.shared.group.stream(id).filter(|known| !known.ended).map(|known| known.raw)
    }

    /// Returns true if a stream of this allocator captures a graph. While it does, querying or
    /// waiting for events may be refused, and may invalidate the capture. One driver call for each
    /// stream.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn any_captures(&self) -> Result<bool, DriverError> {
        for known in self.shared.group.streams_from(0) {
            if !known.ended && self.shared.driver.is_capturing(known.raw)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn sync_streams(&self, inner: &mut Inner) {
        let unknown = StreamId::new(u32::MAX);
        let _ = inner.any_stream(unknown, &self.shared.group);
    }
}
