//! The presets: which allocator, with which settings.

use std::str::FromStr;
use std::sync::Arc;

use vramp_alloc::backend::Backend;
use vramp_alloc::config::{MakeBackend, ParseBytesError, Policy, Serving};
use vramp_alloc::error::CreateError;
use vramp_alloc::{Allocator, Bytes, Driver};

use crate::caching_pool::Settings;
use crate::core::{TorchConfig, TorchConfigError};
use crate::driver_pool::OrderedPool;

vramp_alloc::classify!(Option: UnknownPreset, EnvError, VariableError, TorchConfigError;);

/// An allocator by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// The default: chunks of mixed sizes, growth in place.
    Vramp,
    /// OpenVM's VPMM, as its document describes it.
    Vpmm,
    /// The driver's pool (`cudaMallocAsync`), which keeps all memory that it reserved.
    StreamOrdered,
    /// PyTorch's caching allocator with the settings of [`Config::torch`].
    Torch,
    /// The same with `expandable_segments:True`.
    TorchExpandable,
}

impl Preset {
    /// Every preset, the default first.
    pub const ALL: [Preset; 5] = [
        Preset::Vramp,
        Preset::Vpmm,
        Preset::StreamOrdered,
        Preset::Torch,
        Preset::TorchExpandable,
    ];

    /// Returns the name used in options and results.
    pub const fn name(self) -> &'static str {
        match self {
            Preset::Vramp => "vramp",
            Preset::Vpmm => "vpmm",
            Preset::StreamOrdered => "stream-ordered",
            Preset::Torch => "torch",
            Preset::TorchExpandable => "torch-expandable",
        }
    }

    /// Returns the configuration of an allocator with the defaults of this preset.
    pub fn config(self) -> vramp_alloc::Config {
        Config::preset(self).build()
    }

    /// Returns true for PyTorch's caching allocator.
    pub const fn is_torch(self) -> bool {
        matches!(self, Preset::Torch | Preset::TorchExpandable)
    }
}

/// Error of parsing a [`Preset`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no allocator '{name}': use vramp, vpmm, stream-ordered, torch or torch-expandable"
)]
pub struct UnknownPreset {
    /// Name that was given.
    pub name: String,
}

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(name: &str) -> Result<Preset, UnknownPreset> {
        let known = Preset::ALL.into_iter().find(|preset| preset.name() == name);
        known.ok_or_else(|| UnknownPreset { name: name.to_owned() })
    }
}

/// The variables that VPMM reads.
const VPMM_VARIABLES: [&str; 3] = ["VPMM_PAGE_SIZE", "VPMM_VA_SIZE", "VPMM_PAGES"];

/// The variables that PyTorch reads: the first one that is set.
const TORCH_VARIABLES: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// A preset with its settings. Every field has a default.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which allocator.
    pub preset: Preset,
    /// Settings of PyTorch's allocator. `torch-expandable` has expandable segments in any case.
    pub torch: TorchConfig,
    /// The settings that every allocator has. The policy is the preset's, and that of `vramp` has the
    /// parameters given here. With `vpmm` a page larger than the device's memory leaves every request to
    /// the driver's pool, as VPMM's document says.
    pub base: vramp_alloc::Config,
}

impl Config {
    /// Returns the defaults of a preset.
    pub fn preset(preset: Preset) -> Config {
        Config { preset, torch: TorchConfig::default(), base: vramp_alloc::Config::default() }
    }

    /// Returns this configuration with a limit.
    pub fn with_limit(mut self, limit: Option<Bytes>) -> Config {
        self.base.limit = limit;
        self
    }

    /// Returns the configuration of an allocator.
    pub fn build(self) -> vramp_alloc::Config {
        let Config { preset, torch, mut base } = self;
        base.backend = match preset {
            Preset::Vramp => None,
            Preset::Vpmm => {
                base.policy = Policy::Vpmm;
                Some(MakeBackend::new(beside_vpmm))
            }
            Preset::StreamOrdered => Some(MakeBackend::new(|driver, config| {
                Ok(Serving::All(drivers_pool(Preset::StreamOrdered, driver, config)?))
            })),
            Preset::Torch | Preset::TorchExpandable => {
                let expandable_segments =
                    torch.expandable_segments || preset == Preset::TorchExpandable;
                let torch = TorchConfig { expandable_segments, ..torch };
                Some(Settings { name: preset.name(), torch, one_handle: false }.backend())
            }
        };
        base
    }

    /// Creates an allocator on a device.
    ///
    /// # Errors
    /// As of [`Allocator::new`]; the device may lack what the preset needs.
    pub fn open(self, driver: Arc<dyn Driver>) -> Result<Allocator, CreateError> {
        Allocator::new(driver, self.build())
    }

    /// Returns this configuration with VPMM's variables applied: `VPMM_PAGE_SIZE`, `VPMM_VA_SIZE`
    /// (bytes, or with a unit such as `2MiB`) and `VPMM_PAGES` (a count). `lookup` returns a
    /// variable's value; the library itself never reads the environment.
    ///
    /// # Errors
    /// A variable has an impossible value.
    pub fn with_vpmm_variables(
        mut self,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, EnvError> {
        let size = |variable: &'static str| -> Result<Option<Bytes>, EnvError> {
            let Some(value) = lookup(variable) else { return Ok(None) };
            let parsed: Result<Bytes, ParseBytesError> = value.parse();
            match parsed {
                Ok(bytes) if !bytes.is_zero() => Ok(Some(bytes)),
                _ => Err(EnvError {
                    variable,
                    value,
                    expected: "a size above zero, such as 2097152 or 2MiB",
                }),
            }
        };
        if let Some(page) = size("VPMM_PAGE_SIZE")? {
            self.base.page = Some(page);
        }
        if let Some(span) = size("VPMM_VA_SIZE")? {
            self.base.span = span;
        }
        if let Some(value) = lookup("VPMM_PAGES") {
            let pages = value.trim().parse();
            let pages: u64 = pages.map_err(|_| EnvError {
                variable: "VPMM_PAGES",
                value,
                expected: "a whole number of pages, such as 16384",
            })?;
            self.base.prefill_pages = Some(pages);
        }
        Ok(self)
    }

    /// Returns this configuration with the variables applied that the preset's own project reads, and
    /// the names of those that were set: VPMM's for `vpmm`
    /// ([`with_vpmm_variables`](Config::with_vpmm_variables)), `PYTORCH_ALLOC_CONF` for the presets of
    /// PyTorch, or else `PYTORCH_CUDA_ALLOC_CONF`, and none for others. `lookup` returns a variable's
    /// value; the library itself never reads the environment.
    ///
    /// ```
    /// use vramp_peers::{Config, Preset};
    /// let lookup = |name: &str| {
    ///     (name == "PYTORCH_CUDA_ALLOC_CONF").then(|| "max_split_size_mb:64".to_owned())
    /// };
    /// let (config, used) = Config::preset(Preset::Torch).with_variables(lookup)?;
    /// assert!(config.torch.max_split_size.is_some());
    /// assert_eq!(used, ["PYTORCH_CUDA_ALLOC_CONF"]);
    /// # Ok::<(), vramp_peers::VariableError>(())
    /// ```
    ///
    /// # Errors
    /// A variable has an impossible value.
    pub fn with_variables(
        mut self,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<(Config, Vec<&'static str>), VariableError> {
        let names = match self.preset {
            Preset::Vpmm => &VPMM_VARIABLES[..],
            Preset::Torch | Preset::TorchExpandable => &TORCH_VARIABLES[..],
            Preset::Vramp | Preset::StreamOrdered => &[],
        };
        let mut used: Vec<&'static str> = names.to_vec();
        used.retain(|name| lookup(name).is_some());
        if self.preset == Preset::Vpmm {
            self = self.with_vpmm_variables(lookup)?;
        } else if let Some(&variable) = used.first() {
            // The first one counts, as in PyTorch.
            used.truncate(1);
            let settings = lookup(variable).unwrap_or_default();
            let torch = self.torch.with(&settings);
            self.torch = torch.map_err(|error| VariableError::Torch { variable, error })?;
        }
        Ok((self, used))
    }
}

/// Returns the driver's pool, where the device has it.
fn drivers_pool(
    preset: Preset,
    driver: &Arc<dyn Driver>,
    config: &vramp_alloc::Config,
) -> Result<Box<dyn Backend>, CreateError> {
    if !driver.info().capabilities.stream_ordered_pool {
        return Err(CreateError::NotSupported {
            preset: preset.name(),
            needed: "the driver's stream-ordered pool",
            instead: Preset::Vramp.name(),
        });
    }
    Ok(Box::new(OrderedPool::new(Arc::clone(driver), config.limit)?))
}

/// Returns what serves the requests that VPMM's pages do not.
fn beside_vpmm(
    driver: &Arc<dyn Driver>,
    config: &vramp_alloc::Config,
) -> Result<Serving, CreateError> {
    let (capabilities, limits) = (driver.info().capabilities, driver.info().limits);
    let pool = || drivers_pool(Preset::Vpmm, driver, config);
    match capabilities.virtual_memory {
        // No block is a page long: the document's way to disable the pool.
        true if config.page > Some(limits.memory) => Ok(Serving::All(pool()?)),
        true if capabilities.stream_ordered_pool => Ok(Serving::UnderAPage(pool()?)),
        _ => Ok(Serving::Nothing),
    }
}

impl From<vramp_alloc::Config> for Config {
    /// The preset of the virtual pool with these settings.
    fn from(base: vramp_alloc::Config) -> Config {
        let preset = match base.policy {
            Policy::Mixed(_) => Preset::Vramp,
            Policy::Vpmm => Preset::Vpmm,
        };
        Config { base, ..Config::preset(preset) }
    }
}

/// Error of a variable of VPMM with an impossible value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}='{value}' cannot be used: it should be {expected}")]
pub struct EnvError {
    /// Name of the variable.
    pub variable: &'static str,
    /// Value of the variable.
    pub value: String,
    /// Description of a possible value.
    pub expected: &'static str,
}

/// Error of [`Config::with_variables`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VariableError {
    /// A variable of VPMM has an impossible value.
    #[error(transparent)]
    Vpmm(#[from] EnvError),
    /// A variable of PyTorch has an impossible value.
    #[error("{variable} is invalid: {error}")]
    Torch {
        /// Name of the variable.
        variable: &'static str,
        /// What is wrong with its value.
        error: TorchConfigError,
    },
}
