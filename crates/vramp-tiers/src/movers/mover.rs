//! What moves data from and to one device.

use std::sync::Arc;

use vramp_alloc::{Driver, DriverError};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Event, Stream};

use super::disk::{DiskBudget, DiskCopy, DiskSource, DiskTarget};
use super::error::{MoveError, MoveFailed};
use super::gpu::GpuEndpoint;
use super::lane::Lane;
use super::staged::StagedTransfer;
use super::transfer::{Transfer, Way};
use crate::disk::DiskStore;
use crate::host::{HostAllocation, HostPool};
use crate::ledger::shell::wait::CancelToken;

/// How a mover moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoverConfig {
    /// How much is queued at a time, from 4 MiB to 32 MiB. Less stops sooner when cancelled, more
    /// takes fewer driver calls.
    pub step: Bytes,
    /// How many steps are in flight in a direction at most, from 1 to 64, over all transfers.
    pub steps_in_flight: u32,
    /// How many pieces of a step each are on their way through the host at most, from 2 to 64, in
    /// one staged transfer.
    pub staging_pieces: u32,
}

impl Default for MoverConfig {
    /// Steps of 16 MiB, two on each stream, four pieces of staging.
    fn default() -> MoverConfig {
        MoverConfig { step: Bytes::mib(16), steps_in_flight: 4, staging_pieces: 4 }
    }
}

impl MoverConfig {
    fn check(&self) -> Result<(), MoveError> {
        let bad = |what| Err(MoveError::Config(what));
        if !(Bytes::mib(4)..=Bytes::mib(32)).contains(&self.step) {
            return bad("a step has to be between 4 MiB and 32 MiB");
        }
        if !(1..=64).contains(&self.steps_in_flight) {
            return bad("1 to 64 steps can be in flight");
        }
        if !(2..=64).contains(&self.staging_pieces) {
            return bad("2 to 64 pieces of staging keep both ends busy");
        }
        Ok(())
    }
}

/// What a transfer comes behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDependency {
    /// What is queued on a stream by now.
    Stream(Stream),
    /// An event's last record, on a stream that captures nothing.
    Event(Event),
}

pub(super) struct Shared {
    pub driver: Arc<dyn Driver>,
    pub pool: HostPool,
    pub config: MoverConfig,
    pub to_host: Lane,
    pub to_device: Lane,
}

/// Moves data between one device and blocks of one pool of the host. Clones are the same mover; its
/// four streams end with the last of it and its transfers.
#[derive(Clone)]
pub struct Mover {
    pub(super) shared: Arc<Shared>,
}

impl Mover {
    /// A mover for a device and a pool that is pinned for it. Four driver calls.
    ///
    /// # Errors
    /// The configuration makes no sense, the pool is not pinned for the device, or a stream could
    /// not be made.
    pub fn new(
        driver: Arc<dyn Driver>,
        pool: &HostPool,
        config: MoverConfig,
    ) -> Result<Mover, MoveError> {
        config.check()?;
        pool.check_device(&driver)?;
        let most = config.step * u64::from(config.steps_in_flight);
        let lane = || {
            let device = |error| MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error };
            Lane::new(&driver, most).map_err(device)
        };
        let (to_host, to_device) = (lane()?, lane()?);
        let pool = pool.clone();
        Ok(Mover { shared: Arc::new(Shared { driver, pool, config, to_host, to_device }) })
    }

    /// The device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// The pool that staged transfers take their blocks from.
    pub fn pool(&self) -> &HostPool {
        &self.shared.pool
    }

    /// How it moves.
    pub fn config(&self) -> &MoverConfig {
        &self.shared.config
    }

    /// How much is in flight to the host and to the device, as far as is known. No driver call.
    pub fn in_flight(&self) -> (Bytes, Bytes) {
        (self.shared.to_host.in_flight(), self.shared.to_device.in_flight())
    }

    /// Describes a copy of `range` into blocks of the host.
    pub fn to_host(&self, range: AddrRange, host: HostAllocation) -> TransferBuilder {
        TransferBuilder::new(&self.shared, Way::ToHost, range, host)
    }

    /// Describes a copy from blocks of the host into `range`.
    pub fn to_device(&self, range: AddrRange, host: HostAllocation) -> TransferBuilder {
        TransferBuilder::new(&self.shared, Way::ToDevice, range, host)
    }

    /// Copies `range` of the device to a disk, through blocks of the pool: one piece is written while
    /// others come from the device. [`StagedTransfer::finish`] returns what lies there then.
    ///
    /// # Errors
    /// The range ends beyond the address space.
    pub fn to_disk(
        &self,
        range: AddrRange,
        store: &Arc<DiskStore>,
        payer: DiskBudget,
    ) -> Result<StagedTransfer<GpuEndpoint, DiskTarget>, MoveError> {
        let fill = GpuEndpoint::to_host(&self.shared, check_range(range)?);
        let drain = DiskTarget::new(store, payer, self.shared.config.step);
        Ok(StagedTransfer::new(&self.shared, fill, drain, range.len))
    }

    /// Copies what lies on a disk into `range`, through blocks of the pool: one piece goes to the
    /// device while others are read and compared with their sums. It stays on the disk.
    ///
    /// # Errors
    /// The range has another length, or ends beyond the address space.
    pub fn from_disk(
        &self,
        copy: &Arc<DiskCopy>,
        range: AddrRange,
    ) -> Result<StagedTransfer<DiskSource, GpuEndpoint>, MoveError> {
        if copy.len() != range.len {
            return Err(MoveError::OtherLength { from: copy.len(), to: range.len });
        }
        let (fill, piece) = (DiskSource::new(copy), copy.piece());
        let drain = GpuEndpoint::to_device(&self.shared, check_range(range)?);
        Ok(StagedTransfer::new(&self.shared, fill, drain, range.len).in_pieces_of(piece))
    }

    /// Copies `from` of this device to `to` of the other one: through blocks of this mover's pool,
    /// which is pinned for both, or at once if it is the same device.
    ///
    /// Work that still writes `from` or uses `to` has to come before: name it by `after`, of this
    /// device and of the other one.
    ///
    /// # Errors
    /// The ranges are not of one length, or the pool is not pinned for the other device.
    pub fn between(
        &self,
        from: AddrRange,
        other: &Mover,
        to: AddrRange,
    ) -> Result<StagedTransfer<GpuEndpoint, GpuEndpoint>, MoveError> {
        if from.len != to.len {
            return Err(MoveError::OtherLength { from: from.len, to: to.len });
        }
        let (source, target) = (check_range(from)?, check_range(to)?);
        if Arc::ptr_eq(&self.shared.driver, &other.shared.driver) {
            let copy = GpuEndpoint::within(&self.shared, source, target);
            return Ok(StagedTransfer::new(
                &self.shared,
                GpuEndpoint::nothing(&self.shared),
                copy,
                from.len,
            ));
        }
        self.shared.pool.check_device(&other.shared.driver)?;
        let fill = GpuEndpoint::to_host(&self.shared, source);
        let drain = GpuEndpoint::to_device(&other.shared, target);
        Ok(StagedTransfer::new(&self.shared, fill, drain, from.len))
    }
}

impl std::fmt::Debug for Mover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (down, up) = self.in_flight();
        write!(f, "{down} on their way from {}, {up} to it", self.shared.driver.info().id)
    }
}

pub(super) fn check_range(range: AddrRange) -> Result<AddrRange, MoveError> {
    range.checked_end().map(|_| range).ok_or(MoveError::BadRange(range))
}

impl Shared {
    /// Lets later steps of a lane come behind other work.
    pub fn order(&self, lane: &Lane, after: CopyDependency) -> Result<(), MoveError> {
        let device =
            |error: DriverError| MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error };
        match after {
            CopyDependency::Event(event) => lane.order_behind_event(event).map_err(device),
            CopyDependency::Stream(stream) => {
                self.refuse_capturing(stream)?;
                lane.order_behind_stream(stream).map_err(device)
            }
        }
    }

    /// Events between a mover and a capturing stream would make copies nodes of its graph.
    pub fn refuse_capturing(&self, stream: Stream) -> Result<(), MoveError> {
        match self.driver.is_capturing(stream) {
            Ok(false) => Ok(()),
            Ok(true) => Err(MoveError::Capturing),
            Err(error) => Err(MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error }),
        }
    }
}

/// A move in words, before it starts.
#[must_use = "nothing moves until it is started"]
pub struct TransferBuilder {
    mover: Arc<Shared>,
    way: Way,
    range: AddrRange,
    host: HostAllocation,
    offset: Bytes,
    after: Vec<CopyDependency>,
    cancel: Option<CancelToken>,
}

impl TransferBuilder {
    fn new(
        mover: &Arc<Shared>,
        way: Way,
        range: AddrRange,
        host: HostAllocation,
    ) -> TransferBuilder {
        let (mover, offset, after) = (Arc::clone(mover), Bytes::ZERO, Vec::new());
        TransferBuilder { mover, way, range, host, offset, after, cancel: None }
    }

    /// Where in the host's blocks the range begins; at their first byte otherwise.
    pub fn at(mut self, offset: Bytes) -> TransferBuilder {
        self.offset = offset;
        self
    }

    /// Lets it come behind other work: what writes the data, what still uses the place it goes to.
    /// Other transfers of the same direction that start later come behind it too. The host does not
    /// wait. Two driver calls, four for a stream.
    pub fn after(mut self, after: CopyDependency) -> TransferBuilder {
        self.after.push(after);
        self
    }

    /// Lets the token end it, between two steps.
    pub fn cancelled_by(mut self, token: &CancelToken) -> TransferBuilder {
        self.cancel = Some(token.clone());
        self
    }

    /// Starts it, with the first steps in flight.
    ///
    /// # Errors
    /// The range does not lie in the blocks or in the address space, a stream captures a graph, or a
    /// driver call failed. Nothing is in flight.
    pub fn start(self) -> Result<Transfer, Box<MoveFailed>> {
        let TransferBuilder { mover, way, range, host, offset, after, cancel } = self;
        let checked = check_range(range).and_then(|_| {
            // An offset that no number can hold is outside as well.
            host.spans(offset, range.len).map_err(MoveError::from)?;
            let lane = way.lane(&mover);
            after.into_iter().try_for_each(|after| mover.order(lane, after))
        });
        match checked {
            Ok(()) => Transfer::start(mover, way, range, host, offset, cancel),
            Err(error) => Err(Box::new(MoveFailed { error, host })),
        }
    }
}
