//! Devices to replay on: each run gets one that nobody used before.

use std::sync::Arc;

use vramp_alloc::Driver;
use vramp_alloc::device::{OpenError, Opened};
use vramp_driver::sim::{Contents, Preset, Simulator};

/// A device to replay on.
pub struct Device {
    kind: Kind,
    /// Why `auto` did not take a card, if it did not.
    pub fell_back: Option<String>,
}

enum Kind {
    /// Kept open, so that the card's context lives on between runs.
    Card(Arc<dyn Driver>),
    Simulated(&'static Preset),
}

/// A device as one run gets it.
pub struct Fresh {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// The same device, where it is a simulator.
    pub simulator: Option<Arc<Simulator>>,
}

impl Device {
    /// Finds a device by name, as [`vramp_alloc::open`] does.
    ///
    /// # Errors
    /// What [`vramp_alloc::open`] says.
    pub fn open(name: &str) -> Result<Device, OpenError> {
        let Opened { driver, fell_back, .. } = vramp_alloc::open(name)?;
        let kind = if driver.info().simulated {
            Kind::Simulated(Preset::find(&driver.info().id)?)
        } else {
            Kind::Card(driver)
        };
        Ok(Device { kind, fell_back })
    }

    /// The device for one run, without memory, streams or counts of earlier ones. With `checked`,
    /// a simulator looks for accesses without order.
    ///
    /// # Errors
    /// What [`vramp_alloc::open`] says.
    pub fn fresh(&self, checked: bool) -> Result<Fresh, OpenError> {
        Ok(match &self.kind {
            // The card's own pool, and its high-water mark, belong to one opening.
            Kind::Card(driver) => {
                Fresh { driver: vramp_alloc::open(&driver.info().id)?.driver, simulator: None }
            }
            Kind::Simulated(preset) => {
                let mut builder = Simulator::builder().card(preset);
                if checked {
                    builder = builder.checked();
                }
                let simulator = Arc::new(builder.build());
                Fresh { driver: Arc::clone(&simulator) as _, simulator: Some(simulator) }
            }
        })
    }

    /// The same, with a simulator that keeps what is written, so that contents can be compared, and
    /// looks for accesses without order.
    ///
    /// # Errors
    /// What [`vramp_alloc::open`] says.
    pub fn with_contents(&self) -> Result<Fresh, OpenError> {
        match &self.kind {
            Kind::Card(_) => self.fresh(true),
            Kind::Simulated(preset) => {
                let builder =
                    Simulator::builder().card(preset).contents(Contents::Stored).checked();
                let simulator = Arc::new(builder.build());
                Ok(Fresh { driver: Arc::clone(&simulator) as _, simulator: Some(simulator) })
            }
        }
    }
}
