//! The requests of one capture: a device's, or a window of them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;

use vramp::Bytes;
use vramp_trace::{Request, Trace, Workload};

use super::pool::private_pool;
use vramp_analysis::replay::has_pending_uses;

/// Larger than the requests of any real capture.
const TOTAL_MAX: Bytes = Bytes::tib(1 << 16);

/// A range of events of a recorded device: from the first to before the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first event.
    pub from: usize,
    /// The event after the last one.
    pub to: usize,
}

/// Returned for a text that is no window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give two event numbers as A..B, the first one below the second")]
pub struct WindowError;

impl Window {
    /// All events.
    pub const ALL: Window = Window { from: 0, to: usize::MAX };

    /// Returns the events of the window on a device of `events` events.
    pub fn within(self, events: usize) -> Range<usize> {
        self.from.min(events)..self.to.min(events)
    }
}

impl FromStr for Window {
    type Err = WindowError;

    fn from_str(text: &str) -> Result<Window, WindowError> {
        let (from, to) = text.split_once("..").ok_or(WindowError)?;
        let number = |text: &str| text.parse::<usize>().map_err(|_| WindowError);
        let window = Window { from: number(from)?, to: number(to)? };
        if window.from < window.to { Ok(window) } else { Err(WindowError) }
    }
}

/// One request of a capture. Block and stream numbers are the workload's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Allocates a block, on which its stream then works.
    Alloc {
        /// Block number; each is allocated once.
        block: u32,
        /// Requested bytes.
        size: Bytes,
        /// Stream of the block.
        stream: usize,
    },
    /// Frees a block that the capture allocated.
    Free {
        /// Block number.
        block: u32,
        /// True if other streams used it; the recording does not say which.
        used_elsewhere: bool,
    },
}

/// All requests of one capture on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The trace's name.
    pub name: String,
    /// Number of the recorded device.
    pub device: u32,
    /// Events of the capture, counted from 0 among those of the device.
    pub events: Range<usize>,
    /// Streams that allocate, and one more if a stream that allocates nothing uses a block.
    pub streams: usize,
    /// The requests in order.
    pub steps: Vec<Step>,
    /// Frees of blocks that were allocated before. They are left out.
    pub older_freed: usize,
    /// Bytes that the recorded allocator reserved for these blocks; `None` if that was not
    /// recorded, or some of them were placed in memory reserved before.
    pub recorded: Option<Bytes>,
}

/// Returned for a recording that is no capture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The requests need more addresses than an arena has.
    #[error("'{name}' allocates more than {TOTAL_MAX} in one capture: select a part with --window")]
    TooMuch {
        /// The trace's name.
        name: String,
    },
}

impl Job {
    /// Collects the requests of a window of `workload`, which was made of `trace`. Blocks that were
    /// live before are left out. O(events of the device).
    ///
    /// # Errors
    /// The sum of the sizes is too large.
    pub fn new(trace: &Trace, workload: &Workload, window: Window) -> Result<Job, JobError> {
        let all = workload.event_range();
        let events = window.within(all.len());
        // Streams in the order of their first request.
        let mut streams: BTreeMap<u32, usize> = BTreeMap::new();
        let (mut steps, mut older_freed, mut unseen, mut total) = (Vec::new(), 0, false, 0u128);
        let mut first_block = None;
        for (index, request) in workload.requests.iter().enumerate() {
            let event = workload.device_event_of(index);
            if !event.is_some_and(|event| events.contains(&event)) {
                continue;
            }
            match *request {
                Request::Alloc { block, size, stream } => {
                    let next = streams.len();
                    let stream = *streams.entry(stream).or_insert(next);
                    first_block.get_or_insert(block);
                    total += u128::from(size.count());
                    steps.push(Step::Alloc { block, size, stream });
                }
                // Blocks are numbered in the order of their allocation.
                Request::Free { block } if first_block.is_some_and(|first| block >= first) => {
                    let used_elsewhere = has_pending_uses(&workload.requests, index, block);
                    unseen |= used_elsewhere;
                    steps.push(Step::Free { block, used_elsewhere });
                }
                Request::Free { .. } => older_freed += 1,
                // In a capture, uses end when the graph has run.
                Request::FreeCompleted { .. } | Request::Oom { .. } => {}
            }
        }
        if total > u128::from(TOTAL_MAX.count()) {
            return Err(JobError::TooMuch { name: workload.name.clone() });
        }
        Ok(Job {
            name: workload.name.clone(),
            device: workload.device,
            streams: streams.len() + usize::from(unseen && streams.len() == 1),
            steps,
            older_freed,
            recorded: private_pool(
                &trace.events[all.start + events.start..all.start + events.end],
                workload.device,
            ),
            events,
        })
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Alloc { .. })).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_two_ascending_numbers() {
        assert_eq!("3..10".parse(), Ok(Window { from: 3, to: 10 }));
        for wrong in
            ["", "3", "..", "3..", "..3", "3..3", "4..3", "-1..3", "a..b", "1...3", "1..=3"]
        {
            assert_eq!(wrong.parse::<Window>(), Err(WindowError), "{wrong}");
        }
    }

    #[test]
    fn a_window_is_cut_at_the_last_event() {
        assert_eq!(Window::ALL.within(7), 0..7);
        assert_eq!(Window { from: 5, to: 9 }.within(7), 5..7);
        assert!(Window { from: 8, to: 9 }.within(7).is_empty());
    }
}
