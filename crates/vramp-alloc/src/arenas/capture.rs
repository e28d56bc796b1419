//! Captures into arenas: begun or attached, and ended.

use std::collections::BTreeSet;

use vramp_core::{ArenaId, ArenaPolicy, Bytes, CaptureRecording, StreamId};
use vramp_driver::{Call, CaptureInfo, CaptureMode, Driver, DriverError, Graph, GraphNode};

use super::{Captured, Capturing, NotAttached};
use crate::allocation::Allocation;
use crate::virtual_pool::{Refusal, VirtualPool};

impl VirtualPool {
    /// Begins a capture of `stream` into an arena. A monotone arena is backed first as a whole.
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
                info => {
                    // Whatever it is, the stream does not stay in it.
                    let ended = self.end_driver_capture(stream);
                    let ended = ended.and_then(|graph| self.exec.driver.destroy_graph(graph));
                    Err(info.err().or(ended.err()).expect("a stream that captures has a capture"))
                }
            }
        });
        match begun {
            Ok(number) => {
                self.serve_capture(id, stream, number, upto, true);
                Ok(())
            }
            Err(error) => {
                self.arenas.abort(id);
                Err(Refusal::Driver(error))
            }
        }
    }

    /// Serves the capture that `stream` is part of; the caller began it with the driver, and ends
    /// and replays it there. Returns its number.
    pub(crate) fn attach_arena(
        &mut self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<u64, NotAttached> {
        let raw = self.exec.stream(stream);
        let info = self.exec.driver.capture_info(raw).map_err(Refusal::Driver)?;
        let number = info.ok_or(NotAttached::NoCapture)?.capture;
        if self.arenas.serving(number).is_some() {
            return Err(NotAttached::Served);
        }
        let upto = self.prepare_capture(id, stream)?;
        self.serve_capture(id, stream, number, upto, false);
        self.arenas.get_mut(id).unguarded = true;
        Ok(number)
    }

    /// Backs the memory that an arena has before its capture allocates; from here on it lends
    /// nothing, not to itself either. Returns the length that is backed.
    pub(super) fn prepare_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<Bytes, Refusal> {
        let arena = &self.arenas.get(id).arena;
        let upto = match arena.policy() {
            ArenaPolicy::Monotone => arena.capacity(),
            ArenaPolicy::Reusing => arena.planned_high_water(),
        };
        self.arenas.begin(id);
        match self.back(id, upto, stream) {
            Ok(()) => Ok(upto),
            Err(refusal) => {
                self.arenas.abort(id);
                Err(refusal)
            }
        }
    }

    /// Serves the capture of this number from the arena from now on; `own` if this allocator began
    /// it.
    pub(super) fn serve_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        number: u64,
        backed: Bytes,
        own: bool,
    ) {
        let (kept, used) = (Vec::new(), BTreeSet::new());
        self.arenas.serve(id, Capturing { number, stream, own, backed, kept, used });
        self.pool.hold(stream, true);
    }

    /// Ends the capture that [`VirtualPool::begin_arena_capture`] began on the device. One that a refused
    /// close ended is an error: its stream may be part of another capture by now.
    pub(crate) fn end_own_capture(
        &self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<Graph, DriverError> {
        if self.arenas.get(id).capturing.as_ref().is_none_or(|capturing| capturing.own) {
            return self.end_driver_capture(stream);
        }
        let detail = format!("the capture of {stream} was ended when its pool was to be closed");
        Err(DriverError::from_code(Call::EndCapture, 400, detail))
    }

    /// Ends a stream's capture on the device. If the call fails and the stream still captures, it
    /// is made once more.
    fn end_driver_capture(&self, stream: StreamId) -> Result<Graph, DriverError> {
        let Some(raw) = self.exec.open_stream(stream) else {
            let detail = format!("{stream} was destroyed, after its capture was ended elsewhere");
            return Err(DriverError::from_code(Call::EndCapture, 400, detail));
        };
        match self.exec.driver.end_capture(raw) {
            Err(_) if self.still_captures(stream) => self.exec.driver.end_capture(raw),
            ended => ended,
        }
    }

    fn still_captures(&self, stream: StreamId) -> bool {
        let raw = self.exec.open_stream(stream);
        raw.is_some_and(|raw| self.exec.driver.is_capturing(raw).unwrap_or(false))
    }

    /// Returns true if the stream is part of a capture that this allocator began, or may be: the
    /// driver does not tell which capture a stream is part of once it is invalidated.
    pub(crate) fn may_be_own_capture(&self, stream: StreamId) -> bool {
        let own = self.arenas.captures().filter(|(_, capturing)| capturing.own);
        let mut own = own.map(|(id, capturing)| (id, capturing.stream));
        own.any(|(id, began_on)| {
            let drawn_in = || match self.capture_of(stream) {
                Ok(captured) => captured.is_some_and(|(arena, _)| arena == id),
                Err(_) => true,
            };
            began_on == stream || drawn_in()
        })
    }

    /// Ends all captures and discards their graphs.
    pub(crate) fn end_captures(&mut self) {
        let own = self.arenas.captures().filter(|(_, capturing)| capturing.own);
        let captures: Vec<_> = own.map(|(id, capturing)| (id, capturing.stream)).collect();
        for (id, stream) in captures {
            if let Ok(graph) = self.end_driver_capture(stream) {
                let _ = self.exec.driver.destroy_graph(graph);
            }
            let goes_on = self.still_captures(stream);
            if let Some(capturing) = &mut self.arenas.get_mut(id).capturing {
                capturing.own = goes_on;
            }
        }
    }

    /// Records the end of a capture that [`VirtualPool::begin_arena_capture`] began. If there is a
    /// graph, the arena lends nothing until [`VirtualPool::instantiated`].
    pub(crate) fn end_arena_capture(
        &mut self,
        id: ArenaId,
        graph: Result<Graph, DriverError>,
    ) -> Captured {
        let (recording, capturing) = self.arenas.end(id);
        if graph.is_ok() {
            self.arenas.get_mut(id).instantiating += 1;
        }
        self.after_capture(id);
        Captured { graph, recording, kept: capturing.kept }
    }

    /// Notes that the graph of a capture was made ready, or cannot be.
    pub(crate) fn instantiated(&mut self, id: ArenaId, stream: StreamId) {
        self.arenas.get_mut(id).instantiating -= 1;
        self.arenas.list_to_lend(id);
        self.make_whole(id, stream);
    }

    /// Stops serving a capture that [`VirtualPool::attach_arena`] served, over or not. Returns its
    /// requests, and the memory kept for its graph.
    pub(crate) fn detach_arena(&mut self, id: ArenaId) -> (CaptureRecording, Vec<Allocation>) {
        let (recording, capturing) = self.arenas.end(id);
        self.after_capture(id);
        (recording, capturing.kept)
    }

    pub(super) fn after_capture(&mut self, id: ArenaId) {
        // Streams that were drawn in left the capture too. A failed query is repeated later.
        let _ = self.note_ended_captures();
        self.remove_if_abandoned(id);
    }

    /// Records that graphs on any stream may have used the arena up to now. Returns the streams.
    pub(crate) fn used_anywhere(&mut self, id: ArenaId) -> Vec<StreamId> {
        let users = self.running_streams();
        for &stream in &users {
            let mark = self.pool.now(stream);
            self.arenas.get_mut(id).leases.note_use(mark);
        }
        users
    }

    /// Returns the streams whose work may run, also those that ended: a graph may have been launched
    /// there.
    pub(crate) fn running_streams(&self) -> Vec<StreamId> {
        let running = |stream: &StreamId| {
            self.pool.is_open(*stream) || !self.pool.is_over(self.pool.now(*stream))
        };
        self.pool.streams().filter(running).collect()
    }

    /// Returns the arena whose capture a stream is part of, and the nodes its next work will depend
    /// on. A stream that ended is part of none.
    pub(crate) fn capture_of(
        &self,
        stream: StreamId,
    ) -> Result<Option<(ArenaId, Vec<GraphNode>)>, DriverError> {
        match self.arenas.any_capture() {
            true => self.query_capture_of(stream),
            false => Ok(None),
        }
    }

    #[cold]
    fn query_capture_of(
        &self,
        stream: StreamId,
    ) -> Result<Option<(ArenaId, Vec<GraphNode>)>, DriverError> {
        let Some(raw) = self.exec.open_stream(stream) else { return Ok(None) };
        let Some(CaptureInfo { capture, dependencies }) = self.exec.driver.capture_info(raw)?
        else {
            return Ok(None);
        };
        Ok(self.arenas.serving(capture).map(|id| (id, dependencies)))
    }
}
