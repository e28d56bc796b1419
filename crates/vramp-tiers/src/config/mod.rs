//! Configuration of the spaces of a program: in code, from TOML, or drawn up for a machine.
//!
//! 1. A [`TiersConfig`] lists the spaces. It is written by hand, read from TOML
//!    ([`TiersConfig::from_toml`]), or built by a [`TiersBuilder`] from the machine's topology.
//! 2. [`TiersConfig::check`] rejects an invalid configuration, with the table and the key.
//! 3. [`TiersConfig::spaces`] returns the argument of
//!    [`ReservationManager::new`](crate::ReservationManager::new).
//!
//! ```
//! use vramp_tiers::config::TiersConfig;
//! use vramp_tiers::{Bytes, ReservationManager, SpaceId};
//! let config = TiersConfig::from_toml(
//!     r#"
//!     [[gpu]]
//!     index = 0
//!     capacity = "80GiB"
//!     limit = 0.9           # a fraction of the capacity
//!     trigger = "60GiB"     # or an amount
//!
//!     [[host]]
//!     index = 0
//!     capacity = "64GiB"
//!     "#,
//! )?;
//! let manager = ReservationManager::new(config.spaces())?;
//! let gpu = manager.space(SpaceId::gpu(0)).expect("it is in the file");
//! assert_eq!(gpu.levels().trigger, Bytes::gib(60));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Levels keep the form in which they are given. Every fraction is a fraction of the space's own
//! capacity.
//!
//! Deliberately absent: reading files and environment variables, and allocating the memory. A
//! configuration is only numbers.

mod builder;
mod error;
mod spaces;
mod text;

use crate::ledger::core::{SpaceConfig, SpaceId};
use serde::{Deserialize, Serialize};
use vramp_core::Bytes;

pub use builder::{GpuInfo, GpuSelection, HostCapacity, HostLayout, TiersBuilder};
pub use error::ConfigError;
pub use spaces::{
    DiskSpaceConfig, GpuSpaceConfig, HostBlocks, HostSpaceConfig, PeerConfig, SpaceLevels,
};
pub use vramp_host::{NumaNode, topology};

/// Configuration of all spaces of a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TiersConfig {
    /// Machine whose GPUs these are, as `vramp_alloc::open` names it: `cuda`, `sim:h200`,
    /// `sim:h200x2`. `None` for `auto`: the cards of this machine, or simulated ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Reads in place after which a buffer is restored, if there is room. `None` for the default, 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promote_after: Option<u32>,
    /// GPUs.
    #[serde(default, rename = "gpu", skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuSpaceConfig>,
    /// Pinned memory of the host.
    #[serde(default, rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostSpaceConfig>,
    /// Directories on disks.
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpaceConfig>,
    /// Cards whose free memory holds contents of the others.
    #[serde(default, rename = "peer", skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerConfig>,
}

impl TiersConfig {
    /// Reads and checks a configuration. Unknown keys are errors.
    ///
    /// # Errors
    /// The text or the configuration is invalid; the error names the line, or the table and the
    /// key.
    pub fn from_toml(text: &str) -> Result<TiersConfig, ConfigError> {
        let config: TiersConfig = toml::from_str(text)
            .map_err(|error| ConfigError::Toml { message: error.to_string() })?;
        config.check()?;
        Ok(config)
    }

    /// Returns the configuration as TOML that [`from_toml`](TiersConfig::from_toml) reads. Amounts
    /// are exact.
    ///
    /// # Errors
    /// The path of a directory is not Unicode.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Toml { message: error.to_string() })
    }

    /// Returns the spaces, the fastest tier first.
    pub fn spaces(&self) -> Vec<(SpaceId, SpaceConfig)> {
        let gpus = self.gpus.iter().map(|gpu| (gpu.id(), gpu.space()));
        let hosts = self.hosts.iter().map(|host| (host.id(), host.space()));
        let disks = self.disks.iter().map(|disk| (disk.id(), disk.space()));
        gpus.chain(hosts).chain(disks).collect()
    }

    /// Returns the sum of all capacities; `None` on overflow.
    pub fn capacity(&self) -> Option<Bytes> {
        let mut all = self.spaces().into_iter().map(|(_, space)| space.capacity);
        all.try_fold(Bytes::ZERO, Bytes::checked_add)
    }

    /// Checks that a manager can be created with this configuration.
    ///
    /// # Errors
    /// The first defect: no space, a duplicate space or directory, invalid levels, blocks that are
    /// not whole pages, or pools that exceed their space.
    pub fn check(&self) -> Result<(), ConfigError> {
        let spaces = self.spaces();
        if spaces.is_empty() {
            return Err(ConfigError::NoSpaces);
        }
        for (nth, (space, _)) in spaces.iter().enumerate() {
            if spaces[..nth].iter().any(|(earlier, _)| earlier == space) {
                return Err(ConfigError::DuplicateSpace { space: *space });
            }
        }
        for host in &self.hosts {
            host.check()?;
        }
        for (nth, peer) in self.peers.iter().enumerate() {
            if self.peers[..nth].iter().any(|earlier| earlier.index == peer.index) {
                return Err(ConfigError::DuplicatePeer { index: peer.index });
            }
        }
        for (space, config) in spaces {
            config.levels().map_err(|error| ConfigError::InvalidLevels { space, error })?;
        }
        for (nth, disk) in self.disks.iter().enumerate() {
            if disk.directory.as_os_str().is_empty() {
                return Err(ConfigError::EmptyDirectory { space: disk.id() });
            }
            let same = |earlier: &&DiskSpaceConfig| earlier.directory == disk.directory;
            if let Some(earlier) = self.disks[..nth].iter().find(same) {
                return Err(ConfigError::DuplicateDirectory {
                    directory: disk.directory.clone(),
                    spaces: [earlier.id(), disk.id()],
                });
            }
        }
        if self.capacity().is_none() {
            return Err(ConfigError::CapacityOverflow);
        }
        Ok(())
    }
}
