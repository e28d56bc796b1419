//! Blocks: malloc, work, uses, free, and the comparison of their bytes.

use vramp::Bytes;

use vramp::peers::Preset;
use vramp_core::AddrRange;
use vramp_driver::sim::Kernel;
use vramp_driver::{HostSlice, Stream};

use super::model::{Block, From, Look, StreamState, User, later_than, note, users_work};
use super::{Done, Finding, SCRATCH, SLOT, World, byte_of, overlaps, way_of, words};
use crate::lifecycle::subject::Why;

impl World {
    pub(super) fn malloc(
        &mut self,
        pool: u64,
        stream: u64,
        size: u64,
        block: u64,
        tagged: bool,
    ) -> Done {
        let Some(state) = self.streams.get(stream) else { return Ok(false) };
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let (open, capture) = (state.is_open(), self.capture_of(stream));
        let invalid = capture.and_then(|capture| self.captures.get(capture));
        let invalid = invalid.is_some_and(|capture| capture.invalid);
        let placed = self.subject.malloc((pool, stream), Bytes::new(size), block, tagged);
        if !open {
            return self.expect(placed, &[Why::UnknownStream]);
        }
        let allowed: &[Why] = match (capture, invalid) {
            (_, true) => &[Why::Capturing, Why::OutOfMemory],
            (Some(_), _) => &[Why::OutOfMemory, Why::Arena],
            (None, _) => &[Why::OutOfMemory],
        };
        let Some(range) = self.allow(placed, allowed)? else { return Ok(true) };
        if range.len < Bytes::new(size.max(1)) {
            return Err(format!("{} instead of {size} B", range.len));
        }
        if let Some((other, state)) =
            self.blocks.0.iter().find(|(_, other)| overlaps(other.range, range))
        {
            return Err(format!("{range} overlaps block {other} at {}", state.range));
        }
        let of_capture = capture.filter(|capture| {
            self.captures.get(*capture).is_some_and(|capture| capture.pool == pool)
        });
        let from = of_capture.map_or(From::Pool, From::Capture);
        let first = User { stream, worked: false, writes: true, recorded: false };
        if let From::Capture(capture) = from {
            let capture = self.captures.get_mut(capture).expect("it was found above");
            capture.users.add(block, vec![first]);
        }
        let users = if from == From::Pool { vec![first] } else { Vec::new() };
        self.blocks.add(block, Block { pool, range, from, users, byte: None });
        Ok(true)
    }

    pub(super) fn work(&mut self, block: u64, stream: u64, kind: u64, ns: u64) -> Done {
        let (Some(state), Some(raw)) = (self.blocks.get(block), self.raw(stream)) else {
            return Ok(false);
        };
        let (range, writes, fills) = (state.range, kind != 0, self.fills(kind));
        let Some(capture) = self.capture_of(stream) else {
            if state.from != From::Pool {
                return Ok(false);
            }
            let users = &self.blocks.get(block).expect("it was found above").users;
            let after = later_than(users, writes);
            for user in after {
                self.order(user, stream)?;
            }
            self.queue(raw, range, kind, ns, byte_of(block, ns))?;
            let state = self.blocks.get_mut(block).expect("it was found above");
            note(&mut state.users, stream, writes);
            if fills {
                state.byte = Some(byte_of(block, ns));
            }
            return Ok(true);
        };
        let capturing = self.captures.get(capture).expect("its streams refer to it");
        let usable = match state.from {
            From::Pool => state.pool == capturing.pool && !self.is_kept_elsewhere(block, capture),
            From::Capture(of) => of == capture,
            From::Graph(arena, graph) => arena == capturing.arena && graph.is_some(),
        };
        if !usable || capturing.invalid || kind == 3 {
            return Ok(false);
        }
        let after = match capturing.users.get(block) {
            Some(users) => later_than(users, writes),
            None => Vec::new(),
        };
        for user in after {
            self.order_captured(user, stream)?;
        }
        self.queue(raw, range, kind, ns.min(4096), byte_of(block, ns))?;
        let capturing = self.captures.get_mut(capture).expect("it was found above");
        if !capturing.users.has(block) {
            capturing.users.add(block, Vec::new());
        }
        let users = capturing.users.get_mut(block).expect("it was added above");
        note(users, stream, writes);
        if fills {
            capturing.fills.retain(|(filled, _)| *filled != block);
            capturing.fills.push((block, byte_of(block, ns)));
        }
        Ok(true)
    }

    /// Returns true if another capture under way uses the block.
    pub(super) fn is_kept_elsewhere(&self, block: u64, capture: u64) -> bool {
        self.captures.0.iter().any(|(name, other)| *name != capture && other.users.has(block))
    }

    /// Returns true if work of this kind leaves bytes that are known. The simulator's kernels change
    /// no bytes. A card has no kernels here: what writes is a fill, what reads is a copy.
    pub(super) fn fills(&self, kind: u64) -> bool {
        kind == 2 || kind != 0 && self.sim.is_none()
    }

    pub(super) fn queue(
        &mut self,
        raw: Stream,
        range: AddrRange,
        kind: u64,
        ns: u64,
        byte: u8,
    ) -> Result<(), Finding> {
        let Some(sim) = self.sim.clone() else {
            if self.fills(kind) {
                return self.device.fill(raw, range, byte).map_err(words);
            }
            let len = range.len.min(Bytes::new(SLOT));
            let to = HostSlice { buffer: self.buffer, offset: SCRATCH, len };
            return self.device.copy_to_host(raw, range.start, to).map_err(words);
        };
        match kind {
            2 => self.device.fill(raw, range, byte).map_err(words),
            3 if self.has_gates() => {
                let gate = match self.gates.last() {
                    Some(&gate) if ns.is_multiple_of(2) => gate,
                    _ => {
                        self.gates.push(sim.gate());
                        self.gates[self.gates.len() - 1]
                    }
                };
                let kernel = Kernel::new("gated").writing(range).lasting(ns).until(gate);
                sim.launch(raw, kernel).map_err(words)
            }
            0 => sim.launch(raw, Kernel::new("read").reading(range).lasting(ns)).map_err(words),
            _ => sim.launch(raw, Kernel::new("write").writing(range).lasting(ns)).map_err(words),
        }
    }

    /// Returns true if a trim may leave memory: the driver's own pool keeps some on a card, and serves
    /// all threads; captures of other threads leave the allocator unsure what is over.
    pub(super) fn trim_keeps_memory(&self) -> bool {
        let drivers = matches!(self.preset, Preset::Vpmm | Preset::StreamOrdered);
        drivers && self.sim.is_none() || self.shared
    }

    /// Returns true if no call of the preset waits for work, so that a closed gate hangs nothing.
    pub(super) fn has_gates(&self) -> bool {
        matches!(self.preset, Preset::Vramp | Preset::Vpmm) && self.sim.is_some() && !self.shared
    }

    pub(super) fn record_use(&mut self, block: u64, stream: u64) -> Done {
        let Some(state) = self.blocks.get(block) else { return Ok(false) };
        let Some(user) = self.streams.get(stream) else { return Ok(false) };
        if !user.is_open() {
            let recorded = self.subject.record_use(block, stream);
            return self.expect(recorded, &[Why::UnknownStream]);
        }
        let runs = self.runs(stream).is_some();
        if !runs || state.from != From::Pool {
            return Ok(false);
        }
        let recorded = self.subject.record_use(block, stream);
        if self.allow(recorded, &[])?.is_some() {
            let state = self.blocks.get_mut(block).expect("it was found above");
            for user in state.users.iter_mut().filter(|user| user.stream == stream) {
                user.recorded = true;
            }
        }
        Ok(true)
    }

    /// Records the uses of a block that were not: all, or those of one stream.
    pub(super) fn record_uses(&mut self, block: u64, of: Option<u64>) -> Result<(), Finding> {
        let Some(state) = self.blocks.get(block) else { return Ok(()) };
        let wanted = |user: &&User| {
            user.worked && !user.recorded && of.is_none_or(|stream| stream == user.stream)
        };
        let users: Vec<u64> = state.users.iter().filter(wanted).map(|user| user.stream).collect();
        for stream in users {
            if self.runs(stream).is_some() {
                self.record_use(block, stream)?;
            }
        }
        Ok(())
    }

    pub(super) fn free(&mut self, block: u64, stream: u64, way: u64) -> Done {
        let (Some(state), Some(on)) = (self.blocks.get(block), self.streams.get(stream)) else {
            return Ok(false);
        };
        if !self.pools.has(state.pool) {
            return Ok(false);
        }
        let (capture, is_open) = (self.capture_of(stream), on.is_open());
        let used_in: Vec<u64> = self
            .captures
            .0
            .iter()
            .filter(|(_, capture)| capture.users.has(block))
            .map(|(name, _)| *name)
            .collect();
        if used_in.iter().any(|used| Some(*used) != capture) {
            return Ok(false);
        }
        if let Some(capture) = capture {
            if self.captures.get(capture).is_some_and(|found| found.invalid) {
                return Ok(false);
            }
            if !self.free_captured(block, stream, capture, way)? {
                return Ok(false);
            }
        } else if state.from == From::Pool
            && !self.settle_uses(block, stream, way == 1 && is_open)?
        {
            return Ok(false);
        }
        let freed = self.subject.free(block, stream, way_of(u64::from(way == 2)));
        match freed {
            Ok(()) => {}
            Err((refused, still_ours)) => {
                self.refused(&refused, &[])?;
                // The driver's pool may still have a block that it did not free.
                self.leaks = true;
                if still_ours {
                    return Ok(true);
                }
            }
        }
        self.forget_block(block);
        Ok(true)
    }

    /// Notes that a block is not the program's any more.
    pub(super) fn forget_block(&mut self, block: u64) {
        self.blocks.take(block);
        for (_, graph) in &mut self.graphs.0 {
            graph.dead |= graph.uses.contains(&block);
        }
    }

    /// Records or orders the work on a block of a pool, before it is freed on `stream`. Returns
    /// false if that is not possible.
    pub(super) fn settle_uses(&mut self, block: u64, stream: u64, orders: bool) -> Done {
        let state = self.blocks.get(block).expect("the caller found it");
        let users: Vec<User> = state.users.clone();
        let open = |user: &User| users_work(user, stream);
        for user in users.iter().filter(|user| open(user)) {
            if orders && self.runs(stream).is_some() {
                self.order(user.stream, stream)?;
            } else if self.runs(user.stream).is_some() {
                self.record_use(block, user.stream)?;
                if self.is_faulty() {
                    return Ok(false);
                }
            } else if self.runs(stream).is_some() {
                self.order(user.stream, stream)?;
            } else {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Prepares a free in a capture. Returns false if the rules forbid it.
    pub(super) fn free_captured(
        &mut self,
        block: u64,
        stream: u64,
        capture: u64,
        way: u64,
    ) -> Done {
        let state = self.blocks.get(block).expect("the caller found it");
        let capturing = self.captures.get(capture).expect("its streams refer to it");
        match state.from {
            From::Capture(of) if of != capture => return Ok(false),
            // Memory of another pool is not this capture's to keep.
            From::Pool if state.pool != capturing.pool => return Ok(false),
            From::Graph(..) if state.pool != capturing.pool => return Ok(false),
            _ => {}
        }
        let before: Vec<User> = state.users.clone();
        let users = capturing.users.get(block).cloned().unwrap_or_default();
        for user in users.iter().filter(|user| user.worked && user.stream != stream) {
            if way == 1 {
                self.order_captured(user.stream, stream)?;
            } else {
                let recorded = self.subject.record_use(block, user.stream);
                self.allow(recorded, &[])?;
            }
        }
        for user in before.iter().filter(|user| user.worked) {
            if !user.recorded && user.stream != stream {
                let in_capture = self.capture_of(user.stream).is_some();
                let open = self.streams.get(user.stream).is_some_and(StreamState::is_open);
                if !open || in_capture {
                    return Ok(false);
                }
                let recorded = self.subject.record_use(block, user.stream);
                self.allow(recorded, &[])?;
            }
        }
        let capturing = self.captures.get_mut(capture).expect("it was found above");
        capturing.before.extend(before.iter().map(|user| user.stream));
        capturing.users.take(block);
        capturing.fills.retain(|(filled, _)| *filled != block);
        Ok(true)
    }

    pub(super) fn look(&mut self, block: u64, stream: u64) -> Done {
        let (Some(state), Some(raw)) = (self.blocks.get(block), self.runs(stream)) else {
            return Ok(false);
        };
        let (range, Some(byte), From::Pool) = (state.range, state.byte, state.from) else {
            return Ok(false);
        };
        if !self.stores || range.len < Bytes::new(SLOT) {
            return Ok(false);
        }
        if self.slots.is_empty() {
            return Ok(false);
        }
        for user in later_than(&state.users, false) {
            self.order(user, stream)?;
        }
        self.copy_back(range, raw, byte, block)?;
        let state = self.blocks.get_mut(block).expect("it was found above");
        note(&mut state.users, stream, false);
        Ok(true)
    }

    /// Queues a copy of the first and last bytes of memory to the host, where a slot has to be free.
    pub(super) fn copy_back(
        &mut self,
        range: AddrRange,
        raw: Stream,
        byte: u8,
        of: u64,
    ) -> Result<(), Finding> {
        let slot = self.slots.pop().expect("the caller found a free slot");
        let half = Bytes::new(SLOT / 2);
        let end = range.start + (range.len - half);
        for (from, offset) in [(range.start, slot * SLOT), (end, slot * SLOT + SLOT / 2)] {
            let to = HostSlice { buffer: self.buffer, offset: Bytes::new(offset), len: half };
            self.device.copy_to_host(raw, from, to).map_err(words)?;
        }
        let done = self.device.create_event().map_err(words)?;
        self.device.record(done, raw).map_err(words)?;
        self.looks.push(Look { slot, byte, done, of });
        self.counts.looks += 1;
        Ok(())
    }

    pub(super) fn sync(&mut self) -> Done {
        if self.has_strict_capture() {
            return Ok(false);
        }
        self.open_gates();
        for (_, state) in &self.streams.0 {
            if let Some(end) = state.end {
                self.device.synchronize_event(end).map_err(words)?;
            } else if state.capture.is_none() {
                self.device.synchronize_stream(state.raw).map_err(words)?;
            }
        }
        let synced: Vec<u64> = self
            .streams
            .0
            .iter()
            .filter(|(_, state)| state.capture.is_none())
            .map(|(name, _)| *name)
            .collect();
        for (_, block) in &mut self.blocks.0 {
            block.users.retain(|user| !synced.contains(&user.stream));
        }
        for (_, range) in &mut self.ranges.0 {
            range.users.retain(|user| !synced.contains(&user.stream));
        }
        self.compare()?;
        Ok(true)
    }

    pub(super) fn compare(&mut self) -> Result<(), Finding> {
        for look in std::mem::take(&mut self.looks) {
            self.device.synchronize_event(look.done).map_err(words)?;
            self.device.destroy_event(look.done).map_err(words)?;
            let mut bytes = [0; SLOT as usize];
            let offset = Bytes::new(look.slot * SLOT);
            self.device.read_host(self.buffer, offset, &mut bytes).map_err(words)?;
            self.slots.push(look.slot);
            if let Some(wrong) = bytes.iter().find(|byte| **byte != look.byte) {
                let Look { of, byte, .. } = look;
                return Err(format!("block {of} holds {wrong} where {byte} was written"));
            }
        }
        Ok(())
    }

    pub(super) fn open_gates(&mut self) -> bool {
        let Some(sim) = &self.sim else { return false };
        self.gates.drain(..).map(|gate| sim.open(gate)).count() > 0
    }

    pub(super) fn trim(&mut self, pool: u64, to: u64) -> Done {
        if !self.pools.has(pool) || self.has_strict_capture() && self.preset.is_torch() {
            return Ok(false);
        }
        let trimmed = self.subject.trim(pool, Bytes::new(to));
        self.allow(trimmed, &[]).map(|_| true)
    }
}
