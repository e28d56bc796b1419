//! Models of the hand-off for loom: all orders of releases, waits, cancellations, notifications by
//! spillers and the shutdown. `cargo xtask loom` explores them. A lost wake-up shows as a thread that
//! never ends.

use std::sync::{Arc, PoisonError};

use loom::sync::Mutex;
use loom::thread;

use crate::space::Level;
use crate::spill::{RetryPolicy, SpillRequest, SpillerRegistration};
use crate::{
    Bytes, CancelToken, ManagerConfig, Priority, Reservation, ReservationManager, ReserveError,
    SpaceConfig, SpaceId, Strategy,
};

const GPU: SpaceId = SpaceId::gpu(0);

/// A space of ten bytes.
fn manager() -> ReservationManager {
    let config = SpaceConfig {
        limit: Level::Fraction(1.0),
        granule: Bytes::new(1),
        ..SpaceConfig::gpu(Bytes::new(10))
    };
    // Without pauses: in a model no time passes.
    let spill = RetryPolicy { max_retries: 0, ..RetryPolicy::default() };
    let spill = ManagerConfig { spill_retries: spill, ..ManagerConfig::default() };
    ReservationManager::with_config([(GPU, config)], spill).expect("its levels make sense")
}

fn take(manager: &ReservationManager, bytes: u64) -> Reservation {
    manager.request(Strategy::Specific(GPU), Bytes::new(bytes)).now().expect("there is room")
}

fn wait(manager: &ReservationManager, bytes: u64) -> Result<Reservation, ReserveError> {
    manager.request(Strategy::Specific(GPU), Bytes::new(bytes)).wait()
}

fn ends_empty(manager: &ReservationManager) {
    manager.audit().expect("the ledger is consistent");
    let space = manager.space(GPU).expect("it was configured");
    assert_eq!((manager.waiting(), space.total()), (0, Bytes::ZERO));
}

#[test]
fn one_release_wakes_all_who_fit() {
    loom::model(|| {
        let manager = manager();
        let all = take(&manager, 10);
        let waiters: Vec<_> = [4, 6]
            .map(|bytes| {
                let manager = manager.clone();
                thread::spawn(move || drop(wait(&manager, bytes).expect("it fits in the end")))
            })
            .into();
        drop(all);
        waiters.into_iter().for_each(|waiter| waiter.join().expect("a waiter does not panic"));
        ends_empty(&manager);
    });
}

#[test]
fn two_releases_are_not_one() {
    loom::model(|| {
        let manager = manager();
        let (one, other) = (take(&manager, 5), take(&manager, 5));
        let waiter = {
            let manager = manager.clone();
            thread::spawn(move || drop(wait(&manager, 10).expect("it fits in the end")))
        };
        let helper = thread::spawn(move || drop(other));
        drop(one);
        helper.join().expect("a release does not panic");
        waiter.join().expect("a waiter does not panic");
        ends_empty(&manager);
    });
}

#[test]
fn a_shutdown_ends_every_wait_or_it_is_served() {
    loom::model(|| {
        let manager = manager();
        let all = take(&manager, 10);
        let waiter = {
            let manager = manager.clone();
            thread::spawn(move || match wait(&manager, 10) {
                Ok(_) | Err(ReserveError::ShutDown(_)) => {}
                Err(error) => panic!("{error}"),
            })
        };
        let helper = thread::spawn(move || drop(all));
        manager.shutdown();
        helper.join().expect("a release does not panic");
        waiter.join().expect("a waiter does not panic");
        ends_empty(&manager);
    });
}

#[test]
fn a_cancelled_waiter_has_its_memory_or_nothing() {
    loom::model(|| {
        let manager = manager();
        let all = take(&manager, 10);
        let token = CancelToken::new();
        let waiter = {
            let (manager, token) = (manager.clone(), token.clone());
            thread::spawn(move || {
                let request = manager.request(Strategy::Specific(GPU), Bytes::new(10));
                match request.cancel_token(&token).wait() {
                    Ok(_) | Err(ReserveError::Cancelled(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            })
        };
        let helper = thread::spawn(move || token.cancel());
        drop(all);
        helper.join().expect("a cancellation does not panic");
        waiter.join().expect("a waiter does not panic");
        ends_empty(&manager);
    });
}

type Store = Arc<Mutex<Option<Reservation>>>;

/// Registers a spiller of the reservation in the store.
fn spiller(manager: &ReservationManager, store: &Store) -> SpillerRegistration {
    let store = Arc::clone(store);
    let space = manager.space(GPU).expect("it was configured");
    space.register_spiller(Priority(0), move |_: &SpillRequest<'_>| {
        let spilled = store.lock().unwrap_or_else(PoisonError::into_inner).take();
        spilled.map_or(Bytes::ZERO, |spilled| spilled.bytes())
    })
}

#[test]
fn what_is_offered_is_spilled_whenever_the_waiter_looks() {
    loom::model(|| {
        let manager = manager();
        let all = take(&manager, 10);
        let store = Store::default();
        let registration = spiller(&manager, &store);
        let waiter = {
            let manager = manager.clone();
            thread::spawn(move || drop(wait(&manager, 10).expect("it fits in the end")))
        };
        *store.lock().unwrap_or_else(PoisonError::into_inner) = Some(all);
        registration.notify_spillable();
        waiter.join().expect("a waiter does not panic");
        drop(registration);
        ends_empty(&manager);
    });
}

#[test]
fn one_waiter_spills_while_another_releases() {
    loom::model(|| {
        let manager = manager();
        let (own, other) = (take(&manager, 5), take(&manager, 5));
        let store: Store = Arc::new(Mutex::new(Some(own)));
        let registration = spiller(&manager, &store);
        let waiter = {
            let manager = manager.clone();
            thread::spawn(move || drop(wait(&manager, 10).expect("it fits in the end")))
        };
        drop(other);
        waiter.join().expect("a waiter does not panic");
        drop(registration);
        ends_empty(&manager);
    });
}

#[test]
fn two_waiters_claim_and_both_are_served() {
    loom::model(|| {
        let manager = manager();
        let store: Store = Arc::new(Mutex::new(Some(take(&manager, 10))));
        let registration = spiller(&manager, &store);
        let waiter = {
            let manager = manager.clone();
            thread::spawn(move || drop(wait(&manager, 4).expect("it fits in the end")))
        };
        drop(wait(&manager, 6).expect("it fits in the end"));
        waiter.join().expect("a waiter does not panic");
        drop(registration);
        ends_empty(&manager);
    });
}
