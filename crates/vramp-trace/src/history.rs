//! A ring of the last events of a running allocator, for a snapshot on demand.
//!
//! 1. The allocator records each event as it happens, under its own lock and with its own clock.
//! 2. A call stack is interned first and then costs four bytes per event.
//! 3. Once the ring is full, each event overwrites the oldest.
//! 4. [`History::to_trace`] returns the events as a trace, which can be written as a snapshot.
//!
//! It grows to [`HistorySize`] and no further: events beyond it replace the oldest, and new stacks
//! beyond it are refused and counted. Each stream that was ever recorded takes a few bytes more.
//!
//! Deliberately absent: clocks, locks, and stack capture. The allocator itself fills in
//! [`Trace::segments`].

use indexmap::IndexSet;
use vramp_core::{Bytes, DeviceAddr};

use crate::{Event, EventKind, Frame, StackId, Stacks, StreamIndex, Trace};

/// Capacity of a [`History`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistorySize {
    /// Maximum number of events, of 40 bytes each. With zero, events are only counted. More than
    /// [`EVENTS_MAX`](HistorySize::EVENTS_MAX) count as that many.
    pub events: u32,
    /// Maximum number of different call stacks. They stay even if no event in the ring refers to
    /// them.
    pub stacks: u32,
    /// Maximum number of bytes of these call stacks: 16 for each frame and 64 for each function or
    /// file, beside its name. The last stack may exceed it.
    pub stack_bytes: u64,
}

impl HistorySize {
    /// Largest number of events: 400 MB.
    pub const EVENTS_MAX: u32 = 10_000_000;
}

impl Default for HistorySize {
    /// 100,000 events (4 MB) and 65,536 stacks of at most 64 MiB.
    fn default() -> HistorySize {
        HistorySize { events: 100_000, stacks: 65_536, stack_bytes: 64 << 20 }
    }
}

/// An event to record, with the raw handle of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Kind of the event. [`EventKind::Unknown`] is recorded as [`EventKind::UserDefined`].
    pub kind: EventKind,
    /// The device's ordinal.
    pub device: u16,
    /// The raw stream (`cudaStream_t` as an integer).
    pub stream: u64,
    /// First address of the block or segment; for [`EventKind::Oom`] see [`Event::address`].
    pub address: DeviceAddr,
    /// Requested bytes.
    pub size: Bytes,
    /// Time in microseconds since 1970.
    pub time_us: u64,
    /// Call stack of the request: an id from [`History::intern`] of the same history.
    pub stack: Option<StackId>,
}

/// A ring of the last events.
///
/// ```
/// use vramp_core::{Bytes, DeviceAddr};
/// use vramp_trace::{EventKind, Frame, History, HistorySize, Record};
///
/// let mut history = History::new(HistorySize { events: 1000, ..HistorySize::default() });
/// let stack = history.intern([Frame { name: "forward", filename: "model.py", line: 20 }]);
/// history.record(&Record {
///     kind: EventKind::Alloc,
///     device: 0,
///     stream: 0,
///     address: DeviceAddr::new(0x7f2e_4000_0000),
///     size: Bytes::mib(3),
///     time_us: 1_700_000_000_000_000,
///     stack,
/// });
/// let mut file = Vec::new();
/// history.to_trace().write_snapshot(&mut file)?;
/// assert_eq!(history.overwritten(), 0);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct History {
    size: HistorySize,
    /// Grows to `size.events` and stays there.
    ring: Vec<Event>,
    /// Index of the oldest event, which the next one overwrites once the ring is full.
    oldest: usize,
    overwritten: u64,
    stacks: Stacks,
    stacks_refused: u64,
    streams: IndexSet<u64>,
    devices: u32,
}

impl History {
    /// Returns an empty history. It takes no heap memory until an event is recorded.
    pub fn new(size: HistorySize) -> History {
        let events = size.events.min(HistorySize::EVENTS_MAX);
        History {
            size: HistorySize { events, ..size },
            ring: Vec::new(),
            oldest: 0,
            overwritten: 0,
            stacks: Stacks::default(),
            stacks_refused: 0,
            streams: IndexSet::new(),
            devices: 0,
        }
    }

    /// Records an event. O(1). Allocates heap memory only until the ring is full, and for a new
    /// stream. A stack id that is out of range is dropped.
    pub fn record(&mut self, record: &Record) {
        let stream = self.stream(record.stream);
        self.devices = self.devices.max(u32::from(record.device) + 1);
        let kind = match record.kind {
            EventKind::Unknown(_) => EventKind::UserDefined,
            kind => kind,
        };
        let event = Event {
            kind,
            device: record.device,
            stream,
            address: record.address,
            size: record.size,
            time_us: record.time_us,
            stack: record.stack.filter(|stack| stack.index() < self.stacks.len()),
        };
        if self.ring.len() < self.size.events as usize {
            self.ring.push(event);
            return;
        }
        self.overwritten += 1;
        if let Some(place) = self.ring.get_mut(self.oldest) {
            *place = event;
            self.oldest = (self.oldest + 1) % self.ring.len();
        }
    }

    /// Interns a call stack, innermost frame first, and returns its id. Returns `None` if the stack
    /// is new and [`HistorySize::stacks`] or [`HistorySize::stack_bytes`] is reached: record the
    /// event without a stack then.
    ///
    /// O(frames). Allocates heap memory only for a new stack.
    pub fn intern<'a>(&mut self, frames: impl IntoIterator<Item = Frame<'a>>) -> Option<StackId> {
        let full = self.stacks.bytes() >= self.size.stack_bytes;
        let max = if full { 0 } else { self.size.stacks as usize };
        let id = self.stacks.add_up_to(max, frames);
        self.stacks_refused += u64::from(id.is_none());
        id
    }

    /// Returns the events in the ring, oldest first.
    pub fn snapshot_events(&self) -> impl Iterator<Item = Event> {
        let (newest, oldest) = self.ring.split_at(self.oldest);
        oldest.iter().chain(newest).copied()
    }

    /// Returns the maximum number of events.
    pub fn capacity(&self) -> u32 {
        self.size.events
    }

    /// Returns the number of events in the ring.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// Returns true if the ring holds no event.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Returns the number of events that were overwritten.
    pub fn overwritten(&self) -> u64 {
        self.overwritten
    }

    /// Returns how often [`History::intern`] refused a stack because the limit was reached.
    pub fn stacks_refused(&self) -> u64 {
        self.stacks_refused
    }

    /// Removes all events and resets the counts. Stacks keep their ids, and the ring its memory.
    pub fn clear(&mut self) {
        self.ring.clear();
        self.oldest = 0;
        self.overwritten = 0;
        self.stacks_refused = 0;
    }

    /// Returns the events as a trace without segments and settings, grouped by device.
    ///
    /// Copies events and stacks.
    pub fn to_trace(&self) -> Trace {
        let mut events: Vec<Event> = self.snapshot_events().collect();
        events.sort_by_key(|event| event.device);
        Trace {
            device_count: self.devices,
            streams: self.streams.iter().copied().collect(),
            events,
            stacks: self.stacks.clone(),
            ..Trace::default()
        }
    }

    fn stream(&mut self, raw: u64) -> StreamIndex {
        let (index, _) = self.streams.insert_full(raw);
        StreamIndex(u32::try_from(index).expect("a process has fewer than 2^32 streams"))
    }
}
