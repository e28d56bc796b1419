//! Spilling one buffer by its name: what leaves, where it goes, and what refuses.

use vramp_alloc::Driver;
use vramp_defer::error::{EvictError, HeldError};
use vramp_defer::report::{Copies, PieceState};
use vramp_defer::{Access, BufferProgress, DeferrableBuffer, SpillError, SpillTier};
use vramp_driver::Call;
use vramp_driver::sim::FaultPlan;
use vramp_tiers::Bytes;

use super::{MIB, PIECE, Plan, Rig, patient, rig};

const ON_HOST: Copies = Copies { host: true, ..Copies::NONE };
const ON_DISK: Copies = Copies { disk: true, ..Copies::NONE };

fn with_disk() -> Rig {
    Plan { disk: Some(MIB(512)), ..Plan::default() }.build()
}

fn spilled(buffer: &DeferrableBuffer) -> Vec<Copies> {
    let copies = |state| match state {
        PieceState::Spilled { copies } => copies,
        other => panic!("{other:?} is not spilled"),
    };
    buffer.states().into_iter().map(copies).collect()
}

#[test]
fn the_named_buffer_leaves_and_no_other() {
    let rig = rig();
    let older = rig.filled(PIECE * 2, 1);
    let named = rig.filled(PIECE * 2, 2);
    let newer = rig.filled(PIECE * 2, 3);
    assert_eq!(named.spill().unwrap(), PIECE * 2);
    assert_eq!(spilled(&named), [ON_HOST; 2]);
    assert!(older.is_resident() && newer.is_resident());
    assert_eq!(named.spill().unwrap(), Bytes::ZERO, "it has left");
    assert_eq!(named.progress(), BufferProgress::default());
    for (buffer, byte) in [(&older, 1), (&named, 2), (&newer, 3)] {
        rig.expect(buffer, byte);
    }
    // It has a copy now, so it leaves without another one.
    let copied = rig.manager.stats().to_host_bytes;
    assert_eq!(named.spill().unwrap(), PIECE * 2);
    assert_eq!(rig.manager.stats().to_host_bytes, copied);
    let empty = rig.manager.buffer(PIECE).unwrap();
    assert_eq!((empty.spill().unwrap(), empty.last_stream()), (Bytes::ZERO, None));
    assert_eq!(named.last_stream(), Some(rig.stream));
    rig.check();
}

#[test]
fn a_tier_by_name_takes_what_is_on_the_card_or_above_it() {
    let rig = with_disk();
    let buffer = rig.filled(PIECE * 2, 1);
    assert_eq!(buffer.spill_to(SpillTier::Disk).unwrap(), PIECE * 2);
    assert_eq!(spilled(&buffer), [ON_DISK; 2]);
    buffer.spill_to(SpillTier::Host).unwrap();
    assert_eq!(spilled(&buffer), [ON_DISK; 2], "it lies below already");
    rig.expect(&buffer, 1);
    rig.fill(&buffer, 2);
    buffer.spill_to(SpillTier::Host).unwrap();
    assert_eq!(spilled(&buffer), [ON_HOST; 2]);
    let host = rig.pool.space().total();
    buffer.spill_to(SpillTier::Disk).unwrap();
    assert_eq!(spilled(&buffer), [ON_DISK; 2]);
    assert_eq!(host - rig.pool.space().total(), PIECE * 2);
    rig.expect(&buffer, 2);
    // With a copy on the disk, one on the host is dropped.
    buffer.spill_to(SpillTier::Disk).unwrap();
    assert_eq!(spilled(&buffer), [ON_DISK; 2]);
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn what_holds_a_buffer_refuses_by_name() {
    let rig = rig();
    let buffer = rig.filled(PIECE, 1);
    let refused = |what: &str| match buffer.spill() {
        Err(SpillError::Evict(EvictError::Held(HeldError::Held { buffer: id, holds }))) => {
            assert_eq!(id, buffer.id(), "{what}");
            holds
        }
        other => panic!("{what}: {other:?}"),
    };
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    assert_eq!(refused("leased").leases.len(), 1);
    let pin = lease.pin(0).unwrap();
    drop(lease);
    assert_eq!(refused("pinned").pins, 1);
    drop(pin);
    // Work in flight is no obstacle: the call waits for it.
    rig.fill(&buffer, 2);
    assert_eq!(buffer.spill().unwrap(), PIECE);
    rig.expect(&buffer, 2);
    rig.sim.begin_capture(rig.queue, vramp_alloc::device::CaptureMode::Relaxed).unwrap();
    assert!(matches!(buffer.spill(), Err(SpillError::CaptureInProgress)));
    rig.sim.end_capture(rig.queue).unwrap();
    rig.check();
}

#[test]
fn members_of_a_group_leave_together_or_not_at_all() {
    let rig = rig();
    let group = rig.manager.group();
    let [one, two] = [1, 2].map(|byte| {
        let buffer = group.buffer(Bytes::kib(64)).unwrap();
        rig.fill(&buffer, byte);
        buffer
    });
    let lease = two.lease(Access::Shared, rig.stream).unwrap();
    match one.spill() {
        Err(SpillError::Evict(EvictError::Held(HeldError::Held { buffer, .. }))) => {
            assert_eq!(buffer, two.id());
        }
        other => panic!("{other:?}"),
    }
    drop(lease);
    assert!(!one.spill().unwrap().is_zero());
    assert!(one.is_deferred() && two.is_deferred());
    rig.expect(&one, 1);
    rig.expect(&two, 2);
    rig.check();
}

#[test]
fn without_room_below_it_stays_and_says_how_much_is_missing() {
    let rig = Plan { host: MIB(32), ..Plan::default() }.build();
    let large = rig.filled(PIECE * 5, 1);
    let small = rig.filled(PIECE, 2);
    let no_room = |result| match result {
        Err(SpillError::Evict(EvictError::NoRoom { buffer, needed })) => (buffer, needed),
        other => panic!("{other:?}"),
    };
    assert_eq!(no_room(large.spill()), (large.id(), PIECE * 5));
    assert!(large.is_resident());
    assert_eq!(no_room(small.spill_to(SpillTier::Disk)), (small.id(), PIECE));
    small.spill().unwrap();
    assert_eq!(no_room(small.spill_to(SpillTier::Disk)), (small.id(), PIECE));
    rig.expect(&large, 1);
    rig.expect(&small, 2);
    rig.check();
}

#[test]
fn room_is_made_on_the_host_for_what_the_disk_can_take() {
    let rig = Plan { host: MIB(48), disk: Some(MIB(512)), ..Plan::default() }.build();
    let first = rig.filled(PIECE * 3, 1);
    let second = rig.filled(PIECE * 3, 2);
    first.spill_to(SpillTier::Host).unwrap();
    second.spill_to(SpillTier::Host).unwrap();
    assert_eq!(spilled(&second), [ON_HOST; 3]);
    assert!(spilled(&first).contains(&ON_DISK), "{:?}", first.states());
    rig.expect(&first, 1);
    rig.expect(&second, 2);
    rig.check();
}

#[test]
fn a_move_that_fails_is_an_error_and_the_contents_are_whole() {
    let rig = rig();
    let buffer = rig.filled(PIECE * 2, 1);
    rig.fail(FaultPlan::nth_of(Call::CopyToHost, 3).with_code(1));
    let failed = buffer.spill();
    rig.fail(FaultPlan::none());
    assert!(matches!(failed, Err(SpillError::NotSpilled(_))), "{failed:?}");
    assert!(
        !buffer.is_resident()
            || buffer.states().iter().any(|state| matches!(state, PieceState::Resident { .. }))
    );
    rig.expect(&buffer, 1);
    buffer.spill().unwrap();
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn threads_that_spill_by_name_and_lease_lose_no_byte() {
    let plan = patient();
    let rig = Plan { disk: Some(MIB(512)), ..plan }.build();
    let buffers: Vec<_> = (0..8u8).map(|byte| rig.filled(PIECE * 2, byte)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (rig, buffers) = (&rig, &buffers);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for _ in 0..40 {
                    let buffer = &buffers[random.usize(..buffers.len())];
                    let result = match random.u8(..4) {
                        0 => buffer.spill().map(drop),
                        1 => buffer.spill_to(SpillTier::Host).map(drop),
                        2 => buffer.spill_to(SpillTier::Disk).map(drop),
                        _ => buffer.lease(Access::Shared, rig.stream).map(drop),
                    };
                    match result {
                        Ok(()) | Err(SpillError::Evict(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    for (buffer, byte) in buffers.iter().zip(0..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}
