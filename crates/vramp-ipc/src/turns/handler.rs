//! The thread that calls a handler when other processes wait.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;

use super::Inner;
use super::directory::system_error;
use super::error::TurnsError;
use super::turn::{Held, Request};
use crate::directory::errno_of;

/// What a handler does about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Release the turn now: the program has emptied the card as far as is needed.
    Release,
    /// Keep the turn. The program releases it later, for instance at the next safe point.
    Later,
    /// Keep the turn, and let the waits of these processes fail with this reason.
    Refuse(String),
}

type Function = dyn Fn(&Request) -> Answer + Send + Sync;

/// A registered handler with its thread.
#[derive(Debug)]
pub struct Handler {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
    depth: u32,
}

/// What wakes the thread.
#[derive(Debug)]
pub struct Control {
    is_stopped: AtomicBool,
    wake: OwnedFd,
    /// Has `wake` and the pipe of the held turn. A closed pipe leaves it by itself: the thread has no
    /// descriptor that would keep the pipe open.
    events: OwnedFd,
}

impl Control {
    fn new() -> Result<Control, Errno> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&events, &wake, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Control { is_stopped: AtomicBool::new(false), wake, events })
    }

    /// Takes the requests of a turn that was just acquired.
    pub fn watch(&self, held: &Held) {
        let data = epoll::EventData::new_u64(1);
        held.with_pipe(|pipe| {
            // It fails only without memory; then requests arrive with the next turn.
            let _ = epoll::add(&self.events, pipe.as_fd(), data, epoll::EventFlags::IN);
        });
        self.wake();
    }

    fn wake(&self) {
        // A counter that is not full takes the value at once.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn wait(&self) -> Result<(), Errno> {
        let mut events = Vec::with_capacity(2);
        match epoll::wait(&self.events, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        // It fails if nothing is there.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        Ok(())
    }
}

impl Handler {
    pub fn start(inner: &Arc<Inner>, function: Arc<Function>) -> Result<Handler, TurnsError> {
        let path = &inner.directory.path;
        let control = Control::new()
            .map(Arc::new)
            .map_err(|error| system_error("make an event for", path, error))?;
        let (shared, watched) = (Arc::clone(inner), Arc::clone(&control));
        let thread = std::thread::Builder::new()
            .name("vramp-turns".to_owned())
            .spawn(move || run(&shared, &watched, &*function))
            .map_err(|error| system_error("start a thread for", path, errno_of(error)))?;
        Ok(Handler { control, thread: Some(thread), depth: vramp_host::fork::depth() })
    }

    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }
}

/// Ends the thread, after a call of the handler that is in progress, unless that call drops it.
impl Drop for Handler {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if vramp_host::fork::depth() != self.depth {
            // The thread does not exist here.
            std::mem::forget(thread);
            return;
        }
        self.control.is_stopped.store(true, Ordering::Release);
        self.control.wake();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

fn run(inner: &Inner, control: &Control, function: &Function) {
    while !control.is_stopped.load(Ordering::Acquire) {
        if let Some(held) = inner.current() {
            answer(&held, function);
        }
        if control.is_stopped.load(Ordering::Acquire) || control.wait().is_err() {
            return;
        }
    }
}

fn answer(held: &Arc<Held>, function: &Function) {
    // A directory that cannot be read now is read again at the next request.
    let Ok(Some(request)) = held.request(true) else { return };
    // The message of a panic is on standard error, and the turn stays.
    let answer = catch_unwind(AssertUnwindSafe(|| function(&request))).unwrap_or(Answer::Later);
    // Errors are those of a removed directory, which the program gets from its next call.
    match answer {
        Answer::Release => drop(held.release()),
        Answer::Later => {}
        Answer::Refuse(reason) => drop(request.refuse(&reason)),
    }
}
