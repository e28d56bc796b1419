//! The engine for any kernel: a thread pool that makes blocking calls.
//!
//! A thread pool.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::thread::JoinHandle;

use super::{BlockIo, IoRequest, IoUnavailable, OsCode};

/// An engine of threads, each with one blocking call at a time.
#[derive(Debug)]
pub struct ThreadIo {
    workers: ThreadPool,
}

impl ThreadIo {
    /// Starts `depth` threads.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(depth: usize) -> Result<ThreadIo, IoUnavailable> {
        let workers = ThreadPool::new("vramp-disk", depth);
        let failed = |error| IoUnavailable { engine: "threads", code: OsCode::of(&error) };
        Ok(ThreadIo { workers: workers.map_err(failed)? })
    }
}

impl BlockIo for ThreadIo {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn depth(&self) -> usize {
        self.workers.count()
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        self.workers.run(batch.into_iter().map(|request| {
            move || {
                let IoRequest { file, offset, span, direction, done } = request;
                done(file.call(direction, offset, &span));
            }
        }));
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs from one queue. Dropping the pool runs all queued jobs, then ends it.
#[derive(Debug)]
pub struct ThreadPool {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                // A panic in a job must not end the thread.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
            } else if state.closed {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} jobs", self.lock().jobs.len())
    }
}

impl ThreadPool {
    /// Starts `count` threads, at least one. Debuggers show them by `name`.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(name: &str, count: usize) -> std::io::Result<ThreadPool> {
        let queue = Arc::new(Queue::default());
        let mut workers = ThreadPool { queue, threads: Vec::new() };
        for _ in 0..count.max(1) {
            let queue = Arc::clone(&workers.queue);
            let thread = thread::Builder::new().name(name.into()).spawn(move || queue.work())?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Returns the number of threads.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Queues `jobs`. A panic in a job ends only that job.
    pub fn run<J: FnOnce() + Send + 'static>(&self, jobs: impl IntoIterator<Item = J>) {
        let mut state = self.queue.lock();
        let before = state.jobs.len();
        state.jobs.extend(jobs.into_iter().map(|job| Box::new(job) as Job));
        let added = state.jobs.len() - before;
        drop(state);
        match added {
            1 => self.queue.changed.notify_one(),
            _ => self.queue.changed.notify_all(),
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            // The pool may be dropped by a job: a thread cannot join itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
