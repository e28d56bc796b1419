//! The path between two PCI devices, from the bridges above them.

use std::fmt;

use super::pci::PciAddress;

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
mod tests {
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
