//! PyTorch's calls on the simulator.

use std::ptr::null_mut;

use super::*;

fn torch(conf: &str) -> Torch {
    let torch = Torch::new();
    torch.settings.set(Settings::of("sim", conf)).unwrap();
    torch
}

fn raw(stream: usize) -> *mut c_void {
    stream as *mut c_void
}

impl Torch {
    fn get(&self, size: isize, stream: usize) -> Result<u64> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.malloc(size, 0, raw(stream)) }.map(DeviceAddr::number)
    }

    fn put(&self, addr: u64, stream: usize) -> Result<()> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.free(addr, 0, raw(stream)) }
    }

    fn note(&self, addr: u64, stream: usize) -> Result<()> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.record_stream(addr, raw(stream)) }
    }
}

fn status<T: std::fmt::Debug>(result: Result<T>) -> vramp_status_t {
    result.unwrap_err().status
}

#[test]
fn streams_are_taken_in_when_they_are_first_named() {
    let torch = torch("");
    let on_default = torch.get(1 << 20, 0).unwrap();
    let on_side = torch.get(1 << 20, 0x7f00_0000).unwrap();
    assert_ne!(on_default, on_side);
    torch.note(on_side, 0).unwrap();
    torch.note(on_side, 0x7f00_1000).unwrap();
    torch.put(on_side, 0x7f00_0000).unwrap();
    torch.put(on_default, 0x7f00_2000).unwrap();
    let context = torch.context(0).unwrap();
    assert_eq!(context.stats().unwrap().live, 0);
    context.audit().unwrap();
}

#[test]
fn what_cannot_be_freed_is_an_error_and_no_crash() {
    let torch = torch("");
    let block = torch.get(5000, 0).unwrap();
    assert_eq!(status(torch.put(0, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.put(block + 512, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.note(block + 512, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    torch.put(block, 0).unwrap();
    assert_eq!(status(torch.put(block, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.note(block, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
}

#[test]
fn sizes_and_devices_out_of_range_are_errors() {
    let torch = torch("");
    assert_eq!(status(torch.get(-1, 0)), VRAMP_ERROR_RANGE);
    assert_eq!(status(torch.get(isize::MIN, 0)), VRAMP_ERROR_RANGE);
    assert_eq!(status(torch.get(isize::MAX, 0)), VRAMP_ERROR_OUT_OF_MEMORY);
    for device in [-1, 64, c_int::MIN, c_int::MAX] {
        // SAFETY: no device, so no stream.
        let placed = unsafe { torch.malloc(1, device, null_mut()) };
        assert_eq!(status(placed), VRAMP_ERROR_RANGE, "{device}");
        assert_eq!(status(torch.set_fraction(0.5, device)), VRAMP_ERROR_RANGE);
        assert_eq!(status(torch.handle(device)), VRAMP_ERROR_RANGE);
    }
    let (one, other) = (torch.get(0, 0).unwrap(), torch.get(0, 0).unwrap());
    assert!(one != 0 && other != 0 && one != other, "PyTorch keys its books by address");
}

#[test]
fn out_of_memory_begins_as_pytorchs_own() {
    let torch = torch("limit=64MiB");
    let failure = torch.get(128 << 20, 0).unwrap_err();
    assert_eq!(failure.status, VRAMP_ERROR_OUT_OF_MEMORY);
    assert!(failure.text.starts_with("CUDA out of memory on device 0. vramp: "), "{failure}");
    assert!(failure.text.contains("limit of 64.00 MiB"), "{failure}");
}

#[test]
fn a_fraction_holds_and_may_change() {
    let torch = torch("");
    for wrong in [0.0, -0.5, 1.5, f64::NAN, f64::INFINITY] {
        assert_eq!(status(torch.set_fraction(wrong, 0)), VRAMP_ERROR_RANGE);
    }
    torch.set_fraction(0.25, 0).unwrap();
    let memory = torch.context(0).unwrap().stats().unwrap().card_total;
    assert_eq!(status(torch.get((memory / 2) as isize, 0)), VRAMP_ERROR_OUT_OF_MEMORY);
    torch.get((memory / 5) as isize, 0).unwrap();
    torch.set_fraction(1.0, 0).unwrap();
    torch.get((memory / 2) as isize, 0).unwrap();
    assert_eq!(status(torch.set_fraction(2.0, 0)), VRAMP_ERROR_RANGE);
}

#[test]
fn settings_that_cannot_be_used_fail_every_allocation_with_their_reason() {
    let torch = torch("limit=plenty");
    for _ in 0..2 {
        let failure = torch.get(1, 0).unwrap_err();
        assert!(failure.text.contains("VRAMP_CONF cannot be used: limit=plenty"), "{failure}");
    }
    let none = Torch::new();
    none.settings.set(Settings::of("sim:none", "")).unwrap();
    assert_eq!(status(none.get(1, 0)), VRAMP_ERROR_DEVICE);
}

#[test]
fn devices_have_an_allocator_each_that_cannot_be_closed() {
    let torch = torch("");
    let handles = [torch.handle(0).unwrap(), torch.handle(5).unwrap()];
    assert_ne!(handles[0], handles[1]);
    assert_eq!(torch.handle(0).unwrap(), handles[0]);
    torch.get(1 << 20, 0).unwrap();
    assert_eq!(handles::with(handles[0], Context::stats).unwrap().live, 1 << 20);
    assert_eq!(handles::with(handles[1], Context::stats).unwrap().live, 0);
    assert_eq!(handles::remove(handles[0]).err().unwrap().status, VRAMP_ERROR_IN_USE);
    handles::with(handles[0], Context::audit).unwrap();
}
