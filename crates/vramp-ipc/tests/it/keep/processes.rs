//! Random programs in processes that are killed and stopped, as the keeper is.
//!
//! Contents say which write they are. Every client notes what it committed and what it read under a read lock; at
//! the end, one version at one epoch has one content in all notes. A hold that is not superseded is found by its
//! name, whatever happened to the keeper.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use vramp_host::{SharedTable, TableShape};
use vramp_ipc::keep::{Hold, KeepError, Keeper, Lock};

use super::*;

const NAME: &str =
    "keep::processes::clients_and_keepers_that_are_killed_and_stopped_lose_no_committed_byte";
const CLIENTS: usize = 8;
/// Operations of a short run.
const OPERATIONS: u32 = 2_500;
/// How long a keeper may be silent.
const PATIENCE: Duration = Duration::from_millis(400);
/// Words of a content.
const WORDS: u64 = 64;
/// How late a call may return.
const LATE: Duration = Duration::from_millis(100);

/// Of each client: operations, and how often it was stopped or continued.
fn table(folder: &Path) -> SharedTable {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false);
    let file = file.open(folder.join("table")).unwrap();
    SharedTable::map(file, TableShape { numbers: 2 * CLIENTS, bells: 0 }).unwrap()
}

/// Bytes that say which write they are.
fn content(stamp: u64) -> Vec<u8> {
    (0..WORDS).flat_map(|word| (stamp ^ word.wrapping_mul(0x9e37_79b9)).to_le_bytes()).collect()
}

/// Returns the stamp of bytes that one write wrote.
fn stamp_of(bytes: &[u8]) -> Option<u64> {
    let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    (bytes == content(stamp)).then_some(stamp)
}

struct Client {
    number: usize,
    keeper: Keeper,
    random: fastrand::Rng,
    table: SharedTable,
    notes: std::fs::File,
    holds: Vec<Hold>,
}

/// How late this process's own timer was, since it was last asked.
static LATENESS_NS: AtomicU64 = AtomicU64::new(0);
static IS_OVER: AtomicBool = AtomicBool::new(false);

impl Client {
    fn name(&mut self) -> &'static str {
        ["a", "b", "c"][self.random.usize(..3)]
    }

    fn lock(&mut self) -> Lock {
        [Lock::None, Lock::Read, Lock::Write][self.random.usize(..3)]
    }

    fn note(&mut self, hold: &Hold, epoch: u64, stamp: u64) {
        let id: String = hold.version_id().iter().map(|byte| format!("{byte:02x}")).collect();
        self.notes.write_all(format!("{id} {epoch} {stamp}\n").as_bytes()).unwrap();
    }

    /// Makes a call, and checks that it returns in time unless the process was stopped.
    fn timed<T>(
        &mut self,
        what: &str,
        limit: Duration,
        call: impl FnOnce(&Keeper, Instant) -> Result<T, KeepError>,
    ) -> Option<T> {
        let stops = 2 * self.number + 1;
        let stopped = self.table.number(stops).load(SeqCst);
        LATENESS_NS.store(0, SeqCst);
        let start = Instant::now();
        let result = call(&self.keeper, start + limit);
        let took = start.elapsed();
        if took > limit + LATE {
            // The thread that measures may be as late as this one.
            std::thread::sleep(Duration::from_millis(40));
        }
        let late = Duration::from_nanos(LATENESS_NS.load(SeqCst));
        if self.table.number(stops).load(SeqCst) == stopped && stopped.is_multiple_of(2) {
            assert!(
                took <= limit + LATE + late,
                "{what} took {took:?} of {limit:?}, {late:?} late"
            );
        }
        if let Err(KeepError::NotRunning { .. }) = result {
            // Not counted: there are thousands while a keeper starts.
            vramp_testing::moment();
            return None;
        }
        self.table.number(2 * self.number).fetch_add(1, SeqCst);
        match result {
            Ok(value) => Some(value),
            Err(
                KeepError::NoSuchEntry { .. }
                | KeepError::Busy { .. }
                | KeepError::Torn { .. }
                | KeepError::NotNewer { .. }
                | KeepError::NotLocked { .. }
                | KeepError::Uncommitted { .. }
                | KeepError::Adrift { .. }
                | KeepError::TimedOut { .. },
            ) => None,
            Err(error) => panic!("{what}: {error:?}"),
        }
    }

    fn step(&mut self) {
        let wait = Duration::from_millis(self.random.u64(0..40));
        match self.random.u8(0..20) {
            0..3 => self.publish(wait),
            3..7 => self.open(wait),
            7..10 => self.read_again(wait),
            10..14 => self.update(wait),
            14 => {
                let Some(hold) = self.take_hold() else { return };
                let than = hold.epoch();
                self.timed("wait_newer", wait, |_, until| hold.wait_newer(than, until));
                self.holds.push(hold);
            }
            15 => {
                let name = self.name();
                self.timed("remove", 3 * PATIENCE, |keeper, _| keeper.remove(name));
            }
            16 => drop(self.timed("entries", 3 * PATIENCE, |keeper, _| keeper.entries())),
            17 => drop(self.timed("evict", 3 * PATIENCE, |keeper, _| keeper.evict("sim:h200", 1))),
            _ => drop(self.take_hold()),
        }
    }

    fn take_hold(&mut self) -> Option<Hold> {
        let count = self.holds.len();
        (count > 0).then(|| self.holds.swap_remove(self.random.usize(..count)))
    }

    fn keep(&mut self, hold: Hold) {
        self.holds.push(hold);
        if self.holds.len() > 3 {
            drop(self.take_hold());
        }
    }

    fn publish(&mut self, wait: Duration) {
        let (name, then) = (self.name(), self.lock());
        let draft =
            self.timed("draft", wait, |keeper, until| keeper.draft(name, &options(512), until));
        let Some(mut draft) = draft else { return };
        let stamp = self.random.u64(..);
        draft.add(512, memory(&content(stamp)));
        let layout = stamp.to_le_bytes();
        let committed =
            self.timed("publish", 3 * PATIENCE, |_, _| draft.commit(&layout, [0; 32], then));
        if let Some(hold) = committed {
            // A hold without a lock may already have another epoch.
            if hold.held_lock() != Lock::None {
                self.note(&hold, hold.epoch(), stamp);
            }
            self.keep(hold);
        }
    }

    fn open(&mut self, wait: Duration) {
        let (name, lock) = (self.name(), self.lock());
        let own = self.holds.iter().position(|hold| hold.name() == name && !hold.is_superseded());
        let opened =
            self.timed("open", wait, |keeper, until| match keeper.open(name, lock, until) {
                Err(KeepError::NoSuchEntry { .. }) => Ok(None),
                opened => opened.map(Some),
            });
        if let (Some(own), Some(opened)) = (own.map(|own| &self.holds[own]), &opened) {
            let found = opened.as_ref().map(Hold::version_id);
            // While this process has it open and it is current, it is what the name means. A version that was
            // removed or replaced says so.
            let is_lost = found != Some(own.version_id()) && !own.is_superseded();
            let is_replaced = opened.as_ref().is_some_and(|hold| hold.epoch() > own.epoch());
            assert!(!is_lost || own.is_adrift() || is_replaced, "{own:?} is lost, {opened:?}");
        }
        if let Some(Some(hold)) = opened {
            self.check(&hold);
            self.keep(hold);
        }
    }

    fn read_again(&mut self, wait: Duration) {
        let Some(hold) = self.take_hold() else { return };
        let locked = if hold.held_lock() == Lock::Read {
            self.timed("yield", wait, |_, until| hold.yield_to_writer(until))
        } else {
            self.timed("lock", wait, |_, until| hold.lock(Lock::Read, until))
        };
        if locked.is_some() {
            self.check(&hold);
        }
        self.keep(hold);
    }

    /// Under a lock, the content is one write's, and the same as at any other time at this epoch.
    fn check(&mut self, hold: &Hold) {
        let held = hold.held_lock();
        if held == Lock::None || hold.is_torn() {
            return;
        }
        let epoch = hold.epoch();
        let bytes = read(hold, 0);
        if held == Lock::Read && self.random.bool() {
            vramp_testing::moment();
        }
        let again = read(hold, 0);
        if hold.held_lock() == held && hold.epoch() == epoch {
            let stamp = stamp_of(&bytes);
            assert!(bytes == again && stamp.is_some(), "{hold:?} has the bytes of several writes");
            self.note(hold, epoch, stamp.unwrap());
        }
    }

    fn update(&mut self, wait: Duration) {
        let Some(hold) = self.take_hold() else { return };
        if self.timed("lock", wait, |_, until| hold.lock(Lock::Write, until)).is_some() {
            match self.random.u8(0..8) {
                0 => drop(self.timed("release", 3 * PATIENCE, |_, _| hold.release_unchanged())),
                choice => {
                    let stamp = self.random.u64(..);
                    let bytes = content(stamp);
                    write(&hold, 0, &bytes[..256]);
                    if choice == 1 {
                        // It ends in the middle, and leaves the version torn.
                        return;
                    }
                    if choice < 5 {
                        vramp_testing::moment();
                    }
                    let file = std::fs::File::from(hold.parts()[0].descriptor.try_clone().unwrap());
                    file.write_all_at(&bytes[256..], 256).unwrap();
                    assert_eq!(
                        read(&hold, 0),
                        bytes,
                        "another client wrote under the lock of {hold:?}"
                    );
                    let then = self.lock();
                    let committed = self.timed("commit", 3 * PATIENCE, |_, _| hold.commit(then));
                    match committed {
                        Some(epoch) => self.note(&hold, epoch, stamp),
                        // No client takes the bytes for committed ones.
                        None => return,
                    }
                }
            }
        }
        self.keep(hold);
    }
}

fn client(number: usize, seed: u64, folder: &Path) -> ! {
    let before = descriptors();
    std::thread::spawn(|| {
        while !IS_OVER.load(SeqCst) {
            let start = Instant::now();
            std::thread::sleep(Duration::from_millis(10));
            let late = start.elapsed().saturating_sub(Duration::from_millis(10));
            LATENESS_NS.fetch_add(late.as_nanos() as u64, SeqCst);
        }
    });
    let notes =
        OpenOptions::new().append(true).create(true).open(folder.join(format!("notes-{seed}")));
    let mut client = Client {
        number,
        keeper: Keeper::new(folder, PATIENCE),
        random: fastrand::Rng::with_seed(seed),
        table: table(folder),
        notes: notes.unwrap(),
        holds: Vec::new(),
    };
    std::thread::spawn(|| {
        // The parent closes the pipe at the end.
        let _ = std::io::stdin().read_line(&mut String::new());
        IS_OVER.store(true, SeqCst);
    });
    say("runs");
    while !IS_OVER.load(SeqCst) {
        client.step();
    }
    drop(client);
    wait_until("all is closed", || descriptors() == before);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("vramp-keep"), "{maps}");
    std::process::exit(0);
}

struct World {
    folder: PathBuf,
    table: SharedTable,
    random: fastrand::Rng,
    clients: Vec<Child>,
    keeper: Option<Child>,
    next_seed: u64,
    kills: [u64; 2],
}

impl World {
    fn start_client(&mut self, number: usize) -> Child {
        self.next_seed += 1;
        let seed = self.next_seed;
        let role = format!("client:{number}:{seed}:{}", self.folder.display());
        let mut child = Child::start(NAME, &role, None);
        child.expect("runs");
        child
    }

    /// Stops a client for a moment.
    fn pause_client(&mut self, number: usize) {
        self.table.number(2 * number + 1).fetch_add(1, SeqCst);
        self.clients[number].stop();
        self.pause();
        self.clients[number].signal(Signal::CONT);
        self.table.number(2 * number + 1).fetch_add(1, SeqCst);
    }

    fn pause(&mut self) {
        for _ in 0..self.random.u32(0..200) {
            vramp_testing::moment();
        }
    }

    fn step(&mut self) {
        self.pause();
        let number = self.random.usize(..CLIENTS);
        match self.random.u8(0..24) {
            0..4 => {
                let next = self.start_client(number);
                std::mem::replace(&mut self.clients[number], next).kill();
                self.kills[0] += 1;
            }
            4 | 5 => {
                self.keeper.take().unwrap().kill();
                self.keeper = Some(keeper_process(NAME, &self.folder));
                self.kills[1] += 1;
            }
            6..12 => {
                self.keeper.as_ref().unwrap().stop();
                self.pause();
                self.keeper.as_ref().unwrap().signal(Signal::CONT);
            }
            12..18 => self.pause_client(number),
            _ => {}
        }
        for client in &mut self.clients {
            assert!(!client.is_over(), "a client failed");
        }
    }

    fn operations(&self) -> u64 {
        (0..CLIENTS).map(|number| self.table.number(2 * number).load(SeqCst)).sum()
    }
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn clients_and_keepers_that_are_killed_and_stopped_lose_no_committed_byte() {
    if let Some((role, _)) = role() {
        let parts: Vec<&str> = role.split(':').collect();
        match parts[..] {
            ["keeper", path] => serve(path),
            ["client", number, seed, path] => {
                client(number.parse().unwrap(), seed.parse().unwrap(), Path::new(path))
            }
            _ => panic!("{role}"),
        }
    }
    let folder = folder();
    let operations = u64::from(vramp_testing::cases(OPERATIONS));
    let mut world = World {
        folder: folder.path().to_owned(),
        table: table(folder.path()),
        random: fastrand::Rng::new(),
        clients: Vec::new(),
        keeper: Some(keeper_process(NAME, folder.path())),
        next_seed: 0,
        kills: [0; 2],
    };
    for number in 0..CLIENTS {
        let client = world.start_client(number);
        world.clients.push(client);
    }
    while world.operations() < operations || world.kills[0] < 2 || world.kills[1] < 2 {
        world.step();
    }
    for client in world.clients.drain(..) {
        client.finish();
    }
    // Nothing is left at the keeper but what is current.
    let keeper = Keeper::new(folder.path(), TIMEOUT);
    for entry in keeper.entries().unwrap() {
        // A client that ended may have removed it.
        let _ = keeper.remove(&entry.name);
    }
    wait_until("no entry is left", || keeper.entries().unwrap().is_empty());
    let fresh = self::folder();
    let other = keeper_process(NAME, fresh.path());
    let pid = world.keeper.as_ref().unwrap().pid();
    wait_until("all is closed", || open_files(pid) == open_files(other.pid()));
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    assert!(!maps.contains("memfd"), "{maps}");
    other.kill();

    let mut notes: BTreeMap<(String, u64), u64> = BTreeMap::new();
    let mut noted = 0;
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let path = file.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().starts_with("notes-") {
            continue;
        }
        for line in std::fs::read_to_string(path).unwrap().lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let (epoch, stamp) = (words[1].parse().unwrap(), words[2].parse().unwrap());
            let known = *notes.entry((words[0].to_owned(), epoch)).or_insert(stamp);
            assert_eq!(known, stamp, "version {} at epoch {epoch}", words[0]);
            noted += 1;
        }
    }
    let [clients, keepers] = world.kills;
    println!(
        "{} operations, {clients} clients and {keepers} keepers killed, {noted} notes of {} contents",
        world.operations(),
        notes.len()
    );
    assert!(noted > notes.len() && !notes.is_empty());
}
