//! Do the books agree with each other, with the files, and with the space?

use crate::extents::Extent;
use vramp_core::Bytes;
use vramp_host::DISK_BLOCK;

use super::shelf::Shelf;

impl Shelf {
    pub fn audit(&self) -> Result<(), String> {
        let state = self.state();
        state.extents.audit()?;
        let mut all: Vec<Extent> = Vec::new();
        let mut charged = Bytes::ZERO;
        for (id, held) in &state.held {
            let kept: Bytes = held.extents.iter().map(|extent| extent.len).sum();
            if kept + held.lost != held.charged {
                return Err(format!("{id:?} pays {} for {kept}", held.charged));
            }
            charged += held.charged - held.lost;
            all.extend(held.extents.iter().copied());
        }
        all.sort_unstable();
        if let Some(pair) = all
            .windows(2)
            .find(|pair| pair[0].backing == pair[1].backing && pair[0].end() > pair[1].offset)
        {
            return Err(format!("two holdings have the same bytes: {pair:?}"));
        }
        let used = state.extents.used();
        if charged != used {
            return Err(format!("holdings of {charged} and {used} of extents in use"));
        }
        for (id, len) in state.extents.backings() {
            let file = state.files.get(&id).ok_or_else(|| format!("{id:?} has no file"))?;
            let found = file.len().map_err(|error| error.to_string())?;
            if found != len + DISK_BLOCK {
                return Err(format!("{} is {found} long, not {len}", file.path().display()));
            }
        }
        if state.files.len() != state.extents.backings().count() {
            return Err(format!("{} files for fewer segments", state.files.len()));
        }
        // Others may be charged to the space too, and reservations are charged before their use.
        // ExtentAllocator are taken after their charge and freed before it, so this holds under the lock.
        let total = self.space.total();
        match used <= total {
            true => Ok(()),
            false => Err(format!("{used} are stored and {total} charged to {}", self.space.id())),
        }
    }
}
