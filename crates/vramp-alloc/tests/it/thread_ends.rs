//! Eight threads create and end streams, blocks, pools and callbacks of one allocator at random,
//! with work in flight, and free each other's blocks. The race detector finds nothing, nothing hangs,
//! and nothing is left.

use std::sync::Mutex;

use crate::common::Rig;
use crate::common::graph_rig::range;
use crate::common::random::Random;
use vramp_alloc::observe::Registration;
use vramp_alloc::{Allocation, Allocator, Bytes, Config, StreamId};
use vramp_driver::Driver;
use vramp_driver::sim::{Kernel, LiveObjects, Simulator};
use vramp_peers::Preset;

/// Blocks that any thread may free, each with the stream of its last work.
type Handed = Mutex<Vec<(Allocation, StreamId)>>;

struct Worker<'a> {
    sim: &'a Simulator,
    allocator: &'a Allocator,
    handed: &'a Handed,
    random: Random,
    streams: Vec<StreamId>,
    observer: Option<Registration>,
}

impl Worker<'_> {
    fn run(mut self, steps: u32) {
        for _ in 0..steps {
            self.step();
        }
        for stream in self.streams {
            self.allocator.destroy_stream(stream).unwrap();
        }
        if let Some(observer) = self.observer {
            assert!(self.allocator.unregister(observer));
        }
    }

    fn step(&mut self) {
        match self.random.below(32) {
            0 | 1 if self.streams.len() < 4 => {
                self.streams.push(self.allocator.create_stream().unwrap());
            }
            2 | 3 if !self.streams.is_empty() => {
                let at = self.random.below(self.streams.len() as u64) as usize;
                self.allocator.destroy_stream(self.streams.swap_remove(at)).unwrap();
            }
            4..=14 if !self.streams.is_empty() => self.work(),
            15..=24 => {
                let block = self.handed.lock().unwrap().pop();
                if let Some((block, last)) = block {
                    self.allocator.free(block, last).unwrap();
                }
            }
            25 => self.allocator.trim(Bytes::mib(self.random.below(64))).unwrap(),
            26 if !self.streams.is_empty() => self.pool(),
            27 => match self.observer.take() {
                Some(observer) => assert!(self.allocator.unregister(observer)),
                None => self.observer = Some(self.allocator.observe(|_| ())),
            },
            28 => {
                let limit = Bytes::mib(256 + self.random.below(256));
                self.allocator.set_limit(Some(limit)).unwrap();
            }
            29 => self.allocator.audit().unwrap(),
            _ => self.sim.advance(self.random.below(1 << 16)),
        }
    }

    /// Works on a new block on one stream or two, and hands it over.
    fn work(&mut self) {
        let sizes = [Bytes::kib(3), Bytes::kib(700), Bytes::mib(2), Bytes::mib(9)];
        let size = sizes[self.random.below(4) as usize];
        let stream = *self.random.pick(&self.streams);
        let Ok(block) = self.allocator.malloc(size, stream) else { return };
        let kernel = Kernel::new("write").writing(range(&block));
        let raw = self.allocator.stream(stream).unwrap();
        self.sim.launch(raw, kernel.lasting(self.random.below(1 << 16))).unwrap();
        let other = *self.random.pick(&self.streams);
        if other != stream {
            let event = self.sim.create_event().unwrap();
            self.sim.record(event, raw).unwrap();
            let raw = self.allocator.stream(other).unwrap();
            self.sim.wait(raw, event).unwrap();
            let kernel = Kernel::new("read").reading(range(&block));
            self.sim.launch(raw, kernel.lasting(self.random.below(1 << 16))).unwrap();
            self.sim.destroy_event(event).unwrap();
            self.allocator.record_use(&block, other).unwrap();
        }
        self.handed.lock().unwrap().push((block, stream));
    }

    /// Works in a pool of its own, which ends with work in flight.
    fn pool(&mut self) {
        let pool = self.allocator.create_pool("side").unwrap();
        let stream = *self.random.pick(&self.streams);
        if let Ok(block) = pool.malloc(Bytes::mib(3), stream) {
            let kernel = Kernel::new("side").writing(range(&block)).lasting(1 << 14);
            self.sim.launch(self.allocator.stream(stream).unwrap(), kernel).unwrap();
            if self.random.below(2) == 0 {
                pool.free(block, stream).unwrap();
            }
        }
        match self.random.below(2) {
            0 => pool.close().unwrap(),
            _ => drop(pool),
        }
    }
}

#[test]
fn threads_end_objects_of_one_allocator_at_random() {
    for preset in Preset::ALL {
        for seed in 0..2 {
            let config = Config { limit: Some(Bytes::mib(512)), ..preset.config() };
            let rig = Rig::on(Simulator::builder().checked(), config);
            let handed = Handed::default();
            std::thread::scope(|scope| {
                for thread in 0..8 {
                    let worker = Worker {
                        sim: &rig.sim,
                        allocator: &rig.allocator,
                        handed: &handed,
                        random: Random(seed * 100 + thread + 1),
                        streams: Vec::new(),
                        observer: None,
                    };
                    scope.spawn(move || worker.run(250));
                }
            });
            for (block, last) in handed.into_inner().unwrap() {
                rig.allocator.free(block, last).unwrap();
            }
            rig.allocator.audit().unwrap();
            assert_eq!(rig.allocator.live(), Bytes::ZERO, "{}", preset.name());
            let Rig { sim, allocator, .. } = rig;
            allocator.close().unwrap();
            assert!(sim.device_loss().is_none(), "{}: {:?}", preset.name(), sim.device_loss());
            assert!(sim.hazards().is_empty(), "{}: {:?}", preset.name(), sim.hazards().first());
            assert_eq!(sim.live(), LiveObjects::default(), "{}", preset.name());
        }
    }
}
