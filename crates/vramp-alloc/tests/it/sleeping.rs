//! Pools that sleep: their memory leaves the card, and comes back at the same addresses.

use std::sync::{Arc, Mutex};

use vramp_alloc::config::{Epoch, ExternalProgress, Progress};
use vramp_alloc::error::Unusable;
use vramp_alloc::sleep::{Sleep, SleepError};
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config};
use vramp_core::AddrRange;
use vramp_driver::sim::{FaultPlan, Kernel, Simulator};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, CaptureMode, Driver, DriverResult, Event, Stream};
use vramp_testing::fail_each_call;

use crate::common::range_rig::{MIB, RangeRig};
use crate::common::{Random, range};

/// A card of which the allocator may have 512 MiB.
fn rig() -> RangeRig {
    RangeRig::limited(MIB(512))
}

fn on_card(rig: &RangeRig) -> Bytes {
    let memory = rig.sim.memory_info().unwrap();
    memory.total - memory.free
}

/// Three blocks of a pool, between which memory is free.
fn blocks(rig: &RangeRig, pool: &Allocator) -> Vec<Allocation> {
    let mut all: Vec<Allocation> =
        [3, 20, 1, 40, 7].map(|mib| pool.malloc(MIB(mib), rig.stream).unwrap()).into();
    for index in [3, 1] {
        pool.free(all.remove(index), rig.stream).unwrap();
    }
    for (byte, block) in (1..).zip(&all) {
        rig.fill(range(block), byte);
    }
    all
}

fn read(rig: &RangeRig, sleep: &Sleep) -> Vec<Vec<u8>> {
    sleep.contents().iter().map(|&part| rig.sim.peek(part).expect("bytes are stored")).collect()
}

/// What a mover does with the contents.
fn write(rig: &RangeRig, sleep: &Sleep, bytes: &[Vec<u8>]) {
    for (part, bytes) in sleep.contents().iter().zip(bytes) {
        let mut at = part.start;
        if vramp_testing::is_filled(bytes, bytes[0]) {
            rig.fill(*part, bytes[0]);
            continue;
        }
        for run in bytes.chunk_by(|left, right| left == right) {
            let len = Bytes::new(run.len() as u64);
            rig.fill(AddrRange::new(at, len), run[0]);
            at = at + len;
        }
    }
}

fn refused(result: Result<Allocation, AllocError>) {
    match result {
        Err(AllocError::Unusable(Unusable::Asleep { pool })) => assert_eq!(pool, "nap"),
        other => panic!("the pool sleeps: {other:?}"),
    }
}

#[test]
fn memory_leaves_the_card_and_comes_back_with_its_contents() {
    let rig = rig();
    let pool = rig.allocator.create_pool("nap").unwrap();
    let before = on_card(&rig);
    let mut blocks = blocks(&rig, &pool);
    let sleep = pool.begin_sleep().unwrap();
    let all: Bytes = sleep.contents().iter().map(|part| part.len).sum();
    assert!(all >= MIB(11) && all < MIB(13), "only what is allocated is copied: {all}");
    let bytes = read(&rig, &sleep);
    sleep.release(0..sleep.chunks().len()).unwrap();
    assert_eq!(
        (on_card(&rig), pool.reserved(), sleep.backed()),
        (before, Bytes::ZERO, Bytes::ZERO)
    );
    refused(pool.malloc(MIB(2), rig.stream));
    refused(pool.malloc(Bytes::new(64), rig.stream));
    std::thread::scope(|scope| {
        scope.spawn(|| refused(pool.malloc(Bytes::new(64), rig.stream)));
    });
    assert!(matches!(pool.begin_sleep(), Err(SleepError::Unusable(Unusable::Asleep { .. }))));
    pool.trim(Bytes::ZERO).unwrap();
    pool.free(blocks.remove(1), rig.stream).unwrap();
    // All of the limit is the other pool's meanwhile.
    let other = rig.allocator.malloc(MIB(512), rig.stream).unwrap();
    let Err(AllocError::OutOfMemory(report)) = sleep.back(0..sleep.chunks().len()) else {
        panic!("the limit leaves no memory")
    };
    assert_eq!(report.shortage.limit, Some(MIB(512)));
    assert_eq!(sleep.backed(), Bytes::ZERO);
    let sleep = sleep.wake().unwrap_err();
    rig.allocator.free(other, rig.stream).unwrap();
    sleep.back(0..sleep.chunks().len()).unwrap();
    write(&rig, &sleep, &bytes);
    sleep.wake().unwrap();
    rig.holds(range(&blocks[0]), 1);
    rig.holds(range(&blocks[1]), 3);
    pool.audit().unwrap();
    let more = pool.malloc(MIB(2), rig.stream).unwrap();
    for block in blocks.into_iter().chain([more]) {
        pool.free(block, rig.stream).unwrap();
    }
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn a_sleeping_pool_closes_and_leaves_nothing() {
    let rig = rig();
    let before = on_card(&rig);
    for released in 0..3 {
        let pool = rig.allocator.create_pool("nap").unwrap();
        let blocks = blocks(&rig, &pool);
        let sleep = pool.begin_sleep().unwrap();
        sleep.release(0..released.min(sleep.chunks().len())).unwrap();
        drop(blocks);
        pool.close().unwrap();
        assert_eq!(on_card(&rig), before);
        assert!(sleep.wake().is_err());
    }
}

#[test]
fn captures_and_pins_keep_a_pool_awake() {
    let rig = rig();
    let pool = rig.allocator.create_pool("nap").unwrap();
    let block = pool.malloc(MIB(4), rig.stream).unwrap();
    let pinned = pool.pin_range(range(&block)).unwrap();
    assert!(matches!(pool.begin_sleep(), Err(SleepError::Pinned { .. })));
    drop(pinned);
    rig.sim.begin_capture(rig.queue, CaptureMode::Relaxed).unwrap();
    assert!(matches!(pool.begin_sleep(), Err(SleepError::Captures { .. })));
    assert!(!pool.is_asleep());
    rig.sim.end_capture(rig.queue).unwrap();
    pool.free(block, rig.stream).unwrap();
    pool.begin_sleep().unwrap().wake().unwrap();
}

#[test]
fn whichever_driver_call_fails_the_contents_are_there_or_the_pool_closes() {
    let mut failed = 0;
    fail_each_call(|nth| {
        let rig = rig();
        let pool = rig.allocator.create_pool("nap").unwrap();
        let blocks = blocks(&rig, &pool);
        let before = rig.sim.calls();
        rig.sim.set_faults(FaultPlan::nth(nth));
        let slept = pool.begin_sleep();
        let Ok(sleep) = slept else {
            rig.sim.set_faults(FaultPlan::none());
            let calls = rig.sim.calls() - before;
            assert!(!pool.is_asleep());
            (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(range(block), byte));
            pool.audit().unwrap();
            failed += 1;
            return calls;
        };
        let bytes = read(&rig, &sleep);
        let all = 0..sleep.chunks().len();
        let done = sleep.release(all.clone()).and_then(|()| sleep.back(all.clone()));
        rig.sim.set_faults(FaultPlan::none());
        let calls = rig.sim.calls() - before;
        failed += u32::from(done.is_err());
        sleep.back(all).unwrap();
        write(&rig, &sleep, &bytes);
        sleep.wake().unwrap();
        (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(range(block), byte));
        pool.audit().unwrap();
        for block in blocks {
            pool.free(block, rig.stream).unwrap();
        }
        pool.close().unwrap();
        assert!(rig.sim.hazards().is_empty());
        calls
    });
    assert!(failed > 5, "{failed} calls failed");
}

#[test]
fn driver_calls_grow_with_chunks_and_runs() {
    for count in [10, 100] {
        let rig = rig();
        let pool = rig.allocator.create_pool("nap").unwrap();
        let page = rig.sim.info().limits.page;
        let blocks: Vec<Allocation> =
            (0..count).map(|_| pool.malloc(page, rig.stream).unwrap()).collect();
        let sleep = pool.begin_sleep().unwrap();
        let chunks = sleep.chunks().len() as u64;
        let runs =
            sleep.chunks().chunk_by(|left, right| left.start + left.len == right.start).count();
        let runs = runs as u64;
        let all = 0..sleep.chunks().len();
        let calls = |call: Call, work: &dyn Fn()| {
            let before = rig.sim.calls_of(call);
            work();
            rig.sim.calls_of(call) - before
        };
        assert_eq!(calls(Call::Unmap, &|| sleep.release(all.clone()).unwrap()), runs);
        assert_eq!(calls(Call::Create, &|| sleep.back(all.clone()).unwrap()), chunks);
        sleep.release(all.clone()).unwrap();
        assert_eq!(calls(Call::SetAccess, &|| sleep.back(all.clone()).unwrap()), runs);
        let before = rig.sim.calls();
        sleep.back(all).unwrap();
        sleep.wake().unwrap();
        assert_eq!(rig.sim.calls(), before, "what is backed costs nothing");
        for block in blocks {
            pool.free(block, rig.stream).unwrap();
        }
    }
}

/// A device on which another thread begins a capture while the host waits for an event.
struct Capturing {
    sim: Arc<Simulator>,
    /// The stream that it captures, at the next wait.
    next: Mutex<Option<Stream>>,
}

impl Wrapper for Capturing {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        if let Some(stream) = self.next.lock().unwrap().take() {
            self.sim.begin_capture(stream, CaptureMode::Relaxed)?;
        }
        self.sim.synchronize_event(event)
    }
}

#[test]
fn a_capture_that_begins_while_a_pause_waits_goes_on_and_keeps_the_pool_awake() {
    let sim = Arc::new(Simulator::builder().checked().build());
    let next = Mutex::default();
    let device = Arc::new(Wrapped(Capturing { sim: Arc::clone(&sim), next }));
    let allocator = Allocator::new(device.clone() as Arc<dyn Driver>, Config::default()).unwrap();
    let [stream, captured] = [(); 2].map(|()| allocator.create_stream().unwrap());
    let pool = allocator.create_pool("nap").unwrap();
    let block = pool.malloc(MIB(8), stream).unwrap();
    let queue = allocator.stream(captured).unwrap();
    *device.0.next.lock().unwrap() = Some(queue);
    sim.fill(allocator.stream(stream).unwrap(), range(&block), 1).unwrap();
    let refused = pool.begin_sleep().unwrap_err();
    assert!(matches!(refused, SleepError::Captures { stream } if stream == captured), "{refused}");
    assert!(!pool.is_asleep());
    let graph = sim.end_capture(queue).expect("no call invalidated it");
    sim.destroy_graph(graph).unwrap();
    pool.begin_sleep().unwrap().wake().unwrap();
    pool.free(block, stream).unwrap();
}

#[test]
fn work_on_streams_that_the_group_does_not_know_is_waited_for() {
    let rig = rig();
    let pool = rig.allocator.create_pool("nap").unwrap();
    let block = pool.malloc(MIB(8), rig.stream).unwrap();
    let unknown = rig.sim.create_stream().unwrap();
    rig.allocator.driver().synchronize_stream(rig.allocator.stream(rig.stream).unwrap()).unwrap();
    let kernel = Kernel::new("replay").writing(range(&block)).lasting(50_000_000);
    rig.sim.launch(unknown, kernel).unwrap();
    let sleep = pool.begin_sleep().unwrap();
    sleep.release(0..sleep.chunks().len()).unwrap();
    assert_eq!(rig.sim.hazards(), [], "the memory left after the work");
    drop(sleep);
    rig.sim.begin_capture(unknown, CaptureMode::Relaxed).unwrap();
    let other = rig.allocator.create_pool("other").unwrap();
    let refused = other.begin_sleep().unwrap_err();
    assert!(matches!(refused, SleepError::Driver(_)), "{refused}");
    assert!(!other.is_asleep());
}

/// Six blocks of a pool that moved memory to build them.
fn remapped(rig: &RangeRig, pool: &Allocator) -> Vec<Allocation> {
    let (mut random, mut blocks) = (Random(1), Vec::new());
    for round in 0..200 {
        let block = pool.malloc(MIB(1 + random.below(60)), rig.stream).unwrap();
        rig.fill(range(&block), round);
        blocks.push(block);
        if blocks.len() > 5 {
            let block = blocks.swap_remove(random.below(6) as usize);
            pool.free(block, rig.stream).unwrap();
        }
    }
    let moved = pool.stats().unwrap().chunks_moved;
    assert!(moved > 20, "the program is one that remaps: {moved}");
    blocks
}

/// Memory that was remapped is mapped at old addresses too until work there is over, and stays on the card as
/// long as that.
#[test]
fn memory_that_moved_leaves_the_card_too() {
    let rig = rig();
    let pool = rig.allocator.create_pool("nap").unwrap();
    let before = on_card(&rig);
    let blocks = remapped(&rig, &pool);
    let moved = pool.stats().unwrap().chunks_moved;
    for _ in 0..2 {
        let sleep = pool.begin_sleep().unwrap();
        let bytes = read(&rig, &sleep);
        sleep.release(0..sleep.chunks().len()).unwrap();
        assert_eq!(on_card(&rig), before, "{moved} chunks moved");
        sleep.back(0..sleep.chunks().len()).unwrap();
        write(&rig, &sleep, &bytes);
        sleep.wake().unwrap();
        assert_eq!(on_card(&rig), before + pool.reserved());
        pool.audit().unwrap();
    }
    for block in blocks {
        pool.free(block, rig.stream).unwrap();
    }
    pool.close().unwrap();
    assert_eq!(on_card(&rig), before);
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn a_pool_whose_program_reports_progress_sleeps_once_the_work_on_old_mappings_is_reported() {
    let table = Arc::new(ExternalProgress::default());
    let progress = Progress::External(Arc::clone(&table));
    let rig = RangeRig::with(Config { limit: Some(MIB(512)), progress, ..Config::default() });
    let pool = rig.allocator.create_pool("nap").unwrap();
    let before = on_card(&rig);
    let blocks = remapped(&rig, &pool);
    table.set(rig.stream, Some(Epoch::START));
    let more = remapped(&rig, &pool);
    let refused = pool.begin_sleep().unwrap_err();
    assert!(matches!(refused, SleepError::Unfinished), "{refused}");
    assert!(!pool.is_asleep());
    table.set(rig.stream, None);
    let sleep = pool.begin_sleep().unwrap();
    sleep.release(0..sleep.chunks().len()).unwrap();
    assert_eq!(on_card(&rig), before);
    sleep.back(0..sleep.chunks().len()).unwrap();
    sleep.wake().unwrap();
    for block in blocks.into_iter().chain(more) {
        pool.free(block, rig.stream).unwrap();
    }
}
