//! A naive twin of [`Pages`]: a list of pages, each with all that is known of it.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vramp_core::{Bytes, Epoch, Mark, StreamId};

use super::geometry::{Geometry, Layout};
use super::pages::{Begun, Marks, PageState, Pages, Refused};

const PAGES: u32 = 24;

/// The latest work of each stream.
type Work = BTreeMap<u32, u64>;

#[derive(Clone, Debug, PartialEq)]
enum Twin {
    Absent,
    Committed {
        by: u32,
    },
    /// `age`: the later parked, the higher.
    Parked {
        age: i64,
        work: Work,
        whole: bool,
    },
}

#[derive(Clone, Debug)]
enum Step {
    /// Ends well, or fails before or after something was mapped.
    Commit {
        pages: Vec<(u32, u32)>,
        by: u32,
        ends: Ends,
    },
    Take {
        count: u32,
        by: u32,
    },
    Park {
        pages: Vec<(u32, u32)>,
        stream: u32,
    },
    /// Lends what waits for no work after this, as many pages as that, and of some only a part.
    Lend {
        over: u64,
        pages: usize,
        part: bool,
    },
    Ahead {
        count: u32,
        whole: bool,
    },
    Limit {
        pages: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Well,
    Unmapped,
    Mapped,
}

fn step() -> impl Strategy<Value = Step> {
    let pages = || prop::collection::vec((0..PAGES + 2, 0..5u32), 1..4);
    let ends =
        prop_oneof![4 => Just(Ends::Well), 1 => Just(Ends::Unmapped), 1 => Just(Ends::Mapped)];
    let by = || 0..3u32;
    prop_oneof![
        4 => (pages(), by(), ends).prop_map(|(pages, by, ends)| Step::Commit { pages, by, ends }),
        1 => (1..5u32, by()).prop_map(|(count, by)| Step::Take { count, by }),
        4 => (pages(), by()).prop_map(|(pages, stream)| Step::Park { pages, stream }),
        2 => (0..80u64, 1..6usize, any::<bool>())
            .prop_map(|(over, pages, part)| Step::Lend { over, pages, part }),
        1 => (1..5u32, any::<bool>()).prop_map(|(count, whole)| Step::Ahead { count, whole }),
        1 => (4..PAGES + 4).prop_map(|pages| Step::Limit { pages }),
    ]
}

fn mark(stream: u32, epoch: u64) -> Mark {
    let epoch = (0..epoch).fold(Epoch::START, |epoch, _| epoch.next());
    Mark { stream: StreamId::new(stream), epoch }
}

fn work(marks: &[Mark]) -> Work {
    marks.iter().map(|mark| (mark.stream.index() as u32, mark.epoch.number())).collect()
}

fn join(into: &mut Work, other: &Work) {
    for (&stream, &epoch) in other {
        let known = into.entry(stream).or_default();
        *known = epoch.max(*known);
    }
}

struct Pair {
    real: Pages,
    twin: Vec<Twin>,
    limit: u32,
    /// Of the next lot, and of the next made ahead.
    age: i64,
    ahead: i64,
    now: u64,
}

impl Pair {
    fn new() -> Pair {
        let layout = Layout { tensors: 1, ..Layout::default() };
        let geometry = Geometry::new(&layout, PAGES, Bytes::mib(8));
        let (real, twin) = (Pages::new(geometry), vec![Twin::Absent; PAGES as usize]);
        Pair { real, twin, limit: u32::MAX, age: 0, ahead: -1, now: 1 }
    }

    fn has(&self, page: u32) -> &Twin {
        &self.twin[page as usize]
    }

    fn count(&self, wanted: impl Fn(&Twin) -> bool) -> u32 {
        self.twin.iter().filter(|page| wanted(page)).count() as u32
    }

    /// Returns what is wrong with the pages of a call, in the plainest words.
    fn wrong(ranges: &[std::ops::Range<u32>]) -> bool {
        let pages: Vec<u32> = ranges.iter().cloned().flatten().collect();
        let twice =
            pages.iter().any(|page| pages.iter().filter(|other| *other == page).count() > 1);
        twice || pages.iter().any(|&page| page >= PAGES)
    }

    fn step(&mut self, step: &Step) {
        self.now += 1;
        match step {
            Step::Commit { pages, by, ends } => {
                let ranges: Vec<_> = pages.iter().map(|&(first, n)| first..first + n).collect();
                self.commit(&ranges, *by, *ends);
            }
            Step::Take { count, by } => {
                // Those with all their memory first, then the youngest.
                let mut best: Vec<((bool, i64), u32)> = Vec::new();
                for page in 0..PAGES {
                    if let Twin::Parked { age, whole, .. } = self.has(page) {
                        best.push(((*whole, *age), page));
                    }
                }
                let chosen = self.real.choose(*count);
                let taken: Vec<u32> = chosen.iter().cloned().flatten().collect();
                let parked = best.iter().filter(|(_, page)| taken.contains(page));
                let least = parked.map(|&(age, _)| age).min();
                let left =
                    best.iter().filter(|(_, page)| !taken.contains(page)).map(|&(age, _)| age);
                assert!(left.max() <= least || least.is_none(), "an older one was taken");
                let absent: Vec<u32> =
                    (0..PAGES).filter(|&p| *self.has(p) == Twin::Absent).collect();
                let from_absent = (*count as usize).saturating_sub(best.len()).min(absent.len());
                assert_eq!(taken.len(), best.len().min(*count as usize) + from_absent);
                assert!(absent[..from_absent].iter().all(|page| taken.contains(page)));
                self.commit(&chosen, *by, Ends::Well);
            }
            Step::Park { pages, stream } => {
                let ranges: Vec<_> = pages.iter().map(|&(first, n)| first..first + n).collect();
                let now = self.now;
                let marks = Marks::from_iter([mark(*stream, now)]);
                let parked = self.real.park(&ranges, marks, |by| mark(by.index() as u32, now));
                let pages: Vec<u32> = ranges.iter().cloned().flatten().collect();
                let committed = |page: &u32| matches!(self.has(*page), Twin::Committed { .. });
                let allowed = !Pair::wrong(&ranges) && pages.iter().all(committed);
                assert_eq!(parked.is_ok(), allowed, "{parked:?}");
                if allowed {
                    let mut work = Work::from([(*stream, now)]);
                    for &page in &pages {
                        if let Twin::Committed { by } = *self.has(page) {
                            work.insert(by, now);
                        }
                    }
                    self.park(&pages, &work, true);
                }
            }
            &Step::Lend { over, pages, part } => {
                let is_over = |mark: Mark| mark.epoch.number() <= over;
                for page in 0..PAGES {
                    let lendable = match self.has(page) {
                        Twin::Parked { work, .. } => work.values().all(|&epoch| epoch <= over),
                        _ => false,
                    };
                    assert_eq!(self.real.is_lendable(page, is_over), lendable, "page {page}");
                    let groups = self.real.lendable_groups(is_over, |page| page..page + 1);
                    assert_eq!(groups.contains(&(page..page + 1)), lendable, "page {page}");
                }
                let groups = self.real.lendable_groups(is_over, |page| page..page + 1);
                for page in groups.into_iter().flatten().take(pages) {
                    let partly = part && page % 2 == 0;
                    self.real.lent(page, !partly);
                    match &mut self.twin[page as usize] {
                        Twin::Parked { whole, .. } if partly => *whole = false,
                        gone => *gone = Twin::Absent,
                    }
                }
            }
            &Step::Ahead { count, whole } => {
                let held = PAGES - self.count(|page| *page == Twin::Absent);
                let room = self.limit.saturating_sub(held).min(PAGES - held).min(count);
                let ranges = self.real.begin_ahead(count);
                let pages: Vec<u32> = ranges.iter().cloned().flatten().collect();
                assert_eq!(pages.len() as u32, room);
                assert!(pages.iter().all(|&page| *self.has(page) == Twin::Absent));
                let moving = self.real.begin_commit(&ranges, StreamId::new(0));
                assert!(pages.is_empty() || matches!(moving, Err(Refused::Moving)));
                self.real.end_ahead(ranges, Marks::from_iter([mark(0, self.now)]), whole);
                if !pages.is_empty() {
                    let work = Work::from([(0, self.now)]);
                    if whole {
                        for page in pages {
                            let work = work.clone();
                            self.twin[page as usize] =
                                Twin::Parked { age: self.ahead, work, whole };
                        }
                        self.ahead -= 1;
                    } else {
                        self.park(&pages, &work, false);
                    }
                }
            }
            &Step::Limit { pages } => {
                self.limit = pages;
                self.real.set_limit(pages);
            }
        }
        self.compare();
    }

    fn park(&mut self, pages: &[u32], work: &Work, whole: bool) {
        for &page in pages {
            self.twin[page as usize] = Twin::Parked { age: self.age, work: work.clone(), whole };
        }
        self.age += 1;
    }

    fn commit(&mut self, ranges: &[std::ops::Range<u32>], by: u32, ends: Ends) {
        let begun = self.real.begin_commit(ranges, StreamId::new(by));
        let pages: Vec<u32> = ranges.iter().cloned().flatten().collect();
        if Pair::wrong(ranges)
            || pages.iter().any(|&p| matches!(self.has(p), Twin::Committed { .. }))
        {
            assert!(!matches!(begun, Ok(_) | Err(Refused::Limit { .. } | Refused::Moving)));
            return;
        }
        let absent = pages.iter().filter(|&&page| *self.has(page) == Twin::Absent).count() as u32;
        let parked = |page: &Twin| matches!(page, Twin::Parked { .. });
        let committed = self.count(|page| matches!(page, Twin::Committed { .. }));
        let over = (committed + self.count(parked) + absent).saturating_sub(self.limit);
        let spare = self.count(parked) - (pages.len() as u32 - absent);
        if absent > 0 && over > spare {
            assert_eq!(begun.unwrap_err(), Refused::Limit { over: over - spare });
            return;
        }
        let begun: Begun = begun.expect("nothing forbids it");
        let mut before = Work::new();
        let mut to_back: Vec<u32> = Vec::new();
        // Those that were parked at once and come one after the other.
        let mut groups: Vec<(i64, Vec<u32>)> = Vec::new();
        for &page in &pages {
            match self.has(page) {
                Twin::Parked { age, work, whole } => {
                    join(&mut before, work);
                    to_back.extend((!whole).then_some(page));
                    match groups.last_mut() {
                        Some((last, pages)) if last == age => pages.push(page),
                        _ => groups.push((*age, vec![page])),
                    }
                }
                _ => to_back.push(page),
            }
        }
        assert_eq!(work(&begun.marks), before);
        assert_eq!(begun.absent.iter().cloned().flatten().collect::<Vec<_>>(), to_back);
        assert_eq!(begun.over, if absent > 0 { over } else { 0 });
        let mapped = ends == Ends::Mapped;
        match ends {
            Ends::Well => {
                self.real.finish_commit(begun, StreamId::new(by));
                pages.iter().for_each(|&page| self.twin[page as usize] = Twin::Committed { by });
            }
            _ => {
                let marks = mapped.then(|| Marks::from_iter([mark(by, self.now)]));
                self.real.undo_commit(begun, marks);
                // As before, and the youngest: first what has all its memory.
                for (_, pages) in &groups {
                    self.grow_young(pages, true);
                }
                if mapped {
                    self.park(&to_back, &Work::from([(by, self.now)]), false);
                } else {
                    for (_, pages) in &groups {
                        self.grow_young(pages, false);
                    }
                }
            }
        }
    }

    /// Gives pages that are parked the age of the youngest, those that have memory in all tensors or the others.
    fn grow_young(&mut self, pages: &[u32], of: bool) {
        self.age += 1;
        for &page in pages {
            match &mut self.twin[page as usize] {
                Twin::Parked { age, whole, .. } if *whole == of => *age = self.age,
                _ => {}
            }
        }
        self.age += 1;
    }

    fn compare(&self) {
        self.real.audit().unwrap();
        let mut all = Work::new();
        for page in 0..PAGES {
            let (state, is_in_part) = match self.has(page) {
                Twin::Absent => (PageState::Absent, false),
                Twin::Committed { .. } => (PageState::Committed, false),
                Twin::Parked { work, whole, .. } => {
                    join(&mut all, work);
                    (PageState::Parked, !whole)
                }
            };
            assert_eq!(self.real.state(page), Some(state), "page {page}");
            assert_eq!(self.real.is_in_part(page), is_in_part, "page {page}");
        }
        assert_eq!(work(&self.real.marks()), all);
        let counts = self.real.counts();
        let committed = self.count(|page| matches!(page, Twin::Committed { .. }));
        let parked = self.count(|page| matches!(page, Twin::Parked { .. }));
        assert_eq!((counts.committed, counts.parked, counts.moving), (committed, parked, 0));
        let first: Vec<u32> = self.real.park_first(PAGES).into_iter().flatten().collect();
        assert_eq!(first.len() as u32, committed);
    }
}

proptest! {
    #[test]
    fn pages_are_as_in_a_list_of_all_that_is_known(steps in prop::collection::vec(step(), 1..60)) {
        let mut pair = Pair::new();
        steps.iter().for_each(|step| pair.step(step));
    }
}
