//! Work on a buffer that may still run, and the leases on it.
//!
//! Growth: an entry for each stream with such work, O(log streams) to record work or to forget it. What
//! waits for all of it is O(streams).
//!
//! [`Holders`] are the leases on one buffer. All of them use it alike: one of them exclusively, or several shared on the card, or several in
//! place. So whether a request conflicts is known without a look at each of them.
//!
//! Growth: an entry for each lease, O(log leases) to add, find or remove one; O(1) for one lease.
//!
//! [`FewMap`] is an ordered map that allocates nothing while it has few entries.
//!
//! Growth: up to eight entries are a sorted list, which is searched in place; more are a search tree,
//! O(log n) for each operation. It becomes a list again below five entries.
//!
//! [`UseIndex`] has the buffers by the work that uses them.
//!
//! Growth: an entry of 16 bytes for each use that is not known to be complete. Work that completes is
//! found in O(log streams), and O(1) for each of its uses, however many buffers have other work.

use std::collections::{BTreeMap, VecDeque};

use smallvec::SmallVec;

use super::{Access, BufferId, BufferLeaseId, HolderKey, StreamKey, UseToken};

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

#[derive(Clone, Debug)]
pub(super) struct Holders {
    /// Access of all leases. Meaningless without one.
    access: Access,
    is_in_place: bool,
    /// By their holders.
    leases: FewMap<(HolderKey, BufferLeaseId), ()>,
}

impl Default for Holders {
    fn default() -> Holders {
        Holders { access: Access::Shared, is_in_place: false, leases: FewMap::default() }
    }
}

impl Holders {
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Returns the number of leases.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Returns true if leases use the buffer on the card.
    pub fn use_card(&self) -> bool {
        !self.is_in_place && !self.is_empty()
    }

    /// Returns true if leases read the buffer in place.
    pub fn read_in_place(&self) -> bool {
        self.is_in_place && !self.is_empty()
    }

    /// Returns true if one lease excludes all others.
    pub fn is_exclusive(&self) -> bool {
        self.access == Access::Exclusive && !self.is_empty()
    }

    /// Returns true if the leases exclude another one that comes to the card.
    pub fn exclude(&self, wanted: Access) -> bool {
        let excludes = self.is_in_place || self.access.max(wanted) == Access::Exclusive;
        excludes && !self.is_empty()
    }

    /// Adds a lease that does not conflict with the others.
    pub fn add(
        &mut self,
        lease: BufferLeaseId,
        holder: HolderKey,
        access: Access,
        is_in_place: bool,
    ) {
        let is_alike = (self.access, self.is_in_place) == (Access::Shared, is_in_place);
        let may_join = is_alike && access == Access::Shared;
        debug_assert!(self.is_empty() || may_join, "{lease} conflicts with {self:?}");
        (self.access, self.is_in_place) = (access, is_in_place);
        self.leases.insert((holder, lease), ());
    }

    /// Removes a lease. Returns true if it was there.
    pub fn remove(&mut self, lease: BufferLeaseId, holder: HolderKey) -> bool {
        self.leases.remove((holder, lease)).is_some()
    }

    /// Returns true if this lease is there, with this access.
    pub fn contains(&self, lease: BufferLeaseId, holder: HolderKey, access: Access) -> bool {
        self.leases.get((holder, lease)).is_some() && self.access == access
    }

    /// Returns true if a lease has this holder.
    pub fn has(&self, holder: HolderKey) -> bool {
        let first = self.leases.first_from((holder, BufferLeaseId(0)));
        first.is_some_and(|((found, _), ())| found == holder)
    }

    /// Returns the leases, oldest first. O(leases log leases).
    pub fn leases(&self) -> Vec<BufferLeaseId> {
        let mut leases: Vec<BufferLeaseId> =
            self.leases.iter().map(|((_, lease), ())| lease).collect();
        leases.sort_unstable();
        leases
    }
}

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

/// Most entries of the list.
const FEW: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct FewMap<K, V> {
    /// Sorted. Empty while there is a tree.
    list: SmallVec<[(K, V); 2]>,
    /// Empty while there is a list.
    tree: BTreeMap<K, V>,
}

impl<K, V> Default for FewMap<K, V> {
    fn default() -> FewMap<K, V> {
        FewMap { list: SmallVec::new(), tree: BTreeMap::new() }
    }
}

impl<K: Copy + Ord, V: Copy> FewMap<K, V> {
    pub fn len(&self) -> usize {
        self.list.len() + self.tree.len()
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty() && self.tree.is_empty()
    }

    fn place(&self, key: K) -> Result<usize, usize> {
        self.list.binary_search_by_key(&key, |&(known, _)| known)
    }

    /// Returns the value of a key. O(log n).
    pub fn get(&self, key: K) -> Option<V> {
        match self.place(key) {
            Ok(place) => Some(self.list[place].1),
            Err(_) => self.tree.get(&key).copied(),
        }
    }

    /// Sets the value of a key. O(log n).
    pub fn insert(&mut self, key: K, value: V) {
        if !self.tree.is_empty() {
            self.tree.insert(key, value);
            return;
        }
        match self.place(key) {
            Ok(place) => self.list[place].1 = value,
            Err(place) if self.list.len() < FEW => self.list.insert(place, (key, value)),
            Err(_) => {
                self.tree = std::mem::take(&mut self.list).into_iter().collect();
                self.tree.insert(key, value);
            }
        }
    }

    /// Removes a key. Returns its value. O(log n).
    pub fn remove(&mut self, key: K) -> Option<V> {
        if let Ok(place) = self.place(key) {
            return Some(self.list.remove(place).1);
        }
        let value = self.tree.remove(&key)?;
        if self.tree.len() <= FEW / 2 {
            self.list = std::mem::take(&mut self.tree).into_iter().collect();
        }
        Some(value)
    }

    /// Returns the first entry at or after a key. O(log n).
    pub fn first_from(&self, key: K) -> Option<(K, V)> {
        let place = self.list.partition_point(|&(known, _)| known < key);
        let in_tree = || self.tree.range(key..).next().map(|(&key, &value)| (key, value));
        self.list.get(place).copied().or_else(in_tree)
    }

    /// Returns the entries in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, V)> {
        let in_tree = self.tree.iter().map(|(&key, &value)| (key, value));
        self.list.iter().copied().chain(in_tree)
    }
}
