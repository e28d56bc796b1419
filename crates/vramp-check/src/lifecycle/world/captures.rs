//! Arenas, captures, graphs and leases.

use vramp::Bytes;
use vramp::graph::CaptureMode;
use vramp::peers::Preset;
use vramp_driver::{Event, Stream};

use super::model::{Arena, Capture, From, Graph, Lease, Named, later_than, note};
use super::{Done, Finding, World, way_of, words};
use crate::lifecycle::subject::{ArenaChoice, Refused, Way, Why};

impl World {
    pub(super) fn arena(
        &mut self,
        pool: u64,
        arena: u64,
        (monotone, order, mode): (u64, u64, u64),
    ) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let mode = self.mode_of(mode);
        let choice = ArenaChoice { monotone: monotone == 1, order: order == 1, mode };
        let made = self.subject.arena(pool, arena, choice);
        if self.preset != Preset::Vramp {
            return self.expect(made, &[Why::NotSupported]);
        }
        if self.allow(made, &[Why::OutOfMemory])?.is_some() {
            let state = Arena { pool, mode, users: Vec::new(), unguarded: false, dropped: false };
            self.arenas.add(arena, state);
        }
        Ok(true)
    }

    pub(super) fn drop_arena(&mut self, arena: u64, way: u64) -> Done {
        match self.arenas.get_mut(arena) {
            Some(state) if !state.dropped => state.dropped = true,
            _ => return Ok(false),
        }
        let dropped = self.subject.drop_arena(arena, way_of(way));
        self.allow(dropped, &[]).map(|_| true)
    }

    /// Records an event before the stream captures, for the work that ran on it.
    pub(super) fn enter(&mut self, stream: u64, capture: u64, before: Event) {
        if let Some(state) = self.streams.get_mut(stream) {
            state.capture = Some((capture, before));
        }
    }

    pub(super) fn begin(
        &mut self,
        arena: u64,
        stream: u64,
        capture: u64,
        attach: Option<CaptureMode>,
    ) -> Done {
        let (Some(state), Some(on)) = (self.arenas.get(arena), self.streams.get(stream)) else {
            return Ok(false);
        };
        let (pool, mode) = (state.pool, attach.unwrap_or(state.mode));
        let closed = !self.pools.has(pool);
        if state.dropped || closed {
            return Ok(false);
        }
        let busy = self.captures.0.iter().any(|(_, capture)| capture.arena == arena);
        if busy || !on.is_open() || on.capture.is_some() {
            if attach.is_some() {
                return Ok(false);
            }
            let expected: &[Why] = match (busy, on.is_open()) {
                (true, true) => &[Why::Busy],
                (true, false) => &[Why::Busy, Why::UnknownStream],
                (false, false) => &[Why::UnknownStream],
                // The memory may be too short before the driver refuses.
                (false, true) => &[Why::Capturing, Why::Driver, Why::OutOfMemory],
            };
            let begun = self.subject.begin(arena, stream, capture);
            return self.expect(begun, expected);
        }
        let raw = on.raw;
        let before = self.device.create_event().map_err(words)?;
        self.device.record(before, raw).map_err(words)?;
        let begun = match attach {
            None => self.subject.begin(arena, stream, capture),
            Some(mode) => {
                // The host waits for other streams' work on the arena.
                self.open_gates();
                self.device.begin_capture(raw, mode).map_err(words)?;
                self.subject.attach(arena, stream, capture)
            }
        };
        // A stream that captures may have used the arena, and cannot be waited for.
        let captures = if attach.is_some() { Why::Capturing } else { Why::Arena };
        if self.allow(begun, &[Why::OutOfMemory, Why::Arena, captures])?.is_none() {
            // A failure may keep the allocator from ending what it began.
            let is_left = self.is_faulty() && self.device.is_capturing(raw).map_err(words)?;
            if attach.is_some() || is_left {
                let graph = self.device.end_capture(raw).map_err(words)?;
                self.device.destroy_graph(graph).map_err(words)?;
            }
            self.device.destroy_event(before).map_err(words)?;
            return Ok(true);
        }
        self.enter(stream, capture, before);
        if let (Some(_), Some(arena)) = (attach, self.arenas.get_mut(arena)) {
            arena.unguarded = true;
        }
        let state = Capture {
            pool,
            arena,
            origin: stream,
            streams: vec![stream],
            attached: attach.is_some(),
            mode,
            invalid: false,
            users: Named::default(),
            before: Vec::new(),
            fills: Vec::new(),
        };
        self.captures.add(capture, state);
        Ok(true)
    }

    pub(super) fn fork(&mut self, capture: u64, from: u64, stream: u64) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        let Some(raw) = self.runs(stream) else { return Ok(false) };
        let goes_on = self.capture_of(from) == Some(capture);
        if state.invalid || !goes_on {
            return Ok(false);
        }
        let before = self.device.create_event().map_err(words)?;
        self.device.record(before, raw).map_err(words)?;
        self.order_captured(from, stream)?;
        self.enter(stream, capture, before);
        let state = self.captures.get_mut(capture).expect("it was found above");
        state.streams.push(stream);
        Ok(true)
    }

    /// Ends the capture of its streams for the program.
    pub(super) fn leave(&mut self, capture: u64) -> Result<Option<Capture>, Finding> {
        let Some(state) = self.captures.take(capture) else { return Ok(None) };
        let own = |stream: &u64| self.capture_of(*stream) == Some(capture);
        let streams = state.streams.iter().copied().filter(own).collect();
        self.release(streams);
        Ok(Some(state))
    }

    /// Notes that streams are part of no capture any more.
    pub(super) fn release(&mut self, streams: Vec<u64>) {
        for stream in streams {
            if let Some(stream) = self.streams.get_mut(stream)
                && let Some((_, before)) = stream.capture.take()
            {
                self.events.push(before);
            }
        }
    }

    pub(super) fn captures_now(&self, raw: Stream) -> bool {
        self.device.is_capturing(raw).unwrap_or(false)
    }

    /// Gives the blocks of a capture that is over to its graph.
    pub(super) fn escape(&mut self, capture: u64, arena: u64, graph: Option<u64>) {
        for (_, block) in &mut self.blocks.0 {
            if block.from == From::Capture(capture) {
                block.from = From::Graph(arena, graph);
            }
        }
    }

    pub(super) fn end(&mut self, capture: u64, way: u64, graph: u64) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        let (origin, arena, pool) = (state.origin, state.arena, state.pool);
        let (attached, mode, mut invalid) = (state.attached, state.mode, state.invalid);
        let closed = !self.pools.has(pool);
        let others: Vec<u64> = state.streams[1..].to_vec();
        // Closing its pool ended it, or tried to.
        if closed || self.capture_of(origin) != Some(capture) {
            if attached {
                return self.discard(capture, Way::Here);
            }
            let ended = self.subject.end(capture, graph, Way::Here);
            // A pool that was dropped may have left the driver's capture open.
            if self.capture_of(origin) == Some(capture)
                && let Some(raw) = self.raw(origin)
            {
                self.end_left(raw)?;
            }
            self.leave(capture)?;
            self.escape(capture, arena, None);
            return self.expect(ended, &[Why::Over, Why::Invalidated, Why::Closed]);
        }
        if way == 2 && mode != CaptureMode::Relaxed && !attached {
            let ended = self.subject.end(capture, graph, Way::Elsewhere);
            return self.expect(ended, &[Why::OtherThread]);
        }
        // A forked stream without work of its own need not be joined.
        let unjoined = way == 1 && !others.is_empty();
        if unjoined {
            invalid = true;
        } else if !invalid {
            for other in &others {
                self.order_captured(*other, origin)?;
            }
        }
        let raw = self.raw(origin).expect("a capturing stream cannot be destroyed");
        let mut exec = None;
        let ended = if attached {
            let driver_graph = self.device.end_capture(raw);
            let detached = self.subject.detach(capture, graph);
            match driver_graph {
                Ok(driver_graph) if detached.is_ok() => {
                    exec = Some(self.device.instantiate(driver_graph).map_err(words)?);
                    self.device.destroy_graph(driver_graph).map_err(words)?;
                    detached
                }
                Ok(driver_graph) => {
                    self.device.destroy_graph(driver_graph).map_err(words)?;
                    detached
                }
                Err(_) if invalid => {
                    // The hold is dropped, for there is no graph.
                    let dropped = self.subject.drop_graph(graph, Way::Here);
                    detached
                        .and(dropped)
                        .and(Err(Refused { why: Why::Invalidated, text: String::new() }))
                }
                Err(error) => return Err(words(error)),
            }
        } else {
            self.subject.end(capture, graph, way_of(u64::from(way == 2)))
        };
        let ok = match (ended, invalid) {
            (Ok(()), true) if self.is_faulty() || unjoined => true,
            (Ok(()), true) => return Err("an invalidated capture made a graph".to_owned()),
            (ended, true) => {
                self.expect(ended, &[Why::Invalidated])?;
                false
            }
            (ended, false) => self.allow(ended, &[])?.is_some(),
        };
        self.end_left(raw)?;
        let Some(state) = self.leave(capture)? else { return Ok(true) };
        self.escape(capture, arena, ok.then_some(graph));
        if ok {
            let outside = |block: &u64| {
                let from = self.blocks.get(*block).map(|block| block.from);
                from == Some(From::Pool)
            };
            let uses: Vec<u64> = state.users.names().into_iter().filter(outside).collect();
            let Capture { mut before, fills, origin, .. } = state;
            // Its memory is ready in the order of the stream that the arena was attached on.
            if attached && !before.contains(&origin) {
                before.push(origin);
            }
            let state = Graph { pool, arena, uses, before, fills, exec, attached, dead: false };
            self.graphs.add(graph, state);
        }
        Ok(true)
    }

    /// Ends the driver's capture of a stream if the subject could not.
    pub(super) fn end_left(&self, raw: Stream) -> Result<(), Finding> {
        if self.device.is_capturing(raw).map_err(words)?
            && let Ok(graph) = self.device.end_capture(raw)
        {
            self.device.destroy_graph(graph).map_err(words)?;
        }
        Ok(())
    }

    pub(super) fn discard(&mut self, capture: u64, way: Way) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        let (origin, arena) = (state.origin, state.arena);
        let raw = self.raw(origin);
        let discarded = self.subject.discard(capture, way);
        self.allow(discarded, &[])?;
        // The stream is gone with its group if the pool was dropped.
        if let Some(raw) = raw
            && self.capture_of(origin) == Some(capture)
            && self.captures_now(raw)
            && let Ok(graph) = self.device.end_capture(raw)
        {
            self.device.destroy_graph(graph).map_err(words)?;
        }
        self.leave(capture)?;
        self.escape(capture, arena, None);
        Ok(true)
    }

    pub(super) fn invalidate(&mut self, capture: u64) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        // Nothing is left to invalidate once the end of its pool has ended it. The call would be served,
        // and the free after it would wait for gates that only a later operation opens.
        let goes_on = self.raw(state.origin).is_some_and(|raw| self.captures_now(raw));
        if state.mode == CaptureMode::Relaxed || !goes_on {
            return Ok(false);
        }
        // No capturing thread may call this.
        if let Ok(at) = self.device.alloc_memory(Bytes::mib(2)) {
            self.device.free_memory(at).map_err(words)?;
        }
        let broken: Vec<u64> = self
            .captures
            .0
            .iter()
            .filter(|(_, capture)| {
                self.raw(capture.origin).is_none_or(|raw| self.device.capture_info(raw).is_err())
            })
            .map(|(name, _)| *name)
            .collect();
        for (name, capture) in &mut self.captures.0 {
            capture.invalid |= broken.contains(name);
        }
        Ok(!broken.is_empty())
    }

    pub(super) fn launch(&mut self, graph: u64, stream: u64, lease: u64) -> Done {
        let (Some(state), Some(on)) = (self.graphs.get(graph), self.streams.get(stream)) else {
            return Ok(false);
        };
        let (arena, pool, attached) = (state.arena, state.pool, state.attached);
        let (exec, dead) = (state.exec, state.dead);
        if !self.pools.has(pool) {
            if attached {
                return Ok(false);
            }
            let launched = self.subject.launch(graph, stream, lease);
            return self.expect(launched, &[Why::Closed]);
        }
        if dead {
            return Ok(false);
        }
        if !on.is_open() || on.capture.is_some() {
            if attached {
                return Ok(false);
            }
            let why = if on.is_open() { Why::Capturing } else { Why::UnknownStream };
            let launched = self.subject.launch(graph, stream, lease);
            return self.expect(launched, &[why]);
        }
        let raw = on.raw;
        let (uses, before) = (state.uses.clone(), state.before.clone());
        let fills = state.fills.clone();
        for block in &uses {
            let users = self.blocks.get(*block).map(|block| later_than(&block.users, true));
            for user in users.unwrap_or_default() {
                self.order(user, stream)?;
            }
        }
        for user in before {
            self.order(user, stream)?;
        }
        let shared = self.arenas.get(arena);
        let unguarded = shared.is_some_and(|arena| arena.unguarded);
        if unguarded {
            for user in shared.map(|arena| arena.users.clone()).unwrap_or_default() {
                self.order(user, stream)?;
            }
        }
        if attached {
            let Some(exec) = exec else { return Ok(false) };
            self.device.launch_graph(exec, raw).map_err(words)?;
        } else {
            let launched = self.subject.launch(graph, stream, lease);
            // No stream can wait for what ran on another one before it began to capture.
            let captures =
                self.shared || self.streams.0.iter().any(|(_, state)| state.capture.is_some());
            let busy = [Why::Busy, Why::OutOfMemory, Why::Capturing];
            let busy = if captures { &busy[..] } else { &busy[..2] };
            if self.allow(launched, busy)?.is_none() {
                return Ok(true);
            }
            self.leases.add(lease, Lease { graph, arena, stream });
        }
        for block in uses {
            if let Some(block) = self.blocks.get_mut(block) {
                note(&mut block.users, stream, true);
            }
        }
        for (block, byte) in fills {
            if let Some(block) = self.blocks.get_mut(block) {
                block.byte = Some(byte);
            }
        }
        if let Some(arena) = self.arenas.get_mut(arena) {
            arena.users = vec![stream];
        }
        Ok(true)
    }

    pub(super) fn read(&mut self, lease: u64, block: u64, stream: u64, ns: u64) -> Done {
        let (Some(held), Some(state), Some(raw)) =
            (self.leases.get(lease), self.blocks.get(block), self.runs(stream))
        else {
            return Ok(false);
        };
        let (of, arena, range) = (held.stream, held.arena, state.range);
        // A stream that was destroyed, or captures, does not order what comes after the lease.
        if state.from != From::Graph(arena, Some(held.graph)) || !self.pools.has(state.pool) {
            return Ok(false);
        }
        if self.runs(of).is_none() || self.graphs.get(held.graph).is_none() {
            return Ok(false);
        }
        self.order(of, stream)?;
        // No lease orders launches that the allocator does not make.
        let shared = self.arenas.get(arena).filter(|arena| arena.unguarded);
        for user in shared.map(|arena| arena.users.clone()).unwrap_or_default() {
            self.order(user, stream)?;
        }
        self.queue(raw, range, 0, ns, 0)?;
        if of != stream {
            let recorded = self.subject.record_use(block, stream);
            self.allow(recorded, &[])?;
        }
        if let Some(arena) = self.arenas.get_mut(arena) {
            arena.users.push(stream);
        }
        Ok(true)
    }

    pub(super) fn drop_graph(&mut self, graph: u64, way: u64) -> Done {
        let Some(state) = self.graphs.take(graph) else { return Ok(false) };
        if let (Some(exec), true) = (state.exec, graph.is_multiple_of(2)) {
            self.device.destroy_graph_exec(exec).map_err(words)?;
        }
        let dropped = self.subject.drop_graph(graph, way_of(way));
        self.allow(dropped, &[])?;
        if let (Some(exec), false) = (state.exec, graph.is_multiple_of(2)) {
            self.device.destroy_graph_exec(exec).map_err(words)?;
        }
        for (_, block) in &mut self.blocks.0 {
            if block.from == From::Graph(state.arena, Some(graph)) {
                block.from = From::Graph(state.arena, None);
            }
        }
        Ok(true)
    }
}
