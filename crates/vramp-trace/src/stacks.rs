//! Call stacks. Each text, frame and stack is stored once.

use std::hash::Hash;

use indexmap::IndexSet;

use crate::StackId;

/// One frame of a call stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Name of the function.
    pub name: &'a str,
    /// Source file.
    pub filename: &'a str,
    /// Line in that file; 0 if unknown.
    pub line: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameKey {
    pub name: u32,
    pub filename: u32,
    pub line: u32,
}

/// All call stacks of a trace. Texts, frames and stacks are interned.
#[derive(Clone, Debug, Default)]
pub struct Stacks {
    pub(crate) texts: IndexSet<Box<str>>,
    pub(crate) frames: IndexSet<FrameKey>,
    pub(crate) stacks: IndexSet<Box<[u32]>>,
    /// Frames of the stack that is being looked up. Kept, so that a lookup allocates no heap
    /// memory.
    scratch: Vec<u32>,
    /// See [`Stacks::bytes`].
    bytes: u64,
}

/// Bytes that a text takes beside its contents, and that a frame of a stack takes: about as much as
/// the tables need for them.
const TEXT_BYTES: u64 = 64;
const FRAME_BYTES: u64 = 16;

impl PartialEq for Stacks {
    /// Compares contents and ids. Equality of the sets alone would ignore the order.
    fn eq(&self, other: &Stacks) -> bool {
        self.texts.iter().eq(&other.texts)
            && self.frames.iter().eq(&other.frames)
            && self.stacks.iter().eq(&other.stacks)
    }
}

impl Stacks {
    /// Returns the number of different stacks.
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// Returns roughly how many bytes of memory all of it takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if there is no stack.
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// Returns the frames of a stack, innermost first. Empty if the id is out of range.
    pub fn frames(&self, stack: StackId) -> impl Iterator<Item = Frame<'_>> {
        self.numbered(stack).map(|(_, frame)| frame)
    }

    /// Returns the frames of a stack, each with its index among all frames.
    pub(crate) fn numbered(&self, stack: StackId) -> impl Iterator<Item = (usize, Frame<'_>)> {
        let frames = self.stacks.get_index(stack.index()).map_or(&[][..], |frames| &frames[..]);
        frames.iter().map(|&frame| (frame as usize, self.frame(frame)))
    }

    fn frame(&self, index: u32) -> Frame<'_> {
        let key = self.frames[index as usize];
        Frame {
            name: &self.texts[key.name as usize],
            filename: &self.texts[key.filename as usize],
            line: key.line,
        }
    }

    /// Interns a stack, innermost frame first. Returns its id, or `None` if all ids are used up.
    pub fn add<'a>(&mut self, frames: impl IntoIterator<Item = Frame<'a>>) -> Option<StackId> {
        self.add_up_to(usize::MAX, frames)
    }

    /// As [`Stacks::add`], but adds no stack if there are `max` already. Allocates heap memory only
    /// for a new stack.
    pub(crate) fn add_up_to<'a>(
        &mut self,
        max: usize,
        frames: impl IntoIterator<Item = Frame<'a>>,
    ) -> Option<StackId> {
        let mut keys = std::mem::take(&mut self.scratch);
        keys.clear();
        let is_full = self.stacks.len() >= max;
        for frame in frames {
            // A stack with a new frame is new too.
            let found = if is_full { self.find_frame(frame) } else { self.add_frame(frame) };
            let Some(key) = found else {
                self.scratch = keys;
                return None;
            };
            keys.push(key);
        }
        let id = match self.stacks.get_index_of(&keys[..]) {
            Some(index) => StackId::from_index(index),
            None if is_full => None,
            None => self.add_keys(Box::from(&keys[..])),
        };
        self.scratch = keys;
        id
    }

    fn find_frame(&self, frame: Frame<'_>) -> Option<u32> {
        let text = |text: &str| u32::try_from(self.texts.get_index_of(text)?).ok();
        let key =
            FrameKey { name: text(frame.name)?, filename: text(frame.filename)?, line: frame.line };
        u32::try_from(self.frames.get_index_of(&key)?).ok()
    }

    pub(crate) fn add_frame(&mut self, frame: Frame<'_>) -> Option<u32> {
        let key = FrameKey {
            name: self.add_text(frame.name)?,
            filename: self.add_text(frame.filename)?,
            line: frame.line,
        };
        index_of(&mut self.frames, key)
    }

    pub(crate) fn add_keys(&mut self, keys: Box<[u32]>) -> Option<StackId> {
        let len = keys.len() as u64;
        let (index, is_new) = self.stacks.insert_full(keys);
        self.bytes += if is_new { FRAME_BYTES * (len + 1) } else { 0 };
        StackId::from_index(index)
    }

    fn add_text(&mut self, text: &str) -> Option<u32> {
        match self.texts.get_index_of(text) {
            Some(index) => u32::try_from(index).ok(),
            None => {
                self.bytes += TEXT_BYTES + text.len() as u64;
                index_of(&mut self.texts, text.into())
            }
        }
    }
}

fn index_of<T: Hash + Eq>(set: &mut IndexSet<T>, value: T) -> Option<u32> {
    u32::try_from(set.insert_full(value).0).ok()
}
