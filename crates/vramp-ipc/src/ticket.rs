//! Tickets: the small value that lets another process open an export.

use std::fmt;

use crate::core::ticket::TicketParts;
use crate::error::TicketError;

/// Lets a process of the same user open an export. At most 160 bytes; 63 for an abstract address.
///
/// It can be copied, stored and opened any number of times while the export is published. It holds a
/// secret: another process of the user that reads it can open the export.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Ticket(pub(crate) TicketParts);

impl Ticket {
    /// Returns the ticket as bytes, for a message to another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.encode()
    }

    /// Reads a ticket.
    ///
    /// # Errors
    ///
    /// If the bytes are no ticket of this version of the crate.
    pub fn from_bytes(bytes: &[u8]) -> Result<Ticket, TicketError> {
        TicketParts::decode(bytes).map(Ticket).ok_or(TicketError { length: bytes.len() })
    }

    /// Returns the number of the export, unique among the exports of its server.
    pub fn export(&self) -> u64 {
        self.0.export
    }
}

/// Without the secret.
impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("export", &self.0.export)
            .field("grant", &self.0.grant)
            .field("exporter", &self.0.exporter)
            .field("address", &String::from_utf8_lossy(&self.0.address.name()))
            .finish_non_exhaustive()
    }
}
