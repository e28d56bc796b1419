//! Errors of tiers, reservations and buffers as statuses.

use vramp_alloc::device::ErrorKind;
use vramp_defer::error::EvictError;
use vramp_defer::{LeaseRefused, SpillError, TiersError};
use vramp_tiers::ReserveError;
use vramp_tiers::config::ConfigError;
use vramp_tiers::disk::DiskTierError;
use vramp_tiers::host::HostPoolError;
use vramp_tiers::movers::MoveError;
use vramp_tiers::reserve::LedgerError;

use crate::abi::vramp_status_t::{self, *};
use crate::status::Failure;

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        Failure::new(VRAMP_ERROR_OPTION, error.to_string())
    }
}

impl From<LedgerError> for Failure {
    fn from(error: LedgerError) -> Failure {
        Failure::new(VRAMP_ERROR_OPTION, error.to_string())
    }
}

impl From<ReserveError> for Failure {
    fn from(error: ReserveError) -> Failure {
        let status = match error {
            ReserveError::NoSpace(_) => VRAMP_ERROR_UNKNOWN_SPACE,
            ReserveError::TimedOut(_) | ReserveError::NotNow(_) => VRAMP_ERROR_TIMEOUT,
            ReserveError::Cancelled(_) | ReserveError::ShutDown(_) => VRAMP_ERROR_CANCELLED,
            ReserveError::Deadlock { .. } | ReserveError::InSpiller(_) => VRAMP_ERROR_DEADLOCK,
            _ => VRAMP_ERROR_OUT_OF_MEMORY,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<TiersError> for Failure {
    fn from(error: TiersError) -> Failure {
        match error {
            TiersError::Config(error) => error.into(),
            TiersError::Spaces(error) => error.into(),
            TiersError::Host(error) => error.into(),
            TiersError::Disk(error) => error.into(),
            TiersError::Mover(error) => error.into(),
            TiersError::Manager(error) => error.into(),
            TiersError::Driver(error) => error.into(),
            TiersError::Device(_) => Failure::new(VRAMP_ERROR_DEVICE, error.to_string()),
            error => Failure::new(VRAMP_ERROR_OPTION, error.to_string()),
        }
    }
}

fn status_of_disk(error: &DiskTierError) -> vramp_status_t {
    match error {
        DiskTierError::Full(_) | DiskTierError::NotReserved(_) => VRAMP_ERROR_OUT_OF_MEMORY,
        DiskTierError::Config(_) | DiskTierError::NotADisk(_) => VRAMP_ERROR_OPTION,
        error if error.is_damage() => VRAMP_ERROR_CONTENTS,
        _ => VRAMP_ERROR_FILE,
    }
}

impl From<DiskTierError> for Failure {
    fn from(error: DiskTierError) -> Failure {
        Failure::new(status_of_disk(&error), error.to_string())
    }
}

fn status_of_pool(error: &HostPoolError) -> vramp_status_t {
    match error {
        HostPoolError::Full(_) | HostPoolError::NoMemory(_) | HostPoolError::Exhausted { .. } => {
            VRAMP_ERROR_OUT_OF_MEMORY
        }
        HostPoolError::Pin(_) => VRAMP_ERROR_DRIVER,
        _ => VRAMP_ERROR_OPTION,
    }
}

impl From<HostPoolError> for Failure {
    fn from(error: HostPoolError) -> Failure {
        Failure::new(status_of_pool(&error), error.to_string())
    }
}

pub(crate) fn status_of_move(error: &MoveError) -> vramp_status_t {
    match error {
        MoveError::Host(error) => status_of_pool(error),
        MoveError::Disk { error, .. } => status_of_disk(error),
        MoveError::Outside(_) | MoveError::BadRange(_) | MoveError::OtherLength { .. } => {
            VRAMP_ERROR_RANGE
        }
        MoveError::Capturing => VRAMP_ERROR_CAPTURE,
        MoveError::Cancelled { .. } => VRAMP_ERROR_CANCELLED,
        MoveError::Unsettled(error) => status_of_move(error),
        MoveError::Config(_) => VRAMP_ERROR_OPTION,
        _ => VRAMP_ERROR_DRIVER,
    }
}

impl From<MoveError> for Failure {
    fn from(error: MoveError) -> Failure {
        Failure::new(status_of_move(&error), error.to_string())
    }
}

fn status_of_refusal(refused: &LeaseRefused) -> vramp_status_t {
    match refused {
        LeaseRefused::Unknown(_) => VRAMP_ERROR_UNKNOWN_BUFFER,
        LeaseRefused::TooLarge { .. } => VRAMP_ERROR_OUT_OF_MEMORY,
        _ => VRAMP_ERROR_TIMEOUT,
    }
}

/// The allocator's failure, in the words of the buffer's.
fn no_memory(error: SpillError) -> Failure {
    let text = error.to_string();
    let SpillError::NoMemory { error, .. } = error else { unreachable!("it lacks memory: {text}") };
    Failure::from(*error).with_text(text)
}

impl From<SpillError> for Failure {
    fn from(error: SpillError) -> Failure {
        let status = match error {
            SpillError::NoBudget { error, .. } => return (*error).into(),
            SpillError::NothingCanLeave { .. } => VRAMP_ERROR_OUT_OF_MEMORY,
            SpillError::Addresses(error) => return error.into(),
            SpillError::Driver(error) => return error.into(),
            SpillError::NotAdoptable { error: ref refused, .. }
                if refused.kind == ErrorKind::InvalidUse =>
            {
                VRAMP_ERROR_UNKNOWN_POINTER
            }
            SpillError::AddressesOfBuffer(_) => VRAMP_ERROR_IN_USE,
            SpillError::Config(_) | SpillError::Settings(_) | SpillError::OtherSpace { .. } => {
                VRAMP_ERROR_OPTION
            }
            SpillError::Add(_) | SpillError::NotNamed { .. } | SpillError::Outside { .. } => {
                VRAMP_ERROR_RANGE
            }
            SpillError::NotWritable { .. }
            | SpillError::NotReadable(_)
            | SpillError::MemoryOfPool { .. } => VRAMP_ERROR_UNSUPPORTED,
            SpillError::OtherManager | SpillError::Unknown(_) => VRAMP_ERROR_UNKNOWN_BUFFER,
            SpillError::UnknownStream(_) => VRAMP_ERROR_UNKNOWN_STREAM,
            SpillError::Capturing(_) | SpillError::CaptureInProgress => VRAMP_ERROR_CAPTURE,
            SpillError::Refused(ref refused) => status_of_refusal(refused),
            SpillError::Cancelled => VRAMP_ERROR_CANCELLED,
            SpillError::NoMemory { .. } => return no_memory(error),
            SpillError::Damaged { .. } => VRAMP_ERROR_CONTENTS,
            SpillError::Evict(EvictError::NoRoom { .. }) => VRAMP_ERROR_OUT_OF_MEMORY,
            SpillError::Evict(EvictError::Held(_)) => VRAMP_ERROR_BUSY,
            SpillError::NotSpilled(_) => VRAMP_ERROR_FILE,
            SpillError::PinnedMemory { .. } | SpillError::Held(_) | SpillError::Pin(_) => {
                VRAMP_ERROR_BUSY
            }
            SpillError::Move(ref error) => status_of_move(error),
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}
