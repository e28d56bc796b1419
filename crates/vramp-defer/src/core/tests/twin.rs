//! The naive twin: a list of pieces with their contents in every tier, and the rules of leases and
//! of the wait queue in the plainest words.
//!
//! The twin writes a new number for each write and carries it along with each copy. A piece that is
//! read has to show the number that was written last.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Room for three tenants in a group.
pub const PIECE: u64 = 1536;
pub const CAPACITY: u64 = 9000;

/// Contents are numbers; 0 is none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bits {
    /// The number written last.
    pub latest: u64,
    pub card: Option<u64>,
    pub peer: Option<(PeerId, u64)>,
    pub host: Option<u64>,
    pub disk: Option<u64>,
    pub busy: bool,
}

impl Bits {
    pub fn on(&self, tier: SpillTier) -> Option<u64> {
        match tier {
            SpillTier::Peer(peer) => {
                self.peer.filter(|(on, _)| *on == peer).map(|(_, number)| number)
            }
            SpillTier::Host => self.host,
            SpillTier::Disk => self.disk,
        }
    }

    pub fn set(&mut self, tier: SpillTier, number: Option<u64>) {
        match tier {
            SpillTier::Peer(peer) => self.peer = number.map(|number| (peer, number)),
            SpillTier::Host => self.host = number,
            SpillTier::Disk => self.disk = number,
        }
    }

    pub fn copies(&self) -> Copies {
        let peer = self.peer.map(|(peer, _)| peer);
        Copies { peer, host: self.host.is_some(), disk: self.disk.is_some() }
    }

    pub fn below(&self) -> Option<u64> {
        self.peer.map(|(_, number)| number).or(self.host).or(self.disk)
    }
}

#[derive(Clone, Debug)]
pub struct Twin {
    pub id: BufferId,
    pub range: RangeId,
    pub len: u64,
    pub pieces: Vec<Bits>,
    pub pins: u32,
    /// Its memory is pinned in the pool.
    pub pinned_memory: bool,
    pub readable: bool,
    /// By stream, the last.
    pub reads: BTreeMap<u64, u64>,
    pub writes: BTreeMap<u64, u64>,
}

#[derive(Clone, Debug)]
pub struct TwinLease {
    pub id: BufferLeaseId,
    pub stream: u64,
    pub buffers: BTreeMap<BufferId, Access>,
    pub in_place: Vec<BufferId>,
}

impl TwinLease {
    pub fn ways(&self) -> SplitRequest {
        let way = |(&id, &access): (&BufferId, &Access)| match self.in_place.contains(&id) {
            true => (id, Way::InPlace),
            false => (id, access.into()),
        };
        self.buffers.iter().map(way).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Out(Option<SpillTier>),
    Restore(SpillTier),
    Push(SpillTier, SpillTier),
}

/// A move, and what a copy read when it began.
#[derive(Clone, Copy, Debug)]
pub struct TwinMove {
    pub id: MoveId,
    pub piece: PieceId,
    pub kind: Kind,
    pub read: Option<u64>,
    /// How many writes there were when it began.
    pub began: u64,
    /// The number of its end on the stream of copies, once that is queued.
    pub queued: Option<u64>,
}

/// A request. Streams hold leases here: each is a holder that would wait for itself.
#[derive(Clone, Debug)]
pub struct Ask {
    pub stream: u64,
    pub buffers: BTreeMap<BufferId, Access>,
    /// All of it may be read in place.
    pub stays: bool,
    /// It is a request of the pool, and names no buffer.
    pub is_of_pool: bool,
}

impl Ask {
    pub fn list(&self) -> Vec<(BufferId, Access)> {
        self.buffers.iter().map(|(&id, &access)| (id, access)).collect()
    }

    pub fn in_place_allowed(&self) -> Vec<BufferId> {
        self.buffers.keys().copied().filter(|_| self.stays).collect()
    }
}

/// A request in the queue.
#[derive(Clone, Debug)]
pub struct TwinWaiter {
    pub ticket: Ticket,
    pub ask: Ask,
}

/// How a buffer is used: on the card, except for the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Shared,
    Exclusive,
    InPlace,
}

impl From<Access> for Way {
    fn from(access: Access) -> Way {
        match access {
            Access::Shared => Way::Shared,
            Access::Exclusive | Access::Overwrite => Way::Exclusive,
        }
    }
}

/// How a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Served,
    /// A buffer is gone, or the set is too large.
    Never,
    /// An older waiter, at this place of the queue, goes first.
    Behind(usize),
    /// Leases or moves are in the way.
    Busy,
    /// `keeps`: leases have it, and younger ones must not take it.
    LacksRoom {
        keeps: bool,
    },
}

pub type SplitRequest = BTreeMap<BufferId, Way>;

#[derive(Clone, Debug, Default)]
pub struct World {
    pub buffers: Vec<Twin>,
    pub leases: Vec<TwinLease>,
    pub wait_queue: Vec<TwinWaiter>,
    pub moves: Vec<TwinMove>,
    pub written: u64,
    pub point: u64,
    pub now: u64,
    pub group: Option<RangeId>,
}

impl World {
    pub fn pick(&self, which: usize) -> Option<BufferId> {
        self.buffers.get(which % self.buffers.len().max(1)).map(|twin| twin.id)
    }

    pub fn add(&mut self, added: AddedBuffer, pieces: u64) {
        self.buffers.push(Twin {
            id: added.buffer,
            range: added.at.range,
            len: added.at.len.count(),
            pieces: vec![Bits::default(); pieces as usize],
            pins: 0,
            pinned_memory: false,
            readable: false,
            reads: BTreeMap::new(),
            writes: BTreeMap::new(),
        });
    }

    /// True if a lease, a pin or a move holds the buffer.
    pub fn is_held_or_moves(&mut self, id: BufferId) -> Result<bool, TestCaseError> {
        let leased = self.is_leased(id);
        let twin = self.twin(id);
        let held = leased || twin.pins > 0;
        Ok(held || twin.pieces.iter().any(|bits| bits.busy))
    }

    pub fn twin(&mut self, id: BufferId) -> &mut Twin {
        self.buffers.iter_mut().find(|twin| twin.id == id).expect("the planner has it too")
    }

    pub fn bits(&mut self, piece: PieceId) -> &mut Bits {
        &mut self.twin(piece.buffer).pieces[piece.index as usize]
    }

    pub fn find(&self, id: BufferId) -> Option<&Twin> {
        self.buffers.iter().find(|twin| twin.id == id)
    }

    pub fn is_leased(&self, id: BufferId) -> bool {
        self.leases.iter().any(|lease| lease.buffers.contains_key(&id))
    }

    /// Leased, and not only to be read in place.
    pub fn is_used(&self, id: BufferId) -> bool {
        let uses =
            |lease: &TwinLease| lease.buffers.contains_key(&id) && !lease.in_place.contains(&id);
        self.leases.iter().any(uses)
    }

    pub fn is_read_in_place(&self, id: BufferId) -> bool {
        self.leases.iter().any(|lease| lease.in_place.contains(&id))
    }

    /// All of it is readable and at rest, a part is spilled, and no lease uses it on the card.
    pub fn can_read_in_place(&self, id: BufferId) -> bool {
        let Some(twin) = self.find(id) else { return false };
        let in_the_way =
            |one: &TwinMove| one.piece.buffer == id && !matches!(one.kind, Kind::Out(_));
        let there = |bits: &Bits| bits.card.is_some() || bits.host.is_some();
        twin.readable
            && twin.pieces.iter().all(there)
            && twin.pieces.iter().any(|bits| bits.card.is_none())
            && !self.moves.iter().any(in_the_way)
            && !self.is_used(id)
            && twin.pins == 0
            && !twin.pinned_memory
    }

    /// What a request would have now.
    pub fn split_by_place(&self, ask: &Ask) -> SplitRequest {
        let way = |(&id, &access): (&BufferId, &Access)| match ask.stays
            && access == Access::Shared
            && self.can_read_in_place(id)
        {
            true => (id, Way::InPlace),
            false => (id, access.into()),
        };
        ask.buffers.iter().map(way).collect()
    }

    pub fn is_unevictable(&self, twin: &Twin) -> bool {
        let pinned = twin.pins > 0 || twin.pinned_memory;
        self.is_leased(twin.id) || pinned
    }

    /// No buffer of the range is held, the pieces' own or their group's.
    pub fn may_leave(&self, range: RangeId) -> bool {
        !self.buffers.iter().any(|twin| twin.range == range && self.is_unevictable(twin))
    }

    pub fn committed(&self, core: &Deferrables) -> u64 {
        let is_counted = |twin: &&Twin| {
            let pinned = twin.pins > 0 || twin.pinned_memory;
            self.is_used(twin.id) || pinned
        };
        let mut ranges: Vec<RangeId> =
            self.buffers.iter().filter(is_counted).map(|twin| twin.range).collect();
        ranges.sort();
        ranges.dedup();
        ranges.iter().map(|&range| self.range_len(core, range)).sum()
    }

    pub fn range_len(&self, core: &Deferrables, range: RangeId) -> u64 {
        if Some(range) == self.group {
            return PIECE;
        }
        let whole = |twin: &&Twin| twin.range == range;
        let twin = self.buffers.iter().find(whole).expect("a range of its own has a buffer");
        core.slice(twin.id).unwrap().len.count().next_multiple_of(4)
    }

    /// Buffers that have to be on the card.
    pub fn ranges_of(&self, wanted: &SplitRequest) -> Vec<RangeId> {
        let comes = |twin: &&Twin| wanted.get(&twin.id).is_some_and(|way| *way != Way::InPlace);
        let named = self.buffers.iter().filter(comes);
        let mut ranges: Vec<RangeId> = named.map(|twin| twin.range).collect();
        ranges.sort();
        ranges.dedup();
        ranges
    }

    pub fn is_pinned(&self, range: RangeId) -> bool {
        let kept = |twin: &Twin| twin.pins > 0 || twin.pinned_memory;
        self.buffers.iter().any(|twin| twin.range == range && kept(twin))
    }

    pub fn is_anchored(&self, range: RangeId) -> bool {
        let used = |twin: &Twin| twin.range == range && self.is_used(twin.id);
        self.is_pinned(range) || self.buffers.iter().any(used)
    }

    /// Waits for room that leases occupy.
    pub fn lacks_room(&self, core: &Deferrables, wanted: &SplitRequest) -> bool {
        let own = self.ranges_of(wanted);
        let new = own.iter().filter(|&&range| !self.is_anchored(range));
        let new: u64 = new.map(|&range| self.range_len(core, range)).sum();
        let mut alone: Vec<RangeId> = self.buffers.iter().map(|twin| twin.range).collect();
        alone.retain(|range| self.is_pinned(*range) || own.contains(range));
        alone.sort();
        alone.dedup();
        let alone: u64 = alone.iter().map(|&range| self.range_len(core, range)).sum();
        wanted.keys().all(|&id| self.find(id).is_some())
            && new > 0
            && self.committed(core) + new > CAPACITY
            && alone <= CAPACITY
    }

    /// Moves that a request waits for.
    pub fn settling(&self, wanted: &SplitRequest) -> usize {
        let in_the_way = |one: &&TwinMove| {
            let way = wanted.get(&one.piece.buffer);
            way.is_some_and(|way| match one.kind {
                Kind::Out(to) => *way == Way::Exclusive && to.is_some() && one.queued.is_none(),
                Kind::Restore(_) | Kind::Push(..) => *way != Way::InPlace,
            })
        };
        self.moves.iter().filter(in_the_way).count()
    }

    /// How each waiter stands, the oldest first.
    pub fn standings(&self, core: &Deferrables) -> Vec<Standing> {
        self.all_standings(core).0
    }

    /// How a request stands that is younger than all waiters.
    pub fn standing_of_a_new_one(&self, core: &Deferrables, ask: &Ask) -> Standing {
        let (_, keeping) = self.all_standings(core);
        self.stands(core, self.wait_queue.len(), &keeping, ask)
    }

    fn all_standings(&self, core: &Deferrables) -> (Vec<Standing>, Vec<usize>) {
        let (mut all, mut keeping) = (Vec::new(), Vec::new());
        for (place, waiter) in self.wait_queue.iter().enumerate() {
            let standing = self.stands(core, place, &keeping, &waiter.ask);
            if standing == (Standing::LacksRoom { keeps: true }) {
                keeping.push(place);
            }
            all.push(standing);
        }
        (all, keeping)
    }

    /// `keeping` are the older ones that lack nothing but room.
    fn stands(&self, core: &Deferrables, older: usize, keeping: &[usize], ask: &Ask) -> Standing {
        if ask.is_of_pool {
            return Standing::LacksRoom { keeps: true };
        }
        if ask.buffers.keys().any(|&id| self.find(id).is_none()) {
            return Standing::Never;
        }
        let wanted = self.split_by_place(ask);
        let ranges = self.ranges_of(&wanted);
        let all: u64 = ranges.iter().map(|&range| self.range_len(core, range)).sum();
        if all > CAPACITY {
            return Standing::Never;
        }
        let other = |place: usize| self.split_by_place(&self.wait_queue[place].ask);
        let may_pass = |place: usize| self.waits_for(core, place).contains(&ask.stream);
        let behind =
            (0..older).rev().find(|&place| excludes(&other(place), &wanted) && !may_pass(place));
        if let Some(place) = behind {
            return Standing::Behind(place);
        }
        let busy = self.leases.iter().any(|lease| excludes(&lease.ways(), &wanted));
        if busy || self.settling(&wanted) > 0 {
            return Standing::Busy;
        }
        let of_pool = |place: usize| self.wait_queue[place].ask.is_of_pool;
        let passes_pool = |place: usize| {
            let own = |lease: &TwinLease| lease.stream == ask.stream;
            let has_room = |lease: &TwinLease| lease.in_place.len() < lease.buffers.len();
            self.leases.iter().any(|lease| own(lease) && has_room(lease))
                || self.wait_queue[place].ask.stream == ask.stream
        };
        let takes = self.takes_memory(core, &wanted);
        let behind = keeping.iter().rev();
        let behind = behind.copied().find(|&place| takes && of_pool(place) && !passes_pool(place));
        if let Some(place) = behind {
            return Standing::Behind(place);
        }
        let behind = keeping.iter().rev().filter(|&&place| !of_pool(place)).find(|&&place| {
            let needed = self.ranges_of(&other(place));
            let takes = |range: &RangeId| !needed.contains(range) && !self.is_pinned(*range);
            // One that lacks the same has no room either.
            let is_taken = |range: &&RangeId| !self.is_pinned(**range);
            let taken = |ranges: &[RangeId]| -> Vec<RangeId> {
                ranges.iter().filter(is_taken).copied().collect()
            };
            let same = !taken(&ranges).is_empty() && taken(&ranges) == taken(&needed);
            (same || ranges.iter().any(takes)) && !may_pass(place)
        });
        if let Some(&place) = behind {
            return Standing::Behind(place);
        }
        let new = ranges.iter().filter(|&&range| !self.is_anchored(range));
        let new: u64 = new.map(|&range| self.range_len(core, range)).sum();
        if new > 0 && self.committed(core) + new > CAPACITY {
            return Standing::LacksRoom { keeps: self.lacks_room(core, &wanted) };
        }
        Standing::Served
    }

    /// A victim would stay, or memory be needed that is not behind the buffers.
    fn takes_memory(&self, core: &Deferrables, wanted: &SplitRequest) -> bool {
        let takes = |twin: &Twin| {
            let states = core.states(twin.id).unwrap();
            let leaves = states.iter().any(|state| matches!(state, PieceState::Leaving { .. }));
            let lacks = |&index: &usize| !core.buffers[twin.id].pieces[index].backed;
            leaves || (0..states.len()).any(|index| lacks(&index))
        };
        let comes = |twin: &&Twin| wanted.get(&twin.id).is_some_and(|way| *way != Way::InPlace);
        let mut named = self.buffers.iter().filter(comes);
        named.any(|twin| !self.is_pinned(twin.range) && takes(twin))
    }

    /// The younger request must not overtake the older one.
    pub fn comes_after(
        &self,
        core: &Deferrables,
        older: &SplitRequest,
        wanted: &SplitRequest,
    ) -> bool {
        let needed = self.ranges_of(older);
        let takes = |range: &RangeId| !needed.contains(range) && !self.is_pinned(*range);
        excludes(older, wanted)
            || self.lacks_room(core, older) && self.ranges_of(wanted).iter().any(takes)
    }

    /// Streams whose leases have to end before a waiter is granted, with all that follows from it.
    pub fn waits_for(&self, core: &Deferrables, place: usize) -> Vec<u64> {
        let (mut waiters, mut streams) = (vec![place], Vec::new());
        loop {
            let before = (waiters.len(), streams.len());
            for place in waiters.clone() {
                let wanted = self.split_by_place(&self.wait_queue[place].ask);
                let full = self.lacks_room(core, &wanted);
                for lease in &self.leases {
                    let has_room = lease.in_place.len() < lease.buffers.len();
                    if (full && has_room || excludes(&lease.ways(), &wanted))
                        && !streams.contains(&lease.stream)
                    {
                        streams.push(lease.stream);
                    }
                }
                for (other, waits) in self.wait_queue.iter().enumerate() {
                    let in_front = other < place
                        && self.comes_after(core, &self.split_by_place(&waits.ask), &wanted);
                    if (in_front || streams.contains(&waits.ask.stream))
                        && !waiters.contains(&other)
                    {
                        waiters.push(other);
                    }
                }
            }
            if before == (waiters.len(), streams.len()) {
                return streams;
            }
        }
    }

    /// Room below the card that is promised to moves in flight.
    pub fn promised(&self, to: SpillTier) -> u64 {
        let takes = |one: &&TwinMove| match one.kind {
            Kind::Out(Some(lower)) => lower == to && one.queued.is_none(),
            Kind::Push(_, lower) => lower == to,
            _ => false,
        };
        self.moves.iter().filter(takes).map(|one| self.piece_len(one.piece)).sum()
    }

    pub fn piece_len(&self, piece: PieceId) -> u64 {
        let whole = self.find(piece.buffer).expect("what moves is not removed").len;
        PIECE.min(whole - PIECE * u64::from(piece.index))
    }

    pub fn drop_copies(&mut self, stale: &[StaleCopy]) -> Result<(), TestCaseError> {
        for drop in stale {
            let bits = self.bits(drop.piece);
            let copy = bits.on(drop.from);
            bits.set(drop.from, None);
            prop_assert!(copy.is_some(), "there is no copy of {} on the {}", drop.piece, drop.from);
        }
        Ok(())
    }

    pub fn begin(&mut self, id: MoveId, piece: PieceId, kind: Kind) -> Result<(), TestCaseError> {
        let began = self.written;
        let bits = self.bits(piece);
        prop_assert!(!bits.busy, "{piece} moves already");
        bits.busy = true;
        let read = match kind {
            Kind::Out(_) => bits.card,
            Kind::Restore(from) | Kind::Push(from, _) => bits.on(from),
        };
        self.moves.push(TwinMove { id, piece, kind, read, began, queued: None });
        Ok(())
    }
}

/// Both name a buffer that one of them writes, or that only one of them has on the card.
pub fn excludes(one: &SplitRequest, other: &SplitRequest) -> bool {
    let both = |(id, way): (&BufferId, &Way)| Some((*way, *other.get(id)?));
    one.iter().filter_map(both).any(|(one, other)| one != other || one == Way::Exclusive)
}
