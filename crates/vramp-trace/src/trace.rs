//! A recording as it was found, whatever file it came from.

use std::num::NonZeroU32;

use vramp_core::{Bytes, DeviceAddr};

use crate::Stacks;

/// Largest size in a recording: 64 PiB, so that the sum of a few hundred blocks fits in 64 bits. The
/// largest address space in use is 128 PiB.
pub(crate) const SIZE_MAX: u64 = 1 << 56;

/// Returns `count` as a size, or `None` if it exceeds [`SIZE_MAX`].
pub(crate) fn size(count: u64) -> Option<Bytes> {
    (count <= SIZE_MAX).then(|| Bytes::new(count))
}

/// A recording of what a program asked of its GPUs.
///
/// Read one with `read_trace`; nothing here is repaired or reordered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// What people call it: the file's name without its endings. May be empty.
    pub name: String,
    /// How many devices the recording speaks of. Every event's device is below it.
    pub device_count: u32,
    /// Raw stream numbers (`cudaStream_t` as an integer), each once. [`StreamIndex`] counts here.
    pub streams: Vec<u64>,
    /// Names of actions that [`EventKind`] has no name for. [`ActionId`] counts here.
    pub actions: Vec<String>,
    /// All events: one device's history after the other, each in the order it was recorded.
    pub events: Vec<Event>,
    /// The call stacks that events and blocks point to.
    pub stacks: Stacks,
    /// The recorded allocator's settings in file order; nested ones are joined with a dot.
    pub allocator_settings: Vec<(String, String)>,
    /// What the recorded allocator held when the recording was written, on all devices.
    pub segments: Vec<Segment>,
}

impl Trace {
    /// The raw number of a stream of this trace, or `None` if the index is not of this trace.
    pub fn raw_stream(&self, stream: StreamIndex) -> Option<u64> {
        self.streams.get(stream.0 as usize).copied()
    }

    /// The recorded name of what an event did, such as `free_requested`.
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

/// A stream of a trace, counted in [`Trace::streams`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamIndex(pub u32);

/// An action without a name in [`EventKind`], counted in [`Trace::actions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ActionId(pub u16);

/// A call stack, counted in [`Stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(NonZeroU32);

impl StackId {
    /// The id of the stack at this place, or `None` past the 4,294,967,294th.
    pub fn from_index(index: usize) -> Option<StackId> {
        let number = u32::try_from(index).ok()?.checked_add(1)?;
        NonZeroU32::new(number).map(StackId)
    }

    /// The place of the stack in [`Stacks`].
    pub fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// What an event did. The names are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A block was handed out.
    Alloc,
    /// The program gave a block back; work on other streams may still use it.
    FreeRequested,
    /// Nothing uses the block any more.
    FreeCompleted,
    /// The recorded allocator took memory from the driver.
    SegmentAlloc,
    /// The recorded allocator gave memory back to the driver.
    SegmentFree,
    /// The recorded allocator mapped memory into a segment.
    SegmentMap,
    /// The recorded allocator unmapped memory of a segment.
    SegmentUnmap,
    /// The program took a snapshot.
    Snapshot,
    /// A request failed: see [`Event::device_free`].
    Oom,
    /// A mark that the program set.
    UserDefined,
    /// Something this crate has no name for.
    Unknown(ActionId),
}

impl EventKind {
    /// Every kind with a fixed name, in the order in which `.vtrace` numbers them.
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

    /// The name that PyTorch writes, or `None` for an unknown action.
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

/// One line of a recording, in 40 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The device's ordinal.
    pub device: u16,
    /// The stream it was asked on.
    pub stream: StreamIndex,
    /// The address it is about. For [`EventKind::Oom`] this number is the memory that was free
    /// on the card, or all ones if unknown: read it with [`Event::device_free`].
    pub address: DeviceAddr,
    /// How many bytes were asked for. May be zero.
    pub size: Bytes,
    /// Wall-clock time in microseconds since 1970, or since midnight of the first day where the
    /// recording has no date. Zero if the recording has no times.
    pub time_us: u64,
    /// Who asked, if recorded.
    pub stack: Option<StackId>,
}

const _: () = assert!(size_of::<Event>() <= 40, "a million events should not cost more than 40 MB");

impl Event {
    /// What stands in [`Event::address`] of an out-of-memory event that does not say how much
    /// was free.
    pub const UNKNOWN_FREE: DeviceAddr = DeviceAddr::new(u64::MAX);

    /// Memory that was free on the card when a request failed, where the event is such a failure
    /// and says it. What is too much to be an amount of memory, 2^56 bytes, says nothing.
    pub fn device_free(&self) -> Option<Bytes> {
        (self.kind == EventKind::Oom).then(|| size(self.address.number())).flatten()
    }
}

/// Memory that the recorded allocator held when the recording was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device's ordinal.
    pub device: u16,
    /// The stream it serves.
    pub stream: StreamIndex,
    /// Its first byte.
    pub address: DeviceAddr,
    /// How much it takes on the card.
    pub total_size: Bytes,
    /// `large` or `small`, as recorded.
    pub segment_type: String,
    /// True if it grows in place.
    pub is_expandable: bool,
    /// Who made the allocator take it, if recorded.
    pub stack: Option<StackId>,
    /// Its parts in address order.
    pub blocks: Vec<Block>,
}

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its first byte.
    pub address: DeviceAddr,
    /// How many bytes it takes.
    pub size: Bytes,
    /// How many bytes were asked for, where recorded.
    pub requested_size: Option<Bytes>,
    /// Who holds it.
    pub state: BlockState,
    /// Who asked for it, if recorded.
    pub stack: Option<StackId>,
}

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// The program.
    Active,
    /// Nobody, but work on other streams may still use it.
    PendingFree,
    /// Nobody.
    Inactive,
}
