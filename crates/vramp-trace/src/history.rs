//! The last events of a running allocator, for a snapshot when one is wanted.
//!
//! 1. The allocator records each event as it happens, under its own lock and with its own clock.
//! 2. A call stack is interned first and then costs four bytes per event.
//! 3. Once the ring is full, each event takes the place of the oldest.
//! 4. [`History::to_trace`] gives the events as a trace: write that as a snapshot.
//!
//! Deliberately absent: clocks, locks, and taking stacks. What the allocator holds at the end is for
//! the allocator to say, in [`Trace::segments`].

use indexmap::IndexSet;
use vramp_core::{Bytes, DeviceAddr};

use crate::{Event, EventKind, Frame, StackId, Stacks, StreamIndex, Trace};

/// How much a [`History`] may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistorySize {
    /// Events, of 40 bytes each. With none, events are only counted.
    pub events: u32,
    /// Different call stacks: they are kept even if no event in the ring points to them any more.
    pub stacks: u32,
}

impl Default for HistorySize {
    /// 100,000 events (4 MB) and 65,536 stacks.
    fn default() -> HistorySize {
        HistorySize { events: 100_000, stacks: 65_536 }
    }
}

/// One thing that happened, with the stream as the driver numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What happened. An unknown action has no name here and becomes
    /// [`EventKind::UserDefined`].
    pub kind: EventKind,
    /// The device's ordinal.
    pub device: u16,
    /// The raw stream (`cudaStream_t` as an integer).
    pub stream: u64,
    /// The address it is about; for [`EventKind::Oom`] as [`Event::address`] says.
    pub address: DeviceAddr,
    /// How many bytes were asked for.
    pub size: Bytes,
    /// When, in microseconds since 1970.
    pub time_us: u64,
    /// Who asked: an id of this history's [`History::intern`].
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
    /// Where the next event goes once the ring is full: the oldest event.
    oldest: usize,
    overwritten: u64,
    stacks: Stacks,
    stacks_refused: u64,
    streams: IndexSet<u64>,
    devices: u32,
}

impl History {
    /// An empty history. Takes no memory until something is recorded.
    pub fn new(size: HistorySize) -> History {
        History {
            size,
            ring: Vec::new(),
            oldest: 0,
            overwritten: 0,
            stacks: Stacks::default(),
            stacks_refused: 0,
            streams: IndexSet::new(),
            devices: 0,
        }
    }

    /// Records an event. O(1); takes heap memory only while the ring is not full, and for a stream
    /// it has not seen before. An id that no stack of this history has is dropped.
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

    /// The id of a call stack, innermost frame first. `None` if the stack is new and there are as
    /// many as [`HistorySize::stacks`] already: the event is then recorded without.
    ///
    /// O(frames); takes heap memory only for a stack it has not seen before.
    pub fn intern<'a>(&mut self, frames: impl IntoIterator<Item = Frame<'a>>) -> Option<StackId> {
        let id = self.stacks.add_up_to(self.size.stacks as usize, frames);
        self.stacks_refused += u64::from(id.is_none());
        id
    }

    /// The events in the ring, oldest first.
    pub fn snapshot_events(&self) -> impl Iterator<Item = Event> {
        let (newest, oldest) = self.ring.split_at(self.oldest);
        oldest.iter().chain(newest).copied()
    }

    /// How many events are in the ring.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// True if nothing was recorded yet, or everything was cleared.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// How many events were recorded and are no longer there.
    pub fn overwritten(&self) -> u64 {
        self.overwritten
    }

    /// How often [`History::intern`] had no room for a stack.
    pub fn stacks_refused(&self) -> u64 {
        self.stacks_refused
    }

    /// Forgets all events and the counts. Stacks keep their ids, and the ring its memory.
    pub fn clear(&mut self) {
        self.ring.clear();
        self.oldest = 0;
        self.overwritten = 0;
        self.stacks_refused = 0;
    }

    /// The events as a trace without segments and settings, one device after the other.
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
