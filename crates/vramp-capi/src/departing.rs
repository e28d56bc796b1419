//! Streams that end before the allocator does.
//!
//! The pool knows streams for ever: it records an event on one whenever somebody else wants memory
//! freed there. A stream that its maker is about to destroy must not be named to the driver again:
//!
//! 1. An heir, a stream of our own, waits for all that the departing stream has queued.
//! 2. The driver forgets the departing stream.
//! 3. From then on its number means the heir, which is ordered behind all its work.
//!
//! One heir serves every stream that ever departs, so its events come later than they need to;
//! they never come too early.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use vramp::{Bytes, DeviceAddr};
use vramp_core::AddrRange;
use vramp_driver::{
    Copy, DeviceInfo, Driver, Event, Handle, HostBuffer, HostSlice, MemoryInfo, Place, PoolUsage,
    Result, Stream,
};

/// A device whose streams may depart.
pub(crate) struct Departing {
    device: Arc<dyn Driver>,
    departed: RwLock<Departed>,
}

#[derive(Default)]
struct Departed {
    streams: HashSet<u64>,
    heir: Option<Stream>,
}

impl Departed {
    /// The stream that stands for `stream` now.
    fn resolve(&self, stream: Stream) -> Stream {
        match self.heir {
            Some(heir) if self.streams.contains(&stream.number()) => heir,
            _ => stream,
        }
    }
}

impl Departing {
    pub fn new(device: Arc<dyn Driver>) -> Departing {
        Departing { device, departed: RwLock::default() }
    }

    /// Hands what `stream` leaves behind to the heir and lets the driver forget it. Six driver
    /// calls, one more the first time.
    ///
    /// # Errors
    /// The call that failed; the stream is as before.
    pub fn depart(&self, stream: Stream) -> Result<()> {
        let mut departed = self.departed.write().unwrap_or_else(PoisonError::into_inner);
        let heir = match departed.heir {
            Some(heir) => heir,
            None => *departed.heir.insert(self.device.create_stream()?),
        };
        let event = self.device.create_event()?;
        let ordered = self
            .device
            .record(event, stream)
            .and_then(|()| self.device.wait(heir, event))
            .and_then(|()| self.device.destroy_stream(stream));
        let destroyed = self.device.destroy_event(event);
        ordered?;
        departed.streams.insert(stream.number());
        destroyed
    }

    fn read(&self) -> RwLockReadGuard<'_, Departed> {
        self.departed.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Departing {
    fn drop(&mut self) {
        let departed = self.departed.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(heir) = departed.heir {
            // Nobody is left to tell.
            let _ = self.device.destroy_stream(heir);
        }
    }
}

/// Calls that name no stream.
macro_rules! forward {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> $result {
            self.device.$method($($argument),*)
        })*
    };
}

/// Calls on a stream. It cannot depart before they return.
macro_rules! forward_on_stream {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $method(&self, stream: Stream $(, $argument: $type)*) -> $result {
            let departed = self.read();
            self.device.$method(departed.resolve(stream) $(, $argument)*)
        })*
    };
}

impl Driver for Departing {
    forward! {
        info() -> &DeviceInfo;
        now_ns() -> u64;
        reserve(len: Bytes, alignment: Bytes) -> Result<DeviceAddr>;
        free_addresses(range: AddrRange) -> Result<()>;
        create(len: Bytes, place: Place) -> Result<Handle>;
        release(handle: Handle) -> Result<()>;
        map(at: DeviceAddr, handle: Handle) -> Result<()>;
        unmap(range: AddrRange) -> Result<()>;
        set_access(range: AddrRange) -> Result<()>;
        create_stream() -> Result<Stream>;
        create_event() -> Result<Event>;
        destroy_event(event: Event) -> Result<()>;
        query(event: Event) -> Result<bool>;
        synchronize_event(event: Event) -> Result<()>;
        pool_usage() -> Result<PoolUsage>;
        set_pool_threshold(keep: Bytes) -> Result<()>;
        trim_pool(keep: Bytes) -> Result<()>;
        alloc_host(len: Bytes) -> Result<HostBuffer>;
        free_host(buffer: HostBuffer) -> Result<()>;
        write_host(buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> Result<()>;
        read_host(buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> Result<()>;
        memory_info() -> Result<MemoryInfo>;
    }

    forward_on_stream! {
        synchronize_stream() -> Result<()>;
        wait(event: Event) -> Result<()>;
        fill(range: AddrRange, byte: u8) -> Result<()>;
        copy(copy: Copy) -> Result<()>;
        copy_to_device(from: HostSlice, to: DeviceAddr) -> Result<()>;
        copy_to_host(from: DeviceAddr, to: HostSlice) -> Result<()>;
        malloc_async(len: Bytes) -> Result<DeviceAddr>;
        free_async(at: DeviceAddr) -> Result<()>;
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let departed = self.read();
        self.device.record(event, departed.resolve(stream))
    }

    /// A departed stream is destroyed already.
    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        let departed = self.read();
        match departed.streams.contains(&stream.number()) {
            true => Ok(()),
            false => self.device.destroy_stream(stream),
        }
    }
}

#[cfg(test)]
mod tests {
    use vramp::{Allocation, Allocator, Config, Preset, StreamId};
    use vramp_driver::sim::{Kernel, Simulator};

    use super::*;

    /// An allocator that cannot grow beyond one block, on a card that checks order.
    struct Scene {
        sim: Arc<Simulator>,
        streams: Arc<Departing>,
        allocator: Allocator,
        goes: StreamId,
        stays: StreamId,
    }

    const BLOCK: Bytes = Bytes::mib(8);

    impl Scene {
        fn new(preset: Preset) -> Scene {
            let sim = Arc::new(Simulator::builder().checked().build());
            let streams = Arc::new(Departing::new(Arc::clone(&sim) as _));
            let config = Config { limit: Some(BLOCK), ..Config::preset(preset) };
            let allocator = Allocator::new(Arc::clone(&streams) as _, config).unwrap();
            let [goes, stays] = [(); 2].map(|()| allocator.create_stream().unwrap());
            Scene { sim, streams, allocator, goes, stays }
        }

        fn write(&self, stream: StreamId, block: &Allocation, ns: u64) {
            let range = AddrRange::new(block.addr(), block.len());
            let kernel = Kernel::new("write").writing(range).lasting(ns);
            self.sim.launch(self.allocator.stream(stream).unwrap(), kernel).unwrap();
        }

        fn depart(&self) {
            self.streams.depart(self.allocator.stream(self.goes).unwrap()).unwrap();
        }

        /// What was left comes to the other stream behind the work on it, and all of it ends well.
        fn take_over(self) {
            let block = self.allocator.malloc(BLOCK, self.stays).unwrap();
            self.write(self.stays, &block, 1);
            self.allocator.free(block, self.stays).unwrap();
            self.allocator.audit().unwrap();
            self.allocator.close().unwrap();
            assert_eq!((self.sim.hazards(), self.sim.fault()), (vec![], None));
            drop(self.streams);
            assert_eq!(self.sim.live().streams, 0, "the heir is destroyed too");
        }
    }

    #[test]
    fn memory_freed_on_a_departed_stream_waits_for_its_work() {
        for preset in [Preset::Vramp, Preset::Vpmm] {
            let scene = Scene::new(preset);
            let block = scene.allocator.malloc(BLOCK, scene.goes).unwrap();
            scene.write(scene.goes, &block, 1 << 40);
            scene.allocator.free(block, scene.goes).unwrap();
            scene.depart();
            scene.take_over();
        }
    }

    #[test]
    fn uses_noted_on_a_departed_stream_still_count() {
        let scene = Scene::new(Preset::Vramp);
        let block = scene.allocator.malloc(BLOCK, scene.stays).unwrap();
        scene.write(scene.goes, &block, 1 << 40);
        scene.allocator.record_use(&block, scene.goes).unwrap();
        scene.depart();
        scene.allocator.free(block, scene.stays).unwrap();
        scene.take_over();
    }
}
