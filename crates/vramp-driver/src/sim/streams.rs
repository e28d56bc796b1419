//! Streams as queues in virtual time.
//!
//! Life of an item: *queued* on a stream, *started* when everything before it on that stream is
//! done, *done* when its time is over. Positions count the items ever queued on a stream, so "done
//! up to position p" is all that an event needs to remember. A wait holds its stream until another
//! one is done up to a position; a gated kernel runs until the host opens its gate.
//!
//! [`Streams`] only keeps the order and the time. What work does to memory is decided by whoever
//! steps it: [`Streams::next_due`] tells which stream moves next and when, [`Streams::step`] moves
//! it.

use std::borrow::Cow;
use std::collections::VecDeque;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::hazard::Stamp;
use super::refusal::{Outcome, Refusal};
use crate::Stream;

/// A gate that keeps a kernel running until the host opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gate(pub(super) usize);

/// A kernel as far as memory is concerned: what it touches, and for how long.
///
/// ```
/// use vramp_core::{AddrRange, Bytes, DeviceAddr};
/// use vramp_driver::sim::Kernel;
/// let x = AddrRange::new(DeviceAddr::new(1 << 40), Bytes::mib(2));
/// let kernel = Kernel::new("relu").reading(x).writing(x).lasting(5_000);
/// assert_eq!((kernel.reads.len(), kernel.writes.len()), (1, 1));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// What it is called in explanations.
    pub name: Cow<'static, str>,
    /// The ranges it reads.
    pub reads: Vec<AddrRange>,
    /// The ranges it writes. Their bytes do not change: what a kernel computes is not modelled.
    pub writes: Vec<AddrRange>,
    /// How long it runs, in nanoseconds.
    pub duration_ns: u64,
    /// If set, it also runs until this gate is open.
    pub until: Option<Gate>,
}

impl Kernel {
    /// A kernel that touches nothing and takes no time.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Kernel {
        Kernel { name: name.into(), ..Kernel::default() }
    }

    /// The same kernel that also reads `range`.
    pub fn reading(mut self, range: AddrRange) -> Kernel {
        self.reads.push(range);
        self
    }

    /// The same kernel that also writes `range`.
    pub fn writing(mut self, range: AddrRange) -> Kernel {
        self.writes.push(range);
        self
    }

    /// The same kernel that runs for `duration_ns` nanoseconds.
    pub fn lasting(mut self, duration_ns: u64) -> Kernel {
        self.duration_ns = duration_ns;
        self
    }

    /// The same kernel that does not end before `gate` is open.
    pub fn until(mut self, gate: Gate) -> Kernel {
        self.until = Some(gate);
        self
    }
}

/// What work does to bytes when it is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    Nothing,
    Fill { range: AddrRange, byte: u8 },
    Copy { from: AddrRange, to: DeviceAddr },
    ToDevice { buffer: u64, offset: Bytes, to: AddrRange },
    ToHost { from: AddrRange, buffer: u64, offset: Bytes },
}

impl Effect {
    /// The direction of the bus that it takes: 0 to the host, 1 to the card.
    pub fn direction(&self) -> Option<usize> {
        match self {
            Effect::ToHost { .. } => Some(0),
            Effect::ToDevice { .. } => Some(1),
            Effect::Nothing | Effect::Fill { .. } | Effect::Copy { .. } => None,
        }
    }

    /// The pinned host memory it touches, if any.
    pub fn host_buffer(&self) -> Option<u64> {
        match self {
            Effect::ToDevice { buffer, .. } | Effect::ToHost { buffer, .. } => Some(*buffer),
            Effect::Nothing | Effect::Fill { .. } | Effect::Copy { .. } => None,
        }
    }
}

/// One piece of work on a stream.
#[derive(Debug)]
pub(super) struct Work {
    pub kernel: Kernel,
    pub effect: Effect,
    /// Known to be wrong when it was queued: it faults when it starts.
    pub doomed: Option<(DeviceAddr, &'static str)>,
    /// Its place in the order of things, while the checker still has to look at it.
    pub unchecked: Option<Stamp>,
}

impl Work {
    /// The first range it touches that shares an address with `range`.
    pub fn touches(&self, range: AddrRange) -> Option<AddrRange> {
        let overlaps = |other: &&AddrRange| {
            let (a, b) = (range.start.number(), other.start.number());
            a < b.saturating_add(other.len.count()) && b < a.saturating_add(range.len.count())
        };
        self.kernel.writes.iter().chain(&self.kernel.reads).find(overlaps).copied()
    }
}

/// A point in a stream's work: done when the stream is done up to `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub stream: usize,
    pub position: u64,
}

#[derive(Debug)]
enum Item {
    Work(Box<Work>),
    Wait(Point),
}

#[derive(Debug)]
struct Queued {
    item: Item,
    queued_ns: u64,
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Queued>,
    /// Items ever queued.
    queued: u64,
    /// Items done.
    done: u64,
    /// When the last done item was done.
    free_ns: u64,
    /// When the first item was started, if it was.
    started_ns: Option<u64>,
    destroyed: bool,
}

/// What moved.
#[derive(Debug)]
pub(super) enum Step {
    /// The first work of the stream begins; see [`Streams::running`].
    Started,
    /// Work is over.
    Done(Box<Work>),
    /// A wait is over.
    Passed,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    queues: Vec<Queue>,
    /// When each gate was opened.
    gates: Vec<Option<u64>>,
    /// Items not done, over all streams.
    pending: usize,
    /// No stream moves before this. A lower bound, so that most host calls need not look.
    quiet_until_ns: u64,
    /// The virtual time of the last step.
    stepped_ns: u64,
}

impl Streams {
    pub fn create(&mut self) -> Stream {
        self.queues.push(Queue::default());
        Stream::from_number(self.queues.len() as u64)
    }

    /// A stream that no caller can name.
    pub fn create_unnamed(&mut self) -> usize {
        self.queues.push(Queue { destroyed: true, ..Queue::default() });
        self.queues.len() - 1
    }

    pub fn index(&self, stream: Stream) -> Outcome<usize> {
        let unknown = || Refusal::unknown("stream", stream.number());
        let index = usize::try_from(stream.number()).ok().and_then(|n| n.checked_sub(1));
        let index = index.ok_or_else(unknown)?;
        match self.queues.get(index) {
            Some(queue) if !queue.destroyed => Ok(index),
            _ => Err(unknown()),
        }
    }

    pub fn destroy(&mut self, stream: usize) {
        self.queues[stream].destroyed = true;
    }

    /// How many streams were ever created.
    pub fn made(&self) -> usize {
        self.queues.len()
    }

    pub fn living(&self) -> usize {
        self.queues.iter().filter(|queue| !queue.destroyed).count()
    }

    pub fn gate(&mut self) -> Gate {
        self.gates.push(None);
        Gate(self.gates.len() - 1)
    }

    /// False if the gate is unknown. Opening an open gate changes nothing.
    pub fn open(&mut self, gate: Gate, now_ns: u64) -> bool {
        let Some(opened) = self.gates.get_mut(gate.0) else { return false };
        opened.get_or_insert(now_ns);
        self.quiet_until_ns = 0;
        true
    }

    pub fn has_gate(&self, gate: Gate) -> bool {
        gate.0 < self.gates.len()
    }

    pub fn push(&mut self, stream: usize, work: Work, now_ns: u64) {
        self.enqueue(stream, Item::Work(Box::new(work)), now_ns);
    }

    /// Makes later work on `stream` wait for `point`.
    pub fn push_wait(&mut self, stream: usize, point: Point, now_ns: u64) {
        if point.stream != stream && !self.is_done(point) {
            self.enqueue(stream, Item::Wait(point), now_ns);
        }
    }

    fn enqueue(&mut self, stream: usize, item: Item, queued_ns: u64) {
        let queue = &mut self.queues[stream];
        queue.queued += 1;
        queue.items.push_back(Queued { item, queued_ns });
        self.pending += 1;
        if queue.items.len() == 1 {
            self.quiet_until_ns = self.quiet_until_ns.min(queued_ns);
        }
    }

    /// The point behind everything queued on `stream` so far.
    pub fn end_of(&self, stream: usize) -> Point {
        Point { stream, position: self.queues[stream].queued }
    }

    pub fn is_done(&self, point: Point) -> bool {
        self.queues[point.stream].done >= point.position
    }

    /// True if no stream moves before `now_ns` is over. Cheap; may say false without need.
    pub fn quiet_until(&self, now_ns: u64) -> bool {
        self.pending == 0 || self.quiet_until_ns > now_ns
    }

    /// When the first work of a stream began, if it has.
    pub fn started_ns(&self, stream: usize) -> Option<u64> {
        self.queues[stream].started_ns
    }

    /// Which stream moves next, and when. `None` if none ever does: all wait for closed gates, or
    /// for streams that do.
    pub fn next_due(&mut self) -> Option<(u64, usize)> {
        let mut next: Option<(u64, usize)> = None;
        for stream in 0..self.queues.len() {
            if let Some(due) = self.due_ns(stream)
                && next.is_none_or(|(soonest, _)| due < soonest)
            {
                next = Some((due, stream));
            }
        }
        self.quiet_until_ns = next.map_or(u64::MAX, |(due, _)| due);
        next
    }

    fn due_ns(&self, stream: usize) -> Option<u64> {
        let queue = &self.queues[stream];
        let first = queue.items.front()?;
        let ready_ns = queue.free_ns.max(first.queued_ns);
        match (&first.item, queue.started_ns) {
            (Item::Wait(point), _) => {
                // A wait that was held up ends when the other stream got there: at the last step.
                self.is_done(*point).then(|| ready_ns.max(self.stepped_ns))
            }
            (Item::Work(_), None) => Some(ready_ns),
            (Item::Work(work), Some(started_ns)) => {
                let over_ns = started_ns.saturating_add(work.kernel.duration_ns);
                match work.kernel.until {
                    None => Some(over_ns),
                    Some(gate) => self.gates[gate.0].map(|opened_ns| over_ns.max(opened_ns)),
                }
            }
        }
    }

    /// Moves `stream` at `due_ns`, as [`Streams::next_due`] told.
    pub fn step(&mut self, stream: usize, due_ns: u64) -> Step {
        self.stepped_ns = self.stepped_ns.max(due_ns);
        self.quiet_until_ns = 0;
        let queue = &mut self.queues[stream];
        let first = queue.items.front().expect("a stream that is due has work");
        if matches!(first.item, Item::Work(_)) && queue.started_ns.is_none() {
            queue.started_ns = Some(due_ns);
            return Step::Started;
        }
        queue.started_ns = None;
        queue.done += 1;
        queue.free_ns = due_ns;
        self.pending -= 1;
        match queue.items.pop_front().expect("a stream that is due has work").item {
            Item::Work(work) => Step::Done(work),
            Item::Wait(_) => Step::Passed,
        }
    }

    /// The work that `stream` is running.
    pub fn running(&mut self, stream: usize) -> Option<&mut Work> {
        match &mut self.queues[stream].items.front_mut()?.item {
            Item::Work(work) => Some(work),
            Item::Wait(_) => None,
        }
    }

    /// The first queued or running work that fulfils `wanted`, with its stream.
    pub fn find_pending(&self, wanted: impl Fn(&Work) -> bool) -> Option<(Stream, &Work)> {
        if self.pending == 0 {
            return None;
        }
        self.queues.iter().zip(1..).find_map(|(queue, number)| {
            queue.items.iter().find_map(|queued| match &queued.item {
                Item::Work(work) if wanted(work) => {
                    Some((Stream::from_number(number), work.as_ref()))
                }
                _ => None,
            })
        })
    }

    /// What each stream that still has work is stuck at, in words.
    pub fn describe_stuck(&self) -> String {
        let mut words = Vec::new();
        for (queue, number) in self.queues.iter().zip(1..) {
            match queue.items.front().map(|queued| &queued.item) {
                Some(Item::Work(work)) => words.push(format!(
                    "stream {number} runs `{}`, whose gate is closed",
                    work.kernel.name
                )),
                Some(Item::Wait(point)) => {
                    words.push(format!("stream {number} waits for stream {}", point.stream + 1));
                }
                None => {}
            }
        }
        words.join("; ")
    }
}
