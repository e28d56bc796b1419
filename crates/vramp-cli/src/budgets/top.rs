//! `vramp top`: who has what of each card.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::budget::{GroupName, GroupStatus, Member};

use super::args::Top;
use crate::text::{Mark, Text, printable};

/// How long members may take to publish what their memory is used for.
const PUBLISH: Duration = Duration::from_millis(20);

/// Clears the terminal.
const CLEAR: &str = "\x1b[H\x1b[2J";

const NOTHING: &str = "-";

/// One group at one look.
#[derive(Serialize)]
struct Look {
    card: String,
    group: String,
    capacity_bytes: u64,
    /// Claimed or guaranteed, whichever is more.
    counted_bytes: u64,
    free_bytes: u64,
    members: Vec<Row>,
}

/// One member at one look.
#[derive(Serialize)]
struct Row {
    program: String,
    pid: u32,
    is_pid_valid: bool,
    is_stopped: bool,
    priority: u8,
    claimed_bytes: u64,
    guaranteed_bytes: u64,
    limit_bytes: Option<u64>,
    live_bytes: u64,
    cached_bytes: u64,
    parked_bytes: u64,
    asleep_bytes: u64,
    waits_for_bytes: Option<u64>,
    waited_s: Option<f64>,
    /// Change of what is claimed since the last look; null at the first.
    claimed_bytes_per_s: Option<f64>,
    #[serde(skip)]
    id: u64,
}

/// What was claimed at the last look, by member.
#[derive(Default)]
struct Before(HashMap<u64, (u64, Instant)>);

pub(crate) fn run(args: &Top, out: &mut dyn Write) -> Result<()> {
    let is_live = !args.once && (args.json || std::io::stdout().is_terminal());
    let mut before = Before::default();
    loop {
        let looks = look(args, &mut before)?;
        if args.json {
            looks.iter().try_for_each(|look| crate::json::versioned_line(out, look))?;
        } else {
            let clear = if is_live { CLEAR } else { "" };
            write!(out, "{clear}{}", page(&looks, &args.chosen.place()?, &Text::of_stdout()))?;
        }
        out.flush()?;
        if !is_live {
            return Ok(());
        }
        std::thread::sleep(args.interval.saturating_sub(PUBLISH));
    }
}

fn look(args: &Top, before: &mut Before) -> Result<Vec<Look>> {
    let found = args.chosen.open()?;
    for one in &found {
        one.group.refresh()?;
    }
    if !found.is_empty() {
        std::thread::sleep(PUBLISH);
    }
    let mut looks = Vec::new();
    let mut now = Before::default();
    for one in &found {
        let status = one.group.status()?;
        if !status.members.is_empty() {
            looks.push(Look::new(&one.name, &status, before, &mut now));
        }
    }
    *before = now;
    Ok(looks)
}

impl Look {
    fn new(name: &GroupName, status: &GroupStatus, before: &Before, now: &mut Before) -> Look {
        let time = Instant::now();
        let rate = |member: &Member| {
            let (claimed, then) = before.0.get(&member.id)?;
            let change = member.claimed as f64 - *claimed as f64;
            Some(change / time.duration_since(*then).as_secs_f64().max(1e-3))
        };
        let mut members: Vec<Row> =
            status.members.iter().map(|it| Row::new(it, rate(it))).collect();
        members.sort_by_key(|row| (std::cmp::Reverse(row.claimed_bytes), row.pid, row.id));
        now.0.extend(members.iter().map(|row| (row.id, (row.claimed_bytes, time))));
        Look {
            card: name.card.clone(),
            group: name.group.clone(),
            capacity_bytes: status.capacity.unwrap_or(0),
            counted_bytes: status.counted(),
            free_bytes: status.free(),
            members,
        }
    }
}

impl Row {
    fn new(member: &Member, rate: Option<f64>) -> Row {
        Row {
            program: member.program.clone(),
            pid: member.pid,
            is_pid_valid: member.is_pid_valid,
            is_stopped: member.is_stopped,
            priority: member.priority,
            claimed_bytes: member.claimed,
            guaranteed_bytes: member.guaranteed,
            limit_bytes: member.limit,
            live_bytes: member.usage.live,
            cached_bytes: member.usage.cached,
            parked_bytes: member.usage.parked,
            asleep_bytes: member.usage.asleep,
            waits_for_bytes: member.waiting.map(|(bytes, _)| bytes),
            waited_s: member.waiting.map(|(_, waited)| waited.as_secs_f64()),
            claimed_bytes_per_s: rate,
            id: member.id,
        }
    }
}

fn page(looks: &[Look], place: &str, text: &Text) -> String {
    if looks.is_empty() {
        return format!("No process has a budget{}.\n", printable(place));
    }
    let tables: Vec<String> = looks.iter().map(|look| table(look, text)).collect();
    tables.join("\n") + LEGEND
}

const LEGEND: &str =
    "\nClaimed is what a process may use; cached and parked can be given back at once.\n";

fn table(look: &Look, text: &Text) -> String {
    let [capacity, counted, free] =
        [look.capacity_bytes, look.counted_bytes, look.free_bytes].map(Bytes::new);
    let title = format!("{}, group {}", printable(&look.card), printable(&look.group));
    let title = text.strong(title);
    let sums = format!("{counted} of {capacity} claimed or guaranteed, {free} free");
    let bytes = |bytes: u64| match bytes {
        0 => NOTHING.to_owned(),
        bytes => Bytes::new(bytes).to_string(),
    };
    let rows: Vec<Vec<String>> = look
        .members
        .iter()
        .map(|row| {
            let state = if row.is_stopped { " (stopped)" } else { "" };
            let pid = if row.is_pid_valid { row.pid.to_string() } else { format!("({})", row.pid) };
            vec![
                format!("{}{state}", printable(&row.program)),
                pid,
                row.priority.to_string(),
                bytes(row.claimed_bytes),
                bytes(row.guaranteed_bytes),
                row.limit_bytes.map_or_else(|| NOTHING.to_owned(), bytes),
                bytes(row.live_bytes),
                bytes(row.cached_bytes),
                bytes(row.parked_bytes),
                bytes(row.asleep_bytes),
                row.claimed_bytes_per_s.map_or_else(|| NOTHING.to_owned(), rate),
                waiting(row),
            ]
        })
        .collect();
    let optional = ["asleep", "parked", "priority", "limit", "change", "cached", "live"];
    let mark = |at: usize| match look.members.get(at) {
        Some(row) if row.is_stopped || row.waits_for_bytes.is_some() => Mark::Bad,
        _ => Mark::None,
    };
    format!("{title}: {sums}\n{}\n", text.table_without(&optional, &HEAD, &rows, mark))
}

const HEAD: [&str; 12] = [
    "program",
    "PID",
    "priority",
    "claimed",
    "guaranteed",
    "limit",
    "live",
    "cached",
    "parked",
    "asleep",
    "change",
    "waits for",
];

fn waiting(row: &Row) -> String {
    match (row.waits_for_bytes, row.waited_s) {
        (Some(bytes), Some(waited)) => format!("{}, {waited:.1} s", Bytes::new(bytes)),
        _ => NOTHING.to_owned(),
    }
}

fn rate(bytes_per_s: f64) -> String {
    let amount = Bytes::new(bytes_per_s.abs() as u64);
    match amount.is_zero() {
        true => NOTHING.to_owned(),
        false => format!("{}{amount}/s", if bytes_per_s < 0.0 { "-" } else { "+" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_changes_between_two_looks() {
        let member = |id, claimed| Member {
            id,
            program: "chat".to_owned(),
            pid: 7,
            is_pid_valid: true,
            is_stopped: false,
            priority: 0,
            claimed,
            guaranteed: 0,
            limit: None,
            usage: Default::default(),
            waiting: None,
        };
        let status = |members| GroupStatus { capacity: Some(9 << 30), members, is_exact: true };
        let name = GroupName { card: "GPU-1".to_owned(), group: "serving".to_owned() };
        let mut now = Before::default();
        let first =
            Look::new(&name, &status(vec![member(1, 4 << 30)]), &Before::default(), &mut now);
        assert_eq!(first.members[0].claimed_bytes_per_s, None);
        let members = vec![member(1, 2 << 30), member(2, 3 << 30)];
        let second = Look::new(&name, &status(members), &now, &mut Before::default());
        assert_eq!(second.members[0].claimed_bytes_per_s, None, "it is new");
        assert!(second.members[1].claimed_bytes_per_s.is_some_and(|rate| rate < 0.0));
        assert_eq!((second.counted_bytes, second.free_bytes), (5 << 30, 4 << 30));
        let page = page(&[first], "", &Text::plain());
        assert!(page.starts_with("GPU-1, group serving: 4.00 GiB of 9.00 GiB claimed"), "{page}");
        assert_eq!((rate(-3e9), rate(0.0)), ("-2.79 GiB/s".to_owned(), "-".to_owned()));
    }
}
