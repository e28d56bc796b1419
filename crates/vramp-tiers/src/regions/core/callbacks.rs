//! Which callbacks are called before memory leaves, and after it is back.
//!
//! 1. A callback covers the regions with some tags, or all regions. It is *in* at first.
//! 2. Before memory of a tag leaves, each callback that covers the tag and is in is called, and then *out*.
//! 3. A callback that is out is called once none of its tags is *away*: leaving, or asleep. Then it is in again.
//! 4. A call that fails leaves it as it was: in, or out, and then it is called again after the next resume.
//!
//! Growth: O(log callbacks) for each step, and O(callbacks of a tag) where the tag goes away or comes back.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    In,
    /// A thread calls it before memory leaves.
    GoingOut,
    Out,
    /// A thread calls it after memory is back.
    GoingIn,
}

#[derive(Debug)]
struct Entry {
    /// `None` covers all tags.
    tags: Option<BTreeSet<String>>,
    is_collective: bool,
    state: State,
    /// Number of its tags that are away.
    away: usize,
}

/// Whether the memory of a tag is away, or about to leave.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// Pauses in progress.
    leaving: usize,
    is_asleep: bool,
}

/// What a thread does about a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::regions) enum Step {
    /// Call it, and then note the result with [`CallbackTable::called`].
    Call,
    /// Another thread calls it: wait, and ask again.
    Wait,
    Nothing,
}

/// The callbacks of a set of regions, by number, in the order of registration.
#[derive(Debug, Default)]
pub(in crate::regions) struct CallbackTable {
    entries: BTreeMap<u64, Entry>,
    /// Those that cover all tags.
    of_all: BTreeSet<u64>,
    by_tag: BTreeMap<String, BTreeSet<u64>>,
    /// Tags that are away.
    places: BTreeMap<String, Place>,
}

impl CallbackTable {
    /// Adds a callback, above all numbers before.
    pub fn add(&mut self, number: u64, tags: Option<BTreeSet<String>>, is_collective: bool) {
        let mut away = 0;
        match &tags {
            None => drop(self.of_all.insert(number)),
            Some(tags) => {
                for tag in tags {
                    self.by_tag.entry(tag.clone()).or_default().insert(number);
                    away += usize::from(self.places.contains_key(tag));
                }
            }
        }
        self.entries.insert(number, Entry { tags, is_collective, state: State::In, away });
    }

    /// Removes a callback. Returns false if there is none with that number.
    pub fn remove(&mut self, number: u64) -> bool {
        let Some(entry) = self.entries.remove(&number) else { return false };
        self.of_all.remove(&number);
        for tag in entry.tags.into_iter().flatten() {
            if let Some(numbers) = self.by_tag.get_mut(&tag) {
                numbers.remove(&number);
                if numbers.is_empty() {
                    self.by_tag.remove(&tag);
                }
            }
        }
        true
    }

    /// Returns true while a thread calls it.
    pub fn is_busy(&self, number: u64) -> bool {
        let state = self.entries.get(&number).map(|entry| entry.state);
        matches!(state, Some(State::GoingOut | State::GoingIn))
    }

    /// Returns the callbacks that cover some of these tags, in order.
    pub fn covering<'a>(&self, tags: impl Iterator<Item = &'a str>) -> Vec<u64> {
        let mut tags = tags.peekable();
        if tags.peek().is_none() || self.entries.is_empty() {
            return Vec::new();
        }
        let mut numbers: Vec<u64> = self.of_all.iter().copied().collect();
        numbers.extend(tags.filter_map(|tag| self.by_tag.get(tag)).flatten());
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Returns true if a pause has to call one of these first that calls other processes, or has to wait for one.
    pub fn is_in_the_way(&self, numbers: &[u64]) -> bool {
        let mut entries = numbers.iter().filter_map(|number| self.entries.get(number));
        entries.any(|entry| match entry.state {
            State::In => entry.is_collective,
            State::Out => false,
            State::GoingOut | State::GoingIn => true,
        })
    }

    /// Notes that a pause of the tag begins.
    pub fn leave(&mut self, tag: &str) {
        self.change(tag, |place| place.leaving += 1);
    }

    /// Notes that a pause of the tag has ended, and whether the region sleeps now.
    pub fn left(&mut self, tag: &str, is_asleep: bool) {
        self.change(tag, |place| {
            place.leaving = place.leaving.saturating_sub(1);
            place.is_asleep = is_asleep;
        });
    }

    /// Notes whether the region sleeps, outside of a pause.
    pub fn note(&mut self, tag: &str, is_asleep: bool) {
        self.change(tag, |place| place.is_asleep = is_asleep);
    }

    fn change(&mut self, tag: &str, change: impl FnOnce(&mut Place)) {
        let before = self.places.get(tag).copied();
        let mut place = before.unwrap_or_default();
        change(&mut place);
        let is_away = place.leaving > 0 || place.is_asleep;
        match is_away {
            true => drop(self.places.insert(tag.to_owned(), place)),
            false => drop(self.places.remove(tag)),
        }
        if before.is_some() == is_away {
            return;
        }
        for number in self.by_tag.get(tag).into_iter().flatten() {
            if let Some(entry) = self.entries.get_mut(number) {
                entry.away = if is_away { entry.away + 1 } else { entry.away - 1 };
            }
        }
    }

    /// Begins a call before memory leaves.
    pub fn take_out(&mut self, number: u64) -> Step {
        match self.entries.get_mut(&number) {
            Some(entry) if entry.state == State::In => {
                entry.state = State::GoingOut;
                Step::Call
            }
            Some(entry) if entry.state != State::Out => Step::Wait,
            _ => Step::Nothing,
        }
    }

    /// Begins a call after memory is back, unless other memory that the callback covers is away.
    pub fn take_in(&mut self, number: u64) -> Step {
        let any_away = !self.places.is_empty();
        let Some(entry) = self.entries.get_mut(&number) else { return Step::Nothing };
        let is_away = if entry.tags.is_none() { any_away } else { entry.away > 0 };
        match entry.state {
            State::Out if !is_away => {
                entry.state = State::GoingIn;
                Step::Call
            }
            State::GoingIn => Step::Wait,
            State::In | State::GoingOut | State::Out => Step::Nothing,
        }
    }

    /// Notes the end of a call. Does nothing about a callback that was removed meanwhile.
    pub fn called(&mut self, number: u64, has_worked: bool) {
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.state = match (entry.state, has_worked) {
                (State::GoingOut, true) | (State::GoingIn, false) => State::Out,
                _ => State::In,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(names: &[&str]) -> Option<BTreeSet<String>> {
        Some(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn a_callback_goes_out_with_the_first_of_its_tags_and_in_with_the_last() {
        let mut table = CallbackTable::default();
        table.add(1, tags(&["a", "b"]), false);
        table.leave("a");
        assert_eq!(table.take_out(1), Step::Call);
        assert_eq!((table.take_out(1), table.take_in(1)), (Step::Wait, Step::Nothing));
        table.called(1, true);
        table.left("a", true);
        table.leave("b");
        assert_eq!(table.take_out(1), Step::Nothing);
        table.left("b", true);
        table.note("a", false);
        assert_eq!(table.take_in(1), Step::Nothing);
        table.note("b", false);
        assert_eq!(table.take_in(1), Step::Call);
        assert_eq!((table.take_out(1), table.take_in(1)), (Step::Wait, Step::Wait));
        table.called(1, false);
        assert_eq!(table.take_in(1), Step::Call, "it failed, and is called again");
        table.called(1, true);
        assert_eq!(table.take_in(1), Step::Nothing);
        assert!(table.places.is_empty());
    }

    #[test]
    fn one_that_is_added_while_memory_is_away_is_called_before_more_leaves() {
        let mut table = CallbackTable::default();
        table.leave("a");
        table.left("a", true);
        table.add(7, tags(&["a", "b"]), true);
        table.add(8, None, false);
        assert_eq!([table.take_in(7), table.take_in(8)], [Step::Nothing; 2]);
        table.leave("b");
        assert_eq!(table.covering(["b", "a"].into_iter()), [7, 8]);
        assert!(table.is_in_the_way(&[7]) && !table.is_in_the_way(&[8]));
        assert_eq!([table.take_out(7), table.take_out(8)], [Step::Call; 2]);
        assert!(table.is_busy(7) && table.is_in_the_way(&[8]));
        table.called(7, true);
        table.called(8, true);
        assert!(!table.is_in_the_way(&[7, 8]));
        table.left("b", false);
        assert_eq!([table.take_in(7), table.take_in(8)], [Step::Nothing; 2]);
        table.note("a", false);
        assert_eq!([table.take_in(8), table.take_in(7)], [Step::Call; 2]);
    }

    #[test]
    fn a_removed_callback_leaves_nothing() {
        let mut table = CallbackTable::default();
        table.add(1, tags(&["a"]), false);
        table.add(2, None, false);
        table.leave("a");
        assert_eq!(table.take_out(1), Step::Call);
        assert!(table.remove(1) && table.remove(2) && !table.remove(1));
        table.called(1, true);
        table.left("a", false);
        assert_eq!(table.take_in(1), Step::Nothing);
        let CallbackTable { entries, of_all, by_tag, places } = table;
        assert!(entries.is_empty() && of_all.is_empty() && by_tag.is_empty() && places.is_empty());
    }

    #[test]
    fn what_covers_all_of_many_tags_is_out_until_the_last_is_back() {
        for count in [10, 1_000, 100_000_u64] {
            let names: Vec<String> = (0..count).map(|number| format!("tag {number}")).collect();
            let mut table = CallbackTable::default();
            table.add(count, None, false);
            table.add(count + 1, Some(names.iter().cloned().collect()), false);
            for (number, name) in (count + 2..).zip(&names) {
                table.add(number, tags(&[name.as_str()]), false);
            }
            let all = table.covering(names.iter().map(String::as_str));
            assert_eq!(all.len() as u64, count + 2);
            names.iter().for_each(|name| table.leave(name));
            for &number in &all {
                assert_eq!(table.take_out(number), Step::Call);
                table.called(number, true);
            }
            let both = [count, count + 1];
            for (own, name) in (count + 2..).zip(&names) {
                // Looked at once for each tag: whatever number of others there is.
                assert_eq!(both.map(|number| table.take_in(number)), [Step::Nothing; 2]);
                assert_eq!(table.covering([name.as_str()].into_iter()), [both[0], both[1], own]);
                table.left(name, false);
                assert_eq!(table.take_in(own), Step::Call);
            }
            assert_eq!(both.map(|number| table.take_in(number)), [Step::Call; 2]);
        }
    }

    /// What the table decides, in the plainest way.
    #[derive(Default)]
    struct Naive {
        callbacks: Vec<(u64, Option<BTreeSet<String>>, State)>,
        leaving: BTreeMap<String, usize>,
        asleep: BTreeSet<String>,
    }

    impl Naive {
        fn is_away(&self, tag: &str) -> bool {
            self.asleep.contains(tag) || self.leaving.get(tag).is_some_and(|&count| count > 0)
        }

        fn all_home(&self, tags: &Option<BTreeSet<String>>) -> bool {
            match tags {
                Some(tags) => tags.iter().all(|tag| !self.is_away(tag)),
                None => self.asleep.is_empty() && self.leaving.values().all(|&count| count == 0),
            }
        }

        fn step(&mut self, number: u64, is_out: bool) -> Step {
            let Some(at) = self.callbacks.iter().position(|callback| callback.0 == number) else {
                return Step::Nothing;
            };
            let is_home = self.all_home(&self.callbacks[at].1);
            let state = &mut self.callbacks[at].2;
            match (*state, is_out) {
                (State::In, true) => *state = State::GoingOut,
                (State::Out, false) if is_home => *state = State::GoingIn,
                (State::GoingOut | State::GoingIn, true) | (State::GoingIn, false) => {
                    return Step::Wait;
                }
                _ => return Step::Nothing,
            }
            Step::Call
        }
    }

    #[test]
    fn random_programs_are_decided_as_in_the_plainest_way() {
        let mut calls = [0_u64; 2];
        for seed in 0..vramp_testing::cases(200) {
            let mut random = fastrand::Rng::with_seed(seed.into());
            let (mut table, mut naive, mut next) = (CallbackTable::default(), Naive::default(), 0);
            for _ in 0..400 {
                let tag = ["a", "b", "c", "d"][random.usize(..4)];
                let number = random.u64(..next + 1);
                match random.u32(..8) {
                    0 if next < 12 => {
                        let all: BTreeSet<String> = (0..random.usize(..4))
                            .map(|_| ["a", "b", "c", "d"][random.usize(..4)].to_owned())
                            .collect();
                        let tags = (!all.is_empty()).then_some(all);
                        table.add(next, tags.clone(), false);
                        naive.callbacks.push((next, tags, State::In));
                        next += 1;
                    }
                    1 if random.u32(..8) == 0 => {
                        let before = naive.callbacks.len();
                        naive.callbacks.retain(|callback| callback.0 != number);
                        assert_eq!(table.remove(number), naive.callbacks.len() < before);
                    }
                    2 if random.u32(..3) == 0 => {
                        table.leave(tag);
                        *naive.leaving.entry(tag.to_owned()).or_default() += 1;
                    }
                    3 => {
                        let is_asleep = random.u32(..4) == 0;
                        match naive.leaving.get_mut(tag).filter(|count| **count > 0) {
                            Some(count) => {
                                *count -= 1;
                                table.left(tag, is_asleep);
                            }
                            None => table.note(tag, is_asleep),
                        }
                        match is_asleep {
                            true => drop(naive.asleep.insert(tag.to_owned())),
                            false => drop(naive.asleep.remove(tag)),
                        }
                    }
                    4 => {
                        let step = table.take_out(number);
                        assert_eq!(step, naive.step(number, true));
                        calls[0] += u64::from(step == Step::Call);
                    }
                    5 => {
                        let step = table.take_in(number);
                        assert_eq!(step, naive.step(number, false));
                        calls[1] += u64::from(step == Step::Call);
                    }
                    6 => {
                        let callback = naive.callbacks.iter_mut().find(|each| each.0 == number);
                        let is_busy = table.is_busy(number);
                        if let Some((.., state)) = callback.filter(|_| is_busy) {
                            let has_worked = random.u32(..3) > 0;
                            table.called(number, has_worked);
                            *state = match (*state, has_worked) {
                                (State::GoingOut, true) | (State::GoingIn, false) => State::Out,
                                (State::GoingOut, false) | (State::GoingIn, true) => State::In,
                                (State::In | State::Out, _) => unreachable!("it was not busy"),
                            };
                        }
                    }
                    _ => {
                        let covers = |tags: &Option<BTreeSet<String>>| {
                            tags.as_ref().is_none_or(|tags| tags.contains(tag))
                        };
                        let covering: Vec<u64> = naive
                            .callbacks
                            .iter()
                            .filter_map(|(number, tags, _)| covers(tags).then_some(*number))
                            .collect();
                        assert_eq!(table.covering([tag].into_iter()), covering);
                    }
                }
            }
        }
        assert!(calls.iter().all(|&count| count > 300), "{calls:?}");
    }
}
