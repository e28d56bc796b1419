//! Ordering a stream behind others on the device, so that it may use memory that they freed.

use crate::Bytes;
use crate::ids::{Mark, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::ops::{Change, Plan};
use crate::pool::plan::fill::ordering_ops;
use crate::pool::regions::Kind;
use crate::pool::view::View;
use crate::waiting::{Age, add_mark};

impl View<'_> {
    /// The marks of freed memory that no event covers yet, where one can be recorded.
    pub(in crate::pool) fn unrecorded_frees(self) -> Vec<Mark> {
        let now = self.unrecorded.iter().map(|&stream| self.streams.now(stream));
        now.filter(|&mark| self.can_be_recorded(mark)).collect()
    }

    /// The marks that freed blocks wait for and no event covers yet, where one can be recorded. A block
    /// that another stream used is freed without an event there.
    pub(in crate::pool) fn unrecorded_waits(self) -> impl Iterator<Item = Mark> {
        let wanted = self.waiting.latest_marks().chain(self.heap_waits.latest_marks());
        wanted.filter(move |&mark| self.can_be_recorded(mark))
    }

    /// A plan that orders `stream` behind other streams until `need` more bytes are reusable, or
    /// `None` if there is no such memory. Streams with the most free memory first; an event is recorded
    /// where memory was freed after the last one.
    pub(in crate::pool) fn order_others(self, stream: StreamId, need: Bytes) -> Option<Plan> {
        // A stream that captures may not wait for work outside of its graph.
        if self.streams.get(stream).held {
            return None;
        }
        let mut marks: Vec<Mark> = Vec::new();
        let (mut taken, mut taken_waiting): (Vec<RegionKey>, Vec<Age>) = (Vec::new(), Vec::new());
        let mut found = Bytes::ZERO;
        // One wait makes all free memory of a stream reusable: few streams, and large regions.
        let others =
            self.streams.iter().filter(|&(id, known)| id != stream && !known.free.is_empty());
        let mut others: Vec<(Bytes, StreamId)> =
            others.map(|(other, known)| (known.free.bytes(), other)).collect();
        others.sort_by_key(|&(bytes, other)| (std::cmp::Reverse(bytes), other));
        let least = self.chunks.smallest().unwrap_or_default().min(need);
        let regions = others
            .iter()
            .flat_map(|&(_, other)| self.streams.get(other).free.at_least(least).rev());
        for (_, len, key) in regions {
            if found >= need {
                break;
            }
            self.looked_at.add(1);
            let free = self.free_of(key);
            if free.marks().any(|mark| self.streams.is_out_of_reach(mark)) {
                continue;
            }
            // A build can move whole chunks only.
            let movable: Bytes =
                self.free_chunks.counts_in(key).map(|(len, count)| len * count).sum();
            let useful = if len >= need { len } else { movable };
            if useful.is_zero() {
                continue;
            }
            found += useful;
            taken.push(key);
            free.marks().for_each(|mark| add_mark(&mut marks, mark));
        }
        for (age, entry) in self.waiting.by_age() {
            if found >= need {
                break;
            }
            let region = self.regions.get(entry.item);
            if let Kind::Waiting { owner, epoch } = region.kind {
                let own = Mark { stream: owner, epoch };
                let all = || [own].into_iter().chain(entry.marks.iter().copied());
                if all().any(|mark| self.streams.is_out_of_reach(mark)) {
                    continue;
                }
                found += region.len;
                taken_waiting.push(age);
                all().for_each(|mark| add_mark(&mut marks, mark));
            }
        }
        if found < need {
            let reachable = |mark: &Mark| !self.streams.is_out_of_reach(*mark);
            let in_heaps = self.heap_waits.latest_marks().filter(reachable);
            in_heaps.for_each(|mark| add_mark(&mut marks, mark));
        }
        marks.retain(|&mark| !self.streams.is_ordered(stream, mark));
        if marks.is_empty() && found.is_zero() {
            return None;
        }
        let order = self.order(stream, marks);
        let ops = ordering_ops(&order);
        Some(Plan { ops, change: Change::Order { order, free: taken, waiting: taken_waiting } })
    }
}
