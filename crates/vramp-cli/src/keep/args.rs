//! Arguments of `vramp keep`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand};
use vramp::Bytes;

use crate::amount::memory;

/// Keeps memory of cards for processes that end: runs in the foreground, until it is stopped.
///
/// Programs hand it descriptors of memory under names (`vramp.keep` in Python, `Allocator::draft_kept` in Rust), and others
/// open them. It makes no CUDA context and allocates nothing on a card. When it ends, memory that no process has open is
/// freed; processes that have some hand it to the next keeper.
#[derive(Clone, Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Keep {
    /// What to do with a keeper that runs.
    #[command(subcommand)]
    pub action: Option<Action>,
    /// Where it is.
    #[command(flatten)]
    pub place: Place,
    /// Most memory of each card, such as 64GiB; more evicts what no process has open
    #[arg(long, value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
    pub limit: Option<Bytes>,
    /// End after so many seconds without memory and processes
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub idle_exit: Option<Duration>,
}

/// Where a keeper is.
#[derive(Clone, Debug, ClapArgs)]
pub struct Place {
    /// Directory of the keeper; by default $XDG_RUNTIME_DIR/vramp, or /tmp/vramp-UID
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
}

/// The commands of `vramp keep`.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Show what is kept, and which processes have it open
    List {
        /// Where the keeper is.
        #[command(flatten)]
        place: Place,
        /// Print one JSON object for each name, and nothing else
        #[arg(long)]
        json: bool,
    },
    /// Remove names; processes that have their memory open keep it
    Remove {
        /// Where the keeper is.
        #[command(flatten)]
        place: Place,
        /// The names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
    },
    /// Free memory that no process has open: the lowest priority and the longest idle first
    Evict {
        /// Where the keeper is.
        #[command(flatten)]
        place: Place,
        /// How much, such as 16GiB
        #[arg(value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
        size: Bytes,
        /// The card: its UUID as `vramp keep list` shows it; by default each that has kept memory
        #[arg(long, value_name = "CARD")]
        card: Option<String>,
    },
    /// End the keeper
    Stop {
        /// Where the keeper is.
        #[command(flatten)]
        place: Place,
    },
    /// Print a service file for systemd: vramp keep service > ~/.config/systemd/user/vramp-keep.service
    Service {
        /// Where the keeper will be.
        #[command(flatten)]
        place: Place,
        /// What starts vramp; by default this program
        #[arg(long, value_name = "COMMAND")]
        program: Option<String>,
    },
}

/// Error for a number of seconds.
#[derive(Debug, thiserror::Error)]
#[error("it is not a number of seconds from 0.1 to 31536000")]
struct SecondsError;

fn seconds(text: &str) -> Result<Duration, SecondsError> {
    let seconds: f64 = text.parse().map_err(|_| SecondsError)?;
    let is_good = (0.1..=31_536_000.0).contains(&seconds);
    is_good.then(|| Duration::from_secs_f64(seconds)).ok_or(SecondsError)
}
