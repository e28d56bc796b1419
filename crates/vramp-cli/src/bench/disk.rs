//! `vramp bench disk`: what the store of the disk tier leaves of a disk's rate.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vramp::Bytes;
use vramp_host::{
    BlockIo, DirectFile, Direction, DiskError, HostMemory, HostSpan, IoChoice, IoUnavailable,
    OpenedIo, PageKind, Transfer, move_whole, open_io,
};
use vramp_tiers::{
    DiskConfig, DiskStore, DiskTransfer, PaidBy, ReservationManager, SpaceConfig, SpaceId,
    StoredBytes,
};

use super::args::{Disk, Engine};
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
    /// False if the filesystem has transfers go through the page cache.
    direct: bool,
    total_bytes: u64,
    block_bytes: u64,
    depth: u64,
    rounds: u64,
    bytes_per_s: f64,
    of_direct: f64,
    verified: bool,
}

/// One way to move the bytes, and what each round took.
struct Lane {
    what: &'static str,
    engine: &'static str,
    direct: bool,
    write_ns: Vec<u64>,
    read_ns: Vec<u64>,
}

impl Lane {
    fn new(what: &'static str, engine: &'static str) -> Lane {
        Lane { what, engine, direct: false, write_ns: Vec::new(), read_ns: Vec::new() }
    }

    fn took(&self, direction: Direction) -> &[u64] {
        match direction {
            Direction::Write => &self.write_ns,
            Direction::Read => &self.read_ns,
        }
    }
}

/// What all ways of moving have in common.
struct Site<'a> {
    args: &'a Disk,
    total: Bytes,
    from: HostSpan,
    into: HostSpan,
}

pub(super) fn run(args: &Disk, out: &mut dyn Write) -> Result<()> {
    let site = Site::new(args)?;
    let plain = engines(args)?;
    let mut lanes: Vec<Lane> = plain.iter().map(|io| Lane::new("direct", io.name())).collect();
    let (store, fell_back) = store_io(args)?;
    let mut own = Lane::new("store", store.name());
    if let Some(why) = fell_back.filter(|_| !args.json) {
        writeln!(out, "Moving by threads: {why}\n")?;
    }
    let begun = Instant::now();
    while own.write_ns.is_empty() || begun.elapsed() < Duration::from_secs_f64(args.seconds) {
        for (lane, io) in lanes.iter_mut().zip(&plain) {
            site.plain(lane, io)?;
        }
        site.store(&mut own, &store)?;
    }
    lanes.push(own);
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
        let memory = |touch: u8| -> Result<HostSpan> {
            let memory = HostMemory::new(WINDOW, None, PageKind::default())?;
            memory.touch(4);
            let span = HostSpan::new(&memory, Bytes::ZERO, WINDOW)?;
            let mut random = fastrand::Rng::with_seed(touch.into());
            let mut bytes = vec![0; 1 << 20];
            for at in (0..WINDOW.count()).step_by(bytes.len()) {
                random.fill(&mut bytes);
                span.write(Bytes::new(at), &bytes)?;
            }
            Ok(span)
        };
        Ok(Site { args, total, from: memory(1)?, into: memory(2)? })
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
        let file = DirectFile::create_hidden(&path)?;
        io.preallocate(&file, self.total)?;
        let file = Arc::new(file);
        lane.direct = file.is_direct();
        lane.write_ns.push(self.plain_way(io, &file, Direction::Write)?);
        lane.read_ns.push(self.plain_way(io, &file, Direction::Read)?);
        for at in self.starts(STEP) {
            let into = Site::part(&self.into, at, STEP);
            file.move_now(Direction::Read, at, &into)?;
            self.compare(at, &into)?;
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
            Direction::Write => &self.from,
            Direction::Read => &self.into,
        };
        let block = self.args.block;
        let (tell, told) = channel::<Result<(), DiskError>>();
        let mut transfers = self.starts(block).map(|offset| {
            let tell = tell.clone();
            Transfer {
                file: Arc::clone(file),
                offset,
                span: Site::part(window, offset, block),
                direction,
                // Nobody listens once another one has failed.
                done: Box::new(move |answer| drop(tell.send(answer))),
            }
        });
        let begun = Instant::now();
        move_whole(io, transfers.by_ref().take(io.depth()));
        for _ in self.starts(block) {
            told.recv().context("each transfer is answered")??;
            move_whole(io, transfers.next());
        }
        Ok(nanos(begun.elapsed()))
    }

    /// The same bytes by the store, in steps.
    fn store(&self, lane: &mut Lane, io: &Arc<dyn BlockIo>) -> Result<()> {
        let disk = SpaceId::disk(0);
        let manager = ReservationManager::new([(disk, SpaceConfig::disk(self.total * 2))])?;
        let space = manager.space(disk).context("it was configured")?;
        let config = DiskConfig { piece: self.args.block, ..DiskConfig::default() };
        let store = DiskStore::open_with(self.dir(), config, &space, Arc::clone(io))?;
        lane.direct = store.stats().direct;
        let stored = self.store_writes(&store, lane)?;
        ensure!(space.total() == self.total, "{} charged for {}", space.total(), self.total);
        self.store_reads(&store, &stored, lane)?;
        for (at, stored) in self.starts(STEP).zip(&stored) {
            let into = Site::part(&self.into, at, STEP);
            store.read(stored, std::slice::from_ref(&into))?;
            self.compare(at, &into)?;
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
            let from = Site::part(&self.from, at, STEP);
            under_way.push_back(store.begin_write(&[from], PaidBy::Space)?);
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
    fn compare(&self, at: Bytes, into: &HostSpan) -> Result<()> {
        let from = Site::part(&self.from, at, STEP);
        let (mut done, mut expected) = (Bytes::ZERO, Vec::new());
        let mut alike = true;
        into.pieces(|found| {
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
        // Against the faster of the plain ones in the same round.
        let ratios = took.iter().enumerate().map(|(round, &ns)| {
            let plain = lanes.iter().filter(|lane| lane.what == "direct");
            let best = plain.map(|lane| lane.took(direction)[round]).min().unwrap_or(ns);
            best as f64 / ns as f64
        });
        Row {
            bench: "disk",
            what: lane.what,
            engine: lane.engine,
            direction: match direction {
                Direction::Write => "write",
                Direction::Read => "read",
            },
            direct: lane.direct,
            total_bytes: site.total.count(),
            block_bytes: site.args.block.count(),
            depth: site.args.depth.into(),
            rounds: took.len() as u64,
            bytes_per_s: median(took.iter().copied().map(rate).collect()),
            of_direct: median(ratios.collect()),
            // Otherwise there would be an error in its place.
            verified: true,
        }
    };
    let both = [Direction::Write, Direction::Read];
    both.into_iter().flat_map(|way| lanes.iter().map(move |lane| row(lane, way))).collect()
}

const COLUMNS: [Column<Row>; 7] = [
    ("what", |row| Cell::Words(row.what.to_owned())),
    ("engine", |row| Cell::Words(row.engine.to_owned())),
    ("direction", |row| Cell::Words(row.direction.to_owned())),
    ("page cache", |row| Cell::Words(if row.direct { "bypassed" } else { "used" }.to_owned())),
    ("rounds", |row| Cell::Number(row.rounds.to_string())),
    ("MB/s", |row| Cell::Number(format!("{:.0}", row.bytes_per_s / 1e6))),
    ("of direct", |row| Cell::Number(format!("{:.3}", row.of_direct))),
];
