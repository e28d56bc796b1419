//! Number of entries of each table, to find what stays after its object has ended.

use super::Deferrables;

impl Deferrables {
    /// Returns the number of entries of each table. O(entries).
    #[doc(hidden)]
    pub fn footprint(&self) -> Vec<(&'static str, usize)> {
        let in_sets: usize = self.group_sets.values().map(std::collections::BTreeSet::len).sum();
        vec![
            ("buffers", self.buffers.len()),
            ("ranges", self.ranges.len()),
            ("leases", self.leases.len()),
            ("waiting requests", self.wait_queue.waiters.len()),
            ("entries of waiting requests", self.wait_queue.entries()),
            ("moves", self.moves.len()),
            ("uses by work", self.uses.len()),
            ("buffers to end", self.ending.len()),
            ("sets of groups", self.group_sets.len() + in_sets),
            ("lists of victims", self.lists.len()),
            ("copies on cards", self.peer_copies.len()),
            ("copies on the host", self.host_copies.len()),
        ]
    }
}
