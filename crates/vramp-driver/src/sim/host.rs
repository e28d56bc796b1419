//! Pinned host memory. Its bytes are always stored, because the host reads and writes them.
//!
//! Memory that a library or a network card has registered: it holds the physical memory that was
//! mapped in a range, and does not notice when other memory is mapped there.
//!
//! 1. [`Registered::add`] notes the mappings of a range and their physical memory.
//! 2. Unmapping one of them, mapping its memory elsewhere, or releasing its memory after the unmap is
//!    a hazard for each holder.
//! 3. [`Registered::remove`] ends it.
//!
//! Each step costs O(holders of the memory) and a look-up.

use std::collections::HashMap;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_host::{HostMemory, OutOfBounds};

use super::bytes::Content;
use super::refusal::{Outcome, Refusal};
use crate::HostBuffer;

#[derive(Debug, Default)]
pub(super) struct HostBuffers {
    buffers: HashMap<u64, Buffer>,
    made: u64,
    /// Bytes of the buffers of all devices.
    held: Bytes,
}

#[derive(Debug)]
struct Buffer {
    device: usize,
    len: Bytes,
    bytes: HostBytes,
}

/// Bytes of pinned memory: simulated, or memory of this process.
#[derive(Debug)]
pub(super) enum HostBytes {
    Simulated(Content),
    Registered(Arc<HostMemory>),
}

const CHECKED: &str = "parts of host buffers are checked before work begins";

impl HostBytes {
    /// Copies the bytes from `offset` on into `into`.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        match self {
            HostBytes::Simulated(content) => content.read(offset, into),
            HostBytes::Registered(memory) => inside(memory.read(Bytes::new(offset), into)),
        }
    }

    /// Replaces the bytes from `offset` on by `from`.
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        match self {
            HostBytes::Simulated(content) => content.write(offset, from),
            HostBytes::Registered(memory) => inside(memory.write(Bytes::new(offset), from)),
        }
    }
}

fn inside(result: Result<(), OutOfBounds>) {
    result.expect(CHECKED);
}

impl HostBuffers {
    pub fn alloc(&mut self, device: usize, len: Bytes) -> Outcome<HostBuffer> {
        if len.is_zero() {
            return Err(Refusal::invalid("the length is zero"));
        }
        self.add(device, len, HostBytes::Simulated(Content::default()))
    }

    pub fn register(&mut self, device: usize, memory: &Arc<HostMemory>) -> Outcome<HostBuffer> {
        self.add(device, memory.len(), HostBytes::Registered(Arc::clone(memory)))
    }

    fn add(&mut self, device: usize, len: Bytes, bytes: HostBytes) -> Outcome<HostBuffer> {
        let Some(held) = self.held.checked_add(len) else {
            return Err(Refusal::out_of_memory(format!("{len} of host memory requested")));
        };
        self.held = held;
        self.made += 1;
        self.buffers.insert(self.made, Buffer { device, len, bytes });
        Ok(HostBuffer::from_number(self.made))
    }

    /// Returns true for memory that the caller allocated.
    pub fn is_registered(&self, buffer: HostBuffer) -> bool {
        let buffer = self.buffers.get(&buffer.number());
        buffer.is_some_and(|buffer| matches!(buffer.bytes, HostBytes::Registered(_)))
    }

    /// Frees a buffer and returns its length.
    pub fn free(&mut self, buffer: HostBuffer) -> Outcome<Bytes> {
        match self.buffers.remove(&buffer.number()) {
            Some(freed) => {
                self.held -= freed.len;
                Ok(freed.len)
            }
            None => Err(unknown(buffer)),
        }
    }

    /// Refuses a part that does not lie in a live buffer of the device.
    pub fn check(
        &self,
        device: usize,
        buffer: HostBuffer,
        offset: Bytes,
        len: Bytes,
    ) -> Outcome<()> {
        let held = self.buffers.get(&buffer.number()).filter(|held| held.device == device);
        let held = held.ok_or_else(|| unknown(buffer))?;
        if offset.checked_add(len).is_none_or(|end| end > held.len) {
            return Err(Refusal::invalid(format!(
                "{len} at offset {offset} are not inside host buffer {} of {}",
                buffer.number(),
                held.len
            )));
        }
        Ok(())
    }

    /// Returns the bytes of a buffer; `None` if it was freed.
    pub fn content(&self, buffer: u64) -> Option<&HostBytes> {
        self.buffers.get(&buffer).map(|buffer| &buffer.bytes)
    }

    /// Returns the bytes of a buffer; `None` if it was freed.
    pub fn content_mut(&mut self, buffer: u64) -> Option<&mut HostBytes> {
        self.buffers.get_mut(&buffer).map(|buffer| &mut buffer.bytes)
    }

    /// Returns the number of buffers of a device. O(buffers).
    pub fn live(&self, device: usize) -> usize {
        self.of(device).count()
    }

    /// Returns the bytes in buffers of a device. O(buffers).
    pub fn held(&self, device: usize) -> Bytes {
        self.of(device).map(|buffer| buffer.len).sum()
    }

    fn of(&self, device: usize) -> impl Iterator<Item = &Buffer> {
        self.buffers.values().filter(move |buffer| buffer.device == device)
    }
}

fn unknown(buffer: HostBuffer) -> Refusal {
    Refusal::unknown("host buffer", buffer.number())
}

/// A registration of a range: see [`Simulator::register`](super::Simulator::register).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Registration(pub(super) u64);

/// A registration that a call breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub name: String,
    pub range: AddrRange,
}

#[derive(Debug)]
struct Entry {
    holder: Holder,
    /// First address and physical memory of each mapping.
    mappings: Vec<(u64, u64)>,
}

#[derive(Debug, Default)]
pub(super) struct Registered {
    made: u64,
    entries: HashMap<u64, Entry>,
    /// Registrations of each mapping that is still mapped, by its first address.
    by_mapping: HashMap<u64, Vec<u64>>,
    /// Registrations of each physical memory, with the address that it was mapped at.
    by_physical: HashMap<u64, Vec<(u64, u64)>>,
}

impl Registered {
    /// Adds a registration of mappings, each with its first address and its physical memory.
    pub fn add(&mut self, holder: Holder, mappings: Vec<(u64, u64)>) -> Registration {
        self.made += 1;
        for (at, physical) in &mappings {
            self.by_mapping.entry(*at).or_default().push(self.made);
            self.by_physical.entry(*physical).or_default().push((self.made, *at));
        }
        self.entries.insert(self.made, Entry { holder, mappings });
        Registration(self.made)
    }

    /// Removes a registration. Returns false if there is none.
    pub fn remove(&mut self, registration: Registration) -> bool {
        let Some(entry) = self.entries.remove(&registration.0) else { return false };
        for (at, physical) in entry.mappings {
            drop_from(&mut self.by_mapping, at, |number| *number == registration.0);
            drop_from(&mut self.by_physical, physical, |(number, _)| *number == registration.0);
        }
        true
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Notes that the mapping at `at` is unmapped. Returns who holds it.
    pub fn unmapped(&mut self, at: u64) -> Vec<Holder> {
        let numbers = self.by_mapping.remove(&at).unwrap_or_default();
        numbers.iter().map(|number| self.entries[number].holder.clone()).collect()
    }

    /// Returns who holds physical memory that is mapped at `at`, which is another address.
    pub fn mapped(&self, physical: u64, at: u64) -> Vec<Holder> {
        self.holders(physical, |_, registered| registered != at)
    }

    /// Returns who holds physical memory that is released and was unmapped where it is registered.
    pub fn released(&self, physical: u64) -> Vec<Holder> {
        let unmapped = |number, registered| {
            let mapped = self.by_mapping.get(&registered);
            !mapped.is_some_and(|numbers| numbers.contains(&number))
        };
        self.holders(physical, unmapped)
    }

    fn holders(&self, physical: u64, wanted: impl Fn(u64, u64) -> bool) -> Vec<Holder> {
        let known = self.by_physical.get(&physical).into_iter().flatten();
        let broken = known.filter(|(number, registered)| wanted(*number, *registered));
        broken.map(|(number, _)| self.entries[number].holder.clone()).collect()
    }

    #[cfg(test)]
    fn sizes(&self) -> [usize; 3] {
        [self.entries.len(), self.by_mapping.len(), self.by_physical.len()]
    }
}

fn drop_from<T>(lists: &mut HashMap<u64, Vec<T>>, key: u64, gone: impl Fn(&T) -> bool) {
    if let Some(list) = lists.get_mut(&key) {
        list.retain(|entry| !gone(entry));
        if list.is_empty() {
            lists.remove(&key);
        }
    }
}

#[cfg(test)]
mod registered_tests {
    use super::*;
    use vramp_core::{Bytes, DeviceAddr};

    #[test]
    fn ten_thousand_registrations_that_ended_leave_no_entry() {
        let mut registered = Registered::default();
        let holder = Holder {
            name: "nic".to_owned(),
            range: AddrRange::new(DeviceAddr::new(0), Bytes::ZERO),
        };
        let made: Vec<_> = (0..10_000)
            .map(|i| registered.add(holder.clone(), vec![(i % 100, i % 100), (1000 + i, 1000 + i)]))
            .collect();
        assert_eq!(registered.sizes(), [10_000, 10_100, 10_100]);
        assert_eq!(registered.unmapped(1005).len(), 1);
        for registration in made {
            assert!(registered.remove(registration));
            assert!(!registered.remove(registration));
        }
        assert_eq!(registered.sizes(), [0, 0, 0]);
    }
}
