//! Which bytes of a sleeping pool are contents, their copies on the host or on a disk, and the transfers that
//! make and use these.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use crate::disk::{DiskStore, DiskTransfer};
use crate::host::{HostAllocation, HostPool};
use crate::movers::{DiskCopy, Gather, MoveError, Mover, Stored, Transfer};

/// Pieces that are read ahead at a time.
const READS: usize = 8;

/// Where copies go.
#[derive(Clone)]
pub(super) struct Below {
    pub mover: Mover,
    pub disk: Option<Arc<DiskStore>>,
}

/// The contents of a pool: ranges in ascending order, which a copy has one behind the other.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    bytes: Gather,
}

impl Contents {
    pub fn new(ranges: &[AddrRange]) -> Contents {
        Contents { bytes: Gather::new(ranges.iter().copied()) }
    }

    pub fn len(&self) -> Bytes {
        self.bytes.len()
    }

    pub fn ranges(&self) -> &[AddrRange] {
        self.bytes.ranges()
    }

    /// Returns the ranges of the bytes `part` of the copy.
    pub fn pieces(&self, part: Range<Bytes>) -> impl Iterator<Item = AddrRange> {
        self.bytes.pieces(part.start, part.end)
    }

    /// Returns where a range begins in the copy; `None` if some of it is not contents. O(log ranges).
    pub fn find(&self, range: AddrRange) -> Option<Bytes> {
        let end = range.checked_end()?;
        let ranges = self.bytes.ranges();
        let own = ranges.get(ranges.partition_point(|own| own.start + own.len <= range.start))?;
        (own.start <= range.start && end <= own.start + own.len).then(|| self.below(range.start))
    }

    /// Returns the bytes of contents below an address. O(log ranges).
    pub fn below(&self, address: DeviceAddr) -> Bytes {
        self.bytes.below(address)
    }
}

/// Returns the bytes of contents below each chunk's end: chunks `..n` have the first `ends[n - 1]`.
pub(super) fn ends(contents: &Contents, chunks: &[AddrRange]) -> Vec<Bytes> {
    chunks.iter().map(|chunk| contents.below(chunk.start + chunk.len)).collect()
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
pub(super) struct Place {
    /// Host memory is as long as the contents, or is grown before more is copied. A copy on a disk is as
    /// long as what was copied.
    pub stored: Stored,
    ahead: Option<Ahead>,
    /// Dropped behind a copy on a disk.
    trim: Option<TrimOnDrop>,
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
            Place { stored: Stored::Host(host), .. } => host.len(),
            Place { ahead, .. } => ahead.as_ref().map_or(Bytes::ZERO, |ahead| ahead.host.len()),
        }
    }

    /// Returns the bytes charged to the disk. O(pieces).
    pub fn on_disk(&self) -> Bytes {
        match &self.place.stored {
            Stored::Host(_) => Bytes::ZERO,
            Stored::Disk(copy) => copy.charged(),
        }
    }

    /// Takes the bytes behind the first `len` for not copied.
    pub fn shorten(&mut self, len: Bytes) {
        self.valid = self.valid.min(len);
        if let Stored::Disk(copy) = &mut self.place.stored {
            Arc::get_mut(copy).expect(UNUSED).truncate(len);
        }
        if let Some(ahead) = &mut self.place.ahead {
            ahead.bytes = ahead.bytes.min(len);
        }
    }

    /// Frees host memory that contents on the disk were read into.
    pub fn free_ahead(&mut self) {
        self.place.ahead = None;
    }

    /// Reads bytes of the copy, which were copied. Pieces on a disk are read as a whole, one after the
    /// other.
    pub fn read(&self, pool: &HostPool, at: Bytes, out: &mut [u8]) -> Result<(), MoveError> {
        let end = at + Bytes::new(out.len() as u64);
        match (&self.place.ahead, &self.place.stored) {
            (Some(ahead), _) if end <= ahead.bytes => Ok(ahead.host.read(at, out)?),
            (_, Stored::Host(host)) => Ok(host.read(at, out)?),
            (_, Stored::Disk(copy)) => read(copy, pool, at, out),
        }
    }
}

const UNUSED: &str = "a transfer that reads the copy ends before";

impl Place {
    pub fn host(host: HostAllocation) -> Place {
        Place { stored: Stored::Host(host), ahead: None, trim: None }
    }

    pub fn disk(store: &Arc<DiskStore>) -> Place {
        let stored = Stored::Disk(Arc::new(DiskCopy::empty(store)));
        Place { stored, ahead: None, trim: Some(TrimOnDrop(Arc::clone(store))) }
    }

    pub fn is_on_disk(&self) -> bool {
        matches!(self.stored, Stored::Disk(_))
    }

    /// Reads the first `need` bytes of a copy on a disk, which were copied, into host memory, as far as they
    /// are not there. Calls `note` with the bytes to read and those read. After an error all is as before.
    pub fn read_ahead(
        &mut self,
        pool: &HostPool,
        need: Bytes,
        note: impl Fn(Bytes, Bytes),
    ) -> Result<(), MoveError> {
        let Stored::Disk(copy) = &self.stored else { return Ok(()) };
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
            read_into(copy, pool, &ahead.host, from..need, |read| note(all, read))
        });
        match read {
            Ok(()) => ahead.bytes = need,
            Err(_) => drop(ahead.host.split_off(ahead.bytes)),
        }
        if ahead.bytes.is_zero() {
            self.ahead = None;
        }
        read
    }
}

/// Reads bytes of a copy, piece by piece.
fn read(copy: &DiskCopy, pool: &HostPool, mut at: Bytes, out: &mut [u8]) -> Result<(), MoveError> {
    let staging = pool.allocate(copy.longest())?;
    let mut rest = out;
    while !rest.is_empty() {
        let part = copy.part_at(at);
        let len = part.len.min(Bytes::new(rest.len() as u64));
        let spans = staging.spans(Bytes::ZERO, part.stored)?;
        copy.begin_read(part, &spans)?.wait().map_err(MoveError::disk)?;
        let (now, later) = rest.split_at_mut(len.count() as usize);
        staging.read(part.skip, now)?;
        (rest, at) = (later, at + len);
    }
    Ok(())
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
            transfer.wait().map_err(MoveError::disk)?;
            read += len;
            note(read);
        } else {
            return Ok(());
        }
    }
}

/// Contents on their way between the card and their copy.
pub(super) struct Moving {
    pub transfer: Transfer<Stored>,
    rest: Rest,
}

/// What a place has besides that which a transfer copies.
struct Rest {
    /// The copy on a disk, and its bytes in host memory, if that memory is copied.
    behind: Option<(Stored, Bytes)>,
    ahead: Option<Ahead>,
    trim: Option<TrimOnDrop>,
}

impl Moving {
    /// Starts to append ranges to a copy whose first `at` bytes are there.
    pub fn out(
        mover: &Mover,
        ranges: Vec<AddrRange>,
        place: Place,
        at: Bytes,
    ) -> Result<Moving, Box<(Place, MoveError)>> {
        let Place { stored, ahead, trim } = place;
        Rest { behind: None, ahead, trim }.of(mover.copy_out(ranges, stored, at))
    }

    /// Starts to copy the bytes of a copy from `from` on into ranges, of which none is ready.
    pub fn back(
        mover: &Mover,
        ranges: Vec<AddrRange>,
        place: Place,
        bytes: Range<Bytes>,
    ) -> Result<Moving, Box<(Place, MoveError)>> {
        let Place { stored, mut ahead, trim } = place;
        let (from, behind) = match ahead.take_if(|ahead| bytes.end <= ahead.bytes) {
            Some(Ahead { host, bytes }) => (Stored::Host(host), Some((stored, bytes))),
            None => (stored, None),
        };
        Rest { behind, ahead, trim }.of(mover.copy_back(ranges, from, bytes.start))
    }

    /// Returns the bytes that arrived, from the front.
    pub fn moved(&self) -> Bytes {
        self.transfer.progress().moved
    }

    /// Ends it, and returns the copy, and the bytes that arrived, from the front.
    pub fn end(self) -> (Place, Bytes) {
        let (stored, moved) = self.transfer.into_stored();
        (self.rest.place(stored), moved)
    }
}

impl Rest {
    fn of(
        self,
        begun: Result<Transfer<Stored>, Box<(Stored, MoveError)>>,
    ) -> Result<Moving, Box<(Place, MoveError)>> {
        match begun {
            Ok(transfer) => Ok(Moving { transfer, rest: self }),
            Err(failed) => {
                let (stored, error) = *failed;
                Err(Box::new((self.place(stored), error)))
            }
        }
    }

    /// Returns the place, with what a transfer copied.
    fn place(self, copied: Stored) -> Place {
        let Rest { behind, ahead, trim } = self;
        match (behind, copied) {
            (Some((stored, bytes)), Stored::Host(host)) => {
                Place { stored, ahead: Some(Ahead { host, bytes }), trim }
            }
            (_, stored) => Place { stored, ahead, trim },
        }
    }
}
