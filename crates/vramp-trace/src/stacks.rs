//! Call stacks, each text, frame and stack kept once.

use std::hash::Hash;

use indexmap::IndexSet;

use crate::StackId;

/// One line of a call stack, innermost first in its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The function.
    pub name: &'a str,
    /// Its file.
    pub filename: &'a str,
    /// The line in that file; 0 if unknown.
    pub line: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameKey {
    pub name: u32,
    pub filename: u32,
    pub line: u32,
}

/// Every call stack of a trace. Texts, frames and stacks are kept once, however often used.
#[derive(Clone, Debug, Default)]
pub struct Stacks {
    pub(crate) texts: IndexSet<Box<str>>,
    pub(crate) frames: IndexSet<FrameKey>,
    pub(crate) stacks: IndexSet<Box<[u32]>>,
    /// The frames of the stack that is being looked up: kept, so that a known one costs no memory.
    scratch: Vec<u32>,
}

impl PartialEq for Stacks {
    /// Equal contents under equal ids: sets alone would forget the order.
    fn eq(&self, other: &Stacks) -> bool {
        self.texts.iter().eq(&other.texts)
            && self.frames.iter().eq(&other.frames)
            && self.stacks.iter().eq(&other.stacks)
    }
}

impl Stacks {
    /// How many different stacks there are.
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// True if no event recorded who asked.
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// The lines of a stack, innermost first. Empty if the id is of another trace.
    pub fn frames(&self, stack: StackId) -> impl Iterator<Item = Frame<'_>> {
        self.numbered(stack).map(|(_, frame)| frame)
    }

    /// The lines of a stack, each with its number among all frames.
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

    /// The id of the stack with these frames, or `None` if there are more than ids.
    pub fn add<'a>(&mut self, frames: impl IntoIterator<Item = Frame<'a>>) -> Option<StackId> {
        self.add_up_to(usize::MAX, frames)
    }

    /// As [`Stacks::add`], but adds no stack if there are `most` already. Takes heap memory only for
    /// what is new.
    pub(crate) fn add_up_to<'a>(
        &mut self,
        most: usize,
        frames: impl IntoIterator<Item = Frame<'a>>,
    ) -> Option<StackId> {
        let mut keys = std::mem::take(&mut self.scratch);
        keys.clear();
        let is_full = self.stacks.len() >= most;
        for frame in frames {
            // A stack with a frame that is not known is not known either.
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
        StackId::from_index(self.stacks.insert_full(keys).0)
    }

    fn add_text(&mut self, text: &str) -> Option<u32> {
        match self.texts.get_index_of(text) {
            Some(index) => u32::try_from(index).ok(),
            None => index_of(&mut self.texts, text.into()),
        }
    }
}

fn index_of<T: Hash + Eq>(set: &mut IndexSet<T>, value: T) -> Option<u32> {
    u32::try_from(set.insert_full(value).0).ok()
}
