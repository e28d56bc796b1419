//! Shedding: when the pool is short, a heap gives back what it does not use.
//!
//! What can be shed is found in the bins of large pieces and in the list of empty slabs. A piece is
//! cut out of its slab, whose two sides become slabs of their own; the shorter side's pieces get the
//! new slab's number.
//!
//! Growth: a heap without anything to shed costs O(1), whether it has 10 or 100,000 live blocks. A
//! piece costs O(log n), and the pieces of the shorter side of its slab: O(log n) for each piece of
//! a slab until all of it is gone, because a piece is renumbered only into a slab of at most half as
//! many.

use crate::heap::pieces::{NONE, State};
use crate::heap::slabs::HeapSlab;
use crate::heap::stream_heap::StreamHeap;
use crate::pool::{Pool, Slab};

/// Free pieces of at least `2^SHED_LEVEL` units leave a slab: 2 MiB, a page. A shorter one frees no
/// chunk, and large blocks that are placed there keep the heap's slab in pieces.
const SHED_LEVEL: u32 = 12;

impl StreamHeap {
    /// True if the heap has something to give back. O(1).
    #[inline]
    pub fn may_shed(&self) -> bool {
        self.bins.has_from(SHED_LEVEL) || !self.slabs.none_empty()
    }

    /// Gives the pool what the heap does not need: empty slabs, and large free pieces.
    pub fn shed(&mut self, pool: &mut Pool) {
        self.promote(pool);
        if !self.may_shed() {
            return;
        }
        let empty = self.slabs.empty().map(|number| self.slabs[number].first);
        let large = self.bins.from(SHED_LEVEL, &self.pieces);
        let at =
            |piece: u32| self.slabs[self.pieces[piece].slab].origin + self.pieces[piece].offset();
        let mut found: Vec<_> = empty.chain(large).map(|piece| (at(piece), piece)).collect();
        found.sort_unstable();
        found.dedup();
        pool.note_looked_at(found.len());
        for (_, piece) in found {
            self.shed_piece(piece, pool);
        }
    }

    /// Gives the pool a free piece, or all of its slab if that is empty.
    fn shed_piece(&mut self, piece: u32, pool: &mut Pool) {
        let number = self.pieces[piece].slab;
        if self.slabs[number].taken_units == 0 {
            let slab = self.remove_empty(number);
            pool.take_back(slab, self.stream);
            return;
        }
        self.bins.remove(piece, &mut self.pieces);
        self.slabs.bytes -= self.pieces[piece].len();
        let front = match self.pieces[piece].next {
            NONE => number,
            behind => self.split(number, piece, behind, pool),
        };
        let gone = self.cut_last(front, piece, pool);
        pool.take_back(gone, self.stream);
    }

    /// Cuts a slab between two pieces. Returns the number of its front.
    fn split(&mut self, number: u32, last: u32, behind: u32, pool: &mut Pool) -> u32 {
        let origin = self.slabs[number].origin;
        let offset = origin + self.pieces[behind].offset() - self.slabs[number].slab.at;
        let back = pool.split_slab(&mut self.slabs[number].slab, offset);
        let renumber_front = self.is_front_shorter(last, behind, pool);
        self.pieces[last].next = NONE;
        self.pieces[behind].prev = NONE;
        if !renumber_front {
            let moved = self.slabs.add(HeapSlab::new(back, origin, behind, 0));
            self.renumber(number, moved);
            return number;
        }
        let front = std::mem::replace(&mut self.slabs[number].slab, back);
        let first = std::mem::replace(&mut self.slabs[number].first, behind);
        let moved = self.slabs.add(HeapSlab::new(front, origin, first, 0));
        self.renumber(number, moved);
        moved
    }

    /// True if a slab has no more pieces up to `last` than from `behind` on. O(the fewer of them).
    fn is_front_shorter(&self, last: u32, behind: u32, pool: &Pool) -> bool {
        let (mut front, mut back) = (last, behind);
        loop {
            pool.note_looked_at(1);
            front = self.pieces[front].prev;
            if front == NONE {
                return true;
            }
            back = self.pieces[back].next;
            if back == NONE {
                return false;
            }
        }
    }

    /// Makes all pieces of a new slab its own, and its taken units no longer those of slab `from`.
    fn renumber(&mut self, from: u32, to: u32) {
        let (mut piece, mut taken) = (self.slabs[to].first, 0);
        while piece != NONE {
            let moved = &mut self.pieces[piece];
            moved.slab = to;
            if moved.state != State::Free {
                taken += moved.units;
            }
            piece = moved.next;
        }
        self.slabs[to].taken_units = taken;
        self.slabs[from].taken_units -= taken;
    }

    /// Cuts the last piece off a slab: it is free and in no bin. The slab goes with it if that was
    /// all.
    fn cut_last(&mut self, number: u32, piece: u32, pool: &mut Pool) -> Slab {
        let prev = self.pieces[piece].prev;
        let at = self.slabs[number].origin + self.pieces[piece].offset();
        self.pieces.vacate(piece);
        if prev == NONE {
            return self.slabs.remove(number).slab;
        }
        self.pieces[prev].next = NONE;
        let slab = &mut self.slabs[number].slab;
        let offset = at - slab.at;
        pool.split_slab(slab, offset)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::pool::{Attempt, Block, Mixed, Policy, PoolConfig, Request, Step};
    use crate::{Bytes, StreamId};

    const MIB: u64 = 1 << 20;

    struct Rig {
        pool: Pool,
        heap: StreamHeap,
    }

    impl Rig {
        fn new() -> Rig {
            let policy = Policy::Mixed(Mixed::default());
            let (page, span) = (Bytes::mib(2), Bytes::tib(1));
            let config = PoolConfig { page, span, first_span: span, limit: None, policy };
            let mut pool = Pool::new(config).expect("the configuration is possible");
            let stream = pool.add_stream();
            Rig { pool, heap: StreamHeap::new(stream) }
        }

        fn stream(&self) -> StreamId {
            self.heap.stream()
        }

        fn add_slab(&mut self, len: Bytes) {
            let request = Request { size: len, stream: self.stream() };
            let mut attempt = Attempt::slab(request, len);
            loop {
                match self.pool.place(&mut attempt) {
                    Step::Slab(slab) => return self.heap.add(slab),
                    Step::Perform(plan) => self.pool.settle(plan),
                    Step::Gather => {}
                    step => panic!("{step:?}: there is no limit"),
                }
            }
        }

        fn take(&mut self, len: Bytes) -> Block {
            self.heap.take(len).expect("a slab has room")
        }

        fn free(&mut self, block: &Block) {
            let freed = self.heap.free_in_order(block.id).expect("the block is live");
            assert_eq!(freed, crate::heap::Freed::Kept);
        }

        /// What a shed looks at.
        fn shed(&mut self) -> u64 {
            let before = self.pool.counters().looked_at;
            self.heap.shed(&mut self.pool);
            self.heap.audit(&self.pool).expect("the heap is whole");
            self.pool.audit().expect("the pool is whole");
            assert!(!self.heap.may_shed());
            self.pool.counters().looked_at - before
        }

        fn free_in_pool(&self) -> u64 {
            self.pool.census().free.count()
        }
    }

    #[test]
    fn pieces_shorter_than_a_page_stay() {
        let mut rig = Rig::new();
        rig.add_slab(Bytes::mib(32));
        let blocks: Vec<Block> = (0..32).map(|_| rig.take(Bytes::mib(1))).collect();
        rig.free(&blocks[3]);
        rig.heap.shed(&mut rig.pool);
        assert_eq!(rig.free_in_pool(), 0);
        rig.free(&blocks[4]);
        rig.heap.shed(&mut rig.pool);
        assert_eq!(rig.free_in_pool(), Bytes::mib(2).count());
    }

    #[test]
    fn a_heap_without_large_pieces_looks_at_none_of_its_blocks() {
        for blocks in [10, 1_000, 60_000] {
            let mut rig = Rig::new();
            rig.add_slab(Bytes::mib(32));
            let blocks: Vec<Block> = (0..blocks).map(|_| rig.take(Bytes::new(512))).collect();
            rig.shed();
            assert_eq!(rig.shed(), 0, "{} blocks", blocks.len());
            // Holes of 1 MiB stay.
            for hole in blocks.chunks(2048).step_by(2).filter(|hole| hole.len() == 2048) {
                hole.iter().for_each(|block| rig.free(block));
            }
            assert_eq!(rig.shed(), 0, "{} blocks", blocks.len());
        }
    }

    #[test]
    fn a_large_piece_leaves_and_the_blocks_on_both_sides_stay() {
        for hole in [0..4096, 4096..8192, 40_000..44_100, 61_000..65_536] {
            let mut rig = Rig::new();
            rig.add_slab(Bytes::mib(32));
            let blocks: Vec<Block> = (0..65_536).map(|_| rig.take(Bytes::new(512))).collect();
            hole.clone().for_each(|block| rig.free(&blocks[block]));
            let free = rig.free_in_pool();
            let looked = rig.shed();
            assert_eq!(rig.free_in_pool() - free, hole.len() as u64 * 512);
            let shorter = hole.start.min(blocks.len() - hole.end) as u64;
            assert!(looked <= shorter + 8, "{hole:?}: {looked}");
            for (number, block) in blocks.iter().enumerate() {
                let known = rig.heap.block(block.id);
                assert_eq!(known.ok(), (!hole.contains(&number)).then_some(*block));
            }
            for (number, block) in blocks.iter().enumerate() {
                if !hole.contains(&number) {
                    rig.free(block);
                }
            }
            rig.shed();
            assert_eq!(rig.pool.slab_count(), 0, "all of it is the pool's again");
            assert_eq!(rig.pool.census().free.count() % (32 * MIB), 0);
        }
    }

    #[test]
    fn holes_that_come_one_by_one_cost_a_slab_a_few_looks_a_block() {
        let mut rig = Rig::new();
        rig.add_slab(Bytes::mib(32));
        let blocks: Vec<Block> = (0..65_536).map(|_| rig.take(Bytes::new(512))).collect();
        // Each splits what is left in the middle.
        let (mut looked, mut parts) = (0, VecDeque::from([(0, 16)]));
        while let Some((start, end)) = parts.pop_front() {
            if end - start > 2 {
                let middle = usize::midpoint(start, end);
                let hole = &blocks[middle * 4096..(middle + 1) * 4096];
                hole.iter().for_each(|block| rig.free(block));
                looked += rig.shed();
                parts.extend([(start, middle), (middle + 1, end)]);
            }
        }
        assert!(looked <= 65_536 * 4 / 2, "{looked}");
    }
}
