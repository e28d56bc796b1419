//! Blocks that were returned while work still uses them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::extents::{Extent, ExtentAllocator, ExtentList};
use smallvec::SmallVec;
use vramp_alloc::{Driver, DriverError};
use vramp_core::Bytes;
use vramp_driver::{Event, Stream};

use super::small::{Piece, Slabs};

/// A stream of a device, and an event behind the work that uses something.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub device: usize,
    pub stream: Stream,
    pub event: Event,
    /// Counts what was noted: of two uses on one stream the one with the lower number ends first.
    number: u64,
}

/// All work that uses something.
pub(super) type Uses = SmallVec<[Use; 2]>;

/// What comes back.
pub(super) enum Returned {
    Runs(ExtentList),
    Piece(Piece),
}

/// Blocks, and what has to be done before they serve again.
pub(super) struct Return {
    what: Returned,
    uses: Uses,
}

/// Where things go that no work uses any more.
pub(super) struct Free<'a> {
    pub blocks: &'a mut ExtentAllocator,
    pub slabs: &'a mut Slabs,
}

impl Free<'_> {
    fn again(&mut self) -> Free<'_> {
        Free { blocks: self.blocks, slabs: self.slabs }
    }
}

impl Return {
    pub fn new(what: Returned, uses: Uses) -> Return {
        Return { what, uses }
    }

    /// Waits for the work.
    pub fn wait(&self, devices: &[Arc<dyn Driver>]) -> Result<(), DriverError> {
        self.uses.iter().try_for_each(|used| devices[used.device].synchronize_event(used.event))
    }
}

/// In the order in which they came, with a stock of unused events for each device.
#[derive(Default)]
pub(super) struct Returns {
    waiting: VecDeque<Return>,
    stock: Vec<(usize, Event)>,
    noted: u64,
}

/// What was learnt of the streams that uses are on.
#[derive(Default)]
struct Learnt {
    streams: SmallVec<[Known; 4]>,
}

/// What was learnt of one stream.
struct Known {
    on: (usize, Stream),
    /// The last use on it that waits.
    last: Use,
    /// All up to this number are over.
    over: u64,
    /// From this number on none is.
    open: u64,
}

impl Learnt {
    /// What to ask first: if the last use of a stream is over, all of them are.
    fn new(waiting: &VecDeque<Return>) -> Learnt {
        let mut streams: SmallVec<[Known; 4]> = SmallVec::new();
        for used in waiting.iter().flat_map(|returned| &returned.uses) {
            let on = (used.device, used.stream);
            match streams.iter_mut().find(|known| known.on == on) {
                Some(known) if known.last.number < used.number => known.last = *used,
                Some(_) => {}
                None => streams.push(Known { on, last: *used, over: 0, open: u64::MAX }),
            }
        }
        Learnt { streams }
    }

    fn ask_the_last(&mut self, devices: &[Arc<dyn Driver>]) {
        for known in &mut self.streams {
            match is_over(devices, &known.last) {
                true => known.over = known.last.number,
                false => known.open = known.last.number,
            }
        }
    }

    /// True once the work is over. A query where that does not follow from what is known.
    fn is_over(&mut self, devices: &[Arc<dyn Driver>], used: &Use) -> bool {
        let on = (used.device, used.stream);
        let known = self.streams.iter_mut().find(|known| known.on == on);
        let known = known.expect("every stream was looked at");
        if used.number > known.over && used.number < known.open {
            match is_over(devices, used) {
                true => known.over = used.number,
                false => known.open = used.number,
            }
        }
        used.number <= known.over
    }
}

impl Returns {
    /// Notes that what is queued on `stream` by now uses something. Two driver calls at most.
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
        let at_hand = self.stock.iter().position(|(other, _)| *other == device);
        let event = match at_hand {
            Some(at) => self.stock.swap_remove(at).1,
            None => driver.create_event()?,
        };
        if let Err(error) = driver.record(event, stream) {
            self.stock.push((device, event));
            return Err(error);
        }
        uses.push(Use { device, stream, event, number });
        Ok(())
    }

    /// Takes blocks back, at once or once the work is done.
    pub fn give(&mut self, devices: &[Arc<dyn Driver>], free: Free<'_>, returned: Return) {
        match returned.uses.iter().all(|used| is_over(devices, used)) {
            true => self.finish(returned, free),
            false => self.waiting.push_back(returned),
        }
    }

    /// Takes back all whose work is done. True if there was something. A query for each stream where
    /// all is over; one for each use up to the first open one else.
    pub fn sweep(&mut self, devices: &[Arc<dyn Driver>], mut free: Free<'_>) -> bool {
        let waiting = std::mem::take(&mut self.waiting);
        let before = waiting.len();
        let mut learnt = Learnt::new(&waiting);
        learnt.ask_the_last(devices);
        for returned in waiting {
            match returned.uses.iter().all(|used| learnt.is_over(devices, used)) {
                true => self.finish(returned, free.again()),
                false => self.waiting.push_back(returned),
            }
        }
        self.waiting.len() < before
    }

    /// What came first, to wait for it without the lock.
    pub fn take_oldest(&mut self) -> Option<Return> {
        self.waiting.pop_front()
    }

    /// Undoes [`take_oldest`](Returns::take_oldest).
    pub fn put_back(&mut self, returned: Return) {
        self.waiting.push_front(returned);
    }

    /// Frees the blocks of a return whose work is done.
    pub fn finish(&mut self, returned: Return, free: Free<'_>) {
        self.stock.extend(returned.uses.iter().map(|used| (used.device, used.event)));
        match returned.what {
            Returned::Runs(runs) => runs.into_iter().for_each(|run| {
                free.blocks.free(run).expect("what was allocated is returned once");
            }),
            Returned::Piece(piece) => free.slabs.free(piece),
        }
    }

    /// How much waits for work.
    pub fn bytes(&self) -> Bytes {
        let runs = self.waiting.iter().map(|returned| match &returned.what {
            Returned::Runs(runs) => runs.as_slice(),
            Returned::Piece(_) => &[],
        });
        runs.flatten().map(|run: &Extent| run.len).sum()
    }

    /// Destroys the events in stock.
    pub fn end(&mut self, devices: &[Arc<dyn Driver>]) {
        for (device, event) in self.stock.drain(..) {
            // Nobody is left to tell; the device ends what stays.
            let _ = devices[device].destroy_event(event);
        }
    }
}

/// A device that failed does no work any more, but it is asked again: what it left half done must not
/// be handed out as if it were whole.
fn is_over(devices: &[Arc<dyn Driver>], used: &Use) -> bool {
    devices[used.device].query(used.event).unwrap_or(false)
}
