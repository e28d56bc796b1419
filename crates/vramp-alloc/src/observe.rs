//! Observers of an allocator's events, and handlers that free memory when a request runs short.
//!
//! # The rule for user code
//!
//! Observers, shortage handlers and the [stack source](crate::Allocator::record_history) of a
//! history are user code that the allocator calls, on the thread that caused the event. So is what a crate above
//! [calls back](crate::Allocator::call_back).
//!
//! 1. *No lock is held while user code runs.* It may call this allocator and any other.
//! 2. *Re-entry is defined.* A callback is never called inside itself:
//!
//!    | a call of the same allocator, on the same thread, inside | its events | if it finds no memory |
//!    |---|---|---|
//!    | an observer or a stack source | reach no observer; a history records them without a stack | handlers run, then it waits |
//!    | a handler | reach observers and histories | no handler runs and it does not wait: it fails |
//!
//!    The same holds for all pools of a group inside a handler of the group.
//!
//!    Callbacks of several allocators nest up to 16 deep on a thread; deeper ones are not called.
//! 3. *Panics are contained and counted* in [`Stats`](crate::stats::Stats) as `callback_panics`. A
//!    handler that panics has freed nothing, and a stack source that panics has no stack. The call
//!    that caused the event goes on.
//! 4. *Closing from inside is refused.* In Rust the borrow of the call in progress refuses it. The
//!    C interface returns a status.
//!
//! # The life of a callback
//!
//! 1. It is registered, and gets a number that is not used again.
//! 2. Each event calls every observer, in the order of registration. Several threads may call one
//!    at the same time.
//! 3. [`Allocator::unregister`](crate::Allocator::unregister) removes it. No call begins
//!    afterwards. It waits for calls in progress on other threads, and then drops the closure. It
//!    does not wait inside any callback, as two callbacks that remove each other would wait for ever:
//!    then the last call in progress drops the closure.
//!
//! An event costs O(callbacks). A registration and its end cost O(log callbacks), and O(callbacks)
//! while an event is in progress. A removed callback leaves nothing.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use vramp_core::{Bytes, DeviceAddr, StreamId};
use vramp_host::fork::is_forked;

pub use vramp_core::Shortage;

use crate::error::OutOfMemoryReport;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Something that happened in an allocator.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A block was allocated. With [`Allocator::malloc_with`](crate::Allocator::malloc_with) the
    /// caller has stored it before.
    Allocated {
        /// Address of the block.
        addr: DeviceAddr,
        /// Length of the block.
        len: Bytes,
        /// Bytes that were requested.
        requested: Bytes,
        /// Stream that it was allocated for.
        stream: StreamId,
    },
    /// A block is freed by its owner. No other block has its memory yet. Work of other streams, or
    /// a captured graph, may still use it.
    Freed {
        /// Address of the block.
        addr: DeviceAddr,
        /// Length of the block.
        len: Bytes,
        /// Bytes that were requested.
        requested: Bytes,
        /// Stream that it is freed on.
        stream: StreamId,
    },
    /// The allocator reserved physical memory of the card.
    Grown {
        /// Bytes reserved.
        bytes: Bytes,
    },
    /// The allocator returned physical memory to the card.
    Shrunk {
        /// Bytes returned.
        bytes: Bytes,
    },
    /// Free chunks were remapped to build a larger block.
    Remapped {
        /// Chunks moved.
        chunks: u64,
        /// Bytes moved.
        bytes: Bytes,
    },
    /// A request found no memory. It may still succeed after handlers ran.
    Short(&'a Shortage),
    /// A request failed.
    OutOfMemory(&'a OutOfMemoryReport),
}

type Observer = dyn Fn(&Event<'_>) + Send + Sync;
type Handler = dyn Fn(&Shortage) -> bool + Send + Sync;
/// A handler that may go on with one request until that ends.
pub(crate) type RequestHandler = dyn Fn(&ShortRequest<'_>) -> Answer + Send + Sync;

/// A request that found no memory.
#[derive(Clone, Copy, Debug)]
pub struct ShortRequest<'a> {
    /// [Number](crate::Allocator::number) of the pool that is short.
    pub pool: u64,
    /// What the request lacks.
    pub shortage: &'a Shortage,
    /// It backs a stable range: the owner of the range decides what goes first.
    pub backs_range: bool,
}

/// Frees memory for one request, and may keep others from taking it until the request has ended: begun by
/// [`Allocator::relieve_shortages`](crate::Allocator::relieve_shortages).
pub trait Reliever {
    /// Frees what the request still lacks. Returns false if it freed nothing: it is dropped then.
    fn free(&mut self, shortage: &Shortage) -> bool;
}

/// What a handler did about a request.
pub(crate) enum Answer {
    Freed(bool),
    /// It is to free memory, and goes on until the request has ended.
    GoesOn(Box<dyn Reliever>),
}

/// The relievers of one request, in the order in which they began.
#[derive(Default)]
pub(crate) struct Relievers(Vec<Begun>);

struct Begun {
    slot: Arc<Slot<RequestHandler>>,
    /// Number of the allocator or group that has the handler.
    owner: u64,
    reliever: Box<dyn Reliever>,
}

/// A part of the library that records every event, also those of calls inside observers.
pub(crate) trait Recorder: Send + Sync {
    /// Records an event. `user` runs user code; `None` where none may run.
    fn record(&self, event: &Event<'_>, user: Option<&Observers>);
}

/// Handle of a registered observer or handler, for
/// [`Allocator::unregister`](crate::Allocator::unregister).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Registration(u64);

impl Registration {
    /// Returns its number: above zero, and unique in the process.
    pub fn number(self) -> u64 {
        self.0
    }

    /// Returns the registration with this number. One that was never given out is unknown to
    /// [`Allocator::unregister`](crate::Allocator::unregister).
    pub fn from_number(number: u64) -> Registration {
        Registration(number)
    }

    /// Returns a registration that was not given out before, for callbacks that a crate above keeps and calls
    /// with [`Allocator::call_back`](crate::Allocator::call_back).
    pub fn unused() -> Registration {
        Registration(REGISTRATIONS.fetch_add(1, Ordering::Relaxed))
    }
}

/// Returns true if the calling thread runs a callback of any allocator.
pub fn is_in_callback() -> bool {
    FRAMES.get()[0].is_some()
}

/// What a callback is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Observer,
    Handler,
    /// Of a crate above: events reach observers, and handlers run.
    Other,
}

/// How deep callbacks of all allocators nest on a thread. Of one allocator at most two do: an
/// observer within a handler, or a handler within an observer.
const DEPTH: usize = 16;

thread_local! {
    /// The callbacks that run on this thread, by the number of their allocator, outermost first. It
    /// has no destructor, so it can be used while the thread ends.
    static FRAMES: Cell<[Option<(u64, Role)>; DEPTH]> = const { Cell::new([None; DEPTH]) };
}

fn runs(wanted: impl Fn(u64, Role) -> bool) -> bool {
    FRAMES.get().iter().map_while(|frame| *frame).any(|(allocator, role)| wanted(allocator, role))
}

/// A callback that runs on this thread, until it is dropped.
struct Frame(usize);

impl Frame {
    /// Returns `None` if callbacks are nested too deep.
    fn enter(allocator: u64, role: Role) -> Option<Frame> {
        let mut frames = FRAMES.get();
        let depth = frames.iter().position(Option::is_none)?;
        frames[depth] = Some((allocator, role));
        FRAMES.set(frames);
        Some(Frame(depth))
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        let mut frames = FRAMES.get();
        frames[self.0] = None;
        FRAMES.set(frames);
    }
}

/// A registered callback, and how many calls of it are in progress.
pub(crate) struct Slot<F: ?Sized> {
    state: Mutex<SlotState<F>>,
    idle: Condvar,
}

struct SlotState<F: ?Sized> {
    /// `None` once it was removed.
    code: Option<Arc<F>>,
    running: u32,
}

impl<F: ?Sized> Slot<F> {
    pub(crate) fn new(code: Arc<F>) -> Arc<Slot<F>> {
        let state = Mutex::new(SlotState { code: Some(code), running: 0 });
        Arc::new(Slot { state, idle: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, SlotState<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call. `None` if the callback was removed. The caller drops the result before
    /// [`end`](Slot::end).
    pub(crate) fn begin(&self) -> Option<Arc<F>> {
        let mut state = self.lock();
        let code = Arc::clone(state.code.as_ref()?);
        state.running += 1;
        Some(code)
    }

    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.running -= 1;
        if state.running == 0 {
            self.idle.notify_all();
        }
    }

    /// Lets no further call begin, and waits for those in progress if `waits` is true. Returns the
    /// closure, which the caller drops; `None` if it was removed before.
    pub(crate) fn remove(&self, waits: bool) -> Option<Arc<F>> {
        let mut state = self.lock();
        let code = state.code.take()?;
        while waits && state.running > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Some(code)
    }
}

/// Number of the next registration.
static REGISTRATIONS: AtomicU64 = AtomicU64::new(1);

/// The observers, handlers and recorders of an allocator, or the handlers of a group.
pub(crate) struct Observers {
    /// Number of the allocator or group.
    allocator: u64,
    /// True if there are observers or recorders. A cache hit reads only this.
    observed: AtomicBool,
    /// Callbacks that panicked.
    panics: AtomicU64,
    lists: RwLock<Arc<Lists>>,
}

/// By number, so in the order of registration.
type Slots<F> = BTreeMap<u64, Arc<Slot<F>>>;

#[derive(Clone, Default)]
struct Lists {
    observers: Slots<Observer>,
    handlers: Slots<Handler>,
    /// Handlers that are called before the others.
    first_handlers: Slots<Handler>,
    /// Handlers that are called after the others, or the handlers of a group.
    request_handlers: Slots<RequestHandler>,
    recorders: Slots<dyn Recorder>,
}

impl Observers {
    pub(crate) fn new(allocator: u64) -> Observers {
        Observers {
            allocator,
            observed: AtomicBool::new(false),
            panics: AtomicU64::new(0),
            lists: RwLock::default(),
        }
    }

    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.observed.load(Ordering::Relaxed)
    }

    /// Returns how many callbacks panicked.
    pub(crate) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    /// Returns true if the calling thread runs a callback of this allocator.
    pub(crate) fn is_in_callback(&self) -> bool {
        runs(|allocator, _| allocator == self.allocator)
    }

    /// Returns true if the calling thread runs a handler of this allocator.
    pub(crate) fn is_in_handler(&self) -> bool {
        runs(|allocator, role| allocator == self.allocator && role == Role::Handler)
    }

    pub(crate) fn add_observer(&self, observer: Arc<Observer>) -> Registration {
        self.change(|lists, number| drop(lists.observers.insert(number, Slot::new(observer))))
    }

    pub(crate) fn add_handler(&self, handler: Arc<Handler>) -> Registration {
        self.change(|lists, number| drop(lists.handlers.insert(number, Slot::new(handler))))
    }

    pub(crate) fn add_first_handler(&self, handler: Arc<Handler>) -> Registration {
        self.change(|lists, number| drop(lists.first_handlers.insert(number, Slot::new(handler))))
    }

    pub(crate) fn add_request_handler(&self, handler: Arc<RequestHandler>) -> Registration {
        self.change(|lists, number| drop(lists.request_handlers.insert(number, Slot::new(handler))))
    }

    #[cfg(feature = "history")]
    pub(crate) fn add_recorder(&self, recorder: Arc<dyn Recorder>) -> Registration {
        self.change(|lists, number| drop(lists.recorders.insert(number, Slot::new(recorder))))
    }

    /// Removes an observer or handler. Returns false if it was removed before.
    pub(crate) fn remove(&self, registration: Registration) -> bool {
        let (mut observer, mut handler, mut of_request) = (None, None, None);
        self.change(|lists, _| {
            observer = take(&mut lists.observers, registration);
            of_request = take(&mut lists.request_handlers, registration);
            handler = take(&mut lists.handlers, registration)
                .or_else(|| take(&mut lists.first_handlers, registration));
        });
        observer.is_some_and(|slot| self.end_slot(&slot))
            || handler.is_some_and(|slot| self.end_slot(&slot))
            || of_request.is_some_and(|slot| self.end_slot(&slot))
    }

    /// Removes a recorder. Returns false if it was removed before.
    #[cfg(feature = "history")]
    pub(crate) fn remove_recorder(&self, registration: Registration) -> bool {
        let mut recorder = None;
        self.change(|lists, _| recorder = take(&mut lists.recorders, registration));
        recorder.is_some_and(|slot| self.end_slot(&slot))
    }

    /// Removes all callbacks of an allocator that ended, without waiting for calls in progress: what
    /// its arenas and graphs do later is not observed.
    pub(crate) fn clear(&self) {
        let mut gone = Lists::default();
        self.change(|lists, _| gone = std::mem::take(lists));
        gone.observers.values().for_each(|slot| self.drop_code(slot.remove(false)));
        let handlers = gone.handlers.values().chain(gone.first_handlers.values());
        handlers.for_each(|slot| self.drop_code(slot.remove(false)));
        gone.request_handlers.values().for_each(|slot| self.drop_code(slot.remove(false)));
        gone.recorders.values().for_each(|slot| self.drop_code(slot.remove(false)));
    }

    /// Waits for calls in progress, except inside a callback, and drops the closure.
    fn end_slot<F: ?Sized>(&self, slot: &Slot<F>) -> bool {
        let removed = slot.remove(!is_in_callback());
        let was_there = removed.is_some();
        self.drop_code(removed);
        was_there
    }

    /// Drops a closure. What it captured is user code too.
    fn drop_code<F: ?Sized>(&self, code: Option<Arc<F>>) {
        if let Some(code) = code {
            self.contain(|| drop(code));
        }
    }

    fn change(&self, change: impl FnOnce(&mut Lists, u64)) -> Registration {
        // A forked child calls no callbacks: a thread of the parent may hold a lock of theirs.
        if is_forked() {
            return Registration(0);
        }
        let mut guard = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        // Copies the lists only if an event in progress reads them.
        let lists = Arc::make_mut(&mut guard);
        let number = REGISTRATIONS.fetch_add(1, Ordering::Relaxed);
        change(lists, number);
        let observed = !(lists.observers.is_empty() && lists.recorders.is_empty());
        self.observed.store(observed, Ordering::Relaxed);
        Registration(number)
    }

    fn lists(&self) -> Arc<Lists> {
        Arc::clone(&self.lists.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs user code that is not registered, such as a stack source, as an observer. `None` if it
    /// panicked or callbacks are nested too deep.
    #[cfg(feature = "history")]
    pub(crate) fn run_user<R>(&self, code: impl FnOnce() -> R) -> Option<R> {
        let _frame = Frame::enter(self.allocator, Role::Observer)?;
        self.contain(code)
    }

    /// Runs user code that a crate above registered, as a callback of this group. Panics are counted by `counts`.
    /// `None` if it panicked or callbacks are nested too deep.
    pub(crate) fn call_back<R>(&self, counts: &Observers, code: impl FnOnce() -> R) -> Option<R> {
        let _frame = Frame::enter(self.allocator, Role::Other)?;
        counts.contain(code)
    }

    /// Calls a callback. `None` if it panicked, was removed, or callbacks are nested too deep.
    fn call<F: ?Sized, R>(
        &self,
        slot: &Slot<F>,
        role: Role,
        call: impl FnOnce(&F) -> R,
    ) -> Option<R> {
        let _frame = Frame::enter(self.allocator, role)?;
        let code = slot.begin()?;
        let result = self.contain(move || call(&code));
        slot.end();
        result
    }

    /// Runs user code and counts a panic of it.
    fn contain<R>(&self, code: impl FnOnce() -> R) -> Option<R> {
        let panic = match catch_unwind(AssertUnwindSafe(code)) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        self.panics.fetch_add(1, Ordering::Relaxed);
        // What was thrown may panic when it is dropped.
        if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(second);
        }
        None
    }

    /// Passes an event to every recorder and observer, in order of registration.
    pub(crate) fn notify(&self, event: &Event<'_>) {
        if !self.is_observed() || is_forked() {
            return;
        }
        let nested = runs(|allocator, role| allocator == self.allocator && role == Role::Observer);
        let lists = self.lists();
        for slot in lists.recorders.values() {
            if let Some(recorder) = slot.begin() {
                // The driver may panic too.
                self.contain(move || recorder.record(event, (!nested).then_some(self)));
                slot.end();
            }
        }
        if !nested {
            for slot in lists.observers.values() {
                self.call(slot, Role::Observer, |observer| observer(event));
            }
        }
    }

    /// Calls the handlers that come first, and the others unless one of those freed memory, in order of
    /// registration; those that go on with a request come last. Returns true if one freed memory.
    pub(crate) fn run_handlers(
        &self,
        request: &ShortRequest<'_>,
        relievers: &mut Relievers,
    ) -> bool {
        let lists = self.lists();
        let run = |handlers: &Slots<Handler>| {
            let mut freed = false;
            for slot in handlers.values() {
                let call = self.call(slot, Role::Handler, |handler| handler(request.shortage));
                freed |= call.unwrap_or(false);
            }
            freed
        };
        if run(&lists.first_handlers) {
            return true;
        }
        let mut freed = run(&lists.handlers);
        for slot in lists.request_handlers.values() {
            freed |= self.ask(slot, self, request, relievers);
        }
        freed
    }

    /// Calls the handlers of a group that come before those of its pools, until one freed memory. Panics are
    /// counted by `short`, the observers of the pool that is short.
    pub(crate) fn run_first_handlers(&self, short: &Observers, shortage: &Shortage) -> bool {
        let lists = self.lists();
        let run = |slot: &Arc<Slot<Handler>>| {
            let _frame = Frame::enter(self.allocator, Role::Handler)?;
            let code = slot.begin()?;
            let freed = short.contain(move || code(shortage));
            slot.end();
            freed
        };
        lists.first_handlers.values().any(|slot| run(slot).unwrap_or(false))
    }

    /// Calls the handlers of a group, in order of registration, until one freed memory: what that one freed
    /// may be enough. Panics are counted by `short`, the observers of the pool that is short. Returns true
    /// if one freed memory.
    pub(crate) fn run_group_handlers(
        &self,
        short: &Observers,
        request: &ShortRequest<'_>,
        relievers: &mut Relievers,
    ) -> bool {
        let lists = self.lists();
        lists.request_handlers.values().any(|slot| self.ask(slot, short, request, relievers))
    }

    /// Calls a handler. One that goes on with the request is noted if it freed memory.
    fn ask(
        &self,
        slot: &Arc<Slot<RequestHandler>>,
        short: &Observers,
        request: &ShortRequest<'_>,
        relievers: &mut Relievers,
    ) -> bool {
        let Some(_frame) = Frame::enter(self.allocator, Role::Handler) else { return false };
        let Some(code) = slot.begin() else { return false };
        let mut reliever = None;
        let begun = &mut reliever;
        let freed = short.contain(move || match code(request) {
            Answer::Freed(freed) => freed,
            Answer::GoesOn(reliever) => begun.insert(reliever).free(request.shortage),
        });
        slot.end();
        let freed = freed.unwrap_or(false);
        match reliever {
            Some(reliever) if freed => {
                let slot = Arc::clone(slot);
                relievers.0.push(Begun { slot, owner: self.allocator, reliever });
            }
            reliever => drop(short.contain(|| drop(reliever))),
        }
        freed
    }
}

impl Relievers {
    /// Has all of them free more memory, and drops those that do not. Returns true if one did. Panics are
    /// counted by `short`, the observers of the pool that is short.
    pub(crate) fn free(&mut self, short: &Observers, shortage: &Shortage) -> bool {
        for Begun { slot, owner, mut reliever } in std::mem::take(&mut self.0) {
            let frame = Frame::enter(owner, Role::Handler);
            // Not once the handler was removed.
            let freed = frame.as_ref().and_then(|_| slot.begin()).and_then(|code| {
                let one = &mut reliever;
                let freed = short.contain(move || {
                    let _code = code;
                    one.free(shortage)
                });
                slot.end();
                freed
            });
            match freed.unwrap_or(false) {
                true => self.0.push(Begun { slot, owner, reliever }),
                false => drop(short.contain(|| drop(reliever))),
            }
        }
        !self.0.is_empty()
    }

    /// Drops them.
    pub(crate) fn end(&mut self, short: &Observers) {
        let relievers = std::mem::take(&mut self.0);
        if !relievers.is_empty() {
            short.contain(|| drop(relievers));
        }
    }
}

fn take<F: ?Sized>(slots: &mut Slots<F>, Registration(gone): Registration) -> Option<Arc<Slot<F>>> {
    slots.remove(&gone)
}
