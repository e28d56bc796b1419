//! Pinned host memory. Its bytes are always stored, because the host reads and writes them.

use std::collections::HashMap;
use std::sync::Arc;

use vramp_core::Bytes;

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
