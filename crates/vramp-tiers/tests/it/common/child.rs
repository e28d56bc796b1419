//! Runs one test alone in a child process, which is then killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vramp_tiers::disk::FileNames;

/// Environment variable with the child's directory.
pub const DIR: &str = "VRAMP_TEST_CHILD_DIR";
/// Environment variable that hides the child's files.
const HIDDEN: &str = "VRAMP_TEST_CHILD_HIDDEN";
const READY: &str = "the child is at work";

/// Returns the directory, if this process is the child.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// In the child: returns how its files are named.
pub fn names() -> FileNames {
    std::env::var_os(HIDDEN).map_or(FileNames::Shown, |_| FileNames::Hidden)
}

/// In the child: lets [`Child::start`] return.
pub fn ready() {
    println!("{READY}");
}

pub struct Child {
    process: std::process::Child,
    /// Holds the child's temporary files, which a killed process does not remove.
    _scratch: tempfile::TempDir,
}

impl Child {
    /// Starts the test `name` alone in `directory`. Returns once it calls [`ready`].
    pub fn start(name: &str, directory: &Path, names: FileNames) -> Child {
        let scratch = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture"]).stdout(Stdio::piped());
        command.env(DIR, directory).env("TMPDIR", scratch.path());
        if names == FileNames::Hidden {
            command.env(HIDDEN, "");
        }
        let mut child = Child { process: command.spawn().unwrap(), _scratch: scratch };
        let mut lines = BufReader::new(child.process.stdout.as_mut().unwrap()).lines();
        let ready = lines.any(|line| line.unwrap().contains(READY));
        assert!(ready, "the child ended early");
        child
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Kills the child.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    /// A failed test leaves no child behind.
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}
