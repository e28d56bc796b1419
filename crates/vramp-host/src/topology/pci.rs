//! PCI devices: addresses, links and locality.

use std::fmt;
use std::str::FromStr;

use super::cpus::CpuSet;
use super::path::PciPath;
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
