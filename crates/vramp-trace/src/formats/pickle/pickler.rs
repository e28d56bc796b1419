//! Writes plain data as a pickle of protocol 4.
//!
//! Uses only opcodes that PyTorch's viewer in the browser supports. It has no `POP` and no
//! `BINUNICODE8`, and it numbers memo entries in the order of `MEMOIZE`.

use std::collections::HashMap;
use std::io::{self, Write};

use super::opcode;

/// Memo number of a value that was written.
#[derive(Clone, Copy, Debug)]
pub struct Memo(u32);

/// A pickle being written. Each text is written once and referred to afterwards.
pub struct Pickler<'a, W> {
    out: W,
    texts: HashMap<&'a str, Memo>,
    memos: u32,
}

impl<'a, W: Write> Pickler<'a, W> {
    pub fn new(mut out: W) -> io::Result<Pickler<'a, W>> {
        out.write_all(&[opcode::PROTO, 4])?;
        Ok(Pickler { out, texts: HashMap::new(), memos: 0 })
    }

    /// Ends the pickle. The last value written is its result.
    pub fn finish(mut self) -> io::Result<()> {
        self.op(opcode::STOP)?;
        self.out.flush()
    }

    // --- values ---

    pub fn text(&mut self, text: &'a str) -> io::Result<()> {
        if let Some(&memo) = self.texts.get(text) {
            return self.get(memo);
        }
        let len = u32::try_from(text.len())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a text beyond 4 GiB"))?;
        match u8::try_from(len) {
            Ok(len) => self.out.write_all(&[opcode::SHORT_BINUNICODE, len])?,
            Err(_) => self.with_number(opcode::BINUNICODE, len)?,
        }
        self.out.write_all(text.as_bytes())?;
        let memo = self.memoize()?;
        self.texts.insert(text, memo);
        Ok(())
    }

    pub fn bool(&mut self, value: bool) -> io::Result<()> {
        self.op(if value { opcode::NEWTRUE } else { opcode::NEWFALSE })
    }

    pub fn float(&mut self, value: f64) -> io::Result<()> {
        self.op(opcode::BINFLOAT)?;
        self.out.write_all(&value.to_be_bytes())
    }

    pub fn unsigned(&mut self, value: u64) -> io::Result<()> {
        self.int(i128::from(value))
    }

    pub fn signed(&mut self, value: i64) -> io::Result<()> {
        self.int(i128::from(value))
    }

    fn int(&mut self, value: i128) -> io::Result<()> {
        if let Ok(byte) = u8::try_from(value) {
            return self.out.write_all(&[opcode::BININT1, byte]);
        }
        if let Ok(two) = u16::try_from(value) {
            let [low, high] = two.to_le_bytes();
            return self.out.write_all(&[opcode::BININT2, low, high]);
        }
        if let Ok(four) = i32::try_from(value) {
            return self.with_number(opcode::BININT, four.cast_unsigned());
        }
        // The fewest bytes that hold the value and its sign bit.
        let bytes = value.to_le_bytes();
        let spare = if value < 0 { value.leading_ones() } else { value.leading_zeros() } - 1;
        let len = bytes.len() - (spare / 8) as usize;
        self.out.write_all(&[opcode::LONG1, len as u8])?;
        self.out.write_all(&bytes[..len])
    }

    // --- containers ---

    pub fn empty_list(&mut self) -> io::Result<()> {
        self.op(opcode::EMPTY_LIST)
    }

    /// Appends the value on top to the list below it. One at a time, because the viewer in the
    /// browser passes the items of a batch as arguments, whose number is limited.
    pub fn append(&mut self) -> io::Result<()> {
        self.op(opcode::APPEND)
    }

    pub fn empty_dict(&mut self) -> io::Result<()> {
        self.op(opcode::EMPTY_DICT)
    }

    /// Begins a dict. Keys and values follow in turn.
    pub fn begin_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[opcode::EMPTY_DICT, opcode::MARK])
    }

    /// Ends a dict that has at least one key.
    pub fn end_dict(&mut self) -> io::Result<()> {
        self.op(opcode::SETITEMS)
    }

    /// Makes a pair of the two values on top.
    pub fn pair(&mut self) -> io::Result<()> {
        self.op(opcode::TUPLE2)
    }

    // --- sharing ---

    /// Memoizes the value on top and returns its number.
    pub fn memoize(&mut self) -> io::Result<Memo> {
        let memo = Memo(self.memos);
        self.memos = memo.0.checked_add(1).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "more than 2^32 texts, frames and stacks")
        })?;
        self.op(opcode::MEMOIZE)?;
        Ok(memo)
    }

    /// Pushes the memoized object itself, not a copy.
    pub fn get(&mut self, memo: Memo) -> io::Result<()> {
        match u8::try_from(memo.0) {
            Ok(number) => self.out.write_all(&[opcode::BINGET, number]),
            Err(_) => self.with_number(opcode::LONG_BINGET, memo.0),
        }
    }

    fn op(&mut self, code: u8) -> io::Result<()> {
        self.out.write_all(&[code])
    }

    fn with_number(&mut self, code: u8, number: u32) -> io::Result<()> {
        let [a, b, c, d] = number.to_le_bytes();
        self.out.write_all(&[code, a, b, c, d])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(
        write: impl FnOnce(&mut Pickler<'static, &mut Vec<u8>>) -> io::Result<()>,
    ) -> Vec<u8> {
        let mut out = Vec::new();
        let mut pickler = Pickler::new(&mut out).unwrap();
        write(&mut pickler).unwrap();
        pickler.finish().unwrap();
        out[2..out.len() - 1].to_vec()
    }

    #[test]
    fn integers_take_the_bytes_that_python_takes() {
        // What Python's pickle.dumps(value, 4) writes between the protocol and the stop.
        for (value, bytes) in [
            (0, &b"K\x00"[..]),
            (255, b"K\xff"),
            (256, b"M\x00\x01"),
            (65_536, b"J\x00\x00\x01\x00"),
            (-1, b"J\xff\xff\xff\xff"),
            (1 << 31, b"\x8a\x05\x00\x00\x00\x80\x00"),
            (0x7f2e_4000_0000, b"\x8a\x06\x00\x00\x00\x40\x2e\x7f"),
            (-(1 << 31) - 1, b"\x8a\x05\xff\xff\xff\x7f\xff"),
            (i64::MIN, b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"),
        ] {
            assert_eq!(written(|pickler| pickler.signed(value)), bytes, "{value}");
        }
        let most = written(|pickler| pickler.unsigned(u64::MAX));
        assert_eq!(most, b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00");
    }

    #[test]
    fn a_text_is_written_once() {
        let bytes = written(|pickler| {
            pickler.empty_list()?;
            for text in ["ab", "c", "ab"] {
                pickler.text(text)?;
                pickler.append()?;
            }
            Ok(())
        });
        assert_eq!(bytes, b"]\x8c\x02ab\x94a\x8c\x01c\x94ah\x00a");
    }
}
