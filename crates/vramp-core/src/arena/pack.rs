//! Offline planning: offsets for a recorded capture that need hardly more than its peak.
//!
//! Blocks are rectangles, time by memory, that may move up and down.
//!
//! 1. *Filling valleys* (`skyline.rs`, `candidates.rs`): the most important block that lives wholly
//!    within a valley of what was placed so far goes there. Blocks that are live together at a peak so
//!    come to lie on one another without gaps, in whatever order that takes, where an order by size
//!    alone leaves holes. The memory that was live before cuts the addresses into gaps, which are
//!    filled one after the other. O(n log n) as a rule, so this is done for any number of blocks.
//!    Streams that do not wait for each other are filled one after the other as well.
//! 2. *Placing in an order*: each block at the lowest place where nothing that conflicts was put
//!    before. The order of offsets after step 1 finds gaps that it left; other orders go by size, area
//!    or life. O(n * n), so this is for thousands of blocks at most.
//! 3. *Lifting*: in the best order, the blocks that stick out go first, all of them and then one by
//!    one.
//!
//! The best layout counts, and the recorded one takes part: nothing returned is worse. It ends with
//! the first layout that is close to the bound, or when the work is spent. Work is counted in visited
//! blocks, not in time: the same recording gives the same layout on every machine. What one go may
//! visit is enough to fill the valleys of 20,000 blocks once. Only where there are more, and nothing
//! better than the recorded layout was found, does the next go continue.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::candidates::{Candidate, Candidates, Fit};
use super::plan::Layout;
use super::recording::{CaptureRecording, Position};
use super::skyline::Skyline;
use crate::Bytes;

/// Number of visits of a usual go: 3 to 9 ms, as a visit takes 1 to 4 ns.
const VISITS_PER_GO: u64 = 2_400_000;

/// Packing stops this close to the bound, in thousandths of it.
const GOOD_PER_MILLE: u64 = 1;

/// Number of blocks moved up by one in a list for the cost of one visit.
const MOVED_PER_VISIT: u64 = 8;

/// Number of visits for the cost of changing a skyline once.
const VISITS_PER_VALLEY: u64 = 24;

/// Number of visits for the cost of comparing the uses of two blocks.
const VISITS_PER_CONFLICT: u64 = 2;

/// Number of visits for the cost of a node of the tree of candidates.
const VISITS_PER_NODE: u64 = 2;

/// Most gaps below live memory that are filled, the longest ones. Each takes a pass.
const GAPS_MOST: usize = 8;

/// Most blocks times chains cubed for which the conflict bound is searched. Beyond that the peak of
/// live bytes has to do: a bound that is too low costs time, and no memory.
const BOUND_MOST: u64 = 16_000;

/// Returns offsets for the blocks of a recording, at most as high as the capture's own.
///
/// O(n log n), and then as many visits as one go has. The result passes [`Layout::check`].
pub fn pack(recording: &CaptureRecording) -> Layout {
    let mut packing = Packing::new(recording.clone());
    while !packing.has_ended() {
        packing.go_on(Packing::VISITS_PER_GO);
    }
    packing.layout()
}

/// The packing of a recording, in one go or in several.
#[derive(Debug)]
pub struct Packing {
    recording: CaptureRecording,
    progress: Progress,
}

impl Packing {
    /// Number of visits of a usual go. They take 3 to 9 ms; 20,000 blocks on one stream take one go.
    pub const VISITS_PER_GO: u64 = VISITS_PER_GO;

    /// Begins with the layout of the capture itself.
    pub fn new(recording: CaptureRecording) -> Packing {
        let offsets = recording.lives.iter().map(|life| life.offset).collect();
        let progress = Progress {
            stage: Stage::Begin,
            bound: recording.lower_bound().count(),
            best: Packed { offsets, end: recording.high_water },
            filling: None,
            foremost: None,
            visits: 0,
            visits_left: 0,
            fill_cost: 0,
            is_spent: false,
            random: 0x9e37_79b9_7f4a_7c15,
        };
        Packing { recording, progress }
    }

    /// Packs until nothing is left to try, or so many blocks were visited. If that was before it found
    /// anything better than the capture's own layout, the next call continues; otherwise it has ended,
    /// as it has if there were too few visits for one step.
    pub fn go_on(&mut self, visits: u64) {
        let Packing { recording, progress } = self;
        progress.visits_left = visits;
        progress.is_spent = false;
        let before = progress.visits;
        let ran = Packer { recording, progress }.run();
        progress.is_spent |= ran.is_err();
        let continues = ran.is_err()
            && progress.visits > before
            && progress.filling.is_some()
            && progress.best.end == recording.high_water;
        if !continues {
            (progress.stage, progress.filling, progress.foremost) = (Stage::End, None, None);
        }
    }

    /// True if the last go would have tried more with more visits.
    pub fn is_spent(&self) -> bool {
        self.progress.is_spent
    }

    /// True once nothing is left to try.
    pub fn has_ended(&self) -> bool {
        matches!(self.progress.stage, Stage::End)
    }

    /// Number of blocks visited so far.
    pub fn visits(&self) -> u64 {
        self.progress.visits
    }

    /// Returns the recording.
    pub fn recording(&self) -> &CaptureRecording {
        &self.recording
    }

    /// High-water mark of the best layout so far.
    pub fn high_water(&self) -> Bytes {
        Bytes::new(self.progress.best.end)
    }

    /// Returns the best layout so far. O(n).
    pub fn layout(&self) -> Layout {
        Layout::of(&self.recording, &self.progress.best.offsets)
    }
}

/// A placed block, and the members at which no other block may be there.
#[derive(Clone, Debug)]
struct Placed {
    offset: u64,
    end: u64,
    who: Who,
    /// From the allocation to the first member from which on all are ordered after its last use.
    open: Range<Position>,
}

/// What is placed: a block, or memory that was live before.
#[derive(Clone, Copy, Debug)]
enum Who {
    Block(Position),
    Obstacle(usize),
}

/// The visits are spent.
#[derive(Clone, Copy, Debug)]
struct Spent;

/// What is done next.
#[derive(Debug)]
enum Stage {
    Begin,
    /// Valleys are filled for one stream after the other.
    Streams,
    /// The blocks of all streams are packed together; this order is tried first.
    Together(Option<Vec<Position>>),
    /// One of the orders is tried.
    Order(Members, usize),
    Lift(Members),
    End,
}

/// How far packing has come.
#[derive(Debug)]
struct Progress {
    stage: Stage,
    bound: u64,
    /// Of all blocks.
    best: Packed,
    /// Valleys that are being filled.
    filling: Option<Filling>,
    /// The order that is best when placed.
    foremost: Option<Pass>,
    /// In all goes.
    visits: u64,
    /// In this one.
    visits_left: u64,
    /// Visits of the last time that all valleys were filled.
    fill_cost: u64,
    /// True if something was left out or not ended for want of visits in this go.
    is_spent: bool,
    random: u64,
}

/// Bands of addresses, filled one after the other.
#[derive(Debug)]
struct Filling {
    bands: Vec<Band>,
    key: Key,
    /// Visits before it began.
    begun: u64,
    /// Index of the band that is being filled, and what is left of it.
    at: usize,
    rest: Option<Rest>,
    floor: u64,
}

/// Members that get addresses of their own, and their offsets.
#[derive(Debug)]
struct Band {
    members: Members,
    packed: Packed,
}

/// What is left to fill of a band.
#[derive(Debug)]
struct Rest {
    candidates: Candidates,
    /// The last is filled now.
    gaps: Vec<Range<u64>>,
    skyline: Skyline,
}

/// Blocks that are packed together, in program order. Orders and offsets of them go by their index
/// here.
#[derive(Clone, Debug, Default)]
struct Members {
    blocks: Vec<Position>,
    /// For each, the first member from which on all are ordered after its last use.
    open: Vec<Position>,
    /// All addresses below are taken.
    floor: u64,
}

impl Members {
    fn life(&self, member: Position) -> Range<Position> {
        member..self.open[member as usize].min(self.blocks.len() as Position)
    }
}

/// Offsets of members, and their highest end.
#[derive(Clone, Debug, Default)]
struct Packed {
    offsets: Vec<u64>,
    end: u64,
}

impl Packed {
    /// The members by offset.
    fn upwards(&self) -> Vec<Position> {
        let mut order: Vec<Position> = (0..self.offsets.len() as Position).collect();
        order.sort_unstable_by_key(|&member| (self.offsets[member as usize], member));
        order
    }
}

/// An order and its offsets.
#[derive(Clone, Debug, Default)]
struct Pass {
    order: Vec<Position>,
    packed: Packed,
}

/// Importance of a block, by its length and its life.
type Key = fn(u64, &Range<Position>) -> (u64, u64);

/// How blocks are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// Into valleys, the largest key first.
    Valleys,
    /// The largest key first.
    Key,
}

/// The orders tried, one after the other, until a layout is good. Valleys by area alone bring recorded
/// training steps to within a thousandth of the bound.
const ORDERS: [(By, Key); 6] = [
    (By::Valleys, by_area),
    (By::Valleys, by_life),
    (By::Key, by_size),
    (By::Key, by_area),
    (By::Key, by_end),
    (By::Key, by_life),
];

fn by_area(len: u64, life: &Range<Position>) -> (u64, u64) {
    (len.saturating_mul(u64::from(life.end - life.start)), len)
}

fn by_size(len: u64, life: &Range<Position>) -> (u64, u64) {
    (len, u64::from(life.end - life.start))
}

fn by_life(len: u64, life: &Range<Position>) -> (u64, u64) {
    (u64::from(life.end - life.start), len)
}

fn by_end(_: u64, life: &Range<Position>) -> (u64, u64) {
    (u64::from(life.end), u64::from(life.start))
}

struct Packer<'a> {
    recording: &'a CaptureRecording,
    progress: &'a mut Progress,
}

impl Packer<'_> {
    /// Tries everything, until a layout is good.
    fn run(&mut self) -> Result<(), Spent> {
        while !self.is_good() {
            let stage = std::mem::replace(&mut self.progress.stage, Stage::End);
            self.progress.stage = match stage {
                Stage::Begin => self.begin(),
                Stage::Streams => match self.fill() {
                    Ok(bands) => match self.place_in_bands(bands)? {
                        order if self.can_pack_together() => Stage::Together(order),
                        _ => {
                            self.progress.is_spent = true;
                            Stage::End
                        }
                    },
                    Err(spent) => {
                        self.progress.stage = Stage::Streams;
                        return Err(spent);
                    }
                },
                Stage::Together(order) => {
                    let blocks = self.recording.lives.len() as Position;
                    let all = self.members((0..blocks).collect());
                    if let Some(order) = order {
                        self.try_order(&all, order)?;
                    }
                    Stage::Order(all, 0)
                }
                Stage::Order(all, index) => match ORDERS.get(index) {
                    Some(&(By::Valleys, _)) if !self.can_fill() => Stage::Order(all, index + 1),
                    Some(&(By::Valleys, key)) => {
                        if self.progress.filling.is_none() {
                            self.begin_filling(vec![all.clone()], key);
                        }
                        match self.fill() {
                            Ok(bands) => {
                                if self.can_place(&all) {
                                    for Band { packed, .. } in bands {
                                        self.try_order(&all, packed.upwards())?;
                                    }
                                }
                            }
                            Err(spent) => {
                                self.progress.stage = Stage::Order(all, index);
                                return Err(spent);
                            }
                        }
                        Stage::Order(all, index + 1)
                    }
                    Some(&(By::Key, key)) => {
                        if self.can_place(&all) {
                            let order = self.by_key(&all, key);
                            self.try_order(&all, order)?;
                        }
                        Stage::Order(all, index + 1)
                    }
                    None => Stage::Lift(all),
                },
                Stage::Lift(all) => {
                    if let Some(mut pass) = self.progress.foremost.take() {
                        self.lift_all(&all, &mut pass)?;
                        self.lift_one_by_one(&all, &mut pass)?;
                    }
                    Stage::End
                }
                Stage::End => return Ok(()),
            }
        }
        Ok(())
    }

    /// Finds the bound, and what to begin with.
    fn begin(&mut self) -> Stage {
        let streams = self.streams();
        let chains = self.recording.chains().max(streams.len()) as u64;
        let blocks = self.recording.lives.len() as u64;
        if blocks.saturating_mul(chains.saturating_pow(3)) <= BOUND_MOST {
            self.progress.bound = self.recording.conflict_bound().count();
        }
        if streams.len() == 1 {
            return Stage::Together(None);
        }
        let bands = streams.into_iter().map(|stream| self.members(stream)).collect();
        self.begin_filling(bands, by_area);
        Stage::Streams
    }

    fn is_good(&self) -> bool {
        let Progress { best, bound, .. } = &*self.progress;
        best.end <= bound + bound / 1000 * GOOD_PER_MILLE
    }

    /// Places all blocks in an order, if that is affordable, and keeps the order if it is the best.
    fn try_order(&mut self, all: &Members, order: Vec<Position>) -> Result<(), Spent> {
        if self.is_good() || !self.can_place(all) {
            return Ok(());
        }
        let Some(packed) = self.place(all, &order, u64::MAX)? else { return Ok(()) };
        self.keep(&packed);
        let foremost = &mut self.progress.foremost;
        if foremost.as_ref().is_none_or(|least| packed.end < least.packed.end) {
            *foremost = Some(Pass { order, packed });
        }
        Ok(())
    }

    /// Keeps offsets of all blocks if they are the best.
    fn keep(&mut self, packed: &Packed) {
        if packed.end < self.progress.best.end {
            self.progress.best = packed.clone();
        }
    }

    /// The blocks by the stream that allocates them.
    fn streams(&self) -> Vec<Vec<Position>> {
        let mut streams: BTreeMap<u32, Vec<Position>> = BTreeMap::new();
        for (block, life) in (0..).zip(&self.recording.lives) {
            // Before anything was captured, a block belongs to the first stream as well as to any.
            streams.entry(life.from.head().unwrap_or(0)).or_default().push(block);
        }
        streams.into_values().collect()
    }

    /// O(m log m) for m blocks, and O(m) for each chain that uses one of them. Not interrupted: the
    /// visits are counted, and what follows may find them spent.
    fn members(&mut self, blocks: Vec<Position>) -> Members {
        let mut visits = 0;
        let open = self.recording.free_from_among(&blocks, &mut visits);
        self.count(visits);
        Members { blocks, open, floor: 0 }
    }

    /// Packs each band again, each block as low as it may be above the band before: streams are
    /// shorter than the whole, so that this is affordable for more of them. Returns the order of all
    /// blocks.
    fn place_in_bands(&mut self, mut bands: Vec<Band>) -> Result<Option<Vec<Position>>, Spent> {
        if self.is_good() || !bands.iter().all(|band| self.can_place(&band.members)) {
            return Ok(None);
        }
        let (mut floor, mut all) = (0, Vec::new());
        for Band { members, packed } in &mut bands {
            members.floor = floor;
            let order = packed.upwards();
            *packed = self.place(members, &order, u64::MAX)?.expect("there is no limit");
            floor = self.top(members, packed);
            all.extend(order.into_iter().map(|member| members.blocks[member as usize]));
        }
        self.keep_bands(&bands);
        Ok(Some(all))
    }

    /// Keeps the offsets of all bands if they are the best.
    fn keep_bands(&mut self, bands: &[Band]) {
        let end = self.recording.obstacle_end();
        let mut all = Packed { offsets: vec![0; self.recording.lives.len()], end };
        for Band { members, packed } in bands {
            for (&block, &offset) in members.blocks.iter().zip(&packed.offsets) {
                all.offsets[block as usize] = offset;
            }
            all.end = all.end.max(packed.end);
        }
        self.keep(&all);
    }

    /// The highest end of a member.
    fn top(&self, members: &Members, packed: &Packed) -> u64 {
        let ends = (0..members.blocks.len() as Position).map(|at| self.end(members, packed, at));
        ends.max().unwrap_or(0).max(members.floor)
    }

    /// All members, those with the largest key first.
    fn by_key(&self, members: &Members, key: Key) -> Vec<Position> {
        let count = members.blocks.len() as Position;
        let mut order: Vec<Position> = (0..count).collect();
        order.sort_by_cached_key(|&member| {
            Reverse(key(self.len(members, member), &members.life(member)))
        });
        order
    }

    /// The longest gaps from the floor on that no live memory is in, the last one without end.
    fn gaps(&self, floor: u64) -> Vec<Range<u64>> {
        let mut fixed: Vec<Range<u64>> =
            self.recording.obstacles.iter().map(|fixed| fixed.range.clone()).collect();
        fixed.sort_unstable_by_key(|range| range.start);
        let (mut at, mut gaps) = (floor, Vec::new());
        for range in fixed {
            if at < range.start {
                gaps.push(at..range.start);
            }
            at = at.max(range.end);
        }
        gaps.push(at..u64::MAX);
        gaps.sort_by_key(|gap| Reverse(gap.end - gap.start));
        gaps.truncate(GAPS_MOST + 1);
        gaps.sort_unstable_by_key(|gap| gap.start);
        gaps
    }

    /// Begins to fill valleys with the members of each band, above those of the band before: streams
    /// that do not wait for each other share no memory, and leave no holes that way.
    fn begin_filling(&mut self, bands: Vec<Members>, key: Key) {
        self.count(self.recording.lives.len() as u64);
        let band = |members| Band { members, packed: Packed::default() };
        let bands = bands.into_iter().map(band).collect();
        let begun = self.progress.visits;
        self.progress.filling = Some(Filling { bands, key, begun, at: 0, rest: None, floor: 0 });
    }

    /// Fills the valleys of all bands, and keeps the offsets if they are the best. If it is stopped it
    /// can be called again.
    fn fill(&mut self) -> Result<Vec<Band>, Spent> {
        let mut filling = self.progress.filling.take().expect("filling was begun");
        while let Some(band) = filling.bands.get_mut(filling.at) {
            let rest = filling.rest.get_or_insert_with(|| {
                band.members.floor = filling.floor;
                self.all_of(band, filling.key)
            });
            if let Err(spent) = self.fill_band(band, rest) {
                self.progress.filling = Some(filling);
                return Err(spent);
            }
            filling.floor = self.top(&band.members, &band.packed);
            (filling.at, filling.rest) = (filling.at + 1, None);
        }
        self.progress.fill_cost = self.progress.visits - filling.begun;
        self.keep_bands(&filling.bands);
        Ok(filling.bands)
    }

    /// All of a band is left to fill.
    fn all_of(&self, band: &mut Band, key: Key) -> Rest {
        let Band { members, packed } = band;
        let count = members.blocks.len();
        let candidate = |member| {
            let (len, life) = (self.len(members, member), members.life(member));
            Candidate { end: life.end, len, key: key(len, &life).0 }
        };
        let candidates: Vec<Candidate> = (0..count as Position).map(candidate).collect();
        *packed = Packed { offsets: vec![0; count], end: self.recording.obstacle_end() };
        let mut gaps = self.gaps(members.floor);
        gaps.reverse();
        let skyline = Skyline::new(count as Position);
        Rest { candidates: Candidates::new(&candidates), gaps, skyline }
    }

    /// Fills the valleys of one gap, then those of the next.
    fn fill_band(&mut self, band: &mut Band, rest: &mut Rest) -> Result<(), Spent> {
        let Band { members, packed } = band;
        let Rest { candidates, gaps, skyline } = rest;
        while !candidates.is_empty()
            && let Some(gap) = gaps.last()
        {
            let Some(valley) = skyline.valley() else { break };
            let room = (gap.end - gap.start).saturating_sub(valley.height);
            let fit = Fit { during: valley.during.clone(), room };
            let mut nodes = 0;
            let best = candidates.best(&fit, &mut nodes);
            self.spend(VISITS_PER_VALLEY + VISITS_PER_NODE * nodes)?;
            if let Some(member) = best {
                let (offset, len) = (gap.start + valley.height, self.len(members, member));
                packed.offsets[member as usize] = offset;
                packed.end = packed.end.max(offset + len);
                candidates.remove(member);
                skyline.put(&valley, members.life(member), len);
            } else if !skyline.fill() {
                gaps.pop();
                *skyline = Skyline::new(members.blocks.len() as Position);
            }
        }
        Ok(())
    }

    /// Moves the blocks above the goal to the front of the order, all at once.
    fn lift_all(&mut self, all: &Members, pass: &mut Pass) -> Result<(), Spent> {
        const ROUNDS: u32 = 64;
        let mut other = pass.clone();
        for _ in 0..ROUNDS {
            if self.is_good() {
                break;
            }
            let goal = other.packed.end - other.packed.end.saturating_sub(self.progress.bound) / 2;
            let is_high = |&member: &Position| self.end(all, &other.packed, member) > goal;
            let (mut first, rest): (Vec<Position>, Vec<Position>) =
                other.order.iter().partition(|&member| is_high(member));
            self.shuffle(&mut first);
            first.extend(rest);
            other.order = first;
            let Some(packed) = self.place(all, &other.order, u64::MAX)? else { break };
            self.keep(&packed);
            other.packed = packed;
            if other.packed.end < pass.packed.end {
                *pass = other.clone();
            }
        }
        Ok(())
    }

    /// Moves single blocks above the bound to an earlier place in the order, and keeps moves that are
    /// no worse: most leave the top as it is, and a later one lowers it.
    fn lift_one_by_one(&mut self, all: &Members, pass: &mut Pass) -> Result<(), Spent> {
        const ROUNDS: u32 = 512;
        for _ in 0..ROUNDS {
            if self.is_good() {
                break;
            }
            let sticks_out =
                |&at: &usize| self.end(all, &pass.packed, pass.order[at]) > self.progress.bound;
            let high: Vec<usize> = (1..pass.order.len()).filter(sticks_out).collect();
            if high.is_empty() {
                break;
            }
            let from = high[self.below(high.len())];
            let to = self.below(from);
            pass.order[to..=from].rotate_right(1);
            match self.place(all, &pass.order, pass.packed.end)? {
                Some(packed) => {
                    self.keep(&packed);
                    pass.packed = packed;
                }
                None => pass.order[to..=from].rotate_left(1),
            }
        }
        Ok(())
    }

    fn len(&self, members: &Members, member: Position) -> u64 {
        self.recording.lives[members.blocks[member as usize] as usize].len
    }

    fn end(&self, members: &Members, packed: &Packed, member: Position) -> u64 {
        packed.offsets[member as usize] + self.len(members, member)
    }

    /// True if the visits suffice to place the members in an order: each looks at half of the others.
    fn can_place(&mut self, members: &Members) -> bool {
        let others = members.blocks.len() + self.recording.obstacles.len();
        let visits = (members.blocks.len() as u64).saturating_mul(others as u64) / 4;
        self.can_visit(visits)
    }

    /// True if valleys are being filled, or the visits suffice to fill them as often as the last time.
    fn can_fill(&mut self) -> bool {
        self.progress.filling.is_some() || self.can_visit(self.progress.fill_cost)
    }

    fn can_visit(&mut self, visits: u64) -> bool {
        let can = visits <= self.progress.visits_left;
        self.progress.is_spent |= !can;
        can
    }

    /// True if the visits suffice to find which blocks of all streams are ordered, and to place some.
    fn can_pack_together(&self) -> bool {
        let (blocks, chains) = (self.recording.lives.len() as u64, self.recording.chains() as u64);
        blocks.saturating_mul(chains) <= self.progress.visits_left / 2
    }

    /// Places members in this order, each as low as it may be above the floor. `None` if a block ends
    /// above the limit.
    fn place(
        &mut self,
        members: &Members,
        order: &[Position],
        limit: u64,
    ) -> Result<Option<Packed>, Spent> {
        let mut placed = self.obstacles();
        let end = self.recording.obstacle_end();
        let mut packed = Packed { offsets: vec![0; order.len()], end };
        for &member in order {
            let offset = self.first_fit(members, &placed, member)?;
            let end = offset + self.len(members, member);
            if end > limit {
                return Ok(None);
            }
            let at = placed.partition_point(|placed| placed.offset < offset);
            self.spend((placed.len() - at) as u64 / MOVED_PER_VISIT)?;
            let who = Who::Block(members.blocks[member as usize]);
            let open = member..members.open[member as usize];
            placed.insert(at, Placed { offset, end, who, open });
            packed.offsets[member as usize] = offset;
            packed.end = packed.end.max(end);
        }
        Ok(Some(packed))
    }

    /// The memory that was live before the capture, lowest first.
    fn obstacles(&self) -> Vec<Placed> {
        let fixed = self.recording.obstacles.iter().enumerate();
        let mut placed: Vec<Placed> = fixed
            .map(|(index, fixed)| {
                let (offset, end) = (fixed.range.start, fixed.range.end);
                Placed { offset, end, who: Who::Obstacle(index), open: 0..Position::MAX }
            })
            .collect();
        placed.sort_unstable_by_key(|placed| placed.offset);
        placed
    }

    /// The lowest offset above the floor where no conflicting block lies.
    fn first_fit(
        &mut self,
        members: &Members,
        placed: &[Placed],
        member: Position,
    ) -> Result<u64, Spent> {
        let len = self.len(members, member);
        let block = members.blocks[member as usize];
        let open = member..members.open[member as usize];
        let (mut at, mut visits) = (members.floor, 1);
        for other in placed {
            if other.offset >= at + len {
                break;
            }
            visits += 1;
            let may_meet = other.open.start < open.end && open.start < other.open.end;
            if other.end > at && may_meet {
                visits += VISITS_PER_CONFLICT;
                if self.conflict(other.who, block) {
                    at = other.end;
                }
            }
        }
        self.spend(visits)?;
        Ok(at)
    }

    /// True if both may be in use at once.
    fn conflict(&self, other: Who, block: Position) -> bool {
        match other {
            Who::Obstacle(fixed) => {
                self.recording.is_blocked(&self.recording.obstacles[fixed], block as usize)
            }
            Who::Block(other) => {
                let (earlier, later) = (other.min(block), other.max(block));
                self.recording.conflict(earlier as usize, later as usize)
            }
        }
    }

    fn spend(&mut self, visits: u64) -> Result<(), Spent> {
        self.progress.visits_left = self.progress.visits_left.checked_sub(visits).ok_or(Spent)?;
        self.progress.visits += visits;
        Ok(())
    }

    /// Counts visits of what is not interrupted.
    fn count(&mut self, visits: u64) {
        self.progress.visits_left = self.progress.visits_left.saturating_sub(visits);
        self.progress.visits += visits;
    }

    /// Shuffles blocks, in the same way each time.
    fn shuffle(&mut self, blocks: &mut [Position]) {
        for at in (1..blocks.len()).rev() {
            let other = self.below(at + 1);
            blocks.swap(at, other);
        }
    }

    /// A number below `end`, the same one each time.
    fn below(&mut self, end: usize) -> usize {
        // Xorshift: any numbers do, as long as they are the same each time.
        let random = &mut self.progress.random;
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        (*random % end as u64) as usize
    }
}
