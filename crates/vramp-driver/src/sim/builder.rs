//! How a simulated card is put together.

use std::sync::Mutex;

use vramp_core::Bytes;

use super::bytes::Contents;
use super::card::CardModel;
use super::cost::CostTable;
use super::fault::FaultPlan;
use super::state::{Config, State};
use super::{Simulator, pool};
use crate::{Capabilities, DeviceInfo, Limits};

/// A simulated card put together by hand. Begins as an H200 with phantom bytes, no checker, no log
/// and no failures.
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
    config: Config,
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
        };
        let limits = Limits {
            memory: Bytes::ZERO,
            page: Bytes::ZERO,
            recommended_page: Bytes::ZERO,
            address_space: None,
        };
        let info = DeviceInfo {
            name: String::new(),
            id: String::new(),
            driver: String::new(),
            simulated: true,
            pci: None,
            uuid: None,
            host_numa: None,
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
        SimulatorBuilder { info, address_space: Bytes::ZERO, config }.card(&CardModel::all()[0])
    }
}

impl SimulatorBuilder {
    /// Takes name, memory, limits and the origin of the costs from a known card.
    pub fn card(mut self, preset: &CardModel) -> SimulatorBuilder {
        self.info.name = format!("{} (simulated)", preset.name);
        self.info.id = format!("sim:{}", preset.id);
        self.config.costs.measured = preset.measured;
        self.config.costs.source = preset.source.to_owned();
        self.memory(preset.memory).page(preset.page).address_space(preset.address_space)
    }

    /// Memory on the card.
    pub fn memory(mut self, memory: Bytes) -> SimulatorBuilder {
        self.info.limits.memory = memory;
        self
    }

    /// The granule of physical memory.
    ///
    /// # Panics
    /// If it is not a power of two.
    pub fn page(mut self, page: Bytes) -> SimulatorBuilder {
        assert!(page.count().is_power_of_two() || page.is_zero(), "page={page}");
        self.info.limits.page = page;
        self.info.limits.recommended_page = page;
        self
    }

    /// Addresses that can be reserved in all; more than 2 to the 55 are cut to that.
    pub fn address_space(mut self, len: Bytes) -> SimulatorBuilder {
        self.address_space = len.min(Bytes::new(pool::POOL_BASE / 2));
        self.info.limits.address_space = Some(self.address_space);
        self
    }

    /// Whether bytes are kept.
    pub fn contents(mut self, contents: Contents) -> SimulatorBuilder {
        self.config.contents = contents;
        self
    }

    /// What random failures are drawn from.
    pub fn seed(mut self, seed: u64) -> SimulatorBuilder {
        self.config.seed = seed;
        self
    }

    /// Turns the happens-before checker on.
    pub fn checked(mut self) -> SimulatorBuilder {
        self.config.checker = true;
        self
    }

    /// Keeps a log of the last `calls` driver calls.
    pub fn logged(mut self, calls: usize) -> SimulatorBuilder {
        self.config.log_capacity = calls;
        self
    }

    /// Charges calls by this table.
    pub fn costs(mut self, costs: CostTable) -> SimulatorBuilder {
        self.config.costs = costs;
        self
    }

    /// Fails calls by this plan.
    pub fn faults(mut self, plan: FaultPlan) -> SimulatorBuilder {
        self.config.faults = plan;
        self
    }

    /// Sets what works at all.
    pub fn capabilities(mut self, capabilities: Capabilities) -> SimulatorBuilder {
        self.info.capabilities = capabilities;
        self
    }

    /// The card.
    pub fn build(mut self) -> Simulator {
        let costs = &self.config.costs;
        let origin = if costs.measured { "measured" } else { "costs not measured on this card" };
        self.info.driver = format!("vramp simulator, {origin}: {}", costs.source);
        let state =
            State::new(self.info.limits, self.address_space, self.info.capabilities, self.config);
        Simulator { info: self.info, state: Mutex::new(state) }
    }
}
