//! An export that is open in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::{fmt, mem};

use super::connection::Connection;
use crate::Ticket;
use crate::core::message::{OpenId, Reply, Request};
use crate::error::OpenError;
use crate::server::{MAX_DESCRIPTION, MAX_DESCRIPTORS};

/// Some of the descriptors of an export, in order.
#[derive(Debug)]
pub struct Batch {
    /// Index of the first one.
    pub first: usize,
    /// The descriptors, closed on exec.
    pub descriptors: Vec<OwnedFd>,
}

/// An export that is open in this process; dropping it closes the export.
///
/// The exporter keeps its memory until then. The descriptors are received in batches, so that no
/// more than one batch is open if the caller imports and closes each before the next.
pub struct Opened {
    close: CloseGuard,
    ticket: Ticket,
    description: Vec<u8>,
    descriptors: usize,
    /// Descriptors that came with the reply to the open.
    front: Vec<OwnedFd>,
    /// Descriptors that were returned to the caller.
    received: usize,
    most: u16,
}

struct CloseGuard {
    connection: Arc<Connection>,
    open: OpenId,
}

impl Drop for CloseGuard {
    fn drop(&mut self) {
        self.connection.close(self.open);
    }
}

impl Opened {
    /// Opens a ticket and receives its description: one request, and one more for each 32 KiB of a
    /// longer description.
    pub(super) fn new(
        connection: &Arc<Connection>,
        ticket: &Ticket,
        first: u16,
        most: u16,
    ) -> Result<Opened, OpenError> {
        let pid = connection.pid();
        let protocol = |what| OpenError::Protocol { pid, what };
        let mut turn = connection.turn();
        let (export, grant, secret) = (ticket.0.export, ticket.0.grant, ticket.0.secret);
        let answer = turn.request(Request::Open { export, grant, secret, most: first })?;
        let Reply::Opened { open, description: length, descriptors, count, part } = answer.reply
        else {
            return Err(protocol("no reply to an open"));
        };
        // From here on every error closes the export.
        let close = CloseGuard { connection: Arc::clone(connection), open };
        let front = answer.descriptors;
        let length = length as usize;
        let descriptors = descriptors as usize;
        let count = usize::from(count);
        let is_complete = front.len() == count || (answer.lost_descriptors && front.len() < count);
        if length > MAX_DESCRIPTION
            || descriptors > MAX_DESCRIPTORS
            || count > descriptors.min(usize::from(first))
            || !is_complete
        {
            return Err(protocol("an offer beyond the limits"));
        }
        let mut description = part.to_vec();
        while description.len() < length {
            let offset = description.len() as u32;
            let answer = turn.request(Request::Part { open, offset })?;
            match answer.reply {
                Reply::Part { offset: found, part } if found == offset && !part.is_empty() => {
                    description.extend(part);
                }
                _ => return Err(protocol("no reply to a request for the description")),
            }
        }
        if description.len() > length {
            return Err(protocol("more bytes than the description has"));
        }
        let ticket = ticket.clone();
        Ok(Opened { close, ticket, description, descriptors, front, received: 0, most })
    }

    /// Returns the exporter's description.
    pub fn description(&self) -> &[u8] {
        &self.description
    }

    /// Returns the number of descriptors of the export.
    pub fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// Returns the ticket, for a third process. It can be opened while the export is published.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Returns true if the exporter's process or server ended. One system call.
    pub fn is_exporter_gone(&self) -> bool {
        !self.close.connection.is_inherited() && self.close.connection.is_ended()
    }

    /// Returns the next descriptors, or `None` after the last. The first batch came with the open;
    /// each other one is a request.
    ///
    /// A batch is smaller than asked for where one of the processes is close to its limit of open
    /// files.
    ///
    /// # Errors
    ///
    /// If the source, the exporter or the limit of open files of one side ended it. The same batch
    /// can be asked for again.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, OpenError> {
        if self.received == self.descriptors {
            return Ok(None);
        }
        let first = self.received;
        if self.front.is_empty() {
            self.front = self.request_batch(first)?;
        }
        let descriptors = mem::take(&mut self.front);
        self.received += descriptors.len();
        Ok(Some(Batch { first, descriptors }))
    }

    /// Leaves out the descriptors before `index`: the next batch begins with it. No request.
    pub fn skip_to(&mut self, index: usize) {
        let index = index.clamp(self.received, self.descriptors);
        self.front.drain(..self.front.len().min(index - self.received));
        self.received = index;
    }

    fn request_batch(&self, first: usize) -> Result<Vec<OwnedFd>, OpenError> {
        let connection = &self.close.connection;
        if connection.is_inherited() {
            return Err(OpenError::Forked);
        }
        // Within `MAX_DESCRIPTORS`, as `Opened::new` checked.
        let first = first as u32;
        let mut turn = connection.turn();
        let answer =
            turn.request(Request::Batch { open: self.close.open, first, most: self.most })?;
        let most = usize::from(self.most).min(self.descriptors - self.received);
        let count = match answer.reply {
            Reply::Batch { first: found, count } if found == first && count > 0 => count.into(),
            _ => 0,
        };
        let received = answer.descriptors.len();
        if count == 0 || count > most || received > count {
            let what = "no reply to a request for descriptors";
            return Err(OpenError::Protocol { pid: connection.pid(), what });
        }
        if received == 0 && answer.lost_descriptors {
            return Err(OpenError::too_many_open_files());
        }
        if received < count && !answer.lost_descriptors {
            let what = "fewer descriptors than announced";
            return Err(OpenError::Protocol { pid: connection.pid(), what });
        }
        Ok(answer.descriptors)
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened")
            .field("ticket", &self.ticket)
            .field("descriptors", &self.descriptors)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}
