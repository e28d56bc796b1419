//! Sets of processors.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Processors by the kernel's numbers, as ranges in order: `0-3,8,10-11`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet {
    /// Sorted; no two touch.
    ranges: Vec<RangeInclusive<u32>>,
}

impl CpuSet {
    /// How many processors.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|range| u64::from(range.end() - range.start()) + 1).sum()
    }

    /// True for none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// True if this processor is one of them.
    pub fn contains(&self, cpu: u32) -> bool {
        self.ranges.iter().any(|range| range.contains(&cpu))
    }

    /// Each of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }
}

impl fmt::Display for CpuSet {
    /// As the kernel writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .ranges
            .iter()
            .map(|range| match (range.start(), range.end()) {
                (start, end) if start == end => start.to_string(),
                (start, end) => format!("{start}-{end}"),
            })
            .collect();
        f.pad(&parts.join(","))
    }
}

/// A text that is no list of processors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no list of processors: write numbers and ranges, such as 0-3,8")]
pub struct ParseCpuSetError {
    /// What was given.
    pub text: String,
}

impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    /// Reads what the kernel writes. The empty text is the empty set.
    fn from_str(text: &str) -> Result<CpuSet, ParseCpuSetError> {
        let refuse = || ParseCpuSetError { text: text.to_owned() };
        let mut ranges = Vec::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (start, end) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| refuse());
            let (start, end) = (number(start)?, number(end)?);
            if start > end {
                return Err(refuse());
            }
            ranges.push(start..=end);
        }
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<u32>> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if *range.start() <= last.end().saturating_add(1) => {
                    *last = *last.start()..=*last.end().max(range.end());
                }
                _ => merged.push(range),
            }
        }
        Ok(CpuSet { ranges: merged })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read_and_written_as_the_kernel_does() {
        let set: CpuSet = "0-3,8,10-11\n".parse().unwrap();
        assert_eq!(set.to_string(), "0-3,8,10-11");
        assert_eq!(set.len(), 7);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11]);
        assert!(set.contains(8) && !set.contains(9));
        assert!("".parse::<CpuSet>().unwrap().is_empty());
        assert_eq!("4,0-2,3".parse::<CpuSet>().unwrap().to_string(), "0-4");
        assert_eq!("0-4294967295".parse::<CpuSet>().unwrap().len(), 1 << 32);
    }

    #[test]
    fn texts_that_are_no_list_of_processors_are_refused() {
        for text in ["a", "3-1", "1,,2", "-", "1-", "4294967296", "0-3:2/4"] {
            assert!(text.parse::<CpuSet>().is_err(), "{text}");
        }
    }
}
