//! The measurements behind `vramp bench`.
//!
//! 1. [`Bench::new`] opens a device and sets how long to measure.
//! 2. Each module measures one thing. It takes plain options and returns typed rows.
//! 3. Rows are serialisable; the names of their fields are those of `vramp bench --json`.
//!
//! Allocators are compared within one run, in alternating batches, so that a disturbance of the
//! machine affects all of them. Results are medians.
//!
//! ```
//! use std::time::Duration;
//! use vramp::Bytes;
//! use vramp::peers::Preset;
//! use vramp_bench::{Bench, grow};
//!
//! let bench = Bench::new("sim:h200", Duration::from_millis(1))?;
//! let options = grow::Options {
//!     presets: vec![Preset::Vramp],
//!     total: Bytes::mib(64),
//!     block: Bytes::mib(16),
//! };
//! let rows = grow::run(&bench, &options)?;
//! assert_eq!(rows[0].blocks, 4);
//! # anyhow::Ok(())
//! ```
//!
//! | module | measures |
//! |---|---|
//! | [`hit`] | a malloc/free pair served from a cache |
//! | [`threads`] | pairs on several threads |
//! | [`grow`] | memory created for the first time |
//! | [`remap`] | fragmented memory remapped into one block |
//! | [`adversary`] | hostile patterns of requests, by counts |
//! | [`graphs`] | captured graphs that share an arena |
//! | [`disk`] | the disk tier beside plain file I/O |
//! | [`copy`] | the mover beside plain copies |
//! | [`spill`] | eviction and restore of spillable buffers |
//! | [`kv`] | arenas for caches: pages of many tensors |
//! | [`reserve`] | reservations, waits and budgeted mallocs |
//!
//! Deliberately absent: arguments, tables, progress, the environment.
#![forbid(unsafe_code)]

pub mod adversary;
pub mod calibrate;
pub mod copy;
mod cost;
pub mod disk;
pub mod graphs;
pub mod grow;
pub mod hit;
pub mod kv;
pub mod remap;
pub mod reserve;
pub mod sharing;
pub mod spill;
mod statistics;
mod subject;
pub mod threads;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use vramp::{Bytes, Driver};
use vramp_driver::DeviceInfo;

pub use cost::Cost;
pub use vramp::device::{Device, FreshDevice};

/// The device to measure on and the time to spend on each measurement.
#[derive(Clone)]
pub struct Bench {
    device: Device,
    duration: Duration,
}

impl Bench {
    /// Finds a device by name, as [`Device::open`] does.
    ///
    /// # Errors
    /// Those of [`Device::open`].
    pub fn new(device: &str, duration: Duration) -> Result<Bench> {
        Ok(Bench::on(Device::open(device)?, duration))
    }

    /// Measures on this device.
    pub fn on(device: Device, duration: Duration) -> Bench {
        Bench { device, duration }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the device's name, limits and capabilities.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// Returns how long to measure.
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// Returns the driver of a freshly opened device.
    fn driver(&self) -> Result<Arc<dyn Driver>> {
        Ok(self.device.fresh(false)?.driver)
    }

    /// Returns where driver times come from.
    pub fn time_source(&self) -> TimeSource {
        TimeSource::of(self.info())
    }

    /// Does `work` at least once, and again until `1 / shares` of the duration is over.
    fn repeat(&self, shares: usize, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        let share = self.duration / shares.max(1) as u32;
        let begun = Instant::now();
        loop {
            work()?;
            if begun.elapsed() >= share {
                return Ok(());
            }
        }
    }
}

/// Where a time comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeSource {
    /// Measured by the clock.
    Measured,
    /// Computed by the simulator's cost model.
    Modelled,
}

impl TimeSource {
    /// Returns the source of the driver times of a device.
    pub fn of(info: &DeviceInfo) -> TimeSource {
        if info.simulated { TimeSource::Modelled } else { TimeSource::Measured }
    }
}

impl fmt::Display for TimeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TimeSource::Measured => "measured",
            TimeSource::Modelled => "modelled",
        })
    }
}

/// Upper limit of blocks in one run; more would take minutes.
const BLOCKS_MAX: u64 = 1 << 20;

/// Returns how many blocks fit into `total`.
fn blocks_in(total: Bytes, block: Bytes) -> Result<u64> {
    match total.count().checked_div(block.count()) {
        Some(count @ 1..=BLOCKS_MAX) => Ok(count),
        Some(count @ 1..) => bail!(
            "{count} blocks are more than {BLOCKS_MAX}: give a smaller total or a larger block"
        ),
        _ => bail!("{total} holds no block of {block}: give a larger total or a smaller block"),
    }
}
