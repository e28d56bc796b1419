//! The groups that the arguments choose.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use vramp::budget::{BudgetGroup, GroupName, groups};

use super::args::Chosen;

/// A group of the user.
pub(super) struct Found {
    pub name: GroupName,
    pub group: BudgetGroup,
}

/// Returns where groups are that no argument places.
pub(crate) fn default_directory() -> Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    if let Some(runtime) = runtime.filter(|path| path.is_absolute()) {
        return Ok(runtime.join("vramp"));
    }
    let user = std::fs::metadata("/proc/self").context("/proc/self")?.uid();
    Ok(PathBuf::from(format!("/tmp/vramp-{user}")))
}

impl Chosen {
    /// Returns the directory of the groups.
    pub(super) fn directory(&self) -> Result<PathBuf> {
        if let Some(directory) = &self.directory {
            return Ok(directory.clone());
        }
        default_directory()
    }

    /// Opens the chosen groups, in the order of their names.
    pub(super) fn open(&self) -> Result<Vec<Found>> {
        let directory = self.directory()?;
        let is_chosen = |name: &GroupName| {
            self.card.as_ref().is_none_or(|card| *card == name.card)
                && self.group.as_ref().is_none_or(|group| *group == name.group)
        };
        let mut found = Vec::new();
        for name in groups(&directory).into_iter().filter(is_chosen) {
            let group = BudgetGroup::open(&directory, &name.card, &name.group)?;
            found.push(Found { name, group });
        }
        Ok(found)
    }

    /// Returns where no member was found, for messages.
    pub(super) fn place(&self) -> Result<String> {
        let card = self.card.as_ref().map(|card| format!(" of card {card}"));
        let group = self.group.as_ref().map(|group| format!(" in group {group}"));
        let directory = self.directory()?;
        Ok(format!(
            "{}{} in {}",
            group.unwrap_or_default(),
            card.unwrap_or_default(),
            directory.display()
        ))
    }
}
