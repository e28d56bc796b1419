//! How much a run of the tests covers. A dependency of tests only.
//!
//! A short run is what everybody waits for: `cargo test`, and `cargo xtask ci`. A long run is
//! `cargo xtask nightly`, which sets [`LENGTH`].
//!
//! | test | short run | run of length n |
//! |---|---|---|
//! | random programs: [`seeds`], [`cases`] | the same seeds each time | n times as many; those beyond the first differ from day to day |
//! | a failure at any call of a scenario: [`fail_each_call`], [`failing_calls`] | [`SAMPLE`] calls, other ones each day | every call |
//! | some of many things: [`sampled`] | a sample, other ones each day | all |
//!
//! So the cost of a sweep grows with the length of its scenario, and not with its square, and the calls
//! that one run omits are tried by others. A test that fails prints the day; [`DAY`] repeats it.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

/// The variable that sets how many times as much is tried: a number from 1. Without it, 1.
pub const LENGTH: &str = "VRAMP_TEST_LENGTH";

/// The variable that sets the day, in days since 1970. Without it, today.
pub const DAY: &str = "VRAMP_TEST_DAY";

/// How many calls of a scenario fail in a short run, at most, one at a time.
pub const SAMPLE: u64 = 12;

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// Returns the number of cases of a property test, of which a short run tries `short`.
pub fn cases(short: u32) -> u32 {
    let length = u32::try_from(length()).unwrap_or(u32::MAX);
    short.saturating_mul(length)
}

/// Returns the seeds of random programs, of which a short run tries those below `short`.
pub fn seeds(short: u64) -> Tried<impl Iterator<Item = u64>> {
    let more = short.saturating_mul(length() - 1);
    // Far from the seeds of other days.
    let first = (1 + day()) << 32;
    Tried::new((0..short).chain(first..first + more))
}

/// Returns the numbers of the calls that fail, one at a time, in a scenario of so many calls: the first,
/// the last, and others between them. They ascend from 1.
pub fn failing_calls(calls: u64) -> Tried<impl Iterator<Item = u64>> {
    sampled(calls, SAMPLE)
}

/// Returns the numbers of some of so many things: the first, the last, and others between them, `most` in
/// all; each of them in a long run. They ascend from 1.
///
/// # Panics
///
/// If `most` is less than 3.
pub fn sampled(count: u64, most: u64) -> Tried<impl Iterator<Item = u64>> {
    assert!(most > 2, "both ends and one between them");
    let numbers = match length() {
        1 => sample(count, most, day()),
        _ => (1..=count).collect(),
    };
    Tried::new(numbers.into_iter())
}

/// Runs a scenario without a failure, and then once for each of a sample of its calls, which fails.
///
/// `run(n)` lets call `n` fail, none if `n` is 0, and returns how many calls were made from then on.
pub fn fail_each_call(mut run: impl FnMut(u64) -> u64) {
    let calls = run(0);
    assert!(calls > 0, "the scenario makes no call");
    for n in failing_calls(calls) {
        run(n);
    }
}

/// The ends of `1..=count`, and a random number of each of as many parts of it as `most` leaves.
fn sample(count: u64, most: u64, seed: u64) -> Vec<u64> {
    if count <= most {
        return (1..=count).collect();
    }
    let parts = most - 2;
    let random = (0..parts).map(|part| {
        let (first, next) = (part * count / parts, (part + 1) * count / parts);
        1 + first + mixed(seed << 32 | part) % (next - first)
    });
    let mut numbers: Vec<u64> = std::iter::once(1).chain(random).chain([count]).collect();
    numbers.dedup();
    numbers
}

/// A hash of a number: the finalizer of SplitMix64.
fn mixed(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

fn length() -> u64 {
    variable(LENGTH).unwrap_or(1).max(1)
}

fn day() -> u64 {
    let today = || {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since.map_or(0, |since| since.as_secs() / SECONDS_PER_DAY)
    };
    variable(DAY).unwrap_or_else(today)
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is '{text}' and not a number")))
}

/// True if every byte has this value; quick in a build that is not optimized too.
pub fn is_filled(bytes: &[u8], value: u8) -> bool {
    // Each byte equals the first one if all but the first equal all but the last.
    bytes.first().is_none_or(|first| *first == value && bytes[1..] == bytes[..bytes.len() - 1])
}

/// Lets other threads run, while the caller waits for what they do. Takes less of the processor than a yield.
pub fn moment() {
    std::thread::sleep(Duration::from_micros(100));
}

/// What a test tries one after the other. If the test panics, the one that it tried is printed.
pub struct Tried<I: Iterator<Item: Copy + Debug>> {
    rest: I,
    last: Option<I::Item>,
}

impl<I: Iterator<Item: Copy + Debug>> Tried<I> {
    fn new(rest: I) -> Self {
        Tried { rest, last: None }
    }
}

impl<I: Iterator<Item: Copy + Debug>> Iterator for Tried<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        self.last = self.rest.next();
        self.last
    }
}

impl<I: Iterator<Item: Copy + Debug>> Drop for Tried<I> {
    fn drop(&mut self) {
        if let Some(last) = self.last.filter(|_| std::thread::panicking()) {
            eprintln!(
                "failed at {last:?}; to repeat it, set {DAY}={} {LENGTH}={}",
                day(),
                length()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_both_ends_and_at_most_so_many_calls_in_between() {
        for calls in [0, 1, 2, 24, 25, 26, 1000, 12_345] {
            let numbers = sample(calls, SAMPLE, 20_000);
            assert!(numbers.len() as u64 <= SAMPLE.min(calls), "{numbers:?}");
            assert!(numbers.len() as u64 + 2 >= SAMPLE.min(calls), "{numbers:?}");
            assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
            assert_eq!(numbers.first().copied(), (calls > 0).then_some(1));
            assert_eq!(numbers.last().copied(), (calls > 0).then_some(calls));
            let widest = numbers.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
            assert!(widest <= 2 * calls.div_ceil(SAMPLE - 2), "{widest} of {calls}");
        }
    }

    #[test]
    fn one_byte_that_differs_is_found_anywhere() {
        assert!(is_filled(&[], 1) && is_filled(&[1], 1) && is_filled(&[7; 1000], 7));
        assert!(!is_filled(&[1], 2) && !is_filled(&[7; 1000], 8));
        for place in 0..100 {
            let mut bytes = [3; 100];
            bytes[place] = 4;
            assert!(!is_filled(&bytes, 3), "{place}");
        }
    }

    #[test]
    fn a_scenario_runs_once_whole_and_then_with_failures() {
        let mut failed = Vec::new();
        fail_each_call(|n| {
            failed.push(n);
            7
        });
        assert_eq!(failed, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn samples_of_many_days_have_every_call() {
        let mut tried: Vec<u64> = (0..600).flat_map(|day| sample(1000, SAMPLE, day)).collect();
        tried.sort_unstable();
        tried.dedup();
        assert_eq!(tried.len(), 1000);
    }
}
