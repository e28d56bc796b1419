//! Bytes on a disk, charged to a space of the tier Disk by what they really take.
//!
//! ```
//! use vramp_host::{HostMemory, HostSpan, PageKind};
//! use vramp_tiers::disk::{DiskConfig, ChargeTo};
//! use vramp_tiers::{Bytes, DiskStore, ReservationManager, SpaceConfig, SpaceId};
//!
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path();
//! let disk = SpaceId::disk(0);
//! let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::gib(8)))])?;
//! let space = manager.space(disk).expect("it was configured");
//! let config = DiskConfig { file_size: Bytes::mib(16), ..DiskConfig::default() };
//! let store = DiskStore::open(dir, config, &space)?;
//!
//! let memory = HostMemory::new(Bytes::mib(4), None, PageKind::default())?;
//! let all = [HostSpan::new(&memory, Bytes::ZERO, Bytes::mib(4))?];
//! memory.write(Bytes::ZERO, b"to keep")?;
//! let stored = store.write(&all, ChargeTo::Space)?;
//! assert_eq!(space.total(), Bytes::mib(4));
//!
//! memory.write(Bytes::ZERO, b"others.")?;
//! store.read(&stored, &all)?;
//! let mut back = [0; 7];
//! memory.read(Bytes::ZERO, &mut back)?;
//! assert_eq!(&back, b"to keep");
//!
//! drop(stored);
//! assert_eq!(space.total(), Bytes::ZERO);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The life of what is stored:
//!
//! 1. [`DiskStore::open`] sweeps away what killed processes left in the directory.
//! 2. [`begin_write`](DiskStore::begin_write) charges whole blocks of 4 KiB, takes extents for them
//!    in files that have their blocks already, and starts the first pieces. Each piece that ends
//!    starts the next; sums are taken meanwhile.
//! 3. A piece that the disk cannot write goes elsewhere, once. Its first place is quarantined.
//! 4. [`DiskTransfer::wait`] returns [`StoredBytes`], or an error with nothing charged or kept.
//! 5. [`begin_read`](DiskStore::begin_read) moves them to any memory of that length, and compares
//!    the sums.
//! 6. Dropping [`StoredBytes`] frees the extents, then the charge. Files stay for the next write
//!    until [`trim`](DiskStore::trim), or until the store is dropped: nothing survives it.
//!
//! Memory in whole blocks moves directly. The end of an odd length, and memory that begins in the
//! middle of a block, are copied through blocks of their own.
//!
//! With [`DiskConfig::compression`] what a sample finds worth it is compressed beside all that, and
//! charged by what it then takes.
//!
//! Deliberately absent: what is worth storing, copies to and from cards, sync to the
//! medium (nothing is to survive the process), and devices that tell how full they are.

mod audit;
mod compress;
mod config;
mod error;
mod flight;
mod header;
mod shelf;
mod spans;
mod stats;
mod store;
mod sweep;
mod transfer;

pub use compress::{CompressionConfig, CompressionStats};
pub use config::{Checksum, DiskConfig, DiskConfigError, FileNames};
pub use error::DiskTierError;
pub use shelf::StoredBytes;
pub use stats::{DiskStats, TransferStats};
pub use store::{ChargeTo, DiskStore};
pub use sweep::SweepReport;
pub use transfer::DiskTransfer;
