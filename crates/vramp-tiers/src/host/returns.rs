//! Blocks that were returned while work still uses them.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use vramp::{Driver, DriverError};
use vramp_core::Bytes;
use vramp_core::tiers::{Extent, ExtentList, Extents};
use vramp_driver::{Event, Stream};

use super::small::{Piece, Slabs};

/// A stream of a device, and an event behind the work that uses something.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub device: usize,
    pub stream: Stream,
    pub event: Event,
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
    pub blocks: &'a mut Extents,
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
        let known = uses.iter().find(|used| (used.device, used.stream) == (device, stream));
        if let Some(known) = known {
            return driver.record(known.event, stream);
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
        uses.push(Use { device, stream, event });
        Ok(())
    }

    /// Takes blocks back, at once or once the work is done.
    pub fn give(&mut self, devices: &[Arc<dyn Driver>], free: Free<'_>, returned: Return) {
        match done(devices, &returned) {
            true => self.finish(returned, free),
            false => self.waiting.push_back(returned),
        }
    }

    /// Takes back all whose work is done. True if there was something.
    pub fn sweep(&mut self, devices: &[Arc<dyn Driver>], mut free: Free<'_>) -> bool {
        let waiting = std::mem::take(&mut self.waiting);
        let before = waiting.len();
        for returned in waiting {
            match done(devices, &returned) {
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

/// True once no work uses it. A device that failed does no work any more, but it is asked again:
/// what it left half done must not be handed out as if it were whole.
fn done(devices: &[Arc<dyn Driver>], returned: &Return) -> bool {
    returned.uses.iter().all(|used| devices[used.device].query(used.event).unwrap_or(false))
}
