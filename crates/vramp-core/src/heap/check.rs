//! What a heap tells the audit and the census.

use super::pieces::State;
use super::{NONE, StreamHeap};
use crate::Bytes;
use crate::pool::{BLOCK_ALIGN, Pool};
use crate::pool::{Census, PartKind, StretchPart};

impl StreamHeap {
    /// Tells the census, which knows slabs only as a whole, what is in them.
    pub fn count_into(&self, census: &mut Census) {
        for piece in &self.pieces {
            let bytes = Bytes::new(u64::from(piece.units) * BLOCK_ALIGN);
            match &piece.state {
                State::Vacant | State::Free => continue,
                State::Waiting { .. } => census.waiting += bytes,
                State::Used { requested, .. } => {
                    census.used += bytes;
                    census.requested += Bytes::new(*requested);
                }
            }
            census.slab_free -= bytes;
        }
    }

    /// What is in its slabs, by address within each.
    pub fn parts(&self) -> Vec<StretchPart> {
        let mut parts = Vec::new();
        for home in self.slabs.iter().flatten() {
            let mut piece = home.first;
            while piece != NONE {
                let known = &self.pieces[piece as usize];
                let (kind, requested) = match &known.state {
                    State::Used { requested, .. } => (PartKind::Block, *requested),
                    State::Waiting { .. } => (PartKind::Waiting, 0),
                    State::Free | State::Vacant => (PartKind::Free, 0),
                };
                parts.push(StretchPart {
                    at: home.slab.at.plus(u64::from(known.start) * BLOCK_ALIGN),
                    len: Bytes::new(u64::from(known.units) * BLOCK_ALIGN),
                    requested: Bytes::new(requested),
                    stream: self.stream,
                    kind,
                });
                piece = known.next;
            }
        }
        parts
    }

    /// Checks every slab from end to end, and that the pool knows it.
    pub fn audit(&self, pool: &Pool) -> Result<(), crate::Inconsistency> {
        self.check(pool).map_err(|what| crate::Inconsistency { what })
    }

    /// How many slabs it has.
    pub fn slab_count(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    fn check(&self, pool: &Pool) -> Result<(), String> {
        let (mut bytes, mut empty_bytes) = (0, 0);
        for (number, home) in self.slabs.iter().enumerate() {
            let Some(home) = home else { continue };
            pool.check_slab(&home.slab)?;
            let (mut at, mut taken, mut piece, mut prev) = (0, 0, home.first, NONE);
            let mut last_free = false;
            while piece != NONE {
                let known = &self.pieces[piece as usize];
                let free = known.state == State::Free;
                if known.start != at || known.prev != prev || known.slab != number as u32 {
                    return Err(format!("slab {number}: piece {piece} is out of place"));
                }
                if known.state == State::Vacant || (free && last_free) {
                    return Err(format!("slab {number}: piece {piece} should have been merged"));
                }
                if !free {
                    taken += known.units;
                }
                at += known.units;
                last_free = free;
                prev = piece;
                piece = known.next;
            }
            if u64::from(at) * BLOCK_ALIGN != home.slab.len || taken != home.taken_units {
                return Err(format!("slab {number}: {at} units, {taken} taken, do not add up"));
            }
            bytes += home.slab.len;
            if taken == 0 {
                empty_bytes += home.slab.len;
            }
        }
        if (bytes, empty_bytes) != (self.bytes, self.empty_bytes) {
            return Err(format!("{} has {bytes} bytes in slabs, {empty_bytes} empty", self.stream));
        }
        let free: usize = self.pieces.iter().filter(|piece| piece.state == State::Free).count();
        let binned = self.binned();
        if free != binned {
            return Err(format!("{free} free pieces, {binned} in bins"));
        }
        Ok(())
    }
}
