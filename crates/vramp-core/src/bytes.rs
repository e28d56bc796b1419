//! Amounts of memory, and addresses.
//!
//! [`Bytes`] is a length, [`DeviceAddr`] an address. An address plus a length is an address, and the
//! difference of two addresses is a length; nothing else compiles.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};
use std::str::FromStr;

/// An amount of memory in bytes.
///
/// Sums and differences panic on overflow: an amount that does not fit in 64 bits is a broken
/// invariant, never a user's mistake. User input goes through [`Bytes::from_str`], which returns
/// an error.
///
/// ```
/// use vramp_core::Bytes;
/// let half: Bytes = "1.5GiB".parse()?;
/// assert_eq!(half, Bytes::mib(1536));
/// assert_eq!(half.to_string(), "1.50 GiB");
/// assert_eq!(format!("{half:?}"), "1536 MiB");
/// # Ok::<(), vramp_core::ParseBytesError>(())
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

impl Bytes {
    /// No memory.
    pub const ZERO: Bytes = Bytes(0);

    /// The largest amount that fits in 64 bits.
    pub const MAX: Bytes = Bytes(u64::MAX);

    /// `count` bytes.
    pub const fn new(count: u64) -> Bytes {
        Bytes(count)
    }

    /// `count` times 1024 bytes.
    pub const fn kib(count: u64) -> Bytes {
        Bytes(count << 10)
    }

    /// `count` times 1024 KiB.
    pub const fn mib(count: u64) -> Bytes {
        Bytes(count << 20)
    }

    /// `count` times 1024 MiB.
    pub const fn gib(count: u64) -> Bytes {
        Bytes(count << 30)
    }

    /// `count` times 1024 GiB.
    pub const fn tib(count: u64) -> Bytes {
        Bytes(count << 40)
    }

    /// The plain number.
    pub const fn count(self) -> u64 {
        self.0
    }

    /// True for no memory.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// True if this is a whole number of `unit`s.
    pub const fn is_multiple_of(self, unit: Bytes) -> bool {
        self.0.is_multiple_of(unit.0)
    }

    /// The next multiple of `unit`, or `None` if it does not fit in 64 bits.
    #[inline]
    pub fn checked_round_up(self, unit: Bytes) -> Option<Bytes> {
        self.0.checked_next_multiple_of(unit.0).map(Bytes)
    }

    /// The multiple of `unit` at or below this amount.
    pub const fn round_down(self, unit: Bytes) -> Bytes {
        Bytes(self.0 - self.0 % unit.0)
    }

    /// The difference, or zero where `other` is larger.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The sum, or `None` if it does not fit in 64 bits.
    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Bytes(sum)),
            None => None,
        }
    }

    /// The sum, or [`Bytes::MAX`] where it does not fit in 64 bits.
    pub const fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// The number of whole `unit`s in this amount.
    pub const fn whole(self, unit: Bytes) -> u64 {
        self.0 / unit.0
    }
}

impl Add for Bytes {
    type Output = Bytes;
    #[inline]
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.checked_add(other.0).expect("an amount of memory fits in 64 bits"))
    }
}

impl AddAssign for Bytes {
    #[inline]
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    #[inline]
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.checked_sub(other.0).expect("a part is not larger than the whole"))
    }
}

impl SubAssign for Bytes {
    #[inline]
    fn sub_assign(&mut self, other: Bytes) {
        *self = *self - other;
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;
    fn mul(self, times: u64) -> Bytes {
        Bytes(self.0.checked_mul(times).expect("an amount of memory fits in 64 bits"))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(amounts: I) -> Bytes {
        amounts.fold(Bytes::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    /// Three figures in the largest binary unit that is at least 1: `512 B`, `2.00 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut amount = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while amount >= 1024.0 && unit + 1 < UNITS.len() {
            amount /= 1024.0;
            unit += 1;
        }
        f.pad(&format!("{amount:.2} {}", UNITS[unit]))
    }
}

impl fmt::Debug for Bytes {
    /// The exact amount in the largest binary unit of which it is a whole number: `512 B`, `64 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut amount, mut unit) = (self.0, 0);
        while amount != 0 && amount.is_multiple_of(1024) && unit + 1 < UNITS.len() {
            amount /= 1024;
            unit += 1;
        }
        f.pad(&format!("{amount} {}", UNITS[unit]))
    }
}

/// The text is not an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not an amount of memory: write a number and a unit, such as 512, 64MiB, 1.5GiB or 80GB"
)]
pub struct ParseBytesError {
    /// The text.
    pub text: String,
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Reads `4096`, `2MiB`, `1.5 GiB`, `80GB` (decimal) and the short forms `K`, `M`, `G`, `T`
    /// (binary), in any case.
    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        let refuse = || ParseBytesError { text: text.to_owned() };
        let trimmed = text.trim();
        let digits =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(refuse()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Bytes).ok_or_else(refuse);
        }
        let fraction: f64 = number.parse().map_err(|_| refuse())?;
        let bytes = fraction * scale as f64;
        if !bytes.is_finite() || !(0.0..9.2e18).contains(&bytes) {
            return Err(refuse());
        }
        Ok(Bytes(bytes.round() as u64))
    }
}

/// An address in a kernel's address space. Only a number: to access it is the user's unsafe act.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddr(u64);

impl DeviceAddr {
    /// The address with this number.
    pub const fn new(number: u64) -> DeviceAddr {
        DeviceAddr(number)
    }

    /// The plain number.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The distance from `start` up to this address, or `None` if it lies below.
    pub const fn checked_offset_from(self, start: DeviceAddr) -> Option<Bytes> {
        match self.0.checked_sub(start.0) {
            Some(distance) => Some(Bytes(distance)),
            None => None,
        }
    }

    /// The address `distance` further, or `None` past the end of the address space.
    pub const fn checked_add(self, distance: Bytes) -> Option<DeviceAddr> {
        match self.0.checked_add(distance.0) {
            Some(number) => Some(DeviceAddr(number)),
            None => None,
        }
    }
}

impl Add<Bytes> for DeviceAddr {
    type Output = DeviceAddr;
    #[inline]
    fn add(self, distance: Bytes) -> DeviceAddr {
        self.checked_add(distance).expect("a device address fits in 64 bits")
    }
}

impl fmt::Debug for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A range of device addresses: `len` bytes from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddrRange {
    /// Address of the first byte.
    pub start: DeviceAddr,
    /// Length in bytes.
    pub len: Bytes,
}

impl AddrRange {
    /// `len` bytes from `start` on.
    pub const fn new(start: DeviceAddr, len: Bytes) -> AddrRange {
        AddrRange { start, len }
    }

    /// The first address after the range, or `None` past the end of the address space.
    pub const fn checked_end(self) -> Option<DeviceAddr> {
        self.start.checked_add(self.len)
    }
}

impl fmt::Display for AddrRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.start, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_every_usual_spelling() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("2MiB", 2 << 20),
            ("2 mib", 2 << 20),
            ("8T", 8 << 40),
            ("80GB", 80_000_000_000),
            ("1.5GiB", 3 << 29),
        ] {
            assert_eq!(text.parse(), Ok(Bytes::new(bytes)), "{text}");
        }
    }

    #[test]
    fn texts_that_are_no_size_are_refused_with_the_text() {
        for text in
            ["", "GiB", "-1", "1.2.3", "5 parsecs", "99999999999999999999", "1e9", "99999999T"]
        {
            let error = text.parse::<Bytes>().expect_err(text);
            assert!(error.to_string().contains(&format!("'{text}'")), "{error}");
        }
    }

    #[test]
    fn a_size_is_printed_in_the_largest_unit() {
        assert_eq!(Bytes::new(512).to_string(), "512 B");
        assert_eq!(Bytes::mib(2).to_string(), "2.00 MiB");
        assert_eq!(Bytes::tib(8).to_string(), "8.00 TiB");
    }

    #[test]
    fn the_debug_form_is_exact_and_has_a_unit() {
        for (bytes, text) in [
            (Bytes::ZERO, "0 B"),
            (Bytes::new(1000), "1000 B"),
            (Bytes::mib(64), "64 MiB"),
            (Bytes::mib(64) + Bytes::new(1), "67108865 B"),
            (Bytes::tib(2048), "2048 TiB"),
        ] {
            assert_eq!(format!("{bytes:?}"), text);
        }
    }
}
