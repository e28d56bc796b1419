//! Memory that is exported to other processes and imported from them.
//!
//! An exported descriptor is an opening of a file that the kernel shares between processes, with a
//! lock on the range that stands for the memory: see [`vramp_host::SharedFile`]. Memory without handle
//! and mapping is kept, and counted as used, while a descriptor of it is open anywhere. That is
//! checked only for memory that was exported, and again only for memory that nothing else keeps.
//!
//! Where the card is mapped to the host's memory, the file has the bytes, and any process imports
//! them. Otherwise the file has numbers, and only the machine that exported the memory imports it.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_host::{FileId, SharedKind, SharedRange};

use super::bytes::Content;
use super::memory::{By, Imported, Memory};
use super::refusal::{Outcome, Refusal};
use crate::{ExportedHandle, Handle, HandleType};

/// First bytes of the fabric handles of simulated cards.
const FABRIC: [u8; 8] = *b"vrampsim";

fn between_processes() -> Refusal {
    Refusal::not_supported(
        "the memory is of another simulator: export and import between simulators need both mapped \
         to the host's memory (SimulatorBuilder::mapped_to)",
    )
}

impl Memory {
    /// Returns the number of handles of a device that only descriptors keep.
    pub fn kept_by_exports(&self, device: usize) -> usize {
        let kept = self.exports.kept.iter();
        kept.filter(|number| self.physical[number].device == device).count()
    }

    pub fn export(&mut self, device: usize, handle: Handle) -> Outcome<ExportedHandle> {
        let number = handle.number();
        let owned = self.owned(device, handle)?;
        if owned.handle_type == HandleType::None {
            return Err(Refusal::invalid(format!(
                "handle {number:#x} was created for this process only: create it as posix-fd"
            )));
        }
        if let Some(range) = owned.content.shared_range() {
            return Ok(ExportedHandle::PosixFd(range.export()?));
        }
        let number = self.physical_of(handle);
        let physical = self.physical.get_mut(&number).expect("a handle has physical memory");
        let (file, offset) = self.exports.entered(number, physical)?;
        match physical.handle_type {
            HandleType::Fabric => {
                let mut bytes = [0; 64];
                bytes[..8].copy_from_slice(&FABRIC);
                bytes[8..24].copy_from_slice(&file.id().to_bytes());
                bytes[24..32].copy_from_slice(&offset.to_le_bytes());
                Ok(ExportedHandle::Fabric(bytes))
            }
            _ => {
                let tag = physical.card.unwrap_or(device) as u16;
                Ok(ExportedHandle::PosixFd(file.export(offset, physical.len, tag)?))
            }
        }
    }

    pub fn import(
        &mut self,
        device: usize,
        exported: &ExportedHandle,
        len: Bytes,
    ) -> Outcome<Handle> {
        self.check_pages("the length", len.count())?;
        match exported {
            ExportedHandle::PosixFd(fd) => {
                let range = SharedRange::of(fd.as_fd())?.ok_or_else(|| {
                    Refusal::invalid("the descriptor is not of a simulated card's memory")
                })?;
                match self.exports.own(range.file, range.offset) {
                    Some(number) => Ok(self.import_own(device, number, len)),
                    None => self.import_shared(device, range, len),
                }
            }
            ExportedHandle::Fabric(bytes) => {
                if bytes[..8] != FABRIC {
                    return Err(Refusal::invalid("the bytes are not of a simulated card's memory"));
                }
                let part = |at: usize| bytes[at..at + 8].try_into().expect("eight bytes");
                let file = FileId::from_bytes(bytes[8..24].try_into().expect("sixteen bytes"));
                if self.exports.file().is_none_or(|own| own.id() != file) {
                    return Err(between_processes());
                }
                let number = self.exports.own(file, u64::from_le_bytes(part(24)));
                let number = number.ok_or_else(|| Refusal::invalid("the memory was released"))?;
                Ok(self.import_own(device, number, len))
            }
        }
    }

    fn import_own(&mut self, device: usize, number: u64, len: Bytes) -> Handle {
        let body = &self.physical[&number];
        let imported = Imported { physical: Some(number), len: body.len };
        let card = body.card;
        self.add_imported(device, len, imported, card, Content::default())
    }

    fn import_shared(&mut self, device: usize, range: SharedRange, len: Bytes) -> Outcome<Handle> {
        let host = self.host.as_ref().filter(|_| range.kind == SharedKind::Bytes);
        let host = Arc::clone(host.ok_or_else(between_processes)?);
        let imported = Imported { physical: None, len: range.len };
        // Machines are taken to count their devices alike.
        let card = if self.has_device(range.tag) { usize::from(range.tag) } else { device };
        let content = Content::shared(host, range);
        Ok(self.add_imported(device, len, imported, Some(card), content))
    }

    /// Returns a descriptor that keeps the memory mapped in `range`.
    pub fn export_dma_buf(&mut self, device: usize, range: AddrRange) -> Outcome<OwnedFd> {
        if self.owner(range) != Some(device) {
            return Err(Refusal::invalid(format!("{range} is not of this device")));
        }
        let mut numbers = BTreeSet::new();
        let mapped = self.pieces(range, By::Mapped, |piece| {
            numbers.insert(piece.physical);
        });
        if mapped.is_err() || range.len.is_zero() {
            return Err(Refusal::invalid(format!("{range} is not mapped without gaps")));
        }
        let mut ranges = Vec::with_capacity(numbers.len());
        for number in numbers {
            let physical = self.physical.get_mut(&number).expect("a piece names live memory");
            if physical.card.is_none() || physical.content.shared_range().is_some() {
                return Err(Refusal::not_supported(
                    "a dma-buf of host memory or of another process's memory",
                ));
            }
            let (_, offset) = self.exports.entered(number, physical)?;
            ranges.push((offset, physical.len));
        }
        Ok(self.exports.file().expect("memory was entered").hold(&ranges)?)
    }
}
