//! Memory that is there before the first request: added ahead of demand, or taken from a recording.

use vramp_core::{Bytes, StreamId};
use vramp_model::TorchSegment;

use super::Allocator;
use crate::allocation::Allocation;
use crate::error::{AllocError, CreateError};
use crate::virtual_pool::Refusal;

impl Allocator {
    pub(super) fn prefill_at_start(&self, prefill: Option<Bytes>) -> Result<(), CreateError> {
        let refused = |prefill, reason: &str| {
            Err(CreateError::Prefill { prefill, reason: reason.to_owned() })
        };
        let Some(prefill) = prefill else {
            return refused(Bytes::new(u64::MAX), "the number of pages does not fit any memory");
        };
        if prefill.is_zero() {
            return Ok(());
        }
        let stream = self.create_stream()?;
        match self.prefill(prefill, stream) {
            Ok(()) => Ok(()),
            Err(error) => refused(prefill, &error.to_string()),
        }
    }

    /// Adds `len` bytes ahead of demand, free for `stream`.
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let mut inner = self.shared.lock()?;
        inner.open_stream(stream, &self.shared.group).ok_or(AllocError::UnknownStream(stream))?;
        let prefilled = inner.manager.prefill(len, stream);
        self.note_reserved(&inner);
        drop(inner);
        match prefilled {
            Ok(()) => Ok(()),
            Err(Refusal::Driver(error)) => Err(AllocError::Driver(error)),
            Err(Refusal::Arena(refused)) => Err(AllocError::Arena(Box::new(refused))),
            Err(Refusal::Short(shortage, failed_call)) => {
                let report = self.shared.report(*shortage, failed_call, stream);
                Err(AllocError::OutOfMemory(Box::new(report)))
            }
        }
    }

    /// Lets PyTorch's allocator begin with recorded segments: before the first request, see
    /// [`TorchPool::restore`](crate::TorchPool::restore). One allocation of the driver's for each. Returns the blocks that were
    /// in users' hands, in order; nothing for other presets and impossible segments.
    pub fn restore(
        &self,
        segments: &[TorchSegment],
    ) -> Result<Vec<Option<Allocation>>, AllocError> {
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        self.learn_streams(inner);
        self.shared.refresh(inner);
        let Some(caching) = inner.manager.caching_mut() else { return Ok(Vec::new()) };
        let found = caching.restore(segments)?;
        let blocks = segments.iter().flat_map(|segment| {
            segment.held.iter().map(|&(_, requested)| (segment.stream, requested))
        });
        let mut restored = Vec::new();
        for ((stream, requested), found) in blocks.zip(found) {
            restored.push(found.map(|found| {
                let len = found.len;
                inner.count(self.shared.number, |tally| tally.placed(len, requested, false));
                self.allocation(found, requested, stream, false, None)
            }));
        }
        Ok(restored)
    }
}
