//! Limits, eviction, waits and idle exits.

use std::time::{Duration, Instant};

use vramp_ipc::keep::{
    DraftOptions, KeepError, Keeper, KeeperConfig, KeeperServer, Lock, OpenOrDraft,
};

use super::*;

fn names(keeper: &Keeper) -> Vec<String> {
    keeper.entries().unwrap().into_iter().map(|entry| entry.name).collect()
}

fn publish_with(
    keeper: &Keeper,
    name: &str,
    options: &DraftOptions<'_>,
) -> Result<Hold, KeepError> {
    let mut draft = keeper.draft(name, options, soon())?;
    draft.add(options.bytes, memory(b""));
    draft.commit(b"", [0; 32], Lock::None)
}

fn is_idle(keeper: &Keeper, name: &str) -> bool {
    let entries = keeper.entries().unwrap();
    let entry = entries.iter().find(|entry| entry.name == name).unwrap();
    entry.current.as_ref().unwrap().idle.is_some()
}

#[test]
fn idle_entries_of_a_low_priority_go_first_and_what_is_held_stays() {
    let folder = folder();
    let server = KeeperServer::start(&KeeperConfig { limit: Some(100), ..config(folder.path()) });
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let with = |priority| DraftOptions { priority, ..options(25) };
    let held = publish_with(&keeper, "held", &with(-9)).unwrap();
    for (name, priority) in [("old", 0), ("new", 0), ("low", -1)] {
        drop(publish_with(&keeper, name, &with(priority)).unwrap());
        wait_until("it is idle", || is_idle(&keeper, name));
    }
    let fifth = publish_with(&keeper, "fifth", &with(0)).unwrap();
    assert_eq!(names(&keeper), ["fifth", "held", "new", "old"]);
    let sixth = publish_with(&keeper, "sixth", &with(0)).unwrap();
    assert_eq!(names(&keeper), ["fifth", "held", "new", "sixth"]);
    let full = publish_with(&keeper, "big", &options(26));
    let Err(KeepError::Full { limit: 100, held: 100, evictable: 25, asked: 26 }) = full else {
        panic!("{full:?}")
    };
    // A failed draft evicted nothing.
    assert_eq!(names(&keeper), ["fifth", "held", "new", "sixth"]);
    // Another device has a limit of its own.
    let other = DraftOptions { device: "other", ..options(100) };
    drop(publish_with(&keeper, "other", &other).unwrap());
    assert_eq!(keeper.evict("sim:h200", 1).unwrap(), 25);
    assert_eq!(keeper.evict("sim:h200", 1).unwrap(), 0);
    assert_eq!(names(&keeper), ["fifth", "held", "other", "sixth"]);
    drop((held, fifth, sixth, server));
}

#[test]
fn what_a_draft_replaces_is_not_evicted_for_it() {
    let folder = folder();
    let server = KeeperServer::start(&KeeperConfig { limit: Some(100), ..config(folder.path()) });
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    drop(publish_with(&keeper, "w", &options(60)).unwrap());
    wait_until("it is idle", || is_idle(&keeper, "w"));
    let full = publish_with(&keeper, "w", &options(60));
    assert!(matches!(full, Err(KeepError::Full { evictable: 0, .. })), "{full:?}");
    let draft = keeper.draft("w", &options(40), soon()).unwrap();
    assert_eq!(keeper.evict("sim:h200", 1000).unwrap(), 0);
    drop(draft);
    wait_until("the draft ended", || only(&keeper).draft_pid.is_none());
    assert_eq!(keeper.evict("sim:h200", 1000).unwrap(), 60);
    drop(server);
}

#[test]
fn a_draft_with_more_bytes_than_it_asked_for_needs_room_for_them() {
    let folder = folder();
    let server = KeeperServer::start(&KeeperConfig { limit: Some(100), ..config(folder.path()) });
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let commit = |bytes| {
        let mut draft = keeper.draft("w", &options(10), soon()).unwrap();
        draft.add(bytes, memory(b""));
        draft.commit(b"", [0; 32], Lock::None)
    };
    let full = commit(101);
    assert!(matches!(full, Err(KeepError::Full { asked: 101, .. })), "{full:?}");
    wait_until("the draft ended", || keeper.entries().unwrap().is_empty());
    drop(commit(100).unwrap());
    drop(server);
}

#[test]
fn of_many_that_start_at_once_one_builds_and_the_others_open_although_the_device_is_full() {
    let folder = folder();
    let server = KeeperServer::start(&KeeperConfig { limit: Some(100), ..config(folder.path()) });
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let start = || keeper.open_or_draft("w", Lock::Read, &options(60), soon()).unwrap();
    let OpenOrDraft::Draft(mut draft) = start() else { panic!("nothing was built") };
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
        wait_until("all wait", || only(&keeper).waiting == 4);
        draft.add(60, memory(b""));
        let first = draft.commit(b"", [0; 32], Lock::Read).unwrap();
        for other in others {
            let OpenOrDraft::Hold(hold) = other.join().unwrap() else { panic!("it was built") };
            assert_eq!((hold.version_id(), hold.held_lock()), (first.version_id(), Lock::Read));
        }
    });
    drop(server);
}

#[test]
fn a_version_is_removed_only_if_it_is_still_the_current_one() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let old = publish(&keeper, "w", &[b"1"], Lock::None);
    let new = publish(&keeper, "w", &[b"2"], Lock::None);
    assert!(!old.remove().unwrap() && !new.is_superseded());
    assert!(new.remove().unwrap() && new.is_superseded());
    assert!(!new.remove().unwrap());
    let gone = keeper.open("w", Lock::None, soon());
    assert!(matches!(gone, Err(KeepError::NoSuchEntry { .. })), "{gone:?}");
    assert_eq!(read(&new, 0), b"2");
}

#[test]
fn a_client_that_is_started_before_the_keeper_waits_for_it() {
    let folder = folder();
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let error = keeper.wait_running(now()).unwrap_err();
    assert!(matches!(error, KeepError::NotRunning { .. }), "{error:?}");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| keeper.wait_running(soon()).unwrap());
        let server = KeeperServer::start(&config(folder.path())).unwrap();
        assert_eq!(waits.join().unwrap(), std::process::id());
        drop(server);
    });
}

#[test]
fn an_entry_goes_when_it_was_kept_for_its_time() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let options = DraftOptions { kept_for: Some(Duration::from_millis(1)), ..options(4) };
    let hold = publish_with(&keeper, "short", &options).unwrap();
    assert_eq!(only(&keeper).current.unwrap().kept_for, Some(Duration::from_millis(1)));
    drop(hold);
    wait_until("it is gone", || keeper.entries().unwrap().is_empty());
}

#[test]
fn an_idle_keeper_ends() {
    let folder = folder();
    let idle_exit = Some(Duration::from_millis(1));
    let server = KeeperServer::start(&KeeperConfig { idle_exit, ..config(folder.path()) }).unwrap();
    server.wait();
    // An entry keeps it.
    let server = KeeperServer::start(&KeeperConfig { idle_exit, ..config(folder.path()) });
    let server = server.unwrap();
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    // It may have ended before it was asked.
    if let Ok(draft) = keeper.draft("w", &options(0), soon()) {
        drop(draft.commit(b"", [0; 32], Lock::None).unwrap());
        assert_eq!(only(&keeper).name, "w");
        keeper.remove("w").unwrap();
    }
    server.wait();
    assert_eq!(keeper.is_running(), None);
}

#[test]
fn a_reader_yields_to_a_writer_that_waits_and_makes_no_call_otherwise() {
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let reader = publish(&keeper, "cache", &[b"1"], Lock::Read);
    let writer = keeper.open("cache", Lock::None, soon()).unwrap();
    assert_eq!(reader.yield_to_writer(now()).unwrap(), 1);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            writer.lock(Lock::Write, soon()).unwrap();
            write(&writer, 0, b"2");
            writer.commit(Lock::None).unwrap()
        });
        wait_until("a writer waits", || reader.writer_waits());
        assert_eq!(reader.yield_to_writer(soon()).unwrap(), 2);
        assert_eq!((waits.join().unwrap(), read(&reader, 0)), (2, b"2".to_vec()));
    });
    assert!(!reader.writer_waits());
    // Without a writer it is no call: there is no keeper to ask.
    drop(server);
    assert_eq!(reader.yield_to_writer(now()).unwrap(), 2);
}

#[test]
fn a_wait_for_a_newer_epoch_ends_with_it_or_at_the_deadline() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let hold = publish(&keeper, "w", &[b"1"], Lock::None);
    assert_eq!(hold.wait_newer(0, now()).unwrap(), 1);
    let not = hold.wait_newer(1, now());
    assert!(matches!(not, Err(KeepError::NotNewer { epoch: 1, .. })), "{not:?}");
    std::thread::scope(|scope| {
        let in_place = scope.spawn(|| hold.wait_newer(1, soon()).unwrap());
        let writer = keeper.open("w", Lock::Write, soon()).unwrap();
        writer.commit(Lock::None).unwrap();
        assert_eq!(in_place.join().unwrap(), 2);
        let of_version = scope.spawn(|| hold.wait_newer(2, soon()).unwrap());
        drop(publish(&keeper, "w", &[b"2"], Lock::None));
        assert_eq!(of_version.join().unwrap(), 3);
    });
    assert!(hold.is_superseded());
    assert_eq!((hold.epoch(), hold.wait_newer(2, now()).unwrap()), (2, 3));
}

#[test]
fn a_version_that_is_replaced_while_an_open_waits_is_left_for_the_newer_one() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let writer = publish(&keeper, "w", &[b"1"], Lock::Write);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| keeper.open("w", Lock::Read, soon()).unwrap());
        wait_until("it waits", || only(&keeper).waiting == 1);
        let newer = publish(&keeper, "w", &[b"2"], Lock::None);
        assert_eq!(waits.join().unwrap().version_id(), newer.version_id());
    });
    // The writer of the older version commits for those who still have it.
    assert_eq!((writer.commit(Lock::None).unwrap(), writer.is_superseded()), (3, true));
    assert_eq!(keeper.open("w", Lock::None, soon()).unwrap().epoch(), 2);
}

#[test]
fn misuse_is_an_error_that_says_what_to_do() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let hold = publish(&keeper, "w", &[b"1"], Lock::Write);
    let error = hold.lock(Lock::Read, soon()).unwrap_err();
    assert!(matches!(error, KeepError::Uncommitted { .. }), "{error:?}");
    hold.release_unchanged().unwrap();
    let error = hold.commit(Lock::None).unwrap_err();
    assert!(matches!(error, KeepError::NotLocked { .. }), "{error:?}");
    for name in ["", "a b", "\u{e4}", &"a".repeat(201)] {
        let error = keeper.open(name, Lock::None, soon()).unwrap_err();
        assert!(matches!(error, KeepError::Name { .. }), "{error:?}");
    }
    let draft = keeper.draft("long", &options(0), soon()).unwrap();
    let error = draft.commit(&vec![0; (16 << 20) + 1], [0; 32], Lock::None).unwrap_err();
    assert!(matches!(error, KeepError::TooLong { .. }), "{error:?}");
    let path = folder.path().join("d".repeat(200));
    let error = Keeper::new(&path, TIMEOUT).entries().unwrap_err();
    assert!(matches!(error, KeepError::Path { .. }), "{error:?}");
    let error = Keeper::new(&folder.path().join("none"), TIMEOUT).entries().unwrap_err();
    assert!(matches!(error, KeepError::NotRunning { .. }), "{error:?}");
    assert!(error.to_string().ends_with("start `vramp keep`"), "{error}");
}

#[test]
fn a_call_whose_deadline_is_over_waits_for_the_reply_only() {
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let past = Instant::now().checked_sub(Duration::from_secs(9)).unwrap();
    drop(publish(&keeper, "w", &[b"1"], Lock::None));
    assert_eq!(keeper.open("w", Lock::Write, past).unwrap().held_lock(), Lock::Write);
}
