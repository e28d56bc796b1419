#!/usr/bin/env python3
"""Writes the snapshots that the tests of vramp-trace read.

    python3 generate.py                      writes the small files beside this script
    python3 generate.py --large 1200000 OUT  writes one big snapshot, gzip if OUT ends in .gz

Standard library only. The same script always writes the same bytes (with the same Python).
"""

import gzip
import pickle
import pickletools
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
BASE = 0x7F2E_4000_0000
STREAM = 0x5581_2340  # a raw cudaStream_t


def frame(name, filename, line):
    return {"name": name, "filename": filename, "line": line}


def snapshot():
    """A snapshot with something of everything; the tests know it by heart."""
    main = frame("main", "train.py", 10)
    forward = [frame("forward", "model.py", 20), main]
    backward = [frame("backward", "model.py", 30), main]

    def event(action, addr, size, time_us, stream=0, frames=forward, **more):
        return {
            "action": action,
            "addr": addr,
            "size": size,
            "stream": stream,
            "time_us": 1_700_000_000_000_000 + time_us,
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": frames,
            **more,
        }

    oom = event("oom", 0, 1 << 40, 9, frames=backward, device_free=123 << 20)
    del oom["addr"]
    first = [
        # Given out before the recording began.
        event("free_requested", BASE + 0x1000, 512, 0),
        event("free_completed", BASE + 0x1000, 512, 1),
        event("segment_alloc", BASE + (1 << 30), 20 << 20, 2),
        event("alloc", BASE + (1 << 30), 5 << 20, 3),
        event("alloc", BASE + (1 << 30) + (5 << 20), 3 << 20, 4, stream=STREAM, frames=backward),
        event("free_requested", BASE + (1 << 30), 5 << 20, 5),
        event("free_completed", BASE + (1 << 30), 5 << 20, 7),
        event("user_defined", 0, 0, 8, user_metadata="step 1"),
        oom,
        # Something that no reader has heard of yet.
        event("defragment", BASE, 1, 10, moved=[1, 2, (3, None)], exact=1.5),
        event("snapshot", 0, 0, 11, frames=[]),
    ]
    second = [
        event("segment_map", BASE + (2 << 30), 2 << 20, 20, frames=[]),
        event("alloc", BASE + (2 << 30), 0, 21, frames=[]),
        event("segment_unmap", BASE + (2 << 30), 2 << 20, 22, frames=[]),
        event("segment_free", BASE + (3 << 30), 2 << 20, 23, frames=[]),
    ]

    def segment(device, address, total_size, blocks, stream=0):
        return {
            "device": device,
            "address": address,
            "total_size": total_size,
            "allocated_size": total_size,
            "active_size": total_size,
            "requested_size": total_size,
            "stream": stream,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": device == 1,
            "frames": forward,
            "blocks": blocks,
        }

    def block(address, size, state, requested_size=None, frames=()):
        found = {"address": address, "size": size, "state": state, "frames": list(frames)}
        if requested_size is not None:
            found["requested_size"] = requested_size
        return found

    start = BASE + (1 << 30)
    segments = [
        segment(
            0,
            start,
            20 << 20,
            [
                block(start, 5 << 20, "inactive", 5 << 20),
                block(start + (5 << 20), 3 << 20, "active_allocated", 3 << 20, backward),
                # Two that the recording never saw.
                block(start + (8 << 20), 4 << 20, "active_allocated", (4 << 20) - 100),
                block(start + (12 << 20), 8 << 20, "active_pending_free"),
            ],
        ),
        segment(1, BASE + (2 << 30), 2 << 20, [], stream=STREAM),
    ]
    return {
        "segments": segments,
        "device_traces": [first, second, []],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.5,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0, "2": 4},
        },
        "external_annotations": [{"stage": "START", "name": "step", "device": 0, "time_us": 1}],
    }


def labelled():
    """What PyTorch 2.9 and later, and its memory profiler, write besides."""

    def event(action, addr, time_us, **more):
        found = {"action": action, "addr": addr, "size": 512, "stream": 0, "time_us": time_us}
        return {**found, "frames": [], **more}

    plain = {"compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    first = [
        event("alloc", BASE, 10, **plain),
        event("alloc", BASE + 512, 20, **{**plain, "user_metadata": "layer 1"}),
        event("alloc", BASE + 1024, 30, **{**plain, "pool_id": (0, 7), "compile_context": "0/1"}),
        event("alloc", BASE + 1536, 40, category="activation"),
        event("free_requested", BASE + 512, 50, **{**plain, "user_metadata": "layer 1"}),
        # An integer of more than 64 bits, in a key that is not read.
        event("free_completed", BASE + 512, 60, **plain, unread=1 << 200, negative=-(1 << 70)),
    ]
    blocks = [
        {"address": BASE + at, "size": 512, "requested_size": 500, "state": state, "frames": []}
        for at, state in ((0, "active_allocated"), (512, "inactive"))
    ]
    blocks[0]["category"] = "parameter"
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 1024,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (3, -1),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    annotations = [
        {"name": "step", "stage": "START", "device": 0, "time_us": 5},
        {"name": "step", "stage": "START", "device": 0, "time_us": 15, "extra": 1},
        {"name": "step", "stage": "END", "device": 0, "time_us": 35},
        {"name": "load", "stage": "MARK", "device": -1, "time_us": 45},
    ]
    return {
        "segments": [segment],
        "device_traces": [first],
        "allocator_settings": {},
        "external_annotations": annotations,
    }


def torch_2_0():
    """Blocks as PyTorch up to 2.0 writes them: with a history in place of a size and frames."""
    stack = [frame("forward", "model.py", 20)]
    older = [frame("backward", "model.py", 30)]
    history = [
        {"addr": BASE, "real_size": 1000, "frames": stack},
        {"addr": BASE, "real_size": 300, "frames": older},
    ]
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": history},
        {"size": 512, "state": "active_awaiting_free", "history": [{"addr": 0, "real_size": 7}]},
        {"size": 512, "state": "inactive", "history": []},
    ]
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 2048,
        "stream": 0,
        "segment_type": "small",
        "blocks": blocks,
    }
    return {"segments": [segment], "device_traces": [[]]}


def excerpt(source):
    """The first events and segments of a real snapshot, objects shared as they were."""
    found = pickle.loads(gzip.decompress(source.read_bytes()))
    found["device_traces"] = [events[:24] for events in found["device_traces"]]
    found["segments"] = found["segments"][:3]
    return found


def large(events):
    """A training-like history without stacks: blocks of mixed sizes, most of them short-lived."""
    chance = random.Random(1)
    history, live, addr = [], [], BASE
    time_us = 1_700_000_000_000_000
    while len(history) < events:
        time_us += chance.randrange(1, 40)
        if len(live) < 500 or chance.random() < 0.5:
            size = chance.choice((512, 4096, 1 << 16, 3 << 20, 20 << 20)) * chance.randrange(1, 9)
            addr += 1 << 28
            live.append((addr, size))
            wanted = [("alloc", addr, size)]
        else:
            at, size = live.pop(chance.randrange(len(live)))
            wanted = [("free_requested", at, size), ("free_completed", at, size)]
        for action, at, size in wanted:
            history.append(
                {
                    "action": action,
                    "addr": at,
                    "size": size,
                    "stream": 0,
                    "time_us": time_us,
                    "frames": [],
                }
            )
    return {"segments": [], "device_traces": [history[:events]], "allocator_settings": {}}


def main():
    if sys.argv[1:2] == ["--large"]:
        events, out = int(sys.argv[2]), sys.argv[3]
        opened = gzip.open if out.endswith(".gz") else open
        with opened(out, "wb") as file:
            pickle.dump(large(events), file, protocol=4)
        return
    for protocol in (2, 3, 4, 5):
        raw = pickle.dumps(snapshot(), protocol=protocol)
        (HERE / f"protocol{protocol}.pickle").write_bytes(raw)
    raw = pickletools.optimize(pickle.dumps(snapshot(), protocol=4))
    (HERE / "optimized.pickle").write_bytes(raw)
    # Python's own pickler does not write in batches.
    raw = pickle._dumps(snapshot(), protocol=4)
    (HERE / "pure_python.pickle").write_bytes(raw)
    (HERE / "labelled.pickle").write_bytes(pickle.dumps(labelled(), protocol=4))
    (HERE / "torch_2_0.pickle").write_bytes(pickle.dumps(torch_2_0(), protocol=2))
    source = HERE / "../../../../examples/traces/llama_varlen_oom.pickle.gz"
    raw = pickle.dumps(excerpt(source), protocol=4)
    (HERE / "excerpt.pickle").write_bytes(raw)


if __name__ == "__main__":
    main()
