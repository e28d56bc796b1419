//! The values of a pickle that is being read.
//!
//! Containers are stored in one arena and referred to by index, so a shared container is never
//! copied. Once a container is converted it is replaced by its result (a stack, a frame) or by
//! nothing, and its contents are freed: the events are never in memory twice.

use indexmap::IndexSet;

use crate::formats::memory::{ENTRY, Meter};
use crate::{ReadError, ReadLimits, StackId};

/// Id of a text, see [`Values::text`]. The first ids are the keys of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextId(pub u32);

/// Index of a container in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId(u32);

/// A value on the stack of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// From 2^63 to 2^64 - 1.
    Big(u64),
    /// An integer of more than 64 bits.
    Huge,
    Float(f64),
    Text(TextId),
    Node(NodeId),
    /// Bytes and sets. No field that is read has them, so their contents are skipped.
    Opaque,
}

const _: () = assert!(size_of::<Value>() <= 16);

/// A container or its result.
#[derive(Clone, Debug)]
pub enum Node {
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// Keys and values in turn.
    Dict(Vec<Value>),
    /// The list under `device_traces`: the histories of all devices.
    Histories(Vec<Value>),
    /// A list in it. Its events go directly into the trace.
    History {
        device: u32,
        events: u32,
    },
    /// A converted list of frames.
    Stack(StackId),
    /// A converted frame.
    Frame(u32),
    /// A container whose contents were taken.
    Taken,
}

const _: () = assert!(size_of::<Node>() <= 32);

/// The texts. Each is stored once.
pub struct Texts(IndexSet<Box<str>>);

impl Texts {
    pub fn get(&self, id: TextId) -> &str {
        &self.0[id.0 as usize]
    }
}

/// The arena, the texts, the memo and their memory use.
pub struct Values {
    pub nodes: Vec<Node>,
    texts: Texts,
    memo: Vec<Option<Value>>,
    spare: Vec<Vec<Value>>,
    /// Containers below this index may be referred to from anywhere. See [`Values::forget_from`].
    pinned: u32,
    /// The oldest container that items were added to since the last event was converted.
    oldest_extended: u32,
    pub meter: Meter,
}

pub const VALUE: usize = size_of::<Value>();
/// Largest gap between memo numbers. `pickletools.optimize` leaves gaps.
const MEMO_GAP: usize = 1 << 16;

impl Values {
    /// Returns an empty arena in which `keys` are the first texts, in order.
    pub fn new(keys: impl Iterator<Item = &'static str>, limits: &ReadLimits) -> Values {
        Values {
            nodes: Vec::new(),
            texts: Texts(keys.map(Box::from).collect()),
            memo: Vec::new(),
            spare: Vec::new(),
            pinned: 0,
            oldest_extended: u32::MAX,
            meter: Meter::new(limits),
        }
    }

    pub fn text(&self, id: TextId) -> &str {
        self.texts.get(id)
    }

    /// Returns the texts and the meter, which are borrowed apart.
    pub fn texts_and_meter(&mut self) -> (&Texts, &mut Meter) {
        (&self.texts, &mut self.meter)
    }

    pub fn add_text(&mut self, text: &str, offset: u64) -> Result<Value, ReadError> {
        let index = match self.texts.0.get_index_of(text) {
            Some(index) => index,
            None => {
                self.meter.take(text.len() + ENTRY, offset)?;
                self.texts.0.insert_full(text.into()).0
            }
        };
        // The memory limit would have to exceed 200 GiB before the ids run out.
        Ok(Value::Text(TextId(u32::try_from(index).unwrap_or(u32::MAX))))
    }

    /// Adds a container. Its items are counted already.
    pub fn add(&mut self, node: Node, offset: u64) -> Result<Value, ReadError> {
        let id = u32::try_from(self.nodes.len()).map_err(|_| ReadError::Malformed {
            format: crate::Format::Pickle,
            offset,
            what: "more than 2^32 containers",
        })?;
        self.meter.push(&mut self.nodes, node, offset)?;
        Ok(Value::Node(NodeId(id)))
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    /// Takes the contents of a container out of the arena and leaves `rest` in its place. Pass the
    /// contents to [`Values::recycle`] after use.
    pub fn take(&mut self, id: NodeId, rest: Node) -> Node {
        std::mem::replace(self.node_mut(id), rest)
    }

    /// Keeps the capacity of used contents for the next container.
    pub fn recycle(&mut self, mut items: Vec<Value>) {
        self.meter.release(items.capacity() * VALUE);
        if self.spare.len() < 2048 && items.capacity() <= 64 {
            items.clear();
            self.spare.push(items);
        }
    }

    /// Called once the dict `event` was converted and is on the stack no more. Removes it and all
    /// containers that are younger, unless one of them may still be referred to: a memo entry, or an
    /// item of an older container.
    pub fn forget_from(&mut self, event: NodeId) {
        if event.0 >= self.pinned && self.oldest_extended >= event.0 {
            for node in self.nodes.split_off(event.0 as usize) {
                if let Node::List(items) | Node::Tuple(items) | Node::Dict(items) = node {
                    self.recycle(items);
                }
            }
        }
        self.pinned = self.count();
        self.oldest_extended = u32::MAX;
    }

    fn count(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    /// Appends `new` to a list or dict that is being built. Its capacity counts against the memory
    /// limit.
    pub fn extend(
        &mut self,
        id: NodeId,
        new: impl ExactSizeIterator<Item = Value>,
        offset: u64,
    ) -> Result<(), ReadError> {
        self.oldest_extended = self.oldest_extended.min(id.0);
        match &mut self.nodes[id.0 as usize] {
            Node::List(items) | Node::Dict(items) | Node::Histories(items) => {
                if items.capacity() == 0 && new.len() <= 64 {
                    *items = self.spare.pop().unwrap_or_default();
                    self.meter.take(items.capacity() * VALUE, offset)?;
                }
                self.meter.reserve(items, new.len(), offset)?;
                items.extend(new);
                Ok(())
            }
            _ => Err(ReadError::Malformed {
                format: crate::Format::Pickle,
                offset,
                what: "an append to a container that is not a list or was already used",
            }),
        }
    }

    pub fn memoize(&mut self, value: Value, offset: u64) -> Result<(), ReadError> {
        let index = self.memo.len();
        self.put(index, value, offset)
    }

    pub fn put(&mut self, index: usize, value: Value, offset: u64) -> Result<(), ReadError> {
        let len = self.memo.len();
        if index >= len {
            if index - len > MEMO_GAP {
                return Err(ReadError::Malformed {
                    format: crate::Format::Pickle,
                    offset,
                    what: "a memo number far above all earlier ones",
                });
            }
            self.meter.reserve(&mut self.memo, index + 1 - len, offset)?;
            self.memo.resize(index + 1, None);
        }
        if matches!(value, Value::Node(_)) {
            self.pinned = self.count();
        }
        self.memo[index] = Some(value);
        Ok(())
    }

    pub fn get(&self, index: usize) -> Option<Value> {
        self.memo.get(index).copied().flatten()
    }
}
