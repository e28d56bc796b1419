//! What this library has in a process: made at the first call of a hook, and anew in a forked child.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, Once, OnceLock};

use rustc_hash::FxHashMap;
use vramp_trace::spool::{Api, Change};

use crate::driver::{DEVICES, Place};
use crate::gate;
use crate::ledger::{Block, Ledger, Source};
use crate::limit::Limit;
use crate::pool::Pool;
use crate::record::{Changed, Recorder};
use crate::report::{Report, write_line};
use crate::settings::{self, Settings};
use crate::sleep;

/// The state of a process.
#[derive(Debug)]
pub struct Process {
    pub settings: &'static Settings,
    pub ledger: Ledger,
    recorder: Option<Recorder>,
    pub limit: Option<Limit>,
    /// Where the handles are that the program has created: a device's number, or `None` for the host.
    pub handles: Mutex<FxHashMap<u64, Option<usize>>>,
    pool: OnceLock<Option<Pool>>,
}

/// Null before the first call. A state is never freed: threads that end late may use it.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

thread_local! {
    /// True while a hook of this thread is at work: what it calls is not the program's.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A hook at work. The program's memory does not leave meanwhile.
#[derive(Debug)]
pub struct Inside {
    is_gated: bool,
}

impl Drop for Inside {
    fn drop(&mut self) {
        IS_INSIDE.set(false);
        if self.is_gated {
            gate::leave();
        }
    }
}

/// Enters a hook, once the program's memory is on the card. `None` if the call is not the program's, or there is nothing
/// to do.
#[inline]
pub fn enter() -> Option<(&'static Process, Inside)> {
    if is_inside() {
        return None;
    }
    let process = process()?;
    let is_gated = process.settings.is_sleepable;
    if is_gated {
        gate::enter();
    }
    IS_INSIDE.set(true);
    Some((process, Inside { is_gated }))
}

/// Returns true while a hook of this thread is at work.
#[inline]
pub fn is_inside() -> bool {
    IS_INSIDE.get()
}

/// Makes the calling thread one of this library's own: no call of it is the program's.
pub fn be_inside() {
    IS_INSIDE.set(true);
}

/// Returns the state of the process, if a hook was called.
pub fn begun() -> Option<&'static Process> {
    // SAFETY: as in `process`.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

#[inline]
fn process() -> Option<&'static Process> {
    let known = PROCESS.load(Ordering::Acquire);
    // SAFETY: a state that was stored is never freed, and changed only through its locks.
    match unsafe { known.as_ref() } {
        Some(process) => Some(process),
        None => begin(),
    }
}

#[cold]
fn begin() -> Option<&'static Process> {
    if !settings::is_active() {
        return None;
    }
    static ONCE: Once = Once::new();
    let mut is_first = false;
    let new = Process::begin(settings::settings());
    let new = Box::into_raw(Box::new(new));
    let race =
        PROCESS.compare_exchange(std::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
    let process = match race {
        Ok(_) => new,
        Err(other) => {
            // SAFETY: no other thread has seen the new state.
            drop(unsafe { Box::from_raw(new) });
            other
        }
    };
    ONCE.call_once(|| is_first = true);
    if is_first {
        // SAFETY: the handlers have no precondition. Without memory for them a child would write to its parent's
        // recording, or there is no report: neither can be helped.
        unsafe { libc::pthread_atfork(None, None, Some(begin_anew)) };
        // SAFETY: as above.
        unsafe { libc::atexit(report) };
    }
    // SAFETY: as in `process`.
    unsafe { process.as_ref() }
}

/// In a forked child: what the parent has is not the child's.
extern "C" fn begin_anew() {
    PROCESS.store(std::ptr::null_mut(), Ordering::Release);
    IS_INSIDE.set(false);
    IS_REPORTED.store(false, Ordering::Relaxed);
    gate::reset();
    sleep::reset();
}

/// Lets the report be written before the driver ends, which has begun by now.
fn report_before_the_driver_ends() {
    // SAFETY: the handler has no precondition.
    unsafe { libc::atexit(report) };
}

/// True once the report is written: it is by the first of two handlers.
static IS_REPORTED: AtomicBool = AtomicBool::new(false);

/// At the end of the process.
extern "C" fn report() {
    IS_INSIDE.set(true);
    if let Some(process) = begun()
        && !IS_REPORTED.swap(true, Ordering::Relaxed)
    {
        process.write_report();
    }
    IS_INSIDE.set(false);
}

impl Process {
    fn begin(settings: &'static Settings) -> Process {
        let recorder = settings.record.as_deref().and_then(|folder| {
            let begun = Recorder::begin(folder, settings.frames);
            begun
                .inspect_err(|error| {
                    write_line(&format!(
                        "vramp exec: nothing is recorded, because {} cannot be written: {error}",
                        folder.display()
                    ));
                })
                .ok()
        });
        Process {
            settings,
            ledger: Ledger::new(),
            recorder,
            limit: settings.limit.map(Limit::new),
            handles: Mutex::default(),
            pool: OnceLock::new(),
        }
    }

    /// Returns the pool, if requests at a place are its own.
    pub fn pool_at(&self, place: Place) -> Option<&Pool> {
        let pool = self.pool()?;
        let serves = place.is_primary && pool.serves(place.device, report_before_the_driver_ends);
        serves.then_some(pool)
    }

    /// Returns the pool. The first call opens its library.
    pub fn pool(&self) -> Option<&Pool> {
        let settings = self.settings.pool.as_ref()?;
        if let Some(opened) = self.pool.get() {
            return opened.as_ref();
        }
        // No thread waits for another here: one may hold the dynamic linker's lock, which opening takes, in the
        // initialiser of a library. Of two threads that open it, the first counts.
        let opened = Pool::open(settings, self.settings);
        let why = opened.as_ref().err().cloned();
        let is_first = self.pool.set(opened.ok()).is_ok();
        if let Some(why) = why.filter(|_| is_first) {
            write_line(&format!("vramp exec: nothing is pooled: {why}"));
        }
        self.pool_if_open()
    }

    /// Returns the pool, if its library is open.
    pub fn pool_if_open(&self) -> Option<&Pool> {
        self.pool.get()?.as_ref()
    }

    /// Returns true for the first address of a block of the pool.
    pub fn is_pooled(&self, address: u64) -> bool {
        self.ledger.get(address).is_some_and(Block::is_pooled)
    }

    /// Records a change of what the program holds, if there is a recording.
    #[inline]
    pub fn record(&self, changed: Changed) {
        if let Some(recorder) = &self.recorder {
            recorder.record(changed);
        }
    }

    /// Forgets blocks that are gone with their device or context, and frees each with `free`.
    pub fn lose(&self, api: Api, is_gone: impl Fn(&Block) -> bool, free: impl Fn(u64, Block)) {
        for (address, block) in self.ledger.take(is_gone) {
            let change = Change::Free;
            let Block { size, device, source, .. } = block;
            self.record(Changed { change, api, device, address, size, stream: 0 });
            free(address, block);
            if let Some(limit) = self.limit.as_ref().filter(|_| source != Source::Managed) {
                limit.credit(device, size);
            }
        }
    }

    fn write_report(&self) {
        let Some(folder) = &self.settings.report else { return };
        let mut report = Report::default();
        for device in 0..DEVICES {
            let (held, peak) = self.ledger.held(device);
            if peak == 0 {
                continue;
            }
            report.add("device", device);
            report.add("held", held);
            report.add("held_peak", peak);
            if let Some(stats) = self.pool_if_open().and_then(|pool| pool.stats(device)) {
                report.add("pool_live_peak", stats.live_peak);
                report.add("pool_reserved_peak", stats.reserved_peak);
            }
        }
        if let Some(pool) = self.pool_if_open() {
            let (served, failed) = pool.requests();
            report.add("served", served);
            report.add("failed", failed);
        }
        report.write(folder);
    }
}
