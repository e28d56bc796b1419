//! What memory is created as, and what that means on a device.

use vramp_driver::{Driver, DriverError, HandleType, MemoryLocation, MemoryProperties};

use crate::error::CreateError;

/// Which other cards can access an allocator's memory. Plain allocations, those of the preset `torch` and of
/// the driver's pool, are not concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Peers {
    /// None, also not later.
    None,
    /// Those that [`Allocator::grant_access`](crate::Allocator::grant_access) names.
    #[default]
    OnDemand,
    /// All that the device has a link to, from the start.
    All,
    /// Those with these ordinals, from the start, and no others.
    These(Vec<u32>),
}

impl Peers {
    /// Returns the cards that have access from the start, in ascending order.
    fn at_start(&self, peers: &[u32]) -> Result<Vec<u32>, CreateError> {
        match self {
            Peers::None | Peers::OnDemand => Ok(Vec::new()),
            Peers::All => Ok(peers.to_vec()),
            Peers::These(wanted) => {
                let mut wanted = wanted.clone();
                wanted.sort_unstable();
                wanted.dedup();
                match wanted.iter().find(|peer| !peers.contains(peer)) {
                    Some(&ordinal) => Err(CreateError::NoPeer { ordinal, peers: peers.to_vec() }),
                    None => Ok(wanted),
                }
            }
        }
    }

    pub(super) fn allows(&self, ordinal: u32) -> bool {
        match self {
            Peers::None => false,
            Peers::OnDemand | Peers::All => true,
            Peers::These(listed) => listed.contains(&ordinal),
        }
    }
}

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
pub struct Access {
    /// Properties of each handle.
    pub properties: MemoryProperties,
    /// Why they are less than was configured. `None` if they are not.
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
    pub fn resolve(driver: &dyn Driver, config: &SharingConfig) -> Result<Access, CreateError> {
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
