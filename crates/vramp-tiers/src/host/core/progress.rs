//! Which work on streams is complete. Work on one stream completes in order, so one query may
//! answer for many uses.

use smallvec::SmallVec;

/// Progress of streams of type `S`, from the queries of one sweep.
#[derive(Debug)]
pub(in crate::host) struct StreamProgress<S> {
    streams: SmallVec<[Known<S>; 4]>,
}

#[derive(Debug)]
struct Known<S> {
    stream: S,
    /// All work up to this number is complete.
    complete: u64,
    /// All work from this number on is incomplete.
    incomplete: u64,
}

impl<S: Copy + PartialEq> StreamProgress<S> {
    /// Returns progress of which nothing is known.
    pub fn new() -> StreamProgress<S> {
        StreamProgress { streams: SmallVec::new() }
    }

    /// Records the result of a query.
    pub fn note(&mut self, stream: S, number: u64, is_complete: bool) {
        let at = self.streams.iter().position(|known| known.stream == stream);
        let at = at.unwrap_or_else(|| {
            self.streams.push(Known { stream, complete: 0, incomplete: u64::MAX });
            self.streams.len() - 1
        });
        let known = &mut self.streams[at];
        match is_complete {
            true => known.complete = known.complete.max(number),
            false => known.incomplete = known.incomplete.min(number),
        }
    }

    /// Returns whether work is complete. `None` if that takes a query.
    pub fn is_complete(&self, stream: S, number: u64) -> Option<bool> {
        let known = self.streams.iter().find(|known| known.stream == stream)?;
        match number {
            number if number <= known.complete => Some(true),
            number if number >= known.incomplete => Some(false),
            _ => None,
        }
    }
}

/// Returns the last use on each stream, in order of first appearance: if it is complete, so are all
/// others.
pub(in crate::host) fn last_on_each_stream<S: Copy + PartialEq, U: Copy>(
    uses: impl Iterator<Item = U>,
    key: impl Fn(&U) -> (S, u64),
) -> SmallVec<[U; 4]> {
    let mut last: SmallVec<[U; 4]> = SmallVec::new();
    for used in uses {
        let (stream, number) = key(&used);
        match last.iter_mut().find(|known| key(known).0 == stream) {
            Some(known) if key(known).1 < number => *known = used,
            Some(_) => {}
            None => last.push(used),
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_answers_for_earlier_or_for_later_work_of_its_stream() {
        let mut progress = StreamProgress::new();
        assert_eq!(progress.is_complete('a', 5), None);
        progress.note('a', 9, false);
        progress.note('a', 4, true);
        for (number, expected) in
            [(1, Some(true)), (4, Some(true)), (5, None), (8, None), (9, Some(false))]
        {
            assert_eq!(progress.is_complete('a', number), expected, "{number}");
        }
        assert_eq!(progress.is_complete('a', 100), Some(false));
        assert_eq!(progress.is_complete('b', 1), None);
    }

    #[test]
    fn the_last_use_of_each_stream_is_queried_first() {
        let uses = [('a', 3), ('b', 1), ('a', 7), ('c', 2), ('a', 5)];
        let last = last_on_each_stream(uses.into_iter(), |used| *used);
        assert_eq!(last.to_vec(), [('a', 7), ('b', 1), ('c', 2)]);
    }
}
