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

mod grants;
pub mod types;
mod versions;

use std::collections::{BTreeMap, BTreeSet};

use super::lock::{Lock, LockQueue};
use super::page::{PageState, Word};
use types::{
    Client, CurrentStatus, Digest, Effect, Failure, GHOST, Holder, MAX_HOLDERS, NewVersion,
    Outcome, Restored, Status, Terms, VersionId, VersionKey,
};

type EntryKey = u64;

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

    /// Commits what the client wrote in place since `epoch`. Fails if it has no write lock, or if an earlier request,
    /// whose reply it did not read, has committed. Then it has no lock any more.
    pub fn update(&mut self, client: Client, key: VersionKey, then: Lock, epoch: u64) {
        let version = self.version_mut(key);
        if version.lock.held(client) != Lock::Write || version.epoch != epoch {
            version.lock.release(client);
            self.fail(client, Failure::NotLocked);
            return self.grant_locks(key);
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

    /// Takes the client's version off its name, if it is the current one.
    pub fn remove_held(&mut self, client: Client, key: VersionKey) {
        let is_current = self.version(key).is_current;
        if is_current {
            let entry = self.version(key).entry;
            self.entry(entry).current = None;
            self.supersede(key);
        }
        self.reply(client, Outcome::Done(u64::from(is_current)));
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
}
