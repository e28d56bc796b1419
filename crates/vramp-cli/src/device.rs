//! The devices that commands run on.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args as ClapArgs;
use vramp::device::{CudaOpenError, DeviceOptions, OpenError, read_costs};

pub use vramp::device::{Device, FreshDevice};

/// The device of a command for which none is named.
const AUTO: &str = "auto";

/// Options of every command that runs on a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct DeviceArgs {
    /// Device: auto (the first card), sim, sim:CARD, FILE.toml (a card that `vramp calibrate` measured),
    /// cuda or cuda:N
    #[arg(long, default_value = AUTO, env = "VRAMP_DEVICE")]
    pub device: String,
    /// File with the costs of driver calls, as `vramp calibrate` writes it; simulates a card
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

/// The device of a command about recordings.
pub(crate) struct Replaying {
    /// The device.
    pub device: Device,
    /// True for a simulated card that no argument named, because the machine has none. A recording may then choose
    /// another.
    pub stands_in: bool,
}

impl DeviceArgs {
    /// Returns the options of the device, with the costs of the file.
    ///
    /// # Errors
    /// The file cannot be read, or has no usable costs.
    pub fn options(&self) -> Result<DeviceOptions> {
        let costs = self.costs.as_deref().map(read_costs).transpose()?;
        // Costs are of a simulated card.
        let name = if costs.is_some() && self.device == AUTO { "sim" } else { &self.device };
        Ok(DeviceOptions { name: name.to_owned(), costs, usable: None })
    }

    /// Finds the device.
    ///
    /// # Errors
    /// Those of [`DeviceArgs::options`] and [`Device::with`]: also where no card is found and no simulated one is
    /// named.
    pub fn open(&self) -> Result<Device> {
        Ok(Device::with(self.options()?)?)
    }

    /// Finds the device of a command about recordings, which need no card: where none is named and none is there, one
    /// is simulated, and standard error says so.
    ///
    /// # Errors
    /// As of [`DeviceArgs::open`].
    pub(crate) fn open_for_recordings(&self) -> Result<Replaying> {
        let options = self.options()?;
        let chosen = |device| Ok(Replaying { device, stands_in: false });
        if options.name != AUTO {
            return chosen(Device::with(options)?);
        }
        let reason = match Device::with(options) {
            Ok(card) => return chosen(card),
            Err(OpenError::Cuda(reason)) => reason,
            Err(other) => return Err(other.into()),
        };
        let device = Device::open("sim")?;
        announce(&simulating(&device.info().name, &reason));
        Ok(Replaying { device, stands_in: true })
    }
}

/// Says on standard error that the card is simulated that the recording shows.
pub(crate) fn announce_recorded(name: &str) {
    announce(&format!("Simulating an {name} instead, which the recording shows"));
}

/// Writes a notice. If standard error is closed, the result is printed without it.
fn announce(notice: &str) {
    let _ = writeln!(io::stderr(), "{notice}");
}

/// Returns the line for a simulated card of this name.
fn simulating(name: &str, reason: &CudaOpenError) -> String {
    let card = name.trim_start_matches("NVIDIA ").trim_end_matches(" (simulated)");
    let why = match reason {
        CudaOpenError::NoLibrary { .. } | CudaOpenError::StubLibrary | CudaOpenError::NoDevice => {
            "No CUDA device found".to_owned()
        }
        broken => format!("The card cannot be used ({broken})"),
    };
    format!("{why}; simulating an {card} (choose one with --device sim:CARD)")
}
