//! Streams as queues in virtual time.
//!
//! Life of an item: *queued* on a stream, *started* when all earlier items of the stream are done,
//! *done* when its duration is over. A position counts the items ever queued on a stream, so an event
//! stores a stream and a position. A wait blocks its stream until another one is done up to a
//! position. A gated kernel runs until the host opens its gate.
//!
//! [`Streams`] keeps order and time only. [`Streams::next_due`] returns which stream advances next
//! and when, [`Streams::step`] advances it, and the caller applies the effect to memory. A stream with
//! work is in one of three places, so that a step costs O(log n) for n streams with work: in the order
//! of the times at which they advance, among those that wait for another stream, or among those that
//! wait for a gate.

use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::devices::DeviceSet;
use super::hazard::Stamp;
use super::refusal::{Outcome, Refusal};
use crate::Stream;

/// A gate that keeps a kernel running until the host opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gate(pub(super) usize);

/// A kernel, modelled as the ranges that it accesses and a duration.
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
    /// Name in messages.
    pub name: Cow<'static, str>,
    /// Ranges that it reads.
    pub reads: Vec<AddrRange>,
    /// Ranges that it writes. Their bytes do not change, because computation is not modelled.
    pub writes: Vec<AddrRange>,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
    /// Gate that must be open before it ends, if any.
    pub until: Option<Gate>,
}

impl Kernel {
    /// Returns a kernel that accesses nothing and takes no time.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Kernel {
        Kernel { name: name.into(), ..Kernel::default() }
    }

    /// Adds a range that it reads.
    pub fn reading(mut self, range: AddrRange) -> Kernel {
        self.reads.push(range);
        self
    }

    /// Adds a range that it writes.
    pub fn writing(mut self, range: AddrRange) -> Kernel {
        self.writes.push(range);
        self
    }

    /// Sets the duration in nanoseconds.
    pub fn lasting(mut self, duration_ns: u64) -> Kernel {
        self.duration_ns = duration_ns;
        self
    }

    /// Sets a gate that must be open before it ends.
    pub fn until(mut self, gate: Gate) -> Kernel {
        self.until = Some(gate);
        self
    }
}

/// Effect of work on bytes when it is done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Effect {
    #[default]
    Nothing,
    Fill {
        range: AddrRange,
        byte: u8,
    },
    Copy {
        from: AddrRange,
        to: DeviceAddr,
    },
    /// Each side is accessed by the device that it belongs to.
    CopyPeer {
        from: AddrRange,
        to: DeviceAddr,
        reader: usize,
        writer: usize,
    },
    ToDevice {
        buffer: u64,
        offset: Bytes,
        to: AddrRange,
    },
    ToHost {
        from: AddrRange,
        buffer: u64,
        offset: Bytes,
    },
}

impl Effect {
    /// Returns the direction of the bus that it uses: 0 to the host, 1 to the card.
    pub fn direction(&self) -> Option<usize> {
        match self {
            Effect::ToHost { .. } => Some(0),
            Effect::ToDevice { .. } => Some(1),
            _ => None,
        }
    }

    /// Returns the most host memory that storing its bytes can take. A filled block is one byte.
    pub fn stored(&self) -> Bytes {
        match self {
            Effect::Nothing | Effect::Fill { .. } => Bytes::ZERO,
            Effect::Copy { from, .. }
            | Effect::CopyPeer { from, .. }
            | Effect::ToHost { from, .. } => from.len,
            Effect::ToDevice { to, .. } => to.len,
        }
    }

    /// Returns the pinned host buffer that it accesses, if any.
    pub fn host_buffer(&self) -> Option<u64> {
        match self {
            Effect::ToDevice { buffer, .. } | Effect::ToHost { buffer, .. } => Some(*buffer),
            _ => None,
        }
    }

    /// Returns the device that accesses what work on a stream of `device` reads or writes.
    pub fn accessor(&self, device: usize, writes: bool) -> usize {
        match self {
            Effect::CopyPeer { reader, writer, .. } => {
                if writes {
                    *writer
                } else {
                    *reader
                }
            }
            _ => device,
        }
    }
}

/// One piece of work on a stream.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub kernel: Kernel,
    pub effect: Effect,
    /// Invalid access found when it was queued: it faults when it starts.
    pub doomed: Option<(DeviceAddr, &'static str)>,
    /// Its order, while the race detector still has to check it.
    pub unchecked: Option<Stamp>,
}

impl Work {
    /// Returns the first range that it accesses and that overlaps `range`.
    pub fn accesses(&self, range: AddrRange) -> Option<AddrRange> {
        let overlaps = |other: &&AddrRange| {
            let (a, b) = (range.start.number(), other.start.number());
            a < b.saturating_add(other.len.count()) && b < a.saturating_add(range.len.count())
        };
        self.kernel.writes.iter().chain(&self.kernel.reads).find(overlaps).copied()
    }
}

/// A point in a stream's work, done when the stream is done up to `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub stream: usize,
    pub position: u64,
}

#[derive(Debug)]
enum Item {
    Work(Box<Work>),
    Wait(Point),
    /// Work that the caller holds, between [`Streams::step`] and [`Streams::run`].
    Starting,
}

#[derive(Debug)]
struct Queued {
    item: Item,
    queued_ns: u64,
}

#[derive(Debug, Default)]
struct Queue {
    device: usize,
    items: VecDeque<Queued>,
    /// Number of items ever queued.
    queued: u64,
    /// Number of items done.
    done: u64,
    /// Time at which the last done item was done.
    free_ns: u64,
    /// Time at which the first item was started, if it was.
    started_ns: Option<u64>,
    /// Time at which it advances, if that is known.
    due_ns: Option<u64>,
    /// Streams that wait for this one, with the position that they wait for.
    waiters: BTreeSet<(u64, usize)>,
    destroyed: bool,
}

/// How a stream advanced.
#[derive(Debug)]
pub(super) enum Step {
    /// The first work of the stream started. The caller gives it to [`Streams::run`].
    Started(Box<Work>),
    /// Work is done.
    Done(Box<Work>),
    /// A wait is done.
    Passed,
}

/// A gate, and the streams that run work which it keeps running.
#[derive(Debug, Default)]
struct GateState {
    opened_ns: Option<u64>,
    kept: Vec<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Streams {
    queues: Vec<Queue>,
    gates: Vec<GateState>,
    /// Streams with items that are not done.
    busy: BTreeSet<usize>,
    /// Streams that advance by themselves, in order of time.
    due: BTreeSet<(u64, usize)>,
    /// Virtual time of the last step.
    stepped_ns: u64,
    /// Devices whose streams do not advance any more.
    stopped: DeviceSet,
}

impl Streams {
    pub fn create(&mut self, device: usize) -> Stream {
        self.queues.push(Queue { device, ..Queue::default() });
        Stream::from_number(self.queues.len() as u64)
    }

    /// Creates a stream without an id for callers.
    pub fn create_unnamed(&mut self, device: usize) -> usize {
        self.queues.push(Queue { device, destroyed: true, ..Queue::default() });
        self.queues.len() - 1
    }

    /// Returns the index of a stream of `device`.
    pub fn index(&self, device: usize, stream: Stream) -> Outcome<usize> {
        let unknown = || Refusal::unknown("stream", stream.number());
        let index = usize::try_from(stream.number()).ok().and_then(|n| n.checked_sub(1));
        let index = index.ok_or_else(unknown)?;
        match self.queues.get(index) {
            Some(queue) if !queue.destroyed && queue.device == device => Ok(index),
            _ => Err(unknown()),
        }
    }

    pub fn destroy(&mut self, stream: usize) {
        self.queues[stream].destroyed = true;
    }

    /// Returns the number of streams ever created.
    pub fn made(&self) -> usize {
        self.queues.len()
    }

    /// Returns the device of a stream.
    pub fn device(&self, stream: usize) -> usize {
        self.queues[stream].device
    }

    /// Stops all streams of a device for good.
    pub fn stop(&mut self, device: usize) {
        self.stopped = self.stopped.with(device);
        let queues = &self.queues;
        self.due.retain(|(_, stream)| queues[*stream].device != device);
        self.busy.retain(|stream| queues[*stream].device != device);
    }

    /// Returns the number of streams of a device that are not destroyed. O(streams).
    pub fn live(&self, device: usize) -> usize {
        let live = |queue: &&Queue| !queue.destroyed && queue.device == device;
        self.queues.iter().filter(live).count()
    }

    pub fn gate(&mut self) -> Gate {
        self.gates.push(GateState::default());
        Gate(self.gates.len() - 1)
    }

    /// Returns false if the gate is unknown. Opening an open gate changes nothing.
    pub fn open(&mut self, gate: Gate, now_ns: u64) -> bool {
        let Some(state) = self.gates.get_mut(gate.0) else { return false };
        state.opened_ns.get_or_insert(now_ns);
        for stream in std::mem::take(&mut state.kept) {
            self.schedule(stream);
        }
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
        if queue.items.len() == 1 {
            if !self.stopped.contains(queue.device) {
                self.busy.insert(stream);
            }
            self.schedule(stream);
        }
    }

    /// Finds the place of a stream whose first item changed or may advance now.
    fn schedule(&mut self, stream: usize) {
        let due_ns = self.due_ns(stream);
        let queue = &mut self.queues[stream];
        if let Some(before) = std::mem::replace(&mut queue.due_ns, due_ns) {
            self.due.remove(&(before, stream));
        }
        let Some(first) = queue.items.front().filter(|_| !self.stopped.contains(queue.device))
        else {
            return;
        };
        match (due_ns, &first.item) {
            (Some(due_ns), _) => {
                self.due.insert((due_ns, stream));
            }
            (None, Item::Wait(point)) => {
                let (position, of) = (point.position, point.stream);
                self.queues[of].waiters.insert((position, stream));
            }
            (None, Item::Work(work)) => {
                let gate = work.kernel.until.expect("other work has an end");
                self.gates[gate.0].kept.push(stream);
            }
            (None, Item::Starting) => {}
        }
    }

    /// Returns the point after all work queued on `stream`.
    pub fn end_of(&self, stream: usize) -> Point {
        Point { stream, position: self.queues[stream].queued }
    }

    pub fn is_done(&self, point: Point) -> bool {
        self.queues[point.stream].done >= point.position
    }

    /// Returns which stream advances next, and when. `None` if all wait for closed gates, or for
    /// streams that do.
    pub fn next_due(&self) -> Option<(u64, usize)> {
        self.due.first().copied()
    }

    fn due_ns(&self, stream: usize) -> Option<u64> {
        let queue = &self.queues[stream];
        let first = queue.items.front()?;
        let ready_ns = queue.free_ns.max(first.queued_ns);
        match (&first.item, queue.started_ns) {
            (Item::Wait(point), _) => {
                // A blocked wait ends when the other stream reaches the point, which is the last step.
                self.is_done(*point).then(|| ready_ns.max(self.stepped_ns))
            }
            (Item::Work(_), None) => Some(ready_ns),
            (Item::Work(work), Some(started_ns)) => {
                let over_ns = started_ns.saturating_add(work.kernel.duration_ns);
                match work.kernel.until {
                    None => Some(over_ns),
                    Some(gate) => {
                        self.gates[gate.0].opened_ns.map(|opened_ns| over_ns.max(opened_ns))
                    }
                }
            }
            (Item::Starting, _) => None,
        }
    }

    /// Advances `stream` at `due_ns`, as [`Streams::next_due`] returned.
    pub fn step(&mut self, stream: usize, due_ns: u64) -> Step {
        self.stepped_ns = self.stepped_ns.max(due_ns);
        let queue = &mut self.queues[stream];
        let first = queue.items.front_mut().expect("a stream that is due has work");
        if queue.started_ns.is_none() && matches!(first.item, Item::Work(_)) {
            queue.started_ns = Some(due_ns);
            let item = std::mem::replace(&mut first.item, Item::Starting);
            self.schedule(stream);
            let Item::Work(work) = item else { unreachable!("it was just matched") };
            return Step::Started(work);
        }
        queue.started_ns = None;
        queue.done += 1;
        queue.free_ns = due_ns;
        let item = queue.items.pop_front().expect("a stream that is due has work").item;
        if queue.items.is_empty() {
            self.busy.remove(&stream);
        }
        self.schedule(stream);
        self.wake_waiters(stream);
        match item {
            Item::Work(work) => Step::Done(work),
            Item::Wait(_) | Item::Starting => Step::Passed,
        }
    }

    /// Schedules the streams whose wait for `stream` is over.
    fn wake_waiters(&mut self, stream: usize) {
        while let queue = &mut self.queues[stream]
            && let Some(&(position, waiter)) = queue.waiters.first()
            && position <= queue.done
        {
            queue.waiters.pop_first();
            self.schedule(waiter);
        }
    }

    /// Runs the work that [`Step::Started`] returned, whose duration is final now.
    pub fn run(&mut self, stream: usize, work: Box<Work>) {
        let first = self.queues[stream].items.front_mut().expect("the work is still first");
        first.item = Item::Work(work);
        self.schedule(stream);
    }

    /// Returns the first queued or running work of these devices that `wanted` accepts, with its
    /// stream.
    pub fn find_pending(
        &self,
        devices: DeviceSet,
        wanted: impl Fn(&Work) -> bool,
    ) -> Option<(Stream, &Work)> {
        let busy = self.busy.iter().map(|stream| (*stream, &self.queues[*stream]));
        let mut queues = busy.filter(|(_, queue)| devices.contains(queue.device));
        queues.find_map(|(stream, queue)| {
            queue.items.iter().find_map(|queued| match &queued.item {
                Item::Work(work) if wanted(work) => {
                    Some((Stream::from_number(stream as u64 + 1), work.as_ref()))
                }
                _ => None,
            })
        })
    }

    /// Describes what blocks each stream that has work left.
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
                Some(Item::Starting) | None => {}
            }
        }
        words.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAMS: usize = 5;

    #[derive(Clone, Debug)]
    enum Op {
        Work { stream: usize, ns: u64 },
        Gated { stream: usize, gate: usize },
        Wait { stream: usize, on: usize },
        Open(usize),
        Step,
        Pass(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..STREAMS, 0..4u64).prop_map(|(stream, ns)| Op::Work { stream, ns }),
            1 => (0..STREAMS, 0..3usize).prop_map(|(stream, gate)| Op::Gated { stream, gate }),
            4 => (0..STREAMS, 0..STREAMS).prop_map(|(stream, on)| Op::Wait { stream, on }),
            1 => (0..3usize).prop_map(Op::Open),
            8 => Just(Op::Step),
            1 => (0..6u64).prop_map(Op::Pass),
        ]
    }

    /// The stream that advances next, by asking all.
    fn naive(streams: &Streams) -> Option<(u64, usize)> {
        let all = 0..streams.queues.len();
        all.filter_map(|stream| Some((streams.due_ns(stream)?, stream))).min()
    }

    fn step(streams: &mut Streams, now_ns: &mut u64) {
        assert_eq!(streams.next_due(), naive(streams));
        let Some((due_ns, stream)) = streams.next_due() else { return };
        if let Step::Started(mut work) = streams.step(stream, due_ns) {
            work.kernel.duration_ns += 1;
            streams.run(stream, work);
        }
        *now_ns = (*now_ns).max(due_ns);
        assert_eq!(streams.next_due(), naive(streams));
    }

    proptest! {
        #[test]
        fn the_next_stream_is_the_one_that_asking_all_finds(
            ops in prop::collection::vec(op(), 1..120),
        ) {
            let mut streams = Streams::default();
            let _ = [(); STREAMS].map(|()| streams.create(0));
            let gates = [(); 3].map(|()| streams.gate());
            let mut now_ns = 0;
            let work = |kernel: Kernel| Work { kernel, ..Work::default() };
            for op in ops {
                match op {
                    Op::Work { stream, ns } => {
                        streams.push(stream, work(Kernel::new("k").lasting(ns)), now_ns);
                    }
                    Op::Gated { stream, gate } => {
                        streams.push(stream, work(Kernel::new("g").until(gates[gate])), now_ns);
                    }
                    Op::Wait { stream, on } => {
                        streams.push_wait(stream, streams.end_of(on), now_ns);
                    }
                    Op::Open(gate) => prop_assert!(streams.open(gates[gate], now_ns)),
                    Op::Step => step(&mut streams, &mut now_ns),
                    // The host's clock passes only what is due.
                    Op::Pass(ns) => {
                        now_ns += ns;
                        while streams.next_due().is_some_and(|(due_ns, _)| due_ns <= now_ns) {
                            step(&mut streams, &mut now_ns);
                        }
                    }
                }
                prop_assert_eq!(streams.next_due(), naive(&streams));
            }
            prop_assert!(gates.into_iter().all(|gate| streams.open(gate, now_ns)));
            while streams.next_due().is_some() {
                step(&mut streams, &mut now_ns);
            }
            prop_assert!(streams.busy.is_empty() && streams.due.is_empty());
            for queue in &streams.queues {
                prop_assert!(queue.items.is_empty() && queue.waiters.is_empty());
            }
        }
    }
}
