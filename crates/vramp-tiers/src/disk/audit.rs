//! Checks that allocations, extents, files and the charged space agree.

use crate::extents::Extent;
use vramp_core::Bytes;
use vramp_host::DISK_BLOCK;

use super::shared::Shared;

impl Shared {
    pub fn audit(&self) -> Result<(), String> {
        let state = self.state();
        state.extents.audit()?;
        let mut all: Vec<Extent> = Vec::new();
        let mut charged = Bytes::ZERO;
        for (id, record) in &state.allocations {
            let used: Bytes = record.extents.iter().map(|extent| extent.len).sum();
            if used + record.lost != record.charged {
                return Err(format!("{id:?} is charged {} for {used}", record.charged));
            }
            charged += record.charged - record.lost;
            all.extend(record.extents.iter().copied());
        }
        all.sort_unstable();
        if let Some(pair) = all
            .windows(2)
            .find(|pair| pair[0].backing == pair[1].backing && pair[0].end() > pair[1].offset)
        {
            return Err(format!("two allocations overlap: {pair:?}"));
        }
        let used = state.extents.used();
        if charged != used {
            return Err(format!("allocations of {charged}, but {used} of extents in use"));
        }
        for (id, len) in state.extents.backings() {
            let file = state.files.get(&id).ok_or_else(|| format!("{id:?} has no file"))?;
            let found = file.len().map_err(|error| error.to_string())?;
            if found != len + DISK_BLOCK {
                return Err(format!(
                    "{} is {found} long, not {len} and a header",
                    file.path().display()
                ));
            }
        }
        if state.files.len() != state.extents.backings().count() {
            return Err(format!("{} files without extents", state.files.len()));
        }
        // The space may have other charges, and reservations are charged before their use.
        // Extents are allocated after their charge and freed before it, so this holds while the
        // state is locked.
        let total = self.space.total();
        match used <= total {
            true => Ok(()),
            false => Err(format!("{used} are stored and {total} charged to {}", self.space.id())),
        }
    }
}
