//! Errors of driver calls.

use std::borrow::Cow;
use std::fmt;

use crate::Call;

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// What a failure means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device has no memory or no addresses left. Freeing some and retrying may help.
    OutOfMemory,
    /// The device or its driver cannot do this at all.
    NotSupported,
    /// An argument is wrong: an unknown id, a bad alignment, a range that is not mapped whole.
    InvalidUse,
    /// The call is not allowed while a stream captures a graph, or its capture is invalidated.
    Capturing,
    /// The device is lost for this process. Sticky: every later call fails the same way.
    DeviceLost,
    /// Any other code of the driver.
    Other,
}

impl ErrorKind {
    /// Returns what the caller can do, as a clause for an error text. `None` for
    /// [`ErrorKind::Other`].
    pub const fn hint(self) -> Option<&'static str> {
        match self {
            ErrorKind::OutOfMemory => Some("free memory and retry"),
            ErrorKind::NotSupported => Some("check the device's capabilities"),
            ErrorKind::InvalidUse => Some("check the arguments"),
            ErrorKind::Capturing => Some("retry outside the capture"),
            ErrorKind::DeviceLost => Some("restart the process"),
            ErrorKind::Other => None,
        }
    }
}

/// A driver call that failed.
///
/// The device is as it was before the call, with two exceptions. [`ErrorKind::DeviceLost`] loses it.
/// [`ErrorKind::Capturing`] may have invalidated a capture, and the refused end of an invalidated or
/// unjoined capture ends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// Call that failed.
    pub call: Call,
    /// Code of the driver, a `CUresult` number. The simulator uses the same numbers.
    pub code: i32,
    /// Name of the code in the driver, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: Cow<'static, str>,
    /// What the failure means.
    pub kind: ErrorKind,
    /// Arguments or state that explain the code. May be empty.
    pub detail: Cow<'static, str>,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "driver call {} failed: {} ({})", self.call, self.name, self.code)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        match self.kind.hint() {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for DriverError {}

impl DriverError {
    /// Returns true if freeing memory and retrying may help.
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == ErrorKind::OutOfMemory
    }

    /// Returns true if every later call on this device will fail too.
    pub fn is_device_lost(&self) -> bool {
        self.kind == ErrorKind::DeviceLost
    }
}

/// Known codes: number, name and kind. The numbers are those of `CUresult` in the CUDA driver API,
/// which keeps them stable.
const CODES: &[(i32, &str, ErrorKind)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE", ErrorKind::InvalidUse),
    (2, "CUDA_ERROR_OUT_OF_MEMORY", ErrorKind::OutOfMemory),
    (3, "CUDA_ERROR_NOT_INITIALIZED", ErrorKind::Other),
    (4, "CUDA_ERROR_DEINITIALIZED", ErrorKind::DeviceLost),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", ErrorKind::Other),
    (100, "CUDA_ERROR_NO_DEVICE", ErrorKind::DeviceLost),
    (101, "CUDA_ERROR_INVALID_DEVICE", ErrorKind::InvalidUse),
    (200, "CUDA_ERROR_INVALID_IMAGE", ErrorKind::Other),
    (201, "CUDA_ERROR_INVALID_CONTEXT", ErrorKind::DeviceLost),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", ErrorKind::DeviceLost),
    (304, "CUDA_ERROR_OPERATING_SYSTEM", ErrorKind::Other),
    (400, "CUDA_ERROR_INVALID_HANDLE", ErrorKind::InvalidUse),
    (401, "CUDA_ERROR_ILLEGAL_STATE", ErrorKind::InvalidUse),
    (600, "CUDA_ERROR_NOT_READY", ErrorKind::Other),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", ErrorKind::DeviceLost),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT", ErrorKind::DeviceLost),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", ErrorKind::DeviceLost),
    (710, "CUDA_ERROR_ASSERT", ErrorKind::DeviceLost),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", ErrorKind::DeviceLost),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", ErrorKind::DeviceLost),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", ErrorKind::DeviceLost),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", ErrorKind::DeviceLost),
    (718, "CUDA_ERROR_INVALID_PC", ErrorKind::DeviceLost),
    (719, "CUDA_ERROR_LAUNCH_FAILED", ErrorKind::DeviceLost),
    (800, "CUDA_ERROR_NOT_PERMITTED", ErrorKind::InvalidUse),
    (801, "CUDA_ERROR_NOT_SUPPORTED", ErrorKind::NotSupported),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", ErrorKind::Other),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ErrorKind::Other),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", ErrorKind::Capturing),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", ErrorKind::Capturing),
    (902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", ErrorKind::Capturing),
    (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", ErrorKind::Capturing),
    (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", ErrorKind::Capturing),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", ErrorKind::Capturing),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", ErrorKind::Capturing),
    (907, "CUDA_ERROR_CAPTURED_EVENT", ErrorKind::Capturing),
    (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", ErrorKind::Capturing),
    (999, "CUDA_ERROR_UNKNOWN", ErrorKind::DeviceLost),
];

impl DriverError {
    /// Returns the error of `call` with the driver's `code`, with the name and kind of that code.
    ///
    /// A code that is not listed is named `CUDA_ERROR_<number>` and is of kind [`ErrorKind::Other`].
    ///
    /// ```
    /// use vramp_driver::{Call, DriverError};
    /// let error = DriverError::from_code(Call::Create, 2, "2.00 MiB requested, 0 B free");
    /// assert!(error.is_out_of_memory());
    /// assert_eq!(
    ///     error.to_string(),
    ///     "driver call create failed: CUDA_ERROR_OUT_OF_MEMORY (2): 2.00 MiB requested, 0 B free; \
    ///      free memory and retry",
    /// );
    /// ```
    pub fn from_code(call: Call, code: i32, detail: impl Into<Cow<'static, str>>) -> DriverError {
        let (name, kind) = match CODES.iter().find(|(listed, ..)| *listed == code) {
            Some((_, name, kind)) => (Cow::Borrowed(*name), *kind),
            None => (Cow::Owned(format!("CUDA_ERROR_{code}")), ErrorKind::Other),
        };
        DriverError { call, code, name, kind, detail: detail.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_has_its_kind() {
        for (code, kind) in [
            (1, ErrorKind::InvalidUse),
            (2, ErrorKind::OutOfMemory),
            (700, ErrorKind::DeviceLost),
            (801, ErrorKind::NotSupported),
            (900, ErrorKind::Capturing),
            (999, ErrorKind::DeviceLost),
            (12345, ErrorKind::Other),
        ] {
            assert_eq!(DriverError::from_code(Call::Map, code, "").kind, kind, "{code}");
        }
        assert_eq!(DriverError::from_code(Call::Map, 12345, "").name, "CUDA_ERROR_12345");
    }
}
