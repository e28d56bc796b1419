//! The table of names once more, without any index: what follows from a request is searched for until nothing is
//! left. Random programs compare the two.

use std::collections::BTreeMap;

use super::lock::Lock;
use super::page::{self, PageState, Word};
use super::registry::Registry;
use super::registry::types::{
    Client, Digest, Effect, Failure, GHOST, NewVersion, Outcome, Restored, Terms, VersionId,
    VersionKey,
};

type Replies = Vec<(Client, Said)>;

/// A reply, with ids instead of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Opened(VersionId),
    Restored(VersionId, Lock),
    Other(Outcome),
}

#[derive(Clone, Debug)]
struct Version {
    name: String,
    id: VersionId,
    terms: Terms,
    digest: Digest,
    epoch: u64,
    torn_by: Option<u32>,
    is_current: bool,
    holders: Vec<Client>,
    locks: Vec<(Client, Lock)>,
    queue: Vec<(Client, Lock, bool)>,
    idle_since: Option<u64>,
}

impl Version {
    fn held(&self, client: Client) -> Lock {
        self.locks.iter().find(|(owner, _)| *owner == client).map_or(Lock::None, |(_, lock)| *lock)
    }

    fn is_free_for(&self, lock: Lock) -> bool {
        match lock {
            Lock::None => true,
            Lock::Read => self.locks.iter().all(|(_, held)| *held == Lock::Read),
            Lock::Write => self.locks.is_empty(),
        }
    }

    fn unlock(&mut self, client: Client) {
        self.locks.retain(|(owner, _)| *owner != client);
        self.queue.retain(|(owner, _, _)| *owner != client);
    }

    fn lock(&mut self, client: Client, lock: Lock) -> bool {
        let is_free = self.is_free_for(lock);
        if is_free && lock != Lock::None {
            self.locks.push((client, lock));
        }
        is_free
    }
}

#[derive(Clone, Debug, Default)]
struct Entry {
    last_epoch: u64,
    is_built_here: bool,
    builder: Option<Client>,
    builders: Vec<(Client, bool)>,
    watchers: Vec<(Client, u64)>,
    opens: Vec<Client>,
}

#[derive(Clone, Debug, Default)]
struct Naive {
    limit: Option<u64>,
    settles_at: Option<u64>,
    expected_holds: u64,
    now: u64,
    entries: BTreeMap<String, Entry>,
    versions: Vec<Version>,
    /// Drafts: those that wait and those that have the right.
    drafts: BTreeMap<Client, (String, Terms)>,
    waits: BTreeMap<Client, u64>,
    pids: BTreeMap<Client, u32>,
    said: Replies,
}

impl Naive {
    fn say(&mut self, client: Client, outcome: Outcome) {
        self.said.push((client, Said::Other(outcome)));
    }

    fn fail(&mut self, client: Client, failure: Failure) {
        self.say(client, Outcome::Failed(failure));
    }

    fn current(&self, name: &str) -> Option<usize> {
        self.versions.iter().position(|version| version.is_current && version.name == name)
    }

    fn held(&self, client: Client) -> Option<usize> {
        self.versions.iter().position(|version| version.holders.contains(&client))
    }

    fn entry(&mut self, name: &str) -> &mut Entry {
        let is_settled = self.settles_at.is_none();
        self.entries.entry(name.to_owned()).or_insert_with(|| Entry {
            builder: (!is_settled).then_some(GHOST),
            ..Entry::default()
        })
    }

    fn is_idle(&self, version: &Version) -> bool {
        let builder = self.entries[&version.name].builder;
        version.is_current && version.holders.is_empty() && matches!(builder, None | Some(GHOST))
    }

    fn held_bytes(&self, device: &str) -> u64 {
        let versions = self.versions.iter().map(|version| &version.terms);
        let builders = self.entries.values().filter_map(|entry| entry.builder);
        let drafts = builders.filter_map(|client| self.drafts.get(&client)).map(|(_, terms)| terms);
        versions.chain(drafts).filter(|terms| terms.device == device).map(|terms| terms.bytes).sum()
    }

    fn idle(&self, device: &str) -> Vec<usize> {
        let is_idle = |at: &usize| {
            let version = &self.versions[*at];
            version.terms.device == device && self.is_idle(version)
        };
        (0..self.versions.len()).filter(is_idle).collect()
    }

    fn evict_one(&mut self, device: &str) -> Option<u64> {
        let idle = self.idle(device);
        let first = idle.into_iter().min_by_key(|at| {
            let version = &self.versions[*at];
            (version.terms.priority, version.idle_since.unwrap_or(self.now), *at)
        })?;
        Some(self.versions.remove(first).terms.bytes)
    }

    fn make_room(&mut self, device: &str, bytes: u64) -> Result<(), Failure> {
        let Some(limit) = self.limit else { return Ok(()) };
        let held = self.held_bytes(device);
        let evictable = self.idle(device).iter().map(|at| self.versions[*at].terms.bytes).sum();
        if held - evictable + bytes > limit {
            return Err(Failure::Full { limit, held, evictable });
        }
        while self.held_bytes(device) + bytes > limit {
            self.evict_one(device).unwrap();
        }
        Ok(())
    }

    fn make_current(&mut self, at: usize) {
        let name = self.versions[at].name.clone();
        for version in &mut self.versions {
            version.is_current &= version.name != name;
        }
        self.versions[at].is_current = true;
    }

    /// Does one thing that follows from the state. Returns false if nothing does.
    fn follow(&mut self) -> bool {
        self.follow_failures() || self.follow_grants() || self.follow_ends()
    }

    fn follow_failures(&mut self) -> bool {
        for at in 0..self.versions.len() {
            let version = &self.versions[at];
            let (epoch, torn_by, is_current) = (version.epoch, version.torn_by, version.is_current);
            for (client, lock, only_current) in version.queue.clone() {
                let failure = match (lock, torn_by) {
                    _ if only_current && !is_current => Failure::Superseded,
                    (Lock::Read, Some(pid)) => Failure::Torn { epoch, pid },
                    _ => continue,
                };
                self.versions[at].queue.retain(|(owner, _, _)| *owner != client);
                self.waits.remove(&client);
                self.fail(client, failure);
                return true;
            }
        }
        for name in self.entries.keys().cloned().collect::<Vec<_>>() {
            let has_current = self.current(&name).is_some();
            let entry = self.entries.get_mut(&name).unwrap();
            let found = entry.builders.iter().position(|(_, unless)| has_current && *unless);
            if let Some(found) = found {
                let (client, _) = entry.builders.remove(found);
                self.waits.remove(&client);
                self.drafts.remove(&client);
                self.fail(client, Failure::Exists);
                return true;
            }
        }
        false
    }

    fn follow_grants(&mut self) -> bool {
        for at in 0..self.versions.len() {
            let Some(&(client, lock, _)) = self.versions[at].queue.first() else { continue };
            if self.versions[at].lock(client, lock) {
                self.versions[at].queue.remove(0);
                self.waits.remove(&client);
                let epoch = self.versions[at].epoch;
                self.say(client, Outcome::Locked(epoch));
                return true;
            }
        }
        for name in self.entries.keys().cloned().collect::<Vec<_>>() {
            let entry = self.entries.get_mut(&name).unwrap();
            if entry.builder.is_none() && !entry.builders.is_empty() {
                let (client, _) = entry.builders.remove(0);
                self.waits.remove(&client);
                self.grant_draft(client);
                return true;
            }
        }
        false
    }

    fn grant_draft(&mut self, client: Client) {
        let (name, terms) = self.drafts.remove(&client).unwrap();
        self.entry(&name).builder = Some(client);
        // Its bytes are not counted before they are granted.
        let room = self.make_room(&terms.device, terms.bytes);
        let current = self.current(&name);
        if let Err(failure) = room {
            self.entry(&name).builder = None;
            if let Some(at) = current {
                // It was looked at.
                self.versions[at].idle_since = None;
            }
            return self.fail(client, failure);
        }
        self.drafts.insert(client, (name, terms));
        let current = current.map(|at| (self.versions[at].epoch, self.versions[at].digest));
        self.say(client, Outcome::Granted { current });
    }

    fn follow_ends(&mut self) -> bool {
        for name in self.entries.keys().cloned().collect::<Vec<_>>() {
            let Some(at) = self.current(&name) else { continue };
            let (epoch, id) = (self.versions[at].epoch, self.versions[at].id);
            let entry = self.entries.get_mut(&name).unwrap();
            if let Some(client) = entry.opens.pop() {
                self.waits.remove(&client);
                self.versions[at].holders.push(client);
                self.said.push((client, Said::Opened(id)));
                return true;
            }
            if let Some(found) = entry.watchers.iter().position(|(_, than)| epoch > *than) {
                let (client, _) = entry.watchers.remove(found);
                self.waits.remove(&client);
                self.say(client, Outcome::Newer(epoch));
                return true;
            }
        }
        let unused = |version: &Version| !version.is_current && version.holders.is_empty();
        if let Some(at) = self.versions.iter().position(unused) {
            self.versions.remove(at);
            return true;
        }
        let before = self.entries.len();
        let versions = &self.versions;
        self.entries.retain(|name, entry| {
            versions.iter().any(|version| version.name == *name)
                || entry.builder.is_some()
                || !(entry.builders.is_empty()
                    && entry.watchers.is_empty()
                    && entry.opens.is_empty())
        });
        self.entries.len() != before
    }

    fn finish(&mut self) -> Replies {
        while self.follow() {}
        for at in 0..self.versions.len() {
            let is_idle = self.is_idle(&self.versions[at]);
            let version = &mut self.versions[at];
            version.idle_since = is_idle.then(|| version.idle_since.unwrap_or(self.now));
        }
        std::mem::take(&mut self.said)
    }

    // --- Requests ---

    fn cancel(&mut self, client: Client) {
        if self.waits.remove(&client).is_none() {
            return;
        }
        for entry in self.entries.values_mut() {
            if entry.builders.iter().any(|(owner, _)| *owner == client) {
                self.drafts.remove(&client);
            }
            entry.builders.retain(|(owner, _)| *owner != client);
            entry.watchers.retain(|(owner, _)| *owner != client);
            entry.opens.retain(|owner| *owner != client);
        }
        for version in &mut self.versions {
            version.queue.retain(|(owner, _, _)| *owner != client);
        }
    }

    fn open(&mut self, client: Client, name: &str, until: u64) {
        if let Some(at) = self.current(name) {
            self.versions[at].holders.push(client);
            self.said.push((client, Said::Opened(self.versions[at].id)));
        } else if let Some(settles_at) = self.settles_at {
            self.entry(name).opens.push(client);
            self.waits.insert(client, until.min(settles_at));
        } else {
            self.fail(client, Failure::NoSuchEntry);
        }
    }

    fn draft(&mut self, client: Client, name: &str, terms: Terms, until: u64, unless: bool) {
        if unless && self.current(name).is_some() {
            return self.fail(client, Failure::Exists);
        }
        self.drafts.insert(client, (name.to_owned(), terms));
        self.entry(name).builders.push((client, unless));
        self.waits.insert(client, until);
    }

    fn commit(&mut self, client: Client, new: NewVersion, then: Lock) {
        let (name, mut terms) = self.drafts[&client].clone();
        if new.bytes > terms.bytes
            && let Err(failure) = self.make_room(&terms.device, new.bytes - terms.bytes)
        {
            return self.fail(client, failure);
        }
        self.drafts.remove(&client);
        terms.bytes = new.bytes;
        let entry = self.entry(&name);
        entry.builder = None;
        entry.is_built_here = true;
        entry.last_epoch += 1;
        let epoch = entry.last_epoch;
        let version = Version {
            name,
            id: new.id,
            terms,
            digest: new.digest,
            epoch,
            torn_by: None,
            is_current: false,
            holders: vec![client],
            locks: Vec::new(),
            queue: Vec::new(),
            idle_since: None,
        };
        self.versions.push(version);
        let at = self.versions.len() - 1;
        self.versions[at].lock(client, then);
        self.make_current(at);
        self.say(client, Outcome::Committed(epoch));
    }

    fn lock(&mut self, client: Client, lock: Lock, until: u64, only_current: bool) {
        let at = self.held(client).unwrap();
        let version = &mut self.versions[at];
        let epoch = version.epoch;
        match version.held(client) {
            held if held == lock => return self.say(client, Outcome::Locked(epoch)),
            Lock::Write => return self.fail(client, Failure::Uncommitted),
            _ => version.unlock(client),
        }
        if lock == Lock::None && (version.is_current || !only_current) {
            self.say(client, Outcome::Locked(epoch));
        } else {
            version.queue.push((client, lock, only_current));
            self.waits.insert(client, until);
        }
    }

    fn update(&mut self, client: Client, then: Lock, epoch: u64) {
        let at = self.held(client).unwrap();
        if self.versions[at].held(client) != Lock::Write || self.versions[at].epoch != epoch {
            self.versions[at].unlock(client);
            return self.fail(client, Failure::NotLocked);
        }
        let name = self.versions[at].name.clone();
        let entry = self.entry(&name);
        entry.last_epoch += 1;
        let epoch = entry.last_epoch;
        let version = &mut self.versions[at];
        version.epoch = epoch;
        version.torn_by = None;
        version.unlock(client);
        version.lock(client, then);
        self.say(client, Outcome::Committed(epoch));
    }

    fn leave_lock(&mut self, client: Client, is_written: bool) {
        let at = self.held(client).unwrap();
        let version = &mut self.versions[at];
        if version.held(client) == Lock::Write && is_written {
            version.torn_by = Some(self.pids[&client]);
        }
        version.unlock(client);
    }

    fn release(&mut self, client: Client, is_written: bool) {
        let at = self.held(client).unwrap();
        self.leave_lock(client, is_written);
        let epoch = self.versions[at].epoch;
        self.say(client, Outcome::Done(epoch));
    }

    fn wait_newer(&mut self, client: Client, than: u64, until: u64) {
        let name = self.versions[self.held(client).unwrap()].name.clone();
        self.entry(&name).watchers.push((client, than));
        self.waits.insert(client, until);
    }

    fn remove(&mut self, client: Client, name: &str) {
        match self.current(name) {
            None => self.fail(client, Failure::NoSuchEntry),
            Some(at) => {
                self.versions[at].is_current = false;
                self.say(client, Outcome::Done(1));
            }
        }
    }

    fn remove_held(&mut self, client: Client) {
        let at = self.held(client).unwrap();
        let was_current = std::mem::take(&mut self.versions[at].is_current);
        self.say(client, Outcome::Done(u64::from(was_current)));
    }

    fn evict(&mut self, client: Client, device: &str, bytes: u64) {
        let mut dropped = 0;
        while dropped < bytes
            && let Some(more) = self.evict_one(device)
        {
            dropped += more;
        }
        self.say(client, Outcome::Done(dropped));
    }

    fn restore(&mut self, client: Client, restored: Restored) {
        let found = self.versions.iter().position(|version| version.id == restored.id);
        let at = found.unwrap_or_else(|| {
            let Restored { name, id, terms, digest, word, writer_pid, is_superseded, lock } =
                restored.clone();
            let is_settled = self.settles_at.is_none();
            let entry = self.entry(&name);
            entry.last_epoch = entry.last_epoch.max(word.epoch);
            let is_built_here = entry.is_built_here;
            let current = self.current(&name).map(|at| self.versions[at].epoch);
            let is_current =
                !is_superseded && !is_built_here && current.is_none_or(|epoch| epoch < word.epoch);
            let is_writing = word.state == PageState::Writing;
            let is_torn =
                word.state == PageState::Torn || (is_settled && is_writing && lock != Lock::Write);
            let ghost = if is_writing { Lock::Write } else { Lock::Read };
            self.versions.push(Version {
                name,
                id,
                terms,
                digest,
                epoch: word.epoch,
                torn_by: is_torn.then_some(writer_pid),
                is_current: false,
                holders: Vec::new(),
                locks: if is_settled { Vec::new() } else { vec![(GHOST, ghost)] },
                queue: Vec::new(),
                idle_since: None,
            });
            let at = self.versions.len() - 1;
            if is_current {
                self.make_current(at);
            }
            at
        });
        let version = &mut self.versions[at];
        version.holders.push(client);
        let others = version.locks.iter().filter(|(owner, _)| *owner != GHOST).count();
        let granted = match restored.lock {
            Lock::Write if others == 0 => {
                version.locks.clear();
                version.lock(client, Lock::Write);
                Lock::Write
            }
            Lock::Read if version.lock(client, Lock::Read) => Lock::Read,
            _ => Lock::None,
        };
        let id = version.id;
        self.said.push((client, Said::Restored(id, granted)));
        self.expected_holds = self.expected_holds.saturating_sub(1);
        if self.expected_holds == 0 {
            self.settles_at = self.settles_at.map(|_| self.now);
        }
    }

    fn end(&mut self, client: Client, is_written: bool) {
        self.cancel(client);
        if let Some((name, _)) = self.drafts.remove(&client) {
            self.entry(&name).builder = None;
        }
        if let Some(at) = self.held(client) {
            self.leave_lock(client, is_written);
            self.versions[at].holders.retain(|owner| *owner != client);
        }
        self.pids.remove(&client);
    }

    fn pids_of(&self, clients: impl Iterator<Item = Client>) -> Vec<u32> {
        let mut clients: Vec<Client> = clients.filter(|client| *client != GHOST).collect();
        clients.sort_unstable();
        clients.iter().map(|client| self.pids[client]).collect()
    }

    fn time_out(&mut self, client: Client) {
        let of_entry = self.entries.iter().find_map(|(name, entry)| {
            if entry.opens.contains(&client) {
                return Some(Failure::NoSuchEntry);
            }
            if entry.builders.iter().any(|(owner, _)| *owner == client) {
                return Some(Failure::Busy { pids: self.pids_of(entry.builder.into_iter()) });
            }
            let epoch = self.current(name).map_or(0, |at| self.versions[at].epoch);
            let watches = entry.watchers.iter().any(|(owner, _)| *owner == client);
            watches.then_some(Failure::NotNewer { epoch })
        });
        let failure = of_entry.unwrap_or_else(|| {
            let at = self.held(client).unwrap();
            let owners = self.versions[at].locks.iter().map(|(owner, _)| *owner);
            Failure::Busy { pids: self.pids_of(owners) }
        });
        self.fail(client, failure);
        self.cancel(client);
    }

    fn tick(&mut self) {
        if self.settles_at.is_some_and(|at| at <= self.now) {
            self.settle();
        }
        while self.follow() {}
        loop {
            let due = self.waits.iter().map(|(client, until)| (*until, *client)).min();
            let Some((_, client)) = due.filter(|(until, _)| *until <= self.now) else { break };
            self.time_out(client);
            while self.follow() {}
        }
        let now = self.now;
        let is_over = |version: &Version| match (version.idle_since, version.terms.kept_for_ns) {
            (Some(since), Some(kept)) => since + kept <= now,
            _ => false,
        };
        self.versions.retain(|version| !is_over(version));
    }

    fn settle(&mut self) {
        self.settles_at = None;
        for version in &mut self.versions {
            if version.held(GHOST) == Lock::Write {
                version.torn_by = Some(0);
            }
            version.unlock(GHOST);
        }
        for name in self.entries.keys().cloned().collect::<Vec<_>>() {
            let entry = self.entries.get_mut(&name).unwrap();
            if entry.builder == Some(GHOST) {
                entry.builder = None;
            }
            for client in std::mem::take(&mut entry.opens) {
                self.waits.remove(&client);
                self.fail(client, Failure::NoSuchEntry);
            }
        }
    }
}

/// What pages say and which versions exist, as the effects tell it.
#[derive(Default)]
struct Pages {
    ids: BTreeMap<VersionKey, VersionId>,
    numbers: BTreeMap<VersionId, [u64; 3]>,
}

impl Pages {
    fn apply(&mut self, effects: Vec<Effect>) -> Replies {
        let mut said = Vec::new();
        for effect in effects {
            match effect {
                Effect::Reply(client, Outcome::Opened(key)) => {
                    said.push((client, Said::Opened(self.ids[&key])));
                }
                Effect::Reply(client, Outcome::Restored { version, lock }) => {
                    said.push((client, Said::Restored(self.ids[&version], lock)));
                }
                Effect::Reply(client, outcome) => said.push((client, Said::Other(outcome))),
                Effect::Page { version, at, value } => {
                    self.numbers.get_mut(&self.ids[&version]).unwrap()[at] = value;
                }
                Effect::Dropped(version) => {
                    let id = self.ids.remove(&version).unwrap();
                    self.numbers.remove(&id);
                }
            }
        }
        said
    }
}

struct Pair {
    registry: Registry,
    naive: Naive,
    pages: Pages,
    next_id: u8,
}

impl Pair {
    fn new(limit: Option<u64>, settles_at: Option<u64>, expected_holds: u64) -> Pair {
        Pair {
            registry: Registry::new(limit, settles_at, expected_holds),
            naive: Naive { limit, settles_at, expected_holds, ..Naive::default() },
            pages: Pages::default(),
            next_id: 0,
        }
    }

    fn add_page(&mut self, key: VersionKey, id: VersionId, word: Word, is_superseded: bool) {
        self.pages.ids.insert(key, id);
        self.pages.numbers.entry(id).or_insert([word.encode(), u64::from(is_superseded), 0]);
    }

    fn check(&mut self, did: &str) {
        let effects = self.registry.take_effects();
        let said = self.pages.apply(effects);
        let expected = self.naive.finish();
        let sorted = |mut replies: Replies| {
            replies.sort_by_key(|(client, _)| *client);
            replies
        };
        assert_eq!(sorted(said), sorted(expected), "{did}");
        for version in &self.naive.versions {
            let state = match version.torn_by {
                Some(_) => PageState::Torn,
                None => PageState::Whole,
            };
            let [word, superseded, writers] = self.pages.numbers[&version.id];
            let waiting = version.queue.iter().filter(|(_, lock, _)| *lock == Lock::Write).count();
            // The client's own writing is not on the keeper's side of the page.
            let shown = Word::decode(word);
            let is_same = shown.state == state || shown.state == PageState::Writing;
            assert!(shown.epoch == version.epoch && is_same, "{did}: {version:?} {shown:?}");
            assert_eq!((superseded, writers), (u64::from(!version.is_current), waiting as u64));
        }
        assert_eq!(self.pages.numbers.len(), self.naive.versions.len(), "{did}");
        let listed = self.registry.list("", 1000);
        let names: Vec<&String> = listed.iter().map(|status| &status.name).collect();
        assert_eq!(names, self.naive.entries.keys().collect::<Vec<_>>(), "{did}");
        for status in &listed {
            let at = self.naive.current(&status.name);
            let version = at.map(|at| &self.naive.versions[at]);
            let found = status.current.as_ref();
            assert_eq!(found.map(|current| current.epoch), version.map(|version| version.epoch));
            let idle = version.and_then(|version| version.idle_since);
            let idle = idle.map(|since| self.naive.now - since);
            assert_eq!(found.and_then(|current| current.idle_ns), idle, "{did}: {status:?}");
            let holders = version.map(|version| version.holders.len() as u64);
            assert_eq!(found.map(|current| current.holders_len), holders, "{did}");
            let same = self.naive.versions.iter().filter(|version| version.name == status.name);
            let older = same.filter(|version| !version.is_current).count() as u64;
            assert_eq!(status.superseded, older, "{did}");
            let builder = self.naive.entries[&status.name].builder.filter(|who| *who != GHOST);
            assert_eq!(status.draft_pid, builder.map(|who| self.naive.pids[&who]), "{did}");
        }
        let waits = self.naive.waits.values().copied();
        let expiries = self
            .naive
            .versions
            .iter()
            .filter_map(|version| Some(version.idle_since? + version.terms.kept_for_ns?));
        let next = waits.chain(expiries).chain(self.naive.settles_at).min();
        assert_eq!(self.registry.next_deadline(), next, "{did}");
    }

    fn step(&mut self, random: &mut fastrand::Rng) {
        let now = self.naive.now + u64::from(random.u8(0..3));
        self.naive.now = now;
        self.registry.set_now(now);
        self.registry.tick();
        self.naive.tick();
        self.check("tick");
        let client = random.u64(1..=8);
        let name = ["a", "b", "c"][random.usize(..3)];
        let device = ["d", "e"][random.usize(..2)];
        let until = now + random.u64(0..12);
        let lock = [Lock::None, Lock::Read, Lock::Write][random.usize(..3)];
        let is_odd = random.bool();
        if !self.naive.pids.contains_key(&client) {
            let pid = client as u32 + 100;
            self.registry.begin(client, pid);
            self.naive.pids.insert(client, pid);
            return self.check("begin");
        }
        if random.u8(0..12) == 0 {
            self.registry.end(client, is_odd);
            self.naive.end(client, is_odd);
            return self.check("end");
        }
        self.registry.cancel(client);
        self.naive.cancel(client);
        self.check("cancel");
        let terms = Terms {
            device: device.to_owned(),
            bytes: random.u64(0..60),
            priority: random.i32(0..2),
            kept_for_ns: random.bool().then(|| random.u64(0..20)),
        };
        let did = if self.registry.is_new(client) {
            match random.u8(0..8) {
                0..3 => {
                    self.registry.open(client, name, until);
                    self.naive.open(client, name, until);
                    "open"
                }
                3..6 => {
                    self.registry.draft(client, name, terms.clone(), until, is_odd);
                    self.naive.draft(client, name, terms, until, is_odd);
                    "draft"
                }
                6 => {
                    self.registry.remove(client, name);
                    self.naive.remove(client, name);
                    "remove"
                }
                _ => {
                    self.restore(client, name, terms, lock, random);
                    "restore"
                }
            }
        } else if self.registry.has_draft(client) {
            self.next_id += 1;
            let new =
                NewVersion { id: [self.next_id; 16], bytes: random.u64(0..70), digest: [1; 32] };
            if let Some(key) = self.registry.commit(client, new, lock) {
                self.add_page(key, new.id, Word { epoch: 0, state: PageState::Whole }, false);
            }
            self.naive.commit(client, new, lock);
            "commit"
        } else if let Some(key) = self.registry.held(client) {
            match random.u8(0..10) {
                0..4 => {
                    self.registry.lock(client, key, lock, until, is_odd);
                    self.naive.lock(client, lock, until, is_odd);
                    "lock"
                }
                4..6 => {
                    let known = &self.naive.versions[self.naive.held(client).unwrap()];
                    let epoch = known.epoch - u64::from(random.u8(0..6) == 0);
                    self.registry.update(client, key, lock, epoch);
                    self.naive.update(client, lock, epoch);
                    "update"
                }
                6 => {
                    self.registry.release(client, key, is_odd);
                    self.naive.release(client, is_odd);
                    "release"
                }
                7 => {
                    let than = random.u64(0..6);
                    self.registry.wait_newer(client, key, than, until);
                    self.naive.wait_newer(client, than, until);
                    "wait_newer"
                }
                8 => {
                    self.registry.evict(client, device, 50);
                    self.naive.evict(client, device, 50);
                    "evict"
                }
                _ if is_odd => {
                    self.registry.remove_held(client, key);
                    self.naive.remove_held(client);
                    "remove_held"
                }
                _ => {
                    self.registry.remove(client, name);
                    self.naive.remove(client, name);
                    "remove"
                }
            }
        } else {
            panic!("client {client} waits after a cancel")
        };
        self.check(did);
    }

    /// Restores a version that is there, or one of an earlier keeper.
    fn restore(
        &mut self,
        client: Client,
        name: &str,
        terms: Terms,
        lock: Lock,
        random: &mut fastrand::Rng,
    ) {
        let known = random.usize(0..self.naive.versions.len() + 2);
        self.next_id += 1;
        let state = [PageState::Whole, PageState::Writing, PageState::Torn][random.usize(..3)];
        let word = Word { epoch: random.u64(1..6), state };
        let mut restored = Restored {
            name: name.to_owned(),
            id: [self.next_id; 16],
            terms,
            digest: [2; 32],
            word,
            writer_pid: 9,
            is_superseded: random.bool(),
            lock,
        };
        if let Some(version) = self.naive.versions.get(known) {
            restored.id = version.id;
        }
        let key = self.registry.restore(client, restored.clone());
        self.add_page(key, restored.id, word, restored.is_superseded);
        self.naive.restore(client, restored);
    }
}

#[test]
fn random_programs_have_the_replies_of_the_naive_table() {
    for seed in vramp_testing::seeds(80) {
        let mut random = fastrand::Rng::with_seed(seed);
        let limit = random.bool().then_some(100);
        let settles_at = random.bool().then_some(30);
        let mut pair = Pair::new(limit, settles_at, random.u64(1..6));
        for _ in 0..200 {
            pair.step(&mut random);
        }
        // Nothing is left of clients that ended.
        for client in 1..=8 {
            pair.registry.end(client, false);
            pair.naive.end(client, false);
        }
        pair.naive.now += 1000;
        pair.registry.set_now(pair.naive.now);
        pair.registry.tick();
        pair.naive.tick();
        for name in ["a", "b", "c"] {
            pair.registry.begin(1, 1);
            pair.registry.remove(1, name);
            pair.registry.end(1, false);
        }
        assert!(pair.registry.is_idle(), "{:?}", pair.registry);
    }
}

/// The numbers of a page that the keeper writes are the first ones.
const _: () = assert!(page::WORD == 0 && page::SUPERSEDED == 1 && page::WRITERS == 2);

/// What requests cause is the same in a table with a hundred times as many entries, 100,000 in a long run, and none
/// of them looks at all.
#[test]
fn the_work_of_a_request_does_not_grow_with_the_entries() {
    let measure = |entries: u32| {
        let mut registry = Registry::new(Some(u64::from(entries) + 10), None, 0);
        let terms = || Terms { device: "d".to_owned(), bytes: 1, ..Terms::default() };
        let publish = |registry: &mut Registry, number: u32| {
            let mut id = [0; 16];
            id[..4].copy_from_slice(&number.to_le_bytes());
            registry.begin(1, 1);
            registry.draft(1, &format!("entry/{number:06}"), terms(), 0, false);
            registry.commit(1, NewVersion { id, bytes: 1, digest: [0; 32] }, Lock::None).unwrap();
            registry.end(1, false);
        };
        for number in 0..entries {
            registry.set_now(u64::from(number));
            publish(&mut registry, number);
        }
        registry.take_effects();
        let start = std::time::Instant::now();
        // The last of them evict others.
        for round in 0..200 {
            let name = format!("entry/{:06}", round % entries);
            registry.begin(2, 2);
            registry.open(2, &name, 0);
            if let Some(version) = registry.held(2) {
                registry.lock(2, version, Lock::Write, 0, true);
                let epoch =
                    registry.list("", 1)[0].current.as_ref().map_or(0, |current| current.epoch);
                registry.update(2, version, Lock::Read, epoch);
            }
            registry.end(2, false);
            registry.tick();
            publish(&mut registry, entries + round);
            assert!(!registry.list(&name, 1).is_empty());
        }
        (registry.take_effects().len(), start.elapsed())
    };
    let most = vramp_testing::cases(20_000).min(100_000);
    let (few, of_few) = measure(most / 100);
    let (many, of_many) = measure(most);
    // Only the number of evictions differs, none of which is more than the entries that were added.
    assert!(few.abs_diff(many) <= 200, "{few} and {many} effects");
    // A search through all would take a hundred times as long.
    assert!(of_many < 25 * of_few, "{of_few:?} and {of_many:?}");
}
