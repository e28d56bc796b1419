//! A source whose descriptors say which they are, and what tests count. Runs a test of this program in a process of
//! its own.

use std::fs::File;
use std::io;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use vramp_ipc::{Connections, Offer, OpenError, OpenOptions, Opened, Source, Ticket};

/// Offers files in memory, each of which has its own index as contents.
pub struct Files {
    pub description: Vec<u8>,
    pub descriptors: usize,
    pub asked: AtomicUsize,
    pub released: AtomicUsize,
    pub ended: AtomicUsize,
}

impl Files {
    pub fn new(description: &[u8], descriptors: usize) -> Arc<Files> {
        Arc::new(Files {
            description: description.to_vec(),
            descriptors,
            asked: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
        })
    }

    pub fn released(&self) -> usize {
        self.released.load(SeqCst)
    }
}

impl Source for Files {
    fn open(&self) -> Result<Offer, String> {
        self.asked.fetch_add(1, SeqCst);
        Ok(Offer { description: self.description.clone(), descriptors: self.descriptors })
    }

    fn descriptor(&self, index: usize) -> io::Result<OwnedFd> {
        numbered_file(index)
    }

    fn released(&self) {
        self.released.fetch_add(1, SeqCst);
    }

    fn ended(&self) {
        self.ended.fetch_add(1, SeqCst);
    }
}

pub fn numbered_file(index: usize) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("numbered", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::io::write(&file, &(index as u64).to_le_bytes())?;
    Ok(file)
}

pub fn number_of(descriptor: OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    File::from(descriptor).read_exact_at(&mut bytes, 0).unwrap();
    u64::from_le_bytes(bytes)
}

/// Receives all descriptors and compares them with their indices. Returns the sizes of the batches.
pub fn receive_all(opened: &mut Opened) -> Result<Vec<usize>, OpenError> {
    let mut sizes = Vec::new();
    let mut next = 0;
    while let Some(batch) = opened.next_batch()? {
        assert_eq!(batch.first, next);
        sizes.push(batch.descriptors.len());
        for descriptor in batch.descriptors {
            assert_eq!(number_of(descriptor), next as u64);
            next += 1;
        }
    }
    assert_eq!(next, opened.descriptors());
    Ok(sizes)
}

pub fn connections() -> Connections {
    Connections::new(OpenOptions::default())
}

/// Long enough for any machine; reached only by a failure.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Repeats until the condition holds, or panics.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = soon();
    while !condition() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        vramp_testing::moment();
    }
}

/// Descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Set in a child: its role, and after a space the ticket in hexadecimal digits.
const ROLE: &str = "VRAMP_TEST_ROLE";
/// In front of each line that a child writes for its parent.
const MARK: &str = "@ ";

pub struct Child {
    process: std::process::Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Returns the role in a child, and its ticket.
pub fn role() -> Option<(String, Option<Ticket>)> {
    let value = std::env::var(ROLE).ok()?;
    let (role, ticket) = value.split_once(' ').unwrap();
    Some((role.to_owned(), (!ticket.is_empty()).then(|| parse(ticket))))
}

/// In a child: writes a line for the parent.
pub fn say(line: &str) {
    println!("\n{MARK}{line}");
}

/// In a child: returns the next line of the parent. The process ends if there is none.
pub fn hear() -> String {
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line).unwrap() == 0 {
        std::process::exit(0);
    }
    line.trim().to_owned()
}

pub fn print(ticket: &Ticket) -> String {
    ticket.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn parse(digits: &str) -> Ticket {
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
    Ticket::from_bytes(&bytes).unwrap()
}

impl Child {
    /// Starts the test `name` in a process of its own.
    pub fn start(name: &str, role: &str, ticket: Option<&Ticket>) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
        command.env(ROLE, format!("{role} {}", ticket.map(print).unwrap_or_default()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Child { process, lines }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the child's next line.
    pub fn next(&mut self) -> String {
        let mut marked = self
            .lines
            .by_ref()
            .filter_map(|line| line.unwrap().strip_prefix(MARK).map(str::to_owned));
        marked.next().expect("the child ended early")
    }

    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.next(), line);
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops the child, and waits until it is.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        self.wait_for_state('T');
    }

    fn wait_for_state(&self, state: char) {
        let (stat, state) = (format!("/proc/{}/stat", self.pid()), format!(") {state}"));
        wait_until(&state, || std::fs::read_to_string(&stat).unwrap().contains(&state));
    }

    /// Returns true once the child has ended.
    pub fn is_over(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    /// Kills the child and waits for its end.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Kills the child, which stays a zombie until the result is dropped.
    pub fn kill_unreaped(mut self) -> Child {
        self.process.kill().unwrap();
        self.wait_for_state('Z');
        self
    }

    /// Waits for the child's own end, which must be a success.
    pub fn finish(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Child {
    /// A test that fails leaves no child at work.
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// Runs the calling test again in a process of its own, for what counts descriptors or sets limits.
/// Returns true in that process.
pub fn is_alone(name: &str) -> bool {
    if role().is_some() {
        return true;
    }
    Child::start(name, "alone", None).finish();
    false
}
