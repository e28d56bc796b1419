//! A figure is the same in texts, in JSON and on the page, wherever it has the same name.
use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use serde_json::Value;
use vramp::Bytes;

const TRACES: [&str; 2] = ["llama_varlen_oom", "resnet_multires_stacks"];
const FITS: &str = "Smallest limit that fits, by replay";
const REPLAYS: &str = "Replays without a limit";

fn stdout(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let assert = command.current_dir(root).args(args).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn json(args: &[&str]) -> Vec<Value> {
    let printed = stdout(&[args, &["--json"]].concat());
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
        stdout(&["report", &trace, "-o", html.to_str().unwrap()]);
        let html = fs::read_to_string(html).unwrap();
        let page = shown(html.split_once("<script").map_or(&html[..], |(before, _)| before));
        let text = stdout(&["explain", &trace]);
        let found = json(&["explain", &trace]).remove(0);
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
    let args = ["replay", trace, "--device", "sim"];
    let text = stdout(&args);
    for outcome in json(&args) {
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
        contains(row(&text, "overhead (reserved/needed)", allocator), &figures);
        assert_eq!(cells(html, REPLAYS, allocator)[2..4], figures, "{trace} on {allocator}");
        if allocator == "vramp" {
            let card = format!("peak reserved by vramp{}{} times what", figures[0], figures[1]);
            contains(page, &[card]);
        }
    }
}
