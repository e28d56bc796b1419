//! The table of names: what each request does, and what others get from it.
//!
//! 1. A request names its client. What it causes is appended to the effects, in order: replies, also to other
//!    clients, numbers to write into pages, and versions whose descriptors are to be closed.
//! 2. A request that cannot be granted waits, with one entry in a queue and one in the timers.
//!    [`Registry::tick`] ends those whose time has come.
//! 3. [`Registry::end`] takes back everything that a client has.
//!
//! After the end of another keeper, clients restore what they hold. Until that time is over, the client
//! [`GHOST`] has the right to build every entry, and of each restored version the lock that an unknown
//! client may have.
//!
//! A request is O(log entries) and O(log clients of the entry), besides the replies that it causes.

use std::collections::{BTreeMap, BTreeSet};

use super::lock::{Lock, LockQueue};
use super::page::{self, PageState, Word};

/// A connection.
pub type Client = u64;
/// A version, by a number that is never used again.
pub type VersionKey = u64;
/// 128 random bits.
pub type VersionId = [u8; 16];
/// Bytes of the publisher's choice.
pub type Digest = [u8; 32];
type EntryKey = u64;

/// Stands for clients of an earlier keeper that have not restored their holds yet.
pub const GHOST: Client = 0;
/// Most processes that a failure names.
pub const MAX_PIDS: usize = 16;
/// Most holders that a status names.
pub const MAX_HOLDERS: usize = 256;

/// What a draft asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    pub device: String,
    pub bytes: u64,
    /// Idle entries of a lower priority are evicted first.
    pub priority: i32,
    /// How long the entry stays without a hold, in nanoseconds; `None` for ever.
    pub kept_for_ns: Option<u64>,
}

/// The version that a draft becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewVersion {
    pub id: VersionId,
    pub bytes: u64,
    pub digest: Digest,
}

/// A version as a client of an earlier keeper has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    pub name: String,
    pub id: VersionId,
    pub terms: Terms,
    pub digest: Digest,
    pub word: Word,
    pub writer_pid: u32,
    pub is_superseded: bool,
    pub lock: Lock,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    NoSuchEntry,
    /// Processes that have the lock or the right.
    Busy {
        pids: Vec<u32>,
    },
    Torn {
        epoch: u64,
        pid: u32,
    },
    Full {
        limit: u64,
        held: u64,
        evictable: u64,
    },
    Superseded,
    NotNewer {
        epoch: u64,
    },
    NotLocked,
    Uncommitted,
    /// The entry has a current version, and the draft was for an entry without one.
    Exists,
}

/// What a request returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Opened(VersionKey),
    Granted {
        current: Option<(u64, Digest)>,
    },
    Committed(u64),
    /// The client has the lock, at this epoch.
    Locked(u64),
    Newer(u64),
    Done(u64),
    Restored {
        version: VersionKey,
        lock: Lock,
    },
    Failed(Failure),
}

/// What follows from a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Reply(Client, Outcome),
    Page { version: VersionKey, at: usize, value: u64 },
    Dropped(VersionKey),
}

/// A client that has a version open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub lock: Lock,
}

/// One name and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub name: String,
    /// `None` if only a draft or older versions exist.
    pub current: Option<CurrentStatus>,
    /// Requests that wait for a lock of the current version or for the right to build.
    pub waiting: u64,
    /// Process that has the right to build.
    pub draft_pid: Option<u32>,
    /// Older versions that clients hold.
    pub superseded: u64,
}

/// The current version of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentStatus {
    pub terms: Terms,
    pub epoch: u64,
    pub is_torn: bool,
    /// [`MAX_HOLDERS`] at most.
    pub holders: Vec<Holder>,
    pub holders_len: u64,
    pub idle_ns: Option<u64>,
}

#[derive(Debug, Default)]
struct Entry {
    name: String,
    current: Option<VersionKey>,
    last_epoch: u64,
    build: LockQueue,
    watchers: BTreeSet<Client>,
    /// Clients that wait until the entry is restored.
    opens: BTreeSet<Client>,
    /// The current version and those that are only held.
    versions: u64,
    /// A draft was committed since this keeper started, so what is restored later is older.
    is_built_here: bool,
}

#[derive(Debug)]
struct Version {
    entry: EntryKey,
    id: VersionId,
    terms: Terms,
    digest: Digest,
    epoch: u64,
    /// Process that left it torn.
    torn_by: Option<u32>,
    lock: LockQueue,
    holders: BTreeSet<Client>,
    is_current: bool,
    idle_since: Option<u64>,
    shown_writers: u64,
}

#[derive(Debug)]
struct ClientState {
    pid: u32,
    role: Role,
    wait: Option<(u64, Wait)>,
}

#[derive(Clone, Debug)]
enum Role {
    New,
    Draft { entry: EntryKey, terms: Terms, is_granted: bool },
    Hold(VersionKey),
}

#[derive(Clone, Copy, Debug)]
enum Wait {
    Open(EntryKey),
    Build { entry: EntryKey, unless_current: bool },
    Lock { version: VersionKey, only_current: bool },
    Newer { entry: EntryKey, than: u64 },
}

#[derive(Debug, Default)]
struct Device {
    /// 128 bits, so that no sum of what clients claim is too large.
    held: u128,
    idle: BTreeSet<(i32, u64, VersionKey)>,
    idle_bytes: u128,
}

/// All names. See the module's page.
#[derive(Debug)]
pub struct Registry {
    limit: Option<u64>,
    settles_at: Option<u64>,
    /// Holds of the earlier keeper that were not restored yet.
    expected_holds: u64,
    holds: u64,
    now: u64,
    last_key: u64,
    names: BTreeMap<String, EntryKey>,
    entries: BTreeMap<EntryKey, Entry>,
    versions: BTreeMap<VersionKey, Version>,
    ids: BTreeMap<VersionId, VersionKey>,
    clients: BTreeMap<Client, ClientState>,
    timers: BTreeSet<(u64, Client)>,
    expiries: BTreeSet<(u64, VersionKey)>,
    devices: BTreeMap<String, Device>,
    effects: Vec<Effect>,
}

impl Registry {
    /// Returns a table without names. `limit` is in bytes for each device. Clients of an earlier keeper restore
    /// their holds until `settles_at`, or until there are so many as it had.
    pub fn new(limit: Option<u64>, settles_at: Option<u64>, expected_holds: u64) -> Registry {
        Registry {
            limit,
            settles_at,
            expected_holds,
            holds: 0,
            now: 0,
            last_key: 0,
            names: BTreeMap::new(),
            entries: BTreeMap::new(),
            versions: BTreeMap::new(),
            ids: BTreeMap::new(),
            clients: BTreeMap::new(),
            timers: BTreeSet::new(),
            expiries: BTreeSet::new(),
            devices: BTreeMap::new(),
            effects: Vec::new(),
        }
    }

    /// Sets the time of the requests that follow.
    pub fn set_now(&mut self, now: u64) {
        self.now = now;
    }

    /// Takes what the requests so far caused.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Returns when [`Registry::tick`] has something to do.
    pub fn next_deadline(&self) -> Option<u64> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let expiry = self.expiries.first().map(|(at, _)| *at);
        [self.settles_at, timer, expiry].into_iter().flatten().min()
    }

    /// Returns true if there is no name and no client.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.clients.is_empty()
    }

    /// Returns how many clients have a version open, or had one at an earlier keeper and may restore it.
    pub fn holds(&self) -> u64 {
        let expected = self.settles_at.map_or(0, |_| self.expected_holds);
        self.holds.saturating_add(expected)
    }

    // --- Clients ---

    /// Adds a client.
    pub fn begin(&mut self, client: Client, pid: u32) {
        self.clients.insert(client, ClientState { pid, role: Role::New, wait: None });
    }

    /// Returns true if the client has neither a draft nor a hold.
    pub fn is_new(&self, client: Client) -> bool {
        matches!(self.role(client), Some(Role::New))
    }

    /// Returns true if the client has the right to build.
    pub fn has_draft(&self, client: Client) -> bool {
        matches!(self.role(client), Some(Role::Draft { is_granted: true, .. }))
    }

    /// Returns the version that a client has open.
    pub fn held(&self, client: Client) -> Option<VersionKey> {
        match self.role(client) {
            Some(Role::Hold(version)) => Some(*version),
            _ => None,
        }
    }

    /// Returns the version of which a client has the write lock.
    pub fn written(&self, client: Client) -> Option<VersionKey> {
        let key = self.held(client)?;
        (self.version(key).lock.held(client) == Lock::Write).then_some(key)
    }

    /// Returns true if a version with this id is known.
    pub fn knows(&self, id: &VersionId) -> bool {
        self.ids.contains_key(id)
    }

    /// Returns what a version's draft asked for.
    pub fn terms(&self, version: VersionKey) -> &Terms {
        &self.version(version).terms
    }

    fn role(&self, client: Client) -> Option<&Role> {
        self.clients.get(&client).map(|state| &state.role)
    }

    /// Removes a client and what it has. `is_written`: the page of the version that it may write says that
    /// its bytes may have changed.
    pub fn end(&mut self, client: Client, is_written: bool) {
        self.cancel(client);
        let Some(state) = self.clients.remove(&client) else { return };
        match state.role {
            Role::New => {}
            Role::Draft { entry, terms, is_granted } => {
                if is_granted {
                    self.device(&terms.device).held -= u128::from(terms.bytes);
                    self.forget_device(&terms.device);
                }
                self.entry(entry).build.release(client);
                self.grant_build(entry);
                self.refresh_entry(entry);
            }
            Role::Hold(key) => {
                self.holds -= 1;
                self.unlock(key, client, state.pid, is_written);
                self.version_mut(key).holders.remove(&client);
                self.grant_locks(key);
                self.refresh_version(key);
            }
        }
    }

    /// Ends what a client waits for, without a reply.
    pub fn cancel(&mut self, client: Client) {
        let Some(wait) = self.end_wait(client) else { return };
        match wait {
            Wait::Open(entry) => {
                self.entry(entry).opens.remove(&client);
                self.refresh_entry(entry);
            }
            Wait::Build { entry, .. } => {
                self.entry(entry).build.cancel(client);
                self.set_role(client, Role::New);
                self.grant_build(entry);
                self.refresh_entry(entry);
            }
            Wait::Lock { version, .. } => {
                self.version_mut(version).lock.cancel(client);
                self.grant_locks(version);
            }
            Wait::Newer { entry, .. } => {
                self.entry(entry).watchers.remove(&client);
            }
        }
    }

    // --- Requests ---

    /// Opens the current version of a name. Waits only for clients of an earlier keeper.
    pub fn open(&mut self, client: Client, name: &str, until: u64) {
        let known = self.names.get(name).copied();
        if let Some(key) = known.and_then(|entry| self.entry(entry).current) {
            self.hold(client, key);
            return self.reply(client, Outcome::Opened(key));
        }
        let Some(settles_at) = self.settles_at else {
            return self.fail(client, Failure::NoSuchEntry);
        };
        let entry = self.entry_named(name);
        self.entry(entry).opens.insert(client);
        self.wait(client, until.min(settles_at), Wait::Open(entry));
    }

    /// Waits for the right to build a version of a name. `unless_current`: fails once the name has a current
    /// version.
    pub fn draft(
        &mut self,
        client: Client,
        name: &str,
        terms: Terms,
        until: u64,
        unless_current: bool,
    ) {
        let entry = self.entry_named(name);
        if unless_current && self.entry(entry).current.is_some() {
            return self.fail(client, Failure::Exists);
        }
        self.set_role(client, Role::Draft { entry, terms, is_granted: false });
        if self.entry(entry).build.request(client, Lock::Write) {
            if !self.grant_draft(client) {
                self.refresh_entry(entry);
            }
        } else {
            self.wait(client, until, Wait::Build { entry, unless_current });
        }
    }

    /// Makes a draft the current version, with a lock of the client. `None` if it failed.
    ///
    /// # Panics
    /// If the client has no draft.
    pub fn commit(&mut self, client: Client, new: NewVersion, then: Lock) -> Option<VersionKey> {
        let Some(Role::Draft { entry, mut terms, is_granted: true }) = self.role(client).cloned()
        else {
            panic!("client {client} commits without a draft")
        };
        let more = new.bytes.saturating_sub(terms.bytes);
        if more > 0
            && let Err(failure) = self.make_room(&terms.device, more)
        {
            self.fail(client, failure);
            return None;
        }
        let device = self.device(&terms.device);
        device.held = device.held - u128::from(terms.bytes) + u128::from(new.bytes);
        terms.bytes = new.bytes;
        let of_entry = self.entry(entry);
        of_entry.last_epoch += 1;
        of_entry.is_built_here = true;
        let epoch = of_entry.last_epoch;
        let NewVersion { id, digest, .. } = new;
        let key =
            self.add_version(entry, id, terms, digest, Word { epoch, state: PageState::Whole });
        self.show_word(key);
        self.make_current(key);
        self.hold(client, key);
        self.version_mut(key).lock.take(client, then);
        self.entry(entry).build.release(client);
        self.reply(client, Outcome::Committed(epoch));
        self.notify(entry);
        self.grant_build(entry);
        Some(key)
    }

    /// Takes or waits for a lock of the client's version, instead of the one that it has. `only_current`:
    /// fails if the version is not, or no longer, the current one.
    pub fn lock(
        &mut self,
        client: Client,
        key: VersionKey,
        lock: Lock,
        until: u64,
        only_current: bool,
    ) {
        let version = self.version_mut(key);
        let (held, epoch) = (version.lock.held(client), version.epoch);
        if held == lock {
            return self.reply(client, Outcome::Locked(epoch));
        }
        if held == Lock::Write {
            return self.fail(client, Failure::Uncommitted);
        }
        version.lock.release(client);
        if only_current && !version.is_current {
            self.fail(client, Failure::Superseded);
        } else if let (Lock::Read, Some(pid)) = (lock, version.torn_by) {
            self.fail(client, Failure::Torn { epoch, pid });
        } else if lock == Lock::None || version.lock.request(client, lock) {
            self.reply(client, Outcome::Locked(epoch));
        } else {
            self.wait(client, until, Wait::Lock { version: key, only_current });
        }
        self.grant_locks(key);
    }

    /// Commits what the client wrote in place.
    pub fn update(&mut self, client: Client, key: VersionKey, then: Lock) {
        if self.version(key).lock.held(client) != Lock::Write {
            return self.fail(client, Failure::NotLocked);
        }
        let entry = self.version(key).entry;
        self.entry(entry).last_epoch += 1;
        let epoch = self.entry(entry).last_epoch;
        let version = self.version_mut(key);
        version.epoch = epoch;
        version.torn_by = None;
        version.lock.release(client);
        version.lock.take(client, then);
        self.show_word(key);
        self.reply(client, Outcome::Committed(epoch));
        self.grant_locks(key);
        self.notify(entry);
    }

    /// Ends the client's lock without a commit.
    pub fn release(&mut self, client: Client, key: VersionKey, is_written: bool) {
        let pid = self.pid(client);
        self.unlock(key, client, pid, is_written);
        let epoch = self.version(key).epoch;
        self.reply(client, Outcome::Done(epoch));
        self.grant_locks(key);
    }

    /// Waits until the current version of the client's entry has an epoch after `than`.
    pub fn wait_newer(&mut self, client: Client, key: VersionKey, than: u64, until: u64) {
        let entry = self.version(key).entry;
        match self.current_epoch(entry) {
            Some(epoch) if epoch > than => self.reply(client, Outcome::Newer(epoch)),
            _ => {
                self.entry(entry).watchers.insert(client);
                self.wait(client, until, Wait::Newer { entry, than });
            }
        }
    }

    /// Takes the current version off its name.
    pub fn remove(&mut self, client: Client, name: &str) {
        let entry = self.names.get(name).copied();
        let current = entry.and_then(|entry| self.entry(entry).current.take());
        match current {
            None => self.fail(client, Failure::NoSuchEntry),
            Some(key) => {
                self.supersede(key);
                self.reply(client, Outcome::Done(1));
            }
        }
    }

    /// Drops idle entries of a device until `bytes` are free or none is left.
    pub fn evict(&mut self, client: Client, device: &str, bytes: u64) {
        let mut dropped = 0;
        while dropped < bytes {
            match self.evict_one(device) {
                Some(bytes) => dropped += bytes,
                None => break,
            }
        }
        self.reply(client, Outcome::Done(dropped));
    }

    /// Adds a version of an earlier keeper, if it is not known yet, and the client's hold and lock.
    pub fn restore(&mut self, client: Client, restored: Restored) -> VersionKey {
        let Restored { name, id, terms, digest, word, writer_pid, is_superseded, lock } = restored;
        let key = match self.ids.get(&id) {
            Some(key) => *key,
            None => {
                let entry = self.entry_named(&name);
                self.device(&terms.device).held += u128::from(terms.bytes);
                let key = self.add_version(entry, id, terms, digest, word);
                self.place_restored(key, is_superseded);
                if word.state == PageState::Torn {
                    self.version_mut(key).torn_by = Some(writer_pid);
                }
                let is_writing = word.state == PageState::Writing;
                if self.settles_at.is_some() {
                    let unknown = if is_writing { Lock::Write } else { Lock::Read };
                    self.version_mut(key).lock.take(GHOST, unknown);
                } else if is_writing && lock != Lock::Write {
                    self.tear(key, writer_pid);
                }
                key
            }
        };
        self.hold(client, key);
        let version = self.version_mut(key);
        let of_ghost = version.lock.held(GHOST);
        if lock == Lock::Write {
            version.lock.release(GHOST);
        }
        let is_locked = version.lock.take(client, lock);
        if lock == Lock::Write && !is_locked {
            version.lock.take(GHOST, of_ghost);
        }
        let lock = if is_locked { lock } else { Lock::None };
        self.reply(client, Outcome::Restored { version: key, lock });
        let entry = self.version(key).entry;
        if let Some(current) = self.entry(entry).current {
            for waiting in std::mem::take(&mut self.entry(entry).opens) {
                self.end_wait(waiting);
                self.hold(waiting, current);
                self.reply(waiting, Outcome::Opened(current));
            }
        }
        self.notify(entry);
        self.expected_holds = self.expected_holds.saturating_sub(1);
        if self.expected_holds == 0 {
            // All are there: nothing has to wait any longer.
            self.settles_at = self.settles_at.map(|_| self.now);
        }
        key
    }

    /// Returns names after `after` with what is known of them, `most` at most.
    pub fn list(&self, after: &str, most: usize) -> Vec<Status> {
        use std::ops::Bound::{Excluded, Unbounded};
        let later = self.names.range::<str, _>((Excluded(after), Unbounded));
        later.take(most).map(|(name, entry)| self.status(name, &self.entries[entry])).collect()
    }

    fn status(&self, name: &str, entry: &Entry) -> Status {
        let version = entry.current.map(|key| self.version(key));
        let current = version.map(|version| CurrentStatus {
            terms: version.terms.clone(),
            epoch: version.epoch,
            is_torn: version.torn_by.is_some(),
            holders: version
                .holders
                .iter()
                .take(MAX_HOLDERS)
                .map(|client| Holder { pid: self.pid(*client), lock: version.lock.held(*client) })
                .collect(),
            holders_len: version.holders.len() as u64,
            idle_ns: version.idle_since.map(|since| self.now.saturating_sub(since)),
        });
        let lock_waits = version.map_or(0, |version| version.lock.waiting_len());
        Status {
            name: name.to_owned(),
            waiting: (lock_waits + entry.build.waiting_len()) as u64,
            draft_pid: entry.build.writer().filter(|w| *w != GHOST).map(|writer| self.pid(writer)),
            superseded: entry.versions - u64::from(current.is_some()),
            current,
        }
    }

    // --- Time ---

    /// Ends waits and entries whose time has come.
    pub fn tick(&mut self) {
        if self.settles_at.is_some_and(|at| at <= self.now) {
            self.settle();
        }
        while let Some(&(at, client)) = self.timers.first()
            && at <= self.now
        {
            let (_, wait) = self.client(client).wait.expect("a timer is of a wait");
            let failure = match wait {
                Wait::Open(_) => Failure::NoSuchEntry,
                Wait::Build { entry, .. } => {
                    let pids = self.pids(self.entries[&entry].build.holders());
                    Failure::Busy { pids }
                }
                Wait::Lock { version, .. } => {
                    let pids = self.pids(self.version(version).lock.holders());
                    Failure::Busy { pids }
                }
                Wait::Newer { entry, .. } => {
                    Failure::NotNewer { epoch: self.current_epoch(entry).unwrap_or(0) }
                }
            };
            self.fail(client, failure);
            self.cancel(client);
        }
        while let Some(&(at, key)) = self.expiries.first()
            && at <= self.now
        {
            self.drop_current(key);
        }
    }

    /// Ends the time in which clients of an earlier keeper may restore what they held.
    fn settle(&mut self) {
        self.settles_at = None;
        let keys: Vec<VersionKey> = self.versions.keys().copied().collect();
        for key in keys {
            let version = self.version_mut(key);
            let of_ghost = version.lock.held(GHOST);
            version.lock.release(GHOST);
            if of_ghost == Lock::Write {
                self.tear(key, 0);
            }
            self.grant_locks(key);
        }
        let entries: Vec<EntryKey> = self.names.values().copied().collect();
        for entry in entries {
            for client in std::mem::take(&mut self.entry(entry).opens) {
                self.end_wait(client);
                self.fail(client, Failure::NoSuchEntry);
            }
            self.entry(entry).build.release(GHOST);
            self.grant_build(entry);
            self.refresh_entry(entry);
        }
    }

    fn wait(&mut self, client: Client, until: u64, wait: Wait) {
        self.timers.insert((until, client));
        self.client(client).wait = Some((until, wait));
    }

    fn end_wait(&mut self, client: Client) -> Option<Wait> {
        let (until, wait) = self.clients.get_mut(&client)?.wait.take()?;
        self.timers.remove(&(until, client));
        Some(wait)
    }

    // --- Grants ---

    fn grant_locks(&mut self, key: VersionKey) {
        while let Some(client) = self.version_mut(key).lock.grant_next() {
            self.end_wait(client);
            let epoch = self.version(key).epoch;
            self.reply(client, Outcome::Locked(epoch));
        }
        let version = self.version_mut(key);
        let writers = version.lock.waiting_writers();
        if version.shown_writers != writers {
            version.shown_writers = writers;
            self.effects.push(Effect::Page { version: key, at: page::WRITERS, value: writers });
        }
    }

    fn grant_build(&mut self, entry: EntryKey) {
        while let Some(client) = self.entry(entry).build.grant_next() {
            self.end_wait(client);
            if self.grant_draft(client) {
                break;
            }
        }
        self.refresh_current(entry);
    }

    /// Gives the right to build to a client that is at its front. Returns false if the device is full.
    fn grant_draft(&mut self, client: Client) -> bool {
        let Some(Role::Draft { entry, terms, .. }) = self.role(client).cloned() else {
            panic!("client {client} has no draft")
        };
        // What is replaced is not evicted for what replaces it.
        self.refresh_current(entry);
        if let Err(failure) = self.make_room(&terms.device, terms.bytes) {
            self.entry(entry).build.release(client);
            self.set_role(client, Role::New);
            self.refresh_current(entry);
            self.fail(client, failure);
            return false;
        }
        self.device(&terms.device).held += u128::from(terms.bytes);
        self.set_role(client, Role::Draft { entry, terms, is_granted: true });
        let current = self.entry(entry).current.map(|key| self.version(key));
        let current = current.map(|version| (version.epoch, version.digest));
        self.reply(client, Outcome::Granted { current });
        true
    }

    /// Takes the client's lock or request back. What it wrote is torn.
    fn unlock(&mut self, key: VersionKey, client: Client, pid: u32, is_written: bool) {
        let lock = &mut self.version_mut(key).lock;
        let held = lock.held(client);
        lock.release(client);
        if held == Lock::Write && is_written {
            self.tear(key, pid);
        }
    }

    /// Marks a version whose writer ended without a commit. Waiting readers fail.
    fn tear(&mut self, key: VersionKey, pid: u32) {
        let version = self.version_mut(key);
        version.torn_by = Some(pid);
        let epoch = version.epoch;
        let readers: Vec<Client> = version
            .lock
            .waiting()
            .filter(|(_, lock)| *lock == Lock::Read)
            .map(|(client, _)| client)
            .collect();
        self.show_word(key);
        for reader in readers {
            self.version_mut(key).lock.cancel(reader);
            self.end_wait(reader);
            self.fail(reader, Failure::Torn { epoch, pid });
        }
    }

    fn notify(&mut self, entry: EntryKey) {
        let Some(epoch) = self.current_epoch(entry) else { return };
        let is_newer = |client: &Client| match self.clients[client].wait {
            Some((_, Wait::Newer { than, .. })) => epoch > than,
            _ => false,
        };
        let watchers = &self.entries[&entry].watchers;
        let woken: Vec<Client> = watchers.iter().copied().filter(is_newer).collect();
        for client in woken {
            self.entry(entry).watchers.remove(&client);
            self.end_wait(client);
            self.reply(client, Outcome::Newer(epoch));
        }
    }

    // --- Versions ---

    fn add_version(
        &mut self,
        entry: EntryKey,
        id: VersionId,
        terms: Terms,
        digest: Digest,
        word: Word,
    ) -> VersionKey {
        self.last_key += 1;
        let key = self.last_key;
        let version = Version {
            entry,
            id,
            terms,
            digest,
            epoch: word.epoch,
            torn_by: None,
            lock: LockQueue::default(),
            holders: BTreeSet::new(),
            is_current: false,
            idle_since: None,
            shown_writers: 0,
        };
        self.versions.insert(key, version);
        self.ids.insert(id, key);
        let of_entry = self.entry(entry);
        of_entry.versions += 1;
        of_entry.last_epoch = of_entry.last_epoch.max(word.epoch);
        key
    }

    fn make_current(&mut self, key: VersionKey) {
        let entry = self.version(key).entry;
        let older = self.entry(entry).current.replace(key);
        self.version_mut(key).is_current = true;
        let building: Vec<Client> =
            self.entry(entry).build.waiting().map(|(client, _)| client).collect();
        for client in building {
            if let Some((_, Wait::Build { unless_current: true, .. })) = self.client(client).wait {
                self.entry(entry).build.cancel(client);
                self.end_wait(client);
                self.set_role(client, Role::New);
                self.fail(client, Failure::Exists);
            }
        }
        if let Some(older) = older {
            self.supersede(older);
        }
    }

    /// The highest epoch is current, unless a draft was committed meanwhile.
    fn place_restored(&mut self, key: VersionKey, is_superseded: bool) {
        let entry = self.version(key).entry;
        let epoch = self.version(key).epoch;
        let is_newest = self.current_epoch(entry).is_none_or(|current| current < epoch);
        if !is_superseded && is_newest && !self.entry(entry).is_built_here {
            self.make_current(key);
        } else {
            self.effects.push(Effect::Page { version: key, at: page::SUPERSEDED, value: 1 });
        }
    }

    /// Ends that a version is current; the entry has another one, or none, already.
    fn supersede(&mut self, key: VersionKey) {
        self.version_mut(key).is_current = false;
        self.effects.push(Effect::Page { version: key, at: page::SUPERSEDED, value: 1 });
        let waiting: Vec<Client> =
            self.version(key).lock.waiting().map(|(client, _)| client).collect();
        for client in waiting {
            let wait = self.clients.get(&client).and_then(|state| state.wait);
            if let Some((_, Wait::Lock { only_current: true, .. })) = wait {
                self.version_mut(key).lock.cancel(client);
                self.end_wait(client);
                self.fail(client, Failure::Superseded);
            }
        }
        self.grant_locks(key);
        self.refresh_version(key);
    }

    fn hold(&mut self, client: Client, key: VersionKey) {
        self.set_role(client, Role::Hold(key));
        self.holds += 1;
        self.version_mut(key).holders.insert(client);
        self.refresh_version(key);
    }

    /// Drops a version that is neither current nor held, and counts one that no client holds as idle.
    fn refresh_version(&mut self, key: VersionKey) {
        let version = self.version(key);
        let (entry, is_unheld) = (version.entry, version.holders.is_empty());
        if !version.is_current && is_unheld {
            self.set_idle(key, false);
            let version = self.versions.remove(&key).expect("it was there");
            self.ids.remove(&version.id);
            self.device(&version.terms.device).held -= u128::from(version.terms.bytes);
            self.forget_device(&version.terms.device);
            self.effects.push(Effect::Dropped(key));
            self.entry(entry).versions -= 1;
            return self.refresh_entry(entry);
        }
        let is_built = self.entries[&entry].build.writer().is_some_and(|writer| writer != GHOST);
        let is_idle = self.version(key).is_current && is_unheld && !is_built;
        self.set_idle(key, is_idle);
    }

    fn refresh_current(&mut self, entry: EntryKey) {
        if let Some(key) = self.entries.get(&entry).and_then(|entry| entry.current) {
            self.refresh_version(key);
        }
    }

    fn set_idle(&mut self, key: VersionKey, is_idle: bool) {
        let now = self.now;
        let version = self.versions.get_mut(&key).expect("the caller has its key");
        if version.idle_since.is_some() == is_idle {
            return;
        }
        let since = version.idle_since.unwrap_or(now);
        version.idle_since = is_idle.then_some(now);
        let Terms { bytes, priority, kept_for_ns, .. } = version.terms;
        let device = self.devices.entry(version.terms.device.clone()).or_default();
        let expiry = kept_for_ns.map(|ns| (since.saturating_add(ns), key));
        if is_idle {
            device.idle.insert((priority, since, key));
            device.idle_bytes += u128::from(bytes);
            self.expiries.extend(expiry);
        } else {
            device.idle.remove(&(priority, since, key));
            device.idle_bytes -= u128::from(bytes);
            expiry.map(|expiry| self.expiries.remove(&expiry));
        }
    }

    fn evict_one(&mut self, device: &str) -> Option<u64> {
        let key = self.devices.get(device)?.idle.first()?.2;
        let bytes = self.version(key).terms.bytes;
        self.drop_current(key);
        Some(bytes)
    }

    fn drop_current(&mut self, key: VersionKey) {
        let entry = self.version(key).entry;
        self.entry(entry).current = None;
        self.version_mut(key).is_current = false;
        self.refresh_version(key);
    }

    /// Evicts idle entries until `bytes` fit. Evicts nothing if they cannot.
    fn make_room(&mut self, device: &str, bytes: u64) -> Result<(), Failure> {
        let Some(limit) = self.limit else { return Ok(()) };
        let of_device = self.device(device);
        let (held, evictable) = (of_device.held, of_device.idle_bytes);
        if held - evictable + u128::from(bytes) > u128::from(limit) {
            self.forget_device(device);
            let [held, evictable] =
                [held, evictable].map(|bytes| u64::try_from(bytes).unwrap_or(u64::MAX));
            return Err(Failure::Full { limit, held, evictable });
        }
        while self.device(device).held + u128::from(bytes) > u128::from(limit) {
            self.evict_one(device).expect("enough of what is held is idle");
        }
        Ok(())
    }

    // --- Tables ---

    fn entry_named(&mut self, name: &str) -> EntryKey {
        if let Some(entry) = self.names.get(name) {
            return *entry;
        }
        self.last_key += 1;
        let mut entry = Entry { name: name.to_owned(), ..Entry::default() };
        if self.settles_at.is_some() {
            entry.build.take(GHOST, Lock::Write);
        }
        self.names.insert(name.to_owned(), self.last_key);
        self.entries.insert(self.last_key, entry);
        self.last_key
    }

    /// Forgets a name that has no version and no client.
    fn refresh_entry(&mut self, key: EntryKey) {
        let Some(entry) = self.entries.get(&key) else { return };
        let is_unused = entry.versions == 0
            && entry.build.is_free()
            && entry.watchers.is_empty()
            && entry.opens.is_empty();
        if is_unused && let Some(entry) = self.entries.remove(&key) {
            self.names.remove(&entry.name);
        }
    }

    fn forget_device(&mut self, name: &str) {
        if self.devices.get(name).is_some_and(|device| device.held == 0 && device.idle.is_empty()) {
            self.devices.remove(name);
        }
    }

    fn current_epoch(&self, entry: EntryKey) -> Option<u64> {
        self.entries[&entry].current.map(|key| self.version(key).epoch)
    }

    fn show_word(&mut self, key: VersionKey) {
        let version = self.version(key);
        let state = if version.torn_by.is_some() { PageState::Torn } else { PageState::Whole };
        let value = Word { epoch: version.epoch, state }.encode();
        self.effects.push(Effect::Page { version: key, at: page::WORD, value });
    }

    fn pids(&self, clients: impl Iterator<Item = Client>) -> Vec<u32> {
        let known = clients.filter_map(|client| self.clients.get(&client));
        known.take(MAX_PIDS).map(|state| state.pid).collect()
    }

    fn pid(&self, client: Client) -> u32 {
        self.clients.get(&client).map_or(0, |state| state.pid)
    }

    fn client(&mut self, client: Client) -> &mut ClientState {
        self.clients.get_mut(&client).expect("a request names a client that began")
    }

    fn set_role(&mut self, client: Client, role: Role) {
        self.client(client).role = role;
    }

    fn entry(&mut self, key: EntryKey) -> &mut Entry {
        self.entries.get_mut(&key).expect("an entry that is referred to exists")
    }

    fn version(&self, key: VersionKey) -> &Version {
        self.versions.get(&key).expect("a version that is referred to exists")
    }

    fn version_mut(&mut self, key: VersionKey) -> &mut Version {
        self.versions.get_mut(&key).expect("a version that is referred to exists")
    }

    fn device(&mut self, name: &str) -> &mut Device {
        if !self.devices.contains_key(name) {
            self.devices.insert(name.to_owned(), Device::default());
        }
        self.devices.get_mut(name).expect("it was just added")
    }

    fn reply(&mut self, client: Client, outcome: Outcome) {
        self.effects.push(Effect::Reply(client, outcome));
    }

    fn fail(&mut self, client: Client, failure: Failure) {
        self.reply(client, Outcome::Failed(failure));
    }
}
