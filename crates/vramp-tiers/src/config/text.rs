//! Amounts and levels in TOML.

use std::fmt;

use crate::ledger::core::Level;
use serde::de::{self, Deserializer, Visitor};
use vramp_core::Bytes;

/// Formats an amount in the largest unit that is exact: `12GiB`, `4096B`.
fn exact(bytes: Bytes) -> String {
    let count = bytes.count();
    for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if count != 0 && count.is_multiple_of(1 << shift) {
            return format!("{}{unit}", count >> shift);
        }
    }
    format!("{count}B")
}

/// Reads a level: a fraction as a number with a decimal point, or an amount as a text with a unit.
struct LevelVisitor;

impl Visitor<'_> for LevelVisitor {
    type Value = Level;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a fraction of the capacity such as 0.85, or an amount such as \"12GiB\"")
    }

    fn visit_f64<E: de::Error>(self, part: f64) -> Result<Level, E> {
        Ok(Level::Fraction(part))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Level, E> {
        let unit = text.trim().ends_with(|last: char| last.is_ascii_alphabetic());
        match text.parse() {
            Ok(bytes) if unit => Ok(Level::Bytes(bytes)),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}

/// Reads an amount.
struct BytesVisitor;

impl Visitor<'_> for BytesVisitor {
    type Value = Bytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an amount such as \"12GiB\", or a number of bytes")
    }

    fn visit_u64<E: de::Error>(self, count: u64) -> Result<Bytes, E> {
        Ok(Bytes::new(count))
    }

    fn visit_i64<E: de::Error>(self, count: i64) -> Result<Bytes, E> {
        u64::try_from(count)
            .map(Bytes::new)
            .map_err(|_| E::invalid_value(de::Unexpected::Signed(count), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

/// [`Bytes`] as a text with a unit.
pub(super) mod bytes {
    use serde::Serializer;

    use super::{Bytes, BytesVisitor, Deserializer, exact};

    pub(in super::super) fn serialize<S: Serializer>(
        bytes: &Bytes,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&exact(*bytes))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Bytes, D::Error> {
        from.deserialize_any(BytesVisitor)
    }
}

/// As [`bytes`], of an amount that is set.
pub(super) mod set_bytes {
    use serde::Serializer;

    use super::{Bytes, BytesVisitor, Deserializer, exact};

    pub(in super::super) fn serialize<S: Serializer>(
        bytes: &Option<Bytes>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match bytes {
            None => to.serialize_none(),
            Some(bytes) => to.serialize_str(&exact(*bytes)),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Bytes>, D::Error> {
        from.deserialize_any(BytesVisitor).map(Some)
    }
}

/// A level that is set: a fraction as a number, an amount as a text.
pub(super) mod level {
    use serde::Serializer;

    use super::{Deserializer, Level, LevelVisitor, exact};

    pub(in super::super) fn serialize<S: Serializer>(
        level: &Option<Level>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match level {
            None => to.serialize_none(),
            Some(Level::Bytes(bytes)) => to.serialize_str(&exact(*bytes)),
            Some(Level::Fraction(part)) => to.serialize_f64(*part),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Level>, D::Error> {
        from.deserialize_any(LevelVisitor).map(Some)
    }
}
