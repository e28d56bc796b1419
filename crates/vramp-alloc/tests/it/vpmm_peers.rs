//! The tests that OpenVM's VPMM has, each under a name of ours; `docs/background/peer-tests.md` maps them.

use vramp_alloc::{Bytes, Config};
use vramp_driver::sim::Simulator;
use vramp_peers::Preset;

use crate::common::{Cost, NOTHING, PAGE, Rig, pages};

#[test]
fn blocks_freed_out_of_order_coalesce_into_one() {
    let rig = Rig::vpmm(0);
    let [a, b, c] = [3, 3, 3].map(|count| rig.malloc(count));
    let start = a.addr();
    for block in [b, a, c] {
        rig.free(block);
    }
    assert_eq!(rig.malloc(9).addr(), start);
    assert_eq!(rig.held(), 9);
}

#[test]
fn more_addresses_are_reserved_when_a_span_is_full() {
    let config = Config { span: pages(2), ..Preset::Vpmm.config() };
    let rig = Rig::on(Simulator::builder(), config);
    let blocks: Vec<_> = (0..4)
        .map(|count: usize| {
            assert_eq!(rig.sim.live().reservations, count.div_ceil(2), "{count} pages are full");
            rig.malloc(1)
        })
        .collect();
    assert_eq!(rig.sim.live().reservations, 2);
    blocks.into_iter().for_each(|block| rig.free(block));
    rig.assert_accounts_agree();
    rig.close();
}

#[test]
fn the_pool_serves_what_it_can_after_running_out() {
    // The driver's pool of small blocks grows by sixteen pages.
    let config = Preset::Vpmm.config();
    let rig = Rig::on(Simulator::builder().memory(pages(4 * 32 + 16 + 9)), config);
    let mut held = Vec::new();
    let error = loop {
        match rig.allocator.malloc(pages(32), rig.stream) {
            Ok(block) => held.push(block),
            Err(error) => break error,
        }
    };
    assert!(held.len() == 4 && error.is_out_of_memory(), "{error}");
    // Nothing is freed, and smaller requests are served to the last page.
    held.push(rig.allocator.malloc(Bytes::mib(1), rig.stream).expect("a small one fits"));
    held.push(rig.malloc(9));
    let error = rig.allocator.malloc(PAGE, rig.stream).expect_err("the card is full");
    assert!(error.is_out_of_memory(), "{error}");
    held.into_iter().for_each(|block| rig.free(block));
    rig.free(rig.malloc(4 * 32 + 9));
    rig.assert_accounts_agree();
    rig.close();
}

#[test]
fn defragmentation_repeats_without_taking_more() {
    let rig = Rig::vpmm(8);
    for cycle in 0..3 {
        let mut blocks: Vec<_> = (0..4).map(|_| Some(rig.malloc(2))).collect();
        for index in [0, 2] {
            rig.free(blocks[index].take().expect("not yet freed"));
        }
        let (cost, big) = rig.cost(|| rig.malloc(4));
        assert_eq!(cost, Cost { maps: 4, ..NOTHING }, "cycle {cycle}");
        for block in blocks.into_iter().flatten().chain([big]) {
            rig.free(block);
        }
        assert_eq!(rig.held(), 8);
    }
    rig.close();
}

#[test]
fn a_freed_block_merges_with_either_neighbour_and_with_both() {
    let rig = Rig::vpmm(6);
    for order in [[1, 0, 2], [0, 1, 2], [0, 2, 1]] {
        let mut blocks: Vec<_> = (0..3).map(|_| Some(rig.malloc(2))).collect();
        let start = blocks[0].as_ref().map(vramp_alloc::Allocation::addr);
        let [first, second, third] = order;
        for index in [first, second] {
            rig.free(blocks[index].take().expect("not yet freed"));
        }
        if third == 2 {
            let four = rig.malloc(4);
            assert_eq!(Some(four.addr()), start, "{order:?}");
            rig.free(four);
        }
        rig.free(blocks[third].take().expect("not yet freed"));
        let six = rig.malloc(6);
        assert_eq!(Some(six.addr()), start, "{order:?}");
        assert_eq!(rig.held(), 6);
        rig.free(six);
    }
}

#[test]
fn regions_of_other_streams_are_harvested_behind_waits() {
    let rig = Rig::vpmm(6);
    let [other, third] = [0; 2].map(|_| rig.allocator.create_stream().expect("a stream"));
    let [a, b, c] = [2, 2, 2].map(|count| rig.malloc(count));
    let starts = [&a, &b, &c].map(vramp_alloc::Allocation::addr);
    for (block, stream) in [(a, rig.stream), (b, other), (c, rig.stream)] {
        rig.occupy(&block, stream);
        rig.free_on(block, stream);
    }
    // The regions stay apart: no two of them serve three pages side by side.
    let (cost, three) = rig.cost(|| rig.malloc(3));
    assert_eq!(cost, Cost { maps: 2, ..NOTHING }, "the first moves behind the third");
    assert_eq!((three.addr(), rig.layout(Some(&three))), (starts[2], "[*2][-2][+3][-1]".into()));
    let (cost, two) = rig.cost(|| rig.malloc_on(3, third));
    assert_eq!(cost, Cost { maps: 3, waits: 2, ..NOTHING }, "one wait for each of two streams");
    assert_eq!(rig.layout(Some(&two)), "[*4][3][*1][+3]");
    // The card itself has them in order, although no kernel is over.
    rig.occupy(&two, third);
    assert_eq!(rig.sim.hazards(), []);
    assert_eq!(rig.held(), 6);
    rig.free_on(two, third);
    rig.free(three);
    rig.close();
}

#[test]
fn what_defragmentation_leaves_over_is_used_next() {
    let rig = Rig::vpmm(10);
    let mut blocks: Vec<_> = (0..5).map(|_| Some(rig.malloc(2))).collect();
    for index in [0, 2, 4] {
        rig.free(blocks[index].take().expect("not yet freed"));
    }
    let (cost, five) = rig.cost(|| rig.malloc(5));
    assert_eq!(cost, Cost { maps: 4, ..NOTHING }, "the last two pages stay where they are");
    let (cost, tail) = rig.cost(|| rig.malloc(1));
    assert_eq!((cost, tail.addr()), (NOTHING, five.addr() + five.len()), "what was left over");
    let (cost, extra) = rig.cost(|| rig.malloc(1));
    assert_eq!(cost, Cost { maps: 1, creates: 1, waits: 0 }, "nothing is left over");
    assert_eq!(rig.held(), 11);
    for block in blocks.into_iter().flatten().chain([five, tail, extra]) {
        rig.free(block);
    }
    rig.close();
}

#[test]
fn holes_coalesce_while_pages_move() {
    // In each order the last hole lies behind, before, or between the others.
    for order in [[0, 1, 2], [2, 1, 0], [0, 2, 1]] {
        let rig = Rig::vpmm(7);
        let mut blocks: Vec<_> = (0..3).map(|_| Some(rig.malloc(2))).collect();
        let start = blocks[0].as_ref().map(vramp_alloc::Allocation::addr);
        let guard = rig.malloc(1);
        let mut moved = Vec::new();
        for index in order {
            rig.free(blocks[index].take().expect("not yet freed"));
            // Five pages fit into no two of the holes: two move, and a hole stays behind.
            let (cost, five) = rig.cost(|| rig.malloc(5));
            assert_eq!(cost, Cost { maps: 5, creates: 3, waits: 0 }, "{order:?}");
            moved.push(five);
        }
        let (cost, six) = rig.cost(|| rig.malloc(6));
        assert_eq!(cost, Cost { maps: 6, creates: 6, waits: 0 }, "{order:?}");
        assert_eq!(Some(six.addr()), start, "the three holes are one: {order:?}");
        assert_eq!(rig.layout(Some(&six)), "[+6][1][5][5][5]");
        moved.into_iter().chain([guard, six]).for_each(|block| rig.free(block));
        rig.close();
    }
}

#[test]
fn new_pages_join_the_free_region_before_them() {
    let rig = Rig::vpmm(0);
    let two = rig.malloc(2);
    let start = two.addr();
    rig.free(two);
    let (cost, four) = rig.cost(|| rig.malloc(4));
    assert_eq!((cost, four.addr()), (Cost { maps: 2, creates: 2, waits: 0 }, start));
    rig.free(four);
    let [a, b] = [2, 2].map(|count| rig.malloc(count));
    rig.free(a);
    let (cost, more) = rig.cost(|| rig.malloc(4));
    assert_eq!(cost, Cost { maps: 4, creates: 2, waits: 0 }, "a block lies between");
    assert_eq!(rig.layout(Some(&more)), "[*2][2][+4]");
    rig.free(b);
    rig.free(more);
    rig.close();
}

#[test]
fn exact_fits_and_shortfalls_follow_one_another() {
    let rig = Rig::vpmm(10);
    let mut blocks: Vec<_> = (0..5).map(|_| Some(rig.malloc(2))).collect();
    for index in [1, 3, 0, 4, 2] {
        rig.free(blocks[index].take().expect("not yet freed"));
    }
    let (cost, ten) = rig.cost(|| rig.malloc(10));
    assert_eq!((cost, rig.held()), (NOTHING, 10), "an exact fit");
    rig.free(ten);
    let [a, b] = [6, 4].map(|count| rig.malloc(count));
    rig.free(a);
    let (cost, seven) = rig.cost(|| rig.malloc(7));
    assert_eq!(cost, Cost { maps: 7, creates: 1, waits: 0 }, "one page short");
    assert_eq!(rig.layout(Some(&seven)), "[*6][4][+7]");
    rig.free(b);
    rig.free(seven);
    rig.close();
}

#[test]
fn what_a_harvest_leaves_stays_with_its_stream() {
    let rig = Rig::vpmm(6);
    let other = rig.allocator.create_stream().expect("a stream");
    let [five, guard] = [5, 1].map(|count| rig.malloc(count));
    let start = five.addr();
    rig.occupy(&five, rig.stream);
    rig.free(five);
    let (cost, three) = rig.cost(|| rig.malloc_on(3, other));
    assert_eq!(cost, Cost { maps: 3, creates: 0, waits: 1 }, "three of the five are harvested");
    assert_eq!(rig.layout(Some(&three)), "[*3][-2][1][+3]");
    let free = rig.allocator.pool_state().expect("there is a virtual pool").shares();
    let free: Vec<_> = free.into_iter().map(|share| (share.stream, share.free)).collect();
    assert_eq!(free, [(rig.stream, pages(2)), (other, Bytes::ZERO)]);
    let (cost, two) = rig.cost(|| rig.malloc(2));
    assert_eq!((cost, two.addr()), (NOTHING, start + pages(3)), "the rest is its stream's own");
    rig.occupy(&two, rig.stream);
    assert_eq!(rig.sim.hazards(), []);
    rig.free_on(three, other);
    rig.free(two);
    rig.free(guard);
    rig.close();
}

#[test]
fn a_block_that_another_stream_used_comes_back_under_a_limit() {
    let config = Config { limit: Some(pages(4)), ..Preset::Vpmm.config() };
    let rig = Rig::on(Simulator::builder().checked(), config);
    let other = rig.allocator.create_stream().expect("a stream can be made");
    for _ in 0..3 {
        let block = rig.malloc(4);
        rig.allocator.record_use(&block, other).expect("it is ours");
        rig.free(block);
    }
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

#[test]
fn the_debug_output_has_the_sums_and_every_region_in_ascending_order() {
    let rig = Rig::vpmm(6);
    let other = rig.allocator.create_stream().expect("a stream");
    let [two, one, three] = [2, 1, 3].map(|count| rig.malloc(count));
    rig.free(two);
    rig.free_on(three, other);
    // It unmaps old mappings, of which there are none yet.
    let small = rig.allocator.malloc(Bytes::kib(4), other).expect("there is memory");
    let four = rig.malloc(4);
    let text = format!("{:?}", rig.allocator);
    let (regions, sums): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| line.starts_with("span"));
    // Total mapped, reserved addresses, allocated, reusable, holes and pending unmaps.
    for sum in [
        "= reserved        12.00 MiB",
        "addresses          1.00 GiB",
        "used              10.00 MiB",
        "free               2.00 MiB",
        "  retired          8.00 MiB",
    ] {
        assert!(sums.contains(&sum), "{sum} is not in:\n{text}");
    }
    assert!(sums.iter().any(|sum| sum.starts_with("  holes ")), "{text}");
    let kinds: Vec<String> = regions
        .iter()
        .map(|line| line.split_whitespace().skip(1).collect::<Vec<_>>().join(" "))
        .collect();
    let page = "2.00 MiB retired, chunk";
    let expected = [
        format!("{page}0"),
        format!("{page}1"),
        "2.00 MiB used, stream0".to_owned(),
        format!("{page}3"),
        format!("{page}4"),
        "2.00 MiB free, stream1".to_owned(),
        "8.00 MiB used, stream0".to_owned(),
    ];
    assert_eq!(kinds[..7], expected, "{text}");
    assert!(kinds.len() == 8 && kinds[7].ends_with(" hole"), "{text}");
    let at = |line: &&str| {
        let (_, offset) = line.split_once("+0x").expect("an address");
        u64::from_str_radix(offset.split(' ').next().expect("a number"), 16).expect("a number")
    };
    assert!(regions.iter().map(at).is_sorted(), "{text}");
    assert!(text.contains("blocks of the driver's pool: 1"), "{text}");
    assert!(text.contains(&format!("{} used, [stream1]", small.addr())), "{text}");
    rig.free_on(small, other);
    rig.free(four);
    rig.free(one);
    rig.close();
}

/// The layouts after the fourth and the fifth step, and the pages held at the end.
fn walk(x: u64) -> (String, String, u64) {
    let rig = Rig::vpmm(x + 11);
    let ten = rig.malloc(10);
    let one = rig.malloc(1);
    let tail = if x > 0 { format!("[-{x}]") } else { String::new() };
    assert_eq!(rig.layout(Some(&one)), format!("[10][+1]{tail}"), "X = {x}");
    rig.free(ten);
    assert_eq!(rig.layout(None), format!("[-10][1]{tail}"), "X = {x}");
    let four = rig.malloc(4);
    let fourth = rig.layout(Some(&four));
    let eleven = rig.malloc(11);
    let fifth = rig.layout(Some(&eleven));
    let held = rig.held();
    for block in [one, four, eleven] {
        rig.free(block);
    }
    rig.assert_accounts_agree();
    rig.close();
    (fourth, fifth, held)
}

#[test]
fn case_a_has_room_without_defragmentation() {
    for x in 11..=40 {
        let (fourth, fifth, held) = walk(x);
        let rest = if x > 11 { format!("[-{}]", x - 11) } else { String::new() };
        assert_eq!(fourth, format!("[+4][-6][1][-{x}]"), "X = {x}");
        assert_eq!(fifth, format!("[4][-6][1][+11]{rest}"), "X = {x}");
        assert_eq!(held, x + 11, "X = {x}");
    }
}

#[test]
fn case_b_remaps_the_earliest_free_region() {
    for x in 5..=10 {
        let (fourth, fifth, held) = walk(x);
        let rest = if x > 5 { format!("[-{}]", x - 5) } else { String::new() };
        assert_eq!(fourth, format!("[-10][1][+4][-{}]", x - 4), "X = {x}");
        assert_eq!(fifth, format!("[*10][1][4][+11]{rest}"), "X = {x}");
        assert_eq!(held, x + 11, "X = {x}");
    }
}

#[test]
fn case_c_remaps_and_adds_one_page() {
    let (fourth, fifth, held) = walk(4);
    assert_eq!(fourth, "[-10][1][+4]");
    assert_eq!(fifth, "[*10][1][4][+11]");
    assert_eq!(held, 16);
}

#[test]
fn case_d_takes_four_from_the_ten_and_adds_the_shortfall() {
    for x in 0..=3 {
        let (fourth, fifth, held) = walk(x);
        let tail = if x > 0 { format!("[-{x}]") } else { String::new() };
        assert_eq!(fourth, format!("[+4][-6][1]{tail}"), "X = {x}");
        assert_eq!(fifth, "[4][*6][1][+11]", "X = {x}");
        assert_eq!(held, 16, "X = {x}: 5 - X pages are new");
    }
}
