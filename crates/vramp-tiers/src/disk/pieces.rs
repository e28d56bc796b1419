//! Pieces of uncompressed bytes, or of bytes that were compressed before: a few are in flight on the disk at
//! a time, and each piece that ends begins the next one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crc32fast::Hasher;
use vramp_core::Bytes;
use vramp_host::{Direction, DiskError, DiskErrorKind, FileTransfer, HostSpan, submit_transfers};

use super::error::DiskTierError;
use super::job::{FileIo, FinishedPiece, Job, State};
use super::shared::{DiskAllocation, StoredExtent};
use super::spans::{FileRange, IoPiece, SpanList, blocks, cut};

/// A piece in flight.
struct ActivePiece {
    index: usize,
    piece: IoPiece,
    /// Memory that the engine reads or writes: the caller's, or bounce blocks.
    span: HostSpan,
    /// Checksum of the data.
    sum: Option<Hasher>,
    /// True once the piece was moved away from a bad place.
    relocated: bool,
}

impl State {
    /// Begins the next piece. Returns its index.
    fn next_piece(&mut self) -> Option<(usize, IoPiece)> {
        if self.cancelled || self.failed.is_some() {
            return None;
        }
        let piece = self.pending.pop()?;
        self.in_flight += 1;
        Some((self.finished.len() - self.pending.len() - 1, piece))
    }
}

impl Job {
    /// Starts to write or read an allocation, which `places` lists: the caller's memory, or that of `list`.
    pub fn begin_transfer(
        self: &Arc<Job>,
        allocation: Arc<DiskAllocation>,
        places: &[FileRange],
        list: Option<SpanList>,
        expected: Vec<StoredExtent>,
        summed: bool,
    ) {
        let shared = self.shared();
        let memory = list.as_ref().unwrap_or(&self.spans);
        let mut pieces = cut(memory, places, shared.config.piece);
        let io = FileIo { allocation: allocation.id, list, expected, summed };
        assert!(self.io.set(io).is_ok(), "a job transfers once");
        let mut state = self.lock();
        state.finished = pieces.iter().map(|_| None).collect();
        pieces.reverse();
        state.pending = pieces;
        state.held.allocation = Some(allocation);
        let depth = shared.io.depth();
        let first: Vec<(usize, IoPiece)> = (0..depth).map_while(|_| state.next_piece()).collect();
        if first.is_empty() {
            return self.end_transfer(state);
        }
        drop(state);
        self.begin_pieces(first);
    }

    fn io(&self) -> &FileIo {
        self.io.get().expect("it is set before pieces begin")
    }

    /// Returns the memory that the disk writes or reads.
    pub fn list(&self) -> &SpanList {
        self.io().list.as_ref().unwrap_or(&self.spans)
    }

    fn begin_pieces(self: &Arc<Job>, pieces: impl IntoIterator<Item = (usize, IoPiece)>) {
        let mut batch = Vec::new();
        for (index, piece) in pieces {
            match self.memory_of(&piece) {
                Ok(span) => {
                    batch.push(ActivePiece { index, piece, span, sum: None, relocated: false });
                }
                Err(error) => self.end_piece(Err(error)),
            }
        }
        match self.direction {
            Direction::Write if self.io().summed => self.submit_summed(batch),
            _ => self.submit(batch),
        }
    }

    /// Returns memory for direct I/O: the piece's own, or bounce blocks if that is not aligned.
    fn memory_of(&self, piece: &IoPiece) -> Result<HostSpan, DiskTierError> {
        Ok(match (&piece.direct, self.direction) {
            (Some(direct), _) => direct.clone(),
            (None, Direction::Write) => self.list().gather(piece.start, piece.place.data)?,
            (None, Direction::Read) => blocks(piece.place.data)?,
        })
    }

    fn submit(self: &Arc<Job>, batch: Vec<ActivePiece>) {
        if batch.is_empty() {
            return;
        }
        let transfers = batch.into_iter().map(|active| self.file_transfer(active, None));
        submit_transfers(&self.shared().io, transfers);
    }

    /// Writes pieces while workers compute their checksums. The later of the two ends a piece.
    fn submit_summed(self: &Arc<Job>, batch: Vec<ActivePiece>) {
        if batch.is_empty() {
            return;
        }
        let mut sums = Vec::new();
        let transfers: Vec<FileTransfer> = batch
            .into_iter()
            .map(|active| {
                let both = Arc::new(IoAndSum::default());
                let (job, place) = (Arc::clone(self), Arc::clone(&both));
                let (span, data) = (active.span.clone(), active.piece.place.data);
                sums.push(move || {
                    let sum = sum_of(&span, data);
                    if let Some((active, answer)) = place.complete(Half::Sum(sum)) {
                        job.piece_moved(active, answer);
                    }
                });
                self.file_transfer(active, Some(both))
            })
            .collect();
        submit_transfers(&self.shared().io, transfers);
        self.shared().workers.run(sums);
    }

    fn file_transfer(
        self: &Arc<Job>,
        active: ActivePiece,
        both: Option<Arc<IoAndSum>>,
    ) -> FileTransfer {
        let FileRange { file, extent, .. } = &active.piece.place;
        let writes = self.direction == Direction::Write;
        let meter = self.shared().compressor.as_ref().filter(|_| writes);
        // Ends with the answer of the disk, so that checksums do not count as its time.
        let busy = meter.map(|compressor| compressor.disk.begin(extent.len));
        FileTransfer {
            file: Arc::clone(file),
            // The header is the first block of the file.
            offset: extent.offset + vramp_host::DISK_BLOCK,
            span: active.span.clone(),
            direction: self.direction,
            done: {
                let job = Arc::clone(self);
                Box::new(move |answer| {
                    drop(busy);
                    match both {
                        None => job.piece_moved(active, answer),
                        Some(both) => {
                            if let Some((active, answer)) = both.complete(Half::Io(active, answer))
                            {
                                job.piece_moved(active, answer);
                            }
                        }
                    }
                })
            },
        }
    }

    /// Handles the end of a piece's I/O. Runs on an engine thread or a worker.
    fn piece_moved(self: &Arc<Job>, active: ActivePiece, answer: Result<(), DiskError>) {
        let job = Arc::clone(self);
        match (answer, self.direction) {
            (Ok(()), Direction::Write) => self.end_piece(Ok(active)),
            // Checksums and copies run on workers, so that they do not delay the engine.
            (Ok(()), Direction::Read) if self.io().summed || active.piece.direct.is_none() => {
                self.shared().workers.run([move || job.finish_read(active)]);
            }
            (Ok(()), Direction::Read) => self.end_piece(Ok(active)),
            (Err(error), direction) => {
                if error.kind == DiskErrorKind::Media {
                    self.shared().state().counters.media_errors += 1;
                    if direction == Direction::Write {
                        self.shared().workers.run([move || job.relocate(active, error)]);
                        return;
                    }
                }
                self.end_piece(Err(error.into()));
            }
        }
    }

    /// Computes the checksum of a piece that was read, and copies it out of bounce blocks.
    fn finish_read(self: &Arc<Job>, mut active: ActivePiece) {
        let data = active.piece.place.data;
        if self.io().summed {
            active.sum = Some(sum_of(&active.span, data));
        }
        if active.piece.direct.is_none() {
            self.list().scatter(active.piece.start, data, &active.span);
        }
        self.end_piece(Ok(active));
    }

    /// Quarantines the place of a piece and writes the piece elsewhere, once.
    fn relocate(self: &Arc<Job>, mut active: ActivePiece, error: DiskError) {
        let place = &mut active.piece.place;
        self.shared().quarantine(self.io().allocation, place);
        let other = (!active.relocated).then(|| self.shared().replace(self.io().allocation, place));
        match other {
            Some(Ok(other)) => {
                *place = other;
                active.relocated = true;
                self.submit(vec![active]);
            }
            // The error of the disk is more useful than that of the failed allocation.
            _ => self.end_piece(Err(error.into())),
        }
    }

    /// Records the end of one piece, and begins the next.
    fn end_piece(self: &Arc<Job>, ended: Result<ActivePiece, DiskTierError>) {
        let mut state = self.lock();
        state.in_flight -= 1;
        match ended {
            Ok(ActivePiece { index, piece, sum, .. }) => {
                state.moved += piece.place.data;
                state.finished[index] = Some(FinishedPiece { place: piece.place, sum });
            }
            Err(error) => state.fail(error),
        }
        if let Some(next) = state.next_piece() {
            drop(state);
            self.begin_pieces([next]);
        } else if state.in_flight == 0 {
            self.end_transfer(state);
        }
    }

    /// Ends the stage of the disk.
    fn end_transfer(self: &Arc<Job>, mut state: MutexGuard<'_, State>) {
        state.total_ns = self.begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        let (moved, len) = (state.moved, self.list().len());
        if moved < len {
            state.fail(Job::cancelled(moved, len));
        }
        match self.direction {
            Direction::Read if state.held.frames.is_some() => self.decompress(state),
            _ => self.end(state),
        }
    }

    /// Compares the checksums of what was read with those of what was written.
    pub fn verify(&self, finished: &[Option<FinishedPiece>]) -> Result<(), DiskTierError> {
        let mut finished = finished.iter().flatten();
        for StoredExtent { place, sum } in &self.io().expected {
            let Some(expected) = *sum else { continue };
            let (mut found, mut done) = (Hasher::new(), Bytes::ZERO);
            while done < place.data {
                let end = finished.next().expect("pieces cover the extents in order");
                found.combine(end.sum.as_ref().expect("every piece has a checksum"));
                done += end.place.data;
            }
            let found = found.finalize();
            if found != expected {
                return Err(DiskTierError::Corrupt {
                    file: place.file.path().into(),
                    offset: place.extent.offset + vramp_host::DISK_BLOCK,
                    len: place.data,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

/// Joins the I/O of a written piece with its checksum, which complete in any order.
#[derive(Default)]
struct IoAndSum(Mutex<Option<Half>>);

enum Half {
    Sum(Hasher),
    Io(ActivePiece, Result<(), DiskError>),
}

impl IoAndSum {
    /// Adds one half. Returns `None` for the first, and the joined piece for the second.
    fn complete(&self, half: Half) -> Option<(ActivePiece, Result<(), DiskError>)> {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (first.take(), half) {
            (None, half) => {
                *first = Some(half);
                None
            }
            (Some(Half::Sum(sum)), Half::Io(mut active, answer))
            | (Some(Half::Io(mut active, answer)), Half::Sum(sum)) => {
                active.sum = Some(sum);
                Some((active, answer))
            }
            _ => unreachable!("each half completes once"),
        }
    }
}

/// Returns the checksum of the first `data` bytes.
fn sum_of(span: &HostSpan, data: Bytes) -> Hasher {
    let mut sum = Hasher::new();
    let data = span.part(Bytes::ZERO, data).expect("a piece's memory holds its data");
    data.scan(|bytes| sum.update(bytes));
    sum
}

/// Joins adjacent pieces to extents with one checksum each.
pub(super) fn joined(finished: &[Option<FinishedPiece>]) -> Vec<StoredExtent> {
    let mut extents: Vec<(FileRange, Option<Hasher>)> = Vec::new();
    for FinishedPiece { place, sum } in finished.iter().flatten() {
        if let Some((last, last_sum)) = extents.last_mut()
            && last.extent.backing == place.extent.backing
            && last.extent.end() == place.extent.offset
            && last.data == last.extent.len
        {
            last.extent.len += place.extent.len;
            last.data += place.data;
            if let (Some(last_sum), Some(sum)) = (last_sum, sum) {
                last_sum.combine(sum);
            }
            continue;
        }
        extents.push((place.clone(), sum.clone()));
    }
    let stored = |(place, sum): (FileRange, Option<Hasher>)| StoredExtent {
        place,
        sum: sum.map(Hasher::finalize),
    };
    extents.into_iter().map(stored).collect()
}
