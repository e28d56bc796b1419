//! Runs a test of its own executable in a child process, to be killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vramp_tiers::disk::FileNames;

/// Directory in which the child of a test works.
pub const DIR: &str = "VRAMP_TEST_CHILD_DIR";
/// Set if the child hides its files.
const HIDDEN: &str = "VRAMP_TEST_CHILD_HIDDEN";
const READY: &str = "the child is at work";

/// Returns the directory, if this process is the child.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

/// In the child: returns whether its files are visible.
pub fn names() -> FileNames {
    std::env::var_os(HIDDEN).map_or(FileNames::Shown, |_| FileNames::Hidden)
}

/// In the child: lets [`Child::start`] return.
pub fn ready() {
    println!("{READY}");
}

pub struct Child {
    process: std::process::Child,
    /// Temporary files of the child, which cannot remove them itself.
    _scratch: tempfile::TempDir,
}

impl Child {
    /// Starts the test `name` alone in `directory`. Returns once it is ready.
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

    /// Without a chance to tidy up.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    /// A test that fails leaves no child at work.
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}
