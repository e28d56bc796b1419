//! Work on a buffer that may still run.
//!
//! Growth: an entry for each stream with such work, O(log streams) to record work or to forget it. What
//! waits for all of it is O(streams).

use std::collections::BTreeMap;

use super::few_map::FewMap;
use super::{Access, StreamKey, UseToken};

/// The last number of each stream.
type Latest = FewMap<StreamKey, u64>;

/// The last reading and the last writing work of each stream.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    writes: Latest,
    reads: Latest,
    /// Copies of transfers that ended without waiting for them. Empty unless the device failed.
    copies: Latest,
}

fn note(latest: &mut Latest, token: UseToken) {
    let known = latest.get(token.stream).unwrap_or(0);
    latest.insert(token.stream, known.max(token.number));
}

fn forget(latest: &mut Latest, token: UseToken) {
    if latest.get(token.stream).is_some_and(|number| number <= token.number) {
        latest.remove(token.stream);
    }
}

fn tokens(latest: &Latest) -> impl Iterator<Item = UseToken> {
    latest.iter().map(|(stream, number)| UseToken { stream, number })
}

impl Uses {
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty() && self.copies.is_empty()
    }

    /// Records copies that may read or write the buffer, and are not ordered with its leases.
    pub fn note_copies(&mut self, copies: &[UseToken]) {
        copies.iter().for_each(|&token| note(&mut self.copies, token));
    }

    pub fn note(&mut self, token: UseToken, access: Access) {
        match access {
            Access::Shared => note(&mut self.reads, token),
            Access::Exclusive | Access::Overwrite => note(&mut self.writes, token),
        }
    }

    /// Replaces all uses by writes that were ordered after them. Copies stay: they may be younger.
    pub fn replace(&mut self, writes: impl Iterator<Item = UseToken>) {
        *self = Uses { copies: std::mem::take(&mut self.copies), ..Uses::default() };
        writes.for_each(|token| self.note(token, Access::Exclusive));
    }

    /// Forgets the work of a stream up to a point.
    pub fn over(&mut self, token: UseToken) {
        let Uses { writes, reads, copies } = self;
        [writes, reads, copies].into_iter().for_each(|latest| forget(latest, token));
    }

    /// Returns what a reader waits for, in the order of the streams.
    pub fn writes(&self) -> Vec<UseToken> {
        latest_by_stream(tokens(&self.writes).chain(tokens(&self.copies)))
    }

    /// Returns what a writer waits for, in the order of the streams.
    pub fn all(&self) -> Vec<UseToken> {
        let leases = tokens(&self.writes).chain(tokens(&self.reads));
        latest_by_stream(leases.chain(tokens(&self.copies)))
    }

    pub fn before(&self, access: Access) -> Vec<UseToken> {
        match access {
            Access::Shared => self.writes(),
            Access::Exclusive | Access::Overwrite => self.all(),
        }
    }
}

/// Returns the last token of each stream.
pub(super) fn latest_by_stream(tokens: impl Iterator<Item = UseToken>) -> Vec<UseToken> {
    let mut by_stream: BTreeMap<StreamKey, u64> = BTreeMap::new();
    for token in tokens {
        let number = by_stream.entry(token.stream).or_insert(token.number);
        *number = (*number).max(token.number);
    }
    by_stream.into_iter().map(|(stream, number)| UseToken { stream, number }).collect()
}
