//! The regions of a card, by tag.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vramp_alloc::Allocator;
use vramp_core::{AddrRange, Bytes, DeviceAddr, Mixed};

use super::callbacks::Callbacks;
use super::copies::Below;
use super::error::RegionError;
use super::region::{Backup, Region, RegionOptions, RegionStatus};
use crate::disk::DiskStore;
use crate::movers::Mover;
use crate::sync::{Mutex, lock};

/// Returns the placement of a region, whose pauses and resumes make driver calls for each handle: a request
/// of up to 1 GiB gets one handle of its length, and requests of a few MiB share handles. The slack is larger
/// than a pool's, because a region returns what is idle at each pause, and remaps as rarely as a pool that
/// serves all of the program.
fn placement(mixed: &mut Mixed) {
    mixed.chunk_max = mixed.chunk_max.max(Bytes::gib(1));
    mixed.chunks_per_request = 1;
    mixed.growth_min = mixed.growth_min.max(Bytes::mib(32));
    mixed.slack_per_mille = mixed.slack_per_mille.max(40);
}

/// Options of a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PauseOptions {
    /// Bytes of each region that stay on the card, at most. A handle stays or leaves as a whole, and a
    /// block of up to 1 GiB may have one. The default is none.
    pub keep: Bytes,
    /// Whether contents are given up instead of copied. Until the region is resumed it then has no
    /// backup: copies made before are freed, and all contents are undefined after the resume, also
    /// those of memory that stayed on the card. The default is false.
    pub discard: bool,
}

pub(super) struct Shared {
    below: Mutex<Below>,
    pub callbacks: Callbacks,
    regions: Mutex<BTreeMap<String, Arc<Region>>>,
}

impl Shared {
    pub fn below(&self) -> Below {
        lock(&self.below).clone()
    }

    pub fn find(&self, tag: &str) -> Result<Arc<Region>, RegionError> {
        let regions = lock(&self.regions);
        regions.get(tag).cloned().ok_or_else(|| RegionError::Unknown {
            tag: tag.to_owned(),
            known: regions.keys().cloned().collect(),
        })
    }

    fn find_all(&self, tags: &[&str]) -> Result<Vec<Arc<Region>>, RegionError> {
        tags.iter().map(|tag| self.find(tag)).collect()
    }

    /// Returns true if the region was not removed.
    pub fn has(&self, region: &Arc<Region>) -> bool {
        let regions = lock(&self.regions);
        regions.get(region.tag()).is_some_and(|own| Arc::ptr_eq(own, region))
    }

    pub fn all(&self) -> Vec<Arc<Region>> {
        lock(&self.regions).values().cloned().collect()
    }
}

/// The regions of a card. Clones are the same set.
#[derive(Clone)]
pub struct Regions {
    pub(super) shared: Arc<Shared>,
}

impl Regions {
    /// Creates an empty set. Copies are made by `mover`, to the host pool that it was created for.
    pub fn new(mover: Mover) -> Regions {
        Regions::with_callbacks(mover, Callbacks::default())
    }

    /// Creates an empty set, as [`Regions::new`] does, with callbacks that were registered before.
    pub fn with_callbacks(mover: Mover, callbacks: Callbacks) -> Regions {
        let below = Mutex::new(Below { mover, disk: None });
        let shared = Shared { below, callbacks, regions: Mutex::default() };
        Regions { shared: Arc::new(shared) }
    }

    /// Returns what is called [around a sleep](super::callbacks).
    pub fn callbacks(&self) -> &Callbacks {
        &self.shared.callbacks
    }

    /// Lets copies from now on be made by `mover`, a mover of the same device, to its host pool. Copies made
    /// before stay in the pool that they are in. Does not wait for a move in progress, which ends as it
    /// began. No driver call.
    pub fn set_mover(&self, mover: Mover) {
        // The streams of the one before may end here, outside of the lock.
        let _before = std::mem::replace(&mut lock(&self.shared.below).mover, mover);
    }

    /// Lets copies of regions with [`Backup::Disk`] from now on be written to `disk`. Copies made before
    /// stay where they are, and keep their store until they are dropped. With `None` a pause that has to
    /// write fails. The default is none.
    pub fn set_disk(&self, disk: Option<Arc<DiskStore>>) {
        // The store of the one before may end here, outside of the lock.
        let _before = std::mem::replace(&mut lock(&self.shared.below).disk, disk);
    }

    /// Returns the region with that tag, and creates it if there is none: a pool in the group of
    /// `allocator`.
    ///
    /// # Errors
    /// [`RegionError::OtherOptions`] if it exists with other options; [`RegionError::NoDisk`] if its backup
    /// is on a disk and there is none; [`RegionError::Create`].
    pub fn region(
        &self,
        allocator: &Allocator,
        tag: &str,
        options: RegionOptions,
    ) -> Result<Arc<Region>, RegionError> {
        let mut regions = lock(&self.shared.regions);
        if let Some(known) = regions.get(tag) {
            return match known.options() == options {
                true => Ok(Arc::clone(known)),
                false => Err(RegionError::OtherOptions { tag: tag.to_owned() }),
            };
        }
        if options.backup == Backup::Disk && lock(&self.shared.below).disk.is_none() {
            return Err(RegionError::NoDisk { tag: tag.to_owned() });
        }
        let pool = allocator.create_pool_with(tag, placement)?;
        let region = Arc::new(Region::new(tag, options, pool));
        regions.insert(tag.to_owned(), Arc::clone(&region));
        Ok(region)
    }

    /// Returns the region with that tag.
    ///
    /// # Errors
    /// [`RegionError::Unknown`].
    pub fn get(&self, tag: &str) -> Result<Arc<Region>, RegionError> {
        self.shared.find(tag)
    }

    /// Removes a region from the set. Its pool lives until the last user drops it.
    ///
    /// # Errors
    /// [`RegionError::Unknown`].
    pub fn remove(&self, tag: &str) -> Result<Arc<Region>, RegionError> {
        let found = self.shared.find(tag)?;
        lock(&self.shared.regions).remove(tag);
        self.shared.callbacks.forget(tag);
        Ok(found)
    }

    /// Removes a region that has no memory and that no call uses. `owners` references to it may exist besides that of
    /// this set; no thread may use or copy those during the call. Idle memory of the pool counts as memory:
    /// [`Allocator::trim`] returns it. No driver call before the result is dropped. O(log regions).
    ///
    /// # Errors
    /// [`RegionError::Unknown`]; [`RegionError::InUse`]; [`RegionError::HasMemory`]. The region is as before.
    pub fn remove_unused(&self, tag: &str, owners: usize) -> Result<Arc<Region>, RegionError> {
        let mut regions = lock(&self.shared.regions);
        let Some(region) = regions.get(tag) else {
            drop(regions);
            return self.shared.find(tag);
        };
        // The lock lets no other reference be made here. Weak ones are only used to pause.
        if Arc::strong_count(region) > 1 + owners {
            return Err(RegionError::InUse { tag: tag.to_owned() });
        }
        // What was allocated by a reference that ended is seen.
        fence(Ordering::Acquire);
        let (allocated, status) = (region.allocator().live(), region.status());
        let (on_card, asleep) = (status.on_card, status.asleep);
        if !(allocated + on_card + asleep).is_zero() {
            return Err(RegionError::HasMemory { tag: tag.to_owned(), allocated, on_card, asleep });
        }
        // It may sleep without any memory.
        self.shared.callbacks.forget(tag);
        Ok(regions.remove(tag).expect("it was found"))
    }

    /// Returns true if there is a region with that tag.
    pub fn has(&self, tag: &str) -> bool {
        lock(&self.shared.regions).contains_key(tag)
    }

    /// Puts regions to sleep, one after the other: their memory goes to the card until at most
    /// [`keep`](PauseOptions::keep) is left of each. Calls [callbacks](super::callbacks) first, and waits for the work of
    /// the card's streams. Does nothing about a region that sleeps as far already.
    ///
    /// # Errors
    /// [`RegionError`]. The region that failed is as before, unless the error is
    /// [`RegionError::Stuck`]; those before it were resumed again if they were awake. A pause that
    /// [discards](PauseOptions::discard) and began to release memory has discarded the contents.
    pub fn pause(&self, tags: &[&str], options: PauseOptions) -> Result<(), RegionError> {
        Callbacks::refuse_inside()?;
        let regions = self.shared.find_all(tags)?;
        let leaving = self.shared.callbacks.before(regions.iter())?;
        leaving.end(self.pause_all(&regions, options))
    }

    fn pause_all(&self, regions: &[Arc<Region>], options: PauseOptions) -> Result<(), RegionError> {
        let below = self.shared.below();
        let mut paused: Vec<&Arc<Region>> = Vec::new();
        for region in regions {
            let was_awake = !region.allocator().is_asleep();
            if let Err(error) = region.pause(&below, options) {
                // One that cannot be resumed says so in its status.
                paused.iter().for_each(|region| drop(region.resume(&below)));
                return Err(error);
            }
            if was_awake {
                paused.push(region);
            }
        }
        Ok(())
    }

    /// Brings regions back to their addresses, one after the other, and then calls [callbacks](super::callbacks). Does
    /// nothing about a region that is awake, except to call what failed before.
    ///
    /// # Errors
    /// [`RegionError`]. The region that failed sleeps on; those before it are awake. After [`RegionError::After`] all
    /// are awake.
    pub fn resume(&self, tags: &[&str]) -> Result<(), RegionError> {
        Callbacks::refuse_inside()?;
        let regions = self.shared.find_all(tags)?;
        let below = self.shared.below();
        let resumed = regions.iter().try_for_each(|region| region.resume(&below));
        self.shared.callbacks.after(&regions, resumed)
    }

    /// Copies the contents of a region while it is awake, so that the next pause copies nothing. The
    /// program writes nothing in the region from this call until it was paused and resumed; what it frees
    /// during the call stays mapped until its end. Does nothing
    /// about a region that sleeps or has no backup. A pause that fails and a resume of a region that is
    /// awake free the copy, unless the region is read-only: the program may write again.
    ///
    /// # Errors
    /// [`RegionError`]. The region is awake, and as before.
    pub fn clean(&self, tag: &str) -> Result<(), RegionError> {
        Callbacks::refuse_inside()?;
        self.shared.find(tag)?.clean(&self.shared.below())
    }

    /// Reads the contents of a region that sleeps from the disk into pinned host memory, so that a resume
    /// copies from there. Needs no memory of the card. A second call reads what was not read. Does nothing
    /// about a region that is awake or whose copy is not on a disk. No driver call but those that pin
    /// memory.
    ///
    /// The memory is freed when the region is resumed.
    ///
    /// # Errors
    /// [`RegionError::NoRoomToPrefetch`]; [`RegionError::Copy`] if the disk failed. All is as before.
    pub fn prefetch(&self, tag: &str) -> Result<(), RegionError> {
        Callbacks::refuse_inside()?;
        self.shared.find(tag)?.prefetch(&self.shared.below())
    }

    /// Reads bytes of a block in a sleeping region from its copy, by their address on the card. A copy on a
    /// disk is read in whole pieces of a step of the mover, unless it was [prefetched](Regions::prefetch).
    /// No driver call but those that pin memory. O(regions).
    ///
    /// # Errors
    /// [`RegionError::Awake`]; [`RegionError::NoBackup`]; [`RegionError::NotContents`];
    /// [`RegionError::Copy`]. Then `out` has undefined contents.
    pub fn read_backup(&self, address: DeviceAddr, out: &mut [u8]) -> Result<(), RegionError> {
        let range = AddrRange::new(address, Bytes::new(out.len() as u64));
        self.owner_of(range)?.read_backup(&self.shared.below(), range, out)
    }

    /// Fails where [`Regions::read_backup`] of so many bytes would, without a read: before memory for them is
    /// allocated. No driver call. O(regions).
    ///
    /// # Errors
    /// As of [`Regions::read_backup`], but no [`RegionError::Copy`].
    pub fn check_backup(&self, address: DeviceAddr, len: Bytes) -> Result<(), RegionError> {
        let range = AddrRange::new(address, len);
        self.owner_of(range)?.check_backup(range)
    }

    fn owner_of(&self, range: AddrRange) -> Result<Arc<Region>, RegionError> {
        Callbacks::refuse_inside()?;
        let mut all = self.shared.all().into_iter();
        let owner = range
            .checked_end()
            .and_then(|_| all.find(|region| region.allocator().has_addresses(range)));
        owner.ok_or(RegionError::NotContents { range })
    }

    /// Returns the states of the regions with these tags, as far as there are some. Waits for no move.
    /// O(tags log regions).
    pub fn status_of(&self, tags: &[&str]) -> Vec<RegionStatus> {
        let found: Vec<Arc<Region>> = {
            let regions = lock(&self.shared.regions);
            tags.iter().filter_map(|&tag| regions.get(tag).cloned()).collect()
        };
        found.iter().map(|region| region.status()).collect()
    }

    /// Returns the state of each region, by tag. Waits for no move.
    pub fn status(&self) -> Vec<RegionStatus> {
        self.shared.all().iter().map(|region| region.status()).collect()
    }
}

impl std::fmt::Debug for Regions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.shared.all()).finish()
    }
}
