//! Commands that another process of the user sends to a member.

use std::time::{Duration, Instant};

use super::core::word::{PAGE, Signal, pages_of};
use super::error::BudgetError;
use super::ledger::{Bell, Field, Ledger};
use crate::directory;

/// What a member is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Claim no more than so many bytes, and give back what is above.
    Limit(u64),
    /// Give back so many bytes.
    GiveBack(u64),
    /// Put its memory to sleep.
    Pause,
    /// Wake it up.
    Resume,
}

/// What came of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done, and the member gave so many bytes back.
    Done(u64),
    /// The member has no handler for it.
    CannotDo,
    /// Its handler failed, or gave back less than was requested.
    Failed(u64),
    /// The member did not answer in time. It is stopped, or its handler is at work.
    NoAnswer,
}

const DONE: u64 = 1;
const CANNOT: u64 = 2;
const FAILED: u64 = 3;

impl Command {
    pub(super) fn signal(self, random: u64) -> Signal {
        let (code, bytes) = match self {
            Command::Limit(bytes) => (1, bytes),
            Command::GiveBack(bytes) => (2, bytes),
            Command::Pause => (3, 0),
            Command::Resume => (4, 0),
        };
        Signal { code, pages: pages_of(bytes), id: Signal::id(random) }
    }

    pub(super) fn of(signal: Signal) -> Option<Command> {
        let bytes = signal.pages * PAGE;
        match signal.code {
            1 => Some(Command::Limit(bytes)),
            2 => Some(Command::GiveBack(bytes)),
            3 => Some(Command::Pause),
            4 => Some(Command::Resume),
            _ => None,
        }
    }
}

impl Outcome {
    pub(super) fn signal(self, id: u64) -> Signal {
        let (code, bytes) = match self {
            Outcome::Done(bytes) => (DONE, bytes),
            Outcome::CannotDo | Outcome::NoAnswer => (CANNOT, 0),
            Outcome::Failed(bytes) => (FAILED, bytes),
        };
        Signal { code, pages: bytes / PAGE, id }
    }

    fn of(signal: Signal) -> Outcome {
        let bytes = signal.pages * PAGE;
        match signal.code {
            DONE => Outcome::Done(bytes),
            FAILED => Outcome::Failed(bytes),
            _ => Outcome::CannotDo,
        }
    }
}

/// How often a sender looks whether the member has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Sends a command and waits for its result.
pub(super) fn send(
    ledger: &Ledger,
    member: u64,
    command: Command,
    timeout: Duration,
) -> Result<Outcome, BudgetError> {
    let deadline = Instant::now().checked_add(timeout);
    let left = || deadline.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
    let views = ledger.views();
    let found = views.iter().find(|view| view.guarantee.generation == member);
    let slot = found.map(|view| view.slot).ok_or(BudgetError::Gone)?;
    let check = || match ledger.guarantee(slot).generation == member && ledger.is_live(member) {
        true => Ok(()),
        false => Err(BudgetError::Gone),
    };
    let random = directory::random()
        .map_err(|error| directory::system_error("get random bits for", &ledger.path, error))?;
    let signal = command.signal(random);
    // One command at a time.
    loop {
        let seen = ledger.rings(slot, Bell::Done);
        check()?;
        if ledger.exchange(slot, Field::Command, 0, signal.pack()) {
            break;
        }
        if left().is_zero() {
            return Ok(Outcome::NoAnswer);
        }
        ledger.wait(slot, Bell::Done, seen, Some(left().min(LOOK)));
    }
    ledger.ring(slot, Bell::Serve);
    loop {
        let seen = ledger.rings(slot, Bell::Done);
        let result = Signal::unpack(ledger.get(slot, Field::Result));
        if let Some(result) = result.filter(|result| result.id == signal.id) {
            return Ok(Outcome::of(result));
        }
        check()?;
        if left().is_zero() {
            // The member may have taken it: then it does it all the same.
            ledger.exchange(slot, Field::Command, signal.pack(), 0);
            return Ok(Outcome::NoAnswer);
        }
        ledger.wait(slot, Bell::Done, seen, Some(left().min(LOOK)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_results_are_read_as_written() {
        let commands =
            [Command::Limit(PAGE), Command::GiveBack(7 * PAGE), Command::Pause, Command::Resume];
        for command in commands {
            assert_eq!(Command::of(command.signal(5)), Some(command));
        }
        for outcome in [Outcome::Done(PAGE), Outcome::CannotDo, Outcome::Failed(0)] {
            assert_eq!(Outcome::of(outcome.signal(9)), outcome);
        }
        assert_eq!(Command::of(Signal { code: 7, pages: 0, id: 0 }), None);
    }
}
