//! Completion of work: recorded events of each stream, in order, and a stock of unused ones.

use std::collections::VecDeque;

use vramp_core::{Mark, Pool, StreamId};
use vramp_driver::{Driver, DriverResult, Event, Stream};
use vramp_model::TorchPool;

use crate::config::Progress;

/// A pool that tracks the completion of work on its streams.
pub(crate) trait Completions {
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

impl Completions for TorchPool {
    fn pending(&self) -> Vec<Mark> {
        self.pending()
    }

    fn reached(&mut self, mark: Mark) {
        self.reached(mark);
    }
}

/// Recorded events of every stream, oldest first, and unused ones.
#[derive(Default)]
pub(crate) struct Events {
    open: Vec<VecDeque<(Mark, Event)>>,
    stock: Vec<Event>,
}

impl Events {
    /// Records an event for `mark`. Two driver calls at most: an event is created if none is
    /// unused.
    pub(crate) fn record(
        &mut self,
        driver: &dyn Driver,
        mark: Mark,
        stream: Stream,
    ) -> DriverResult<()> {
        let event = match self.stock.pop() {
            Some(event) => event,
            None => driver.create_event()?,
        };
        if let Err(error) = driver.record(event, stream) {
            self.stock.push(event);
            return Err(error);
        }
        self.of(mark.stream).push_back((mark, event));
        Ok(())
    }

    /// Returns the oldest open event that covers `mark`.
    pub(crate) fn covering(&self, mark: Mark) -> Option<Event> {
        let open = self.open.get(mark.stream.index())?;
        open.iter().find(|(recorded, _)| recorded.epoch >= mark.epoch).map(|&(_, event)| event)
    }

    /// Queries which epochs were reached. One query for a stream whose work is all over, else one
    /// for each event up to the first open one.
    pub(crate) fn poll(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        progress: &Progress,
    ) -> DriverResult<()> {
        for last in pool.pending() {
            match progress {
                Progress::Events => self.poll_events(driver, pool, last)?,
                Progress::External(reached) => {
                    let epoch = reached(last).min(last.epoch);
                    self.wait_for_external(driver, pool, Mark { epoch, ..last })?;
                }
            }
        }
        Ok(())
    }

    fn poll_events(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Completions,
        last: Mark,
    ) -> DriverResult<()> {
        let open = self.of(last.stream);
        let Some(&(newest, event)) = open.back() else { return Ok(()) };
        if driver.query(event)? {
            self.complete(pool, newest);
            return Ok(());
        }
        let mut done = None;
        for &(mark, event) in open.iter().take(open.len() - 1) {
            if !driver.query(event)? {
                break;
            }
            done = Some(mark);
        }
        if let Some(mark) = done {
            self.complete(pool, mark);
        }
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
        let covered =
            self.of(mark.stream).iter().rev().find(|(known, _)| known.epoch <= mark.epoch);
        let Some(&(known, event)) = covered else { return Ok(()) };
        driver.synchronize_event(event)?;
        self.complete(pool, known);
        Ok(())
    }

    /// Waits on the host until the work before `mark` is over. An event was recorded for it.
    pub(crate) fn wait_for(
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
        while let Some(&(known, event)) = self.of(mark.stream).front() {
            if known.epoch > mark.epoch {
                break;
            }
            self.of(mark.stream).pop_front();
            self.stock.push(event);
        }
    }

    fn of(&mut self, stream: StreamId) -> &mut VecDeque<(Mark, Event)> {
        if self.open.len() <= stream.index() {
            self.open.resize_with(stream.index() + 1, VecDeque::new);
        }
        &mut self.open[stream.index()]
    }

    pub(crate) fn close(&mut self, driver: &dyn Driver) -> DriverResult<()> {
        let open = self.open.drain(..).flatten().map(|(_, event)| event);
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
