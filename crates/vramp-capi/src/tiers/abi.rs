//! The types of tiers, reservations and deferrable buffers, with their C names.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

use std::ffi::{c_char, c_void};

use crate::abi::vramp_stream_t;

/// Tier of a space: memory of a card.
pub const VRAMP_TIER_DEVICE: u32 = 0;
/// Tier of a space: pinned memory of the host.
pub const VRAMP_TIER_HOST: u32 = 1;
/// Tier of a space: files on a disk.
pub const VRAMP_TIER_DISK: u32 = 2;

/// Tier of contents: memory of another card. No space has it.
pub const VRAMP_TIER_PEER: u32 = 3;

/// Index of a space: any of its tier.
pub const VRAMP_ANY_INDEX: u32 = u32::MAX;

/// Time without end, for timeouts.
pub const VRAMP_FOREVER: u64 = u64::MAX;

/// Access of a lease: the work only reads. Several leases may hold the buffer.
pub const VRAMP_ACCESS_READ: u32 = 0;
/// Access of a lease: the work may read and write.
pub const VRAMP_ACCESS_WRITE: u32 = 1;
/// Access of a lease: the work writes all of the buffer, alone, and reads nothing of it. What left the card
/// is not copied back: its bytes are any at first. When the lease ends all of it counts as written; if it is
/// cancelled the contents are as before. A buffer that a request also names with another access is restored.
pub const VRAMP_ACCESS_OVERWRITE: u32 = 2;

/// Hint: nothing is known of the next use.
pub const VRAMP_HINT_NONE: u32 = 0;
/// Hint: the buffer is needed soon. Others leave first.
pub const VRAMP_HINT_WILL_NEED: u32 = 1;
/// Hint: the buffer is not needed soon. It leaves before others.
pub const VRAMP_HINT_WONT_NEED: u32 = 2;

/// A budget: a card, the pinned memory of a NUMA node, or a directory on a disk.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_space_t {
    /// VRAMP_TIER_DEVICE, VRAMP_TIER_HOST or VRAMP_TIER_DISK.
    pub tier: u32,
    /// Index in the tier, from the configuration.
    pub index: u32,
}

/// Handle of a reservation: memory of a space that is kept free for its owner. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_reservation_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Handle of a deferrable buffer: its contents may leave the card while no lease holds it. Zero is
/// none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_buffer_t {
    /// Opaque. May be compared, and hashed: it is never reused.
    pub id: u64,
}

/// Handle of a lease on buffers: while it is held they stay on the card. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_buffer_lease_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// A store of the caller's own in place of files, for contents that the host has no room for: another
/// process, a file format, a network. Set the struct to zero before. It is copied. Later versions add
/// fields at the end.
///
/// Each object is written once under a key of its own, read any number of times, and removed once. The
/// functions are called with `user`, at the same time for different keys: `write` and `read` on threads of
/// vramp, `remove` on the thread that drops a copy, perhaps in the middle of its vramp_malloc. No lock is
/// held, and they may block: what moves waits for them. They return VRAMP_OK, VRAMP_ERROR_OUT_OF_MEMORY if
/// there is no room, or any other number if they failed. They must not unwind: no C++ exception may leave
/// them.
///
/// In these functions each call that takes an allocator returns VRAMP_ERROR_BUSY and does nothing, for any
/// allocator: it could wait for its own end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vramp_store_t {
    /// Set by the caller to `sizeof(vramp_store_t)`.
    pub struct_size: u64,
    /// Most bytes in the store. Not zero.
    pub capacity: u64,
    /// Passed to the functions.
    pub user: *mut c_void,
    /// Stores `size` bytes under a key that was not used before. If it fails they stay where they were, and
    /// `remove` is called for the key.
    pub write: Option<
        unsafe extern "C" fn(user: *mut c_void, key: u64, bytes: *const c_void, size: usize) -> i32,
    >,
    /// Fills `bytes` with the object, which has `size` bytes. If it fails the object stays, and may be read
    /// again. Other bytes than were written are found by a checksum.
    pub read: Option<
        unsafe extern "C" fn(user: *mut c_void, key: u64, bytes: *mut c_void, size: usize) -> i32,
    >,
    /// Removes an object, also one whose `write` failed. If it fails it is not called again for the key.
    pub remove: Option<unsafe extern "C" fn(user: *mut c_void, key: u64) -> i32>,
    /// Called once, after the last call of the other functions: the tiers were closed, and every call that
    /// used them has returned. On any thread, with no lock held. Null for none.
    pub release: Option<unsafe extern "C" fn(user: *mut c_void)>,
    /// Most calls of `write` and `read` at the same time, up to 64. Zero means 4.
    pub threads: u64,
}

/// Sizes of the tiers below an allocator, for vramp_tiers_open_with. Set the struct to zero before.
/// Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vramp_tiers_options_t {
    /// Set by the caller to `sizeof(vramp_tiers_options_t)`.
    pub struct_size: u64,
    /// Budget of the card for reservations and buffers. Zero means the allocator's limit, or the
    /// memory of the device.
    pub device_bytes: u64,
    /// Pinned memory of the host for spilled contents. At least 1 MiB.
    pub host_bytes: u64,
    /// Directory for contents that the host has no room for. Null or empty for none. A path in UTF-8.
    pub disk_directory: *const c_char,
    /// Most bytes in the directory. Not zero if there is a directory.
    pub disk_bytes: u64,
    /// A store of the caller in place of the directory: the space VRAMP_TIER_DISK with index 0. Null for
    /// none.
    pub store: *const vramp_store_t,
    /// Most bytes of free memory that are taken of each other card that this one has peer access to, for
    /// contents of buffers. 1 GiB there stays free. Zero takes none.
    pub peer_bytes: u64,
}

/// Statistics of a space, in bytes where not said otherwise. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_space_stats_t {
    /// Set by the caller to `sizeof(vramp_space_stats_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Upper bound of all charges.
    pub capacity: u64,
    /// Upper bound of reservations.
    pub limit: u64,
    /// From this total up, data should be spilled.
    pub trigger: u64,
    /// From this total down, spilling should stop.
    pub stop: u64,
    /// Unit of all amounts: requests are rounded up to it.
    pub granule: u64,
    /// All charges: `reserved + overrun + orphaned + unreserved`.
    pub total: u64,
    /// Peak of `total`.
    pub peak: u64,
    /// Free below the limit.
    pub available: u64,
    /// Free below the capacity.
    pub available_capacity: u64,
    /// Sum of the sizes of active reservations.
    pub reserved: u64,
    /// What active reservations use beyond their sizes.
    pub overrun: u64,
    /// What is still allocated from released reservations.
    pub orphaned: u64,
    /// What is charged without a reservation.
    pub unreserved: u64,
    /// Number of active reservations.
    pub reservations: u64,
    /// Number of requests that wait, in all spaces.
    pub waiting: u64,
    /// Number of reservations made so far.
    pub reserves: u64,
    /// Number of requests refused so far.
    pub refusals: u64,
    /// Number of reservations released so far.
    pub releases: u64,
}

/// State of a reservation, in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_reservation_info_t {
    /// Set by the caller to `sizeof(vramp_reservation_info_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Space of the reservation.
    pub space: vramp_space_t,
    /// Size: the requested bytes, in whole granules of the space.
    pub size: u64,
    /// Bytes charged to it.
    pub used: u64,
    /// What can still be charged to it.
    pub unused: u64,
    /// Peak of `used`.
    pub peak: u64,
}

/// Where the contents of a buffer are.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_buffer_state_t {
    /// It has none: nothing was written.
    VRAMP_BUFFER_EMPTY = 0,
    /// All on the card.
    VRAMP_BUFFER_RESIDENT = 1,
    /// Some or all below the card. A lease restores them.
    VRAMP_BUFFER_DEFERRED = 2,
}

/// State of a buffer. Without a lease it may change at once. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_buffer_info_t {
    /// Set by the caller to `sizeof(vramp_buffer_info_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Its address, which never changes. There is memory behind it only under a lease.
    pub address: *mut c_void,
    /// Its length in bytes.
    pub size: u64,
    /// Where its contents are.
    pub state: vramp_buffer_state_t,
    /// Number of leases on it. While there are some it is locked: it stays where it is.
    pub leases: u32,
    /// Bytes of contents on the card.
    pub device_bytes: u64,
    /// Bytes of contents with a valid copy on the host.
    pub host_bytes: u64,
    /// Bytes of contents with a valid copy on the disk.
    pub disk_bytes: u64,
    /// Bytes of contents with a valid copy on another card.
    pub peer_bytes: u64,
    /// Bytes that move now, in any direction.
    pub moving_bytes: u64,
    /// Stream of the last lease, which may be forgotten. Zero before the first.
    pub last_stream: vramp_stream_t,
}

/// A buffer of a lease, and what the work does with it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_buffer_use_t {
    /// The buffer.
    pub buffer: vramp_buffer_t,
    /// VRAMP_ACCESS_READ, VRAMP_ACCESS_WRITE or VRAMP_ACCESS_OVERWRITE.
    pub access: u32,
}

/// What happened to a buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum vramp_buffer_change_t {
    /// It was made.
    VRAMP_BUFFER_CREATED = 0,
    /// `bytes` of its contents left the card for the tier `to`.
    VRAMP_BUFFER_WAS_DEFERRED = 1,
    /// `bytes` of its contents came back from the tier `from`, for work queued from now on.
    VRAMP_BUFFER_RETRIEVED = 2,
    /// `bytes` of its contents moved from the tier `from` to the tier `to`, both below the card.
    VRAMP_BUFFER_MOVED = 3,
    /// A lease holds it: it stays on the card.
    VRAMP_BUFFER_LOCKED = 4,
    /// A lease on it ended. Work that it queued may still run.
    VRAMP_BUFFER_UNLOCKED = 5,
    /// Its contents were discarded.
    VRAMP_BUFFER_DISCARDED = 6,
    /// It was destroyed, and its work is complete. The last event of the buffer.
    VRAMP_BUFFER_FREED = 7,
    /// The observer fell behind, and `bytes` is the number of events that were dropped. `buffer` is zero:
    /// ask vramp_buffer_info for the states.
    VRAMP_BUFFER_EVENTS_LOST = 8,
    /// Another change.
    VRAMP_BUFFER_OTHER_CHANGE = 9,
}

/// A change of a buffer. Fields that its kind does not list are zero. Later versions add fields at the
/// end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct vramp_buffer_event_t {
    /// What happened.
    pub change: vramp_buffer_change_t,
    /// Tier that contents left.
    pub from: u32,
    /// Tier that they went to.
    pub to: u32,
    /// Number of leases on the buffer after the change.
    pub leases: u32,
    /// The buffer. It may be destroyed already.
    pub buffer: vramp_buffer_t,
    /// Bytes of contents. A long buffer moves in pieces, with an event for each.
    pub bytes: u64,
    /// Length of the buffer.
    pub size: u64,
    /// Bytes of its contents below the card after the change.
    pub deferred_bytes: u64,
    /// Time, in nanoseconds of the device's clock.
    pub at_ns: u64,
}

/// Called for every change of a buffer, on a thread of vramp. No lock is held, so it may call vramp; but
/// vramp_close and vramp_tiers_close return VRAMP_ERROR_BUSY in it, for any allocator. It must not unwind:
/// no C++ exception may leave it.
pub type vramp_buffer_observer_t =
    Option<unsafe extern "C" fn(event: *const vramp_buffer_event_t, user: *mut c_void)>;

/// Called with `user` when memory that vramp_buffer_adopt took is not needed any more. It must not
/// unwind: no C++ exception may leave it.
pub type vramp_release_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// Called with a text, which is valid until it returns. It must not unwind: no C++ exception may leave
/// it.
pub type vramp_text_visitor_t =
    Option<unsafe extern "C" fn(text: *const c_char, user: *mut c_void)>;

/// Statistics of buffers. Amounts are in bytes. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_tiers_stats_t {
    /// Set by the caller to `sizeof(vramp_tiers_stats_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Number of buffers.
    pub buffers: u64,
    /// Number of leases.
    pub leases: u64,
    /// Number of lease requests that wait.
    pub waiting: u64,
    /// Length of all buffers.
    pub total: u64,
    /// Without contents.
    pub empty: u64,
    /// On the card.
    pub resident: u64,
    /// Below the card only.
    pub deferred: u64,
    /// Valid copies on the host.
    pub host_copies: u64,
    /// Valid copies on the disk.
    pub disk_copies: u64,
    /// Valid copies on other cards.
    pub peer_copies: u64,
    /// In leased buffers.
    pub leased: u64,
    /// Copied to the host so far.
    pub to_host: u64,
    /// Written to the disk so far.
    pub to_disk: u64,
    /// Copied to other cards so far.
    pub to_peer: u64,
    /// Restored from the host so far.
    pub from_host: u64,
    /// Restored from the disk so far.
    pub from_disk: u64,
    /// Restored from other cards so far.
    pub from_peer: u64,
    /// Number of evictions requested so far.
    pub evictions: u64,
    /// What they freed.
    pub evicted: u64,
    /// Number of lease requests that waited so far.
    pub waits: u64,
    /// Nanoseconds that they waited.
    pub waited_ns: u64,
    /// Number of moves that failed so far. vramp_tiers_failures has the last ones.
    pub failures: u64,
    /// Pinned memory of the host.
    pub host_pinned: u64,
    /// What copies take of it. The rest is idle, and goes back after some seconds or with vramp_trim.
    pub host_used: u64,
    /// Number of buffers read in place so far.
    pub reads_in_place: u64,
    /// Number of buffers restored so far because they were read in place often.
    pub promotions: u64,
}
