//! Pages made ready before they are needed, on a thread of the arena.
//!
//! A commit of pages that were absent, or made ready here, says how many. The thread then keeps as many parked,
//! at most as many as its owner allows: an engine that grows finds its next pages mapped. It wants an eighth
//! less after each commit of fewer. It uses memory that the pool has or the card has free, asks no handler and waits for
//! no work; where there is none it stops until the next such commit. It sleeps without a timeout.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use vramp_core::StreamId;
use vramp_host::fork::is_forked;

use super::core::pages::Marks;
use super::inner::Inner;
use super::tables::Part;

/// Pages that are backed at once: those of a handle, or one. A commit of one of them waits that long.
const BATCH: u32 = 16;

pub(super) struct Ahead {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// New pages of the last commits.
    new: u32,
    stream: Option<StreamId>,
    stop: bool,
}

impl Ahead {
    pub(super) fn start(inner: &Arc<Inner>, most: u32) -> std::io::Result<Ahead> {
        let state = State { new: 0, stream: None, stop: false };
        let control = Arc::new(Control { state: Mutex::new(state), changed: Condvar::new() });
        let (inner, on_thread) = (Arc::clone(inner), Arc::clone(&control));
        let thread = std::thread::Builder::new()
            .name("vramp-kv-ahead".to_owned())
            .spawn(move || run(&inner, &on_thread, most))?;
        Ok(Ahead { control, thread: Some(thread) })
    }

    /// Notes that a commit had so many new pages.
    pub(super) fn note_new(&self, pages: u32, stream: StreamId) {
        let mut state = self.control.lock();
        state.new = state.new.saturating_add(pages);
        state.stream = Some(stream);
        drop(state);
        self.control.changed.notify_one();
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // The child of a fork has no such thread.
        if is_forked() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.control.lock().stop = true;
        self.control.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Control {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a commit had new pages. `None` at the end.
    fn next(&self) -> Option<(u32, StreamId)> {
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            if let Some(stream) = state.stream.take() {
                return Some((std::mem::take(&mut state.new), stream));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_stopped(&self) -> bool {
        self.lock().stop
    }
}

fn run(inner: &Inner, control: &Control, most: u32) {
    let mut wanted: u32 = 0;
    while let Some((new, stream)) = control.next() {
        wanted = new.max(wanted - wanted.div_ceil(8)).min(most);
        while !control.is_stopped() && make_ready(inner, wanted, stream) {}
    }
}

/// Backs some pages, unless `wanted` are parked. Returns true if there may be more to back.
fn make_ready(inner: &Inner, wanted: u32, stream: StreamId) -> bool {
    let Ok(mut guard) = inner.shared.lock() else { return false };
    if guard.open_stream(stream).is_none() {
        return false;
    }
    let Some(pool) = guard.manager.virtual_pool_mut() else { return false };
    let pages = &mut pool.tables.get_mut(inner.id).pages;
    let missing = wanted.saturating_sub(pages.counts().parked);
    let chosen = pages.begin_ahead(missing.min(BATCH));
    drop(guard);
    if chosen.is_empty() {
        return false;
    }
    let parts = inner.parts(&chosen).unwrap_or_default();
    let all = !parts.is_empty() && parts.into_iter().all(|part| back(inner, part, stream));
    end(inner, chosen, all, stream);
    all
}

/// Backs one part, with the lock for no longer than that.
fn back(inner: &Inner, part: Part, stream: StreamId) -> bool {
    let Ok(mut guard) = inner.shared.lock_for_memory() else { return false };
    let locked = &mut *guard;
    if locked.open_stream(stream).is_none() || locked.check_host().is_err() {
        return false;
    }
    let Some(pool) = locked.manager.virtual_pool_mut() else { return false };
    let backed = pool.back_ahead(part, stream);
    inner.shared.refresh(locked);
    backed.unwrap_or(false)
}

fn end(inner: &Inner, chosen: Vec<Range<u32>>, all: bool, stream: StreamId) {
    let mut guard = inner.shared.lock_anyway();
    let pool = if guard.closed { None } else { guard.manager.virtual_pool_mut() };
    if let Some(pool) = pool {
        let marks = Marks::from_iter([pool.pool.now(stream)]);
        pool.tables.get_mut(inner.id).pages.end_ahead(chosen, marks, all);
    }
    drop(guard);
    inner.note_moved();
    inner.shared.notify_waiters();
}
