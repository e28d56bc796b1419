//! An allocator whose memory is charged to reservations.
//!
//! 1. [`TrackedAllocator::attach`] attaches a reservation to a stream or to a thread, with policies
//!    for overruns and for out of memory.
//! 2. [`TrackedAllocator::malloc`] charges the reservation, allocates, and corrects the charge to
//!    the exact length of the allocation. Without a reservation it charges the space.
//! 3. [`TrackedAllocator::free`] credits what was charged, on any stream and thread, and also after
//!    the reservation has ended.
//! 4. [`TrackedAllocator::detach`] returns the reservation. Allocated bytes stay charged to it.
//!
//! Deliberately absent: spilling, which an [`OutOfMemoryHandler`] may do, such as
//! [`SpillAndRetry`](crate::spill::SpillAndRetry); and lists of live allocations, which the
//! [`Allocator`] has.

mod allocation;
mod counting;
mod payers;
mod policies;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, ThreadId};

use crate::ledger::core::{ReservationId, SpaceId};
use vramp_alloc::{AllocError, Allocator, FreeError, StreamId};
use vramp_core::Bytes;

pub use crate::ledger::core::{
    ChargeError, GrowthFactor, LimitPolicy, Overrun, OverrunAction, ReservationRecord, SpaceRefusal,
};
use crate::ledger::shell::charge::ChargeRefused;
pub use crate::ledger::shell::charge::{LimitRule, Payer};
pub use crate::ledger::shell::error::SpaceFull;
pub use crate::ledger::shell::manager_config::RetryPolicy;
use crate::ledger::shell::streams::StreamPool;
use crate::{MemorySpace, Reservation};
pub use allocation::{AttachError, MallocError, TrackedAllocation, TrackedFreeError};
use counting::Counters;
pub use counting::{Count, Counter, Counts};
pub use payers::Scope;
pub(crate) use payers::{Attachments, Payers, PayersKey};
pub use policies::{
    BackOff, ExhaustedResource, Fail, MemoryShortage, OutOfMemoryHandler, RecoveryAction,
};

/// Alignment of block lengths in the default preset.
const BLOCK_ALIGN: Bytes = Bytes::new(512);

/// Policies of an attached reservation.
#[derive(Clone)]
pub struct Policies {
    /// Decides about an allocation that exceeds the reservation.
    pub limit: Arc<dyn LimitRule>,
    /// Decides about an allocation that fails for lack of memory.
    pub out_of_memory: Arc<dyn OutOfMemoryHandler>,
    /// Retries of such an allocation.
    pub retries: RetryPolicy,
}

impl Default for Policies {
    /// Policies that fail the allocation in both cases.
    fn default() -> Policies {
        Policies {
            limit: Arc::new(LimitPolicy::Fail),
            out_of_memory: Arc::new(Fail),
            retries: RetryPolicy::default(),
        }
    }
}

struct Attached {
    reservation: Reservation,
    policies: Policies,
}

#[derive(Default)]
struct Table {
    /// Indexed by stream.
    streams: Vec<Option<Attached>>,
    threads: HashMap<ThreadId, Attached>,
}

impl Table {
    #[inline]
    fn find(&self, stream: StreamId) -> Option<&Attached> {
        self.of_this_thread().or_else(|| self.of_stream(stream))
    }

    #[inline]
    fn of_this_thread(&self) -> Option<&Attached> {
        // The id of the thread costs as much as the rest of a charge.
        if self.threads.is_empty() { None } else { self.threads.get(&thread::current().id()) }
    }

    #[inline]
    fn of_stream(&self, stream: StreamId) -> Option<&Attached> {
        self.streams.get(stream.index())?.as_ref()
    }

    fn of(&self, scope: Scope) -> Option<&Attached> {
        match scope {
            Scope::Stream(stream) => self.of_stream(stream),
            Scope::Thread(thread) => self.threads.get(&thread),
        }
    }
}

/// An [`Allocator`] of one device whose memory is charged to the device's space.
pub struct TrackedAllocator {
    allocator: Arc<Allocator>,
    space: MemorySpace,
    id: SpaceId,
    /// Granule of the space.
    granule: Bytes,
    /// Distinguishes its allocations from other allocators'.
    number: u64,
    table: RwLock<Table>,
    /// The default stream pool, once it was used.
    pool: Arc<OnceLock<StreamPool>>,
    payers: PayersKey,
    defaults: Policies,
    counters: Counters,
}

/// Why one attempt failed.
enum Short {
    /// The rule of the reservation failed the allocation, or the reservation is gone.
    Refused(ChargeError),
    /// The space has no room.
    Budget(Box<SpaceRefusal>),
    /// The allocator is out of memory, or its device failed.
    Device(AllocError),
}

impl From<ChargeError> for Short {
    fn from(error: ChargeError) -> Short {
        match error {
            ChargeError::Refused(refused) => Short::Budget(refused),
            other => Short::Refused(other),
        }
    }
}

impl From<Short> for MallocError {
    fn from(short: Short) -> MallocError {
        match short {
            Short::Refused(error) => MallocError::OverReservation(error),
            Short::Budget(refusal) => MallocError::SpaceFull(SpaceFull { refusal }),
            Short::Device(error) if error.is_out_of_memory() => MallocError::OutOfMemory(error),
            Short::Device(error) => MallocError::Device(error),
        }
    }
}

impl TrackedAllocator {
    /// Returns an allocator that charges `space`. `defaults` are the policies for memory without a
    /// reservation, and for reservations that are attached without policies of their own.
    pub fn new(
        allocator: Arc<Allocator>,
        space: &MemorySpace,
        defaults: Policies,
    ) -> TrackedAllocator {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let pool = Arc::default();
        let payers = space.shared.read().payers.add();
        space.shared.attachments.add(space.id(), &allocator, payers, &pool);
        TrackedAllocator {
            allocator,
            space: space.clone(),
            id: space.id(),
            granule: space.levels().granule,
            number: COUNT.fetch_add(1, Ordering::Relaxed),
            table: RwLock::default(),
            pool,
            payers,
            defaults,
            counters: Counters::default(),
        }
    }

    /// Returns the underlying allocator.
    pub fn allocator(&self) -> &Arc<Allocator> {
        &self.allocator
    }

    /// Returns the space that is charged.
    pub fn space(&self) -> &MemorySpace {
        &self.space
    }

    /// Returns the default stream pool, from which
    /// [`MemorySpace::acquire_stream`](crate::MemorySpace::acquire_stream) lends. It has no stream
    /// before its first use, and grows by one whenever none is idle.
    pub fn streams(&self) -> StreamPool {
        payers::pool_of(&self.allocator, &self.pool)
    }

    /// Attaches a reservation to a stream or a thread, with the allocator's default policies.
    ///
    /// # Errors
    /// The reservation is of another space, or the scope has one already.
    pub fn attach(&self, scope: Scope, reservation: Reservation) -> Result<(), AttachError> {
        self.attach_with(scope, reservation, self.defaults.clone())
    }

    /// Attaches a reservation with policies of its own.
    ///
    /// # Errors
    /// The reservation is of another space, or the scope has one already.
    pub fn attach_with(
        &self,
        scope: Scope,
        reservation: Reservation,
        policies: Policies,
    ) -> Result<(), AttachError> {
        if !self.space.contains(&reservation) {
            return Err(AttachError::OtherSpace { space: self.id, reservation });
        }
        let mut table = self.write();
        if table.of(scope).is_some() {
            drop(table);
            return Err(AttachError::Occupied { scope, reservation });
        }
        let id = reservation.id();
        let attached = Attached { reservation, policies };
        match scope {
            Scope::Thread(thread) => drop(table.threads.insert(thread, attached)),
            Scope::Stream(stream) => {
                let slots = table.streams.len().max(stream.index() + 1);
                table.streams.resize_with(slots, || None);
                table.streams[stream.index()] = Some(attached);
            }
        }
        self.space.shared.read().payers.set(self.payers, scope, Some(id));
        Ok(())
    }

    /// Detaches and returns a reservation; `None` if the scope has none.
    pub fn detach(&self, scope: Scope) -> Option<Reservation> {
        let mut table = self.write();
        // First no allocation finds it any more.
        self.space.shared.read().payers.set(self.payers, scope, None);
        let attached = match scope {
            Scope::Thread(thread) => table.threads.remove(&thread),
            Scope::Stream(stream) => table.streams.get_mut(stream.index())?.take(),
        };
        drop(table);
        attached.map(|attached| attached.reservation)
    }

    /// Returns the state of a scope's reservation; `None` if it has none.
    pub fn attached(&self, scope: Scope) -> Option<crate::ledger::core::ReservationRecord> {
        let id = self.read().of(scope)?.reservation.id();
        self.space.shared.read().ledger.reservation(id).copied()
    }

    /// Resets the peak of a scope's reservation to its present use. False if the scope has none.
    pub fn reset_peak(&self, scope: Scope) -> bool {
        let table = self.read();
        let Some(attached) = table.of(scope) else { return false };
        let id = attached.reservation.id();
        self.space.shared.read().ledger.reset_peak(id).is_ok()
    }

    /// Allocates memory for work on `stream`, charged to the thread's reservation, the stream's, or
    /// the space. Costs one lock more than [`Allocator::malloc`].
    ///
    /// # Errors
    /// The allocation exceeds its reservation or memory ran out, and the policies did not help. Or
    /// the device failed.
    #[inline]
    pub fn malloc(&self, size: Bytes, stream: StreamId) -> Result<TrackedAllocation, MallocError> {
        match self.try_malloc(size, stream) {
            Ok(allocation) => Ok(allocation),
            Err(short) => self.relieve(size, stream, short),
        }
    }

    #[inline]
    fn try_malloc(&self, size: Bytes, stream: StreamId) -> Result<TrackedAllocation, Short> {
        // The most likely length; corrected below to the actual one.
        let expected = size.max(Bytes::new(1)).checked_round_up(BLOCK_ALIGN).unwrap_or(size);
        let payer = self.charge(expected, stream)?;
        let allocation = match self.allocator.malloc(size, stream) {
            Ok(allocation) => allocation,
            Err(error) => {
                self.space.shared.uncharge(self.id, payer, expected);
                return Err(Short::Device(error));
            }
        };
        if allocation.len() != expected {
            return self.correct(allocation, payer, expected, stream);
        }
        self.counters.allocated(expected);
        Ok(TrackedAllocation { allocation, payer, tracked: self.number })
    }

    /// Corrects the charge to the length of the allocation.
    #[cold]
    fn correct(
        &self,
        allocation: vramp_alloc::Allocation,
        payer: Payer,
        expected: Bytes,
        stream: StreamId,
    ) -> Result<TrackedAllocation, Short> {
        let shared = &self.space.shared;
        // In whole granules, so that the parts add up to the credit of the free.
        let granules = |bytes: Bytes| bytes.checked_round_up(self.granule).unwrap_or(bytes);
        let (given, charged) = (granules(allocation.len()), granules(expected));
        let less = charged.saturating_sub(given);
        if !less.is_zero() {
            shared.uncharge(self.id, payer, less);
        }
        let more = given.saturating_sub(charged);
        if !more.is_zero() {
            let paid = match payer {
                Payer::Reservation(id) => {
                    let rule = self.rule_of(id);
                    shared.charge(id, more, &*rule).map_err(Short::from)
                }
                Payer::Space => shared.charge_unreserved(self.id, more).map_err(Short::Budget),
            };
            if let Err(short) = paid {
                if let Err(error) = self.allocator.free(allocation, stream) {
                    debug_assert!(false, "a new allocation can be freed: {error}");
                }
                shared.uncharge(self.id, payer, expected);
                return Err(short);
            }
        }
        self.counters.allocated(allocation.len());
        Ok(TrackedAllocation { allocation, payer, tracked: self.number })
    }

    /// Charges the reservation of this thread or stream, or the space. One lock, which also protects
    /// who pays.
    #[inline]
    fn charge(&self, bytes: Bytes, stream: StreamId) -> Result<Payer, Short> {
        match self.space.shared.charge_payer(self.payers, self.id, stream, bytes) {
            Ok(payer) => Ok(payer),
            Err(ChargeRefused::Space(refused)) => Err(Short::Budget(refused)),
            Err(ChargeRefused::Reservation(id)) => {
                let rule = self.rule_of(id);
                self.charge_slowly(id, bytes, stream, &*rule)
            }
        }
    }

    #[cold]
    fn charge_slowly(
        &self,
        id: ReservationId,
        bytes: Bytes,
        stream: StreamId,
        rule: &dyn LimitRule,
    ) -> Result<Payer, Short> {
        match self.space.shared.charge(id, bytes, rule) {
            Ok(()) => Ok(Payer::Reservation(id)),
            // Another thread detached and released it: now another payer is charged.
            Err(ChargeError::Stale(_)) => self.charge(bytes, stream),
            Err(error) => Err(error.into()),
        }
    }

    fn rule_of(&self, id: ReservationId) -> Arc<dyn LimitRule> {
        let table = self.read();
        let all = table.streams.iter().flatten().chain(table.threads.values());
        let found = all.into_iter().find(|attached| attached.reservation.id() == id);
        Arc::clone(&found.map_or(&self.defaults, |attached| &attached.policies).limit)
    }

    /// Retries the allocation as the policies say.
    #[cold]
    fn relieve(
        &self,
        size: Bytes,
        stream: StreamId,
        mut short: Short,
    ) -> Result<TrackedAllocation, MallocError> {
        let policies = {
            let table = self.read();
            table.find(stream).map_or(&self.defaults, |attached| &attached.policies).clone()
        };
        for attempt in 1..=policies.retries.max_retries {
            let exhausted = match &short {
                Short::Budget(refused) => Some(ExhaustedResource::Budget(refused)),
                Short::Device(error) if error.is_out_of_memory() => {
                    Some(ExhaustedResource::Device(error))
                }
                // It was detached and released during the charge: another payer is charged.
                Short::Refused(ChargeError::Stale(_)) => None,
                Short::Refused(_) | Short::Device(_) => break,
            };
            if let Some(exhausted) = exhausted {
                let shortage = MemoryShortage {
                    requested: size,
                    exhausted,
                    stream,
                    space: &self.space,
                    max_retries: policies.retries.max_retries,
                };
                let handler = &policies.out_of_memory;
                match self.space.shared.panics.catch(|| handler.handle(attempt, &shortage)) {
                    None | Some(RecoveryAction::Fail) => break,
                    Some(RecoveryAction::Retry) => {}
                    Some(RecoveryAction::RetryAfterPause) => {
                        thread::sleep(policies.retries.pause(attempt))
                    }
                }
            }
            short = match self.try_malloc(size, stream) {
                Ok(allocation) => return Ok(allocation),
                Err(short) => short,
            };
        }
        Err(short.into())
    }

    /// Frees memory and credits what it was charged to, on any stream and thread. Work on the
    /// memory is ordered as by [`Allocator::free`].
    ///
    /// # Errors
    /// The allocation or the stream is not of this allocator; the error contains the allocation. Or
    /// a driver call failed.
    #[inline]
    pub fn free(
        &self,
        allocation: TrackedAllocation,
        stream: StreamId,
    ) -> Result<(), TrackedFreeError> {
        let TrackedAllocation { allocation, payer, tracked } = allocation;
        if tracked != self.number {
            let foreign = TrackedAllocation { allocation, payer, tracked };
            return Err(TrackedFreeError::Foreign(foreign));
        }
        let len = allocation.len();
        match self.allocator.free(allocation, stream) {
            Ok(()) => {
                self.space.shared.uncharge(self.id, payer, len);
                self.counters.freed(len);
                Ok(())
            }
            Err(error) => Err(self.not_freed(error, payer, len)),
        }
    }

    #[cold]
    fn not_freed(&self, error: FreeError, payer: Payer, len: Bytes) -> TrackedFreeError {
        let back = |allocation| TrackedAllocation { allocation, payer, tracked: self.number };
        match error {
            FreeError::Foreign(allocation) => TrackedFreeError::Foreign(back(allocation)),
            FreeError::UnknownStream { stream, allocation } => {
                TrackedFreeError::UnknownStream { stream, allocation: back(allocation) }
            }
            FreeError::Driver(failed) => {
                if !failed.is_device_lost() {
                    self.space.shared.uncharge(self.id, payer, len);
                    self.counters.freed(len);
                }
                TrackedFreeError::Failed(FreeError::Driver(failed))
            }
            // The pool is unusable, and the memory was not freed.
            other => TrackedFreeError::Failed(other),
        }
    }

    /// Counts allocations and frees of all threads from now on. Each costs one lock more while
    /// there is a counter.
    pub fn count(&self) -> Counter<'_> {
        self.counters.begin()
    }

    #[inline]
    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TrackedAllocator {
    fn drop(&mut self) {
        self.space.shared.read().payers.remove(self.payers);
    }
}

impl fmt::Debug for TrackedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {:?}", self.allocator.name(), self.space)
    }
}
