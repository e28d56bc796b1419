//! What one capture asks for: a device's requests, or a window of them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;

use vramp_alloc::Bytes;
use vramp_trace::{Request, Trace, Workload};

use super::pool::private_pool;
use crate::replay::lingers;

/// Nothing that ran anywhere asked for more in one capture.
const MOST: Bytes = Bytes::tib(1 << 16);

/// A stretch of a trace, in event numbers: from the first to before the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first event.
    pub from: usize,
    /// The event behind the last one.
    pub to: usize,
}

/// A window that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give two event numbers as A..B, the first one below the second")]
pub struct WindowError;

impl Window {
    /// All events.
    pub const ALL: Window = Window { from: 0, to: usize::MAX };

    /// The window within so many events.
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

/// One request of a capture. Blocks and streams are the workload's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A block is taken, and its stream works on it.
    Alloc {
        /// Its number; each is taken once.
        block: u32,
        /// How much is asked for.
        size: Bytes,
        /// Whose it is.
        stream: usize,
    },
    /// A block that the capture took is given back.
    Free {
        /// Which.
        block: u32,
        /// Other streams used it, and nothing tells which.
        used_elsewhere: bool,
    },
}

/// Everything that one capture asks for on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The trace's name.
    pub name: String,
    /// Which of the recorded devices.
    pub device: u32,
    /// The events it was taken from.
    pub events: Range<usize>,
    /// Streams that it asks on, and one more where a stream that asks for nothing uses a block.
    pub streams: usize,
    /// The requests in order.
    pub steps: Vec<Step>,
    /// Blocks from before that it frees: they are none of its own.
    pub older_freed: usize,
    /// What the recorded allocator took from the driver for these blocks; `None` where the recording
    /// does not tell, or some of them lay in memory that it had before.
    pub recorded: Option<Bytes>,
}

/// A recording that no capture could make.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// More than there are addresses.
    #[error("'{name}' asks for more than {MOST} within one capture: give a --window of it")]
    TooMuch {
        /// The trace's name.
        name: String,
    },
}

impl Job {
    /// What `workload`, made of `trace`, asks for between two events. Blocks that were live before
    /// are left out. O(events).
    ///
    /// # Errors
    /// The sizes add up to nonsense.
    pub fn new(trace: &Trace, workload: &Workload, window: Window) -> Result<Job, JobError> {
        let events = window.within(trace.events.len());
        // Streams in the order of their first request.
        let mut streams: BTreeMap<u32, usize> = BTreeMap::new();
        let (mut steps, mut older_freed, mut unseen, mut total) = (Vec::new(), 0, false, 0u128);
        let mut first_block = None;
        for (index, request) in workload.requests.iter().enumerate() {
            let event = workload.event_of(index);
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
                // Blocks are numbered in the order in which they are taken.
                Request::Free { block } if first_block.is_some_and(|first| block >= first) => {
                    let used_elsewhere = lingers(&workload.requests, index, block);
                    unseen |= used_elsewhere;
                    steps.push(Step::Free { block, used_elsewhere });
                }
                Request::Free { .. } => older_freed += 1,
                // Uses end when the graph has run; the recorded allocator was told later.
                Request::FreeCompleted { .. } | Request::Oom { .. } => {}
            }
        }
        if total > u128::from(MOST.count()) {
            return Err(JobError::TooMuch { name: workload.name.clone() });
        }
        Ok(Job {
            name: workload.name.clone(),
            device: workload.device,
            streams: streams.len() + usize::from(unseen && streams.len() == 1),
            steps,
            older_freed,
            recorded: private_pool(&trace.events[events.clone()], workload.device),
            events,
        })
    }

    /// How many blocks it takes.
    pub fn blocks(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Alloc { .. })).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_two_numbers_in_order() {
        assert_eq!("3..10".parse(), Ok(Window { from: 3, to: 10 }));
        for wrong in
            ["", "3", "..", "3..", "..3", "3..3", "4..3", "-1..3", "a..b", "1...3", "1..=3"]
        {
            assert_eq!(wrong.parse::<Window>(), Err(WindowError), "{wrong}");
        }
    }

    #[test]
    fn a_window_ends_where_the_events_do() {
        assert_eq!(Window::ALL.within(7), 0..7);
        assert_eq!(Window { from: 5, to: 9 }.within(7), 5..7);
        assert!(Window { from: 8, to: 9 }.within(7).is_empty());
    }
}
