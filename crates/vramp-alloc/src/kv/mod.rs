//! Arenas for caches: tensors at fixed addresses whose pages come and go together.
//!
//! A serving engine keeps the keys and values of its requests in one tensor for each layer. An [`Arena`] has
//! addresses for as many pages as there may ever be, so that graphs and kernels keep them, and memory for as
//! many as are in use:
//!
//! 1. [`Allocator::kv_arena`] reserves the addresses. No memory yet.
//! 2. [`Arena::commit`] gives pages memory, in all tensors at once or in none.
//! 3. [`Arena::park`] gives them up. They stay mapped: committed again they cost no driver call. When the
//!    pool would grow or a request finds no memory, parked pages are lent to it, the oldest first.
//! 4. [`Arena::release`] returns parked pages to the card, and so does [`Allocator::trim`].
//!
//! ```
//! use vramp_alloc::kv::{Layout, Options};
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! let allocator = Allocator::new(vramp_alloc::open("sim:h200")?, Config::default())?;
//! let stream = allocator.create_stream()?;
//! // Keys and values of 32 layers, up to 2 GiB each.
//! let layout = Layout { tensors: 64, bytes_each: Bytes::gib(2), ..Layout::default() };
//! let cache = allocator.kv_arena(layout, Options::default())?;
//! assert_eq!(cache.pages(), 1024);
//! println!("the keys of layer 0 lie at {}", cache.range(0));
//!
//! cache.commit([0..4, 9..10], stream)?;       // 5 pages of each tensor
//! // ... kernels on the stream use them ...
//! cache.park(1..3, stream)?;                  // behind what the stream has to do
//! cache.commit(2..3, stream)?;                // no driver call
//! assert_eq!(cache.stats().committed, 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Cost
//!
//! | call | driver calls | host |
//! |---|---|---|
//! | [`kv_arena`](Allocator::kv_arena) | one at most | O(cells log cells): a cell is 16 pages of a tensor, or a superpage |
//! | commit of parked pages | none; an event and a wait for each other stream that they were parked behind, and then a query whether the stream captures | O(pages log parks), one lock |
//! | commit of absent pages | a map and a set-access for each handle, and a create where the pool grows | O(handles), the pool's lock for one at a time |
//! | [`park`](Arena::park) | none | O(pages) |
//! | [`release`](Arena::release) | an unmap and a release for each handle, an event and a query for each stream | O(pages) |
//!
//! A handle is as long as a [superpage](Options::superpage) where whole ones are committed at once, and a page
//! otherwise; with [`Arrangement::Interleaved`] one handle has a page of all tensors. A handle goes back once
//! none of its pages is committed: [`Arena::park_first`] says which to give up first.
//!
//! # Growth
//!
//! 16 bytes for each page and about 300 for each cell; a dropped arena leaves nothing. With a full card a
//! commit runs the allocator's shortage handlers and waits as one malloc does, for all tensors together; then it
//! fails with its report, and what was parked before is parked again. A pinned page stays where it is: while parked it is not lent.
//!
//! Deliberately absent: which request has which page, contents, and copies. A page that was parked has lost
//! its contents once it was lent: read none of them.

mod ahead;
mod core;
mod error;
mod inner;
mod lend;
mod tables;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use vramp_core::{AddrRange, Bytes, StreamId};

use self::core::geometry::Geometry;
use self::core::pages::{Begun, Marks, Refused};
use crate::allocator::Allocator;
use crate::error::{AllocError, Unusable};
use ahead::Ahead;
use inner::Inner;
use tables::Table;

pub use self::core::geometry::{Arrangement, Layout};
pub use self::core::pages::PageState;
pub use error::KvError;
pub(crate) use tables::Tables;

impl Default for Layout {
    /// One tensor of 1 GiB in pages of 2 MiB.
    fn default() -> Layout {
        Layout {
            tensors: 1,
            bytes_each: Bytes::gib(1),
            page: Bytes::mib(2),
            arrangement: Arrangement::Separate,
        }
    }
}

/// Pages of an arena, in ranges: one, or several that have no page in common, in any order.
pub trait PageRanges {
    /// Returns the ranges.
    fn ranges(&self) -> &[Range<u32>];
}

impl PageRanges for Range<u32> {
    fn ranges(&self) -> &[Range<u32>] {
        std::slice::from_ref(self)
    }
}

impl PageRanges for [Range<u32>] {
    fn ranges(&self) -> &[Range<u32>] {
        self
    }
}

impl<const N: usize> PageRanges for [Range<u32>; N] {
    fn ranges(&self) -> &[Range<u32>] {
        self
    }
}

impl PageRanges for Vec<Range<u32>> {
    fn ranges(&self) -> &[Range<u32>] {
        self
    }
}

impl<R: PageRanges + ?Sized> PageRanges for &R {
    fn ranges(&self) -> &[Range<u32>] {
        (**self).ranges()
    }
}

/// Settings of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Longest handle: neighbours that are committed at once share one, up to this length; at least a page,
    /// which is the default. Longer ones cost fewer driver calls: 32 MiB, a sixteenth of them where 16 pages
    /// come at once. But a handle leaves only when none of its pages is committed: where an engine gives up
    /// pages here and there, most of its handles stay.
    pub superpage: Bytes,
    /// Most memory of the arena, parked pages included. `None`: as much as the pool may have.
    pub limit: Option<Bytes>,
    /// Most memory that is made ready before it is needed, on a thread of the arena: as much as the last
    /// commits found missing. Zero, the default, starts no thread.
    pub ahead: Bytes,
}

impl Default for Options {
    fn default() -> Options {
        Options { superpage: Bytes::ZERO, limit: None, ahead: Bytes::ZERO }
    }
}

/// What an arena has. Pages count once for all tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Pages in use by the caller.
    pub committed: u32,
    /// Mapped pages that the caller gave up.
    pub parked: u32,
    /// Pages that threads are backing.
    pub moving: u32,
    /// Pages of each tensor that there may be.
    pub pages: u32,
    /// Bytes of one page in all tensors.
    pub page_bytes: Bytes,
    /// The limit, in bytes.
    pub limit: Option<Bytes>,
}

impl KvStats {
    /// Returns the bytes in use.
    pub fn committed_bytes(&self) -> Bytes {
        self.page_bytes * u64::from(self.committed)
    }

    /// Returns the bytes that are mapped and given up.
    pub fn parked_bytes(&self) -> Bytes {
        self.page_bytes * u64::from(self.parked)
    }
}

/// An arena for caches. All methods may be called from several threads at once. Dropping it ends its
/// addresses; its memory serves other requests once the work is over that was queued by then on the streams
/// that it was committed for and parked behind, and that was [recorded](Arena::record_use).
pub struct Arena {
    inner: Arc<Inner>,
    ahead: Option<Ahead>,
}

/// # Arenas for caches
impl Allocator {
    /// Reserves addresses for the pages of tensors that are committed together. One driver call at most, no
    /// memory.
    ///
    /// # Errors
    /// [`KvError::Layout`] for lengths that no arena can have; [`KvError::Arena`] unless the preset is vramp
    /// and the device has virtual memory management, or where there are no addresses.
    pub fn kv_arena(&self, layout: Layout, options: Options) -> Result<Arena, KvError> {
        let shared = self.shared();
        let mut inner = shared.lock()?;
        inner.check_host().map_err(AllocError::from)?;
        let pool = inner.manager.virtual_pool_mut().filter(|pool| pool.heaps_serve.is_some());
        let pool = pool.ok_or(crate::graph::ArenaError::NotSupported)?;
        let pages = layout.check(pool.pool.config().page)?;
        let geometry = Geometry::new(&layout, pages, options.superpage);
        let id = pool.add_table(geometry).map_err(crate::graph::ArenaError::Driver)?;
        let table = pool.tables.get_mut(id);
        table.pages.set_limit(limit_pages(geometry, options.limit));
        let first = table.cells[0];
        let start = pool.exec.addr(pool.pool.arena_range(first).at);
        drop(inner);
        let whole = geometry.column() * u64::from(geometry.columns);
        let inner = Arc::new(Inner {
            shared: Arc::clone(shared),
            id,
            layout,
            geometry,
            range: AddrRange::new(start, whole),
            patience: self.patience(),
            moves: Mutex::new(0),
            moved: Condvar::new(),
        });
        let most = u32::try_from(options.ahead.count() / geometry.page_bytes().count());
        let most = most.unwrap_or(u32::MAX);
        // Without the thread the arena is dropped, and its addresses with it.
        let mut arena = Arena { inner, ahead: None };
        if most > 0 {
            arena.ahead = Some(Ahead::start(&arena.inner, most).map_err(KvError::Thread)?);
        }
        Ok(arena)
    }
}

impl Layout {
    /// Returns the pages of each tensor.
    fn check(&self, device_page: Bytes) -> Result<u32, KvError> {
        let Layout { tensors, bytes_each, page, .. } = *self;
        let refused = |why: &'static str| KvError::Layout { layout: *self, why };
        if page.is_zero() || !page.is_multiple_of(device_page) {
            return Err(refused("a page has to be a multiple of the device's page"));
        }
        if tensors == 0 || bytes_each.is_zero() {
            return Err(refused("there is nothing to reserve: give it tensors with a length"));
        }
        let pages = bytes_each.count().div_ceil(page.count());
        let whole =
            page.count().checked_mul(pages).and_then(|len| len.checked_mul(u64::from(tensors)));
        let fits = whole.is_some_and(|len| Bytes::new(len) <= vramp_core::PoolAddr::SPAN_LIMIT);
        match u32::try_from(pages) {
            Ok(pages) if fits => Ok(pages),
            _ => Err(refused("it is longer than a device has addresses: make it shorter")),
        }
    }
}

fn limit_pages(geometry: Geometry, limit: Option<Bytes>) -> u32 {
    let pages = limit.map(|limit| limit.count() / geometry.page_bytes().count());
    pages.map_or(u32::MAX, |pages| u32::try_from(pages).unwrap_or(u32::MAX))
}

impl Arena {
    /// Returns the layout that it was made with.
    pub fn layout(&self) -> Layout {
        self.inner.layout
    }

    /// Returns the pages of each tensor: they are numbered from 0.
    pub fn pages(&self) -> u32 {
        self.inner.geometry.pages
    }

    /// Returns all its addresses: those of the tensors, one behind the other without a gap.
    pub fn whole(&self) -> AddrRange {
        self.inner.range
    }

    /// Returns the addresses of a tensor. With [`Arrangement::Interleaved`] those from its first page on, of
    /// which every [`tensors`](Layout::tensors)-th page is its own.
    ///
    /// # Panics
    /// If there are not so many tensors.
    pub fn range(&self, tensor: u32) -> AddrRange {
        let Layout { tensors, page, arrangement, .. } = self.inner.layout;
        assert!(tensor < tensors, "there are {tensors} tensors, counted from 0, and not {tensor}");
        let whole = self.inner.range;
        match arrangement {
            Arrangement::Separate => {
                let len = self.inner.geometry.column();
                AddrRange::new(whole.start + len * u64::from(tensor), len)
            }
            Arrangement::Interleaved => {
                let skipped = page * u64::from(tensor);
                AddrRange::new(whole.start + skipped, whole.len - skipped)
            }
        }
    }

    /// Gives pages memory in all tensors, for work on `stream`, which is ordered behind work that still uses
    /// it: all of the pages, or none. The contents are not defined.
    ///
    /// Waits while another thread backs one of them: a shortage handler that this commit runs may call the
    /// arena, but not for its pages.
    ///
    /// # Errors
    /// [`KvError::Beyond`], [`KvError::Twice`], [`KvError::Committed`]: which pages are wrong.
    /// [`KvError::Limit`], and [`KvError::Memory`] as of a malloc, or because pages were parked behind work of
    /// another stream and one of the two captures now. Nothing is committed then, and what was parked stays parked.
    pub fn commit(&self, pages: impl PageRanges, stream: StreamId) -> Result<(), KvError> {
        let pages = pages.ranges();
        let (begun, ()) =
            self.begin(stream, |table| Ok((table.pages.begin_commit(pages, stream)?, ())))?;
        self.go_on(begun, stream)
    }

    /// Commits `count` pages of the arena's choice: the youngest of those that are parked first. Returns
    /// them, sorted, neighbours together.
    ///
    /// # Errors
    /// [`KvError::NoPages`] if fewer are left; otherwise as [`commit`](Arena::commit).
    pub fn take(&self, count: u32, stream: StreamId) -> Result<Vec<Range<u32>>, KvError> {
        let (begun, chosen) = self.begin(stream, |table| {
            let chosen = table.pages.choose(count);
            let found: u32 = chosen.iter().map(|range| range.len() as u32).sum();
            if found < count {
                return Err(Choice::TooFew { left: found });
            }
            Ok((table.pages.begin_commit(&chosen, stream)?, chosen))
        })?;
        self.go_on(begun, stream)?;
        Ok(chosen)
    }

    /// Begins a commit, as soon as no page of it is being backed by another thread.
    fn begin<R>(
        &self,
        stream: StreamId,
        choose: impl Fn(&mut Table) -> Result<(Begun, R), Choice>,
    ) -> Result<(Begun, R), KvError> {
        Unusable::check_fork()?;
        loop {
            let moves = *self.inner.lock_moves();
            let mut guard = self.inner.shared.lock()?;
            let inner = &mut *guard;
            inner.open_stream(stream).ok_or(KvError::UnknownStream(stream))?;
            let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
            let table = pool.tables.get_mut(self.inner.id);
            match choose(table) {
                Ok((mut begun, chosen)) => {
                    table.note_user(&pool.pool, stream);
                    let core = &pool.pool;
                    begun
                        .marks
                        .retain(|mark| !core.is_over(*mark) && !core.is_ordered(stream, *mark));
                    if let Err(error) = pool.order_commit(stream, &mut begun.marks) {
                        pool.tables.get_mut(self.inner.id).pages.undo_commit(begun, None);
                        drop(guard);
                        self.inner.note_moved();
                        return Err(AllocError::Driver(error).into());
                    }
                    return Ok((begun, chosen));
                }
                Err(Choice::Refused(Refused::Moving)) => {
                    drop(guard);
                    self.inner.wait_for_move(moves);
                }
                Err(Choice::Refused(refused)) => {
                    return Err(self.inner.refusal(refused, table.pages.limit()));
                }
                Err(Choice::TooFew { left }) => return Err(KvError::NoPages { left }),
            }
        }
    }

    /// Backs what a commit found absent, and ends it.
    fn go_on(&self, begun: Begun, stream: StreamId) -> Result<(), KvError> {
        let new = begun.new;
        let backed = match begun.absent.is_empty() {
            true => Ok(()),
            false => self.inner.back_begun(begun, stream),
        };
        if let Some(ahead) = self.ahead.as_ref().filter(|_| new > 0) {
            ahead.note_new(new, stream);
        }
        backed
    }

    /// Gives up pages, once the work that is queued by now on `stream`, and on the streams that they were committed
    /// for, is over. They stay mapped, and lose their contents when they are lent. No driver call.
    ///
    /// # Errors
    /// [`KvError::Beyond`], [`KvError::Twice`], [`KvError::NotCommitted`]: which pages are wrong. None is
    /// parked then.
    pub fn park(&self, pages: impl PageRanges, stream: StreamId) -> Result<(), KvError> {
        self.park_behind(pages.ranges(), Some(stream))
    }

    /// Gives up pages, once the work that is queued on any stream of the allocator by now is over: for
    /// callers that do not know which streams used them. O(streams) more.
    ///
    /// # Errors
    /// As of [`park`](Arena::park).
    pub fn park_behind_all(&self, pages: impl PageRanges) -> Result<(), KvError> {
        self.park_behind(pages.ranges(), None)
    }

    fn park_behind(&self, pages: &[Range<u32>], stream: Option<StreamId>) -> Result<(), KvError> {
        Unusable::check_fork()?;
        loop {
            let moves = *self.inner.lock_moves();
            let mut guard = self.inner.shared.lock()?;
            let inner = &mut *guard;
            let streams: Vec<StreamId> = match stream {
                Some(stream) if !inner.knows_stream(stream) => {
                    return Err(KvError::UnknownStream(stream));
                }
                Some(stream) => vec![stream],
                None => inner.streams.iter().map(|(id, _)| id).collect(),
            };
            let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
            let core = &pool.pool;
            let mut marks: Marks = streams.iter().map(|&stream| core.now(stream)).collect();
            if stream.is_none() {
                // Work of streams that ended may not be over.
                marks.extend(core.pending().filter(|mark| !core.is_open(mark.stream)));
            }
            let table = pool.tables.get_mut(self.inner.id);
            match table.pages.park(pages, marks, |stream| core.now(stream)) {
                Ok(()) => {
                    streams.into_iter().for_each(|stream| table.note_user(core, stream));
                    drop(guard);
                    self.inner.shared.notify_waiters();
                    return Ok(());
                }
                Err(Refused::Moving) => {
                    drop(guard);
                    self.inner.wait_for_move(moves);
                }
                Err(refused) => return Err(self.inner.refusal(refused, table.pages.limit())),
            }
        }
    }

    /// Returns parked pages to the card, the oldest first, until at most `keep` bytes are parked. Returns the
    /// bytes that were. Waits for no work: pages whose work is not over stay parked, and so do pages in one
    /// handle with committed ones, and pinned ones.
    ///
    /// An unmap and a release for each handle, some events and queries.
    ///
    /// # Errors
    /// A driver call failed. What it could not return stays with the pool.
    pub fn release(&self, keep: Bytes) -> Result<Bytes, KvError> {
        let mut guard = self.inner.shared.lock()?;
        let inner = &mut *guard;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let released = pool.release_parked(self.inner.id, keep);
        self.inner.shared.refresh(inner);
        drop(guard);
        self.inner.shared.notify_waiters();
        Ok(released.map_err(AllocError::Driver)?)
    }

    /// Returns how many pages are in which state. O(1).
    pub fn stats(&self) -> KvStats {
        let mut guard = self.inner.shared.lock_anyway();
        let geometry = self.inner.geometry;
        let empty = KvStats {
            pages: geometry.pages,
            page_bytes: geometry.page_bytes(),
            ..KvStats::default()
        };
        if guard.closed {
            return empty;
        }
        let Some(pool) = guard.manager.virtual_pool_mut() else { return empty };
        let pages = &pool.tables.get_mut(self.inner.id).pages;
        let counts = pages.counts();
        let limit = (pages.limit() < u32::MAX).then(|| empty.page_bytes * u64::from(pages.limit()));
        KvStats {
            committed: counts.committed,
            parked: counts.parked,
            moving: counts.moving,
            limit,
            ..empty
        }
    }

    /// Returns the state of every page, by number. O(pages).
    pub fn states(&self) -> Vec<PageState> {
        self.with_table(|table| table.pages.states().collect()).unwrap_or_default()
    }

    /// Returns the state of a page; `None` if there are not so many. O(1).
    pub fn state(&self, page: u32) -> Option<PageState> {
        self.with_table(|table| table.pages.state(page)).flatten()
    }

    /// Returns the pages that a commit could have now without asking others for memory: parked ones, and
    /// what pool, limits and card have left for absent ones. One driver call.
    pub fn available(&self) -> u32 {
        let shared = &self.inner.shared;
        let stats = self.stats();
        let page = stats.page_bytes.count();
        let left = shared.room();
        let mut idle = Bytes::ZERO;
        {
            let guard = shared.lock_anyway();
            if let Some(pool) = guard.manager.virtual_pool().filter(|_| !guard.closed) {
                idle = pool.pool.idle();
            }
        }
        let absent = stats.pages - stats.committed - stats.parked - stats.moving;
        let new = u32::try_from((left + idle).count() / page).unwrap_or(u32::MAX).min(absent);
        let most = stats.limit.map_or(u32::MAX, |limit| {
            u32::try_from(limit.count() / page).unwrap_or(u32::MAX).saturating_sub(stats.committed)
        });
        new.saturating_add(stats.parked).min(most)
    }

    /// Changes the limit. What is parked above it is lent to the pool at once, as far as its work is over;
    /// what is committed stays.
    ///
    /// # Errors
    /// A driver call failed, or the allocator is closed. The limit holds all the same.
    pub fn set_limit(&self, limit: Option<Bytes>) -> Result<(), KvError> {
        let pages = limit_pages(self.inner.geometry, limit);
        let over = {
            let mut guard = self.inner.shared.lock()?;
            let pool = guard.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
            let table = pool.tables.get_mut(self.inner.id);
            table.pages.set_limit(pages);
            let counts = table.pages.counts();
            (counts.committed + counts.parked + counts.moving)
                .saturating_sub(pages)
                .min(counts.parked)
        };
        self.inner.lend(over).map(drop)
    }

    /// Returns committed pages, those first that are best given up: of blocks in which few are committed,
    /// because a handle goes back once none of its pages is. For an engine that has to choose what leaves
    /// its cache. O(pages).
    pub fn park_first(&self, count: u32) -> Vec<Range<u32>> {
        self.with_table(|table| table.pages.park_first(count)).unwrap_or_default()
    }

    /// Notes that work queued on `stream` so far uses the arena: once it is dropped, its memory is reused only
    /// after that work. Streams of commits and parks are noted anyway.
    pub fn record_use(&self, stream: StreamId) {
        let mut guard = self.inner.shared.lock_anyway();
        guard.add_streams(&self.inner.shared.group);
        if guard.closed || !guard.knows_stream(stream) {
            return;
        }
        if let Some(pool) = guard.manager.virtual_pool_mut() {
            pool.tables.get_mut(self.inner.id).note_user(&pool.pool, stream);
        }
    }

    fn with_table<R>(&self, look: impl FnOnce(&mut Table) -> R) -> Option<R> {
        let mut guard = self.inner.shared.lock_anyway();
        if guard.closed {
            return None;
        }
        let pool = guard.manager.virtual_pool_mut()?;
        Some(look(pool.tables.get_mut(self.inner.id)))
    }
}

/// Why no commit was begun.
enum Choice {
    Refused(Refused),
    TooFew { left: u32 },
}

impl From<Refused> for Choice {
    fn from(refused: Refused) -> Choice {
        Choice::Refused(refused)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        drop(self.ahead.take());
        let shared = &self.inner.shared;
        let mut inner = shared.lock_anyway();
        if inner.closed {
            return;
        }
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.remove_table(self.inner.id);
        }
        shared.refresh(&mut inner);
        drop(inner);
        shared.notify_waiters();
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvStats { committed, parked, pages, .. } = self.stats();
        write!(f, "{committed} committed and {parked} parked of {pages} pages at {}", self.whole())
    }
}
