//! What an allocator is told when it is made.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use vramp_core::Policy;

pub use vramp_core::{Bytes, ConfigError, Epoch, Mark, Mixed, ParseBytesError};
pub use vramp_model::{Divisions, TorchConfig, TorchConfigError};

/// Which manager stands behind the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// The default: chunks of mixed sizes, growth in place.
    Vramp,
    /// OpenVM's VPMM, as its document describes it.
    Vpmm,
    /// The driver's own pool (`cudaMallocAsync`), keeping all it ever got.
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

    /// The name used in options and results.
    pub const fn name(self) -> &'static str {
        match self {
            Preset::Vramp => "vramp",
            Preset::Vpmm => "vpmm",
            Preset::StreamOrdered => "stream-ordered",
            Preset::Torch => "torch",
            Preset::TorchExpandable => "torch-expandable",
        }
    }

    /// True if PyTorch's caching allocator stands behind it.
    pub const fn is_torch(self) -> bool {
        matches!(self, Preset::Torch | Preset::TorchExpandable)
    }
}

/// A name that is no preset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no allocator '{name}': use vramp, vpmm, stream-ordered, torch or torch-expandable"
)]
pub struct UnknownPreset {
    /// What was given.
    pub name: String,
}

impl FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(name: &str) -> Result<Preset, UnknownPreset> {
        let known = Preset::ALL.into_iter().find(|preset| preset.name() == name);
        known.ok_or_else(|| UnknownPreset { name: name.to_owned() })
    }
}

/// How the allocator learns that work is over.
#[derive(Clone, Default)]
pub enum Progress {
    /// It asks the driver's events.
    #[default]
    Events,
    /// Somebody else decides: given a stream's last recorded mark, the function returns the epoch
    /// it has reached, at most that one. The allocator still waits for the driver's event before
    /// it believes it, so memory is never reused early; but decisions do not depend on a clock.
    External(Arc<dyn Fn(Mark) -> Epoch + Send + Sync>),
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Progress::Events => "Events",
            Progress::External(_) => "External",
        })
    }
}

/// What an allocator is told when it is made. Every field has a default.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which manager.
    pub preset: Preset,
    /// The most physical memory it may hold. Unlimited by default: the card is the limit.
    pub limit: Option<Bytes>,
    /// Above this share of the limit, or of the card where there is none, idle memory is given back
    /// whenever a request had to go beyond what was free. Between 0 and 1; never by default.
    pub garbage_collection_threshold: Option<f64>,
    /// How long a request that finds no memory waits for other threads to give some back. Not at
    /// all by default.
    pub patience: Duration,
    /// Memory to take from the card at once.
    pub prefill: Bytes,
    /// The granule of VPMM's pool. The device's own by default.
    pub page: Option<Bytes>,
    /// Addresses reserved at a time: 8 TiB, or less where the device has less.
    pub span: Bytes,
    /// The numbers of the default manager.
    pub mixed: Mixed,
    /// The settings of PyTorch's allocator. `torch-expandable` has expandable segments whatever they
    /// say.
    pub torch: TorchConfig,
    /// How the allocator learns that work is over.
    pub progress: Progress,
    /// The same in pages of whatever size the pool has, as VPMM's variable says it. Comes before
    /// `prefill`.
    pub prefill_pages: Option<u64>,
}

impl Config {
    /// The defaults of a preset.
    pub fn preset(preset: Preset) -> Config {
        Config {
            preset,
            limit: None,
            garbage_collection_threshold: None,
            patience: Duration::ZERO,
            prefill: Bytes::ZERO,
            page: None,
            span: Bytes::tib(8),
            mixed: Mixed::default(),
            torch: TorchConfig::default(),
            progress: Progress::Events,
            prefill_pages: None,
        }
    }

    /// Lets VPMM's variables change this configuration: `VPMM_PAGE_SIZE`, `VPMM_VA_SIZE` (bytes,
    /// or with a unit such as `2MiB`) and `VPMM_PAGES` (a count). `lookup` returns a variable's
    /// value; the library itself never reads the environment.
    ///
    /// # Errors
    /// Names the variable and what it should be.
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

    /// The bytes to take at once, given the page.
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

/// A variable of VPMM that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}='{value}' cannot be used: it should be {expected}")]
pub struct EnvError {
    /// The variable's name.
    pub variable: &'static str,
    /// Its value.
    pub value: String,
    /// What would be right.
    pub expected: &'static str,
}
