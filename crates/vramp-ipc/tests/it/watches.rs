//! Importers that hear when an exporter releases memory.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vramp_ipc::{OpenError, Server, Watcher, Watching};

use crate::common::*;

const SOON: Duration = Duration::from_secs(20);

/// Records the calls of a watcher.
#[derive(Default)]
struct Calls {
    ended: Mutex<Vec<u64>>,
    due: Mutex<u32>,
    is_used: AtomicBool,
    /// `ended` returns once it is free.
    stopped: Mutex<()>,
}

impl Watching for Calls {
    fn ended(&self, watch: u64) {
        drop(self.stopped.lock().unwrap());
        self.ended.lock().unwrap().push(watch);
    }

    fn due(&self) -> Option<Duration> {
        *self.due.lock().unwrap() += 1;
        None
    }

    fn is_used(&self, _watch: u64) -> bool {
        self.is_used.load(SeqCst)
    }
}

impl Calls {
    fn ended(&self) -> Vec<u64> {
        self.ended.lock().unwrap().clone()
    }
}

fn until(reached: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !reached() {
        assert!(Instant::now() < deadline, "it takes too long");
        std::thread::yield_now();
    }
}

fn watcher() -> (Watcher, Arc<Calls>) {
    let calls = Arc::new(Calls::default());
    calls.is_used.store(true, SeqCst);
    let watching = Arc::clone(&calls) as Arc<dyn Watching>;
    (Watcher::new(watching, SOON).unwrap(), calls)
}

#[test]
fn a_notification_ends_each_watch_and_waits_for_what_importers_do_then() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 1)).unwrap();
    assert!(!server.watchers().wait(SOON), "there is no importer");
    let importers = [watcher(), watcher()];
    let watch = |(watcher, _): &(Watcher, _)| watcher.watch(&published.ticket()).unwrap();
    let watches: Vec<u64> = importers.iter().map(watch).collect();
    assert_eq!(watch(&importers[0]), watches[0], "one watch for each exporter");
    assert!(!server.watchers().wait(SOON), "nothing was released");
    for _ in 0..2 {
        server.watchers().notify();
    }
    assert!(server.watchers().wait(SOON));
    for ((watcher, calls), watch) in importers.iter().zip(&watches) {
        assert_eq!(calls.ended(), [*watch], "the wait ends after the call");
        assert!(!watcher.is_live(*watch));
    }
    assert!(!server.watchers().wait(SOON));
    let again = watch(&importers[0]);
    assert!(!watches.contains(&again) && importers[0].0.is_live(again));
    // The end of a watcher ends its watches.
    let [(watcher, calls), _] = importers;
    drop(watcher);
    assert_eq!(calls.ended(), [watches[0], again]);
    until(|| server.connections() == 0);
}

#[test]
fn a_stopped_importer_delays_an_exporter_once() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 1)).unwrap();
    let (watcher, calls) = watcher();
    watcher.watch(&published.ticket()).unwrap();
    let stopped = calls.stopped.lock().unwrap();
    server.watchers().notify();
    let begin = Instant::now();
    assert!(server.watchers().wait(Duration::from_millis(20)));
    assert!(begin.elapsed() >= Duration::from_millis(20));
    assert!(!server.watchers().wait(SOON), "it is not waited for again");
    drop(stopped);
    until(|| calls.ended().len() == 1);
}

#[test]
fn the_end_of_an_exporter_ends_its_watch() {
    let server = Server::new().unwrap();
    let ticket = server.publish(Files::new(b"", 1)).unwrap().ticket();
    let (watcher, calls) = watcher();
    let watch = watcher.watch(&ticket).unwrap();
    drop(server);
    until(|| calls.ended() == [watch]);
    assert!(matches!(
        watcher.watch(&ticket),
        Err(OpenError::ExporterGone { .. } | OpenError::Unreachable { .. })
    ));
}

#[test]
fn a_call_comes_when_it_is_due_and_unused_watches_end_then() {
    let server = Server::new().unwrap();
    let published = server.publish(Files::new(b"", 1)).unwrap();
    let (watcher, calls) = watcher();
    let watch = watcher.watch(&published.ticket()).unwrap();
    watcher.call_in(Duration::ZERO);
    until(|| *calls.due.lock().unwrap() == 1);
    assert_eq!((watcher.watches(), calls.ended()), (1, vec![]), "it is used");
    calls.is_used.store(false, SeqCst);
    until(|| {
        watcher.call_in(Duration::from_millis(1));
        calls.ended() == [watch]
    });
    until(|| server.connections() == 0);
    // Its thread ended, and begins again.
    for _ in 0..100 {
        let watch = watcher.watch(&published.ticket()).unwrap();
        watcher.call_in(Duration::ZERO);
        until(|| calls.ended().last() == Some(&watch));
    }
}
