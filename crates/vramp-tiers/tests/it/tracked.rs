//! Tracked allocators: what is charged, overruns, out of memory, and stream pools.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::blocks::{Bench, GPU, KIB};
use vramp_alloc::{Allocator, Config, Driver};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;
use vramp_tiers::reserve::{Bound, ChargeError, GrowthFactor, LimitPolicy, OverrunAction, Payer};
use vramp_tiers::spill::{RetryPolicy, SpillAndRetry, SpillRequest};
use vramp_tiers::streams::{AcquirePolicy, StreamPool, StreamPoolError};
use vramp_tiers::tracked::OutOfMemoryHandler;
use vramp_tiers::tracked::{
    AttachError, BackOff, ExhaustedResource, MallocError, MemoryShortage, Policies, RecoveryAction,
    Scope, TrackedFreeError,
};
use vramp_tiers::{Bytes, Priority, ReservationManager, SpaceConfig, SpaceId, TrackedAllocator};

/// A card with a budget of one MiB, of which 90 % can be reserved.
fn bench() -> Bench {
    bench_with(Policies::default())
}

fn bench_with(defaults: Policies) -> Bench {
    Bench::new(Bytes::mib(1), defaults)
}

fn policies(limit: LimitPolicy) -> Policies {
    Policies { limit: Arc::new(limit), ..Policies::default() }
}

fn handled_by(handler: impl OutOfMemoryHandler + 'static) -> Policies {
    let pauses = Duration::from_micros(1);
    let retries = RetryPolicy { max_retries: 5, first_pause: pauses, max_pause: pauses * 4 };
    Policies { out_of_memory: Arc::new(handler), retries, ..Policies::default() }
}

#[test]
fn what_is_allocated_is_charged_to_the_reservation_by_its_exact_length() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let scope = Scope::Stream(stream);
    tracked.attach(scope, space.request(KIB(100)).now().unwrap()).unwrap();
    let blocks: Vec<_> = [1, 511, 512, 513, 5000, 40_000]
        .map(|bytes| tracked.malloc(Bytes::new(bytes), stream).unwrap())
        .into();
    let lengths = blocks.iter().map(|block| block.len()).sum::<Bytes>();
    assert_eq!(tracked.attached(scope).unwrap().used, lengths);
    assert_eq!(space.total(), KIB(100));
    assert!(matches!(blocks[0].payer(), Payer::Reservation(_)));
    blocks.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
    assert_eq!(tracked.attached(scope).unwrap().used, Bytes::ZERO);
    drop(tracked.detach(scope));
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn a_charge_is_exact_in_every_manager_of_memory_and_for_odd_granules() {
    for preset in Preset::ALL {
        let device: Arc<dyn Driver> = Arc::new(Simulator::card("h200").unwrap());
        let allocator = Arc::new(Allocator::new(device, preset.config()).unwrap());
        let stream = allocator.create_stream().unwrap();
        let config = SpaceConfig { granule: Bytes::new(700), ..SpaceConfig::gpu(Bytes::gib(1)) };
        let manager = ReservationManager::new([(GPU, config)]).unwrap();
        let space = manager.space(GPU).unwrap();
        let tracked = TrackedAllocator::new(allocator, &space, Policies::default());
        for reserved in [false, true] {
            if reserved {
                let reservation = space.request(Bytes::mib(100)).now().unwrap();
                tracked.attach(Scope::Stream(stream), reservation).unwrap();
            }
            let sizes = [0, 1, 700, 3 << 20, (20 << 20) + 1];
            let blocks = sizes.map(|size| tracked.malloc(Bytes::new(size), stream).unwrap());
            let granules = |len: Bytes| len.count().div_ceil(700) * 700;
            let lengths = blocks.iter().map(|block| granules(block.len())).sum::<u64>();
            let used = match reserved {
                true => tracked.attached(Scope::Stream(stream)).unwrap().used,
                false => space.total(),
            };
            assert_eq!(used, Bytes::new(lengths), "{preset:?}");
            blocks.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
        }
        drop(tracked.detach(Scope::Stream(stream)));
        assert_eq!(space.total(), Bytes::ZERO, "{preset:?}");
        manager.audit().unwrap();
    }
}

#[test]
fn a_free_on_another_stream_and_thread_is_credited_to_the_origin() {
    let Bench { manager, space, tracked, streams: [one, other], .. } = bench();
    tracked.attach(Scope::Stream(one), space.request(KIB(100)).now().unwrap()).unwrap();
    tracked.attach(Scope::Stream(other), space.request(KIB(50)).now().unwrap()).unwrap();
    let block = tracked.malloc(KIB(64), one).unwrap();
    thread::scope(|scope| drop(scope.spawn(|| tracked.free(block, other).unwrap())));
    assert_eq!(tracked.attached(Scope::Stream(one)).unwrap().used, Bytes::ZERO);
    // The other reservation has no more room than before.
    assert!(matches!(tracked.malloc(KIB(51), other), Err(MallocError::OverReservation(_))));
    manager.audit().unwrap();
}

#[test]
fn memory_outlives_its_reservation_and_stays_charged_to_the_space() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    tracked.attach(Scope::Stream(stream), space.request(KIB(100)).now().unwrap()).unwrap();
    let block = tracked.malloc(KIB(64), stream).unwrap();
    drop(tracked.detach(Scope::Stream(stream)));
    assert_eq!((space.total(), space.active_reservations()), (KIB(64), 0));
    let loose = tracked.malloc(KIB(8), stream).unwrap();
    assert_eq!((loose.payer(), space.total()), (Payer::Space, KIB(72)));
    tracked.free(block, stream).unwrap();
    tracked.free(loose, stream).unwrap();
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn the_fail_policy_refuses_and_charges_nothing() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let scope = Scope::Stream(stream);
    tracked.attach(scope, space.request(KIB(64)).now().unwrap()).unwrap();
    let error = tracked.malloc(KIB(65), stream).unwrap_err();
    assert!(matches!(error, MallocError::OverReservation(_)), "{error}");
    assert_eq!((tracked.attached(scope).unwrap().used, space.total()), (Bytes::ZERO, KIB(64)));
}

#[test]
fn the_ignore_policy_charges_the_excess_to_the_space_up_to_its_capacity() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let reservation = space.request(KIB(64)).now().unwrap();
    tracked.attach_with(Scope::Stream(stream), reservation, policies(LimitPolicy::Ignore)).unwrap();
    let block = tracked.malloc(KIB(100), stream).unwrap();
    assert_eq!(space.total(), KIB(100));
    assert!(matches!(tracked.malloc(KIB(925), stream), Err(MallocError::SpaceFull(_))));
    tracked.free(block, stream).unwrap();
    assert_eq!(space.total(), KIB(64));
}

#[test]
fn the_increase_policy_grows_the_reservation_and_charges_the_overflow_once() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let reservation = space.request(KIB(64)).now().unwrap();
    let factor = GrowthFactor::new(1.25).unwrap();
    let increase = LimitPolicy::Increase { factor, beyond_limit: false };
    tracked.attach_with(Scope::Stream(stream), reservation, policies(increase)).unwrap();
    let block = tracked.malloc(KIB(104), stream).unwrap();
    let record = tracked.attached(Scope::Stream(stream)).unwrap();
    assert_eq!((record.size, record.used), (KIB(64 + 50), KIB(104)));
    assert_eq!(space.total(), KIB(114));
    tracked.free(block, stream).unwrap();
    drop(tracked.detach(Scope::Stream(stream)));
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn beyond_the_limit_is_only_for_those_who_may() {
    for (beyond_limit, possible) in [(false, false), (true, true)] {
        let Bench { space, tracked, streams: [stream, _], .. } = bench();
        let reservation = space.request(KIB(64)).now().unwrap();
        let increase = LimitPolicy::Increase { factor: GrowthFactor::default(), beyond_limit };
        tracked.attach_with(Scope::Stream(stream), reservation, policies(increase)).unwrap();
        let block = tracked.malloc(KIB(1000), stream);
        assert_eq!(block.is_ok(), possible);
        block.into_iter().for_each(|block| tracked.free(block, stream).unwrap());
    }
}

#[test]
fn a_policy_of_ones_own_decides() {
    let Bench { manager, space, tracked, streams: [stream, _], .. } = bench();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&seen);
    let rule = move |overrun: &vramp_tiers::reserve::Overrun| {
        note.lock().unwrap().push(overrun.by);
        if overrun.by > KIB(10) {
            panic!("on purpose");
        }
        OverrunAction::Ignore
    };
    let policies = Policies { limit: Arc::new(rule), ..Policies::default() };
    let reservation = space.request(KIB(64)).now().unwrap();
    tracked.attach_with(Scope::Stream(stream), reservation, policies).unwrap();
    let block = tracked.malloc(KIB(70), stream).unwrap();
    assert!(matches!(tracked.malloc(KIB(70), stream), Err(MallocError::OverReservation(_))));
    assert_eq!(*seen.lock().unwrap(), [KIB(6), KIB(76)]);
    assert_eq!(manager.panics(), 1);
    tracked.free(block, stream).unwrap();
}

#[test]
fn the_policies_an_allocator_is_made_with_hold_for_what_is_attached() {
    let Bench { space, tracked, streams: [stream, _], .. } =
        bench_with(policies(LimitPolicy::Ignore));
    tracked.attach(Scope::Stream(stream), space.request(KIB(1)).now().unwrap()).unwrap();
    let block = tracked.malloc(KIB(2), stream).unwrap();
    tracked.free(block, stream).unwrap();
}

#[test]
fn a_threads_reservation_is_that_of_one_allocator_and_goes_before_the_streams() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let second =
        TrackedAllocator::new(Arc::clone(tracked.allocator()), &space, Policies::default());
    let scope = Scope::this_thread();
    tracked.attach(scope, space.request(KIB(64)).now().unwrap()).unwrap();
    tracked.attach(Scope::Stream(stream), space.request(KIB(64)).now().unwrap()).unwrap();
    let mine = tracked.malloc(KIB(8), stream).unwrap();
    let seconds = second.malloc(KIB(8), stream).unwrap();
    assert_eq!(seconds.payer(), Payer::Space);
    let others =
        thread::scope(|s| s.spawn(|| tracked.malloc(KIB(4), stream).unwrap()).join().unwrap());
    assert_eq!(tracked.attached(scope).unwrap().used, KIB(8));
    assert_eq!(tracked.attached(Scope::Stream(stream)).unwrap().used, KIB(4));
    let TrackedFreeError::Foreign(seconds) = tracked.free(seconds, stream).unwrap_err() else {
        panic!("it is the second's");
    };
    second.free(seconds, stream).unwrap();
    tracked.free(mine, stream).unwrap();
    tracked.free(others, stream).unwrap();
}

#[test]
fn a_refused_attach_gives_the_reservation_back() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let scope = Scope::Stream(stream);
    tracked.attach(scope, space.request(KIB(64)).now().unwrap()).unwrap();
    let second = space.request(KIB(32)).now().unwrap();
    let error = tracked.attach(scope, second).unwrap_err();
    let AttachError::Occupied { reservation, .. } = error else { panic!("{error}") };
    assert_eq!(reservation.bytes(), KIB(32));
    let foreign = bench();
    let error = foreign.tracked.attach(scope, reservation).unwrap_err();
    assert!(matches!(error, AttachError::OtherSpace { .. }), "{error}");
}

#[test]
fn a_handler_that_spills_is_asked_again_until_there_is_room() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let cold = Arc::new(Mutex::new(vec![
        space.charge(KIB(300)).unwrap(),
        space.charge(KIB(600)).unwrap(),
    ]));
    let spill = Arc::clone(&cold);
    let handler = move |attempt: u32, shortage: &MemoryShortage<'_>| {
        assert_eq!(spill.lock().unwrap().len(), 3 - attempt as usize);
        assert!(
            matches!(shortage.exhausted, ExhaustedResource::Budget(refused) if refused.requested == KIB(800))
        );
        drop(spill.lock().unwrap().remove(0));
        RecoveryAction::Retry
    };
    let second =
        TrackedAllocator::new(Arc::clone(tracked.allocator()), &space, handled_by(handler));
    let block = second.malloc(KIB(800), stream).unwrap();
    assert_eq!((cold.lock().unwrap().len(), space.total()), (0, KIB(800)));
    second.free(block, stream).unwrap();
}

#[test]
fn retries_are_bounded_and_a_panicking_handler_gives_up() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let handler = move |_: u32, _: &MemoryShortage<'_>| {
        counted.fetch_add(1, Ordering::Relaxed);
        RecoveryAction::Retry
    };
    let Bench { manager, space, tracked, streams: [stream, _], .. } =
        bench_with(handled_by(handler));
    assert!(matches!(tracked.malloc(Bytes::mib(2), stream), Err(MallocError::SpaceFull(_))));
    assert_eq!(calls.load(Ordering::Relaxed), 5);
    let loud = |_: u32, _: &MemoryShortage<'_>| -> RecoveryAction { panic!("on purpose") };
    for (handler, panics) in [(handled_by(BackOff), 0), (handled_by(loud), 1)] {
        let tracked = TrackedAllocator::new(Arc::clone(tracked.allocator()), &space, handler);
        assert!(tracked.malloc(Bytes::mib(2), stream).unwrap_err().is_out_of_memory());
        assert_eq!(manager.panics(), panics);
    }
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn a_full_card_is_out_of_memory_and_a_failed_one_is_not() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let handler = move |_: u32, shortage: &MemoryShortage<'_>| {
        assert!(matches!(shortage.exhausted, ExhaustedResource::Device(_)));
        counted.fetch_add(1, Ordering::Relaxed);
        RecoveryAction::Retry
    };
    let Bench { device, space, tracked, streams: [stream, _], .. } =
        bench_with(handled_by(handler));
    const OUT_OF_MEMORY: i32 = 2;
    const ILLEGAL_ADDRESS: i32 = 700;
    device.set_faults(FaultPlan::from_nth_of(Call::Create, 1).with_code(OUT_OF_MEMORY));
    let error = tracked.malloc(KIB(8), stream).unwrap_err();
    assert!(matches!(error, MallocError::OutOfMemory(_)) && error.is_out_of_memory(), "{error}");
    assert_eq!((calls.load(Ordering::Relaxed), space.total()), (5, Bytes::ZERO));
    device.set_faults(FaultPlan::from_nth_of(Call::Create, 1).with_code(ILLEGAL_ADDRESS));
    let error = tracked.malloc(KIB(8), stream).unwrap_err();
    assert!(matches!(error, MallocError::Device(_)) && !error.is_out_of_memory(), "{error}");
    assert_eq!((calls.load(Ordering::Relaxed), space.total()), (5, Bytes::ZERO));
}

#[test]
fn threads_that_attach_detach_and_allocate_at_random_leave_nothing_behind() {
    let Bench { manager, space, tracked, streams, .. } = bench_with(policies(LimitPolicy::Ignore));
    thread::scope(|scope| {
        for seed in 0..8 {
            let (tracked, space) = (&tracked, &space);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut blocks = Vec::new();
                for _ in 0..3000 {
                    let stream = streams[random.usize(0..2)];
                    let scope = match random.bool() {
                        true => Scope::this_thread(),
                        false => Scope::Stream(stream),
                    };
                    match random.u8(0..6) {
                        0 => {
                            let bytes = Bytes::new(random.u64(0..50_000));
                            if let Ok(reservation) = space.request(bytes).now() {
                                drop(tracked.attach(scope, reservation));
                            }
                        }
                        1 => drop(tracked.detach(scope)),
                        2 | 3 if !blocks.is_empty() => {
                            let block = blocks.swap_remove(random.usize(0..blocks.len()));
                            tracked.free(block, stream).unwrap();
                        }
                        _ => {
                            blocks.extend(tracked.malloc(Bytes::new(random.u64(0..20_000)), stream))
                        }
                    }
                }
                blocks.into_iter().for_each(|block| tracked.free(block, streams[0]).unwrap());
                drop(tracked.detach(Scope::this_thread()));
            });
        }
    });
    streams.iter().for_each(|&stream| drop(tracked.detach(Scope::Stream(stream))));
    manager.audit().unwrap();
    assert_eq!(space.total(), Bytes::ZERO);
}

#[test]
fn a_borrowed_stream_is_one_borrowers_and_comes_back() {
    let pool = StreamPool::new(Arc::clone(bench().tracked.allocator()), 2).unwrap();
    let (one, other) =
        (pool.acquire(AcquirePolicy::Block).unwrap(), pool.acquire(AcquirePolicy::Block).unwrap());
    assert_ne!(one.id(), other.id());
    let error = pool.acquire_until(AcquirePolicy::Block, Duration::from_millis(2)).unwrap_err();
    assert!(matches!(error, StreamPoolError::TimedOut { streams: 2 }), "{error}");
    let third = pool.acquire(AcquirePolicy::Grow).unwrap();
    assert_eq!((pool.streams(), pool.idle()), (3, 0));
    let id = other.id();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.acquire(AcquirePolicy::Block).unwrap().id());
        drop(other);
        assert_eq!(waiter.join().unwrap(), id);
    });
    drop((one, third));
    assert_eq!(pool.idle(), 3);
}

#[test]
fn threads_never_share_a_borrowed_stream_and_none_is_lost() {
    let pool = StreamPool::new(Arc::clone(bench().tracked.allocator()), 3).unwrap();
    let lent = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..300 {
                    let patience = Duration::from_micros(200);
                    let Ok(stream) = pool.acquire_until(AcquirePolicy::Block, patience) else {
                        continue;
                    };
                    let mut lent_now = lent.lock().unwrap();
                    assert!(!lent_now.contains(&stream.id()));
                    lent_now.push(stream.id());
                    drop(lent_now);
                    thread::yield_now();
                    lent.lock().unwrap().retain(|&id| id != stream.id());
                }
            });
        }
    });
    assert_eq!((pool.streams(), pool.idle()), (3, 3));
}

#[test]
fn a_pools_shutdown_ends_every_wait_for_a_stream() {
    let pool = StreamPool::new(Arc::clone(bench().tracked.allocator()), 1).unwrap();
    let lent = pool.acquire(AcquirePolicy::Block).unwrap();
    thread::scope(|scope| {
        let waiters =
            [(); 4].map(|()| scope.spawn(|| pool.acquire(AcquirePolicy::Block).map(drop)));
        pool.shutdown();
        for waiter in waiters {
            assert!(matches!(waiter.join().unwrap(), Err(StreamPoolError::ShutDown)));
        }
    });
    drop(lent);
    let empty = StreamPool::new(Arc::clone(bench().tracked.allocator()), 0).unwrap();
    assert!(matches!(empty.acquire(AcquirePolicy::Block), Err(StreamPoolError::Empty)));
}

#[test]
fn the_handler_that_spills_retries_until_enough_has_left_and_begins_anew_each_time() {
    let Bench { space, tracked, streams: [stream, _], .. } = bench();
    let idle = Mutex::new(Some(space.charge(Bytes::kib(1000)).unwrap()));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&asked);
    let spill = move |shortage: &SpillRequest<'_>| {
        recorded.lock().unwrap().push(shortage.bytes());
        idle.lock().unwrap().take().map_or(Bytes::ZERO, |idle| idle.bytes())
    };
    let _spiller = space.register_spiller(Priority(0), spill);
    let policies = handled_by(SpillAndRetry { space: space.clone() });
    let paid = space.request(Bytes::ZERO).now().unwrap();
    let policies = Policies { limit: Arc::new(LimitPolicy::Ignore), ..policies };
    tracked.attach_with(Scope::Stream(stream), paid, policies).unwrap();
    // 24 of 1024 KiB are free.
    let block = tracked.malloc(KIB(32), stream).unwrap();
    assert_eq!(*asked.lock().unwrap(), [KIB(32) - KIB(24)], "what the space lacks");
    let rest = space.charge(KIB(1024 - 32)).unwrap();
    // Nothing is left to spill: it is tried so often as is allowed, and no more.
    assert!(matches!(tracked.malloc(KIB(8), stream), Err(MallocError::SpaceFull(_))));
    assert_eq!(asked.lock().unwrap().len(), 1 + 5);
    drop(rest);
    drop(tracked.malloc(KIB(8), stream).unwrap());
    assert_eq!(asked.lock().unwrap().len(), 6, "there was room");
    let rest = space.charge(space.capacity() - space.total()).unwrap();
    assert!(tracked.malloc(KIB(8), stream).is_err());
    assert_eq!(asked.lock().unwrap().len(), 6 + 5, "each allocation has all its tries");
    drop(rest);
    tracked.free(block, stream).unwrap();
}

#[test]
fn an_allocation_that_the_device_refuses_has_only_what_it_lacks_spilled() {
    // 64 MiB of a card, of which one block keeps 48; the budget has room for more.
    let device: Arc<dyn Driver> = Arc::new(Simulator::card("h200").unwrap());
    let config = Config { limit: Some(Bytes::mib(64)), ..Config::default() };
    let allocator = Arc::new(Allocator::new(device, config).unwrap());
    let stream = allocator.create_stream().unwrap();
    let manager = ReservationManager::new([(GPU, SpaceConfig::gpu(Bytes::gib(1)))]).unwrap();
    let space = manager.space(GPU).unwrap();
    let asked: Arc<Mutex<Vec<Bytes>>> = Arc::default();
    let heard = Arc::clone(&asked);
    let _spiller = space.register_spiller(Priority(0), move |request: &SpillRequest<'_>| {
        heard.lock().unwrap().push(request.bytes());
        Bytes::ZERO
    });
    let policies = handled_by(SpillAndRetry { space: space.clone() });
    let tracked = TrackedAllocator::new(Arc::clone(&allocator), &space, policies);
    let kept = tracked.malloc(Bytes::mib(48), stream).unwrap();
    let error = tracked.malloc(Bytes::mib(40), stream).unwrap_err();
    assert!(matches!(error, MallocError::OutOfMemory(_)), "{error}");
    assert_eq!(*asked.lock().unwrap(), [Bytes::mib(24); 5], "40 MiB less the 16 that are free");
    tracked.free(kept, stream).unwrap();
}

#[test]
fn a_handler_has_the_stream_the_size_the_space_and_the_attempts() {
    let heard: Arc<Mutex<Vec<_>>> = Arc::default();
    let sink = Arc::clone(&heard);
    let handler = move |attempt: u32, shortage: &MemoryShortage<'_>| {
        let MemoryShortage { requested, stream, space, max_retries, .. } = *shortage;
        // No lock is held: the space may be asked.
        let free = space.available_to(Bound::Capacity);
        sink.lock().unwrap().push((attempt, max_retries, requested, stream, space.id(), free));
        RecoveryAction::Retry
    };
    let Bench { space, tracked, streams: [_, stream], .. } = bench_with(handled_by(handler));
    let full = space.charge(KIB(1020)).unwrap();
    assert!(tracked.malloc(KIB(8), stream).is_err());
    let expected: Vec<_> =
        (1..=5).map(|attempt| (attempt, 5, KIB(8), stream, GPU, KIB(4))).collect();
    assert_eq!(*heard.lock().unwrap(), expected);
    assert_eq!((space.available(), space.available_to(Bound::Limit)), (Bytes::ZERO, Bytes::ZERO));
    drop(full);
}

#[test]
fn a_panicking_shortage_handler_is_contained_in_a_tracked_malloc() {
    /// Panics when it is dropped, too.
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("and again");
        }
    }
    let thrown = |_: u32, _: &MemoryShortage<'_>| -> RecoveryAction {
        std::panic::panic_any(Bomb);
    };
    let Bench { manager, space, tracked, streams: [stream, _], .. } =
        bench_with(handled_by(thrown));
    let full = space.charge(KIB(1020)).unwrap();
    assert!(matches!(tracked.malloc(KIB(8), stream), Err(MallocError::SpaceFull(_))));
    assert_eq!(manager.panics(), 1);
    drop(full);
    // The allocator's own handlers too.
    tracked.allocator().set_limit(Some(Bytes::mib(2))).unwrap();
    tracked.allocator().on_shortage(|_| std::panic::panic_any(Bomb));
    let plain = tracked.allocator().malloc(Bytes::mib(4), stream).unwrap_err();
    assert!(plain.is_out_of_memory(), "{plain}");
    assert!(tracked.allocator().stats().unwrap().callback_panics > 0);
    let block = tracked.malloc(KIB(8), stream).unwrap();
    tracked.free(block, stream).unwrap();
}

#[test]
fn a_space_lends_streams_of_the_allocator_that_charges_it() {
    let Bench { space, tracked, manager, .. } = bench();
    let (first, second) = (space.acquire_stream().unwrap(), space.acquire_stream().unwrap());
    assert_ne!(first.id(), second.id());
    assert_eq!((tracked.streams().streams(), tracked.streams().idle()), (2, 0));
    let block = tracked.malloc(KIB(8), first.id()).unwrap();
    tracked.free(block, second.id()).unwrap();
    let id = first.id();
    drop(first);
    assert_eq!(space.acquire_stream().unwrap().id(), id, "an idle one is lent again");
    drop((second, tracked));
    let error = manager.space(GPU).unwrap().acquire_stream().unwrap_err();
    assert!(matches!(error, StreamPoolError::NoAllocator { space: GPU }), "{error}");
}

#[test]
fn a_reservation_that_is_attached_is_charged_by_its_id_until_it_is_released() {
    let Bench { manager, space, tracked, streams: [stream, _], .. } = bench();
    let reservation = space.request(KIB(100)).now().unwrap();
    let id = reservation.id();
    tracked.attach(Scope::Stream(stream), reservation).unwrap();
    let charge = |bytes| space.charge_reserved(id, bytes, &LimitPolicy::Fail);
    let first = charge(KIB(60)).unwrap();
    assert!(matches!(charge(KIB(41)), Err(ChargeError::OverReservation { .. })));
    assert_eq!(tracked.attached(Scope::Stream(stream)).unwrap().used, KIB(60));
    drop(tracked.detach(Scope::Stream(stream)));
    assert!(matches!(charge(KIB(1)), Err(ChargeError::Stale(_))));
    assert_eq!(space.total(), KIB(60));
    drop(first);
    assert!(matches!(charge(KIB(1)), Err(ChargeError::Stale(_))));
    assert_eq!(space.total(), Bytes::ZERO);
    manager.audit().unwrap();
}

#[test]
fn a_reservation_is_not_charged_through_another_space() {
    let spaces = [
        (GPU, SpaceConfig::gpu(Bytes::mib(1))),
        (SpaceId::host(0), SpaceConfig::host(Bytes::mib(64))),
    ];
    let manager = ReservationManager::new(spaces).unwrap();
    let (card, host) = (manager.space(GPU).unwrap(), manager.space(SpaceId::host(0)).unwrap());
    let reservation = host.request(KIB(100)).now().unwrap();
    let refused = card.charge_reserved(reservation.id(), KIB(1), &LimitPolicy::Fail);
    assert!(matches!(refused, Err(ChargeError::Stale(_))));
    assert_eq!((reservation.used(), card.total()), (Bytes::ZERO, Bytes::ZERO));
}
