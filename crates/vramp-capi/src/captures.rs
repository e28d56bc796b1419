//! The arenas, graphs and leases of one allocator, looked up by id.
//!
//! An id is unique in the process, so the id of another allocator, or of a destroyed object, is
//! unknown. Driver calls are made without the lock of the tables.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::graph::{
    AttachedCapture, Capture, CapturedGraph, GraphArena, GraphHold, ReplayLease,
};

use crate::ids::{next_id, unknown};
use crate::status::{Failure, Kind, Result};

/// Tables of arenas, active captures, graphs and leases.
#[derive(Default)]
pub(crate) struct Captures {
    tables: Mutex<Tables>,
}

/// Fields are dropped in this order.
#[derive(Default)]
pub(crate) struct Tables {
    pub leases: FxHashMap<u64, ReplayLease>,
    pub active: FxHashMap<u64, ActiveCapture>,
    pub graphs: FxHashMap<u64, Arc<Graph>>,
    pub arenas: FxHashMap<u64, GraphArena>,
}

/// The active capture of an arena.
pub(crate) enum ActiveCapture {
    Own(Capture),
    Attached(AttachedCapture),
}

/// The result of a capture.
pub(crate) enum Graph {
    Owned(CapturedGraph),
    External(GraphHold),
}

pub(crate) fn unknown_arena(id: u64) -> Failure {
    unknown(Kind::UnknownArena, "arena", "vramp_arena_create", id)
}

pub(crate) fn unknown_graph(id: u64) -> Failure {
    unknown(Kind::UnknownGraph, "graph", "vramp_capture_end or vramp_capture_detach", id)
}

impl Captures {
    pub fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn arena(&self, id: u64) -> Result<GraphArena> {
        self.lock().arenas.get(&id).cloned().ok_or_else(|| unknown_arena(id))
    }

    pub fn graph(&self, id: u64) -> Result<Arc<Graph>> {
        self.lock().graphs.get(&id).cloned().ok_or_else(|| unknown_graph(id))
    }

    /// Sets the active capture of an arena.
    pub fn set_active(&self, id: u64, capture: ActiveCapture) -> Result<()> {
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
    pub fn take_active(
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

    pub fn insert_graph(&self, graph: Graph) -> u64 {
        let id = next_id();
        self.lock().graphs.insert(id, Arc::new(graph));
        id
    }
}

#[cfg(test)]
mod tests {
    use vramp_driver::CaptureMode;

    use vramp_alloc::graph::ArenaConfig;

    use super::*;
    use crate::abi::vramp_status_t::*;
    use crate::handles;
    use crate::options::Options;
    use crate::session::Session;

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
