//! Pools and streams: how they begin and end, and how work is ordered between streams.

use vramp::graph::CaptureMode;
use vramp_driver::{Call, Stream};

use super::model::{Capture, StreamState};
use super::{Done, Finding, SHARED, World, words};
use crate::lifecycle::subject::{PoolEnd, Way, Why};

impl World {
    pub(super) fn open(&mut self, pool: u64) -> Done {
        let opened = self.subject.open(pool);
        if self.allow(opened, &[])?.is_some() {
            self.pools.add(pool, ());
        }
        Ok(true)
    }

    pub(super) fn end_pool(&mut self, pool: u64, way: u64) -> Done {
        if !self.pools.has(pool) || self.shared && pool == SHARED {
            return Ok(false);
        }
        // Closing waits for the work, which a closed gate would hold for ever.
        self.open_gates();
        let in_use = self.captures.len() > 0
            || self.blocks.0.iter().any(|(_, block)| block.pool == pool)
            || self.leases.len() > 0;
        self.counts.ended_in_use += u64::from(in_use);
        let ended = self.subject.end_pool(pool, way);
        // Captures that the pool began end with it, or with the attempt. The handles stay.
        let mut captures = false;
        for at in 0..self.captures.len() {
            let (name, Capture { pool: of, origin, streams, .. }) = &self.captures.0[at];
            let captured = self.capture_of(*origin) == Some(*name);
            let goes_on = captured && self.raw(*origin).is_some_and(|raw| self.captures_now(raw));
            captures |= goes_on;
            if captured && !goes_on && *of == pool {
                self.release(streams.clone());
            }
        }
        match ended {
            // Memory that a capture may use stays mapped until the device goes.
            PoolEnd::Done => self.leaks |= captures || self.is_faulty() || self.shared && way == 1,
            PoolEnd::Refused(refused) if captures || self.is_faulty() || self.shared => {
                self.refused(&refused, &[Why::Capturing])?;
                return Ok(true);
            }
            PoolEnd::Refused(refused) => {
                return Err(format!("the pool cannot be closed: {}", refused.text));
            }
            PoolEnd::Failed(refused) => self.refused(&refused, &[])?,
        }
        self.pools.take(pool);
        self.observers.0.retain(|(_, of)| *of != pool);
        self.blocks.0.retain(|(_, block)| block.pool != pool);
        for (_, graph) in &mut self.graphs.0 {
            graph.dead |= graph.pool == pool && graph.attached;
        }
        if self.pools.len() == 0 {
            self.end_group()?;
        }
        Ok(true)
    }

    /// Ends what a group leaves when its last pool is gone.
    pub(super) fn end_group(&mut self) -> Result<(), Finding> {
        for capture in self.captures.names() {
            self.discard(capture, Way::Here)?;
        }
        for (_, state) in std::mem::take(&mut self.streams.0) {
            if let Some(end) = state.end {
                self.events.push(end);
            } else if state.adopted {
                self.device.destroy_stream(state.raw).map_err(words)?;
            }
        }
        self.blocks.0.clear();
        Ok(())
    }

    // --- streams ---

    pub(super) fn create(&mut self, pool: u64, stream: u64, adopts: bool) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let made = match adopts {
            true => self.subject.adopt_stream(pool, stream),
            false => self.subject.create_stream(pool, stream).map(|raw| (raw, false)),
        };
        if let Some((raw, adopted)) = self.allow(made, &[])? {
            self.streams.add(
                stream,
                StreamState { raw, adopted, end: None, half_destroyed: false, capture: None },
            );
        }
        Ok(true)
    }

    pub(super) fn destroy(&mut self, pool: u64, stream: u64) -> Done {
        let Some(state) = self.streams.get(stream) else { return Ok(false) };
        if !self.pools.has(pool) {
            return Ok(false);
        }
        if state.capture.is_some() {
            let destroyed = self.subject.destroy_stream(pool, stream);
            return self.expect(destroyed, &[Why::Capturing]);
        }
        if state.half_destroyed {
            let destroyed = self.subject.destroy_stream(pool, stream);
            if self.allow(destroyed, &[])?.is_some() {
                let state = self.streams.get_mut(stream).expect("it was found above");
                state.half_destroyed = false;
            }
            return Ok(true);
        }
        if !state.is_open() {
            let destroyed = self.subject.destroy_stream(pool, stream);
            return self.expect(destroyed, &[Why::UnknownStream]);
        }
        let raw = state.raw;
        let end = self.device.create_event().map_err(words)?;
        self.device.record(end, raw).map_err(words)?;
        // Uses of ranges and caches can be recorded only while the stream is open. Of every second stream
        // those of blocks are recorded too; the others are freed on the ended stream.
        for range in self.ranges.names() {
            self.record_range_uses(range, Some(stream))?;
        }
        for cache in self.caches.names() {
            self.record_cache_uses(cache, Some(stream))?;
        }
        if stream.is_multiple_of(2) {
            for block in self.blocks.names() {
                self.record_uses(block, Some(stream))?;
            }
        }
        let destroyed = self.subject.destroy_stream(pool, stream);
        if self.allow(destroyed, &[])?.is_none() {
            if self.tap.last_fired() == Some(Call::DestroyStream) {
                let state = self.streams.get_mut(stream).expect("it was found above");
                (state.end, state.half_destroyed) = (Some(end), true);
                return Ok(true);
            }
            // It is as before, and can be destroyed again.
            self.device.destroy_event(end).map_err(words)?;
            return Ok(true);
        }
        let state = self.streams.get_mut(stream).expect("it was found above");
        state.end = Some(end);
        if state.adopted {
            self.device.destroy_stream(raw).map_err(words)?;
        }
        Ok(true)
    }

    pub(super) fn raw(&self, stream: u64) -> Option<Stream> {
        self.streams.get(stream).filter(|state| state.is_open()).map(|state| state.raw)
    }

    /// Returns the driver's stream if work queued on it runs, and is not captured.
    pub(super) fn runs(&self, stream: u64) -> Option<Stream> {
        let state = self.streams.get(stream)?;
        (state.is_open() && state.capture.is_none()).then_some(state.raw)
    }

    pub(super) fn capture_of(&self, stream: u64) -> Option<u64> {
        self.streams.get(stream)?.capture.map(|(capture, _)| capture)
    }

    pub(super) fn has_strict_capture(&self) -> bool {
        self.captures.0.iter().any(|(_, capture)| capture.mode != CaptureMode::Relaxed)
    }

    /// Orders later work on `later`, which runs, after the work on `earlier` that ran.
    pub(super) fn order(&self, earlier: u64, later: u64) -> Result<(), Finding> {
        let (Some(state), Some(raw)) = (self.streams.get(earlier), self.runs(later)) else {
            return Ok(());
        };
        if earlier == later {
            return Ok(());
        }
        let recorded = state.end.or(state.capture.map(|(_, before)| before));
        match recorded {
            Some(event) => self.device.wait(raw, event).map_err(words),
            None => self.wait(state.raw, raw),
        }
    }

    pub(super) fn wait(&self, earlier: Stream, later: Stream) -> Result<(), Finding> {
        let event = self.device.create_event().map_err(words)?;
        self.device.record(event, earlier).map_err(words)?;
        self.device.wait(later, event).map_err(words)?;
        self.device.destroy_event(event).map_err(words)
    }

    /// Orders later captured work on `later` after that on `earlier`, of the same capture.
    pub(super) fn order_captured(&self, earlier: u64, later: u64) -> Result<(), Finding> {
        match (self.raw(earlier), self.raw(later)) {
            (Some(from), Some(to)) if from != to => self.wait(from, to),
            _ => Ok(()),
        }
    }
}
