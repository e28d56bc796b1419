//! The calls of a client.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::lock::Lock;
use super::core::message::{Kind, Tag, Writer, decode_status};
use super::core::registry::types::{Failure, Terms};
use super::draft::{self, Draft};
use super::error::KeepError;
use super::hold::Hold;
use super::link::{Answer, Context, Fault, Limits, MISSING};
use super::shared::{Shared, check_name};
use super::status::EntryStatus;

/// How long a client waits before it looks again whether a keeper was started.
const START_RETRY: Duration = Duration::from_millis(20);

/// What a draft asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct DraftOptions<'a> {
    /// The device: a card's UUID, or a name of the caller's choice.
    pub device: &'a str,
    /// Bytes that the version will have. They count against the keeper's limit from now on.
    pub bytes: u64,
    /// Idle entries of a lower priority are evicted first.
    pub priority: i32,
    /// How long the entry stays after its last hold; `None` for ever.
    pub kept_for: Option<Duration>,
}

/// What [`Keeper::open_or_draft`] found.
#[derive(Debug)]
pub enum OpenOrDraft {
    /// The current version.
    Hold(Hold),
    /// There is none, and this client has the right to build it.
    Draft(Draft),
}

/// The keeper of a directory, as a client. It has no connection; each draft and each hold has one.
#[derive(Clone, Debug)]
pub struct Keeper {
    shared: Arc<Shared>,
}

impl Keeper {
    /// Returns the client of a directory. No call. A keeper that is silent for `timeout` is an error.
    pub fn new(directory: &Path, timeout: Duration) -> Keeper {
        Keeper { shared: Shared::new(directory, timeout, false) }
    }

    /// Returns the client whose waits for other clients end with [`KeepError::Interrupted`] when a signal is
    /// handled on their thread. Of its holds too.
    pub fn interruptible(self) -> Keeper {
        Keeper { shared: Shared::new(&self.shared.directory, self.shared.timeout, true) }
    }

    /// Returns what calls use. In a forked child it is the child's own.
    fn shared(&self) -> Arc<Shared> {
        match vramp_host::fork::depth() == self.shared.depth {
            true => Arc::clone(&self.shared),
            false => {
                let Shared { directory, timeout, is_interruptible, .. } = &*self.shared;
                Shared::new(directory, *timeout, *is_interruptible)
            }
        }
    }

    /// Returns the keeper's process; `None` if none answers.
    pub fn is_running(&self) -> Option<u32> {
        self.shared.connect(self.shared.limits(None)).ok().map(|link| link.pid)
    }

    /// Waits until a keeper answers, and returns its process. For clients that are started together with it. It looks
    /// every 20 ms.
    ///
    /// # Errors
    /// [`KeepError::NotRunning`] at the deadline; at once what waiting does not change, such as
    /// [`KeepError::Version`].
    pub fn wait_running(&self, deadline: Instant) -> Result<u32, KeepError> {
        let limits = self.shared.limits(Some(deadline));
        loop {
            match self.shared.connect(limits) {
                Ok(link) => return Ok(link.pid),
                Err(Fault::Ended) if Instant::now() + START_RETRY < deadline => {
                    std::thread::sleep(START_RETRY);
                }
                Err(fault) => return Err(fault.error(self.shared.context("", limits))),
            }
        }
    }

    /// Opens the current version of a name, and takes a lock of it. A version that is replaced while this call
    /// waits is left for the newer one. Messages: three each way, and one for each 253 descriptors and for each
    /// 31 KiB of the layout.
    ///
    /// # Errors
    /// [`KeepError::NoSuchEntry`]; [`KeepError::Busy`] if the lock is not free by the deadline;
    /// [`KeepError::Torn`] for a read lock of a torn version.
    pub fn open(&self, name: &str, lock: Lock, deadline: Instant) -> Result<Hold, KeepError> {
        check_name(name)?;
        let limits = self.shared.limits(Some(deadline));
        loop {
            let opened = self.open_once(name, lock, limits);
            match opened {
                Err(Fault::Refused(Failure::Superseded)) => {}
                opened => {
                    return opened.map_err(|fault| fault.error(self.shared.context(name, limits)));
                }
            }
        }
    }

    fn open_once(&self, name: &str, lock: Lock, limits: Limits) -> Result<Hold, Fault> {
        let mut link = self.shared.connect(limits)?;
        let build = |writer: Writer| {
            writer.bytes(Tag::Name, name.as_bytes()).number(Tag::WaitNs, limits.wait_ns())
        };
        let opened = link.ask(Kind::Open, build, &[], limits)?;
        let hold = Hold::receive(&self.shared(), name, link, opened, limits)?;
        if lock != Lock::None {
            hold.lock_within(lock, true, limits)?;
        }
        Ok(hold)
    }

    /// Waits for the right to build a version of a name. Two messages each way.
    ///
    /// # Errors
    /// [`KeepError::Busy`] if another client has the right at the deadline; [`KeepError::Full`].
    pub fn draft(
        &self,
        name: &str,
        options: &DraftOptions<'_>,
        deadline: Instant,
    ) -> Result<Draft, KeepError> {
        let limits = self.shared.limits(Some(deadline));
        let drafted = self.draft_within(name, options, false, limits);
        drafted.map_err(|fault| self.draft_error(fault, name, options, limits))
    }

    /// Opens the current version of a name, or waits for the right to build one if there is none. So of many
    /// processes that start at once, one builds and the others open what it built.
    ///
    /// # Errors
    /// Those of [`Keeper::open`] but [`KeepError::NoSuchEntry`], and those of [`Keeper::draft`].
    pub fn open_or_draft(
        &self,
        name: &str,
        lock: Lock,
        options: &DraftOptions<'_>,
        deadline: Instant,
    ) -> Result<OpenOrDraft, KeepError> {
        check_name(name)?;
        let limits = self.shared.limits(Some(deadline));
        loop {
            let drafted = self.draft_within(name, options, true, limits);
            match drafted {
                Err(Fault::Refused(Failure::Exists)) => {}
                Ok(draft) => return Ok(OpenOrDraft::Draft(draft)),
                Err(fault) => return Err(self.draft_error(fault, name, options, limits)),
            }
            match self.open_once(name, lock, limits) {
                Ok(hold) => return Ok(OpenOrDraft::Hold(hold)),
                // It was replaced, removed or evicted meanwhile.
                Err(Fault::Refused(Failure::Superseded | Failure::NoSuchEntry)) => {}
                Err(fault) => return Err(fault.error(self.shared.context(name, limits))),
            }
        }
    }

    fn draft_error(
        &self,
        fault: Fault,
        name: &str,
        options: &DraftOptions<'_>,
        limits: Limits,
    ) -> KeepError {
        let context = self.shared.context(name, limits);
        fault.error(Context { asked: options.bytes, ..context })
    }

    fn draft_within(
        &self,
        name: &str,
        options: &DraftOptions<'_>,
        unless_current: bool,
        limits: Limits,
    ) -> Result<Draft, Fault> {
        check_name(name)?;
        check_name(options.device)?;
        let kept_for_ns = options.kept_for.map(|time| u64::try_from(time.as_nanos()));
        let terms = Terms {
            device: options.device.to_owned(),
            bytes: options.bytes,
            priority: options.priority,
            kept_for_ns: kept_for_ns.map(|ns| ns.unwrap_or(u64::MAX)),
        };
        let (link, current) = draft::request(&self.shared, name, &terms, unless_current, limits)?;
        let (shared, name) = (self.shared(), name.to_owned());
        Ok(Draft { shared, link, name, terms, current, parts: Vec::new() })
    }

    /// Returns all entries, by name. Messages: one each way for some dozens of entries.
    ///
    /// # Errors
    /// If the keeper does not answer.
    pub fn entries(&self) -> Result<Vec<EntryStatus>, KeepError> {
        let limits = self.shared.limits(None);
        self.list(limits).map_err(|fault| fault.error(self.shared.context("", limits)))
    }

    fn list(&self, limits: Limits) -> Result<Vec<EntryStatus>, Fault> {
        let mut link = self.shared.connect(limits)?;
        let mut entries: Vec<EntryStatus> = Vec::new();
        loop {
            let after = entries.last().map_or(String::new(), |entry| entry.name.clone());
            let build = |writer: Writer| writer.bytes(Tag::Name, after.as_bytes());
            let answer = link.ask(Kind::List, build, &[], limits)?;
            let message = answer.message().ok_or(MISSING)?;
            for bytes in message.all(Tag::Entry) {
                entries.push(EntryStatus::from_status(decode_status(bytes).ok_or(MISSING)?));
            }
            if message.number(Tag::More) != Some(1) {
                return Ok(entries);
            }
        }
    }

    /// Takes the current version off its name. Clients that have it open keep it.
    ///
    /// # Errors
    /// [`KeepError::NoSuchEntry`].
    pub fn remove(&self, name: &str) -> Result<(), KeepError> {
        check_name(name)?;
        self.call(name, Kind::Remove, |writer| writer.bytes(Tag::Name, name.as_bytes())).map(drop)
    }

    /// Drops entries of a device that no client has open, those of the lowest priority first and of those the
    /// longest idle, until `bytes` are free. Returns how many bytes were dropped.
    ///
    /// # Errors
    /// If the keeper does not answer.
    pub fn evict(&self, device: &str, bytes: u64) -> Result<u64, KeepError> {
        check_name(device)?;
        let build =
            |writer: Writer| writer.bytes(Tag::Device, device.as_bytes()).number(Tag::Bytes, bytes);
        self.call(device, Kind::Evict, build)?.number(Tag::Value)
    }

    /// Ends the keeper. Holds are adrift until another one is started.
    ///
    /// # Errors
    /// If the keeper does not answer.
    pub fn stop(&self) -> Result<(), KeepError> {
        self.call("", Kind::Stop, |writer| writer).map(drop)
    }

    fn call(
        &self,
        name: &str,
        kind: Kind,
        build: impl FnOnce(Writer) -> Writer,
    ) -> Result<Answer, KeepError> {
        let limits = self.shared.limits(None);
        let answer =
            self.shared.connect(limits).and_then(|mut link| link.ask(kind, build, &[], limits));
        answer.map_err(|fault| fault.error(self.shared.context(name, limits)))
    }
}
