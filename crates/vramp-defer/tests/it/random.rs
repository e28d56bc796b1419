//! Random programs: kernels on four streams, leases, spills, mallocs, checked by the race detector
//! and by the bytes.

use vramp_alloc::Driver;
use vramp_driver::sim::Kernel;

use super::*;

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
