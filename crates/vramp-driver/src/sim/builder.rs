//! How a simulated card is put together.

use std::sync::Mutex;

use vramp_core::Bytes;

use super::bytes::Backing;
use super::cost::CostTable;
use super::fault::FaultPlan;
use super::preset::Preset;
use super::state::{Config, State};
use super::{Simulator, pool};
use crate::{Capabilities, DeviceInfo, Limits};

/// A simulated card put together by hand. Begins as an H200 with phantom bytes, no checker, no log
/// and no failures.
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_driver::{Driver, sim::{Backing, Simulator}};
/// let device = Simulator::builder().memory(Bytes::mib(64)).backing(Backing::Stored).build();
/// assert_eq!(device.info().limits.memory, Bytes::mib(64));
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    info: DeviceInfo,
    address_space: Bytes,
    config: Config,
}

impl Default for Builder {
    fn default() -> Builder {
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
            backing: Backing::default(),
            seed: 0,
            checker: false,
            log_capacity: 0,
            faults: FaultPlan::none(),
            costs: CostTable::h200(),
        };
        Builder { info, address_space: Bytes::ZERO, config }.card(&Preset::all()[0])
    }
}

impl Builder {
    /// Takes name, memory, limits and the origin of the costs from a known card.
    pub fn card(mut self, preset: &Preset) -> Builder {
        self.info.name = format!("{} (simulated)", preset.name);
        self.info.id = format!("sim:{}", preset.id);
        self.config.costs.measured = preset.measured;
        self.config.costs.source = preset.source.to_owned();
        self.memory(preset.memory).page(preset.page).address_space(preset.address_space)
    }

    /// Memory on the card.
    pub fn memory(mut self, memory: Bytes) -> Builder {
        self.info.limits.memory = memory;
        self
    }

    /// The granule of physical memory.
    ///
    /// # Panics
    /// If it is not a power of two.
    pub fn page(mut self, page: Bytes) -> Builder {
        assert!(page.count().is_power_of_two() || page.is_zero(), "page={page}");
        self.info.limits.page = page;
        self.info.limits.recommended_page = page;
        self
    }

    /// Addresses that can be reserved in all; more than 2 to the 55 are cut to that.
    pub fn address_space(mut self, len: Bytes) -> Builder {
        self.address_space = len.min(Bytes::new(pool::POOL_BASE / 2));
        self.info.limits.address_space = Some(self.address_space);
        self
    }

    /// Whether bytes are kept.
    pub fn backing(mut self, backing: Backing) -> Builder {
        self.config.backing = backing;
        self
    }

    /// What random failures are drawn from.
    pub fn seed(mut self, seed: u64) -> Builder {
        self.config.seed = seed;
        self
    }

    /// Turns the happens-before checker on.
    pub fn checked(mut self) -> Builder {
        self.config.checker = true;
        self
    }

    /// Keeps a log of the last `calls` driver calls.
    pub fn logged(mut self, calls: usize) -> Builder {
        self.config.log_capacity = calls;
        self
    }

    /// Charges calls by this table.
    pub fn costs(mut self, costs: CostTable) -> Builder {
        self.config.costs = costs;
        self
    }

    /// Fails calls by this plan.
    pub fn faults(mut self, plan: FaultPlan) -> Builder {
        self.config.faults = plan;
        self
    }

    /// Sets what works at all.
    pub fn capabilities(mut self, capabilities: Capabilities) -> Builder {
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
