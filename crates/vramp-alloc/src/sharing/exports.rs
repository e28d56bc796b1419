//! The table of exported blocks.

use std::collections::BTreeMap;

use vramp_core::{DeviceAddr, StreamId};

use crate::allocation::Allocation;

/// Exported blocks of an allocator.
#[derive(Default)]
pub(crate) struct Exports {
    pub(super) blocks: BTreeMap<DeviceAddr, Exported>,
}

#[derive(Default)]
pub(super) struct Exported {
    /// Number of exports of the block.
    pub(super) count: usize,
    /// The block, once it was freed, and the stream it was freed on.
    freed: Option<(Allocation, StreamId)>,
}

impl Exports {
    /// Keeps a block that is freed while it is exported. Returns it if it is not exported.
    pub(crate) fn keep(&mut self, allocation: Allocation, stream: StreamId) -> Option<Allocation> {
        match self.blocks.get_mut(&allocation.addr()) {
            Some(exported) => {
                exported.freed = Some((allocation, stream));
                None
            }
            None => Some(allocation),
        }
    }

    /// Ends one export. Returns the block if it was freed meanwhile, and this was the last one.
    pub(super) fn end(&mut self, addr: DeviceAddr) -> Option<(Allocation, StreamId)> {
        let exported = self.blocks.get_mut(&addr)?;
        exported.count -= 1;
        if exported.count > 0 {
            return None;
        }
        self.blocks.remove(&addr)?.freed
    }

    /// Number of exported blocks.
    pub(crate) fn count(&self) -> usize {
        self.blocks.len()
    }
}
