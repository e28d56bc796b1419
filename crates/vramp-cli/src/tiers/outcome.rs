//! The machine's memory, as `--json` prints it.

use serde::Serialize;
use vramp::tiers::SpaceId;
use vramp::tiers::config::TiersConfig;
use vramp::tiers::movers::{Profile, UnmeasuredLink};
use vramp_host::NumaNode;
use vramp_host::topology::{
    Disk, DiskKind, Gpu, LinkState, Nic, NicCheck, NodeInfo, PathType, PciDevice, Topology,
    VisibleDevices,
};

use super::cards::Cards;

/// Spaces, links and devices of the machine.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) simulated: bool,
    /// Says that a card is simulated, for people.
    #[serde(skip)]
    pub(super) notice: Option<String>,
    pub(super) spaces: Vec<Space>,
    pub(super) links: Vec<Link>,
    pub(super) nodes: Vec<Node>,
    /// Cards on the bus, visible or not.
    pub(super) cards: Vec<Device>,
    pub(super) disks: Vec<Device>,
    pub(super) networks: Vec<Device>,
    /// The paths between all devices on the bus.
    pub(super) paths: Paths,
    /// Further remarks.
    pub(super) notes: Vec<String>,
}

/// A space with its levels in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Space {
    pub(super) space: String,
    pub(super) what: String,
    pub(super) node: Option<u32>,
    pub(super) capacity_bytes: u64,
    pub(super) limit_bytes: u64,
    pub(super) trigger_bytes: u64,
    pub(super) stop_bytes: u64,
    pub(super) granule_bytes: u64,
    /// Its card or disk, if that is on the bus.
    #[serde(skip)]
    pci: Option<PciDevice>,
}

/// The link between two spaces, in both directions.
#[derive(Debug, Serialize)]
pub(super) struct Link {
    pub(super) from: String,
    pub(super) to: String,
    /// Type of the path, as in `nvidia-smi topo`. `None` if the place of one space is unknown.
    pub(super) path: Option<String>,
    /// The slowest PCIe link of the path, at its maximum.
    pub(super) link: Option<String>,
    /// Upper bound of the rate.
    pub(super) bound_bytes_per_s: Option<u64>,
    /// Measured rates of large copies in both directions.
    pub(super) there_bytes_per_s: Option<u64>,
    pub(super) back_bytes_per_s: Option<u64>,
}

/// A NUMA node.
#[derive(Debug, Serialize)]
pub(super) struct Node {
    pub(super) node: u32,
    pub(super) memory_bytes: Option<u64>,
    pub(super) free_bytes: Option<u64>,
    pub(super) cpus: Option<String>,
    pub(super) device_memory: bool,
}

/// A card, a disk or a network card.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) facts: Facts,
    pub(super) model: Option<String>,
    pub(super) address: Option<String>,
    pub(super) node: Option<u32>,
    pub(super) cpus: Option<String>,
    /// Maximum PCIe link.
    pub(super) link: Option<String>,
    pub(super) link_now: Option<String>,
}

/// Properties of one kind of device.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Facts {
    Card {
        /// Its name in CUDA; `None` if it is hidden.
        visible_as: Option<String>,
        uuid: Option<String>,
    },
    Disk {
        kind: Option<&'static str>,
        capacity_bytes: Option<u64>,
        mounts: Vec<String>,
    },
    Network {
        active: bool,
        addressed: bool,
        megabits_per_s: Option<u32>,
        rdma: Vec<String>,
    },
}

/// The path between any two devices: a name and a row for each.
#[derive(Debug, Default, Serialize)]
pub(super) struct Paths {
    pub(super) names: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Outcome {
    /// Adds the measured rates, and a note for each rate that could not be measured.
    pub(super) fn add_rates(&mut self, profile: &Profile) {
        for (hop, rate) in profile.rates() {
            let (from, to) = (hop.from.to_string(), hop.to.to_string());
            for link in &mut self.links {
                if (&link.from, &link.to) == (&from, &to) {
                    link.there_bytes_per_s = Some(rate.bytes_per_s);
                } else if (&link.from, &link.to) == (&to, &from) {
                    link.back_bytes_per_s = Some(rate.bytes_per_s);
                }
            }
        }
        let why = |one: &UnmeasuredLink| {
            let size = vramp::Bytes::new(one.size_bytes);
            format!("no rate for {size} from {} to {}: {}", one.from, one.to, one.reason)
        };
        self.notes.extend(profile.unmeasured.iter().map(why));
    }

    /// Combines the spaces with the machine.
    pub(super) fn new(
        topology: &Topology,
        cards: &Cards,
        config: &TiersConfig,
        visible: &VisibleDevices,
    ) -> anyhow::Result<Outcome> {
        let spaces = spaces(topology, cards, config)?;
        // In a container the driver may show other cards than the bus lists. The driver is right.
        let agreed = cards.simulated || visible.devices.len() == cards.visible;
        let ignored = visible.ignored.iter().filter(|_| agreed);
        let mut notes: Vec<String> = ignored.map(ToString::to_string).collect();
        for gpu in &config.gpus {
            match cards.cards.iter().find(|card| card.index == gpu.index) {
                None => notes.push(format!("{} is not a visible card", gpu.id())),
                Some(card) if gpu.capacity > card.memory => notes.push(format!(
                    "{} has a capacity of {} in the configuration and {} of memory",
                    gpu.id(),
                    gpu.capacity,
                    card.memory
                )),
                Some(_) => {}
            }
        }
        for host in &config.hosts {
            if let Some(node) = host.node
                && topology.node(NumaNode(node)).is_none()
            {
                notes.push(format!(
                    "{} is at NUMA node {node}, which this machine does not have",
                    host.id()
                ));
            }
        }
        notes.extend(topology.warnings.iter().map(ToString::to_string));
        Ok(Outcome {
            simulated: cards.simulated,
            notice: cards.simulated.then(|| "The card is simulated.".to_owned()),
            links: links(topology, &spaces),
            spaces,
            nodes: nodes(topology),
            cards: topology
                .gpus
                .iter()
                .enumerate()
                .map(|(place, gpu)| card(place, gpu, cards, visible))
                .collect(),
            disks: topology.disks.iter().map(disk).collect(),
            networks: topology.nics.iter().map(network).collect(),
            paths: paths(topology),
            notes,
        })
    }
}

fn spaces(topology: &Topology, cards: &Cards, config: &TiersConfig) -> anyhow::Result<Vec<Space>> {
    let mut spaces = Vec::new();
    for (id, space) in config.spaces() {
        let levels = space.levels()?;
        let (what, node, pci) = place(topology, cards, config, id);
        spaces.push(Space {
            space: id.to_string(),
            what,
            node: node.map(|node| node.0),
            capacity_bytes: levels.capacity.count(),
            limit_bytes: levels.limit.count(),
            trigger_bytes: levels.trigger.count(),
            stop_bytes: levels.stop.count(),
            granule_bytes: levels.granule.count(),
            pci,
        });
    }
    Ok(spaces)
}

/// Returns a space's description, its nearest NUMA node and its device.
fn place(
    topology: &Topology,
    cards: &Cards,
    config: &TiersConfig,
    id: SpaceId,
) -> (String, Option<NumaNode>, Option<PciDevice>) {
    if let Some(place) = cards.cards.iter().position(|card| SpaceId::gpu(card.index) == id) {
        let gpu = cards.places[place].and_then(|address| topology.gpu_at(address));
        let pci = gpu.map(|gpu| gpu.pci.clone());
        let near = || only_node(topology).filter(|_| !cards.simulated);
        return (cards.names[place].clone(), cards.cards[place].node.or_else(near), pci);
    }
    if let Some(host) = config.hosts.iter().find(|host| host.id() == id) {
        let node = host.node.map(NumaNode);
        let what = node.map_or_else(|| "host memory".to_owned(), |node| node.to_string());
        return (what, node, None);
    }
    if let Some(disk) = config.disks.iter().find(|disk| disk.id() == id) {
        let name = topology.directory(&disk.directory).ok().and_then(|directory| directory.disk);
        let on = topology.disks.iter().find(|disk| Some(&disk.name) == name.as_ref());
        let pci = on.and_then(|disk| disk.pci.clone());
        let path = disk.directory.display();
        let what = name.map_or_else(|| path.to_string(), |name| format!("{path} on {name}"));
        let node = pci.as_ref().and_then(|pci| pci.numa).or_else(|| only_node(topology));
        return (what, node, pci);
    }
    ("-".to_owned(), None, None)
}

/// Returns the NUMA node of a machine with a single one.
fn only_node(topology: &Topology) -> Option<NumaNode> {
    match topology.nodes.as_slice() {
        [only] => Some(only.node),
        _ => None,
    }
}

/// Returns the links between tiers: card and card, card and host, host and disk.
fn links(topology: &Topology, spaces: &[Space]) -> Vec<Link> {
    let tier = |space: &Space, name: &str| space.space.starts_with(name);
    let mut links = Vec::new();
    for (nth, from) in spaces.iter().enumerate() {
        for to in &spaces[nth + 1..] {
            let gpus = tier(from, "gpu") && tier(to, "gpu");
            let down =
                tier(from, "gpu") && tier(to, "host") || tier(from, "host") && tier(to, "disk");
            if gpus || down {
                links.push(link(topology, from, to));
            }
        }
    }
    links
}

fn link(topology: &Topology, from: &Space, to: &Space) -> Link {
    let path = match (&from.pci, &to.pci) {
        (Some(one), Some(other)) => Some(topology.path(one, other)),
        // A node's memory is connected to the host bridges of that node.
        _ => match (from.node, to.node) {
            (Some(one), Some(other)) if one == other => Some(PathType::Phb),
            (Some(_), Some(_)) => Some(PathType::Sys),
            _ => None,
        },
    };
    let state = |space: &Space| space.pci.as_ref().and_then(|pci| pci.link.max);
    let slowest =
        [state(from), state(to)].into_iter().flatten().min_by_key(LinkState::bytes_per_second);
    Link {
        from: from.space.clone(),
        to: to.space.clone(),
        path: path.map(|path| path.to_string()),
        link: slowest.map(|state| state.to_string()),
        bound_bytes_per_s: slowest.map(|state| state.bytes_per_second()),
        there_bytes_per_s: None,
        back_bytes_per_s: None,
    }
}

fn nodes(topology: &Topology) -> Vec<Node> {
    let node = |info: &NodeInfo| Node {
        node: info.node.0,
        memory_bytes: info.memory.map(|bytes| bytes.count()),
        free_bytes: info.free.map(|bytes| bytes.count()),
        cpus: info.cpus.as_ref().map(ToString::to_string),
        device_memory: info.is_device_memory(),
    };
    topology.nodes.iter().map(node).collect()
}

/// Returns a device with its place on the bus.
fn device(name: String, facts: Facts, pci: Option<&PciDevice>) -> Device {
    Device {
        name,
        facts,
        model: None,
        address: pci.map(|pci| pci.address.to_string()),
        node: pci.and_then(|pci| pci.numa).map(|node| node.0),
        cpus: pci.and_then(|pci| pci.cpus.as_ref()).map(ToString::to_string),
        link: pci.and_then(|pci| pci.link.max).map(|state| state.to_string()),
        link_now: pci.and_then(|pci| pci.link.current).map(|state| state.to_string()),
    }
}

fn card(place: usize, gpu: &Gpu, cards: &Cards, visible: &VisibleDevices) -> Device {
    // By the driver; without one, by the environment variable.
    let ordinal = match cards.simulated {
        false => cards
            .places
            .iter()
            .position(|&address| address == Some(gpu.pci.address))
            .map(|nth| cards.cards[nth].index as usize),
        true => visible.gpus().position(|shown| shown == place),
    };
    let visible_as = ordinal.map(|ordinal| format!("cuda:{ordinal}"));
    let facts = Facts::Card { visible_as, uuid: gpu.uuid.clone() };
    Device { model: gpu.model.clone(), ..device(card_name(place), facts, Some(&gpu.pci)) }
}

fn card_name(place: usize) -> String {
    format!("card{place}")
}

fn disk(disk: &Disk) -> Device {
    let kind = disk.kind.map(|kind| match kind {
        DiskKind::Nvme => "nvme",
        DiskKind::SolidState => "flash",
        DiskKind::Rotational => "plates",
    });
    let mounts = disk.mounts.iter().map(|mount| mount.point.display().to_string()).collect();
    let capacity_bytes = disk.capacity.map(|bytes| bytes.count());
    let facts = Facts::Disk { kind, capacity_bytes, mounts };
    Device { model: disk.model.clone(), ..device(disk.name.clone(), facts, disk.pci.as_ref()) }
}

fn network(nic: &Nic) -> Device {
    let facts = Facts::Network {
        active: nic.passes(NicCheck::Active),
        addressed: nic.passes(NicCheck::Addressed),
        megabits_per_s: nic.megabits,
        rdma: nic.rdma.clone(),
    };
    device(nic.name.clone(), facts, nic.pci.as_ref())
}

fn paths(topology: &Topology) -> Paths {
    let cards = topology.gpus.iter().enumerate().map(|(nth, gpu)| (card_name(nth), &gpu.pci));
    let disks =
        topology.disks.iter().filter_map(|disk| Some((disk.name.clone(), disk.pci.as_ref()?)));
    let nics = topology.nics.iter().filter_map(|nic| Some((nic.name.clone(), nic.pci.as_ref()?)));
    let all: Vec<(String, &PciDevice)> = cards.chain(disks).chain(nics).collect();
    let row = |one: &PciDevice| {
        all.iter().map(|(_, other)| topology.path(one, other).to_string()).collect()
    };
    Paths {
        rows: all.iter().map(|(_, one)| row(one)).collect(),
        names: all.iter().map(|(name, _)| name.clone()).collect(),
    }
}
