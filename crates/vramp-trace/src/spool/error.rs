//! Why a file is not read.

use std::fmt;

use super::MAGIC;

/// Why the file of a recorded process cannot be read. A file that is cut can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpoolError {
    /// The file does not begin as one of these files does.
    NotASpool,
    /// Another version of vramp wrote the file.
    Version {
        /// Version of the file.
        found: u8,
    },
    /// The file has more events than a trace can hold.
    TooManyEvents {
        /// How many a trace can hold.
        most: u32,
    },
}

impl std::error::Error for SpoolError {}

impl fmt::Display for SpoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpoolError::NotASpool => f.write_str(
                "not a recording of vramp exec in progress: it does not begin with VSPOOL. Pass the \
                 .spool file that the process wrote",
            ),
            SpoolError::Version { found } => write!(
                f,
                "the recording has version {found}, and this vramp reads version {}: use the vramp and \
                 the libvramp_preload.so of one release",
                MAGIC[6]
            ),
            SpoolError::TooManyEvents { most } => write!(
                f,
                "the recording has more than {most} events: record a shorter part of the program"
            ),
        }
    }
}
