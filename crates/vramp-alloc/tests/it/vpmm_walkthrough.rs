//! VPMM's document, its example walkthrough: `+10 > +1 > -10 > +4 > +11` pages on a pool of
//! `X + 11` pages, X up to 40, layouts in the document's own notation.
//!
//! For case D the document prints `[#(11-X)]` new pages; its own result `[-11]` needs `5 - X`.

use crate::common::Rig;

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
