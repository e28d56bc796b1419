//! Work that uses buffers: events on streams, and the tokens by which the planner names them.
//!
//! A token always stands for work: [`Events::note`] cannot fail. Where no event could be recorded
//! the work counts as in flight, and every poll tries again, with an event behind that work and
//! whatever was queued since. The work of a stream that was destroyed is covered by the event that
//! the allocator recorded at its end.
//!
//! Copies of the mover have no tokens: their transfers wait for them. If such a wait fails, tokens on
//! the mover's streams stand for the copies ([`Events::note_copies`]).
//!
//! Growth: an entry for each use whose work is not known to be over, found in O(log n). A stream without
//! uses has no entry: numbers are counted over all streams, so that none is used again. A lease and a dropped
//! buffer query 64 streams at most, in turn; an eviction queries all that have work.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::planner::{StreamKey, UseToken};
use vramp_alloc::{Allocator, Driver, DriverError, StreamEnd, StreamId, StreamWork};
use vramp_driver::{Call, ErrorKind, Event, Stream};
use vramp_tiers::Mover;
use vramp_tiers::movers::CopyDependency;

/// A stream of the allocator, with the driver's handle. The handle is dead once the stream was
/// destroyed, so only the id stands for its work.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseStream {
    pub id: StreamId,
    pub raw: Stream,
}

impl LeaseStream {
    /// Creates a stream.
    pub fn create(allocator: &Allocator) -> Result<LeaseStream, DriverError> {
        let id = allocator.create_stream()?;
        let raw = allocator.stream(id).expect("it was made just now");
        Ok(LeaseStream { id, raw })
    }
}

/// An event that stands for work. It stays valid as long as this is held.
#[derive(Clone)]
pub(super) enum WorkEvent {
    /// One of the manager's.
    Own(Event),
    /// The end of a destroyed stream.
    End(Arc<StreamEnd>),
}

impl WorkEvent {
    /// Returns it as what a copy waits for.
    pub fn into_dependency(self) -> CopyDependency {
        match self {
            WorkEvent::Own(event) => CopyDependency::Event(event),
            WorkEvent::End(end) => CopyDependency::Work(StreamWork::Ended(end)),
        }
    }

    pub fn event(&self) -> Event {
        match self {
            WorkEvent::Own(event) => *event,
            WorkEvent::End(end) => end.event(),
        }
    }
}

/// Uses of every stream, oldest first, and unused events for reuse.
pub(super) struct Events {
    allocator: Arc<Allocator>,
    driver: Arc<dyn Driver>,
    /// Streams of the mover.
    copies: [Stream; 4],
    /// Streams with uses.
    streams: BTreeMap<StreamKey, Open>,
    /// The first stream that the next poll queries.
    next: StreamKey,
    /// Number of the last use.
    last: u64,
    stock: Vec<Event>,
}

#[derive(Default)]
struct Open {
    /// In the order of their numbers.
    uses: VecDeque<Use>,
}

struct Use {
    number: u64,
    work: Work,
}

/// What is known of the work of a use.
enum Work {
    /// Complete once the event is reached.
    Event(WorkEvent),
    /// No event could be recorded behind it yet.
    Unrecorded,
    /// The stream was destroyed, and its work is over.
    Over,
}

/// Returns the planner's key of a stream.
pub(super) fn key(stream: StreamId) -> StreamKey {
    StreamKey(stream.index() as u64)
}

/// Number of streams that a lease queries at most.
const SOME: usize = 64;

/// Work that completed, and whether all queries succeeded.
pub(super) type Polled = (Vec<UseToken>, Result<(), DriverError>);

/// Key of the mover's first stream, beyond those of the allocator.
const COPIES: u64 = 1 << 32;

/// Returns true for a token of [`Events::note_copies`].
pub(super) fn is_of_copies(token: UseToken) -> bool {
    token.stream.0 >= COPIES
}

impl Events {
    pub fn new(allocator: &Arc<Allocator>, mover: &Mover) -> Events {
        let (allocator, driver) = (Arc::clone(allocator), Arc::clone(allocator.driver()));
        let copies = mover.copy_streams();
        let (streams, next) = (BTreeMap::new(), StreamKey(0));
        Events { allocator, driver, copies, streams, next, last: 0, stock: Vec::new() }
    }

    /// Returns a token for all that is queued on `stream` by now. At most two driver calls.
    pub fn note(&mut self, stream: StreamId) -> UseToken {
        self.note_key(key(stream))
    }

    /// Returns tokens for all copies that the mover has queued by now. At most eight driver calls.
    pub fn note_copies(&mut self) -> [UseToken; 4] {
        [0, 1, 2, 3].map(|index| self.note_key(StreamKey(COPIES + index)))
    }

    fn note_key(&mut self, stream: StreamKey) -> UseToken {
        let work = self.observe(stream).unwrap_or(Work::Unrecorded);
        self.last += 1;
        let open = self.streams.entry(stream).or_default();
        open.uses.push_back(Use { number: self.last, work });
        UseToken { stream, number: self.last }
    }

    fn stream_work(&self, stream: StreamKey) -> Option<StreamWork> {
        match stream.0.checked_sub(COPIES) {
            Some(index) => Some(StreamWork::Open(self.copies[index as usize])),
            None => self.allocator.stream_work(StreamId::new(stream.0 as u32)),
        }
    }

    /// Records an event behind the work of a stream, unless it captures, or finds the one at its end.
    fn observe(&mut self, stream: StreamKey) -> Result<Work, DriverError> {
        let raw = match self.stream_work(stream) {
            Some(StreamWork::Open(raw)) => raw,
            Some(StreamWork::Ended(end)) => return Ok(Work::Event(WorkEvent::End(end))),
            Some(StreamWork::Over) | None => return Ok(Work::Over),
        };
        let event = match self.stock.pop() {
            Some(event) => event,
            None => self.driver.create_event()?,
        };
        let recorded = self.driver.record_outside(event, raw);
        if !matches!(recorded, Ok(true)) {
            self.stock.push(event);
        }
        Ok(match recorded? {
            true => Work::Event(WorkEvent::Own(event)),
            false => Work::Unrecorded,
        })
    }

    /// Records an event behind the last use of a stream if it has none: it covers all earlier ones.
    /// Does nothing while the stream captures.
    ///
    /// # Errors
    /// A driver call failed.
    fn record_missing(&mut self, stream: StreamKey) -> Result<(), DriverError> {
        let last = self.streams.get(&stream).and_then(|open| open.uses.back());
        let missing = last.is_some_and(|last| matches!(last.work, Work::Unrecorded));
        if !missing {
            return Ok(());
        }
        let work = self.observe(stream)?;
        let last = self.streams.get_mut(&stream).and_then(|open| open.uses.back_mut());
        last.expect("it was there above").work = work;
        Ok(())
    }

    /// Returns true if work queued on a stream becomes part of a graph, or if that is not known.
    pub fn captures(&self, stream: StreamId) -> bool {
        self.is_capturing(key(stream)).unwrap_or(true)
    }

    fn is_capturing(&self, stream: StreamKey) -> Result<bool, DriverError> {
        match self.stream_work(stream) {
            Some(StreamWork::Open(raw)) => self.driver.is_capturing(raw),
            Some(StreamWork::Ended(_) | StreamWork::Over) | None => Ok(false),
        }
    }

    /// Returns the time of the device's clock.
    pub fn now_ns(&self) -> u64 {
        self.driver.now_ns()
    }

    /// Returns the event of a token; `None` once its work is known to be over.
    ///
    /// # Errors
    /// None could be recorded, now either. The work may run.
    pub fn of(&mut self, token: UseToken) -> Result<Option<WorkEvent>, DriverError> {
        self.record_missing(token.stream)?;
        let Some(open) = self.streams.get(&token.stream) else { return Ok(None) };
        let place = open.uses.binary_search_by_key(&token.number, |use_| use_.number);
        let Ok(place) = place else { return Ok(None) };
        // Its own event, for a later one would make the waiter wait for later work too; or, if it
        // has none, the next.
        match open
            .uses
            .range(place..)
            .map(|use_| &use_.work)
            .find(|work| !matches!(work, Work::Unrecorded))
        {
            Some(Work::Event(event)) => Ok(Some(event.clone())),
            Some(Work::Over) => Ok(None),
            _ => {
                let stream = token.stream;
                let detail = format!("{stream} captures, so its earlier work cannot be waited for");
                Err(DriverError::from_code(Call::Record, 900, detail))
            }
        }
    }

    /// Returns true if the work is over. If that is not known yet, one query and one call for
    /// each stream. Work that cannot be queried counts as in flight.
    pub fn is_over(&mut self, token: UseToken) -> bool {
        let Ok(event) = self.of(token) else { return false };
        let Some(event) = event else { return true };
        !self.allocator.any_captures().unwrap_or(true)
            && self.driver.query(event.event()).unwrap_or(false)
    }

    /// Returns the last event of each stream with work in flight.
    ///
    /// # Errors
    /// For a stream, none could be recorded.
    pub fn last(&mut self) -> Vec<Result<WorkEvent, DriverError>> {
        let last = |(&stream, open): (&StreamKey, &Open)| {
            open.uses.back().map(|last| UseToken { stream, number: last.number })
        };
        let tokens: Vec<UseToken> = self.streams.iter().filter_map(last).collect();
        let event = |token| self.of(token).transpose();
        tokens.into_iter().filter_map(event).collect()
    }

    /// Returns the work of each stream that completed since the last call, and whether all queries
    /// succeeded. While a stream captures there are none.
    ///
    /// One query for a stream whose work is all complete; for another one, a query for each event
    /// up to the first that is not.
    pub fn poll(&mut self) -> Polled {
        self.poll_streams(usize::MAX)
    }

    /// Does the same for some of the streams, others at each call.
    pub fn poll_some(&mut self) -> Polled {
        self.poll_streams(SOME)
    }

    fn poll_streams(&mut self, most: usize) -> Polled {
        let mut over = Vec::new();
        if self.streams.is_empty() {
            return (over, Ok(()));
        }
        let asked = match self.allocator.any_captures() {
            Ok(true) => Ok(()),
            Ok(false) => self.ask(most, &mut over),
            Err(error) => Err(error),
        };
        (over, asked)
    }

    fn ask(&mut self, most: usize, over: &mut Vec<UseToken>) -> Result<(), DriverError> {
        let mut asked = Ok(());
        let after = self.streams.range(self.next..).chain(self.streams.range(..self.next));
        let mut streams = after.map(|(&stream, _)| stream);
        let now: SmallVec<[StreamKey; SOME]> = streams.by_ref().take(most).collect();
        self.next = streams.next().unwrap_or(StreamKey(0));
        for stream in now {
            match self.ask_stream(stream) {
                Ok(number) => over.extend(number.map(|number| UseToken { stream, number })),
                // The work of other streams is known all the same. The first error is returned.
                Err(error) => asked = asked.and(Err(error)),
            }
        }
        asked
    }

    fn ask_stream(&mut self, stream: StreamKey) -> Result<Option<u64>, DriverError> {
        self.record_missing(stream)?;
        let Events { driver, streams, stock, .. } = self;
        let open = streams.get_mut(&stream).expect("it is busy");
        let over = open.take_over(&**driver, stock);
        if open.uses.is_empty() {
            streams.remove(&stream);
        }
        over
    }

    /// Returns the number of streams with uses, and of uses.
    pub fn counts(&self) -> [usize; 2] {
        [self.streams.len(), self.streams.values().map(|open| open.uses.len()).sum()]
    }
}

impl Use {
    /// Returns true if the work is over. One query at most.
    fn is_over(
        &mut self,
        driver: &dyn Driver,
        stock: &mut Vec<Event>,
    ) -> Result<bool, DriverError> {
        match &self.work {
            Work::Event(WorkEvent::Own(event)) => match driver.query(*event) {
                // Another thread began a capture just before the record, which is part of it. No
                // query of this record ever succeeds, so the next poll records again.
                Err(error) if error.kind == ErrorKind::Capturing => {
                    stock.push(*event);
                    self.work = Work::Unrecorded;
                    Ok(false)
                }
                answer => answer,
            },
            Work::Event(WorkEvent::End(end)) => end.is_over(),
            Work::Unrecorded => Ok(false),
            Work::Over => Ok(true),
        }
    }
}

impl Open {
    /// Removes the uses that are over. Returns the last of them.
    fn take_over(
        &mut self,
        driver: &dyn Driver,
        stock: &mut Vec<Event>,
    ) -> Result<Option<u64>, DriverError> {
        let Some(last) = self.uses.back_mut() else { return Ok(None) };
        let count = match last.is_over(driver, stock)? {
            true => self.uses.len(),
            false => {
                let mut count = 0;
                for (use_, place) in self.uses.iter_mut().zip(1..) {
                    match use_.is_over(driver, stock) {
                        Ok(true) => count = place,
                        // A later event covers it.
                        Ok(false) if matches!(use_.work, Work::Unrecorded) => {}
                        Ok(false) => break,
                        Err(error) if count == 0 => return Err(error),
                        // What is known is reported first. The next poll meets the error again.
                        Err(_) => break,
                    }
                }
                count
            }
        };
        let mut number = None;
        for use_ in self.uses.drain(..count) {
            number = Some(use_.number);
            if let Work::Event(WorkEvent::Own(event)) = use_.work {
                stock.push(event);
            }
        }
        Ok(number)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let open = std::mem::take(&mut self.streams).into_values().flat_map(|open| open.uses);
        let own = open.filter_map(|use_| match use_.work {
            Work::Event(WorkEvent::Own(event)) => Some(event),
            Work::Event(WorkEvent::End(_)) | Work::Unrecorded | Work::Over => None,
        });
        for event in self.stock.drain(..).chain(own) {
            // No caller is left to report to. The device destroys what stays.
            let _ = self.driver.destroy_event(event);
        }
    }
}
