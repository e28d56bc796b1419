//! Events of buffers' states: their order, what a slow subscriber loses, and how streams end.

use std::collections::BTreeMap;
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_defer::events::{BufferChange, BufferEvent, EventStream, EventsError, SpillTier};
use vramp_defer::{Access, BufferId, BufferStatus, SpillError};
use vramp_driver::Call;
use vramp_driver::sim::FaultPlan;
use vramp_tiers::Bytes;

use super::{LONG, MIB, PIECE, Plan, patient, rig};

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
