//! The simulator as a [`Driver`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::Simulator;
use super::captures::Recorded;
use super::clock::{Body, Part};
use super::cost::Rates;
use super::devices::DeviceSet;
use super::log::LoggedCall;
use super::memory::Allocator;
use super::peers::{check_across, check_owned, check_properties, check_sides, peer_set};
use super::pool::pool_of;
use super::refusal::{Outcome, Refusal};
use super::state::State;
use super::streams::{Effect, Kernel};
use super::work::host_buffer_part;
use crate::{
    Call, CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverResult, Event,
    ExportedHandle, Graph, GraphExec, GraphNode, Handle, HostBuffer, HostMemory, HostSlice,
    MemoryInfo, MemoryLocation, MemoryProperties, PoolUsage, Stream, StreamThread,
};

impl Simulator {
    fn call<T>(
        &self,
        entry: LoggedCall,
        body: impl FnOnce(&mut State) -> Outcome<T>,
    ) -> DriverResult<T> {
        self.lock().call(self.device, entry, body)
    }
}

fn log(call: Call) -> LoggedCall {
    LoggedCall::new(call)
}

fn log_range(call: Call, range: AddrRange) -> LoggedCall {
    log(call).at(range.start).len(range.len)
}

fn need_virtual_memory(state: &State) -> Outcome<()> {
    state.need(|can| can.virtual_memory, "no virtual memory management")
}

fn need_pinned_host(state: &State) -> Outcome<()> {
    state.need(|can| can.pinned_host, "no pinned host memory")
}

fn need_pool(state: &State) -> Outcome<()> {
    state.need(|can| can.stream_ordered_pool, "no stream-ordered pool")
}

fn need_graphs(state: &State) -> Outcome<()> {
    state.need(|can| can.graphs, "no stream capture")
}

fn need_no_capture(state: &State, stream: usize) -> Outcome<()> {
    match state.captures.of(stream) {
        None => Ok(()),
        Some(_) => Err(Refusal::not_supported(
            "the simulator does not model the stream-ordered pool in a capture",
        )),
    }
}

impl Driver for Simulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn owns(&self, range: AddrRange) -> bool {
        self.lock().owner(range) == Some(self.device)
    }

    fn now_ns(&self) -> u64 {
        self.lock().now_ns
    }

    fn reserve(&self, len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr> {
        self.call(log(Call::Reserve).len(len), |state| {
            need_virtual_memory(state)?;
            let at = state.memory.reserve(state.current, len, alignment)?;
            state.spend(Call::Reserve);
            Ok(at)
        })
    }

    fn reserve_at(&self, range: AddrRange) -> DriverResult<bool> {
        self.call(log_range(Call::Reserve, range), |state| {
            need_virtual_memory(state)?;
            let reserved = state.memory.reserve_at(state.current, range)?;
            state.spend(Call::Reserve);
            Ok(reserved)
        })
    }

    fn free_addresses(&self, range: AddrRange) -> DriverResult<()> {
        self.call(log_range(Call::FreeAddresses, range), |state| {
            need_virtual_memory(state)?;
            state.memory.free_addresses(state.current, range)?;
            state.spend(Call::FreeAddresses);
            Ok(())
        })
    }

    fn create(&self, len: Bytes, properties: MemoryProperties) -> DriverResult<Handle> {
        self.call(log(Call::Create).len(len), |state| {
            need_virtual_memory(state)?;
            check_properties(state, properties)?;
            let handle = state.memory.create(state.current, len, properties)?;
            match properties.location {
                MemoryLocation::HostNuma(_) => state.now_ns += state.costs.create_host_numa_ns(len),
                _ => state.spend_on_handle(Call::Create, len),
            }
            Ok(handle)
        })
    }

    fn release(&self, handle: Handle) -> DriverResult<()> {
        self.call(log(Call::Release), |state| {
            need_virtual_memory(state)?;
            let registered = !state.registered.is_empty();
            let physical = registered.then(|| state.memory.physical_of(handle));
            let len = state.memory.release(state.current, handle)?;
            if let Some(physical) = physical {
                state.report_released(physical);
            }
            state.forget_destroyed();
            state.spend_on_handle(Call::Release, len);
            Ok(())
        })
    }

    fn map(&self, at: DeviceAddr, handle: Handle) -> DriverResult<()> {
        self.call(log(Call::Map).at(at), |state| {
            need_virtual_memory(state)?;
            let (len, rdma) = state.memory.map(state.current, at, handle)?;
            state.report_mapped(handle, AddrRange::new(at, len));
            state.spend_on_handle(Call::Map, len);
            state.now_ns += state.costs.rdma_ns(Call::Map, usize::from(rdma));
            Ok(())
        })
    }

    fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        self.call(log_range(Call::Unmap, range), |state| {
            need_virtual_memory(state)?;
            state.unmap(range)
        })
    }

    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        self.call(log_range(Call::SetAccess, range), |state| {
            need_virtual_memory(state)?;
            let peers = peer_set(state, peers)?;
            let whole = state.memory.whole_mappings(state.current, range)?;
            state.memory.set_access(range, peers.with(state.current))?;
            let on_host = state.memory.host_part(range);
            state.now_ns += state.costs.range_ns(Call::SetAccess, &whole.handles)
                + state.costs.set_access_host_numa_ns(on_host)
                + state.costs.set_access_peers_ns(whole.handles.len() * peers.len());
            Ok(())
        })
    }

    fn set_read_only(&self, range: AddrRange) -> DriverResult<()> {
        self.call(log_range(Call::SetAccess, range), |state| {
            need_virtual_memory(state)?;
            let whole = state.memory.whole_mappings(state.current, range)?;
            state.memory.set_read_only(range, state.current)?;
            state.now_ns += state.costs.range_ns(Call::SetAccess, &whole.handles);
            Ok(())
        })
    }

    fn revoke_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        self.call(log_range(Call::RevokeAccess, range), |state| {
            need_virtual_memory(state)?;
            let peers = peer_set(state, peers)?;
            state.revoke(range, peers)
        })
    }

    fn export(&self, handle: Handle) -> DriverResult<ExportedHandle> {
        self.call(log(Call::Export), |state| {
            need_virtual_memory(state)?;
            let exported = state.memory.export(state.current, handle)?;
            state.spend(Call::Export);
            Ok(exported)
        })
    }

    fn import(&self, exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle> {
        self.call(log(Call::Import).len(len), |state| {
            need_virtual_memory(state)?;
            state.need(|can| can.posix_fd, "no memory exported as a file descriptor")?;
            let handle = state.memory.import(state.current, exported, len)?;
            state.spend(Call::Import);
            Ok(handle)
        })
    }

    fn export_dma_buf(&self, range: AddrRange) -> DriverResult<OwnedFd> {
        self.call(log_range(Call::ExportDmaBuf, range), |state| {
            state.need(|can| can.dma_buf, "no dma-buf")?;
            let exported = state.memory.export_dma_buf(state.current, range)?;
            state.spend(Call::ExportDmaBuf);
            Ok(exported)
        })
    }

    fn alloc_memory(&self, len: Bytes) -> DriverResult<DeviceAddr> {
        self.call(log(Call::AllocMemory).len(len), |state| {
            state.captures.refuse_unsafe()?;
            let at = state.memory.alloc(state.current, len, Allocator::Device)?;
            state.spend_on_handle(Call::AllocMemory, len);
            Ok(at)
        })
    }

    fn free_memory(&self, at: DeviceAddr) -> DriverResult<()> {
        self.call(log(Call::FreeMemory).at(at), |state| {
            state.memory.allocation(state.current, at, Allocator::Device)?;
            state.captures.refuse_unsafe()?;
            state.wait_for_everything()?;
            state.report_unmapped(AddrRange::new(at, Bytes::new(1)));
            let len = state.memory.free_allocation(state.current, at, Allocator::Device)?;
            state.forget_destroyed();
            state.spend_on_handle(Call::FreeMemory, len);
            Ok(())
        })
    }

    fn adopt_memory(&self, range: AddrRange) -> DriverResult<()> {
        self.call(log_range(Call::AdoptMemory, range), |state| {
            let is_own = state.owner(range) == Some(state.current);
            state.memory.adopt(state.current, range, is_own)?;
            state.spend(Call::AdoptMemory);
            Ok(())
        })
    }

    fn forget_memory(&self, range: AddrRange) -> bool {
        self.lock().memory.forget(self.device, range)
    }

    fn create_stream(&self) -> DriverResult<Stream> {
        self.call(log(Call::CreateStream), |state| {
            state.spend(Call::CreateStream);
            Ok(state.streams.create(state.current))
        })
    }

    fn thread_stream(&self) -> DriverResult<Stream> {
        self.call(log(Call::CreateStream), |state| {
            state.spend(Call::CreateStream);
            Ok(state.thread_stream())
        })
    }

    fn stream_thread(&self, stream: Stream) -> StreamThread {
        let state = self.lock();
        let index = state.streams.index(self.device, stream);
        StreamThread::of(index.ok().and_then(|index| state.streams.thread(index)))
    }

    fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        self.call(log(Call::DestroyStream).on(stream), |state| {
            let index = state.streams.index(state.current, stream)?;
            state.refuse_capturing(index)?;
            state.streams.destroy(index);
            state.spend(Call::DestroyStream);
            Ok(())
        })
    }

    fn synchronize_stream(&self, stream: Stream) -> DriverResult<()> {
        self.call(log(Call::SynchronizeStream).on(stream), |state| {
            let stream = state.resolve(stream)?;
            let index = state.streams.index(state.current, stream)?;
            state.refuse_capturing(index)?;
            state.run_to(state.streams.end_of(index))?;
            if let Some(checker) = &mut state.checker {
                checker.host_observed_stream(stream);
            }
            state.trim_pool_to_threshold();
            state.spend(Call::SynchronizeStream);
            Ok(())
        })
    }

    fn is_capturing(&self, stream: Stream) -> DriverResult<bool> {
        self.call(log(Call::IsCapturing).on(stream), |state| {
            let capturing = state.is_capturing(stream)?;
            state.spend(Call::IsCapturing);
            Ok(capturing)
        })
    }

    fn create_event(&self) -> DriverResult<Event> {
        self.call(log(Call::CreateEvent), |state| {
            state.events_made += 1;
            state.events.insert(state.events_made, (state.current, Recorded::Never));
            state.spend(Call::CreateEvent);
            Ok(Event::from_number(state.events_made))
        })
    }

    fn destroy_event(&self, event: Event) -> DriverResult<()> {
        self.call(log(Call::DestroyEvent), |state| {
            state.recorded(event)?;
            state.events.remove(&event.number());
            if let Some(checker) = &mut state.checker {
                checker.remove_event(event.number());
            }
            state.spend(Call::DestroyEvent);
            Ok(())
        })
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.call(log(Call::Record).on(stream), |state| {
            let stream = state.resolve(stream)?;
            state.record(event, stream)?;
            state.spend(Call::Record);
            Ok(())
        })
    }

    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        self.call(log(Call::Record).on(stream), |state| {
            let captures = state.is_capturing(stream)?;
            if !captures {
                let stream = state.resolve(stream)?;
                state.record(event, stream)?;
            }
            state.spend(Call::Record);
            Ok(!captures)
        })
    }

    fn query(&self, event: Event) -> DriverResult<bool> {
        self.call(log(Call::Query), |state| {
            let point = state.point_for_host(event)?;
            let done = point.is_none_or(|point| state.streams.is_done(point));
            if done && let Some(checker) = &mut state.checker {
                checker.host_observed_event(event.number());
            }
            state.spend(Call::Query);
            Ok(done)
        })
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        self.call(log(Call::Wait).on(stream), |state| {
            let stream = state.resolve(stream)?;
            state.wait(stream, event)?;
            state.spend(Call::Wait);
            Ok(())
        })
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        self.call(log(Call::SynchronizeEvent), |state| {
            if let Some(point) = state.point_for_host(event)? {
                state.run_to(point)?;
            }
            if let Some(checker) = &mut state.checker {
                checker.host_observed_event(event.number());
            }
            state.trim_pool_to_threshold();
            state.spend(Call::SynchronizeEvent);
            Ok(())
        })
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        self.call(log(Call::SynchronizeStream), |state| {
            let own = state.streams.of_device(state.current);
            let captures = own.iter().filter_map(|&stream| state.captures.of(stream));
            let captures: Vec<u64> = captures.collect();
            if !captures.is_empty() {
                captures.into_iter().for_each(|capture| state.captures.invalidate(capture));
                return Err(Refusal::capturing("a stream of the device is capturing"));
            }
            for stream in own {
                state.run_to(state.streams.end_of(stream))?;
                if let Some(checker) = &mut state.checker {
                    checker.host_observed_stream(Stream::from_number(stream as u64 + 1));
                }
            }
            state.trim_pool_to_threshold();
            state.spend(Call::SynchronizeStream);
            Ok(())
        })
    }

    fn fill(&self, stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()> {
        self.call(log_range(Call::Fill, range).on(stream), |state| {
            let stream = state.resolve(stream)?;
            check_owned(state, range)?;
            state.takes_work(stream)?;
            state.spend(Call::Fill);
            let kernel = Kernel::new("fill").writing(range);
            let ns = Rates::ns(state.rates().fill, range.len);
            state.queue(stream, kernel.lasting(ns), Effect::Fill { range, byte })
        })
    }

    fn copy(&self, stream: Stream, copy: DeviceCopy) -> DriverResult<()> {
        let to = AddrRange::new(copy.to, copy.len);
        self.call(log_range(Call::Copy, to).on(stream), |state| {
            let stream = state.resolve(stream)?;
            let (from, to) = check_sides(copy)?;
            check_owned(state, from)?;
            check_owned(state, to)?;
            state.takes_work(stream)?;
            check_across(state, from)?;
            check_across(state, to)?;
            state.spend(Call::Copy);
            let kernel = Kernel::new("copy").reading(from).writing(to);
            let ns = Rates::ns(state.rates().copy, copy.len);
            state.queue(stream, kernel.lasting(ns), Effect::Copy { from, to: copy.to })
        })
    }

    fn copy_peer(&self, stream: Stream, copy: DeviceCopy, other: &dyn Driver) -> DriverResult<()> {
        let to = AddrRange::new(copy.to, copy.len);
        let theirs = [copy.from, copy.to].map(|at| other.owns(AddrRange::new(at, copy.len)));
        self.call(log_range(Call::CopyPeer, to).on(stream), |state| {
            let stream = state.resolve(stream)?;
            let (sides, effect) = state.peer_sides(stream, copy, other.info().ordinal, theirs)?;
            state.spend(Call::CopyPeer);
            let kernel = Kernel::new("copy-peer").reading(sides[0]).writing(sides[1]);
            let ns = Rates::ns(state.rates().copy, copy.len);
            state.queue(stream, kernel.lasting(ns), effect)
        })
    }

    fn copy_to_device(&self, stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()> {
        let range = AddrRange::new(to, from.len);
        self.call(log_range(Call::CopyToDevice, range).on(stream), |state| {
            let stream = state.resolve(stream)?;
            check_owned(state, range)?;
            state.takes_work(stream)?;
            state.host.check(state.current, from.buffer, from.offset, from.len)?;
            state.spend(Call::CopyToDevice);
            let kernel = Kernel::new("copy-to-device").writing(range);
            let ns = Rates::ns(state.rates().to_device, from.len);
            let buffer = from.buffer.number();
            let effect = Effect::ToDevice { buffer, offset: from.offset, to: range };
            state.queue(stream, kernel.lasting(ns), effect)
        })
    }

    fn copy_to_host(&self, stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()> {
        let range = AddrRange::new(from, to.len);
        self.call(log_range(Call::CopyToHost, range).on(stream), |state| {
            let stream = state.resolve(stream)?;
            check_owned(state, range)?;
            state.takes_work(stream)?;
            state.host.check(state.current, to.buffer, to.offset, to.len)?;
            state.spend(Call::CopyToHost);
            let kernel = Kernel::new("copy-to-host").reading(range);
            let ns = Rates::ns(state.rates().to_host, to.len);
            let buffer = to.buffer.number();
            let effect = Effect::ToHost { from: range, buffer, offset: to.offset };
            state.queue(stream, kernel.lasting(ns), effect)
        })
    }

    fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        self.call(log(Call::BeginCapture).on(stream), |state| {
            let stream = state.resolve(stream)?;
            need_graphs(state)?;
            state.begin_capture(stream, mode)?;
            state.spend(Call::BeginCapture);
            Ok(())
        })
    }

    fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        self.call(log(Call::EndCapture).on(stream), |state| {
            let stream = state.resolve(stream)?;
            need_graphs(state)?;
            let (capture, nodes) = state.end_capture(stream)?;
            state.spend(Call::EndCapture);
            Ok(state.keep_graph(capture, nodes))
        })
    }

    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>> {
        self.call(log(Call::CaptureInfo).on(stream), |state| {
            let stream = state.resolve(stream)?;
            need_graphs(state)?;
            let info = state.capture_info(stream)?;
            state.spend(Call::CaptureInfo);
            Ok(info)
        })
    }

    fn node_dependencies(&self, node: GraphNode) -> DriverResult<Vec<GraphNode>> {
        self.call(log(Call::NodeDependencies), |state| {
            need_graphs(state)?;
            let dependencies = state.node_dependencies(node)?;
            state.spend(Call::NodeDependencies);
            Ok(dependencies)
        })
    }

    fn graph_nodes(&self, graph: Graph) -> DriverResult<usize> {
        self.call(log(Call::GraphNodes), |state| {
            need_graphs(state)?;
            let nodes = state.graph_nodes(graph)?;
            state.spend(Call::GraphNodes);
            Ok(nodes)
        })
    }

    fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec> {
        self.call(log(Call::Instantiate), |state| {
            need_graphs(state)?;
            let exec = state.instantiate(graph)?;
            state.spend(Call::Instantiate);
            Ok(exec)
        })
    }

    fn launch_graph(&self, exec: GraphExec, stream: Stream) -> DriverResult<()> {
        self.call(log(Call::LaunchGraph).on(stream), |state| {
            let stream = state.resolve(stream)?;
            need_graphs(state)?;
            state.launch_graph(exec, stream)
        })
    }

    fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        self.call(log(Call::DestroyGraph), |state| {
            need_graphs(state)?;
            state.destroy_graph(graph)?;
            state.spend(Call::DestroyGraph);
            Ok(())
        })
    }

    fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()> {
        self.call(log(Call::DestroyGraphExec), |state| {
            need_graphs(state)?;
            state.destroy_graph_exec(exec)?;
            state.spend(Call::DestroyGraphExec);
            Ok(())
        })
    }

    fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<DeviceAddr> {
        self.call(log(Call::MallocAsync).len(len).on(stream), |state| {
            let stream = state.resolve(stream)?;
            need_pool(state)?;
            let index = state.streams.index(state.current, stream)?;
            need_no_capture(state, index)?;
            let device = state.current;
            let (free, streams) = (state.memory.free(device), &state.streams);
            let pool = &mut state.devices[device].pool;
            let grant = pool.malloc(len, index, free, |point| streams.is_done(point))?;
            state.memory.charge(device, grant.grown)?;
            for point in grant.waits {
                state.streams.push_wait(index, point, state.now_ns);
            }
            state.spend(Call::MallocAsync);
            state.now_ns += grant.granules_mapped * state.costs.pool().growth_ns;
            let range = AddrRange::new(grant.at, grant.len);
            touch_pool(state, stream, range, "malloc-async", true);
            Ok(grant.at)
        })
    }

    fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()> {
        self.call(log(Call::FreeAsync).at(at).on(stream), |state| {
            need_pool(state)?;
            let index = state.streams.index(state.current, stream)?;
            need_no_capture(state, index)?;
            let end = state.streams.end_of(index);
            let len = state.own_mut().pool.free(at, end)?;
            touch_pool(state, stream, AddrRange::new(at, len), "free-async", false);
            state.spend(Call::FreeAsync);
            Ok(())
        })
    }

    fn pool_usage(&self) -> DriverResult<PoolUsage> {
        self.call(log(Call::PoolUsage), |state| {
            need_pool(state)?;
            state.spend(Call::PoolUsage);
            let pool = &state.own().pool;
            Ok(PoolUsage {
                reserved: Bytes::new(pool.reserved),
                reserved_peak: Bytes::new(pool.reserved_peak),
                used: Bytes::new(pool.used),
            })
        })
    }

    fn set_pool_threshold(&self, keep: Bytes) -> DriverResult<()> {
        self.call(log(Call::SetPoolThreshold).len(keep), |state| {
            need_pool(state)?;
            state.own_mut().pool.threshold = keep.count();
            state.spend(Call::SetPoolThreshold);
            Ok(())
        })
    }

    fn trim_pool(&self, keep: Bytes) -> DriverResult<()> {
        self.call(log(Call::TrimPool).len(keep), |state| {
            need_pool(state)?;
            let freed = state.own_mut().pool.trim(keep);
            state.memory.refund(state.current, freed);
            state.spend(Call::TrimPool);
            Ok(())
        })
    }

    fn alloc_host(&self, len: Bytes) -> DriverResult<HostBuffer> {
        self.call(log(Call::AllocHost).len(len), |state| {
            need_pinned_host(state)?;
            state.captures.refuse_unsafe()?;
            let buffer = state.host.alloc(state.current, len)?;
            state.now_ns += state.costs.alloc_host_ns(len);
            Ok(buffer)
        })
    }

    fn register_host(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer> {
        self.call(log(Call::RegisterHost).len(memory.len()), |state| {
            need_pinned_host(state)?;
            let buffer = state.host.register(state.current, memory)?;
            state.now_ns += state.costs.register_host_ns(memory.len());
            Ok(buffer)
        })
    }

    fn free_host(&self, buffer: HostBuffer) -> DriverResult<()> {
        self.call(log(Call::FreeHost), |state| {
            need_pinned_host(state)?;
            let number = buffer.number();
            state.host.check(state.current, buffer, Bytes::ZERO, Bytes::ZERO)?;
            if !state.host.is_registered(buffer) {
                state.captures.refuse_unsafe()?;
            }
            let in_use = |work: &super::streams::Work| work.effect.host_buffer() == Some(number);
            if let Some((stream, work)) = state.streams.find_pending(DeviceSet::ALL, in_use) {
                return Err(Refusal::invalid(format!(
                    "host buffer {number} is still used by `{}` on stream {}",
                    work.kernel.name,
                    stream.number()
                )));
            }
            let len = state.host.free(buffer)?;
            if let Some(checker) = &mut state.checker {
                checker.host_access("free-host", host_buffer_part(number, Bytes::ZERO, len, true));
                checker.remove_body(Body::HostBuffer(number));
            }
            state.now_ns += state.costs.free_host_ns(len);
            Ok(())
        })
    }

    fn write_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()> {
        let len = Bytes::new(bytes.len() as u64);
        self.call(log(Call::AccessHost).len(len), |state| {
            need_pinned_host(state)?;
            state.host.check(state.current, buffer, offset, len)?;
            let content = state.host.content_mut(buffer.number());
            content.expect("the buffer was checked").write(offset.count(), bytes);
            touch_host(state, buffer, offset, len, true);
            state.spend(Call::AccessHost);
            Ok(())
        })
    }

    fn read_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()> {
        let len = Bytes::new(bytes.len() as u64);
        self.call(log(Call::AccessHost).len(len), |state| {
            need_pinned_host(state)?;
            state.host.check(state.current, buffer, offset, len)?;
            let content = state.host.content(buffer.number());
            content.expect("the buffer was checked").read(offset.count(), bytes);
            touch_host(state, buffer, offset, len, false);
            state.spend(Call::AccessHost);
            Ok(())
        })
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.call(log(Call::MemoryInfo), |state| {
            state.spend(Call::MemoryInfo);
            let free = state.memory.free(state.current);
            Ok(MemoryInfo { free, total: self.info.limits.memory })
        })
    }

    fn peer_memory_info(&self, peer: u32) -> DriverResult<MemoryInfo> {
        self.call(log(Call::MemoryInfo), |state| {
            peer_set(state, &[peer])?;
            if state.devices[peer as usize].lost.is_some() {
                return Err(Refusal::invalid(format!("device {peer} is lost")));
            }
            state.spend(Call::MemoryInfo);
            // The cards of a machine are alike.
            let free = state.memory.free(peer as usize);
            Ok(MemoryInfo { free, total: self.info.limits.memory })
        })
    }
}

/// Reports to the race detector that a stream allocates or frees a block of the pool.
fn touch_pool(state: &mut State, stream: Stream, range: AddrRange, label: &str, renew: bool) {
    let Some(checker) = &mut state.checker else { return };
    let Some((device, offset)) = pool_of(range.start.number()) else { return };
    let (body, len) = (Body::Pool(device), range.len.count());
    if renew {
        checker.renew(body, offset, len);
    }
    let stamp = checker.step(stream);
    let part = Part { body, offset, len, range, writes: true };
    checker.access(&stamp, label, &[(part, None)]);
}

/// Reports to the race detector that the host accesses pinned memory.
fn touch_host(state: &mut State, buffer: HostBuffer, offset: Bytes, len: Bytes, writes: bool) {
    let Some(checker) = &mut state.checker else { return };
    if !len.is_zero() {
        let label = if writes { "write-host" } else { "read-host" };
        checker.host_access(label, host_buffer_part(buffer.number(), offset, len, writes));
    }
}
