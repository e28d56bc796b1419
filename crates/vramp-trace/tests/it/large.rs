//! Large files: bounded memory, whatever the pickler's habits.

use vramp_core::Bytes;
use vramp_trace::{ReadError, ReadLimits, Trace, read};

/// How a pickler writes the events of a history.
#[derive(Clone, Copy)]
struct Habit {
    /// A memo entry for every dict, as Python does.
    memoizes: bool,
    /// A key that is not read, with a list.
    has_more: bool,
}

fn text(text: &str) -> Vec<u8> {
    [b"\x8c", &[text.len() as u8][..], text.as_bytes()].concat()
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
