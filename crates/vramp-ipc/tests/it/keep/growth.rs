//! What entries, holds and waits cost in descriptors, and what is left of those that ended.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vramp_ipc::keep::{KeepError, Keeper, Lock};

use super::*;

/// Descriptors of a hold of one part: part, page and socket here, socket and process at the keeper.
const OF_HOLD: usize = 3 + 2;
/// Those of the thread that restores holds.
const OF_THREAD: usize = 2;

#[test]
fn entries_holds_and_waits_have_their_descriptors_and_leave_none() {
    if !is_alone("keep::growth::entries_holds_and_waits_have_their_descriptors_and_leave_none") {
        return;
    }
    let folder = folder();
    let (server, keeper) = start(folder.path());
    let idle = descriptors();
    for number in 0..1_000 {
        drop(publish(&keeper, &format!("entry/{number:04}"), &[b"1"], Lock::None));
    }
    // A part and a page.
    wait_until("no hold is left", || descriptors() == idle + 2 * 1_000);
    let entries = keeper.entries().unwrap();
    assert_eq!((entries.len(), entries[999].name.as_str()), (1_000, "entry/0999"));
    let open = || keeper.open("entry/0500", Lock::Read, soon()).unwrap();
    let holds: Vec<Hold> = (0..300).map(|_| open()).collect();
    assert_eq!(descriptors(), idle + 2 * 1_000 + 300 * OF_HOLD + OF_THREAD);
    let found = keeper.entries().unwrap().swap_remove(500).current.unwrap();
    // The status names the first ones only.
    assert_eq!((found.holders.len(), found.holder_count), (256, 300));
    std::thread::scope(|scope| {
        let (reader, rest) = holds.split_first().unwrap();
        for hold in rest {
            hold.lock(Lock::None, soon()).unwrap();
        }
        let waits = |hold: &Hold| {
            hold.lock(Lock::Write, soon()).unwrap();
            hold.release_unchanged().unwrap();
        };
        for hold in &rest[..50] {
            scope.spawn(move || waits(hold));
        }
        wait_until("all wait", || keeper.entries().unwrap()[500].waiting == 50);
        // A wait has no descriptor of its own.
        wait_until("calls ended", || descriptors() == idle + 2 * 1_000 + 300 * OF_HOLD + OF_THREAD);
        // Each is granted when the one before it is released.
        reader.lock(Lock::None, soon()).unwrap();
    });
    drop(holds);
    wait_until("no hold is left", || descriptors() == idle + 2 * 1_000);
    for entry in entries {
        keeper.remove(&entry.name).unwrap();
    }
    wait_until("all is closed", || descriptors() == idle && server.connections() == 0);
}

#[test]
fn a_draft_that_needs_more_descriptors_than_the_keeper_may_have_fails_alone() {
    let name =
        "keep::growth::a_draft_that_needs_more_descriptors_than_the_keeper_may_have_fails_alone";
    if let Some((role, _)) = role() {
        let limit = Rlimit { current: Some(128), maximum: Some(128) };
        setrlimit(Resource::Nofile, limit).unwrap();
        serve(&role["keeper:".len()..]);
    }
    let folder = folder();
    let child = keeper_process(name, folder.path());
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let held = publish(&keeper, "held", &[b"1"], Lock::Read);
    for parts in [100, 300] {
        let mut draft = keeper.draft("big", &options(0), soon()).unwrap();
        for _ in 0..parts {
            draft.add(1, memory(b"1"));
        }
        let full = draft.commit(b"", [0; 32], Lock::None);
        // With 100, the keeper could take them, and then accept no client any more.
        match (parts, full) {
            (100, Ok(hold)) => drop(hold),
            (300, Err(KeepError::TooManyFiles { is_keeper: true, limit: 128 })) => {}
            other => panic!("{other:?}"),
        }
        let _ = keeper.remove("big");
    }
    assert!(!held.is_adrift());
    drop(publish(&keeper, "small", &[b"1"], Lock::None));
    child.kill();
}

#[test]
fn a_keeper_without_a_descriptor_for_a_page_says_so() {
    let name = "keep::growth::a_keeper_without_a_descriptor_for_a_page_says_so";
    if let Some((role, _)) = role() {
        let limit = Rlimit { current: Some(40), maximum: Some(40) };
        setrlimit(Resource::Nofile, limit).unwrap();
        serve(&role["keeper:".len()..]);
    }
    let folder = folder();
    let child = keeper_process(name, folder.path());
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    let mut holds = Vec::new();
    let full = loop {
        // A connection has two descriptors, a version one for each part, and one.
        let name = format!("n/{}", holds.len());
        let mut draft = keeper.draft(&name, &options(1), soon()).unwrap();
        draft.add(1, memory(b"1"));
        match draft.commit(b"", [0; 32], Lock::Read) {
            Ok(hold) => holds.push(hold),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(full, KeepError::TooManyFiles { is_keeper: true, limit: 40 }),
        "{full:?} after {}",
        holds.len()
    );
    assert_eq!(keeper.entries().unwrap().len(), holds.len());
    child.kill();
}

#[test]
fn a_client_without_free_descriptors_fails_alone() {
    let name = "keep::growth::a_client_without_free_descriptors_fails_alone";
    if let Some((role, _)) = role() {
        let keeper = Keeper::new(Path::new(&role), TIMEOUT);
        let open = descriptors() as u64;
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = |limit| {
            setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum }).unwrap();
        };
        limit(open + 20);
        let short = keeper.open("big", Lock::Read, soon());
        assert!(
            matches!(short, Err(KeepError::TooManyFiles { is_keeper: false, .. })),
            "{short:?}"
        );
        limit(1_000);
        wait_until("all is closed", || descriptors() as u64 == open);
        assert_eq!(keeper.open("big", Lock::Read, soon()).unwrap().parts().len(), 300);
        return;
    }
    let folder = folder();
    let (_server, keeper) = start(folder.path());
    let parts = vec![&b"1"[..]; 300];
    let held = publish(&keeper, "big", &parts, Lock::Read);
    Child::start(name, folder.path().to_str().unwrap(), None).finish();
    assert_eq!(held.held_lock(), Lock::Read);
}
