//! A stream whose work takes long costs the others memory, and nothing else while there is room.

use std::collections::VecDeque;

use vramp_alloc::{Allocation, Bytes, Config, StreamId};
use vramp_driver::sim::{Contents, Kernel, Simulator};
use vramp_driver::{Call, Driver};
use vramp_peers::Preset;

use crate::common::{Random, Rig, range};

const LONG_NS: u64 = 60_000_000_000;

fn rig(config: Config) -> Rig {
    Rig::on(Simulator::builder().contents(Contents::Discarded), config)
}

fn work(rig: &Rig, block: &Allocation, stream: StreamId, ns: u64) {
    let kernel = Kernel::new("work").writing(range(block)).lasting(ns);
    rig.sim.launch(rig.raw(stream), kernel).expect("the stream takes work");
}

fn malloc(rig: &Rig, size: Bytes, stream: StreamId) -> Allocation {
    rig.allocator.malloc(size, stream).expect("there is memory")
}

fn free(rig: &Rig, block: Allocation, stream: StreamId) {
    rig.allocator.free(block, stream).expect("it is the allocator's");
}

/// How many pairs both streams made before, whose work was over at once; whether the block is freed on the
/// slow stream; and how many further blocks of that size are live.
const PASTS: [(u64, bool, u64); 6] =
    [(0, false, 0), (0, true, 0), (0, false, 8), (200, false, 0), (200, true, 0), (200, false, 8)];

/// Frees a block that a long kernel of another stream uses. Returns the rig, that stream
/// and what is live.
fn with_a_block_in_use(
    limit: Option<Bytes>,
    size: Bytes,
    (pairs, freed_on_slow, live): (u64, bool, u64),
) -> (Rig, StreamId, Vec<Allocation>) {
    let rig = rig(Config { limit, ..Config::default() });
    let slow = rig.allocator.create_stream().expect("a stream can be made");
    for _ in 0..pairs {
        for stream in [rig.stream, slow] {
            let block = malloc(&rig, size, stream);
            work(&rig, &block, stream, 1000);
            free(&rig, block, stream);
            rig.sim.advance(3000);
        }
    }
    let kept: Vec<Allocation> = (0..live).map(|_| malloc(&rig, size, slow)).collect();
    let home = if freed_on_slow { slow } else { rig.stream };
    let block = malloc(&rig, size, home);
    rig.order(home, slow);
    work(&rig, &block, slow, LONG_NS);
    if home != slow {
        rig.allocator.record_use(&block, slow).expect("both are known");
    }
    free(&rig, block, home);
    (rig, slow, kept)
}

#[test]
fn while_there_is_room_a_request_waits_for_no_work_of_another_stream() {
    for size in [Bytes::kib(512), Bytes::mib(1), Bytes::mib(4), Bytes::mib(64), Bytes::gib(1)] {
        for past in PASTS {
            let (rig, _slow, _kept) = with_a_block_in_use(None, size, past);
            let begun = rig.sim.now_ns();
            let (waits, _blocks) =
                rig.calls(Call::Wait, || [(); 3].map(|()| malloc(&rig, size, rig.stream)));
            rig.sim.synchronize_stream(rig.raw(rig.stream)).expect("nothing fails");
            assert_eq!(waits, 0, "{size}, {past:?}");
            assert!(rig.sim.now_ns() - begun < LONG_NS / 60, "{size}, {past:?}");
        }
    }
}

#[test]
fn at_the_limit_a_request_waits_for_it_on_the_device() {
    for size in [Bytes::mib(4), Bytes::mib(64)] {
        let (rig, slow, _kept) = with_a_block_in_use(Some(size), size, (0, false, 0));
        let begun = rig.sim.now_ns();
        let (waits, _block) = rig.calls(Call::Wait, || malloc(&rig, size, rig.stream));
        assert_eq!(waits, 1, "{size}");
        assert!(rig.sim.now_ns() - begun < LONG_NS / 60, "the host goes on");
        rig.sim.synchronize_stream(rig.raw(slow)).expect("nothing fails");
    }
}

/// Fifteen streams make requests in turn, and use what they get for 20 us. Every tenth block is used on
/// one more stream, which is busy with a long kernel. Returns when the fifteen are done, and the most
/// memory reserved.
fn beside_a_slow_stream(preset: Preset) -> (u64, Bytes) {
    let rig = rig(preset.config());
    let streams = || rig.allocator.create_stream().expect("a stream can be made");
    let (slow, fast) = (streams(), [(); 15].map(|()| streams()));
    let flag = malloc(&rig, Bytes::new(512), slow);
    work(&rig, &flag, slow, LONG_NS);
    let (mut random, mut live) = (Random(1), VecDeque::new());
    let sizes = [512, 40 << 10, 700 << 10, 2 << 20, 9 << 20, 33 << 20, 64 << 20].map(Bytes::new);
    let begun = rig.sim.now_ns();
    for (number, &stream) in (0..3_000).zip(fast.iter().cycle()) {
        let block = malloc(&rig, sizes[random.below(7) as usize], stream);
        work(&rig, &block, stream, 20_000);
        if number % 10 == 0 {
            rig.allocator.record_use(&block, slow).expect("both are known");
        }
        live.push_back((block, stream));
        if live.len() > 40 {
            let (block, stream) = live.pop_front().expect("some are live");
            free(&rig, block, stream);
        }
        rig.sim.advance(20_000);
    }
    for stream in fast {
        rig.sim.synchronize_stream(rig.raw(stream)).expect("nothing fails");
    }
    let stats = rig.allocator.stats().expect("no call fails");
    (rig.sim.now_ns() - begun, stats.reserved_peak)
}

#[test]
fn beside_a_slow_stream_the_others_wait_for_nothing_and_hold_no_more_than_on_pytorchs_allocator() {
    let [own, torch] = [Preset::Vramp, Preset::Torch].map(beside_a_slow_stream);
    // The rest is the driver time of shorter chunks.
    assert!(own.0 <= 2 * torch.0, "done after {} and {} ns", own.0, torch.0);
    assert!(own.1 <= torch.1, "reserved {} and {}", own.1, torch.1);
}

#[test]
fn requests_make_two_queries_on_average_and_one_in_vain_whatever_is_pending() {
    for (streams, lag_ns) in [(2, 0), (16, 200_000), (16, LONG_NS), (64, 0), (64, LONG_NS)] {
        let rig = rig(Config::default());
        let all: Vec<StreamId> = (0..streams)
            .map(|_| rig.allocator.create_stream().expect("a stream can be made"))
            .collect();
        let (mut random, mut live, mut most) = (Random(3), Vec::new(), 0);
        for _ in 0..1_500 {
            let [stream, other] = [(); 2].map(|()| all[random.below(streams) as usize]);
            let size = Bytes::kib(64 + random.below(16 << 10));
            let (queries, block) = rig.calls(Call::Query, || malloc(&rig, size, stream));
            most = most.max(queries);
            work(&rig, &block, stream, lag_ns);
            if random.below(4) == 0 {
                rig.order(stream, other);
                rig.allocator.record_use(&block, other).expect("both are known");
            }
            live.push((block, stream));
            if live.len() > 100 {
                let (block, stream) = live.swap_remove(random.below(100) as usize);
                free(&rig, block, stream);
            }
            rig.sim.advance(1000);
        }
        let queries = rig.sim.calls_of(Call::Query);
        assert!(queries <= 2 * 1_500, "{streams} streams, work of {lag_ns} ns: {queries}");
        if lag_ns == LONG_NS {
            assert!(most <= 1, "{streams} streams, none of which reaches an event: {most}");
        }
    }
}
