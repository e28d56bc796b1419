//! Memory that others reach: peers, other processes, network cards, communication libraries.
//!
//! - [`SharingConfig`]: what memory is created as, which decides who can reach it. Fixed for an
//!   allocator.
//! - `access.rs`: access of other cards, [`Allocator::grant_access`] and
//!   [`Allocator::revoke_access`];
//! - `pins.rs`: ranges that keep their memory, [`Allocator::pin_range`];
//! - `dma_buf.rs`: a pinned range as a descriptor for drivers of other devices,
//!   [`Allocator::export_dma_buf`];
//! - `export.rs`: an allocation for other processes, [`Allocator::export`];
//! - `import.rs`: memory of another process, [`Allocator::import`];
//! - `exchange.rs`: the way from one process to another, [`Exchange`]; `wire.rs`: what is sent.
//!
//! ```
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! # let device = vramp_alloc::open("sim:h200")?.driver;
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
//! Deliberately absent: messages between processes (`vramp-ipc`), and the order of their work.

mod access;
mod dma_buf;
mod exchange;
mod export;
mod import;
mod pins;
mod wire;

use vramp_driver::{Driver, DriverError, HandleType, MemoryLocation, MemoryProperties};

pub use access::{AccessChange, AccessError, Peers};
pub use dma_buf::{DmaBuf, DmaBufError};
pub use exchange::{Exchange, FetchError, OpenMemoryError, OpenedMemory, READY_MAX, SharedMemory};
pub(crate) use export::Exports;
pub use export::{Description, Export, ExportError};
pub use import::{ImportError, Imported};
pub use pins::{PinError, PinnedRange, range_of};
pub use vramp_ipc::{OpenError, Refusal, ServeError, Ticket, TicketError};

use crate::error::CreateError;

#[cfg(doc)]
use crate::Allocator;

/// Whether network cards can access memory (`gpuDirectRDMACapable`). On an H200 each map and each unmap
/// takes 8 us longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rdma {
    /// No.
    #[default]
    Off,
    /// Yes. A device that cannot do that is an error.
    On,
    /// Where the device can.
    Auto,
}

/// Who can reach an allocator's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharingConfig {
    /// How memory can be exported to other processes. [`HandleType::PosixFd`], the default, costs
    /// nothing on an H200; a device without it creates memory for this process only. A device that
    /// refuses [`HandleType::Fabric`] creates descriptors instead, and [`Sharing::fallback`] says why.
    pub handle_type: HandleType,
    /// Whether network cards can access it.
    pub rdma: Rdma,
    /// Which other cards can access it.
    pub peers: Peers,
}

impl Default for SharingConfig {
    fn default() -> SharingConfig {
        SharingConfig { handle_type: HandleType::PosixFd, rdma: Rdma::Off, peers: Peers::OnDemand }
    }
}

/// How an allocator's memory can be shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// How memory can be exported.
    pub handle_type: HandleType,
    /// True if network cards can access it.
    pub rdma: bool,
    /// Why it is less than was configured. `None` if it is not.
    pub fallback: Option<String>,
    /// Ordinals of the cards that have access, in ascending order.
    pub peers: Vec<u32>,
}

/// What a manager creates and maps memory as.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub properties: MemoryProperties,
    pub fallback: Option<String>,
    /// Cards that each set-access grants access to, in ascending order.
    pub peers: Vec<u32>,
}

impl Access {
    /// Returns what the configuration means on a device. One create and one release for fabric
    /// handles, which a device may report and refuse; else no driver call.
    ///
    /// # Errors
    /// The device has no RDMA, or a configured peer is none.
    pub(crate) fn resolve(
        driver: &dyn Driver,
        config: &SharingConfig,
    ) -> Result<Access, CreateError> {
        let info = driver.info();
        let can = info.capabilities;
        if config.rdma == Rdma::On && !can.rdma {
            return Err(CreateError::Rdma);
        }
        let rdma = config.rdma != Rdma::Off && can.rdma;
        let peers = config.peers.at_start(&info.peers)?;
        let wanted = MemoryProperties {
            location: MemoryLocation::Device,
            handle_type: config.handle_type,
            rdma,
        };
        let with = |handle_type| MemoryProperties { handle_type, ..wanted };
        let descriptors = || match can.posix_fd {
            true => with(HandleType::PosixFd),
            false => with(HandleType::None),
        };
        let (properties, fallback) = match config.handle_type {
            HandleType::None => (wanted, None),
            HandleType::PosixFd if can.posix_fd => (wanted, None),
            HandleType::PosixFd => {
                (descriptors(), Some("the device exports no file descriptors".to_owned()))
            }
            HandleType::Fabric if !can.fabric => {
                (descriptors(), Some("the device has no fabric handles".to_owned()))
            }
            HandleType::Fabric => match probe(driver, wanted) {
                Ok(()) => (wanted, None),
                Err(error) if error.is_out_of_memory() || error.is_device_lost() => {
                    return Err(error.into());
                }
                Err(error) => {
                    let why = format!(
                        "the device refused a fabric handle: {} ({})",
                        error.name, error.code
                    );
                    (descriptors(), Some(why))
                }
            },
        };
        Ok(Access { properties, fallback, peers })
    }

    pub(crate) fn state(&self) -> Sharing {
        Sharing {
            handle_type: self.properties.handle_type,
            rdma: self.properties.rdma,
            fallback: self.fallback.clone(),
            peers: self.peers.clone(),
        }
    }
}

/// Creates and releases a page with these properties.
fn probe(driver: &dyn Driver, properties: MemoryProperties) -> Result<(), DriverError> {
    let handle = driver.create(driver.info().limits.page, properties)?;
    driver.release(handle)
}
