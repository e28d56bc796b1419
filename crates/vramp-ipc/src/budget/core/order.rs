//! Who is served first, and which member is requested to give pages back.
//!
//! - *Waiting members* are served by priority, then in the order in which they began to wait. A member
//!   that does not wait yet comes last of its priority. One whose last sign of life is older than
//!   [`STALE_MS`] is passed over: it was stopped, and it is served once it goes on.
//! - *Requests to give back* go to one member after the other. First to those that have published idle
//!   memory, then to the others, for what is idle: the lowest priority first, then the one whose last claim
//!   is the oldest. Then, for what their handlers release, to those of at most the waiting member's
//!   priority, in the same order. No member is requested to give up what it is guaranteed.
//! - A member that has not answered a request for [`ANSWER_MS`] is passed over until it does.

use std::cmp::Reverse;

use super::word::{Ask, Guarantee, Word};

/// A waiting member gives a sign of life this often.
pub const BEAT_MS: u64 = 15;
/// A waiting member without a sign of life for so long is passed over.
pub const STALE_MS: u64 = 45;
/// A member that does not answer a request for so long is passed over.
pub const ANSWER_MS: u64 = 30;

/// A member, as its slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct View {
    pub slot: usize,
    pub word: Word,
    pub guarantee: Guarantee,
    pub priority: u64,
    /// Pages that it waits for, if `ticket` is not zero.
    pub wants: u64,
    /// When it began to wait, in nanoseconds; zero if it does not.
    pub ticket: u64,
    /// Its last sign of life while it waits.
    pub beat_ms: u64,
    /// A request that it has not taken yet.
    pub ask: Option<Ask>,
    /// Pages that it can give back and loses nothing.
    pub idle: u64,
    /// When it claimed last.
    pub grown_ms: u64,
}

impl View {
    pub fn counted(&self) -> u64 {
        self.word.counted(self.guarantee.pages)
    }

    /// Returns the pages beyond the guarantee.
    fn spare(&self) -> u64 {
        self.word.claimed.saturating_sub(self.guarantee.pages)
    }

    fn rank(&self) -> Rank {
        Rank { priority: Reverse(self.priority), ticket: self.ticket, slot: self.slot }
    }

    fn waits(&self, now_ms: u64) -> bool {
        self.ticket != 0 && now_ms.saturating_sub(self.beat_ms) <= STALE_MS
    }

    fn is_silent(&self, now_ms: u64) -> bool {
        self.ask.is_some_and(|ask| now_ms.saturating_sub(ask.since_ms) >= ANSWER_MS)
    }
}

/// The place of a waiting member: the smallest is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub priority: Reverse<u64>,
    pub ticket: u64,
    pub slot: usize,
}

/// Returns the slots of the members that are served first, at most `most`.
pub fn first_waiting(views: &[View], now_ms: u64, most: usize) -> Vec<usize> {
    let mut waiting: Vec<&View> = views.iter().filter(|view| view.waits(now_ms)).collect();
    waiting.sort_unstable_by_key(|view| view.rank());
    waiting.iter().take(most).map(|view| view.slot).collect()
}

/// Returns true if another member is served before this one.
pub fn is_behind(views: &[View], own: Rank, now_ms: u64) -> bool {
    let before = |view: &View| view.slot != own.slot && view.waits(now_ms) && view.rank() < own;
    views.iter().any(before)
}

/// A request for pages, by one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub slot: usize,
    pub pages: u64,
    pub capacity: u64,
}

impl Wanted {
    /// Returns the pages that the sum with these would have, over all members, each by `count`.
    fn sum(&self, views: &[View], count: impl Fn(&View) -> u64) -> u64 {
        let each = views.iter().map(|view| match view.slot == self.slot {
            true => (view.word.claimed + self.pages).max(view.guarantee.pages),
            false => count(view),
        });
        each.sum()
    }

    /// Returns the pages by which a claim would pass the capacity, whatever is pending.
    pub fn short_by(&self, views: &[View]) -> u64 {
        let claimed = |view: &View| view.word.claimed.max(view.guarantee.pages);
        self.sum(views, claimed).saturating_sub(self.capacity)
    }

    /// Returns the most pages that the member can get beyond what it has, if all others give back all but
    /// their guarantees.
    pub fn most(&self, views: &[View]) -> u64 {
        let none = Wanted { pages: 0, ..*self };
        let own = views.iter().find(|view| view.slot == self.slot);
        let claimed = own.map_or(0, |own| own.word.claimed);
        let own = own.map_or(0, |own| own.word.claimed.max(own.guarantee.pages));
        let others = none.sum(views, |view| view.guarantee.pages) - own;
        self.capacity.saturating_sub(others).saturating_sub(claimed)
    }

    /// Returns the pages that the member can claim now.
    pub fn available(&self, views: &[View]) -> u64 {
        self.within(views, View::counted)
    }

    /// Returns the pages that the member can claim once the others have given back what is idle.
    pub fn obtainable(&self, views: &[View]) -> u64 {
        self.within(views, |view| view.counted() - view.idle.min(view.spare()))
    }

    fn within(&self, views: &[View], count: impl Fn(&View) -> u64) -> u64 {
        let none = Wanted { pages: 0, ..*self };
        let free = self.capacity.saturating_sub(none.sum(views, count));
        // What the member is guaranteed and has not claimed is in the sum.
        let own = views.iter().find(|view| view.slot == self.slot);
        free + own.map_or(0, |own| own.guarantee.pages.saturating_sub(own.word.claimed))
    }
}

/// A member that is requested to give pages back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub slot: usize,
    pub generation: u64,
    pub pages: u64,
    pub may_lose: bool,
}

/// Returns the member to request next, of those that were not in this round.
pub fn next_target(
    views: &[View],
    wanted: Wanted,
    asked: &[Target],
    now_ms: u64,
) -> Option<Target> {
    let by = wanted.short_by(views);
    let own_priority =
        views.iter().find(|view| view.slot == wanted.slot).map_or(0, |own| own.priority);
    let target = |view: &View, most: u64, may_lose| Target {
        slot: view.slot,
        generation: view.guarantee.generation,
        pages: most.min(by),
        may_lose,
    };
    let was_asked = |target: &Target| {
        let same = |other: &&Target| {
            (other.slot, other.generation, other.may_lose)
                == (target.slot, target.generation, target.may_lose)
        };
        asked.iter().any(|other| same(&other))
    };
    let mut others: Vec<&View> = views
        .iter()
        .filter(|view| view.slot != wanted.slot && view.spare() > 0 && !view.is_silent(now_ms))
        .collect();
    others.sort_unstable_by_key(|view| (view.priority, view.grown_ms, view.slot));
    let (idle, unknown): (Vec<&View>, Vec<&View>) =
        others.iter().copied().partition(|view| view.idle > 0);
    let idle = idle.into_iter().map(|view| target(view, view.idle.min(view.spare()), false));
    let unknown = unknown.into_iter().map(|view| target(view, view.spare(), false));
    let losing = others.iter().filter(|view| view.priority <= own_priority);
    let losing = losing.map(|view| target(view, view.spare(), true));
    idle.chain(unknown).chain(losing).find(|target| by > 0 && !was_asked(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1000;

    fn view(slot: usize, claimed: u64, guaranteed: u64) -> View {
        View {
            slot,
            word: Word { claimed, ..Word::default() },
            guarantee: Guarantee { pages: guaranteed, generation: slot as u64 + 1 },
            priority: 5,
            ..View::default()
        }
    }

    fn waiting(slot: usize, priority: u64, ticket: u64) -> View {
        View { priority, ticket, wants: 1, beat_ms: NOW, ..view(slot, 0, 0) }
    }

    #[test]
    fn members_wait_by_priority_and_then_by_age() {
        let views = [waiting(0, 5, 30), waiting(1, 7, 40), waiting(2, 5, 20), view(3, 9, 0)];
        assert_eq!(first_waiting(&views, NOW, 9), [1, 2, 0]);
        assert_eq!(first_waiting(&views, NOW, 2), [1, 2]);
        let rank = |slot: usize| views[slot].rank();
        assert!(!is_behind(&views, rank(1), NOW) && is_behind(&views, rank(2), NOW));
        // A newcomer.
        let newcomer = |priority| Rank { priority: Reverse(priority), ticket: 99, slot: 3 };
        assert!(is_behind(&views, newcomer(5), NOW) && is_behind(&views, newcomer(7), NOW));
        assert!(!is_behind(&views, newcomer(8), NOW));
    }

    #[test]
    fn a_waiting_member_without_a_sign_of_life_is_passed_over() {
        let views = [waiting(0, 5, 10), waiting(1, 5, 20)];
        let late = |ms| View { beat_ms: NOW - ms, ..views[0] };
        assert!(is_behind(&[late(STALE_MS), views[1]], views[1].rank(), NOW));
        assert!(!is_behind(&[late(STALE_MS + 1), views[1]], views[1].rank(), NOW));
        assert_eq!(first_waiting(&[late(STALE_MS + 1), views[1]], NOW, 9), [1]);
    }

    #[test]
    fn what_a_member_can_have_counts_guarantees_and_idle_memory() {
        let mut views = [view(0, 10, 20), view(1, 30, 15), view(2, 5, 25)];
        views[1].idle = 20;
        let wanted = Wanted { slot: 0, pages: 11, capacity: 80 };
        // 20 + 30 + 25 of 80.
        assert_eq!((wanted.available(&views), wanted.obtainable(&views)), (15, 30));
        assert_eq!(wanted.most(&views), 30);
        assert_eq!(
            (wanted.short_by(&views), Wanted { pages: 20, ..wanted }.short_by(&views)),
            (0, 5)
        );
        views[1].word.pending = 3;
        assert_eq!((wanted.available(&views), wanted.short_by(&views)), (12, 0));
        // A process that is no member.
        let newcomer = Wanted { slot: usize::MAX, pages: 0, capacity: 80 };
        assert_eq!((newcomer.available(&views), newcomer.most(&views)), (2, 20));
    }

    #[test]
    fn idle_memory_is_requested_first_and_then_what_handlers_release() {
        let mut views =
            [view(0, 0, 0), view(1, 30, 10), view(2, 30, 0), view(3, 30, 0), view(4, 10, 8)];
        (views[1].idle, views[1].grown_ms) = (25, 9);
        (views[2].idle, views[2].grown_ms) = (3, 8);
        (views[3].priority, views[3].idle) = (9, 3);
        let wanted = Wanted { slot: 0, pages: 12, capacity: 100 };
        let mut asked = Vec::new();
        while let Some(target) = next_target(&views, wanted, &asked, NOW) {
            asked.push(target);
        }
        let found: Vec<_> = asked.iter().map(|to| (to.slot, to.pages, to.may_lose)).collect();
        let idle = [(2, 3, false), (1, 12, false), (3, 3, false), (4, 2, false)];
        let expected = [&idle[..], &[(4, 2, true), (2, 12, true), (1, 12, true)]].concat();
        assert_eq!(found, expected);
        // One that does not answer is passed over.
        views[2].ask = Some(Ask { pages: 1, may_lose: false, since_ms: NOW - ANSWER_MS });
        assert_eq!(next_target(&views, wanted, &[], NOW).map(|to| to.slot), Some(1));
        // No request for what fits.
        let fits = Wanted { pages: 0, ..wanted };
        assert_eq!(next_target(&views, fits, &[], NOW), None);
    }
}
