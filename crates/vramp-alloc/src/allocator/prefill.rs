//! Memory reserved before the first request: by a prefill, or as a backend placed it.

use std::any::Any;

use vramp_core::{Bytes, StreamId};
use vramp_driver::DriverResult;

use super::Allocator;
use crate::allocation::Allocation;
use crate::backend::{Backend, BackendBlock};
use crate::error::{AllocError, CreateError};
use crate::virtual_pool::Refusal;

/// # Memory reserved ahead
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
        let raw = inner.open_stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        inner.check_host()?;
        let prefilled = inner.manager.prefill(len, stream, raw);
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

    /// Returns blocks that a backend placed without a request, such as those of a recording, as
    /// allocations: of each that `placed` returns the stream, the bytes requested and the block. Empty
    /// where no backend of this kind serves the allocator.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn adopt_blocks<B: Backend>(
        &self,
        placed: impl FnOnce(&mut B) -> DriverResult<Vec<(StreamId, Bytes, Option<BackendBlock>)>>,
    ) -> Result<Vec<Option<Allocation>>, AllocError> {
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        self.shared.refresh(inner);
        let backend: Option<&mut dyn Any> = inner.manager.backend_mut().map(|it| it as _);
        let Some(backend) = backend.and_then(|it| it.downcast_mut::<B>()) else {
            return Ok(Vec::new());
        };
        let mut adopted = Vec::new();
        for (stream, requested, block) in placed(backend)? {
            adopted.push(block.map(|block| {
                inner.count_placed(block.len, requested, false);
                self.allocation(block.into(), requested, stream, false, None)
            }));
        }
        Ok(adopted)
    }
}
