//! The report of a request that found no memory: the shortage in numbers, and where memory is.

use std::fmt;

use vramp_core::{Bytes, Shortage, StreamId};
use vramp_driver::{Call, DriverError, MemoryInfo};

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

/// Memory and addresses that failed driver calls left unusable. Each trim, and each request before it
/// fails, tries again to return them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuarantinedMemory {
    /// Physical memory, which counts as reserved.
    pub memory: Bytes,
    /// Addresses. Free memory that is mapped there too cannot be released.
    pub addresses: Bytes,
    /// The last call that failed so.
    pub failed_call: Option<DriverError>,
}

/// What [`Shortage::largest`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Largest {
    /// The largest block that remapping free memory could build.
    ByRemapping,
    /// The largest free block as it lies: the allocator does not remap.
    FreeBlock,
    /// Not known: the driver does not report the blocks of its pool.
    Unknown,
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
    /// What `shortage.largest` is.
    pub largest_is: Largest,
    /// Memory by stream, largest first. Empty unless the virtual pool serves the allocator.
    pub streams: Vec<StreamUsage>,
    /// Memory by tag, largest first. Only tags with live bytes.
    pub tags: Vec<TagUsage>,
    /// Other allocators of the group.
    pub siblings: Vec<SiblingPool>,
    /// Free memory of no stream: no work uses it, and every stream may take it.
    pub idle: Bytes,
    /// What failed calls left unusable.
    pub quarantined: QuarantinedMemory,
    /// Free and total memory of the card; `None` if the driver call for it failed.
    pub card: Option<MemoryInfo>,
    /// Why the [budget](crate::budget) of the process did not grant what the request lacked: which
    /// processes have what. `None` without a budget, or if that was not the cause.
    pub budget: Option<String>,
    /// The driver call that ran out of memory; `None` if a limit was the cause.
    pub failed_call: Option<DriverError>,
}

/// Most streams, and most tags, that the text lists.
const LINES_MAX: usize = 8;

/// Most characters of a part of the budget's message in the text.
const PART_MAX: usize = 88;

/// Most characters of a name in the text, so that no line becomes long.
const NAME_MAX: usize = 40;

impl fmt::Display for OutOfMemoryReport {
    /// Writes a line with the request and the cause, which is enough for a log, then lines with the
    /// numbers and the remedy, then a line for each user of memory. No line is longer than 100
    /// characters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { requested, reserved, used, free, largest, waiting, limit, .. } =
            &self.shortage;
        write!(f, "out of memory: tried to allocate {requested} on {}", self.stream)?;
        let addresses_used_up = self.failed_reserve().is_some();
        match (limit, &self.card) {
            (Some(limit), _) => write!(f, "; the limit of {limit} allows no more")?,
            (None, _) if addresses_used_up => write!(f, "; no addresses are left for it")?,
            (None, Some(card)) => write!(f, "; the card has {} free", card.free)?,
            (None, None) => {}
        }
        write!(f, "\n  pool '{}' has {reserved} reserved:", Shortened(&self.pool))?;
        write!(
            f,
            "\n  {used} allocated, {free} free, {waiting} freed and waiting for other streams"
        )?;
        match self.largest_is {
            Largest::ByRemapping => {
                write!(f, "\n  the largest block it can build by remapping is {largest}")?;
                // What was not reserved yet may be created beside it, as far as the card has it.
                let rest = limit.map(|limit| limit.saturating_sub(*reserved));
                if let Some(rest) = rest.filter(|rest| !rest.is_zero()) {
                    write!(f, ", with {rest} more below the limit")?;
                }
            }
            Largest::FreeBlock => write!(f, "\n  its largest free block is {largest}")?,
            Largest::Unknown => {}
        }
        if let Some(card) = &self.card {
            write!(f, "\n  the card has {} of {} free", card.free, card.total)?;
        }
        if let Some(failed) = self.failed_reserve() {
            write!(f, "\n  driver call {} failed: {} ({})", failed.call, failed.name, failed.code)?;
            if !failed.detail.is_empty() {
                write!(f, "\n  {}", Shortened(&failed.detail))?;
            }
        }
        match limit {
            Some(_) if self.budget.is_some() => write!(
                f,
                "\n  what to do: free memory, here or in the processes that share the card"
            )?,
            Some(limit) if requested > limit => {
                write!(f, "\n  what to do: raise the limit, which is smaller than the request")?
            }
            Some(_) => write!(f, "\n  what to do: raise the limit, or free memory")?,
            None if addresses_used_up => write!(
                f,
                "\n  what to do: free memory or stable ranges, or reserve fewer addresses elsewhere"
            )?,
            None if self.card.is_some_and(|card| *requested > card.total) => {
                write!(f, "\n  what to do: request less, or use a larger card: this one has less")?
            }
            None => write!(f, "\n  what to do: free memory, request less, or use a larger card")?,
        }
        for StreamUsage { stream, used, free, waiting } in self.streams.iter().take(LINES_MAX) {
            write!(f, "\n  {stream}: {used} allocated, {free} free, {waiting} waiting")?;
        }
        for (at, part) in self.budget.iter().flat_map(|text| text.split("; ").enumerate()) {
            let part: String = part.chars().take(PART_MAX).collect();
            write!(f, "\n  {}{part}", if at == 0 { "budget: " } else { "  " })?;
        }
        if !self.idle.is_zero() {
            write!(f, "\n  idle: {} free for any stream", self.idle)?;
        }
        let QuarantinedMemory { memory, addresses, failed_call } = &self.quarantined;
        if !memory.is_zero() || !addresses.is_zero() {
            write!(f, "\n  quarantined: {memory} of memory, {addresses} of addresses")?;
            if let Some(DriverError { call, name, code, .. }) = failed_call {
                write!(f, "\n    because {call} failed: {name} ({code}); a trim tries again")?;
            }
        }
        for TagUsage { name, live, blocks, .. } in self.tags.iter().take(LINES_MAX) {
            write!(f, "\n  tag '{}': {live} in {blocks} blocks", Shortened(name))?;
        }
        for SiblingPool { name, reserved } in &self.siblings {
            write!(f, "\n  pool '{}': {reserved} reserved", Shortened(name))?;
        }
        Ok(())
    }
}

impl OutOfMemoryReport {
    /// Returns the call that found no addresses, if that was the cause.
    pub fn failed_reserve(&self) -> Option<&DriverError> {
        self.failed_call.as_ref().filter(|failed| failed.call == Call::Reserve)
    }
}

/// A name, cut if it is long.
struct Shortened<'a>(&'a str);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(NAME_MAX) {
            Some((end, _)) => write!(f, "{}...", &self.0[..end]),
            None => f.write_str(self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(largest_is: Largest, limit: Option<Bytes>) -> OutOfMemoryReport {
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
            largest_is,
            streams: Vec::new(),
            tags: Vec::new(),
            siblings: Vec::new(),
            idle: Bytes::ZERO,
            quarantined: QuarantinedMemory::default(),
            card: None,
            budget: None,
            failed_call: None,
        }
    }

    #[test]
    fn only_a_pool_that_remaps_mentions_remapping() {
        let text = report(Largest::ByRemapping, None).to_string();
        assert!(text.contains("the largest block it can build by remapping is 2.00 GiB"), "{text}");
        let text = report(Largest::FreeBlock, None).to_string();
        assert!(text.contains("its largest free block is 2.00 GiB"), "{text}");
        assert!(!text.contains("remap"), "{text}");
        let text = report(Largest::Unknown, None).to_string();
        assert!(!text.contains("remap") && !text.contains("largest"), "{text}");
    }

    #[test]
    fn memory_of_no_stream_has_a_line_of_its_own() {
        let text = OutOfMemoryReport { idle: Bytes::gib(1), ..report(Largest::ByRemapping, None) }
            .to_string();
        assert!(text.ends_with("\n  idle: 1.00 GiB free for any stream"), "{text}");
    }

    #[test]
    fn the_remedy_depends_on_the_limit() {
        let text = report(Largest::ByRemapping, Some(Bytes::gib(8))).to_string();
        assert!(
            text.contains("the limit of 8.00 GiB allows no more")
                && text.contains("raise the limit"),
            "{text}"
        );
        let text = report(Largest::ByRemapping, None).to_string();
        assert!(text.contains("request less") && !text.contains("limit"), "{text}");
    }

    #[test]
    fn lines_are_short_and_the_first_one_says_what_and_why() {
        let card = Some(MemoryInfo { free: Bytes::mib(1021), total: Bytes::mib(143_771) });
        let long =
            "an allocator of somebody who likes names that do not end for a long time".repeat(3);
        for limit in [None, Some(Bytes::gib(8))] {
            let mut report = OutOfMemoryReport { card, ..report(Largest::ByRemapping, limit) };
            let stream = StreamId::new(123_456);
            let most = Bytes::mib(1023) + Bytes::kib(1013);
            report.shortage = Shortage {
                requested: most,
                reserved: most,
                used: most,
                free: most,
                waiting: most,
                ..report.shortage
            };
            (report.stream, report.pool, report.idle) = (stream, long.clone(), most);
            report.streams = vec![StreamUsage { stream, used: most, free: most, waiting: most }];
            let (live, peak, blocks) = (most, most, u64::MAX);
            report.tags = vec![TagUsage { name: long.clone(), live, peak, blocks }];
            report.siblings = vec![SiblingPool { name: long.clone(), reserved: most }];
            let text = report.to_string();
            assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
            let first = text.lines().next().unwrap();
            assert!(
                first.starts_with("out of memory: tried to allocate 1023.99 MiB on "),
                "{text}"
            );
            let cause = if limit.is_some() {
                "the limit of 8.00 GiB"
            } else {
                "the card has 1021.00 MiB free"
            };
            assert!(first.contains(cause), "{text}");
            assert!(text.contains("the card has"), "{text}");
        }
    }
}
