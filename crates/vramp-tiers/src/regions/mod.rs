//! Regions: memory that leaves the card by name, and comes back at the same addresses.
//!
//! A region is a pool of the card with a tag. What is allocated in it sleeps together:
//!
//! ```
//! use vramp_alloc::{Allocator, Bytes, Config};
//! use vramp_tiers::host::{HostPool, HostPoolConfig};
//! use vramp_tiers::movers::{Mover, MoverConfig};
//! use vramp_tiers::regions::{PauseOptions, RegionOptions, Regions};
//! use vramp_tiers::{ReservationManager, SpaceConfig, SpaceId};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device.clone(), Config::default())?;
//! let host = SpaceId::host(0);
//! let spaces = ReservationManager::new([(host, SpaceConfig::host(Bytes::gib(1)))])?;
//! let space = spaces.space(host).expect("it was configured");
//! let pinned = HostPool::new(&space, HostPoolConfig::default(), [device.clone()])?;
//! let mover = Mover::new(device, &pinned, MoverConfig::default())?;
//!
//! let regions = Regions::new(mover);
//! let weights = regions.region(&allocator, "weights", RegionOptions::default())?;
//! let stream = allocator.create_stream()?;
//! let block = weights.allocator().malloc(Bytes::mib(100), stream)?;
//!
//! regions.pause(&["weights"], PauseOptions::default())?;
//! assert_eq!(weights.status().on_card, Bytes::ZERO);
//! regions.resume(&["weights"])?;              // at the same addresses, with the same contents
//! weights.allocator().free(block, stream)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A region is awake, or it sleeps in part or as a whole. While it sleeps its pool refuses requests and
//! serves frees ([`vramp_alloc::sleep`]). One call at a time changes a region; others wait for it.
//!
//! # Contents
//!
//! [`Backup`] says where contents go. A copy is kept while it is *valid*, and then a pause copies
//! nothing: of a region that is [read-only](RegionOptions::read_only), until something is allocated or
//! freed in it; of any region after [`Regions::clean`], until it is resumed.
//!
//! A block that is freed while the region sleeps needs no copy: [`Regions::reclaim`] moves the rest of a copy on the
//! host together and returns the blocks behind it.
//!
//! A pause may [discard](PauseOptions::discard) contents: the region then has no backup until it is resumed.
//!
//! A copy on a disk is staged: a few pinned blocks of the mover's pool are filled from the card and written,
//! or read and copied to the card, at the same time. A chunk is released when its contents are written.
//! [`Regions::prefetch`] reads a copy ahead into pinned memory. Dropping a copy frees its bytes on the disk,
//! and removes files without contents.
//!
//! ```
//! # use vramp_alloc::{Allocator, Bytes, Config};
//! # use vramp_tiers::host::{HostPool, HostPoolConfig};
//! # use vramp_tiers::movers::{Mover, MoverConfig};
//! # use vramp_tiers::regions::{PauseOptions, Regions};
//! use std::sync::Arc;
//!
//! use vramp_tiers::disk::{DiskConfig, DiskStore};
//! use vramp_tiers::regions::{Backup, RegionOptions};
//! use vramp_tiers::{ReservationManager, SpaceConfig, SpaceId};
//!
//! # let device = vramp_alloc::open("sim:h200")?;
//! # let allocator = Allocator::new(device.clone(), Config::default())?;
//! # let host = ReservationManager::new([(SpaceId::host(0), SpaceConfig::host(Bytes::gib(1)))])?;
//! # let host = host.space(SpaceId::host(0)).expect("it was configured");
//! # let pinned = HostPool::new(&host, HostPoolConfig::default(), [device.clone()])?;
//! # let regions = Regions::new(Mover::new(device, &pinned, MoverConfig::default())?);
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path();
//! let disk = SpaceId::disk(0);
//! let spaces = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::gib(8)))])?;
//! let space = spaces.space(disk).expect("it was configured");
//! regions.set_disk(Some(Arc::new(DiskStore::open(dir, DiskConfig::default(), &space)?)));
//! let options = RegionOptions { backup: Backup::Disk, ..RegionOptions::default() };
//! let moments = regions.region(&allocator, "moments", options)?;
//! let block = moments.allocator().malloc(Bytes::mib(100), allocator.create_stream()?)?;
//! regions.pause(&["moments"], PauseOptions::default())?;
//! assert!(moments.status().on_disk >= Bytes::mib(100));
//! regions.prefetch("moments")?;
//! regions.resume(&["moments"])?;
//! # drop(block);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Memory that others know
//!
//! Exported and pinned memory cannot leave. [Callbacks](callbacks) end what other libraries know of a region before it is
//! paused, and make it again after it was resumed.
//!
//! # Cost
//!
//! A pause copies the allocated bytes, in steps of the mover, and releases handles while later steps are
//! in flight; a resume creates and maps handles ahead of the copies. See [`vramp_alloc::sleep`] for the
//! driver calls. Host memory is as long as the contents, in whole blocks of the pool. A copy on a disk takes
//! at most [`staging_pieces`](crate::movers::MoverConfig::staging_pieces) steps of it, and one write and one
//! read of the store for each step. A region keeps 16 bytes for each contiguous piece of contents and each
//! handle, and some 100 bytes for each step on a disk: calls and memory grow linearly with the bytes, the
//! pieces and the handles. Regions are found by name in O(log regions), and by address in O(regions).
//!
//! # Errors
//!
//! [`RegionError`]. A pause or a resume of a region happens as a whole or not at all. If what was
//! done cannot be undone either, because the card is full or a driver call fails, the region
//! sleeps in part with its contents safe, [`RegionError::Stuck`] says so, and a later resume goes on.
//!
//! Memory that a copy of a failed move may still use stays mapped: the next move of the region waits for such
//! copies first, and fails if that wait fails.
//!
//! Deliberately absent: threads, and the choice of what sleeps, except in [`Regions::on_pressure`].

mod ahead;
pub mod callbacks;
mod copies;
mod core;
mod error;
mod moves;
mod pressure;
mod reclaim;
mod region;
mod set;

pub use callbacks::{Callbacks, SleepCallbacks};
pub use error::{CallbackError, FailedCallback, RegionError};
pub use region::{Backup, Phase, Region, RegionOptions, RegionStatus};
pub use set::{PauseOptions, Regions};
