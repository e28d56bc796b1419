//! Many named pools under one limit.

use anyhow::Result;
use vramp::Bytes;

use super::super::draw::{GIB, KIB, MIB, log_uniform};
use super::super::rig::Rig;
use super::super::{Goal, Pattern};

pub(super) fn patterns() -> Vec<Pattern> {
    let about = "pools with one limit in common; each request is of a pool drawn at random, and \
                 frees what the pool had before";
    let limited = |pools: usize| {
        // Room for the pages that each pool needs, and a quarter more.
        let limit = Bytes::mib(32 + 20 * pools as u64);
        Pattern::new(format!("pools/open/{pools}"), about, move |rig| many(rig, pools))
            .limit(limit)
            .goal(Goal::NoFailure)
    };
    let about = "a pool for each task: created, used for eight blocks, closed";
    let ended = |pools: usize| {
        Pattern::new(format!("pools/ended/{pools}"), about, move |rig| ended(rig, pools))
            .limit(Bytes::gib(4))
            .goal(Goal::NoFailure)
    };
    let about = "two pools in turn use four fifths of the limit and free it";
    let turns = |name: &str, empty: bool| {
        Pattern::new(name, about, move |rig| turns(rig, empty))
            .limit(Bytes::gib(4))
            .goal(Goal::NoFailure)
    };
    vec![
        turns("pools/in-turn", false),
        turns("pools/in-turn-emptied", true),
        limited(16),
        limited(256),
        limited(4096).large(),
        ended(500),
        ended(10_000).large(),
    ]
}

fn many(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let mut pools = vec![0];
    for number in 1..count {
        // A pool that cannot be created serves none of its requests.
        match rig.create_pool(&format!("pool {number}"))? {
            Some(pool) => pools.push(pool),
            None => rig.give_up(4),
        }
    }
    let mut held: Vec<_> = pools.iter().map(|_| None).collect();
    for request in 0..pools.len() * 4 + 4000 {
        if request == pools.len() * 4 {
            rig.warmed_up()?;
        }
        let index = match request < pools.len() {
            true => request,
            false => rig.rng.usize(..pools.len()),
        };
        if let Some(block) = held[index].take() {
            rig.free(block)?;
        }
        let size = log_uniform(&mut rig.rng, 64 * KIB, 16 * MIB);
        held[index] = rig.malloc_in(pools[index], stream, size)?;
    }
    rig.free_served(held)
}

fn ended(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    for number in 0..count {
        if number == count / 4 {
            rig.warmed_up()?;
        }
        let Some(pool) = rig.create_pool("task")? else {
            rig.give_up(8);
            continue;
        };
        let mut blocks = Vec::new();
        for _ in 0..8 {
            let size = log_uniform(&mut rig.rng, 64 * KIB, 64 * MIB);
            blocks.extend(rig.malloc_in(pool, stream, size)?);
        }
        rig.free_all(blocks)?;
        rig.close_last_pool()?;
    }
    Ok(())
}

fn turns(rig: &mut Rig, empty: bool) -> Result<()> {
    const TURNS: usize = 20;
    let stream = rig.create_stream()?;
    let Some(second) = rig.create_pool("second")? else { return Ok(()) };
    for turn in 0..TURNS {
        if turn == TURNS / 4 {
            rig.warmed_up()?;
        }
        let pool = [0, second][turn % 2];
        let mut blocks = Vec::new();
        while rig.live() < 4 * GIB * 4 / 5 {
            let size = log_uniform(&mut rig.rng, MIB, 128 * MIB);
            let Some(block) = rig.malloc_in(pool, stream, size)? else { break };
            rig.work(&block, stream, 50_000)?;
            blocks.push(block);
        }
        rig.free_all(blocks)?;
        if empty {
            // The work is over by then.
            rig.pass(1_000_000);
            rig.empty_cache(pool)?;
        }
    }
    Ok(())
}
