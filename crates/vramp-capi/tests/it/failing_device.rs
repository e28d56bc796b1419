//! Handles on a device whose calls fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_alloc::Config;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;
use vramp_capi::testing;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, Driver, DriverError, DriverResult, ErrorKind, Stream};

/// A device that refuses to destroy streams for a while.
struct KeepsStreams {
    device: Arc<dyn Driver>,
    refuses: Arc<AtomicBool>,
}

impl Wrapper for KeepsStreams {
    type Device = Arc<dyn Driver>;

    fn device(&self) -> &Arc<dyn Driver> {
        &self.device
    }

    fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err(DriverError {
                call: Call::DestroyStream,
                code: 304,
                name: "CUDA_ERROR_OPERATING_SYSTEM".into(),
                kind: ErrorKind::Other,
                detail: "".into(),
            });
        }
        self.device.destroy_stream(stream)
    }
}

#[test]
fn a_stream_that_the_driver_did_not_destroy_is_forgotten_and_can_be_forgotten_again() {
    let refuses = Arc::new(AtomicBool::new(true));
    let device = vramp_alloc::open("sim:h200").unwrap().driver;
    let device = KeepsStreams { device, refuses: Arc::clone(&refuses) };
    let allocator = testing::open_on(Arc::new(Wrapped(device)), Config::default()).unwrap();
    let stream = testing::create_stream(allocator).unwrap();
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_ERROR_DRIVER);
    let refused = testing::malloc(allocator, 64, stream).unwrap_err();
    assert_eq!(refused.status, VRAMP_ERROR_UNKNOWN_STREAM, "{}", refused.text);
    refuses.store(false, Ordering::Relaxed);
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_OK);
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_ERROR_UNKNOWN_STREAM);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
