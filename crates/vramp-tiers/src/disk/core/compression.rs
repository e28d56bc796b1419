//! Whether compressing a write pays.

use vramp_core::Bytes;

/// When a store compresses what it writes; see
/// [`DiskConfig::compression`](crate::disk::DiskConfig::compression).
///
/// A sample of each write is compressed first. The rest is compressed too if the sample saves
/// enough, and if compressing takes less time than the disk needs for the saved bytes, by the
/// throughput that the store has measured. Once the space runs short, time does not count.
///
/// Cost: up to eight threads of the store, and as much memory as is being compressed or
/// decompressed. The memory of four writes stays allocated until
/// [`trim`](crate::disk::DiskStore::trim).
///
/// ```
/// use vramp_tiers::disk::{ChargeTo, CompressionConfig, DiskConfig, DiskStore};
/// use vramp_tiers::host::{HostMemory, HostSpan, PageKind};
/// use vramp_tiers::{Bytes, ReservationManager, SpaceConfig, SpaceId};
///
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path();
/// let disk = SpaceId::disk(0);
/// let manager = ReservationManager::new([(disk, SpaceConfig::disk(Bytes::gib(8)))])?;
/// let space = manager.space(disk).expect("it was configured");
/// let compression = Some(CompressionConfig::default());
/// let config = DiskConfig { file_size: Bytes::mib(16), compression, ..DiskConfig::default() };
/// let store = DiskStore::open(dir, config, &space)?;
///
/// let zeros = HostMemory::new(Bytes::mib(4), None, PageKind::default())?;
/// let all = [HostSpan::new(&zeros, Bytes::ZERO, Bytes::mib(4))?];
/// let stored = store.write(&all, ChargeTo::Space)?;
/// assert_eq!(stored.len(), Bytes::mib(4));
/// assert!(stored.charged() < Bytes::kib(100) && space.total() == stored.charged());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressionConfig {
    /// Least saving, in thousandths of the bytes. The default is 125.
    pub least_saving_per_mille: u16,
    /// The space runs short when less than this part of its capacity is available, in thousandths.
    /// The default is 250. At 1000 time never counts, at 0 it always does.
    pub short_below_per_mille: u16,
}

impl Default for CompressionConfig {
    fn default() -> CompressionConfig {
        CompressionConfig { least_saving_per_mille: 125, short_below_per_mille: 250 }
    }
}

impl CompressionConfig {
    /// Returns a value that exceeds 1000 thousandths, if there is one.
    pub(in crate::disk) fn excess(self) -> Option<u16> {
        Some(self.least_saving_per_mille.max(self.short_below_per_mille))
            .filter(|most| *most > 1000)
    }

    /// Returns true if storing `compressed` bytes in place of `bytes` saves enough.
    pub(in crate::disk) fn saves_enough(self, bytes: Bytes, compressed: Bytes) -> bool {
        let saved = u128::from(bytes.saturating_sub(compressed).count());
        saved > 0
            && saved * 1000 >= u128::from(bytes.count()) * u128::from(self.least_saving_per_mille)
    }

    fn is_short(self, SpaceLeft { available, capacity }: SpaceLeft) -> bool {
        let least = u128::from(capacity.count()) * u128::from(self.short_below_per_mille);
        u128::from(available.count()) * 1000 < least
    }
}

/// Facts that the decision about one write depends on.
#[derive(Clone, Copy, Debug)]
pub(in crate::disk) struct Facts {
    pub sample: Sample,
    pub rates: Rates,
    pub space: SpaceLeft,
}

/// Length of the sampled ranges, before and after compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) struct Sample {
    pub bytes: Bytes,
    pub compressed: Bytes,
}

/// Measured bytes per second. `None` before the first measurement.
#[derive(Clone, Copy, Debug)]
pub(in crate::disk) struct Rates {
    /// All threads together, of bytes before compression.
    pub compressor: Option<u64>,
    /// Writes to the disk.
    pub disk: Option<u64>,
}

/// What the store's space has.
#[derive(Clone, Copy, Debug)]
pub(in crate::disk) struct SpaceLeft {
    pub available: Bytes,
    pub capacity: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) enum Decision {
    Compress,
    SavesTooLittle,
    DiskFaster,
}

/// Decides whether to compress a write. O(1).
///
/// Compressing takes `bytes / compressor` and saves `bytes * saving / disk`, so it saves time if
/// `compressor * saving > disk`. Compressing that overlaps other work saves more than that, and so
/// does reading, because decompressing is several times as fast as compressing. Before the first
/// measurement the write is compressed.
pub(in crate::disk) fn decide(config: CompressionConfig, facts: &Facts) -> Decision {
    let Sample { bytes, compressed } = facts.sample;
    if !config.saves_enough(bytes, compressed) {
        return Decision::SavesTooLittle;
    }
    let Rates { compressor: Some(compressor), disk: Some(disk) } = facts.rates else {
        return Decision::Compress;
    };
    let saved = u128::from(bytes.saturating_sub(compressed).count());
    let faster = u128::from(compressor) * saved > u128::from(disk) * u128::from(bytes.count());
    match faster || config.is_short(facts.space) {
        true => Decision::Compress,
        false => Decision::DiskFaster,
    }
}

/// Length of one range. Repetition that LZ4 finds lies within this distance.
const RANGE: Bytes = Bytes::kib(16);
/// Most ranges for one write.
const RANGES_MOST: u64 = 8;

/// Returns where the sampled ranges of `len` bytes begin, and the length of each. They are spread
/// evenly from the first byte to the last, and add up to 128 KiB at most.
pub(in crate::disk) fn sample_ranges(len: Bytes) -> (impl Iterator<Item = Bytes>, Bytes) {
    let count = (len.count() / RANGE.count()).clamp(1, RANGES_MOST);
    let each = RANGE.min(len);
    let last = len - each;
    let starts = (0..count).map(move |index| {
        let start = u128::from(last.count()) * u128::from(index) / u128::from((count - 1).max(1));
        Bytes::new(start as u64)
    });
    (starts, each)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1_000_000;

    /// A sample of 1 MiB in a space of 1 GiB with three quarters available.
    fn facts(compressed_kib: u64, compressor: u64, disk: u64) -> Facts {
        Facts {
            sample: Sample { bytes: Bytes::mib(1), compressed: Bytes::kib(compressed_kib) },
            rates: Rates { compressor: Some(compressor), disk: Some(disk) },
            space: SpaceLeft { available: Bytes::mib(768), capacity: Bytes::gib(1) },
        }
    }

    fn decided(facts: &Facts) -> Decision {
        decide(CompressionConfig::default(), facts)
    }

    #[test]
    fn a_sample_has_to_save_an_eighth() {
        // An eighth, and less.
        assert_eq!(decided(&facts(896, 1000 * MB, 100 * MB)), Decision::Compress);
        assert_eq!(decided(&facts(897, 1000 * MB, 100 * MB)), Decision::SavesTooLittle);
        assert_eq!(decided(&facts(1100, 1000 * MB, 100 * MB)), Decision::SavesTooLittle);
        let any = CompressionConfig { least_saving_per_mille: 0, ..Default::default() };
        assert_eq!(decide(any, &facts(1024, 1000 * MB, 0)), Decision::SavesTooLittle);
        assert_eq!(decide(any, &facts(1023, 2000 * MB, MB)), Decision::Compress);
    }

    #[test]
    fn compressing_has_to_take_less_time_than_writing_the_saved_bytes() {
        // Half is saved: the compressor has to be twice as fast as the disk.
        assert_eq!(decided(&facts(512, 2001 * MB, 1000 * MB)), Decision::Compress);
        assert_eq!(decided(&facts(512, 2000 * MB, 1000 * MB)), Decision::DiskFaster);
        // Three quarters.
        assert_eq!(decided(&facts(256, 1334 * MB, 1000 * MB)), Decision::Compress);
        assert_eq!(decided(&facts(256, 1333 * MB, 1000 * MB)), Decision::DiskFaster);
    }

    #[test]
    fn unmeasured_rates_compress() {
        for rates in [(None, None), (Some(1), None), (None, Some(u64::MAX))] {
            let rates = Rates { compressor: rates.0, disk: rates.1 };
            assert_eq!(decided(&Facts { rates, ..facts(512, 0, 0) }), Decision::Compress);
        }
    }

    #[test]
    fn where_space_is_short_time_does_not_count() {
        let slow = facts(512, MB, 1000 * MB);
        let with = |left| Facts { space: SpaceLeft { available: left, ..slow.space }, ..slow };
        assert_eq!(decided(&with(Bytes::mib(256))), Decision::DiskFaster);
        assert_eq!(decided(&with(Bytes::mib(255))), Decision::Compress);
        let never = CompressionConfig { short_below_per_mille: 0, ..Default::default() };
        assert_eq!(decide(never, &with(Bytes::ZERO)), Decision::DiskFaster);
        let always = CompressionConfig { short_below_per_mille: 1000, ..Default::default() };
        assert_eq!(decide(always, &with(Bytes::mib(1023))), Decision::Compress);
        // Bytes that do not compress free no space.
        let full = Facts { sample: facts(1024, 0, 0).sample, ..with(Bytes::ZERO) };
        assert_eq!(decided(&full), Decision::SavesTooLittle);
    }

    proptest! {
        #[test]
        fn no_number_is_too_large_and_a_faster_disk_never_makes_it_pay(
            bytes: u64, compressed: u64, compressor: u64, disk: u64, faster: u64, left: u64,
        ) {
            let with = |disk| Facts {
                sample: Sample { bytes: Bytes::new(bytes), compressed: Bytes::new(compressed) },
                rates: Rates { compressor: Some(compressor), disk: Some(disk) },
                space: SpaceLeft { available: Bytes::new(left), capacity: Bytes::new(u64::MAX) },
            };
            let slow = decided(&with(disk.min(faster)));
            let fast = decided(&with(disk.max(faster)));
            prop_assert!(fast != Decision::Compress || slow == Decision::Compress);
        }
    }

    #[test]
    fn samples_lie_within_and_reach_from_end_to_end() {
        let of = |len| {
            let (starts, each) = sample_ranges(len);
            (starts.collect::<Vec<_>>(), each)
        };
        assert_eq!(of(Bytes::new(5000)), (vec![Bytes::ZERO], Bytes::new(5000)));
        assert_eq!(of(Bytes::kib(31)), (vec![Bytes::ZERO], Bytes::kib(16)));
        for len in [Bytes::kib(40), Bytes::new((16 << 20) + 77), Bytes::tib(1 << 20)] {
            let (starts, each) = of(len);
            assert_eq!((starts[0], starts[starts.len() - 1] + each), (Bytes::ZERO, len));
            assert!(starts.windows(2).all(|pair| pair[0] + each <= pair[1]), "{starts:?}");
            assert!(starts.len() <= 8);
        }
    }
}
