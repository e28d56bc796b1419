//! Stable ranges and their host memory.

use vramp::Bytes;
use vramp_core::AddrRange;

use super::model::{User, later_than, note};
use super::{Done, Finding, World, byte_of, way_of, words};
use crate::lifecycle::subject::Why;

impl World {
    pub(super) fn back(&mut self, range: u64, stream: u64) -> Done {
        let (Some(state), Some(on)) = (self.ranges.get(range), self.streams.get(stream)) else {
            return Ok(false);
        };
        let (closed, open) = (!self.pools.has(state.pool), on.is_open());
        let (hosted, capturing) = (state.hosted > Bytes::ZERO, on.capture.is_some());
        if capturing || (self.pools.len() == 0) {
            return Ok(false);
        }
        let backed = self.subject.back(range, stream);
        if closed {
            return self.expect(backed, &[Why::Closed]);
        }
        if !open {
            return self.expect(backed, &[Why::UnknownStream]);
        }
        if hosted {
            return self.expect(backed, &[Why::Occupied]);
        }
        if self.allow(backed, &[Why::OutOfMemory])?.is_some() {
            let state = self.ranges.get_mut(range).expect("it was found above");
            if !state.backed {
                state.users.push(User { stream, worked: true, writes: true, recorded: false });
            }
            state.backed = true;
        }
        Ok(true)
    }

    pub(super) fn work_range(&mut self, range: u64, stream: u64, kind: u64, ns: u64) -> Done {
        let (Some(state), Some(raw)) = (self.ranges.get(range), self.runs(stream)) else {
            return Ok(false);
        };
        if !self.pools.has(state.pool) {
            return Ok(false);
        }
        let part = match (state.backed, state.hosted) {
            (true, Bytes::ZERO) => state.range,
            (false, hosted) if hosted > Bytes::ZERO => AddrRange::new(state.range.start, hosted),
            _ => return Ok(false),
        };
        for user in later_than(&state.users, kind != 0) {
            self.order(user, stream)?;
        }
        self.queue(raw, part, kind, ns, byte_of(range, ns))?;
        let state = self.ranges.get_mut(range).expect("it was found above");
        note(&mut state.users, stream, kind != 0);
        Ok(true)
    }

    /// Waits until the host has seen the work on a range complete. Returns false if a capture
    /// forbids it.
    pub(super) fn see_range(&mut self, range: u64) -> Done {
        if self.has_strict_capture() {
            return Ok(false);
        }
        self.open_gates();
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        for user in &state.users {
            let Some(stream) = self.streams.get(user.stream) else { continue };
            let recorded = stream.end.or(stream.capture.map(|(_, before)| before));
            match recorded {
                Some(event) => self.device.synchronize_event(event).map_err(words)?,
                None => self.device.synchronize_stream(stream.raw).map_err(words)?,
            }
        }
        let state = self.ranges.get_mut(range).expect("it was found above");
        state.users.clear();
        Ok(true)
    }

    pub(super) fn lend(&mut self, range: u64) -> Done {
        let pool = self.ranges.get(range).map(|state| state.pool);
        if pool.is_none_or(|pool| !self.pools.has(pool)) || !self.see_range(range)? {
            return Ok(false);
        }
        let lent = self.subject.lend(range);
        self.allow(lent, &[])?;
        if let Some(state) = self.ranges.get_mut(range) {
            state.backed = false;
        }
        Ok(true)
    }

    pub(super) fn host(&mut self, range: u64, len: u64) -> Done {
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        let len = Bytes::new(len).min(state.range.len);
        if !self.pools.has(state.pool) || state.hosted > Bytes::ZERO {
            return Ok(false);
        }
        let mapped = self.subject.host(range, len);
        if self.allow(mapped, &[Why::Occupied, Why::NotSupported])?.is_some() {
            let state = self.ranges.get_mut(range).expect("it was found above");
            if state.backed {
                return Err("host memory was mapped over memory in use".to_owned());
            }
            state.hosted = len;
        }
        Ok(true)
    }

    pub(super) fn unhost(&mut self, range: u64) -> Done {
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        let hosted = state.hosted;
        if hosted.is_zero() || !self.pools.has(state.pool) || !self.see_range(range)? {
            return Ok(false);
        }
        let unmapped = self.subject.unhost(range, hosted);
        if self.allow(unmapped, &[])?.is_some() {
            let state = self.ranges.get_mut(range).expect("it was found above");
            state.hosted = Bytes::ZERO;
        }
        Ok(true)
    }

    pub(super) fn record_range_uses(&mut self, range: u64, of: Option<u64>) -> Result<(), Finding> {
        let Some(state) = self.ranges.get_mut(range) else { return Ok(()) };
        let mut users = Vec::new();
        for user in &mut state.users {
            if user.worked && !user.recorded && of.is_none_or(|stream| stream == user.stream) {
                user.recorded = true;
                users.push(user.stream);
            }
        }
        for stream in users {
            let used = self.subject.use_range(range, stream);
            self.allow(used, &[])?;
        }
        Ok(())
    }

    pub(super) fn drop_range(&mut self, range: u64, way: u64) -> Done {
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        if self.pools.has(state.pool) {
            if state.users.iter().any(|user| self.capture_of(user.stream).is_some()) {
                return Ok(false);
            }
            self.record_range_uses(range, None)?;
        }
        self.ranges.take(range);
        let dropped = self.subject.drop_range(range, way_of(way));
        self.allow(dropped, &[]).map(|_| true)
    }
}
