//! Text for a person: wrapped to the terminal, with colour where it can be shown.
//!
//! Colours are left out if the output is not a terminal, if `NO_COLOR` is set, or if `TERM` is
//! `dumb`. A text that is not for a terminal is not wrapped, so that `grep` finds whole sentences.

use std::fmt::Display;

use comfy_table::{CellAlignment, Table, presets};
use console::{Style, Term};
use vramp_analysis::remedy::Remedy;

/// Widest text, on a wider terminal too.
const WIDTH_MAX: usize = 120;

/// Returns a text as a terminal can show it in one line: control characters, and marks that change the
/// direction of text, become question marks. They come from names of files and from recordings.
pub(crate) fn printable(text: &str) -> String {
    let is_direction = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if c.is_control() || is_direction(c) { '?' } else { c }).collect()
}

/// Returns the name of a trace for a person.
pub(crate) fn name(trace: &str) -> String {
    if trace.is_empty() { "(no name)".to_owned() } else { printable(trace) }
}

/// Width and colours of the output.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    /// Of paragraphs.
    width: Option<usize>,
    /// Of tables.
    columns: Option<usize>,
    strong: Style,
    good: Style,
    bad: Style,
    weak: Style,
}

impl Text {
    /// Returns what standard output can show.
    pub(crate) fn of_stdout() -> Text {
        let term = Term::stdout();
        let width = term.size_checked().map(|(_, columns)| usize::from(columns));
        let colours = console::colors_enabled();
        Text::new(width, colours)
    }

    fn new(width: Option<usize>, colours: bool) -> Text {
        let style = || Style::new().force_styling(colours);
        Text {
            width: width.map(|width| width.clamp(40, WIDTH_MAX)),
            columns: width,
            strong: style().bold(),
            good: style().green(),
            bad: style().red(),
            weak: style().dim(),
        }
    }

    /// Wraps a paragraph. Lines after the first are indented by `indent` columns.
    pub(crate) fn wrap(&self, text: &str, indent: usize) -> String {
        let Some(width) = self.width else { return text.to_owned() };
        let indent = " ".repeat(indent);
        let options = textwrap::Options::new(width).subsequent_indent(&indent).break_words(false);
        textwrap::fill(text, options)
    }

    /// Returns what to do: a heading, and each remedy with its line to paste below it.
    pub(crate) fn remedies(&self, title: &str, remedies: &[Remedy]) -> String {
        let mut lines = vec![self.strong(title)];
        for remedy in remedies {
            lines.push(self.wrap(&format!("- {}", printable(&remedy.text)), 2));
            // Not wrapped: it is pasted.
            lines.extend(
                remedy.code.as_ref().map(|code| self.good(format!("    {}", printable(code)))),
            );
        }
        lines.join("\n")
    }

    /// Marks a heading.
    pub(crate) fn strong(&self, text: impl Display) -> String {
        self.strong.apply_to(text).to_string()
    }

    /// Marks a good result.
    pub(crate) fn good(&self, text: impl Display) -> String {
        self.good.apply_to(text).to_string()
    }

    /// Marks a bad result.
    pub(crate) fn bad(&self, text: impl Display) -> String {
        self.bad.apply_to(text).to_string()
    }

    /// Marks what may be skipped.
    pub(crate) fn weak(&self, text: impl Display) -> String {
        self.weak.apply_to(text).to_string()
    }

    /// Returns a place in a program that fits into `columns` less than the width. Its function loses its end, then
    /// its path its beginning.
    pub(crate) fn fit(&self, text: &str, columns: usize) -> String {
        let Some(width) = self.width else { return text.to_owned() };
        let room = width.saturating_sub(columns).max(16);
        let Some((place, function)) = text.split_once(' ') else { return shortened(text, room) };
        let left = room.saturating_sub(place.chars().count() + 1);
        match function.chars().count() <= left {
            true => text.to_owned(),
            false if left > 3 => {
                format!("{place} {}...", function.chars().take(left - 3).collect::<String>())
            }
            false => shortened(place, room),
        }
    }

    /// Renders a table whose columns are aligned right, but for those in `left`. Rows are coloured as
    /// `mark` says; a good one begins with an asterisk, which shows without colours too.
    pub(crate) fn table(
        &self,
        head: &[&str],
        rows: &[Vec<String>],
        left: &[usize],
        mark: impl Fn(usize) -> Mark,
    ) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(head.to_vec());
        for row in rows {
            table.add_row(row);
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            if !left.contains(&index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines = table.trim_fmt();
        let lines = lines.lines().enumerate().map(|(index, line)| match index.checked_sub(1) {
            None => self.weak(line),
            Some(row) => match mark(row) {
                // The padding of the first column has room for the mark.
                Mark::Good => self.good(format!("*{}", line.strip_prefix(' ').unwrap_or(line))),
                Mark::Bad => self.bad(line),
                Mark::None => line.to_owned(),
            },
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl Text {
    /// Renders a table as [`Text::table`] does, with the first column aligned left. On a terminal
    /// that is too narrow, the columns of `optional` are left out, the first first, and named below the table. If
    /// that is not enough, names in the first column lose their beginnings.
    pub(crate) fn table_without(
        &self,
        optional: &[&str],
        head: &[&str],
        rows: &[Vec<String>],
        mark: impl Fn(usize) -> Mark,
    ) -> String {
        let mut left_out: Vec<&str> = Vec::new();
        loop {
            let is_kept: Vec<bool> = head.iter().map(|name| !left_out.contains(name)).collect();
            let kept_head: Vec<&str> = only(head, &is_kept);
            let kept_rows: Vec<Vec<String>> = rows.iter().map(|row| only(row, &is_kept)).collect();
            let table = self.table(&kept_head, &kept_rows, &[0], &mark);
            let widest = table.lines().map(console::measure_text_width).max().unwrap_or(0);
            let excess = widest.saturating_sub(self.columns.unwrap_or(widest));
            match optional.get(left_out.len()) {
                Some(name) if excess > 0 => left_out.push(name),
                _ => return self.narrowed(excess, &kept_head, kept_rows, &left_out, &mark),
            }
        }
    }

    /// Renders a table whose first column is narrower by `excess`, and says which columns are left out.
    fn narrowed(
        &self,
        excess: usize,
        head: &[&str],
        mut rows: Vec<Vec<String>>,
        left_out: &[&str],
        mark: impl Fn(usize) -> Mark,
    ) -> String {
        let first = rows.iter().map(|row| console::measure_text_width(&row[0])).max().unwrap_or(0);
        for row in &mut rows {
            row[0] = shortened(&row[0], first.saturating_sub(excess));
        }
        let table = self.table(head, &rows, &[0], mark);
        match left_out {
            [] => table,
            names => {
                let note = format!("Left out for want of width: {}.", names.join("; "));
                format!("{table}\n{}", self.weak(note))
            }
        }
    }

    /// Returns a text that is neither wrapped nor coloured.
    #[cfg(test)]
    pub(crate) fn plain() -> Text {
        Text::new(None, false)
    }
}

/// Returns the end of a text that is longer than `room`, of at least 16 characters.
fn shortened(text: &str, room: usize) -> String {
    let (len, room) = (text.chars().count(), room.max(16));
    if len <= room {
        return text.to_owned();
    }
    let kept: String = text.chars().skip(len - (room - 3)).collect();
    format!("...{kept}")
}

fn only<T: Clone>(items: &[T], is_kept: &[bool]) -> Vec<T> {
    items.iter().zip(is_kept).filter(|(_, kept)| **kept).map(|(item, _)| item.clone()).collect()
}

/// How a row is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// As it is.
    None,
    /// As a good result.
    Good,
    /// As a bad result.
    Bad,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_nothing_is_wrapped_or_coloured() {
        let text = Text::new(None, false);
        let long = "word ".repeat(100);
        assert_eq!(text.wrap(&long, 2), long);
        assert_eq!(text.fit(&long, 50), long);
        assert_eq!(text.good("fits"), "fits");
    }

    #[test]
    fn a_table_fits_by_leaving_columns_out_which_it_names_and_by_shorter_names() {
        let row = |name: &str| vec![name.to_owned(), "12.00 GiB".to_owned(), "1,234".to_owned()];
        let rows = [row("a name of no use that is very long"), row("short")];
        let render = |width| {
            let text = Text::new(Some(width), false);
            text.table_without(&["calls"], &["name", "peak", "calls"], &rows, |_| Mark::None)
        };
        let all = render(80);
        assert!(all.contains("1,234") && !all.contains("Left out"), "{all}");
        let narrow = render(40);
        assert!(!narrow.contains("1,234") && narrow.contains("Left out for want of width: calls."));
        assert!(narrow.contains("...") && narrow.contains("very long  12.00 GiB"), "{narrow}");
        assert!(narrow.lines().all(|line| line.len() <= 40), "{narrow}");
    }

    #[test]
    fn a_terminal_gets_lines_of_its_width() {
        let text = Text::new(Some(50), true);
        let wrapped = text.wrap(&"word ".repeat(100), 4);
        assert!(wrapped.lines().all(|line| line.len() <= 50), "{wrapped}");
        assert!(wrapped.lines().skip(1).all(|line| line.starts_with("    word")));
        assert_eq!(text.fit("/a/long/path/to/some/file.py:12 forward", 30), "...o/some/file.py:12");
        assert_eq!(text.fit("file.py:12 forward_and_more", 30), "file.py:12 forwar...");
        assert_eq!(text.bad("no"), "\u{1b}[31mno\u{1b}[0m");
    }
}
