//! Configuration of an allocator.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use vramp_driver::Driver;

use crate::backend::Backend;
pub use crate::completion::{ExternalProgress, Progress};
use crate::error::CreateError;
use crate::sharing::SharingConfig;
pub use vramp_core::{Bytes, ConfigError, Epoch, Mark, Mixed, ParseBytesError, Policy};

/// First address reservation of a pool: some times what a card has, so that a large pool has one span.
/// The same on every device, and so are the pool's addresses.
pub(crate) const FIRST_SPAN: Bytes = Bytes::gib(512);

/// The same of a pool beside others.
pub(crate) const FIRST_SPAN_BESIDE: Bytes = Bytes::gib(32);

/// Makes the backends of an allocator and of the pools that are created from it.
#[derive(Clone)]
pub struct MakeBackend(Arc<Make>);

type Make = dyn Fn(&Arc<dyn Driver>, &Config) -> Result<Serving, CreateError> + Send + Sync;

impl MakeBackend {
    /// Returns one that calls `make` with the device and the configuration of each pool.
    pub fn new(
        make: impl Fn(&Arc<dyn Driver>, &Config) -> Result<Serving, CreateError> + Send + Sync + 'static,
    ) -> MakeBackend {
        MakeBackend(Arc::new(make))
    }

    pub(crate) fn make(
        &self,
        driver: &Arc<dyn Driver>,
        config: &Config,
    ) -> Result<Serving, CreateError> {
        (self.0)(driver, config)
    }
}

impl fmt::Debug for MakeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("makes backends")
    }
}

/// Which requests a backend serves.
#[derive(Debug)]
pub enum Serving {
    /// All, in place of the virtual pool.
    All(Box<dyn Backend>),
    /// Those under a page, beside the virtual pool.
    UnderAPage(Box<dyn Backend>),
    /// None: the device has no such backend, and the virtual pool serves all.
    Nothing,
}

/// Configuration of an [`Allocator`](crate::Allocator). Every field has a default.
#[derive(Clone, Debug)]
pub struct Config {
    /// Most physical memory to reserve, in all pools of the allocator together. `None`, the default:
    /// as much as the card has.
    ///
    /// In the driver's pool (`cudaMallocAsync`) the driver decides by how much it grows. On a card it may
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
    /// granularity.
    pub page: Option<Bytes>,
    /// Length of the longest address reservation: 8 TiB, or less where the device has less.
    pub span: Bytes,
    /// Length of a pool's first address reservation, at most `span`. Each further one is as long as all
    /// before together, up to `span`. `None`, the default: 512 GiB, and 32 GiB for
    /// [`create_pool`](crate::Allocator::create_pool), so that thousands of pools share the addresses
    /// of a process. With [`Policy::Vpmm`] only `create_pool` does that: its document reserves `span`
    /// at once.
    pub first_span: Option<Bytes>,
    /// Placement policy of the virtual pool.
    pub policy: Policy,
    /// What serves requests in place of the virtual pool, or beside it. `None`, the default: the pool
    /// serves all.
    pub backend: Option<MakeBackend>,
    /// Who can reach the memory: other cards, processes, network cards.
    pub sharing: SharingConfig,
    /// Source of the completion of work.
    pub progress: Progress,
    /// Pages to reserve at the start, as in VPMM's variable. Takes precedence over `prefill`.
    pub prefill_pages: Option<u64>,
}

impl Config {
    /// Returns the bytes to reserve at the start; `None` if they do not fit 64 bits.
    pub(crate) fn prefill_bytes(&self, page: Bytes) -> Option<Bytes> {
        match self.prefill_pages {
            Some(pages) => page.count().checked_mul(pages).map(Bytes::new),
            None => Some(self.prefill),
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            limit: None,
            garbage_collection_threshold: None,
            patience: Duration::ZERO,
            prefill: Bytes::ZERO,
            page: None,
            span: Bytes::tib(8),
            first_span: None,
            policy: Policy::Mixed(Mixed::default()),
            backend: None,
            sharing: SharingConfig::default(),
            progress: Progress::Events,
            prefill_pages: None,
        }
    }
}
