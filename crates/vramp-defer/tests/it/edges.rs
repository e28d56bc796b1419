//! Buffers that leave while work, captures, callbacks or failing calls are in flight.

use std::sync::atomic::{AtomicU64, Ordering};

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_driver::Call;
use vramp_driver::sim::Kernel;

use super::*;

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
