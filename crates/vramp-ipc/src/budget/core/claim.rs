//! One member's way to more pages.
//!
//! 1. A claim within the member's own guarantee changes its word at once: the guarantee is in the sum
//!    already.
//! 2. Otherwise the member *announces*: it writes the pages into its own word as pending.
//! 3. It reads the number of slots, and then each slot once.
//! 4. If `max(claimed + pending, guaranteed)`, summed over all slots, is at most the capacity, one
//!    exchange makes the pending pages claimed. Otherwise one exchange withdraws them.
//!
//! Only the member itself raises its claim. Others may take its pending pages away, which changes the
//! word, so that its next exchange fails and it starts again; and they clear the slot once its process
//! has ended.
//!
//! *The granted sum never passes the capacity.* Suppose that it does after the grant at time t. Take
//! the claims whose pages are in that sum, and of these the one that was announced last, L. When L read
//! a slot after its announcement, all pages that are in the sum at t had been announced: they were
//! pending or claimed in that slot, or a part of its guarantee, and L counted them. A pending word that
//! another member took away was never granted. So L counted at least the sum at t, which is more
//! than the capacity, and was not granted.
//!
//! *A guarantee is a claim.* A member that joins claims its guaranteed pages as above, writes the
//! guarantee, and then gives the claimed pages back. A reader takes the word before the guarantee, and
//! so finds at least one of the two.
//!
//! *No member is in the way of another.* Each step is one atomic instruction on the member's own word, or
//! a read. A process that is killed or stopped between two steps leaves pending pages: they are
//! cleared with the dead member, or taken away after a few milliseconds.
//!
//! It relies on this: all accesses are sequentially consistent, a slot is found by its number only after
//! the number of slots was raised, and the words differ after each change.

use super::word::{MAX_PAGES, Word};

/// What the claim does next, and with which method it reports the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Read the own word: [`Claim::own`].
    Own,
    /// Change the own word, if it is still `from`: [`Claim::exchanged`].
    Exchange { from: Word, to: Word },
    /// Read the number of slots: [`Claim::counted`].
    Count,
    /// Read a slot, first its word and then its guarantee: [`Claim::loaded`].
    Load(usize),
    /// The pages are claimed.
    Granted,
    /// They are not.
    Refused(Refusal),
}

/// Why a claim was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The member would pass its own limit.
    Limit { claimed: u64 },
    /// The sum would pass the capacity by so many pages.
    Short {
        by: u64,
        /// Slots with pending pages, without which the claim would have fitted. Empty if it would not.
        contested: Vec<(usize, Word)>,
    },
}

/// A claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The member's slot.
    pub slot: usize,
    pub pages: u64,
    /// What the member is guaranteed.
    pub guaranteed: u64,
    pub limit: u64,
    pub capacity: u64,
}

#[derive(Debug)]
enum Phase {
    Start,
    /// Changes the word at once.
    Direct,
    Announcing(Word),
    Announced(Word),
    Reading {
        announced: Word,
        slots: usize,
        at: usize,
    },
    Granting,
    Withdrawing(Refusal),
}

/// The state of one claim.
#[derive(Debug)]
pub struct Claim {
    terms: Terms,
    phase: Phase,
    /// Pages of the slots that were read, and the pending ones among them.
    sum: u64,
    pending_sum: u64,
    pending: Vec<(usize, Word)>,
}

impl Claim {
    /// Returns a claim, whose first step is [`Next::Own`].
    pub fn new(terms: Terms) -> Claim {
        Claim { terms, phase: Phase::Start, sum: 0, pending_sum: 0, pending: Vec::new() }
    }

    /// Takes the own word. It has nothing pending: a member makes one claim at a time.
    pub fn own(&mut self, word: Word) -> Next {
        let Terms { pages, guaranteed, limit, .. } = self.terms;
        assert!(matches!(self.phase, Phase::Start) && word.pending == 0, "{word:?} in {self:?}");
        let claimed = word.claimed.saturating_add(pages);
        if claimed > limit.min(MAX_PAGES) {
            return Next::Refused(Refusal::Limit { claimed: word.claimed });
        }
        if claimed <= guaranteed {
            self.phase = Phase::Direct;
            return Next::Exchange { from: word, to: word.next(claimed, 0) };
        }
        let announced = word.next(word.claimed, pages);
        self.phase = Phase::Announcing(announced);
        Next::Exchange { from: word, to: announced }
    }

    /// Takes the result of an exchange.
    pub fn exchanged(&mut self, is_done: bool) -> Next {
        match std::mem::replace(&mut self.phase, Phase::Start) {
            Phase::Announcing(word) if is_done => {
                self.phase = Phase::Announced(word);
                Next::Count
            }
            Phase::Direct | Phase::Granting if is_done => Next::Granted,
            // Another member took the pending pages away, so nothing is left to withdraw.
            Phase::Withdrawing(refusal) => Next::Refused(refusal),
            Phase::Direct | Phase::Announcing(_) | Phase::Granting => Next::Own,
            phase => panic!("no exchange in {phase:?}"),
        }
    }

    /// Takes the number of slots that were ever used.
    pub fn counted(&mut self, slots: usize) -> Next {
        let Phase::Announced(announced) = self.phase else { panic!("no count in {self:?}") };
        (self.sum, self.pending_sum) = (announced.counted(self.terms.guaranteed), 0);
        self.pending.clear();
        self.phase = Phase::Reading { announced, slots, at: 0 };
        self.read_next()
    }

    /// Takes a slot.
    pub fn loaded(&mut self, word: Word, guaranteed: u64) -> Next {
        let Phase::Reading { at, .. } = &mut self.phase else { panic!("no load in {self:?}") };
        let counted = word.counted(guaranteed);
        self.sum += counted;
        if word.pending > 0 {
            self.pending_sum += counted - word.claimed.max(guaranteed);
            self.pending.push((*at, word));
        }
        *at += 1;
        self.read_next()
    }

    fn read_next(&mut self) -> Next {
        let Phase::Reading { announced, slots, at } = &mut self.phase else {
            panic!("nothing to read in {self:?}")
        };
        if *at == self.terms.slot {
            *at += 1;
        }
        if *at < *slots {
            return Next::Load(*at);
        }
        let from = *announced;
        let Some(by) = self.sum.checked_sub(self.terms.capacity).filter(|by| *by > 0) else {
            self.phase = Phase::Granting;
            return Next::Exchange { from, to: from.next(from.claimed + from.pending, 0) };
        };
        let is_contested = by <= self.pending_sum;
        let contested = if is_contested { std::mem::take(&mut self.pending) } else { Vec::new() };
        self.phase = Phase::Withdrawing(Refusal::Short { by, contested });
        Next::Exchange { from, to: from.next(from.claimed, 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(claimed: u64, pending: u64, sequence: u64) -> Word {
        Word { claimed, pending, sequence }
    }

    fn claim(pages: u64) -> Claim {
        Claim::new(Terms { slot: 1, pages, guaranteed: 4, limit: 50, capacity: 100 })
    }

    /// Announces and reads two other slots.
    fn read(claim: &mut Claim, others: [(Word, u64); 2]) -> Next {
        let Next::Exchange { to, .. } = claim.own(word(3, 0, 7)) else { panic!("{claim:?}") };
        assert_eq!((to.claimed, to.sequence), (3, 8));
        assert_eq!(claim.exchanged(true), Next::Count);
        assert_eq!(claim.counted(3), Next::Load(0));
        assert_eq!(claim.loaded(others[0].0, others[0].1), Next::Load(2));
        claim.loaded(others[1].0, others[1].1)
    }

    #[test]
    fn a_claim_within_the_guarantee_reads_no_other_slot() {
        let mut claim = claim(1);
        let next = claim.own(word(3, 0, 7));
        assert_eq!(next, Next::Exchange { from: word(3, 0, 7), to: word(4, 0, 8) });
        assert_eq!(claim.exchanged(true), Next::Granted);
    }

    #[test]
    fn a_claim_that_fits_exactly_is_granted() {
        let mut claim = claim(10);
        let next = read(&mut claim, [(word(40, 0, 0), 0), (word(1, 2, 0), 47)]);
        assert_eq!(next, Next::Exchange { from: word(3, 10, 8), to: word(13, 0, 9) });
        assert_eq!(claim.exchanged(true), Next::Granted);
    }

    #[test]
    fn a_claim_that_passes_the_capacity_is_withdrawn() {
        let mut claim = claim(10);
        let next = read(&mut claim, [(word(40, 0, 0), 0), (word(48, 0, 0), 0)]);
        assert_eq!(next, Next::Exchange { from: word(3, 10, 8), to: word(3, 0, 9) });
        let refused = Next::Refused(Refusal::Short { by: 1, contested: Vec::new() });
        assert_eq!(claim.exchanged(true), refused);
    }

    #[test]
    fn a_claim_that_only_pending_pages_keep_out_names_them() {
        // Four of the eight pending pages pass the other's guarantee.
        for (claimed, by, is_contested) in [(40, 1, true), (43, 4, true), (44, 5, false)] {
            let mut claim = claim(10);
            let other = word(40, 8, 0);
            read(&mut claim, [(word(claimed, 0, 0), 0), (other, 44)]);
            let contested = if is_contested { vec![(2, other)] } else { Vec::new() };
            let refused = Next::Refused(Refusal::Short { by, contested });
            assert_eq!(claim.exchanged(true), refused);
        }
    }

    #[test]
    fn a_claim_over_the_limit_announces_nothing() {
        let next = claim(48).own(word(3, 0, 7));
        assert_eq!(next, Next::Refused(Refusal::Limit { claimed: 3 }));
        assert!(matches!(claim(47).own(word(3, 0, 7)), Next::Exchange { .. }));
        assert!(matches!(claim(u64::MAX).own(word(3, 0, 7)), Next::Refused(_)));
    }

    #[test]
    fn a_claim_whose_pending_pages_were_taken_away_starts_again() {
        let mut claim = claim(10);
        read(&mut claim, [(word(0, 0, 0), 0), (word(0, 0, 0), 0)]);
        assert_eq!(claim.exchanged(false), Next::Own);
        let next = read(&mut claim, [(word(40, 0, 0), 0), (word(47, 0, 0), 0)]);
        assert!(matches!(next, Next::Exchange { to: Word { claimed: 13, .. }, .. }));
        // Withdrawn by another member: it was refused all the same.
        let mut claim = self::claim(10);
        read(&mut claim, [(word(90, 0, 0), 0), (word(0, 0, 0), 0)]);
        assert!(matches!(claim.exchanged(false), Next::Refused(_)));
    }
}
