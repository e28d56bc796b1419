//! Reading RMM logs.

use std::fmt::Write;

use vramp_core::Bytes;
use vramp_trace::{EventKind, ReadError, ReadLimits, Request, Workload, read};

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
