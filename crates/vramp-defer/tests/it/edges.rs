//! What leaves the card and what stays: buffers by name, buffers in use by work, captures and callbacks, and pinned
//! memory.

use std::sync::atomic::{AtomicU64, Ordering};

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_alloc::sharing::{PinError, PinnedRange};
use vramp_defer::error::{EvictError, HeldError};
use vramp_defer::report::{Copies, PieceState};
use vramp_defer::{Access, BufferProgress, DeferrableBuffer, SpillError, SpillTier};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Kernel};
use vramp_tiers::Bytes;

use super::faulty::Hooked;
use super::*;

// --- Buffers that leave while work, captures, callbacks or failing calls are in flight ---

const SLOW_NS: u64 = 50_000_000;

/// Drops a buffer on the card while a kernel writes it.
fn dropped_in_use(rig: &Rig, len: Bytes) -> AddrRange {
    let buffer = rig.filled(len, 1);
    let range = buffer.addresses();
    let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let slow = Kernel::new("slow").writing(range).lasting(SLOW_NS);
    rig.sim.launch(rig.queue, slow).unwrap();
    rig.sim.fill(rig.queue, range, 0xEE).unwrap();
    drop(lease);
    range
}

/// Frees all of the card while work of another stream still writes it.
fn free_while_written(rig: &Rig) {
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    let block = rig.allocator.malloc(MIB(64), other).unwrap();
    let slow = Kernel::new("slow").writing(AddrRange::new(block.addr(), MIB(64)));
    rig.sim.launch(queue, slow.lasting(SLOW_NS)).unwrap();
    rig.sim.fill(queue, AddrRange::new(block.addr(), MIB(64)), 0xEE).unwrap();
    rig.allocator.free(block, other).unwrap();
}

#[test]
fn the_first_use_comes_behind_the_work_that_had_the_memory_before() {
    let rig = rig();
    free_while_written(&rig);
    let buffer = rig.filled(MIB(64), 7);
    rig.sim.advance(2 * SLOW_NS);
    rig.expect(&buffer, 7);
    rig.check();
}

#[test]
fn memory_of_a_lease_that_was_cancelled_is_lent_behind_the_work_that_had_it_before() {
    let rig = rig();
    free_while_written(&rig);
    let buffer = rig.manager.buffer(MIB(64)).unwrap();
    buffer.lease(Access::Exclusive, rig.stream).unwrap().cancel();
    let third = rig.allocator.create_stream().unwrap();
    let block = rig.allocator.malloc(MIB(64), third).unwrap();
    let range = AddrRange::new(block.addr(), MIB(64));
    let queue = rig.allocator.stream(third).unwrap();
    rig.sim.fill(queue, range, 3).unwrap();
    rig.sim.advance(2 * SLOW_NS);
    let last = AddrRange::new(range.start + (MIB(64) - Bytes::new(1)), Bytes::new(1));
    assert_eq!(rig.sim.peek(last).unwrap(), [3]);
    rig.allocator.free(block, third).unwrap();
    rig.check();
}

#[test]
fn what_is_leased_to_be_read_cannot_be_said_to_be_written() {
    let rig = rig();
    let buffer = rig.filled(MIB(16), 1);
    let mut lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let refused = lease.wrote_only(0, Bytes::ZERO, MIB(1)).unwrap_err();
    assert!(refused.to_string().contains("exclusive"), "{refused}");
    drop(lease);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn memory_of_a_manager_that_ends_is_nobodys_before_the_work_on_it_is_over() {
    let rig = rig();
    dropped_in_use(&rig, MIB(64));
    let Rig { sim, allocator, manager, .. } = rig;
    let begin = sim.now_ns();
    drop(manager);
    assert!(sim.now_ns() > begin + SLOW_NS / 2, "the kernel was waited for");
    let other = allocator.create_stream().unwrap();
    let block = allocator.malloc(MIB(64), other).unwrap();
    let range = AddrRange::new(block.addr(), MIB(64));
    let queue = allocator.stream(other).unwrap();
    sim.fill(queue, range, 9).unwrap();
    sim.advance(2 * SLOW_NS);
    let last = AddrRange::new(range.start + (MIB(64) - Bytes::new(1)), Bytes::new(1));
    assert_eq!(sim.peek(last).unwrap(), [9]);
    allocator.free(block, other).unwrap();
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
    assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
}

#[test]
fn memory_of_buffers_that_are_gone_serves_before_others_leave() {
    let rig = rig();
    dropped_in_use(&rig, MIB(32));
    let kept = rig.filled(MIB(32), 2);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let block = rig.allocator.malloc(MIB(24), rig.stream).unwrap();
    assert!(kept.is_resident(), "{:?}", rig.manager.census());
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn contents_of_buffers_that_are_gone_are_not_copied_out() {
    let rig = rig();
    dropped_in_use(&rig, MIB(64));
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    assert_eq!(rig.manager.stats().to_host_bytes, 0);
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn a_question_that_fails_forgets_no_answer_before_it() {
    for n in 1..=4 {
        let rig = rig();
        let other = rig.allocator.create_stream().unwrap();
        let buffers: Vec<_> = [rig.stream, other]
            .into_iter()
            .map(|stream| {
                let buffer = rig.manager.buffer(MIB(32)).unwrap();
                let lease = buffer.lease(Access::Exclusive, stream).unwrap();
                (buffer, lease)
            })
            .collect();
        // No query has seen yet that the work of either is complete.
        let buffers: Vec<_> = buffers.into_iter().map(|(buffer, _)| buffer).collect();
        for stream in [rig.stream, other] {
            rig.sim.synchronize_stream(rig.allocator.stream(stream).unwrap()).unwrap();
        }
        rig.fail(FaultPlan::nth_of(Call::Query, n).with_code(304));
        rig.manager.census();
        rig.fail(FaultPlan::none());
        let (done, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let freed = rig.manager.spill(MIB(64)).freed;
            rig.check();
            done.send(freed).unwrap();
            drop(buffers);
        });
        let freed = told.recv_timeout(std::time::Duration::from_secs(20));
        assert_eq!(freed, Ok(MIB(64)), "the {n}th question failed");
    }
}

#[test]
fn a_lease_that_is_dropped_while_its_stream_captures_ends_behind_the_capture() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    let range = lease.address(0);
    let slow = Kernel::new("slow").reading(range).lasting(SLOW_NS);
    rig.sim.launch(rig.queue, slow).unwrap();
    rig.sim.begin_capture(rig.queue, CaptureMode::Relaxed).unwrap();
    drop(lease);
    assert_eq!(rig.manager.spill(MIB(32)).freed, Bytes::ZERO);
    drop(buffer.clone());
    rig.sim.end_capture(rig.queue).unwrap();
    assert_eq!(rig.sim.invalidated_captures(), 0);
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn nothing_is_asked_while_a_stream_captures_for_all_threads() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 1);
    let other = rig.allocator.create_stream().unwrap();
    let queue = rig.allocator.stream(other).unwrap();
    rig.sim.begin_capture(queue, CaptureMode::Global).unwrap();
    rig.manager.census();
    rig.manager.spill(MIB(8));
    rig.manager.clean(MIB(8));
    drop(rig.manager.buffer(MIB(8)).unwrap());
    rig.sim.end_capture(queue).unwrap();
    assert_eq!(rig.sim.invalidated_captures(), 0);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn who_is_told_of_pressure_may_ask_the_manager() {
    let rig = Arc::new(Plan { budget: true, ..Plan::default() }.build());
    let heard = Arc::new(AtomicU64::new(0));
    let subscriptions: Vec<_> = [SpaceId::gpu(0), SpaceId::host(0)]
        .into_iter()
        .map(|id| {
            let (told, heard) = (Arc::downgrade(&rig), Arc::clone(&heard));
            rig.spaces.space(id).unwrap().subscribe(move |_, _| {
                heard.fetch_add(1, Ordering::Relaxed);
                if let Some(rig) = told.upgrade() {
                    rig.manager.stats();
                    rig.manager.relieve_host(Bytes::mib(1));
                }
            })
        })
        .collect();
    let (done, told) = std::sync::mpsc::channel();
    let uses = Arc::clone(&rig);
    std::thread::spawn(move || {
        let buffers: Vec<_> = (1..=4).map(|byte| uses.filled(MIB(56), byte)).collect();
        drop(buffers);
        uses.sim.synchronize_stream(uses.queue).unwrap();
        uses.manager.census();
        uses.check();
        done.send(()).unwrap();
    });
    told.recv_timeout(std::time::Duration::from_secs(20)).expect("a callback met a lock");
    assert!(heard.load(Ordering::Relaxed) > 0);
    drop(subscriptions);
}

#[test]
fn clean_contents_leave_without_a_copy_even_if_the_host_is_full() {
    let rig = Plan { host: MIB(128), ..Plan::default() }.build();
    let buffers: Vec<_> = (1..=4).map(|byte| rig.filled(MIB(32), byte)).collect();
    let mut copied = Vec::new();
    for _ in 0..4 {
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, byte);
        }
        assert_eq!(rig.manager.counters().copies_dropped, 0);
        copied.push(rig.manager.stats().to_host_bytes);
    }
    assert_eq!(copied, vec![MIB(128).count(); 4]);
    rig.check();
}

#[test]
fn the_host_reads_and_writes_even_if_copies_that_are_not_needed_fill_it() {
    let rig = Plan { host: MIB(32), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(32), 1);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.sim.advance(1_000_000_000);
    rig.manager.clean(MIB(32));
    let mut bytes = [0; 4];
    buffer.read(MIB(3), &mut bytes).unwrap();
    assert_eq!(bytes, [1; 4]);
    buffer.write(MIB(3), &[2; 2]).unwrap();
    buffer.read(MIB(3), &mut bytes).unwrap();
    assert_eq!(bytes, [2, 2, 1, 1]);
    rig.check();
}

// --- Spilling one buffer by its name: what leaves, where it goes, and what refuses ---

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

// --- Memory that a network card or another process holds physically stays where it is ---

/// Leases a buffer and pins it meanwhile, as a registration does.
fn pinned(rig: &Rig, buffer: &DeferrableBuffer) -> PinnedRange {
    let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
    rig.allocator.pin_range(lease.address(0)).unwrap()
}

#[test]
fn a_buffer_with_pinned_memory_stays_and_others_are_spilled() {
    let rig = rig();
    let [kept, other] = [1, 2].map(|byte| rig.filled(MIB(24), byte));
    let pin = pinned(&rig, &kept);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let spilled = rig.manager.spill(MIB(48));
    assert_eq!(spilled.freed, MIB(24));
    assert_eq!(spilled.short.unwrap().pinned, MIB(24));
    assert!(kept.is_resident() && !other.is_resident());
    assert_eq!(rig.manager.clean(MIB(64)), Bytes::ZERO, "it may be written from outside");
    let block = rig.allocator.malloc(MIB(40), rig.stream).unwrap();
    assert!(kept.is_resident());
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
    drop(pin);
    rig.expect(&other, 2);
    assert_eq!(rig.manager.spill(MIB(64)).freed, MIB(48));
    assert!(!kept.is_resident());
    rig.expect(&kept, 1);
    rig.check();
}

#[test]
fn a_lease_waits_for_the_room_of_a_pinned_buffer_until_it_is_unpinned() {
    let rig = rig();
    let [kept, other] = [1, 2].map(|byte| rig.filled(MIB(40), byte));
    let pin = pinned(&rig, &kept);
    let refused = other.lease(Access::Shared, rig.stream).map(drop);
    assert!(refused.is_err(), "{refused:?}");
    drop(pin);
    rig.expect(&other, 2);
    rig.expect(&kept, 1);
    rig.check();
}

#[test]
fn a_group_with_a_pinned_buffer_stays_as_a_whole() {
    let rig = rig();
    let group = rig.manager.group();
    let buffers: Vec<_> = (1..=2)
        .map(|byte| {
            let buffer = group.buffer(MIB(2)).unwrap();
            rig.fill(&buffer, byte);
            buffer
        })
        .collect();
    let pin = pinned(&rig, &buffers[0]);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(8)).freed, Bytes::ZERO);
    assert!(buffers.iter().all(DeferrableBuffer::is_resident));
    drop(pin);
    assert_eq!(rig.manager.spill(MIB(8)).freed, MIB(4), "the memory of both");
    assert!(!buffers.iter().any(DeferrableBuffer::is_resident));
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
}

/// The pin comes while copies of the buffer are under way: it is refused, and nothing is left half.
#[test]
fn a_pin_during_a_spill_is_refused_and_one_under_the_next_lease_is_not() {
    for after_wait in [false, true] {
        let sim = Arc::new(simulator().build());
        let hooked = Arc::new(Hooked::on(Arc::clone(&sim)));
        let rig = Plan::default().build_behind(hooked.clone(), sim);
        let buffer = rig.filled(MIB(32), 1);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.census();
        let (allocator, range) = (Arc::downgrade(&rig.allocator), buffer.addresses());
        let (sender, refused) = std::sync::mpsc::channel();
        let pin = move || {
            let allocator = allocator.upgrade().unwrap();
            let pin = std::thread::spawn(move || allocator.pin_range(range).map(drop));
            sender.send(pin.join().unwrap()).unwrap();
        };
        match after_wait {
            true => hooked.after_wait(pin),
            false => hooked.before_record(pin),
        }
        assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32), "{after_wait}");
        assert!(matches!(refused.recv().unwrap(), Err(PinError::Spilled { .. })));
        assert!(rig.allocator.pin_range(range).is_err(), "its contents are elsewhere");
        let pin = pinned(&rig, &buffer);
        assert_eq!(rig.manager.spill(MIB(32)).freed, Bytes::ZERO);
        drop(pin);
        rig.expect(&buffer, 1);
        rig.check();
    }
}

/// Pins come and go while kernels, leases and spills run. What is pinned is at its address, with its
/// contents.
#[test]
fn pins_leases_and_spills_at_random_move_nothing_that_is_pinned() {
    for seed in vramp_testing::seeds(6) {
        let mut random = fastrand::Rng::with_seed(seed);
        let rig = Plan {
            config: SpillConfig { patience: Duration::ZERO, ..Plan::default().config },
            ..Plan::default()
        }
        .build();
        let buffers: Vec<_> = (0..5).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
        let mut bytes = [None; 5];
        let mut pins: Vec<(usize, PinnedRange)> = Vec::new();
        for step in 1..=100_u8 {
            let at = random.usize(..5);
            match random.u32(..8) {
                0 | 1 => {
                    let Ok(lease) = buffers[at].lease(Access::Exclusive, rig.stream) else {
                        continue;
                    };
                    let busy = Kernel::new("busy").writing(lease.address(0)).lasting(50_000);
                    rig.sim.launch(rig.queue, busy).unwrap();
                    rig.sim.fill(rig.queue, lease.address(0), step).unwrap();
                    bytes[at] = Some(step);
                }
                2 => {
                    let Ok(lease) = buffers[at].lease(Access::Shared, rig.stream) else { continue };
                    pins.push((at, rig.allocator.pin_range(lease.address(0)).unwrap()));
                }
                // Without a lease: it is refused, or the contents are there.
                3 => {
                    if let Ok(pin) = rig.allocator.pin_range(buffers[at].addresses()) {
                        pins.push((at, pin));
                    }
                }
                4 if !pins.is_empty() => drop(pins.swap_remove(random.usize(..pins.len()))),
                5 => drop(rig.manager.clean(MIB(16))),
                6 => drop(
                    rig.allocator
                        .malloc(MIB(8), rig.stream)
                        .map(|block| rig.allocator.free(block, rig.stream)),
                ),
                _ => drop(rig.manager.spill(MIB(random.u64(1..64)))),
            }
            rig.check();
            rig.sim.synchronize_stream(rig.queue).unwrap();
            for (at, pin) in &pins {
                assert!(buffers[*at].is_resident(), "a pinned buffer left");
                if let Some(byte) = bytes[*at] {
                    let one = AddrRange::new(pin.range().start, Bytes::new(1));
                    assert_eq!(rig.sim.peek(one).unwrap(), [byte]);
                }
            }
        }
        drop(pins);
        for (buffer, byte) in buffers.iter().zip(bytes) {
            byte.into_iter().for_each(|byte| rig.expect(buffer, byte));
        }
        rig.check();
    }
}
