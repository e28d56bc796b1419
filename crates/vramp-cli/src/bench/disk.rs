//! `vramp bench disk`: what the store of the disk tier leaves of a disk's rate.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_host::{
    BlockIo, DirectFile, Direction, DiskError, FileTransfer, HostMemory, HostSpan, IoChoice,
    IoUnavailable, OpenedIo, PageKind, open_io, submit_transfers,
};
use vramp_tiers::{
    ChargeTo, CompressionConfig, DiskConfig, DiskStore, DiskTransfer, ReservationManager,
    SpaceConfig, SpaceId, StoredBytes,
};

use super::args::{Compress, Disk, Engine};
use super::{Cell, Column, median, nanos, write_table};

/// What the store is given at a time, and how many of them are under way.
const STEP: Bytes = Bytes::mib(16);
const STEPS: usize = 4;
/// The memory that is written from and read into, over and over.
const WINDOW: Bytes = Bytes::mib(128);

/// One row. Serialised, this is the line that `--json` prints.
#[derive(Debug, Serialize)]
struct Row {
    bench: &'static str,
    what: &'static str,
    engine: &'static str,
    direction: &'static str,
    data: &'static str,
    compressed: bool,
    /// False if the filesystem has transfers go through the page cache.
    direct: bool,
    total_bytes: u64,
    block_bytes: u64,
    depth: u64,
    rounds: u64,
    bytes_per_s: f64,
    of_direct: f64,
    /// Against the store without compression, for the same data.
    of_store: f64,
    /// What lay on the disk, as a part of the bytes.
    on_disk: f64,
    verified: bool,
}

/// One way to move the bytes, and what each round took.
struct Lane {
    what: &'static str,
    engine: &'static str,
    data: Data,
    compression: Option<CompressionConfig>,
    direct: bool,
    on_disk: Bytes,
    write_ns: Vec<u64>,
    read_ns: Vec<u64>,
}

impl Lane {
    fn new(what: &'static str, engine: &'static str, data: Data) -> Lane {
        Lane {
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

    fn took(&self, direction: Direction) -> &[u64] {
        match direction {
            Direction::Write => &self.write_ns,
            Direction::Read => &self.read_ns,
        }
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    Random,
    /// Every other half KiB is zero.
    Half,
}

impl Data {
    fn name(self) -> &'static str {
        match self {
            Data::Random => "random",
            Data::Half => "half zero",
        }
    }

    fn fill(self, random: &mut fastrand::Rng, bytes: &mut [u8]) {
        random.fill(bytes);
        if self == Data::Half {
            bytes.chunks_mut(512).step_by(2).for_each(|half| half.fill(0));
        }
    }
}

/// What all ways of moving have in common.
struct Site<'a> {
    args: &'a Disk,
    total: Bytes,
    random: HostSpan,
    half: HostSpan,
    into: HostSpan,
}

pub(super) fn run(args: &Disk, out: &mut dyn Write) -> Result<()> {
    let site = Site::new(args)?;
    let plain = engines(args)?;
    let direct = plain.iter().map(|io| Lane::new("direct", io.name(), Data::Random));
    let mut lanes: Vec<Lane> = direct.collect();
    let (store, fell_back) = store_io(args)?;
    let mut own = store_lanes(args, store.name());
    if let Some(why) = fell_back.filter(|_| !args.json) {
        writeln!(out, "Moving by threads: {why}\n")?;
    }
    let begun = Instant::now();
    while own[0].write_ns.is_empty() || begun.elapsed() < Duration::from_secs_f64(args.seconds) {
        for (lane, io) in lanes.iter_mut().zip(&plain) {
            site.plain(lane, io)?;
        }
        for lane in &mut own {
            site.store(lane, &store)?;
        }
    }
    lanes.extend(own);
    let rows = rows(&site, &lanes);
    if !args.json {
        return write_table(out, &rows, &COLUMNS);
    }
    for row in &rows {
        serde_json::to_writer(&mut *out, row)?;
        writeln!(out)?;
    }
    Ok(())
}

/// The store as it is, and beside each data's without compression one with it, if that is asked for.
fn store_lanes(args: &Disk, engine: &'static str) -> Vec<Lane> {
    let plain = |data| Lane::new("store", engine, data);
    let Some(compress) = args.compress else { return vec![plain(Data::Random)] };
    let compression = match compress {
        Compress::Paying => CompressionConfig::default(),
        Compress::Always => {
            CompressionConfig { short_below_per_mille: 1000, ..CompressionConfig::default() }
        }
    };
    let both = |data| {
        let packed = Lane { compression: Some(compression), ..plain(data) };
        [plain(data), packed]
    };
    [Data::Random, Data::Half].into_iter().flat_map(both).collect()
}

/// Every engine there is, for the plain transfers.
fn engines(args: &Disk) -> Result<Vec<Arc<dyn BlockIo>>> {
    let OpenedIo { io, fell_back } = open_io(IoChoice::Auto, args.depth.into())?;
    let threads = || anyhow::Ok(open_io(IoChoice::Threads, args.depth.into())?.io);
    Ok(match fell_back {
        Some(_) => vec![io],
        None => vec![io, threads()?],
    })
}

fn store_io(args: &Disk) -> Result<(Arc<dyn BlockIo>, Option<IoUnavailable>)> {
    let choice = match args.engine {
        Engine::Auto => IoChoice::Auto,
        Engine::Uring => IoChoice::Uring,
        Engine::Threads => IoChoice::Threads,
    };
    let OpenedIo { io, fell_back } = open_io(choice, args.depth.into())?;
    Ok((io, fell_back))
}

impl<'a> Site<'a> {
    fn new(args: &'a Disk) -> Result<Site<'a>> {
        let total = args.total.round_down(STEP);
        ensure!(!total.is_zero(), "{} holds no step of {STEP}: give a larger --total", args.total);
        if args.block.is_zero()
            || !args.block.is_multiple_of(Bytes::kib(4))
            || !STEP.is_multiple_of(args.block)
        {
            bail!("{} does not divide {STEP}: give a --block of 4KiB to 16MiB", args.block);
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
        let (random, half) = (memory(Data::Random, 1)?, memory(Data::Half, 1)?);
        Ok(Site { args, total, random, half, into: memory(Data::Random, 2)? })
    }

    fn from(&self, data: Data) -> &HostSpan {
        match data {
            Data::Random => &self.random,
            Data::Half => &self.half,
        }
    }

    fn dir(&self) -> &Path {
        &self.args.dir
    }

    /// `len` bytes of a window that stand for those from `at` on.
    fn part(window: &HostSpan, at: Bytes, len: Bytes) -> HostSpan {
        let offset = Bytes::new(at.count() % WINDOW.count());
        window.part(offset, len).expect("steps and blocks divide the window")
    }

    /// Plain transfers of blocks, as many at a time as the engine takes.
    fn plain(&self, lane: &mut Lane, io: &Arc<dyn BlockIo>) -> Result<()> {
        let path = self.dir().join("vramp-bench.data");
        let file = DirectFile::create_unnamed(&path)?;
        io.preallocate(&file, self.total)?;
        let file = Arc::new(file);
        lane.direct = file.is_direct();
        lane.write_ns.push(self.plain_way(io, &file, Direction::Write)?);
        lane.read_ns.push(self.plain_way(io, &file, Direction::Read)?);
        for at in self.starts(STEP) {
            let into = Site::part(&self.into, at, STEP);
            file.transfer_now(Direction::Read, at, &into)?;
            self.compare(lane.data, at, &into)?;
        }
        Ok(())
    }

    fn plain_way(
        &self,
        io: &Arc<dyn BlockIo>,
        file: &Arc<DirectFile>,
        direction: Direction,
    ) -> Result<u64> {
        let window = match direction {
            Direction::Write => &self.random,
            Direction::Read => &self.into,
        };
        let block = self.args.block;
        let (tell, told) = channel::<Result<(), DiskError>>();
        let mut transfers = self.starts(block).map(|offset| {
            let tell = tell.clone();
            FileTransfer {
                file: Arc::clone(file),
                offset,
                span: Site::part(window, offset, block),
                direction,
                // Nobody listens once another one has failed.
                done: Box::new(move |answer| drop(tell.send(answer))),
            }
        });
        let begun = Instant::now();
        submit_transfers(io, transfers.by_ref().take(io.depth()));
        for _ in self.starts(block) {
            told.recv().context("each transfer is answered")??;
            submit_transfers(io, transfers.next());
        }
        Ok(nanos(begun.elapsed()))
    }

    /// The same bytes by the store, in steps.
    fn store(&self, lane: &mut Lane, io: &Arc<dyn BlockIo>) -> Result<()> {
        let disk = SpaceId::disk(0);
        let manager = ReservationManager::new([(disk, SpaceConfig::disk(self.total * 2))])?;
        let space = manager.space(disk).context("it was configured")?;
        let (piece, compression) = (self.args.block, lane.compression);
        let config = DiskConfig { piece, compression, ..DiskConfig::default() };
        let store = DiskStore::open_with(self.dir(), config, &space, Arc::clone(io))?;
        lane.direct = store.stats().direct;
        let stored = self.store_writes(&store, lane)?;
        lane.on_disk = space.total();
        let right = match compression {
            Some(_) => lane.on_disk <= self.total,
            None => lane.on_disk == self.total,
        };
        ensure!(right, "{} charged for {}", lane.on_disk, self.total);
        self.store_reads(&store, &stored, lane)?;
        for (at, stored) in self.starts(STEP).zip(&stored) {
            let into = Site::part(&self.into, at, STEP);
            store.read(stored, std::slice::from_ref(&into))?;
            self.compare(lane.data, at, &into)?;
        }
        drop(stored);
        store.audit().map_err(anyhow::Error::msg)
    }

    fn store_writes(&self, store: &DiskStore, lane: &mut Lane) -> Result<Vec<StoredBytes>> {
        let mut stored = Vec::new();
        let mut under_way = std::collections::VecDeque::new();
        let begun = Instant::now();
        for at in self.starts(STEP) {
            if under_way.len() == STEPS {
                stored.extend(
                    under_way.pop_front().map(DiskTransfer::<StoredBytes>::wait).transpose()?,
                );
            }
            let from = Site::part(self.from(lane.data), at, STEP);
            under_way.push_back(store.begin_write(&[from], ChargeTo::Space)?);
        }
        for write in under_way {
            stored.push(write.wait()?);
        }
        lane.write_ns.push(nanos(begun.elapsed()));
        Ok(stored)
    }

    fn store_reads(
        &self,
        store: &DiskStore,
        stored: &[StoredBytes],
        lane: &mut Lane,
    ) -> Result<()> {
        let mut under_way = std::collections::VecDeque::new();
        let begun = Instant::now();
        for (at, stored) in self.starts(STEP).zip(stored) {
            if under_way.len() == STEPS {
                under_way.pop_front().map(DiskTransfer::<()>::wait).transpose()?;
            }
            under_way.push_back(store.begin_read(stored, &[Site::part(&self.into, at, STEP)])?);
        }
        for read in under_way {
            read.wait()?;
        }
        lane.read_ns.push(nanos(begun.elapsed()));
        Ok(())
    }

    fn starts(&self, step: Bytes) -> impl Iterator<Item = Bytes> + use<> {
        let step_by = usize::try_from(step.count()).expect("a step is small");
        (0..self.total.count()).step_by(step_by).map(Bytes::new)
    }

    /// Every byte of a step is what was written.
    fn compare(&self, data: Data, at: Bytes, into: &HostSpan) -> Result<()> {
        let from = Site::part(self.from(data), at, STEP);
        let (mut done, mut expected) = (Bytes::ZERO, Vec::new());
        let mut alike = true;
        into.scan(|found| {
            expected.resize(found.len(), 0);
            from.read(done, &mut expected).expect("both are one step");
            alike &= found == expected;
            done += Bytes::new(found.len() as u64);
        });
        ensure!(alike, "what was read of the {STEP} from {at} on is not what was written");
        Ok(())
    }
}

fn rows(site: &Site<'_>, lanes: &[Lane]) -> Vec<Row> {
    let rate = |ns: u64| site.total.count() as f64 * 1e9 / ns as f64;
    let row = |lane: &Lane, direction: Direction| {
        let took = lane.took(direction);
        // Against the fastest of these in the same round.
        let ratio = |is: &dyn Fn(&Lane) -> bool| {
            let ratios = took.iter().enumerate().map(|(round, &ns)| {
                let others = lanes.iter().filter(|lane| is(lane));
                let best = others.map(|lane| lane.took(direction)[round]).min().unwrap_or(ns);
                best as f64 / ns as f64
            });
            median(ratios.collect())
        };
        let on_disk = match lane.what {
            "direct" => site.total,
            _ => lane.on_disk,
        };
        Row {
            bench: "disk",
            what: lane.what,
            engine: lane.engine,
            direction: match direction {
                Direction::Write => "write",
                Direction::Read => "read",
            },
            data: lane.data.name(),
            compressed: lane.compression.is_some(),
            direct: lane.direct,
            total_bytes: site.total.count(),
            block_bytes: site.args.block.count(),
            depth: site.args.depth.into(),
            rounds: took.len() as u64,
            bytes_per_s: median(took.iter().copied().map(rate).collect()),
            of_direct: ratio(&|other| other.what == "direct"),
            of_store: ratio(&|other| {
                other.what == "store" && other.data == lane.data && other.compression.is_none()
            }),
            on_disk: on_disk.count() as f64 / site.total.count() as f64,
            // Otherwise there would be an error in its place.
            verified: true,
        }
    };
    let both = [Direction::Write, Direction::Read];
    both.into_iter().flat_map(|way| lanes.iter().map(move |lane| row(lane, way))).collect()
}

const COLUMNS: [Column<Row>; 10] = [
    ("what", |row| {
        let with = if row.compressed { ", compressing" } else { "" };
        Cell::Words(format!("{}{with}", row.what))
    }),
    ("engine", |row| Cell::Words(row.engine.to_owned())),
    ("direction", |row| Cell::Words(row.direction.to_owned())),
    ("page cache", |row| Cell::Words(if row.direct { "bypassed" } else { "used" }.to_owned())),
    ("rounds", |row| Cell::Number(row.rounds.to_string())),
    ("MB/s", |row| Cell::Number(format!("{:.0}", row.bytes_per_s / 1e6))),
    ("data", |row| Cell::Words(row.data.to_owned())),
    ("on disk", |row| Cell::Number(format!("{:.3}", row.on_disk))),
    ("of store", |row| Cell::Number(format!("{:.3}", row.of_store))),
    ("of direct", |row| Cell::Number(format!("{:.3}", row.of_direct))),
];
