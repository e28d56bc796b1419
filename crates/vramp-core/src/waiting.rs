//! Freed memory that waits for work of other streams.
//!
//! The pool lists its waiting regions here, and each heap its waiting pieces. Both lists hold the
//! same kind of entry and are used through the same few methods, so that one queue by stream and
//! epoch can replace them.

use crate::ids::Mark;

/// Something freed, and the work that must be over before its memory is reused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting<T> {
    pub item: T,
    pub marks: Vec<Mark>,
}

/// Waiting entries, oldest first.
#[derive(Clone, Debug)]
pub(crate) struct WaitList<T>(Vec<Waiting<T>>);

impl<T> Default for WaitList<T> {
    fn default() -> WaitList<T> {
        WaitList(Vec::new())
    }
}

impl<T> WaitList<T> {
    pub(crate) fn push(&mut self, item: T, marks: Vec<Mark>) {
        self.0.push(Waiting { item, marks });
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting<T>> {
        self.0.iter()
    }

    /// Every mark that an entry waits for, with repetitions.
    pub(crate) fn marks(&self) -> impl Iterator<Item = Mark> {
        self.0.iter().flat_map(|entry| entry.marks.iter().copied())
    }

    /// Removes the entries for which `release` returns true, in order. Returns true if there was
    /// one. No heap memory.
    pub(crate) fn remove_if(&mut self, mut release: impl FnMut(&Waiting<T>) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|entry| !release(entry));
        self.0.len() < before
    }
}

/// Adds a mark to a list with at most one mark for each stream: the later epoch stays.
pub(crate) fn add_mark(marks: &mut Vec<Mark>, mark: Mark) {
    match marks.iter_mut().find(|listed| listed.stream == mark.stream) {
        Some(listed) => listed.epoch = listed.epoch.max(mark.epoch),
        None => marks.push(mark),
    }
}
