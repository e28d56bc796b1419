//! The disk tier's store beside plain direct file I/O.
//!
//! In turn: plain direct transfers of one block size to one preallocated file, by io_uring and by
//! threads; and the store of the disk tier, in steps of 16 MiB of which four are in flight, with
//! extents, budget and checksums. Each turn writes new files. Afterwards, outside the timed part,
//! every byte is read again and compared. Files are unnamed and disappear when closed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp::Bytes;
use vramp::tiers::disk::{ChargeTo, CompressionConfig, DiskConfig, DiskTransfer, StoredBytes};
use vramp::tiers::{DiskStore, ReservationManager, SpaceConfig, SpaceId};
use vramp_host::{
    BlockIo, DirectFile, Direction, DiskError, FileTransfer, HostMemory, HostSpan, IoChoice,
    OpenedIo, PageKind, open_io, submit_transfers,
};

use crate::statistics::{median, nanos};

/// Bytes of one store operation.
const STEP: Bytes = Bytes::mib(16);
/// Store operations in flight.
const STEPS_IN_FLIGHT: usize = 4;
/// Memory that is written from and read into repeatedly.
const WINDOW: Bytes = Bytes::mib(128);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory to write to.
    pub directory: PathBuf,
    /// Bytes to write; whole steps of 16 MiB count.
    pub total: Bytes,
    /// Most bytes of one I/O request.
    pub block: Bytes,
    /// I/O requests in flight.
    pub depth: u16,
    /// Engine of the store.
    pub engine: IoChoice,
    /// Measure the store with compression, too.
    pub compression: Option<Compression>,
    /// How long to measure; at least one round.
    pub duration: Duration,
}

/// When the store compresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// If its samples and measured rates predict a gain.
    WhenFaster,
    /// Whenever a sample shrinks by an eighth.
    WhenSmaller,
}

/// All rows, and why the store does not use io_uring.
#[derive(Clone, Debug)]
pub struct Report {
    /// One row for each way of moving and direction.
    pub rows: Vec<Row>,
    /// Why the store's engine is threads, if io_uring was wanted.
    pub fell_back: Option<String>,
}

/// The result for one way of moving and one direction.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `direct` for plain transfers, `store` for the disk tier.
    pub what: &'static str,
    /// The I/O engine.
    pub engine: &'static str,
    /// `write` or `read`.
    pub direction: &'static str,
    /// The data: `random`, or `half zero` where every other half KiB is zero.
    pub data: &'static str,
    /// True if the store compresses.
    pub compressed: bool,
    /// False if the filesystem moves the data through the page cache.
    pub direct: bool,
    /// Bytes moved in a round.
    pub total_bytes: u64,
    /// Most bytes of one I/O request.
    pub block_bytes: u64,
    /// I/O requests in flight.
    pub depth: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Rate, the median over rounds.
    pub bytes_per_s: f64,
    /// Ratio to the fastest plain transfers of the same round.
    pub of_direct: f64,
    /// Ratio to the store without compression, for the same data.
    pub of_store: f64,
    /// Bytes on disk over bytes moved.
    pub on_disk: f64,
    /// Always true: different bytes are an error.
    pub verified: bool,
}

/// One way to move the bytes, with the times so far.
struct Method {
    what: &'static str,
    engine: &'static str,
    data: Data,
    compression: Option<CompressionConfig>,
    direct: bool,
    on_disk: Bytes,
    write_ns: Vec<u64>,
    read_ns: Vec<u64>,
}

impl Method {
    fn new(what: &'static str, engine: &'static str, data: Data) -> Method {
        Method {
            what,
            engine,
            data,
            compression: None,
            direct: false,
            on_disk: Bytes::ZERO,
            write_ns: Vec::new(),
            read_ns: Vec::new(),
        }
    }

    fn times(&self, direction: Direction) -> &[u64] {
        match direction {
            Direction::Write => &self.write_ns,
            Direction::Read => &self.read_ns,
        }
    }
}

/// Contents of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    Random,
    /// Every other half KiB is zero.
    HalfZero,
}

impl Data {
    fn name(self) -> &'static str {
        match self {
            Data::Random => "random",
            Data::HalfZero => "half zero",
        }
    }

    fn fill(self, random: &mut fastrand::Rng, bytes: &mut [u8]) {
        random.fill(bytes);
        if self == Data::HalfZero {
            bytes.chunks_mut(512).step_by(2).for_each(|half| half.fill(0));
        }
    }
}

/// Memory and settings that all methods share.
struct Rig<'a> {
    options: &'a Options,
    total: Bytes,
    random: HostSpan,
    half_zero: HostSpan,
    into: HostSpan,
}

/// Measures plain transfers with every engine, and the store.
///
/// # Errors
/// Sizes do not fit together, an I/O request fails, or other bytes are read than were written.
pub fn run(options: &Options) -> Result<Report> {
    let rig = Rig::new(options)?;
    let plain = engines(options)?;
    let direct = plain.iter().map(|io| Method::new("direct", io.name(), Data::Random));
    let mut methods: Vec<Method> = direct.collect();
    let OpenedIo { io: store, fell_back } = open_io(options.engine, options.depth.into())?;
    let mut by_store = store_methods(options, store.name());
    let begun = Instant::now();
    while by_store[0].write_ns.is_empty() || begun.elapsed() < options.duration {
        for (method, io) in methods.iter_mut().zip(&plain) {
            rig.plain(method, io)?;
        }
        for method in &mut by_store {
            rig.store(method, &store)?;
        }
    }
    methods.extend(by_store);
    let fell_back = fell_back.map(|reason| reason.to_string());
    Ok(Report { rows: rows(&rig, &methods), fell_back })
}

/// Returns the store without compression and, if wanted, with it beside, for each kind of data.
fn store_methods(options: &Options, engine: &'static str) -> Vec<Method> {
    let plain = |data| Method::new("store", engine, data);
    let Some(compress) = options.compression else { return vec![plain(Data::Random)] };
    let compression = match compress {
        Compression::WhenFaster => CompressionConfig::default(),
        Compression::WhenSmaller => {
            CompressionConfig { short_below_per_mille: 1000, ..CompressionConfig::default() }
        }
    };
    let both = |data| {
        let packed = Method { compression: Some(compression), ..plain(data) };
        [plain(data), packed]
    };
    [Data::Random, Data::HalfZero].into_iter().flat_map(both).collect()
}

/// Returns every available engine, for the plain transfers.
fn engines(options: &Options) -> Result<Vec<Arc<dyn BlockIo>>> {
    let OpenedIo { io, fell_back } = open_io(IoChoice::Auto, options.depth.into())?;
    let threads = || anyhow::Ok(open_io(IoChoice::Threads, options.depth.into())?.io);
    Ok(match fell_back {
        Some(_) => vec![io],
        None => vec![io, threads()?],
    })
}

impl<'a> Rig<'a> {
    fn new(options: &'a Options) -> Result<Rig<'a>> {
        let total = options.total.round_down(STEP);
        ensure!(!total.is_zero(), "{} holds no step of {STEP}: give a larger total", options.total);
        if options.block.is_zero()
            || !options.block.is_multiple_of(Bytes::kib(4))
            || !STEP.is_multiple_of(options.block)
        {
            bail!("{} does not divide {STEP}: give a block of 4KiB to 16MiB", options.block);
        }
        let memory = |data: Data, seed: u64| -> Result<HostSpan> {
            let memory = HostMemory::new(WINDOW, None, PageKind::default())?;
            memory.prefault(4);
            let span = HostSpan::new(&memory, Bytes::ZERO, WINDOW)?;
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = vec![0; 1 << 20];
            for at in (0..WINDOW.count()).step_by(bytes.len()) {
                data.fill(&mut random, &mut bytes);
                span.write(Bytes::new(at), &bytes)?;
            }
            Ok(span)
        };
        let (random, half_zero) = (memory(Data::Random, 1)?, memory(Data::HalfZero, 1)?);
        Ok(Rig { options, total, random, half_zero, into: memory(Data::Random, 2)? })
    }

    fn from(&self, data: Data) -> &HostSpan {
        match data {
            Data::Random => &self.random,
            Data::HalfZero => &self.half_zero,
        }
    }

    /// Returns `len` bytes of a window for the file's bytes from `at` on.
    fn part(window: &HostSpan, at: Bytes, len: Bytes) -> HostSpan {
        let offset = Bytes::new(at.count() % WINDOW.count());
        window.part(offset, len).expect("steps and blocks divide the window")
    }

    /// Writes and reads the total in plain transfers, as many in flight as the engine takes.
    fn plain(&self, method: &mut Method, io: &Arc<dyn BlockIo>) -> Result<()> {
        let path = self.options.directory.join("vramp-bench.data");
        let file = DirectFile::create_unnamed(&path)?;
        io.preallocate(&file, self.total)?;
        let file = Arc::new(file);
        method.direct = file.is_direct();
        method.write_ns.push(self.plain_ns(io, &file, Direction::Write)?);
        method.read_ns.push(self.plain_ns(io, &file, Direction::Read)?);
        for at in self.starts(STEP) {
            let into = Rig::part(&self.into, at, STEP);
            file.transfer_now(Direction::Read, at, &into)?;
            self.compare(method.data, at, &into)?;
        }
        Ok(())
    }

    fn plain_ns(
        &self,
        io: &Arc<dyn BlockIo>,
        file: &Arc<DirectFile>,
        direction: Direction,
    ) -> Result<u64> {
        let window = match direction {
            Direction::Write => &self.random,
            Direction::Read => &self.into,
        };
        let block = self.options.block;
        let (sender, results) = channel::<Result<(), DiskError>>();
        let mut transfers = self.starts(block).map(|offset| {
            let sender = sender.clone();
            FileTransfer {
                file: Arc::clone(file),
                offset,
                span: Rig::part(window, offset, block),
                direction,
                // The receiver is gone once another transfer has failed.
                done: Box::new(move |result| drop(sender.send(result))),
            }
        });
        let begun = Instant::now();
        submit_transfers(io, transfers.by_ref().take(io.depth()));
        for _ in self.starts(block) {
            results.recv().context("each transfer completes")??;
            submit_transfers(io, transfers.next());
        }
        Ok(nanos(begun.elapsed()))
    }

    /// Writes and reads the total by the store, in steps.
    fn store(&self, method: &mut Method, io: &Arc<dyn BlockIo>) -> Result<()> {
        let disk = SpaceId::disk(0);
        let manager = ReservationManager::new([(disk, SpaceConfig::disk(self.total * 2))])?;
        let space = manager.space(disk).context("it was configured")?;
        let (piece, compression) = (self.options.block, method.compression);
        let config = DiskConfig { piece, compression, ..DiskConfig::default() };
        let store = DiskStore::open_with(&self.options.directory, config, &space, Arc::clone(io))?;
        method.direct = store.stats().direct;
        let stored = self.store_writes(&store, method)?;
        method.on_disk = space.total();
        let plausible = match compression {
            Some(_) => method.on_disk <= self.total,
            None => method.on_disk == self.total,
        };
        ensure!(plausible, "{} charged for {} written", method.on_disk, self.total);
        self.store_reads(&store, &stored, method)?;
        for (at, stored) in self.starts(STEP).zip(&stored) {
            let into = Rig::part(&self.into, at, STEP);
            store.read(stored, std::slice::from_ref(&into))?;
            self.compare(method.data, at, &into)?;
        }
        drop(stored);
        store.audit().map_err(anyhow::Error::msg)
    }

    fn store_writes(&self, store: &DiskStore, method: &mut Method) -> Result<Vec<StoredBytes>> {
        let mut stored = Vec::new();
        let mut in_flight = std::collections::VecDeque::new();
        let begun = Instant::now();
        for at in self.starts(STEP) {
            if in_flight.len() == STEPS_IN_FLIGHT {
                stored.extend(
                    in_flight.pop_front().map(DiskTransfer::<StoredBytes>::wait).transpose()?,
                );
            }
            let from = Rig::part(self.from(method.data), at, STEP);
            in_flight.push_back(store.begin_write(&[from], ChargeTo::Space)?);
        }
        for write in in_flight {
            stored.push(write.wait()?);
        }
        method.write_ns.push(nanos(begun.elapsed()));
        Ok(stored)
    }

    fn store_reads(
        &self,
        store: &DiskStore,
        stored: &[StoredBytes],
        method: &mut Method,
    ) -> Result<()> {
        let mut in_flight = std::collections::VecDeque::new();
        let begun = Instant::now();
        for (at, stored) in self.starts(STEP).zip(stored) {
            if in_flight.len() == STEPS_IN_FLIGHT {
                in_flight.pop_front().map(DiskTransfer::<()>::wait).transpose()?;
            }
            in_flight.push_back(store.begin_read(stored, &[Rig::part(&self.into, at, STEP)])?);
        }
        for read in in_flight {
            read.wait()?;
        }
        method.read_ns.push(nanos(begun.elapsed()));
        Ok(())
    }

    fn starts(&self, step: Bytes) -> impl Iterator<Item = Bytes> + use<> {
        let step_by = usize::try_from(step.count()).expect("a step is small");
        (0..self.total.count()).step_by(step_by).map(Bytes::new)
    }

    /// Compares a step with what was written.
    fn compare(&self, data: Data, at: Bytes, into: &HostSpan) -> Result<()> {
        let from = Rig::part(self.from(data), at, STEP);
        let (mut done, mut expected) = (Bytes::ZERO, Vec::new());
        let mut alike = true;
        into.scan(|found| {
            expected.resize(found.len(), 0);
            from.read(done, &mut expected).expect("both are one step");
            alike &= found == expected;
            done += Bytes::new(found.len() as u64);
        });
        ensure!(alike, "the {STEP} from offset {at} on differ from what was written");
        Ok(())
    }
}

fn rows(rig: &Rig<'_>, methods: &[Method]) -> Vec<Row> {
    let rate = |ns: u64| rig.total.count() as f64 * 1e9 / ns as f64;
    let row = |method: &Method, direction: Direction| {
        let times = method.times(direction);
        // The ratio to the fastest of these in the same round.
        let ratio = |is: &dyn Fn(&Method) -> bool| {
            let ratios = times.iter().enumerate().map(|(round, &ns)| {
                let others = methods.iter().filter(|method| is(method));
                let best = others.map(|method| method.times(direction)[round]).min().unwrap_or(ns);
                best as f64 / ns as f64
            });
            median(ratios.collect())
        };
        let on_disk = match method.what {
            "direct" => rig.total,
            _ => method.on_disk,
        };
        Row {
            what: method.what,
            engine: method.engine,
            direction: match direction {
                Direction::Write => "write",
                Direction::Read => "read",
            },
            data: method.data.name(),
            compressed: method.compression.is_some(),
            direct: method.direct,
            total_bytes: rig.total.count(),
            block_bytes: rig.options.block.count(),
            depth: rig.options.depth.into(),
            rounds: times.len() as u64,
            bytes_per_s: median(times.iter().copied().map(rate).collect()),
            of_direct: ratio(&|other| other.what == "direct"),
            of_store: ratio(&|other| {
                other.what == "store" && other.data == method.data && other.compression.is_none()
            }),
            on_disk: on_disk.count() as f64 / rig.total.count() as f64,
            // Different bytes are an error.
            verified: true,
        }
    };
    let both = [Direction::Write, Direction::Read];
    both.into_iter()
        .flat_map(|direction| methods.iter().map(move |method| row(method, direction)))
        .collect()
}
