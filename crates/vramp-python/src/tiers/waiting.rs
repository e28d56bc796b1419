//! Requests that wait without a thread of their own.
//!
//! 1. A [`Waiting`] is the request of a coroutine. When vramp wakes it, it enters a queue: no Python code
//!    runs then, and no thread waits for the interpreter.
//! 2. One thread of `vramp._leases` takes the requests out ([`take_leases`]), goes on with them, and wakes
//!    the coroutines of those that are done.
//! 3. What has to be restored is restored by [`RESTORERS`] threads, so neither that thread nor the event
//!    loop waits for it.
//!
//! Growth: a waiting request takes memory and no thread. Each wake-up is O(1).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::{Context, Poll, Wake, Waker};

use pyo3::prelude::*;
use vramp_capi::process::{Failure, check_fork};
use vramp_defer::{LeaseFuture, LeaseSet, RestoreJob};

use super::shared::OpenHold;
use crate::error::raise;

/// Number of threads that restore buffers for coroutines.
const RESTORERS: usize = 4;

/// A request of a coroutine.
pub struct Waiting {
    /// Number that `vramp._leases` gave it.
    number: u64,
    stage: Mutex<Stage>,
}

enum Stage {
    Waiting(Box<Pending>),
    Done(Result<(LeaseSet, OpenHold), Failure>),
    /// It was taken out or cancelled.
    Over,
}

/// Waits for what a granted lease needs before the host may use it.
pub type Completion = Box<dyn Fn(&OpenHold) -> Result<(), Failure> + Send + Sync>;

/// A request that is not granted yet.
pub struct Pending {
    pub future: LeaseFuture,
    pub hold: OpenHold,
    /// Ends a lease that the host may use only after a wait.
    pub complete: Completion,
}

/// Requests that were woken.
struct Woken {
    queue: Mutex<VecDeque<Arc<Waiting>>>,
    added: Condvar,
}

static WOKEN: Woken = Woken { queue: Mutex::new(VecDeque::new()), added: Condvar::new() };

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wake for Waiting {
    fn wake(self: Arc<Waiting>) {
        lock(&WOKEN.queue).push_back(self);
        WOKEN.added.notify_one();
    }
}

impl Waiting {
    pub fn new(number: u64, pending: Pending) -> Arc<Waiting> {
        Arc::new(Waiting { number, stage: Mutex::new(Stage::Waiting(Box::new(pending))) })
    }

    /// Goes on as far as possible without waiting. Returns true if it is done. The caller is detached.
    pub fn advance(self: &Arc<Waiting>) -> bool {
        let mut stage = lock(&self.stage);
        let Stage::Waiting(pending) = &mut *stage else { return matches!(*stage, Stage::Done(_)) };
        let waker = Waker::from(Arc::clone(self));
        let Poll::Ready(leased) =
            Pin::new(&mut pending.future).poll(&mut Context::from_waker(&waker))
        else {
            return false;
        };
        let Stage::Waiting(pending) = std::mem::replace(&mut *stage, Stage::Over) else {
            unreachable!("it was waiting above")
        };
        let Pending { hold, complete, .. } = *pending;
        let leased = leased.map_err(Failure::from);
        let leased = leased.and_then(|set| complete(&hold).map(|()| set));
        *stage = Stage::Done(leased.map(|set| (set, hold)));
        true
    }

    /// Takes the outcome. `None` if it is not done.
    pub fn take(&self) -> Option<Result<(LeaseSet, OpenHold), Failure>> {
        let mut stage = lock(&self.stage);
        match std::mem::replace(&mut *stage, Stage::Over) {
            Stage::Done(outcome) => Some(outcome),
            other => {
                *stage = other;
                None
            }
        }
    }

    /// Leaves the queue, or ends the lease. The caller is detached.
    pub fn cancel(&self) {
        let stage = std::mem::replace(&mut *lock(&self.stage), Stage::Over);
        drop(stage);
    }
}

/// Runs a job on one of the threads that restore buffers.
pub fn restore(job: RestoreJob) {
    static JOBS: LazyLock<mpsc::Sender<RestoreJob>> = LazyLock::new(|| {
        let (sender, receiver) = mpsc::channel::<RestoreJob>();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..RESTORERS {
            let receiver = Arc::clone(&receiver);
            let work = move || {
                loop {
                    let job = lock(&receiver).recv();
                    let Ok(job) = job else { return };
                    job();
                }
            };
            // Without any thread the jobs are dropped, and their requests fail.
            let _ = std::thread::Builder::new().name("vramp restore".to_owned()).spawn(work);
        }
        sender
    });
    // A job that cannot be sent is dropped, which the request reports.
    let _ = JOBS.send(job);
}

/// Waits until requests of coroutines are done, and returns their numbers.
#[pyfunction]
pub fn take_leases(py: Python<'_>) -> PyResult<Vec<u64>> {
    check_fork().map_err(|failure| raise(py, failure))?;
    Ok(py.detach(|| {
        loop {
            let mut queue = lock(&WOKEN.queue);
            while queue.is_empty() {
                queue = WOKEN.added.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            let woken = std::mem::take(&mut *queue);
            drop(queue);
            let done = woken.iter().filter(|request| request.advance());
            let done: Vec<u64> = done.map(|request| request.number).collect();
            if !done.is_empty() {
                return done;
            }
        }
    }))
}
