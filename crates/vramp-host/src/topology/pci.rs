//! PCI devices: addresses, links and locality.
//!
//! The path between two PCI devices, from the bridges above them.

use std::fmt;
use std::str::FromStr;

use super::node::CpuSet;
use super::tree::Tree;
use crate::NumaNode;

/// Address of a PCI device: `0000:3b:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain, also called segment. Wider than 16 bits behind some storage controllers.
    pub domain: u32,
    /// Bus in the domain.
    pub bus: u8,
    /// Device on the bus, below 32.
    pub device: u8,
    /// Function of the device, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    /// Writes the kernel's format.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &PciAddress { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

/// A text is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a PCI address: write it as 0000:3b:00.0")]
pub struct ParsePciAddressError {
    /// The text.
    pub text: String,
}

impl FromStr for PciAddress {
    type Err = ParsePciAddressError;

    /// Parses `0000:3b:00.0`, CUDA's `00000000:3B:00.0`, and `3b:00.0` in domain 0.
    fn from_str(text: &str) -> Result<PciAddress, ParsePciAddressError> {
        let refuse = || ParsePciAddressError { text: text.to_owned() };
        let digits = |part: &str, longest: usize| {
            let all = part.bytes().all(|byte| byte.is_ascii_hexdigit());
            let good = all && (1..=longest).contains(&part.len());
            good.then(|| u32::from_str_radix(part, 16).ok()).flatten().ok_or_else(refuse)
        };
        let (place, function) = text.rsplit_once('.').ok_or_else(refuse)?;
        let (place, device) = place.rsplit_once(':').ok_or_else(refuse)?;
        let (domain, bus) = place.rsplit_once(':').unwrap_or(("0", place));
        let small = |number: u32, limit: u32| {
            u8::try_from(number).ok().filter(|_| number < limit).ok_or_else(refuse)
        };
        Ok(PciAddress {
            domain: digits(domain, 8)?,
            bus: small(digits(bus, 2)?, 256)?,
            device: small(digits(device, 2)?, 32)?,
            function: small(digits(function, 1)?, 8)?,
        })
    }
}

/// Speed and width of a PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// Megatransfers per second on each lane: 16,000 for PCIe 4.
    pub mega_transfers: u32,
    /// Number of lanes.
    pub width: u8,
}

impl LinkState {
    /// Returns the PCIe generation with this speed, `None` for other speeds.
    pub fn generation(&self) -> Option<u8> {
        Some(match self.mega_transfers {
            2_500 => 1,
            5_000 => 2,
            8_000 => 3,
            16_000 => 4,
            32_000 => 5,
            64_000 => 6,
            128_000 => 7,
            _ => return None,
        })
    }

    /// Returns bytes per second in one direction: after line coding, before packet headers. An
    /// upper bound for copies.
    pub fn bytes_per_second(&self) -> u64 {
        let bits = u64::from(self.mega_transfers) * 1_000_000 * u64::from(self.width);
        match self.mega_transfers {
            // 8b/10b coding up to generation 2, 128b/130b up to 5, none from 6 on.
            0..=5_000 => bits / 10,
            5_001..=32_000 => bits / 130 * 16,
            _ => bits / 8,
        }
    }
}

impl fmt::Display for LinkState {
    /// Writes `PCIe 5 x16`, or `10 GT/s x4` for a speed of no generation.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.width;
        f.pad(&match self.generation() {
            Some(generation) => format!("PCIe {generation} x{width}"),
            None => format!("{} GT/s x{width}", f64::from(self.mega_transfers) / 1000.0),
        })
    }
}

/// PCIe link of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciLink {
    /// Current state. Idle devices may run slower, to save power.
    pub current: Option<LinkState>,
    /// Maximum of the device, in any slot.
    pub max: Option<LinkState>,
}

/// A PCI device, as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// PCI address.
    pub address: PciAddress,
    /// Nearest NUMA node. `None` if the firmware does not report it.
    pub numa: Option<NumaNode>,
    /// Nearest CPUs.
    pub cpus: Option<CpuSet>,
    /// PCIe link.
    pub link: PciLink,
    /// Bridges above it. `None` for a device that the kernel does not list.
    pub path: Option<PciPath>,
}

impl PciDevice {
    /// Returns a device of which only the address is known.
    pub(super) fn unknown(address: PciAddress) -> PciDevice {
        PciDevice { address, numa: None, cpus: None, link: PciLink::default(), path: None }
    }

    pub(super) fn read(tree: &mut Tree<'_>, address: PciAddress) -> PciDevice {
        let folder = format!("sys/bus/pci/devices/{address}");
        PciDevice {
            address,
            numa: numa_node(tree, &format!("{folder}/numa_node")),
            cpus: tree
                .parsed(&format!("{folder}/local_cpulist"), |text| text.parse().ok())
                .filter(|cpus: &CpuSet| !cpus.is_empty()),
            link: PciLink {
                current: link_state(tree, &folder, "current"),
                max: link_state(tree, &folder, "max"),
            },
            path: tree.link(&folder).and_then(|link| PciPath::of_link(&link)),
        }
    }
}

/// Reads a node number. The kernel reports -1 if it is unknown.
fn numa_node(tree: &mut Tree<'_>, path: &str) -> Option<NumaNode> {
    let number = tree.parsed(path, |text| text.parse::<i64>().ok())?;
    u32::try_from(number).ok().map(NumaNode)
}

fn link_state(tree: &mut Tree<'_>, folder: &str, which: &str) -> Option<LinkState> {
    let width = tree.parsed(&format!("{folder}/{which}_link_width"), parse_width)?;
    let speed = tree.parsed(&format!("{folder}/{which}_link_speed"), parse_speed)?;
    Some(LinkState { mega_transfers: speed?, width: width? })
}

/// The outer `None` is a malformed width, the inner one an unknown width.
fn parse_width(text: &str) -> Option<Option<u8>> {
    match text.parse::<u8>().ok()? {
        // A link that is down, and the kernel's values for "unknown".
        0 | 63 | 255 => Some(None),
        lanes => Some(Some(lanes)),
    }
}

/// Parses `16.0 GT/s PCIe`. The inner `None` is an unknown speed.
fn parse_speed(text: &str) -> Option<Option<u32>> {
    if text.starts_with("Unknown") {
        return Some(None);
    }
    let (number, unit) = text.split_once(' ')?;
    let giga: f64 = number.parse().ok()?;
    let good = unit.starts_with("GT/s") && (0.1..1e6).contains(&giga);
    good.then_some(Some((giga * 1000.0).round() as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_the_kernel_and_as_cuda_write_them() {
        let address = PciAddress { domain: 0, bus: 0x3b, device: 0, function: 1 };
        for text in ["0000:3b:00.1", "00000000:3B:00.1", "3b:00.1", "0:3b:0.1"] {
            assert_eq!(text.parse(), Ok(address), "{text}");
        }
        assert_eq!(address.to_string(), "0000:3b:00.1");
        let behind: PciAddress = "10000:e1:00.0".parse().unwrap();
        assert_eq!(behind.to_string(), "10000:e1:00.0");
        for text in ["", "3b", "3b:00", "3b:20.0", "3b:00.8", "g0:00.0", "1:2:3:4.5", "+1:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_links_rate_is_that_of_its_generation_and_width() {
        let rate =
            |text, width| LinkState { mega_transfers: parse_speed(text).unwrap().unwrap(), width };
        assert_eq!(rate("32.0 GT/s PCIe", 16).to_string(), "PCIe 5 x16");
        assert_eq!(rate("2.5 GT/s", 1).bytes_per_second(), 250_000_000);
        assert!(
            (63_000_000_000..63_100_000_000).contains(&rate("32 GT/s PCIe", 16).bytes_per_second())
        );
        assert_eq!(rate("64.0 GT/s PCIe", 16).bytes_per_second(), 128_000_000_000);
        assert_eq!(rate("20 GT/s", 4).to_string(), "20 GT/s x4");
        assert_eq!(parse_speed("Unknown"), Some(None));
        assert_eq!(parse_width("255"), Some(None));
        for text in ["", "fast", "16.0", "-8 GT/s", "NaN GT/s", "1e99 GT/s"] {
            assert_eq!(parse_speed(text), None, "{text}");
        }
    }
}

/// The bridges above a device, and the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciPath {
    /// Host bridge at the root: `pci0000:3a`.
    pub host_bridge: String,
    /// Devices from the root port down. The last is the device itself.
    pub devices: Vec<PciAddress>,
}

impl PciPath {
    /// Parses the target of a sysfs link to a device or to a directory in it, such as
    /// `../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/eth0`.
    pub(super) fn of_link(link: &str) -> Option<PciPath> {
        let mut parts = link.split('/').skip_while(|part| !is_host_bridge(part));
        let host_bridge = parts.next()?.to_owned();
        // Some controllers have a bus of their own, which is named like a host bridge.
        let devices: Vec<PciAddress> = parts
            .filter(|part| !is_host_bridge(part))
            .map_while(|part| part.parse().ok())
            .collect();
        (!devices.is_empty()).then_some(PciPath { host_bridge, devices })
    }

    /// Returns the device at the end.
    pub fn device(&self) -> Option<PciAddress> {
        self.devices.last().copied()
    }
}

/// Returns true for `pci`, a domain and a bus.
fn is_host_bridge(part: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    part.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| hex(domain) && hex(bus))
}

/// Type of the path between two devices, in the terms of `nvidia-smi topo`. Ordered by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathType {
    /// Both are the same device.
    Same,
    /// At most one PCIe switch.
    Pix,
    /// Several PCIe bridges, without the host bridge.
    Pxb,
    /// A PCIe host bridge.
    Phb,
    /// The interconnect of host bridges within a NUMA node.
    Node,
    /// The interconnect between NUMA nodes, or unknown.
    Sys,
}

impl PathType {
    /// Returns the type of the path between two devices. `near` is true if both are on the same
    /// NUMA node; it matters only if they share no host bridge.
    pub(super) fn between(one: Option<&PciPath>, other: Option<&PciPath>, near: bool) -> PathType {
        let far = if near { PathType::Node } else { PathType::Sys };
        let (Some(one), Some(other)) = (one, other) else { return far };
        if one.host_bridge != other.host_bridge {
            return far;
        }
        let shared = one.devices.iter().zip(&other.devices).take_while(|(a, b)| a == b).count();
        // The bridges below the last shared one, without the devices at the ends.
        let bridges = |path: &PciPath| path.devices.len().saturating_sub(shared + 1);
        match shared {
            _ if one == other => PathType::Same,
            0 => PathType::Phb,
            // A switch has one upstream port, and one downstream port for each device.
            _ if bridges(one) <= 1 && bridges(other) <= 1 => PathType::Pix,
            _ => PathType::Pxb,
        }
    }
}

impl fmt::Display for PathType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PathType::Same => "X",
            PathType::Pix => "PIX",
            PathType::Pxb => "PXB",
            PathType::Phb => "PHB",
            PathType::Node => "NODE",
            PathType::Sys => "SYS",
        })
    }
}

#[cfg(test)]
mod path_tests {
    use super::*;

    fn path(link: &str) -> Option<PciPath> {
        PciPath::of_link(link)
    }

    #[test]
    fn what_lies_between_two_devices_follows_from_the_bridges_they_share() {
        let root = "../../../devices/pci0000:3a";
        // A root port 3a:00.0, a switch with its port above (3b) and three below (3c), and behind
        // the last of them another switch (3f, 40).
        let switch = format!("{root}/0000:3a:00.0/0000:3b:00.0");
        let gpu = path(&format!("{switch}/0000:3c:00.0/0000:3d:00.0"));
        let beside = path(&format!("{switch}/0000:3c:01.0/0000:3e:00.0/net/eth0"));
        let deeper = path(&format!(
            "{switch}/0000:3c:02.0/0000:3f:00.0/0000:40:00.0/0000:41:00.0/nvme/nvme0/nvme0n1"
        ));
        let port = path(&format!("{root}/0000:3a:01.0/0000:50:00.0"));
        let sound = path(&format!("{switch}/0000:3c:00.0/0000:3d:00.1"));
        let elsewhere = path("../devices/pci0000:a0/0000:a0:01.0/0000:a1:00.0");
        let between = |a: &Option<PciPath>, b: &Option<PciPath>, near| {
            let there = PathType::between(a.as_ref(), b.as_ref(), near);
            assert_eq!(there, PathType::between(b.as_ref(), a.as_ref(), near));
            there
        };
        assert_eq!(between(&gpu, &gpu, true), PathType::Same);
        assert_eq!(between(&gpu, &sound, true), PathType::Pix);
        assert_eq!(between(&gpu, &beside, true), PathType::Pix);
        assert_eq!(between(&gpu, &deeper, true), PathType::Pxb);
        assert_eq!(between(&gpu, &port, false), PathType::Phb);
        assert_eq!(between(&gpu, &elsewhere, true), PathType::Node);
        assert_eq!(between(&gpu, &elsewhere, false), PathType::Sys);
        assert_eq!(between(&gpu, &None, false), PathType::Sys);
    }

    #[test]
    fn paths_are_read_behind_platforms_and_storage_controllers() {
        let arm = path("../../devices/platform/soc/pci0004:00/0004:00:00.0/0004:01:00.0/drm/card0");
        assert_eq!(arm.unwrap().host_bridge, "pci0004:00");
        let volume =
            path("../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0/nvme");
        let volume = volume.unwrap();
        assert_eq!(volume.devices.len(), 3);
        assert_eq!(volume.device(), "10000:e1:00.0".parse().ok());
        for link in
            ["", "../devices/virtual/block/loop0", "pci0000:00", "pci:/x", "../pci_bus/0000:00"]
        {
            assert_eq!(path(link), None, "{link}");
        }
    }
}
