//! A membership in a group.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::core::word::{Guarantee, MAX_PAGES, PAGE, pages_of};
use super::error::{BudgetError, ClaimError};
use super::facts::Usage;
use super::gate::Gate;
use super::handlers::{Handlers, Request, Sleep, replace};
use super::inner::Inner;
use super::ledger::{Bell, Field, Ledger, Seat};
use super::server;
use super::status::{self, GroupStatus, Room};
use crate::directory::{self, errno_of};
use crate::system;

/// What a process says when it joins a group.
#[derive(Clone, Copy, Debug)]
pub struct BudgetConfig<'a> {
    /// A directory that only the user may use, as for [`turns`](crate::turns). It is made if it is missing,
    /// and its parent is there.
    pub directory: &'a Path,
    /// The card, by its UUID: the same text in all processes.
    pub card: &'a str,
    /// The group: processes that share the card's memory.
    pub group: &'a str,
    /// Name of the program in messages. 64 bytes of it are used.
    pub program: &'a str,
    /// Bytes that the group shares: the card's memory, less what contexts and other programs need. The
    /// same in all processes.
    pub capacity: u64,
    /// Bytes that this process can always claim. They are kept from the others, claimed or not.
    pub guaranteed: u64,
    /// Bytes that it may claim at most. `None` for all of the group's.
    pub limit: Option<u64>,
    /// The larger is served first, and gives back last.
    pub priority: u8,
    /// How long to wait until the others have given back the guaranteed part.
    pub timeout: Duration,
}

/// The budget of this process in a group. All methods can be called from several threads. Dropping it
/// gives all bytes back and leaves the group.
pub struct Budget {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn check_amounts(config: &BudgetConfig<'_>) -> Result<(), BudgetError> {
    let BudgetConfig { capacity, guaranteed, .. } = *config;
    let limit = config.limit.unwrap_or(capacity);
    let amounts = [capacity, guaranteed, config.limit.unwrap_or(0)];
    match amounts.into_iter().find(|bytes| pages_of(*bytes) > MAX_PAGES) {
        Some(bytes) => Err(BudgetError::Amount { bytes }),
        None if guaranteed > limit || guaranteed > capacity => {
            Err(BudgetError::Order { guaranteed, limit, capacity })
        }
        None => Ok(()),
    }
}

impl Budget {
    /// Joins a group. It claims the guaranteed part, for which the others give back what they are not
    /// guaranteed, and then gives it back: it is kept for this process. About 20 system calls, one for each
    /// member, and a thread.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used; if the others are guaranteed too much, or did not give back enough
    /// within the timeout; if they count with another capacity.
    pub fn join(config: &BudgetConfig<'_>) -> Result<Budget, ClaimError> {
        check_amounts(config)?;
        vramp_host::fork::watch();
        let BudgetConfig { directory, card, group, .. } = *config;
        let ledger = Ledger::open(directory, status::path_of(directory, card, group)?)?;
        let namespace = system::pid_namespace();
        let capacity = config.capacity / PAGE;
        let facts = [
            (Field::Priority, u64::from(config.priority)),
            (Field::Limit, config.limit.map_or(MAX_PAGES, |limit| limit / PAGE)),
            (Field::Capacity, capacity),
            (Field::Pid, u64::from(std::process::id())),
            (Field::Namespace, namespace),
        ];
        // Before a slot is taken: a fork between the two leaves it to the parent.
        let depth = vramp_host::fork::depth();
        let seat = ledger.take_seat(&facts, config.program)?;
        let inner = Arc::new(Inner {
            ledger,
            seat,
            namespace,
            capacity,
            depth,
            card: card.to_owned(),
            group: group.to_owned(),
            own: Mutex::default(),
            gate: Gate::default(),
            handlers: Handlers::default(),
            is_over: AtomicBool::new(false),
            wake_ups: AtomicU64::new(0),
        });
        inner.ledger.check()?;
        inner.check_capacity()?;
        let guaranteed = pages_of(config.guaranteed);
        inner.acquire(guaranteed, config.timeout, &mut || true)?;
        let Seat { slot, generation, .. } = inner.seat;
        let guarantee = Guarantee { pages: guaranteed, generation };
        inner.ledger.set(slot, Field::Guarantee, guarantee.pack());
        inner.give_back(guaranteed);
        let thread = server::start(&inner).map_err(|error| {
            let action = "start a thread for";
            BudgetError::from(directory::system_error(action, &inner.ledger.path, errno_of(error)))
        })?;
        Ok(Budget { inner, thread: Mutex::new(Some(thread)) })
    }

    /// Claims bytes, in whole pages of 2 MiB. Waits for them, in the order of priorities and of arrival,
    /// while the others are requested to give back what is idle, and then what their handlers release.
    /// With a timeout of zero it requests nothing and does not wait.
    ///
    /// Within the guaranteed part it never waits. Some atomic instructions for each member where the bytes
    /// are free.
    ///
    /// # Errors
    ///
    /// [`ClaimError::Limit`] if it would pass the own limit, [`ClaimError::Impossible`] if the others are
    /// guaranteed too much, and [`ClaimError::TimedOut`], which names who has what. Nothing is claimed
    /// then.
    pub fn claim(&self, bytes: u64, timeout: Duration) -> Result<(), ClaimError> {
        self.inner.acquire(pages_of(bytes), timeout, &mut || true)
    }

    /// Does the same, and gives up once `go_on` returns false. A wait calls it at least 60 times in a
    /// second, without a lock.
    ///
    /// # Errors
    ///
    /// As of [`Budget::claim`].
    pub fn claim_while(
        &self,
        bytes: u64,
        timeout: Duration,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<(), ClaimError> {
        self.inner.acquire(pages_of(bytes), timeout, &mut go_on)
    }

    /// Gives bytes back, in whole pages and at most those that are claimed. Returns how many. The memory
    /// was released to the card before. Wakes the first that wait: a system call for each of two.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn give_back(&self, bytes: u64) -> Result<u64, BudgetError> {
        self.inner.check_fork()?;
        Ok(self.inner.give_back(bytes / PAGE) * PAGE)
    }

    /// Returns the bytes that this process has claimed.
    pub fn claimed(&self) -> u64 {
        self.inner.claimed() * PAGE
    }

    /// Returns the bytes that it can always claim.
    pub fn guaranteed(&self) -> u64 {
        self.inner.guaranteed() * PAGE
    }

    /// Returns the bytes that it may claim at most. `None` for all of the group's.
    pub fn limit(&self) -> Option<u64> {
        let limit = self.inner.limit();
        (limit < MAX_PAGES).then_some(limit * PAGE)
    }

    /// Changes the limit. What is claimed above it stays until it is given back.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn set_limit(&self, limit: Option<u64>) -> Result<(), BudgetError> {
        self.inner.check_fork()?;
        let pages = limit.map_or(MAX_PAGES, |limit| (limit / PAGE).min(MAX_PAGES));
        self.inner.ledger.set(self.inner.seat.slot, Field::Limit, pages);
        Ok(())
    }

    /// Returns the bytes that the group shares.
    pub fn capacity(&self) -> u64 {
        self.inner.capacity * PAGE
    }

    /// Returns what this process can have. Some instructions for each member.
    ///
    /// # Errors
    ///
    /// In a forked child, or if the ledger was removed.
    pub fn room(&self) -> Result<Room, BudgetError> {
        self.inner.check_fork()?;
        self.inner.ledger.check()?;
        self.inner.ledger.reap_all(Some(self.inner.seat.slot));
        let limit = self.inner.limit().saturating_sub(self.inner.claimed());
        Ok(Room::of(self.inner.wanted(0), &self.inner.ledger.views(), limit))
    }

    /// Publishes what the memory is used for. The others request what is cached or parked first.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn publish(&self, usage: &Usage) -> Result<(), BudgetError> {
        self.inner.check_fork()?;
        self.inner.publish(usage);
        Ok(())
    }

    /// Returns the members of the group.
    ///
    /// # Errors
    ///
    /// In a forked child, or if the ledger was removed.
    pub fn status(&self) -> Result<GroupStatus, BudgetError> {
        self.inner.check_fork()?;
        self.inner.ledger.check()?;
        Ok(status::status(&self.inner.ledger, self.inner.namespace))
    }

    /// Returns the random number of this membership, which is its id in [`Budget::status`].
    pub fn id(&self) -> u64 {
        self.inner.seat.generation
    }

    /// Returns the card.
    pub fn card(&self) -> &str {
        &self.inner.card
    }

    /// Returns the group.
    pub fn group(&self) -> &str {
        &self.inner.group
    }

    /// Returns the directory of the group.
    pub fn directory(&self) -> &Path {
        &self.inner.ledger.path
    }

    /// Returns an error in a child of a fork, in which locks of the budget may never be released.
    ///
    /// # Errors
    ///
    /// [`BudgetError::Forked`].
    pub fn check_fork(&self) -> Result<(), BudgetError> {
        self.inner.check_fork()
    }

    /// Returns how often waits of this object woke up, for tests of costs.
    pub fn wake_ups(&self) -> u64 {
        self.inner.wake_ups.load(SeqCst)
    }
}

/// # Requests of others
impl Budget {
    /// Calls `handler` on a thread of the object when another member lacks bytes. The handler releases
    /// memory to the card and returns how many bytes; they are given back then. It replaces an earlier
    /// handler. No lock is held during a call; a panic counts as nothing released.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn on_request(
        &self,
        handler: impl Fn(&Request) -> u64 + Send + Sync + 'static,
    ) -> Result<(), BudgetError> {
        self.check_fork()?;
        replace(&self.inner.handlers.on_request, Some(Arc::new(handler)));
        Ok(())
    }

    /// Calls `handler` on a thread of the object when the user has this process paused or resumed, with
    /// `vramp ctl`. It returns true if that succeeded. It replaces an earlier handler.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn on_sleep(
        &self,
        handler: impl Fn(Sleep) -> bool + Send + Sync + 'static,
    ) -> Result<(), BudgetError> {
        self.check_fork()?;
        replace(&self.inner.handlers.on_sleep, Some(Arc::new(handler)));
        Ok(())
    }

    /// Calls `look` on a thread of the object when another process wants to know what the memory is used
    /// for, and with each request. What it returns is published. It replaces an earlier one.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn on_look(
        &self,
        look: impl Fn() -> Usage + Send + Sync + 'static,
    ) -> Result<(), BudgetError> {
        self.check_fork()?;
        replace(&self.inner.handlers.on_look, Some(Arc::new(look)));
        Ok(())
    }

    /// Removes the handlers. A call in progress goes on.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn remove_handlers(&self) -> Result<(), BudgetError> {
        self.check_fork()?;
        replace(&self.inner.handlers.on_request, None);
        replace(&self.inner.handlers.on_sleep, None);
        replace(&self.inner.handlers.on_look, None);
        Ok(())
    }
}

/// Waits for a call of a handler that is in progress, unless that call drops it.
impl Drop for Budget {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.inner.check_fork().is_err() {
            // The thread does not exist here.
            std::mem::forget(thread);
            return;
        }
        self.inner.is_over.store(true, SeqCst);
        self.inner.ledger.ring(self.inner.seat.slot, Bell::Serve);
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("inner", &self.inner).finish_non_exhaustive()
    }
}
