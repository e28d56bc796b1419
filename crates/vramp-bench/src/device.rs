//! Devices that are opened anew for each run.

use std::sync::Arc;

use vramp::device::{OpenError, Opened};
use vramp::{Bytes, Driver};
use vramp_driver::DeviceInfo;
use vramp_driver::sim::{CardModel, Contents, Simulator};

/// A device found by name, which is opened anew for each run.
#[derive(Clone)]
pub struct Device {
    kind: Kind,
    info: DeviceInfo,
    fell_back: Option<String>,
}

#[derive(Clone)]
enum Kind {
    /// Kept open, so that the card's context outlives a run.
    Card(Arc<dyn Driver>),
    Simulated(&'static CardModel),
}

/// A device without memory, streams or call counts of earlier runs.
pub struct FreshDevice {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// The same device, if it is a simulator.
    pub simulator: Option<Arc<Simulator>>,
}

impl Device {
    /// Finds a device by name, as [`vramp::open`] does.
    ///
    /// # Errors
    /// Those of [`vramp::open`].
    pub fn open(name: &str) -> Result<Device, OpenError> {
        let Opened { driver, fell_back, .. } = vramp::open(name)?;
        let info = driver.info().clone();
        let kind = if info.simulated {
            Kind::Simulated(CardModel::find(&info.id)?)
        } else {
            Kind::Card(driver)
        };
        Ok(Device { kind, info, fell_back })
    }

    /// Returns the device's name, limits and capabilities.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns why `auto` chose the simulator; `None` if it did not.
    pub fn fell_back(&self) -> Option<&str> {
        self.fell_back.as_deref()
    }

    /// Opens the device for one run. With `checked`, a simulator looks for unordered accesses.
    ///
    /// # Errors
    /// Those of [`vramp::open`].
    pub fn fresh(&self, checked: bool) -> Result<FreshDevice, OpenError> {
        Ok(match &self.kind {
            // The card's own pool and its high-water mark belong to one opening.
            Kind::Card(driver) => {
                let driver = vramp::open(&driver.info().id)?.driver;
                FreshDevice { driver, simulator: None }
            }
            Kind::Simulated(preset) => {
                let mut builder = Simulator::builder().card(preset);
                if checked {
                    builder = builder.checked();
                }
                FreshDevice::simulated(builder.build())
            }
        })
    }

    /// Opens the device for one run. A simulator has `memory`; a card has what it has.
    ///
    /// # Errors
    /// Those of [`vramp::open`].
    pub fn with_memory(&self, memory: Bytes) -> Result<FreshDevice, OpenError> {
        match &self.kind {
            Kind::Card(_) => self.fresh(false),
            Kind::Simulated(preset) => {
                let builder = Simulator::builder().card(preset).memory(memory);
                Ok(FreshDevice::simulated(builder.build()))
            }
        }
    }

    /// Opens the device for one run in which contents are compared: a simulator stores what is
    /// written and looks for unordered accesses.
    ///
    /// # Errors
    /// Those of [`vramp::open`].
    pub fn with_contents(&self) -> Result<FreshDevice, OpenError> {
        match &self.kind {
            Kind::Card(_) => self.fresh(true),
            Kind::Simulated(preset) => {
                let builder =
                    Simulator::builder().card(preset).contents(Contents::Stored).checked();
                Ok(FreshDevice::simulated(builder.build()))
            }
        }
    }
}

impl FreshDevice {
    fn simulated(simulator: Simulator) -> FreshDevice {
        let simulator = Arc::new(simulator);
        FreshDevice { driver: Arc::clone(&simulator) as _, simulator: Some(simulator) }
    }
}
