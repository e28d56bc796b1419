//! Results as lines of JSON: one object each.
//!
//! Every object has `schema_version`, which changes when a field is removed or changes its meaning.

use std::io::{self, Write};

use anyhow::Result;
use serde::Serialize;
use serde_json::ser::Formatter;

/// Version of the objects of `info`, `graph`, `tiers` and `bench`.
const SCHEMA_VERSION: u32 = 1;

/// An object with the version of its format.
#[derive(Serialize)]
struct Versioned<'a, T> {
    schema_version: u32,
    #[serde(flatten)]
    object: &'a T,
}

/// Writes an object that has a version of its own.
pub(crate) fn line(out: &mut dyn Write, object: &impl Serialize) -> Result<()> {
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, Printable);
    object.serialize(&mut serializer)?;
    Ok(writeln!(out)?)
}

/// Writes an object and the version of its format.
pub(crate) fn versioned_line(out: &mut dyn Write, object: &impl Serialize) -> Result<()> {
    line(out, &Versioned { schema_version: SCHEMA_VERSION, object })
}

/// JSON escapes the control characters of ASCII alone. Terminals know others, too.
struct Printable;

impl Formatter for Printable {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for part in fragment.split_inclusive(char::is_control) {
            let mut chars = part.chars();
            match chars.next_back().filter(|last| last.is_control()) {
                Some(last) => write!(writer, "{}\\u{:04x}", chars.as_str(), u32::from(last))?,
                None => writer.write_all(part.as_bytes())?,
            }
        }
        Ok(())
    }
}
