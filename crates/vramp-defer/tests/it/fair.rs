//! Fairness of leases, and reports of moves that fail.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vramp_defer::LeaseRefused;
use vramp_defer::SpillError;
use vramp_host::Direction;

use super::below::{to_disk, until};
use super::faulty::{EIO, Fault, Faulty};
use super::in_place::{ends, spilled};
use super::*;

impl Rig {
    fn waiting(&self) -> usize {
        self.manager.census().waiting
    }

    /// Requests a lease without waiting.
    fn now(
        &self,
        buffer: &DeferrableBuffer,
        access: Access,
    ) -> Result<vramp_defer::LeaseSet, SpillError> {
        self.manager.lease_on(&[(buffer, access)], &[self.stream], Instant::now())
    }
}

fn is_behind(lease: Result<vramp_defer::LeaseSet, SpillError>) -> bool {
    matches!(lease, Err(SpillError::Refused(LeaseRefused::OlderWaiters { .. })))
}

#[test]
fn a_writer_is_served_though_readers_never_stop() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let first = buffer.lease(Access::Shared, rig.stream).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| rig.fill(&buffer, 2));
        until(|| rig.waiting() == 1);
        let others = scope.spawn(|| (0..100).all(|_| is_behind(rig.now(&buffer, Access::Shared))));
        assert!(others.join().unwrap(), "a reader passed the writer");
        let reader = scope.spawn(|| rig.expect(&buffer, 2));
        until(|| rig.waiting() == 2);
        drop(first);
        writer.join().unwrap();
        reader.join().unwrap();
    });
    assert_eq!((rig.waiting(), rig.manager.stats().waits), (0, 2));
    let waits = rig.manager.waits();
    assert_eq!(waits.len(), 2);
    assert!(waits.iter().all(|wait| wait.served && wait.waited_ns > 0), "{waits:?}");
    // The writer came first: it waited for readers, and the reader waited for it.
    assert!(matches!(waits[0].refused, LeaseRefused::Busy { .. }), "{}", waits[0]);
    rig.check();
}

#[test]
fn readers_that_take_turns_without_a_gap_do_not_starve_a_writer() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let written = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !written.load(Ordering::Relaxed) {
                    drop(buffer.lease(Access::Shared, rig.stream).unwrap());
                }
            });
        }
        for byte in 2..20 {
            rig.fill(&buffer, byte);
        }
        written.store(true, Ordering::Relaxed);
    });
    rig.expect(&buffer, 19);
    rig.check();
}

#[test]
fn a_large_set_is_served_though_small_ones_never_stop() {
    let rig = patient().build();
    let small: Vec<_> = (1..=3).map(|byte| rig.filled(MIB(16), byte)).collect();
    let large = rig.manager.buffer(MIB(56)).unwrap();
    let first = small[0].lease(Access::Shared, rig.stream).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| rig.fill(&large, 9));
        until(|| rig.waiting() == 1);
        let others = scope.spawn(|| {
            let mut tries = small.iter().cycle().take(100);
            tries.all(|one| is_behind(rig.now(one, Access::Shared)))
        });
        assert!(others.join().unwrap(), "a small one took its room");
        drop(first);
        waits.join().unwrap();
    });
    rig.expect(&large, 9);
    for (buffer, byte) in small.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn a_set_read_in_place_has_its_turn_for_what_comes() {
    let rig = patient().build();
    let column = spilled(&rig, MIB(40), 1);
    let table = rig.filled(MIB(48), 2);
    let first = table.lease(Access::Shared, rig.stream).unwrap();
    let set = [(&column, Access::Shared), (&table, Access::Exclusive)];
    std::thread::scope(|scope| {
        let builds = scope.spawn(|| {
            let lease = rig.manager.lease_in_place(&set, rig.stream).unwrap();
            assert!(lease.is_in_place(0) && !lease.is_in_place(1));
            assert_eq!(ends(&rig, &lease), [1, 1]);
            rig.sim.fill(rig.queue, lease.address(1), 9).unwrap();
        });
        until(|| rig.waiting() == 1);
        let others = scope.spawn(|| {
            let reads = [(&column, Access::Shared), (&table, Access::Shared)];
            let now = |set| rig.manager.lease_in_place_on(set, &[rig.stream], Instant::now());
            now(&reads[..1]).is_ok() && is_behind(now(&reads))
        });
        assert!(others.join().unwrap(), "readers in place share, and none passes for the table");
        drop(first);
        builds.join().unwrap();
    });
    assert_eq!((rig.waiting(), rig.manager.stats().waits), (0, 1));
    rig.expect(&table, 9);
    rig.expect(&column, 1);
    rig.check();
}

#[test]
fn whoever_gives_up_waiting_keeps_nobody_waiting() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let _held = buffer.lease(Access::Shared, rig.stream).unwrap();
    let soon = Duration::from_millis(20);
    let write = [(&buffer, Access::Exclusive)];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| rig.manager.lease_on(&write, &[rig.stream], soon).is_err());
        assert!(writer.join().unwrap());
        assert_eq!(rig.waiting(), 0);
        let reader = scope.spawn(|| rig.now(&buffer, Access::Shared).is_ok());
        assert!(reader.join().unwrap());
    });
    rig.check();
}

#[test]
fn a_thread_takes_a_second_lease_on_what_it_holds_though_a_writer_waits() {
    let rig = patient().build();
    let (buffer, other) = (rig.filled(PIECE, 1), rig.filled(PIECE, 2));
    let outer = buffer.lease(Access::Shared, rig.stream).unwrap();
    let both = [(&buffer, Access::Exclusive), (&other, Access::Exclusive)];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| rig.manager.lease(&both, rig.stream).map(drop));
        until(|| rig.waiting() == 1);
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
        drop(other.lease(Access::Shared, rig.stream).unwrap());
        assert_eq!(rig.waiting(), 1, "the writer waits on");
        drop(outer);
        writer.join().unwrap().unwrap();
    });
    rig.check();
}

#[test]
fn a_prefetch_does_not_pass_a_writer_who_waits() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Shared, rig.stream).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| rig.fill(&buffer, 2));
        until(|| rig.waiting() == 1);
        assert!(scope.spawn(|| buffer.prefetch().is_err()).join().unwrap());
        drop(held);
        writer.join().unwrap();
    });
    rig.check();
}

#[test]
fn a_write_comes_behind_a_copy_that_leaves_and_the_host_does_not_wait() {
    // The second copy needs the last blocks; the subscription reports that while the first one is
    // in flight.
    let rig = Arc::new(Plan { host: MIB(16), ..Plan::default() }.build());
    let (first, second) = (rig.filled(PIECE, 1), rig.filled(PIECE, 2));
    let (told, heard) = std::sync::mpsc::channel();
    let (weak, buffers) = (Arc::downgrade(&rig), [first.clone(), second.clone()]);
    let host = rig.spaces.space(SpaceId::host(0)).unwrap();
    let asked = AtomicBool::new(false);
    let subscription = host.subscribe(move |_, _| {
        let Some(rig) = weak.upgrade().filter(|_| !asked.swap(true, Ordering::Relaxed)) else {
            return;
        };
        let [first, second] = &buffers;
        let begin = rig.sim.now_ns();
        let lease = rig.now(first, Access::Exclusive);
        let given = lease.is_ok();
        if let Ok(lease) = lease {
            rig.sim.fill(rig.queue, lease.address(0), 9).unwrap();
        }
        let no_copy_was_waited_for = rig.sim.now_ns() < begin + 100_000;
        let refused = rig.now(second, Access::Exclusive);
        let begins = matches!(refused, Err(SpillError::Refused(LeaseRefused::Settling { .. })));
        told.send((given, no_copy_was_waited_for, begins)).unwrap();
    });
    rig.manager.spill(MIB(16));
    assert_eq!(heard.try_recv().unwrap(), (true, true, true));
    drop(subscription);
    assert_eq!(
        rig.manager.counters().evictions_cancelled,
        1,
        "it stayed, and left again with what was written"
    );
    assert_eq!((rig.manager.stats().waits, rig.manager.stats().failures), (0, 0));
    rig.expect(&first, 9);
    rig.expect(&second, 2);
    rig.check();
}

#[test]
fn writers_and_copies_out_beside_each_other_mix_nothing() {
    [false, true].into_iter().for_each(write_beside_copies);
}

/// Copies of a readable buffer go to memory that the device maps.
fn write_beside_copies(readable: bool) {
    let usual = patient();
    let config = SpillConfig { clean_after: Duration::ZERO, ..usual.config.clone() };
    let rig = Plan { config, ..usual }.build();
    let buffer = rig.filled(MIB(32), 1);
    if readable {
        buffer.readable_while_spilled().unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for cleans in [false, true] {
            let (rig, done) = (&rig, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    match cleans {
                        true => rig.manager.clean(MIB(32)),
                        false => rig.manager.spill(MIB(8)).freed,
                    };
                }
            });
        }
        for byte in 2..60 {
            rig.fill(&buffer, byte);
            rig.expect(&buffer, byte);
        }
        done.store(true, Ordering::Relaxed);
    });
    rig.manager.spill(MIB(64));
    rig.expect(&buffer, 59);
    assert_eq!(rig.manager.stats().failures, 0);
    rig.check();
}

/// Eight buffers of 16 MiB, spilled by four threads at once as far as they fit.
fn spilled_by_four(rig: &Rig) -> Vec<DeferrableBuffer> {
    let buffers: Vec<_> = (1..=8).map(|byte| rig.filled(MIB(16), byte)).collect();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| rig.manager.spill(MIB(32)));
        }
    });
    let stats = rig.manager.stats();
    assert_eq!((stats.failures, stats.given_up), (0, 0), "{stats:?}");
    buffers
}

#[test]
fn threads_that_send_contents_to_the_disk_at_once_fail_no_moves() {
    // All of the host is kept as staging for the disk, and one transfer may take all of it.
    let rig = Plan { limit: MIB(128), ..to_disk(None) }.build();
    let buffers = spilled_by_four(&rig);
    assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn threads_that_choose_at_once_promise_room_once() {
    // Room for half of it: a choice that counted on promised room would fail.
    let rig = Plan { limit: MIB(128), host: MIB(64), ..Plan::default() }.build();
    let buffers = spilled_by_four(&rig);
    // For a moment a copy has its blocks and the promise of them: a choice then takes less.
    rig.manager.spill(MIB(64));
    assert_eq!(rig.manager.census().spilled, MIB(64), "as much as there is room for");
    let stats = rig.manager.stats();
    assert_eq!((stats.failures, stats.given_up), (0, 0), "{stats:?}");
    drop(buffers);
    rig.check();
}

#[test]
fn a_disk_that_dies_is_told_with_its_error() {
    let io = Faulty::new();
    let rig = to_disk(Some(Arc::<Faulty>::clone(&io))).build();
    let buffers: Vec<_> = (1..=2).map(|byte| rig.filled(MIB(24), byte)).collect();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    io.set(|request| match request.direction {
        Direction::Write => Fault::Fail(EIO),
        Direction::Read => Fault::None,
    });
    let spilled = rig.manager.spill(MIB(48));
    let failed = spilled.failed.unwrap();
    assert!(failed.to_string().contains("did not go to the disk"), "{failed}");
    let told = rig.manager.failures();
    assert_eq!((told.len() as u64, &told[0]), (rig.manager.stats().failures, &failed));
    // What cannot leave is missing elsewhere; that error names the disk as well.
    let third = rig.manager.buffer(MIB(48)).unwrap();
    let refused = third.lease(Access::Exclusive, rig.stream).unwrap_err();
    assert!(refused.to_string().contains("did not go to the disk"), "{refused}");
    io.heal();
    let spilled = rig.manager.spill(MIB(48));
    assert_eq!((spilled.freed, spilled.failed), (MIB(48), None));
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

#[test]
fn what_finds_no_room_is_given_up_and_is_no_failure() {
    let rig = Plan { host: MIB(16), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(64), 5);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let spilled = rig.manager.spill(MIB(64));
    assert!(spilled.short.is_some() && spilled.failed.is_none(), "{spilled:?}");
    assert!(rig.manager.buffer(MIB(48)).unwrap().lease(Access::Shared, rig.stream).is_err());
    assert_eq!(rig.manager.stats().failures, 0);
    assert!(rig.manager.failures().is_empty());
    rig.expect(&buffer, 5);
    rig.check();
}
