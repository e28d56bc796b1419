//! Making room by moving data away, while a request waits.
//!
//! 1. Whoever holds memory that could leave a space registers a [`Spiller`] there
//!    ([`MemorySpace::register_spiller`](crate::MemorySpace::register_spiller)).
//! 2. A request that has to wait claims what is missing for it, of each of its spaces in turn, and
//!    calls the spillers there in its own thread, with no lock held. What others already spill is no
//!    part of its claim: no two spill for one deficit.
//! 3. What a spiller frees serves waiters in the moment in which it is freed. After each call the
//!    claim is what is still missing; at zero it stops.
//! 4. If memory still lacks, it tries again after pauses, as [`RetryPolicy`](crate::reserve::RetryPolicy) say, then only waits. News
//!    of more to spill ([`SpillerRegistration::notify_spillable`]) begin the tries anew.
//!
//! A spiller may reserve memory where its data goes, and that may spill there in turn. In the space
//! that it empties it cannot wait: the thread remembers which spaces it is spilling, and a wait for
//! them alone is an error. So spilling is never deeper than there are spaces.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::ledger::core::{Candidates, SpaceId, WaiterId};
use smallvec::SmallVec;
use vramp_core::Bytes;

pub use crate::ledger::core::Priority;
pub use crate::ledger::shell::retry::RetryPolicy;

use crate::ledger::shell::shared::{Shared, State};
use crate::ledger::shell::tracked::{
    ExhaustedResource, MemoryShortage, OutOfMemoryHandler, RecoveryAction,
};
use crate::sync::thread_local;

/// What a space lacks, for a spiller.
pub struct SpillRequest<'a> {
    space: SpaceId,
    bytes: Bytes,
    attempt: u32,
    /// Whose it is; `None` on demand.
    claim: Option<(&'a Shared, WaiterId)>,
}

impl SpillRequest<'_> {
    /// Where.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// How much was missing when the spiller was called.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The how manieth try it is for one request, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// What is missing now, to be asked between steps: less than before once memory came back, from
    /// this spiller or from elsewhere, and zero if the request does not wait any more. On demand
    /// nobody waits, and it stays what it was. One lock, O(requests that spill).
    pub fn left(&self) -> Bytes {
        let Some((shared, waiter)) = self.claim else { return self.bytes };
        let state = shared.look();
        // Nothing is missing for one that waits no more.
        state.queue.left_of_claim(&state.ledger, waiter).unwrap_or_default()
    }
}

/// Moves data out of a space when memory there runs short.
///
/// Called by the thread that needs the memory, by several at once, and with no lock held. A panic
/// is contained, counted, and taken for zero bytes. Any closure of the same form is one too.
pub trait Spiller: Send + Sync {
    /// Frees at least what the shortage says and no more than one step beyond it, or what there is;
    /// returns how much that was. All of it has come back to the space by then; whoever can free
    /// more later says so by [`SpillerRegistration::notify_spillable`].
    fn spill(&self, shortage: &SpillRequest<'_>) -> Bytes;
}

impl<F: Fn(&SpillRequest<'_>) -> Bytes + Send + Sync> Spiller for F {
    fn spill(&self, shortage: &SpillRequest<'_>) -> Bytes {
        self(shortage)
    }
}

/// When a request makes others' data move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spilling {
    /// Never: it takes what is free.
    Never,
    /// When it has to wait.
    #[default]
    BeforeWaiting,
    /// Also when it does not want to wait: [`now`](crate::RequestBuilder::now) then asks each
    /// spiller once.
    AlsoNow,
}

/// A registered spiller.
pub(crate) struct Registered {
    space: SpaceId,
    priority: Priority,
    spiller: Box<dyn Spiller>,
}

type Spillers = SmallVec<[Arc<Registered>; 4]>;

/// Keeps a spiller registered; it is called no more once this is dropped. A call that is under way
/// ends by itself.
#[must_use = "the spiller is called no more when this is dropped"]
pub struct SpillerRegistration {
    shared: Weak<Shared>,
    registered: Arc<Registered>,
}

impl SpillerRegistration {
    /// Says that there is more to spill than at the last call: those who wait here try again.
    /// O(waiters), and nothing if nobody waits.
    pub fn notify_spillable(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.notify_spillable(self.registered.space);
        }
    }
}

impl Drop for SpillerRegistration {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let gone = |other: &Arc<Registered>| !Arc::ptr_eq(other, &self.registered);
            shared.act(|state| state.spillers.retain(gone));
        }
    }
}

impl std::fmt::Debug for SpillerRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Registered { space, priority, .. } = *self.registered;
        write!(f, "a spiller of {space} with priority {}", priority.0)
    }
}

/// Spills what an allocation lacks and tries again; pauses if nothing was to be had. A handler of
/// shortages for [`Policies`](crate::tracked::Policies).
#[derive(Clone, Debug)]
pub struct SpillAndRetry {
    /// Where to make room.
    pub space: crate::MemorySpace,
}

impl OutOfMemoryHandler for SpillAndRetry {
    fn handle(&self, _attempt: u32, shortage: &MemoryShortage<'_>) -> RecoveryAction {
        let lacks = match shortage.exhausted {
            ExhaustedResource::Budget(refused) => {
                refused.requested.saturating_sub(refused.available)
            }
            ExhaustedResource::Device(_) => shortage.requested,
        };
        match self.space.spill(lacks) {
            Bytes::ZERO => RecoveryAction::RetryAfterPause,
            _ => RecoveryAction::Retry,
        }
    }
}

thread_local! {
    /// The spaces that this thread is spilling, each of one manager, told by its address.
    static EMPTYING: RefCell<Vec<(usize, SpaceId)>> = RefCell::default();
}

fn empties(shared: &Shared, space: SpaceId) -> bool {
    let entry = (std::ptr::from_ref(shared).addr(), space);
    EMPTYING.with(|spaces| spaces.borrow().contains(&entry))
}

/// True if this thread is spilling every one of these spaces: nobody would spill for it.
pub(crate) fn empties_all(shared: &Shared, spaces: &[SpaceId]) -> bool {
    spaces.iter().all(|&space| empties(shared, space))
}

/// Calls a spiller, in which this thread does not spill the same space again.
fn call(shared: &Shared, registered: &Registered, shortage: &SpillRequest<'_>) -> Bytes {
    EMPTYING.with(|spaces| {
        spaces.borrow_mut().push((std::ptr::from_ref(shared).addr(), shortage.space));
    });
    let freed = shared.contain(|| registered.spiller.spill(shortage));
    EMPTYING.with(|spaces| spaces.borrow_mut().pop());
    freed.unwrap_or_default()
}

impl State {
    /// The spillers of a space, the most important first.
    fn spillers_of(&self, space: SpaceId) -> Spillers {
        self.spillers.iter().filter(|known| known.space == space).map(Arc::clone).collect()
    }

    /// Claims what a new waiter lacks where somebody can spill it. False if nobody can.
    pub fn claim_at_start(&mut self, waiter: WaiterId, candidates: &[SpaceId]) -> bool {
        let spilled = |space: &&SpaceId| self.spillers.iter().any(|known| known.space == **space);
        let Some(&space) = candidates.iter().find(spilled) else { return false };
        self.queue.claim_deficit(&self.ledger, space, waiter).is_ok()
    }
}

impl Shared {
    pub fn register(
        self: &Arc<Shared>,
        space: SpaceId,
        priority: Priority,
        spiller: Box<dyn Spiller>,
    ) -> SpillerRegistration {
        let registered = Arc::new(Registered { space, priority, spiller });
        self.act(|state| {
            let place = state.spillers.partition_point(|known| known.priority >= priority);
            state.spillers.insert(place, Arc::clone(&registered));
        });
        self.notify_spillable(space);
        SpillerRegistration { shared: Arc::downgrade(self), registered }
    }

    /// Lets those who wait for a space try to spill again.
    fn notify_spillable(&self, space: SpaceId) {
        let seats = self.act(|state| state.seats_at(space));
        seats.iter().for_each(|seat| seat.call());
    }

    /// Spills on demand, and says how much.
    pub fn spill(&self, space: SpaceId, bytes: Bytes) -> Bytes {
        let mut spilled = Bytes::ZERO;
        if empties(self, space) {
            return spilled;
        }
        for registered in self.act(|state| state.spillers_of(space)) {
            let left = bytes.saturating_sub(spilled);
            if left.is_zero() {
                break;
            }
            let shortage = SpillRequest { space, bytes: left, attempt: 1, claim: None };
            let freed = call(self, &registered, &shortage);
            spilled = spilled.checked_add(freed).unwrap_or(Bytes::new(u64::MAX));
        }
        spilled
    }
}

/// How far a waiter came with its claim on one space.
enum Claimed {
    /// Nobody spills there, or nothing is missing.
    Nothing,
    /// All of it was spilled.
    All,
    /// Some of it is still missing.
    Short,
    /// It waits no more, or has no time left.
    Ended,
}

/// One waiter's tries to spill what it lacks.
pub(crate) struct Tries<'a> {
    shared: &'a Arc<Shared>,
    waiter: WaiterId,
    candidates: &'a Candidates,
    until: Option<Instant>,
    attempt: u32,
    over: bool,
    /// It has a claim, or had one.
    claims: bool,
}

impl Drop for Tries<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<'a> Tries<'a> {
    pub fn new(
        shared: &'a Arc<Shared>,
        waiter: WaiterId,
        candidates: &'a Candidates,
        until: Option<Instant>,
    ) -> Tries<'a> {
        // The request may have claimed something as it began to wait.
        Tries { shared, waiter, candidates, until, attempt: 0, over: false, claims: true }
    }

    /// There may be more to spill than before.
    pub fn renew(&mut self) {
        self.attempt = 0;
        self.over = false;
    }

    /// True if nothing more will be tried.
    pub fn are_over(&self) -> bool {
        self.over
    }

    /// Goes round the spaces once. Returns after which time to go again; `None` if the tries are
    /// over, by the last of them or because there is nobody to ask.
    pub fn go_round(&mut self) -> Option<Duration> {
        if self.over {
            return None;
        }
        self.attempt += 1;
        let mut asked = false;
        for &space in self.candidates {
            match self.claim(space) {
                Claimed::Nothing => continue,
                Claimed::Short => asked = true,
                Claimed::All => {
                    asked = true;
                    break;
                }
                Claimed::Ended => {
                    self.over = true;
                    return None;
                }
            }
        }
        let retries = self.shared.retries;
        if asked && self.attempt <= retries.most {
            return Some(retries.pause(self.attempt));
        }
        self.end();
        None
    }

    /// Gives the claim up: from now on the request only waits.
    pub fn end(&mut self) {
        self.over = true;
        if std::mem::take(&mut self.claims) {
            self.shared.act(|state| state.queue.end_claim(self.waiter));
        }
    }

    fn claim(&mut self, space: SpaceId) -> Claimed {
        let Tries { shared, waiter, .. } = *self;
        if empties(shared, space) {
            return Claimed::Nothing;
        }
        self.claims = true;
        let (spillers, claimed) = shared.act(|state| {
            let spillers = state.spillers_of(space);
            if spillers.is_empty() {
                return (spillers, Ok(None));
            }
            state.queue.end_claim(waiter);
            (spillers, state.queue.claim_deficit(&state.ledger, space, waiter))
        });
        let mut left = match claimed {
            Err(_) => return Claimed::Ended,
            Ok(None) if spillers.is_empty() => return Claimed::Nothing,
            // Others spill for all who lack memory here.
            Ok(None) => return Claimed::All,
            Ok(Some(left)) => left,
        };
        for registered in spillers {
            let claim = Some((&**shared, waiter));
            let shortage = SpillRequest { space, bytes: left, attempt: self.attempt, claim };
            let freed = call(shared, &registered, &shortage);
            let told = shared.act(|state| {
                // What came back lessens what is missing by itself, unless others took it. That
                // part of the claim is done too: what they left missing is for the next try.
                let now = state.queue.left_of_claim(&state.ledger, waiter).unwrap_or_default();
                let taken = freed.saturating_sub(left.saturating_sub(now));
                state.queue.spilled(&state.ledger, waiter, taken)
            });
            left = match told {
                Err(_) => return Claimed::Ended,
                Ok(Bytes::ZERO) => return Claimed::All,
                Ok(left) => left,
            };
            if self.until.is_some_and(|until| until <= Instant::now()) {
                return Claimed::Ended;
            }
        }
        Claimed::Short
    }
}
