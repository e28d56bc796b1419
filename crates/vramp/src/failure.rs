//! One error for programs that use several parts of the library.

use std::error::Error as StdError;
use std::fmt;

use vramp_alloc::error::OutOfMemoryReport;
use vramp_alloc::kind::{Classify, Kind};

/// Any error of this library, for programs that pass errors on: `?` makes it of each of them.
///
/// [`kind`](Error::kind) says what it means for the caller, and [`downcast_ref`](Error::downcast_ref) finds the
/// error itself, with what it gives back. `Debug` writes the same sentence as `Display`, so that a `main` that
/// returns it ends with a sentence.
///
/// ```
/// use vramp::kind::Kind;
/// use vramp::{Allocator, Bytes, Config};
///
/// fn allocate(size: Bytes) -> Result<(), vramp::Error> {
///     let config = Config { limit: Some(Bytes::gib(1)), ..Config::default() };
///     let allocator = Allocator::new(vramp::open("sim:h200")?, config)?;
///     let stream = allocator.create_stream()?;
///     let block = allocator.malloc(size, stream)?;
///     allocator.free(block, stream)?;
///     Ok(allocator.close()?)
/// }
///
/// let error = allocate(Bytes::gib(2)).unwrap_err();
/// assert_eq!(error.kind(), Kind::OutOfMemory);
/// assert_eq!(error.report().unwrap().shortage.requested, Bytes::gib(2));
/// assert_eq!(format!("{error}"), format!("{error:?}"));
/// ```
pub struct Error(Box<dyn Classified>);

/// What an error has to be: any of those that have a kind.
trait Classified: Classify + Send + Sync {
    fn as_error(&self) -> &(dyn StdError + 'static);
}

impl<E: Classify + Send + Sync + 'static> Classified for E {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self
    }
}

impl Error {
    /// Returns what the failure means for the caller.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }

    /// Returns the state of memory, if a request was too large.
    pub fn report(&self) -> Option<&OutOfMemoryReport> {
        self.0.report()
    }

    /// Returns the error itself, if it is of this type.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        self.0.as_error().downcast_ref()
    }
}

impl<E: Classify + Send + Sync + 'static> From<E> for Error {
    fn from(error: E) -> Error {
        Error(Box::new(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}
