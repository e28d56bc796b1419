//! Dropping a device.
//!
//! 1. If the device is lost, no call works. The end of the process frees everything.
//! 2. If work is in flight, only the streams are destroyed: unmapping would be a fault, and waiting
//!    would block. The end of the process frees the rest.
//! 3. Otherwise streams, graphs, events, pool allocations, plain allocations, mappings, addresses,
//!    handles, host memory, the pool and the context are released, in this order.

use std::sync::{Arc, PoisonError};

use vramp_driver::Call;

use crate::device::{CudaDriver, Entered};
use crate::raw::RawStream;
use crate::sys::{CUctx_st, CUresult};
use crate::table::Opaque;

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // The call names an error that no caller sees.
        let Ok(before) = self.enter(Call::MemoryInfo).map(Entered::keep_current) else {
            return self.leak_pinned();
        };
        let idle = self.is_idle();
        if idle {
            self.release_all();
        }
        self.leak_pinned();
        self.restore_context(before);
        if idle {
            self.release_context();
        }
    }
}

impl CudaDriver {
    /// Returns true if the work of every stream, including destroyed ones, is complete. Destroys the
    /// streams.
    fn is_idle(&mut self) -> bool {
        let Ok(query) = self.cuda.cuStreamQuery.as_ref().copied() else { return false };
        let mut streams = self.streams.drain();
        if let Some(tail) = self.tail.take() {
            streams.push(Arc::new(RawStream::created(tail)));
        }
        let idle = streams.iter().all(|stream| {
            // SAFETY: owned streams are destroyed only below; the contract of `adopt_stream` keeps
            // adopted ones valid.
            let code = unsafe { query(stream.raw()) };
            code == CUresult::CUDA_SUCCESS
        });
        let destroy = self.cuda.cuStreamDestroy_v2.as_ref();
        for stream in streams.iter().filter(|stream| stream.owned) {
            if let Ok(destroy) = destroy {
                // SAFETY: the stream is owned and, with the device borrowed mutably, in no other
                // call. Work queued on it still runs.
                let _ = unsafe { destroy(stream.raw()) };
            }
        }
        idle
    }

    /// Leaks what is still pinned, because work in flight may write to it.
    fn leak_pinned(&mut self) {
        self.buffers.drain().iter().for_each(|buffer| buffer.leak());
    }

    /// Releases everything but the context. No work is in flight.
    fn release_all(&mut self) {
        if let Ok(destroy) = self.cuda.cuGraphExecDestroy.as_ref() {
            for exec in self.execs.drain() {
                // SAFETY: the graph is live, and the device is borrowed mutably.
                let _ = unsafe { destroy(exec.raw.0) };
            }
        }
        if let Ok(destroy) = self.cuda.cuGraphDestroy.as_ref() {
            for graph in self.graphs.drain() {
                // SAFETY: the graph is live, and the device is borrowed mutably.
                let _ = unsafe { destroy(graph.raw.0) };
            }
        }
        if let Ok(destroy) = self.cuda.cuEventDestroy_v2.as_ref() {
            for event in self.events.drain() {
                // SAFETY: the event is live, and the device is borrowed mutably.
                let _ = unsafe { destroy(event.0) };
            }
        }
        self.release_memory();
        for buffer in self.buffers.drain() {
            if buffer.free(self, Call::FreeHost).is_err() {
                buffer.leak();
            }
        }
        if let (Some(pool), Ok(destroy)) = (self.pool.take(), self.cuda.cuMemPoolDestroy.as_ref()) {
            // SAFETY: the pool belongs to the device; the driver keeps what is still in use.
            let _ = unsafe { destroy(pool.0) };
        }
    }

    fn release_memory(&mut self) {
        let (reservations, allocations) = self.addresses().drain();
        if let Ok(free) = self.cuda.cuMemFreeAsync.as_ref() {
            for at in allocations {
                // SAFETY: the pool returned this address; null is the default stream.
                let _ = unsafe { free(at.number(), std::ptr::null_mut()) };
            }
        }
        if let Ok(free) = self.cuda.cuMemFree_v2.as_ref() {
            for at in self.addresses().drain_plain() {
                // SAFETY: the driver returned this address, and no work is in flight.
                let _ = unsafe { free(at.number()) };
            }
        }
        if let (Ok(unmap), Ok(free)) =
            (self.cuda.cuMemUnmap.as_ref(), self.cuda.cuMemAddressFree.as_ref())
        {
            for (range, mappings) in reservations {
                for mapped in mappings {
                    // SAFETY: a whole mapping, and no work is in flight.
                    let _ = unsafe { unmap(mapped.start.number(), mapped.len.count() as usize) };
                }
                // SAFETY: a whole reservation; if an unmap failed, the driver refuses.
                let _ = unsafe { free(range.start.number(), range.len.count() as usize) };
            }
        }
        if let Ok(release) = self.cuda.cuMemRelease.as_ref() {
            for physical in self.handles.drain() {
                // SAFETY: the handle is live, and the device is borrowed mutably.
                let _ = unsafe { release(physical.raw) };
            }
        }
    }

    /// Restores the context that the thread had before, or none.
    fn restore_context(&self, before: Option<Opaque<CUctx_st>>) {
        if let Ok(set) = self.cuda.cuCtxSetCurrent.as_ref() {
            let before = before.map_or(std::ptr::null_mut(), |context| context.0);
            // SAFETY: null, or the context that was current on this thread before.
            let _ = unsafe { set(before) };
        }
    }

    /// Releases the primary context. Other code that retains it keeps it.
    fn release_context(&mut self) {
        if let Ok(release) = self.cuda.cuDevicePrimaryCtxRelease_v2.as_ref() {
            // SAFETY: retained once when the device was opened, released once here.
            let _ = unsafe { release(self.device) };
            let peers = self.peer_contexts.get_mut().unwrap_or_else(PoisonError::into_inner);
            for (ordinal, _) in std::mem::take(peers) {
                // SAFETY: retained once when it was entered in the table, released once here.
                let _ = unsafe { release(ordinal.cast_signed()) };
            }
        }
    }
}
