//! A model of a device: what plans do to addresses and chunks, by the driver's rules alone.
//!
//! It has no table of the pool's regions. A call that a driver would refuse for its arguments is a
//! bug of the plan and panics; a call that fails by lot changes nothing.

pub mod queues;
pub mod rig;
pub mod shell;

use std::collections::BTreeMap;

use queues::{Queues, Work};
use vramp_core::{Bytes, ChunkId, Op, Range, StreamId};

/// More addresses than this are never had at a time.
const RESERVATION_MOST: Bytes = Bytes::gib(8);

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The card, or the space of addresses, is full.
    Full,
    /// Anything else.
    Other,
}

/// Work that touched a piece of a chunk.
#[derive(Clone, Debug)]
struct Touch {
    offset: u64,
    len: u64,
    /// Which block's life it belongs to: its own uses need no order among themselves.
    life: u64,
    work: Work,
}

#[derive(Clone, Debug)]
struct Chunk {
    len: u64,
    touches: Vec<Touch>,
}

#[derive(Clone, Debug)]
struct Mapping {
    len: u64,
    chunk: ChunkId,
    access: bool,
    /// What was queued on memory at this address.
    works: Vec<Work>,
}

/// A piece of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    pub chunk: ChunkId,
    pub offset: u64,
    pub len: u64,
}

/// The device. Addresses are the numbers of the pool's spots.
#[derive(Clone, Debug)]
pub struct Paper {
    pub queues: Queues,
    /// The calls that fail, by their number.
    pub failures: BTreeMap<usize, Failure>,
    pub calls: usize,
    memory: u64,
    /// Grants no more addresses at a time than needed.
    stingy: bool,
    spans: Vec<u64>,
    chunks: BTreeMap<ChunkId, Chunk>,
    mappings: BTreeMap<u64, Mapping>,
}

impl Paper {
    pub fn new(memory: Bytes, stingy: bool, failures: BTreeMap<usize, Failure>) -> Paper {
        Paper {
            queues: Queues::default(),
            failures,
            calls: 0,
            memory: memory.count(),
            stingy,
            spans: Vec::new(),
            chunks: BTreeMap::new(),
            mappings: BTreeMap::new(),
        }
    }

    /// Makes one call. A reservation returns how many addresses it got.
    pub fn call(&mut self, op: Op) -> Result<Option<Bytes>, Failure> {
        self.calls += 1;
        if let Some(&failure) = self.failures.get(&self.calls) {
            return Err(failure);
        }
        match op {
            Op::Reserve { span, least, wanted } => {
                assert_eq!(span.index(), self.spans.len(), "spans are numbered in order");
                let got = if self.stingy { least } else { wanted };
                if got > RESERVATION_MOST {
                    return Err(Failure::Full);
                }
                self.spans.push(got.count());
                return Ok(Some(got));
            }
            Op::Create { chunk, len } => {
                if self.chunk_bytes() + len.count() > self.memory {
                    return Err(Failure::Full);
                }
                let new = Chunk { len: len.count(), touches: Vec::new() };
                assert!(self.chunks.insert(chunk, new).is_none(), "{chunk} exists already");
            }
            Op::Map { chunk, at, len } => {
                assert_eq!(self.chunks[&chunk].len, len.count(), "{chunk} is mapped whole");
                let span = self.spans[at.span().index()];
                assert!(at.offset().count() + len.count() <= span, "{op:?} leaves the span");
                let (start, end) = (at.number(), at.number() + len.count());
                let before = self.mappings.range(..end).next_back();
                assert!(
                    before.is_none_or(|(at, old)| at + old.len <= start),
                    "{op:?} over another"
                );
                let mapping = Mapping { len: len.count(), chunk, access: false, works: Vec::new() };
                self.mappings.insert(start, mapping);
            }
            Op::SetAccess(range) => {
                for at in self.whole_mappings(range) {
                    self.mappings.get_mut(&at).expect("just listed").access = true;
                }
            }
            Op::Unmap(range) => {
                for at in self.whole_mappings(range) {
                    let gone = self.mappings.remove(&at).expect("just listed");
                    let busy = gone.works.iter().find(|&&work| !self.queues.is_over(work));
                    assert_eq!(busy, None, "{op:?} takes memory from under work in flight");
                }
            }
            Op::Release { chunk } => {
                let mapped = self.mappings.values().any(|mapping| mapping.chunk == chunk);
                assert!(!mapped, "{chunk} is released while mapped: its memory would stay taken");
                assert!(self.chunks.remove(&chunk).is_some(), "{chunk} does not exist");
            }
            Op::Record(mark) => self.queues.record(mark),
            Op::Wait { stream, on } => self.queues.wait_for_mark(stream, on),
        }
        Ok(None)
    }

    /// Queues work of `stream` on a block's bytes. What others did there must be ordered before.
    pub fn touch(&mut self, stream: StreamId, life: u64, block: Range) {
        for Piece { chunk, offset, len } in self.pieces(block) {
            for old in &self.chunks[&chunk].touches {
                let apart = old.offset >= offset + len || old.offset + old.len <= offset;
                assert!(
                    apart || old.life == life || self.queues.is_ordered(stream, old.work),
                    "{stream} gets bytes of {chunk} that unordered work may touch: {old:?}"
                );
            }
        }
        let work = self.queues.work(stream);
        for Piece { chunk, offset, len } in self.pieces(block) {
            let touches = &mut self.chunks.get_mut(&chunk).expect("just listed").touches;
            touches.retain(|old| !self.queues.is_over(old.work));
            touches.push(Touch { offset, len, life, work });
        }
        let (start, end) = (block.at.number(), block.at.number() + block.len.count());
        for (at, mapping) in self.mappings.range_mut(..end).rev() {
            if at + mapping.len <= start {
                break;
            }
            mapping.works.retain(|&old| !self.queues.is_over(old));
            mapping.works.push(work);
        }
    }

    /// The physical memory behind a range, every byte of which must be there and accessible.
    pub fn pieces(&self, range: Range) -> Vec<Piece> {
        let (start, end) = (range.at.number(), range.at.number() + range.len.count());
        let mut pieces = Vec::new();
        let mut here = start;
        while here < end {
            let (at, mapping) = self.mappings.range(..=here).next_back().expect("a mapping");
            assert!(mapping.access && here < at + mapping.len, "{here:#x} of {range:?} is no use");
            let len = end.min(at + mapping.len) - here;
            pieces.push(Piece { chunk: mapping.chunk, offset: here - at, len });
            here += len;
        }
        pieces
    }

    pub fn chunk_bytes(&self) -> u64 {
        self.chunks.values().map(|chunk| chunk.len).sum()
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.mappings.values().map(|mapping| mapping.len).sum()
    }

    pub fn addresses(&self) -> u64 {
        self.spans.iter().sum()
    }

    /// The starts of the mappings that make up a range, end to end.
    fn whole_mappings(&self, range: Range) -> Vec<u64> {
        let (start, end) = (range.at.number(), range.at.number() + range.len.count());
        let mut starts = Vec::new();
        let mut here = start;
        while here < end {
            let mapping = self.mappings.get(&here);
            here += mapping.unwrap_or_else(|| panic!("{range:?} is not whole at {here:#x}")).len;
            starts.push(here);
        }
        assert_eq!(here, end, "{range:?} ends inside a mapping");
        starts.rotate_right(1);
        if let Some(first) = starts.first_mut() {
            *first = start;
        }
        starts
    }
}
