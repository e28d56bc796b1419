//! Memory that descriptors outside keep: see `sharing.rs`.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use vramp_host::{FileId, MappedMemory, SharedFile, SharedKind};

use super::memory::Physical;
use super::refusal::Outcome;

/// Numbers stand for whole processor pages, as offsets of bytes do.
const NUMBER_ALIGN: u64 = 4096;

#[derive(Debug, Default)]
pub(super) struct Exports {
    host: Option<Arc<MappedMemory>>,
    /// The file where no memory of the host is mapped. Made by the first export.
    numbers: Option<SharedFile>,
    /// First number that was not given.
    next_number: u64,
    /// Offset in the file of live memory that was exported, by its number.
    offsets: HashMap<u64, u64>,
    /// The reverse of `offsets`.
    by_offset: HashMap<u64, u64>,
    /// Memory that descriptors keep and nothing else.
    pub kept: BTreeSet<u64>,
}

impl Exports {
    pub fn new(host: Option<Arc<MappedMemory>>) -> Exports {
        Exports { host, ..Exports::default() }
    }

    pub fn file(&self) -> Option<&SharedFile> {
        self.host.as_deref().map(MappedMemory::shared).or(self.numbers.as_ref())
    }

    /// Returns the file and the offset of memory in it.
    pub fn entered(&mut self, number: u64, physical: &mut Physical) -> Outcome<(&SharedFile, u64)> {
        if self.host.is_none() && self.numbers.is_none() {
            self.numbers = Some(SharedFile::new(SharedKind::Numbers)?);
        }
        let next_number = &mut self.next_number;
        let offset = *self.offsets.entry(number).or_insert_with(|| {
            physical.content.export().unwrap_or_else(|| {
                let end = *next_number + physical.len.next_multiple_of(NUMBER_ALIGN);
                std::mem::replace(next_number, end)
            })
        });
        self.by_offset.insert(offset, number);
        Ok((self.file().expect("it exists or was made"), offset))
    }

    /// Returns true if a descriptor keeps this memory, which has neither handle nor mapping.
    pub fn keeps(&mut self, number: u64, physical: &Physical) -> bool {
        let Some(offset) = self.offsets.get(&number) else { return false };
        // If the kernel cannot tell, the memory stays.
        let held =
            self.file().is_none_or(|file| file.is_held(*offset, physical.len).unwrap_or(true));
        if held {
            self.kept.insert(number);
        }
        held
    }

    pub fn kept_only_by_descriptors(&self) -> Vec<u64> {
        self.kept.iter().copied().collect()
    }

    /// Returns true if no live memory was exported.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// Forgets memory that is destroyed.
    pub fn forget(&mut self, number: u64) {
        if self.is_empty() {
            return;
        }
        if let Some(offset) = self.offsets.remove(&number) {
            self.by_offset.remove(&offset);
            self.kept.remove(&number);
        }
    }

    /// Returns the number of the memory that a descriptor of this machine stands for.
    pub fn own(&self, file: FileId, offset: u64) -> Option<u64> {
        let same = self.file().is_some_and(|own| own.id() == file);
        same.then(|| self.by_offset.get(&offset).copied()).flatten()
    }
}
