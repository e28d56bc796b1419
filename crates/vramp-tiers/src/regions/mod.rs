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
//! let device = vramp_alloc::open("sim:h200")?.driver;
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
//! A pause may [discard](PauseOptions::discard) contents: the region then has no backup until it is resumed.
//!
//! # Cost
//!
//! A pause copies the allocated bytes, in steps of the mover, and releases handles while later steps are
//! in flight; a resume creates and maps handles ahead of the copies. See [`vramp_alloc::sleep`] for the
//! driver calls. Host memory is as long as the contents, in whole blocks of the pool. A region keeps
//! 16 bytes for each contiguous piece of contents and each handle. Regions are found by name in
//! O(log regions).
//!
//! # Errors
//!
//! [`RegionError`]. A pause or a resume of a region happens as a whole or not at all. If what was
//! done cannot be undone either, because the card is full or a driver call fails, the region
//! sleeps in part with its contents safe, [`RegionError::Stuck`] says so, and a later resume goes on.
//!
//! Deliberately absent: threads, and the choice of what sleeps, except in [`Regions::on_pressure`].

mod ahead;
mod contents;
mod copies;
mod error;
mod moves;
mod pressure;
mod region;
mod set;

pub use error::RegionError;
pub use region::{Backup, Phase, Region, RegionOptions, RegionStatus};
pub use set::{PauseOptions, Regions};
