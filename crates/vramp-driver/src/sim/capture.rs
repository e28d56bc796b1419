//! Captures: their streams, their nodes, and the calls that invalidate them.
//!
//! Life of a capture:
//!
//! 1. It *begins* on a stream.
//! 2. It *grows* by work, and by streams that wait for its events.
//! 3. A refused call may *invalidate* it.
//! 4. It *ends* on the stream it began on, with a graph or an error. Until then none of its work runs.

use super::captures::{Node, Recorded, captured_event, node_id};
use super::refusal::{Outcome, Refusal};
use super::state::State;
use super::streams::Point;
use crate::{CaptureInfo, CaptureMode, Event, Stream};

impl State {
    pub fn begin_capture(&mut self, stream: Stream, mode: CaptureMode) -> Outcome<()> {
        let index = self.streams.index(self.current, stream)?;
        if self.captures.of(index).is_some() {
            return Err(Refusal {
                code: 401,
                detail: "the stream is capturing already".to_owned(),
            });
        }
        self.captures.begin(self.current, index, mode);
        Ok(())
    }

    /// Ends a capture and returns its number and its nodes.
    pub fn end_capture(&mut self, stream: Stream) -> Outcome<(u64, Vec<Node>)> {
        let index = self.streams.index(self.current, stream)?;
        self.captures.end(index)
    }

    pub fn capture_info(&mut self, stream: Stream) -> Outcome<Option<CaptureInfo>> {
        let index = self.streams.index(self.current, stream)?;
        let Some(capture) = self.captures.of(index) else { return Ok(None) };
        let dependencies = self.captures.dependencies(capture, index)?;
        let dependencies = dependencies.into_iter().map(|index| node_id(capture, index)).collect();
        Ok(Some(CaptureInfo { capture, dependencies }))
    }

    /// Returns the last record of an event.
    pub fn recorded(&self, event: Event) -> Outcome<Recorded> {
        let known = self.events.get(&event.number()).filter(|(owner, _)| *owner == self.current);
        known
            .map(|(_, recorded)| recorded.clone())
            .ok_or_else(|| Refusal::unknown("event", event.number()))
    }

    pub fn record(&mut self, event: Event, stream: Stream) -> Outcome<()> {
        self.recorded(event)?;
        let index = self.streams.index(self.current, stream)?;
        let recorded = match self.captures.of(index) {
            Some(capture) => {
                let dependencies = self.captures.dependencies(capture, index)?;
                if let Some(checker) = &mut self.checker {
                    checker.remove_event(event.number());
                }
                Recorded::Captured { capture, dependencies }
            }
            None => {
                if let Some(checker) = &mut self.checker {
                    checker.record(event.number(), stream);
                }
                Recorded::At(self.streams.end_of(index))
            }
        };
        self.events.insert(event.number(), (self.current, recorded));
        Ok(())
    }

    pub fn wait(&mut self, stream: Stream, event: Event) -> Outcome<()> {
        let recorded = self.recorded(event)?;
        let index = self.streams.index(self.current, stream)?;
        match (self.captures.of(index), recorded) {
            (None, Recorded::Never) => {}
            (None, Recorded::At(point)) => {
                self.streams.push_wait(index, point, self.now_ns);
                if let Some(checker) = &mut self.checker {
                    checker.wait(stream, event.number());
                }
            }
            (None, Recorded::Captured { capture, dependencies }) => {
                self.captures.join(capture, index, &dependencies)?;
            }
            (Some(own), Recorded::Captured { capture, dependencies }) if own == capture => {
                self.captures.join(capture, index, &dependencies)?;
            }
            (Some(own), Recorded::Captured { capture, .. }) => {
                self.captures.check_valid(index)?;
                self.captures.invalidate(own);
                self.captures.invalidate(capture);
                let detail = "the event belongs to another capture".to_owned();
                return Err(Refusal { code: 902, detail });
            }
            (Some(own), Recorded::Never | Recorded::At(_)) => {
                self.captures.check_valid(index)?;
                self.captures.invalidate(own);
                let detail = "the event was recorded outside the capture".to_owned();
                return Err(Refusal { code: 905, detail });
            }
        }
        Ok(())
    }

    /// Returns the point that the host queries or waits for. Refused if it is part of a capture.
    pub fn point_for_host(&mut self, event: Event) -> Outcome<Option<Point>> {
        match self.recorded(event)? {
            Recorded::Captured { capture, .. } => {
                self.captures.invalidate(capture);
                Err(captured_event("its work runs only when the graph is launched"))
            }
            Recorded::Never => Ok(None),
            Recorded::At(point) => Ok(Some(point)),
        }
    }

    /// Refuses a call for a stream that captures.
    pub fn refuse_capturing(&self, stream: usize) -> Outcome<()> {
        match self.captures.of(stream) {
            None => Ok(()),
            Some(_) => Err(Refusal::capturing("the stream is capturing")),
        }
    }
}
