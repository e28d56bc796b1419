//! Why a case failed.

/// Description of a broken rule.
#[derive(Debug)]
pub(super) struct Failure(pub String);

pub(super) type Checked<T = ()> = Result<T, Failure>;

impl From<crate::DriverError> for Failure {
    fn from(error: crate::DriverError) -> Failure {
        Failure(error.to_string())
    }
}
