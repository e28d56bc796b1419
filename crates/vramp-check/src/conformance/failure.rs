//! Why a case failed.

/// Description of a broken rule.
#[derive(Debug)]
pub(super) struct Failure(pub String);

pub(super) type Checked<T = ()> = Result<T, Failure>;

impl From<vramp_driver::DriverError> for Failure {
    fn from(error: vramp_driver::DriverError) -> Failure {
        Failure(error.to_string())
    }
}
