//! An ordered map that allocates nothing while it has few entries.
//!
//! Growth: up to eight entries are a sorted list, which is searched in place; more are a search tree,
//! O(log n) for each operation. It becomes a list again below five entries.

use std::collections::BTreeMap;

use smallvec::SmallVec;

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
