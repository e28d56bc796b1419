//! The server's thread: accepts connections and serves those that have requests.
//!
//! One epoll instance holds the listener, the event that ends the thread, and for each connection its
//! socket and its process. A wake-up costs O(connections that have something to do).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::export::Export;
use super::session::{Next, Session};
use crate::core::message::{Failure, Reply};
use crate::system;

/// Most connections of one server.
pub const MAX_CONNECTIONS: usize = 16_384;
/// Connections accepted before those that exist are served.
const ACCEPTS_IN_TURN: usize = 64;
/// How long no connection is accepted after one could not be.
const PAUSE_NS: i64 = 50_000_000;

const STOP: u64 = 0;
const LISTENER: u64 = 1;
/// Tokens of connections: an even one for the socket, the next odd one for the process.
const FIRST: u64 = 2;

/// Looks an export up by its number.
pub type FindExport = Box<dyn Fn(u64) -> Option<Arc<Export>> + Send>;

pub struct EventLoop {
    epoll: OwnedFd,
    listener: OwnedFd,
    /// Kept open while it is registered.
    _stop: Arc<OwnedFd>,
    sessions: FxHashMap<u64, Session>,
    next_token: u64,
    admitted_uid: u32,
    is_paused: bool,
    find_export: FindExport,
    connections: Arc<AtomicUsize>,
}

/// What an event loop needs from its server.
pub struct LoopParts {
    pub listener: OwnedFd,
    pub stop: Arc<OwnedFd>,
    pub admitted_uid: u32,
    pub find_export: FindExport,
    pub connections: Arc<AtomicUsize>,
}

impl EventLoop {
    pub fn new(parts: LoopParts) -> io::Result<EventLoop> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let LoopParts { listener, stop, admitted_uid, find_export, connections } = parts;
        add(&epoll, &*stop, STOP, epoll::EventFlags::IN)?;
        add(&epoll, &listener, LISTENER, epoll::EventFlags::IN)?;
        Ok(EventLoop {
            epoll,
            listener,
            _stop: stop,
            sessions: FxHashMap::default(),
            next_token: FIRST,
            admitted_uid,
            is_paused: false,
            find_export,
            connections,
        })
    }

    /// Runs until the stop event; then every connection ends.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        let pause = Timespec { tv_sec: 0, tv_nsec: PAUSE_NS };
        loop {
            events.clear();
            let timeout = self.is_paused.then_some(&pause);
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, spare, timeout) {
                Ok(_) | Err(Errno::INTR) => {}
                // Of a valid descriptor and buffer, no other error is possible.
                Err(_) => return,
            }
            if self.is_paused && events.is_empty() {
                self.listen_again();
            }
            for event in &events {
                match event.data.u64() {
                    STOP => {
                        system::shut_down(&self.listener);
                        return;
                    }
                    LISTENER => self.accept(),
                    token => self.serve(token),
                }
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_IN_TURN {
            if self.sessions.len() >= MAX_CONNECTIONS {
                return self.pause();
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match accept_with(&self.listener, flags) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // No descriptor or memory is left: connections wait in the queue.
                Err(_) => return self.pause(),
            }
        }
    }

    /// The listener stays readable, so it is not watched until a timeout or the end of a connection.
    fn pause(&mut self) {
        if !self.is_paused {
            self.is_paused = epoll::delete(&self.epoll, &self.listener).is_ok();
        }
    }

    fn listen_again(&mut self) {
        if self.is_paused {
            let flags = epoll::EventFlags::IN;
            self.is_paused = add(&self.epoll, &self.listener, LISTENER, flags).is_err();
        }
    }

    fn admit(&mut self, socket: OwnedFd) {
        let is_admitted =
            vramp_host::peer::peer(&socket).is_ok_and(|peer| peer.uid == self.admitted_uid);
        if !is_admitted {
            return refuse(&socket, self.admitted_uid);
        }
        // The end of the socket says as much, unless a forked child of the importer has it too.
        let process = vramp_host::peer::peer_process(&socket).ok();
        let token = self.next_token;
        self.next_token += 2;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if add(&self.epoll, &socket, token, flags).is_err() {
            // The kernel has no memory for it: the importer finds a closed connection.
            return system::shut_down(&socket);
        }
        let process =
            process.filter(|p| add(&self.epoll, p, token + 1, epoll::EventFlags::IN).is_ok());
        self.sessions.insert(token, Session::new(socket, process));
        self.connections.store(self.sessions.len(), Ordering::Relaxed);
    }

    fn serve(&mut self, token: u64) {
        let is_process = token % 2 == 1;
        let token = token & !1;
        if is_process {
            return self.end(token);
        }
        // An event of a connection that ended earlier in the same turn has no session.
        let Some(session) = self.sessions.get_mut(&token) else { return };
        let flags = match session.serve(&self.find_export) {
            Next::Readable => epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
            Next::Writable => epoll::EventFlags::OUT | epoll::EventFlags::RDHUP,
            Next::End => return self.end(token),
        };
        if session.interest() != flags {
            let data = epoll::EventData::new_u64(token);
            if epoll::modify(&self.epoll, session.socket(), data, flags).is_err() {
                return self.end(token);
            }
            session.set_interest(flags);
        }
    }

    /// Removes both descriptors first: a forked child may have them too, and then they would stay
    /// registered after they are closed here.
    fn end(&mut self, token: u64) {
        let Some(session) = self.sessions.remove(&token) else { return };
        // It fails for no descriptor that is registered.
        let _ = epoll::delete(&self.epoll, session.socket());
        if let Some(process) = session.process() {
            let _ = epoll::delete(&self.epoll, process);
        }
        self.connections.store(self.sessions.len(), Ordering::Relaxed);
        drop(session);
        self.listen_again();
    }
}

/// For forked children that have the listener and the epoll instance too.
impl Drop for EventLoop {
    fn drop(&mut self) {
        system::shut_down(&self.listener);
        self.sessions.clear();
        self.connections.store(0, Ordering::Relaxed);
    }
}

fn add(
    epoll: &OwnedFd,
    source: impl AsFd,
    token: u64,
    flags: epoll::EventFlags,
) -> rustix::io::Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), flags)
}

/// Tells the importer the reason with a reply to any request.
fn refuse(socket: &OwnedFd, admitted_uid: u32) {
    let mut bytes = Vec::new();
    let (failure, value) = (Failure::OtherUser, u64::from(admitted_uid));
    Reply::Failed { failure, value, text: String::new() }.encode(0, &mut bytes);
    // An importer that has gone already needs no reason.
    let _ = system::send(socket, &bytes, &[]);
}
