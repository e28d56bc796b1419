//! Which pages of an arena are committed, parked or absent.
//!
//! | a page is | its memory | becomes |
//! |---|---|---|
//! | absent | the pool's, if it has any | moving, by a commit or ahead of need |
//! | moving | being backed by one thread | committed; parked, also if that failed; absent |
//! | committed | the caller's | parked |
//! | parked | mapped and unused | committed, for no driver call; absent, once lent |
//!
//! Pages that were parked at once are a *lot*: they wait for the same work, and are lent together. Lots are in
//! the order in which they were parked; pages that were backed ahead of need come before all others. Pages
//! that leave a lot are taken off its list once they are half of it, so a page is looked at twice on average.
//!
//! Growth: 16 bytes for each page and a lot for each park of which a page is left. Committing or parking
//! n pages is O(n log lots). Nothing here grows with the operations made.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use smallvec::SmallVec;
use vramp_core::{Mark, StreamId};

use super::geometry::Geometry;

/// Work that parked pages wait for: at most one mark for each stream.
pub(crate) type Marks = SmallVec<[Mark; 1]>;

/// Order of lots. Those of pages made ahead are negative.
type LotId = i64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Absent,
    Moving,
    /// For work on a stream, which the commit ordered behind older work on the page.
    Committed {
        by: StreamId,
    },
    /// `whole` unless backing it failed in some tensors.
    Parked {
        lot: LotId,
        whole: bool,
    },
}

/// What a page is, for those who look at an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// No memory, or memory that the pool may use.
    Absent,
    /// A thread is backing it.
    Moving,
    /// In use by the caller.
    Committed,
    /// Mapped, and lent to other requests when they are short.
    Parked,
}

#[derive(Debug, Default)]
struct Lot {
    marks: Marks,
    /// Some of them may have left.
    pages: Vec<u32>,
    left: u32,
}

/// Numbers of pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub committed: u32,
    pub parked: u32,
    pub moving: u32,
}

/// Why pages cannot be committed or parked. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Beyond {
        page: u32,
    },
    Twice {
        page: u32,
    },
    Committed {
        page: u32,
    },
    NotCommitted {
        page: u32,
    },
    /// Another thread is backing a page: wait until it has.
    Moving,
    /// So many pages more than the limit allows, with all that is parked given up.
    Limit {
        over: u32,
    },
}

/// A commit that was begun, and has to be finished or undone.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    /// Pages taken from each lot; they are committed now.
    taken: Vec<(LotId, Marks, Vec<u32>)>,
    /// To be backed: moving until the commit ends.
    pub absent: Vec<Range<u32>>,
    /// Work that the commit's stream has to be ordered behind.
    pub marks: Marks,
    /// Parked pages that have to be lent first, because of the limit.
    pub over: u32,
    /// Pages that were absent or made ahead of need: what the next commits may want, too.
    pub new: u32,
}

#[derive(Debug)]
pub(crate) struct Pages {
    geometry: Geometry,
    states: Vec<Page>,
    lots: BTreeMap<LotId, Lot>,
    next_lot: LotId,
    next_ahead: LotId,
    counts: Counts,
    /// Pages that all tensors together may have.
    limit: u32,
    /// Where the last absent pages were committed: the next ones are likely needed.
    cursor: u32,
    /// No page before this one is absent.
    absent_from: u32,
}

impl Pages {
    pub fn new(geometry: Geometry) -> Pages {
        Pages {
            geometry,
            states: vec![Page::Absent; geometry.pages as usize],
            lots: BTreeMap::new(),
            next_lot: 0,
            next_ahead: -1,
            counts: Counts::default(),
            limit: u32::MAX,
            cursor: 0,
            absent_from: 0,
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn limit(&self) -> u32 {
        self.limit
    }

    pub fn set_limit(&mut self, pages: u32) {
        self.limit = pages;
    }

    pub fn state(&self, page: u32) -> Option<PageState> {
        self.states.get(page as usize).map(|page| match page {
            Page::Absent => PageState::Absent,
            Page::Moving => PageState::Moving,
            Page::Committed { .. } => PageState::Committed,
            Page::Parked { .. } => PageState::Parked,
        })
    }

    /// Pages with memory of the arena.
    fn held(&self) -> u32 {
        self.counts.committed + self.counts.parked + self.counts.moving
    }

    /// Checks that ranges lie within the arena and have no page twice.
    fn check(&self, ranges: &[Range<u32>]) -> Result<(), Refused> {
        let given = || ranges.iter().filter(|range| !range.is_empty());
        if let Some(range) = given().find(|range| range.end > self.geometry.pages) {
            return Err(Refused::Beyond { page: range.start.max(self.geometry.pages) });
        }
        if given().is_sorted_by(|range, next| range.end <= next.start) {
            return Ok(());
        }
        let mut sorted: Vec<&Range<u32>> = given().collect();
        sorted.sort_unstable_by_key(|range| range.start);
        match sorted.windows(2).find(|pair| pair[1].start < pair[0].end) {
            Some(pair) => Err(Refused::Twice { page: pair[1].start }),
            None => Ok(()),
        }
    }

    /// Begins to commit pages for a stream. Parked ones are committed at once.
    pub fn begin_commit(&mut self, ranges: &[Range<u32>], by: StreamId) -> Result<Begun, Refused> {
        self.check(ranges)?;
        let mut absent = 0;
        for page in ranges.iter().cloned().flatten() {
            match self.states[page as usize] {
                Page::Absent => absent += 1,
                Page::Moving => return Err(Refused::Moving),
                Page::Committed { .. } => return Err(Refused::Committed { page }),
                Page::Parked { .. } => {}
            }
        }
        let wanted: u32 = ranges.iter().map(|range| range.len() as u32).sum();
        let over = (self.held() + absent).saturating_sub(self.limit);
        // Parked pages beside those that are asked for may make room.
        let spare = self.counts.parked - (wanted - absent);
        if over > spare && absent > 0 {
            return Err(Refused::Limit { over: over - spare });
        }
        let mut begun = Begun { over: if absent > 0 { over } else { 0 }, ..Begun::default() };
        for page in ranges.iter().cloned().flatten() {
            match self.states[page as usize] {
                Page::Parked { lot, whole } => {
                    begun.new += u32::from(lot < 0);
                    self.take_from_lot(lot, page, &mut begun);
                    self.counts.parked -= 1;
                    if whole {
                        self.states[page as usize] = Page::Committed { by };
                        self.counts.committed += 1;
                        continue;
                    }
                }
                _ => {
                    begun.new += 1;
                    self.cursor = page + 1;
                }
            }
            self.states[page as usize] = Page::Moving;
            self.counts.moving += 1;
            push(&mut begun.absent, page);
        }
        Ok(begun)
    }

    fn take_from_lot(&mut self, id: LotId, page: u32, begun: &mut Begun) {
        let lot = self.lots.get_mut(&id).expect("a parked page is in a lot");
        match begun.taken.last_mut() {
            Some((last, _, pages)) if *last == id => pages.push(page),
            _ => {
                for &mark in &lot.marks {
                    add_mark(&mut begun.marks, mark);
                }
                begun.taken.push((id, lot.marks.clone(), vec![page]));
            }
        }
        lot.left -= 1;
        if lot.left == 0 {
            self.lots.remove(&id);
        } else if lot.pages.len() > 16 && lot.left < lot.pages.len() as u32 / 2 {
            let states = &self.states;
            let is_here = |&other: &u32| {
                other != page
                    && matches!(states[other as usize], Page::Parked { lot, .. } if lot == id)
            };
            lot.pages.retain(is_here);
        }
    }

    /// Ends a commit whose absent pages are backed.
    pub fn finish_commit(&mut self, begun: Begun, by: StreamId) {
        for page in begun.absent.into_iter().flatten() {
            assert_eq!(self.states[page as usize], Page::Moving, "page {page} is being backed");
            self.states[page as usize] = Page::Committed { by };
            self.counts.moving -= 1;
            self.counts.committed += 1;
        }
    }

    /// Undoes a commit: what was parked is parked again, as the youngest. Memory that was mapped for it may be
    /// in use by the work of `marks`; `None` if none was mapped.
    pub fn undo_commit(&mut self, begun: Begun, marks: Option<Marks>) {
        let mut in_part: Vec<(Marks, Vec<u32>)> = Vec::new();
        for (_, marks, pages) in begun.taken {
            let whole = |page: &u32| self.is_committed(*page);
            let (pages, moving): (Vec<u32>, Vec<u32>) = pages.into_iter().partition(whole);
            self.counts.committed -= pages.len() as u32;
            let id = self.next_lot;
            self.next_lot += 1;
            self.add_lot(id, pages, marks.clone(), true);
            in_part.push((marks, moving));
        }
        let mapped = marks.is_some();
        self.end_moving(begun.absent, marks, false);
        // What had memory in some tensors before has it still.
        for (marks, pages) in in_part.into_iter().filter(|_| !mapped) {
            let id = self.next_lot;
            self.next_lot += 1;
            self.add_lot(id, pages, marks, false);
        }
    }

    /// Ends the move of pages: parked behind `marks`, or absent without them. Those made `ahead` of need are
    /// whole, and the first to be lent.
    fn end_moving(&mut self, ranges: Vec<Range<u32>>, marks: Option<Marks>, ahead: bool) {
        let pages: Vec<u32> = ranges.into_iter().flatten().collect();
        for &page in &pages {
            assert_eq!(self.states[page as usize], Page::Moving, "page {page} is being backed");
            self.note_absent(page);
        }
        self.counts.moving -= pages.len() as u32;
        if let Some(marks) = marks {
            let next = if ahead { &mut self.next_ahead } else { &mut self.next_lot };
            let id = *next;
            *next += if ahead { -1 } else { 1 };
            self.add_lot(id, pages, marks, ahead);
        }
    }

    fn note_absent(&mut self, page: u32) {
        self.states[page as usize] = Page::Absent;
        self.absent_from = self.absent_from.min(page);
    }

    fn add_lot(&mut self, id: LotId, pages: Vec<u32>, marks: Marks, whole: bool) {
        let Ok(left) = u32::try_from(pages.len()) else { unreachable!("pages are counted in u32") };
        if left == 0 {
            return;
        }
        for &page in &pages {
            self.states[page as usize] = Page::Parked { lot: id, whole };
        }
        self.counts.parked += left;
        self.lots.insert(id, Lot { marks, pages, left });
    }

    /// Parks committed pages behind the work of `marks`, and behind what streams have to do `now` for which they
    /// were committed: only there are they ordered behind older work.
    pub fn park(
        &mut self,
        ranges: &[Range<u32>],
        mut marks: Marks,
        now: impl Fn(StreamId) -> Mark,
    ) -> Result<(), Refused> {
        self.check(ranges)?;
        let mut last = None;
        for page in ranges.iter().cloned().flatten() {
            match self.states[page as usize] {
                Page::Committed { by } if last == Some(by) => {}
                Page::Committed { by } => {
                    add_mark(&mut marks, now(by));
                    last = Some(by);
                }
                Page::Moving => return Err(Refused::Moving),
                _ => return Err(Refused::NotCommitted { page }),
            }
        }
        let pages: Vec<u32> = ranges.iter().cloned().flatten().collect();
        self.counts.committed -= pages.len() as u32;
        let id = self.next_lot;
        self.next_lot += 1;
        self.add_lot(id, pages, marks, true);
        Ok(())
    }

    /// Chooses pages for a commit of `count`: parked ones, the youngest first and those last that were lent in
    /// part, then absent ones by number.
    /// Fewer if there are no more. Sorted, neighbours together.
    pub fn choose(&mut self, count: u32) -> Vec<Range<u32>> {
        let mut chosen: Vec<u32> = Vec::new();
        let wanted = count as usize;
        let young = || self.lots.iter().rev();
        for (whole, (&id, lot)) in
            young().map(|lot| (true, lot)).chain(young().map(|lot| (false, lot)))
        {
            if chosen.len() == wanted {
                break;
            }
            let parked = Page::Parked { lot: id, whole };
            let here = lot.pages.iter().rev().filter(|&&page| self.states[page as usize] == parked);
            chosen.extend(here.take(wanted - chosen.len()));
        }
        if chosen.len() < wanted {
            let is_absent = |&page: &u32| self.states[page as usize] == Page::Absent;
            let pages = self.geometry.pages;
            let first = (self.absent_from..pages).find(is_absent).unwrap_or(pages);
            self.absent_from = first;
            chosen.extend((first..pages).filter(is_absent).take(wanted - chosen.len()));
        }
        chosen.sort_unstable();
        let mut ranges = Vec::new();
        for page in chosen {
            push(&mut ranges, page);
        }
        ranges
    }

    fn is_committed(&self, page: u32) -> bool {
        matches!(self.states[page as usize], Page::Committed { .. })
    }

    /// Committed pages in the order in which it is best to park them: those of blocks with the fewest come
    /// first, because a handle is lent once none of its pages is committed. O(pages).
    pub fn park_first(&self, count: u32) -> Vec<Range<u32>> {
        let committed = |block: u32| {
            let pages = self.geometry.pages_of(block);
            pages.filter(|&page| self.is_committed(page))
        };
        let mut blocks: Vec<(usize, u32)> = (0..self.geometry.blocks())
            .map(|block| (committed(block).count(), block))
            .filter(|&(pages, _)| pages > 0)
            .collect();
        blocks.sort_unstable();
        let mut ranges = Vec::new();
        for page in blocks.into_iter().flat_map(|(_, block)| committed(block)).take(count as usize)
        {
            push(&mut ranges, page);
        }
        ranges
    }

    /// The work that parked pages wait for.
    pub fn marks(&self) -> Marks {
        let mut marks = Marks::new();
        for &mark in self.lots.values().flat_map(|lot| &lot.marks) {
            add_mark(&mut marks, mark);
        }
        marks
    }

    /// The blocks that have parked pages, and maybe some that had.
    pub fn parked_blocks(&self) -> BTreeSet<u32> {
        let pages = self.lots.values().flat_map(|lot| &lot.pages);
        pages.map(|page| page / self.geometry.per_block).collect()
    }

    /// The pages that are `together` with some that are parked and whose work is over, the oldest lot first. One
    /// group may come more than once.
    pub fn lendable_groups(
        &self,
        is_over: impl Fn(Mark) -> bool,
        together: impl Fn(u32) -> Range<u32>,
    ) -> Vec<Range<u32>> {
        let over = self.lots.iter().filter(|(_, lot)| lot.marks.iter().all(|&mark| is_over(mark)));
        let mut groups: Vec<Range<u32>> = Vec::new();
        for (&id, lot) in over {
            for &page in &lot.pages {
                let here =
                    matches!(self.states[page as usize], Page::Parked { lot, .. } if lot == id);
                if here && groups.last().is_none_or(|last| !last.contains(&page)) {
                    groups.push(together(page));
                }
            }
        }
        groups
    }

    /// True for a parked page whose work is over.
    pub fn is_lendable(&self, page: u32, is_over: impl Fn(Mark) -> bool) -> bool {
        match self.states[page as usize] {
            Page::Parked { lot, .. } => self.lots[&lot].marks.iter().all(|&mark| is_over(mark)),
            _ => false,
        }
    }

    /// Notes that parked pages were lent: in all tensors (`whole`), or in some.
    pub fn lent(&mut self, page: u32, whole: bool) {
        let Page::Parked { lot, .. } = self.states[page as usize] else {
            panic!("page {page} was lent and is {:?}", self.states[page as usize]);
        };
        if !whole {
            self.states[page as usize] = Page::Parked { lot, whole: false };
            return;
        }
        self.take_from_lot(lot, page, &mut Begun::default());
        self.note_absent(page);
        self.counts.parked -= 1;
    }

    /// Chooses up to `count` absent pages to back ahead of need, behind those that were committed last, and
    /// no more than the limit allows. They are moving until [`end_ahead`](Pages::end_ahead).
    pub fn begin_ahead(&mut self, count: u32) -> Vec<Range<u32>> {
        let count = count.min(self.limit.saturating_sub(self.held())) as usize;
        let pages = self.geometry.pages;
        let order = (self.cursor.min(pages)..pages).chain(0..self.cursor.min(pages));
        let absent = order.filter(|&page| self.states[page as usize] == Page::Absent);
        let chosen: Vec<u32> = absent.take(count).collect();
        let mut ranges = Vec::new();
        for page in chosen {
            self.states[page as usize] = Page::Moving;
            self.counts.moving += 1;
            push(&mut ranges, page);
        }
        ranges
    }

    /// Ends that: the pages are ready behind `marks`, or have memory in part.
    pub fn end_ahead(&mut self, ranges: Vec<Range<u32>>, marks: Marks, whole: bool) {
        self.end_moving(ranges, Some(marks), whole);
    }

    /// Checks that counts, lots and states agree.
    pub fn audit(&self) -> Result<(), String> {
        let mut counts = Counts::default();
        let mut by_lot: BTreeMap<LotId, u32> = BTreeMap::new();
        for (page, state) in self.states.iter().enumerate() {
            match *state {
                Page::Absent => {}
                Page::Moving => counts.moving += 1,
                Page::Committed { .. } => counts.committed += 1,
                Page::Parked { lot, .. } => {
                    counts.parked += 1;
                    *by_lot.entry(lot).or_default() += 1;
                    let listed =
                        self.lots.get(&lot).is_some_and(|l| l.pages.contains(&(page as u32)));
                    if !listed {
                        return Err(format!("page {page} is not on the list of its lot {lot}"));
                    }
                }
            }
        }
        if counts != self.counts {
            return Err(format!("{:?} is counted, {counts:?} is there", self.counts));
        }
        let lots: BTreeMap<LotId, u32> =
            self.lots.iter().map(|(&id, lot)| (id, lot.left)).collect();
        (lots == by_lot).then_some(()).ok_or(format!("lots {lots:?}, pages in them {by_lot:?}"))
    }

    /// States of all pages.
    pub fn states(&self) -> impl Iterator<Item = PageState> {
        (0..self.geometry.pages).filter_map(|page| self.state(page))
    }

    /// True for a parked page that may lack memory in some tensors.
    pub fn is_in_part(&self, page: u32) -> bool {
        matches!(self.states[page as usize], Page::Parked { whole: false, .. })
    }
}

/// Adds a page to ranges, joined with the last where it follows.
fn push(ranges: &mut Vec<Range<u32>>, page: u32) {
    match ranges.last_mut() {
        Some(last) if last.end == page => last.end += 1,
        _ => ranges.push(page..page + 1),
    }
}

/// Adds a mark: the latest of each stream is kept.
fn add_mark(marks: &mut Marks, mark: Mark) {
    match marks.iter_mut().find(|other| other.stream == mark.stream) {
        Some(other) => other.epoch = other.epoch.max(mark.epoch),
        None => marks.push(mark),
    }
}
