//! The types of the interface, named as C names them.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

/// What a call came to. Zero is success; `vramp_last_error` has the whole text.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_status_t {
    /// The call did what it says.
    VRAMP_OK = 0,
    /// A pointer that must not be null is null.
    VRAMP_ERROR_NULL = 1,
    /// A text is not UTF-8.
    VRAMP_ERROR_TEXT = 2,
    /// An option is unknown, or its value cannot be used on this device.
    VRAMP_ERROR_OPTION = 3,
    /// The device is unknown or cannot be opened.
    VRAMP_ERROR_DEVICE = 4,
    /// The allocator was never opened, or is closed.
    VRAMP_ERROR_UNKNOWN_ALLOCATOR = 5,
    /// The stream is not this allocator's, or was forgotten.
    VRAMP_ERROR_UNKNOWN_STREAM = 6,
    /// The address is not the start of a block that this allocator handed out, or it is free again.
    VRAMP_ERROR_UNKNOWN_POINTER = 7,
    /// There is not enough memory; the text says what is free and what to do.
    VRAMP_ERROR_OUT_OF_MEMORY = 8,
    /// A driver call failed; the text names it.
    VRAMP_ERROR_DRIVER = 9,
    /// As many allocators are open as there can be.
    VRAMP_ERROR_TOO_MANY = 10,
    /// The struct's `struct_size` is too small to be one.
    VRAMP_ERROR_STRUCT_SIZE = 11,
    /// The allocator serves somebody else and cannot be closed.
    VRAMP_ERROR_IN_USE = 12,
    /// A number is out of its range.
    VRAMP_ERROR_RANGE = 13,
    /// The allocator's books do not add up. A defect of vramp.
    VRAMP_ERROR_INCONSISTENT = 14,
    /// A panic inside of vramp. A defect of vramp.
    VRAMP_ERROR_INTERNAL = 15,
    /// A file cannot be written.
    VRAMP_ERROR_FILE = 16,
    /// The arena was never made by this allocator, or is destroyed.
    VRAMP_ERROR_UNKNOWN_ARENA = 17,
    /// The graph was never made by this allocator, or is destroyed.
    VRAMP_ERROR_UNKNOWN_GRAPH = 18,
    /// The lease was never given by this allocator, or has ended.
    VRAMP_ERROR_UNKNOWN_LEASE = 19,
    /// Somebody else uses the arena; the text says who.
    VRAMP_ERROR_BUSY = 20,
    /// A capture did not begin, came to nothing, or is in the way.
    VRAMP_ERROR_CAPTURE = 21,
    /// The preset or the device cannot do it.
    VRAMP_ERROR_UNSUPPORTED = 22,
}

/// An allocator. A number and no pointer: any value may be passed to any function. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_allocator_t {
    /// Only to be compared.
    pub id: u64,
}

/// A stream of an allocator. A number and no pointer. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_stream_t {
    /// Only to be compared.
    pub id: u64,
}

/// Memory for captured graphs. A number and no pointer. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_arena_t {
    /// Only to be compared.
    pub id: u64,
}

/// A captured graph, or the hold on the memory of one. A number and no pointer. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_graph_t {
    /// Only to be compared.
    pub id: u64,
}

/// The right of one stream to an arena. A number and no pointer. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_lease_t {
    /// Only to be compared.
    pub id: u64,
}

/// What an arena has. Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_arena_report_t {
    /// Set by the caller to `sizeof(vramp_arena_report_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Addresses.
    pub capacity: u64,
    /// Up to where blocks were ever placed.
    pub high_water: u64,
    /// Bytes that were asked for and are held.
    pub live: u64,
    /// Blocks that are held.
    pub blocks: u64,
    /// Physical memory of its own.
    pub backed: u64,
    /// Physical memory at its addresses that others may take.
    pub lent: u64,
}

/// How much memory a capture needed. Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_capture_report_t {
    /// Set by the caller to `sizeof(vramp_capture_report_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Blocks that the capture made.
    pub blocks: u64,
    /// Blocks that outlive it.
    pub escaped: u64,
    /// What it would take if nothing served twice.
    pub monotone: u64,
    /// What it took.
    pub taken: u64,
    /// What the next one of the same shape takes; zero where no layout was planned.
    pub planned: u64,
    /// The most that was live at once: no layout needs less.
    pub lower_bound: u64,
    /// Memory from outside that was freed within the capture and is kept for the graph.
    pub kept: u64,
}

/// What an allocator did so far. Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_stats_t {
    /// Set by the caller to `sizeof(vramp_stats_t)`: no more than that is written. On return, how
    /// much was.
    pub struct_size: u64,
    /// Bytes that were asked for and are held.
    pub live: u64,
    /// The most that `live` was.
    pub live_peak: u64,
    /// Physical memory that the allocator holds.
    pub reserved: u64,
    /// The most that `reserved` was.
    pub reserved_peak: u64,
    /// Blocks handed out.
    pub placed: u64,
    /// Blocks freed.
    pub freed: u64,
    /// Blocks that needed no plan of driver calls.
    pub hits: u64,
    /// Blocks that did.
    pub misses: u64,
    /// Pieces of physical memory created.
    pub chunks_created: u64,
    /// Pieces mapped at a new address.
    pub chunks_moved: u64,
    /// Pieces moved to an address where they were still mapped.
    pub chunks_reactivated: u64,
    /// Pieces given back to the card.
    pub chunks_released: u64,
    /// Bytes of the pieces moved or reactivated.
    pub moved: u64,
    /// Plans that failed and were undone.
    pub plans_undone: u64,
    /// Memory of the card that nobody has.
    pub card_free: u64,
    /// Memory of the card.
    pub card_total: u64,
}

/// What happened in an allocator.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_event_kind_t {
    /// Memory was handed out: `address`, `size`, `requested`.
    VRAMP_EVENT_ALLOCATED = 0,
    /// Memory was taken back: `address`, `size`, `requested`.
    VRAMP_EVENT_FREED = 1,
    /// Physical memory was taken from the card: `size`.
    VRAMP_EVENT_GROWN = 2,
    /// Physical memory was given back to the card: `size`.
    VRAMP_EVENT_SHRUNK = 3,
    /// Free memory was moved to where it was needed: `size`.
    VRAMP_EVENT_REMAPPED = 4,
    /// A request could not be served at first: `requested`.
    VRAMP_EVENT_SHORT = 5,
    /// A request failed for good: `requested`.
    VRAMP_EVENT_OUT_OF_MEMORY = 6,
}

/// An event. What its kind does not name is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_event_t {
    /// What happened.
    pub kind: vramp_event_kind_t,
    /// The block's address.
    pub address: u64,
    /// How many bytes it is about.
    pub size: u64,
    /// How many bytes were asked for.
    pub requested: u64,
}

/// Called for every event, by the thread that caused it and without a lock: it may call vramp.
pub type vramp_observer_t =
    Option<unsafe extern "C" fn(event: *const vramp_event_t, user: *mut std::ffi::c_void)>;
