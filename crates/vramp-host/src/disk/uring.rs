//! The io_uring engine: one thread keeps many requests in flight.

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
/// User data of the wake-up's completion. That of a request is its slot.
const WAKE: u64 = u64::MAX;

/// An engine that submits to io_uring and reaps completions in one thread.
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
        // A full counter means that a wake-up is pending already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl UringIo {
    /// Opens an engine with up to `depth` requests in flight.
    ///
    /// # Errors
    /// The kernel has no io_uring with reads and writes (before 5.6), or forbids it to this
    /// process, as many containers do.
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
        // The engine's own thread checks the queue before it waits.
        if self.thread.as_ref().is_none_or(|own| own.thread().id() != thread::current().id()) {
            self.shared.wake();
        }
    }
}

impl Drop for UringIo {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wake();
        // The last handle may be dropped by a completion: a thread cannot join itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Requests in flight, by slot.
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
        // The kernel may still access the memory of these requests, so it is leaked.
        self.requests.drain(..).flatten().for_each(std::mem::forget);
    }
}

/// State of the engine's thread.
struct Worker {
    // Dropped first: closing the ring cancels its requests.
    ring: IoUring,
    shared: Arc<Shared>,
    slots: Slots,
    /// True while a poll for wake-ups is in flight.
    armed: bool,
}

impl Worker {
    fn work(mut self) {
        while self.fill() {
            match self.ring.submit_and_wait(1) {
                Ok(_) => self.reap(),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The completion queue is full, or the kernel is out of memory.
                    Some(libc::EBUSY | libc::EAGAIN | libc::ENOMEM) => {
                        self.reap();
                        thread::yield_now();
                    }
                    _ => return self.give_up(OsCode::of(&error)),
                },
            }
        }
    }

    /// Submits queued requests to free slots. Returns false once the engine is closed and idle.
    fn fill(&mut self) -> bool {
        let mut queue = self.shared.lock();
        let mut submission = self.ring.submission();
        while !self.slots.free.is_empty()
            && let Some(request) = queue.requests.pop_front()
        {
            let entry = entry_of(&request);
            let slot = self.slots.put(request).expect("a slot is free");
            let entry = entry.user_data(slot as u64);
            // SAFETY: the slot keeps file and memory alive until the request completes, and leaks
            // them if it never does.
            let pushed = unsafe { submission.push(&entry) };
            pushed.expect("the ring has an entry for each slot and one for the wake-up");
        }
        if queue.closed && queue.requests.is_empty() && self.slots.is_empty() {
            return false;
        }
        drop(queue);
        if !self.armed {
            let fd = types::Fd(self.shared.wake.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
            // SAFETY: it refers to no memory, and the file lives as long as the thread.
            let pushed = unsafe { submission.push(&entry) };
            pushed.expect("the ring has an entry for each slot and one for the wake-up");
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
        // Refill before the completions run, so that the disk stays busy.
        if !done.is_empty() && self.fill() {
            let _ = self.ring.submit();
        }
        for (request, answer) in done {
            complete(request, answer);
        }
    }

    /// Fails all requests after an unrecoverable error of the ring. Leaks the memory of requests in
    /// flight, which the kernel may still access.
    fn give_up(mut self, code: OsCode) {
        for request in self.slots.requests.iter_mut().filter_map(Option::take) {
            std::mem::forget((request.span, request.file));
            let done = request.done;
            let _ = catch_unwind(AssertUnwindSafe(|| done(Err(code))));
        }
        loop {
            let next = self.shared.lock().requests.pop_front();
            match next {
                Some(request) => complete(request, Err(code)),
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

/// Calls the completion. A panic in it must not end the thread while requests are in flight.
fn complete(request: IoRequest, answer: Result<Bytes, OsCode>) {
    let _ = catch_unwind(AssertUnwindSafe(|| (request.done)(answer)));
}

fn entry_of(request: &IoRequest) -> squeue::Entry {
    let fd = types::Fd(request.file.raw());
    // `next_part` limits spans to `MAX_CALL`.
    let len = request.span.len().min(super::file::MAX_CALL).count() as u32;
    let (start, offset) = (request.span.as_ptr(), request.offset.count());
    match request.direction {
        Direction::Read => opcode::Read::new(fd, start, len).offset(offset).build(),
        Direction::Write => opcode::Write::new(fd, start, len).offset(offset).build(),
    }
}
