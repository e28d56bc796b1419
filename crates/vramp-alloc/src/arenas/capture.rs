//! Captures into arenas: begun here or by others, ended, and planned for the next time.

use vramp_core::{ArenaId, ArenaPolicy, Bytes, Layout, Recording, StreamId};
use vramp_driver::{CaptureInfo, CaptureMode, Driver, DriverError, Graph, GraphNode, Stream};

use super::{ArenaState, Captured, Capturing, NotAttached};
use crate::allocation::Allocation;
use crate::virtual_pool::{Refusal, VirtualPool};

impl VirtualPool {
    /// Begins a capture of `stream` into an arena. A monotone arena gets all its memory first.
    pub(crate) fn begin_arena_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        mode: CaptureMode,
    ) -> Result<(), Refusal> {
        let upto = self.prepare_capture(id, stream)?;
        let raw = self.exec.stream(stream);
        let begun = self.exec.driver.begin_capture(raw, mode).and_then(|()| {
            match self.exec.driver.capture_info(raw) {
                Ok(Some(CaptureInfo { capture, .. })) => Ok(capture),
                told => {
                    // Whatever it is, it is not left behind.
                    let ended = self.end_driver_capture(stream);
                    let ended = ended.and_then(|graph| self.exec.driver.destroy_graph(graph));
                    Err(told.err().or(ended.err()).expect("a stream that captures says so"))
                }
            }
        });
        match begun {
            Ok(number) => {
                self.serve_capture(id, stream, number, upto, true);
                Ok(())
            }
            Err(error) => {
                self.arenas.get_mut(id).arena.abort().expect("it was prepared above");
                Err(Refusal::Driver(error))
            }
        }
    }

    /// Serves the capture that `stream` is part of, which somebody else began, ends and replays.
    /// Returns its number.
    pub(crate) fn attach_arena(
        &mut self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<u64, NotAttached> {
        let raw = self.exec.stream(stream);
        let told = self.exec.driver.capture_info(raw).map_err(Refusal::Driver)?;
        let number = told.ok_or(NotAttached::NoCapture)?.capture;
        if self.arenas.serving(number).is_some() {
            return Err(NotAttached::Served);
        }
        let upto = self.prepare_capture(id, stream)?;
        self.serve_capture(id, stream, number, upto, false);
        self.arenas.get_mut(id).unguarded = true;
        Ok(number)
    }

    /// The memory that an arena has before its capture asks for any; from here on it lends nothing,
    /// not to itself either. Returns up to where.
    pub(super) fn prepare_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<Bytes, Refusal> {
        let arena = &mut self.arenas.get_mut(id).arena;
        let upto = match arena.policy() {
            ArenaPolicy::Monotone => arena.capacity(),
            ArenaPolicy::Reusing => arena.planned_high_water(),
        };
        arena.begin().expect("its owner begins one capture at a time");
        match self.back(id, upto, stream) {
            Ok(()) => Ok(upto),
            Err(refusal) => {
                self.arenas.get_mut(id).arena.abort().expect("it was begun above");
                Err(refusal)
            }
        }
    }

    /// The capture of this number is the arena's from now on; `own` if it began it.
    pub(super) fn serve_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        number: u64,
        backed: Bytes,
        own: bool,
    ) {
        let state = self.arenas.get_mut(id);
        let (kept, noted) = (Vec::new(), Vec::new());
        state.capturing = Some(Capturing { number, stream, own, backed, kept, noted });
        self.pool.hold(stream, true);
    }

    /// Ends a stream's capture on the device. A call that failed by itself is made once more: no
    /// stream stays in a capture for it.
    pub(crate) fn end_driver_capture(&self, stream: StreamId) -> Result<Graph, DriverError> {
        let raw = self.exec.stream(stream);
        match self.exec.driver.end_capture(raw) {
            Err(_) if self.still_captures(stream) => self.exec.driver.end_capture(raw),
            ended => ended,
        }
    }

    pub(crate) fn still_captures(&self, stream: StreamId) -> bool {
        self.exec.driver.is_capturing(self.exec.stream(stream)).unwrap_or(false)
    }

    /// Ends all captures, which come to nothing.
    pub(crate) fn end_captures(&mut self) {
        let capturing = |(_, state): (ArenaId, &ArenaState)| {
            state.capturing.as_ref().filter(|capturing| capturing.own).map(|own| own.stream)
        };
        let streams: Vec<StreamId> = self.arenas.iter().filter_map(capturing).collect();
        for stream in streams {
            if let Ok(graph) = self.end_driver_capture(stream) {
                let _ = self.exec.driver.destroy_graph(graph);
            }
        }
    }

    /// Takes note that a capture that [`VirtualPool::begin_arena_capture`] began has ended.
    pub(crate) fn end_arena_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        graph: Result<Graph, DriverError>,
    ) -> Captured {
        let state = self.arenas.get_mut(id);
        let recording = state.arena.end().expect("a capture ends once");
        let capturing = state.capturing.take().expect("a capture ends once");
        if graph.is_ok() {
            self.make_whole(id, stream);
        }
        self.after_capture(id);
        Captured { graph, recording, kept: capturing.kept }
    }

    /// Serves a capture no more that [`VirtualPool::attach_arena`] served, over or not.
    /// Returns what it asked for, and what is kept for its graph.
    pub(crate) fn detach_arena(&mut self, id: ArenaId) -> (Recording, Vec<Allocation>) {
        let state = self.arenas.get_mut(id);
        let recording = state.arena.end().expect("a capture is detached once");
        let capturing = state.capturing.take().expect("a capture is detached once");
        self.after_capture(id);
        (recording, capturing.kept)
    }

    pub(super) fn after_capture(&mut self, id: ArenaId) {
        // What was drawn in is out of the capture too; where asking fails, it is asked again.
        let _ = self.note_captures();
        self.remove_if_abandoned(id);
    }

    /// Notes that graphs on any stream may have used the arena up to now. Returns the streams.
    pub(crate) fn used_anywhere(&mut self, id: ArenaId) -> Vec<StreamId> {
        let streams = (0..self.exec.streams.len() as u32).map(StreamId::new);
        let open: Vec<StreamId> = streams.filter(|&stream| self.pool.is_open(stream)).collect();
        for &stream in &open {
            let mark = self.pool.now(stream);
            self.arenas.get_mut(id).leases.note_use(mark);
        }
        open
    }

    /// The arena whose capture `raw` is part of, and the nodes its next work will depend on.
    pub(crate) fn capture_of(
        &self,
        raw: Stream,
    ) -> Result<Option<(ArenaId, Vec<GraphNode>)>, DriverError> {
        if !self.arenas.any_capture() {
            return Ok(None);
        }
        let Some(CaptureInfo { capture, dependencies }) = self.exec.driver.capture_info(raw)?
        else {
            return Ok(None);
        };
        Ok(self.arenas.serving(capture).map(|id| (id, dependencies)))
    }

    /// The layout that the next capture of the same shape follows, among the blocks that were live
    /// when `recording` began.
    pub(crate) fn set_plan(&mut self, id: ArenaId, layout: Layout, recording: Recording) {
        let state = self.arenas.get_mut(id);
        state.arena.set_plan(Some(layout));
        state.planned = Some(recording);
    }

    /// What to plan anew, because other blocks are live by now than the plan goes around.
    pub(crate) fn outdated_plan(&self, id: ArenaId) -> Option<Recording> {
        let state = self.arenas.get(id);
        let recording = state.planned.as_ref()?;
        let live = || state.arena.live_ranges();
        (!live().eq(recording.before())).then(|| recording.among(live()))
    }
}
