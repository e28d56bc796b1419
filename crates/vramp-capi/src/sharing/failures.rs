//! Errors of sharing as statuses.

use vramp_alloc::sharing::{
    AccessError, DmaBufError, ExportError, FetchError, ImportError, OpenError, OpenMemoryError,
    PinError, ServeError,
};

use crate::abi::vramp_status_t::{self, *};
use crate::status::Failure;

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Failure {
        let status = match error {
            ExportError::Foreign(_) => VRAMP_ERROR_UNKNOWN_POINTER,
            ExportError::NotExportable { .. } => VRAMP_ERROR_UNSUPPORTED,
            ExportError::NoSuchHandle { .. } => VRAMP_ERROR_RANGE,
            ExportError::Driver(error) => return error.into(),
            ExportError::Unusable(why) => return why.into(),
            _ => VRAMP_ERROR_DRIVER,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Failure {
        let status = match error {
            ServeError::Path { .. } => VRAMP_ERROR_OPTION,
            ServeError::Forked => VRAMP_ERROR_FORKED,
            ServeError::Withdrawn => VRAMP_ERROR_UNKNOWN_EXPORT,
            ServeError::System { .. } => VRAMP_ERROR_EXCHANGE,
        };
        Failure::new(status, error.to_string())
    }
}

fn status_of_open(error: &OpenError) -> vramp_status_t {
    match error {
        OpenError::ExporterGone { .. } | OpenError::Withdrawn { .. } => VRAMP_ERROR_EXPORT_ENDED,
        OpenError::Refused { reason: vramp_alloc::sharing::Refusal::WrongSecret, .. } => {
            VRAMP_ERROR_TICKET
        }
        OpenError::Forked => VRAMP_ERROR_FORKED,
        _ => VRAMP_ERROR_EXCHANGE,
    }
}

impl From<OpenMemoryError> for Failure {
    fn from(error: OpenMemoryError) -> Failure {
        let status = match error {
            OpenMemoryError::Ticket(_) => VRAMP_ERROR_TICKET,
            OpenMemoryError::Open(ref why) => status_of_open(why),
            OpenMemoryError::Import(ImportError::Fetch {
                error: FetchError::Open(ref why),
                ..
            }) => status_of_open(why),
            OpenMemoryError::Import(ImportError::Driver(error)) => return error.into(),
            OpenMemoryError::Import(ImportError::Unusable(why)) => return why.into(),
            _ => VRAMP_ERROR_EXCHANGE,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<AccessError> for Failure {
    fn from(error: AccessError) -> Failure {
        let status = match error {
            AccessError::NoPeer { .. } => VRAMP_ERROR_RANGE,
            AccessError::Driver(error) => return error.into(),
            AccessError::Unusable(why) => return why.into(),
            _ => VRAMP_ERROR_UNSUPPORTED,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<PinError> for Failure {
    fn from(error: PinError) -> Failure {
        let status = match error {
            PinError::NotOwned { .. } => VRAMP_ERROR_UNKNOWN_POINTER,
            PinError::Unusable(why) => return why.into(),
            _ => VRAMP_ERROR_UNSUPPORTED,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<DmaBufError> for Failure {
    fn from(error: DmaBufError) -> Failure {
        let status = match error {
            DmaBufError::Empty => VRAMP_ERROR_RANGE,
            DmaBufError::Pin(error) => return error.into(),
            DmaBufError::Driver(error) => return error.into(),
            DmaBufError::Unusable(why) => return why.into(),
            _ => VRAMP_ERROR_UNSUPPORTED,
        };
        Failure::new(status, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_exporter_differs_from_a_wrong_ticket_and_from_a_limit() {
        let opened = |error| Failure::from(OpenMemoryError::Open(error)).status;
        assert_eq!(opened(OpenError::ExporterGone { pid: 7 }), VRAMP_ERROR_EXPORT_ENDED);
        assert_eq!(opened(OpenError::Withdrawn { pid: 7 }), VRAMP_ERROR_EXPORT_ENDED);
        let reason = vramp_alloc::sharing::Refusal::WrongSecret;
        assert_eq!(opened(OpenError::Refused { pid: 7, reason }), VRAMP_ERROR_TICKET);
        let limit = OpenError::TooManyOpens { pid: 7, limit: 4 };
        assert_eq!(opened(limit), VRAMP_ERROR_EXCHANGE);
        let index = 1;
        let fetched = |error| {
            let error = FetchError::Open(error);
            let import = ImportError::Fetch { index, error };
            Failure::from(OpenMemoryError::Import(import)).status
        };
        assert_eq!(fetched(OpenError::ExporterGone { pid: 7 }), VRAMP_ERROR_EXPORT_ENDED);
    }
}
