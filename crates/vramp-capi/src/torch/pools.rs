//! The memory pools that PyTorch captures graphs into on the global route: an arena for each.
//!
//! PyTorch begins and ends the captures itself and tells of them by three hooks. Life of a pool:
//!
//! 1. *begin*, before the capture begins: the pool has an arena from its first begin on.
//! 2. The first request or free on a stream whose capture is new shows which capture it is, and the
//!    arena serves it. Requests elsewhere are served as ever.
//! 3. *end*, after the capture ended. Of one that failed nothing is told: the next begin on the device
//!    finds that it is over.
//! 4. *release*, when a graph goes, while replays may be in flight. With the last graph the arena goes:
//!    its memory is used again behind all work queued by then on streams that vramp knows.
//!
//! PyTorch's filter, which tells a capture's streams from others, is neither called nor kept: it
//! points to a graph that may be gone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use vramp_alloc::StreamId;
use vramp_alloc::graph::{ArenaConfig, AttachedCapture, CaptureError, GraphArena, GraphHold};

use crate::abi::vramp_status_t::*;
use crate::context::Context;
use crate::status::{Failure, Result};

/// PyTorch's name of a pool.
pub(super) type PoolId = (u64, u64);

/// The pools of one device.
pub(super) struct Pools {
    /// True while a begin has no end: requests and frees ask about captures.
    open: AtomicBool,
    state: Mutex<State>,
}

struct State {
    pools: Option<HashMap<PoolId, Pool>>,
    /// Begins without an end, in order.
    open: Vec<Open>,
}

struct Pool {
    /// Or why there is none, which requests within its captures are told.
    arena: Result<GraphArena>,
    /// Begins that no release answered, and that did not fail.
    graphs: u64,
    /// Of captures that ended. Dropped before the arena.
    holds: Vec<GraphHold>,
}

struct Open {
    pool: PoolId,
    /// The capture, once a request showed which.
    capture: Option<AttachedCapture>,
    /// Who began it, and who asked for memory within it.
    threads: Vec<ThreadId>,
}

impl Open {
    /// True if the capture is known to go on.
    fn is_under_way(&self) -> bool {
        let capture = self.capture.as_ref();
        capture.is_some_and(|capture| capture.is_under_way().unwrap_or(false))
    }

    fn has(&mut self, thread: ThreadId) {
        if !self.threads.contains(&thread) {
            self.threads.push(thread);
        }
    }
}

impl State {
    fn pools(&mut self) -> &mut HashMap<PoolId, Pool> {
        self.pools.get_or_insert_default()
    }

    /// One graph fewer in a pool, which goes with its last one.
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

    /// True while a begin has no end.
    #[inline]
    pub(super) fn any_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A capture into a pool is about to begin.
    pub(super) fn begin(&self, context: &Context, id: PoolId) {
        let mut state = self.lock();
        // What failed ended without a word.
        let mut failed = Vec::new();
        state.open.retain_mut(|open| {
            let goes_on = open.is_under_way();
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
            // All that a graph uses is mapped at once, so more addresses than memory serve nothing.
            let capacity = context.memory();
            let config = ArenaConfig { capacity, replan: false, ..ArenaConfig::default() };
            context.allocator().graph_arena(config).map_err(Failure::from)
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
        state.open.push(Open { pool: id, capture: None, threads });
        self.open.store(true, Ordering::Release);
    }

    /// A request or a free on `stream` comes while begins are open: if the stream is part of a
    /// capture that is new, it is that of the latest begin without one. Two driver calls at most.
    pub(super) fn see(&self, context: &Context, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let thread = std::thread::current().id();
        // One that is spoilt serves nobody; the request itself tells so, or PyTorch at the end.
        let Ok(Some(number)) = context.allocator().capture_number(stream) else { return Ok(()) };
        let is_it = |open: &&mut Open| {
            open.capture.as_ref().is_some_and(|capture| capture.number() == number)
        };
        if let Some(open) = state.open.iter_mut().find(is_it) {
            open.has(thread);
            return Ok(());
        }
        let State { pools, open } = &mut *state;
        let Some(open) = open.iter_mut().rev().find(|open| open.capture.is_none()) else {
            return Ok(());
        };
        let pool = pools.as_ref().and_then(|pools| pools.get(&open.pool));
        let arena = &pool.expect("a pool lives while a begin of it is open").arena;
        match context.allocator().attach_capture(stream, arena.as_ref().map_err(Failure::clone)?) {
            Ok(capture) => {
                open.capture = Some(capture);
                open.has(thread);
                Ok(())
            }
            // Not PyTorch's.
            Err(CaptureError::Served(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes memory back that a capture under way may use: what PyTorch had from before and frees on
    /// a thread of the capture. True if that was so; else it is to be freed as ever.
    ///
    /// PyTorch frees on the stream that the memory was asked for on, so the stream does not tell.
    pub(super) fn keep(&self, context: &Context, addr: u64, stream: StreamId) -> Result<bool> {
        let state = self.lock();
        let thread = std::thread::current().id();
        let mut own = state.open.iter().filter(|open| open.threads.contains(&thread));
        match own.find_map(|open| open.capture.as_ref().filter(|_| open.is_under_way())) {
            Some(capture) => context.free_for_capture(addr, stream, capture),
            None => Ok(false),
        }
    }

    /// A capture into a pool has ended well.
    pub(super) fn end(&self, id: PoolId) -> Result<()> {
        let mut state = self.lock();
        let last = state.open.iter().rposition(|open| open.pool == id);
        let last = last.ok_or_else(|| unknown(id, "no capture into it is under way"))?;
        let open = state.open.remove(last);
        self.open.store(!state.open.is_empty(), Ordering::Release);
        if let Some(capture) = open.capture {
            let pool = state.pools().get_mut(&id);
            let pool = pool.expect("a pool lives while a begin of it is open");
            pool.holds.push(capture.detach());
        }
        Ok(())
    }

    /// A graph of a pool is about to be destroyed. Nobody waited for its replays.
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

fn unknown((first, second): PoolId, why: &str) -> Failure {
    Failure::new(VRAMP_ERROR_UNKNOWN_ARENA, format!("PyTorch's pool ({first}, {second}): {why}"))
}
