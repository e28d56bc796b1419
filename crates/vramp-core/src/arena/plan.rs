//! A layout: offsets for the blocks of a capture, worked out from a recording of an earlier one.

use super::order::Chains;
use super::recording::{Position, Recording};
use crate::Bytes;

/// Where one block goes, and how the capture is known to be the same up to here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedBlock {
    pub len: u64,
    pub offset: u64,
    pub chains: Chains,
    pub until: Position,
}

/// Offsets for the blocks of a capture. Made by [`super::pack()`], followed by
/// [`super::Arena::set_plan`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    pub(crate) blocks: Vec<PlannedBlock>,
    pub(crate) high_water: u64,
}

/// Two blocks that a layout puts in one place while both may be in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The layout is of another recording.
    #[error("the layout has {planned} blocks, the recording {recorded}")]
    OtherShape {
        /// Blocks of the layout.
        planned: usize,
        /// Blocks of the recording.
        recorded: usize,
    },
    /// The block has another length.
    #[error("block {block} is {recorded} long, the layout has {planned}")]
    OtherLength {
        /// Which, counted from 0 in the order of the program.
        block: usize,
        /// As the layout has it.
        planned: Bytes,
        /// As it was recorded.
        recorded: Bytes,
    },
    /// Both may be in use at the same time.
    #[error("blocks {earlier} and {later} overlap, and nothing orders them")]
    Overlap {
        /// Which, counted from 0 in the order of the program.
        earlier: usize,
        /// The other.
        later: usize,
    },
    /// A block lies where an older one lives.
    #[error("block {block} overlaps one that was live before the capture")]
    Blocked {
        /// Which, counted from 0 in the order of the program.
        block: usize,
    },
    /// The high-water mark is not the highest end of a block.
    #[error("the blocks end at {end}, the layout says {high_water}")]
    HighWater {
        /// The highest end.
        end: Bytes,
        /// What the layout says.
        high_water: Bytes,
    },
}

impl Layout {
    /// The layout with these offsets, one for each block of the recording.
    pub(crate) fn of(recording: &Recording, offsets: &[u64]) -> Layout {
        let spot = |(life, &offset): (&super::recording::Life, &u64)| PlannedBlock {
            len: life.len,
            offset,
            chains: life.from.chains(),
            until: life.until,
        };
        let blocks: Vec<PlannedBlock> = recording.lives.iter().zip(offsets).map(spot).collect();
        let end = blocks.iter().map(|spot| spot.offset + spot.len).max().unwrap_or(0);
        Layout { blocks, high_water: end.max(recording.obstacle_end()) }
    }

    /// The highest end of a block, of this capture or live before it.
    pub fn high_water(&self) -> Bytes {
        Bytes::new(self.high_water)
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Proves that no two blocks meet: wherever two of the recording overlap, the whole life of one
    /// is ordered before the other's. O(n) times the blocks that are live or not yet covered.
    ///
    /// # Errors
    /// The first two blocks that may meet.
    pub fn check(&self, recording: &Recording) -> Result<(), LayoutError> {
        let (planned, recorded) = (self.blocks.len(), recording.lives.len());
        if planned != recorded {
            return Err(LayoutError::OtherShape { planned, recorded });
        }
        let mut end = recording.obstacle_end();
        for (block, (spot, life)) in self.blocks.iter().zip(&recording.lives).enumerate() {
            if spot.len != life.len {
                let (planned, recorded) = (Bytes::new(spot.len), Bytes::new(life.len));
                return Err(LayoutError::OtherLength { block, planned, recorded });
            }
            end = end.max(spot.offset + spot.len);
        }
        if end != self.high_water {
            let (end, high_water) = (Bytes::new(end), Bytes::new(self.high_water));
            return Err(LayoutError::HighWater { end, high_water });
        }
        self.check_overlaps(recording)
    }

    fn check_overlaps(&self, recording: &Recording) -> Result<(), LayoutError> {
        let free_from = recording.free_from();
        let mut open: Vec<usize> = Vec::new();
        for (later, spot) in self.blocks.iter().enumerate() {
            let range = spot.offset..spot.offset + spot.len;
            let overlaps =
                |other: &std::ops::Range<u64>| other.start < range.end && range.start < other.end;
            if recording
                .obstacles
                .iter()
                .any(|fixed| overlaps(&fixed.range) && recording.is_blocked(fixed, later))
            {
                return Err(LayoutError::Blocked { block: later });
            }
            open.retain(|&earlier| free_from.lives[earlier] as usize > later);
            let met = open.iter().find(|&&earlier| {
                let other = &self.blocks[earlier];
                overlaps(&(other.offset..other.offset + other.len))
                    && recording.conflict(earlier, later)
            });
            if let Some(&earlier) = met {
                return Err(LayoutError::Overlap { earlier, later });
            }
            open.push(later);
        }
        Ok(())
    }
}
