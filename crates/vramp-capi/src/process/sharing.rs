//! Sharing for a program in Rust: objects that end themselves, instead of ids.

use std::time::Instant;

pub use vramp_alloc::sharing::{AccessChange, PinnedRange, Sharing};
use vramp_alloc::sharing::{OpenedMemory, SharedMemory, Ticket};

use super::{CallResult, OpenAllocator, StreamName};
use crate::sharing::tables::ticket_of;
use crate::status::{Failure, Kind, catch_failure, check_fork};
use crate::{device, handles, options};

/// A block that other processes may open. Dropping it closes the export: what is open stays open.
#[derive(Debug)]
pub struct SharedBlock(SharedMemory);

/// Memory of another process, open here. Dropping it closes it. It does not end with the allocator.
#[derive(Debug)]
pub struct ImportedBlock(OpenedMemory);

/// What an allocator shares at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharingState {
    /// How memory can be shared.
    pub sharing: Sharing,
    /// Number of exported blocks.
    pub exported: u64,
    /// Number of pinned handles.
    pub pinned: u64,
    /// Bytes of the pinned handles.
    pub pinned_bytes: u64,
}

impl SharedBlock {
    /// Returns the bytes of a ticket. With `keep_until_opened` it counts as a holder until it was opened
    /// once or revoked.
    ///
    /// # Errors
    /// The process is a forked child.
    pub fn ticket(&self, keep_until_opened: bool) -> CallResult<Vec<u8>> {
        catch_failure(|| {
            check_fork()?;
            Ok(ticket_of(&self.0, keep_until_opened)?.to_bytes())
        })
    }

    /// Ends the hold of a ticket that did not arrive. Returns false if it was opened.
    ///
    /// # Errors
    /// The bytes are no ticket, or the process is a forked child.
    pub fn revoke(&self, ticket: &[u8]) -> CallResult<bool> {
        catch_failure(|| {
            check_fork()?;
            let ticket = Ticket::from_bytes(ticket)
                .map_err(|error| Failure::new(Kind::Ticket, error.to_string()))?;
            Ok(self.0.revoke(&ticket))
        })
    }

    /// Returns the number of opens that importers have not closed.
    pub fn opens(&self) -> usize {
        self.0.opens()
    }

    /// Returns true while an importer has it open, or a ticket that keeps it was not opened.
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Closes the export, also while other threads wait for it.
    pub fn close(&self) {
        self.0.close();
    }

    /// Waits until it is not held. Returns false at the deadline.
    pub fn wait_released(&self, deadline: Instant) -> bool {
        self.0.wait_released(deadline)
    }
}

impl ImportedBlock {
    /// Returns the address of the exporter's block here.
    pub fn addr(&self) -> u64 {
        self.0.range().start.number()
    }

    /// Returns the bytes of the exporter's block.
    pub fn len(&self) -> u64 {
        self.0.range().len.count()
    }

    /// Returns false: an exported block has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.0.range().len.is_zero()
    }

    /// Waits for recorded work, unmaps the memory, and closes it at the exporter.
    ///
    /// # Errors
    /// The wait or a driver call failed. It is closed at the exporter all the same.
    pub fn close(self) -> CallResult<()> {
        catch_failure(|| {
            check_fork()?;
            Ok(self.0.close()?)
        })
    }
}

impl OpenAllocator {
    /// Opens an allocator on each device of a machine, in the order of their ordinals.
    ///
    /// # Errors
    /// As of [`OpenAllocator::open`]. None stays open.
    pub fn open_all(device: &str, options: &str) -> CallResult<Vec<OpenAllocator>> {
        let mut opened = Vec::new();
        let all = catch_failure(|| {
            check_fork()?;
            let options = options::Options::parse(options)?;
            for device in device::Device::open_all(device)? {
                let context = crate::context::Context::open_device(device, &options)?;
                opened.push(OpenAllocator(handles::insert(std::sync::Arc::new(context))?));
            }
            Ok(())
        });
        match all {
            Ok(()) => Ok(opened),
            Err(failure) => {
                for allocator in opened {
                    // The first failure is the one to report.
                    let _ = allocator.close();
                }
                Err(failure.into())
            }
        }
    }

    /// Waits on the host for the work queued on a stream so far.
    ///
    /// # Errors
    /// The stream is unknown, or a driver call failed.
    ///
    /// # Safety
    /// As of [`OpenAllocator::malloc`].
    pub unsafe fn synchronize(self, stream: StreamName) -> CallResult<()> {
        self.with(|context| {
            // SAFETY: this function's contract is the same.
            let stream = unsafe { context.named(stream) }?;
            context.synchronize(stream)
        })
    }

    /// Exports the block that begins at an address.
    ///
    /// # Errors
    /// As of `vramp_export`.
    pub fn export(self, addr: u64) -> CallResult<SharedBlock> {
        self.with(|context| Ok(SharedBlock(context.share(addr)?)))
    }

    /// Opens the memory of a ticket. Waits for the exporting process.
    ///
    /// # Errors
    /// As of `vramp_import`.
    pub fn import(self, ticket: &[u8]) -> CallResult<ImportedBlock> {
        self.with(|context| Ok(ImportedBlock(context.open_shared(ticket)?)))
    }

    /// Records that work queued on `stream`, so far and from now on, uses an import.
    ///
    /// # Errors
    /// The stream is unknown.
    ///
    /// # Safety
    /// As of [`OpenAllocator::malloc`].
    pub unsafe fn record_import(
        self,
        imported: &ImportedBlock,
        stream: StreamName,
    ) -> CallResult<()> {
        self.with(|context| {
            // SAFETY: this function's contract is the same.
            let stream = unsafe { context.named(stream) }?;
            Ok(imported.0.record_use(stream)?)
        })
    }

    /// Grants a card access to all memory of the allocator.
    ///
    /// # Errors
    /// As of `vramp_grant_access`.
    pub fn grant_access(self, device: u32) -> CallResult<AccessChange> {
        self.with(|context| Ok(context.allocator().grant_access(device)?))
    }

    /// Takes back the access of a card.
    ///
    /// # Errors
    /// As of `vramp_revoke_access`.
    pub fn revoke_access(self, device: u32) -> CallResult<AccessChange> {
        self.with(|context| Ok(context.allocator().revoke_access(device)?))
    }

    /// Pins a range. Without `len`, the live block that begins at `addr`.
    ///
    /// # Errors
    /// As of `vramp_pin`.
    pub fn pin(self, addr: u64, len: Option<u64>) -> CallResult<PinnedRange> {
        self.with(|context| {
            let len = len.map_or_else(|| context.usable(addr), Ok)?;
            context.pin(addr, len)
        })
    }

    /// Makes an allocator for memory that communication libraries register.
    ///
    /// # Errors
    /// As of `vramp_comm_pool`.
    pub fn comm_pool(self, name: &str) -> CallResult<OpenAllocator> {
        Ok(OpenAllocator(catch_failure(|| {
            let pool = handles::with(self.0, |context| context.comm_pool(name))?;
            handles::insert(std::sync::Arc::new(pool))
        })?))
    }

    /// Returns how the memory can be shared, and how much is.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn sharing(self) -> CallResult<SharingState> {
        self.with(|context| {
            let allocator = context.allocator();
            let (pinned, pinned_bytes) = allocator.pinned();
            Ok(SharingState {
                sharing: allocator.sharing(),
                exported: allocator.exported() as u64,
                pinned,
                pinned_bytes: pinned_bytes.count(),
            })
        })
    }
}
