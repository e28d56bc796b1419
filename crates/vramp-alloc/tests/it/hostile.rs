//! Hostile programs: requests below limits that memory in flight fills, streams that end among
//! failing calls, and blocks that wait for others in heaps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use vramp_alloc::config::{ExternalProgress, Progress};
use vramp_alloc::graph::ArenaConfig;
use vramp_alloc::{Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_driver::sim::{Contents, FaultPlan, Kernel, Simulator};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, DriverResult, Event};
use vramp_peers::Preset;

use crate::common::{Random, Rig, pages, range};

const MIB: Bytes = Bytes::mib(1);

fn limited(mib: u64) -> Rig {
    let config = Config { limit: Some(MIB * mib), ..Config::default() };
    Rig::on(Simulator::builder().contents(Contents::Discarded), config)
}

fn streams<const COUNT: usize>(rig: &Rig) -> [StreamId; COUNT] {
    [(); COUNT].map(|()| rig.allocator.create_stream().unwrap())
}

fn keep_busy(rig: &Rig, stream: StreamId) {
    rig.sim.launch(rig.raw(stream), Kernel::new("busy").lasting(10_000_000)).unwrap();
}

// --- before a request fails ---

#[test]
fn a_request_waits_for_one_pool_after_the_other() {
    let rig = limited(64);
    let [small, large] = ["small", "large"].map(|name| rig.allocator.create_pool(name).unwrap());
    let one = small.malloc(MIB * 4, rig.stream).unwrap();
    let other = large.malloc(MIB * 56, rig.stream).unwrap();
    keep_busy(&rig, rig.stream);
    small.free(one, rig.stream).unwrap();
    large.free(other, rig.stream).unwrap();
    // What the first one returns does not suffice.
    let _block = rig.allocator.malloc(MIB * 50, rig.stream).unwrap();
}

#[test]
fn a_request_waits_for_chunks_of_which_two_streams_freed_parts() {
    let rig = limited(64);
    let two: [StreamId; 2] = streams(&rig);
    let blocks: Vec<Allocation> =
        (0..64).map(|n| rig.allocator.malloc(MIB, two[n % 2]).unwrap()).collect();
    two.iter().for_each(|&stream| keep_busy(&rig, stream));
    for block in blocks {
        let stream = block.stream();
        rig.allocator.free(block, stream).unwrap();
    }
    let _block = rig.allocator.malloc(MIB * 50, rig.stream).unwrap();
}

#[test]
fn a_request_waits_for_blocks_in_heaps_of_other_streams() {
    let rig = limited(64);
    let [home, user] = streams(&rig);
    let blocks: Vec<Allocation> =
        (0..1000).map(|_| rig.allocator.malloc(Bytes::kib(48), home).unwrap()).collect();
    keep_busy(&rig, user);
    for block in blocks {
        rig.allocator.record_use(&block, user).unwrap();
        rig.allocator.free(block, home).unwrap();
    }
    let _block = rig.allocator.malloc(MIB * 50, rig.stream).unwrap();
}

#[test]
fn a_request_finds_what_is_over_behind_a_hundred_busy_streams() {
    let rig = limited(128);
    let gate = rig.sim.gate();
    for _ in 0..100 {
        let [stream] = streams(&rig);
        let block = rig.allocator.malloc(Bytes::kib(4), stream).unwrap();
        rig.sim.launch(rig.raw(stream), Kernel::new("busy").until(gate)).unwrap();
        rig.allocator.record_use(&block, stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
    }
    let [home, user] = streams(&rig);
    let blocks: Vec<Allocation> =
        (0..1000).map(|_| rig.allocator.malloc(Bytes::kib(48), home).unwrap()).collect();
    for block in blocks {
        rig.allocator.record_use(&block, user).unwrap();
        rig.allocator.free(block, home).unwrap();
    }
    rig.sim.advance(1_000_000);
    let _block = rig.allocator.malloc(MIB * 64, rig.stream).unwrap();
    rig.sim.open(gate);
}

/// A device whose work waits for a thread, once.
struct WaitingForThread {
    sim: Arc<Simulator>,
    thread: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    is_stuck: AtomicBool,
}

impl Wrapper for WaitingForThread {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        let work = self.thread.lock().unwrap().take();
        if let Some(work) = work {
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                work();
                let _ = sender.send(());
            });
            let waited = done.recv_timeout(Duration::from_secs(1));
            self.is_stuck.store(waited.is_err(), Ordering::Relaxed);
        }
        self.sim.synchronize_event(event)
    }
}

#[test]
fn a_request_waits_without_a_lock_that_a_free_needs() {
    for of_own in [false, true] {
        let sim = Arc::new(Simulator::builder().build());
        let device = WaitingForThread {
            sim: Arc::clone(&sim),
            thread: Mutex::default(),
            is_stuck: AtomicBool::new(false),
        };
        let device = Arc::new(Wrapped(device));
        let driver: Arc<dyn Driver> = Arc::clone(&device) as Arc<dyn Driver>;
        let config = Config { limit: Some(pages(32)), ..Config::default() };
        let main = Arc::new(Allocator::new(driver, config).unwrap());
        let other = Arc::new(main.create_pool("other").unwrap());
        let [stream, user] = [(); 2].map(|()| main.create_stream().unwrap());
        let pool = if of_own { &main } else { &other };
        // The request fits once both are free, and the second is freed during the wait.
        let [freed, later] = [15, 15].map(|count| pool.malloc(pages(count), stream).unwrap());
        let long = Kernel::new("long").writing(range(&freed)).lasting(1_000_000);
        sim.launch(main.stream(user).unwrap(), long).unwrap();
        pool.record_use(&freed, user).unwrap();
        pool.free(freed, stream).unwrap();
        let thread = Arc::clone(pool);
        *device.0.thread.lock().unwrap() = Some(Box::new(move || {
            thread.free(later, user).unwrap();
        }));
        let _block = main.malloc(pages(30), stream).unwrap();
        assert!(device.0.thread.lock().unwrap().is_none(), "the request waited");
        assert!(!device.0.is_stuck.load(Ordering::Relaxed), "the free went on");
    }
}

#[test]
fn pools_that_wait_for_each_other_at_once_keep_the_limit() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        for seed in 0..5 {
            let config = Config { limit: Some(MIB * 128), ..preset.config() };
            let rig = Rig::on(Simulator::builder().contents(Contents::Discarded).checked(), config);
            let pools: Vec<_> =
                (0..3).map(|n| rig.allocator.create_pool(&n.to_string()).unwrap()).collect();
            let streams: Vec<_> = (0..4).map(|_| rig.allocator.create_stream().unwrap()).collect();
            std::thread::scope(|scope| {
                for (n, pool) in pools.iter().enumerate() {
                    let (rig, streams) = (&rig, &streams);
                    scope.spawn(move || {
                        let mut random = Random(seed * 7 + n as u64);
                        let mut held: Vec<Allocation> = Vec::new();
                        for _ in 0..400 {
                            let stream = streams[n];
                            if random.below(2) == 0 {
                                if let Ok(block) = pool.malloc(MIB * (1 + random.below(60)), stream)
                                {
                                    let work =
                                        Kernel::new("w").writing(range(&block)).lasting(100_000);
                                    rig.sim.launch(rig.raw(stream), work).unwrap();
                                    held.push(block);
                                }
                            } else if !held.is_empty() {
                                let block =
                                    held.swap_remove(random.below(held.len() as u64) as usize);
                                pool.free(block, stream).unwrap();
                            }
                            if random.below(50) == 0 {
                                let _ = pool.trim(Bytes::ZERO);
                            }
                        }
                        for block in held {
                            pool.free(block, streams[n]).unwrap();
                        }
                    });
                }
                scope.spawn(|| {
                    for n in 0..20 {
                        let extra = rig.allocator.create_pool(&format!("extra {n}")).unwrap();
                        if let Ok(block) = extra.malloc(MIB * 20, streams[3]) {
                            let work = Kernel::new("w").writing(range(&block)).lasting(100_000);
                            rig.sim.launch(rig.raw(streams[3]), work).unwrap();
                            extra.free(block, streams[3]).unwrap();
                        }
                        extra.close().unwrap();
                    }
                });
            });
            assert_eq!(rig.sim.hazards(), []);
            assert!(rig.sim.live().device_bytes <= MIB * 128);
            for pool in pools {
                pool.audit().unwrap();
                pool.close().unwrap();
            }
            rig.close();
        }
    }
}

/// How a random program goes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    streams: u64,
    /// The card is full, and there is no limit.
    card: bool,
    /// Small blocks among the others, or blocks of some hundred KiB only.
    sizes: u64,
    ends: bool,
}

/// A request that fails fails again once all work is over.
fn run_short_of_memory(shape: Shape, seed: u64) {
    let limit = (!shape.card).then_some(MIB * 256);
    let builder = Simulator::builder().contents(Contents::Discarded);
    let builder = if shape.card { builder.memory(MIB * 256) } else { builder };
    let rig = Rig::on(builder, Config { limit, ..Config::default() });
    let mut random = Random(seed * 7919 + 13);
    let others = (1..shape.streams).map(|_| rig.allocator.create_stream().unwrap());
    let mut streams: Vec<StreamId> = std::iter::once(rig.stream).chain(others).collect();
    let mut held: Vec<Allocation> = Vec::new();
    let take = |held: &mut Vec<Allocation>, random: &mut Random| {
        let at = random.below(held.len() as u64) as usize;
        held.swap_remove(at)
    };
    for step in 0..400 {
        match random.below(100) {
            0..45 => {
                let stream = *random.pick(&streams);
                let size = match (shape.sizes, random.below(4)) {
                    (0, 0) => Bytes::new(1 + random.below(256 << 10)),
                    (1, _) => Bytes::new(1 + random.below(128 << 10)) * 8,
                    (_, 1) => MIB * (1 + random.below(96)),
                    _ => Bytes::new(1 + random.below(8 << 20)),
                };
                match rig.allocator.malloc(size, stream) {
                    Ok(block) => held.push(block),
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        rig.sim.advance(1 << 50);
                        let again = rig.allocator.malloc(size, stream);
                        assert!(again.is_err(), "{shape:?}, seed {seed}, step {step}: {error}");
                        for _ in 0..held.len() / 2 {
                            let block = take(&mut held, &mut random);
                            let stream = block.stream();
                            rig.allocator.free(block, stream).unwrap();
                        }
                    }
                }
            }
            45..65 => keep_busy(&rig, *random.pick(&streams)),
            65..75 if !held.is_empty() => {
                let stream = *random.pick(&streams);
                rig.allocator.record_use(random.pick(&held), stream).unwrap();
            }
            75 if shape.ends => {
                let at = random.below(streams.len() as u64) as usize;
                rig.allocator.destroy_stream(streams[at]).unwrap();
                streams[at] = rig.allocator.create_stream().unwrap();
            }
            76 => rig.sim.advance(1 << random.below(24)),
            _ if !held.is_empty() => {
                let block = take(&mut held, &mut random);
                let home = block.stream();
                let stream = if random.below(4) == 0 { *random.pick(&streams) } else { home };
                rig.allocator.free(block, stream).unwrap();
            }
            _ => {}
        }
    }
}

#[test]
fn no_request_fails_that_the_end_of_all_work_would_serve() {
    for streams in [2, 4, 64] {
        for sizes in [0, 1, 2] {
            for [card, ends] in [[false, false], [false, true], [true, false], [true, true]] {
                for seed in 0..6 {
                    run_short_of_memory(Shape { streams, card, sizes, ends }, seed);
                }
            }
        }
    }
}

// --- what requests cost, and what they reserve ---

#[test]
fn a_busy_arena_makes_no_request_ask_streams_that_do_not_use_it() {
    let rig = limited(4096);
    let arena = rig.allocator.graph_arena(ArenaConfig::default()).unwrap();
    let mut capture = rig.allocator.begin_capture(rig.stream, &arena).unwrap();
    let block = rig.allocator.malloc(MIB * 8, rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    let graph = capture.end().unwrap();
    let gate = rig.sim.gate();
    let busy = |stream| {
        rig.sim.launch(rig.raw(stream), Kernel::new("busy").until(gate)).unwrap();
    };
    let [stream] = streams(&rig);
    busy(stream);
    drop(graph.launch(stream).unwrap());
    for _ in 0..256 {
        let [stream] = streams(&rig);
        let block = rig.allocator.malloc(pages(1), stream).unwrap();
        busy(stream);
        rig.allocator.free(block, stream).unwrap();
    }
    rig.allocator.trim(Bytes::gib(64)).unwrap();
    let (asked, block) =
        rig.calls(Call::Query, || rig.allocator.malloc(MIB * 64, rig.stream).unwrap());
    assert!(asked < 200, "{asked} queries");
    rig.allocator.free(block, rig.stream).unwrap();
    rig.sim.open(gate);
}

#[test]
fn a_prefill_keeps_to_the_limit_that_pools_share() {
    let rig = limited(64);
    let other = rig.allocator.create_pool("other").unwrap();
    let block = rig.allocator.malloc(MIB * 4, rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    let _kept = other.malloc(MIB * 48, rig.stream).unwrap();
    assert!(rig.allocator.prefill(MIB * 40, rig.stream).is_err());
    rig.allocator.prefill(MIB * 8, rig.stream).unwrap();
    assert!(rig.sim.live().device_bytes <= MIB * 64);
}

#[test]
fn blocks_that_waited_in_heaps_serve_again_before_the_pool_grows() {
    for kib in [8, 48, 100, 400, 1024] {
        let rig = Rig::on(Simulator::builder().contents(Contents::Discarded), Config::default());
        let [other] = streams(&rig);
        let mut two = [rig.stream, other];
        for _ in 0..2_000 {
            let [stream, user] = two;
            let blocks = [(); 3].map(|()| rig.allocator.malloc(Bytes::kib(kib), stream).unwrap());
            for block in blocks {
                rig.allocator.record_use(&block, user).unwrap();
                rig.allocator.free(block, stream).unwrap();
            }
            // No work is ever in flight.
            rig.sim.advance(1_000_000);
            two.reverse();
        }
        let reserved = rig.allocator.stats().unwrap().reserved;
        assert!(reserved <= MIB * 64, "{reserved} for three blocks of {kib} KiB");
    }
}

/// Streams take turns for a while: each allocates blocks, begins long work, and frees them. Returns what is
/// reserved and live at most, and the creates, maps and waits of the last quarter.
fn take_turns(
    count: u64,
    blocks: usize,
    mut size: impl FnMut() -> Bytes,
) -> (Bytes, Bytes, [u64; 3]) {
    let rig = Rig::on(Simulator::builder().contents(Contents::Discarded), Config::default());
    let others = (1..count).map(|_| rig.allocator.create_stream().unwrap());
    let streams: Vec<StreamId> = std::iter::once(rig.stream).chain(others).collect();
    let calls = || [Call::Create, Call::Map, Call::Wait].map(|call| rig.sim.calls_of(call));
    let mut before = calls();
    for turn in 0..200 {
        if turn == 150 {
            before = calls();
        }
        for &stream in &streams {
            let held: Vec<Allocation> =
                (0..blocks).map(|_| rig.allocator.malloc(size(), stream).unwrap()).collect();
            keep_busy(&rig, stream);
            held.into_iter().for_each(|block| rig.allocator.free(block, stream).unwrap());
            rig.sim.advance(1_000);
        }
    }
    let (stats, after) = (rig.allocator.stats().unwrap(), calls());
    (stats.reserved_peak, stats.live_peak, [0, 1, 2].map(|call| after[call] - before[call]))
}

#[test]
fn streams_that_take_turns_with_blocks_of_one_size_come_to_need_no_driver_call() {
    for (count, blocks, kib) in [(2, 1, 30_000), (2, 3, 3_000), (3, 3, 10_240), (8, 1, 1_024)] {
        let (_, _, calls) = take_turns(count, blocks, || Bytes::kib(kib));
        assert_eq!(calls, [0; 3], "{count} streams, {blocks} blocks of {kib} KiB");
    }
}

#[test]
fn streams_that_take_turns_with_blocks_of_any_size_reserve_what_pools_of_their_own_would() {
    for (count, blocks, kib) in [(2, 1, 10_240), (2, 10, 10_240), (2, 10, 30_000), (3, 1, 30_000)] {
        let mut random = Random(7);
        let size = || Bytes::kib(kib + random.below(kib));
        let (reserved, live, _) = take_turns(count, blocks, size);
        let each = live.count() * 9 / 8 + Bytes::mib(8).count();
        let most = Bytes::new(each * count);
        assert!(reserved <= most, "{reserved} for {live}, {count} streams, {blocks} blocks");
    }
}

// --- streams that end ---

/// Random programs in which driver calls fail, streams end, and blocks are freed on ended ones.
fn ends_with_faults(preset: Preset, seed: u64) {
    let card = Simulator::builder().memory(MIB * 192).checked().contents(Contents::Discarded);
    let progress = Arc::new(ExternalProgress::default());
    let mut config = preset.config();
    if seed % 5 == 4 {
        config.progress = Progress::External(progress);
    }
    let rig = Rig::on(card, config);
    let mut random = Random(seed);
    let mut streams = vec![rig.stream];
    let mut ended: Vec<StreamId> = Vec::new();
    let mut pools: Vec<Allocator> = Vec::new();
    let mut held: Vec<(Allocation, usize)> = Vec::new();
    let mut names = 0;
    for _ in 0..300 {
        let call = *random.pick(&[
            Call::Record,
            Call::CreateEvent,
            Call::Query,
            Call::DestroyStream,
            Call::Wait,
            Call::Map,
            Call::Create,
            Call::DestroyEvent,
            Call::SynchronizeEvent,
            Call::IsCapturing,
        ]);
        if random.below(4) == 0 {
            rig.sim.set_faults(FaultPlan::nth_of(call, 1 + random.below(3)).with_code(1));
        } else {
            rig.sim.set_faults(FaultPlan::none());
        }
        match random.below(100) {
            0..30 if !streams.is_empty() => {
                let stream = *random.pick(&streams);
                let most = if random.below(2) == 0 { 1 << 19 } else { 12 << 20 };
                let size = Bytes::new(1 + random.below(most));
                let at = random.below(1 + pools.len() as u64) as usize;
                let pool = if at == 0 { &rig.allocator } else { &pools[at - 1] };
                if let Ok(block) = pool.malloc(size, stream) {
                    let kernel =
                        Kernel::new("w").writing(range(&block)).lasting(1 << random.below(20));
                    rig.sim.launch(rig.raw(stream), kernel).unwrap();
                    held.push((block, at));
                }
            }
            30..55 if !held.is_empty() => {
                let at = random.below(held.len() as u64) as usize;
                let (block, pool) = held.swap_remove(at);
                let pool = if pool == 0 { &rig.allocator } else { &pools[pool - 1] };
                let home = block.stream();
                let stream = match random.below(3) {
                    0 if streams.contains(&home) && !ended.is_empty() => {
                        pool.record_use(&block, home).unwrap();
                        *random.pick(&ended)
                    }
                    _ => home,
                };
                let _ = pool.free(block, stream);
            }
            55..65 if !held.is_empty() && !streams.is_empty() => {
                let at = random.below(held.len() as u64) as usize;
                let (block, pool) = &held[at];
                let pool = if *pool == 0 { &rig.allocator } else { &pools[*pool - 1] };
                let stream = *random.pick(&streams);
                if streams.contains(&block.stream()) {
                    rig.sim.set_faults(FaultPlan::none());
                    rig.order(block.stream(), stream);
                    let kernel =
                        Kernel::new("r").reading(range(block)).lasting(1 << random.below(20));
                    rig.sim.launch(rig.raw(stream), kernel).unwrap();
                    let noted = pool.record_use(block, stream);
                    assert!(noted.is_ok());
                }
            }
            65..80 if !streams.is_empty() => {
                let at = random.below(streams.len() as u64) as usize;
                let stream = streams[at];
                match rig.allocator.destroy_stream(stream) {
                    Ok(()) => {
                        streams.swap_remove(at);
                        ended.push(stream);
                    }
                    Err(_) => {
                        if rig.allocator.stream(stream).is_none() {
                            streams.swap_remove(at);
                            ended.push(stream);
                            if random.below(2) == 0 {
                                let _ = rig.allocator.destroy_stream(stream);
                            }
                        }
                    }
                }
            }
            80..90 => {
                if let Ok(stream) = rig.allocator.create_stream() {
                    streams.push(stream);
                }
            }
            90..92 if pools.len() < 3 => {
                names += 1;
                pools.extend(rig.allocator.create_pool(&names.to_string()));
            }
            92..95 => drop(rig.allocator.trim(MIB * random.below(64))),
            _ => rig.sim.advance(1 << random.below(22)),
        }
        rig.sim.set_faults(FaultPlan::none());
        rig.allocator.audit().unwrap();
        pools.iter().for_each(|pool| pool.audit().unwrap());
        assert_eq!(rig.sim.hazards(), []);
    }
    for (block, pool) in held {
        let pool = if pool == 0 { &rig.allocator } else { &pools[pool - 1] };
        let stream = block.stream();
        pool.free(block, stream).unwrap_or_else(|error| {
            assert!(preset == Preset::StreamOrdered || preset == Preset::Vpmm, "{error}")
        });
    }
    rig.sim.advance(1 << 40);
    for _ in 0..3 {
        rig.allocator.trim(Bytes::ZERO).unwrap();
        pools.iter().for_each(|pool| pool.trim(Bytes::ZERO).unwrap());
    }
    if preset == Preset::Vramp {
        assert_eq!(rig.census().reserved, Bytes::ZERO, "{}", rig.census());
        for pool in &pools {
            assert_eq!(pool.census().reserved, Bytes::ZERO, "{}", pool.census());
        }
    }
    assert_eq!(rig.sim.hazards(), []);
    for pool in pools {
        pool.close().unwrap();
    }
    rig.allocator.close().unwrap();
}

#[test]
fn streams_may_end_while_calls_fail() {
    for preset in Preset::ALL {
        for seed in vramp_testing::seeds(8) {
            println!("{}, seed {seed}", preset.name());
            ends_with_faults(preset, seed);
        }
    }
}
