//! Opens a device by name, and keeps the CUDA driver so that it can adopt streams.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vramp_alloc::Allocator;
use vramp_alloc::kind::{Classify, Kind};
use vramp_cuda::{CudaDriver, OpenError as CudaOpenError};
use vramp_driver::Driver;

use crate::environment;

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error(transparent)]
    Open(#[from] vramp_alloc::device::OpenError),
    #[error("{0}; for a simulated card name 'sim', or set VRAMP_DEVICE=sim")]
    Card(#[from] CudaOpenError),
    #[error("the simulated machine '{name}' has {cards} cards and no number {ordinal}")]
    NoSuchCard { name: String, cards: usize, ordinal: usize },
}

impl Classify for DeviceError {
    fn kind(&self) -> Kind {
        Kind::Device
    }
}

/// Cards of simulated machines, by the name of the machine and whether its cards are mapped.
type Machines = BTreeMap<(String, bool), (u64, Vec<Arc<dyn Driver>>)>;

/// The simulated machines that are open.
static MACHINES: Mutex<Machines> = Mutex::new(BTreeMap::new());

/// Number of the next simulated machine. This one has the number 0.
static NEXT_MACHINE: AtomicU64 = AtomicU64::new(1);

/// A card: the number of its machine, and its ordinal there.
type CardNumber = (u64, u32);

/// The open allocators, in the order in which they were opened.
static LISTED: Mutex<BTreeMap<u64, (CardNumber, Weak<Allocator>)>> = Mutex::new(BTreeMap::new());

/// Number of the next allocator in that list.
static NEXT_LISTED: AtomicU64 = AtomicU64::new(0);

/// Keeps an allocator in the list of [`Device::others`] until it is dropped.
pub(crate) struct Listed(u64);

impl Drop for Listed {
    fn drop(&mut self) {
        LISTED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

fn new_machine() -> u64 {
    NEXT_MACHINE.fetch_add(1, Ordering::Relaxed)
}

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
    /// Cards with the same number are of one machine.
    machine: u64,
}

impl Device {
    /// Lists an allocator of the device, to be found by [`Device::others`]. O(log open allocators).
    pub fn list(&self, allocator: &Arc<Allocator>) -> Listed {
        let number = NEXT_LISTED.fetch_add(1, Ordering::Relaxed);
        let card = (self.machine, self.driver.info().ordinal);
        let entry = (card, Arc::downgrade(allocator));
        LISTED.lock().unwrap_or_else(PoisonError::into_inner).insert(number, entry);
        Listed(number)
    }

    /// Returns the oldest open allocator of each of these cards of the machine, and holds no other one even for a
    /// moment: what is held cannot be closed. O(open allocators) for each card, none without cards.
    pub fn others(&self, ordinals: impl IntoIterator<Item = u32>) -> Vec<Arc<Allocator>> {
        let oldest = |ordinal| {
            let listed = LISTED.lock().unwrap_or_else(PoisonError::into_inner);
            let mut of_card = listed.values().filter(|(card, _)| *card == (self.machine, ordinal));
            of_card.find_map(|(_, allocator)| allocator.upgrade())
        };
        ordinals.into_iter().filter_map(oldest).collect()
    }

    /// Opens `auto`, `sim`, `sim:CARD`, `sim:CARDxCOUNT:N`, `cuda` or `cuda:N`. `auto` is what VRAMP_DEVICE names,
    /// and card 0 without it.
    pub fn open(name: &str) -> Result<Device, DeviceError> {
        let name = &*meant(name);
        let ordinal = match name.strip_prefix("cuda") {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix(':').and_then(|number| number.parse().ok()),
            None => None,
        };
        match ordinal {
            Some(ordinal) => Ok(Device::on(CudaDriver::open(ordinal)?, ordinal)),
            None => Device::named(name),
        }
    }

    /// Opens all devices of a machine, in the order of their ordinals: every card for `cuda`, COUNT simulated cards
    /// for `sim:CARDxCOUNT`, and the one device of another name. `auto` is as of [`Device::open`].
    pub fn open_all(name: &str) -> Result<Vec<Device>, DeviceError> {
        let name = &*meant(name);
        if name == "cuda" {
            let cards = vramp_cuda::devices()?.len();
            // Opening the first of none says why there is none.
            let ordinals = 0..cards.max(1);
            return ordinals.map(|ordinal| Device::open(&format!("cuda:{ordinal}"))).collect();
        }
        if name.starts_with("cuda") {
            return Ok(vec![Device::open(name)?]);
        }
        let is_mapped = MAPS_SIMULATED.load(Ordering::Relaxed);
        let opened = match is_mapped {
            true => vramp_alloc::device::open_all_mapped(name)?,
            false => vramp_alloc::device::open_all(name)?,
        };
        let machine = new_machine();
        let device = |one: Arc<dyn Driver>| Device { is_mapped, machine, ..Device::of(one) };
        Ok(opened.into_iter().map(device).collect())
    }

    /// Opens card `ordinal` of the device that a setting names. Cards of a simulated machine, `sim:CARDxCOUNT`, are
    /// those of one machine in the process, so they can access each other; any other simulated card is a machine
    /// of its own each time.
    pub fn numbered(name: &str, ordinal: usize) -> Result<Device, DeviceError> {
        match name {
            "" | "cuda" => Device::open(&format!("cuda:{ordinal}")),
            machine if is_machine(machine) => Device::of_machine(machine, ordinal),
            simulated => Device::open(simulated),
        }
    }

    fn of_machine(name: &str, ordinal: usize) -> Result<Device, DeviceError> {
        let is_mapped = MAPS_SIMULATED.load(Ordering::Relaxed);
        let mut machines = MACHINES.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (name.to_owned(), is_mapped);
        if !machines.contains_key(&key) {
            let opened = match is_mapped {
                true => vramp_alloc::device::open_all_mapped(name)?,
                false => vramp_alloc::device::open_all(name)?,
            };
            let cards = opened;
            machines.insert(key.clone(), (new_machine(), cards));
        }
        let (machine, cards) = &machines[&key];
        let driver = cards.get(ordinal).ok_or_else(|| DeviceError::NoSuchCard {
            name: name.to_owned(),
            cards: cards.len(),
            ordinal,
        })?;
        Ok(Device { is_mapped, machine: *machine, ..Device::of(Arc::clone(driver)) })
    }

    /// Returns a device that is open. It adopts no streams of a caller: each becomes one of its own.
    pub fn of(driver: Arc<dyn Driver>) -> Device {
        let machine = new_machine();
        Device { driver, card: None, ordinal: None, is_mapped: false, machine }
    }

    fn on(card: CudaDriver, ordinal: u32) -> Device {
        let card = Arc::new(card);
        let driver = Arc::clone(&card) as Arc<dyn Driver>;
        Device { driver, card: Some(card), ordinal: Some(ordinal), is_mapped: false, machine: 0 }
    }

    fn named(name: &str) -> Result<Device, DeviceError> {
        if !MAPS_SIMULATED.load(Ordering::Relaxed) {
            return Ok(Device::of(vramp_alloc::open(name)?));
        }
        let driver = vramp_alloc::device::open_mapped(name)?;
        Ok(Device { is_mapped: driver.info().simulated, ..Device::of(driver) })
    }
}

/// Returns the device that a name means.
fn meant(name: &str) -> Cow<'_, str> {
    match name {
        "auto" => environment::variable("VRAMP_DEVICE")
            .filter(|device| !device.is_empty())
            .map_or(Cow::Borrowed("cuda"), Cow::Owned),
        name => Cow::Borrowed(name),
    }
}

/// Returns true for the name of a simulated machine: `sim:CARDxCOUNT`.
fn is_machine(name: &str) -> bool {
    let count = name.strip_prefix("sim:").and_then(|card| card.rsplit_once('x'));
    count.is_some_and(|(_, count)| {
        !count.is_empty() && count.bytes().all(|digit| digit.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_card() -> bool {
        vramp_cuda::devices().is_ok_and(|cards| !cards.is_empty())
    }

    #[test]
    fn the_oldest_open_allocator_of_a_card_is_found_and_a_closed_one_leaves_nothing() {
        let cards = Device::open_all("sim:h200x2").unwrap();
        let stranger = Device::open("sim:h200").unwrap();
        let open = |device: &Device| {
            let allocator =
                Allocator::new(Arc::clone(&device.driver), vramp_alloc::Config::default());
            let allocator = Arc::new(allocator.unwrap());
            let listed = device.list(&allocator);
            (allocator, listed)
        };
        let (first, second, other) = (open(&cards[1]), open(&cards[1]), open(&stranger));
        let found = |ordinals: &[u32]| cards[0].others(ordinals.iter().copied());
        assert!(found(&[0]).is_empty() && found(&[]).is_empty());
        assert!(Arc::ptr_eq(&found(&[0, 1])[0], &first.0));
        // Only the allocators that were asked for are held.
        let held = found(&[1]);
        let strong = [&first.0, &second.0, &other.0].map(Arc::strong_count);
        assert_eq!((held.len(), strong), (1, [2, 1, 1]));
        drop((held, first));
        assert!(Arc::ptr_eq(&found(&[1])[0], &second.0));
        let is_listed = |number: u64| LISTED.lock().unwrap().contains_key(&number);
        let numbers: Vec<u64> = (0..1000).map(|_| open(&cards[0]).1.0).collect();
        assert!(!numbers.into_iter().any(is_listed));
    }

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
    fn cards_of_a_simulated_machine_are_peers() {
        let first = Device::numbered("sim:h200x2", 0).unwrap().driver;
        let second = Device::numbered("sim:h200x2", 1).unwrap().driver;
        assert_eq!((&first.info().peers[..], &second.info().peers[..]), (&[1][..], &[0][..]));
        assert!(Arc::ptr_eq(&first, &Device::numbered("sim:h200x2", 0).unwrap().driver));
        let none = Device::numbered("sim:h200x2", 2).err().unwrap().to_string();
        assert_eq!(none, "the simulated machine 'sim:h200x2' has 2 cards and no number 2");
        assert!(Device::numbered("sim:h200", 5).unwrap().driver.info().peers.is_empty());
        for (name, expected) in [("sim:h200x2", true), ("sim:h200", false), ("sim:h200x2:1", false)]
        {
            assert_eq!(is_machine(name), expected, "{name}");
        }
    }

    #[test]
    fn names_are_those_of_the_rust_interface() {
        assert!(Device::open("sim:h200").is_ok_and(|device| device.card.is_none()));
        // Never the simulator, unless it is named.
        let is_card = |device: Device| device.card.is_some();
        assert!(Device::open("auto").is_ok_and(is_card) || !has_card());
        let refusal = Device::open_all("auto").err().map(|error| error.to_string());
        assert!(refusal.is_none_or(|text| text.contains("VRAMP_DEVICE=sim") && !has_card()));
        for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "sim:", "sim:none", "auto:0", "cuda0"]
        {
            assert!(Device::open(name).is_err(), "'{name}'");
        }
    }
}
