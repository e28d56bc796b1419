//! NVIDIA GPUs, listed by the PCI bus and by the driver's directory in procfs, and network cards.

use std::collections::BTreeSet;

use super::pci::{PciAddress, PciDevice, PciPath};
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
pub(super) fn read_gpus(tree: &mut Tree<'_>) -> Vec<Gpu> {
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

/// A port of a network card: a network interface, an RDMA device, or both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Name of the interface, `eth0`, or of the RDMA device, `mlx5_0`, if there is no interface.
    pub name: String,
    /// PCI device. `None` for ports on other buses.
    pub pci: Option<PciDevice>,
    /// RDMA devices of the same PCI function.
    pub rdma: Vec<String>,
    /// Link speed in megabits per second. `None` while the link is down.
    pub megabits: Option<u32>,
    /// True if the link is up and its RDMA devices can be opened.
    pub active: bool,
    /// True if the interface has an IPv6 address or an IPv4 route.
    pub addressed: bool,
}

/// Condition that a network card must meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NicCheck {
    /// The card exists.
    Exists,
    /// The link is up.
    Active,
    /// The link is up and the interface has an address.
    #[default]
    Addressed,
}

impl Nic {
    /// Returns true if the card passes the check.
    pub fn passes(&self, check: NicCheck) -> bool {
        match check {
            NicCheck::Exists => true,
            NicCheck::Active => self.active,
            NicCheck::Addressed => self.active && self.addressed,
        }
    }
}

/// An RDMA device.
struct Rdma {
    name: String,
    pci: Option<PciAddress>,
    active: bool,
}

/// Reads all interfaces with hardware, and all RDMA devices.
pub(super) fn read_nics(tree: &mut Tree<'_>) -> Vec<Nic> {
    let mut rdma = read_rdma(tree);
    let addressed = addressed(tree);
    let mut nics = Vec::new();
    for name in tree.names("sys/class/net") {
        let folder = format!("sys/class/net/{name}");
        if !tree.exists(&format!("{folder}/device")) {
            continue;
        }
        let pci = address_of(tree, &folder);
        let same: Vec<&Rdma> =
            rdma.iter().filter(|device| pci.is_some() && device.pci == pci).collect();
        let up = tree.text(&format!("{folder}/operstate")).is_some_and(|state| state == "up");
        nics.push(Nic {
            pci: pci.map(|address| PciDevice::read(tree, address)),
            active: up && same.iter().all(|device| device.active),
            rdma: same.iter().map(|device| device.name.clone()).collect(),
            // For an interface that is down the kernel reports -1 or nothing.
            megabits: tree
                .parsed(&format!("{folder}/speed"), |text| text.parse::<i64>().ok())
                .and_then(|speed| u32::try_from(speed).ok())
                .filter(|&speed| speed > 0 && speed < u32::MAX),
            addressed: addressed.contains(&name),
            name,
        });
    }
    rdma.retain(|device| !nics.iter().any(|nic| nic.rdma.contains(&device.name)));
    for Rdma { name, pci, active } in rdma {
        let pci = pci.map(|address| PciDevice::read(tree, address));
        let alone = vec![name.clone()];
        nics.push(Nic { name, pci, rdma: alone, megabits: None, active, addressed: false });
    }
    nics
}

fn read_rdma(tree: &mut Tree<'_>) -> Vec<Rdma> {
    let mut files = tree.names("sys/class/infiniband_verbs");
    files.retain(|file| tree.exists(&format!("dev/infiniband/{file}")));
    let verbs: Vec<String> = files
        .iter()
        .filter_map(|file| tree.text(&format!("sys/class/infiniband_verbs/{file}/ibdev")))
        .collect();
    let mut devices = Vec::new();
    for name in tree.names("sys/class/infiniband") {
        let folder = format!("sys/class/infiniband/{name}");
        let ports = tree.names(&format!("{folder}/ports"));
        let any = ports.iter().any(|port| {
            let state = tree.text(&format!("{folder}/ports/{port}/state"));
            state.is_some_and(|state| state.ends_with("ACTIVE"))
        });
        let pci = address_of(tree, &folder);
        devices.push(Rdma { active: any && verbs.contains(&name), name, pci });
    }
    devices
}

fn address_of(tree: &Tree<'_>, folder: &str) -> Option<PciAddress> {
    PciPath::of_link(&tree.link(folder)?)?.device()
}

/// Returns the names of interfaces with an IPv6 address or an IPv4 route.
fn addressed(tree: &mut Tree<'_>) -> Vec<String> {
    let mut column = |path: &str, nth: usize, skip: usize| {
        let text = tree.text(path).unwrap_or_default();
        let lines = text.lines().skip(skip).filter_map(|line| line.split_whitespace().nth(nth));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut names = column("proc/net/if_inet6", 5, 0);
    names.extend(column("proc/net/route", 0, 1));
    names
}
