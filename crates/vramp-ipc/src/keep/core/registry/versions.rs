//! Which versions exist, which are current, and which are idle.

use std::collections::BTreeSet;

use super::types::{
    Client, Digest, Effect, Failure, GHOST, MAX_PIDS, Outcome, Terms, VersionId, VersionKey,
};
use super::{ClientState, Device, Entry, EntryKey, Registry, Role, Version, Wait};
use crate::keep::core::lock::{Lock, LockQueue};
use crate::keep::core::page::{self, PageState, Word};

impl Registry {
    pub(super) fn add_version(
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

    pub(super) fn make_current(&mut self, key: VersionKey) {
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
    pub(super) fn place_restored(&mut self, key: VersionKey, is_superseded: bool) {
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
    pub(super) fn supersede(&mut self, key: VersionKey) {
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

    pub(super) fn hold(&mut self, client: Client, key: VersionKey) {
        self.set_role(client, Role::Hold(key));
        self.holds += 1;
        self.version_mut(key).holders.insert(client);
        self.refresh_version(key);
    }

    /// Drops a version that is neither current nor held, and counts one that no client holds as idle.
    pub(super) fn refresh_version(&mut self, key: VersionKey) {
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

    pub(super) fn refresh_current(&mut self, entry: EntryKey) {
        if let Some(key) = self.entries.get(&entry).and_then(|entry| entry.current) {
            self.refresh_version(key);
        }
    }

    pub(super) fn set_idle(&mut self, key: VersionKey, is_idle: bool) {
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

    pub(super) fn evict_one(&mut self, device: &str) -> Option<u64> {
        let key = self.devices.get(device)?.idle.first()?.2;
        let bytes = self.version(key).terms.bytes;
        self.drop_current(key);
        Some(bytes)
    }

    pub(super) fn drop_current(&mut self, key: VersionKey) {
        let entry = self.version(key).entry;
        self.entry(entry).current = None;
        self.version_mut(key).is_current = false;
        self.refresh_version(key);
    }

    /// Evicts idle entries until `bytes` fit. Evicts nothing if they cannot.
    pub(super) fn make_room(&mut self, device: &str, bytes: u64) -> Result<(), Failure> {
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

    pub(super) fn entry_named(&mut self, name: &str) -> EntryKey {
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
    pub(super) fn refresh_entry(&mut self, key: EntryKey) {
        let Some(entry) = self.entries.get(&key) else { return };
        let is_unused = entry.versions == 0
            && entry.build.is_free()
            && entry.watchers.is_empty()
            && entry.opens.is_empty();
        if is_unused && let Some(entry) = self.entries.remove(&key) {
            self.names.remove(&entry.name);
        }
    }

    pub(super) fn forget_device(&mut self, name: &str) {
        if self.devices.get(name).is_some_and(|device| device.held == 0 && device.idle.is_empty()) {
            self.devices.remove(name);
        }
    }

    pub(super) fn current_epoch(&self, entry: EntryKey) -> Option<u64> {
        self.entries[&entry].current.map(|key| self.version(key).epoch)
    }

    pub(super) fn show_word(&mut self, key: VersionKey) {
        let version = self.version(key);
        let state = if version.torn_by.is_some() { PageState::Torn } else { PageState::Whole };
        let value = Word { epoch: version.epoch, state }.encode();
        self.effects.push(Effect::Page { version: key, at: page::WORD, value });
    }

    pub(super) fn pids(&self, clients: impl Iterator<Item = Client>) -> Vec<u32> {
        let known = clients.filter_map(|client| self.clients.get(&client));
        known.take(MAX_PIDS).map(|state| state.pid).collect()
    }

    pub(super) fn pid(&self, client: Client) -> u32 {
        self.clients.get(&client).map_or(0, |state| state.pid)
    }

    pub(super) fn client(&mut self, client: Client) -> &mut ClientState {
        self.clients.get_mut(&client).expect("a request names a client that began")
    }

    pub(super) fn set_role(&mut self, client: Client, role: Role) {
        self.client(client).role = role;
    }

    pub(super) fn entry(&mut self, key: EntryKey) -> &mut Entry {
        self.entries.get_mut(&key).expect("an entry that is referred to exists")
    }

    pub(super) fn version(&self, key: VersionKey) -> &Version {
        self.versions.get(&key).expect("a version that is referred to exists")
    }

    pub(super) fn version_mut(&mut self, key: VersionKey) -> &mut Version {
        self.versions.get_mut(&key).expect("a version that is referred to exists")
    }

    pub(super) fn device(&mut self, name: &str) -> &mut Device {
        if !self.devices.contains_key(name) {
            self.devices.insert(name.to_owned(), Device::default());
        }
        self.devices.get_mut(name).expect("it was just added")
    }

    pub(super) fn reply(&mut self, client: Client, outcome: Outcome) {
        self.effects.push(Effect::Reply(client, outcome));
    }

    pub(super) fn fail(&mut self, client: Client, failure: Failure) {
        self.reply(client, Outcome::Failed(failure));
    }
}
