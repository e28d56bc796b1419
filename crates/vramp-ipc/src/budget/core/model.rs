//! Random interleavings of members, one atomic instruction at a time, of which some are killed or stopped
//! at any of them.

use super::claim::{Claim, Next, Refusal, Terms};
use super::word::{Guarantee, Word};

/// What a member does between two instructions.
#[derive(Debug)]
enum At {
    /// It has no slot: it locks one that is free.
    Outside,
    /// It holds a slot and clears what a dead member left there.
    Resetting,
    /// It publishes its generation.
    Publishing,
    /// It performs the next step of a claim; then goes on with `then`.
    Claiming {
        claim: Claim,
        next: Next,
        then: Then,
        seen: Option<Word>,
    },
    /// It writes its guarantee, and then gives back the pages that it claimed for it.
    Guaranteeing,
    Settling,
    Idle,
    /// It gives so many pages back, from this word.
    Giving(Word, u64),
    /// It clears a slot whose member it found dead: read before it asked.
    Reaping {
        slot: usize,
        word: Word,
        guarantee: Guarantee,
        is_cleared: bool,
    },
    /// It clears the guarantee of that slot.
    Unseating(usize, Guarantee),
    Leaving(u8),
    /// It takes away what it saw pending.
    Cancelling(usize, Word),
}

#[derive(Debug, PartialEq, Clone, Copy)]
enum Then {
    Guarantee,
    Rest,
}

#[derive(Debug)]
struct Member {
    at: At,
    slot: usize,
    generation: u64,
    guaranteed: u64,
    /// What it was granted and has not given back.
    claimed: u64,
    is_stopped: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    word: Word,
    guarantee: Guarantee,
}

struct World {
    random: fastrand::Rng,
    capacity: u64,
    slots: Vec<Slot>,
    /// Slots that were ever used.
    count: usize,
    /// The kernel's locks: the member that holds a slot, and the live generations.
    locks: Vec<Option<usize>>,
    live: Vec<u64>,
    members: Vec<Member>,
    generations: u64,
    granted: usize,
    refused: usize,
    contested: usize,
    cancelled: usize,
}

const SLOTS: usize = 6;

impl World {
    fn new(seed: u64, members: usize) -> World {
        let new = |_| Member {
            at: At::Outside,
            slot: 0,
            generation: 0,
            guaranteed: 0,
            claimed: 0,
            is_stopped: false,
        };
        World {
            random: fastrand::Rng::with_seed(seed),
            capacity: 20,
            slots: vec![Slot::default(); SLOTS],
            count: 0,
            locks: vec![None; SLOTS],
            live: Vec::new(),
            members: (0..members).map(new).collect(),
            generations: 0,
            granted: 0,
            refused: 0,
            contested: 0,
            cancelled: 0,
        }
    }

    fn exchange(&mut self, slot: usize, from: Word, to: Word) -> bool {
        let is_same = self.slots[slot].word == from;
        if is_same {
            self.slots[slot].word = to;
        }
        is_same
    }

    /// The sum at this moment. What a dead member holds counts until it is cleared.
    fn check(&self) {
        let counted = |slot: &Slot| slot.word.claimed.max(slot.guarantee.pages);
        let sum: u64 = self.slots.iter().map(counted).sum();
        assert!(sum <= self.capacity, "{sum} pages of {}: {:?}", self.capacity, self.slots);
        for member in &self.members {
            if matches!(member.at, At::Idle | At::Giving(..)) {
                let slot = &self.slots[member.slot];
                let expected =
                    Guarantee { pages: member.guaranteed, generation: member.generation };
                assert_eq!(slot.guarantee, expected, "a live member lost its slot");
                assert_eq!(slot.word.claimed, member.claimed, "a live member lost its pages");
            }
        }
    }

    /// Ends a process: the kernel drops its locks.
    fn kill(&mut self, at: usize) {
        self.locks.iter_mut().filter(|lock| **lock == Some(at)).for_each(|lock| *lock = None);
        let generation = self.members[at].generation;
        self.live.retain(|live| *live != generation);
        self.members[at].at = At::Outside;
        self.members[at].generation = 0;
    }

    fn claim(&mut self, at: usize, pages: u64, then: Then) -> At {
        let member = &self.members[at];
        let guaranteed = if then == Then::Guarantee { 0 } else { member.guaranteed };
        let (slot, capacity) = (member.slot, self.capacity);
        let terms = Terms { slot, pages, guaranteed, limit: 15, capacity };
        At::Claiming { claim: Claim::new(terms), next: Next::Own, then, seen: None }
    }

    /// Performs one atomic instruction of a member.
    fn step(&mut self, at: usize) {
        let slot = self.members[at].slot;
        let old = std::mem::replace(&mut self.members[at].at, At::Outside);
        let new = match old {
            At::Outside => match self.locks.iter().position(Option::is_none) {
                Some(free) => {
                    self.locks[free] = Some(at);
                    self.generations += 1;
                    let member = &mut self.members[at];
                    (member.slot, member.generation) = (free, self.generations);
                    self.live.push(self.generations);
                    At::Resetting
                }
                None => At::Outside,
            },
            At::Resetting => {
                let word = self.slots[slot].word;
                self.slots[slot].word = word.next(0, 0);
                At::Publishing
            }
            At::Publishing => {
                let generation = self.members[at].generation;
                self.slots[slot].guarantee = Guarantee { pages: 0, generation };
                self.count = self.count.max(slot + 1);
                let guaranteed = self.random.u64(0..6);
                self.members[at].guaranteed = guaranteed;
                self.claim(at, guaranteed, Then::Guarantee)
            }
            At::Claiming { claim, next: Next::Load(other), then, seen: None } => {
                let seen = Some(self.slots[other].word);
                At::Claiming { claim, next: Next::Load(other), then, seen }
            }
            At::Claiming { mut claim, next, then, seen } => {
                let next = match next {
                    Next::Own => claim.own(self.slots[slot].word),
                    Next::Exchange { from, to } => {
                        let is_done = self.exchange(slot, from, to);
                        claim.exchanged(is_done)
                    }
                    Next::Count => claim.counted(self.count),
                    Next::Load(other) => {
                        let guaranteed = self.slots[other].guarantee.pages;
                        claim.loaded(seen.expect("it was read before"), guaranteed)
                    }
                    Next::Granted | Next::Refused(_) => panic!("{claim:?} is over"),
                };
                match (next, then) {
                    (Next::Granted, Then::Guarantee) => At::Guaranteeing,
                    (Next::Granted, Then::Rest) => {
                        self.granted += 1;
                        self.members[at].claimed = self.slots[slot].word.claimed;
                        At::Idle
                    }
                    (Next::Refused(_), Then::Guarantee) => At::Leaving(0),
                    (Next::Refused(refusal), Then::Rest) => {
                        self.refused += 1;
                        match refusal {
                            Refusal::Short { contested, .. } if !contested.is_empty() => {
                                self.contested += 1;
                                let (other, word) = contested[self.random.usize(..contested.len())];
                                At::Cancelling(other, word)
                            }
                            _ => At::Idle,
                        }
                    }
                    (next, then) => At::Claiming { claim, next, then, seen: None },
                }
            }
            At::Guaranteeing => {
                let Member { generation, guaranteed, .. } = self.members[at];
                self.slots[slot].guarantee = Guarantee { pages: guaranteed, generation };
                At::Settling
            }
            At::Settling => {
                let word = self.slots[slot].word;
                assert!(self.exchange(slot, word, word.next(0, 0)));
                self.members[at].claimed = 0;
                At::Idle
            }
            At::Idle => match self.random.u32(..10) {
                0..5 => {
                    let pages = self.random.u64(1..9);
                    self.claim(at, pages, Then::Rest)
                }
                5..8 => {
                    let word = self.slots[slot].word;
                    At::Giving(word, self.random.u64(0..=word.claimed))
                }
                8 => {
                    let other = self.random.usize(..SLOTS);
                    let Slot { word, guarantee } = self.slots[other];
                    let is_own = other == slot || guarantee.generation == 0;
                    let reaping = At::Reaping { slot: other, word, guarantee, is_cleared: false };
                    if is_own { At::Idle } else { reaping }
                }
                _ => At::Leaving(0),
            },
            At::Giving(word, pages) => {
                assert!(self.exchange(slot, word, word.next(word.claimed - pages, 0)));
                self.members[at].claimed = word.claimed - pages;
                At::Idle
            }
            At::Reaping { slot: other, word, guarantee, is_cleared: false } => {
                // The question and the exchange are two instructions: between them the slot may change.
                let is_live = self.live.contains(&guarantee.generation);
                match is_live {
                    true => At::Idle,
                    false => At::Reaping { slot: other, word, guarantee, is_cleared: true },
                }
            }
            At::Reaping { slot: other, word, guarantee, .. } => {
                // An exchange that fails leaves the rest to the next look. The guarantee goes last.
                let is_same = self.slots[other].word == word;
                if is_same && word.claimed + word.pending > 0 {
                    self.slots[other].word = word.next(0, 0);
                }
                let is_cleared = is_same || word.claimed + word.pending == 0;
                if is_cleared { At::Unseating(other, guarantee) } else { At::Idle }
            }
            At::Unseating(other, guarantee) => {
                if self.slots[other].guarantee == guarantee {
                    self.slots[other].guarantee = Guarantee::default();
                }
                At::Idle
            }
            At::Leaving(0) => {
                let word = self.slots[slot].word;
                self.slots[slot].word = word.next(0, 0);
                At::Leaving(1)
            }
            At::Leaving(1) => {
                self.slots[slot].guarantee = Guarantee::default();
                At::Leaving(2)
            }
            At::Leaving(_) => {
                self.kill(at);
                At::Outside
            }
            At::Cancelling(other, word) => {
                let is_done = self.exchange(other, word, word.next(word.claimed, 0));
                self.cancelled += usize::from(is_done);
                At::Idle
            }
        };
        self.members[at].at = new;
        self.check();
    }

    fn run(&mut self, steps: usize, per_mille: u32) {
        for _ in 0..steps {
            let at = self.random.usize(..self.members.len());
            let dice = self.random.u32(..1000);
            let is_outside = matches!(self.members[at].at, At::Outside);
            let member = &mut self.members[at];
            // Between question and exchange a member that clears a slot is often stopped, and dead slots last.
            let is_clearing =
                matches!(member.at, At::Reaping { is_cleared: true, .. } | At::Unseating(..));
            let stops = if is_clearing && !member.is_stopped { 400 } else { 2 } * per_mille.min(2);
            if dice < per_mille {
                self.kill(at);
            } else if dice < per_mille + stops {
                member.is_stopped = !member.is_stopped;
            } else if !member.is_stopped && (!is_outside || dice > 800) {
                self.step(at);
            }
        }
    }

    /// All go on and leave; one looks at every slot.
    fn finish(&mut self) {
        for at in 0..self.members.len() {
            self.members[at].is_stopped = false;
            while !matches!(self.members[at].at, At::Idle | At::Outside) {
                self.step(at);
            }
            self.kill(at);
        }
        for slot in &mut self.slots {
            // As a member that reaps does, without another at work.
            *slot = Slot { word: slot.word.next(0, 0), guarantee: Guarantee::default() };
        }
        self.check();
    }
}

#[test]
fn the_sum_of_what_is_granted_passes_the_capacity_at_no_moment() {
    let (mut granted, mut refused, mut contested, mut cancelled) = (0, 0, 0, 0);
    for seed in vramp_testing::seeds(300) {
        let mut world = World::new(seed, 2 + (seed % 5) as usize);
        let per_mille = [0, 2, 20][(seed % 3) as usize];
        world.run(4000, per_mille);
        world.finish();
        granted += world.granted;
        refused += world.refused;
        contested += world.contested;
        cancelled += world.cancelled;
    }
    // Every way that a claim can go was taken.
    let all = [granted, refused, contested, cancelled];
    assert!(all.iter().all(|count| *count > 10), "{all:?}");
}

#[test]
fn two_claims_of_which_one_fits_are_not_both_granted_in_any_order_of_their_steps() {
    // Each order of the steps of two claims, as the bits of a number.
    let (mut both, mut one, mut none) = (0, 0, 0);
    for order in 0..1_u32 << 12 {
        let mut slots = [Slot::default(); 2];
        let mut claims = [0, 1].map(|slot| {
            let terms = Terms { slot, pages: 6, guaranteed: 0, limit: 10, capacity: 10 };
            (Claim::new(terms), Next::Own)
        });
        let mut order = order;
        while claims.iter().any(|(_, next)| !matches!(next, Next::Granted | Next::Refused(_))) {
            let mut at = (order & 1) as usize;
            order >>= 1;
            if matches!(claims[at].1, Next::Granted | Next::Refused(_)) {
                at = 1 - at;
            }
            let (claim, next) = &mut claims[at];
            *next = match next.clone() {
                Next::Own => claim.own(slots[at].word),
                Next::Exchange { from, to } => {
                    assert_eq!(slots[at].word, from);
                    slots[at].word = to;
                    claim.exchanged(true)
                }
                Next::Count => claim.counted(2),
                Next::Load(other) => claim.loaded(slots[other].word, 0),
                next => panic!("{next:?} is no step"),
            };
        }
        let granted = slots.iter().filter(|slot| slot.word.claimed == 6).count();
        match granted {
            0 => none += 1,
            1 => one += 1,
            _ => both += 1,
        }
    }
    assert_eq!(both, 0);
    assert!(one > 0 && none > 0, "{one} {none}");
}
