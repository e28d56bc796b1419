//! Scopes of threads in regions, and the disk of their backups.

use std::path::Path;

use vramp_alloc::Bytes;
use vramp_tiers::regions::RegionOptions;

use super::{CallResult, OpenAllocator};
use crate::region_disk;
use crate::regions::{self, Tagged, Target};
use crate::session::Session;
use crate::status::{catch_failure, check_fork};

/// Allocators that a scope is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScopeTarget {
    /// Those that all interfaces share, of all devices.
    AllDevices,
    /// The shared one of a device.
    Device(u16),
    /// This one.
    Allocator(OpenAllocator),
}

/// Starts a scope: requests of the calling thread go to the region with a tag and options, or with `None`
/// to the pool, until [`end_scope_of_region`]. Scopes nest, and the innermost one counts. Returns its
/// number. Creates the region on the allocators that are open.
///
/// # Errors
/// The allocator is closed; the region exists with other options, or cannot be created.
pub fn begin_scope_of_region(
    target: ScopeTarget,
    region: Option<(&str, RegionOptions)>,
) -> CallResult<u64> {
    let tagged = |(tag, options): (&str, _)| Tagged { tag: tag.to_owned(), options };
    let tagged = region.map(tagged);
    let make = |session: &Session| match &tagged {
        Some(tagged) => session.region(tagged).map(drop),
        None => Ok(()),
    };
    let target = match target {
        ScopeTarget::AllDevices => {
            for (_, allocator) in OpenAllocator::all_opened()? {
                allocator.with(make)?;
            }
            Target::Shared
        }
        ScopeTarget::Device(device) => {
            if let Some(allocator) = OpenAllocator::opened(u32::from(device))? {
                allocator.with(make)?;
            }
            Target::Device(device)
        }
        ScopeTarget::Allocator(allocator) => allocator.with(|session| {
            make(session)?;
            Ok(match session.device_number() {
                Some(device) => Target::Device(device),
                None => Target::Allocator(session.allocator().number()),
            })
        })?,
    };
    regions::begin(target, tagged)
}

/// Ends a scope of the calling thread.
///
/// # Errors
/// The scope ended before, or began on another thread.
pub fn end_scope_of_region(scope: u64) -> CallResult<()> {
    catch_failure(|| regions::end(Some(scope)))
}

/// Opens a store in a directory, of at most `limit` bytes or of the free space there. Backups of regions on
/// the disk go there from now on, except below tiers that have a disk.
///
/// # Errors
/// The directory cannot be used, or the process is a forked child.
pub fn set_region_disk(directory: &Path, limit: Option<Bytes>) -> CallResult<()> {
    catch_failure(|| {
        check_fork()?;
        region_disk::choose(directory, limit)
    })
}

/// Names the directory for backups on the disk where none was chosen. A store is opened there when the first
/// one is needed.
///
/// # Errors
/// The process is a forked child.
pub fn set_default_region_disk(directory: &Path) -> CallResult<()> {
    catch_failure(|| {
        check_fork()?;
        region_disk::set_default(directory);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use vramp_core::DeviceAddr;
    use vramp_defer::{Tiers, TiersOptions};
    use vramp_tiers::SpaceId;
    use vramp_tiers::config::TiersConfig;
    use vramp_tiers::regions::{Backup, PauseOptions, RegionStatus, Regions};

    use super::*;
    use crate::abi::vramp_status_t::*;
    use crate::process::StreamName;
    use crate::process::calls::DEFAULT;
    use crate::regions::{HostLoan, PinnedMemory};

    fn malloc(allocator: OpenAllocator, size: u64) -> CallResult<u64> {
        allocator.malloc(size, DEFAULT).map(|block| block.addr)
    }

    fn keep() -> PauseOptions {
        PauseOptions::default()
    }

    fn status(allocator: OpenAllocator) -> Vec<RegionStatus> {
        let status = |session: &Session| Ok(session.regions_if_any().map(|all| all.status()));
        allocator.with(status).unwrap().unwrap_or_default()
    }

    fn host_memory(allocator: OpenAllocator) -> PinnedMemory {
        allocator.with(|session| Ok(session.host_memory())).unwrap()
    }

    fn read_backup(allocator: OpenAllocator, addr: u64, bytes: &mut [u8]) -> CallResult<()> {
        let read = |regions: &Regions| regions.read_backup(DeviceAddr::new(addr), bytes);
        allocator.with(|session| session.with_backups(read))
    }

    #[test]
    fn a_block_of_a_region_is_freed_and_used_outside_of_it_and_while_it_sleeps() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        let options = RegionOptions::default();
        let target = ScopeTarget::Allocator(allocator);
        let scope = begin_scope_of_region(target, Some(("weights", options))).unwrap();
        let blocks = [512, 3 << 20].map(|size| malloc(allocator, size).unwrap());
        let refused = begin_scope_of_region(
            target,
            Some(("weights", RegionOptions { read_only: true, ..options })),
        );
        assert_eq!(refused.unwrap_err().status(), VRAMP_ERROR_OPTION);
        end_scope_of_region(scope).unwrap();
        assert_eq!(end_scope_of_region(scope).unwrap_err().status(), VRAMP_ERROR_REGION);
        assert_eq!(allocator.stats().live.count(), 512 + (3 << 20));
        for addr in blocks {
            let other = allocator.id(StreamName::Raw(8));
            allocator.with(|session| session.record_use(addr, other)).unwrap();
        }
        allocator.pause(&["weights".to_owned()], keep()).unwrap();
        assert_eq!(allocator.stats().reserved.count(), 0);
        for addr in blocks {
            allocator.free(addr, DEFAULT).unwrap();
        }
        let outside = malloc(allocator, 512).unwrap();
        let scope = begin_scope_of_region(target, Some(("weights", options))).unwrap();
        let error = malloc(allocator, 512).unwrap_err();
        assert_eq!(
            (error.status(), error.region.as_deref()),
            (VRAMP_ERROR_REGION, Some("weights"))
        );
        end_scope_of_region(scope).unwrap();
        allocator.free(outside, DEFAULT).unwrap();
        allocator.resume(&["weights".to_owned()]).unwrap();
        allocator.with(Session::audit).unwrap();
        assert_eq!(allocator.stats().live.count(), 0);
        allocator.close().unwrap();
    }

    #[test]
    fn a_thousand_tags_that_were_removed_leave_no_entry() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        let target = ScopeTarget::Allocator(allocator);
        let count = || allocator.with(|session| Ok(session.all_regions().len())).unwrap();
        for job in 0..1000 {
            let tag = format!("job{job}");
            let region = Some((tag.as_str(), RegionOptions::default()));
            let scope = begin_scope_of_region(target, region).unwrap();
            let addr = malloc(allocator, 3 << 20).unwrap();
            end_scope_of_region(scope).unwrap();
            let refused = allocator.with(|session| session.remove_region(&tag)).unwrap_err();
            assert_eq!(refused.status(), VRAMP_ERROR_REGION, "{refused:?}");
            assert_eq!(refused.region.as_deref(), Some(tag.as_str()));
            allocator.free(addr, DEFAULT).unwrap();
            assert_eq!(count(), 1);
            allocator.with(|session| session.remove_region(&tag)).unwrap();
            assert_eq!(count(), 0);
            assert!(status(allocator).is_empty());
        }
        assert!(status(allocator).is_empty());
        assert_eq!(allocator.stats().reserved.count(), 0);
        allocator.with(Session::audit).unwrap();
        allocator.close().unwrap();
    }

    /// Runs a job in a region: pauses it, resumes it and frees its block.
    fn job(allocator: OpenAllocator, tag: &str) {
        let region = Some((tag, RegionOptions::default()));
        let scope = begin_scope_of_region(ScopeTarget::Allocator(allocator), region).unwrap();
        let addr = malloc(allocator, 3 << 20).unwrap();
        end_scope_of_region(scope).unwrap();
        allocator.pause(&[tag.to_owned()], keep()).unwrap();
        let asleep = host_memory(allocator);
        assert!(asleep.used.count() >= 3 << 20 && asleep.pinned >= asleep.used, "{asleep:?}");
        allocator.resume(&[tag.to_owned()]).unwrap();
        allocator.free(addr, DEFAULT).unwrap();
    }

    #[test]
    fn pinned_memory_goes_back_with_a_trim_and_with_the_region() {
        for (options, kept) in [("", 0), ("pinned_keep=100MiB", 128 << 20)] {
            let allocator = OpenAllocator::open("sim:h200", options).unwrap();
            job(allocator, "one");
            let awake = host_memory(allocator);
            assert_eq!(awake, PinnedMemory { pinned: Bytes::mib(128), used: Bytes::ZERO });
            allocator.with(|session| session.trim(0)).unwrap();
            assert_eq!(host_memory(allocator), PinnedMemory::default());
            job(allocator, "one");
            allocator.with(|session| session.remove_region("one")).unwrap();
            assert_eq!(host_memory(allocator).pinned.count(), kept, "{options}");
            allocator.close().unwrap();
        }
    }

    #[test]
    fn a_hundred_jobs_with_regions_of_their_own_leave_no_pinned_memory() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        for nth in 0..100 {
            let tag = format!("job{nth}");
            job(allocator, &tag);
            allocator.with(|session| session.remove_region(&tag)).unwrap();
        }
        assert_eq!(host_memory(allocator), PinnedMemory::default());
        allocator.close().unwrap();
    }

    #[test]
    fn no_block_outlives_its_region_where_threads_allocate_and_remove() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        let target = ScopeTarget::Allocator(allocator);
        let removed = AtomicUsize::new(0);
        std::thread::scope(|threads| {
            for thread in 0..4 {
                let removed = &removed;
                threads.spawn(move || {
                    let region = Some(("job", RegionOptions::default()));
                    let scope = begin_scope_of_region(target, region).unwrap();
                    for round in 0..40_000 {
                        let addr = malloc(allocator, 512 << ((thread + round) % 4)).unwrap();
                        allocator.free(addr, DEFAULT).unwrap();
                        if round % 4 == thread {
                            removed.fetch_add(
                                usize::from(
                                    allocator.with(|session| session.remove_region("job")).is_ok(),
                                ),
                                Ordering::Relaxed,
                            );
                        }
                    }
                    end_scope_of_region(scope).unwrap();
                });
            }
        });
        assert!(removed.into_inner() > 0);
        assert_eq!(allocator.stats().live.count(), 0);
        allocator.with(Session::audit).unwrap();
        allocator.close().unwrap();
    }

    #[test]
    fn a_backup_on_the_disk_needs_a_directory_and_moves_to_another_one() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        let target = ScopeTarget::Allocator(allocator);
        let options = RegionOptions { backup: Backup::Disk, ..RegionOptions::default() };
        let begin = || begin_scope_of_region(target, Some(("moments", options)));
        let refused = begin().unwrap_err();
        assert_eq!(refused.status(), VRAMP_ERROR_OPTION, "{refused:?}");
        let (first, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        set_default_region_disk(first.path()).unwrap();
        let scope = begin().unwrap();
        let addr = malloc(allocator, 3 << 20).unwrap();
        end_scope_of_region(scope).unwrap();
        let tags = ["moments".to_owned()];
        let mut bytes = vec![0; 3 << 20];
        for limit in [None, Some(Bytes::mib(1)), Some(Bytes::mib(64))] {
            let paused = allocator.pause(&tags, keep());
            let on_disk = status(allocator)[0].on_disk;
            if limit == Some(Bytes::mib(64)) {
                let error = paused.unwrap_err();
                assert_eq!(error.region.as_deref(), Some("moments"), "there is 1 MiB: {error:?}");
                assert!(read_backup(allocator, addr, &mut bytes).is_err(), "it is awake");
            } else {
                paused.unwrap();
                assert!(on_disk >= Bytes::mib(3));
                allocator
                    .with(|session| {
                        session.with_regions(&tags, |regions, tags| regions.prefetch(tags[0]))
                    })
                    .unwrap();
                read_backup(allocator, addr, &mut bytes).unwrap();
                assert!(read_backup(allocator, 7, &mut bytes).is_err());
            }
            allocator.resume(&tags).unwrap();
            set_region_disk(other.path(), limit).unwrap();
        }
        allocator.pause(&tags, PauseOptions { discard: true, ..keep() }).unwrap();
        assert!(read_backup(allocator, addr, &mut bytes).is_err());
        allocator.resume(&tags).unwrap();
        assert!(set_region_disk(&other.path().join("nowhere"), None).is_err());
        allocator.free(addr, DEFAULT).unwrap();
        allocator.close().unwrap();
    }

    /// Opens tiers as the Python package does.
    fn open_tiers(allocator: OpenAllocator, config: &TiersConfig) -> (Tiers, Option<HostLoan>) {
        let opened = allocator.with(|session| {
            let kept = Arc::clone(session.shared_allocator());
            let tiers = TiersOptions::default().on(kept, config)?;
            let loan = session.lend_host_memory(&tiers);
            Ok((tiers, loan))
        });
        opened.unwrap()
    }

    #[test]
    fn regions_use_the_host_memory_of_tiers_while_they_are_open() {
        let allocator = OpenAllocator::open("sim", "limit=256MiB").unwrap();
        let options = RegionOptions { read_only: true, ..RegionOptions::default() };
        let tag = ["weights".to_owned()];
        let scope =
            begin_scope_of_region(ScopeTarget::Allocator(allocator), Some(("weights", options)));
        let stream = StreamName::Raw(1);
        let block = allocator.malloc(64 << 20, stream).unwrap();
        end_scope_of_region(scope.unwrap()).unwrap();

        // The region exists already when the tiers are opened, with all their memory pinned.
        let text =
            "[[host]]\nindex = 0\ncapacity = '128MiB'\nblock = '1MiB'\nblocks_per_pool = 128";
        let config = TiersConfig::from_toml(text).unwrap();
        let opened = open_tiers(allocator, &config);
        let host = SpaceId::host(0);
        let charged = |(tiers, _): &(Tiers, Option<HostLoan>)| {
            let space = tiers.reservations().space(host).unwrap();
            space.limit() - space.available()
        };
        let pinned = |(tiers, _): &(Tiers, Option<HostLoan>)| tiers.mover().pool().stats().blocks;
        let before = pinned(&opened);
        assert_eq!(before, 128, "pinned ahead");
        allocator.pause(&tag, keep()).unwrap();
        assert_eq!(charged(&opened), Bytes::mib(64));
        assert_eq!(pinned(&opened), before, "a pause pins nothing that was pinned ahead");
        allocator.resume(&tag).unwrap();

        // A copy outlives the tiers, and the next one is made without them.
        drop(opened);
        allocator.pause(&tag, keep()).unwrap();
        allocator.resume(&tag).unwrap();

        // Full tiers refuse a copy, and nothing has changed.
        let text = text.replace("128MiB", "16MiB").replace("128", "16");
        let config = TiersConfig::from_toml(&text).unwrap();
        let opened = open_tiers(allocator, &config);
        let more =
            begin_scope_of_region(ScopeTarget::Allocator(allocator), Some(("weights", options)));
        let second = allocator.malloc(1 << 20, stream).unwrap();
        end_scope_of_region(more.unwrap()).unwrap();
        let refused = allocator.pause(&tag, keep()).unwrap_err();
        assert!(refused.text.contains("host"), "{}", refused.text);
        assert_eq!(charged(&opened), Bytes::ZERO);
        drop(opened);
        allocator.pause(&tag, keep()).unwrap();
        allocator.resume(&tag).unwrap();
        for block in [block, second] {
            allocator.free(block.addr, stream).unwrap();
        }
        allocator.close().unwrap();
    }
}
