//! Random programs that pin, export, import and grant while blocks come and go: exported and pinned memory
//! stays at its addresses, and another card has access to all blocks or to none.

use std::sync::Arc;

use crate::common::Random;
use vramp_alloc::device::Driver;
use vramp_alloc::range::StableRange;
use vramp_alloc::sharing::{Export, Imported, PinnedRange, range_of};
use vramp_alloc::{Allocation, Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{DeviceCopy, Stream};
use vramp_peers::Preset;

const PAGE: u64 = 2 << 20;
const SAMPLE: Bytes = Bytes::new(64);

/// Memory that must not move: its addresses here, and a second mapping of the memory behind them.
struct Fixed {
    at: AddrRange,
    second: Imported,
    _export: Option<Export>,
    _pin: Option<PinnedRange>,
}

struct Program {
    cards: Vec<Arc<Simulator>>,
    pools: Vec<Allocator>,
    streams: Vec<StreamId>,
    held: Vec<(usize, Allocation)>,
    fixed: Vec<Fixed>,
    ranges: Vec<StableRange>,
    other: Allocator,
    other_stream: Stream,
    target: AddrRange,
    granted: bool,
    has_ranges: bool,
    random: Random,
    fixed_ever: usize,
}

fn samples(range: AddrRange) -> impl Iterator<Item = AddrRange> {
    (0..range.len.count() / PAGE)
        .map(move |page| AddrRange::new(range.start + Bytes::new(page * PAGE), SAMPLE))
}

impl Program {
    fn new(preset: Preset, seed: u64) -> Program {
        let builder = Simulator::builder().memory(Bytes::mib(384)).contents(Contents::Stored);
        let cards: Vec<_> = builder.checked().build_machine(2).into_iter().map(Arc::new).collect();
        let open = |card: usize, config: Config| {
            Allocator::new(Arc::clone(&cards[card]) as Arc<dyn Driver>, config).unwrap()
        };
        let owner = open(0, preset.config());
        let other = open(1, Config::default());
        let streams = (0..3).map(|_| owner.create_stream().unwrap()).collect();
        let their = other.create_stream().unwrap();
        let target = range_of(&other.malloc(Bytes::mib(2), their).unwrap());
        let other_stream = other.stream(their).unwrap();
        Program {
            cards,
            pools: vec![owner],
            streams,
            held: Vec::new(),
            fixed: Vec::new(),
            ranges: Vec::new(),
            other,
            other_stream,
            target,
            granted: false,
            has_ranges: preset == Preset::Vramp,
            random: Random(seed),
            fixed_ever: 0,
        }
    }

    fn stream(&mut self) -> StreamId {
        self.streams[self.random.below(self.streams.len() as u64) as usize]
    }

    fn fill(&mut self, range: AddrRange, stream: StreamId) {
        let raw = self.pools[0].stream(stream).unwrap();
        let byte = self.random.below(255) as u8 + 1;
        for part in samples(range) {
            self.cards[0].fill(raw, part, byte).unwrap();
        }
        self.cards[0].synchronize_stream(raw).unwrap();
    }

    fn malloc(&mut self) {
        let pool = self.random.below(self.pools.len() as u64) as usize;
        let (pages, stream) = (1 + self.random.below(14), self.stream());
        if let Ok(block) = self.pools[pool].malloc(Bytes::new(pages * PAGE), stream) {
            self.fill(range_of(&block), stream);
            self.held.push((pool, block));
        }
    }

    fn free(&mut self) {
        if !self.held.is_empty() {
            let index = self.random.below(self.held.len() as u64) as usize;
            let (pool, block) = self.held.swap_remove(index);
            let stream = self.stream();
            self.pools[pool].free(block, stream).unwrap();
        }
    }

    /// Exports or pins a block.
    fn fix(&mut self) {
        if self.held.is_empty() || self.fixed.len() > 4 {
            return;
        }
        let index = self.random.below(self.held.len() as u64) as usize;
        let (pool, block) = &self.held[index];
        let pool = &self.pools[*pool];
        let export = pool.export(block).unwrap();
        let second = pool.import(export.description(), |index| export.descriptor(index)).unwrap();
        let at = range_of(block);
        let pin = match self.random.below(2) {
            0 => pool.pin_range(at).ok(),
            _ => None,
        };
        let export = pin.is_none().then_some(export);
        self.fixed.push(Fixed { at, second, _export: export, _pin: pin });
        self.fixed_ever += 1;
    }

    fn range(&mut self) {
        let stream = self.stream();
        match self.random.below(4) {
            0 if self.ranges.len() < 3 => {
                let made = self.pools[0].stable_range(Bytes::mib(32), Bytes::mib(8));
                self.ranges.extend(made);
            }
            1 => {
                if let Some(range) = self.ranges.first() {
                    let _ = range.back(stream);
                }
            }
            2 => {
                self.pools[0].wait_for_freed_memory().unwrap();
                if let Some(range) = self.ranges.last() {
                    range.lend(&[(Bytes::ZERO, Bytes::mib(8))]);
                }
            }
            _ => drop(self.ranges.pop()),
        }
        let pinned = self.ranges.first().map(StableRange::range);
        if let Some(range) = pinned.filter(|_| self.random.below(4) == 0)
            && let Ok(pin) = self.pools[0].pin_range(range)
        {
            drop(pin);
        }
    }

    fn change_access(&mut self) {
        self.granted = !self.granted;
        match self.granted {
            true => self.pools[0].grant_access(1).unwrap(),
            false => self.pools[0].revoke_access(1).unwrap(),
        };
    }

    fn pools(&mut self) {
        if self.pools.len() < 3 {
            let made = match self.random.below(2) {
                0 => self.pools[0].create_pool("side").unwrap(),
                _ => vramp_peers::comm_pool(&self.pools[0], "comm").unwrap(),
            };
            self.pools.push(made);
        }
    }

    fn end_stream(&mut self) {
        let ended = self.streams.remove(0);
        self.pools[0].destroy_stream(ended).unwrap();
        self.streams.push(self.pools[0].create_stream().unwrap());
    }

    fn check(&self) {
        for pool in &self.pools {
            pool.audit().unwrap();
        }
        assert!(self.cards[0].hazards().is_empty(), "{:?}", self.cards[0].hazards());
        for Fixed { at, second, .. } in &self.fixed {
            for (here, there) in samples(*at).zip(samples(second.range())) {
                let [here, there] = [here, there].map(|part| self.cards[0].peek(part).unwrap());
                assert_eq!(here, there, "the memory at {at} moved");
            }
        }
        for (_, block) in &self.held {
            for part in samples(range_of(block)) {
                let copy = DeviceCopy { from: part.start, to: self.target.start, len: SAMPLE };
                let copied = self.cards[1].copy(self.other_stream, copy);
                assert_eq!(copied.is_ok(), self.granted, "{part}: {copied:?}");
            }
        }
        self.cards[1].synchronize_stream(self.other_stream).unwrap();
    }

    fn run(mut self, steps: usize) -> usize {
        for _ in 0..steps {
            match self.random.below(100) {
                0..36 => self.malloc(),
                36..62 => self.free(),
                62..72 => self.fix(),
                72..80 if !self.fixed.is_empty() => {
                    let index = self.random.below(self.fixed.len() as u64) as usize;
                    drop(self.fixed.swap_remove(index));
                }
                72..86 if self.has_ranges => self.range(),
                86..90 => self.change_access(),
                90..93 => self.pools(),
                93..96 => self.end_stream(),
                _ => {
                    let pool = self.random.below(self.pools.len() as u64) as usize;
                    self.pools[pool].trim(Bytes::ZERO).unwrap();
                }
            }
            self.check();
        }
        let Program { cards, pools, held, fixed, ranges, other, fixed_ever, streams, .. } = self;
        for (pool, block) in held {
            pools[pool].free(block, streams[0]).unwrap();
        }
        drop((ranges, fixed));
        for pool in pools.into_iter().rev() {
            pool.audit().unwrap();
            pool.close().unwrap();
        }
        other.close().unwrap();
        let live = cards[0].live();
        assert_eq!((live.handles, live.mappings, live.reservations), (0, 0, 0), "{live:?}");
        fixed_ever
    }
}

#[test]
fn fixed_memory_stays_and_access_is_whole() {
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::TorchExpandable] {
        let mut fixed = 0;
        for seed in vramp_testing::seeds(6) {
            fixed += Program::new(preset, seed).run(250);
        }
        assert!(fixed > 60, "{preset:?}: {fixed}");
    }
}
