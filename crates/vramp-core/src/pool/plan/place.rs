//! The decision of malloc: a hit, a plan, or a shortage.
//!
//! An [`Attempt`] climbs a ladder, cheapest rung first. Each call of [`Pool::place`] goes up until
//! it has the block or needs the shell:
//!
//! 1. `Own`: a fitting free region of the stream. No driver call. Where many threads ask at
//!    once, growth comes next.
//! 2. `Learn`: ask which recorded events were reached, if any are open.
//! 3. `Idle`: memory of other streams whose work is over: one fitting region.
//! 4. `Gather`: caches and heaps give back what they do not need.
//! 5. `Adopt`: all idle memory, merged.
//! 6. `Build`: fill a hole with chunks: free ones moved there, new ones where those do not suffice
//!    (`build.rs`). If that takes more memory than the slack allows and other streams have free
//!    memory, wait for them on the GPU first.
//!
//!    Before that, idle arenas lend.
//!
//! Memory for an arena climbs the same ladder, but is wanted at one address (`backing.rs`).
//!
//! The end of the ladder is the [`Shortage`], which is the user's error.

use crate::Bytes;
use crate::heap::Slab;
use crate::ids::{ArenaId, ChunkId, Epoch, Mark, StreamId};
use crate::pool::config::{Mixed, Policy};
use crate::pool::index::RegionKey;
use crate::pool::plan::build::Build;
use crate::pool::plan::{Change, Op, Plan};
use crate::pool::regions::Kind;
use crate::pool::state::{BLOCK_ALIGN, Block, Pool};

/// What a user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many bytes.
    pub size: Bytes,
    /// The stream whose work uses it first.
    pub stream: StreamId,
}

/// A request on its way up the ladder.
#[derive(Clone, Debug)]
pub struct Attempt {
    pub(crate) request: Request,
    /// For a slab, how long it is at best; the request is then the least. Zero for a block.
    pub(crate) slab: u64,
    /// The arena that the memory is for, if it is for one.
    pub(crate) arena: Option<ArenaId>,
    /// The distance from the arena's start at which the memory is wanted.
    pub(crate) from: u64,
    pub(crate) rung: Rung,
    pub(crate) planned: bool,
    /// False once the card had no more memory.
    pub(crate) may_grow: bool,
    /// Other streams' memory was already waited for.
    pub(crate) ordered: bool,
    /// Idle arenas were already asked to lend.
    pub(crate) asked_arenas: bool,
    /// The chunk that was last given back so that others can be made of its memory.
    pub(crate) recut: Option<ChunkId>,
    /// Keep to what is needed: use no slack.
    pub(crate) frugal: bool,
    /// Many threads ask at once: grow before anybody else's memory is looked at.
    pub(crate) roomy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    Own,
    Learn,
    Idle,
    Gather,
    Adopt,
    Build,
}

impl Attempt {
    /// The request at the foot of the ladder.
    pub fn new(request: Request) -> Attempt {
        Attempt {
            request,
            slab: 0,
            arena: None,
            from: 0,
            rung: Rung::Own,
            planned: false,
            may_grow: true,
            ordered: false,
            asked_arenas: false,
            recut: None,
            frugal: false,
            roomy: false,
        }
    }

    /// A slab for the heap of the request's stream, at best `wanted` bytes long.
    pub fn slab(request: Request, wanted: Bytes) -> Attempt {
        Attempt { slab: wanted.max(request.size).count(), ..Attempt::new(request) }
    }

    /// Lets the pool grow as far as limit and card allow before it looks at other streams' memory:
    /// where many threads ask at once they would otherwise take it from each other for ever.
    pub fn roomy(self, roomy: bool) -> Attempt {
        Attempt { roomy, ..self }
    }

    /// True once a plan was needed: the block is no hit.
    pub fn planned(&self) -> bool {
        self.planned
    }

    /// Begins again at the foot of the ladder: a plan was not performed, for the pool has learnt
    /// something since.
    pub fn again(&mut self) {
        self.rung = Rung::Own;
        self.ordered = false;
        self.asked_arenas = false;
    }

    /// Tells the attempt that its last plan failed because the card is full. True if another way
    /// is left to try: first without slack, then without growth.
    pub fn out_of_memory(&mut self) -> bool {
        self.rung = Rung::Own;
        if !self.frugal {
            self.frugal = true;
            return true;
        }
        std::mem::replace(&mut self.may_grow, false)
    }
}

impl Attempt {
    /// Why the request cannot be served, as the pool stands now.
    pub fn shortage(&self, pool: &Pool) -> Shortage {
        pool.shortage(self)
    }
}

/// What the shell does next.
#[derive(Debug)]
#[must_use = "the attempt goes on only when the shell does what the step says"]
pub enum Step {
    /// The block. The attempt is over.
    Placed(Block),
    /// The slab that [`Attempt::slab`] asked for. The attempt is over.
    Slab(Slab),
    /// The memory that [`Attempt::back`] asked for is there. The attempt is over.
    Backed,
    /// Give back what caches and heaps do not need ([`StreamHeap::shed`](crate::StreamHeap::shed)),
    /// call again.
    Gather,
    /// Let arenas that nobody uses lend their memory ([`Pool::lend`]), call again.
    Lend,
    /// Ask about [`Pool::pending`] events, tell [`Pool::reached`], call again.
    Poll,
    /// Record events for these marks ([`Pool::recorded`]), ask about all events as for
    /// [`Poll`](Step::Poll), call again. Nothing while a stream captures.
    Ask(Vec<Mark>),
    /// Perform the plan, settle or abandon it, call again.
    Perform(Plan),
    /// No way is left. The attempt is over.
    Short(Shortage),
}

/// Why a request cannot be served, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What was asked.
    pub requested: Bytes,
    /// Physical memory the pool holds.
    pub reserved: Bytes,
    /// Memory in users' hands, rounding included.
    pub used: Bytes,
    /// Free memory in the pool, usable or not.
    pub free: Bytes,
    /// The largest block that could be made by remapping all free chunks.
    pub largest: Bytes,
    /// Freed memory that waits for work of other streams.
    pub waiting: Bytes,
    /// The pool's own limit, if that is what stopped it.
    pub limit: Option<Bytes>,
    /// The stream that wants a block; none where memory is wanted behind addresses that are there.
    pub block_for: Option<StreamId>,
}

pub(crate) enum Found {
    Region(RegionKey),
    Step(Step),
}

impl Pool {
    /// Goes on with a request. See the module's page for the order of rungs.
    ///
    /// A hit makes no driver call and no heap allocation.
    ///
    /// # Panics
    /// If the stream is unknown.
    pub fn place(&mut self, attempt: &mut Attempt) -> Step {
        let Request { size, stream } = attempt.request;
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
        let requested = size.count();
        match self.config.policy {
            Policy::Vpmm => match self.find_vpmm(attempt) {
                Found::Region(key) => {
                    let len = self.rounded(requested, self.config.page.count());
                    let block = self.carve(key, len, attempt.request, false);
                    self.count_placed(requested, attempt.planned);
                    Step::Placed(block)
                }
                Found::Step(step) => step,
            },
            Policy::Mixed(mixed) if attempt.arena.is_some() => self.place_arena(attempt, &mixed),
            Policy::Mixed(mixed) => {
                let Some(len) = requested.checked_next_multiple_of(BLOCK_ALIGN) else {
                    return Step::Short(self.shortage(attempt));
                };
                match self.find(len, attempt, &mixed) {
                    Found::Region(key) if attempt.slab > 0 => {
                        let len = self.regions.get(key).len.min(attempt.slab.max(len));
                        let block = self.carve(key, len, attempt.request, true);
                        Step::Slab(self.as_slab(block))
                    }
                    Found::Region(key) => {
                        let block = self.carve(key, len, attempt.request, false);
                        self.count_placed(requested, attempt.planned);
                        Step::Placed(block)
                    }
                    Found::Step(step) => step,
                }
            }
        }
    }

    /// A request in whole units, or more than any span holds if it does not fit 64 bits.
    pub(crate) fn rounded(&self, requested: u64, unit: u64) -> u64 {
        requested.max(1).checked_next_multiple_of(unit).unwrap_or(u64::MAX / unit * unit)
    }

    /// A free region of the stream of at least `len` bytes, not yet carved.
    fn find(&mut self, len: u64, attempt: &mut Attempt, mixed: &Mixed) -> Found {
        let stream = attempt.request.stream;
        loop {
            match attempt.rung {
                Rung::Own => {
                    let free = &self.streams.get(stream).free;
                    if let Some(key) = free.find(len.max(attempt.slab)).or_else(|| free.find(len)) {
                        return Found::Region(key);
                    }
                    if attempt.roomy
                        && let Some(plan) = self.grow_first(len, attempt, mixed)
                    {
                        attempt.planned = true;
                        return Found::Step(Step::Perform(plan));
                    }
                    attempt.rung = Rung::Learn;
                }
                Rung::Learn => {
                    attempt.rung = Rung::Idle;
                    if self.streams.any_pending() {
                        return Found::Step(Step::Poll);
                    }
                }
                Rung::Idle => {
                    attempt.rung = Rung::Gather;
                    if self.promote_waiting()
                        && let Some(key) = self.streams.get(stream).free.find(len)
                    {
                        return Found::Region(key);
                    }
                    if let Some(key) = self.adopt_one_idle(stream, len) {
                        return Found::Region(key);
                    }
                }
                Rung::Gather => {
                    attempt.rung = Rung::Adopt;
                    return Found::Step(Step::Gather);
                }
                Rung::Adopt => {
                    attempt.rung = Rung::Build;
                    self.promote_waiting();
                    self.adopt(stream, u64::MAX, |pool, mark| pool.streams.is_over(mark));
                    if let Some(key) = self.streams.get(stream).free.find(len) {
                        return Found::Region(key);
                    }
                }
                Rung::Build => {
                    attempt.planned = true;
                    return Found::Step(self.build_step(len, attempt, mixed));
                }
            }
        }
    }

    /// A plan that grows, before anybody else's memory is looked at: threads that took from
    /// each other's heaps and streams at every miss would do nothing else.
    fn grow_first(&mut self, len: u64, attempt: &mut Attempt, mixed: &Mixed) -> Option<Plan> {
        match self.build(len, attempt, mixed) {
            Build::Clear(plan) => Some(plan),
            Build::Fill { plan, over_slack: 0 } => Some(plan),
            Build::Fill { .. } | Build::Short { .. } => {
                attempt.roomy = false;
                None
            }
        }
    }

    fn build_step(&mut self, len: u64, attempt: &mut Attempt, mixed: &Mixed) -> Step {
        let build = self.build(len, attempt, mixed);
        self.step_of(build, attempt, Rung::Own)
    }

    /// What the shell does for a build; `then` is the rung to go on from. Before the pool grows
    /// beyond its slack, or gives up, idle arenas lend and other streams' memory is waited for.
    pub(crate) fn step_of(&mut self, build: Build, attempt: &mut Attempt, then: Rung) -> Step {
        let (plan, needed) = match build {
            Build::Clear(plan) => return Step::Perform(plan),
            Build::Fill { plan, over_slack } => (Some(plan), over_slack),
            Build::Short { missing } => (None, missing),
        };
        if needed > 0 {
            if !std::mem::replace(&mut attempt.asked_arenas, true) && self.could_lend() {
                return Step::Lend;
            }
            if !attempt.ordered
                && let Some(plan) = self.order_others(attempt.request.stream, needed)
            {
                attempt.ordered = true;
                attempt.rung = then;
                return Step::Perform(plan);
            }
        }
        match plan {
            Some(plan) => {
                attempt.rung = then;
                attempt.recut = None;
                Step::Perform(plan)
            }
            None if attempt.arena.is_some() => match self.recut() {
                // One that is still there could not be given back: it would not be the next time.
                Some((chunk, plan)) if attempt.recut != Some(chunk) => {
                    attempt.recut = Some(chunk);
                    attempt.may_grow = true;
                    Step::Perform(plan)
                }
                _ => Step::Short(self.shortage(attempt)),
            },
            None => Step::Short(self.shortage(attempt)),
        }
    }

    /// The other streams' free regions, oldest first.
    pub(crate) fn foreign(&self, stream: StreamId) -> Vec<RegionKey> {
        let mut regions: Vec<RegionKey> = self
            .streams
            .ids()
            .filter(|&other| other != stream)
            .flat_map(|other| self.streams.get(other).free.iter().map(|(_, _, key)| key))
            .collect();
        regions.sort_by_key(|&key| self.free_of(key).born);
        regions
    }

    /// Takes over the idle part of one foreign region that holds `len` bytes: the smallest that
    /// does. The rest stays with its owner.
    fn adopt_one_idle(&mut self, stream: StreamId, len: u64) -> Option<RegionKey> {
        if self.streams.len() == 1 {
            return None;
        }
        let mut best: Option<(u64, RegionKey, u64)> = None;
        for key in self.foreign(stream) {
            for (offset, run) in self.ready_runs(key, |pool, mark| pool.streams.is_over(mark)) {
                if run >= len && best.is_none_or(|(smallest, _, _)| run < smallest) {
                    best = Some((run, key, offset));
                }
            }
        }
        let (_, key, offset) = best?;
        let key = self.isolate(key, offset, len);
        self.free_of_mut(key).owner = stream;
        self.clear_epochs(key, stream, |_, _| Epoch::START);
        Some(self.link_free(key))
    }

    /// Takes over foreign memory whose marks are `ready`, oldest first, until `need` bytes are
    /// had. Memory that is only ordered behind a wait keeps the new owner's present epoch.
    pub(crate) fn adopt(
        &mut self,
        stream: StreamId,
        need: u64,
        ready: impl Fn(&Pool, Mark) -> bool + Copy,
    ) -> u64 {
        let mut had = 0;
        if self.streams.len() == 1 {
            return had;
        }
        for key in self.foreign(stream) {
            // From the back, so that offsets in front stay as they are.
            for (offset, run) in self.ready_runs(key, ready).into_iter().rev() {
                if had >= need {
                    return had;
                }
                let piece = self.isolate(key, offset, run);
                let old_owner = std::mem::replace(&mut self.free_of_mut(piece).owner, stream);
                let present = self.streams.now(stream).epoch;
                self.clear_epochs(piece, stream, |pool, epoch| {
                    let over = pool.streams.is_over(Mark { stream: old_owner, epoch });
                    if over { Epoch::START } else { present }
                });
                self.link_free(piece);
                had += run;
            }
        }
        had
    }

    /// Stretches of a free region whose every part is ready: offset and length.
    fn ready_runs(&self, key: RegionKey, ready: impl Fn(&Pool, Mark) -> bool) -> Vec<(u64, u64)> {
        let free = self.free_of(key);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut offset = 0;
        for part in &free.parts {
            if ready(self, Mark { stream: free.owner, epoch: part.epoch }) {
                match runs.last_mut() {
                    Some((start, run)) if *start + *run == offset => *run += part.len,
                    _ => runs.push((offset, part.len)),
                }
            }
            offset += part.len;
        }
        runs
    }

    /// Cuts `len` bytes at `offset` out of an indexed free region. The piece is in no index; what
    /// is left on either side is.
    fn isolate(&mut self, key: RegionKey, offset: u64, len: u64) -> RegionKey {
        self.unindex(key);
        let mut piece = key;
        if offset > 0 {
            piece = self.split_free(key, offset);
            self.index(key);
        }
        if self.regions.get(piece).len > len {
            let rest = self.split_free(piece, len);
            self.index(rest);
        }
        piece
    }

    fn clear_epochs(
        &mut self,
        key: RegionKey,
        owner: StreamId,
        epoch_of: impl Fn(&Pool, Epoch) -> Epoch,
    ) {
        let reached = self.streams.get(owner).reached;
        let mut parts = crate::pool::regions::Parts::new();
        for mut part in self.free_of(key).parts.clone() {
            part.epoch = epoch_of(self, part.epoch);
            crate::pool::state::push_part(&mut parts, part, reached);
        }
        self.free_of_mut(key).parts = parts;
    }

    /// A plan that orders `stream` behind other streams until `need` more bytes are reusable, or
    /// `None` if nothing is to be had. Oldest memory first; an event is recorded where the memory
    /// was freed after the last one.
    pub(crate) fn order_others(&self, stream: StreamId, need: u64) -> Option<Plan> {
        // A stream that captures may not wait for work outside of its graph.
        if self.streams.get(stream).held {
            return None;
        }
        let mut marks: Vec<Mark> = Vec::new();
        let mut note = |mark: Mark| match marks.iter_mut().find(|m| m.stream == mark.stream) {
            Some(known) => known.epoch = known.epoch.max(mark.epoch),
            None => marks.push(mark),
        };
        let mut had = 0;
        for key in self.foreign(stream) {
            if had >= need {
                break;
            }
            let free = self.free_of(key);
            let mark = |epoch| Mark { stream: free.owner, epoch };
            if free.parts.iter().any(|part| self.streams.is_out_of_reach(mark(part.epoch))) {
                continue;
            }
            had += self.regions.get(key).len;
            free.parts.iter().for_each(|p| note(Mark { stream: free.owner, epoch: p.epoch }));
        }
        for &key in &self.waiting {
            if had >= need {
                break;
            }
            if let Kind::Waiting { owner, epoch, marks } = &self.regions.get(key).kind {
                let own = Mark { stream: *owner, epoch: *epoch };
                if marks.iter().chain([&own]).any(|&mark| self.streams.is_out_of_reach(mark)) {
                    continue;
                }
                had += self.regions.get(key).len;
                note(Mark { stream: *owner, epoch: *epoch });
                marks.iter().for_each(|&mark| note(mark));
            }
        }
        if had < need {
            let awaited = self.awaited.iter().copied();
            awaited.filter(|&mark| !self.streams.is_out_of_reach(mark)).for_each(note);
        }
        marks.retain(|&mark| !self.streams.is_ordered(stream, mark));
        if marks.is_empty() && had == 0 {
            return None;
        }
        let (records, ops) = self.waiting_ops(stream, &marks);
        Some(Plan { ops, change: Change::Order { stream, waits: marks, records, need } })
    }

    /// Records where needed, then waits.
    pub(crate) fn waiting_ops(&self, stream: StreamId, marks: &[Mark]) -> (Vec<Mark>, Vec<Op>) {
        let unrecorded = |&mark: &Mark| self.streams.is_unrecorded(mark);
        let records: Vec<Mark> = marks.iter().copied().filter(unrecorded).collect();
        let recording = records.iter().map(|&mark| Op::Record(mark));
        let waiting = marks.iter().map(|&on| Op::Wait { stream, on });
        let ops = recording.chain(waiting).collect();
        (records, ops)
    }

    pub(crate) fn shortage(&self, attempt: &Attempt) -> Shortage {
        let census = self.census();
        let request = attempt.request.size;
        let movable: u64 = self.movable_bytes(attempt.request.stream);
        let over = |limit: &Bytes| limit.count() < self.charged().saturating_add(request.count());
        Shortage {
            requested: request,
            reserved: Bytes::new(self.chunks.bytes()),
            used: census.used + census.slab_free + census.arenas,
            free: census.free,
            largest: Bytes::new(movable.max(self.largest_free())),
            waiting: census.waiting,
            limit: self.config.limit.filter(over),
            block_for: attempt.arena.is_none().then_some(attempt.request.stream),
        }
    }

    fn largest_free(&self) -> u64 {
        let lens = self.regions.iter().filter(|(_, r)| matches!(r.kind, Kind::Free(_)));
        lens.map(|(_, region)| region.len).max().unwrap_or(0)
    }
}
