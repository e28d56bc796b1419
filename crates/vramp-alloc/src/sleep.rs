//! Sleep: the memory of a pool leaves the card, and comes back at the same addresses.
//!
//! A pool that sleeps keeps its addresses, its blocks and its streams. Only physical memory is given to
//! the card, handle by handle:
//!
//! 1. [`Allocator::begin_sleep`] refuses requests from then on, waits for the work of the card,
//!    returns idle memory to the card, unmaps old mappings of memory that was remapped, and returns a
//!    [`Sleep`]: which [chunks](Sleep::chunks) remain, and which part of them has
//!    [contents](Sleep::contents).
//! 2. The owner copies contents away, and [releases](Sleep::release) chunks as their copies arrive.
//! 3. [`Sleep::back`] backs chunks with new memory at their old addresses, and the owner copies the
//!    contents there.
//! 4. [`Sleep::wake`] serves requests again.
//!
//! Frees are served all the time, and so is a close. The memory of a sleeping pool counts neither as
//! reserved nor against the limit of its group; [`Allocator::trim`] does nothing.
//!
//! A kernel or a graph that touches a chunk that was released is an error of the device
//! (`CUDA_ERROR_ILLEGAL_ADDRESS`), which ends the process's context: nothing can refuse it before.
//!
//! # Cost and growth
//!
//! | step | driver calls | host |
//! |---|---|---|
//! | `begin_sleep` | two queries, a record and a wait for each stream, a wait for the card, those of a trim, and an unmap for each row of old mappings | O(regions + chunks) |
//! | `release` | an unmap for each contiguous run, a release for each chunk | O(log chunks + run) |
//! | `back` | a create and a map for each chunk, a set-access for each contiguous run | the same |
//! | `wake` | none | O(1) |
//!
//! A sleeping pool keeps 48 bytes for each chunk. Malloc and free of an awake pool cost nothing more.
//!
//! Deliberately absent: copies, and which pools sleep.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vramp_core::{AddrRange, Bytes, Range as PoolRange, Shortage, StreamId};
use vramp_driver::DriverError;

use crate::allocator::{Allocator, Relief};
use crate::asleep::{Asleep, Sleeper, Stage};
use crate::error::{AllocError, Unusable};
use crate::exec::{Executor, is_capacity_error};
use crate::observe::Event;
use crate::shared::{CloseFailure, Shared};

/// Why a pool cannot sleep. It is awake and as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SleepError {
    /// The pool is closed, asleep, or was left unusable.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// A stream captures a graph: a wait for its work would invalidate the capture.
    #[error("{stream} captures a graph: end the capture before the pool sleeps")]
    Captures {
        /// The stream.
        stream: StreamId,
    },
    /// Something outside holds memory of the pool physically.
    #[error(
        "{bytes} of the pool are pinned, by exports to other processes or by registrations: close those \
         before the pool sleeps"
    )]
    Pinned {
        /// Bytes of the pinned chunks.
        bytes: Bytes,
    },
    /// Work on memory that was remapped is not known to be over, because the program reports progress
    /// itself.
    #[error(
        "work on memory that was remapped is not known to be over: report its progress before the pool sleeps"
    )]
    Unfinished,
    /// The preset has no memory that can leave its addresses.
    #[error(
        "a pool with the preset {preset} cannot sleep: use the preset vramp on a device with virtual \
             memory management"
    )]
    NotSupported {
        /// Name of the preset.
        preset: &'static str,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Runs of neighbours in `chunks` at the same stage: what one call can unmap.
fn runs(chunks: &mut [Sleeper]) -> impl Iterator<Item = &mut [Sleeper]> {
    chunks.chunk_by_mut(|left, right| {
        left.at.at + left.at.len == right.at.at && left.stage == right.stage
    })
}

/// Bytes of chunks without memory.
fn gone(chunks: &[Sleeper]) -> Bytes {
    chunks.iter().filter(|chunk| chunk.stage == Stage::Gone).map(|chunk| chunk.at.len).sum()
}

fn whole(run: &[Sleeper]) -> PoolRange {
    let (first, last) = (run[0].at, run[run.len() - 1].at);
    PoolRange { at: first.at, len: last.at + last.len - first.at }
}

impl Executor {
    /// Unmaps and releases a run of chunks at one stage. After a failure each is at the stage that it reached.
    fn release_run(&mut self, run: &mut [Sleeper]) -> Result<(), DriverError> {
        if run[0].stage >= Stage::Mapped {
            self.driver.unmap(self.range(whole(run)))?;
            run.iter_mut().for_each(|chunk| chunk.stage = Stage::Created);
        }
        for chunk in run.iter_mut().filter(|chunk| chunk.stage == Stage::Created) {
            self.release_handle(chunk.at.chunk)?;
            self.forget_handle(chunk.at.chunk);
            chunk.stage = Stage::Gone;
        }
        Ok(())
    }

    /// Backs a run of chunks at one stage. After a failure each is at the stage that it reached.
    fn back_run(&mut self, run: &mut [Sleeper]) -> Result<(), DriverError> {
        if run[0].stage == Stage::Backed {
            return Ok(());
        }
        for chunk in run.iter_mut() {
            if chunk.stage == Stage::Gone {
                let handle = self.create(chunk.at.len)?;
                self.store_handle(chunk.at.chunk, handle);
                chunk.stage = Stage::Created;
            }
            if chunk.stage == Stage::Created {
                self.driver.map(self.addr(chunk.at.at), self.handle(chunk.at.chunk))?;
                chunk.stage = Stage::Mapped;
            }
        }
        self.driver.set_access(self.range(whole(run)), &self.access.peers)?;
        run.iter_mut().for_each(|chunk| chunk.stage = Stage::Backed);
        Ok(())
    }
}

/// A pool that serves no requests, and whose memory may leave the card. See [the module](self).
///
/// Dropped, it leaves the pool as it is: a pool whose memory is gone can only be closed.
pub struct Sleep {
    shared: Arc<Shared>,
    chunks: Vec<AddrRange>,
    contents: Vec<AddrRange>,
    patience: std::time::Duration,
}

/// # Pools that sleep
impl Allocator {
    /// Refuses requests from now on, with [`Unusable::Asleep`]; waits on the host for all work that is
    /// queued on the card by this process, also on streams that the group does not know; and returns the
    /// pool's idle memory to the card. Cost: see [the module](self).
    ///
    /// # Errors
    /// [`SleepError`]; the pool is awake and as before. A capture of a stream that the group does not know is
    /// a [`SleepError::Driver`], and invalid afterwards.
    pub fn begin_sleep(&self) -> Result<Sleep, SleepError> {
        let shared = self.shared();
        {
            let mut inner = shared.lock()?;
            if shared.heaps_serve.is_none() {
                return Err(SleepError::NotSupported { preset: inner.manager.name() });
            }
            inner.asleep = true;
            // From now on requests and frees take the lock.
            shared.captures.fetch_add(1, Ordering::Relaxed);
        }
        self.settle_before_sleep().inspect_err(|_| shared.stay_awake())
    }

    fn settle_before_sleep(&self) -> Result<Sleep, SleepError> {
        let shared = self.shared();
        // What these events cover is over after the wait. No request moves memory from now on.
        let mut inner = shared.lock_asleep()?;
        inner.manager.virtual_pool_mut().expect("it was checked above").find_idle()?;
        drop(inner);
        self.wait_for_work()?;
        let mut inner = shared.lock_asleep()?;
        let trimmed = inner.manager.trim(Bytes::ZERO);
        let pool = inner.manager.virtual_pool_mut().expect("it was checked above");
        // Memory stays on the card as long as it is mapped anywhere.
        let unmapped = pool.unmap_retired();
        let pinned = pool.pool.homes().filter(|&(_, is_pinned)| is_pinned);
        let pinned: Bytes = pinned.map(|(at, _)| at.len).sum();
        let homes = pool.pool.homes().map(|(at, _)| Sleeper { at, stage: Stage::Backed });
        let chunks: Vec<Sleeper> = homes.collect();
        let contents = pool.pool.contents().into_iter().map(|range| pool.exec.range(range));
        let contents: Vec<AddrRange> = contents.collect();
        let ranges =
            chunks.iter().map(|chunk| AddrRange::new(pool.exec.addr(chunk.at.at), chunk.at.len));
        let ranges: Vec<AddrRange> = ranges.collect();
        shared.note_reserved(&inner);
        trimmed?;
        if !unmapped? {
            return Err(SleepError::Unfinished);
        }
        if !pinned.is_zero() {
            return Err(SleepError::Pinned { bytes: pinned });
        }
        let pool = inner.manager.virtual_pool_mut().expect("it was checked above");
        pool.exec.asleep = Some(Asleep { chunks, released: Bytes::ZERO });
        drop(inner);
        Ok(Sleep {
            shared: Arc::clone(shared),
            chunks: ranges,
            contents,
            patience: self.patience(),
        })
    }

    /// Waits as [`Allocator::begin_sleep`] does, and returns what a sleep that began now would list as
    /// [contents](Sleep::contents). Requests are served meanwhile.
    ///
    /// # Errors
    /// As of [`Allocator::begin_sleep`].
    pub fn contents(&self) -> Result<Vec<AddrRange>, SleepError> {
        let shared = self.shared();
        self.wait_for_work()?;
        let mut inner = shared.lock()?;
        let preset = inner.manager.name();
        let pool = inner.manager.virtual_pool_mut().ok_or(SleepError::NotSupported { preset })?;
        pool.gather();
        let contents = pool.pool.contents().into_iter().map(|range| pool.exec.range(range));
        Ok(contents.collect())
    }

    /// Fails where a stream captures a graph, as [`Allocator::begin_sleep`] would. A query for each stream.
    ///
    /// # Errors
    /// [`SleepError::Captures`], or the query failed.
    pub fn refuse_captures(&self) -> Result<(), SleepError> {
        match self.shared().capturing_streams()?.first() {
            Some(&stream) => Err(SleepError::Captures { stream }),
            None => Ok(()),
        }
    }

    fn wait_for_work(&self) -> Result<(), SleepError> {
        let shared = self.shared();
        self.refuse_captures()?;
        shared.synchronize().map_err(|failure| match failure {
            CloseFailure::Capturing(stream) => SleepError::Captures { stream },
            CloseFailure::NotSynchronized(error) | CloseFailure::Closed(error) => error.into(),
        })?;
        // Graphs are launched, and memory is used, on streams that the group does not know. That wait would
        // invalidate a capture that began meanwhile.
        self.refuse_captures()?;
        match shared.driver.synchronize_device() {
            Err(error) if !error.is_device_lost() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Returns true if all of a range lies in the pool's addresses, whether something is allocated there or
    /// not. Takes the lock. O(reservations).
    pub fn has_addresses(&self, range: AddrRange) -> bool {
        let inner = self.shared().lock_anyway();
        let pool = inner.manager.virtual_pool().filter(|_| !inner.closed);
        pool.is_some_and(|pool| pool.exec.find(range).is_some())
    }

    /// Returns the name of another pool of the group in whose addresses some of a range lies, whether
    /// something is allocated there or not. Takes the lock of one pool after the other. O(pools), and their
    /// reservations.
    pub fn other_pool_at(&self, range: AddrRange) -> Option<String> {
        let others = self.shared().group.members().into_iter();
        let mut others = others.filter(|member| member.number != self.number());
        let owner = others.find(|member| {
            let inner = member.lock_anyway();
            let pool = inner.manager.virtual_pool().filter(|_| !inner.closed);
            pool.is_some_and(|pool| pool.exec.has_some_of(range))
        })?;
        Some(owner.name.clone())
    }

    /// Returns true from [`Allocator::begin_sleep`] to [`Sleep::wake`]. Takes the lock.
    pub fn is_asleep(&self) -> bool {
        let inner = self.shared().lock_anyway();
        !inner.closed && inner.asleep
    }
}

impl Shared {
    fn stay_awake(&self) {
        let mut inner = self.lock_anyway();
        if inner.asleep && !inner.closed {
            inner.asleep = false;
            if let Some(pool) = inner.manager.virtual_pool_mut() {
                pool.exec.asleep = None;
            }
            self.captures.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Sleep {
    /// Returns the addresses of the pool's memory in ascending order, one range for each handle.
    pub fn chunks(&self) -> &[AddrRange] {
        &self.chunks
    }

    /// Returns what was allocated when the sleep began, in ascending order, neighbours joined: blocks,
    /// whole slabs of small blocks, and the memory of graph arenas.
    pub fn contents(&self) -> &[AddrRange] {
        &self.contents
    }

    /// Returns what of [`contents`](Sleep::contents) is still allocated: frees are served meanwhile. Nothing once the
    /// pool is closed. O(regions of the pool).
    pub fn contents_left(&self) -> Vec<AddrRange> {
        let mut inner = self.shared.lock_anyway();
        if inner.closed {
            return Vec::new();
        }
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool sleeps");
        pool.gather();
        pool.pool.contents().into_iter().map(|range| pool.exec.range(range)).collect()
    }

    /// Gives the memory of chunks, by index, to the card. Their contents are lost. The caller has waited for
    /// all work that uses them. Chunks whose memory the card has are left out.
    ///
    /// # Errors
    /// A driver call failed, or the pool was closed. The contents of chunks for which [`Sleep::is_backed`] is
    /// false are lost, also where the card did not get the memory; another call goes on.
    ///
    /// # Panics
    /// If the indexes are not those of chunks.
    pub fn release(&self, range: Range<usize>) -> Result<(), AllocError> {
        self.change(range, Executor::release_run)
    }

    /// Backs chunks, by index, with memory of the card at their addresses. Its contents are undefined.
    /// Chunks that memory backs are left out. Calls shortage handlers and waits as a malloc does.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], or a driver call failed. [`Sleep::is_backed`] tells what is backed. The rest
    /// has no memory, unless the driver refused to take it: [`Sleep::release`] tries that again.
    ///
    /// # Panics
    /// If the indexes are not those of chunks.
    pub fn back(&self, range: Range<usize>) -> Result<(), AllocError> {
        let mut relief = Relief::new(self.patience);
        loop {
            let missing = self.missing(range.clone());
            let (shortage, call) = match self.try_back(range.clone(), missing) {
                Err(AllocError::Driver(error)) if is_capacity_error(&error) => {
                    (self.shortage(missing, None), Some(error))
                }
                Err(AllocError::OutOfMemory(report)) => (report.shortage.clone(), None),
                Ok(()) => return Ok(()),
                Err(error) => return Err(self.give_back(range, error)),
            };
            self.shared.observers.notify(&Event::Short(&shortage));
            if !self.shared.relieve(&mut relief, &shortage)? {
                let report = Box::new(self.shared.report(shortage, call, StreamId::new(0)));
                self.shared.observers.notify(&Event::OutOfMemory(&report));
                return Err(self.give_back(range, AllocError::OutOfMemory(report)));
            }
        }
    }

    /// Gives what is not usable in a range to the card after an error, as far as the driver lets it, and returns
    /// the error.
    fn give_back(&self, range: Range<usize>, error: AllocError) -> AllocError {
        let _ = self.change(range, |exec, run| match run[0].stage {
            Stage::Backed => Ok(()),
            _ => exec.release_run(run),
        });
        error
    }

    fn try_back(&self, range: Range<usize>, missing: Bytes) -> Result<(), AllocError> {
        let group = &self.shared.group;
        let limit = group.limit();
        let _growth = limit.and_then(|_| group.share());
        if let Some(limit) = limit.filter(|&limit| limit < group.reserved().saturating_add(missing))
        {
            let shortage = self.shortage(missing, Some(limit));
            return Err(AllocError::OutOfMemory(Box::new(self.shared.report(
                shortage,
                None,
                StreamId::new(0),
            ))));
        }
        self.change(range, Executor::back_run)
    }

    fn shortage(&self, requested: Bytes, limit: Option<Bytes>) -> Shortage {
        let reserved = Bytes::new(self.shared.reserved.load(Ordering::Relaxed));
        let (used, free, largest, waiting) = (reserved, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        Shortage { requested, reserved, used, free, largest, waiting, limit, block_for: None }
    }

    /// Bytes of chunks without memory; none once the pool is closed.
    fn missing(&self, range: Range<usize>) -> Bytes {
        let inner = self.shared.lock_anyway();
        let asleep = inner.manager.virtual_pool().and_then(|pool| pool.exec.asleep.as_ref());
        let chunks = asleep.map_or(&[][..], |asleep| &asleep.chunks[range]);
        gone(chunks)
    }

    /// Returns true if memory backs the chunk, so that it can be used. False once the pool is closed.
    ///
    /// # Panics
    /// If there is no chunk with that index.
    pub fn is_backed(&self, index: usize) -> bool {
        assert!(index < self.chunks.len(), "there is no chunk {index} of {}", self.chunks.len());
        let inner = self.shared.lock_anyway();
        let asleep = inner.manager.virtual_pool().and_then(|pool| pool.exec.asleep.as_ref());
        !inner.closed && asleep.is_none_or(|asleep| asleep.chunks[index].stage == Stage::Backed)
    }

    /// Returns the bytes that are on the card.
    pub fn backed(&self) -> Bytes {
        let all: Bytes = self.chunks.iter().map(|chunk| chunk.len).sum();
        let inner = self.shared.lock_anyway();
        let asleep = inner.manager.virtual_pool().and_then(|pool| pool.exec.asleep.as_ref());
        all - asleep.map_or(Bytes::ZERO, |asleep| asleep.released)
    }

    /// Makes `call` for each run of chunks at one stage, until one fails.
    fn change(
        &self,
        range: Range<usize>,
        call: fn(&mut Executor, &mut [Sleeper]) -> Result<(), DriverError>,
    ) -> Result<(), AllocError> {
        let mut inner = self.shared.lock_asleep()?;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool sleeps");
        let mut asleep = pool.exec.asleep.take().expect("it sleeps until it wakes");
        let before = gone(&asleep.chunks[range.clone()]);
        let mut runs = runs(&mut asleep.chunks[range.clone()]);
        let done = runs.try_for_each(|run| call(&mut pool.exec, run));
        drop(runs);
        asleep.released = asleep.released + gone(&asleep.chunks[range]) - before;
        pool.exec.asleep = Some(asleep);
        self.shared.note_reserved(&inner);
        Ok(done?)
    }

    /// Serves requests again, at no driver call.
    ///
    /// # Errors
    /// Returns the sleep if some chunk is not backed, or the pool was closed.
    pub fn wake(self) -> Result<(), Sleep> {
        {
            let inner = self.shared.lock_anyway();
            let asleep = inner.manager.virtual_pool().and_then(|pool| pool.exec.asleep.as_ref());
            if inner.closed || asleep.is_some_and(Asleep::lacks_memory) {
                drop(inner);
                return Err(self);
            }
        }
        self.shared.stay_awake();
        self.shared.notify_waiters();
        Ok(())
    }
}

impl std::fmt::Debug for Sleep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sleep of the pool {} in {} chunks", self.shared.name, self.chunks.len())
    }
}
