//! The list of what is kept.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::sharing::kept::{CurrentStatus, EntryStatus, HolderStatus, Lock};

/// One name.
#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    /// Null while there is only a draft.
    #[serde(flatten)]
    current: Option<Current<'a>>,
    holders: Vec<Holder>,
    waiting: u64,
    draft_pid: Option<u32>,
    superseded: u64,
}

/// The memory that an open returns.
#[derive(Serialize)]
struct Current<'a> {
    device: &'a str,
    bytes: u64,
    epoch: u64,
    state: &'static str,
    idle_s: Option<f64>,
    priority: i32,
}

/// One process that has it open.
#[derive(Serialize)]
struct Holder {
    pid: u32,
    lock: &'static str,
}

fn lock_name(lock: Lock) -> &'static str {
    match lock {
        Lock::None => "none",
        Lock::Read => "read",
        Lock::Write => "write",
    }
}

impl<'a> Row<'a> {
    fn of(entry: &'a EntryStatus) -> Row<'a> {
        let holders = entry.current.iter().flat_map(|current| &current.holders);
        let holder = |of: &HolderStatus| Holder { pid: of.pid, lock: lock_name(of.lock) };
        let current = |of: &'a CurrentStatus| Current {
            device: &of.device,
            bytes: of.bytes,
            epoch: of.epoch,
            state: state_name(of),
            idle_s: of.idle.map(|idle| idle.as_secs_f64()),
            priority: of.priority,
        };
        Row {
            name: &entry.name,
            current: entry.current.as_ref().map(current),
            holders: holders.map(holder).collect(),
            waiting: entry.waiting,
            draft_pid: entry.draft_pid,
            superseded: entry.superseded,
        }
    }

    /// Returns who has it open, in words.
    fn use_text(&self) -> String {
        let mut parts: Vec<String> = self
            .holders
            .iter()
            .map(|holder| match holder.lock {
                "none" => holder.pid.to_string(),
                lock => format!("{} ({lock})", holder.pid),
            })
            .collect();
        parts.extend(self.draft_pid.map(|pid| format!("{pid} (draft)")));
        if self.waiting > 0 {
            parts.push(format!("{} waiting", self.waiting));
        }
        if self.superseded > 0 {
            parts.push(format!("{} older open", self.superseded));
        }
        let idle = self.current.as_ref().and_then(|current| current.idle_s);
        match (parts.is_empty(), idle) {
            (true, Some(idle)) => format!("idle for {idle:.0} s"),
            _ => parts.join(", "),
        }
    }
}

fn state_name(of: &CurrentStatus) -> &'static str {
    match of.holders.iter().any(|holder| holder.lock == Lock::Write) {
        true => "writing",
        false if of.is_torn => "torn",
        false => "whole",
    }
}

pub(super) fn write(entries: &[EntryStatus], json: bool, out: &mut dyn Write) -> Result<()> {
    if json {
        for entry in entries {
            serde_json::to_writer(&mut *out, &Row::of(entry))?;
            writeln!(out)?;
        }
        return Ok(());
    }
    if entries.is_empty() {
        return Ok(writeln!(out, "nothing is kept")?);
    }
    let rows: Vec<Row<'_>> = entries.iter().map(Row::of).collect();
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(4);
    writeln!(out, "{:width$}  {:>11}  {:>7}  {:8}  used by", "name", "memory", "epoch", "state")?;
    for row in &rows {
        let (name, used) = (row.name, row.use_text());
        let (memory, epoch, state) = match &row.current {
            Some(of) => (Bytes::new(of.bytes).to_string(), of.epoch, of.state),
            None => ("-".to_owned(), 0, "draft"),
        };
        writeln!(out, "{name:width$}  {memory:>11}  {epoch:>7}  {state:8}  {used}")?;
    }
    Ok(())
}
