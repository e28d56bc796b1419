//! Memory that others reach: peers, other processes, network cards, communication libraries.
//!
//! - [`SharingConfig`]: what memory is created as, which decides who can reach it. Fixed for an
//!   allocator.
//! - `config.rs`: what that means on a device;
//! - `access.rs`: access of other cards, [`Allocator::grant_access`] and
//!   [`Allocator::revoke_access`];
//! - `pins.rs`: ranges that keep their memory, [`Allocator::pin_range`];
//! - `dma_buf.rs`: a pinned range as a descriptor for drivers of other devices,
//!   [`Allocator::export_dma_buf`];
//! - `export.rs`: an allocation for other processes, [`Allocator::export`]; `descriptors.rs`: the descriptors of
//!   its handles;
//! - `import.rs`: memory of another process, [`Allocator::import`];
//! - `kept/`: memory that outlives its process, [`kept`];
//! - `windowed.rs`: memory of another process that several blocks use; `imports.rs`: what of it stays mapped between
//!   two opens; `retention.rs`: for how long;
//! - `exchange.rs`: the way from one process to another, [`Exchange`]; `wire.rs`: what is sent.
//!
//! ```
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! # let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device, Config::default())?;
//! let stream = allocator.create_stream()?;
//! let block = allocator.malloc(Bytes::mib(64), stream)?;
//!
//! // A communication library registers the block. Its memory stays there, also after a free.
//! let pinned = allocator.pin_range(vramp_alloc::sharing::range_of(&block))?;
//! allocator.free(block, stream)?;
//! allocator.trim(Bytes::ZERO)?;
//! assert!(allocator.stats()?.reserved >= Bytes::mib(64));
//! pinned.unpin();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Deliberately absent: messages between processes and the thread that waits for an exporter's (`vramp-ipc`), and the
//! order of their work.

mod access;
mod config;
mod descriptors;
mod dma_buf;
mod exchange;
mod export;
mod exports;
mod import;
mod imports;
pub mod kept;
mod pins;
mod retention;
mod windowed;
mod wire;

pub use access::{AccessChange, AccessError};
pub use config::{Access, Peers, Rdma, Sharing, SharingConfig};
pub(crate) use descriptors::Descriptors;
pub use descriptors::READY_MAX;
pub use dma_buf::{DmaBuf, DmaBufError};
pub use exchange::{Exchange, FetchError, OpenMemoryError, OpenedMemory, SharedMemory};
pub use export::{Description, Export, ExportError};
pub(crate) use exports::Exports;
pub use import::{ImportError, Imported};
pub use imports::IDLE_MAX;
pub(crate) use imports::Imports;
pub use pins::{PinError, PinnedRange, range_of};
pub use vramp_ipc::{OpenError, Refusal, ServeError, Ticket, TicketError};

#[cfg(doc)]
use crate::Allocator;
