//! Memory reserved before the first request: by a prefill, or as a recording shows it.

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
            return refused(Bytes::new(u64::MAX), "so many pages fit no memory");
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

    /// Reserves `len` bytes of physical memory ahead of demand, free for `stream`.
    ///
    /// # Errors
    /// As of [`Allocator::malloc`].
    pub fn prefill(&self, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let mut inner = self.shared.lock_for_memory()?;
        inner.open_stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        inner.check_host()?;
        let prefilled = inner.manager.prefill(len, stream);
        drop(inner);
        match prefilled {
            Ok(()) => Ok(()),
            Err(Refusal::Driver(error)) => Err(AllocError::Driver(error)),
            Err(Refusal::Arena(refused)) => Err(AllocError::Arena(Box::new(refused))),
            Err(Refusal::Host(short)) => Err(AllocError::HostMemory(short)),
            Err(Refusal::Short(shortage, failed_call)) => {
                let report = self.shared.report(*shortage, failed_call, stream);
                Err(AllocError::OutOfMemory(Box::new(report)))
            }
        }
    }

    /// Gives PyTorch's allocator recorded segments, before the first request: see
    /// [`TorchPool::restore`](crate::torch::TorchPool::restore). Returns the blocks that were
    /// allocated, in order; none for other presets and for impossible segments. One allocation of
    /// the driver for each segment.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn restore(
        &self,
        segments: &[TorchSegment],
    ) -> Result<Vec<Option<Allocation>>, AllocError> {
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
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
                inner.count_placed(len, requested, false);
                self.allocation(found, requested, stream, false, None)
            }));
        }
        Ok(restored)
    }
}
