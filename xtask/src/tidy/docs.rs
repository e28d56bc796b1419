//! Pages that promise something of the tree.

use std::collections::BTreeSet;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::Finding;
use crate::tree::Tree;

/// Pages whose tables name tests and functions.
const PAGES_WITH_TESTS: [&str; 2] = ["docs/background/peer-tests.md", "docs/rmmep-1.md"];

/// Every test that the table of peer tests, or of RMMEP-1, names is a function somewhere.
pub fn peer_tests_exist(tree: &Tree) -> Vec<Finding> {
    PAGES_WITH_TESTS.iter().flat_map(|path| tests_of_page_exist(tree, path)).collect()
}

fn tests_of_page_exist(tree: &Tree, path: &str) -> Vec<Finding> {
    let Some(page) = tree.text(path) else { return Vec::new() };
    let known: BTreeSet<&str> =
        functions(tree, ".rs", "fn ").chain(functions(tree, ".py", "def ")).collect();
    let mut findings = Vec::new();
    let mut in_table = false;
    for (event, place) in Parser::new_ext(page, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Table(_)) => in_table = true,
            Event::End(TagEnd::Table) => in_table = false,
            Event::Code(code) if in_table && is_test_name(&code) => {
                let name = code.rsplit("::").next().unwrap_or(&code);
                if !known.contains(name) {
                    let line = page[..place.start].lines().count();
                    findings.push(Finding::new(path, line, format!("no function `{name}`")));
                }
            }
            _ => {}
        }
    }
    findings
}

/// Lines of the README, at most: what a stranger reads before a decision.
const README_LINES: usize = 120;
/// Rows of the glossary, at most: words that the field does not have.
const GLOSSARY_ROWS: usize = 60;

/// The README and the glossary stay short.
pub fn front_pages_are_short(tree: &Tree) -> Vec<Finding> {
    let lines = tree.text("README.md").map_or(0, |page| page.lines().count());
    let glossary = tree.text("docs/glossary.md").unwrap_or_default();
    let rows =
        glossary.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| word |"));
    let rows = rows.count();
    let mut findings = Vec::new();
    if lines > README_LINES {
        let message =
            format!("{lines} lines, at most {README_LINES}: move detail to a page of docs");
        findings.push(Finding::new("README.md", None, message));
    }
    if rows > GLOSSARY_ROWS {
        let message = format!("{rows} rows, at most {GLOSSARY_ROWS}: use the field's word instead");
        findings.push(Finding::new("docs/glossary.md", None, message));
    }
    findings
}

/// Our tests are named as sentences: words joined by underscores, perhaps behind a module path.
fn is_test_name(code: &str) -> bool {
    code.contains('_')
        && code.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
}

/// The names that follow `keyword` in files with this ending, also inside macros.
fn functions<'a>(tree: &'a Tree, end: &'a str, keyword: &'a str) -> impl Iterator<Item = &'a str> {
    tree.ending(end).flat_map(move |(_, text)| {
        text.split(keyword)
            .skip(1)
            .map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(""))
    })
}

/// The Rust programs of every page of `docs` are tests of some crate.
pub fn rust_pages_are_tested(tree: &Tree) -> Vec<Finding> {
    let pages = tree.ending(".md").filter(|(path, _)| path.starts_with("docs/"));
    let with_programs = pages.filter(|(_, page)| page.lines().any(|line| line == "```rust"));
    let tested = |path: &str| {
        let included = format!("include_str!(\"../../../{path}\")");
        tree.ending(".rs").any(|(_, text)| text.contains(&included))
    };
    let untested = with_programs.filter(|(path, _)| !tested(path));
    let finding = |(path, _)| {
        Finding::new(
            path,
            None,
            "no crate includes this page in its documentation tests".to_owned(),
        )
    };
    untested.map(finding).collect()
}

/// Every relative link of a page leads to a file or folder of the tree.
pub fn links_resolve(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, page) in tree.ending(".md") {
        for (event, place) in Parser::new_ext(page, Options::ENABLE_TABLES).into_offset_iter() {
            let Event::Start(Tag::Link { dest_url: url, .. } | Tag::Image { dest_url: url, .. }) =
                event
            else {
                continue;
            };
            let target = url.split('#').next().unwrap_or_default();
            let elsewhere = target.contains(':') || target.is_empty();
            if !elsewhere && !leads_somewhere(tree, path, target) {
                let line = page[..place.start].matches('\n').count() + 1;
                findings.push(Finding::new(
                    path,
                    line,
                    format!("no file `{target}` for this link"),
                ));
            }
        }
    }
    findings
}

fn leads_somewhere(tree: &Tree, page: &str, target: &str) -> bool {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.pop().is_none() => return false,
            ".." => {}
            part => parts.push(part),
        }
    }
    tree.has(&parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_the_table_names_and_nobody_wrote_is_found() {
        let page = "Words like `not_a_test` are free.\n\n| theirs | ours |\n|---|---|\n\
                    | `Theirs` | `pool::a_real_test` |\n| x | `a_promised_test` |\n";
        let tree = Tree::of(&[
            (PAGES_WITH_TESTS[0], page),
            ("a.rs", "proptest! { #[test] fn a_real_test(x in 0..3) {} }"),
        ]);
        let found = peer_tests_exist(&tree);
        assert_eq!(found.len(), 1);
        assert!(found[0].message.contains("a_promised_test"));
    }

    #[test]
    fn a_long_readme_and_a_long_glossary_are_found() {
        let long = "line\n".repeat(README_LINES + 1);
        let table = |rows| format!("| word | meaning |\n|---|---|\n{}", "| a | b |\n".repeat(rows));
        let found = |readme: &str, rows| {
            let glossary = table(rows);
            let tree = Tree::of(&[("README.md", readme), ("docs/glossary.md", &glossary)]);
            front_pages_are_short(&tree).len()
        };
        assert_eq!(found("short", GLOSSARY_ROWS), 0);
        assert_eq!(found(&long, GLOSSARY_ROWS + 1), 2);
    }

    #[test]
    fn a_page_whose_programs_no_test_runs_is_found() {
        let page = "text\n```rust\nlet a = 1;\n```\n";
        let included = "#[doc = include_str!(\"../../../docs/a.md\")]";
        let tree = Tree::of(&[
            ("docs/a.md", page),
            ("docs/b.md", page),
            ("crates/x/src/lib.rs", included),
        ]);
        let found = rust_pages_are_tested(&tree);
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().contains("docs/b.md"));
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let page = "[a](docs/b.md) [b](https://x.org/y) [c](#part) [d](docs) [e](docs/gone.md#x)\n";
        let tree =
            Tree::of(&[("README.md", page), ("docs/b.md", "[up](../README.md) [out](../../x)")]);
        let found: Vec<String> = links_resolve(&tree).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "README.md:1: no file `docs/gone.md` for this link",
                "docs/b.md:1: no file `../../x` for this link"
            ]
        );
    }
}
