//! Operations of a program, as plain data and as text.
//!
//! Objects have names, numbers that are never used again. An operation whose object does not exist
//! does nothing, so any part of a program is a program. One operation a line, `word field=number`:
//!
//! ```
//! use vramp_check::lifecycle::Op;
//! let op: Op = "malloc pool=0 stream=1 size=4096 block=7".parse().unwrap();
//! assert_eq!(op, Op::Malloc { pool: 0, stream: 1, size: 4096, block: 7 });
//! assert_eq!(op.to_string(), "malloc pool=0 stream=1 size=4096 block=7");
//! ```

use std::fmt;
use std::str::FromStr;

/// A line that is no operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAnOp(pub String);

impl fmt::Display for NotAnOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is no operation of a life-cycle program", self.0)
    }
}

impl std::error::Error for NotAnOp {}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident = $word:literal { $($field:ident),* })*) => {
        /// One operation. Fields are names of objects, amounts in bytes or nanoseconds, and
        /// choices, which [`fmt::Display`] writes as numbers.
        #[allow(missing_docs, reason = "the operation's line describes its fields")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Op {
            $($(#[$doc])* $name { $($field: u64),* },)*
        }

        impl Op {
            /// Words of all operations.
            pub const WORDS: &[&str] = &[$($word),*];

            /// Returns its place in [`Op::WORDS`].
            pub fn kind(&self) -> usize {
                let mut kind = 0;
                $(
                    if matches!(self, Op::$name { .. }) {
                        return kind;
                    }
                    kind += 1;
                )*
                kind
            }
        }

        impl fmt::Display for Op {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Op::$name { $($field),* } => {
                        f.write_str($word)?;
                        $(write!(f, concat!(" ", stringify!($field), "={}"), $field)?;)*
                        Ok(())
                    })*
                }
            }
        }

        impl FromStr for Op {
            type Err = NotAnOp;

            fn from_str(line: &str) -> Result<Op, NotAnOp> {
                let unknown = || NotAnOp(line.to_owned());
                let mut words = line.split_whitespace();
                let word = words.next().ok_or_else(unknown)?;
                let mut fields = Vec::new();
                for field in words {
                    let (name, value) = field.split_once('=').ok_or_else(unknown)?;
                    fields.push((name, value.parse::<u64>().map_err(|_| unknown())?));
                }
                let get = |name: &str| {
                    let found = fields.iter().find(|(known, _)| *known == name);
                    found.map(|&(_, value)| value).ok_or_else(unknown)
                };
                match word {
                    $($word => Ok(Op::$name { $($field: get(stringify!($field))?),* }),)*
                    _ => Err(unknown()),
                }
            }
        }
    };
}

ops! {
    /// Opens an allocator, or a further pool of the group if one is open.
    Open = "open" { pool }
    /// Ends a pool: 0 closes it, 1 drops it, 2 closes it on another thread.
    EndPool = "end-pool" { pool, way }
    /// Creates a stream through a pool.
    Create = "create" { pool, stream }
    /// Creates a stream of the driver and adopts it.
    Adopt = "adopt" { pool, stream }
    /// Destroys a stream through a pool; an adopted one is then destroyed with the driver.
    Destroy = "destroy" { pool, stream }
    /// Allocates a block.
    Malloc = "malloc" { pool, stream, size, block }
    /// Allocates a block under a tag.
    Tagged = "tagged" { pool, stream, size, block }
    /// Queues work on a block after its earlier work: 0 reads, 1 writes, 2 fills, 3 writes until
    /// the gates are opened.
    Work = "work" { block, stream, kind, ns }
    /// Records the use of a block on a stream.
    Use = "use" { block, stream }
    /// Frees a block on a stream, after recording or ordering other streams' work on it: 0 records,
    /// 1 orders, 2 frees on another thread.
    Free = "free" { block, stream, way }
    /// Queues a copy of a block's first and last bytes to the host, which are compared later.
    Look = "look" { block, stream }
    /// Opens the gates, waits for all streams and compares what was copied.
    Sync = "sync" { }
    /// Opens the gates.
    Gates = "gates" { }
    /// Lets time pass.
    Advance = "advance" { ns }
    /// Trims a pool.
    Trim = "trim" { pool, to }
    /// Sets the limit of a group; 0 removes it.
    Limit = "limit" { pool, bytes }
    /// Creates a graph arena: 1 monotone; 1 orders overlapping replays; the mode of its captures.
    Arena = "arena" { pool, arena, monotone, order, mode }
    /// Drops an arena's handle: 1 on another thread.
    DropArena = "drop-arena" { arena, way }
    /// Resets an arena.
    Reset = "reset" { arena }
    /// Begins a capture.
    Begin = "begin" { arena, stream, capture }
    /// Begins a capture with the driver and attaches the arena to it.
    Attach = "attach" { arena, stream, capture, mode }
    /// Orders a stream after a stream of the capture, so that it joins the capture.
    Fork = "fork" { capture, from, stream }
    /// Ends a capture: 1 leaves forked streams out, 2 ends it on another thread.
    End = "end" { capture, way, graph }
    /// Discards a capture: 1 on another thread, 2 by a panic.
    Discard = "discard" { capture, way }
    /// Makes a call that the capture forbids.
    Invalidate = "invalidate" { capture }
    /// Launches a graph.
    Launch = "launch" { graph, stream, lease }
    /// Reads a block of a graph on a stream, under a lease.
    Read = "read" { lease, block, stream, ns }
    /// Ends a lease: 1 on another thread.
    EndLease = "end-lease" { lease, way }
    /// Drops a graph, or the hold of one that was attached.
    DropGraph = "drop-graph" { graph, way }
    /// Reserves a stable range.
    Range = "range" { pool, range, len }
    /// Backs a stable range.
    Back = "back" { range, stream }
    /// Queues work on a stable range.
    WorkRange = "work-range" { range, stream, kind, ns }
    /// Waits for the work on a range and lends its memory.
    Lend = "lend" { range }
    /// Maps host memory behind the first bytes of a lent range; 1 drops the host memory's handle.
    Host = "host" { range, len }
    /// Waits for the work on a range and unmaps its host memory.
    Unhost = "unhost" { range }
    /// Drops a range.
    DropRange = "drop-range" { range, way }
    /// Reserves an arena for caches. The shape is the number of tensors, where they lie, the superpage and whether
    /// there is a limit.
    Cache = "cache" { pool, cache, pages, shape }
    /// Commits pages of an arena for caches: those whose bit is set.
    Commit = "commit" { cache, stream, pages }
    /// Commits pages of the arena's choice.
    Take = "take" { cache, stream, count }
    /// Queues work on committed pages, as on a block; 4 copies their bytes to the host.
    WorkCache = "work-cache" { cache, stream, pages, kind, ns }
    /// Parks pages behind a stream, after ordering other streams' work before it: 1 behind all streams.
    Park = "park" { cache, stream, pages, way }
    /// Returns parked pages to the card.
    Release = "release" { cache, keep }
    /// Drops an arena for caches.
    DropCache = "drop-cache" { cache, way }
    /// Registers an observer: 0 counts, 1 allocates and frees, 2 trims, 3 unregisters itself, 4
    /// panics once.
    Observe = "observe" { pool, observer, kind, stream }
    /// Registers a shortage handler: 0 frees nothing, 1 frees a block, 2 trims, 3 panics once.
    Handle = "handle" { pool, observer, kind, block, stream }
    /// Removes an observer or a handler.
    Unobserve = "unobserve" { observer }
    /// Makes the nth driver call of a kind, and those of it after that, fail with a code: so many. The kind that
    /// follows the last one is any.
    Fault = "fault" { call, nth, code, times }
    /// Cancels a planned failure.
    NoFault = "no-fault" { }
    /// Makes a call that the documentation refuses, and compares the error.
    Misuse = "misuse" { kind, pool, object }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_read_as_it_was_written() {
        let ops = [
            Op::Sync {},
            Op::Malloc { pool: 1, stream: 2, size: 3, block: 4 },
            Op::Launch { graph: 0, stream: u64::MAX, lease: 9 },
        ];
        for op in ops {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        for wrong in ["", "mallow", "malloc pool=1", "sync x", "sync x=y"] {
            assert!(wrong.parse::<Op>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_kind_has_its_word() {
        let op = Op::Misuse { kind: 0, pool: 0, object: 0 };
        assert_eq!(op.kind(), Op::WORDS.len() - 1);
        assert!(op.to_string().starts_with(Op::WORDS[op.kind()]));
    }
}
