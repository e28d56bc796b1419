//! Turns of several threads and processes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::Signal;
use vramp_ipc::SharedDirectoryError;
use vramp_ipc::turns::{AcquireError, Answer, Need, Turns, TurnsConfig, TurnsError, TurnsStatus};

use crate::common::*;
use crate::common::{Child, hear, is_alone, role, say};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

fn open(directory: &Path, program: &str) -> Turns {
    let directory = &directory.join("vramp");
    Turns::open(&TurnsConfig { directory, card: "GPU-1", program }).unwrap()
}

fn files(turns: &Turns) -> usize {
    std::fs::read_dir(turns.directory()).unwrap().count()
}

/// Starts a process that runs the calling test with this directory as its role.
fn start(test: &str, role: &str, directory: &Path) -> Child {
    Child::start(test, &format!("{role}:{}", directory.display()), None)
}

/// In a child: returns what it does and where.
fn child_role() -> Option<(String, Turns)> {
    let (value, _) = role()?;
    let (role, directory) = value.split_once(':').unwrap();
    Some((role.to_owned(), open(Path::new(directory), role)))
}

#[test]
fn turns_pass_in_the_order_of_the_requests() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "all");
    let first = turns.acquire(Need::Card, Duration::ZERO).unwrap();
    let mut line = Vec::new();
    for bytes in 0..20 {
        line.push(turns.join(Need::Bytes(bytes)).unwrap());
    }
    let status = turns.status().unwrap();
    let holder = status.holder.unwrap();
    assert_eq!(holder.participant.pid, std::process::id());
    assert!(holder.participant.is_pid_valid && holder.since >= holder.participant.requested);
    let needs: Vec<Need> = status.waiting.iter().map(|waiting| waiting.need).collect();
    assert_eq!(needs, (0..20).map(Need::Bytes).collect::<Vec<_>>());
    // One leaves the line in the middle.
    drop(line.remove(7));
    let mut held = first;
    for mut waiting in line {
        assert!(!waiting.wait(Duration::ZERO).unwrap());
        waiting = *waiting.into_turn().unwrap_err();
        held.release().unwrap();
        assert!(waiting.wait(LONG).unwrap());
        held = waiting.into_turn().unwrap();
    }
    held.release().unwrap();
    assert_eq!(files(&turns), 0);
}

#[test]
fn a_deadline_that_passes_names_the_holder_and_leaves_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let (holder, other) = (open(folder.path(), "engine"), open(folder.path(), "trainer"));
    let turn = holder.acquire(Need::Card, LONG).unwrap();
    for timeout in [Duration::ZERO, SHORT] {
        let error = other.acquire(Need::Card, timeout).unwrap_err();
        let AcquireError::TimedOut(found) = &error else { panic!("{error:?}") };
        assert_eq!(found.holder.as_ref().unwrap().program, "engine");
        assert_eq!((found.ahead, found.timeout, found.is_holder_stopped), (1, timeout, false));
        assert!(error.to_string().contains(&format!("process {} (engine)", std::process::id())));
    }
    assert_eq!(files(&other), 2, "the holder's pipe and its mark");
    // A timeout of zero requests nothing.
    assert!(turn.request().unwrap().is_none());
    turn.release().unwrap();
    other.acquire(Need::Card, Duration::MAX).unwrap();
    assert_eq!(files(&other), 0);
}

#[test]
fn a_wait_without_end_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| turns.acquire(Need::Card, Duration::MAX).map(|_| ()));
        assert!(turn.wait_for_request(Duration::MAX).unwrap().is_some());
        turn.release().unwrap();
        waits.join().unwrap().unwrap();
    });
}

#[test]
fn a_program_that_asks_at_safe_points_finds_requests_while_there_are_some() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    assert!(turn.request().unwrap().is_none());
    assert!(turn.wait_for_request(SHORT).unwrap().is_none());
    let waiting = turns.join(Need::Bytes(5)).unwrap();
    for _ in 0..3 {
        let request = turn.wait_for_request(LONG).unwrap().unwrap();
        assert_eq!(request.waiting()[0].need, Need::Bytes(5));
    }
    drop(waiting);
    assert!(turn.request().unwrap().is_none());
    let waiting = turns.join(Need::Card).unwrap();
    assert_eq!(turn.request().unwrap().unwrap().waiting().len(), 1);
    drop(waiting);
}

#[test]
fn a_turn_that_was_requested_before_it_began_is_requested() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    let (mut second, third) = (turns.join(Need::Card).unwrap(), turns.join(Need::Card).unwrap());
    turn.release().unwrap();
    assert!(second.wait(LONG).unwrap());
    let turn = second.into_turn().unwrap();
    assert_eq!(turn.request().unwrap().unwrap().waiting().len(), 1);
    drop(third);
}

#[test]
fn a_refusal_ends_the_wait_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (holder, other) = (open(folder.path(), "engine"), open(folder.path(), "trainer"));
    let turn = holder.acquire(Need::Card, LONG).unwrap();
    holder.on_request(|_| Answer::Refuse("a batch\nruns".to_owned())).unwrap();
    let error = other.acquire(Need::Card, LONG).unwrap_err();
    let AcquireError::Refused { holder, reason, .. } = &error else { panic!("{error:?}") };
    assert_eq!((holder.program.as_str(), reason.as_str()), ("engine", "a batch runs"));
    assert!(turn.is_held());
    assert_eq!(files(&other), 2);
}

#[test]
fn a_handler_is_called_once_for_each_process_and_releases_the_turn() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let (called, calls) = mpsc::channel();
    turns
        .on_request(move |request| {
            let waiting = request.waiting().len();
            called.send(waiting).unwrap();
            if waiting < 3 { Answer::Later } else { Answer::Release }
        })
        .unwrap();
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    assert!(matches!(turn.request(), Err(TurnsError::HasHandler)));
    let mut line = Vec::new();
    for count in 1..=3 {
        line.push(turns.join(Need::Card).unwrap());
        assert_eq!(calls.recv_timeout(LONG).unwrap(), count);
    }
    assert!(line[0].wait(LONG).unwrap());
    assert!(!turn.is_held());
    turn.release().unwrap();
    // The next turn is requested from its beginning. Its handler says later.
    let held = line.remove(0).into_turn().unwrap();
    assert_eq!(calls.recv_timeout(LONG).unwrap(), 2);
    assert!(held.is_held());
    turns.remove_handler().unwrap();
    assert!(held.request().unwrap().is_some());
}

#[test]
fn a_handler_is_called_for_a_process_that_takes_the_number_of_one_that_left() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let (called, calls) = mpsc::channel();
    turns
        .on_request(move |request| {
            called.send(request.waiting()[0].need).unwrap();
            Answer::Later
        })
        .unwrap();
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    for bytes in 0..20 {
        let waiting = turns.join(Need::Bytes(bytes)).unwrap();
        assert_eq!(calls.recv_timeout(LONG).unwrap(), Need::Bytes(bytes));
        drop(waiting);
    }
    assert!(turn.is_held());
}

#[test]
fn a_handler_that_panics_keeps_the_turn_and_is_called_again() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    let calls = AtomicUsize::new(0);
    turns
        .on_request(move |_| match calls.fetch_add(1, SeqCst) {
            0 => panic!("a test"),
            _ => Answer::Release,
        })
        .unwrap();
    let mut first = turns.join(Need::Card).unwrap();
    assert!(!first.wait(SHORT).unwrap() && turn.is_held());
    let second = turns.join(Need::Card).unwrap();
    assert!(first.wait(LONG).unwrap());
    drop(second);
}

#[test]
fn a_handler_may_end_the_turns_that_call_it() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    let other = open(folder.path(), "b");
    let owned = std::sync::Arc::new(std::sync::Mutex::new(Some((turn, turns))));
    let taken = std::sync::Arc::clone(&owned);
    let handler = move |_: &_| {
        drop(taken.lock().unwrap().take());
        Answer::Later
    };
    owned.lock().unwrap().as_ref().unwrap().1.on_request(handler).unwrap();
    other.acquire(Need::Card, LONG).unwrap();
    assert!(owned.lock().unwrap().is_none());
}

const KILLED: &str = "turns::a_process_that_is_killed_passes_the_turn_on";

#[test]
fn a_process_that_is_killed_passes_the_turn_on() {
    if let Some((role, turns)) = child_role() {
        let held = turns.acquire(Need::Card, if role == "waits" { Duration::MAX } else { LONG });
        say("there");
        hear();
        return drop(held);
    }
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "parent");
    let mut holder = start(KILLED, "holds", folder.path());
    holder.expect("there");
    let waits = start(KILLED, "waits", folder.path());
    wait_until("it waits", || turns.status().unwrap().waiting.len() == 1);
    let mut behind = turns.join(Need::Card).unwrap();
    // The one between is killed first: nothing changes for those around it.
    waits.kill();
    assert!(!behind.wait(SHORT).unwrap());
    holder.kill();
    assert!(behind.wait(LONG).unwrap());
    drop(behind);
    assert_eq!(files(&turns), 0);
}

const STOPPED: &str = "turns::a_stopped_process_is_named_when_the_deadline_passes";

#[test]
fn a_stopped_process_is_named_when_the_deadline_passes() {
    if let Some((_, turns)) = child_role() {
        turns.on_request(|_| Answer::Release).unwrap();
        let turn = turns.acquire(Need::Card, LONG).unwrap();
        say("there");
        hear();
        assert!(!turn.is_held());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "parent");
    let mut child = start(STOPPED, "engine", folder.path());
    child.expect("there");
    child.stop();
    let error = turns.acquire(Need::Card, SHORT).unwrap_err();
    let AcquireError::TimedOut(found) = &error else { panic!("{error:?}") };
    assert_eq!(found.holder.as_ref().unwrap().pid, child.pid());
    assert!(found.is_holder_stopped, "{error}");
    assert!(error.to_string().contains(&format!("kill -CONT {}", child.pid())), "{error}");
    child.signal(Signal::CONT);
    turns.acquire(Need::Card, LONG).unwrap();
    child.tell("end");
    child.finish();
}

const MANY: &str = "turns::turns_of_many_processes_never_overlap";

#[test]
fn turns_of_many_processes_never_overlap() {
    if let Some((_, turns)) = child_role() {
        say("there");
        hear();
        let witness = turns.directory().with_file_name("witness");
        for _ in 0..50 {
            let turn = turns.acquire(Need::Card, LONG).unwrap();
            // Only one may make it.
            std::fs::File::create_new(&witness).unwrap();
            std::fs::remove_file(&witness).unwrap();
            turn.release().unwrap();
        }
        say("done");
        hear();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut children: Vec<Child> = (0..8).map(|_| start(MANY, "many", folder.path())).collect();
    children.iter_mut().for_each(|child| child.expect("there"));
    children.iter_mut().for_each(|child| child.tell("begin"));
    children.iter_mut().for_each(|child| child.expect("done"));
    children.into_iter().for_each(Child::finish);
    assert_eq!(files(&open(folder.path(), "parent")), 0);
}

const LINE: &str = "turns::a_line_of_processes_is_served_while_some_are_killed";

#[test]
fn a_line_of_processes_is_served_while_some_are_killed() {
    if let Some((_, turns)) = child_role() {
        let mut waiting = turns.join(Need::Card).unwrap();
        say("waits");
        assert!(waiting.wait(Duration::MAX).unwrap());
        let turn = waiting.into_turn().unwrap();
        say("holds");
        hear();
        turn.release().unwrap();
        say(&turns.wake_ups().to_string());
        hear();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "parent");
    let first = turns.acquire(Need::Card, LONG).unwrap();
    let mut line = Vec::new();
    for _ in 0..100 {
        let mut child = start(LINE, "line", folder.path());
        // The status may list it before its place is fixed.
        child.expect("waits");
        line.push(child);
    }
    assert_eq!(turns.status().unwrap().waiting.len(), 100);
    first.release().unwrap();
    let mut ahead = 0;
    for (number, mut child) in line.into_iter().enumerate() {
        if number % 3 == 1 {
            // Killed while it waits, or while it holds the turn.
            child.kill();
            ahead += 1;
            continue;
        }
        child.expect("holds");
        child.tell("release");
        let wake_ups: u64 = child.next().parse().unwrap();
        // One for the process before it, one more for each that was killed there, and messages.
        assert!(wake_ups <= 4 + ahead, "{wake_ups} in process {number}");
        child.finish();
        ahead = 0;
    }
    assert_eq!(turns.status().unwrap(), TurnsStatus { holder: None, waiting: vec![] });
    assert_eq!(files(&turns), 0);
}

#[test]
fn wake_ups_grow_with_the_waiting_threads_and_not_with_their_square() {
    if !is_alone("turns::wake_ups_grow_with_the_waiting_threads_and_not_with_their_square") {
        return;
    }
    let limit = rustix::process::Rlimit { current: Some(4096), maximum: Some(4096) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    for threads in [2, 100, 400] {
        let folder = tempfile::tempdir().unwrap();
        let turns = open(folder.path(), "a");
        let turn = turns.acquire(Need::Card, LONG).unwrap();
        let order = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in 0..threads {
                let mut waiting = turns.join(Need::Card).unwrap();
                let order = &order;
                scope.spawn(move || {
                    assert!(waiting.wait(LONG).unwrap());
                    let turn = waiting.into_turn().unwrap();
                    order.lock().unwrap().push(number);
                    turn.release().unwrap();
                });
            }
            turn.release().unwrap();
        });
        assert_eq!(order.into_inner().unwrap(), (0..threads).collect::<Vec<_>>());
        // One for the end of the entry before it; the first of the line may get messages as well.
        let wake_ups = turns.wake_ups();
        assert!(wake_ups <= 2 * threads as u64 + 2, "{wake_ups} for {threads}");
        assert_eq!(files(&turns), 0);
    }
}

#[test]
fn ten_thousand_turns_leave_no_files_and_no_descriptors() {
    if !is_alone("turns::ten_thousand_turns_leave_no_files_and_no_descriptors") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let before = descriptors();
    turns.on_request(|_| Answer::Release).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    turns.acquire(Need::Card, LONG).unwrap();
                }
            });
        }
    });
    // The thread may be looking for processes that wait.
    turns.remove_handler().unwrap();
    assert_eq!((files(&turns), descriptors()), (0, before));
    // A thread that was joined may be on its last instructions.
    wait_until("the test and its harness are left", || threads() == 2);
}

#[test]
fn a_directory_that_is_removed_is_an_error_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    let turn = turns.acquire(Need::Card, LONG).unwrap();
    let mut waiting = turns.join(Need::Card).unwrap();
    std::fs::remove_dir_all(turns.directory()).unwrap();
    let is_removed = |error| matches!(error, TurnsError::Removed { .. });
    assert!(is_removed(turns.join(Need::Card).unwrap_err()));
    assert!(is_removed(turn.release().unwrap_err()));
    let Err(AcquireError::Turns(error)) = waiting.wait(LONG) else { panic!("{waiting:?}") };
    assert!(is_removed(error));
    open(folder.path(), "a").acquire(Need::Card, LONG).unwrap();
}

#[test]
fn directories_of_others_and_wrong_names_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let open = |directory: &Path, card| Turns::open(&TurnsConfig { directory, card, program: "" });
    let public = folder.path().join("public");
    std::fs::create_dir(&public).unwrap();
    std::fs::set_permissions(&public, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = open(&public, "a").unwrap_err();
    assert!(
        matches!(error, TurnsError::Directory(SharedDirectoryError::Mode { mode: 0o755, .. })),
        "{error:?}"
    );
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path(), &link).unwrap();
    for bad in [link, "/proc/self/a".into(), folder.path().join("missing/a")] {
        let error = open(&bad, "a").unwrap_err();
        assert!(
            matches!(error, TurnsError::Directory(SharedDirectoryError::System { .. })),
            "{error:?}"
        );
    }
    let good = folder.path().join("good");
    assert!(matches!(open(&good, "../a"), Err(TurnsError::Card { .. })));
}

#[test]
fn other_files_in_the_directory_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let turns = open(folder.path(), "a");
    for name in ["README", "0000000000000001-x", "ffffffffffffffff-0000000000000000-1-1-1-card-"] {
        std::fs::write(turns.directory().join(name), "").unwrap();
    }
    turns.acquire(Need::Card, Duration::ZERO).unwrap();
    assert_eq!(turns.status().unwrap(), TurnsStatus { holder: None, waiting: vec![] });
    assert_eq!(files(&turns), 3);
}
