//! `cargo xtask size`: how large the project is, in lines of code.
//!
//! 1. A line of code has a token that is no comment. Tests are what stands in a folder or a file of tests,
//!    and what `#[cfg(test)]` stands before.
//! 2. [`run`] prints each crate, and the sums that the project is held to: the crates that a program links,
//!    all tests, and the Rust files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::tidy::{GENERATED, test_modules};
use crate::tree::Tree;

/// What a program links, from Rust, C or Python. Not the simulator, and not what a generator wrote.
const RUNTIME: [&str; 12] = [
    "vramp-core",
    "vramp-host",
    "vramp-ipc",
    "vramp-driver",
    "vramp-cuda",
    "vramp-alloc",
    "vramp-cudarc",
    "vramp-tiers",
    "vramp-defer",
    "vramp-session",
    "vramp-capi",
    "vramp-python",
];
const SIMULATOR: &str = "crates/vramp-driver/src/sim/";

/// Lines of code by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    code: usize,
    tests: usize,
    examples: usize,
    files: usize,
}

impl std::ops::AddAssign for Lines {
    fn add_assign(&mut self, other: Lines) {
        self.code += other.code;
        self.tests += other.tests;
        self.examples += other.examples;
        self.files += other.files;
    }
}

/// Prints the figures of every crate and their sums.
pub fn run(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let (mut units, mut runtime) = (BTreeMap::<&str, Lines>::new(), 0);
    for (path, lines) in files(&tree)? {
        *units.entry(unit(path)).or_default() += lines;
        let links = RUNTIME.iter().any(|name| path.starts_with(&format!("crates/{name}/")));
        if links && !path.starts_with(SIMULATOR) && !GENERATED.contains(&path) {
            runtime += lines.code;
        }
    }
    println!("{:24} {:>8} {:>8} {:>8} {:>6}", "", "code", "tests", "examples", "files");
    for (unit, Lines { code, tests, examples, files }) in &units {
        println!("{unit:24} {code:8} {tests:8} {examples:8} {files:6}");
    }
    let tests: usize = units.values().map(|lines| lines.tests).sum();
    let crates = units.iter().filter(|(unit, _)| unit.starts_with("crates/"));
    let files: usize = crates.map(|(_, lines)| lines.files).sum();
    println!("code of the runtime {runtime}, tests {tests}, Rust files in crates {files}");
    Ok(())
}

/// The crate, or the folder beside the crates.
fn unit(path: &str) -> &str {
    let parts = if path.starts_with("crates/") { 2 } else { 1 };
    let end = path.match_indices('/').nth(parts - 1);
    end.map_or(path, |(end, _)| &path[..end])
}

/// Counts each Rust file.
fn files(tree: &Tree) -> Result<Vec<(&str, Lines)>> {
    let mut only_tests = BTreeSet::new();
    for (path, text) in tree.ending(".rs") {
        let file = syn::parse_file(text).with_context(|| path.to_owned())?;
        only_tests.extend(test_modules(path, &file));
    }
    tree.ending(".rs")
        .map(|(path, text)| {
            let mut lines = count(text).with_context(|| path.to_owned())?;
            let Lines { code, .. } = lines;
            if is_test(path, &only_tests) {
                lines.tests += std::mem::take(&mut lines.code);
            } else if path.contains("/examples/") {
                lines = Lines { examples: code, files: 1, ..Lines::default() };
            }
            Ok((path, lines))
        })
        .collect()
}

/// Returns true for a file of tests, and for one in the folder of a module of tests.
fn is_test(path: &str, only_tests: &BTreeSet<String>) -> bool {
    let folder = |module: &String| module.trim_end_matches("mod.rs").len();
    path.split('/').any(|part| ["tests", "benches", "tests.rs"].contains(&part))
        || only_tests.contains(path)
        || only_tests.iter().any(|module| {
            module.ends_with("/mod.rs") && path.starts_with(&module[..folder(module)])
        })
}

/// Counts the lines of one source, those that `#[cfg(test)]` stands before as tests.
fn count(text: &str) -> Result<Lines> {
    let tokens: TokenStream = text.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
    let (mut code, mut tests) = (BTreeSet::new(), BTreeSet::new());
    walk(tokens, false, &mut code, &mut tests);
    // A string may have lines without a letter.
    let rows: Vec<&str> = text.lines().collect();
    for lines in [&mut code, &mut tests] {
        lines.retain(|line| rows.get(line - 1).is_some_and(|row| !row.trim().is_empty()));
    }
    let tests = tests.difference(&code).count();
    Ok(Lines { code: code.len(), tests, examples: 0, files: 1 })
}

/// Notes the lines of tokens.
fn walk(
    tokens: TokenStream,
    in_tests: bool,
    code: &mut BTreeSet<usize>,
    tests: &mut BTreeSet<usize>,
) {
    let mut tokens = tokens.into_iter().peekable();
    // Until the end of what `#[cfg(test)]` stands before.
    let mut only_test = false;
    while let Some(token) = tokens.next() {
        if let TokenTree::Punct(sign) = &token
            && sign.as_char() == '#'
        {
            // A comment of the documentation is an attribute to the parser.
            if sign.span().source_text().is_some_and(|text| text != "#") {
                for part in tokens.by_ref() {
                    if matches!(part, TokenTree::Group(_)) {
                        break;
                    }
                }
                continue;
            }
            only_test |=
                matches!(tokens.peek(), Some(TokenTree::Group(group)) if is_for_tests(group));
        }
        let lines = if in_tests || only_test { &mut *tests } else { &mut *code };
        match token {
            TokenTree::Group(group) => {
                lines.extend([group.span_open(), group.span_close()].map(|it| it.start().line));
                let ends = group.delimiter() == Delimiter::Brace;
                walk(group.stream(), in_tests || only_test, code, tests);
                only_test &= !ends;
            }
            token => {
                lines.extend(token.span().start().line..=token.span().end().line);
                if let TokenTree::Punct(sign) = token {
                    only_test &= ![';', ','].contains(&sign.as_char());
                }
            }
        }
    }
}

/// Returns true for `[cfg(test)]`, alone or within `all`.
fn is_for_tests(attribute: &proc_macro2::Group) -> bool {
    let text = attribute.stream().to_string().replace(' ', "");
    text.starts_with("cfg(test") || text.starts_with("cfg(all(test")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
//! A page.

/* A
   comment. */
use std::fmt; // Why.

/// What it does.
#[derive(Debug)]
struct A {
    #[cfg(test)]
    counted: u8,
    text: &'static str,
}

#[cfg(test)]
use std::io;

const TEXT: &str = \"one // no comment

three\";

fn a() -> [u8; 1] {

    [1]
}

#[cfg(all(test, unix))]
mod tests {
    //! Theirs.
    #[test]
    fn b() {}
}
";

    #[test]
    fn lines_with_tokens_count_and_those_of_tests_apart() {
        // use; derive, struct, text, end; TEXT on two lines; fn, [1], end.
        let lines = Lines { code: 10, tests: 2 + 2 + 5, examples: 0, files: 1 };
        assert_eq!(count(SOURCE).unwrap(), lines);
    }

    #[test]
    fn files_are_of_tests_by_their_folder_or_by_the_module_that_declares_them() {
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", "mod used;\n#[cfg(test)]\nmod twin;\n"),
            ("crates/a/src/used.rs", "fn a() {}\n"),
            ("crates/a/src/twin/mod.rs", "mod deep;\n"),
            ("crates/a/src/twin/deep.rs", "fn b() {}\n"),
            ("crates/a/tests/it/main.rs", "fn c() {}\n"),
            ("crates/a/examples/d.rs", "fn d() {}\n"),
            ("xtask/src/main.rs", "fn e() {}\n"),
        ]);
        let mut units = BTreeMap::<&str, Lines>::new();
        for (path, lines) in files(&tree).unwrap() {
            *units.entry(unit(path)).or_default() += lines;
        }
        let of_crate = Lines { code: 2, tests: 5, examples: 1, files: 6 };
        let of_xtask = Lines { code: 1, files: 1, ..Lines::default() };
        assert_eq!(units, BTreeMap::from([("crates/a", of_crate), ("xtask", of_xtask)]));
    }
}
