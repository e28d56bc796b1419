//! Freed memory that waits for work of other streams.
//!
//! The pool has a queue of waiting regions and one of waiting pieces of its heaps. An entry waits for
//! one mark at a time: it is filed under the first of its marks that its owner is not ordered
//! behind, and is looked at again only once a change that may concern it was noted.
//!
//! Life of an entry:
//!
//! 1. [`push`](WaitQueue::push) files it under a mark.
//! 2. The shell finds that work is over, or makes a stream wait for other work. The pool notes that
//!    here, by stream.
//! 3. [`take_ready`](WaitQueue::take_ready) looks at the entries that are filed under marks which
//!    those changes reached. Each is filed under its next mark, or returned.
//!
//! Growth: `take_ready` costs O(log n) for each entry that it looks at and for each stream that
//! changed. An entry is looked at once for each of its marks. Without changes it costs nothing,
//! whether 10 or 100,000 entries wait. The marks of all entries are listed by stream, whatever
//! number of entries has them.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{Epoch, Mark, StreamId};

/// What is known of the order of streams' work.
pub(crate) trait Progress {
    /// True if the work before `mark` is known to be over.
    fn is_over(&self, mark: Mark) -> bool;
    /// True if later work on `stream` runs after the work before `mark`.
    fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool;
}

/// Something freed, and the work that must be over before its memory is reused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting<T> {
    pub item: T,
    /// Stream that gets the memory.
    pub owner: StreamId,
    pub marks: Vec<Mark>,
    /// The mark that it is filed under.
    filed: Mark,
}

/// Place of an entry in a queue: the older, the lower. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Age(u64);

/// Entries that became ready, and how many entries were looked at for them.
#[derive(Debug)]
pub(crate) struct Ready<T> {
    /// Oldest first.
    pub entries: Vec<(Age, Waiting<T>)>,
    pub looked_at: usize,
}

/// Waiting entries, by age and by what they wait for.
#[derive(Clone, Debug)]
pub(crate) struct WaitQueue<T> {
    entries: BTreeMap<Age, Waiting<T>>,
    next: u64,
    by_mark: BTreeSet<(Mark, Age)>,
    by_owner: BTreeSet<(StreamId, Mark, Age)>,
    /// Number of entries that have a mark among theirs.
    marks: BTreeMap<Mark, usize>,
    /// Streams of which more work is over than when entries were last looked at.
    reached: BTreeSet<StreamId>,
    /// Streams that wait for more work of others, and those others.
    ordered: BTreeSet<(StreamId, StreamId)>,
}

impl<T> Default for WaitQueue<T> {
    fn default() -> WaitQueue<T> {
        WaitQueue {
            entries: BTreeMap::new(),
            next: 0,
            by_mark: BTreeSet::new(),
            by_owner: BTreeSet::new(),
            marks: BTreeMap::new(),
            reached: BTreeSet::new(),
            ordered: BTreeSet::new(),
        }
    }
}

const OLDEST: Age = Age(0);

fn start_of(stream: StreamId) -> Mark {
    Mark { stream, epoch: Epoch::START }
}

impl<T> WaitQueue<T> {
    /// Adds an entry. `owner` is not ordered behind any of its marks.
    ///
    /// # Panics
    /// If there is no mark: such memory waits for nothing.
    pub(crate) fn push(&mut self, item: T, owner: StreamId, marks: Vec<Mark>) {
        let filed = *marks.first().expect("a waiting entry waits for a mark");
        let age = Age(self.next);
        self.next += 1;
        for &mark in &marks {
            *self.marks.entry(mark).or_default() += 1;
        }
        self.file(age, owner, filed);
        self.entries.insert(age, Waiting { item, owner, marks, filed });
    }

    /// Every entry, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting<T>> {
        self.entries.values()
    }

    /// The same with the places to remove them from.
    pub(crate) fn by_age(&self) -> impl Iterator<Item = (Age, &Waiting<T>)> {
        self.entries.iter().map(|(&age, entry)| (age, entry))
    }

    /// The two latest marks of each stream that entries have. Of these the latest may have no event
    /// yet; all others have one. O(log n) for each stream.
    pub(crate) fn latest_marks(&self) -> impl Iterator<Item = Mark> {
        let before = |mark: Mark| self.marks.range(..mark).next_back().map(|(&mark, _)| mark);
        let last = self.marks.last_key_value().map(|(&mark, _)| mark);
        let by_stream = std::iter::successors(last, move |last| before(start_of(last.stream)));
        by_stream.flat_map(move |last| {
            [Some(last), before(last).filter(|mark| mark.stream == last.stream)]
                .into_iter()
                .flatten()
        })
    }

    /// Notes that more work of a stream is over.
    pub(crate) fn note_reached(&mut self, stream: StreamId) {
        if !self.entries.is_empty() {
            self.reached.insert(stream);
        }
    }

    /// Notes that `stream` waits for more work of `on`.
    pub(crate) fn note_wait(&mut self, stream: StreamId, on: StreamId) {
        if !self.entries.is_empty() {
            self.ordered.insert((stream, on));
        }
    }

    /// Removes the entries whose owner is ordered behind all of their marks. No heap memory where
    /// nothing changed.
    pub(crate) fn take_ready(&mut self, progress: &impl Progress) -> Ready<T> {
        let mut entries = Vec::new();
        let candidates = self.take_candidates(progress);
        for &age in &candidates {
            let Waiting { owner, ref marks, .. } = self.entries[&age];
            match marks.iter().copied().find(|&mark| !progress.is_ordered(owner, mark)) {
                Some(next) => self.file_again(age, next),
                None => entries.push((age, self.remove(age))),
            }
        }
        Ready { entries, looked_at: candidates.len() }
    }

    /// Removes an entry.
    ///
    /// # Panics
    /// If it was removed before.
    pub(crate) fn remove(&mut self, age: Age) -> Waiting<T> {
        let entry = self.entries.remove(&age).expect("an entry is removed once");
        self.unfile(age, entry.owner, entry.filed);
        for mark in &entry.marks {
            let count = self.marks.get_mut(mark).expect("a mark of an entry is counted");
            *count -= 1;
            if *count == 0 {
                self.marks.remove(mark);
            }
        }
        if self.entries.is_empty() {
            self.reached.clear();
            self.ordered.clear();
        }
        entry
    }

    /// The entries filed under marks that changes since the last call reached, oldest first.
    fn take_candidates(&mut self, progress: &impl Progress) -> Vec<Age> {
        let mut found = Vec::new();
        while let Some(stream) = self.reached.pop_first() {
            let filed = self.by_mark.range((start_of(stream), OLDEST)..);
            let over =
                filed.take_while(|(mark, _)| mark.stream == stream && progress.is_over(*mark));
            found.extend(over.map(|&(_, age)| age));
        }
        while let Some((owner, on)) = self.ordered.pop_first() {
            let filed = self.by_owner.range((owner, start_of(on), OLDEST)..);
            let ordered = filed.take_while(|(known, mark, _)| {
                *known == owner && mark.stream == on && progress.is_ordered(owner, *mark)
            });
            found.extend(ordered.map(|&(_, _, age)| age));
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    fn file(&mut self, age: Age, owner: StreamId, mark: Mark) {
        self.by_mark.insert((mark, age));
        self.by_owner.insert((owner, mark, age));
    }

    fn unfile(&mut self, age: Age, owner: StreamId, mark: Mark) {
        self.by_mark.remove(&(mark, age));
        self.by_owner.remove(&(owner, mark, age));
    }

    fn file_again(&mut self, age: Age, mark: Mark) {
        let entry = self.entries.get_mut(&age).expect("a candidate waits");
        let (owner, before) = (entry.owner, std::mem::replace(&mut entry.filed, mark));
        self.unfile(age, owner, before);
        self.file(age, owner, mark);
    }

    /// Checks that each entry is filed once, under a mark of its own, and that no entry is ready
    /// unnoticed.
    ///
    /// # Errors
    /// The first violation.
    pub(crate) fn audit(&self, progress: &impl Progress) -> Result<(), String> {
        let mut marks: BTreeMap<Mark, usize> = BTreeMap::new();
        for (age, Waiting { owner, marks: own, filed, .. }) in self.by_age() {
            own.iter().for_each(|&mark| *marks.entry(mark).or_default() += 1);
            let by_mark = self.by_mark.contains(&(*filed, age));
            let by_owner = self.by_owner.contains(&(*owner, *filed, age));
            if !own.contains(filed) || !by_mark || !by_owner {
                return Err(format!("waiting entry {age:?} is not filed under {filed:?}"));
            }
            let noted = self.reached.contains(&filed.stream)
                || self.ordered.contains(&(*owner, filed.stream));
            if progress.is_ordered(*owner, *filed) && !noted {
                return Err(format!("waiting entry {age:?} is over {filed:?} unnoticed"));
            }
        }
        let filed = [self.by_mark.len(), self.by_owner.len()];
        if filed != [self.entries.len(); 2] || marks != self.marks {
            return Err(format!("{} entries wait, {filed:?} are filed", self.entries.len()));
        }
        Ok(())
    }
}

/// Adds a mark to a list in the order of the streams, with at most one mark for each: the later epoch
/// stays. O(log n), and a shift of those behind.
pub(crate) fn add_mark(marks: &mut Vec<Mark>, mark: Mark) {
    match marks.binary_search_by_key(&mark.stream, |listed| listed.stream) {
        Ok(place) => marks[place].epoch = marks[place].epoch.max(mark.epoch),
        Err(place) => marks.insert(place, mark),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work that is over, by stream, and what streams wait for.
    #[derive(Default)]
    struct Known {
        over: BTreeMap<StreamId, u64>,
        waits: BTreeMap<(StreamId, StreamId), u64>,
    }

    impl Progress for Known {
        fn is_over(&self, mark: Mark) -> bool {
            self.over.get(&mark.stream).is_some_and(|&epoch| mark.epoch.number() <= epoch)
        }

        fn is_ordered(&self, stream: StreamId, mark: Mark) -> bool {
            let waits = self.waits.get(&(stream, mark.stream));
            self.is_over(mark) || waits.is_some_and(|&epoch| mark.epoch.number() <= epoch)
        }
    }

    fn stream(number: u32) -> StreamId {
        StreamId::new(number)
    }

    fn mark(number: u32, epoch: u64) -> Mark {
        Mark { stream: stream(number), epoch: Epoch(epoch) }
    }

    fn items(ready: Ready<u32>) -> Vec<u32> {
        ready.entries.into_iter().map(|(_, entry)| entry.item).collect()
    }

    #[test]
    fn an_entry_is_ready_once_its_last_mark_is_over_and_the_oldest_comes_first() {
        let (mut queue, mut known) = (WaitQueue::default(), Known::default());
        queue.push(1, stream(0), vec![mark(1, 1), mark(2, 1)]);
        queue.push(2, stream(0), vec![mark(2, 1)]);
        queue.push(3, stream(0), vec![mark(2, 2)]);
        known.over.insert(stream(2), 1);
        queue.note_reached(stream(2));
        assert_eq!(items(queue.take_ready(&known)), [2]);
        known.over.extend([(stream(1), 1), (stream(2), 2)]);
        queue.note_reached(stream(2));
        queue.note_reached(stream(1));
        queue.audit(&known).expect("all changes are noted");
        assert_eq!(items(queue.take_ready(&known)), [1, 3]);
        assert_eq!(queue.latest_marks().count(), 0);
    }

    #[test]
    fn a_wait_of_the_owner_is_enough_and_one_of_another_stream_is_not() {
        let (mut queue, mut known) = (WaitQueue::default(), Known::default());
        queue.push(1, stream(0), vec![mark(1, 1), mark(2, 5)]);
        queue.push(2, stream(3), vec![mark(1, 1)]);
        known.waits.insert((stream(0), stream(1)), 1);
        queue.note_wait(stream(0), stream(1));
        assert_eq!(items(queue.take_ready(&known)), [0; 0]);
        known.waits.insert((stream(0), stream(2)), 7);
        queue.note_wait(stream(0), stream(2));
        assert_eq!(items(queue.take_ready(&known)), [1]);
        known.over.insert(stream(1), 1);
        assert!(queue.audit(&known).is_err(), "the change was not noted");
        queue.note_reached(stream(1));
        assert_eq!(items(queue.take_ready(&known)), [2]);
    }

    #[test]
    fn a_wait_that_no_longer_counts_makes_an_entry_wait_for_that_mark_again() {
        let (mut queue, mut known) = (WaitQueue::default(), Known::default());
        queue.push(1, stream(0), vec![mark(1, 1), mark(2, 1)]);
        known.waits.insert((stream(0), stream(1)), 1);
        queue.note_wait(stream(0), stream(1));
        assert_eq!(items(queue.take_ready(&known)), [0; 0]);
        // The owner ended: no later work of it waits.
        known.waits.clear();
        known.over.insert(stream(2), 1);
        queue.note_reached(stream(2));
        assert_eq!(items(queue.take_ready(&known)), [0; 0]);
        known.over.insert(stream(1), 1);
        queue.note_reached(stream(1));
        assert_eq!(items(queue.take_ready(&known)), [1]);
    }

    #[test]
    fn the_two_latest_marks_of_each_stream_are_listed() {
        let mut queue = WaitQueue::default();
        for (item, own) in [(1, mark(1, 4)), (2, mark(1, 9)), (3, mark(1, 7)), (4, mark(2, 3))] {
            queue.push(item, stream(0), vec![own, mark(3, 3)]);
        }
        let listed: BTreeSet<Mark> = queue.latest_marks().collect();
        assert_eq!(listed, BTreeSet::from([mark(1, 7), mark(1, 9), mark(2, 3), mark(3, 3)]));
    }

    #[test]
    fn as_many_entries_are_looked_at_as_become_ready_however_many_wait() {
        for waiting in [10, 1_000, 100_000] {
            let (mut queue, mut known) = (WaitQueue::default(), Known::default());
            for number in 0..waiting {
                // One entry in ten of a stream that reaches nothing.
                let on = if number % 10 == 0 { 1 } else { 2 };
                queue.push(number, stream(0), vec![mark(on, 2 + u64::from(number))]);
            }
            queue.push(waiting, stream(0), vec![mark(1, 1)]);
            assert_eq!(queue.take_ready(&known).looked_at, 0, "{waiting} wait");
            known.over.insert(stream(1), 1);
            queue.note_reached(stream(1));
            let ready = queue.take_ready(&known);
            assert_eq!((ready.looked_at, items(ready)), (1, vec![waiting]));
        }
    }

    #[test]
    fn after_a_wait_of_the_owner_only_what_it_covers_is_looked_at() {
        let (mut queue, mut known) = (WaitQueue::default(), Known::default());
        for number in 0..100 {
            // Of each four one waits for the stream that is waited for; of these one has another owner.
            let (owner, on) = (number % 8 / 4, 2 + number % 4);
            queue.push(number, stream(owner), vec![mark(on, 1 + u64::from(number))]);
        }
        known.waits.insert((stream(0), stream(2)), 17);
        queue.note_wait(stream(0), stream(2));
        let ready = queue.take_ready(&known);
        assert_eq!((ready.looked_at, items(ready)), (3, vec![0, 8, 16]));
        assert_eq!(queue.take_ready(&known).looked_at, 0, "each change is looked at once");
    }

    #[test]
    fn an_empty_queue_notes_no_change() {
        let mut queue = WaitQueue::<u32>::default();
        queue.note_reached(stream(1));
        queue.note_wait(stream(0), stream(1));
        assert!(queue.reached.is_empty() && queue.ordered.is_empty());
        queue.push(1, stream(0), vec![mark(1, 1)]);
        queue.note_reached(stream(1));
        queue.note_wait(stream(0), stream(1));
        queue.remove(OLDEST);
        assert!(queue.reached.is_empty() && queue.ordered.is_empty());
    }

    #[test]
    fn an_entry_that_is_filed_wrongly_is_found() {
        let known = Known::default();
        let (own, other) = (mark(1, 1), mark(2, 1));
        let queue = || {
            let mut queue = WaitQueue::default();
            queue.push(1, stream(0), vec![own]);
            queue.audit(&known).expect("it is whole");
            queue
        };
        let breaks: [fn(&mut WaitQueue<u32>, Mark, Mark); 9] = [
            // In one index under another mark.
            |queue, own, other| {
                queue.by_mark.remove(&(own, OLDEST));
                queue.by_mark.insert((other, OLDEST));
            },
            |queue, own, other| {
                queue.by_owner.remove(&(stream(0), own, OLDEST));
                queue.by_owner.insert((stream(0), other, OLDEST));
            },
            |queue, own, _| assert!(queue.by_mark.remove(&(own, OLDEST))),
            |queue, own, _| assert!(queue.by_owner.remove(&(stream(0), own, OLDEST))),
            |queue, _, other| assert!(queue.by_mark.insert((other, OLDEST))),
            |queue, _, other| assert!(queue.by_owner.insert((stream(0), other, OLDEST))),
            |queue, own, _| assert!(queue.marks.remove(&own).is_some()),
            |queue, _, other| assert!(queue.marks.insert(other, 1).is_none()),
            // Filed under a mark that is not its own.
            |queue, own, other| {
                queue.file_again(OLDEST, other);
                assert!(!queue.by_mark.contains(&(own, OLDEST)));
            },
        ];
        for (number, apart) in breaks.into_iter().enumerate() {
            let mut queue = queue();
            apart(&mut queue, own, other);
            assert!(queue.audit(&known).is_err(), "{number}");
        }
    }

    #[test]
    fn an_entry_that_is_ready_is_found_unless_the_change_was_noted() {
        let (mut queue, mut known) = (WaitQueue::default(), Known::default());
        queue.push(1, stream(0), vec![mark(1, 1)]);
        queue.push(2, stream(3), vec![mark(2, 1)]);
        known.waits.insert((stream(0), stream(1)), 1);
        assert!(queue.audit(&known).is_err());
        queue.note_wait(stream(3), stream(2));
        assert!(queue.audit(&known).is_err(), "another change was noted");
        queue.note_wait(stream(0), stream(1));
        queue.audit(&known).expect("the wait was noted");
        known.over.insert(stream(2), 1);
        queue.audit(&known).expect("a wait of the owner for that stream was noted");
        assert_eq!(items(queue.take_ready(&known)), [1, 2]);
    }

    #[test]
    fn of_each_stream_the_later_mark_stays_in_the_order_of_the_streams() {
        let mut marks = vec![mark(1, 5)];
        for (added, expected) in [
            (mark(1, 3), vec![mark(1, 5)]),
            (mark(2, 4), vec![mark(1, 5), mark(2, 4)]),
            (mark(1, 6), vec![mark(1, 6), mark(2, 4)]),
            (mark(0, 7), vec![mark(0, 7), mark(1, 6), mark(2, 4)]),
            (mark(2, 5), vec![mark(0, 7), mark(1, 6), mark(2, 5)]),
        ] {
            add_mark(&mut marks, added);
            assert_eq!(marks, expected);
        }
    }
}
