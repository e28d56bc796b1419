//! Names of the files in the directory of a card.
//!
//! The entry of a candidate is a named pipe. Everything that others read about the candidate is in the
//! name, so an entry appears whole or not at all.
//!
//! Messages in the pipes of entries: lines, each written whole.

use std::fmt::Write;

/// Longest name of a program in bytes.
pub const MAX_NAME: usize = 64;
/// Greatest number of an entry. Names with greater ones are not entries.
const MAX_NUMBER: u64 = u64::MAX / 2;
const NEW: &str = ".new";
const HELD: &str = ".held";

/// The place of an entry in the line: by number, and by random bits where numbers are equal. No key is
/// used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub number: u64,
    pub random: u64,
}

impl Key {
    /// Returns the name of the link that exists while the entry holds the turn.
    pub fn held_name(self) -> String {
        format!("{:016x}-{:016x}{HELD}", self.number, self.random)
    }
}

/// What a process wants of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// All memory of the card.
    Card,
    /// That many bytes.
    Bytes(u64),
}

/// One entry, as its name says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Key,
    pub pid: u32,
    /// The PID namespace in which `pid` has a meaning; 0 if unknown.
    pub namespace: u64,
    /// Milliseconds after 1970 at which the process requested the turn.
    pub since_ms: u64,
    pub need: Need,
    /// Name of the program.
    pub program: String,
}

/// Returns the name of a pipe that is no entry yet.
pub fn new_name(random: u64) -> String {
    format!("{random:016x}{NEW}")
}

/// Returns true for the name of a pipe that is no entry yet.
pub fn is_new(name: &str) -> bool {
    name.strip_suffix(NEW).is_some_and(|random| parse_hex(random).is_some())
}

impl Entry {
    /// Returns the name of the entry's pipe: at most 217 bytes.
    pub fn encode(&self) -> String {
        let Key { number, random } = self.key;
        let need = match self.need {
            Need::Card => "card".to_owned(),
            Need::Bytes(bytes) => format!("{bytes:x}"),
        };
        let mut name = format!(
            "{number:016x}-{random:016x}-{:x}-{:x}-{:x}-{need}-",
            self.pid, self.namespace, self.since_ms
        );
        for byte in self.program.bytes() {
            // Writing to a text cannot fail.
            let _ = write!(name, "{byte:02x}");
        }
        name
    }

    /// Returns the entry with this name; `None` for the name of another file.
    pub fn decode(name: &str) -> Option<Entry> {
        let mut fields = name.split('-');
        let mut field = || fields.next();
        let key = Key { number: parse_hex(field()?)?, random: parse_hex(field()?)? };
        let pid = u32::try_from(parse_hex(field()?)?).ok()?;
        let namespace = parse_hex(field()?)?;
        let since_ms = parse_hex(field()?)?;
        let need = match field()? {
            "card" => Need::Card,
            bytes => Need::Bytes(parse_hex(bytes)?),
        };
        let program = parse_text(field()?)?;
        let is_whole = fields.next().is_none() && key.number <= MAX_NUMBER;
        let entry = Entry { key, pid, namespace, since_ms, need, program };
        // A key has one name, so that removing a name removes its entry.
        (is_whole && entry.encode() == name).then_some(entry)
    }
}

fn parse_hex(digits: &str) -> Option<u64> {
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

fn parse_text(digits: &str) -> Option<String> {
    let bytes = digits.as_bytes().chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok()?;
        u8::try_from(parse_hex(pair)?).ok()
    });
    String::from_utf8(bytes.collect::<Option<_>>()?).ok()
}

/// Returns the longest beginning of `text` with at most `most` bytes, without control characters.
pub fn shortened(text: &str, most: usize) -> String {
    let mut short = String::new();
    for letter in text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }) {
        if short.len() + letter.len_utf8() > most {
            break;
        }
        short.push(letter);
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(program: &str, need: Need) -> Entry {
        let key = Key { number: 7, random: 0xab };
        Entry {
            key,
            pid: u32::MAX,
            namespace: u64::MAX,
            since_ms: u64::MAX,
            need,
            program: program.into(),
        }
    }

    #[test]
    fn an_entry_is_its_name_again() {
        for program in ["", "trainer", "a/b-c.\u{e4}"] {
            for need in [Need::Card, Need::Bytes(0), Need::Bytes(u64::MAX)] {
                let entry = entry(program, need);
                assert_eq!(Entry::decode(&entry.encode()), Some(entry));
            }
        }
        let longest = entry(&"x".repeat(MAX_NAME), Need::Bytes(u64::MAX));
        assert!(longest.encode().len() <= 255, "{}", longest.encode().len());
    }

    #[test]
    fn other_names_are_no_entries() {
        let good = entry("a", Need::Card).encode();
        assert!(Entry::decode(&good).is_some());
        for bad in [
            "",
            "README",
            &good[1..],
            &format!("{good}-"),
            &format!("{good}0"),
            &good.replace("card", "cart"),
            &good.replace("ffffffff-", "1ffffffff-"),
            &good.replacen("0000000000000007", "ffffffffffffffff", 1),
            &good.replacen("0000000000000007", "+000000000000007", 1),
            &entry("a", Need::Card).key.held_name(),
            &new_name(5),
        ] {
            assert_eq!(Entry::decode(bad), None, "{bad}");
        }
        assert!(is_new(&new_name(5)) && !is_new(&good) && !is_new(".new.new"));
    }

    #[test]
    fn keys_are_ordered_by_number_first() {
        let key = |number, random| Key { number, random };
        assert!(key(1, 9) < key(2, 0) && key(2, 0) < key(2, 1));
    }

    #[test]
    fn texts_are_cut_between_letters() {
        assert_eq!(shortened("a\nb", 64), "a b");
        assert_eq!(shortened("\u{e4}\u{e4}", 3), "\u{e4}");
    }
}

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
mod message_tests {
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
