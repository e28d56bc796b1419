//! PyTorch's tensors in other processes.
//!
//! 1. *share* publishes the block, or the segment of PyTorch's own allocator, that contains an address. The
//!    first call for it exports it; later ones return the same ticket, so another process that receives two
//!    tensors of one storage knows that they are the same.
//! 2. *open* imports the memory of a ticket, *close* ends that. The caller has waited for all work on it.
//! 3. Freeing the block withdraws what is published. The allocator keeps the block for processes that have it
//!    open still.
//!
//! Tickets carry no grant. PyTorch counts each tensor that it sends, in memory of both processes, and does not
//! free its block before the receiver has released it. So a block is published for as long as a ticket of it
//! can be on its way, also where a message is lost: then PyTorch itself keeps the block, as it does without
//! vramp. A grant for each message would never end there.
//!
//! Growth: a share is O(log n) in the shared blocks, and so is each free while any block is shared; a free
//! reads one number otherwise.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vramp_alloc::Bytes;
use vramp_alloc::device::HandleType;
use vramp_alloc::sharing::{OpenedMemory, SharedMemory};

use super::{TORCH, Torch, print};
use crate::abi::vramp_status_t::{self, *};
use crate::exchange::exchange;
use crate::pointers;
use crate::pointers::write_out;
use crate::status::{Failure, Kind, Result, check_fork, status_of};

/// Largest length of a ticket in bytes.
const TICKET_MAX: usize = 160;

/// A ticket for memory, and where an address lies in it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(non_camel_case_types)]
pub struct vramp_torch_ticket_t {
    /// Distance of the address from the first byte of the shared memory.
    pub offset: u64,
    /// Number of bytes of the ticket.
    pub length: u64,
    /// The ticket.
    pub bytes: [u8; 160],
}

/// Memory of another process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(non_camel_case_types)]
pub struct vramp_torch_opened_t {
    /// Number for vramp_torch_share_close.
    pub number: u64,
    /// Address of its first byte here.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// What is shared now.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub struct vramp_torch_shared_t {
    /// Blocks and segments that other processes can open.
    pub published: u64,
    /// Blocks and segments that are kept for other processes: those published, and freed ones that are still
    /// open elsewhere.
    pub exported: u64,
    /// Memory of other processes that is open here.
    pub opened: u64,
    /// Its bytes.
    pub opened_bytes: u64,
}

/// What PyTorch shares, of all devices.
pub(super) struct Shares {
    /// Number of entries of `published`.
    count: AtomicUsize,
    /// By device and first address of the block or segment.
    published: Mutex<BTreeMap<(c_int, u64), SharedMemory>>,
    opened: Mutex<Opened>,
}

struct Opened {
    last: u64,
    /// With the device, by number.
    live: BTreeMap<u64, (c_int, OpenedMemory)>,
}

impl Shares {
    pub(super) const fn new() -> Shares {
        Shares {
            count: AtomicUsize::new(0),
            published: Mutex::new(BTreeMap::new()),
            opened: Mutex::new(Opened { last: 0, live: BTreeMap::new() }),
        }
    }

    /// Withdraws a block or segment that is about to be freed. What other processes have open stays open.
    #[inline]
    pub(super) fn withdraw(&self, device: c_int, addr: u64) {
        if self.count.load(Ordering::Acquire) > 0 {
            self.withdraw_published(device, addr);
        }
    }

    #[cold]
    fn withdraw_published(&self, device: c_int, addr: u64) {
        let mut published = lock(&self.published);
        let withdrawn = published.remove(&(device, addr));
        self.count.store(published.len(), Ordering::Release);
        drop(published);
        // Takes the lock of the allocator.
        drop(withdrawn);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Torch {
    /// Publishes the block or segment that contains an address.
    fn share(&self, addr: u64) -> Result<vramp_torch_ticket_t> {
        check_fork()?;
        let (device, start) = self.shareable(addr)?;
        let mut published = lock(&self.shares.published);
        let ticket = match published.get(&(device, start)) {
            Some(shared) => shared.ticket(),
            None => {
                let session = self.session(device)?;
                let of_segment = self.segments(device).export(session, start);
                let export = match of_segment {
                    Some(exported) => exported,
                    None => session.export(start)?,
                };
                let shared = exchange().share(export?)?;
                let ticket = shared.ticket();
                published.insert((device, start), shared);
                self.shares.count.store(published.len(), Ordering::Release);
                ticket
            }
        };
        drop(published);
        let encoded = ticket.to_bytes();
        let mut bytes = [0; TICKET_MAX];
        bytes[..encoded.len()].copy_from_slice(&encoded);
        Ok(vramp_torch_ticket_t { offset: addr - start, length: encoded.len() as u64, bytes })
    }

    /// Returns the device and the first address of the segment or block that contains an address.
    fn shareable(&self, addr: u64) -> Result<(c_int, u64)> {
        for (device, session) in self.opened_by_device() {
            if let Some(start) = self.segments(device).containing(addr) {
                return Ok((device, start));
            }
            if session.has(addr) {
                return Ok((device, addr));
            }
        }
        let mut opened = self.opened_by_device();
        let inside = opened.find_map(|(device, session)| {
            session.containing(addr).map(|(start, _)| (device, start.number()))
        });
        inside.ok_or_else(|| {
            let text = format!("no block of any device contains {addr:#x}");
            Failure::new(Kind::UnknownPointer, text)
        })
    }

    /// Opens memory of another process, or of this one, for work of a device.
    fn open_shared(&self, device: c_int, ticket: &[u8]) -> Result<vramp_torch_opened_t> {
        let session = self.session(device)?;
        let memory = exchange().open(session.allocator(), ticket)?;
        let range = memory.range();
        let mut opened = lock(&self.shares.opened);
        opened.last += 1;
        let number = opened.last;
        // A card that was granted access after the import, and before this is in the table.
        for peer in session.allocator().sharing().peers {
            memory.grant_access(peer)?;
        }
        opened.live.insert(number, (device, memory));
        Ok(vramp_torch_opened_t { number, address: range.start.number(), size: range.len.count() })
    }

    fn close_shared(&self, number: u64) -> Result<()> {
        check_fork()?;
        let removed = lock(&self.shares.opened).live.remove(&number);
        let (_, memory) = removed.ok_or_else(|| {
            let text = format!("no memory of another process is open under the number {number}");
            Failure::new(Kind::UnknownPointer, text)
        })?;
        Ok(memory.close()?)
    }

    /// Describes how the memory of an open device can be shared.
    fn sharing_text(&self, device: c_int) -> Result<String> {
        let Some(session) = self.opened_on(device)? else { return Ok(String::new()) };
        let sharing = session.allocator().sharing();
        let handles = match sharing.handle_type {
            HandleType::None => "other processes: no",
            HandleType::PosixFd => "other processes: by descriptors",
            HandleType::Fabric => "other processes: by fabric handles",
        };
        let rdma = if sharing.rdma { "on" } else { "off" };
        let links = &session.allocator().driver().info().peers;
        let mut text = format!(
            "{handles}; network cards (rdma): {rdma}; linked devices: {links:?}, with access now: {:?}",
            sharing.peers
        );
        if let Some(why) = sharing.fallback {
            text.push_str(&format!("; less than configured: {why}"));
        }
        Ok(text)
    }

    /// Grants a card access to the memory that is open for a device.
    pub(super) fn grant_opened(&self, device: c_int, peer: u32) -> Result<()> {
        let opened = lock(&self.shares.opened);
        let of_device = opened.live.values().filter(|(of, _)| *of == device);
        Ok(of_device.map(|(_, memory)| memory).try_for_each(|memory| memory.grant_access(peer))?)
    }

    /// Counts what is shared now. O(opened).
    fn shared(&self) -> Result<vramp_torch_shared_t> {
        check_fork()?;
        let published = lock(&self.shares.published).len() as u64;
        let exported = self.opened_by_device().map(|(device, session)| {
            (session.allocator().exported() + self.segments(device).exported()) as u64
        });
        let exported = exported.sum();
        let opened = lock(&self.shares.opened);
        let bytes: Bytes = opened.live.values().map(|(_, memory)| memory.range().len).sum();
        let (opened, opened_bytes) = (opened.live.len() as u64, bytes.count());
        Ok(vramp_torch_shared_t { published, exported, opened, opened_bytes })
    }
}

/// Publishes the memory that contains an address for other processes of the user, and returns a ticket. It
/// is withdrawn when the memory is freed. VRAMP_ERROR_UNKNOWN_POINTER for memory that is not vramp's.
///
/// # Safety
/// `ticket` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_share(
    address: *mut std::ffi::c_void,
    ticket: *mut vramp_torch_ticket_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((ticket, "ticket"), || TORCH.share(address as u64)) }
}

/// Opens the memory of a ticket for work of a device. Waits for the process that published it.
///
/// # Safety
/// `ticket` is null or has `length` readable bytes. `opened` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_share_open(
    device: c_int,
    ticket: *const u8,
    length: u64,
    opened: *mut vramp_torch_opened_t,
) -> vramp_status_t {
    let open = || {
        pointers::check(ticket.cast_mut(), "ticket")?;
        if length > TICKET_MAX as u64 {
            let text = format!("a ticket has at most {TICKET_MAX} bytes, and not {length}");
            return Err(Failure::new(Kind::Range, text));
        }
        // SAFETY: required by this function's contract.
        let ticket = unsafe { pointers::bytes(ticket.cast(), length as usize, "ticket") }?;
        TORCH.open_shared(device, ticket)
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((opened, "opened"), open) }
}

/// Closes memory of another process. All work on it is over, and seen to be. A failure is also printed:
/// destructors call this.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_share_close(number: u64) -> vramp_status_t {
    status_of(|| {
        TORCH.close_shared(number).inspect_err(|failure| {
            if failure.status() != VRAMP_ERROR_FORKED {
                print(failure);
            }
        })
    })
}

/// Writes a line of text about a device that is open: how its memory can be shared, and with which devices it is.
/// Empty if the device is not open. The text ends with a zero, and is cut after `capacity` bytes.
///
/// # Safety
/// `text` is null or has `capacity` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_sharing_text(
    device: c_int,
    text: *mut std::ffi::c_char,
    capacity: u64,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(text, "text")?;
        let Some(most) = (capacity as usize).checked_sub(1) else { return Ok(()) };
        let mut line = TORCH.sharing_text(device)?.into_bytes();
        line.truncate(most);
        line.push(0);
        // SAFETY: the line has at most `capacity` bytes, which are writable by this function's contract.
        unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), text.cast::<u8>(), line.len()) };
        Ok(())
    })
}

/// Counts what PyTorch shares with other processes now.
///
/// # Safety
/// `shared` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_shared(shared: *mut vramp_torch_shared_t) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((shared, "shared"), || TORCH.shared()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Settings;

    fn torch(conf: &str) -> Torch {
        let torch = Torch::new();
        torch.settings.set(Settings::of("sim", conf)).unwrap();
        torch
    }

    fn malloc(torch: &Torch, size: u64) -> u64 {
        // SAFETY: on the simulator any value is a stream.
        unsafe { torch.malloc_block(size, 0, std::ptr::null_mut()) }.unwrap().address
    }

    fn bytes(ticket: &vramp_torch_ticket_t) -> &[u8] {
        &ticket.bytes[..ticket.length as usize]
    }

    #[test]
    fn a_block_is_published_once_and_until_it_is_freed() {
        let torch = torch("");
        let blocks: Vec<u64> = (0..1000).map(|_| malloc(&torch, 4096)).collect();
        for &block in &blocks {
            let first = torch.share(block).unwrap();
            let inside = torch.share(block + 100).unwrap();
            assert_eq!(bytes(&first), bytes(&inside));
            assert_eq!((first.offset, inside.offset), (0, 100));
        }
        let shared = torch.shared().unwrap();
        assert_eq!((shared.published, shared.exported), (1000, 1000));
        for block in blocks {
            torch.free_block(block).unwrap();
        }
        assert_eq!(torch.shared().unwrap(), vramp_torch_shared_t::default());
    }

    #[test]
    fn a_freed_block_is_kept_while_it_is_open() {
        let torch = torch("");
        let block = malloc(&torch, 1 << 20);
        let ticket = torch.share(block).unwrap();
        let opened = torch.open_shared(0, bytes(&ticket)).unwrap();
        torch.free_block(block).unwrap();
        let shared = torch.shared().unwrap();
        assert_eq!((shared.published, shared.exported, shared.opened), (0, 1, 1));
        assert_eq!(shared.opened_bytes, opened.size);
        assert!(torch.open_shared(0, bytes(&ticket)).is_err(), "it was withdrawn");
        torch.close_shared(opened.number).unwrap();
        assert_eq!(
            torch.close_shared(opened.number).unwrap_err().status(),
            VRAMP_ERROR_UNKNOWN_POINTER
        );
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while torch.shared().unwrap().exported > 0 {
            assert!(std::time::Instant::now() < deadline, "the block was not released");
            std::thread::yield_now();
        }
    }

    #[test]
    fn segments_are_shared_as_a_whole() {
        let torch = torch("");
        for segment in [torch.segment_malloc(0, 20 << 20), torch.comm_malloc(0, 20 << 20)] {
            let segment = segment.unwrap().number();
            let ticket = torch.share(segment + (3 << 20)).unwrap();
            assert_eq!(ticket.offset, 3 << 20);
            let opened = torch.open_shared(0, bytes(&ticket)).unwrap();
            assert!(opened.size >= 20 << 20);
            torch.close_shared(opened.number).unwrap();
            torch.segment_free(segment, false).unwrap();
            assert_eq!(torch.shared().unwrap().published, 0);
        }
    }

    #[test]
    fn what_cannot_be_shared_is_refused() {
        let torch = torch("sharing=none");
        assert_eq!(torch.share(64).unwrap_err().status(), VRAMP_ERROR_UNKNOWN_POINTER);
        let block = malloc(&torch, 1 << 20);
        assert_eq!(torch.share(block).unwrap_err().status(), VRAMP_ERROR_UNSUPPORTED);
        assert_eq!(torch.open_shared(0, b"no ticket").unwrap_err().status(), VRAMP_ERROR_TICKET);
        assert!(torch.sharing_text(0).unwrap().starts_with("other processes: no"));
    }
}
