//! Explain, advise, diff and report as a user runs them: a figure is the same in texts, in JSON and on the page.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;
use vramp::Bytes;
use vramp_trace::{ReadLimits, Trace, read_trace};

// --- `vramp explain`, `vramp advise` and `vramp diff` as a user runs them ---

const GNN: &str = "examples/traces/gnn.pickle.gz";
const OOM: &str = "examples/traces/llama_varlen_oom.pickle.gz";
const RESNET: &str = "examples/traces/resnet_multires_stacks.pickle.gz";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn vramp(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.current_dir(root()).args(args);
    command
}

fn stdout(args: &[&str]) -> String {
    let assert = vramp(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[args, &["--json"]].concat())).unwrap()
}

#[test]
fn the_verdict_names_the_demand_and_the_limit() {
    let text = stdout(&["explain", OOM]);
    for words in [
        "needs 16.91 GiB at once (14.97 GiB allocated and 1.94 GiB requested)",
        "a limit between 15.20 GiB and 17.14 GiB, while 123.92 GiB of the card were free",
        "workloads.py:32 w_llama_varlen",
        "activation",
    ] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    let text = stdout(&["explain", OOM, "--limit", "16GiB"]);
    assert!(text.contains("no allocator fits it in 16.00 GiB"), "{text}");
    let found = json(&["explain", OOM]);
    assert_eq!(found["schema_version"], 2);
    assert_eq!(found["verdict"]["cause"], "limit");
    assert_eq!(found["demand_bytes"].as_u64(), Some(18_156_037_524));
}

/// Returns what follows the last heading of a text.
fn last_part<'a>(text: &'a str, heading: &str) -> &'a str {
    text.rsplit_once(heading).unwrap_or_else(|| panic!("no '{heading}' in:\n{text}")).1
}

#[test]
fn an_explanation_ends_with_what_to_do_and_names_the_request_first() {
    let text = stdout(&["explain", OOM]);
    let request = "The request that failed: workloads.py:32 w_llama_varlen, which requested 1.94 GiB \
                   (in torch/nn/functional.py:3504 cross_entropy) at event 1,029.";
    let line = text.lines().position(|line| line.contains(request)).expect(&text);
    assert!(line < 6, "{text}");
    let last = last_part(&text, "What to do\n");
    for words in [
        "Raise the limit of the process to 18.00 GiB: the card has 139.12 GiB.",
        "torch.cuda.set_per_process_memory_fraction(0.13)",
        "1.94 GiB less at that moment is enough",
    ] {
        assert!(last.contains(words), "'{words}' is not in:\n{text}");
    }
    // Rows that are alike are one, and an asterisk has its meaning.
    assert!(text.contains("4 x  171.50 MiB"), "{text}");
    assert!(text.contains("An asterisk marks the least"), "{text}");
}

#[test]
fn a_job_that_fits_is_told_to_change_nothing() {
    for (trace, limit) in [(OOM, "24GiB"), (RESNET, "l4"), (GNN, "24GiB")] {
        let found = json(&["advise", trace, "--limit", limit]);
        let conclusion = &found["conclusions"][0];
        let remedies = conclusion["remedies"].as_array().unwrap();
        assert_eq!(remedies[0]["kind"], "nothing", "{trace}: {remedies:?}");
        let own = found["tried"][0]["limited"][0]["peak_reserved_bytes"].as_u64().unwrap();
        for remedy in &remedies[1..] {
            let name = remedy["text"].as_str().unwrap().split(' ').next().unwrap();
            let tried = found["tried"].as_array().unwrap().iter();
            let mut of = tried.filter(|it| it["name"] == name);
            let peak = of.next().unwrap()["limited"][0]["peak_reserved_bytes"].as_u64().unwrap();
            assert!(peak <= own / 100 * 98, "{trace}: {remedy}");
        }
    }
    let text = stdout(&["advise", RESNET, "--limit", "l4"]);
    assert!(text.contains("To fit into l4 (21.49 GiB)\n- It fits already"), "{text}");
    let text = stdout(&["explain", OOM, "--limit", "l4"]);
    assert!(text.contains("fits in l4 (21.49 GiB)"), "{text}");
    assert!(last_part(&text, "What to do\n").starts_with("- It fits already: change nothing."));
}

#[test]
fn sums_and_stacks_equal_an_independent_computation() {
    let mut command = std::process::Command::new("python3");
    command.current_dir(root()).arg("bench/check-explain.py");
    command.args(["--vramp", env!("CARGO_BIN_EXE_vramp"), GNN, OOM, RESNET]);
    let output = command.output().expect("this test needs python3 on the PATH");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("3 snapshots checked, 0 differences"), "{output:?}");
}

#[test]
fn a_job_that_would_fit_is_fragmented_and_what_fits_is_named() {
    // PyTorch releases what it caches, and fits in 19.79 GiB.
    let found = json(&["explain", GNN, "--limit", "24GiB"]);
    assert_eq!(found["verdict"]["cause"], "none");
    let found = json(&["explain", GNN, "--limit", "18GiB"]);
    assert_eq!(found["verdict"]["cause"], "fragmentation");
    let remedies = found["verdict"]["remedies"].as_array().unwrap();
    assert!(
        remedies
            .iter()
            .any(|it| it["kind"] == "vramp" && it["code"].as_str().unwrap().contains("enable()"))
    );
    let peak = &found["peak"];
    assert_eq!(peak["live_bytes"].as_u64(), Some(16_522_160_092));
    let sums = ["sites", "categories", "streams"].map(|list| {
        let shares = peak[list].as_array().unwrap();
        shares.iter().map(|share| share["bytes"].as_u64().unwrap()).sum::<u64>()
    });
    assert_eq!(sums, [16_522_160_092; 3]);
}

#[test]
fn the_smallest_limit_fits_and_a_little_less_does_not() {
    let found = json(&["explain", RESNET]);
    for fit in found["fits"].as_array().unwrap() {
        let name = fit["allocator"].as_str().unwrap();
        let name = if name == "PyTorch's defaults" { "torch" } else { name };
        let limit = fit["smallest_limit_bytes"].as_u64().unwrap();
        let runs = |limit: u64| {
            let limit = limit.to_string();
            json(&["replay", RESNET, "--device", "sim", "--allocator", name, "--limit", &limit])
        };
        assert_eq!(runs(limit)["oom_at_event"], Value::Null, "{name}");
        assert!(runs(limit / 100 * 98)["oom_at_event"].is_u64(), "{name}");
        assert!(runs(limit)["peak_reserved_bytes"].as_u64().unwrap() <= limit, "{name}");
    }
}

#[test]
fn advice_is_a_line_to_paste_for_each_limit_and_replays_the_same() {
    let text = stdout(&["advise", GNN, "--limit", "16GiB,24GiB", "--limit", "60GiB"]);
    assert!(text.contains("export PYTORCH_CUDA_ALLOC_CONF="), "{text}");
    assert!(text.contains("To fit into 60.00 GiB\n- It fits already: change nothing."), "{text}");
    let found = json(&["advise", GNN, "--limit", "24GiB"]);
    for tried in found["tried"].as_array().unwrap() {
        let Some(line) = tried["line"].as_str() else { continue };
        let Some(settings) = line.strip_prefix("export PYTORCH_CUDA_ALLOC_CONF=") else { continue };
        if settings.starts_with("backend") {
            continue;
        }
        let args = ["replay", GNN, "--device", "sim", "--allocator", "torch", "--limit", "24GiB"];
        let replayed = json(&[&args[..], &["--torch-config", settings]].concat());
        let run = &tried["limited"][0];
        assert_eq!(run["fits"], replayed["oom_at_event"].is_null(), "{settings}");
        assert_eq!(run["peak_reserved_bytes"], replayed["peak_reserved_bytes"], "{settings}");
    }
}

#[test]
fn what_does_not_fit_ends_with_code_three_if_asked() {
    let args = ["advise", OOM, "--limit", "16GiB"];
    let text = stdout(&args);
    assert!(text.contains("No allocator fits it below 16.91 GiB"), "{text}");
    vramp(&[&args[..], &["--fail-on-oom"]].concat()).assert().code(3);
    vramp(&["replay", OOM, "--limit", "16GiB", "--fail-on-oom"]).assert().code(3);
    vramp(&["replay", OOM, "--limit", "20GiB", "--fail-on-oom"]).assert().success();
}

/// Writes an example as a snapshot after `change`.
fn changed(folder: &TempDir, example: &str, change: impl FnOnce(&mut Trace)) -> String {
    let mut trace = read_trace(root().join(example), &ReadLimits::default()).unwrap();
    change(&mut trace);
    let path = folder.path().join("run.pickle");
    trace.write_snapshot(File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_recording_without_history_promises_no_savings() {
    let folder = TempDir::new().unwrap();
    let path = changed(&folder, RESNET, |trace| trace.events.clear());
    let text = stdout(&["replay", &path]);
    assert!(text.contains("The recording has no history"), "{text}");
    assert!(text.contains("_record_memory_history"), "{text}");
    assert!(!text.contains("less"), "{text}");
    let text = stdout(&["explain", &path]);
    assert!(
        text.contains("The recording has no history, so it does not show why memory ran out"),
        "{text}"
    );
    vramp(&["advise", &path, "--limit", "1GiB"]).assert().code(1);
}

#[test]
fn a_recording_that_begins_in_the_middle_promises_no_savings() {
    let folder = TempDir::new().unwrap();
    let path = changed(&folder, RESNET, |trace| {
        let late = trace.events.split_off(trace.events.len() / 2);
        trace.events = late;
    });
    let text = stdout(&["replay", &path]);
    for words in ["begins in the middle of the job", "Repaired: ", "were reserved already"] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    assert!(!text.contains("less ("), "{text}");
}

#[test]
fn two_runs_are_compared_by_line() {
    let found = json(&["diff", OOM, OOM]);
    let changes = found["sites"].as_array().unwrap();
    assert!(changes.iter().all(|it| it["before_bytes"] == it["after_bytes"]), "{found}");
    let text = stdout(&["diff", RESNET, OOM]);
    assert!(text.contains("+4.12 GiB"), "{text}");
    assert!(text.contains("workloads.py:32 w_llama_varlen"), "{text}");
}

#[test]
fn completions_and_manual_pages_are_complete() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&["completions", shell]).contains("fail-on-oom"), "{shell}");
    }
    let folder = TempDir::new().unwrap();
    stdout(&["man", folder.path().to_str().unwrap()]);
    assert!(Path::new(&folder.path().join("vramp-explain.1")).exists());
}

// --- `vramp report`: files in, files out ---

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vramp"))
}

fn trace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../examples/traces/{name}.pickle.gz"))
}

#[cfg(not(feature = "pictures"))]
#[test]
fn a_program_without_pictures_says_how_to_get_them() {
    let folder = tempfile::tempdir().unwrap();
    let (page, png) = (folder.path().join("a.html"), folder.path().join("a.png"));
    let mut report = program();
    report.arg("report").arg(trace("llama_varlen_oom")).arg("-o").arg(&page).arg("--png").arg(&png);
    let assert = report.assert().failure();
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(error.contains("--features pictures"), "{error}");
    assert!(!png.exists());
}

#[cfg(feature = "pictures")]
#[test]
fn a_report_writes_a_page_and_pictures_without_fonts() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (page, svg, png) = (path("a.html"), path("a.svg"), path("a.png"));
    let output = program()
        .arg("report")
        .arg(trace("llama_varlen_oom"))
        .arg("-o")
        .arg(&page)
        .arg("--svg")
        .arg(&svg)
        .arg("--png")
        .arg(&png)
        .args(["--limit", "15GiB,20GiB"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("1,510 events of 1 recorded device"), "{text}");
    let page = fs::read_to_string(&page).unwrap();
    for wanted in
        ["Settings and limits", "Smallest limit that fits", "set_per_process_memory_fraction(0.13)"]
    {
        assert!(page.contains(wanted), "{wanted}");
    }
    assert!(page.len() < 600_000, "{}", page.len());
    let svg = fs::read_to_string(&svg).unwrap();
    assert!(svg.contains("aria-label=\"Memory of llama_varlen_oom\""));
    assert!(!svg.contains("<text"), "letters are shapes");
    let png = fs::read(&png).unwrap();
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    // Width and height of the header, in big endian.
    assert_eq!(u32::from_be_bytes(png[16..20].try_into().unwrap()), 1920);
}

#[test]
fn several_recordings_are_compared_and_have_no_picture() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("ranks.html");
    let both = [trace("llama_varlen_oom"), trace("gnn")];
    let output = program().arg("report").args(&both).arg("-o").arg(&page).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(fs::read_to_string(&page).unwrap().contains("Comparison of 2 recordings"));
    let picture = folder.path().join("a.svg");
    let output = program()
        .arg("report")
        .args(&both)
        .arg("--svg")
        .arg(&picture)
        .arg("-o")
        .arg(&page)
        .output();
    let error = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(error.contains("--svg and --png draw one recorded device"), "{error}");
    assert!(!picture.exists());
}

#[test]
fn a_page_that_cannot_be_written_is_named() {
    let output =
        program().arg("report").arg(trace("gnn")).args(["-o", "/no/such/folder/a.html"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("vramp: cannot write '/no/such/folder/a.html': "), "{error}");
    let error = self::error(program().arg("report").arg(trace("gnn")).args(["-o", "/dev/full"]));
    assert!(error.starts_with("vramp: cannot write '/dev/full': No space left"), "{error}");
}

#[test]
fn standard_output_has_the_page_alone() {
    let input = fs::read(trace("gnn")).unwrap();
    let output = program().args(["report", "-", "-o", "-"]).write_stdin(input).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("standard output ("));
    let error = error(program().args(["report", "-", "-"]).write_stdin(""));
    assert!(error.contains("standard input (-) is given twice"), "{error}");
}

#[test]
fn no_output_replaces_a_recording_or_another_output() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (input, link, page) = (path("gnn.pickle.gz"), path("link"), path("a.html"));
    fs::copy(trace("gnn"), &input).unwrap();
    std::os::unix::fs::symlink(&input, &link).unwrap();
    let before = fs::read(&input).unwrap();
    for option in ["--output", "--svg", "--png"] {
        for output in [&input, &link] {
            let mut command = program();
            command.current_dir(&folder).arg("report").arg(&input).arg(option).arg(output);
            let error = error(&mut command);
            assert!(error.contains("is a recording that is read"), "{option}: {error}");
        }
    }
    assert_eq!(fs::read(&input).unwrap(), before);
    fs::write(&page, "old").unwrap();
    let other = folder.path().join(".").join("a.html");
    for [one, two] in [["-o", "--svg"], ["-o", "--png"], ["--svg", "--png"]] {
        let mut command = program();
        command.current_dir(&folder).arg("report").arg(&input);
        let error = error(command.arg(one).arg(&page).arg(two).arg(&other));
        assert!(error.contains("is given for two files"), "{one} {two}: {error}");
    }
    assert_eq!(fs::read(&page).unwrap(), b"old");
    assert!(!path("report.html").exists());
}

#[test]
fn a_name_that_turns_text_is_not_printed_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a\u{202e}b.pickle.gz");
    fs::copy(trace("gnn"), &input).unwrap();
    let output = folder.path().join("\u{202e}.html");
    let output = program().arg("report").arg(&input).arg("-o").arg(output).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(" events of 1 recorded device") && !text.contains('\u{202e}'), "{text}");
}

fn error(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

// --- A figure is the same in texts, in JSON and on the page, wherever it has the same name ---

const TRACES: [&str; 2] = ["llama_varlen_oom", "resnet_multires_stacks"];
const FITS: &str = "Smallest limit that fits, by replay";
const REPLAYS: &str = "Replays without a limit";

fn printed(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let assert = command.current_dir(root).args(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn rows(args: &[&str]) -> Vec<Value> {
    let printed = printed(&[args, &["--json"]].concat());
    printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn bytes(value: &Value) -> String {
    Bytes::new(value.as_u64().unwrap()).to_string()
}

/// Returns a text of the page as a reader sees it.
fn shown(html: &str) -> String {
    let parts = html.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text));
    let text: String = parts.collect();
    text.replace("&#39;", "'").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
}

/// Returns the cells of a row of the page: that of the table `title` whose first cell is `name`.
fn cells(page: &str, title: &str, name: &str) -> Vec<String> {
    let table = page.split_once(&format!("<h3>{title}</h3>")).unwrap().1;
    let table = table.split_once("</table>").unwrap().0;
    let rows = table.split("<tr>").skip(2);
    let cells = |row: &str| row.split("</td>").map(shown).collect::<Vec<String>>();
    rows.map(cells).find(|cells| cells[0].trim() == name).unwrap()
}

/// Returns the row of a table in a text, without its mark.
fn row<'a>(text: &'a str, heading: &str, name: &str) -> &'a str {
    let after = text.split_once(heading).unwrap_or_else(|| panic!("{heading}: {text}")).1;
    let is_row = |line: &&str| line.trim_start_matches(['*', ' ']).starts_with(name);
    after.lines().find(is_row).unwrap()
}

#[track_caller]
fn contains(text: &str, figures: &[String]) {
    for figure in figures {
        assert!(text.contains(figure), "'{figure}' is not in:\n{text}");
    }
}

#[test]
fn each_figure_has_one_value_in_text_json_and_page() {
    let folder = tempfile::tempdir().unwrap();
    for name in TRACES {
        let trace = format!("examples/traces/{name}.pickle.gz");
        let html = folder.path().join("page.html");
        printed(&["report", &trace, "-o", html.to_str().unwrap()]);
        let html = fs::read_to_string(html).unwrap();
        let page = shown(html.split_once("<script").map_or(&html[..], |(before, _)| before));
        let text = printed(&["explain", &trace]);
        let found = rows(&["explain", &trace]).remove(0);
        for finding in found["verdict"]["findings"].as_array().unwrap() {
            let words = [finding["text"].as_str().unwrap().to_owned()];
            contains(&text, &words);
            contains(&page, &words);
        }
        for remedy in found["verdict"]["remedies"].as_array().unwrap() {
            let words = ["text", "code"].iter().filter_map(|key| remedy[key].as_str());
            let words: Vec<String> = words.map(str::to_owned).collect();
            contains(&text, &words);
            contains(&page, &words);
        }
        for fit in found["fits"].as_array().unwrap() {
            let allocator = fit["allocator"].as_str().unwrap();
            let figures = ["smallest_limit_bytes", "peak_reserved_bytes"].map(|it| bytes(&fit[it]));
            contains(row(&text, FITS, allocator), &figures);
            assert_eq!(cells(&html, FITS, allocator)[1..3], figures, "{name} on {allocator}");
        }
        replays(&trace, &html, &page, &found);
    }
}

/// Compares the replays of a recording with what was explained.
fn replays(trace: &str, html: &str, page: &str, found: &Value) {
    let args = ["replay", trace, "--device", "sim", "--allocator", "all"];
    let text = printed(&args);
    for outcome in rows(&args) {
        let allocator = outcome["allocator"].as_str().unwrap();
        assert_eq!(outcome["peak_live_bytes"], found["peak_live_bytes"], "{trace}");
        assert_eq!(outcome["peak_demand_bytes"], found["demand_bytes"], "{trace}");
        let explained = match allocator {
            "torch" => &found["fits"][0],
            name => {
                let fits = found["fits"].as_array().unwrap();
                fits.iter().find(|fit| fit["allocator"] == name).unwrap()
            }
        };
        let [reserved, needed] =
            ["peak_reserved_bytes", "peak_demand_bytes"].map(|key| outcome[key].as_u64().unwrap());
        assert_eq!(explained["peak_reserved_bytes"], reserved, "{trace} on {allocator}");
        let overhead = outcome["overhead"].as_f64().unwrap();
        assert!((overhead - reserved as f64 / needed as f64).abs() < 1e-9, "{trace}: {overhead}");
        let figures = [bytes(&outcome["peak_reserved_bytes"]), format!("{overhead:.3}")];
        contains(row(&text, "overhead", allocator), &figures);
        assert_eq!(cells(html, REPLAYS, allocator)[2..4], figures, "{trace} on {allocator}");
        if allocator == "vramp" {
            let card = format!("peak reserved by vramp{}{} times what", figures[0], figures[1]);
            contains(page, &[card]);
        }
    }
}
