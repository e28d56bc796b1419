//! NUMA nodes with their memory and CPUs.

use vramp_core::Bytes;

use super::cpus::CpuSet;
use super::tree::Tree;
use crate::NumaNode;

const FOLDER: &str = "sys/devices/system/node";

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Number of the node.
    pub node: NumaNode,
    /// Size of its memory.
    pub memory: Option<Bytes>,
    /// Free memory. The page cache does not count as free.
    pub free: Option<Bytes>,
    /// Its CPUs.
    pub cpus: Option<CpuSet>,
}

impl NodeInfo {
    /// Returns true for a node without CPUs. Its memory is that of a device, not of the host.
    pub fn is_device_memory(&self) -> bool {
        self.cpus.as_ref().is_some_and(CpuSet::is_empty)
    }
}

/// Reads all nodes that are online. A kernel without NUMA support has one node.
pub(super) fn read(tree: &mut Tree<'_>) -> Vec<NodeInfo> {
    let online: CpuSet =
        tree.parsed(&format!("{FOLDER}/online"), |text| text.parse().ok()).unwrap_or_default();
    // Bounds the time for a malformed list with up to 2^32 nodes.
    let known = |node: &u32| tree.exists(&format!("{FOLDER}/node{node}"));
    let nodes: Vec<u32> = match online.len() {
        0 => Vec::new(),
        1..=65_536 => online.iter().filter(known).collect(),
        _ => {
            tree.malformed(&format!("{FOLDER}/online"), &online.to_string());
            Vec::new()
        }
    };
    if !nodes.is_empty() {
        return nodes.into_iter().map(|node| read_one(tree, node)).collect();
    }
    let Some(text) = tree.text("proc/meminfo") else { return Vec::new() };
    let cpus = tree.parsed("sys/devices/system/cpu/online", |text| text.parse().ok());
    vec![NodeInfo {
        node: NumaNode(0),
        memory: memory(&text, "MemTotal:"),
        free: memory(&text, "MemFree:"),
        cpus,
    }]
}

fn read_one(tree: &mut Tree<'_>, node: u32) -> NodeInfo {
    let folder = format!("{FOLDER}/node{node}");
    let path = format!("{folder}/meminfo");
    let text = tree.text(&path);
    let mut amount = |label: &str| {
        let text = text.as_deref()?;
        let found = memory(text, label);
        if found.is_none() {
            tree.malformed(&path, text);
        }
        found
    };
    let (memory, free) = (amount("MemTotal:"), amount("MemFree:"));
    let cpus = tree.parsed(&format!("{folder}/cpulist"), |text| text.parse().ok());
    NodeInfo { node: NumaNode(node), memory, free, cpus }
}

/// Parses the size after `label` in lines such as `Node 0 MemTotal:  65842012 kB`.
fn memory(text: &str, label: &str) -> Option<Bytes> {
    let mut words = text.split_whitespace().skip_while(|word| *word != label).skip(1);
    let kib: u64 = words.next()?.parse().ok()?;
    (words.next()? == "kB").then(|| kib.checked_mul(1024).map(Bytes::new)).flatten()
}
