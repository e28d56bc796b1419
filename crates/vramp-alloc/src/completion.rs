//! Completion of work: recorded events of each stream, in order, and a stock of unused ones.
//!
//! The last event of a stream that ended is the one that the group recorded at its end. It is kept
//! here until it is known to be reached. [`Events::add_end`] looks through the kept ends once their
//! number has doubled, so they cost one query each, and none stays for ever.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_core::{Epoch, Mark, Pool, StreamId};
use vramp_driver::{Call, Driver, DriverError, DriverResult, ErrorKind, Event, Stream};

use crate::stream_end::{StreamEnd, StreamEnds};

/// Source of the completion of work.
#[derive(Clone, Debug, Default)]
pub enum Progress {
    /// The driver's events.
    #[default]
    Events,
    /// A table that the caller updates. The allocator still waits for the driver's event of an
    /// epoch, so memory is never reused early; but decisions do not depend on a clock.
    External(Arc<ExternalProgress>),
}

/// The epoch that each stream has reached, by a source other than the driver: see
/// [`Progress::External`]. It holds one entry for each stream up to the highest that was set.
#[derive(Debug, Default)]
pub struct ExternalProgress {
    reached: Mutex<Vec<Option<Epoch>>>,
}

impl ExternalProgress {
    /// Sets the epoch that `stream` has reached; `None`, as at the start, means all recorded work.
    pub fn set(&self, stream: StreamId, reached: Option<Epoch>) {
        let mut table = self.table();
        if table.len() <= stream.index() {
            table.resize(stream.index() + 1, None);
        }
        table[stream.index()] = reached;
    }

    /// Returns the epoch that the stream of `last` has reached, at most that of `last`.
    pub fn reached(&self, last: Mark) -> Epoch {
        let reached = self.table().get(last.stream.index()).copied().flatten();
        reached.map_or(last.epoch, |reached| reached.min(last.epoch))
    }

    fn table(&self) -> MutexGuard<'_, Vec<Option<Epoch>>> {
        // Each entry is changed in one step.
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool that tracks the completion of work on its streams.
pub trait Completions {
    /// Streams with recorded events that free memory waits for, each with the last mark recorded.
    fn pending(&self) -> Vec<Mark>;
    /// Records that the work before `mark` is over.
    fn reached(&mut self, mark: Mark);
}

impl Completions for Pool {
    fn pending(&self) -> Vec<Mark> {
        self.pending().collect()
    }

    fn reached(&mut self, mark: Mark) {
        self.reached(mark);
    }
}

/// Recorded events of every stream, oldest first, and unused ones.
#[derive(Default)]
pub struct Events {
    /// Of streams that have some.
    open: BTreeMap<StreamId, VecDeque<(Mark, Recorded)>>,
    /// Of these, how many events the next query of [`Events::poll_some`] is about, if that is not one.
    strides: BTreeMap<StreamId, usize>,
    stock: Vec<Event>,
    ends: StreamEnds,
    /// The stream that [`Events::poll_some`] asked last.
    asked_last: Option<StreamId>,
    /// Number of events that were reached.
    completed: u64,
    /// Own events that threads wait for without the pool's lock, once for each of them.
    awaited: Vec<Event>,
    closed: bool,
}

/// An event that a thread waits for without the pool's lock. It is not recorded again before
/// [`Events::end_wait`].
pub(crate) struct Awaited {
    mark: Mark,
    of: AwaitedEvent,
}

enum AwaitedEvent {
    Own(Event),
    End(Arc<StreamEnd>),
}

impl Awaited {
    /// Waits on the host until the event is reached.
    pub(crate) fn synchronize(&self, driver: &dyn Driver) -> DriverResult<()> {
        match &self.of {
            AwaitedEvent::Own(event) => driver.synchronize_event(*event),
            AwaitedEvent::End(end) => end.synchronize(),
        }
    }
}

/// An event that stands for work.
enum Recorded {
    /// Recorded for this pool on the driver's stream, and used again once it is reached.
    Own(Event, Stream),
    /// The end of the stream, which all pools share.
    End(Arc<StreamEnd>),
}

impl Recorded {
    fn event(&self) -> Event {
        match self {
            Recorded::Own(event, _) => *event,
            Recorded::End(end) => end.event(),
        }
    }

    fn is_reached(&self, driver: &dyn Driver) -> DriverResult<bool> {
        match self {
            Recorded::Own(event, stream) => match driver.query(*event) {
                // A capture of other code began and ended around the record. A later record covers
                // the work too, and where the stream is gone its end does.
                Err(error) if error.kind == ErrorKind::Capturing => {
                    let _ = driver.record_outside(*event, *stream);
                    Ok(false)
                }
                answer => answer,
            },
            Recorded::End(end) => end.is_over(),
        }
    }
}

impl Events {
    /// Records an event for `mark`. Returns false if the stream captures: nothing was recorded then.
    /// Two driver calls at most: an event is created if none is unused.
    pub fn record(
        &mut self,
        driver: &dyn Driver,
        mark: Mark,
        stream: Stream,
    ) -> DriverResult<bool> {
        let event = match self.stock.pop() {
            Some(event) => event,
            None => driver.create_event()?,
        };
        let recorded = driver.record_outside(event, stream);
        match recorded {
            Ok(true) => {
                let open = self.open.entry(mark.stream).or_default();
                open.push_back((mark, Recorded::Own(event, stream)));
            }
            Ok(false) | Err(_) => self.stock.push(event),
        }
        recorded
    }

    /// Adds the end of a stream, which covers `mark` and all before it; without an event that work
    /// is over. No driver call. Completes earlier ends that are known to be reached.
    pub fn add_end(
        &mut self,
        pool: &mut impl Completions,
        mark: Mark,
        end: Option<&Arc<StreamEnd>>,
    ) {
        let Some(end) = end else { return self.complete(pool, mark) };
        let open = self.open.entry(mark.stream).or_default();
        open.push_back((mark, Recorded::End(Arc::clone(end))));
        self.ends.push(mark.stream, Arc::clone(end));
        if self.ends.is_sweep_due() {
            for stream in self.ends.sweep(StreamEnd::is_known_over) {
                let last = self.open.get(&stream).and_then(VecDeque::back);
                if let Some(&(last, _)) = last {
                    self.complete(pool, last);
                }
            }
        }
    }

    /// Waits on the host for the work of the streams that were destroyed.
    pub fn wait_for_ends(&self) -> DriverResult<()> {
        self.ends.iter().try_for_each(|end| end.synchronize())
    }

    /// Returns the number of events that were reached so far.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns the oldest open event that covers `mark`; `None` if the work is known to be over.
    pub(crate) fn covering(&self, mark: Mark) -> Option<Event> {
        self.find_covering(mark).map(Recorded::event)
    }

    fn find_covering(&self, mark: Mark) -> Option<&Recorded> {
        let open = self.open.get(&mark.stream)?;
        let covers = |(recorded, _): &&(Mark, Recorded)| recorded.epoch >= mark.epoch;
        open.iter().find(covers).map(|(_, recorded)| recorded)
    }

    /// Returns the event that covers `mark`, for a wait without the pool's lock. `None` if the work is
    /// known to be over. Call [`Events::end_wait`] after the wait.
    pub(crate) fn begin_wait(&mut self, mark: Mark) -> Option<Awaited> {
        let of = match self.find_covering(mark)? {
            Recorded::Own(event, _) => AwaitedEvent::Own(*event),
            Recorded::End(end) => AwaitedEvent::End(Arc::clone(end)),
        };
        if let AwaitedEvent::Own(event) = of {
            self.awaited.push(event);
        }
        Some(Awaited { mark, of })
    }

    /// Ends a wait; `is_over` if it found the work over.
    pub(crate) fn end_wait(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        Awaited { mark, of }: Awaited,
        is_over: bool,
    ) {
        if is_over && !self.closed {
            self.complete(pool, mark);
        }
        let AwaitedEvent::Own(event) = of else { return };
        let place = self.awaited.iter().position(|&known| known == event);
        self.awaited.swap_remove(place.expect("a wait ends once"));
        if self.awaited.contains(&event) {
            return;
        }
        let is_event =
            |(_, known): &(Mark, Recorded)| matches!(known, Recorded::Own(own, _) if *own == event);
        if self.closed {
            // The device destroys what stays.
            let _ = driver.destroy_event(event);
        } else if !self.open.get(&mark.stream).is_some_and(|open| open.iter().any(is_event)) {
            self.stock.push(event);
        }
    }

    /// Queries which epochs were reached. One query for a stream that reached none of its open events or
    /// has only one, two for one that reached all, else O(log n) of them.
    pub fn poll(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        progress: &Progress,
    ) -> DriverResult<()> {
        for last in pool.pending() {
            self.poll_stream(driver, pool, progress, last)?;
        }
        Ok(())
    }

    /// Queries one event of each stream, in turn, until `in_vain` of them were not reached, and counts that
    /// down. The next call goes on with the streams behind them.
    ///
    /// A query is about the oldest event of a stream; after each that was reached about twice as many
    /// events, of which it queries the last, and after each that was not about half as many. So a stream
    /// that records events as often as it is queried has few open ones, and each query that is not in vain
    /// ends an event at least.
    pub(crate) fn poll_some(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        progress: &Progress,
        in_vain: &mut usize,
    ) -> DriverResult<()> {
        let Progress::Events = progress else { return self.poll(driver, pool, progress) };
        for _ in 0..self.open.len() {
            let after = self.asked_last.map_or(Bound::Unbounded, Bound::Excluded);
            let next = self.open.range((after, Bound::Unbounded)).next();
            let next = next.or_else(|| self.open.first_key_value());
            let Some((&stream, open)) = next.filter(|_| *in_vain > 0) else { break };
            self.asked_last = Some(stream);
            let stride = self.strides.remove(&stream).unwrap_or(1).min(open.len());
            let (mark, event) = &open[stride - 1];
            let mark = *mark;
            let next = match event.is_reached(driver)? {
                true => {
                    self.complete(pool, mark);
                    stride * 2
                }
                false => {
                    *in_vain -= 1;
                    stride / 2
                }
            };
            if next > 1 && self.open.contains_key(&stream) {
                self.strides.insert(stream, next);
            }
        }
        Ok(())
    }

    /// Queries which epochs of one stream were reached. Returns true if an event of it is open still.
    pub(crate) fn poll_of(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        progress: &Progress,
        stream: StreamId,
    ) -> DriverResult<bool> {
        let last = self.open.get(&stream).and_then(VecDeque::back);
        let Some(&(last, _)) = last else { return Ok(false) };
        self.poll_stream(driver, pool, progress, last)?;
        Ok(self.open.contains_key(&stream))
    }

    /// Queries as [`Events::poll_of`] does after each `every` events that a stream got: for streams that
    /// record events which no request asks about.
    pub(crate) fn poll_after(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        progress: &Progress,
        stream: StreamId,
        every: usize,
    ) -> DriverResult<()> {
        match self.open.get(&stream).map_or(0, VecDeque::len) {
            open if open > 0 && open.is_multiple_of(every) => {
                self.poll_of(driver, pool, progress, stream).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn poll_stream(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        progress: &Progress,
        last: Mark,
    ) -> DriverResult<()> {
        match progress {
            Progress::Events => self.poll_events(driver, pool, last),
            Progress::External(table) => {
                let epoch = table.reached(last);
                self.wait_for_external(driver, pool, Mark { epoch, ..last })
            }
        }
    }

    fn poll_events(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        last: Mark,
    ) -> DriverResult<()> {
        let Some(open) = self.open.get(&last.stream) else { return Ok(()) };
        let is_reached = |index: usize| open[index].1.is_reached(driver);
        // They are reached in order. Most often none is, or all are.
        if !is_reached(0)? {
            return Ok(());
        }
        let (mut reached, mut open_from) = (0, open.len());
        if open_from > 1 && is_reached(open_from - 1)? {
            reached = open_from - 1;
        } else {
            open_from -= 1;
        }
        while open_from - reached > 1 {
            let middle = reached.midpoint(open_from);
            match is_reached(middle)? {
                true => reached = middle,
                false => open_from = middle,
            }
        }
        let mark = open[reached].0;
        self.complete(pool, mark);
        Ok(())
    }

    /// Waits on the host until the driver's events have reached `mark`, which the external source
    /// returned.
    fn wait_for_external(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        mark: Mark,
    ) -> DriverResult<()> {
        let open = self.open.get(&mark.stream).into_iter().flatten();
        let covered = open.rev().find(|(known, _)| known.epoch <= mark.epoch);
        let Some((known, recorded)) = covered else { return Ok(()) };
        let known = *known;
        driver.synchronize_event(recorded.event())?;
        self.complete(pool, known);
        Ok(())
    }

    /// Waits on the host until the work before `mark` is over. An event was recorded for it.
    pub fn wait_for(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        mark: Mark,
    ) -> DriverResult<()> {
        if let Some(event) = self.covering(mark) {
            driver.synchronize_event(event)?;
        }
        self.complete(pool, mark);
        Ok(())
    }

    fn complete(&mut self, pool: &mut impl Completions, mark: Mark) {
        pool.reached(mark);
        let Events { open, strides, stock, completed, awaited, .. } = self;
        let Entry::Occupied(mut of_stream) = open.entry(mark.stream) else { return };
        let open = of_stream.get_mut();
        let reached = open.partition_point(|(known, _)| known.epoch <= mark.epoch);
        *completed += reached as u64;
        for (_, recorded) in open.drain(..reached) {
            if let Recorded::Own(event, _) = recorded
                && !awaited.contains(&event)
            {
                stock.push(event);
            }
        }
        if open.is_empty() {
            of_stream.remove();
            strides.remove(&mark.stream);
        }
    }

    /// Destroys all events. Goes on after a failure and returns the first one.
    pub fn close(&mut self, driver: &dyn Driver) -> DriverResult<()> {
        self.ends = StreamEnds::default();
        let own = |(_, recorded)| match recorded {
            Recorded::Own(event, _) => Some(event),
            Recorded::End(_) => None,
        };
        self.closed = true;
        let awaited = &self.awaited;
        let open = std::mem::take(&mut self.open).into_values().flatten().filter_map(own);
        let open = open.filter(|event| !awaited.contains(event));
        let mut first = Ok(());
        for event in open.chain(self.stock.drain(..)) {
            let result = driver.destroy_event(event);
            if first.is_ok() {
                first = result;
            }
        }
        first
    }
}

/// Returns the error of a step that needs an event on a stream that captures.
pub fn captures(stream: StreamId) -> DriverError {
    let detail = format!("{stream} captures, so no stream can wait for its work");
    DriverError::from_code(Call::Record, 900, detail)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vramp_core::Epoch;
    use vramp_driver::sim::{Kernel, Simulator};

    use super::*;

    #[derive(Default)]
    struct Reached(Vec<Mark>);

    impl Completions for Reached {
        fn pending(&self) -> Vec<Mark> {
            unreachable!("the streams with open events are known")
        }

        fn reached(&mut self, mark: Mark) {
            self.0.push(mark);
        }
    }

    fn mark(stream: u32, epoch: u32) -> Mark {
        let epoch = (0..epoch).fold(Epoch::START, |epoch, _| epoch.next());
        Mark { stream: StreamId::new(stream), epoch }
    }

    #[test]
    fn streams_that_lag_keep_no_poll_from_those_behind_them() {
        let sim: Arc<Simulator> = Arc::new(Simulator::builder().build());
        let (mut events, mut reached) = (Events::default(), Reached::default());
        let gate = sim.gate();
        for number in 0..21 {
            let stream = sim.create_stream().expect("a stream can be made");
            if number < 20 {
                sim.launch(stream, Kernel::new("busy").until(gate)).expect("it takes work");
            }
            assert!(events.record(&*sim, mark(number, 1), stream).expect("it captures nothing"));
        }
        let mut poll = |reached: &mut Reached| {
            let (before, over) = (sim.calls_of(vramp_driver::Call::Query), reached.0.len());
            let mut in_vain = 1;
            let polled = events.poll_some(&*sim, reached, &Progress::Events, &mut in_vain);
            polled.expect("no call fails");
            let queries = sim.calls_of(vramp_driver::Call::Query) - before;
            assert_eq!(queries as usize, reached.0.len() - over + 1 - in_vain);
        };
        (0..21).for_each(|_| poll(&mut reached));
        assert_eq!(reached.0, [mark(20, 1)]);
        sim.open(gate);
        sim.advance(1);
        poll(&mut reached);
        assert_eq!((reached.0.len(), events.open.len()), (21, 0));
        events.close(&*sim).expect("no call fails");
    }

    #[test]
    fn polls_of_one_query_each_keep_up_with_a_stream_that_records_at_each() {
        // How many of its youngest events the stream has not reached.
        for lag in [0, 1, 10, 100] {
            let sim: Arc<Simulator> = Arc::new(Simulator::builder().build());
            let (mut events, mut reached) = (Events::default(), Reached::default());
            let stream = sim.create_stream().expect("a stream can be made");
            for number in 1..=600 {
                sim.launch(stream, Kernel::new("step").lasting(1000)).expect("it takes work");
                events.record(&*sim, mark(0, number), stream).expect("it captures nothing");
                if number > lag {
                    sim.advance(1000);
                }
                let before = sim.calls_of(vramp_driver::Call::Query);
                let polled = events.poll_some(&*sim, &mut reached, &Progress::Events, &mut 1);
                polled.expect("no call fails");
                assert_eq!(sim.calls_of(vramp_driver::Call::Query) - before, 1);
            }
            let open = events.open.get(&StreamId::new(0)).map_or(0, VecDeque::len);
            assert!(open <= 2 * lag as usize + 4, "{open} are open, {lag} are not over");
            events.close(&*sim).expect("no call fails");
        }
    }

    #[test]
    fn the_last_event_that_a_stream_reached_is_found_by_halves() {
        for (all, over) in [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (100, 1), (100, 77), (100, 99)]
        {
            let sim: Arc<Simulator> = Arc::new(Simulator::builder().build());
            let (mut events, mut reached) = (Events::default(), Reached::default());
            let stream = sim.create_stream().expect("a stream can be made");
            let gate = sim.gate();
            for number in 1..=all {
                if number == over + 1 {
                    sim.launch(stream, Kernel::new("busy").until(gate)).expect("it takes work");
                }
                events.record(&*sim, mark(0, number), stream).expect("it captures nothing");
            }
            sim.advance(1);
            let polled = events.poll_events(&*sim, &mut reached, mark(0, all));
            polled.expect("no call fails");
            let expected: Vec<Mark> = (over > 0).then(|| mark(0, over)).into_iter().collect();
            assert_eq!(reached.0, expected, "{over} of {all} are over");
            assert!(sim.calls_of(vramp_driver::Call::Query) <= 9, "{over} of {all} are over");
            sim.open(gate);
        }
    }
}
