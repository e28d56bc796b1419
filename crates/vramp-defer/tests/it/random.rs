//! Random programs, checked by the race detector and by bytes: leases, spills and mallocs on four streams, streams
//! that end, and threads in one space.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_defer::{LeaseSet, Pin, SpillError};
use vramp_driver::Call;
use vramp_driver::sim::{Kernel, LiveObjects};
use vramp_tiers::tracked::{Policies, Scope, TrackedAllocator};
use vramp_tiers::{Deadline, MemorySpace, Reservation};

use super::waiting::block_on;
use super::*;

// --- Random programs: kernels on four streams, leases, spills, mallocs, checked by the race detector and by
// the bytes ---

struct Program {
    rig: Rig,
    streams: Vec<(StreamId, Stream)>,
    buffers: Vec<(DeferrableBuffer, u8)>,
    random: fastrand::Rng,
}

impl Program {
    fn new(seed: u64) -> Program {
        let mut random = fastrand::Rng::with_seed(seed);
        let disk = random.bool().then_some(MIB(512));
        let host = if disk.is_some() { MIB(48) } else { MIB(512) };
        let rig = Plan { host, disk, ..Plan::default() }.build();
        let mut streams = vec![(rig.stream, rig.queue)];
        for _ in 0..3 {
            let stream = rig.allocator.create_stream().unwrap();
            streams.push((stream, rig.allocator.stream(stream).unwrap()));
        }
        Program { rig, streams, buffers: Vec::new(), random }
    }

    fn step(&mut self, step: u8) {
        let Program { rig, streams, buffers, random } = self;
        let (stream, queue) = streams[random.usize(..streams.len())];
        match random.u32(..10) {
            0 if buffers.len() < 10 => {
                let len = Bytes::new(random.u64(1..(28 << 20)));
                buffers.push((rig.manager.buffer(len).unwrap(), 0));
                let (buffer, byte) = buffers.last_mut().unwrap();
                write(rig, buffer, (stream, queue), step);
                *byte = step;
            }
            1 if buffers.len() > 3 => {
                drop(buffers.swap_remove(random.usize(..buffers.len())));
            }
            2 => {
                rig.manager.spill(MIB(random.u64(1..40)));
            }
            3 => {
                if let Ok(block) = rig.allocator.malloc(MIB(random.u64(1..30)), stream) {
                    let range = AddrRange::new(block.addr(), block.len());
                    rig.sim.fill(queue, range, 0xEE).unwrap();
                    rig.allocator.free(block, stream).unwrap();
                }
            }
            4 => {
                rig.manager.clean(MIB(16));
            }
            5 if !buffers.is_empty() => {
                let _ = buffers[random.usize(..buffers.len())].0.prefetch();
            }
            6 | 7 if !buffers.is_empty() => {
                let at = random.usize(..buffers.len());
                let (buffer, byte) = &mut buffers[at];
                write(rig, buffer, (stream, queue), step);
                *byte = step;
            }
            _ if !buffers.is_empty() => {
                let (buffer, byte) = &buffers[random.usize(..buffers.len())];
                let lease = buffer.lease(Access::Shared, stream).unwrap();
                let range = lease.address(0);
                let at = Bytes::new(random.u64(..range.len.count()));
                rig.sim.launch(queue, Kernel::new("read").reading(range)).unwrap();
                if random.bool() {
                    rig.sim.synchronize_stream(queue).unwrap();
                    let one = AddrRange::new(range.start + at, Bytes::new(1));
                    assert_eq!(rig.sim.peek(one).unwrap(), [*byte], "byte {at} of {buffer:?}");
                }
            }
            _ => {}
        }
    }
}

fn write(rig: &Rig, buffer: &DeferrableBuffer, (stream, queue): (StreamId, Stream), byte: u8) {
    let lease = buffer.lease(Access::Exclusive, stream).unwrap();
    rig.sim.launch(queue, Kernel::new("busy").writing(lease.address(0)).lasting(50_000)).unwrap();
    rig.sim.fill(queue, lease.address(0), byte).unwrap();
}

#[test]
fn kernels_leases_and_spills_at_random_corrupt_nothing() {
    for seed in vramp_testing::seeds(6) {
        let mut program = Program::new(seed);
        for step in 0..120 {
            program.step(step);
            program.rig.manager.audit().unwrap();
        }
        program.rig.check();
        let Program { rig, buffers, .. } = program;
        for (buffer, byte) in &buffers {
            rig.expect(buffer, *byte);
        }
        drop(buffers);
        rig.check();
    }
}

#[test]
fn threads_that_lease_and_spill_at_random_corrupt_nothing() {
    for seed in vramp_testing::seeds(2) {
        let rig = Plan { limit: MIB(96), ..patient() }.build();
        let shared = rig.filled(MIB(16), 0xAB);
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let (rig, shared) = (&rig, &shared);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed * 100 + u64::from(thread));
                    let stream = rig.allocator.create_stream().unwrap();
                    let queue = rig.allocator.stream(stream).unwrap();
                    let own = rig.manager.buffer(MIB(20)).unwrap();
                    for round in 0..60_u8 {
                        let mark = round ^ (thread << 6);
                        if random.bool() {
                            write(rig, &own, (stream, queue), mark);
                            let set = [(&own, Access::Shared), (shared, Access::Shared)];
                            let Ok(lease) = rig.manager.lease(&set, stream) else { continue };
                            rig.sim.synchronize_stream(queue).unwrap();
                            for (range, byte) in lease.addresses().zip([mark, 0xAB]) {
                                let at = Bytes::new(random.u64(..range.len.count()));
                                let one = AddrRange::new(range.start + at, Bytes::new(1));
                                assert_eq!(rig.sim.peek(one).unwrap(), [byte]);
                            }
                        } else if random.bool() {
                            rig.manager.spill(MIB(random.u64(1..64)));
                        } else if let Ok(block) =
                            rig.allocator.malloc(MIB(random.u64(1..24)), stream)
                        {
                            rig.allocator.free(block, stream).unwrap();
                        }
                    }
                });
            }
        });
        rig.expect(&shared, 0xAB);
        drop(shared);
        rig.check();
    }
}

// --- Random programs of ends: streams are destroyed under leases and with work in flight, leases, and pins
// end in any order, events fail, buffers and the manager go while work runs. The race detector finds nothing,
// every byte stays, and nothing stays held ---

/// Calls that copy, and that record, query and wait for work.
const CALLS: [Call; 9] = [
    Call::CopyToHost,
    Call::CopyToDevice,
    Call::Wait,
    Call::CreateEvent,
    Call::Record,
    Call::Query,
    Call::SynchronizeEvent,
    Call::SynchronizeStream,
    Call::IsCapturing,
];

struct Buffer {
    buffer: DeferrableBuffer,
    /// What fills it, once it was written.
    byte: Option<u8>,
    leases: u32,
}

/// A lease of one buffer, with what was made under it.
struct Held {
    buffer: usize,
    /// Dropped first or last.
    pin: Option<Pin>,
    lease: LeaseSet,
}

struct RandomEndsProgram {
    rig: Rig,
    streams: Vec<StreamId>,
    /// A stream without other work. It captures while some objects end.
    captured: Stream,
    buffers: Vec<Buffer>,
    held: Vec<Held>,
    random: fastrand::Rng,
    ended: u32,
}

impl RandomEndsProgram {
    fn new(seed: u64) -> RandomEndsProgram {
        let random = fastrand::Rng::with_seed(seed);
        let disk = (seed % 2 == 1).then_some(MIB(512));
        let config = SpillConfig { patience: Duration::ZERO, ..Plan::default().config };
        let rig = Plan { disk, config, ..Plan::default() }.build();
        let streams = vec![rig.stream];
        let captured = rig.allocator.create_stream().unwrap();
        let captured = rig.allocator.stream(captured).unwrap();
        let (buffers, held) = (Vec::new(), Vec::new());
        RandomEndsProgram { rig, streams, captured, buffers, held, random, ended: 0 }
    }

    fn step(&mut self, step: u8) {
        if self.random.u32(..8) == 0 {
            let mut plan = FaultPlan::none();
            for _ in 0..self.random.u32(1..4) {
                let call = CALLS[self.random.usize(..CALLS.len())];
                let from = self.random.u64(1..4);
                plan = plan.and(match self.random.bool() {
                    true => FaultPlan::from_nth_of(call, from),
                    false => FaultPlan::nth_of(call, from),
                });
            }
            self.rig.sim.set_faults(plan);
        }
        match self.random.u32(..16) {
            0 | 1 if self.streams.len() < 6 => {
                self.streams.extend(self.rig.allocator.create_stream());
            }
            2 | 3 if self.streams.len() > 1 => {
                let at = self.random.usize(1..self.streams.len());
                if self.rig.allocator.destroy_stream(self.streams[at]).is_ok() {
                    self.streams.swap_remove(at);
                    self.ended += 1;
                }
            }
            4 if self.buffers.len() < 6 => {
                let len = Bytes::new(self.random.u64(1..(20 << 20)));
                let buffer = self.rig.manager.buffer(len).unwrap();
                if self.random.bool() {
                    // Only some devices can, and the simulated one is one of them.
                    let _ = buffer.readable_while_spilled();
                }
                self.buffers.push(Buffer { buffer, byte: None, leases: 0 });
                self.write(self.buffers.len() - 1, step);
            }
            5..=8 if !self.buffers.is_empty() => {
                let at = self.random.usize(..self.buffers.len());
                self.write(at, step);
            }
            9..=11 if !self.held.is_empty() => self.end_lease(),
            12 => {
                self.rig.manager.spill(MIB(self.random.u64(1..64)));
            }
            13 => {
                let stream = self.rig.stream;
                if let Ok(block) = self.rig.allocator.malloc(MIB(self.random.u64(1..30)), stream) {
                    let range = AddrRange::new(block.addr(), block.len());
                    self.rig.sim.fill(self.rig.queue, range, 0xEE).unwrap();
                    self.rig.allocator.free(block, stream).unwrap();
                }
            }
            14 => self.rig.sim.advance(self.random.u64(..2_000_000)),
            _ => {
                self.rig.manager.clean(MIB(16));
            }
        }
        self.rig.sim.set_faults(FaultPlan::none());
        self.rig.manager.audit().unwrap();
        assert!(self.rig.sim.device_loss().is_none(), "{:?}", self.rig.sim.device_loss());
        assert!(self.rig.sim.hazards().is_empty(), "{:?}", self.rig.sim.hazards());
    }

    /// Writes a buffer on some stream, under a lease that is kept for a while.
    fn write(&mut self, at: usize, byte: u8) {
        let stream = self.streams[self.random.usize(..self.streams.len())];
        let Some(queue) = self.rig.allocator.stream(stream) else { return };
        let known = &mut self.buffers[at];
        let Ok(lease) = known.buffer.lease(Access::Exclusive, stream) else { return };
        let busy = Kernel::new("busy").writing(lease.address(0));
        self.rig.sim.launch(queue, busy.lasting(self.random.u64(..3_000_000))).unwrap();
        self.rig.sim.fill(queue, lease.address(0), byte).unwrap();
        known.byte = Some(byte);
        known.leases += 1;
        let pin = (self.random.u32(..3) == 0).then(|| lease.pin(0).ok()).flatten();
        self.held.push(Held { buffer: at, pin, lease });
    }

    fn end_lease(&mut self) {
        let at = self.random.usize(..self.held.len());
        let Held { buffer, pin, lease } = self.held.swap_remove(at);
        self.buffers[buffer].leases -= 1;
        let is_captured = self.random.u32(..4) == 0;
        if is_captured {
            self.rig.sim.begin_capture(self.captured, CaptureMode::Global).unwrap();
        }
        if self.random.bool() {
            drop(pin);
            drop(lease);
        } else {
            drop(lease);
            drop(pin);
        }
        if is_captured {
            self.rig.sim.end_capture(self.captured).expect("no end invalidates a capture");
        }
    }

    /// Ends everything, and looks at every byte; or drops all handles while work runs.
    fn finish(mut self) {
        while !self.held.is_empty() {
            self.end_lease();
        }
        if self.random.bool() {
            self.rig.sim.advance(1_000_000_000);
            for Buffer { buffer, byte, .. } in &self.buffers {
                if let Some(byte) = *byte {
                    self.rig.expect(buffer, byte);
                }
            }
            self.buffers.clear();
            self.rig.check();
        }
        let is_captured = self.random.bool();
        let RandomEndsProgram { rig, buffers, captured, .. } = self;
        let Rig { sim, allocator, manager, pool, .. } = rig;
        if is_captured {
            sim.begin_capture(captured, CaptureMode::Global).unwrap();
        }
        drop(manager);
        drop(buffers);
        if is_captured {
            sim.end_capture(captured).expect("no end invalidates a capture");
        }
        let block = allocator.malloc(MIB(60), rig.stream).unwrap();
        let range = AddrRange::new(block.addr(), block.len());
        sim.launch(rig.queue, Kernel::new("next").writing(range)).unwrap();
        Arc::into_inner(allocator).expect("nothing else holds it").close().unwrap();
        // Blocks whose copies could neither be waited for nor recorded keep the pool and its events.
        let is_leaked = pool.stats().leaked_blocks > 0;
        drop(pool);
        assert!(sim.device_loss().is_none(), "{:?}", sim.device_loss());
        assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
        let LiveObjects { handles, events, streams, .. } = sim.live();
        assert_eq!((handles, streams), (0, 0));
        assert!(is_leaked || events == 0, "{events} events");
    }
}

#[test]
fn streams_that_end_under_leases_and_events_that_fail_corrupt_nothing() {
    let mut ended = 0;
    for seed in vramp_testing::seeds(12) {
        let mut program = RandomEndsProgram::new(seed);
        println!("seed {seed}");
        for step in 0..150 {
            program.step(step);
        }
        ended += program.ended;
        program.finish();
    }
    assert!(ended > 100, "only {ended} streams ended");
}

// --- Random threads in one space: reservations that wait, leases with and without a reservation that pays,
// allocations, spills, deadlines. Each thread must end, no total may exceed the limit, and all of it must
// come back ---

#[derive(Default)]
struct Tally {
    /// By a thread that waited, and by one that polled a future.
    leased: [AtomicU64; 2],
    without_deadline: AtomicU64,
    reserved: AtomicU64,
    refused: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

struct Thread<'a> {
    rig: &'a Rig,
    space: &'a MemorySpace,
    tracked: &'a TrackedAllocator,
    shared: &'a [DeferrableBuffer],
    tally: &'a Tally,
    stream: StreamId,
    queue: Stream,
    own: (DeferrableBuffer, u8),
    held: Option<Reservation>,
    random: fastrand::Rng,
}

impl Thread<'_> {
    /// Long, or none, for a thread that holds nothing which others need, so that it must be served;
    /// short for one that holds a reservation, which may be a deadlock.
    fn deadline(&mut self) -> Deadline {
        let attached = self.tracked.attached(Scope::Stream(self.stream)).is_some();
        let is_free = self.held.is_none() && !attached;
        match self.random.u8(..4) {
            0 if is_free => Deadline::from(LONG),
            1 | 2 if is_free => Deadline::NEVER,
            _ => Deadline::from(Duration::from_micros(self.random.u64(..3000))),
        }
    }

    fn step(&mut self, step: u8) {
        let deadline = self.deadline();
        match self.random.u32(..9) {
            0 | 1 if self.held.is_none() => {
                let request = self.space.request(MIB(self.random.u64(1..30)));
                match request.priority(self.random.i32(-1..2)).deadline(deadline).wait() {
                    Ok(reservation) => {
                        self.held = Some(reservation);
                        count(&self.tally.reserved);
                    }
                    Err(error) => self.is_late(deadline, &error),
                }
            }
            2 => drop(self.held.take()),
            3 => {
                if let Some(reservation) = self.held.take()
                    && let Err(error) = self.tracked.attach(Scope::Stream(self.stream), reservation)
                {
                    let vramp_tiers::tracked::AttachError::Occupied { reservation, .. } = error
                    else {
                        panic!("{error}");
                    };
                    self.held = Some(reservation);
                }
            }
            4 => drop(self.tracked.detach(Scope::Stream(self.stream))),
            5 => {
                let bytes = MIB(self.random.u64(1..8));
                if let Ok(block) = self.tracked.malloc(bytes, self.stream) {
                    self.tracked.free(block, self.stream).unwrap();
                }
            }
            6 => drop(self.rig.manager.spill(MIB(self.random.u64(1..30)))),
            _ => self.lease(step, deadline),
        }
    }

    fn lease(&mut self, step: u8, deadline: Deadline) {
        let Thread { rig, shared, own: (own, byte), stream, queue, .. } = self;
        let place = self.random.usize(..shared.len());
        let set = [(&*own, Access::Exclusive), (&shared[place], Access::Shared)];
        let request = rig.manager.request(&set).stream(*stream).deadline(deadline);
        let is_awaited = self.random.bool();
        let leased = match is_awaited {
            true => block_on(request),
            false => rig.manager.lease_on(&set, &[*stream], deadline),
        };
        match leased {
            Ok(lease) => {
                count(&self.tally.leased[usize::from(is_awaited)]);
                if deadline == Deadline::NEVER {
                    count(&self.tally.without_deadline);
                }
                rig.sim.synchronize_stream(*queue).unwrap();
                let ranges: Vec<_> = lease.addresses().collect();
                for (range, byte) in ranges.iter().zip([*byte, place as u8]) {
                    let at = Bytes::new(self.random.u64(..range.len.count()));
                    let one = AddrRange::new(range.start + at, Bytes::new(1));
                    assert_eq!(rig.sim.peek(one).unwrap(), [byte]);
                }
                rig.sim.fill(*queue, ranges[0], step).unwrap();
                *byte = step;
            }
            Err(SpillError::NoBudget { error, .. }) => self.is_late(deadline, &error),
            Err(SpillError::Refused(refused)) => self.is_late(deadline, &refused),
            // Mallocs of other threads took memory that nothing was charged for yet.
            Err(SpillError::NoMemory { error, .. }) => self.is_late(deadline, &error),
            Err(error) => panic!("{error}"),
        }
    }

    fn is_late(&self, deadline: Deadline, error: &dyn std::fmt::Display) {
        let end = deadline.instant();
        let end = end.unwrap_or_else(|| panic!("refused without a deadline: {error}"));
        assert!(end <= std::time::Instant::now(), "refused before its deadline: {error}");
        assert!(self.rig.spaces.waiting() < 100);
        count(&self.tally.refused);
    }
}

#[test]
fn leases_and_reservations_at_random_starve_none_and_return_all() {
    for seed in vramp_testing::seeds(3) {
        let disk = (seed % 2 == 0).then_some(MIB(512));
        let host = if disk.is_some() { MIB(48) } else { MIB(512) };
        // The card has more than the budget, so that what is charged decides.
        let rig = Plan { limit: MIB(96), host, disk, budget: true, ..patient() }.build();
        let space = rig.spaces.space(SpaceId::gpu(0)).unwrap();
        let tracked =
            TrackedAllocator::new(Arc::clone(&rig.allocator), &space, Policies::default());
        let shared: Vec<_> = (0..4).map(|byte| rig.filled(MIB(12), byte)).collect();
        let tally = Tally::default();
        std::thread::scope(|scope| {
            for thread in 0..6_u64 {
                let (rig, space, tracked, shared) = (&rig, &space, &tracked, &shared[..]);
                let tally = &tally;
                scope.spawn(move || {
                    let stream = rig.allocator.create_stream().unwrap();
                    let queue = rig.allocator.stream(stream).unwrap();
                    let own = rig.filled(MIB(10), 0xEE);
                    let random = fastrand::Rng::with_seed(seed * 100 + thread);
                    let own = (own, 0xEE);
                    let held = None;
                    let mut program = Thread {
                        rig,
                        space,
                        tracked,
                        shared,
                        tally,
                        stream,
                        queue,
                        own,
                        held,
                        random,
                    };
                    for step in 0..60 {
                        program.step(step);
                    }
                    drop(tracked.detach(Scope::Stream(stream)));
                });
            }
        });
        let leased = tally.leased.each_ref().map(|count| count.load(Ordering::Relaxed));
        let without_deadline = tally.without_deadline.load(Ordering::Relaxed);
        assert!(leased.iter().sum::<u64>() > 20, "seed {seed}: {leased:?}");
        assert!(!leased.contains(&0) && without_deadline > 0, "seed {seed}: {leased:?}");
        assert!(tally.reserved.load(Ordering::Relaxed) > 10, "seed {seed}");
        // Mallocs outside reservations may go up to the capacity, all else up to the limit.
        assert!(space.peak() <= space.capacity());
        shared.iter().zip(0..).for_each(|(buffer, byte)| rig.expect(buffer, byte));
        rig.check();
        drop(shared);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.census();
        assert_eq!((space.total(), rig.spaces.waiting()), (Bytes::ZERO, 0), "seed {seed}");
        rig.spaces.audit().unwrap();
        rig.check();
    }
}
