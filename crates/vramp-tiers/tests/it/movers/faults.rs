//! Failing driver calls.

use super::*;
use vramp_testing::fail_each_call;

/// Runs every kind of transfer. All of them end, whatever fails.
fn everything(
    devices: &[Arc<Simulator>; 2],
    pool: &HostPool,
    memory: &[AddrRange; 2],
    stream: Stream,
) -> Result<(), MoveError> {
    let near = Mover::new(driver(&devices[0]), pool, SMALL)?;
    let far = Mover::new(driver(&devices[1]), pool, SMALL)?;
    let host = pool.allocate(memory[0].len)?;
    let moving = near.to_host(memory[0], host).after(CopyDependency::Stream(stream));
    let mut down = moving.start()?;
    let side = near.to_host(memory[0], pool.allocate(memory[0].len)?);
    let side = side.start()?;
    down.poll()?;
    down.wait()?;
    // It reads what the next transfer writes.
    drop(side);
    let up = near.to_device(memory[0], down.into_host());
    let up = up.start()?;
    drop(up.finish_on(stream)?);
    near.between(memory[0], &far, memory[1])?.after(CopyDependency::Stream(stream))?.wait()
}

#[test]
fn whichever_driver_call_fails_the_error_is_typed_and_nothing_leaks() {
    for code in [2, 1] {
        let mut failed = 0;
        fail_each_call(|nth| {
            let devices = [simulator(), simulator()];
            let memory = [0, 1].map(|index| memory(&devices[index], Bytes::mib(10)));
            let stream = devices[0].create_stream().unwrap();
            let before = devices.clone().map(|device| device.live());
            let pool = pool(&[&devices[0], &devices[1]]);
            let before_calls = devices[0].calls();
            devices[0].set_faults(FaultPlan::nth(nth).with_code(code));
            let outcome = everything(&devices, &pool, &memory, stream);
            devices[0].set_faults(FaultPlan::none());
            let calls = devices[0].calls() - before_calls;
            devices[0].synchronize_stream(stream).unwrap();
            assert_eq!(pool.space().total(), Bytes::ZERO, "call {nth}");
            assert_eq!(pool.stats().pending_blocks, 0, "call {nth}");
            drop(pool);
            for (device, before) in devices.iter().zip(before) {
                // The last handle of a mover may have met the failure while it destroyed a stream
                // or event.
                let LiveObjects { streams, events, .. } = before;
                let now = device.live();
                let left = now.streams + now.events - streams - events;
                assert!(left <= usize::from(outcome.is_ok()), "call {nth} leaves {now:?}");
                assert_eq!(now.host_buffers, before.host_buffers, "call {nth}");
                no_hazards(device);
            }
            match outcome {
                Ok(()) => {}
                Err(error) => {
                    assert!(!error.is_unsettled(), "call {nth}: {error}");
                    let driver = error.driver_error().unwrap_or_else(|| panic!("{nth}: {error}"));
                    assert_eq!(driver.code, code, "call {nth}: {error}");
                    assert_eq!(driver.is_out_of_memory(), code == 2);
                    failed += 1;
                }
            }
            calls
        });
        assert!(failed > 5, "{failed} calls failed");
    }
}

#[test]
fn a_device_that_is_lost_midway_is_an_error_of_its_own_and_never_out_of_memory() {
    for nth in [1, 3, 6, 9, 12, 20] {
        let bench = bench();
        let range = memory(&bench.device, Bytes::mib(40));
        let host = bench.pool.allocate(range.len).unwrap();
        bench.device.set_faults(FaultPlan::nth(nth).with_code(700));
        let moved = match bench.mover.to_host(range, host).start() {
            Ok(mut transfer) => transfer.wait().map_err(|error| (error, transfer.progress().moved)),
            Err(failed) => Err((failed.error, Bytes::ZERO)),
        };
        let (error, progress) = moved.unwrap_err();
        let MoveError::Device { moved, of, error } = error else { panic!("{error}") };
        assert!(moved < of && moved == progress, "{moved}");
        assert!(error.is_device_lost() && !error.is_out_of_memory());
        assert_eq!(error.code, 700);
    }
}

#[test]
fn blocks_of_a_copy_whose_end_is_unknown_are_not_reused_under_it() {
    let unsettled = |records: FaultPlan| records.and(FaultPlan::nth_of(Call::SynchronizeStream, 1));
    // The use of the blocks can be recorded later, or never.
    for (records, pending, leaked) in [
        (FaultPlan::nth_of(Call::Record, 1), 4, 0),
        (FaultPlan::from_nth_of(Call::Record, 1), 0, 4),
    ] {
        for staged in [true, false] {
            let devices = [simulator(), simulator()];
            let [from, to] = [0, 1].map(|index| memory(&devices[index], Bytes::mib(4)));
            let pool = pool(&[&devices[0], &devices[1]]);
            let near = Mover::new(driver(&devices[0]), &pool, SMALL).unwrap();
            let far = Mover::new(driver(&devices[1]), &pool, SMALL).unwrap();
            let stream = devices[1].create_stream().unwrap();
            let gate = devices[1].gate();
            devices[1].launch(stream, Kernel::new("busy").until(gate)).unwrap();
            let event = devices[1].create_event().unwrap();
            devices[1].record(event, stream).unwrap();
            let after = CopyDependency::Event(event);
            if staged {
                let moving = near.between(from, &far, to).unwrap();
                let mut moving = moving.after_at_target(after).unwrap();
                devices[1].set_faults(unsettled(records.clone()));
                assert!(moving.wait().unwrap_err().is_unsettled());
            } else {
                let moving = far.to_device(to, pool.allocate(to.len).unwrap()).after(after);
                devices[1].set_faults(unsettled(records.clone()));
                assert!(moving.start().unwrap_err().error.is_unsettled());
            }
            devices[1].set_faults(FaultPlan::none());
            let stats = pool.stats();
            assert_eq!((stats.pending_blocks, stats.leaked_blocks), (pending, leaked));
            assert_eq!(pool.space().total(), MIB * leaked);
            devices[1].open(gate);
            no_hazards(&devices[1]);
        }
    }
}
