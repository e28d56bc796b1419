//! Copies of contents on the host or on a disk, and the transfers that make and use them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};

use super::contents::Contents;
use crate::disk::{DiskStore, DiskTransfer};
use crate::host::{HostAllocation, HostPool};
use crate::movers::{
    DiskBudget, DiskCopy, DiskSource, DiskTarget, GpuEndpoint, MoveError, Mover, StagedTransfer,
    Transfer, disk_failed,
};

/// Pieces that are read ahead at a time.
const READS: usize = 8;

/// Where copies go.
#[derive(Clone)]
pub(super) struct Below {
    pub mover: Mover,
    pub disk: Option<Arc<DiskStore>>,
}

/// A copy of contents.
pub(super) struct Copy {
    pub contents: Contents,
    pub place: Place,
    /// Bytes that were copied, from the front.
    pub valid: Bytes,
    /// Allocations that the pool had made when its contents were listed.
    pub allocations: u64,
}

/// Where a copy is.
pub(super) enum Place {
    /// In host memory that is as long as the contents, or is grown before more is copied.
    Host(HostAllocation),
    /// On a disk. It is as long as what was copied.
    Disk(OnDisk),
}

/// A copy on a disk.
pub(super) struct OnDisk {
    copy: Arc<DiskCopy>,
    ahead: Option<Ahead>,
    /// Dropped behind the copy.
    trim: TrimOnDrop,
}

/// The first bytes of a copy on a disk, in host memory.
pub(super) struct Ahead {
    host: HostAllocation,
    bytes: Bytes,
}

/// Removes files without contents.
pub(super) struct TrimOnDrop(Arc<DiskStore>);

impl Drop for TrimOnDrop {
    fn drop(&mut self) {
        self.0.trim();
    }
}

impl Copy {
    /// Returns the bytes of pinned memory.
    pub fn on_host(&self) -> Bytes {
        match &self.place {
            Place::Host(host) => host.len(),
            Place::Disk(disk) => disk.ahead.as_ref().map_or(Bytes::ZERO, |ahead| ahead.host.len()),
        }
    }

    /// Returns the bytes charged to the disk. O(pieces).
    pub fn on_disk(&self) -> Bytes {
        match &self.place {
            Place::Host(_) => Bytes::ZERO,
            Place::Disk(disk) => disk.copy.charged(),
        }
    }

    /// Takes the bytes behind the first `len` for not copied.
    pub fn shorten(&mut self, len: Bytes) {
        self.valid = self.valid.min(len);
        let Place::Disk(disk) = &mut self.place else { return };
        Arc::get_mut(&mut disk.copy).expect(UNUSED).truncate(len);
        if let Some(ahead) = &mut disk.ahead {
            ahead.bytes = ahead.bytes.min(len);
        }
    }

    /// Frees host memory that contents on the disk were read into.
    pub fn free_ahead(&mut self) {
        if let Place::Disk(disk) = &mut self.place {
            disk.ahead = None;
        }
    }

    /// Reads bytes of the copy, which were copied. Pieces on a disk are read as a whole, one after the
    /// other.
    pub fn read(&self, pool: &HostPool, at: Bytes, out: &mut [u8]) -> Result<(), MoveError> {
        let end = at + Bytes::new(out.len() as u64);
        let host = match &self.place {
            Place::Host(host) => host,
            Place::Disk(disk) => match &disk.ahead {
                Some(ahead) if end <= ahead.bytes => &ahead.host,
                _ => return disk.read(pool, at, out),
            },
        };
        Ok(host.read(at, out)?)
    }
}

const UNUSED: &str = "a transfer that reads the copy ends before";

impl OnDisk {
    pub fn new(store: &Arc<DiskStore>) -> OnDisk {
        let (copy, trim) = (Arc::new(DiskCopy::empty(store)), TrimOnDrop(Arc::clone(store)));
        OnDisk { copy, ahead: None, trim }
    }

    fn read(&self, pool: &HostPool, mut at: Bytes, out: &mut [u8]) -> Result<(), MoveError> {
        let staging = pool.allocate(self.copy.longest())?;
        let mut rest = out;
        while !rest.is_empty() {
            let part = self.copy.part_at(at);
            let len = part.len.min(Bytes::new(rest.len() as u64));
            let spans = staging.spans(Bytes::ZERO, part.stored)?;
            self.copy.begin_read(part, &spans)?.wait().map_err(disk_failed)?;
            let (now, later) = rest.split_at_mut(len.count() as usize);
            staging.read(part.skip, now)?;
            (rest, at) = (later, at + len);
        }
        Ok(())
    }

    /// Reads the first `need` bytes, which were copied, into host memory, as far as they are not there.
    /// Calls `note` with the bytes to read and those read. After an error all is as before.
    pub fn read_ahead(
        &mut self,
        pool: &HostPool,
        need: Bytes,
        note: impl Fn(Bytes, Bytes),
    ) -> Result<(), MoveError> {
        let ahead = match &mut self.ahead {
            Some(ahead) => ahead,
            none => none.insert(Ahead { host: pool.allocate(need)?, bytes: Bytes::ZERO }),
        };
        if need <= ahead.bytes {
            return Ok(());
        }
        let more = need.saturating_sub(ahead.host.len());
        let grown = if more.is_zero() { Ok(()) } else { ahead.host.grow(more) };
        let read = grown.map_err(MoveError::from).and_then(|()| {
            let (from, all) = (ahead.bytes, need - ahead.bytes);
            note(all, Bytes::ZERO);
            read_into(&self.copy, pool, &ahead.host, from..need, |read| note(all, read))
        });
        match read {
            Ok(()) => ahead.bytes = need,
            Err(_) => drop(ahead.host.trim(ahead.bytes)),
        }
        if ahead.bytes.is_zero() {
            self.ahead = None;
        }
        read
    }
}

/// Reads bytes of a copy to the same place in `host`, a few pieces at a time. What a piece has besides goes
/// to other memory of the pool.
fn read_into(
    copy: &DiskCopy,
    pool: &HostPool,
    host: &HostAllocation,
    bytes: Range<Bytes>,
    note: impl Fn(Bytes),
) -> Result<(), MoveError> {
    let mut reads: VecDeque<(DiskTransfer<()>, Bytes, Option<HostAllocation>)> = VecDeque::new();
    let (mut at, mut read) = (bytes.start, Bytes::ZERO);
    loop {
        if at < bytes.end && reads.len() < READS {
            let part = copy.part_at(at);
            let len = part.len.min(bytes.end - at);
            let (low, high) = (part.skip, part.stored - part.skip - len);
            let other = low + high;
            let other = (!other.is_zero()).then(|| pool.allocate(other)).transpose()?;
            let mut spans = host.spans(at, len)?;
            if let Some(other) = &other {
                spans.splice(0..0, other.spans(Bytes::ZERO, low)?);
                spans.extend(other.spans(low, high)?);
            }
            reads.push_back((copy.begin_read(part, &spans)?, len, other));
            at += len;
        } else if let Some((transfer, len, _other)) = reads.pop_front() {
            transfer.wait().map_err(disk_failed)?;
            read += len;
            note(read);
        } else {
            return Ok(());
        }
    }
}

/// Contents on their way from the card to their copy.
pub(super) enum CopyOut {
    /// Behind the first so many bytes.
    Host(Transfer, Bytes),
    Disk(StagedTransfer<GpuEndpoint, DiskTarget>, Option<Ahead>, TrimOnDrop),
}

impl CopyOut {
    /// Starts to append ranges to a copy whose first `at` bytes are there.
    pub fn begin(
        mover: &Mover,
        ranges: Vec<AddrRange>,
        place: Place,
        at: Bytes,
    ) -> Result<CopyOut, Box<(Place, MoveError)>> {
        match place {
            Place::Host(host) => match mover.gather_to_host(ranges, host).at(at).start() {
                Ok(transfer) => Ok(CopyOut::Host(transfer, at)),
                Err(failed) => Err(Box::new((Place::Host(failed.host), failed.error))),
            },
            Place::Disk(OnDisk { copy, ahead, trim }) => {
                let copy = Arc::into_inner(copy).expect(UNUSED);
                let transfer = mover.gather_to_disk(ranges, copy, DiskBudget::Space);
                Ok(CopyOut::Disk(transfer, ahead, trim))
            }
        }
    }

    /// Returns the bytes that are safe, from the front.
    pub fn moved(&self) -> Bytes {
        match self {
            CopyOut::Host(transfer, _) => transfer.progress().moved,
            CopyOut::Disk(transfer, ..) => transfer.progress().moved,
        }
    }

    pub fn is_done(&self) -> bool {
        match self {
            CopyOut::Host(transfer, _) => transfer.is_done(),
            CopyOut::Disk(transfer, ..) => transfer.is_done(),
        }
    }

    /// Begins further copies, and waits until one has ended.
    pub fn advance(&mut self) -> Result<(), MoveError> {
        match self {
            CopyOut::Host(transfer, _) => transfer.advance(),
            CopyOut::Disk(transfer, ..) => transfer.wait_for_some(),
        }
    }

    /// Ends it, and returns the copy and how much of it is valid, from the front.
    pub fn end(self) -> (Place, Bytes) {
        match self {
            CopyOut::Host(transfer, at) => {
                let valid = at + transfer.progress().moved;
                (Place::Host(transfer.into_host()), valid)
            }
            CopyOut::Disk(transfer, ahead, trim) => {
                let copy = transfer.into_copy();
                let valid = copy.len();
                (Place::Disk(OnDisk { copy: Arc::new(copy), ahead, trim }), valid)
            }
        }
    }
}

/// Contents on their way back from their copy.
pub(super) enum CopyBack {
    Host(Transfer),
    Disk(StagedTransfer<DiskSource, GpuEndpoint>, OnDisk),
    /// From what was read ahead: the first so many bytes.
    Ahead(Transfer, Bytes, OnDisk),
}

impl CopyBack {
    /// Starts to copy the bytes of a copy from `from` on into ranges, of which none is ready.
    pub fn begin(
        mover: &Mover,
        ranges: Vec<AddrRange>,
        place: Place,
        bytes: Range<Bytes>,
    ) -> Result<CopyBack, Box<(Place, MoveError)>> {
        let none = Bytes::ZERO;
        let start =
            |host| mover.scatter_to_device(ranges.clone(), host).at(bytes.start).ready(none);
        match place {
            Place::Host(host) => match start(host).start() {
                Ok(transfer) => Ok(CopyBack::Host(transfer)),
                Err(failed) => Err(Box::new((Place::Host(failed.host), failed.error))),
            },
            Place::Disk(mut disk) => match disk.ahead.take_if(|ahead| bytes.end <= ahead.bytes) {
                Some(Ahead { host, bytes }) => match start(host).start() {
                    Ok(transfer) => Ok(CopyBack::Ahead(transfer, bytes, disk)),
                    Err(failed) => {
                        disk.ahead = Some(Ahead { host: failed.host, bytes });
                        Err(Box::new((Place::Disk(disk), failed.error)))
                    }
                },
                None => {
                    let transfer = mover.scatter_from_disk(&disk.copy, bytes.start, ranges);
                    Ok(CopyBack::Disk(transfer.ready(none), disk))
                }
            },
        }
    }

    /// Lets the first `ready` bytes be copied.
    pub fn allow(&mut self, ready: Bytes) {
        match self {
            CopyBack::Host(transfer) | CopyBack::Ahead(transfer, ..) => transfer.allow(ready),
            CopyBack::Disk(transfer, _) => transfer.allow(ready),
        }
    }

    /// Begins further copies. Returns the bytes that arrived, from the front.
    pub fn poll(&mut self) -> Result<Bytes, MoveError> {
        match self {
            CopyBack::Host(transfer) | CopyBack::Ahead(transfer, ..) => {
                transfer.poll().map(|_| transfer.progress().moved)
            }
            CopyBack::Disk(transfer, _) => transfer.poll().map(|_| transfer.progress().moved),
        }
    }

    /// Waits until some more or all has arrived. Returns the bytes that have, and whether all have.
    pub fn advance(&mut self) -> Result<(Bytes, bool), MoveError> {
        match self {
            CopyBack::Host(transfer) | CopyBack::Ahead(transfer, ..) => {
                if !transfer.is_done() {
                    transfer.advance()?;
                }
                Ok((transfer.progress().moved, transfer.is_done()))
            }
            CopyBack::Disk(transfer, _) => {
                transfer.wait_for_some()?;
                Ok((transfer.progress().moved, transfer.is_done()))
            }
        }
    }

    /// Ends it, and returns the copy.
    pub fn end(self) -> Place {
        match self {
            CopyBack::Host(transfer) => Place::Host(transfer.into_host()),
            CopyBack::Disk(transfer, disk) => {
                drop(transfer);
                Place::Disk(disk)
            }
            CopyBack::Ahead(transfer, bytes, mut disk) => {
                disk.ahead = Some(Ahead { host: transfer.into_host(), bytes });
                Place::Disk(disk)
            }
        }
    }
}
