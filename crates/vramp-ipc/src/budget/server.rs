//! The thread of a member, which answers requests of others.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;

use super::command::{Command, Outcome};
use super::core::word::{Ask, PAGE, Signal};
use super::handlers::{Request, Sleep, taken};
use super::inner::Inner;
use super::ledger::{Bell, Field};

/// Starts the thread.
pub fn start(inner: &Arc<Inner>) -> io::Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    std::thread::Builder::new().name("vramp-budget".to_owned()).spawn(move || run(&inner))
}

fn run(inner: &Inner) {
    let slot = inner.seat.slot;
    while !inner.is_over.load(SeqCst) {
        let seen = inner.ledger.rings(slot, Bell::Serve);
        if inner.is_over.load(SeqCst) {
            return;
        }
        let ask = Ask::unpack(inner.ledger.swap(slot, Field::Ask, 0));
        let command = Signal::unpack(inner.ledger.get(slot, Field::Command));
        if let Some(Ask { pages, may_lose, .. }) = ask {
            request(inner, pages, may_lose);
            look(inner);
            inner.ledger.set(slot, Field::Answers, inner.ledger.get(slot, Field::Answers) + 1);
            // The one that requested waits for the answer.
            inner.ring_waiting();
        }
        if let Some(signal) = command {
            let outcome = Command::of(signal).map_or(Outcome::CannotDo, |it| obey(inner, it));
            inner.ledger.set(slot, Field::Result, outcome.signal(signal.id).pack());
            inner.ledger.exchange(slot, Field::Command, signal.pack(), 0);
            inner.ledger.ring(slot, Bell::Done);
        }
        if ask.is_none() && command.is_none() {
            look(inner);
            inner.ledger.wait(slot, Bell::Serve, seen, None);
        }
    }
}

/// Publishes what the memory is used for.
fn look(inner: &Inner) {
    let look = taken(&inner.handlers.on_look);
    if let Some(usage) = look.and_then(|look| catch_unwind(AssertUnwindSafe(|| look())).ok()) {
        inner.publish(&usage);
    }
}

/// Calls the handler, and gives back what it released. Returns the pages.
fn request(inner: &Inner, pages: u64, may_lose: bool) -> u64 {
    let Some(handler) = taken(&inner.handlers.on_request) else { return 0 };
    let request = Request { bytes: pages * PAGE, may_lose };
    // The message of a panic is on standard error.
    let released = catch_unwind(AssertUnwindSafe(|| handler(&request))).unwrap_or(0);
    inner.give_back(released / PAGE)
}

fn obey(inner: &Inner, command: Command) -> Outcome {
    match command {
        Command::Limit(bytes) => {
            inner.ledger.set(inner.seat.slot, Field::Limit, bytes / PAGE);
            let above = inner.claimed().saturating_sub(bytes / PAGE);
            give(inner, above)
        }
        Command::GiveBack(bytes) => give(inner, bytes / PAGE),
        Command::Pause => sleep(inner, Sleep::Pause),
        Command::Resume => sleep(inner, Sleep::Resume),
    }
}

fn give(inner: &Inner, pages: u64) -> Outcome {
    if pages == 0 {
        return Outcome::Done(0);
    }
    if taken(&inner.handlers.on_request).is_none() {
        return Outcome::CannotDo;
    }
    let mut given = request(inner, pages, false);
    if given < pages {
        given += request(inner, pages - given, true);
    }
    match given >= pages {
        true => Outcome::Done(given * PAGE),
        false => Outcome::Failed(given * PAGE),
    }
}

fn sleep(inner: &Inner, sleep: Sleep) -> Outcome {
    let Some(handler) = taken(&inner.handlers.on_sleep) else { return Outcome::CannotDo };
    let before = inner.claimed();
    match catch_unwind(AssertUnwindSafe(|| handler(sleep))).unwrap_or(false) {
        true => Outcome::Done(before.saturating_sub(inner.claimed()) * PAGE),
        false => Outcome::Failed(0),
    }
}
