//! Captures: their streams, their nodes, and the calls that invalidate them.
//!
//! Life of a capture:
//!
//! 1. It *begins* on a stream.
//! 2. It *grows* by work, and by streams that wait for its events.
//! 3. A refused call may *invalidate* it.
//! 4. It *ends* on the stream it began on, with a graph or an error. Until then none of its work runs.
//!
//! Launches of graphs.
//!
//! The first lane of a graph runs on the stream of the launch, the others on internal streams of the
//! graph. A launch runs after the previous launch of the same graph, as CUDA guarantees.

use std::sync::Arc;

use vramp_core::AddrRange;

use super::captures::{Exec, Layout, Mark, Node, Recorded, captured_event, node_id, node_index};
use super::memory::By;
use super::refusal::{Outcome, Refusal};
use super::state::State;
use super::streams::{Effect, Point};
use crate::{Call, CaptureInfo, CaptureMode, Event, Graph, GraphExec, GraphNode, Stream};

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

impl State {
    pub fn keep_graph(&mut self, capture: u64, nodes: Vec<Node>) -> Graph {
        self.graphs.graphs.insert(capture, (self.current, Arc::new(nodes)));
        Graph::from_number(capture)
    }

    pub fn node_dependencies(&self, node: GraphNode) -> Outcome<Vec<GraphNode>> {
        let (capture, place) = node_index(node);
        let device = self.current;
        let kept = self.graphs.nodes(device, capture).ok().map(|nodes| nodes.as_slice());
        let known =
            self.captures.nodes(device, capture).or(kept).and_then(|nodes| nodes.get(place));
        let known = known.ok_or_else(|| Refusal::unknown("graph node", node.number()))?;
        Ok(known.after.iter().map(|before| node_id(capture, *before)).collect())
    }

    pub fn graph_nodes(&self, graph: Graph) -> Outcome<usize> {
        Ok(self.graphs.nodes(self.current, graph.number())?.len())
    }

    pub fn instantiate(&mut self, graph: Graph) -> Outcome<GraphExec> {
        let layout = Layout::new(Arc::clone(self.graphs.nodes(self.current, graph.number())?));
        // As on a card: kernels are not looked at, fills and copies are.
        for node in layout.nodes.iter().filter(|node| !matches!(node.effect, Effect::Nothing)) {
            let writes = node.kernel.writes.iter().map(|range| (range, true));
            let mut ranges = writes.chain(node.kernel.reads.iter().map(|range| (range, false)));
            let inaccessible = |(range, writes): &(&AddrRange, bool)| {
                let by = By::of(node.effect.accessor(self.current, *writes), *writes);
                self.memory.pieces(**range, by, |_| ()).is_err()
            };
            if let Some((range, _)) = ranges.find(inaccessible) {
                return Err(Refusal::invalid(format!("a node uses {range}, which is not mapped")));
            }
        }
        let lanes = (1..layout.lanes).map(|_| self.lane()).collect();
        self.graphs.execs_made += 1;
        let exec = Exec { device: self.current, layout: Arc::new(layout), lanes, last: None };
        self.graphs.execs.insert(self.graphs.execs_made, exec);
        Ok(GraphExec::from_number(self.graphs.execs_made))
    }

    /// Returns a stream for a lane. Reuses one of a destroyed graph if the host observed the
    /// completion of all its work, because then it adds no order.
    fn lane(&mut self) -> usize {
        let (device, streams, checker) = (self.current, &self.streams, &mut self.checker);
        let over = |lane: &usize| {
            let seen =
                checker.as_mut().is_none_or(|checker| checker.host_observed_all_of(name(*lane)));
            seen && streams.device(*lane) == device && streams.is_done(streams.end_of(*lane))
        };
        match self.graphs.spare.iter().position(over) {
            Some(place) => self.graphs.spare.swap_remove(place),
            None => self.streams.create_unnamed(device),
        }
    }

    pub fn launch_graph(&mut self, exec: GraphExec, stream: Stream) -> Outcome<()> {
        let index = self.streams.index(self.current, stream)?;
        let unknown = || Refusal::unknown("instantiated graph", exec.number());
        let known = self.graphs.execs.get(&exec.number());
        let known = known.filter(|known| known.device == self.current).ok_or_else(unknown)?;
        let Exec { layout, lanes, last, .. } = known.clone();
        if self.captures.of(index).is_some() {
            let detail =
                "the simulator does not model child graphs (a launch on a capturing stream)";
            return Err(Refusal::not_supported(detail));
        }
        self.spend(Call::LaunchGraph);
        if let Some(last) = last {
            self.follow(index, &last);
        }
        let begin = self.mark(index);
        lanes.iter().for_each(|lane| self.follow(*lane, &begin));
        let mut marks: Vec<Mark> = Vec::with_capacity(layout.nodes.len());
        for (node, lane) in layout.nodes.iter().zip(&layout.lane_of) {
            let runs_on = lane.checked_sub(1).map_or(index, |other| lanes[other]);
            let elsewhere = node.after.iter().filter(|before| layout.lane_of[**before] != *lane);
            elsewhere.for_each(|before| self.follow(runs_on, &marks[*before]));
            self.queue_on(runs_on, node.kernel.clone(), node.effect);
            marks.push(self.mark(runs_on));
        }
        for lane in &lanes {
            let end = self.mark(*lane);
            self.follow(index, &end);
        }
        let end = self.mark(index);
        if let Some(exec) = self.graphs.execs.get_mut(&exec.number()) {
            exec.last = Some(end);
        }
        Ok(())
    }

    pub fn destroy_graph(&mut self, graph: Graph) -> Outcome<()> {
        self.graphs.nodes(self.current, graph.number())?;
        self.graphs.graphs.remove(&graph.number());
        Ok(())
    }

    pub fn destroy_graph_exec(&mut self, exec: GraphExec) -> Outcome<()> {
        let unknown = || Refusal::unknown("instantiated graph", exec.number());
        let known = self.graphs.execs.get(&exec.number());
        known.filter(|known| known.device == self.current).ok_or_else(unknown)?;
        let removed = self.graphs.execs.remove(&exec.number());
        self.graphs.spare.extend(removed.into_iter().flat_map(|removed| removed.lanes));
        Ok(())
    }

    /// Returns the point after all work queued on `stream`.
    fn mark(&mut self, stream: usize) -> Mark {
        let stamp = self.checker.as_mut().map(|checker| checker.point(name(stream)));
        Mark { point: self.streams.end_of(stream), stamp }
    }

    /// Orders later work on `stream` after `mark`.
    fn follow(&mut self, stream: usize, mark: &Mark) {
        self.streams.push_wait(stream, mark.point, self.now_ns);
        if let (Some(checker), Some(stamp)) = (&mut self.checker, &mark.stamp) {
            checker.follow(name(stream), stamp);
        }
    }
}

fn name(stream: usize) -> Stream {
    Stream::from_number(stream as u64 + 1)
}
