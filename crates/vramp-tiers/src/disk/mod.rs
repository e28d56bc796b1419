//! A store of bytes in files of one directory, or in an [`ObjectStore`] of the program, charged to a
//! space of the tier Disk.
//!
//! ```
//! use vramp_tiers::disk::{ChargeTo, DiskConfig, DiskStore};
//! use vramp_tiers::host::{HostMemory, HostSpan, PageKind};
//! use vramp_tiers::{Bytes, ReservationManager, SpaceConfig, SpaceId};
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
//! The life of stored bytes:
//!
//! 1. [`DiskStore::open`] sweeps the directory: it removes files that killed processes left.
//! 2. [`begin_write`](DiskStore::begin_write) charges whole blocks of 4 KiB, allocates extents in
//!    preallocated files, and starts the first pieces. Each piece that completes starts the next.
//!    Workers take checksums meanwhile.
//! 3. A piece that the disk cannot write is written elsewhere, once. Its first place is
//!    quarantined.
//! 4. [`DiskTransfer::wait`] returns [`StoredBytes`].
//! 5. [`begin_read`](DiskStore::begin_read) reads them into any memory of that length and verifies
//!    the checksums.
//! 6. Dropping [`StoredBytes`] frees the extents, then credits the charge. Files stay for the next
//!    write until [`trim`](DiskStore::trim). The store removes them when it is dropped: no file
//!    outlives the process.
//!
//! # Cost
//!
//! Memory in whole aligned blocks moves by direct I/O, without a copy. The tail of an odd length
//! and unaligned memory are copied through bounce blocks. A write or read makes one request for
//! each [`DiskConfig::piece`], at most [`DiskConfig::depth`] at a time. A write preallocates a file
//! when no extent is free. With [`DiskConfig::compression`] workers compress what a sample finds
//! worth it; such bytes are charged by their compressed length.
//!
//! With [`DiskStore::with_objects`] each write is one object: copied once, `put` by a thread of the
//! store, verified when it is read, and deleted when [`StoredBytes`] is dropped.
//!
//! # Errors
//!
//! [`DiskTierError`]. A write that fails is charged nothing and keeps nothing. A read that fails
//! loses nothing that is stored. Bytes that differ from what was written are
//! [`Corrupt`](DiskTierError::Corrupt), never returned as good.
//!
//! Deliberately absent: choosing what to store, copies to and from devices
//! ([`movers`](crate::movers)), sync to the medium (nothing survives the process), and devices that
//! report how full they are.

mod compress;
mod config;
mod core;
mod error;
mod files;
mod job;
mod object_store;
mod objects;
mod pieces;
mod shared;
mod spans;
mod stats;
mod store;
mod transfer;

pub use config::{Checksum, DiskConfig, DiskConfigError, FileNames};
pub use core::compression::CompressionConfig;
pub use error::DiskTierError;
pub use files::SweepReport;
pub use object_store::{ObjectStore, ObjectStoreConfig, StoreError, StoreErrorKind};
pub use stats::{CompressionStats, DiskStats, TransferStats};
pub use store::{ChargeTo, DiskStore};
pub use transfer::{DiskTransfer, StoredBytes};
pub(in crate::disk) use vramp_host::DISK_BLOCK;

pub use crate::extents::ExtentCensus;
pub use vramp_host::{
    BlockIo, DiskError, DiskErrorKind, HostMemoryError, HostSpan, IoChoice, IoUnavailable, OsCode,
};
