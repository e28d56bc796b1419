//! `vramp bench` as a user runs it, on the simulator and for a moment.
use assert_cmd::Command;
use serde_json::Value;

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.arg("bench").args(args);
    command
}

/// Returns the output on a simulated card, after a measurement of hardly any time.
fn short(args: &[&str]) -> String {
    let mut command = bench(args);
    let assert = command.args(["--device", "sim:h200", "--seconds", "0.01"]).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn rows(args: &[&str]) -> Vec<Value> {
    let printed = short(&[args, &["--json"]].concat());
    let rows: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in &rows {
        assert_eq!((&row["bench"], &row["device"]), (&args[0].into(), &"sim:h200".into()), "{row}");
        assert_eq!(row["simulated"], true);
        assert!(row["driver"].is_string(), "{row}");
    }
    rows
}

fn refused(args: &[&str], words: &str) {
    let assert = bench(args).env("VRAMP_DEVICE", "sim").assert().failure();
    let error = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(error.contains(words), "'{words}' is not in: {error}");
    assert!(!error.contains("panicked"), "{error}");
}

#[test]
fn hits_are_compared_with_malloc_and_the_drivers_pool_and_make_no_driver_call() {
    let rows = rows(&["hit", "--sizes", "512,4MiB", "--outstanding", "0,64"]);
    let named = |row: &Value| {
        let [size, outstanding] =
            ["size_bytes", "outstanding"].map(|field| row[field].as_u64().unwrap());
        (row["allocator"].as_str().unwrap().to_owned(), size, outstanding)
    };
    let expected = [
        ("system malloc", 64, 0),
        ("driver's pool", 512, 0),
        ("vramp", 512, 0),
        ("driver's pool", 4 << 20, 0),
        ("vramp", 4 << 20, 0),
        ("driver's pool", 512, 64),
        ("vramp", 512, 64),
        ("driver's pool", 4 << 20, 64),
        ("vramp", 4 << 20, 64),
    ];
    let expected = expected.map(|(name, size, held)| (name.to_owned(), size, held));
    assert_eq!(rows.iter().map(named).collect::<Vec<_>>(), expected);
    for row in &rows {
        assert!(row["pair_ns"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["of_system_malloc"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["pairs"].as_u64().unwrap() >= row["batches"].as_u64().unwrap(), "{row}");
        match row["allocator"].as_str().unwrap() {
            "vramp" => assert_eq!(row["driver_calls"], 0, "{row}"),
            "driver's pool" => {
                assert_eq!((&row["time_is"], &row["pair_ns"]), (&"modelled".into(), &950.0.into()));
            }
            _ => {}
        }
    }
}

#[test]
fn threads_are_compared_with_one_for_each_allocator() {
    for sizes in ["uniform", "log-uniform"] {
        let rows = rows(&["threads", "--threads", "1,2", "--allocator", "all", "--sizes", sizes]);
        let names: Vec<_> = rows.iter().map(|row| row["allocator"].as_str().unwrap()).collect();
        let expected =
            ["system malloc", "vramp", "vpmm", "stream-ordered", "torch", "torch-expandable"];
        assert_eq!(names, expected.map(|name| [name; 2]).concat());
        for (row, threads) in rows.iter().zip([1, 2].into_iter().cycle()) {
            assert_eq!((&row["threads"], &row["sizes"]), (&threads.into(), &sizes.into()));
            assert_eq!(row["outstanding"], 32);
            assert!(row["pairs_per_s"].as_f64().unwrap() > 0.0, "{row}");
            let ratio = row["of_one_thread"].as_f64().unwrap();
            assert!(if threads == 1 { ratio == 1.0 } else { ratio > 0.0 }, "{row}");
        }
    }
}

#[test]
fn growth_creates_the_allocated_memory_in_modelled_time() {
    let rows = rows(&["grow", "--total", "256MiB", "--block", "32MiB", "--allocator", "all"]);
    assert_eq!(rows.len(), 5);
    for row in &rows {
        assert_eq!(row["total_bytes"], 256 << 20);
        assert_eq!(row["blocks"], 8);
        assert_eq!(row["driver_ns_is"], "modelled");
        assert!(row["reserved_bytes"].as_u64().unwrap() >= 256 << 20, "{row}");
        assert!(row["driver_calls"].as_u64().unwrap() >= 8, "{row}");
        assert!(row["driver_ns"].as_u64().unwrap() > 0, "{row}");
        assert!(row["host_ns"].is_u64(), "{row}");
    }
    // VPMM has one chunk for each page, and a call to map each.
    assert_eq!(rows[1]["chunks_created"], 128);
}

#[test]
fn a_remap_moves_freed_memory_and_does_not_grow() {
    let rows = rows(&["remap", "--total", "512MiB", "--block", "16MiB", "--allocator", "all"]);
    assert_eq!(rows.len(), 3);
    for row in &rows[..2] {
        assert_eq!(row["made_bytes"], 256 << 20);
        assert_eq!(row["grown_bytes"], 0, "{row}");
        let moved = row["moved_bytes"].as_u64().unwrap();
        assert!(moved > 200 << 20 && moved <= 256 << 20, "{row}");
        assert!(row["driver_calls"].as_u64() > row["chunks_moved"].as_u64(), "{row}");
    }
    assert_eq!(rows[2]["moved_bytes"], 0);
}

#[test]
fn arenas_for_caches_commit_parked_pages_without_a_call_and_cold_ones_with_three_for_each_handle() {
    let rows = rows(&["kv", "--tensors", "8", "--each", "128MiB", "--rounds", "1"]);
    let calls = |what: &str, arrangement: &str| {
        let of = |row: &&Value| row["what"] == what && row["arrangement"] == arrangement;
        let row = rows.iter().find(of).unwrap_or_else(|| panic!("no row of {what}"));
        row["driver_calls"].as_u64().unwrap()
    };
    for arrangement in ["separate", "interleaved"] {
        assert_eq!(calls("commit parked", arrangement), 0);
        assert_eq!(calls("park", arrangement), 0);
    }
    assert_eq!(calls("commit cold", "separate"), 3 * 8);
    assert_eq!(calls("commit cold, superpage", "separate"), 3 * 8);
    assert_eq!(calls("commit cold", "interleaved"), 3);
    refused(&["kv", "--each", "16MiB"], "fewer rounds or longer tensors");
}

#[test]
fn graphs_share_an_arena_and_replays_write_the_same_bytes_as_the_calls() {
    let rows = rows(&["graphs", "--graphs", "12", "--block", "16MiB", "--arena", "720MiB"]);
    let of = |measure: &str| -> Vec<&Value> {
        rows.iter().filter(|row| row["measure"] == measure).collect()
    };
    let [shared] = of("shared")[..] else { panic!("{rows:?}") };
    assert_eq!(shared["graphs"], 12);
    let bytes = |key: &str| shared[key].as_u64().unwrap();
    assert!(bytes("largest_bytes") <= bytes("backed_bytes"), "{shared}");
    assert!(bytes("backed_bytes") < bytes("sum_bytes") / 2, "{shared}");
    let [same] = of("same")[..] else { panic!("{rows:?}") };
    assert_eq!((&same["replays"], &same["differing_bytes"]), (&12.into(), &0.into()));
    assert_eq!(same["hazards"], 0);
    assert!(same["compared_bytes"].as_u64().unwrap() > 12 * 3 * 65_536, "{same}");

    let lent = of("lent");
    let phases = lent.iter().map(|row| (row["borrower"].as_str(), row["phase"].as_str()));
    let phases: Vec<_> = phases.map(|(who, what)| (who.unwrap(), what.unwrap())).collect();
    let each = ["freed", "held"].map(|who| ["lend", "take", "bring back"].map(|what| (who, what)));
    assert_eq!(phases, each.concat());
    let renewed = lent.last().unwrap()["creates"].as_u64().unwrap();
    for row in &lent {
        let (maps, creates) = (row["maps"].as_u64().unwrap(), row["creates"].as_u64().unwrap());
        assert_eq!(row["driver_ns_is"], "modelled");
        match (row["phase"].as_str().unwrap(), row["borrower"].as_str().unwrap()) {
            ("lend", _) => assert_eq!((maps, creates), (0, 0), "{row}"),
            ("bring back", "held") => assert!(creates > 0 && maps >= creates, "{row}"),
            // The memory is at the addresses of the round before, except for what the arena got anew
            // while blocks held its chunks.
            ("take", "held") => assert!(creates == 0 && maps <= renewed, "{row}"),
            _ => assert_eq!((maps, creates), (0, 0), "{row}"),
        }
        let [borrowed, arena] =
            ["borrowed_bytes", "arena_bytes"].map(|key| row[key].as_f64().unwrap());
        assert!((0.89..=0.9).contains(&(borrowed / arena)), "{row}");
        assert!(row["driver_ms_per_gib"].as_f64().unwrap() < 2.0, "{row}");
    }

    let calls: Vec<_> = of("calls")
        .iter()
        .map(|row| (row["what"].as_str().unwrap(), row["driver_calls_each"].as_f64().unwrap()))
        .collect();
    let [(_, outside), (_, captured), plain, leased] = calls[..] else { panic!("{calls:?}") };
    assert_eq!((outside, plain), (0.0, ("launch", 1.0)));
    assert!((2.0..3.1).contains(&captured), "one for a malloc, two for a free: {captured}");
    let ("launch with a lease", leased) = leased else { panic!("{calls:?}") };
    // It asks whether the stream captures, and records an event that one replay in eight asks about.
    assert!((3.0..3.5).contains(&leased), "{leased}");
}

#[test]
fn copies_are_compared_with_plain_ones_in_each_direction_and_in_both() {
    for scattered in [&[][..], &["--scattered"]] {
        let args = ["copy", "--sizes", "1MiB,9MiB", "--step", "4MiB"];
        let rows = rows(&[&args[..], scattered].concat());
        let named = |row: &Value| {
            (row["direction"].as_str().unwrap().to_owned(), row["size_bytes"].as_u64().unwrap())
        };
        let each = [1 << 20, 9 << 20].map(|size| {
            ["to host", "to device", "both"].map(|direction| (direction.to_owned(), size))
        });
        assert_eq!(rows.iter().map(named).collect::<Vec<_>>(), each.concat());
        for row in &rows {
            let number = |key: &str| row[key].as_f64().unwrap();
            let both = if row["direction"] == "both" { 2.0 } else { 1.0 };
            let plain = number("plain_bytes_per_s");
            assert!((40e9 * both..56e9 * both).contains(&plain), "{row}");
            assert!(number("mover_bytes_per_s") > 40e9, "{row}");
            assert!((0.5..2.1).contains(&number("of_plain")), "{row}");
            assert!(number("moves") >= 5.0 && number("driver_calls_each") >= 3.0, "{row}");
            assert_eq!(
                (&row["step_bytes"], &row["time_is"]),
                (&(4 << 20).into(), &"modelled".into())
            );
        }
    }
}

#[test]
fn reservations_are_timed_alone_and_beside_waiters_and_mallocs_with_their_extra_time() {
    let rows = rows(&["reserve", "--waiters", "1,8"]);
    let of = |what: &str| -> Vec<&Value> {
        rows.iter().filter(|row| row["what"].as_str().unwrap().starts_with(what)).collect()
    };
    assert_eq!(of("reserve and release").len(), 2);
    assert_eq!(of("hand over").len(), 1);
    let waiters = |what| of(what).iter().map(|row| row["waiters"].clone()).collect::<Vec<_>>();
    assert_eq!(waiters("charge and release"), [1, 8]);
    assert_eq!(waiters("serve the first"), [1, 8]);
    let mallocs = of("malloc and free");
    assert_eq!(mallocs.len(), 4);
    assert!(mallocs[0]["extra_ns"].is_null());
    assert!(mallocs[1..].iter().all(|row| row["extra_ns"].is_f64()));
    for row in &rows {
        assert!(row["call_ns"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["calls"].as_u64().unwrap() > 0, "{row}");
    }
}

#[test]
fn buffers_are_spilled_and_restored_without_a_device_wait_or_a_needless_copy() {
    let small = ["--piece", "4MiB", "--sizes", "8MiB,32MiB", "--card", "64MiB"];
    let few = ["--accesses", "400", "--counts", "100,4000"];
    let rows = rows(&[&["spill"], &small[..], &few].concat());
    let of = |measure: &str| {
        rows.iter().filter(|row| row["measure"] == measure).cloned().collect::<Vec<_>>()
    };
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap();
    let rates = of("rate");
    assert_eq!(rates.len(), 6, "asked, pressed and again, of two sizes");
    for row in &rates {
        assert!(number(row, "spill_of_plain") > 0.0, "{row}");
        assert!(number(row, "retrieve_of_plain") > 0.0, "{row}");
        assert_eq!(row["clean_copied_bytes"], 0, "{row}");
    }
    let beside = of("overlap");
    assert_eq!(beside.len(), 2);
    assert!(beside.iter().all(|row| number(row, "slowdown") > 0.0), "{beside:?}");
    assert!(beside.iter().all(|row| number(row, "moved_bytes") > 0.0), "{beside:?}");
    let workloads = of("workload");
    assert_eq!(workloads.len(), 2);
    assert!(number(&workloads[0], "to_host_bytes") > 0.0, "{workloads:?}");
    assert_eq!(workloads[1]["to_host_bytes"], 0, "what is only read is not copied out again");
    assert!(number(&workloads[1], "from_host_bytes") > 0.0, "{workloads:?}");
    let calls = of("calls");
    for phase in ["spill", "retrieve", "clean spill"] {
        for call in ["synchronize-stream", "free-memory"] {
            let is = |row: &&Value| row["phase"] == phase && row["call"] == call;
            assert_eq!(calls.iter().find(is).unwrap()["calls"], 0, "{phase}: {call}");
        }
    }
    let waiting = of("waiting");
    let beside = |row: &Value| (row["waiters"].as_u64().unwrap(), row["waiters_hold"] == true);
    let queues = [(0, false), (64, false), (64, true), (10_000, false)];
    assert!(waiting.iter().map(beside).eq(queues.into_iter().cycle().take(8)), "{waiting:?}");
    for row in &waiting {
        assert!(number(row, "lease_ns") > 0.0 && number(row, "ratio") > 0.0, "{row}");
        assert_eq!(row["queue_steps"], 0.0, "a waiter was looked at: {row}");
    }
    let buffers = of("buffers");
    let looked_at: Vec<f64> = buffers.iter().map(|row| number(row, "looked_at")).collect();
    // 64 leases look at each buffer once, whose last use ended since.
    assert!(looked_at[1] <= looked_at[0] + 2.0 + 4000.0 / 64.0, "{buffers:?}");
    let overshoot = of("overshoot");
    assert!(number(&overshoot[0], "largest_overshoot_pieces") <= 1.0, "{overshoot:?}");
}

#[test]
fn spills_to_another_card_reach_nine_tenths_of_its_link() {
    let sizes = ["--sizes", "512MiB", "--seconds", "0.01", "--json"];
    let device = ["spill", "--measure", "peer", "--device", "sim:h200x2:1"];
    let assert = bench(&[&device[..], &sizes[..]].concat()).assert().success();
    let printed = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let rows: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2, "taken by the spill, and ahead");
    for row in &rows {
        assert_eq!(row["peer"], 0, "{row}");
        assert!(row["spill_of_plain"].as_f64().unwrap() >= 0.9, "{row}");
        assert!(row["restore_of_plain"].as_f64().unwrap() >= 0.9, "{row}");
    }
}

#[test]
fn tables_name_the_device_and_what_is_modelled() {
    let copy = &["copy", "--sizes", "1MiB"][..];
    let reserve = &["reserve", "--waiters", "1"][..];
    let spill = &["spill", "--measure", "rate,calls", "--sizes", "32MiB"][..];
    let graphs = &["graphs", "--graphs", "12", "--block", "16MiB", "--arena", "720MiB"][..];
    let others = [["hit"], ["threads"], ["grow"], ["remap"]];
    for measure in others.iter().map(|name| &name[..]).chain([graphs, copy, reserve, spill]) {
        let table = short(measure);
        let measure = measure[0];
        assert!(table.contains("vramp") && table.contains("sim:h200 (NVIDIA H200"), "{table}");
        let by_the_clock = ["threads", "reserve"].contains(&measure);
        assert_eq!(table.contains("(modelled)"), !by_the_clock, "{table}");
        assert!(table.is_ascii(), "{table}");
    }
}

#[test]
fn invalid_options_are_refused_with_a_hint() {
    refused(&["hit", "--seconds", "nan"], "give a number of seconds above 0");
    refused(&["hit", "--seconds", "-1"], "give a number of seconds above 0");
    refused(
        &["hit", "--allocator", "malloc"],
        "use vramp, vpmm, stream-ordered, torch or torch-expandable",
    );
    refused(&["remap", "--device", "sim", "--allocator", "torch"], "use vramp, vpmm or");
    refused(&["hit", "--device", "tpu"], "there is no device 'tpu'");
    refused(&["hit", "--device", "sim", "--sizes", "16EiB"], "--sizes");
    refused(&["hit", "--device", "sim", "--sizes", "2TiB"], "2.00 TiB");
    refused(&["threads", "--threads", "0"], "0 is not in 1..=1024");
    refused(&["grow", "--block", "0"], "give a larger total or a smaller block");
    refused(&["grow", "--block", "1"], "give a smaller total or a larger block");
    refused(&["grow", "--device", "sim", "--total", "1TiB", "--block", "1GiB"], "out of memory");
    let graphs = |args: &[&str], words: &str| {
        refused(&[&["graphs", "--device", "sim"], args].concat(), words);
    };
    graphs(&["--allocator", "vpmm"], "only vramp captures graphs");
    graphs(&["--graphs", "0"], "0 is not in 1..=100000");
    graphs(&["--block", "4KiB"], "give a block between");
    graphs(&["--block", "2TiB"], "give a block between");
    graphs(&["--arena", "1MiB"], "give an arena from 360.00 MiB");
    graphs(&["--arena", "1TiB"], "give an arena from 360.00 MiB");
    graphs(&["--graphs", "40", "--block", "1TiB"], "out of memory");
    let copy = |args: &[&str], words: &str| {
        refused(&[&["copy", "--device", "sim"], args].concat(), words);
    };
    copy(&["--allocator", "vpmm"], "copies do not use an allocator: omit --allocator");
    copy(&["--sizes", "0"], "give sizes from 1 B to 256.00 MiB");
    copy(&["--sizes", "1MiB,8GiB"], "give sizes from 1 B to 256.00 MiB");
    copy(&["--sizes", "1MiB", "--step", "1MiB"], "between 4 MiB and 32 MiB");
    let spill = |args: &[&str], words: &str| {
        refused(&[&["spill", "--device", "sim"], args].concat(), words);
    };
    spill(&["--allocator", "vpmm"], "only vramp spills buffers");
    spill(&["--sizes", "1MiB"], "give sizes from a piece of 32.00 MiB to 1.00 GiB");
    spill(&["--sizes", "2GiB"], "give sizes from a piece of 32.00 MiB to 1.00 GiB");
    spill(&["--sizes", "64MiB", "--piece", "1MiB"], "give a piece from 4.00 MiB to 32.00 MiB");
    spill(&["--measure", "speed"], "invalid value 'speed'");
    spill(&["--writes", "101"], "101 is not in 0..=100");
    let workload = |args: &[&str], words: &str| {
        spill(&[&["--measure", "workload"], args].concat(), words);
    };
    workload(&["--card", "64MiB", "--buffer", "32MiB"], "a buffer from 2.00 MiB to 16.00 MiB");
    workload(&["--card", "1TiB"], "give a card limit of no more");
    refused(&["reserve", "--waiters", "5000"], "5000 is not in 1..=4096");
    let most = "18446744073709551615";
    refused(&["remap", "--total", most, "--block", most], "one block cannot be fragmented");
    refused(
        &["remap", "--device", "sim", "--total", most, "--block", "4194304TiB"],
        "out of memory",
    );
}

#[test]
fn a_disk_is_measured_plain_and_by_the_store_and_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let args = ["disk", "--dir", path, "--total", "32MiB", "--block", "256KiB", "--json"];
    let assert = bench(&args).args(["--seconds", "0.01", "--depth", "8"]).assert().success();
    let printed = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let rows: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Without io_uring there is one plain way less.
    assert!(rows.len() == 6 || rows.len() == 4, "{printed}");
    for row in &rows {
        assert_eq!((&row["bench"], &row["verified"]), (&"disk".into(), &true.into()), "{row}");
        assert_eq!(row["total_bytes"], 32 << 20);
        assert!(row["bytes_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["of_direct"].as_f64().unwrap() > 0.0, "{row}");
    }
    let of_store = rows.iter().filter(|row| row["what"] == "store");
    assert_eq!(of_store.count(), 2);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let args = [&args[..], &["--seconds", "0.01", "--compress", "always"]].concat();
    let assert = bench(&args).assert().success();
    let printed = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    let rows = printed.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let on_disk = |data: &str| {
        let (data, yes) = (Value::from(data), Value::from(true));
        let found = rows.clone().find(|row| row["data"] == data && row["compressed"] == yes);
        found.unwrap()["on_disk"].as_f64().unwrap()
    };
    assert_eq!(on_disk("random"), 1.0);
    assert!((0.5..0.6).contains(&on_disk("half zero")), "{printed}");

    refused(&["disk", "--total", "1MiB"], "give a larger total");
    refused(&["disk", "--block", "3MiB"], "give a block of 4KiB to 16MiB");
    refused(&["disk", "--depth", "0"], "0 is not in 1..=64");
    refused(&["disk", "--dir", "/sys", "--total", "16MiB"], "/sys/vramp-bench.data");
}
