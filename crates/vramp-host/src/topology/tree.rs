//! Reads small files of sysfs and procfs below a root. Failures become warnings.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Longer files are truncated, to bound memory.
const LONGEST_FILE: u64 = 16 << 20;

/// A file that could not be read or parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Path of the file, with the root.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The file cannot be read.
    Unreadable {
        /// Error of the operating system.
        reason: String,
    },
    /// The contents cannot be parsed.
    Malformed {
        /// The first 80 characters of the contents.
        text: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.problem {
            Problem::Unreadable { reason } => write!(f, "{path} cannot be read: {reason}"),
            Problem::Malformed { text } => write!(f, "{path} has unexpected contents: '{text}'"),
        }
    }
}

/// The files below a root, and the warnings about those that were read.
pub(super) struct Tree<'a> {
    root: &'a Path,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Tree<'a> {
    pub(super) fn new(root: &'a Path) -> Tree<'a> {
        Tree { root, warnings: Vec::new() }
    }

    /// Returns the trimmed contents of a file. `None` if it does not exist or cannot be read.
    pub(super) fn text(&mut self, path: &str) -> Option<String> {
        let full = self.root.join(path);
        let mut bytes = Vec::new();
        let read = File::open(&full).and_then(|file| {
            // A directory can be opened too, but not read.
            file.take(LONGEST_FILE).read_to_end(&mut bytes)
        });
        match read {
            Ok(_) => Some(String::from_utf8_lossy(&bytes).trim().to_owned()),
            Err(error) => {
                self.warn_unless_absent(full, &error);
                None
            }
        }
    }

    /// Returns the parsed contents of a file. `None` with a warning if they cannot be parsed.
    pub(super) fn parsed<T>(
        &mut self,
        path: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(path)?;
        let value = parse(&text);
        if value.is_none() {
            self.malformed(path, &text);
        }
        value
    }

    /// Adds a warning that the contents of a file cannot be parsed.
    pub(super) fn malformed(&mut self, path: &str, text: &str) {
        let text = text.chars().take(80).collect();
        let warning = Warning { path: self.root.join(path), problem: Problem::Malformed { text } };
        self.warnings.push(warning);
    }

    /// Returns the names in a directory, sorted. Empty if it does not exist.
    pub(super) fn names(&mut self, path: &str) -> Vec<String> {
        let full = self.root.join(path);
        let mut names: Vec<String> = match full.read_dir() {
            Ok(entries) => {
                entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
            }
            Err(error) => {
                self.warn_unless_absent(full, &error);
                Vec::new()
            }
        };
        names.sort();
        names
    }

    /// Returns the target of a symbolic link, unresolved. `None` if it is not a link.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        self.root.join(path).read_link().ok()?.into_os_string().into_string().ok()
    }

    /// Returns true if the path exists.
    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Adds a warning, except for errors by which drivers report an unknown value, such as
    /// `EINVAL`.
    fn warn_unless_absent(&mut self, path: PathBuf, error: &io::Error) {
        let unknown = matches!(
            error.kind(),
            io::ErrorKind::NotFound
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::Unsupported
                | io::ErrorKind::NotADirectory
        );
        if !unknown {
            let problem = Problem::Unreadable { reason: error.to_string() };
            self.warnings.push(Warning { path, problem });
        }
    }
}
