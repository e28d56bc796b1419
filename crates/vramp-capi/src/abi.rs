//! The types of the interface, with their C names.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

/// Status of a call. Zero is success. vramp_last_error() has the message of a failure.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_status_t {
    /// Success.
    VRAMP_OK = 0,
    /// A pointer that must not be null is null.
    VRAMP_ERROR_NULL = 1,
    /// A string is not UTF-8.
    VRAMP_ERROR_TEXT = 2,
    /// An option is unknown, or its value is invalid on this device.
    VRAMP_ERROR_OPTION = 3,
    /// The device is unknown or cannot be opened.
    VRAMP_ERROR_DEVICE = 4,
    /// The allocator was never opened, or is closed.
    VRAMP_ERROR_UNKNOWN_ALLOCATOR = 5,
    /// The stream does not belong to this allocator, or was forgotten.
    VRAMP_ERROR_UNKNOWN_STREAM = 6,
    /// The address is not the start of a live block of this allocator.
    VRAMP_ERROR_UNKNOWN_POINTER = 7,
    /// Out of memory. The message says what is free and what to do.
    VRAMP_ERROR_OUT_OF_MEMORY = 8,
    /// A driver call failed, for another reason than a capture. The message names it.
    VRAMP_ERROR_DRIVER = 9,
    /// The maximum number of allocators is open.
    VRAMP_ERROR_TOO_MANY = 10,
    /// `struct_size` is too small.
    VRAMP_ERROR_STRUCT_SIZE = 11,
    /// The allocator serves PyTorch and cannot be closed.
    VRAMP_ERROR_IN_USE = 12,
    /// A number is out of range.
    VRAMP_ERROR_RANGE = 13,
    /// The allocator's state is inconsistent. A defect of vramp.
    VRAMP_ERROR_INCONSISTENT = 14,
    /// vramp panicked. A defect of vramp.
    VRAMP_ERROR_INTERNAL = 15,
    /// A file cannot be written.
    VRAMP_ERROR_FILE = 16,
    /// The arena does not belong to this allocator, or is destroyed.
    VRAMP_ERROR_UNKNOWN_ARENA = 17,
    /// The graph does not belong to this allocator, or is destroyed.
    VRAMP_ERROR_UNKNOWN_GRAPH = 18,
    /// The lease does not belong to this allocator, or has ended.
    VRAMP_ERROR_UNKNOWN_LEASE = 19,
    /// The arena or the allocator is in use. The message says by what.
    VRAMP_ERROR_BUSY = 20,
    /// A capture cannot begin, failed, or forbids the call.
    VRAMP_ERROR_CAPTURE = 21,
    /// The preset or the device does not support the call.
    VRAMP_ERROR_UNSUPPORTED = 22,
    /// The process was forked from one that opened an allocator.
    VRAMP_ERROR_FORKED = 23,
    /// The program was compiled with a header that the library does not serve.
    VRAMP_ERROR_VERSION = 24,
    /// The export does not belong to this allocator, or is closed.
    VRAMP_ERROR_UNKNOWN_EXPORT = 25,
    /// The pin does not belong to this allocator, or has ended.
    VRAMP_ERROR_UNKNOWN_PIN = 26,
    /// The bytes are no ticket, or one of another version of vramp, or the secret in it is wrong.
    VRAMP_ERROR_TICKET = 27,
    /// The exporting process ended, or closed the export.
    VRAMP_ERROR_EXPORT_ENDED = 28,
    /// Two processes cannot exchange memory: another user, no answer, no path between them, or a limit
    /// of the system. The message names the cause.
    VRAMP_ERROR_EXCHANGE = 29,
    /// The allocator has no tiers.
    VRAMP_ERROR_NO_TIERS = 30,
    /// The space is not in the configuration of the tiers.
    VRAMP_ERROR_UNKNOWN_SPACE = 31,
    /// The reservation does not belong to this allocator, or is released.
    VRAMP_ERROR_UNKNOWN_RESERVATION = 32,
    /// The buffer does not belong to this allocator, or is destroyed.
    VRAMP_ERROR_UNKNOWN_BUFFER = 33,
    /// The time is over, and other leases, work or reservations are still in the way.
    VRAMP_ERROR_TIMEOUT = 34,
    /// The wait ended because the tiers are being closed.
    VRAMP_ERROR_CANCELLED = 35,
    /// The wait would never end: reservations wait for each other.
    VRAMP_ERROR_DEADLOCK = 36,
    /// The contents of a buffer cannot be read back. The message names where they were.
    VRAMP_ERROR_CONTENTS = 37,
    /// A region of memory cannot be paused, resumed or used now, or has no such tag. The message says why.
    VRAMP_ERROR_REGION = 38,
    /// The reservation that is to pay for an allocation has too few bytes left.
    VRAMP_ERROR_OVER_RESERVATION = 39,
    /// A callback around the sleep of regions failed. The message names it.
    VRAMP_ERROR_CALLBACK = 40,
    /// The keeper has no memory of the name.
    VRAMP_ERROR_NOT_KEPT = 41,
    /// Another process has the lock of kept memory until the deadline. The message names it.
    VRAMP_ERROR_KEPT_BUSY = 42,
    /// A process ended while it wrote kept memory: its contents are of no epoch.
    VRAMP_ERROR_TORN = 43,
    /// There is no keeper, or it refuses or does not answer. The message says why.
    VRAMP_ERROR_KEEPER = 44,
    /// The keeper or the kept memory is unknown, or was closed.
    VRAMP_ERROR_UNKNOWN_KEPT = 45,
}

/// Handle of an allocator. An id that is looked up: any value may be passed. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_allocator_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of a stream of an allocator. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_stream_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of an arena: memory for captured graphs. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_arena_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of a captured graph, or of a hold on the memory of a graph. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_graph_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of a lease: the right of one stream to use an arena. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_lease_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of an export: a block that other processes may open. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_export_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of a pin: memory that stays at its addresses. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_pin_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Lets another process of the user open an export. May be copied, stored and sent in any way, whole or
/// its first `length` bytes of `bytes`. It has a secret: a process of the user that reads it can open the
/// export.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_ticket_t {
    /// Number of bytes in use: 160 at most.
    pub length: u32,
    /// The bytes. Those beyond `length` are zero.
    pub bytes: [u8; 252],
}

/// How memory can be exported to other processes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_handle_type_t {
    /// It cannot.
    VRAMP_HANDLE_NONE = 0,
    /// As file descriptors, to processes on the same machine.
    VRAMP_HANDLE_POSIX_FD = 1,
    /// As fabric handles.
    VRAMP_HANDLE_FABRIC = 2,
}

/// What an allocator shares. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_sharing_t {
    /// Set by the caller to `sizeof(vramp_sharing_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// How memory can be exported.
    pub handle_type: vramp_handle_type_t,
    /// 1 if network cards can access the memory. Otherwise 0.
    pub rdma: i32,
    /// The cards that have access: bit N is device N.
    pub peers: u64,
    /// Number of blocks that are exported, those of closed exports that importers still have open
    /// included.
    pub exported: u64,
    /// Number of physical handles that are pinned, exported ones included.
    pub pinned: u64,
    /// Bytes of the pinned handles.
    pub pinned_bytes: u64,
    /// Number of imports of this allocator.
    pub imports: u64,
    /// Why less is possible than the options said. Ends with a zero, is cut to the array, and is empty
    /// where all is as the options said.
    pub fallback: [std::ffi::c_char; 160],
}

/// Memory of an arena, in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_arena_report_t {
    /// Set by the caller to `sizeof(vramp_arena_report_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Size of the address range.
    pub capacity: u64,
    /// High-water mark: the highest end of a block so far.
    pub high_water: u64,
    /// Requested bytes of live blocks.
    pub live: u64,
    /// Number of live blocks.
    pub blocks: u64,
    /// Physical memory that the arena owns.
    pub backed: u64,
    /// Physical memory of the arena that is lent to other allocations while the arena is idle.
    pub lent: u64,
}

/// Memory that a capture needed, in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_capture_report_t {
    /// Set by the caller to `sizeof(vramp_capture_report_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Number of blocks allocated in the capture.
    pub blocks: u64,
    /// Number of blocks that outlive the capture.
    pub escaped: u64,
    /// Bytes without any reuse of freed blocks.
    pub monotone: u64,
    /// Bytes that the capture took.
    pub taken: u64,
    /// Bytes that the next capture of the same shape takes; zero if no layout was planned.
    pub planned: u64,
    /// Peak of the live bytes. No layout needs less.
    pub lower_bound: u64,
    /// Memory from before the capture that was freed in it and is kept for the graph.
    pub kept: u64,
}

/// Statistics of an allocator. Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_stats_t {
    /// Set by the caller to `sizeof(vramp_stats_t)`: at most that many bytes are written. On
    /// return, the number of bytes written.
    pub struct_size: u64,
    /// Requested bytes of live blocks.
    pub live: u64,
    /// Peak of `live`.
    pub live_peak: u64,
    /// Physical memory that the allocator has reserved.
    pub reserved: u64,
    /// Peak of `reserved`.
    pub reserved_peak: u64,
    /// Number of blocks allocated.
    pub placed: u64,
    /// Number of blocks freed.
    pub freed: u64,
    /// Cache hits: allocations without driver calls for memory.
    pub hits: u64,
    /// Cache misses.
    pub misses: u64,
    /// Number of chunks (physical handles) created.
    pub chunks_created: u64,
    /// Number of chunks mapped at a new address.
    pub chunks_moved: u64,
    /// Number of chunks moved to an address where they were still mapped.
    pub chunks_reactivated: u64,
    /// Number of chunks released to the device.
    pub chunks_released: u64,
    /// Bytes of the chunks moved or reactivated.
    pub moved: u64,
    /// Number of plans that failed and were undone.
    pub plans_undone: u64,
    /// Free memory of the device.
    pub card_free: u64,
    /// Total memory of the device.
    pub card_total: u64,
    /// Number of callbacks that panicked. Zero for callbacks in C.
    pub callback_panics: u64,
    /// Bytes of the chunks released to the device.
    pub released: u64,
    /// Most bytes that may be reserved; zero if the memory of the device is the limit.
    pub limit: u64,
    /// Number of entries that requests looked at beside index searches: how the cost of requests
    /// grows with the pool.
    pub looked_at: u64,
    /// Physical memory, part of `reserved`, that a failed driver call left unusable until a trim releases
    /// it.
    pub quarantined: u64,
    /// Addresses that a failed driver call left unusable until a trim unmaps them.
    pub quarantined_addresses: u64,
    /// Pinned memory of the host: of the regions, and of the open tiers.
    pub host_pinned: u64,
    /// What copies take of it. The rest is idle, and goes back after some seconds or with vramp_trim.
    pub host_used: u64,
}

/// Kind of an event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_event_kind_t {
    /// A block was allocated: `address`, `size`, `requested`, `stream`. Any thread may free it
    /// already.
    VRAMP_EVENT_ALLOCATED = 0,
    /// A block is freed: `address`, `size`, `requested`, `stream`. Its memory is not allocated again
    /// before all observers have returned.
    VRAMP_EVENT_FREED = 1,
    /// Physical memory was allocated from the device: `size`.
    VRAMP_EVENT_GROWN = 2,
    /// Physical memory was released to the device: `size`.
    VRAMP_EVENT_SHRUNK = 3,
    /// Free memory was remapped to a contiguous range: `size`.
    VRAMP_EVENT_REMAPPED = 4,
    /// A request was short of memory and is retried: `requested`.
    VRAMP_EVENT_SHORT = 5,
    /// A request failed: `requested`.
    VRAMP_EVENT_OUT_OF_MEMORY = 6,
}

/// An event. Fields that its kind does not list are zero. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_event_t {
    /// Kind of the event.
    pub kind: vramp_event_kind_t,
    /// Address of the block.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Requested bytes.
    pub requested: u64,
    /// Stream that the block is allocated for, or freed on.
    pub stream: vramp_stream_t,
}

/// Called for every event, on the thread that caused it. No lock is held, so it may call vramp:
/// events of such calls on the same allocator reach no observer. vramp_close of the allocator
/// returns VRAMP_ERROR_BUSY in it. It must not unwind: no C++ exception may leave it.
pub type vramp_observer_t =
    Option<unsafe extern "C" fn(event: *const vramp_event_t, user: *mut std::ffi::c_void)>;

/// Why a request finds no memory, in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_shortage_t {
    /// Requested bytes.
    pub requested: u64,
    /// Physical memory that the allocator has reserved.
    pub reserved: u64,
    /// Bytes of live blocks, rounding included.
    pub used: u64,
    /// Free memory of the allocator, whether this request can use it or not.
    pub free: u64,
    /// Largest block that remapping all free memory could make.
    pub largest: u64,
    /// Freed memory that work of other streams still uses.
    pub waiting: u64,
    /// Limit that the request would exceed; zero if it exceeds none.
    pub limit: u64,
    /// Stream of the request; zero for memory behind addresses that exist already.
    pub stream: vramp_stream_t,
}

/// Called before a request fails for want of memory, on the thread of the request. No lock is held.
/// It may free blocks and call vramp. It returns nonzero if it freed something: then the request is
/// tried again. Requests made in it call no handler and do not wait. vramp_close of the allocator
/// returns VRAMP_ERROR_BUSY in it. It must not unwind: no C++ exception may leave it.
pub type vramp_shortage_handler_t = Option<
    unsafe extern "C" fn(
        shortage: *const vramp_shortage_t,
        user: *mut std::ffi::c_void,
    ) -> std::ffi::c_int,
>;

/// Called for each statistic of vramp_memory_stats. `name` is valid until it returns. It must not
/// unwind: no C++ exception may leave it.
pub type vramp_stat_visitor_t = Option<
    unsafe extern "C" fn(name: *const std::ffi::c_char, value: u64, user: *mut std::ffi::c_void),
>;

/// The device of an allocator. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_device_t {
    /// Set by the caller to `sizeof(vramp_device_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Total memory in bytes.
    pub memory: u64,
    /// Granularity of physical memory in bytes.
    pub granularity: u64,
    /// Number of the device as CUDA counts it in this process; -1 for a simulated device.
    pub ordinal: i32,
    /// 1 if the device is simulated: nothing can run on it, and its addresses must not be dereferenced
    /// unless vramp_map_simulated_cards was called before it was opened. Otherwise 0.
    pub simulated: i32,
    /// Name of the card, such as "NVIDIA H200". This text and the following ones end with a zero,
    /// are cut to their arrays, and are empty where the device has none.
    pub name: [std::ffi::c_char; 96],
    /// Name that vramp_open accepts, such as "cuda:0" or "sim:h200".
    pub id: [std::ffi::c_char; 96],
    /// UUID of the card, such as "GPU-8932f937-...".
    pub uuid: [std::ffi::c_char; 48],
    /// PCI address of the card, such as "0000:3b:00.0".
    pub pci: [std::ffi::c_char; 16],
}
