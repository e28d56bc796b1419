//! What happens to everything that is left when a device is dropped.
//!
//! 1. Lost: nothing can be called any more; the end of the process frees all.
//! 2. Work still in flight: the same, because unmapping under it would be a fault, and waiting
//!    would block.
//! 3. Otherwise: graphs, events, streams, pool allocations, mappings, addresses, handles, host
//!    memory, the pool, and last the context.

use std::sync::Arc;

use vramp_driver::Call;

use crate::device::{CudaDriver, Entered};
use crate::stream::RawStream;
use crate::sys::{CUctx_st, CUresult};
use crate::table::Opaque;

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // Any call would do: what fails here has nobody to report to.
        let Ok(before) = self.enter(Call::MemoryInfo).map(Entered::stay) else {
            return self.leak_pinned();
        };
        let idle = self.is_idle();
        if idle {
            self.release_all();
        }
        self.leak_pinned();
        self.leave(before);
        if idle {
            self.release_context();
        }
    }
}

impl CudaDriver {
    /// True if every stream's work, also that of streams long gone, was seen complete. Destroys the
    /// streams.
    fn is_idle(&mut self) -> bool {
        let Ok(query) = self.cuda.cuStreamQuery.as_ref().copied() else { return false };
        let mut streams = self.streams.drain();
        if let Some(departed) = self.departed.take() {
            streams.push(Arc::new(RawStream { raw: departed, owned: true }));
        }
        let idle = streams.iter().all(|stream| {
            // SAFETY: ours are destroyed only below; adopted ones live by the word of their adopter.
            let code = unsafe { query(stream.raw.0) };
            code == CUresult::CUDA_SUCCESS
        });
        let destroy = self.cuda.cuStreamDestroy_v2.as_ref();
        for stream in streams.iter().filter(|stream| stream.owned) {
            if let Ok(destroy) = destroy {
                // SAFETY: the stream is ours and, with the device borrowed alone, in no other
                // call. Work still queued on it runs on.
                let _ = unsafe { destroy(stream.raw.0) };
            }
        }
        idle
    }

    /// What is still pinned may still be written to, so it is never given back.
    fn leak_pinned(&mut self) {
        self.buffers.drain().iter().for_each(|buffer| buffer.leak());
    }

    /// Releases everything but the context. No work is in flight.
    fn release_all(&mut self) {
        if let Ok(destroy) = self.cuda.cuGraphExecDestroy.as_ref() {
            for exec in self.execs.drain() {
                // SAFETY: the graph is ours, and the device is borrowed alone.
                let _ = unsafe { destroy(exec.0) };
            }
        }
        if let Ok(destroy) = self.cuda.cuGraphDestroy.as_ref() {
            for graph in self.graphs.drain() {
                // SAFETY: the graph is ours, and the device is borrowed alone.
                let _ = unsafe { destroy(graph.raw.0) };
            }
        }
        if let Ok(destroy) = self.cuda.cuEventDestroy_v2.as_ref() {
            for event in self.events.drain() {
                // SAFETY: the event is ours, and the device is borrowed alone.
                let _ = unsafe { destroy(event.0) };
            }
        }
        self.release_memory();
        for buffer in self.buffers.drain() {
            if buffer.end(self, Call::FreeHost).is_err() {
                buffer.leak();
            }
        }
        if let (Some(pool), Ok(destroy)) = (self.pool.take(), self.cuda.cuMemPoolDestroy.as_ref()) {
            // SAFETY: the pool is ours; the driver keeps what of it is still in use.
            let _ = unsafe { destroy(pool.0) };
        }
    }

    fn release_memory(&mut self) {
        let (reservations, allocations) = self.addresses().drain();
        if let Ok(free) = self.cuda.cuMemFreeAsync.as_ref() {
            for at in allocations {
                // SAFETY: the pool gave us this address; null is the default stream.
                let _ = unsafe { free(at.number(), std::ptr::null_mut()) };
            }
        }
        if let Ok(free) = self.cuda.cuMemFree_v2.as_ref() {
            for at in self.addresses().drain_plain() {
                // SAFETY: the driver gave us this address, and no work in flight touches it.
                let _ = unsafe { free(at.number()) };
            }
        }
        if let (Ok(unmap), Ok(free)) =
            (self.cuda.cuMemUnmap.as_ref(), self.cuda.cuMemAddressFree.as_ref())
        {
            for (range, mappings) in reservations {
                for mapped in mappings {
                    // SAFETY: a whole mapping of ours that no work in flight touches.
                    let _ = unsafe { unmap(mapped.start.number(), mapped.len.count() as usize) };
                }
                // SAFETY: a whole reservation of ours; if an unmap failed, the driver refuses.
                let _ = unsafe { free(range.start.number(), range.len.count() as usize) };
            }
        }
        if let Ok(release) = self.cuda.cuMemRelease.as_ref() {
            for physical in self.handles.drain() {
                // SAFETY: the handle is ours, and the device is borrowed alone.
                let _ = unsafe { release(physical.raw) };
            }
        }
    }

    /// Leaves the thread with the context it had, or without one.
    fn leave(&self, before: Option<Opaque<CUctx_st>>) {
        if let Ok(set) = self.cuda.cuCtxSetCurrent.as_ref() {
            let before = before.map_or(std::ptr::null_mut(), |context| context.0);
            // SAFETY: null, or the context that was current on this thread when we came.
            let _ = unsafe { set(before) };
        }
    }

    /// Gives the primary context up. Whoever else retains it keeps it.
    fn release_context(&mut self) {
        if let Ok(release) = self.cuda.cuDevicePrimaryCtxRelease_v2.as_ref() {
            // SAFETY: retained once when the device was opened, given up once here.
            let _ = unsafe { release(self.device) };
        }
    }
}
