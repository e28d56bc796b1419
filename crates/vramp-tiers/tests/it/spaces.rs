//! Spaces, reservations, pressure and notification channels.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::blocks::{GPU, ask, reserve, until};
use vramp_tiers::links::{LinkKey, Rate};
use vramp_tiers::notify::{NotificationChannel, WaitStatus, notify_on_exit};
use vramp_tiers::reserve::{
    Charge, LimitPolicy, MergeRejection, OverrunAction, Overtaking, QueueConfig,
};
use vramp_tiers::space::{Crossing, Level};
use vramp_tiers::{
    Bytes, ManagerConfig, Owner, Reservation, ReservationManager, ReserveError, SpaceConfig,
    SpaceId, Strategy, Tier,
};

const HOST: SpaceId = SpaceId::host(0);
const DISK: SpaceId = SpaceId::disk(0);

fn one_byte(capacity: u64) -> SpaceConfig {
    SpaceConfig { granule: Bytes::new(1), ..SpaceConfig::gpu(Bytes::new(capacity)) }
}

/// Spaces of 100, 200 and 400 bytes with one-byte granules and the usual levels of a card.
fn manager() -> ReservationManager {
    let spaces = [(GPU, one_byte(100)), (HOST, one_byte(200)), (DISK, one_byte(400))];
    ReservationManager::new(spaces).unwrap()
}

#[test]
fn a_space_is_found_by_its_id_and_an_unknown_one_is_not() {
    let manager = manager();
    assert_eq!(manager.space(GPU).unwrap().id(), GPU);
    assert!(manager.space(SpaceId::gpu(7)).is_none());
    let error = manager.request(Strategy::Specific(SpaceId::gpu(7)), Bytes::new(1)).wait();
    assert!(matches!(error.unwrap_err(), ReserveError::NoSpace(_)));
    assert_eq!(manager.space(GPU), manager.spaces().next());
}

#[test]
fn a_preferred_card_that_is_full_is_passed_over_and_a_specific_one_is_not() {
    let other = SpaceId::gpu(1);
    let space = || SpaceConfig { limit: Level::Fraction(1.0), ..one_byte(100) };
    let manager = ReservationManager::new([(GPU, space()), (other, space())]).unwrap();
    let chosen = |strategy, bytes| {
        manager.request(strategy, Bytes::new(bytes)).now().map(|part| (part.space(), part))
    };
    let _most = reserve(&manager, 90);
    assert_eq!(chosen(Strategy::Prefer(GPU), 10).unwrap().0, GPU, "it has just enough");
    assert_eq!(chosen(Strategy::Prefer(GPU), 11).unwrap().0, other);
    assert_eq!(chosen(Strategy::AnyInTier(Tier::Gpu), 11).unwrap().0, other);
    assert!(matches!(chosen(Strategy::Specific(GPU), 11), Err(ReserveError::NotNow(_))));
    let _rest = chosen(Strategy::Prefer(other), 100).unwrap();
    assert!(matches!(chosen(Strategy::Prefer(GPU), 11), Err(ReserveError::NotNow(_))));
}

#[test]
fn reserved_and_available_are_right_before_during_and_after() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let all = |space: &vramp_tiers::MemorySpace| {
        (space.available(), space.total_reserved(), space.active_reservations())
    };
    assert_eq!(all(&gpu), (Bytes::new(90), Bytes::ZERO, 0));
    let first = reserve(&manager, 30);
    let second = reserve(&manager, 20);
    assert_eq!(all(&gpu), (Bytes::new(40), Bytes::new(50), 2));
    assert_eq!(manager.total_reserved(Some(Tier::Gpu)), Bytes::new(50));
    assert_eq!(manager.total_reserved(None), Bytes::new(50));
    assert_eq!(manager.available(Some(Tier::Host)), Bytes::new(180));
    assert_eq!(manager.active_reservations(None), 2);
    drop((first, second));
    assert_eq!(all(&gpu), (Bytes::new(90), Bytes::ZERO, 0));
    assert_eq!(gpu.peak(), Bytes::new(50));
    gpu.reset_peaks();
    assert_eq!(gpu.peak(), Bytes::ZERO);
}

#[test]
fn an_exact_request_is_never_cut_short_and_says_whether_waiting_helps() {
    let manager = manager();
    for space in [GPU, HOST, DISK] {
        let request = || manager.request(Strategy::Specific(space), Bytes::new(1000));
        assert!(matches!(request().now().unwrap_err(), ReserveError::NeverFits(_)));
        assert!(matches!(request().wait().unwrap_err(), ReserveError::NeverFits(_)));
    }
    let _most = reserve(&manager, 80);
    let error = ask(&manager, 20).now().unwrap_err();
    let ReserveError::NotNow(refusal) = &error else { panic!("{error}") };
    assert_eq!((refusal.available(), refusal.limit()), (Bytes::new(10), Bytes::new(90)));
    assert_eq!(refusal.spaces[0].largest[0].size, Bytes::new(80));
}

#[test]
fn as_much_as_there_is_may_be_less_but_not_too_little() {
    let manager = manager();
    let _most = reserve(&manager, 80);
    let up_to = |least| ask(&manager, 50).up_to(Bytes::new(least));
    assert_eq!(up_to(5).unwrap().bytes(), Bytes::new(10));
    assert!(matches!(up_to(11).unwrap_err(), ReserveError::NotNow(_)));
    let _rest = reserve(&manager, 10);
    let mut empty = up_to(0).unwrap();
    assert_eq!(empty.bytes(), Bytes::ZERO);
    assert!(empty.grow(Bytes::new(1)).is_err());
    let tiers = Strategy::AnyInTiers([Tier::Gpu, Tier::Host].into_iter().collect());
    let there = manager.request(tiers, Bytes::new(500)).up_to(Bytes::new(1)).unwrap();
    assert_eq!((there.space(), there.bytes()), (HOST, Bytes::new(180)));
}

#[test]
fn every_strategy_finds_its_space() {
    let manager = manager();
    let chosen = |strategy| manager.request(strategy, Bytes::new(1)).now().unwrap().space();
    assert_eq!(chosen(Strategy::AnyInTier(Tier::Gpu)), GPU);
    assert_eq!(chosen(Strategy::Prefer(HOST)), HOST);
    assert_eq!(chosen(Strategy::Downgrade(GPU)), HOST);
    assert_eq!(chosen(Strategy::Downgrade(HOST)), DISK);
    assert_eq!(chosen(Strategy::Upgrade(DISK)), HOST);
    let _full = manager.request(Strategy::Specific(HOST), Bytes::new(180)).now().unwrap();
    assert_eq!(chosen(Strategy::Downgrade(GPU)), DISK);
    assert_eq!(chosen(Strategy::Upgrade(DISK)), GPU);
    let to = |from, tier| Strategy::DowngradeTo { from, tier };
    let up = |from, tier| Strategy::UpgradeTo { from, tier };
    assert_eq!(chosen(to(GPU, Tier::Disk)), DISK);
    assert_eq!(chosen(to(HOST, Tier::Disk)), DISK);
    assert_eq!(chosen(up(DISK, Tier::Gpu)), GPU);
    for wrong in [to(HOST, Tier::Gpu), to(GPU, Tier::Gpu), up(GPU, Tier::Disk)] {
        let error = manager.request(wrong, Bytes::new(1)).now().unwrap_err();
        assert!(matches!(error, ReserveError::NoSpace(_)), "{error}");
    }
    let far = manager.request(Strategy::Downgrade(GPU), Bytes::new(1)).near(|space| space.index);
    assert_eq!(far.now().unwrap().space(), DISK);
}

#[test]
fn a_reservation_grows_shrinks_splits_and_merges_exactly() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let mut whole = reserve(&manager, 40);
    whole.grow(Bytes::new(10)).unwrap();
    assert_eq!(whole.bytes(), Bytes::new(50));
    assert!(matches!(whole.grow(Bytes::new(41)), Err(ReserveError::NeverFits(_))));
    let used = whole.charge(Bytes::new(20), &LimitPolicy::Fail).unwrap();
    let part = whole.split(Bytes::new(10)).unwrap();
    assert!(whole.split(Bytes::new(21)).is_err());
    assert_eq!(
        (whole.bytes(), part.bytes(), gpu.total()),
        (Bytes::new(40), Bytes::new(10), Bytes::new(50))
    );
    assert_eq!(whole.shrink_to_fit(), Bytes::new(20));
    assert_eq!(
        (whole.bytes(), whole.unused(), gpu.total()),
        (Bytes::new(20), Bytes::ZERO, Bytes::new(30))
    );
    whole.merge(part).unwrap();
    assert_eq!(
        (whole.bytes(), whole.used(), gpu.active_reservations()),
        (Bytes::new(30), Bytes::new(20), 1)
    );
    let other = manager.request(Strategy::Specific(HOST), Bytes::new(5)).now().unwrap();
    let refused = whole.merge(other).unwrap_err();
    assert!(matches!(refused.reason, MergeRejection::Ledger(_)));
    assert_eq!(refused.from.bytes(), Bytes::new(5));
    let foreign = reserve(&self::manager(), 5);
    assert_eq!(whole.merge(foreign).unwrap_err().reason, MergeRejection::OtherManager);
    drop((whole, used));
    assert_eq!(gpu.total(), Bytes::ZERO);
    manager.audit().unwrap();
}

#[test]
fn a_shrink_and_a_free_wake_waiters_as_a_release_does() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let mut half = reserve(&manager, 45);
    let loose: Charge = gpu.charge(Bytes::new(45)).unwrap();
    thread::scope(|scope| {
        let wait = || ask(&manager, 45).wait().unwrap();
        let first = scope.spawn(wait);
        until(|| manager.waiting() == 1);
        drop(loose);
        let first = first.join().unwrap();
        let second = scope.spawn(wait);
        until(|| manager.waiting() == 1);
        half.shrink_to_fit();
        drop((second.join().unwrap(), first));
    });
}

#[test]
fn a_reservation_and_its_charges_may_end_in_any_order() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let reservation = reserve(&manager, 40);
    let blocks = reservation.charge(Bytes::new(30), &LimitPolicy::Fail).unwrap();
    drop(reservation);
    assert_eq!((gpu.total(), gpu.active_reservations()), (Bytes::new(30), 0));
    drop(manager);
    thread::spawn(move || drop(blocks)).join().unwrap();
    assert_eq!(gpu.total(), Bytes::ZERO);
}

#[test]
fn a_charge_of_nothing_may_outlive_its_reservation() {
    let manager = manager();
    let reservation = reserve(&manager, 10);
    let nothing = reservation.charge(Bytes::ZERO, &LimitPolicy::Fail).unwrap();
    drop(reservation);
    drop(nothing);
    assert_eq!(manager.space(GPU).unwrap().total(), Bytes::ZERO);
}

#[test]
fn each_crossing_is_told_once_in_order_and_with_no_lock_held() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let subscription = {
        let (heard, manager) = (Arc::clone(&heard), manager.clone());
        gpu.subscribe(move |space, crossed| {
            // A callback may reserve.
            drop(manager.request(Strategy::Specific(HOST), Bytes::new(1)).now());
            heard.lock().unwrap().push((space, crossed));
        })
    };
    let mut watch = gpu.watch();
    for _ in 0..2 {
        let low = reserve(&manager, 74);
        assert!(!gpu.should_downgrade());
        let high = reserve(&manager, 1);
        assert!(gpu.should_downgrade() && !gpu.should_stop_downgrading());
        assert_eq!(gpu.amount_to_downgrade(), Bytes::new(10));
        drop(high);
        // Between the levels there is no crossing.
        drop(reserve(&manager, 2));
        drop(low);
        assert!(gpu.should_stop_downgrading());
    }
    let expected = [Crossing::Trigger, Crossing::Stop, Crossing::Trigger, Crossing::Stop];
    assert_eq!(*heard.lock().unwrap(), expected.map(|crossed| (GPU, crossed)));
    assert_eq!(std::iter::from_fn(|| watch.next_crossing()).collect::<Vec<_>>(), expected);
    drop(subscription);
    drop(reserve(&manager, 80));
    assert_eq!(heard.lock().unwrap().len(), 4);
}

#[test]
fn crossings_by_many_threads_alternate_for_each_subscriber() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&heard);
    let _subscription = gpu.subscribe(move |_, crossed| recorded.lock().unwrap().push(crossed));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..500).for_each(|_| drop(ask(&manager, 80).wait())));
        }
    });
    let heard = heard.lock().unwrap();
    assert_eq!(heard.len(), 4000);
    for pair in heard.chunks(2) {
        assert_eq!(pair, [Crossing::Trigger, Crossing::Stop]);
    }
}

#[test]
fn a_callback_that_panics_is_contained_and_counted() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let _loud = gpu.subscribe(|_, _| panic!("on purpose"));
    let _quiet = gpu.subscribe(move |_, _| _ = counted.fetch_add(1, Ordering::Relaxed));
    drop(reserve(&manager, 80));
    assert_eq!((manager.panics(), calls.load(Ordering::Relaxed)), (2, 2));
    manager.audit().unwrap();
}

#[test]
fn a_rule_that_panics_says_no() {
    let manager = manager();
    let reservation = reserve(&manager, 10);
    let rule = |_: &vramp_tiers::reserve::Overrun| -> OverrunAction { panic!("on purpose") };
    assert!(reservation.charge(Bytes::new(11), &rule).is_err());
    assert_eq!((manager.panics(), reservation.used()), (1, Bytes::ZERO));
}

#[test]
fn a_channel_wakes_every_listener_and_says_when_nobody_is_left() {
    let channel = NotificationChannel::new();
    let mut listener = channel.listen();
    assert_eq!(listener.wait(), WaitStatus::Idle);
    let notifier = channel.notifier();
    assert_eq!(listener.wait_for(Duration::from_millis(1)), WaitStatus::TimedOut);
    let barrier = Barrier::new(3);
    thread::scope(|scope| {
        let both = [(); 2].map(|()| {
            let mut listener = channel.listen();
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                listener.wait()
            })
        });
        barrier.wait();
        drop(notify_on_exit(channel.notifier()));
        assert!(both.into_iter().all(|one| one.join().unwrap() == WaitStatus::Notified));
    });
    // A notification before the wait is not lost.
    assert_eq!(listener.wait(), WaitStatus::Notified);
    drop(notifier);
    assert_eq!(listener.wait(), WaitStatus::Idle);
    channel.shutdown();
    assert_eq!(listener.wait(), WaitStatus::Shutdown);
}

#[test]
fn a_spaces_channel_tells_of_returned_memory_and_of_the_shutdown() {
    let manager = manager();
    let channel = manager.space(GPU).unwrap().channel();
    let mut listener = channel.listen();
    let reservation = reserve(&manager, 10);
    assert_eq!(listener.wait_for(Duration::from_millis(1)), WaitStatus::TimedOut);
    drop(reservation);
    assert_eq!(listener.wait(), WaitStatus::Notified);
    manager.shutdown();
    assert_eq!(listener.wait(), WaitStatus::Shutdown);
}

#[test]
fn sixty_four_threads_at_random_leave_nothing_behind() {
    let space = |capacity| SpaceConfig {
        limit: Level::Fraction(1.0),
        ..SpaceConfig::gpu(Bytes::kib(capacity))
    };
    let spaces = [(GPU, space(64)), (SpaceId::gpu(1), space(64)), (HOST, space(128))];
    let manager = ReservationManager::new(spaces).unwrap();
    let crossings = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&crossings);
    let gpu = manager.space(GPU).unwrap();
    let subscription = gpu.subscribe(move |_, _| _ = counted.fetch_add(1, Ordering::Relaxed));
    let operations = vramp_testing::cases(2_000);
    thread::scope(|scope| {
        for seed in 0..64 {
            let manager = &manager;
            scope.spawn(move || one_of_many(manager, seed, operations));
        }
    });
    manager.audit().unwrap();
    assert_eq!((manager.waiting(), manager.panics()), (0, 0));
    for space in manager.spaces() {
        let census = space.census();
        assert_eq!((census.total, census.reservations), (Bytes::ZERO, 0));
        assert!(census.peak <= census.levels.capacity);
        assert!(census.counters.overruns > 0);
    }
    // It ends empty, so there are as many stops as triggers.
    assert_eq!(crossings.load(Ordering::Relaxed) % 2, 0);
    drop(subscription);
}

fn one_of_many(manager: &ReservationManager, seed: u64, operations: u32) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut held: Vec<(Reservation, Vec<Charge>)> = Vec::new();
    for _ in 0..operations {
        let bytes = Bytes::new(random.u64(0..4000));
        let pick = |random: &mut fastrand::Rng, len: usize| random.usize(0..len.max(1));
        let at = pick(&mut random, held.len());
        match (random.u8(0..9), held.get_mut(at)) {
            (0, _) => {
                // A thread that waits without reservations is in no deadlock.
                held.clear();
                let strategy = Strategy::AnyInTier(Tier::Gpu);
                let request = manager.request(strategy, bytes).priority(random.i32(0..3));
                let patience = Duration::from_micros(random.u64(0..500));
                if let Ok(reservation) = request.deadline(patience).wait() {
                    held.push((reservation, Vec::new()));
                }
            }
            (1, _) => {
                let strategy = Strategy::Prefer(SpaceId::gpu(random.u32(0..2)));
                let request = manager.request(strategy, bytes).owner(Owner(seed));
                held.extend(request.now().map(|reservation| (reservation, Vec::new())));
            }
            (2, _) => {
                let strategy = Strategy::Downgrade(GPU);
                let request = manager.request(strategy, bytes).up_to(Bytes::ZERO);
                held.extend(request.map(|reservation| (reservation, Vec::new())));
            }
            (3, Some((reservation, _))) => drop(reservation.grow(bytes)),
            (4, Some((reservation, _))) => {
                let patience = Duration::from_micros(random.u64(0..50));
                drop(reservation.grow_wait(bytes, patience));
            }
            (5, Some((reservation, charges))) => {
                charges.extend(reservation.charge(bytes, &LimitPolicy::Ignore));
            }
            (6, Some((reservation, charges))) => {
                charges.pop();
                reservation.shrink_to_fit();
            }
            (7, Some((reservation, _))) => {
                let part = reservation.split(bytes);
                held.extend(part.map(|part| (part, Vec::new())));
            }
            (_, Some(_)) => drop(held.swap_remove(at)),
            (_, None) => {}
        }
        held.truncate(4);
    }
}

#[test]
fn strategies_take_the_fastest_link_once_rates_are_known() {
    let other = SpaceId::host(1);
    let space = SpaceConfig::host(Bytes::mib(64));
    let spaces = [(GPU, space), (HOST, space), (other, space)];
    let manager = ReservationManager::new(spaces).unwrap();
    let below = |manager: &ReservationManager| {
        manager.request(Strategy::Downgrade(GPU), Bytes::mib(1)).now().unwrap().space()
    };
    assert_eq!(below(&manager), HOST, "without rates: by index");
    let link = LinkKey { from: GPU, to: other };
    manager.set_links([(link, Rate { bytes_per_s: 1 << 30 })].into_iter().collect());
    assert_eq!(manager.links().rate(link), Some(Rate { bytes_per_s: 1 << 30 }));
    assert_eq!(below(&manager), other);
    let near = |from| {
        let request = manager.request(Strategy::AnyInTier(Tier::Host), Bytes::mib(1));
        request.nearest_to(from).now().unwrap().space()
    };
    assert_eq!((near(GPU), near(HOST), near(other)), (other, HOST, other));
}

#[test]
fn a_reservation_that_grows_does_not_pass_those_who_were_passed_enough() {
    let queue = QueueConfig {
        overtaking: Overtaking { count: 1, bytes: Bytes::kib(2) },
        ..QueueConfig::default()
    };
    let spaces = [(GPU, SpaceConfig::gpu(Bytes::kib(100)))];
    let config = ManagerConfig { queue, ..ManagerConfig::default() };
    let manager = ReservationManager::with_config(spaces, config).unwrap();
    let mut grows = manager.request(Strategy::Specific(GPU), Bytes::kib(60)).now().unwrap();
    thread::scope(|scope| {
        let large = scope.spawn(|| {
            let request = manager.request(Strategy::Specific(GPU), Bytes::kib(50));
            drop(request.wait().unwrap());
        });
        until(|| manager.waiting() == 1);
        assert!(matches!(grows.grow(Bytes::kib(3)), Err(ReserveError::NotNow(_))));
        grows.grow(Bytes::kib(2)).unwrap();
        assert!(matches!(grows.grow(Bytes::kib(1)), Err(ReserveError::NotNow(_))));
        drop(grows);
        large.join().unwrap();
    });
    manager.audit().unwrap();
}
