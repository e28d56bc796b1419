//! Random programs of ends: streams are destroyed under leases and with work in flight, leases,
//! and pins end in any order, events fail, buffers and the manager go while work runs.
//! The race detector finds nothing, every byte stays, and nothing stays held.

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_defer::{LeaseSet, Pin};
use vramp_driver::Call;
use vramp_driver::sim::{Kernel, LiveObjects};

use super::*;

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

struct Program {
    rig: Rig,
    streams: Vec<StreamId>,
    /// A stream without other work. It captures while some objects end.
    captured: Stream,
    buffers: Vec<Buffer>,
    held: Vec<Held>,
    random: fastrand::Rng,
    ended: u32,
}

impl Program {
    fn new(seed: u64) -> Program {
        let random = fastrand::Rng::with_seed(seed);
        let disk = (seed % 2 == 1).then_some(MIB(512));
        let config = SpillConfig { patience: Duration::ZERO, ..Plan::default().config };
        let rig = Plan { disk, config, ..Plan::default() }.build();
        let streams = vec![rig.stream];
        let captured = rig.allocator.create_stream().unwrap();
        let captured = rig.allocator.stream(captured).unwrap();
        let (buffers, held) = (Vec::new(), Vec::new());
        Program { rig, streams, captured, buffers, held, random, ended: 0 }
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
        let Program { rig, buffers, captured, .. } = self;
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
        let mut program = Program::new(seed);
        println!("seed {seed}");
        for step in 0..150 {
            program.step(step);
        }
        ended += program.ended;
        program.finish();
    }
    assert!(ended > 100, "only {ended} streams ended");
}
