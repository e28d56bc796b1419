//! Threads that commit, park and release pages of one arena for caches, beside blocks of the same pool, and
//! compare the bytes of each page before they give it up. On a simulated card driver calls fail meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use fastrand::Rng;
use vramp::kv::{Arena, Arrangement, KvError, Layout, Options, PageState};
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::FaultPlan;
use vramp_driver::{Call, Driver, HostBuffer, HostSlice, Stream};

use super::{Ground, Outcome, at_least_one};

/// Bytes of a page that are written and compared.
const SLICE: Bytes = Bytes::kib(4);

/// What to run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// `auto`, `cuda:N`, or `sim` for a simulated card of 1 GiB.
    #[arg(default_value = "auto")]
    pub device: String,
    /// Commits, parks and releases of all threads together.
    #[arg(long, default_value_t = 100_000, value_parser = at_least_one)]
    pub operations: u64,
    /// Number of threads.
    #[arg(long, default_value_t = 4, value_parser = at_least_one)]
    pub threads: u64,
    /// Driver calls of virtual memory that fail, in a thousand: on a simulated card.
    #[arg(long, default_value_t = 5)]
    pub failing: u32,
    /// Seed of the random program.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// What was done.
#[derive(Debug, Default)]
struct Done {
    commits: AtomicU64,
    refused: AtomicU64,
    parks: AtomicU64,
    compared: AtomicU64,
    released: AtomicU64,
}

impl Done {
    fn operations(&self) -> u64 {
        [&self.commits, &self.refused, &self.parks]
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

/// Runs the program on an allocator of its own, and prints what it did.
///
/// # Errors
/// A byte is wrong, accesses have no order, memory is left at the end, or a call fails that may not.
pub fn run(args: &Args) -> Outcome<()> {
    let ground = Ground::open(&args.device, Bytes::gib(1))?;
    let limit = ground.choose(Bytes::gib(24), Bytes::mib(700));
    let config = Config { limit: Some(limit), ..Config::default() };
    let allocator = Allocator::new(ground.driver.clone(), config)?;
    let done = Done::default();
    let begun = Instant::now();
    for (round, arrangement) in
        [Arrangement::Separate, Arrangement::Interleaved].into_iter().enumerate()
    {
        let page = ground.driver.info().limits.page;
        let layout = Layout {
            tensors: ground.choose(32, 2),
            bytes_each: page * ground.choose(512, 192),
            page,
            arrangement,
        };
        let options = Options {
            superpage: page * [1, 4, 16][args.seed as usize % 3],
            ahead: Bytes::new(limit.count() / 16),
            ..Options::default()
        };
        let cache = allocator.kv_arena(layout, options)?;
        if let Some(simulator) = &ground.simulator {
            let probability = f64::from(args.failing) / 1000.0;
            let calls = [Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Release];
            let faults = calls.map(|call| FaultPlan::randomly_of(call, probability));
            simulator
                .set_faults(faults.into_iter().reduce(FaultPlan::and).expect("there are calls"));
        }
        let until = args.operations * (round as u64 + 1) / 2;
        let ends: Vec<Outcome<()>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..args.threads)
                .map(|number| {
                    let (allocator, cache, done) = (&allocator, &cache, &done);
                    let seed = args.seed * 1000 + number * 2 + round as u64;
                    scope.spawn(move || {
                        let rng = Rng::with_seed(seed);
                        Worker::new(allocator, cache, done, rng, number, args.threads)?.run(until)
                    })
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().expect("no panic")).collect()
        });
        if let Some(simulator) = &ground.simulator {
            simulator.set_faults(FaultPlan::none());
        }
        ends.into_iter().collect::<Outcome<()>>()?;
        allocator.audit()?;
        let stats = cache.stats();
        if stats.committed + stats.moving > 0 {
            return Err(format!("pages are left: {stats:?}").into());
        }
    }
    println!("{done:?} in {:.1} s", begun.elapsed().as_secs_f64());
    allocator.trim(Bytes::ZERO)?;
    allocator.audit()?;
    let held = allocator.stats()?.reserved;
    allocator.close()?;
    if held != Bytes::ZERO {
        return Err(format!("{held} stayed reserved after a trim").into());
    }
    println!("every byte was right, and nothing is left");
    ground.check_order()
}

struct Worker<'a> {
    allocator: &'a Allocator,
    driver: &'a dyn Driver,
    cache: &'a Arena,
    done: &'a Done,
    rng: Rng,
    /// The pages of this thread, which lie between those of others, and what is written in each.
    pages: Vec<(u32, Option<(StreamId, u8)>)>,
    streams: Vec<(StreamId, Stream)>,
    blocks: Vec<(Allocation, StreamId)>,
    window: HostBuffer,
}

impl<'a> Worker<'a> {
    fn new(
        allocator: &'a Allocator,
        cache: &'a Arena,
        done: &'a Done,
        rng: Rng,
        number: u64,
        threads: u64,
    ) -> Outcome<Worker<'a>> {
        let driver = &**allocator.driver();
        let mut streams = Vec::new();
        for _ in 0..2 {
            let id = allocator.create_stream()?;
            streams.push((id, allocator.stream(id).ok_or("a new stream is known")?));
        }
        let mine = |page: &u32| u64::from(*page) % threads == number;
        let pages = (0..cache.pages()).filter(mine).map(|page| (page, None)).collect();
        let window = driver.alloc_host(SLICE)?;
        Ok(Worker {
            allocator,
            driver,
            cache,
            done,
            rng,
            pages,
            streams,
            blocks: Vec::new(),
            window,
        })
    }

    fn run(mut self, until: u64) -> Outcome<()> {
        while self.done.operations() < until {
            let (id, stream) = self.streams[self.rng.usize(..self.streams.len())];
            match self.rng.u32(..20) {
                0..9 => self.commit(id, stream)?,
                9..17 => self.park(id, stream)?,
                17 => {
                    let keep = Bytes::mib(self.rng.u64(..256));
                    // A call may fail: what it could not return stays with the pool.
                    let released = self.cache.release(keep).unwrap_or_default();
                    self.done.released.fetch_add(released.count(), Ordering::Relaxed);
                }
                18 => {
                    let len = Bytes::mib(self.rng.u64(1..100));
                    if let Ok(block) = self.allocator.malloc(len, id) {
                        self.driver.fill(stream, AddrRange::new(block.addr(), SLICE), 0xEE)?;
                        self.blocks.push((block, id));
                    }
                }
                _ => self.free()?,
            }
        }
        while !self.blocks.is_empty() {
            self.free()?;
        }
        let left: Vec<usize> =
            (0..self.pages.len()).filter(|&i| self.pages[i].1.is_some()).collect();
        left.into_iter().try_for_each(|index| self.give_up(&[index]))?;
        self.driver.free_host(self.window)?;
        for (id, _) in self.streams {
            self.allocator.destroy_stream(id)?;
        }
        Ok(())
    }

    fn free(&mut self) -> Outcome<()> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let (block, stream) = self.blocks.swap_remove(self.rng.usize(..self.blocks.len()));
        self.allocator.free(block, stream).map_err(|error| format!("{error}").into())
    }

    fn some(&mut self, committed: bool, stream: Option<StreamId>) -> Vec<usize> {
        let fits = |page: &(u32, Option<(StreamId, u8)>)| {
            page.1.is_some() == committed && stream.is_none_or(|s| page.1.is_some_and(|w| w.0 == s))
        };
        let mut some: Vec<usize> =
            (0..self.pages.len()).filter(|&index| fits(&self.pages[index])).collect();
        self.rng.shuffle(&mut some);
        some.truncate(self.rng.usize(1..6));
        some
    }

    fn commit(&mut self, id: StreamId, stream: Stream) -> Outcome<()> {
        let some = self.some(false, None);
        let ranges: Vec<_> = some.iter().map(|&i| self.pages[i].0..self.pages[i].0 + 1).collect();
        match self.cache.commit(&ranges, id) {
            Ok(()) => {
                self.done.commits.fetch_add(1, Ordering::Relaxed);
                for index in some {
                    let byte = self.rng.u8(..);
                    self.pages[index].1 = Some((id, byte));
                    for slice in self.slices(self.pages[index].0) {
                        self.driver.fill(stream, slice, byte)?;
                    }
                }
                Ok(())
            }
            Err(KvError::Memory(AllocError::OutOfMemory(_) | AllocError::Driver(_))) => {
                self.done.refused.fetch_add(1, Ordering::Relaxed);
                for index in some {
                    let page = self.pages[index].0;
                    if self.cache.state(page) == Some(PageState::Committed) {
                        return Err(format!("page {page} of a refused commit is committed").into());
                    }
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn park(&mut self, id: StreamId, _: Stream) -> Outcome<()> {
        let some = self.some(true, Some(id));
        self.give_up(&some)
    }

    /// Compares some of the pages and parks all, which one stream uses.
    fn give_up(&mut self, some: &[usize]) -> Outcome<()> {
        let Some(&first) = some.first() else { return Ok(()) };
        let (id, _) = self.pages[first].1.ok_or("it is committed")?;
        let stream = self.allocator.stream(id).ok_or("the stream is open")?;
        if self.rng.u32(..4) == 0 {
            let (page, written) = self.pages[first];
            let byte = written.ok_or("it is committed")?.1;
            for slice in self.slices(page) {
                let to = HostSlice { buffer: self.window, offset: Bytes::ZERO, len: SLICE };
                self.driver.copy_to_host(stream, slice.start, to)?;
                self.driver.synchronize_stream(stream)?;
                let mut found = vec![0; SLICE.count() as usize];
                self.driver.read_host(self.window, Bytes::ZERO, &mut found)?;
                if found.iter().any(|&other| other != byte) {
                    return Err(format!("page {page} at {slice} does not hold {byte}").into());
                }
            }
            self.done.compared.fetch_add(1, Ordering::Relaxed);
        }
        let ranges: Vec<_> = some.iter().map(|&i| self.pages[i].0..self.pages[i].0 + 1).collect();
        self.cache.park(&ranges, id)?;
        self.done.parks.fetch_add(1, Ordering::Relaxed);
        some.iter().for_each(|&index| self.pages[index].1 = None);
        Ok(())
    }

    /// Where a page is written: at its beginning, in the first tensor and in the last.
    fn slices(&self, page: u32) -> [AddrRange; 2] {
        let layout = self.cache.layout();
        [0, layout.tensors - 1].map(|tensor| {
            let step = match layout.arrangement {
                Arrangement::Separate => layout.page,
                Arrangement::Interleaved => layout.page * u64::from(layout.tensors),
            };
            let start = self.cache.range(tensor).start + step * u64::from(page);
            AddrRange::new(start, SLICE)
        })
    }
}
