//! One write or read of uncompressed bytes: pieces on the disk, of which a few are in flight.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crc32fast::Hasher;
use vramp_core::Bytes;
use vramp_host::{Direction, DiskError, DiskErrorKind, FileTransfer, HostSpan, submit_transfers};

use super::error::DiskTierError;
use super::shared::{AllocationId, DiskAllocation, FileBytes, Shared, StoredExtent};
use super::spans::{FileRange, IoPiece, SpanList, blocks};

/// A piece that was transferred, with the checksum of its data.
struct FinishedPiece {
    place: FileRange,
    sum: Option<Hasher>,
}

/// A write or read in flight. Each piece that ends begins the next one.
pub(super) struct RawTransfer {
    shared: Arc<Shared>,
    allocation: AllocationId,
    direction: Direction,
    spans: SpanList,
    /// Checksums that a read is verified against.
    expected: Vec<StoredExtent>,
    /// Whether checksums are computed.
    summed: bool,
    begun: Instant,
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    /// Pieces that have not begun, in reverse order.
    pending: Vec<IoPiece>,
    finished: Vec<Option<FinishedPiece>>,
    /// Number of pieces that have begun and not ended.
    in_flight: usize,
    moved: Bytes,
    failed: Option<DiskTierError>,
    cancelled: bool,
    total_ns: u64,
    /// Extents that are written or read. The waiting thread takes them.
    allocation: Option<Arc<DiskAllocation>>,
}

impl State {
    fn can_begin(&self) -> bool {
        !self.cancelled && self.failed.is_none() && !self.pending.is_empty()
    }

    fn has_ended(&self) -> bool {
        self.in_flight == 0 && !self.can_begin()
    }
}

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

impl RawTransfer {
    pub fn begin(
        allocation: Arc<DiskAllocation>,
        direction: Direction,
        spans: SpanList,
        expected: Vec<StoredExtent>,
        mut pieces: Vec<IoPiece>,
        summed: bool,
    ) -> Arc<RawTransfer> {
        let finished = pieces.iter().map(|_| None).collect();
        pieces.reverse();
        let state = State {
            pending: pieces,
            finished,
            in_flight: 0,
            moved: Bytes::ZERO,
            failed: None,
            cancelled: false,
            total_ns: 0,
            allocation: Some(Arc::clone(&allocation)),
        };
        let begun = Instant::now();
        let (state, ended) = (Mutex::new(state), Condvar::new());
        let (shared, allocation) = (Arc::clone(&allocation.shared), allocation.id);
        let raw = Arc::new(RawTransfer {
            shared,
            allocation,
            direction,
            spans,
            expected,
            summed,
            begun,
            state,
            ended,
        });
        let depth = raw.shared.io.depth();
        raw.begin_pieces(depth);
        raw
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the bytes to transfer.
    pub fn len(&self) -> Bytes {
        self.spans.len()
    }

    /// Returns the bytes transferred so far.
    pub fn moved(&self) -> Bytes {
        self.lock().moved
    }

    /// Returns true once no piece is in flight and none will begin.
    pub fn has_ended(&self) -> bool {
        self.lock().has_ended()
    }

    /// Stops further pieces from beginning.
    pub fn cancel(&self) {
        self.lock().cancelled = true;
        self.ended.notify_all();
    }

    /// Waits until the transfer has ended.
    pub fn join(&self) {
        drop(self.joined());
    }

    fn joined(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while !state.has_ended() {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Waits until the transfer has ended, then drops its share of the allocation.
    pub fn release(&self) {
        let allocation = self.joined().allocation.take();
        drop(allocation);
    }

    /// Waits for the end and returns the allocation with the outcome. An engine thread never drops
    /// an allocation: crediting its charge may run callbacks of any length.
    fn finish(&self) -> (Option<Arc<DiskAllocation>>, Result<Vec<FinishedPiece>, DiskTierError>) {
        let mut state = self.joined();
        // It stays ended once the failure, which kept these from beginning, is taken.
        state.pending.clear();
        let allocation = state.allocation.take();
        let finished = std::mem::take(&mut state.finished);
        let ended = match state.failed.take() {
            Some(error) => Err(error),
            None if state.moved < self.len() => {
                Err(DiskTierError::Cancelled { moved: state.moved, len: self.len() })
            }
            None => Ok(finished
                .into_iter()
                .map(|end| end.expect("every piece was transferred"))
                .collect()),
        };
        (allocation, ended)
    }

    /// Waits until all bytes are written. Called once.
    ///
    /// # Errors
    /// The disk failed or is full, or the write was cancelled. Extents and charge are returned.
    pub fn stored(&self) -> Result<FileBytes, DiskTierError> {
        let (allocation, ended) = self.finish();
        self.count(ended.as_ref().err());
        let extents = joined(&ended?);
        let allocation = allocation.expect("a transfer is waited for once");
        Ok(FileBytes { allocation, extents, frames: None, len: self.len() })
    }

    /// Waits until all bytes are read, and verifies their checksums. Called once.
    ///
    /// # Errors
    /// The disk failed, a checksum differs, or the read was cancelled.
    pub fn verified(&self) -> Result<(), DiskTierError> {
        let (_allocation, ended) = self.finish();
        ended.and_then(|finished| self.verify(&finished))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins up to `count` further pieces.
    fn begin_pieces(self: &Arc<RawTransfer>, count: usize) {
        let mut batch = Vec::new();
        for _ in 0..count {
            let mut state = self.lock();
            if !state.can_begin() {
                break;
            }
            let piece = state.pending.pop().expect("a piece is pending");
            let index = state.finished.len() - state.pending.len() - 1;
            state.in_flight += 1;
            drop(state);
            match self.memory_of(&piece) {
                Ok(span) => {
                    batch.push(ActivePiece { index, piece, span, sum: None, relocated: false });
                }
                Err(error) => self.end(Err(error)),
            }
        }
        match self.direction {
            Direction::Write if self.summed => self.submit_summed(batch),
            _ => self.submit(batch),
        }
    }

    /// Returns memory for direct I/O: the piece's own, or bounce blocks if that is not aligned.
    fn memory_of(&self, piece: &IoPiece) -> Result<HostSpan, DiskTierError> {
        Ok(match (&piece.direct, self.direction) {
            (Some(direct), _) => direct.clone(),
            (None, Direction::Write) => self.spans.gather(piece.start, piece.place.data)?,
            (None, Direction::Read) => blocks(piece.place.data)?,
        })
    }

    fn submit(self: &Arc<RawTransfer>, batch: Vec<ActivePiece>) {
        if batch.is_empty() {
            return;
        }
        let transfers = batch.into_iter().map(|active| self.transfer(active, None));
        submit_transfers(&self.shared.io, transfers);
    }

    /// Writes pieces while workers compute their checksums. The later of the two ends a piece.
    fn submit_summed(self: &Arc<RawTransfer>, batch: Vec<ActivePiece>) {
        if batch.is_empty() {
            return;
        }
        let mut sums = Vec::new();
        let transfers: Vec<FileTransfer> = batch
            .into_iter()
            .map(|active| {
                let both = Arc::new(IoAndSum::default());
                let (raw, place) = (Arc::clone(self), Arc::clone(&both));
                let (span, data) = (active.span.clone(), active.piece.place.data);
                sums.push(move || {
                    let sum = sum_of(&span, data);
                    if let Some((active, answer)) = place.complete(Half::Sum(sum)) {
                        raw.piece_moved(active, answer);
                    }
                });
                self.transfer(active, Some(both))
            })
            .collect();
        submit_transfers(&self.shared.io, transfers);
        self.shared.workers.run(sums);
    }

    fn transfer(
        self: &Arc<RawTransfer>,
        active: ActivePiece,
        both: Option<Arc<IoAndSum>>,
    ) -> FileTransfer {
        let FileRange { file, extent, .. } = &active.piece.place;
        let writes = self.direction == Direction::Write;
        let meter = self.shared.compressor.as_ref().filter(|_| writes);
        // Ends with the answer of the disk, so that checksums do not count as its time.
        let busy = meter.map(|compressor| compressor.disk.begin(extent.len));
        FileTransfer {
            file: Arc::clone(file),
            // The header is the first block of the file.
            offset: extent.offset + vramp_host::DISK_BLOCK,
            span: active.span.clone(),
            direction: self.direction,
            done: {
                let raw = Arc::clone(self);
                Box::new(move |answer| {
                    drop(busy);
                    match both {
                        None => raw.piece_moved(active, answer),
                        Some(both) => {
                            if let Some((active, answer)) = both.complete(Half::Io(active, answer))
                            {
                                raw.piece_moved(active, answer);
                            }
                        }
                    }
                })
            },
        }
    }

    /// Handles the end of a piece's I/O. Runs on an engine thread or a worker.
    fn piece_moved(self: &Arc<RawTransfer>, active: ActivePiece, answer: Result<(), DiskError>) {
        let raw = Arc::clone(self);
        match (answer, self.direction) {
            (Ok(()), Direction::Write) => self.end(Ok(active)),
            // Checksums and copies run on workers, so that they do not delay the engine.
            (Ok(()), Direction::Read) if self.summed || active.piece.direct.is_none() => {
                self.shared.workers.run([move || raw.finish_read(active)]);
            }
            (Ok(()), Direction::Read) => self.end(Ok(active)),
            (Err(error), direction) => {
                if error.kind == DiskErrorKind::Media {
                    self.shared.state().counters.media_errors += 1;
                    if direction == Direction::Write {
                        self.shared.workers.run([move || raw.relocate(active, error)]);
                        return;
                    }
                }
                self.end(Err(error.into()));
            }
        }
    }

    /// Computes the checksum of a piece that was read, and copies it out of bounce blocks.
    fn finish_read(self: &Arc<RawTransfer>, mut active: ActivePiece) {
        let data = active.piece.place.data;
        if self.summed {
            active.sum = Some(sum_of(&active.span, data));
        }
        if active.piece.direct.is_none() {
            self.spans.scatter(active.piece.start, data, &active.span);
        }
        self.end(Ok(active));
    }

    /// Quarantines the place of a piece and writes the piece elsewhere, once.
    fn relocate(self: &Arc<RawTransfer>, mut active: ActivePiece, error: DiskError) {
        let place = &mut active.piece.place;
        self.shared.quarantine(self.allocation, place);
        let other = (!active.relocated).then(|| self.shared.replace(self.allocation, place));
        match other {
            Some(Ok(other)) => {
                *place = other;
                active.relocated = true;
                self.submit(vec![active]);
            }
            // The error of the disk is more useful than that of the failed allocation.
            _ => self.end(Err(error.into())),
        }
    }

    /// Records the end of one piece, and begins the next.
    fn end(self: &Arc<RawTransfer>, ended: Result<ActivePiece, DiskTierError>) {
        let mut state = self.lock();
        state.in_flight -= 1;
        match ended {
            Ok(ActivePiece { index, piece, sum, .. }) => {
                state.moved += piece.place.data;
                state.finished[index] = Some(FinishedPiece { place: piece.place, sum });
            }
            // The first failure is the one that is returned.
            Err(error) => state.failed = state.failed.take().or(Some(error)),
        }
        if state.has_ended() {
            state.total_ns = self.begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
            self.ended.notify_all();
        }
        let can_begin = state.can_begin();
        drop(state);
        if can_begin {
            self.begin_pieces(1);
        }
    }

    /// Adds the outcome to the counters of the store.
    pub fn count(&self, failed: Option<&DiskTierError>) {
        let total_ns = self.lock().total_ns;
        let counters = &mut self.shared.state().counters;
        counters.count(self.direction, self.spans.len(), total_ns, failed);
    }

    /// Compares the checksums of what was read with those of what was written.
    fn verify(&self, finished: &[FinishedPiece]) -> Result<(), DiskTierError> {
        let mut finished = finished.iter();
        for StoredExtent { place, sum } in &self.expected {
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
fn joined(finished: &[FinishedPiece]) -> Vec<StoredExtent> {
    let mut extents: Vec<(FileRange, Option<Hasher>)> = Vec::new();
    for FinishedPiece { place, sum } in finished {
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
