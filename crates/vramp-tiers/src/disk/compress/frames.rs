//! What a write is cut into, and what became of each part.

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_host::{DISK_BLOCK, HostMemory, HostSpan};

use crate::disk::spans::Spans;

/// What is compressed at once. More saves little; less lets more threads work on one write, and
/// loses more to the rounding of its last block.
pub(super) const FRAME: Bytes = Bytes::kib(512);

/// A part of a write, compressed on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) struct Frame {
    /// Where it begins in the write, and in memory for compressed bytes.
    pub start: Bytes,
    /// How long it is.
    pub len: Bytes,
    /// How long it is compressed; `None` for one that stays as it is.
    pub compressed: Option<Bytes>,
}

impl Frame {
    /// What it takes on the disk. Only the last of a write may be no whole block.
    pub fn on_disk(&self) -> Bytes {
        self.compressed.map_or(self.len, whole_blocks)
    }
}

/// Rounded up to whole blocks.
pub(super) fn whole_blocks(bytes: Bytes) -> Bytes {
    bytes.checked_round_up(DISK_BLOCK).expect("memory holds less than 64 bits count")
}

/// A write's frames, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::disk) struct Frames(Vec<Frame>);

impl Frames {
    /// Those of `len` bytes, of which none is compressed.
    pub fn of(len: Bytes) -> Frames {
        let starts = (0..len.count()).step_by(FRAME.count() as usize).map(Bytes::new);
        let frame = |start| Frame { start, len: FRAME.min(len - start), compressed: None };
        Frames(starts.map(frame).collect())
    }

    pub fn iter(&self) -> impl Iterator<Item = Frame> {
        self.0.iter().copied()
    }

    pub fn at(&self, index: usize) -> Frame {
        self.0[index]
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Notes what became of one.
    pub fn set(&mut self, index: usize, compressed: Bytes) {
        self.0[index].compressed = Some(compressed);
    }

    pub fn any_compressed(&self) -> bool {
        self.0.iter().any(|frame| frame.compressed.is_some())
    }

    /// The bytes of the disk in memory, one frame after the other: compressed ones in `compressed`,
    /// others in `plain`.
    pub fn row(&self, plain: &Spans, compressed: &Arc<HostMemory>) -> Spans {
        let spans: Vec<HostSpan> = self
            .0
            .iter()
            .flat_map(|frame| match frame.compressed {
                Some(_) => vec![
                    HostSpan::new(compressed, frame.start, frame.on_disk())
                        .expect("a frame that is compressed is no longer than before"),
                ],
                None => plain.part(frame.start, frame.len),
            })
            .collect();
        Spans::new(&spans)
    }
}
