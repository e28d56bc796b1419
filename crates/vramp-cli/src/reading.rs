//! Reading traces as the command line asks for it.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args as ClapArgs;
use vramp::Bytes;
use vramp_trace::{ReadError, ReadLimits, Trace};

use crate::amount::memory;
use crate::exec;
use crate::exit::InvalidArguments;
use crate::progress::Busy;

/// The name of standard input or standard output on the command line.
pub(crate) const STANDARD: &str = "-";

/// What is read of a trace, and limits on what that may cost. For every command that reads traces.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Reading {
    /// Use only these devices of the recording, separated by commas or given several times; all that
    /// have events by default
    #[arg(long, value_name = "N", value_delimiter = ',', allow_negative_numbers = true)]
    pub trace_device: Vec<u16>,
    /// Memory that reading a trace may take; 1GiB by default
    #[arg(long, value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
    pub max_memory: Option<Bytes>,
    /// Number of events that a trace may have; 100,000,000 by default
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_events: Option<u32>,
}

impl Reading {
    /// Returns the limits on what reading a trace may cost.
    pub fn limits(&self) -> ReadLimits {
        let default = ReadLimits::default();
        ReadLimits {
            memory: self.max_memory.unwrap_or(default.memory),
            events: self.max_events.unwrap_or(default.events),
            ..default
        }
    }

    /// Checks that files can be opened, before anything is said or done about them.
    ///
    /// # Errors
    /// As of [`Reading::read`], for the first file that cannot be opened.
    pub fn check<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<()> {
        for path in paths.into_iter().filter(|path| *path != Path::new(STANDARD)) {
            let opened = std::fs::File::open(path);
            opened.with_context(|| format!("cannot read the trace '{}'", path.display()))?;
        }
        Ok(())
    }

    /// Reads the selected devices of a trace, of standard input if the path is `-`.
    ///
    /// # Errors
    /// An error that names the file, or the device that it does not have.
    pub fn read(&self, path: &Path) -> Result<Trace> {
        let busy = Busy::with(format_args!("reading {}", path.display()));
        let read = self.read_all(path);
        drop(busy);
        let mut trace = read?;
        let devices: Vec<u32> = self.trace_device.iter().copied().map(u32::from).collect();
        if !devices.is_empty() {
            trace.retain_devices(&devices).map_err(|error| {
                let (path, device) = (path.display(), error.device);
                let text = format!("'{path}' cannot be used with --trace-device {device}: {error}");
                InvalidArguments(text)
            })?;
        }
        Ok(trace)
    }

    fn read_all(&self, path: &Path) -> Result<Trace> {
        let limits = self.limits();
        if path == Path::new(STANDARD) {
            return vramp_trace::read(io::stdin().lock(), &limits)
                .context("cannot read the trace on standard input");
        }
        let cannot_read = || format!("cannot read the trace '{}'", path.display());
        if exec::is_spool(path) {
            return exec::read_spool(path);
        }
        match vramp_trace::read_trace(path, &limits) {
            // The context names the file.
            Err(ReadError::Open { cause, .. }) => Err(cause).with_context(cannot_read),
            read => read.with_context(cannot_read),
        }
    }
}

/// Returns the size of a file, and `None` for standard input, pipes and devices.
pub(crate) fn size(path: &Path) -> Option<Bytes> {
    let found = path.metadata().ok().filter(|found| found.is_file())?;
    Some(Bytes::new(found.len()))
}
