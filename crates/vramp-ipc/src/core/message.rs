//! The messages of a connection, as bytes.
//!
//! A message is one packet. Requests have a fixed size. Each request but a close has one reply with
//! its sequence number; replies come in the order of the requests.
//!
//! Numbers and byte strings in little-endian order.

/// Version of messages and tickets; the first byte of each.
pub const VERSION: u8 = 1;
/// Longest request in bytes.
pub const MAX_REQUEST: usize = 64;
/// Longest reply in bytes.
pub const MAX_REPLY: usize = 32 * 1024;
/// Most bytes of a description in one reply.
pub const MAX_PART: usize = MAX_REPLY - OPENED_HEADER;
/// Most descriptors in one message, by the kernel's limit.
pub const MAX_BATCH: usize = 253;
/// Longest text of a failure in bytes.
const MAX_TEXT: usize = 1024;
const OPENED_HEADER: usize = 32;

/// The 128 random bits that let an importer open an export.
pub type Secret = [u8; 16];

/// A number that the exporter gave to one open of one connection.
pub type OpenId = u64;

/// What an importer sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Opens an export. Reply: `Opened` or `Failed`.
    Open { export: u64, grant: u64, secret: Secret, most: u16 },
    /// Asks for the next part of the description. Reply: `Part` or `Failed`.
    Part { open: OpenId, offset: u32 },
    /// Asks for descriptors from `first` on. Reply: `Batch` or `Failed`.
    Batch { open: OpenId, first: u32, most: u16 },
    /// Closes an open. No reply.
    Close { open: OpenId },
    /// Asks for the end of this connection once exported memory is released. Reply: `Watching`.
    Watch,
}

/// What an exporter sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The export is open. `part` is the front of the description; the first `count` descriptors
    /// are in the same message.
    Opened { open: OpenId, description: u32, descriptors: u32, count: u16, part: &'a [u8] },
    /// Bytes of the description from `offset` on.
    Part { offset: u32, part: &'a [u8] },
    /// The message has `count` descriptors from `first` on.
    Batch { first: u32, count: u16 },
    /// The connection ends once exported memory is released.
    Watching,
    /// The request failed.
    Failed { failure: Failure, value: u64, text: String },
}

/// Why a request failed at the exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No such export, or no longer.
    Withdrawn = 1,
    /// Wrong secret.
    WrongSecret = 2,
    /// Connection of another user; `value` is the exporter's.
    OtherUser = 3,
    /// The source returned an error, `text`.
    Source = 4,
    /// The exporter may open no more descriptors; `value` is its limit.
    TooManyFiles = 5,
    /// The connection has as many opens as are allowed, `value`.
    TooManyOpens = 6,
    /// The user has too many descriptors on their way in sockets; `value` is the limit.
    TooManyInFlight = 7,
}

impl Failure {
    const ALL: [Failure; 7] = [
        Failure::Withdrawn,
        Failure::WrongSecret,
        Failure::OtherUser,
        Failure::Source,
        Failure::TooManyFiles,
        Failure::TooManyOpens,
        Failure::TooManyInFlight,
    ];
}

impl Request {
    /// Appends the request's bytes to `out`.
    pub fn encode(&self, sequence: u32, out: &mut Vec<u8>) {
        let kind = match self {
            Request::Open { .. } => 1,
            Request::Part { .. } => 2,
            Request::Batch { .. } => 3,
            Request::Close { .. } => 4,
            Request::Watch => 5,
        };
        out.extend([VERSION, kind]);
        out.extend(sequence.to_le_bytes());
        match *self {
            Request::Open { export, grant, secret, most } => {
                out.extend(export.to_le_bytes());
                out.extend(grant.to_le_bytes());
                out.extend(secret);
                out.extend(most.to_le_bytes());
            }
            Request::Part { open, offset } => {
                out.extend(open.to_le_bytes());
                out.extend(offset.to_le_bytes());
            }
            Request::Batch { open, first, most } => {
                out.extend(open.to_le_bytes());
                out.extend(first.to_le_bytes());
                out.extend(most.to_le_bytes());
            }
            Request::Close { open } => out.extend(open.to_le_bytes()),
            Request::Watch => {}
        }
    }

    /// Returns the sequence number and the request; `None` if the bytes are no request.
    pub fn decode(bytes: &[u8]) -> Option<(u32, Request)> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != VERSION {
            return None;
        }
        let kind = reader.u8()?;
        let sequence = reader.u32()?;
        let request = match kind {
            1 => Request::Open {
                export: reader.u64()?,
                grant: reader.u64()?,
                secret: reader.array()?,
                most: reader.u16()?,
            },
            2 => Request::Part { open: reader.u64()?, offset: reader.u32()? },
            3 => Request::Batch { open: reader.u64()?, first: reader.u32()?, most: reader.u16()? },
            4 => Request::Close { open: reader.u64()? },
            5 => Request::Watch,
            _ => return None,
        };
        reader.end((sequence, request))
    }
}

impl<'a> Reply<'a> {
    /// Appends the reply's bytes to `out`. A long text of a failure is cut.
    pub fn encode(&self, sequence: u32, out: &mut Vec<u8>) {
        let kind = match self {
            Reply::Opened { .. } => 1,
            Reply::Part { .. } => 2,
            Reply::Batch { .. } => 3,
            Reply::Failed { .. } => 4,
            Reply::Watching => 5,
        };
        out.extend([VERSION, kind]);
        out.extend(sequence.to_le_bytes());
        match self {
            Reply::Opened { open, description, descriptors, count, part } => {
                out.extend(open.to_le_bytes());
                out.extend(description.to_le_bytes());
                out.extend(descriptors.to_le_bytes());
                out.extend(count.to_le_bytes());
                out.extend(*part);
            }
            Reply::Part { offset, part } => {
                out.extend(offset.to_le_bytes());
                out.extend(*part);
            }
            Reply::Batch { first, count } => {
                out.extend(first.to_le_bytes());
                out.extend(count.to_le_bytes());
            }
            Reply::Watching => {}
            Reply::Failed { failure, value, text } => {
                out.push(*failure as u8);
                out.extend(value.to_le_bytes());
                let mut ends = (0..=text.len().min(MAX_TEXT)).rev();
                let end = ends.find(|end| text.is_char_boundary(*end)).unwrap_or(0);
                out.extend(&text.as_bytes()[..end]);
            }
        }
    }

    /// Returns the sequence number and the reply; `None` if the bytes are no reply.
    pub fn decode(bytes: &'a [u8]) -> Option<(u32, Reply<'a>)> {
        let mut reader = Reader::new(bytes);
        if reader.u8()? != VERSION {
            return None;
        }
        let kind = reader.u8()?;
        let sequence = reader.u32()?;
        let reply = match kind {
            1 => Reply::Opened {
                open: reader.u64()?,
                description: reader.u32()?,
                descriptors: reader.u32()?,
                count: reader.u16()?,
                part: reader.rest(),
            },
            2 => Reply::Part { offset: reader.u32()?, part: reader.rest() },
            3 => {
                let batch = Reply::Batch { first: reader.u32()?, count: reader.u16()? };
                reader.end(batch)?
            }
            4 => {
                let code = reader.u8()?;
                let failure = Failure::ALL.into_iter().find(|known| *known as u8 == code)?;
                let value = reader.u64()?;
                let text = reader.rest();
                if text.len() > MAX_TEXT {
                    return None;
                }
                Reply::Failed { failure, value, text: String::from_utf8_lossy(text).into_owned() }
            }
            5 => reader.end(Reply::Watching)?,
            _ => return None,
        };
        Some((sequence, reply))
    }
}

/// Reads a message front to back. Every read past the end is `None`.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(first)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Returns everything that was not read yet.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Returns `value` if everything was read.
    pub fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: Secret = [7; 16];

    fn requests() -> [Request; 4] {
        [
            Request::Open { export: 1, grant: 2, secret: SECRET, most: 3 },
            Request::Part { open: 4, offset: 5 },
            Request::Batch { open: 6, first: 7, most: 8 },
            Request::Close { open: u64::MAX },
        ]
    }

    fn replies() -> Vec<Reply<'static>> {
        let opened =
            Reply::Opened { open: 1, description: 9, descriptors: 3, count: 2, part: b"front" };
        let mut replies = vec![
            opened,
            Reply::Part { offset: 5, part: b"rest" },
            Reply::Batch { first: 2, count: 1 },
        ];
        replies.extend(Failure::ALL.map(|failure| Reply::Failed {
            failure,
            value: 11,
            text: "why".into(),
        }));
        replies
    }

    fn encoded(reply: &Reply<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        reply.encode(77, &mut bytes);
        bytes
    }

    #[test]
    fn a_request_is_read_as_it_was_written_and_no_shorter_or_longer_one_is() {
        for request in requests() {
            let mut bytes = Vec::new();
            request.encode(42, &mut bytes);
            assert!(bytes.len() <= MAX_REQUEST);
            assert_eq!(Request::decode(&bytes), Some((42, request)));
            for length in 0..bytes.len() {
                assert_eq!(Request::decode(&bytes[..length]), None, "{request:?}");
            }
            bytes.push(0);
            assert_eq!(Request::decode(&bytes), None, "{request:?}");
        }
    }

    #[test]
    fn a_reply_is_read_as_it_was_written() {
        for reply in replies() {
            assert_eq!(Reply::decode(&encoded(&reply)), Some((77, reply)));
        }
    }

    #[test]
    fn the_longest_reply_fits_into_a_message() {
        let part = vec![0; MAX_PART];
        let longest =
            Reply::Opened { open: 0, description: 0, descriptors: 0, count: 0, part: &part };
        assert!(encoded(&longest).len() <= MAX_REPLY);
        let text = "\u{20ac}".repeat(MAX_TEXT);
        let failed = Reply::Failed { failure: Failure::Source, value: 0, text };
        let bytes = encoded(&failed);
        let Some((_, Reply::Failed { text, .. })) = Reply::decode(&bytes) else { panic!() };
        assert_eq!(text, "\u{20ac}".repeat(MAX_TEXT / 3));
    }

    #[test]
    fn another_version_or_kind_is_no_message() {
        let mut bytes = encoded(&Reply::Batch { first: 0, count: 0 });
        bytes[1] = 9;
        assert_eq!(Reply::decode(&bytes), None);
        bytes[..2].copy_from_slice(&[VERSION + 1, 3]);
        assert_eq!(Reply::decode(&bytes), None);
    }

    /// What is read from random and from damaged bytes is written back as the same bytes.
    #[test]
    fn bytes_are_rejected_or_read_without_loss() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut valid: Vec<Vec<u8>> = replies().iter().map(encoded).collect();
        for request in requests() {
            let mut bytes = Vec::new();
            request.encode(1, &mut bytes);
            valid.push(bytes);
        }
        let (mut read, mut rejected) = (0, 0);
        for _ in 0..200_000 {
            let mut bytes = valid[random.usize(..valid.len())].clone();
            for _ in 0..random.usize(0..4) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            bytes.truncate(random.usize(0..=bytes.len() * 2));
            let mut again = Vec::new();
            if let Some((sequence, request)) = Request::decode(&bytes) {
                request.encode(sequence, &mut again);
                assert_eq!(again, bytes);
                read += 1;
            } else {
                rejected += 1;
            }
            if let Some((sequence, reply)) = Reply::decode(&bytes) {
                again.clear();
                reply.encode(sequence, &mut again);
                assert_eq!(Reply::decode(&again), Some((sequence, reply)));
            }
        }
        assert!(read > 1_000 && rejected > 1_000, "{read} read, {rejected} rejected");
    }
}
