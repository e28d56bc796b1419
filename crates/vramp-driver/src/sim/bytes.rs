//! Contents of simulated memory.
//!
//! Bytes are stored in blocks that are allocated when first written, so a test that fills one page of
//! a large handle pays for that page only. Memory never written reads as [`UNWRITTEN`], because fresh
//! device memory is not zero. Where the host's memory is mapped at the addresses, bytes are stored
//! there, and memory never written reads as zero.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramp_host::{MapError, MappedMemory, SharedRange};

use super::refusal::Outcome;

const BLOCK: usize = 64 << 10;

/// Value of bytes that were never written.
pub(super) const UNWRITTEN: u8 = 0xCD;

/// Whether a simulated device stores the bytes that work writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contents {
    /// Only sizes and addresses are kept; copies and fills only take time. For traces larger than
    /// the host's memory.
    #[default]
    Discarded,
    /// Bytes are stored, so that tests can verify them through alias mappings and remapping.
    Stored,
}

/// Bytes of one physical allocation.
#[derive(Debug, Default)]
pub(super) struct Content {
    blocks: BTreeMap<u64, Block>,
    /// The host's memory that stores the bytes instead.
    mapped: Option<Mapped>,
}

#[derive(Debug)]
struct Mapped {
    memory: Arc<MappedMemory>,
    stored: Stored,
}

/// Where the bytes are.
#[derive(Debug)]
enum Stored {
    /// In the file of the mapped memory.
    Own { offset: u64, len: u64, exported: bool },
    /// In the file of another simulator.
    Shared(SharedRange),
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Stored::Own { offset, len, exported } = self.stored
            // Another process may still use what was exported. If the kernel cannot tell, pages stay.
            && !(exported && self.memory.shared().is_held(offset, len).unwrap_or(true))
        {
            // The pages that a refusal leaves are returned with the device.
            let _ = self.memory.discard(offset, len);
        }
    }
}

impl Mapped {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MapError> {
        match &self.stored {
            Stored::Own { offset: start, .. } => self.memory.read(start + offset, into),
            Stored::Shared(range) => range.read(offset, into),
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MapError> {
        match &self.stored {
            Stored::Own { offset: start, .. } => self.memory.write(start + offset, from),
            Stored::Shared(range) => range.write(offset, from),
        }
    }
}

#[derive(Debug)]
enum Block {
    /// All bytes equal, as a fill leaves them.
    Uniform(u8),
    Mixed(Box<[u8]>),
}

impl Block {
    /// Returns the bytes individually, to write some of them.
    fn mixed(&mut self) -> &mut [u8] {
        if let Block::Uniform(byte) = self {
            *self = Block::Mixed(vec![*byte; BLOCK].into_boxed_slice());
        }
        match self {
            Block::Mixed(bytes) => bytes,
            Block::Uniform(_) => unreachable!("it was just replaced"),
        }
    }
}

impl Content {
    /// Returns a content that is stored in the host's memory at `offset`, and discarded when dropped.
    pub fn mapped(memory: Arc<MappedMemory>, offset: u64, len: u64) -> Content {
        let stored = Stored::Own { offset, len, exported: false };
        Content { mapped: Some(Mapped { memory, stored }), ..Content::default() }
    }

    /// Returns a content that another simulator exported, to be mapped beside `memory`.
    pub fn shared(memory: Arc<MappedMemory>, range: SharedRange) -> Content {
        let stored = Stored::Shared(range);
        Content { mapped: Some(Mapped { memory, stored }), ..Content::default() }
    }

    /// Returns what another simulator exported, if this is it.
    pub fn shared_range(&self) -> Option<&SharedRange> {
        match &self.mapped.as_ref()?.stored {
            Stored::Shared(range) => Some(range),
            Stored::Own { .. } => None,
        }
    }

    /// Returns the offset in the file of the mapped memory, where a descriptor may keep the bytes from
    /// now on. `None` if the host's memory does not store them.
    pub fn export(&mut self) -> Option<u64> {
        match &mut self.mapped.as_mut()?.stored {
            Stored::Own { offset, exported, .. } => {
                *exported = true;
                Some(*offset)
            }
            Stored::Shared(_) => None,
        }
    }

    /// Maps the host's memory that stores the bytes, if there is any, at `at`.
    pub fn map_at(&self, at: u64) -> Outcome<()> {
        let Some(mapped) = &self.mapped else { return Ok(()) };
        match &mapped.stored {
            Stored::Own { offset, len, .. } => mapped.memory.map(at, *offset, *len)?,
            Stored::Shared(range) => mapped.memory.map_shared(at, range)?,
        }
        Ok(())
    }

    /// Copies the bytes from `offset` on into `into`.
    ///
    /// # Panics
    /// The kernel refuses to copy the host's memory, which is a file that was opened for it.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        if let Some(mapped) = &self.mapped {
            let read = mapped.read(offset, into);
            return read.expect("a memory file can be read");
        }
        for (block, within, part) in parts(offset, into.len()) {
            match self.blocks.get(&block) {
                Some(Block::Mixed(bytes)) => {
                    let len = part.len();
                    into[part].copy_from_slice(&bytes[within..within + len]);
                }
                Some(Block::Uniform(byte)) => into[part].fill(*byte),
                None => into[part].fill(UNWRITTEN),
            }
        }
    }

    /// Replaces the bytes from `offset` on by `from`.
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        if let Some(mapped) = &self.mapped {
            let written = mapped.write(offset, from);
            return written.expect("the host has memory for what a simulated card stores");
        }
        for (block, within, part) in parts(offset, from.len()) {
            let bytes = self.blocks.entry(block).or_insert(Block::Uniform(UNWRITTEN)).mixed();
            bytes[within..within + part.len()].copy_from_slice(&from[part]);
        }
    }

    /// Replaces `len` bytes from `offset` on by `byte`.
    pub fn fill(&mut self, offset: u64, len: usize, byte: u8) {
        if self.mapped.is_some() {
            let bytes = vec![byte; len.min(BLOCK)];
            for done in (0..len).step_by(BLOCK) {
                self.write(offset + done as u64, &bytes[..BLOCK.min(len - done)]);
            }
            return;
        }
        for (block, within, part) in parts(offset, len) {
            if part.len() == BLOCK {
                self.blocks.insert(block, Block::Uniform(byte));
            } else {
                let bytes = self.blocks.entry(block).or_insert(Block::Uniform(UNWRITTEN)).mixed();
                bytes[within..within + part.len()].fill(byte);
            }
        }
    }
}

/// Splits `len` bytes from `offset` on at block boundaries: block number, offset within the block,
/// and the matching part of the caller's slice.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % BLOCK as u64) as usize;
        let part = done..len.min(done + BLOCK - within);
        done = part.end;
        Some((at / BLOCK as u64, within, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_across_a_block_boundary_are_read_back() {
        let mut content = Content::default();
        let pattern: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        content.write(60_000, &pattern);
        content.fill(300_000, 200_000, 9);
        let mut filled = vec![0; 200_002];
        content.read(299_999, &mut filled);
        assert_eq!((filled[0], filled[200_001]), (UNWRITTEN, UNWRITTEN));
        assert!(vramp_testing::is_filled(&filled[1..=200_000], 9));
        let mut back = vec![0; pattern.len() + 2];
        content.read(59_999, &mut back);
        assert_eq!(back[0], UNWRITTEN);
        assert_eq!(back[1..=pattern.len()], pattern);
        assert_eq!(back[pattern.len() + 1], UNWRITTEN);
    }
}
