//! Opening libcuda at run time.
//!
//! A missing library is an [`OpenError`]. A missing symbol is an error in its field of [`Api`], and a
//! call that needs it fails as not supported. Neither panics.

use std::error::Error;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use libloading::Library;

use crate::error::{EntryError, OpenError};
use crate::sys::{Api, CUresult};

/// Names that the loader tries, in this order. A bare `libcuda.so` may be the toolkit's stub, so it
/// is last.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// CUDA 10.2, the first version with virtual memory management.
const OLDEST_DRIVER: i32 = 10_020;

/// libcuda, opened and initialised.
///
/// Never unloaded, because the driver runs threads of its own.
pub(crate) struct Cuda(ManuallyDrop<Api>);

impl Deref for Cuda {
    type Target = Api;
    fn deref(&self) -> &Api {
        &self.0
    }
}

/// Evaluates to the function of this name, or returns early with an error if libcuda lacks it.
macro_rules! entry {
    ($api:expr, $name:ident) => {
        match &$api.$name {
            Ok(function) => *function,
            Err(_) => return Err($crate::error::EntryError::missing(stringify!($name)).into()),
        }
    };
}
pub(crate) use entry;

impl Cuda {
    /// Loads and initialises the library of this machine.
    pub(crate) fn open() -> Result<Cuda, OpenError> {
        Cuda::start(load(&NAMES)?)
    }

    /// Initialises a loaded library.
    pub(crate) fn start(api: Api) -> Result<Cuda, OpenError> {
        let cuda = Cuda(ManuallyDrop::new(api));
        let init = entry!(cuda, cuInit);
        // SAFETY: cuInit takes no pointer; zero is the only flag there is.
        let code = unsafe { init(0) };
        cuda.check_open("cuInit", code)?;
        let version = cuda.version()?;
        if version < OLDEST_DRIVER {
            return Err(OpenError::DriverTooOld { version, oldest: OLDEST_DRIVER });
        }
        Ok(cuda)
    }

    /// Returns the newest CUDA version that the driver supports: 13000 for 13.0.
    pub(crate) fn version(&self) -> Result<i32, OpenError> {
        let ask = entry!(self, cuDriverGetVersion);
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        let code = unsafe { ask(&mut version) };
        self.check_open("cuDriverGetVersion", code)?;
        Ok(version)
    }

    /// Returns the number of devices.
    pub(crate) fn device_count(&self) -> Result<u32, OpenError> {
        let ask = entry!(self, cuDeviceGetCount);
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        let code = unsafe { ask(&mut count) };
        self.check_open("cuDeviceGetCount", code)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Returns the error of `entry` for a code that opening a device got.
    pub(crate) fn check_open(&self, entry: &'static str, code: CUresult) -> Result<(), OpenError> {
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            CUresult::CUDA_ERROR_STUB_LIBRARY => Err(OpenError::StubLibrary),
            CUresult::CUDA_ERROR_NO_DEVICE => Err(OpenError::NoDevice),
            CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER => {
                let version = self.version().unwrap_or(0);
                Err(OpenError::DriverTooOld { version, oldest: OLDEST_DRIVER })
            }
            _ => Err(self.entry_error(entry, code).into()),
        }
    }

    /// Returns the error of one entry point.
    pub(crate) fn entry_error(&self, entry: &'static str, code: CUresult) -> EntryError {
        EntryError { entry, code: code.0.cast_signed(), name: self.name_of(code) }
    }

    /// Returns the driver's name for a code, or its number if the driver has none.
    pub(crate) fn name_of(&self, code: CUresult) -> String {
        let mut text = std::ptr::null();
        let known = self.cuGetErrorName.as_ref().is_ok_and(|ask| {
            // SAFETY: `text` outlives the call.
            let answer = unsafe { ask(code, &mut text) };
            answer == CUresult::CUDA_SUCCESS
        });
        if !known || text.is_null() {
            return format!("CUresult {}", code.0);
        }
        // SAFETY: the driver returned a static string that ends with a zero.
        let name = unsafe { CStr::from_ptr(text) };
        name.to_string_lossy().into_owned()
    }
}

/// Loads the first library of `names` that exists.
fn load(names: &[&str]) -> Result<Api, OpenError> {
    let mut tried = Vec::new();
    for name in names {
        // SAFETY: libcuda's initialisers have no precondition. Another library of this name is a
        // broken machine, which no program can guard against.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(declare(library)),
            Err(error) => {
                // The message of the loader, which names the library.
                tried.push(error.source().map_or(error.to_string(), ToString::to_string));
            }
        }
    }
    Err(OpenError::NoLibrary { tried })
}

/// Looks up every symbol of `library`.
fn declare(library: Library) -> Api {
    // SAFETY: the generated types are those of the header for exactly these symbol names, and
    // NVIDIA never changes what a versioned name means.
    let api = unsafe { Api::from_library(library) };
    api.expect("a missing symbol is kept in its field, not returned")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a library without the symbols: this process.
    pub(crate) fn empty_api() -> Api {
        declare(libloading::os::unix::Library::this().into())
    }

    #[test]
    fn a_missing_library_is_an_error_with_every_name_that_was_tried() {
        let error =
            load(&["libno-such-cuda.so.1", "libno-such-cuda.so"]).err().expect("no such library");
        let OpenError::NoLibrary { tried } = &error else { panic!("{error:?}") };
        assert_eq!(tried.len(), 2);
        assert!(error.to_string().contains("libno-such-cuda.so.1: "), "{error}");
    }

    #[test]
    fn a_library_without_the_symbols_is_an_error_that_names_the_first() {
        let error = Cuda::start(empty_api()).err().expect("no symbol at all");
        assert!(error.to_string().contains("cuInit"), "{error}");
    }
}
