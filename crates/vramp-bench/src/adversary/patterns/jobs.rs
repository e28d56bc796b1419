//! Jobs in small: inference, training, caches that grow.

use anyhow::Result;

use super::super::Pattern;
use super::super::draw::{GIB, KIB, MIB, log_uniform};
use super::super::rig::{Block, Rig};

const LAG_NS: u64 = 100_000;

pub(super) fn patterns() -> Vec<Pattern> {
    vec![
        Pattern::new(
            "jobs/kv-cache",
            "caches of eight sequences grow by one token a step, each into a new block",
            kv_cache,
        ),
        Pattern::new(
            "jobs/inference",
            "layers with batch sizes and lengths drawn for each request",
            inference,
        ),
        Pattern::new(
            "jobs/training",
            "activations of random lengths are kept for the backward pass and freed in reverse",
            training,
        ),
        Pattern::new(
            "jobs/growing-tensor",
            "three tensors grow by a tenth into new blocks until they have 8 GiB",
            growing_tensor,
        ),
    ]
}

fn kv_cache(rig: &mut Rig) -> Result<()> {
    const SEQUENCES: usize = 8;
    /// Keys and values of 8 layers.
    const TENSORS: usize = 16;
    const TOKEN: u64 = 8 * KIB;
    const STEPS: usize = 400;
    struct Sequence {
        tokens: u64,
        end: u64,
        cache: Vec<Option<Block>>,
    }
    let stream = rig.create_stream()?;
    let weights = rig.used(stream, 4 * GIB, LAG_NS)?;
    let mut sequences: Vec<Sequence> = Vec::new();
    for step in 0..STEPS {
        if step == STEPS / 4 {
            rig.warmed_up()?;
        }
        while sequences.len() < SEQUENCES {
            let tokens = log_uniform(&mut rig.rng, 16, 2048);
            let end = tokens + rig.rng.u64(20..200);
            let mut cache = Vec::new();
            for _ in 0..TENSORS {
                cache.push(rig.used(stream, tokens * TOKEN, LAG_NS)?);
            }
            sequences.push(Sequence { tokens, end, cache });
        }
        for sequence in &mut sequences {
            sequence.tokens += 1;
            for tensor in &mut sequence.cache {
                let scratch = rig.used(stream, 64 * KIB, LAG_NS)?;
                let longer = rig.used(stream, sequence.tokens * TOKEN, LAG_NS)?;
                let before = std::mem::replace(tensor, longer);
                rig.free_served([before, scratch])?;
            }
        }
        let (over, going): (Vec<_>, Vec<_>) =
            sequences.into_iter().partition(|sequence| sequence.tokens >= sequence.end);
        sequences = going;
        rig.free_served(over.into_iter().flat_map(|sequence| sequence.cache))?;
    }
    rig.free_served(sequences.into_iter().flat_map(|sequence| sequence.cache))?;
    rig.free_served([weights])
}

fn inference(rig: &mut Rig) -> Result<()> {
    const REQUESTS: usize = 400;
    const LAYERS: usize = 16;
    /// Bytes of a token's hidden state.
    const HIDDEN: u64 = 4 * KIB;
    let stream = rig.create_stream()?;
    let weights = rig.used(stream, 2 * GIB, LAG_NS)?;
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let batch = log_uniform(&mut rig.rng, 1, 64);
        let tokens = batch * log_uniform(&mut rig.rng, 16, 1024);
        let mut state = rig.used(stream, tokens * HIDDEN, LAG_NS)?;
        for _ in 0..LAYERS {
            let qkv = rig.used(stream, 3 * tokens * HIDDEN, LAG_NS)?;
            let attention = rig.used(stream, tokens * HIDDEN, LAG_NS)?;
            rig.free_served([qkv])?;
            let wide = rig.used(stream, 4 * tokens * HIDDEN, LAG_NS)?;
            let next = rig.used(stream, tokens * HIDDEN, LAG_NS)?;
            rig.free_served([wide, attention, state])?;
            state = next;
        }
        let logits = rig.used(stream, batch * 128 * KIB, LAG_NS)?;
        rig.free_served([state, logits])?;
    }
    rig.free_served([weights])
}

fn training(rig: &mut Rig) -> Result<()> {
    const STEPS: usize = 60;
    const LAYERS: usize = 24;
    const HIDDEN: u64 = 4 * KIB;
    let stream = rig.create_stream()?;
    let mut weights = Vec::new();
    for _ in 0..LAYERS {
        weights.push(rig.used(stream, 96 * MIB, LAG_NS)?);
    }
    for step in 0..STEPS {
        if step == STEPS / 4 {
            rig.warmed_up()?;
        }
        let tokens = log_uniform(&mut rig.rng, 1024, 16_384);
        let mut kept = Vec::new();
        for _ in 0..LAYERS {
            kept.push(rig.used(stream, tokens * HIDDEN, LAG_NS)?);
            kept.push(rig.used(stream, 3 * tokens * HIDDEN, LAG_NS)?);
            let scratch = rig.used(stream, 2 * tokens * HIDDEN, LAG_NS)?;
            kept.push(rig.used(stream, tokens * 32, LAG_NS)?);
            rig.free_served([scratch])?;
        }
        let logits = rig.used(stream, tokens * 64 * KIB, LAG_NS)?;
        let mut gradients = Vec::new();
        let mut flowing = rig.used(stream, tokens * HIDDEN, LAG_NS)?;
        rig.free_served([logits])?;
        for _ in 0..LAYERS {
            let inner = rig.used(stream, 3 * tokens * HIDDEN, LAG_NS)?;
            gradients.push(rig.used(stream, 96 * MIB, LAG_NS)?);
            let next = rig.used(stream, tokens * HIDDEN, LAG_NS)?;
            let layer = kept.split_off(kept.len() - 3);
            rig.free_served(layer)?;
            rig.free_served([inner, flowing])?;
            flowing = next;
        }
        rig.free_served([flowing])?;
        rig.free_served(gradients)?;
    }
    rig.free_served(weights)
}

fn growing_tensor(rig: &mut Rig) -> Result<()> {
    let stream = rig.create_stream()?;
    let mut tensors = Vec::new();
    for _ in 0..3 {
        tensors.push((rig.used(stream, MIB, LAG_NS)?, MIB));
    }
    let mut turn = 0;
    while rig.live() < 8 * GIB {
        let (tensor, size) = &mut tensors[turn % 3];
        *size += *size / 10 + rig.rng.u64(..64 * KIB);
        let larger = rig.used(stream, *size, LAG_NS)?;
        let before = std::mem::replace(tensor, larger);
        rig.free_served([before])?;
        turn += 1;
    }
    rig.free_served(tensors.into_iter().map(|(tensor, _)| tensor))
}
