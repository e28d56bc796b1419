//! Files of other kinds: an error says what they are and what to do.

use std::path::Path;

use vramp_trace::{ReadError, ReadLimits, read, read_trace};

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
