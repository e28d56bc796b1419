//! Words: phrases that a reader from CUDA or tcmalloc has to translate, and names that shadow Rust's.
//!
//! The list is short on purpose. It holds what came back most often; `STYLE.md` says the rest.

use super::Finding;
use super::scan::Sources;
use crate::tree::Tree;

/// Phrases, in lower case, each with what to write instead. Letters and digits must end at both
/// sides of a phrase.
const PHRASES: [(&str, &str); 15] = [
    ("whoever", "name the subject: the caller, a waiter, another thread, the stream"),
    ("nobody", "name the subject: no thread, no stream, no caller"),
    ("is told", "say what is passed, recorded, returned or printed"),
    ("are told", "say what is passed, recorded, returned or printed"),
    ("was told", "say what is passed, recorded, returned or printed"),
    ("be told", "say what is passed, recorded, returned or printed"),
    ("foretell", "predict"),
    ("foretells", "predicts"),
    ("pressed out", "evicted"),
    ("got up", "say what ended the wait"),
    ("bury", "reap, remove, or record as ended"),
    ("how manieth", "the index, counted from 0 or 1"),
    ("its last word", "the method that finishes it"),
    ("a wish for", "a request for"),
    ("has its turn", "is served in order of arrival"),
];

/// Documentation that says nothing without the line before it.
const FRAGMENTS: [&str; 12] = [
    "which.",
    "where.",
    "why.",
    "whose.",
    "how much.",
    "how many.",
    "how long.",
    "how often.",
    "which one.",
    "up to where.",
    "how much it is.",
    "what it is.",
];

/// Names that mean something else in every Rust file.
const PRELUDE: [&str; 24] = [
    "Send", "Sync", "Sized", "Copy", "Clone", "Drop", "Fn", "FnMut", "FnOnce", "Box", "Vec",
    "String", "Option", "Some", "None", "Result", "Ok", "Err", "Iterator", "Default", "From",
    "Into", "Eq", "Ord",
];

/// Comments, texts and pages use the field's terms.
pub fn plain_words(tree: &Tree) -> Vec<Finding> {
    let pages = tree.ending(".md").filter(|(path, _)| !path.starts_with("bench/results/"));
    let sources = tree.ending(".rs").filter(|(path, _)| !path.starts_with("xtask/src/tidy/"));
    let scripts = tree.ending(".py").chain(tree.ending(".h"));
    pages.chain(sources).chain(scripts).flat_map(|(path, text)| in_file(path, text)).collect()
}

fn in_file(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (nth, line) in text.lines().enumerate() {
        let lower = line.to_ascii_lowercase();
        for (phrase, instead) in PHRASES {
            if has_phrase(&lower, phrase) {
                let message = format!("\"{phrase}\": {instead}");
                findings.push(Finding::new(path, nth + 1, message));
            }
        }
        let doc = lower.trim_start().strip_prefix("///").map(str::trim);
        if doc.is_some_and(|doc| FRAGMENTS.contains(&doc)) {
            let message =
                "a fragment: say which thing it is, for a reader who sees this line alone";
            findings.push(Finding::new(path, nth + 1, message));
        }
    }
    findings
}

/// True if the phrase stands in the line and is not a part of a longer word.
fn has_phrase(line: &str, phrase: &str) -> bool {
    let ends = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    line.match_indices(phrase).any(|(at, found)| {
        ends(line[..at].chars().next_back()) && ends(line[at + found.len()..].chars().next())
    })
}

/// No public type or trait has a name of Rust's prelude.
pub fn no_shadowed_prelude(sources: &Sources) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources.iter() {
        for (name, line) in &source.public_types {
            if PRELUDE.contains(&name.as_str()) {
                let message = format!("`{name}` shadows the prelude: qualify it by what it is of");
                findings.push(Finding::new(&source.path, *line, message));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        plain_words(&Tree::of(&[(path, text)])).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_phrase_is_found_in_sources_and_pages_and_says_what_to_write() {
        for (phrase, instead) in PHRASES {
            for path in ["crates/vramp/src/a.rs", "docs/a.md"] {
                let found = found(path, &format!("// First.\n// It {phrase}, so.\n"));
                assert_eq!(found, [format!("{path}:2: \"{phrase}\": {instead}")]);
            }
        }
    }

    #[test]
    fn a_phrase_within_a_word_and_the_list_itself_are_no_findings() {
        assert!(found("a.rs", "// this told-by, untold is tolding of liveness\n").is_empty());
        assert!(found("xtask/src/tidy/words.rs", "// nobody\n").is_empty());
    }

    #[test]
    fn a_fragment_is_found_where_it_is_the_whole_line() {
        assert_eq!(found("a.rs", "    /// Which.\n    pub a: u8,\n").len(), 1);
        assert!(found("a.rs", "    /// Which stream frees.\n").is_empty());
    }

    #[test]
    fn a_public_name_of_the_prelude_is_found_and_a_private_one_is_not() {
        let text = "pub struct Drop;\npub enum Copy {}\nstruct Clone;\npub struct DropGuard;\n";
        let (sources, _) = Sources::scan(&Tree::of(&[("crates/a/src/a.rs", text)]));
        assert_eq!(no_shadowed_prelude(&sources).len(), 2);
    }
}
