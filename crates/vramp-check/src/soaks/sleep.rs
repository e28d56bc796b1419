//! Random pauses and resumes of regions by several threads, with work and replays of captured graphs in
//! between, and every byte compared.
//!
//! Each region has blocks of several sizes, which work on the card fills and copies, and a graph that was
//! captured in it before its first pause. A thread that moves a region excludes work in that region, as a
//! program does; other regions go on. A block of each region is registered outside, except while the region sleeps. At the end all blocks are compared whole.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use vramp_alloc::graph::{ArenaConfig, CapturedGraph, GraphArena};
use vramp_alloc::sharing::range_of;
use vramp_alloc::{Allocation, Allocator, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::{DeviceCopy, HostBuffer, HostSlice, Stream};
use vramp_tiers::host::HostPoolConfig;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::regions::{Backup, PauseOptions, Region, RegionOptions, Regions, SleepCallbacks};
use vramp_tiers::{Bytes, HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};

use super::{Ground, Outcome, at_least_one};

/// What is compared at a time.
const WINDOW: Bytes = Bytes::mib(1);

/// What to run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// `auto`, `cuda:N`, or `sim` for a small simulated card.
    #[arg(default_value = "auto")]
    pub device: String,
    /// Pauses and resumes of all threads.
    #[arg(long, default_value_t = 1000, value_parser = at_least_one)]
    pub moves: u64,
    /// Bytes of each region; by default 1GiB, 24MiB on a simulated card.
    #[arg(long)]
    pub region: Option<Bytes>,
    /// Threads.
    #[arg(long, default_value_t = 4, value_parser = at_least_one)]
    pub threads: u64,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Runs the program, and prints what it did.
///
/// # Errors
/// A byte is wrong, accesses have no order, or a call fails.
pub fn run(args: &Args) -> Outcome<()> {
    let ground = Ground::open(&args.device, Bytes::mib(512))?;
    let driver = &ground.driver;
    let len = args.region.unwrap_or(ground.choose(Bytes::gib(1), Bytes::mib(24)));
    let begun = Instant::now();
    let soak = Soak::new(driver, len)?;
    let before = driver.memory_info()?.free;
    println!("{}: {len} in each of {} regions", driver.info().name, soak.tags.len());
    soak.run(args)?;
    println!("{:?} in {:.1} s", soak.counts, begun.elapsed().as_secs_f64());
    for status in soak.regions.status() {
        println!("{}: {} on the card, {} on the host", status.tag, status.on_card, status.on_host);
    }
    let after = driver.memory_info()?.free;
    println!("free memory of the card before and after: {before}, {after}");
    ground.check_order()?;
    println!("every byte was right");
    Ok(())
}

/// A block, and the byte that all of it has.
struct Filled {
    block: Allocation,
    byte: u8,
}

/// What a region has. Locked while the region is moved, and while it is used.
struct Contained {
    awake: bool,
    blocks: Vec<Filled>,
    /// Copies the first block to the second one, through memory of the graph's own.
    graph: CapturedGraph,
}

struct Tag {
    region: Arc<Region>,
    contained: Mutex<Contained>,
    _arena: GraphArena,
}

#[derive(Debug, Default)]
struct Counts {
    pauses: AtomicU64,
    partial_pauses: AtomicU64,
    resumes: AtomicU64,
    cleans: AtomicU64,
    fills: AtomicU64,
    replays: AtomicU64,
    compared: AtomicU64,
}

struct Soak {
    driver: Arc<dyn Driver>,
    allocator: Allocator,
    regions: Regions,
    tags: Vec<Tag>,
    counts: Counts,
    moves: AtomicU64,
    len: Bytes,
    /// Kept open: its spaces have the memory of the host.
    _spaces: ReservationManager,
}

const TAGS: [(&str, RegionOptions); 5] = [
    ("weights", RegionOptions { backup: Backup::Host, read_only: true, graph_pins: true }),
    ("optimizer", RegionOptions { backup: Backup::Host, read_only: false, graph_pins: true }),
    ("activations", RegionOptions { backup: Backup::Host, read_only: false, graph_pins: true }),
    ("kv", RegionOptions { backup: Backup::None, read_only: false, graph_pins: true }),
    ("graphs", RegionOptions { backup: Backup::Host, read_only: false, graph_pins: true }),
];

impl Soak {
    fn new(driver: &Arc<dyn Driver>, len: Bytes) -> Outcome<Soak> {
        let allocator = Allocator::new(Arc::clone(driver), Config::default())?;
        let host = SpaceId::host(0);
        let spaces = ReservationManager::new([(host, SpaceConfig::host(len * 16))])?;
        let space = spaces.space(host).ok_or("it was configured")?;
        let pool = HostPool::new(&space, HostPoolConfig::default(), [Arc::clone(driver)])?;
        let config = MoverConfig { step: Bytes::mib(4), ..MoverConfig::default() };
        let regions = Regions::new(Mover::new(Arc::clone(driver), &pool, config)?);
        let mut soak = Soak {
            driver: Arc::clone(driver),
            allocator,
            regions,
            tags: Vec::new(),
            counts: Counts::default(),
            moves: AtomicU64::new(0),
            len,
            _spaces: spaces,
        };
        let stream = soak.allocator.create_stream()?;
        for (index, (tag, options)) in TAGS.into_iter().enumerate() {
            let made = soak.tag(tag, options, stream, index as u8)?;
            soak.tags.push(made);
        }
        soak.driver.synchronize_stream(soak.queue(stream)?)?;
        Ok(soak)
    }

    fn queue(&self, stream: StreamId) -> Outcome<Stream> {
        Ok(self.allocator.stream(stream).ok_or("the stream is open")?)
    }

    /// Creates a region with two blocks of a quarter of its bytes, some small ones, and a graph.
    fn tag(&self, tag: &str, options: RegionOptions, stream: StreamId, byte: u8) -> Outcome<Tag> {
        let region = self.regions.region(&self.allocator, tag, options)?;
        let allocator = region.allocator();
        let quarter = Bytes::new(self.len.count() / 4);
        let rest = Bytes::new(self.len.count() / 96);
        let lens = [quarter, quarter].into_iter().chain([rest; 8]).chain([Bytes::kib(3); 8]);
        let mut blocks = Vec::new();
        for len in lens {
            let block = allocator.malloc(len, stream)?;
            self.fill(stream, &block, byte)?;
            blocks.push(Filled { block, byte });
        }
        let arena = allocator.graph_arena(ArenaConfig::default())?;
        let queue = self.queue(stream)?;
        let (from, to) = (blocks[0].block.addr(), blocks[1].block.addr());
        let (graph, captured) = allocator.capture(stream, &arena, || -> Outcome<()> {
            let scratch = allocator.malloc(quarter, stream)?;
            self.driver.copy(queue, DeviceCopy { from, to: scratch.addr(), len: quarter })?;
            self.driver.copy(queue, DeviceCopy { from: scratch.addr(), to, len: quarter })?;
            allocator.free(scratch, stream)?;
            Ok(())
        })?;
        captured?;
        self.register(&region, &blocks[0].block)?;
        let contained = Mutex::new(Contained { awake: true, blocks, graph });
        Ok(Tag { region, contained, _arena: arena })
    }

    /// Pins a block as a library that registered it, which ends that around each sleep.
    fn register(&self, region: &Arc<Region>, block: &Allocation) -> Outcome<()> {
        let (region, range) = (Arc::clone(region), range_of(block));
        let pin = Arc::new(Mutex::new(Some(region.allocator().pin_range(range)?)));
        let (tag, held) = (region.tag().to_owned(), Arc::clone(&pin));
        self.regions.callbacks().add(SleepCallbacks {
            tags: Some(vec![tag]),
            before: Box::new(move || {
                let mut held = held.lock().map_err(|_| "a thread panicked")?;
                drop(held.take().ok_or("`before` was called twice")?);
                Ok(())
            }),
            after: Box::new(move || {
                let pinned = region.allocator().pin_range(range)?;
                let before = pin.lock().map_err(|_| "a thread panicked")?.replace(pinned);
                before.map_or(Ok(()), |_| Err("`after` was called twice".into()))
            }),
            ..SleepCallbacks::named("registration")
        });
        Ok(())
    }

    fn fill(&self, stream: StreamId, block: &Allocation, byte: u8) -> Outcome<()> {
        let range = AddrRange::new(block.addr(), block.len());
        Ok(self.driver.fill(self.queue(stream)?, range, byte)?)
    }

    fn run(&self, args: &Args) -> Outcome<()> {
        std::thread::scope(|scope| {
            let threads = (0..args.threads).map(|thread| {
                let random = fastrand::Rng::with_seed(args.seed * 1000 + thread);
                scope.spawn(move || Worker::run(self, random, args.moves))
            });
            let threads: Vec<_> = threads.collect();
            let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            ends.into_iter().try_for_each(|end| end.map_err(|_| "a thread panicked")?)
        })?;
        let mut last = Worker::new(self, fastrand::Rng::with_seed(args.seed))?;
        for tag in &self.tags {
            let mut contained = tag.contained.lock().map_err(|_| "a thread panicked")?;
            if !contained.awake {
                last.resume(tag, &mut contained)?;
            }
            for filled in &contained.blocks {
                last.compare(filled, Bytes::ZERO, filled.block.len())?;
            }
        }
        last.end()
    }
}

struct Worker<'a> {
    soak: &'a Soak,
    random: fastrand::Rng,
    stream: StreamId,
    queue: Stream,
    window: HostBuffer,
}

impl Worker<'_> {
    fn new(soak: &Soak, random: fastrand::Rng) -> Outcome<Worker<'_>> {
        let stream = soak.allocator.create_stream()?;
        let queue = soak.queue(stream)?;
        let window = soak.driver.alloc_host(WINDOW)?;
        Ok(Worker { soak, random, stream, queue, window })
    }

    fn run(soak: &Soak, random: fastrand::Rng, moves: u64) -> Outcome<()> {
        let mut worker = Worker::new(soak, random)?;
        while soak.moves.load(Relaxed) < moves {
            // After a failure the other threads may stop.
            worker.step().inspect_err(|_| soak.moves.store(moves, Relaxed))?;
        }
        worker.end()
    }

    fn end(self) -> Outcome<()> {
        self.soak.driver.synchronize_stream(self.queue)?;
        self.soak.driver.free_host(self.window)?;
        Ok(self.soak.allocator.destroy_stream(self.stream)?)
    }

    fn step(&mut self) -> Outcome<()> {
        let soak = self.soak;
        let tag = &soak.tags[self.random.usize(..soak.tags.len())];
        let mut contained = tag.contained.lock().map_err(|_| "a thread panicked")?;
        match (contained.awake, self.random.u32(..10)) {
            (true, 0..3) => self.pause(tag, &mut contained),
            (true, 3) => {
                // Nothing is written until the region was paused and resumed.
                soak.regions.clean(tag.region.tag())?;
                soak.counts.cleans.fetch_add(1, Relaxed);
                self.pause(tag, &mut contained)
            }
            (true, 4..7) => self.work(tag, &mut contained),
            (true, _) => self.look(&contained),
            (false, 0..2) => self.pause(tag, &mut contained),
            (false, _) => self.resume(tag, &mut contained),
        }
    }

    /// Pauses a region, or takes one that sleeps in part further.
    fn pause(&mut self, tag: &Tag, contained: &mut Contained) -> Outcome<()> {
        let part = Bytes::new(self.random.u64(..self.soak.len.count()));
        let keep = if self.random.bool() { Bytes::ZERO } else { part };
        let options = PauseOptions { keep, ..PauseOptions::default() };
        self.soak.regions.pause(&[tag.region.tag()], options)?;
        contained.awake = false;
        let counts = &self.soak.counts;
        let count = if keep.is_zero() { &counts.pauses } else { &counts.partial_pauses };
        count.fetch_add(1, Relaxed);
        self.soak.moves.fetch_add(1, Relaxed);
        Ok(())
    }

    fn resume(&mut self, tag: &Tag, contained: &mut Contained) -> Outcome<()> {
        self.soak.regions.resume(&[tag.region.tag()])?;
        contained.awake = true;
        self.soak.counts.resumes.fetch_add(1, Relaxed);
        self.soak.moves.fetch_add(1, Relaxed);
        if tag.region.options().backup != Backup::None {
            return Ok(());
        }
        // Its contents are lost.
        for filled in &mut contained.blocks {
            filled.byte = self.random.u8(..);
            self.soak.fill(self.stream, &filled.block, filled.byte)?;
        }
        self.over()
    }

    /// Waits for the work of this thread: others use the region next, on streams of their own.
    fn over(&self) -> Outcome<()> {
        Ok(self.soak.driver.synchronize_stream(self.queue)?)
    }

    /// Fills a block, or replays the graph, and at random pauses the region while that work is in flight.
    fn work(&mut self, tag: &Tag, contained: &mut Contained) -> Outcome<()> {
        if tag.region.options().read_only {
            return self.look(contained);
        }
        if self.random.bool() {
            drop(contained.graph.launch(self.stream)?);
            contained.blocks[1].byte = contained.blocks[0].byte;
            self.soak.counts.replays.fetch_add(1, Relaxed);
        } else {
            let filled = &mut contained.blocks[self.random.usize(..18)];
            filled.byte = self.random.u8(..);
            self.soak.fill(self.stream, &filled.block, filled.byte)?;
            self.soak.counts.fills.fetch_add(1, Relaxed);
        }
        match self.random.bool() {
            true => self.pause(tag, contained),
            false => self.over(),
        }
    }

    /// Compares a part of one block.
    fn look(&mut self, contained: &Contained) -> Outcome<()> {
        let filled = &contained.blocks[self.random.usize(..contained.blocks.len())];
        let len = filled.block.len().min(WINDOW);
        let from = Bytes::new(self.random.u64(..=(filled.block.len() - len).count()));
        self.compare(filled, from, len)
    }

    fn compare(&self, filled: &Filled, from: Bytes, len: Bytes) -> Outcome<()> {
        let (driver, mut at, end) = (&self.soak.driver, from, from + len);
        let mut bytes = vec![0; WINDOW.count() as usize];
        while at < end {
            let part = WINDOW.min(end - at);
            let slice = HostSlice { buffer: self.window, offset: Bytes::ZERO, len: part };
            driver.copy_to_host(self.queue, filled.block.addr() + at, slice)?;
            driver.synchronize_stream(self.queue)?;
            let bytes = &mut bytes[..part.count() as usize];
            driver.read_host(self.window, Bytes::ZERO, bytes)?;
            if let Some(wrong) = bytes.iter().position(|&byte| byte != filled.byte) {
                let (at, byte) = (at + Bytes::new(wrong as u64), bytes[wrong]);
                let (block, expected) = (&filled.block, filled.byte);
                return Err(format!("{byte} and not {expected} at {at} of {block:?}").into());
            }
            at += part;
        }
        self.soak.counts.compared.fetch_add(1, Relaxed);
        Ok(())
    }
}
