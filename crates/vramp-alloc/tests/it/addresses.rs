//! Addresses: taken as a pool grows, so that many pools share those of one process.

use crate::common::{Rig, pages};
use vramp_alloc::{AllocError, Allocator, Bytes, Config};
use vramp_driver::sim::{CardModel, Simulator};
use vramp_driver::{Call, Driver};
use vramp_peers::Preset;

#[test]
fn a_thousand_pools_share_the_addresses_of_a_card() {
    for (preset, card) in
        [(Preset::Vramp, "h200"), (Preset::Vpmm, "h200"), (Preset::Vramp, "rtx4090")]
    {
        let card = CardModel::find(card).expect("the card is known");
        let rig = Rig::on(Simulator::builder().card(card), preset.config());
        let first = rig.malloc(1);
        let mut pools: Vec<Allocator> = (0..1000)
            .map(|n| {
                let pool = rig.allocator.create_pool(&format!("pool {n}"));
                let pool = pool.expect("a pool can be made");
                let block = pool.malloc(pages(1), rig.stream).expect("there are addresses");
                pool.free(block, rig.stream).expect("it is ours");
                pool
            })
            .collect();
        let least = rig.sim.live().reserved_addresses;
        assert!(least < Bytes::tib(64), "{}: {least} for nearly nothing", preset.name());
        // And each may grow to what the card has.
        let large = card.memory.round_down(pages(1)) - Bytes::gib(4);
        for which in [999, 0] {
            let pool = pools.swap_remove(which);
            let block = pool.malloc(large, rig.stream).expect("there are addresses");
            assert_eq!(block.len(), large);
            pool.close().expect("nothing is in the way");
        }
        pools.into_iter().for_each(|pool| pool.close().expect("nothing is in the way"));
        rig.free(first);
        rig.close();
    }
}

#[test]
fn a_pool_that_fills_the_card_has_addresses_from_one_reservation() {
    let rig = Rig::new(Preset::Vramp);
    let free = rig.sim.memory_info().expect("a query").free;
    let most = free.count() / pages(1).count() - 64;
    let blocks: Vec<_> = (0..8)
        .map(|_| rig.allocator.malloc(pages(most / 8), rig.stream).expect("the card has it"))
        .collect();
    for (index, block) in blocks.into_iter().enumerate() {
        if index % 2 == 0 {
            rig.allocator.free(block, rig.stream).expect("it is ours");
        }
    }
    for _ in 0..3 {
        let block = rig.allocator.malloc(pages(most / 3), rig.stream).expect("half is free");
        rig.allocator.free(block, rig.stream).expect("it is ours");
    }
    assert_eq!(rig.sim.calls_of(Call::Reserve), 1);
    assert_eq!(rig.sim.live().reserved_addresses, Bytes::gib(512));
}

#[test]
fn a_request_without_addresses_names_them_and_the_call_that_found_none() {
    for (preset, space) in
        [(Preset::Vramp, 600), (Preset::Vpmm, 600), (Preset::TorchExpandable, 600)]
    {
        let card = Simulator::builder().memory(Bytes::gib(24)).address_space(Bytes::mib(space));
        let rig = Rig::on(card, Config { span: Bytes::mib(128), ..preset.config() });
        let mut blocks = Vec::new();
        let error = loop {
            match rig.allocator.malloc(pages(25), rig.stream) {
                Ok(block) => blocks.push(block),
                Err(error) => break error,
            }
        };
        let text = error.to_string();
        let AllocError::OutOfMemory(report) = error else { panic!("{text}") };
        let failed = report.failed_reserve().expect("addresses were the cause");
        assert_eq!(failed.call, Call::Reserve);
        for part in ["no addresses are left", "driver call reserve failed", "stable ranges"] {
            assert!(text.contains(part), "{}: {part}: {text}", preset.name());
        }
        assert!(!text.contains("larger card"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        drop(blocks);
    }
}

#[test]
fn the_main_pool_of_vpmm_reserves_what_its_document_says() {
    let rig = Rig::new(Preset::Vpmm);
    rig.free(rig.malloc(1));
    assert_eq!(rig.sim.live().reserved_addresses, Bytes::tib(8));
    let pool = rig.allocator.create_pool("another").expect("a pool can be made");
    let block = pool.malloc(pages(1), rig.stream).expect("there is memory");
    assert_eq!(rig.sim.live().reserved_addresses, Bytes::tib(8) + Bytes::gib(32));
    pool.free(block, rig.stream).expect("it is ours");
}

#[test]
fn the_first_reservation_can_be_set_and_is_at_most_the_longest() {
    for (first_span, span, expected) in [
        (Some(pages(64)), Bytes::tib(8), pages(64)),
        (Some(Bytes::new(1)), Bytes::tib(8), pages(1)),
        (Some(pages(64)), pages(16), pages(16)),
        (None, pages(16), pages(16)),
    ] {
        let config = Config { first_span, span, ..Config::default() };
        let rig = Rig::on(Simulator::builder(), config);
        rig.free(rig.malloc(1));
        assert_eq!(rig.census().addresses, expected);
        // Pools have it too.
        let pool = rig.allocator.create_pool("another").expect("a pool can be made");
        let _block = pool.malloc(pages(1), rig.stream).expect("there is memory");
        assert_eq!(pool.census().addresses, expected);
    }
}
