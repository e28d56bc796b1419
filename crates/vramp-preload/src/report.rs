//! What a process says: lines on stderr, and a file for `vramp exec`.

use std::fmt::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Writes one line to stderr at once, without the locks of the standard library.
pub fn write_line(text: &str) {
    let line = format!("{text}\n");
    let stderr = std::io::stderr();
    // SAFETY: the bytes are readable for their length. What cannot be written is lost.
    let _ = unsafe { libc::write(stderr.as_raw_fd(), line.as_ptr().cast(), line.len()) };
}

/// The lines of a report, `key value` each.
#[derive(Debug, Default)]
pub struct Report(String);

impl Report {
    /// Adds a line.
    pub fn add(&mut self, key: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{key} {value}");
    }

    /// Writes the report of this process into a folder. What cannot be written is lost: the program goes on.
    pub fn write(&self, folder: &Path) {
        let path = folder.join(format!("{}.report", std::process::id()));
        let _ = std::fs::write(path, &self.0);
    }
}
