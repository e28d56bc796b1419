//! Leases of many small buffers, and leases that wait for the budget. A wait that never ends fails the test.

use std::sync::{Arc, mpsc};
use std::thread;

use vramp_defer::{Access, DeferrableBuffer};
use vramp_tiers::Deadline;
use vramp_tiers::reserve::RetryPolicy;

use super::{Bytes, Driver, LONG, MIB, Plan, patient};

#[test]
fn sets_of_many_small_buffers_are_leased_without_a_deadline() {
    const COUNT: usize = 2_000;
    // 28 buffers fit on the card at a time: sets of two, and one set that fills the limit.
    for (threads, per_set) in [(1, 2), (4, 2), (2, 28)] {
        // A copy of one page takes a block of 1 MiB on the host.
        let rig = Arc::new(Plan { budget: true, host: MIB(4096), ..patient() }.build());
        let buffer = |_| rig.manager.buffer(Bytes::new(4096)).unwrap();
        let buffers: Arc<Vec<DeferrableBuffer>> = Arc::new((0..COUNT).map(buffer).collect());
        let (ends, ended) = mpsc::channel();
        for nth in 0..threads {
            let (rig, buffers, ends) = (Arc::clone(&rig), Arc::clone(&buffers), ends.clone());
            thread::spawn(move || {
                let stream = rig.allocator.create_stream().unwrap();
                let queue = rig.allocator.stream(stream).unwrap();
                for round in 0..50 {
                    let first = (nth * 977 + round * 31) % (COUNT - per_set);
                    let set: Vec<_> = (first..first + per_set)
                        .map(|place| match place == first {
                            true => (&buffers[place], Access::Exclusive),
                            false => (&buffers[place], Access::Shared),
                        })
                        .collect();
                    let lease = rig.manager.lease_on(&set, &[stream], Deadline::NEVER).unwrap();
                    rig.sim.fill(queue, lease.address(0), 3).unwrap();
                    rig.sim.synchronize_stream(queue).unwrap();
                }
                ends.send(()).unwrap();
            });
        }
        for _ in 0..threads {
            let end = ended.recv_timeout(LONG);
            end.unwrap_or_else(|_| panic!("{:#?} {:?}", rig.manager.census(), rig.spaces));
        }
        rig.check();
    }
}

#[test]
fn a_lease_that_waits_because_the_host_is_full_is_served_when_a_spilled_buffer_ends() {
    // 7 buffers fill the card, and 2 the host.
    let rig = Arc::new(Plan { budget: true, host: MIB(16), ..patient() }.build());
    let mut buffers: Vec<_> = (0..9).map(|byte| rig.filled(MIB(8), byte)).collect();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let is_spilled = |buffer: &DeferrableBuffer| buffer.status().is_deferred();
    let wanted = buffers.iter().position(is_spilled).unwrap();
    let wanted = (wanted as u8, buffers.remove(wanted));
    let other = buffers.iter().position(is_spilled).unwrap();
    let (ends, ended) = mpsc::channel();
    let spills = rig.manager.stats().spills;
    {
        let (rig, (byte, buffer)) = (Arc::clone(&rig), wanted);
        thread::spawn(move || {
            let set = [(&buffer, Access::Shared)];
            let lease = rig.manager.lease_on(&set, &[rig.stream], LONG).unwrap();
            drop(lease);
            rig.expect(&buffer, byte);
            ends.send(()).unwrap();
        });
    }
    // The attempts to have something spilled are over, so that the request only waits.
    let retries = u64::from(RetryPolicy::default().max_retries);
    while rig.manager.stats().spills <= spills + retries + 1 {
        vramp_testing::moment();
    }
    assert!(ended.recv_timeout(std::time::Duration::from_millis(400)).is_err());
    drop(buffers.remove(other));
    ended.recv_timeout(LONG / 4).expect("it is served once the host has room");
    rig.check();
}
