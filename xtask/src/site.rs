//! `cargo xtask site`: the documentation as one site, built by MkDocs, with every link checked.
//!
//! The pages stay where they are in the tree. What they link to is copied beside them, sources
//! included, so that the site is complete by itself.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag};

use crate::shell;
use crate::tree::Tree;

/// The tool, from Python's package index.
const MKDOCS: &str = "mkdocs==1.6.1";
/// What MkDocs reads; `mkdocs.yml` names it too.
const SOURCE: &str = "target/site-source";

/// Builds the site into `target/site`. A link that leads nowhere is an error.
pub fn run(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let source = root.join(SOURCE);
    if source.exists() {
        fs::remove_dir_all(&source)?;
    }
    for path in reachable(&tree)? {
        let to = source.join(&path);
        let folder = to.parent().context("a file is in a folder")?;
        fs::create_dir_all(folder)?;
        fs::copy(root.join(&path), &to).with_context(|| format!("cannot copy {path}"))?;
    }
    let mkdocs = install(root)?;
    shell::run(Command::new(mkdocs).current_dir(root).args(["build", "--strict", "--quiet"]))?;
    println!("the site is in {}", root.join("target/site").display());
    Ok(())
}

/// The files that one gets to from the pages at the root and in `docs` by following links.
fn reachable(tree: &Tree) -> Result<BTreeSet<String>> {
    let mut open: Vec<String> = tree
        .ending(".md")
        .map(|(path, _)| path.to_owned())
        .filter(|path| !path.contains('/') || path.starts_with("docs/"))
        .collect();
    let mut known = BTreeSet::new();
    while let Some(path) = open.pop() {
        if !known.insert(path.clone()) || !path.ends_with(".md") {
            continue;
        }
        let page = tree.text(&path).with_context(|| format!("no page {path}"))?;
        for target in links(page) {
            let found = resolve(&path, &target).filter(|found| tree.text(found).is_some());
            open.push(found.with_context(|| format!("{path} links to {target}: no such file"))?);
        }
    }
    ensure!(known.contains("README.md"), "there is no README.md");
    Ok(known)
}

/// The relative links and images of a page, without their fragments.
fn links(page: &str) -> Vec<String> {
    let events = Parser::new_ext(page, Options::ENABLE_TABLES);
    events
        .filter_map(|event| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                let target = dest_url.split('#').next().unwrap_or_default().to_owned();
                (!target.is_empty() && !target.contains(':')).then_some(target)
            }
            _ => None,
        })
        .collect()
}

/// The path of `target` as seen from `page`; `None` above the root.
fn resolve(page: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The program, installed into an environment of its own below `target`.
fn install(root: &Path) -> Result<PathBuf> {
    let environment = root.join("target/site-tools");
    let program = environment.join("bin/mkdocs");
    if !program.is_file() {
        let python = ["-m", "venv"];
        shell::run(Command::new("python3").args(python).arg(&environment))
            .context("a site needs Python 3 with its module venv (Debian: python3-venv)")?;
        let pip = ["install", "--quiet", "--disable-pip-version-check", MKDOCS];
        shell::run(Command::new(environment.join("bin/pip")).args(pip))?;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_files_are_reached_through_pages_and_others_are_not() {
        let tree = Tree::of(&[
            ("README.md", "[a](docs/a.md#x) [web](https://x.org) [self](#y)"),
            ("docs/a.md", "![chart](charts/c.svg) [code](../crates/x/src/lib.rs)"),
            ("docs/charts/c.svg", "<svg/>"),
            ("crates/x/src/lib.rs", "//! x"),
            ("crates/x/README.md", "never linked"),
        ]);
        let reached: Vec<String> = reachable(&tree).unwrap().into_iter().collect();
        assert_eq!(reached, ["README.md", "crates/x/src/lib.rs", "docs/a.md", "docs/charts/c.svg"]);
    }

    #[test]
    fn a_link_to_a_folder_or_to_nothing_is_an_error() {
        for link in ["docs", "gone.md", "../out.md"] {
            let page = format!("[x]({link})");
            let tree = Tree::of(&[("README.md", page.as_str()), ("docs/a.md", "")]);
            assert!(reachable(&tree).is_err(), "{link}");
        }
    }
}
