//! Writes a timeline for ui.perfetto.dev and chrome://tracing, in Chrome's JSON trace format.
//!
//! 1. Each device is a process. Each stream has a counter of its allocated bytes and a counter of
//!    its reserved bytes.
//! 2. Each block is an asynchronous slice from its `alloc` to its `free_completed`, named after its
//!    size and the innermost frame of its stack. If other streams used it after its free was
//!    requested, an instant in the slice marks the request.
//! 3. Each range that the program marked is an asynchronous slice.
//! 4. Out of memory, segment events and the program's marks are instants.
//!
//! Blocks older than the recording begin with it. Blocks that are never freed stay open.
//!
//! Deliberately absent: whole stacks, which would make up most of the file. A snapshot has them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Write};

use serde::Serialize;
use vramp_core::Bytes;

use crate::formats::validate::validate;
use crate::{Annotation, Event, EventKind, Request, Stage, StreamIndex, Trace, Workload};

impl Trace {
    /// Writes the trace as a timeline in Chrome's JSON trace format, which Perfetto opens.
    ///
    /// Times are those of the recording, in microseconds. In a recording without times each event
    /// takes one microsecond. Reserved bytes are written only if the trace has segment events.
    ///
    /// One pass over all events, whatever the number of devices. Needs memory for the requests of one
    /// device at a time (36 bytes per event), 32 bytes per block, and the names of live blocks.
    /// Writes about 150 bytes per event in small parts: use a [`std::io::BufWriter`].
    ///
    /// # Errors
    /// Errors of `out`; [`io::ErrorKind::InvalidInput`] if an index in the trace is out of range.
    pub fn write_perfetto(&self, out: impl Write) -> io::Result<()> {
        validate(self)?;
        let mut timeline = Timeline { out, is_first: true };
        timeline.out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let is_timed = self.events.iter().any(|event| event.time_us != 0);
        let mut parts = self.parts();
        parts.retain(|_, part| !part.events.is_empty());
        let mut annotations: BTreeMap<u32, Vec<&Annotation>> = BTreeMap::new();
        for annotation in &self.annotations {
            let device = u32::from(device_of(annotation));
            annotations.entry(device).or_default().push(annotation);
            parts.entry(device).or_default();
        }
        for (device, part) in parts {
            let workload = Workload::of_part(self, device, part);
            let annotations = annotations.remove(&device).unwrap_or_default();
            Device::new(self, workload, annotations, is_timed).write(&mut timeline)?;
        }
        timeline.out.write_all(b"\n]}\n")?;
        timeline.out.flush()
    }
}

/// The array of JSON objects, written object by object.
struct Timeline<W> {
    out: W,
    is_first: bool,
}

impl<W: Write> Timeline<W> {
    fn entry<A: Serialize>(&mut self, entry: &Entry<'_, A>) -> io::Result<()> {
        self.out.write_all(if self.is_first { b"\n" } else { b",\n" })?;
        self.is_first = false;
        Ok(serde_json::to_writer(&mut self.out, entry)?)
    }
}

/// One object, with the field names of the format.
#[derive(Serialize)]
struct Entry<'a, A> {
    name: &'a str,
    ph: &'static str,
    pid: u32,
    tid: u32,
    ts: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    args: A,
}

#[derive(Serialize)]
struct Count {
    bytes: u64,
}

#[derive(Serialize)]
struct Label<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct About<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    #[serde(skip_serializing_if = "str::is_empty")]
    metadata: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    category: &'a str,
}

#[derive(Serialize)]
struct Nothing {}

/// The two counters of a stream and their names.
struct Counters {
    name: String,
    allocated_name: String,
    reserved_name: String,
    allocated: u64,
    reserved: u64,
}

/// A live block: the values that its later entries repeat.
struct Slice {
    name: Box<str>,
    stream: u32,
    size: Bytes,
}

/// Writes one device of a trace.
struct Device<'a> {
    trace: &'a Trace,
    workload: Workload,
    device: u32,
    streams: Vec<Counters>,
    /// Index in `streams` of each stream of the workload.
    stream_of: Vec<usize>,
    /// Slice of each block, from its `Alloc` to its `FreeCompleted`.
    slices: Vec<Option<Slice>>,
    /// Annotations that are not written yet, by time.
    annotations: VecDeque<&'a Annotation>,
    /// Numbers of the open ranges of each name.
    ranges: BTreeMap<&'a str, Vec<u32>>,
    range_count: u32,
    is_timed: bool,
    has_segment_events: bool,
    now: u64,
}

impl<'a> Device<'a> {
    fn new(
        trace: &'a Trace,
        workload: Workload,
        mut annotations: Vec<&'a Annotation>,
        is_timed: bool,
    ) -> Device<'a> {
        let device = workload.device;
        let reserved = reserved_at_start(trace, &workload);
        let place: HashMap<u64, usize> = trace.streams.iter().copied().zip(0..).collect();
        let stream_of = workload.streams.iter().map(|raw| place[raw]).collect();
        let streams = trace.streams.iter().zip(&reserved).map(|(&raw, &reserved)| {
            let name = if raw == 0 { "stream 0".to_owned() } else { format!("stream {raw:#x}") };
            Counters {
                allocated_name: format!("{name} allocated"),
                reserved_name: format!("{name} reserved"),
                name,
                allocated: 0,
                reserved,
            }
        });
        let mut own = workload.device_events(trace).map(|(_, event)| event);
        let has_segment_events = own.any(|event| segment_change(event).is_some());
        annotations.sort_by_key(|annotation| annotation.time_us);
        let times = [
            workload.device_events(trace).next().map(|(_, event)| event.time_us),
            annotations.first().map(|annotation| annotation.time_us),
        ];
        let first = times.into_iter().flatten().min().unwrap_or(0);
        Device {
            trace,
            slices: std::iter::repeat_with(|| None).take(workload.blocks as usize).collect(),
            streams: streams.collect(),
            stream_of,
            device,
            workload,
            annotations: annotations.into(),
            ranges: BTreeMap::new(),
            range_count: 0,
            is_timed,
            has_segment_events,
            now: if is_timed { first } else { 0 },
        }
    }

    fn write<W: Write>(mut self, timeline: &mut Timeline<W>) -> io::Result<()> {
        let name = match &self.trace.name[..] {
            "" => format!("device {}", self.device),
            trace => format!("device {} ({trace})", self.device),
        };
        timeline.entry(&self.entry("process_name", "M", 0, Label { name: &name }))?;
        if self.has_segment_events {
            for stream in 0..self.streams.len() {
                if self.streams[stream].reserved > 0 {
                    self.count_reserved(timeline, stream)?;
                }
            }
        }
        let requests = std::mem::take(&mut self.workload.requests);
        let mut next = 0;
        for (index, event) in self.workload.device_events(self.trace) {
            // A repair comes directly before the event that required it.
            while next < requests.len() && self.workload.event_of(next).is_none_or(|at| at < index)
            {
                self.request(timeline, &requests[next..], next)?;
                next += 1;
            }
            self.annotations_until(timeline, event.time_us)?;
            self.now = if self.is_timed { event.time_us } else { index as u64 };
            while next < requests.len() && self.workload.event_of(next) == Some(index) {
                self.request(timeline, &requests[next..], next)?;
                next += 1;
            }
            self.event(timeline, index, event)?;
        }
        for at in next..requests.len() {
            self.request(timeline, &requests[at..], at)?;
        }
        self.annotations_until(timeline, u64::MAX)
    }

    // --- annotations ---

    /// Writes the annotations up to this time. In a recording without times all of them come first.
    fn annotations_until<W: Write>(
        &mut self,
        timeline: &mut Timeline<W>,
        time_us: u64,
    ) -> io::Result<()> {
        while let Some(&next) = self.annotations.front()
            && (next.time_us <= time_us || !self.is_timed)
        {
            self.annotations.pop_front();
            if self.is_timed {
                self.now = next.time_us;
            }
            self.annotation(timeline, next)?;
        }
        Ok(())
    }

    fn annotation<W: Write>(
        &mut self,
        timeline: &mut Timeline<W>,
        annotation: &'a Annotation,
    ) -> io::Result<()> {
        let open = self.ranges.entry(&annotation.name).or_default();
        let (ph, range) = match &annotation.stage {
            Stage::Start => {
                self.range_count += 1;
                open.push(self.range_count);
                ("b", Some(self.range_count))
            }
            Stage::End => match open.pop() {
                Some(range) => ("e", Some(range)),
                None => ("i", None),
            },
            Stage::Other(_) => ("i", None),
        };
        match range {
            Some(range) => {
                let id = Some(format!("{}.range{range}", self.device));
                let entry = self.entry(&annotation.name, ph, 0, Nothing {});
                timeline.entry(&Entry { cat: Some("annotation"), id, ..entry })
            }
            None => {
                let name = format!("{} {}", annotation.name, annotation.stage.name());
                let entry = self.entry(&name, ph, 0, Nothing {});
                timeline.entry(&Entry { s: Some("p"), ..entry })
            }
        }
    }

    // --- requests ---

    /// Writes the first of these requests. The second shows whether a free completes at once.
    fn request<W: Write>(
        &mut self,
        timeline: &mut Timeline<W>,
        requests: &[Request],
        index: usize,
    ) -> io::Result<()> {
        match requests[0] {
            Request::Alloc { block, size, stream } => {
                self.begin(timeline, block, size, stream, index)
            }
            Request::Free { block } => {
                let over = requests.get(1) == Some(&Request::FreeCompleted { block });
                self.free_requested(timeline, block, over)
            }
            Request::FreeCompleted { block } => self.end(timeline, block),
            // Written with the other instants.
            Request::Oom { .. } => Ok(()),
        }
    }

    fn begin<W: Write>(
        &mut self,
        timeline: &mut Timeline<W>,
        block: u32,
        size: Bytes,
        stream: u32,
        request: usize,
    ) -> io::Result<()> {
        let event = self.workload.event_of(request).map(|event| self.trace.events[event]);
        let label = self.workload.label_of(&self.trace.labels, block);
        let stream = self.stream_of[stream as usize];
        let stack = self.workload.stack_of(block);
        let frame = stack.and_then(|stack| self.trace.stacks.frames(stack).next());
        let name = match frame {
            Some(frame) => format!("{size} {}", frame.name),
            None => size.to_string(),
        };
        let about = About {
            address: event.map(|event| hexadecimal(event.address.number())),
            bytes: size.count(),
            stream: Some(&self.streams[stream].name),
            at: frame.map(|frame| format!("{}:{}", frame.filename, frame.line)),
            metadata: label.metadata,
            category: label.category,
        };
        let stream_number = stream as u32;
        let entry = self.of_block(&name, "b", stream_number, block, about);
        timeline.entry(&entry)?;
        self.streams[stream].allocated =
            self.streams[stream].allocated.saturating_add(size.count());
        self.slices[block as usize] =
            Some(Slice { name: name.into_boxed_str(), stream: stream_number, size });
        self.count_allocated(timeline, stream)
    }

    fn free_requested<W: Write>(
        &mut self,
        timeline: &mut Timeline<W>,
        block: u32,
        over: bool,
    ) -> io::Result<()> {
        let slice = self.slices[block as usize].as_ref().expect("a Free follows its Alloc");
        let stream = slice.stream as usize;
        if !over {
            let mark = self.of_block("free_requested", "n", slice.stream, block, Nothing {});
            timeline.entry(&mark)?;
        }
        let counters = &mut self.streams[stream];
        counters.allocated = counters.allocated.saturating_sub(slice.size.count());
        self.count_allocated(timeline, stream)
    }

    fn end<W: Write>(&mut self, timeline: &mut Timeline<W>, block: u32) -> io::Result<()> {
        let slice = self.slices[block as usize].take().expect("a FreeCompleted follows its Alloc");
        timeline.entry(&self.of_block(&slice.name, "e", slice.stream, block, Nothing {}))
    }

    // --- instants ---

    fn event<W: Write>(
        &mut self,
        timeline: &mut Timeline<W>,
        index: usize,
        event: &Event,
    ) -> io::Result<()> {
        let name = match event.kind {
            EventKind::Alloc | EventKind::FreeRequested | EventKind::FreeCompleted => return Ok(()),
            EventKind::Oom => {
                let free = event.device_free().map(|free| format!(", {free} free on the card"));
                format!("out of memory: {} requested{}", event.size, free.unwrap_or_default())
            }
            EventKind::Snapshot | EventKind::UserDefined => {
                self.trace.action_name(event.kind).to_owned()
            }
            kind => format!("{} {}", self.trace.action_name(kind), event.size),
        };
        let about = About {
            address: (event.kind != EventKind::Oom).then(|| hexadecimal(event.address.number())),
            bytes: event.size.count(),
            stream: self.streams.get(event.stream.0 as usize).map(|stream| &stream.name[..]),
            at: event
                .stack
                .and_then(|stack| self.trace.stacks.frames(stack).next())
                .map(|frame| format!("{} ({}:{})", frame.name, frame.filename, frame.line)),
            metadata: self.trace.labels.of_event(index).metadata,
            category: "",
        };
        let mut entry = self.entry(&name, "i", event.stream.0, about);
        entry.s = Some("p");
        timeline.entry(&entry)?;
        let Some(change) = segment_change(event) else { return Ok(()) };
        let stream = event.stream.0 as usize;
        let reserved = i128::from(self.streams[stream].reserved) + change;
        self.streams[stream].reserved = u64::try_from(reserved.max(0)).unwrap_or(u64::MAX);
        self.count_reserved(timeline, stream)
    }

    // --- entries ---

    fn count_allocated<W: Write>(
        &self,
        timeline: &mut Timeline<W>,
        stream: usize,
    ) -> io::Result<()> {
        let counters = &self.streams[stream];
        let count = Count { bytes: counters.allocated };
        timeline.entry(&self.entry(&counters.allocated_name, "C", 0, count))
    }

    fn count_reserved<W: Write>(
        &self,
        timeline: &mut Timeline<W>,
        stream: usize,
    ) -> io::Result<()> {
        let counters = &self.streams[stream];
        let count = Count { bytes: counters.reserved };
        timeline.entry(&self.entry(&counters.reserved_name, "C", 0, count))
    }

    /// Devices and streams are numbered from one: viewers treat process and thread 0 as idle.
    fn entry<'e, A>(&self, name: &'e str, ph: &'static str, stream: u32, args: A) -> Entry<'e, A> {
        let (pid, tid, ts) = (self.device + 1, stream.saturating_add(1), self.now);
        Entry { name, ph, pid, tid, ts, cat: None, id: None, s: None, args }
    }

    fn of_block<'e, A>(
        &self,
        name: &'e str,
        ph: &'static str,
        stream: u32,
        block: u32,
        args: A,
    ) -> Entry<'e, A> {
        // Ids are compared across processes.
        let id = Some(format!("{}.{block}", self.device));
        Entry { cat: Some("block"), id, ..self.entry(name, ph, stream, args) }
    }
}

/// Returns the device on which an annotation is shown.
fn device_of(annotation: &Annotation) -> u16 {
    annotation.device.unwrap_or(0)
}

/// Returns the change of the reserved bytes by an event, or `None` if it is not a segment event.
fn segment_change(event: &Event) -> Option<i128> {
    let size = i128::from(event.size.count());
    match event.kind {
        EventKind::SegmentAlloc | EventKind::SegmentMap => Some(size),
        EventKind::SegmentFree | EventKind::SegmentUnmap => Some(-size),
        _ => None,
    }
}

/// Returns the reserved bytes of each stream before the first event: those at the end minus all
/// changes, and at least enough that they never become negative.
fn reserved_at_start(trace: &Trace, workload: &Workload) -> Vec<u64> {
    let mut sums = vec![(0i128, 0i128); trace.streams.len()];
    for (_, event) in workload.device_events(trace) {
        let (sum, least) = &mut sums[event.stream.0 as usize];
        *sum += segment_change(event).unwrap_or(0);
        *least = (*least).min(*sum);
    }
    let mut at_end = vec![0i128; trace.streams.len()];
    for (_, segment) in workload.device_segments(trace) {
        let StreamIndex(stream) = segment.stream;
        at_end[stream as usize] += i128::from(segment.total_size.count());
    }
    let at_start = sums.into_iter().zip(at_end).map(|((sum, least), end)| (end - sum).max(-least));
    at_start.map(|bytes| u64::try_from(bytes).unwrap_or(u64::MAX)).collect()
}

/// As text, because many readers of JSON round integers above 2^53.
fn hexadecimal(number: u64) -> String {
    format!("{number:#x}")
}
