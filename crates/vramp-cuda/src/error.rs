//! What can go wrong: opening a device, one entry point of libcuda, and what each code means.

use vramp_driver::{Call, DriverError, ErrorKind};

use crate::sys::CUresult;

/// Why no device could be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No NVIDIA driver is installed, as far as the loader can see.
    #[error("no CUDA driver library: {}", tried.join("; "))]
    NoLibrary {
        /// What the loader said to each name, in the order tried.
        tried: Vec<String>,
    },
    /// The library is the toolkit's stub, which has the symbols and nothing behind them.
    #[error(
        "the CUDA driver library is the toolkit's stub; install the driver or mend the library path"
    )]
    StubLibrary,
    /// The driver is there and sees no device.
    #[error("the CUDA driver sees no device")]
    NoDevice,
    /// There are devices, but not this one.
    #[error("no CUDA device {ordinal}: the driver sees {count}")]
    NoSuchDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are, numbered from zero.
        count: u32,
    },
    /// The driver is from before virtual memory.
    #[error("the CUDA driver is too old: it speaks CUDA {version}, at least {oldest} is needed")]
    DriverTooOld {
        /// What the driver speaks, as 1000 times the major plus 10 times the minor version.
        version: i32,
        /// The oldest that would do, counted the same way.
        oldest: i32,
    },
    /// A call that opening a device cannot do without failed. The text has the call's error in it,
    /// so that is no source: who prints all sources would print it twice.
    #[error("cannot open the CUDA device: {0}")]
    Failed(EntryError),
}

impl From<EntryError> for OpenError {
    fn from(error: EntryError) -> OpenError {
        OpenError::Failed(error)
    }
}

/// One entry point of libcuda that failed, or is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{entry} failed: {name} ({code})")]
pub struct EntryError {
    /// The symbol.
    pub entry: &'static str,
    /// The driver's code, a `CUresult` number.
    pub code: i32,
    /// The driver's name for the code.
    pub name: String,
}

impl EntryError {
    /// The installed driver has no such symbol.
    pub(crate) fn missing(entry: &'static str) -> EntryError {
        let name = "this driver has no such function".to_owned();
        EntryError { entry, code: CUresult::CUDA_ERROR_NOT_SUPPORTED.0.cast_signed(), name }
    }

    /// What the failure means.
    pub fn kind(&self) -> ErrorKind {
        kind_of(CUresult(self.code.cast_unsigned()))
    }
}

/// The driver lacks the function that `call` needs.
pub(crate) fn missing(call: Call, entry: &'static str) -> DriverError {
    refused(
        call,
        CUresult::CUDA_ERROR_NOT_SUPPORTED,
        "CUDA_ERROR_NOT_SUPPORTED",
        format!("this driver has no {entry}"),
    )
}

/// The device cannot do what `call` needs.
pub(crate) fn unsupported(call: Call, detail: &str) -> DriverError {
    refused(call, CUresult::CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", detail.to_owned())
}

/// The arguments break a rule of the contract. The driver was not asked.
pub(crate) fn invalid(call: Call, detail: impl Into<String>) -> DriverError {
    refused(call, CUresult::CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", detail.into())
}

/// The id is stale, foreign, or being destroyed. The driver was not asked.
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

/// What a code means for whoever made the call.
///
/// Lost are the codes of which `cuda.h` says that the process must be relaunched or the context
/// made anew, and those after which nothing of ours is left: the driver shutting down, the device
/// gone, our context destroyed by someone, a memory or link error that cannot be corrected.
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

    /// The simulator sorts the codes it knows as a card does.
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
