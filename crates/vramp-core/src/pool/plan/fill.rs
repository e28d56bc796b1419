//! Plans that fill addresses with chunks, and plans that reserve addresses.
//!
//! Plans that unmap retired mappings.

use crate::Bytes;
use crate::ids::{ArenaId, Mark, PoolAddr, SpanId, StreamId};
use crate::pool::config::Policy;
use crate::pool::ops::{Change, Fill, Op, Order, Plan, Range};
use crate::pool::regions::Kind;
use crate::pool::view::View;

/// Addresses to fill, and the chunks to fill them with.
#[derive(Clone, Debug)]
pub(in crate::pool) struct Filling {
    pub at: PoolAddr,
    pub fills: Vec<Fill>,
    pub stream: StreamId,
    /// Marks that the stream waits for first.
    pub waits: Vec<Mark>,
    /// The arena whose addresses these are.
    pub arena: Option<ArenaId>,
}

/// How addresses come to be filled.
#[derive(Debug)]
pub(in crate::pool) enum FillPlan {
    /// By this plan.
    Fill(Plan),
    /// This plan unmaps what is in the way; then plan again.
    ClearFirst(Plan),
}

impl FillPlan {
    /// The plan to perform next.
    pub(in crate::pool) fn next(self) -> Plan {
        match self {
            FillPlan::Fill(plan) | FillPlan::ClearFirst(plan) => plan,
        }
    }
}

impl View<'_> {
    /// The plan that fills addresses, or the plan that unmaps retired mappings there first.
    pub(in crate::pool) fn fill_plan(self, filling: Filling) -> FillPlan {
        let Filling { at, fills, stream, waits, arena } = filling;
        let mut ops = Vec::new();
        let mut in_the_way: Vec<Range> = Vec::new();
        let mut access: Vec<Range> = Vec::new();
        let mut retires_present = false;
        let present = self.streams.now(stream);
        let mut here = at;
        for &fill in &fills {
            let (chunk, len) = (fill.chunk(), fill.len());
            if let Some(from) = fill.from() {
                retires_present |= self.source_mark(chunk, from) == present;
            }
            if !matches!(fill, Fill::Reactivate { .. }) {
                if let Fill::New { .. } = fill {
                    ops.push(Op::Create { chunk, len });
                }
                in_the_way.extend(self.retired_within(here, len));
                ops.push(Op::Map { chunk, at: here, len });
                Range::new(here, len).append(&mut access);
            }
            here = here + len;
        }
        if !in_the_way.is_empty() {
            in_the_way.sort_by_key(|range| range.at);
            in_the_way.dedup();
            return FillPlan::ClearFirst(Plan::unmap(in_the_way));
        }
        ops.extend(access.into_iter().map(Op::SetAccess));
        let mut order = self.order(stream, waits);
        ops.extend(ordering_ops(&order));
        // Old addresses may be unmapped once the work before the move is over, and only an event
        // recorded after it shows that.
        if retires_present
            && !order.records.contains(&present)
            && !self.streams.is_out_of_reach(present)
        {
            order.records.push(present);
            ops.push(Op::Record(present));
        }
        let change = match arena {
            Some(arena) => Change::Back { arena, at, fills, order },
            None => Change::Fill { at, fills, order },
        };
        FillPlan::Fill(Plan { ops, change })
    }

    /// The waits of a stream, and the events to record first.
    pub(in crate::pool) fn order(self, stream: StreamId, waits: Vec<Mark>) -> Order {
        let unrecorded = |&mark: &Mark| self.streams.is_unrecorded(mark);
        let records = waits.iter().copied().filter(unrecorded).collect();
        Order { stream, waits, records }
    }

    fn retired_within(self, at: PoolAddr, len: Bytes) -> Vec<Range> {
        self.retired
            .range(..at + len)
            .rev()
            .map(|(_, &key)| self.regions.get(key))
            .take_while(|region| region.end() > at)
            .map(|region| Range::new(region.at, region.len))
            .collect()
    }

    /// A plan that reserves a span of at least `least` bytes. Spans grow with the pool: many small
    /// pools share the device's addresses, and a large one has few spans.
    pub(in crate::pool) fn reserve_plan(self, least: Bytes) -> Plan {
        let span = SpanId::new(
            u32::try_from(self.regions.span_count()).expect("fewer than four billion spans"),
        );
        let first = self.config.first_span.min(self.config.span);
        let wanted = self.regions.addresses().clamp(first, self.config.span).max(least);
        let op = Op::Reserve { span, least, wanted };
        Plan { ops: vec![op], change: Change::Reserve { span, len: wanted } }
    }

    /// A plan that adds `len` bytes of new memory, free for `stream`, or one that reserves the
    /// addresses first. `None` if the limit forbids it, or if no span is that large.
    pub(in crate::pool) fn prefill(self, len: Bytes, stream: StreamId) -> Option<Plan> {
        let page = self.config.page;
        let len = len.checked_round_up(page)?;
        let possible = self.below_limit().min(PoolAddr::SPAN_LIMIT);
        if len.is_zero() || len > possible {
            return None;
        }
        let Some(hole) = self.holes.smallest_of(len) else {
            return Some(self.reserve_plan(len));
        };
        let chunk = match self.config.policy {
            Policy::Vpmm => page,
            Policy::Mixed(mixed) => mixed.chunk_max,
        };
        let mut fills = Vec::new();
        let mut rest = len;
        while !rest.is_zero() {
            let piece = rest.min(chunk);
            fills.push(Fill::New { chunk: self.chunks.upcoming(fills.len()), len: piece });
            rest -= piece;
        }
        let filling = Filling { at: hole.at, fills, stream, waits: Vec::new(), arena: None };
        Some(self.fill_plan(filling).next())
    }
}

/// Records where needed, then waits.
pub(in crate::pool) fn ordering_ops(order: &Order) -> Vec<Op> {
    let recording = order.records.iter().map(|&mark| Op::Record(mark));
    let waiting = order.waits.iter().map(|&on| Op::Wait { stream: order.stream, on });
    recording.chain(waiting).collect()
}

impl View<'_> {
    /// A plan that unmaps at most `limit` retired mappings whose work is over, neighbours in one
    /// call. `None` if there are none.
    pub(in crate::pool) fn unmap_retired(self, limit: Option<usize>) -> Option<Plan> {
        let mut ranges: Vec<Range> = Vec::new();
        let mut found = 0;
        for &key in self.retired.values() {
            if Some(found) == limit {
                break;
            }
            let region = self.regions.get(key);
            let Kind::Retired { mark, .. } = region.kind else {
                panic!("region {key} is indexed as retired");
            };
            if !self.streams.is_over(mark) {
                continue;
            }
            found += 1;
            Range::new(region.at, region.len).append(&mut ranges);
        }
        (!ranges.is_empty()).then(|| Plan::unmap(ranges))
    }
}
