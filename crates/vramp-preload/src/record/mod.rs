//! The recording of a process: what it requests and frees, for `vramp explain`, `advise` and `replay`.
//!
//! A call costs an encoded record of 48 bytes, and a stack where one is asked for: under a microsecond together. The
//! events are in the order in which the memory changed hands: a block's free is written before the driver has it.

mod spool;
mod stacks;

use std::borrow::Cow;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use vramp_trace::spool::{Api, Change, Event, Record, encode};

use self::spool::Spool;
use self::stacks::{Stack, Stacks};
use crate::driver::{self, DEVICES};

/// A change of what the program holds.
#[derive(Clone, Copy, Debug)]
pub struct Changed {
    pub change: Change,
    pub api: Api,
    pub device: usize,
    pub address: u64,
    pub size: u64,
    pub stream: usize,
}

/// The recording.
#[derive(Debug)]
pub struct Recorder {
    inner: Mutex<Inner>,
    described: [AtomicBool; DEVICES],
}

#[derive(Debug)]
struct Inner {
    /// `None` once the disk was full.
    spool: Option<Spool>,
    stacks: Stacks,
    modules: u32,
    bytes: Vec<u8>,
}

impl Recorder {
    /// Begins a recording in a folder.
    pub fn begin(folder: &Path, frames: usize) -> io::Result<Recorder> {
        let spool = Spool::create(folder)?;
        let command = std::fs::read("/proc/self/cmdline").unwrap_or_default();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut inner = Inner {
            spool: Some(spool),
            stacks: Stacks::new(frames),
            modules: 0,
            bytes: Vec::new(),
        };
        let command = command.strip_suffix(b"\0").unwrap_or(&command);
        inner.put(&Record::Program {
            start_us: since.as_micros() as u64,
            start_ns: now(),
            command,
        });
        inner.write();
        let described = [const { AtomicBool::new(false) }; DEVICES];
        Ok(Recorder { inner: Mutex::new(inner), described })
    }

    /// Records a change with the stack of the caller.
    pub fn record(&self, changed: Changed) {
        // Before the lock: a thread that holds the dynamic linker's lock, which functions of the driver are looked up
        // with, may wait for this one.
        let is_new = !self.described[changed.device].load(Ordering::Acquire);
        let device = is_new.then(|| driver::describe(changed.device));
        let mut inner = self.lock();
        if inner.spool.is_none() {
            return;
        }
        if let Some((name, total)) = device
            && !self.described[changed.device].swap(true, Ordering::AcqRel)
        {
            let device = changed.device as u32;
            inner.put(&Record::Device { device, total, name: name.as_bytes() });
        }
        let stack = inner.stack();
        inner.put(&Record::Event(Event {
            change: changed.change,
            api: changed.api,
            device: changed.device as u16,
            stack,
            ns: now(),
            address: changed.address,
            size: changed.size,
            stream: changed.stream as u64,
        }));
        inner.write();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Returns the id of the stack of the caller. It and files of code are put down where they are new.
    fn stack(&mut self) -> Option<u32> {
        let Inner { stacks, modules, bytes, .. } = self;
        let stack = stacks.current(|file| {
            let record = Record::Module {
                id: *modules,
                bias: file.bias,
                start: file.range.start,
                end: file.range.end,
                path: &file.path,
            };
            encode(&record, bytes);
            *modules += 1;
        });
        match stack {
            Stack::Known(id) => Some(id),
            Stack::New(id, pcs) => {
                encode(&Record::Stack { id, pcs: Cow::Borrowed(pcs) }, bytes);
                Some(id)
            }
            Stack::None => None,
        }
    }

    fn put(&mut self, record: &Record<'_>) {
        encode(record, &mut self.bytes);
    }

    /// Appends what was put down, a record at a time.
    fn write(&mut self) {
        let Some(spool) = &mut self.spool else { return };
        let mut rest = self.bytes.as_slice();
        while let Some(head) = rest.first_chunk::<4>() {
            let length = (u32::from_le_bytes(*head) >> 8) as usize;
            let (record, tail) = rest.split_at(length);
            if let Err(error) = spool.append(record) {
                crate::report::write_line(&format!(
                    "vramp exec: the recording ends here, because its file cannot grow: {error}. The program goes on"
                ));
                self.spool = None;
                break;
            }
            rest = tail;
        }
        self.bytes.clear();
    }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
