//! What owners of deferrable buffers need of an allocator.

use std::sync::Arc;

use vramp_alloc::{Allocator, StreamId};
use vramp_defer::{Tiers, TiersOptions};
use vramp_tiers::config::TiersConfig;

use super::{CallResult, OpenAllocator, StreamName};
use crate::context::Context;
use crate::regions::HostLoan;
use crate::tiers::slot::OpenTiers;

impl OpenAllocator {
    /// Returns the allocator for an owner of buffers. Until it is dropped, [`OpenAllocator::close`] fails.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn keep(self) -> CallResult<Arc<Allocator>> {
        self.with(|context| Ok(Arc::clone(context.shared_allocator())))
    }

    /// Lets the allocator's regions use the host memory of tiers below it, until the loan is dropped. `None`
    /// for a pool that has no regions.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn lend_host_memory(self, tiers: &Tiers) -> CallResult<Option<HostLoan>> {
        self.with(|context| Ok(context.region_table_if_any().map(|regions| regions.lend(tiers))))
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
    use vramp_tiers::SpaceId;
    use vramp_tiers::regions::RegionOptions;

    use crate::process::{ScopeTarget, begin_scope_of_region, end_scope_of_region};

    #[test]
    fn tiers_are_the_same_in_c_and_rust_and_stay_open_while_they_are_held() {
        let allocator = OpenAllocator::open("sim", "limit=64MiB").unwrap();
        let config = TiersConfig::from_toml("[[host]]\nindex = 0\ncapacity = '256MiB'").unwrap();
        assert!(allocator.tiers().unwrap().is_none());
        let opened = allocator.open_tiers(&config, &TiersOptions::default()).unwrap();
        let again = allocator.open_tiers(&config, &TiersOptions::default());
        assert_eq!(again.err().unwrap().status(), VRAMP_ERROR_BUSY);
        let found = allocator.tiers().unwrap().unwrap();
        let buffer = found.tiers().buffer(Bytes::mib(1)).unwrap();
        assert_eq!(opened.tiers().manager().census().buffers, 1);
        drop(opened);
        for refused in [allocator.close_tiers(), allocator.close()] {
            assert_eq!(refused.unwrap_err().status(), VRAMP_ERROR_IN_USE);
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

    #[test]
    fn regions_use_the_host_memory_of_tiers_while_they_are_open() {
        let allocator = OpenAllocator::open("sim", "limit=256MiB").unwrap();
        let options = RegionOptions { read_only: true, ..RegionOptions::default() };
        let tag = ["weights".to_owned()];
        let scope =
            begin_scope_of_region(ScopeTarget::Allocator(allocator), Some(("weights", options)));
        let stream = StreamName::Raw(1);
        // SAFETY: the simulator has no streams of its own that could end.
        let block = unsafe { allocator.malloc(64 << 20, stream) }.unwrap();
        end_scope_of_region(scope.unwrap()).unwrap();

        // The region exists already when the tiers are opened, with all their memory pinned.
        let text =
            "[[host]]\nindex = 0\ncapacity = '128MiB'\nblock = '1MiB'\nblocks_per_pool = 128";
        let config = TiersConfig::from_toml(text).unwrap();
        let opened = allocator.open_tiers(&config, &TiersOptions::default()).unwrap();
        let host = SpaceId::host(0);
        let charged = |tiers: &SharedTiers| {
            let space = tiers.tiers().reservations().space(host).unwrap();
            space.limit() - space.available()
        };
        let pinned = |tiers: &SharedTiers| tiers.tiers().mover().pool().stats().blocks;
        let before = pinned(&opened);
        assert_eq!(before, 128, "pinned ahead");
        allocator.pause_regions(&tag, 0).unwrap();
        assert_eq!(charged(&opened), Bytes::mib(64));
        assert_eq!(pinned(&opened), before, "a pause pins nothing that was pinned ahead");
        allocator.resume_regions(&tag).unwrap();

        // A copy outlives the tiers, and the next one is made without them.
        drop(opened);
        allocator.close_tiers().unwrap();
        allocator.pause_regions(&tag, 0).unwrap();
        allocator.resume_regions(&tag).unwrap();

        // Full tiers refuse a copy, and nothing has changed.
        let text = text.replace("128MiB", "16MiB").replace("128", "16");
        let config = TiersConfig::from_toml(&text).unwrap();
        let opened = allocator.open_tiers(&config, &TiersOptions::default()).unwrap();
        let more =
            begin_scope_of_region(ScopeTarget::Allocator(allocator), Some(("weights", options)));
        // SAFETY: as above.
        let second = unsafe { allocator.malloc(1 << 20, stream) }.unwrap();
        end_scope_of_region(more.unwrap()).unwrap();
        let refused = allocator.pause_regions(&tag, 0).unwrap_err();
        assert!(refused.text.contains("host"), "{}", refused.text);
        assert_eq!(charged(&opened), Bytes::ZERO);
        drop(opened);
        allocator.close_tiers().unwrap();
        allocator.pause_regions(&tag, 0).unwrap();
        allocator.resume_regions(&tag).unwrap();
        for block in [block, second] {
            // SAFETY: as above; nothing uses the block.
            unsafe { allocator.free(block.addr, stream) }.unwrap();
        }
        allocator.close().unwrap();
    }
}
