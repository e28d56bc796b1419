//! Builder of simulated cards.

use std::sync::{Arc, Mutex};

use vramp_core::Bytes;
use vramp_host::MappedMemory;

use super::bytes::Contents;
use super::card::CardModel;
use super::cost::CostTable;
use super::devices::{DEVICES_MAX, DeviceSet};
use super::fault::FaultPlan;
use super::memory::Memory;
use super::state::{Config, State};
use super::{Simulator, pool};
use crate::{Capabilities, DeviceInfo, Limits};

/// Builder of a simulated card. The default is an H200 that discards contents, without race detector,
/// log and injected faults.
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_driver::{Driver, sim::{Contents, Simulator}};
/// let device = Simulator::builder().memory(Bytes::mib(64)).contents(Contents::Stored).build();
/// assert_eq!(device.info().limits.memory, Bytes::mib(64));
/// ```
#[derive(Clone, Debug)]
pub struct SimulatorBuilder {
    info: DeviceInfo,
    address_space: Bytes,
    /// The part of the memory that nothing can be created in.
    context: Bytes,
    config: Config,
    host: Option<Arc<MappedMemory>>,
    /// Pairs of devices without a link between them.
    unlinked: Vec<(u32, u32)>,
}

impl Default for SimulatorBuilder {
    fn default() -> SimulatorBuilder {
        let all = Capabilities {
            virtual_memory: true,
            stream_ordered_pool: true,
            host_numa: true,
            pinned_host: true,
            remap_beside_kernels: true,
            graphs: true,
            posix_fd: true,
            fabric: true,
            rdma: true,
            dma_buf: true,
        };
        let limits = Limits {
            memory: Bytes::ZERO,
            page: Bytes::ZERO,
            recommended_page: Bytes::ZERO,
            address_space: None,
            pool_step: Bytes::ZERO,
        };
        let info = DeviceInfo {
            name: String::new(),
            id: String::new(),
            driver: String::new(),
            simulated: true,
            pci: None,
            uuid: None,
            host_numa: None,
            ordinal: 0,
            peers: Vec::new(),
            limits,
            capabilities: all,
        };
        let config = Config {
            contents: Contents::default(),
            seed: 0,
            checker: false,
            log_capacity: 0,
            faults: FaultPlan::none(),
            costs: CostTable::h200(),
            fabric_permitted: false,
        };
        let (address_space, context) = (Bytes::ZERO, Bytes::ZERO);
        SimulatorBuilder { info, address_space, context, config, host: None, unlinked: Vec::new() }
            .card(&CardModel::all()[0])
    }
}

impl SimulatorBuilder {
    /// Sets name, memory, limits and the source of the costs from a card model.
    pub fn card(mut self, model: &CardModel) -> SimulatorBuilder {
        self.info.name = format!("{} (simulated)", model.name);
        self.info.id = format!("sim:{}", model.id);
        self.config.costs.measured = model.measured;
        self.config.costs.source = model.source.to_owned();
        self.memory(model.memory)
            .context(model.context)
            .page(model.page)
            .address_space(model.address_space)
    }

    /// Sets the memory on the card, all of which is usable unless [`context`](Self::context) is set
    /// afterwards.
    pub fn memory(mut self, memory: Bytes) -> SimulatorBuilder {
        self.info.limits.memory = memory;
        self.context = Bytes::ZERO;
        self
    }

    /// Sets how much of the memory nothing can be created in: what the driver, the CUDA context and
    /// libraries take.
    pub fn context(mut self, context: Bytes) -> SimulatorBuilder {
        self.context = context.min(self.info.limits.memory);
        self
    }

    /// Sets how much of the memory is usable. A card with less memory gets as much.
    pub fn usable(mut self, usable: Bytes) -> SimulatorBuilder {
        self.info.limits.memory = self.info.limits.memory.max(usable);
        self.context = self.info.limits.memory - usable;
        self
    }

    /// Sets the granularity of physical memory.
    ///
    /// # Panics
    /// If it is not a power of two.
    pub fn page(mut self, page: Bytes) -> SimulatorBuilder {
        assert!(page.count().is_power_of_two() || page.is_zero(), "page={page}");
        self.info.limits.page = page;
        self.info.limits.recommended_page = page;
        self
    }

    /// Sets the address space that can be reserved in total, at most 2 to the 55 bytes.
    pub fn address_space(mut self, len: Bytes) -> SimulatorBuilder {
        self.address_space = len.min(Bytes::new(pool::POOL_BASE / 2));
        self.info.limits.address_space = Some(self.address_space);
        self
    }

    /// Sets whether bytes are stored.
    pub fn contents(mut self, contents: Contents) -> SimulatorBuilder {
        self.config.contents = contents;
        self
    }

    /// Maps the host's memory at the card's addresses, which are addresses of this process then: what
    /// the host writes at one, a copy of the card reads. Bytes are stored. Host memory is taken where
    /// bytes are written; fresh memory is zero. Blocks of the device's own pool have no such memory.
    pub fn mapped_to(mut self, host: Arc<MappedMemory>) -> SimulatorBuilder {
        self.host = Some(host);
        self.contents(Contents::Stored)
    }

    /// Sets the seed of random faults.
    pub fn seed(mut self, seed: u64) -> SimulatorBuilder {
        self.config.seed = seed;
        self
    }

    /// Turns the race detector on.
    pub fn checked(mut self) -> SimulatorBuilder {
        self.config.checker = true;
        self
    }

    /// Keeps a log of the last `calls` driver calls.
    pub fn logged(mut self, calls: usize) -> SimulatorBuilder {
        self.config.log_capacity = calls;
        self
    }

    /// Sets the cost table. See [`described_by`](Self::described_by) for the card that it describes.
    pub fn costs(mut self, costs: CostTable) -> SimulatorBuilder {
        self.config.costs = costs;
        self
    }

    /// Sets the cost table, and the name and memory of the card that it describes, as far as it says.
    pub fn described_by(mut self, costs: CostTable) -> SimulatorBuilder {
        if let Some(memory) = costs.memory {
            self.info.name = format!("{} (simulated)", costs.name);
            self.info.id = format!("sim:{}", costs.name);
            self = self.memory(memory);
        }
        if let Some(context) = costs.context {
            self = self.context(context);
        }
        self.costs(costs)
    }

    /// Sets the fault plan.
    pub fn faults(mut self, plan: FaultPlan) -> SimulatorBuilder {
        self.config.faults = plan;
        self
    }

    /// Sets the capabilities.
    pub fn capabilities(mut self, capabilities: Capabilities) -> SimulatorBuilder {
        self.info.capabilities = capabilities;
        self
    }

    /// Removes the link between two devices of a machine: neither is a peer of the other.
    pub fn without_link(mut self, one: u32, other: u32) -> SimulatorBuilder {
        self.unlinked.push((one, other));
        self
    }

    /// Permits memory that is exported as fabric handles, as on a machine with the IMEX service. Only
    /// the simulated machine that exported it can import it.
    pub fn with_fabric(mut self) -> SimulatorBuilder {
        self.config.fabric_permitted = true;
        self
    }

    /// Builds the card.
    pub fn build(self) -> Simulator {
        self.build_machine(1).pop().expect("a machine of one device")
    }

    /// Builds a machine of `devices` such cards and returns them in the order of their ordinals. Their
    /// ids are `sim:h200x2:0` and so on, or `sim:h200` if there is only one.
    ///
    /// ```
    /// use vramp_core::{AddrRange, Bytes};
    /// use vramp_driver::{DeviceCopy, Driver, MemoryProperties, sim::{Contents, Simulator}};
    /// let [first, second] = Simulator::builder().contents(Contents::Stored).build_machine(2)
    ///     .try_into().expect("two devices");
    /// let ranges = [&first, &second].map(|device| {
    ///     let range = AddrRange::new(device.reserve(Bytes::mib(2), Bytes::mib(2)).unwrap(), Bytes::mib(2));
    ///     let handle = device.create(range.len, MemoryProperties::DEVICE).unwrap();
    ///     device.map(range.start, handle).unwrap();
    ///     device.set_access(range, &device.info().peers).unwrap();
    ///     range
    /// });
    /// let stream = first.create_stream()?;
    /// first.fill(stream, ranges[0], 7)?;
    /// let copy = DeviceCopy { from: ranges[0].start, to: ranges[1].start, len: Bytes::mib(2) };
    /// first.copy_peer(stream, copy, &second)?;
    /// first.synchronize_stream(stream)?;
    /// assert!(second.peek(ranges[1]).unwrap().iter().all(|byte| *byte == 7));
    /// # Ok::<(), vramp_driver::DriverError>(())
    /// ```
    ///
    /// # Panics
    /// If `devices` is zero or more than 64.
    pub fn build_machine(mut self, devices: usize) -> Vec<Simulator> {
        assert!((1..=DEVICES_MAX).contains(&devices), "devices={devices}");
        let costs = &self.config.costs;
        let origin = if costs.measured { "measured" } else { "costs not measured on this card" };
        self.info.driver = format!("vramp simulator, {origin}: {}", costs.source);
        self.info.limits.pool_step = costs.pool().granule;
        let usable = self.info.limits.memory - self.context;
        let page = self.info.limits.page;
        let memory = Memory::new(devices, page, usable, self.address_space, self.host.take());
        let infos: Vec<DeviceInfo> =
            (0..devices as u32).map(|ordinal| self.info_of(ordinal, devices as u32)).collect();
        let peers = infos.iter().map(|info| {
            info.peers.iter().fold(DeviceSet::default(), |set, peer| set.with(*peer as usize))
        });
        let peers: Vec<DeviceSet> = peers.collect();
        let state = State::new(memory, &peers, self.info.capabilities, self.config);
        let state = Arc::new(Mutex::new(state));
        let simulator = |(device, info)| Simulator { info, device, state: Arc::clone(&state) };
        infos.into_iter().enumerate().map(simulator).collect()
    }

    /// Returns the identity of one of `devices`.
    fn info_of(&self, ordinal: u32, devices: u32) -> DeviceInfo {
        let linked = |peer: &u32| {
            let pairs = [(ordinal, *peer), (*peer, ordinal)];
            *peer != ordinal && !pairs.iter().any(|pair| self.unlinked.contains(pair))
        };
        let id = match devices {
            1 => self.info.id.clone(),
            _ => format!("{}x{devices}:{ordinal}", self.info.id),
        };
        DeviceInfo {
            id,
            ordinal,
            peers: (0..devices).filter(linked).collect(),
            ..self.info.clone()
        }
    }
}
