//! A few threads that do one thing after the other.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that wait for work. When this is dropped they do what is left, and end.
#[derive(Debug)]
pub struct ThreadPool {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    news: Condvar,
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
                // What a job has to say it says itself; a panic must not end the thread.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
            } else if state.closed {
                return;
            } else {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
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
    /// So many threads, at least one, by a name that tools show.
    ///
    /// # Errors
    /// The kernel gives no thread.
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

    /// How many threads.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Has one of them do `jobs`, each as soon as one is free. A panic in a job ends that job.
    pub fn run<J: FnOnce() + Send + 'static>(&self, jobs: impl IntoIterator<Item = J>) {
        let mut state = self.queue.lock();
        let before = state.jobs.len();
        state.jobs.extend(jobs.into_iter().map(|job| Box::new(job) as Job));
        let added = state.jobs.len() - before;
        drop(state);
        match added {
            1 => self.queue.news.notify_one(),
            _ => self.queue.news.notify_all(),
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.news.notify_all();
        for thread in self.threads.drain(..) {
            // The last handle may go within a job: a thread cannot wait for itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
