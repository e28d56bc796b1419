//! Keepers that end or are stopped, and clients that are forked.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use vramp_ipc::keep::{KeepError, Keeper, KeeperServer, Lock};

use super::*;
use crate::common::threads;

/// Starts the keeper of the role in a child of the test, and returns the rest otherwise.
fn played(name: &str) -> bool {
    match role() {
        Some((role, _)) if role.starts_with("keeper:") => serve(&role["keeper:".len()..]),
        Some((role, _)) => role == "alone",
        None => {
            Child::start(name, "alone", None).finish();
            false
        }
    }
}

#[test]
fn holds_and_locks_survive_a_keeper_that_is_killed() {
    let name = "keep::ends::holds_and_locks_survive_a_keeper_that_is_killed";
    if !played(name) {
        return;
    }
    let folder = folder();
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let child = keeper_process(name, folder.path());
    let layout = vec![5; 100_000];
    let mut draft = keeper.draft("w", &options(0), soon()).unwrap();
    for n in 0..300_u32 {
        draft.add(4, memory(&n.to_le_bytes()));
    }
    let reader = draft.commit(&layout, [9; 32], Lock::Read).unwrap();
    let writer = publish(&keeper, "cache", &[b"1111"], Lock::Write);
    let older = publish(&keeper, "twice", &[b"old"], Lock::None);
    let newer = publish(&keeper, "twice", &[b"new"], Lock::None);
    let lost = publish(&keeper, "lost", &[b"1"], Lock::None);
    drop(lost);
    let idle_threads = threads();
    child.kill();
    wait_until("it is adrift", || reader.is_adrift() && writer.is_adrift());
    write(&writer, 0, b"2222");
    let error = keeper.entries().unwrap_err();
    assert!(matches!(error, KeepError::NotRunning { .. }), "{error:?}");

    let child = keeper_process(name, folder.path());
    // Nothing is asked of the holds: a thread restores them.
    wait_until("all are restored", || {
        [&reader, &writer, &older, &newer].iter().all(|hold| !hold.is_adrift())
    });
    assert_eq!(threads(), idle_threads);
    assert_eq!((reader.held_lock(), writer.held_lock()), (Lock::Read, Lock::Write));
    let again = keeper.open("w", Lock::Read, soon()).unwrap();
    assert_eq!((again.version_id(), again.epoch()), (reader.version_id(), 1));
    assert_eq!((again.layout(), again.digest(), again.parts().len()), (&layout[..], [9; 32], 300));
    assert_eq!(read(&again, 299), 299_u32.to_le_bytes());
    let busy = keeper.open("cache", Lock::Read, now());
    assert!(matches!(busy, Err(KeepError::Busy { .. })), "{busy:?}");
    assert_eq!(writer.commit(Lock::Read).unwrap(), 2);
    assert_eq!(keeper.open("cache", Lock::Read, soon()).unwrap().epoch(), 2);
    let current = keeper.open("twice", Lock::Read, soon()).unwrap();
    assert_eq!((current.version_id(), current.epoch()), (newer.version_id(), 2));
    assert!(older.is_superseded() && !newer.is_superseded());
    // What no client held went with the keeper.
    let lost = keeper.open("lost", Lock::None, soon());
    assert!(matches!(lost, Err(KeepError::NoSuchEntry { .. })), "{lost:?}");
    // The next epoch is none that was.
    let next = publish(&keeper, "twice", &[b"3"], Lock::None);
    assert_eq!(next.epoch(), 3);
    child.kill();
}

#[test]
fn a_writer_that_ends_with_its_keeper_leaves_the_version_torn() {
    let name = "keep::ends::a_writer_that_ends_with_its_keeper_leaves_the_version_torn";
    if let Some((role, _)) = role()
        && let Some(path) = role.strip_prefix("writer:")
    {
        let keeper = Keeper::new(Path::new(path), TIMEOUT);
        let _hold = keeper.open("cache", Lock::Write, soon()).unwrap();
        say("writing");
        hear();
        std::process::exit(0);
    }
    if !played(name) {
        return;
    }
    let folder = folder();
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let child = keeper_process(name, folder.path());
    let hold = publish(&keeper, "cache", &[b"1111"], Lock::None);
    let mut writer = Child::start(name, &format!("writer:{}", folder.path().display()), None);
    writer.expect("writing");
    let pid = writer.pid();
    child.kill();
    writer.kill();
    assert!(!hold.is_torn());
    let child = keeper_process(name, folder.path());
    // A reader waits for the writer to restore its lock, and no longer.
    let torn = hold.lock(Lock::Read, soon());
    assert!(matches!(torn, Err(KeepError::Torn { epoch: 1, .. })), "{torn:?} of {pid}");
    assert!(hold.is_torn());
    child.kill();
}

#[test]
fn a_commit_counts_once_although_the_keeper_ends() {
    let name = "keep::ends::a_commit_counts_once_although_the_keeper_ends";
    if !played(name) {
        return;
    }
    let folder = folder();
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let child = keeper_process(name, folder.path());
    let hold = publish(&keeper, "w", &[b"1"], Lock::Write);
    let draft = keeper.draft("d", &options(0), soon()).unwrap();
    child.kill();
    let child = std::thread::scope(|scope| {
        let commits = scope.spawn(|| hold.commit(Lock::Write).unwrap());
        let publishes = scope.spawn(|| draft.commit(b"", [0; 32], Lock::Read).unwrap());
        wait_until("it is adrift", || hold.is_adrift());
        let child = keeper_process(name, folder.path());
        assert_eq!(commits.join().unwrap(), 2);
        assert_eq!(publishes.join().unwrap().epoch(), 1);
        child
    });
    assert_eq!((hold.commit(Lock::None).unwrap(), hold.epoch()), (3, 3));
    child.kill();
}

#[test]
fn calls_to_a_stopped_keeper_end_in_time() {
    let name = "keep::ends::calls_to_a_stopped_keeper_end_in_time";
    if !played(name) {
        return;
    }
    let folder = folder();
    let child = keeper_process(name, folder.path());
    let patient = Keeper::new(folder.path(), TIMEOUT);
    let keeper = Keeper::new(folder.path(), Duration::from_millis(40));
    let hold = publish(&patient, "w", &[b"1"], Lock::None);
    let other = publish(&patient, "v", &[b"1"], Lock::Write);
    child.stop();
    let start = Instant::now();
    let in_time = |error: KeepError| {
        assert!(matches!(error, KeepError::TimedOut { .. }), "{error:?}");
    };
    in_time(keeper.open("w", Lock::Read, soon()).unwrap_err());
    in_time(keeper.draft("x", &options(0), soon()).unwrap_err());
    in_time(keeper.entries().unwrap_err());
    let deadline = || Instant::now() + Duration::from_millis(20);
    in_time(hold.lock(Lock::Read, deadline()).unwrap_err());
    in_time(hold.wait_newer(1, deadline()).unwrap_err());
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    child.signal(Signal::CONT);
    // The lock that came too late is not kept.
    let writer = patient.open("w", Lock::Write, soon()).unwrap();
    drop(writer);
    assert!(!hold.is_adrift());
    hold.lock(Lock::None, soon()).unwrap();
    other.release_unchanged().unwrap();
    child.kill();
}

#[test]
fn a_commit_that_timed_out_is_repeated_and_counts_once() {
    let name = "keep::ends::a_commit_that_timed_out_is_repeated_and_counts_once";
    if !played(name) {
        return;
    }
    let folder = folder();
    let child = keeper_process(name, folder.path());
    let keeper = Keeper::new(folder.path(), Duration::from_millis(40));
    let patient = Keeper::new(folder.path(), TIMEOUT);
    drop(publish(&patient, "w", &[b"1"], Lock::None));
    let mut hold = None;
    wait_until("it is open", || {
        hold = keeper.open("w", Lock::Write, soon()).ok();
        hold.is_some()
    });
    let hold = hold.unwrap();
    child.stop();
    for then in [Lock::Read, Lock::Write] {
        let error = hold.commit(then).unwrap_err();
        assert!(matches!(error, KeepError::TimedOut { .. }), "{error:?}");
    }
    child.signal(Signal::CONT);
    wait_until("it is committed", || match hold.commit(Lock::Read) {
        Ok(epoch) => epoch == 2,
        Err(KeepError::TimedOut { .. }) => false,
        Err(error) => panic!("{error:?}"),
    });
    assert_eq!((hold.epoch(), hold.is_torn()), (2, false));
    assert_ne!(hold.held_lock(), Lock::Write);
    drop(hold);
    // No lock is left behind.
    drop(patient.open("w", Lock::Write, soon()).unwrap());
    child.kill();
}

#[test]
fn a_writer_whose_connection_ends_has_the_lock_until_its_process_is_gone() {
    if let Some((role, _)) = role() {
        let keeper = Keeper::new(Path::new(&role), TIMEOUT);
        let _hold = keeper.open("w", Lock::Write, soon()).unwrap();
        say("writing");
        hear();
        std::process::exit(0);
    }
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let hold = publish(&keeper, "w", &[b"1"], Lock::None);
    let name = "keep::ends::a_writer_whose_connection_ends_has_the_lock_until_its_process_is_gone";
    let mut child = Child::start(name, folder.path().to_str().unwrap(), None);
    child.expect("writing");
    // As when a process is killed, of which the driver has not ended the work yet.
    child.stop();
    let pid = child.pid();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let entry = entry.unwrap();
        if std::fs::read_link(entry.path()).unwrap().to_str().unwrap().starts_with("socket:") {
            let number = entry.file_name().to_str().unwrap().parse().unwrap();
            let socket = vramp_ipc::fetch_descriptor(pid, number).unwrap();
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
        }
    }
    let soon_over = Instant::now() + Duration::from_millis(20);
    let busy = hold.lock(Lock::Read, soon_over);
    assert!(matches!(&busy, Err(KeepError::Busy { holders, .. }) if *holders == [pid]), "{busy:?}");
    child.kill();
    let torn = hold.lock(Lock::Read, soon());
    assert!(matches!(torn, Err(KeepError::Torn { pid: by, .. }) if by == pid), "{torn:?}");
    wait_until("it is gone", || server.connections() == 1);
}

#[test]
fn a_stopped_client_is_found_by_those_that_wait_for_it() {
    if let Some((role, _)) = role() {
        let keeper = Keeper::new(Path::new(&role), TIMEOUT);
        let _hold = keeper.open("w", Lock::Write, soon()).unwrap();
        let _draft = keeper.draft("d", &options(1), soon()).unwrap();
        say("has both");
        hear();
        std::process::exit(0);
    }
    let folder = folder();
    let (server, keeper) = start(folder.path());
    drop(publish(&keeper, "w", &[b"1"], Lock::None));
    let name = "keep::ends::a_stopped_client_is_found_by_those_that_wait_for_it";
    let mut child = Child::start(name, folder.path().to_str().unwrap(), None);
    child.expect("has both");
    child.stop();
    let soon_over = Instant::now() + Duration::from_millis(2);
    let of_lock = keeper.open("w", Lock::Read, soon_over).map(drop).unwrap_err();
    let of_draft = keeper.draft("d", &options(1), soon_over).map(drop).unwrap_err();
    for error in [of_lock, of_draft] {
        let pid = child.pid();
        assert!(
            matches!(&error, KeepError::Busy { holders, .. } if *holders == [pid]),
            "{error:?}"
        );
        assert!(error.to_string().contains(&format!("process {pid}")), "{error}");
    }
    // Others go on.
    drop(publish(&keeper, "other", &[b"1"], Lock::Write));
    child.kill();
    wait_until("its lock and its draft ended", || server.connections() == 0);
    // It changed nothing that was committed, but it could have.
    assert!(matches!(keeper.open("w", Lock::Read, soon()), Err(KeepError::Torn { .. })));
    drop(keeper.draft("d", &options(1), soon()).unwrap());
}

#[test]
fn a_keeper_that_ends_in_order_is_followed_without_a_wait() {
    let folder = folder();
    let (server, keeper) = start(folder.path());
    drop(publish(&keeper, "w", &[b"1"], Lock::None));
    wait_until("no hold is left", || server.connections() == 0);
    drop(server);
    assert!(!folder.path().join("keep.sock").exists());
    let _server = KeeperServer::start(&config(folder.path())).unwrap();
    let gone = keeper.open("w", Lock::None, soon());
    assert!(matches!(gone, Err(KeepError::NoSuchEntry { .. })), "{gone:?}");
}
