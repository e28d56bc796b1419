//! Callbacks of the program around a sleep: before memory leaves, and after it is back.
//!
//! What another library knows of memory by its physical pages (windows of NCCL, registrations of network cards) has
//! to end before the memory leaves, and is made again when it is back:
//!
//! ```
//! # use vramp_alloc::{Allocator, Bytes, Config};
//! # use vramp_tiers::host::{HostPool, HostPoolConfig};
//! # use vramp_tiers::movers::{Mover, MoverConfig};
//! # use vramp_tiers::{ReservationManager, SpaceConfig, SpaceId};
//! use std::sync::{Arc, Mutex};
//!
//! use vramp_alloc::sharing::range_of;
//! use vramp_tiers::regions::{PauseOptions, RegionOptions, Regions, SleepCallbacks};
//!
//! # let device = vramp_alloc::open("sim:h200")?;
//! # let allocator = Allocator::new(device.clone(), Config::default())?;
//! # let host = ReservationManager::new([(SpaceId::host(0), SpaceConfig::host(Bytes::gib(1)))])?;
//! # let host = host.space(SpaceId::host(0)).expect("it was configured");
//! # let pinned = HostPool::new(&host, HostPoolConfig::default(), [device.clone()])?;
//! # let regions = Regions::new(Mover::new(device, &pinned, MoverConfig::default())?);
//! let region = regions.region(&allocator, "kv", RegionOptions::default())?;
//! let block = region.allocator().malloc(Bytes::mib(64), allocator.create_stream()?)?;
//! let range = range_of(&block);
//! let pin = region.allocator().pin_range(range)?;             // of what another library registered
//! let pin = Arc::new(Mutex::new(Some(pin)));
//!
//! let held = Arc::clone(&pin);
//! let registration = regions.callbacks().add(SleepCallbacks {
//!     tags: Some(vec!["kv".to_owned()]),
//!     before: Box::new(move || Ok(drop(held.lock().expect("no holder panics").take()))),
//!     after: Box::new(move || {
//!         *pin.lock().expect("no holder panics") = Some(region.allocator().pin_range(range)?);
//!         Ok(())
//!     }),
//!     ..SleepCallbacks::named("the network card")
//! });
//! regions.pause(&["kv"], PauseOptions::default())?;
//! regions.resume(&["kv"])?;
//! regions.callbacks().remove(registration);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # When they are called
//!
//! 1. A pause calls `before` of each pair that covers one of its regions, in the order of registration, on its own
//!    thread, before it waits for the card and looks for pins. A pair whose `before` was called already, because
//!    another of its regions sleeps, is left out. A region of which nothing is on the card calls none.
//! 2. If one fails the pause does not happen: [`RegionError::Before`]. If the pause fails later, or one `before` does,
//!    `after` of those that were called is called.
//! 3. A resume calls `after` of each pair of which no region sleeps any more, in reverse order. If one fails the others
//!    are called all the same: [`RegionError::After`]. The memory is back, and the next resume of one of its regions
//!    calls it again, also where they are awake.
//! 4. `after` is called only where `before` succeeded. A pair that is registered while a region sleeps begins with the
//!    next pause. A region that is removed while it sleeps keeps no pair from being called by the next resume.
//!
//! A capture of a stream refuses the pause before any call.
//!
//! # What they may do
//!
//! A callback may allocate, free, export, pin, and add and remove callbacks; those that it adds begin with the next
//! pause. A pause, a resume and every other call that moves or reads a region is [`RegionError::InCallback`]. No lock
//! of vramp is held, but one pair is called by one thread at a time: moves of regions that it covers wait for it,
//! all other calls go on. So a slow one makes those slow, and if one never returns, nor does the pause. It must not wait
//! for a thread that pauses or resumes, or that is short of memory where [pressure](super::Regions::on_pressure) is used. A panic is
//! an error, and counted in [`Stats`](vramp_alloc::stats::Stats).
//!
//! Under [pressure](super::Regions::on_pressure) the thread of the request calls them, perhaps within the resume of another
//! region. A region is left out while it has a pair whose calls wait for other processes
//! ([`is_collective`](SleepCallbacks::is_collective)), or that another thread calls; and where a `before` fails.
//!
//! Growth: a move looks at the pairs that cover its regions, and at those that cover all. Registered, a pair takes
//! some 200 bytes and its tags.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use vramp_alloc::Allocator;
use vramp_alloc::observe::{Registration, is_in_callback};

use super::core::callbacks::{CallbackTable, Step};
use super::error::{CallbackError, FailedCallback, RegionError};
use super::region::Region;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};

type Callback = Box<dyn Fn() -> Result<(), CallbackError> + Send + Sync>;

/// A pair of callbacks around the sleep of regions. See [the module](self).
pub struct SleepCallbacks {
    /// For errors.
    pub name: String,
    /// Tags of the regions that it covers, whether they exist or not. `None` covers all.
    pub tags: Option<Vec<String>>,
    /// Its calls wait for other processes, which have to pause and resume too: the regions that it covers are
    /// not paused under pressure, which other processes need not have.
    pub is_collective: bool,
    /// Called before memory leaves.
    pub before: Callback,
    /// Called after memory is back.
    pub after: Callback,
}

impl SleepCallbacks {
    /// Returns a pair for all regions that does nothing.
    pub fn named(name: &str) -> SleepCallbacks {
        SleepCallbacks {
            name: name.to_owned(),
            tags: None,
            is_collective: false,
            before: Box::new(|| Ok(())),
            after: Box::new(|| Ok(())),
        }
    }
}

impl fmt::Debug for SleepCallbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "callbacks {:?} of {:?}", self.name, self.tags)
    }
}

#[derive(Default)]
struct Registered {
    table: CallbackTable,
    code: BTreeMap<u64, Arc<SleepCallbacks>>,
}

#[derive(Default)]
struct Shared {
    registered: Mutex<Registered>,
    /// A call ended.
    changed: Condvar,
}

thread_local! {
    static IS_CALLING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The callbacks around the sleep of a set of regions. Clones are the same.
#[derive(Clone, Default)]
pub struct Callbacks {
    shared: Arc<Shared>,
}

/// Callbacks that were called for a pause that is in progress.
#[must_use = "the pause has to be ended"]
pub(super) struct Leaving<'a> {
    callbacks: &'a Callbacks,
    regions: Vec<&'a Arc<Region>>,
    numbers: Vec<u64>,
}

impl Callbacks {
    /// Registers a pair. O(tags log callbacks).
    pub fn add(&self, callbacks: SleepCallbacks) -> Registration {
        let tags =
            callbacks.tags.as_ref().map(|tags| tags.iter().cloned().collect::<BTreeSet<_>>());
        let mut registered = lock(&self.shared.registered);
        // Within the lock, so that numbers are in the order of registration.
        let registration = Registration::unused();
        registered.table.add(registration.number(), tags, callbacks.is_collective);
        registered.code.insert(registration.number(), Arc::new(callbacks));
        registration
    }

    /// Removes a pair: none of the two is called from then on, also where its `before` was. Waits for a call in
    /// progress on another thread, except inside a callback, and drops the closures. Returns false if it was removed
    /// before.
    pub fn remove(&self, registration: Registration) -> bool {
        let number = registration.number();
        let mut registered = lock(&self.shared.registered);
        while registered.table.is_busy(number) && !is_in_callback() {
            registered = self.wait(registered);
        }
        let is_found = registered.table.remove(number);
        let code = registered.code.remove(&number);
        drop(registered);
        // What the closures have is the program's.
        drop(code);
        is_found
    }

    fn wait<'a>(&self, registered: MutexGuard<'a, Registered>) -> MutexGuard<'a, Registered> {
        self.shared.changed.wait(registered).unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Fails inside one of these callbacks.
    pub(super) fn refuse_inside() -> Result<(), RegionError> {
        match IS_CALLING.get() {
            true => Err(RegionError::InCallback),
            false => Ok(()),
        }
    }

    /// Calls what has to be called before memory of these regions leaves.
    pub(super) fn before<'a>(
        &'a self,
        regions: impl Iterator<Item = &'a Arc<Region>>,
    ) -> Result<Leaving<'a>, RegionError> {
        let leaving = self.leave(regions.filter(|region| region.has_memory_to_give()).collect());
        leaving.call_all()
    }

    /// As [`before`](Callbacks::before) for a region that leaves under pressure. `None` where it has to wait.
    pub(super) fn before_at_once<'a>(&'a self, region: &'a Arc<Region>) -> Option<Leaving<'a>> {
        if IS_CALLING.get() {
            return None;
        }
        let leaving = self.leave(vec![region]);
        let in_the_way = lock(&self.shared.registered).table.is_in_the_way(&leaving.numbers);
        if in_the_way {
            // It called nothing, so nothing can fail.
            let _ = leaving.end(Ok(()));
            return None;
        }
        leaving.call_all().ok()
    }

    fn leave<'a>(&'a self, regions: Vec<&'a Arc<Region>>) -> Leaving<'a> {
        let mut registered = lock(&self.shared.registered);
        for region in &regions {
            registered.table.leave(region.tag());
        }
        let numbers = registered.table.covering(regions.iter().map(|region| region.tag()));
        drop(registered);
        Leaving { callbacks: self, regions, numbers }
    }

    /// Notes that a region is no longer in the set.
    pub(super) fn forget(&self, tag: &str) {
        lock(&self.shared.registered).table.note(tag, false);
    }

    /// Calls what has to be called after a resume of these regions that returned `resumed`.
    pub(super) fn after(
        &self,
        regions: &[Arc<Region>],
        resumed: Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        let mut registered = lock(&self.shared.registered);
        for region in regions {
            registered.table.note(region.tag(), region.sleeps());
        }
        let numbers = registered.table.covering(regions.iter().map(|region| region.tag()));
        drop(registered);
        self.call_after(regions.first(), &numbers, resumed)
    }

    fn call_after(
        &self,
        region: Option<&Arc<Region>>,
        numbers: &[u64],
        result: Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        let Some(region) = region else { return result };
        let mut failed = Vec::new();
        for &number in numbers.iter().rev() {
            if let Some(code) = self.take(number, CallbackTable::take_in) {
                let called = self.call(number, region.allocator(), &code.after);
                failed.extend(called.err().map(|error| FailedCallback::new(&code.name, error)));
            }
        }
        match (result, failed.is_empty()) {
            (result, true) => result,
            (Ok(()), false) => Err(RegionError::After { failed }),
            (Err(error), false) => Err(RegionError::AndAfter { error: Box::new(error), failed }),
        }
    }

    /// Begins a call, once no other thread calls the pair. `None` if none is needed.
    fn take(
        &self,
        number: u64,
        take: impl Fn(&mut CallbackTable, u64) -> Step,
    ) -> Option<Arc<SleepCallbacks>> {
        let mut registered = lock(&self.shared.registered);
        loop {
            match take(&mut registered.table, number) {
                Step::Call => return registered.code.get(&number).cloned(),
                Step::Wait => registered = self.wait(registered),
                Step::Nothing => return None,
            }
        }
    }

    fn call(
        &self,
        number: u64,
        allocator: &Allocator,
        callback: &Callback,
    ) -> Result<(), CallbackError> {
        let called = allocator.call_back(|| {
            let outer = IS_CALLING.replace(true);
            // Also after a panic.
            let _inside = RestoreOnDrop(outer);
            callback()
        });
        let failed = || Err("it panicked, or callbacks are nested too deep".into());
        let called = called.unwrap_or_else(failed);
        lock(&self.shared.registered).table.called(number, called.is_ok());
        self.shared.changed.notify_all();
        called
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(lock(&self.shared.registered).code.values()).finish()
    }
}

struct RestoreOnDrop(bool);

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        IS_CALLING.set(self.0);
    }
}

impl<'a> Leaving<'a> {
    fn call_all(self) -> Result<Leaving<'a>, RegionError> {
        let Some(region) = self.regions.first() else { return Ok(self) };
        let mut has_called = false;
        for &number in &self.numbers {
            let Some(code) = self.callbacks.take(number, CallbackTable::take_out) else { continue };
            let refused = match has_called {
                true => Ok(()),
                false => region.refuse_captures(),
            };
            has_called = true;
            let called = match refused {
                Ok(()) => {
                    let called = self.callbacks.call(number, region.allocator(), &code.before);
                    called.map_err(|error| {
                        RegionError::Before(FailedCallback::new(&code.name, error))
                    })
                }
                Err(error) => {
                    self.callbacks.not_called(number);
                    Err(error)
                }
            };
            if let Err(error) = called {
                return Err(self.end(Err(error)).expect_err("it is an error"));
            }
        }
        Ok(self)
    }

    /// Notes the end of the pause, and calls what has to be called where memory stayed or is back.
    pub fn end(self, result: Result<(), RegionError>) -> Result<(), RegionError> {
        let Leaving { callbacks, regions, numbers } = self;
        let mut registered = lock(&callbacks.shared.registered);
        for region in &regions {
            registered.table.left(region.tag(), region.sleeps());
        }
        drop(registered);
        callbacks.call_after(regions.first().copied(), &numbers, result)
    }
}

impl Callbacks {
    /// Notes that a call which was begun was not made.
    fn not_called(&self, number: u64) {
        lock(&self.shared.registered).table.called(number, false);
        self.shared.changed.notify_all();
    }
}
