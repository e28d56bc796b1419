#!/usr/bin/env python3
"""Checks that PyTorch's viewers can show a memory snapshot: check-snapshot.py [--torch] FILE...

Without --torch this needs Python alone. It checks the opcodes that the viewer in the browser reads,
every key that torch/cuda/_memory_viz.py and that viewer use, and that events and segments are
consistent: the viewer undoes the events from the last to the first. With --torch it also runs the
functions of torch.cuda._memory_viz over the snapshot, and needs PyTorch.
"""

import argparse
import bisect
import contextlib
import gzip
import io
import pickle
import pickletools

# The opcodes that the viewer in the browser reads.
OPCODES = set(
    "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET BINPUT LONG_BINPUT APPEND APPENDS SETITEM"
    " SETITEMS EMPTY_DICT EMPTY_LIST EMPTY_TUPLE DICT LIST TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE"
    " NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE".split()
)
SEGMENT = {
    "device": int,
    "address": int,
    "total_size": int,
    "allocated_size": int,
    "active_size": int,
    "requested_size": int,
    "stream": int,
    "segment_type": str,
    "segment_pool_id": tuple,
    "is_expandable": bool,
    "frames": list,
    "blocks": list,
}
BLOCK = {"address": int, "size": int, "requested_size": int, "state": str, "frames": list}
STATES = {"active_allocated", "active_pending_free", "inactive"}
EVENT = {"action": str, "size": int, "stream": int, "time_us": int, "frames": list}
FRAME = {"name": str, "filename": str, "line": int}


def check(condition, *what):
    if not condition:
        raise SystemExit("check-snapshot: " + " ".join(map(str, what)))


def check_keys(found, expected, what):
    for key, kind in expected.items():
        check(type(found.get(key)) is kind, what, "has no", kind.__name__, key, "in", found)


def check_frames(frames, seen):
    """Checks each list of frames once: lists are shared."""
    if id(frames) not in seen:
        seen.add(id(frames))
        for frame in frames:
            check_keys(frame, FRAME, "a frame")


def check_structure(snapshot):
    check(type(snapshot["allocator_settings"]) is dict, "allocator_settings is no dict")
    seen = set()
    for segment in snapshot["segments"]:
        check_keys(segment, SEGMENT, "a segment")
        check_frames(segment["frames"], seen)
        at, active, allocated, requested = segment["address"], 0, 0, 0
        for block in segment["blocks"]:
            check_keys(block, BLOCK, "a block")
            check_frames(block["frames"], seen)
            check(block["state"] in STATES, "a block in state", block["state"])
            check(block["address"] == at, "a block is at", block["address"], "and not at", at)
            at += block["size"]
            if block["state"] != "inactive":
                active += block["size"]
                requested += block["requested_size"]
                check(block["requested_size"] <= block["size"], "a block smaller than requested")
            if block["state"] == "active_allocated":
                allocated += block["size"]
        check(at == segment["address"] + segment["total_size"], "blocks do not fill", segment)
        found = segment["active_size"], segment["allocated_size"], segment["requested_size"]
        check(found == (active, allocated, requested), "wrong sums in", segment)
    for history in snapshot["device_traces"]:
        for event in history:
            check_keys(event, EVENT, "an event")
            address = "device_free" if event["action"] == "oom" else "addr"
            check(type(event.get(address)) is int, "an event has no", address, "in", event)
            check_frames(event["frames"], seen)


class Pages:
    """Address ranges of segments, as a sorted list of starts with their ends."""

    def __init__(self):
        self.starts, self.ends = [], []

    def add(self, start, end):
        """Merges adjacent ranges: memory mapped in parts may be unmapped at once."""
        at = bisect.bisect(self.starts, start)
        if at < len(self.starts) and self.starts[at] == end:
            self.starts.pop(at)
            end = self.ends.pop(at)
        if at > 0 and self.ends[at - 1] == start:
            self.ends[at - 1] = end
            return
        self.starts.insert(at, start)
        self.ends.insert(at, end)

    def find(self, address):
        at = bisect.bisect(self.starts, address) - 1
        return at if at >= 0 and address < self.ends[at] else None

    def cut(self, start, end):
        at = self.find(start)
        check(at is not None and end <= self.ends[at], "no segment at", start, "to", end)
        before, after = self.starts.pop(at), self.ends.pop(at)
        for left, right in (before, start), (end, after):
            if left < right:
                self.add(left, right)


def check_story(snapshot, device):
    """Undoes the events of a device, as the viewer does to show the state before each one: an
    undone block must exist, and an existing block must be within a segment."""
    blocks, pages = {}, Pages()
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            pages.add(segment["address"], segment["address"] + segment["total_size"])
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    blocks[block["address"]] = block["state"]
    for nth, event in reversed(list(enumerate(snapshot["device_traces"][device]))):
        action, at, size = event["action"], event.get("addr"), event["size"]
        if size == 0:
            continue
        if action == "alloc":
            check(blocks.pop(at, None) == "active_allocated", "event", nth, "made no live block")
        elif action == "free_requested":
            check(blocks.get(at) == "active_pending_free", "event", nth, "freed no block")
            blocks[at] = "active_allocated"
        elif action == "free_completed":
            check(at not in blocks, "event", nth, "freed a block that is there")
            check(pages.find(at) is not None, "event", nth, "freed a block outside of segments")
            blocks[at] = "active_pending_free"
        elif action in ("segment_free", "segment_unmap"):
            pages.add(at, at + size)
        elif action in ("segment_alloc", "segment_map"):
            inside = [block for block in blocks if at <= block < at + size]
            check(not inside, "event", nth, "made a segment under the blocks", inside)
            pages.cut(at, at + size)


def check_with_torch(snapshot):
    from torch.cuda import _memory_viz as viz

    keep = {"format_flamegraph": lambda lines: lines}
    text = viz.segsum(snapshot)
    check(f"segments: {len(snapshot['segments'])}" in text, "segsum says", text)
    check(len(viz.trace(snapshot).splitlines()) > len(snapshot["device_traces"][0]), "trace")
    lines = viz.memory(snapshot, **keep) + viz.segments(snapshot, **keep)
    total = sum(int(line.rsplit(" ", 1)[1]) for line in lines.splitlines())
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    check(total == 2 * reserved, "memory and segments tell of", total, "bytes, not", 2 * reserved)
    # The function prints as well.
    with contextlib.redirect_stdout(io.StringIO()):
        viz.compare(snapshot["segments"], [], **keep)
    for page in (
        viz.trace_plot(snapshot),
        viz.trace_plot(snapshot, plot_segments=True),
        viz.segment_plot(snapshot),
    ):
        check("MemoryViz.js" in page, "a plot is no page of the viewer")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true", help="run PyTorch's own functions too")
    parser.add_argument("--story", action="store_true", help="require that events are consistent with segments")
    parser.add_argument("files", nargs="+", metavar="FILE")
    args = parser.parse_args()
    for path in args.files:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            raw = file.read()
        check(raw[:2] == b"\x80\x04", path, "is no pickle of protocol 4")
        for opcode, _, _ in pickletools.genops(raw):
            check(opcode.name in OPCODES, path, "uses", opcode.name, "which the viewer cannot read")
        snapshot = pickle.loads(raw)
        check_structure(snapshot)
        counts = [len(history) for history in snapshot["device_traces"]]
        if args.story:
            for device in range(len(counts)):
                check_story(snapshot, device)
        if args.torch:
            check_with_torch(snapshot)
        print(f"{path}: events {counts}, {len(snapshot['segments'])} segments: passed")


if __name__ == "__main__":
    main()
