//! Budgets of several threads and processes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use vramp_ipc::budget::{
    Budget, BudgetConfig, BudgetError, ClaimError, Command, Group, GroupName, Outcome, Shortfall,
    Sleep, Usage, groups,
};

use crate::common::*;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);
const PAGE: u64 = 2 << 20;

#[derive(Clone, Copy)]
struct Part {
    guaranteed: u64,
    limit: Option<u64>,
    priority: u8,
    capacity: u64,
    timeout: Duration,
}

/// Amounts in pages.
const PART: Part =
    Part { guaranteed: 0, limit: None, priority: 0, capacity: 100, timeout: Duration::ZERO };

fn try_join(directory: &Path, program: &str, part: Part) -> Result<Budget, ClaimError> {
    Budget::join(&BudgetConfig {
        directory: &directory.join("vramp"),
        card: "GPU-1",
        group: "serving",
        program,
        capacity: part.capacity * PAGE,
        guaranteed: part.guaranteed * PAGE,
        limit: part.limit.map(|pages| pages * PAGE),
        priority: part.priority,
        timeout: part.timeout,
    })
}

fn join(directory: &Path, program: &str, part: Part) -> Budget {
    try_join(directory, program, part).unwrap()
}

fn group(directory: &Path) -> Group {
    Group::open(&directory.join("vramp"), "GPU-1", "serving").unwrap()
}

fn start(test: &str, role: &str, directory: &Path) -> Child {
    Child::start(test, &format!("{role}:{}", directory.display()), None)
}

/// In a child: returns what it does and where.
fn child_role() -> Option<(String, std::path::PathBuf)> {
    let (value, _) = role()?;
    let (role, directory) = value.split_once(':').unwrap();
    Some((role.to_owned(), directory.into()))
}

fn shortfall(error: ClaimError) -> Shortfall {
    match error {
        ClaimError::TimedOut(found) | ClaimError::Impossible(found) => *found,
        error => panic!("{error:?}"),
    }
}

/// Waits until a member of this program waits for pages.
fn wait_until_waiting(directory: &Path, programs: &[&str]) {
    let group = group(directory);
    wait_until("members wait", || {
        let members = group.status().unwrap().members;
        let waits = |program: &&str| {
            members.iter().any(|member| member.program == **program && member.waiting.is_some())
        };
        programs.iter().all(waits)
    });
}

#[test]
fn what_one_claims_the_other_cannot() {
    let folder = tempfile::tempdir().unwrap();
    let one = join(folder.path(), "one", Part { guaranteed: 30, ..PART });
    let two = join(folder.path(), "two", Part { guaranteed: 20, ..PART });
    // A guarantee is kept free.
    assert_eq!(one.room().unwrap().available, 80 * PAGE);
    one.claim(80 * PAGE, Duration::ZERO).unwrap();
    assert_eq!((one.claimed(), one.guaranteed()), (80 * PAGE, 30 * PAGE));
    let refused = shortfall(one.claim(1, Duration::ZERO).unwrap_err());
    assert_eq!((refused.requested, refused.available, refused.most), (PAGE, 0, 0));
    assert_eq!(refused.members[0].program, "two");
    // It can be claimed at any time.
    two.claim(20 * PAGE, Duration::ZERO).unwrap();
    let refused = two.claim(PAGE, Duration::ZERO).unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, ClaimError::TimedOut(_)), "{text}");
    let id = std::process::id();
    assert!(text.contains(&format!("process {id} (one) has 160 MiB, 60 MiB of it")), "{text}");
    assert_eq!(one.give_back(5 * PAGE).unwrap(), 5 * PAGE);
    two.claim(5 * PAGE, Duration::ZERO).unwrap();
    assert_eq!(two.room().unwrap().available, 0);
    assert_eq!(two.room().unwrap().most, 45 * PAGE);
    let status = one.status().unwrap();
    assert!(status.is_exact);
    assert_eq!((status.counted(), status.free()), (100 * PAGE, 0));
    drop(one);
    assert_eq!(two.room().unwrap().available, 75 * PAGE);
    // No more than was claimed is given back.
    assert_eq!(two.give_back(u64::MAX).unwrap(), 25 * PAGE);
    assert_eq!(two.room().unwrap().available, 100 * PAGE);
}

#[test]
fn amounts_that_cannot_be_are_errors_that_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let error = try_join(path, "a", Part { guaranteed: 101, ..PART }).unwrap_err();
    assert!(matches!(error, ClaimError::Budget(BudgetError::Order { .. })), "{error}");
    let error = try_join(path, "a", Part { guaranteed: 9, limit: Some(8), ..PART }).unwrap_err();
    assert!(error.to_string().contains("18 MiB are guaranteed of a limit of 16 MiB"), "{error}");
    let error = try_join(path, "a", Part { capacity: 1 << 21, ..PART }).unwrap_err();
    assert!(matches!(error, ClaimError::Budget(BudgetError::Amount { .. })), "{error}");
    let one = join(path, "one", Part { guaranteed: 60, limit: Some(70), ..PART });
    let error = one.claim(71 * PAGE, LONG).unwrap_err();
    assert!(matches!(error, ClaimError::Limit { claimed: 0, .. }), "{error}");
    assert_eq!(one.limit(), Some(70 * PAGE));
    one.set_limit(None).unwrap();
    one.claim(71 * PAGE, LONG).unwrap();
    // The sum of guarantees fits.
    let error = try_join(path, "two", Part { guaranteed: 41, timeout: LONG, ..PART }).unwrap_err();
    assert!(matches!(error, ClaimError::Impossible(_)), "{error}");
    let error = try_join(path, "two", Part { capacity: 99, ..PART }).unwrap_err();
    assert!(error.to_string().contains("(one) joined the group with a capacity of 200 MiB"));
    let error = try_join(path, "two", Part { guaranteed: 40, ..PART }).unwrap_err();
    assert!(matches!(error, ClaimError::TimedOut(_)), "{error}");
    // What failed left nothing.
    assert_eq!(one.status().unwrap().members.len(), 1);
    one.claim(29 * PAGE, Duration::ZERO).unwrap();
    let bad = BudgetConfig {
        directory: path,
        card: "a/b",
        group: "",
        program: "",
        capacity: 0,
        guaranteed: 0,
        limit: None,
        priority: 0,
        timeout: LONG,
    };
    let is_name = |error| matches!(error, ClaimError::Budget(BudgetError::Name { .. }));
    assert!(is_name(Budget::join(&bad).unwrap_err()));
    assert!(is_name(Budget::join(&BudgetConfig { card: "a", ..bad }).unwrap_err()));
}

#[test]
fn a_member_that_is_short_gets_what_is_idle_and_then_what_handlers_release() {
    let folder = tempfile::tempdir().unwrap();
    let (log, requests) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
    let member = |name: &'static str, priority, idle, spare: u64| {
        let budget = join(folder.path(), name, Part { guaranteed: 10, priority, ..PART });
        budget.claim(30 * PAGE, Duration::ZERO).unwrap();
        budget.publish(&Usage { parked: idle * PAGE, ..Usage::default() }).unwrap();
        let (log, requests) = (Arc::clone(&log), Arc::clone(&requests));
        let left = Mutex::new((idle * PAGE, spare * PAGE));
        budget
            .on_request(move |request| {
                requests.fetch_add(1, SeqCst);
                log.lock().unwrap().push((name, request.bytes / PAGE, request.may_lose));
                let mut left = left.lock().unwrap();
                let mut released = request.bytes.min(left.0);
                left.0 -= released;
                if request.may_lose {
                    let more = (request.bytes - released).min(left.1);
                    left.1 -= more;
                    released += more;
                }
                released
            })
            .unwrap();
        budget
    };
    let first = member("first", 1, 5, 20);
    let second = member("second", 1, 25, 20);
    let high = member("high", 9, 2, 20);
    let own = join(folder.path(), "own", Part { priority: 5, ..PART });
    let room = own.room().unwrap();
    // Of the 25 idle pages of the second, five are of its guarantee.
    assert_eq!((room.available, room.obtainable, room.most), (10 * PAGE, 37 * PAGE, 70 * PAGE));
    // What is idle suffices: no handler is asked to lose anything.
    own.claim(30 * PAGE, LONG).unwrap();
    assert_eq!(*log.lock().unwrap(), [("first", 5, false), ("second", 15, false)]);
    log.lock().unwrap().clear();
    for budget in [&first, &second, &high] {
        budget.publish(&Usage::default()).unwrap();
    }
    // 25, 15 and 30 are claimed by the others, of which 10 each are guaranteed.
    own.claim(18 * PAGE, LONG).unwrap();
    let found = std::mem::take(&mut *log.lock().unwrap());
    // None has published what is idle, so all are asked for it, and some have a little.
    let idle = [("first", 15, false), ("second", 5, false), ("high", 13, false)];
    assert_eq!(found, [&idle[..], &[("first", 11, true)]].concat());
    assert_eq!([&first, &second, &high].map(Budget::claimed), [14, 10, 28].map(|n| n * PAGE));
    // A higher priority loses nothing for this one.
    let error = own.claim(10 * PAGE, Duration::from_millis(100)).unwrap_err();
    let found = shortfall(error);
    // The four that the first can spare do not suffice.
    assert!(found.available <= 4 * PAGE && found.most == 22 * PAGE, "{found:?}");
    assert!(log.lock().unwrap().iter().all(|(name, _, may_lose)| *name == "first" || !may_lose));
    assert!(requests.load(SeqCst) < 24, "{requests:?} in rounds of growing pauses");
    // The other way round it does. A claim that failed gave back what was released for it.
    drop(own);
    assert!(high.room().unwrap().available >= 48 * PAGE);
}

#[test]
fn waiting_members_are_served_by_priority_and_then_in_their_order() {
    // A thread that gets no processor for 45 ms looks stopped, and is passed over: rare, and not each time.
    let mut orders = Vec::new();
    while orders.len() < 5 {
        let order = order_of_service();
        if order == ["c", "a", "b", "d"] {
            return;
        }
        orders.push(order);
    }
    panic!("{orders:?}");
}

/// Members of which one has a higher priority wait; the order in which they are served. A newcomer that is
/// served before them is among them.
fn order_of_service() -> Vec<&'static str> {
    let folder = tempfile::tempdir().unwrap();
    let holder = join(folder.path(), "holder", PART);
    holder.claim(100 * PAGE, Duration::ZERO).unwrap();
    let order = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let mut names = Vec::new();
        for (name, priority) in [("a", 1), ("b", 1), ("c", 5), ("d", 1)] {
            let budget = join(folder.path(), name, Part { priority, ..PART });
            let order = &order;
            scope.spawn(move || {
                budget.claim(40 * PAGE, LONG).unwrap();
                order.lock().unwrap().push(name);
                budget.give_back(40 * PAGE).unwrap();
            });
            names.push(name);
            wait_until_waiting(folder.path(), &names);
        }
        // A newcomer that would fit waits behind them; one of a higher priority does not.
        holder.give_back(10 * PAGE).unwrap();
        let late = join(folder.path(), "late", Part { priority: 1, ..PART });
        if late.claim(10 * PAGE, SHORT).is_ok() {
            order.lock().unwrap().push("late");
            drop(late);
        }
        let urgent = join(folder.path(), "urgent", Part { priority: 6, ..PART });
        urgent.claim(10 * PAGE, Duration::ZERO).unwrap();
        drop(urgent);
        holder.give_back(30 * PAGE).unwrap();
    });
    order.into_inner().unwrap()
}

#[test]
fn threads_of_one_member_wait_one_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let holder = join(folder.path(), "holder", PART);
    let own = join(folder.path(), "own", Part { guaranteed: 10, ..PART });
    holder.claim(90 * PAGE, Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| own.claim(20 * PAGE, LONG).unwrap());
        }
        wait_until_waiting(folder.path(), &["own"]);
        // A claim within the guarantee does not wait for them.
        own.claim(10 * PAGE, Duration::ZERO).unwrap();
        assert!(own.claim(10 * PAGE, SHORT).is_err());
        for _ in 0..9 {
            holder.give_back(10 * PAGE).unwrap();
        }
    });
    assert_eq!((own.claimed(), holder.claimed()), (90 * PAGE, 0));
}

#[test]
fn a_wait_looks_rarely_and_a_member_that_nobody_needs_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let holder = join(folder.path(), "holder", PART);
    holder.claim(100 * PAGE, Duration::ZERO).unwrap();
    let own = join(folder.path(), "own", PART);
    let started = Instant::now();
    assert!(own.claim(PAGE, Duration::from_millis(150)).is_err());
    let looks = own.wake_ups();
    let most = started.elapsed().as_millis() / 5 + 10;
    assert!((1..=most).contains(&u128::from(looks)), "{looks} in {:?}", started.elapsed());
    assert_eq!(holder.wake_ups(), 0);
}

#[test]
fn commands_reach_the_member_and_return_what_came_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let group = group(folder.path());
    assert_eq!(group.room().unwrap(), None);
    let budget = join(folder.path(), "engine", PART);
    budget.claim(50 * PAGE, Duration::ZERO).unwrap();
    let send = |command| group.send(budget.id(), command, LONG).unwrap();
    // Without handlers.
    assert_eq!(send(Command::Pause), Outcome::CannotDo);
    assert_eq!(send(Command::GiveBack(PAGE)), Outcome::CannotDo);
    assert_eq!(send(Command::Limit(60 * PAGE)), Outcome::Done(0));
    assert_eq!(budget.limit(), Some(60 * PAGE));
    let spare = AtomicU64::new(12);
    budget
        .on_request(move |request| {
            let take = |left: u64| Some(left - left.min(request.bytes / PAGE));
            let before = spare.fetch_update(SeqCst, SeqCst, take).unwrap();
            (before - spare.load(SeqCst)) * PAGE
        })
        .unwrap();
    let (slept, sleeps) = mpsc::channel();
    budget
        .on_sleep(move |sleep| {
            slept.send(sleep).unwrap();
            sleep == Sleep::Pause
        })
        .unwrap();
    assert_eq!(send(Command::GiveBack(5 * PAGE)), Outcome::Done(5 * PAGE));
    assert_eq!(send(Command::Limit(40 * PAGE)), Outcome::Done(5 * PAGE));
    assert_eq!(send(Command::GiveBack(5 * PAGE)), Outcome::Failed(2 * PAGE));
    assert_eq!(budget.claimed(), 38 * PAGE);
    assert_eq!(send(Command::Pause), Outcome::Done(0));
    assert_eq!(send(Command::Resume), Outcome::Failed(0));
    assert_eq!(sleeps.try_iter().collect::<Vec<_>>(), [Sleep::Pause, Sleep::Resume]);
    budget.on_sleep(|_| panic!("a handler that panics has failed")).unwrap();
    assert_eq!(send(Command::Pause), Outcome::Failed(0));
    budget.remove_handlers().unwrap();
    assert_eq!(send(Command::Pause), Outcome::CannotDo);
    let id = budget.id();
    drop(budget);
    let gone = group.send(id, Command::Pause, LONG);
    assert!(matches!(gone, Err(BudgetError::Gone)), "{gone:?}");
}

#[test]
fn a_look_at_a_group_gets_new_amounts() {
    let folder = tempfile::tempdir().unwrap();
    let group = group(folder.path());
    let budget = join(folder.path(), "engine", PART);
    let looks = AtomicU64::new(0);
    let usage = move || Usage { live: looks.fetch_add(PAGE, SeqCst) + PAGE, ..Usage::default() };
    budget.on_look(usage).unwrap();
    let live = || group.status().unwrap().members[0].usage.live;
    for _ in 0..3 {
        let before = live();
        group.refresh().unwrap();
        wait_until("the amounts are new", || live() > before);
    }
}

#[test]
fn groups_are_listed_and_are_apart() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("vramp");
    assert_eq!(groups(&directory), []);
    let budget = join(folder.path(), "one", PART);
    budget.claim(100 * PAGE, Duration::ZERO).unwrap();
    let other = BudgetConfig {
        directory: &directory,
        card: "GPU-1",
        group: "other",
        program: &"long".repeat(40),
        capacity: 7 * PAGE,
        guaranteed: 0,
        limit: None,
        priority: 200,
        timeout: LONG,
    };
    let other = Budget::join(&other).unwrap();
    other.claim(7 * PAGE, Duration::ZERO).unwrap();
    std::fs::create_dir(directory.join("budget-GPU-1")).unwrap();
    let name = |group: &str| GroupName { card: "GPU-1".to_owned(), group: group.to_owned() };
    assert_eq!(groups(&directory), [name("other"), name("serving")]);
    let status = other.status().unwrap();
    let [member] = status.members.as_slice() else { panic!("{status:?}") };
    assert_eq!((member.program.len(), member.priority), (64, 200));
    assert!(member.is_pid_valid && !member.is_stopped);
    assert_eq!((member.id, member.pid), (other.id(), std::process::id()));
}

#[test]
fn a_ledger_that_is_removed_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let budget = join(folder.path(), "one", PART);
    let other = join(folder.path(), "other", PART);
    other.claim(100 * PAGE, Duration::ZERO).unwrap();
    std::fs::remove_dir_all(budget.directory()).unwrap();
    let is_removed = |error: &BudgetError| matches!(error, BudgetError::Removed { .. });
    assert!(is_removed(&budget.status().unwrap_err()));
    assert!(is_removed(&budget.room().unwrap_err()));
    match budget.claim(PAGE, LONG).unwrap_err() {
        ClaimError::Budget(error) => assert!(is_removed(&error)),
        error => panic!("{error}"),
    }
}

#[test]
fn what_a_claim_costs_grows_with_the_members_alone() {
    if !is_alone("budget::what_a_claim_costs_grows_with_the_members_alone") {
        return;
    }
    let limit = rustix::process::Rlimit { current: Some(4096), maximum: Some(4096) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let before = descriptors();
    let mut members = Vec::new();
    let (mut files, mut held) = (0, 0);
    for count in [2, 16, 256] {
        while members.len() < count {
            members.push(join(folder.path(), "many", Part { capacity: 1000, ..PART }));
        }
        // A member has as many descriptors as the first had, and the ledger is one file.
        let each = (descriptors() - before) / count;
        assert!(held == 0 || held == each, "{held} and {each}");
        held = each;
        let found = std::fs::read_dir(members[0].directory()).unwrap().count();
        assert!(files == 0 || files == found);
        files = found;
        for claims in [10, 1000] {
            for at in 0..claims {
                members[at % count].claim(PAGE, Duration::ZERO).unwrap();
                members[at % count].give_back(PAGE).unwrap();
            }
        }
        assert_eq!(members[0].room().unwrap().available, 1000 * PAGE);
    }
    assert_eq!(members[0].status().unwrap().members.len(), 256);
    for _ in 0..100_000 {
        members[7].claim(PAGE, Duration::ZERO).unwrap();
        members[7].give_back(PAGE).unwrap();
    }
    assert_eq!(members.iter().map(Budget::wake_ups).sum::<u64>(), 0);
    drop(members);
    assert_eq!(descriptors(), before);
    wait_until("the test and its harness are left", || threads() == 2);
}

#[test]
fn more_members_than_fit_are_an_error() {
    if !is_alone("budget::more_members_than_fit_are_an_error") {
        return;
    }
    let limit = rustix::process::Rlimit { current: Some(4096), maximum: Some(4096) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut members: Vec<_> = (0..512).map(|_| join(folder.path(), "many", PART)).collect();
    let error = try_join(folder.path(), "one more", PART).unwrap_err();
    assert!(matches!(error, ClaimError::Budget(BudgetError::TooManyMembers)), "{error}");
    members.pop();
    join(folder.path(), "instead", PART);
}

const KILLED: &str = "budget::a_dead_member_leaves_a_slot_that_the_next_claim_clears";

#[test]
fn a_dead_member_leaves_a_slot_that_the_next_claim_clears() {
    if let Some((_, directory)) = child_role() {
        let budget = join(&directory, "child", Part { guaranteed: 50, ..PART });
        budget.claim(80 * PAGE, Duration::ZERO).unwrap();
        say("claimed");
        let _ = budget.claim(100 * PAGE, LONG);
        hear();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let own = join(folder.path(), "own", Part { guaranteed: 20, ..PART });
    for _ in 0..3 {
        let mut child = start(KILLED, "child", folder.path());
        child.expect("claimed");
        let dead = child.kill_unreaped();
        // A process that is no member finds it dead, too. Its thread may end after the one that is a zombie.
        let group = group(folder.path());
        wait_until("the child is dead", || group.status().unwrap().members.len() == 1);
        own.claim(100 * PAGE, Duration::ZERO).unwrap();
        assert_eq!(own.status().unwrap().counted(), 100 * PAGE);
        own.give_back(100 * PAGE).unwrap();
        drop(dead);
    }
    // Its slot was used again: a file of a page or two, whatever the number of members that died.
    let other = join(folder.path(), "other", PART);
    assert_eq!(own.status().unwrap().members.len(), 2);
    drop(other);
}

const WAITS: &str = "budget::a_wait_for_a_member_that_is_killed_ends_after_a_few_looks";

#[test]
fn a_wait_for_a_member_that_is_killed_ends_after_a_few_looks() {
    if let Some((role, directory)) = child_role() {
        let budget = join(&directory, &role, PART);
        if role == "holder" {
            budget.claim(100 * PAGE, Duration::ZERO).unwrap();
        } else {
            budget.claim(90 * PAGE, LONG).unwrap_err();
        }
        say("claimed");
        hear();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut holder = start(WAITS, "holder", folder.path());
    holder.expect("claimed");
    let own = join(folder.path(), "own", PART);
    std::thread::scope(|scope| {
        // One waits before this one, and is killed as well.
        let first = start(WAITS, "first", folder.path());
        wait_until_waiting(folder.path(), &["first"]);
        let claims = scope.spawn(|| own.claim(60 * PAGE, LONG).unwrap());
        wait_until_waiting(folder.path(), &["own"]);
        let (first, holder) = (first.kill_unreaped(), holder.kill_unreaped());
        let group = group(folder.path());
        wait_until("both are dead", || group.status().unwrap().members.len() == 1);
        let before = own.wake_ups();
        claims.join().unwrap();
        // They are 15 ms apart. One finds the first dead, one the holder, and one claims.
        let looks = own.wake_ups() - before;
        assert!(looks <= 4, "{looks} looks");
        drop((first, holder));
    });
    assert_eq!(own.claimed(), 60 * PAGE);
}

const STOPPED: &str = "budget::stopped_members_are_passed_over_and_served_when_they_go_on";

#[test]
fn stopped_members_are_passed_over_and_served_when_they_go_on() {
    if let Some((role, directory)) = child_role() {
        let budget = join(&directory, &role, PART);
        if role == "silent" {
            budget.claim(30 * PAGE, Duration::ZERO).unwrap();
            budget.publish(&Usage { cached: 30 * PAGE, ..Usage::default() }).unwrap();
            budget.on_request(|request| request.bytes).unwrap();
        }
        say("there");
        if role == "first" {
            budget.claim(60 * PAGE, LONG).unwrap();
            say("served");
        }
        hear();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut silent = start(STOPPED, "silent", folder.path());
    silent.expect("there");
    let own = join(folder.path(), "own", PART);
    own.claim(50 * PAGE, Duration::ZERO).unwrap();
    silent.stop();
    let mut first = start(STOPPED, "first", folder.path());
    first.expect("there");
    wait_until_waiting(folder.path(), &["first"]);
    first.stop();
    // Twenty are free, which the stopped one that waits does not keep. The other that is stopped keeps what
    // it has, and does not answer.
    let other = join(folder.path(), "other", PART);
    other.claim(20 * PAGE, LONG).unwrap();
    let looks = other.wake_ups();
    assert!(looks <= 12, "{looks}");
    let error = other.claim(PAGE, Duration::from_millis(100)).unwrap_err();
    assert!(error.to_string().contains(&format!("is stopped (`kill -CONT {}`)", silent.pid())));
    // It answers late.
    silent.signal(Signal::CONT);
    other.claim(20 * PAGE, LONG).unwrap();
    first.signal(Signal::CONT);
    own.give_back(50 * PAGE).unwrap();
    other.give_back(40 * PAGE).unwrap();
    first.expect("served");
    for child in [&mut silent, &mut first] {
        child.tell("end");
    }
    silent.finish();
    first.finish();
    assert_eq!(own.status().unwrap().members.len(), 2);
}

#[test]
fn a_program_that_a_member_starts_keeps_nothing_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let budget = join(folder.path(), "parent", PART);
    budget.claim(10 * PAGE, Duration::ZERO).unwrap();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    drop(budget);
    let next = join(folder.path(), "next", PART);
    next.claim(100 * PAGE, Duration::ZERO).unwrap();
    assert_eq!(next.status().unwrap().members.len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
}

const STORM: &str =
    "budget::sums_hold_and_requests_are_served_while_members_are_killed_and_stopped";
const MEMBERS: usize = 16;
const SPACE: u64 = 240;
const MOST: u64 = 40;

/// In a child: claims and gives back, and returns what its handler can spare.
fn storm(directory: &Path, requests: u64) {
    let mut random = fastrand::Rng::new();
    let guaranteed = random.u64(0..6);
    let part = Part {
        guaranteed,
        limit: Some(MOST),
        capacity: SPACE,
        timeout: LONG,
        priority: PART.priority,
    };
    let budget = join(directory, "storm", part);
    let held = Arc::new(AtomicU64::new(0));
    let spare = Arc::clone(&held);
    budget
        .on_request(move |request| {
            let mut taken = 0;
            let take = |held: u64| {
                taken = held.saturating_sub(guaranteed).min(request.bytes / PAGE);
                Some(held - taken)
            };
            spare.fetch_update(SeqCst, SeqCst, take).unwrap();
            taken * PAGE
        })
        .unwrap();
    say("there");
    hear();
    let (mut waited, mut worst) = (0, Duration::ZERO);
    for _ in 0..requests {
        let pages = random.u64(1..12);
        let started = Instant::now();
        let looks = budget.wake_ups();
        match budget.claim(pages * PAGE, LONG) {
            Ok(()) => drop(held.fetch_add(pages, SeqCst)),
            Err(ClaimError::Limit { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        waited += u64::from(budget.wake_ups() > looks);
        worst = worst.max(started.elapsed());
        let idle = held.load(SeqCst) * random.u64(0..2);
        budget.publish(&Usage { parked: idle * PAGE, ..Usage::default() }).unwrap();
        if held.load(SeqCst) > MOST - 12 || random.u32(..8) == 0 {
            let mut given = 0;
            let give = |held: u64| {
                given = random.u64(0..=held);
                Some(held - given)
            };
            held.fetch_update(SeqCst, SeqCst, give).unwrap();
            assert_eq!(budget.give_back(given * PAGE).unwrap(), given * PAGE);
        }
    }
    say(&format!("{waited} {}", worst.as_micros()));
}

#[test]
fn sums_hold_and_requests_are_served_while_members_are_killed_and_stopped() {
    let requests = u64::from(vramp_testing::cases(400));
    if let Some((_, directory)) = child_role() {
        return storm(&directory, requests);
    }
    let folder = tempfile::tempdir().unwrap();
    let group = group(folder.path());
    let (is_over, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    let check = || {
        let status = group.status().unwrap();
        if status.is_exact {
            looks.fetch_add(1, SeqCst);
            let sum = status.counted() / PAGE;
            assert!(sum <= SPACE, "{sum} pages: {status:?}");
        }
    };
    let (mut kills, mut stops, mut waited, mut worst) = (0, 0, 0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                check();
                vramp_testing::moment();
            }
        });
        let mut random = fastrand::Rng::new();
        let mut running: Vec<(Child, bool)> =
            (0..MEMBERS).map(|_| (start(STORM, "storm", folder.path()), false)).collect();
        running.iter_mut().for_each(|(child, _)| child.expect("there"));
        // Nearly all is held until one of them waits, however short the run is.
        let holder = join(folder.path(), "holder", Part { capacity: SPACE, ..PART });
        let free = holder.room().unwrap().available;
        holder.claim(free - 12 * PAGE, Duration::ZERO).unwrap();
        running.iter_mut().for_each(|(child, _)| child.tell("begin"));
        wait_until("one waits", || {
            group.status().unwrap().members.iter().any(|member| member.waiting.is_some())
        });
        drop(holder);
        while !running.is_empty() {
            let at = random.usize(..running.len());
            if running[at].0.is_over() {
                let mut child = running.swap_remove(at).0;
                let mut line = child.next();
                if line == "there" {
                    line = child.next();
                }
                let (waits, worst_us) = line.split_once(' ').unwrap();
                waited += waits.parse::<u64>().unwrap();
                worst = worst.max(worst_us.parse::<u64>().unwrap());
                child.finish();
                continue;
            }
            // A stopped process keeps its pages: of these the rest can be had at any time.
            let stopped = running.iter().filter(|(_, is_stopped)| *is_stopped).count();
            let (child, is_stopped) = &mut running[at];
            // One is stopped and one is killed however short the run is.
            let choice = match (stops, kills) {
                (0, _) => 1,
                (_, 0) => 0,
                _ => random.u32(..20),
            };
            match choice {
                0 if kills < requests / 50 => {
                    kills += 1;
                    let mut new = start(STORM, "storm", folder.path());
                    new.tell("begin");
                    let (old, _) = std::mem::replace(&mut running[at], (new, false));
                    old.kill();
                }
                1..6 if !*is_stopped && stopped < 3 => {
                    child.signal(Signal::STOP);
                    (*is_stopped, stops) = (true, stops + 1);
                }
                _ if *is_stopped => {
                    child.signal(Signal::CONT);
                    *is_stopped = false;
                }
                _ => {}
            }
            vramp_testing::moment();
        }
        is_over.store(true, SeqCst);
    });
    check();
    println!(
        "{} requests of {MEMBERS} processes, {kills} killed, {stops} stops: {waited} waited, the longest {worst} us; \
         {looks:?} exact looks",
        requests * MEMBERS as u64
    );
    let counts = [looks.into_inner(), kills, stops, waited];
    assert!(counts.iter().all(|&count| count > 0), "looks, kills, stops, waits: {counts:?}");
    // All that they had is free.
    let own = join(folder.path(), "own", Part { capacity: SPACE, ..PART });
    own.claim(SPACE * PAGE, Duration::ZERO).unwrap();
    assert_eq!(own.status().unwrap().members.len(), 1);
}
