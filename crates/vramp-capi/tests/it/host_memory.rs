//! Requests of a process that runs out of host memory: errors, and no abort.
//!
//! Each program runs in a child process whose address space is limited at the first request. It
//! makes one kind of request until some were refused, frees everything, and makes one again.

use std::process::Command;

use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_arena_t, vramp_graph_t, vramp_stream_t};
use vramp_capi::graphs::*;
use vramp_capi::interface::*;

use crate::common::*;

/// Environment variable with the child's program and its room in MiB.
const CHILD: &str = "VRAMP_TEST_HOST_MEMORY";
const TEST: &str = "host_memory::requests_without_host_memory_are_errors_and_never_abort";
/// Refusals after which a program stops.
const ENOUGH: usize = 50;
/// Requests after which a program stops without refusals.
const MANY: usize = 400_000;

type Program = fn(&mut Rig);

const PROGRAMS: [(&str, Program); 8] = [
    ("small blocks", small_blocks),
    ("large blocks", large_blocks),
    ("streams", streams),
    ("uses", uses),
    ("arenas", arenas),
    ("captures", captures),
    ("history", history),
    ("everything", everything),
];

struct Rig {
    allocator: vramp_allocator_t,
    streams: Vec<vramp_stream_t>,
    blocks: Vec<usize>,
    requests: usize,
    refused: usize,
    refused_by_host: usize,
}

impl Rig {
    /// Counts a request. Its status is success or says that memory is short.
    fn count(&mut self, status: vramp_status_t) -> bool {
        self.requests += 1;
        match status {
            VRAMP_OK => true,
            VRAMP_ERROR_OUT_OF_MEMORY | VRAMP_ERROR_DRIVER | VRAMP_ERROR_CAPTURE => {
                self.refused += 1;
                self.refused_by_host +=
                    usize::from(last_error().contains("the host has no memory"));
                false
            }
            status => panic!("{status:?}: {}", last_error()),
        }
    }

    fn goes_on(&self) -> bool {
        self.refused < ENOUGH && self.requests < MANY
    }

    fn stream(&self) -> vramp_stream_t {
        self.streams[self.requests % self.streams.len()]
    }

    fn malloc(&mut self, size: usize) -> bool {
        match malloc(self.allocator, size, self.stream()) {
            Ok(address) => {
                // The list has room, so that it is not what runs out of memory.
                if self.blocks.len() < self.blocks.capacity() {
                    self.blocks.push(address.addr());
                } else {
                    assert_eq!(vramp_free(self.allocator, address, self.stream()), VRAMP_OK);
                }
                self.count(VRAMP_OK)
            }
            Err(status) => self.count(status),
        }
    }

    fn add_stream(&mut self) -> bool {
        let mut stream = vramp_stream_t::default();
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_stream_create(self.allocator, &mut stream) };
        let made = self.count(status);
        if made && self.streams.len() < self.streams.capacity() {
            self.streams.push(stream);
        }
        made
    }

    fn add_arena(&mut self) -> Option<vramp_arena_t> {
        let mut arena = vramp_arena_t::default();
        // SAFETY: the options end with a zero; the result outlives the call.
        let status =
            unsafe { vramp_arena_create(self.allocator, c"capacity=64MiB".as_ptr(), &mut arena) };
        self.count(status).then_some(arena)
    }

    fn capture(&mut self, arena: vramp_arena_t) -> bool {
        let stream = self.streams[0];
        if !self.count(vramp_capture_begin(self.allocator, stream, arena)) {
            return false;
        }
        let mut held = [0; 20];
        for (n, place) in held.iter_mut().enumerate() {
            match malloc(self.allocator, (n + 1) << 10, stream) {
                Ok(address) => *place = address.addr(),
                Err(status) => _ = self.count(status),
            }
        }
        for address in held.into_iter().filter(|address| *address != 0) {
            assert_eq!(vramp_free(self.allocator, address as *mut _, stream), VRAMP_OK);
        }
        let mut graph = vramp_graph_t::default();
        // SAFETY: the result outlives the call; no raw graph is requested.
        let status = unsafe { vramp_capture_end(self.allocator, arena, &mut graph) };
        self.count(status)
    }
}

fn small_blocks(rig: &mut Rig) {
    while rig.goes_on() {
        rig.malloc(512 + (rig.requests % 7) * 512);
    }
}

fn large_blocks(rig: &mut Rig) {
    while rig.goes_on() {
        rig.malloc((1 << 20) + ((rig.requests % 5) << 19));
        if rig.requests.is_multiple_of(3)
            && let Some(address) = rig.blocks.pop()
        {
            assert_eq!(vramp_free(rig.allocator, address as *mut _, rig.stream()), VRAMP_OK);
        }
    }
}

fn streams(rig: &mut Rig) {
    while rig.goes_on() {
        rig.add_stream();
        rig.malloc(4096);
    }
}

fn uses(rig: &mut Rig) {
    for _ in 0..100 {
        rig.add_stream();
    }
    while rig.goes_on() {
        rig.malloc(2048);
        let Some(&address) = rig.blocks.last() else { continue };
        for _ in 0..20 {
            let status = vramp_record_use(rig.allocator, address as *mut _, rig.stream());
            rig.count(status);
        }
        if rig.requests.is_multiple_of(2) {
            rig.blocks.pop();
            assert_eq!(vramp_free(rig.allocator, address as *mut _, rig.stream()), VRAMP_OK);
        }
    }
}

fn arenas(rig: &mut Rig) {
    while rig.goes_on() {
        rig.add_arena();
    }
}

fn captures(rig: &mut Rig) {
    let mut arena = None;
    while rig.goes_on() {
        if rig.requests < 50 || arena.is_none() {
            arena = rig.add_arena().or(arena);
        }
        if let Some(arena) = arena {
            rig.capture(arena);
        }
    }
}

fn history(rig: &mut Rig) {
    let status = vramp_record_history(rig.allocator, 1_000);
    rig.count(status);
    while rig.goes_on() {
        rig.malloc(512 + rig.requests % 100 * 512);
        if rig.requests.is_multiple_of(5_000) {
            // SAFETY: the path ends with a zero.
            let status = unsafe { vramp_snapshot(rig.allocator, c"/dev/null".as_ptr()) };
            rig.count(status);
        }
    }
}

fn everything(rig: &mut Rig) {
    let mut arena = None;
    while rig.goes_on() {
        match rig.requests % 1000 {
            0 => _ = rig.add_stream(),
            1 => arena = rig.add_arena().or(arena),
            2..10 => _ = arena.is_none_or(|arena| rig.capture(arena)),
            n => _ = rig.malloc(n << 9),
        }
        let _ = stats(rig.allocator);
    }
}

/// Limits the process to what it has now and `room` more bytes.
fn limit_memory(room: usize) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let used: usize = pages.split(' ').next().unwrap().parse::<usize>().unwrap() << 12;
    let limit = libc::rlimit { rlim_cur: (used + room) as u64, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

fn run(program: &str, room: usize) {
    let run = PROGRAMS.iter().find(|(name, _)| *name == program).unwrap().1;
    let allocator = open("");
    let first = stream(allocator);
    let mut rig = Rig {
        allocator,
        streams: Vec::with_capacity(100_000),
        blocks: Vec::with_capacity(MANY),
        requests: 0,
        refused: 0,
        refused_by_host: 0,
    };
    rig.streams.push(first);
    limit_memory(room << 20);
    run(&mut rig);
    for address in rig.blocks.drain(..) {
        assert_eq!(vramp_free(allocator, address as *mut _, first), VRAMP_OK);
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK, "{}", last_error());
    let served = vramp_host::reserve_allocations();
    println!(
        "\n{program}, {room} MiB: {} requests, {} refused, {} by the host, reserve {served}",
        rig.requests, rig.refused, rig.refused_by_host
    );
    // With memory again, requests succeed.
    limit_memory(256 << 20);
    let again = malloc(allocator, 4096, first).unwrap_or_else(|_| panic!("{}", last_error()));
    assert_eq!(vramp_free(allocator, again, first), VRAMP_OK);
    assert!(rig.refused_by_host > 0, "the host had memory for all of it");
}

#[test]
fn requests_without_host_memory_are_errors_and_never_abort() {
    if let Ok(child) = std::env::var(CHILD) {
        let (program, room) = child.split_once(':').unwrap();
        return run(program, room.parse().unwrap());
    }
    let mut failed = Vec::new();
    for (program, _) in PROGRAMS {
        for room in [1, 5] {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
                .env(CHILD, format!("{program}:{room}"))
                // An arena for each thread would have 64 MiB of addresses that no limit counts.
                .env("MALLOC_ARENA_MAX", "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&child.stdout).into_owned();
            if child.status.success() {
                print!("{}", text.lines().find(|line| line.contains("MiB:")).unwrap_or_default());
                println!();
            } else {
                let why = String::from_utf8_lossy(&child.stderr).into_owned();
                failed.push(format!("{program}, {room} MiB: {}\n{text}{why}", child.status));
            }
        }
    }
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}
