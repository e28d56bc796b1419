//! The memory pools that PyTorch captures graphs into on the global route, each with an arena.
//!
//! PyTorch begins and ends captures itself and calls three hooks. The life of a pool:
//!
//! 1. *begin*, before the capture begins. The first begin of a pool creates its arena.
//! 2. The first allocation or free on a stream with a new capture identifies the capture, and the
//!    arena is attached to it. Streams outside of captures are not affected.
//! 3. *end*, after a successful capture. A failed capture has no end: the next begin on the device
//!    detects and removes it.
//! 4. *release*, before a graph is destroyed, while replays may be in flight. The last release
//!    drops the arena. Its memory is reused after all work queued by then on the adopted
//!    streams.
//!
//! The arena is one of the region that the thread of the first begin is in, and all allocations of a
//! capture come from it, whatever region their thread is in: the memory of a graph sleeps as one.
//!
//! Memory from outside that the capture uses is kept for the graph if it is freed meanwhile, whatever region
//! it is of.
//!
//! PyTorch's filter, which selects the streams of a capture, is neither called nor stored: it
//! points to a graph that may be destroyed.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use vramp_alloc::graph::{ArenaConfig, AttachedCapture, CaptureError, GraphArena, GraphHold};
use vramp_alloc::{Allocator, StreamId};
use vramp_tiers::regions::Region;

use crate::session::Session;
use crate::status::{Failure, Kind, Result};

/// PyTorch's id of a pool.
pub(super) type PoolId = (u64, u64);

/// The pools of one device.
pub(super) struct Pools {
    /// True while a begin has no end. Only then allocations and frees query captures.
    open: AtomicBool,
    state: Mutex<State>,
}

struct State {
    pools: Option<HashMap<PoolId, Pool>>,
    /// Begins without an end, in order.
    open: Vec<Open>,
}

struct Pool {
    /// The arena, or the error that allocations in its captures return.
    arena: Result<PoolArena>,
    /// Number of captures that did not fail and have no release yet.
    graphs: u64,
    /// Holds of captures that ended. Dropped before the arena.
    holds: Vec<GraphHold>,
}

struct PoolArena {
    arena: GraphArena,
    home: Home,
}

/// The region of a pool's memory. `None` is no region.
pub(super) type Home = Option<Arc<Region>>;

struct Open {
    pool: PoolId,
    /// The capture, once it is identified.
    capture: Option<AttachedCapture>,
    /// Number of the pool that its arena is of.
    pool_number: u64,
    /// Threads that began the capture or allocated in it.
    threads: Vec<ThreadId>,
    /// Blocks that are not its arena's and were recorded on its streams, by address. They are kept for the
    /// graph wherever they are freed, so none of these addresses is given out again meanwhile.
    used: HashSet<u64>,
}

impl Open {
    /// Returns true if the capture is identified and in progress.
    fn is_active(&self) -> bool {
        let capture = self.capture.as_ref();
        capture.is_some_and(|capture| capture.is_under_way().unwrap_or(false))
    }

    /// Returns true if the capture is identified and has this number.
    fn is_capture(&self, number: u64) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.number() == number)
    }

    fn add_thread(&mut self, thread: ThreadId) {
        if !self.threads.contains(&thread) {
            self.threads.push(thread);
        }
    }
}

impl State {
    fn pools(&mut self) -> &mut HashMap<PoolId, Pool> {
        self.pools.get_or_insert_default()
    }

    /// Removes a graph from a pool, and the pool with its last graph.
    fn release(&mut self, id: PoolId) {
        let Some(pool) = self.pools().get_mut(&id) else { return };
        pool.graphs -= 1;
        if pool.graphs == 0
            && let Some(Pool { arena, holds, .. }) = self.pools().remove(&id)
        {
            drop(holds);
            drop(arena);
        }
    }
}

impl Pools {
    pub(super) const fn new() -> Pools {
        Pools {
            open: AtomicBool::new(false),
            state: Mutex::new(State { pools: None, open: Vec::new() }),
        }
    }

    /// Returns true while a begin has no end.
    #[inline]
    pub(super) fn any_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles the begin hook: a capture into the pool is about to begin.
    pub(super) fn begin(&self, session: &Session, id: PoolId) {
        let mut state = self.lock();
        // A failed capture has no end hook.
        let mut failed = Vec::new();
        state.open.retain_mut(|open| {
            let goes_on = open.is_active();
            if !goes_on {
                failed.push((open.pool, open.capture.take()));
            }
            goes_on
        });
        for (pool, capture) in failed {
            drop(capture);
            state.release(pool);
        }
        let make = || {
            // All memory of a graph is mapped at once, so a larger range than the device's memory
            // is useless.
            let capacity = session.memory();
            let config = ArenaConfig { capacity, replan: false, ..ArenaConfig::default() };
            let home = session.region_of_thread()?;
            let arena = allocator_of(session, &home).graph_arena(config)?;
            Ok(PoolArena { arena, home })
        };
        let pool = state.pools().entry(id).or_insert_with(|| Pool {
            arena: make(),
            graphs: 0,
            holds: Vec::new(),
        });
        if pool.arena.is_err() {
            pool.arena = make();
        }
        pool.graphs += 1;
        let threads = vec![std::thread::current().id()];
        let used = HashSet::new();
        state.open.push(Open { pool: id, capture: None, pool_number: 0, threads, used });
        self.open.store(true, Ordering::Release);
    }

    /// Attaches the arena of the latest begin without a capture to the capture of `stream`, if that
    /// is new. Called by allocations and frees while begins are open. At most two driver calls. Returns the
    /// region of the arena; `None` if no arena of PyTorch's serves the stream.
    pub(super) fn attach(&self, session: &Session, stream: StreamId) -> Result<Option<Home>> {
        let mut state = self.lock();
        let thread = std::thread::current().id();
        // An invalidated capture cannot be attached. The allocation, or the end of the capture,
        // fails.
        let Ok(Some(number)) = session.allocator().capture_number(stream) else { return Ok(None) };
        let State { pools, open } = &mut *state;
        let known = open.iter().position(|open| open.is_capture(number));
        let new = || open.iter().rposition(|open| open.capture.is_none());
        let Some(index) = known.or_else(new) else { return Ok(None) };
        let open = &mut open[index];
        let pool = pools.as_ref().and_then(|pools| pools.get(&open.pool));
        let arena = &pool.expect("a pool lives while a begin of it is open").arena;
        let PoolArena { arena, home } = arena.as_ref().map_err(Failure::clone)?;
        if known.is_none() {
            let allocator = allocator_of(session, home);
            match allocator.attach_capture(stream, arena) {
                Ok(capture) => {
                    (open.capture, open.pool_number) = (Some(capture), allocator.number());
                }
                // A capture that vramp began, not PyTorch.
                Err(CaptureError::Served(_)) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        open.add_thread(thread);
        Ok(Some(home.clone()))
    }

    /// Records that the capture of `stream`, if PyTorch has one, uses a block.
    pub(super) fn note_use(&self, session: &Session, addr: u64, stream: StreamId) {
        let mut state = self.lock();
        let Ok(Some(number)) = session.allocator().capture_number(stream) else { return };
        if let Some(open) = state.open.iter_mut().find(|open| open.is_capture(number))
            && !session.is_of_arena_in(addr, open.pool_number)
        {
            open.used.insert(addr);
        }
    }

    /// Frees memory from outside a capture that the capture may use, of whatever region, and keeps it for the
    /// graph: what is freed on its streams, was recorded there, or is freed on a thread of the capture.
    /// Returns false and does nothing about other memory.
    ///
    /// PyTorch frees on the stream of the allocation, so the stream alone does not identify the capture.
    pub(super) fn free_for_capture(
        &self,
        session: &Session,
        addr: u64,
        stream: StreamId,
    ) -> Result<bool> {
        let state = self.lock();
        let thread = std::thread::current().id();
        let number = session.allocator().capture_number(stream).ok().flatten();
        let uses = |open: &&Open| {
            number.is_some_and(|number| open.is_capture(number)) || open.used.contains(&addr)
        };
        // A thread of a capture frees blocks of other graphs as well, which those keep.
        let may_use = |open: &&Open| {
            open.threads.contains(&thread) && !session.is_of_arena(addr) && open.is_active()
        };
        let user = state.open.iter().find(uses).or_else(|| state.open.iter().find(may_use));
        match user.and_then(|open| Some((open, open.capture.as_ref()?))) {
            Some((open, _)) if session.is_of_arena_in(addr, open.pool_number) => Ok(false),
            Some((_, capture)) => session.free_for_capture(addr, stream, capture),
            None => Ok(false),
        }
    }

    /// Handles the end hook: a capture into the pool has succeeded.
    pub(super) fn end(&self, id: PoolId) -> Result<()> {
        let mut state = self.lock();
        let last = state.open.iter().rposition(|open| open.pool == id);
        let last = last.ok_or_else(|| unknown(id, "no capture into it is in progress"))?;
        let open = state.open.remove(last);
        self.open.store(!state.open.is_empty(), Ordering::Release);
        if let Some(capture) = open.capture {
            let pool = state.pools().get_mut(&id);
            let pool = pool.expect("a pool lives while a begin of it is open");
            pool.holds.push(capture.detach());
        }
        Ok(())
    }

    /// Handles the release hook: a graph of the pool is about to be destroyed. Replays may be in
    /// flight.
    pub(super) fn release(&self, id: PoolId) -> Result<()> {
        let mut state = self.lock();
        let open = state.open.iter().filter(|open| open.pool == id).count() as u64;
        let graphs = state.pools().get(&id).map_or(0, |pool| pool.graphs);
        if graphs <= open {
            return Err(unknown(id, "it has no graphs, or they were released before"));
        }
        state.release(id);
        Ok(())
    }
}

fn allocator_of<'a>(session: &'a Session, home: &'a Home) -> &'a Allocator {
    home.as_ref().map_or(session.allocator(), |region| region.allocator())
}

fn unknown((first, second): PoolId, why: &str) -> Failure {
    Failure::new(Kind::UnknownArena, format!("PyTorch's pool ({first}, {second}): {why}"))
}
