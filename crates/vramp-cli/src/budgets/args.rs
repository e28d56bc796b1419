//! Arguments of `vramp top` and `vramp ctl`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand};
use vramp::Bytes;

use crate::amount::{AmountError, memory};

/// Which groups.
#[derive(Clone, Debug, ClapArgs)]
pub struct Chosen {
    /// Directory of the groups; by default $XDG_RUNTIME_DIR/vramp, or /tmp/vramp-UID
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// Only groups of this card: its UUID, or the text that the programs pass
    #[arg(long, value_name = "CARD")]
    pub card: Option<String>,
    /// Only groups of this name
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
}

/// Shows who has what.
///
/// Members publish what their memory is used for when this command looks: `live` is in use, `cached` and
/// `parked` can be given back at once, `asleep` is the contents of paused memory, which are not on the card.
#[derive(Clone, Debug, ClapArgs)]
pub struct Top {
    /// The groups.
    #[command(flatten)]
    pub chosen: Chosen,
    /// Print once and end; so does output that is not a terminal, but for --json
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds, allow_negative_numbers = true)]
    pub interval: Duration,
    /// Print one JSON object for each group and look, and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Controls processes of a group.
#[derive(Clone, Debug, ClapArgs)]
pub struct Ctl {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// The commands of `vramp ctl`.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Let a process claim no more than an amount; what it has above is given back
    Limit {
        /// The process
        #[command(flatten)]
        to: Recipient,
        /// The amount, such as 40GiB; or none
        #[arg(value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
        limit: Limit,
    },
    /// Have a process give memory back: what is idle, then what its handlers release
    GiveBack {
        /// The process
        #[command(flatten)]
        to: Recipient,
        /// The amount, such as 4GiB
        #[arg(value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
        size: Bytes,
    },
    /// Have a process put its memory to sleep
    Pause {
        /// The process
        #[command(flatten)]
        to: Recipient,
    },
    /// Have a process wake its memory up
    Resume {
        /// The process
        #[command(flatten)]
        to: Recipient,
    },
}

/// Which processes.
#[derive(Clone, Debug, ClapArgs)]
pub struct Recipient {
    /// The process: its PID, or the name of its program
    #[arg(value_name = "PROCESS")]
    pub process: String,
    /// The groups.
    #[command(flatten)]
    pub chosen: Chosen,
    /// All processes of that name, where there are several
    #[arg(long)]
    pub all: bool,
    /// Seconds to wait for each process
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, allow_negative_numbers = true)]
    pub timeout: Duration,
}

/// A limit on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit(pub Option<Bytes>);

fn limit(text: &str) -> Result<Limit, AmountError> {
    match text {
        "none" => Ok(Limit(None)),
        text => memory(text).map(|limit| Limit(Some(limit))),
    }
}

/// Error for a number of seconds.
#[derive(Debug, thiserror::Error)]
#[error("it is not a number of seconds from 0.1 to 86400")]
struct SecondsError;

fn seconds(text: &str) -> Result<Duration, SecondsError> {
    let seconds: f64 = text.parse().map_err(|_| SecondsError)?;
    let is_good = (0.1..=86400.0).contains(&seconds);
    is_good.then(|| Duration::from_secs_f64(seconds)).ok_or(SecondsError)
}
