//! Circles of imports: files of a crate of which each needs every other, so that none can be understood,
//! tested or moved alone.
//!
//! 1. A file imports what its `use` lines and its paths from `crate`, `self` and `super` name, followed through
//!    `pub use` to the file that has it. A facade's own `pub use` is no import, and neither is a test's.
//! 2. Files of which each reaches the other are one circle.
//! 3. `xtask/circles.toml` has the sizes of each crate's circles. A circle that grows, or a new one, is a
//!    finding; so is one that shrank, until the file says so: then it stays small.
//! 4. A circle lies in one folder and has at most six files. `b.rs` is the page of the folder `b` beside it.
//!
//! O(files * imports) for each crate.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::Finding;
use super::scan::{Parsed, is_test};
use crate::tree::Tree;

/// Where the sizes are.
pub const BOUNDS: &str = "xtask/circles.toml";

/// The most files of a circle.
const MOST: usize = 6;

/// A module by its names, without the crate's.
type Module = Vec<String>;

/// The sizes of a crate's circles and their files, the largest first.
type Circles = Vec<Vec<String>>;

/// What the file says.
#[derive(serde::Deserialize)]
struct Bounds {
    /// Circles whose files lie in several folders, by crate.
    #[serde(default)]
    across: BTreeMap<String, usize>,
    /// The sizes of all circles, by crate.
    #[serde(default)]
    circles: BTreeMap<String, Vec<usize>>,
}

/// Compares the circles of every crate with the bounds.
pub fn no_circle_grows(tree: &Tree, parsed: &Parsed<'_>) -> Vec<Finding> {
    let text = tree.text(BOUNDS).unwrap_or_default();
    let Bounds { across, circles: bounds } = match toml::from_str(text) {
        Ok(bounds) => bounds,
        Err(error) => return vec![Finding::new(BOUNDS, None, error.to_string())],
    };
    let found = circles(parsed);
    let names: BTreeSet<&String> = found.keys().chain(bounds.keys()).chain(across.keys()).collect();
    let mut findings = Vec::new();
    for name in names {
        let circles = found.get(name).map_or(&[][..], Vec::as_slice);
        let bound = bounds.get(name).map_or(&[][..], Vec::as_slice);
        findings.extend(misplaced(name, circles, across.get(name).copied().unwrap_or(0)));
        let sizes: Vec<usize> = circles.iter().map(Vec::len).collect();
        let grown = (0..sizes.len()).find(|&n| sizes[n] > bound.get(n).copied().unwrap_or(0));
        if let Some(grown) = grown {
            let size = bound.get(grown).copied().unwrap_or(0);
            let files = circles[grown].join(" ");
            let message = format!("these import each other in a circle, which had {size}: {files}");
            findings.push(Finding::new(&format!("crates/{name}"), None, message));
        } else if sizes != bound {
            let message = format!("circles got smaller: write `{name} = {sizes:?}`");
            findings.push(Finding::new(BOUNDS, None, message));
        }
    }
    findings
}

/// Finds circles of too many files, and more of them across folders than a crate may have.
fn misplaced(name: &str, circles: &[Vec<String>], allowed: usize) -> Vec<Finding> {
    let finding = |message: String| Finding::new(&format!("crates/{name}"), None, message);
    let long = circles.iter().filter(|circle| circle.len() > MOST);
    let long = long.map(|circle| {
        finding(format!("a circle has at most {MOST} files, and not these: {}", circle.join(" ")))
    });
    let across: Vec<&Vec<String>> =
        circles.iter().filter(|circle| one_folder(circle).is_none()).collect();
    let more = across.iter().filter(|_| across.len() > allowed).map(|circle| {
        finding(format!("these import each other across folders: {}", circle.join(" ")))
    });
    let fewer = (across.len() < allowed).then(|| {
        let message =
            format!("fewer circles lie across folders: write `{name} = {}`", across.len());
        Finding::new(BOUNDS, None, message)
    });
    long.chain(more).chain(fewer).collect()
}

/// The circles of each crate that has some.
fn circles(parsed: &Parsed<'_>) -> BTreeMap<String, Circles> {
    let mut crates: BTreeMap<&str, BTreeMap<Module, Source>> = BTreeMap::new();
    for (path, syntax) in parsed {
        let Some((name, file)) = in_crate(path) else { continue };
        let module = module_of(file);
        let source = Source::of(path, &module, syntax);
        crates.entry(name).or_default().insert(module, source);
    }
    let of_crate = |(name, mut sources): (&str, BTreeMap<Module, Source>)| {
        let test_only: Vec<Module> =
            sources.values().flat_map(|source| source.test_modules.iter().cloned()).collect();
        sources.retain(|module, _| !test_only.iter().any(|test| module.starts_with(test)));
        let circles = strongly_connected(&edges(&sources));
        let paths = |circle: Vec<&Module>| -> Vec<String> {
            circle.iter().map(|&module| sources[module].path.clone()).collect()
        };
        let mut circles: Circles = circles.into_iter().map(paths).collect();
        circles.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        (!circles.is_empty()).then(|| (name.to_owned(), circles))
    };
    crates.into_iter().filter_map(of_crate).collect()
}

/// The folder that has all files of a circle.
fn one_folder(circle: &[String]) -> Option<String> {
    let of = |path: &String| {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        [folder, path.trim_end_matches(".rs").to_owned()]
    };
    let (first, rest) = circle.split_first()?;
    of(first).into_iter().find(|folder| rest.iter().all(|path| of(path).contains(folder)))
}

/// `crates/a/src/b/c.rs` is `b/c.rs` of `a`.
fn in_crate(path: &str) -> Option<(&str, &str)> {
    path.strip_prefix("crates/")?.split_once("/src/")
}

/// `plan/mod.rs` is `plan`, `view.rs` is `view`, and `lib.rs` is the root.
fn module_of(file: &str) -> Module {
    let file = file.trim_end_matches(".rs");
    let file = file.strip_suffix("/mod").unwrap_or(file);
    file.split('/').filter(|part| !["lib", "main"].contains(part)).map(str::to_owned).collect()
}

/// What one file names of its crate.
struct Source {
    path: String,
    /// Names from the root of the crate.
    imports: Vec<Module>,
    /// Names that `pub use` gives, and a module that lies elsewhere, with what they stand for.
    exports: BTreeMap<String, Module>,
    test_modules: Vec<Module>,
    module: Module,
}

impl Source {
    fn of(path: &str, module: &Module, parsed: &syn::File) -> Source {
        let mut source = Source {
            path: path.to_owned(),
            imports: Vec::new(),
            exports: BTreeMap::new(),
            test_modules: Vec::new(),
            module: module.clone(),
        };
        source.visit_file(parsed);
        source
    }

    /// Names from the root of the crate; `None` for those of other crates.
    fn absolute(&self, names: &[String]) -> Option<Module> {
        let (first, rest) = names.split_first()?;
        let mut base = match first.as_str() {
            "crate" => return Some(rest.to_vec()),
            "self" => self.module.clone(),
            "super" => self.module[..self.module.len().saturating_sub(1)].to_vec(),
            _ => return Some([&self.module[..], names].concat()),
        };
        let ups = rest.iter().take_while(|name| *name == "super").count();
        base.truncate(base.len().saturating_sub(ups));
        base.extend_from_slice(&rest[ups..]);
        Some(base)
    }

    fn used(&mut self, before: &[String], tree: &syn::UseTree, is_export: bool) {
        let longer = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (names, given) = match tree {
            syn::UseTree::Path(path) => {
                return self.used(&longer(&path.ident), &path.tree, is_export);
            }
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.used(before, tree, is_export));
            }
            syn::UseTree::Name(name) => (longer(&name.ident), name.ident.to_string()),
            syn::UseTree::Rename(name) => (longer(&name.ident), name.rename.to_string()),
            syn::UseTree::Glob(_) => ([before, &["*".to_owned()]].concat(), "*".to_owned()),
        };
        let Some(names) = self.absolute(&names) else { return };
        match is_export {
            true => drop(self.exports.insert(given, names)),
            false => self.imports.push(names),
        }
    }
}

impl<'ast> Visit<'ast> for Source {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        } else if let syn::Item::Mod(module) = item {
            self.test_modules.push([&self.module[..], &[module.ident.to_string()]].concat());
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        for attribute in &item.attrs {
            if let syn::Meta::NameValue(value) = &attribute.meta
                && value.path.is_ident("path")
                && let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(file), .. }) = &value.value
            {
                let names = [&self.module[..], &module_of(&file.value())].concat();
                self.exports.insert(item.ident.to_string(), names);
            }
        }
        visit::visit_item_mod(self, item);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_export = !matches!(item.vis, syn::Visibility::Inherited);
        self.used(&[], &item.tree, is_export);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if names.len() > 1 && ["crate", "super", "self"].contains(&names[0].as_str()) {
            self.imports.extend(self.absolute(&names));
        }
        visit::visit_path(self, path);
    }
}

/// The modules that each one imports from. The root only puts together.
fn edges(sources: &BTreeMap<Module, Source>) -> BTreeMap<&Module, BTreeSet<&Module>> {
    let of_source = |(module, source): (&'_ Module, &Source)| {
        let found = source.imports.iter().filter_map(|names| home_of(sources, names));
        found.filter(|&home| home != module).collect()
    };
    let inner = sources.iter().filter(|(module, _)| !module.is_empty());
    inner.map(|(module, source)| (module, of_source((module, source)))).collect()
}

/// The module that has what names stand for, behind all `pub use`. `None` for a module itself.
fn home_of<'a>(sources: &'a BTreeMap<Module, Source>, names: &[String]) -> Option<&'a Module> {
    let mut names = names.to_vec();
    // `pub use` may lead in a circle too.
    for _ in 0..8 {
        let longest = (0..=names.len()).rev().find(|&len| sources.contains_key(&names[..len]))?;
        let (home, source) = sources.get_key_value(&names[..longest])?;
        let (first, rest) = names[longest..].split_first()?;
        match source.exports.get(first) {
            Some(real) => names = [real, rest].concat(),
            None => return Some(home),
        }
    }
    None
}

/// Sets of two or more nodes of which each reaches the others. O(nodes * edges).
fn strongly_connected<'a>(
    edges: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
) -> Vec<Vec<&'a Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        edges.keys().map(|&from| (from, reachable(edges, from))).collect();
    let mut left: BTreeSet<&Module> = edges.keys().copied().collect();
    let mut circles = Vec::new();
    while let Some(first) = left.pop_first() {
        let back =
            |node: &&&Module| reached[first].contains(**node) && reached[**node].contains(first);
        let others: Vec<&Module> = left.iter().filter(back).copied().collect();
        left.retain(|node| !others.contains(node));
        if !others.is_empty() {
            circles.push([&[first], &others[..]].concat());
        }
    }
    circles
}

fn reachable<'a>(
    edges: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
    from: &'a Module,
) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(node) = open.pop() {
        let next = edges.get(node).into_iter().flatten().copied();
        open.extend(next.filter(|&next| reached.insert(next)));
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::super::scan::parse;
    use super::*;

    const FILES: [(&str, &str); 7] = [
        (
            "crates/a/src/lib.rs",
            "mod b; pub mod c; mod d; #[path = \"e/mod.rs\"] pub mod plan; pub use b::B;",
        ),
        ("crates/a/src/b.rs", "use crate::c::{C, Other}; pub struct B;"),
        ("crates/a/src/c/mod.rs", "mod real; pub(crate) use real::C; pub struct Other;"),
        ("crates/a/src/c/real.rs", "fn f() -> crate::B { super::super::b::B } pub struct C;"),
        ("crates/a/src/d.rs", "use crate::plan::P; #[cfg(test)] mod tests { use crate::b::B; }"),
        ("crates/a/src/e/mod.rs", "use super::d::D; pub struct P; #[cfg(test)] mod fake;"),
        ("crates/a/src/e/fake.rs", "use crate::b::B; use crate::c::C;"),
    ];

    fn with_bounds(circles: &str) -> Vec<String> {
        let bounds = format!("across.a = 2\n[circles]\n{circles}").leak();
        let tree = Tree::of(&[&FILES[..], &[(BOUNDS, bounds)]].concat());
        no_circle_grows(&tree, &parse(&tree).0).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn circles_are_found_through_facades_and_tests_make_none() {
        let tree = Tree::of(&FILES);
        let circles = &circles(&parse(&tree).0)["a"];
        let names = |circle: &Vec<String>| {
            circle.iter().map(|path| path.replace("crates/a/src/", "")).collect::<Vec<_>>()
        };
        let found: Vec<_> = circles.iter().map(names).collect();
        assert_eq!(found, [["b.rs", "c/real.rs"], ["d.rs", "e/mod.rs"]]);
    }

    #[test]
    fn a_circle_across_folders_or_of_many_files_is_a_finding() {
        let found_of = |files: &[(&'static str, &'static str)], allowed| -> Vec<String> {
            let found = circles(&parse(&Tree::of(files)).0);
            let of_crate = found.iter().flat_map(|(name, of)| misplaced(name, of, allowed));
            of_crate.map(|finding| finding.to_string()).collect()
        };
        let found = |files: &[(&'static str, &'static str)]| found_of(files, 0);
        let across = found(&FILES);
        assert_eq!(across.len(), 2);
        assert_eq!(found_of(&FILES, 2), [""; 0]);
        assert!(found_of(&FILES, 3)[0].ends_with("write `a = 2`"));
        assert!(across[0].contains("across folders") && across[0].contains("c/real.rs"));
        // The page of a folder beside it.
        let page = [
            ("crates/a/src/b.rs", "mod c; use c::C; pub struct B;"),
            ("crates/a/src/b/c.rs", "use super::B; pub struct C;"),
        ];
        assert_eq!(found(&page), [""; 0]);
        let ring = [
            ("crates/a/src/a.rs", "use crate::b::T;"),
            ("crates/a/src/b.rs", "use crate::c::T;"),
            ("crates/a/src/c.rs", "use crate::d::T;"),
            ("crates/a/src/d.rs", "use crate::e::T;"),
            ("crates/a/src/e.rs", "use crate::f::T;"),
            ("crates/a/src/f.rs", "use crate::g::T; use crate::a::T as First;"),
            ("crates/a/src/g.rs", "use crate::a::T;"),
        ];
        assert_eq!(found(&ring[..6]), [""; 0]);
        assert!(found(&ring)[0].contains("at most 6 files"));
    }

    #[test]
    fn a_circle_that_grows_or_shrinks_is_a_finding() {
        assert_eq!(with_bounds("a = [2, 2]"), [""; 0]);
        let grown = with_bounds("a = [2]");
        assert_eq!(grown.len(), 1);
        assert!(grown[0].starts_with("crates/a: ") && grown[0].contains("d.rs"), "{grown:?}");
        assert!(with_bounds("")[0].contains("which had 0"));
        for smaller in ["a = [3, 2]", "a = [2, 2, 2]"] {
            let found = with_bounds(smaller);
            assert!(found[0].ends_with("write `a = [2, 2]`"), "{found:?}");
        }
        assert!(with_bounds("a = [2, 2]\nb = [5]")[0].ends_with("write `b = []`"));
        assert_eq!(with_bounds("a = 2").len(), 1, "what is no list of sizes is refused");
    }
}
