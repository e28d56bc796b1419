//! The report of a request that found no memory: the shortage in numbers, and where memory is.

use std::fmt;

use vramp_core::{Bytes, Shortage, StreamId};
use vramp_driver::{DriverError, MemoryInfo};

/// Memory of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamUsage {
    /// Stream that the memory was last allocated for.
    pub stream: StreamId,
    /// Bytes in blocks, and in the slabs of the stream's heap.
    pub used: Bytes,
    /// Free bytes, ready for the next request.
    pub free: Bytes,
    /// Freed bytes that wait for work of other streams.
    pub waiting: Bytes,
}

/// Memory that was requested under one tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagUsage {
    /// Name of the tag.
    pub name: String,
    /// Live bytes, as requested.
    pub live: Bytes,
    /// High-water mark of `live`.
    pub peak: Bytes,
    /// Live blocks.
    pub blocks: u64,
}

/// Another allocator of the same group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiblingPool {
    /// Name of the pool.
    pub name: String,
    /// Physical memory that it has reserved.
    pub reserved: Bytes,
}

/// State of memory at the moment when a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemoryReport {
    /// The pool's own numbers.
    pub shortage: Shortage,
    /// Stream of the request.
    pub stream: StreamId,
    /// Name of the allocator that the request was made to.
    pub pool: String,
    /// True if `shortage.largest` is what remapping free memory could build; false if it is the
    /// largest free block as it lies.
    pub remaps: bool,
    /// Memory by stream, largest first. Empty unless the virtual pool serves the allocator.
    pub streams: Vec<StreamUsage>,
    /// Memory by tag, largest first. Only tags with live bytes.
    pub tags: Vec<TagUsage>,
    /// Other allocators of the group.
    pub siblings: Vec<SiblingPool>,
    /// Free memory of no stream: no work uses it, and every stream may take it.
    pub idle: Bytes,
    /// Free and total memory of the card; `None` if the driver call for it failed.
    pub card: Option<MemoryInfo>,
    /// The driver call that ran out of memory; `None` if a limit was the cause.
    pub failed_call: Option<DriverError>,
}

/// Most streams, and most tags, that the text lists.
const LINES_MAX: usize = 8;

impl fmt::Display for OutOfMemoryReport {
    /// Writes one line with the cause and the remedies, then a line for each user of memory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { requested, reserved, used, free, largest, waiting, limit, .. } =
            &self.shortage;
        write!(
            f,
            "out of memory: tried to allocate {requested} on {}; pool '{}' has {reserved} \
             reserved: {used} allocated, {free} free, {waiting} freed and waiting for other \
             streams",
            self.stream, self.pool
        )?;
        match self.remaps {
            true => write!(f, "; the largest block it can build by remapping is {largest}")?,
            false => write!(f, "; its largest free block is {largest}")?,
        }
        if let Some(card) = &self.card {
            write!(f, "; the card has {} of {} free", card.free, card.total)?;
        }
        match limit {
            Some(limit) => {
                write!(f, "; the limit of {limit} allows no more: raise it, or free memory")?
            }
            None => write!(f, "; free memory, request less, or use a larger card")?,
        }
        for StreamUsage { stream, used, free, waiting } in self.streams.iter().take(LINES_MAX) {
            write!(f, "\n  {stream}: {used} allocated, {free} free, {waiting} waiting")?;
        }
        if !self.idle.is_zero() {
            write!(f, "\n  idle: {} free for any stream", self.idle)?;
        }
        for TagUsage { name, live, blocks, .. } in self.tags.iter().take(LINES_MAX) {
            write!(f, "\n  tag '{name}': {live} in {blocks} blocks")?;
        }
        for SiblingPool { name, reserved } in &self.siblings {
            write!(f, "\n  pool '{name}': {reserved} reserved")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(remaps: bool, limit: Option<Bytes>) -> OutOfMemoryReport {
        OutOfMemoryReport {
            shortage: Shortage {
                requested: Bytes::gib(3),
                reserved: Bytes::gib(8),
                used: Bytes::gib(6),
                free: Bytes::gib(2),
                largest: Bytes::gib(2),
                waiting: Bytes::ZERO,
                limit,
                block_for: Some(StreamId::new(0)),
            },
            stream: StreamId::new(0),
            pool: "main".to_owned(),
            remaps,
            streams: Vec::new(),
            tags: Vec::new(),
            siblings: Vec::new(),
            idle: Bytes::ZERO,
            card: None,
            failed_call: None,
        }
    }

    #[test]
    fn only_a_pool_that_remaps_mentions_remapping() {
        let text = report(true, None).to_string();
        assert!(text.contains("the largest block it can build by remapping is 2.00 GiB"), "{text}");
        let text = report(false, None).to_string();
        assert!(text.contains("its largest free block is 2.00 GiB"), "{text}");
        assert!(!text.contains("remap"), "{text}");
    }

    #[test]
    fn memory_of_no_stream_has_a_line_of_its_own() {
        let text = OutOfMemoryReport { idle: Bytes::gib(1), ..report(true, None) }.to_string();
        assert!(text.ends_with("\n  idle: 1.00 GiB free for any stream"), "{text}");
    }

    #[test]
    fn the_remedy_depends_on_the_limit() {
        let text = report(true, Some(Bytes::gib(8))).to_string();
        assert!(text.contains("the limit of 8.00 GiB allows no more: raise it"), "{text}");
        let text = report(true, None).to_string();
        assert!(text.contains("request less") && !text.contains("limit"), "{text}");
    }
}
