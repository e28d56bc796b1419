//! Waits: their order, and how they end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::blocks::{GPU, ask, byte_space, ends_empty, reserve, until};
use vramp_tiers::notify::{NotificationChannel, WaitStatus};
use vramp_tiers::reserve::{
    DeadlockCheck, Enqueued, Overtaking, QueueConfig, QueuedReservation, RetryPolicy,
};
use vramp_tiers::wait::{Step, Waits};
use vramp_tiers::{
    Bytes, CancelToken, ManagerConfig, Owner, Reservation, ReservationManager, ReserveError,
    SpaceId, Strategy, Tier,
};

const OTHER: SpaceId = SpaceId::gpu(1);

fn manager(capacity: u64) -> ReservationManager {
    ReservationManager::new([(GPU, byte_space(capacity))]).unwrap()
}

#[test]
fn a_release_serves_the_one_who_waits_for_it() {
    let manager = manager(100);
    let all = reserve(&manager, 100);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| ask(&manager, 60).wait());
        until(|| manager.waiting() == 1);
        drop(all);
        assert_eq!(waiter.join().unwrap().unwrap().bytes(), Bytes::new(60));
    });
    ends_empty(&manager);
}

#[test]
fn one_release_wakes_as_many_as_fit_and_no_wake_up_is_lost() {
    for _ in 0..50 {
        let manager = manager(100);
        let all = reserve(&manager, 100);
        let (send, served) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..20 {
                let (manager, send) = (&manager, send.clone());
                scope.spawn(move || {
                    let part = ask(manager, 10).wait();
                    send.send(part.unwrap()).unwrap();
                });
            }
            until(|| manager.waiting() == 20);
            drop(all);
            let first: Vec<Reservation> = served.iter().take(10).collect();
            assert_eq!(manager.waiting(), 10);
            drop(first);
            assert_eq!(served.iter().take(10).count(), 10);
        });
        ends_empty(&manager);
    }
}

#[test]
fn shutdown_amid_a_thousand_waiters_ends_every_wait() {
    let manager = manager(100);
    let all = reserve(&manager, 100);
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..1000)
            .map(|n| {
                let manager = &manager;
                let ask = move || ask(manager, 1 + n % 100).wait();
                thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, ask).unwrap()
            })
            .collect();
        until(|| manager.waiting() == 1000);
        manager.shutdown();
        for waiter in waiters {
            let error = waiter.join().unwrap().unwrap_err();
            assert!(matches!(error, ReserveError::ShutDown(_)), "{error}");
        }
    });
    // A request that fits is still served, and no request waits.
    drop(all);
    drop(reserve(&manager, 100));
    let all = reserve(&manager, 100);
    let late = ask(&manager, 1).wait();
    assert!(matches!(late.unwrap_err(), ReserveError::ShutDown(_)));
    drop(all);
    ends_empty(&manager);
}

#[test]
fn the_last_handle_of_a_manager_ends_the_waits_of_reservations() {
    let manager = manager(100);
    let mut small = reserve(&manager, 10);
    let rest = reserve(&manager, 90);
    let waiter = thread::spawn(move || small.grow_wait(Bytes::new(50), Duration::from_secs(60)));
    until(|| manager.waiting() == 1);
    drop(manager);
    assert!(matches!(waiter.join().unwrap().unwrap_err(), ReserveError::ShutDown(_)));
    drop(rest);
}

#[test]
fn a_deadline_ends_a_wait_and_says_who_holds_the_memory() {
    let manager = manager(100);
    let all = ask(&manager, 100).owner(Owner(7)).now().unwrap();
    let begin = Instant::now();
    let error = ask(&manager, 1).deadline(Duration::from_millis(3)).wait().unwrap_err();
    assert!(begin.elapsed() >= Duration::from_millis(3));
    let ReserveError::TimedOut(refusal) = &error else { panic!("{error}") };
    assert_eq!((refusal.requested, refusal.available()), (Bytes::new(1), Bytes::ZERO));
    assert_eq!(refusal.limit(), Bytes::new(100));
    assert_eq!(refusal.spaces[0].largest[0].owner, Owner(7));
    assert!(error.to_string().contains("owner 7"), "{error}");
    let past = Instant::now();
    let late = ask(&manager, 1).deadline(past).wait();
    assert!(matches!(late.unwrap_err(), ReserveError::TimedOut(_)));
    drop(all);
    // A deadline that has passed does not matter where there is room.
    drop(ask(&manager, 1).deadline(past).wait().unwrap());
    ends_empty(&manager);
}

#[test]
fn deadlines_and_releases_at_the_same_moment_lose_nothing() {
    let manager = manager(10);
    let served = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|seed| {
                let manager = &manager;
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed);
                    let mut served = 0;
                    for _ in 0..300 {
                        let bytes = Bytes::new(random.u64(1..=10));
                        let patience = Duration::from_micros(random.u64(0..100));
                        let request = manager.request(Strategy::Specific(GPU), bytes);
                        match request.deadline(patience).wait() {
                            Ok(reservation) => {
                                assert_eq!(reservation.bytes(), bytes);
                                served += 1;
                                thread::yield_now();
                            }
                            Err(ReserveError::TimedOut(_)) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                    served
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>()
    });
    assert!(served > 0);
    ends_empty(&manager);
}

#[test]
fn a_cancelled_token_ends_its_waits_now_and_later() {
    let manager = manager(100);
    let all = reserve(&manager, 100);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let request = ask(&manager, 1).cancel_token(&token);
                scope.spawn(move || request.wait())
            })
            .collect();
        let stays = scope.spawn(|| ask(&manager, 1).wait());
        until(|| manager.waiting() == 4);
        token.cancel();
        for waiter in waiters {
            let error = waiter.join().unwrap().unwrap_err();
            assert!(matches!(error, ReserveError::Cancelled(_)), "{error}");
        }
        assert_eq!(manager.waiting(), 1);
        drop(all);
        drop(stays.join().unwrap().unwrap());
    });
    let late = ask(&manager, 1).cancel_token(&token).wait();
    assert!(matches!(late.unwrap_err(), ReserveError::Cancelled(_)));
    ends_empty(&manager);
}

#[test]
fn cancellation_and_release_at_the_same_moment_lose_nothing() {
    let manager = manager(10);
    for _ in 0..500 {
        let all = reserve(&manager, 10);
        let token = CancelToken::new();
        thread::scope(|scope| {
            let request = ask(&manager, 1).cancel_token(&token);
            let waiter = scope.spawn(move || request.wait());
            scope.spawn(|| token.cancel());
            drop(all);
            match waiter.join().unwrap() {
                Ok(_) | Err(ReserveError::Cancelled(_)) => {}
                Err(error) => panic!("{error}"),
            }
        });
    }
    ends_empty(&manager);
}

/// Lets requests wait one after the other, returns their memory one by one, and says in which order
/// they were served.
fn order_of(manager: &ReservationManager, requests: &[(i32, u64)]) -> Vec<usize> {
    let all = reserve(manager, 100);
    let (send, served) = mpsc::channel();
    thread::scope(|scope| {
        for (number, &(priority, bytes)) in requests.iter().enumerate() {
            let send = send.clone();
            scope.spawn(move || {
                let reservation = ask(manager, bytes).priority(priority).wait().unwrap();
                send.send((number, reservation)).unwrap();
            });
            until(|| manager.waiting() == number + 1);
        }
        drop(all);
        let served = served.iter().take(requests.len());
        served.map(|(number, reservation)| (number, drop(reservation)).0).collect()
    })
}

#[test]
fn those_of_higher_priority_are_served_first_and_then_the_older_ones() {
    let manager = manager(100);
    assert_eq!(order_of(&manager, &[(0, 100), (5, 100), (0, 100), (5, 100)]), [1, 3, 0, 2]);
    ends_empty(&manager);
}

#[test]
fn small_requests_overtake_a_large_one_only_to_the_bound() {
    let overtaking = Overtaking { count: 3, bytes: Bytes::new(1000) };
    let queue = QueueConfig { overtaking, ..QueueConfig::default() };
    let config = ManagerConfig { queue, ..ManagerConfig::default() };
    let manager = ReservationManager::with_config([(GPU, byte_space(100))], config).unwrap();
    let half = reserve(&manager, 50);
    thread::scope(|scope| {
        let large = scope.spawn(|| ask(&manager, 100).wait());
        until(|| manager.waiting() == 1);
        for _ in 0..3 {
            drop(reserve(&manager, 1));
        }
        let error = ask(&manager, 1).now().unwrap_err();
        let ReserveError::NotNow(refusal) = &error else { panic!("{error}") };
        assert_eq!((refusal.available(), refusal.waiting), (Bytes::new(50), 1));
        drop(half);
        assert_eq!(large.join().unwrap().unwrap().bytes(), Bytes::new(100));
    });
    ends_empty(&manager);
}

#[test]
fn a_waiter_takes_whichever_of_its_spaces_is_free_first() {
    let spaces = [(GPU, byte_space(100)), (OTHER, byte_space(100))];
    let manager = ReservationManager::new(spaces).unwrap();
    let _first = reserve(&manager, 100);
    let second = manager.request(Strategy::Specific(OTHER), Bytes::new(100)).now().unwrap();
    thread::scope(|scope| {
        let any = Strategy::AnyInTier(Tier::Gpu);
        let waiter = scope.spawn(|| manager.request(any, Bytes::new(100)).wait());
        until(|| manager.waiting() == 1);
        drop(second);
        assert_eq!(waiter.join().unwrap().unwrap().space(), OTHER);
    });
}

#[test]
fn two_who_wait_for_one_another_are_found_and_one_is_told_what_to_release() {
    let manager = manager(100);
    let hold = |owner| ask(&manager, 50).owner(Owner(owner)).now().unwrap();
    let (first, second) = (hold(1), hold(2));
    let more = |owner| ask(&manager, 50).owner(Owner(owner)).wait();
    thread::scope(|scope| {
        let older = scope.spawn(move || {
            let more = more(1);
            drop(first);
            more
        });
        until(|| manager.waiting() == 1);
        let error = more(2).unwrap_err();
        let ReserveError::Deadlock { stuck, refusal } = &error else { panic!("{error}") };
        assert_eq!((stuck.owner, &stuck.others[..]), (Owner(2), &[Owner(1)][..]));
        assert_eq!(stuck.reservations, [second.id()]);
        assert_eq!(refusal.requested, Bytes::new(50));
        drop(second);
        drop(older.join().unwrap().unwrap());
    });
    ends_empty(&manager);
}

#[test]
fn two_reservations_that_wait_to_grow_are_a_deadlock() {
    let manager = manager(100);
    let (mut first, mut second) = (reserve(&manager, 50), reserve(&manager, 50));
    thread::scope(|scope| {
        let older = scope.spawn(move || {
            first.grow_wait(Bytes::new(20), Duration::from_secs(60)).map(|()| first.bytes())
        });
        until(|| manager.waiting() == 1);
        let error = second.grow_wait(Bytes::new(20), Duration::from_secs(60)).unwrap_err();
        assert!(matches!(error, ReserveError::Deadlock { .. }), "{error}");
        drop(second);
        assert_eq!(older.join().unwrap().unwrap(), Bytes::new(70));
    });
    ends_empty(&manager);
}

#[test]
fn a_deadlock_is_found_on_demand() {
    let config = ManagerConfig { deadlock: DeadlockCheck::OnDemand, ..ManagerConfig::default() };
    let manager = ReservationManager::with_config([(GPU, byte_space(100))], config).unwrap();
    let (mut first, mut second) = (reserve(&manager, 50), reserve(&manager, 50));
    thread::scope(|scope| {
        let grow = |reservation: &mut Reservation| {
            reservation.grow_wait(Bytes::new(20), Duration::from_secs(60))
        };
        let older = scope.spawn(move || grow(&mut first).map(|()| drop(first)));
        until(|| manager.waiting() == 1);
        let younger = scope.spawn(move || grow(&mut second));
        until(|| manager.waiting() == 2);
        assert_eq!(manager.break_deadlocks(), 1);
        assert!(matches!(younger.join().unwrap(), Err(ReserveError::Deadlock { .. })));
        older.join().unwrap().unwrap();
        assert_eq!(manager.break_deadlocks(), 0);
    });
}

#[test]
fn a_check_that_was_put_off_finds_the_deadlock_later() {
    let deadlock = DeadlockCheck::OnWait { max_steps: 0, delay: Duration::from_millis(1) };
    let config = ManagerConfig { deadlock, ..ManagerConfig::default() };
    let manager = ReservationManager::with_config([(GPU, byte_space(100))], config).unwrap();
    let (mut first, mut second) = (reserve(&manager, 50), reserve(&manager, 50));
    thread::scope(|scope| {
        let older =
            scope.spawn(move || first.grow_wait(Bytes::new(20), Duration::from_secs(60)).is_ok());
        until(|| manager.waiting() == 1);
        let younger = second.grow_wait(Bytes::new(20), Duration::from_secs(60));
        assert!(matches!(younger, Err(ReserveError::Deadlock { .. })));
        drop(second);
        assert!(older.join().unwrap());
    });
}

#[test]
fn a_reservation_handed_to_another_thread_is_no_deadlock() {
    let manager = manager(100);
    let handed = reserve(&manager, 100);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| ask(&manager, 100).wait());
        until(|| manager.waiting() == 1);
        scope.spawn(move || drop(handed));
        drop(waiter.join().unwrap().unwrap());
    });
}

#[test]
fn a_growth_waits_with_the_priority_of_its_reservation_or_its_own() {
    for (own, served_first) in [(None, true), (Some(-2), false)] {
        let manager = manager(100);
        let strategy = || Strategy::Specific(GPU);
        let mut high = manager.request(strategy(), Bytes::new(20)).priority(5).now().unwrap();
        assert_eq!(high.priority().0, 5);
        let rest = reserve(&manager, 80);
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let (manager, order) = (&manager, &order);
            scope.spawn(move || {
                let served = manager.request(strategy(), Bytes::new(60)).priority(1).wait();
                order.lock().unwrap().push("request");
                drop(served.unwrap());
            });
            until(|| manager.waiting() == 1);
            scope.spawn(move || {
                let mut growth = high.request_growth(Bytes::new(70));
                if let Some(priority) = own {
                    growth = growth.priority(priority);
                }
                growth.deadline(Duration::from_secs(60)).wait().unwrap();
                order.lock().unwrap().push("growth");
                assert_eq!(high.bytes(), Bytes::new(90));
            });
            until(|| manager.waiting() == 2);
            drop(rest);
        });
        let first = order.into_inner().unwrap()[0];
        assert_eq!(first == "growth", served_first, "with {own:?}");
        ends_empty(&manager);
    }
}

#[test]
fn a_growth_is_cancelled_and_spills_at_once_if_it_is_to() {
    let manager = manager(100);
    let mut small = reserve(&manager, 20);
    let rest = reserve(&manager, 80);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let (small, token) = (&mut small, &token);
        let waiter =
            scope.spawn(move || small.request_growth(Bytes::new(10)).cancel_token(token).wait());
        until(|| manager.waiting() == 1);
        token.cancel();
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, ReserveError::Cancelled(_)), "{error}");
    });
    assert!(small.request_growth(Bytes::new(10)).now().is_err());
    let idle = Mutex::new(Some(rest));
    let _spiller = manager.space(GPU).unwrap().register_spiller(
        vramp_tiers::Priority(0),
        move |_: &vramp_tiers::spill::SpillRequest<'_>| {
            idle.lock().unwrap().take().map_or(Bytes::ZERO, |idle| idle.bytes())
        },
    );
    let at_once = vramp_tiers::spill::Spilling::AlsoNow;
    small.request_growth(Bytes::new(10)).spilling(at_once).now().unwrap();
    assert_eq!(small.bytes(), Bytes::new(30));
    drop(small);
    ends_empty(&manager);
}

#[test]
fn a_reservation_that_outlives_its_manager_says_so() {
    let manager = manager(100);
    let (mut kept, other) = (reserve(&manager, 50), reserve(&manager, 40));
    assert!(!kept.is_shut_down());
    drop(manager);
    assert!(kept.is_shut_down());
    for error in [
        kept.grow(Bytes::new(20)).unwrap_err(),
        kept.grow_wait(Bytes::new(20), Duration::MAX).unwrap_err(),
        kept.request_growth(Bytes::new(20)).now().unwrap_err(),
    ] {
        assert!(matches!(error, ReserveError::ShutDown(_)), "{error}");
        assert!(error.to_string().contains("shut down"), "{error}");
    }
    // It still holds its bytes, and what is free can be taken.
    kept.grow(Bytes::new(10)).unwrap();
    drop(other);
    kept.grow(Bytes::new(40)).unwrap();
    let charge = kept.charge(Bytes::new(100), &vramp_tiers::reserve::LimitPolicy::Fail).unwrap();
    drop((charge, kept));
}

#[test]
fn waits_without_an_end_are_no_panic() {
    let channel = NotificationChannel::new();
    let mut listener = channel.listen();
    assert_eq!(listener.wait_for(Duration::MAX), WaitStatus::Idle);
    channel.notify();
    let deadlock = DeadlockCheck::OnWait { max_steps: 0, delay: Duration::MAX };
    assert_eq!(listener.wait_for(Duration::MAX), WaitStatus::Notified);
    let pauses =
        RetryPolicy { max_retries: 2, first_pause: Duration::MAX, max_pause: Duration::MAX };
    let config = ManagerConfig { deadlock, spill_retries: pauses, ..ManagerConfig::default() };
    let manager = ReservationManager::with_config([(GPU, byte_space(100))], config).unwrap();
    let _spiller =
        manager.space(GPU).unwrap().register_spiller(
            vramp_tiers::Priority(0),
            |_: &vramp_tiers::spill::SpillRequest<'_>| Bytes::ZERO,
        );
    let all = reserve(&manager, 100);
    thread::scope(|scope| {
        let request = manager.request(Strategy::Specific(GPU), Bytes::new(50));
        let waiter = scope.spawn(|| request.deadline(Duration::MAX).wait());
        until(|| manager.waiting() == 1);
        drop(all);
        drop(waiter.join().unwrap().unwrap());
    });
    ends_empty(&manager);
}

/// A polled request with a waker that counts.
struct Polled {
    queued: Box<QueuedReservation>,
    woken: Arc<Woken>,
}

#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Woken>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Polled {
    fn new(request: vramp_tiers::RequestBuilder<'_>) -> Polled {
        match request.enqueue().unwrap() {
            Enqueued::Waiting(queued) => Polled { queued, woken: Arc::default() },
            Enqueued::Served(reservation) => panic!("there is room for {reservation:?}"),
        }
    }

    /// Takes the steps that need no time.
    fn poll(&mut self) -> Result<Result<Reservation, ReserveError>, Option<Instant>> {
        loop {
            match self.queued.step(&Waker::from(Arc::clone(&self.woken))) {
                Step::Ready(reserved) => return Ok(reserved),
                Step::Pending(until) => return Err(until),
                Step::Work => self.queued.work(),
            }
        }
    }

    fn woken(&self) -> u64 {
        self.woken.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_polled_request_has_its_place_among_waiting_threads_and_is_woken_once() {
    let manager = manager(100);
    let all = reserve(&manager, 100);
    let mut first = Polled::new(ask(&manager, 60));
    assert!(first.poll().is_err());
    thread::scope(|scope| {
        let second = scope.spawn(|| ask(&manager, 60).wait().map(drop));
        until(|| manager.waiting() == 2);
        let mut third = Polled::new(ask(&manager, 60));
        assert!(third.poll().is_err());
        drop(all);
        assert_eq!((first.woken(), third.woken()), (1, 0));
        drop(first.poll().unwrap().unwrap());
        second.join().unwrap().unwrap();
        assert_eq!(third.woken(), 1);
        drop(third.poll().unwrap().unwrap());
    });
    ends_empty(&manager);
}

#[test]
fn a_polled_request_that_is_dropped_leaves_the_queue_and_releases_what_it_got() {
    let manager = manager(100);
    let all = reserve(&manager, 100);
    let (mut one, mut other) = (Polled::new(ask(&manager, 80)), Polled::new(ask(&manager, 80)));
    assert!(one.poll().is_err() && other.poll().is_err());
    drop(all);
    assert_eq!((one.woken(), other.woken()), (1, 0));
    drop(one);
    assert_eq!(other.woken(), 1);
    drop(other);
    ends_empty(&manager);
}

#[test]
fn a_polled_request_ends_at_its_deadline_by_a_token_and_with_the_manager() {
    let manager = manager(100);
    let _all = reserve(&manager, 100);
    let soon = Instant::now() + Duration::from_millis(2);
    let mut late = Polled::new(ask(&manager, 60).deadline(soon));
    let until_then = loop {
        match late.poll() {
            Ok(ended) => break ended,
            Err(until) => assert!(until.unwrap() <= soon, "it is polled again at its deadline"),
        }
    };
    assert!(matches!(until_then, Err(ReserveError::TimedOut(_))));
    let token = CancelToken::new();
    let mut cancelled = Polled::new(ask(&manager, 60).cancel_token(&token));
    assert!(cancelled.poll().is_err());
    token.cancel();
    assert_eq!(cancelled.woken(), 1);
    assert!(matches!(cancelled.poll(), Ok(Err(ReserveError::Cancelled(_)))));
    let mut over = Polled::new(ask(&manager, 60));
    assert!(over.poll().is_err());
    manager.shutdown();
    assert_eq!(over.woken(), 1);
    assert!(matches!(over.poll(), Ok(Err(ReserveError::ShutDown(_)))));
    assert_eq!(manager.waiting(), 0);
}
