use vramp_alloc::Driver;
use vramp_driver::Call;

use super::*;

/// Calls that may fail while something is evicted or restored.
pub const CALLS: [Call; 9] = [
    Call::Create,
    Call::Map,
    Call::SetAccess,
    Call::CopyToHost,
    Call::CopyToDevice,
    Call::Record,
    Call::Wait,
    Call::CreateEvent,
    Call::RegisterHost,
];

#[test]
fn a_failing_call_leaves_each_buffer_whole_where_it_was_or_where_it_went() {
    for call in CALLS {
        for n in vramp_testing::sampled(6, 3) {
            let rig = rig();
            let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
            rig.sim.synchronize_stream(rig.queue).unwrap();
            rig.fail(FaultPlan::nth_of(call, n).with_code(304));
            for buffer in &buffers {
                // It may fail.
                let _ = buffer.lease(Access::Shared, rig.stream);
            }
            let block = rig.allocator.malloc(MIB(20), rig.stream);
            rig.fail(FaultPlan::none());
            if let Ok(block) = block {
                rig.allocator.free(block, rig.stream).unwrap();
            }
            rig.check();
            for (buffer, byte) in buffers.iter().zip(1..) {
                rig.expect(buffer, byte);
            }
            drop(buffers);
            rig.sim.synchronize_stream(rig.queue).unwrap();
            rig.manager.census();
            rig.check();
            let census = rig.manager.census();
            assert_eq!((census.buffers, census.occupied), (0, Bytes::ZERO), "{call} {n}");
        }
    }
}

#[test]
fn a_full_host_and_a_full_disk_are_told_and_the_buffer_stays() {
    let rig = Plan { host: MIB(16), disk: Some(MIB(16)), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(64), 5);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let spilled = rig.manager.spill(MIB(64));
    assert!(spilled.freed <= MIB(32), "{spilled:?}");
    let short = spilled.short.unwrap();
    assert!(short.no_room >= MIB(32), "{short:?}");
    assert!(rig.allocator.malloc(MIB(48), rig.stream).is_err());
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn a_lost_device_is_never_out_of_memory_and_nothing_hangs() {
    let rig = rig();
    let buffers: Vec<_> = (1..=3).map(|byte| rig.filled(MIB(24), byte)).collect();
    rig.fail(FaultPlan::nth_of(Call::Record, 1).with_code(700));
    let error = buffers[0].lease(Access::Shared, rig.stream).map(drop);
    let error = error.and_then(|()| buffers[1].lease(Access::Shared, rig.stream).map(drop));
    let error = error.unwrap_err();
    assert!(!error.to_string().contains("out of memory"), "{error}");
    rig.manager.spill(MIB(64));
    drop(buffers);
}

#[test]
fn a_handler_or_observer_that_panics_refuses_no_lease() {
    for observes in [false, true] {
        let rig = rig();
        let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
        let panics = match observes {
            true => rig.allocator.observe(|event| {
                if let vramp_alloc::observe::Event::Short(_) = event {
                    panic!("an observer that gives up");
                }
            }),
            false => rig.allocator.on_shortage(|_| panic!("a handler that gives up")),
        };
        for buffer in &buffers {
            drop(buffer.lease(Access::Shared, rig.stream).unwrap());
            rig.check();
        }
        assert!(rig.allocator.stats().unwrap().callback_panics > 0);
        assert!(rig.allocator.unregister(panics));
        let census = rig.manager.census();
        assert_eq!((census.leases, census.moves, census.waiting), (0, 0, 0));
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, byte);
        }
        rig.check();
    }
}

/// What is moved while the device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    Evicted,
    Restored,
    Read,
    Written,
    Pushed,
}

/// Moves a buffer while the device fails, and then has all other memory used.
fn move_under_faults(moved: Moved, disk: bool, kept: bool, faults: FaultPlan) {
    let (limit, size) = (MIB(32), MIB(16));
    let plan = match disk {
        true => Plan { limit, host: MIB(32), disk: Some(MIB(256)), ..Plan::default() },
        false => Plan { limit, ..Plan::default() },
    };
    let rig = plan.build();
    let overwrite_all = || {
        let block = rig.allocator.malloc(limit, rig.stream).unwrap();
        rig.sim.fill(rig.queue, AddrRange::new(block.addr(), block.len()), 7).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        rig.check();
    };
    let filler = (disk && moved != Moved::Pushed).then(|| rig.pool.allocate(MIB(16)).unwrap());
    let buffer = rig.manager.buffer(size).unwrap();
    if moved == Moved::Pushed {
        buffer.readable_while_spilled().unwrap();
    }
    rig.fill(&buffer, 1);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    if matches!(moved, Moved::Restored | Moved::Pushed) {
        assert_eq!(rig.manager.spill(size).freed, size);
    }
    rig.fail(faults);
    // Each may fail.
    match moved {
        Moved::Evicted => drop(rig.manager.spill(size)),
        Moved::Restored => drop(buffer.lease(Access::Shared, rig.stream)),
        Moved::Read => drop(buffer.read(MIB(4), &mut vec![0; 4 << 20])),
        Moved::Written => drop(buffer.write(Bytes::ZERO, &vec![1; 16 << 20])),
        Moved::Pushed => drop(rig.manager.relieve_host(size)),
    }
    rig.fail(FaultPlan::none());
    drop(filler);
    if kept {
        overwrite_all();
        // A write that failed leaves any of the bytes.
        if moved == Moved::Written {
            rig.fill(&buffer, 1);
        }
        rig.expect(&buffer, 1);
    }
    drop(buffer);
    overwrite_all();
}

#[test]
fn memory_under_copies_whose_end_is_unknown_is_not_reused() {
    let waits = FaultPlan::from_nth_of(Call::SynchronizeStream, 1);
    let waits = waits.and(FaultPlan::from_nth_of(Call::SynchronizeEvent, 1));
    for (moved, disk) in [
        (Moved::Evicted, false),
        (Moved::Evicted, true),
        (Moved::Restored, false),
        (Moved::Restored, true),
        (Moved::Read, false),
        (Moved::Written, false),
        (Moved::Pushed, true),
    ] {
        for call in [Call::Record, Call::Wait, Call::CopyToHost, Call::CopyToDevice] {
            for (n, kept) in vramp_testing::sampled(4, 3).flat_map(|n| [(n, true), (n, false)]) {
                println!("{moved:?} {call} {n}, disk: {disk}, kept: {kept}");
                let faults = FaultPlan::nth_of(call, n).and(waits.clone()).with_code(304);
                move_under_faults(moved, disk, kept, faults);
            }
        }
    }
}
