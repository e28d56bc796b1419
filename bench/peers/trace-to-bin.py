#!/usr/bin/env python3
"""Converts the requests of a PyTorch snapshot to the binary format of the harness.

    trace-to-bin.py SNAPSHOT.pickle[.gz] OUT.bin

Little-endian u64 quadruples: 1 allocate or 0 free, the block's address, its size, its stream's
number. Unpickles the snapshot: use it only for trusted files.
"""

import gzip
import pickle
import struct
import sys


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, out = sys.argv[1:]
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rb") as file:
        snapshot = pickle.load(file)
    traces = [trace for trace in snapshot["device_traces"] if trace]
    if not traces:
        sys.exit(f"{path} has no trace: record with torch.cuda.memory._record_memory_history()")
    streams = {}
    operations = {"alloc": 1, "free_completed": 0}
    with open(out, "wb") as file:
        for event in traces[0]:
            operation = operations.get(event["action"])
            if operation is None:
                continue
            stream = streams.setdefault(event["stream"], len(streams))
            file.write(struct.pack("<4Q", operation, event["addr"], event["size"], stream))


if __name__ == "__main__":
    main()
