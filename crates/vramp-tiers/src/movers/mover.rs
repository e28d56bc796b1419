//! The mover: starts transfers between a device, host blocks and disks.

use std::sync::Arc;

use vramp_alloc::Driver;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::Stream;

use super::copy_queue::CopyQueue;
use super::core::gather::Gather;
use super::error::{MoveError, MoveFailed};
use super::hop::{Hop, check_range};
use super::shared::{CopyDependency, CopyDirection, MoverConfig, Shared};
use super::stored::{DiskBudget, DiskCopy, Stored};
use super::transfer::Transfer;
use crate::disk::DiskStore;
use crate::host::{HostAllocation, HostPool};
use crate::ledger::shell::wait::CancelToken;

/// Transfers between one device, blocks of one host pool, and disks. Clones share four streams,
/// which are destroyed with the last clone and the last transfer.
#[derive(Clone)]
pub struct Mover {
    pub(super) shared: Arc<Shared>,
}

impl Mover {
    /// Creates a mover for a device and a pool that is pinned for it. Four driver calls.
    ///
    /// # Errors
    /// The configuration is invalid, the pool is not pinned for the device, or a stream could not
    /// be created.
    pub fn new(
        driver: Arc<dyn Driver>,
        pool: &HostPool,
        config: MoverConfig,
    ) -> Result<Mover, MoveError> {
        config.check()?;
        pool.check_device(&driver)?;
        let most = config.step * u64::from(config.steps_in_flight);
        let queue = || {
            let device = |error| MoveError::Device { moved: Bytes::ZERO, of: Bytes::ZERO, error };
            CopyQueue::new(&driver, most).map_err(device)
        };
        let (to_host, to_device) = (queue()?, queue()?);
        let pool = pool.clone();
        Ok(Mover { shared: Arc::new(Shared { driver, pool, config, to_host, to_device }) })
    }

    /// Returns the device.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Returns the pool that staging is allocated from.
    pub fn pool(&self) -> &HostPool {
        &self.shared.pool
    }

    /// Returns the options.
    pub fn config(&self) -> &MoverConfig {
        &self.shared.config
    }

    /// Returns the bytes in flight to the host and to the device, as of the last query. No driver
    /// call.
    pub fn in_flight(&self) -> (Bytes, Bytes) {
        (self.shared.to_host.in_flight(), self.shared.to_device.in_flight())
    }

    /// Returns the streams that copies run on, to wait for copies whose end is unknown
    /// ([`MoveError::Unsettled`]). All clones use them: other transfers run there too.
    pub fn copy_streams(&self) -> [Stream; 4] {
        let [first, second] = self.shared.to_host.streams();
        let [third, fourth] = self.shared.to_device.streams();
        [first, second, third, fourth]
    }

    /// Waits for copies whose end is unknown ([`MoveError::Unsettled`]), of any transfer of this mover or a
    /// clone. No driver call if there are none; otherwise one for each of their streams, which waits for
    /// all that is queued there.
    ///
    /// # Errors
    /// A wait failed: the copies may still be in flight. On a lost device none is.
    pub fn settle(&self) -> Result<(), MoveError> {
        let queues = [&self.shared.to_host, &self.shared.to_device];
        match queues.into_iter().try_for_each(|queue| queue.settle_lost()) {
            Err(error) if !error.is_device_lost() => {
                Err(MoveError::device(error).unless_settled(false))
            }
            _ => Ok(()),
        }
    }

    /// Returns a builder for a copy of `range` into host blocks.
    pub fn to_host(&self, range: AddrRange, host: HostAllocation) -> TransferBuilder {
        self.gather_to_host([range], host)
    }

    /// Returns a builder for a copy of host blocks into `range`.
    pub fn to_device(&self, range: AddrRange, host: HostAllocation) -> TransferBuilder {
        self.scatter_to_device([range], host)
    }

    /// Returns a builder for a copy of several ranges, one behind the other, into host blocks. A step
    /// may end one range and begin the next, so that short ranges cost a copy call each and no step of
    /// their own.
    pub fn gather_to_host(
        &self,
        ranges: impl IntoIterator<Item = AddrRange>,
        host: HostAllocation,
    ) -> TransferBuilder {
        TransferBuilder::new(&self.shared, CopyDirection::ToHost, ranges, host)
    }

    /// Returns a builder for a copy of host blocks into several ranges, one behind the other.
    pub fn scatter_to_device(
        &self,
        ranges: impl IntoIterator<Item = AddrRange>,
        host: HostAllocation,
    ) -> TransferBuilder {
        TransferBuilder::new(&self.shared, CopyDirection::ToDevice, ranges, host)
    }

    /// Copies `range` of the device to a disk. Pieces are written while others leave the
    /// device. [`Transfer::finish`] returns the [`DiskCopy`].
    ///
    /// # Errors
    /// The range ends beyond the address space.
    pub fn to_disk(
        &self,
        range: AddrRange,
        store: &Arc<DiskStore>,
        payer: DiskBudget,
    ) -> Result<Transfer<DiskCopy>, MoveError> {
        let copy = Arc::new(DiskCopy::empty(store));
        Ok(self.append(Gather::new([check_range(range)?]), copy, payer))
    }

    /// Copies a [`DiskCopy`] into `range`. Pieces go to the device while others are read and
    /// verified. The copy stays on the disk.
    ///
    /// # Errors
    /// The range has another length, or ends beyond the address space.
    pub fn from_disk(
        &self,
        copy: &Arc<DiskCopy>,
        range: AddrRange,
    ) -> Result<Transfer<()>, MoveError> {
        if copy.len() != range.len {
            return Err(MoveError::OtherLength { from: copy.len(), to: range.len });
        }
        Ok(self.read(Arc::clone(copy), Bytes::ZERO, Gather::new([check_range(range)?])))
    }

    /// Copies ranges, which end within the address space, one behind the other, to a disk.
    fn append<T>(&self, memory: Gather, copy: Arc<DiskCopy>, payer: DiskBudget) -> Transfer<T> {
        let len = memory.len();
        let fill = hop(&self.shared, CopyDirection::ToHost, memory);
        Transfer::new(&self.shared, Some(fill), Hop::Write { copy, payer }, len)
    }

    /// Copies the bytes of a copy from `from` on into ranges, which end within the address space.
    fn read<T>(&self, copy: Arc<DiskCopy>, from: Bytes, memory: Gather) -> Transfer<T> {
        let len = memory.len();
        let drain = hop(&self.shared, CopyDirection::ToDevice, memory);
        Transfer::new(&self.shared, Some(Hop::Read { copy, from }), drain, len)
    }

    /// Starts to copy ranges, one behind the other, to the bytes of `stored` from `at` on: a copy on a disk
    /// ends there.
    ///
    /// # Errors
    /// As [`TransferBuilder::start`].
    pub(crate) fn copy_out(
        &self,
        ranges: Vec<AddrRange>,
        stored: Stored,
        at: Bytes,
    ) -> Result<Transfer<Stored>, Box<(Stored, MoveError)>> {
        match stored {
            Stored::Host(host) => {
                let out = TransferBuilder::new(&self.shared, CopyDirection::ToHost, ranges, host);
                out.at(at).start().map_err(stored_on_host)
            }
            Stored::Disk(copy) => Ok(self.append(Gather::new(ranges), copy, DiskBudget::Space)),
        }
    }

    /// Starts to copy the bytes of `stored` from `at` on into ranges, one behind the other, of which none
    /// is ready yet ([`Transfer::allow`]). Pieces on a disk are read as a whole.
    ///
    /// # Errors
    /// As [`TransferBuilder::start`].
    pub(crate) fn copy_back(
        &self,
        ranges: Vec<AddrRange>,
        stored: Stored,
        at: Bytes,
    ) -> Result<Transfer<Stored>, Box<(Stored, MoveError)>> {
        match stored {
            Stored::Host(host) => {
                let direction = CopyDirection::ToDevice;
                let mut back = TransferBuilder::new(&self.shared, direction, ranges, host).at(at);
                back.transfer = back.transfer.ready(Bytes::ZERO);
                back.start().map_err(stored_on_host)
            }
            Stored::Disk(copy) => Ok(self.read(copy, at, Gather::new(ranges)).ready(Bytes::ZERO)),
        }
    }

    /// Copies `from` of this device to `to` of the device of `other`: through this mover's pool, or
    /// directly if it is the same device.
    ///
    /// Other work that writes `from` or uses `to` must come first: see [`Transfer::after`]
    /// and [`Transfer::after_at_target`].
    ///
    /// # Errors
    /// The ranges differ in length, or the pool is not pinned for the other device.
    pub fn between(
        &self,
        from: AddrRange,
        other: &Mover,
        to: AddrRange,
    ) -> Result<Transfer<()>, MoveError> {
        if from.len != to.len {
            return Err(MoveError::OtherLength { from: from.len, to: to.len });
        }
        let (source, target) = (check_range(from)?, check_range(to)?);
        if Arc::ptr_eq(&self.shared.driver, &other.shared.driver) {
            let (mover, from, to) = (Arc::clone(&self.shared), source.start, target.start);
            let within = Hop::Within { mover, from, to };
            return Ok(Transfer::new(&self.shared, None, within, source.len));
        }
        self.shared.pool.check_device(&other.shared.driver)?;
        let fill = hop(&self.shared, CopyDirection::ToHost, Gather::new([source]));
        let drain = hop(&other.shared, CopyDirection::ToDevice, Gather::new([target]));
        Ok(Transfer::new(&self.shared, Some(fill), drain, from.len))
    }
}

fn stored_on_host(failed: Box<MoveFailed>) -> Box<(Stored, MoveError)> {
    Box::new((Stored::Host(failed.host), failed.error))
}

impl std::fmt::Debug for Mover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (down, up) = self.in_flight();
        write!(f, "{down} in flight from {}, {up} to it", self.shared.driver.info().id)
    }
}

fn hop(mover: &Arc<Shared>, direction: CopyDirection, memory: Gather) -> Hop {
    Hop::Ranges { mover: Arc::clone(mover), direction, memory }
}

/// Builder of a [`Transfer`]. Finish with [`start`](TransferBuilder::start).
#[must_use = "call start to begin the transfer"]
pub struct TransferBuilder<T = HostAllocation> {
    transfer: Transfer<T>,
    after: Vec<CopyDependency>,
}

impl<T> TransferBuilder<T> {
    fn new(
        mover: &Arc<Shared>,
        direction: CopyDirection,
        ranges: impl IntoIterator<Item = AddrRange>,
        host: HostAllocation,
    ) -> TransferBuilder<T> {
        let memory = Gather::new(ranges);
        let len = memory.len();
        let mut transfer = Transfer::new(mover, None, hop(mover, direction, memory), len);
        transfer.host = Some(host);
        TransferBuilder { transfer, after: Vec::new() }
    }

    /// Sets where the range begins in the host blocks. The default is their first byte.
    pub fn at(mut self, offset: Bytes) -> TransferBuilder<T> {
        self.transfer.offset = offset;
        self
    }

    /// Orders the transfer behind other work, such as kernels that write the source or use the
    /// target. Later transfers of the same direction are ordered behind it too. The host does not
    /// wait. Two driver calls, or four for a stream.
    pub fn after(mut self, after: CopyDependency) -> TransferBuilder<T> {
        self.after.push(after);
        self
    }

    /// Lets `token` cancel the transfer, between two steps.
    pub fn cancelled_by(mut self, token: &CancelToken) -> TransferBuilder<T> {
        self.transfer = self.transfer.cancelled_by(token);
        self
    }

    /// Starts the transfer and queues its first steps.
    ///
    /// # Errors
    /// The range lies outside the blocks or the address space, a stream captures a graph, or a
    /// driver call failed. No copy is in flight, unless the error is [`MoveError::Unsettled`].
    pub fn start(self) -> Result<Transfer<T>, Box<MoveFailed>> {
        self.transfer.start(self.after)
    }
}
