//! A version that this process is making.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::core::lock::Lock;
use super::core::message::{Kind, MAX_LAYOUT, MAX_PARTS, Tag, Writer};
use super::core::registry::types::Terms;
use super::error::KeepError;
use super::hold::{Content, Hold, Part};
use super::kept;
use super::link::{Fault, Limits, Link, local_error};
use super::shared::Shared;
use crate::system;

/// The right to build a version of an entry. No other client has it meanwhile. Dropping it gives it up.
pub struct Draft {
    pub(super) shared: Arc<Shared>,
    pub(super) link: Link,
    pub(super) name: String,
    pub(super) terms: Terms,
    pub(super) current: Option<Current>,
    pub(super) parts: Vec<Part>,
}

/// Epoch and digest of a version.
type Current = (u64, [u8; 32]);

/// Asks for the right to build.
pub(super) fn request(
    shared: &Shared,
    name: &str,
    terms: &Terms,
    unless_current: bool,
    limits: Limits,
) -> Result<(Link, Option<Current>), Fault> {
    let mut link = shared.connect(limits)?;
    let build = |writer: Writer| {
        writer
            .bytes(Tag::Name, name.as_bytes())
            .terms(terms)
            .number(Tag::WaitNs, limits.wait_ns())
            .number(Tag::UnlessCurrent, u64::from(unless_current))
    };
    let answer = link.ask(Kind::Draft, build, &[], limits)?;
    let current = answer
        .message()
        .and_then(|message| Some((message.number(Tag::Epoch)?, message.array(Tag::Digest)?)));
    Ok((link, current))
}

impl Draft {
    /// Returns the name of the entry.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns epoch and digest of the entry's current version when the right was granted. Another client may have
    /// built what this one wants while this one waited.
    pub fn current(&self) -> Option<(u64, [u8; 32])> {
        self.current
    }

    /// Adds a descriptor behind those that were added before. Nothing is sent until the commit.
    pub fn add(&mut self, len: u64, descriptor: OwnedFd) {
        self.parts.push(Part { len, descriptor });
    }

    /// Makes the version the current one of its entry, whole, and opens it with a lock. Messages: one for each 253
    /// descriptors and for each 31 KiB of the layout, and one each way.
    ///
    /// # Errors
    /// [`KeepError::Full`] if the parts are more than the draft asked for and do not fit. After an error the
    /// version does not exist, except after [`KeepError::TimedOut`], when it may.
    pub fn commit(self, layout: &[u8], digest: [u8; 32], lock: Lock) -> Result<Hold, KeepError> {
        let too_long = |what, found, most| Err(KeepError::TooLong { what, found, most });
        if self.parts.len() > MAX_PARTS {
            return too_long("parts", self.parts.len(), MAX_PARTS);
        }
        if layout.len() > MAX_LAYOUT {
            return too_long("bytes of layout", layout.len(), MAX_LAYOUT);
        }
        let limits = self.shared.limits(None);
        let id = system::random().map_err(|error| local_error("get random bits", error))?;
        let page = kept::new_page().map_err(|error| local_error("make a page", error))?;
        let Draft { shared, link, name, mut terms, parts, .. } = self;
        let bytes = parts.iter().map(|part| part.len).fold(0, u64::saturating_add);
        let of_commit = Commit {
            shared: &shared,
            name: &name,
            terms: &terms,
            parts: &parts,
            layout,
            id,
            digest,
            page: &page,
            lock,
        };
        let link = of_commit.run(link, limits).map_err(|fault| {
            let context = shared.context(&name, limits);
            fault.error(super::link::Context { asked: bytes, ..context })
        })?;
        terms.bytes = bytes;
        let layout = layout.to_vec();
        let content = Content { name, id, digest, terms, layout, parts, page };
        Hold::new(shared, content, link, lock)
    }
}

struct Commit<'a> {
    shared: &'a Shared,
    name: &'a str,
    terms: &'a Terms,
    parts: &'a [Part],
    layout: &'a [u8],
    id: [u8; 16],
    digest: [u8; 32],
    page: &'a OwnedFd,
    lock: Lock,
}

impl Commit<'_> {
    /// Commits, with a new keeper if the old one ends before. Returns no connection if the keeper ended after it.
    fn run(&self, link: Link, limits: Limits) -> Result<Option<Link>, Fault> {
        let mut link = Some(link);
        let until = limits.silent_until();
        loop {
            let tried = match link.take() {
                Some(link) => self.try_once(link, limits),
                None => {
                    let limits = Limits::new(Some(until), self.shared.timeout);
                    request(self.shared, self.name, self.terms, false, limits)
                        .and_then(|(link, _)| self.try_once(link, limits))
                }
            };
            match tried {
                Ok(link) => return Ok(Some(link)),
                Err(Fault::Ended) if kept::read_word(self.page).epoch != 0 => return Ok(None),
                Err(Fault::Ended) if std::time::Instant::now() < until => {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    fn try_once(&self, mut link: Link, limits: Limits) -> Result<Link, Fault> {
        let parts: Vec<(u64, BorrowedFd<'_>)> =
            self.parts.iter().map(|part| (part.len, part.descriptor.as_fd())).collect();
        link.upload(&parts, self.layout, limits)?;
        let build = |writer: Writer| {
            writer
                .bytes(Tag::Id, &self.id)
                .bytes(Tag::Digest, &self.digest)
                .number(Tag::Parts, self.parts.len() as u64)
                .number(Tag::Layout, self.layout.len() as u64)
                .lock(self.lock)
        };
        link.ask(Kind::Commit, build, &[self.page.as_fd()], limits)?;
        Ok(link)
    }
}

impl fmt::Debug for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draft")
            .field("name", &self.name)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}
