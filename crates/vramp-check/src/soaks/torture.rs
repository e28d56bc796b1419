//! A random program on nearly full memory that checks its data: threads with streams of their own write
//! patterns by fills and copies, use blocks on several streams, hand them to other threads, free them on any
//! stream with work in flight, and compare what they read back. So the pool remaps beside running work all
//! the time. On a card it touches all of the memory.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use fastrand::Rng;
use vramp::peers::Preset;
use vramp_alloc::{Allocation, Allocator, Bytes, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::{DeviceCopy, Event, HostBuffer, HostSlice, Stream};

use super::{Ground, Outcome, at_least_one};

/// How much a look at a block reads at most.
const SLICE: Bytes = Bytes::kib(64);

/// What to run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// `auto`, `cuda:N`, or `sim` for a simulated card of 1 GiB.
    #[arg(default_value = "auto")]
    pub device: String,
    /// Duration in seconds.
    #[arg(long, default_value_t = 10, value_parser = at_least_one)]
    pub seconds: u64,
    /// Preset of the allocator.
    #[arg(long, default_value = "vramp")]
    pub preset: String,
    /// Number of threads.
    #[arg(long, default_value_t = 8, value_parser = at_least_one)]
    pub threads: u64,
    /// Number of streams of all threads together.
    #[arg(long, default_value_t = 16)]
    pub streams: u64,
    /// Part of the card's free memory that the blocks take, in per cent.
    #[arg(long, default_value_t = 93)]
    pub fill: u64,
    /// Seed of the random program.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Runs the program on an allocator of its own, and prints what it did.
///
/// # Errors
/// A byte is wrong, accesses have no order, memory is left at the end, or a call fails.
pub fn run(args: &Args) -> Outcome<()> {
    let preset: Preset = args.preset.parse()?;
    let ground = Ground::open(&args.device, Bytes::gib(1))?;
    let driver = &ground.driver;
    let free = driver.memory_info()?.free;
    let budget = Bytes::new(free.count() / 100 * args.fill);
    let allocator = Allocator::new(driver.clone(), preset.config())?;
    let threads = args.threads;
    let torture = Torture {
        threads,
        streams_per_thread: (args.streams / threads).max(1),
        budget,
        largest: Bytes::gib(2).min(Bytes::new(budget.count() / threads / 2)),
        steps: u64::MAX,
        time: Duration::from_secs(args.seconds),
        seed: args.seed,
    };
    println!("{}: {torture:?}", driver.info().name);
    let start = Instant::now();
    let summary = torture.run(&allocator)?;
    allocator.audit()?;
    let stats = allocator.stats()?;
    println!("{summary:?} in {:.1} s", start.elapsed().as_secs_f64());
    println!("{stats:?}");
    if stats.live != Bytes::ZERO {
        return Err(format!("{} are still allocated", stats.live).into());
    }
    allocator.trim(Bytes::ZERO)?;
    let held = allocator.stats()?.reserved;
    allocator.close()?;
    let lost = free.saturating_sub(driver.memory_info()?.free);
    println!("every byte was right; {held} reserved after a trim, {lost} lost at the end");
    if held != Bytes::ZERO && preset == Preset::Vramp {
        return Err(format!("{held} stayed reserved after a trim").into());
    }
    ground.check_order()
}

/// How hard, how long.
#[derive(Clone, Debug)]
pub struct Torture {
    /// Threads.
    pub threads: u64,
    /// Streams of each.
    pub streams_per_thread: u64,
    /// Memory of all blocks together.
    pub budget: Bytes,
    /// The largest block; sizes are spread evenly over the powers of two from 512 bytes on.
    pub largest: Bytes,
    /// Steps of one thread.
    pub steps: u64,
    /// Where the steps end if they have not before.
    pub time: Duration,
    /// Seed of the random program.
    pub seed: u64,
}

/// What was done. Every count is of calls that went well.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Blocks allocated.
    pub mallocs: u64,
    /// Requests for which memory was lacking.
    pub refused: u64,
    /// Blocks compared.
    pub looks: u64,
    /// Blocks handed to another thread.
    pub handed_over: u64,
}

/// A block, who worked on it last, and what must be in it.
struct Block {
    allocation: Allocation,
    last: StreamId,
    byte: u8,
    patches: Vec<Patch>,
}

/// Bytes written over the block's own.
struct Patch {
    offset: u64,
    len: u64,
    byte: u8,
}

/// A block on its way to another thread, and the point its work has come to.
struct Parcel(Block, Event);

impl Torture {
    /// Runs the program on streams of its own. Ends with every block looked at and freed.
    ///
    /// # Errors
    /// A byte is wrong, or a call fails.
    pub fn run(&self, allocator: &Allocator) -> Outcome<Summary> {
        let parcels = Mutex::new(Vec::new());
        let end = Instant::now() + self.time;
        // Takes the parcels that no worker takes. Created first: a full card has no room for a stream.
        let mut last = Worker::new(allocator, self, self.threads, &parcels)?;
        let summaries = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads)
                .map(|number| {
                    let parcels = &parcels;
                    scope.spawn(move || Worker::new(allocator, self, number, parcels)?.run(end))
                })
                .collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined
                .map(|result| result.expect("a worker does not panic"))
                .collect::<Outcome<Vec<_>>>()
        })?;
        let left = std::mem::take(&mut *parcels.lock().expect("no worker panicked"));
        for parcel in left {
            last.take_up(parcel)?;
        }
        let mut sum = last.finish()?;
        for summary in summaries {
            sum.mallocs += summary.mallocs;
            sum.refused += summary.refused;
            sum.looks += summary.looks;
            sum.handed_over += summary.handed_over;
        }
        Ok(sum)
    }
}

struct Worker<'a> {
    allocator: &'a Allocator,
    driver: &'a dyn Driver,
    torture: &'a Torture,
    parcels: &'a Mutex<Vec<Parcel>>,
    random: Rng,
    streams: Vec<(StreamId, Stream)>,
    blocks: Vec<Block>,
    held: u64,
    window: HostBuffer,
    summary: Summary,
}

impl<'a> Worker<'a> {
    fn new(
        allocator: &'a Allocator,
        torture: &'a Torture,
        number: u64,
        parcels: &'a Mutex<Vec<Parcel>>,
    ) -> Outcome<Worker<'a>> {
        let driver = &**allocator.driver();
        let mut streams = Vec::new();
        for _ in 0..torture.streams_per_thread {
            let id = allocator.create_stream()?;
            streams.push((id, allocator.stream(id).ok_or("a new stream is known")?));
        }
        Ok(Worker {
            allocator,
            driver,
            torture,
            parcels,
            random: Rng::with_seed(torture.seed.wrapping_mul(1000).wrapping_add(number)),
            streams,
            blocks: Vec::new(),
            held: 0,
            window: driver.alloc_host(SLICE)?,
            summary: Summary::default(),
        })
    }

    fn run(mut self, end: Instant) -> Outcome<Summary> {
        for _ in 0..self.torture.steps {
            if Instant::now() > end {
                break;
            }
            match self.random.u64(..100) {
                0..40 => self.malloc()?,
                40..60 => self.patch()?,
                60..64 => self.hand_over()?,
                64..68 => {
                    let parcel = self.parcels.lock().expect("no worker panicked").pop();
                    if let Some(parcel) = parcel {
                        self.take_up(parcel)?;
                    }
                }
                _ => self.free()?,
            }
        }
        self.finish()
    }

    fn malloc(&mut self) -> Outcome<()> {
        let span = self.torture.largest.count().ilog2() - 9;
        let power = 512u64 << self.random.u64(..u64::from(span));
        let size = power + self.random.u64(..power);
        while self.held + size > self.torture.budget.count() / self.torture.threads {
            if self.blocks.is_empty() {
                return Ok(());
            }
            self.free()?;
        }
        let (id, stream) = self.streams[self.random.usize(..self.streams.len())];
        let allocation = match self.allocator.malloc(Bytes::new(size), id) {
            Ok(allocation) => allocation,
            Err(error) if error.is_out_of_memory() => {
                self.summary.refused += 1;
                return self.free();
            }
            Err(error) => return Err(error.into()),
        };
        self.summary.mallocs += 1;
        let byte = self.random.u64(..256) as u8;
        self.driver.fill(stream, AddrRange::new(allocation.addr(), allocation.len()), byte)?;
        self.held += allocation.len().count();
        self.blocks.push(Block { allocation, last: id, byte, patches: Vec::new() });
        Ok(())
    }

    /// Writes over a part of a block on any stream, by a fill or by a copy from another block.
    fn patch(&mut self) -> Outcome<()> {
        if self.blocks.len() < 2 {
            return Ok(());
        }
        let target = self.random.usize(..self.blocks.len());
        let source = self.random.usize(..self.blocks.len());
        let (id, stream) = self.streams[self.random.usize(..self.streams.len())];
        let room = self.blocks[target].allocation.len().count();
        let offset = self.random.u64(..room / 512) * 512;
        let len = (room - offset).min(512 << self.random.u64(..12));
        let to = self.blocks[target].allocation.addr() + Bytes::new(offset);
        self.order(self.blocks[target].last, id)?;
        let from = &self.blocks[source];
        let whole = from.patches.is_empty() && len <= from.allocation.len().count();
        let byte = if source != target && whole {
            let (byte, from_addr, last) = (from.byte, from.allocation.addr(), from.last);
            self.order(last, id)?;
            self.driver.copy(stream, DeviceCopy { from: from_addr, to, len: Bytes::new(len) })?;
            self.blocks[source].last = id;
            byte
        } else {
            let byte = self.random.u64(..256) as u8;
            self.driver.fill(stream, AddrRange::new(to, Bytes::new(len)), byte)?;
            byte
        };
        self.blocks[target].patches.push(Patch { offset, len, byte });
        self.blocks[target].last = id;
        Ok(())
    }

    fn hand_over(&mut self) -> Outcome<()> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let index = self.random.usize(..self.blocks.len());
        let block = self.blocks.swap_remove(index);
        self.held -= block.allocation.len().count();
        let event = self.driver.create_event()?;
        self.driver.record(event, self.raw(block.last)?)?;
        self.parcels.lock().expect("no worker panicked").push(Parcel(block, event));
        self.summary.handed_over += 1;
        Ok(())
    }

    fn take_up(&mut self, Parcel(mut block, event): Parcel) -> Outcome<()> {
        let (id, stream) = self.streams[self.random.usize(..self.streams.len())];
        self.driver.wait(stream, event)?;
        self.driver.destroy_event(event)?;
        block.last = id;
        self.held += block.allocation.len().count();
        self.blocks.push(block);
        Ok(())
    }

    /// Frees a block on any stream, half of the time after a look at what is in it.
    fn free(&mut self) -> Outcome<()> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let index = self.random.usize(..self.blocks.len());
        let block = self.blocks.swap_remove(index);
        self.held -= block.allocation.len().count();
        if self.random.u64(..2) == 0 {
            self.look(&block)?;
        }
        let (id, _) = self.streams[self.random.usize(..self.streams.len())];
        if id != block.last {
            self.allocator.record_use(&block.allocation, block.last)?;
        }
        self.allocator.free(block.allocation, id)?;
        Ok(())
    }

    /// Compares the block's beginning, end and a piece between with what was written.
    fn look(&mut self, block: &Block) -> Outcome<()> {
        let stream = self.raw(block.last)?;
        let len = block.allocation.len().count();
        let piece = len.min(SLICE.count());
        for offset in [0, len - piece, self.random.u64(..len - piece + 1)] {
            let to = HostSlice { buffer: self.window, offset: Bytes::ZERO, len: Bytes::new(piece) };
            let from = block.allocation.addr() + Bytes::new(offset);
            self.driver.copy_to_host(stream, from, to)?;
            self.driver.synchronize_stream(stream)?;
            let mut found = vec![0; piece as usize];
            self.driver.read_host(self.window, Bytes::ZERO, &mut found)?;
            let mut wanted = vec![block.byte; piece as usize];
            for patch in &block.patches {
                let start = patch.offset.clamp(offset, offset + piece);
                let end = (patch.offset + patch.len).clamp(offset, offset + piece);
                wanted[(start - offset) as usize..(end - offset) as usize].fill(patch.byte);
            }
            // Slices are compared at once, and the byte is looked for only where they differ.
            if found != wanted {
                let pairs = found.iter().zip(&wanted);
                let at = pairs.take_while(|(found, wanted)| found == wanted).count();
                let (found, wanted) = (found[at], wanted[at]);
                let at = offset + at as u64;
                return Err(format!(
                    "{:?}, byte {at}: {found:#04x} instead of {wanted:#04x}",
                    block.allocation
                )
                .into());
            }
        }
        self.summary.looks += 1;
        Ok(())
    }

    fn finish(mut self) -> Outcome<Summary> {
        while !self.blocks.is_empty() {
            self.free()?;
        }
        for &(_, stream) in &self.streams {
            self.driver.synchronize_stream(stream)?;
        }
        self.driver.free_host(self.window)?;
        Ok(self.summary)
    }

    /// Lets later work on `later` run after what is queued on `earlier`.
    fn order(&self, earlier: StreamId, later: StreamId) -> Outcome<()> {
        if earlier != later {
            let event = self.driver.create_event()?;
            self.driver.record(event, self.raw(earlier)?)?;
            self.driver.wait(self.raw(later)?, event)?;
            self.driver.destroy_event(event)?;
        }
        Ok(())
    }

    fn raw(&self, stream: StreamId) -> Outcome<Stream> {
        Ok(self.allocator.stream(stream).ok_or("the stream is known")?)
    }
}
