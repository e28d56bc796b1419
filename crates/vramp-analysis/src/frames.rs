//! Call stacks as a person reads them: the user's own line first, frameworks folded.
//!
//! A frame belongs to one of three origins, by its file name:
//!
//! 1. [`Origin::User`]: none of the others.
//! 2. [`Origin::Library`]: an installed package other than PyTorch: a file in `site-packages`, or a
//!    relative path that begins with a package's name, as in recordings whose folders were removed.
//! 3. [`Origin::Framework`]: PyTorch, Python's own modules, compiled code and frames without a file.
//!
//! The *site* of a stack is its innermost frame of the user. A stack without one has its innermost
//! frame of a library instead, then its innermost frame. The *operation* is the innermost frame.
//! `native.rs` has the rules for stacks of compiled programs, as `vramp exec` records them.

use std::collections::HashMap;

use vramp_trace::{Frame, StackId, Stacks};

use crate::native;

/// Where the code of a frame comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// PyTorch, Python's own modules, or compiled code.
    Framework,
    /// Another installed package.
    Library,
    /// The user's own code.
    User,
}

/// Folders of installed packages.
const PACKAGES: [&str; 2] = ["site-packages/", "dist-packages/"];
/// Packages that are frameworks, and their parts that are installed in packages of their own.
const FRAMEWORKS: [&str; 8] =
    ["torch", "triton", "numpy", "cupy", "_pytest", "pluggy", "threading", "concurrent"];
/// Packages that recordings without folders are known to name.
const LIBRARIES: [&str; 16] = [
    "transformers",
    "accelerate",
    "diffusers",
    "peft",
    "trl",
    "torchvision",
    "torchaudio",
    "torchtune",
    "torchtitan",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "megatron",
    "vllm",
    "sglang",
    "torch_geometric",
];
/// Endings of compiled code's files.
const COMPILED: [&str; 10] =
    [".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp", ".c", ".so", ".cxx", ".pyx"];

impl Origin {
    /// Returns the origin of a frame.
    pub fn of(frame: &Frame<'_>) -> Origin {
        let file = frame.filename;
        if file.is_empty() || file == "??" || file.starts_with('<') {
            return Origin::Framework;
        }
        if COMPILED.iter().any(|ending| file.ends_with(ending)) || file.contains(".so.") {
            return Origin::Framework;
        }
        if let Some(inside) = in_package(file) {
            let name = inside.split('/').next().unwrap_or(inside);
            let is_framework = FRAMEWORKS.contains(&name);
            return if is_framework { Origin::Framework } else { Origin::Library };
        }
        // Python's own modules, and PyTorch built in its source folder.
        let own = file.contains("/lib/python3") || file.contains("/torch/_") || in_torch(file);
        if own { Origin::Framework } else { Origin::User }
    }
}

/// Returns the path from the package's name on, if the file is of an installed package.
fn in_package(file: &str) -> Option<&str> {
    let mut folders = PACKAGES.iter().filter_map(|folder| file.rsplit_once(folder));
    if let Some((_, inside)) = folders.next() {
        return Some(inside);
    }
    let (first, _) = file.split_once('/')?;
    (FRAMEWORKS.contains(&first) || LIBRARIES.contains(&first)).then_some(file)
}

fn in_torch(file: &str) -> bool {
    const PARTS: [&str; 7] = ["nn", "autograd", "optim", "utils", "cuda", "distributed", "fx"];
    file.rsplit_once("/torch/")
        .is_some_and(|(_, inside)| inside.split('/').next().is_some_and(|it| PARTS.contains(&it)))
}

/// Longest file name in a label. Longer ones lose their first folders.
const FILE_MAX: usize = 60;

/// Returns a frame as `folder/file.py:12 function`.
pub fn describe(frame: &Frame<'_>) -> String {
    let file = short_file(frame.filename);
    match (file.as_str(), frame.line) {
        ("", _) => shown(frame.name),
        (file, 0) => format!("{file} {}", shown(frame.name)),
        (file, line) => format!("{file}:{line} {}", shown(frame.name)),
    }
}

/// Returns a text from a recording as it may be printed: control characters, which could move the
/// cursor of a terminal, become question marks, and more than 200 characters are cut.
pub fn shown(text: &str) -> String {
    const MAX: usize = 200;
    let replace = |c: char| if c.is_control() || is_direction(c) { '?' } else { c };
    let mut shown: String = text.chars().take(MAX).map(replace).collect();
    if text.chars().nth(MAX).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Marks that change the direction of text, so that it reads as another text.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns the end of a path: inside its package, and at most two folders.
fn short_file(path: &str) -> String {
    let inside = in_package(path);
    let path = inside.unwrap_or(path);
    let cut = path.rmatch_indices('/').nth(if inside.is_some() { 3 } else { 1 });
    let mut end = cut.map_or(path, |(at, _)| &path[at + 1..]);
    while end.len() > FILE_MAX
        && let Some((_, rest)) = end.split_once('/')
    {
        end = rest;
    }
    shown(end)
}

/// Number of a site in [`Labels`].
pub type SiteId = u32;

/// The labels of all stacks of a trace. Each stack is looked at once.
#[derive(Clone, Debug)]
pub struct Labels {
    sites: Vec<String>,
    operations: Vec<String>,
    by_stack: Vec<(SiteId, u32)>,
}

/// Site and operation of blocks without a stack.
pub(crate) const NO_STACK: &str = "(no stack recorded)";

impl Labels {
    /// Labels every stack. O(frames of all different stacks).
    pub fn of(stacks: &Stacks) -> Labels {
        let mut labels = Labels {
            sites: vec![NO_STACK.to_owned()],
            operations: vec![NO_STACK.to_owned()],
            by_stack: Vec::with_capacity(stacks.len()),
        };
        let mut sites: HashMap<String, u32> = HashMap::new();
        let mut operations: HashMap<String, u32> = HashMap::new();
        for index in 0..stacks.len() {
            let frames = StackId::from_index(index).map(|id| stacks.frames(id).collect::<Vec<_>>());
            let frames = frames.unwrap_or_default();
            let label = match (site(&frames), operation(&frames)) {
                (Some(site), Some(operation)) => (
                    intern(&mut sites, &mut labels.sites, describe(site)),
                    intern(&mut operations, &mut labels.operations, describe(operation)),
                ),
                _ => (0, 0),
            };
            labels.by_stack.push(label);
        }
        labels
    }

    /// Returns the site of a stack.
    pub fn site_of(&self, stack: Option<StackId>) -> SiteId {
        stack.and_then(|id| self.by_stack.get(id.index())).map_or(0, |(site, _)| *site)
    }

    /// Returns the text of a site.
    pub fn site(&self, site: SiteId) -> &str {
        &self.sites[site as usize]
    }

    /// Returns the text of a stack's operation.
    pub fn operation_of(&self, stack: Option<StackId>) -> &str {
        let label = stack.and_then(|id| self.by_stack.get(id.index()));
        &self.operations[label.map_or(0, |(_, operation)| *operation as usize)]
    }
}

fn intern(ids: &mut HashMap<String, u32>, texts: &mut Vec<String>, text: String) -> u32 {
    if let Some(&id) = ids.get(&text) {
        return id;
    }
    let id = u32::try_from(texts.len()).unwrap_or(u32::MAX);
    texts.push(text.clone());
    ids.insert(text, id);
    id
}

/// Returns the innermost frame of the highest origin.
fn site<'a, 'b>(frames: &'b [Frame<'a>]) -> Option<&'b Frame<'a>> {
    if native::is_native(frames) {
        return frames.get(native::site(frames));
    }
    let of = |origin| frames.iter().find(move |frame| Origin::of(frame) == origin);
    of(Origin::User).or_else(|| of(Origin::Library)).or_else(|| frames.first())
}

fn operation<'a, 'b>(frames: &'b [Frame<'a>]) -> Option<&'b Frame<'a>> {
    match native::is_native(frames) {
        true => frames.get(native::operation(frames)),
        false => frames.first(),
    }
}

/// Returns the frames of a stack for a person, outermost first. A run of frames of the framework
/// becomes one line, such as `(torch: 6 frames)`, but for the innermost frame.
pub fn folded(stacks: &Stacks, stack: Option<StackId>) -> Vec<String> {
    let Some(stack) = stack else { return vec![NO_STACK.to_owned()] };
    let frames: Vec<Frame<'_>> = stacks.frames(stack).collect();
    let is_native = native::is_native(&frames);
    let is_hidden = |frame: &Frame<'_>| match is_native {
        true => native::is_between(frame),
        false => Origin::of(frame) == Origin::Framework,
    };
    let mut lines = Vec::new();
    let mut hidden = 0;
    for (index, frame) in frames.iter().enumerate().rev() {
        if index > 0 && is_hidden(frame) {
            hidden += 1;
            continue;
        }
        push_hidden(&mut lines, &mut hidden);
        lines.push(describe(frame));
    }
    lines
}

fn push_hidden(lines: &mut Vec<String>, hidden: &mut usize) {
    match std::mem::take(hidden) {
        0 => {}
        1 => lines.push("(framework: 1 frame)".to_owned()),
        frames => lines.push(format!("(framework: {frames} frames)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame<'a>(filename: &'a str, line: u32, name: &'a str) -> Frame<'a> {
        Frame { name, filename, line }
    }

    #[test]
    fn the_origin_follows_from_the_file() {
        for (file, origin) in [
            ("/home/me/train.py", Origin::User),
            ("train.py", Origin::User),
            ("/venv/lib/python3.12/site-packages/torch/nn/modules/conv.py", Origin::Framework),
            ("/venv/lib/python3.12/site-packages/transformers/models/x.py", Origin::Library),
            ("/usr/lib/python3.12/threading.py", Origin::Framework),
            ("torch/nn/functional.py", Origin::Framework),
            ("transformers/cache_utils.py", Origin::Library),
            ("models/net.py", Origin::User),
            ("<frozen runpy>", Origin::Framework),
            ("??", Origin::Framework),
            ("/src/pytorch/torch/nn/functional.py", Origin::Framework),
            ("/src/pytorch/aten/src/ATen/native/Conv.cpp", Origin::Framework),
            ("/home/me/my-torch/model.py", Origin::User),
        ] {
            assert_eq!(Origin::of(&frame(file, 1, "f")), origin, "{file}");
        }
    }

    #[test]
    fn the_site_is_the_users_innermost_line() {
        let torch = "/v/site-packages/torch/nn/modules/linear.py";
        let library = "/v/site-packages/transformers/models/llama/modeling_llama.py";
        let mut stacks = Stacks::default();
        let all = [
            frame(torch, 134, "forward"),
            frame(library, 175, "forward"),
            frame("/job/model.py", 9, "step"),
            frame("/job/train.py", 20, "main"),
        ];
        let first = stacks.add(all);
        let second = stacks.add([all[0], all[1]]);
        let third = stacks.add([all[0]]);
        let labels = Labels::of(&stacks);
        let site = |stack| labels.site(labels.site_of(stack)).to_owned();
        assert_eq!(site(first), "job/model.py:9 step");
        assert_eq!(site(second), "transformers/models/llama/modeling_llama.py:175 forward");
        assert_eq!(site(third), "torch/nn/modules/linear.py:134 forward");
        assert_eq!(site(None), NO_STACK);
        assert_eq!(labels.operation_of(first), "torch/nn/modules/linear.py:134 forward");
        assert_eq!(folded(&stacks, first)[..2], ["job/train.py:20 main", "job/model.py:9 step"]);
    }

    #[test]
    fn a_compiled_programs_frames_are_its_own() {
        let mut stacks = Stacks::default();
        let stack = stacks.add([
            frame("libcuda.so.1", 0, "cuMemAlloc"),
            frame("/usr/lib/libcudart.so.13", 0, "cudaMalloc"),
            frame("/home/me/src/job.cu", 7, "Job::batches"),
            frame("/home/me/bin/train", 0, "main"),
            frame("/usr/lib/libc.so.6", 0, "__libc_start_main"),
        ]);
        let labels = Labels::of(&stacks);
        assert_eq!(labels.site(labels.site_of(stack)), "src/job.cu:7 Job::batches");
        assert_eq!(labels.operation_of(stack), "lib/libcudart.so.13 cudaMalloc");
        assert_eq!(
            folded(&stacks, stack),
            [
                "(framework: 1 frame)",
                "bin/train main",
                "src/job.cu:7 Job::batches",
                "(framework: 1 frame)",
                "libcuda.so.1 cuMemAlloc"
            ]
        );
    }

    #[test]
    fn control_characters_and_long_names_are_not_printed() {
        assert_eq!(shown("a\x1b[2Jb\u{202e}c"), "a?[2Jb?c");
        assert_eq!(shown(&"x".repeat(1000)).len(), 203);
    }
}
