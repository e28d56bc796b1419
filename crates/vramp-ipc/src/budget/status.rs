//! What can be read about the members of a group.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::clock::now_ns;
use super::command::{Command, Outcome, send};
use super::core::order::{View, Wanted};
use super::core::word::{MAX_PAGES, PAGE};
use super::error::BudgetError;
use super::facts::{Member, Usage};
use super::ledger::{Bell, Field, Ledger};
use crate::directory::is_name;
use crate::system;

/// The members of a group at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupStatus {
    /// Bytes that the members share; `None` without members.
    pub capacity: Option<u64>,
    /// In the order of their slots.
    pub members: Vec<Member>,
    /// True if nothing changed while it was read. Otherwise the members were read one after the other.
    pub is_exact: bool,
}

impl GroupStatus {
    /// Returns the bytes that count against the capacity: what is claimed or guaranteed, whichever is more.
    pub fn counted(&self) -> u64 {
        self.members.iter().map(|member| member.claimed.max(member.guaranteed)).sum()
    }

    /// Returns the bytes that no member has claimed or is guaranteed.
    pub fn free(&self) -> u64 {
        self.capacity.unwrap_or(0).saturating_sub(self.counted())
    }
}

/// A group of a card, as its name says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupName {
    /// The card.
    pub card: String,
    /// The group.
    pub group: String,
}

const PREFIX: &str = "budget-";

/// Returns the directory of a group.
pub(super) fn path_of(base: &Path, card: &str, group: &str) -> Result<PathBuf, BudgetError> {
    match [card, group].into_iter().find(|name| !is_name(name)) {
        Some(name) => Err(BudgetError::Name { name: name.to_owned() }),
        None => Ok(base.join(format!("{PREFIX}{card}@{group}"))),
    }
}

/// Returns the groups that have a ledger in `directory`, those without members too. Empty if it is
/// missing.
pub fn groups(directory: &Path) -> Vec<GroupName> {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let group = |name: &str| {
        let (card, group) = name.strip_prefix(PREFIX)?.split_once('@')?;
        let is_one = is_name(card) && is_name(group);
        is_one.then(|| GroupName { card: card.to_owned(), group: group.to_owned() })
    };
    let mut groups: Vec<_> =
        files.filter_map(|file| file.file_name().to_str().and_then(group)).collect();
    groups.sort();
    groups
}

/// A group that this process looks at, without being a member. Costs no thread.
#[derive(Debug)]
pub struct Group {
    ledger: Ledger,
    namespace: u64,
}

impl Group {
    /// Opens a group. Its ledger is made if it is missing.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used, or a name has other characters.
    pub fn open(directory: &Path, card: &str, group: &str) -> Result<Group, BudgetError> {
        let ledger = Ledger::open(directory, path_of(directory, card, group)?)?;
        Ok(Group { ledger, namespace: system::pid_namespace() })
    }

    /// Returns the live members. A system call for each, and two files of the kernel.
    ///
    /// # Errors
    ///
    /// If the ledger was removed.
    pub fn status(&self) -> Result<GroupStatus, BudgetError> {
        self.ledger.check()?;
        Ok(status(&self.ledger, self.namespace))
    }

    /// Requests all members to publish what their memory is used for ([`Budget::on_look`]). They do it
    /// within a millisecond or so, if they run. A system call for each.
    ///
    /// # Errors
    ///
    /// If the ledger was removed.
    ///
    /// [`Budget::on_look`]: super::Budget::on_look
    pub fn refresh(&self) -> Result<(), BudgetError> {
        self.ledger.check()?;
        for view in self.ledger.views() {
            self.ledger.ring(view.slot, Bell::Serve);
        }
        Ok(())
    }

    /// Returns the bytes that a process could claim now, and those that it could once the members have
    /// given back what is idle. `None` without members.
    ///
    /// # Errors
    ///
    /// If the ledger was removed.
    pub fn room(&self) -> Result<Option<Room>, BudgetError> {
        self.ledger.check()?;
        self.ledger.reap_all(None);
        let views = self.ledger.views();
        let capacity = views.first().map(|view| self.ledger.get(view.slot, Field::Capacity));
        Ok(capacity.map(|capacity| {
            Room::of(Wanted { slot: usize::MAX, pages: 0, capacity }, &views, MAX_PAGES)
        }))
    }

    /// Sends a command to a member, and waits for what comes of it.
    ///
    /// # Errors
    ///
    /// If there is no such member any more.
    pub fn send(
        &self,
        member: u64,
        command: Command,
        timeout: Duration,
    ) -> Result<Outcome, BudgetError> {
        self.ledger.check()?;
        send(&self.ledger, member, command, timeout)
    }
}

/// What a process can have of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that it can claim now.
    pub available: u64,
    /// Bytes that it can claim once the others have given back what is idle.
    pub obtainable: u64,
    /// Bytes that it can claim if the others give back all that they are not guaranteed.
    pub most: u64,
}

impl Room {
    pub(super) fn of(wanted: Wanted, views: &[View], limit: u64) -> Room {
        let amounts = [wanted.available(views), wanted.obtainable(views), wanted.most(views)];
        let [available, obtainable, most] = amounts.map(|pages| pages.min(limit) * PAGE);
        Room { available, obtainable, most }
    }
}

/// Looks until nothing changes, a few times.
const LOOKS: usize = 64;

pub(super) fn status(ledger: &Ledger, namespace: u64) -> GroupStatus {
    let words = |views: &[View]| -> Vec<_> {
        views.iter().map(|view| (view.slot, view.word, view.guarantee)).collect()
    };
    let mut views = ledger.views();
    let mut is_exact = false;
    for _ in 0..LOOKS {
        let again = ledger.views();
        is_exact = words(&again) == words(&views);
        views = again;
        if is_exact {
            break;
        }
    }
    let capacity = views.first().map(|view| ledger.get(view.slot, Field::Capacity) * PAGE);
    let live = views.iter().filter(|view| ledger.is_live(view.guarantee.generation));
    let members = live.map(|view| member(ledger, view, namespace)).collect();
    GroupStatus { capacity, members, is_exact }
}

/// Returns the other members, those with the most claimed first.
pub(super) fn others(ledger: &Ledger, views: &[View], own: usize, namespace: u64) -> Vec<Member> {
    let others = views.iter().filter(|view| view.slot != own);
    let mut members: Vec<_> = others.map(|view| member(ledger, view, namespace)).collect();
    members.sort_by_key(|member| std::cmp::Reverse(member.claimed));
    members
}

pub(super) fn member(ledger: &Ledger, view: &View, namespace: u64) -> Member {
    let get = |field| ledger.get(view.slot, field);
    let pid = u32::try_from(get(Field::Pid)).unwrap_or(0);
    let is_pid_valid = namespace != 0 && get(Field::Namespace) == namespace;
    let limit = get(Field::Limit);
    let waited = Duration::from_nanos(now_ns().saturating_sub(view.ticket));
    Member {
        id: view.guarantee.generation,
        program: ledger.name(view.slot),
        pid,
        is_pid_valid,
        is_stopped: is_pid_valid && system::is_stopped(pid),
        priority: u8::try_from(view.priority).unwrap_or(u8::MAX),
        claimed: view.word.claimed * PAGE,
        guaranteed: view.guarantee.pages * PAGE,
        limit: (limit < MAX_PAGES).then(|| limit * PAGE),
        usage: Usage {
            live: get(Field::Live),
            cached: get(Field::Cached),
            parked: get(Field::Parked),
            asleep: get(Field::Asleep),
        },
        waiting: (view.ticket != 0).then(|| (view.wants * PAGE, waited)),
    }
}
