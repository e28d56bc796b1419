//! Random programs with bytes on the card, for minutes: what is read back is compared with what was written.
//!
//! Each takes a device by name, `auto` for a card if there is one. A simulated card stores real bytes, so it
//! is small, and checks that accesses are ordered.

pub mod kv;
pub mod sleep;
pub mod spill;
pub mod torture;

use std::sync::Arc;

use vramp::Bytes;
use vramp_driver::Driver;
use vramp_driver::sim::{Contents, Simulator};

type Error = Box<dyn std::error::Error + Send + Sync>;
/// What a soak returns: a byte that was wrong, an access without order, a call that failed.
pub type Outcome<T> = Result<T, Error>;

/// Reads a number of things to do, for an option of a program: none of them would find nothing, and pass.
///
/// # Errors
/// The text is not a whole number, or it is 0.
pub fn at_least_one(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => {
            Err("nothing would be checked: give 1 or more, or leave the option out".to_owned())
        }
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}: give a whole number of 1 or more")),
    }
}

/// A device to soak.
struct Ground {
    driver: Arc<dyn Driver>,
    simulator: Option<Arc<Simulator>>,
}

impl Ground {
    /// Opens a device. A simulated one is replaced by one that has so much memory and stores bytes.
    fn open(device: &str, simulated: Bytes) -> Outcome<Ground> {
        let driver = match device {
            "sim" => None,
            name => Some(vramp::open(name)?).filter(|driver| !driver.info().simulated),
        };
        Ok(match driver {
            Some(driver) => Ground { driver, simulator: None },
            None => {
                let card = Simulator::builder().memory(simulated).contents(Contents::Stored);
                let simulator = Arc::new(card.checked().build());
                Ground { driver: Arc::clone(&simulator) as _, simulator: Some(simulator) }
            }
        })
    }

    /// Returns `card` for a card, `simulated` for a simulated one.
    fn choose<T>(&self, card: T, simulated: T) -> T {
        if self.simulator.is_some() { simulated } else { card }
    }

    /// Checks that every access was ordered after what it depends on.
    fn check_order(&self) -> Outcome<()> {
        let Some(simulator) = &self.simulator else { return Ok(()) };
        if let Some(fault) = simulator.device_loss() {
            return Err(format!("the card is lost: {fault:?}").into());
        }
        match simulator.hazards().first() {
            Some(hazard) => Err(format!("accesses without order: {hazard:?}").into()),
            None => Ok(()),
        }
    }
}
