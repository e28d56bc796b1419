//! The user's books: each object, and who works on which memory.

use std::collections::BTreeSet;

use vramp::Bytes;
use vramp::graph::CaptureMode;
use vramp_core::AddrRange;
use vramp_driver::{Event, GraphExec, Stream};

use crate::lifecycle::subject::CacheChoice;

/// Objects by name, in order of creation.
#[derive(Debug)]
pub(in crate::lifecycle) struct Named<T>(pub Vec<(u64, T)>);

impl<T> Default for Named<T> {
    fn default() -> Named<T> {
        Named(Vec::new())
    }
}

impl<T> Named<T> {
    pub fn get(&self, name: u64) -> Option<&T> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, object)| object)
    }

    pub fn get_mut(&mut self, name: u64) -> Option<&mut T> {
        self.0.iter_mut().find(|(known, _)| *known == name).map(|(_, object)| object)
    }

    pub fn has(&self, name: u64) -> bool {
        self.get(name).is_some()
    }

    pub fn add(&mut self, name: u64, object: T) {
        self.0.push((name, object));
    }

    pub fn take(&mut self, name: u64) -> Option<T> {
        let at = self.0.iter().position(|(known, _)| *known == name)?;
        Some(self.0.swap_remove(at).1)
    }

    pub fn names(&self) -> Vec<u64> {
        self.0.iter().map(|(name, _)| *name).collect()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// A stream that has work on some memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::lifecycle) struct User {
    pub stream: u64,
    pub worked: bool,
    pub writes: bool,
    pub recorded: bool,
}

#[derive(Debug)]
pub(in crate::lifecycle) struct StreamState {
    pub raw: Stream,
    /// True if the program destroys it.
    pub adopted: bool,
    /// Recorded on it before it was destroyed.
    pub end: Option<Event>,
    /// True if only the driver's destruction failed, which can be tried again.
    pub half_destroyed: bool,
    /// The capture that it is part of, and an event from before.
    pub capture: Option<(u64, Event)>,
}

impl StreamState {
    pub fn is_open(&self) -> bool {
        self.end.is_none()
    }

    pub fn captures(&self) -> bool {
        self.capture.is_some()
    }
}

/// Where a block comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::lifecycle) enum From {
    Pool,
    /// Allocated in this capture, which is under way.
    Capture(u64),
    /// Allocated in a capture of this arena that is over. The graph is none if it failed.
    Graph(u64, Option<u64>),
}

#[derive(Debug)]
pub(in crate::lifecycle) struct Block {
    pub pool: u64,
    pub range: AddrRange,
    pub from: From,
    pub users: Vec<User>,
    pub byte: Option<u8>,
}

#[derive(Debug)]
pub(in crate::lifecycle) struct Arena {
    pub pool: u64,
    pub mode: CaptureMode,
    /// The last launches and reads, once graphs are launched without leases.
    pub users: Vec<u64>,
    pub unguarded: bool,
    pub dropped: bool,
}

#[derive(Debug)]
pub(in crate::lifecycle) struct Capture {
    pub pool: u64,
    pub arena: u64,
    pub origin: u64,
    pub streams: Vec<u64>,
    pub attached: bool,
    pub mode: CaptureMode,
    pub invalid: bool,
    /// Captured work by block.
    pub users: Named<Vec<User>>,
    /// Streams with work on blocks from outside that were freed inside.
    pub before: Vec<u64>,
    /// The last byte that captured fills leave, by block.
    pub fills: Vec<(u64, u8)>,
}

#[derive(Debug)]
pub(in crate::lifecycle) struct Graph {
    pub pool: u64,
    pub arena: u64,
    /// Blocks from outside that it uses.
    pub uses: Vec<u64>,
    pub before: Vec<u64>,
    pub fills: Vec<(u64, u8)>,
    /// Of a capture that was attached.
    pub exec: Option<GraphExec>,
    pub attached: bool,
    /// A block that it uses was freed.
    pub dead: bool,
}

#[derive(Debug)]
pub(in crate::lifecycle) struct Lease {
    pub graph: u64,
    pub arena: u64,
    pub stream: u64,
}

#[derive(Debug)]
pub(in crate::lifecycle) struct Range {
    pub pool: u64,
    pub range: AddrRange,
    pub backed: bool,
    pub hosted: Bytes,
    pub users: Vec<User>,
}

/// An arena for caches.
#[derive(Debug)]
pub(in crate::lifecycle) struct Cache {
    pub pool: u64,
    pub whole: AddrRange,
    pub choice: CacheChoice,
    /// The committed ones.
    pub pages: Vec<Option<CachePage>>,
    /// Streams of commits and parks.
    pub noted: BTreeSet<u64>,
}

/// A committed page.
#[derive(Debug)]
pub(in crate::lifecycle) struct CachePage {
    pub users: Vec<User>,
    pub byte: Option<u8>,
}

/// Bytes that were copied to the host, to be compared.
#[derive(Debug)]
pub(super) struct Look {
    pub slot: u64,
    pub byte: u8,
    pub done: Event,
    /// The block, or the cache.
    pub of: u64,
}

/// Returns true if work of another stream than `stream` is neither recorded nor over.
pub(super) fn users_work(user: &User, stream: u64) -> bool {
    user.worked && !user.recorded && user.stream != stream
}

/// Returns the streams that later work on the memory is ordered after.
pub(super) fn later_than(users: &[User], writes: bool) -> Vec<u64> {
    users.iter().filter(|user| writes || user.writes).map(|user| user.stream).collect()
}

/// Notes work of a stream, which was ordered after the users it conflicts with.
pub(super) fn note(users: &mut Vec<User>, stream: u64, writes: bool) {
    if writes {
        users.clear();
    }
    match users.iter_mut().find(|user| user.stream == stream) {
        Some(user) => {
            user.worked = true;
            user.recorded = false;
        }
        None => users.push(User { stream, worked: true, writes, recorded: false }),
    }
}
