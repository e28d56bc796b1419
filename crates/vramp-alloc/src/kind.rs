//! What kind of failure an error is, for interfaces that have one status or one class of exceptions for each.
//!
//! Each error that such an interface returns implements [`Classify`], in the crate of the error and by a
//! match that names every variant: a new variant is classified where it is written.

use std::error::Error;

use vramp_core::{ArenaResetError, Bytes, Inconsistency, ParseBytesError};
use vramp_cuda::{EntryError, OpenError as CudaOpenError};
use vramp_driver::{DriverError, ErrorKind};
use vramp_host::topology::{DirectoryError, TopologyError};
use vramp_host::{DiskError, HostMemoryError, IoUnavailable, MapError};
use vramp_ipc::SharedDirectoryError;
use vramp_ipc::budget::{BudgetError, ClaimError};
use vramp_ipc::turns::{AcquireError, TurnsError};
use vramp_ipc::{OpenError, Refusal, ServeError};

use crate::allocator::CloseError;
use crate::budget::JoinBudgetError;
use crate::device;
use crate::error::{
    AllocError, CreateError, FreeError, OutOfMemoryReport, StreamError, Unusable, UseError,
};
use crate::graph::{ArenaError, CaptureError, LaunchError};
use crate::range::HostBackingError;
use crate::sharing::kept::{CommitKeptError, KeepError, KeptError};
use crate::sharing::{
    AccessError, DmaBufError, ExportError, FetchError, ImportError, OpenMemoryError, PinError,
};
use crate::sleep::SleepError;

/// What a failure means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A pointer that must not be null is null.
    Null,
    /// A string is not UTF-8.
    Text,
    /// An option or a configuration is invalid.
    Option,
    /// The device is unknown or cannot be opened.
    Device,
    /// The handle of an allocator is unknown.
    UnknownAllocator,
    /// The object is closed.
    Closed,
    /// The stream is unknown.
    UnknownStream,
    /// No live memory of the allocator is there.
    UnknownPointer,
    /// The card or the host has too little memory.
    OutOfMemory,
    /// A tier has no room.
    TierFull,
    /// A tier has no room now, and the request does not wait.
    NotNow,
    /// A driver call failed.
    Driver,
    /// There are as many objects as there may be.
    TooMany,
    /// The size of a struct is too small.
    StructSize,
    /// Other objects use it, until they end.
    InUse,
    /// A number is out of range.
    Range,
    /// The allocator's state is inconsistent. A defect.
    Inconsistent,
    /// A panic. A defect.
    Internal,
    /// A file cannot be read or written.
    File,
    /// The arena is unknown.
    UnknownArena,
    /// The graph is unknown.
    UnknownGraph,
    /// The lease is unknown.
    UnknownLease,
    /// It is in use now.
    Busy,
    /// A capture cannot begin, failed, or forbids the call.
    Capture,
    /// The preset or the device does not support it.
    Unsupported,
    /// The process was forked from one that uses CUDA.
    Forked,
    /// The program was compiled for another version of the interface.
    Version,
    /// The export is unknown.
    UnknownExport,
    /// The pin is unknown.
    UnknownPin,
    /// The bytes are no ticket, or its secret is wrong.
    Ticket,
    /// The exporting process ended, or closed the export.
    ExportEnded,
    /// Two processes cannot exchange memory.
    Exchange,
    /// The allocator has no tiers.
    NoTiers,
    /// The space is not configured.
    UnknownSpace,
    /// The reservation is unknown.
    UnknownReservation,
    /// The buffer is unknown.
    UnknownBuffer,
    /// The time is over.
    Timeout,
    /// The wait was ended.
    Cancelled,
    /// The wait would never end.
    Deadlock,
    /// Contents cannot be read back.
    Contents,
    /// A region cannot do this now, or is unknown.
    Region,
    /// The pool of a region sleeps.
    Asleep,
    /// A reservation has too few bytes left to pay.
    OverReservation,
    /// A callback of the program failed.
    Callback,
    /// The keeper has no memory of the name.
    NotKept,
    /// Another process has the lock of kept memory, or does not answer.
    KeptBusy,
    /// A process ended while it wrote kept memory.
    Torn,
    /// There is no keeper, or it refuses.
    Keeper,
    /// The keeper or the kept memory is unknown, or was closed.
    UnknownKept,
}

/// What a request needs at once, and what there is for it, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Requested bytes.
    pub needed: Option<Bytes>,
    /// The most that there may be for it.
    pub capacity: Option<Bytes>,
}

/// An error with a kind.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no error of vramp",
    note = "`vramp::Error` holds errors of vramp and of files: for others use `Box<dyn std::error::Error>` or a type of your own"
)]
pub trait Classify: Error {
    /// Returns what the failure means for the caller.
    fn kind(&self) -> Kind;

    /// Returns the state of memory when a request was too large.
    fn report(&self) -> Option<&OutOfMemoryReport> {
        None
    }

    /// Returns the name of the pool or region that the failure is about.
    fn region(&self) -> Option<&str> {
        None
    }

    /// Returns the name of the callback that failed.
    fn callback(&self) -> Option<&str> {
        None
    }

    /// Returns how much a full tier lacks.
    fn room(&self) -> Room {
        Room::default()
    }
}

/// Returns the name of the pool that sleeps, of an error that says so in one variant.
macro_rules! region_of_pool {
    () => {
        fn region(&self) -> Option<&str> {
            match self {
                Self::Unusable(why) => why.region(),
                _ => None,
            }
        }
    };
}

/// Says what errors mean that always mean the same.
#[macro_export]
#[doc(hidden)]
macro_rules! classify {
    ($($kind:ident: $($error:ty),+;)+) => {
        $($(impl $crate::kind::Classify for $error {
            fn kind(&self) -> $crate::kind::Kind {
                $crate::kind::Kind::$kind
            }
        })+)+
    };
}

classify! {
    Device: device::OpenError, CudaOpenError;
    Driver: EntryError;
    Option: ParseBytesError, TopologyError;
    OutOfMemory: MapError, HostMemoryError;
    // Those of the operating system: programs read and write files beside their memory.
    File: std::io::Error, DiskError, IoUnavailable, DirectoryError;
}

#[cfg(feature = "history")]
classify!(File: vramp_trace::ReadError;);

impl Classify for DriverError {
    fn kind(&self) -> Kind {
        if self.kind == ErrorKind::Capturing { Kind::Capture } else { Kind::Driver }
    }
}

impl Classify for Inconsistency {
    fn kind(&self) -> Kind {
        Kind::Inconsistent
    }
}

impl Classify for Unusable {
    fn kind(&self) -> Kind {
        match self {
            Unusable::Inconsistent(_) => Kind::Inconsistent,
            Unusable::Forked => Kind::Forked,
            Unusable::Asleep { .. } => Kind::Asleep,
            Unusable::Closed => Kind::Closed,
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            Unusable::Asleep { pool } => Some(pool),
            _ => None,
        }
    }
}

impl Classify for CreateError {
    fn kind(&self) -> Kind {
        match self {
            CreateError::Config(_)
            | CreateError::Granularity { .. }
            | CreateError::NotSupported { .. }
            | CreateError::Threshold { .. }
            | CreateError::Rdma
            | CreateError::NoPeer { .. }
            | CreateError::Prefill { .. } => Kind::Option,
            CreateError::Driver(error) => error.kind(),
            CreateError::Unusable(why) => why.kind(),
        }
    }
}

impl Classify for AllocError {
    fn kind(&self) -> Kind {
        match self {
            AllocError::OutOfMemory(_) | AllocError::HostMemory(_) => Kind::OutOfMemory,
            AllocError::Driver(error) => error.kind(),
            AllocError::UnknownStream(_) => Kind::UnknownStream,
            AllocError::Arena(_) if self.is_out_of_memory() => Kind::OutOfMemory,
            AllocError::Arena(_) => Kind::Capture,
            AllocError::UnknownTag | AllocError::Fraction(_) => Kind::Range,
            AllocError::HostMapped { .. } => Kind::Busy,
            AllocError::Unusable(why) => why.kind(),
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            AllocError::OutOfMemory(report) => Some(report),
            _ => None,
        }
    }

    region_of_pool!();
}

impl Classify for FreeError {
    fn kind(&self) -> Kind {
        match self {
            FreeError::Foreign(_) => Kind::UnknownPointer,
            FreeError::UnknownStream { .. } => Kind::UnknownStream,
            FreeError::Driver(error) => error.kind(),
            FreeError::Unusable(why) => why.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for StreamError {
    fn kind(&self) -> Kind {
        match self {
            StreamError::Unknown(_) => Kind::UnknownStream,
            StreamError::Capturing(_) => Kind::Capture,
            StreamError::Driver(error) => error.kind(),
            StreamError::Unusable(why) => why.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for UseError {
    fn kind(&self) -> Kind {
        match self {
            UseError::Foreign(_) => Kind::UnknownPointer,
            UseError::UnknownStream(_) => Kind::UnknownStream,
            UseError::Unusable(why) => why.kind(),
            UseError::HostMemory(_) => Kind::OutOfMemory,
        }
    }

    region_of_pool!();
}

impl Classify for CloseError {
    fn kind(&self) -> Kind {
        match self {
            CloseError::Capturing { .. } => Kind::Capture,
            CloseError::NotSynchronized { .. } | CloseError::Driver(_) => Kind::Driver,
        }
    }
}

impl Classify for ArenaResetError {
    fn kind(&self) -> Kind {
        match self {
            ArenaResetError::Capturing(_) | ArenaResetError::Live { .. } => Kind::Busy,
        }
    }
}

impl Classify for ServeError {
    fn kind(&self) -> Kind {
        match self {
            ServeError::Path { .. } => Kind::Option,
            ServeError::Forked => Kind::Forked,
            ServeError::Withdrawn => Kind::UnknownExport,
            ServeError::System { .. } => Kind::Exchange,
        }
    }
}

impl Classify for OpenError {
    fn kind(&self) -> Kind {
        match self {
            OpenError::ExporterGone { .. } | OpenError::Withdrawn { .. } => Kind::ExportEnded,
            OpenError::Refused { reason: Refusal::WrongSecret, .. } => Kind::Ticket,
            OpenError::Forked => Kind::Forked,
            OpenError::Refused { reason: Refusal::OtherUser { .. }, .. }
            | OpenError::Unreachable { .. }
            | OpenError::Source { .. }
            | OpenError::TooManyOpenFiles { .. }
            | OpenError::TooManyInFlight { .. }
            | OpenError::TooManyOpens { .. }
            | OpenError::TimedOut { .. }
            | OpenError::Protocol { .. }
            | OpenError::System { .. } => Kind::Exchange,
        }
    }
}

impl Classify for FetchError {
    fn kind(&self) -> Kind {
        match self {
            FetchError::Open(error) => error.kind(),
            FetchError::Fewer => Kind::Exchange,
        }
    }
}

impl<E: Classify + 'static> Classify for ImportError<E> {
    fn kind(&self) -> Kind {
        match self {
            ImportError::Description(_) => Kind::Exchange,
            ImportError::Fetch { error, .. } => error.kind(),
            ImportError::Driver(error) => error.kind(),
            ImportError::Unusable(why) => why.kind(),
        }
    }
}

impl Classify for OpenMemoryError {
    fn kind(&self) -> Kind {
        match self {
            OpenMemoryError::Ticket(_) => Kind::Ticket,
            OpenMemoryError::Open(error) => error.kind(),
            OpenMemoryError::Unknown => Kind::Exchange,
            OpenMemoryError::Import(error) => error.kind(),
        }
    }
}

impl Classify for ExportError {
    fn kind(&self) -> Kind {
        match self {
            ExportError::Foreign(_) => Kind::UnknownPointer,
            ExportError::NotExportable { .. } => Kind::Unsupported,
            ExportError::NoSuchHandle { .. } => Kind::Range,
            ExportError::Driver(error) => error.kind(),
            ExportError::Unusable(why) => why.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for AccessError {
    fn kind(&self) -> Kind {
        match self {
            AccessError::NoPeer { .. } => Kind::Range,
            AccessError::Excluded { .. } | AccessError::NotSupported { .. } => Kind::Unsupported,
            AccessError::Driver(error) => error.kind(),
            AccessError::Unusable(why) => why.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for PinError {
    fn kind(&self) -> Kind {
        match self {
            PinError::NotOwned { .. } => Kind::UnknownPointer,
            PinError::Spilled { .. } | PinError::NotSupported { .. } => Kind::Unsupported,
            PinError::Unusable(why) => why.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for DmaBufError {
    fn kind(&self) -> Kind {
        match self {
            DmaBufError::NotSupported { .. } => Kind::Unsupported,
            DmaBufError::Empty => Kind::Range,
            DmaBufError::Pin(error) => error.kind(),
            DmaBufError::Driver(error) => error.kind(),
            DmaBufError::Unusable(why) => why.kind(),
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            DmaBufError::Pin(error) => error.region(),
            DmaBufError::Unusable(why) => why.region(),
            _ => None,
        }
    }
}

impl Classify for ArenaError {
    fn kind(&self) -> Kind {
        match self {
            ArenaError::NotSupported => Kind::Unsupported,
            ArenaError::Capacity { .. } => Kind::Range,
            ArenaError::Driver(error) => error.kind(),
            ArenaError::Unusable(why) => why.kind(),
            ArenaError::HostMemory(_) => Kind::OutOfMemory,
        }
    }

    region_of_pool!();
}

impl Classify for CaptureError {
    fn kind(&self) -> Kind {
        match self {
            CaptureError::ForeignArena => Kind::UnknownArena,
            CaptureError::ArenaBusy => Kind::Busy,
            CaptureError::UnknownStream(_) => Kind::UnknownStream,
            CaptureError::NotCapturing(_)
            | CaptureError::Served(_)
            | CaptureError::Query { .. }
            | CaptureError::Begin(_)
            | CaptureError::Invalidated(_)
            | CaptureError::OtherThread
            | CaptureError::Over => Kind::Capture,
            CaptureError::Alloc(error) => error.kind(),
            CaptureError::Unusable(why) => why.kind(),
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            CaptureError::Alloc(error) => error.report(),
            _ => None,
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            CaptureError::Alloc(error) => error.region(),
            CaptureError::Unusable(why) => why.region(),
            _ => None,
        }
    }
}

impl Classify for LaunchError {
    fn kind(&self) -> Kind {
        match self {
            LaunchError::Busy(_) => Kind::Busy,
            LaunchError::Alloc(error) => error.kind(),
            LaunchError::UnknownStream(_) => Kind::UnknownStream,
            LaunchError::Capturing(_) => Kind::Capture,
            LaunchError::Driver(error) => error.kind(),
            LaunchError::Unusable(why) => why.kind(),
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            LaunchError::Alloc(error) => error.report(),
            _ => None,
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            LaunchError::Alloc(error) => error.region(),
            LaunchError::Unusable(why) => why.region(),
            _ => None,
        }
    }
}

impl Classify for HostBackingError {
    fn kind(&self) -> Kind {
        match self {
            HostBackingError::NotSupported => Kind::Unsupported,
            HostBackingError::Length { .. }
            | HostBackingError::Part { .. }
            | HostBackingError::NotMapped { .. } => Kind::Range,
            HostBackingError::NotVacant(_) => Kind::Busy,
            HostBackingError::Driver(error) => error.kind(),
            HostBackingError::Unusable(why) => why.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for SleepError {
    fn kind(&self) -> Kind {
        match self {
            SleepError::Unusable(why) => why.kind(),
            SleepError::Captures { .. } => Kind::Capture,
            SleepError::Pinned { .. } => Kind::InUse,
            SleepError::Unfinished => Kind::Busy,
            SleepError::NotSupported { .. } => Kind::Unsupported,
            SleepError::Driver(error) => error.kind(),
        }
    }

    region_of_pool!();
}

impl Classify for TurnsError {
    fn kind(&self) -> Kind {
        match self {
            TurnsError::Forked => Kind::Forked,
            TurnsError::HasHandler => Kind::Busy,
            TurnsError::Directory(error) => error.kind(),
            TurnsError::Card { .. } | TurnsError::Removed { .. } => Kind::File,
        }
    }
}

impl Classify for SharedDirectoryError {
    fn kind(&self) -> Kind {
        match self {
            SharedDirectoryError::Full { .. } | SharedDirectoryError::TooManyOpenFiles { .. } => {
                Kind::TooMany
            }
            SharedDirectoryError::OtherUser { .. }
            | SharedDirectoryError::Mode { .. }
            | SharedDirectoryError::Remote { .. }
            | SharedDirectoryError::System { .. } => Kind::File,
        }
    }
}

impl Classify for AcquireError {
    fn kind(&self) -> Kind {
        match self {
            AcquireError::TimedOut(_) => Kind::Timeout,
            AcquireError::Refused { .. } => Kind::Busy,
            AcquireError::Turns(error) => error.kind(),
        }
    }
}

impl Classify for BudgetError {
    fn kind(&self) -> Kind {
        match self {
            BudgetError::Forked => Kind::Forked,
            BudgetError::Directory(error) => error.kind(),
            BudgetError::TooManyMembers => Kind::TooMany,
            BudgetError::Amount { .. } | BudgetError::Order { .. } => Kind::Option,
            BudgetError::Capacity { .. } => Kind::InUse,
            BudgetError::Name { .. } | BudgetError::Removed { .. } | BudgetError::Gone => {
                Kind::File
            }
        }
    }
}

impl Classify for ClaimError {
    fn kind(&self) -> Kind {
        match self {
            ClaimError::Limit { .. } | ClaimError::Impossible(_) => Kind::OutOfMemory,
            ClaimError::TimedOut(_) => Kind::Timeout,
            ClaimError::Budget(error) => error.kind(),
        }
    }
}

impl Classify for KeepError {
    fn kind(&self) -> Kind {
        match self {
            KeepError::NoSuchEntry { .. } => Kind::NotKept,
            KeepError::Busy { .. } | KeepError::NotNewer { .. } | KeepError::TimedOut { .. } => {
                Kind::KeptBusy
            }
            KeepError::Torn { .. } => Kind::Torn,
            KeepError::Full { .. } => Kind::OutOfMemory,
            KeepError::Name { .. } | KeepError::Path { .. } => Kind::Option,
            KeepError::TooLong { .. } => Kind::Range,
            KeepError::Forked => Kind::Forked,
            _ => Kind::Keeper,
        }
    }
}

impl Classify for KeptError {
    fn kind(&self) -> Kind {
        match self {
            KeptError::Keeper(error) => error.kind(),
            KeptError::OtherCard { .. } => Kind::Device,
            KeptError::Unknown { .. } => Kind::Keeper,
            KeptError::DraftFull { .. } | KeptError::Empty { .. } => Kind::Range,
            KeptError::ReadOnly { .. } => Kind::Unsupported,
            KeptError::Descriptor(_) => Kind::File,
            KeptError::Option(_) => Kind::Option,
            KeptError::Alloc(error) => error.kind(),
            KeptError::Driver(error) => error.kind(),
            KeptError::Unusable(why) => why.kind(),
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            KeptError::Alloc(error) => error.report(),
            _ => None,
        }
    }

    region_of_pool!();
}

impl Classify for CommitKeptError {
    fn kind(&self) -> Kind {
        self.error.kind()
    }
}

impl Classify for JoinBudgetError {
    fn kind(&self) -> Kind {
        match self {
            JoinBudgetError::HasBudget => Kind::InUse,
            JoinBudgetError::Claim { error, .. } => error.kind(),
            JoinBudgetError::Alloc(error) => error.kind(),
        }
    }
}
