//! What tests share: a disk that fails on purpose, a device with hooks in set-access, before records and after
//! waits for events, and a test of this program in a child process, to be killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vramp_alloc::Driver;
use vramp_core::AddrRange;
use vramp_driver::sim::Simulator;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{DriverResult, Event, Stream};
use vramp_host::{BlockIo, DirectFile, DiskError, IoChoice, IoRequest, OsCode, open_io};
use vramp_tiers::Bytes;
use vramp_tiers::disk::FileNames;

// --- A disk that fails on purpose ---

pub const EINTR: i32 = 4;
pub const EIO: i32 = 5;
pub const ENOSPC: i32 = 28;

/// Outcome of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Fails with this code.
    Fail(i32),
    /// Moves at most so many bytes.
    Short(Bytes),
}

type Rule = Box<dyn FnMut(&IoRequest) -> Fault + Send>;

/// A real engine with faults that tests set.
pub struct Faulty {
    io: Arc<dyn BlockIo>,
    rule: Mutex<Rule>,
    /// Largest size of a file.
    pub room: AtomicU64,
    /// The largest call so far.
    pub largest: AtomicU64,
    /// Calls that wait until the gate opens.
    held: Mutex<Option<Vec<IoRequest>>>,
}

impl Faulty {
    pub fn new() -> Arc<Faulty> {
        Faulty::on(IoChoice::Auto)
    }

    pub fn on(choice: IoChoice) -> Arc<Faulty> {
        let io = open_io(choice, 8).unwrap().io;
        let rule: Mutex<Rule> = Mutex::new(Box::new(|_| Fault::None));
        let (room, largest) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
        Arc::new(Faulty { io, rule, room, largest, held: Mutex::default() })
    }

    pub fn set(&self, rule: impl FnMut(&IoRequest) -> Fault + Send + 'static) {
        *self.rule.lock().unwrap() = Box::new(rule);
    }

    pub fn heal(&self) {
        self.set(|_| Fault::None);
    }

    /// From here on no call returns.
    pub fn close_gate(&self) {
        self.held.lock().unwrap().get_or_insert_default();
    }

    pub fn open_gate(&self) {
        let held = self.held.lock().unwrap().take();
        self.submit(held.unwrap_or_default());
    }
}

impl BlockIo for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn depth(&self) -> usize {
        self.io.depth()
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        if let Some(held) = &mut *self.held.lock().unwrap() {
            held.extend(batch);
            return;
        }
        for mut request in batch {
            self.largest.fetch_max(request.span.len().count(), Ordering::Relaxed);
            let fault = (self.rule.lock().unwrap())(&request);
            match fault {
                Fault::None => self.io.submit(vec![request]),
                Fault::Fail(code) => (request.done)(Err(OsCode(code))),
                Fault::Short(most) => {
                    let len = request.span.len().min(most);
                    request.span = request.span.part(Bytes::ZERO, len).unwrap();
                    self.io.submit(vec![request]);
                }
            }
        }
    }

    fn preallocate(&self, file: &DirectFile, len: Bytes) -> Result<(), DiskError> {
        if len.count() > self.room.load(Ordering::Relaxed) {
            return Err(DiskError::at(
                "getting its blocks",
                file.path(),
                Bytes::ZERO,
                len,
                OsCode(ENOSPC),
            ));
        }
        self.io.preallocate(file, len)
    }
}

// --- A device with hooks in set-access, before records and after waits for events ---

type Hook = Box<dyn Fn(AddrRange) + Send>;

/// A simulator with hooks.
pub struct Hooked {
    sim: Arc<Simulator>,
    hook: Mutex<Option<Hook>>,
    waited: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    recording: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Hooked {
    pub fn on(sim: Arc<Simulator>) -> Wrapped<Hooked> {
        let (hook, waited, recording) = Default::default();
        Wrapped(Hooked { sim, hook, waited, recording })
    }

    /// Called in each set-access from now on; `None` for no more.
    pub fn set(&self, hook: Option<Hook>) {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    /// Called once, when the next wait for an event has ended and before its thread continues.
    pub fn after_wait(&self, hook: impl FnOnce() + Send + 'static) {
        *self.waited.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
    }

    /// Called once, just before the next record of an event.
    pub fn before_record(&self, hook: impl FnOnce() + Send + 'static) {
        *self.recording.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
    }

    fn hook_record(&self) {
        let hook = self.recording.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

impl Wrapper for Hooked {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        if let Some(hook) = &*self.hook.lock().unwrap_or_else(PoisonError::into_inner) {
            hook(range);
        }
        self.sim.set_access(range, peers)
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.hook_record();
        self.sim.record(event, stream)
    }

    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        self.hook_record();
        self.sim.record_outside(event, stream)
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        let waited = self.sim.synchronize_event(event);
        let hook = self.waited.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(hook) = hook {
            hook();
        }
        waited
    }
}

// --- Runs a test of its own executable in a child process, to be killed ---

/// Directory in which the child of a test works.
pub const DIR: &str = "VRAMP_TEST_CHILD_DIR";
/// Set if the child hides its files.
const HIDDEN: &str = "VRAMP_TEST_CHILD_HIDDEN";
const READY: &str = "the child is at work";

/// Returns the directory, if this process is the child.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// In the child: returns whether its files are visible.
pub fn names() -> FileNames {
    std::env::var_os(HIDDEN).map_or(FileNames::Shown, |_| FileNames::Hidden)
}

/// In the child: lets [`Child::start`] return.
pub fn ready() {
    println!("{READY}");
}

pub struct Child {
    process: std::process::Child,
    /// Temporary files of the child, which cannot remove them itself.
    _scratch: tempfile::TempDir,
}

impl Child {
    /// Starts the test `name` alone in `directory`. Returns once it is ready.
    pub fn start(name: &str, directory: &Path, names: FileNames) -> Child {
        let scratch = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture"]).stdout(Stdio::piped());
        command.env(DIR, directory).env("TMPDIR", scratch.path());
        if names == FileNames::Hidden {
            command.env(HIDDEN, "");
        }
        let mut child = Child { process: command.spawn().unwrap(), _scratch: scratch };
        let mut lines = BufReader::new(child.process.stdout.as_mut().unwrap()).lines();
        let ready = lines.any(|line| line.unwrap().contains(READY));
        assert!(ready, "the child ended early");
        child
    }

    /// Without a chance to tidy up.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    /// A test that fails leaves no child at work.
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}
