//! Steps of the host and of streams, their order as vector clocks, and what is accessed in a step.

use std::fmt;
use std::sync::Arc;

use vramp_core::AddrRange;

use crate::Stream;

/// Physical memory that was accessed, by whatever address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Body {
    Handle(u64),
    /// Pool of the device with this ordinal.
    Pool(usize),
    HostBuffer(u64),
}

/// The host, or a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Actor(pub usize);

impl Actor {
    pub const HOST: Actor = Actor(0);

    /// Stream numbers count from 1.
    pub fn of(stream: Option<Stream>) -> Actor {
        Actor(stream.map_or(0, |stream| stream.number() as usize))
    }

    pub fn stream(self) -> Option<Stream> {
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

/// A step of one actor, and the steps that are ordered before it.
#[derive(Clone, Debug)]
pub(super) struct Stamp {
    pub actor: Actor,
    pub step: u64,
    pub before: Clock,
}

/// Vector clock: the last step of each actor that is ordered before a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Arc<Vec<u64>>);

impl Clock {
    pub fn of(&self, actor: Actor) -> u64 {
        self.0.get(actor.0).copied().unwrap_or(0)
    }

    pub fn raise(&mut self, actor: Actor, step: u64) {
        if self.of(actor) < step {
            let steps = Arc::make_mut(&mut self.0);
            if steps.len() <= actor.0 {
                steps.resize(actor.0 + 1, 0);
            }
            steps[actor.0] = step;
        }
    }

    pub fn join(&mut self, other: &Clock) {
        if Arc::ptr_eq(&self.0, &other.0) {
            return;
        }
        for (index, step) in other.0.iter().enumerate() {
            self.raise(Actor(index), *step);
        }
    }
}

impl Stamp {
    /// Returns the record of an access to `range` in this step.
    pub fn touch(&self, label: u32, range: AddrRange) -> Touch {
        Touch { actor: self.actor, step: self.step, label, range }
    }

    pub fn covers(&self, touch: &Touch) -> bool {
        touch.actor == self.actor || self.before.of(touch.actor) >= touch.step
    }
}

/// Record of an access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub actor: Actor,
    pub step: u64,
    pub label: u32,
    pub range: AddrRange,
}

/// A range of bytes of one body, accessed through `range`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub body: Body,
    pub offset: u64,
    pub len: u64,
    pub range: AddrRange,
    pub writes: bool,
}
