//! A disk that fails on purpose.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vramp_host::{BlockIo, DirectFile, DiskError, IoChoice, IoRequest, OsCode, open_io};
use vramp_tiers::Bytes;

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
