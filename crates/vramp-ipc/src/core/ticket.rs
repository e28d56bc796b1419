//! The bytes of a ticket.

use super::message::{Reader, Secret, VERSION};

/// Longest path of a socket in bytes, by the kernel's limit.
pub const MAX_PATH: usize = 107;

/// Where an exporter listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// An abstract name, made from these random bits.
    Abstract([u8; 16]),
    /// A path in the file system.
    Path(Vec<u8>),
}

impl Address {
    /// Returns the abstract name, or the path.
    pub fn name(&self) -> Vec<u8> {
        match self {
            Address::Abstract(random) => format!("vramp-{}", hex(random)).into_bytes(),
            Address::Path(path) => path.clone(),
        }
    }
}

/// Returns two digits for each byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A process, by its id and the time at which it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessName {
    /// As the process itself sees it.
    pub pid: u32,
    /// Start of the process in clock ticks after boot; 0 if unknown.
    pub start_ticks: u64,
}

/// What an importer needs to open an export.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TicketParts {
    pub address: Address,
    pub exporter: ProcessName,
    pub export: u64,
    /// 0 for none.
    pub grant: u64,
    pub secret: Secret,
}

impl TicketParts {
    /// Returns the ticket as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, address): (u8, &[u8]) = match &self.address {
            Address::Abstract(random) => (0, random),
            Address::Path(path) => (1, path),
        };
        let mut out = vec![VERSION, kind, address.len() as u8];
        out.extend(address);
        out.extend(self.exporter.pid.to_le_bytes());
        out.extend(self.exporter.start_ticks.to_le_bytes());
        out.extend(self.export.to_le_bytes());
        out.extend(self.grant.to_le_bytes());
        out.extend(self.secret);
        out
    }

    /// Returns the ticket; `None` if the bytes are none of this version.
    pub fn decode(bytes: &[u8]) -> Option<TicketParts> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != VERSION {
            return None;
        }
        let kind = reader.u8()?;
        let length = reader.u8()?;
        let address = reader.bytes(usize::from(length))?;
        let address = match kind {
            0 => Address::Abstract(address.try_into().ok()?),
            1 if is_path(address) => Address::Path(address.to_vec()),
            _ => return None,
        };
        let parts = TicketParts {
            address,
            exporter: ProcessName { pid: reader.u32()?, start_ticks: reader.u64()? },
            export: reader.u64()?,
            grant: reader.u64()?,
            secret: reader.array()?,
        };
        reader.end(parts)
    }
}

/// Returns true if a socket can have this path. Every process that opens it must find the same file,
/// so it is absolute.
pub fn is_path(path: &[u8]) -> bool {
    path.first() == Some(&b'/') && path.len() <= MAX_PATH && !path.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tickets() -> Vec<TicketParts> {
        let longest = std::iter::once(b'/').chain([b'a'; MAX_PATH - 1]).collect();
        [Address::Abstract([3; 16]), Address::Path(b"/run/a".to_vec()), Address::Path(longest)]
            .map(|address| TicketParts {
                address,
                exporter: ProcessName { pid: 12, start_ticks: 34 },
                export: 56,
                grant: 78,
                secret: [9; 16],
            })
            .to_vec()
    }

    #[test]
    fn a_ticket_is_read_as_it_was_written_and_no_shorter_or_longer_one_is() {
        for ticket in tickets() {
            let mut bytes = ticket.encode();
            assert!(bytes.len() <= 160);
            assert!(TicketParts::decode(&bytes).is_some_and(|read| read == ticket));
            for length in 0..bytes.len() {
                assert!(TicketParts::decode(&bytes[..length]).is_none());
            }
            bytes.push(0);
            assert!(TicketParts::decode(&bytes).is_none());
        }
    }

    #[test]
    fn a_ticket_of_a_server_without_a_directory_has_64_bytes_at_most() {
        assert!(tickets()[0].encode().len() <= 64);
    }

    #[test]
    fn a_path_that_is_relative_or_too_long_or_has_a_zero_is_no_address() {
        for path in [&b"run/a"[..], b"", b"/a\0b", &[b'/'; MAX_PATH + 1]] {
            assert!(!is_path(path));
            let ticket =
                TicketParts { address: Address::Path(path.to_vec()), ..tickets()[1].clone() };
            assert!(TicketParts::decode(&ticket.encode()).is_none());
        }
    }

    #[test]
    fn random_and_damaged_bytes_are_rejected_or_read_without_loss() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut read = 0;
        for _ in 0..100_000 {
            let mut bytes = tickets()[random.usize(..3)].encode();
            for _ in 0..random.usize(0..3) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            if let Some(ticket) = TicketParts::decode(&bytes) {
                assert_eq!(ticket.encode(), bytes);
                read += 1;
            }
        }
        assert!(read > 10_000, "{read}");
    }
}
