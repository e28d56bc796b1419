//! Wrappers of the interface for tests, with statuses as errors.

use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};

use vramp_alloc::{Bytes, Config};
use vramp_capi::abi::vramp_status_t::VRAMP_OK;
use vramp_capi::abi::{
    vramp_allocator_t, vramp_device_t, vramp_handle_type_t, vramp_sharing_t, vramp_stats_t,
    vramp_status_t, vramp_stream_t, vramp_ticket_t,
};
use vramp_capi::kept::abi::vramp_kept_phase_t::VRAMP_KEPT_DRAFT;
use vramp_capi::kept::abi::*;
use vramp_capi::sleep::abi::vramp_region_phase_t::VRAMP_REGION_AWAKE;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::*;
use vramp_capi::testing;
use vramp_capi::tiers::abi::vramp_buffer_state_t::VRAMP_BUFFER_EMPTY;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::paying::*;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

pub use vramp_capi::testing::last_error;

pub fn open_on(device: &str, options: &str) -> Result<vramp_allocator_t, vramp_status_t> {
    testing::open(device, options).map_err(|refused| refused.status)
}

pub fn open(options: &str) -> vramp_allocator_t {
    open_on("sim:h200", options).expect("the simulator opens")
}

pub fn stream(allocator: vramp_allocator_t) -> vramp_stream_t {
    testing::create_stream(allocator).expect("the simulator makes streams")
}

pub fn adopt(allocator: vramp_allocator_t, raw: usize) -> Result<vramp_stream_t, vramp_status_t> {
    testing::adopt_stream(allocator, raw).map_err(|refused| refused.status)
}

pub fn malloc(
    allocator: vramp_allocator_t,
    size: usize,
    stream: vramp_stream_t,
) -> Result<*mut c_void, vramp_status_t> {
    testing::malloc(allocator, size, stream).map_err(|refused| refused.status)
}

pub fn stats(allocator: vramp_allocator_t) -> vramp_stats_t {
    testing::stats(allocator).expect("the allocator is open")
}

/// A struct for `vramp_device` to fill.
pub fn no_device() -> vramp_device_t {
    vramp_device_t {
        struct_size: size_of::<vramp_device_t>() as u64,
        memory: 0,
        granularity: 0,
        ordinal: 0,
        simulated: 0,
        name: [0; 96],
        id: [0; 96],
        uuid: [0; 48],
        pci: [0; 16],
    }
}

/// A struct for `vramp_sharing` to fill.
pub fn no_sharing() -> vramp_sharing_t {
    vramp_sharing_t {
        struct_size: size_of::<vramp_sharing_t>() as u64,
        handle_type: vramp_handle_type_t::VRAMP_HANDLE_NONE,
        rdma: 0,
        peers: 0,
        exported: 0,
        pinned: 0,
        pinned_bytes: 0,
        imports: 0,
        fallback: [0; 160],
    }
}

/// A ticket without bytes.
pub fn no_ticket() -> vramp_ticket_t {
    vramp_ticket_t { length: 0, bytes: [0; 252] }
}

pub const DEVICE: vramp_space_t = vramp_space_t { tier: VRAMP_TIER_DEVICE, index: 0 };
pub const HOST: vramp_space_t = vramp_space_t { tier: VRAMP_TIER_HOST, index: 0 };
pub const MIB: u64 = 1 << 20;

type Outcome<T> = Result<T, vramp_status_t>;

/// Returns `value` if the status is that of success.
pub fn outcome<T>(status: vramp_status_t, value: T) -> Outcome<T> {
    if status == VRAMP_OK { Ok(value) } else { Err(status) }
}

/// Options of tiers without a disk. Zero bytes of the device mean the allocator's limit.
pub fn options(device_bytes: u64, host_bytes: u64) -> vramp_tiers_options_t {
    vramp_tiers_options_t {
        struct_size: size_of::<vramp_tiers_options_t>() as u64,
        device_bytes,
        host_bytes,
        disk_directory: std::ptr::null(),
        disk_bytes: 0,
        store: std::ptr::null(),
        peer_bytes: 0,
    }
}

pub fn open_tiers(allocator: vramp_allocator_t, options: &vramp_tiers_options_t) -> vramp_status_t {
    // SAFETY: the struct outlives the call, and its texts are constants.
    unsafe { vramp_tiers_open_with(allocator, options) }
}

/// Opens an allocator with a limit in MiB on a simulated card that stores what is written.
pub fn open_mapped(limit_mib: u64) -> vramp_allocator_t {
    let device = vramp_alloc::device::open_mapped("sim:h200").expect("the simulator opens");
    let limit = Some(Bytes::mib(limit_mib));
    let config = Config { limit, ..Config::default() };
    let opened = vramp_capi::testing::open_on(device, config);
    opened.expect("the configuration is valid")
}

/// Opens an allocator as [`open_mapped`], with tiers of `host` bytes.
pub fn open_with_tiers(limit_mib: u64, host: u64) -> vramp_allocator_t {
    let allocator = open_mapped(limit_mib);
    assert_eq!(open_tiers(allocator, &options(0, host)), VRAMP_OK, "{}", last_error());
    allocator
}

pub fn space_stats(
    allocator: vramp_allocator_t,
    space: vramp_space_t,
) -> Outcome<vramp_space_stats_t> {
    let mut stats = vramp_space_stats_t {
        struct_size: size_of::<vramp_space_stats_t>() as u64,
        ..vramp_space_stats_t::default()
    };
    // SAFETY: the result outlives the call.
    outcome(unsafe { vramp_space_stats(allocator, space, &mut stats) }, ()).map(|()| stats)
}

pub fn reserve(
    allocator: vramp_allocator_t,
    space: vramp_space_t,
    bytes: u64,
    timeout_ns: u64,
) -> Outcome<vramp_reservation_t> {
    let mut made = vramp_reservation_t::default();
    // SAFETY: the result outlives the call.
    let status = unsafe { vramp_reserve(allocator, space, bytes, 0, timeout_ns, &mut made) };
    outcome(status, ()).map(|()| made)
}

pub fn reservation(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
) -> Outcome<vramp_reservation_info_t> {
    let mut info = vramp_reservation_info_t {
        struct_size: size_of::<vramp_reservation_info_t>() as u64,
        ..vramp_reservation_info_t::default()
    };
    // SAFETY: the result outlives the call.
    let status = unsafe { vramp_reservation_info(allocator, reservation, &mut info) };
    outcome(status, ()).map(|()| info)
}

/// Allocates a block that a reservation pays for.
pub fn malloc_paid(
    allocator: vramp_allocator_t,
    reservation: vramp_reservation_t,
    size: usize,
    stream: vramp_stream_t,
) -> Outcome<*mut c_void> {
    let mut address = std::ptr::dangling_mut();
    // SAFETY: the result outlives the call.
    let status =
        unsafe { vramp_reservation_malloc(allocator, reservation, size, stream, &mut address) };
    assert!(status == VRAMP_OK || address.is_null(), "a failure leaves no address behind");
    outcome(status, address)
}

pub fn buffer(allocator: vramp_allocator_t, size: u64) -> Outcome<vramp_buffer_t> {
    let mut made = vramp_buffer_t::default();
    // SAFETY: the result outlives the call.
    outcome(unsafe { vramp_buffer_create(allocator, size, &mut made) }, ()).map(|()| made)
}

/// A struct for `vramp_buffer_info` to fill.
pub fn no_info() -> vramp_buffer_info_t {
    vramp_buffer_info_t {
        struct_size: size_of::<vramp_buffer_info_t>() as u64,
        address: null_mut(),
        size: 0,
        state: VRAMP_BUFFER_EMPTY,
        leases: 0,
        device_bytes: 0,
        host_bytes: 0,
        disk_bytes: 0,
        peer_bytes: 0,
        moving_bytes: 0,
        last_stream: vramp_stream_t::default(),
    }
}

pub fn info(allocator: vramp_allocator_t, buffer: vramp_buffer_t) -> Outcome<vramp_buffer_info_t> {
    let mut info = no_info();
    // SAFETY: the result outlives the call.
    outcome(unsafe { vramp_buffer_info(allocator, buffer, &mut info) }, ()).map(|()| info)
}

pub fn write(allocator: vramp_allocator_t, buffer: vramp_buffer_t, bytes: &[u8]) -> Outcome<()> {
    let from = bytes.as_ptr().cast::<c_void>();
    // SAFETY: the bytes outlive the call.
    outcome(unsafe { vramp_buffer_write(allocator, buffer, 0, from, bytes.len()) }, ())
}

pub fn read(allocator: vramp_allocator_t, buffer: vramp_buffer_t, len: usize) -> Outcome<Vec<u8>> {
    let mut bytes = vec![0; len];
    let to = bytes.as_mut_ptr().cast::<c_void>();
    // SAFETY: the bytes outlive the call.
    let status = unsafe { vramp_buffer_read(allocator, buffer, 0, to, len) };
    outcome(status, ()).map(|()| bytes)
}

/// Leases buffers, and returns their addresses too.
pub fn lease(
    allocator: vramp_allocator_t,
    uses: &[(vramp_buffer_t, u32)],
    stream: vramp_stream_t,
    timeout_ns: u64,
) -> Outcome<(vramp_buffer_lease_t, Vec<*mut c_void>)> {
    let uses: Vec<_> =
        uses.iter().map(|&(buffer, access)| vramp_buffer_use_t { buffer, access }).collect();
    let mut addresses = vec![null_mut(); uses.len()];
    let mut lease = vramp_buffer_lease_t::default();
    let (from, to) = (uses.as_ptr(), addresses.as_mut_ptr());
    // SAFETY: the arrays have as many elements, and the results outlive the call.
    let status = unsafe {
        vramp_buffers_lease(allocator, from, uses.len(), stream, timeout_ns, to, &mut lease)
    };
    outcome(status, ()).map(|()| (lease, addresses))
}

pub fn tiers_stats(allocator: vramp_allocator_t) -> vramp_tiers_stats_t {
    let mut stats = vramp_tiers_stats_t {
        struct_size: size_of::<vramp_tiers_stats_t>() as u64,
        ..vramp_tiers_stats_t::default()
    };
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_tiers_stats(allocator, &mut stats) }, VRAMP_OK);
    stats
}

pub fn evict(allocator: vramp_allocator_t, bytes: u64) -> u64 {
    let mut freed = 0;
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_evict(allocator, bytes, &mut freed) }, VRAMP_OK);
    freed
}

pub const SIZE: u64 = size_of::<vramp_region_status_t>() as u64;

pub fn region_options(backup: u32, read_only: bool) -> vramp_region_options_t {
    let struct_size = size_of::<vramp_region_options_t>() as u64;
    vramp_region_options_t { struct_size, backup, read_only: i32::from(read_only) }
}

pub fn pause_options(keep: u64, discard: bool) -> vramp_pause_options_t {
    let struct_size = size_of::<vramp_pause_options_t>() as u64;
    vramp_pause_options_t { struct_size, keep, discard: i32::from(discard) }
}

pub fn begin_with(
    allocator: vramp_allocator_t,
    tag: &str,
    options: &vramp_region_options_t,
) -> Outcome<vramp_region_scope_t> {
    let tag = CString::new(tag).unwrap();
    let mut scope = vramp_region_scope_t::default();
    // SAFETY: the text ends with a zero, and the struct and the result outlive the call.
    outcome(unsafe { vramp_region_begin(allocator, tag.as_ptr(), options, &mut scope) }, ())
        .map(|()| scope)
}

pub fn begin(allocator: vramp_allocator_t, tag: &str) -> Outcome<vramp_region_scope_t> {
    begin_with(allocator, tag, &region_options(VRAMP_BACKUP_HOST, false))
}

pub fn disable(allocator: vramp_allocator_t) -> Outcome<vramp_region_scope_t> {
    let mut scope = vramp_region_scope_t::default();
    // SAFETY: the result outlives the call.
    outcome(unsafe { vramp_region_disable(allocator, &mut scope) }, ()).map(|()| scope)
}

/// Calls `call` with tags as C passes them.
fn with_tags<R>(tags: &[&str], call: impl FnOnce(*const *const c_char, usize) -> R) -> R {
    let texts: Vec<CString> = tags.iter().map(|tag| CString::new(*tag).unwrap()).collect();
    // Not null without tags, which would mean all regions.
    let pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).chain([null()]).collect();
    call(pointers.as_ptr(), tags.len())
}

pub fn pause_with(
    allocator: vramp_allocator_t,
    tags: &[&str],
    options: &vramp_pause_options_t,
) -> vramp_status_t {
    // SAFETY: the texts and the struct outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_pause(allocator, tags, count, options) })
}

pub fn pause(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call; null stands for the defaults.
    with_tags(tags, |tags, count| unsafe { vramp_region_pause(allocator, tags, count, null()) })
}

pub fn resume(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_resume(allocator, tags, count) })
}

pub fn clean(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_clean(allocator, tags, count) })
}

pub fn prefetch(allocator: vramp_allocator_t, tags: &[&str]) -> vramp_status_t {
    // SAFETY: the texts outlive the call.
    with_tags(tags, |tags, count| unsafe { vramp_region_prefetch(allocator, tags, count) })
}

pub fn remove(allocator: vramp_allocator_t, tag: &str) -> vramp_status_t {
    let tag = CString::new(tag).unwrap();
    // SAFETY: the text outlives the call.
    unsafe { vramp_region_remove(allocator, tag.as_ptr()) }
}

pub fn on_pressure(allocator: vramp_allocator_t, tags: &[&str]) -> Outcome<u64> {
    let mut number = 0;
    // SAFETY: the texts and the result outlive the call.
    let status = with_tags(tags, |tags, count| unsafe {
        vramp_region_on_pressure(allocator, tags, count, &mut number)
    });
    outcome(status, number)
}

/// A struct for `vramp_region_status` to fill.
pub fn no_status() -> vramp_region_status_t {
    vramp_region_status_t {
        struct_size: SIZE,
        phase: VRAMP_REGION_AWAKE,
        backup: u32::MAX,
        read_only: -1,
        tag_length: u32::MAX,
        on_card: u64::MAX,
        asleep: u64::MAX,
        on_host: u64::MAX,
        on_disk: u64::MAX,
        copied: u64::MAX,
        to_copy: u64::MAX,
        tag: [1; 128],
    }
}

/// Returns the states of all regions.
pub fn states(allocator: vramp_allocator_t) -> Outcome<Vec<vramp_region_status_t>> {
    let (mut found, mut count) = ([no_status(); 16], 0);
    // SAFETY: the array has as many structs, and the results outlive the call.
    let status = unsafe { vramp_region_status(allocator, found.as_mut_ptr(), 16, &mut count) };
    outcome(status, ()).map(|()| found[..count].to_vec())
}

/// Returns the state of the region with a tag.
pub fn state(allocator: vramp_allocator_t, tag: &str) -> vramp_region_status_t {
    let states = states(allocator).unwrap();
    *states.iter().find(|state| tag_of(state) == tag).expect("the region exists")
}

/// Returns the tag of a region.
pub fn tag_of(state: &vramp_region_status_t) -> String {
    let bytes: Vec<u8> = state.tag.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8(bytes).expect("it is cut between characters")
}

/// A struct for `vramp_kept_state` to fill.
pub fn no_kept_state() -> vramp_kept_state_t {
    vramp_kept_state_t {
        struct_size: size_of::<vramp_kept_state_t>() as u64,
        address: null_mut(),
        bytes: 0,
        epoch: 0,
        layout_bytes: 0,
        digest: [1; 32],
        phase: VRAMP_KEPT_DRAFT,
        lock: u32::MAX,
        writable: -1,
        torn: -1,
        superseded: -1,
        adrift: -1,
        writer_waits: -1,
        reserved: 0,
    }
}

/// A struct for `vramp_keeper_entries` to fill.
pub fn no_entry() -> vramp_kept_entry_t {
    vramp_kept_entry_t {
        struct_size: size_of::<vramp_kept_entry_t>() as u64,
        bytes: 0,
        epoch: 0,
        holders: 0,
        waiting: 0,
        superseded: 0,
        idle_ns: 0,
        priority: 0,
        torn: -1,
        writer: 0,
        drafter: 0,
        device: [1; 96],
        name: [1; 208],
    }
}
