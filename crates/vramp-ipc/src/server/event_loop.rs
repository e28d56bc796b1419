//! The server's thread: accepts connections and serves those that have requests.
//!
//! One epoll instance holds the listener, the event that ends the thread, and for each connection its
//! socket and its process. A wake-up costs O(connections that have something to do). What a connection asks
//! for and gets is a [`Service`]'s.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::system;

/// Most connections of one server.
pub const MAX_CONNECTIONS: usize = 16_384;
/// Connections accepted before those that exist are served.
const ACCEPTS_IN_TURN: usize = 64;
/// How long no connection is accepted after one could not be.
const PAUSE: Duration = Duration::from_millis(50);

const STOP: u64 = 0;
const LISTENER: u64 = 1;
/// Tokens of connections: an even one for the socket, the next odd one for the process.
const FIRST: u64 = 2;
/// The event of the service. No connection has this number.
const WAKE: u64 = u64::MAX;

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// For a request.
    Readable,
    /// For space in the peer's queue.
    Writable,
    /// It ended, or broke the rules.
    End,
    /// The connection ended, and the session has to outlast the peer's process.
    EndWithProcess,
}

/// The descriptors of one connection.
pub struct Connected {
    pub socket: OwnedFd,
    /// Readable once the peer's process ended; `None` where the kernel cannot say.
    pub process: Option<OwnedFd>,
    /// Number of the connection, never used again.
    pub token: u64,
}

/// What connections are for. One thread calls it.
pub trait Service {
    /// State of one connection.
    type Session;

    /// A process of the same user connected.
    fn begin(&mut self, connected: &Connected) -> Self::Session;

    /// Reads requests, and sends replies, without waiting.
    fn serve(&mut self, connected: &Connected, session: &mut Self::Session) -> Next;

    /// The connection is over; its socket is closed afterwards.
    fn end(&mut self, connected: &Connected, session: Self::Session);

    /// Returns the reply to any request of a process of another user.
    fn refusal(&self, admitted_uid: u32) -> Vec<u8>;

    /// Returns a connection that has something to send although its peer asked nothing now.
    fn next_woken(&mut self) -> Option<u64> {
        None
    }

    /// Returns when [`Service::tick`] has something to do, without any request.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Returns a counter that grows when [`Service::tick`] has something to do.
    fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Called when the thread ends by the stop event, before the connections end.
    fn stopping(&mut self) {}

    /// Called after each turn. Returns false to end the thread.
    fn tick(&mut self) -> bool {
        true
    }
}

struct Conversation<S> {
    connected: Connected,
    session: S,
    /// The events for which the socket is registered.
    interest: epoll::EventFlags,
}

pub struct EventLoop<S: Service> {
    epoll: OwnedFd,
    listener: OwnedFd,
    /// Kept open while it is registered.
    _stop: Arc<OwnedFd>,
    sessions: FxHashMap<u64, Conversation<S::Session>>,
    next_token: u64,
    admitted_uid: u32,
    is_paused: bool,
    service: S,
    connections: Arc<AtomicUsize>,
}

/// What an event loop needs from its server.
pub struct LoopParts<S> {
    pub listener: OwnedFd,
    pub stop: Arc<OwnedFd>,
    pub admitted_uid: u32,
    pub service: S,
    pub connections: Arc<AtomicUsize>,
}

impl<S: Service> EventLoop<S> {
    pub fn new(parts: LoopParts<S>) -> io::Result<EventLoop<S>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let LoopParts { listener, stop, admitted_uid, service, connections } = parts;
        add(&epoll, &*stop, STOP, epoll::EventFlags::IN)?;
        add(&epoll, &listener, LISTENER, epoll::EventFlags::IN)?;
        if let Some(event) = service.event() {
            add(&epoll, event, WAKE, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        }
        Ok(EventLoop {
            epoll,
            listener,
            _stop: stop,
            sessions: FxHashMap::default(),
            next_token: FIRST,
            admitted_uid,
            is_paused: false,
            service,
            connections,
        })
    }

    /// Runs until the stop event, or until the service ends it; then every connection ends.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let timeout = self.timeout();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // Of a valid descriptor and buffer, no other error is possible.
                Err(_) => return,
            }
            if self.is_paused && events.is_empty() {
                self.listen_again();
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return self.service.stopping(),
                    LISTENER => self.accept(),
                    WAKE => {}
                    token => self.serve(token),
                }
            }
            if !self.service.tick() {
                return;
            }
            while let Some(token) = self.service.next_woken() {
                self.serve(token);
            }
        }
    }

    /// Returns how long nothing has to be done unless something happens.
    fn timeout(&self) -> Option<Timespec> {
        let deadline = self.service.deadline();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let pause = self.is_paused.then_some(PAUSE);
        let shortest = [left, pause].into_iter().flatten().min()?;
        shortest.try_into().ok()
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
            // A peer that has gone already needs no reason.
            let _ = system::send(&socket, &self.service.refusal(self.admitted_uid), &[]);
            return;
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
        let connected = Connected { socket, process, token };
        let session = self.service.begin(&connected);
        self.sessions.insert(token, Conversation { connected, session, interest: flags });
        self.connections.store(self.sessions.len(), Ordering::Relaxed);
    }

    fn serve(&mut self, token: u64) {
        let is_process = token % 2 == 1;
        let token = token & !1;
        if is_process {
            return self.end(token);
        }
        // An event of a connection that ended earlier in the same turn has no session.
        let Some(conversation) = self.sessions.get_mut(&token) else { return };
        let Conversation { connected, session, interest } = conversation;
        let flags = match self.service.serve(connected, session) {
            Next::Readable => epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
            Next::Writable => epoll::EventFlags::OUT | epoll::EventFlags::RDHUP,
            Next::End => return self.end(token),
            Next::EndWithProcess if connected.process.is_none() => return self.end(token),
            Next::EndWithProcess => {
                // The process is watched still. It fails for no descriptor that is registered.
                let _ = epoll::delete(&self.epoll, &connected.socket);
                return system::shut_down(&connected.socket);
            }
        };
        if *interest != flags {
            let data = epoll::EventData::new_u64(token);
            if epoll::modify(&self.epoll, &connected.socket, data, flags).is_err() {
                return self.end(token);
            }
            *interest = flags;
        }
    }

    /// Removes both descriptors first: a forked child may have them too, and then they would stay
    /// registered after they are closed here.
    fn end(&mut self, token: u64) {
        let Some(Conversation { connected, session, .. }) = self.sessions.remove(&token) else {
            return;
        };
        // It fails for no descriptor that is registered.
        let _ = epoll::delete(&self.epoll, &connected.socket);
        if let Some(process) = &connected.process {
            let _ = epoll::delete(&self.epoll, process);
        }
        self.connections.store(self.sessions.len(), Ordering::Relaxed);
        system::shut_down(&connected.socket);
        self.service.end(&connected, session);
        drop(connected);
        self.listen_again();
    }
}

/// For forked children that have the listener and the epoll instance too.
impl<S: Service> Drop for EventLoop<S> {
    fn drop(&mut self) {
        system::shut_down(&self.listener);
        for (_, Conversation { connected, session, .. }) in self.sessions.drain() {
            system::shut_down(&connected.socket);
            self.service.end(&connected, session);
        }
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
