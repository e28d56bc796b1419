//! `cargo xtask charts`: the charts of the pages, drawn from the results in `bench/results`.
//!
//! A chart is one SVG with horizontal bars that follows the reader's light or dark colours. The
//! same results always give the same text, so `cargo xtask tidy` finds a chart that is out of date.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// Where the charts are, relative to the root.
const FOLDER: &str = "docs/charts";

const GIB: f64 = (1_u64 << 30) as f64;
const WIDTH: f64 = 760.0;
const LABELS: f64 = 140.0;
const NUMBERS: f64 = 60.0;
const BAR: f64 = 14.0;
const GAP: f64 = 14.0;
const TOP: f64 = 62.0;

/// One bar: its series, its length in the chart's unit, and the number beside it.
struct Bar {
    series: usize,
    value: f64,
    number: String,
}

/// Bars side by side under one label, with a line across them where `mark` is.
struct Group {
    label: String,
    bars: Vec<Bar>,
    mark: Option<f64>,
}

struct Chart {
    title: &'static str,
    series: &'static [&'static str],
    /// What the line across the bars means.
    mark: Option<&'static str>,
    groups: Vec<Group>,
}

/// Draws every chart anew.
pub fn write(root: &Path) -> Result<()> {
    fs::create_dir_all(root.join(FOLDER))?;
    for (name, svg) in draw(root)? {
        let path = root.join(FOLDER).join(name);
        fs::write(&path, svg)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// The charts that differ from what the results give, each as a path with what to do.
pub fn differences(root: &Path) -> Result<Vec<(String, String)>> {
    let drawn = draw(root)?.into_iter().filter_map(|(name, svg)| {
        let path = format!("{FOLDER}/{name}");
        let same = fs::read_to_string(root.join(&path)).is_ok_and(|text| text == svg);
        (!same).then(|| (path, "differs from bench/results: run `cargo xtask charts`".to_owned()))
    });
    Ok(drawn.collect())
}

fn draw(root: &Path) -> Result<Vec<(&'static str, String)>> {
    let replays = results(root, "h200-replay.jsonl")?;
    let peers = results(root, "h200-peers.jsonl")?;
    Ok(vec![
        ("reserved.svg", svg(&reserved(&replays)?)),
        ("driver-time.svg", svg(&driver_time(&replays)?)),
        ("threads.svg", svg(&threads(&peers)?)),
    ])
}

/// The objects of a file of results, one a line.
fn results(root: &Path, name: &str) -> Result<Vec<Value>> {
    let path = root.join("bench/results").join(name);
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("{name}: not JSON")))
        .collect()
}

/// Recorded jobs in the order in which they are drawn.
const JOBS: [&str; 5] =
    ["gnn", "llama_lora_ckpt", "llama_generate", "llama_varlen", "resnet_multires"];

/// A number of one replay on the card.
fn replayed(results: &[Value], job: &str, allocator: &str, field: &str) -> Result<f64> {
    let row = results.iter().find(|row| {
        row["trace"] == job && row["allocator"] == allocator && row["device"] == "cuda:0"
    });
    row.and_then(|row| row[field].as_f64())
        .with_context(|| format!("no {field} of {job} on {allocator} in the results"))
}

fn reserved(results: &[Value]) -> Result<Chart> {
    let allocators = ["torch", "torch-expandable", "vramp"];
    let groups = JOBS.iter().map(|job| {
        let bars = allocators.iter().enumerate().map(|(series, allocator)| {
            let value = replayed(results, job, allocator, "peak_reserved_bytes")? / GIB;
            Ok(Bar { series, value, number: format!("{value:.1}") })
        });
        let mark = replayed(results, job, "vramp", "peak_live_bytes")? / GIB;
        Ok(Group { label: (*job).to_owned(), bars: bars.collect::<Result<_>>()?, mark: Some(mark) })
    });
    Ok(Chart {
        title: "Peak GPU memory reserved for a recorded job, GiB (one H200)",
        series: &["PyTorch", "PyTorch, expandable segments", "vramp"],
        mark: Some("peak allocated by the job"),
        groups: groups.collect::<Result<_>>()?,
    })
}

fn driver_time(results: &[Value]) -> Result<Chart> {
    let groups = JOBS.iter().map(|job| {
        let bars = ["vpmm", "vramp"].iter().enumerate().map(|(series, allocator)| {
            let value = replayed(results, job, allocator, "driver_ms")?;
            Ok(Bar { series, value, number: format!("{value:.0}") })
        });
        Ok(Group { label: (*job).to_owned(), bars: bars.collect::<Result<_>>()?, mark: None })
    });
    Ok(Chart {
        title: "Time in driver calls for a whole recorded job, ms (one H200)",
        series: &["VPMM's pool, 2 MiB pages", "vramp"],
        mark: None,
        groups: groups.collect::<Result<_>>()?,
    })
}

fn threads(results: &[Value]) -> Result<Chart> {
    let backends =
        ["torch[native]", "torch[native,expandable_segments:True]", "cudaMallocAsync", "vramp"];
    let groups = [1, 4, 16].iter().map(|&threads| {
        let bars = backends.iter().enumerate().map(|(series, backend)| {
            let row = results.iter().find(|row| {
                row["kind"] == "threads" && row["backend"] == *backend && row["threads"] == threads
            });
            let value = row.and_then(|row| row["mpairs_s"].as_f64());
            let value = value.with_context(|| format!("no {threads} threads of {backend}"))?;
            Ok(Bar { series, value, number: format!("{value:.1}") })
        });
        let label = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
        Ok(Group { label, bars: bars.collect::<Result<_>>()?, mark: None })
    });
    Ok(Chart {
        title: "Million malloc/free pairs a second, a stream for each thread (one H200)",
        series: &["PyTorch", "PyTorch, expandable segments", "cudaMallocAsync", "vramp"],
        mark: None,
        groups: groups.collect::<Result<_>>()?,
    })
}

/// Colours of the series, light and dark. The last series of a chart, vramp, has the accent.
const STYLE: &str = "
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 15px }
  .number { font-size: 12px; fill: #59636e }
  .s0 { fill: #8c959f } .s1 { fill: #afb8c1 } .s2 { fill: #d0d7de } .own { fill: #1a7f37 }
  .mark { stroke: #cf222e; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .number { fill: #9198a1 }
    .s0 { fill: #6e7681 } .s1 { fill: #484f58 } .s2 { fill: #30363d } .own { fill: #3fb950 }
    .mark { stroke: #ff7b72 }
  }
";

fn svg(chart: &Chart) -> String {
    let last = chart.series.len() - 1;
    let class = |series: usize| match series == last {
        true => "own".to_owned(),
        false => format!("s{series}"),
    };
    let values = || chart.groups.iter().flat_map(|group| group.bars.iter().map(|bar| bar.value));
    let longest = values().fold(0.0_f64, f64::max);
    let scale = (WIDTH - LABELS - NUMBERS) / longest;
    let mut body = String::new();
    let mut y = TOP;
    for group in &chart.groups {
        let height = group.bars.len() as f64 * BAR;
        text(&mut body, LABELS - 10.0, y + height / 2.0 + 4.0, "end", "", &group.label);
        for (nth, bar) in group.bars.iter().enumerate() {
            let (top, width) = (y + nth as f64 * BAR, bar.value * scale);
            let class = class(bar.series);
            rect(&mut body, (LABELS, top + 1.0), (width.max(1.0), BAR - 2.0), &class);
            text(&mut body, LABELS + width + 5.0, top + 11.0, "start", "number", &bar.number);
        }
        if let Some(mark) = group.mark {
            let (x, end) = (LABELS + mark * scale, y + height + 2.0);
            let line = format!("x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{end:.1}\"", y - 2.0);
            let _ = writeln!(body, "<line class=\"mark\" {line}/>");
        }
        y += height + GAP;
    }
    let mut head = String::new();
    text(&mut head, 0.0, 18.0, "start", "title", chart.title);
    let mut x = 0.0;
    for (series, name) in chart.series.iter().enumerate() {
        rect(&mut head, (x, 34.0), (12.0, 12.0), &class(series));
        text(&mut head, x + 18.0, 44.0, "start", "", name);
        x += 18.0 + name.len() as f64 * 7.4 + 18.0;
    }
    if let Some(name) = chart.mark {
        let line = format!("x1=\"{x:.1}\" y1=\"33\" x2=\"{x:.1}\" y2=\"47\"");
        let _ = writeln!(head, "<line class=\"mark\" {line}/>");
        text(&mut head, x + 8.0, 44.0, "start", "", name);
    }
    let title = chart.title;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" role=\"img\" \
         aria-label=\"{title}\">\n<style>{STYLE}</style>\n{head}{body}</svg>\n"
    )
}

fn rect(out: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), class: &str) {
    let place = format!("x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"");
    let _ = writeln!(out, "<rect class=\"{class}\" {place}/>");
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, class: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let place = format!("x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"");
    let _ = writeln!(out, "<text class=\"{class}\" {place}>{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values_and_the_longest_fills_the_chart() {
        let bar = |series, value| Bar { series, value, number: format!("{value}") };
        let group =
            Group { label: "a<b".into(), bars: vec![bar(0, 50.0), bar(1, 100.0)], mark: None };
        let chart = Chart { title: "t", series: &["x", "y"], mark: None, groups: vec![group] };
        let svg = svg(&chart);
        let full = WIDTH - LABELS - NUMBERS;
        assert!(svg.contains(&format!("width=\"{full:.1}\"")), "{svg}");
        assert!(svg.contains(&format!("width=\"{:.1}\"", full / 2.0)), "{svg}");
        assert!(svg.contains("a&lt;b"), "{svg}");
    }

    #[test]
    fn a_result_that_is_absent_is_named() {
        let error = replayed(&[], "gnn", "vramp", "driver_ms").unwrap_err();
        assert_eq!(error.to_string(), "no driver_ms of gnn on vramp in the results");
    }
}
