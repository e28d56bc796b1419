//! What is left of a sleeping pool's chunks. `sleep.rs` changes it.

use vramp_core::{Bytes, ChunkAt, Range as PoolRange};

/// How much of a chunk of a sleeping pool is there. Failed driver calls leave chunks between the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// No memory.
    Gone,
    /// Memory that is not mapped.
    Created,
    /// Memory that is mapped, and that nothing may access.
    Mapped,
    /// Memory that can be used.
    Backed,
}

/// A chunk of a sleeping pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sleeper {
    pub at: ChunkAt,
    pub stage: Stage,
}

/// Chunks of a sleeping pool, as the pool's executor knows them.
#[derive(Debug, Default)]
pub(crate) struct Asleep {
    pub chunks: Vec<Sleeper>,
    /// Bytes of the chunks that no memory backs.
    pub released: Bytes,
}

impl Asleep {
    /// Returns the bytes that are the pool's but not on the card.
    pub(crate) fn released(&self) -> Bytes {
        self.released
    }

    /// Returns true if some chunk cannot be used. O(chunks).
    pub(crate) fn lacks_memory(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.stage != Stage::Backed)
    }

    /// Returns `ranges` without the chunks that are not mapped. O(chunks).
    pub(crate) fn mapped(&self, ranges: Vec<PoolRange>) -> Vec<PoolRange> {
        let unmapped = self.chunks.iter().filter(|chunk| chunk.stage < Stage::Mapped);
        let mut unmapped = unmapped.map(|chunk| chunk.at).peekable();
        let mut mapped = Vec::new();
        for range in ranges {
            let (mut from, end) = (range.at, range.at + range.len);
            while let Some(chunk) = unmapped.next_if(|chunk| chunk.at < end) {
                if from < chunk.at {
                    mapped.push(PoolRange { at: from, len: chunk.at - from });
                }
                from = from.max(chunk.at + chunk.len);
            }
            if from < end {
                mapped.push(PoolRange { at: from, len: end - from });
            }
        }
        mapped
    }
}
