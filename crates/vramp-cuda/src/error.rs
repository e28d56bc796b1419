//! Errors of opening a device and of libcuda calls, and the kind of each code.

use vramp_driver::{Call, DriverError, ErrorKind};

use crate::sys::CUresult;

/// Error of opening a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The loader finds no NVIDIA driver.
    #[error("no CUDA driver library found ({}); install the NVIDIA driver", tried.join("; "))]
    NoLibrary {
        /// Message of the loader for each name, in the order tried.
        tried: Vec<String>,
    },
    /// The library is the toolkit's stub, which has the symbols but no implementation.
    #[error(
        "the CUDA driver library is the toolkit's stub; install the NVIDIA driver or correct the library path"
    )]
    StubLibrary,
    /// The driver finds no device.
    #[error("the CUDA driver finds no device; check CUDA_VISIBLE_DEVICES and nvidia-smi")]
    NoDevice,
    /// The ordinal is out of range.
    #[error("no CUDA device {ordinal}; the driver finds {count}, numbered from 0")]
    NoSuchDevice {
        /// Ordinal that was given.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// The driver is older than virtual memory management.
    #[error(
        "the CUDA driver is too old: it supports CUDA {version}; install one for {oldest} or later"
    )]
    DriverTooOld {
        /// CUDA version that the driver supports: 1000 times the major plus 10 times the minor one.
        version: i32,
        /// Oldest version that is sufficient, in the same form.
        oldest: i32,
    },
    /// A call that opening a device needs failed. The text contains the call's error, so it is not a
    /// source: a program that prints all sources would print it twice.
    #[error("cannot open the CUDA device: {0}")]
    Failed(EntryError),
}

impl From<EntryError> for OpenError {
    fn from(error: EntryError) -> OpenError {
        OpenError::Failed(error)
    }
}

/// Error of one entry point of libcuda: it failed or is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{entry} failed: {name} ({code})")]
pub struct EntryError {
    /// Symbol of the entry point.
    pub entry: &'static str,
    /// Code of the driver, a `CUresult` number.
    pub code: i32,
    /// Name of the code in the driver.
    pub name: String,
}

impl EntryError {
    /// Returns the error for a symbol that the installed driver lacks.
    pub(crate) fn missing(entry: &'static str) -> EntryError {
        let name = "missing in this driver".to_owned();
        EntryError { entry, code: CUresult::CUDA_ERROR_NOT_SUPPORTED.0.cast_signed(), name }
    }

    /// Returns what the failure means.
    pub fn kind(&self) -> ErrorKind {
        kind_of(CUresult(self.code.cast_unsigned()))
    }
}

/// Returns the error of a call whose function the driver lacks.
pub(crate) fn missing(call: Call, entry: &'static str) -> DriverError {
    refused(
        call,
        CUresult::CUDA_ERROR_NOT_SUPPORTED,
        "CUDA_ERROR_NOT_SUPPORTED",
        format!("the installed driver has no {entry}"),
    )
}

/// Returns the error of a call that the device does not support.
pub(crate) fn unsupported(call: Call, detail: &str) -> DriverError {
    refused(call, CUresult::CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", detail.to_owned())
}

/// Returns the error of a call with invalid arguments, which was not passed to the driver.
pub(crate) fn invalid(call: Call, detail: impl Into<String>) -> DriverError {
    refused(call, CUresult::CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", detail.into())
}

/// Returns the error of a call with an id that is stale, foreign, or in use.
pub(crate) fn invalid_id(call: Call, detail: impl Into<String>) -> DriverError {
    refused(call, CUresult::CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", detail.into())
}

fn refused(call: Call, code: CUresult, name: &'static str, detail: String) -> DriverError {
    DriverError {
        call,
        code: code.0.cast_signed(),
        name: name.into(),
        kind: kind_of(code),
        detail: detail.into(),
    }
}

/// Returns what a code means for the caller.
///
/// [`ErrorKind::DeviceLost`] is the kind of codes after which `cuda.h` requires a new process or
/// context, and of those after which the context no longer exists: driver shut down, device removed,
/// context destroyed by other code, uncorrectable memory or link error.
pub(crate) fn kind_of(code: CUresult) -> ErrorKind {
    match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        CUresult::CUDA_ERROR_NOT_SUPPORTED
        | CUresult::CUDA_ERROR_STUB_LIBRARY
        | CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER => ErrorKind::NotSupported,
        CUresult::CUDA_ERROR_INVALID_VALUE
        | CUresult::CUDA_ERROR_INVALID_DEVICE
        | CUresult::CUDA_ERROR_ALREADY_MAPPED
        | CUresult::CUDA_ERROR_NOT_MAPPED
        | CUresult::CUDA_ERROR_INVALID_HANDLE
        | CUresult::CUDA_ERROR_ILLEGAL_STATE
        | CUresult::CUDA_ERROR_NOT_PERMITTED => ErrorKind::InvalidUse,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        | CUresult::CUDA_ERROR_CAPTURED_EVENT
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => ErrorKind::Capturing,
        CUresult::CUDA_ERROR_DEINITIALIZED
        | CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_INVALID_CONTEXT
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_CONTAINED
        | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
        | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
        | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
        | CUresult::CUDA_ERROR_UNKNOWN => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_has_its_kind() {
        for (codes, kind) in [
            (&[2][..], ErrorKind::OutOfMemory),
            (&[34, 36, 801], ErrorKind::NotSupported),
            (&[1, 101, 208, 211, 400, 401, 800], ErrorKind::InvalidUse),
            (&[900, 901, 902, 903, 904, 905, 906, 907, 908], ErrorKind::Capturing),
            (&[4, 100, 201, 214, 220, 226, 700, 702, 709, 710], ErrorKind::DeviceLost),
            (&[714, 715, 716, 717, 718, 719, 721, 810, 911, 999], ErrorKind::DeviceLost),
            (&[3, 46, 304, 600, 701, 704, 708, 711, 720, 802, 909], ErrorKind::Other),
        ] {
            for &code in codes {
                assert_eq!(kind_of(CUresult(code)), kind, "{code}");
            }
        }
    }

    /// The simulator and this crate map the same codes to the same kinds.
    #[test]
    fn simulator_and_card_agree_on_what_a_code_means() {
        for code in 1..=1000 {
            let known = DriverError::from_code(Call::Map, code, "");
            if known.name != format!("CUDA_ERROR_{code}") {
                assert_eq!(known.kind, kind_of(CUresult(code.cast_unsigned())), "{known}");
            }
        }
    }
}
