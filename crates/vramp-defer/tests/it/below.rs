//! Failing driver calls, and failures below the card: disks, bits, callbacks, and shutdowns. Each buffer stays whole.

use std::io::{Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_defer::SpillError;
use vramp_driver::Call;
use vramp_host::{Direction, IoRequest};
use vramp_tiers::disk::DiskTierError;
use vramp_tiers::movers::MoveError;

use super::faulty::{EINTR, EIO, ENOSPC, Fault, Faulty};
use super::*;

// --- Failures below the card: disks, bits, callbacks, and shutdowns. Each buffer stays whole, where it was
// or where it went ---

/// All of a host of one step is kept as staging for the disk.
pub fn to_disk(io: Option<Arc<dyn BlockIo>>) -> Plan {
    Plan { host: MIB(4), disk: Some(MIB(512)), io, ..Plan::default() }
}

fn failing() -> (Arc<Faulty>, Rig) {
    let io = Faulty::new();
    let rig = to_disk(Some(Arc::<Faulty>::clone(&io))).build();
    (io, rig)
}

pub fn fail(direction: Direction, code: i32) -> impl FnMut(&IoRequest) -> Fault + Send {
    move |request| if request.direction == direction { Fault::Fail(code) } else { Fault::None }
}

/// Waits until a condition holds; fails after a minute.
pub fn until(so: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the condition never held");
        vramp_testing::moment();
    }
}

impl Rig {
    pub fn total(&self, id: SpaceId) -> Bytes {
        self.spaces.space(id).unwrap().total()
    }

    /// Checks that nothing is left of any buffer.
    pub fn expect_nothing(&self) {
        self.sim.synchronize_stream(self.queue).unwrap();
        self.manager.census();
        self.manager.relieve_host(MIB(4096));
        let census = self.manager.census();
        assert_eq!((census.buffers, census.occupied, census.moves), (0, Bytes::ZERO, 0));
        assert_eq!(self.total(SpaceId::host(0)), Bytes::ZERO);
        assert_eq!(self.total(SpaceId::disk(0)), Bytes::ZERO);
        self.check();
    }
}

#[test]
fn a_disk_that_fails_while_buffers_leave_keeps_them_on_the_card() {
    for code in [EIO, ENOSPC] {
        let (io, rig) = failing();
        let buffers: Vec<_> = (1..=2).map(|byte| rig.filled(MIB(24), byte)).collect();
        rig.sim.synchronize_stream(rig.queue).unwrap();
        io.set(fail(Direction::Write, code));
        assert_eq!(rig.manager.spill(MIB(48)).freed, Bytes::ZERO);
        assert!(buffers.iter().all(DeferrableBuffer::is_resident));
        assert!(rig.manager.stats().failures > 0);
        assert!(rig.allocator.malloc(MIB(40), rig.stream).is_err());
        rig.check();
        io.heal();
        assert_eq!(rig.manager.spill(MIB(48)).freed, MIB(48));
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, byte);
        }
        drop(buffers);
        rig.expect_nothing();
    }
}

#[test]
fn whichever_transfer_of_the_disk_fails_each_buffer_is_whole() {
    let faults = [(Direction::Write, EIO), (Direction::Write, ENOSPC), (Direction::Read, EIO)];
    for (direction, code) in faults {
        for good in [0, 1, 7, 8, 20, 40] {
            let (io, rig) = failing();
            let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(24), byte)).collect();
            let mut seen = 0;
            io.set(move |request| {
                seen += u32::from(request.direction == direction);
                match request.direction == direction && seen > good {
                    true => Fault::Fail(code),
                    false => Fault::None,
                }
            });
            for buffer in &buffers {
                // It may fail.
                let _ = buffer.lease(Access::Shared, rig.stream);
                let _ = buffer.prefetch();
            }
            rig.manager.spill(MIB(64));
            io.heal();
            assert!(rig.manager.stats().failures > 0, "{direction:?} {code} {good}");
            rig.check();
            for (buffer, byte) in buffers.iter().zip(1..) {
                rig.expect(buffer, byte);
            }
            drop(buffers);
            rig.expect_nothing();
        }
    }
}

#[test]
fn failures_of_card_and_disk_at_random_lose_no_contents_and_no_bytes_of_any_budget() {
    for seed in vramp_testing::seeds(4) {
        let io = Faulty::new();
        let engine: Arc<dyn BlockIo> = Arc::<Faulty>::clone(&io);
        let (disk, host) = (Some(MIB(512)), MIB(if seed % 2 == 0 { 16 } else { 48 }));
        let rig = Plan { host, disk, budget: true, io: Some(engine), ..Plan::default() }.build();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut buffers: Vec<_> = (1..=5).map(|byte| (rig.filled(MIB(20), byte), byte)).collect();
        let mut dice = fastrand::Rng::with_seed(seed + 1000);
        io.set(move |_| match dice.u32(..30) {
            0 => Fault::Fail(EIO),
            1 => Fault::Fail(ENOSPC),
            2 | 3 => Fault::Short(Bytes::kib(4)),
            4 => Fault::Fail(EINTR),
            _ => Fault::None,
        });
        for byte in 10..60 {
            let call = CALLS[random.usize(..CALLS.len())];
            rig.fail(FaultPlan::nth_of(call, random.u64(1..20)).with_code(304));
            let (buffer, holds) = &mut buffers[random.usize(..5)];
            match random.u32(..5) {
                0 | 1 => {
                    let lease = buffer.lease(Access::Exclusive, rig.stream);
                    // The buffer's fill does not fail, so the test tracks what was written.
                    rig.fail(FaultPlan::none());
                    if let Ok(lease) = lease {
                        rig.sim.fill(rig.queue, lease.address(0), byte).unwrap();
                        *holds = byte;
                    }
                }
                2 => drop(rig.manager.spill(MIB(random.u64(1..64)))),
                3 => drop(buffer.prefetch()),
                _ => drop(rig.manager.relieve_host(MIB(8))),
            }
            rig.manager.audit().unwrap();
        }
        rig.fail(FaultPlan::none());
        io.heal();
        for (buffer, byte) in &buffers {
            rig.expect(buffer, *byte);
        }
        drop(buffers);
        rig.expect_nothing();
        assert_eq!(rig.total(SpaceId::gpu(0)), Bytes::ZERO);
    }
}

#[test]
fn a_disk_that_cannot_be_read_refuses_the_lease_and_the_contents_stay_below() {
    let (io, rig) = failing();
    let buffer = rig.filled(MIB(24), 3);
    assert_eq!(rig.manager.spill(MIB(24)).freed, MIB(24));
    io.set(fail(Direction::Read, EIO));
    for _ in 0..3 {
        let error = buffer.lease(Access::Exclusive, rig.stream).unwrap_err();
        assert!(matches!(error, SpillError::Move(MoveError::Disk { .. })), "{error}");
        assert!(error.to_string().contains("reading"), "{error}");
        assert!(!buffer.is_resident());
        rig.check();
    }
    assert_eq!(rig.manager.census().leases, 0);
    io.heal();
    rig.expect(&buffer, 3);
    drop(buffer);
    rig.expect_nothing();
}

/// Flips one bit of the only file, without the store's knowledge.
pub fn flip(rig: &Rig, offset: u64) {
    let path = std::fs::read_dir(rig.own.path()).unwrap().next().unwrap().unwrap().path();
    let byte = std::fs::read(&path).unwrap()[usize::try_from(offset).unwrap()];
    let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(&[byte ^ 0x10]).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_bit_that_flipped_on_the_disk_is_found_before_anybody_sees_it() {
    let rig = Plan { names: FileNames::Shown, ..to_disk(None) }.build();
    let buffer = rig.filled(MIB(16), 3);
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    let at = 4096 + (3 << 20) + 77;
    flip(&rig, at);
    let error = buffer.lease(Access::Shared, rig.stream).unwrap_err();
    let SpillError::Damaged { buffer: damaged, error: found } = &error else { panic!("{error}") };
    assert!(matches!(found, DiskTierError::Corrupt { .. }), "{error}");
    assert_eq!(*damaged, buffer.id());
    assert!(error.to_string().contains("Access::Overwrite or after discard"), "{error}");
    assert!(!buffer.is_resident(), "what is wrong is never lent");
    flip(&rig, at);
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn a_damaged_buffer_can_be_written_after_it_was_discarded() {
    let rig = Plan { names: FileNames::Shown, ..to_disk(None) }.build();
    let buffer = rig.filled(MIB(16), 3);
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    flip(&rig, 4096 + (3 << 20));
    let refused = buffer.lease(Access::Exclusive, rig.stream).map(drop);
    assert!(matches!(refused, Err(SpillError::Damaged { .. })), "{refused:?}");
    buffer.discard().unwrap();
    rig.fill(&buffer, 4);
    rig.expect(&buffer, 4);
    drop(buffer);
    rig.expect_nothing();
}

#[test]
fn of_a_set_whose_last_buffer_cannot_come_back_the_others_are_whole_and_held_by_nobody() {
    let rig = Plan { names: FileNames::Shown, ..to_disk(None) }.build();
    let (good, bad) = (rig.filled(MIB(16), 1), rig.filled(MIB(16), 2));
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    // The lease shows which of the two lies there.
    let at = 4096 + (20 << 20);
    flip(&rig, at);
    let set = [(&good, Access::Exclusive), (&bad, Access::Exclusive)];
    for _ in 0..2 {
        rig.manager.lease(&set, rig.stream).unwrap_err();
        let census = rig.manager.census();
        assert_eq!((census.leases, census.moves, census.restoring), (0, 0, Bytes::ZERO));
    }
    let alone = [&good, &bad].map(|buffer| buffer.lease(Access::Shared, rig.stream).is_ok());
    assert_eq!(alone.iter().filter(|came| **came).count(), 1);
    flip(&rig, at);
    rig.expect(&good, 1);
    rig.expect(&bad, 2);
    drop((good, bad));
    rig.expect_nothing();
}

#[test]
fn host_copies_stay_where_the_disk_takes_none() {
    for code in [EIO, ENOSPC] {
        let io = Faulty::new();
        let engine: Arc<dyn BlockIo> = Arc::<Faulty>::clone(&io);
        let plan = Plan { disk: Some(MIB(512)), io: Some(engine), ..Plan::default() };
        let rig = plan.build();
        let buffer = rig.filled(MIB(48), 9);
        assert_eq!(rig.manager.spill(MIB(48)).freed, MIB(48));
        io.set(fail(Direction::Write, code));
        assert_eq!(rig.manager.relieve_host(MIB(48)), Bytes::ZERO);
        assert_eq!(rig.manager.census().spilled_host, MIB(48));
        io.heal();
        assert_eq!(rig.manager.relieve_host(MIB(48)), MIB(48));
        assert_eq!(rig.manager.census().spilled_disk, MIB(48));
        rig.expect(&buffer, 9);
        drop(buffer);
        rig.expect_nothing();
    }
}

#[test]
fn a_disk_without_blocks_keeps_buffers_on_the_card() {
    let (io, rig) = failing();
    io.room.store(0, Ordering::Relaxed);
    let buffer = rig.filled(MIB(24), 4);
    assert_eq!(rig.manager.spill(MIB(24)).freed, Bytes::ZERO);
    assert!(buffer.is_resident());
    io.room.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(rig.manager.spill(MIB(24)).freed, MIB(24));
    rig.expect(&buffer, 4);
    drop(buffer);
    rig.expect_nothing();
}

#[test]
fn threads_that_meet_a_failing_disk_lose_no_contents() {
    for seed in 0..3 {
        let (io, rig) = failing();
        let mut dice = fastrand::Rng::with_seed(seed);
        io.set(move |_| if dice.u32(..25) == 0 { Fault::Fail(EIO) } else { Fault::None });
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let rig = &rig;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed * 10 + thread);
                    let stream = rig.allocator.create_stream().unwrap();
                    let queue = rig.allocator.stream(stream).unwrap();
                    let buffer = rig.manager.buffer(MIB(20)).unwrap();
                    let mut holds = None;
                    for byte in 0..40 {
                        if random.bool() {
                            rig.manager.spill(MIB(random.u64(1..64)));
                        }
                        let Ok(lease) = buffer.lease(Access::Exclusive, stream) else { continue };
                        rig.sim.synchronize_stream(queue).unwrap();
                        let last = lease.address(0).start + (MIB(20) - Bytes::new(1));
                        let last = AddrRange::new(last, Bytes::new(1));
                        if let Some(byte) = holds.replace(byte) {
                            assert_eq!(rig.sim.peek(last).unwrap(), [byte]);
                        }
                        rig.sim.fill(queue, lease.address(0), byte).unwrap();
                    }
                });
            }
        });
        io.heal();
        rig.expect_nothing();
    }
}

#[test]
fn a_buffer_that_is_dropped_while_it_is_written_leaves_nothing_behind() {
    let (io, rig) = failing();
    let buffer = rig.filled(MIB(24), 1);
    let kept = rig.filled(MIB(24), 2);
    let view = kept.view(MIB(8), MIB(4)).unwrap();
    io.close_gate();
    std::thread::scope(|scope| {
        let spills = scope.spawn(|| rig.manager.spill(MIB(48)));
        until(|| rig.manager.census().leaving == MIB(48));
        drop((buffer, kept));
        assert_eq!(rig.manager.census().buffers, 2, "one is being written, one has a view");
        io.open_gate();
        assert_eq!(spills.join().unwrap().freed, MIB(48));
    });
    rig.expect(&view, 2);
    drop(view);
    rig.expect_nothing();
}

#[test]
fn a_buffer_that_is_dropped_on_its_way_from_host_to_disk_leaves_nothing_behind() {
    let io = Faulty::new();
    let engine: Arc<dyn BlockIo> = Arc::<Faulty>::clone(&io);
    let rig = Plan { disk: Some(MIB(512)), io: Some(engine), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(32), 1);
    rig.manager.spill(MIB(32));
    io.close_gate();
    std::thread::scope(|scope| {
        let lowers = scope.spawn(|| rig.manager.relieve_host(MIB(32)));
        until(|| !rig.manager.census().pushing.is_zero());
        drop(buffer);
        io.open_gate();
        lowers.join().unwrap();
    });
    rig.expect_nothing();
}

#[test]
fn a_lease_on_what_is_being_written_to_disk_keeps_it_on_the_card() {
    let (io, rig) = failing();
    let buffer = rig.filled(MIB(24), 1);
    io.close_gate();
    std::thread::scope(|scope| {
        let spills = scope.spawn(|| rig.manager.spill(MIB(24)));
        until(|| rig.manager.census().leaving == MIB(24));
        let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
        let writer = buffer.lease(Access::Exclusive, rig.stream).unwrap_err();
        assert!(writer.to_string().contains("no lease"), "it waits until its deadline: {writer}");
        io.open_gate();
        assert_eq!(spills.join().unwrap().freed, Bytes::ZERO);
        drop(lease);
    });
    rig.fill(&buffer, 2);
    rig.manager.spill(MIB(24));
    rig.expect(&buffer, 2);
    drop(buffer);
    rig.expect_nothing();
}

#[test]
fn a_shutdown_ends_every_wait_and_loses_no_buffer() {
    let rig = Plan { budget: true, ..Plan::default() }.build();
    let buffers: Vec<_> = (1..=2).map(|byte| rig.filled(MIB(24), byte)).collect();
    let gpu = rig.spaces.space(SpaceId::gpu(0)).unwrap();
    let leases: Vec<_> =
        buffers.iter().map(|buffer| buffer.lease(Access::Shared, rig.stream).unwrap()).collect();
    std::thread::scope(|scope| {
        let waits: Vec<_> =
            (0..8).map(|_| scope.spawn(|| gpu.request(MIB(40)).wait().map(drop))).collect();
        until(|| rig.spaces.waiting() == 8);
        rig.spaces.shutdown();
        for wait in waits {
            wait.join().unwrap().unwrap_err();
        }
    });
    drop(leases);
    rig.manager.spill(MIB(64));
    rig.check();
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    drop(buffers);
    rig.expect_nothing();
    assert_eq!(gpu.total(), Bytes::ZERO);
}

#[test]
fn callbacks_that_panic_while_buffers_move_are_contained() {
    let rig = Plan { budget: true, host: MIB(96), disk: Some(MIB(512)), ..Plan::default() }.build();
    let heard = Arc::new(AtomicU64::new(0));
    let spaces = [SpaceId::gpu(0), SpaceId::host(0)].map(|id| rig.spaces.space(id).unwrap());
    let listens: Vec<_> = spaces
        .iter()
        .map(|space| {
            let heard = Arc::clone(&heard);
            space.subscribe(move |_, _| {
                heard.fetch_add(1, Ordering::Relaxed);
                panic!("a listener that gives up");
            })
        })
        .collect();
    let helps: Vec<_> = spaces
        .iter()
        .map(|space| {
            let heard = Arc::clone(&heard);
            space.register_spiller(
                vramp_tiers::Priority(9),
                move |_: &vramp_tiers::spill::SpillRequest<'_>| {
                    heard.fetch_add(1, Ordering::Relaxed);
                    panic!("a spiller that gives up")
                },
            )
        })
        .collect();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(48), byte)).collect();
    let reserved = spaces[0].request(MIB(40)).wait().unwrap();
    drop(reserved);
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    assert!(heard.load(Ordering::Relaxed) > 0);
    assert!(rig.spaces.panics() > 0);
    drop((listens, helps, buffers));
    rig.expect_nothing();
}

#[test]
fn a_dead_disk_is_tried_a_few_times_and_used_again_once_it_heals() {
    for budget in [false, true] {
        let io = Faulty::new();
        let usual = to_disk(Some(Arc::<Faulty>::clone(&io)));
        let longest = SpillConfig::default().disk_backoff_max;
        let config = SpillConfig { disk_backoff_max: longest, ..usual.config.clone() };
        let rig = Plan { budget, config, ..usual }.build();
        let writes = Arc::new(AtomicU64::new(0));
        let idle = rig.filled(MIB(48), 1);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        let counted = Arc::clone(&writes);
        io.set(move |request| {
            let is_write = request.direction == Direction::Write;
            counted.fetch_add(u64::from(is_write), Ordering::Relaxed);
            if is_write { Fault::Fail(EIO) } else { Fault::None }
        });
        let other = rig.manager.buffer(MIB(48)).unwrap();
        // It waits 300 ms for memory.
        let error = other.lease(Access::Exclusive, rig.stream).unwrap_err();
        assert!(error.to_string().contains("meanwhile"), "{error}");
        assert!(error.to_string().contains("did not go to the disk"), "{error}");
        let stats = rig.manager.stats();
        assert!((1..=8).contains(&stats.failures), "{stats:?}");
        assert!((1..=8).contains(&stats.disk_backoffs), "{stats:?}");
        let files = rig.store.as_ref().unwrap().stats().extents.backings;
        assert!(files <= 16, "{files} files");
        // A call that names the disk tries it, and says what failed.
        let before = writes.load(Ordering::Relaxed);
        let error = idle.spill_to(vramp_defer::SpillTier::Disk).unwrap_err();
        assert!(matches!(error, SpillError::NotSpilled(_)), "{error}");
        assert!(writes.load(Ordering::Relaxed) > before);
        io.heal();
        let set = [(&other, Access::Exclusive)];
        drop(rig.manager.lease_on(&set, &[rig.stream], LONG).unwrap());
        drop(other);
        rig.expect(&idle, 1);
        rig.check();
    }
}

// --- faults ---

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
