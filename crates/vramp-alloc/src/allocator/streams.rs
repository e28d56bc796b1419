//! The streams that work is queued on: made here or elsewhere, shared by the pools of a group.

use vramp_core::StreamId;
use vramp_driver::{DriverError, Stream};

use super::Allocator;
use crate::error::StreamError;
use crate::shared::Inner;

impl Allocator {
    /// A new stream on the device. One driver call.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        let stream = self.shared.driver.create_stream()?;
        Ok(self.shared.group.add_stream(stream, true))
    }

    /// Makes a stream of the device known that was made elsewhere. No driver call. It is not
    /// destroyed here; tell [`Allocator::destroy_stream`] before its owner does so.
    pub fn adopt_stream(&self, stream: Stream) -> StreamId {
        self.shared.group.add_stream(stream, false)
    }

    /// Ends a stream: no request may be made for it any more. Its free memory goes to all others as
    /// its work completes, without waiting. Blocks made for it may be used and freed as before.
    /// An event record in each pool that shares the stream, a call to ask whether it captures, and
    /// one to destroy it.
    ///
    /// # Errors
    /// [`StreamError::Unknown`] for a stream that is not known here, or was ended before, and
    /// [`StreamError::Capturing`] for one that captures a graph. Where recording an event fails the stream is as before.
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

    /// The driver's own name of a stream, to queue work on it. `None` if it is unknown here or
    /// ended.
    pub fn stream(&self, id: StreamId) -> Option<Stream> {
        self.shared.group.stream(id).filter(|known| !known.ended).map(|known| known.raw)
    }

    /// True if a stream that is known here captures a graph: as long as it does, asking or waiting
    /// whether work is over may be refused, and spoil the capture. One driver call for each stream.
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

    pub(super) fn learn_streams(&self, inner: &mut Inner) {
        let unknown = StreamId::new(u32::MAX);
        let _ = inner.any_stream(unknown, &self.shared.group);
    }
}
