//! Leases and requests of pools beside each other: who waits, who gives way. A wait that never ends fails the test.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use vramp_alloc::{Allocation, Allocator, Driver};
use vramp_core::AddrRange;
use vramp_defer::{Access, DeferrableBuffer, LeaseOwner, SpillError};
use vramp_tiers::regions::{PauseOptions, Phase, Region, RegionOptions, Regions};
use vramp_tiers::reserve::RetryPolicy;
use vramp_tiers::{Bytes, Deadline, SpaceId};

use super::below::until;
use super::*;

// --- Leases without a deadline, when nothing can leave the card. A wait that never ends fails the test ---

/// A card of 64 MiB, of which leases have 56, above a host of 16 MiB.
fn narrow(budget: bool) -> Arc<Rig> {
    let usual = patient();
    let config = SpillConfig { capacity: Some(MIB(56)), ..usual.config.clone() };
    Arc::new(Plan { budget, host: MIB(16), config, ..usual }.build())
}

type Leased = Result<(), SpillError>;

/// Leases in a thread of its own.
fn leasing(
    rig: &Arc<Rig>,
    buffer: &DeferrableBuffer,
    deadline: Deadline,
) -> mpsc::Receiver<Leased> {
    let (ends, ended) = mpsc::channel();
    let (rig, buffer) = (Arc::clone(rig), buffer.clone());
    thread::spawn(move || {
        let set = [(&buffer, Access::Exclusive)];
        let leased = rig.manager.lease_on(&set, &[rig.stream], deadline).map(drop);
        // The test may have ended.
        let _ = ends.send(leased);
    });
    ended
}

fn expect_refused(ended: &mpsc::Receiver<Leased>) {
    let leased = ended.recv_timeout(LONG).expect("it is refused, and does not wait for ever");
    let error = leased.unwrap_err();
    assert!(matches!(error, SpillError::NothingCanLeave { .. }), "{error}");
    assert!(error.to_string().contains("drop or discard buffers"), "{error}");
}

/// Waits until the attempts of a request are over, so that it only waits.
fn expect_waiting(rig: &Rig, ended: &mpsc::Receiver<Leased>) {
    let retries = u64::from(RetryPolicy::default().max_retries);
    until(|| rig.manager.stats().spills > retries + 1);
    let leased = ended.recv_timeout(std::time::Duration::from_millis(400));
    assert!(leased.is_err(), "it waits: {leased:?}");
}

#[test]
fn a_lease_without_a_deadline_is_refused_when_all_is_idle_and_nothing_can_leave() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let idle = rig.filled(MIB(48), 1);
        let wanted = rig.manager.buffer(MIB(48)).unwrap();
        expect_refused(&leasing(&rig, &wanted, Deadline::NEVER));
        // One with a deadline waits until it.
        let soon = Deadline::from(std::time::Duration::from_millis(50));
        let error = leasing(&rig, &wanted, soon).recv_timeout(LONG).unwrap().unwrap_err();
        assert!(!matches!(error, SpillError::NothingCanLeave { .. }), "{error}");
        assert!(error.to_string().contains("no tier below has room"), "{error}");
        // One that does not wait does not ask the driver why.
        let now = Deadline::from(std::time::Instant::now());
        let error = leasing(&rig, &wanted, now).recv_timeout(LONG).unwrap().unwrap_err();
        assert!(!error.to_string().contains("no tier below has room"), "{error}");
        assert_eq!((rig.manager.census().leases, rig.manager.census().waiting), (0, 0));
        rig.expect(&idle, 1);
        rig.check();
    }
}

#[test]
fn a_future_without_a_deadline_is_refused_when_nothing_can_leave() {
    let rig = narrow(true);
    let _idle = rig.filled(MIB(48), 1);
    let wanted = rig.manager.buffer(MIB(48)).unwrap();
    let (ends, ended) = mpsc::channel();
    let rig_of_task = Arc::clone(&rig);
    thread::spawn(move || {
        let set = [(&wanted, Access::Exclusive)];
        let request = rig_of_task.manager.request(&set).stream(rig_of_task.stream);
        ends.send(block_on(std::future::IntoFuture::into_future(request)).map(drop)).unwrap();
    });
    expect_refused(&ended);
    rig.check();
}

/// Polls a future in this thread until it is ready.
fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Unpark>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match std::pin::Pin::new(&mut future).poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn a_lease_without_a_deadline_waits_for_another_owner_and_is_refused_once_that_cannot_help() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let idle = rig.filled(MIB(40), 1);
        let small = rig.filled(MIB(8), 2);
        // The other owner keeps 8 MiB, and leaves them idle in the end.
        let set = [(&small, Access::Shared)];
        let held = rig.manager.request(&set).owner(LeaseOwner::new());
        let held = held.stream(rig.stream).now().unwrap();
        let wanted = rig.manager.buffer(MIB(40)).unwrap();
        let ended = leasing(&rig, &wanted, Deadline::NEVER);
        expect_waiting(&rig, &ended);
        drop(held);
        expect_refused(&ended);
        rig.expect(&idle, 1);
        rig.expect(&small, 2);
        rig.check();
    }
}

#[test]
fn the_callers_own_lease_is_no_other_owner() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let (idle, outer) = (rig.filled(MIB(40), 1), rig.filled(MIB(8), 2));
        let (ends, ended) = mpsc::channel();
        let (own, outer) = (Arc::clone(&rig), outer.clone());
        thread::spawn(move || {
            let _held = outer.lease(Access::Shared, own.stream).unwrap();
            let wanted = own.manager.buffer(MIB(48)).unwrap();
            let set = [(&wanted, Access::Exclusive)];
            let leased = own.manager.lease_on(&set, &[own.stream], Deadline::NEVER).map(drop);
            ends.send(leased).unwrap();
        });
        expect_refused(&ended);
        rig.expect(&idle, 1);
        rig.check();
    }
}

#[test]
fn a_discard_serves_a_lease_that_waits_for_room_below() {
    for budget in [false, true] {
        let rig = narrow(budget);
        let below = rig.filled(MIB(16), 2);
        rig.manager.spill(MIB(16));
        let idle = rig.filled(MIB(48), 1);
        let wanted = rig.manager.buffer(MIB(24)).unwrap();
        let ended = leasing(&rig, &wanted, Deadline::from(LONG));
        expect_waiting(&rig, &ended);
        below.discard().unwrap();
        ended.recv_timeout(LONG / 4).expect("it is served").unwrap();
        wanted.discard().unwrap();
        rig.expect(&idle, 1);
        rig.check();
    }
}

#[test]
fn host_memory_freed_by_others_serves_a_lease_that_waits_for_room_below() {
    for (budget, reserved) in [(false, false), (true, false), (false, true), (true, true)] {
        for deadline in [Deadline::NEVER, Deadline::from(LONG)] {
            let rig = narrow(budget);
            let host = rig.spaces.space(SpaceId::host(0)).unwrap();
            let others: Box<dyn std::any::Any + Send> = match reserved {
                true => Box::new(host.request(MIB(14)).now().unwrap()),
                false => Box::new(rig.pool.allocate(MIB(16)).unwrap()),
            };
            let idle = rig.filled(MIB(48), 1);
            let wanted = rig.manager.buffer(MIB(24)).unwrap();
            let ended = leasing(&rig, &wanted, deadline);
            expect_waiting(&rig, &ended);
            drop(others);
            ended.recv_timeout(LONG / 4).expect("it is served").unwrap();
            assert!(rig.total(SpaceId::host(0)) >= MIB(8));
            wanted.discard().unwrap();
            rig.expect(&idle, 1);
            rig.check();
        }
    }
}

// --- Leases of many small buffers, and leases that wait for the budget. A wait that never ends fails the
// test ---

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

// --- Requests of the pool beside threads that lease without end ---

/// Raises a flag when it is dropped, also by a panic: the other threads end then.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Rig {
    /// Leases the buffers in turn, one at a time, and counts. Checks and changes their first bytes.
    fn lease_in_turn(&self, buffers: &[DeferrableBuffer], over: &AtomicBool, leased: &AtomicUsize) {
        let stream = self.allocator.create_stream().unwrap();
        let queue = self.allocator.stream(stream).unwrap();
        let mut bytes = vec![0; buffers.len()];
        buffers.iter().for_each(|buffer| self.fill(buffer, 0));
        for (index, buffer) in buffers.iter().enumerate().cycle() {
            if over.load(Ordering::Relaxed) {
                break;
            }
            let lease = buffer.lease(Access::Exclusive, stream).unwrap();
            let first = AddrRange::new(lease.address(0).start, Bytes::new(1));
            self.sim.synchronize_stream(queue).unwrap();
            assert_eq!(self.sim.peek(first).unwrap(), [bytes[index]]);
            bytes[index] = bytes[index].wrapping_add(1);
            self.sim.fill(queue, first, bytes[index]).unwrap();
            drop(lease);
            leased.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Makes so many requests, each after all buffers were leased again. Returns how many failed.
    fn request(&self, len: Bytes, requests: usize, leased: &AtomicUsize) -> usize {
        let stream = self.allocator.create_stream().unwrap();
        let mut failed = 0;
        for _ in 0..requests {
            match self.allocator.malloc(len, stream) {
                Ok(block) => drop(self.allocator.free(block, stream)),
                Err(error) => {
                    println!("{error}");
                    failed += 1;
                }
            }
            let before = leased.load(Ordering::Relaxed);
            until(|| leased.load(Ordering::Relaxed) >= before + 4);
        }
        failed
    }
}

#[test]
fn a_request_is_served_though_a_thread_never_stops_to_lease() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let (over, leased) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let ends = Over(&over);
        scope.spawn(|| rig.lease_in_turn(&buffers, &over, &leased));
        until(|| leased.load(Ordering::Relaxed) >= 4);
        // One buffer is leased at a time, so 48 MiB can leave.
        assert_eq!(rig.request(MIB(40), 40, &leased), 0);
        drop(ends);
    });
    assert!(rig.manager.stats().spills >= 40, "{:?}", rig.manager.stats());
    rig.check();
}

#[test]
fn neither_requests_nor_leases_starve_beside_several_of_both() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..8).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let over = AtomicBool::new(false);
    let leased: Vec<_> = (0..2).map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        let ends = Over(&over);
        for (own, leased) in buffers.chunks(4).zip(&leased) {
            scope.spawn(|| rig.lease_in_turn(own, &over, leased));
        }
        // Two leases have 32 MiB, and the two requests 24.
        let requests = leased.iter().map(|leased| scope.spawn(|| rig.request(MIB(12), 40, leased)));
        let requests: Vec<_> = requests.collect();
        let failed = requests.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>();
        assert_eq!(failed, 0);
        drop(ends);
    });
    rig.check();
}

#[test]
fn a_request_of_another_pool_is_served_though_a_thread_never_stops_to_lease() {
    let rig = patient().build();
    let pool = rig.allocator.create_pool("other").unwrap();
    let stream = pool.create_stream().unwrap();
    let buffers: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let (over, leased) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let ends = Over(&over);
        scope.spawn(|| rig.lease_in_turn(&buffers, &over, &leased));
        until(|| leased.load(Ordering::Relaxed) >= 4);
        for _ in 0..20 {
            let block = pool.malloc(MIB(40), stream).unwrap();
            pool.free(block, stream).unwrap();
            let before = leased.load(Ordering::Relaxed);
            until(|| leased.load(Ordering::Relaxed) >= before + 4);
        }
        drop(ends);
    });
    rig.check();
}

#[test]
fn a_request_under_a_lease_holds_up_neither_itself_nor_others() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let (over, leased) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (own, others) = buffers.split_at(2);
    std::thread::scope(|scope| {
        let ends = Over(&over);
        scope.spawn(|| rig.lease_in_turn(others, &over, &leased));
        until(|| leased.load(Ordering::Relaxed) >= 4);
        for _ in 0..20 {
            let outer = own[0].lease(Access::Exclusive, rig.stream).unwrap();
            let block = rig.allocator.malloc(MIB(24), rig.stream).unwrap();
            // It needs the memory that the other thread's buffers have.
            rig.allocator.free(block, rig.stream).unwrap();
            drop(own[1].lease(Access::Exclusive, rig.stream).unwrap());
            drop(outer);
            let before = leased.load(Ordering::Relaxed);
            until(|| leased.load(Ordering::Relaxed) >= before + 4);
        }
        drop(ends);
    });
    rig.check();
}

#[test]
fn a_handler_may_wait_for_a_thread_that_leases() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..4).map(|byte| rig.filled(MIB(16), byte)).collect();
    let (wanted, wishes) = mpsc::channel::<usize>();
    let (done, granted) = mpsc::channel::<usize>();
    let calls = Arc::new(AtomicUsize::new(0));
    let (count, wanted, granted) = (Arc::clone(&calls), Mutex::new(wanted), Mutex::new(granted));
    let this = std::thread::current().id();
    let handler = rig.allocator.on_shortage(move |_| {
        // The leases of the other thread are short of memory too.
        if std::thread::current().id() != this {
            return false;
        }
        let which = count.fetch_add(1, Ordering::Relaxed) % 4;
        wanted.lock().unwrap().send(which).unwrap();
        assert_eq!(granted.lock().unwrap().recv().unwrap(), which);
        false
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for which in wishes {
                drop(buffers[which].lease(Access::Exclusive, rig.stream).unwrap());
                // The request may be over.
                let _ = done.send(which);
            }
        });
        let other = rig.allocator.create_stream().unwrap();
        let blocks = [24, 16].map(|mib| rig.allocator.malloc(MIB(mib), other).unwrap());
        assert!(rig.allocator.malloc(MIB(32), other).is_err(), "24 MiB are left");
        for block in blocks {
            rig.allocator.free(block, other).unwrap();
        }
        rig.allocator.unregister(handler);
    });
    assert!(calls.load(Ordering::Relaxed) >= 3);
    rig.check();
}

// --- Idle buffers give way to requests of other pools of the group, and to resumes of regions ---

/// Fills the card with buffers of a piece.
fn full(rig: &Rig) -> Vec<DeferrableBuffer> {
    let buffers = (0..8).map(|byte| rig.filled(PIECE, byte)).collect();
    assert_eq!(rig.manager.census().resident, MIB(64));
    buffers
}

fn region(rig: &Rig, regions: &Regions, tag: &str) -> Arc<Region> {
    regions.region(&rig.allocator, tag, RegionOptions::default()).unwrap()
}

fn hold(rig: &Rig, buffers: &[DeferrableBuffer]) {
    for (byte, buffer) in (0..).zip(buffers) {
        rig.expect(buffer, byte);
    }
}

fn block_of(rig: &Rig, pool: &Allocator, len: Bytes, byte: u8) -> Allocation {
    let block = pool.malloc(len, rig.stream).unwrap();
    rig.sim.fill(rig.queue, AddrRange::new(block.addr(), block.len()), byte).unwrap();
    block
}

#[test]
fn a_request_in_a_region_evicts_what_it_lacks_and_no_more() {
    let rig = rig();
    let buffers = full(&rig);
    let regions = Regions::new(rig.mover());
    let region = region(&rig, &regions, "weights");
    let block = block_of(&rig, region.allocator(), PIECE * 2, 9);
    assert_eq!(rig.manager.census().resident, MIB(64) - PIECE * 2);
    assert_eq!(rig.manager.counters().victims, 2);
    // What the region has free needs none.
    region.allocator().free(block, rig.stream).unwrap();
    let again = region.allocator().malloc(PIECE * 2, rig.stream).unwrap();
    assert_eq!(rig.manager.counters().victims, 2);
    region.allocator().free(again, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn a_resume_evicts_what_it_lacks_and_has_its_contents() {
    let rig = rig();
    let regions = Regions::new(rig.mover());
    let region = region(&rig, &regions, "weights");
    let block = block_of(&rig, region.allocator(), PIECE * 3, 9);
    regions.pause(&["weights"], PauseOptions::default()).unwrap();
    let buffers = full(&rig);
    let before = rig.manager.counters().victims;
    regions.resume(&["weights"]).unwrap();
    assert_eq!(region.status().phase, Phase::Awake);
    let gone = MIB(64) - rig.manager.census().resident;
    assert!(gone >= PIECE * 3 && gone <= region.status().on_card, "{gone}");
    assert_eq!(PIECE * (rig.manager.counters().victims - before), gone);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let bytes = rig.sim.peek(AddrRange::new(block.addr(), block.len())).unwrap();
    assert!(vramp_testing::is_filled(&bytes, 9));
    region.allocator().free(block, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn idle_buffers_leave_before_regions_and_regions_when_no_buffer_can() {
    let rig = rig();
    let regions = Regions::new(rig.mover());
    let [old, new] = ["old", "new"].map(|tag| region(&rig, &regions, tag));
    let kept = block_of(&rig, old.allocator(), PIECE * 4, 9);
    regions.on_pressure(&rig.allocator, &["old"]).unwrap();
    let buffers: Vec<_> = (0..2).map(|byte| rig.filled(PIECE, byte)).collect();
    let rest = MIB(64) - old.status().on_card - PIECE * 2;
    let first = new.allocator().malloc(rest + PIECE, rig.stream).unwrap();
    assert_eq!((old.status().phase, rig.manager.counters().victims), (Phase::Awake, 1));
    new.allocator().free(first, rig.stream).unwrap();
    let uses: Vec<_> = buffers.iter().map(|one| (one, Access::Shared)).collect();
    let lease = rig.manager.lease(&uses, rig.stream).unwrap();
    let second = new.allocator().malloc(rest + PIECE, rig.stream).unwrap();
    assert_eq!((old.status().phase, rig.manager.counters().victims), (Phase::Asleep, 1));
    drop(lease);
    new.allocator().free(second, rig.stream).unwrap();
    regions.resume(&["old"]).unwrap();
    old.allocator().free(kept, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn without_a_limit_a_request_of_another_pool_evicts_what_the_card_lacks() {
    let rig = Plan { limit: MIB(1024), host: MIB(2048), ..Plan::default() }.build();
    rig.allocator.set_limit(None).unwrap();
    let buffers: Vec<_> = (0..16).map(|byte| rig.filled(MIB(60), byte)).collect();
    let beside = rig.allocator.create_pool("beside").unwrap();
    let free = MIB(1024) - MIB(60) * 16;
    let block = beside.malloc(free + PIECE * 4, rig.stream).unwrap();
    let gone = MIB(960) - rig.manager.census().resident;
    assert!(gone >= PIECE * 4 && gone <= PIECE * 6, "{gone}");
    beside.free(block, rig.stream).unwrap();
    hold(&rig, &buffers);
    rig.check();
}

#[test]
fn leased_buffers_stay_and_the_request_of_another_pool_fails() {
    let rig = rig();
    let buffers = full(&rig);
    let beside = rig.allocator.create_pool("beside").unwrap();
    let uses: Vec<_> = buffers.iter().map(|one| (one, Access::Shared)).collect();
    let lease = rig.manager.lease(&uses, rig.stream).unwrap();
    assert!(beside.malloc(PIECE, rig.stream).is_err());
    assert_eq!(rig.manager.census().resident, MIB(64));
    drop(lease);
    let block = beside.malloc(PIECE, rig.stream).unwrap();
    beside.free(block, rig.stream).unwrap();
    rig.check();
}
