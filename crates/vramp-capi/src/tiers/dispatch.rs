//! Observers of buffers' states, called by a thread of the library.
//!
//! 1. The first observer starts the thread. It takes events out of the manager's queue, in their order,
//!    and calls the observers one after the other, with no lock held.
//! 2. [`Dispatch::remove`] waits until no call of the observer is in progress, except on the thread
//!    itself.
//! 3. [`Dispatch::stop`] ends the thread: events that it has not taken by then are dropped.
//!
//! A queue that is full drops its oldest events; observers get their number. No state of a buffer waits
//! for an observer.
//!
//! Growth: O(observers) for each event, and an id for each buffer.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use rustc_hash::FxHashMap;
use vramp_defer::events::{BufferChange, BufferEvent, EventStream, SpillTier};
use vramp_defer::{BufferId, SpillManager};

use crate::ids::next_id;
use crate::status::{Failure, Kind, Result};
use crate::tiers::abi::vramp_buffer_change_t::*;
use crate::tiers::abi::*;

/// Events that wait for the thread at most.
const CAPACITY: usize = 1 << 16;

/// What an observer does with an event. It does not unwind.
type Call = Box<dyn Fn(&vramp_buffer_event_t) + Send + Sync>;

thread_local! {
    static IS_DISPATCHER: Cell<bool> = const { Cell::new(false) };
}

/// Returns an error on a thread that calls observers: it cannot wait for itself.
pub(crate) fn check_not_dispatcher() -> Result<()> {
    match IS_DISPATCHER.try_with(Cell::get) {
        Ok(true) => {
            let text = "an observer of buffers runs on this thread: return from it, and close then";
            Err(Failure::new(Kind::Busy, text))
        }
        _ => Ok(()),
    }
}

/// The handles of buffers, by the manager's ids.
#[derive(Default)]
struct Ids {
    known: FxHashMap<BufferId, u64>,
    /// The event of a buffer's end removes its id. Without the thread its destruction does.
    is_observed: bool,
}

#[derive(Default)]
struct Observed {
    observers: Vec<Arc<Observer>>,
    thread: Option<Running>,
    is_stopped: bool,
}

struct Running {
    events: Arc<EventStream>,
    thread: JoinHandle<()>,
}

struct Observer {
    number: u64,
    call: Call,
    is_removed: AtomicBool,
    is_running: Mutex<bool>,
    returned: Condvar,
}

struct Shared {
    ids: Mutex<Ids>,
    observed: Mutex<Observed>,
    /// Read while a buffer is made and gets its place in the tables.
    making: RwLock<()>,
    /// Events were dropped since the last look: ids of buffers that ended may be left.
    has_lost: AtomicBool,
}

/// The observers of one manager.
pub(crate) struct Dispatch(Arc<Shared>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dispatch {
    pub fn new() -> Dispatch {
        let (ids, observed) = (Mutex::default(), Mutex::default());
        let (making, has_lost) = (RwLock::new(()), AtomicBool::new(false));
        Dispatch(Arc::new(Shared { ids, observed, making, has_lost }))
    }

    /// Makes a buffer and stores it under its handle. Observers see it once it is stored.
    pub fn make<T>(
        &self,
        make: impl FnOnce() -> Result<(BufferId, T)>,
        store: impl FnOnce(u64, T),
    ) -> Result<u64> {
        let _making = self.0.making.read().unwrap_or_else(PoisonError::into_inner);
        let (buffer, made) = make()?;
        let id = self.0.id_of(buffer);
        store(id, made);
        Ok(id)
    }

    /// Forgets the handle of a buffer that is destroyed, once observers have seen its end.
    pub fn forget(&self, buffer: BufferId, manager: &SpillManager) {
        let mut ids = lock(&self.0.ids);
        if !ids.is_observed {
            ids.known.remove(&buffer);
            return;
        }
        drop(ids);
        if self.0.has_lost.swap(false, Ordering::Relaxed) {
            let mut live: Vec<BufferId> =
                manager.statuses().into_iter().map(|(id, _)| id).collect();
            live.sort_unstable();
            lock(&self.0.ids).known.retain(|id, _| live.binary_search(id).is_ok());
        }
    }

    /// Adds an observer and returns its number.
    pub fn add(&self, manager: &SpillManager, call: Call) -> Result<u64> {
        let observer = Arc::new(Observer {
            number: next_id(),
            call,
            is_removed: AtomicBool::new(false),
            is_running: Mutex::new(false),
            returned: Condvar::new(),
        });
        let number = observer.number;
        let mut observed = lock(&self.0.observed);
        if observed.is_stopped {
            return Err(Failure::new(Kind::NoTiers, "the tiers are being closed"));
        }
        if observed.thread.is_none() {
            observed.thread = Some(self.start(manager)?);
        }
        observed.observers.push(observer);
        Ok(number)
    }

    fn start(&self, manager: &SpillManager) -> Result<Running> {
        let events = Arc::new(manager.events(CAPACITY));
        let (shared, queue) = (Arc::clone(&self.0), Arc::clone(&events));
        let thread = std::thread::Builder::new().name("vramp-buffers".to_owned());
        let thread = thread.spawn(move || shared.run(&queue)).map_err(|error| {
            let text = format!("no thread for observers could be started: {error}");
            Failure::new(Kind::OutOfMemory, text)
        })?;
        lock(&self.0.ids).is_observed = true;
        Ok(Running { events, thread })
    }

    /// Removes an observer, and waits for its call in progress. Returns false if it is unknown.
    pub fn remove(&self, number: u64) -> bool {
        let mut observed = lock(&self.0.observed);
        let place = observed.observers.iter().position(|observer| observer.number == number);
        let Some(place) = place else { return false };
        let observer = observed.observers.remove(place);
        drop(observed);
        observer.is_removed.store(true, Ordering::Relaxed);
        observer.wait_returned();
        true
    }

    /// Ends the thread after the call in progress. On the thread itself it does not wait.
    pub fn stop(&self) {
        let mut observed = lock(&self.0.observed);
        observed.is_stopped = true;
        let (thread, observers) = (observed.thread.take(), std::mem::take(&mut observed.observers));
        drop(observed);
        for observer in &observers {
            observer.is_removed.store(true, Ordering::Relaxed);
        }
        let Some(Running { events, thread }) = thread else { return };
        events.close();
        if thread.thread().id() != std::thread::current().id() {
            // It ends without a panic: observers are called inside a barrier.
            let _ = thread.join();
        }
    }
}

impl Drop for Dispatch {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Observer {
    fn call(&self, event: &vramp_buffer_event_t) {
        // Set before the look, so that a removal waits or the observer is not called.
        *lock(&self.is_running) = true;
        if !self.is_removed.load(Ordering::Relaxed) {
            (self.call)(event);
        }
        *lock(&self.is_running) = false;
        self.returned.notify_all();
    }

    fn wait_returned(&self) {
        if IS_DISPATCHER.try_with(Cell::get) == Ok(true) {
            return;
        }
        let mut is_running = lock(&self.is_running);
        while *is_running {
            is_running = self.returned.wait(is_running).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn id_of(&self, buffer: BufferId) -> u64 {
        *lock(&self.ids).known.entry(buffer).or_insert_with(next_id)
    }

    /// Calls the observers until the queue is closed.
    fn run(&self, queue: &EventStream) {
        IS_DISPATCHER.set(true);
        while let Ok(event) = queue.recv(Duration::MAX) {
            let lost = queue.take_lost();
            if lost > 0 {
                self.has_lost.store(true, Ordering::Relaxed);
                self.deliver(&lost_event(lost));
            }
            if event.change == BufferChange::Created {
                drop(self.making.write().unwrap_or_else(PoisonError::into_inner));
            }
            self.deliver(&self.to_c(&event));
            if event.change == BufferChange::Freed {
                lock(&self.ids).known.remove(&event.buffer);
            }
        }
    }

    fn deliver(&self, event: &vramp_buffer_event_t) {
        let observers = lock(&self.observed).observers.clone();
        observers.iter().for_each(|observer| observer.call(event));
    }

    fn to_c(&self, event: &BufferEvent) -> vramp_buffer_event_t {
        let device = VRAMP_TIER_DEVICE;
        let (change, from, to, bytes) = match event.change {
            BufferChange::Created => (VRAMP_BUFFER_CREATED, device, device, 0),
            BufferChange::Deferred { to, bytes } => {
                (VRAMP_BUFFER_WAS_DEFERRED, device, tier_to_c(to), bytes.count())
            }
            BufferChange::Retrieved { from, bytes } => {
                (VRAMP_BUFFER_RETRIEVED, tier_to_c(from), device, bytes.count())
            }
            BufferChange::Moved { from, to, bytes } => {
                (VRAMP_BUFFER_MOVED, tier_to_c(from), tier_to_c(to), bytes.count())
            }
            BufferChange::Locked => (VRAMP_BUFFER_LOCKED, device, device, 0),
            BufferChange::Unlocked => (VRAMP_BUFFER_UNLOCKED, device, device, 0),
            BufferChange::Discarded => (VRAMP_BUFFER_DISCARDED, device, device, 0),
            BufferChange::Freed => (VRAMP_BUFFER_FREED, device, device, 0),
            _ => (VRAMP_BUFFER_OTHER_CHANGE, device, device, 0),
        };
        vramp_buffer_event_t {
            change,
            from,
            to,
            leases: u32::try_from(event.status.leases).unwrap_or(u32::MAX),
            buffer: vramp_buffer_t { id: self.id_of(event.buffer) },
            bytes,
            size: event.status.len.count(),
            deferred_bytes: event.status.deferred.count(),
            at_ns: event.at_ns,
        }
    }
}

fn lost_event(count: u64) -> vramp_buffer_event_t {
    vramp_buffer_event_t {
        change: VRAMP_BUFFER_EVENTS_LOST,
        from: VRAMP_TIER_DEVICE,
        to: VRAMP_TIER_DEVICE,
        leases: 0,
        buffer: vramp_buffer_t::default(),
        bytes: count,
        size: 0,
        deferred_bytes: 0,
        at_ns: 0,
    }
}

fn tier_to_c(tier: SpillTier) -> u32 {
    match tier {
        SpillTier::Peer(_) => VRAMP_TIER_PEER,
        SpillTier::Host => VRAMP_TIER_HOST,
        SpillTier::Disk => VRAMP_TIER_DISK,
    }
}
