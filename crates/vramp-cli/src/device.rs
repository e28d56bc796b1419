//! The devices that commands run on.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args as ClapArgs;
use vramp::device::{DeviceOptions, read_costs};

pub use vramp_bench::{Device, FreshDevice};

/// Options of every command that runs on a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct DeviceArgs {
    /// Device: auto, sim, sim:CARD, FILE.toml (a card that `vramp calibrate` measured), cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// File with the costs of driver calls, as `vramp calibrate` writes it; simulates a card
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

impl DeviceArgs {
    /// Returns the options of the device, with the costs of the file.
    ///
    /// # Errors
    /// The file cannot be read, or has no usable costs.
    pub fn options(&self) -> Result<DeviceOptions> {
        let costs = self.costs.as_deref().map(read_costs).transpose()?;
        Ok(DeviceOptions { name: self.device.clone(), costs, usable: None })
    }

    /// Finds the device.
    ///
    /// # Errors
    /// Those of [`DeviceArgs::options`] and [`Device::with`].
    pub fn open(&self) -> Result<Device> {
        Ok(Device::with(self.options()?)?)
    }
}

/// Says on standard error which card is simulated because `auto` found none.
pub(crate) fn announce(device: &Device) {
    if let Some(notice) = notice(device) {
        // If standard error is closed, the result is printed without the notice.
        let _ = writeln!(io::stderr(), "{notice}");
    }
}

/// Says on standard error that the card is simulated that the recording shows.
pub(crate) fn announce_recorded(name: &str) {
    let _ = writeln!(io::stderr(), "Simulating an {name} instead, which the recording shows");
}

/// Returns the line that says which card is simulated because `auto` found none. `None` for a card,
/// or a simulated one that was named. `vramp info` shows the reason.
fn notice(device: &Device) -> Option<String> {
    device.fell_back().map(|_| simulating(&device.info().name))
}

/// Returns the line for a simulated card of this name.
pub(crate) fn simulating(name: &str) -> String {
    let card = name.trim_start_matches("NVIDIA ").trim_end_matches(" (simulated)");
    format!("No CUDA device found; simulating an {card} (choose one with --device sim:CARD)")
}
