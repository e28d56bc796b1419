//! Memory of other processes that stays mapped between two opens.
//!
//! 1. `windowed.rs` maps the handles of an exported block where they lie beside each other at the exporter
//!    ([`Windows`]). Handles that are mapped already take no driver call.
//! 2. It ends a use once the noted work is over. Handles that no other block uses become idle, and stay mapped.
//! 3. Idle handles are unmapped when the exporter releases one of its handles or ends, when this pool is short of
//!    memory, trimmed or closed, after ten seconds, and beyond [`IDLE_MAX`].
//!
//! While a handle is idle the exporter uses its memory as it likes. But what the exporter releases stays on the card
//! until it is unmapped here. So handles become idle only while the exporter is watched (`retention.rs`).
//!
//! Growth: an entry for each mapped handle; an open and a close are O(log n) for each handle of the block.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Driver, DriverResult, Handle};
use vramp_ipc::Watcher;

use crate::core::{Gone, Piece, WindowId, Windows, stretches};

/// Most bytes of other processes that stay mapped without a use, for each pool.
pub const IDLE_MAX: Bytes = Bytes::gib(4);
/// Most handles of other processes that stay mapped without a use.
const IDLE_HANDLES: usize = 1024;
/// How long they stay mapped.
pub(super) const IDLE_FOR: Duration = Duration::from_secs(10);

/// Addresses that a window mirrors. A block beyond the end of one is imported by itself.
pub(super) const WINDOW: Bytes = Bytes::gib(256);

/// What a pool has imported.
#[derive(Default)]
pub(crate) struct Imports {
    state: Mutex<State>,
}

/// What is mapped, and of which exporters it may become idle.
#[derive(Default)]
pub(super) struct State {
    pub windows: Windows<Handle>,
    /// Watches that have not ended.
    watches: BTreeSet<u64>,
    /// Who watches.
    watchers: Vec<Weak<Watcher>>,
    is_closed: bool,
}

fn is(known: &Weak<Watcher>, watcher: &Arc<Watcher>) -> bool {
    known.as_ptr() == Arc::as_ptr(watcher)
}

/// Milliseconds since some time.
fn now() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

impl Imports {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allows handles of a watch's exporter to become idle.
    pub(super) fn begin_watch(&self, watch: u64, watcher: &Arc<Watcher>) {
        let mut state = self.lock();
        if state.watches.insert(watch) && !state.watchers.iter().any(|known| is(known, watcher)) {
            state.watchers.retain(|known| known.strong_count() > 0);
            state.watchers.push(Arc::downgrade(watcher));
        }
    }

    /// Unmaps what is idle of a watch's exporter, and what becomes idle later.
    pub(super) fn end_watch(&self, driver: &dyn Driver, watch: u64) {
        let mut state = self.lock();
        state.watches.remove(&watch);
        let gone = state.windows.take_idle_of(watch);
        // A failure is the device's, which keeps what stays mapped.
        let _ = state.unmap(driver, gone);
    }

    /// Returns true if memory of a watch's exporter is mapped.
    pub(super) fn has(&self, watch: u64) -> bool {
        self.lock().windows.has(watch)
    }

    /// Unmaps what is idle for long. Returns how long the next handle has left.
    pub(super) fn unmap_old(&self, driver: &dyn Driver, least: Duration) -> Option<Duration> {
        let (now, least) = (now(), least.as_millis() as u64);
        let mut state = self.lock();
        let (gone, next) = match now.checked_sub(least) {
            Some(since) => state.windows.take_idle_since(since),
            None => (Vec::new(), state.windows.idle_since_first()),
        };
        let _ = state.unmap(driver, gone);
        next.map(|since| Duration::from_millis((since + least).saturating_sub(now) + 1))
    }

    /// Unmaps all that is idle. Returns true if something was.
    pub(crate) fn unmap_idle(&self, driver: &dyn Driver) -> bool {
        let mut state = self.lock();
        let gone = state.windows.take_all_idle();
        let had_some = !gone.is_empty();
        let _ = state.unmap(driver, gone);
        had_some
    }

    /// Unmaps all that is idle, and ends the watches of exporters of which nothing is mapped then.
    pub(crate) fn trim(&self, driver: &dyn Driver) {
        if !self.unmap_idle(driver) && self.lock().watches.is_empty() {
            return;
        }
        let watchers = self.lock().watchers.clone();
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.end_unused();
        }
    }

    /// Unmaps all that is idle, and from now on what is closed.
    pub(crate) fn close(&self, driver: &dyn Driver) {
        self.lock().is_closed = true;
        self.unmap_idle(driver);
    }
}

impl State {
    /// Returns true if the handles of a watch's exporter may become idle.
    pub(super) fn keeps(&self, watch: u64) -> bool {
        !self.is_closed && self.watches.contains(&watch)
    }

    /// Unmaps handles, one call for each stretch, and releases them. Then frees the addresses of windows that
    /// have no memory any more. Goes on after a failure and returns the first one.
    fn unmap(&mut self, driver: &dyn Driver, gone: Vec<Gone<Handle>>) -> DriverResult<()> {
        let mut first = unmap(driver, &gone);
        for window in self.windows.take_empty() {
            first = first.and(driver.free_addresses(window));
        }
        first
    }

    /// Returns the addresses of a window, which are reserved if it is new.
    pub(super) fn window(&mut self, driver: &dyn Driver, id: WindowId) -> DriverResult<AddrRange> {
        if let Some(range) = self.windows.range(id) {
            return Ok(range);
        }
        let range = AddrRange::new(driver.reserve(WINDOW, driver.info().limits.page)?, WINDOW);
        self.windows.add(id, range);
        Ok(range)
    }

    /// Ends a use of these handles. What may not stay mapped is unmapped.
    pub(super) fn release<'a>(
        &mut self,
        driver: &dyn Driver,
        id: WindowId,
        pieces: impl IntoIterator<Item = &'a Piece>,
    ) -> DriverResult<()> {
        self.windows.release(id, pieces, now());
        let gone = match self.keeps(id.watch) {
            true => self.windows.take_beyond(IDLE_MAX, IDLE_HANDLES),
            false => self.windows.take_idle_of(id.watch),
        };
        self.unmap(driver, gone)
    }
}

/// Unmaps and releases handles, and leaves the addresses reserved.
pub(super) fn unmap(driver: &dyn Driver, gone: &[Gone<Handle>]) -> DriverResult<()> {
    let mut first = Ok(());
    for stretch in stretches(gone.iter().map(|gone| gone.range).collect()) {
        first = first.and(driver.unmap(stretch));
    }
    for gone in gone {
        first = first.and(driver.release(gone.handle));
    }
    first
}

impl State {
    /// Grants a card access to these handles, which lie in `whole`. No driver call if it has access.
    pub(super) fn grant(
        &mut self,
        driver: &dyn Driver,
        id: WindowId,
        pieces: &[Piece],
        whole: AddrRange,
        peer: u32,
    ) -> DriverResult<()> {
        if self.windows.without_access(id, pieces, peer) {
            driver.set_access(whole, &[peer])?;
            self.windows.note_access(id, pieces, peer);
        }
        Ok(())
    }
}
