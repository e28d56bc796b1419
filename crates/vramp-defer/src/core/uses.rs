//! Work on a buffer that may still run.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::{Access, StreamKey, UseToken};

/// The last reading and the last writing work of each stream. Short lists.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    writes: SmallVec<[UseToken; 2]>,
    reads: SmallVec<[UseToken; 2]>,
    /// Copies of transfers that ended without waiting for them. Empty unless the device failed.
    copies: Vec<UseToken>,
}

impl Uses {
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty() && self.copies.is_empty()
    }

    /// Records copies that may read or write the buffer, and are not ordered with its leases.
    pub fn note_copies(&mut self, copies: &[UseToken]) {
        self.copies = latest_by_stream(self.copies.iter().chain(copies));
    }

    pub fn note(&mut self, token: UseToken, access: Access) {
        let list = match access {
            Access::Shared => &mut self.reads,
            Access::Exclusive | Access::Overwrite => &mut self.writes,
        };
        match list.iter_mut().find(|other| other.stream == token.stream) {
            Some(known) => known.number = known.number.max(token.number),
            None => list.push(token),
        }
    }

    /// Replaces all uses by writes that were ordered after them. Copies stay: they may be younger.
    pub fn replace(&mut self, writes: impl Iterator<Item = UseToken>) {
        *self = Uses { copies: std::mem::take(&mut self.copies), ..Uses::default() };
        writes.for_each(|token| self.note(token, Access::Exclusive));
    }

    /// Forgets the work of a stream up to a point.
    pub fn over(&mut self, token: UseToken) {
        let goes_on =
            |use_: &mut UseToken| use_.stream != token.stream || use_.number > token.number;
        self.writes.retain(goes_on);
        self.reads.retain(goes_on);
        self.copies.retain(|use_| use_.stream != token.stream || use_.number > token.number);
    }

    /// Returns what a reader waits for, in the order of the streams.
    pub fn writes(&self) -> Vec<UseToken> {
        latest_by_stream(self.writes.iter().chain(&self.copies))
    }

    /// Returns what a writer waits for, in the order of the streams.
    pub fn all(&self) -> Vec<UseToken> {
        latest_by_stream(self.writes.iter().chain(&self.reads).chain(&self.copies))
    }

    pub fn before(&self, access: Access) -> Vec<UseToken> {
        match access {
            Access::Shared => self.writes(),
            Access::Exclusive | Access::Overwrite => self.all(),
        }
    }
}

/// Returns the last token of each stream.
pub(super) fn latest_by_stream<'a>(tokens: impl Iterator<Item = &'a UseToken>) -> Vec<UseToken> {
    let mut by_stream: BTreeMap<StreamKey, u64> = BTreeMap::new();
    for token in tokens {
        let number = by_stream.entry(token.stream).or_insert(token.number);
        *number = (*number).max(token.number);
    }
    by_stream.into_iter().map(|(stream, number)| UseToken { stream, number }).collect()
}
