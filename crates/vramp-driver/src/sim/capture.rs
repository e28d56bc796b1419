//! Captures: which streams are part of one, what they captured, and what invalidates it.
//!
//! Life of a capture: *begun* on a stream, *grows* by work and by streams that wait for its events,
//! may be *invalidated* by a call that is refused, *ends* on the stream it began on: as nodes of a graph,
//! or as an error. Until then nothing of it runs.
//!
//! Nodes are kept in the order they were captured, so each comes behind earlier ones only.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use super::refusal::{Outcome, Refusal};
use super::state::State;
use super::streams::{Effect, Kernel, Point};
use crate::{CaptureInfo, CaptureMode, Event, GraphNode, Stream};

/// One piece of captured work.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub kernel: Kernel,
    pub effect: Effect,
    /// The nodes it comes directly behind, by their places.
    pub after: Vec<usize>,
}

/// What an event stands for.
#[derive(Clone, Debug)]
pub(super) enum Recorded {
    Never,
    At(Point),
    /// The dependencies of a stream that captured.
    Captured {
        capture: u64,
        dependencies: Vec<usize>,
    },
}

#[derive(Debug)]
struct Capture {
    origin: usize,
    mode: CaptureMode,
    thread: ThreadId,
    invalidated: bool,
    nodes: Vec<Node>,
    /// For every stream that is part of it, what its next work comes behind.
    dependencies: BTreeMap<usize, Vec<usize>>,
}

#[derive(Debug, Default)]
pub(super) struct Captures {
    made: u64,
    open: BTreeMap<u64, Capture>,
    /// How many were invalidated so far.
    pub invalidated: u64,
}

/// How a node's number is made of its capture's and its place.
const PLACES: u32 = 32;

pub(super) fn node_id(capture: u64, place: usize) -> GraphNode {
    GraphNode::from_number(capture << PLACES | place as u64)
}

/// The capture and the place of a node.
pub(super) fn node_place(node: GraphNode) -> (u64, usize) {
    (node.number() >> PLACES, (node.number() & ((1 << PLACES) - 1)) as usize)
}

fn invalidated() -> Refusal {
    Refusal { code: 901, detail: "a refused call invalidated the capture".to_owned() }
}

impl Captures {
    /// The capture that `stream` is part of.
    pub fn of(&self, stream: usize) -> Option<u64> {
        self.open
            .iter()
            .find(|(_, open)| open.dependencies.contains_key(&stream))
            .map(|(id, _)| *id)
    }

    pub fn under_way(&self) -> usize {
        self.open.len()
    }

    pub fn nodes(&self, capture: u64) -> Option<&[Node]> {
        self.open.get(&capture).map(|open| open.nodes.as_slice())
    }

    fn begin(&mut self, stream: usize, mode: CaptureMode) {
        self.made += 1;
        let capture = Capture {
            origin: stream,
            mode,
            thread: std::thread::current().id(),
            invalidated: false,
            nodes: Vec::new(),
            dependencies: BTreeMap::from([(stream, Vec::new())]),
        };
        self.open.insert(self.made, capture);
    }

    /// The capture, unless it is over or invalidated.
    fn sound(&mut self, capture: u64) -> Outcome<&mut Capture> {
        match self.open.get_mut(&capture) {
            Some(open) if open.invalidated => Err(invalidated()),
            Some(open) => Ok(open),
            None => Err(captured_event("its capture is over: record it anew")),
        }
    }

    /// Refuses if `stream` is part of a capture that is invalidated.
    pub fn check_sound(&mut self, stream: usize) -> Outcome<()> {
        match self.of(stream) {
            Some(capture) => self.sound(capture).map(drop),
            None => Ok(()),
        }
    }

    fn dependencies(&mut self, capture: u64, stream: usize) -> Outcome<Vec<usize>> {
        Ok(self.sound(capture)?.dependencies[&stream].clone())
    }

    /// Takes work of `stream` in.
    pub fn add(
        &mut self,
        capture: u64,
        stream: usize,
        kernel: Kernel,
        effect: Effect,
    ) -> Outcome<()> {
        let open = self.sound(capture)?;
        let place = open.nodes.len();
        let after = std::mem::replace(open.dependencies.entry(stream).or_default(), vec![place]);
        open.nodes.push(Node { kernel, effect, after });
        Ok(())
    }

    /// Lets `stream`, which may be new to the capture, come behind `dependencies` too.
    fn join(&mut self, capture: u64, stream: usize, dependencies: &[usize]) -> Outcome<()> {
        let own = self.sound(capture)?.dependencies.entry(stream).or_default();
        own.extend(dependencies);
        own.sort_unstable();
        own.dedup();
        Ok(())
    }

    pub fn invalidate(&mut self, capture: u64) {
        if let Some(open) = self.open.get_mut(&capture)
            && !open.invalidated
        {
            open.invalidated = true;
            self.invalidated += 1;
        }
    }

    /// Refuses a call that a capture forbids to the calling thread, and invalidates all that do.
    pub fn refuse_unsafe(&mut self) -> Outcome<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let thread = std::thread::current().id();
        let forbids = |open: &Capture| match open.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => open.thread == thread,
            CaptureMode::Relaxed => false,
        };
        let forbidding = self.open.iter().filter(|(_, open)| forbids(open));
        let forbidding: Vec<(u64, usize)> =
            forbidding.map(|(capture, open)| (*capture, open.origin)).collect();
        forbidding.iter().for_each(|(capture, _)| self.invalidate(*capture));
        match forbidding.first() {
            None => Ok(()),
            Some((_, origin)) => {
                Err(Refusal::capturing(format!("stream {} captures a graph", origin + 1)))
            }
        }
    }

    /// Ends the capture that began on `stream`.
    fn end(&mut self, stream: usize) -> Outcome<(u64, Vec<Node>)> {
        let Some(capture) = self.of(stream) else {
            return Err(Refusal { code: 401, detail: "the stream does not capture".to_owned() });
        };
        let open = &self.open[&capture];
        if open.origin != stream {
            let detail = format!("the capture began on stream {}", open.origin + 1);
            return Err(Refusal { code: 903, detail });
        }
        if open.mode != CaptureMode::Relaxed && open.thread != std::thread::current().id() {
            let detail = "the capture began on another thread".to_owned();
            return Err(Refusal { code: 908, detail });
        }
        let over = self.open.remove(&capture).expect("it was found by its stream");
        if over.invalidated {
            return Err(invalidated());
        }
        match over.unjoined() {
            None => Ok((capture, over.nodes)),
            Some(stream) => {
                self.invalidated += 1;
                let detail = format!("the last work of stream {} was not joined", stream + 1);
                Err(Refusal { code: 904, detail })
            }
        }
    }
}

impl Capture {
    /// A stream whose last work the origin does not come behind.
    fn unjoined(&self) -> Option<usize> {
        let mut joined = vec![false; self.nodes.len()];
        self.dependencies[&self.origin].iter().for_each(|node| joined[*node] = true);
        for (place, node) in self.nodes.iter().enumerate().rev() {
            if joined[place] {
                node.after.iter().for_each(|before| joined[*before] = true);
            }
        }
        let left_out = |dependencies: &Vec<usize>| dependencies.iter().any(|node| !joined[*node]);
        self.dependencies
            .iter()
            .find(|(_, dependencies)| left_out(dependencies))
            .map(|(stream, _)| *stream)
    }
}

fn captured_event(detail: &str) -> Refusal {
    Refusal { code: 907, detail: format!("the event was recorded in a capture; {detail}") }
}

impl State {
    pub fn begin_capture(&mut self, stream: Stream, mode: CaptureMode) -> Outcome<()> {
        let index = self.streams.index(stream)?;
        if self.captures.of(index).is_some() {
            return Err(Refusal { code: 401, detail: "the stream captures already".to_owned() });
        }
        self.captures.begin(index, mode);
        Ok(())
    }

    /// The number of the capture that ended, and its nodes.
    pub fn end_capture(&mut self, stream: Stream) -> Outcome<(u64, Vec<Node>)> {
        let index = self.streams.index(stream)?;
        self.captures.end(index)
    }

    pub fn capture_info(&mut self, stream: Stream) -> Outcome<Option<CaptureInfo>> {
        let index = self.streams.index(stream)?;
        let Some(capture) = self.captures.of(index) else { return Ok(None) };
        let dependencies = self.captures.dependencies(capture, index)?;
        let dependencies = dependencies.into_iter().map(|place| node_id(capture, place)).collect();
        Ok(Some(CaptureInfo { capture, dependencies }))
    }

    /// What the event was last recorded as.
    pub fn recorded(&self, event: Event) -> Outcome<Recorded> {
        let known = self.events.get(&event.number()).cloned();
        known.ok_or_else(|| Refusal::unknown("event", event.number()))
    }

    pub fn record(&mut self, event: Event, stream: Stream) -> Outcome<()> {
        self.recorded(event)?;
        let index = self.streams.index(stream)?;
        let recorded = match self.captures.of(index) {
            Some(capture) => {
                let dependencies = self.captures.dependencies(capture, index)?;
                if let Some(checker) = &mut self.checker {
                    checker.forget_event(event.number());
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
        self.events.insert(event.number(), recorded);
        Ok(())
    }

    pub fn wait(&mut self, stream: Stream, event: Event) -> Outcome<()> {
        let recorded = self.recorded(event)?;
        let index = self.streams.index(stream)?;
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
                self.captures.check_sound(index)?;
                self.captures.invalidate(own);
                self.captures.invalidate(capture);
                let detail = "the event belongs to another capture".to_owned();
                return Err(Refusal { code: 902, detail });
            }
            (Some(own), Recorded::Never | Recorded::At(_)) => {
                self.captures.check_sound(index)?;
                self.captures.invalidate(own);
                let detail = "the event was recorded outside of the capture".to_owned();
                return Err(Refusal { code: 905, detail });
            }
        }
        Ok(())
    }

    /// The point that the host asks about or waits for. Refused where a capture is in the way.
    pub fn point_for_host(&mut self, event: Event) -> Outcome<Option<Point>> {
        let point = match self.recorded(event)? {
            Recorded::Captured { capture, .. } => {
                self.captures.invalidate(capture);
                return Err(captured_event("nothing of it runs before the graph is launched"));
            }
            Recorded::Never => None,
            Recorded::At(point) => Some(point),
        };
        self.captures.refuse_unsafe()?;
        Ok(point)
    }

    /// Refuses what cannot be done to a stream that captures, and invalidates its capture.
    pub fn refuse_capturing(&mut self, stream: usize) -> Outcome<()> {
        match self.captures.of(stream) {
            None => Ok(()),
            Some(capture) => {
                self.captures.invalidate(capture);
                Err(Refusal::capturing("the stream captures a graph"))
            }
        }
    }
}
