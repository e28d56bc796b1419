//! What kind of failure each error of tiers is.

use vramp_alloc::error::OutOfMemoryReport;
use vramp_alloc::kind::{Classify, Kind, Room};
use vramp_alloc::sleep::SleepError;

use crate::config::ConfigError;
use crate::disk::{DiskConfigError, DiskTierError};
use crate::host::HostPoolError;
use crate::ledger::core::{ChargeError, FactorError, LedgerError, SpaceConfigError, StrategyError};
use crate::ledger::shell::error::{ReserveError, SpaceFull};
use crate::ledger::shell::reservation::MergeRejected;
use crate::ledger::shell::streams::StreamPoolError;
use crate::ledger::shell::tracked::{AttachError, MallocError, TrackedFreeError};
use crate::movers::{MoveError, MoveFailed};
use crate::peer::PeerStoreError;
use crate::regions::RegionError;

vramp_alloc::classify! {
    Option: ConfigError, LedgerError, StrategyError, SpaceConfigError, FactorError, DiskConfigError;
    TierFull: SpaceFull;
    Busy: AttachError, MergeRejected;
}

impl Classify for MallocError {
    fn kind(&self) -> Kind {
        match self {
            MallocError::OverReservation(error) => error.kind(),
            MallocError::SpaceFull(error) => error.kind(),
            MallocError::OutOfMemory(error) | MallocError::Device(error) => error.kind(),
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            MallocError::OutOfMemory(error) => error.report(),
            _ => None,
        }
    }
}

impl Classify for TrackedFreeError {
    fn kind(&self) -> Kind {
        match self {
            TrackedFreeError::Foreign(_) => Kind::UnknownPointer,
            TrackedFreeError::UnknownStream { .. } => Kind::UnknownStream,
            TrackedFreeError::Failed(error) => error.kind(),
        }
    }
}

impl Classify for StreamPoolError {
    fn kind(&self) -> Kind {
        match self {
            StreamPoolError::TimedOut { .. } => Kind::Timeout,
            StreamPoolError::ShutDown => Kind::Cancelled,
            StreamPoolError::Empty | StreamPoolError::NoAllocator { .. } => Kind::Option,
            StreamPoolError::Driver(error) => error.kind(),
        }
    }
}

impl Classify for PeerStoreError {
    fn kind(&self) -> Kind {
        match self {
            PeerStoreError::Config(_) | PeerStoreError::NotAPeer { .. } => Kind::Option,
            PeerStoreError::Length { .. } => Kind::Range,
            PeerStoreError::Limit { .. }
            | PeerStoreError::Space(_)
            | PeerStoreError::NoMemory { .. }
            | PeerStoreError::GaveWay { .. } => Kind::TierFull,
            PeerStoreError::Device { error, .. } => error.kind(),
        }
    }
}

impl Classify for MoveFailed {
    fn kind(&self) -> Kind {
        self.error.kind()
    }
}

impl Classify for ReserveError {
    fn kind(&self) -> Kind {
        match self {
            ReserveError::NoSpace(_) => Kind::UnknownSpace,
            ReserveError::UnknownTag(_) => Kind::Range,
            ReserveError::NeverFits(_) => Kind::TierFull,
            ReserveError::NotNow(_) => Kind::NotNow,
            ReserveError::TimedOut(_) => Kind::Timeout,
            ReserveError::Cancelled(_) | ReserveError::ShutDown(_) => Kind::Cancelled,
            ReserveError::InSpiller(_) | ReserveError::Deadlock { .. } => Kind::Deadlock,
        }
    }

    fn room(&self) -> Room {
        self.refusal().map_or_else(Room::default, |refusal| Room {
            needed: Some(refusal.requested),
            capacity: Some(refusal.limit()),
        })
    }
}

impl Classify for ChargeError {
    fn kind(&self) -> Kind {
        match self {
            ChargeError::Stale(_) => Kind::UnknownReservation,
            ChargeError::OverReservation { .. } => Kind::OverReservation,
            ChargeError::Refused(_) => Kind::TierFull,
        }
    }
}

impl Classify for DiskTierError {
    fn kind(&self) -> Kind {
        match self {
            DiskTierError::Full(_) | DiskTierError::NotReserved(_) => Kind::TierFull,
            DiskTierError::Config(_) | DiskTierError::NotADisk(_) => Kind::Option,
            DiskTierError::Corrupt { .. }
            | DiskTierError::CorruptObject { .. }
            | DiskTierError::Undecodable { .. } => Kind::Contents,
            DiskTierError::NoDirectory { .. }
            | DiskTierError::NoEngine(_)
            | DiskTierError::Disk(_)
            | DiskTierError::Object { .. }
            | DiskTierError::OtherSpace { .. }
            | DiskTierError::OtherStore
            | DiskTierError::Length { .. }
            | DiskTierError::NoMemory(_)
            | DiskTierError::Cancelled { .. } => Kind::File,
        }
    }
}

impl Classify for HostPoolError {
    fn kind(&self) -> Kind {
        match self {
            HostPoolError::Full(_)
            | HostPoolError::NoMemory(_)
            | HostPoolError::Exhausted { .. } => Kind::TierFull,
            HostPoolError::Pin(error) => error.kind(),
            HostPoolError::Config(_)
            | HostPoolError::WrongCharge(..)
            | HostPoolError::NotPinnedFor(_)
            | HostPoolError::Outside(_) => Kind::Option,
        }
    }
}

impl Classify for MoveError {
    fn kind(&self) -> Kind {
        match self {
            MoveError::Device { .. } => Kind::Driver,
            MoveError::Host(error) => error.kind(),
            MoveError::Disk { error, .. } => error.kind(),
            MoveError::Outside(_) | MoveError::BadRange(_) | MoveError::OtherLength { .. } => {
                Kind::Range
            }
            MoveError::Capturing => Kind::Capture,
            MoveError::Cancelled { .. } => Kind::Cancelled,
            MoveError::Unsettled(error) => error.kind(),
            MoveError::Config(_) => Kind::Option,
        }
    }
}

impl Classify for RegionError {
    fn kind(&self) -> Kind {
        match self {
            RegionError::OtherOptions { .. } => Kind::Option,
            RegionError::Before(_) | RegionError::After { .. } => Kind::Callback,
            RegionError::AndAfter { error, .. } => error.kind(),
            RegionError::InCallback => Kind::Busy,
            RegionError::Unknown { .. }
            | RegionError::HasMemory { .. }
            | RegionError::InUse { .. }
            | RegionError::Create(_)
            | RegionError::NotNow { .. }
            | RegionError::HostFull { .. }
            | RegionError::NoDisk { .. }
            | RegionError::NoRoomToPrefetch { .. }
            | RegionError::Awake { .. }
            | RegionError::NoBackup { .. }
            | RegionError::NotContents { .. }
            | RegionError::Copy { .. }
            | RegionError::Memory { .. }
            | RegionError::Stuck { .. }
            | RegionError::Closed { .. } => Kind::Region,
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            RegionError::Unknown { tag, .. }
            | RegionError::HasMemory { tag, .. }
            | RegionError::InUse { tag }
            | RegionError::NotNow { tag, .. }
            | RegionError::HostFull { tag, .. }
            | RegionError::NoDisk { tag }
            | RegionError::NoRoomToPrefetch { tag, .. }
            | RegionError::Awake { tag }
            | RegionError::NoBackup { tag, .. }
            | RegionError::Copy { tag, .. }
            | RegionError::Memory { tag, .. }
            | RegionError::Stuck { tag, .. }
            | RegionError::Closed { tag } => Some(tag),
            RegionError::AndAfter { error, .. } => error.region(),
            RegionError::OtherOptions { .. }
            | RegionError::Create(_)
            | RegionError::NotContents { .. }
            | RegionError::Before(_)
            | RegionError::After { .. }
            | RegionError::InCallback => None,
        }
    }

    fn callback(&self) -> Option<&str> {
        match self {
            RegionError::Before(failed) => Some(&failed.name),
            RegionError::After { failed } => failed.first().map(|failed| failed.name.as_str()),
            RegionError::AndAfter { error, .. } => error.callback(),
            _ => None,
        }
    }
}

impl RegionError {
    /// Returns the kind of what a pause or a resume failed for. `None` where that is the region's own state.
    pub fn cause(&self) -> Option<Kind> {
        match self {
            RegionError::NotNow { error: SleepError::Captures { .. }, .. } => Some(Kind::Capture),
            RegionError::NotNow { error: SleepError::NotSupported { .. }, .. } => {
                Some(Kind::Unsupported)
            }
            RegionError::NotNow { error: SleepError::Driver(_), .. } => Some(Kind::Driver),
            RegionError::HostFull { .. } | RegionError::NoRoomToPrefetch { .. } => {
                Some(Kind::TierFull)
            }
            RegionError::Memory { error, .. } if error.is_out_of_memory() => {
                Some(Kind::OutOfMemory)
            }
            RegionError::Memory { .. } => Some(Kind::Driver),
            RegionError::Copy { error, .. } => Some(error.kind()),
            RegionError::Stuck { error, .. } | RegionError::AndAfter { error, .. } => error.cause(),
            _ => None,
        }
    }
}
