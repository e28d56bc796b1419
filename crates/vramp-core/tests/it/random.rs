//! Random programs on the pool, its plans performed on paper by a device whose calls may fail:
//! after every step the pool's picture and the device's are the same.

use std::collections::{BTreeMap, BTreeSet};

use crate::paper::shell::{Placed, Shell};
use crate::paper::{Failure, Paper, Piece};
use proptest::prelude::*;
use vramp_core::{Block, Bytes, ChunkAt, Mixed, Policy, Pool, PoolConfig, Range, StreamId};

const PAGE: Bytes = Bytes::mib(2);
const STREAMS_MOST: usize = 64;

/// The pool and the card of a program.
#[derive(Clone, Debug)]
struct Setup {
    policy: Policy,
    span: Bytes,
    first_span: Bytes,
    limit: Option<Bytes>,
    memory: Bytes,
    stingy: bool,
    streams: usize,
    /// Large requests get few long chunks.
    few_chunks: bool,
}

#[derive(Clone, Debug)]
enum Action {
    Malloc {
        size: u64,
        stream: usize,
        touched: bool,
    },
    Free {
        which: usize,
        stream: usize,
        on_own: bool,
    },
    RecordUse {
        which: usize,
        stream: usize,
    },
    Progress {
        stream: usize,
        most: usize,
    },
    Poll,
    /// End a stream, and make another one in its place.
    EndStream {
        stream: usize,
    },
    Trim {
        pages: u64,
    },
    Prefill {
        pages: u64,
        stream: usize,
    },
    Unmap,
    /// Move what is free towards a block that may never come.
    Assemble {
        pages: u64,
        stream: usize,
    },
    AddArena {
        pages: u64,
    },
    /// Back an arena and work on it: a replay. Or only back it: a capture that failed.
    Replay {
        which: usize,
        pages: u64,
        stream: usize,
        live: u64,
        worked: bool,
    },
    Lend,
    ShortenArena {
        which: usize,
        pages: u64,
    },
    RemoveArena {
        which: usize,
    },
    /// Pin the memory of a block, or of an arena's start.
    Pin {
        which: usize,
    },
    Unpin {
        which: usize,
    },
}

/// A stretch of driver calls that fail, counted from the program's first.
#[derive(Clone, Debug)]
struct Outage {
    first: usize,
    calls: usize,
    full: bool,
}

fn setup(policy: impl Strategy<Value = Policy>) -> impl Strategy<Value = Setup> {
    let span = prop_oneof![Just(Bytes::mib(64)), Just(Bytes::gib(1))];
    let limit = prop_oneof![3 => Just(None), 1 => Just(Some(Bytes::mib(96)))];
    let memory = prop_oneof![Just(Bytes::mib(128)), Just(Bytes::gib(4))];
    let first_pages = prop_oneof![Just(32u64), Just(4)];
    let streams = prop_oneof![5 => 1..=3usize, 1 => 4..=STREAMS_MOST];
    let few_chunks = any::<bool>();
    (policy, span, first_pages, limit, memory, any::<bool>(), streams, few_chunks).prop_map(
        |(policy, span, first_pages, limit, memory, stingy, streams, few_chunks)| Setup {
            policy,
            span,
            first_span: PAGE * first_pages,
            limit,
            memory,
            stingy,
            streams,
            few_chunks,
        },
    )
}

fn mixed() -> impl Strategy<Value = Policy> {
    let fine =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE * 2, chunk_max: PAGE * 8, ..Mixed::default() };
    let heaped = Mixed { heap_limit: Bytes::mib(4), ..fine };
    let ahead = Mixed { slack_per_mille: 300, growth_min: PAGE * 4, ..fine };
    let usual = Mixed::default();
    // Its chunks get short near the small limits of these programs.
    let near = Mixed { chunks_per_pool: 1, ..usual };
    let chosen = prop_oneof![Just(fine), Just(heaped), Just(ahead), Just(usual), Just(near)];
    chosen.prop_map(Policy::Mixed)
}

fn action() -> impl Strategy<Value = Action> {
    let size = prop_oneof![
        3 => 0..1u64 << 20,
        4 => 1u64 << 20..8 << 20,
        2 => 8u64 << 20..48 << 20,
    ];
    let size = prop_oneof![40 => size, 1 => (0..64u32).prop_map(|shift| u64::MAX >> shift)];
    let pages = prop_oneof![20 => 1..16u64, 1 => (21..44u32).prop_map(|shift| u64::MAX >> shift)];
    let (stream, which) = (0..STREAMS_MOST, 0..64usize);
    prop_oneof![
        8 => (size, stream.clone(), any::<bool>())
            .prop_map(|(size, stream, touched)| Action::Malloc { size, stream, touched }),
        7 => (which.clone(), stream.clone(), prop::bool::weighted(0.7))
            .prop_map(|(which, stream, on_own)| Action::Free { which, stream, on_own }),
        2 => (which.clone(), stream.clone())
            .prop_map(|(which, stream)| Action::RecordUse { which, stream }),
        1 => which.clone().prop_map(|which| Action::Pin { which }),
        1 => which.prop_map(|which| Action::Unpin { which }),
        3 => (stream.clone(), 1..8usize)
            .prop_map(|(stream, most)| Action::Progress { stream, most }),
        1 => Just(Action::Poll),
        1 => stream.clone().prop_map(|stream| Action::EndStream { stream }),
        1 => (0..64u64).prop_map(|pages| Action::Trim { pages }),
        1 => (pages.clone(), stream.clone())
            .prop_map(|(pages, stream)| Action::Prefill { pages, stream }),
        2 => (pages, stream).prop_map(|(pages, stream)| Action::Assemble { pages, stream }),
        1 => Just(Action::Unmap),
    ]
}

/// The same with arenas among them.
fn action_with_arenas() -> impl Strategy<Value = Action> {
    let (stream, which) = (0..STREAMS_MOST, 0..8usize);
    prop_oneof![
        20 => action(),
        1 => (1..24u64).prop_map(|pages| Action::AddArena { pages }),
        6 => (which.clone(), 1..24u64, stream, 0..4u64, any::<bool>()).prop_map(
            |(which, pages, stream, live, worked)| Action::Replay {
                which,
                pages,
                stream,
                live,
                worked,
            },
        ),
        2 => Just(Action::Lend),
        1 => (which.clone(), 1..24u64)
            .prop_map(|(which, pages)| Action::ShortenArena { which, pages }),
        1 => which.prop_map(|which| Action::RemoveArena { which }),
    ]
}

fn actions_with_arenas() -> impl Strategy<Value = Vec<Action>> {
    prop::collection::vec(action_with_arenas(), 1..150)
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    prop::collection::vec(action(), 1..150)
}

fn outages() -> impl Strategy<Value = Vec<Outage>> {
    let outage = (1..300usize, 1..6usize, any::<bool>());
    prop::collection::vec(
        outage.prop_map(|(first, calls, full)| Outage { first, calls, full }),
        0..8,
    )
}

struct Held {
    placed: Placed,
    requested: u64,
    stream: StreamId,
    life: u64,
    touched: bool,
}

/// Memory that is held at its address, and the physical memory that lies there.
struct Pinned {
    range: Range,
    chunks: Vec<ChunkAt>,
    pieces: Vec<Piece>,
}

struct Program {
    shell: Shell,
    pins: Vec<Pinned>,
    streams: Vec<StreamId>,
    ended: Vec<StreamId>,
    held: Vec<Held>,
    lives: u64,
}

impl Program {
    fn new(setup: &Setup, outages: &[Outage]) -> Program {
        let Setup { policy, span, first_span, limit, memory, stingy, streams, few_chunks } = *setup;
        let pool = Pool::new(PoolConfig { page: PAGE, span, first_span, limit, policy });
        let mut pool = pool.expect("the configuration is possible");
        if few_chunks {
            pool.prefer_few_chunks();
        }
        let mut failures = BTreeMap::new();
        for outage in outages {
            let failure = if outage.full { Failure::Full } else { Failure::Other };
            failures.extend((0..outage.calls).map(|n| (outage.first + n, failure)));
        }
        let mut shell = Shell {
            pool,
            heaps: Vec::new(),
            paper: Paper::new(memory, stingy, failures),
            quarantined: false,
            arenas: Vec::new(),
            polls: 0,
        };
        let streams = (0..streams).map(|_| shell.add_stream()).collect();
        Program { shell, pins: Vec::new(), streams, ended: Vec::new(), held: Vec::new(), lives: 0 }
    }

    fn step(&mut self, action: &Action) {
        match *action {
            Action::Malloc { size, stream, touched } => self.malloc(size, stream, touched),
            Action::Free { which, stream, on_own } => self.free(which, stream, on_own),
            Action::RecordUse { which, stream } if !self.held.is_empty() => {
                let held = &self.held[which % self.held.len()];
                let stream = self.stream(stream);
                self.shell.paper.queues.order(stream, held.stream);
                self.shell.paper.touch(stream, held.life, range(held.placed.block));
                self.shell.record_use(held.placed, stream);
            }
            Action::RecordUse { .. } => {}
            Action::Progress { stream, most } => {
                let all: Vec<StreamId> = self.streams.iter().chain(&self.ended).copied().collect();
                self.shell.paper.queues.advance(all[stream % all.len()], most);
            }
            Action::Poll => self.shell.poll(),
            Action::EndStream { stream } => {
                let place = stream % self.streams.len();
                if self.shell.end_stream(self.streams[place]) {
                    self.ended.push(self.streams[place]);
                    self.streams[place] = self.shell.add_stream();
                }
            }
            Action::Trim { pages } => self.shell.trim(PAGE * pages),
            Action::Prefill { pages, stream } => {
                self.shell.prefill(PAGE * pages, self.stream(stream));
            }
            Action::Unmap => self.shell.unmap(),
            Action::Assemble { pages, stream } => {
                self.shell.assemble(
                    Bytes::mib(pages.saturating_mul(2).min(1 << 40)),
                    self.stream(stream),
                );
            }
            Action::AddArena { pages } => self.shell.add_arena(PAGE * pages),
            Action::Replay { which, pages, stream, live, worked }
                if !self.shell.arenas.is_empty() =>
            {
                let which = which % self.shell.arenas.len();
                if worked {
                    self.replay(which, PAGE * pages, stream, PAGE * live);
                } else {
                    let capacity = self.shell.arenas[which].capacity;
                    let stream = self.stream(stream);
                    self.shell.back(which, capacity.min(PAGE * pages), stream);
                }
            }
            Action::ShortenArena { which, pages } if !self.shell.arenas.is_empty() => {
                let which = which % self.shell.arenas.len();
                let arena = &mut self.shell.arenas[which];
                // What was backed stays; so do parts on which a driver call failed.
                let keep = arena.upto.max(PAGE * pages);
                arena.capacity = self.shell.pool.shorten_arena(arena.id, keep);
                assert!(arena.capacity >= arena.upto);
            }
            Action::RemoveArena { which } if !self.shell.arenas.is_empty() => {
                self.shell.remove_arena(which % self.shell.arenas.len());
            }
            Action::Replay { .. } | Action::ShortenArena { .. } | Action::RemoveArena { .. } => {}
            Action::Lend => self.shell.lend(),
            Action::Pin { which } => self.pin(which),
            Action::Unpin { which } if !self.pins.is_empty() => {
                let pinned = self.pins.swap_remove(which % self.pins.len());
                self.shell.pool.unpin(&pinned.chunks);
            }
            Action::Unpin { .. } => {}
        }
    }

    fn pin(&mut self, which: usize) {
        let pool = &self.shell.pool;
        let blocks = self.held.iter().map(|held| range(held.placed.block));
        let arenas = self.shell.arenas.iter().filter(|arena| !arena.upto.is_zero());
        let arenas = arenas.map(|arena| Range { len: arena.upto, ..pool.arena_range(arena.id) });
        let ranges: Vec<Range> = blocks.chain(arenas).collect();
        let Some(&range) = ranges.get(which % ranges.len().max(1)) else { return };
        // Part of an arena may be lent and moved away.
        let Ok(chunks) = self.shell.pool.pin(range) else { return };
        let first = chunks.first().expect("a range has a byte");
        let last = chunks.last().expect("a range has a byte");
        assert!(first.at <= range.at && range.at + range.len <= last.at + last.len);
        let pieces = self.shell.paper.pieces(range);
        self.pins.push(Pinned { range, chunks, pieces });
    }

    fn replay(&mut self, which: usize, upto: Bytes, stream: usize, live: Bytes) {
        let stream = self.stream(stream);
        let arena = self.shell.arenas[which].clone();
        let range = |len| Range { at: self.shell.pool.arena_range(arena.id).at, len };
        let upto = upto.min(arena.capacity);
        let kept = self.shell.paper.pieces(range(arena.live));
        if !self.shell.back(which, upto, stream) || !self.shell.order_behind(which, stream) {
            return;
        }
        let range = |len| Range { at: self.shell.pool.arena_range(arena.id).at, len };
        assert_eq!(self.shell.paper.pieces(range(arena.live)), kept, "live memory left {arena:?}");
        self.lives += 1;
        self.shell.paper.touch(stream, self.lives, range(upto));
        self.shell.arenas[which].live = live.min(upto);
    }

    fn stream(&self, number: usize) -> StreamId {
        self.streams[number % self.streams.len()]
    }

    fn malloc(&mut self, size: u64, stream: usize, touched: bool) {
        let stream = self.stream(stream);
        let Some(placed) = self.shell.malloc(Bytes::new(size), stream) else { return };
        self.lives += 1;
        let life = self.lives;
        if touched {
            self.shell.paper.touch(stream, life, range(placed.block));
        }
        self.held.push(Held { placed, requested: size, stream, life, touched });
    }

    fn free(&mut self, which: usize, stream: usize, on_own: bool) {
        if self.held.is_empty() {
            return;
        }
        let held = self.held.swap_remove(which % self.held.len());
        let stream = if on_own { held.stream } else { self.stream(stream) };
        if held.touched {
            // What the program owes the pool: its own work comes before the free.
            self.shell.paper.queues.order(stream, held.stream);
        }
        self.shell.free(held.placed, stream);
    }

    fn check(&self) {
        let Shell { pool, paper, .. } = &self.shell;
        pool.audit().expect("every step keeps every invariant");

        for heap in &self.shell.heaps {
            heap.audit(pool).expect("every step keeps every heap whole");
        }
        let slabs: usize = self.shell.heaps.iter().map(|heap| heap.slab_count()).sum();
        assert_eq!(slabs, pool.slab_count());

        let census = self.shell.census();
        let by_address = census.holes
            + census.retired
            + census.hosted
            + census.quarantined_addresses
            + census.mapped;
        assert_eq!(by_address, census.addresses);
        assert_eq!(census.addresses.count(), paper.addresses());
        assert_eq!((census.addresses - census.holes).count(), paper.mapped_bytes());
        let arenas = self.shell.arenas.iter().map(|arena| pool.arena_memory(arena.id));
        let (backed, lent) = arenas.fold((Bytes::ZERO, Bytes::ZERO), |(backed, lent), memory| {
            (backed + memory.backed, lent + memory.lent)
        });
        assert_eq!((census.arenas, census.lent), (backed, lent));
        assert_eq!(census.reserved.count(), paper.chunk_bytes());

        let requested: u64 = self.held.iter().map(|held| held.requested).sum();
        assert_eq!(census.requested.count(), requested);

        let ids = |blocks: &mut dyn Iterator<Item = Block>| -> BTreeSet<_> {
            blocks.map(|block| block.id).collect()
        };
        let held_in = |home: Option<StreamId>| {
            let held = self.held.iter().filter(move |held| held.placed.heap == home);
            ids(&mut held.map(|held| held.placed.block))
        };
        assert_eq!(ids(&mut pool.blocks()), held_in(None));
        for heap in &self.shell.heaps {
            assert_eq!(ids(&mut heap.blocks()), held_in(Some(heap.stream())));
        }
        for Pinned { range, pieces, .. } in &self.pins {
            assert_eq!(&paper.pieces(*range), pieces, "the memory of {range:?} left, pinned");
        }
        let chunks: BTreeSet<_> =
            self.pins.iter().flat_map(|p| &p.chunks).map(|c| c.chunk).collect();
        assert_eq!(pool.pinned().0, chunks.len() as u64);
        let mut spots = Vec::new();
        let mut pieces: Vec<Piece> = Vec::new();
        for held in &self.held {
            let block = held.placed.block;
            let known = match held.placed.heap {
                Some(home) => self.shell.heaps[home.index()].block(block.id),
                None => pool.block(block.id),
            };
            assert_eq!(known, Ok(block));
            assert!(block.len.count() >= held.requested);
            spots.push((block.at.number(), block.len.count()));
            pieces.extend(paper.pieces(range(block)));
        }
        for arena in &self.shell.arenas {
            // Live memory is the arena's own; builds may have moved the rest away.
            let at = pool.arena_range(arena.id).at;
            pieces.extend(paper.pieces(Range { at, len: arena.live }));
        }
        spots.sort_unstable();
        let apart = |pair: &[(u64, u64)]| pair[0].0 + pair[0].1 <= pair[1].0;
        assert!(spots.windows(2).all(apart), "blocks overlap: {spots:?}");
        pieces.sort_unstable();
        for pair in pieces.windows(2) {
            let apart =
                pair[0].chunk != pair[1].chunk || pair[0].offset + pair[0].len <= pair[1].offset;
            assert!(apart, "two blocks share physical memory: {pair:?}");
        }
    }

    /// Frees everything and lets all work end.
    fn come_to_rest(&mut self) {
        self.shell.paper.failures.clear();
        for pinned in self.pins.drain(..) {
            self.shell.pool.unpin(&pinned.chunks);
        }
        while !self.shell.arenas.is_empty() {
            self.shell.remove_arena(0);
            self.check();
        }
        while !self.held.is_empty() {
            self.free(0, 0, true);
            self.check();
        }
        // What becomes free by learning that work is over may need an event of its own.
        loop {
            let all: Vec<StreamId> = self.streams.iter().chain(&self.ended).copied().collect();
            while all.iter().any(|&s| self.shell.paper.queues.advance(s, usize::MAX)) {}
            self.shell.poll();
            self.shell.gather();
            if self.shell.pool.unrecorded().is_empty() {
                break;
            }
            assert!(self.shell.record_freed(), "no call fails any more");
        }
        self.check();
    }
}

fn range(block: Block) -> Range {
    Range { at: block.at, len: block.len }
}

fn run(setup: &Setup, actions: &[Action], outages: &[Outage]) {
    let mut program = Program::new(setup, outages);
    for action in actions {
        program.step(action);
        program.check();
    }
    program.come_to_rest();
    one_block_takes_all_there_is(&mut program);
    trimming_leaves_nothing(program);
}

/// Nothing is stranded: all free chunks together make one block, without a new one.
fn one_block_takes_all_there_is(program: &mut Program) {
    let shell = &mut program.shell;
    let all = shell.pool.census().mapped;
    if all.is_zero() {
        return;
    }
    let created = shell.pool.counters().chunks_created;
    let block = shell.malloc_without_growth(all, program.streams[0]).expect("all is free and idle");
    shell.paper.touch(program.streams[0], program.lives + 1, range(block));
    assert_eq!(shell.pool.counters().chunks_created, created);
    shell.pool.audit().expect("the largest block keeps every invariant");
    shell.free(Placed { block, heap: None }, program.streams[0]);
    program.come_to_rest();
}

/// Nothing leaks: idle memory can all be given back.
fn trimming_leaves_nothing(mut program: Program) {
    program.shell.trim(Bytes::ZERO);
    program.check();
    if !program.shell.quarantined {
        assert_eq!(program.shell.paper.chunk_bytes(), 0, "{}", program.shell.pool.census());
        let open: BTreeSet<StreamId> = program.streams.iter().copied().collect();
        assert_eq!(program.shell.pool.streams().collect::<BTreeSet<_>>(), open, "ended ones left");
    }
}

#[test]
fn more_memory_ahead_of_demand_than_a_span_holds_is_refused() {
    for policy in [Policy::Vpmm, Policy::Mixed(Mixed::default())] {
        let config =
            PoolConfig { page: PAGE, span: Bytes::gib(1), first_span: PAGE, limit: None, policy };
        let mut pool = Pool::new(config).expect("the configuration is possible");
        let stream = pool.add_stream();
        assert_eq!(pool.prefill(Bytes::tib(16), stream), None);
        assert_eq!(pool.prefill(Bytes::new(u64::MAX), stream), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(150)))]

    #[test]
    fn arenas_keep_their_addresses_and_live_memory_on_random_programs(
        setup in setup(mixed()),
        actions in actions_with_arenas(),
    ) {
        run(&setup, &actions, &[]);
    }

    #[test]
    fn arenas_keep_their_addresses_and_live_memory_while_driver_calls_fail(
        setup in setup(mixed()),
        actions in actions_with_arenas(),
        outages in outages(),
    ) {
        run(&setup, &actions, &outages);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(50)))]

    #[test]
    fn the_default_policy_keeps_every_promise_on_random_programs(
        setup in setup(mixed()),
        actions in actions(),
    ) {
        run(&setup, &actions, &[]);
    }

    #[test]
    fn the_default_policy_keeps_every_promise_while_driver_calls_fail(
        setup in setup(mixed()),
        actions in actions(),
        outages in outages(),
    ) {
        run(&setup, &actions, &outages);
    }

    #[test]
    fn vpmm_keeps_every_promise_on_random_programs(
        setup in setup(Just(Policy::Vpmm)),
        actions in actions(),
    ) {
        run(&setup, &actions, &[]);
    }

    #[test]
    fn vpmm_keeps_every_promise_while_driver_calls_fail(
        setup in setup(Just(Policy::Vpmm)),
        actions in actions(),
        outages in outages(),
    ) {
        run(&setup, &actions, &outages);
    }
}
