//! Work on streams: queued, started, checked, and applied to the bytes of memory.

use std::ops::Range;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::DeviceLoss;
use super::bytes::{Content, Contents};
use super::clock::{Body, Part, Stamp};
use super::cost::Rates;
use super::memory::{By, Inaccessible};
use super::pool::{POOL_BASE, pool_of};
use super::refusal::{Outcome, Refusal};
use super::state::State;
use super::streams::{Effect, Kernel, Work};
use crate::{Call, DriverError, DriverResult, Stream};

/// Bytes that are copied at once.
const COPY_STEP: u64 = 1 << 20;

impl State {
    pub fn launch(&mut self, device: usize, stream: Stream, kernel: Kernel) -> DriverResult<()> {
        self.current = device;
        // Not a call of the trait; its errors name the call that is most similar.
        let fail =
            |refusal: Refusal| DriverError::from_code(Call::Fill, refusal.code, refusal.detail);
        if let Some(error) = self.lost_error(Call::Fill) {
            return Err(error);
        }
        self.run_until(self.now_ns);
        if let Some(gate) = kernel.until
            && !self.streams.has_gate(gate)
        {
            return Err(fail(Refusal::unknown("gate", gate.0 as u64)));
        }
        let stream = self.resolve(stream).map_err(fail)?;
        self.takes_work(stream).map_err(fail)?;
        self.spend(Call::Fill);
        self.queue(stream, kernel, Effect::Nothing).map_err(fail)
    }

    /// Queues work on `stream`, or captures it.
    pub fn queue(&mut self, stream: Stream, kernel: Kernel, effect: Effect) -> Outcome<()> {
        let index = self.streams.index(self.current, stream)?;
        self.check_host_for(effect.stored())?;
        match self.captures.of(index) {
            Some(capture) => self.captures.add(capture, index, kernel, effect)?,
            None => self.queue_on(index, kernel, effect),
        }
        Ok(())
    }

    /// Refuses work for whose bytes the host has no memory. Work writes them when it runs, where no
    /// call can fail.
    pub fn check_host_for(&self, len: Bytes) -> Outcome<()> {
        if self.contents == Contents::Discarded {
            return Ok(());
        }
        let len = usize::try_from(len.count()).unwrap_or(usize::MAX);
        vramp_host::check_host_for(len)
            .map_err(|_| Refusal::out_of_memory("the host has no memory for simulated bytes"))
    }

    /// Queues work on a stream that does not capture.
    pub fn queue_on(&mut self, stream: usize, kernel: Kernel, effect: Effect) {
        let mut work = Work { kernel, effect, doomed: None, unchecked: None };
        let device = self.streams.device(stream);
        let doomed = self.freed_pool_memory(device, &work);
        work.doomed = doomed.or_else(|| self.freed_host_memory(&work));
        if let Some(checker) = &mut self.checker {
            let stamp = checker.step(Stream::from_number(stream as u64 + 1));
            // Memory may be mapped before the work starts. Then it is checked again.
            if !self.check_order(device, &work, &stamp) {
                work.unchecked = Some(stamp);
            }
        }
        self.streams.push(stream, work, self.now_ns);
    }

    /// Checks for freed pinned memory: a graph may outlive the buffers that it copies from or to.
    fn freed_host_memory(&self, work: &Work) -> Option<(DeviceAddr, &'static str)> {
        let buffer = work.effect.host_buffer()?;
        let freed = self.host.content(buffer).is_none();
        freed.then_some((DeviceAddr::new(0), "an offset in pinned host memory that was freed"))
    }

    /// Refuses a stream that cannot take work: an unknown one, or one whose capture is invalidated.
    pub fn takes_work(&mut self, stream: Stream) -> Outcome<()> {
        let index = self.streams.index(self.current, stream)?;
        self.captures.check_valid(index)
    }

    /// Checks for freed memory of the pools. It is freed in stream order, so the check is final when
    /// work is queued.
    fn freed_pool_memory(&self, device: usize, work: &Work) -> Option<(DeviceAddr, &'static str)> {
        ranges(work).find_map(|(range, writes)| {
            let start = range.start.number();
            let (owner, _) = pool_of(start)?;
            if owner != work.effect.accessor(device, writes) {
                return Some((range.start, "in the stream-ordered pool of another device"));
            }
            let live = self
                .devices
                .get(owner)
                .is_some_and(|own| own.pool.is_live(start, range.len.count()));
            (!live).then_some((range.start, "not allocated from the stream-ordered pool"))
        })
    }

    /// Returns the device that all of `range` belongs to: as a reservation, a plain allocation, or an
    /// allocation from its pool.
    pub fn owner(&self, range: AddrRange) -> Option<usize> {
        let Some((device, _)) = pool_of(range.start.number()) else {
            return self.memory.owner(range);
        };
        let own = self.devices.get(device)?;
        own.pool.is_live(range.start.number(), range.len.count()).then_some(device)
    }

    /// Returns the first address of `range` to which an access is not allowed, if it is no pool's.
    pub fn inaccessible(&self, by: By, range: AddrRange) -> Option<Inaccessible> {
        if pool_of(range.start.number()).is_some() {
            return None;
        }
        self.memory.pieces(range, by, |_| {}).err()
    }

    /// Starts the first work of a stream: determines its duration and checks its accesses.
    pub fn start(&mut self, stream: usize, now_ns: u64, mut work: Box<Work>) {
        let device = self.streams.device(stream);
        let stamp = work.unchecked.take();
        work.kernel.duration_ns = work.kernel.duration_ns.max(self.over_bus_ns(&work));
        self.take_turns(device, now_ns, &mut work);
        let mut wrong = work.doomed;
        for (range, writes) in ranges(&work) {
            if wrong.is_none() {
                let by = By::of(work.effect.accessor(device, writes), writes);
                wrong = self.inaccessible(by, range).map(|bad| (bad.at, bad.why));
            }
        }
        if let Some((at, why)) = wrong {
            let name = &work.kernel.name;
            let explanation = format!("`{name}` on stream {} accessed {at}, {why}", stream + 1);
            self.lose(device, DeviceLoss { code: 700, explanation });
        } else if let Some(stamp) = stamp {
            self.check_order(device, &work, &stamp);
        }
        self.streams.run(stream, work);
    }

    /// Returns the least time in which work accesses the host memory that is mapped at its addresses
    /// when it starts. Both directions of the bus are used concurrently.
    fn over_bus_ns(&self, work: &Work) -> u64 {
        if !self.memory.has_host_memory() {
            return 0;
        }
        let rates = self.rates();
        let rate = match work.effect {
            Effect::Nothing => rates.host_numa_kernel,
            _ => rates.host_numa_copy,
        };
        let mut directions = [Bytes::ZERO; 2];
        for (range, writes) in ranges(work) {
            if range.start.number() < POOL_BASE {
                directions[usize::from(writes)] += self.memory.touched_on_host(range);
            }
        }
        directions.into_iter().map(|len| Rates::ns(rate, len)).max().unwrap_or(0)
    }

    /// Passes all accesses of `work` to the race detector. Returns false if some memory is
    /// inaccessible now.
    fn check_order(&mut self, device: usize, work: &Work, stamp: &Stamp) -> bool {
        let Some(checker) = &mut self.checker else { return true };
        let mut parts = Vec::new();
        for (range, writes) in ranges(work) {
            if let Some((device, offset)) = pool_of(range.start.number()) {
                let len = range.len.count();
                parts.push((Part { body: Body::Pool(device), offset, len, range, writes }, None));
                continue;
            }
            let by = By::of(work.effect.accessor(device, writes), writes);
            let touched = self.memory.pieces(range, by, |piece| {
                let body = Body::Handle(piece.physical);
                let part = Part { body, offset: piece.offset, len: piece.len, range, writes };
                parts.push((part, Some(piece.mapping)));
            });
            if touched.is_err() {
                return false;
            }
        }
        if let Some(part) = host_part(&work.effect) {
            parts.push((part, None));
        }
        checker.access(stamp, &work.kernel.name, &parts);
        true
    }

    /// Applies the effect of finished work to memory.
    pub fn carry_out(&mut self, work: &Work) {
        match work.effect {
            Effect::Nothing => {}
            Effect::Fill { range, byte } => self.in_steps(range.len, |state, done, len| {
                state.fill(range.start + Bytes::new(done), len, byte);
            }),
            Effect::Copy { from, to } | Effect::CopyPeer { from, to, .. } => {
                self.in_steps(from.len, |state, done, len| {
                    let bytes = state.read(from.start + Bytes::new(done), len);
                    state.write(to + Bytes::new(done), &bytes);
                })
            }
            Effect::ToDevice { buffer, offset, to } => self.in_steps(to.len, |state, done, len| {
                let mut bytes = vec![0; len];
                if let Some(content) = state.host.content(buffer) {
                    content.read(offset.count() + done, &mut bytes);
                }
                state.write(to.start + Bytes::new(done), &bytes);
            }),
            Effect::ToHost { from, buffer, offset } => {
                self.in_steps(from.len, |state, done, len| {
                    let bytes = state.read(from.start + Bytes::new(done), len);
                    if let Some(content) = state.host.content_mut(buffer) {
                        content.write(offset.count() + done, &bytes);
                    }
                })
            }
        }
    }

    /// Calls `step` with offset and length of every part of `len` bytes, if bytes are stored.
    fn in_steps(&mut self, len: Bytes, mut step: impl FnMut(&mut State, u64, usize)) {
        if self.contents == Contents::Discarded {
            return;
        }
        let mut done = 0;
        while done < len.count() {
            let part = (len.count() - done).min(COPY_STEP);
            step(self, done, part as usize);
            done += part;
        }
    }

    // --- bytes ---

    pub fn peek(&self, device: usize, range: AddrRange) -> Option<Vec<u8>> {
        let start = range.start.number();
        let touchable = match pool_of(start) {
            Some((owner, _)) => {
                owner == device && self.devices[device].pool.is_live(start, range.len.count())
            }
            None => self.memory.pieces(range, By::Device(device), |_| {}).is_ok(),
        };
        (self.contents == Contents::Stored && touchable)
            .then(|| self.read(range.start, range.len.count() as usize))
    }

    fn read(&self, at: DeviceAddr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if let Some((device, offset)) = pool_of(at.number()) {
            self.devices[device].pool_content.read(offset, &mut bytes);
            return bytes;
        }
        let mut done = 0;
        let range = AddrRange::new(at, Bytes::new(len as u64));
        let read = self.memory.pieces(range, By::Mapped, |piece| {
            let end = done + piece.len as usize;
            self.memory.content(piece.physical).read(piece.offset, &mut bytes[done..end]);
            done = end;
        });
        assert_eq!(read, Ok(()), "work that started may access its memory until it is done");
        bytes
    }

    fn write(&mut self, at: DeviceAddr, bytes: &[u8]) {
        self.contents(at, bytes.len(), |content, offset, part| content.write(offset, &bytes[part]));
    }

    fn fill(&mut self, at: DeviceAddr, len: usize, byte: u8) {
        self.contents(at, len, |content, offset, part| content.fill(offset, part.len(), byte));
    }

    /// Calls `change` for every content that `len` bytes from `at` on run through, with the offset
    /// in the content and the part of the bytes.
    fn contents(
        &mut self,
        at: DeviceAddr,
        len: usize,
        mut change: impl FnMut(&mut Content, u64, Range<usize>),
    ) {
        if let Some((device, offset)) = pool_of(at.number()) {
            change(&mut self.devices[device].pool_content, offset, 0..len);
            return;
        }
        let mut pieces = Vec::new();
        let range = AddrRange::new(at, Bytes::new(len as u64));
        let found = self.memory.pieces(range, By::Mapped, |piece| pieces.push(piece));
        assert_eq!(found, Ok(()), "work that started may access its memory until it is done");
        let mut done = 0;
        for piece in pieces {
            let end = done + piece.len as usize;
            change(self.memory.content_mut(piece.physical), piece.offset, done..end);
            done = end;
        }
    }
}

/// Returns the ranges of device addresses that work accesses, and whether it writes them.
pub(super) fn ranges(work: &Work) -> impl Iterator<Item = (AddrRange, bool)> + '_ {
    let reads = work.kernel.reads.iter().map(|range| (*range, false));
    reads.chain(work.kernel.writes.iter().map(|range| (*range, true)))
}

/// Returns the part of pinned host memory that work accesses.
fn host_part(effect: &Effect) -> Option<Part> {
    let (buffer, offset, len, writes) = match *effect {
        Effect::ToDevice { buffer, offset, to } => (buffer, offset, to.len, false),
        Effect::ToHost { from, buffer, offset } => (buffer, offset, from.len, true),
        _ => return None,
    };
    Some(host_buffer_part(buffer, offset, len, writes))
}

/// Returns a part of pinned host memory; its range consists of offsets.
pub(super) fn host_buffer_part(buffer: u64, offset: Bytes, len: Bytes, writes: bool) -> Part {
    Part {
        body: Body::HostBuffer(buffer),
        offset: offset.count(),
        len: len.count(),
        range: AddrRange::new(DeviceAddr::new(offset.count()), len),
        writes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Driver;
    use crate::sim::{Contents, Simulator};

    #[test]
    fn a_copy_for_whose_bytes_the_host_has_no_memory_is_refused_when_it_is_queued() {
        let device = Simulator::builder().contents(Contents::Stored).build();
        let stream = device.create_stream().unwrap();
        // More than a process has addresses, on any machine, and than one reservation can have.
        let from = AddrRange::new(DeviceAddr::new(1 << 60), Bytes::tib(128 << 10));
        let effect = Effect::Copy { from, to: DeviceAddr::new(1 << 61) };
        let refused = device.lock().queue(stream, Kernel::new("copy"), effect);
        assert_eq!(refused.unwrap_err().code, 2);
        device.synchronize_stream(stream).unwrap();
    }
}
