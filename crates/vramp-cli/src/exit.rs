//! Exit codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also if the reader of the output ended first |
//! | 1 | failed: a file cannot be read or written, a device cannot be opened, the model differs |
//! | 2 | the arguments are invalid |
//! | 3 | a job does not fit, with `--fail-on-oom` |
//!
//! `vramp exec` ends with the code of the program that it ran: 126 if the program cannot be run, 127 if there
//! is none.

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

/// The program that `vramp exec` ran ended with this code, which is not 0. Nothing is printed.
#[derive(Debug, thiserror::Error)]
#[error("the program ended with exit code {0}")]
pub(crate) struct Ended(pub u8);

/// The program that `vramp exec` shall run cannot be run, with the exit code that shells have for it.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Unstartable {
    text: String,
    code: u8,
}

impl Unstartable {
    /// There is no such program.
    pub fn missing(text: String) -> Unstartable {
        Unstartable { text, code: 127 }
    }

    /// It is there, and cannot be run.
    pub fn refused(text: String) -> Unstartable {
        Unstartable { text, code: 126 }
    }
}

/// Returns the exit code of an error.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    if let Some(Ended(code)) = error.downcast_ref() {
        *code
    } else if let Some(Unstartable { code, .. }) = error.downcast_ref() {
        *code
    } else if error.is::<OutOfMemory>() {
        3
    } else if error.is::<InvalidArguments>() {
        INVALID
    } else {
        1
    }
}
