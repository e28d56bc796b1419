//! Tests of the ledger and the wait queue: cases, and random programs against naive twins.

mod accounting;
mod broker;
mod deadlocks;
mod submit;

use super::*;
use vramp_core::Bytes;

const GPU: SpaceId = SpaceId::gpu(0);
const GPU1: SpaceId = SpaceId::gpu(1);
const HOST: SpaceId = SpaceId::host(0);
const DISK: SpaceId = SpaceId::disk(0);

fn b(count: u64) -> Bytes {
    Bytes::new(count)
}

/// `capacity` bytes, reservations up to `limit`, granules of one byte.
fn plain(capacity: u64, limit: u64) -> SpaceConfig {
    SpaceConfig {
        capacity: b(capacity),
        limit: Level::Bytes(b(limit)),
        trigger: Level::Bytes(b(limit * 3 / 4)),
        stop: Level::Bytes(b(limit / 2)),
        granule: b(1),
    }
}

/// Two GPUs of 120 bytes with a limit of 100, and a host of 1200 with a limit of 1000.
fn ledger() -> Ledger {
    let spaces = [(GPU, plain(120, 100)), (GPU1, plain(120, 100)), (HOST, plain(1200, 1000))];
    Ledger::new(spaces).unwrap()
}

impl Ledger {
    /// Charges an allocation; a policy decides about an overrun.
    fn charge_by(
        &mut self,
        id: ReservationId,
        bytes: Bytes,
        policy: LimitPolicy,
    ) -> Result<OverrunOutcome, ChargeError> {
        match self.charge(id, bytes)? {
            Charged::Within => Ok(OverrunOutcome::Within),
            Charged::Overrun(overrun) => self.charge_overrun(id, bytes, policy.decide(&overrun)),
        }
    }
}

fn reserve(ledger: &mut Ledger, space: SpaceId, bytes: u64, owner: u64) -> ReservationId {
    ledger.reserve(space, b(bytes), Owner(owner), Tag::NONE).unwrap()
}

fn total(ledger: &Ledger, space: SpaceId) -> u64 {
    ledger.audit().unwrap();
    ledger.total(space).unwrap().count()
}

fn ask(spaces: &[SpaceId], bytes: u64, owner: u64) -> Request {
    Request {
        candidates: spaces.into(),
        bytes: b(bytes),
        kept: Bytes::ZERO,
        held: Bytes::ZERO,
        place: None,
        priority: Priority(0),
        owner: Owner(owner),
        tag: Tag::NONE,
    }
}

/// Returns the waiter of a request that has to wait.
fn wait(queue: &mut WaitQueue, ledger: &mut Ledger, request: Request) -> WaiterId {
    match queue.submit(ledger, &request) {
        Ok(Submitted::Waiting(waiter)) => waiter,
        other => panic!("it should wait: {other:?}"),
    }
}

/// Returns the reservation of a request that is served at once.
fn serve(queue: &mut WaitQueue, ledger: &mut Ledger, request: Request) -> (ReservationId, SpaceId) {
    match queue.submit(ledger, &request) {
        Ok(Submitted::Granted { reservation, space, .. }) => (reservation, space),
        other => panic!("it should be served: {other:?}"),
    }
}

fn who(grants: &Grants) -> Vec<WaiterId> {
    grants.iter().map(|granted| granted.waiter).collect()
}
