//! A process in the line.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::core::candidate::{Candidate, Next};
use super::core::entry::Message;
use super::core::entry::{Entry, Need};
use super::directory::{self, Listing, OwnEntry, system_error};
use super::error::{AcquireError, TimedOut, TurnsError};
use super::status::Participant;
use super::turn::Turn;
use super::{Inner, reach};

/// A place in the line of a card. Dropping it leaves the line.
#[derive(Debug)]
pub struct Waiting {
    inner: Arc<Inner>,
    own: OwnEntry,
    candidate: Candidate,
    /// Of the live entry before this one; `None` once this holds the turn.
    before: Option<OwnedFd>,
    started: Instant,
}

/// What the steps of a candidate led to.
enum Stop {
    Holds,
    /// Waits for the entry with this descriptor.
    Waits(OwnedFd),
}

impl Waiting {
    /// Makes an entry and fixes its place.
    pub(super) fn join(inner: &Arc<Inner>, need: Need) -> Result<Waiting, TurnsError> {
        inner.check_fork()?;
        let mut candidate = Candidate::new();
        let mut own: Option<OwnEntry> = None;
        let mut listing = inner.directory.list()?;
        inner.directory.remove_unfinished(&listing);
        let mut next = candidate.listed(&listing.keys());
        while let Next::Create { number } = next {
            drop(own.take());
            let made = OwnEntry::create(&inner.directory, number, inner.entry(need))?;
            candidate.created(made.entry.key);
            own = Some(made);
            listing = inner.directory.list()?;
            next = candidate.listed(&listing.keys());
        }
        let Some(own) = own else { panic!("{candidate:?} began without an entry") };
        reach("placed");
        let (inner, started) = (Arc::clone(inner), Instant::now());
        let mut waiting = Waiting { inner, own, candidate, before: None, started };
        waiting.proceed(listing, next)?;
        Ok(waiting)
    }

    /// Performs steps until this holds the turn or has to wait.
    fn proceed(&mut self, mut listing: Listing, mut next: Next) -> Result<(), TurnsError> {
        let directory = &self.inner.directory;
        let mut probed = None;
        let stop = loop {
            next = match next {
                Next::List => {
                    listing = directory.list()?;
                    self.candidate.listed(&listing.keys())
                }
                Next::Probe(key) => {
                    let entry = listing.entries.iter().find(|entry| entry.key == key);
                    probed = entry.map(|entry| directory.probe(entry)).transpose()?.flatten();
                    self.candidate.probed(probed.is_some())
                }
                Next::Wait(_) => match probed.take() {
                    Some(before) => break Stop::Waits(before),
                    None => self.candidate.left(),
                },
                Next::Hold => break Stop::Holds,
                Next::Lost => {
                    return Err(TurnsError::Removed { path: directory.path.clone() });
                }
                Next::Create { .. } => panic!("{:?} has a place", self.candidate),
            };
        };
        self.before = match stop {
            Stop::Waits(before) => Some(before),
            Stop::Holds => None,
        };
        Ok(())
    }

    /// Tells the process that holds the turn, or is the first to get it, that this one waits.
    pub(super) fn send_request(&self) -> Result<(), TurnsError> {
        let mut entries = self.before()?;
        entries.sort_unstable_by_key(|entry| entry.key);
        for entry in &entries {
            if self.inner.directory.send(entry, &Message::Request)? {
                break;
            }
        }
        reach("requested");
        Ok(())
    }

    /// Returns the entries before this one, in any order.
    fn before(&self) -> Result<Vec<Entry>, TurnsError> {
        let mut entries = self.inner.directory.list()?.entries;
        entries.retain(|entry| entry.key < self.own.entry.key);
        Ok(entries)
    }

    /// Returns true once this holds the turn.
    pub fn is_first(&self) -> bool {
        self.before.is_none()
    }

    /// Waits until this holds the turn. Returns false after `timeout`, when it still waits. One wake-up
    /// for each process before it that leaves next to it in the line, and for each message.
    ///
    /// # Errors
    ///
    /// If the holder refused, or the directory cannot be used.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, AcquireError> {
        self.inner.check_fork()?;
        let deadline = Instant::now().checked_add(timeout);
        while let Some(before) = &self.before {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut ends = [
                PollFd::from_borrowed_fd(self.own.pipe()?, PollFlags::IN),
                PollFd::from_borrowed_fd(before.as_fd(), PollFlags::empty()),
            ];
            directory::wait(&mut ends, left)
                .map_err(|error| system_error("wait in", &self.inner.directory.path, error))?;
            let [has_messages, is_next] = ends.each_ref().map(directory::is_ready);
            if is_next {
                let next = self.candidate.left();
                self.proceed(Listing::default(), next)?;
            } else if has_messages {
                self.check_refusal()?;
            } else if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            self.inner.count_wake_up();
        }
        Ok(true)
    }

    fn check_refusal(&self) -> Result<(), AcquireError> {
        for message in self.own.receive()? {
            if let Message::Refusal { holder, reason } = message {
                let holder = Box::new(Participant::new(&holder, self.inner.namespace));
                return Err(AcquireError::Refused {
                    card: self.inner.card.clone(),
                    holder,
                    reason,
                });
            }
        }
        Ok(())
    }

    /// Returns the turn. The `Err` is this object, if it has to wait.
    pub fn into_turn(self) -> Result<Turn, Box<Waiting>> {
        match self.is_first() {
            true => Ok(Turn::new(self.inner, self.own)),
            false => Err(Box::new(self)),
        }
    }

    /// Returns who is in the way, for an error. It looks at the line now.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn timed_out(&self) -> Result<TimedOut, TurnsError> {
        let mut live = Vec::new();
        for entry in self.before()? {
            if self.inner.directory.probe(&entry)?.is_some() {
                live.push(entry);
            }
        }
        let first = live.iter().min_by_key(|entry| entry.key);
        let holder = first.map(|entry| Participant::new(entry, self.inner.namespace));
        Ok(TimedOut {
            card: self.inner.card.clone(),
            is_holder_stopped: holder.as_ref().is_some_and(Participant::is_stopped),
            holder,
            ahead: live.len(),
            timeout: self.started.elapsed(),
        })
    }
}
