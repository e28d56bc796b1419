//! `vramp exec --sleepable`: the program's memory leaves the card, and comes back to the same addresses.
//!
//! It leaves when `vramp ctl pause` says so, until `vramp ctl resume`; and when another program of the group lacks memory
//! and nothing is idle, until there is room again. Then two programs that do not fit together take turns: each is left
//! alone for [`SLICE`] after it woke up.
//!
//! A sleep is four steps: the gate closes and calls that are under way return; the work that they queued ends; contents
//! go to pinned memory of the host; the card's memory goes back to the group. If a step fails the program goes on as
//! before.

use std::ffi::{c_int, c_void};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::{self, Code, OUT_OF_MEMORY, SUCCESS};
use crate::pool::Pool;
use crate::process::be_inside;
use crate::report::write_line;
use crate::{gate, process};

/// Returns what a group shares of a card of so many bytes where nothing says how much: the rest is for contexts.
pub fn capacity_of(memory: u64) -> u64 {
    memory - (4 << 30).min(memory / 8)
}

/// How long a program is awake at least, before it gives way to another.
const SLICE: Duration = Duration::from_secs(3);
/// How long calls may take that are under way when a sleep begins.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks whether captures have ended.
const BETWEEN: Duration = Duration::from_millis(2);
/// How long a request waits for others at most.
const LONGEST: Duration = Duration::from_secs(600);
/// Between two tries to wake up while others have the card.
const AGAIN: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Awake,
    /// Until there is room.
    GivingWay,
    /// Until someone says so.
    Paused,
}

struct Sleeper {
    state: State,
    since: Instant,
    /// True once the thread runs that wakes the program up.
    has_thread: bool,
}

static SLEEPER: Mutex<Option<Sleeper>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<Sleeper>> {
    SLEEPER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a new process begins with: a forked child too.
fn sleeper(held: &mut Option<Sleeper>) -> &mut Sleeper {
    held.get_or_insert_with(|| Sleeper {
        state: State::Awake,
        since: Instant::now(),
        has_thread: false,
    })
}

fn pool() -> Option<&'static Pool> {
    process::begun()?.pool_if_open()
}

/// `vramp ctl pause` and `resume`, on a thread of the pool. Returns 1 if it is done.
pub extern "C" fn on_sleep(resume: c_int, _: *mut c_void) -> c_int {
    be_inside();
    let Some(pool) = pool() else { return 0 };
    let mut held = lock();
    let sleeper = sleeper(&mut held);
    let done = match (sleeper.state, resume != 0) {
        (State::Awake, false) => fall_asleep(pool, sleeper, State::Paused),
        (State::Awake, true) => Ok(()),
        (_, false) => {
            sleeper.state = State::Paused;
            Ok(())
        }
        (_, true) => wake_up(pool, sleeper),
    };
    if let Err(why) = &done {
        write_line(&format!("vramp exec: {why}"));
    }
    c_int::from(done.is_ok())
}

/// Another program lacks memory, and nothing of this one is idle.
pub extern "C" fn on_reclaim(_: u64, _: *mut c_void) {
    be_inside();
    let Some(pool) = pool() else { return };
    let mut held = lock();
    let sleeper = sleeper(&mut held);
    if sleeper.state != State::Awake || sleeper.since.elapsed() < SLICE {
        return;
    }
    if let Err(why) = fall_asleep(pool, sleeper, State::GivingWay) {
        write_line(&format!("vramp exec: this program does not give way: {why}"));
        // Not at each request of the other.
        sleeper.since = Instant::now();
        return;
    }
    if !std::mem::replace(&mut sleeper.has_thread, true) {
        let started = std::thread::Builder::new()
            .name("vramp-exec".to_owned())
            .spawn(wake_up_when_there_is_room);
        if let Err(error) = started {
            sleeper.has_thread = false;
            write_line(&format!("vramp exec: no thread can wait for room: {error}"));
            let _ = wake_up(pool, sleeper);
        }
    }
    CHANGED.notify_all();
}

fn wake_up_when_there_is_room() {
    be_inside();
    let mut held = lock();
    loop {
        let sleeper = sleeper(&mut held);
        if sleeper.state != State::GivingWay {
            held = CHANGED.wait(held).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        // The other program has its slice first.
        drop(held);
        std::thread::sleep(AGAIN);
        held = lock();
        if let (Some(pool), Some(sleeper)) = (pool(), held.as_mut())
            && sleeper.state == State::GivingWay
        {
            // Without room the next try asks the others again.
            let _ = wake_up(pool, sleeper);
        }
    }
}

/// Closes the gate while no stream captures: a wait for the device would make the capture invalid.
fn close_between_captures() -> Result<(), String> {
    let (start, patience) = (Instant::now(), PATIENCE.as_secs());
    loop {
        if !gate::close(PATIENCE) {
            return Err(format!("a call of the program does not return within {patience} s"));
        }
        if !driver::has_captures() {
            return Ok(());
        }
        gate::open();
        if start.elapsed() > PATIENCE {
            return Err(format!("a stream of the program captures for longer than {patience} s"));
        }
        std::thread::sleep(BETWEEN);
    }
}

fn fall_asleep(pool: &Pool, sleeper: &mut Sleeper, state: State) -> Result<(), String> {
    let patience = PATIENCE.as_secs();
    gate::announce(true);
    let closed = close_between_captures();
    gate::announce(false);
    closed?;
    let devices: Vec<_> = pool.devices().collect();
    // Work may wait for what a thread does behind the gate, or never end.
    let ended = within(PATIENCE, move || {
        be_inside();
        devices.into_iter().map(driver::synchronize).find(|&code| code != SUCCESS)
    });
    let asleep = match ended {
        Some(None) => pool.pause(),
        Some(Some(code)) => Err(format!("work of the program failed: CUDA error {code}")),
        None => Err(format!("work of the program does not end within {patience} s")),
    };
    match asleep {
        Ok(()) => {
            sleeper.state = state;
            Ok(())
        }
        Err(why) => {
            gate::open();
            Err(why)
        }
    }
}

/// Returns what `work` returns on a thread of its own. `None` if that lasts longer than `patience`, or without a thread.
fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, answered) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("vramp-exec-wait".to_owned());
    let started = thread.spawn(move || {
        // Too late once the caller has given up.
        let _ = answer.send(work());
    });
    started.ok().and_then(|_| answered.recv_timeout(patience).ok())
}

fn wake_up(pool: &Pool, sleeper: &mut Sleeper) -> Result<(), String> {
    pool.resume()?;
    sleeper.state = State::Awake;
    sleeper.since = Instant::now();
    gate::open();
    Ok(())
}

/// Asks the pool again while other programs of the group may give way. Between two tries this program's memory may leave:
/// two that wait for each other's go on.
pub fn until_given(
    pool: &Pool,
    device: usize,
    size: u64,
    ask: impl Fn() -> Result<u64, Code>,
) -> Result<u64, Code> {
    let mut begun = None;
    loop {
        let answer = ask();
        if answer != Err(OUT_OF_MEMORY) || !pool.is_sleepable() {
            return answer;
        }
        let start = *begun.get_or_insert_with(Instant::now);
        let may_come = pool.room(device).is_some_and(|room| room.most >= size);
        if start.elapsed() > LONGEST || !may_come {
            return answer;
        }
        gate::leave();
        std::thread::sleep(Duration::from_millis(5));
        gate::enter();
    }
}

/// In a forked child.
pub fn reset() {
    // The lock may be held by a thread that the child has not.
    if let Ok(mut held) = SLEEPER.try_lock() {
        *held = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_does_not_end_is_not_waited_for_for_ever() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        assert_eq!(within(Duration::from_millis(5), move || ended.recv().is_ok()), None);
        drop(end);
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
    }
}
