//! Results as lines of JSON: one object each.
//!
//! Every object has `schema_version`, which changes when a field is removed or changes its meaning.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

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
    serde_json::to_writer(&mut *out, object)?;
    Ok(writeln!(out)?)
}

/// Writes an object and the version of its format.
pub(crate) fn versioned_line(out: &mut dyn Write, object: &impl Serialize) -> Result<()> {
    line(out, &Versioned { schema_version: SCHEMA_VERSION, object })
}
