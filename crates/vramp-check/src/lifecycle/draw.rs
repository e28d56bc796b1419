//! Draws the next operation of a program from what exists.

use std::collections::VecDeque;

use vramp_driver::Call;

use super::op::Op;
use super::world::{From, Named, World};

/// What decides a program.
#[derive(Clone, Debug)]
pub(super) enum Random {
    Seeded(fastrand::Rng),
    /// A fuzzer's bytes, and zeros after them.
    Bytes(std::vec::IntoIter<u8>),
}

impl Random {
    /// Returns a number under `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        let bound = bound.max(1);
        match self {
            Random::Seeded(random) => random.u64(..bound),
            Random::Bytes(bytes) => {
                // As many bytes as the bound has, so that few of them decide a choice of few.
                let most = (bound - 1).to_le_bytes();
                let len = most.iter().rposition(|byte| *byte > 0).map_or(0, |last| last + 1);
                let number =
                    bytes.by_ref().take(len).fold(0, |all, byte| all << 8 | u64::from(byte));
                number % bound
            }
        }
    }

    /// Returns true if no byte is left.
    pub fn is_over(&self) -> bool {
        matches!(self, Random::Bytes(bytes) if bytes.as_slice().is_empty())
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub fn pick<T>(&mut self, named: &Named<T>) -> Option<u64> {
        let at = self.below(named.len() as u64) as usize;
        named.0.get(at).map(|(name, _)| *name)
    }

    pub fn pick_of<T>(&mut self, named: &Named<T>, wanted: impl Fn(&T) -> bool) -> Option<u64> {
        let count = named.0.iter().filter(|(_, object)| wanted(object)).count();
        let at = self.below(count as u64) as usize;
        named.0.iter().filter(|(_, object)| wanted(object)).nth(at).map(|(name, _)| *name)
    }
}

/// What a program may contain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mix {
    /// Arenas and captures.
    pub graphs: bool,
    /// Stable ranges.
    pub ranges: bool,
    /// Arenas for caches.
    pub caches: bool,
    /// Callbacks.
    pub callbacks: bool,
    /// Injected failures.
    pub faults: bool,
    /// Pools that end before the program does.
    pub ends: bool,
    /// Objects that end on other threads.
    pub threads: bool,
    /// What a third of the operations is about.
    pub focus: Focus,
}

/// Objects that a program has most of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Focus {
    Blocks,
    Graphs,
    Ranges,
    Caches,
    Streams,
}

impl Mix {
    /// Draws which parts a program has: fewer parts, deeper programs.
    pub fn draw(random: &mut Random, has_graphs: bool) -> Mix {
        let focus = match random.below(8) {
            0..3 if has_graphs => Focus::Graphs,
            3 if has_graphs => Focus::Ranges,
            4 => Focus::Streams,
            5 if has_graphs => Focus::Caches,
            _ => Focus::Blocks,
        };
        Mix {
            focus,
            graphs: focus == Focus::Graphs
                || has_graphs && random.below(4) < 3
                || random.one_in(16),
            ranges: focus == Focus::Ranges || has_graphs && random.one_in(2),
            caches: focus == Focus::Caches || has_graphs && random.one_in(2) || random.one_in(16),
            callbacks: random.one_in(4),
            faults: random.one_in(4),
            ends: random.one_in(2),
            threads: random.one_in(4),
        }
    }
}

/// Draws programs.
pub(super) struct Drawer {
    pub random: Random,
    pub mix: Mix,
    next: u64,
    /// Operations that were planned together.
    pub(super) script: VecDeque<Op>,
}

/// Memory of the simulated card in programs.
pub(super) const CARD: u64 = 192 << 20;

impl Drawer {
    pub fn new(random: Random, mix: Mix) -> Drawer {
        Drawer { random, mix, next: 0, script: VecDeque::new() }
    }

    pub(super) fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn ns(&mut self) -> u64 {
        1 << self.random.below(22)
    }

    fn way(&mut self, ways: u64) -> u64 {
        if self.mix.threads && self.random.one_in(8) { self.random.below(ways) } else { 0 }
    }

    /// Returns the next operation.
    pub fn draw(&mut self, world: &World) -> Op {
        // Other operations come in between, so that a story meets other objects.
        if !self.random.one_in(8)
            && let Some(op) = self.script.pop_front()
        {
            return op;
        }
        let (pools, streams) = (world.pools.len(), open_streams(world));
        if pools == 0 || pools < 3 && self.random.one_in(300) {
            let open = Op::Open { pool: self.name() };
            if world.subject.can(&open) {
                return open;
            }
        }
        if streams == 0 || streams < 3 && self.random.one_in(4) {
            return self.stream(world);
        }
        if self.script.is_empty() && self.random.one_in(24) {
            self.tell(world);
        }
        for _ in 0..8 {
            if let Some(op) = self.try_draw(world).filter(|op| world.subject.can(op)) {
                return op;
            }
        }
        Op::Advance { ns: self.ns() }
    }

    fn stream(&mut self, world: &World) -> Op {
        let pool = self.random.pick(&world.pools).unwrap_or_default();
        let stream = self.name();
        match self.random.one_in(3) {
            true => Op::Adopt { pool, stream },
            false => Op::Create { pool, stream },
        }
    }

    fn try_draw(&mut self, world: &World) -> Option<Op> {
        if self.random.one_in(3) {
            match self.mix.focus {
                Focus::Blocks => {}
                Focus::Graphs => return self.graphs(world),
                Focus::Ranges => return self.ranges(world),
                Focus::Caches => return self.caches(world),
                Focus::Streams if self.random.one_in(4) => return self.streams(world),
                Focus::Streams => {}
            }
        }
        match self.random.below(1000) {
            0..260 => self.malloc(world),
            260..480 => self.work(world),
            480..680 => self.free(world),
            680..700 => self.record(world),
            700..745 => self.look(world),
            745..790 => Some(Op::Advance { ns: self.ns() }),
            790..796 => Some(Op::Sync {}),
            796..802 => Some(Op::Gates {}),
            802..815 => {
                let to = if self.random.one_in(2) { 0 } else { self.random.below(CARD) };
                Some(Op::Trim { pool: self.random.pick(&world.pools)?, to })
            }
            815..818 => {
                let some = (1 + self.random.below(48)) << 22;
                let bytes = if self.random.one_in(2) { 0 } else { some };
                Some(Op::Limit { pool: self.random.pick(&world.pools)?, bytes })
            }
            818..838 => self.streams(world),
            838..940 => self.graphs(world),
            940..955 => self.ranges(world),
            955..970 => self.caches(world),
            970..980 => self.callbacks(world),
            980..986 => self.faults(),
            986..996 => self.misuse(world),
            _ => self.end_pool(world),
        }
    }

    /// Draws a stream: mostly one that runs, sometimes one that was destroyed or captures.
    fn any_stream(&mut self, world: &World) -> Option<u64> {
        if self.random.one_in(24) {
            return self.random.pick(&world.streams);
        }
        self.random.pick_of(&world.streams, |state| state.is_open())
    }

    fn malloc(&mut self, world: &World) -> Option<Op> {
        if world.blocks.len() > 48 {
            return None;
        }
        let mut pool = self.random.pick(&world.pools)?;
        let mut stream = self.any_stream(world)?;
        if let Some(capture) = self.random.pick(&world.captures)
            && self.random.one_in(2)
            && let Some(state) = world.captures.get(capture)
        {
            (pool, stream) =
                (state.pool, state.streams[self.random.below(2) as usize % state.streams.len()]);
        }
        let size = match self.random.below(8) {
            0 => self.random.below(4096),
            1 | 2 => self.random.below(1 << 20),
            3 | 4 => (1 + self.random.below(8)) << 21,
            5 => 1 << (9 + self.random.below(14)),
            _ => self.random.below(16 << 20),
        };
        let block = self.name();
        match self.random.one_in(12) {
            true => Some(Op::Tagged { pool, stream, size, block }),
            false => Some(Op::Malloc { pool, stream, size, block }),
        }
    }

    fn work(&mut self, world: &World) -> Option<Op> {
        let block = self.random.pick(&world.blocks)?;
        let state = world.blocks.get(block)?;
        let stream = match state.from {
            From::Capture(capture) if !self.random.one_in(16) => {
                let streams = &world.captures.get(capture)?.streams;
                streams[self.random.below(streams.len() as u64) as usize]
            }
            // Captured work on memory from outside.
            From::Pool if world.captures.len() > 0 && self.random.one_in(4) => {
                world.captures.get(self.random.pick(&world.captures)?)?.origin
            }
            _ => match state.users.first() {
                // Fresh blocks are filled most often.
                Some(user) if state.byte.is_none() && self.random.one_in(2) => user.stream,
                _ => self.any_stream(world)?,
            },
        };
        let kind = match state.byte.is_none() && self.random.one_in(2) {
            true => 2,
            false => self.random.below(4),
        };
        Some(Op::Work { block, stream, kind, ns: self.ns() })
    }

    fn free(&mut self, world: &World) -> Option<Op> {
        let block = self.random.pick(&world.blocks)?;
        let state = world.blocks.get(block)?;
        if state.byte.is_some() && self.random.one_in(3) {
            let stream = self.random.pick_of(&world.streams, |state| state.is_open())?;
            return Some(Op::Look { block, stream });
        }
        let stream = match (state.from, self.random.below(4)) {
            (From::Capture(capture), 0..3) => {
                let streams = &world.captures.get(capture)?.streams;
                streams[self.random.below(streams.len() as u64) as usize]
            }
            (From::Pool, 0..2) => state.users.first().map(|user| user.stream)?,
            // An escaped block most often lives on, to be read under leases.
            (From::Graph(_, Some(_)), 0..3) => return None,
            // Destroyed streams too.
            _ => self.random.pick(&world.streams)?,
        };
        let way = if self.random.one_in(4) { 1 } else { self.way(3) };
        Some(Op::Free { block, stream, way })
    }

    fn record(&mut self, world: &World) -> Option<Op> {
        let block = self.random.pick(&world.blocks)?;
        Some(Op::Use { block, stream: self.any_stream(world)? })
    }

    fn look(&mut self, world: &World) -> Option<Op> {
        let block = self.random.pick_of(&world.blocks, |block| block.byte.is_some())?;
        Some(Op::Look { block, stream: self.any_stream(world)? })
    }

    fn streams(&mut self, world: &World) -> Option<Op> {
        let open = open_streams(world);
        if open < 5 && world.streams.len() < 24 && self.random.one_in(2) {
            return Some(self.stream(world));
        }
        let pool = self.random.pick(&world.pools)?;
        let stream = match self.random.one_in(8) {
            true => self.random.pick(&world.streams)?,
            false => self.random.pick_of(&world.streams, |state| state.is_open())?,
        };
        (open > 1 || self.random.one_in(8)).then_some(Op::Destroy { pool, stream })
    }

    fn graphs(&mut self, world: &World) -> Option<Op> {
        if !self.mix.graphs {
            return None;
        }
        match self.random.below(100) {
            0..8 => {
                let open = world.arenas.0.iter().filter(|(_, arena)| !arena.dropped).count();
                if open >= 3 {
                    return None;
                }
                let pool = self.random.pick(&world.pools)?;
                let arena = self.name();
                let monotone = u64::from(self.random.one_in(4));
                let (order, mode) = (self.random.below(2), self.random.below(3));
                Some(Op::Arena { pool, arena, monotone, order, mode })
            }
            8..11 => {
                let arena = self.random.pick(&world.arenas)?;
                Some(Op::DropArena { arena, way: self.way(3) })
            }
            11..12 => Some(Op::Reset { arena: self.random.pick(&world.arenas)? }),
            12..30 => {
                let arena = self.random.pick_of(&world.arenas, |arena| !arena.dropped)?;
                let stream = self.any_stream(world)?;
                let capture = self.name();
                match self.random.one_in(4) {
                    true => {
                        let mode = self.random.below(3);
                        Some(Op::Attach { arena, stream, capture, mode })
                    }
                    false => Some(Op::Begin { arena, stream, capture }),
                }
            }
            30..40 => {
                let capture = self.random.pick(&world.captures)?;
                let streams = &world.captures.get(capture)?.streams;
                let from = streams[self.random.below(streams.len() as u64) as usize];
                let stream = self.random.pick_of(&world.streams, |state| state.is_open())?;
                Some(Op::Fork { capture, from, stream })
            }
            40..58 => {
                let capture = self.random.pick(&world.captures)?;
                let graph = self.name();
                let way = if self.random.one_in(12) { 1 } else { 2 * (self.way(2)) };
                Some(Op::End { capture, way, graph })
            }
            58..60 => {
                let capture = self.random.pick(&world.captures)?;
                Some(Op::Discard { capture, way: self.way(3) })
            }
            60..61 => Some(Op::Invalidate { capture: self.random.pick(&world.captures)? }),
            61..80 => {
                let graph = self.random.pick(&world.graphs)?;
                let stream = self.any_stream(world)?;
                Some(Op::Launch { graph, stream, lease: self.name() })
            }
            80..86 => {
                let lease = self.random.pick(&world.leases)?;
                let held = world.leases.get(lease)?;
                let of = From::Graph(held.arena, Some(held.graph));
                let block = self.random.pick_of(&world.blocks, |block| block.from == of)?;
                let stream = match self.random.one_in(2) {
                    true => held.stream,
                    false => self.any_stream(world)?,
                };
                Some(Op::Read { lease, block, stream, ns: self.ns() })
            }
            86..95 => {
                let lease = self.random.pick(&world.leases)?;
                Some(Op::EndLease { lease, way: self.way(3) })
            }
            _ => {
                let graph = self.random.pick(&world.graphs)?;
                Some(Op::DropGraph { graph, way: self.way(3) })
            }
        }
    }

    fn ranges(&mut self, world: &World) -> Option<Op> {
        if !self.mix.ranges {
            return None;
        }
        let any = self.random.pick(&world.ranges);
        match self.random.below(20) {
            0..4 if world.ranges.len() < 4 => {
                let pool = self.random.pick(&world.pools)?;
                let len = (1 + self.random.below(6)) << 21;
                Some(Op::Range { pool, range: self.name(), len })
            }
            0..8 => Some(Op::Back { range: any?, stream: self.any_stream(world)? }),
            8..12 => {
                let stream = self.any_stream(world)?;
                let kind = self.random.below(4);
                Some(Op::WorkRange { range: any?, stream, kind, ns: self.ns() })
            }
            12..15 => Some(Op::Lend { range: any? }),
            15..17 => {
                let len = (1 + self.random.below(3)) << 21;
                Some(Op::Host { range: any?, len })
            }
            17..18 => Some(Op::Unhost { range: any? }),
            _ => Some(Op::DropRange { range: any?, way: self.way(3) }),
        }
    }

    fn caches(&mut self, world: &World) -> Option<Op> {
        if !self.mix.caches {
            return None;
        }
        if world.caches.len() == 0 || world.caches.len() < 3 && self.random.one_in(10) {
            let pool = self.random.pick(&world.pools)?;
            let (pages, shape) = (1 + self.random.below(24), self.random.below(72));
            return Some(Op::Cache { pool, cache: self.name(), pages, shape });
        }
        let cache = self.random.pick(&world.caches)?;
        let stream = self.any_stream(world)?;
        let state = world.caches.get(cache)?;
        // Some neighbours that a call may be made for, and at times others too.
        let any = self.random.one_in(24);
        let run = 1 + self.random.below(4);
        let first = self.random.below(state.pages.len() as u64);
        let mask = |committed: bool| {
            let pages = (first..first + run).filter(|page| {
                state.pages.get(*page as usize).is_some_and(|p| any || p.is_some() == committed)
            });
            pages.fold(0, |mask, page| mask | 1 << page)
        };
        Some(match self.random.below(20) {
            0..6 => Op::Commit { cache, stream, pages: mask(false) },
            6..7 => Op::Take { cache, stream, count: 1 + self.random.below(4) },
            7..12 => {
                let pages = mask(true);
                let kind = self.random.below(5);
                Op::WorkCache { cache, stream, pages, kind, ns: self.ns() }
            }
            12..17 => {
                let pages = mask(true);
                // Destroyed streams too.
                let stream = match self.random.one_in(6) {
                    true => self.random.pick(&world.streams)?,
                    false => stream,
                };
                Op::Park { cache, stream, pages, way: u64::from(self.random.one_in(6)) }
            }
            17..19 => {
                let keep = if self.random.one_in(2) { 0 } else { self.random.below(CARD / 4) };
                Op::Release { cache, keep }
            }
            _ => Op::DropCache { cache, way: self.way(3) },
        })
    }

    fn callbacks(&mut self, world: &World) -> Option<Op> {
        if !self.mix.callbacks {
            return None;
        }
        let pool = self.random.pick(&world.pools)?;
        let stream = self.random.pick_of(&world.streams, |state| state.is_open())?;
        match self.random.below(4) {
            0 => {
                let observer = self.name();
                let kind = if self.random.one_in(8) { 4 } else { self.random.below(4) };
                Some(Op::Observe { pool, observer, kind, stream })
            }
            1 | 2 => {
                let block = self.random.pick(&world.blocks)?;
                let observer = self.name();
                let kind = if self.random.one_in(8) { 3 } else { self.random.below(3) };
                Some(Op::Handle { pool, observer, kind, block, stream })
            }
            _ => Some(Op::Unobserve { observer: self.random.pick(&world.observers)? }),
        }
    }

    fn faults(&mut self) -> Option<Op> {
        if !self.mix.faults {
            return None;
        }
        const CALLS: [Call; 22] = [
            Call::Reserve,
            Call::Create,
            Call::Release,
            Call::Map,
            Call::Unmap,
            Call::SetAccess,
            Call::AllocMemory,
            Call::FreeMemory,
            Call::CreateStream,
            Call::DestroyStream,
            Call::CreateEvent,
            Call::Record,
            Call::Query,
            Call::Wait,
            Call::IsCapturing,
            Call::CaptureInfo,
            Call::BeginCapture,
            Call::Instantiate,
            Call::LaunchGraph,
            Call::MallocAsync,
            Call::FreeAsync,
            Call::SynchronizeStream,
        ];
        let call = match self.random.one_in(4) {
            true => Call::ALL.len() as u64,
            false => CALLS[self.random.below(CALLS.len() as u64) as usize] as u64,
        };
        let code = [2, 1, 304, 2][self.random.below(4) as usize];
        // One, two or three calls in a row, or so many that several operations meet them.
        let times = [1, 1, 2, 3, 1 + self.random.below(100)][self.random.below(5) as usize];
        Some(Op::Fault { call, nth: 1 + self.random.below(3), code, times })
    }

    fn misuse(&mut self, world: &World) -> Option<Op> {
        let pool = self.random.pick(&world.pools)?;
        let kind = self.random.below(5);
        let object = match kind {
            2 | 3 => self.random.pick(&world.blocks)?,
            _ => self.name(),
        };
        Some(Op::Misuse { kind, pool, object })
    }

    fn end_pool(&mut self, world: &World) -> Option<Op> {
        // Dropped while a stream captures, a pool leaves its memory: rarely, for such a program
        // cannot show a leak any more.
        if !self.mix.ends || world.captures.len() > 0 && !self.random.one_in(8) {
            return None;
        }
        if world.pools.len() == 1 && !self.random.one_in(3) {
            return None;
        }
        let pool = self.random.pick(&world.pools)?;
        let way = if self.random.one_in(2) { 1 } else { 2 * self.way(2) };
        let end = Op::EndPool { pool, way };
        if !world.subject.can(&end) {
            return None;
        }
        if self.mix.faults && self.random.one_in(2) {
            // The wait for the work, or one of the calls that return the memory.
            let calls = [Call::SynchronizeStream, Call::SynchronizeEvent, Call::Unmap];
            let call = calls[self.random.below(3) as usize] as u64;
            self.script.push_front(end);
            return Some(Op::Fault { call, nth: 1 + self.random.below(3), code: 304, times: 1 });
        }
        Some(end)
    }
}

fn open_streams(world: &World) -> usize {
    world.streams.0.iter().filter(|(_, state)| state.is_open()).count()
}
