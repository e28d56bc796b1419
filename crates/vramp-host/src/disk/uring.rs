//! The io_uring engine: one thread keeps many requests in flight.
//!
//! A request completes only when the kernel accesses its memory no more, because its owner may then
//! use the memory for something else. That also holds if the ring fails:
//!
//! 1. `io_uring_enter` returns an error that a retry does not mend.
//! 2. Requests that the kernel has not taken from the ring fail with that error, and so do all later
//!    ones.
//! 3. Requests that it has taken complete with their own results, which the kernel writes to the
//!    ring's shared memory. The thread looks for them there, and the ring stays open until then.
//!
//! A request that the kernel never completes keeps its memory, and its owner waits.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFlags};
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
        UringIo::with_enter(depth, enter_ring)
    }

    fn with_enter(depth: usize, enter: Enter) -> Result<UringIo, IoUnavailable> {
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
            thread::Builder::new()
                .name("vramp-uring".into())
                .spawn(move || Worker::new(ring, enter, shared, depth).work())
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
        // Only a panic of the engine's thread leaves requests here. The kernel may still access their
        // memory, and closing the ring does not wait for it, so the memory is leaked.
        self.requests.drain(..).flatten().for_each(std::mem::forget);
    }
}

/// Submits what is in the ring and waits for so many completions.
type Enter = fn(&IoUring, usize) -> io::Result<usize>;

/// State of the engine's thread.
struct Worker {
    ring: IoUring,
    /// Tests make it fail.
    enter: Enter,
    shared: Arc<Shared>,
    slots: Slots,
    /// Slots of the last entries pushed, as many as the ring holds, oldest first.
    pushed: VecDeque<usize>,
    /// True while a poll for wake-ups is in flight.
    armed: bool,
}

impl Worker {
    fn new(ring: IoUring, enter: Enter, shared: Arc<Shared>, depth: usize) -> Worker {
        let slots = Slots::new(depth);
        Worker { ring, enter, shared, slots, pushed: VecDeque::new(), armed: false }
    }

    fn work(mut self) {
        while self.fill() {
            match (self.enter)(&self.ring, 1) {
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
            // SAFETY: the slot keeps file and memory alive until the kernel completes the request.
            // A panic of the thread leaks them.
            let pushed = unsafe { submission.push(&entry) };
            pushed.expect("the ring has an entry for each slot and one for the wake-up");
            note_pushed(&mut self.pushed, slot, submission.capacity());
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
            note_pushed(&mut self.pushed, WAKE as usize, submission.capacity());
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
                done.push((request, answer_of(completion.result())));
            }
        }
        // Refill before the completions run, so that the disk stays busy.
        if !done.is_empty() && self.fill() {
            // A failure is seen again by the next call that waits.
            let _ = (self.enter)(&self.ring, 0);
        }
        for (request, answer) in done {
            complete(request, answer);
        }
    }

    /// Ends the use of a ring that failed: see the module's page.
    fn give_up(mut self, code: OsCode) {
        for request in self.take_back() {
            complete(request, Err(code));
        }
        loop {
            self.reap_failed();
            let mut queue = self.shared.lock();
            let refused = std::mem::take(&mut queue.requests);
            let closed = queue.closed && self.slots.is_empty();
            drop(queue);
            match (refused.is_empty(), closed) {
                (true, true) => return,
                (true, false) => self.wait_failed(),
                (false, _) => refused.into_iter().for_each(|request| complete(request, Err(code))),
            }
        }
    }

    /// Returns the requests that are in the ring and that the kernel has not taken. It takes them in
    /// order and only in `io_uring_enter`, which is not called again.
    fn take_back(&mut self) -> Vec<IoRequest> {
        let left = self.ring.submission().len();
        let pushed = std::mem::take(&mut self.pushed);
        let not_taken = pushed.into_iter().rev().take(left);
        not_taken.filter_map(|slot| self.slots.take(slot)).collect()
    }

    /// Completes the requests that the kernel has completed.
    fn reap_failed(&mut self) {
        let done: Vec<_> = (self.ring.completion())
            .map(|completion| (completion.user_data(), completion.result()))
            .collect();
        for (slot, result) in done {
            // That of the wake-up is no slot.
            if let Some(request) = self.slots.take(slot as usize) {
                complete(request, answer_of(result));
            }
        }
    }

    /// Waits for a request or the end of the engine, and while the kernel has requests, not longer
    /// than it takes to look for their completions again: a ring that failed may announce none.
    fn wait_failed(&self) {
        let mut wake = [rustix::event::PollFd::new(&self.shared.wake, PollFlags::IN)];
        let look_again = rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let limit = (!self.slots.is_empty()).then_some(&look_again);
        let _ = rustix::event::poll(&mut wake, limit);
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
    }
}

fn note_pushed(pushed: &mut VecDeque<usize>, slot: usize, capacity: usize) {
    if pushed.len() == capacity {
        pushed.pop_front();
    }
    pushed.push_back(slot);
}

/// The call of a ring that works.
fn enter_ring(ring: &IoUring, wanted: usize) -> io::Result<usize> {
    ring.submit_and_wait(wanted)
}

fn answer_of(result: i32) -> Result<Bytes, OsCode> {
    u64::try_from(result).map(Bytes::new).map_err(|_| OsCode(-result))
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;
    use crate::disk::{DISK_BLOCK, DirectFile};
    use crate::{HostMemory, HostSpan, PageKind};

    fn span() -> HostSpan {
        let memory = HostMemory::new(DISK_BLOCK, None, PageKind::Small).unwrap();
        HostSpan::new(&memory, Bytes::ZERO, DISK_BLOCK).unwrap()
    }

    /// A read whose result goes to the receiver.
    fn read(
        file: &Arc<DirectFile>,
        span: &HostSpan,
    ) -> (IoRequest, mpsc::Receiver<Result<Bytes, OsCode>>) {
        let (sender, receiver) = mpsc::channel();
        let request = IoRequest {
            file: Arc::clone(file),
            offset: Bytes::ZERO,
            span: span.clone(),
            direction: Direction::Read,
            done: Box::new(move |answer| sender.send(answer).unwrap()),
        };
        (request, receiver)
    }

    /// A pipe as a file: a read of it is in flight until something is written.
    fn pipe() -> (Arc<DirectFile>, File) {
        let (reader, writer) = std::io::pipe().unwrap();
        let (reader, writer): (OwnedFd, OwnedFd) = (reader.into(), writer.into());
        (Arc::new(DirectFile::of_pipe(reader.into())), writer.into())
    }

    fn broken() -> io::Error {
        io::Error::from_raw_os_error(libc::EBADFD)
    }

    #[test]
    fn a_request_in_flight_completes_only_when_the_kernel_is_done_with_its_memory() {
        static TAKEN: AtomicUsize = AtomicUsize::new(0);
        static FAILED: AtomicBool = AtomicBool::new(false);
        // The ring fails once the kernel has taken the poll for wake-ups and the request.
        let enter: Enter = |ring, wanted| {
            let taken = ring.submit()?;
            if TAKEN.fetch_add(taken, Ordering::SeqCst) + taken < 2 {
                return ring.submit_and_wait(wanted);
            }
            FAILED.store(true, Ordering::SeqCst);
            Err(broken())
        };
        // Machines that forbid io_uring use the other engine.
        let Ok(io) = UringIo::with_enter(4, enter) else { return };
        let (file, mut writer) = pipe();
        let into = span();
        let (request, done) = read(&file, &into);
        io.submit(vec![request]);
        while !FAILED.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let (request, later) = read(&file, &span());
        io.submit(vec![request]);
        assert_eq!(later.recv().unwrap(), Err(OsCode(libc::EBADFD)));
        assert!(done.try_recv().is_err(), "the kernel may still write to its memory");
        writer.write_all(b"late").unwrap();
        assert_eq!(done.recv().unwrap(), Ok(Bytes::new(4)));
        let mut bytes = [0; 4];
        into.read(Bytes::ZERO, &mut bytes).unwrap();
        assert_eq!(&bytes, b"late");
        drop(io);
    }

    #[test]
    fn a_request_that_the_kernel_never_took_fails_with_the_ring() {
        let Ok(io) = UringIo::with_enter(4, |_, _| Err(broken())) else { return };
        let (file, _writer) = pipe();
        let memory = span();
        let answers: Vec<_> = (0..10)
            .map(|_| {
                let (request, done) = read(&file, &memory);
                io.submit(vec![request]);
                done.recv().unwrap()
            })
            .collect();
        assert_eq!(answers, [Err(OsCode(libc::EBADFD)); 10]);
        drop(io);
        assert_eq!(Arc::strong_count(memory.memory()), 1, "nothing is leaked");
    }
}
