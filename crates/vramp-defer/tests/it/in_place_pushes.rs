//! Mapped copies when the host is short: they go to the disk through the card, and stay where they
//! are whatever fails.

use std::sync::mpsc;

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_defer::planner::{Copies, PieceState};
use vramp_defer::report::MoveKind;
use vramp_driver::Call;
use vramp_driver::sim::Kernel;
use vramp_host::Direction;

use super::faulty::{EIO, ENOSPC, Fault, Faulty};
use super::hooked::Hooked;
use super::in_place::{CALLS, ends, spilled};
use super::*;

const HOST: Copies = Copies { peer: None, host: true, disk: false };
const DISK: Copies = Copies { peer: None, host: false, disk: true };

fn with_disk() -> Plan {
    Plan { disk: Some(MIB(512)), ..Plan::default() }
}

fn total(rig: &Rig, id: SpaceId) -> Bytes {
    rig.spaces.space(id).unwrap().total()
}

fn are(buffer: &DeferrableBuffer, copies: Copies) -> bool {
    buffer.states().iter().all(|state| *state == PieceState::Spilled { copies })
}

#[test]
fn a_short_host_sends_copies_that_the_device_maps_to_the_disk() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 7);
    assert!(are(&buffer, HOST));
    let before = total(&rig, SpaceId::host(0));
    let registered = rig.sim.calls_of(Call::CopyToHost);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(are(&buffer, DISK));
    assert!(rig.sim.calls_of(Call::CopyToHost) > registered, "the card copies them");
    assert!(total(&rig, SpaceId::host(0)) + MIB(24) <= before);
    let pushed = rig.manager.history().iter().filter(|one| one.what == MoveKind::Pushed).count();
    assert_eq!(pushed, 3);
    rig.check();
    // What is on the disk cannot be read in place, so it is restored; it is readable below once it
    // left again.
    let lease = buffer.read_in_place(rig.stream).unwrap();
    assert!(!lease.is_in_place(0) && buffer.is_resident());
    assert_eq!(ends(&rig, &lease), [7, 7]);
    drop(lease);
    rig.manager.spill(MIB(24));
    assert!(are(&buffer, Copies { peer: None, host: true, disk: true }));
    let lease = buffer.read_in_place(rig.stream).unwrap();
    assert!(lease.is_in_place(0));
    assert_eq!(ends(&rig, &lease), [7, 7]);
    drop(lease);
    // What is on the disk by now is dropped from the host at no cost.
    let written = rig.manager.stats().to_disk_bytes;
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert_eq!(rig.manager.stats().to_disk_bytes, written);
    assert!(are(&buffer, DISK));
    rig.expect(&buffer, 7);
    rig.check();
    drop(buffer);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.census();
    rig.manager.relieve_host(MIB(512));
    assert_eq!(total(&rig, SpaceId::host(0)), Bytes::ZERO);
    assert_eq!(total(&rig, SpaceId::disk(0)), Bytes::ZERO);
    rig.check();
}

#[test]
fn what_somebody_else_unmaps_while_a_lease_waits_for_its_readers_is_no_failure() {
    let sim = Arc::new(simulator().build());
    let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
    let rig = with_disk().build_behind(hooked.clone(), sim);
    let buffer = spilled(&rig, MIB(24), 7);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    rig.expect(&buffer, 7);
    rig.manager.spill(MIB(24));
    assert!(are(&buffer, Copies { peer: None, host: true, disk: true }));
    // The copy is dropped while a kernel reads it, so it stays mapped until that is done.
    let reading = buffer.read_in_place(rig.stream).unwrap();
    let long = Kernel::new("long").reading(reading.address(0)).lasting(50_000_000);
    rig.sim.launch(rig.queue, long).unwrap();
    drop(reading);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(are(&buffer, DISK));
    let (ask, asked) = mpsc::channel::<()>();
    let (answer, answered) = mpsc::channel();
    std::thread::scope(|scope| {
        let manager = &rig.manager;
        scope.spawn(move || {
            for () in asked {
                answer.send(manager.census()).unwrap();
            }
        });
        hooked.after_wait(move || {
            ask.send(()).unwrap();
            answered.recv().unwrap();
        });
        let unmapped = rig.sim.calls_of(Call::Unmap);
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
        assert!(rig.sim.calls_of(Call::Unmap) > unmapped);
    });
    rig.expect(&buffer, 7);
    rig.check();
}

#[test]
fn plain_copies_go_to_the_disk_before_those_that_can_be_read() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(16), 1);
    let plain = rig.filled(MIB(16), 2);
    rig.manager.spill(MIB(16));
    assert_eq!(rig.manager.relieve_host(MIB(16)), MIB(16));
    assert!(are(&plain, DISK) && are(&buffer, HOST));
    assert_eq!(rig.manager.relieve_host(MIB(8)), MIB(8));
    let states = [DISK, HOST].map(|copies| PieceState::Spilled { copies });
    assert_eq!(buffer.states(), states);
    rig.expect(&plain, 2);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn what_is_read_in_place_is_pushed_once_nobody_reads_it() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 5);
    let reading = buffer.read_in_place(rig.stream).unwrap();
    assert_eq!(rig.manager.relieve_host(MIB(24)), Bytes::ZERO);
    assert!(are(&buffer, HOST));
    // Work outlasts the lease: it is waited for before anything is unmapped.
    let began = rig.sim.now_ns();
    let long = Kernel::new("long").reading(reading.address(0)).lasting(50_000_000);
    rig.sim.launch(rig.queue, long).unwrap();
    drop(reading);
    let unmapped = rig.sim.calls_of(Call::Unmap);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(rig.sim.calls_of(Call::Unmap) > unmapped);
    assert!(rig.sim.now_ns() >= began + 50_000_000);
    assert!(are(&buffer, DISK));
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_failing_call_of_a_push_leaves_the_copy_where_it_was() {
    for call in CALLS.into_iter().chain([Call::CopyToHost]) {
        for n in vramp_testing::sampled(8, 3) {
            let rig = with_disk().build();
            let buffers = [1, 2].map(|byte| spilled(&rig, MIB(24), byte));
            rig.fail(FaultPlan::nth_of(call, n).with_code(304));
            let made = rig.manager.relieve_host(MIB(48));
            rig.fail(FaultPlan::none());
            rig.check();
            let states = buffers.iter().flat_map(DeferrableBuffer::states);
            let on_host =
                states.filter(|state| *state == PieceState::Spilled { copies: HOST }).count();
            assert_eq!(MIB(48), made + MIB(8) * on_host as u64, "{call} {n}");
            for (buffer, byte) in buffers.iter().zip(1..) {
                let whole = are(buffer, HOST);
                let lease = buffer.read_in_place(rig.stream).unwrap();
                assert_eq!(lease.is_in_place(0), whole, "{call} {n}: what stayed is readable");
                assert_eq!(ends(&rig, &lease), [byte, byte], "{call} {n}");
                drop(lease);
                rig.expect(buffer, byte);
            }
            drop(buffers);
            rig.sim.synchronize_stream(rig.queue).unwrap();
            rig.manager.census();
            rig.manager.relieve_host(MIB(512));
            rig.check();
            assert_eq!(total(&rig, SpaceId::disk(0)), Bytes::ZERO, "{call} {n}");
            assert_eq!(total(&rig, SpaceId::host(0)), Bytes::ZERO, "{call} {n}");
        }
    }
}

#[test]
fn a_disk_that_fails_or_is_full_leaves_copies_where_they_are_read() {
    for code in [EIO, ENOSPC] {
        let io = Faulty::new();
        let rig = Plan { io: Some(Arc::<Faulty>::clone(&io)), ..with_disk() }.build();
        let buffer = spilled(&rig, MIB(24), 3);
        io.set(move |request| match request.direction {
            Direction::Write => Fault::Fail(code),
            Direction::Read => Fault::None,
        });
        assert_eq!(rig.manager.relieve_host(MIB(24)), Bytes::ZERO);
        assert!(are(&buffer, HOST));
        let told = rig.manager.failures();
        assert!(told.iter().all(|failed| failed.what == MoveKind::Pushed), "{told:?}");
        assert_eq!(told.len() as u64, rig.manager.stats().failures);
        assert!(!told.is_empty());
        let lease = buffer.read_in_place(rig.stream).unwrap();
        assert!(lease.is_in_place(0));
        assert_eq!(ends(&rig, &lease), [3, 3]);
        drop(lease);
        io.heal();
        assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
        rig.expect(&buffer, 3);
        rig.check();
    }
    let rig = Plan { disk: Some(MIB(8)), ..Plan::default() }.build();
    let buffer = spilled(&rig, MIB(24), 3);
    assert!(rig.manager.relieve_host(MIB(24)) <= MIB(8));
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn what_is_on_the_disk_leaves_even_if_no_copy_to_read_can_be_made() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 3);
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    rig.expect(&buffer, 3);
    let no_memory = FaultPlan::from_nth_of(Call::Create, 1);
    rig.fail(no_memory.and(FaultPlan::from_nth_of(Call::CopyToHost, 1)));
    assert_eq!(rig.manager.spill(MIB(24)).freed, MIB(24));
    rig.fail(FaultPlan::none());
    let told = rig.manager.failures();
    assert_eq!((told.len(), rig.manager.stats().failures), (3, 3), "for each piece: {told:?}");
    assert!(are(&buffer, DISK));
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn nothing_is_pushed_through_the_card_while_a_stream_captures() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 3);
    rig.sim.begin_capture(rig.queue, CaptureMode::Global).unwrap();
    assert_eq!(rig.manager.relieve_host(MIB(24)), Bytes::ZERO);
    rig.sim.end_capture(rig.queue).unwrap();
    assert_eq!(rig.sim.invalidated_captures(), 0);
    assert!(are(&buffer, HOST));
    let stats = rig.manager.stats();
    assert_eq!((stats.failures, stats.given_up), (0, 3), "nothing is broken");
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn memory_that_is_kept_for_later_copies_goes_first() {
    let rig = with_disk().build();
    let buffer = spilled(&rig, MIB(24), 3);
    let kept = spilled(&rig, MIB(16), 4);
    // A write makes the copies stale: their memory is kept.
    rig.fill(&buffer, 5);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.census();
    let before = total(&rig, SpaceId::host(0));
    assert_eq!(rig.manager.relieve_host(MIB(24)), MIB(24));
    assert!(total(&rig, SpaceId::host(0)) + MIB(24) <= before);
    assert!(are(&kept, HOST), "nothing had to be pushed");
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn more_readable_contents_than_the_host_holds_are_whole_wherever_they_are() {
    let rig = Plan { host: MIB(80), ..with_disk() }.build();
    let buffers: Vec<_> = (1..=6).map(|byte| spilled(&rig, MIB(24), byte)).collect();
    assert!(total(&rig, SpaceId::host(0)) <= MIB(80));
    for round in 0..2 {
        for (buffer, byte) in buffers.iter().zip(1..) {
            let lease = buffer.read_in_place(rig.stream).unwrap();
            assert_eq!(ends(&rig, &lease), [byte, byte], "round {round}");
        }
    }
    let stats = rig.manager.stats();
    assert!(stats.from_disk_bytes > 0 && stats.to_disk_bytes > 0, "{stats:?}");
    rig.manager.spill(MIB(64));
    rig.check();
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}
