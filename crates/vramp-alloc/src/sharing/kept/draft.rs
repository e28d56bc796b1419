//! Memory of a name while it is made.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_core::{AddrRange, Bytes, Shortage, StreamId};
use vramp_driver::{DriverError, ExportedHandle, HandleType, MemoryLocation, MemoryProperties};
use vramp_ipc::keep::{Draft, DraftOptions, Keeper, Lock};

use super::layout::{self, Placed};
use super::memory::{KeptMemory, MapAs};
use super::{KeptError, card_of};
use crate::Allocator;
use crate::allocator::Relief;
use crate::error::{AllocError, Unusable, UseError};
use crate::exec::is_capacity_error;
use crate::observe::Event;
use crate::shared::Shared;
use crate::sharing::import::{Imported, Mapping};

/// Alignment of what is placed in a draft: that of any allocation.
const ALIGN: u64 = 512;

/// What kept memory is made as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptOptions {
    /// Most bytes that will be placed in it, with 511 more for each place. Addresses are reserved for them, and
    /// the keeper makes room for them by its limit; memory is created as it is placed.
    pub bytes: Bytes,
    /// Length of one physical handle, in whole pages. 1 GiB by default.
    pub part: Bytes,
    /// Which memory without holders the keeper drops first for others: the lowest. 0 by default.
    pub priority: i32,
    /// How long the keeper keeps it when no process has it open. For ever by default.
    pub kept_for: Option<Duration>,
}

impl Default for KeptOptions {
    fn default() -> KeptOptions {
        KeptOptions { bytes: Bytes::ZERO, part: Bytes::gib(1), priority: 0, kept_for: None }
    }
}

/// Memory of a name that is not visible yet. Dropping it frees the memory, as the end of the process does.
#[must_use = "the memory is freed when this is dropped"]
#[derive(Debug)]
pub struct KeptDraft {
    memory: Imported,
    draft: Draft,
    name: String,
    part: Bytes,
    /// Bytes of the parts that the commit will hand over.
    added: Bytes,
    used: Bytes,
    patience: Duration,
}

/// # Memory that outlives its process
impl Allocator {
    /// Begins memory of a name, which becomes its current one when it is committed. A second draft of one name
    /// waits for the first, until `deadline`: [`KeptDraft::current`] says what there is then. One driver call and one
    /// message each way.
    ///
    /// # Errors
    /// The keeper is not there or refuses, the device exports no descriptors, or a driver call failed.
    pub fn draft_kept(
        &self,
        keeper: &Keeper,
        name: &str,
        options: &KeptOptions,
        deadline: Instant,
    ) -> Result<KeptDraft, KeptError> {
        Unusable::check_fork()?;
        let info = self.driver().info();
        let page = info.limits.page;
        if !info.capabilities.virtual_memory || !info.capabilities.posix_fd {
            return Err(KeptError::Option("this device exports no descriptors of its memory"));
        }
        let whole = options.bytes.checked_round_up(page).filter(|bytes| !bytes.is_zero());
        let whole =
            whole.ok_or(KeptError::Option("kept memory has at least one byte: set `bytes`"))?;
        let part = options.part.checked_round_up(page).filter(|part| !part.is_zero());
        let part = part.ok_or(KeptError::Option("a part has at least one page: set `part`"))?;
        let wanted = DraftOptions {
            device: card_of(info),
            bytes: whole.count(),
            priority: options.priority,
            kept_for: options.kept_for,
        };
        let draft = keeper.draft(name, &wanted, deadline)?;
        let mapping = Mapping::reserve(&**self.driver(), whole, None)?;
        let range = mapping.whole;
        let memory = Imported::new(self, mapping, range);
        let (name, patience) = (name.to_owned(), self.patience());
        let (added, used) = (Bytes::ZERO, Bytes::ZERO);
        Ok(KeptDraft { memory, draft, name, part, added, used, patience })
    }
}

impl KeptDraft {
    /// Returns epoch and digest of what the name has already. Where two processes load the same at once, the
    /// second finds here what the first has committed meanwhile, drops its draft and opens it.
    pub fn current(&self) -> Option<(u64, [u8; 32])> {
        self.draft.current()
    }

    /// Returns the bytes that can still be placed.
    pub fn left(&self) -> Bytes {
        self.memory.range().len - self.used
    }

    /// Returns the bytes in use, with alignment.
    pub fn used(&self) -> Bytes {
        self.used
    }

    /// Returns the first address and the bytes that may be placed. Bytes from [`KeptDraft::used`] on have no memory.
    pub fn range(&self) -> AddrRange {
        self.memory.range()
    }

    /// Returns addresses of `size` bytes with memory, aligned to 512 bytes, behind those that were placed before.
    /// Contents are undefined. Creates the parts that they need: five driver calls for each.
    ///
    /// Without memory on the card it makes room as [`Allocator::malloc`] does.
    ///
    /// # Errors
    /// The draft is full, or the card is. What was placed stays.
    pub fn place(&mut self, size: Bytes) -> Result<AddrRange, KeptError> {
        Unusable::check_fork()?;
        let whole = self.memory.range();
        let asked = size.max(Bytes::new(1)).checked_round_up(Bytes::new(ALIGN));
        let left = self.left();
        let full = KeptError::DraftFull { asked: size, left, bytes: whole.len };
        // A page ends with whole units, so the last one always fits.
        let asked = asked.filter(|asked| *asked <= left).ok_or(full)?;
        let end = self.used + asked;
        while self.added < end {
            self.add_part()?;
        }
        let placed = AddrRange::new(whole.start + self.used, size);
        self.used = end;
        Ok(placed)
    }

    fn add_part(&mut self) -> Result<(), KeptError> {
        let shared = Arc::clone(self.memory.shared());
        let driver = &*shared.driver;
        let mapped = self.memory.mapping().mapped;
        if mapped != self.added {
            return Err(KeptError::Option(
                "a driver call that failed could not be undone: drop this draft and begin another one",
            ));
        }
        let len = self.part.min(self.memory.range().len - mapped);
        let properties = MemoryProperties {
            location: MemoryLocation::Device,
            handle_type: HandleType::PosixFd,
            rdma: false,
        };
        let handle = shared.with_room(self.patience, len, || driver.create(len, properties))?;
        let peers = shared.group.peers();
        let mapping = self.memory.mapping_mut();
        let mut complete = || -> Result<_, DriverError> {
            let range = mapping.map(driver, handle, len)?;
            driver.set_access(range, &peers)?;
            driver.export(handle)
        };
        match complete() {
            Ok(ExportedHandle::PosixFd(descriptor)) => {
                self.draft.add(len.count(), descriptor);
                self.added += len;
                Ok(())
            }
            Ok(ExportedHandle::Fabric(_)) => unreachable!("it was created for descriptors"),
            Err(error) => {
                self.memory.mapping_mut().undo_to(driver, mapped);
                Err(error.into())
            }
        }
    }

    /// Notes that work on `stream` fills the memory: a commit waits for it.
    ///
    /// # Errors
    /// The stream is not one of the allocator's, or was destroyed.
    pub fn record_use(&self, stream: StreamId) -> Result<(), UseError> {
        self.memory.record_use(stream)
    }

    /// Gives the name up for others. The memory stays mapped, and is private to this process.
    pub fn abandon(self) -> Imported {
        let KeptDraft { memory, used, .. } = self;
        let range = AddrRange::new(memory.range().start, used);
        memory.with_range(range)
    }

    /// Waits on the host for the work that was recorded, and makes the memory the current one of its name. Other
    /// processes see it as a whole. `layout` says what lies where, `digest` which contents these are; both have their
    /// meaning for the programs. One message each way for 32 KiB and for 200 parts, and a driver call for
    /// [`MapAs::ReadOnly`].
    ///
    /// The calling process has it open, with a lock for reading if it is `ReadOnly`, and for writing otherwise.
    ///
    /// # Errors
    /// Nothing was placed, the wait failed, or the keeper refused or is gone. The memory is private to this process
    /// then, and stays mapped as long as the error does.
    pub fn commit(
        self,
        layout: &[u8],
        digest: [u8; 32],
        map: MapAs,
    ) -> Result<KeptMemory, CommitKeptError> {
        let KeptDraft { memory, draft, name, used, .. } = self;
        let placed = Placed { at: memory.range().start, used };
        let memory = memory.with_range(AddrRange::new(placed.at, used));
        let publish = || -> Result<_, KeptError> {
            if used.is_zero() {
                return Err(KeptError::Empty { name });
            }
            memory.wait_for_uses()?;
            if map == MapAs::ReadOnly {
                let mapped = AddrRange::new(placed.at, memory.mapping().mapped);
                memory.shared().driver.set_read_only(mapped)?;
            }
            let lock = match map {
                MapAs::ReadOnly => Lock::Read,
                MapAs::Writable => Lock::Write,
            };
            Ok(draft.commit(&layout::encode(placed, layout), digest, lock)?)
        };
        match publish() {
            Ok(hold) => Ok(KeptMemory::new(memory, hold, map)),
            Err(error) => {
                if map == MapAs::ReadOnly && !used.is_zero() {
                    // This process goes on with it as before. After a failure of the driver it may only read it.
                    let shared = memory.shared();
                    let mapped = AddrRange::new(placed.at, memory.mapping().mapped);
                    let _ = shared.driver.set_access(mapped, &shared.group.peers());
                }
                Err(CommitKeptError { error: Box::new(error), memory })
            }
        }
    }
}

/// A draft was not committed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CommitKeptError {
    /// Why the commit failed.
    #[source]
    pub error: Box<KeptError>,
    /// The memory, which is private to this process.
    pub memory: Imported,
}

impl Shared {
    /// Runs a driver call that creates `len` bytes outside the pools, and makes room for it as for a request.
    fn with_room<T>(
        &self,
        patience: Duration,
        len: Bytes,
        mut create: impl FnMut() -> Result<T, DriverError>,
    ) -> Result<T, AllocError> {
        let mut relief = Relief::new(patience);
        loop {
            let error = match create() {
                Err(error) if is_capacity_error(&error) => error,
                result => return Ok(result?),
            };
            let before = self.group.reserved();
            self.group.trim_by(len)?;
            if self.group.reserved() < before {
                continue;
            }
            let (used, free, largest, waiting) = (before, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
            let (reserved, limit, block_for) = (before, None, None);
            let shortage = Shortage {
                requested: len,
                reserved,
                used,
                free,
                largest,
                waiting,
                limit,
                block_for,
            };
            self.observers.notify(&Event::Short(&shortage));
            if !self.relieve(&mut relief, &shortage)? {
                let report = self.report(shortage, Some(error), StreamId::new(0));
                self.observers.notify(&Event::OutOfMemory(&report));
                return Err(AllocError::OutOfMemory(Box::new(report)));
            }
        }
    }
}
