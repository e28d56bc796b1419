//! Calls that have no place where they are.

use super::Finding;
use super::scan::{Sources, Use};
use crate::tree::Tree;

/// What the core may not know: clocks, locks, threads, the environment, output, hash order.
const IMPURE: [&str; 7] = [
    "std::time",
    "std::env",
    "std::sync",
    "std::thread",
    "vramp_driver",
    "vramp_host",
    "vramp_cuda",
];
const IMPURE_WORDS: [&str; 4] = ["HashMap", "HashSet", "log", "tracing"];
const IMPURE_MACROS: [&str; 5] = ["println!", "print!", "eprintln!", "eprint!", "dbg!"];

/// What talks to a person, and so may read the environment: the programs, and what PyTorch loads.
const EDGES: [&str; 7] = [
    "crates/vramp-check/src/main.rs",
    "crates/vramp-cli/",
    "crates/vramp-capi/src/environment.rs",
    "crates/vramp-preload/src/settings.rs",
    "crates/vramp-capi/build.rs",
    "xtask/",
    "crates/vramp-testing/",
];

/// Code that only decides: one whole crate, and every folder named `core` in the others.
fn is_pure(path: &str) -> bool {
    path.starts_with("crates/vramp-core/src/")
        || (path.starts_with("crates/") && path.contains("/src/") && path.contains("/core/"))
}

/// Pure code has no lock, clock, thread, device, environment, output or hash order.
pub fn core_is_pure(sources: &Sources) -> Vec<Finding> {
    find(sources, |path, used| {
        let impure = IMPURE.iter().any(|module| is_within(&used.what, module))
            || used.what.split("::").any(|word| IMPURE_WORDS.contains(&word))
            || IMPURE_MACROS.contains(&used.what.as_str());
        (is_pure(path) && !used.in_test && impure).then(|| {
            format!("`{}`: pure code takes time, settings and facts as arguments", used.what)
        })
    })
}

/// Programs that show how to use the project depend on its front crate alone.
pub fn front_examples_name_the_front_crate(sources: &Sources) -> Vec<Finding> {
    find(sources, |path, used| {
        let inner = used.what.starts_with("vramp_");
        (inner && path.starts_with("crates/vramp/examples/"))
            .then(|| format!("`{}`: users depend on `vramp` alone; export it there", used.what))
    })
}

/// Settings are arguments; only a program reads the environment.
pub fn environment_is_read_at_the_edge(sources: &Sources) -> Vec<Finding> {
    find(sources, |path, used| {
        let reads = is_within(&used.what, "std::env") || used.what.starts_with("env::");
        let at_the_edge = EDGES.iter().any(|edge| path.starts_with(edge));
        (reads && !at_the_edge && !used.in_test)
            .then(|| format!("`{}`: only the programs read the environment", used.what))
    })
}

/// No panic in place of an error, no stub, no test that does not run.
pub fn nothing_unfinished(sources: &Sources) -> Vec<Finding> {
    find(sources, |_, used| match used.what.as_str() {
        "todo!" | "unimplemented!" | "#[ignore]" => Some(format!("`{}` is not done", used.what)),
        ".unwrap()" if !used.in_test => Some("`.unwrap()` outside tests".to_owned()),
        _ => None,
    })
}

/// Sources are plain ASCII, so that nothing looks like what it is not.
pub fn sources_are_ascii(tree: &Tree) -> Vec<Finding> {
    tree.ending(".rs")
        .flat_map(|(path, text)| {
            text.lines().enumerate().filter(|(_, line)| !line.is_ascii()).map(move |(nth, line)| {
                let odd: String = line.chars().filter(|c| !c.is_ascii()).collect();
                Finding::new(path, nth + 1, format!("not ASCII: {}", odd.escape_unicode()))
            })
        })
        .collect()
}

fn is_within(what: &str, module: &str) -> bool {
    what.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn find(sources: &Sources, wrong: impl Fn(&str, &Use) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources.iter() {
        for used in &source.uses {
            if let Some(message) = wrong(&source.path, used) {
                findings.push(Finding::new(&source.path, used.line, message));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_file(path: &str, text: &str) -> Sources {
        Sources::scan(&Tree::of(&[(path, text)])).0
    }

    #[test]
    fn each_impure_call_in_the_core_is_found_outside_tests() {
        for planted in [
            "use std::time::Instant;",
            "use std::{env, fmt};",
            "fn a() { std::thread::yield_now(); }",
            "use std::sync::Mutex;",
            "fn a() { println!(); }",
            "use std::collections::HashMap;",
            "fn a(b: HashSet<u8>) {}",
            "fn a() { tracing::info!(); }",
            "fn a() { log::info!(); }",
        ] {
            let core = "crates/vramp-core/src/a.rs";
            assert!(!core_is_pure(&in_file(core, planted)).is_empty(), "{planted}");
            let test = format!("#[cfg(test)] mod tests {{ {planted} }}");
            assert!(core_is_pure(&in_file(core, &test)).is_empty(), "{planted}");
            let room = "crates/vramp-tiers/src/ledger/core/a.rs";
            assert!(!core_is_pure(&in_file(room, planted)).is_empty(), "{planted}");
            let shell = "crates/vramp-tiers/src/ledger/shell/a.rs";
            assert!(core_is_pure(&in_file(shell, planted)).is_empty(), "{planted}");
        }
        assert!(core_is_pure(&in_file("crates/vramp-core/src/a.rs", "use std::fmt;")).is_empty());
    }

    #[test]
    fn an_example_of_the_front_crate_that_names_an_inner_one_is_found() {
        let check = |path, text| front_examples_name_the_front_crate(&in_file(path, text)).len();
        assert_eq!(check("crates/vramp/examples/a.rs", "use vramp_core::Bytes;"), 1);
        assert_eq!(check("crates/vramp/examples/a.rs", "use vramp::Bytes;"), 0);
        assert_eq!(check("crates/vramp-alloc/examples/a.rs", "use vramp_core::Bytes;"), 0);
    }

    #[test]
    fn the_environment_is_read_only_by_programs() {
        for planted in
            ["fn a() { std::env::var(\"A\"); }", "use std::env;", "fn a() { env::var(\"A\"); }"]
        {
            let check = |path| environment_is_read_at_the_edge(&in_file(path, planted)).len();
            assert_eq!(check("crates/vramp/src/a.rs"), 1, "{planted}");
            assert_eq!(check("crates/vramp-cli/src/a.rs"), 0, "{planted}");
            assert_eq!(check("crates/vramp/examples/a.rs"), 0, "{planted}");
            assert_eq!(check("crates/vramp-capi/src/environment.rs"), 0, "{planted}");
            assert_eq!(check("crates/vramp-capi/src/session.rs"), 1, "{planted}");
        }
        let compiled_in = in_file("crates/vramp/src/a.rs", "const A: &str = env!(\"A\");");
        assert!(environment_is_read_at_the_edge(&compiled_in).is_empty());
    }

    #[test]
    fn what_is_unfinished_is_found() {
        for planted in [
            "fn a() { todo!() }",
            "fn a() { unimplemented!() }",
            "#[test] #[ignore] fn a() {}",
            "#[test] #[ignore = \"slow\"] fn a() {}",
            "fn a() { b().unwrap(); }",
        ] {
            let found = nothing_unfinished(&in_file("crates/vramp/src/a.rs", planted));
            assert_eq!(found.len(), 1, "{planted}");
        }
        let test = in_file("crates/vramp/src/a.rs", "#[test] fn a() { b().unwrap(); }");
        assert!(nothing_unfinished(&test).is_empty());
    }

    #[test]
    fn a_character_beyond_ascii_is_found_with_its_line() {
        let found = sources_are_ascii(&Tree::of(&[("a.rs", "// plain\n// \u{2192}\n")]));
        assert_eq!(found[0].to_string(), "a.rs:2: not ASCII: \\u{2192}");
    }
}
