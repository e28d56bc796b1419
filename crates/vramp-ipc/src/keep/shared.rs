//! What a client's calls have in common.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::adrift::Rescuer;
use super::core::message::is_name;
use super::error::KeepError;
use super::link::{Context, Fault, Limits, Link};

/// A directory with a keeper, and the patience with it.
#[derive(Debug)]
pub struct Shared {
    pub directory: PathBuf,
    pub timeout: Duration,
    /// Waits for other clients end with a signal.
    pub is_interruptible: bool,
    pub rescuer: Arc<Rescuer>,
    /// Forks before it was made. A child has no thread of it, and takes no lock of it.
    pub depth: u32,
}

impl Shared {
    pub fn new(directory: &Path, timeout: Duration, is_interruptible: bool) -> Arc<Shared> {
        vramp_host::fork::watch();
        Arc::new(Shared {
            directory: directory.to_owned(),
            timeout,
            is_interruptible,
            rescuer: Arc::default(),
            depth: vramp_host::fork::depth(),
        })
    }

    pub fn limits(&self, deadline: Option<Instant>) -> Limits {
        let is_interruptible = self.is_interruptible && deadline.is_some();
        Limits { is_interruptible, ..Limits::new(deadline, self.timeout) }
    }

    pub fn connect(&self, limits: Limits) -> Result<Link, Fault> {
        Link::connect(&self.directory, limits)
    }

    /// Returns what errors of a call name.
    pub fn context<'a>(&'a self, name: &'a str, limits: Limits) -> Context<'a> {
        Context { name, asked: 0, start: limits.start, directory: &self.directory }
    }
}

pub fn check_name(name: &str) -> Result<(), KeepError> {
    match is_name(name) {
        true => Ok(()),
        false => Err(KeepError::Name { name: name.to_owned() }),
    }
}
