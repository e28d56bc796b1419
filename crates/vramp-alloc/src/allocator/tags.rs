//! Tags: named groups of allocations, counted apart.

use vramp_core::Bytes;

use super::Allocator;
use crate::error::TagUsage;

/// Id of a tag, from [`Allocator::tag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TagId(pub(super) u16);

/// # Tags
impl Allocator {
    /// Returns the tag of this name, and creates it if it is new. There are at most 65,535 tags:
    /// the last one serves all further names.
    pub fn tag(&self, name: &str) -> TagId {
        let mut inner = self.shared.lock_anyway();
        let known = inner.tags.iter().position(|tag| tag.name == name);
        let index = known.unwrap_or_else(|| {
            if inner.tags.len() < usize::from(u16::MAX) {
                inner.tags.push(TagUsage {
                    name: name.to_owned(),
                    live: Bytes::ZERO,
                    peak: Bytes::ZERO,
                    blocks: 0,
                });
            }
            inner.tags.len() - 1
        });
        TagId(index as u16 + 1)
    }
}
