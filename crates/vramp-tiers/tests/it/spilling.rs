//! Spillers: how much they free, for which request, and how that ends.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::blocks::{GPU, ask, byte_space, ends_empty, reserve, until};
use vramp_tiers::spill::{RetryPolicy, SpillRequest, SpillerRegistration, Spilling};
use vramp_tiers::{
    Bytes, CancelToken, ManagerConfig, Owner, Priority, Reservation, ReservationManager,
    ReserveError, SpaceId, Strategy, Tier,
};

const HOST: SpaceId = SpaceId::host(0);

/// A card of 100 bytes and a host of 50.
fn manager() -> ReservationManager {
    manager_with(RetryPolicy::default())
}

fn manager_with(spill: RetryPolicy) -> ReservationManager {
    let spaces = [(GPU, byte_space(100)), (HOST, byte_space(50))];
    let config = ManagerConfig { spill_retries: spill, ..ManagerConfig::default() };
    ReservationManager::with_config(spaces, config).unwrap()
}

fn once() -> RetryPolicy {
    RetryPolicy { max_retries: 0, ..RetryPolicy::default() }
}

/// Data in blocks of `step` bytes that may leave the card.
struct Store {
    blocks: Mutex<Vec<Reservation>>,
    freed: AtomicU64,
    calls: AtomicU32,
    _registration: SpillerRegistration,
}

fn store(manager: &ReservationManager, step: u64, count: usize) -> Arc<Store> {
    Arc::new_cyclic(|store: &std::sync::Weak<Store>| {
        let blocks = (0..count).map(|_| reserve(manager, step)).collect();
        let store = store.clone();
        let spill = move |shortage: &SpillRequest<'_>| {
            store.upgrade().map_or(Bytes::ZERO, |store| store.spill(shortage.bytes()))
        };
        Store {
            blocks: Mutex::new(blocks),
            freed: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            _registration: manager.space(GPU).unwrap().register_spiller(Priority(0), spill),
        }
    })
}

impl Store {
    fn spill(&self, bytes: Bytes) -> Bytes {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut freed = Bytes::ZERO;
        while freed < bytes {
            let Some(block) = self.blocks.lock().unwrap().pop() else { break };
            freed += block.bytes();
        }
        self.freed.fetch_add(freed.count(), Ordering::Relaxed);
        freed
    }

    fn freed(&self) -> u64 {
        self.freed.load(Ordering::Relaxed)
    }
}

#[test]
fn one_who_must_wait_spills_exactly_what_it_lacks_and_is_served() {
    let manager = manager();
    let store = store(&manager, 10, 10);
    let part = ask(&manager, 35).wait().unwrap();
    assert_eq!((part.bytes(), store.freed()), (Bytes::new(35), 40), "to the end of the last step");
    let more = ask(&manager, 25).wait().unwrap();
    assert_eq!(store.freed(), 60, "five were free");
    store.blocks.lock().unwrap().clear();
    drop((part, more));
    ends_empty(&manager);
}

#[test]
fn nothing_is_spilled_for_what_fits_or_shall_not_wait_or_spill() {
    let manager = manager();
    let store = store(&manager, 10, 9);
    let ask = |bytes| ask(&manager, bytes);
    drop(ask(10).wait().unwrap());
    assert!(matches!(ask(20).now(), Err(ReserveError::NotNow(_))));
    let late = ask(20).spilling(Spilling::Never).deadline(Duration::from_millis(2)).wait();
    assert!(matches!(late, Err(ReserveError::TimedOut(_))));
    assert!(matches!(ask(101).wait(), Err(ReserveError::NeverFits(_))));
    assert_eq!(store.calls.load(Ordering::Relaxed), 0);
    assert_eq!(ask(20).spilling(Spilling::AlsoNow).now().unwrap().bytes(), Bytes::new(20));
    assert_eq!(store.freed(), 10);
}

#[test]
fn now_asks_each_spiller_once_and_then_takes_what_there_is() {
    let manager = manager();
    let store = store(&manager, 10, 3);
    let rest = reserve(&manager, 70);
    let ask = |bytes| ask(&manager, bytes).spilling(Spilling::AlsoNow).now();
    assert!(matches!(ask(50), Err(ReserveError::NotNow(_))));
    assert_eq!((store.freed(), store.calls.load(Ordering::Relaxed)), (30, 1));
    assert_eq!(ask(30).unwrap().bytes(), Bytes::new(30));
    manager.shutdown();
    assert!(matches!(ask(50), Err(ReserveError::NotNow(_))), "it may not wait");
    drop(rest);
    ends_empty(&manager);
}

#[test]
fn two_waiters_never_spill_for_one_deficit() {
    for _ in 0..50 {
        let manager = manager();
        let store = store(&manager, 1, 100);
        let start = Barrier::new(8);
        thread::scope(|scope| {
            for n in 0..8 {
                let (manager, start) = (&manager, &start);
                scope.spawn(move || {
                    start.wait();
                    std::mem::forget(ask(manager, 5 + n).wait().unwrap());
                });
            }
        });
        assert_eq!(store.freed(), (5..13).sum::<u64>());
    }
}

#[test]
fn memory_that_comes_from_elsewhere_is_not_spilled() {
    let manager = manager_with(once());
    let holder = Mutex::new(Some(reserve(&manager, 100)));
    let other = Mutex::new(holder.lock().unwrap().as_mut().unwrap().split(Bytes::new(60)).ok());
    let gpu = manager.space(GPU).unwrap();
    let left = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&left);
    let slow = gpu.register_spiller(Priority(0), move |shortage: &SpillRequest<'_>| {
        recorded.lock().unwrap().push((shortage.bytes(), shortage.left()));
        drop(other.lock().unwrap().take());
        recorded.lock().unwrap().push((shortage.bytes(), shortage.left()));
        Bytes::ZERO
    });
    let late = ask(&manager, 80).deadline(Duration::from_millis(5)).wait();
    assert!(matches!(late, Err(ReserveError::TimedOut(_))));
    let [all, some] = [80, 20].map(Bytes::new);
    assert_eq!(*left.lock().unwrap(), [(all, all), (all, some)]);
    drop((slow, holder));
    ends_empty(&manager);
}

#[test]
fn the_most_important_spiller_is_asked_first_and_the_next_for_the_rest() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let held = Arc::new(Mutex::new(reserve(&manager, 100)));
    let calls = Arc::new(Mutex::new(Vec::new()));
    let spiller = |name: &'static str, most: u64| {
        let (held, calls) = (Arc::clone(&held), Arc::clone(&calls));
        move |shortage: &SpillRequest<'_>| {
            calls.lock().unwrap().push((name, shortage.bytes().count()));
            let part = held.lock().unwrap().split(shortage.bytes().min(Bytes::new(most)));
            part.map_or(Bytes::ZERO, |part| part.bytes())
        }
    };
    let _last = gpu.register_spiller(Priority(-1), spiller("last", 100));
    let _first = gpu.register_spiller(Priority(1), spiller("first", 10));
    let _second = gpu.register_spiller(Priority(0), spiller("second", 15));
    let gone = gpu.register_spiller(Priority(9), spiller("gone", 100));
    drop(gone);
    let part = ask(&manager, 60).wait().unwrap();
    assert_eq!(*calls.lock().unwrap(), [("first", 60), ("second", 50), ("last", 35)]);
    drop(part);
}

#[test]
fn a_spiller_that_panics_is_contained_and_the_next_is_asked() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let store = store(&manager, 10, 10);
    let broken =
        gpu.register_spiller(Priority(1), |_: &SpillRequest<'_>| -> Bytes { panic!("on purpose") });
    drop(ask(&manager, 10).wait().unwrap());
    assert_eq!((manager.panics(), store.freed()), (1, 10));
    // The thread is not recorded as spilling any more.
    drop(broken);
    drop(ask(&manager, 20).wait().unwrap());
    assert_eq!((manager.panics(), store.freed()), (1, 20));
}

#[test]
fn spilling_is_retried_so_often_and_then_only_waits() {
    let retries = RetryPolicy {
        max_retries: 3,
        first_pause: Duration::from_micros(10),
        max_pause: Duration::from_micros(20),
    };
    let manager = manager_with(retries);
    let all = reserve(&manager, 100);
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&attempts);
    let nothing = move |shortage: &SpillRequest<'_>| {
        recorded.lock().unwrap().push(shortage.attempt());
        Bytes::ZERO
    };
    let _nothing = manager.space(GPU).unwrap().register_spiller(Priority(0), nothing);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| ask(&manager, 1).wait());
        until(|| attempts.lock().unwrap().len() == 4);
        until(|| manager.waiting() == 1);
        drop(all);
        drop(waiter.join().unwrap().unwrap());
    });
    assert_eq!(*attempts.lock().unwrap(), [1, 2, 3, 4]);
    // The next request begins anew.
    let all = reserve(&manager, 100);
    assert!(ask(&manager, 1).deadline(Duration::from_millis(20)).wait().is_err());
    assert_eq!(attempts.lock().unwrap()[4..], [1, 2, 3, 4]);
    drop(all);
}

#[test]
fn a_spiller_that_lies_about_what_it_freed_is_asked_again_within_the_bound() {
    let retries = RetryPolicy {
        max_retries: 3,
        first_pause: Duration::from_micros(10),
        max_pause: Duration::from_micros(20),
    };
    let manager = manager_with(retries);
    let _all = reserve(&manager, 100);
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let liar = move |_: &SpillRequest<'_>| {
        count.fetch_add(1, Ordering::Relaxed);
        Bytes::new(u64::MAX)
    };
    let gpu = manager.space(GPU).unwrap();
    let _liar = gpu.register_spiller(Priority(0), liar);
    let request = gpu.request(Bytes::new(10)).deadline(Duration::from_millis(20)).wait();
    assert!(matches!(request, Err(ReserveError::TimedOut(_))));
    assert_eq!(calls.load(Ordering::Relaxed), 4);
    assert_eq!(gpu.spill(Bytes::new(5)), Bytes::new(u64::MAX), "as it says");
}

#[test]
fn what_is_offered_later_is_spilled_for_those_who_wait() {
    let manager = manager_with(once());
    let gpu = manager.space(GPU).unwrap();
    let held = Arc::new(Mutex::new(None));
    let all = Mutex::new(Some(reserve(&manager, 100)));
    let give = Arc::clone(&held);
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let registration = gpu.register_spiller(Priority(0), move |_: &SpillRequest<'_>| {
        count.fetch_add(1, Ordering::Relaxed);
        let given: Option<Reservation> = give.lock().unwrap().take();
        given.map_or(Bytes::ZERO, |given| given.bytes())
    });
    thread::scope(|scope| {
        let waiter = scope.spawn(|| gpu.request(Bytes::new(40)).wait());
        until(|| calls.load(Ordering::Relaxed) == 1);
        *held.lock().unwrap() = all.lock().unwrap().take();
        registration.notify_spillable();
        drop(waiter.join().unwrap().unwrap());
    });
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    // So is what a new spiller can free.
    let all = reserve(&manager, 100);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| gpu.request(Bytes::new(40)).wait());
        until(|| calls.load(Ordering::Relaxed) == 3);
        let all = Mutex::new(Some(all));
        let late = gpu.register_spiller(Priority(0), move |_: &SpillRequest<'_>| {
            all.lock().unwrap().take().map_or(Bytes::ZERO, |all| all.bytes())
        });
        drop(waiter.join().unwrap().unwrap());
        drop(late);
    });
    ends_empty(&manager);
}

#[test]
fn a_spiller_may_wait_where_its_data_goes_and_not_in_the_space_it_empties() {
    let manager = manager();
    let store = Arc::new(Mutex::new(reserve(&manager, 100)));
    let below = Arc::new(Mutex::new(vec![
        manager.request(Strategy::Specific(HOST), Bytes::new(50)).now().unwrap(),
    ]));
    let errors = Arc::new(Mutex::new(Vec::new()));
    let (handle, recorded, to) = (manager.clone(), Arc::clone(&errors), Arc::clone(&below));
    let down = move |shortage: &SpillRequest<'_>| {
        let here = ask(&handle, 1);
        recorded.lock().unwrap().push(here.wait().unwrap_err());
        assert_eq!(handle.space(GPU).unwrap().spill(Bytes::new(1)), Bytes::ZERO);
        // This request spills the host's data, which is dropped.
        let room = handle.request(Strategy::Downgrade(GPU), shortage.bytes()).wait().unwrap();
        to.lock().unwrap().push(room);
        store.lock().unwrap().split(shortage.bytes()).unwrap().bytes()
    };
    let further = move |_: &SpillRequest<'_>| {
        let old = below.lock().unwrap().remove(0);
        old.bytes()
    };
    let _down = manager.space(GPU).unwrap().register_spiller(Priority(0), down);
    let _further = manager.space(HOST).unwrap().register_spiller(Priority(0), further);
    let part = ask(&manager, 30).wait().unwrap();
    assert_eq!(part.bytes(), Bytes::new(30));
    let errors = std::mem::take(&mut *errors.lock().unwrap());
    assert!(matches!(errors[..], [ReserveError::InSpiller(_)]), "{errors:?}");
    assert_eq!((manager.panics(), manager.space(HOST).unwrap().total()), (0, Bytes::new(30)));
}

#[test]
fn a_cancelled_waiter_stops_spilling_after_the_call_under_way() {
    let manager = manager();
    let _all = reserve(&manager, 100);
    let token = CancelToken::new();
    let (cancel, calls) = (token.clone(), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&calls);
    let spiller = move |shortage: &SpillRequest<'_>| {
        count.fetch_add(1, Ordering::Relaxed);
        cancel.cancel();
        assert_eq!(shortage.left(), Bytes::ZERO, "the waiter is gone");
        Bytes::ZERO
    };
    let _spiller = manager.space(GPU).unwrap().register_spiller(Priority(0), spiller);
    assert!(matches!(
        ask(&manager, 10).cancel_token(&token).wait(),
        Err(ReserveError::Cancelled(_))
    ));
    assert_eq!((calls.load(Ordering::Relaxed), manager.panics()), (1, 0));
}

#[test]
fn a_shutdown_amid_spilling_ends_the_wait() {
    let manager = manager();
    let _all = reserve(&manager, 100);
    let handle = manager.clone();
    let spiller = move |_: &SpillRequest<'_>| {
        handle.shutdown();
        Bytes::ZERO
    };
    let _spiller = manager.space(GPU).unwrap().register_spiller(Priority(0), spiller);
    assert!(matches!(ask(&manager, 10).wait(), Err(ReserveError::ShutDown(_))));
}

#[test]
fn one_who_can_spill_its_own_memory_is_in_no_deadlock() {
    let manager = manager();
    let owner = Owner(7);
    let own = ask(&manager, 80).owner(owner).now().unwrap();
    let own = Mutex::new(Some(own));
    let spill = move |_: &SpillRequest<'_>| {
        own.lock().unwrap().take().map_or(Bytes::ZERO, |own| own.bytes())
    };
    let _spiller = manager.space(GPU).unwrap().register_spiller(Priority(0), spill);
    let more = ask(&manager, 50).owner(owner).wait();
    let more = more.unwrap();
    // Nothing is left to spill: the owner waits for its own memory.
    let error = ask(&manager, 60).owner(owner).wait();
    assert!(matches!(error, Err(ReserveError::Deadlock { .. })), "{error:?}");
    drop(more);
}

#[test]
fn the_next_space_is_asked_where_the_first_has_too_little_to_spill() {
    let manager = manager();
    let store = store(&manager, 10, 2);
    let rest = reserve(&manager, 80);
    let below = manager.request(Strategy::Specific(HOST), Bytes::new(50)).now().unwrap();
    let below = Mutex::new(Some(below));
    let spill = move |_: &SpillRequest<'_>| {
        below.lock().unwrap().take().map_or(Bytes::ZERO, |below| below.bytes())
    };
    let _spiller = manager.space(HOST).unwrap().register_spiller(Priority(0), spill);
    let tiers = Strategy::AnyInTiers([Tier::Gpu, Tier::Host].into_iter().collect());
    let part = manager.request(tiers, Bytes::new(40)).wait().unwrap();
    assert_eq!((part.space(), store.freed()), (HOST, 20));
    drop((rest, part));
    ends_empty(&manager);
}

#[test]
fn a_space_spills_on_demand_and_says_how_much() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    assert_eq!(gpu.spill(Bytes::new(10)), Bytes::ZERO, "no spiller is registered");
    let store = store(&manager, 10, 5);
    assert_eq!(gpu.spill(Bytes::ZERO), Bytes::ZERO);
    assert_eq!(store.calls.load(Ordering::Relaxed), 0);
    assert_eq!(gpu.spill(Bytes::new(15)), Bytes::new(20));
    assert_eq!(gpu.spill(Bytes::new(100)), Bytes::new(30), "what there is");
    ends_empty(&manager);
}

#[test]
fn a_subscriber_to_pressure_keeps_the_space_below_its_trigger() {
    let manager = manager();
    let gpu = manager.space(GPU).unwrap();
    let store = store(&manager, 10, 7);
    let handle = gpu.clone();
    let _subscription = gpu.subscribe(move |_, crossed| {
        if crossed == vramp_tiers::space::Crossing::Trigger {
            handle.spill(handle.amount_to_downgrade());
        }
    });
    let part = reserve(&manager, 10);
    assert_eq!((gpu.total(), store.freed()), (Bytes::new(60), 20), "down to the stop at 65");
    drop(part);
}
