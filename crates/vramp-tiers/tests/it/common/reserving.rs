//! Shared by the tests of reservations: a GPU in single bytes, and requests for it.
use std::time::{Duration, Instant};

use vramp_tiers::space::Level;
use vramp_tiers::{
    Bytes, RequestBuilder, Reservation, ReservationManager, SpaceConfig, SpaceId, Strategy,
};

pub const GPU: SpaceId = SpaceId::gpu(0);

/// A space of which all bytes can be reserved.
pub fn space(capacity: u64) -> SpaceConfig {
    SpaceConfig {
        limit: Level::Fraction(1.0),
        granule: Bytes::new(1),
        ..SpaceConfig::gpu(Bytes::new(capacity))
    }
}

pub fn ask(manager: &ReservationManager, bytes: u64) -> RequestBuilder<'_> {
    manager.request(Strategy::Specific(GPU), Bytes::new(bytes))
}

pub fn reserve(manager: &ReservationManager, bytes: u64) -> Reservation {
    ask(manager, bytes).now().unwrap()
}

pub fn until(what: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !what() {
        assert!(Instant::now() < end, "it did not happen within 30 s");
        vramp_testing::moment();
    }
}

/// Asserts that no request waits and nothing is charged.
pub fn ends_empty(manager: &ReservationManager) {
    manager.audit().unwrap();
    assert_eq!(manager.waiting(), 0);
    for space in manager.spaces() {
        let census = space.census();
        assert_eq!((census.total, census.reservations), (Bytes::ZERO, 0));
    }
}
