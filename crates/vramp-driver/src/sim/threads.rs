//! Per-thread default streams, and the legacy default stream, through which a thread reaches those of
//! others.
//!
//! A call on the legacy stream comes after all work queued on the threads' streams of its device, and
//! before all that is queued there later: [`State::resolve`] adds the waits. Streams that
//! [`Driver::create_stream`](crate::Driver::create_stream) made do not synchronise with it.

use super::refusal::{Outcome, Refusal};
use super::state::State;
use crate::{Stream, StreamThread, ThreadNumber};

fn name(index: usize) -> Stream {
    Stream::from_number(index as u64 + 1)
}

impl State {
    /// Returns the default stream of the calling thread on the current device.
    pub fn thread_stream(&mut self) -> Stream {
        name(self.streams.of_thread(self.current, ThreadNumber::current()))
    }

    /// Returns the stream that a call of this thread on `stream` acts on.
    pub fn resolve(&mut self, stream: Stream) -> Outcome<Stream> {
        let index = self.streams.index(self.current, stream)?;
        match StreamThread::of(self.streams.thread(index)) {
            StreamThread::Any => {}
            StreamThread::This => {
                if let Some(legacy) = self.streams.legacy(self.current) {
                    self.order_behind(index, legacy);
                }
            }
            StreamThread::Other => return self.legacy(),
        }
        Ok(stream)
    }

    /// Returns true if the stream that a call of this thread on `stream` acts on captures, or may not be
    /// used because another one does.
    pub fn is_capturing(&self, stream: Stream) -> Outcome<bool> {
        let index = self.streams.index(self.current, stream)?;
        match StreamThread::of(self.streams.thread(index)) {
            StreamThread::Other => Ok(self.any_thread_captures()),
            StreamThread::Any | StreamThread::This => Ok(self.captures.of(index).is_some()),
        }
    }

    fn any_thread_captures(&self) -> bool {
        let of_threads = self.streams.of_threads(self.current);
        of_threads.into_iter().any(|stream| self.captures.of(stream).is_some())
    }

    /// Returns the legacy default stream, behind all work queued on the threads' streams.
    fn legacy(&mut self) -> Outcome<Stream> {
        if self.any_thread_captures() {
            let detail = "a stream that synchronises with the legacy default stream is capturing";
            return Err(Refusal { code: 906, detail: detail.to_owned() });
        }
        let legacy = self.streams.make_legacy(self.current);
        self.streams
            .of_threads(self.current)
            .into_iter()
            .for_each(|stream| self.order_behind(legacy, stream));
        Ok(name(legacy))
    }

    /// Makes later work on `stream` wait for the work queued on `before` so far. Nothing for one that
    /// captures.
    fn order_behind(&mut self, stream: usize, before: usize) {
        if self.captures.of(stream).is_some() {
            return;
        }
        let end = self.streams.end_of(before);
        self.streams.push_wait(stream, end, self.now_ns);
        if let Some(checker) = &mut self.checker {
            let point = checker.point(name(before));
            checker.follow(name(stream), &point);
        }
    }
}
