//! Broken, hostile and large files: a clear error, bounded memory and no panic.

use std::io::{self, Read, Write};
use std::path::Path;

use vramp_core::Bytes;
use vramp_trace::{Format, ReadError, ReadLimits, Trace, read};

// --- Broken, hostile and foreign files: a clear error, bounded memory and no panic ---

/// Limits far below the defaults, so that a test that reaches one is quick.
fn tight() -> ReadLimits {
    ReadLimits {
        contents: Bytes::mib(64),
        memory: Bytes::mib(4),
        events: 1000,
        depth: 20,
        text: Bytes::kib(64),
    }
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name))
        .expect("the fixture is there")
}

/// A pickle of protocol 4 with these opcodes.
fn pickle(parts: &[&[u8]]) -> Vec<u8> {
    [b"\x80\x04", &parts.concat()[..]].concat()
}

fn text(text: &str) -> Vec<u8> {
    [b"\x8c", &[text.len() as u8][..], text.as_bytes()].concat()
}

/// A snapshot with one device and one event, whose fields are these opcodes.
fn event(fields: &[&[u8]]) -> Vec<u8> {
    let fields = fields.concat();
    pickle(&[b"}", &text("device_traces"), b"]]}(", &fields, b"uaas."])
}

fn error(bytes: &[u8]) -> String {
    match read(bytes, &tight()) {
        Ok(trace) => panic!("read {} events", trace.events.len()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn whatever_would_execute_is_refused_by_name_and_offset() {
    for (opcode, name) in [
        (&b"c"[..], "GLOBAL"),
        (b"\x93", "STACK_GLOBAL"),
        (b"R", "REDUCE"),
        (b"b", "BUILD"),
        (b"i", "INST"),
        (b"o", "OBJ"),
        (b"\x81", "NEWOBJ"),
        (b"\x92", "NEWOBJ_EX"),
        (b"P", "PERSID"),
        (b"Q", "BINPERSID"),
        (b"\x82", "EXT1"),
        (b"\x83", "EXT2"),
        (b"\x84", "EXT4"),
        (b"\x97", "NEXT_BUFFER"),
        (b"\x98", "READONLY_BUFFER"),
    ] {
        let bytes = pickle(&[b"}", opcode, b"os\nsystem\n"]);
        match read(&bytes[..], &tight()) {
            Err(ReadError::Refused { offset: 3, opcode }) => assert_eq!(opcode, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    // What Python writes for an object that runs a command when it is unpickled.
    let attack =
        b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id";
    let message = error(attack);
    assert!(message.contains("STACK_GLOBAL at byte 28"), "{message}");
}

#[test]
fn opcodes_that_break_the_rules_are_refused() {
    for (parts, says) in [
        (&[&b"a."[..]][..], "without a container"),
        (&[b"]a."], "without a container"),
        (&[b"K\x01K\x02a."], "not a list"),
        (&[b"}K\x01a."], "append to a dict"),
        (&[b"]K\x01K\x02s."], "not a dict"),
        (&[b"}(K\x01u."], "key without a value"),
        (&[b"(K\x01d."], "key without a value"),
        (&[b"u."], "without a container"),
        (&[b"}(0."], "below a mark"),
        (&[b"K\x01(\x85."], "empty stack"),
        (&[b"t."], "missing mark"),
        (&[b"."], "empty stack"),
        (&[b"2."], "empty stack"),
        (&[b"h\x05."], "unset memo"),
        (&[b"}r\xff\xff\xff\xff."], "far above"),
        (&[b"\xff"], "unknown opcode"),
        (&[b"\x8a\xff"], "is truncated"),
        (&[b"\x8b\xff\xff\xff\x7f"], "is truncated"),
        (&[b"I01\n."], "protocol 0"),
        (&[b"\x80\x09."], "protocol 9"),
        (&[b"X\xff\xff\xff\xff"], "raise ReadLimits::text"),
        (&[b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff"], "raise ReadLimits::text"),
        (&[b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff"], "is truncated"),
        (&[b"\x8c\x05abc"], "is truncated"),
    ] {
        let bytes = pickle(parts);
        let message = error(&bytes);
        assert!(message.contains(says), "{parts:?}: {message}");
    }
}

#[test]
fn fields_that_cannot_be_are_named_with_their_event() {
    let (action, addr, size) = (text("action"), text("addr"), text("size"));
    let alloc = text("alloc");
    for (bytes, says) in [
        (event(&[&addr, b"K\x01"]), "event 0 of device 0: action is missing"),
        (event(&[&action, b"K\x01"]), "action is 1, expected a text"),
        (event(&[&action, &alloc, &size, b"K\x01"]), "addr is missing"),
        (event(&[&action, &alloc, &addr, b"K\x01"]), "size is missing"),
        (
            event(&[&action, &alloc, &addr, b"K\x01", &size, b"J\xff\xff\xff\xff"]),
            "size is -1, expected a whole number",
        ),
        (
            event(&[&action, &alloc, &addr, b"K\x01", &size, b"\x8a\x08\0\0\0\0\0\0\0\x7f"]),
            "size is 9151314442816847872",
        ),
        (event(&[&action, &alloc, &addr, b"K\x01", &size, b"G\x3f\xf0\0\0\0\0\0\0"]), "size is 1,"),
        (event(&[&action, &text("oom"), &size, b"K\x01", &text("device_free"), b"N"]), "is None"),
        (event(&[&action, &text("snapshot"), &text("frames"), b"K\x01"]), "frames is 1"),
        (event(&[&action, &text("snapshot"), &text("frames"), b"]Na"]), "a frame is None"),
        (event(&[&action, &text("snapshot"), &text("stream"), b"N"]), "stream is None"),
        (event(&[&action, &text("snapshot"), &text("time_us"), b"J\xff\xff\xff\xff"]), "is -1"),
        (
            pickle(&[b"}", &text("device_traces"), b"]]K\x07aas."]),
            "the event is 7, expected a dict",
        ),
        (pickle(&[b"}", &text("device_traces"), b"K\x07s."]), "not a list of histories"),
        (pickle(&[b"}", &text("device_traces"), b"]K\x07as."]), "not a list of histories"),
        (pickle(&[b"}", &text("segments"), b"K\x07s."]), "segments is not a list"),
        (pickle(&[b"}", &text("segments"), b"]}as."]), "segment 0: address is missing"),
    ] {
        let message = error(&bytes);
        assert!(message.contains(says), "{says}: {message}");
    }
}

#[test]
fn addresses_up_to_64_bits_are_read() {
    let fields = [&text("action")[..], &text("alloc"), &text("size"), b"K\x01", &text("addr")];
    let high = b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0";
    let trace = read(&event(&[&fields.concat(), high])[..], &tight()).unwrap();
    assert_eq!(trace.events[0].address.number(), u64::MAX);
}

#[test]
fn a_duplicate_event_is_refused() {
    let fields = [text("action"), text("snapshot")].concat();
    let twice = pickle(&[b"}", &text("device_traces"), b"]](}\x94(", &fields, b"uh\x00eas."]);
    let message = error(&twice);
    assert!(
        message.contains("event 1 of device 0: the event is a container used elsewhere too"),
        "{message}"
    );
}

#[test]
fn events_that_the_snapshot_does_not_keep_are_refused() {
    let event = [&b"}"[..], &text("action"), &text("snapshot"), b"sa"].concat();
    for (after, says) in [
        // The list goes under a key that a later one replaces, or is dropped.
        ([b"s", &text("device_traces")[..], b"]s."].concat(), "events outside"),
        ([b"00", &text("segments")[..], b"]s."].concat(), "events outside"),
        ([b"s", &text("device_traces")[..], b"]]as."].concat(), "events outside"),
    ] {
        let bytes = pickle(&[b"}", &text("device_traces"), b"]]", &event, b"a", &after]);
        let message = error(&bytes);
        assert!(message.contains(says), "{after:?}: {message}");
    }
    // The same history for two devices.
    let bytes = pickle(&[b"}", &text("device_traces"), b"]]\x94", &event, b"ah\x00as."]);
    let message = error(&bytes);
    assert!(message.contains("two devices share one history"), "{message}");
}

#[test]
fn nesting_is_bounded_with_and_without_marks() {
    let message = error(&pickle(&[&b"(".repeat(100_000), b"."]));
    assert!(message.contains("raise ReadLimits::depth"), "{message}");
    // Nested lists without marks: deep, but never traversed.
    let generous = ReadLimits { memory: Bytes::mib(64), ..tight() };
    let deep = pickle(&[
        b"}",
        &text("segments"),
        b"]s",
        &b"]\x94".repeat(50_000),
        &b"a".repeat(49_999),
        b"0.",
    ]);
    read(&deep[..], &generous).unwrap();
    let mut settings = b"}".to_vec();
    for _ in 0..50_000 {
        settings.extend([&text("k")[..], b"}"].concat());
    }
    settings.extend(b"s".repeat(50_000));
    let parts =
        [&b"}"[..], &text("segments"), b"]s", &text("allocator_settings"), &settings, b"s."];
    let message = read(&pickle(&parts)[..], &generous).unwrap_err().to_string();
    assert!(message.contains("nested too deeply"), "{message}");
}

#[test]
fn sharing_without_end_costs_no_more_than_its_bytes() {
    // Each of 40 lists contains the one before 100 times: 100^40 items if they were traversed.
    let mut laughs = b"]\x94".to_vec();
    for level in 0..40u8 {
        laughs.extend(b"](");
        laughs.extend([b'h', level].repeat(100));
        laughs.extend(b"e\x94");
    }
    for key in ["unknown", "external_annotations"] {
        let bytes = pickle(&[b"}", &text("segments"), b"]s", &text(key), &laughs, b"s."]);
        // The lists below stay on the stack, so the key is not where a key should be.
        read(&bytes[..], &tight()).unwrap_err();
    }
    let bytes = pickle(&[&laughs, b"0}", &text("unknown"), b"h\x28s", &text("segments"), b"]s."]);
    read(&bytes[..], &tight()).unwrap();
    for key in ["segments", "device_traces", "allocator_settings"] {
        let bytes = pickle(&[&laughs, b"0}", &text("segments"), b"]s", &text(key), b"h\x28s."]);
        read(&bytes[..], &tight()).unwrap_err();
    }
}

#[test]
fn a_bomb_is_stopped_by_the_limit_it_hits() {
    // 300 MiB of one byte are a third of a megabyte of gzip.
    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    bomb.write_all(&pickle(&[b"}"])).unwrap();
    io::copy(&mut io::repeat(b'2').take(300 << 20), &mut bomb).unwrap();
    let bomb = bomb.finish().unwrap();
    let message = error(&bomb);
    assert!(message.contains("raise ReadLimits::memory"), "{message}");

    // Pushed and popped again, it needs no memory, only time.
    let mut bomb = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    bomb.write_all(&pickle(&[])).unwrap();
    let many = b"N0".repeat(1 << 20);
    for _ in 0..40 {
        bomb.write_all(&many).unwrap();
    }
    let message = error(&bomb.finish().unwrap());
    assert!(message.contains("raise ReadLimits::contents"), "{message}");
}

#[test]
fn more_events_than_allowed_are_refused() {
    let one = [&b"}"[..], &text("action"), &text("snapshot"), b"sa"].concat();
    let bytes = pickle(&[b"}", &text("device_traces"), b"]]", &one.repeat(1001), b"as."]);
    let message = error(&bytes);
    assert!(message.contains("more than 1000 events"), "{message}");
}

#[test]
fn a_snapshot_cut_off_anywhere_is_truncated() {
    for name in ["excerpt.pickle", "protocol2.pickle"] {
        let whole = fixture(name);
        for len in 1..whole.len() {
            match read(&whole[..len], &tight()) {
                Err(ReadError::Truncated { format: Format::Pickle, offset }) => {
                    assert!(offset <= len as u64, "{name} cut at {len}: {offset}");
                }
                other => panic!("{name} cut at {len}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_compressed_snapshot_cut_off_anywhere_is_an_error() {
    let whole = fixture("excerpt.pickle");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(&whole).unwrap();
    for compressed in [gzip.finish().unwrap(), zstd::bulk::compress(&whole, 1).unwrap()] {
        for len in 5..compressed.len() {
            match read(&compressed[..len], &tight()) {
                Err(ReadError::Truncated { .. }) => {}
                other => panic!("cut at {len} of {}: {other:?}", compressed.len()),
            }
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_is_read_or_refused() {
    for name in ["excerpt.pickle", "protocol5.pickle"] {
        let mut bytes = fixture(name);
        // Each bit of some bytes, other ones each day.
        for number in vramp_testing::sampled(bytes.len() as u64, 400) {
            let at = number as usize - 1;
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                let _ = read(&bytes[..], &tight()).map(|trace| {
                    (0..trace.device_count.min(3))
                        .map(|device| vramp_trace::Workload::from_trace(&trace, device).blocks)
                        .sum::<u32>()
                });
                bytes[at] ^= 1 << bit;
            }
        }
    }
}

#[test]
fn a_damaged_vtrace_is_never_read_as_another_trace() {
    let trace = read(&fixture("excerpt.pickle")[..], &tight()).unwrap();
    let mut file = Vec::new();
    trace.write_vtrace(&mut file).unwrap();
    for len in 1..file.len() {
        let error = read(&file[..len], &tight()).unwrap_err();
        assert!(matches!(error, ReadError::Truncated { .. }), "cut at {len}: {error}");
    }
    for at in 0..file.len() {
        for bit in 0..8 {
            file[at] ^= 1 << bit;
            if let Ok(read) = read(&file[..], &tight()) {
                assert_eq!(read, trace, "bit {bit} of byte {at}");
            }
            file[at] ^= 1 << bit;
        }
    }
}

#[test]
fn a_newer_vtrace_says_so() {
    let message = error(b"\x89VTRACE\n\x04\0\0\0");
    assert!(
        message.contains(".vtrace version 4 is not supported: this program reads up to 3"),
        "{message}"
    );
    let message = error(b"\x89VTRACE\n\x01\0\x01\0");
    assert!(message.contains("flags"), "{message}");
}

// --- Large files: bounded memory, whatever the pickler's habits ---

/// How a pickler writes the events of a history.
#[derive(Clone, Copy)]
struct Habit {
    /// A memo entry for every dict, as Python does.
    memoizes: bool,
    /// A key that is not read, with a list.
    has_more: bool,
}

/// A snapshot whose events are between one `MARK` and one `APPENDS`, as PyTorch's pickler writes it.
fn one_batch(events: u64, habit: Habit) -> Vec<u8> {
    let memo: &[u8] = if habit.memoizes { b"\x94" } else { b"" };
    let mut file = [b"\x80\x04}(", &text("device_traces")[..], b"](]("].concat();
    for event in 0..events {
        file.extend([b"}", memo, b"("].concat());
        file.extend([text("action"), text("alloc"), text("size"), b"K\x01".to_vec()].concat());
        file.extend([&text("addr")[..], b"\x8a\x08", &(event << 9).to_le_bytes()].concat());
        file.extend([text("frames"), b"]".to_vec()].concat());
        if habit.has_more {
            file.extend([&text("more")[..], b"](K\x01]e"].concat());
        }
        file.extend(b"u");
    }
    file.extend([b"ee", &text("segments")[..], b"]u."].concat());
    file
}

fn read_within(file: &[u8], memory: Bytes) -> Result<Trace, ReadError> {
    read(file, &ReadLimits { memory, ..ReadLimits::default() })
}

#[test]
fn a_history_in_one_batch_takes_the_memory_of_its_events() {
    const EVENTS: u64 = 100_000;
    for (memoizes, has_more, memory) in
        [(false, false, 9), (false, true, 9), (true, false, 17), (true, true, 64)]
    {
        let file = one_batch(EVENTS, Habit { memoizes, has_more });
        let mut trace = None;
        let used = allocation_counter::measure(|| {
            trace = Some(read_within(&file, Bytes::mib(memory)).unwrap());
        });
        let trace = trace.unwrap();
        assert_eq!(trace.events.len() as u64, EVENTS);
        let addresses = trace.events.iter().map(|event| event.address.number());
        assert!(addresses.eq((0..EVENTS).map(|at| at << 9)));
        assert!(used.bytes_max < (memory + 1) << 20, "{memoizes} {has_more}: {used:?}");
    }
}

#[test]
fn an_event_that_is_dropped_after_it_was_read_is_refused() {
    let event = [&b"}("[..], &text("action"), &text("snapshot"), b"u"].concat();
    for end in [&b"1"[..], b"l", b"t", b"d", b"\x90", b"\x91"] {
        let head = [&b"\x80\x04}"[..], &text("device_traces"), b"](](", &event, &event];
        let file = [&head.concat()[..], end, b"aes."].concat();
        let error = read_within(&file, Bytes::mib(1)).unwrap_err().to_string();
        assert!(error.contains("not appended to their history"), "{error}");
    }
}

#[test]
fn containers_that_are_referred_to_later_are_not_forgotten() {
    // A list from before the events gets a list that is made within an event, and shows it later.
    let event = [&b"}("[..], &text("action"), &text("snapshot"), &text("more")].concat();
    let file = [
        &b"\x80\x04]\x940}("[..],
        &text("device_traces"),
        b"](](",
        &event,
        b"h\x00]au",
        &event,
        b"Nu",
        b"ee",
        &text("segments"),
        b"h\x00u.",
    ]
    .concat();
    // The list inside is not a segment, which is what is reported.
    let error = read_within(&file, Bytes::mib(1)).unwrap_err().to_string();
    assert!(error.contains("the segment is a list"), "{error}");
}

/// Returns the peak of the heap memory for reading a hostile file, which must be refused.
fn peak(file: &[u8], memory: Bytes) -> u64 {
    let used = allocation_counter::measure(|| {
        let error = read_within(file, memory).unwrap_err();
        assert!(matches!(error, ReadError::Limit { limit: "memory", .. }), "{error}");
    });
    used.bytes_max
}

#[test]
fn whatever_fills_the_memory_is_counted() {
    const LIMIT: Bytes = Bytes::mib(8);
    let head = b"\x80\x04";
    let mut texts = head.to_vec();
    let mut frames = [head, &b"]"[..]].concat();
    for number in 0..400_000u32 {
        texts.extend(
            [&b"\x8c\x04"[..], &number.to_be_bytes().map(|byte| byte & 0x7f), b"0"].concat(),
        );
        let frame = [&b"}("[..], &text("name"), b"\x8c\x04", &number.to_be_bytes(), b"ua"];
        frames.extend(frame.concat());
    }
    // Of these, each stays in memory by another path.
    let bombs: [(&str, Vec<u8>); 9] = [
        ("stack", [head, &b"N".repeat(2 << 20)[..]].concat()),
        ("nodes", [head, &b"]0".repeat(2 << 20)[..]].concat()),
        ("memo", [head, &b"N\x94"[..], &b"\x94".repeat(2 << 20)].concat()),
        ("list", [head, &b"]"[..], &b"Na".repeat(2 << 20)].concat()),
        ("tuple", [head, &b"("[..], &b"N".repeat(400_000), b"t."].concat()),
        ("pairs", [head, &b"N"[..], &b"2\x86".repeat(2 << 20)].concat()),
        ("marks", [head, &b"(Nt0".repeat(2 << 20)[..]].concat()),
        ("texts", texts),
        ("frames", frames),
    ];
    for (name, bomb) in bombs {
        let peak = peak(&bomb, LIMIT);
        // Buffers and hash tables of keys come on top.
        assert!(peak < LIMIT.count() + (1 << 20), "{name}: {peak}");
    }
}
