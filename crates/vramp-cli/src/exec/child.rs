//! Runs the program, passes signals on to it, and waits for it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::thread;

use anyhow::{Context, Result};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getpid, kill_process, setrlimit, waitid,
};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;

use super::environment::Variables;
use super::exit_code;
use crate::exit::Unstartable;

/// Signals that processes send to ask for something.
const PASSED_ON: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH];

/// Runs the program at `path` and waits until it ends.
///
/// A signal from another process is passed on. One from the terminal is not: the terminal sends it to the
/// program too. Signals that this process was started without stay ignored in both.
///
/// # Errors
/// The program cannot be started, as [`Unstartable`].
pub(super) fn run(path: &Path, command: &[OsString], variables: Variables) -> Result<ExitStatus> {
    // A handler, unlike an ignored signal, is not inherited.
    let mut signals =
        SignalsInfo::<WithRawSiginfo>::new(caught(ignored())).context("cannot catch signals")?;
    let handle = signals.handle();
    let mut program = Command::new(path);
    program.args(command.iter().skip(1)).envs(variables);
    if let Some(name) = command.first() {
        program.arg0(name);
    }
    let mut child = program.spawn().map_err(|error| start_error(path, &error))?;
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let passing = thread::spawn(move || {
        for info in signals.forever() {
            let signal = Signal::from_named_raw(info.si_signo);
            // Codes above 0 are the kernel's.
            if let (Some(id), Some(signal)) = (id, signal)
                && info.si_code <= 0
            {
                // It fails once the program has ended.
                let _ = kill_process(id, signal);
            }
        }
    });
    // Its id stays taken until it is waited for, after the last signal.
    if let Some(id) = id {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while matches!(waitid(WaitId::Pid(id), options), Err(rustix::io::Errno::INTR)) {}
    }
    handle.close();
    let _ = passing.join();
    child.wait().context("cannot wait for the program")
}

fn start_error(path: &Path, error: &io::Error) -> Unstartable {
    let text = format!("{} cannot be run: {error}", path.display());
    match error.kind() {
        io::ErrorKind::NotFound => Unstartable::missing(text),
        _ => Unstartable::refused(text),
    }
}

fn caught(ignored: u64) -> impl Iterator<Item = i32> {
    PASSED_ON.into_iter().filter(move |signal| ignored >> (signal - 1) & 1 == 0)
}

/// Returns the signals that this process ignores, as `nohup` and background jobs of simple shells do: bit
/// `n - 1` is signal `n`.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Ends this process as the program ended: by the same signal, or with its exit code as an error.
pub(super) fn end_as(status: ExitStatus) -> Result<()> {
    let Some(signal) = status.signal() else { return exit_code(status.code().unwrap_or(1)) };
    // The program has written its memory, if any is written.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    if signal == Signal::KILL.as_raw() {
        let _ = kill_process(getpid(), Signal::KILL);
    }
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    // As shells report it, where the signal does not end this process.
    exit_code(128 + signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_are_ignored_stay_ignored() {
        let hangup = 1 << (SIGHUP - 1);
        assert!(caught(hangup).all(|signal| signal != SIGHUP));
        assert_eq!(caught(hangup).count(), PASSED_ON.len() - 1);
        assert_eq!(caught(0).count(), PASSED_ON.len());
    }
}
