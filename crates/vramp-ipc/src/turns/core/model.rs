//! Random interleavings of candidates, of which some end at any step.
//!
//! A listing takes two steps. Of the entries that came or went between them it has any.

use std::collections::BTreeSet;

use super::candidate::{Candidate, Next};
use super::entry::Key;

enum At {
    /// About to perform this.
    Step(Next),
    /// Between beginning and end of a listing: entries at its beginning.
    Listing(BTreeSet<Key>),
    /// Holds the turn.
    Holding,
    Gone,
}

struct Process {
    candidate: Candidate,
    at: At,
    own: Option<Key>,
}

struct World {
    random: fastrand::Rng,
    /// Names in the directory.
    listed: BTreeSet<Key>,
    live: BTreeSet<Key>,
    processes: Vec<Process>,
    listings: usize,
    turns: Vec<usize>,
}

impl World {
    fn new(seed: u64, processes: usize) -> World {
        let new = || Process { candidate: Candidate::new(), at: At::Step(Next::List), own: None };
        World {
            random: fastrand::Rng::with_seed(seed),
            listed: BTreeSet::new(),
            live: BTreeSet::new(),
            processes: (0..processes).map(|_| new()).collect(),
            listings: 0,
            turns: Vec::new(),
        }
    }

    /// Ends the entry of a process. A killed process leaves the name.
    fn leave(&mut self, at: usize, is_killed: bool) {
        if let Some(own) = self.processes[at].own.take() {
            self.live.remove(&own);
            if !is_killed {
                self.listed.remove(&own);
            }
        }
    }

    fn step(&mut self, at: usize) {
        let next = match &self.processes[at].at {
            At::Gone => return,
            At::Holding => {
                self.leave(at, false);
                self.processes[at].at = At::Gone;
                return;
            }
            At::Listing(before) => {
                let mut found: BTreeSet<Key> = before.intersection(&self.listed).copied().collect();
                for key in before.symmetric_difference(&self.listed) {
                    if self.random.bool() {
                        found.insert(*key);
                    }
                }
                let keys: Vec<Key> = found.into_iter().collect();
                self.listings += 1;
                self.processes[at].candidate.listed(&keys)
            }
            At::Step(Next::List) => {
                self.processes[at].at = At::Listing(self.listed.clone());
                return;
            }
            At::Step(Next::Create { number }) => {
                let number = *number;
                self.leave(at, false);
                let own = Key { number, random: self.random.u64(..) };
                self.listed.insert(own);
                self.live.insert(own);
                self.processes[at].own = Some(own);
                self.processes[at].candidate.created(own)
            }
            At::Step(Next::Probe(key)) => {
                let (key, is_live) = (*key, self.live.contains(key));
                if !is_live {
                    self.listed.remove(&key);
                }
                self.processes[at].candidate.probed(is_live)
            }
            At::Step(Next::Wait(key)) if self.live.contains(key) => return,
            At::Step(Next::Wait(_)) => self.processes[at].candidate.left(),
            At::Step(other) => panic!("{other:?} is no step"),
        };
        self.processes[at].at = match next {
            Next::Hold => At::Holding,
            Next::Lost => panic!("no entry was taken from a live process"),
            next => At::Step(next),
        };
        if next == Next::Hold {
            self.turns.push(at);
            let holds = |process: &&Process| matches!(process.at, At::Holding);
            assert_eq!(self.processes.iter().filter(holds).count(), 1, "two hold the turn");
        }
    }

    fn is_over(&self) -> bool {
        self.processes.iter().all(|process| matches!(process.at, At::Gone))
    }

    /// Runs until all have had the turn or were killed.
    fn run(&mut self, kill_per_mille: u32) {
        let mut steps = 0;
        while !self.is_over() {
            steps += 1;
            assert!(steps < 1_000_000, "no process gets on");
            let at = self.random.usize(..self.processes.len());
            if self.random.u32(..1000) < kill_per_mille {
                self.leave(at, true);
                self.processes[at].at = At::Gone;
            } else {
                self.step(at);
            }
        }
    }
}

#[test]
fn at_most_one_process_holds_the_turn_and_every_live_one_gets_it() {
    for seed in vramp_testing::seeds(400) {
        let mut world = World::new(seed, 2 + (seed % 7) as usize);
        let kills = if seed % 2 == 0 { 0 } else { 20 };
        world.run(kills);
        if kills == 0 {
            assert_eq!(world.turns.len(), world.processes.len(), "seed {seed}");
            assert!(world.listed.is_empty());
        }
        assert!(world.live.is_empty());
    }
}

#[test]
fn a_process_that_comes_later_gets_the_turn_later() {
    for seed in vramp_testing::seeds(40) {
        let mut world = World::new(seed, 12);
        let mut placed = Vec::new();
        for at in 0..12 {
            // Others have a place or have not begun.
            while !world.processes[at].candidate.is_placed() {
                world.step(at);
            }
            placed.push(at);
        }
        world.run(0);
        assert_eq!(world.turns, placed, "seed {seed}");
    }
}

#[test]
fn listings_of_a_turn_do_not_grow_with_the_processes() {
    for processes in [2, 10, 100, 1000] {
        let mut world = World::new(1, processes);
        for at in 0..processes {
            while !world.processes[at].candidate.is_placed() {
                world.step(at);
            }
        }
        for at in 0..processes {
            while !matches!(world.processes[at].at, At::Gone) {
                world.step(at);
            }
        }
        // To make the entry, to fix its place, and when the one before is gone.
        assert!(world.listings <= 3 * processes, "{} for {processes}", world.listings);
    }
}
