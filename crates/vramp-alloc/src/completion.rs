//! Events: recorded late, kept in order, used again.

use std::collections::VecDeque;

use vramp_core::{Mark, Pool, StreamId};
use vramp_driver::{Driver, DriverResult, Event, Stream};
use vramp_model::TorchPool;

use crate::config::Progress;

/// What is told how far streams have come.
pub(crate) trait Ledger {
    /// Streams with recorded events that somebody waits for, each with the last mark recorded.
    fn pending(&self) -> Vec<Mark>;
    /// The work before `mark` is over.
    fn reached(&mut self, mark: Mark);
}

impl Ledger for Pool {
    fn pending(&self) -> Vec<Mark> {
        self.pending().collect()
    }

    fn reached(&mut self, mark: Mark) {
        self.reached(mark);
    }
}

impl Ledger for TorchPool {
    fn pending(&self) -> Vec<Mark> {
        self.pending()
    }

    fn reached(&mut self, mark: Mark) {
        self.reached(mark);
    }
}

/// Recorded events of every stream, oldest first, and a stock of unused ones.
#[derive(Default)]
pub(crate) struct Events {
    open: Vec<VecDeque<(Mark, Event)>>,
    stock: Vec<Event>,
}

impl Events {
    /// Records an event for `mark`. Two driver calls at most: an event is created if none is unused.
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

    /// The oldest open event that covers `mark`.
    pub(crate) fn covering(&self, mark: Mark) -> Option<Event> {
        let open = self.open.get(mark.stream.index())?;
        open.iter().find(|(recorded, _)| recorded.epoch >= mark.epoch).map(|&(_, event)| event)
    }

    /// Learns which epochs were reached. One query for a stream that is done with all it has, one
    /// for each event up to the first open one else.
    pub(crate) fn poll(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Ledger,
        progress: &Progress,
    ) -> DriverResult<()> {
        for last in pool.pending() {
            match progress {
                Progress::Events => self.poll_events(driver, pool, last)?,
                Progress::External(told) => {
                    let epoch = told(last).min(last.epoch);
                    self.believe(driver, pool, Mark { epoch, ..last })?;
                }
            }
        }
        Ok(())
    }

    fn poll_events(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Ledger,
        last: Mark,
    ) -> DriverResult<()> {
        let open = self.of(last.stream);
        let Some(&(newest, event)) = open.back() else { return Ok(()) };
        if driver.query(event)? {
            self.seen(pool, newest);
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
            self.seen(pool, mark);
        }
        Ok(())
    }

    /// Somebody says that `mark` was reached: waits until the driver agrees.
    fn believe(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Ledger,
        mark: Mark,
    ) -> DriverResult<()> {
        let covered =
            self.of(mark.stream).iter().rev().find(|(known, _)| known.epoch <= mark.epoch);
        let Some(&(known, event)) = covered else { return Ok(()) };
        driver.synchronize_event(event)?;
        self.seen(pool, known);
        Ok(())
    }

    /// Waits on the host until the work before `mark`, for which an event was recorded, is over.
    pub(crate) fn wait_for(
        &mut self,
        driver: &dyn Driver,
        pool: &mut impl Ledger,
        mark: Mark,
    ) -> DriverResult<()> {
        if let Some(event) = self.covering(mark) {
            driver.synchronize_event(event)?;
        }
        self.seen(pool, mark);
        Ok(())
    }

    fn seen(&mut self, pool: &mut impl Ledger, mark: Mark) {
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
