//! Reading the kernel's small files below a root, without ever failing.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The kernel's files are small; whatever is longer is cut, so that nothing fills the memory.
const LONGEST_FILE: u64 = 16 << 20;

/// Something that was there and could not be made sense of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The file, with the root before it.
    pub path: PathBuf,
    /// What was wrong with it.
    pub problem: Problem,
}

/// What was wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// It could not be read.
    Unreadable {
        /// What the operating system said.
        reason: String,
    },
    /// What it says is not what such files say.
    Malformed {
        /// What it says, at most 80 characters of it.
        text: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.problem {
            Problem::Unreadable { reason } => write!(f, "{path} cannot be read: {reason}"),
            Problem::Malformed { text } => write!(f, "{path} says '{text}', which means nothing"),
        }
    }
}

/// The files below a root, and what there is to warning on those that were read.
pub(super) struct Tree<'a> {
    root: &'a Path,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Tree<'a> {
    pub(super) fn new(root: &'a Path) -> Tree<'a> {
        Tree { root, warnings: Vec::new() }
    }

    /// What a file says, without space around it. `None` if it is not there, or the kernel has no
    /// answer.
    pub(super) fn text(&mut self, path: &str) -> Option<String> {
        let full = self.root.join(path);
        let mut bytes = Vec::new();
        let read = File::open(&full).and_then(|file| {
            // A folder opens, too, and is found out by reading.
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

    /// What a file says, understood. `None` with a warning if it is not understood.
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

    /// Remarks that a file says something odd.
    pub(super) fn malformed(&mut self, path: &str, text: &str) {
        let text = text.chars().take(80).collect();
        let warning = Warning { path: self.root.join(path), problem: Problem::Malformed { text } };
        self.warnings.push(warning);
    }

    /// The names in a folder, sorted. Empty if there is no such folder.
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

    /// Where a symbolic link leads, as it is written. `None` for anything else.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        self.root.join(path).read_link().ok()?.into_os_string().into_string().ok()
    }

    /// True if there is something of this name.
    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// `EINVAL` and its like are how drivers say that they do not know.
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
