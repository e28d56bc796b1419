//! NUMA nodes with their memory and CPUs.
//!
//! Sets of CPUs.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use vramp_core::Bytes;

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

/// A set of CPU numbers in the kernel's list format: `0-3,8,10-11`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet {
    /// Sorted; no two touch.
    ranges: Vec<RangeInclusive<u32>>,
}

impl CpuSet {
    /// Returns the number of CPUs.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|range| u64::from(range.end() - range.start()) + 1).sum()
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns true if the set contains `cpu`.
    pub fn contains(&self, cpu: u32) -> bool {
        self.ranges.iter().any(|range| range.contains(&cpu))
    }

    /// Returns the CPU numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }
}

impl fmt::Display for CpuSet {
    /// Writes the kernel's list format.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .ranges
            .iter()
            .map(|range| match (range.start(), range.end()) {
                (start, end) if start == end => start.to_string(),
                (start, end) => format!("{start}-{end}"),
            })
            .collect();
        f.pad(&parts.join(","))
    }
}

/// A text is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a list of CPUs: write numbers and ranges, such as 0-3,8")]
pub struct ParseCpuSetError {
    /// The text.
    pub text: String,
}

impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    /// Parses the kernel's list format. The empty text is the empty set.
    fn from_str(text: &str) -> Result<CpuSet, ParseCpuSetError> {
        let refuse = || ParseCpuSetError { text: text.to_owned() };
        let mut ranges = Vec::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (start, end) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| refuse());
            let (start, end) = (number(start)?, number(end)?);
            if start > end {
                return Err(refuse());
            }
            ranges.push(start..=end);
        }
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<u32>> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if *range.start() <= last.end().saturating_add(1) => {
                    *last = *last.start()..=*last.end().max(range.end());
                }
                _ => merged.push(range),
            }
        }
        Ok(CpuSet { ranges: merged })
    }
}

#[cfg(test)]
mod cpus_tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read_and_written_as_the_kernel_does() {
        let set: CpuSet = "0-3,8,10-11\n".parse().unwrap();
        assert_eq!(set.to_string(), "0-3,8,10-11");
        assert_eq!(set.len(), 7);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11]);
        assert!(set.contains(8) && !set.contains(9));
        assert!("".parse::<CpuSet>().unwrap().is_empty());
        assert_eq!("4,0-2,3".parse::<CpuSet>().unwrap().to_string(), "0-4");
        assert_eq!("0-4294967295".parse::<CpuSet>().unwrap().len(), 1 << 32);
    }

    #[test]
    fn texts_that_are_no_list_of_processors_are_refused() {
        for text in ["a", "3-1", "1,,2", "-", "1-", "4294967296", "0-3:2/4"] {
            assert!(text.parse::<CpuSet>().is_err(), "{text}");
        }
    }
}
