//! The file in which the members of a group write what they have, want and are requested to do.
//!
//! | number | of a slot |
//! |---|---|
//! | word, guarantee | the claim, and which member has the slot (`core/word.rs`) |
//! | ticket, beat, wants | while it waits: since when, its last sign of life, and for what |
//! | ask, answers | what it is requested to give back, and how many requests it has answered |
//! | command, result | what `vramp ctl` sends, and what came of it |
//! | the rest | facts for others: written by the member alone |
//!
//! A member locks the byte of its slot, and the byte of its generation. The second lock is its life: a
//! slot whose generation is not locked is that of a dead member, although another process may have
//! locked the slot already. Both end with the process.
//!
//! A dead member's slot is cleared by exchanges from what was read before its lock was looked at, so
//! that a member that takes the slot meanwhile loses nothing. Only a process that is stopped between the
//! two, for exactly a multiple of 2^22 changes of a word that has the same pages then, would clear
//! a live one.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering::SeqCst, fence};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use vramp_host::{PrivateFd, SharedTable, TableShape, is_byte_locked, lock_byte};

use super::core::order::View;
use super::core::word::{Ask, Guarantee, PAGE, Word};
use super::error::BudgetError;
use crate::directory::{self, errno_of};

/// The most members of a group.
pub const MAX_MEMBERS: usize = 512;
/// Longest name of a program in bytes.
pub const MAX_NAME: usize = 64;

const FILE: &str = "ledger-1";
/// Numbers of the header, and of a slot.
const STRIDE: usize = 32;
const SHAPE: TableShape =
    TableShape { numbers: STRIDE * (MAX_MEMBERS + 1), bells: 3 * MAX_MEMBERS };
/// The locked bytes of generations begin here, beyond those of slots.
const GENERATIONS: u64 = 1 << 48;
const NAME_WORDS: usize = MAX_NAME / 8;

/// A number of a slot.
#[derive(Clone, Copy, Debug)]
pub enum Field {
    Word,
    Guarantee,
    Ticket,
    Beat,
    Wants,
    Ask,
    Answers,
    Command,
    Result,
    Priority,
    Limit,
    Capacity,
    Grown,
    Pid,
    Namespace,
    Live,
    Cached,
    Parked,
    Asleep,
    /// The first of several.
    Name,
}

/// A bell of a slot.
#[derive(Clone, Copy, Debug)]
pub enum Bell {
    /// Its member waits for pages.
    Wait,
    /// Its thread waits for requests.
    Serve,
    /// A sender waits for the result of a command.
    Done,
}

/// The open ledger of a group.
#[derive(Debug)]
pub struct Ledger {
    table: SharedTable,
    /// Asks about locks and has none.
    file: OwnedFd,
    pub path: PathBuf,
    /// Keeps programs that remove old files away.
    directory: OwnedFd,
}

/// The locks of a member.
#[derive(Debug)]
pub struct Seat {
    pub slot: usize,
    pub generation: u64,
    locks: PrivateFd,
}

impl Ledger {
    /// Opens the ledger in `path`, a directory in `base`. It is made if it is missing.
    pub fn open(base: &Path, path: PathBuf) -> Result<Ledger, BudgetError> {
        let directory = directory::open(base, &path)?;
        let failed = |error| directory::system_error("open the ledger in", &path, error);
        let file = open_file(&directory).map_err(failed)?;
        let table = SharedTable::map(&file, SHAPE).map_err(|error| failed(errno_of(error)))?;
        // The mapping must not hold the locks of a member, which a forked child would keep.
        Ok(Ledger { table, file, path, directory })
    }

    /// Returns an error if the file was removed: others that make it again would not see this one.
    pub fn check(&self) -> Result<(), BudgetError> {
        let is_there = rustix::fs::fstat(&self.file).is_ok_and(|stat| stat.st_nlink > 0);
        is_there.then_some(()).ok_or_else(|| BudgetError::Removed { path: self.path.clone() })
    }

    fn at(slot: usize, field: Field) -> usize {
        STRIDE * (slot + 1) + field as usize
    }

    pub fn get(&self, slot: usize, field: Field) -> u64 {
        self.table.number(Ledger::at(slot, field)).load(SeqCst)
    }

    /// Writes a number. What follows is read after it.
    pub fn set(&self, slot: usize, field: Field, value: u64) {
        self.table.number(Ledger::at(slot, field)).store(value, SeqCst);
        fence(SeqCst);
    }

    /// Writes a number and returns what it was.
    pub fn swap(&self, slot: usize, field: Field, value: u64) -> u64 {
        self.table.number(Ledger::at(slot, field)).swap(value, SeqCst)
    }

    /// Changes a number if it is still `from`. What follows is read after it.
    pub fn exchange(&self, slot: usize, field: Field, from: u64, to: u64) -> bool {
        let number = self.table.number(Ledger::at(slot, field));
        let is_done = number.compare_exchange(from, to, SeqCst, SeqCst).is_ok();
        fence(SeqCst);
        is_done
    }

    pub fn word(&self, slot: usize) -> Word {
        Word::unpack(self.get(slot, Field::Word))
    }

    pub fn guarantee(&self, slot: usize) -> Guarantee {
        Guarantee::unpack(self.get(slot, Field::Guarantee))
    }

    pub fn exchange_word(&self, slot: usize, from: Word, to: Word) -> bool {
        self.exchange(slot, Field::Word, from.pack(), to.pack())
    }

    /// Returns the number of slots that were ever used.
    pub fn count(&self) -> usize {
        (self.table.number(0).load(SeqCst) as usize).min(MAX_MEMBERS)
    }

    /// Returns the members' slots as they are now, one after the other.
    pub fn views(&self) -> Vec<View> {
        (0..self.count()).filter_map(|slot| self.view(slot)).collect()
    }

    fn view(&self, slot: usize) -> Option<View> {
        let get = |field| self.get(slot, field);
        // The guarantee after the word: see `core/claim.rs`.
        let word = self.word(slot);
        let guarantee = self.guarantee(slot);
        let is_empty = guarantee.generation == 0 && word.claimed + word.pending == 0;
        (!is_empty).then(|| View {
            slot,
            word,
            guarantee,
            priority: get(Field::Priority),
            wants: get(Field::Wants),
            ticket: get(Field::Ticket),
            beat_ms: get(Field::Beat),
            ask: Ask::unpack(get(Field::Ask)),
            idle: get(Field::Cached).saturating_add(get(Field::Parked)) / PAGE,
            grown_ms: get(Field::Grown),
        })
    }

    pub fn rings(&self, slot: usize, bell: Bell) -> u32 {
        self.table.rings(3 * slot + bell as usize)
    }

    pub fn ring(&self, slot: usize, bell: Bell) {
        self.table.ring(3 * slot + bell as usize);
    }

    pub fn wait(&self, slot: usize, bell: Bell, seen: u32, timeout: Option<Duration>) {
        self.table.wait(3 * slot + bell as usize, seen, timeout);
    }

    /// Returns false once the member with this generation has left or ended. One system call. It is not
    /// for members of the caller's own opening.
    pub fn is_live(&self, generation: u64) -> bool {
        // A kernel that does not say so once it locked is taken for a live member.
        is_byte_locked(self.file.as_fd(), GENERATIONS + generation).unwrap_or(true)
    }

    /// Clears the slot if its member is dead. Returns true if it was. One system call.
    pub fn reap(&self, slot: usize) -> bool {
        let (word, guarantee) = (self.word(slot), self.guarantee(slot));
        let ticket = self.get(slot, Field::Ticket);
        if guarantee.generation == 0 || self.is_live(guarantee.generation) {
            return false;
        }
        self.clear(slot, ticket, word, guarantee)
    }

    /// Clears a slot, if it is as it was read. The guarantee goes last: without one a slot has no pages.
    fn clear(&self, slot: usize, ticket: u64, word: Word, guarantee: Guarantee) -> bool {
        self.exchange(slot, Field::Ticket, ticket, 0);
        let is_cleared =
            word.claimed + word.pending == 0 || self.exchange_word(slot, word, word.next(0, 0));
        is_cleared && self.exchange(slot, Field::Guarantee, guarantee.pack(), 0)
    }

    /// Clears the slots of dead members that keep pages or wait, but for the caller's own. A system call
    /// for each such member, dead or not. Returns true if there was one.
    pub fn reap_all(&self, own: Option<usize>) -> bool {
        let mut any = false;
        for view in self.views() {
            let matters = view.counted() > 0 || view.ticket != 0;
            if Some(view.slot) != own && matters {
                any |= self.reap(view.slot);
            }
        }
        any
    }

    /// Takes a free slot, without pages.
    pub fn take_seat(&self, facts: &[(Field, u64)], program: &str) -> Result<Seat, BudgetError> {
        let failed = |error| directory::system_error("lock the ledger in", &self.path, error);
        let opened = PrivateFd::open(|| Ok(open_file(&self.directory)?));
        let locks = opened.map_err(|error| failed(errno_of(error)))?;
        let Some(file) = locks.get() else { return Err(BudgetError::Forked) };
        let lock = |at| lock_byte(file, at).map_err(|error| failed(errno_of(error)));
        let mut free = None;
        for slot in 0..MAX_MEMBERS {
            if lock(slot as u64)? {
                free = Some(slot);
                break;
            }
        }
        let Some(slot) = free else { return Err(BudgetError::TooManyMembers) };
        let generation = loop {
            let random = directory::random().map_err(failed)?;
            let generation = Guarantee::generation(random);
            if lock(GENERATIONS + generation)? {
                break generation;
            }
        };
        self.set(slot, Field::Ticket, 0);
        loop {
            let word = self.word(slot);
            if self.exchange_word(slot, word, word.next(0, 0)) {
                break;
            }
        }
        for field in [Field::Wants, Field::Ask, Field::Command, Field::Grown, Field::Live] {
            self.set(slot, field, 0);
        }
        for field in [Field::Cached, Field::Parked, Field::Asleep] {
            self.set(slot, field, 0);
        }
        for (field, value) in facts {
            self.set(slot, *field, *value);
        }
        self.set_name(slot, program);
        // From here on the slot is this member's. An exchange by one that clears it comes before or fails.
        self.swap(slot, Field::Guarantee, Guarantee { pages: 0, generation }.pack());
        self.table.number(0).fetch_max(slot as u64 + 1, SeqCst);
        Ok(Seat { slot, generation, locks })
    }

    /// Gives all pages back and leaves the slot. It does nothing in a forked child.
    pub fn leave(&self, seat: &Seat) {
        if seat.locks.get().is_none() {
            return;
        }
        self.set(seat.slot, Field::Ticket, 0);
        loop {
            let word = self.word(seat.slot);
            if self.exchange_word(seat.slot, word, word.next(0, 0)) {
                break;
            }
        }
        self.set(seat.slot, Field::Guarantee, 0);
    }

    fn set_name(&self, slot: usize, program: &str) {
        let mut bytes = [0; MAX_NAME];
        for (to, from) in bytes.iter_mut().zip(program.bytes()) {
            *to = from;
        }
        for (at, part) in bytes.chunks_exact(8).enumerate() {
            let number = part.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
            self.table.number(Ledger::at(slot, Field::Name) + at).store(number, SeqCst);
        }
    }

    pub fn name(&self, slot: usize) -> String {
        let first = Ledger::at(slot, Field::Name);
        let numbers = (0..NAME_WORDS).map(|at| self.table.number(first + at).load(SeqCst));
        let bytes: Vec<u8> =
            numbers.flat_map(u64::to_le_bytes).take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn open_file(directory: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(directory, FILE, flags, Mode::RUSR | Mode::WUSR)
}
