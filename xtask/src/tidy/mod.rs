//! `cargo xtask tidy`: the house rules that no compiler checks.
//!
//! A rule is a function from the tree to findings. Every rule has a test with a planted violation.

mod calls;
mod circles;
mod docs;
mod eager;
mod manifests;
mod pool;
mod scan;
mod words;

use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::tree::Tree;
use crate::{charts, header};
use scan::Sources;

pub use scan::test_modules;

/// The crates, each of which may name only those before it.
const LAYERS: [&str; 20] = [
    "vramp-testing",
    "vramp-core",
    "vramp-host",
    "vramp-ipc",
    "vramp-driver",
    "vramp-cuda",
    "vramp-trace",
    "vramp-preload",
    "vramp-alloc",
    "vramp-peers",
    "vramp-tiers",
    "vramp-defer",
    "vramp-cudarc",
    "vramp",
    "vramp-capi",
    "vramp-bench",
    "vramp-analysis",
    "vramp-cli",
    "vramp-python",
    "vramp-check",
];

/// Crates that may hold `unsafe`.
const UNSAFE_CRATES: [&str; 6] =
    ["vramp-host", "vramp-cuda", "vramp-cudarc", "vramp-capi", "vramp-python", "vramp-preload"];

/// Sources that a generator wrote.
pub const GENERATED: [&str; 1] = ["crates/vramp-cuda/src/sys.rs"];

/// Longer files are printed, because they are often two ideas.
const LONG_FILE_LINES: usize = 600;
/// Longer functions are printed.
const LONG_FUNCTION_LINES: usize = 80;

/// One place that breaks a rule.
#[derive(Debug)]
struct Finding {
    path: String,
    /// Counted from one; `None` for the whole file.
    line: Option<usize>,
    message: String,
}

impl Finding {
    fn new(path: &str, line: impl Into<Option<usize>>, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line: line.into(), message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.message),
            None => write!(f, "{}: {}", self.path, self.message),
        }
    }
}

/// Checks every rule; any finding is an error.
pub fn run(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let (parsed, mut findings) = scan::parse(&tree);
    let sources = Sources::of(&parsed);
    findings.extend(manifests::layer_order(&tree));
    findings.extend(manifests::unsafe_fence(&tree));
    findings.extend(pool::pool_is_closed(&parsed));
    findings.extend(circles::no_circle_grows(&tree, &parsed));
    findings.extend(calls::core_is_pure(&sources));
    findings.extend(calls::front_examples_name_the_front_crate(&sources));
    findings.extend(calls::environment_is_read_at_the_edge(&sources));
    findings.extend(calls::nothing_unfinished(&sources));
    findings.extend(calls::sources_are_ascii(&tree));
    findings.extend(eager::arguments_that_may_be_dropped(&parsed));
    findings.extend(words::plain_words(&tree));
    findings.extend(words::no_shadowed_prelude(&sources));
    findings.extend(docs::peer_tests_exist(&tree));
    findings.extend(docs::front_pages_are_short(&tree));
    findings.extend(docs::links_resolve(&tree));
    findings.extend(docs::rust_pages_are_tested(&tree));
    findings
        .extend(header::difference(root)?.map(|message| Finding::new(header::PATH, None, message)));
    for (path, message) in charts::differences(root)? {
        findings.push(Finding::new(&path, None, message));
    }
    for note in long_ones(&tree, &sources) {
        println!("note: {note}");
    }
    for finding in &findings {
        println!("{finding}");
    }
    ensure!(findings.is_empty(), "tidy: {} findings", findings.len());
    Ok(())
}

/// What is long enough to ask whether it is two ideas.
fn long_ones(tree: &Tree, sources: &Sources) -> Vec<Finding> {
    let files = tree.ending(".rs").filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > LONG_FILE_LINES && !GENERATED.contains(&path))
            .then(|| Finding::new(path, None, format!("{lines} lines")))
    });
    let functions = sources.iter().flat_map(|source| {
        source.functions.iter().filter(|function| function.lines > LONG_FUNCTION_LINES).map(
            |long| {
                let message = format!("fn {} has {} lines", long.name, long.lines);
                Finding::new(&source.path, long.line, message)
            },
        )
    });
    files.chain(functions).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_functions_are_noted() {
        let long = format!("fn long() {{\n{}}}\n", "();\n".repeat(700));
        let tree = Tree::of(&[("crates/vramp/src/a.rs", long.as_str())]);
        let (sources, _) = Sources::scan(&tree);
        let notes: Vec<String> =
            long_ones(&tree, &sources).iter().map(ToString::to_string).collect();
        assert_eq!(
            notes,
            ["crates/vramp/src/a.rs: 702 lines", "crates/vramp/src/a.rs:1: fn long has 702 lines"]
        );
    }
}
