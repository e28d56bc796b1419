//! The memory of an allocator in the budget that its process has in a group of processes.
//!
//! [`vramp_ipc::budget`] counts what the processes of a group may use of a card. [`Allocator::join_budget`]
//! ties an allocator and its pools to it, so that none reserves memory that was not claimed:
//!
//! 1. The limit of the allocator's group is what is claimed. At first that is what is reserved already.
//! 2. A request that passes the limit claims what it lacks, before any other handler runs: with some
//!    memory ahead if that is free, so that steady growth claims rarely; otherwise exactly, while the other
//!    processes are requested to give back.
//! 3. A request of another process gets what is claimed and not reserved, then idle memory of the pools,
//!    which is returned to the card. If the program may lose something for it, the handlers of
//!    [`PoolBudget::on_reclaim`] run, and what they freed is returned.
//! 4. The budget ends with the last pool and the last [`PoolBudget`].
//!
//! ```
//! use std::time::Duration;
//! use vramp_alloc::budget::{Budget, BudgetConfig, Ahead};
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path().join("vramp");
//! let join = |program| Budget::join(&BudgetConfig {
//!     directory: &directory,
//!     card: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
//!     group: "serving",
//!     program,
//!     capacity: 8 << 30,
//!     guaranteed: 1 << 30,
//!     limit: None,
//!     priority: 0,
//!     timeout: Duration::from_secs(5),
//! });
//! let allocator = Allocator::new(vramp_alloc::open("sim:h200")?, Config::default())?;
//! let budget = allocator.join_budget(join("chat")?, Ahead::default())?;
//! let stream = allocator.create_stream()?;
//! let cache = allocator.malloc(Bytes::gib(6), stream)?;
//! assert!(budget.claimed() >= Bytes::gib(6));
//! allocator.free(cache, stream)?;
//!
//! // Another process gets what is idle here.
//! let other = join("search")?;
//! other.claim(6 << 30, Duration::from_secs(5))?;
//! assert!(allocator.reserved() <= Bytes::gib(2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Cost
//!
//! A request that the pools serve without new memory costs nothing more. One that claims costs some
//! atomic instructions for each member of the group, and a lock of each pool.
//!
//! Deliberately absent: memory that the program takes from the driver past its allocator, which is not
//! counted; and a way to leave the group while memory is reserved.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use thiserror::Error;
use vramp_core::{Bytes, Shortage};

pub use vramp_ipc::SharedDirectoryError;
pub use vramp_ipc::budget::{
    Budget, BudgetConfig, BudgetError, ClaimError, Command, Group as BudgetGroup, GroupName,
    GroupStatus, Member, Outcome, Request, Room, Shortfall, Sleep, Usage, groups,
};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::group::Group;

/// How an allocator claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Bytes that are claimed beyond a request where they are free.
    pub bytes: Bytes,
    /// How long a request waits for other processes to give back.
    pub patience: Duration,
}

impl Default for Ahead {
    /// 64 MiB ahead; 5 seconds of patience.
    fn default() -> Ahead {
        Ahead { bytes: Bytes::mib(64), patience: Duration::from_secs(5) }
    }
}

/// The allocator was not tied to the budget. It is as before, and the budget is dropped.
#[derive(Debug, Error)]
pub enum JoinBudgetError {
    /// The allocator's group has a budget already.
    #[error("the allocator has a budget already; an allocator has one, with all its pools")]
    HasBudget,
    /// What is reserved could not be claimed.
    #[error("the {reserved} that are reserved cannot be claimed: {error}")]
    Claim {
        /// Bytes reserved.
        reserved: Bytes,
        /// Why not.
        #[source]
        error: ClaimError,
    },
    /// The limit could not be set.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

type Reclaim = dyn Fn(Bytes) + Send + Sync;

/// The budget of an allocator and its pools.
#[derive(Clone)]
pub struct PoolBudget {
    tied: Arc<Tied>,
}

/// What ties a group of pools to a budget. The group's handler has it, and the handlers of the budget a
/// weak reference.
struct Tied {
    budget: Arc<Budget>,
    group: Weak<Group>,
    /// The limit that the allocator had, which holds as well.
    own_limit: Option<Bytes>,
    ahead: Ahead,
    /// Held while the limit changes. A claim comes before its raise, and its return after a lower limit:
    /// the limit is never above what is claimed.
    limit: Mutex<()>,
    reclaim: Mutex<Vec<Arc<Reclaim>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a claim is a multiple of.
const PAGE: Bytes = Bytes::mib(2);

fn whole_pages(bytes: Bytes) -> Bytes {
    bytes.checked_round_up(PAGE).unwrap_or(Bytes::new(u64::MAX).round_down(PAGE))
}

impl Tied {
    /// Claims what a request lacks. Returns true if it is to be tried again.
    fn grow(&self, shortage: &Shortage) -> bool {
        let Some(group) = self.group.upgrade() else { return false };
        let (Some(limit), Some(_)) = (group.limit(), shortage.limit) else { return false };
        let needed = group.reserved().saturating_add(whole_pages(shortage.requested));
        let lacks = needed.saturating_sub(limit).max(PAGE);
        let most = self.own_limit.map_or(Bytes::new(u64::MAX), |own| own.saturating_sub(limit));
        if lacks > most {
            return false;
        }
        let ahead = lacks.saturating_add(self.ahead.bytes).min(most.round_down(PAGE));
        let claims = [(ahead.max(lacks), Duration::ZERO), (lacks, self.ahead.patience)];
        for (bytes, patience) in claims {
            match self.budget.claim(bytes.count(), patience) {
                Ok(()) => return self.raise(&group, bytes),
                Err(error) => group.set_refusal(Some(error.to_string())),
            }
        }
        false
    }

    fn raise(&self, group: &Group, by: Bytes) -> bool {
        let _limit = lock(&self.limit);
        group.set_refusal(None);
        let limit = group.limit().unwrap_or(Bytes::ZERO).saturating_add(by);
        group.set_growth_limit(Some(limit)).is_ok()
    }

    /// Returns memory to the card and lowers the limit, for another process. Returns the bytes.
    fn give(&self, request: &Request) -> Bytes {
        let Some(group) = self.group.upgrade() else { return Bytes::ZERO };
        // Below the guarantee nothing is to be had for others.
        let spare = self.budget.claimed().saturating_sub(self.budget.guaranteed());
        let wanted = whole_pages(Bytes::new(request.bytes)).min(Bytes::new(spare));
        let mut given = self.lower(&group, wanted);
        if given < wanted {
            // What cannot be returned stays.
            let _ = group.trim_by(wanted - given);
            given += self.lower(&group, wanted - given);
        }
        if given < wanted && request.may_lose {
            let handlers = lock(&self.reclaim).clone();
            for handler in handlers {
                handler(wanted - given);
                group.wait_until_idle();
                let _ = group.trim_by(wanted - given);
                given += self.lower(&group, wanted - given);
                if given >= wanted {
                    break;
                }
            }
        }
        given
    }

    /// Lowers the limit by at most `most`, to what is reserved. Returns by how much.
    fn lower(&self, group: &Group, most: Bytes) -> Bytes {
        let _limit = lock(&self.limit);
        let Some(limit) = group.limit() else { return Bytes::ZERO };
        let target = limit.saturating_sub(most).max(whole_pages(group.reserved())).min(limit);
        if target == limit || group.set_growth_limit(Some(target)).is_err() {
            return Bytes::ZERO;
        }
        // A request may have grown until the last pool had the new limit. No later one does.
        let reserved = whole_pages(group.reserved());
        if reserved > target && group.set_growth_limit(Some(reserved.min(limit))).is_err() {
            return Bytes::ZERO;
        }
        limit - reserved.clamp(target, limit)
    }

    fn usage(&self) -> Usage {
        let Some(group) = self.group.upgrade() else { return Usage::default() };
        let mut usage = group.usage();
        let limit = group.limit().unwrap_or(Bytes::ZERO);
        usage.cached += limit.saturating_sub(group.reserved()).count();
        usage
    }
}

/// # Budgets across processes
impl Allocator {
    /// Ties this allocator and all its pools, also those that are created later, to a budget. What is
    /// reserved is claimed; from then on the limit is what is claimed, and the limit that the allocator had
    /// holds as well. Change the budget's limit afterwards, not the allocator's.
    ///
    /// It sets the budget's handlers of requests and looks.
    ///
    /// # Errors
    /// What is reserved cannot be claimed, or the allocator has a budget already.
    pub fn join_budget(
        &self,
        budget: impl Into<Arc<Budget>>,
        ahead: Ahead,
    ) -> Result<PoolBudget, JoinBudgetError> {
        let group = &self.shared().group;
        let own_limit = group.limit();
        if !group.take_budget_right() {
            return Err(JoinBudgetError::HasBudget);
        }
        let tied = Tied {
            budget: budget.into(),
            group: Arc::downgrade(group),
            own_limit,
            ahead,
            limit: Mutex::default(),
            reclaim: Mutex::default(),
        };
        let tied = Arc::new(tied);
        let joined = tied.begin(group);
        if joined.is_err() {
            // The limit is as it was, as far as the pools can be locked.
            let _ = group.set_growth_limit(own_limit);
            group.return_budget_right();
        }
        joined?;
        let grows = Arc::clone(&tied);
        group.handlers.add_first_handler(Arc::new(move |shortage| grows.grow(shortage)));
        let gives = Arc::downgrade(&tied);
        let give =
            move |request: &Request| gives.upgrade().map_or(0, |tied| tied.give(request).count());
        let looks = Arc::downgrade(&tied);
        let look = move || looks.upgrade().map_or_else(Usage::default, |tied| tied.usage());
        // They fail in a forked child only, where the claim failed before.
        let _ = tied.budget.on_request(give);
        let _ = tied.budget.on_look(look);
        Ok(PoolBudget { tied })
    }
}

impl Tied {
    /// Lets no pool grow, claims what they have, and lets them have it.
    fn begin(&self, group: &Group) -> Result<(), JoinBudgetError> {
        let _limit = lock(&self.limit);
        group.set_growth_limit(Some(group.reserved()))?;
        let reserved = whole_pages(group.reserved());
        let claimed = self.budget.claim(reserved.count(), self.ahead.patience);
        claimed.map_err(|error| JoinBudgetError::Claim { reserved, error })?;
        Ok(group.set_growth_limit(Some(reserved))?)
    }
}

impl PoolBudget {
    /// Returns the budget. Claims of the program's own, for memory that it takes past the allocator, go
    /// through it.
    pub fn budget(&self) -> &Budget {
        &self.tied.budget
    }

    /// Returns the bytes that the process has claimed.
    pub fn claimed(&self) -> Bytes {
        Bytes::new(self.tied.budget.claimed())
    }

    /// Calls `handler` with the bytes that another process lacks, after all idle memory was given back:
    /// it frees memory, evicts or parks pages, for instance. Then what is idle is returned to the card. It
    /// runs on the thread of the budget, without a lock; handlers run in the order of registration until
    /// enough is free.
    pub fn on_reclaim(&self, handler: impl Fn(Bytes) + Send + Sync + 'static) {
        lock(&self.tied.reclaim).push(Arc::new(handler));
    }

    /// Returns idle memory of the pools to the card, and gives back all that is claimed and not reserved
    /// beyond the guarantee. Returns the bytes.
    ///
    /// # Errors
    /// In a forked child.
    pub fn give_back_idle(&self) -> Result<Bytes, BudgetError> {
        self.tied.budget.check_fork()?;
        let request = Request { bytes: self.tied.budget.claimed(), may_lose: false };
        let given = self.tied.give(&request);
        self.tied.budget.give_back(given.count()).map(Bytes::new)
    }

    /// Returns why the last request was not granted what it lacked. `None` once one was.
    pub fn last_refusal(&self) -> Option<String> {
        self.tied.group.upgrade().and_then(|group| group.refusal())
    }
}

impl fmt::Debug for PoolBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBudget").field("budget", &self.tied.budget).finish_non_exhaustive()
    }
}
