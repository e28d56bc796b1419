//! Sets of CPUs.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A set of CPU numbers in the kernel's list format: `0-3,8,10-11`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet {
    /// Sorted; no two touch.
    ranges: Vec<RangeInclusive<u32>>,
}

impl CpuSet {
    /// Returns the number of CPUs.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|range| u64::from(range.end() - range.start()) + 1).sum()
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns true if the set contains `cpu`.
    pub fn contains(&self, cpu: u32) -> bool {
        self.ranges.iter().any(|range| range.contains(&cpu))
    }

    /// Returns the CPU numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }
}

impl fmt::Display for CpuSet {
    /// Writes the kernel's list format.
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

/// A text is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a list of CPUs: write numbers and ranges, such as 0-3,8")]
pub struct ParseCpuSetError {
    /// The text.
    pub text: String,
}

impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    /// Parses the kernel's list format. The empty text is the empty set.
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
