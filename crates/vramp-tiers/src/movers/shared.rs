//! What the transfers of a mover share.

use std::sync::Arc;

use vramp_alloc::{Driver, StreamWork};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Event, Stream};

use super::copy_queue::{CopyQueue, QueuedCopy, StepCopies};
use super::error::MoveError;
use crate::host::{HostAllocation, HostPool, HostPoolError};

/// Options of a [`Mover`](super::Mover).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoverConfig {
    /// Bytes queued at a time, from 4 MiB to 32 MiB. Smaller steps cancel sooner, larger ones make
    /// fewer driver calls.
    pub step: Bytes,
    /// Most steps in flight in one direction, from 1 to 64, over all transfers.
    pub steps_in_flight: u32,
    /// Most pieces of one staged transfer in host memory, from 2 to 64. A piece has the length of a
    /// step.
    pub staging_pieces: u32,
}

impl Default for MoverConfig {
    /// Steps of 16 MiB, four in flight in each direction, and four pieces of staging.
    fn default() -> MoverConfig {
        MoverConfig { step: Bytes::mib(16), steps_in_flight: 4, staging_pieces: 4 }
    }
}

impl MoverConfig {
    pub(super) fn check(&self) -> Result<(), MoveError> {
        let bad = |what| Err(MoveError::Config(what));
        if !(Bytes::mib(4)..=Bytes::mib(32)).contains(&self.step) {
            return bad("a step must be between 4 MiB and 32 MiB");
        }
        if !(1..=64).contains(&self.steps_in_flight) {
            return bad("steps_in_flight must be between 1 and 64");
        }
        if !(2..=64).contains(&self.staging_pieces) {
            return bad("staging_pieces must be between 2 and 64");
        }
        Ok(())
    }
}

/// Work that a transfer has to wait for.
#[derive(Clone, Debug)]
pub enum CopyDependency {
    /// The work queued on a stream so far. The stream is open.
    Stream(Stream),
    /// The last record of an event, on a stream that captures no graph.
    Event(Event),
    /// The work queued so far on a stream of an allocator, which may have been destroyed:
    /// [`Allocator::stream_work`](vramp_alloc::Allocator::stream_work) returns it.
    Work(StreamWork),
}

pub(super) struct Shared {
    pub driver: Arc<dyn Driver>,
    pub pool: HostPool,
    pub config: MoverConfig,
    pub to_host: CopyQueue,
    pub to_device: CopyQueue,
}

impl Shared {
    /// Orders later steps of a queue behind other work.
    pub fn order(&self, queue: &CopyQueue, after: CopyDependency) -> Result<(), MoveError> {
        match after {
            CopyDependency::Event(event) => {
                queue.order_behind_event(event).map_err(MoveError::device)
            }
            CopyDependency::Work(StreamWork::Ended(end)) => {
                queue.order_behind_event(end.event()).map_err(MoveError::device)
            }
            CopyDependency::Work(StreamWork::Over) => Ok(()),
            CopyDependency::Stream(stream) | CopyDependency::Work(StreamWork::Open(stream)) => {
                match queue.order_behind_stream(stream).map_err(MoveError::device)? {
                    true => Ok(()),
                    false => Err(MoveError::Capturing),
                }
            }
        }
    }

    /// Returns an error if the stream captures: an event between the two would make copies nodes of
    /// its graph.
    pub fn refuse_capturing(&self, stream: Stream) -> Result<(), MoveError> {
        match self.driver.is_capturing(stream) {
            Ok(false) => Ok(()),
            Ok(true) => Err(MoveError::Capturing),
            Err(error) => Err(MoveError::device(error)),
        }
    }
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyDirection {
    ToHost,
    ToDevice,
}

impl CopyDirection {
    pub fn queue(self, mover: &Shared) -> &CopyQueue {
        match self {
            CopyDirection::ToHost => &mover.to_host,
            CopyDirection::ToDevice => &mover.to_device,
        }
    }

    /// Returns the copies of a device range: one for each run of host blocks.
    pub fn copies(
        self,
        mover: &Shared,
        part: AddrRange,
        host: &HostAllocation,
        offset: Bytes,
    ) -> Result<StepCopies, HostPoolError> {
        let mut at = part.start;
        let slices = host.slices(&mover.driver, offset, part.len)?;
        let piece = |slice: vramp_driver::HostSlice| {
            let device = at;
            at = at + slice.len;
            match self {
                CopyDirection::ToHost => QueuedCopy::ToHost { from: device, to: slice },
                CopyDirection::ToDevice => QueuedCopy::ToDevice { from: slice, to: device },
            }
        };
        Ok(slices.into_iter().map(piece).collect())
    }
}
