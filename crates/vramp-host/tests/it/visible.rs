//! All forms of `CUDA_VISIBLE_DEVICES`.
use proptest::prelude::*;
use vramp_host::topology::{IgnoreReason, MigId, VisibleDevice, VisibleDevices};

const UUIDS: [Option<&str>; 4] =
    [Some("GPU-9942190a-aa31"), Some("GPU-9e8d35e3-a134"), Some("GPU-e429a63e-c61c"), None];

/// Returns the GPUs that a value shows.
fn shown(variable: &str) -> Vec<usize> {
    VisibleDevices::parse(Some(variable), &UUIDS).gpus().collect()
}

/// Returns the reasons why entries of a value are ignored.
fn reasons(variable: &str) -> Vec<IgnoreReason> {
    let visible = VisibleDevices::parse(Some(variable), &UUIDS);
    visible.ignored.iter().map(|ignored| ignored.reason).collect()
}

const NONE: [usize; 0] = [];
const OUT: IgnoreReason = IgnoreReason::OutOfRange { count: 4 };

#[test]
fn an_unset_variable_shows_all_cards_and_an_empty_one_none() {
    let all = VisibleDevices::parse(None, &UUIDS);
    assert_eq!(all.gpus().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(VisibleDevices::parse(Some(""), &UUIDS), VisibleDevices::default());
    assert_eq!(shown("  "), NONE);
}

#[test]
fn numbers_show_cards_in_the_order_of_the_list() {
    assert_eq!(shown("2,1"), [2, 1]);
    assert_eq!(shown(" 0 ,\t3"), [0, 3]);
    assert_eq!(shown("2, +3, -0, 1"), [2, 3, 0, 1]);
    assert_eq!(shown("1gpu2,2ampere"), [1, 2]);
}

#[test]
fn a_number_out_of_range_hides_itself_and_all_behind_it_and_is_no_error() {
    assert_eq!(shown("0,2,-1,1"), [0, 2]);
    assert_eq!(reasons("0,2,-1,1"), [OUT, IgnoreReason::AfterInvalid]);
    assert_eq!(shown("1,4,0"), [1]);
    assert_eq!(shown("one,2"), NONE);
    assert_eq!(shown("3,two,1"), [3]);
    assert_eq!(shown("0,,1"), [0]);
    let bare = VisibleDevices::parse(Some("0"), &[]);
    assert_eq!(bare.ignored[0].reason, IgnoreReason::OutOfRange { count: 0 });
}

#[test]
fn a_number_that_fits_in_no_integer_is_out_of_range_and_never_another_number() {
    for number in ["4294967296", "18446744073709551616", "99999999999999999999999999"] {
        assert_eq!(reasons(number), [OUT], "{number}");
        assert_eq!(shown(&format!("1,-{number},2")), [1]);
    }
}

#[test]
fn the_beginning_of_a_uuid_shows_the_only_card_that_has_it() {
    assert_eq!(shown("GPU-e4, GPU-9e8d35e3"), [2, 1]);
    assert_eq!(shown("GPU-e429a63e-c61c"), [2]);
    assert_eq!(shown("GPU-9e,GPU-9,GPU-e"), [1]);
    let ambiguous = IgnoreReason::AmbiguousUuid { matches: 2 };
    assert_eq!(reasons("GPU-9e,GPU-9,GPU-e"), [ambiguous, IgnoreReason::AfterInvalid]);
    assert_eq!(reasons("GPU-123,GPU-e4"), [IgnoreReason::UnknownUuid, IgnoreReason::AfterInvalid]);
}

#[test]
fn an_entry_of_another_form_ends_the_list() {
    assert_eq!(shown("GPU-e4, 1"), [2]);
    assert_eq!(shown("1,GPU-e4,0"), [1]);
    assert_eq!(reasons("1,GPU-e4,0"), [IgnoreReason::MixedForms, IgnoreReason::AfterInvalid]);
}

#[test]
fn a_card_named_twice_hides_all() {
    assert_eq!(shown("0,1,2,1"), NONE);
    assert_eq!(shown("GPU-e4,GPU-9e,GPU-e429"), NONE);
    let others = IgnoreReason::HiddenByDuplicate;
    assert_eq!(reasons("0,0,1"), [others, IgnoreReason::Duplicate, others]);
    assert_eq!(shown("0,-1,0"), [0], "what is hidden is not named");
}

#[test]
fn one_part_of_a_split_card_is_shown() {
    let visible = VisibleDevices::parse(Some("MIG-GPU-e429a63e-c61c/1/2,MIG-89c850dc"), &UUIDS);
    let gpu = "GPU-e429a63e-c61c".to_owned();
    let id = MigId::Instance { gpu, gpu_instance: 1, compute_instance: 2 };
    assert_eq!(id.to_string(), "MIG-GPU-e429a63e-c61c/1/2");
    assert_eq!(visible.devices, [VisibleDevice::Mig { id, gpu: Some(2) }]);
    assert_eq!(visible.ignored[0].reason, IgnoreReason::ExtraMig);
    let alone = VisibleDevices::parse(Some("MIG-89c850dc-1"), &UUIDS);
    let id = MigId::Uuid("MIG-89c850dc-1".to_owned());
    assert_eq!(alone.devices, [VisibleDevice::Mig { id, gpu: None }]);
}

#[test]
fn a_name_of_no_part_is_refused() {
    for text in [
        "MIG-",
        "MIG-GPU-",
        "MIG-GPU-e4",
        "MIG-GPU-e4/1",
        "MIG-GPU-e4/1/2/3",
        "MIG-GPU-e4/+1/2",
        "MIG-xyz",
    ] {
        assert_eq!(reasons(text), [IgnoreReason::NotADevice], "{text}");
        let error = text.parse::<MigId>().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

proptest! {
    #[test]
    fn any_text_shows_each_card_at_most_once_and_accounts_for_every_entry(
        text in "\\PC{0,40}|[-+0-9,GPUMI/e ]{0,40}|(GPU-|MIG-|MIG-GPU-)?[0-9a-f/,-]{0,20}",
        count in 0usize..5,
    ) {
        let uuids = &UUIDS[..count.min(UUIDS.len())];
        let visible = VisibleDevices::parse(Some(&text), uuids);
        let mut shown: Vec<usize> = visible.gpus().collect();
        prop_assert!(shown.iter().all(|&place| place < uuids.len()));
        shown.sort_unstable();
        shown.dedup();
        prop_assert_eq!(shown.len(), visible.gpus().count());
        let entries = if text.is_empty() { 0 } else { text.split(',').count() };
        prop_assert_eq!(visible.devices.len() + visible.ignored.len(), entries);
    }
}
