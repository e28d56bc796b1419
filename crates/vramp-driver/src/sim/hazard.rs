//! Race detector: finds two accesses to the same memory without a happens-before order, whatever their
//! timing was.
//!
//! Every stream, and the host, counts its own steps and has a vector clock of the steps of the others
//! that are ordered before it. Order comes from what CUDA guarantees and from nothing else:
//!
//! 1. along a stream, from each piece of work to the next;
//! 2. from the host to all work that it queues;
//! 3. from a stream to an event recorded on it, and on to a stream that waits for the event;
//! 4. from an event or a stream to the host, after a query returned true or a synchronise returned;
//! 5. along the dependencies of a launched graph: from earlier work of its stream, and from its last
//!    launch, to its nodes, and from all nodes to later work of its stream.
//!
//! Opening a gate adds no order: the kernel can end, but the host has not observed its completion.
//!
//! Accesses are recorded by *physical* bytes, so alias mappings of one handle are one memory. An
//! access whose completion the host observed is ordered before all later ones, and is dropped.

use std::collections::HashMap;
use std::fmt;

use vramp_core::AddrRange;

use super::clock::{Actor, Body, Clock, Part, Stamp, Touch};
use super::history::History;
use super::host::Holder;
use crate::Stream;

/// Number of hazards kept in full; further ones are only counted.
const HAZARDS_KEPT: usize = 1000;

/// A race: two unordered accesses to the same bytes, at least one of them a write. Or a call that takes
/// memory from what registered it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// Access that was queued first.
    pub earlier: Access,
    /// Access that could run before the earlier one is complete.
    pub later: Access,
    /// Order that is missing, as a sentence.
    pub missing: String,
}

/// An access to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Name of the kernel or of the driver call.
    pub label: String,
    /// Stream of the access; `None` for the host.
    pub stream: Option<Stream>,
    /// Addresses of the access. For pinned host memory, offsets in its buffer.
    pub range: AddrRange,
    /// True for a write, an unmap and a free.
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

#[derive(Clone, Debug, Default)]
struct ActorState {
    step: u64,
    before: Clock,
    /// Version of the host's clock that is already part of `before`.
    host_version: u64,
}

#[derive(Debug, Default)]
pub(super) struct Checker {
    actors: Vec<ActorState>,
    /// Counts the changes of the host's clock.
    host_version: u64,
    events: HashMap<u64, Stamp>,
    bodies: HashMap<Body, History>,
    /// Last access of each actor through each mapping, by the mapping's first address.
    mappings: HashMap<u64, Vec<Touch>>,
    labels: Vec<String>,
    label_numbers: HashMap<String, u32>,
    hazards: Vec<Hazard>,
    hazards_found: u64,
}

impl Checker {
    // --- order ---

    /// Adds a step of `stream`, ordered after all earlier steps of the stream and the host.
    pub fn step(&mut self, stream: Stream) -> Stamp {
        let actor = Actor::of(Some(stream));
        self.join_host(actor);
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

    /// Returns the point after all work queued on `stream`, without a step.
    pub fn point(&mut self, stream: Stream) -> Stamp {
        let actor = Actor::of(Some(stream));
        self.join_host(actor);
        let state = self.actor(actor);
        Stamp { actor, step: state.step, before: state.before.clone() }
    }

    pub fn record(&mut self, event: u64, stream: Stream) {
        let point = self.point(stream);
        self.events.insert(event, point);
    }

    pub fn wait(&mut self, stream: Stream, event: u64) {
        if let Some(point) = self.events.get(&event).cloned() {
            self.join(Actor::of(Some(stream)), &point);
        }
    }

    /// Orders later work on `stream` after `point`.
    pub fn follow(&mut self, stream: Stream, point: &Stamp) {
        self.join(Actor::of(Some(stream)), point);
    }

    /// Returns true if the host observed the completion of all work on `stream`.
    pub fn host_observed_all_of(&mut self, stream: Stream) -> bool {
        let actor = Actor::of(Some(stream));
        let step = self.actor(actor).step;
        self.actor(Actor::HOST).before.of(actor) >= step
    }

    pub fn remove_event(&mut self, event: u64) {
        self.events.remove(&event);
    }

    pub fn host_observed_event(&mut self, event: u64) {
        if let Some(point) = self.events.get(&event).cloned() {
            self.host_version += 1;
            self.join(Actor::HOST, &point);
        }
    }

    pub fn host_observed_stream(&mut self, stream: Stream) {
        let point = self.point(stream);
        self.host_version += 1;
        self.join(Actor::HOST, &point);
    }

    fn join(&mut self, actor: Actor, point: &Stamp) {
        let state = self.actor(actor);
        state.before.join(&point.before);
        state.before.raise(point.actor, point.step);
    }

    fn join_host(&mut self, actor: Actor) {
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

    /// Checks and records the accesses of one piece of work, each with its mapping, if any.
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

    /// Checks and records an access by the host.
    pub fn host_access(&mut self, label: &str, part: Part) {
        let stamp = self.host_step();
        self.access(&stamp, label, &[(part, None)]);
    }

    /// Checks that the host observed the completion of all accesses through the mapping at
    /// `mapping`, which is unmapped as part of `range`.
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

    /// Checks that the host observed the completion of all accesses through the mapping at `mapping`
    /// by the streams that `of_peers` accepts, whose access to `range` is revoked.
    pub fn revoke(&mut self, mapping: u64, range: AddrRange, of_peers: impl Fn(Stream) -> bool) {
        let Some(touches) = self.mappings.get(&mapping) else { return };
        let touched = |touch: &&Touch| touch.actor.stream().is_some_and(&of_peers);
        let touches: Vec<Touch> = touches.iter().filter(touched).copied().collect();
        let stamp = self.host_step();
        let label = self.label_number("revoke-access");
        let touch = stamp.touch(label, range);
        for earlier in touches {
            if !stamp.covers(&earlier) {
                self.report(&stamp, (touch, true), (earlier, true));
            }
        }
    }

    /// Drops the records of memory that was destroyed.
    pub fn remove_body(&mut self, body: Body) {
        self.bodies.remove(&body);
    }

    /// Drops the records of bytes that are allocated anew, ordered by their allocator.
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

    /// Reports that a call takes memory from its holder.
    pub fn report_held(&mut self, label: &str, range: AddrRange, holder: Holder) {
        self.hazards_found += 1;
        if self.hazards.len() >= HAZARDS_KEPT {
            return;
        }
        let missing = format!("`{}` still holds the memory: unregister it first", holder.name);
        let access = |label: &str, range, writes| Access {
            label: label.to_owned(),
            stream: None,
            range,
            writes,
        };
        let earlier = access(&holder.name, holder.range, false);
        self.hazards.push(Hazard { earlier, later: access(label, range, true), missing });
    }

    /// Reports two unordered accesses, each with whether it writes.
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
                format!("the host has observed no completion on {of}")
            }
            (Actor::HOST, seen) => format!(
                "the last completion on {of} that the host has observed is {} before `{name}`",
                steps(earlier.step - seen)
            ),
            (_, 0) => format!(
                "{by} waits for no event of {of}, and the host had not observed the completion of `{name}`"
            ),
            (_, seen) => format!(
                "{by} is ordered after a point of {of} that is {} before the end of `{name}`: the \
                 event was recorded too early",
                steps(earlier.step - seen)
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
