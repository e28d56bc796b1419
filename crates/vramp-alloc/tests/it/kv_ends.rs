//! What happens to arenas for caches when streams, captures, pools and processes around them end, sleep or run
//! short, and how they scale.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_alloc::error::Unusable;
use vramp_alloc::kv::{Arena, Arrangement, KvError, Layout, Options, PageRanges, PageState};
use vramp_alloc::{AllocError, Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, Kernel, LiveObjects, Simulator};
use vramp_driver::{Call, CaptureMode, Driver, ErrorKind, Stream};

use crate::common::range_rig::{MIB, RangeRig};

const PAGE: Bytes = Bytes::mib(2);

/// Two tensors of 32 pages of 2 MiB.
const LAYOUT: Layout = Layout {
    tensors: 2,
    bytes_each: Bytes::mib(64),
    page: PAGE,
    arrangement: Arrangement::Separate,
};

fn rig() -> RangeRig {
    RangeRig::limited(MIB(512))
}

/// Handles of 16 pages.
const LONG: Options = Options { superpage: Bytes::mib(32), limit: None, ahead: Bytes::ZERO };

/// An arena whose handles are one page.
fn paged(rig: &RangeRig) -> Arena {
    let options = Options { superpage: PAGE, ..Options::default() };
    rig.allocator.kv_arena(LAYOUT, options).unwrap()
}

fn at(arena: &Arena, tensor: u32, pages: Range<u32>) -> AddrRange {
    let start = arena.range(tensor).start + PAGE * u64::from(pages.start);
    AddrRange::new(start, PAGE * pages.len() as u64)
}

fn another(rig: &RangeRig) -> (StreamId, Stream) {
    let stream = rig.allocator.create_stream().unwrap();
    (stream, rig.allocator.stream(stream).unwrap())
}

fn count(arena: &Arena) -> (u32, u32) {
    let stats = arena.stats();
    assert_eq!(stats.moving, 0);
    (stats.committed, stats.parked)
}

fn no_hazards(rig: &RangeRig) {
    rig.allocator.audit().unwrap();
    assert!(rig.sim.hazards().is_empty(), "{:?}", rig.sim.hazards());
    assert!(rig.sim.device_loss().is_none());
}

#[test]
fn a_page_is_not_lent_under_the_work_that_its_commit_was_ordered_behind() {
    let rig = rig();
    let cache = paged(&rig);
    let ((other, _), (third, _)) = (another(&rig), another(&rig));
    cache.commit(0..4, rig.stream).unwrap();
    let gate = rig.sim.gate();
    let kernel = Kernel::new("decode").writing(at(&cache, 0, 0..4)).until(gate);
    rig.sim.launch(rig.queue, kernel).unwrap();
    cache.park(0..4, rig.stream).unwrap();
    // Nothing uses them in between, on any stream.
    cache.commit(0..4, other).unwrap();
    cache.park(0..4, third).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), Bytes::ZERO);
    rig.sim.open(gate);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(16));
    no_hazards(&rig);
}

#[test]
fn pages_given_twice_are_found_beside_empty_and_reversed_ranges() {
    let rig = rig();
    let cache = paged(&rig);
    #[expect(clippy::reversed_empty_ranges, reason = "what a program in C may pass")]
    for between in [10..10, 10..0, 3..3, 31..0] {
        let error = cache.commit([0..10, between, 5..8], rig.stream).unwrap_err();
        assert!(matches!(error, KvError::Twice { page: 5 }), "{error}");
    }
    assert_eq!(count(&cache), (0, 0));
    no_hazards(&rig);
}

#[test]
fn an_arena_waits_for_streams_that_ended_before_many_others_came() {
    let rig = rig();
    let cache = paged(&rig);
    let (first, raw) = another(&rig);
    // Its memory is another stream's.
    cache.commit(0..8, rig.stream).unwrap();
    cache.park(0..8, rig.stream).unwrap();
    cache.commit(0..8, first).unwrap();
    let gate = rig.sim.gate();
    rig.sim.launch(raw, Kernel::new("last").writing(at(&cache, 0, 0..8)).until(gate)).unwrap();
    rig.allocator.destroy_stream(first).unwrap();
    // As many as make an arena forget some.
    for page in 8..30 {
        let (stream, _) = another(&rig);
        cache.commit(page..page + 1, stream).unwrap();
    }
    drop(cache);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    let block = rig.allocator.malloc(MIB(400), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.sim.open(gate);
    no_hazards(&rig);
}

#[test]
fn pages_whose_memory_came_from_another_stream_are_lent_once_its_work_is_over() {
    let rig = rig();
    let (other, raw) = another(&rig);
    // One long handle, of which the pages are.
    let block = rig.allocator.malloc(MIB(512), rig.stream).unwrap();
    let range = AddrRange::new(block.addr(), MIB(512));
    let gate = rig.sim.gate();
    rig.sim.launch(rig.queue, Kernel::new("first").writing(range).until(gate)).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    let cache = paged(&rig);
    cache.commit(0..8, other).unwrap();
    rig.sim.launch(raw, Kernel::new("second").writing(at(&cache, 1, 0..8))).unwrap();
    cache.park(0..8, other).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), Bytes::ZERO);
    rig.sim.open(gate);
    rig.sim.synchronize_stream(raw).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(32));
    no_hazards(&rig);
}

#[test]
fn parked_pages_that_cannot_be_lent_hide_no_others() {
    let rig = rig();
    let (other, _) = another(&rig);
    let cache = rig.allocator.kv_arena(LAYOUT, LONG).unwrap();
    cache.commit([0..16, 16..32], rig.stream).unwrap();
    cache.park(0..15, rig.stream).unwrap();
    cache.park(16..32, other).unwrap();
    assert_eq!(
        cache.release(PAGE * 2 * 16).unwrap(),
        MIB(64),
        "the oldest share a handle with page 15"
    );
    cache.commit(16..32, rig.stream).unwrap();
    cache.park(16..32, other).unwrap();
    let block = rig.allocator.malloc(MIB(512) - MIB(64), rig.stream).unwrap();
    assert_eq!(count(&cache), (1, 15));
    rig.allocator.free(block, rig.stream).unwrap();
    no_hazards(&rig);
}

#[test]
fn parked_behind_all_means_streams_that_were_destroyed_too() {
    let rig = rig();
    let cache = paged(&rig);
    let (other, raw) = another(&rig);
    cache.commit(0..8, rig.stream).unwrap();
    let gate = rig.sim.gate();
    rig.sim.launch(raw, Kernel::new("last").writing(at(&cache, 0, 0..8)).until(gate)).unwrap();
    rig.allocator.destroy_stream(other).unwrap();
    cache.park_behind_all(0..8).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), Bytes::ZERO);
    rig.sim.open(gate);
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(32));
    no_hazards(&rig);
}

#[test]
fn parked_behind_all_means_streams_of_other_pools_too() {
    let rig = rig();
    let cache = paged(&rig);
    cache.commit(0..8, rig.stream).unwrap();
    let second = rig.allocator.create_pool("second").unwrap();
    let other = second.create_stream().unwrap();
    let raw = second.stream(other).unwrap();
    let gate = rig.sim.gate();
    rig.sim.launch(raw, Kernel::new("last").writing(at(&cache, 0, 0..8)).until(gate)).unwrap();
    cache.park_behind_all(0..8).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), Bytes::ZERO);
    rig.sim.open(gate);
    no_hazards(&rig);
}

const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

#[test]
fn commits_and_parks_beside_a_capture_leave_it_valid() {
    for mode in MODES {
        let rig = rig();
        let cache = paged(&rig);
        let (other, raw) = another(&rig);
        cache.commit(0..16, rig.stream).unwrap();
        rig.sim.launch(rig.queue, Kernel::new("before").writing(at(&cache, 0, 0..16))).unwrap();
        cache.park(0..8, rig.stream).unwrap();
        rig.sim.begin_capture(rig.queue, mode).unwrap();
        let captured = Kernel::new("captured").writing(at(&cache, 0, 12..16));
        rig.sim.launch(rig.queue, captured).unwrap();
        cache.park(8..12, rig.stream).unwrap();
        // What was parked behind the capturing stream can be had there, and nowhere else.
        let error = cache.commit(0..2, other).unwrap_err();
        let KvError::Memory(AllocError::Driver(error)) = error else { panic!("{error}") };
        assert_eq!(error.kind, ErrorKind::Capturing);
        assert_eq!(cache.state(0), Some(PageState::Parked));
        cache.commit(4..6, rig.stream).unwrap();
        // What is absent, on both.
        cache.commit(16..18, other).unwrap();
        rig.sim.launch(raw, Kernel::new("use").writing(at(&cache, 1, 16..18))).unwrap();
        cache.commit(20..22, rig.stream).unwrap();
        assert_eq!(
            cache.release(Bytes::ZERO).unwrap(),
            Bytes::ZERO,
            "no event of the stream can be had"
        );
        let graph =
            rig.sim.end_capture(rig.queue).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        rig.sim.destroy_graph(graph).unwrap();
        cache.commit(0..2, other).unwrap();
        rig.sim.launch(raw, Kernel::new("use").writing(at(&cache, 0, 0..2))).unwrap();
        no_hazards(&rig);
        drop(cache);
        rig.allocator.trim(Bytes::ZERO).unwrap();
        assert_eq!(rig.allocator.reserved(), Bytes::ZERO);
        no_hazards(&rig);
    }
}

#[test]
fn a_pool_that_sleeps_keeps_committed_pages_and_their_contents_and_parked_ones_leave() {
    let rig = rig();
    let cache = paged(&rig);
    cache.commit(0..16, rig.stream).unwrap();
    rig.fill(at(&cache, 0, 0..16), 3);
    rig.fill(at(&cache, 1, 0..16), 4);
    cache.park(8..16, rig.stream).unwrap();
    let sleep = rig.allocator.begin_sleep().unwrap();
    assert!(matches!(
        cache.commit(8..9, rig.stream),
        Err(KvError::Unusable(Unusable::Asleep { .. }))
    ));
    let contents: Bytes = sleep.contents().iter().map(|range| range.len).sum();
    assert_eq!(contents, MIB(32), "{:?}", sleep.contents());
    let kept: Vec<(AddrRange, Vec<u8>)> =
        sleep.contents().iter().map(|&range| (range, rig.sim.peek(range).unwrap())).collect();
    sleep.release(0..sleep.chunks().len()).unwrap();
    assert_eq!(rig.sim.live().handles, 0);
    sleep.back(0..sleep.chunks().len()).unwrap();
    assert!(sleep.wake().is_ok());
    for (range, bytes) in kept {
        // What the owner of the sleep copies back.
        rig.fill(range, bytes[0]);
    }
    assert_eq!(count(&cache), (8, 0));
    rig.holds(at(&cache, 0, 0..8), 3);
    rig.holds(at(&cache, 1, 0..8), 4);
    cache.commit(8..16, rig.stream).unwrap();
    rig.fill(at(&cache, 1, 8..16), 5);
    no_hazards(&rig);
}

#[test]
fn a_lower_limit_of_the_pool_takes_parked_pages_and_leaves_committed_ones() {
    let rig = rig();
    let cache = paged(&rig);
    cache.commit(0..32, rig.stream).unwrap();
    cache.park(0..16, rig.stream).unwrap();
    rig.allocator.set_limit(Some(MIB(64))).unwrap();
    assert_eq!((count(&cache), rig.allocator.reserved()), ((16, 0), MIB(64)));
    rig.allocator.set_limit(Some(MIB(32))).unwrap();
    let error = cache.commit(0..1, rig.stream).unwrap_err();
    assert!(matches!(error, KvError::Memory(AllocError::OutOfMemory(_))), "{error}");
    assert_eq!((count(&cache), rig.allocator.reserved()), ((16, 0), MIB(64)));
    no_hazards(&rig);
}

#[test]
fn pools_of_a_group_that_are_short_at_once_take_each_others_parked_pages() {
    let rig = rig();
    let second = rig.allocator.create_pool("second").unwrap();
    let options = Options { superpage: PAGE, ..Options::default() };
    let layout = Layout { bytes_each: MIB(256), ..LAYOUT };
    let caches = [&rig.allocator, &second].map(|pool| pool.kv_arena(layout, options).unwrap());
    for round in 0..4 {
        let (now, before) = (&caches[round % 2], &caches[(round + 1) % 2]);
        now.commit(0..100, rig.stream).unwrap();
        now.park(0..100, rig.stream).unwrap();
        assert!(before.stats().parked <= 28 || round == 0, "{:?}", before.stats());
    }
    std::thread::scope(|scope| {
        for (cache, pool) in caches.iter().zip([&rig.allocator, &second]) {
            scope.spawn(move || {
                let stream = pool.create_stream().unwrap();
                for round in 0..50u32 {
                    let first = round * 7 % 60;
                    match cache.commit(first..first + 60, stream) {
                        Ok(()) => cache.park(first..first + 60, stream).unwrap(),
                        Err(KvError::Memory(AllocError::OutOfMemory(_))) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    second.audit().unwrap();
    no_hazards(&rig);
}

#[test]
fn a_shortage_handler_may_park_and_release_pages_of_the_arena_that_is_short() {
    let rig = rig();
    let cache = Arc::new(paged(&rig));
    let stream = rig.stream;
    cache.commit(0..16, stream).unwrap();
    let called = Arc::new(AtomicBool::new(false));
    let (held, noted) = (Arc::clone(&cache), Arc::clone(&called));
    let handler = rig.allocator.on_shortage(move |_| {
        if noted.swap(true, Ordering::Relaxed) {
            return false;
        }
        held.park(0..16, stream).unwrap();
        held.release(Bytes::ZERO).unwrap() > Bytes::ZERO
    });
    let block = rig.allocator.malloc(MIB(512) - MIB(64), stream).unwrap();
    cache.commit(16..32, stream).unwrap();
    assert!(called.load(Ordering::Relaxed));
    assert_eq!(count(&cache), (16, 0));
    rig.allocator.free(block, stream).unwrap();
    rig.allocator.unregister(handler);
    no_hazards(&rig);
}

#[test]
fn an_allocator_closes_while_threads_commit() {
    for round in 0..20 {
        let rig = rig();
        let options = Options { superpage: PAGE, ahead: MIB(16), ..Options::default() };
        let cache = rig.allocator.kv_arena(LAYOUT, options).unwrap();
        let stream = rig.stream;
        let (cache, allocator) = (&cache, rig.allocator);
        std::thread::scope(|scope| {
            for thread in 0..2u32 {
                scope.spawn(move || {
                    for page in (0..16).cycle().map(|page| page * 2 + thread) {
                        let ended = cache
                            .commit(page..page + 1, stream)
                            .and_then(|()| cache.park(page..page + 1, stream));
                        match ended {
                            Ok(()) => {}
                            Err(KvError::Unusable(Unusable::Closed)) => return,
                            Err(KvError::Memory(AllocError::Unusable(Unusable::Closed))) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            (0..round * 50).for_each(|_| std::thread::yield_now());
            allocator.close().unwrap();
        });
        assert_eq!(rig.sim.live().handles, 0);
        assert!(rig.sim.hazards().is_empty());
    }
}

/// A card like the real one without checks.
fn card() -> (Arc<Simulator>, Allocator, StreamId) {
    let card = Arc::new(Simulator::builder().contents(Contents::Discarded).build());
    let allocator = Allocator::new(card.clone(), Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    (card, allocator, stream)
}

#[test]
fn arenas_that_were_dropped_leave_nothing() {
    let (card, allocator, stream) = card();
    let layout = Layout { tensors: 4, bytes_each: MIB(8), ..LAYOUT };
    let mut early = None;
    for round in 0..10_000 {
        let cache = allocator.kv_arena(layout, Options::default()).unwrap();
        if round % 16 == 0 {
            cache.commit(1..3, stream).unwrap();
            cache.park(2..3, stream).unwrap();
        }
        drop(cache);
        let live = card.live();
        // Old mappings are unmapped some hundred at a time.
        assert!(live.mappings <= 1100, "{} mappings after {round}", live.mappings);
        assert!(live.events <= 4, "{} events after {round}", live.events);
        let now = LiveObjects { mappings: 0, events: 0, ..live };
        assert_eq!(*early.get_or_insert(now), now, "after {round}");
    }
    assert_eq!(allocator.reserved(), MIB(16));
    allocator.close().unwrap();
    assert_eq!((card.live().reservations, card.live().mappings), (0, 0));
}

#[test]
fn an_arena_of_160_tensors_of_4_gib_costs_calls_for_what_is_committed_alone() {
    let (card, allocator, stream) = card();
    let layout = Layout { tensors: 160, bytes_each: Bytes::gib(4), ..LAYOUT };
    let cache = allocator.kv_arena(layout, LONG).unwrap();
    assert_eq!(cache.pages(), 2048);
    assert!(card.calls_of(Call::Reserve) <= 2);
    let calls = card.calls();
    cache.commit([0..16, 100..101], stream).unwrap();
    assert_eq!(
        card.calls() - calls,
        3 * 2 * 160,
        "a create, a map and a set-access for each handle"
    );
    cache.park([0..16, 100..101], stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), PAGE * 160 * 17);
    drop(cache);
    allocator.audit().unwrap();
    allocator.close().unwrap();
}

#[test]
fn calls_on_one_page_of_131_072_cost_as_much_as_on_one_of_few() {
    let costs = [64, 131_072].map(|pages| {
        let (card, allocator, stream) = card();
        let layout = Layout { tensors: 1, bytes_each: PAGE * pages, ..LAYOUT };
        let cache = allocator.kv_arena(layout, LONG).unwrap();
        assert_eq!(u64::from(cache.pages()), pages);
        cache.commit(0..32, stream).unwrap();
        cache.take(1, stream).unwrap();
        let calls = card.calls();
        let counted = allocation_counter::measure(|| {
            cache.take(1, stream).unwrap();
            cache.park(0..1, stream).unwrap();
            cache.commit(0..1, stream).unwrap();
        });
        (card.calls() - calls, counted.count_total)
    });
    assert_eq!(costs[0].0, 3, "a create, a map and a set-access");
    assert_eq!(costs[0].0, costs[1].0);
    assert!(costs[1].1 <= costs[0].1 + 8, "{costs:?}");
}

#[test]
fn pages_that_were_lent_in_part_can_be_taken() {
    let rig = rig();
    let cache = paged(&rig);
    cache.commit(0..32, rig.stream).unwrap();
    cache.park(0..4, rig.stream).unwrap();
    // Those of one tensor stay.
    let pin = rig.allocator.pin_range(at(&cache, 0, 0..4)).unwrap();
    cache.release(Bytes::ZERO).unwrap();
    assert_eq!(count(&cache), (28, 4));
    assert_eq!(*cache.take(4, rig.stream).unwrap().ranges(), *(0..4).ranges());
    rig.fill(at(&cache, 1, 0..4), 1);
    drop(pin);
    no_hazards(&rig);
}

#[test]
fn a_commit_for_a_capturing_stream_of_memory_that_another_one_uses_leaves_the_capture_valid() {
    for mode in MODES {
        let rig = rig();
        let cache = paged(&rig);
        let (other, raw) = another(&rig);
        cache.commit(0..4, other).unwrap();
        let block = rig.allocator.malloc(MIB(512) - MIB(16), rig.stream).unwrap();
        let range = AddrRange::new(block.addr(), MIB(256));
        let gate = rig.sim.gate();
        rig.sim.launch(rig.queue, Kernel::new("first").writing(range).until(gate)).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        rig.sim.begin_capture(raw, mode).unwrap();
        let kernel = Kernel::new("captured").writing(at(&cache, 0, 0..4));
        rig.sim.launch(raw, kernel).unwrap();
        // A capture waits for nothing outside.
        let error = cache.commit(8..12, other).unwrap_err();
        assert!(matches!(error, KvError::Memory(AllocError::OutOfMemory(_))), "{error}");
        let kernel = Kernel::new("captured").writing(at(&cache, 0, 0..4));
        rig.sim.launch(raw, kernel).unwrap();
        let graph = rig.sim.end_capture(raw).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        rig.sim.destroy_graph(graph).unwrap();
        rig.sim.open(gate);
        no_hazards(&rig);
    }
}

#[test]
fn a_commit_for_a_capturing_stream_of_pages_parked_behind_another_leaves_the_capture_valid() {
    for mode in MODES {
        let rig = rig();
        let cache = paged(&rig);
        let (other, raw) = another(&rig);
        cache.commit(0..8, rig.stream).unwrap();
        let gate = rig.sim.gate();
        let kernel = Kernel::new("first").writing(at(&cache, 0, 0..8)).until(gate);
        rig.sim.launch(rig.queue, kernel).unwrap();
        cache.park(0..4, rig.stream).unwrap();
        rig.sim.begin_capture(raw, mode).unwrap();
        let error = cache.commit(0..2, other).unwrap_err();
        let KvError::Memory(AllocError::Driver(error)) = error else { panic!("{error}") };
        assert_eq!(error.kind, ErrorKind::Capturing);
        assert_eq!(count(&cache), (4, 4));
        let graph = rig.sim.end_capture(raw).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        rig.sim.destroy_graph(graph).unwrap();
        cache.commit(0..2, other).unwrap();
        rig.sim.launch(raw, Kernel::new("next").writing(at(&cache, 0, 0..2))).unwrap();
        rig.sim.open(gate);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        // What is over needs no wait.
        rig.sim.begin_capture(raw, mode).unwrap();
        cache.commit(2..4, other).unwrap();
        let graph = rig.sim.end_capture(raw).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        rig.sim.destroy_graph(graph).unwrap();
        no_hazards(&rig);
    }
}
