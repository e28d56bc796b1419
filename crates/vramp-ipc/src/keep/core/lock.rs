//! A lock that many read or one writes, in the order of the requests.
//!
//! A request is granted at once if nothing waits and nothing excludes it; otherwise it waits in a queue. So a
//! waiting writer stops readers that come later, and no request waits for ever behind newer ones. The right to
//! build a version of an entry is such a lock that is only written.
//!
//! Each change is O(log owners).

use std::collections::{BTreeMap, BTreeSet};

/// What a client may do with the bytes of a version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lock {
    /// The version stays; its bytes may change at any time.
    #[default]
    None,
    /// No client changes the bytes.
    Read,
    /// No other client reads or changes the bytes.
    Write,
}

/// A client.
pub type Owner = u64;

/// Who has the lock and who waits for it.
#[derive(Debug, Default)]
pub struct LockQueue {
    readers: BTreeSet<Owner>,
    writer: Option<Owner>,
    waiting: BTreeMap<u64, (Owner, Lock)>,
    places: BTreeMap<Owner, u64>,
    next_place: u64,
    waiting_writers: u64,
}

impl LockQueue {
    /// Takes the lock, or waits for it. Returns true if the owner has it. The owner has and waits for
    /// nothing before.
    pub fn request(&mut self, owner: Owner, lock: Lock) -> bool {
        debug_assert!(self.held(owner) == Lock::None && !self.waits(owner), "{owner}");
        if self.waiting.is_empty() && self.take(owner, lock) {
            return true;
        }
        self.next_place += 1;
        self.waiting.insert(self.next_place, (owner, lock));
        self.places.insert(owner, self.next_place);
        self.waiting_writers += u64::from(lock == Lock::Write);
        false
    }

    /// Takes the lock, whatever waits, unless another owner's excludes it. Returns true if the owner has it.
    pub fn take(&mut self, owner: Owner, lock: Lock) -> bool {
        let is_free = match lock {
            Lock::None => true,
            Lock::Read => self.writer.is_none(),
            Lock::Write => self.writer.is_none() && self.readers.is_empty(),
        };
        match lock {
            Lock::Read if is_free => drop(self.readers.insert(owner)),
            Lock::Write if is_free => self.writer = Some(owner),
            _ => {}
        }
        is_free
    }

    /// Takes back what the owner has or waits for.
    pub fn release(&mut self, owner: Owner) {
        self.cancel(owner);
        self.readers.remove(&owner);
        self.writer.take_if(|writer| *writer == owner);
    }

    /// Ends the wait of an owner, if it waits.
    pub fn cancel(&mut self, owner: Owner) {
        let Some(place) = self.places.remove(&owner) else { return };
        if let Some((_, Lock::Write)) = self.waiting.remove(&place) {
            self.waiting_writers -= 1;
        }
    }

    /// Grants the request at the front, if nothing excludes it any more, and returns its owner.
    pub fn grant_next(&mut self) -> Option<Owner> {
        let (_, &(owner, lock)) = self.waiting.first_key_value()?;
        if !self.take(owner, lock) {
            return None;
        }
        self.cancel(owner);
        Some(owner)
    }

    /// Returns the lock that an owner has.
    pub fn held(&self, owner: Owner) -> Lock {
        match self.writer {
            Some(writer) if writer == owner => Lock::Write,
            _ if self.readers.contains(&owner) => Lock::Read,
            _ => Lock::None,
        }
    }

    /// Returns true if the owner waits.
    pub fn waits(&self, owner: Owner) -> bool {
        self.places.contains_key(&owner)
    }

    /// Returns the owner of the write lock.
    pub fn writer(&self) -> Option<Owner> {
        self.writer
    }

    /// Returns those that have the lock.
    pub fn holders(&self) -> impl Iterator<Item = Owner> {
        self.writer.into_iter().chain(self.readers.iter().copied())
    }

    /// Returns those that wait, in their order.
    pub fn waiting(&self) -> impl Iterator<Item = (Owner, Lock)> {
        self.waiting.values().copied()
    }

    /// Returns the number of requests that wait.
    pub fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of waiting writers.
    pub fn waiting_writers(&self) -> u64 {
        self.waiting_writers
    }

    /// Returns true if no owner has the lock or waits for it.
    pub fn is_free(&self) -> bool {
        self.writer.is_none() && self.readers.is_empty() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(lock: &mut LockQueue) -> Vec<Owner> {
        std::iter::from_fn(|| lock.grant_next()).collect()
    }

    #[test]
    fn a_waiting_writer_stops_later_readers() {
        let mut lock = LockQueue::default();
        assert!(lock.request(1, Lock::Read) && lock.request(2, Lock::Read));
        assert!(!lock.request(3, Lock::Write) && !lock.request(4, Lock::Read));
        assert!(!lock.request(5, Lock::Read));
        assert_eq!((lock.waiting_writers(), lock.waiting_len()), (1, 3));
        lock.release(1);
        assert_eq!(granted(&mut lock), []);
        lock.release(2);
        assert_eq!(granted(&mut lock), [3]);
        assert_eq!(
            (lock.held(3), lock.held(4), lock.waiting_writers()),
            (Lock::Write, Lock::None, 0)
        );
        lock.release(3);
        assert_eq!(granted(&mut lock), [4, 5]);
    }

    #[test]
    fn the_end_of_a_waiting_writer_lets_the_readers_behind_it_read() {
        let mut lock = LockQueue::default();
        assert!(lock.request(1, Lock::Read));
        assert!(!lock.request(2, Lock::Write) && !lock.request(3, Lock::Read));
        lock.release(2);
        assert_eq!(granted(&mut lock), [3]);
        lock.release(1);
        lock.release(3);
        assert!(lock.is_free());
    }
}
