//! Ordering a stream behind others on the device, so that it may use memory that they freed.

use crate::Bytes;
use crate::ids::{Mark, StreamId};
use crate::pool::ops::{Change, Plan};
use crate::pool::plan::fill::ordering_ops;
use crate::pool::regions::Kind;
use crate::pool::view::View;
use crate::waiting::add_mark;

impl View<'_> {
    /// A plan that orders `stream` behind other streams until `need` more bytes are reusable, or
    /// `None` if there is no such memory. Oldest memory first; an event is recorded where the
    /// memory was freed after the last one.
    pub(in crate::pool) fn order_others(self, stream: StreamId, need: Bytes) -> Option<Plan> {
        // A stream that captures may not wait for work outside of its graph.
        if self.streams.get(stream).held {
            return None;
        }
        let mut marks: Vec<Mark> = Vec::new();
        let mut found = Bytes::ZERO;
        for key in self.foreign(stream) {
            if found >= need {
                break;
            }
            let free = self.free_of(key);
            if free.marks().any(|mark| self.streams.is_out_of_reach(mark)) {
                continue;
            }
            found += self.regions.get(key).len;
            free.marks().for_each(|mark| add_mark(&mut marks, mark));
        }
        for entry in self.waiting.iter() {
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
                all().for_each(|mark| add_mark(&mut marks, mark));
            }
        }
        if found < need {
            let reachable = |mark: &Mark| !self.streams.is_out_of_reach(*mark);
            let in_heaps = self.heap_marks.iter().copied().filter(reachable);
            in_heaps.for_each(|mark| add_mark(&mut marks, mark));
        }
        marks.retain(|&mark| !self.streams.is_ordered(stream, mark));
        if marks.is_empty() && found.is_zero() {
            return None;
        }
        let order = self.order(stream, marks);
        Some(Plan { ops: ordering_ops(&order), change: Change::Order { order, need } })
    }
}
