//! Peaks of parts of a program, which may nest and overlap.
//!
//! 1. [`Allocator::begin_scope`](crate::Allocator::begin_scope) begins a scope and returns its id.
//! 2. [`Allocator::scope_peaks`](crate::Allocator::scope_peaks) returns the peaks since then.
//! 3. [`Allocator::end_scope`](crate::Allocator::end_scope) returns them and forgets the scope.
//!
//! A request pays nothing for open scopes: the peak since the last of these calls is taken at the
//! next one, and enters every scope that was open meanwhile. An open scope takes 24 bytes. Each call
//! takes the allocator's lock and O(log n) steps in the number of open scopes, amortized, where the
//! scope that began last ends first.
//!
//! Deliberately absent: the peaks that [`Allocator::reset_peak_stats`](crate::Allocator::reset_peak_stats) resets, which scopes leave alone.

use vramp_core::Bytes;

/// A scope that was begun. Ids are not given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScopeId(u64);

/// Peaks of a scope.
///
/// With several threads the peak of live bytes may be off, as of [`Stats`](crate::stats::Stats). That
/// of reserved bytes is taken at the end of each request, and without the driver's own pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScopePeaks {
    /// Most requested bytes of live blocks.
    pub live: Bytes,
    /// Most physical memory.
    pub reserved: Bytes,
}

/// The maxima of one quantity since the begin of each open scope.
///
/// An older scope has seen all that a younger one has, so maxima fall from the oldest scope to the
/// youngest. Scopes with the same maximum are one group.
#[derive(Debug, Default)]
struct Maxima {
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    /// Oldest scope.
    first: u64,
    maximum: u64,
    open: u64,
}

impl Maxima {
    /// Enters a value into all open scopes.
    fn note(&mut self, value: u64) {
        let above = self.groups.partition_point(|group| group.maximum > value);
        if let Some(first) = self.groups.get(above).map(|group| group.first) {
            let open = self.groups.drain(above..).map(|group| group.open).sum();
            self.groups.push(Group { first, maximum: value, open });
        }
    }

    /// Opens a scope, younger than all others, that begins with `value`, which was noted before.
    fn open(&mut self, scope: u64, value: u64) {
        match self.groups.last_mut() {
            Some(last) if last.maximum == value => last.open += 1,
            _ => self.groups.push(Group { first: scope, maximum: value, open: 1 }),
        }
    }

    fn index(&self, scope: u64) -> Option<usize> {
        self.groups.partition_point(|group| group.first <= scope).checked_sub(1)
    }

    fn of(&self, scope: u64) -> Option<u64> {
        self.index(scope).map(|index| self.groups[index].maximum)
    }

    fn close(&mut self, scope: u64) {
        let Some(index) = self.index(scope) else { return };
        self.groups[index].open -= 1;
        if self.groups[index].open == 0 {
            self.groups.remove(index);
        }
    }
}

/// The open scopes of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Scopes {
    live: Maxima,
    reserved: Maxima,
    begun: u64,
    open: std::collections::BTreeSet<u64>,
}

impl Scopes {
    pub(crate) fn note(&mut self, peaks: ScopePeaks) {
        self.live.note(peaks.live.count());
        self.reserved.note(peaks.reserved.count());
    }

    pub(crate) fn begin(&mut self, now: ScopePeaks) -> ScopeId {
        self.begun += 1;
        self.open.insert(self.begun);
        self.live.open(self.begun, now.live.count());
        self.reserved.open(self.begun, now.reserved.count());
        ScopeId(self.begun)
    }

    pub(crate) fn peaks(&self, ScopeId(scope): ScopeId) -> Option<ScopePeaks> {
        let (live, reserved) = (self.live.of(scope)?, self.reserved.of(scope)?);
        let is_open = self.open.contains(&scope);
        is_open.then_some(ScopePeaks { live: Bytes::new(live), reserved: Bytes::new(reserved) })
    }

    pub(crate) fn end(&mut self, ScopeId(scope): ScopeId) {
        if self.open.remove(&scope) {
            self.live.close(scope);
            self.reserved.close(scope);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn maxima_are_those_of_a_list_of_all_values() {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let (mut maxima, mut naive) = (Maxima::default(), Vec::<(u64, u64)>::new());
        let mut now = 0;
        for step in 0..20_000 {
            match next(4) {
                0 => {
                    maxima.note(now);
                    naive.iter_mut().for_each(|(_, max)| *max = (*max).max(now));
                    maxima.open(step, now);
                    naive.push((step, now));
                }
                1 if !naive.is_empty() => {
                    let (scope, max) = naive.remove(next(naive.len() as u64) as usize);
                    assert_eq!(maxima.of(scope), Some(max));
                    maxima.close(scope);
                }
                _ => {
                    now = next(50);
                    maxima.note(now);
                    naive.iter_mut().for_each(|(_, max)| *max = (*max).max(now));
                }
            }
            assert!(maxima.groups.is_sorted_by(|a, b| a.maximum > b.maximum));
            assert_eq!(
                maxima.groups.iter().map(|group| group.open).sum::<u64>(),
                naive.len() as u64
            );
        }
    }
}
