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
    held: Bytes,
}

#[derive(Debug)]
struct Buffer {
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
    pub fn alloc(&mut self, len: Bytes) -> Outcome<HostBuffer> {
        if len.is_zero() {
            return Err(Refusal::invalid("the length is zero"));
        }
        self.add(len, HostBytes::Simulated(Content::default()))
    }

    pub fn register(&mut self, memory: &Arc<HostMemory>) -> Outcome<HostBuffer> {
        self.add(memory.len(), HostBytes::Registered(Arc::clone(memory)))
    }

    fn add(&mut self, len: Bytes, bytes: HostBytes) -> Outcome<HostBuffer> {
        let Some(held) = self.held.checked_add(len) else {
            return Err(Refusal::out_of_memory(format!("{len} of host memory requested")));
        };
        self.held = held;
        self.made += 1;
        self.buffers.insert(self.made, Buffer { len, bytes });
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

    /// Refuses a part that does not lie in a live buffer.
    pub fn check(&self, buffer: HostBuffer, offset: Bytes, len: Bytes) -> Outcome<()> {
        let held = self.buffers.get(&buffer.number()).ok_or_else(|| unknown(buffer))?;
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

    pub fn live(&self) -> usize {
        self.buffers.len()
    }

    pub fn held(&self) -> Bytes {
        self.held
    }
}

fn unknown(buffer: HostBuffer) -> Refusal {
    Refusal::unknown("host buffer", buffer.number())
}
