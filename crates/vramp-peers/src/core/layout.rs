//! The layout of the caching allocator's segments, for snapshots and prints.

use std::fmt;

use super::block::SegmentId;
use super::block::{Block, Class, State};
use super::pool::TorchPool;
use vramp_core::Bytes;
use vramp_core::{PartKind, Stretch, StretchPart};

/// Contiguous memory of one segment: all of it, or a mapped part of an expandable one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchStretch {
    /// Segment that it lies in.
    pub segment: SegmentId,
    /// Distance from the segment's start.
    pub offset: Bytes,
    /// True in the pool of requests up to 1 MiB.
    pub is_small: bool,
    /// True in an expandable segment.
    pub is_expandable: bool,
    /// Blocks in it.
    pub memory: Stretch,
}

impl TorchPool {
    /// Returns every stretch of memory by address, as in PyTorch's snapshots. O(n log n).
    pub fn stretches(&self) -> Vec<TorchStretch> {
        let mut blocks: Vec<&Block> = self.blocks.iter().map(|(_, block)| block).collect();
        blocks.retain(|block| block.state != State::Unmapped);
        blocks.sort_by_key(|block| block.at);
        let mut stretches: Vec<TorchStretch> = Vec::new();
        for block in blocks {
            let part = part_of(block);
            match stretches.last_mut() {
                Some(last)
                    if last.segment == block.segment
                        && last.memory.at.plus(last.memory.len.count()) == block.at =>
                {
                    last.memory.len += part.len;
                    last.memory.parts.push(part);
                }
                _ => stretches.push(TorchStretch {
                    segment: block.segment,
                    offset: Bytes::new(block.at.since(self.segment(block.segment).at)),
                    is_small: block.class == Class::Small,
                    is_expandable: self.is_expandable(block),
                    memory: Stretch { at: block.at, len: part.len, parts: vec![part] },
                }),
            }
        }
        stretches
    }
}

impl fmt::Debug for TorchPool {
    /// The totals and every block in address order.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        for (name, stat) in [
            ("allocated", stats.allocated_bytes),
            ("active", stats.active_bytes),
            ("inactive split", stats.inactive_split_bytes),
            ("reserved", stats.reserved_bytes),
        ] {
            writeln!(f, "{name:<14} {:>12}", Bytes::new(stat.all.current).to_string())?;
        }
        let mut blocks: Vec<&Block> = self.blocks.iter().map(|(_, block)| block).collect();
        blocks.sort_by_key(|block| block.at);
        for block in blocks {
            let state = match block.state {
                State::Used => "used",
                State::Waiting(_) => "waiting",
                State::Free => "free",
                State::Unmapped => "unmapped",
            };
            let class = if block.class == Class::Small { "small" } else { "large" };
            let (at, len) = (block.at, Bytes::new(block.len).to_string());
            writeln!(f, "{at:?} {len:>12} {state}, {}, {}, {class}", block.stream, block.segment)?;
        }
        Ok(())
    }
}

fn part_of(block: &Block) -> StretchPart {
    let (kind, requested) = match block.state {
        State::Used => (PartKind::Block, block.requested),
        State::Waiting(_) => (PartKind::Waiting, 0),
        State::Free | State::Unmapped => (PartKind::Free, 0),
    };
    StretchPart {
        at: block.at,
        len: Bytes::new(block.len),
        requested: Bytes::new(requested),
        stream: block.stream,
        kind,
    }
}
