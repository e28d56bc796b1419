//! Streams on paper: what was queued where, what is over, and what is ordered before what.

use vramp_core::{Epoch, Mark, StreamId};

/// Something queued: the `number`-th thing on its stream, from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    stream: usize,
    number: usize,
}

/// For each stream, up to which number its things are ordered before this point.
type Clock = Vec<usize>;

#[derive(Clone, Debug)]
enum Item {
    Work,
    /// A point that others can wait for; the pool's events carry their epoch.
    Event {
        epoch: Option<Epoch>,
        clock: Clock,
    },
    Wait {
        on: Work,
    },
}

#[derive(Clone, Debug, Default)]
struct Queue {
    items: Vec<Item>,
    /// How many items are over.
    over: usize,
    clock: Clock,
}

/// All streams.
#[derive(Clone, Debug, Default)]
pub struct Queues(Vec<Queue>);

impl Queues {
    /// Makes room for one more stream.
    pub fn add(&mut self) {
        self.0.push(Queue::default());
        let count = self.0.len();
        self.0.iter_mut().for_each(|queue| queue.clock.resize(count, 0));
    }

    pub fn work(&mut self, stream: StreamId) -> Work {
        self.push(stream.index(), Item::Work)
    }

    /// Records the pool's event.
    pub fn record(&mut self, mark: Mark) {
        let last = self.epochs(mark.stream.index()).last();
        assert!(last.is_none_or(|(_, epoch)| epoch < mark.epoch), "{mark:?} comes too late");
        self.event(mark.stream.index(), Some(mark.epoch));
    }

    /// Lets a stream wait for the first of the pool's events that covers `on`.
    pub fn wait_for_mark(&mut self, stream: StreamId, on: Mark) {
        let covering = self.epochs(on.stream.index()).find(|&(_, epoch)| epoch >= on.epoch);
        let (number, _) = covering.unwrap_or_else(|| panic!("{on:?} was never recorded"));
        self.wait(stream.index(), Work { stream: on.stream.index(), number });
    }

    /// The program's own order, of which the pool hears nothing: what is queued on `stream` from
    /// now on comes after everything queued on `before`.
    pub fn order(&mut self, stream: StreamId, before: StreamId) {
        if stream != before {
            let on = self.event(before.index(), None);
            self.wait(stream.index(), on);
        }
    }

    /// Lets at most `most` items of the stream end, as far as waits allow. True if one did.
    pub fn advance(&mut self, stream: StreamId, most: usize) -> bool {
        let stream = stream.index();
        let before = self.0[stream].over;
        for _ in 0..most {
            match self.0[stream].items.get(self.0[stream].over) {
                Some(&Item::Wait { on }) if !self.is_over(on) => break,
                Some(_) => self.0[stream].over += 1,
                None => break,
            }
        }
        self.0[stream].over > before
    }

    /// The last of the pool's events on this stream that is over, up to `last`.
    pub fn reached(&self, last: Mark) -> Option<Mark> {
        let stream = last.stream.index();
        let over = self.epochs(stream).filter(|&(number, _)| number <= self.0[stream].over);
        let (_, epoch) = over.last()?;
        Some(Mark { epoch: epoch.min(last.epoch), ..last })
    }

    /// How many waits were put on streams so far.
    pub fn waits(&self) -> usize {
        let items = self.0.iter().flat_map(|queue| &queue.items);
        items.filter(|item| matches!(item, Item::Wait { .. })).count()
    }

    pub fn is_over(&self, work: Work) -> bool {
        work.number <= self.0[work.stream].over
    }

    /// True if what is queued on `stream` next runs after `work`.
    pub fn is_ordered(&self, stream: StreamId, work: Work) -> bool {
        self.is_over(work) || work.number <= self.0[stream.index()].clock[work.stream]
    }

    fn push(&mut self, stream: usize, item: Item) -> Work {
        let queue = &mut self.0[stream];
        queue.items.push(item);
        let number = queue.items.len();
        queue.clock[stream] = number;
        Work { stream, number }
    }

    fn event(&mut self, stream: usize, epoch: Option<Epoch>) -> Work {
        let mut clock = self.0[stream].clock.clone();
        clock[stream] += 1;
        self.push(stream, Item::Event { epoch, clock })
    }

    fn wait(&mut self, stream: usize, on: Work) {
        let Item::Event { clock, .. } = self.0[on.stream].items[on.number - 1].clone() else {
            panic!("{on:?} is no event");
        };
        self.push(stream, Item::Wait { on });
        for (own, before) in self.0[stream].clock.iter_mut().zip(clock) {
            *own = before.max(*own);
        }
    }

    /// The pool's events on a stream: number and epoch.
    fn epochs(&self, stream: usize) -> impl Iterator<Item = (usize, Epoch)> {
        (1..).zip(&self.0[stream].items).filter_map(|(number, item)| match item {
            Item::Event { epoch: Some(epoch), .. } => Some((number, *epoch)),
            _ => None,
        })
    }
}
