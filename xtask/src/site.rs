//! `cargo xtask site`: the documentation as one site, built by MkDocs, with every link checked.
//!
//! The pages stay where they are in the tree. The pages of `docs` are the top of the site; what they link
//! to is copied beside them: other pages, pictures, and sources as pages with highlighted code. `site.py`
//! writes what is generated: sources, the commands, the Python API, the C header. The site loads nothing
//! from elsewhere.

use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag};

use crate::shell;
use crate::tree::Tree;

/// The tools, from Python's package index.
const TOOLS: [&str; 4] =
    ["mkdocs==1.6.1", "mkdocs-material==9.6.23", "pymdown-extensions==10.21.3", "Pygments==2.21.0"];
/// What MkDocs reads; `mkdocs.yml` names it too.
const SOURCE: &str = "target/site-source";
/// What MkDocs writes.
const SITE: &str = "target/site";
/// Most words of a page that is read from its beginning to its end. Tables and code count.
const WORDS: usize = 2000;
/// Pages that are looked up in, and those about the inside.
const LONG: [&str; 6] = [
    "docs/reference/",
    "docs/background/",
    "docs/design/",
    "docs/cuda-facts.md",
    "docs/glossary.md",
    "docs/trace-format.md",
];

/// Builds the site into `target/site`. A link that leads nowhere is an error. `program` is `vramp`, whose help
/// becomes pages. With `rustdoc` links to a crate lead to its documentation, which takes minutes to build.
pub fn run(root: &Path, program: &Path, rustdoc: bool) -> Result<()> {
    let tree = Tree::read(root)?;
    let long = long_pages(&tree);
    ensure!(long.is_empty(), "over {WORDS} words, so divide them: {}", long.join(", "));
    let source = root.join(SOURCE);
    if source.exists() {
        fs::remove_dir_all(&source)?;
    }
    fs::create_dir_all(&source)?;
    let mut listed = String::new();
    for path in reachable(&tree)? {
        let to = source.join(place(&path, rustdoc));
        if !path.ends_with(".md") && !is_picture(&path) {
            writeln!(listed, "{path}")?;
            continue;
        }
        fs::create_dir_all(to.parent().context("a file is in a folder")?)?;
        if path.ends_with(".md") {
            let page = tree.text(&path).with_context(|| format!("no page {path}"))?;
            // A first page has no others of its section to lead to.
            let alone = path == "docs/index.md" || path == "docs/getting-started.md";
            let head = if alone { "---\nhide: [navigation]\n---\n" } else { "" };
            fs::write(&to, head.to_owned() + &tabs(&rewritten(&path, page, rustdoc))?)?;
        } else {
            fs::copy(root.join(&path), &to).with_context(|| format!("cannot copy {path}"))?;
        }
    }
    if rustdoc {
        let doc = ["doc", "--workspace", "--no-deps", "--locked", "--quiet"];
        shell::run(Command::new("cargo").current_dir(root).args(doc))?;
        let target = env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
        let mut copy = Command::new("cp");
        shell::run(copy.arg("-r").arg(target.join("doc")).arg(source.join("rust")))?;
    }
    fs::copy(root.join("xtask/src/site.css"), source.join("site.css"))?;
    let list = root.join("target/site-sources.txt");
    fs::write(&list, listed)?;
    let tools = install(root)?;
    let mut generate = Command::new(tools.join("python"));
    generate.current_dir(root).arg("xtask/src/site.py").arg(&source).arg(&list).arg(program);
    shell::run(&mut generate)?;
    let mkdocs = tools.join("mkdocs");
    shell::run(Command::new(mkdocs).current_dir(root).args(["build", "--strict", "--quiet"]))?;
    loads_nothing(&root.join(SITE))?;
    println!("the site is in {}", root.join(SITE).display());
    Ok(())
}

/// The path in the site of a file of the tree.
fn place(path: &str, rustdoc: bool) -> String {
    if let Some(path) = path.strip_prefix("docs/") {
        return path.to_owned();
    }
    match path {
        "README.md" => return "index.md".to_owned(),
        "ARCHITECTURE.md" => return "background/architecture.md".to_owned(),
        "CONTRIBUTING.md" | "STYLE.md" | "CHANGELOG.md" => {
            return format!("project/{}", path.to_lowercase());
        }
        _ => {}
    }
    if path.ends_with(".md") || is_picture(path) {
        return format!("project/{path}");
    }
    let package = path.strip_prefix("crates/").and_then(|path| path.strip_suffix("/src/lib.rs"));
    match package {
        Some(package) if rustdoc => format!("rust/{}/index.html", package.replace('-', "_")),
        _ => format!("source/{path}.html"),
    }
}

fn is_picture(path: &str) -> bool {
    path.ends_with(".svg") || path.ends_with(".png")
}

/// The page with its relative links as they lead in the site, and with fences that name a language alone.
fn rewritten(path: &str, page: &str, rustdoc: bool) -> String {
    let mut new = String::new();
    let mut done = 0;
    let own = place(path, rustdoc);
    for (event, range) in Parser::new_ext(page, Options::ENABLE_TABLES).into_offset_iter() {
        let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else {
            continue;
        };
        let (target, part) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
        // A picture in a link lies within the range that is done.
        if target.is_empty() || target.contains(':') || range.start < done {
            continue;
        }
        let Some(found) = resolve(path, target) else { continue };
        let written = format!("]({dest_url}");
        let Some(at) = page[range.clone()].rfind(&written) else { continue };
        let mut to = relative(&own, &place(&found, rustdoc));
        if !part.is_empty() {
            let _ = write!(to, "#{part}");
        }
        new.push_str(&page[done..range.start + at]);
        let _ = write!(new, "]({to}");
        done = range.start + at + written.len();
    }
    new.push_str(&page[done..]);
    let lines = new.lines().map(|line| match line.strip_prefix("```") {
        // What follows the language is for tests.
        Some(fence) => ["```", fence.split([',', ' ']).next().unwrap_or_default()].concat(),
        None => line.to_owned(),
    });
    lines.flat_map(|line| [line, "\n".to_owned()]).collect()
}

/// The path from one file of the site to another.
fn relative(from: &str, to: &str) -> String {
    let mut from: Vec<&str> = from.split('/').collect();
    from.pop();
    let to: Vec<&str> = to.split('/').collect();
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let common = common.min(to.len() - 1);
    "../".repeat(from.len() - common) + &to[common..].join("/")
}

/// The page with the code between `<!-- tabs -->` and `<!-- end of tabs -->` as tabs: each line in bold
/// begins one, and is its name.
fn tabs(page: &str) -> Result<String> {
    let mut new = String::new();
    let mut inside = false;
    for line in page.lines() {
        match line {
            "<!-- tabs -->" => inside = true,
            "<!-- end of tabs -->" => inside = false,
            line if inside => {
                let name = line.strip_prefix("**").and_then(|line| line.strip_suffix("**"));
                match name {
                    Some(name) => writeln!(new, "=== \"{name}\"")?,
                    None if line.is_empty() => new.push('\n'),
                    None => writeln!(new, "    {line}")?,
                }
            }
            line => writeln!(new, "{line}")?,
        }
    }
    ensure!(!inside, "tabs without an end");
    Ok(new)
}

/// Pages with too many words, each with their number.
fn long_pages(tree: &Tree) -> Vec<String> {
    let pages = tree.ending(".md").filter(|(path, _)| path.starts_with("docs/"));
    let pages = pages.filter(|(path, _)| !LONG.iter().any(|long| path.starts_with(long)));
    let counted = pages.map(|(path, page)| (path, page.split_whitespace().count()));
    let long = counted.filter(|(_, words)| *words > WORDS);
    long.map(|(path, words)| format!("{path} ({words})")).collect()
}

/// No page or style of the site loads a file from elsewhere, or leaves a diagram to a script that does.
fn loads_nothing(site: &Path) -> Result<()> {
    let mut folders = vec![site.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.to_string_lossy();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".html") || name.ends_with(".css") {
                let found = loaded(&fs::read_to_string(&path)?);
                ensure!(found.is_none(), "{name} loads {}", found.unwrap_or_default());
            }
        }
    }
    Ok(())
}

/// What a page or style loads from elsewhere. Links are no loads.
fn loaded(text: &str) -> Option<String> {
    let begin = |text: &str| text.chars().take(80).collect();
    for tag in ["<script", "<link", "<img", "<iframe", "<source", "<video"] {
        for found in text.split(tag).skip(1) {
            let found = found.split('>').next().unwrap_or_default();
            let elsewhere = ["=\"http", "=http", "=\"//", "=//"];
            if elsewhere.iter().any(|from| found.contains(from)) && !found.contains("canonical") {
                return Some(begin(found));
            }
        }
    }
    // Pages may show code that names what styles load.
    let is_page = text.trim_start().starts_with('<');
    let styles = ["url(http", "url(\"http", "url(//", "url(\"//"];
    let searched = if is_page { &[" class=\"mermaid\""][..] } else { &styles[..] };
    searched.iter().find_map(|style| text.find(style).map(|at| begin(&text[at..])))
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
    ensure!(known.contains("docs/index.md"), "there is no docs/index.md");
    // The first page of the site takes its place.
    known.remove("README.md");
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

/// The programs, installed into an environment of their own below `target`, whose folder is returned.
fn install(root: &Path) -> Result<PathBuf> {
    let environment = root.join("target/site-tools");
    let stamp = environment.join("installed.txt");
    let wanted = TOOLS.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(environment.join("bin"));
    }
    let python = ["-m", "venv", "--clear"];
    shell::run(Command::new("python3").args(python).arg(&environment))
        .context("a site needs Python 3 with its module venv (Debian: python3-venv)")?;
    let pip = ["install", "--quiet", "--disable-pip-version-check"];
    shell::run(Command::new(environment.join("bin/pip")).args(pip).args(TOOLS))?;
    fs::write(stamp, wanted)?;
    Ok(environment.join("bin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_files_are_reached_through_pages_and_others_are_not() {
        let tree = Tree::of(&[
            ("README.md", "[a](docs/a.md#x) [web](https://x.org) [self](#y)"),
            ("docs/index.md", ""),
            ("docs/a.md", "![chart](charts/c.svg) [code](../crates/x/src/lib.rs)"),
            ("docs/charts/c.svg", "<svg/>"),
            ("crates/x/src/lib.rs", "//! x"),
            ("crates/x/README.md", "never linked"),
        ]);
        let reached: Vec<String> = reachable(&tree).unwrap().into_iter().collect();
        let expected = ["crates/x/src/lib.rs", "docs/a.md", "docs/charts/c.svg", "docs/index.md"];
        assert_eq!(reached, expected);
    }

    #[test]
    fn a_link_to_a_folder_or_to_nothing_is_an_error() {
        for link in ["docs", "gone.md", "../out.md"] {
            let page = format!("[x]({link})");
            let tree = Tree::of(&[("README.md", page.as_str()), ("docs/index.md", "")]);
            assert!(reachable(&tree).is_err(), "{link}");
        }
    }

    #[test]
    fn links_lead_to_the_places_of_the_site() {
        let page = "```python card\n```\n[a](b.md#x) [code](../crates/vramp-core/src/lib.rs) [up](../README.md)\n\
                    `[no](../x.md)` [style](../STYLE.md) [![c](c.svg)](b.md) [w](https://x.org)\n";
        assert_eq!(
            rewritten("docs/a.md", page, false),
            "```python\n```\n[a](b.md#x) [code](source/crates/vramp-core/src/lib.rs.html) [up](index.md)\n\
             `[no](../x.md)` [style](project/style.md) [![c](c.svg)](b.md) [w](https://x.org)\n"
        );
        let deep = rewritten("docs/how/a.md", "[c](../../crates/vramp-core/src/lib.rs)", true);
        assert_eq!(deep, "[c](../rust/vramp_core/index.html)\n");
        let root = rewritten("ARCHITECTURE.md", "[d](docs/a.md) [c](CHANGELOG.md#x)", false);
        assert_eq!(root, "[d](../a.md) [c](../project/changelog.md#x)\n");
    }

    #[test]
    fn code_between_the_two_lines_becomes_tabs() {
        let page = "a\n<!-- tabs -->\n**Rust**\n\n```rust\nx\n```\n<!-- end of tabs -->\n**b**\n";
        let expected = "a\n=== \"Rust\"\n\n    ```rust\n    x\n    ```\n**b**\n";
        assert_eq!(tabs(page).unwrap(), expected);
        assert!(tabs("<!-- tabs -->\n").is_err());
    }

    #[test]
    fn what_a_page_loads_from_elsewhere_is_found() {
        for text in [
            "<script src=\"https://cdn.org/x.js\"></script>",
            "<link rel=stylesheet href=\"//fonts.org/x\">",
            "@import url(https://fonts.org/x.css);",
            "<pre class=\"mermaid\">graph",
        ] {
            assert!(loaded(text).is_some(), "{text}");
        }
        assert_eq!(loaded("<a href=\"https://x.org\">x</a><script src=\"x.js\"></script>"), None);
    }

    #[test]
    fn a_long_page_is_found_unless_it_is_reference() {
        let long = "word ".repeat(WORDS + 1);
        let tree =
            Tree::of(&[("docs/a.md", &long), ("docs/reference/b.md", &long), ("README.md", &long)]);
        assert_eq!(long_pages(&tree), [format!("docs/a.md ({})", WORDS + 1)]);
    }
}
