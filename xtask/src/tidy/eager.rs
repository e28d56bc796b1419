//! Arguments that a method does not always use, and that are computed and dropped also where it does not.
//!
//! `locked.then_some(Guard { lock })` makes the guard of a lock that another thread holds, and dropping it
//! unlocks. So does a count, a handle or a file, and what `take` or `lock` returns. `then`, `unwrap_or_else`,
//! `ok_or_else` and the like make it only where it is wanted.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::Finding;
use super::scan::Parsed;

/// Methods of which the first argument is not always used.
const METHODS: [&str; 8] =
    ["then_some", "unwrap_or", "ok_or", "map_or", "or", "xor", "or_insert", "get_or_insert"];
/// Methods that change something, or return what does so when it is dropped.
const CHANGES: [&str; 18] = [
    "take",
    "replace",
    "swap",
    "swap_remove",
    "remove",
    "pop",
    "pop_front",
    "pop_back",
    "next",
    "insert",
    "push",
    "lock",
    "try_lock",
    "read",
    "write",
    "fetch_add",
    "fetch_sub",
    "recv",
];
/// Types of other crates whose end changes something.
const FOREIGN: [&str; 6] = ["File", "OwnedFd", "TempDir", "MutexGuard", "Library", "JoinHandle"];

/// No such argument changes anything, also when it is dropped.
pub fn arguments_that_may_be_dropped(parsed: &Parsed<'_>) -> Vec<Finding> {
    let foreign = || Ends(FOREIGN.iter().map(|name| (*name).to_owned()).collect());
    let mut ends: BTreeMap<&str, Ends> = BTreeMap::new();
    for (path, file) in parsed {
        ends.entry(package(path)).or_insert_with(foreign).visit_file(file);
    }
    let mut findings = Vec::new();
    for (path, file) in parsed {
        let ends = &ends[package(path)].0;
        Scan { path, ends, findings: &mut findings }.visit_file(file);
    }
    findings
}

/// The folder of the package that has a file. Others may have types of the same names.
fn package(path: &str) -> &str {
    path.split_once("/src/").or(path.split_once("/tests/")).map_or(path, |(package, _)| package)
}

/// The types of a package with a destructor.
struct Ends(BTreeSet<String>);

impl<'ast> Visit<'ast> for Ends {
    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let of = item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
        if let (Some(name), syn::Type::Path(ty)) = (of, &*item.self_ty)
            && name.ident == "Drop"
        {
            self.0.extend(ty.path.segments.last().map(|last| last.ident.to_string()));
        }
        visit::visit_item_impl(self, item);
    }
}

struct Scan<'a> {
    path: &'a str,
    ends: &'a BTreeSet<String>,
    findings: &'a mut Vec<Finding>,
}

impl<'ast> Visit<'ast> for Scan<'_> {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        visit::visit_expr_method_call(self, call);
        let Some(argument) = call.args.first() else { return };
        if !METHODS.iter().any(|method| call.method == method) {
            return;
        }
        let mut made = Made { ends: self.ends, found: None };
        made.visit_expr(argument);
        if let Some(found) = made.found {
            let method = &call.method;
            let line = method.span().start().line;
            let message = format!(
                "`{method}` computes `{found}` also where it drops it: pass a closure, or match"
            );
            self.findings.push(Finding::new(self.path, line, message));
        }
    }
}

/// What an argument makes when it is computed.
struct Made<'a> {
    ends: &'a BTreeSet<String>,
    found: Option<String>,
}

impl Made<'_> {
    fn note(&mut self, path: &syn::Path) {
        let mut names = path.segments.iter().map(|segment| segment.ident.to_string());
        self.found = self.found.take().or_else(|| names.find(|name| self.ends.contains(name)));
    }
}

impl<'ast> Visit<'ast> for Made<'_> {
    /// Runs only where it is wanted.
    fn visit_expr_closure(&mut self, _: &'ast syn::ExprClosure) {}

    fn visit_expr_struct(&mut self, made: &'ast syn::ExprStruct) {
        self.note(&made.path);
        visit::visit_expr_struct(self, made);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(function) = &*call.func {
            self.note(&function.path);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if CHANGES.iter().any(|method| call.method == method) {
            self.found.get_or_insert_with(|| call.method.to_string());
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[cfg(test)]
mod tests {
    use super::super::scan::parse;
    use super::*;
    use crate::tree::Tree;

    fn found(body: &str) -> Vec<String> {
        let text = format!(
            "struct Guard<'a>(&'a L); impl Drop for Guard<'_> {{ fn drop(&mut self) {{}} }}\n\
             fn f() {{ {body}; }}\n"
        );
        let tree = Tree::of(&[("crates/vramp/src/a.rs", text.as_str())]);
        arguments_that_may_be_dropped(&parse(&tree).0).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_guard_that_is_dropped_where_it_is_not_wanted_is_found() {
        let message = "crates/vramp/src/a.rs:2: `then_some` computes `Guard` also where it drops it: \
                       pass a closure, or match";
        assert_eq!(found("locked.then_some(Guard { lock })"), [message]);
        for wrong in [
            "known.unwrap_or(Guard(lock))",
            "known.ok_or(slot.take())",
            "known.map_or(File::create(path), open)",
            "known.or(Some(Guard::of(lock)))",
            "map.entry(1).or_insert(queue.pop())",
        ] {
            assert_eq!(found(wrong).len(), 1, "{wrong}");
        }
        for right in [
            "locked.then(|| Guard { lock })",
            "known.unwrap_or_else(|| Guard(lock))",
            "slot.take().ok_or(Error)",
            "known.map_or(0, |at| slot.take())",
            "known.or_else(|| queue.pop())",
            "known.unwrap_or(usize::MAX)",
        ] {
            assert_eq!(found(right), [""; 0], "{right}");
        }
    }
}
