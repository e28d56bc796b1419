//! Memory spans as one sequence of bytes, and how it is cut into pieces for direct I/O.

use std::sync::Arc;

use crate::extents::Extent;
use vramp_core::Bytes;
use vramp_host::{DISK_BLOCK, DirectFile, HostMemory, HostMemoryError, HostSpan, PageKind};

/// Memory spans, concatenated.
#[derive(Clone, Debug)]
pub(super) struct SpanList {
    spans: Vec<HostSpan>,
    /// First byte of each span in the sequence.
    starts: Vec<Bytes>,
    len: Bytes,
}

impl SpanList {
    pub fn new(spans: &[HostSpan]) -> SpanList {
        let spans: Vec<HostSpan> = spans.iter().filter(|span| !span.is_empty()).cloned().collect();
        let mut len = Bytes::ZERO;
        let starts = spans.iter().map(|span| {
            let start = len;
            len += span.len();
            start
        });
        SpanList { starts: starts.collect(), spans, len }
    }

    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Returns the memory from `at` to the end of its span, at most `most`.
    fn run(&self, at: Bytes, most: Bytes) -> HostSpan {
        let index = self.starts.partition_point(|start| *start <= at) - 1;
        let (span, skipped) = (&self.spans[index], at - self.starts[index]);
        let len = (span.len() - skipped).min(most);
        span.part(skipped, len).expect("a part of the span that holds the place")
    }

    fn runs(&self, at: Bytes, len: Bytes) -> impl Iterator<Item = HostSpan> {
        let mut done = Bytes::ZERO;
        std::iter::from_fn(move || {
            (done < len).then(|| {
                let run = self.run(at + done, len - done);
                done += run.len();
                run
            })
        })
    }

    /// Returns the memory of `len` bytes from `at`.
    pub fn part(&self, at: Bytes, len: Bytes) -> Vec<HostSpan> {
        self.runs(at, len).collect()
    }

    /// Copies the bytes from `at` to `into`.
    pub fn read(&self, at: Bytes, into: &mut [u8]) {
        let mut rest = into;
        for run in self.runs(at, Bytes::new(rest.len() as u64)) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(run.len().count() as usize);
            run.read(Bytes::ZERO, now).expect("as long as the run");
            rest = later;
        }
    }

    /// Overwrites the bytes from `at` with `from`.
    pub fn write(&self, at: Bytes, from: &[u8]) {
        let mut rest = from;
        for run in self.runs(at, Bytes::new(from.len() as u64)) {
            let (now, later) = rest.split_at(run.len().count() as usize);
            run.write(Bytes::ZERO, now).expect("as long as the run");
            rest = later;
        }
    }

    /// Copies `len` bytes from `at` into new whole blocks. The rest of the last block is zero.
    pub fn gather(&self, at: Bytes, len: Bytes) -> Result<HostSpan, HostMemoryError> {
        let blocks = blocks(len)?;
        let mut to = Bytes::ZERO;
        for run in self.runs(at, len) {
            run.scan(|bytes| {
                blocks.write(to, bytes).expect("the blocks hold the runs");
                to += Bytes::new(bytes.len() as u64);
            });
        }
        Ok(blocks)
    }

    /// Copies the first `len` bytes of `from` to `at`.
    pub fn scatter(&self, at: Bytes, len: Bytes, from: &HostSpan) {
        let mut done = Bytes::ZERO;
        for run in self.runs(at, len) {
            let part = from.part(done, run.len()).expect("the blocks hold the runs");
            let mut to = Bytes::ZERO;
            part.scan(|bytes| {
                run.write(to, bytes).expect("a part as long as the run");
                to += Bytes::new(bytes.len() as u64);
            });
            done += run.len();
        }
    }
}

/// Allocates whole blocks for `len` bytes.
pub(super) fn blocks(len: Bytes) -> Result<HostSpan, HostMemoryError> {
    let memory = HostMemory::new(len, None, PageKind::Small)?;
    Ok(HostSpan::new(&memory, Bytes::ZERO, memory.len()).expect("the whole of it"))
}

/// One extent of a file, and how much of it is data.
#[derive(Clone, Debug)]
pub(super) struct FileRange {
    pub file: Arc<DirectFile>,
    pub extent: Extent,
    /// Bytes of the extent that are data.
    pub data: Bytes,
}

/// Bytes that one I/O request moves.
#[derive(Clone, Debug)]
pub(super) struct IoPiece {
    /// Range of the file, in whole blocks.
    pub place: FileRange,
    /// First byte in the sequence.
    pub start: Bytes,
    /// The caller's memory, if it is aligned for direct I/O.
    pub direct: Option<HostSpan>,
}

/// Cuts `spans` into pieces of at most `most`. Whole blocks of aligned memory move directly; the
/// rest goes through bounce blocks.
pub(super) fn cut(spans: &SpanList, places: &[FileRange], most: Bytes) -> Vec<IoPiece> {
    let mut pieces = Vec::new();
    let mut start = Bytes::ZERO;
    for place in places {
        let mut done = Bytes::ZERO;
        while done < place.data {
            let left = (place.data - done).min(most);
            let run = spans.run(start, left);
            let whole = run.len().round_down(DISK_BLOCK);
            let reachable = (run.as_ptr() as u64).is_multiple_of(DISK_BLOCK.count());
            let (data, direct) = match reachable && !whole.is_zero() {
                true => (whole, Some(run.part(Bytes::ZERO, whole).expect("its front"))),
                false => (left, None),
            };
            let len = data.checked_round_up(DISK_BLOCK).expect("less than an extent");
            let extent = Extent { offset: place.extent.offset + done, len, ..place.extent };
            let file = Arc::clone(&place.file);
            pieces.push(IoPiece { place: FileRange { file, extent, data }, start, direct });
            start += data;
            done += data;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: u64) -> Arc<HostMemory> {
        HostMemory::new(Bytes::new(len), None, PageKind::Small).unwrap()
    }

    fn span(memory: &Arc<HostMemory>, offset: u64, len: u64) -> HostSpan {
        HostSpan::new(memory, Bytes::new(offset), Bytes::new(len)).unwrap()
    }

    fn place(file: &Arc<DirectFile>, offset: u64, data: u64) -> FileRange {
        let data = Bytes::new(data);
        let len = data.checked_round_up(DISK_BLOCK).unwrap();
        let backing = crate::extents::BackingId(0);
        let extent = Extent { backing, offset: Bytes::new(offset), len };
        FileRange { file: Arc::clone(file), extent, data }
    }

    #[test]
    fn aligned_blocks_move_directly_and_only_the_rest_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let file = Arc::new(DirectFile::create(&dir.path().join("a")).unwrap());
        let memory = memory(64 << 10);
        let shape = |spans: &[HostSpan], places: &[FileRange]| -> Vec<(u64, u64, u64, bool)> {
            cut(&SpanList::new(spans), places, Bytes::kib(16))
                .iter()
                .map(|piece| {
                    let FileRange { extent, data, .. } = &piece.place;
                    (
                        extent.offset.count() >> 10,
                        extent.len.count() >> 10,
                        data.count(),
                        piece.direct.is_some(),
                    )
                })
                .collect()
        };
        // Pieces end where the memory, the extent, or the largest request ends.
        let whole = [span(&memory, 0, 24 << 10), span(&memory, 32 << 10, 8 << 10)];
        assert_eq!(
            shape(&whole, &[place(&file, 0, 28 << 10), place(&file, 64 << 10, 4 << 10)]),
            [
                (0, 16, 16 << 10, true),
                (16, 8, 8 << 10, true),
                (24, 4, 4 << 10, true),
                (64, 4, 4 << 10, true),
            ]
        );
        // The tail of an odd length goes through a bounce block.
        let odd = [span(&memory, 0, 5000)];
        assert_eq!(shape(&odd, &[place(&file, 0, 5000)]), [(0, 4, 4096, true), (4, 4, 904, false)]);
        // Unaligned memory is copied in pieces.
        let unaligned = [span(&memory, 7, 20 << 10)];
        assert_eq!(
            shape(&unaligned, &[place(&file, 0, 20 << 10)]),
            [(0, 16, 16 << 10, false), (16, 4, 4 << 10, false)]
        );
        assert!(shape(&[], &[]).is_empty());
    }

    #[test]
    fn bytes_gathered_from_many_spans_are_scattered_to_others() {
        let from = memory(16 << 10);
        let bytes: Vec<u8> = (0..16 << 10).map(|i| (i % 253) as u8).collect();
        from.write(Bytes::ZERO, &bytes).unwrap();
        let parts = [span(&from, 3, 100), span(&from, 9000, 5000), span(&from, 1, 0)];
        let gathered = SpanList::new(&parts).gather(Bytes::new(50), Bytes::new(5000)).unwrap();
        let to = memory(16 << 10);
        let other = SpanList::new(&[span(&to, 5, 4999), span(&to, 8192, 1)]);
        other.scatter(Bytes::ZERO, Bytes::new(5000), &gathered);
        let mut back = vec![0; 16 << 10];
        to.read(Bytes::ZERO, &mut back).unwrap();
        let expected = [&bytes[53..103], &bytes[9000..13950]].concat();
        assert_eq!((&back[5..5004], back[8192]), (&expected[..4999], expected[4999]));
        assert_eq!((back[4], back[5004], back[8193]), (0, 0, 0));
    }
}
