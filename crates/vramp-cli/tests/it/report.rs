//! `vramp report`: files in, files out.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;

fn vramp() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vramp"))
}

fn trace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../examples/traces/{name}.pickle.gz"))
}

#[test]
fn a_report_writes_a_page_and_pictures_without_fonts() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (page, svg, png) = (path("a.html"), path("a.svg"), path("a.png"));
    let output = vramp()
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
    let output = vramp().arg("report").args(&both).arg("-o").arg(&page).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(fs::read_to_string(&page).unwrap().contains("Comparison of 2 recordings"));
    let picture = folder.path().join("a.svg");
    let output =
        vramp().arg("report").args(&both).arg("--svg").arg(&picture).arg("-o").arg(&page).output();
    let error = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(error.contains("--svg and --png draw one recorded device"), "{error}");
    assert!(!picture.exists());
}

#[test]
fn a_page_that_cannot_be_written_is_named() {
    let output =
        vramp().arg("report").arg(trace("gnn")).args(["-o", "/no/such/folder/a.html"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("vramp: cannot write '/no/such/folder/a.html': "), "{error}");
    let error = self::error(vramp().arg("report").arg(trace("gnn")).args(["-o", "/dev/full"]));
    assert!(error.starts_with("vramp: cannot write '/dev/full': No space left"), "{error}");
}

#[test]
fn standard_output_has_the_page_alone() {
    let input = fs::read(trace("gnn")).unwrap();
    let output = vramp().args(["report", "-", "-o", "-"]).write_stdin(input).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("standard output ("));
    let error = error(vramp().args(["report", "-", "-"]).write_stdin(""));
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
            let mut command = vramp();
            command.current_dir(&folder).arg("report").arg(&input).arg(option).arg(output);
            let error = error(&mut command);
            assert!(error.contains("is a recording that is read"), "{option}: {error}");
        }
    }
    assert_eq!(fs::read(&input).unwrap(), before);
    fs::write(&page, "old").unwrap();
    let other = folder.path().join(".").join("a.html");
    for [one, two] in [["-o", "--svg"], ["-o", "--png"], ["--svg", "--png"]] {
        let mut command = vramp();
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
    let output = vramp().arg("report").arg(&input).arg("-o").arg(output).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(" events of 1 recorded device") && !text.contains('\u{202e}'), "{text}");
}

fn error(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}
