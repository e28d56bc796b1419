//! Free memory by whether a trim can release it: what statistics in PyTorch's terms count.
//!
//! A chunk is released whole, and so is a slab. A free part of one that also holds memory in use
//! stays.

use crate::Bytes;
use crate::ids::PoolAddr;
use crate::pool::regions::Kind;
use crate::pool::view::View;

/// A number of parts, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartCount {
    /// Number of parts.
    pub parts: u64,
    /// Bytes in all of them.
    pub bytes: Bytes,
}

impl PartCount {
    /// Adds one part, unless it is empty.
    pub(crate) fn add(&mut self, bytes: Bytes) {
        if !bytes.is_zero() {
            self.parts += 1;
            self.bytes += bytes;
        }
    }
}

/// Freed memory of a pool without its slabs, or of a heap's slabs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeParts {
    /// Freed blocks that wait for work of other streams.
    pub waiting: PartCount,
    /// Free stretches in chunks, or slabs, that also hold memory in use.
    pub split: PartCount,
    /// Chunks, or slabs, that are wholly free.
    pub whole: PartCount,
}

impl View<'_> {
    /// Counts free memory, slabs left out. O(n).
    pub(crate) fn free_parts(self) -> FreeParts {
        let mut counted = FreeParts::default();
        let mut stretch: Option<(PoolAddr, Bytes)> = None;
        for (_, region) in self.regions.iter() {
            match (&region.kind, &mut stretch) {
                (Kind::Free(_), Some((at, len))) if *at + *len == region.at => *len += region.len,
                (Kind::Free(_), _) => {
                    self.count_stretch(stretch.replace((region.at, region.len)), &mut counted);
                }
                (Kind::Waiting { .. }, _) => counted.waiting.add(region.len),
                _ => {}
            }
        }
        self.count_stretch(stretch, &mut counted);
        counted
    }

    fn count_stretch(self, stretch: Option<(PoolAddr, Bytes)>, counted: &mut FreeParts) {
        let Some((at, len)) = stretch else { return };
        let before = counted.whole.bytes;
        self.chunks.within(at, len).for_each(|chunk| counted.whole.add(chunk.len));
        counted.split.add(len - (counted.whole.bytes - before));
    }
}
