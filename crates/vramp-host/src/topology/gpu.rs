//! NVIDIA GPUs, listed by the PCI bus and by the driver's directory in procfs.

use std::collections::BTreeSet;

use super::pci::{PciAddress, PciDevice};
use super::tree::Tree;

const NVIDIA: u32 = 0x10de;
/// PCI class of display controllers: the upper byte of three.
const DISPLAY: u32 = 0x03;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// PCI device.
    pub pci: PciDevice,
    /// Model name, such as `NVIDIA H200`. `None` without NVIDIA's kernel module.
    pub model: Option<String>,
    /// UUID, `GPU-8932f937-...`. `None` without NVIDIA's kernel module, or before the first use of
    /// the GPU.
    pub uuid: Option<String>,
}

/// Reads all GPUs in the order of their PCI addresses, which is that of `nvidia-smi`.
pub(super) fn read(tree: &mut Tree<'_>) -> Vec<Gpu> {
    let mut addresses = BTreeSet::new();
    for name in tree.names("sys/bus/pci/devices") {
        let Ok(address) = name.parse::<PciAddress>() else { continue };
        let folder = format!("sys/bus/pci/devices/{name}");
        let vendor = tree.parsed(&format!("{folder}/vendor"), hex);
        if vendor == Some(NVIDIA)
            && let Some(class) = tree.parsed(&format!("{folder}/class"), hex)
            && class >> 16 == DISPLAY
        {
            addresses.insert(address);
        }
    }
    // Containers may expose the driver's directory and not the bus.
    let driver = tree.names("proc/driver/nvidia/gpus");
    addresses.extend(driver.iter().filter_map(|name| name.parse::<PciAddress>().ok()));
    addresses.into_iter().map(|address| read_one(tree, address)).collect()
}

fn read_one(tree: &mut Tree<'_>, address: PciAddress) -> Gpu {
    let information = tree.text(&format!("proc/driver/nvidia/gpus/{address}/information"));
    let field = |name: &str| {
        let line = information.as_deref()?.lines().find_map(|line| {
            let (label, value) = line.split_once(':')?;
            (label.trim() == name).then(|| value.trim().to_owned())
        });
        // A GPU that was never used shows question marks.
        line.filter(|value| !value.is_empty() && !value.contains('?'))
    };
    let listed = tree.exists(&format!("sys/bus/pci/devices/{address}"));
    let pci = match listed {
        true => PciDevice::read(tree, address),
        false => PciDevice::unknown(address),
    };
    Gpu { pci, model: field("Model"), uuid: field("GPU UUID") }
}

/// Parses `0x10de`.
fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}
