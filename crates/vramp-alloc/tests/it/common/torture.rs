//! A random program that checks its data: threads with streams of their own write patterns by fills
//! and copies, use blocks on several streams, hand them to other threads, free them on any stream
//! with work in flight, and compare what they read back. Memory is kept nearly full, so the pool
//! remaps beside running work all the time.

use std::error::Error;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use vramp_alloc::{Allocation, Allocator, Bytes, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::{DeviceCopy, Event, HostBuffer, HostSlice, Stream};

use super::random::Random;

/// How much a look at a block reads at most.
const SLICE: Bytes = Bytes::kib(64);

/// How hard, how long.
#[derive(Clone, Debug)]
pub struct Torture {
    pub threads: u64,
    pub streams_per_thread: u64,
    /// What all blocks together may take.
    pub budget: Bytes,
    /// The largest block; sizes are spread evenly over the powers of two from 512 bytes on.
    pub largest: Bytes,
    /// Steps of one thread.
    pub steps: u64,
    /// Where the steps end if they have not before.
    pub time: Duration,
    pub seed: u64,
}

/// What was done. Every count is of calls that went well.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub mallocs: u64,
    pub refused: u64,
    pub looks: u64,
    pub handed_over: u64,
}

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

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

/// Runs the program on streams of its own. Ends with every block looked at and freed.
pub fn run(allocator: &Allocator, torture: &Torture) -> Outcome<Summary> {
    let parcels = Mutex::new(Vec::new());
    let end = Instant::now() + torture.time;
    // Takes the parcels that no worker takes. Created first: a full card has no room for a stream.
    let mut last = Worker::new(allocator, torture, torture.threads, &parcels)?;
    let summaries = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..torture.threads)
            .map(|number| {
                let parcels = &parcels;
                scope.spawn(move || Worker::new(allocator, torture, number, parcels)?.run(end))
            })
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.map(|result| result.expect("a worker does not panic")).collect::<Outcome<Vec<_>>>()
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

struct Worker<'a> {
    allocator: &'a Allocator,
    driver: &'a dyn Driver,
    torture: &'a Torture,
    parcels: &'a Mutex<Vec<Parcel>>,
    random: Random,
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
            random: Random(torture.seed.wrapping_mul(1000).wrapping_add(number)),
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
            match self.random.below(100) {
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
        let power = 512u64 << self.random.below(u64::from(span));
        let size = power + self.random.below(power);
        while self.held + size > self.torture.budget.count() / self.torture.threads {
            if self.blocks.is_empty() {
                return Ok(());
            }
            self.free()?;
        }
        let (id, stream) = *self.random.pick(&self.streams);
        let allocation = match self.allocator.malloc(Bytes::new(size), id) {
            Ok(allocation) => allocation,
            Err(error) if error.is_out_of_memory() => {
                self.summary.refused += 1;
                return self.free();
            }
            Err(error) => return Err(error.into()),
        };
        self.summary.mallocs += 1;
        let byte = self.random.below(256) as u8;
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
        let target = self.random.below(self.blocks.len() as u64) as usize;
        let source = self.random.below(self.blocks.len() as u64) as usize;
        let (id, stream) = *self.random.pick(&self.streams);
        let room = self.blocks[target].allocation.len().count();
        let offset = self.random.below(room / 512) * 512;
        let len = (room - offset).min(512 << self.random.below(12));
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
            let byte = self.random.below(256) as u8;
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
        let index = self.random.below(self.blocks.len() as u64) as usize;
        let block = self.blocks.swap_remove(index);
        self.held -= block.allocation.len().count();
        let event = self.driver.create_event()?;
        self.driver.record(event, self.raw(block.last)?)?;
        self.parcels.lock().expect("no worker panicked").push(Parcel(block, event));
        self.summary.handed_over += 1;
        Ok(())
    }

    fn take_up(&mut self, Parcel(mut block, event): Parcel) -> Outcome<()> {
        let (id, stream) = *self.random.pick(&self.streams);
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
        let index = self.random.below(self.blocks.len() as u64) as usize;
        let block = self.blocks.swap_remove(index);
        self.held -= block.allocation.len().count();
        if self.random.below(2) == 0 {
            self.look(&block)?;
        }
        let (id, _) = *self.random.pick(&self.streams);
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
        for offset in [0, len - piece, self.random.below(len - piece + 1)] {
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
