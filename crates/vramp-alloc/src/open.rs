//! Opening a device by name.

use std::sync::Arc;

use vramp_cuda::CudaDriver;
use vramp_driver::Driver;
use vramp_driver::sim::{Preset, Simulator, UnknownPreset};

/// A device, and how it came to be this one.
pub struct Opened {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// Why `auto` did not take a card, if it did not.
    pub fell_back: Option<String>,
}

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The name is of no known form.
    #[error("there is no device '{name}': use auto, sim, sim:CARD, cuda or cuda:N")]
    Name {
        /// What was given.
        name: String,
    },
    /// No such simulated card.
    #[error(transparent)]
    Card(#[from] UnknownPreset),
    /// The card cannot be opened. The text has the cause in it, so the cause is no source: who
    /// prints all sources would print it twice.
    #[error("{0}; use 'sim' for a simulated card")]
    Cuda(vramp_cuda::OpenError),
}

impl From<vramp_cuda::OpenError> for OpenError {
    fn from(error: vramp_cuda::OpenError) -> OpenError {
        OpenError::Cuda(error)
    }
}

/// The simulated card that stands in where none is named.
const DEFAULT_CARD: &str = "h200";

/// Opens a device by name: `auto` (a card if there is one, else the simulator), `sim` or
/// `sim:CARD`, `cuda` or `cuda:N`.
pub fn open(name: &str) -> Result<Opened, OpenError> {
    let refuse = || OpenError::Name { name: name.to_owned() };
    let (kind, detail) = match name.split_once(':') {
        Some((kind, detail)) => (kind, Some(detail)),
        None => (name, None),
    };
    match (kind, detail) {
        ("auto", None) => match CudaDriver::open(0) {
            Ok(card) => Ok(Opened { driver: Arc::new(card), fell_back: None }),
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
            let ordinal = ordinal.unwrap_or("0").parse().map_err(|_| refuse())?;
            Ok(Opened { driver: Arc::new(CudaDriver::open(ordinal)?), fell_back: None })
        }
        _ => Err(refuse()),
    }
}

fn simulated(card: &str) -> Result<Arc<dyn Driver>, UnknownPreset> {
    Ok(Arc::new(Simulator::builder().card(Preset::find(card)?).build()))
}
