//! The heap's part of the audit and of the census.

use crate::Bytes;
use crate::heap::pieces::{NONE, State, bytes_of};
use crate::heap::stream_heap::StreamHeap;
use crate::pool::{BLOCK_ALIGN, Census, FreeParts, Inconsistency, PartKind, Pool, StretchPart};

impl StreamHeap {
    /// Adds what is in the heap's slabs to a census that counts slabs as free.
    pub fn count_into(&self, census: &mut Census) {
        for piece in self.pieces.iter() {
            let len = piece.len();
            match &piece.state {
                State::Vacant | State::Free => continue,
                State::Waiting => census.waiting += len,
                State::Used { requested, .. } => {
                    census.used += len;
                    census.requested += *requested;
                }
            }
            census.slab_free -= len;
        }
    }

    /// Freed and free memory in its slabs, by whether its slab is wholly free. O(n).
    pub fn free_parts(&self) -> FreeParts {
        let mut counted = FreeParts::default();
        for piece in self.pieces.iter() {
            match piece.state {
                State::Free if self.slabs[piece.slab].taken_units == 0 => {
                    counted.whole.add(piece.len());
                }
                State::Free => counted.split.add(piece.len()),
                State::Waiting => counted.waiting.add(piece.len()),
                State::Used { .. } | State::Vacant => {}
            }
        }
        counted
    }

    /// The parts of its slabs, by address within each.
    pub fn parts(&self) -> Vec<StretchPart> {
        let mut parts = Vec::new();
        for (_, home) in self.slabs.iter() {
            let mut next = home.first;
            while next != NONE {
                let piece = &self.pieces[next];
                let (kind, requested) = match &piece.state {
                    State::Used { requested, .. } => (PartKind::Block, *requested),
                    State::Waiting => (PartKind::Waiting, Bytes::ZERO),
                    State::Free | State::Vacant => (PartKind::Free, Bytes::ZERO),
                };
                parts.push(StretchPart {
                    at: home.origin + piece.offset(),
                    len: piece.len(),
                    requested,
                    stream: self.stream,
                    kind,
                });
                next = piece.next;
            }
        }
        parts
    }

    /// Checks every slab from end to end, and that the pool has it.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(&self, pool: &Pool) -> Result<(), Inconsistency> {
        self.check(pool).map_err(|what| Inconsistency { what })
    }

    /// Bytes of its slabs. O(1).
    pub fn slab_bytes(&self) -> Bytes {
        self.slabs.bytes
    }

    /// Number of its slabs.
    pub fn slab_count(&self) -> usize {
        self.slabs.iter().count()
    }

    fn check(&self, pool: &Pool) -> Result<(), String> {
        let (mut bytes, mut empty_bytes, mut empty) = (Bytes::ZERO, Bytes::ZERO, 0);
        for (number, home) in self.slabs.iter() {
            pool.check_slab(&home.slab)?;
            let start = (home.slab.at - home.origin).whole(BLOCK_ALIGN) as u32;
            let (mut at, mut taken, mut next, mut prev) = (start, 0, home.first, NONE);
            let mut last_free = false;
            while next != NONE {
                let piece = &self.pieces[next];
                let free = piece.state == State::Free;
                if piece.start != at || piece.prev != prev || piece.slab != number {
                    return Err(format!("slab {number}: piece {next} is out of place"));
                }
                if piece.state == State::Vacant || (free && last_free) {
                    return Err(format!("slab {number}: piece {next} should have been merged"));
                }
                if !free {
                    taken += piece.units;
                }
                at += piece.units;
                last_free = free;
                prev = next;
                next = piece.next;
            }
            if bytes_of(at - start) != home.slab.len || taken != home.taken_units {
                return Err(format!("slab {number}: {at} units, {taken} taken, do not add up"));
            }
            bytes += home.slab.len;
            if taken == 0 {
                empty_bytes += home.slab.len;
                empty += 1;
            }
        }
        if self.slabs.empty().filter(|&number| self.slabs[number].taken_units == 0).count() != empty
        {
            return Err(format!("{} does not list its {empty} empty slabs", self.stream));
        }
        if (bytes, empty_bytes) != (self.slabs.bytes, self.slabs.empty_bytes) {
            return Err(format!("{} has {bytes} bytes in slabs, {empty_bytes} empty", self.stream));
        }
        let free = self.pieces.iter().filter(|piece| piece.state == State::Free).count();
        let waiting = self.pieces.iter().filter(|piece| piece.state == State::Waiting).count();
        let listed = pool.waiting_in_heap(self.stream);
        if waiting != listed {
            return Err(format!("{} has {waiting} waiting pieces, {listed} listed", self.stream));
        }
        let binned = self.bins.count(&self.pieces);
        if free != binned {
            return Err(format!("{free} free pieces, {binned} in bins"));
        }
        Ok(())
    }
}
