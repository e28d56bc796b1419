//! The arenas, graphs and leases of one allocator, looked up by id.
//!
//! An id is unique in the process, so the id of another allocator, or of a destroyed object, is
//! unknown. Driver calls are made without the lock of the tables.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::StreamId;
use vramp_alloc::graph::{
    ArenaConfig, AttachedCapture, Capture, CaptureError, CaptureReport, CapturedGraph, GraphArena,
    GraphHold, ReplayLease,
};

use crate::abi::{vramp_arena_report_t, vramp_capture_report_t};
use crate::session::Session;
use crate::status::{Failure, Kind, Result};

/// Tables of arenas, active captures, graphs and leases.
#[derive(Default)]
pub(crate) struct Captures {
    tables: Mutex<Tables>,
}

/// Fields are dropped in this order.
#[derive(Default)]
struct Tables {
    leases: FxHashMap<u64, ReplayLease>,
    active: FxHashMap<u64, ActiveCapture>,
    graphs: FxHashMap<u64, Arc<Graph>>,
    arenas: FxHashMap<u64, GraphArena>,
}

/// The active capture of an arena.
enum ActiveCapture {
    Own(Capture),
    Attached(AttachedCapture),
}

/// The result of a capture.
enum Graph {
    Owned(CapturedGraph),
    External(GraphHold),
}

fn next_id() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

#[cold]
fn unknown(kind: Kind, what: &str, from: &str, id: u64) -> Failure {
    let text = match id {
        0 => format!("the {what} is zero: use one from {from}"),
        _ => format!(
            "{what} {id:#x} is destroyed, or does not belong to this allocator: use one from {from}"
        ),
    };
    Failure::new(kind, text)
}

fn unknown_arena(id: u64) -> Failure {
    unknown(Kind::UnknownArena, "arena", "vramp_arena_create", id)
}

fn unknown_graph(id: u64) -> Failure {
    unknown(Kind::UnknownGraph, "graph", "vramp_capture_end or vramp_capture_detach", id)
}

impl Captures {
    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arena(&self, id: u64) -> Result<GraphArena> {
        self.lock().arenas.get(&id).cloned().ok_or_else(|| unknown_arena(id))
    }

    fn graph(&self, id: u64) -> Result<Arc<Graph>> {
        self.lock().graphs.get(&id).cloned().ok_or_else(|| unknown_graph(id))
    }

    /// Sets the active capture of an arena.
    fn set_active(&self, id: u64, capture: ActiveCapture) -> Result<()> {
        let mut tables = self.lock();
        if tables.arenas.contains_key(&id) {
            tables.active.insert(id, capture);
            return Ok(());
        }
        // The arena was destroyed meanwhile. The capture is dropped without the lock.
        drop(tables);
        drop(capture);
        Err(unknown_arena(id))
    }

    /// Removes the active capture of an arena, if it is of the wanted kind.
    fn take_active(
        &self,
        id: u64,
        wanted: impl Fn(&ActiveCapture) -> bool,
        hint: &str,
    ) -> Result<ActiveCapture> {
        let mut tables = self.lock();
        if !tables.arenas.contains_key(&id) {
            return Err(unknown_arena(id));
        }
        let found = tables.active.get(&id).is_some_and(wanted);
        let taken = found.then(|| tables.active.remove(&id)).flatten();
        taken.ok_or_else(|| {
            let text = format!("the arena has no active capture of this kind: {hint}");
            Failure::new(Kind::Capture, text)
        })
    }

    fn insert_graph(&self, graph: Graph) -> u64 {
        let id = next_id();
        self.lock().graphs.insert(id, Arc::new(graph));
        id
    }
}

impl Session {
    pub(crate) fn create_arena(&self, config: ArenaConfig) -> Result<u64> {
        let arena = self.allocator().graph_arena(config)?;
        let id = next_id();
        self.captures.lock().arenas.insert(id, arena);
        Ok(id)
    }

    /// Destroys the handle of an arena. The arena lives as long as graphs and blocks need it.
    pub(crate) fn destroy_arena(&self, id: u64) -> Result<()> {
        let mut tables = self.captures.lock();
        if tables.active.contains_key(&id) {
            let text = "the arena has an active capture: end the capture first";
            return Err(Failure::new(Kind::Busy, text));
        }
        let arena = tables.arenas.remove(&id).ok_or_else(|| unknown_arena(id))?;
        drop(tables);
        drop(arena);
        Ok(())
    }

    pub(crate) fn reset_arena(&self, id: u64) -> Result<()> {
        Ok(self.captures.arena(id)?.reset()?)
    }

    pub(crate) fn report_arena(&self, id: u64) -> Result<vramp_arena_report_t> {
        let report = self.captures.arena(id)?.report();
        Ok(vramp_arena_report_t {
            struct_size: size_of::<vramp_arena_report_t>() as u64,
            capacity: report.capacity.count(),
            high_water: report.high_water.count(),
            live: report.live.count(),
            blocks: report.blocks as u64,
            backed: report.backed.count(),
            lent: report.lent.count(),
        })
    }

    pub(crate) fn begin_capture(&self, arena: u64, stream: StreamId) -> Result<()> {
        let capture = self.allocator().begin_capture(stream, &self.captures.arena(arena)?)?;
        self.captures.set_active(arena, ActiveCapture::Own(capture))
    }

    /// Ends a capture. The arena has no active capture afterwards, even on failure.
    pub(crate) fn end_capture(&self, arena: u64) -> Result<u64> {
        let begun = |capture: &ActiveCapture| matches!(capture, ActiveCapture::Own(_));
        let hint = "begin one with vramp_capture_begin; detach an attached one";
        let ActiveCapture::Own(mut capture) = self.captures.take_active(arena, begun, hint)? else {
            unreachable!("`take_active` checked the kind");
        };
        let ended = capture.end();
        if matches!(ended, Err(CaptureError::OtherThread)) {
            self.captures.set_active(arena, ActiveCapture::Own(capture))?;
        }
        Ok(self.captures.insert_graph(Graph::Owned(ended?)))
    }

    pub(crate) fn attach_capture(&self, arena: u64, stream: StreamId) -> Result<()> {
        let capture = self.allocator().attach_capture(stream, &self.captures.arena(arena)?)?;
        self.captures.set_active(arena, ActiveCapture::Attached(capture))
    }

    pub(crate) fn detach_capture(&self, arena: u64) -> Result<u64> {
        let attached = |capture: &ActiveCapture| matches!(capture, ActiveCapture::Attached(_));
        let hint = "attach one with vramp_capture_attach; end one that vramp began";
        let ActiveCapture::Attached(capture) = self.captures.take_active(arena, attached, hint)?
        else {
            unreachable!("`take_active` checked the kind");
        };
        Ok(self.captures.insert_graph(Graph::External(capture.detach())))
    }

    /// Launches a graph. Returns the id of its lease if `held`; otherwise the lease ends after the
    /// launch.
    pub(crate) fn launch(&self, graph: u64, stream: StreamId, held: bool) -> Result<u64> {
        let graph = self.captures.graph(graph)?;
        let Graph::Owned(graph) = &*graph else {
            let text = "the graph was captured by the caller, and vramp holds only its memory: \
                        launch it with the driver";
            return Err(Failure::new(Kind::Capture, text));
        };
        let lease = graph.launch(stream)?;
        if !held {
            return Ok(0);
        }
        let id = next_id();
        self.captures.lock().leases.insert(id, lease);
        Ok(id)
    }

    pub(crate) fn end_lease(&self, id: u64) -> Result<()> {
        let lease = self.captures.lock().leases.remove(&id);
        drop(lease.ok_or_else(|| {
            let from = "vramp_graph_launch";
            unknown(Kind::UnknownLease, "lease", from, id)
        })?);
        Ok(())
    }

    pub(crate) fn report_graph(&self, id: u64) -> Result<vramp_capture_report_t> {
        let graph = self.captures.graph(id)?;
        let CaptureReport { blocks, escaped, monotone, taken, planned, lower_bound, kept, .. } =
            *match &*graph {
                Graph::Owned(graph) => graph.report(),
                Graph::External(hold) => hold.report(),
            };
        Ok(vramp_capture_report_t {
            struct_size: size_of::<vramp_capture_report_t>() as u64,
            blocks: blocks as u64,
            escaped: escaped as u64,
            monotone: monotone.count(),
            taken: taken.count(),
            planned: planned.map_or(0, |planned| planned.count()),
            lower_bound: lower_bound.count(),
            kept: kept.count(),
        })
    }

    pub(crate) fn destroy_graph(&self, id: u64) -> Result<()> {
        let graph = self.captures.lock().graphs.remove(&id);
        drop(graph.ok_or_else(|| unknown_graph(id))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vramp_driver::CaptureMode;

    use super::*;
    use crate::abi::vramp_status_t::*;
    use crate::handles;
    use crate::options::Options;

    #[test]
    fn a_capture_of_the_callers_own_is_attached_detached_and_its_memory_held() {
        let session = Session::open("sim:h200", &Options::default(), None, |_| None).unwrap();
        let driver = Arc::clone(session.allocator().driver());
        let stream = session.create_stream().unwrap();
        let queue = session.allocator().stream(stream).unwrap();
        let arena = session.create_arena(ArenaConfig::default()).unwrap();
        let before = session.place(4 << 20, stream).unwrap().addr;

        driver.begin_capture(queue, CaptureMode::Global).unwrap();
        session.attach_capture(arena, stream).unwrap();
        let busy = session.attach_capture(arena, stream).unwrap_err();
        assert_eq!(busy.status(), VRAMP_ERROR_BUSY);
        let inside = session.place(8 << 20, stream).unwrap().addr;
        assert!(session.is_of_arena(inside));
        session.free(before, stream).unwrap();
        assert_eq!(session.end_capture(arena).unwrap_err().status(), VRAMP_ERROR_CAPTURE);
        assert_eq!(session.destroy_arena(arena).unwrap_err().status(), VRAMP_ERROR_BUSY);
        let captured = driver.end_capture(queue).unwrap();
        let hold = session.detach_capture(arena).unwrap();

        let needed = session.report_graph(hold).unwrap();
        assert_eq!((needed.blocks, needed.taken, needed.kept), (1, 8 << 20, 4 << 20));
        assert_eq!(session.launch(hold, stream, false).unwrap_err().status(), VRAMP_ERROR_CAPTURE);
        assert_eq!(session.stats().unwrap().live, 12 << 20);
        session.trim(0).unwrap();
        assert_eq!(
            session.report_arena(arena).unwrap().lent,
            0,
            "an unguarded arena lends nothing"
        );
        let exec = driver.instantiate(captured).unwrap();
        driver.launch_graph(exec, queue).unwrap();
        driver.destroy_graph_exec(exec).unwrap();
        driver.destroy_graph(captured).unwrap();
        session.destroy_graph(hold).unwrap();
        assert_eq!(session.destroy_graph(hold).unwrap_err().status(), VRAMP_ERROR_UNKNOWN_GRAPH);
        assert_eq!(session.stats().unwrap().live, 8 << 20);
        session.destroy_arena(arena).unwrap();
        session.free(inside, stream).unwrap();
        session.audit().unwrap();
        session.close().map_err(|refused| refused.failure).unwrap();
    }

    #[test]
    fn an_allocator_whose_close_is_refused_stays_open_under_its_handle() {
        let session = Session::open("sim:h200", &Options::default(), None, |_| None).unwrap();
        let driver = Arc::clone(session.allocator().driver());
        let stream = session.create_stream().unwrap();
        let queue = session.allocator().stream(stream).unwrap();
        let address = session.place(4 << 20, stream).unwrap().addr;
        let handle = handles::insert(Arc::new(session)).unwrap();

        driver.begin_capture(queue, CaptureMode::Global).unwrap();
        let refused = handles::close(handle).unwrap_err();
        assert_eq!(refused.status(), VRAMP_ERROR_CAPTURE, "{refused}");
        handles::with(handle, |session| session.usable(address)).unwrap();
        let graph = driver.end_capture(queue).unwrap();
        driver.destroy_graph(graph).unwrap();
        handles::with(handle, |session| session.forget(stream)).unwrap();
        handles::close(handle).unwrap();
        assert_eq!(handles::close(handle).unwrap_err().status(), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }
}
