//! The HTML file: the template, filled in one pass.

use std::io::{self, Write};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::columns::{base64, write_base64};
use super::encode::{Encoded, Head, Kept};
use super::svg;
use super::text::{escape, island, plain, shown};
use crate::number::Count;
use crate::remedy::Remedy;

const TEMPLATE: &str = include_str!("assets/page.html");
const SCRIPT: &str = concat!(
    include_str!("assets/vendor/uPlot.iife.min.js"),
    "\n",
    include_str!("assets/vendor/d3-hierarchy.min.js"),
    "\n",
    include_str!("assets/decode.js"),
    "\n",
    include_str!("assets/timeline.js"),
    "\n",
    include_str!("assets/memory.js"),
    "\n",
    include_str!("assets/script.js"),
);
const STYLE: &str =
    concat!(include_str!("assets/vendor/uPlot.min.css"), "\n", include_str!("assets/style.css"));

/// A report of one job, or of the ranks of one job.
#[derive(Debug, Default)]
pub struct Report {
    /// What the page is called.
    pub title: String,
    /// The line below the title, such as the version of the program.
    pub origin: String,
    /// One part for each recorded device.
    pub parts: Vec<Part>,
}

/// One recorded device: what was found, and its data.
#[derive(Debug)]
pub struct Part {
    /// What the part is called where there are several: `rank 3`.
    pub name: String,
    /// What was found, in words, numbers and tables.
    pub findings: Findings,
    /// The recording.
    pub data: Encoded,
}

/// Words, numbers and tables about one recorded device.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// The verdict in a sentence or two.
    pub headline: String,
    /// What contributed, a sentence or two each.
    pub verdict: Vec<String>,
    /// What to do, in the order in which to try it, each list with what it is for.
    pub remedies: Vec<(String, Vec<Remedy>)>,
    /// True if the job failed for lack of memory.
    pub failed: bool,
    /// Key numbers.
    pub figures: Vec<Figure>,
    /// What the recording lacks, one sentence each.
    pub missing: Vec<String>,
    /// Tables that are shown as they are.
    pub tables: Vec<Table>,
    /// Tables for which the script has a better view. Shown without one.
    pub fallback: Vec<Table>,
}

/// A key number.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What it counts: `peak allocated`.
    pub label: String,
    /// The number with its unit.
    pub value: String,
    /// A few words about it. May be empty.
    pub note: String,
}

/// A table that can be sorted by each of its columns.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// The heading.
    pub title: String,
    /// What the table says and how it was found. May be empty.
    pub note: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// The cells of each row, as many as there are columns.
    pub rows: Vec<Vec<Cell>>,
}

/// One cell of a table.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// What it shows.
    pub text: String,
    /// What it is sorted by; `None` for texts, which are sorted by themselves.
    pub number: Option<f64>,
    /// How it stands out.
    pub tone: Tone,
}

/// How a cell stands out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Not at all.
    #[default]
    Plain,
    /// As good.
    Good,
    /// As bad.
    Bad,
}

impl Cell {
    /// Returns a cell with a text.
    pub fn text(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), ..Cell::default() }
    }

    /// Returns a cell with a number and how it is written.
    pub fn number(number: f64, text: impl Into<String>) -> Cell {
        Cell { text: text.into(), number: Some(number), ..Cell::default() }
    }

    /// Returns the cell with a tone.
    #[must_use]
    pub fn toned(self, tone: Tone) -> Cell {
        Cell { tone, ..self }
    }
}

/// What the script reads beside the columns.
#[derive(Serialize)]
struct Data<'a> {
    version: u32,
    parts: Vec<PartData<'a>>,
}

#[derive(Serialize)]
struct PartData<'a> {
    title: String,
    #[serde(flatten)]
    head: &'a Head,
}

impl Report {
    /// Writes the page, which needs no other file and no network.
    ///
    /// Most of it are the columns of the recordings; the rest is about 250 KB, of which the script is 100.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut rest = TEMPLATE;
        while let Some((before, after)) = rest.split_once("{{") {
            let (name, after) = after.split_once("}}").unwrap_or((after, ""));
            out.write_all(before.as_bytes())?;
            self.fill(name, out)?;
            rest = after;
        }
        out.write_all(rest.as_bytes())?;
        out.flush()
    }

    /// Writes what stands in the template's place `name`. What is written is not searched for places.
    fn fill(&self, name: &str, out: &mut dyn Write) -> io::Result<()> {
        match name {
            "policy" => out.write_all(policy().as_bytes()),
            "style" => out.write_all(STYLE.as_bytes()),
            "script" => out.write_all(SCRIPT.as_bytes()),
            "title" => out.write_all(shown(&self.title).as_bytes()),
            "origin" => out.write_all(shown(&self.origin).as_bytes()),
            "ranks" => self.ranks(out),
            "parts" => {
                self.parts.iter().enumerate().try_for_each(|(nth, part)| self.part(nth, part, out))
            }
            "data" => self.data(out),
            "columns" => self.columns(out),
            _ => Ok(()),
        }
    }

    fn data(&self, out: &mut dyn Write) -> io::Result<()> {
        let parts = self
            .parts
            .iter()
            .map(|part| PartData { title: plain(&part.name), head: &part.data.head });
        let data = Data { version: 1, parts: parts.collect() };
        out.write_all(island(&data)?.as_bytes())
    }

    fn columns(&self, out: &mut dyn Write) -> io::Result<()> {
        for (nth, part) in self.parts.iter().enumerate() {
            for (name, bytes) in &part.data.columns {
                write!(out, "<script type=\"text/plain\" id=\"column-{nth}-{name}\">")?;
                write_base64(out, bytes)?;
                writeln!(out, "</script>")?;
            }
        }
        Ok(())
    }

    /// Writes the comparison of several parts.
    fn ranks(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.parts.len() < 2 {
            return Ok(());
        }
        writeln!(out, "<section id=\"ranks\" aria-labelledby=\"ranks-title\">")?;
        writeln!(out, "<h2 id=\"ranks-title\">Comparison of {} recordings</h2>", self.parts.len())?;
        writeln!(out, "<div id=\"ranks-chart\" class=\"chart\"></div>")?;
        table(&super::ranks::comparison(&self.parts), out)?;
        writeln!(out, "</section>")
    }

    fn part(&self, nth: usize, part: &Part, out: &mut dyn Write) -> io::Result<()> {
        let findings = &part.findings;
        writeln!(out, "<article class=\"part\" id=\"part-{nth}\">")?;
        if self.parts.len() > 1 {
            writeln!(out, "<h2>{}</h2>", shown(&part.name))?;
        }
        let tone = if findings.failed { "verdict failed" } else { "verdict" };
        writeln!(out, "<section class=\"{tone}\" aria-label=\"Verdict\">")?;
        writeln!(out, "<p class=\"first\">{}</p>", escape(&sentence_of(&findings.headline)))?;
        for text in &findings.verdict {
            writeln!(out, "<p>{}</p>", escape(&sentence_of(text)))?;
        }
        findings.remedies.iter().try_for_each(|(title, list)| remedies(title, list, out))?;
        writeln!(out, "</section>")?;
        writeln!(out, "<dl class=\"figures\">")?;
        for Figure { label, value, note } in &findings.figures {
            writeln!(
                out,
                "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>",
                shown(label),
                shown(value),
                shown(note)
            )?;
        }
        writeln!(out, "</dl>")?;
        let missing: Vec<String> = findings.missing.iter().cloned().chain(left_out(part)).collect();
        if !missing.is_empty() {
            writeln!(out, "<section class=\"missing\"><h3>What the recording lacks</h3><ul>")?;
            for text in &missing {
                writeln!(out, "<li>{}</li>", escape(&sentence_of(text)))?;
            }
            writeln!(out, "</ul></section>")?;
        }
        writeln!(out, "<div class=\"explorer-place\"></div>")?;
        writeln!(out, "<div class=\"fallback\"><h3>Memory over the run</h3>")?;
        out.write_all(svg::timeline(&part.data, svg::Colours::Page).as_bytes())?;
        for found in &findings.fallback {
            table(found, out)?;
        }
        writeln!(out, "</div>")?;
        for found in &findings.tables {
            table(found, out)?;
        }
        writeln!(out, "</article>")
    }
}

/// Writes what to do, with the lines to paste.
fn remedies(title: &str, remedies: &[Remedy], out: &mut dyn Write) -> io::Result<()> {
    if remedies.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h3>{}</h3>\n<ol class=\"remedies\">", shown(title))?;
    for Remedy { text, code, .. } in remedies {
        writeln!(out, "<li>{}", escape(&sentence_of(text)))?;
        if let Some(code) = code {
            let line = escape(&sentence_of(code));
            writeln!(out, "<div class=\"paste\"><pre tabindex=\"0\">{line}</pre></div>")?;
        }
        writeln!(out, "</li>")?;
    }
    writeln!(out, "</ol>")
}

/// Longest sentence, in characters.
const SENTENCE_MAX: usize = 4000;

/// A sentence may quote several names of a recording; it is longer than one of them.
fn sentence_of(text: &str) -> String {
    let sentence: String = text.chars().take(SENTENCE_MAX).collect();
    sentence.split_inclusive(' ').map(plain).collect()
}

/// Says what of the recording is not in the page.
fn left_out(part: &Part) -> Vec<String> {
    let head = &part.data.head;
    let mut texts = Vec::new();
    if head.failures_left_out > 0 {
        texts.push(format!(
            "{} failures are left out of this page; it has {}.",
            Count(head.failures_left_out as u64),
            Count(head.failures.len() as u64)
        ));
    }
    if head.marks_left_out > 0 {
        texts.push(format!(
            "{} of the program's annotations are left out of this page; it has the first {}.",
            Count(head.marks_left_out as u64),
            Count(head.marks.len() as u64)
        ));
    }
    if head.time_step > 1 {
        texts.push(format!(
            "The page has the time of every {}th event; those between are interpolated.",
            head.time_step
        ));
    }
    texts.extend(not_kept(part));
    texts
}

fn not_kept(part: &Part) -> Option<String> {
    let head = &part.data.head;
    match part.data.kept() {
        Kept::All => None,
        Kept::FewAddresses => Some(
            "To limit the size of this page, it has addresses only of blocks that were live at the \
             peak, at a failure or at the end. The address map is exact at these moments."
                .to_owned(),
        ),
        Kept::Bins => Some(format!(
            "The recording of {} events is too large for this page. It has only the timeline in {} \
             bins, the peak, the failures and the end. A larger --budget keeps more.",
            Count(head.events as u64),
            head.bins.max.len()
        )),
    }
}

fn table(table: &Table, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "<section class=\"table\"><h3>{}</h3>", shown(&table.title))?;
    if !table.note.is_empty() {
        writeln!(out, "<p class=\"note\">{}</p>", escape(&sentence_of(&table.note)))?;
    }
    if !table.rows.is_empty() {
        writeln!(
            out,
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\"><table class=\"sortable\"><thead><tr>",
            shown(&table.title)
        )?;
        let numeric = |column: usize| {
            table.rows.iter().any(|row| row.get(column).is_some_and(|cell| cell.number.is_some()))
        };
        for (column, name) in table.columns.iter().enumerate() {
            let class = if numeric(column) { " class=\"number\"" } else { "" };
            write!(out, "<th scope=\"col\"{class}>{}</th>", shown(name))?;
        }
        writeln!(out, "</tr></thead><tbody>")?;
        for row in &table.rows {
            write!(out, "<tr>")?;
            for cell in row {
                let tone = match cell.tone {
                    Tone::Plain => "",
                    Tone::Good => "good",
                    Tone::Bad => "bad",
                };
                match cell.number {
                    Some(number) => write!(
                        out,
                        "<td class=\"number {tone}\" data-number=\"{number}\">{}</td>",
                        shown(&cell.text)
                    )?,
                    None => write!(out, "<td class=\"{tone}\">{}</td>", shown(&cell.text))?,
                }
            }
            writeln!(out, "</tr>")?;
        }
        writeln!(out, "</tbody></table></div>")?;
    }
    writeln!(out, "</section>")
}

/// The policy of the page: its own script and style by their hashes, and nothing else.
fn policy() -> String {
    let hash = |text: &str| base64(&Sha256::digest(text.as_bytes()));
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:; base-uri \
         'none'; form-action 'none'",
        hash(SCRIPT),
        hash(STYLE)
    )
}
