//! Memory of a name, open in this process.

use std::time::Instant;

use vramp_core::{AddrRange, Bytes, StreamId};
use vramp_driver::{DriverError, ExportedHandle};
use vramp_host::fork::is_forked;
use vramp_ipc::keep::{Hold, Keeper, Lock};

use super::layout;
use super::{KeptError, card_of};
use crate::Allocator;
use crate::error::{Unusable, UseError};
use crate::sharing::import::{Imported, Mapping};

/// How work of the card may use memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MapAs {
    /// Work reads it. A write ends the context: see [`Driver::set_read_only`](crate::Driver::set_read_only).
    #[default]
    ReadOnly,
    /// Work reads and writes it. Other cards that have access to the allocator's memory have access.
    Writable,
}

/// How kept memory is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenKept {
    /// How it is mapped. For reading only, by default.
    pub map: MapAs,
    /// Lock that it is opened with. For reading, by default.
    pub lock: Lock,
    /// Whether to map it at the addresses that its publisher had, if they are free here. True by default.
    pub same_addresses: bool,
}

impl Default for OpenKept {
    fn default() -> OpenKept {
        OpenKept { map: MapAs::ReadOnly, lock: Lock::Read, same_addresses: true }
    }
}

/// Memory of a name, mapped here. Dropping it closes it.
#[must_use = "the memory is unmapped when this is dropped"]
#[derive(Debug)]
pub struct KeptMemory {
    memory: Imported,
    /// `None` once it is closed.
    hold: Option<Hold>,
    map: MapAs,
}

/// # Kept memory of other processes
impl Allocator {
    /// Opens the memory of a name: no copy, three driver calls for each part and two more. Waits for its lock until
    /// `deadline`.
    ///
    /// # Errors
    /// The keeper is not there, or has no such name, or the lock cannot be had; it is a lock for writing and the map is
    /// for reading only; the memory is on another card; or a driver call failed. Nothing stays open.
    pub fn open_kept(
        &self,
        keeper: &Keeper,
        name: &str,
        options: OpenKept,
        deadline: Instant,
    ) -> Result<KeptMemory, KeptError> {
        Unusable::check_fork()?;
        if options.map == MapAs::ReadOnly && options.lock == Lock::Write {
            return Err(KeptError::ReadOnly { name: name.to_owned() });
        }
        let hold = keeper.open(name, options.lock, deadline)?;
        let here = card_of(self.driver().info());
        if hold.device() != here {
            let (kept, here) = (hold.device().to_owned(), here.to_owned());
            return Err(KeptError::OtherCard { name: name.to_owned(), kept, here });
        }
        let unknown = || KeptError::Unknown { name: name.to_owned() };
        let (placed, _) = layout::decode(hold.layout()).ok_or_else(unknown)?;
        let lens = hold.parts().iter().map(|part| Bytes::new(part.len));
        let whole = lens.clone().try_fold(Bytes::ZERO, |sum, len| sum.checked_add(len));
        let page = self.driver().info().limits.page;
        let is_possible = |whole: &Bytes| !placed.used.is_zero() && placed.used <= *whole;
        let whole = whole.filter(is_possible).ok_or_else(unknown)?;
        if lens.clone().any(|len| len.is_zero() || !len.is_multiple_of(page)) {
            return Err(unknown());
        }
        let driver = &**self.driver();
        let at = options.same_addresses.then_some(placed.at);
        let mut mapping = Mapping::reserve(driver, whole, at)?;
        let map_all = || -> Result<(), KeptError> {
            for (part, len) in hold.parts().iter().zip(lens) {
                let exported = ExportedHandle::PosixFd(
                    part.descriptor.try_clone().map_err(KeptError::Descriptor)?,
                );
                let handle = driver.import(&exported, len)?;
                mapping.map(driver, handle, len)?;
            }
            match options.map {
                MapAs::ReadOnly => driver.set_read_only(mapping.whole)?,
                MapAs::Writable => {
                    driver.set_access(mapping.whole, &self.shared().group.peers())?
                }
            }
            Ok(())
        };
        if let Err(error) = map_all() {
            // What cannot be undone stays until the device is dropped.
            let _ = mapping.release(driver);
            return Err(error);
        }
        let range = AddrRange::new(mapping.whole.start, placed.used);
        Ok(KeptMemory::new(Imported::new(self, mapping, range), hold, options.map))
    }
}

impl KeptMemory {
    pub(super) fn new(memory: Imported, hold: Hold, map: MapAs) -> KeptMemory {
        KeptMemory { memory, hold: Some(hold), map }
    }

    /// Returns the addresses in use.
    pub fn range(&self) -> AddrRange {
        self.memory.range()
    }

    /// Returns how it is mapped.
    pub fn map(&self) -> MapAs {
        self.map
    }

    /// Returns the publisher's description.
    pub fn layout(&self) -> &[u8] {
        layout::decode(self.hold().layout()).map_or(&[], |(_, layout)| layout)
    }

    /// Returns epoch, digest, lock and whatever else the keeper's client knows.
    pub fn hold(&self) -> &Hold {
        self.hold.as_ref().expect("it is closed when it is dropped")
    }

    /// Returns the number of the last commit. No message.
    pub fn epoch(&self) -> u64 {
        self.hold().epoch()
    }

    /// Notes that work queued on `stream`, so far and from now on, uses the memory: what gives the lock or the
    /// memory back waits for it.
    ///
    /// # Errors
    /// The stream is not one of the allocator's, or was destroyed.
    pub fn record_use(&self, stream: StreamId) -> Result<(), UseError> {
        self.memory.record_use(stream)
    }

    /// Takes the lock for reading, and returns the epoch. The lock for writing is given back by
    /// [`commit`](KeptMemory::commit) or [`release_unchanged`](KeptMemory::release_unchanged).
    ///
    /// # Errors
    /// The wait for recorded work failed, the lock cannot be had until `deadline`, or the memory is torn.
    pub fn read(&self, deadline: Instant) -> Result<u64, KeptError> {
        self.lock(Lock::Read, deadline)
    }

    /// Takes the lock for writing: other processes read the memory no more. Gives a lock for reading back
    /// first, after it waited for recorded work. Returns the epoch before.
    ///
    /// A process that ends with this lock, or gives it back without a [`commit`](KeptMemory::commit), leaves the memory
    /// torn: it is an error to read it until a process wrote all of it and committed.
    ///
    /// # Errors
    /// It is mapped for reading only; the wait failed; or the lock cannot be had until `deadline`.
    pub fn write(&self, deadline: Instant) -> Result<u64, KeptError> {
        if self.map == MapAs::ReadOnly {
            return Err(KeptError::ReadOnly { name: self.hold().name().to_owned() });
        }
        self.lock(Lock::Write, deadline)
    }

    /// Gives any lock back, after it waited for recorded work. Without one other processes may write while this
    /// one reads.
    ///
    /// # Errors
    /// The wait failed.
    pub fn unlock(&self, deadline: Instant) -> Result<(), KeptError> {
        self.lock(Lock::None, deadline).map(drop)
    }

    fn lock(&self, lock: Lock, deadline: Instant) -> Result<u64, KeptError> {
        self.memory.wait_for_uses()?;
        Ok(self.hold().lock(lock, deadline)?)
    }

    /// Lets a waiting writer write, and takes the lock for reading again after it. Returns the epoch. For the moment
    /// between two steps: no message and no wait if no process waits to write.
    ///
    /// # Errors
    /// As of [`KeptMemory::read`]. Without the lock the memory must not be read.
    pub fn yield_to_writer(&self, deadline: Instant) -> Result<u64, KeptError> {
        let hold = self.hold();
        if hold.held_lock() == Lock::Read && !hold.writer_waits() {
            return Ok(hold.epoch());
        }
        // Also for a writer that comes only now: it is seen there.
        self.memory.wait_for_uses()?;
        Ok(hold.yield_to_writer(deadline)?)
    }

    /// Waits for recorded work and makes what was written the next epoch, whose number it returns. `then` is the lock
    /// that is kept.
    ///
    /// # Errors
    /// The wait failed; or the process has no lock for writing.
    pub fn commit(&self, then: Lock) -> Result<u64, KeptError> {
        self.memory.wait_for_uses()?;
        Ok(self.hold().commit(then)?)
    }

    /// Gives the lock for writing back, if nothing was written.
    ///
    /// # Errors
    /// The process has no lock for writing.
    pub fn release_unchanged(&self) -> Result<(), KeptError> {
        Ok(self.hold().release_unchanged()?)
    }

    /// Waits until the name has a later epoch than `than`, in this memory or in another version of it, and returns
    /// its number.
    ///
    /// # Errors
    /// There was none until `deadline`.
    pub fn wait_newer(&self, than: u64, deadline: Instant) -> Result<u64, KeptError> {
        Ok(self.hold().wait_newer(than, deadline)?)
    }

    /// Waits on the host for recorded work, unmaps the memory and gives the lock back. The keeper goes on keeping it.
    ///
    /// # Errors
    /// The wait failed, as while a recorded stream captures, or a driver call. The lock is given back with the end of
    /// the process then.
    pub fn close(mut self) -> Result<(), DriverError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), DriverError> {
        let Some(hold) = self.hold.take() else { return Ok(()) };
        self.memory.end().inspect_err(|_| {
            // It may still be mapped, and used by work.
            std::mem::forget(hold);
        })
    }
}

impl Drop for KeptMemory {
    fn drop(&mut self) {
        // In a forked child neither the map nor the lock is its own; their drops know that.
        if is_forked() {
            return;
        }
        // A drop cannot report a failure; `close` does.
        let _ = self.end();
    }
}
