//! Random programs over kept memory: threads with an allocator each, as processes of two small cards, a keeper
//! that is stopped and started again, full cards and driver calls that fail. A client with the lock for reading finds the
//! bytes of the last commit, what is torn cannot be read, and nothing is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vramp_alloc::device::Driver;
use vramp_alloc::error::AllocError;
use vramp_alloc::sharing::kept::{
    KeepError, Keeper, KeeperConfig, KeeperServer, KeptDraft, KeptError, KeptMemory, KeptOptions,
    Lock, MapAs, OpenKept,
};
use vramp_alloc::sharing::range_of;
use vramp_alloc::{Allocation, Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, FaultPlan, Simulator};
use vramp_driver::{Call, DeviceCopy, Stream};

use crate::common::Random;

const PAGE: u64 = 2 << 20;
/// Bytes of each page that are written and compared.
const SAMPLE: Bytes = Bytes::new(64);
const NAMES: u64 = 5;
/// How long a keeper may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(20);
/// How late a call may be: the machine has more threads than cores.
const LATE: Duration = Duration::from_secs(8);
/// Calls that may fail and leave nothing.
const FAILING: [Call; 6] =
    [Call::Reserve, Call::Create, Call::Map, Call::SetAccess, Call::Export, Call::Import];

/// What all clients share.
struct World {
    cards: Vec<Arc<Simulator>>,
    directory: PathBuf,
    _folder: tempfile::TempDir,
    server: Mutex<Option<KeeperServer>>,
    limit: Option<u64>,
    /// Byte of the last complete contents of each version. Written with the lock for writing only.
    last: Mutex<BTreeMap<[u8; 16], u8>>,
    /// Byte of each epoch that somebody read.
    seen: Mutex<BTreeMap<([u8; 16], u64), u8>>,
}

#[derive(Default)]
struct Counts {
    read: u64,
    torn: u64,
    written: u64,
    failed: u64,
}

struct Client {
    world: Arc<World>,
    card: usize,
    allocator: Allocator,
    stream: StreamId,
    raw: Stream,
    keeper: Keeper,
    random: Random,
    drafts: Vec<(KeptDraft, Vec<AddrRange>)>,
    kept: Vec<KeptMemory>,
    blocks: Vec<Allocation>,
    target: Allocation,
    counts: Counts,
}

fn samples(range: AddrRange) -> impl Iterator<Item = AddrRange> {
    let pages = range.len.count().div_ceil(PAGE);
    (0..pages).map(move |page| {
        let at = Bytes::new(page * PAGE);
        AddrRange::new(range.start + at, SAMPLE.min(range.len - at))
    })
}

fn start(directory: &std::path::Path, limit: Option<u64>) -> KeeperServer {
    KeeperServer::start(&KeeperConfig { directory, limit, idle_exit: None }).unwrap()
}

impl World {
    fn new(limit: Option<u64>) -> Arc<World> {
        let builder = Simulator::builder().memory(Bytes::mib(96)).contents(Contents::Stored);
        let cards = builder.checked().build_machine(2).into_iter().map(Arc::new).collect();
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("vramp");
        let server = Mutex::new(Some(start(&directory, limit)));
        let (last, seen) = Default::default();
        Arc::new(World { cards, directory, _folder: folder, server, limit, last, seen })
    }
}

/// Fails for errors that no program may see.
fn check_error(error: &KeptError) {
    match error {
        KeptError::Keeper(
            KeepError::NotRunning { .. }
            | KeepError::NoSuchEntry { .. }
            | KeepError::Busy { .. }
            | KeepError::Torn { .. }
            | KeepError::Full { .. }
            | KeepError::NotNewer { .. }
            | KeepError::NotLocked { .. }
            | KeepError::Uncommitted { .. }
            | KeepError::Adrift { .. }
            | KeepError::TimedOut { .. },
        )
        | KeptError::OtherCard { .. }
        | KeptError::DraftFull { .. }
        | KeptError::Empty { .. }
        | KeptError::ReadOnly { .. }
        | KeptError::Alloc(AllocError::OutOfMemory(_) | AllocError::Driver(_))
        | KeptError::Driver(_) => {}
        other => panic!("{other:?}"),
    }
}

impl Client {
    fn new(world: &Arc<World>, card: usize, seed: u64) -> Client {
        let device = Arc::clone(&world.cards[card]) as Arc<dyn Driver>;
        let allocator = Allocator::new(device, Config::default()).unwrap();
        let stream = allocator.create_stream().unwrap();
        let target = allocator.malloc(Bytes::new(PAGE), stream).unwrap();
        Client {
            world: Arc::clone(world),
            card,
            raw: allocator.stream(stream).unwrap(),
            allocator,
            stream,
            keeper: Keeper::new(&world.directory, TIMEOUT),
            random: Random(seed),
            drafts: Vec::new(),
            kept: Vec::new(),
            blocks: Vec::new(),
            target,
            counts: Counts::default(),
        }
    }

    fn sim(&self) -> &Simulator {
        &self.world.cards[self.card]
    }

    fn name(&mut self) -> String {
        format!("n/{}", self.random.below(NAMES))
    }

    fn soon(&mut self) -> Duration {
        Duration::from_millis(self.random.below(30))
    }

    /// Makes a call with a deadline, and counts its failure.
    fn timed<T>(
        &mut self,
        call: impl FnOnce(&mut Client, Instant) -> Result<T, KeptError>,
    ) -> Option<T> {
        let (wait, start) = (self.soon(), Instant::now());
        let result = call(self, start + wait);
        let late = start.elapsed().saturating_sub(wait);
        assert!(late < LATE, "{late:?} after its deadline: {:?}", result.err());
        self.note(result)
    }

    fn note<T>(&mut self, result: Result<T, KeptError>) -> Option<T> {
        result
            .map_err(|error| {
                check_error(&error);
                self.counts.failed += 1;
                self.counts.torn +=
                    u64::from(matches!(error, KeptError::Keeper(KeepError::Torn { .. })));
            })
            .ok()
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.kept.len() as u64;
        (len > 0).then(|| self.random.below(len) as usize)
    }

    fn begin(&mut self) {
        let (name, pages) = (self.name(), 1 + self.random.below(12));
        let priority = self.random.below(3) as i32;
        let options = KeptOptions {
            bytes: Bytes::new(pages * PAGE),
            part: Bytes::new(PAGE * (1 + self.random.below(4))),
            priority,
            kept_for: (self.random.below(8) == 0).then_some(Duration::from_millis(20)),
        };
        let draft =
            self.timed(|me, until| me.allocator.draft_kept(&me.keeper, &name, &options, until));
        self.drafts.extend(draft.map(|draft| (draft, Vec::new())));
    }

    fn place(&mut self) {
        let size = Bytes::new(1 + self.random.below(5 * PAGE));
        let Some((mut draft, mut placed)) = self.drafts.pop() else { return };
        let before = draft.used();
        let result = draft.place(size);
        match self.note(result) {
            Some(range) => placed.push(range),
            None => assert_eq!(draft.used(), before),
        }
        self.drafts.push((draft, placed));
    }

    fn fill(&mut self, ranges: impl IntoIterator<Item = AddrRange>, byte: u8) {
        for range in ranges {
            self.sim().fill(self.raw, range, byte).unwrap();
        }
    }

    fn commit_draft(&mut self) {
        let Some((draft, placed)) = self.drafts.pop() else { return };
        let byte = 1 + self.random.below(255) as u8;
        let whole = AddrRange::new(draft.range().start, draft.used());
        if !placed.is_empty() {
            self.fill(samples(whole), byte);
            draft.record_use(self.stream).unwrap();
        }
        let map = if self.random.below(2) == 0 { MapAs::ReadOnly } else { MapAs::Writable };
        match draft.commit(&[byte], [byte; 32], map) {
            Ok(kept) => match map == MapAs::Writable && self.random.below(4) > 0 {
                true => self.finish_write(kept, byte),
                false => self.kept.push(kept),
            },
            Err(failed) => {
                for part in samples(failed.memory.range()) {
                    assert!(vramp_testing::is_filled(&self.sim().peek(part).unwrap(), byte));
                }
                self.note(Err::<(), _>(*failed.error));
            }
        }
    }

    fn open(&mut self) {
        let name = self.name();
        let map = if self.random.below(2) == 0 { MapAs::ReadOnly } else { MapAs::Writable };
        let lock = *self.random.pick(&[Lock::None, Lock::Read, Lock::Read, Lock::Write]);
        // What is opened for writing and is not writable is given back as it was.
        let options = OpenKept { map, lock, same_addresses: self.random.below(2) == 0 };
        let opened =
            self.timed(|me, until| me.allocator.open_kept(&me.keeper, &name, options, until));
        self.kept.extend(opened);
    }

    /// Compares the memory with the last commit, if it may be read.
    fn read(&mut self) {
        let Some(index) = self.pick() else { return };
        let kept = self.kept.swap_remove(index);
        if kept.hold().held_lock() != Lock::Write {
            self.timed(|_, until| kept.read(until));
        }
        if kept.hold().held_lock() == Lock::Read {
            self.compare(&kept);
        }
        self.kept.push(kept);
    }

    fn compare(&mut self, kept: &KeptMemory) {
        let (id, epoch) = (kept.hold().version_id(), kept.epoch());
        let first = kept.layout()[0];
        let byte = *self.world.last.lock().unwrap().get(&id).unwrap_or(&first);
        let found: Vec<_> =
            samples(kept.range()).map(|part| self.sim().peek(part).unwrap()).collect();
        for part in samples(kept.range()) {
            let copy = DeviceCopy { from: part.start, to: self.target.addr(), len: part.len };
            self.sim().copy(self.raw, copy).unwrap();
        }
        kept.record_use(self.stream).unwrap();
        // A keeper that ended may have cost it the lock, if this thread did not run for a second.
        if kept.hold().held_lock() != Lock::Read {
            return;
        }
        for found in found {
            assert!(
                vramp_testing::is_filled(&found, byte),
                "epoch {epoch} of {} has {} and not {byte}",
                kept.hold().name(),
                found[0]
            );
        }
        let before = *self.world.seen.lock().unwrap().entry((id, epoch)).or_insert(byte);
        assert_eq!(before, byte, "epoch {epoch} of {} changed", kept.hold().name());
        self.counts.read += 1;
    }

    fn write(&mut self) {
        let Some(index) = self.pick() else { return };
        let kept = self.kept.swap_remove(index);
        if kept.map() == MapAs::ReadOnly {
            let refused = kept.write(Instant::now()).unwrap_err();
            assert!(matches!(refused, KeptError::ReadOnly { .. }), "{refused}");
            self.kept.push(kept);
            return;
        }
        if self.timed(|_, until| kept.write(until)).is_none() {
            self.kept.push(kept);
            return;
        }
        match self.random.below(8) {
            // It ends in the middle.
            0 => {
                let half: Vec<_> = samples(kept.range()).step_by(2).collect();
                self.fill(half, 0);
                kept.record_use(self.stream).unwrap();
                drop(kept);
            }
            1 => {
                let released = kept.release_unchanged();
                self.note(released);
                self.kept.push(kept);
            }
            _ => {
                let byte = 1 + self.random.below(255) as u8;
                self.fill(samples(kept.range()), byte);
                kept.record_use(self.stream).unwrap();
                self.finish_write(kept, byte);
            }
        }
    }

    /// Commits all of the bytes. After a failure the memory is closed, and torn unless the commit counted.
    fn finish_write(&mut self, kept: KeptMemory, byte: u8) {
        self.world.last.lock().unwrap().insert(kept.hold().version_id(), byte);
        let then = *self.random.pick(&[Lock::None, Lock::Read, Lock::Read]);
        let before = kept.epoch();
        let committed = kept.commit(then);
        if let Some(epoch) = self.note(committed) {
            assert!(epoch > before, "{epoch} after {before}");
            self.counts.written += 1;
            if kept.hold().held_lock() == Lock::Read {
                self.compare(&kept);
            }
            self.kept.push(kept);
        }
    }

    fn lock(&mut self) {
        let Some(index) = self.pick() else { return };
        let kept = self.kept.swap_remove(index);
        let epoch = kept.epoch();
        let is_writer = kept.hold().held_lock() == Lock::Write;
        match self.random.below(4) {
            0 => drop(self.timed(|_, until| kept.unlock(until))),
            1 => drop(self.timed(|_, until| kept.wait_newer(epoch, until))),
            2 => drop(self.note(kept.hold().remove().map_err(KeptError::from))),
            _ if is_writer => drop(self.note(kept.release_unchanged())),
            _ => {
                self.timed(|_, until| kept.yield_to_writer(until));
            }
        }
        if kept.hold().held_lock() == Lock::Read {
            self.compare(&kept);
        }
        self.kept.push(kept);
    }

    fn end(&mut self) {
        let Some(index) = self.pick() else { return };
        let kept = self.kept.swap_remove(index);
        match self.random.below(2) {
            0 => kept.close().unwrap(),
            _ => drop(kept),
        }
    }

    fn pool(&mut self) {
        match self.random.below(3) {
            0 if !self.blocks.is_empty() => {
                let index = self.random.below(self.blocks.len() as u64) as usize;
                let block = self.blocks.swap_remove(index);
                self.allocator.free(block, self.stream).unwrap();
            }
            1 => drop(self.allocator.trim(Bytes::ZERO)),
            _ => {
                let size = Bytes::new(PAGE * (1 + self.random.below(8)));
                if let Ok(block) = self.allocator.malloc(size, self.stream) {
                    self.fill(samples(range_of(&block)), 0xee);
                    self.blocks.push(block);
                }
            }
        }
        self.allocator.audit().unwrap();
    }

    fn keeper(&mut self) {
        let device = self.allocator.driver().info().id.clone();
        match self.random.below(6) {
            0 => {
                let name = self.name();
                let removed = self.keeper.remove(&name);
                self.note(removed.map_err(KeptError::from));
            }
            1 => {
                let evicted = self.keeper.evict(&device, self.random.below(64) << 20);
                self.note(evicted.map_err(KeptError::from));
            }
            2 => {
                let mut server = self.world.server.lock().unwrap();
                drop(server.take());
                let pause = self.random.below(3) * self.random.below(10);
                std::thread::sleep(Duration::from_millis(pause));
                *server = Some(start(&self.world.directory, self.world.limit));
            }
            _ => {
                let entries = self.keeper.entries().map_err(KeptError::from);
                for entry in self.note(entries).into_iter().flatten() {
                    assert!(entry.name.starts_with("n/"), "{entry:?}");
                }
            }
        }
    }

    fn faults(&mut self) {
        let plan = match self.random.below(3) {
            0 => {
                let fail = |call| FaultPlan::randomly_of(call, 0.08);
                FAILING[1..].iter().fold(fail(FAILING[0]), |plan, call| plan.and(fail(*call)))
            }
            _ => FaultPlan::none(),
        };
        self.sim().set_faults(plan.with_code(800));
    }

    fn run(mut self, steps: usize) -> Counts {
        for _ in 0..steps {
            match self.random.below(100) {
                0..8 if self.drafts.len() < 2 => self.begin(),
                0..18 => self.place(),
                18..26 => self.commit_draft(),
                26..38 if self.kept.len() < 6 => self.open(),
                38..58 => self.read(),
                58..78 => self.write(),
                78..85 => self.lock(),
                85..89 => self.end(),
                89..90 => drop(self.drafts.pop()),
                90..94 => self.pool(),
                94..96 => self.keeper(),
                96..98 => self.faults(),
                _ => self.sim().synchronize_stream(self.raw).unwrap(),
            }
        }
        let Client { allocator, stream, drafts, kept, blocks, target, counts, .. } = self;
        drop((drafts, kept));
        for block in blocks.into_iter().chain([target]) {
            allocator.free(block, stream).unwrap();
        }
        allocator.audit().unwrap();
        allocator.close().unwrap();
        counts
    }
}

fn run(seed: u64, steps: usize, limit: Option<u64>) -> Counts {
    let world = World::new(limit);
    let clients: Vec<_> =
        (0..4).map(|index| Client::new(&world, index % 2, seed << 8 | index as u64)).collect();
    let mut counts = Counts::default();
    std::thread::scope(|scope| {
        let running: Vec<_> =
            clients.into_iter().map(|client| scope.spawn(move || client.run(steps))).collect();
        for client in running {
            let found = client.join().unwrap();
            counts.read += found.read;
            counts.torn += found.torn;
            counts.written += found.written;
            counts.failed += found.failed;
        }
    });
    let keeper = Keeper::new(&world.directory, TIMEOUT);
    let end = Instant::now() + TIMEOUT;
    loop {
        let entries = keeper.entries().unwrap();
        let held = entries.iter().find(|entry| {
            let holders = entry.current.as_ref().map_or(0, |current| current.holder_count);
            (holders, entry.waiting, entry.draft_pid, entry.superseded) != (0, 0, None, 0)
        });
        let Some(held) = held else { break };
        // The keeper sees the end of a connection a moment later.
        assert!(Instant::now() < end, "{held:?}");
        std::thread::yield_now();
    }
    drop(world.server.lock().unwrap().take());
    for card in &world.cards {
        assert!(card.hazards().is_empty(), "seed {seed}: {:?}", card.hazards());
        let live = card.live();
        let left =
            (live.handles, live.mappings, live.reservations, live.handles_released_but_exported);
        assert_eq!(left, (0, 0, 0, 0), "seed {seed}: {live:?}");
        assert_eq!(live.device_bytes, Bytes::ZERO, "seed {seed}");
    }
    counts
}

#[test]
fn readers_find_what_was_committed_and_nothing_is_left() {
    let (mut read, mut torn, mut written, mut failed) = (0, 0, 0, 0);
    for seed in vramp_testing::seeds(4) {
        let limit = (seed % 2 == 1).then_some(64 << 20);
        let counts = run(seed, 400, limit);
        read += counts.read;
        torn += counts.torn;
        written += counts.written;
        failed += counts.failed;
    }
    let found = format!("{read} read, {torn} torn, {written} written, {failed} failed");
    assert!(read > 50 && torn > 1 && written > 10 && failed > 30, "{found}");
}
