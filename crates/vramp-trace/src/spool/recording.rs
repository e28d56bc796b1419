//! What a process recorded, and the trace made from it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use vramp_core::{Bytes, DeviceAddr};

use super::record::{Change, Event, Module, Record};
use super::{Api, End, SpoolError, read};
use crate::{EventKind, Frame, StackId, StreamIndex, Trace};

/// Most events of a recording. An event makes at most three of a trace, which holds 2^32.
const EVENTS_MAX: u32 = 1 << 30;

/// File of the frame that names the driver's function.
const DRIVER: &str = "libcuda.so.1";

/// Beginning of the name of the library that records. Its own frames are left out.
const RECORDER: &str = "libvramp_preload";

/// What a process recorded.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Id of the process; zero if it ended before it wrote that.
    pub pid: u64,
    /// Program and arguments.
    pub command: Vec<String>,
    /// The devices that the program used: number, bytes of memory and name.
    pub devices: Vec<(u32, u64, String)>,
    /// Functions that no event is recorded of, with the number of their calls.
    pub calls: Vec<(String, u64)>,
    /// Why the recording ends.
    pub end: End,
    start_us: u64,
    start_ns: u64,
    modules: Vec<Module>,
    /// The frames of each stack by its id: return address and module.
    stacks: HashMap<u32, Vec<Place>>,
    events: Vec<Event>,
}

/// A return address, and the index of the module that was loaded there when it was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    pc: u64,
    module: Option<usize>,
}

/// One frame of a call stack, for [`Recording::to_trace`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameText {
    /// Name of the function.
    pub name: String,
    /// Source file, or else the file of the code.
    pub filename: String,
    /// Line in the source file; 0 if unknown.
    pub line: u32,
}

impl FrameText {
    /// Returns the frame of an address without a known function: the file of the code, and the offset in
    /// it, such as `+0x1a40`. Arguments are those that [`Recording::to_trace`] passes.
    pub fn unknown(pc: u64, module: Option<(&Module, u64)>) -> FrameText {
        match module {
            Some((module, address)) => {
                FrameText { name: format!("+{address:#x}"), filename: module.path.clone(), line: 0 }
            }
            None => FrameText { name: format!("{pc:#x}"), ..FrameText::default() },
        }
    }
}

impl Recording {
    /// Reads the file of a process, up to its first record that is not whole. O(n log n) in the number of
    /// modules and frames, O(n) in the rest.
    ///
    /// # Errors
    /// Those of [`read()`], and more than 2^30 events.
    pub fn read(bytes: &[u8]) -> Result<Recording, SpoolError> {
        let mut records = read(bytes)?;
        let mut recording = Recording {
            pid: records.pid(),
            command: Vec::new(),
            devices: Vec::new(),
            calls: Vec::new(),
            end: End::Complete,
            start_us: 0,
            start_ns: 0,
            modules: Vec::new(),
            stacks: HashMap::new(),
            events: Vec::new(),
        };
        let mut loaded = Loaded::default();
        for record in records.by_ref() {
            recording.add(record, &mut loaded)?;
        }
        recording.end = records.end().unwrap_or(End::Complete);
        Ok(recording)
    }

    fn add(&mut self, record: Record<'_>, loaded: &mut Loaded) -> Result<(), SpoolError> {
        match record {
            Record::Program { start_us, start_ns, command } => {
                (self.start_us, self.start_ns) = (start_us, start_ns);
                self.command = command.split(|&byte| byte == 0).map(text).collect();
            }
            Record::Device { device, total, name } => {
                self.devices.push((device, total, text(name)));
            }
            Record::Module { id: _, bias, start, end, path } => {
                loaded.add(start, end, self.modules.len());
                self.modules.push(Module { bias, start, end, path: text(path) });
            }
            Record::Stack { id, pcs } => {
                let place = |&pc: &u64| Place { pc, module: loaded.module_at(pc) };
                self.stacks.entry(id).or_insert_with(|| pcs.iter().map(place).collect());
            }
            Record::Event(event) => {
                if self.events.len() >= EVENTS_MAX as usize {
                    return Err(SpoolError::TooManyEvents { most: EVENTS_MAX });
                }
                self.events.push(event);
            }
            Record::Calls { count, name } => self.calls.push((text(name), count)),
        }
        Ok(())
    }

    /// Returns the name of the program, without its folders. Empty if it is not known.
    pub fn program(&self) -> &str {
        let path = self.command.first().map_or("", String::as_str);
        path.rsplit('/').next().unwrap_or(path)
    }

    /// Returns the recorded events.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the trace, without a name. Nothing in it is repaired.
    ///
    /// A free or unmapping is requested and completed at once. One of several mappings makes such a pair
    /// for each of them, and a reset one for each block of its device. A free without a size gets that of
    /// its block. The innermost frame of each stack is the driver's function.
    ///
    /// `frames` returns the frames of an address, innermost first: several where functions were inlined,
    /// none to leave it out. Its arguments are the return address, and the module it lies in with the link
    /// address of the call, which is one byte before the return address. It is called once for each
    /// address.
    ///
    /// O(n log n) in events and blocks.
    pub fn to_trace(
        &self,
        frames: impl FnMut(u64, Option<(&Module, u64)>) -> Vec<FrameText>,
    ) -> Trace {
        let mut builder = Builder {
            recording: self,
            trace: Trace::default(),
            streams: HashMap::new(),
            stacks: HashMap::new(),
            live: Live::default(),
            names: Names { frames, known: HashMap::new() },
        };
        for event in &self.events {
            builder.event(event);
        }
        let mut trace = builder.trace;
        let in_events = trace.events.iter().map(|event| u32::from(event.device));
        let known = self.devices.iter().map(|(device, ..)| *device);
        let largest = in_events.chain(known.filter(|&device| device <= u32::from(u16::MAX))).max();
        trace.device_count = largest.map_or(0, |device| device + 1);
        trace.events.sort_by_key(|event| event.device);
        trace
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The modules by the ranges at which they are loaded. Ranges do not overlap.
#[derive(Default)]
struct Loaded(BTreeMap<u64, (u64, usize)>);

impl Loaded {
    /// Adds a module in place of those whose ranges it overlaps: they were unloaded.
    fn add(&mut self, start: u64, end: u64, module: usize) {
        if start >= end {
            return;
        }
        while let Some((&before, &(until, _))) = self.0.range(..end).next_back()
            && until > start
        {
            self.0.remove(&before);
        }
        self.0.insert(start, (end, module));
    }

    fn module_at(&self, pc: u64) -> Option<usize> {
        let (_, &(end, module)) = self.0.range(..=pc).next_back()?;
        // The return address of a call at the very end of a module lies after it.
        (pc <= end).then_some(module)
    }
}

/// The blocks and mappings that the program holds.
#[derive(Default)]
struct Live {
    /// By address: unique over all devices.
    blocks: BTreeMap<u64, Held>,
    by_device: HashMap<u16, BTreeSet<u64>>,
}

#[derive(Clone, Copy)]
struct Held {
    size: u64,
    device: u16,
    stream: u64,
}

impl Live {
    fn add(&mut self, address: u64, held: Held) {
        self.remove(address);
        self.blocks.insert(address, held);
        self.by_device.entry(held.device).or_default().insert(address);
    }

    fn remove(&mut self, address: u64) -> Option<Held> {
        let held = self.blocks.remove(&address)?;
        self.by_device.entry(held.device).or_default().remove(&address);
        Some(held)
    }

    /// The blocks and mappings that lie wholly in the range.
    fn within(&self, address: u64, size: u64) -> Vec<u64> {
        let end = address.saturating_add(size);
        let begin_inside = self.blocks.range(address..end);
        let inside = begin_inside.filter(|(start, held)| held.size <= end - **start);
        inside.map(|(&address, _)| address).collect()
    }

    fn of_device(&self, device: u16) -> Vec<u64> {
        self.by_device.get(&device).into_iter().flatten().copied().collect()
    }
}

/// The texts of the frames of each place.
struct Names<F> {
    frames: F,
    known: HashMap<Place, Vec<FrameText>>,
}

/// A trace under construction.
struct Builder<'a, F> {
    recording: &'a Recording,
    trace: Trace,
    streams: HashMap<u64, StreamIndex>,
    stacks: HashMap<(Option<u32>, Api), Option<StackId>>,
    live: Live,
    names: Names<F>,
}

impl<F: FnMut(u64, Option<(&Module, u64)>) -> Vec<FrameText>> Builder<'_, F> {
    fn event(&mut self, event: &Event) {
        let held = Held { size: event.size, device: event.device, stream: event.stream };
        match event.change {
            Change::Alloc | Change::Map => {
                self.live.add(event.address, held);
                self.push(EventKind::Alloc, event, event.address, held);
            }
            Change::OutOfMemory => self.push(EventKind::Oom, event, event.address, held),
            Change::Free => self.free(event, event.address, held),
            Change::Unmap => {
                for address in self.live.within(event.address, event.size) {
                    self.free(event, address, held);
                }
            }
            Change::Reset => {
                for address in self.live.of_device(event.device) {
                    self.free(event, address, held);
                }
            }
        }
    }

    /// Frees the block at `address`, or a block that is not known.
    fn free(&mut self, event: &Event, address: u64, unknown: Held) {
        let held = self.live.remove(address).unwrap_or(unknown);
        self.push(EventKind::FreeRequested, event, address, held);
        self.push(EventKind::FreeCompleted, event, address, held);
    }

    fn push(&mut self, kind: EventKind, event: &Event, address: u64, held: Held) {
        let recorded = crate::Event {
            kind,
            device: held.device,
            stream: self.stream(held.stream),
            address: DeviceAddr::new(address),
            size: Bytes::new(held.size),
            time_us: self.time_us(event.ns),
            stack: self.stack(event),
        };
        self.trace.events.push(recorded);
    }

    fn time_us(&self, ns: u64) -> u64 {
        let Recording { start_us, start_ns, .. } = *self.recording;
        match ns.checked_sub(start_ns) {
            Some(since) => start_us.saturating_add(since / 1000),
            None => start_us.saturating_sub((start_ns - ns) / 1000),
        }
    }

    fn stream(&mut self, raw: u64) -> StreamIndex {
        let streams = &mut self.trace.streams;
        *self.streams.entry(raw).or_insert_with(|| {
            streams.push(raw);
            StreamIndex(u32::try_from(streams.len() - 1).expect("fewer streams than events"))
        })
    }

    fn stack(&mut self, event: &Event) -> Option<StackId> {
        let key = (event.stack, event.api);
        if let Some(&known) = self.stacks.get(&key) {
            return known;
        }
        let places = event.stack.and_then(|id| self.recording.stacks.get(&id));
        let places = places.map_or(&[][..], |places| &places[..]);
        let modules = &self.recording.modules;
        let is_own =
            |place: &Place| place.module.is_some_and(|module| is_recorder(&modules[module].path));
        // What the recorder calls lies within its own frames.
        let own = places.iter().rposition(is_own).map_or(0, |last| last + 1);
        let places = &places[own..];
        places.iter().for_each(|place| self.names.find(*place, modules));
        let driver = Frame { name: event.api.name(), filename: DRIVER, line: 0 };
        let callers = places.iter().flat_map(|place| &self.names.known[place]);
        let callers = callers.map(|frame| Frame {
            name: &frame.name,
            filename: &frame.filename,
            line: frame.line,
        });
        let stack = self.trace.stacks.add(std::iter::once(driver).chain(callers));
        self.stacks.insert(key, stack);
        stack
    }
}

impl<F: FnMut(u64, Option<(&Module, u64)>) -> Vec<FrameText>> Names<F> {
    fn find(&mut self, place: Place, modules: &[Module]) {
        self.known.entry(place).or_insert_with(|| {
            let module = place.module.map(|module| &modules[module]);
            let call = place.pc.saturating_sub(1);
            (self.frames)(place.pc, module.map(|it| (it, call.wrapping_sub(it.bias))))
        });
    }
}

fn is_recorder(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|name| name.starts_with(RECORDER))
}
