//! Physical memory, and who made an allocation.
//!
//! Adopted ranges.

use std::collections::BTreeMap;

use crate::HandleType;
use crate::sim::bytes::Content;

/// The code that made a plain allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// The device, by a call of the trait.
    Device,
    /// Other code of the process.
    Other,
}

/// Physical memory of a handle, or an imported handle of it.
#[derive(Debug)]
pub struct Physical {
    pub len: u64,
    /// Device that the handle belongs to.
    pub device: usize,
    /// Card that the bytes are on; `None` for host memory.
    pub card: Option<usize>,
    /// True if the card counts the memory as used for this handle.
    pub(super) counted: bool,
    /// Where the handle is mapped.
    pub(super) mapped_at: Vec<u64>,
    pub(super) released: bool,
    /// Number of live handles that were imported from this one.
    pub imports: usize,
    /// What this handle was imported from, with its true length.
    pub imported: Option<Imported>,
    pub handle_type: HandleType,
    pub rdma: bool,
    pub content: Content,
}

/// Where an imported handle's memory is.
#[derive(Clone, Copy, Debug)]
pub struct Imported {
    /// Number of the physical memory, if it is of the same machine.
    pub physical: Option<u64>,
    pub len: u64,
}

/// Adopted ranges, by start: length and device. They do not overlap.
#[derive(Debug, Default)]
pub struct Adoptions(pub(super) BTreeMap<u64, (u64, usize)>);

impl Adoptions {
    /// Returns the device that adopted all of a range.
    pub fn owner(&self, start: u64, end: u64) -> Option<usize> {
        let (at, (len, device)) = self.0.range(..=start).next_back()?;
        (end <= at + len).then_some(*device)
    }

    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(at, (len, _))| at + len > start)
    }
}
