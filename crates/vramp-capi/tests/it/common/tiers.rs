//! Wrappers of tiers, reservations, buffers and leases for tests.

use std::ffi::c_void;
use std::ptr::null_mut;

use vramp_alloc::{Bytes, Config};
use vramp_capi::abi::vramp_status_t::{self, VRAMP_OK};
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::tiers::abi::vramp_buffer_state_t::VRAMP_BUFFER_EMPTY;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::paying::*;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

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
    assert_eq!(open_tiers(allocator, &options(0, host)), VRAMP_OK, "{}", super::last_error());
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
