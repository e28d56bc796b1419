//! Engines transfer all bytes over short, interrupted and deferred system calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use vramp_core::Bytes;
use vramp_host::{
    BlockIo, DISK_BLOCK, DirectFile, Direction, DiskError, DiskErrorKind, FileTransfer, HostMemory,
    HostSpan, IoChoice, IoRequest, OsCode, PageKind, ThreadIo, UringIo, open_io, submit_transfers,
};

const PIECE: Bytes = Bytes::kib(64);

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len).map(|i| (i / 7) as u8 ^ seed).collect()
}

fn span(bytes: &[u8]) -> HostSpan {
    let len = Bytes::new(bytes.len() as u64);
    let memory = HostMemory::new(len, None, PageKind::Small).unwrap();
    memory.write(Bytes::ZERO, bytes).unwrap();
    HostSpan::new(&memory, Bytes::ZERO, len).unwrap()
}

fn bytes_of(span: &HostSpan) -> Vec<u8> {
    let mut bytes = vec![0; span.len().count() as usize];
    span.read(Bytes::ZERO, &mut bytes).unwrap();
    bytes
}

fn start(
    io: &Arc<dyn BlockIo>,
    file: &Arc<DirectFile>,
    direction: Direction,
    spans: &[HostSpan],
) -> Receiver<Result<(), DiskError>> {
    let (sender, results) = channel();
    let transfers = spans.iter().enumerate().map(|(number, span)| {
        let sender = sender.clone();
        FileTransfer {
            file: Arc::clone(file),
            offset: PIECE * number as u64,
            span: span.clone(),
            direction,
            done: Box::new(move |answer| sender.send(answer).unwrap()),
        }
    });
    submit_transfers(io, transfers);
    results
}

/// Writes 200 pieces, more than any engine has in flight, and reads them back.
fn round_trip(io: &Arc<dyn BlockIo>) -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let file = Arc::new(DirectFile::create(&dir.path().join("data")).unwrap());
    io.preallocate(&file, PIECE * 200).unwrap();
    let spans: Vec<_> = (0..200).map(|seed| span(&pattern(seed, PIECE.count()))).collect();
    for answer in start(io, &file, Direction::Write, &spans) {
        answer.unwrap();
    }
    let back: Vec<_> = (0..200).map(|_| span(&vec![0; PIECE.count() as usize])).collect();
    for answer in start(io, &file, Direction::Read, &back) {
        answer.unwrap();
    }
    back.iter().map(bytes_of).collect()
}

fn expected() -> Vec<Vec<u8>> {
    (0..200).map(|seed| pattern(seed, PIECE.count())).collect()
}

#[test]
fn both_engines_move_the_same_bytes() {
    let threads: Arc<dyn BlockIo> = Arc::new(ThreadIo::new(4).unwrap());
    assert!(round_trip(&threads) == expected());
    match UringIo::new(16) {
        Ok(uring) => {
            let uring: Arc<dyn BlockIo> = Arc::new(uring);
            assert!(round_trip(&uring) == expected());
            assert!(open_io(IoChoice::Auto, 16).unwrap().fell_back.is_none());
        }
        // Where io_uring is forbidden, the error says so, and only `Auto` falls back to threads.
        Err(why) => {
            assert_eq!(open_io(IoChoice::Uring, 16).err(), Some(why.clone()));
            let opened = open_io(IoChoice::Auto, 16).unwrap();
            assert_eq!((opened.io.name(), opened.fell_back), ("threads", Some(why)));
        }
    }
}

/// Shortens, interrupts and defers most calls before it passes them to a real engine.
struct Unsteady {
    io: Arc<dyn BlockIo>,
    calls: AtomicU64,
    sizes: Mutex<Vec<Bytes>>,
}

impl BlockIo for Unsteady {
    fn name(&self) -> &'static str {
        "unsteady"
    }

    fn depth(&self) -> usize {
        self.io.depth()
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        for mut request in batch {
            self.sizes.lock().unwrap().push(request.span.len());
            match self.calls.fetch_add(1, Ordering::Relaxed) % 4 {
                0 => (request.done)(Err(OsCode(4))),
                1 => (request.done)(Err(OsCode(11))),
                2 => {
                    let short = request.span.len().round_down(DISK_BLOCK * 3).max(DISK_BLOCK);
                    let short = short.min(DISK_BLOCK * 3);
                    request.span = request.span.part(Bytes::ZERO, short).unwrap();
                    self.io.submit(vec![request]);
                }
                _ => self.io.submit(vec![request]),
            }
        }
    }
}

#[test]
fn short_interrupted_and_deferred_calls_lose_nothing_on_either_engine() {
    for choice in [IoChoice::Auto, IoChoice::Threads] {
        let io = open_io(choice, 8).unwrap().io;
        let unsteady = Arc::new(Unsteady { io, calls: AtomicU64::new(0), sizes: Mutex::default() });
        let io: Arc<dyn BlockIo> = Arc::<Unsteady>::clone(&unsteady);
        assert!(round_trip(&io) == expected());
        assert!(unsteady.calls.load(Ordering::Relaxed) > 400);
    }
}

#[test]
fn a_cut_file_is_named_and_not_waited_for() {
    for choice in [IoChoice::Auto, IoChoice::Threads] {
        let dir = tempfile::tempdir().unwrap();
        let io = open_io(choice, 4).unwrap().io;
        let file = Arc::new(DirectFile::create(&dir.path().join("data")).unwrap());
        let results = start(&io, &file, Direction::Read, &[span(&[0; 4096])]);
        let error = results.recv().unwrap().unwrap_err();
        assert_eq!((error.kind, error.file.as_path()), (DiskErrorKind::Short, file.path()));
    }
}

#[test]
fn a_panic_in_an_answer_ends_neither_the_engine_nor_other_transfers() {
    for choice in [IoChoice::Auto, IoChoice::Threads] {
        let dir = tempfile::tempdir().unwrap();
        let io = open_io(choice, 4).unwrap().io;
        let file = Arc::new(DirectFile::create(&dir.path().join("data")).unwrap());
        let panics = FileTransfer {
            file: Arc::clone(&file),
            offset: Bytes::ZERO,
            span: span(&[1; 4096]),
            direction: Direction::Write,
            done: Box::new(|_| panic!("on purpose")),
        };
        submit_transfers(&io, [panics]);
        let results = start(&io, &file, Direction::Write, &[span(&[2; 4096])]);
        assert_eq!(results.recv().unwrap(), Ok(()));
    }
}

#[test]
fn an_engine_dropped_with_work_in_it_answers_all_of_it() {
    for choice in [IoChoice::Auto, IoChoice::Threads] {
        let dir = tempfile::tempdir().unwrap();
        let io = open_io(choice, 2).unwrap().io;
        let file = Arc::new(DirectFile::create(&dir.path().join("data")).unwrap());
        let spans: Vec<_> = (0..50).map(|seed| span(&pattern(seed, 65536))).collect();
        let results = start(&io, &file, Direction::Write, &spans);
        // The last handle may now be dropped in a thread of the engine itself.
        drop((io, file));
        assert_eq!(results.iter().filter(Result::is_ok).count(), 50);
    }
}
