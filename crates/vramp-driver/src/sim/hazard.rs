//! The happens-before checker: finds memory touched twice without order, even where the accident of
//! timing made it come out right.
//!
//! Every stream, and the host, counts its own steps and knows how far each other one is ordered
//! before it (a vector clock). Knowledge flows along what CUDA promises and nothing else:
//!
//! 1. along a stream, from one piece of work to the next;
//! 2. from the host to whatever it queues;
//! 3. from a stream to an event recorded on it, and on to a stream that waits for the event;
//! 4. from an event or a stream to the host, when a query returned true or a synchronise returned;
//! 5. along the dependencies of a launched graph: from what was queued on its stream, and from the
//!    launch before it, to its nodes, and from all of them to what its stream does next.
//!
//! Opening a gate adds nothing: it lets a kernel end, which is not to have seen it end.
//!
//! Accesses are remembered by *physical* bytes, so two addresses of one handle are one memory. An
//! access that the host has seen complete is ordered before all that follows, and is forgotten.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use vramp_core::AddrRange;

use super::history::History;
use crate::Stream;

/// Hazards kept in full; beyond it they are only counted.
const HAZARDS_KEPT: usize = 1000;

/// Two accesses to the same bytes, at least one of them a write, that nothing orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// The access that was queued first.
    pub earlier: Access,
    /// The access that could run before the earlier one is over.
    pub later: Access,
    /// Which order is missing, in words.
    pub missing: String,
}

/// Who touched what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The kernel's name, or the driver call.
    pub label: String,
    /// On which stream; `None` for the host.
    pub stream: Option<Stream>,
    /// Through which addresses. For pinned host memory, offsets in its buffer.
    pub range: AddrRange,
    /// True for a write, and for taking the memory away.
    pub writes: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` on {}", self.label, Actor::of(self.stream))
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = |access: &Access| if access.writes { "writes" } else { "reads" };
        write!(
            f,
            "{} {} {} unordered after {}, which {} {}: {}",
            self.later,
            verb(&self.later),
            self.later.range,
            self.earlier,
            verb(&self.earlier),
            self.earlier.range,
            self.missing
        )
    }
}

/// What was touched: physical bytes, however they were reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Body {
    Handle(u64),
    Pool,
    HostBuffer(u64),
}

/// The host, or a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Actor(usize);

impl Actor {
    const HOST: Actor = Actor(0);

    /// Stream numbers count from 1.
    fn of(stream: Option<Stream>) -> Actor {
        Actor(stream.map_or(0, |stream| stream.number() as usize))
    }

    fn stream(self) -> Option<Stream> {
        (self != Actor::HOST).then(|| Stream::from_number(self.0 as u64))
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("the host"),
            stream => write!(f, "stream {stream}"),
        }
    }
}

/// A step of one actor, and what is ordered before it.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    actor: Actor,
    step: u64,
    before: Clock,
}

/// The last step of each actor that is ordered before something.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Arc<Vec<u64>>);

impl Clock {
    pub fn of(&self, actor: Actor) -> u64 {
        self.0.get(actor.0).copied().unwrap_or(0)
    }

    fn raise(&mut self, actor: Actor, step: u64) {
        if self.of(actor) < step {
            let steps = Arc::make_mut(&mut self.0);
            if steps.len() <= actor.0 {
                steps.resize(actor.0 + 1, 0);
            }
            steps[actor.0] = step;
        }
    }

    fn join(&mut self, other: &Clock) {
        if Arc::ptr_eq(&self.0, &other.0) {
            return;
        }
        for (index, step) in other.0.iter().enumerate() {
            self.raise(Actor(index), *step);
        }
    }
}

impl Stamp {
    /// What is remembered of an access to `range` in this step.
    pub fn touch(&self, label: u32, range: AddrRange) -> Touch {
        Touch { actor: self.actor, step: self.step, label, range }
    }

    pub fn covers(&self, touch: &Touch) -> bool {
        touch.actor == self.actor || self.before.of(touch.actor) >= touch.step
    }
}

/// One remembered access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub actor: Actor,
    pub step: u64,
    label: u32,
    range: AddrRange,
}

#[derive(Clone, Debug, Default)]
struct ActorState {
    step: u64,
    before: Clock,
    /// The host's knowledge that is already part of `before`.
    host_version: u64,
}

/// A range of bytes of one body, touched through `range`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub body: Body,
    pub offset: u64,
    pub len: u64,
    pub range: AddrRange,
    pub writes: bool,
}

#[derive(Debug, Default)]
pub(super) struct Checker {
    actors: Vec<ActorState>,
    /// Counts what the host did or learned.
    host_version: u64,
    events: HashMap<u64, Stamp>,
    bodies: HashMap<Body, History>,
    /// The last access of each actor through each mapping, by the mapping's first address.
    mappings: HashMap<u64, Vec<Touch>>,
    labels: Vec<String>,
    label_numbers: HashMap<String, u32>,
    hazards: Vec<Hazard>,
    hazards_found: u64,
}

impl Checker {
    // --- order ---

    /// A new step of `stream`, behind all that it and the host did so far.
    pub fn step(&mut self, stream: Stream) -> Stamp {
        let actor = Actor::of(Some(stream));
        self.learn_from_host(actor);
        let state = self.actor(actor);
        state.step += 1;
        Stamp { actor, step: state.step, before: state.before.clone() }
    }

    fn host_step(&mut self) -> Stamp {
        self.host_version += 1;
        let host = self.actor(Actor::HOST);
        host.step += 1;
        Stamp { actor: Actor::HOST, step: host.step, before: host.before.clone() }
    }

    /// The point behind everything queued on `stream`, without a step.
    pub fn point(&mut self, stream: Stream) -> Stamp {
        let actor = Actor::of(Some(stream));
        self.learn_from_host(actor);
        let state = self.actor(actor);
        Stamp { actor, step: state.step, before: state.before.clone() }
    }

    pub fn record(&mut self, event: u64, stream: Stream) {
        let point = self.point(stream);
        self.events.insert(event, point);
    }

    pub fn wait(&mut self, stream: Stream, event: u64) {
        if let Some(point) = self.events.get(&event).cloned() {
            self.learn(Actor::of(Some(stream)), &point);
        }
    }

    /// Later work on `stream` comes behind `point`.
    pub fn follow(&mut self, stream: Stream, point: &Stamp) {
        self.learn(Actor::of(Some(stream)), point);
    }

    /// True if nothing done on `stream` is beyond what the host saw complete.
    pub fn host_saw_all_of(&mut self, stream: Stream) -> bool {
        let actor = Actor::of(Some(stream));
        let step = self.actor(actor).step;
        self.actor(Actor::HOST).before.of(actor) >= step
    }

    pub fn forget_event(&mut self, event: u64) {
        self.events.remove(&event);
    }

    pub fn host_saw_event(&mut self, event: u64) {
        if let Some(point) = self.events.get(&event).cloned() {
            self.host_version += 1;
            self.learn(Actor::HOST, &point);
        }
    }

    pub fn host_saw_stream(&mut self, stream: Stream) {
        let point = self.point(stream);
        self.host_version += 1;
        self.learn(Actor::HOST, &point);
    }

    fn learn(&mut self, actor: Actor, point: &Stamp) {
        let state = self.actor(actor);
        state.before.join(&point.before);
        state.before.raise(point.actor, point.step);
    }

    fn learn_from_host(&mut self, actor: Actor) {
        let version = self.host_version;
        if self.actor(actor).host_version == version {
            return;
        }
        let host = self.actor(Actor::HOST);
        let (step, before) = (host.step, host.before.clone());
        let state = self.actor(actor);
        state.before.join(&before);
        state.before.raise(Actor::HOST, step);
        state.host_version = version;
    }

    fn actor(&mut self, actor: Actor) -> &mut ActorState {
        if self.actors.len() <= actor.0 {
            self.actors.resize(actor.0 + 1, ActorState::default());
        }
        &mut self.actors[actor.0]
    }

    // --- accesses ---

    /// Checks the accesses of one piece of work, each with the mapping it went through, if any, and
    /// remembers them.
    pub fn access(&mut self, stamp: &Stamp, label: &str, parts: &[(Part, Option<u64>)]) {
        let label = self.label_number(label);
        let seen = self.actor(Actor::HOST).before.clone();
        for (part, mapping) in parts {
            if part.len == 0 {
                continue;
            }
            let touch = stamp.touch(label, part.range);
            let history = self.bodies.entry(part.body).or_default();
            let conflicts = history.access(stamp, touch, *part, &seen);
            if let Some(mapping) = mapping {
                let touches = self.mappings.entry(*mapping).or_default();
                match touches.iter_mut().find(|other| other.actor == touch.actor) {
                    Some(last) => *last = touch,
                    None => touches.push(touch),
                }
            }
            for (earlier, writes) in conflicts {
                self.report(stamp, (touch, part.writes), (earlier, writes));
            }
        }
    }

    /// Checks an access by the host itself to bytes of one body.
    pub fn host_access(&mut self, label: &str, part: Part) {
        let stamp = self.host_step();
        self.access(&stamp, label, &[(part, None)]);
    }

    /// Checks that the host saw all work complete that went through the mapping at `mapping`,
    /// before it is taken away as part of `range`.
    pub fn unmap(&mut self, mapping: u64, range: AddrRange) {
        let Some(touches) = self.mappings.remove(&mapping) else { return };
        let stamp = self.host_step();
        let label = self.label_number("unmap");
        let touch = stamp.touch(label, range);
        for earlier in touches {
            if !stamp.covers(&earlier) {
                self.report(&stamp, (touch, true), (earlier, true));
            }
        }
    }

    /// Forgets memory that is gone.
    pub fn forget_body(&mut self, body: Body) {
        self.bodies.remove(&body);
    }

    /// Forgets what was done to bytes that now begin a new life, ordered by their owner.
    pub fn renew(&mut self, body: Body, offset: u64, len: u64) {
        let Some(history) = self.bodies.get_mut(&body) else { return };
        history.split(offset);
        history.split(offset + len);
        history.forget_within(offset, offset + len);
    }

    // --- reports ---

    pub fn hazards(&self) -> &[Hazard] {
        &self.hazards
    }

    pub fn hazards_found(&self) -> u64 {
        self.hazards_found
    }

    /// Reports two accesses without order, each with whether it writes.
    fn report(&mut self, stamp: &Stamp, later: (Touch, bool), earlier: (Touch, bool)) {
        self.hazards_found += 1;
        if self.hazards.len() >= HAZARDS_KEPT {
            return;
        }
        let access = |(touch, writes): (Touch, bool)| Access {
            label: self.labels[touch.label as usize].clone(),
            stream: touch.actor.stream(),
            range: touch.range,
            writes,
        };
        let (earlier_access, later_access) = (access(earlier), access(later));
        let earlier = earlier.0;
        let (by, of) = (stamp.actor, earlier.actor);
        let name = &earlier_access.label;
        let missing = match (by, stamp.before.of(of)) {
            (Actor::HOST, 0) => {
                format!("the host has seen nothing on {of} complete")
            }
            (Actor::HOST, known) => format!(
                "what the host has seen complete on {of} ends {} before `{name}` does",
                steps(earlier.step - known)
            ),
            (_, 0) => format!(
                "{by} waits for no event of {of}, and the host had not seen `{name}` complete"
            ),
            (_, known) => format!(
                "the last point of {of} that {by} is ordered behind lies {} before the end of \
                 `{name}`: the event was recorded too early",
                steps(earlier.step - known)
            ),
        };
        self.hazards.push(Hazard { earlier: earlier_access, later: later_access, missing });
    }

    fn label_number(&mut self, label: &str) -> u32 {
        if let Some(number) = self.label_numbers.get(label) {
            return *number;
        }
        let number = self.labels.len() as u32;
        self.labels.push(label.to_owned());
        self.label_numbers.insert(label.to_owned(), number);
        number
    }
}

fn steps(count: u64) -> String {
    if count == 1 { "1 step".to_owned() } else { format!("{count} steps") }
}
