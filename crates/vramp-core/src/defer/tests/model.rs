//! The buffers against a naive twin: a list of pieces with what they contain, wherever that is.
//!
//! The twin writes a new number for each write and carries it along with each copy. A piece that is
//! read has to show the number that was written last.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// The stream of copies out.
const COPIES: u64 = 8;
/// Room for three tenants in a group.
const PIECE: u64 = 1536;
const CAPACITY: u64 = 9000;

#[derive(Clone, Debug)]
enum Act {
    Add { len: u64 },
    Tenant,
    Remove { which: usize },
    Discard { which: usize },
    Lease { which: [usize; 2], writes: [bool; 2], stream: u64, waits: bool },
    Ask { which: usize },
    Leave { which: usize },
    Queue { which: usize },
    End { which: usize, used: bool, part: bool },
    Cancel { which: usize },
    Finish { which: usize, fails: bool, queued: bool },
    Over { stream: u64 },
    Choose { deficit: u64, room: u64 },
    Lower { deficit: u64, room: u64 },
    Clean { budget: u64 },
    Pin { which: usize, on: bool },
    Expose { which: usize, grade: u8 },
    Release { which: usize },
    EndEpoch,
    Hint { which: usize, hint: u8 },
}

fn act() -> impl Strategy<Value = Act> {
    let which = || 0usize..8;
    let lease = (which(), which(), any::<[bool; 2]>(), 0u64..3, any::<bool>());
    prop_oneof![
        2 => (1u64..4000).prop_map(|len| Act::Add { len }),
        2 => Just(Act::Tenant),
        1 => which().prop_map(|which| Act::Remove { which }),
        1 => which().prop_map(|which| Act::Discard { which }),
        8 => lease.prop_map(|(a, c, writes, stream, waits)| {
            Act::Lease { which: [a, c], writes, stream, waits }
        }),
        4 => which().prop_map(|which| Act::Ask { which }),
        1 => which().prop_map(|which| Act::Leave { which }),
        3 => which().prop_map(|which| Act::Queue { which }),
        6 => (which(), any::<bool>(), any::<bool>())
            .prop_map(|(which, used, part)| Act::End { which, used, part }),
        1 => which().prop_map(|which| Act::Cancel { which }),
        12 => (which(), 0u8..6, any::<bool>())
            .prop_map(|(which, fails, queued)| Act::Finish { which, fails: fails == 0, queued }),
        4 => (0u64..3).prop_map(|stream| Act::Over { stream }),
        6 => (1u64..6000, 0u64..9000).prop_map(|(deficit, room)| Act::Choose { deficit, room }),
        2 => (1u64..4000, 0u64..4000).prop_map(|(deficit, room)| Act::Lower { deficit, room }),
        2 => (1u64..4000).prop_map(|budget| Act::Clean { budget }),
        1 => (which(), any::<bool>()).prop_map(|(which, on)| Act::Pin { which, on }),
        1 => (which(), 0u8..3).prop_map(|(which, grade)| Act::Expose { which, grade }),
        1 => which().prop_map(|which| Act::Release { which }),
        1 => Just(Act::EndEpoch),
        1 => (which(), 0u8..3).prop_map(|(which, hint)| Act::Hint { which, hint }),
    ]
}

/// Contents are numbers; 0 is none.
#[derive(Clone, Copy, Debug, Default)]
struct Bits {
    /// What was written last.
    latest: u64,
    card: Option<u64>,
    host: Option<u64>,
    disk: Option<u64>,
    busy: bool,
}

#[derive(Clone, Debug)]
struct Twin {
    id: BufferId,
    range: RangeId,
    len: u64,
    pieces: Vec<Bits>,
    pins: u32,
    /// Stream-scoped, quiesced, opaque.
    grades: [u32; 3],
    /// By stream, the furthest.
    reads: BTreeMap<u64, u64>,
    writes: BTreeMap<u64, u64>,
}

#[derive(Clone, Debug)]
struct TwinLease {
    id: LeaseId,
    stream: u64,
    buffers: BTreeMap<BufferId, Access>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Out(Option<Lower>),
    Fill(Lower),
    Push,
}

/// A move, and what a copy read when it began.
#[derive(Clone, Copy, Debug)]
struct TwinMove {
    id: MoveId,
    piece: PieceId,
    kind: Kind,
    read: Option<u64>,
    /// How many writes there were when it began.
    began: u64,
    /// The number of its end on the stream of copies, once that is queued.
    queued: Option<u64>,
}

/// A request in line. Streams hold leases here: each is one that would wait for itself.
#[derive(Clone, Debug)]
struct TwinWaiter {
    ticket: Ticket,
    stream: u64,
    wanted: BTreeMap<BufferId, Access>,
}

#[derive(Clone, Debug, Default)]
struct World {
    buffers: Vec<Twin>,
    leases: Vec<TwinLease>,
    line: Vec<TwinWaiter>,
    moves: Vec<TwinMove>,
    written: u64,
    point: u64,
    now: u64,
    group: Option<RangeId>,
}

impl World {
    fn twin(&mut self, id: BufferId) -> &mut Twin {
        self.buffers.iter_mut().find(|twin| twin.id == id).expect("the core knows it as well")
    }

    fn bits(&mut self, piece: PieceId) -> &mut Bits {
        &mut self.twin(piece.buffer).pieces[piece.index as usize]
    }

    fn is_leased(&self, id: BufferId) -> bool {
        self.leases.iter().any(|lease| lease.buffers.contains_key(&id))
    }

    fn may_not_leave(&self, twin: &Twin) -> bool {
        self.is_leased(twin.id) || twin.pins > 0 || twin.grades != [0; 3]
    }

    /// No buffer of the range is held, the pieces' own or their group's.
    fn may_leave(&self, range: RangeId) -> bool {
        !self.buffers.iter().any(|twin| twin.range == range && self.may_not_leave(twin))
    }

    fn committed(&self, core: &Deferrables) -> u64 {
        let anchored = |twin: &&Twin| {
            self.is_leased(twin.id) || twin.pins > 0 || twin.grades[1] + twin.grades[2] > 0
        };
        let mut ranges: Vec<RangeId> =
            self.buffers.iter().filter(anchored).map(|twin| twin.range).collect();
        ranges.sort();
        ranges.dedup();
        ranges.iter().map(|&range| self.range_len(core, range)).sum()
    }

    fn range_len(&self, core: &Deferrables, range: RangeId) -> u64 {
        if Some(range) == self.group {
            return PIECE;
        }
        let whole = |twin: &&Twin| twin.range == range;
        let twin = self.buffers.iter().find(whole).expect("a range of its own has a buffer");
        core.extent(twin.id).unwrap().len.count().next_multiple_of(4)
    }

    fn ranges_of(&self, wanted: &BTreeMap<BufferId, Access>) -> Vec<RangeId> {
        let named = self.buffers.iter().filter(|twin| wanted.contains_key(&twin.id));
        let mut ranges: Vec<RangeId> = named.map(|twin| twin.range).collect();
        ranges.sort();
        ranges.dedup();
        ranges
    }

    /// Somebody has it pinned or has its pointer.
    fn is_kept(&self, range: RangeId) -> bool {
        let kept = |twin: &Twin| twin.pins > 0 || twin.grades[1] + twin.grades[2] > 0;
        self.buffers.iter().any(|twin| twin.range == range && kept(twin))
    }

    fn is_anchored(&self, range: RangeId) -> bool {
        let leased = |twin: &Twin| twin.range == range && self.is_leased(twin.id);
        self.is_kept(range) || self.buffers.iter().any(leased)
    }

    /// It waits for room that leases have.
    fn lacks_room(&self, core: &Deferrables, waiter: &TwinWaiter) -> bool {
        let there = |id: &BufferId| self.buffers.iter().any(|twin| twin.id == *id);
        let own = self.ranges_of(&waiter.wanted);
        let new = own.iter().filter(|&&range| !self.is_anchored(range));
        let new: u64 = new.map(|&range| self.range_len(core, range)).sum();
        let mut alone: Vec<RangeId> = self.buffers.iter().map(|twin| twin.range).collect();
        alone.retain(|range| self.is_kept(*range) || own.contains(range));
        alone.sort();
        alone.dedup();
        let alone: u64 = alone.iter().map(|&range| self.range_len(core, range)).sum();
        waiter.wanted.keys().all(there)
            && new > 0
            && self.committed(core) + new > CAPACITY
            && alone <= CAPACITY
    }

    /// The younger one must not pass the older one.
    fn comes_after(
        &self,
        core: &Deferrables,
        older: &TwinWaiter,
        wanted: &BTreeMap<BufferId, Access>,
    ) -> bool {
        let needed = self.ranges_of(&older.wanted);
        let takes = |range: &RangeId| !needed.contains(range) && !self.is_kept(*range);
        excludes(&older.wanted, wanted)
            || self.lacks_room(core, older) && self.ranges_of(wanted).iter().any(takes)
    }

    /// Whose leases have to end before a waiter is served: all that follows, until nothing more does.
    fn waits_for(&self, core: &Deferrables, place: usize) -> Vec<u64> {
        let (mut waiters, mut streams) = (vec![place], Vec::new());
        loop {
            let before = (waiters.len(), streams.len());
            for place in waiters.clone() {
                let waiter = &self.line[place];
                let full = self.lacks_room(core, waiter);
                for lease in &self.leases {
                    if (full || excludes(&lease.buffers, &waiter.wanted))
                        && !streams.contains(&lease.stream)
                    {
                        streams.push(lease.stream);
                    }
                }
                for (other, waits) in self.line.iter().enumerate() {
                    let in_front = other < place && self.comes_after(core, waits, &waiter.wanted);
                    if (in_front || streams.contains(&waits.stream)) && !waiters.contains(&other) {
                        waiters.push(other);
                    }
                }
            }
            if before == (waiters.len(), streams.len()) {
                return streams;
            }
        }
    }

    /// What lower room is promised to moves under way.
    fn promised(&self, to: Lower) -> u64 {
        let takes = |one: &&TwinMove| match one.kind {
            Kind::Out(Some(lower)) => lower == to && one.queued.is_none(),
            Kind::Push => to == Lower::Disk,
            _ => false,
        };
        self.moves.iter().filter(takes).map(|one| self.piece_len(one.piece)).sum()
    }

    fn piece_len(&self, piece: PieceId) -> u64 {
        let twin = self.buffers.iter().find(|twin| twin.id == piece.buffer);
        let whole = twin.expect("what moves is not removed").len;
        PIECE.min(whole - PIECE * u64::from(piece.index))
    }

    fn drop_copies(&mut self, drops: &[Drop]) -> Result<(), TestCaseError> {
        for drop in drops {
            let bits = self.bits(drop.piece);
            let copy = match drop.from {
                Lower::Host => bits.host.take(),
                Lower::Disk => bits.disk.take(),
            };
            prop_assert!(copy.is_some(), "there is no copy of {} on the {}", drop.piece, drop.from);
        }
        Ok(())
    }

    fn begin(&mut self, id: MoveId, piece: PieceId, kind: Kind) -> Result<(), TestCaseError> {
        let began = self.written;
        let bits = self.bits(piece);
        prop_assert!(!bits.busy, "{piece} moves already");
        bits.busy = true;
        let read = match kind {
            Kind::Out(_) => bits.card,
            Kind::Fill(Lower::Disk) => bits.disk,
            Kind::Fill(Lower::Host) | Kind::Push => bits.host,
        };
        self.moves.push(TwinMove { id, piece, kind, read, began, queued: None });
        Ok(())
    }

    fn end_scopes(&mut self) {
        for index in 0..self.buffers.len() {
            let twin = &self.buffers[index];
            let over = twin.reads.is_empty() && twin.writes.is_empty() && !self.is_leased(twin.id);
            if over {
                self.buffers[index].grades[0] = 0;
            }
        }
    }
}

/// They name a buffer that one of them writes.
fn excludes(one: &BTreeMap<BufferId, Access>, other: &BTreeMap<BufferId, Access>) -> bool {
    let both = one.iter().filter_map(|(id, access)| Some((access, other.get(id)?)));
    both.into_iter().any(|(one, other)| one.max(other) == &Access::Exclusive)
}

fn begin_out(world: &mut World, out: &CopyOut, leaving: bool) -> Result<(), TestCaseError> {
    let twin = world.twin(out.piece.buffer).clone();
    let bits = twin.pieces[out.piece.index as usize];
    prop_assert!(world.may_leave(twin.range), "{} may not leave", out.piece);
    let dirty = bits.card.is_some() && bits.host.is_none() && bits.disk.is_none();
    prop_assert_eq!(out.to.is_some(), dirty, "{:?} has to be copied iff it is dirty", bits);
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

fn lease_step(
    core: &mut Deferrables,
    world: &mut World,
    wanted: &BTreeMap<BufferId, Access>,
    stream: u64,
    ticket: Option<Ticket>,
) -> Result<bool, TestCaseError> {
    let held = |lease: &&TwinLease| excludes(&lease.buffers, wanted);
    let busy: Vec<LeaseId> = world.leases.iter().filter(held).map(|lease| lease.id).collect();
    let in_the_way = |one: &&TwinMove| {
        let access = wanted.get(&one.piece.buffer);
        access.is_some_and(|access| match one.kind {
            Kind::Out(to) => *access == Access::Exclusive && to.is_some() && one.queued.is_none(),
            Kind::Fill(_) | Kind::Push => true,
        })
    };
    let older = world.line.iter().take_while(|waiter| Some(waiter.ticket) != ticket);
    let behind = older.enumerate().filter(|(place, older)| {
        world.comes_after(core, older, wanted) && !world.waits_for(core, *place).contains(&stream)
    });
    let behind: Vec<Ticket> = behind.map(|(_, older)| older.ticket).collect();
    let settling = world.moves.iter().filter(in_the_way).count();
    let ranges = world.ranges_of(wanted);
    let all: u64 = ranges.iter().map(|&range| world.range_len(core, range)).sum();
    let list: Vec<(BufferId, Access)> = wanted.iter().map(|(&id, &access)| (id, access)).collect();
    let streams = [StreamKey(stream)];
    let holder = HolderKey(stream);
    let request = LeaseRequest { buffers: &list, streams: &streams, holder, ticket };
    let granted = core.lease(&request, world.now);
    let given = granted.is_ok();
    match granted {
        Ok(granted) => {
            prop_assert!(busy.is_empty() && settling == 0 && all <= CAPACITY);
            prop_assert!(behind.is_empty(), "{:?} came before", behind);
            let mut after: BTreeMap<u64, u64> = BTreeMap::new();
            for (&id, &access) in wanted {
                let twin = world.twin(id);
                let reads = twin.reads.iter().filter(|_| access == Access::Exclusive);
                for (&stream, &number) in twin.writes.iter().chain(reads) {
                    let known = after.entry(stream).or_default();
                    *known = number.max(*known);
                }
            }
            for one in &world.moves {
                let written = wanted.get(&one.piece.buffer) == Some(&Access::Exclusive);
                if let (true, Some(number)) = (written, one.queued) {
                    let known = after.entry(COPIES).or_default();
                    *known = number.max(*known);
                }
            }
            after.remove(&stream);
            let told = granted.after.iter().map(|token| (token.stream.0, token.number));
            prop_assert_eq!(told.collect::<BTreeMap<u64, u64>>(), after);
            for fill in &granted.fill {
                prop_assert_eq!(world.bits(fill.piece).card, None);
                world.begin(fill.id, fill.piece, Kind::Fill(fill.from))?;
            }
            world.leases.push(TwinLease { id: granted.lease, stream, buffers: wanted.clone() });
            prop_assert!(world.committed(core) <= CAPACITY);
        }
        Err(LeaseRefused::TooLarge { .. }) => prop_assert!(all > CAPACITY),
        Err(LeaseRefused::Busy { held_by }) => prop_assert_eq!(held_by, busy),
        Err(LeaseRefused::Settling { moves }) => prop_assert_eq!(moves.len(), settling),
        Err(LeaseRefused::Full { needed, committed, .. }) => {
            prop_assert_eq!(committed.count(), world.committed(core));
            prop_assert!(committed + needed > b(CAPACITY));
        }
        Err(LeaseRefused::Behind { waiting }) => prop_assert_eq!(waiting, behind),
        Err(other) => prop_assert!(false, "{other}"),
    }
    Ok(given)
}

/// Asks for whoever waits at a place; served, it leaves the line.
fn ask_step(
    core: &mut Deferrables,
    world: &mut World,
    place: usize,
) -> Result<bool, TestCaseError> {
    let TwinWaiter { ticket, stream, wanted } = world.line[place].clone();
    let removed = wanted.keys().any(|id| world.buffers.iter().all(|twin| twin.id != *id));
    let done = removed || lease_step(core, world, &wanted, stream, Some(ticket))?;
    if done {
        prop_assert!(core.leave_line(ticket));
        world.line.remove(place);
    }
    Ok(done)
}

fn end_step(
    core: &mut Deferrables,
    world: &mut World,
    which: usize,
    used: bool,
    part: bool,
) -> Result<(), TestCaseError> {
    if world.leases.is_empty() {
        return Ok(());
    }
    let place = which % world.leases.len();
    let lease = world.leases[place].clone();
    world.point += 1;
    let now = token(StreamKey(lease.stream), world.point);
    let uses: Vec<Use> = lease.buffers.keys().map(|&buffer| Use { buffer, token: now }).collect();
    let exclusive = |(_, access): &(&BufferId, &Access)| **access == Access::Exclusive;
    let first = lease.buffers.iter().filter(exclusive).map(|(&buffer, _)| buffer);
    let parts: Vec<Written> =
        first.map(|buffer| Written { buffer, offset: b(0), len: b(1) }).collect();
    let writes = if part { Writes::Only(&parts) } else { Writes::All };
    let end = LeaseEnd { uses: if used { &uses } else { &[] }, writes };
    let is_there = |bits: &Bits| bits.card.is_some() || bits.latest == 0;
    let ids: Vec<BufferId> = lease.buffers.keys().copied().collect();
    let filled = ids.iter().all(|&id| world.twin(id).pieces.iter().all(is_there));
    let drops = match core.end_lease(lease.id, &end, world.now) {
        Ok(drops) => drops,
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
            prop_assert!(bits.latest == 0 || bits.card == Some(bits.latest), "{id}: {bits:?}");
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
            let all = !part || twin.grades != [0; 3];
            let count = if all { twin.pieces.len() } else { 1 };
            (0..count as u32).for_each(|index| write(world, piece(id, index)));
        }
    }
    world.drop_copies(&drops)?;
    for twin in &world.buffers {
        for bits in &twin.pieces {
            let stale = |copy: Option<u64>| copy.is_some_and(|copy| copy != bits.latest);
            prop_assert!(!stale(bits.host) && !stale(bits.disk), "a stale copy counts: {bits:?}");
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
) -> Result<(), TestCaseError> {
    if world.moves.is_empty() {
        return Ok(());
    }
    let place = which % world.moves.len();
    let TwinMove { id, piece, kind, read, began, .. } = world.moves[place];
    let wrote = world.bits(piece).latest > began;
    if fails {
        prop_assert_eq!(core.abandon(id).unwrap().piece, piece);
    } else if queued && matches!(kind, Kind::Fill(_)) {
        world.point += 1;
        let point = world.point;
        core.queued(id, token(StreamKey(9), point)).unwrap();
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
            (Settled::Filled { .. }, Kind::Fill(_)) => bits.card = read,
            (Settled::Pushed { .. }, Kind::Push) => (bits.host, bits.disk) = (None, read),
            (Settled::Spilled { .. }, Kind::Out(to)) => {
                prop_assert!(leaves && idle && !wrote, "{piece} is needed");
                match to {
                    Some(Lower::Host) => bits.host = read,
                    Some(Lower::Disk) => bits.disk = read,
                    None => {}
                }
                bits.card = None;
                let below = bits.host.or(bits.disk).unwrap_or(0);
                prop_assert_eq!(below, bits.latest, "what left the card is below");
            }
            (Settled::Cleaned { .. }, Kind::Out(Some(to))) => {
                prop_assert!(!wrote, "a torn copy counts");
                match to {
                    Lower::Host => bits.host = read,
                    Lower::Disk => bits.disk = read,
                }
            }
            (Settled::Stays { stale, .. }, Kind::Out(to)) => prop_assert_eq!(stale, to),
            other => prop_assert!(false, "{other:?}"),
        }
    }
    world.bits(piece).busy = false;
    world.moves.remove(place);
    Ok(())
}

/// All of a copy out is queued: nobody wrote before it reads, and nobody is about to.
fn queue_step(
    core: &mut Deferrables,
    world: &mut World,
    which: usize,
) -> Result<(), TestCaseError> {
    if world.moves.is_empty() {
        return Ok(());
    }
    let place = which % world.moves.len();
    let TwinMove { id, piece, kind, read, .. } = world.moves[place];
    world.point += 1;
    let point = world.point;
    let copies = matches!(kind, Kind::Out(Some(_)));
    prop_assert_eq!(core.copying(id, token(StreamKey(COPIES), point)).is_ok(), copies);
    if copies {
        if world.moves[place].queued.is_none() {
            prop_assert_eq!(world.bits(piece).card, read, "others wrote before it was read");
            let writes =
                |lease: &TwinLease| lease.buffers.get(&piece.buffer) == Some(&Access::Exclusive);
            prop_assert!(!world.leases.iter().any(writes), "others write what is read");
        }
        world.moves[place].queued = Some(point);
    }
    Ok(())
}

fn step(core: &mut Deferrables, world: &mut World, act: &Act) -> Result<(), TestCaseError> {
    world.now += 7;
    let id = |world: &World, which: usize| {
        let count = world.buffers.len().max(1);
        world.buffers.get(which % count).map(|twin| twin.id)
    };
    match *act {
        Act::Add { .. } | Act::Tenant => {
            let group = world.group.expect("it is made at the start");
            let (added, count) = match *act {
                Act::Add { len } => (core.add_buffer(b(len)), len.div_ceil(PIECE)),
                _ => (core.add_tenant(group, b(100)), 1),
            };
            let Ok(Added { buffer: id, at }) = added else {
                prop_assert!(matches!(act, Act::Tenant));
                return Ok(());
            };
            let pieces = vec![Bits::default(); count as usize];
            let twin = Twin {
                id,
                range: at.range,
                len: at.len.count(),
                pieces,
                pins: 0,
                grades: [0; 3],
                reads: BTreeMap::new(),
                writes: BTreeMap::new(),
            };
            world.buffers.push(twin);
        }
        Act::Remove { which } | Act::Discard { which } => {
            let Some(id) = id(world, which) else { return Ok(()) };
            let twin = world.twin(id).clone();
            let scoped = twin.grades[0] > 0 && !world.is_leased(id);
            let held = world.is_leased(id) || twin.pins > 0 || twin.grades[1] + twin.grades[2] > 0;
            let busy = twin.pieces.iter().any(|bits| bits.busy);
            let used = !twin.reads.is_empty() || !twin.writes.is_empty();
            prop_assert!(!scoped || used);
            if matches!(act, Act::Remove { .. }) {
                let removed = core.remove(id);
                prop_assert_eq!(removed.is_ok(), !held && !busy && !used);
                world.buffers.retain(|twin| twin.id != id || removed.is_err());
            } else {
                let discarded = core.discard(id);
                prop_assert_eq!(discarded.is_ok(), !held && !busy);
                if let Ok(drops) = discarded {
                    world.drop_copies(&drops)?;
                    world.twin(id).pieces.fill(Bits::default());
                }
            }
        }
        Act::Lease { which, writes, stream, waits } => {
            let access = |writes| if writes { Access::Exclusive } else { Access::Shared };
            let mut wanted = BTreeMap::new();
            for (which, writes) in which.into_iter().zip(writes) {
                let Some(id) = id(world, which) else { return Ok(()) };
                let known = wanted.entry(id).or_insert(Access::Shared);
                *known = access(writes).max(*known);
            }
            if !lease_step(core, world, &wanted, stream, None)? && waits {
                let list: Vec<_> = wanted.iter().map(|(&id, &access)| (id, access)).collect();
                let holder = HolderKey(stream);
                let request = LeaseRequest { buffers: &list, holder, ..LeaseRequest::default() };
                let ticket = core.line_up(&request).unwrap();
                world.line.push(TwinWaiter { ticket, stream, wanted });
            }
        }
        Act::Ask { which } => {
            if !world.line.is_empty() {
                ask_step(core, world, which % world.line.len())?;
            }
        }
        Act::Leave { which } => {
            if !world.line.is_empty() {
                let gone = world.line.remove(which % world.line.len());
                prop_assert!(core.leave_line(gone.ticket) && !core.leave_line(gone.ticket));
            }
        }
        Act::Queue { which } => queue_step(core, world, which)?,
        Act::End { which, used, part } => end_step(core, world, which, used, part)?,
        Act::Cancel { which } => {
            if !world.leases.is_empty() {
                let lease = world.leases.remove(which % world.leases.len());
                core.cancel_lease(lease.id).unwrap();
            }
        }
        Act::Finish { which, fails, queued } => finish_step(core, world, which, fails, queued)?,
        Act::Over { stream } => {
            let stream = if stream == 0 { 9 } else { stream };
            core.use_over(token(StreamKey(stream), world.point));
            for twin in &mut world.buffers {
                twin.reads.remove(&stream);
                twin.writes.remove(&stream);
            }
        }
        Act::Choose { deficit, room } => {
            let room = Room { host: b(room), disk: b(room / 2) };
            let promised = [Lower::Host, Lower::Disk].map(|lower| world.promised(lower));
            let choice = core.choose(&Short { room, ..short(deficit) }, world.now);
            let longest = choice.victims.iter().map(|victim| victim.frees).max();
            let longest = longest.unwrap_or_default();
            prop_assert!(choice.frees < b(deficit) + longest.max(b(1)));
            prop_assert_eq!(choice.short.is_some(), choice.frees < b(deficit));
            for out in choice.victims.iter().flat_map(|victim| &victim.moves) {
                begin_out(world, out, true)?;
            }
            for (lower, (before, free)) in [Lower::Host, Lower::Disk]
                .into_iter()
                .zip(promised.into_iter().zip([room.host, room.disk]))
            {
                let now = world.promised(lower);
                prop_assert!(now == before || now <= free.count(), "{lower} is promised twice");
            }
        }
        Act::Lower { deficit, room } => {
            let choice = core.choose_lower(&LowerShort { deficit: b(deficit), disk_room: b(room) });
            world.drop_copies(&choice.drops)?;
            for push in &choice.pushes {
                prop_assert_eq!(world.bits(push.piece).card, None);
                world.begin(push.id, push.piece, Kind::Push)?;
            }
        }
        Act::Clean { budget } => {
            let room = Room { host: b(9000), disk: b(0) };
            for out in core.clean(b(budget), room, world.now) {
                let twin = world.twin(out.piece.buffer).clone();
                prop_assert!(!world.may_not_leave(&twin), "others may write it");
                let range = twin.range;
                let alone = world.may_leave(range);
                if alone {
                    begin_out(world, &out, false)?;
                } else {
                    world.begin(out.id, out.piece, Kind::Out(out.to))?;
                }
            }
        }
        Act::Pin { which, on } => {
            let Some(id) = id(world, which) else { return Ok(()) };
            let pins = world.twin(id).pins;
            if on {
                let mut holders = world.leases.iter();
                let holder = holders.find(|lease| lease.buffers.contains_key(&id));
                let Some(lease) = holder.map(|lease| lease.id) else { return Ok(()) };
                core.pin(lease, id).unwrap();
                world.twin(id).pins += 1;
            } else {
                prop_assert_eq!(core.unpin(id).is_ok(), pins > 0);
                world.twin(id).pins = pins.saturating_sub(1);
            }
        }
        Act::Expose { which, grade } => {
            if world.leases.is_empty() {
                return Ok(());
            }
            let lease = world.leases[which % world.leases.len()].clone();
            let id = *lease.buffers.keys().next().expect("a lease is of a buffer at least");
            let grades = [Grade::StreamScoped, Grade::Quiesced, Grade::Opaque];
            core.expose(lease.id, id, grades[grade as usize]).unwrap();
            let count = &mut world.twin(id).grades[grade as usize];
            *count = if grade == 2 { *count + 1 } else { 1 };
        }
        Act::Release { which } => {
            let Some(id) = id(world, which) else { return Ok(()) };
            let count = world.twin(id).grades[2];
            prop_assert_eq!(core.release(id).is_ok(), count > 0);
            world.twin(id).grades[2] = count.saturating_sub(1);
        }
        Act::EndEpoch => {
            core.end_epoch();
            world.buffers.iter_mut().for_each(|twin| twin.grades[1] = 0);
        }
        Act::Hint { which, hint } => {
            let Some(id) = id(world, which) else { return Ok(()) };
            let hints = [Hint::None, Hint::WillNeed, Hint::WontNeed];
            core.hint(id, hints[hint as usize]).unwrap();
            core.set_priority(id, i32::from(hint)).unwrap();
        }
    }
    world.end_scopes();
    Ok(())
}

fn compare(core: &Deferrables, world: &World) -> Result<(), TestCaseError> {
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
                | PieceState::Filling { copies, .. }
                | PieceState::Pushing { copies } => {
                    prop_assert_eq!(bits.card, None);
                    copies
                }
            };
            let twins = Copies { host: bits.host.is_some(), disk: bits.disk.is_some() };
            prop_assert_eq!(copies, twins, "{:?}", bits);
            let alive = bits.card.or(bits.host).or(bits.disk);
            prop_assert_eq!(alive.unwrap_or(0), bits.latest, "contents were lost");
            counts[0] += usize::from(bits.busy);
        }
    }
    let census = core.census();
    prop_assert_eq!(census.moves, counts[0]);
    prop_assert_eq!(census.leases, world.leases.len());
    prop_assert_eq!(census.waiting, world.line.len());
    prop_assert_eq!(census.buffers, world.buffers.len());
    prop_assert_eq!(census.committed.count(), world.committed(core));
    Ok(())
}

/// Once everybody ends what he holds, whoever waits longest is served, and then the next.
fn serve_the_line(core: &mut Deferrables, world: &mut World) -> Result<(), TestCaseError> {
    loop {
        for lease in std::mem::take(&mut world.leases) {
            core.cancel_lease(lease.id).unwrap();
        }
        for one in std::mem::take(&mut world.moves) {
            core.abandon(one.id).unwrap();
            world.bits(one.piece).busy = false;
        }
        for index in 0..world.buffers.len() {
            let Twin { id, pins, grades, .. } = world.buffers[index].clone();
            for _ in 0..pins {
                core.unpin(id).unwrap();
            }
            for _ in 0..grades[2] {
                core.release(id).unwrap();
            }
            let twin = &mut world.buffers[index];
            (twin.pins, twin.grades[1], twin.grades[2]) = (0, 0, 0);
        }
        core.end_epoch();
        if world.line.is_empty() {
            return Ok(());
        }
        let all: u64 = {
            let ranges = world.ranges_of(&world.line[0].wanted);
            ranges.iter().map(|&range| world.range_len(core, range)).sum()
        };
        let served = ask_step(core, world, 0)?;
        prop_assert_eq!(served, all <= CAPACITY);
        if !served {
            let gone = world.line.remove(0);
            prop_assert!(core.leave_line(gone.ticket));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_programs_lose_no_contents_and_take_no_memory_that_is_needed(
        acts in prop::collection::vec(act(), 1..150),
    ) {
        let sizes = DeferConfig { piece: b(PIECE), capacity: b(CAPACITY), ..config() };
        let mut core = Deferrables::new(sizes).unwrap();
        let group = core.add_group(b(PIECE)).unwrap();
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
