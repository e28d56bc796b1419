//! Devices: opening one by name, the [`Driver`] trait and the types that its calls use.
//!
//! [`sim`] is a simulated card. [`CudaDriver`] is a card behind `libcuda`, loaded at run time.

use std::sync::Arc;

#[cfg(feature = "sim")]
use vramp_driver::sim::{CardModel, Simulator, UnknownCard};

pub use vramp_core::{AddrRange, DeviceAddr};
pub use vramp_cuda::{CudaDriver, EntryError, OpenError as CudaOpenError};
#[cfg(feature = "sim")]
pub use vramp_driver::sim;
pub use vramp_driver::{
    Call, Capabilities, CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverError,
    DriverResult, ErrorKind, Event, Graph, GraphExec, GraphNode, Handle, HostBuffer, HostMemory,
    HostSlice, Limits, MemoryInfo, MemoryLocation, PoolUsage, Stream, meter, wrapper,
};

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
    #[error("there is no device '{name}': use auto, sim, sim:CARD, cuda or cuda:N")]
    Name {
        /// Name that was given.
        name: String,
    },
    /// There is no simulated card of this name.
    #[cfg(feature = "sim")]
    #[error(transparent)]
    Card(#[from] UnknownCard),
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
const DEFAULT_CARD: &str = "h200";

/// Opens a device by name: `auto` (a card if there is one, else the simulator), `sim` or
/// `sim:CARD`, `cuda` or `cuda:N`.
///
/// # Errors
/// [`OpenError::Name`] and [`OpenError::Card`] for an unknown name, [`OpenError::Cuda`] if the card
/// cannot be opened, [`OpenError::NoSimulator`] in a build without the feature `sim`.
pub fn open(name: &str) -> Result<Opened, OpenError> {
    let unknown = || OpenError::Name { name: name.to_owned() };
    let (kind, detail) = match name.split_once(':') {
        Some((kind, detail)) => (kind, Some(detail)),
        None => (name, None),
    };
    match (kind, detail) {
        ("auto", None) => match CudaDriver::open(0) {
            Ok(card) => Ok(Opened { driver: Arc::new(card), fell_back: None }),
            Err(error) if !cfg!(feature = "sim") => Err(error.into()),
            Err(error) => {
                let driver = simulated(DEFAULT_CARD)?;
                Ok(Opened { driver, fell_back: Some(error.to_string()) })
            }
        },
        ("sim", card) => {
            let driver = simulated(card.unwrap_or(DEFAULT_CARD))?;
            Ok(Opened { driver, fell_back: None })
        }
        ("cuda", ordinal) => {
            let ordinal = ordinal.unwrap_or("0").parse().map_err(|_| unknown())?;
            Ok(Opened { driver: Arc::new(CudaDriver::open(ordinal)?), fell_back: None })
        }
        _ => Err(unknown()),
    }
}

#[cfg(feature = "sim")]
fn simulated(card: &str) -> Result<Arc<dyn Driver>, OpenError> {
    Ok(Arc::new(Simulator::builder().card(CardModel::find(card)?).build()))
}

#[cfg(not(feature = "sim"))]
fn simulated(_: &str) -> Result<Arc<dyn Driver>, OpenError> {
    Err(OpenError::NoSimulator)
}
