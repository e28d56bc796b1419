//! A layout: offsets for the blocks of a capture, planned from the recording of an earlier one.

use super::order::Chains;
use super::recording::{CaptureRecording, Position};
use crate::Bytes;

/// The offset of one block, and what shows that a capture is the same up to here.
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

/// Why a layout does not fit a recording.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The layout has another number of blocks.
    #[error("the layout has {planned} blocks, the recording {recorded}")]
    OtherShape {
        /// Blocks of the layout.
        planned: usize,
        /// Blocks of the recording.
        recorded: usize,
    },
    /// A block has another length.
    #[error("block {block} is {recorded} long, the layout has {planned}")]
    OtherLength {
        /// Index of the block in program order, from 0.
        block: usize,
        /// Length in the layout.
        planned: Bytes,
        /// Recorded length.
        recorded: Bytes,
    },
    /// Two blocks overlap, and both may be in use at the same time.
    #[error("blocks {earlier} and {later} overlap, and nothing orders them")]
    Overlap {
        /// Index of the block in program order, from 0.
        earlier: usize,
        /// Index of the other block.
        later: usize,
    },
    /// A block overlaps one that was live before the capture.
    #[error("block {block} overlaps one that was live before the capture")]
    Blocked {
        /// Index of the block in program order, from 0.
        block: usize,
    },
    /// The high-water mark is not the highest end of a block.
    #[error("the blocks end at {end}, the layout says {high_water}")]
    HighWater {
        /// Highest end of a block.
        end: Bytes,
        /// High-water mark of the layout.
        high_water: Bytes,
    },
}

impl Layout {
    /// The layout with these offsets, one for each block of the recording.
    pub(crate) fn of(recording: &CaptureRecording, offsets: &[u64]) -> Layout {
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

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Checks that no two blocks conflict: wherever two of them overlap, the whole life of one is
    /// ordered before the other's. O(n) times the blocks that are live or not yet covered.
    ///
    /// # Errors
    /// The first two blocks that may be in use at the same addresses.
    pub fn check(&self, recording: &CaptureRecording) -> Result<(), LayoutError> {
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

    fn check_overlaps(&self, recording: &CaptureRecording) -> Result<(), LayoutError> {
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
            open.retain(|&earlier| free_from[earlier] as usize > later);
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
