//! Runs a pickle on a stack machine that can build plain data and nothing else.

use std::io::Read;

use super::fields::key;
use super::opcode as op;
use super::snapshot::Snapshot;
use super::values::{Node, NodeId, VALUE, Value, Values};
use crate::formats::input::Input;
use crate::{Format, ReadError, ReadLimits, Trace};

/// Reads a snapshot whose first byte is the opcode `PROTO`.
pub fn read<R: Read>(mut input: Input<R>, limits: &ReadLimits) -> Result<Trace, ReadError> {
    input.format = Format::Pickle;
    let mut machine = Machine {
        input,
        values: Values::new(key::all(), limits),
        snapshot: Snapshot::new(limits),
        stack: Vec::new(),
        marks: Vec::new(),
        converted: Vec::new(),
        text: Vec::new(),
        text_max: limits.text.count(),
        depth_max: limits.depth as usize,
    };
    let root = machine.run()?;
    // Reading past the end makes a decompressor verify its checksum.
    machine.input.peek(1)?;
    machine.snapshot.finish(&mut machine.values, root)
}

struct Machine<R> {
    input: Input<R>,
    values: Values,
    snapshot: Snapshot,
    stack: Vec<Value>,
    /// Stack heights of the open `MARK`s.
    marks: Vec<usize>,
    /// Numbers of open `MARK`s above which events were converted already.
    converted: Vec<usize>,
    /// Buffer for one string.
    text: Vec<u8>,
    text_max: u64,
    depth_max: usize,
}

impl<R: Read> Machine<R> {
    /// Runs until `STOP` and returns the top of the stack.
    fn run(&mut self) -> Result<Value, ReadError> {
        loop {
            let code = self.input.byte()?;
            match code {
                op::BINGET => {
                    let index = self.input.byte()?;
                    self.get(usize::from(index))?;
                }
                op::LONG_BINGET => {
                    let index = u32::from_le_bytes(self.input.array()?);
                    self.get(index as usize)?;
                }
                op::MEMOIZE => {
                    let value = self.top()?;
                    self.values.memoize(value, self.input.offset())?;
                }
                op::BINPUT => {
                    let index = self.input.byte()?;
                    self.put(usize::from(index))?;
                }
                op::LONG_BINPUT => {
                    let index = u32::from_le_bytes(self.input.array()?);
                    self.put(index as usize)?;
                }
                op::BININT1 => {
                    let int = self.input.byte()?;
                    self.push(Value::Int(i64::from(int)))?;
                }
                op::BININT2 => {
                    let int = u16::from_le_bytes(self.input.array()?);
                    self.push(Value::Int(i64::from(int)))?;
                }
                op::BININT => {
                    let int = i32::from_le_bytes(self.input.array()?);
                    self.push(Value::Int(i64::from(int)))?;
                }
                op::LONG1 => {
                    let len = self.input.byte()?;
                    self.long(u64::from(len))?;
                }
                op::LONG4 => {
                    let len = self.length4()?;
                    self.long(len)?;
                }
                op::BINFLOAT => {
                    let float = f64::from_be_bytes(self.input.array()?);
                    self.push(Value::Float(float))?;
                }
                op::NONE => self.push(Value::None)?,
                op::NEWTRUE => self.push(Value::Bool(true))?,
                op::NEWFALSE => self.push(Value::Bool(false))?,
                op::SHORT_BINUNICODE | op::SHORT_BINSTRING => {
                    let len = self.input.byte()?;
                    self.read_text(u64::from(len))?;
                }
                op::BINUNICODE | op::BINSTRING => {
                    let len = self.length4()?;
                    self.read_text(len)?;
                }
                op::BINUNICODE8 => {
                    let len = u64::from_le_bytes(self.input.array()?);
                    self.read_text(len)?;
                }
                op::SHORT_BINBYTES => {
                    let len = self.input.byte()?;
                    self.skip_bytes(u64::from(len))?;
                }
                op::BINBYTES => {
                    let len = self.length4()?;
                    self.skip_bytes(len)?;
                }
                op::BINBYTES8 | op::BYTEARRAY8 => {
                    let len = u64::from_le_bytes(self.input.array()?);
                    self.skip_bytes(len)?;
                }
                op::PROTO => {
                    let protocol = self.input.byte()?;
                    if !(2..=5).contains(&protocol) {
                        let offset = self.input.offset() - 1;
                        return Err(ReadError::Protocol { offset, protocol });
                    }
                }
                // Frames are only a hint for prefetching.
                op::FRAME => self.input.array::<8>().map(drop)?,
                op::STOP => return self.pop(),
                code => self.build(code)?,
            }
        }
    }

    /// Runs an opcode that builds a container or rearranges the stack.
    fn build(&mut self, code: u8) -> Result<(), ReadError> {
        match code {
            op::MARK => self.mark()?,
            op::EMPTY_LIST => {
                let node = self.new_list();
                self.push_node(node)?;
            }
            op::EMPTY_DICT => {
                self.convert_event()?;
                self.push_node(Node::Dict(Vec::new()))?;
            }
            op::EMPTY_TUPLE => self.push_node(Node::Tuple(Vec::new()))?,
            op::TUPLE1 => self.tuple(1)?,
            op::TUPLE2 => self.tuple(2)?,
            op::TUPLE3 => self.tuple(3)?,
            op::TUPLE => {
                let items = self.take_to_mark()?;
                self.push_node(Node::Tuple(items))?;
            }
            op::LIST => {
                let items = self.take_to_mark()?;
                self.push_node(Node::List(items))?;
            }
            op::DICT => {
                let items = self.take_to_mark()?;
                self.check_pairs(items.len())?;
                self.convert_event()?;
                self.push_node(Node::Dict(items))?;
            }
            op::APPEND => self.append(self.stack.len().checked_sub(1))?,
            op::APPENDS => {
                if self.converted.last() == Some(&self.marks.len()) {
                    self.converted.pop();
                }
                let from = self.marks.pop();
                self.append(from)?;
            }
            op::SETITEM => self.set_items(self.stack.len().checked_sub(2))?,
            op::SETITEMS => {
                let from = self.marks.pop();
                self.set_items(from)?;
            }
            op::EMPTY_SET => self.push(Value::Opaque)?,
            op::ADDITEMS => {
                self.drop_to_mark()?;
                self.top()?;
            }
            op::FROZENSET => {
                self.drop_to_mark()?;
                self.push(Value::Opaque)?;
            }
            op::POP => self.pop().map(drop)?,
            op::POP_MARK => self.drop_to_mark()?,
            op::DUP => {
                let value = self.top()?;
                self.push(value)?;
            }
            code => return Err(self.refuse(code)),
        }
        Ok(())
    }

    /// Returns the error for an opcode that executes code, is of an old protocol, or is unknown.
    #[cold]
    fn refuse(&self, code: u8) -> ReadError {
        let offset = self.input.offset() - 1;
        match (code, op::name(code)) {
            (op::FLOAT | op::INT | op::LONG | op::STRING | op::UNICODE | op::GET | op::PUT, _) => {
                ReadError::Protocol { offset, protocol: 0 }
            }
            (_, Some(opcode)) => ReadError::Refused { offset, opcode },
            (_, None) => {
                ReadError::Malformed { format: Format::Pickle, offset, what: "an unknown opcode" }
            }
        }
    }

    // --- the stack ---

    /// Pushes a value. Growth of the stack counts against the memory limit.
    fn push(&mut self, value: Value) -> Result<(), ReadError> {
        self.values.meter.push(&mut self.stack, value, self.input.offset())
    }

    fn push_node(&mut self, node: Node) -> Result<(), ReadError> {
        let value = self.values.add(node, self.input.offset())?;
        self.push(value)
    }

    /// Pops a value. The values below the last mark cannot be popped.
    fn pop(&mut self) -> Result<Value, ReadError> {
        if self.marks.last().is_some_and(|&mark| mark == self.stack.len()) {
            return Err(self.input.malformed("a pop below a mark"));
        }
        self.stack.pop().ok_or_else(|| self.input.malformed("a pop from an empty stack"))
    }

    fn top(&self) -> Result<Value, ReadError> {
        self.stack.last().copied().ok_or_else(|| self.input.malformed("a pop from an empty stack"))
    }

    fn mark(&mut self) -> Result<(), ReadError> {
        if self.marks.len() == self.depth_max {
            return Err(ReadError::Limit {
                limit: "depth",
                what: "levels of nesting",
                allowed: self.depth_max as u64,
                offset: self.input.offset(),
            });
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn pop_mark(&mut self) -> Result<usize, ReadError> {
        if self.converted.last() == Some(&self.marks.len()) {
            return Err(self.input.malformed("events that are not appended to their history"));
        }
        self.marks.pop().ok_or_else(|| self.input.malformed("a pop to a missing mark"))
    }

    fn drop_to_mark(&mut self) -> Result<(), ReadError> {
        let mark = self.pop_mark()?;
        self.stack.truncate(mark);
        Ok(())
    }

    fn take_to_mark(&mut self) -> Result<Vec<Value>, ReadError> {
        let mark = self.pop_mark()?;
        self.take_from(mark)
    }

    /// Takes the values from height `from`. They are counted as the items of a container.
    fn take_from(&mut self, from: usize) -> Result<Vec<Value>, ReadError> {
        self.values.meter.take((self.stack.len() - from) * VALUE, self.input.offset())?;
        Ok(self.stack.drain(from..).collect())
    }

    fn tuple(&mut self, len: usize) -> Result<(), ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(len) {
            Some(from) if from >= floor => {
                let items = self.take_from(from)?;
                self.push_node(Node::Tuple(items))
            }
            _ => Err(self.input.malformed("a pop from an empty stack")),
        }
    }

    fn get(&mut self, index: usize) -> Result<(), ReadError> {
        match self.values.get(index) {
            Some(value) => self.push(value),
            None => Err(self.input.malformed("a read of an unset memo entry")),
        }
    }

    fn put(&mut self, index: usize) -> Result<(), ReadError> {
        let value = self.top()?;
        self.values.put(index, value, self.input.offset())
    }

    // --- values ---

    /// Reads a length of four bytes. It is signed in some opcodes, but never negative.
    fn length4(&mut self) -> Result<u64, ReadError> {
        Ok(u64::from(u32::from_le_bytes(self.input.array()?)))
    }

    /// Reads a little-endian two's-complement integer of `len` bytes.
    fn long(&mut self, len: u64) -> Result<(), ReadError> {
        let (mut low, mut at, mut last) = ([0u8; 8], 0, 0);
        // The bytes above 64 bits that are neither of a positive nor of a negative number.
        let (mut not_zero, mut not_ones) = (false, false);
        self.input.consume(len, |piece| {
            for &byte in piece {
                match low.get_mut(at) {
                    Some(place) => *place = byte,
                    None => {
                        not_zero |= byte != 0;
                        not_ones |= byte != 0xff;
                    }
                }
                at = at.saturating_add(1);
                last = byte;
            }
        })?;
        let is_negative = last >= 0x80;
        if is_negative && at < low.len() {
            low[at..].fill(0xff);
        }
        let (int, bits) = (i64::from_le_bytes(low), u64::from_le_bytes(low));
        self.push(match is_negative {
            false if at > low.len() && not_zero => Value::Huge,
            true if at > low.len() && (not_ones || int >= 0) => Value::Huge,
            false if int < 0 => Value::Big(bits),
            _ => Value::Int(int),
        })
    }

    fn read_text(&mut self, len: u64) -> Result<(), ReadError> {
        if len > self.text_max {
            return Err(ReadError::Limit {
                limit: "text",
                what: "bytes in one text",
                allowed: self.text_max,
                offset: self.input.offset(),
            });
        }
        self.text.clear();
        self.input.consume(len, |piece| self.text.extend_from_slice(piece))?;
        // Python writes lone surrogates, which occur in file names, as bytes that are not UTF-8.
        let text = String::from_utf8_lossy(&self.text);
        let value = self.values.add_text(&text, self.input.offset())?;
        self.push(value)
    }

    fn skip_bytes(&mut self, len: u64) -> Result<(), ReadError> {
        self.input.consume(len, |_| ())?;
        self.push(Value::Opaque)
    }

    // --- containers ---

    /// Returns the node for a list that begins here. The stack shows its kind: the value of
    /// `device_traces` in the outermost dict is the list of histories, and each list directly in it
    /// is the history of one device.
    fn new_list(&self) -> Node {
        let top = self.stack.len();
        let at_key = matches!(self.stack.last(), Some(Value::Text(key::DEVICE_TRACES)));
        // In the outermost dict, keys are at odd heights, directly above the dict or its mark.
        if at_key && top.is_multiple_of(2) && matches!(self.marks[..], [] | [1]) {
            return Node::Histories(Vec::new());
        }
        // An item is directly above its list (APPEND) or above the mark on it (APPENDS).
        let parents = [top.checked_sub(1), self.marks.last().and_then(|mark| mark.checked_sub(1))];
        for parent in parents.into_iter().flatten() {
            if let Some(&Value::Node(id)) = self.stack.get(parent)
                && let Node::Histories(items) = self.values.node(id)
            {
                let device = items.len() + (top - 1 - parent);
                return match u32::try_from(device) {
                    Ok(device) => Node::History { device, events: 0 },
                    Err(_) => Node::List(Vec::new()),
                };
            }
        }
        Node::List(Vec::new())
    }

    /// Moves all values from height `from` into the list below them.
    fn append(&mut self, from: Option<usize>) -> Result<(), ReadError> {
        let (from, list) = self.below(from)?;
        match self.values.node(list) {
            Node::History { .. } => self.append_events(list, from),
            Node::Dict(_) => Err(self.input.malformed("an append to a dict")),
            _ => self.values.extend(list, self.stack.drain(from..), self.input.offset()),
        }
    }

    fn append_events(&mut self, history: NodeId, from: usize) -> Result<(), ReadError> {
        let offset = self.input.offset();
        for &event in &self.stack[from..] {
            self.snapshot.event_of_history(&mut self.values, history, event, offset)?;
        }
        if let [Value::Node(event)] = self.stack[from..]
            && event > history
        {
            self.values.forget_from(event);
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Converts the event directly above a mark on a history, before another dict is pushed there.
    /// Some picklers write all events of a history between one `MARK` and one `APPENDS`, and would
    /// fill the memory with their dicts.
    fn convert_event(&mut self) -> Result<(), ReadError> {
        let Some(&mark) = self.marks.last() else { return Ok(()) };
        let Some(below) = mark.checked_sub(1) else { return Ok(()) };
        if let [Value::Node(history), Value::Node(event)] = self.stack[below..]
            && matches!(self.values.node(history), Node::History { .. })
            && matches!(self.values.node(event), Node::Dict(_))
        {
            if self.converted.last() != Some(&self.marks.len()) {
                self.converted.push(self.marks.len());
            }
            self.append_events(history, mark)?;
        }
        Ok(())
    }

    /// Moves all pairs from height `from` into the dict below them.
    fn set_items(&mut self, from: Option<usize>) -> Result<(), ReadError> {
        let (from, dict) = self.below(from)?;
        self.check_pairs(self.stack.len() - from)?;
        if !matches!(self.values.node(dict), Node::Dict(_)) {
            return Err(self.input.malformed("a key set in a value that is not a dict"));
        }
        self.values.extend(dict, self.stack.drain(from..), self.input.offset())
    }

    fn check_pairs(&self, items: usize) -> Result<(), ReadError> {
        if items.is_multiple_of(2) {
            return Ok(());
        }
        Err(self.input.malformed("a key without a value"))
    }

    /// Returns the container directly below height `from`. It must be above the last mark.
    fn below(&self, from: Option<usize>) -> Result<(usize, NodeId), ReadError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let from = from.filter(|&from| from > floor);
        match from.map(|from| (from, self.stack[from - 1])) {
            Some((from, Value::Node(id))) => Ok((from, id)),
            Some(_) => Err(self.input.malformed("an append to a value that is not a list")),
            None => Err(self.input.malformed("an item without a container")),
        }
    }
}
