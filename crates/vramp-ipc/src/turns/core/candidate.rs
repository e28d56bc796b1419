//! One candidate's way to the turn.
//!
//! 1. It lists the entries and makes one of its own with a greater number.
//! 2. It lists again. If an entry with a greater key is there, the own one may be out of order: it is
//!    withdrawn, and the candidate begins again.
//! 3. Otherwise its place is fixed. It waits until the nearest live entry with a smaller key is gone,
//!    and lists again.
//! 4. With no live entry before it, it holds the turn, until its own entry is gone.
//!
//! *At most one candidate holds the turn.* Let A and B hold it, with A before B, both with a fixed
//! place. B listed, after its own entry was there, and found A neither listed nor live. So A's entry
//! was made after B's listing began. Then A listed after its entry was made, found B's entry, and
//! withdrew: its place is not fixed.
//!
//! *First come, first served.* A candidate that first lists after the place of another is fixed gets a greater
//! number.
//!
//! It relies on this: an entry is live from the moment at which others can list it until it is gone for
//! good, no key is used twice, and a listing has every entry that exists from its beginning to its end.

use super::entry::Key;

/// What the candidate does next, and with which method it reports the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// List the entries: [`Candidate::listed`].
    List,
    /// Withdraw the own entry, if there is one, and make one with this number:
    /// [`Candidate::created`].
    Create { number: u64 },
    /// Find out whether an entry is live: [`Candidate::probed`].
    Probe(Key),
    /// Wait until a live entry is gone: [`Candidate::left`].
    Wait(Key),
    /// The candidate holds the turn.
    Hold,
    /// The own entry is gone although it is live: the directory was removed or cleared.
    Lost,
}

#[derive(Debug)]
enum Phase {
    /// Looks for the greatest number.
    Unplaced,
    /// Has an entry whose place is not fixed.
    Unproven(Key),
    /// The place is fixed. `before` has the entries that may be live, the nearest last.
    Placed { own: Key, before: Vec<Key> },
}

/// The state of one candidate.
#[derive(Debug)]
pub struct Candidate {
    phase: Phase,
}

impl Candidate {
    /// Returns a candidate, whose first step is [`Next::List`].
    pub fn new() -> Candidate {
        Candidate { phase: Phase::Unplaced }
    }

    /// Returns true once the place in the line does not change any more.
    #[cfg(test)]
    pub fn is_placed(&self) -> bool {
        matches!(self.phase, Phase::Placed { .. })
    }

    /// Takes the keys of all entries in any order. O(n log n).
    pub fn listed(&mut self, keys: &[Key]) -> Next {
        let greatest = keys.iter().max();
        let own = match self.phase {
            Phase::Unplaced => {
                return Next::Create { number: greatest.map_or(1, |key| key.number + 1) };
            }
            Phase::Unproven(own) | Phase::Placed { own, .. } if !keys.contains(&own) => {
                return Next::Lost;
            }
            Phase::Unproven(own) => match greatest.filter(|greatest| **greatest > own) {
                Some(greatest) => {
                    self.phase = Phase::Unplaced;
                    return Next::Create { number: greatest.number + 1 };
                }
                None => own,
            },
            Phase::Placed { own, .. } => own,
        };
        let mut before: Vec<Key> = keys.iter().copied().filter(|key| *key < own).collect();
        before.sort_unstable();
        self.phase = Phase::Placed { own, before };
        self.nearest()
    }

    /// The own entry can be listed by others.
    pub fn created(&mut self, own: Key) -> Next {
        self.phase = Phase::Unproven(own);
        Next::List
    }

    /// Takes the answer to [`Next::Probe`]. An entry that is not live never is again.
    pub fn probed(&mut self, is_live: bool) -> Next {
        match &mut self.phase {
            Phase::Placed { before, .. } => match before.last() {
                Some(nearest) if is_live => return Next::Wait(*nearest),
                _ => drop(before.pop()),
            },
            phase => panic!("no entry was probed in {phase:?}"),
        }
        self.nearest()
    }

    /// The entry of [`Next::Wait`] is gone.
    pub fn left(&mut self) -> Next {
        Next::List
    }

    fn nearest(&self) -> Next {
        match &self.phase {
            Phase::Placed { before, .. } => {
                before.last().map_or(Next::Hold, |key| Next::Probe(*key))
            }
            phase => panic!("{phase:?} has no place"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64, random: u64) -> Key {
        Key { number, random }
    }

    #[test]
    fn the_first_candidate_holds_the_turn_after_two_listings() {
        let mut candidate = Candidate::new();
        assert_eq!(candidate.listed(&[]), Next::Create { number: 1 });
        assert_eq!(candidate.created(key(1, 5)), Next::List);
        assert!(!candidate.is_placed());
        assert_eq!(candidate.listed(&[key(1, 5)]), Next::Hold);
        assert!(candidate.is_placed());
    }

    #[test]
    fn a_candidate_waits_for_the_nearest_live_entry_only() {
        let mut candidate = Candidate::new();
        let line = [key(3, 0), key(1, 0), key(2, 0)];
        assert_eq!(candidate.listed(&line), Next::Create { number: 4 });
        candidate.created(key(4, 0));
        let line = [key(4, 0), key(3, 0), key(1, 0), key(2, 0)];
        assert_eq!(candidate.listed(&line), Next::Probe(key(3, 0)));
        assert_eq!(candidate.probed(false), Next::Probe(key(2, 0)));
        assert_eq!(candidate.probed(true), Next::Wait(key(2, 0)));
        assert_eq!(candidate.left(), Next::List);
        // Later entries change nothing any more.
        assert_eq!(candidate.listed(&[key(4, 0), key(5, 0)]), Next::Hold);
    }

    #[test]
    fn a_candidate_that_finds_a_greater_key_begins_again() {
        for greater in [key(1, 6), key(9, 0)] {
            let mut candidate = Candidate::new();
            candidate.listed(&[]);
            candidate.created(key(1, 5));
            let number = greater.number + 1;
            assert_eq!(candidate.listed(&[key(1, 5), greater]), Next::Create { number });
            assert!(!candidate.is_placed());
        }
    }

    #[test]
    fn a_candidate_whose_entry_is_gone_has_lost_its_place() {
        let mut candidate = Candidate::new();
        candidate.listed(&[]);
        candidate.created(key(1, 5));
        assert_eq!(candidate.listed(&[]), Next::Lost);
        candidate.listed(&[key(1, 5)]);
        assert_eq!(candidate.listed(&[key(2, 5)]), Next::Lost);
    }
}
