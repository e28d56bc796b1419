//! Sequences of operations that lead to a certain end: objects are made, used on several streams, and
//! ended while their work is in flight, and then others ask for the memory. Operations drawn one by
//! one seldom meet like that.
//!
//! A story is operations like any others. What it names may be gone when its turn comes, and other
//! operations come in between.

use vramp_driver::Call;

use super::draw::Drawer;
use super::op::Op;
use super::world::World;

/// Where a story takes place.
#[derive(Clone, Copy, Debug)]
struct Scene {
    pool: u64,
    /// Streams that run. They may be the same.
    streams: [u64; 3],
}

impl Drawer {
    /// Plans a story, if there is a stage for one.
    pub(super) fn tell(&mut self, world: &World) {
        let Some(scene) = self.scene(world) else { return };
        let story = match self.random.below(8) {
            0..3 if self.mix.graphs => self.replays(world, scene),
            3 if self.mix.caches => self.cache_in_use(scene),
            3..5 if self.mix.ranges => self.range_in_use(scene),
            5 if self.mix.ends => self.close_in_use(scene),
            _ => self.stream_in_use(world, scene),
        };
        self.script.extend(story.into_iter().filter(|op| world.subject.can(op)));
    }

    fn scene(&mut self, world: &World) -> Option<Scene> {
        let pool = self.random.pick(&world.pools)?;
        let mut stream =
            || self.random.pick_of(&world.streams, |state| state.is_open() && !state.captures());
        let streams = [stream()?, stream()?, stream()?];
        Some(Scene { pool, streams })
    }

    fn any_of(&mut self, scene: Scene) -> u64 {
        scene.streams[self.random.below(3) as usize]
    }

    fn size(&mut self) -> u64 {
        match self.random.below(4) {
            0 => 1 << (12 + self.random.below(8)),
            _ => (1 + self.random.below(6)) << 21,
        }
    }

    /// A graph is captured, launched on several streams and dropped, in any order with its arena and
    /// the blocks that it left.
    fn replays(&mut self, world: &World, scene: Scene) -> Vec<Op> {
        let Scene { pool, streams: [stream, other, _] } = scene;
        let mut story = Vec::new();
        let known =
            self.random.pick_of(&world.arenas, |arena| !arena.dropped && arena.pool == pool);
        let arena = match known {
            Some(known) if !self.random.one_in(4) => known,
            _ => {
                let arena = self.name();
                let (order, mode) = (self.random.below(2), self.random.below(3));
                story.push(Op::Arena { pool, arena, monotone: 0, order, mode });
                arena
            }
        };
        let size = self.size();
        // A block from before the capture that the graph uses, and may keep.
        let outside = (!self.random.one_in(3)).then(|| self.name());
        if let Some(block) = outside {
            story.push(Op::Malloc { pool, stream, size, block });
            story.push(Op::Work { block, stream, kind: 2, ns: self.ns() });
        }
        let (capture, graph) = (self.name(), self.name());
        let mode = self.random.below(3);
        story.push(match self.random.one_in(6) {
            true => Op::Attach { arena, stream, capture, mode },
            false => Op::Begin { arena, stream, capture },
        });
        let forks = self.random.one_in(3);
        if forks {
            story.push(Op::Fork { capture, from: stream, stream: other });
        }
        let mut escaped = Vec::new();
        for _ in 0..=self.random.below(2) {
            let (block, size) = (self.name(), self.size());
            let on = if forks && self.random.one_in(2) { other } else { stream };
            story.push(Op::Malloc { pool, stream: on, size, block });
            let kind = 1 + self.random.below(2);
            story.push(Op::Work { block, stream: on, kind, ns: self.ns() });
            match self.random.one_in(2) {
                true => story.push(Op::Free { block, stream: on, way: 0 }),
                false => escaped.push(block),
            }
        }
        if let Some(block) = outside {
            story.push(Op::Work { block, stream, kind: self.random.below(3), ns: self.ns() });
            if !self.random.one_in(3) {
                story.push(Op::Free { block, stream, way: 0 });
            }
        }
        story.push(Op::End { capture, way: 0, graph });
        for _ in 0..=self.random.below(3) {
            let (on, lease) = (self.any_of(scene), self.name());
            story.push(Op::Launch { graph, stream: on, lease });
            if let (Some(&block), true) = (escaped.first(), self.random.one_in(2)) {
                let reader = self.any_of(scene);
                story.push(Op::Read { lease, block, stream: reader, ns: self.ns() });
            }
            if !self.random.one_in(6) {
                story.push(Op::EndLease { lease, way: 0 });
            }
        }
        let mut ends = vec![Op::DropGraph { graph, way: 0 }];
        ends.extend(escaped.iter().map(|&block| Op::Free { block, stream, way: 0 }));
        if !self.random.one_in(3) {
            ends.push(Op::DropArena { arena, way: 0 });
        }
        if self.random.one_in(3) {
            ends.push(Op::Destroy { pool, stream: self.any_of(scene) });
        }
        self.random.shuffle(&mut ends);
        story.extend(ends);
        self.pressure(scene, size, &mut story);
        story
    }

    /// A stable range ends, or lends its memory, while streams work on it.
    fn range_in_use(&mut self, scene: Scene) -> Vec<Op> {
        let (pool, range, len) = (scene.pool, self.name(), self.size().max(2 << 20));
        let mut story = vec![Op::Range { pool, range, len }];
        story.push(Op::Back { range, stream: scene.streams[0] });
        for _ in 0..=self.random.below(2) {
            let (stream, kind) = (self.any_of(scene), 1 + self.random.below(3));
            story.push(Op::WorkRange { range, stream, kind, ns: self.ns() });
        }
        if self.random.one_in(3) {
            story.push(Op::Destroy { pool, stream: self.any_of(scene) });
        }
        story.push(match self.random.one_in(4) {
            true => Op::Lend { range },
            false => Op::DropRange { range, way: 0 },
        });
        self.pressure(scene, len, &mut story);
        story
    }

    /// Pages go from stream to stream while work is in flight, and others want their memory.
    fn cache_in_use(&mut self, scene: Scene) -> Vec<Op> {
        let (pool, cache, count) = (scene.pool, self.name(), 4 + self.random.below(12));
        let shape = self.random.below(54);
        let mut story = vec![Op::Cache { pool, cache, pages: count, shape }];
        let size = self.size();
        for _ in 0..=self.random.below(3) {
            let stream = self.any_of(scene);
            let pages = ((1 << (1 + self.random.below(4))) - 1) << self.random.below(count);
            story.push(Op::Commit { cache, stream, pages });
            if !self.random.one_in(3) {
                let kind = 1 + self.random.below(3);
                story.push(Op::WorkCache { cache, stream, pages, kind, ns: self.ns() });
            }
            if self.random.one_in(4) {
                story.push(Op::Destroy { pool, stream: self.any_of(scene) });
            }
            let (stream, way) = (self.any_of(scene), u64::from(self.random.one_in(6)));
            story.push(Op::Park { cache, stream, pages, way });
            if self.random.one_in(3) {
                story.push(Op::Release { cache, keep: 0 });
            }
        }
        if self.random.one_in(2) {
            story.push(Op::DropCache { cache, way: 0 });
        }
        self.pressure(scene, size.max(16 << 20), &mut story);
        story
    }

    /// A pool is closed while streams work on its memory, with or without calls that fail.
    fn close_in_use(&mut self, scene: Scene) -> Vec<Op> {
        let Scene { pool, streams } = scene;
        let mut story = Vec::new();
        for stream in streams {
            let (block, size) = (self.name(), self.size());
            story.push(Op::Malloc { pool, stream, size, block });
            story.push(Op::Work { block, stream, kind: 1 + self.random.below(2), ns: 1 << 21 });
            if self.random.one_in(3) {
                story.push(Op::Free { block, stream, way: 0 });
            }
        }
        if self.random.one_in(2) {
            story.push(Op::Destroy { pool, stream: streams[0] });
        }
        if self.mix.faults {
            let call = match self.random.one_in(2) {
                true => Call::SynchronizeStream,
                false => Call::SynchronizeEvent,
            };
            let (nth, times) = (1 + self.random.below(2), 1 + 15 * self.random.below(2));
            story.push(Op::Fault { call: call as u64, nth, code: 304, times });
        }
        story.push(Op::EndPool { pool, way: self.random.below(2) });
        story.push(Op::NoFault {});
        story
    }

    /// A stream ends with memory of several pools on it, some of it free and some not.
    fn stream_in_use(&mut self, world: &World, scene: Scene) -> Vec<Op> {
        let (stream, mut story, mut live) = (scene.streams[0], Vec::new(), Vec::new());
        let size = self.size();
        for pool in world.pools.names() {
            for _ in 0..=self.random.below(2) {
                let block = self.name();
                story.push(Op::Malloc { pool, stream, size, block });
                let on = self.any_of(scene);
                story.push(Op::Work {
                    block,
                    stream: on,
                    kind: 1 + self.random.below(3),
                    ns: 1 << 20,
                });
                match self.random.one_in(3) {
                    true => live.push(block),
                    false => story.push(Op::Free { block, stream, way: 0 }),
                }
            }
        }
        story.push(Op::Destroy { pool: scene.pool, stream });
        let later = self.any_of(scene);
        story.extend(live.into_iter().map(|block| Op::Free { block, stream: later, way: 0 }));
        for pool in world.pools.names() {
            self.pressure(Scene { pool, ..scene }, size, &mut story);
        }
        story
    }

    /// Others want the memory that was freed, or it is returned.
    fn pressure(&mut self, scene: Scene, size: u64, story: &mut Vec<Op>) {
        let pool = scene.pool;
        if self.random.one_in(3) {
            story.push(Op::Trim { pool, to: 0 });
        }
        for _ in 0..self.random.below(4) {
            let (block, stream) = (self.name(), self.any_of(scene));
            story.push(Op::Malloc { pool, stream, size, block });
            story.push(Op::Work { block, stream, kind: 1, ns: self.ns() });
            story.push(Op::Free { block, stream, way: 0 });
        }
    }
}
