//! Memory that a keeper holds: on one simulated card with an allocator for each "process".

use std::path::PathBuf;

use vramp_alloc::device::Driver;
use vramp_alloc::error::AllocError;
use vramp_alloc::kind::{Classify, Kind};
use vramp_alloc::sharing::kept::{
    KeepError, Keeper, KeeperConfig, KeeperServer, KeptDraft, KeptError, KeptOptions, Lock, MapAs,
    OpenKept,
};
use vramp_driver::sim::FaultPlan;
use vramp_testing::fail_each_call;

use super::*;

const NAME: &str = "model/0";
const DIGEST: [u8; 32] = [7; 32];

/// A keeper in a directory of its own.
struct Kept {
    server: Option<KeeperServer>,
    keeper: Keeper,
    directory: PathBuf,
    _folder: tempfile::TempDir,
}

impl Kept {
    fn new() -> Kept {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("vramp");
        let server = Some(serve(&directory));
        let keeper = Keeper::new(&directory, Duration::from_secs(20));
        Kept { server, keeper, directory, _folder: folder }
    }

    /// Lets go of the name's memory.
    fn clear(&self) {
        self.keeper.remove(NAME).unwrap();
    }
}

fn serve(directory: &std::path::Path) -> KeeperServer {
    KeeperServer::start(&KeeperConfig { directory, limit: None, idle_exit: None }).unwrap()
}

fn options(bytes: Bytes) -> KeptOptions {
    KeptOptions { bytes, part: MIB(16), ..KeptOptions::default() }
}

fn writable() -> OpenKept {
    OpenKept { map: MapAs::Writable, lock: Lock::None, ..OpenKept::default() }
}

/// Memory of `NAME` in parts of 16 MiB, filled with a byte.
fn filled(machine: &Machine, kept: &Kept, bytes: Bytes, byte: u8) -> KeptDraft {
    let owner = &machine.allocators[0];
    let mut draft = owner.draft_kept(&kept.keeper, NAME, &options(bytes), soon()).unwrap();
    let placed = draft.place(bytes).unwrap();
    machine.fill(0, placed, byte);
    draft
}

fn publish(machine: &Machine, kept: &Kept, bytes: Bytes, byte: u8) {
    let draft = filled(machine, kept, bytes, byte);
    drop(draft.commit(b"layout", DIGEST, MapAs::ReadOnly).unwrap());
}

#[test]
fn memory_outlives_its_publisher_and_is_opened_without_a_copy() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    let owner = &machine.allocators[0];
    let draft = filled(&machine, &kept, MIB(40), 3);
    assert_eq!(draft.current(), None);
    let at = draft.range().start;
    let published = draft.commit(b"layout", DIGEST, MapAs::ReadOnly).unwrap();
    assert_eq!((published.epoch(), published.range().len), (1, MIB(40)));
    published.close().unwrap();
    assert_eq!(machine.cards[0].live().handles, 0);
    assert_eq!(machine.cards[0].live().device_bytes, MIB(40), "the keeper has it");

    let before = machine.cards[0].calls();
    let readers: Vec<_> = (0..4)
        .map(|_| owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap())
        .collect();
    // Reserve twice, where the addresses are taken; three imports and maps; one set-access.
    assert!(machine.cards[0].calls() - before <= 4 * 9);
    assert_eq!(readers[0].range().start, at, "the addresses were free");
    for reader in &readers {
        machine.holds(0, reader.range(), 3);
        assert_eq!((reader.layout(), reader.hold().digest()), (&b"layout"[..], DIGEST));
        assert_eq!(reader.map(), MapAs::ReadOnly);
    }
    assert_eq!(machine.cards[0].live().device_bytes, MIB(40), "one copy for all");
    drop(readers);
    kept.clear();
    machine.close();
}

#[test]
fn memory_for_reading_only_cannot_be_written() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    publish(&machine, &kept, MIB(2), 3);
    let owner = &machine.allocators[0];
    let reader = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap();
    let refused = reader.write(soon()).unwrap_err();
    assert!(matches!(refused, KeptError::ReadOnly { .. }), "{refused}");
    let to_write = OpenKept { lock: Lock::Write, ..OpenKept::default() };
    let refused = owner.open_kept(&kept.keeper, NAME, to_write, soon()).unwrap_err();
    assert!(matches!(refused, KeptError::ReadOnly { .. }), "{refused}");
    machine.cards[0].fill(machine.raw(0), reader.range(), 4).unwrap();
    assert!(machine.cards[0].synchronize_stream(machine.raw(0)).is_err());
    let why = machine.cards[0].device_loss().unwrap().explanation;
    assert!(why.contains("for reading only"), "{why}");
}

#[test]
fn epochs_are_handed_over_in_place() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    publish(&machine, &kept, MIB(20), 1);
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let trainer = owner.open_kept(&kept.keeper, NAME, writable(), soon()).unwrap();
    let engine = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap();
    engine.record_use(stream).unwrap();
    for epoch in 2..20 {
        let byte = epoch as u8;
        std::thread::scope(|scope| {
            let written = scope.spawn(|| {
                trainer.write(soon()).unwrap();
                machine.fill(0, trainer.range(), byte);
                trainer.commit(Lock::None).unwrap()
            });
            // Between two steps of the engine.
            while engine.yield_to_writer(soon()).unwrap() < epoch {
                std::thread::yield_now();
            }
            assert_eq!(written.join().unwrap(), epoch);
        });
        machine.holds(0, engine.range(), byte);
        assert_eq!(engine.epoch(), epoch);
    }
    let busy = trainer.write(Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert!(matches!(busy, KeptError::Keeper(KeepError::Busy { .. })), "{busy}");
    assert_eq!(busy.kind(), Kind::KeptBusy);
    drop((trainer, engine));
    kept.clear();
    machine.close();
}

#[test]
fn a_write_without_a_commit_tears_and_a_new_version_mends_it() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    publish(&machine, &kept, MIB(2), 1);
    let owner = &machine.allocators[0];
    let writer = owner.open_kept(&kept.keeper, NAME, writable(), soon()).unwrap();
    writer.write(soon()).unwrap();
    writer.release_unchanged().unwrap();
    writer.write(soon()).unwrap();
    drop(writer);
    let torn = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap_err();
    assert_eq!(torn.kind(), Kind::Torn, "{torn}");

    let draft = filled(&machine, &kept, MIB(4), 2);
    assert_eq!(draft.current(), Some((1, DIGEST)));
    drop(draft.commit(b"", DIGEST, MapAs::ReadOnly).unwrap());
    let reader = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap();
    assert_eq!(reader.epoch(), 2);
    machine.holds(0, reader.range(), 2);
    drop(reader);
    kept.clear();
    machine.close();
}

#[test]
fn memory_survives_the_keeper_in_processes_that_have_it_open() {
    let (machine, mut kept) = (Machine::new(1), Kept::new());
    publish(&machine, &kept, MIB(20), 1);
    let owner = &machine.allocators[0];
    let reader = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap();
    drop(kept.server.take());
    machine.holds(0, reader.range(), 1);
    let gone = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap_err();
    assert_eq!(gone.kind(), Kind::Keeper, "{gone}");
    kept.server = Some(serve(&kept.directory));
    let other = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap();
    machine.holds(0, other.range(), 1);
    drop((reader, other));
    kept.clear();
    machine.close();
}

#[test]
fn wrong_uses_say_what_to_do_and_leave_nothing() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    let owner = &machine.allocators[0];
    let draft = |options: &KeptOptions| owner.draft_kept(&kept.keeper, NAME, options, soon());
    assert_eq!(draft(&KeptOptions::default()).unwrap_err().kind(), Kind::Option);
    let no_part = KeptOptions { part: Bytes::ZERO, ..options(MIB(1)) };
    assert_eq!(draft(&no_part).unwrap_err().kind(), Kind::Option);
    let huge = KeptOptions { bytes: Bytes::new(u64::MAX), ..options(MIB(1)) };
    assert_eq!(draft(&huge).unwrap_err().kind(), Kind::Option);
    assert_eq!(
        owner.draft_kept(&kept.keeper, "a b", &options(MIB(1)), soon()).unwrap_err().kind(),
        Kind::Option
    );

    let mut small = draft(&options(MIB(2))).unwrap();
    assert!(matches!(small.place(MIB(3)), Err(KeptError::DraftFull { .. })));
    assert!(matches!(small.place(Bytes::new(u64::MAX)), Err(KeptError::DraftFull { .. })));
    let places = [0, 1, 512, 513].map(|size| small.place(Bytes::new(size)).unwrap());
    let apart = places.windows(2).map(|two| two[1].start.number() - two[0].start.number());
    assert_eq!(apart.collect::<Vec<_>>(), [512, 512, 512]);
    assert_eq!(small.used(), Bytes::new(2560));
    drop(small);

    let failed = draft(&options(MIB(1))).unwrap().commit(b"", DIGEST, MapAs::ReadOnly).unwrap_err();
    assert!(matches!(*failed.error, KeptError::Empty { .. }));
    drop(failed);
    let missing = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap_err();
    assert_eq!(missing.kind(), Kind::NotKept, "{missing}");
    machine.close();
}

#[test]
fn a_commit_that_fails_leaves_the_memory_to_this_process() {
    let (machine, mut kept) = (Machine::new(1), Kept::new());
    kept.keeper = Keeper::new(&kept.directory, Duration::from_millis(50));
    let draft = filled(&machine, &kept, MIB(2), 9);
    drop(kept.server.take());
    let failed = draft.commit(b"", DIGEST, MapAs::ReadOnly).unwrap_err();
    machine.holds(0, failed.memory.range(), 9);
    machine.fill(0, failed.memory.range(), 10);
    machine.holds(0, failed.memory.range(), 10);
    drop(failed);
    machine.close();
}

#[test]
fn a_full_card_gives_way_or_fails_with_a_report() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    // The card has 1 GiB, of which the pool has nearly all: idle, and then in use.
    let idle = owner.malloc(MIB(900), stream).unwrap();
    owner.free(idle, stream).unwrap();
    publish(&machine, &kept, MIB(400), 1);
    kept.clear();

    let used = owner.malloc(MIB(900), stream).unwrap();
    let mut draft = owner.draft_kept(&kept.keeper, NAME, &options(MIB(400)), soon()).unwrap();
    let placed = draft.place(MIB(16)).unwrap();
    machine.fill(0, placed, 5);
    let full = draft.place(MIB(300)).unwrap_err();
    assert!(matches!(full, KeptError::Alloc(AllocError::OutOfMemory(_))), "{full}");
    assert!(full.report().is_some());
    machine.holds(0, placed, 5);
    owner.free(used, stream).unwrap();
    draft.place(MIB(300)).unwrap();
    drop(draft);
    machine.close();
}

#[test]
fn a_request_waits_for_memory_as_a_malloc_does() {
    let patient = Config { patience: Duration::from_secs(20), ..Config::default() };
    let (machine, kept) = (Machine::with(1, patient), Kept::new());
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let used = owner.malloc(MIB(900), stream).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| publish(&machine, &kept, MIB(400), 1));
        while owner.memory_stats().unwrap().num_alloc_retries == 0 {
            std::thread::yield_now();
        }
        owner.free(used, stream).unwrap();
        waits.join().unwrap();
    });
    kept.clear();
    machine.close();
}

#[test]
fn whichever_driver_call_fails_nothing_is_left() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    let owner = &machine.allocators[0];
    let mut failures = 0;
    let calls =
        [Call::Reserve, Call::Create, Call::Map, Call::SetAccess, Call::Export, Call::Import];
    for call in calls {
        fail_each_call(|nth| {
            let before = machine.cards[0].calls_of(call);
            machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let outcome = (|| -> Result<(), KeptError> {
                let mut draft = owner.draft_kept(&kept.keeper, NAME, &options(MIB(40)), soon())?;
                let placed = draft.place(MIB(40))?;
                machine.fill(0, placed, 3);
                let published = draft.commit(b"", DIGEST, MapAs::ReadOnly);
                let published = published.map_err(|failed| *failed.error)?;
                let opened = owner.open_kept(&kept.keeper, NAME, writable(), soon())?;
                machine.holds(0, opened.range(), 3);
                opened.close()?;
                Ok(published.close()?)
            })();
            machine.cards[0].set_faults(FaultPlan::none());
            failures += u32::from(outcome.is_err());
            assert!(outcome.is_ok() || nth > 0, "{outcome:?}");
            if !kept.keeper.entries().unwrap().is_empty() {
                kept.clear();
            }
            // The keeper's thread closes what the ended draft had.
            let deadline = soon();
            while machine.cards[0].live().device_bytes > Bytes::ZERO {
                assert!(Instant::now() < deadline, "{call} {nth} left memory");
                std::thread::yield_now();
            }
            let live = machine.cards[0].live();
            assert_eq!((live.handles, live.mappings, live.reservations), (0, 0, 0), "{call} {nth}");
            machine.cards[0].calls_of(call) - before
        });
    }
    assert!(failures > 10, "{failures} failures");
    machine.close();
}

#[test]
fn a_draft_with_a_part_that_nobody_can_have_takes_no_more() {
    let (machine, kept) = (Machine::new(1), Kept::new());
    let owner = &machine.allocators[0];
    let mut draft = owner.draft_kept(&kept.keeper, NAME, &options(MIB(40)), soon()).unwrap();
    let first = draft.place(MIB(16)).unwrap();
    let stuck = FaultPlan::nth_of(Call::Export, 1).and(FaultPlan::nth_of(Call::Unmap, 1));
    machine.cards[0].set_faults(stuck.with_code(800));
    draft.place(MIB(16)).unwrap_err();
    machine.cards[0].set_faults(FaultPlan::none());
    let more = draft.place(MIB(1)).unwrap_err();
    assert!(more.to_string().contains("begin another"), "{more}");
    machine.fill(0, first, 3);
    drop(draft.commit(b"", DIGEST, MapAs::ReadOnly).unwrap());
    let opened = owner.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap();
    machine.holds(0, opened.range(), 3);
    drop(opened);
    kept.clear();
    machine.close();
}

#[test]
fn memory_of_one_card_is_not_opened_on_another() {
    let (machine, kept) = (Machine::new(2), Kept::new());
    publish(&machine, &kept, MIB(2), 3);
    let other = &machine.allocators[1];
    let wrong = other.open_kept(&kept.keeper, NAME, OpenKept::default(), soon()).unwrap_err();
    assert!(matches!(wrong, KeptError::OtherCard { .. }), "{wrong}");
    kept.clear();
    machine.close();
}
