//! The steps in flight on the two streams of one direction.
//!
//! Steps alternate between the streams. Each stream completes its steps in order, so a step is a
//! stream and a position, and a completed step implies all earlier ones of its stream.

use std::collections::VecDeque;

use vramp_core::Bytes;

/// Identifies a queued step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::movers) struct StepId {
    /// Index of the stream.
    pub stream: usize,
    /// Number of the step on its stream, from 1.
    position: u64,
}

/// Steps behind which one event was recorded.
#[derive(Debug)]
struct Pending<E> {
    event: E,
    bytes: Bytes,
    /// Order over both streams.
    number: u64,
}

#[derive(Debug)]
struct StreamSteps<E> {
    completed: u64,
    pending: VecDeque<Pending<E>>,
}

/// Steps in flight, each with an event of type `E` behind it. At most a given number of bytes is in
/// flight, but one step always may be.
#[derive(Debug)]
pub(in crate::movers) struct StepWindow<E> {
    streams: [StreamSteps<E>; 2],
    in_flight: Bytes,
    most: Bytes,
    steps: u64,
}

impl<E> StepWindow<E> {
    pub fn new(most: Bytes) -> StepWindow<E> {
        let streams = [(); 2].map(|()| StreamSteps { completed: 0, pending: VecDeque::new() });
        StepWindow { streams, in_flight: Bytes::ZERO, most, steps: 0 }
    }

    /// Returns true if a step of `bytes` may be queued.
    pub fn admits(&self, bytes: Bytes) -> bool {
        self.in_flight.is_zero() || self.in_flight + bytes <= self.most
    }

    /// Returns the stream of the next step.
    pub fn next_stream(&self) -> usize {
        (self.steps % 2) as usize
    }

    /// Records a step that was queued on `stream`, with the event behind it.
    pub fn push(&mut self, stream: usize, bytes: Bytes, event: E) -> StepId {
        self.in_flight += bytes;
        self.steps += 1;
        let number = self.steps;
        self.streams[stream].pending.push_back(Pending { event, bytes, number });
        self.last(stream)
    }

    /// Returns the event behind a step, or `None` if the step is complete.
    pub fn event(&self, StepId { stream, position }: StepId) -> Option<&E> {
        let steps = &self.streams[stream];
        let index = position.checked_sub(steps.completed + 1)?;
        steps.pending.get(index as usize).map(|pending| &pending.event)
    }

    /// Returns the first incomplete step of a stream.
    pub fn first(&self, stream: usize) -> Option<(StepId, &E)> {
        let steps = &self.streams[stream];
        let first = steps.pending.front()?;
        Some((StepId { stream, position: steps.completed + 1 }, &first.event))
    }

    /// Returns the last step queued on a stream.
    pub fn last(&self, stream: usize) -> StepId {
        let steps = &self.streams[stream];
        StepId { stream, position: steps.completed + steps.pending.len() as u64 }
    }

    /// Returns the incomplete step that was queued first on either stream.
    pub fn oldest(&self) -> Option<StepId> {
        let first = |stream: usize| {
            let number = self.streams[stream].pending.front()?.number;
            Some((number, self.first(stream)?.0))
        };
        let oldest = [0, 1].into_iter().filter_map(first).min_by_key(|(number, _)| *number);
        oldest.map(|(_, step)| step)
    }

    /// Records that a step and all earlier ones of its stream are complete. Adds their events to
    /// `spare`.
    pub fn complete(&mut self, StepId { stream, position }: StepId, spare: &mut Vec<E>) {
        let steps = &mut self.streams[stream];
        while steps.completed < position
            && let Some(pending) = steps.pending.pop_front()
        {
            steps.completed += 1;
            self.in_flight -= pending.bytes;
            spare.push(pending.event);
        }
    }

    /// Returns the bytes in flight.
    pub fn in_flight(&self) -> Bytes {
        self.in_flight
    }

    /// Removes all events.
    pub fn drain(&mut self) -> impl Iterator<Item = E> {
        self.streams.iter_mut().flat_map(|steps| steps.pending.drain(..).map(|one| one.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: fn(u64) -> Bytes = Bytes::mib;

    /// Queues steps of the given MiB, with their numbers as events.
    fn window(steps: &[u64]) -> (StepWindow<usize>, Vec<StepId>) {
        let mut window = StepWindow::new(MIB(16));
        let ids = steps.iter().enumerate().map(|(event, mib)| {
            let stream = window.next_stream();
            window.push(stream, MIB(*mib), event)
        });
        let ids = ids.collect();
        (window, ids)
    }

    #[test]
    fn a_step_is_admitted_while_it_fits_or_is_alone() {
        for (in_flight, step, admitted) in [
            (&[][..], 4, true),
            (&[], 64, true),
            (&[4], 12, true),
            (&[4], 13, false),
            (&[4, 4, 4], 4, true),
            (&[4, 4, 4, 4], 1, false),
        ] {
            assert_eq!(window(in_flight).0.admits(MIB(step)), admitted, "{step} to {in_flight:?}");
        }
    }

    #[test]
    fn steps_alternate_between_the_streams() {
        let streams = window(&[1; 5]).1.into_iter().map(|step| step.stream);
        assert_eq!(streams.collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
    }

    #[test]
    fn a_completed_step_implies_the_earlier_ones_of_its_stream_only() {
        let (mut window, steps) = window(&[1, 2, 3, 4, 5]);
        let mut spare = Vec::new();
        window.complete(steps[2], &mut spare);
        assert_eq!(spare, [0, 2]);
        assert_eq!(window.in_flight(), MIB(2 + 4 + 5));
        let events = steps.iter().map(|step| window.event(*step).copied());
        assert_eq!(events.collect::<Vec<_>>(), [None, Some(1), None, Some(3), Some(4)]);
        assert_eq!(window.oldest(), Some(steps[1]));
        assert_eq!(window.first(0), Some((steps[4], &4)));
        window.complete(steps[0], &mut spare);
        assert_eq!(spare, [0, 2], "it was complete before");
        assert_eq!(window.last(1), steps[3]);
        assert_eq!(window.drain().collect::<Vec<_>>(), [4, 1, 3]);
    }
}
