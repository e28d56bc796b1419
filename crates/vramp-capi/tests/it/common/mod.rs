//! Safe wrappers of the interface for tests.

use std::ffi::{CStr, CString, c_void};

use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_stats_t, vramp_stream_t};
use vramp_capi::interface::*;

pub fn open_on(device: &str, options: &str) -> Result<vramp_allocator_t, vramp_status_t> {
    let device = CString::new(device).expect("no zeros in names");
    let options = CString::new(options).expect("no zeros in options");
    let mut allocator = vramp_allocator_t::default();
    // SAFETY: the texts end with zeros and the result outlives the call.
    match unsafe { vramp_open(device.as_ptr(), options.as_ptr(), &mut allocator) } {
        VRAMP_OK => Ok(allocator),
        status => Err(status),
    }
}

pub fn open(options: &str) -> vramp_allocator_t {
    open_on("sim:h200", options).expect("the simulator opens")
}

pub fn stream(allocator: vramp_allocator_t) -> vramp_stream_t {
    let mut stream = vramp_stream_t::default();
    // SAFETY: the result outlives the call.
    let status = unsafe { vramp_stream_create(allocator, &mut stream) };
    assert_eq!(status, VRAMP_OK);
    stream
}

pub fn adopt(allocator: vramp_allocator_t, raw: usize) -> Result<vramp_stream_t, vramp_status_t> {
    let mut stream = vramp_stream_t::default();
    // SAFETY: the result outlives the call; on the simulator any value is a stream.
    match unsafe { vramp_stream_adopt(allocator, raw as *mut c_void, &mut stream) } {
        VRAMP_OK => Ok(stream),
        status => Err(status),
    }
}

pub fn malloc(
    allocator: vramp_allocator_t,
    size: usize,
    stream: vramp_stream_t,
) -> Result<*mut c_void, vramp_status_t> {
    let mut address = std::ptr::dangling_mut();
    // SAFETY: the result outlives the call.
    match unsafe { vramp_malloc(allocator, size, stream, &mut address) } {
        VRAMP_OK => Ok(address),
        status => {
            assert!(address.is_null(), "a failure leaves no address behind");
            Err(status)
        }
    }
}

pub fn stats(allocator: vramp_allocator_t) -> vramp_stats_t {
    let size = size_of::<vramp_stats_t>() as u64;
    let mut stats = vramp_stats_t { struct_size: size, ..vramp_stats_t::default() };
    // SAFETY: the struct is as large as it says.
    assert_eq!(unsafe { vramp_stats(allocator, &mut stats) }, VRAMP_OK, "{}", last_error());
    stats
}

pub fn last_error() -> String {
    // SAFETY: never null, ends with a zero, and is copied before the thread's next call.
    unsafe { CStr::from_ptr(vramp_last_error()) }.to_string_lossy().into_owned()
}
