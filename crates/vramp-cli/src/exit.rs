//! Exit codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also if the reader of the output ended first |
//! | 1 | failed: a file cannot be read or written, a device cannot be opened, the model differs |
//! | 2 | the arguments are invalid |
//! | 3 | a job does not fit, with `--fail-on-oom` |

use std::process::ExitCode;

/// Error of a command with `--fail-on-oom` after it has printed its result.
#[derive(Debug, thiserror::Error)]
#[error("a job ran out of memory (--fail-on-oom)")]
pub(crate) struct OutOfMemory;

/// Error for arguments that contradict each other or the recording.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct InvalidArguments(pub String);

/// Returns the exit code of an error.
pub(crate) fn code(error: &anyhow::Error) -> ExitCode {
    if error.is::<OutOfMemory>() {
        ExitCode::from(3)
    } else if error.is::<InvalidArguments>() {
        ExitCode::from(2)
    } else {
        ExitCode::FAILURE
    }
}
