//! The part of a card's memory that the driver, the context and libraries of a process take.

use vramp_core::Bytes;
use vramp_driver::sim::{CardModel, CostSpec, CostTable, Simulator};
use vramp_driver::{Driver, MemoryInfo, MemoryProperties};

fn info(device: &Simulator) -> MemoryInfo {
    device.memory_info().expect("a query")
}

#[test]
fn an_h200_has_what_a_recorded_process_could_use() {
    let device = Simulator::card("h200").expect("the card is known");
    // A PyTorch process ran out of memory with this much free and reserved.
    let recorded = Bytes::new(133_063_376_896 + 16_317_939_712);
    let MemoryInfo { free, total } = info(&device);
    assert_eq!(total, Bytes::mib(143_771));
    assert!(free.count().abs_diff(recorded.count()) < 1 << 20, "{free} of {recorded}");
}

#[test]
fn creation_fails_beyond_what_is_usable() {
    for card in CardModel::all() {
        let device = Simulator::builder().card(card).build();
        assert_eq!(device.info().limits.memory, card.memory);
        assert_eq!(info(&device), MemoryInfo { free: card.usable(), total: card.memory });
        let usable = card.usable().round_down(card.page);
        let handle = device.create(usable, MemoryProperties::DEVICE).expect("it is usable");
        assert_eq!(info(&device).free, card.usable() - usable);
        let more = device.create(card.page, MemoryProperties::DEVICE).expect_err("it is full");
        assert!(more.is_out_of_memory());
        assert!(device.alloc_memory(card.page).expect_err("it is full").is_out_of_memory());
        let stream = device.create_stream().expect("a stream");
        let more = device.malloc_async(stream, card.page).expect_err("it is full");
        assert!(more.is_out_of_memory());
        device.release(handle).expect("it is the only use");
        assert_eq!(info(&device).free, card.usable());
    }
}

#[test]
fn usable_memory_and_context_are_set_by_the_caller() {
    let card = CardModel::find("rtx4090").expect("the card is known");
    let builder = || Simulator::builder().card(card);
    let half = Bytes::gib(12);
    let device = builder().usable(half).build();
    assert_eq!(info(&device), MemoryInfo { free: half, total: card.memory });
    let device = builder().usable(Bytes::gib(30)).build();
    assert_eq!(info(&device), MemoryInfo { free: Bytes::gib(30), total: Bytes::gib(30) });
    let device = builder().context(Bytes::gib(2)).build();
    assert_eq!(info(&device).free, card.memory - Bytes::gib(2));
    let device = builder().context(Bytes::gib(99)).build();
    assert_eq!(info(&device).free, Bytes::ZERO);
    let device = builder().memory(half).build();
    assert_eq!(info(&device), MemoryInfo { free: half, total: half });
}

#[test]
fn a_cost_file_may_describe_a_whole_card() {
    let h200 = CostTable::h200();
    let spec = CostSpec {
        name: "mine".to_owned(),
        memory_mib: Some(12_288),
        context_mib: Some(700),
        ..h200.spec().clone()
    };
    let table = CostTable::new(spec).expect("the numbers are those of the H200");
    let device = Simulator::builder().described_by(table).build();
    assert_eq!(device.info().id, "sim:mine");
    assert_eq!(device.info().name, "mine (simulated)");
    let (free, total) = (Bytes::mib(12_288 - 700), Bytes::mib(12_288));
    assert_eq!(info(&device), MemoryInfo { free, total });
    // Without memory it is a table of costs for another card.
    let device = Simulator::builder().described_by(h200).build();
    assert_eq!(device.info().id, "sim:h200");
}
