//! What an array can be a part of: an allocation or an arena of this process, or memory of another one.

use pyo3::prelude::*;
use vramp_capi::process::{CallResult, OpenAllocator, StreamName};

use crate::allocation::Allocation;
use crate::calls::id_of;
use crate::ipc::Imported;
use crate::kept::Kept;
use crate::kv::Part;
use crate::layout::{Place, place_of};

/// Memory that counts its arrays and capsules, and is not freed or closed while there are some.
pub enum Owner {
    Block(Py<Allocation>),
    Imported(Py<Imported>),
    Cache(Part),
    Kept(Py<Kept>),
}

impl Owner {
    pub fn begin_export(&self, py: Python<'_>) -> PyResult<()> {
        match self {
            Owner::Block(block) => block.get().begin_export(py),
            Owner::Imported(imported) => imported.get().begin_export(py),
            Owner::Cache(part) => part.arena.get().begin_export(py),
            Owner::Kept(kept) => kept.get().begin_export(py),
        }
    }

    /// Ends an export, on any thread.
    pub fn end_export(&self) {
        match self {
            Owner::Block(block) => block.get().end_export(),
            Owner::Imported(imported) => imported.get().end_export(),
            Owner::Cache(part) => part.arena.get().end_export(),
            Owner::Kept(kept) => kept.get().end_export(),
        }
    }

    pub fn clone_ref(&self, py: Python<'_>) -> Owner {
        match self {
            Owner::Block(block) => Owner::Block(block.clone_ref(py)),
            Owner::Imported(imported) => Owner::Imported(imported.clone_ref(py)),
            Owner::Cache(part) => Owner::Cache(part.clone_ref(py)),
            Owner::Kept(kept) => Owner::Kept(kept.clone_ref(py)),
        }
    }

    pub fn object(&self, py: Python<'_>) -> Py<PyAny> {
        match self {
            Owner::Block(block) => block.clone_ref(py).into_any(),
            Owner::Imported(imported) => imported.clone_ref(py).into_any(),
            Owner::Cache(part) => part.arena.clone_ref(py).into_any(),
            Owner::Kept(kept) => kept.clone_ref(py).into_any(),
        }
    }

    pub fn addr(&self) -> u64 {
        match self {
            Owner::Block(block) => block.get().addr(),
            Owner::Imported(imported) => imported.get().addr(),
            Owner::Cache(part) => part.addr,
            Owner::Kept(kept) => kept.get().addr(),
        }
    }

    /// Returns the bytes that an array has by default.
    pub fn size(&self) -> u64 {
        match self {
            Owner::Block(block) => block.get().size(),
            Owner::Imported(imported) => imported.get().len(),
            Owner::Cache(part) => part.size,
            Owner::Kept(kept) => kept.get().len(),
        }
    }

    pub fn is_read_only(&self) -> bool {
        matches!(self, Owner::Kept(kept) if kept.get().is_read_only())
    }

    pub fn usable(&self) -> u64 {
        match self {
            Owner::Block(block) => block.get().usable(),
            Owner::Imported(imported) => imported.get().len(),
            Owner::Cache(part) => part.size,
            Owner::Kept(kept) => kept.get().len(),
        }
    }

    /// Returns the stream whose work is ordered before a consumer's.
    pub fn stream_name(&self) -> StreamName {
        match self {
            Owner::Block(block) => block.get().stream_name(),
            Owner::Imported(imported) => imported.get().stream_name(),
            // A commit orders the work of its stream, or all work, behind what used the memory before. Work of
            // other processes is over once a lock is taken.
            Owner::Cache(_) | Owner::Kept(_) => StreamName::Raw(0),
        }
    }

    /// Returns where the memory is. `None` if no program may access it.
    pub fn place(&self) -> CallResult<Option<Place>> {
        match self {
            Owner::Block(_) | Owner::Cache(_) | Owner::Kept(_) => {
                let addr = self.addr();
                self.allocator().with(|session| Ok(place_of(session, addr)))
            }
            Owner::Imported(imported) => Ok(imported.get().place()),
        }
    }

    pub fn allocator(&self) -> OpenAllocator {
        match self {
            Owner::Block(block) => block.get().pool().get().allocator(),
            Owner::Imported(imported) => imported.get().pool().get().allocator(),
            Owner::Cache(part) => part.arena.get().pool().get().allocator(),
            Owner::Kept(kept) => kept.get().pool().get().allocator(),
        }
    }

    /// Records that work of `consumer` uses the memory. A failure means that the pool is closed or in a
    /// forked child: then nothing is reused.
    pub fn record_use(&self, consumer: StreamName) {
        match self {
            Owner::Block(block) => {
                let (allocator, addr) = (self.allocator(), block.get().addr());
                drop(allocator.with(|session| session.record_use(addr, id_of(session, consumer)?)));
            }
            Owner::Imported(imported) => drop(imported.get().record(consumer)),
            Owner::Cache(part) => part.arena.get().record_use(consumer),
            Owner::Kept(kept) => drop(kept.get().record(consumer)),
        }
    }
}
