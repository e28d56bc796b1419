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
