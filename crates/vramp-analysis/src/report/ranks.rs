//! The comparison of several recordings of one job.

use vramp::Bytes;

use super::page::{Cell, Part, Table, Tone};

/// Returns a row for each part: peak, failure, and the categories at the failure or else at the peak.
pub(super) fn comparison(parts: &[Part]) -> Table {
    let mut columns: Vec<String> =
        ["recording", "peak allocated", "peak reserved", "at failure", "requested"]
            .map(str::to_owned)
            .to_vec();
    let categories =
        parts.first().map(|part| part.data.head.categories.clone()).unwrap_or_default();
    // A category without bytes in every part is left out.
    let split = |part: &Part| -> Vec<u64> {
        let head = &part.data.head;
        head.failure().map_or(&head.peak_categories, |failure| &failure.categories).clone()
    };
    let splits: Vec<Vec<u64>> = parts.iter().map(split).collect();
    let used: Vec<usize> = (0..categories.len())
        .filter(|&category| {
            splits.iter().any(|split| split.get(category).is_some_and(|&bytes| bytes > 0))
        })
        .collect();
    columns.extend(used.iter().map(|&category| categories[category].to_owned()));
    let largest = parts.iter().map(|part| part.data.head.peak_bytes).max();
    let rows = parts.iter().zip(&splits).map(|(part, split)| {
        let head = &part.data.head;
        let recorded = head.curves.iter().find(|curve| curve.kind == "recorded");
        let failure = head.failure();
        let mut row = vec![Cell::text(&part.name), bytes(head.peak_bytes)];
        if parts.len() > 1 && Some(head.peak_bytes) == largest {
            row[1].tone = Tone::Bad;
        }
        row.push(recorded.map_or_else(|| Cell::text("not recorded"), |curve| bytes(curve.most)));
        row.push(failure.map_or_else(|| Cell::text("no failure"), |failure| bytes(failure.live)));
        row.push(failure.map_or_else(|| Cell::text(""), |failure| bytes(failure.size)));
        row.extend(used.iter().map(|&category| bytes(split.get(category).copied().unwrap_or(0))));
        row
    });
    Table {
        title: "By recording".to_owned(),
        note:
            "The categories are those at the failure that the verdict is about, or at the peak of a recording without \
               one. The largest peak is marked."
                .to_owned(),
        rows: rows.collect(),
        columns,
    }
}

fn bytes(count: u64) -> Cell {
    Cell::number(count as f64, Bytes::new(count).to_string())
}
