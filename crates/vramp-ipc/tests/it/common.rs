//! A source whose descriptors say which they are, and what tests count.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use vramp_ipc::{Connections, Offer, OpenError, OpenOptions, Opened, Source};

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
