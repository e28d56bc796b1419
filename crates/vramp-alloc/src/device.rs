//! Devices: opening one by name, the [`Driver`] trait and the types that its calls use.
//!
//! [`open`] opens a device once, [`open_all`] all devices of a machine, [`open_ordinals_mapped`] some of them.
//! [`Device`] opens one anew for each run, with costs and memory of the caller's. [`sim`] is a simulated card. [`CudaDriver`] is a card behind `libcuda`, loaded at run time.

#[cfg(feature = "sim")]
mod fresh;

use std::sync::Arc;

#[cfg(feature = "sim")]
use vramp_driver::sim::{CostError, UnknownCard};

#[cfg(feature = "sim")]
pub use fresh::{Device, DeviceOptions, FreshDevice, read_costs};
pub use vramp_core::{AddrRange, DeviceAddr};
pub use vramp_cuda::{CudaDriver, EntryError, OpenError as CudaOpenError};
#[cfg(feature = "sim")]
pub use vramp_driver::sim;
pub use vramp_driver::{
    Call, Capabilities, CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverError,
    DriverResult, ErrorKind, Event, ExportedHandle, Graph, GraphExec, GraphNode, Handle,
    HandleType, HostBuffer, HostMemory, HostSlice, Limits, MemoryInfo, MemoryLocation,
    MemoryProperties, PoolUsage, Stream, meter, wrapper,
};
pub use vramp_host::MapError;
#[cfg(feature = "sim")]
use vramp_host::MappedMemory;

/// An open device.
pub struct Opened {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// Why `auto` opened the simulator instead of a card; `None` if it did not.
    pub fell_back: Option<String>,
}

/// Error of [`open`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The name has no known form.
    #[error(
        "there is no device '{name}': use auto, sim, sim:CARD, sim:CARDxCOUNT, sim:CARDxCOUNT:N, cuda \
         or cuda:N, or a cost file FILE.toml"
    )]
    Name {
        /// Name that was given.
        name: String,
    },
    /// There is no simulated card of this name.
    #[cfg(feature = "sim")]
    #[error(transparent)]
    Card(#[from] UnknownCard),
    /// A simulated machine cannot have this number of cards, or has no card of this ordinal.
    #[cfg(feature = "sim")]
    #[error(
        "there is no simulated machine '{name}': the count is 1 to 64, and the ordinal of \
         sim:CARDxCOUNT:N is below the count"
    )]
    Devices {
        /// Name that was given.
        name: String,
    },
    /// A machine has no device of this ordinal.
    #[error("there is no device {ordinal} of '{name}': its devices are {there:?}")]
    Ordinal {
        /// Name of the machine.
        name: String,
        /// Ordinal that was given.
        ordinal: u32,
        /// Ordinals of the devices that it has.
        there: Vec<u32>,
    },
    /// A cost file cannot be read.
    #[cfg(feature = "sim")]
    #[error("cannot read the cost file '{}': {error}", path.display())]
    CostFile {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// A cost file has no usable costs.
    #[cfg(feature = "sim")]
    #[error("the cost file '{}': {error}", path.display())]
    Costs {
        /// Path of the file.
        path: std::path::PathBuf,
        /// What is wrong.
        error: CostError,
    },
    /// A cost file that was opened as a card does not say how much memory the card has.
    #[cfg(feature = "sim")]
    #[error(
        "the cost file '{}' describes no card: add `memory_mib = N`, or use it as \
         `--device sim:CARD --costs FILE`", path.display()
    )]
    NoMemory {
        /// Path of the file.
        path: std::path::PathBuf,
    },
    /// Costs or usable memory were given for a card.
    #[cfg(feature = "sim")]
    #[error(
        "{what} can be set for a simulated card only, and not for '{name}': use sim or sim:CARD"
    )]
    NotSimulated {
        /// Name of the device.
        name: String,
        /// What was given.
        what: &'static str,
    },
    /// The host has no memory for a simulated card that is mapped to it.
    #[error("cannot map the host's memory to a simulated card: {0}")]
    HostMemory(#[from] MapError),
    /// This build has no simulator.
    #[error("no simulated card: build with the feature `sim`, or use cuda or cuda:N")]
    NoSimulator,
    /// The card cannot be opened. The text contains the cause, so the cause is not a source: a
    /// program that prints all sources would print it twice.
    #[error("{0}; use 'sim' for a simulated card")]
    Cuda(CudaOpenError),
}

impl From<CudaOpenError> for OpenError {
    fn from(error: CudaOpenError) -> OpenError {
        OpenError::Cuda(error)
    }
}

/// The card that `sim` and `auto` simulate.
#[cfg(feature = "sim")]
const DEFAULT_CARD: &str = "h200";

/// Opens a device by name: `auto` (a card if there is one, else the simulator), `sim` or
/// `sim:CARD`, a cost file `FILE.toml` that describes a card to simulate, `cuda` or `cuda:N`.
/// `sim:CARDxCOUNT:N`, such as `sim:h200x2:1`, is device N of a machine of its own with COUNT cards;
/// without `:N` it is the first one. [`open_all`] opens all of one machine.
///
/// # Errors
/// [`OpenError::Name`] and [`OpenError::Card`] for an unknown name, [`OpenError::Cuda`] if the card
/// cannot be opened, [`OpenError::NoSimulator`] in a build without the feature `sim`.
pub fn open(name: &str) -> Result<Opened, OpenError> {
    let opened = |driver| Opened { driver, fell_back: None };
    match Kind::of(name)? {
        Kind::Auto => match CudaDriver::open(0) {
            Ok(card) => Ok(opened(Arc::new(card))),
            Err(error) if !cfg!(feature = "sim") => Err(error.into()),
            Err(error) => {
                let driver = simulated("sim")?;
                Ok(Opened { driver, fell_back: Some(error.to_string()) })
            }
        },
        Kind::Simulated => Ok(opened(simulated(name)?)),
        Kind::Card(ordinal) => Ok(opened(Arc::new(CudaDriver::open(ordinal)?))),
    }
}

/// Opens a device as [`open`] does. The addresses of a simulated card are the process's own, with the
/// host's memory: a program may read and write what it allocates.
///
/// # Errors
/// As of [`open`], and [`OpenError::HostMemory`].
#[cfg(feature = "sim")]
pub fn open_mapped(name: &str) -> Result<Opened, OpenError> {
    let opened = open(name)?;
    if !opened.driver.info().simulated {
        return Ok(opened);
    }
    let name = if opened.fell_back.is_some() { "sim" } else { name };
    let memory = Arc::new(MappedMemory::new()?);
    let driver = fresh::machine(name)?.mapped_to(memory).open();
    Ok(Opened { driver: Arc::new(driver), ..opened })
}

/// Opens all devices of a machine, in the order of their ordinals: every card for `cuda` and `auto`,
/// COUNT simulated cards for `sim:CARDxCOUNT`, and the one device of any other name. Simulated devices
/// of one call can access each other's memory, if it is granted; those of two calls cannot.
///
/// ```
/// let devices = vramp_alloc::device::open_all("sim:h200x2")?;
/// assert_eq!(devices.len(), 2);
/// assert_eq!(devices[1].driver.info().peers, [0]);
/// # Ok::<(), vramp_alloc::device::OpenError>(())
/// ```
///
/// # Errors
/// As of [`open`].
pub fn open_all(name: &str) -> Result<Vec<Opened>, OpenError> {
    open_devices(name, false)
}

/// Opens devices as [`open_all`] does, and simulated ones mapped as [`open_mapped`] does.
///
/// # Errors
/// As of [`open_mapped`].
#[cfg(feature = "sim")]
pub fn open_all_mapped(name: &str) -> Result<Vec<Opened>, OpenError> {
    open_devices(name, true)
}

fn open_devices(name: &str, mapped: bool) -> Result<Vec<Opened>, OpenError> {
    let every_card = |count: u32| {
        let cards = (0..count).map(|ordinal| {
            let driver: Arc<dyn Driver> = Arc::new(CudaDriver::open(ordinal)?);
            Ok(Opened { driver, fell_back: None })
        });
        cards.collect()
    };
    match Kind::of(name)? {
        Kind::Card(ordinal) if name.contains(':') => {
            let driver: Arc<dyn Driver> = Arc::new(CudaDriver::open(ordinal)?);
            Ok(vec![Opened { driver, fell_back: None }])
        }
        Kind::Card(_) => every_card(vramp_cuda::devices()?.len() as u32),
        Kind::Auto => match vramp_cuda::devices() {
            Ok(cards) if !cards.is_empty() => every_card(cards.len() as u32),
            // Opening the first card gives the reason.
            _ => match open(name)? {
                Opened { fell_back: Some(why), .. } => {
                    let mut opened = simulated_all("sim", mapped)?;
                    opened.iter_mut().for_each(|one| one.fell_back = Some(why.clone()));
                    Ok(opened)
                }
                opened => Ok(vec![opened]),
            },
        },
        Kind::Simulated => simulated_all(name, mapped),
    }
}

/// Opens the devices with these ordinals of one machine, in this order, and no other card. Where `auto`
/// finds no card, it simulates a machine that has them. The
/// addresses of simulated cards are the process's own, with the host's memory.
///
/// ```
/// let devices = vramp_alloc::device::open_ordinals_mapped("sim:h200x4", &[2, 0])?;
/// assert_eq!([devices[0].driver.info().ordinal, devices[1].driver.info().ordinal], [2, 0]);
/// # Ok::<(), vramp_alloc::device::OpenError>(())
/// ```
///
/// # Errors
/// As of [`open`], [`OpenError::HostMemory`], and [`OpenError::Ordinal`] if the machine has no such
/// device or it is given twice.
pub fn open_ordinals_mapped(name: &str, ordinals: &[u32]) -> Result<Vec<Opened>, OpenError> {
    let cards = match Kind::of(name)? {
        Kind::Card(ordinal) if name.contains(':') => Some(vec![ordinal]),
        Kind::Card(_) => Some((0..vramp_cuda::devices()?.len() as u32).collect()),
        Kind::Auto => match vramp_cuda::devices() {
            Ok(cards) if !cards.is_empty() => Some((0..cards.len() as u32).collect()),
            _ => None,
        },
        Kind::Simulated => None,
    };
    let missing = |ordinal, there: &[u32]| OpenError::Ordinal {
        name: name.to_owned(),
        ordinal,
        there: there.to_vec(),
    };
    if let Some(cards) = cards {
        let open_card = |&ordinal: &u32| {
            if !cards.contains(&ordinal) {
                return Err(missing(ordinal, &cards));
            }
            let driver: Arc<dyn Driver> = Arc::new(CudaDriver::open(ordinal)?);
            Ok(Opened { driver, fell_back: None })
        };
        return ordinals.iter().map(open_card).collect();
    }
    let (machine, fell_back) = match Kind::of(name)? {
        Kind::Auto => {
            let reason = CudaDriver::open(0).err().map(|error| error.to_string());
            let count = ordinals.iter().max().map_or(1, |most| most.saturating_add(1));
            (default_machine(count), reason)
        }
        _ => (name.to_owned(), None),
    };
    let mut opened: Vec<Option<Opened>> =
        simulated_all(&machine, true)?.into_iter().map(Some).collect();
    let there: Vec<u32> =
        opened.iter().flatten().map(|device| device.driver.info().ordinal).collect();
    let pick = |&ordinal: &u32| {
        let place = there.iter().position(|&other| other == ordinal);
        let device = place.and_then(|place| opened[place].take());
        let device = device.ok_or_else(|| missing(ordinal, &there))?;
        Ok(Opened { fell_back: fell_back.clone(), ..device })
    };
    ordinals.iter().map(pick).collect()
}

/// Name of the simulated machine of `auto` with so many cards.
#[cfg(feature = "sim")]
fn default_machine(count: u32) -> String {
    format!("sim:{DEFAULT_CARD}x{count}")
}

#[cfg(not(feature = "sim"))]
fn default_machine(_: u32) -> String {
    "sim".to_owned()
}

/// What a name stands for.
enum Kind {
    Auto,
    Simulated,
    Card(u32),
}

impl Kind {
    fn of(name: &str) -> Result<Kind, OpenError> {
        let unknown = || OpenError::Name { name: name.to_owned() };
        let (kind, detail) = match name.split_once(':') {
            Some((kind, detail)) => (kind, Some(detail)),
            None => (name, None),
        };
        match (kind, detail) {
            _ if is_cost_file(name) => Ok(Kind::Simulated),
            ("auto", None) => Ok(Kind::Auto),
            ("sim", _) => Ok(Kind::Simulated),
            ("cuda", ordinal) => {
                ordinal.unwrap_or("0").parse().map(Kind::Card).map_err(|_| unknown())
            }
            _ => Err(unknown()),
        }
    }
}

fn is_cost_file(name: &str) -> bool {
    name.ends_with(".toml")
}

#[cfg(feature = "sim")]
fn simulated(name: &str) -> Result<Arc<dyn Driver>, OpenError> {
    Ok(Arc::new(fresh::machine(name)?.open()))
}

#[cfg(feature = "sim")]
fn simulated_all(name: &str, mapped: bool) -> Result<Vec<Opened>, OpenError> {
    let mut machine = fresh::machine(name)?;
    if mapped {
        machine = machine.mapped_to(Arc::new(MappedMemory::new()?));
    }
    let opened = |device| Opened { driver: Arc::new(device), fell_back: None };
    Ok(machine.open_all().into_iter().map(opened).collect())
}

#[cfg(not(feature = "sim"))]
fn simulated_all(_: &str, _: bool) -> Result<Vec<Opened>, OpenError> {
    Err(OpenError::NoSimulator)
}

#[cfg(not(feature = "sim"))]
fn simulated(_: &str) -> Result<Arc<dyn Driver>, OpenError> {
    Err(OpenError::NoSimulator)
}
