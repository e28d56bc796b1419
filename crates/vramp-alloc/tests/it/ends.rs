//! Objects end while work runs: streams, allocators, escaped blocks. Memory in use stays mapped,
//! keeps its contents, and goes to no other owner; nothing is lost, and nothing hangs.

use std::sync::{Arc, Mutex, Weak};

use crate::common::Rig;
use crate::common::graph_rig::{GraphRig, LONG_NS, range};
use vramp_alloc::error::{CloseError, StreamError, Unusable};
use vramp_alloc::graph::{ArenaConfig, CaptureMode, LaunchError};
use vramp_alloc::{AllocError, Allocator, Bytes, Config, StreamWork};
use vramp_driver::sim::{FaultPlan, Kernel, LiveObjects, Simulator};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, Driver, DriverError, DriverResult, ErrorKind, Event, Stream};
use vramp_peers::Preset;

const MIB: Bytes = Bytes::mib(1);

fn rig(preset: Preset) -> Rig {
    Rig::on(Simulator::builder().checked(), preset.config())
}

/// Queues a long write of a new block on a new stream, and destroys that stream.
fn stream_that_ends_while_it_works(rig: &Rig) -> vramp_alloc::StreamId {
    let gone = rig.allocator.create_stream().unwrap();
    let block = rig.allocator.malloc(MIB * 64, gone).unwrap();
    let kernel = Kernel::new("late").writing(range(&block)).lasting(LONG_NS);
    rig.sim.launch(rig.raw(gone), kernel).unwrap();
    rig.allocator.destroy_stream(gone).unwrap();
    gone
}

/// Queues a long write of a new block on the rig's stream, and begins a capture of it.
fn work_and_capture(rig: &Rig) -> vramp_driver::Stream {
    let block = rig.allocator.malloc(MIB * 64, rig.stream).unwrap();
    let raw = rig.raw(rig.stream);
    let kernel = Kernel::new("early").writing(range(&block)).lasting(LONG_NS);
    rig.sim.launch(raw, kernel).unwrap();
    rig.sim.begin_capture(raw, CaptureMode::Global).unwrap();
    raw
}

fn assert_sound(sim: &Simulator, context: &str) {
    assert!(sim.device_loss().is_none(), "{context}: {:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{context}: {:?}", sim.hazards());
}

// --- streams in several pools ---

/// A device whose record creates a pool, and then fails.
struct CreatesPool {
    sim: Arc<Simulator>,
    from: Mutex<Weak<Allocator>>,
    made: Mutex<Option<Allocator>>,
}

impl Wrapper for CreatesPool {
    type Device = Arc<Simulator>;

    fn device(&self) -> &Arc<Simulator> {
        &self.sim
    }

    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        let Some(from) = std::mem::take(&mut *self.from.lock().unwrap()).upgrade() else {
            return self.sim.record_outside(event, stream);
        };
        let pool = from.create_pool("made meanwhile").unwrap();
        // It learns of the streams at its first call.
        let known = from.create_stream().unwrap();
        let block = pool.malloc(MIB, known).unwrap();
        pool.free(block, known).unwrap();
        *self.made.lock().unwrap() = Some(pool);
        Err(DriverError::from_code(Call::Record, 304, "injected"))
    }
}

#[test]
fn a_pool_that_is_created_while_the_end_of_a_stream_fails_serves_the_stream() {
    let sim = Arc::new(Simulator::builder().checked().build());
    let made = Mutex::default();
    let driver = CreatesPool { sim: Arc::clone(&sim), from: Mutex::default(), made };
    let driver = Arc::new(Wrapped(driver));
    let config = Config::default();
    let allocator = Arc::new(Allocator::new(Arc::clone(&driver) as _, config).unwrap());
    let stream = allocator.create_stream().unwrap();
    *driver.from.lock().unwrap() = Arc::downgrade(&allocator);
    let failed = allocator.destroy_stream(stream).unwrap_err();
    assert!(matches!(failed, StreamError::Driver(_)), "{failed}");
    let pool = driver.made.lock().unwrap().take().expect("the record made it");
    for allocator in [&*allocator, &pool] {
        let block = allocator.malloc(MIB, stream).unwrap();
        allocator.free(block, stream).unwrap();
    }
    pool.close().unwrap();
    Arc::into_inner(allocator).expect("it has one owner").close().unwrap();
    assert_eq!(sim.live(), LiveObjects::default());
}

// --- closing ---

#[test]
fn closing_waits_for_the_work_of_destroyed_streams() {
    for preset in Preset::ALL {
        for drops in [false, true] {
            let rig = rig(preset);
            stream_that_ends_while_it_works(&rig);
            let Rig { sim, allocator, .. } = rig;
            match drops {
                true => drop(allocator),
                false => allocator.close().unwrap(),
            }
            assert_sound(&sim, preset.name());
            assert!(sim.now_ns() >= LONG_NS, "{}: it did not wait", preset.name());
            assert_eq!(sim.live(), LiveObjects::default(), "{}", preset.name());
        }
    }
}

#[test]
fn closing_while_a_stream_captures_is_refused_and_can_be_repeated() {
    for preset in Preset::ALL {
        let rig = rig(preset);
        let raw = work_and_capture(&rig);
        let stream = rig.stream;
        let Rig { sim, allocator, .. } = rig;
        let refused = allocator.close().unwrap_err();
        assert!(refused.to_string().contains("end the capture"), "{refused}");
        let CloseError::Capturing { stream: capturing, allocator } = refused else {
            panic!("{}: {refused}", preset.name())
        };
        assert_eq!(capturing, stream);
        // The capture is not disturbed.
        let graph = sim.end_capture(raw).unwrap();
        sim.destroy_graph(graph).unwrap();
        assert_eq!(allocator.live(), MIB * 64, "it is as before");
        allocator.close().unwrap();
        assert_sound(&sim, preset.name());
        assert_eq!(sim.live(), LiveObjects::default(), "{}", preset.name());
    }
}

#[test]
fn a_capture_that_a_refused_close_ended_does_not_end_the_next_one_of_its_stream() {
    let rig = rig(Preset::Vramp);
    let [other, raw] = [rig.allocator.create_stream().unwrap(), rig.stream];
    let arenas = [(); 2].map(|()| rig.allocator.graph_arena(ArenaConfig::default()).unwrap());
    let foreign = rig.raw(other);
    rig.sim.begin_capture(foreign, CaptureMode::Global).unwrap();
    // It is invalidated: the driver does not tell any more which capture the stream is part of.
    rig.sim.alloc_memory(MIB).unwrap_err();
    let mut first = rig.allocator.begin_capture(raw, &arenas[0]).unwrap();
    let Rig { sim, allocator, .. } = rig;
    let Err(CloseError::Capturing { allocator, .. }) = allocator.close() else {
        panic!("a stream captures that vramp does not end")
    };
    // The close ended the first capture, and the stream captures again.
    let mut second = allocator.begin_capture(raw, &arenas[1]).unwrap();
    assert!(first.end().is_err());
    drop(first);
    let block = allocator.malloc(MIB, raw).unwrap();
    let graph = second.end().unwrap();
    allocator.free(block, raw).unwrap();
    sim.end_capture(foreign).unwrap_err();
    drop((graph, second, arenas));
    allocator.close().unwrap();
    assert_sound(&sim, "closed");
    assert_eq!(sim.live(), LiveObjects::default());
}

#[test]
fn closing_ends_an_own_capture_that_was_invalidated_after_other_streams_joined_it() {
    let rig = rig(Preset::Vramp);
    let joined = rig.allocator.create_stream().unwrap();
    let arena = rig.allocator.graph_arena(ArenaConfig::default()).unwrap();
    let capture = rig.allocator.begin_capture(rig.stream, &arena).unwrap();
    let event = rig.sim.create_event().unwrap();
    rig.sim.record(event, rig.raw(rig.stream)).unwrap();
    rig.sim.wait(rig.raw(joined), event).unwrap();
    // A capturing thread may not call this. The driver does not tell any more which capture the
    // streams are part of.
    rig.sim.alloc_memory(MIB).unwrap_err();
    rig.sim.destroy_event(event).unwrap();
    let Rig { sim, allocator, .. } = rig;
    allocator.close().unwrap();
    drop((capture, arena));
    assert_sound(&sim, "closed");
    assert_eq!(sim.live(), LiveObjects::default());
}

#[test]
fn dropping_while_a_stream_captures_unmaps_nothing() {
    for preset in Preset::ALL {
        let rig = rig(preset);
        let raw = work_and_capture(&rig);
        let Rig { sim, allocator, .. } = rig;
        drop(allocator);
        let graph = sim.end_capture(raw).unwrap();
        sim.destroy_graph(graph).unwrap();
        sim.synchronize_stream(raw).unwrap();
        assert_sound(&sim, preset.name());
    }
}

#[test]
fn memory_in_use_on_a_stream_that_captures_is_not_trimmed() {
    for preset in [Preset::Torch, Preset::TorchExpandable] {
        let rig = rig(preset);
        let other = rig.allocator.create_stream().unwrap();
        let block = rig.allocator.malloc(MIB * 64, rig.stream).unwrap();
        let kernel = Kernel::new("late").writing(range(&block)).lasting(LONG_NS);
        rig.sim.launch(rig.raw(other), kernel).unwrap();
        rig.sim.begin_capture(rig.raw(other), CaptureMode::Relaxed).unwrap();
        rig.allocator.record_use(&block, other).unwrap();
        let _ = rig.allocator.free(block, rig.stream);
        rig.allocator.trim(Bytes::ZERO).unwrap_err();
        assert_sound(&rig.sim, preset.name());
        let graph = rig.sim.end_capture(rig.raw(other)).unwrap();
        rig.sim.destroy_graph(graph).unwrap();
        rig.allocator.trim(Bytes::ZERO).unwrap();
        assert_sound(&rig.sim, preset.name());
        assert!(rig.sim.now_ns() >= LONG_NS, "{}: it waited", preset.name());
    }
}

#[test]
fn without_an_event_closing_waits_for_the_stream_itself() {
    for call in [Call::CreateEvent, Call::Record] {
        let rig = rig(Preset::Vramp);
        let block = rig.allocator.malloc(MIB * 64, rig.stream).unwrap();
        let kernel = Kernel::new("late").writing(range(&block)).lasting(LONG_NS);
        rig.sim.launch(rig.raw(rig.stream), kernel).unwrap();
        let Rig { sim, allocator, .. } = rig;
        sim.set_faults(FaultPlan::from_nth_of(call, 1));
        allocator.close().unwrap();
        assert_sound(&sim, &call.to_string());
        assert_eq!(sim.live(), LiveObjects::default(), "{call}");
    }
}

#[test]
fn nothing_is_unmapped_after_a_failed_wait() {
    for preset in Preset::ALL {
        for call in [Call::SynchronizeEvent, Call::IsCapturing] {
            let rig = rig(preset);
            stream_that_ends_while_it_works(&rig);
            let Rig { sim, allocator, .. } = rig;
            sim.set_faults(FaultPlan::from_nth_of(call, 1));
            let context = format!("{}, {call}", preset.name());
            let Err(CloseError::NotSynchronized { allocator, error }) = allocator.close() else {
                panic!("{context}: it closed")
            };
            assert_eq!(error.call, call, "{context}");
            assert_sound(&sim, &context);
            sim.set_faults(FaultPlan::none());
            allocator.close().unwrap();
            assert_sound(&sim, &context);
            assert_eq!(sim.live(), LiveObjects::default(), "{context}");
        }
    }
}

#[test]
fn a_lost_device_is_closed_all_the_same() {
    for preset in Preset::ALL {
        let rig = rig(preset);
        let block = rig.allocator.malloc(MIB, rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        let wild = vramp_core::AddrRange::new(vramp_alloc::DeviceAddr::new(64), MIB);
        rig.sim.launch(rig.raw(rig.stream), Kernel::new("wild").writing(wild)).unwrap();
        rig.sim.advance(1 << 30);
        let Err(error) = rig.allocator.close() else { continue };
        let CloseError::Driver(error) = error else { panic!("{}: {error}", preset.name()) };
        assert_eq!(error.kind, ErrorKind::DeviceLost, "{}", preset.name());
    }
}

#[test]
fn a_pool_waits_for_streams_that_another_pool_destroyed() {
    for preset in Preset::ALL {
        let rig = rig(preset);
        let side = rig.allocator.create_pool("side").unwrap();
        let gone = rig.allocator.create_stream().unwrap();
        let block = side.malloc(MIB * 64, gone).unwrap();
        let kernel = Kernel::new("late").writing(range(&block)).lasting(LONG_NS);
        rig.sim.launch(rig.raw(gone), kernel).unwrap();
        rig.allocator.destroy_stream(gone).unwrap();
        side.close().unwrap();
        assert_sound(&rig.sim, preset.name());
        assert!(rig.sim.now_ns() >= LONG_NS, "{}: it did not wait", preset.name());
    }
}

#[test]
fn a_stable_range_of_a_closed_allocator_is_refused() {
    let rig = rig(Preset::Vramp);
    let range = rig.allocator.stable_range(MIB * 64, MIB * 32).unwrap();
    range.back(rig.stream).unwrap();
    let Rig { sim, allocator, stream, .. } = rig;
    allocator.close().unwrap();
    let refused = range.back(stream).unwrap_err();
    assert!(matches!(refused, AllocError::Unusable(Unusable::Closed)), "{refused}");
    assert_eq!(range.lend(&[]), Bytes::ZERO);
    range.record_use(stream);
    drop(range);
    assert_eq!(sim.live(), LiveObjects::default());
}

#[test]
fn pools_go_on_where_another_one_was_dropped_during_a_capture() {
    let config = Config { limit: Some(MIB * 96), ..Config::default() };
    let rig = Rig::on(Simulator::builder().checked(), config);
    let side = rig.allocator.create_pool("side").unwrap();
    let _kept = side.malloc(MIB * 32, rig.stream).unwrap();
    let other = rig.allocator.create_stream().unwrap();
    rig.sim.begin_capture(rig.raw(other), CaptureMode::Relaxed).unwrap();
    drop(side);
    let refused = rig.allocator.malloc(MIB * 128, rig.stream).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    let graph = rig.sim.end_capture(rig.raw(other)).unwrap();
    rig.sim.destroy_graph(graph).unwrap();
    rig.allocator.set_limit(None).unwrap();
    rig.allocator.destroy_stream(other).unwrap();
    let _block = rig.allocator.malloc(MIB * 128, rig.stream).unwrap();
}

#[test]
fn zero_bytes_are_refused_where_the_limit_is_reached() {
    let rig = Rig::on(
        Simulator::builder().checked(),
        Config { limit: Some(MIB * 2), ..Config::default() },
    );
    let _kept = rig.allocator.malloc(MIB * 2, rig.stream).unwrap();
    let refused = rig.allocator.malloc(Bytes::ZERO, rig.stream).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
}

// --- streams that ended ---

#[test]
fn a_range_is_reused_only_after_the_work_of_a_stream_that_was_destroyed() {
    let rig = rig(Preset::Vramp);
    let stable = rig.allocator.stable_range(MIB * 64, MIB * 32).unwrap();
    let gone = rig.allocator.create_stream().unwrap();
    stable.back(gone).unwrap();
    let kernel = Kernel::new("late").writing(stable.range()).lasting(LONG_NS);
    rig.sim.launch(rig.raw(gone), kernel).unwrap();
    rig.allocator.destroy_stream(gone).unwrap();
    stable.record_use(gone);
    drop(stable);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    let block = rig.allocator.malloc(MIB * 64, rig.stream).unwrap();
    rig.sim.launch(rig.raw(rig.stream), Kernel::new("next").writing(range(&block))).unwrap();
    assert_sound(&rig.sim, "a range");
}

#[test]
fn no_event_is_queried_while_a_stream_captures_that_only_another_pool_serves() {
    let rig = rig(Preset::Vramp);
    let side = rig.allocator.create_pool("side").unwrap();
    let other = rig.allocator.create_stream().unwrap();
    let block = side.malloc(MIB * 3, rig.stream).unwrap();
    side.record_use(&block, other).unwrap();
    rig.sim.launch(rig.raw(other), Kernel::new("use").reading(range(&block))).unwrap();
    side.free(block, rig.stream).unwrap();
    let capturing = rig.allocator.create_stream().unwrap();
    rig.sim.begin_capture(rig.raw(capturing), CaptureMode::Global).unwrap();
    let block = side.malloc(MIB * 5, rig.stream).unwrap();
    side.trim(Bytes::ZERO).unwrap();
    let graph = rig.sim.end_capture(rig.raw(capturing)).unwrap();
    rig.sim.destroy_graph(graph).unwrap();
    side.free(block, rig.stream).unwrap();
}

#[test]
fn an_observer_may_allocate_where_pools_share_a_limit() {
    let rig = Arc::new(Rig::on(
        Simulator::builder().checked(),
        Config { limit: Some(Bytes::gib(1)), ..Config::default() },
    ));
    let _side = rig.allocator.create_pool("side").unwrap();
    let inside = Arc::downgrade(&rig);
    let seen = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = Arc::clone(&seen);
    rig.allocator.observe(move |_| {
        let Some(rig) = inside.upgrade() else { return };
        let block = rig.allocator.malloc(MIB * 3, rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    let block = rig.allocator.malloc(MIB * 64, rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    assert!(seen.load(std::sync::atomic::Ordering::Relaxed) >= 3);
}

#[test]
fn blocks_are_freed_on_a_destroyed_stream_in_every_preset() {
    for preset in Preset::ALL {
        let rig = rig(preset);
        let gone = rig.allocator.create_stream().unwrap();
        let sizes = [Bytes::kib(3), MIB, MIB * 64];
        let blocks: Vec<_> =
            sizes.iter().map(|&size| rig.allocator.malloc(size, gone).unwrap()).collect();
        for block in &blocks {
            let kernel = Kernel::new("late").writing(range(block)).lasting(1 << 20);
            rig.sim.launch(rig.raw(gone), kernel).unwrap();
        }
        rig.allocator.destroy_stream(gone).unwrap();
        for block in blocks {
            let freed = rig.allocator.free(block, gone);
            freed.unwrap_or_else(|error| panic!("{}: {error}", preset.name()));
        }
        // What is allocated now is used at once.
        for size in sizes {
            let block = rig.allocator.malloc(size, rig.stream).unwrap();
            let kernel = Kernel::new("next").writing(range(&block));
            rig.sim.launch(rig.raw(rig.stream), kernel).unwrap();
            rig.allocator.free(block, rig.stream).unwrap();
        }
        rig.allocator.empty_cache().unwrap();
        rig.allocator.audit().unwrap();
        assert_eq!(rig.allocator.live(), Bytes::ZERO);
        let Rig { sim, allocator, .. } = rig;
        allocator.close().unwrap();
        assert_sound(&sim, preset.name());
        assert_eq!(sim.live(), LiveObjects::default(), "{}", preset.name());
    }
}

#[test]
fn memory_of_destroyed_streams_can_be_trimmed_and_used_by_others() {
    for preset in Preset::ALL {
        // Too little for two of the blocks at once.
        let config = Config { limit: Some(MIB * 96), ..preset.config() };
        let rig = Rig::on(Simulator::builder().checked(), config);
        for round in 0..4 {
            let gone = rig.allocator.create_stream().unwrap();
            let block = rig.allocator.malloc(MIB * 64, gone);
            let block = block.unwrap_or_else(|error| panic!("{}, {round}: {error}", preset.name()));
            let kernel = Kernel::new("late").writing(range(&block)).lasting(1 << 20);
            rig.sim.launch(rig.raw(gone), kernel).unwrap();
            rig.allocator.free(block, gone).unwrap();
            rig.allocator.destroy_stream(gone).unwrap();
            rig.sim.advance(1 << 21);
            if round % 2 == 0 {
                rig.allocator.empty_cache().unwrap();
            }
        }
        rig.allocator.audit().unwrap();
        assert_sound(&rig.sim, preset.name());
    }
}

#[test]
fn a_destroyed_stream_gets_no_memory_from_a_threads_cache_or_its_heap() {
    for size in [Bytes::kib(3), Bytes::kib(600), MIB * 3] {
        let rig = rig(Preset::Vramp);
        let gone = rig.allocator.create_stream().unwrap();
        let [one, two] = [(); 2].map(|()| rig.allocator.malloc(size, gone).unwrap());
        rig.allocator.free(one, gone).unwrap();
        rig.allocator.destroy_stream(gone).unwrap();
        rig.allocator.free(two, gone).unwrap();
        rig.allocator.malloc(size, gone).unwrap_err();
        let other = Arc::new(rig);
        let from_there = Arc::clone(&other);
        std::thread::spawn(move || from_there.allocator.malloc(size, gone).unwrap_err())
            .join()
            .unwrap();
        assert_eq!(other.allocator.census().at_hand, Bytes::ZERO);
    }
}

#[test]
fn a_destruction_that_fails_can_be_repeated_and_is_by_the_close() {
    for preset in Preset::ALL {
        for again in [false, true] {
            let rig = rig(preset);
            let gone = rig.allocator.create_stream().unwrap();
            let _leaked = rig.allocator.malloc(MIB, gone).unwrap();
            rig.sim.set_faults(FaultPlan::nth_of(Call::DestroyStream, 1));
            let failed = rig.allocator.destroy_stream(gone).unwrap_err();
            assert!(matches!(failed, StreamError::Driver(_)), "{failed}");
            assert!(rig.allocator.stream(gone).is_none(), "no work is to be queued");
            if again {
                rig.allocator.destroy_stream(gone).unwrap();
                let ended = rig.allocator.destroy_stream(gone).unwrap_err();
                assert!(matches!(ended, StreamError::Unknown(_)), "{ended}");
            }
            let Rig { sim, allocator, .. } = rig;
            allocator.close().unwrap();
            assert_eq!(sim.live(), LiveObjects::default(), "{}", preset.name());
        }
    }
}

#[test]
fn a_stream_whose_end_cannot_be_recorded_stays_as_it_was() {
    for preset in Preset::ALL {
        for call in [Call::CreateEvent, Call::Record] {
            let rig = rig(preset);
            let side = rig.allocator.create_pool("side").unwrap();
            let stream = rig.allocator.create_stream().unwrap();
            let block = side.malloc(MIB, stream).unwrap();
            rig.sim.set_faults(FaultPlan::nth_of(call, 1));
            rig.allocator.destroy_stream(stream).unwrap_err();
            assert!(rig.allocator.stream(stream).is_some());
            for pool in [&rig.allocator, &side] {
                let block = pool.malloc(MIB, stream).unwrap();
                pool.free(block, stream).unwrap();
            }
            side.free(block, stream).unwrap();
            rig.allocator.destroy_stream(stream).unwrap();
        }
    }
}

#[test]
fn work_can_be_observed_after_its_stream_was_destroyed() {
    let rig = rig(Preset::Vramp);
    let stream = rig.allocator.create_stream().unwrap();
    let open = rig.allocator.stream_work(stream).unwrap();
    assert!(matches!(open, StreamWork::Open(raw) if raw == rig.raw(stream)));
    rig.sim.launch(rig.raw(stream), Kernel::new("long").lasting(LONG_NS)).unwrap();
    rig.allocator.destroy_stream(stream).unwrap();
    let Some(StreamWork::Ended(end)) = rig.allocator.stream_work(stream) else {
        panic!("the work runs")
    };
    assert!(!end.is_over().unwrap());
    end.synchronize().unwrap();
    assert!(end.is_over().unwrap());
    assert!(matches!(rig.allocator.stream_work(stream), Some(StreamWork::Over)));
    assert!(rig.allocator.stream_work(vramp_alloc::StreamId::new(77)).is_none());
}

#[test]
fn a_free_that_fails_is_repeated() {
    for preset in [Preset::Vpmm, Preset::StreamOrdered] {
        for call in [Call::Record, Call::Wait, Call::CreateStream, Call::FreeAsync] {
            let rig = rig(preset);
            let other = rig.allocator.create_stream().unwrap();
            let gone = rig.allocator.create_stream().unwrap();
            let [one, two] =
                [(); 2].map(|()| rig.allocator.malloc(Bytes::kib(512), other).unwrap());
            rig.allocator.destroy_stream(gone).unwrap();
            rig.sim.set_faults(FaultPlan::nth_of(call, 1));
            let on = if call == Call::CreateStream { gone } else { rig.stream };
            rig.allocator.free(one, on).unwrap_err();
            assert_eq!(rig.allocator.live(), Bytes::kib(512), "{}, {call}", preset.name());
            rig.allocator.free(two, rig.stream).unwrap();
            assert_eq!(rig.sim.pool_usage().unwrap().used, Bytes::ZERO, "{call}");
            let Rig { sim, allocator, .. } = rig;
            allocator.close().unwrap();
            assert_eq!(sim.live(), LiveObjects::default(), "{}, {call}", preset.name());
        }
    }
}

#[test]
fn all_is_trimmed_after_the_last_streams_were_destroyed() {
    let rig = rig(Preset::Vramp);
    let [one, two] = [(); 2].map(|()| rig.allocator.create_stream().unwrap());
    let block = rig.allocator.malloc(Bytes::kib(3), one).unwrap();
    rig.sim.launch(rig.raw(two), Kernel::new("use").reading(range(&block))).unwrap();
    rig.allocator.record_use(&block, two).unwrap();
    rig.allocator.destroy_stream(one).unwrap();
    rig.allocator.free(block, one).unwrap();
    rig.allocator.destroy_stream(two).unwrap();
    rig.sim.advance(1 << 20);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    assert_eq!(rig.allocator.stats().unwrap().reserved, Bytes::ZERO);
}

#[test]
fn a_graph_of_an_allocator_that_was_dropped_during_a_capture_is_refused() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let inner = rig.malloc(MIB, rig.a);
        rig.fill(rig.a, &inner, 1);
        rig.free(inner, rig.a);
    });
    rig.base.sim.begin_capture(rig.raw(rig.b), CaptureMode::Relaxed).unwrap();
    let GraphRig { base: Rig { allocator, .. }, a, .. } = rig;
    drop(allocator);
    let refused = graph.launch(a).unwrap_err();
    assert!(matches!(refused, LaunchError::Unusable(Unusable::Closed)), "{refused}");
}

#[test]
fn ended_streams_leave_no_events() {
    for preset in Preset::ALL {
        let rig = Rig::on(Simulator::builder(), preset.config());
        let mut most = 0;
        for _ in 0..1_000 {
            let stream = rig.allocator.create_stream().unwrap();
            let block = rig.allocator.malloc(MIB, stream).unwrap();
            let kernel = Kernel::new("short").writing(range(&block)).lasting(10);
            rig.sim.launch(rig.raw(stream), kernel).unwrap();
            rig.allocator.free(block, stream).unwrap();
            rig.allocator.destroy_stream(stream).unwrap();
            most = most.max(rig.sim.live().events);
        }
        assert!(most <= 150, "{}: {most} events", preset.name());
        let streams = rig.sim.live().streams;
        assert!(streams <= 2, "{}: {streams} streams", preset.name());
    }
}

// --- blocks that escaped a capture ---

/// Replays, and makes it known that the replay is over: later work is of a later epoch.
fn replay_to_the_end(rig: &GraphRig, graph: &vramp_alloc::graph::CapturedGraph) {
    rig.replay(graph, rig.a);
    rig.sync(rig.a);
    rig.base.allocator.trim(Bytes::ZERO).unwrap();
}

#[test]
fn real_work_on_an_escaped_block_is_remembered_when_a_later_capture_frees_it() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (first, escaped) = rig.capture(rig.a, &arena, || {
        let escaped = rig.malloc(MIB * 64, rig.a);
        rig.fill(rig.a, &escaped, 1);
        escaped
    });
    replay_to_the_end(&rig, &first);
    rig.write("late", rig.a, &escaped, LONG_NS);
    let (second, ()) = rig.capture(rig.a, &arena, || rig.free(escaped, rig.a));
    drop((first, second));
    rig.base.allocator.trim(Bytes::ZERO).unwrap();
    let other = rig.malloc(MIB * 64, rig.b);
    rig.write("other", rig.b, &other, 1);
    rig.sync(rig.a);
    rig.sync(rig.b);
    assert_sound(&rig.base.sim, "an escaped block");
}

#[test]
fn a_replay_elsewhere_is_refused_while_real_work_uses_an_escaped_block() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (first, escaped) = rig.capture(rig.a, &arena, || rig.malloc(MIB * 64, rig.a));
    replay_to_the_end(&rig, &first);
    rig.read("late", rig.a, &escaped, LONG_NS);
    let (second, ()) = rig.capture(rig.a, &arena, || {
        rig.free(escaped, rig.a);
        let reused = rig.malloc(MIB * 64, rig.a);
        rig.fill(rig.a, &reused, 7);
        rig.free(reused, rig.a);
    });
    let refused = second.launch(rig.b).unwrap_err();
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    rig.sync(rig.a);
    rig.replay(&second, rig.b);
    rig.sync(rig.b);
    assert_sound(&rig.base.sim, "a replay elsewhere");
}

#[test]
fn real_work_is_remembered_when_a_capture_into_another_arena_frees_a_block() {
    let rig = GraphRig::new();
    let (one, other) = (rig.arena(), rig.arena());
    let (first, escaped) = rig.capture(rig.a, &one, || rig.malloc(MIB * 64, rig.a));
    let plain = rig.malloc(MIB * 32, rig.a);
    replay_to_the_end(&rig, &first);
    rig.write("late", rig.b, &escaped, LONG_NS);
    rig.write("late too", rig.b, &plain, 1);
    let (second, ()) = rig.capture(rig.a, &other, || {
        // The second stream joins the capture, and frees what its earlier work uses.
        rig.order(rig.a, rig.b);
        rig.free(escaped, rig.b);
        rig.free(plain, rig.b);
        rig.order(rig.b, rig.a);
    });
    drop((second, first));
    rig.base.allocator.trim(Bytes::ZERO).unwrap();
    for size in [MIB * 64, MIB * 32] {
        let block = rig.malloc(size, rig.a);
        rig.write("next", rig.a, &block, 1);
    }
    rig.sync(rig.a);
    rig.sync(rig.b);
    assert_sound(&rig.base.sim, "another arena");
}

#[test]
fn a_use_recorded_in_a_capture_covers_real_work_too() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (first, escaped) = rig.capture(rig.a, &arena, || rig.malloc(MIB * 64, rig.a));
    replay_to_the_end(&rig, &first);
    rig.read("late", rig.b, &escaped, LONG_NS);
    let (second, ()) = rig.capture(rig.a, &arena, || {
        rig.order(rig.a, rig.b);
        rig.base.allocator.record_use(&escaped, rig.b).unwrap();
        rig.order(rig.b, rig.a);
        rig.free(escaped, rig.a);
    });
    drop((second, first));
    rig.base.allocator.trim(Bytes::ZERO).unwrap();
    let next = rig.malloc(MIB * 64, rig.a);
    rig.write("next", rig.a, &next, 1);
    rig.sync(rig.a);
    rig.sync(rig.b);
    assert_sound(&rig.base.sim, "a recorded use");
}

#[test]
fn graphs_and_their_memory_outlive_the_streams_they_were_made_and_launched_on() {
    let rig = GraphRig::new();
    let gone = rig.base.allocator.create_stream().unwrap();
    let arena = rig.arena();
    let before = rig.malloc(MIB * 32, gone);
    let (graph, ()) = rig.capture(gone, &arena, || {
        let inner = rig.malloc(MIB * 64, gone);
        rig.write("replay", gone, &inner, LONG_NS);
        rig.write("before", gone, &before, 1);
        rig.free(inner, gone);
        rig.free(before, gone);
    });
    let lease = graph.launch(gone).unwrap();
    rig.base.allocator.destroy_stream(gone).unwrap();
    drop(lease);
    let refused = graph.launch(gone).unwrap_err();
    assert!(matches!(refused, LaunchError::UnknownStream(_)), "{refused}");
    let refused = graph.launch(rig.b).unwrap_err();
    assert!(matches!(refused, LaunchError::Busy(_)), "{refused}");
    drop((graph, arena));
    rig.base.allocator.trim(Bytes::ZERO).unwrap();
    for size in [MIB * 64, MIB * 32] {
        let block = rig.malloc(size, rig.a);
        rig.write("next", rig.a, &block, 1);
        rig.free(block, rig.a);
    }
    let GraphRig { base: Rig { sim, allocator, .. }, .. } = rig;
    allocator.close().unwrap();
    assert_sound(&sim, "a graph");
    assert_eq!(sim.live(), LiveObjects::default());
}

/// Allocators are moved to and closed by other threads.
#[test]
fn an_allocator_that_was_given_back_is_whole() {
    fn is_send<T: Send + Sync>() {}
    is_send::<Allocator>();
    is_send::<CloseError>();
    is_send::<StreamWork>();
}

#[test]
fn a_launch_is_refused_behind_work_of_a_stream_that_captures() {
    let rig = GraphRig::new();
    let arena = rig.arena_of(vramp_alloc::graph::ArenaConfig {
        overlap: vramp_alloc::graph::Overlap::Order,
        ..Default::default()
    });
    let other = rig.arena();
    let (graph, escaped) = rig.capture(rig.a, &arena, || {
        let escaped = rig.malloc(MIB * 16, rig.a);
        rig.write("replay", rig.a, &escaped, 1 << 14);
        escaped
    });
    let lease = graph.launch(rig.a).unwrap();
    rig.read("late", rig.a, &escaped, 1 << 20);
    let capture = rig.base.allocator.begin_capture(rig.a, &other).unwrap();
    drop(lease);
    let refused = graph.launch(rig.b).unwrap_err();
    let LaunchError::Driver(error) = refused else { panic!("{refused}") };
    assert_eq!(error.kind, ErrorKind::Capturing);
    drop(capture);
    rig.replay(&graph, rig.b);
    rig.sync(rig.a);
    rig.sync(rig.b);
    assert_sound(&rig.base.sim, "a launch");
}

#[test]
fn memory_kept_for_a_graph_waits_for_launches_on_streams_that_are_new_to_the_pool() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let kept = rig.malloc(MIB * 64, rig.a);
    let queue = rig.raw(rig.a);
    rig.base.sim.begin_capture(queue, CaptureMode::ThreadLocal).unwrap();
    let capture = rig.base.allocator.attach_capture(rig.a, &arena).unwrap();
    rig.write("replay", rig.a, &kept, LONG_NS);
    rig.free(kept, rig.a);
    let graph = rig.base.sim.end_capture(queue).unwrap();
    let hold = capture.detach();
    let exec = rig.base.sim.instantiate(graph).unwrap();
    rig.base.sim.destroy_graph(graph).unwrap();
    let new = rig.base.allocator.create_stream().unwrap();
    rig.base.sim.launch_graph(exec, rig.raw(new)).unwrap();
    drop(hold);
    let block = rig.malloc(MIB * 64, rig.a);
    rig.write("next", rig.a, &block, 1);
    rig.sync(rig.a);
    assert_sound(&rig.base.sim, "a hold");
}

#[test]
fn a_capture_that_was_ended_elsewhere_may_outlive_its_stream() {
    for closes in [false, true] {
        let rig = GraphRig::new();
        let gone = rig.base.allocator.create_stream().unwrap();
        let arena = rig.arena();
        let capture = rig.base.allocator.begin_capture(gone, &arena).unwrap();
        let graph = rig.base.sim.end_capture(rig.raw(gone)).unwrap();
        rig.base.sim.destroy_graph(graph).unwrap();
        rig.base.allocator.destroy_stream(gone).unwrap();
        if closes {
            let GraphRig { base: Rig { allocator, .. }, .. } = rig;
            allocator.close().unwrap();
        }
        drop(capture);
    }
}

#[test]
fn a_graph_from_before_a_reset_keeps_the_addresses_it_writes() {
    let rig = GraphRig::new();
    let arena = rig.arena();
    let (graph, ()) = rig.capture(rig.a, &arena, || {
        let [one, two] = [(); 2].map(|()| rig.malloc(Bytes::gib(1) + MIB * 64, rig.a));
        rig.fill(rig.a, &two, 1);
        rig.free(one, rig.a);
        rig.free(two, rig.a);
    });
    arena.reset().unwrap();
    rig.base.allocator.trim(Bytes::ZERO).unwrap();
    // So many that the first one has to give up addresses.
    let others: Vec<_> = (0..300).map(|_| rig.arena()).collect();
    let lease = graph.launch(rig.a).unwrap();
    drop(lease);
    rig.sync(rig.a);
    assert_sound(&rig.base.sim, "a reset");
    drop(others);
}

/// A card looks at the memory of a graph's fills when it makes the graph ready.
#[test]
fn a_capture_under_a_limit_that_was_lowered_meanwhile_has_its_memory_until_its_graph_is_ready() {
    let rig = rig(Preset::Vramp);
    let arena = rig.allocator.graph_arena(ArenaConfig::default()).unwrap();
    let mut capture = rig.allocator.begin_capture(rig.stream, &arena).unwrap();
    for mib in [1, 6, 3] {
        let block = rig.allocator.malloc(MIB * mib, rig.stream).unwrap();
        rig.sim.fill(rig.raw(rig.stream), range(&block), 7).unwrap();
        if mib == 6 {
            rig.allocator.free(block, rig.stream).unwrap();
        }
    }
    rig.allocator.set_limit(Some(MIB * 4)).unwrap();
    let graph = capture.end().unwrap();
    drop((capture, graph, arena));
    assert_sound(&rig.sim, "ended");
}
