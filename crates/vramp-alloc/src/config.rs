//! Configuration of an allocator.

use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vramp_core::{Policy, StreamId};

use crate::sharing::SharingConfig;
pub use vramp_core::{Bytes, ConfigError, Epoch, Mark, Mixed, ParseBytesError};

pub use vramp_model::{Divisions, TorchConfig, TorchConfigError};

/// Memory manager of an allocator.
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

/// Source of the completion of work.
#[derive(Clone, Debug, Default)]
pub enum Progress {
    /// The driver's events.
    #[default]
    Events,
    /// A table that the caller updates. The allocator still waits for the driver's event of an
    /// epoch, so memory is never reused early; but decisions do not depend on a clock.
    External(Arc<ExternalProgress>),
}

/// The epoch that each stream has reached, by a source other than the driver: see
/// [`Progress::External`]. It holds one entry for each stream up to the highest that was set.
#[derive(Debug, Default)]
pub struct ExternalProgress {
    reached: Mutex<Vec<Option<Epoch>>>,
}

impl ExternalProgress {
    /// Sets the epoch that `stream` has reached; `None`, as at the start, means all recorded work.
    pub fn set(&self, stream: StreamId, reached: Option<Epoch>) {
        let mut table = self.table();
        if table.len() <= stream.index() {
            table.resize(stream.index() + 1, None);
        }
        table[stream.index()] = reached;
    }

    /// Returns the epoch that the stream of `last` has reached, at most that of `last`.
    pub fn reached(&self, last: Mark) -> Epoch {
        let reached = self.table().get(last.stream.index()).copied().flatten();
        reached.map_or(last.epoch, |reached| reached.min(last.epoch))
    }

    fn table(&self) -> MutexGuard<'_, Vec<Option<Epoch>>> {
        // Each entry is changed in one step.
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The variables that VPMM reads.
const VPMM_VARIABLES: [&str; 3] = ["VPMM_PAGE_SIZE", "VPMM_VA_SIZE", "VPMM_PAGES"];

/// The variables that PyTorch reads: the first one that is set.
const TORCH_VARIABLES: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// First address reservation of a pool: some times what a card has, so that a large pool has one span.
/// The same on every device, and so are the pool's addresses.
pub(crate) const FIRST_SPAN: Bytes = Bytes::gib(512);

/// The same of a pool beside others.
pub(crate) const FIRST_SPAN_BESIDE: Bytes = Bytes::gib(32);

/// Configuration of an [`Allocator`](crate::Allocator). Every field has a default.
#[derive(Clone, Debug)]
pub struct Config {
    /// Memory manager.
    pub preset: Preset,
    /// Most physical memory to reserve, in all pools of the allocator together. `None`, the default:
    /// as much as the card has.
    ///
    /// With the preset `stream-ordered` the driver decides by how much its pool grows. On a card it may
    /// grow beyond the limit if its free memory is fragmented; the request then fails, and the pool is
    /// trimmed at once. On an H200 it was up to 52 MiB.
    pub limit: Option<Bytes>,
    /// Fraction of the limit, or of the card where there is none, between 0 and 1. After a miss,
    /// idle memory above it is returned to the card. `None`, the default: never.
    pub garbage_collection_threshold: Option<f64>,
    /// Time that a request without memory waits for other threads to free some. Zero by default.
    pub patience: Duration,
    /// Memory to reserve at the start.
    pub prefill: Bytes,
    /// Page size of the pool, a multiple of the device's granularity. `None`, the default: the
    /// granularity. With the preset `vpmm` a page larger than the device's memory leaves every
    /// request to the driver's pool, as VPMM's document says.
    pub page: Option<Bytes>,
    /// Length of the longest address reservation: 8 TiB, or less where the device has less.
    pub span: Bytes,
    /// Length of a pool's first address reservation, at most `span`. Each further one is as long as all
    /// before together, up to `span`. `None`, the default: 512 GiB, and 32 GiB for
    /// [`create_pool`](crate::Allocator::create_pool), so that thousands of pools share the addresses
    /// of a process. With the preset `vpmm` only `create_pool` does that: its document reserves `span`
    /// at once.
    pub first_span: Option<Bytes>,
    /// Settings of the default manager.
    pub mixed: Mixed,
    /// Settings of PyTorch's allocator. `torch-expandable` has expandable segments in any case.
    pub torch: TorchConfig,
    /// Who can reach the memory: other cards, processes, network cards.
    pub sharing: SharingConfig,
    /// True if each segment of PyTorch's allocator is one handle instead of a plain allocation, so that it
    /// can be exported and accessed by peers: [`Allocator::comm_pool`](crate::Allocator::comm_pool).
    pub one_handle_segments: bool,
    /// Source of the completion of work.
    pub progress: Progress,
    /// Pages to reserve at the start, as in VPMM's variable. Takes precedence over `prefill`.
    pub prefill_pages: Option<u64>,
}

impl Config {
    /// Returns the defaults of a preset.
    pub fn preset(preset: Preset) -> Config {
        Config {
            preset,
            limit: None,
            garbage_collection_threshold: None,
            patience: Duration::ZERO,
            prefill: Bytes::ZERO,
            page: None,
            span: Bytes::tib(8),
            first_span: None,
            mixed: Mixed::default(),
            torch: TorchConfig::default(),
            sharing: SharingConfig::default(),
            one_handle_segments: false,
            progress: Progress::Events,
            prefill_pages: None,
        }
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
            self.page = Some(page);
        }
        if let Some(span) = size("VPMM_VA_SIZE")? {
            self.span = span;
        }
        if let Some(value) = lookup("VPMM_PAGES") {
            let pages = value.trim().parse();
            let pages: u64 = pages.map_err(|_| EnvError {
                variable: "VPMM_PAGES",
                value,
                expected: "a whole number of pages, such as 16384",
            })?;
            self.prefill_pages = Some(pages);
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
    /// use vramp_alloc::{Config, Preset};
    /// let lookup = |name: &str| {
    ///     (name == "PYTORCH_CUDA_ALLOC_CONF").then(|| "max_split_size_mb:64".to_owned())
    /// };
    /// let (config, used) = Config::preset(Preset::Torch).with_variables(lookup)?;
    /// assert!(config.torch.max_split_size.is_some());
    /// assert_eq!(used, ["PYTORCH_CUDA_ALLOC_CONF"]);
    /// # Ok::<(), vramp_alloc::config::VariableError>(())
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

    /// Returns the bytes to reserve at the start; `None` if they do not fit 64 bits.
    pub(crate) fn prefill_bytes(&self, page: Bytes) -> Option<Bytes> {
        match self.prefill_pages {
            Some(pages) => page.count().checked_mul(pages).map(Bytes::new),
            None => Some(self.prefill),
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        match self.preset {
            Preset::Vpmm => Policy::Vpmm,
            _ => Policy::Mixed(self.mixed),
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::preset(Preset::Vramp)
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
