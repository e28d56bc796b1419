//! An allocator whose memory is paid for.
//!
//! 1. [`TrackedAllocator::attach`] ties a reservation to a stream, or to a thread, with the policies for
//!    what exceeds it and for shortage.
//! 2. [`TrackedAllocator::malloc`] charges it, asks the allocator, and corrects the charge to the exact
//!    length that the allocator gave. Without a reservation the space is charged.
//! 3. [`TrackedAllocator::free`] credits whoever paid, on whatever stream and thread it happens, and also
//!    after the reservation has ended.
//! 4. [`TrackedAllocator::detach`] gives the reservation back. What is allocated from it stays charged.
//!
//! Deliberately absent: spilling. A handler ([`OutOfMemoryHandler`]) may do it, such as
//! [`SpillAndRetry`](crate::spill::SpillAndRetry). What is outstanding, with the stacks that asked for it, the
//! [`Allocator`] tells.

mod allocation;
mod counting;
mod errors;
mod policies;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, ThreadId};

use crate::ledger::core::{ChargeError, ReservationId, SpaceId, SpaceRefusal};
use vramp_alloc::{AllocError, Allocator, FreeError, StreamId};
use vramp_core::Bytes;

pub use crate::ledger::core::{GrowthFactor, LimitPolicy, Overrun, OverrunAction};
pub use crate::ledger::shell::charge::{LimitRule, Payer};
use crate::ledger::shell::error::SpaceFull;
pub use crate::ledger::shell::retry::RetryPolicy;
use crate::{MemorySpace, Reservation};
pub use allocation::TrackedAllocation;
use counting::Counters;
pub use counting::{Count, Counter, Counts};
pub use errors::{AttachError, MallocError, TrackedFreeError};
pub use policies::{
    BackOff, ExhaustedResource, Fail, MemoryShortage, OutOfMemoryHandler, RecoveryAction,
};

/// What an allocation that the default preset gives is a multiple of.
const BLOCK_ALIGN: Bytes = Bytes::new(512);

/// What decides about an attached reservation.
#[derive(Clone)]
pub struct Policies {
    /// What happens to an allocation that exceeds it.
    pub limit: Arc<dyn LimitRule>,
    /// What happens when memory runs out.
    pub out_of_memory: Arc<dyn OutOfMemoryHandler>,
    /// How often and how fast to try again.
    pub retries: RetryPolicy,
}

impl Default for Policies {
    /// Both fail.
    fn default() -> Policies {
        Policies {
            limit: Arc::new(LimitPolicy::Fail),
            out_of_memory: Arc::new(Fail),
            retries: RetryPolicy::default(),
        }
    }
}

/// Whose allocations a reservation pays for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Those on a stream, by any thread.
    Stream(StreamId),
    /// Those of a thread that has one, on any stream: before the stream's.
    Thread(ThreadId),
}

impl Scope {
    /// The calling thread.
    pub fn this_thread() -> Scope {
        Scope::Thread(thread::current().id())
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Stream(stream) => stream.fmt(f),
            Scope::Thread(thread) => write!(f, "{thread:?}"),
        }
    }
}

struct Attached {
    reservation: Reservation,
    policies: Policies,
}

#[derive(Default)]
struct Table {
    /// By the number of the stream.
    streams: Vec<Option<Attached>>,
    threads: HashMap<ThreadId, Attached>,
}

impl Table {
    #[inline]
    fn find(&self, stream: StreamId) -> Option<&Attached> {
        if !self.threads.is_empty()
            && let Some(attached) = self.threads.get(&thread::current().id())
        {
            return Some(attached);
        }
        self.streams.get(stream.index())?.as_ref()
    }

    fn of(&self, scope: Scope) -> Option<&Attached> {
        match scope {
            Scope::Stream(stream) => self.streams.get(stream.index())?.as_ref(),
            Scope::Thread(thread) => self.threads.get(&thread),
        }
    }
}

/// An [`Allocator`] of one card behind the budget of its space.
pub struct TrackedAllocator {
    allocator: Arc<Allocator>,
    space: MemorySpace,
    id: SpaceId,
    /// Amounts in the space are multiples of it.
    granule: Bytes,
    /// Tells its allocations from those of others.
    number: u64,
    table: RwLock<Table>,
    defaults: Policies,
    counters: Counters,
}

/// Why one try came to nothing.
enum Short {
    /// The rule of the reservation says no, or the reservation is gone.
    Refused(ChargeError),
    /// The space has no room.
    Budget(Box<SpaceRefusal>),
    /// The allocator has none, or its device failed.
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
            Short::Budget(refused) => MallocError::SpaceFull(SpaceFull { refused }),
            Short::Device(error) if error.is_out_of_memory() => MallocError::OutOfMemory(error),
            Short::Device(error) => MallocError::Device(error),
        }
    }
}

impl TrackedAllocator {
    /// Puts an allocator behind the budget of a space. Memory without a reservation is charged to
    /// the space; `defaults` decide about shortage then, and about reservations that are attached
    /// without policies of their own.
    pub fn new(
        allocator: Arc<Allocator>,
        space: &MemorySpace,
        defaults: Policies,
    ) -> TrackedAllocator {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        TrackedAllocator {
            allocator,
            space: space.clone(),
            id: space.id(),
            granule: space.levels().granule,
            number: COUNT.fetch_add(1, Ordering::Relaxed),
            table: RwLock::default(),
            defaults,
            counters: Counters::default(),
        }
    }

    /// The allocator behind it.
    pub fn allocator(&self) -> &Arc<Allocator> {
        &self.allocator
    }

    /// The space that pays.
    pub fn space(&self) -> &MemorySpace {
        &self.space
    }

    /// Lets a reservation pay for the allocations of a stream or a thread, by the policies that
    /// this allocator was made with.
    ///
    /// # Errors
    /// It is of another space, or there is one already.
    pub fn attach(&self, scope: Scope, reservation: Reservation) -> Result<(), AttachError> {
        self.attach_with(scope, reservation, self.defaults.clone())
    }

    /// The same with policies of its own.
    ///
    /// # Errors
    /// It is of another space, or there is one already.
    pub fn attach_with(
        &self,
        scope: Scope,
        reservation: Reservation,
        policies: Policies,
    ) -> Result<(), AttachError> {
        if reservation.space() != self.id || !Arc::ptr_eq(reservation.shared(), &self.space.shared)
        {
            return Err(AttachError::OtherSpace { space: self.id, reservation });
        }
        let mut table = self.write();
        if table.of(scope).is_some() {
            drop(table);
            return Err(AttachError::Occupied { scope, reservation });
        }
        let attached = Attached { reservation, policies };
        match scope {
            Scope::Thread(thread) => drop(table.threads.insert(thread, attached)),
            Scope::Stream(stream) => {
                let slots = table.streams.len().max(stream.index() + 1);
                table.streams.resize_with(slots, || None);
                table.streams[stream.index()] = Some(attached);
            }
        }
        Ok(())
    }

    /// Gives a reservation back; `None` if there is none.
    pub fn detach(&self, scope: Scope) -> Option<Reservation> {
        let mut table = self.write();
        let attached = match scope {
            Scope::Thread(thread) => table.threads.remove(&thread),
            Scope::Stream(stream) => table.streams.get_mut(stream.index())?.take(),
        };
        drop(table);
        attached.map(|attached| attached.reservation)
    }

    /// What the reservation of a stream or a thread is, what of it is used and was at most. `None`
    /// without one.
    pub fn attached(&self, scope: Scope) -> Option<crate::ledger::core::ReservationRecord> {
        let id = self.read().of(scope)?.reservation.id();
        self.space.shared.look().ledger.reservation(id).copied()
    }

    /// Makes what a stream or a thread uses of its reservation now the peak of it. False without one.
    pub fn reset_peak(&self, scope: Scope) -> bool {
        let table = self.read();
        let Some(attached) = table.of(scope) else { return false };
        let id = attached.reservation.id();
        self.space.shared.look().ledger.reset_peak(id).is_ok()
    }

    /// Memory for work on `stream`, paid for by the thread's reservation, the stream's, or the
    /// space. Costs what [`Allocator::malloc`] does and one more lock.
    ///
    /// # Errors
    /// The reservation is exceeded or memory has run out, after what the policies did about it; or
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
        // What the allocator will most likely give; corrected below to what it gave.
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

    /// Makes the charge what the allocator gave.
    #[cold]
    fn correct(
        &self,
        allocation: vramp_alloc::Allocation,
        payer: Payer,
        expected: Bytes,
        stream: StreamId,
    ) -> Result<TrackedAllocation, Short> {
        let shared = &self.space.shared;
        // In whole granules, so that the parts add up to what the free will credit.
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
                    debug_assert!(false, "what was just allocated can be freed: {error}");
                }
                shared.uncharge(self.id, payer, expected);
                return Err(short);
            }
        }
        self.counters.allocated(allocation.len());
        Ok(TrackedAllocation { allocation, payer, tracked: self.number })
    }

    /// Charges whoever pays for this thread and stream.
    #[inline]
    fn charge(&self, bytes: Bytes, stream: StreamId) -> Result<Payer, Short> {
        let table = self.read();
        let Some(attached) = table.find(stream) else {
            drop(table);
            let paid = self.space.shared.charge_unreserved(self.id, bytes);
            paid.map_err(Short::Budget)?;
            return Ok(Payer::Space);
        };
        let id = attached.reservation.id();
        // A charge within the reservation changes no total: there is nothing to tell. So no foreign
        // code runs while the table is held, which it may want to change.
        let charged = self.space.shared.look().ledger.charge(id, bytes);
        if let Ok(crate::ledger::core::Charged::Within) = charged {
            return Ok(Payer::Reservation(id));
        }
        let rule = Arc::clone(&attached.policies.limit);
        drop(table);
        self.charge_slowly(id, bytes, stream, &*rule)
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
            // Another thread detached and released it: whoever pays now is another one.
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

    /// Asks the policies about a shortage until they give up or there is memory.
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
        for attempt in 1..=policies.retries.most {
            let exhausted = match &short {
                Short::Budget(refused) => Some(ExhaustedResource::Budget(refused)),
                Short::Device(error) if error.is_out_of_memory() => {
                    Some(ExhaustedResource::Device(error))
                }
                // It was detached and released amid the charge: somebody else pays.
                Short::Refused(ChargeError::Stale(_)) => None,
                Short::Refused(_) | Short::Device(_) => break,
            };
            if let Some(exhausted) = exhausted {
                let shortage = MemoryShortage { requested: size, exhausted };
                let handler = &policies.out_of_memory;
                match self.space.shared.contain(|| handler.handle(attempt, &shortage)) {
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

    /// Takes memory back and credits whoever paid, on whatever stream and thread. What
    /// [`Allocator::free`] says about work on it holds.
    ///
    /// # Errors
    /// A foreign allocation or stream; the allocation is in the error. Or a driver call failed.
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
            // The pool is unusable, and the memory is not free.
            other => TrackedFreeError::Failed(other),
        }
    }

    #[inline]
    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TrackedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {:?}", self.allocator.name(), self.space)
    }
}
