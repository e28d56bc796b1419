//! Compressed files and archives, RMM logs, and files of other kinds.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::path::Path;

use vramp_core::Bytes;
use vramp_trace::{EventKind, ReadError, ReadLimits, Request, Trace, Workload, read, read_trace};

// --- Compressed files and archives ---

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

// --- Files of other kinds: an error says what they are and what to do ---

fn error(bytes: &[u8]) -> String {
    match read(bytes, &ReadLimits::default()) {
        Ok(trace) => panic!("read {} events", trace.events.len()),
        Err(error) => error.to_string(),
    }
}

/// An ELF header of this type for this machine.
fn elf(kind: u8, machine: u8) -> Vec<u8> {
    let mut header = b"\x7fELF\x02\x01\x01".to_vec();
    header.resize(64, 0);
    (header[16], header[18]) = (kind, machine);
    header
}

#[test]
fn files_of_other_kinds_are_named_with_advice() {
    let record = "_record_memory_history";
    let mut tar = vec![0; 512];
    tar[257..262].copy_from_slice(b"ustar");
    for (bytes, looks, advice) in [
        (
            &b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"[..],
            "a Git LFS pointer",
            "git lfs pull",
        ),
        (b"{\"schemaVersion\": 1, \"traceEvents\": []}", "a Chrome trace", record),
        (b" \n[{\"ph\": \"X\"}]", "a Chrome trace", record),
        (b"{\"a\": 1}", "a JSON file", record),
        (b"\n<!DOCTYPE html>\n<html>", "a web page", ".pickle"),
        (b"\x93NUMPY\x01\0v\0", "a NumPy file", record),
        (
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
            "a PyTorch checkpoint",
            record,
        ),
        (&elf(3, 62), "a program or library", record),
        (&elf(4, 62), "the core dump of a process", record),
        (&elf(4, 190), "a CUDA core dump", record),
        (&elf(2, 190), "a CUDA binary", record),
        (b"SQLite format 3\0\x10\0", "an SQLite database, as Nsight", record),
        (b"memray\0\x0b\0\0\0", "a recording of memray", record),
        (b"(dp0\nS'segments'\np1\n", "a pickle of protocol 0", "protocol=4"),
        (b"(lp0\n.", "a pickle of protocol 0", "protocol=4"),
        (b"}q\0(X\x08\0\0\0segmentsq\x01", "a pickle of protocol 1", "protocol=4"),
        (b"}q\0X\x08\0\0\0segmentsq\x01]q\x02s.", "a pickle of protocol 1", "protocol=4"),
        (b"]q\0(}q\x01(", "a pickle of protocol 1", "protocol=4"),
        (b"]q\0}q\x01", "a pickle of protocol 1", "protocol=4"),
        (b"]q\0.", "a pickle of protocol 1", "protocol=4"),
        (b"\x08\0\0\0\0\0\0\0{\"a\":{}}", "a safetensors file", record),
        (b"BZh91AY&SY", "a bzip2 file", "unpack"),
        (&tar, "a tar archive", "unpack"),
        (b"\x1f", "the first byte of a gzip file", "download it again"),
        (b"a,b,c\n1,2,3\n", "a text file", "`Thread,Time,Action,Pointer,Size,Stream`"),
        ("Gr\u{fc}\u{df}e".as_bytes(), "a text file", "RMM"),
        (b"\xef\xbb\xbfhello", "a text file", "RMM"),
    ] {
        let message = error(bytes);
        assert!(message.contains(looks) && message.contains(advice), "{looks}: {message}");
    }
}

#[test]
fn what_nothing_is_known_about_is_shown_by_its_first_bytes() {
    assert!(matches!(read(&b""[..], &ReadLimits::default()), Err(ReadError::Empty)));
    for (bytes, says) in [
        (&b"\x01\x02\x03\xff"[..], "begins with 01 02 03 ff"),
        (b"\x01\x02", "expected a PyTorch snapshot pickle"),
        (b"\x80\x01}.", "pickle protocol 1 at byte 0"),
        (b"\x80\x06}.", "pickle protocol 6 at byte 0"),
        (b"\x80", "the pickle is truncated at byte 1"),
        (b"\x89VTR", "the .vtrace file is truncated"),
        (b"\x80\x04}.", "neither device_traces nor segments"),
        (b"\x80\x04K\x05.", "outermost value is not a dict"),
    ] {
        let message = error(bytes);
        assert!(message.contains(says), "{bytes:?}: {message}");
    }
}

#[test]
fn a_path_says_more_where_the_contents_do_not() {
    let open = |path: &Path| read_trace(path, &ReadLimits::default()).unwrap_err().to_string();
    let missing = open(Path::new("no/such/file.pickle"));
    assert!(missing.contains("no/such/file.pickle"), "{missing}");
    let folder = tempfile::tempdir().unwrap();
    let message = open(folder.path());
    assert!(message.contains("a folder: give the traces in it"), "{message}");
    let report = folder.path().join("run.nsys-rep");
    std::fs::write(&report, b"\x01\x02\xff\xfe").unwrap();
    let message = open(&report);
    assert!(message.contains("a report of Nsight"), "{message}");
}

#[test]
fn an_integer_of_more_than_64_bits_is_refused_only_where_it_is_read() {
    let snapshot = |key: &str, int: &[u8]| {
        let text = |text: &str| [b"\x8c", &[text.len() as u8][..], text.as_bytes()].concat();
        let fields = [text("action"), text("alloc"), text("addr"), b"K\x01".to_vec()].concat();
        let more = [&text("size")[..], b"K\x01", &text(key), int].concat();
        [b"\x80\x04}", &text("device_traces")[..], b"]]}(", &fields, &more, b"uaas."].concat()
    };
    let huge: [&[u8]; 3] = [
        b"\x8a\x09\0\0\0\0\0\0\0\0\x01",
        b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff",
        b"\x8b\x0c\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\x40",
    ];
    for int in huge {
        let trace = read(&snapshot("unread", int)[..], &ReadLimits::default()).unwrap();
        assert_eq!(trace.events.len(), 1);
        for key in ["size", "addr", "time_us", "stream", "pool_id"] {
            let message = error(&snapshot(key, int));
            let says = format!("event 0 of device 0: {key} is an integer of more than 64 bits");
            assert!(message.contains(&says), "{message}");
        }
    }
    // More bytes than the number needs.
    for (int, address) in [
        (&b"\x8a\x0c\x07\0\0\0\0\0\0\0\0\0\0\0"[..], 7),
        (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0", u64::MAX),
        (b"\x8a\0", 0),
    ] {
        let trace = read(&snapshot("addr", int)[..], &ReadLimits::default()).unwrap();
        assert_eq!(trace.events[0].address.number(), address);
    }
}

// --- Reading RMM logs ---

const LOG: &str = "\
Thread,Time,Action,Pointer,Size,Stream
2260,16:06:30.678500,allocate,0x7f2e40000000,1024,0x0
2260,16:06:30.678600,allocate,0x7f2e40000400,2048,0x2
2261,16:06:30.678700,allocate failure,(nil),1073741824,0x2
2260,16:06:30.678800,free,0x7f2e40000000,1024,0x0
2260,16:06:30.678900,resize,0x7f2e40000400,4096,0x2
";

#[test]
fn a_log_becomes_the_same_kind_of_trace() {
    let trace = read(LOG.as_bytes(), &ReadLimits::default()).unwrap();
    assert_eq!(trace.device_count, 1);
    assert_eq!(trace.streams, [0, 2]);
    assert_eq!(trace.actions, ["resize"]);
    let names: Vec<&str> = trace.events.iter().map(|event| trace.action_name(event.kind)).collect();
    assert_eq!(names, ["alloc", "alloc", "oom", "free_requested", "free_completed", "resize"]);
    assert_eq!(trace.events[0].time_us, 57_990_678_500);
    assert_eq!(trace.events[2].device_free(), None, "a log does not say what was free");

    let workload = Workload::from_trace(&trace, 0);
    assert_eq!(
        workload.requests,
        [
            Request::Alloc { block: 0, size: Bytes::kib(1), stream: 0 },
            Request::Alloc { block: 1, size: Bytes::kib(2), stream: 1 },
            Request::Oom { size: Bytes::gib(1), device_free: None, stream: 1 },
            Request::Free { block: 0 },
            Request::FreeCompleted { block: 0 },
        ]
    );
    assert_eq!(workload.peak_live, Bytes::kib(3));
    assert!(workload.repairs.is_empty());
}

#[test]
fn columns_are_found_by_name() {
    let variants = [
        "PID,Time,Action,Pointer,Size,Stream\n1,10:00:00:5,allocate,0x10,7,3\n",
        "\u{feff}Thread, Time, Action, Pointer, Size, Stream\r\n1, 10:00:00.5, allocate, 0x10, 7, 3\r\n",
        "action,size,pointer,stream,time\nallocate,7,10,0x3,10:00:00.500000\n",
    ];
    for log in variants {
        let trace = read(log.as_bytes(), &ReadLimits::default()).unwrap();
        let [event] = trace.events[..] else { panic!("{log}: {:?}", trace.events) };
        assert_eq!(event.kind, EventKind::Alloc);
        assert_eq!((event.address.number(), event.size.count()), (16, 7), "{log}");
        assert_eq!((trace.streams[0], event.time_us), (3, 36_000_500_000), "{log}");
    }
}

#[test]
fn a_log_without_lines_is_an_empty_trace() {
    let trace = read(&b"Thread,Time,Action,Pointer,Size,Stream\n"[..], &ReadLimits::default());
    assert_eq!(trace.unwrap().events, []);
}

#[test]
fn a_bad_line_is_named() {
    for (line, says) in [
        ("1,10:00:00,allocate,0x10", "line 2: size is \"\""),
        ("1,10:00:00,allocate,pointer,1,0", "pointer is \"pointer\""),
        ("1,10:00:00,allocate,0x10,-1,0", "size is \"-1\""),
        ("1,10:00:00,allocate,0x10,99999999999999999999,0", "expected a whole number"),
        ("1,10 o'clock,allocate,0x10,1,0", "time is \"10 o'clock\""),
        ("1,10:00:00,allocate,0x10,1,main", "stream is \"main\""),
    ] {
        let log = format!("Thread,Time,Action,Pointer,Size,Stream\n{line}\n");
        let error = read(log.as_bytes(), &ReadLimits::default()).unwrap_err().to_string();
        assert!(error.contains(says), "{line}: {error}");
    }
}

#[test]
fn a_line_without_end_is_refused_before_it_fills_the_memory() {
    let log = format!("Thread,Time,Action,Pointer,Size,Stream\n{}", "x".repeat(40_000));
    let error = read(log.as_bytes(), &ReadLimits::default()).unwrap_err().to_string();
    assert!(error.contains("a line of more than 16 KiB"), "{error}");
}

#[test]
fn a_log_keeps_within_its_limits() {
    let mut log = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    for at in 0..100 {
        writeln!(log, "1,10:00:00,allocate,{at:#x}000,1,0").unwrap();
    }
    let few = ReadLimits { events: 99, ..ReadLimits::default() };
    let small = ReadLimits { memory: Bytes::kib(1), ..ReadLimits::default() };
    let short = ReadLimits { contents: Bytes::kib(1), ..ReadLimits::default() };
    for (limits, limit) in [(few, "events"), (small, "memory"), (short, "contents")] {
        match read(log.as_bytes(), &limits) {
            Err(ReadError::Limit { limit: found, .. }) => assert_eq!(found, limit),
            other => panic!("{limit}: {other:?}"),
        }
    }
}

#[test]
fn the_csv_of_rmm_write_log_is_read() {
    let log = "Event Type,Device ID,Address,Stream,Size (bytes),Free Memory,Total Memory,\
               Current Allocs,Start,End,Elapsed,Location\r\n\
               Alloc,1,0x7f2e40000000,0,1024,100,200,1,1.5e-05,2e-05,5e-06,a.cpp:1\r\n\
               Alloc,0,0x7f2e50000000,0x5,2048,100,200,2,0.25,0.3,0.05,a.cpp:2\r\n\
               Free,1,0x7f2e40000000,0,0,100,200,1,1.5,2,0.5,a.cpp:3\r\n\
               Realloc,0,0x7f2e50000000,0x5,4096,100,200,1,2,3,1,a.cpp:4\r\n";
    let trace = read(log.as_bytes(), &ReadLimits::default()).unwrap();
    assert_eq!((trace.device_count, &trace.actions[..]), (2, &["Realloc".to_owned()][..]));
    let devices: Vec<u16> = trace.events.iter().map(|event| event.device).collect();
    assert_eq!(devices, [0, 0, 1, 1, 1], "grouped by device");
    let times: Vec<u64> = trace.events.iter().map(|event| event.time_us).collect();
    assert_eq!(times, [250_000, 2_000_000, 15, 1_500_000, 1_500_000]);
    assert_eq!(Workload::from_trace(&trace, 1).peak_live, Bytes::kib(1));
}

#[test]
fn the_debug_log_of_a_pool_is_read() {
    let log = "[  2260][16:06:30:678400][info  ] ----- RMM LOG BEGIN [PTDS DISABLED] -----\n\
               [  2260][16:06:30:678500][trace ] [A][stream 0x0][1000B]\n\
               [  2260][16:06:30:678511][trace ] [A][stream 0x0][1024B][0x7f2e40000000]\n\
               [  2260][16:06:30:678512][trace ] [Summary][Free lists: 1][Blocks: 1][Max Block: 5][Total Free: 6]\n\
               [  2261][16:06:30:678520][debug ] [A][Stream 0x2][2048B][Merged stream 0x0]\n\
               [  2260][16:06:30:678600][trace ] [D][stream 0x0][1000B][0x7f2e40000000]\r\n\
               [  2260][16:06:30:678610][trace ] [D][stream 0x0][0B][(nil)]\n\
               [  2261][16:06:30:678700][error ] [A][Stream 0x2][Upstream 4096B][FAILURE maximum pool size exceeded]\n\
               a line of another program\n";
    let trace = read(log.as_bytes(), &ReadLimits::default()).unwrap();
    let names: Vec<&str> = trace.events.iter().map(|event| trace.action_name(event.kind)).collect();
    assert_eq!(names, ["alloc", "free_requested", "free_completed", "oom"]);
    assert_eq!(trace.events[0].time_us, 57_990_678_511);
    assert_eq!(trace.events[0].size, Bytes::kib(1));
    assert_eq!((trace.events[3].size, trace.streams[1]), (Bytes::kib(4), 2));

    let broken = log.replace("1024B", "many");
    let error = read(broken.as_bytes(), &ReadLimits::default()).unwrap_err().to_string();
    assert!(error.contains("line 3: size is \"many\""), "{error}");
}
