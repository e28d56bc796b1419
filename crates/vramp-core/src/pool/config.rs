//! Pool configuration: plain numbers, validated once.

use crate::Bytes;

/// Large blocks begin and end at multiples of this.
pub(crate) const BLOCK_ALIGN: Bytes = Bytes::new(512);

/// Placement policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Chunks of mixed sizes, growth in place, first fit by address. The default.
    Mixed(Mixed),
    /// OpenVM's VPMM: one-page chunks, best fit, every growth in a new hole.
    Vpmm,
}

/// Parameters of the default policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixed {
    /// Smallest new chunk, except one that serves its request exactly, and where much memory is
    /// stranded. Half of it where several streams use the pool. Larger chunks cost fewer driver
    /// calls and strand more memory when partly used.
    pub chunk_min: Bytes,
    /// Largest new chunk for requests that are not huge.
    pub chunk_usual: Bytes,
    /// Largest new chunk.
    pub chunk_max: Bytes,
    /// Between `chunk_min` and `chunk_usual`, a new chunk is this part of the pool's high-water
    /// mark.
    pub chunks_per_pool: u64,
    /// Up to `chunk_max`, a huge request is built of at least this many chunks.
    pub chunks_per_request: u64,
    /// The pool may hold this many thousandths above the high-water mark of live memory rather
    /// than remap.
    pub slack_per_mille: u64,
    /// Least growth at a time, as far as the slack allows it. With zero the pool grows by what the
    /// request lacks: many requests of a page each then have a chunk each.
    pub growth_min: Bytes,
    /// Largest request served from its stream's heap of slabs. Where several streams use the pool heaps grow
    /// for less: see [`StreamHeap::is_to_grow_for`](crate::StreamHeap::is_to_grow_for).
    pub heap_limit: Bytes,
    /// The same limit while threads contend for the allocator's lock: larger heaps cost a few
    /// percent of memory and take the lock less often.
    pub contended_heap_limit: Bytes,
}

impl Default for Mixed {
    /// Chosen on five recorded workloads, each also scaled from 0.2 to 1.35, to keep reserved
    /// memory within 2 % of live memory at the least driver time.
    fn default() -> Mixed {
        Mixed {
            chunk_min: Bytes::mib(8),
            chunk_usual: Bytes::mib(32),
            chunk_max: Bytes::mib(128),
            chunks_per_pool: 64,
            chunks_per_request: 64,
            slack_per_mille: 12,
            growth_min: Bytes::ZERO,
            heap_limit: Bytes::kib(256),
            contended_heap_limit: Bytes::mib(4),
        }
    }
}

/// Pool configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Granularity of physical memory.
    pub page: Bytes,
    /// Length of the longest address reservation, unless a request needs a longer one.
    pub span: Bytes,
    /// Length of the first address reservation. Each further one is as long as all before together,
    /// up to `span`.
    pub first_span: Bytes,
    /// Most physical memory that the pool may hold, or `None` for no limit.
    pub limit: Option<Bytes>,
    /// Placement policy.
    pub policy: Policy,
}

/// Error of [`PoolConfig::validate`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The page is not a power of two of at least 4 KiB.
    #[error(
        "a page of {page} is not possible: use a power of two of at least 4 KiB that is a multiple of the device's granularity"
    )]
    Page {
        /// Configured page.
        page: Bytes,
    },
    /// A span is not a whole number of pages, or too large.
    #[error(
        "a span of {span} is not possible: use a multiple of the page ({page}), at most 15 TiB"
    )]
    Span {
        /// Configured span.
        span: Bytes,
        /// Page of the pool.
        page: Bytes,
    },
    /// A chunk size is not a whole number of pages, or the smallest is above the largest.
    #[error(
        "chunks from {chunk_min} to {chunk_max} are not possible: use powers of two, multiples of the page ({page}), smallest first"
    )]
    Chunks {
        /// Smallest chunk.
        chunk_min: Bytes,
        /// Usual largest chunk.
        chunk_usual: Bytes,
        /// Largest chunk.
        chunk_max: Bytes,
        /// Page of the pool.
        page: Bytes,
    },
    /// Heaps do not serve requests of this size.
    #[error("heaps cannot serve requests up to {limit}: use at most {most}")]
    HeapLimit {
        /// Configured limit.
        limit: Bytes,
        /// Largest possible limit.
        most: Bytes,
    },
}

/// Half of the largest slab.
const HEAP_LIMIT_MOST: Bytes = Bytes::mib(16);

impl PoolConfig {
    /// Checks every number.
    ///
    /// # Errors
    /// The first one that is not possible.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let page = self.page;
        if !page.count().is_power_of_two() || page < Bytes::kib(4) {
            return Err(ConfigError::Page { page });
        }
        for span in [self.span, self.first_span] {
            if span.is_zero()
                || !span.is_multiple_of(page)
                || span > crate::ids::PoolAddr::SPAN_LIMIT
            {
                return Err(ConfigError::Span { span, page });
            }
        }
        if let Policy::Mixed(mixed) = self.policy {
            let Mixed { chunk_min, chunk_usual, chunk_max, .. } = mixed;
            let whole = |size: Bytes| size.count().is_power_of_two() && size >= page;
            let ordered = chunk_min <= chunk_usual && chunk_usual <= chunk_max;
            if ![chunk_min, chunk_usual, chunk_max].into_iter().all(whole) || !ordered {
                return Err(ConfigError::Chunks { chunk_min, chunk_usual, chunk_max, page });
            }
            let limit = mixed.heap_limit.max(mixed.contended_heap_limit);
            if limit > HEAP_LIMIT_MOST {
                return Err(ConfigError::HeapLimit { limit, most: HEAP_LIMIT_MOST });
            }
        }
        Ok(())
    }
}
