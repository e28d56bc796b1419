//! The devices of a recording: what each has, a selection of them, and recordings of several devices
//! in one.
//!
//! | with | time |
//! |---|---|
//! | [`Workload::all`](crate::Workload::all), [`Trace::devices`] | one pass over events and segments, whatever the number of devices |
//! | [`Trace::retain_devices`] | one pass |
//! | [`Trace::merge`] | one pass over all recordings; a sort if their devices are not ascending |

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::{ActionId, Event, EventKind, Segment, StackId, StreamIndex, Trace};

/// Where the events and segments of one device are in a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DevicePart {
    /// From the first event of the device to after the last one. In a trace whose events are grouped,
    /// as those of all readers are, no other device has an event in it.
    pub events: Range<usize>,
    /// Indices of the segments.
    pub segments: Vec<u32>,
}

/// Returned for devices that a trace has neither events nor segments of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDevice {
    /// The first such device.
    pub device: u32,
    /// Those of the trace.
    pub known: Vec<u32>,
}

impl std::error::Error for UnknownDevice {}

impl fmt::Display for UnknownDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the recording has nothing of device {}: ", self.device)?;
        if self.known.is_empty() {
            return f.write_str("it has no events and no segments");
        }
        let known: Vec<String> = self.known.iter().map(u32::to_string).collect();
        let noun = if known.len() == 1 { "device" } else { "devices" };
        write!(f, "it has {noun} {}", known.join(", "))
    }
}

impl Trace {
    /// Returns the devices that have events or segments, ascending. O(events + segments).
    pub fn devices(&self) -> Vec<u32> {
        self.parts().into_keys().collect()
    }

    /// Returns what each device has. O(events + segments).
    pub(crate) fn parts(&self) -> BTreeMap<u32, DevicePart> {
        let mut parts: BTreeMap<u32, DevicePart> = BTreeMap::new();
        let mut begin = 0;
        for run in self.events.chunk_by(|a, b| a.device == b.device) {
            let range = begin..begin + run.len();
            begin = range.end;
            let part = parts.entry(u32::from(run[0].device)).or_default();
            part.events = match part.events.is_empty() {
                true => range,
                false => part.events.start..range.end,
            };
        }
        for (index, segment) in (0..).zip(&self.segments) {
            parts.entry(u32::from(segment.device)).or_default().segments.push(index);
        }
        parts
    }

    /// Keeps the events, segments and annotations of `devices`, and the annotations of no device.
    /// Devices keep their numbers. O(events + segments).
    ///
    /// # Errors
    /// The trace has neither events nor segments of one of them. Nothing changes.
    pub fn retain_devices(&mut self, devices: &[u32]) -> Result<(), UnknownDevice> {
        let known = self.devices();
        if let Some(&device) = devices.iter().find(|&device| !known.contains(device)) {
            return Err(UnknownDevice { device, known });
        }
        let mut kept = vec![false; self.device_count.max(1 << 16) as usize];
        for &device in devices {
            kept[device as usize] = true;
        }
        let is_kept = |device: u16| kept[usize::from(device)];
        let order = places(&self.events, |event| is_kept(event.device));
        self.labels.reorder_events(&order);
        self.events.retain(|event| is_kept(event.device));
        let order = places(&self.segments, |segment| is_kept(segment.device));
        self.labels.reorder_segments(&order);
        self.segments.retain(|segment| is_kept(segment.device));
        self.annotations.retain(|annotation| annotation.device.is_none_or(is_kept));
        Ok(())
    }

    /// Moves all events, segments and annotations to the device of this number, as a program with several
    /// allocators of one device each does before [`Trace::merge`]. O(events + segments).
    pub fn move_to_device(&mut self, device: u16) {
        self.events.iter_mut().for_each(|event| event.device = device);
        self.segments.iter_mut().for_each(|segment| segment.device = device);
        let annotated = self.annotations.iter_mut().filter_map(|it| it.device.as_mut());
        annotated.for_each(|found| *found = device);
        self.device_count = u32::from(device) + 1;
    }

    /// Returns one trace with everything of `traces`: of a process with several devices, for example.
    /// Streams, actions and call stacks of equal contents are one. Events of one device follow each other
    /// in the order of `traces`, so traces of the same device should be in the order of time.
    ///
    /// The name is that of the first trace. A setting that all have alike is kept once; any other gets a
    /// name with the first device of its trace, such as `device_3.reserved`.
    ///
    /// O(events + segments + frames), and O(n log n) if the devices of `traces` are not ascending.
    ///
    /// # Panics
    /// If all together have 2^32 events, segments or stacks, or 65,536 kinds of unknown actions.
    pub fn merge(traces: impl IntoIterator<Item = Trace>) -> Trace {
        let traces: Vec<Trace> = traces.into_iter().collect();
        let mut merged = Trace {
            name: traces.first().map(|trace| trace.name.clone()).unwrap_or_default(),
            allocator_settings: settings(&traces),
            ..Trace::default()
        };
        let mut tables = Tables::default();
        for trace in traces {
            merged.device_count = merged.device_count.max(trace.device_count);
            tables.append(&mut merged, trace);
        }
        merged.streams = tables.streams.into_iter().collect();
        merged.actions = tables.actions.into_iter().collect();
        merged.group_by_device();
        merged
    }

    /// Groups the events by device, with their labels.
    fn group_by_device(&mut self) {
        if self.events.is_sorted_by_key(|event| event.device) {
            return;
        }
        let mut order = places(&self.events, |_| true);
        order.sort_by_key(|&index| self.events[index as usize].device);
        self.labels.reorder_events(&order);
        self.events.sort_by_key(|event| event.device);
    }
}

/// Returns the indices of the items to keep.
fn places<T>(items: &[T], keep: impl Fn(&T) -> bool) -> Vec<u32> {
    (0..).zip(items).filter(|(_, item)| keep(item)).map(|(index, _)| index).collect()
}

/// Returns the settings of a merged trace.
fn settings(traces: &[Trace]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (index, trace) in traces.iter().enumerate() {
        for setting in &trace.allocator_settings {
            match traces.iter().all(|other| other.allocator_settings.contains(setting)) {
                true if index == 0 => found.push(setting.clone()),
                true => {}
                false => {
                    let device = trace.devices().first().copied();
                    let device = device.unwrap_or(trace.device_count.saturating_sub(1));
                    let (name, value) = setting;
                    found.push((format!("device_{device}.{name}"), value.clone()));
                }
            }
        }
    }
    found
}

/// What the traces of a merge share.
#[derive(Default)]
struct Tables {
    streams: indexmap::IndexSet<u64>,
    actions: indexmap::IndexSet<String>,
}

impl Tables {
    fn append(&mut self, merged: &mut Trace, trace: Trace) {
        let streams: Vec<StreamIndex> = trace
            .streams
            .iter()
            .map(|&raw| StreamIndex(number(self.streams.insert_full(raw).0)))
            .collect();
        let stream = |old: StreamIndex| streams.get(old.0 as usize).copied().unwrap_or(old);
        let actions: Vec<ActionId> = trace
            .actions
            .into_iter()
            .map(|name| self.actions.insert_full(name).0)
            .map(|index| ActionId(u16::try_from(index).expect("fewer than 65,536 actions")))
            .collect();
        let stacks: Vec<Option<StackId>> = (0..trace.stacks.len())
            .map(|index| merged.stacks.add(trace.stacks.frames(StackId::from_index(index)?)))
            .collect();
        let stack = |old: Option<StackId>| old.and_then(|old| *stacks.get(old.index())?);
        let (first_event, first_segment) = (merged.events.len(), merged.segments.len());
        merged.events.extend(trace.events.into_iter().map(|event| Event {
            kind: match event.kind {
                EventKind::Unknown(id) => {
                    actions.get(usize::from(id.0)).map_or(event.kind, |&id| EventKind::Unknown(id))
                }
                kind => kind,
            },
            stream: stream(event.stream),
            stack: stack(event.stack),
            ..event
        }));
        merged.segments.extend(trace.segments.into_iter().map(|segment| {
            Segment {
                stream: stream(segment.stream),
                stack: stack(segment.stack),
                blocks: segment
                    .blocks
                    .into_iter()
                    .map(|block| crate::Block { stack: stack(block.stack), ..block })
                    .collect(),
                ..segment
            }
        }));
        merged.annotations.extend(trace.annotations);
        merged.labels.append(&trace.labels, first_event, first_segment);
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a process has fewer than 2^32 streams")
}
