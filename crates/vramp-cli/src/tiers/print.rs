//! The tables of `vramp tiers`.

use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets};
use vramp::Bytes;

use super::outcome::{Device, Facts, Outcome};

const NOTHING: &str = "-";

pub(super) fn write(out: &mut dyn Write, outcome: &Outcome) -> io::Result<()> {
    if let Some(notice) = &outcome.notice {
        writeln!(out, "{notice}\n")?;
    }
    let tables = [
        (spaces(outcome), 3..7),
        (links(outcome), 4..7),
        (nodes(outcome), 1..3),
        (devices("card", "visible as", &outcome.cards), 0..0),
        (devices("disk", "kind", &outcome.disks), 2..3),
        (devices("network", "state", &outcome.networks), 0..0),
        (paths(outcome), 0..0),
    ];
    for (mut table, numbers) in tables {
        if table.row_count() == 0 {
            continue;
        }
        table.load_preset(presets::NOTHING);
        for column in table.column_iter_mut().skip(numbers.start).take(numbers.len()) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        writeln!(out, "{}\n", table.trim_fmt())?;
    }
    if !outcome.paths.names.is_empty() || outcome.links.iter().any(|link| link.path.is_some()) {
        writeln!(out, "{LEGEND}")?;
    }
    for note in &outcome.notes {
        writeln!(out, "Note: {note}.")?;
    }
    Ok(())
}

const LEGEND: &str = "Paths: PIX one switch, PXB several bridges, PHB the host bridge, NODE the \
    interconnect within one NUMA node, SYS the interconnect between NUMA nodes or unknown. Limits \
    are the maximum PCIe rate, before packet headers.";

fn spaces(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    table.set_header(["space", "memory", "node", "capacity", "limit", "trigger", "stop"]);
    for space in &outcome.spaces {
        let amount = |count| Bytes::new(count).to_string();
        table.add_row([
            space.space.clone(),
            space.what.clone(),
            number(space.node),
            amount(space.capacity_bytes),
            amount(space.limit_bytes),
            amount(space.trigger_bytes),
            amount(space.stop_bytes),
        ]);
    }
    table
}

fn links(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    table.set_header(["from", "to", "path", "link", "limit", "measured", "reverse"]);
    for link in &outcome.links {
        let rate = |bytes: u64| format!("{:.1} GB/s", bytes as f64 / 1e9);
        table.add_row([
            link.from.clone(),
            link.to.clone(),
            text(link.path.as_deref()),
            text(link.link.as_deref()),
            link.bound_bytes_per_s.map_or_else(|| NOTHING.to_owned(), rate),
            link.there_bytes_per_s.map_or_else(|| NOTHING.to_owned(), rate),
            link.back_bytes_per_s.map_or_else(|| NOTHING.to_owned(), rate),
        ]);
    }
    table
}

fn nodes(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    table.set_header(["node", "memory", "free", "CPUs"]);
    for node in &outcome.nodes {
        let cpus = match node.device_memory {
            true => "none (device memory)".to_owned(),
            false => text(node.cpus.as_deref()),
        };
        table.add_row([
            node.node.to_string(),
            bytes(node.memory_bytes),
            bytes(node.free_bytes),
            cpus,
        ]);
    }
    table
}

fn devices(kind: &str, state: &str, devices: &[Device]) -> Table {
    let mut rows = vec![
        [kind, state, "capacity", "address", "node", "link", "link now", "model", "UUID"]
            .map(str::to_owned),
    ];
    for device in devices {
        let (is, capacity, uuid) = facts(&device.facts);
        rows.push([
            device.name.clone(),
            is,
            bytes(capacity),
            text(device.address.as_deref()),
            number(device.node),
            text(device.link.as_deref()),
            text(device.link_now.as_deref()),
            text(device.model.as_deref()),
            text(uuid),
        ]);
    }
    // A column without a value is left out.
    let known = |column: usize| rows[1..].iter().any(|row| row[column] != NOTHING);
    let columns: Vec<usize> = (0..rows[0].len()).filter(|&column| known(column)).collect();
    let mut rows = rows.iter().map(|row| columns.iter().map(|&column| row[column].clone()));
    let mut table = Table::new();
    if let Some(head) = rows.next() {
        table.set_header(head);
    }
    for row in rows {
        table.add_row(row);
    }
    table
}

/// Returns a device's state, its capacity and its UUID.
fn facts(facts: &Facts) -> (String, Option<u64>, Option<&str>) {
    match facts {
        Facts::Card { visible_as, uuid } => {
            (visible_as.clone().unwrap_or_else(|| "hidden".to_owned()), None, uuid.as_deref())
        }
        Facts::Disk { kind, capacity_bytes, mounts } => {
            let kind = match *kind {
                Some("flash") => "SSD",
                Some("plates") => "hard disk",
                kind => kind.unwrap_or("disk"),
            };
            let is = match mounts.as_slice() {
                [] => kind.to_owned(),
                [first] => format!("{kind} at {first}"),
                [first, more @ ..] => format!("{kind} at {first} and {} more", more.len()),
            };
            (is, *capacity_bytes, None)
        }
        Facts::Network { active, addressed, megabits_per_s, rdma } => {
            let mut is = match (active, addressed) {
                (true, true) => "up, with an address",
                (true, false) => "up",
                _ => "down",
            }
            .to_owned();
            if let Some(megabits) = megabits_per_s {
                is = format!("{is}, {} Gb/s", f64::from(*megabits) / 1000.0);
            }
            if !rdma.is_empty() {
                is = format!("{is}, {}", rdma.join(" "));
            }
            (is, None, None)
        }
    }
}

fn paths(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    let names = &outcome.paths.names;
    table.set_header([&["".to_owned()], names.as_slice()].concat());
    for (name, row) in names.iter().zip(&outcome.paths.rows) {
        table.add_row([std::slice::from_ref(name), row.as_slice()].concat());
    }
    table
}

fn text(text: Option<&str>) -> String {
    text.unwrap_or(NOTHING).to_owned()
}

fn number(number: Option<u32>) -> String {
    number.map_or_else(|| NOTHING.to_owned(), |number| number.to_string())
}

fn bytes(count: Option<u64>) -> String {
    count.map_or_else(|| NOTHING.to_owned(), |count| Bytes::new(count).to_string())
}
