//! The frames that a write is divided into.

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_host::{DISK_BLOCK, HostMemory, HostSpan};

use crate::disk::spans::SpanList;

/// Length of a frame. Longer frames save little; shorter ones let more threads work on one write,
/// but lose more to rounding up to blocks.
pub(super) const FRAME: Bytes = Bytes::kib(512);

/// A part of a write that is compressed on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) struct Frame {
    /// First byte in the write, and in the memory for compressed bytes.
    pub start: Bytes,
    /// Length before compression.
    pub len: Bytes,
    /// Length after compression. `None` for an uncompressed frame.
    pub compressed: Option<Bytes>,
}

impl Frame {
    /// Returns the bytes on the disk. Only the last frame of a write may be a partial block.
    pub fn on_disk(&self) -> Bytes {
        self.compressed.map_or(self.len, whole_blocks)
    }
}

/// Rounds up to whole blocks.
pub(super) fn whole_blocks(bytes: Bytes) -> Bytes {
    bytes.checked_round_up(DISK_BLOCK).expect("memory holds less than 64 bits count")
}

/// The frames of a write, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::disk) struct Frames(Vec<Frame>);

impl Frames {
    /// Divides `len` bytes into uncompressed frames.
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

    /// Records that a frame was compressed.
    pub fn set(&mut self, index: usize, compressed: Bytes) {
        self.0[index].compressed = Some(compressed);
    }

    pub fn any_compressed(&self) -> bool {
        self.0.iter().any(|frame| frame.compressed.is_some())
    }

    /// Concatenates what goes to the disk: compressed frames from `compressed`, others from
    /// `plain`.
    pub fn list(&self, plain: &SpanList, compressed: &Arc<HostMemory>) -> SpanList {
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
        SpanList::new(&spans)
    }
}
