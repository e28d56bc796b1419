//! The cards whose memory is a tier: all visible ones, or a simulated one.

use anyhow::Result;
use vramp::device::OpenError;
use vramp::tiers::config::GpuInfo;
use vramp_cuda::DeviceSummary;
use vramp_host::NumaNode;
use vramp_host::topology::{PciAddress, Topology};

use crate::device::Device;

/// Cards with their names and places on the bus.
pub(super) struct Cards {
    /// The cards.
    pub(super) cards: Vec<GpuInfo>,
    /// Their names, in the same order.
    pub(super) names: Vec<String>,
    /// Their PCI addresses, in the same order.
    pub(super) places: Vec<Option<PciAddress>>,
    /// Number of visible cards, selected or not.
    pub(super) visible: usize,
    /// True for a simulated card.
    pub(super) simulated: bool,
}

impl Cards {
    /// Finds the cards of a device name. `auto` and `cuda` stand for all visible ones.
    pub(super) fn find(name: &str, topology: &Topology) -> Result<Cards> {
        let wanted = match name.split_once(':') {
            Some(("cuda", ordinal)) => match ordinal.parse::<u32>() {
                Ok(ordinal) => Some(ordinal),
                Err(_) => return Err(OpenError::Name { name: name.to_owned() }.into()),
            },
            None if name == "cuda" || name == "auto" => None,
            _ => return Cards::simulated(name),
        };
        match (vramp_cuda::devices(), wanted) {
            (Ok(devices), None) if !devices.is_empty() => Ok(Cards::of(devices, topology)),
            (Ok(mut devices), Some(ordinal)) => {
                let visible = devices.len();
                devices.retain(|device| device.ordinal == ordinal);
                if devices.is_empty() {
                    let count = visible as u32;
                    let missing = vramp_cuda::OpenError::NoSuchDevice { ordinal, count };
                    return Err(OpenError::from(missing).into());
                }
                Ok(Cards { visible, ..Cards::of(devices, topology) })
            }
            (Ok(_), None) => Err(OpenError::from(vramp_cuda::OpenError::NoDevice).into()),
            (Err(error), _) => Err(OpenError::from(error).into()),
        }
    }

    fn simulated(name: &str) -> Result<Cards> {
        let driver = Device::open(name)?.fresh(false)?.driver;
        let info = driver.info();
        Ok(Cards {
            cards: vec![GpuInfo { index: 0, memory: info.limits.memory, node: None }],
            names: vec![info.name.clone()],
            places: vec![None],
            visible: 0,
            simulated: true,
        })
    }

    fn of(devices: Vec<DeviceSummary>, topology: &Topology) -> Cards {
        let place = |device: &DeviceSummary| device.pci.as_deref()?.parse::<PciAddress>().ok();
        let places: Vec<Option<PciAddress>> = devices.iter().map(place).collect();
        let cards = devices.iter().zip(&places).map(|(device, &place)| {
            let listed = || topology.gpu_at(place?)?.pci.numa;
            let node = device.host_numa.map(NumaNode).or_else(listed);
            GpuInfo { index: device.ordinal, memory: device.memory, node }
        });
        Cards {
            cards: cards.collect(),
            places,
            visible: devices.len(),
            names: devices.into_iter().map(|device| device.name).collect(),
            simulated: false,
        }
    }
}
