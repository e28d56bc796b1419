//! Messages in the pipes of entries: lines, each written whole.

use super::entry::{Entry, shortened};

/// Longest reason of a refusal in bytes: a message has less than the 4096 bytes that a pipe takes whole.
pub const MAX_REASON: usize = 1024;

/// A message to the process of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Another process requests the turn.
    Request,
    /// The holder refuses to release the turn for this request.
    Refusal { holder: Entry, reason: String },
}

impl Message {
    /// Returns the line.
    pub fn encode(&self) -> String {
        match self {
            Message::Request => "request\n".to_owned(),
            Message::Refusal { holder, reason } => {
                format!("refused {} {}\n", holder.encode(), shortened(reason, MAX_REASON))
            }
        }
    }

    /// Returns the messages of all lines that are one.
    pub fn decode_all(bytes: &[u8]) -> Vec<Message> {
        bytes.split(|byte| *byte == b'\n').filter_map(Message::decode).collect()
    }

    fn decode(line: &[u8]) -> Option<Message> {
        let line = std::str::from_utf8(line).ok()?;
        if line == "request" {
            return Some(Message::Request);
        }
        let (holder, reason) = line.strip_prefix("refused ")?.split_once(' ')?;
        Some(Message::Refusal { holder: Entry::decode(holder)?, reason: reason.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::{Key, Need};
    use super::*;

    #[test]
    fn messages_are_read_as_written_and_other_lines_are_not() {
        let key = Key { number: 1, random: 2 };
        let (pid, namespace, since_ms) = (3, 4, 5);
        let program = "engine".to_owned();
        let holder = Entry { key, pid, namespace, since_ms, need: Need::Card, program };
        let refusal =
            |reason: &str| Message::Refusal { holder: holder.clone(), reason: reason.into() };
        let sent = [Message::Request, refusal("a step\nruns"), Message::Request];
        let mut bytes: Vec<u8> =
            sent.iter().flat_map(|message| message.encode().into_bytes()).collect();
        bytes.extend(b"\xff\nrefused x y\nrefused\n\n");
        let expected = [Message::Request, refusal("a step runs"), Message::Request];
        assert_eq!(Message::decode_all(&bytes), expected);
        let longest = refusal(&"x".repeat(5000)).encode();
        assert!((MAX_REASON..4096).contains(&longest.len()), "{}", longest.len());
    }
}
