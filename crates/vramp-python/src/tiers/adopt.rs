//! Memory of other objects that becomes a buffer.
//!
//! 1. The object is kept until the contents have left the card. Then it is dropped, which frees the memory
//!    if nothing else refers to it.
//! 2. The thread that evicts the buffer does that, perhaps for an allocation: it takes the interpreter, as
//!    for a shortage handler, while it holds no lock.
//!
//! Objects whose memory is the host's are copied instead.

use pyo3::prelude::*;
use vramp_capi::process::{Failure, StreamName, check_fork};
use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::{Buffer, Open, Tiers};
use crate::allocation::Allocation;
use crate::array::{Array, Export};
use crate::calls::id_of;
use crate::owner::Owner;
use crate::python;
use crate::stream::stream_in;

/// What keeps memory of Python. Dropping it takes the interpreter.
struct Kept<T: Send>(Option<T>);

impl<T: Send> Drop for Kept<T> {
    fn drop(&mut self) {
        let kept = self.0.take();
        let mut slot = Some(kept);
        let drop_it = |_: Python<'_>| drop(slot.take());
        if check_fork().is_err() || Python::try_attach(drop_it).is_none() {
            // The interpreter ends, or a thread of the parent may hold locks.
            std::mem::forget(slot);
        }
    }
}

/// Memory of the card with its owner.
struct Foreign {
    range: AddrRange,
    owner: Box<dyn Send>,
    stream: StreamName,
    /// The stream is a number that the object gave. No one object keeps it alive.
    is_transient: bool,
}

fn range(addr: u64, len: u64) -> AddrRange {
    AddrRange::new(DeviceAddr::new(addr), Bytes::new(len))
}

/// Returns the memory of an object. `None` if it is the host's.
fn foreign(memory: &Bound<'_, PyAny>, stream: Option<StreamName>) -> PyResult<Option<Foreign>> {
    let py = memory.py();
    if let Ok(block) = memory.cast::<Allocation>() {
        let export = Export::begin(py, Owner::Block(block.clone().unbind()))?;
        let range = range(block.get().addr(), block.get().size());
        let stream = stream.unwrap_or_else(|| block.get().stream_name());
        let owner = Box::new(Kept(Some(export)));
        return Ok(Some(Foreign { range, owner, stream, is_transient: false }));
    }
    if let Ok(array) = memory.cast::<Array>() {
        let range = range(array.get().addr(), array.get().len());
        let stream = stream.unwrap_or_else(|| array.get().stream_name());
        let owner = Box::new(Kept(Some(array.clone().unbind())));
        return Ok(Some(Foreign { range, owner, stream, is_transient: false }));
    }
    let read = python::member(py, "vramp._tiers", "cuda_memory")?;
    let found = read.call1((memory,))?;
    let Some((addr, len, own)) = found.extract::<Option<(u64, u64, u64)>>()? else {
        return Ok(None);
    };
    let is_transient = stream.is_none() && own > 2;
    let stream = stream.unwrap_or(StreamName::Raw(own));
    let owner = Box::new(Kept(Some(memory.clone().unbind())));
    Ok(Some(Foreign { range: range(addr, len), owner, stream, is_transient }))
}

/// Makes a buffer of an object's memory, or of a copy of its contents.
pub fn adopt(
    tiers: &Bound<'_, Tiers>,
    memory: &Bound<'_, PyAny>,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<Buffer> {
    let py = tiers.py();
    let pool = tiers.get().pool().bind(py);
    let stream = stream.map(|stream| stream_in(pool, Some(stream))).transpose()?;
    let stream = stream.as_ref().map(|stream| stream.name);
    match foreign(memory, stream)? {
        Some(Foreign { range, owner, stream, is_transient }) => {
            let buffer = tiers.get().call(py, |Open { tiers, allocator, .. }| {
                let (known, id) = allocator
                    .with(|session| Ok((session.is_known(stream), id_of(session, stream)?)))?;
                let adopted = tiers.adopt(range, owner, id);
                if let (true, false, StreamName::Raw(_)) = (is_transient, known, stream) {
                    // An event stands for its work from now on. While it captures, it stays.
                    drop(allocator.with(|session| session.forget_named(stream)));
                }
                adopted.map_err(|failed| Failure::from(failed.error))
            })?;
            Buffer::new(tiers, buffer, 0)
        }
        None => {
            let data = super::buffer::contents(memory)?;
            let len = Bytes::new(data.as_bytes().len() as u64);
            let bytes = data.as_bytes();
            let buffer = tiers.get().call(py, |open| {
                let buffer = open.tiers.buffer(len)?;
                buffer.write(Bytes::ZERO, bytes)?;
                Ok::<_, Failure>(buffer)
            })?;
            Buffer::new(tiers, buffer, 0)
        }
    }
}
