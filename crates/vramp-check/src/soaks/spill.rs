//! Random leases, spills, restores, mallocs and reservations, by several threads on shared streams and on
//! streams that end while leases on them are held, with samples of the contents compared.
//!
//! Buffers of three times the limit lie on the card, the host and a disk; some are read in place. Work on the
//! card fills and copies parts of them; parts at random are copied to pinned memory and compared.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use vramp_alloc::{AllocError, Allocator, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_defer::{
    Access, DeferrableBuffer, LeaseSet, SpillConfig, SpillError, SpillManager, SpillParts,
};
use vramp_driver::{DeviceCopy, HostBuffer, HostSlice, Stream};
use vramp_tiers::disk::{CompressionConfig, DiskConfig};
use vramp_tiers::host::{HostPoolConfig, HostPoolError};
use vramp_tiers::movers::{MoveError, MoverConfig};
use vramp_tiers::{
    Bytes, DiskStore, HostPool, MemorySpace, Mover, Reservation, ReservationManager, SpaceConfig,
    SpaceId,
};

use super::{Ground, Outcome, at_least_one};

/// Each part of a buffer is filled with one byte. The last one of a buffer may be shorter.
const PART: Bytes = Bytes::kib(256);
/// Number of bytes of a part that are compared, at a random place.
const LOOK: Bytes = Bytes::kib(4);
const STREAMS: usize = 4;
/// Buffers of all threads together; each is a 16th of the limit on average.
const BUFFERS: usize = 48;
/// One of so many is readable while spilled.
const READABLE: u8 = 4;

/// What to run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// `auto`, `cuda:N`, or `sim` for a small simulated card.
    #[arg(default_value = "auto")]
    pub device: String,
    /// Seconds to run.
    #[arg(long, default_value_t = 5, value_parser = at_least_one)]
    pub seconds: u64,
    /// Limit of the card; by default 4GiB, 96MiB of a simulated one.
    #[arg(long)]
    pub limit: Option<Bytes>,
    /// Threads.
    #[arg(long, default_value_t = 4, value_parser = at_least_one)]
    pub threads: u64,
    /// Directory of the disk tier; by default a temporary one.
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Compress what goes to the disk, however long that takes.
    #[arg(long)]
    pub compress: bool,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Runs the program, and prints what it did.
///
/// # Errors
/// A byte is wrong, accesses have no order, something is left at the end, or a call fails.
pub fn run(args: &Args) -> Outcome<()> {
    let ground = Ground::open(&args.device, Bytes::gib(1))?;
    let limit = args.limit.unwrap_or(ground.choose(Bytes::gib(4), Bytes::mib(96)));
    let threads = args.threads.min(BUFFERS as u64 / 2);
    println!("{}: {limit} for {BUFFERS} buffers, {threads} threads", ground.driver.info().name);
    let start = Instant::now();
    let compression = args
        .compress
        .then(|| CompressionConfig { short_below_per_mille: 1000, ..CompressionConfig::default() });
    let soak = Soak::new(&ground.driver, limit, args.dir.clone(), compression)?;
    let counts = soak.run(threads, args.seed, start + Duration::from_secs(args.seconds))?;
    soak.audit()?;
    println!("{counts:?} in {:.1} s", start.elapsed().as_secs_f64());
    println!("{:?}", soak.manager.stats());
    println!("{:?}", soak.manager.counters());
    soak.manager.failures().iter().for_each(|failed| println!("{failed}"));
    if args.compress {
        println!("{:?}", soak.store.stats().compression);
    }
    soak.close()?;
    ground.check_order()?;
    println!("every byte that was looked at was right");
    Ok(())
}

/// Shared by all threads.
struct Soak {
    driver: Arc<dyn Driver>,
    card: MemorySpace,
    /// Dropping it ends all waits.
    _spaces: ReservationManager,
    allocator: Arc<Allocator>,
    pool: HostPool,
    store: Arc<DiskStore>,
    manager: SpillManager,
    streams: Vec<(StreamId, Stream)>,
    limit: Bytes,
    _files: Option<tempfile::TempDir>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    leases: u64,
    /// Leases refused because others held what they needed for longer than the manager's patience.
    refused: u64,
    without_memory: u64,
    without_blocks: u64,
    writes: u64,
    copies: u64,
    looks: u64,
    reads_in_place: u64,
    prefetches: u64,
    spills: u64,
    cleans: u64,
    reliefs: u64,
    mallocs: u64,
    mallocs_refused: u64,
    buffers: u64,
    streams_ended: u64,
    reserved: u64,
    not_reserved: u64,
}

impl Soak {
    fn new(
        driver: &Arc<dyn Driver>,
        limit: Bytes,
        dir: Option<PathBuf>,
        compression: Option<CompressionConfig>,
    ) -> Outcome<Soak> {
        let config = Config { limit: Some(limit), ..Config::default() };
        let allocator = Arc::new(Allocator::new(Arc::clone(driver), config)?);
        let (card, host, disk) = (SpaceId::gpu(0), SpaceId::host(0), SpaceId::disk(0));
        // Reservations take at most half of the card from the buffers, and mallocs are outside.
        let spaces = ReservationManager::new([
            (card, SpaceConfig::gpu(limit)),
            (host, SpaceConfig::host(limit)),
            (disk, SpaceConfig::disk(limit * 4)),
        ])?;
        let space = |id| spaces.space(id).ok_or("it was configured");
        let config = HostPoolConfig { blocks_per_pool: 32, ..HostPoolConfig::default() };
        let pool = HostPool::new(&space(host)?, config, [Arc::clone(driver)])?;
        let mover = MoverConfig { step: Bytes::mib(4), ..MoverConfig::default() };
        let mover = Mover::new(Arc::clone(driver), &pool, mover)?;
        let files = if dir.is_none() { Some(tempfile::tempdir()?) } else { None };
        let dir = dir.or_else(|| files.as_ref().map(|files| files.path().to_owned()));
        let dir = dir.ok_or("there is a directory")?;
        let file_size = limit.round_down(PART);
        let config = DiskConfig { file_size, compression, ..DiskConfig::default() };
        let store = Arc::new(DiskStore::open(&dir, config, &space(disk)?)?);
        let parts = SpillParts {
            allocator: Arc::clone(&allocator),
            mover,
            disk: Some(Arc::clone(&store)),
            budget: Some(space(card)?),
            peers: Vec::new(),
        };
        let config = SpillConfig {
            piece: Bytes::mib(8),
            clean_after: Duration::from_millis(1),
            ..SpillConfig::default()
        };
        let manager = SpillManager::new(parts, config)?;
        let streams = (0..STREAMS).map(|_| {
            let stream = allocator.create_stream()?;
            Ok((stream, allocator.stream(stream).ok_or("the stream was made a moment ago")?))
        });
        let streams = streams.collect::<Outcome<_>>()?;
        let driver = Arc::clone(driver);
        let card = space(card)?;
        Ok(Soak {
            driver,
            card,
            _spaces: spaces,
            allocator,
            pool,
            store,
            manager,
            streams,
            limit,
            _files: files,
        })
    }

    fn run(&self, threads: u64, seed: u64, until: Instant) -> Outcome<Counts> {
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let run = |thread| {
                let failed = &failed;
                scope.spawn(move || {
                    let random = fastrand::Rng::with_seed(seed * 1000 + thread);
                    let result = Worker::run(self, threads, random, until, failed);
                    // The other threads may stop.
                    failed.fetch_or(result.is_err(), Relaxed);
                    result
                })
            };
            let running: Vec<_> = (0..threads).map(run).collect();
            let ends = running.into_iter().map(|thread| thread.join());
            let ends: Vec<_> = ends.collect();
            let mut sum = Counts::default();
            for end in ends {
                sum.add(end.map_err(|_| "a thread panicked")??);
            }
            Ok(sum)
        })
    }

    fn audit(&self) -> Outcome<()> {
        self.manager.audit()?;
        self.allocator.audit()?;
        self.pool.audit()?;
        self.store.audit()?;
        Ok(())
    }

    /// Drops everything; what is left of it is a fault.
    fn close(self) -> Outcome<()> {
        let Soak { allocator, pool, store, manager, .. } = self;
        for &(_, queue) in &self.streams {
            self.driver.synchronize_stream(queue)?;
        }
        let census = manager.census();
        manager.relieve_host(Bytes::new(u64::MAX));
        let left = [self.card.total(), pool.space().total(), store.space().total()];
        if (census.buffers, left) != (0, [Bytes::ZERO; 3]) {
            return Err(format!("{census:?}, and {left:?} of the spaces are not free").into());
        }
        drop((manager, pool, store));
        let allocator = Arc::into_inner(allocator).ok_or("the allocator is still shared")?;
        Ok(allocator.close()?)
    }
}

/// A buffer and what each part of it contains.
struct Known {
    buffer: DeferrableBuffer,
    parts: Vec<u8>,
}

impl Known {
    /// A run of parts, as bytes of the buffer.
    fn bytes_of(&self, first: usize, count: usize) -> (Bytes, Bytes) {
        let start = PART * first as u64;
        (start, (PART * count as u64).min(self.buffer.len() - start))
    }
}

/// One thread with buffers of its own. Streams are shared.
struct Worker<'a> {
    soak: &'a Soak,
    random: fastrand::Rng,
    buffers: Vec<Known>,
    window: HostBuffer,
    counts: Counts,
    stamp: u8,
    /// A stream that ends soon.
    own: Option<(StreamId, Stream)>,
    reserved: Vec<Reservation>,
}

impl Worker<'_> {
    fn run(
        soak: &Soak,
        threads: u64,
        random: fastrand::Rng,
        until: Instant,
        failed: &AtomicBool,
    ) -> Outcome<Counts> {
        let window = soak.driver.alloc_host(LOOK)?;
        let mut worker = Worker {
            soak,
            random,
            buffers: Vec::new(),
            window,
            counts: Counts::default(),
            stamp: 0,
            own: None,
            reserved: Vec::new(),
        };
        let most = BUFFERS / threads as usize;
        while Instant::now() < until && !failed.load(Relaxed) {
            worker.step(most)?;
        }
        for index in 0..worker.buffers.len() {
            worker.look(index)?;
        }
        if let Some((own, _)) = worker.own.take() {
            soak.allocator.destroy_stream(own)?;
        }
        soak.driver.free_host(window)?;
        Ok(worker.counts)
    }

    fn step(&mut self, most: usize) -> Outcome<()> {
        if self.buffers.len() < 2 {
            return self.create();
        }
        let index = self.random.usize(..self.buffers.len());
        match self.random.u32(..100) {
            0..5 if self.buffers.len() < most => self.create()?,
            5..6 => drop(self.buffers.swap_remove(index)),
            6..30 => self.write(index)?,
            30..50 => self.copy(index)?,
            50..80 => self.look(index)?,
            80..85 => self.malloc()?,
            85..87 => self.reserve(),
            87..90 => {
                // It may be held, or there is no room: a prefetch is only a hint.
                let _ = self.buffers[index].buffer.prefetch();
                self.counts.prefetches += 1;
            }
            90..95 => {
                let most = self.soak.limit.count() / 8;
                self.soak.manager.spill(Bytes::new(self.random.u64(1..most)));
                self.counts.spills += 1;
            }
            95..98 => {
                self.soak.manager.clean(Bytes::mib(32));
                self.counts.cleans += 1;
            }
            _ => {
                let most = self.soak.limit.count() / 8;
                self.soak.manager.relieve_host(Bytes::new(self.random.u64(1..most)));
                self.counts.reliefs += 1;
            }
        }
        Ok(())
    }

    fn stream(&mut self) -> (StreamId, Stream) {
        self.soak.streams[self.random.usize(..STREAMS)]
    }

    /// Returns a shared stream, or one of the worker's own, which is made for that.
    fn any_stream(&mut self) -> Outcome<(StreamId, Stream)> {
        if self.random.bool() {
            return Ok(self.stream());
        }
        let allocator = &self.soak.allocator;
        let own = match self.own {
            Some(own) => own,
            None => {
                let stream = allocator.create_stream()?;
                (stream, allocator.stream(stream).ok_or("the stream was made a moment ago")?)
            }
        };
        self.own = Some(own);
        Ok(own)
    }

    /// Ends the worker's own stream at random, under a lease whose work is queued there.
    fn end_stream(&mut self) -> Outcome<()> {
        if self.random.u8(..4) == 0
            && let Some((own, _)) = self.own.take()
        {
            self.soak.allocator.destroy_stream(own)?;
            self.counts.streams_ended += 1;
        }
        Ok(())
    }

    /// Reserves memory of the card for later steps, or gives a reservation back.
    fn reserve(&mut self) {
        if self.reserved.len() > 1 {
            drop(self.reserved.swap_remove(0));
            return;
        }
        let bytes = Bytes::new(self.random.u64(1..self.soak.limit.count() / 16));
        let request = self.soak.card.request(bytes).deadline(Duration::from_millis(50));
        match request.wait() {
            Ok(reservation) => {
                self.counts.reserved += 1;
                self.reserved.push(reservation);
            }
            Err(_) => self.counts.not_reserved += 1,
        }
    }

    fn next_stamp(&mut self) -> u8 {
        self.stamp = self.stamp.wrapping_add(1);
        self.stamp
    }

    /// Leases, unless others hold what it would need: then nothing changed.
    fn granted(&mut self, lease: Result<LeaseSet, SpillError>) -> Outcome<Option<LeaseSet>> {
        match lease {
            Ok(lease) => {
                self.counts.leases += 1;
                return Ok(Some(lease));
            }
            Err(SpillError::Refused(_)) => self.counts.refused += 1,
            Err(SpillError::NoMemory { error, .. })
                if matches!(*error, AllocError::OutOfMemory(_)) =>
            {
                self.counts.without_memory += 1;
            }
            // Transfers to and from the disk may have the last blocks of the host.
            Err(SpillError::Move(MoveError::Host(HostPoolError::Full(_)))) => {
                self.counts.without_blocks += 1;
                self.soak.manager.relieve_host(Bytes::mib(16));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(None)
    }

    /// A new buffer, of any length, written from end to end.
    fn create(&mut self) -> Outcome<()> {
        let limit = self.soak.limit.count();
        let len = Bytes::new(self.random.u64(limit / 24..limit / 12));
        let buffer = self.soak.manager.buffer(len)?;
        if self.random.u8(..READABLE) == 0 {
            buffer.readable_while_spilled()?;
        }
        let parts = len.count().div_ceil(PART.count()) as usize;
        let (stream, queue) = self.any_stream()?;
        let lease = buffer.lease(Access::Exclusive, stream);
        let Some(lease) = self.granted(lease)? else { return Ok(()) };
        let stamp = self.next_stamp();
        self.soak.driver.fill(queue, lease.address(0), stamp)?;
        self.end_stream()?;
        drop(lease);
        self.buffers.push(Known { buffer, parts: vec![stamp; parts] });
        self.counts.buffers += 1;
        Ok(())
    }

    /// A run of parts, at most half of them.
    fn some_parts(&mut self, of: usize) -> (usize, usize) {
        let first = self.random.usize(..of);
        (first, self.random.usize(1..=(of - first).min(of / 2).max(1)))
    }

    fn write(&mut self, index: usize) -> Outcome<()> {
        let (stream, queue) = self.any_stream()?;
        let (first, count) = self.some_parts(self.buffers[index].parts.len());
        let stamp = self.next_stamp();
        let lease = self.buffers[index].buffer.lease(Access::Exclusive, stream);
        let Some(mut lease) = self.granted(lease)? else { return Ok(()) };
        let known = &mut self.buffers[index];
        let (offset, len) = known.bytes_of(first, count);
        let range = AddrRange::new(lease.address(0).start + offset, len);
        self.soak.driver.fill(queue, range, stamp)?;
        lease.wrote_only(0, offset, len)?;
        known.parts[first..first + count].fill(stamp);
        self.counts.writes += 1;
        self.end_stream()?;
        lease.end();
        Ok(())
    }

    /// Copies parts of a buffer into its neighbour, both under one lease.
    fn copy(&mut self, index: usize) -> Outcome<()> {
        let (stream, queue) = self.any_stream()?;
        let to = (index + 1) % self.buffers.len();
        // All but the last part, which may be short.
        let whole = |known: &Known| known.parts.len() - 1;
        let fits = whole(&self.buffers[index]).min(whole(&self.buffers[to]));
        let (first, count) = self.some_parts(fits);
        let at = self.random.usize(..=whole(&self.buffers[to]) - count);
        let set = [
            (&self.buffers[index].buffer, Access::Shared),
            (&self.buffers[to].buffer, Access::Exclusive),
        ];
        let lease = self.soak.manager.lease_in_place(&set, stream);
        let Some(mut lease) = self.granted(lease)? else { return Ok(()) };
        self.counts.reads_in_place += u64::from(lease.is_in_place(0));
        let (source, target) = (PART * first as u64, PART * at as u64);
        let copy = DeviceCopy {
            from: lease.address(0).start + source,
            to: lease.address(1).start + target,
            len: PART * count as u64,
        };
        self.soak.driver.copy(queue, copy)?;
        lease.wrote_only(1, target, copy.len)?;
        let bytes = self.buffers[index].parts[first..first + count].to_vec();
        self.buffers[to].parts[at..at + count].copy_from_slice(&bytes);
        self.counts.copies += 1;
        self.end_stream()?;
        lease.end();
        Ok(())
    }

    /// Compares a little of one part with what was written there.
    fn look(&mut self, index: usize) -> Outcome<()> {
        let (stream, queue) = self.stream();
        let part = self.random.usize(..self.buffers[index].parts.len());
        let buffer = &self.buffers[index].buffer;
        let lease = match self.random.bool() {
            true => buffer.read_in_place(stream),
            false => buffer.lease(Access::Shared, stream),
        };
        let Some(lease) = self.granted(lease)? else { return Ok(()) };
        self.counts.reads_in_place += u64::from(lease.is_in_place(0));
        let known = &self.buffers[index];
        let (start, len) = known.bytes_of(part, 1);
        let looked = len.min(LOOK);
        let at = start + Bytes::new(self.random.u64(..=(len - looked).count()));
        let driver = &self.soak.driver;
        let slice = HostSlice { buffer: self.window, offset: Bytes::ZERO, len: looked };
        driver.copy_to_host(queue, lease.address(0).start + at, slice)?;
        drop(lease);
        driver.synchronize_stream(queue)?;
        let mut bytes = vec![0; looked.count() as usize];
        driver.read_host(self.window, Bytes::ZERO, &mut bytes)?;
        let expected = known.parts[part];
        if let Some(wrong) = bytes.iter().position(|&byte| byte != expected) {
            let (at, byte) = (at + Bytes::new(wrong as u64), bytes[wrong]);
            let buffer = &known.buffer;
            return Err(format!("{byte} and not {expected} at {at} of {buffer:?}").into());
        }
        self.counts.looks += 1;
        Ok(())
    }

    /// Allocates memory of the card for something else, for a moment.
    fn malloc(&mut self) -> Outcome<()> {
        let (stream, queue) = self.stream();
        let len = Bytes::new(self.random.u64(1..self.soak.limit.count() / 8));
        match self.soak.allocator.malloc(len, stream) {
            Ok(block) => {
                let range = AddrRange::new(block.addr(), block.len());
                self.soak.driver.fill(queue, range, 0xEE)?;
                self.soak.allocator.free(block, stream)?;
                self.counts.mallocs += 1;
            }
            // Others hold leases on too much.
            Err(AllocError::OutOfMemory(_)) => self.counts.mallocs_refused += 1,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.leases += other.leases;
        self.refused += other.refused;
        self.without_memory += other.without_memory;
        self.without_blocks += other.without_blocks;
        self.writes += other.writes;
        self.copies += other.copies;
        self.looks += other.looks;
        self.reads_in_place += other.reads_in_place;
        self.prefetches += other.prefetches;
        self.spills += other.spills;
        self.cleans += other.cleans;
        self.reliefs += other.reliefs;
        self.mallocs += other.mallocs;
        self.mallocs_refused += other.mallocs_refused;
        self.buffers += other.buffers;
        self.streams_ended += other.streams_ended;
        self.reserved += other.reserved;
        self.not_reserved += other.not_reserved;
    }
}
