//! One recorded job as columns of a page.
//!
//! 1. The head is JSON: names, counts, the peak, the failures, the overview's bins.
//! 2. The columns hold every event. `script.js` decodes them; the order of the operations below is
//!    what it relies on.
//!
//! | column | for each | value |
//! |---|---|---|
//! | `op` | operation | its kind; [`SAME_EVENT`] if the event before has another one |
//! | `size` | alloc | index in `sizes` |
//! | `site` | alloc | index in `sites` |
//! | `address` | alloc | 0 if unknown, else 1 + zigzag step from the known one before |
//! | `age` | free, completed | blocks allocated since the block |
//! | `range` | segment change | zigzag step of the address, size |
//! | `time` | every `time_step`-th event | zigzag step in microseconds |
//! | `sizes` | different size | bytes |
//! | `sites` | different site | 1 + stack or 0, category, stream |
//! | `nodes` | node of the tree of frames, from 1 | parent or 0, index in `frames` |
//! | `stacks` | stack | its innermost node or 0, index in `frames` of its line |
//! | `frames` | different frame | texts as a JSON array |
//! | `start` | range reserved before the first event | step of the address, length |
//! | `curve0`... | change of a curve | step of the state, zigzag step of the bytes |

use std::collections::HashMap;
use std::io;
use std::iter::Peekable;

use indexmap::IndexSet;
use serde::Serialize;
use vramp_trace::{Annotation, EventKind, Request, StackId, Stage};

use super::bins::Bins;
use super::columns::{Column, base64_len, pack, zigzag};
use super::ranges::reserved_at_start;
use super::text::plain;
use crate::category::Category;
use crate::frames::folded;
use crate::job::Job;
use crate::replay::CurvePoint;

/// Set in an operation of the same event as the one before.
pub(super) const SAME_EVENT: u8 = 0x80;

/// Kinds of operations.
pub(super) mod op {
    pub const ALLOC: u8 = 0;
    pub const FREE: u8 = 1;
    pub const COMPLETED: u8 = 2;
    /// Completes the block that was freed last: has no age.
    pub const COMPLETED_LAST: u8 = 3;
    pub const OOM: u8 = 4;
    pub const RESERVE: u8 = 5;
    pub const RELEASE: u8 = 6;
    /// An event that changes no memory.
    pub const NOTHING: u8 = 7;
    /// As [`RESERVE`], within an expandable segment.
    pub const MAP: u8 = 8;
    pub const UNMAP: u8 = 9;
}

/// Times of recordings with more events are kept for every 64th.
const ALL_TIMES: usize = 1 << 20;

/// Failures in a page, at most, beside the one that is shown.
const FAILURES: usize = 500;

/// Marks in a page, at most.
const MARKS: usize = 2000;

/// Reserved bytes over the run, to be drawn as a line.
#[derive(Clone, Debug)]
pub struct Curve {
    /// What the line is called: `reserved by vramp (replayed)`.
    pub label: String,
    /// `recorded`, `vramp`, `torch` or another word; the page chooses the colour by it.
    pub kind: &'static str,
    /// Reserved bytes from a request on, in the order of requests.
    pub points: Vec<CurvePoint>,
}

/// What one part of the page is made from.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The recorded job.
    pub job: &'a Job<'a>,
    /// Reserved bytes of allocators on which it was replayed.
    pub curves: &'a [Curve],
    /// Largest size of the columns in the page, in bytes.
    pub budget: u64,
}

impl std::fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("job", &self.job.workload.name).finish_non_exhaustive()
    }
}

/// What of a recording is in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// Every event, with the addresses of all blocks.
    All,
    /// Every event; addresses only of blocks that are live at the peak, a failure or the end.
    FewAddresses,
    /// Only the overview's bins.
    Bins,
}

/// A failure of the recorded job for lack of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Failure {
    /// State after the event.
    pub state: usize,
    /// Requested bytes.
    pub size: u64,
    /// Allocated bytes at that time.
    pub live: u64,
    /// Free bytes of the device, if recorded.
    pub device_free: Option<u64>,
    /// Allocated bytes of each category.
    pub categories: Vec<u64>,
}

impl Head {
    /// The failure that the findings are about.
    pub fn failure(&self) -> Option<&Failure> {
        self.failures.get(self.shown_failure?)
    }
}

/// The head of a job, as the page reads it.
#[derive(Debug, Serialize)]
pub(super) struct Head {
    pub name: String,
    pub device: u32,
    /// Events of the device.
    pub events: usize,
    /// Operations before the first event.
    pub initial: usize,
    pub blocks: u32,
    pub kept: Kept,
    /// Events from one time in the column to the next; 0 if no times were recorded.
    pub time_step: usize,
    pub categories: Vec<&'static str>,
    /// Raw handles in hexadecimal: they have more digits than a script's numbers.
    pub streams: Vec<String>,
    pub peak: usize,
    pub peak_bytes: u64,
    pub peak_categories: Vec<u64>,
    pub end_bytes: u64,
    pub end_categories: Vec<u64>,
    pub failures: Vec<Failure>,
    /// The one of `failures` that the findings are about.
    pub shown_failure: Option<usize>,
    pub failures_left_out: usize,
    /// True if addresses and segments were recorded.
    pub has_addresses: bool,
    pub marks: Vec<(usize, String)>,
    pub marks_left_out: usize,
    pub curves: Vec<CurveHead>,
    pub bins: Bins,
    pub columns: Vec<&'static str>,
}

/// The name of a curve.
#[derive(Debug, Serialize)]
pub(super) struct CurveHead {
    pub label: String,
    pub kind: &'static str,
    pub most: u64,
}

/// A job, encoded. As large as its part of the file; the recording is not needed any more.
#[derive(Debug)]
pub struct Encoded {
    pub(super) head: Head,
    /// Compressed columns by name.
    pub(super) columns: Vec<Packed>,
}

/// A compressed column with its name.
type Packed = (&'static str, Vec<u8>);

impl Encoded {
    /// Encodes the events of one device. If the columns would exceed the budget, addresses are left
    /// out, and then all columns: see [`Encoded::kept`].
    ///
    /// O(events + frames) time; about 80 bytes of memory for each event.
    ///
    /// # Errors
    /// None in practice: compression writes to memory.
    pub fn of(source: &Source<'_>) -> io::Result<Encoded> {
        let mut encoder = Encoder::new(source);
        encoder.events();
        encoder.finish()
    }

    /// What of the recording is kept.
    pub fn kept(&self) -> Kept {
        self.head.kept
    }

    /// Returns the number of recorded events.
    pub fn events(&self) -> usize {
        self.head.events
    }

    /// Returns the length of the columns in the file.
    pub fn encoded_len(&self) -> u64 {
        self.columns.iter().map(|(_, bytes)| base64_len(bytes.len())).sum()
    }
}

/// A block while events are encoded.
#[derive(Clone, Copy)]
struct Known {
    size: u64,
    category: u8,
    address: u64,
    /// States at which it is allocated and freed.
    from: u32,
    until: u32,
}

struct Encoder<'a> {
    source: &'a Source<'a>,
    ops: Column,
    sizes: IndexSet<u64>,
    size: Column,
    sites: IndexSet<(u32, u8, u32)>,
    site: Column,
    /// Stacks that blocks of this device have, in the order of their first block.
    stacks: IndexSet<StackId>,
    age: Column,
    range: Column,
    last_range: u64,
    time: Column,
    last_time: u64,
    time_step: usize,
    blocks: Vec<Known>,
    last_freed: Option<u32>,
    live: u64,
    split: Vec<u64>,
    bins: Bins,
    /// State of each request.
    states: Vec<u32>,
    /// The current state: that after the event of this ordinal, from 1.
    state: usize,
    peak: (usize, u64, Vec<u64>),
    failures: Vec<Failure>,
    shown_failure: Option<usize>,
    failures_left_out: usize,
    /// Change of the recorded allocator's reserved bytes since the start, by state.
    reserved: Vec<(u32, i128)>,
    initial: usize,
    events: usize,
    marks: Vec<(usize, String)>,
    marks_left_out: usize,
    /// Annotations that are later than the events so far.
    annotations: Peekable<std::vec::IntoIter<&'a Annotation>>,
}

impl<'a> Encoder<'a> {
    fn new(source: &'a Source<'a>) -> Encoder<'a> {
        let (mut events, mut timed) = (0, false);
        for (_, event) in source.job.workload.device_events(source.job.trace) {
            events += 1;
            timed |= event.time_us > 0;
        }
        let time_step = match (timed, events > ALL_TIMES) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 64,
        };
        let categories = Category::ALL.len();
        Encoder {
            source,
            ops: Column::default(),
            sizes: IndexSet::new(),
            size: Column::default(),
            sites: IndexSet::new(),
            site: Column::default(),
            stacks: IndexSet::new(),
            age: Column::default(),
            range: Column::default(),
            last_range: 0,
            time: Column::default(),
            last_time: 0,
            time_step,
            blocks: Vec::with_capacity(source.job.workload.blocks as usize),
            last_freed: None,
            live: 0,
            split: vec![0; categories],
            bins: Bins::new(events + 1, categories),
            states: Vec::with_capacity(source.job.workload.requests.len()),
            state: 0,
            peak: (0, 0, vec![0; categories]),
            failures: Vec::new(),
            shown_failure: None,
            failures_left_out: 0,
            reserved: Vec::new(),
            initial: 0,
            events,
            marks: Vec::new(),
            marks_left_out: 0,
            annotations: annotations(source.job).into_iter().peekable(),
        }
    }

    /// Encodes the requests before the first event, and then every event with its requests.
    fn events(&mut self) {
        let (trace, workload) = (self.source.job.trace, &self.source.job.workload);
        let mut next = 0;
        while next < workload.requests.len() && workload.event_of(next).is_none() {
            self.request(next, None, false);
            next += 1;
        }
        self.initial = next;
        self.state_is_over();
        for (index, event) in workload.device_events(trace) {
            self.state += 1;
            self.note_time(event.time_us);
            let mut is_first = true;
            while next < workload.requests.len() && workload.event_of(next) == Some(index) {
                let address = (event.kind == EventKind::Alloc).then(|| event.address.number());
                self.request(next, address, !is_first);
                is_first = false;
                next += 1;
            }
            if is_first {
                self.other(event);
            }
            self.state_is_over();
        }
    }

    fn note_time(&mut self, time_us: u64) {
        while let Some(annotation) = self.annotations.next_if(|it| it.time_us <= time_us) {
            self.mark(self.state, &text_of(annotation));
        }
        if self.time_step > 0 && (self.state - 1).is_multiple_of(self.time_step) {
            // The axis of the page needs times that do not decrease.
            let time = time_us.max(self.last_time);
            self.time.step(self.last_time, time);
            self.last_time = time;
        }
    }

    fn op(&mut self, op: u8, same_event: bool) {
        self.ops.byte(if same_event { op | SAME_EVENT } else { op });
    }

    fn request(&mut self, index: usize, address: Option<u64>, same_event: bool) {
        let workload = &self.source.job.workload;
        self.states.push(self.state as u32);
        match workload.requests[index] {
            Request::Alloc { block, size, stream } => {
                let early = workload.initial_address(block).map(|address| address.number());
                self.op(op::ALLOC, same_event);
                self.alloc(block, size.count(), stream, early.or(address).unwrap_or(0));
            }
            Request::Free { block } => {
                self.op(op::FREE, same_event);
                self.age.number(self.age_of(block));
                self.last_freed = Some(block);
                let known = &mut self.blocks[block as usize];
                known.until = self.state as u32;
                self.live = self.live.saturating_sub(known.size);
                let split = &mut self.split[usize::from(known.category)];
                *split = split.saturating_sub(known.size);
            }
            Request::FreeCompleted { block } if self.last_freed == Some(block) => {
                self.op(op::COMPLETED_LAST, same_event);
            }
            Request::FreeCompleted { block } => {
                self.op(op::COMPLETED, same_event);
                self.age.number(self.age_of(block));
            }
            Request::Oom { size, device_free, .. } => {
                self.op(op::OOM, same_event);
                let shown = self.source.job.recorded.oom.map(|oom| oom.request);
                if shown == Some(index) {
                    self.shown_failure = Some(self.failures.len());
                } else if self.failures.len() >= FAILURES {
                    self.failures_left_out += 1;
                    return;
                }
                self.failures.push(Failure {
                    state: self.state,
                    size: size.count(),
                    live: self.live,
                    device_free: device_free.map(|free| free.count()),
                    categories: self.split.clone(),
                });
            }
        }
    }

    fn age_of(&self, block: u32) -> u64 {
        self.blocks.len() as u64 - 1 - u64::from(block)
    }

    fn alloc(&mut self, block: u32, size: u64, stream: u32, address: u64) {
        let job = self.source.job;
        let category = job.categories.get(block as usize).copied().unwrap_or(Category::Unknown);
        let category = category as u8;
        let stack = job
            .blocks
            .get(block)
            .stack
            .map_or(0, |stack| self.stacks.insert_full(stack).0 as u32 + 1);
        self.size.number(self.sizes.insert_full(size).0 as u64);
        self.site.number(self.sites.insert_full((stack, category, stream)).0 as u64);
        let from = self.state as u32;
        self.blocks.push(Known { size, category, address, from, until: u32::MAX });
        self.live = self.live.saturating_add(size);
        if let Some(split) = self.split.get_mut(usize::from(category)) {
            *split = split.saturating_add(size);
        }
        if self.live > self.peak.1 {
            self.peak.0 = self.state;
            self.peak.1 = self.live;
            self.peak.2.copy_from_slice(&self.split);
        }
    }

    /// Encodes an event without a request.
    fn other(&mut self, event: &vramp_trace::Event) {
        let (start, size) = (event.address.number(), event.size.count());
        let kind = match event.kind {
            EventKind::SegmentAlloc => op::RESERVE,
            EventKind::SegmentFree => op::RELEASE,
            EventKind::SegmentMap => op::MAP,
            EventKind::SegmentUnmap => op::UNMAP,
            _ => {
                let name = self.source.job.trace.action_name(event.kind);
                self.mark(self.state, name);
                return self.op(op::NOTHING, false);
            }
        };
        self.op(kind, false);
        let before = self.reserved.last().map_or(0, |&(_, change)| change);
        let grows = kind == op::RESERVE || kind == op::MAP;
        let change = if grows { i128::from(size) } else { -i128::from(size) };
        self.reserved.push((self.state as u32, before + change));
        self.range.step(self.last_range, start);
        self.range.number(size);
        self.last_range = start;
    }

    /// Adds a mark for an event that is neither a request nor a segment change.
    fn mark(&mut self, state: usize, name: &str) {
        if matches!(name, "alloc" | "free_requested" | "free_completed") {
            return;
        }
        if self.marks.len() < MARKS {
            self.marks.push((state, plain(name)));
        } else {
            self.marks_left_out += 1;
        }
    }

    fn state_is_over(&mut self) {
        self.bins.push(self.live, &self.split);
    }

    fn finish(mut self) -> io::Result<Encoded> {
        let source = self.source;
        let workload = &source.job.workload;
        while let Some(annotation) = self.annotations.next() {
            self.mark(self.state, &text_of(annotation));
        }
        let mut columns = Vec::new();
        let curves = self.curves(&mut columns)?;
        self.tables(&mut columns)?;
        let moments = self.moments();
        for (name, column) in [
            ("op", self.ops),
            ("size", self.size),
            ("site", self.site),
            ("age", self.age),
            ("range", self.range),
            ("time", self.time),
        ] {
            columns.push((name, column.packed()?));
        }
        let kept = keep(&mut columns, &self.blocks, &moments, source.budget)?;
        let head = Head {
            name: plain(&workload.name),
            device: workload.device,
            events: self.events,
            initial: self.initial,
            blocks: workload.blocks,
            kept,
            time_step: self.time_step,
            categories: Category::ALL.map(Category::name).to_vec(),
            streams: workload.streams.iter().map(|raw| format!("{raw:#x}")).collect(),
            peak: self.peak.0,
            peak_bytes: self.peak.1,
            peak_categories: self.peak.2,
            end_bytes: self.live,
            end_categories: self.split,
            failures: self.failures,
            shown_failure: self.shown_failure,
            failures_left_out: self.failures_left_out,
            has_addresses: self.blocks.iter().any(|block| block.address > 0),
            marks: self.marks,
            marks_left_out: self.marks_left_out,
            curves,
            bins: self.bins,
            columns: columns.iter().map(|&(name, _)| name).collect(),
        };
        Ok(Encoded { head, columns })
    }

    /// Adds the curves to the bins and the columns, the recorded allocator's first.
    fn curves(&mut self, columns: &mut Vec<Packed>) -> io::Result<Vec<CurveHead>> {
        let mut heads = Vec::new();
        let recorded = self.recorded_curve();
        let replayed = self.source.curves.iter();
        let labels = replayed.clone().map(|curve| (plain(&curve.label), curve.kind));
        let labels =
            recorded.iter().map(|_| ("reserved, recorded".to_owned(), "recorded")).chain(labels);
        let points: Vec<Vec<(u32, u64)>> = replayed.map(|curve| self.by_state(curve)).collect();
        let points = recorded.iter().chain(&points);
        for (index, ((label, kind), points)) in labels.zip(points).enumerate() {
            self.bins.push_curve(points);
            let most = points.iter().map(|&(_, bytes)| bytes).max().unwrap_or(0);
            heads.push(CurveHead { label, kind, most });
            if let Some(&name) = CURVE_COLUMNS.get(index) {
                columns.push((name, curve_column(points).packed()?));
            }
        }
        Ok(heads)
    }

    /// Adds what events refer to: sizes, sites, stacks, and the ranges reserved at the start.
    fn tables(&self, columns: &mut Vec<Packed>) -> io::Result<()> {
        let job = self.source.job;
        let mut start = Column::default();
        let mut before = 0;
        for (from, until) in reserved_at_start(job.trace, &job.workload).iter() {
            start.number(from - before);
            start.number(until - from);
            before = from;
        }
        let mut sizes = Column::default();
        self.sizes.iter().for_each(|&size| sizes.number(size));
        let mut sites = Column::default();
        for &(stack, category, stream) in &self.sites {
            sites.number(u64::from(stack));
            sites.byte(category);
            sites.number(u64::from(stream));
        }
        let texts = Texts::of(&self.stacks, job);
        let tables = [
            ("start", start),
            ("sizes", sizes),
            ("sites", sites),
            ("nodes", texts.nodes),
            ("stacks", texts.stacks),
        ];
        for (name, column) in tables {
            columns.push((name, column.packed()?));
        }
        let frames: Vec<&String> = texts.frames.iter().collect();
        columns.push(("frames", pack(&serde_json::to_vec(&frames)?)?));
        Ok(())
    }

    /// The reserved bytes of the recorded allocator by state. Those at the start follow from those at
    /// the end. `None` if neither segments nor their events were recorded.
    fn recorded_curve(&self) -> Option<Vec<(u32, u64)>> {
        let job = self.source.job;
        let segments = job.workload.device_segments(job.trace);
        let sizes = segments.map(|(_, segment)| i128::from(segment.total_size.count()));
        let at_end = sizes.reduce(|sum, size| sum + size);
        let change = self.reserved.last().map_or(0, |&(_, change)| change);
        let lowest = self.reserved.iter().map(|&(_, change)| change).min().unwrap_or(0).min(0);
        if at_end.is_none() && self.reserved.is_empty() {
            return None;
        }
        let at_start = at_end.map_or(0, |end| end - change).max(-lowest);
        let bytes = |change: i128| u64::try_from(at_start + change).unwrap_or(u64::MAX);
        let changes = self.reserved.iter().map(|&(state, change)| (state, bytes(change)));
        Some(std::iter::once((0, bytes(0))).chain(changes).collect())
    }

    /// The points of a curve by state: the last one of each state.
    fn by_state(&self, curve: &Curve) -> Vec<(u32, u64)> {
        let mut points: Vec<(u32, u64)> = Vec::with_capacity(curve.points.len());
        for &CurvePoint { request, reserved_bytes: bytes } in &curve.points {
            let state = match self.states.get(request as usize) {
                Some(&state) => state,
                None => self.states.last().copied().unwrap_or(0),
            };
            match points.last_mut() {
                Some(last) if last.0 == state => last.1 = bytes,
                _ => points.push((state, bytes)),
            }
        }
        points
    }

    /// The states at which every block keeps its address: peak, failures, end.
    fn moments(&self) -> Vec<u32> {
        let shown = self.shown_failure.and_then(|shown| self.failures.get(shown));
        let failures = self.failures.iter().take(8).chain(shown);
        let mut moments: Vec<u32> = failures.map(|failure| failure.state as u32).collect();
        moments.extend([self.peak.0 as u32, self.state as u32]);
        moments
    }
}

/// Returns the annotations of the device, or of none, in the order of time.
fn annotations<'a>(job: &Job<'a>) -> Vec<&'a Annotation> {
    let own = job.annotations.iter().map(|&index| index as usize);
    let mut found: Vec<&Annotation> = own.map(|index| &job.trace.annotations[index]).collect();
    found.sort_by_key(|annotation| annotation.time_us);
    found
}

fn text_of(annotation: &Annotation) -> String {
    let name = plain(&annotation.name);
    match &annotation.stage {
        Stage::Start => name,
        Stage::End => format!("end of {name}"),
        Stage::Other(stage) => format!("{name} ({})", plain(stage)),
    }
}

/// Names of the columns of curves.
const CURVE_COLUMNS: [&str; 6] = ["curve0", "curve1", "curve2", "curve3", "curve4", "curve5"];

fn curve_column(points: &[(u32, u64)]) -> Column {
    let mut column = Column::default();
    let mut before = (0, 0);
    for &(state, bytes) in points {
        column.number(u64::from(state - before.0));
        column.step(before.1, bytes);
        before = (state, bytes);
    }
    column
}

/// Adds the addresses if the budget allows, else those of blocks that are live at `moments`. If the
/// other columns alone exceed the budget, removes all.
fn keep(
    columns: &mut Vec<Packed>,
    blocks: &[Known],
    moments: &[u32],
    budget: u64,
) -> io::Result<Kept> {
    let used: u64 = columns.iter().map(|(_, bytes)| base64_len(bytes.len())).sum();
    for kept in [Kept::All, Kept::FewAddresses] {
        let column = addresses(blocks, |block| match kept {
            Kept::All => true,
            _ => moments.iter().any(|&state| block.from <= state && state < block.until),
        });
        let packed = column.packed()?;
        if used + base64_len(packed.len()) <= budget {
            columns.push(("address", packed));
            return Ok(kept);
        }
    }
    columns.clear();
    Ok(Kept::Bins)
}

fn addresses(blocks: &[Known], is_kept: impl Fn(&Known) -> bool) -> Column {
    let mut column = Column::default();
    let mut before = 0;
    for block in blocks {
        if block.address == 0 || !is_kept(block) {
            column.number(0);
            continue;
        }
        // 2^64 - 1 is no address of a block, so that the sum fits.
        column.number(zigzag(before, block.address).saturating_add(1));
        before = block.address;
    }
    column
}

/// The frames of all stacks as one tree, whose root is outside of every stack.
struct Texts {
    frames: IndexSet<String>,
    nodes: Column,
    stacks: Column,
}

impl Texts {
    fn of(stacks: &IndexSet<StackId>, job: &Job<'_>) -> Texts {
        let mut texts =
            Texts { frames: IndexSet::new(), nodes: Column::default(), stacks: Column::default() };
        let mut known: HashMap<(u32, u32), u32> = HashMap::new();
        for &stack in stacks {
            let mut node = 0;
            for label in folded(&job.trace.stacks, Some(stack)) {
                let frame = texts.frames.insert_full(plain(&label)).0 as u32;
                let next = known.len() as u32 + 1;
                let parent = node;
                node = *known.entry((parent, frame)).or_insert_with(|| {
                    texts.nodes.number(u64::from(parent));
                    texts.nodes.number(u64::from(frame));
                    next
                });
            }
            let line = job.labels.site(job.labels.site_of(Some(stack)));
            let line = texts.frames.insert_full(plain(line)).0;
            texts.stacks.number(u64::from(node));
            texts.stacks.number(line as u64);
        }
        texts
    }
}
