//! The other process: this program again, with pipes to its standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::importer::{Role, from_hex, to_hex};

pub(super) struct Child {
    process: std::process::Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Child {
    pub fn start(program: &Path, device: &str, role: Role) -> Result<Child> {
        let mut process = Command::new(program)
            .args(["sharing", "--device", device, "--role", role.name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start this program again")?;
        let to = process.stdin.take().context("its input is a pipe")?;
        let from = BufReader::new(process.stdout.take().context("its output is a pipe")?);
        let mut child = Child { process, to, from };
        let ready = child.line()?;
        ensure!(ready == "ready", "the other process says {ready}");
        Ok(child)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let len = self.from.read_line(&mut line)?;
        ensure!(len > 0, "the other process ended");
        Ok(line.trim_end().to_owned())
    }

    /// Sends a ticket and the byte that fills the memory.
    pub fn offer(&mut self, ticket: &[u8], byte: u8) -> Result<()> {
        writeln!(self.to, "{} {byte}", to_hex(ticket))?;
        Ok(self.to.flush()?)
    }

    /// Waits until the other process has closed the memory. Returns how long the open took.
    pub fn closed(&mut self) -> Result<Duration> {
        let line = self.line()?;
        let nanos = line.strip_prefix("closed ").with_context(|| line.clone())?;
        Ok(Duration::from_nanos(nanos.parse()?))
    }

    /// Asks an exporter for a ticket. Returns it and the byte that fills its memory.
    pub fn ticket(&mut self) -> Result<(Vec<u8>, u8)> {
        writeln!(self.to, "next")?;
        self.to.flush()?;
        let line = self.line()?;
        let (ticket, byte) = line.split_once(' ').with_context(|| line.clone())?;
        Ok((from_hex(ticket)?, byte.parse()?))
    }

    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    pub fn end(mut self) -> Result<()> {
        writeln!(self.to, "end")?;
        let status = self.process.wait()?;
        ensure!(status.success(), "the other process ended with {status}");
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It ended already, or nothing waits for it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
