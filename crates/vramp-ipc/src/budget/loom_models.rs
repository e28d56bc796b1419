//! Loom models of the ledger: every order of the instructions of a few members, and every value that a
//! load may return. `cargo xtask loom` explores them.
//!
//! Loom takes a sequentially consistent access for an acquire or release, so the fences are there that
//! the ledger has.
//!
//! 1. Two members claim at once what only one can have.
//! 2. A third takes away what is pending meanwhile.
//! 3. One joins with a guarantee while another claims.
//! 4. A dead member's slot is cleared while another process takes it.
//! 5. One begins to wait while another gives back.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering::SeqCst, fence};
use loom::thread;

use super::core::claim::{Claim, Next, Terms};
use super::core::word::{Guarantee, Word};

const CAPACITY: u64 = 10;

#[derive(Default)]
struct Slot {
    word: AtomicU64,
    guarantee: AtomicU64,
    ticket: AtomicU64,
}

impl Slot {
    fn word(&self) -> Word {
        Word::unpack(self.word.load(SeqCst))
    }

    fn exchange(&self, from: Word, to: Word) -> bool {
        let is_done = self.word.compare_exchange(from.pack(), to.pack(), SeqCst, SeqCst).is_ok();
        fence(SeqCst);
        is_done
    }

    fn guaranteed(&self) -> u64 {
        Guarantee::unpack(self.guarantee.load(SeqCst)).pages
    }

    fn counted(&self) -> u64 {
        let word = self.word();
        word.claimed.max(self.guaranteed())
    }
}

fn slots<const N: usize>() -> Arc<[Slot; N]> {
    Arc::new(std::array::from_fn(|_| Slot::default()))
}

/// Performs a claim as `Inner::attempt` does. Returns true if it was granted.
fn claim<const N: usize>(slots: &[Slot; N], slot: usize, pages: u64, guaranteed: u64) -> bool {
    let terms = Terms { slot, pages, guaranteed, limit: CAPACITY, capacity: CAPACITY };
    let mut claim = Claim::new(terms);
    let mut next = Next::Own;
    loop {
        next = match next {
            Next::Own => claim.own(slots[slot].word()),
            Next::Exchange { from, to } => claim.exchanged(slots[slot].exchange(from, to)),
            Next::Count => claim.counted(N),
            Next::Load(other) => {
                let word = slots[other].word();
                claim.loaded(word, slots[other].guaranteed())
            }
            Next::Granted => return true,
            Next::Refused(_) => return false,
        }
    }
}

fn check<const N: usize>(slots: &[Slot; N]) {
    let sum: u64 = slots.iter().map(Slot::counted).sum();
    assert!(sum <= CAPACITY, "{sum} pages");
}

#[test]
fn two_claims_at_once_are_not_granted_what_only_one_can_have() {
    loom::model(|| {
        let slots = slots::<2>();
        let other = Arc::clone(&slots);
        let claims = thread::spawn(move || claim(&other, 1, 6, 0));
        let own = claim(&slots, 0, 6, 0);
        let other = claims.join().expect("it does not panic");
        assert!(!(own && other));
        check(&slots);
    });
}

#[test]
fn a_claim_whose_pending_pages_are_taken_away_is_granted_no_more_than_there_is() {
    loom::model(|| {
        let slots = slots::<2>();
        let other = Arc::clone(&slots);
        let claims = thread::spawn(move || claim(&other, 1, 6, 0));
        // It takes away what it sees, once, and claims itself.
        let word = slots[1].word();
        if word.pending > 0 {
            slots[1].exchange(word, word.next(word.claimed, 0));
        }
        let own = claim(&slots, 0, 6, 0);
        let other = claims.join().expect("it does not panic");
        assert!(!(own && other));
        check(&slots);
    });
}

#[test]
fn a_guarantee_is_in_the_sum_at_every_moment() {
    loom::model(|| {
        let slots = slots::<2>();
        let other = Arc::clone(&slots);
        let joins = thread::spawn(move || {
            if claim(&other, 1, 6, 0) {
                let guarantee = Guarantee { pages: 6, generation: 1 };
                other[1].guarantee.store(guarantee.pack(), SeqCst);
                fence(SeqCst);
                let word = other[1].word();
                assert!(other[1].exchange(word, word.next(0, 0)));
            }
        });
        claim(&slots, 0, 6, 0);
        joins.join().expect("it does not panic");
        check(&slots);
    });
}

#[test]
fn a_slot_that_is_taken_while_it_is_cleared_keeps_its_new_pages() {
    loom::model(|| {
        let slots = slots::<1>();
        let dead = Guarantee { pages: 2, generation: 1 };
        slots[0].word.store(Word { claimed: 4, pending: 0, sequence: 0 }.pack(), SeqCst);
        slots[0].guarantee.store(dead.pack(), SeqCst);
        let other = Arc::clone(&slots);
        let joins = thread::spawn(move || {
            loop {
                let word = other[0].word();
                if other[0].exchange(word, word.next(0, 0)) {
                    break;
                }
            }
            other[0].guarantee.swap(Guarantee { pages: 0, generation: 2 }.pack(), SeqCst);
            fence(SeqCst);
            assert!(claim(&other, 0, 4, 0));
            // Another claim of as many pages as the dead one had.
            assert_eq!(other[0].word().claimed, 4);
        });
        let (word, guarantee) =
            (slots[0].word(), Guarantee::unpack(slots[0].guarantee.load(SeqCst)));
        // The kernel says that generation 1 is dead and generation 2 lives.
        let is_live = guarantee.generation == 2;
        if !is_live && slots[0].exchange(word, word.next(0, 0)) {
            let packed = guarantee.pack();
            let _ = slots[0].guarantee.compare_exchange(packed, 0, SeqCst, SeqCst);
        }
        joins.join().expect("it does not panic");
        assert_eq!(slots[0].word().claimed, 4);
        assert_eq!(Guarantee::unpack(slots[0].guarantee.load(SeqCst)).generation, 2);
    });
}

#[test]
fn a_member_that_begins_to_wait_sees_what_is_given_back_or_is_seen() {
    loom::model(|| {
        let slots = slots::<2>();
        slots[1].word.store(Word { claimed: 10, pending: 0, sequence: 0 }.pack(), SeqCst);
        let other = Arc::clone(&slots);
        let gives = thread::spawn(move || {
            let word = other[1].word();
            assert!(other[1].exchange(word, word.next(0, 0)));
            other[0].ticket.load(SeqCst) != 0
        });
        slots[0].ticket.store(1, SeqCst);
        fence(SeqCst);
        let found = slots[1].word().claimed == 0;
        let is_rung = gives.join().expect("it does not panic");
        assert!(found || is_rung);
    });
}
