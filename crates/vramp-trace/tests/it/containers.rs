//! Compressed files and archives.

use std::io::{Read, Write};
use std::path::Path;

use vramp_core::Bytes;
use vramp_trace::{ReadError, ReadLimits, Trace, read};

fn plain() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/protocol4.pickle");
    std::fs::read(path).unwrap()
}

fn trace() -> Trace {
    read(&plain()[..], &ReadLimits::default()).unwrap()
}

fn open(bytes: &[u8]) -> Result<Trace, ReadError> {
    read(bytes, &ReadLimits::default())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 6);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A zip archive with these files, deflated.
fn zip(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut archive = rawzip::ZipArchiveWriter::new(&mut out);
    for (name, bytes) in files {
        if name.ends_with('/') {
            archive.new_dir(*name).create().unwrap();
            continue;
        }
        let method = rawzip::CompressionMethod::DEFLATE;
        let (mut entry, config) =
            archive.new_file(*name).compression_method(method).start().unwrap();
        let encoder = flate2::write::DeflateEncoder::new(&mut entry, flate2::Compression::fast());
        let mut writer = config.wrap(encoder);
        writer.write_all(bytes).unwrap();
        let (encoder, descriptor) = writer.finish().unwrap();
        encoder.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    archive.finish().unwrap();
    out
}

#[test]
fn bytes_behind_a_gzip_file_are_named() {
    let whole = gzip(&plain());
    for behind in [&b"x"[..], b"\x1f", b"\x1f\x8b", b"\0\0 and more", b"<html>not found</html>"] {
        let file = [&whole[..], behind].concat();
        for error in [open(&file), read(Slow(&file), &ReadLimits::default())] {
            let error = error.expect_err("it is not gzip").to_string();
            assert!(error.contains("a gzip file with other bytes behind its end"), "{error}");
        }
    }
}

/// A source that returns one byte at a time, as a slow pipe.
struct Slow<'a>(&'a [u8]);

impl Read for Slow<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = out.len().min(1);
        self.0.read(&mut out[..len])
    }
}

#[test]
fn gzip_may_have_several_members_and_zeros_after_them() {
    let plain = plain();
    let (first, second) = plain.split_at(1000);
    let members = [gzip(first), gzip(second)].concat();
    let padded = [&members[..], &[0; 100_000]].concat();
    let between = [gzip(first), vec![0; 7], gzip(second), vec![0; 3]].concat();
    for file in [members, padded, between] {
        assert_eq!(open(&file).unwrap(), trace());
        assert_eq!(read(Slow(&file), &ReadLimits::default()).unwrap(), trace());
    }
}

#[test]
fn xz_is_read() {
    let file = xz(&plain());
    assert_eq!(open(&file).unwrap(), trace());
    assert_eq!(read(Slow(&file), &ReadLimits::default()).unwrap(), trace());
    // Streams follow each other, with zeros between them.
    let plain = plain();
    let (first, second) = plain.split_at(1000);
    let streams = [xz(first), vec![0; 8], xz(second), vec![0; 4]].concat();
    assert_eq!(open(&streams).unwrap(), trace());
    for len in 6..file.len() {
        assert!(open(&file[..len]).is_err(), "cut at {len}");
    }
    let mut damaged = file.clone();
    damaged[file.len() / 2] ^= 1;
    assert!(open(&damaged).is_err());
}

#[test]
fn an_xz_window_is_bounded() {
    // The header of the block asks for a window of 1 GiB.
    let mut file = xz(&plain());
    let size_property = file.windows(2).position(|pair| pair == [0x21, 1]).unwrap() + 2;
    file[size_property] = 36;
    let header = 12..12 + (usize::from(file[12]) + 1) * 4;
    let end = header.end - 4;
    let crc = crc32fast::hash(&file[header.start..end]).to_le_bytes();
    file[end..header.end].copy_from_slice(&crc);
    let error = open(&file).unwrap_err().to_string();
    assert!(error.contains("memory"), "{error}");
}

#[test]
fn a_zip_archive_with_one_file_is_read() {
    let plain = plain();
    for files in [
        &[("run.pickle", &plain[..])][..],
        &[("runs/", b""), ("runs/run.pickle", &plain), ("__MACOSX/runs/._run.pickle", b"x")],
        &[("run.pickle.gz", &gzip(&plain))],
    ] {
        let file = zip(files);
        assert_eq!(open(&file).unwrap(), trace());
        assert_eq!(read(Slow(&file), &ReadLimits::default()).unwrap(), trace());
    }
}

#[test]
fn other_zip_archives_are_refused_with_a_reason() {
    let plain = plain();
    for (files, says) in [
        (&[("a.pickle", &plain[..]), ("b.pickle", &plain)][..], "2 files (a.pickle, b.pickle)"),
        (&[("model/data.pkl", b"x"), ("model/version", b"3")], "a PyTorch checkpoint"),
        (&[("weights.npy", b"x")], "a NumPy file"),
        (&[("runs/", b"")], "the file is empty"),
        (&[("inner.zip", &zip(&[("run.pickle", &plain)]))], "unknown trace format"),
    ] {
        let error = open(&zip(files)).unwrap_err().to_string();
        assert!(error.contains(says), "{says}: {error}");
    }
    let names: Vec<String> = (0..50).map(|number| format!("{number}.pickle")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (&name[..], &b"x"[..])).collect();
    let error = open(&zip(&files)).unwrap_err().to_string();
    assert!(error.contains("50 files") && !error.contains("9.pickle"), "{error}");
}

#[test]
fn a_damaged_zip_archive_is_an_error() {
    let mut file = zip(&[("run.pickle", &plain())]);
    for len in 4..file.len() {
        assert!(open(&file[..len]).is_err(), "cut at {len}");
    }
    for at in 0..file.len() {
        file[at] ^= 0x10;
        // A name or a time may be changed, which does not matter.
        if let Ok(found) = open(&file) {
            assert_eq!(found, trace(), "byte {at}");
        }
        file[at] ^= 0x10;
    }
}

#[test]
fn a_zip_archive_counts_against_the_memory_limit() {
    let file = zip(&[("run.pickle", &plain())]);
    let limits = ReadLimits { memory: Bytes::new(100), ..ReadLimits::default() };
    let error = read(&file[..], &limits).unwrap_err().to_string();
    assert!(error.contains("ReadLimits::memory (vramp: --max-memory)"), "{error}");
}
