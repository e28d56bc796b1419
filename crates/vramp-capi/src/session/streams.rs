//! Streams of a session: adopted, created, forgotten, and their names.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use vramp_alloc::StreamId;
use vramp_driver::{Driver, Stream, StreamThread};

use super::{Session, StreamName};
use crate::abi::vramp_stream_t;
use crate::status::{Failure, Kind, Result, unknown_stream};

/// `cudaStreamPerThread`: in each thread it means another stream, with an id of its own that ends with the
/// thread. It is in no table.
pub(super) const PER_THREAD: usize = 2;

/// The stream that a thread adopted last. Most often it is the next one too.
#[derive(Clone, Copy)]
struct Adopted {
    tag: u32,
    raw: usize,
    /// Number of streams forgotten when it was looked up.
    forgets: u64,
    stream: StreamId,
}

thread_local! {
    static LAST_ADOPTED: Cell<Option<Adopted>> = const { Cell::new(None) };
}

impl Session {
    /// Returns the handle of a stream.
    pub fn handle_of(&self, stream: StreamId) -> vramp_stream_t {
        handle(self.tag, stream)
    }

    /// Returns what [`Session::handle_of`] does, for callbacks, which may not keep the allocator.
    pub(crate) fn namer(&self) -> impl Fn(StreamId) -> vramp_stream_t + Send + Sync + use<> {
        let tag = self.tag;
        move |stream| handle(tag, stream)
    }

    /// Returns the stream of a handle. It may be forgotten, which the allocator finds.
    #[inline]
    pub fn stream(&self, handle: vramp_stream_t) -> Result<StreamId> {
        let index = (handle.id as u32).wrapping_sub(1);
        let stream = StreamId::new(index);
        if handle.id >> 32 != u64::from(self.tag) || index == u32::MAX {
            return Err(foreign_stream(handle));
        }
        Ok(stream)
    }

    /// Returns the driver's handle of a stream: for an adopted stream the value that was adopted.
    pub(crate) fn raw_stream(&self, stream: StreamId) -> Result<*mut c_void> {
        let adopted = self.adopted.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&raw) = adopted.raws.get(&stream) {
            return Ok(raw as *mut c_void);
        }
        let created = self.allocator.stream(stream).ok_or_else(unknown_stream)?;
        if self.is_of_thread(created) {
            return Ok(PER_THREAD as *mut c_void);
        }
        match &self.device.card {
            Some(card) => {
                let raw = card.raw_stream(created).ok_or_else(unknown_stream)?;
                drop(adopted);
                self.note_given_out(stream, raw as usize);
                Ok(raw)
            }
            None => {
                let text = "a stream that vramp created on a simulated device has no CUstream: \
                            adopt a value of your own, or ask vramp_device before";
                Err(Failure::new(Kind::Unsupported, text))
            }
        }
    }

    /// Creates a stream on the device.
    pub fn create_stream(&self) -> Result<StreamId> {
        Ok(self.allocator.create_stream()?)
    }

    /// Adopts a stream that the caller made. Adopting it again returns the same id. On the
    /// simulator each raw value gets a simulated stream. `cudaStreamPerThread` is that of the calling thread.
    ///
    /// # Safety
    /// On a card, `raw` is null or a `CUstream` of the card's primary context, and lives until it
    /// is forgotten or the allocator is closed.
    #[inline]
    pub(crate) unsafe fn adopt(&self, raw: *mut c_void) -> Result<StreamId> {
        let forgets = self.forgets.load(Ordering::Acquire);
        let last = LAST_ADOPTED.try_with(Cell::get).ok().flatten();
        if let Some(last) = last
            && (last.tag, last.raw, last.forgets) == (self.tag, raw as usize, forgets)
        {
            return Ok(last.stream);
        }
        // SAFETY: this function's contract is the same.
        let stream = unsafe { self.look_up_or_adopt(raw) }?;
        let adopted = Adopted { tag: self.tag, raw: raw as usize, forgets, stream };
        // An ending thread has no thread-local storage, and looks it up every time.
        let _ = LAST_ADOPTED.try_with(|last| last.set(Some(adopted)));
        Ok(stream)
    }

    /// # Safety
    /// On a card a raw stream is null or a `CUstream` of the card's primary context, and lives until it is forgotten or
    /// the allocator is closed.
    unsafe fn look_up_or_adopt(&self, raw: *mut c_void) -> Result<StreamId> {
        let key = raw as usize;
        if key == PER_THREAD {
            return Ok(self.allocator.thread_stream()?);
        }
        let known =
            self.adopted.read().unwrap_or_else(PoisonError::into_inner).ids.get(&key).copied();
        if let Some(stream) = known {
            return Ok(stream);
        }
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(&stream) = adopted.ids.get(&key) {
            return Ok(stream);
        }
        let stream = match &self.device.card {
            // SAFETY: this function's contract is the same.
            Some(card) => self.allocator.adopt_stream(unsafe { card.adopt_stream(raw) }),
            None => self.allocator.create_stream()?,
        };
        adopted.ids.insert(key, stream);
        adopted.raws.insert(stream, key);
        Ok(stream)
    }

    /// Returns the handle that the caller gave for a stream; zero for others and for ended streams.
    pub(crate) fn raw(&self, stream: StreamId) -> u64 {
        let adopted = self.adopted.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&raw) = adopted.raws.get(&stream) {
            return raw as u64;
        }
        drop(adopted);
        match self.allocator.stream(stream) {
            Some(open) if self.is_of_thread(open) => PER_THREAD as u64,
            _ => 0,
        }
    }

    fn is_of_thread(&self, stream: Stream) -> bool {
        self.device.driver.stream_thread(stream) != StreamThread::Any
    }

    /// Returns the stream of a raw handle, if it was adopted and not forgotten.
    pub(crate) fn adopted(&self, raw: usize) -> Option<StreamId> {
        self.adopted.read().unwrap_or_else(PoisonError::into_inner).ids.get(&raw).copied()
    }

    /// Returns the adopted streams that were not forgotten, and the default streams of threads. O(n).
    pub(crate) fn adopted_streams(&self) -> Vec<StreamId> {
        let adopted = self.adopted.read().unwrap_or_else(PoisonError::into_inner);
        let mut streams: Vec<StreamId> = adopted.raws.keys().copied().collect();
        drop(adopted);
        streams.extend(self.allocator.thread_streams());
        streams
    }

    /// Returns the stream of this name. Adopts a raw one.
    ///
    /// # Safety
    /// On a card a raw stream is null or a `CUstream` of the card's primary context, and lives until it is forgotten or
    /// the allocator is closed.
    #[inline]
    pub unsafe fn named(&self, stream: StreamName) -> Result<StreamId> {
        match stream {
            // SAFETY: this function's contract is the same.
            StreamName::Raw(raw) => unsafe { self.adopt(raw as *mut c_void) },
            StreamName::Created(handle) => self.stream(handle),
        }
    }

    /// Returns the stream of this name if it was used before and its table is not being changed.
    #[inline]
    pub(crate) fn named_at_hand(&self, stream: StreamName) -> Option<StreamId> {
        let raw = match stream {
            StreamName::Created(handle) => return self.stream(handle).ok(),
            StreamName::Raw(raw) => raw as usize,
        };
        let forgets = self.forgets.load(Ordering::Acquire);
        match LAST_ADOPTED.try_with(Cell::get).ok().flatten() {
            Some(last) if (last.tag, last.raw, last.forgets) == (self.tag, raw, forgets) => {
                Some(last.stream)
            }
            _ => self.adopted.try_read().ok()?.ids.get(&raw).copied(),
        }
    }

    /// Returns true for a stream that was used or created, and not forgotten.
    pub fn is_known(&self, name: StreamName) -> bool {
        match name {
            StreamName::Raw(raw) => self.adopted(raw as usize).is_some(),
            StreamName::Created(handle) => self.stream(handle).is_ok(),
        }
    }

    /// Forgets the stream of this name, as `vramp_stream_forget` does. Nothing happens to a raw stream that was
    /// not used.
    ///
    /// # Errors
    /// The stream captures a graph, or is unknown.
    pub fn forget_named(&self, name: StreamName) -> Result<()> {
        match name {
            StreamName::Raw(raw) => {
                self.adopted(raw as usize).map_or(Ok(()), |stream| self.forget(stream))
            }
            StreamName::Created(handle) => self.forget(self.stream(handle)?),
        }
    }

    /// Returns the address of a stream on a card.
    pub fn stream_number(&self, stream: StreamId) -> Option<u64> {
        let card = self.device.card.as_ref()?;
        let open = self.allocator.stream(stream)?;
        if self.is_of_thread(open) {
            return Some(PER_THREAD as u64);
        }
        let raw = card.raw_stream(open)?;
        self.note_given_out(stream, raw as usize);
        Some(raw.addr() as u64)
    }

    /// Records that the caller has the handle of a created stream. A call that names the stream by it
    /// means this one: another id for it would outlive the stream.
    fn note_given_out(&self, stream: StreamId, raw: usize) {
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        if !adopted.raws.contains_key(&stream) && adopted.given_out.insert(stream, raw).is_none() {
            adopted.ids.insert(raw, stream);
        }
    }

    /// Makes later work on `stream` wait for the work queued on `before` so far.
    pub fn order(&self, stream: StreamId, before: StreamId) -> Result<()> {
        let driver = &self.device.driver;
        let open = |id| self.allocator.stream(id).ok_or_else(unknown_stream);
        let (stream, before) = (open(stream)?, open(before)?);
        if stream == before {
            return Ok(());
        }
        let event = driver.create_event()?;
        let ordered = driver.record(event, before).and_then(|()| driver.wait(stream, event));
        let destroyed = driver.destroy_event(event);
        Ok(ordered.and(destroyed)?)
    }

    /// Forgets a stream, which the caller may destroy afterwards. Never waits. Where only the driver's
    /// stream could not be destroyed, another call tries that again.
    ///
    /// A capturing stream is refused: the event that replaces it would become part of the graph.
    pub(crate) fn forget(&self, stream: StreamId) -> Result<()> {
        let raw = self.allocator.stream(stream);
        let ended = self.allocator.destroy_stream(stream);
        if self.allocator.stream(stream).is_some() {
            return Ok(ended?);
        }
        let mut adopted = self.adopted.write().unwrap_or_else(PoisonError::into_inner);
        let was_adopted = match adopted.raws.remove(&stream) {
            Some(key) => adopted.ids.remove(&key).is_some(),
            None => {
                if let Some(key) = adopted.given_out.remove(&stream) {
                    adopted.ids.remove(&key);
                }
                false
            }
        };
        // After the id is gone from the table: a thread that adopts meanwhile could otherwise keep
        // the ended id under the new count.
        self.forgets.fetch_add(1, Ordering::Release);
        if was_adopted && let (Some(card), Some(raw)) = (&self.device.card, raw) {
            // The caller owns an adopted stream: the driver only forgets it.
            card.destroy_stream(raw)?;
        }
        Ok(ended?)
    }
}

fn handle(tag: u32, stream: StreamId) -> vramp_stream_t {
    vramp_stream_t { id: u64::from(tag) << 32 | (stream.index() as u64 + 1) }
}

#[cold]
fn foreign_stream(handle: vramp_stream_t) -> Failure {
    let text = match handle.id {
        0 => "the stream is zero: use one from vramp_stream_create or vramp_stream_adopt",
        _ => "the stream belongs to another allocator or was never made: use one of this allocator",
    };
    Failure::new(Kind::UnknownStream, format!("{text} (stream {:#x})", handle.id))
}
