//! Returned blocks that work on streams still uses.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::extents::{Extent, ExtentAllocator, ExtentList};
use smallvec::SmallVec;
use vramp_alloc::{Driver, DriverError};
use vramp_core::Bytes;
use vramp_driver::{Event, Stream};

use super::core::progress::{StreamProgress, last_on_each_stream};
use super::slabs::{Piece, Slabs};

/// Work on a stream that uses blocks, with an event recorded behind it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub device: usize,
    pub stream: Stream,
    pub event: Event,
    /// Increases with each record. On one stream, work with a lower number completes first.
    number: u64,
}

impl Use {
    /// Returns the stream, and the place of the work in its order.
    fn place(&self) -> ((usize, Stream), u64) {
        ((self.device, self.stream), self.number)
    }

    fn query(self, devices: &[Arc<dyn Driver>], progress: &mut Progress) -> bool {
        let (stream, number) = self.place();
        let complete = is_complete(devices, &self);
        progress.note(stream, number, complete);
        complete
    }

    /// Returns whether the work is complete. Queries the event only if that does not follow from
    /// earlier queries.
    fn is_complete(self, devices: &[Arc<dyn Driver>], progress: &mut Progress) -> bool {
        let (stream, number) = self.place();
        progress.is_complete(stream, number).unwrap_or_else(|| self.query(devices, progress))
    }
}

type Progress = StreamProgress<(usize, Stream)>;

/// All noted work of one allocation.
pub(super) type Uses = SmallVec<[Use; 2]>;

/// Blocks or a small allocation, to be freed.
pub(super) enum Returned {
    Runs(ExtentList),
    Piece(Piece),
}

/// Something to free once its uses are complete.
pub(super) struct Return {
    what: Returned,
    uses: Uses,
}

/// Where blocks are freed to.
pub(super) struct Free<'a> {
    pub blocks: &'a mut ExtentAllocator,
    pub slabs: &'a mut Slabs,
}

impl Free<'_> {
    fn reborrow(&mut self) -> Free<'_> {
        Free { blocks: self.blocks, slabs: self.slabs }
    }
}

impl Return {
    pub fn new(what: Returned, uses: Uses) -> Return {
        Return { what, uses }
    }

    /// Waits for all uses.
    pub fn wait(&self, devices: &[Arc<dyn Driver>]) -> Result<(), DriverError> {
        self.uses.iter().try_for_each(|used| devices[used.device].synchronize_event(used.event))
    }
}

/// Returns in the order in which they were dropped, and events for reuse.
#[derive(Default)]
pub(super) struct Returns {
    waiting: VecDeque<Return>,
    spare_events: Vec<(usize, Event)>,
    noted: u64,
}

impl Returns {
    /// Notes that work queued on `stream` uses something. At most two driver calls.
    pub fn note(
        &mut self,
        devices: &[Arc<dyn Driver>],
        uses: &mut Uses,
        (device, stream): (usize, Stream),
    ) -> Result<(), DriverError> {
        let driver = &devices[device];
        let known = uses.iter_mut().find(|used| (used.device, used.stream) == (device, stream));
        self.noted += 1;
        let number = self.noted;
        if let Some(known) = known {
            driver.record(known.event, stream)?;
            known.number = number;
            return Ok(());
        }
        let spare = self.spare_events.iter().position(|(other, _)| *other == device);
        let event = match spare {
            Some(at) => self.spare_events.swap_remove(at).1,
            None => driver.create_event()?,
        };
        if let Err(error) = driver.record(event, stream) {
            self.spare_events.push((device, event));
            return Err(error);
        }
        uses.push(Use { device, stream, event, number });
        Ok(())
    }

    /// Frees a return now if no work was noted, else in a later sweep. No driver call: a drop calls
    /// this, and while a stream captures a query would invalidate the capture.
    pub fn give(&mut self, free: Free<'_>, returned: Return) {
        match returned.uses.is_empty() {
            true => self.finish(returned, free),
            false => self.waiting.push_back(returned),
        }
    }

    /// Frees all returns whose uses are complete. Returns true if there were any. One query for
    /// each stream if all its uses are complete, else also one for each use up to the first
    /// incomplete one.
    pub fn sweep(&mut self, devices: &[Arc<dyn Driver>], mut free: Free<'_>) -> bool {
        let waiting = std::mem::take(&mut self.waiting);
        let before = waiting.len();
        let uses = waiting.iter().flat_map(|returned| &returned.uses).copied();
        let mut progress = StreamProgress::new();
        for last in last_on_each_stream(uses, Use::place) {
            last.query(devices, &mut progress);
        }
        for returned in waiting {
            let mut uses = returned.uses.iter();
            match uses.all(|used| used.is_complete(devices, &mut progress)) {
                true => self.finish(returned, free.reborrow()),
                false => self.waiting.push_back(returned),
            }
        }
        self.waiting.len() < before
    }

    /// Takes the oldest return, so that the caller can wait for it without the lock.
    pub fn take_oldest(&mut self) -> Option<Return> {
        self.waiting.pop_front()
    }

    /// Reverts [`take_oldest`](Returns::take_oldest).
    pub fn put_back(&mut self, returned: Return) {
        self.waiting.push_front(returned);
    }

    /// Frees a return whose uses are complete.
    pub fn finish(&mut self, returned: Return, free: Free<'_>) {
        self.spare_events.extend(returned.uses.iter().map(|used| (used.device, used.event)));
        match returned.what {
            Returned::Runs(runs) => runs.into_iter().for_each(|run| {
                free.blocks.free(run).expect("allocated blocks are returned once");
            }),
            Returned::Piece(piece) => free.slabs.free(piece),
        }
    }

    /// Returns true if nothing waits for work.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the bytes that wait for work.
    pub fn bytes(&self) -> Bytes {
        let runs = self.waiting.iter().map(|returned| match &returned.what {
            Returned::Runs(runs) => runs.as_slice(),
            Returned::Piece(_) => &[],
        });
        runs.flatten().map(|run: &Extent| run.len).sum()
    }

    /// Destroys the events kept for reuse.
    pub fn end(&mut self, devices: &[Arc<dyn Driver>]) {
        for (device, event) in self.spare_events.drain(..) {
            // Dropping cannot report an error. The device destroys the event in the end.
            let _ = devices[device].destroy_event(event);
        }
    }
}

/// An error counts as incomplete: what a failed device left half done must not be reused as whole.
fn is_complete(devices: &[Arc<dyn Driver>], used: &Use) -> bool {
    devices[used.device].query(used.event).unwrap_or(false)
}
