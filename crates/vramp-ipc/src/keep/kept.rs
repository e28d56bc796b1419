//! What the keeper keeps of a version: descriptors and bytes, and the page that its holders see.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::SealFlags;

use super::core::message::{MAX_LAYOUT, MAX_PARTS};
use super::core::page::{self, Word};

/// One descriptor and how many bytes it stands for.
#[derive(Debug)]
pub struct KeptPart {
    pub len: u64,
    pub descriptor: OwnedFd,
}

/// A version's descriptors and bytes.
#[derive(Debug)]
pub struct Kept {
    pub id: [u8; 16],
    pub digest: [u8; 32],
    pub page: OwnedFd,
    pub parts: Vec<KeptPart>,
    pub layout: Vec<u8>,
}

impl Kept {
    /// Descriptors that are open for it.
    pub fn descriptors(&self) -> usize {
        self.parts.len() + 1
    }
}

/// What a client sends before it commits or restores a version.
#[derive(Debug, Default)]
pub struct Upload {
    pub parts: Vec<KeptPart>,
    pub bytes: u64,
    pub layout: Vec<u8>,
    /// Descriptors did not arrive, or were more than the keeper may have.
    pub is_short: bool,
}

impl Upload {
    /// Adds descriptors. `None`, and nothing is added, if the message breaks the rules.
    pub fn add_parts(&mut self, lengths: &[u64], descriptors: Vec<OwnedFd>) -> Option<()> {
        if lengths.len() != descriptors.len() || self.parts.len() + lengths.len() > MAX_PARTS {
            return None;
        }
        let sum = lengths.iter().try_fold(self.bytes, |sum, len| sum.checked_add(*len))?;
        self.bytes = sum;
        for (len, descriptor) in lengths.iter().zip(descriptors) {
            self.parts.push(KeptPart { len: *len, descriptor });
        }
        Some(())
    }

    /// Adds bytes of the layout. `None` if there are too many.
    pub fn add_layout(&mut self, bytes: &[u8]) -> Option<()> {
        if self.layout.len() + bytes.len() > MAX_LAYOUT {
            return None;
        }
        self.layout.extend(bytes);
        Some(())
    }
}

/// Makes the page of a version: memory that no process can shorten.
pub fn new_page() -> io::Result<OwnedFd> {
    use rustix::fs::MemfdFlags;
    let page =
        rustix::fs::memfd_create("vramp-keep", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&page, page::LEN)?;
    rustix::fs::fcntl_add_seals(&page, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(page)
}

/// Returns true if the descriptor is a page as [`new_page`] makes it. Only memory has seals, so that reading
/// and writing it waits for nothing.
pub fn is_page(descriptor: impl AsFd) -> bool {
    let seals = rustix::fs::fcntl_get_seals(&descriptor);
    let is_sealed = seals == Ok(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    let is_long = |stat: rustix::fs::Stat| stat.st_size.cast_unsigned() == page::LEN;
    is_sealed && rustix::fs::fstat(&descriptor).is_ok_and(is_long)
}

/// Reads a number of a page.
pub fn read_number(page: impl AsFd, at: usize) -> u64 {
    let mut bytes = [0; 8];
    // Of a page it fails for no number.
    let _ = rustix::io::pread(page, &mut bytes, (at * 8) as u64);
    u64::from_ne_bytes(bytes)
}

/// Reads epoch and state of a page.
pub fn read_word(page: impl AsFd) -> Word {
    Word::decode(read_number(page, page::WORD))
}

/// Writes a number of a page, all of it at once.
pub fn write_number(page: impl AsFd, at: usize, value: u64) {
    // It fails only where the machine has no memory for the page.
    let _ = rustix::io::pwrite(page, &value.to_ne_bytes(), (at * 8) as u64);
}
