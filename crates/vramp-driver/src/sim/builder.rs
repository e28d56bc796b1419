//! Builder of simulated cards.

use std::sync::{Arc, Mutex};

use vramp_core::Bytes;
use vramp_host::MappedMemory;

use super::bytes::Contents;
use super::card::CardModel;
use super::cost::CostTable;
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
            posix_fd: false,
            fabric: false,
            rdma: false,
            dma_buf: false,
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
        };
        let (address_space, context) = (Bytes::ZERO, Bytes::ZERO);
        SimulatorBuilder { info, address_space, context, config, host: None }
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

    /// Builds the card.
    pub fn build(mut self) -> Simulator {
        let costs = &self.config.costs;
        let origin = if costs.measured { "measured" } else { "costs not measured on this card" };
        self.info.driver = format!("vramp simulator, {origin}: {}", costs.source);
        self.info.limits.pool_step = costs.pool().granule;
        let usable = self.info.limits.memory - self.context;
        let memory = Memory::new(self.info.limits.page, usable, self.address_space, self.host);
        let state = State::new(memory, self.info.capabilities, self.config);
        Simulator { info: self.info, state: Mutex::new(state) }
    }
}
