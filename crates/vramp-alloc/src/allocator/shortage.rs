//! Shortages: handlers, trimming other pools, waiting, and the report.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vramp_core::{Bytes, Request, Shortage, StreamId};
use vramp_driver::DriverError;

use super::Allocator;
use crate::error::{AllocError, OutOfMemoryReport, SiblingPool};
use crate::observe::{Answer, Event, Registration, Reliever, Relievers, ShortRequest};
use crate::shared::{Shared, Waiter};

/// Most times that a request is retried because a handler freed memory.
const ROUNDS_MAX: u32 = 64;

/// Most waits for the work that uses freed memory of a pool. A wait may free memory that waited and is
/// in use by younger work then; beside other threads that never ends.
const WAITS_MAX: u32 = 4;

/// Stands for a patience beyond the range of the clock.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// What was done about the shortage of one request so far.
pub(crate) struct Relief<'a> {
    rounds: u32,
    backs_range: bool,
    /// What goes on freeing memory for the request, and keeps it from others.
    relievers: Relievers,
    /// Memory of the group's other pools may have become idle since they were trimmed last.
    others_may_be_idle: bool,
    patience: Duration,
    deadline: Option<Instant>,
    /// Work that uses freed memory of this pool was waited for.
    own_waited_for: bool,
    /// The same of the group's other pools up to this number.
    waited_up_to: u64,
    /// Set by the first wait, so that frees take the lock until the request has ended.
    waiter: Option<Waiter<'a>>,
}

impl Relief<'_> {
    pub(crate) fn new(patience: Duration) -> Self {
        Relief {
            rounds: 0,
            backs_range: false,
            relievers: Relievers::default(),
            others_may_be_idle: true,
            patience,
            deadline: None,
            own_waited_for: false,
            waited_up_to: 0,
            waiter: None,
        }
    }

    /// For a request that backs a stable range.
    pub(crate) fn of_range(patience: Duration) -> Self {
        Relief { backs_range: true, ..Relief::new(patience) }
    }

    /// Goes on with the next part of what is one request to its caller: all is tried again, and the deadline
    /// stays.
    pub(crate) fn begin_next(&mut self) {
        self.rounds = 0;
        self.others_may_be_idle = true;
        self.own_waited_for = false;
        self.waited_up_to = 0;
    }
}

/// # Shortages and observers
impl Allocator {
    /// Calls `observer` with every event from now on: without a lock, on the thread that caused the
    /// event. The observer may use the allocator; events of its own calls reach no observer. A
    /// panic of it is caught and counted. See [`observe`](crate::observe) for the rule.
    pub fn observe(&self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Registration {
        self.shared.observers.add_observer(Arc::new(observer))
    }

    /// Calls `handler` before a request fails for want of memory: without a lock, on the thread of
    /// the request. The handler may free allocations. It returns true if it freed something; the
    /// request is then retried.
    ///
    /// The handler may allocate too, but such a request runs no handlers and does not wait. A panic
    /// of the handler is caught and counted, and means that it freed nothing. See
    /// [`observe`](crate::observe) for the rule.
    pub fn on_shortage(
        &self,
        handler: impl Fn(&Shortage) -> bool + Send + Sync + 'static,
    ) -> Registration {
        self.shared.observers.add_handler(Arc::new(handler))
    }

    /// Calls `handler` before those of [`on_shortage`](Allocator::on_shortage), and instead of them if it
    /// freed something: for memory of the card that others hold and this allocator's own data should not
    /// give way to.
    pub fn on_shortage_first(
        &self,
        handler: impl Fn(&Shortage) -> bool + Send + Sync + 'static,
    ) -> Registration {
        self.shared.observers.add_first_handler(Arc::new(handler))
    }

    /// Calls `handler` if a request of any pool of the group, also of one that is created later, finds no
    /// memory and neither the pool's own handlers nor those registered here before freed some. It takes the
    /// [number](Allocator::number) of the pool that is short. Otherwise it is as those of
    /// [`on_shortage`](Allocator::on_shortage): inside it a request of any pool of the group runs no handlers
    /// and does not wait.
    pub fn on_shortage_in_group(
        &self,
        handler: impl Fn(u64, &Shortage) -> bool + Send + Sync + 'static,
    ) -> Registration {
        let answer = move |request: &ShortRequest<'_>| {
            Answer::Freed(handler(request.pool, request.shortage))
        };
        self.shared.group.handlers.add_request_handler(Arc::new(answer))
    }

    /// Calls `begin` after the handlers of [`on_shortage`](Allocator::on_shortage). The [`Reliever`] that it
    /// returns frees memory for that one request. While it does, it is called again before any handler, with
    /// what the request still lacks; it is dropped once it frees nothing, or the request has ended. So it
    /// may keep others from taking what it freed, and no handler runs and the request does not wait for
    /// frees meanwhile.
    pub fn relieve_shortages(
        &self,
        begin: impl Fn(&ShortRequest<'_>) -> Box<dyn Reliever> + Send + Sync + 'static,
    ) -> Registration {
        let answer = move |request: &ShortRequest<'_>| Answer::GoesOn(begin(request));
        self.shared.observers.add_request_handler(Arc::new(answer))
    }

    /// Does the same for requests of any pool of the group, where
    /// [`on_shortage_in_group`](Allocator::on_shortage_in_group) would call its handler. `begin` returns
    /// `None` if it can free nothing for the request.
    pub fn relieve_shortages_in_group(
        &self,
        begin: impl Fn(&ShortRequest<'_>) -> Option<Box<dyn Reliever>> + Send + Sync + 'static,
    ) -> Registration {
        let answer = move |request: &ShortRequest<'_>| {
            begin(request).map_or(Answer::Freed(false), Answer::GoesOn)
        };
        self.shared.group.handlers.add_request_handler(Arc::new(answer))
    }

    /// Remaps free chunks towards the block that a shortage is about. For handlers that free memory
    /// piece by piece: once the last piece is free only that one is left to move. The memory stays
    /// free, for this request and any other.
    ///
    /// Cost: a map for each chunk moved and a set-access. Does nothing for small blocks, for
    /// presets other than `vramp`, and for memory that is to back existing addresses.
    ///
    /// # Errors
    /// A driver call failed. The pool is as before that call.
    pub fn assemble(&self, shortage: &Shortage) -> Result<(), AllocError> {
        let Some(stream) = shortage.block_for else { return Ok(()) };
        let mut guard = self.shared.lock_for_memory()?;
        let inner = &mut *guard;
        let contended = self.shared.is_contended();
        if inner.open_stream(stream).is_none() {
            return Ok(());
        }
        let Some(pool) = inner.manager.virtual_pool_mut() else { return Ok(()) };
        let size = shortage.requested;
        if pool.heaps_serve.is_none_or(|serve| size <= serve.limit(contended)) {
            return Ok(());
        }
        let assembled = pool.assemble(Request { size, stream });
        self.shared.refresh(inner);
        Ok(assembled?)
    }

    /// Removes an observer or handler. Returns false if it was removed before.
    ///
    /// No call of it begins afterwards. Waits for its calls in progress on other threads and drops
    /// the closure; so the caller must hold no lock that the callback takes. Inside a callback of
    /// any allocator it does not wait: then the last call in progress drops the closure.
    pub fn unregister(&self, registration: Registration) -> bool {
        self.shared.observers.remove(registration)
            || self.shared.group.handlers.remove(registration)
    }

    /// Runs code of the program as a callback of the allocator's group: by [the rule](crate::observe) for user code,
    /// and with events and handlers as outside of callbacks. `None` if it panicked, which is counted, or if callbacks
    /// are nested too deep, where it was not run. The caller holds no lock.
    pub fn call_back<R>(&self, code: impl FnOnce() -> R) -> Option<R> {
        self.shared.group.handlers.call_back(&self.shared.observers, code)
    }

    /// Returns true if the calling thread runs a callback of this allocator or its group.
    pub fn is_in_callback(&self) -> bool {
        self.shared.observers.is_in_callback() || self.shared.group.handlers.is_in_callback()
    }
}

impl Shared {
    /// Does what is left to do about a shortage: trims other pools, runs handlers, waits for frees, and
    /// at last for work that uses what was freed, here and in other pools. Returns true if the request is
    /// to be retried.
    ///
    /// What a handler or another thread freed may lie in another pool of the group. So that pool is
    /// trimmed before the next handler runs or the next wait begins.
    ///
    /// A request made inside a handler only trims: its handlers would call each other without end,
    /// and it would wait for memory that the handler is about to free.
    pub(crate) fn relieve<'a>(
        &'a self,
        relief: &mut Relief<'a>,
        shortage: &Shortage,
    ) -> Result<bool, AllocError> {
        if std::mem::take(&mut relief.others_may_be_idle) {
            let had_idle_imports = self.imports.unmap_idle(&*self.driver);
            if self.trim_others()? || had_idle_imports {
                return Ok(true);
            }
        }
        if self.observers.is_in_handler() || self.group.handlers.is_in_handler() {
            return Ok(false);
        }
        if relief.rounds < ROUNDS_MAX && self.run_handlers(relief, shortage) {
            relief.rounds += 1;
            relief.others_may_be_idle = true;
            self.lock_asleep()?.retries += 1;
            return Ok(true);
        }
        relief.relievers.end(&self.observers);
        let now = Instant::now();
        let end = || now.checked_add(relief.patience).unwrap_or_else(|| now + YEAR);
        let deadline = *relief.deadline.get_or_insert_with(end);
        let left = deadline.saturating_duration_since(now);
        if left > Duration::ZERO {
            let mut inner = self.lock_asleep()?;
            inner.retries += 1;
            relief.waiter.get_or_insert_with(|| self.add_waiter());
            self.wait_for_memory(inner, left);
            relief.others_may_be_idle = true;
            return Ok(true);
        }
        if shortage.requested > self.driver.info().limits.memory {
            return Ok(false);
        }
        let first = !std::mem::replace(&mut relief.own_waited_for, true);
        Ok((first && self.wait_until_idle()?) || self.wait_for_others(&mut relief.waited_up_to)?)
    }

    /// Goes on with what freed memory for the request before. Otherwise claims what the group's budget has,
    /// then runs the pool's handlers, and then those of the group, each if those before freed nothing.
    fn run_handlers(&self, relief: &mut Relief<'_>, shortage: &Shortage) -> bool {
        let Relief { relievers, backs_range, .. } = relief;
        let request = ShortRequest { pool: self.number, shortage, backs_range: *backs_range };
        relievers.free(&self.observers, shortage)
            || self.group.handlers.run_first_handlers(&self.observers, shortage)
            || self.observers.run_handlers(&request, relievers)
            || self.group.handlers.run_group_handlers(&self.observers, &request, relievers)
    }

    /// Waits on the host for work that uses freed memory of this pool. A wait of the request's stream on
    /// the device does not get what lies in heaps of other streams, or in chunks of which several streams
    /// freed parts. Returns true if some work is over that was not known to be.
    ///
    /// It holds no lock meanwhile: the work may wait for a thread that frees here.
    pub(crate) fn wait_until_idle(&self) -> Result<bool, AllocError> {
        let mut any = false;
        for _ in 0..WAITS_MAX {
            let Some(mut inner) = self.lock_open()? else { break };
            let Some(pool) = inner.manager.virtual_pool_mut() else { break };
            let before = pool.exec.events.completed();
            let awaited = pool.begin_waits()?;
            drop(inner);
            let (mut waits, mut lost) = (Vec::new(), None);
            for awaited in awaited {
                let waited = awaited.synchronize(&*self.driver);
                waits.push((awaited, waited.is_ok()));
                // Other errors may be of work that waits for the caller. Its memory stays where it is.
                lost = lost.or(waited.err().filter(DriverError::is_device_lost));
            }
            let mut inner = self.lock_anyway();
            let Some(pool) = inner.manager.virtual_pool_mut() else { break };
            pool.end_waits(waits);
            let is_more = pool.exec.events.completed() > before;
            if let Some(lost) = lost {
                return Err(lost.into());
            }
            any |= is_more;
            if !is_more {
                break;
            }
        }
        Ok(any)
    }

    /// Waits on the host for work that uses freed memory of the group's other pools, one pool after the
    /// other until one returns memory to the card, from the first one behind `waited_up_to` on. A stream
    /// of this pool cannot wait for it on the device, because the memory leaves its pool. PyTorch's
    /// allocator waits here, too. Returns true if memory was returned.
    fn wait_for_others(&self, waited_up_to: &mut u64) -> Result<bool, AllocError> {
        for member in self.group.members() {
            if member.number == self.number || member.number <= *waited_up_to {
                continue;
            }
            *waited_up_to = member.number;
            if !member.wait_until_idle()? {
                continue;
            }
            let Some(mut inner) = member.lock_open()? else { continue };
            let before = inner.manager.reserved();
            let trimmed = inner.manager.trim(Bytes::ZERO);
            let returned = inner.manager.reserved() < before;
            member.note_reserved(&inner);
            trimmed?;
            if returned {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns idle memory of the group's other pools to the card. Returns true if there was some.
    fn trim_others(&self) -> Result<bool, AllocError> {
        let mut returned = false;
        for member in self.group.members() {
            if member.number == self.number {
                continue;
            }
            let Some(mut inner) = member.lock_open()? else { continue };
            let before = inner.manager.reserved();
            let trimmed = inner.manager.trim(Bytes::ZERO);
            returned |= inner.manager.reserved() < before;
            member.note_reserved(&inner);
            trimmed?;
        }
        Ok(returned)
    }

    /// Returns the report of a request that found no memory.
    pub(crate) fn report(
        &self,
        shortage: Shortage,
        failed_call: Option<DriverError>,
        stream: StreamId,
    ) -> OutOfMemoryReport {
        let (largest_is, streams, idle, quarantined, mut tags) = {
            let mut inner = self.lock_anyway();
            inner.ooms += 1;
            let largest_is = inner.manager.largest_is(shortage.requested);
            let idle = inner.manager.virtual_pool().map_or(Bytes::ZERO, |pool| pool.pool.idle());
            let quarantined = inner.manager.quarantined();
            (largest_is, inner.stream_usage(), idle, quarantined, inner.tags.clone())
        };
        tags.retain(|tag| tag.live > Bytes::ZERO);
        tags.sort_by_key(|tag| std::cmp::Reverse(tag.live));
        let members = self.group.members();
        let siblings = members.iter().filter(|member| member.number != self.number);
        let siblings = siblings.map(|member| SiblingPool {
            name: member.name.clone(),
            reserved: Bytes::new(member.reserved.load(Ordering::Relaxed)),
        });
        OutOfMemoryReport {
            shortage,
            stream,
            pool: self.name.clone(),
            largest_is,
            streams,
            tags,
            siblings: siblings.collect(),
            idle,
            quarantined,
            card: self.driver.memory_info().ok(),
            budget: self.group.refusal(),
            failed_call,
        }
    }
}
