//! The page of a report: what is in it is what was recorded, and nothing in it runs.

use std::collections::BTreeMap;
use std::io::Read;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sha2::{Digest, Sha256};
use vramp::device::Device;
use vramp::{Bytes, DeviceAddr};
use vramp_analysis::explain::{self, explain};
use vramp_analysis::frames::folded;
use vramp_analysis::job::Job;
use vramp_analysis::remedy::{Remedy, RemedyKind};
use vramp_analysis::replay::CurvePoint;
use vramp_analysis::report::{
    Cell, Curve, Encoded, Facts, Figure, Findings, Kept, Part, Report, Source, Table,
};
use vramp_trace::{Event, EventKind, Frame, Request, StreamIndex, Trace, Workload};

/// Encodes a trace and writes its page.
fn page(trace: &Trace, budget: u64) -> (String, Kept) {
    let part = part(trace, budget);
    let kept = part.data.kept();
    (
        written(&Report { title: trace.name.clone(), origin: "a test".into(), parts: vec![part] }),
        kept,
    )
}

fn part(trace: &Trace, budget: u64) -> Part {
    let job = Job::of(trace, 0);
    let curve = Curve {
        label: "reserved by <b>".into(),
        kind: "vramp",
        points: (0..job.workload.requests.len() as u32)
            .step_by(7)
            .map(|request| CurvePoint { request, reserved_bytes: u64::from(request) * 11 })
            .collect(),
    };
    let data = Encoded::of(&Source { job: &job, curves: &[curve], budget }).unwrap();
    let device = Device::open("sim").unwrap();
    let options = explain::Options { fits: false, ..explain::Options::default() };
    let explanation = explain(&job, &device, &options).unwrap();
    let facts = Facts { explanation: &explanation, outcomes: &[], advice: None, blocks: 7 };
    Part { name: trace.name.clone(), findings: Findings::of(&facts), data }
}

fn written(report: &Report) -> String {
    let mut bytes = Vec::new();
    report.write(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// The text between two others, from the first place on.
fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let from = text.find(start).unwrap_or_else(|| panic!("no {start}")) + start.len();
    &text[from..from + text[from..].find(end).unwrap()]
}

fn data(page: &str) -> Value {
    serde_json::from_str(between(
        page,
        "<script type=\"application/json\" id=\"data\">",
        "</script>",
    ))
    .unwrap()
}

fn bytes(page: &str, name: &str) -> Vec<u8> {
    let text = between(page, &format!("id=\"column-0-{name}\">"), "</script>");
    let packed = STANDARD.decode(text).unwrap();
    let mut bytes = Vec::new();
    flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Reads the numbers of a column.
struct Numbers(std::vec::IntoIter<u8>);

impl Numbers {
    fn of(page: &str, name: &str) -> Numbers {
        Numbers(bytes(page, name).into_iter())
    }

    fn step(&mut self, before: u64) -> u64 {
        let code = self.next().unwrap();
        before.wrapping_add((code >> 1) ^ (code & 1).wrapping_neg())
    }
}

impl Iterator for Numbers {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = self.0.next()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }
}

/// A block as the page has it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    size: u64,
    category: u64,
    stream: u64,
    line: Option<String>,
    frames: Vec<String>,
    address: u64,
    from: u64,
    until: Option<u64>,
}

/// The blocks of a page, decoded from its columns alone.
fn decoded(page: &str) -> Vec<Seen> {
    let data = data(page);
    let head = &data["parts"][0];
    let sizes: Vec<u64> = Numbers::of(page, "sizes").collect();
    let sites: Vec<u64> = Numbers::of(page, "sites").collect();
    let nodes: Vec<u64> = Numbers::of(page, "nodes").collect();
    let stacks: Vec<u64> = Numbers::of(page, "stacks").collect();
    let frames: Vec<String> = serde_json::from_slice(&bytes(page, "frames")).unwrap();
    let (mut size, mut site) = (Numbers::of(page, "size"), Numbers::of(page, "site"));
    let (mut age, mut address) = (Numbers::of(page, "age"), Numbers::of(page, "address"));
    let mut blocks: Vec<Seen> = Vec::new();
    let (mut state, mut at) = (0, 0);
    for (index, op) in bytes(page, "op").into_iter().enumerate() {
        if index as u64 >= head["initial"].as_u64().unwrap() && op < 0x80 {
            state += 1;
        }
        match op & 0x7f {
            0 => {
                let place = 3 * site.next().unwrap() as usize;
                let stack = sites[place].checked_sub(1).map(|stack| stack as usize);
                let line = stack.map(|stack| frames[stacks[2 * stack + 1] as usize].clone());
                let mut path = Vec::new();
                let mut node = stack.map_or(0, |stack| stacks[2 * stack] as usize);
                while node > 0 {
                    path.push(frames[nodes[2 * node - 1] as usize].clone());
                    node = nodes[2 * node - 2] as usize;
                }
                path.reverse();
                let code = address.next().unwrap();
                let own = match code.checked_sub(1) {
                    Some(code) => {
                        at = u64::wrapping_add(at, (code >> 1) ^ (code & 1).wrapping_neg());
                        at
                    }
                    None => 0,
                };
                blocks.push(Seen {
                    size: sizes[size.next().unwrap() as usize],
                    category: sites[place + 1],
                    stream: sites[place + 2],
                    line,
                    frames: path,
                    address: own,
                    from: state,
                    until: None,
                });
            }
            1 => {
                let block = blocks.len() - 1 - age.next().unwrap() as usize;
                blocks[block].until = Some(state);
            }
            2 => drop(age.next().unwrap()),
            _ => {}
        }
    }
    assert_eq!(state, head["events"].as_u64().unwrap());
    blocks
}

/// The same from the workload, without any code of the report.
fn expected(trace: &Trace) -> Vec<Seen> {
    let Job { workload, blocks, categories: of, labels, .. } = Job::of(trace, 0);
    let state = |request: u32| {
        workload.device_event_of(request as usize).map_or(0, |event| event as u64 + 1)
    };
    let address = |block: u32, request: u32| match workload.initial_address(block) {
        Some(address) => address.number(),
        None => trace.events[workload.event_of(request as usize).unwrap()].address.number(),
    };
    blocks
        .iter()
        .map(|(number, block)| Seen {
            size: block.size.count(),
            category: of[number as usize] as u64,
            stream: u64::from(block.stream),
            line: block.stack.map(|stack| labels.site(labels.site_of(Some(stack))).to_owned()),
            frames: block.stack.map_or(Vec::new(), |stack| folded(&trace.stacks, Some(stack))),
            address: address(number, block.alloc),
            from: state(block.alloc),
            until: (block.free != u32::MAX).then(|| state(block.free)),
        })
        .collect()
}

fn event(kind: EventKind, address: u64, size: u64) -> Event {
    Event {
        kind,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        time_us: 0,
        stack: None,
    }
}

/// A recording that begins in the middle, loses frees, has failures, stacks and segments.
fn random_trace(seed: u64, events: usize) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut trace = Trace {
        name: format!("random {seed}"),
        device_count: 1,
        streams: vec![0, 7],
        actions: vec!["step 1".into()],
        ..Trace::default()
    };
    let stacks: Vec<_> = (0..20)
        .map(|_| {
            let frames: Vec<(String, u32)> = (0..random.usize(1..6))
                .map(|_| (format!("f{}", random.u32(0..9)), random.u32(1..4)))
                .collect();
            let frames =
                frames.iter().map(|(name, line)| Frame { name, filename: "job.py", line: *line });
            trace.stacks.add(frames)
        })
        .collect();
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    let mut time_us = 1_000_000;
    for _ in 0..events {
        let address = (1 + random.u64(0..200)) << 30;
        let size = random.u64(0..1 << 20);
        let mut made = match random.u32(0..20) {
            0..9 => {
                // Now and then over a live block: its free was lost.
                if live.contains_key(&address) && random.u32(0..4) > 0 {
                    continue;
                }
                live.insert(address, size);
                event(EventKind::Alloc, address, size)
            }
            9..14 => event(EventKind::FreeRequested, address, live.remove(&address).unwrap_or(512)),
            14..17 => event(EventKind::FreeCompleted, address, size),
            17 => event(EventKind::SegmentAlloc, address, 2 << 20),
            18 => event(EventKind::SegmentFree, address, 2 << 20),
            _ if random.bool() => event(EventKind::Oom, 5 << 20, 9 << 20),
            _ => event(EventKind::Unknown(vramp_trace::ActionId(0)), 0, 0),
        };
        time_us += random.u64(0..50);
        made.time_us = time_us;
        made.stream = StreamIndex(random.u32(0..2));
        made.stack = if random.u32(0..5) > 0 { stacks[random.usize(0..20)] } else { None };
        trace.events.push(made);
    }
    trace
}

#[test]
fn the_blocks_in_the_page_are_those_of_the_recording() {
    for seed in 0..12 {
        let trace = random_trace(seed, 1 + 400 * seed as usize);
        let (page, kept) = page(&trace, u64::MAX);
        assert_eq!(kept, Kept::All);
        assert_eq!(decoded(&page), expected(&trace), "seed {seed}");
    }
}

#[test]
fn the_overview_has_the_peak_and_the_failures_of_the_workload() {
    for seed in 20..30 {
        let trace = random_trace(seed, 3000);
        let workload = Workload::from_trace(&trace, 0);
        let (page, _) = page(&trace, u64::MAX);
        let data = data(&page);
        let head = &data["parts"][0];
        assert_eq!(head["peak_bytes"], workload.peak_live.count());
        let peak = workload.device_event_of(workload.peak_live_request).map_or(0, |at| at + 1);
        assert_eq!(head["peak"], peak);
        let sum = |values: &Value| -> u64 {
            values.as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).sum()
        };
        assert_eq!(sum(&head["peak_categories"]), workload.peak_live.count());
        let failures = |request: &&Request| matches!(request, Request::Oom { .. });
        let failures = workload.requests.iter().filter(failures).count();
        assert_eq!(head["failures"].as_array().unwrap().len(), failures);
        assert!(failures > 0, "the trace has failures");
        for failure in head["failures"].as_array().unwrap() {
            assert_eq!(sum(&failure["categories"]), failure["live"].as_u64().unwrap());
        }
        assert!(!head["marks"].as_array().unwrap().is_empty());
        assert_eq!(head["marks"][0][1], "step 1");
    }
}

#[test]
fn the_page_shows_the_failure_of_the_verdict_however_many_there_are() {
    let oom = |size| event(EventKind::Oom, 5 << 20, size);
    let alloc = |nth: u64| event(EventKind::Alloc, (1 + nth) << 30, 1 << 20);
    // Of several in a row the first: those after it come from handling its error.
    for caught in [0, 1, 499, 500, 700] {
        let mut trace = Trace { device_count: 1, streams: vec![0], ..Trace::default() };
        for nth in 0..caught {
            trace.events.extend([alloc(nth), oom(9 << 20)]);
        }
        trace.events.extend([alloc(caught), oom(8 << 30), oom(7 << 30)]);
        for (nth, event) in trace.events.iter_mut().enumerate() {
            event.time_us = nth as u64 + 1;
        }
        let mut part = part(&trace, u64::MAX);
        part.name = "rank 0".into();
        let other = Part { name: "rank 1".into(), ..self::part(&trace, u64::MAX) };
        let report =
            Report { title: String::new(), origin: String::new(), parts: vec![part, other] };
        let page = written(&report);
        let head = &data(&page)["parts"][0];
        let shown = head["shown_failure"].as_u64().unwrap() as usize;
        let failure = &head["failures"][shown];
        assert_eq!(failure["size"], 8u64 << 30, "after {caught}");
        assert_eq!(failure["state"], trace.events.len() - 1);
        assert_eq!(failure["live"], (caught + 1) << 20);
        let count = head["failures"].as_array().unwrap().len() as u64;
        assert_eq!(count + head["failures_left_out"].as_u64().unwrap(), caught + 2);
        let ranks = between(&page, "<section id=\"ranks\"", "</section>");
        assert!(ranks.contains("8.00 GiB"), "{ranks}");
    }
}

#[test]
fn annotations_stand_before_the_first_event_that_is_not_earlier() {
    let mut trace = random_trace(35, 100);
    let annotation = |time_us, name: &str, stage| vramp_trace::Annotation {
        stage,
        name: name.into(),
        device: Some(0),
        time_us,
    };
    trace.events.retain(|event| event.kind == EventKind::Alloc);
    let times: Vec<u64> = trace.events.iter().map(|event| event.time_us).collect();
    trace.annotations = vec![
        annotation(times[20], "forward", vramp_trace::Stage::End),
        annotation(times[3] + 1, "forward", vramp_trace::Stage::Start),
        annotation(u64::MAX, "late", vramp_trace::Stage::Start),
    ];
    trace.annotations[2].device = None;
    let elsewhere = vramp_trace::Annotation { device: Some(1), ..trace.annotations[0].clone() };
    trace.annotations.push(elsewhere);
    let (page, _) = page(&trace, u64::MAX);
    let first = times.iter().position(|&time| time > times[3]).unwrap() + 1;
    let second = times.iter().position(|&time| time >= times[20]).unwrap() + 1;
    let wanted =
        serde_json::json!([[first, "forward"], [second, "end of forward"], [times.len(), "late"],]);
    assert_eq!(data(&page)["parts"][0]["marks"], wanted);
}

#[test]
fn curves_and_times_are_read_back() {
    let trace = random_trace(31, 2000);
    let workload = Workload::from_trace(&trace, 0);
    let (page, _) = page(&trace, u64::MAX);
    let mut times = Numbers::of(&page, "time");
    let mut time = 0;
    for event in &trace.events {
        time = times.step(time);
        assert_eq!(time, event.time_us);
    }
    // Curve 0 is the recorded allocator's, curve 1 the one above.
    let mut points = Numbers::of(&page, "curve1");
    let (mut state, mut reserved) = (0, 0);
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for request in (0..workload.requests.len()).step_by(7) {
        let at = workload.device_event_of(request).map_or(0, |event| event as u64 + 1);
        last.insert(at, request as u64 * 11);
    }
    for (at, bytes) in last {
        state += points.next().unwrap();
        reserved = points.step(reserved);
        assert_eq!((state, reserved), (at, bytes));
    }
    assert_eq!(points.next(), None);
    let mut recorded = Numbers::of(&page, "curve0");
    let (mut state, mut reserved, mut most) = (0, 0, 0);
    while let Some(step) = recorded.next() {
        state += step;
        reserved = recorded.step(reserved);
        most = most.max(reserved);
    }
    assert!(state > 0 && most > 0);
    assert_eq!(data(&page)["parts"][0]["curves"][0]["most"], most);
}

#[test]
fn a_recording_over_the_budget_loses_addresses_first_and_the_page_says_so() {
    let trace = random_trace(40, 20_000);
    let (all, kept) = page(&trace, u64::MAX);
    assert_eq!(kept, Kept::All);
    let columns = |page: &str| -> usize {
        let pieces = page.split("<script type=\"text/plain\"").skip(1);
        pieces.map(|piece| between(piece, ">", "</script>").len()).sum()
    };
    let whole = columns(&all);
    let (few, kept) = page(&trace, whole as u64 - 1000);
    assert_eq!(kept, Kept::FewAddresses);
    assert!(columns(&few) < whole - 1000);
    assert!(few.contains("The address map is exact at these moments"));
    let data = data(&few);
    let moments =
        [&data["parts"][0]["peak"], &data["parts"][0]["events"]].map(|at| at.as_u64().unwrap());
    for (found, wanted) in decoded(&few).iter().zip(expected(&trace)) {
        let live = |at: u64| wanted.from <= at && wanted.until.is_none_or(|until| at < until);
        if moments.into_iter().any(live) {
            assert_eq!(found, &wanted);
        } else {
            assert!(found.address == 0 || found.address == wanted.address);
        }
    }
    let (none, kept) = page(&trace, 100);
    assert_eq!(kept, Kept::Bins);
    assert_eq!(columns(&none), 0);
    assert!(none.contains("is too large for this page"));
}

/// Texts that end elements and attributes, run, hide or turn around what is beside them.
const HOSTILE: [&str; 9] = [
    "</script><script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "<!--<script>",
    "]]>&lt;b&gt;&#60;",
    "a\0b\x1b[2J\r\n",
    "\u{202e}gnp.exe\u{2066}\u{2028}\u{2029}",
    "{{script}}{{data}}",
];

/// A trace with a hostile text in every field that may hold one.
fn hostile_trace() -> Trace {
    let mut trace = random_trace(50, 300);
    trace.name = HOSTILE.concat();
    trace.actions = vec![HOSTILE.concat()];
    trace.annotations = vec![vramp_trace::Annotation {
        stage: vramp_trace::Stage::Other(HOSTILE.concat().into()),
        name: HOSTILE.concat().into(),
        device: None,
        time_us: 1,
    }];
    trace.allocator_settings = vec![
        (HOSTILE.concat(), HOSTILE.concat()),
        ("PYTORCH_CUDA_ALLOC_CONF".into(), HOSTILE.concat()),
    ];
    let long = "<b>".repeat((16 << 20) / 3);
    for (index, text) in HOSTILE.iter().chain([&&*long]).enumerate() {
        let frame = Frame { name: text, filename: text, line: index as u32 };
        let stack = trace.stacks.add([frame]);
        let mut event = event(EventKind::Alloc, (1000 + index as u64) << 30, 1 << 20);
        event.stack = stack;
        trace.events.push(event);
    }
    trace
}

#[test]
fn hostile_texts_are_data_in_every_field() {
    let trace = hostile_trace();
    let mut part = part(&trace, u64::MAX);
    for text in HOSTILE {
        part.findings.verdict.push(text.into());
        part.findings.remedies.push((
            text.into(),
            vec![Remedy {
                kind: RemedyKind::Nothing,
                text: text.into(),
                code: Some(text.into()),
                fits_bytes: None,
            }],
        ));
        part.findings.headline.push_str(text);
        part.findings.missing.push(text.into());
        part.findings.figures.push(Figure {
            label: text.into(),
            value: text.into(),
            note: text.into(),
        });
        part.findings.tables.push(Table {
            title: text.into(),
            note: text.into(),
            columns: vec![text.into()],
            rows: vec![vec![Cell::text(text)], vec![Cell::number(f64::NAN, text)]],
        });
    }
    let title = HOSTILE.concat();
    let second = self::part(&trace, u64::MAX);
    let parts = vec![part, second];
    let page = written(&Report { title: title.clone(), origin: title, parts });
    // Every element of the page is one that the report writes: its scripts are known, and no name
    // of a recording opens or ends one.
    assert_eq!(page.matches("<script>").count(), 1);
    let scripts = page.matches("<script").count();
    assert_eq!(page.matches("</script").count(), scripts);
    let script = between(&page, "<script>", "</script>");
    let markup = page.replace(script, "");
    let style = between(&page, "<style>", "</style>");
    let markup = markup.replace(style, "");
    let island = between(&page, "id=\"data\">", "</script>");
    assert!(!island.contains(['<', '>']));
    let markup = markup.replace(island, "");
    for forbidden in ["<img", "<svg onload", "<!--", "onerror=alert(1)>", "' onmouseover"] {
        assert!(!markup.contains(forbidden), "{forbidden}");
    }
    for invisible in ['\0', '\x1b', '\u{202e}', '\u{2066}', '\u{2028}', '\u{2029}'] {
        assert!(!page.contains(invisible), "{invisible:?}");
    }
    // No handler, style or address in an attribute.
    let attributes = attribute_names(&markup);
    for attribute in attributes {
        assert!(!attribute.starts_with("on"), "{attribute}");
        assert!(
            !["style", "src", "srcset", "action", "formaction"].contains(&attribute),
            "{attribute}"
        );
    }
    assert!(page.len() < 3 << 20, "16 MB names are shortened: {}", page.len());
    let frames: Vec<String> = serde_json::from_slice(&bytes(&page, "frames")).unwrap();
    assert!(frames.iter().all(|frame| frame.chars().count() <= 600));
}

/// The names of all attributes of all elements.
fn attribute_names(markup: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for tag in markup.split('<').skip(1) {
        let Some(end) = tag.find('>') else { continue };
        let mut rest = &tag[..end];
        while let Some(equal) = rest.find("=\"") {
            let name = rest[..equal].rsplit(char::is_whitespace).next().unwrap();
            names.push(name);
            let value = &rest[equal + 2..];
            let close = value.find('"').unwrap_or(value.len().saturating_sub(1));
            rest = &value[(close + 1).min(value.len())..];
        }
    }
    assert!(names.len() > 100);
    names
}

#[test]
fn the_policy_allows_the_own_script_and_style_and_nothing_else() {
    let (page, _) = page(&random_trace(60, 50), u64::MAX);
    let policy = between(&page, "Content-Security-Policy\" content=\"", "\"");
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text.as_bytes()));
    let script = hash(between(&page, "<script>", "</script>"));
    let style = hash(between(&page, "<style>", "</style>"));
    assert_eq!(
        policy,
        format!(
            "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; \
             img-src data:; base-uri 'none'; form-action 'none'"
        )
    );
    let before = page.find("<script").unwrap();
    assert!(page.find("Content-Security-Policy").unwrap() < before);
}

#[test]
fn the_verdict_and_the_tables_need_no_script() {
    let trace = random_trace(61, 500);
    let (page, _) = page(&trace, u64::MAX);
    let body = between(&page, "<body>", "<script");
    for text in
        ["class=\"first\"", "Allocated when the request failed, by category", "<table", "<svg"]
    {
        assert!(body.contains(text), "{text}");
    }
}

#[test]
fn an_empty_recording_has_a_page_too() {
    let trace = Trace { device_count: 1, streams: vec![0], ..Trace::default() };
    let (page, kept) = page(&trace, u64::MAX);
    assert_eq!(kept, Kept::All);
    assert_eq!(data(&page)["parts"][0]["events"], 0);
    assert_eq!(decoded(&page), []);
}
