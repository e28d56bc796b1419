//! What owners of deferrable buffers need of an allocator.

use std::sync::Arc;

use vramp_alloc::{Allocator, StreamId};
use vramp_defer::{Tiers, TiersOptions};
use vramp_tiers::config::TiersConfig;

use super::{CallResult, OpenAllocator, StreamName};
use crate::context::Context;
use crate::tiers::slot::OpenTiers;

impl OpenAllocator {
    /// Returns the allocator for an owner of buffers. Until it is dropped, [`OpenAllocator::close`] fails.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn keep(self) -> CallResult<Arc<Allocator>> {
        self.with(|context| Ok(Arc::clone(context.shared_allocator())))
    }

    /// Returns true for a stream that the allocator knows: it was used or created, and not forgotten.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn named_before(self, stream: StreamName) -> CallResult<bool> {
        self.with(|context| {
            Ok(match stream {
                StreamName::Raw(raw) => context.adopted_before(raw).is_some(),
                StreamName::Created(handle) => context.stream(handle).is_ok(),
            })
        })
    }

    /// Returns the allocator's id of a stream.
    ///
    /// # Errors
    /// The stream is unknown, or the allocator is closed.
    ///
    /// # Safety
    /// As of [`OpenAllocator::malloc`].
    pub unsafe fn stream_id(self, stream: StreamName) -> CallResult<StreamId> {
        // SAFETY: this function's contract is the same.
        self.with(|context| unsafe { context.named(stream) })
    }
}

/// The tiers of an allocator, which C programs use by its handle too. While it exists they are not
/// closed, so keep it as long as a buffer or a reservation of them.
#[derive(Clone)]
pub struct SharedTiers {
    tiers: Arc<OpenTiers>,
    _held: Arc<()>,
}

impl SharedTiers {
    fn of(tiers: Arc<OpenTiers>) -> SharedTiers {
        SharedTiers { _held: tiers.hold(), tiers }
    }

    /// Returns the tiers.
    pub fn tiers(&self) -> &Tiers {
        self.tiers.tiers()
    }
}

impl OpenAllocator {
    /// Opens tiers below the allocator, for the caller and for C programs.
    ///
    /// # Errors
    /// They are open already, or as of [`TiersOptions::on`].
    pub fn open_tiers(
        self,
        config: &TiersConfig,
        options: &TiersOptions,
    ) -> CallResult<SharedTiers> {
        self.with(|context| {
            context.set_tiers(|| OpenTiers::open(context, config, options))?;
            Ok(SharedTiers::of(context.open_tiers()?))
        })
    }

    /// Returns the tiers of the allocator, by whichever interface they were opened; `None` if they are
    /// not open.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn tiers(self) -> CallResult<Option<SharedTiers>> {
        self.with(|context| Ok(context.tiers_if_open().map(SharedTiers::of)))
    }

    /// Closes the tiers, as `vramp_tiers_close` does.
    ///
    /// # Errors
    /// They are not open, a [`SharedTiers`] exists, or a stream captures a graph.
    pub fn close_tiers(self) -> CallResult<()> {
        self.with(Context::close_tiers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::vramp_status_t::*;
    use vramp_alloc::Bytes;

    #[test]
    fn tiers_are_the_same_in_c_and_rust_and_stay_open_while_they_are_held() {
        let allocator = OpenAllocator::open("sim", "limit=64MiB").unwrap();
        let config = TiersConfig::from_toml("[[host]]\nindex = 0\ncapacity = '256MiB'").unwrap();
        assert!(allocator.tiers().unwrap().is_none());
        let opened = allocator.open_tiers(&config, &TiersOptions::default()).unwrap();
        let again = allocator.open_tiers(&config, &TiersOptions::default());
        assert_eq!(again.err().unwrap().status, VRAMP_ERROR_BUSY);
        let found = allocator.tiers().unwrap().unwrap();
        let buffer = found.tiers().buffer(Bytes::mib(1)).unwrap();
        assert_eq!(opened.tiers().manager().census().buffers, 1);
        drop(opened);
        for refused in [allocator.close_tiers(), allocator.close()] {
            assert_eq!(refused.unwrap_err().status, VRAMP_ERROR_IN_USE);
        }
        // The refused close changed nothing: C uses the tiers.
        let mut made = crate::tiers::abi::vramp_buffer_t::default();
        let handle = allocator.handle();
        // SAFETY: the result outlives the call.
        let status = unsafe { crate::tiers::buffers::vramp_buffer_create(handle, 4096, &mut made) };
        assert_eq!((status, found.tiers().manager().census().buffers), (VRAMP_OK, 2));
        drop((buffer, found));
        allocator.close_tiers().unwrap();
        allocator.close().unwrap();
    }
}
