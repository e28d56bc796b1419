//! Streams, managers and events that end or fail while work on buffers runs, and events of buffers' states.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_defer::events::{BufferChange, BufferEvent, EventStream, EventsError, SpillTier};
use vramp_defer::{Access, BufferId, BufferStatus, SpillError};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Kernel};
use vramp_tiers::Bytes;

use super::faulty::Hooked;
use super::*;

// --- Streams, managers and events end or fail while work on buffers runs: contents stay whole, and nothing
// stays held for ever ---

const LONG_NS: u64 = 50_000_000;

/// Queues a long kernel and then a fill with `byte` on a new stream, under an exclusive lease.
fn late_write(rig: &Rig, buffer: &DeferrableBuffer, byte: u8) -> (vramp_defer::LeaseSet, StreamId) {
    let stream = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(stream).unwrap();
    let lease = buffer.lease(Access::Exclusive, stream).unwrap();
    let slow = Kernel::new("slow").writing(lease.address(0)).lasting(LONG_NS);
    rig.sim.launch(queue, slow).unwrap();
    rig.sim.fill(queue, lease.address(0), byte).unwrap();
    (lease, stream)
}

#[test]
fn a_buffer_leaves_only_after_the_work_of_a_stream_destroyed_under_its_lease() {
    let rig = rig();
    let buffer = rig.filled(MIB(64), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    let begin = rig.sim.now_ns();
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(64));
    assert!(rig.sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    rig.expect(&buffer, 9);
    rig.check();
}

#[test]
fn a_restored_buffer_is_ordered_behind_a_destroyed_stream() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 5).unwrap();
    drop(lease);
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_lease_whose_end_cannot_be_recorded_keeps_the_buffer_until_it_can() {
    for calls in [
        &[Call::Record][..],
        &[Call::CreateEvent, Call::Record],
        &[Call::Record, Call::SynchronizeStream],
        &[Call::IsCapturing],
    ] {
        let rig = rig();
        let buffer = rig.filled(MIB(64), 1);
        let (lease, _) = late_write(&rig, &buffer, 9);
        let plan = |plan: FaultPlan, &call: &Call| plan.and(FaultPlan::from_nth_of(call, 1));
        rig.sim.set_faults(calls.iter().fold(FaultPlan::none(), plan));
        drop(lease);
        rig.manager.spill(MIB(64));
        rig.sim.set_faults(FaultPlan::none());
        assert!(rig.sim.device_loss().is_none(), "{calls:?}");
        assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(64), "{calls:?}");
        rig.expect(&buffer, 9);
        rig.check();
    }
}

#[test]
fn waiting_for_a_destroyed_stream_waits_for_its_work() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    let begin = rig.sim.now_ns();
    rig.manager.sync_and_unlock(stream).unwrap();
    assert!(rig.sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    rig.manager.sync_and_unlock(stream).unwrap();
    rig.check();
}

#[test]
fn buffers_and_managers_end_while_a_destroyed_stream_works() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, stream) = late_write(&rig, &buffer, 9);
    rig.allocator.destroy_stream(stream).unwrap();
    drop(lease);
    drop(buffer);
    let Rig { sim, allocator, manager, stream, queue, .. } = rig;
    drop(manager);
    let block = allocator.malloc(MIB(64), stream).unwrap();
    let range = AddrRange::new(block.addr(), block.len());
    sim.launch(queue, Kernel::new("next").writing(range)).unwrap();
    allocator.free(block, stream).unwrap();
    sim.synchronize_stream(queue).unwrap();
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn streams_that_were_leased_for_and_destroyed_leave_no_events() {
    let rig = rig();
    let buffer = rig.filled(MIB(8), 1);
    let mut most = 0;
    for _ in 0..500 {
        let stream = rig.allocator.create_stream().unwrap();
        let queue = rig.allocator.stream(stream).unwrap();
        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
        rig.sim.fill(queue, lease.address(0), 2).unwrap();
        rig.allocator.destroy_stream(stream).unwrap();
        drop(lease);
        most = most.max(rig.sim.live().events);
    }
    assert!(most < 200, "{most} events");
    rig.expect(&buffer, 2);
    rig.check();
}

/// Returns the parts of one more manager.
fn another(sim: &Arc<Simulator>, allocator: &Arc<Allocator>, pool: &HostPool) -> SpillParts {
    let (driver, allocator): (Arc<dyn Driver>, _) = (sim.clone(), Arc::clone(allocator));
    let mover = Mover::new(driver, pool, MoverConfig::default()).unwrap();
    SpillParts { allocator, mover, disk: None, budget: None, peers: vec![] }
}

#[test]
fn managers_that_end_leave_no_streams_and_no_events() {
    let Rig { sim, allocator, pool, manager, .. } = rig();
    drop(manager);
    let before = sim.live();
    let mut most = 0;
    for _ in 0..200 {
        let parts = another(&sim, &allocator, &pool);
        let manager = SpillManager::new(parts, SpillConfig::default()).unwrap();
        let buffer = manager.buffer(MIB(8)).unwrap();
        buffer.readable_while_spilled().unwrap();
        drop((buffer, manager));
        most = most.max(sim.live().events);
    }
    assert_eq!(sim.live().streams, before.streams);
    // The group queries the ends of destroyed streams once there are 32 of them.
    assert!(most <= before.events + 70, "{most} after {before:?}");
}

#[test]
fn a_manager_whose_second_stream_fails_leaves_no_first() {
    let Rig { sim, allocator, pool, manager, .. } = rig();
    drop(manager);
    let before = sim.live().streams;
    let parts = another(&sim, &allocator, &pool);
    sim.set_faults(FaultPlan::nth_of(Call::CreateStream, 2));
    SpillManager::new(parts, SpillConfig::default()).map(drop).unwrap_err();
    assert_eq!(sim.live().streams, before);
}

#[test]
fn a_manager_that_ends_while_a_stream_captures_leaves_the_capture_as_it_is() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let (lease, _) = late_write(&rig, &buffer, 9);
    drop((lease, buffer));
    let Rig { sim, manager, queue, .. } = rig;
    sim.begin_capture(queue, CaptureMode::Global).unwrap();
    let begin = sim.now_ns();
    drop(manager);
    assert!(sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    sim.end_capture(queue).unwrap();
    assert_eq!(sim.invalidated_captures(), 0);
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn a_record_that_a_capture_took_in_is_made_again() {
    let sim = Arc::new(simulator().build());
    let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
    let rig = Plan::default().build_behind(hooked.clone(), sim);
    let (first, second) = (rig.filled(MIB(24), 1), rig.filled(MIB(24), 2));
    let lease = first.lease(Access::Exclusive, rig.stream).unwrap();
    rig.sim.fill(rig.queue, lease.address(0), 9).unwrap();
    // Another thread begins a capture after the lease looked whether there is one.
    let (sim, queue) = (Arc::clone(&rig.sim), rig.queue);
    let begun = Arc::new(Mutex::new(false));
    let begins = Arc::clone(&begun);
    hooked.before_record(move || {
        sim.begin_capture(queue, CaptureMode::Relaxed).unwrap();
        *begins.lock().unwrap() = true;
    });
    drop(lease);
    assert!(*begun.lock().unwrap());
    rig.sim.end_capture(rig.queue).unwrap();
    // A lease of another stream is not refused, and the buffer may leave.
    let other = rig.allocator.create_stream().unwrap();
    drop(second.lease(Access::Shared, other).unwrap());
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(48));
    rig.expect(&first, 9);
    rig.expect(&second, 2);
    rig.check();
}

#[test]
fn a_query_for_captures_that_fails_is_not_called_a_capture() {
    let mut others = 0;
    for n in 1..=8 {
        let rig = rig();
        let buffer = rig.filled(MIB(32), 1);
        let (lease, _) = late_write(&rig, &buffer, 9);
        rig.sim.set_faults(FaultPlan::from_nth_of(Call::Record, 1));
        drop(lease);
        rig.sim.set_faults(FaultPlan::from_nth_of(Call::IsCapturing, n).with_code(304));
        let leased = buffer.lease(Access::Exclusive, rig.stream).map(drop);
        rig.sim.set_faults(FaultPlan::none());
        if let Err(error) = leased {
            assert!(!error.to_string().contains("captures"), "{n}: {error}");
            others += 1;
        }
        rig.expect(&buffer, 9);
        rig.check();
    }
    assert!(others > 1, "{others} leases failed");
}

#[test]
fn the_last_lease_after_its_manager_waits_for_the_work_under_it() {
    let rig = rig();
    let buffer = rig.filled(MIB(64), 1);
    let (lease, _) = late_write(&rig, &buffer, 9);
    let Rig { sim, allocator, manager, stream, queue, .. } = rig;
    let begin = sim.now_ns();
    drop((manager, buffer));
    assert!(sim.now_ns() < begin + LONG_NS / 2, "neither the manager nor the buffer is the last");
    drop(lease);
    assert!(sim.now_ns() > begin + LONG_NS / 2, "the kernel was waited for");
    let block = allocator.malloc(MIB(64), stream).unwrap();
    sim.fill(queue, AddrRange::new(block.addr(), block.len()), 5).unwrap();
    allocator.free(block, stream).unwrap();
    sim.synchronize_stream(queue).unwrap();
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn memory_of_a_lease_that_ended_in_a_capture_stays_after_its_manager() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let rig = rig();
        let buffer = rig.filled(MIB(32), 1);
        let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
        let slow = Kernel::new("slow").writing(lease.address(0)).lasting(LONG_NS);
        rig.sim.launch(rig.queue, slow).unwrap();
        rig.sim.begin_capture(rig.queue, CaptureMode::Global).unwrap();
        let Rig { sim, allocator, manager, queue, .. } = rig;
        let mut parts: [Option<Box<dyn Send>>; 3] =
            [Some(Box::new(lease)), Some(Box::new(buffer)), Some(Box::new(manager))];
        order.into_iter().for_each(|part| drop(parts[part].take()));
        sim.end_capture(queue).unwrap();
        assert_eq!(sim.invalidated_captures(), 0, "{order:?}");
        // The rest of the card serves others, and all of it is returned in the end.
        let other = allocator.create_stream().unwrap();
        let raw = allocator.stream(other).unwrap();
        let block = allocator.malloc(MIB(32), other).unwrap();
        sim.fill(raw, AddrRange::new(block.addr(), block.len()), 5).unwrap();
        assert!(allocator.malloc(MIB(32), other).is_err(), "{order:?}: work runs on the memory");
        allocator.free(block, other).unwrap();
        Arc::into_inner(allocator).expect("nothing else holds it").close().unwrap();
        assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
        assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
        assert_eq!((sim.live().handles, sim.live().mappings), (0, 0), "{order:?}");
    }
}

#[test]
fn a_pin_keeps_a_buffer_whose_handles_are_gone() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let range = lease.address(0);
    let pin = lease.pin(0).unwrap();
    drop((lease, buffer));
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(64)).freed, Bytes::ZERO);
    let first = AddrRange::new(range.start, Bytes::new(1));
    assert_eq!(rig.sim.peek(first).unwrap(), [1]);
    drop(pin);
    assert_eq!(rig.manager.census().buffers, 0);
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn a_cancelled_lease_leaves_copies_valid_and_holds_nothing() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    buffer.lease(Access::Exclusive, rig.stream).unwrap().cancel();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let copied = rig.manager.stats().to_host_bytes;
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    assert_eq!(rig.manager.stats().to_host_bytes, copied, "the copy is as it was");
    rig.expect(&buffer, 1);
    rig.check();
}

// --- Events of buffers' states: their order, what a slow subscriber loses, and how streams end ---

fn drain(events: &EventStream) -> Vec<BufferEvent> {
    std::iter::from_fn(|| events.try_recv().ok()).collect()
}

fn changes(events: &EventStream) -> Vec<BufferChange> {
    drain(events).into_iter().map(|event| event.change).collect()
}

#[test]
fn a_buffers_life_is_recorded_in_order_with_its_state_after_each_change() {
    let rig = rig();
    let events = rig.manager.events(64);
    let buffer = rig.manager.buffer(PIECE * 2).unwrap();
    assert_eq!(changes(&events), [BufferChange::Created]);
    rig.fill(&buffer, 3);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(changes(&events), [BufferChange::Locked, BufferChange::Unlocked]);

    rig.manager.spill(PIECE * 2);
    let away = drain(&events);
    let deferred = BufferChange::Deferred { to: SpillTier::Host, bytes: PIECE };
    assert_eq!(away.iter().map(|event| event.change).collect::<Vec<_>>(), [deferred, deferred]);
    assert_eq!(
        away.iter().map(|event| event.status.deferred).collect::<Vec<_>>(),
        [PIECE, PIECE * 2]
    );
    assert!(buffer.is_deferred() && !buffer.is_locked());

    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let retrieved = BufferChange::Retrieved { from: SpillTier::Host, bytes: PIECE };
    let back = drain(&events);
    let kinds: Vec<_> = back.iter().map(|event| event.change).collect();
    assert_eq!(kinds, [BufferChange::Locked, retrieved, retrieved]);
    assert_eq!(back[2].status, BufferStatus { len: PIECE * 2, deferred: Bytes::ZERO, leases: 1 });
    let second = buffer.lease(Access::Shared, rig.stream).unwrap();
    assert_eq!(drain(&events)[0].status.leases, 2);
    assert_eq!(buffer.status().leases, 2);
    drop((lease, second));
    assert_eq!(changes(&events), [BufferChange::Unlocked, BufferChange::Unlocked]);

    rig.sim.synchronize_stream(rig.queue).unwrap();
    buffer.discard().unwrap();
    let id = buffer.id();
    drop(buffer);
    let end = drain(&events);
    let kinds: Vec<_> = end.iter().map(|event| event.change).collect();
    assert_eq!(kinds, [BufferChange::Discarded, BufferChange::Freed]);
    assert!(end.iter().all(|event| event.buffer == id));
    rig.check();
}

#[test]
fn contents_without_a_copy_of_their_own_name_the_tier_that_has_one() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    rig.manager.spill(PIECE);
    rig.expect(&buffer, 1);
    let events = rig.manager.events(64);
    // The host's copy is valid: the piece leaves without another one.
    rig.manager.spill(PIECE);
    let to_host = BufferChange::Deferred { to: SpillTier::Host, bytes: PIECE };
    assert_eq!(changes(&events), [to_host]);
}

#[test]
fn what_the_host_pushes_to_the_disk_is_recorded() {
    let rig = Plan { disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffer = rig.filled(PIECE, 1);
    rig.manager.spill(PIECE);
    let events = rig.manager.events(64);
    rig.manager.relieve_host(PIECE);
    let moved = BufferChange::Moved { from: SpillTier::Host, to: SpillTier::Disk, bytes: PIECE };
    assert_eq!(changes(&events), [moved]);
    rig.expect(&buffer, 1);
    let retrieved = BufferChange::Retrieved { from: SpillTier::Disk, bytes: PIECE };
    assert!(changes(&events).contains(&retrieved));
    rig.check();
}

#[test]
fn a_refused_restore_unlocks_what_it_locked() {
    let rig = Plan { disk: None, ..Plan::default() }.build();
    let buffer = rig.filled(PIECE, 1);
    rig.manager.spill(PIECE);
    let events = rig.manager.events(64);
    rig.fail(FaultPlan::from_nth_of(Call::CopyToDevice, 1));
    let refused = buffer.lease(Access::Shared, rig.stream);
    assert!(matches!(refused, Err(SpillError::Move(_))), "{refused:?}");
    assert_eq!(changes(&events), [BufferChange::Locked, BufferChange::Unlocked]);
    rig.fail(FaultPlan::none());
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_full_queue_loses_its_oldest_events_and_counts_them() {
    let rig = rig();
    let (slow, fast) = (rig.manager.events(3), rig.manager.events(1000));
    let buffers: Vec<_> = (0..10).map(|_| rig.manager.buffer(PIECE).unwrap()).collect();
    for buffer in &buffers {
        rig.fill(buffer, 1);
    }
    let all = drain(&fast);
    assert_eq!(fast.take_lost(), 0);
    assert_eq!(slow.take_lost(), all.len() as u64 - 3);
    assert_eq!(slow.take_lost(), 0);
    assert_eq!(drain(&slow), all[all.len() - 3..]);
    // The present state replaces what was lost.
    let statuses: BTreeMap<BufferId, BufferStatus> = rig.manager.statuses().into_iter().collect();
    assert_eq!(statuses.len(), 10);
    for buffer in &buffers {
        assert_eq!(statuses[&buffer.id()], buffer.status());
    }
    // A queue has room for one event at least.
    let one = rig.manager.events(0);
    rig.fill(&buffers[9], 2);
    assert_eq!(changes(&one), [BufferChange::Unlocked]);
}

#[test]
fn a_stream_ends_when_it_is_closed_or_the_last_buffer_is_gone() {
    let rig = rig();
    let events = std::sync::Arc::new(rig.manager.events(8));
    let reader = std::sync::Arc::clone(&events);
    let waiting = std::thread::spawn(move || reader.recv(Duration::MAX));
    events.close();
    assert_eq!(waiting.join().unwrap(), Err(EventsError::Closed));

    let events = rig.manager.events(8);
    assert_eq!(events.recv(Duration::from_millis(1)), Err(EventsError::Empty));
    let buffer = rig.manager.buffer(PIECE).unwrap();
    drop(rig);
    assert_eq!(changes(&events), [BufferChange::Created]);
    drop(buffer);
    assert_eq!(events.recv(LONG).unwrap().change, BufferChange::Freed);
    assert_eq!(events.recv(LONG), Err(EventsError::Closed));
}

#[test]
fn a_reader_is_woken_without_an_event() {
    let rig = patient().build();
    let events = rig.manager.events(16);
    events.wake();
    assert_eq!(events.recv(LONG), Err(EventsError::Empty), "before it waits");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| events.recv(LONG));
        events.wake();
        assert_eq!(reader.join().unwrap(), Err(EventsError::Empty));
    });
    let buffer = rig.manager.buffer(PIECE).unwrap();
    events.wake();
    assert_eq!(changes(&events), [BufferChange::Created], "events come first");
    drop(buffer);
}

/// Checks that each event follows from the one before it of the same buffer.
#[test]
fn events_of_many_threads_add_up_to_the_state() {
    let rig = patient().build();
    let events = rig.manager.events(1 << 20);
    let buffers: Vec<_> = (0..12).map(|_| rig.manager.buffer(PIECE * 2).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (rig, buffers) = (&rig, &buffers);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                let stream = rig.allocator.create_stream().unwrap();
                let queue = rig.allocator.stream(stream).unwrap();
                for _ in 0..60 {
                    let buffer = &buffers[random.usize(..buffers.len())];
                    if random.u8(..8) == 0 {
                        rig.manager.spill(PIECE);
                        continue;
                    }
                    let access = [Access::Shared, Access::Exclusive][random.usize(..2)];
                    let lease = buffer.lease(access, stream).unwrap();
                    if access == Access::Exclusive {
                        rig.sim.fill(queue, lease.address(0), 1).unwrap();
                    }
                }
            });
        }
    });
    let mut known: BTreeMap<BufferId, BufferStatus> = BTreeMap::new();
    for BufferEvent { buffer, change, status, .. } in drain(&events) {
        let before = known.insert(buffer, status);
        let before = before.unwrap_or(BufferStatus { leases: 0, deferred: Bytes::ZERO, ..status });
        let expected = match change {
            BufferChange::Created => before,
            BufferChange::Locked => BufferStatus { leases: before.leases + 1, ..before },
            BufferChange::Unlocked => BufferStatus { leases: before.leases - 1, ..before },
            BufferChange::Deferred { bytes, .. } => {
                BufferStatus { deferred: before.deferred + bytes, ..before }
            }
            BufferChange::Retrieved { bytes, .. } => {
                BufferStatus { deferred: before.deferred - bytes, ..before }
            }
            other => panic!("{buffer} cannot be {other:?}"),
        };
        assert_eq!(status, expected, "{buffer} after {change:?}");
    }
    assert_eq!(events.take_lost(), 0);
    assert_eq!(known.into_iter().collect::<Vec<_>>(), {
        let mut now = rig.manager.statuses();
        now.sort_by_key(|(buffer, _)| *buffer);
        now
    });
    rig.check();
}
