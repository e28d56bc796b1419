//! Tests of the planner: named cases, and random programs against a naive twin.

mod compared;
mod full_scan;
mod growth;
mod in_place;
mod leases;
mod model;
mod moves;
mod twin;
mod victims;
mod wait_queue;

use super::*;
use vramp_core::Bytes;

/// Pages of 4 bytes, pieces of 16, and 160 bytes for leases.
fn config() -> DeferConfig {
    DeferConfig {
        piece: b(16),
        page: b(4),
        capacity: b(160),
        cooldown_ns: 10,
        recency_ns: 100,
        clean_after_ns: 50,
        promote_after: 2,
    }
}

fn b(count: u64) -> Bytes {
    Bytes::new(count)
}

fn core() -> Deferrables {
    Deferrables::new(config()).unwrap()
}

fn add(core: &mut Deferrables, len: u64) -> BufferId {
    core.add_buffer(b(len)).unwrap().buffer
}

const S1: StreamKey = StreamKey(1);
const S2: StreamKey = StreamKey(2);

fn token(stream: StreamKey, number: u64) -> UseToken {
    UseToken { stream, number }
}

fn try_lease(
    core: &mut Deferrables,
    buffers: &[(BufferId, Access)],
    stream: StreamKey,
    now_ns: u64,
) -> Result<GrantedLease, LeaseRefused> {
    let granted = core
        .lease(&LeaseRequest { buffers, streams: &[stream], ..LeaseRequest::default() }, now_ns);
    core.audit().unwrap();
    granted
}

/// Leases one buffer and restores what is missing.
fn lease(core: &mut Deferrables, buffer: BufferId, access: Access, now_ns: u64) -> BufferLeaseId {
    let granted = try_lease(core, &[(buffer, access)], S1, now_ns).unwrap();
    for fill in granted.restores {
        core.settle(fill.id).unwrap();
    }
    granted.lease
}

fn end(core: &mut Deferrables, lease: BufferLeaseId, now_ns: u64) -> Vec<StaleCopy> {
    let stale = core.end_lease(lease, &LeaseEnd::default(), now_ns).unwrap();
    core.audit().unwrap();
    stale
}

/// Ends a lease with work of the first stream on the buffer.
fn end_used(
    core: &mut Deferrables,
    lease: BufferLeaseId,
    buffer: BufferId,
    number: u64,
) -> Vec<StaleCopy> {
    let uses = [BufferUse { buffer, token: token(S1, number) }];
    let end = LeaseEnd { uses: &uses, writes: Writes::All };
    let stale = core.end_lease(lease, &end, number).unwrap();
    core.audit().unwrap();
    stale
}

/// A buffer with contents on the card and no copy, last used at `now_ns`.
fn written(core: &mut Deferrables, len: u64, now_ns: u64) -> BufferId {
    let buffer = add(core, len);
    let lease = lease(core, buffer, Access::Exclusive, now_ns);
    end(core, lease, now_ns);
    buffer
}

/// A demand of `deficit` bytes with much room below and the same rate everywhere: 1 byte each ns.
fn short(deficit: u64) -> SpillDemand {
    let rate = Some(1_000_000_000);
    SpillDemand {
        deficit: b(deficit),
        rates: Rates {
            to_host: rate,
            from_host: rate,
            to_disk: rate,
            from_disk: rate,
            ..Rates::default()
        },
        room: SpillRoom { host: b(10_000), disk: b(10_000), ..SpillRoom::default() },
    }
}

/// A demand with this room below.
fn with(room: SpillRoom) -> SpillDemand {
    SpillDemand { room, ..short(0) }
}

fn peer(ordinal: u32) -> PeerId {
    PeerId::new(ordinal).unwrap()
}

/// Chooses victims and lets them leave.
fn spill(core: &mut Deferrables, deficit: u64, now_ns: u64) -> Vec<PieceId> {
    let choice = core.choose(&short(deficit), now_ns);
    core.audit().unwrap();
    settle_all(core, &choice)
}

fn settle_all(core: &mut Deferrables, choice: &VictimChoice) -> Vec<PieceId> {
    let before = core.occupied();
    let moves: Vec<CopyOut> =
        choice.victims.iter().flat_map(|victim| victim.moves.clone()).collect();
    let mut freed = Bytes::ZERO;
    for out in &moves {
        match core.settle(out.id).unwrap() {
            Settled::Spilled { piece, frees, .. } => {
                assert_eq!(piece, out.piece);
                freed += frees;
            }
            other => panic!("{} should leave: {other:?}", out.piece),
        }
        core.audit().unwrap();
    }
    assert_eq!(freed, choice.frees);
    assert_eq!(core.occupied(), before - freed);
    moves.iter().map(|out| out.piece).collect()
}

fn piece(buffer: BufferId, index: u32) -> PieceId {
    PieceId { buffer, index }
}

const HOST: Copies = Copies { peer: None, host: true, disk: false };
const DISK: Copies = Copies { peer: None, host: false, disk: true };
