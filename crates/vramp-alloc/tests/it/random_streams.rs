//! Random programs on several streams, with work in flight at every step: the happens-before
//! checker finds nothing, whatever was reused, moved or given back beside it. Streams end and others take
//! their place, some programs have 64 of them, and some a second pool.

use std::collections::BTreeSet;

use crate::common::random::Random;
use crate::common::{PAGE, Rig};
use vramp_alloc::{Allocation, Allocator, Bytes, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Kernel, Simulator};
use vramp_peers::Preset;

/// A block and who works on it: the program's own orders make this one chain.
struct Held {
    block: Allocation,
    /// The pool that made it.
    pool: usize,
    last_user: StreamId,
    /// Streams with work since their last note.
    unnoted: BTreeSet<StreamId>,
}

struct Program {
    rig: Rig,
    random: Random,
    streams: Vec<StreamId>,
    ended: Vec<StreamId>,
    /// Pools beside the rig's own.
    pools: Vec<Allocator>,
    held: Vec<Held>,
    refused: u64,
}

impl Program {
    fn new(preset: Preset, seed: u64) -> Program {
        let card = Simulator::builder().memory(Bytes::mib(256)).checked();
        let rig = Rig::on(card, preset.config());
        let count = if seed % 8 == 7 { 64 } else { 4 };
        let more = (1..count).map(|_| rig.allocator.create_stream().unwrap());
        let streams = std::iter::once(rig.stream).chain(more.collect::<Vec<_>>()).collect();
        let pools = match seed % 4 {
            3 => vec![rig.allocator.create_pool("second").unwrap()],
            _ => Vec::new(),
        };
        let (ended, held) = (Vec::new(), Vec::new());
        Program { rig, random: Random(seed), streams, ended, pools, held, refused: 0 }
    }

    fn pool(&self, index: usize) -> &Allocator {
        if index == 0 { &self.rig.allocator } else { &self.pools[index - 1] }
    }

    fn run(mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.below(100) {
                0..30 => self.malloc(),
                30..65 => self.work(),
                65..90 => self.free(),
                90..96 => self.rig.sim.advance(1 << self.random.below(24)),
                96..98 => self.end_stream(),
                _ => {
                    let to = Bytes::mib(self.random.below(256));
                    self.rig.allocator.trim(to).unwrap();
                }
            }
            for pool in self.pools.iter().chain([&self.rig.allocator]) {
                pool.audit().unwrap();
            }
            assert_eq!(self.rig.sim.hazards(), []);
            assert_eq!(self.rig.sim.device_loss(), None);
        }
        while !self.held.is_empty() {
            self.free();
        }
        for pool in self.pools {
            pool.close().unwrap();
        }
        self.rig.assert_accounts_agree();
        assert_eq!(self.rig.sim.hazards(), []);
        self.rig.close();
    }

    fn malloc(&mut self) {
        let stream = *self.random.pick(&self.streams);
        let size = match self.random.below(4) {
            0 => Bytes::new(1 + self.random.below(1 << 20)),
            1 => PAGE * (1 + self.random.below(24)),
            _ => Bytes::new(1 + self.random.below(16 << 20)),
        };
        let pool = self.random.below(1 + self.pools.len() as u64) as usize;
        match self.pool(pool).malloc(size, stream) {
            Ok(block) => {
                self.held.push(Held { block, pool, last_user: stream, unnoted: BTreeSet::new() });
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                self.refused += 1;
                self.free();
            }
        }
    }

    /// A kernel on any stream, which the program orders behind the block's last user.
    fn work(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let index = self.random.below(self.held.len() as u64) as usize;
        let stream = *self.random.pick(&self.streams);
        let last = self.held[index].last_user;
        if last != stream {
            self.rig.order(last, stream);
        }
        let Held { block, .. } = &self.held[index];
        let range = AddrRange::new(block.addr(), block.len());
        let kernel = Kernel::new("work").lasting(1 << self.random.below(22));
        let kernel =
            if self.random.below(2) == 0 { kernel.writing(range) } else { kernel.reading(range) };
        self.rig.sim.launch(self.rig.raw(stream), kernel).unwrap();
        let held = &mut self.held[index];
        held.last_user = stream;
        held.unnoted.insert(stream);
        if self.random.below(3) == 0 {
            let Held { block, pool, .. } = &self.held[index];
            self.pool(*pool).record_use(block, stream).unwrap();
            self.held[index].unnoted.remove(&stream);
        }
    }

    /// Ends a stream while its work runs. What it used is noted before; another stream, ordered behind
    /// it, takes its place.
    fn end_stream(&mut self) {
        let place = self.random.below(self.streams.len() as u64) as usize;
        let (old, new) = (self.streams[place], self.rig.allocator.create_stream().unwrap());
        self.rig.order(old, new);
        for index in 0..self.held.len() {
            if self.held[index].unnoted.remove(&old) {
                let Held { block, pool, .. } = &self.held[index];
                self.pool(*pool).record_use(block, old).unwrap();
            }
            if self.held[index].last_user == old {
                self.held[index].last_user = new;
            }
        }
        self.rig.allocator.destroy_stream(old).unwrap();
        self.streams[place] = new;
        self.ended.push(old);
    }

    /// On any stream; work on the others is recorded first. A block without work is freed
    /// without a word about the stream it was made for.
    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let index = self.random.below(self.held.len() as u64) as usize;
        let Held { block, pool, unnoted, last_user } = self.held.swap_remove(index);
        let stream = match self.random.below(10) {
            0..5 => last_user,
            5 if !self.ended.is_empty() => *self.random.pick(&self.ended),
            _ => *self.random.pick(&self.streams),
        };
        let pool = self.pool(pool);
        for user in unnoted.into_iter().filter(|&user| user != stream) {
            pool.record_use(&block, user).unwrap();
        }
        pool.free(block, stream).unwrap();
    }
}

fn run_programs(preset: Preset) {
    for seed in vramp_testing::seeds(30) {
        println!("{} seed {seed}", preset.name());
        Program::new(preset, seed).run(400);
    }
}

#[test]
fn the_default_never_hands_out_memory_in_use() {
    run_programs(Preset::Vramp);
}

#[test]
fn vpmm_never_hands_out_memory_in_use() {
    run_programs(Preset::Vpmm);
}

#[test]
fn the_drivers_pool_never_hands_out_memory_in_use() {
    run_programs(Preset::StreamOrdered);
}

#[test]
fn pytorchs_allocator_never_hands_out_memory_in_use() {
    run_programs(Preset::Torch);
    run_programs(Preset::TorchExpandable);
}
