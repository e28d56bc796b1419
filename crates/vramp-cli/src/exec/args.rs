//! Arguments of `vramp exec`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use vramp::Bytes;
use vramp::peers::{Preset, UnknownPreset};

use crate::amount::memory;

/// Runs a program and records, pools or limits the GPU memory that it requests.
///
/// The program, and what it starts, is any dynamically linked program that uses CUDA: nothing is compiled
/// again. Give one or several of --record, --pool and --limit. The exit code is that of the program.
#[derive(Clone, Debug, ClapArgs)]
pub struct Exec {
    /// Record requests with their call stacks into this .vtrace file. Further processes write beside it,
    /// with their process id in the name
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Most frames of each recorded call stack; 0 records none
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub stacks: u32,
    /// Serve requests from vramp's pool
    #[arg(long)]
    pub pool: bool,
    /// The pool's preset; as --option preset=NAME
    #[arg(long, value_name = "NAME", requires = "pool", value_parser = preset)]
    pub preset: Option<Preset>,
    /// An option of the pool, such as page=4MiB; may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "pool", value_parser = option)]
    pub option: Vec<String>,
    /// Memory that the program may hold on each device, such as 16GiB. More is refused as if the card were
    /// full
    #[arg(long, value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
    pub limit: Option<Bytes>,
    /// Share the card with the other processes of this group by budgets: `vramp top` shows them
    #[arg(long, value_name = "NAME", requires = "pool")]
    pub group: Option<String>,
    /// What the group shares of each card, the same in all its processes; by default all but
    /// 4 GiB, or an eighth
    #[arg(long, value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
    pub capacity: Option<Bytes>,
    /// What the program can have of each card at any time
    #[arg(long, value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
    pub guaranteed: Option<Bytes>,
    /// From 0 to 255: the larger is served first, and gives way last
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub priority: u8,
    /// Let the program's memory leave the card: at `vramp ctl pause PID`, and while another process of the
    /// group needs the card. The program waits meanwhile. In the group `exec` if --group names none
    #[arg(long, requires = "pool")]
    pub sleepable: bool,
    /// Print nothing at the end
    #[arg(long)]
    pub quiet: bool,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<OsString>,
}

fn preset(name: &str) -> Result<Preset, UnknownPreset> {
    name.parse()
}

/// Error for a value of `--option`.
#[derive(Debug, thiserror::Error)]
#[error("it is not KEY=VALUE, such as page=4MiB")]
struct OptionError;

fn option(text: &str) -> Result<String, OptionError> {
    let (key, value) = text.split_once('=').ok_or(OptionError)?;
    let is_pair = !key.trim().is_empty() && !value.trim().is_empty();
    is_pair.then(|| text.to_owned()).ok_or(OptionError)
}
