#!/usr/bin/env python3
"""Checks the routes by which PyTorch uses vramp, with real kernels on a card.

    check-torch.py [NAME...] [--list] [--timeout 300]

NAME is a part of a check's name; without one, all checks run. Each check is a process of its own that
ends with an audit of vramp. Prints PASS or FAIL with the name and the result, and exits with 1 if any
failed. Needs the package vramp. A name begins with the route:

- `compiled` and `pluggable` checks call vramp.torch.enable() with that route,
- `pool` checks use vramp.torch.mem_pool() in PyTorch's own allocator.

The checks look at contents: what kernels, graphs, streams and threads computed. python/tests/torch tests
the functions about memory themselves, also with VRAMP_TEST_DEVICE=cuda. For what PyTorch cannot do on the
pluggable route, the error and its message are checked.
"""

import argparse
import gc
import os
import subprocess
import sys
import threading
import time

MIB = 1 << 20
CHECKS = {}


class Check:
    """A function of torch and vramp.torch; its result is printed after PASS."""

    def __init__(self, function, environment):
        self.function = function
        self.environment = environment


def check(*routes, **environment):
    """Registers a function as a check of each route."""

    def add(function):
        for route in routes:
            name = f"{route}-{function.__name__.replace('_', '-')}"
            CHECKS[name] = Check(function, environment)
        return function

    return add


class Failed(Exception):
    """Raised when an expectation does not hold."""


def expect(holds, what):
    if not holds:
        raise Failed(what)


def expect_raises(kind, text, call):
    """Returns the error that a call raises, whose text must contain `text`."""
    try:
        call()
    except kind as error:
        expect(text in str(error), f"the text of {type(error).__name__} lacks '{text}': {error}")
        return error
    raise Failed(f"nothing was raised, where '{text}' was expected")


def live(vramp):
    return vramp.report()["live"]


def forget_workspaces(torch):
    """Frees cuBLAS's workspaces, also those allocated during a capture."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()


def bytes_on_card(torch, size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


class Work:
    """A small network on fixed inputs, with sums in a fixed order: equal runs give equal bits."""

    def __init__(self, torch, seed=0):
        self.torch = torch
        torch.manual_seed(seed)
        widths = [256, 512, 512, 64]
        layers = [torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
        self.model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1], torch.nn.GELU(), layers[2])
        inputs = torch.randn(8, 1024, 256)
        self.model = self.model.cuda()
        self.inputs = inputs.cuda()
        self.now = self.inputs[0].clone()

    def step(self):
        """Returns the loss and the gradients of the input in `now`."""
        self.model.zero_grad(set_to_none=True)
        loss = self.model(self.now).pow(2).mean()
        loss.backward()
        return [loss, *(parameter.grad for parameter in self.model.parameters())]

    def eager(self):
        """Returns the results of each input without a graph."""
        answers = []
        for value in self.inputs:
            self.now.copy_(value)
            answers.append([result.detach().clone() for result in self.step()])
        return answers

    def warm_up(self):
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        self.torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad(set_to_none=True)
        self.torch.cuda.synchronize()

    def capture(self, **how):
        """Captures one step; returns the graph and the tensors that each replay fills."""
        self.warm_up()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, **how):
            results = self.step()
        return graph, results

    def replays_as(self, graph, results, answers, what="a replay"):
        """Replays every input beside other memory, which the graph must not overwrite."""
        for number, value in enumerate(self.inputs):
            others = [bytes_on_card(self.torch, (1 + k) * MIB).fill_(255) for k in range(8)]
            self.now.copy_(value)
            graph.replay()
            untouched = all(bool((other == 255).all()) for other in others)
            expect(untouched, f"{what} of input {number} wrote over other memory")
            for other in others:
                other.fill_(7)
            for kept, answer in zip(results, answers[number]):
                expect(
                    self.torch.equal(kept.detach(), answer), f"{what} of input {number} differs from eager"
                )


# --- mem_pool() ---


@check("pool")
def serves_what_is_made_inside(torch, vramp):
    pool = vramp.mem_pool()
    before = live(vramp)
    with torch.cuda.use_mem_pool(pool):
        inside = bytes_on_card(torch, 64 * MIB)
    grown = live(vramp) - before
    expect(grown >= 64 * MIB, f"vramp's live bytes grew by {grown} and not by 64 MiB")
    segments = pool.snapshot()
    holds = [s["address"] <= inside.data_ptr() < s["address"] + s["total_size"] for s in segments]
    expect(any(holds), "no segment of the pool contains the tensor")
    outside = bytes_on_card(torch, 64 * MIB)
    expect(live(vramp) - before == grown, "a tensor made outside came from vramp")
    inside.fill_(7)
    outside.fill_(9)
    expect(int(inside.sum(dtype=torch.int64)) == 7 * 64 * MIB, "the tensor's bytes changed")
    return f"{grown} bytes"


@check("pool", VRAMP_CONF="limit=512MiB")
def out_of_memory_is_torchs_own_error(torch, vramp):
    pool = vramp.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        kept = bytes_on_card(torch, 256 * MIB)
        error = expect_raises(
            torch.OutOfMemoryError, "CUDA out of memory", lambda: bytes_on_card(torch, 1024 * MIB)
        )
        after = bytes_on_card(torch, 64 * MIB)
        after.fill_(1)
    kept.fill_(2)
    free = bytes_on_card(torch, 1024 * MIB)
    expect(int(after[-1]) == 1 and int(kept[-1]) == 2, "a tensor from before or after was overwritten")
    del free
    return str(error)[:80]


@check("pool")
def statistics_and_snapshots_work(torch, vramp):
    pool = vramp.mem_pool()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1000)
    before = torch.cuda.memory_stats().get("reserved_bytes.all.current", 0)
    with torch.cuda.use_mem_pool(pool):
        kept = bytes_on_card(torch, 64 * MIB)
    stats = torch.cuda.memory_stats()
    expect(stats["reserved_bytes.all.current"] - before >= 64 * MIB, "the reserved bytes did not grow")
    expect(torch.cuda.memory_allocated() >= 64 * MIB, "the allocated bytes lack the tensor")
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    found = [e for e in trace if e["action"] == "alloc" and e["addr"] == kept.data_ptr()]
    expect(len(found) == 1, f"the trace has the tensor {len(found)} times")
    return f"{len(trace)} events"


@check("pool")
def graph_replays_as_eager(torch, vramp):
    work = Work(torch)
    answers = work.eager()
    pool = vramp.mem_pool()
    before = live(vramp)
    graph, results = work.capture(pool=pool.id)
    grown = live(vramp) - before
    expect(grown > 0, "the capture's memory did not come from vramp")
    expect(tuple(graph.pool()) == tuple(pool.id), "the graph uses another pool")
    work.replays_as(graph, results, answers)
    return f"{grown} bytes for the graph"


@check("pool")
def memory_returns_after_deletion(torch, vramp):
    vramp.report()
    before = live(vramp)
    pool = vramp.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        kept = [bytes_on_card(torch, 64 * MIB).fill_(k) for k in range(4)]
    held = live(vramp) - before
    expect(held >= 256 * MIB, f"vramp has only {held} live bytes for the pool")
    torch.cuda.synchronize()
    del kept, pool
    gc.collect()
    torch.cuda.empty_cache()
    expect(live(vramp) == before, f"{live(vramp) - before} bytes stay live")
    vramp.trim()
    expect(vramp.report()["reserved"] == 0, f"{vramp.report()['reserved']} bytes stay reserved")
    return f"{held} bytes freed"


@check("pool")
def memory_of_a_graph_returns_after_deletion(torch, vramp):
    work = Work(torch)
    pool = vramp.mem_pool()
    before = live(vramp)
    graph, results = work.capture(pool=pool.id)
    graph.replay()
    torch.cuda.synchronize()
    held = live(vramp) - before
    expect(held > 0, "the capture's memory did not come from vramp")
    work.model.zero_grad(set_to_none=True)
    del results, graph, pool
    forget_workspaces(torch)
    expect(live(vramp) == before, f"{live(vramp) - before} of {held} bytes stay live")
    return f"{held} bytes freed"


@check("pool")
def memory_is_kept_while_a_graph_needs_it(torch, vramp):
    work = Work(torch)
    answers = work.eager()
    pool = vramp.mem_pool()
    graph, results = work.capture(pool=pool.id)
    held = live(vramp)
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    vramp.trim()
    expect(live(vramp) == held, f"{held - live(vramp)} bytes of the graph were freed with the pool")
    work.replays_as(graph, results, answers)
    return f"{held} bytes outlive the pool"


@check("pool")
def two_streams_share_by_record_stream(torch, vramp):
    pool = vramp.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        return shared_by_record_stream(torch)


# --- enable() ---


@check("compiled", "pluggable")
def serves_every_tensor(torch, vramp):
    backend = torch.cuda.memory.get_allocator_backend()
    expected = {"compiled": "native", "pluggable": "pluggable"}[vramp.route()]
    expect(backend == expected, f"PyTorch names its allocator {backend}, and not {expected}")
    before = live(vramp)
    kept = bytes_on_card(torch, 64 * MIB).fill_(7)
    grown = live(vramp) - before
    expect(grown >= 64 * MIB, f"vramp's live bytes grew by {grown} and not by 64 MiB")
    expect(int(kept.sum(dtype=torch.int64)) == 7 * 64 * MIB, "the tensor's bytes changed")
    del kept
    torch.cuda.synchronize()
    expect(live(vramp) - before < 64 * MIB, "a deleted tensor stays live")
    return f"{grown} bytes"


@check("compiled", "pluggable", VRAMP_CONF="limit=512MiB")
def out_of_memory_leaves_all_tensors_as_they_are(torch, vramp):
    kept = bytes_on_card(torch, 128 * MIB).fill_(2)
    kind = torch.OutOfMemoryError if vramp.route() == "compiled" else RuntimeError
    for _ in range(20):
        after = bytes_on_card(torch, 64 * MIB).fill_(1)
        error = expect_raises(kind, "CUDA out of memory", lambda: bytes_on_card(torch, 1024 * MIB))
        expect(str(error).startswith("CUDA out of memory"), f"another beginning: {error}")
        expect(int(after[-1]) == 1 and int(kept[-1]) == 2, "a tensor from before or after was overwritten")
    return str(error)[:120]


@check("compiled", "pluggable")
def fraction_is_a_limit(torch, vramp):
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(512 * MIB / total)
    kept = bytes_on_card(torch, 256 * MIB)
    expect_raises(RuntimeError, "CUDA out of memory", lambda: bytes_on_card(torch, 512 * MIB))
    torch.cuda.set_per_process_memory_fraction(1.0)
    more = bytes_on_card(torch, 512 * MIB)
    return f"{kept.numel() + more.numel()} bytes without the limit"


@check("compiled", "pluggable")
def empty_cache_gives_memory_back(torch, vramp):
    for _ in range(2):
        kept = [bytes_on_card(torch, 64 * MIB).fill_(k) for k in range(8)]
        del kept
    torch.cuda.synchronize()
    before = vramp.report()["reserved"]
    torch.cuda.empty_cache()
    after = vramp.report()["reserved"]
    expect(before >= 512 * MIB and before - after >= 448 * MIB, f"{before} bytes became {after}")
    return f"{before} bytes became {after}"


def shared_by_record_stream(torch, rounds=50):
    """Memory freed while another stream still reads it must not be written to by its own stream."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    size = 4 * MIB
    copies = []
    for number in range(rounds):
        source = bytes_on_card(torch, size).fill_(number % 251)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            # The side stream is still busy when the memory is freed and allocated again.
            torch.cuda._sleep(2_000_000)
            copies.append(source.clone())
        source.record_stream(side)
        del source
        bytes_on_card(torch, size).fill_(255)
    torch.cuda.synchronize()
    for number, copied in enumerate(copies):
        wrong = int((copied != number % 251).sum())
        expect(wrong == 0, f"round {number}: {wrong} bytes were overwritten before they were read")
    return f"{rounds} rounds"


@check("compiled", "pluggable")
def record_stream_keeps_memory_for_other_streams(torch, vramp):
    return shared_by_record_stream(torch)


@check("compiled", "pluggable")
def memory_freed_beside_other_streams_is_sound(torch, vramp):
    streams = [torch.cuda.Stream() for _ in range(4)]
    kept, rounds = [], 200
    for number in range(rounds):
        with torch.cuda.stream(streams[number % 4]):
            size = (1 + number * 7 % 13) * MIB // 4
            kept.append((number % 251, bytes_on_card(torch, size).fill_(number % 251)))
        if len(kept) > 16:
            # Freed while another stream than its own is current.
            with torch.cuda.stream(streams[(number + 1) % 4]):
                kept.pop(number * 5 % 16)
    torch.cuda.synchronize()
    for value, tensor in kept:
        expect(bool((tensor == value).all()), f"a tensor of {value}s was overwritten")
    return f"{rounds} tensors on 4 streams"


@check("compiled", "pluggable")
def autograd_on_several_threads_gives_equal_bits(torch, vramp):
    works = [Work(torch, seed) for seed in range(4)]
    answers = [work.eager() for work in works]
    torch.cuda.synchronize()
    errors = []

    def run(work, answer):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    again = work.eager()
                    torch.cuda.current_stream().synchronize()
                    for ours, theirs in zip(again, answer):
                        equal = all(torch.equal(a, b) for a, b in zip(ours, theirs))
                        expect(equal, "a thread's gradients differ from those of one thread alone")
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(works, answers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return f"{len(threads)} threads"


def share(torch):
    return bytes_on_card(torch, MIB).untyped_storage()._share_cuda_()


def convolve(torch, benchmark):
    torch.backends.cudnn.benchmark = benchmark
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(8, 8, 3).cuda()
    return convolution(torch.ones(2, 8, 32, 32, device="cuda"))


@check("compiled")
def cudnn_benchmark_computes_the_same(torch, vramp):
    plain, tuned = convolve(torch, False), convolve(torch, True)
    expect(torch.allclose(plain, tuned, rtol=1e-3, atol=1e-3), "the results differ")
    return f"largest difference {float((plain - tuned).abs().max()):.1e}"


@check("compiled")
def graph_trees_compute_as_eager(torch, vramp):
    work = Work(torch)
    with torch.no_grad():
        answers = [work.model(value).clone() for value in work.inputs]
        compiled = torch.compile(work.model, mode="reduce-overhead")
        for _ in range(4):
            for value, answer in zip(work.inputs, answers):
                torch.compiler.cudagraph_mark_step_begin()
                # Fused kernels add in another order.
                same = torch.allclose(compiled(value), answer, rtol=1e-3, atol=1e-3)
                expect(same, "a replay differs from eager")
    return f"{len(answers)} inputs, 4 times"


@check("compiled")
def graph_in_a_memory_pool_replays_as_eager(torch, vramp):
    work = Work(torch)
    answers = work.eager()
    pool = torch.cuda.MemPool()
    graph, results = work.capture(pool=pool.id)
    expect(tuple(graph.pool()) == tuple(pool.id), "the graph uses another pool")
    work.replays_as(graph, results, answers)
    return f"{sum(segment['total_size'] for segment in pool.snapshot())} bytes"


@check("compiled", "pluggable")
def statistics_agree_with_vramps_own(torch, vramp):
    kept = [bytes_on_card(torch, (1 + k) * MIB).fill_(k) for k in range(8)]
    torch.cuda.synchronize()
    stats, own = torch.cuda.memory_stats(), vramp.report()
    requested = stats["requested_bytes.all.current"]
    expect(requested == own["live"], f"{requested} bytes requested, and {own['live']} live")
    reserved = stats["reserved_bytes.all.current"]
    expect(reserved == own["reserved"], f"{reserved} bytes reserved, and {own['reserved']} of vramp")
    held = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot())
    expect(held == reserved, f"the segments have {held} bytes, and {reserved} are reserved")
    torch.cuda.reset_peak_memory_stats()
    expect(torch.cuda.max_memory_reserved() == reserved, "the peak was not reset")
    return f"{len(kept)} tensors in {reserved} bytes"


# What PyTorch's own class for pluggable allocators refuses, and the function that its text names.
REFUSED = {
    "history": ("recordHistory", lambda torch: torch.cuda.memory._record_memory_history()),
    "fraction": ("getMemoryFraction", lambda torch: torch.cuda.get_per_process_memory_fraction()),
    "mem-pool": ("createOrIncrefPool", lambda torch: torch.cuda.MemPool()),
    "checkpoint": ("getCheckpointState", lambda torch: torch._C._cuda_getCheckpointState(0, (0, 1))),
    "sharing": ("shareIPcHandle", share),
    "cudnn-benchmark": ("cacheInfo", lambda torch: convolve(torch, True)),
}


def refusal(name):
    function, call = REFUSED[name]

    def refused(torch, vramp):
        kept = bytes_on_card(torch, MIB).fill_(3)
        text = f"does not yet support {function}"
        error = expect_raises(RuntimeError, text, lambda: call(torch))
        expect(bool((kept == 3).all()), "a tensor from before was overwritten")
        return str(error).splitlines()[0][:90]

    return refused


for refused_name in REFUSED:
    CHECKS[f"pluggable-raises-for-{refused_name}"] = Check(refusal(refused_name), {})


# --- graphs ---


@check("compiled", "pluggable")
def graph_replays_as_eager(torch, vramp):
    work = Work(torch)
    answers = work.eager()
    graph, results = work.capture()
    work.replays_as(graph, results, answers)
    torch.cuda.empty_cache()
    work.replays_as(graph, results, answers, "a replay after empty_cache")
    return f"{len(answers)} inputs, twice"


@check("compiled", "pluggable")
def graphs_of_one_pool_replay_in_order(torch, vramp):
    works = [Work(torch, seed) for seed in range(3)]
    answers = [work.eager() for work in works]
    # The results of a graph stay live, so no later graph may overwrite them.
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for work in works:
        graphs.append(work.capture(pool=pool))
    for (graph, results), work, answer in zip(graphs, works, answers):
        work.replays_as(graph, results, answer)
    return f"{len(graphs)} graphs"


@check("compiled", "pluggable")
def graph_with_a_side_stream_replays_as_eager(torch, vramp):
    inputs = torch.randn(2048, 512, device="cuda")
    weights = [torch.randn(512, 512, device="cuda") for _ in range(4)]
    side = torch.cuda.Stream()

    def branches():
        here = torch.cuda.current_stream()
        first = torch.relu(inputs @ weights[0])
        side.wait_stream(here)
        with torch.cuda.stream(side):
            beside = torch.relu(first @ weights[1]) @ weights[2]
            first.record_stream(side)
        other = torch.relu(first @ weights[3])
        # As large as the block just freed, and written while the side stream still reads that block.
        del first
        other = other + torch.ones(2048, 512, device="cuda")
        here.wait_stream(side)
        beside.record_stream(here)
        return other - beside

    answer = branches().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = branches()
    for _ in range(20):
        result.zero_()
        graph.replay()
        expect(torch.equal(result, answer), "a replay differs from eager")
    return "20 replays"


@check("compiled", "pluggable")
def graph_memory_returns_after_deletion(torch, vramp):
    work = Work(torch)
    work.warm_up()
    forget_workspaces(torch)
    before = live(vramp)
    held = []
    for _ in range(5):
        graph, results = work.capture()
        graph.replay()
        torch.cuda.synchronize()
        held.append(vramp.report()["reserved"])
        work.model.zero_grad(set_to_none=True)
        del graph, results
        forget_workspaces(torch)
    expect(live(vramp) <= before, f"{live(vramp) - before} bytes stay live")
    expect(held[-1] <= held[1], f"every graph adds memory: {held}")
    return f"{held[-1]} bytes reserved with a graph"


@check("compiled", "pluggable")
def graph_can_be_captured_after_one_failed(torch, vramp):
    work = Work(torch)
    answers = work.eager()
    work.warm_up()
    stream = torch.cuda.current_stream()

    def fails():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            loss = work.step()[0]
            # Waiting for work is not allowed in a capture, and ends it.
            float(loss)

    error = expect_raises(RuntimeError, "", fails)
    torch.cuda.set_stream(stream)
    gc.collect()
    torch.cuda.synchronize()
    graph, results = work.capture()
    work.replays_as(graph, results, answers)
    return f"after {str(error).splitlines()[0][:60]}"


@check("compiled", "pluggable")
def graphed_callable_trains_as_eager(torch, vramp):
    work = Work(torch)
    answers = work.eager()
    sample = work.inputs[0].clone()
    graphed = torch.cuda.make_graphed_callables(work.model, (sample,))
    for number, value in enumerate(work.inputs):
        graphed.zero_grad(set_to_none=True)
        loss = graphed(value).pow(2).mean()
        loss.backward()
        results = [loss, *(parameter.grad for parameter in graphed.parameters())]
        for ours, theirs in zip(results, answers[number]):
            expect(torch.equal(ours.detach(), theirs), f"input {number} differs from eager")
    return f"{len(answers)} inputs"


# --- one check, in a process of its own ---


def run_one(name):
    """Runs one check and prints its result."""
    try:
        import torch

        import vramp.torch as vramp

        expect(torch.cuda.is_available(), "PyTorch finds no usable card")
        route = name.split("-")[0]
        if route != "pool":
            vramp.enable(route)
        torch.cuda.init()
        found = CHECKS[name].function(torch, vramp)
        torch.cuda.synchronize()
        vramp.audit()
    except Failed as failure:
        print(failure)
        return 1
    except ModuleNotFoundError as missing:
        print(f"package {missing.name} is missing")
        return 1
    print(found)
    return 0


# --- all checks, each in a child ---


def run_child(name, timeout):
    """Returns whether a check passed, and its last line or exit code."""
    own = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
    for variable in ("VRAMP_CONF", "VRAMP_DEVICE"):
        own.pop(variable, None)
    own |= CHECKS[name].environment
    command = [sys.executable, os.path.abspath(__file__), "--one", name]
    try:
        ran = subprocess.run(
            command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end in {timeout} s"
    lines = ran.stdout.strip().splitlines()
    # vramp prints errors without a caller on stderr: they are failures too.
    reported = [line for line in ran.stderr.splitlines() if line.startswith("vramp:")]
    if ran.returncode == 0 and not reported:
        return True, lines[-1] if lines else ""
    sys.stderr.write(ran.stderr[-4000:])
    found = lines[-1:] or ran.stderr.strip().splitlines()[-1:]
    return False, "; ".join([f"exit code {ran.returncode}", *found, *reported[:3]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all checks by default")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument("--timeout", type=int, default=300, help="limit of each check, in seconds")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return run_one(args.one)
    chosen = [name for name in CHECKS if not args.names or any(part in name for part in args.names)]
    if not chosen:
        parser.error(f"no check has {' or '.join(args.names)} in its name: see --list")
    if args.list:
        print("\n".join(chosen))
        return 0
    failed = 0
    for name in chosen:
        start = time.monotonic()
        passed, found = run_child(name, args.timeout)
        failed += not passed
        print(
            f"{'PASS' if passed else 'FAIL'} {name} ({time.monotonic() - start:.1f} s): {found}", flush=True
        )
    print(f"{len(chosen) - failed} of {len(chosen)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
