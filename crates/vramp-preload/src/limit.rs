//! A limit of the memory that the process has of each device.
//!
//! A request beyond it gets the driver's own out-of-memory error. Counted are requests of all kinds, and memory that the
//! program creates for virtual addresses, until it is released and unmapped. Not counted is what the driver takes
//! itself: contexts, code of kernels, stacks, and what its stream-ordered pool keeps.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::driver::DEVICES;

/// What the process has of each device, and may have.
#[derive(Debug)]
pub struct Limit {
    bytes: u64,
    used: [AtomicU64; DEVICES],
    handles: Mutex<Handles>,
}

/// Memory that the program maps itself.
#[derive(Debug, Default)]
struct Handles {
    by_number: HashMap<u64, Handle>,
    /// Length and handle of each mapping, by address.
    maps: BTreeMap<u64, (u64, u64)>,
}

#[derive(Debug)]
struct Handle {
    size: u64,
    device: usize,
    /// Not yet released, and mappings.
    holders: u64,
}

impl Limit {
    pub fn new(bytes: u64) -> Limit {
        Limit { bytes, used: [const { AtomicU64::new(0) }; DEVICES], handles: Mutex::default() }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes that a device may still give.
    pub fn room(&self, device: usize) -> u64 {
        self.bytes.saturating_sub(self.used[device].load(Ordering::Relaxed))
    }

    /// Counts a request, or returns false if it would pass the limit.
    pub fn charge(&self, device: usize, size: u64) -> bool {
        let more = |used: u64| used.checked_add(size).filter(|&sum| sum <= self.bytes);
        self.used[device].fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts memory as given back.
    pub fn credit(&self, device: usize, size: u64) {
        self.used[device].fetch_sub(size, Ordering::Relaxed);
    }

    /// A handle was created, whose bytes are charged.
    pub fn created(&self, number: u64, device: usize, size: u64) {
        let handle = Handle { size, device, holders: 1 };
        self.handles().by_number.insert(number, handle);
    }

    /// A handle was released once.
    pub fn released(&self, number: u64) {
        self.let_go(&mut self.handles(), number);
    }

    /// The program got a handle once more, from an address.
    pub fn retained(&self, number: u64) {
        if let Some(handle) = self.handles().by_number.get_mut(&number) {
            handle.holders += 1;
        }
    }

    /// A handle was mapped.
    pub fn mapped(&self, address: u64, length: u64, number: u64) {
        let mut handles = self.handles();
        if let Some(handle) = handles.by_number.get_mut(&number) {
            handle.holders += 1;
            handles.maps.insert(address, (length, number));
        }
    }

    /// Addresses were unmapped. O(log n) for each mapping.
    pub fn unmapped(&self, address: u64, length: u64) {
        let mut handles = self.handles();
        let end = address.saturating_add(length);
        while let Some((&start, &(_, number))) = handles.maps.range(address..end).next() {
            handles.maps.remove(&start);
            self.let_go(&mut handles, number);
        }
    }

    fn let_go(&self, handles: &mut Handles, number: u64) {
        let Some(handle) = handles.by_number.get_mut(&number) else { return };
        handle.holders -= 1;
        if handle.holders == 0 {
            let Handle { size, device, .. } = *handle;
            handles.by_number.remove(&number);
            self.credit(device, size);
        }
    }

    fn handles(&self) -> std::sync::MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_the_limit_are_refused_and_count_nothing() {
        let limit = Limit::new(100);
        assert!(limit.charge(0, 60) && !limit.charge(0, 41) && limit.charge(1, 100));
        assert!(!limit.charge(0, u64::MAX));
        assert_eq!((limit.room(0), limit.room(1)), (40, 0));
        limit.credit(0, 60);
        assert_eq!(limit.room(0), 100);
    }

    #[test]
    fn a_handle_counts_until_it_is_released_and_unmapped() {
        let limit = Limit::new(100);
        assert!(limit.charge(0, 50));
        limit.created(7, 0, 50);
        limit.mapped(4096, 50, 7);
        limit.mapped(8192, 50, 7);
        limit.released(7);
        assert_eq!(limit.room(0), 50);
        limit.unmapped(4096, 8192);
        assert_eq!(limit.room(0), 100);
        // Handles of other processes are not this one's.
        limit.mapped(4096, 50, 9);
        limit.released(9);
        assert_eq!(limit.room(0), 100);
    }
}
