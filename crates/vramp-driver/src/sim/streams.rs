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
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::clock::Stamp;
use super::devices::DeviceSet;
use super::refusal::{Outcome, Refusal};
use crate::{Stream, ThreadNumber};

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
    /// Streams that wait for this one, with the position that they wait for.
    waiters: BinaryHeap<Reverse<(u64, usize)>>,
    /// Callers have no id of it: it was destroyed, or never had one.
    unnamed: bool,
    role: Role,
}

/// What a stream is beside a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Role {
    #[default]
    Created,
    /// The default stream of a thread, which got it so many times and did not destroy it.
    OfThread { owner: ThreadNumber, ids: usize },
    /// The legacy default stream, which callers get no id of.
    Legacy,
    /// A stream of a graph, which has no id for callers. It stays without work: the graph uses it again.
    Internal,
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
    /// By index, without those that were destroyed and are done, so that a program may make any number of
    /// streams one after the other.
    queues: BTreeMap<usize, Queue>,
    /// Number of streams ever created.
    made: usize,
    /// Default streams by device: the legacy one, and those of threads.
    defaults: BTreeMap<(usize, Option<ThreadNumber>), usize>,
    /// Streams that were destroyed and are done stay: the race detector asks about them.
    keeps_all: bool,
    gates: Vec<GateState>,
    /// Streams that have items that are not done.
    busy: BTreeSet<usize>,
    /// Number of items not done, over all streams.
    pending: usize,
    /// Streams that advance by themselves, each once, by time. An entry stays until the step.
    due: BinaryHeap<Reverse<(u64, usize)>>,
    /// Virtual time of the last step.
    stepped_ns: u64,
    /// Devices whose streams do not advance any more.
    stopped: DeviceSet,
}

impl Streams {
    /// No streams yet. With `keeps_all` those that were destroyed and are done stay.
    pub fn new(keeps_all: bool) -> Streams {
        Streams { keeps_all, ..Streams::default() }
    }

    pub fn create(&mut self, device: usize) -> Stream {
        let index = self.add(Queue { device, ..Queue::default() });
        Stream::from_number(index as u64 + 1)
    }

    fn add(&mut self, queue: Queue) -> usize {
        self.queues.insert(self.made, queue);
        self.made += 1;
        self.made - 1
    }

    fn queue(&self, stream: usize) -> &Queue {
        self.queues.get(&stream).expect("a stream that is used is not gone")
    }

    fn queue_mut(&mut self, stream: usize) -> &mut Queue {
        self.queues.get_mut(&stream).expect("a stream that is used is not gone")
    }

    /// Forgets a stream that was destroyed and is done. Points of it are done.
    fn leave_if_done(&mut self, stream: usize) {
        let queue = self.queue(stream);
        let stays = matches!(queue.role, Role::Legacy | Role::Internal) || self.keeps_all;
        if !queue.unnamed || stays || !queue.items.is_empty() {
            return;
        }
        if let Role::OfThread { owner, .. } = queue.role {
            self.defaults.remove(&(queue.device, Some(owner)));
        }
        self.queues.remove(&stream);
    }

    /// Creates a stream without an id for callers.
    pub fn create_unnamed(&mut self, device: usize) -> usize {
        self.add(Queue { device, unnamed: true, role: Role::Internal, ..Queue::default() })
    }

    /// Returns the index of a stream of `device`.
    pub fn index(&self, device: usize, stream: Stream) -> Outcome<usize> {
        let unknown = || Refusal::unknown("stream", stream.number());
        let index = usize::try_from(stream.number()).ok().and_then(|n| n.checked_sub(1));
        let index = index.ok_or_else(unknown)?;
        match self.queues.get(&index) {
            Some(queue) if !queue.unnamed && queue.device == device => Ok(index),
            _ => Err(unknown()),
        }
    }

    /// Ends one id of a stream, and the stream with its last one.
    pub fn destroy(&mut self, stream: usize) {
        let queue = self.queue_mut(stream);
        if let Role::OfThread { ids, .. } = &mut queue.role {
            *ids -= 1;
            queue.unnamed = *ids == 0;
        } else {
            queue.unnamed = true;
        }
        self.leave_if_done(stream);
    }

    /// Returns the default stream of a thread on `device`, with one more id.
    pub fn of_thread(&mut self, device: usize, thread: ThreadNumber) -> usize {
        let role = Role::OfThread { owner: thread, ids: 0 };
        let index = self.default_of(device, Some(thread), role);
        let queue = self.queue_mut(index);
        if let Role::OfThread { ids, .. } = &mut queue.role {
            *ids += 1;
            queue.unnamed = false;
        }
        index
    }

    /// Returns a default stream, which its first use makes.
    fn default_of(&mut self, device: usize, of: Option<ThreadNumber>, role: Role) -> usize {
        if let Some(&index) = self.defaults.get(&(device, of)) {
            return index;
        }
        let index = self.add(Queue { device, role, ..Queue::default() });
        self.defaults.insert((device, of), index);
        index
    }

    /// Returns the thread whose default stream it is.
    pub fn thread(&self, stream: usize) -> Option<ThreadNumber> {
        match self.queue(stream).role {
            Role::OfThread { owner, .. } => Some(owner),
            Role::Created | Role::Legacy | Role::Internal => None,
        }
    }

    /// Returns the threads' default streams on `device`, also those whose ids ended, but not those that
    /// are done then.
    pub fn of_threads(&self, device: usize) -> Vec<usize> {
        let own = self.defaults.range((device, None)..).take_while(|((of, _), _)| *of == device);
        own.filter(|((_, thread), _)| thread.is_some()).map(|(_, index)| *index).collect()
    }

    /// Returns the legacy default stream of `device`, if a call used it.
    pub fn legacy(&self, device: usize) -> Option<usize> {
        self.defaults.get(&(device, None)).copied()
    }

    /// Returns the legacy default stream of `device`.
    pub fn make_legacy(&mut self, device: usize) -> usize {
        self.default_of(device, None, Role::Legacy)
    }

    /// Returns the streams of a device, without those that were destroyed and are done. O(streams).
    pub fn of_device(&self, device: usize) -> Vec<usize> {
        let own = self.queues.iter().filter(|(_, queue)| queue.device == device);
        own.map(|(&stream, _)| stream).collect()
    }

    /// Returns the device of a stream that is not gone.
    pub fn device(&self, stream: usize) -> usize {
        self.queue(stream).device
    }

    /// Stops all streams of a device for good.
    pub fn stop(&mut self, device: usize) {
        self.stopped = self.stopped.with(device);
        let queues = &self.queues;
        self.due.retain(|Reverse((_, stream))| queues[stream].device != device);
    }

    /// Returns the number of streams of a device that are not destroyed. O(streams).
    pub fn live(&self, device: usize) -> usize {
        let live =
            |queue: &&Queue| !queue.unnamed && queue.device == device && queue.role != Role::Legacy;
        self.queues.values().filter(live).count()
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
        self.pending += 1;
        let queue = self.queue_mut(stream);
        queue.queued += 1;
        queue.items.push_back(Queued { item, queued_ns });
        if queue.items.len() == 1 {
            self.busy.insert(stream);
            self.schedule(stream);
        }
    }

    /// Returns the streams that have items, in order.
    fn busy(&self) -> impl Iterator<Item = usize> + '_ {
        self.busy.iter().copied()
    }

    /// Finds the place of a stream that has none: its first item changed, or its wait or gate is over.
    fn schedule(&mut self, stream: usize) {
        let due_ns = self.due_ns(stream);
        let queue = self.queue(stream);
        let Some(first) = queue.items.front().filter(|_| !self.stopped.contains(queue.device))
        else {
            return;
        };
        match (due_ns, &first.item) {
            (Some(due_ns), _) => {
                self.due.push(Reverse((due_ns, stream)));
            }
            (None, Item::Wait(point)) => {
                let (position, of) = (point.position, point.stream);
                self.queue_mut(of).waiters.push(Reverse((position, stream)));
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
        Point { stream, position: self.queues.get(&stream).map_or(0, |queue| queue.queued) }
    }

    pub fn is_done(&self, point: Point) -> bool {
        self.queues.get(&point.stream).is_none_or(|queue| queue.done >= point.position)
    }

    /// Returns which stream advances next, and when. `None` if all wait for closed gates, or for
    /// streams that do.
    pub fn next_due(&self) -> Option<(u64, usize)> {
        self.due.peek().map(|Reverse(first)| *first)
    }

    fn due_ns(&self, stream: usize) -> Option<u64> {
        let queue = self.queue(stream);
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
        let taken = self.due.pop();
        debug_assert_eq!(taken, Some(Reverse((due_ns, stream))), "the stream is not next");
        let queue = self.queue_mut(stream);
        let first = queue.items.front_mut().expect("a stream that is due has work");
        if queue.started_ns.is_none() && matches!(first.item, Item::Work(_)) {
            queue.started_ns = Some(due_ns);
            let item = std::mem::replace(&mut first.item, Item::Starting);
            let Item::Work(work) = item else { unreachable!("it was just matched") };
            return Step::Started(work);
        }
        queue.started_ns = None;
        queue.done += 1;
        queue.free_ns = due_ns;
        let item = queue.items.pop_front().expect("a stream that is due has work").item;
        let is_idle = queue.items.is_empty();
        self.pending -= 1;
        if is_idle {
            self.busy.remove(&stream);
        } else {
            self.schedule(stream);
        }
        self.wake_waiters(stream);
        self.leave_if_done(stream);
        match item {
            Item::Work(work) => Step::Done(work),
            Item::Wait(_) | Item::Starting => Step::Passed,
        }
    }

    /// Schedules the streams whose wait for `stream` is over.
    fn wake_waiters(&mut self, stream: usize) {
        while let queue = self.queue_mut(stream)
            && let Some(&Reverse((position, waiter))) = queue.waiters.peek()
            && position <= queue.done
        {
            queue.waiters.pop();
            self.schedule(waiter);
        }
    }

    /// Runs the work that [`Step::Started`] returned, whose duration is final now.
    pub fn run(&mut self, stream: usize, work: Box<Work>) {
        let first = self.queue_mut(stream).items.front_mut().expect("the work is still first");
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
        if self.pending == 0 {
            return None;
        }
        let devices = devices.without(self.stopped);
        let busy = self.busy().map(|stream| (stream, self.queue(stream)));
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
        for (&stream, queue) in &self.queues {
            let number = stream + 1;
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
mod tests;
