//! Settings of PyTorch's allocator. `parse.rs` reads their syntax.

use vramp_core::Bytes;

/// Sizes that no setting of PyTorch changes.
pub(crate) mod fixed {
    /// Blocks begin and end at multiples of this.
    pub(crate) const BLOCK_ALIGN: u64 = 512;
    /// Requests up to this come from the small pool.
    pub(crate) const SMALL_LIMIT: u64 = 1 << 20;
    /// Segment size of the small pool.
    pub(crate) const SMALL_SEGMENT: u64 = 2 << 20;
    /// Large requests below this share segments.
    pub(crate) const SHARED_BELOW: u64 = 10 << 20;
    /// Segments of their own are a multiple of this.
    pub(crate) const OWN_SEGMENT_UNIT: u64 = 2 << 20;
}

/// The settings of PyTorch's allocator, as `PYTORCH_CUDA_ALLOC_CONF` names them.
///
/// ```
/// use vramp_peers::torch::{Bytes, TorchConfig};
/// let config: TorchConfig = "max_split_size_mb:128,expandable_segments:False".parse()?;
/// assert_eq!(config.max_split_size, Some(Bytes::mib(128)));
/// # Ok::<(), vramp_peers::torch::TorchConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TorchConfig {
    /// `expandable_segments`: one range of addresses for each stream and pool, mapped as needed.
    pub expandable_segments: bool,
    /// `max_split_size_mb`: blocks from this size on are never split. No bound by default.
    pub max_split_size: Option<Bytes>,
    /// `max_non_split_rounding_mb`: how much larger than its request an unsplit block may be. 20 MiB by
    /// default, as in PyTorch's code; a comment there, and what was written after it, says 1 MiB.
    pub max_non_split_rounding: Bytes,
    /// `large_segment_size_mb`: size of the segments that large requests under 10 MiB share, and of
    /// the handles of the large pool's expandable segments.
    pub large_segment_size: Bytes,
    /// `roundup_power2_divisions`: how sizes are rounded.
    pub roundup_power2_divisions: Divisions,
    /// `garbage_collection_threshold`: fraction of the limit above which old unused segments are
    /// released. Acts only with a limit.
    pub garbage_collection_threshold: Option<f64>,
    /// `per_process_memory_fraction`: fraction of the card that may be reserved, as a limit.
    pub per_process_memory_fraction: Option<f64>,
    /// Keys that were given and have no effect here: host memory, locks, captures.
    pub without_effect: Vec<String>,
}

impl Default for TorchConfig {
    fn default() -> TorchConfig {
        TorchConfig {
            expandable_segments: false,
            max_split_size: None,
            max_non_split_rounding: Bytes::mib(20),
            large_segment_size: Bytes::mib(20),
            roundup_power2_divisions: Divisions::default(),
            garbage_collection_threshold: None,
            per_process_memory_fraction: None,
            without_effect: Vec::new(),
        }
    }
}

/// Number of parts that each interval between two powers of two is divided into: sizes are rounded
/// up to the next part. One number for each power of two from 1 MiB to 32 GiB; smaller and larger
/// sizes use the first and the last. Zero and one mean no such rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Divisions(pub(crate) [u64; Divisions::INTERVALS]);

impl Divisions {
    /// Number of intervals.
    pub const INTERVALS: usize = 16;

    /// Returns the same number for every interval.
    pub fn everywhere(divisions: u64) -> Divisions {
        Divisions([divisions; Divisions::INTERVALS])
    }

    /// Returns the divisions of the interval that a size in bytes lies in.
    fn of(&self, size: u64) -> u64 {
        let above_1_mib = size.checked_ilog2().unwrap_or(0).saturating_sub(20) as usize;
        self.0[above_1_mib.min(Divisions::INTERVALS - 1)]
    }
}

impl TorchConfig {
    /// Returns the rounded size of a request, or `None` if it is larger than the address space.
    pub fn round(&self, size: Bytes) -> Option<Bytes> {
        let size = size.count();
        if size < fixed::BLOCK_ALIGN {
            return Some(Bytes::new(fixed::BLOCK_ALIGN));
        }
        let divisions = self.roundup_power2_divisions.of(size);
        let unit = if divisions > 1 && size > fixed::BLOCK_ALIGN * divisions {
            // One part of the interval that the size lies in. A power of two begins an interval.
            (1u64 << size.ilog2()) / divisions
        } else {
            fixed::BLOCK_ALIGN
        };
        size.checked_next_multiple_of(unit).map(Bytes::new)
    }

    /// Returns how much memory of the card is surely enough for a request that no cached block serves,
    /// or `None` if it is larger than the address space: a new segment, or all that it can add to an
    /// expandable one.
    pub fn memory_for(&self, size: Bytes) -> Option<Bytes> {
        let rounded = self.round(size)?.count();
        let segment = self.segment_size(rounded)?;
        let unit = match self.expandable_segments && rounded > fixed::SMALL_LIMIT {
            true => self.large_segment_size.count(),
            false => fixed::OWN_SEGMENT_UNIT,
        };
        segment.checked_next_multiple_of(unit).map(Bytes::new)
    }

    /// Returns the size of a new segment for a rounded size.
    pub(crate) fn segment_size(&self, rounded: u64) -> Option<u64> {
        if rounded <= fixed::SMALL_LIMIT {
            Some(fixed::SMALL_SEGMENT)
        } else if rounded < fixed::SHARED_BELOW {
            Some(self.large_segment_size.count())
        } else {
            rounded.checked_next_multiple_of(fixed::OWN_SEGMENT_UNIT)
        }
    }

    /// Returns the size from which blocks are oversize: see [`TorchConfig::max_split_size`].
    pub(crate) fn oversize(&self) -> u64 {
        self.max_split_size.map_or(u64::MAX, Bytes::count)
    }
}
