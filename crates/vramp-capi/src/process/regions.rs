//! Regions by tag: scopes of threads, pauses and resumes.

use std::ffi::c_int;
use std::path::Path;

use vramp_alloc::Bytes;
use vramp_alloc::observe::Registration;
use vramp_core::DeviceAddr;
use vramp_tiers::regions::{PauseOptions, RegionError, RegionOptions, RegionStatus, Regions};

use super::{CallResult, OpenAllocator};
use crate::context::Context;
use crate::region_disk;
use crate::regions::{self, Tagged, Target, no_region};
use crate::status::{Failure, Kind, catch_failure, check_fork};

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
    let make = |context: &Context| match &tagged {
        Some(tagged) => context.region(tagged).map(drop),
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
        ScopeTarget::Allocator(allocator) => allocator.with(|context| {
            make(context)?;
            Ok(match context.device_number() {
                Some(device) => Target::Device(device),
                None => Target::Allocator(context.allocator().number()),
            })
        })?,
    };
    Ok(regions::begin(target, tagged)?)
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

fn names(tags: &[String]) -> Vec<&str> {
    tags.iter().map(String::as_str).collect()
}

impl OpenAllocator {
    /// Returns the allocators that all interfaces share and that are open, with the numbers of their
    /// devices.
    ///
    /// # Errors
    /// The process is a forked child.
    pub fn all_opened() -> CallResult<Vec<(u32, OpenAllocator)>> {
        let mut all = Vec::new();
        for device in 0..crate::torch::DEVICES as c_int as u32 {
            all.extend(OpenAllocator::opened(device)?.map(|allocator| (device, allocator)));
        }
        Ok(all)
    }

    fn with_regions(
        self,
        tags: &[String],
        call: impl Fn(&Regions, &[&str]) -> Result<(), RegionError>,
    ) -> CallResult<()> {
        self.with(|context| match (context.regions_if_any(), tags.first()) {
            (Some(regions), _) => context.with_disk(|| call(&regions, &names(tags))),
            (None, Some(tag)) => Err(no_region(tag)),
            (None, None) => Ok(()),
        })
    }

    /// Removes a region that has no memory. Waits for the work of the allocator's streams.
    ///
    /// # Errors
    /// The region is unknown, has memory or is in use, or a stream captures a graph. It is as before.
    pub fn remove_region(self, tag: &str) -> CallResult<()> {
        self.with(|context| context.remove_region(tag))
    }

    /// Returns those of some tags that have a region. O(tags log regions).
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn known_regions(self, tags: Vec<String>) -> CallResult<Vec<String>> {
        self.with(|context| {
            let regions = context.regions_if_any();
            let has = |tag: &String| regions.as_ref().is_some_and(|regions| regions.has(tag));
            Ok(tags.into_iter().filter(has).collect())
        })
    }

    /// Returns the states of the regions with these tags, as far as there are some. Waits for no move.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn region_status_of(self, tags: &[String]) -> CallResult<Vec<RegionStatus>> {
        self.with(|context| {
            let regions = context.regions_if_any();
            Ok(regions.map_or_else(Vec::new, |regions| regions.status_of(&names(tags))))
        })
    }

    /// Puts regions to sleep until at most `keep` bytes of each are on the card.
    ///
    /// # Errors
    /// As of [`Regions::pause`](Regions::pause).
    pub fn pause_regions(self, tags: &[String], keep: u64) -> CallResult<()> {
        let options = PauseOptions { keep: Bytes::new(keep), ..PauseOptions::default() };
        self.with_regions(tags, |regions, tags| regions.pause(tags, options))
    }

    /// As [`pause_regions`](OpenAllocator::pause_regions), and gives the contents up: nothing is copied, and
    /// copies made before are freed.
    ///
    /// # Errors
    /// As of [`Regions::pause`].
    pub fn discard_regions(self, tags: &[String], keep: u64) -> CallResult<()> {
        let options = PauseOptions { keep: Bytes::new(keep), discard: true };
        self.with_regions(tags, |regions, tags| regions.pause(tags, options))
    }

    /// Brings regions back.
    ///
    /// # Errors
    /// As of [`Regions::resume`](Regions::resume).
    pub fn resume_regions(self, tags: &[String]) -> CallResult<()> {
        self.with_regions(tags, |regions, tags| regions.resume(tags))
    }

    /// Reads contents of sleeping regions from the disk into pinned host memory.
    ///
    /// # Errors
    /// As of [`Regions::prefetch`].
    pub fn prefetch_regions(self, tags: &[String]) -> CallResult<()> {
        self.with_regions(tags, |regions, tags| {
            tags.iter().try_for_each(|tag| regions.prefetch(tag))
        })
    }

    /// Reads bytes of a block in a sleeping region from its copy.
    ///
    /// # Errors
    /// As of [`Regions::read_backup`].
    pub fn read_region_backup(self, address: u64, out: &mut [u8]) -> CallResult<()> {
        self.with_backups(|regions| regions.read_backup(DeviceAddr::new(address), out))
    }

    /// Fails where [`OpenAllocator::read_region_backup`] of so many bytes would, before memory for them is
    /// allocated.
    ///
    /// # Errors
    /// As of [`Regions::check_backup`].
    pub fn check_region_backup(self, address: u64, bytes: u64) -> CallResult<()> {
        let bytes = Bytes::new(bytes);
        self.with_backups(|regions| regions.check_backup(DeviceAddr::new(address), bytes))
    }

    fn with_backups(
        self,
        call: impl FnOnce(&Regions) -> Result<(), RegionError>,
    ) -> CallResult<()> {
        self.with(|context| {
            let Some(regions) = context.regions_if_any() else {
                let text = "the allocator has no regions: only memory of a region has a backup";
                return Err(Failure::new(Kind::Region, text));
            };
            Ok(call(&regions)?)
        })
    }

    /// Copies the contents of regions ahead of a pause.
    ///
    /// # Errors
    /// As of [`Regions::clean`](Regions::clean).
    pub fn clean_regions(self, tags: &[String]) -> CallResult<()> {
        self.with_regions(tags, |regions, tags| tags.iter().try_for_each(|tag| regions.clean(tag)))
    }

    /// Returns the state of each region, by tag. Waits for no move.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn region_status(self) -> CallResult<Vec<RegionStatus>> {
        self.with(|context| Ok(context.regions_if_any().map_or_else(Vec::new, |all| all.status())))
    }

    /// Lets regions sleep, in this order and as far as needed, when a request of the allocator finds no
    /// memory. Returns the number of the registration, for [`OpenAllocator::unregister`].
    ///
    /// # Errors
    /// A region is unknown, or the allocator is closed.
    pub fn pause_regions_on_pressure(self, tags: &[String]) -> CallResult<u64> {
        self.with(|context| {
            let (Some(regions), names) = (context.regions_if_any(), names(tags)) else {
                let text = "the allocator has no regions: allocate in one first";
                return Err(tags
                    .first()
                    .map_or_else(|| Failure::new(Kind::Region, text), |tag| no_region(tag)));
            };
            let registered: Registration = regions.on_pressure(context.allocator(), &names)?;
            Ok(registered.number())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use vramp_tiers::regions::Backup;

    use super::*;
    use crate::abi::vramp_status_t::*;
    use crate::process::StreamName;
    use crate::regions::PinnedMemory;

    const DEFAULT: StreamName = StreamName::Raw(0);

    fn malloc(allocator: OpenAllocator, size: u64) -> CallResult<u64> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { allocator.malloc(size, DEFAULT) }.map(|block| block.addr)
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
        assert_eq!(allocator.stats().unwrap().live.count(), 512 + (3 << 20));
        for addr in blocks {
            // SAFETY: as above.
            unsafe { allocator.record_use(addr, StreamName::Raw(8)) }.unwrap();
        }
        allocator.pause_regions(&["weights".to_owned()], 0).unwrap();
        assert_eq!(allocator.stats().unwrap().reserved.count(), 0);
        for addr in blocks {
            // SAFETY: as above.
            unsafe { allocator.free(addr, DEFAULT) }.unwrap();
        }
        let outside = malloc(allocator, 512).unwrap();
        let scope = begin_scope_of_region(target, Some(("weights", options))).unwrap();
        let error = malloc(allocator, 512).unwrap_err();
        assert_eq!(
            (error.status(), error.region.as_deref()),
            (VRAMP_ERROR_REGION, Some("weights"))
        );
        end_scope_of_region(scope).unwrap();
        // SAFETY: as above.
        unsafe { allocator.free(outside, DEFAULT) }.unwrap();
        allocator.resume_regions(&["weights".to_owned()]).unwrap();
        allocator.audit().unwrap();
        assert_eq!(allocator.stats().unwrap().live.count(), 0);
        allocator.close().unwrap();
    }

    #[test]
    fn a_thousand_tags_that_were_removed_leave_no_entry() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        let target = ScopeTarget::Allocator(allocator);
        let count = || allocator.with(|context| Ok(context.all_regions().len())).unwrap();
        for job in 0..1000 {
            let tag = format!("job{job}");
            let region = Some((tag.as_str(), RegionOptions::default()));
            let scope = begin_scope_of_region(target, region).unwrap();
            let addr = malloc(allocator, 3 << 20).unwrap();
            end_scope_of_region(scope).unwrap();
            let refused = allocator.remove_region(&tag).unwrap_err();
            assert_eq!(refused.status(), VRAMP_ERROR_REGION, "{refused:?}");
            assert_eq!(refused.region.as_deref(), Some(tag.as_str()));
            // SAFETY: as above.
            unsafe { allocator.free(addr, DEFAULT) }.unwrap();
            assert_eq!(count(), 1);
            allocator.remove_region(&tag).unwrap();
            assert_eq!(count(), 0);
            assert!(allocator.known_regions(vec![tag]).unwrap().is_empty());
        }
        assert!(allocator.region_status().unwrap().is_empty());
        assert_eq!(allocator.stats().unwrap().reserved.count(), 0);
        allocator.audit().unwrap();
        allocator.close().unwrap();
    }

    /// Runs a job in a region: pauses it, resumes it and frees its block.
    fn job(allocator: OpenAllocator, tag: &str) {
        let region = Some((tag, RegionOptions::default()));
        let scope = begin_scope_of_region(ScopeTarget::Allocator(allocator), region).unwrap();
        let addr = malloc(allocator, 3 << 20).unwrap();
        end_scope_of_region(scope).unwrap();
        allocator.pause_regions(&[tag.to_owned()], 0).unwrap();
        let asleep = allocator.host_memory().unwrap();
        assert!(asleep.used.count() >= 3 << 20 && asleep.pinned >= asleep.used, "{asleep:?}");
        allocator.resume_regions(&[tag.to_owned()]).unwrap();
        // SAFETY: on the simulator any value is a stream.
        unsafe { allocator.free(addr, DEFAULT) }.unwrap();
    }

    #[test]
    fn pinned_memory_goes_back_with_a_trim_and_with_the_region() {
        for (options, kept) in [("", 0), ("pinned_keep=100MiB", 128 << 20)] {
            let allocator = OpenAllocator::open("sim:h200", options).unwrap();
            job(allocator, "one");
            let awake = allocator.host_memory().unwrap();
            assert_eq!(awake, PinnedMemory { pinned: Bytes::mib(128), used: Bytes::ZERO });
            allocator.trim(0).unwrap();
            assert_eq!(allocator.host_memory().unwrap(), PinnedMemory::default());
            job(allocator, "one");
            allocator.remove_region("one").unwrap();
            assert_eq!(allocator.host_memory().unwrap().pinned.count(), kept, "{options}");
            allocator.close().unwrap();
        }
    }

    #[test]
    fn a_hundred_jobs_with_regions_of_their_own_leave_no_pinned_memory() {
        let allocator = OpenAllocator::open("sim:h200", "").unwrap();
        for nth in 0..100 {
            let tag = format!("job{nth}");
            job(allocator, &tag);
            allocator.remove_region(&tag).unwrap();
        }
        assert_eq!(allocator.host_memory().unwrap(), PinnedMemory::default());
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
                        // SAFETY: as above.
                        unsafe { allocator.free(addr, DEFAULT) }.unwrap();
                        if round % 4 == thread {
                            removed.fetch_add(
                                usize::from(allocator.remove_region("job").is_ok()),
                                Ordering::Relaxed,
                            );
                        }
                    }
                    end_scope_of_region(scope).unwrap();
                });
            }
        });
        assert!(removed.into_inner() > 0);
        assert_eq!(allocator.stats().unwrap().live.count(), 0);
        allocator.audit().unwrap();
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
            let paused = allocator.pause_regions(&tags, 0);
            let on_disk = allocator.region_status().unwrap()[0].on_disk;
            if limit == Some(Bytes::mib(64)) {
                let error = paused.unwrap_err();
                assert_eq!(error.region.as_deref(), Some("moments"), "there is 1 MiB: {error:?}");
                assert!(allocator.read_region_backup(addr, &mut bytes).is_err(), "it is awake");
            } else {
                paused.unwrap();
                assert!(on_disk >= Bytes::mib(3));
                allocator.prefetch_regions(&tags).unwrap();
                allocator.read_region_backup(addr, &mut bytes).unwrap();
                assert!(allocator.read_region_backup(7, &mut bytes).is_err());
            }
            allocator.resume_regions(&tags).unwrap();
            set_region_disk(other.path(), limit).unwrap();
        }
        allocator.discard_regions(&tags, 0).unwrap();
        assert!(allocator.read_region_backup(addr, &mut bytes).is_err());
        allocator.resume_regions(&tags).unwrap();
        assert!(set_region_disk(&other.path().join("nowhere"), None).is_err());
        // SAFETY: as above.
        unsafe { allocator.free(addr, DEFAULT) }.unwrap();
        allocator.close().unwrap();
    }
}
