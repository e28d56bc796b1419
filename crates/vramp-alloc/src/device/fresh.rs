//! Devices that are opened anew for each run.
//!
//! 1. [`Device::with`] finds a device by its name, once, and applies the caller's costs and memory.
//! 2. [`Device::fresh`] and the others open it without memory, streams or call counts of earlier runs.
//!
//! Deliberately absent: running anything.

use std::path::Path;
use std::sync::Arc;

use vramp_core::Bytes;
use vramp_driver::sim::{CardModel, Contents, CostTable, DEVICES_MAX, Simulator, SimulatorBuilder};
use vramp_driver::{DeviceInfo, Driver};
use vramp_host::MappedMemory;

use super::{DEFAULT_CARD, Kind, OpenError, is_cost_file, open};
use vramp_cuda::CudaDriver;

/// Which device to open, and what of a simulated card to replace.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Name of the device, as of [`open`].
    pub name: String,
    /// Costs of driver calls. If they describe a card and `name` does not name one, that card is
    /// simulated.
    pub costs: Option<CostTable>,
    /// Memory that tensors can use, of a simulated card.
    pub usable: Option<Bytes>,
}

impl Default for DeviceOptions {
    /// Returns the options of `auto`.
    fn default() -> DeviceOptions {
        DeviceOptions { name: "auto".to_owned(), costs: None, usable: None }
    }
}

/// A device found by name, which is opened anew for each run.
///
/// ```
/// use vramp_alloc::Bytes;
/// use vramp_alloc::device::{Device, DeviceOptions};
/// let options = DeviceOptions {
///     name: "sim:rtx4090".to_owned(),
///     usable: Some(Bytes::gib(20)),
///     ..DeviceOptions::default()
/// };
/// let device = Device::with(options)?;
/// let run = device.fresh(false)?;
/// assert_eq!(run.driver.memory_info()?.free, Bytes::gib(20));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Device {
    source: Source,
    info: DeviceInfo,
}

#[derive(Clone)]
enum Source {
    /// Kept open, so that the card's context outlives a run.
    Card(Arc<dyn Driver>),
    Simulated(Box<Machine>),
}

/// A device without memory, streams or call counts of earlier runs.
pub struct FreshDevice {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// The same device, if it is a simulator.
    pub simulator: Option<Arc<Simulator>>,
}

impl Device {
    /// Opens the device and the cards that it has links to, anew. The device is the first.
    ///
    /// # Errors
    /// A card could not be opened.
    pub fn fresh_with_peers(&self) -> Result<Vec<Arc<dyn Driver>>, OpenError> {
        match &self.source {
            Source::Card(driver) => {
                let peers = driver.info().peers.iter().map(|&peer| {
                    let driver: Arc<dyn Driver> = Arc::new(CudaDriver::open(peer)?);
                    Ok(driver)
                });
                [Ok(Arc::clone(driver))].into_iter().chain(peers).collect()
            }
            Source::Simulated(machine) => {
                let Machine { builder, devices, ordinal } = (**machine).clone();
                let mut cards: Vec<Option<Simulator>> =
                    builder.build_machine(devices).into_iter().map(Some).collect();
                let first = cards[ordinal.unwrap_or(0)].take().expect("each is taken once");
                let peers = first.info().peers.clone();
                let mut opened: Vec<Arc<dyn Driver>> = vec![Arc::new(first)];
                for peer in peers {
                    let card = cards[peer as usize].take().expect("no card is its own peer");
                    opened.push(Arc::new(card));
                }
                Ok(opened)
            }
        }
    }
}

/// Reads a cost file.
///
/// # Errors
/// [`OpenError::CostFile`] and [`OpenError::Costs`] name the file.
pub fn read_costs(path: &Path) -> Result<CostTable, OpenError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| OpenError::CostFile { path: path.to_owned(), error })?;
    CostTable::from_toml(&text).map_err(|error| OpenError::Costs { path: path.to_owned(), error })
}

/// A simulated machine, and which of its devices a name stands for.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub builder: SimulatorBuilder,
    devices: usize,
    /// Device of the name; `None` if it names the whole machine.
    ordinal: Option<usize>,
}

impl Machine {
    /// Maps the host's memory at the addresses of all devices.
    pub fn mapped_to(mut self, host: Arc<MappedMemory>) -> Machine {
        self.builder = self.builder.mapped_to(host);
        self
    }

    /// Returns the device that the name stands for, or the first one.
    pub fn open(self) -> Simulator {
        let ordinal = self.ordinal.unwrap_or(0);
        self.builder.build_machine(self.devices).swap_remove(ordinal)
    }

    /// Returns the device that the name stands for, or all of them.
    pub fn open_all(self) -> Vec<Simulator> {
        match self.ordinal {
            Some(_) => vec![self.open()],
            None => self.builder.build_machine(self.devices),
        }
    }
}

/// Returns the simulated machine of a name: `sim`, `sim:CARD`, `sim:CARDxCOUNT`, `sim:CARDxCOUNT:N`, or
/// a cost file that describes a card.
pub(super) fn machine(name: &str) -> Result<Machine, OpenError> {
    let one = |builder| Machine { builder, devices: 1, ordinal: None };
    if !is_cost_file(name) {
        let card = name.strip_prefix("sim:").unwrap_or(DEFAULT_CARD);
        let unknown = match CardModel::find(card) {
            Ok(model) => return Ok(one(Simulator::builder().card(model))),
            Err(unknown) => unknown,
        };
        let Some((card, devices, ordinal)) = several(card) else { return Err(unknown.into()) };
        let fits = (1..=DEVICES_MAX).contains(&devices) && ordinal.is_none_or(|it| it < devices);
        if !fits {
            return Err(OpenError::Devices { name: name.to_owned() });
        }
        let builder = Simulator::builder().card(CardModel::find(card)?);
        return Ok(Machine { builder, devices, ordinal });
    }
    let costs = read_costs(Path::new(name))?;
    match costs.memory {
        Some(_) => Ok(one(Simulator::builder().described_by(costs))),
        None => Err(OpenError::NoMemory { path: name.into() }),
    }
}

/// Returns card, count and ordinal of `CARDxCOUNT` and `CARDxCOUNT:N`.
fn several(name: &str) -> Option<(&str, usize, Option<usize>)> {
    let (machine, ordinal) = match name.split_once(':') {
        Some((machine, ordinal)) => (machine, Some(ordinal.parse().ok()?)),
        None => (name, None),
    };
    let (card, count) = machine.rsplit_once('x')?;
    Some((card, count.parse().ok()?, ordinal))
}

impl Device {
    /// Finds a device by name, as [`open`] does.
    ///
    /// # Errors
    /// Those of [`open`].
    pub fn open(name: &str) -> Result<Device, OpenError> {
        Device::with(DeviceOptions { name: name.to_owned(), ..DeviceOptions::default() })
    }

    /// Finds a device by name and applies the options.
    ///
    /// # Errors
    /// Those of [`open`], and [`OpenError::NotSimulated`] if costs or usable memory are given for a
    /// card.
    pub fn with(options: DeviceOptions) -> Result<Device, OpenError> {
        let DeviceOptions { name, costs, usable } = options;
        let given = match (&costs, usable) {
            (Some(_), _) => Some("costs"),
            (None, Some(_)) => Some("usable memory"),
            (None, None) => None,
        };
        match (Kind::of(&name)?, given) {
            (Kind::Simulated, _) => Ok(Device::simulated(customized(&name, costs, usable)?)),
            (Kind::Card(_), Some(what)) => Err(OpenError::NotSimulated { name, what }),
            (Kind::Card(_), None) => {
                let driver = open(&name)?;
                let info = driver.info().clone();
                Ok(Device { source: Source::Card(driver), info })
            }
        }
    }

    fn simulated(machine: Machine) -> Device {
        let info = machine.clone().open().info().clone();
        Device { source: Source::Simulated(Box::new(machine)), info }
    }

    /// Returns the device's name, limits and capabilities.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Opens the device for one run. With `checked`, a simulator looks for unordered accesses.
    ///
    /// # Errors
    /// Those of [`open`].
    pub fn fresh(&self, checked: bool) -> Result<FreshDevice, OpenError> {
        self.build(|builder| if checked { builder.checked() } else { builder })
    }

    /// Opens the device for one run. A simulator has `memory`, all of it usable; a card has what it
    /// has.
    ///
    /// # Errors
    /// Those of [`open`].
    pub fn with_memory(&self, memory: Bytes) -> Result<FreshDevice, OpenError> {
        self.build(|builder| builder.memory(memory))
    }

    /// Opens the device for one run in which contents are compared: a simulator stores what is
    /// written and looks for unordered accesses.
    ///
    /// # Errors
    /// Those of [`open`].
    pub fn with_contents(&self) -> Result<FreshDevice, OpenError> {
        self.build(|builder| builder.contents(Contents::Stored).checked())
    }

    fn build(
        &self,
        change: impl FnOnce(SimulatorBuilder) -> SimulatorBuilder,
    ) -> Result<FreshDevice, OpenError> {
        match &self.source {
            // The card's own pool and its high-water mark belong to one opening.
            Source::Card(driver) => {
                let driver = open(&driver.info().id)?;
                Ok(FreshDevice { driver, simulator: None })
            }
            Source::Simulated(machine) => {
                let mut machine = (**machine).clone();
                machine.builder = change(machine.builder);
                let simulator = Arc::new(machine.open());
                Ok(FreshDevice { driver: Arc::clone(&simulator) as _, simulator: Some(simulator) })
            }
        }
    }
}

/// Returns the simulated machine of a name with the caller's costs and memory of each card.
fn customized(
    name: &str,
    costs: Option<CostTable>,
    usable: Option<Bytes>,
) -> Result<Machine, OpenError> {
    let mut machine = machine(name)?;
    if let Some(costs) = costs {
        let builder = machine.builder;
        // The name `sim` selects no card, so the file may name one.
        machine.builder =
            if name == "sim" { builder.described_by(costs) } else { builder.costs(costs) };
    }
    if let Some(usable) = usable {
        machine.builder = machine.builder.usable(usable);
    }
    Ok(machine)
}
