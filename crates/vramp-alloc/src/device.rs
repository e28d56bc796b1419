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

/// Error of [`open`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The name has no known form.
    #[error(
        "there is no device '{name}': use auto, sim, sim:CARD, sim:CARDxCOUNT, sim:CARDxCOUNT:N, cuda \
         or cuda:N, or a cost file FILE.toml{}",
        meant(name)
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

/// The card that `sim` simulates.
#[cfg(feature = "sim")]
const DEFAULT_CARD: &str = "h200";

/// Opens a device by name: `auto` and `cuda` (card 0), `cuda:N`, `sim` or `sim:CARD`, or a cost file
/// `FILE.toml` that describes a card to simulate.
/// `sim:CARDxCOUNT:N`, such as `sim:h200x2:1`, is device N of a machine of its own with COUNT cards;
/// without `:N` it is the first one. [`open_all`] opens all of one machine.
///
/// Nothing but a name that begins with `sim` or ends with `.toml` opens a simulator: on a machine
/// without a card `auto` is an error.
///
/// # Errors
/// [`OpenError::Name`] and [`OpenError::Card`] for an unknown name, [`OpenError::Cuda`] if the card
/// cannot be opened, [`OpenError::NoSimulator`] in a build without the feature `sim`.
pub fn open(name: &str) -> Result<Arc<dyn Driver>, OpenError> {
    match Kind::of(name)? {
        Kind::Simulated => simulated(name),
        Kind::Card(ordinal) => Ok(Arc::new(CudaDriver::open(ordinal.unwrap_or(0))?)),
    }
}

/// Opens a device as [`open`] does. The addresses of a simulated card are the process's own, with the
/// host's memory: a program may read and write what it allocates.
///
/// # Errors
/// As of [`open`], and [`OpenError::HostMemory`].
#[cfg(feature = "sim")]
pub fn open_mapped(name: &str) -> Result<Arc<dyn Driver>, OpenError> {
    match Kind::of(name)? {
        Kind::Simulated => {
            let memory = Arc::new(MappedMemory::new()?);
            Ok(Arc::new(fresh::machine(name)?.mapped_to(memory).open()))
        }
        Kind::Card(_) => open(name),
    }
}

/// Opens all devices of a machine, in the order of their ordinals: every card for `cuda` and `auto`,
/// COUNT simulated cards for `sim:CARDxCOUNT`, and the one device of any other name. Simulated devices
/// of one call can access each other's memory, if it is granted; those of two calls cannot.
///
/// ```
/// let devices = vramp_alloc::device::open_all("sim:h200x2")?;
/// assert_eq!(devices.len(), 2);
/// assert_eq!(devices[1].info().peers, [0]);
/// # Ok::<(), vramp_alloc::device::OpenError>(())
/// ```
///
/// # Errors
/// As of [`open`].
pub fn open_all(name: &str) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
    open_devices(name, false)
}

/// Opens devices as [`open_all`] does, and simulated ones mapped as [`open_mapped`] does.
///
/// # Errors
/// As of [`open_mapped`].
#[cfg(feature = "sim")]
pub fn open_all_mapped(name: &str) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
    open_devices(name, true)
}

fn open_devices(name: &str, mapped: bool) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
    match cards(name)? {
        Some(cards) => cards.into_iter().map(open_card).collect(),
        None => simulated_all(name, mapped),
    }
}

/// Opens the devices with these ordinals of one machine, in this order, and no other card. The
/// addresses of simulated cards are the process's own, with the host's memory.
///
/// ```
/// let devices = vramp_alloc::device::open_ordinals_mapped("sim:h200x4", &[2, 0])?;
/// assert_eq!([devices[0].info().ordinal, devices[1].info().ordinal], [2, 0]);
/// # Ok::<(), vramp_alloc::device::OpenError>(())
/// ```
///
/// # Errors
/// As of [`open`], [`OpenError::HostMemory`], and [`OpenError::Ordinal`] if the machine has no such
/// device or it is given twice.
pub fn open_ordinals_mapped(
    name: &str,
    ordinals: &[u32],
) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
    let missing = |ordinal, there: &[u32]| OpenError::Ordinal {
        name: name.to_owned(),
        ordinal,
        there: there.to_vec(),
    };
    if let Some(cards) = cards(name)? {
        let open = |&ordinal: &u32| match cards.contains(&ordinal) {
            true => open_card(ordinal),
            false => Err(missing(ordinal, &cards)),
        };
        return ordinals.iter().map(open).collect();
    }
    let mut devices: Vec<Option<Arc<dyn Driver>>> =
        simulated_all(name, true)?.into_iter().map(Some).collect();
    let there: Vec<u32> = devices.iter().flatten().map(|device| device.info().ordinal).collect();
    let pick = |&ordinal: &u32| {
        let place = there.iter().position(|&other| other == ordinal);
        let device = place.and_then(|place| devices[place].take());
        device.ok_or_else(|| missing(ordinal, &there))
    };
    ordinals.iter().map(pick).collect()
}

/// Returns the ordinals of the cards that a name stands for, and `None` for a simulated machine.
fn cards(name: &str) -> Result<Option<Vec<u32>>, OpenError> {
    match Kind::of(name)? {
        Kind::Simulated => Ok(None),
        Kind::Card(Some(ordinal)) => Ok(Some(vec![ordinal])),
        Kind::Card(None) => match vramp_cuda::devices()?.len() {
            0 => Err(CudaOpenError::NoDevice.into()),
            count => Ok(Some((0..count as u32).collect())),
        },
    }
}

fn open_card(ordinal: u32) -> Result<Arc<dyn Driver>, OpenError> {
    Ok(Arc::new(CudaDriver::open(ordinal)?))
}

/// Returns a hint, if a name is that of a card without what says that it is to be simulated.
fn meant(name: &str) -> String {
    #[cfg(feature = "sim")]
    if fresh::machine(&format!("sim:{name}")).is_ok() {
        return format!("; did you mean 'sim:{name}'?");
    }
    let _ = name;
    String::new()
}

/// What a name stands for.
enum Kind {
    Simulated,
    /// A card. `None`: the name has no number, so that it stands for card 0, or for every card.
    Card(Option<u32>),
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
            ("auto" | "cuda", None) => Ok(Kind::Card(None)),
            ("sim", _) => Ok(Kind::Simulated),
            ("cuda", Some(ordinal)) => {
                ordinal.parse().map(|ordinal| Kind::Card(Some(ordinal))).map_err(|_| unknown())
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
fn simulated_all(name: &str, mapped: bool) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
    let mut machine = fresh::machine(name)?;
    if mapped {
        machine = machine.mapped_to(Arc::new(MappedMemory::new()?));
    }
    let driver = |device| -> Arc<dyn Driver> { Arc::new(device) };
    Ok(machine.open_all().into_iter().map(driver).collect())
}

#[cfg(not(feature = "sim"))]
fn simulated_all(_: &str, _: bool) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
    Err(OpenError::NoSimulator)
}

#[cfg(not(feature = "sim"))]
fn simulated(_: &str) -> Result<Arc<dyn Driver>, OpenError> {
    Err(OpenError::NoSimulator)
}
