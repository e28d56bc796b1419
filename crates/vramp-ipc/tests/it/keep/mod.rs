//! The keeper: entries that outlive their makers, locks, and clients that end.

mod ends;
mod growth;
mod hostile;
mod processes;
mod rules;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vramp_ipc::keep::{
    DraftOptions, EntryStatus, Hold, KeepError, KeepServeError, Keeper, KeeperConfig, KeeperServer,
    Lock,
};

use crate::common::{Child, descriptors, hear, is_alone, role, say, soon, wait_until};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A directory that only this user may use.
pub fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    folder
}

pub fn config(directory: &Path) -> KeeperConfig<'_> {
    KeeperConfig { directory, limit: None, idle_exit: None }
}

pub fn start(directory: &Path) -> (KeeperServer, Keeper) {
    let server = KeeperServer::start(&config(directory)).unwrap();
    (server, Keeper::new(directory, TIMEOUT))
}

pub fn options(bytes: u64) -> DraftOptions<'static> {
    DraftOptions { device: "sim:h200", bytes, ..DraftOptions::default() }
}

/// Memory with these bytes.
pub fn memory(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(file.try_clone().unwrap()).write_all_at(bytes, 0).unwrap();
    file
}

pub fn read(hold: &Hold, part: usize) -> Vec<u8> {
    let part = &hold.parts()[part];
    let mut bytes = vec![0; part.len as usize];
    File::from(part.descriptor.try_clone().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

pub fn write(hold: &Hold, part: usize, bytes: &[u8]) {
    let file = File::from(hold.parts()[part].descriptor.try_clone().unwrap());
    file.write_all_at(bytes, 0).unwrap();
}

pub fn publish(keeper: &Keeper, name: &str, parts: &[&[u8]], lock: Lock) -> Hold {
    let bytes = parts.iter().map(|part| part.len() as u64).sum();
    let mut draft = keeper.draft(name, &options(bytes), soon()).unwrap();
    for part in parts {
        draft.add(part.len() as u64, memory(part));
    }
    draft.commit(b"layout", [7; 32], lock).unwrap()
}

/// Runs a keeper in a child, until it is killed or its parent ends.
pub fn serve(directory: &str) -> ! {
    let directory = Path::new(directory);
    let server = KeeperServer::start(&config(directory)).unwrap();
    say("serves");
    hear();
    drop(server);
    std::process::exit(0);
}

/// Starts a child that runs `serve` in the role `keeper:DIRECTORY`.
pub fn keeper_process(name: &str, directory: &Path) -> Child {
    let mut child = Child::start(name, &format!("keeper:{}", directory.display()), None);
    child.expect("serves");
    child
}

pub fn only(keeper: &Keeper) -> EntryStatus {
    let mut entries = keeper.entries().unwrap();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.remove(0)
}

/// A deadline that leaves no time to wait.
pub fn now() -> Instant {
    Instant::now()
}

#[test]
fn a_version_outlives_the_process_that_made_it() {
    if let Some((role, _)) = role() {
        let keeper = Keeper::new(Path::new(&role), TIMEOUT);
        drop(publish(&keeper, "a/weights", &[b"one", b"second"], Lock::None));
        say("made");
        hear();
    }
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let name = "keep::a_version_outlives_the_process_that_made_it";
    let mut child = Child::start(name, folder.path().to_str().unwrap(), None);
    child.expect("made");
    child.kill();
    let hold = keeper.open("a/weights", Lock::Read, soon()).unwrap();
    assert_eq!((read(&hold, 0), read(&hold, 1)), (b"one".to_vec(), b"second".to_vec()));
    assert_eq!((hold.layout(), hold.digest(), hold.epoch()), (&b"layout"[..], [7; 32], 1));
    assert_eq!(
        (hold.device(), hold.name(), hold.held_lock()),
        ("sim:h200", "a/weights", Lock::Read)
    );
    let current = only(&keeper).current.unwrap();
    assert_eq!((current.bytes, current.holder_count, current.idle), (9, 1, None));
    assert_eq!(current.holders[0].pid, std::process::id());
    drop(hold);
    wait_until("it is idle", || only(&keeper).current.unwrap().idle.is_some());
    keeper.remove("a/weights").unwrap();
    let missing = keeper.open("a/weights", Lock::None, soon());
    assert!(matches!(missing, Err(KeepError::NoSuchEntry { .. })), "{missing:?}");
}

#[test]
fn many_parts_and_a_long_layout_arrive_in_order() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let layout: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut draft = keeper.draft("big", &options(0), soon()).unwrap();
    let files: Vec<OwnedFd> = (0..600_u32).map(|n| memory(&n.to_le_bytes())).collect();
    for file in files {
        draft.add(4, file);
    }
    let made = draft.commit(&layout, [1; 32], Lock::None).unwrap();
    let hold = keeper.open("big", Lock::Read, soon()).unwrap();
    assert_eq!((hold.layout(), hold.version_id()), (&layout[..], made.version_id()));
    assert_eq!(hold.parts().len(), 600);
    for n in 0..600 {
        assert_eq!(read(&hold, n), (n as u32).to_le_bytes());
    }
    assert_eq!(only(&keeper).current.unwrap().bytes, 2400);
}

#[test]
fn writers_exclude_readers_and_a_commit_has_the_next_epoch() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let writer = publish(&keeper, "cache", &[b"1111"], Lock::Write);
    let busy = keeper.open("cache", Lock::Read, now());
    let Err(KeepError::Busy { holders, .. }) = busy else { panic!("{busy:?}") };
    assert_eq!(holders, [std::process::id()]);
    write(&writer, 0, b"2222");
    assert_eq!(writer.commit(Lock::Read).unwrap(), 2);
    let reader = keeper.open("cache", Lock::Read, soon()).unwrap();
    assert_eq!((read(&reader, 0), reader.epoch()), (b"2222".to_vec(), 2));
    let busy = reader.lock(Lock::Write, now());
    assert!(matches!(busy, Err(KeepError::Busy { .. })), "{busy:?}");
    assert_eq!(reader.held_lock(), Lock::None);
    writer.lock(Lock::None, soon()).unwrap();
    assert_eq!(reader.lock(Lock::Write, soon()).unwrap(), 2);
    reader.release_unchanged().unwrap();
    assert_eq!((reader.epoch(), reader.is_torn(), writer.is_torn()), (2, false, false));
}

#[test]
fn a_killed_writer_leaves_the_version_torn_until_another_one_commits() {
    if let Some((role, _)) = role() {
        let keeper = Keeper::new(Path::new(&role), TIMEOUT);
        let hold = keeper.open("cache", Lock::Write, soon()).unwrap();
        write(&hold, 0, b"half");
        say("writing");
        hear();
    }
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let hold = publish(&keeper, "cache", &[b"11111111"], Lock::None);
    let name = "keep::a_killed_writer_leaves_the_version_torn_until_another_one_commits";
    let mut child = Child::start(name, folder.path().to_str().unwrap(), None);
    child.expect("writing");
    let pid = child.pid();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| hold.lock(Lock::Read, soon()));
        wait_until("it waits", || only(&keeper).waiting == 1);
        child.kill();
        let torn = waits.join().unwrap();
        assert!(
            matches!(torn, Err(KeepError::Torn { epoch: 1, pid: by, .. }) if by == pid),
            "{torn:?}"
        );
    });
    assert!(hold.is_torn() && only(&keeper).current.unwrap().is_torn);
    // A writer that changes nothing repairs nothing.
    hold.lock(Lock::Write, soon()).unwrap();
    hold.release_unchanged().unwrap();
    assert!(hold.is_torn());
    hold.lock(Lock::Write, soon()).unwrap();
    write(&hold, 0, b"22222222");
    assert_eq!(hold.commit(Lock::Read).unwrap(), 2);
    assert!(!hold.is_torn());
}

#[test]
fn one_client_builds_and_the_next_one_finds_what_it_built() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let draft = keeper.draft("w", &options(4), soon()).unwrap();
    assert_eq!((draft.current(), only(&keeper).draft_pid), (None, Some(std::process::id())));
    let busy = keeper.draft("w", &options(4), now());
    assert!(matches!(busy, Err(KeepError::Busy { .. })), "{busy:?}");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| keeper.draft("w", &options(4), soon()).unwrap());
        wait_until("it waits", || only(&keeper).waiting == 1);
        let first = draft.commit(b"", [3; 32], Lock::Read).unwrap();
        let next = waits.join().unwrap();
        assert_eq!(next.current(), Some((1, [3; 32])));
        let second = next.commit(b"", [4; 32], Lock::Read).unwrap();
        // The first client keeps what it has.
        assert!(first.is_superseded() && !second.is_superseded());
        assert_eq!((first.epoch(), second.epoch(), only(&keeper).superseded), (1, 2, 1));
    });
    wait_until("older versions go", || only(&keeper).superseded == 0);
}

#[test]
fn one_keeper_has_a_directory_and_a_stopped_one_leaves_it() {
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let second = KeeperServer::start(&config(folder.path()));
    let own = std::process::id();
    assert!(matches!(second, Err(KeepServeError::AlreadyRunning { pid }) if pid == own));
    assert_eq!(keeper.is_running(), Some(own));
    keeper.stop().unwrap();
    server.wait();
    assert_eq!(keeper.is_running(), None);
    let gone = keeper.entries();
    assert!(matches!(gone, Err(KeepError::NotRunning { .. })), "{gone:?}");
    drop(start(folder.path()));
}

#[test]
fn what_clients_had_is_closed() {
    if !is_alone("keep::what_clients_had_is_closed") {
        return;
    }
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let idle = descriptors();
    for round in 0..20 {
        let hold = publish(&keeper, "w", &[b"1", b"2", b"3"], Lock::Write);
        let other = keeper.open("w", Lock::None, soon()).unwrap();
        // A draft that is given up.
        drop(keeper.draft(&format!("d{round}"), &options(1), soon()).unwrap());
        drop((hold, other));
        keeper.remove("w").unwrap();
        wait_until("all is closed", || descriptors() == idle && server.connections() == 0);
    }
    assert_eq!(keeper.entries().unwrap(), []);
}
