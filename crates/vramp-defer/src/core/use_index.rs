//! Buffers by the work that uses them.
//!
//! Growth: an entry of 16 bytes for each use that is not known to be complete. Work that completes is
//! found in O(log streams), and O(1) for each of its uses, however many buffers have other work.

use std::collections::{BTreeMap, VecDeque};

use super::ids::StreamKey;
use super::{BufferId, UseToken};

/// For each stream with work in flight its uses, in the order of their numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct UseIndex {
    streams: BTreeMap<StreamKey, VecDeque<(u64, BufferId)>>,
}

impl UseIndex {
    /// Records that work uses a buffer. O(log streams) if the number is the stream's highest so far.
    pub fn note(&mut self, token: UseToken, buffer: BufferId) {
        let uses = self.streams.entry(token.stream).or_default();
        let entry = (token.number, buffer);
        match uses.back() {
            Some(last) if *last > entry => {
                if let Err(place) = uses.binary_search(&entry) {
                    uses.insert(place, entry);
                }
            }
            Some(last) if *last == entry => {}
            _ => uses.push_back(entry),
        }
    }

    /// Removes the work of a stream up to a point, `most` uses of it. Returns their buffers: some more than
    /// once, and some that do not exist any more.
    pub fn take_over(&mut self, token: UseToken, most: usize) -> Vec<BufferId> {
        let Some(uses) = self.streams.get_mut(&token.stream) else { return Vec::new() };
        let count = uses.partition_point(|&(number, _)| number <= token.number).min(most);
        let over = uses.drain(..count).map(|(_, buffer)| buffer).collect();
        if uses.is_empty() {
            self.streams.remove(&token.stream);
        }
        over
    }

    /// Returns true if this use is recorded.
    pub fn contains(&self, token: UseToken, buffer: BufferId) -> bool {
        let uses = self.streams.get(&token.stream);
        uses.is_some_and(|uses| uses.binary_search(&(token.number, buffer)).is_ok())
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.streams.values().map(VecDeque::len).sum()
    }
}
