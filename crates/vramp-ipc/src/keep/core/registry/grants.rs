//! Who gets what others leave, and when waits end.

use super::types::{Client, Effect, Failure, GHOST, Outcome, VersionKey};
use super::{EntryKey, Registry, Role, Wait};
use crate::keep::core::lock::Lock;
use crate::keep::core::page;

impl Registry {
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
    pub(super) fn settle(&mut self) {
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

    pub(super) fn wait(&mut self, client: Client, until: u64, wait: Wait) {
        self.timers.insert((until, client));
        self.client(client).wait = Some((until, wait));
    }

    pub(super) fn end_wait(&mut self, client: Client) -> Option<Wait> {
        let (until, wait) = self.clients.get_mut(&client)?.wait.take()?;
        self.timers.remove(&(until, client));
        Some(wait)
    }

    pub(super) fn grant_locks(&mut self, key: VersionKey) {
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

    pub(super) fn grant_build(&mut self, entry: EntryKey) {
        while let Some(client) = self.entry(entry).build.grant_next() {
            self.end_wait(client);
            if self.grant_draft(client) {
                break;
            }
        }
        self.refresh_current(entry);
    }

    /// Gives the right to build to a client that is at its front. Returns false if the device is full.
    pub(super) fn grant_draft(&mut self, client: Client) -> bool {
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
    pub(super) fn unlock(&mut self, key: VersionKey, client: Client, pid: u32, is_written: bool) {
        let lock = &mut self.version_mut(key).lock;
        let held = lock.held(client);
        lock.release(client);
        if held == Lock::Write && is_written {
            self.tear(key, pid);
        }
    }

    /// Marks a version whose writer ended without a commit. Waiting readers fail.
    pub(super) fn tear(&mut self, key: VersionKey, pid: u32) {
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

    pub(super) fn notify(&mut self, entry: EntryKey) {
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
}
