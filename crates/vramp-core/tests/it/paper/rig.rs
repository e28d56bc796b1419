//! A pool on paper with a few streams, counted in pages: what each malloc costs.

use std::collections::BTreeMap;

use super::Paper;
use super::shell::{Placed, Shell};
use vramp_core::{Bytes, Policy, Pool, PoolConfig, Range, StreamId};

pub const PAGE: Bytes = Bytes::mib(2);

/// A pool of whole pages with streams on which no work ends by itself.
pub struct Rig {
    pub shell: Shell,
    pub streams: Vec<StreamId>,
}

/// Chunks moved, chunks created, and waits put on streams.
pub type Cost = (u64, u64, usize);

impl Rig {
    /// A pool with that many streams and pages at most.
    pub fn with(policy: Policy, streams: usize, limit: Option<u64>) -> Rig {
        let span = Bytes::gib(1);
        let limit = limit.map(|pages| PAGE * pages);
        Rig::on(PoolConfig { page: PAGE, span, first_span: span, limit, policy }, streams)
    }

    pub fn on(config: PoolConfig, streams: usize) -> Rig {
        let mut shell = Shell {
            pool: Pool::new(config).expect("the configuration is possible"),
            heaps: Vec::new(),
            paper: Paper::new(Bytes::gib(4), false, BTreeMap::new()),
            quarantined: false,
            arenas: Vec::new(),
            polls: 0,
        };
        let streams = (0..streams).map(|_| shell.add_stream()).collect();
        Rig { shell, streams }
    }

    pub fn try_malloc(&mut self, pages: u64, stream: usize) -> Option<Placed> {
        let placed = self.shell.malloc(PAGE * pages, self.streams[stream]);
        self.shell.pool.audit().expect("malloc keeps every invariant");
        placed
    }

    /// Allocates on the stream of this number.
    pub fn malloc(&mut self, pages: u64, stream: usize) -> Placed {
        self.try_malloc(pages, stream).expect("there is memory")
    }

    /// A malloc with what it cost.
    pub fn costly(&mut self, pages: u64, stream: usize) -> (Placed, Cost) {
        let before = self.shell.pool.counters();
        let waits = self.waits();
        let placed = self.malloc(pages, stream);
        let after = self.shell.pool.counters();
        let moved = after.chunks_moved - before.chunks_moved;
        let created = after.chunks_created - before.chunks_created;
        (placed, (moved, created, self.waits() - waits))
    }

    pub fn free(&mut self, placed: Placed, stream: usize) {
        self.shell.free(placed, self.streams[stream]);
        self.shell.pool.audit().expect("free keeps every invariant");
    }

    /// Lets all work of a stream end.
    pub fn finish(&mut self, stream: usize) {
        self.shell.paper.queues.advance(self.streams[stream], usize::MAX);
    }

    pub fn waits(&self) -> usize {
        self.shell.paper.queues.waits()
    }

    pub fn layout(&self, newest: Option<Placed>) -> String {
        self.shell.pool.layout(newest.map(|placed| placed.block.id))
    }
}

pub fn range(placed: Placed) -> Range {
    Range { at: placed.block.at, len: placed.block.len }
}
