//! Unpacks a zip archive that holds one file.
//!
//! The directory of an archive is at its end, so the whole archive is read into memory first and
//! counts against the memory limit.

use std::io::{self, Read};

use rawzip::{CompressionMethod, ZipArchive, ZipArchiveEntryWayfinder, ZipSliceArchive};
use vramp_core::Bytes;

use super::foreign::Foreign;
use crate::{ReadError, ReadLimits};

/// Names that an error lists at most.
const LISTED_MAX: usize = 8;

/// Returns true if the contents begin as a zip archive, which may be empty.
pub(crate) fn is_archive(start: &[u8]) -> bool {
    start.starts_with(b"PK\x03\x04") || start.starts_with(b"PK\x05\x06")
}

/// Passes the contents of the only file to `read`, with what is left of the limits. They are checked
/// against their checksum when they end.
pub(crate) fn unpack<T>(
    source: impl Read,
    limits: &ReadLimits,
    read: impl FnOnce(&mut dyn Read, &ReadLimits) -> Result<T, ReadError>,
) -> Result<T, ReadError> {
    let allowed = limits.memory.count();
    let mut bytes = Vec::new();
    source
        .take(allowed.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|cause| ReadError::Io { offset: 0, cause })?;
    let left = allowed.checked_sub(bytes.capacity() as u64).ok_or(ReadError::Limit {
        limit: "memory",
        what: "bytes of memory",
        allowed,
        offset: bytes.len() as u64,
    })?;
    let limits = ReadLimits { memory: Bytes::new(left), ..*limits };

    let archive = ZipArchive::from_slice(&bytes[..]).map_err(failed)?;
    let file = only_file(&archive)?;
    let entry = archive.get_entry(file.wayfinder).map_err(failed)?;
    let data = entry.data();
    let contents: Box<dyn Read + '_> = match file.method {
        _ if file.is_encrypted => return Err(Foreign::LOCKED_ZIP.into()),
        CompressionMethod::STORE => Box::new(data),
        CompressionMethod::DEFLATE => Box::new(flate2::bufread::DeflateDecoder::new(data)),
        CompressionMethod::ZSTD => {
            let decoder = zstd::stream::read::Decoder::with_buffer(data);
            Box::new(decoder.map_err(|cause| ReadError::Io { offset: 0, cause })?)
        }
        _ => return Err(Foreign::OTHER_ZIP.into()),
    };
    read(&mut entry.verifying_reader(contents), &limits)
}

struct File {
    wayfinder: ZipArchiveEntryWayfinder,
    method: CompressionMethod,
    is_encrypted: bool,
}

fn only_file(archive: &ZipSliceArchive<&[u8]>) -> Result<File, ReadError> {
    let (mut found, mut names, mut count) = (None, Vec::new(), 0);
    let mut entries = archive.entries();
    while let Some(entry) = entries.next_entry().map_err(failed)? {
        let path = entry.file_path();
        let name = String::from_utf8_lossy(path.as_ref());
        // Folders, and what macOS adds.
        if entry.is_dir() || name.starts_with("__MACOSX/") {
            continue;
        }
        if let Some(foreign) = Foreign::of_zip_entry(&name) {
            return Err(foreign.into());
        }
        count += 1;
        if names.len() < LISTED_MAX {
            names.push(name.chars().take(80).collect::<String>());
        }
        found = Some(File {
            wayfinder: entry.wayfinder(),
            method: entry.compression_method(),
            is_encrypted: entry.flags().is_encrypted(),
        });
    }
    match found {
        Some(file) if count == 1 => Ok(file),
        None => Err(ReadError::Empty),
        Some(_) => Err(ReadError::SeveralFiles { count, names: names.join(", ") }),
    }
}

fn failed(error: rawzip::Error) -> ReadError {
    ReadError::Io { offset: 0, cause: io::Error::new(io::ErrorKind::InvalidData, error) }
}
