//! Tiers, the spaces in them, and the levels of a space.

use std::fmt;

use vramp_core::Bytes;

/// A kind of memory. Ordered from the fastest and smallest down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Memory of a card.
    Gpu,
    /// Pinned memory of the host.
    Host,
    /// Files.
    Disk,
}

impl Tier {
    /// All of them, the fastest first.
    pub const ALL: [Tier; 3] = [Tier::Gpu, Tier::Host, Tier::Disk];

    /// Where data goes next when it has to leave.
    pub const fn below(self) -> Option<Tier> {
        match self {
            Tier::Gpu => Some(Tier::Host),
            Tier::Host => Some(Tier::Disk),
            Tier::Disk => None,
        }
    }

    /// Where data goes next on its way back.
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

/// One place that holds memory: a card, a NUMA node of the host, a directory on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId {
    /// Of which kind.
    pub tier: Tier,
    /// Which one: a GPU's ordinal, a NUMA node, a number that the user chose for a directory.
    pub index: u32,
}

impl SpaceId {
    /// The card with this ordinal.
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

/// A level of a space: so many bytes, or a part of its capacity. Both have the same base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Level {
    /// An amount.
    Bytes(Bytes),
    /// A part of the capacity, from 0 to 1.
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

/// How much a space holds, and at which fill what happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpaceConfig {
    /// What the space can hold. Nothing is ever charged above it.
    pub capacity: Bytes,
    /// Up to where reservations are given.
    pub limit: Level,
    /// At this fill or above, data should leave for a lower tier.
    pub trigger: Level,
    /// At this fill or below, enough has left.
    pub stop: Level,
    /// All amounts are multiples of this: requests are rounded up, levels down.
    pub granule: Bytes,
}

impl SpaceConfig {
    /// A card: reservations up to 90 %, data leaves from 75 % down to 65 %, granules of 256 bytes.
    pub const fn gpu(capacity: Bytes) -> SpaceConfig {
        SpaceConfig {
            capacity,
            limit: Level::Fraction(0.90),
            trigger: Level::Fraction(0.75),
            stop: Level::Fraction(0.65),
            granule: Bytes::new(256),
        }
    }

    /// Pinned memory: levels as for a card, granules of one block of 1 MiB.
    pub const fn host(capacity: Bytes) -> SpaceConfig {
        SpaceConfig { granule: Bytes::mib(1), ..SpaceConfig::gpu(capacity) }
    }

    /// A directory: reservations up to 100 %, data leaves from 95 % down to 90 %, granules of
    /// 4 KiB.
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
    /// What is wrong with them, by name: not `stop < trigger <= limit <= capacity`.
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
    /// Nothing is charged above it.
    pub capacity: Bytes,
    /// Up to where reservations are given.
    pub limit: Bytes,
    /// From here up, data should leave.
    pub trigger: Bytes,
    /// From here down, enough has left.
    pub stop: Bytes,
    /// What all amounts are multiples of.
    pub granule: Bytes,
}

impl Levels {
    /// `bytes` rounded up to granules. An amount that does not fit in 64 bits becomes the largest,
    /// which fits in no space.
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

/// Which level.
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

/// Why levels make no sense.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SpaceConfigError {
    /// The capacity is less than one granule.
    #[error("a capacity of {capacity} holds no granule of {granule}: give the space memory")]
    ZeroCapacity {
        /// What was given.
        capacity: Bytes,
        /// The unit.
        granule: Bytes,
    },
    /// The granule is zero.
    #[error("the granule is zero: use 1 B for amounts that are not rounded")]
    ZeroGranule,
    /// A fraction that is not between 0 and 1.
    #[error("the {name} {level:?} is no part of the capacity: use a fraction from 0 to 1")]
    InvalidFraction {
        /// Which level.
        name: LevelName,
        /// What was given.
        level: Level,
    },
    /// A level that cannot be reached.
    #[error("the {name} of {bytes} is above the capacity of {capacity}")]
    AboveCapacity {
        /// Which level.
        name: LevelName,
        /// What was given.
        bytes: Bytes,
        /// What the space holds.
        capacity: Bytes,
    },
    /// Reservations alone would never start a downgrade.
    #[error(
        "the trigger at {trigger} is above the limit at {limit}: reservations would never reach it"
    )]
    TriggerAboveLimit {
        /// In bytes, rounded.
        trigger: Bytes,
        /// In bytes, rounded.
        limit: Bytes,
    },
    /// A downgrade would never begin, or never end.
    #[error("the stop at {stop} is not below the trigger at {trigger}, in granules of {granule}")]
    StopNotBelowTrigger {
        /// In bytes, rounded.
        stop: Bytes,
        /// In bytes, rounded.
        trigger: Bytes,
        /// What both were rounded down to.
        granule: Bytes,
    },
}
