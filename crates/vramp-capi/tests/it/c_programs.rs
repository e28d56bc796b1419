//! C and C++ programs compiled against the header and the shared library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use vramp_alloc::sharing::kept::{KeeperConfig, KeeperServer};

/// A temporary directory with `libvramp.so` and a program linked to it.
struct Program {
    folder: TempDir,
}

impl Program {
    /// Compiles a source of `tests/c`. Warnings are errors.
    fn compile(compiler: &str, source: &str, standard: &str) -> Program {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let library = folder.path().join("libvramp.so");
        std::fs::copy(shared_library(), library).expect("the library is built with the tests");
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        let output = Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread"])
            .arg(format!("-I{}", own.join("include").display()))
            .arg(own.join("tests/c").join(source))
            .arg("-o")
            .arg(folder.path().join("program"))
            .arg(format!("-L{}", folder.path().display()))
            .args(["-lvramp", "-ldl", "-Wl,-rpath,$ORIGIN"])
            .output()
            .expect("a C compiler is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Program { folder }
    }

    /// Runs the program, which must succeed, and returns its stderr.
    fn run(&self, case: &str, settings: &[(&str, &str)]) -> String {
        let Output { status, stdout, stderr } = Command::new(self.folder.path().join("program"))
            .arg(case)
            .env_remove("VRAMP_CONF")
            .env_remove("VRAMP_DEVICE")
            .env_remove("PYTORCH_ALLOC_CONF")
            .env_remove("PYTORCH_CUDA_ALLOC_CONF")
            .env_remove("VPMM_PAGES")
            .envs(settings.iter().copied())
            .output()
            .expect("the program starts");
        let stderr = String::from_utf8(stderr).expect("reports are UTF-8");
        assert!(status.success(), "{status}: {stderr}");
        assert_eq!(stdout, b"passed\n");
        stderr
    }
}

/// Returns the path of the shared library: cargo builds it into the directory of the test.
fn shared_library() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    test.with_file_name("libvramp_capi.so")
}

/// Compiles a file that includes the header and nothing else. Warnings are errors.
fn header_compiles(compiler: &str, language: &str, standard: &str) {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(compiler)
        .args(["-x", language, &format!("-std={standard}"), "-fsyntax-only", "-Wall", "-Wextra"])
        .args(["-Wpedantic", "-Werror", "-include"])
        .arg(own.join("include/vramp.h"))
        .arg("/dev/null")
        .output()
        .expect("a C compiler is installed");
    assert!(output.status.success(), "{standard}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_header_compiles_in_every_standard_from_c89_and_cpp11_on() {
    for standard in ["c89", "c99", "c11", "c17", "c2x"] {
        header_compiles("cc", "c", standard);
    }
    for standard in ["c++11", "c++14", "c++17", "c++20", "c++2b"] {
        header_compiles("c++", "c++", standard);
    }
}

#[test]
fn the_header_for_rmm_says_what_it_needs() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (standard, needed) in [("c++14", "needs C++17"), ("c++17", "needs CCCL")] {
        let output = Command::new("c++")
            .args(["-x", "c++", &format!("-std={standard}"), "-fsyntax-only"])
            .arg(own.join("include/vramp/rmm.hpp"))
            .output()
            .expect("a C++ compiler is installed");
        let errors = String::from_utf8_lossy(&output.stderr);
        let first = errors.lines().find(|line| line.contains("error:")).unwrap_or_default();
        assert!(!output.status.success() && first.contains(needed), "{standard}: {errors}");
    }
}

#[test]
fn the_shared_library_exports_exactly_the_functions_of_the_header() {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(shared_library())
        .output()
        .expect("binutils are installed with the C compiler");
    let symbols = String::from_utf8(output.stdout).expect("symbols are ASCII");
    let exported: BTreeSet<&str> =
        symbols.lines().filter_map(|line| line.split(' ').next()).collect();
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(own.join("include/vramp.h")).expect("it is in git");
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(|line| !line.starts_with([' ', '/', '#', '}']) && !line.starts_with("typedef"))
        .filter_map(|line| line.split_once('('))
        .filter_map(|(before, _)| before.split([' ', '*']).next_back())
        .collect();
    assert!(declared.len() > 40, "{declared:?}");
    assert_eq!(exported, declared);
}

#[test]
fn a_c_program_uses_every_function() {
    assert_eq!(Program::compile("cc", "smoke.c", "-std=c99").run("", &[]), "");
}

#[test]
fn buffers_are_leased_and_evicted_in_c_and_cpp() {
    assert_eq!(Program::compile("cc", "buffers.c", "-std=c99").run("", &[]), "");
    for standard in ["-std=c++11", "-std=c++20"] {
        assert_eq!(Program::compile("c++", "buffers.cpp", standard).run("", &[]), "", "{standard}");
    }
}

#[test]
fn regions_are_paused_and_resumed_in_c_and_cpp() {
    assert_eq!(Program::compile("cc", "regions.c", "-std=c99").run("", &[]), "");
    for standard in ["-std=c++11", "-std=c++20"] {
        assert_eq!(Program::compile("c++", "regions.cpp", standard).run("", &[]), "", "{standard}");
    }
}

#[test]
fn containers_of_cpp_lie_in_pinned_memory() {
    for standard in ["-std=c++17", "-std=c++20"] {
        assert_eq!(Program::compile("c++", "pinned.cpp", standard).run("", &[]), "", "{standard}");
    }
}

#[test]
fn pages_of_caches_are_committed_and_parked_in_c() {
    assert_eq!(Program::compile("cc", "kv.c", "-std=c99").run("", &[]), "");
}

#[test]
fn allocators_share_a_card_by_budgets_in_c() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = folder.path().join("vramp");
    let program = Program::compile("cc", "budget.c", "-std=c99");
    assert_eq!(program.run(directory.to_str().expect("a plain path"), &[]), "");
}

#[test]
fn the_example_gives_its_memory_up_and_gets_it_back() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/sleep.c");
    let program = Program::compile("cc", path.to_str().expect("a plain path"), "-std=c89");
    let states = program.run("", &[("VRAMP_DEVICE", "sim:h200")]);
    let asleep = "weights: 0 bytes on the card, 50331648 asleep, 50331648 on the host\n";
    assert!(states.contains(asleep), "{states}");
}

#[test]
fn two_processes_share_a_block_in_c_and_cpp() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (compiler, source, standard) in
        [("cc", "share.c", "-std=c99"), ("c++", "share.cpp", "-std=c++17")]
    {
        let path = own.join("examples").join(source);
        let program = Program::compile(compiler, path.to_str().expect("a plain path"), standard);
        assert_eq!(program.run("", &[("VRAMP_DEVICE", "sim:h200")]), "", "{source}");
        let folder = tempfile::tempdir().expect("a folder can be made");
        let directory = folder.path().to_str().expect("a plain path");
        let settings = [("VRAMP_DEVICE", "sim:h200"), ("VRAMP_IPC_DIRECTORY", directory)];
        assert_eq!(program.run("", &settings), "", "{source} with a socket in a directory");
    }
}

#[test]
fn memory_is_kept_beyond_its_process_in_c_and_cpp() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let directory = folder.path().join("vramp");
    let config = KeeperConfig { directory: &directory, limit: None, idle_exit: None };
    let _server = KeeperServer::start(&config).expect("the keeper starts");
    let directory = directory.to_str().expect("a plain path");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Those of C++ remove their memory, and that of C leaves it.
    for (compiler, source, standard) in [
        ("c++", "keep.cpp", "-std=c++11"),
        ("c++", "keep.cpp", "-std=c++20"),
        ("cc", "keep.c", "-std=c99"),
    ] {
        let path = own.join("examples").join(source);
        let program = Program::compile(compiler, path.to_str().expect("a plain path"), standard);
        assert_eq!(program.run(directory, &[("VRAMP_DEVICE", "sim:h200")]), "", "{source}");
    }
}

#[test]
fn contents_go_to_a_store_that_is_written_in_c() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/store.c");
    let path = path.to_str().expect("a plain path");
    let folder = tempfile::tempdir().expect("a folder can be made");
    let objects = folder.path().to_str().expect("a plain path");
    let program = Program::compile("cc", path, "-std=c99");
    assert_eq!(program.run(objects, &[("VRAMP_DEVICE", "sim:h200")]), "");
    let left = std::fs::read_dir(folder.path()).expect("it is a folder").count();
    assert_eq!(left, 0, "objects are removed");
}

/// Returns the code on a page of `docs` in one language, and whether each piece is a whole program.
fn code_of(page: &str, language: &str) -> Vec<(String, bool)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let fence = format!("\n```{language}\n");
    let blocks = text.split(&fence).skip(1).filter_map(|block| block.split("```").next());
    blocks.map(|block| (block.to_owned(), block.contains("int main("))).collect()
}

#[test]
fn the_programs_of_the_guides_compile_and_run() {
    for (page, language, count) in [
        ("c-interface.md", "c", 2),
        ("tiers.md", "c", 1),
        ("tutorials/allocator-in-cpp.md", "cpp", 1),
    ] {
        let programs = code_of(page, language).into_iter().filter(|(_, is_program)| *is_program);
        let programs: Vec<String> = programs.map(|(code, _)| code).collect();
        assert_eq!(programs.len(), count, "{page}");
        for program in programs {
            // The machine of the tests may have a card.
            let program = program.replace("\"auto\"", "\"sim:h200\"");
            let folder = tempfile::tempdir().expect("a folder can be made");
            let source = folder.path().join(format!("guide.{language}"));
            std::fs::write(&source, program).expect("the folder is ours");
            let source = source.to_str().expect("a plain path");
            if language == "c" {
                assert_eq!(Program::compile("cc", source, "-std=c89").run("", &[]), "");
                continue;
            }
            let printed = Program::compile("c++", source, "-std=c++11").run("", &[]);
            let shown = code_of(page, "text");
            assert!(shown.iter().any(|(text, _)| text.contains(&printed)), "not shown: {printed}");
        }
    }
}

#[test]
fn the_fragments_of_the_guides_compile() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = std::fs::read_to_string(own.join("tests/c/fragment.hpp")).expect("it is there");
    let pages = ["c-interface.md", "sleep.md", "deferrable.md", "tutorials/allocator-in-cpp.md"];
    let code = pages.iter().flat_map(|page| [code_of(page, "c"), code_of(page, "cpp")].concat());
    let fragments = code.filter(|(_, is_program)| !is_program);
    let mut count = 0;
    for (fragment, _) in fragments {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let source = folder.path().join("fragment.cpp");
        std::fs::write(&source, format!("{names}{{\n{fragment}}}\n}}\n")).expect("it is ours");
        let output = Command::new("c++")
            .args(["-std=c++17", "-fsyntax-only"])
            .arg(format!("-I{}", own.join("include").display()))
            .arg(&source)
            .output()
            .expect("a C++ compiler is installed");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{fragment}\n{errors}");
        count += 1;
    }
    assert_eq!(count, 12);
}

#[test]
fn the_header_is_good_for_cpp_and_exceptions_arrive_there() {
    let program = Program::compile("c++", "torch.cpp", "-std=c++17");
    let simulated = ("VRAMP_DEVICE", "sim:h200");
    let silent = program.run("out_of_memory", &[simulated, ("VRAMP_CONF", "limit=256MiB")]);
    assert_eq!(silent, "");
    let reports = program.run("several_streams", &[simulated]);
    assert_eq!(reports.lines().count(), 4, "{reports}");
    assert!(reports.lines().all(|line| line.starts_with("vramp: ")), "{reports}");
    let reports = program.run("pools", &[simulated]);
    assert_eq!(reports.lines().count(), 4, "{reports}");
    assert!(reports.lines().all(|line| line.starts_with("vramp: ")), "{reports}");
}

#[test]
fn children_forked_beside_busy_threads_get_a_status_from_every_call() {
    let program = Program::compile("cc", "fork.c", "-std=c99");
    program.run("busy", &[("VRAMP_DEVICE", "sim:h200")]);
}

#[test]
fn a_child_forked_before_the_first_allocator_works_as_any_process() {
    let program = Program::compile("cc", "fork.c", "-std=c99");
    assert_eq!(program.run("early", &[("VRAMP_DEVICE", "sim:h200")]), "");
}

#[test]
fn bad_settings_are_reported_and_do_not_abort() {
    let program = Program::compile("c++", "torch.cpp", "-std=c++17");
    let wrong = [("VRAMP_CONF", "limit=many"), ("VRAMP_DEVICE", "toaster")];
    for setting in wrong {
        let reports = program.run("bad_settings", &[setting]);
        assert!(
            reports.contains(&format!("{} is invalid", setting.0)) || reports.contains(setting.1),
            "{reports}"
        );
    }
}

#[test]
fn variables_of_a_presets_own_project_are_used_and_named() {
    let program = Program::compile("cc", "settings.c", "-std=c99");
    let settings = [("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:40"), ("VPMM_PAGES", "30")];
    for (options, named) in [
        ("preset=torch", "vramp: preset=torch uses PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:40\n"),
        ("preset=vpmm", "vramp: preset=vpmm uses VPMM_PAGES=30\n"),
        ("preset=torch,torch=[max_split_size_mb:64]", ""),
        ("", ""),
    ] {
        assert_eq!(program.run(options, &settings), named, "{options}");
    }
    let program = Program::compile("c++", "torch.cpp", "-std=c++17");
    let conf = [("VRAMP_CONF", "preset=torch"), ("VRAMP_DEVICE", "sim:h200")];
    let reports = program.run("several_streams", &[conf[0], conf[1], settings[0]]);
    assert!(reports.contains("uses PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:40\n"), "{reports}");
}
