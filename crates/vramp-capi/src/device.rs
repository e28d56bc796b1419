//! Opens a device by name, and keeps the CUDA driver so that it can adopt streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_cuda::{CudaDriver, OpenError};
use vramp_driver::Driver;

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct DeviceError(#[from] vramp_alloc::device::OpenError);

/// True if simulated cards that are opened from now on have the host's memory at their addresses.
static MAPS_SIMULATED: AtomicBool = AtomicBool::new(false);

/// Maps the host's memory to the simulated cards that are opened from now on.
pub(crate) fn map_simulated() {
    MAPS_SIMULATED.store(true, Ordering::Relaxed);
}

/// An open device.
#[derive(Clone)]
pub(crate) struct Device {
    pub driver: Arc<dyn Driver>,
    /// The CUDA driver. `None` on the simulator.
    pub card: Option<Arc<CudaDriver>>,
    /// Number of the card in this process. `None` on the simulator.
    pub ordinal: Option<u32>,
    /// True for a simulated card that has the host's memory at its addresses.
    pub is_mapped: bool,
}

impl Device {
    /// Opens `auto`, `sim`, `sim:CARD`, `sim:CARDxCOUNT:N`, `cuda` or `cuda:N`.
    pub fn open(name: &str) -> Result<Device, DeviceError> {
        let ordinal = match name.strip_prefix("cuda") {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix(':').and_then(|number| number.parse().ok()),
            None => None,
        };
        match (name, ordinal) {
            ("auto", _) => match CudaDriver::open(0) {
                Ok(card) => Ok(Device::on(card, 0)),
                Err(_) => Device::named("sim"),
            },
            (_, Some(ordinal)) => {
                let card =
                    CudaDriver::open(ordinal).map_err(vramp_alloc::device::OpenError::from)?;
                Ok(Device::on(card, ordinal))
            }
            _ => Device::named(name),
        }
    }

    /// Opens all devices of a machine, in the order of their ordinals: every card for `cuda` and `auto`,
    /// COUNT simulated cards for `sim:CARDxCOUNT`, and the one device of another name.
    pub fn open_all(name: &str) -> Result<Vec<Device>, DeviceError> {
        let cards = match name {
            "auto" => vramp_cuda::devices().unwrap_or_default().len(),
            "cuda" => vramp_cuda::devices().map_err(vramp_alloc::device::OpenError::from)?.len(),
            _ => 0,
        };
        if cards > 0 {
            return (0..cards).map(|ordinal| Device::open(&format!("cuda:{ordinal}"))).collect();
        }
        if name.starts_with("cuda") {
            return Ok(vec![Device::open(name)?]);
        }
        let is_mapped = MAPS_SIMULATED.load(Ordering::Relaxed);
        let opened = match is_mapped {
            true => vramp_alloc::device::open_all_mapped(name)?,
            false => vramp_alloc::device::open_all(name)?,
        };
        let device =
            |one: vramp_alloc::device::Opened| Device { is_mapped, ..Device::of(one.driver) };
        Ok(opened.into_iter().map(device).collect())
    }

    /// Returns a device that is open. It adopts no streams of a caller: each becomes one of its own.
    pub fn of(driver: Arc<dyn Driver>) -> Device {
        Device { driver, card: None, ordinal: None, is_mapped: false }
    }

    fn on(card: CudaDriver, ordinal: u32) -> Device {
        let card = Arc::new(card);
        let driver = Arc::clone(&card) as Arc<dyn Driver>;
        Device { driver, card: Some(card), ordinal: Some(ordinal), is_mapped: false }
    }

    fn named(name: &str) -> Result<Device, DeviceError> {
        if !MAPS_SIMULATED.load(Ordering::Relaxed) {
            return Ok(Device::of(vramp_alloc::open(name)?.driver));
        }
        let driver = vramp_alloc::device::open_mapped(name)?.driver;
        Ok(Device { is_mapped: driver.info().simulated, ..Device::of(driver) })
    }
}

/// Returns false if the machine has no driver library or no card that this process may use. True
/// for a card that cannot be opened.
pub(crate) fn has_card() -> bool {
    match vramp_cuda::devices() {
        Ok(found) => !found.is_empty(),
        Err(OpenError::NoLibrary { .. } | OpenError::StubLibrary | OpenError::NoDevice) => false,
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_devices_of_a_machine_are_opened_in_order() {
        let peers: Vec<_> = Device::open_all("sim:h200x2").unwrap();
        let peers: Vec<_> = peers.iter().map(|device| device.driver.info().peers.clone()).collect();
        assert_eq!(peers, [[1], [0]]);
        for (name, count) in [("sim", 1), ("sim:h200x2:1", 1), ("sim:a100-80gx3", 3)] {
            assert_eq!(Device::open_all(name).unwrap().len(), count, "{name}");
        }
        for name in ["", "gpu", "cuda:x", "sim:none", "sim:h200x0", "sim:h200x65"] {
            assert!(Device::open_all(name).is_err(), "'{name}'");
        }
    }

    #[test]
    fn names_are_those_of_the_rust_interface() {
        assert!(Device::open("sim:h200").is_ok_and(|device| device.card.is_none()));
        assert!(Device::open("auto").is_ok());
        for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "sim:", "sim:none", "auto:0", "cuda0"]
        {
            assert!(Device::open(name).is_err(), "'{name}'");
        }
    }
}
