//! What requests cost as the pool grows: what they look at (`Stats::looked_at`) and the driver calls
//! they make, with few and with many of everything.

use vramp_alloc::{Allocation, Bytes, Config, StreamId};
use vramp_driver::sim::{Contents, Gate, Kernel, Simulator};
use vramp_driver::{Call, Driver};
use vramp_peers::Preset;

use crate::common::{Random, Rig, pages};

/// A card that stores nothing: nothing is read here.
fn rig() -> Rig {
    Rig::on(Simulator::builder().contents(Contents::Discarded), Config::default())
}

/// What `work` makes the allocator look at.
fn looked_at<R>(rig: &Rig, work: impl FnOnce() -> R) -> (u64, R) {
    let count = || rig.allocator.stats().expect("no call fails").looked_at;
    let before = count();
    let result = work();
    (count() - before, result)
}

/// Keeps a stream at work until the gate is opened.
fn keep_busy(rig: &Rig, stream: StreamId) -> Gate {
    let gate = rig.sim.gate();
    rig.sim.launch(rig.raw(stream), Kernel::new("busy").until(gate)).expect("it takes work");
    gate
}

fn malloc(rig: &Rig, size: Bytes) -> Allocation {
    rig.allocator.malloc(size, rig.stream).expect("there is memory")
}

fn free(rig: &Rig, block: Allocation) {
    rig.allocator.free(block, rig.stream).expect("it is the allocator's");
}

#[test]
fn a_request_looks_at_no_freed_block_that_still_waits_for_another_stream() {
    // Small blocks of a heap, and blocks of the pool.
    for (size, few, many) in [(Bytes::kib(1), 100, 30_000), (pages(1), 100, 3_000)] {
        let costs = [few, many].map(|waiting| {
            let rig = rig();
            let other = rig.allocator.create_stream().expect("a stream can be made");
            let _kept = malloc(&rig, size);
            let gate = keep_busy(&rig, other);
            let blocks: Vec<Allocation> = (0..waiting).map(|_| malloc(&rig, size)).collect();
            for block in blocks {
                rig.allocator.record_use(&block, other).expect("the stream is open");
                free(&rig, block);
            }
            // A query finds that nothing is over.
            rig.allocator.trim(Bytes::gib(64)).expect("nothing is over");
            let third = rig.allocator.create_stream().expect("a stream can be made");
            let (looked, blocks) = looked_at(&rig, || {
                let sizes = [Bytes::kib(100), Bytes::mib(1), pages(4), pages(40)];
                sizes.map(|size| rig.allocator.malloc(size, third).expect("there is memory"))
            });
            for block in blocks {
                rig.allocator.free(block, third).expect("it is the allocator's");
            }
            // All of it is free once the work is over.
            rig.sim.open(gate);
            rig.sim.advance(1);
            rig.allocator.trim(Bytes::ZERO).expect("no call fails");
            rig.allocator.audit().expect("every invariant holds");
            assert_eq!(rig.census().waiting, Bytes::ZERO);
            looked
        });
        assert!(costs[1] <= costs[0] + 50, "{few} and {many} blocks of {size}: {costs:?}");
    }
}

/// Heap memory, in bytes, that requests with the allocator's lock take.
fn locked_requests(rig: &Rig) -> u64 {
    let used = allocation_counter::measure(|| {
        // A thread's cache holds one block that is not small.
        for size in [pages(3), pages(2), pages(3), pages(2)] {
            let block = malloc(rig, size);
            free(rig, block);
        }
    });
    used.bytes_total
}

#[test]
fn pools_with_a_common_limit_cost_a_request_nothing_and_share_it_exactly() {
    let limit = |pools: u64| pages(pools + 8);
    let costs = [2, 2_000].map(|pools| {
        let config = Config { limit: Some(limit(pools)), span: Bytes::gib(1), ..Config::default() };
        let rig = Rig::on(Simulator::builder().contents(Contents::Discarded), config);
        let others: Vec<_> = (0..pools)
            .map(|number| {
                let pool = rig.allocator.create_pool(&number.to_string()).expect("it is possible");
                let block = pool.malloc(pages(1), rig.stream).expect("it is below the limit");
                (pool, block)
            })
            .collect();
        locked_requests(&rig);
        let cost = locked_requests(&rig);
        // Eight pages are left for all pools, and what closed ones had.
        let rest = malloc(&rig, pages(8));
        assert!(rig.allocator.malloc(pages(1), rig.stream).is_err(), "{pools} pools");
        let mut others = others.into_iter();
        let (first, block) = others.next().expect("there are some");
        first.free(block, rig.stream).expect("it is the pool's");
        first.close().expect("nothing is in the way");
        let last = malloc(&rig, pages(1));
        let (second, block) = others.next().expect("there are two");
        assert!(second.malloc(pages(1), rig.stream).is_err(), "{pools} pools");
        free(&rig, rest);
        free(&rig, last);
        drop((second, block));
        let all = malloc(&rig, pages(10));
        free(&rig, all);
        cost
    });
    assert!(costs[1] <= costs[0] + 512, "bytes with 2 and 2,000 pools: {costs:?}");
}

#[test]
fn a_miss_looks_at_no_live_small_block() {
    let costs = [1_000, 100_000].map(|blocks| {
        let rig = rig();
        let blocks: Vec<Allocation> = (0..blocks).map(|_| malloc(&rig, Bytes::kib(1))).collect();
        // The first finds what the heap has left.
        let first = malloc(&rig, pages(8));
        let (looked, second) = looked_at(&rig, || malloc(&rig, pages(64)));
        rig.allocator.audit().expect("every invariant holds");
        blocks.into_iter().chain([first, second]).for_each(|block| free(&rig, block));
        rig.close();
        looked
    });
    assert!(costs[1] <= costs[0] + 10, "1,000 and 100,000 live blocks: {costs:?}");
}

/// Makes a stream, as a server does for a request, allocates and frees on it, and ends it.
fn serve_on_own_stream(rig: &Rig) {
    let stream = rig.allocator.create_stream().expect("a stream can be made");
    let blocks = [Bytes::kib(3), pages(3)].map(|size| {
        let block = rig.allocator.malloc(size, stream).expect("there is memory");
        rig.allocator.record_use(&block, rig.stream).expect("the stream is open");
        block
    });
    let [small, large] = blocks;
    rig.allocator.free(large, stream).expect("it is the allocator's");
    rig.allocator.destroy_stream(stream).expect("it captures nothing");
    // A block outlives its stream.
    rig.allocator.free(small, stream).expect("it is the allocator's");
}

/// Streams that are made and ended. No table of the simulator doubles near this number.
const ENDED: u64 = 24_000;

/// Heap memory that `work` leaves, in bytes.
fn left_by(work: impl FnOnce()) -> i64 {
    allocation_counter::measure(work).bytes_current
}

/// What the simulator itself keeps of the calls that [`serve_on_own_stream`] makes about streams.
fn left_by_the_simulator() -> i64 {
    let sim = Simulator::builder().contents(Contents::Discarded).build();
    left_by(|| {
        for _ in 0..ENDED {
            let stream = sim.create_stream().expect("a stream can be made");
            let event = sim.create_event().expect("an event can be made");
            sim.record_outside(event, stream).expect("it is open");
            sim.destroy_stream(stream).expect("it captures nothing");
            sim.destroy_event(event).expect("it is there");
        }
    })
}

#[test]
fn streams_that_ended_leave_nothing_and_cost_later_ones_nothing() {
    let by_the_simulator = left_by_the_simulator();
    // PyTorch keeps the memory of each stream for that stream, and its presets do as it does.
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::StreamOrdered] {
        let rig = Rig::on(Simulator::builder().contents(Contents::Discarded), preset.config());
        let other = rig.allocator.create_pool("other").expect("it is possible");
        let block = other.malloc(pages(1), rig.stream).expect("there is memory");
        // What 1,000 streams cost: driver calls, and entries looked at.
        let cost = || {
            let calls = rig.sim.calls();
            let work = || (0..1_000).for_each(|_| serve_on_own_stream(&rig));
            let (looked, ()) = looked_at(&rig, work);
            [rig.sim.calls() - calls, looked]
        };
        let mut costs = Vec::new();
        let left = left_by(|| costs.extend((0..ENDED / 1_000).map(|_| cost())));
        let reserved = rig.allocator.stats().expect("no call fails").reserved;
        rig.allocator.audit().expect("every invariant holds");
        other.free(block, rig.stream).expect("it is the pool's");
        for (second, last) in costs[1].iter().zip(costs[costs.len() - 1]) {
            let room = second / 20 + 64;
            assert!(last <= second + room, "{preset:?}: {costs:?}");
        }
        // Half a byte of a table for each stream, and there are several tables.
        let left = left - by_the_simulator;
        let most = 256 * 1024 + 8 * ENDED as i64;
        assert!(left <= most, "{preset:?}: {left} bytes stay of {ENDED} streams");
        assert!(reserved <= Bytes::mib(64), "{preset:?}: {reserved}");
    }
}

#[test]
fn memory_that_a_quiet_stream_used_serves_again() {
    let rig = rig();
    let quiet = rig.allocator.create_stream().expect("a stream can be made");
    for size in [Bytes::kib(48), pages(5)] {
        for _ in 0..3_000 {
            let block = malloc(&rig, size);
            // Nothing else ever happens on that stream.
            rig.allocator.record_use(&block, quiet).expect("the stream is open");
            free(&rig, block);
        }
    }
    let stats = rig.allocator.stats().expect("no call fails");
    assert!(stats.reserved <= Bytes::mib(256), "{} for a block of 10 MiB", stats.reserved);
}

#[test]
fn a_request_costs_as_much_with_thousands_of_open_streams() {
    let costs = [4, 4_096].map(|count| {
        let rig = rig();
        let streams: Vec<StreamId> = (0..count)
            .map(|_| rig.allocator.create_stream().expect("a stream can be made"))
            .collect();
        // Each did something: a heap with memory, and an event.
        for &stream in &streams {
            let block = rig.allocator.malloc(Bytes::kib(4), stream).expect("there is memory");
            rig.allocator.free(block, stream).expect("it is the allocator's");
        }
        rig.allocator.trim(Bytes::gib(64)).expect("no call fails");
        let calls = rig.sim.calls();
        let (looked, blocks) = looked_at(&rig, || {
            let sizes = [Bytes::kib(4), pages(3), pages(64), Bytes::gib(1)];
            sizes.map(|size| malloc(&rig, size))
        });
        blocks.into_iter().for_each(|block| free(&rig, block));
        [looked, rig.sim.calls() - calls]
    });
    for (few, many) in costs[0].iter().zip(costs[1]) {
        assert!(many <= few + few / 2 + 50, "with 4 and 4,096 streams: {costs:?}");
    }
}

#[test]
fn a_request_asks_few_of_thousands_of_busy_streams() {
    let queries = [16, 2_048].map(|count| {
        let rig = rig();
        let gate = rig.sim.gate();
        for _ in 0..count {
            let stream = rig.allocator.create_stream().expect("a stream can be made");
            let block = rig.allocator.malloc(pages(1), stream).expect("there is memory");
            let kernel = Kernel::new("busy").until(gate);
            rig.sim.launch(rig.raw(stream), kernel).expect("it takes work");
            rig.allocator.free(block, stream).expect("it is the allocator's");
        }
        // An event on each of them.
        rig.allocator.trim(Bytes::gib(64)).expect("no call fails");
        let queries = || rig.sim.calls_of(Call::Query);
        let before = queries();
        let block = malloc(&rig, pages(64));
        let asked = queries() - before;
        free(&rig, block);
        rig.sim.open(gate);
        asked
    });
    assert!(queries[1] <= queries[0] + 8, "queries with 16 and 2,048 busy streams: {queries:?}");
}

#[test]
fn streams_that_do_not_use_a_pool_change_no_decision() {
    let decisions = |others: u64, unit: Bytes, kept: u64| {
        let rig = rig();
        // As a process has them for copies, communication and captures.
        for number in 0..others {
            let other = rig.allocator.create_stream().expect("a stream can be made");
            if number % 2 == 0 {
                rig.allocator.destroy_stream(other).expect("it is open");
            }
        }
        let (mut random, mut live, mut addresses) = (Random(1), Vec::new(), Vec::new());
        for _ in 0..3_000 {
            let size = unit * (1 + random.below(100));
            let block = rig.allocator.malloc(size, rig.stream).expect("there is memory");
            addresses.push(block.addr());
            live.push(block);
            if live.len() as u64 > kept {
                let block = live.swap_remove(random.below(kept) as usize);
                rig.allocator.free(block, rig.stream).expect("it is the allocator's");
            }
        }
        let stats = rig.allocator.stats().expect("no call fails");
        (addresses, stats.chunks_moved, stats.reserved_peak)
    };
    // A program that remaps, and one of small blocks.
    for (unit, kept, moves) in [(Bytes::mib(1), 60, true), (Bytes::kib(10), 300, false)] {
        let alone = decisions(0, unit, kept);
        assert!(alone.1 > 100 || !moves, "{} chunks moved", alone.1);
        assert_eq!(alone, decisions(20, unit, kept));
    }
}

/// 8 GiB in chunks of 128 MiB, and 2 MiB blocks of which one in 64 stays: then 1 GiB blocks.
#[test]
fn a_few_small_blocks_do_not_pin_the_chunks_of_a_huge_one() {
    let limit = Bytes::gib(8);
    let config = Config { limit: Some(limit), ..Config::default() };
    let rig = Rig::on(Simulator::builder(), config);
    let huge = rig.malloc(4096);
    assert_eq!(rig.sim.calls_of(Call::Create), 64);
    rig.free(huge);
    let small: Vec<_> = (0..4096).map(|_| rig.malloc(1)).collect();
    assert_eq!(rig.sim.calls_of(Call::Create), 64 + 64 * 32, "each was cut into 4 MiB, once");
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    for (number, block) in small.into_iter().enumerate() {
        if number % 64 == 0 { kept.push(block) } else { freed.push(block) }
    }
    freed.into_iter().for_each(|block| rig.free(block));
    // 64 blocks stay, and each pins 4 MiB: 7.75 GiB can be moved.
    let large: Vec<_> = (0..7).map(|_| rig.malloc(512)).collect();
    rig.assert_accounts_agree();
    large.into_iter().chain(kept).for_each(|block| rig.free(block));
    rig.close();
}

/// While the huge block's work may still run, its chunks are as they are.
#[test]
fn a_huge_chunk_whose_work_is_not_over_is_not_cut() {
    let rig = Rig::on(Simulator::builder(), Config::default());
    let huge = rig.malloc(4096);
    let gate = rig.sim.gate();
    let stream = rig.allocator.stream(rig.stream).expect("it is open");
    rig.sim.launch(stream, Kernel::new("busy").until(gate)).expect("no call fails");
    rig.free(huge);
    let releases = rig.sim.calls_of(Call::Release);
    let small = rig.malloc(1);
    assert_eq!(rig.sim.calls_of(Call::Release), releases);
    rig.sim.open(gate);
    rig.free(small);
    rig.close();
}
