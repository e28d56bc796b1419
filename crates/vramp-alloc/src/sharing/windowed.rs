//! A block of another process in a window of the importer's addresses, where other blocks may use the same handles.
//!
//! 1. [`Windowed::open`] maps the handles of the block that are not mapped yet.
//! 2. [`Windowed::record_use`] notes work; [`Windowed::end`] waits for it and ends the use of the handles, which may
//!    stay mapped (`imports.rs`).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use vramp_core::{AddrRange, Bytes, StreamId};
use vramp_driver::{DriverError, DriverResult, ExportedHandle, Handle};

use crate::Allocator;
use crate::core::{Gone, Piece, WindowId, stretches};
use crate::error::UseError;
use crate::shared::Shared;
use crate::sharing::export::{Description, Place};
use crate::sharing::import::ImportError;
use crate::sharing::imports::{State, WINDOW, unmap};

/// A block of another process that lies in a window.
pub(super) struct Windowed {
    shared: Arc<Shared>,
    id: WindowId,
    pieces: Vec<Piece>,
    /// All handles of the block.
    whole: AddrRange,
    /// The block.
    range: AddrRange,
    uses: Mutex<BTreeSet<StreamId>>,
    has_ended: bool,
    /// True if all handles were mapped already.
    pub(super) was_mapped: bool,
}

impl Allocator {
    /// Returns the bytes of other processes that were closed here and are still mapped, [`IDLE_MAX`](crate::sharing::IDLE_MAX) at most.
    /// They are unmapped after ten seconds, when their exporter releases memory or ends, by
    /// [`trim`](Allocator::trim), and when this pool is short of memory.
    pub fn idle_imports(&self) -> Bytes {
        match vramp_host::fork::is_forked() {
            true => Bytes::ZERO,
            false => self.shared().imports.lock().windows.idle_bytes(),
        }
    }
}

/// Returns the window and the handles of a block. `None` if it fits into no window.
fn pieces(
    description: &Description,
    place: &Place,
    watch: u64,
    page: Bytes,
) -> Option<(WindowId, Vec<Piece>)> {
    // Before its lengths are added up.
    if !description.is_possible() {
        return None;
    }
    let fits = place.keys.len() == description.handles.len()
        && description.handles.iter().chain([&place.at]).all(|len| len.is_multiple_of(page));
    let end = place.at.checked_add(description.mapped())?;
    let part = place.at.whole(WINDOW);
    let start = place.at.round_down(WINDOW);
    if !fits || end - start > WINDOW {
        return None;
    }
    let mut at = place.at - start;
    let piece = |(&key, &len)| {
        let piece = Piece { key, at, len };
        at += len;
        piece
    };
    let pieces = place.keys.iter().zip(&description.handles).map(piece).collect();
    Some((WindowId { watch, pool: place.pool, span: place.span, part }, pieces))
}

impl Windowed {
    /// Maps the handles of a block that are not mapped yet. `fetch` returns the handle of a number; the numbers
    /// ascend. An import and a map for each, and a set-access for each stretch of them. `None`, and nothing was
    /// fetched, if the block fits into no window: it is imported by itself then.
    ///
    /// # Errors
    /// As of [`Allocator::import`].
    pub(super) fn open<E: std::error::Error + 'static>(
        allocator: &Allocator,
        (description, place): (&Description, &Place),
        watch: u64,
        mut fetch: impl FnMut(usize) -> Result<ExportedHandle, E>,
    ) -> Result<Option<Windowed>, ImportError<E>> {
        let shared = allocator.shared();
        let driver = &*shared.driver;
        let page = driver.info().limits.page;
        let Some((id, pieces)) = pieces(description, place, watch, page) else { return Ok(None) };
        let missing = {
            let mut state = shared.imports.lock();
            if !state.keeps(watch) {
                return Ok(None);
            }
            match state.window(driver, id) {
                Err(error) if error.is_out_of_memory() => return Ok(None),
                reserved => reserved?,
            };
            match state.windows.acquire(id, &pieces) {
                Some(missing) => missing,
                None => return Ok(None),
            }
        };
        let was_mapped = missing.is_empty();
        let used = (0..pieces.len()).filter(|n| missing.binary_search(n).is_err()).collect();
        let (fetched, is_mapped) = (Vec::new(), false);
        let mut opening = Opening { shared, id, pieces: &pieces, fetched, used, is_mapped };
        // Without the lock: another process answers.
        for index in missing {
            let exported = fetch(index).map_err(|error| ImportError::Fetch { index, error })?;
            let handle = driver.import(&exported, pieces[index].len)?;
            opening.fetched.push((index, handle));
        }
        let window = opening.map()?;
        let first = window.start + pieces[0].at;
        let whole = AddrRange::new(first, description.mapped());
        let range = AddrRange::new(first + description.offset, description.len);
        let shared = Arc::clone(shared);
        let (uses, has_ended) = (Mutex::default(), false);
        Ok(Some(Windowed { shared, id, pieces, whole, range, uses, has_ended, was_mapped }))
    }

    /// Returns the addresses of the exporter's block here.
    pub(super) fn range(&self) -> AddrRange {
        self.range
    }

    /// Notes that work of a stream uses the memory: see [`Imported::record_use`](super::Imported::record_use).
    pub(super) fn record_use(&self, stream: StreamId) -> Result<(), UseError> {
        if self.shared.group.work_of(stream).is_none() {
            return Err(UseError::UnknownStream(stream));
        }
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).insert(stream);
        Ok(())
    }

    /// Grants a card access to the memory. No driver call if it has access.
    pub(super) fn grant_access(&self, ordinal: u32) -> DriverResult<()> {
        let mut state = self.shared.imports.lock();
        state.grant(&*self.shared.driver, self.id, &self.pieces, self.whole, ordinal)
    }

    /// Waits on the host for the noted work, and ends the use of the memory.
    ///
    /// # Errors
    /// The wait failed: the memory stays mapped until the device is dropped. Or a driver call did.
    pub(super) fn end(&mut self) -> Result<(), DriverError> {
        if std::mem::replace(&mut self.has_ended, true) {
            return Ok(());
        }
        let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
        for stream in uses {
            if let Some(end) = self.shared.group.end_of_work(stream, &self.shared.driver)? {
                end.synchronize()?;
            }
        }
        let mut state = self.shared.imports.lock();
        state.release(&*self.shared.driver, self.id, &self.pieces)
    }
}

/// A block whose handles are being mapped. What it has is given up when it is dropped.
struct Opening<'a> {
    shared: &'a Shared,
    id: WindowId,
    pieces: &'a [Piece],
    /// Imported handles by number, which are not mapped yet.
    fetched: Vec<(usize, Handle)>,
    /// Numbers of the handles whose use is counted.
    used: Vec<usize>,
    is_mapped: bool,
}

impl Opening<'_> {
    /// Maps what was fetched, unless another thread has meanwhile, and makes it accessible.
    fn map<E: std::error::Error + 'static>(mut self) -> Result<AddrRange, ImportError<E>> {
        let driver = &*self.shared.driver;
        let mut state = self.shared.imports.lock();
        let window = state.window(driver, self.id)?;
        let peers = self.shared.group.peers();
        let mut mapped: Vec<usize> = Vec::new();
        let made = self.map_fetched(&mut state, window, &peers, &mut mapped);
        if let Err(error) = made {
            let gone: Vec<Gone<Handle>> = mapped
                .iter()
                .map(|&index| state.windows.remove(self.id, self.pieces[index].at))
                .collect();
            // What cannot be undone stays until the device is dropped.
            let _ = unmap(driver, &gone);
            drop((peers, state));
            return Err(error);
        }
        drop((peers, state));
        self.is_mapped = true;
        Ok(window)
    }

    fn map_fetched<E: std::error::Error + 'static>(
        &mut self,
        state: &mut State,
        window: AddrRange,
        peers: &[u32],
        mapped: &mut Vec<usize>,
    ) -> Result<(), ImportError<E>> {
        let driver = &*self.shared.driver;
        while let Some((index, handle)) = self.fetched.pop() {
            let piece = self.pieces[index];
            if state.windows.acquire_one(self.id, &piece) {
                self.used.push(index);
                driver.release(handle)?;
                continue;
            }
            // Released with the others if something fails from here on.
            self.fetched.push((index, handle));
            let Some(gone) = state.windows.in_the_way(self.id, &piece) else {
                let what = format!("a handle at {} lies where another one is open", piece.at);
                return Err(ImportError::Description(what));
            };
            unmap(driver, &gone)?;
            driver.map(window.start + piece.at, handle)?;
            self.fetched.pop();
            state.windows.insert(self.id, piece, handle, peers);
            mapped.push(index);
        }
        let range = |&index: &usize| {
            let Piece { at, len, .. } = self.pieces[index];
            AddrRange::new(window.start + at, len)
        };
        for stretch in stretches(mapped.iter().map(range).collect()) {
            driver.set_access(stretch, peers)?;
        }
        let len = self.pieces.iter().map(|piece| piece.len).sum();
        let whole = AddrRange::new(window.start + self.pieces[0].at, len);
        for &peer in peers {
            state.grant(driver, self.id, self.pieces, whole, peer)?;
        }
        Ok(())
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        if self.is_mapped {
            return;
        }
        let driver = &*self.shared.driver;
        for (_, handle) in self.fetched.drain(..) {
            let _ = driver.release(handle);
        }
        let pieces = self.used.iter().map(|&index| &self.pieces[index]);
        let _ = self.shared.imports.lock().release(driver, self.id, pieces);
    }
}

impl Drop for Windowed {
    fn drop(&mut self) {
        if vramp_host::fork::is_forked() {
            // Dropping the device would make calls, and take locks that no thread releases.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        // A drop cannot report a failure; `close` does.
        let _ = self.end();
    }
}

impl std::fmt::Debug for Windowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of another process", self.range)
    }
}
