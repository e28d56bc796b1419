//! What kind of failure each error of deferrable buffers is.

use vramp_alloc::error::{ErrorKind, OutOfMemoryReport};
use vramp_alloc::kind::{Classify, Kind, Room};

use crate::planner::{DeferConfigError, EvictError, LeaseRefused};
use crate::shell::{AdoptFailed, EventsError, SpillError, TiersError};

vramp_alloc::classify!(Option: DeferConfigError;);

impl Classify for AdoptFailed {
    fn kind(&self) -> Kind {
        self.error.kind()
    }
}

impl Classify for EventsError {
    fn kind(&self) -> Kind {
        match self {
            EventsError::Empty => Kind::Timeout,
            EventsError::Closed => Kind::Closed,
        }
    }
}

impl Classify for LeaseRefused {
    fn kind(&self) -> Kind {
        match self {
            LeaseRefused::Unknown(_) => Kind::UnknownBuffer,
            LeaseRefused::TooLarge { .. } => Kind::TierFull,
            LeaseRefused::Busy { .. }
            | LeaseRefused::Settling { .. }
            | LeaseRefused::Full { .. }
            | LeaseRefused::NoMemory
            | LeaseRefused::OlderWaiters { .. } => Kind::Timeout,
        }
    }

    fn room(&self) -> Room {
        match self {
            LeaseRefused::TooLarge { needed, capacity } => {
                Room { needed: Some(*needed), capacity: Some(*capacity) }
            }
            _ => Room::default(),
        }
    }
}

impl Classify for SpillError {
    fn kind(&self) -> Kind {
        match self {
            SpillError::Config(_) | SpillError::Settings(_) | SpillError::OtherSpace { .. } => {
                Kind::Option
            }
            SpillError::Add(_) | SpillError::NotNamed { .. } | SpillError::Outside { .. } => {
                Kind::Range
            }
            SpillError::Addresses(error) => error.kind(),
            SpillError::OtherManager | SpillError::Unknown(_) => Kind::UnknownBuffer,
            SpillError::NotWritable { .. }
            | SpillError::NotReadable(_)
            | SpillError::MemoryOfPool { .. } => Kind::Unsupported,
            SpillError::UnknownStream(_) => Kind::UnknownStream,
            SpillError::Capturing(_) | SpillError::CaptureInProgress => Kind::Capture,
            SpillError::Refused(refused) => refused.kind(),
            SpillError::Cancelled => Kind::Cancelled,
            SpillError::NoMemory { error, .. } => error.kind(),
            SpillError::NoBudget { error, .. } => error.kind(),
            SpillError::NothingCanLeave { .. } => Kind::TierFull,
            SpillError::Move(error) => error.kind(),
            SpillError::Damaged { .. } => Kind::Contents,
            SpillError::NotAdoptable { error, .. } if error.kind == ErrorKind::InvalidUse => {
                Kind::UnknownPointer
            }
            SpillError::AddressesOfBuffer(_) => Kind::InUse,
            SpillError::Evict(EvictError::NoRoom { .. }) => Kind::TierFull,
            SpillError::Evict(EvictError::Held(_))
            | SpillError::PinnedMemory { .. }
            | SpillError::Held(_)
            | SpillError::Pin(_) => Kind::Busy,
            SpillError::NotSpilled(_) => Kind::File,
            SpillError::Driver(error) => error.kind(),
            SpillError::NotAdoptable { .. }
            | SpillError::HostBacking(_)
            | SpillError::JobDropped
            | SpillError::Peer(_)
            | SpillError::UnknownLock { .. } => Kind::Driver,
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            SpillError::NoMemory { error, .. } => error.report(),
            _ => None,
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            SpillError::NoMemory { error, .. } => error.region(),
            _ => None,
        }
    }

    fn room(&self) -> Room {
        match self {
            SpillError::Refused(refused) => refused.room(),
            SpillError::Evict(EvictError::NoRoom { needed, .. }) => {
                Room { needed: Some(*needed), capacity: None }
            }
            SpillError::NoBudget { error, .. } => error.room(),
            _ => Room::default(),
        }
    }
}

impl Classify for TiersError {
    fn kind(&self) -> Kind {
        match self {
            TiersError::Config(_)
            | TiersError::NoGpu
            | TiersError::OtherGpu { .. }
            | TiersError::NoHost
            | TiersError::TwoDisks
            | TiersError::Allocator(_)
            | TiersError::Peer { .. }
            | TiersError::Spaces(_) => Kind::Option,
            TiersError::Device(_) => Kind::Device,
            TiersError::Host(error) => error.kind(),
            TiersError::Disk(error) => error.kind(),
            TiersError::Mover(error) => error.kind(),
            TiersError::Manager(error) => error.kind(),
            TiersError::Driver(error) => error.kind(),
        }
    }

    fn report(&self) -> Option<&OutOfMemoryReport> {
        match self {
            TiersError::Manager(error) => error.report(),
            _ => None,
        }
    }

    fn room(&self) -> Room {
        match self {
            TiersError::Manager(error) => error.room(),
            _ => Room::default(),
        }
    }
}
