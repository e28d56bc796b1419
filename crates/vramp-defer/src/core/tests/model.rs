//! Random programs: the planner and its naive twin do the same, and must agree.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::twin::*;
use super::*;

/// The stream of copies out.
const COPIES: u64 = 8;

/// Result of a step: an error where the buffers and their twin disagree.
type Step = Result<(), TestCaseError>;

#[derive(Clone, Debug)]
enum Act {
    Add { len: u64 },
    Tenant,
    Remove { which: usize },
    Discard { which: usize },
    Lease { which: [usize; 2], writes: [bool; 2], stream: u64, stays: bool, waits: bool },
    Retry { which: usize, stays: bool },
    OfPool { stream: u64 },
    Leave { which: usize },
    Readable { which: usize },
    Queue { which: usize },
    LeaveWithout { which: usize },
    End { which: usize, used: bool, part: bool },
    Cancel { which: usize },
    Finish { which: usize, fails: bool, queued: bool },
    Over { stream: u64 },
    Choose { deficit: u64, room: u64, peers: [u64; 2] },
    Reclaim { deficit: u64, room: u64 },
    ReclaimPeer { on: u32, deficit: u64, room: u64 },
    Redirect { which: usize, room: u64 },
    PinMemory { which: usize, on: bool },
    Clean { budget: u64 },
    Pin { which: usize },
    Unpin { which: usize },
    Hint { which: usize, hint: u8 },
}

fn act() -> impl Strategy<Value = Act> {
    let which = || 0usize..8;
    let lease = (which(), which(), any::<[bool; 2]>(), 0u64..3, any::<bool>(), any::<bool>());
    prop_oneof![
        2 => (1u64..4000).prop_map(|len| Act::Add { len }),
        2 => Just(Act::Tenant),
        1 => which().prop_map(|which| Act::Remove { which }),
        1 => which().prop_map(|which| Act::Discard { which }),
        8 => lease.prop_map(|(a, c, writes, stream, stays, waits)| {
            Act::Lease { which: [a, c], writes, stream, stays, waits }
        }),
        4 => (which(), any::<bool>()).prop_map(|(which, stays)| Act::Retry { which, stays }),
        1 => (0u64..3).prop_map(|stream| Act::OfPool { stream }),
        2 => which().prop_map(|which| Act::Leave { which }),
        2 => which().prop_map(|which| Act::Readable { which }),
        3 => which().prop_map(|which| Act::Queue { which }),
        1 => which().prop_map(|which| Act::LeaveWithout { which }),
        6 => (which(), any::<bool>(), any::<bool>())
            .prop_map(|(which, used, part)| Act::End { which, used, part }),
        1 => which().prop_map(|which| Act::Cancel { which }),
        12 => (which(), 0u8..6, any::<bool>())
            .prop_map(|(which, fails, queued)| Act::Finish { which, fails: fails == 0, queued }),
        4 => (0u64..4).prop_map(|stream| Act::Over { stream }),
        6 => (1u64..6000, 0u64..9000, any::<bool>(), [0u64..4000, 0u64..4000]).prop_map(
            |(deficit, room, has_peers, peers)| {
                let peers = if has_peers { peers } else { [0; 2] };
                Act::Choose { deficit, room, peers }
            }
        ),
        2 => (0u32..2, 1u64..6000, 0u64..4000)
            .prop_map(|(on, deficit, room)| Act::ReclaimPeer { on, deficit, room }),
        2 => (which(), 0u64..4000).prop_map(|(which, room)| Act::Redirect { which, room }),
        1 => (which(), any::<bool>()).prop_map(|(which, on)| Act::PinMemory { which, on }),
        2 => (1u64..4000, 0u64..4000).prop_map(|(deficit, room)| Act::Reclaim { deficit, room }),
        2 => (1u64..4000).prop_map(|budget| Act::Clean { budget }),
        3 => (which(), any::<bool>()).prop_map(|(which, on)| match on {
            true => Act::Pin { which },
            false => Act::Unpin { which },
        }),
        1 => (which(), 0u8..3).prop_map(|(which, hint)| Act::Hint { which, hint }),
    ]
}

fn begin_out(world: &mut World, out: &CopyOut, leaving: bool) -> Step {
    let twin = world.twin(out.piece.buffer).clone();
    let bits = twin.pieces[out.piece.index as usize];
    prop_assert!(world.may_leave(twin.range), "{} may not leave", out.piece);
    let dirty = bits.card.is_some() && bits.below().is_none();
    let on_card = matches!(out.to, Some(SpillTier::Peer(_)));
    prop_assert!(!on_card || !twin.readable, "what is read in place goes to the host");
    let reads = twin.readable && bits.card.is_some() && bits.host.is_none();
    let may = dirty || (reads && out.to == Some(SpillTier::Host));
    prop_assert!(!dirty || out.to.is_some(), "{:?} has to be copied", bits);
    prop_assert!(out.to.is_none() || may, "{:?} need not be copied", bits);
    let writes: Vec<u64> = twin.writes.keys().copied().collect();
    let waits: Vec<u64> = out.copy_after.iter().map(|token| token.stream.0).collect();
    prop_assert_eq!(waits, writes);
    prop_assert!(leaving || twin.reads.is_empty() && twin.writes.is_empty());
    world.begin(out.id, out.piece, Kind::Out(out.to))
}

fn write(world: &mut World, piece: PieceId) {
    world.written += 1;
    let number = world.written;
    let bits = world.bits(piece);
    (bits.latest, bits.card) = (number, Some(number));
}

/// A request that is not in the queue. Returns true if it was granted.
fn lease_step(core: &mut Deferrables, world: &mut World, ask: &Ask) -> Result<bool, TestCaseError> {
    let wanted = &world.split_by_place(ask);
    let held = |lease: &&TwinLease| excludes(&lease.ways(), wanted);
    let busy: Vec<BufferLeaseId> = world.leases.iter().filter(held).map(|lease| lease.id).collect();
    let (standing, settling) = (world.standing_of_a_new_one(core, ask), world.settling(wanted));
    let list = ask.list();
    let streams = [StreamKey(ask.stream)];
    let holder = HolderKey(ask.stream);
    let request = LeaseRequest { buffers: &list, streams: &streams, holder, holding: &[] };
    let granted = core.lease_in_place(&request, &ask.in_place_allowed(), world.now);
    let given = granted.is_ok();
    match granted {
        Ok(granted) => {
            prop_assert_eq!(standing, Standing::Served);
            take_step(core, world, ask, granted)?;
        }
        Err(LeaseRefused::TooLarge { .. }) => prop_assert_eq!(standing, Standing::Never),
        Err(LeaseRefused::Busy { held_by }) => prop_assert_eq!(held_by, busy),
        Err(LeaseRefused::Settling { moves }) => prop_assert_eq!(moves.len(), settling),
        Err(LeaseRefused::Full { needed, committed, .. }) => {
            prop_assert_eq!(committed.count(), world.committed(core));
            prop_assert!(committed + needed > b(CAPACITY));
        }
        Err(LeaseRefused::OlderWaiters { behind }) => {
            let Standing::Behind(place) = standing else {
                return Err(TestCaseError::fail(format!(
                    "{behind} is not in its way: {standing:?}"
                )));
            };
            prop_assert_eq!(behind, world.wait_queue[place].ticket);
        }
        Err(other) => prop_assert!(false, "{other}"),
    }
    prop_assert_eq!(given, standing == Standing::Served);
    Ok(given)
}

/// The planner granted a lease.
fn take_step(
    core: &Deferrables,
    world: &mut World,
    ask: &Ask,
    granted: GrantedLease,
) -> Result<(), TestCaseError> {
    let Ask { stream, ref buffers, stays, .. } = *ask;
    let wanted = &world.split_by_place(ask);
    let in_place = granted.in_place;
    prop_assert!(stays || in_place.is_empty());
    let told = |id| in_place.contains(id);
    prop_assert!(wanted.iter().all(|(id, way)| told(id) == (*way == Way::InPlace)));
    let mut after: BTreeMap<u64, u64> = BTreeMap::new();
    for (&id, &access) in buffers {
        let twin = world.twin(id);
        let reads = twin.reads.iter().filter(|_| access == Access::Exclusive);
        for (&stream, &number) in twin.writes.iter().chain(reads) {
            let known = after.entry(stream).or_default();
            *known = number.max(*known);
        }
    }
    for one in &world.moves {
        let written = wanted.get(&one.piece.buffer) == Some(&Way::Exclusive);
        if let (true, Some(number)) = (written, one.queued) {
            let known = after.entry(COPIES).or_default();
            *known = number.max(*known);
        }
    }
    after.remove(&stream);
    let told = granted.after.iter().map(|token| (token.stream.0, token.number));
    prop_assert_eq!(told.collect::<BTreeMap<u64, u64>>(), after);
    for fill in &granted.restores {
        prop_assert_eq!(world.bits(fill.piece).card, None);
        world.begin(fill.id, fill.piece, Kind::Restore(fill.from))?;
    }
    let committed_before = world.committed(core);
    let buffers = buffers.clone();
    world.leases.push(TwinLease { id: granted.lease, stream, buffers, in_place });
    // Memory that was pinned without a lease may exceed it; leases never add to that.
    prop_assert!(world.committed(core) <= CAPACITY.max(committed_before));
    Ok(())
}

/// Checks the marked waiters. Each that is served could be, and no other can be.
fn serve_step(core: &mut Deferrables, world: &mut World) -> Step {
    while let Some(ticket) = core.next_to_check() {
        let place = world.wait_queue.iter().position(|waiter| waiter.ticket == ticket);
        let place = place.expect("the planner has a waiter that its twin has not");
        let standing = world.standings(core)[place];
        let ask = world.wait_queue[place].ask.clone();
        match core.recheck(ticket, &ask.in_place_allowed(), world.now) {
            Ok(None) => {}
            Ok(Some(granted)) => {
                prop_assert_eq!(standing, Standing::Served, "{} was served", ticket);
                world.wait_queue.remove(place);
                take_step(core, world, &ask, granted)?;
            }
            Err(refused) => {
                prop_assert_eq!(standing, Standing::Never, "{}", refused);
                world.wait_queue.remove(place);
            }
        }
        core.audit().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }
    let mut behind_pool = false;
    for (waiter, standing) in world.wait_queue.iter().zip(world.standings(core)) {
        // One that waited for a request of the pool may have to wait for its end.
        behind_pool |= waiter.ask.is_of_pool;
        let waits = behind_pool || !matches!(standing, Standing::Served | Standing::Never);
        prop_assert!(waits, "{} was forgotten: {:?}", waiter.ticket, standing);
    }
    Ok(())
}

/// Enters the queue.
fn wait_step(core: &mut Deferrables, world: &mut World, ask: Ask) -> Step {
    let holder = HolderKey(ask.stream);
    let streams = [StreamKey(ask.stream)];
    let list = ask.list();
    let request = LeaseRequest { buffers: &list, streams: &streams, holder, holding: &[] };
    let ticket = core.enqueue(&request, &ask.in_place_allowed(), None).unwrap();
    world.wait_queue.push(TwinWaiter { ticket, ask });
    Ok(())
}

fn end_step(
    core: &mut Deferrables,
    world: &mut World,
    which: usize,
    used: bool,
    part: bool,
) -> Step {
    if world.leases.is_empty() {
        return Ok(());
    }
    let place = which % world.leases.len();
    let lease = world.leases[place].clone();
    world.point += 1;
    let now = token(StreamKey(lease.stream), world.point);
    let uses: Vec<BufferUse> =
        lease.buffers.keys().map(|&buffer| BufferUse { buffer, token: now }).collect();
    let exclusive = |(_, access): &(&BufferId, &Access)| **access == Access::Exclusive;
    let first = lease.buffers.iter().filter(exclusive).map(|(&buffer, _)| buffer);
    let parts: Vec<WrittenRange> =
        first.map(|buffer| WrittenRange { buffer, offset: b(0), len: b(1) }).collect();
    let writes = if part { Writes::Only(&parts) } else { Writes::All };
    let end = LeaseEnd { uses: if used { &uses } else { &[] }, writes };
    let is_there = |bits: &Bits| bits.card.is_some() || bits.latest == 0;
    let ids: Vec<BufferId> = lease.buffers.keys().copied().collect();
    let mut brought = ids.iter().filter(|id| !lease.in_place.contains(id));
    let filled = brought.all(|&id| world.twin(id).pieces.iter().all(is_there));
    let stale = match core.end_lease(lease.id, &end, world.now) {
        Ok(stale) => stale,
        Err(error) => {
            prop_assert!(!filled, "{error}");
            return Ok(());
        }
    };
    prop_assert!(filled, "the lease ended before all was back");
    world.leases.remove(place);
    for (&id, &access) in &lease.buffers {
        let twin = world.twin(id);
        for bits in &twin.pieces {
            let read = bits.card.or(bits.host.filter(|_| lease.in_place.contains(&id)));
            prop_assert!(bits.latest == 0 || read == Some(bits.latest), "{id}: {bits:?}");
        }
        let point = now.number;
        match access {
            Access::Shared if used => {
                twin.reads.insert(lease.stream, point);
            }
            Access::Exclusive if used => {
                twin.reads.clear();
                twin.writes = BTreeMap::from([(lease.stream, point)]);
            }
            _ => {}
        }
        if access == Access::Exclusive {
            let all = !part || twin.pins > 0;
            let count = if all { twin.pieces.len() } else { 1 };
            (0..count as u32).for_each(|index| write(world, piece(id, index)));
        }
    }
    world.drop_copies(&stale)?;
    for twin in &world.buffers {
        for bits in &twin.pieces {
            let stale = |copy: Option<u64>| copy.is_some_and(|copy| copy != bits.latest);
            let on_card = bits.peer.map(|(_, number)| number);
            let stale_copy = [on_card, bits.host, bits.disk].into_iter().any(stale);
            prop_assert!(!stale_copy, "a stale copy counts: {bits:?}");
        }
    }
    Ok(())
}

fn finish_step(
    core: &mut Deferrables,
    world: &mut World,
    which: usize,
    fails: bool,
    queued: bool,
) -> Step {
    if world.moves.is_empty() {
        return Ok(());
    }
    let place = which % world.moves.len();
    let TwinMove { id, piece, kind, read, began, queued: copied_at, .. } = world.moves[place];
    let wrote = world.bits(piece).latest > began;
    if fails {
        prop_assert_eq!(core.abandon(id).unwrap().piece, piece);
        read_by_copy(world, piece, copied_at);
    } else if queued && matches!(kind, Kind::Restore(_)) {
        world.point += 1;
        let point = world.point;
        core.restore_queued(id, token(StreamKey(9), point)).unwrap();
        world.twin(piece.buffer).writes.insert(9, point);
        world.bits(piece).card = read;
    } else {
        let idle = {
            let twin = world.twin(piece.buffer);
            twin.reads.is_empty() && twin.writes.is_empty()
        };
        let range = world.twin(piece.buffer).range;
        let settled = match core.settle(id) {
            Ok(settled) => settled,
            Err(error) => {
                prop_assert!(!idle && matches!(error, SettleError::StillUsed { .. }), "{error}");
                return Ok(());
            }
        };
        let leaves = world.may_leave(range);
        let bits = world.bits(piece);
        match (settled, kind) {
            (Settled::Restored { .. }, Kind::Restore(_)) => bits.card = read,
            (Settled::Pushed { .. }, Kind::Push(from, to)) => {
                bits.set(from, None);
                bits.set(to, read);
            }
            (Settled::Spilled { .. }, Kind::Out(to)) => {
                prop_assert!(leaves && idle && !wrote, "{piece} is needed");
                if let Some(to) = to {
                    bits.set(to, read);
                }
                bits.card = None;
                let below = bits.below().unwrap_or(0);
                prop_assert_eq!(below, bits.latest, "what left the card is below");
            }
            (Settled::Cleaned { .. }, Kind::Out(Some(to))) => {
                prop_assert!(!wrote, "a torn copy counts");
                bits.set(to, read);
            }
            (Settled::Stays { stale, .. }, Kind::Out(to)) => prop_assert_eq!(stale, to),
            other => prop_assert!(false, "{other:?}"),
        }
    }
    world.bits(piece).busy = false;
    world.moves.remove(place);
    Ok(())
}

/// All of a copy out is queued: no write came before it reads, and none may come.
fn queue_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    if world.moves.is_empty() {
        return Ok(());
    }
    let place = which % world.moves.len();
    let TwinMove { id, piece, kind, read, .. } = world.moves[place];
    world.point += 1;
    let point = world.point;
    let copies = matches!(kind, Kind::Out(Some(_)));
    prop_assert_eq!(core.copy_queued(id, token(StreamKey(COPIES), point)).is_ok(), copies);
    if copies {
        if world.moves[place].queued.is_none() {
            prop_assert_eq!(world.bits(piece).card, read, "it was written before it was read");
            let writes =
                |lease: &TwinLease| lease.buffers.get(&piece.buffer) == Some(&Access::Exclusive);
            prop_assert!(!world.leases.iter().any(writes), "it is written while it is read");
        }
        world.moves[place].queued = Some(point);
    }
    Ok(())
}

fn step(core: &mut Deferrables, world: &mut World, act: &Act) -> Step {
    world.now += 7;
    let done = match *act {
        Act::Add { len } => add_step(core, world, len),
        Act::Tenant => tenant_step(core, world),
        Act::Remove { which } => remove_step(core, world, which),
        Act::Discard { which } => discard_step(core, world, which),
        Act::Lease { which, writes, stream, stays, waits } => {
            request_step(core, world, (which, writes), (stream, stays), waits)
        }
        Act::Retry { which, stays } => retry_step(core, world, which, stays),
        Act::OfPool { stream } => of_pool_step(core, world, stream),
        Act::Leave { which } => leave_step(core, world, which),
        Act::Readable { which } => readable_step(core, world, which),
        Act::Queue { which } => queue_step(core, world, which),
        Act::LeaveWithout { which } => leave_without_step(core, world, which),
        Act::End { which, used, part } => end_step(core, world, which, used, part),
        Act::Cancel { which } => cancel_step(core, world, which),
        Act::Finish { which, fails, queued } => finish_step(core, world, which, fails, queued),
        Act::Over { stream } => over_step(core, world, stream),
        Act::Choose { deficit, room, peers } => choose_step(core, world, deficit, room, peers),
        Act::ReclaimPeer { on, deficit, room } => reclaim_peer_step(core, world, on, deficit, room),
        Act::Redirect { which, room } => redirect_step(core, world, which, room),
        Act::PinMemory { which, on } => pin_memory_step(core, world, which, on),
        Act::Reclaim { deficit, room } => reclaim_step(core, world, deficit, room),
        Act::Clean { budget } => clean_step(core, world, budget),
        Act::Pin { which } => pin_step(core, world, which),
        Act::Unpin { which } => unpin_step(core, world, which),
        Act::Hint { which, hint } => hint_step(core, world, which, hint),
    };
    done.and_then(|()| serve_step(core, world))
}

fn add_step(core: &mut Deferrables, world: &mut World, len: u64) -> Step {
    let added = core.add_buffer(b(len)).expect("a length within the limits");
    world.add(added, len.div_ceil(PIECE));
    Ok(())
}

fn tenant_step(core: &mut Deferrables, world: &mut World) -> Step {
    let group = world.group.expect("it is made at the start");
    if let Ok(added) = core.add_tenant(group, b(100)) {
        world.add(added, 1);
    }
    Ok(())
}

fn remove_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let twin = world.twin(id).clone();
    let used = !twin.reads.is_empty() || !twin.writes.is_empty();
    let movable = !world.is_held_or_moves(id)? && !used;
    let removed = core.remove(id);
    prop_assert_eq!(removed.is_ok(), movable);
    world.buffers.retain(|twin| twin.id != id || removed.is_err());
    Ok(())
}

fn discard_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let movable = !world.is_held_or_moves(id)?;
    let discarded = core.discard(id);
    prop_assert_eq!(discarded.is_ok(), movable);
    if let Ok(stale) = discarded {
        world.drop_copies(&stale)?;
        world.twin(id).pieces.fill(Bits::default());
    }
    Ok(())
}

fn request_step(
    core: &mut Deferrables,
    world: &mut World,
    (which, writes): ([usize; 2], [bool; 2]),
    (stream, stays): (u64, bool),
    waits: bool,
) -> Step {
    let access = |writes| if writes { Access::Exclusive } else { Access::Shared };
    let mut wanted = BTreeMap::new();
    for (which, writes) in which.into_iter().zip(writes) {
        let Some(id) = world.pick(which) else { return Ok(()) };
        let known = wanted.entry(id).or_insert(Access::Shared);
        *known = access(writes).max(*known);
    }
    let ask = Ask { stream, buffers: wanted, stays, is_of_pool: false };
    let fits = world.standing_of_a_new_one(core, &ask) != Standing::Never;
    if !lease_step(core, world, &ask)? && waits && fits {
        wait_step(core, world, ask)?;
    }
    Ok(())
}

/// Checks a waiter out of turn, with other buffers that may be read in place.
fn retry_step(core: &mut Deferrables, world: &mut World, which: usize, stays: bool) -> Step {
    if world.wait_queue.is_empty() {
        return Ok(());
    }
    let place = which % world.wait_queue.len();
    world.wait_queue[place].ask.stays = stays;
    let TwinWaiter { ticket, ask } = world.wait_queue[place].clone();
    let standing = world.standings(core)[place];
    let checked = core.recheck(ticket, &ask.in_place_allowed(), world.now);
    if let Ok(Some(granted)) = checked {
        prop_assert_eq!(standing, Standing::Served);
        world.wait_queue.remove(place);
        return take_step(core, world, &ask, granted);
    }
    prop_assert!(checked.is_ok() && standing != Standing::Served, "{:?}", standing);
    Ok(())
}

/// A request of the pool enters the queue.
fn of_pool_step(core: &mut Deferrables, world: &mut World, stream: u64) -> Step {
    let ticket = core.enqueue_pool_request(HolderKey(stream));
    let ask = Ask { stream, buffers: BTreeMap::new(), stays: false, is_of_pool: true };
    world.wait_queue.push(TwinWaiter { ticket, ask });
    Ok(())
}

fn leave_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    if !world.wait_queue.is_empty() {
        let gone = world.wait_queue.remove(which % world.wait_queue.len());
        prop_assert!(core.dequeue(gone.ticket) && !core.dequeue(gone.ticket));
    }
    Ok(())
}

fn readable_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let range = world.twin(id).range;
    if world.group != Some(range) {
        core.set_readable(id).unwrap();
        world.twin(id).readable = true;
    }
    Ok(())
}

fn leave_without_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    if world.moves.is_empty() {
        return Ok(());
    }
    let place = which % world.moves.len();
    let one = world.moves[place];
    if core.leave_without_copy(one.id) {
        let bits = *world.bits(one.piece);
        prop_assert!(matches!(one.kind, Kind::Out(Some(_))) && one.queued.is_none());
        prop_assert!(bits.below() == Some(bits.latest), "it is lost");
        world.moves[place].kind = Kind::Out(None);
    }
    Ok(())
}

fn cancel_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    if !world.leases.is_empty() {
        let lease = world.leases.remove(which % world.leases.len());
        core.cancel_lease(lease.id).unwrap();
    }
    Ok(())
}

fn over_step(core: &mut Deferrables, world: &mut World, stream: u64) -> Step {
    let stream = match stream {
        0 => 9,
        // Copies that were given up.
        3 => COPIES,
        stream => stream,
    };
    core.complete_use(token(StreamKey(stream), world.point));
    for twin in &mut world.buffers {
        twin.reads.remove(&stream);
        twin.writes.remove(&stream);
    }
    Ok(())
}

/// All tiers that the model has.
const fn tiers() -> [SpillTier; 4] {
    let [Some(zero), Some(one)] = [PeerId::new(0), PeerId::new(1)] else { unreachable!() };
    [SpillTier::Peer(zero), SpillTier::Peer(one), SpillTier::Host, SpillTier::Disk]
}

fn choose_step(
    core: &mut Deferrables,
    world: &mut World,
    deficit: u64,
    room: u64,
    peers: [u64; 2],
) -> Step {
    let mut room = SpillRoom { host: b(room), disk: b(room / 2), ..SpillRoom::default() };
    (0..).zip(peers).for_each(|(ordinal, free)| room.peers[peer(ordinal)] = b(free));
    let promised = tiers().map(|tier| world.promised(tier));
    let expected = full_scan::choice(core, &SpillDemand { room, ..short(deficit) }, world.now);
    let choice = core.choose(&SpillDemand { room, ..short(deficit) }, world.now);
    let chosen = choice.victims.iter().flat_map(|victim| &victim.moves).map(|out| out.piece);
    prop_assert_eq!(chosen.collect::<Vec<_>>(), expected, "as by looking at every piece");
    let longest = choice.victims.iter().map(|victim| victim.frees).max();
    let longest = longest.unwrap_or_default();
    prop_assert!(choice.frees < b(deficit) + longest.max(b(1)));
    prop_assert_eq!(choice.short.is_some(), choice.frees < b(deficit));
    for out in choice.victims.iter().flat_map(|victim| &victim.moves) {
        begin_out(world, out, true)?;
    }
    let free = tiers().map(|tier| *room.of(tier));
    for (tier, (before, free)) in tiers().into_iter().zip(promised.into_iter().zip(free)) {
        let now = world.promised(tier);
        prop_assert!(now == before || now <= free.count(), "{tier} is promised twice");
    }
    Ok(())
}

fn reclaim_peer_step(
    core: &mut Deferrables,
    world: &mut World,
    on: u32,
    deficit: u64,
    room: u64,
) -> Step {
    let room = SpillRoom { host: b(room), disk: b(room / 2), ..SpillRoom::default() };
    let looked_at = core.counters().peer_copies_looked_at;
    let copies = core.copies_on(peer(on)) as u64;
    let demand = PeerDemand { peer: peer(on), deficit: b(deficit), room };
    let choice = core.reclaim_peer(&demand);
    prop_assert!(core.counters().peer_copies_looked_at - looked_at <= copies);
    let needed = world.buffers.iter().flat_map(|twin| twin.pieces.iter().copied());
    let sole = needed.filter(|bits| bits.card.is_none() && bits.copies().iter().count() == 1);
    let sole = sole.filter(|bits| bits.peer.is_some()).count();
    prop_assert!(choice.pushes.len() <= sole);
    for gone in &choice.stale {
        prop_assert_eq!(gone.from, SpillTier::Peer(peer(on)));
        let bits = world.bits(gone.piece);
        prop_assert!(bits.card.is_some() || bits.host.is_some() || bits.disk.is_some());
    }
    world.drop_copies(&choice.stale)?;
    for push in &choice.pushes {
        prop_assert!(!world.is_leased(push.piece.buffer));
        world.begin(push.id, push.piece, Kind::Push(push.from, push.to))?;
    }
    Ok(())
}

/// A card has no memory after all.
fn redirect_step(core: &mut Deferrables, world: &mut World, which: usize, room: u64) -> Step {
    if world.moves.is_empty() {
        return Ok(());
    }
    let place = which % world.moves.len();
    let TwinMove { id, kind, queued, .. } = world.moves[place];
    let can = matches!(kind, Kind::Out(Some(SpillTier::Peer(_)))) && queued.is_none();
    let room = SpillRoom { host: b(room), ..SpillRoom::default() };
    let instead = core.redirect(id, room);
    prop_assert!(can || instead.is_none());
    if let Some(to) = instead {
        prop_assert_eq!(to, SpillTier::Host);
        world.moves[place].kind = Kind::Out(Some(to));
    }
    Ok(())
}

fn pin_memory_step(core: &mut Deferrables, world: &mut World, which: usize, on: bool) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let range = world.twin(id).range;
    core.set_pinned_memory(range, on);
    prop_assert_eq!(core.has_pinned_memory(range), on);
    let tenants = world.buffers.iter_mut().filter(|twin| twin.range == range);
    tenants.for_each(|twin| twin.pinned_memory = on);
    Ok(())
}

fn reclaim_step(core: &mut Deferrables, world: &mut World, deficit: u64, room: u64) -> Step {
    let choice = core.reclaim_host(&HostDemand { deficit: b(deficit), disk_room: b(room) });
    for gone in &choice.stale {
        let read = world.is_read_in_place(gone.piece.buffer);
        prop_assert!(!read || world.bits(gone.piece).card.is_some(), "it is being read");
    }
    world.drop_copies(&choice.stale)?;
    for push in &choice.pushes {
        prop_assert_eq!(world.bits(push.piece).card, None);
        prop_assert!(!world.is_read_in_place(push.piece.buffer));
        world.begin(push.id, push.piece, Kind::Push(push.from, push.to))?;
    }
    Ok(())
}

fn clean_step(core: &mut Deferrables, world: &mut World, budget: u64) -> Step {
    let room = SpillRoom { host: b(9000), disk: b(0), ..SpillRoom::default() };
    for out in core.clean(b(budget), &with(room), world.now) {
        let twin = world.twin(out.piece.buffer).clone();
        prop_assert!(!world.is_unevictable(&twin), "a lease may write it");
        let range = twin.range;
        let alone = world.may_leave(range);
        if alone {
            begin_out(world, &out, false)?;
        } else {
            world.begin(out.id, out.piece, Kind::Out(out.to))?;
        }
    }
    Ok(())
}

fn pin_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let mut holders = world.leases.iter();
    let holder = holders.find(|lease| lease.buffers.contains_key(&id));
    let Some(lease) = holder.cloned() else { return Ok(()) };
    if lease.in_place.contains(&id) {
        prop_assert!(core.pin(lease.id, id).is_err());
        return Ok(());
    }
    core.pin(lease.id, id).unwrap();
    world.twin(id).pins += 1;
    Ok(())
}

fn unpin_step(core: &mut Deferrables, world: &mut World, which: usize) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let pins = world.twin(id).pins;
    prop_assert_eq!(core.unpin(id).is_ok(), pins > 0);
    world.twin(id).pins = pins.saturating_sub(1);
    Ok(())
}

fn hint_step(core: &mut Deferrables, world: &mut World, which: usize, hint: u8) -> Step {
    let Some(id) = world.pick(which) else { return Ok(()) };
    let hints = [Hint::None, Hint::WillNeed, Hint::WontNeed];
    core.hint(id, hints[hint as usize]).unwrap();
    core.set_priority(id, i32::from(hint)).unwrap();
    Ok(())
}

fn compare(core: &Deferrables, world: &World) -> Step {
    let mut counts = [0usize; 5];
    for twin in &world.buffers {
        for (state, bits) in core.states(twin.id).unwrap().into_iter().zip(&twin.pieces) {
            let copies = match state {
                PieceState::Empty | PieceState::Leaving { copies: Copies::NONE, to: None } => {
                    prop_assert_eq!((bits.latest, bits.card), (0, None));
                    Copies::NONE
                }
                PieceState::Resident { copies }
                | PieceState::Cleaning { copies, .. }
                | PieceState::Leaving { copies, .. } => {
                    prop_assert_eq!(bits.card, Some(bits.latest));
                    copies
                }
                PieceState::Spilled { copies }
                | PieceState::Restoring { copies, .. }
                | PieceState::Pushing { copies } => {
                    prop_assert_eq!(bits.card, None);
                    copies
                }
            };
            let twins = bits.copies();
            prop_assert_eq!(copies, twins, "{:?}", bits);
            let alive = bits.card.or(bits.below());
            prop_assert_eq!(alive.unwrap_or(0), bits.latest, "contents were lost");
            counts[0] += usize::from(bits.busy);
        }
    }
    let census = core.census();
    prop_assert_eq!(census.moves, counts[0]);
    prop_assert_eq!(census.leases, world.leases.len());
    let leases = world.wait_queue.iter().filter(|waiter| !waiter.ask.is_of_pool);
    prop_assert_eq!(census.waiting, leases.count());
    prop_assert_eq!(census.buffers, world.buffers.len());
    prop_assert_eq!(census.committed.count(), world.committed(core));
    Ok(())
}

/// A copy that was queued reads its piece, also once it was given up.
fn read_by_copy(world: &mut World, piece: PieceId, queued: Option<u64>) {
    if let Some(number) = queued {
        let known = world.twin(piece.buffer).reads.entry(COPIES).or_default();
        *known = number.max(*known);
    }
}

/// Once all leases end, the oldest waiter is granted, and then the next.
fn serve_the_line(core: &mut Deferrables, world: &mut World) -> Step {
    loop {
        for lease in std::mem::take(&mut world.leases) {
            core.cancel_lease(lease.id).unwrap();
        }
        for one in std::mem::take(&mut world.moves) {
            core.abandon(one.id).unwrap();
            read_by_copy(world, one.piece, one.queued);
            world.bits(one.piece).busy = false;
        }
        for index in 0..world.buffers.len() {
            let Twin { id, range, pins, .. } = world.buffers[index].clone();
            core.set_pinned_memory(range, false);
            for _ in 0..pins {
                core.unpin(id).unwrap();
            }
            let twin = &mut world.buffers[index];
            (twin.pins, twin.pinned_memory) = (0, false);
        }
        for waiter in world.wait_queue.extract_if(.., |waiter| waiter.ask.is_of_pool) {
            core.dequeue(waiter.ticket);
        }
        let before = world.wait_queue.len();
        serve_step(core, world)?;
        if world.wait_queue.is_empty() {
            return Ok(());
        }
        prop_assert!(world.wait_queue.len() < before, "the oldest waits for nothing");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(200)))]

    #[test]
    fn random_programs_lose_no_contents_and_take_no_memory_that_is_needed(
        acts in prop::collection::vec(act(), 1..150),
    ) {
        let sizes = DeferConfig { piece: b(PIECE), capacity: b(CAPACITY), ..config() };
        let mut core = Deferrables::new(sizes).unwrap();
        let group = core.add_group(b(PIECE), None).unwrap();
        let mut world = World { group: Some(group), ..World::default() };
        for act in acts {
            step(&mut core, &mut world, &act)
                .and_then(|()| compare(&core, &world))
                .map_err(|error| TestCaseError::fail(format!("{act:?}: {error}")))?;
            core.audit().map_err(|error| TestCaseError::fail(format!("{act:?}: {error}")))?;
        }
        serve_the_line(&mut core, &mut world)?;
    }
}
