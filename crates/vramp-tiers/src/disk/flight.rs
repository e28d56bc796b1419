//! What the disk does of one write or read: pieces that begin as others end.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crc32fast::Hasher;
use vramp_core::Bytes;
use vramp_host::{Direction, DiskError, DiskErrorKind, FileTransfer, HostSpan, submit_transfers};

use super::error::DiskTierError;
use super::shelf::{Holding, HoldingId, Shelf, StoredBytes, StoredExtent};
use super::spans::{Piece, Place, Spans, blocks};

/// A piece that has moved.
struct PieceEnd {
    place: Place,
    sum: Option<Hasher>,
}

/// What the pieces of one transfer have in common.
pub(super) struct Flight {
    shelf: Arc<Shelf>,
    holding: HoldingId,
    direction: Direction,
    spans: Spans,
    /// What a read is compared with.
    expected: Vec<StoredExtent>,
    /// Whether sums are taken.
    summed: bool,
    begun: Instant,
    state: Mutex<State>,
    over: Condvar,
}

struct State {
    /// Not begun, the first one last.
    waiting: Vec<Piece>,
    ends: Vec<Option<PieceEnd>>,
    /// Begun and not ended.
    under_way: usize,
    moved: Bytes,
    failed: Option<DiskTierError>,
    cancelled: bool,
    total_ns: u64,
    /// What is written or read, kept until somebody has waited.
    holding: Option<Arc<Holding>>,
}

impl State {
    fn goes_on(&self) -> bool {
        !self.cancelled && self.failed.is_none() && !self.waiting.is_empty()
    }

    fn is_over(&self) -> bool {
        self.under_way == 0 && !self.goes_on()
    }
}

/// A piece under way.
struct Moving {
    index: usize,
    piece: Piece,
    /// What the engine reads or writes: the memory itself, or blocks in its place.
    span: HostSpan,
    /// Of what is written, taken beside the transfer.
    sum: Option<Hasher>,
    /// It has another place already.
    moved_once: bool,
}

impl Flight {
    pub fn begin(
        holding: Arc<Holding>,
        direction: Direction,
        spans: Spans,
        expected: Vec<StoredExtent>,
        mut pieces: Vec<Piece>,
        summed: bool,
    ) -> Arc<Flight> {
        let ends = pieces.iter().map(|_| None).collect();
        pieces.reverse();
        let state = State {
            waiting: pieces,
            ends,
            under_way: 0,
            moved: Bytes::ZERO,
            failed: None,
            cancelled: false,
            total_ns: 0,
            holding: Some(Arc::clone(&holding)),
        };
        let begun = Instant::now();
        let (state, over) = (Mutex::new(state), Condvar::new());
        let (shelf, holding) = (Arc::clone(&holding.shelf), holding.id);
        let flight = Arc::new(Flight {
            shelf,
            holding,
            direction,
            spans,
            expected,
            summed,
            begun,
            state,
            over,
        });
        let depth = flight.shelf.io.depth();
        flight.more(depth);
        flight
    }

    pub fn shelf(&self) -> &Arc<Shelf> {
        &self.shelf
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// How many bytes it moves.
    pub fn len(&self) -> Bytes {
        self.spans.len()
    }

    /// How many have moved.
    pub fn moved(&self) -> Bytes {
        self.lock().moved
    }

    /// True once nothing is under way, and nothing begins any more.
    pub fn is_over(&self) -> bool {
        self.lock().is_over()
    }

    /// Lets no further piece begin.
    pub fn cancel(&self) {
        self.lock().cancelled = true;
        self.over.notify_all();
    }

    /// Waits until it is over.
    pub fn join(&self) {
        drop(self.joined());
    }

    fn joined(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while !state.is_over() {
            state = self.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Waits until it is over, and lets go of what it held.
    pub fn let_go(&self) {
        let holding = self.joined().holding.take();
        drop(holding);
    }

    /// What it came to, and what it held. An engine's thread never lets go of a charge: those who
    /// are told of it may do anything.
    fn finish(&self) -> (Option<Arc<Holding>>, Result<Vec<PieceEnd>, DiskTierError>) {
        let mut state = self.joined();
        let holding = state.holding.take();
        let ends = std::mem::take(&mut state.ends);
        let ended = match state.failed.take() {
            Some(error) => Err(error),
            None if state.moved < self.len() => {
                Err(DiskTierError::Cancelled { moved: state.moved, len: self.len() })
            }
            None => Ok(ends.into_iter().map(|end| end.expect("all have moved")).collect()),
        };
        (holding, ended)
    }

    /// Waits until all is written. Asked once.
    ///
    /// # Errors
    /// The disk failed or is full, or it was cancelled. ExtentAllocator and charge are given back.
    pub fn stored(&self) -> Result<StoredBytes, DiskTierError> {
        let (holding, ended) = self.finish();
        self.count(ended.as_ref().err());
        let extents = joined(&ended?);
        let holding = holding.expect("a transfer is waited for once");
        Ok(StoredBytes { holding, extents, frames: None, len: self.len() })
    }

    /// Waits until all is read, and compares it with what was written. Asked once.
    ///
    /// # Errors
    /// The disk failed, what was read is not what was written, or it was cancelled.
    pub fn verified(&self) -> Result<(), DiskTierError> {
        let (_holding, ended) = self.finish();
        ended.and_then(|ends| self.verify(&ends))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins up to `count` further pieces.
    fn more(self: &Arc<Flight>, count: usize) {
        let mut batch = Vec::new();
        for _ in 0..count {
            let mut state = self.lock();
            if !state.goes_on() {
                break;
            }
            let piece = state.waiting.pop().expect("it goes on");
            let index = state.ends.len() - state.waiting.len() - 1;
            state.under_way += 1;
            drop(state);
            match self.memory_of(&piece) {
                Ok(span) => {
                    batch.push(Moving { index, piece, span, sum: None, moved_once: false });
                }
                Err(error) => self.end(Err(error)),
            }
        }
        match self.direction {
            Direction::Write if self.summed => self.submit_summed(batch),
            _ => self.submit(batch),
        }
    }

    /// What the engine is given: the piece's memory, or a copy where a disk cannot reach it.
    fn memory_of(&self, piece: &Piece) -> Result<HostSpan, DiskTierError> {
        Ok(match (&piece.direct, self.direction) {
            (Some(direct), _) => direct.clone(),
            (None, Direction::Write) => self.spans.gather(piece.start, piece.place.data)?,
            (None, Direction::Read) => blocks(piece.place.data)?,
        })
    }

    fn submit(self: &Arc<Flight>, batch: Vec<Moving>) {
        if batch.is_empty() {
            return;
        }
        let transfers = batch.into_iter().map(|moving| self.transfer(moving, None));
        submit_transfers(&self.shelf.io, transfers);
    }

    /// Writes pieces and sums them up meanwhile: whichever ends last ends the piece.
    fn submit_summed(self: &Arc<Flight>, batch: Vec<Moving>) {
        if batch.is_empty() {
            return;
        }
        let mut sums = Vec::new();
        let transfers: Vec<FileTransfer> = batch
            .into_iter()
            .map(|moving| {
                let meeting = Arc::new(Meeting::default());
                let (flight, place) = (Arc::clone(self), Arc::clone(&meeting));
                let (span, data) = (moving.span.clone(), moving.piece.place.data);
                sums.push(move || {
                    let sum = sum_of(&span, data);
                    if let Some((moving, answer)) = place.meet(Half::Sum(sum)) {
                        flight.piece_moved(moving, answer);
                    }
                });
                self.transfer(moving, Some(meeting))
            })
            .collect();
        submit_transfers(&self.shelf.io, transfers);
        self.shelf.workers.run(sums);
    }

    fn transfer(self: &Arc<Flight>, moving: Moving, meeting: Option<Arc<Meeting>>) -> FileTransfer {
        let Place { file, extent, .. } = &moving.piece.place;
        let writes = self.direction == Direction::Write;
        let meter = self.shelf.compressor.as_ref().filter(|_| writes);
        // Until the disk has answered: sums are none of its time.
        let busy = meter.map(|compressor| compressor.disk.begin(extent.len));
        FileTransfer {
            file: Arc::clone(file),
            // The header comes first.
            offset: extent.offset + vramp_host::DISK_BLOCK,
            span: moving.span.clone(),
            direction: self.direction,
            done: {
                let flight = Arc::clone(self);
                Box::new(move |answer| {
                    drop(busy);
                    match meeting {
                        None => flight.piece_moved(moving, answer),
                        Some(meeting) => {
                            if let Some((moving, answer)) = meeting.meet(Half::Io(moving, answer)) {
                                flight.piece_moved(moving, answer);
                            }
                        }
                    }
                })
            },
        }
    }

    /// A piece has moved, or has not. Called in a thread of the engine, or in a worker.
    fn piece_moved(self: &Arc<Flight>, moving: Moving, answer: Result<(), DiskError>) {
        let flight = Arc::clone(self);
        match (answer, self.direction) {
            (Ok(()), Direction::Write) => self.end(Ok(moving)),
            // Neither summing nor copying shall keep the engine waiting.
            (Ok(()), Direction::Read) if self.summed || moving.piece.direct.is_none() => {
                self.shelf.workers.run([move || flight.arrived(moving)]);
            }
            (Ok(()), Direction::Read) => self.end(Ok(moving)),
            (Err(error), direction) => {
                if error.kind == DiskErrorKind::Media {
                    self.shelf.state().counters.media_errors += 1;
                    if direction == Direction::Write {
                        self.shelf.workers.run([move || flight.elsewhere(moving, error)]);
                        return;
                    }
                }
                self.end(Err(error.into()));
            }
        }
    }

    /// What was read is summed up, and put where it belongs.
    fn arrived(self: &Arc<Flight>, mut moving: Moving) {
        let data = moving.piece.place.data;
        if self.summed {
            moving.sum = Some(sum_of(&moving.span, data));
        }
        if moving.piece.direct.is_none() {
            self.spans.scatter(moving.piece.start, data, &moving.span);
        }
        self.end(Ok(moving));
    }

    /// Writes a piece in another place, once. No bad place is ever used again.
    fn elsewhere(self: &Arc<Flight>, mut moving: Moving, error: DiskError) {
        let place = &mut moving.piece.place;
        self.shelf.quarantine(self.holding, place);
        let other = (!moving.moved_once).then(|| self.shelf.replace(self.holding, place));
        match other {
            Some(Ok(other)) => {
                *place = other;
                moving.moved_once = true;
                self.submit(vec![moving]);
            }
            // The disk's own words say more than that there is no other place.
            _ => self.end(Err(error.into())),
        }
    }

    /// One piece less is under way.
    fn end(self: &Arc<Flight>, ended: Result<Moving, DiskTierError>) {
        let mut state = self.lock();
        state.under_way -= 1;
        match ended {
            Ok(Moving { index, piece, sum, .. }) => {
                state.moved += piece.place.data;
                state.ends[index] = Some(PieceEnd { place: piece.place, sum });
            }
            // The first failure is the one to tell.
            Err(error) => state.failed = state.failed.take().or(Some(error)),
        }
        if state.is_over() {
            state.total_ns = self.begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
            self.over.notify_all();
        }
        let goes_on = state.goes_on();
        drop(state);
        if goes_on {
            self.more(1);
        }
    }

    /// Notes in the books what it came to.
    pub fn count(&self, failed: Option<&DiskTierError>) {
        let total_ns = self.lock().total_ns;
        let counters = &mut self.shelf.state().counters;
        if let Some(error) = failed {
            counters.count_error(error);
        }
        let stats = match self.direction {
            Direction::Write => &mut counters.writes,
            Direction::Read => &mut counters.reads,
        };
        match failed {
            Some(_) => stats.failed += 1,
            None => {
                stats.transfers += 1;
                stats.bytes += self.spans.len();
                stats.total_ns = stats.total_ns.saturating_add(total_ns);
            }
        }
    }

    /// Compares what was read with the sums of what was written.
    fn verify(&self, ends: &[PieceEnd]) -> Result<(), DiskTierError> {
        let mut ends = ends.iter();
        for StoredExtent { place, sum } in &self.expected {
            let Some(expected) = *sum else { continue };
            let (mut found, mut done) = (Hasher::new(), Bytes::ZERO);
            while done < place.data {
                let end = ends.next().expect("pieces cover the extents in order");
                found.combine(end.sum.as_ref().expect("every piece was summed up"));
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

/// Where the two halves of a summed write wait for one another.
#[derive(Default)]
struct Meeting(Mutex<Option<Half>>);

enum Half {
    Sum(Hasher),
    Io(Moving, Result<(), DiskError>),
}

impl Meeting {
    /// `None` for whoever is first.
    fn meet(&self, half: Half) -> Option<(Moving, Result<(), DiskError>)> {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (first.take(), half) {
            (None, half) => {
                *first = Some(half);
                None
            }
            (Some(Half::Sum(sum)), Half::Io(mut moving, answer))
            | (Some(Half::Io(mut moving, answer)), Half::Sum(sum)) => {
                moving.sum = Some(sum);
                Some((moving, answer))
            }
            _ => unreachable!("there is one of each half"),
        }
    }
}

/// The sum of the first `data` bytes.
fn sum_of(span: &HostSpan, data: Bytes) -> Hasher {
    let mut sum = Hasher::new();
    let data = span.part(Bytes::ZERO, data).expect("a piece's memory holds its data");
    data.scan(|bytes| sum.update(bytes));
    sum
}

/// Pieces that lie beside each other are one extent with one sum.
fn joined(ends: &[PieceEnd]) -> Vec<StoredExtent> {
    let mut extents: Vec<(Place, Option<Hasher>)> = Vec::new();
    for PieceEnd { place, sum } in ends {
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
    let stored = |(place, sum): (Place, Option<Hasher>)| StoredExtent {
        place,
        sum: sum.map(Hasher::finalize),
    };
    extents.into_iter().map(stored).collect()
}
