//! Wrappers of the interface for tests, with statuses as errors.

pub mod sleep;
pub mod tiers;

use std::ffi::c_void;

use vramp_capi::abi::vramp_status_t;
use vramp_capi::abi::{
    vramp_allocator_t, vramp_device_t, vramp_handle_type_t, vramp_sharing_t, vramp_stats_t,
    vramp_stream_t, vramp_ticket_t,
};
use vramp_capi::testing;
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
