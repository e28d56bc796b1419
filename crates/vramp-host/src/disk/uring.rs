//! The engine for kernels with io_uring: one thread keeps many requests in the kernel.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;
use vramp_core::Bytes;

use super::{BlockIo, Direction, IoRequest, IoUnavailable, OsCode};

const NAME: &str = "io_uring";
/// What the completion of the wake-up is known by. Requests are known by their slot.
const WAKE: u64 = u64::MAX;

/// Requests in the kernel's own queue, submitted and reaped by one thread.
#[derive(Debug)]
pub struct UringIo {
    shared: Arc<Shared>,
    depth: usize,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Written to wake the thread while it waits for completions.
    wake: OwnedFd,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<IoRequest>,
    closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} requests", self.requests.len())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full counter means that a wake-up is on its way already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl UringIo {
    /// An engine with up to `depth` requests in the kernel.
    ///
    /// # Errors
    /// The kernel has no io_uring, is too old for reads and writes in it (before 5.6), or forbids
    /// it to this process, as many containers do.
    pub fn new(depth: usize) -> Result<UringIo, IoUnavailable> {
        let failed = |code| IoUnavailable { engine: NAME, code };
        let depth = depth.clamp(1, 1024);
        let entries = (depth as u32 + 1).next_power_of_two();
        let ring = IoUring::new(entries).map_err(|error| failed(OsCode::of(&error)))?;
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe);
        probed.map_err(|error| failed(OsCode::of(&error)))?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::PollAdd::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(failed(OsCode(libc::ENOSYS)));
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags).map_err(|code| failed(code.into()))?;
        let shared = Arc::new(Shared { queue: Mutex::default(), wake });
        let thread = {
            let shared = Arc::clone(&shared);
            let slots = Slots::new(depth);
            thread::Builder::new()
                .name("vramp-uring".into())
                .spawn(move || Worker { shared, slots, ring, armed: false }.work())
        };
        let thread = thread.map_err(|error| failed(OsCode::of(&error)))?;
        Ok(UringIo { shared, depth, thread: Some(thread) })
    }
}

impl BlockIo for UringIo {
    fn name(&self) -> &'static str {
        NAME
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        self.shared.lock().requests.extend(batch);
        // The thread itself looks at the queue before it waits.
        if self.thread.as_ref().is_none_or(|own| own.thread().id() != thread::current().id()) {
            self.shared.wake();
        }
    }
}

impl Drop for UringIo {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake();
        // The last handle may go within an answer: the thread cannot wait for itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// What the kernel works on, by slot.
struct Slots {
    requests: Vec<Option<IoRequest>>,
    free: Vec<usize>,
}

impl Slots {
    fn new(depth: usize) -> Slots {
        Slots { requests: (0..depth).map(|_| None).collect(), free: (0..depth).collect() }
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.requests.len()
    }

    fn put(&mut self, request: IoRequest) -> Option<usize> {
        let slot = self.free.pop()?;
        self.requests[slot] = Some(request);
        Some(slot)
    }

    fn take(&mut self, slot: usize) -> Option<IoRequest> {
        let request = self.requests.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(request)
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // The kernel may still read or write what a request names: such memory is never returned.
        self.requests.drain(..).flatten().for_each(std::mem::forget);
    }
}

/// The thread, and all that it alone touches.
struct Worker {
    // Dropped first: closing the ring ends what the kernel still does for it.
    ring: IoUring,
    shared: Arc<Shared>,
    slots: Slots,
    /// The kernel watches for wake-ups.
    armed: bool,
}

impl Worker {
    fn work(mut self) {
        while self.fill() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => self.reap(),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The kernel is short of room for completions, or of memory.
                    Some(libc::EBUSY | libc::EAGAIN | libc::ENOMEM) => {
                        self.reap();
                        thread::yield_now();
                    }
                    _ => return self.give_up(OsCode::of(&error)),
                },
            }
        }
    }

    /// Gives the kernel as much as it may have. False once there is nothing left to do, for good.
    fn fill(&mut self) -> bool {
        let mut queue = self.shared.lock();
        let mut submission = self.ring.submission();
        while !self.slots.free.is_empty()
            && let Some(request) = queue.requests.pop_front()
        {
            let entry = entry_of(&request);
            let slot = self.slots.put(request).expect("a slot is free");
            let entry = entry.user_data(slot as u64);
            // SAFETY: the slot keeps file and memory alive until the kernel has answered, and
            // longer if it never does.
            let pushed = unsafe { submission.push(&entry) };
            pushed.expect("the ring has an entry for each slot, and one more");
        }
        if queue.closed && queue.requests.is_empty() && self.slots.is_empty() {
            return false;
        }
        drop(queue);
        if !self.armed {
            let fd = types::Fd(self.shared.wake.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
            // SAFETY: it names no memory, and the file lives as long as the thread.
            let pushed = unsafe { submission.push(&entry) };
            pushed.expect("the ring has an entry for each slot, and one more");
            self.armed = true;
        }
        true
    }

    fn reap(&mut self) {
        let mut done = Vec::new();
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                self.armed = false;
                // Requests queued from here on wake the thread again.
                let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
            } else if let Some(request) = self.slots.take(completion.user_data() as usize) {
                let moved = u64::try_from(completion.result()).map(Bytes::new);
                done.push((request, moved.map_err(|_| OsCode(-completion.result()))));
            }
        }
        // Refill before telling anybody: the disk shall not wait for that.
        if !done.is_empty() && self.fill() {
            let _ = self.ring.submit();
        }
        for (request, answer) in done {
            tell(request, answer);
        }
    }

    /// The ring is of no use any more: everything is answered, and memory that the kernel might
    /// still touch stays.
    fn give_up(mut self, code: OsCode) {
        for request in self.slots.requests.iter_mut().filter_map(Option::take) {
            std::mem::forget((request.span, request.file));
            let done = request.done;
            let _ = catch_unwind(AssertUnwindSafe(|| done(Err(code))));
        }
        loop {
            let next = self.shared.lock().requests.pop_front();
            match next {
                Some(request) => tell(request, Err(code)),
                None if self.shared.lock().closed => return,
                None => {
                    let mut wake = [rustix::event::PollFd::new(
                        &self.shared.wake,
                        rustix::event::PollFlags::IN,
                    )];
                    let _ = rustix::event::poll(&mut wake, None);
                    let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
                }
            }
        }
    }
}

/// A panic of whoever is told must not end the thread while the kernel works for it.
fn tell(request: IoRequest, answer: Result<Bytes, OsCode>) {
    let _ = catch_unwind(AssertUnwindSafe(|| (request.done)(answer)));
}

fn entry_of(request: &IoRequest) -> squeue::Entry {
    let fd = types::Fd(request.file.raw());
    // No span that gets here is longer than a call may ask for.
    let len = request.span.len().min(super::file::CALL_MOST).count() as u32;
    let (start, offset) = (request.span.as_ptr(), request.offset.count());
    match request.direction {
        Direction::Read => opcode::Read::new(fd, start, len).offset(offset).build(),
        Direction::Write => opcode::Write::new(fd, start, len).offset(offset).build(),
    }
}
