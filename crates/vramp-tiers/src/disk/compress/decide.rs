//! Whether compressing pays.

use vramp_core::Bytes;

use crate::disk::DiskConfigError;

/// When a store compresses what it writes. Never, unless one of these is in its
/// [`DiskConfig`](crate::disk::DiskConfig).
///
/// A part of each write is compressed to see what that would save. The rest is compressed as well if
/// that is enough, and takes less time than the disk would for what is saved, both as measured by
/// the store; or whatever it takes, once the space runs short.
///
/// What it costs: threads of the store, up to eight, and memory, as much as what is being compressed
/// or decompressed. Of that four writes' worth is kept for the next ones, until
/// [`trim`](crate::DiskStore::trim).
///
/// ```
/// use vramp_host::{HostMemory, HostSpan, PageKind};
/// use vramp_tiers::disk::{CompressionConfig, DiskConfig, ChargeTo};
/// use vramp_tiers::{Bytes, DiskStore, ReservationManager, SpaceConfig, SpaceId};
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
/// let stored = store.write(&[HostSpan::new(&zeros, Bytes::ZERO, Bytes::mib(4))?], ChargeTo::Space)?;
/// assert_eq!(stored.len(), Bytes::mib(4));
/// assert!(stored.charged() < Bytes::kib(100) && space.total() == stored.charged());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressionConfig {
    /// What it has to save at least, in thousandths of the bytes: 125.
    pub least_saving_per_mille: u16,
    /// With less than this part of the space's capacity left, in thousandths, room counts more than
    /// time: 250. At 1000 it always does, at 0 never.
    pub short_below_per_mille: u16,
}

impl Default for CompressionConfig {
    fn default() -> CompressionConfig {
        CompressionConfig { least_saving_per_mille: 125, short_below_per_mille: 250 }
    }
}

impl CompressionConfig {
    pub(in crate::disk) fn check(self) -> Result<(), DiskConfigError> {
        match self.least_saving_per_mille.max(self.short_below_per_mille) {
            0..=1000 => Ok(()),
            more => Err(DiskConfigError::PerMille(more)),
        }
    }

    /// True if `compressed` bytes in place of `bytes` are few enough.
    pub(super) fn saves_enough(self, bytes: Bytes, compressed: Bytes) -> bool {
        let saved = u128::from(bytes.saturating_sub(compressed).count());
        saved > 0
            && saved * 1000 >= u128::from(bytes.count()) * u128::from(self.least_saving_per_mille)
    }

    fn is_short(self, Room { left, capacity }: Room) -> bool {
        let least = u128::from(capacity.count()) * u128::from(self.short_below_per_mille);
        u128::from(left.count()) * 1000 < least
    }
}

/// What is known before a write is compressed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prospect {
    pub sample: Sample,
    pub rates: Speeds,
    pub room: Room,
}

/// A part of the write, and what it is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub bytes: Bytes,
    pub compressed: Bytes,
}

/// Bytes a second, where they were measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    /// What all threads compress together.
    pub compressor: Option<u64>,
    /// What the disk writes.
    pub disk: Option<u64>,
}

/// The space's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub left: Bytes,
    pub capacity: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Compress,
    SavesTooLittle,
    DiskFaster,
}

/// Whether to compress a write. O(1).
///
/// Compressing takes `bytes / compressor` and saves `bytes * saving / disk`, so it saves time if
/// `compressor * saving > disk`. That counts compressing as if nothing else went on meanwhile: what
/// overlaps comes on top, and so does what is saved when it is read, for decompressing is several
/// times as fast as compressing. Where nothing was measured yet, it is tried.
pub(super) fn decide(config: CompressionConfig, prospect: &Prospect) -> Decision {
    let Sample { bytes, compressed } = prospect.sample;
    if !config.saves_enough(bytes, compressed) {
        return Decision::SavesTooLittle;
    }
    let Speeds { compressor: Some(compressor), disk: Some(disk) } = prospect.rates else {
        return Decision::Compress;
    };
    let saved = u128::from(bytes.saturating_sub(compressed).count());
    let faster = u128::from(compressor) * saved > u128::from(disk) * u128::from(bytes.count());
    match faster || config.is_short(prospect.room) {
        true => Decision::Compress,
        false => Decision::DiskFaster,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1_000_000;

    /// A sample of a MiB, with three quarters of a GiB left of one.
    fn prospect(compressed_kib: u64, compressor: u64, disk: u64) -> Prospect {
        Prospect {
            sample: Sample { bytes: Bytes::mib(1), compressed: Bytes::kib(compressed_kib) },
            rates: Speeds { compressor: Some(compressor), disk: Some(disk) },
            room: Room { left: Bytes::mib(768), capacity: Bytes::gib(1) },
        }
    }

    fn decided(prospect: &Prospect) -> Decision {
        decide(CompressionConfig::default(), prospect)
    }

    #[test]
    fn what_a_sample_saves_has_to_be_enough() {
        // An eighth, and less.
        assert_eq!(decided(&prospect(896, 1000 * MB, 100 * MB)), Decision::Compress);
        assert_eq!(decided(&prospect(897, 1000 * MB, 100 * MB)), Decision::SavesTooLittle);
        assert_eq!(decided(&prospect(1100, 1000 * MB, 100 * MB)), Decision::SavesTooLittle);
        let any = CompressionConfig { least_saving_per_mille: 0, ..Default::default() };
        assert_eq!(decide(any, &prospect(1024, 1000 * MB, 0)), Decision::SavesTooLittle);
        assert_eq!(decide(any, &prospect(1023, 2000 * MB, MB)), Decision::Compress);
    }

    #[test]
    fn compressing_has_to_take_less_time_than_the_disk_for_what_is_saved() {
        // Half is saved: the compressor has to be twice as fast as the disk.
        assert_eq!(decided(&prospect(512, 2001 * MB, 1000 * MB)), Decision::Compress);
        assert_eq!(decided(&prospect(512, 2000 * MB, 1000 * MB)), Decision::DiskFaster);
        // Three quarters.
        assert_eq!(decided(&prospect(256, 1334 * MB, 1000 * MB)), Decision::Compress);
        assert_eq!(decided(&prospect(256, 1333 * MB, 1000 * MB)), Decision::DiskFaster);
    }

    #[test]
    fn what_was_never_measured_is_tried() {
        for rates in [(None, None), (Some(1), None), (None, Some(u64::MAX))] {
            let rates = Speeds { compressor: rates.0, disk: rates.1 };
            assert_eq!(decided(&Prospect { rates, ..prospect(512, 0, 0) }), Decision::Compress);
        }
    }

    #[test]
    fn where_room_is_short_time_does_not_count() {
        let slow = prospect(512, MB, 1000 * MB);
        let with = |left| Prospect { room: Room { left, ..slow.room }, ..slow };
        assert_eq!(decided(&with(Bytes::mib(256))), Decision::DiskFaster);
        assert_eq!(decided(&with(Bytes::mib(255))), Decision::Compress);
        let never = CompressionConfig { short_below_per_mille: 0, ..Default::default() };
        assert_eq!(decide(never, &with(Bytes::ZERO)), Decision::DiskFaster);
        let always = CompressionConfig { short_below_per_mille: 1000, ..Default::default() };
        assert_eq!(decide(always, &with(Bytes::mib(1023))), Decision::Compress);
        // What saves nothing gains no room either.
        let full = Prospect { sample: prospect(1024, 0, 0).sample, ..with(Bytes::ZERO) };
        assert_eq!(decided(&full), Decision::SavesTooLittle);
    }

    proptest! {
        #[test]
        fn no_number_is_too_large_and_a_faster_disk_never_makes_it_pay(
            bytes: u64, compressed: u64, compressor: u64, disk: u64, faster: u64, left: u64,
        ) {
            let with = |disk| Prospect {
                sample: Sample { bytes: Bytes::new(bytes), compressed: Bytes::new(compressed) },
                rates: Speeds { compressor: Some(compressor), disk: Some(disk) },
                room: Room { left: Bytes::new(left), capacity: Bytes::new(u64::MAX) },
            };
            let slow = decided(&with(disk.min(faster)));
            let fast = decided(&with(disk.max(faster)));
            prop_assert!(fast != Decision::Compress || slow == Decision::Compress);
        }
    }
}
