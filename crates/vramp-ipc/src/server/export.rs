//! One export: its source, its secret and its holders.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::core::holders::{Admission, AfterClose, Holders};
use crate::core::message::Secret;

/// Longest description in bytes: 24 bytes for each of 699,050 chunks.
pub const MAX_DESCRIPTION: usize = 16 << 20;
/// Most descriptors of one export.
pub const MAX_DESCRIPTORS: usize = 1 << 20;

/// What an importer receives when it opens an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Bytes with a meaning for the two programs; [`MAX_DESCRIPTION`] at most.
    pub description: Vec<u8>,
    /// Number of descriptors that [`Source::descriptor`] makes; [`MAX_DESCRIPTORS`] at most.
    pub descriptors: usize,
}

/// Memory that other processes open: makes its description and descriptors.
///
/// The methods run on the server's thread, one at a time and without a lock of the server. While one
/// runs, the server answers no importer, so it should not wait for long, and never for an importer
/// of this server. A panic is caught and reported to the importer as an error.
pub trait Source: Send + Sync {
    /// Returns what an importer receives. The memory must stay as described until
    /// [`Source::released`] is called.
    ///
    /// # Errors
    ///
    /// A message for the importer. The open does not happen.
    fn open(&self) -> Result<Offer, String>;

    /// Returns descriptor `index` of the offer. The server closes it after sending it. It may ask
    /// for the same index again, for each importer and after a full queue.
    ///
    /// # Errors
    ///
    /// Any error is sent to the importer. That of too many open files makes a batch smaller.
    fn descriptor(&self, index: usize) -> io::Result<OwnedFd>;

    /// Called each time the last holder of the export is gone: the last open was closed, or its
    /// connection ended, or it failed, and no grant is outstanding.
    ///
    /// A new grant or open may follow at once. To free memory after its last use, override
    /// [`Source::ended`].
    fn released(&self);

    /// Called after [`Source::released`], once, when the last open of a withdrawn export ended; not
    /// if nothing was open when it was withdrawn. See [`Withdrawn::is_pending`](crate::Withdrawn).
    fn ended(&self) {}
}

struct State {
    holders: Holders,
    /// [`Source::released`] is running for the last change.
    is_releasing: bool,
    /// Threads that wait for a change: without one, a change makes no system call.
    waiters: usize,
}

/// Shared by the handle of the publisher and the connections that have it open.
pub struct Export {
    pub number: u64,
    pub secret: Secret,
    source: Arc<dyn Source>,
    state: Mutex<State>,
    changed: Condvar,
    /// Copies of the counts, which a forked child may read: it must not take the lock.
    opens: AtomicUsize,
    ever_opened: AtomicU64,
}

/// Why a source returned nothing.
pub enum SourceFailure {
    Withdrawn,
    Message(String),
}

impl Export {
    pub fn new(number: u64, secret: Secret, source: Arc<dyn Source>) -> Export {
        Export {
            number,
            secret,
            source,
            state: Mutex::new(State {
                holders: Holders::default(),
                is_releasing: false,
                waiters: 0,
            }),
            changed: Condvar::new(),
            opens: AtomicUsize::new(0),
            ever_opened: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish_counts(&self, state: &State) {
        self.opens.store(state.holders.opens(), Ordering::Relaxed);
        self.ever_opened.store(state.holders.ever_opened(), Ordering::Relaxed);
        self.notify(state);
    }

    fn notify(&self, state: &State) {
        if state.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Compares without an early end, so that its time says nothing about the secret.
    pub fn has_secret(&self, secret: &Secret) -> bool {
        self.secret.iter().zip(secret).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }

    /// Counts an open and asks the source for its offer.
    pub fn open(&self, grant: u64) -> Result<Offer, SourceFailure> {
        if self.lock().holders.admit() == Admission::Withdrawn {
            return Err(SourceFailure::Withdrawn);
        }
        let offered = catch_unwind(AssertUnwindSafe(|| self.source.open()))
            .unwrap_or_else(|_| Err("its source panicked".to_owned()))
            .and_then(within_limits);
        match offered {
            Ok(offer) => {
                let mut state = self.lock();
                state.holders.opened(grant);
                self.publish_counts(&state);
                Ok(offer)
            }
            Err(message) => {
                self.close();
                Err(SourceFailure::Message(message))
            }
        }
    }

    pub fn descriptor(&self, index: usize) -> io::Result<OwnedFd> {
        catch_unwind(AssertUnwindSafe(|| self.source.descriptor(index)))
            .unwrap_or_else(|_| Err(io::Error::other("its source panicked")))
    }

    /// Ends an open. Called on the server's thread only, so two releases never overlap.
    pub fn close(&self) {
        let mut state = self.lock();
        let after = state.holders.close();
        let is_last = after != AfterClose::Held;
        state.is_releasing = is_last;
        self.publish_counts(&state);
        drop(state);
        if is_last {
            // The message of the panic is on standard error; the server goes on.
            let _ = catch_unwind(AssertUnwindSafe(|| self.source.released()));
            if after == AfterClose::Ended {
                let _ = catch_unwind(AssertUnwindSafe(|| self.source.ended()));
            }
            let mut state = self.lock();
            state.is_releasing = false;
            self.notify(&state);
        }
    }

    pub fn grant(&self) -> Option<u64> {
        self.lock().holders.grant()
    }

    /// Returns whether the grant was outstanding.
    pub fn revoke(&self, grant: u64) -> bool {
        let mut state = self.lock();
        let revoked = state.holders.revoke(grant);
        self.notify(&state);
        revoked
    }

    /// Returns whether the source's end is still to come.
    pub fn withdraw(&self) -> bool {
        let mut state = self.lock();
        let is_pending = state.holders.withdraw();
        self.notify(&state);
        is_pending
    }

    pub fn is_held(&self) -> bool {
        let state = self.lock();
        !state.holders.is_free() || state.is_releasing
    }

    pub fn opens(&self) -> usize {
        self.opens.load(Ordering::Relaxed)
    }

    pub fn ever_opened(&self) -> u64 {
        self.ever_opened.load(Ordering::Relaxed)
    }

    pub fn grants(&self) -> usize {
        self.lock().holders.grants()
    }

    pub fn wait_released(&self, deadline: Instant) -> bool {
        self.wait(deadline, |state| state.holders.is_free() && !state.is_releasing)
    }

    pub fn wait_opened(&self, times: u64, deadline: Instant) -> bool {
        self.wait(deadline, |state| state.holders.ever_opened() >= times)
    }

    fn wait(&self, deadline: Instant, reached: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        while !reached(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state.waiters += 1;
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            state.waiters -= 1;
        }
        true
    }
}

fn within_limits(offer: Offer) -> Result<Offer, String> {
    let bytes = offer.description.len();
    if bytes > MAX_DESCRIPTION {
        return Err(format!("a description has {MAX_DESCRIPTION} bytes at most, not {bytes}"));
    }
    if offer.descriptors > MAX_DESCRIPTORS {
        let many = offer.descriptors;
        return Err(format!("an export has {MAX_DESCRIPTORS} descriptors at most, not {many}"));
    }
    Ok(offer)
}
