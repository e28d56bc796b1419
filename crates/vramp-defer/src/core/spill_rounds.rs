//! The rounds of one spill request, and how much to request.
//!
//! A round chooses victims and evicts them. It may free less than chosen, since a physical handle
//! can be longer than a piece and is free only as a whole; another round then chooses more.

use super::Shortfall;
use vramp_core::{Bytes, Shortage};

/// Most rounds of one request.
const MAX_ROUNDS: usize = 8;

/// One spill request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpillRounds {
    deficit: Bytes,
    freed: Bytes,
    begun: usize,
    host_was_reclaimed: bool,
}

/// What follows a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterRound {
    /// Begin the next round.
    Continue,
    /// Wait for the work behind which memory is pending release; stop if there is none.
    WaitForPendingRelease,
    /// Nothing is missing any more.
    Stop,
}

impl SpillRounds {
    /// A request to free `deficit` bytes.
    pub fn new(deficit: Bytes) -> SpillRounds {
        SpillRounds { deficit, freed: Bytes::ZERO, begun: 0, host_was_reclaimed: false }
    }

    /// Bytes freed so far.
    pub fn freed(&self) -> Bytes {
        self.freed
    }

    /// Bytes still to free.
    pub fn missing(&self) -> Bytes {
        self.deficit.saturating_sub(self.freed)
    }

    /// Begins a round. Returns false if nothing is missing, or all rounds were used.
    pub fn begin(&mut self) -> bool {
        let begins = self.begun < MAX_ROUNDS && !self.missing().is_zero();
        self.begun += usize::from(begins);
        begins
    }

    /// Adds bytes that became free.
    pub fn add(&mut self, freed: Bytes) {
        self.freed += freed;
    }

    /// Returns true if pinned memory is to be reclaimed before the next round: victims found no
    /// room below the card. Once for each request.
    pub fn reclaims_host(&mut self, short: Option<&Shortfall>) -> bool {
        let no_room = short.is_some_and(|short| !short.no_room.is_zero());
        let reclaims = no_room && !self.host_was_reclaimed;
        self.host_was_reclaimed |= reclaims;
        reclaims
    }
}

impl AfterRound {
    /// Decides by what the round freed, and by what the caller of the spill still misses.
    pub fn of(still_missing: Bytes, freed: Bytes) -> AfterRound {
        if still_missing.is_zero() {
            AfterRound::Stop
        } else if freed.is_zero() {
            AfterRound::WaitForPendingRelease
        } else {
            AfterRound::Continue
        }
    }
}

/// Bytes to spill for an allocation that failed: what it lacks beside the largest free region and
/// the growth that the limit leaves, at least one page.
pub(crate) fn allocation_deficit(shortage: &Shortage, page: Bytes) -> Bytes {
    let growth =
        shortage.limit.map_or(Bytes::ZERO, |limit| limit.saturating_sub(shortage.reserved));
    shortage.requested.saturating_sub(shortage.largest + growth).max(page)
}

/// Bytes that a request of another pool lacks of the card: in whole pages what neither the free memory of
/// its pool nor `room` serves, the bytes that the pool may create now.
pub(crate) fn other_pool_deficit(shortage: &Shortage, page: Bytes, room: Bytes) -> Bytes {
    let beyond = shortage.requested.saturating_sub(shortage.largest);
    let missing = beyond.checked_round_up(page).unwrap_or(beyond);
    missing.saturating_sub(room.round_down(page))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn b(count: u64) -> Bytes {
        Bytes::new(count)
    }

    #[test]
    fn another_pool_lacks_whole_pages_beside_what_it_has_and_may_create() {
        let lacks = |requested, largest, room| {
            let (requested, largest, zero) = (b(requested), b(largest), b(0));
            let (reserved, used, free, waiting) = (zero, zero, zero, zero);
            let (limit, block_for) = (None, None);
            let shortage =
                Shortage { requested, reserved, used, free, largest, waiting, limit, block_for };
            other_pool_deficit(&shortage, b(4), b(room))
        };
        assert_eq!(lacks(16, 0, 0), b(16));
        assert_eq!(lacks(16, 6, 0), b(12));
        assert_eq!(lacks(16, 6, 7), b(8));
        assert_eq!(lacks(1, 0, 3), b(4));
        assert_eq!(lacks(16, 6, 12), b(0));
    }

    #[test]
    fn rounds_end_when_nothing_is_missing() {
        let mut rounds = SpillRounds::new(b(10));
        assert!(rounds.begin());
        rounds.add(b(7));
        assert_eq!(rounds.missing(), b(3));
        assert!(rounds.begin());
        rounds.add(b(5));
        assert!(!rounds.begin());
        assert_eq!((rounds.freed(), rounds.missing()), (b(12), b(0)));
        assert!(!SpillRounds::new(b(0)).begin());
    }

    #[test]
    fn rounds_end_after_eight_that_free_too_little() {
        let mut rounds = SpillRounds::new(b(100));
        let begun = (0..20).take_while(|_| rounds.begin()).count();
        assert_eq!(begun, 8);
    }

    #[test]
    fn the_host_is_reclaimed_once_and_only_where_room_was_lacking() {
        let mut rounds = SpillRounds::new(b(100));
        let leased = Shortfall { leased: b(1), ..Shortfall::default() };
        let no_room = Shortfall { no_room: b(1), ..Shortfall::default() };
        let asked = [None, Some(&leased), Some(&no_room), Some(&no_room)];
        let reclaims = asked.map(|short| rounds.reclaims_host(short));
        assert_eq!(reclaims, [false, false, true, false]);
    }

    #[test]
    fn what_follows_a_round() {
        for (missing, freed, after) in [
            (0, 0, AfterRound::Stop),
            (0, 5, AfterRound::Stop),
            (5, 0, AfterRound::WaitForPendingRelease),
            (5, 5, AfterRound::Continue),
        ] {
            assert_eq!(AfterRound::of(b(missing), b(freed)), after, "{missing} {freed}");
        }
    }
}
