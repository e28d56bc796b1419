//! A recording, unchanged, whatever file it came from.

use std::num::NonZeroU32;

use vramp_core::{Bytes, DeviceAddr};

use crate::{Annotation, Labels, Stacks};

/// Largest size in a recording: 64 PiB, so that the sum of a few hundred blocks fits in 64 bits.
/// The largest address space in use is 128 PiB.
pub(crate) const SIZE_MAX: u64 = 1 << 56;

/// Returns `count` as a size, or `None` if it exceeds [`SIZE_MAX`].
pub(crate) fn size(count: u64) -> Option<Bytes> {
    (count <= SIZE_MAX).then(|| Bytes::new(count))
}

/// The memory events of a program on its GPUs, as recorded.
///
/// Read one with `read_trace`. Nothing in it is repaired or reordered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Name of the trace: the file's name without its extensions. May be empty.
    pub name: String,
    /// Number of devices. The device of every event is below it.
    pub device_count: u32,
    /// Raw stream handles (`cudaStream_t` as an integer), without duplicates. Indexed by
    /// [`StreamIndex`].
    pub streams: Vec<u64>,
    /// Names of actions that [`EventKind`] has no variant for. Indexed by [`ActionId`].
    pub actions: Vec<String>,
    /// All events, grouped by device; those of one device in the order of recording.
    pub events: Vec<Event>,
    /// Call stacks that events, segments and blocks refer to.
    pub stacks: Stacks,
    /// Settings of the recorded allocator in file order. Nested names are joined with a dot.
    pub allocator_settings: Vec<(String, String)>,
    /// Segments of the recorded allocator at the end of the recording, on all devices.
    pub segments: Vec<Segment>,
    /// Ranges that the program marked, in the order of recording.
    pub annotations: Vec<Annotation>,
    /// Pools, metadata, compile contexts and categories of the events, segments and blocks that have
    /// them. They refer to events by index: keep both in step.
    pub labels: Labels,
}

impl Trace {
    /// Returns the raw handle of a stream, or `None` if the index is out of range.
    pub fn raw_stream(&self, stream: StreamIndex) -> Option<u64> {
        self.streams.get(stream.0 as usize).copied()
    }

    /// Returns the recorded name of an event's kind, such as `free_requested`.
    pub fn action_name(&self, kind: EventKind) -> &str {
        match kind.known_name() {
            Some(name) => name,
            None => match kind {
                EventKind::Unknown(id) => {
                    self.actions.get(usize::from(id.0)).map_or("unknown", String::as_str)
                }
                _ => "unknown",
            },
        }
    }
}

/// Index of a stream in [`Trace::streams`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamIndex(pub u32);

/// Index in [`Trace::actions`] of an action that [`EventKind`] has no variant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ActionId(pub u16);

/// Id of a call stack in [`Stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(NonZeroU32);

impl StackId {
    /// Returns the id of the stack at `index`, or `None` above 4,294,967,293.
    pub fn from_index(index: usize) -> Option<StackId> {
        let number = u32::try_from(index).ok()?.checked_add(1)?;
        NonZeroU32::new(number).map(StackId)
    }

    /// Returns the index of the stack in [`Stacks`].
    pub fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Kind of an event. The names are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A block was allocated.
    Alloc,
    /// The program freed a block. Work on other streams may still use it.
    FreeRequested,
    /// All work on a freed block is complete.
    FreeCompleted,
    /// The recorded allocator allocated a segment from the driver.
    SegmentAlloc,
    /// The recorded allocator released a segment to the driver.
    SegmentFree,
    /// The recorded allocator mapped memory into a segment.
    SegmentMap,
    /// The recorded allocator unmapped memory of a segment.
    SegmentUnmap,
    /// The program took a snapshot.
    Snapshot,
    /// An allocation failed. See [`Event::device_free`].
    Oom,
    /// A mark set by the program.
    UserDefined,
    /// Any other action, by its recorded name.
    Unknown(ActionId),
}

impl EventKind {
    /// Every kind with a fixed name, in the order of their numbers in `.vtrace`.
    pub const NAMED: [EventKind; 10] = [
        EventKind::Alloc,
        EventKind::FreeRequested,
        EventKind::FreeCompleted,
        EventKind::SegmentAlloc,
        EventKind::SegmentFree,
        EventKind::SegmentMap,
        EventKind::SegmentUnmap,
        EventKind::Snapshot,
        EventKind::Oom,
        EventKind::UserDefined,
    ];

    /// Returns the name that PyTorch writes, or `None` for an unknown action.
    pub const fn known_name(self) -> Option<&'static str> {
        Some(match self {
            EventKind::Alloc => "alloc",
            EventKind::FreeRequested => "free_requested",
            EventKind::FreeCompleted => "free_completed",
            EventKind::SegmentAlloc => "segment_alloc",
            EventKind::SegmentFree => "segment_free",
            EventKind::SegmentMap => "segment_map",
            EventKind::SegmentUnmap => "segment_unmap",
            EventKind::Snapshot => "snapshot",
            EventKind::Oom => "oom",
            EventKind::UserDefined => "user_defined",
            EventKind::Unknown(_) => return None,
        })
    }
}

/// One event of a recording, in 40 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The device's ordinal.
    pub device: u16,
    /// Stream of the request.
    pub stream: StreamIndex,
    /// First address of the block or segment. For [`EventKind::Oom`] the number of bytes that were
    /// free on the device, or all ones if unknown: read it with [`Event::device_free`].
    pub address: DeviceAddr,
    /// Requested bytes. May be zero.
    pub size: Bytes,
    /// Wall-clock time in microseconds since 1970, or since midnight of the first day if the
    /// recording has no date. Zero if the recording has no times.
    pub time_us: u64,
    /// Call stack of the request, if recorded.
    pub stack: Option<StackId>,
}

const _: () = assert!(size_of::<Event>() <= 40, "a million events should not cost more than 40 MB");

impl Event {
    /// Value of [`Event::address`] in an out-of-memory event that does not record how much was
    /// free.
    pub const UNKNOWN_FREE: DeviceAddr = DeviceAddr::new(u64::MAX);

    /// Returns the bytes that were free on the device when an allocation failed. `None` for other
    /// events, if unknown, and for numbers above 2^56.
    pub fn device_free(&self) -> Option<Bytes> {
        (self.kind == EventKind::Oom).then(|| size(self.address.number())).flatten()
    }
}

/// A segment of the recorded allocator: one driver allocation, or one expandable address range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device's ordinal.
    pub device: u16,
    /// Stream whose requests it serves.
    pub stream: StreamIndex,
    /// First address.
    pub address: DeviceAddr,
    /// Bytes reserved on the device.
    pub total_size: Bytes,
    /// `large` or `small`, as recorded.
    pub segment_type: String,
    /// True if it can grow in place.
    pub is_expandable: bool,
    /// Call stack of the request that made it, if recorded.
    pub stack: Option<StackId>,
    /// Blocks in address order.
    pub blocks: Vec<Block>,
}

/// A block of a segment, allocated or free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First address.
    pub address: DeviceAddr,
    /// Bytes the block takes, rounding included.
    pub size: Bytes,
    /// Requested bytes, if recorded.
    pub requested_size: Option<Bytes>,
    /// Whether it is allocated.
    pub state: BlockState,
    /// Call stack of the allocation, if recorded.
    pub stack: Option<StackId>,
}

/// Whether a block is allocated, freed with work pending, or free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Allocated.
    Active,
    /// Freed, while work on other streams may still use it.
    PendingFree,
    /// Free.
    Inactive,
}
