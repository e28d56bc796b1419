//! Tiers, spaces, and the levels of a space.

use std::fmt;

use vramp_core::Bytes;

/// A kind of memory, ordered from the fastest to the slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Device memory of a GPU.
    Gpu,
    /// Pinned host memory.
    Host,
    /// Files on a disk.
    Disk,
}

impl Tier {
    /// All tiers, the fastest first.
    pub const ALL: [Tier; 3] = [Tier::Gpu, Tier::Host, Tier::Disk];

    /// The next slower tier, to which data is spilled.
    pub const fn below(self) -> Option<Tier> {
        match self {
            Tier::Gpu => Some(Tier::Host),
            Tier::Host => Some(Tier::Disk),
            Tier::Disk => None,
        }
    }

    /// The next faster tier, to which data is restored.
    pub const fn above(self) -> Option<Tier> {
        match self {
            Tier::Gpu => None,
            Tier::Host => Some(Tier::Gpu),
            Tier::Disk => Some(Tier::Host),
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Tier::Gpu => "gpu",
            Tier::Host => "host",
            Tier::Disk => "disk",
        })
    }
}

/// Id of a space: one place that holds memory, such as a GPU, a NUMA node of the host, or a
/// directory on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId {
    /// Tier of the space.
    pub tier: Tier,
    /// Index in its tier: the ordinal of a GPU, the number of a NUMA node, or a number chosen for a
    /// directory.
    pub index: u32,
}

impl SpaceId {
    /// The GPU with this ordinal.
    pub const fn gpu(index: u32) -> SpaceId {
        SpaceId { tier: Tier::Gpu, index }
    }

    /// The host's NUMA node with this number.
    pub const fn host(index: u32) -> SpaceId {
        SpaceId { tier: Tier::Host, index }
    }

    /// The directory with this number.
    pub const fn disk(index: u32) -> SpaceId {
        SpaceId { tier: Tier::Disk, index }
    }
}

impl fmt::Display for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.tier, self.index)
    }
}

/// A level of a space, in bytes or as a fraction of its capacity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Level {
    /// An amount of bytes.
    Bytes(Bytes),
    /// A fraction of the capacity, from 0 to 1.
    Fraction(f64),
}

impl Level {
    /// The level in bytes, for a space of this capacity, rounded down to a byte. `None` for a
    /// fraction outside 0 to 1, or NaN.
    fn of(self, capacity: Bytes) -> Option<Bytes> {
        match self {
            Level::Bytes(bytes) => Some(bytes),
            Level::Fraction(1.0) => Some(capacity),
            Level::Fraction(part) if (0.0..1.0).contains(&part) => {
                // The product is below the capacity, but for the rounding of large numbers.
                let bytes = Bytes::new((capacity.count() as f64 * part) as u64);
                Some(bytes.min(capacity))
            }
            Level::Fraction(_) => None,
        }
    }
}

/// Capacity and levels of a space.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpaceConfig {
    /// Bytes that the space can hold. No charge exceeds it.
    pub capacity: Bytes,
    /// Upper bound of reservations.
    pub limit: Level,
    /// From this total up, data should be spilled.
    pub trigger: Level,
    /// From this total down, spilling should stop.
    pub stop: Level,
    /// Unit of all amounts: requests are rounded up to it, levels down.
    pub granule: Bytes,
}

impl SpaceConfig {
    /// A GPU: reservations up to 90 %, spilling from 75 % down to 65 %, granules of 256 bytes.
    pub const fn gpu(capacity: Bytes) -> SpaceConfig {
        SpaceConfig {
            capacity,
            limit: Level::Fraction(0.90),
            trigger: Level::Fraction(0.75),
            stop: Level::Fraction(0.65),
            granule: Bytes::new(256),
        }
    }

    /// Pinned host memory: the levels of a GPU, granules of one block of 1 MiB.
    pub const fn host(capacity: Bytes) -> SpaceConfig {
        SpaceConfig { granule: Bytes::mib(1), ..SpaceConfig::gpu(capacity) }
    }

    /// A directory: reservations up to 100 %, spilling from 95 % down to 90 %, granules of 4 KiB.
    pub const fn disk(capacity: Bytes) -> SpaceConfig {
        SpaceConfig {
            capacity,
            limit: Level::Fraction(1.0),
            trigger: Level::Fraction(0.95),
            stop: Level::Fraction(0.90),
            granule: Bytes::kib(4),
        }
    }

    /// The defaults of a tier.
    pub const fn of_tier(tier: Tier, capacity: Bytes) -> SpaceConfig {
        match tier {
            Tier::Gpu => SpaceConfig::gpu(capacity),
            Tier::Host => SpaceConfig::host(capacity),
            Tier::Disk => SpaceConfig::disk(capacity),
        }
    }

    /// The levels in bytes, rounded down to granules.
    ///
    /// # Errors
    /// They violate `stop < trigger <= limit <= capacity`.
    pub fn levels(&self) -> Result<Levels, SpaceConfigError> {
        let &SpaceConfig { capacity, granule, .. } = self;
        if granule.is_zero() {
            return Err(SpaceConfigError::ZeroGranule);
        }
        let round = |bytes: Bytes| bytes.round_down(granule);
        if round(capacity).is_zero() {
            return Err(SpaceConfigError::ZeroCapacity { capacity, granule });
        }
        let resolve = |name: LevelName, level: Level| {
            let bytes =
                level.of(capacity).ok_or(SpaceConfigError::InvalidFraction { name, level })?;
            if bytes > capacity {
                return Err(SpaceConfigError::AboveCapacity { name, bytes, capacity });
            }
            Ok(round(bytes))
        };
        let levels = Levels {
            capacity: round(capacity),
            limit: resolve(LevelName::Limit, self.limit)?,
            trigger: resolve(LevelName::Trigger, self.trigger)?,
            stop: resolve(LevelName::Stop, self.stop)?,
            granule,
        };
        let Levels { limit, trigger, stop, .. } = levels;
        if trigger > limit {
            return Err(SpaceConfigError::TriggerAboveLimit { trigger, limit });
        }
        if stop >= trigger {
            return Err(SpaceConfigError::StopNotBelowTrigger { stop, trigger, granule });
        }
        Ok(levels)
    }
}

/// The levels of a space in bytes: `stop < trigger <= limit <= capacity`, all multiples of the
/// granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Upper bound of all charges.
    pub capacity: Bytes,
    /// Upper bound of reservations.
    pub limit: Bytes,
    /// From this total up, data should be spilled.
    pub trigger: Bytes,
    /// From this total down, spilling should stop.
    pub stop: Bytes,
    /// Unit of all amounts.
    pub granule: Bytes,
}

impl Levels {
    /// Returns `bytes` rounded up to granules; on overflow the largest amount, which fits in no
    /// space.
    #[inline]
    pub(super) fn round_up(&self, bytes: Bytes) -> Bytes {
        let granule = self.granule.count();
        if granule.is_power_of_two() && bytes.count() <= u64::MAX - granule {
            // Without the division, which would be half of the time of a charge.
            return Bytes::new((bytes.count() + granule - 1) & !(granule - 1));
        }
        bytes.checked_round_up(self.granule).unwrap_or(Bytes::new(u64::MAX))
    }
}

/// Name of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LevelName {
    /// [`SpaceConfig::limit`].
    Limit,
    /// [`SpaceConfig::trigger`].
    Trigger,
    /// [`SpaceConfig::stop`].
    Stop,
}

impl fmt::Display for LevelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LevelName::Limit => "limit",
            LevelName::Trigger => "trigger",
            LevelName::Stop => "stop",
        })
    }
}

/// Why a space configuration is invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SpaceConfigError {
    /// The capacity is smaller than one granule.
    #[error(
        "a capacity of {capacity} is smaller than one granule of {granule}: use a larger capacity"
    )]
    ZeroCapacity {
        /// Configured capacity.
        capacity: Bytes,
        /// Configured granule.
        granule: Bytes,
    },
    /// The granule is zero.
    #[error("the granule is zero: use 1 B for no rounding")]
    ZeroGranule,
    /// A fraction is not between 0 and 1.
    #[error("the {name} {level:?} is no fraction of the capacity: use 0 to 1")]
    InvalidFraction {
        /// Name of the level.
        name: LevelName,
        /// Configured level.
        level: Level,
    },
    /// A level is above the capacity.
    #[error("the {name} of {bytes} is above the capacity of {capacity}")]
    AboveCapacity {
        /// Name of the level.
        name: LevelName,
        /// Configured level in bytes.
        bytes: Bytes,
        /// Capacity of the space.
        capacity: Bytes,
    },
    /// The trigger is above the limit: reservations alone would never reach it.
    #[error(
        "the trigger at {trigger} is above the limit at {limit}: reservations would never reach it"
    )]
    TriggerAboveLimit {
        /// Trigger in bytes, rounded down.
        trigger: Bytes,
        /// Limit in bytes, rounded down.
        limit: Bytes,
    },
    /// The stop is not below the trigger.
    #[error("the stop at {stop} is not below the trigger at {trigger}, in granules of {granule}")]
    StopNotBelowTrigger {
        /// Stop in bytes, rounded down.
        stop: Bytes,
        /// Trigger in bytes, rounded down.
        trigger: Bytes,
        /// Granule of the space.
        granule: Bytes,
    },
}
