//! The cards whose memory is a tier: all that the driver shows, or a simulated one.

use anyhow::Result;
use vramp_alloc::device::OpenError;
use vramp_cuda::DeviceSummary;
use vramp_host::NumaNode;
use vramp_host::topology::{PciAddress, Topology};
use vramp_tiers::config::GpuInfo;

use crate::device::Device;

/// The cards and their names.
pub(super) struct Cards {
    /// For drawing up spaces.
    pub(super) cards: Vec<GpuInfo>,
    /// What each is called, in the same order.
    pub(super) names: Vec<String>,
    /// Where each is plugged in, in the same order.
    pub(super) places: Vec<Option<PciAddress>>,
    /// How many cards the driver shows, also those that were not asked for.
    pub(super) shown: usize,
    /// True for a simulated card.
    pub(super) simulated: bool,
    /// Why no card was taken, if one was looked for.
    pub(super) fell_back: Option<String>,
}

impl Cards {
    /// The cards of this name, as other commands take it, but all of them.
    pub(super) fn find(name: &str, topology: &Topology) -> Result<Cards> {
        let wanted = match name.split_once(':') {
            Some(("cuda", ordinal)) => match ordinal.parse::<u32>() {
                Ok(ordinal) => Some(ordinal),
                Err(_) => return Err(OpenError::Name { name: name.to_owned() }.into()),
            },
            None if name == "cuda" || name == "auto" => None,
            _ => return Cards::simulated(name, None),
        };
        match (vramp_cuda::devices(), wanted) {
            (Ok(devices), None) if !devices.is_empty() => Ok(Cards::of(devices, topology)),
            (Ok(mut devices), Some(ordinal)) => {
                let shown = devices.len();
                devices.retain(|device| device.ordinal == ordinal);
                if devices.is_empty() {
                    let count = shown as u32;
                    let missing = vramp_cuda::OpenError::NoSuchDevice { ordinal, count };
                    return Err(OpenError::from(missing).into());
                }
                Ok(Cards { shown, ..Cards::of(devices, topology) })
            }
            (Ok(_), None) => Cards::none(name, vramp_cuda::OpenError::NoDevice),
            (Err(error), _) => Cards::none(name, error),
        }
    }

    /// `auto` takes a simulated card instead.
    fn none(name: &str, error: vramp_cuda::OpenError) -> Result<Cards> {
        match name {
            "auto" => Cards::simulated("sim", Some(error.to_string())),
            _ => Err(OpenError::from(error).into()),
        }
    }

    fn simulated(name: &str, fell_back: Option<String>) -> Result<Cards> {
        let driver = Device::open(name)?.fresh(false)?.driver;
        let info = driver.info();
        Ok(Cards {
            cards: vec![GpuInfo { index: 0, memory: info.limits.memory, node: None }],
            names: vec![info.name.clone()],
            places: vec![None],
            shown: 0,
            simulated: true,
            fell_back,
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
            shown: devices.len(),
            names: devices.into_iter().map(|device| device.name).collect(),
            simulated: false,
            fell_back: None,
        }
    }
}
