//! Exit codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also if the reader of the output ended first |
//! | 1 | failed: a file cannot be read or written, a device cannot be opened, the model differs |
//! | 2 | the arguments are invalid |
//! | 3 | a job does not fit, with `--fail-on-oom` |

/// The command is done.
pub(crate) const DONE: u8 = 0;

/// The arguments are invalid.
pub(crate) const INVALID: u8 = 2;

/// Error of a command with `--fail-on-oom` after it has printed its result.
#[derive(Debug, thiserror::Error)]
#[error("a job ran out of memory (--fail-on-oom)")]
pub(crate) struct OutOfMemory;

/// Error for arguments that contradict each other or the recording.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidArguments(pub String);

/// Returns the exit code of an error.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    if error.is::<OutOfMemory>() {
        3
    } else if error.is::<InvalidArguments>() {
        INVALID
    } else {
        1
    }
}
