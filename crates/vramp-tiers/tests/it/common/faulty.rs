//! A disk that fails on purpose, and a test alone in a child process, which is then killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vramp_host::{BlockIo, DirectFile, Direction, DiskError, IoChoice, IoRequest, OsCode, open_io};
use vramp_tiers::Bytes;
use vramp_tiers::disk::FileNames;

// --- A disk that fails on purpose ---

pub const EINTR: i32 = 4;
pub const EIO: i32 = 5;
pub const EAGAIN: i32 = 11;
pub const ENOSPC: i32 = 28;

/// What happens to one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It fails with this code.
    Fail(i32),
    /// It moves so much at most.
    Short(Bytes),
}

type Rule = Box<dyn FnMut(&IoRequest) -> Fault + Send>;

/// Every call in this direction fails with this code.
pub fn fail(direction: Direction, code: i32) -> impl FnMut(&IoRequest) -> Fault + Send {
    move |request| if request.direction == direction { Fault::Fail(code) } else { Fault::None }
}

/// Three calls of four are interrupted, deferred or cut short.
pub fn stumbling() -> impl FnMut(&IoRequest) -> Fault + Send {
    let mut random = fastrand::Rng::with_seed(5);
    move |_| match random.u8(0..4) {
        0 => Fault::Fail(EINTR),
        1 => Fault::Fail(EAGAIN),
        2 => Fault::Short(Bytes::kib(4) * random.u64(1..9)),
        _ => Fault::None,
    }
}

/// A real engine behind rules that tests change.
pub struct Faulty {
    io: Arc<dyn BlockIo>,
    rule: Mutex<Rule>,
    /// Files can have no more than this.
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

    /// From here on no call ends.
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

// --- Runs one test alone in a child process, which is then killed ---

/// Environment variable with the child's directory.
pub const DIR: &str = "VRAMP_TEST_CHILD_DIR";
/// Environment variable that hides the child's files.
const HIDDEN: &str = "VRAMP_TEST_CHILD_HIDDEN";
const READY: &str = "the child is at work";

/// Returns the directory, if this process is the child.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// In the child: returns how its files are named.
pub fn names() -> FileNames {
    std::env::var_os(HIDDEN).map_or(FileNames::Shown, |_| FileNames::Hidden)
}

/// In the child: lets [`Child::start`] return.
pub fn ready() {
    println!("{READY}");
}

pub struct Child {
    process: std::process::Child,
    /// Holds the child's temporary files, which a killed process does not remove.
    _scratch: tempfile::TempDir,
}

impl Child {
    /// Starts the test `name` alone in `directory`. Returns once it calls [`ready`].
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

    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Kills the child.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    /// A failed test leaves no child behind.
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}
