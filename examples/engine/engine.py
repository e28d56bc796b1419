"""A small serving engine whose cache grows and shrinks: a transformer with paged attention in PyTorch's own operators.

    python examples/engine/engine.py --requests 32            # one engine, on a card or simulated
    python examples/engine/engine.py --check                  # arena and fixed cache generate the same tokens
    python examples/engine/engine.py --step                   # time of a decode step on each, with graphs too
    python examples/engine/share.py                           # two of them share a card
    python examples/engine/restart.py                         # one is killed, and another serves on at once

1. `Cache` has the keys and values of all layers, in blocks of 16 tokens. With an arena (`vramp.kv`) a block has memory
   while its page is committed; a fixed one is what engines have without it, one `torch.zeros` for each tensor.
2. `Engine.step` admits requests, runs one decode step for all that run, and frees the blocks of those that ended.
   A request that finds no memory waits, or is preempted and computed again: none fails.
3. Pages that no request uses go back to the card, for other processes.

The weights are random: what is generated means nothing, and costs what it would cost.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import vramp
import vramp.kv

BLOCK = 16
"""Tokens of a block."""
PIECE = 32
"""Requests of which attention is computed at once."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    kv_heads: int = 8
    vocabulary: int = 32000
    context: int = 4096

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys in one layer."""
        return self.kv_heads * self.head * 2


SMALL = Shape(layers=2, width=1024, heads=4, kv_heads=4, vocabulary=1000, context=1536)


class Model(torch.nn.Module):
    """A decoder of rotary attention and gated layers, without training."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.shape = shape
        torch.manual_seed(0)
        kv = shape.kv_heads * shape.head

        def weight(*sizes: int) -> torch.nn.Parameter:
            made = torch.empty(sizes, device=device, dtype=torch.bfloat16)
            if not made.is_meta:
                made.normal_(std=sizes[-1] ** -0.5)
            return torch.nn.Parameter(made, requires_grad=False)

        self.embedding = weight(shape.vocabulary, shape.width)
        self.layers = torch.nn.ModuleList()
        for _ in range(shape.layers):
            layer = torch.nn.Module()
            layer.qkv = weight(shape.width + 2 * kv, shape.width)
            layer.out = weight(shape.width, shape.width)
            layer.up = weight(2 * 3 * shape.width, shape.width)
            layer.down = weight(shape.width, 3 * shape.width)
            self.layers.append(layer)
        # The first operation on the meta device loads a thousand modules of PyTorch, which takes seconds.
        place = "cpu" if device == "meta" else device
        turns = 10000.0 ** (-torch.arange(0, shape.head, 2, device=place) / shape.head)
        angles = torch.arange(shape.context, device=place)[:, None] * turns
        for name, turned in ("cos", torch.cos(angles)), ("sin", torch.sin(angles)):
            self.register_buffer(name, turned.repeat(1, 2).to(torch.bfloat16), persistent=False)

    def _turn(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[at][:, None] + turned * self.sin[at][:, None]

    def forward(
        self,
        tokens: torch.Tensor,
        at: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
        cache: Cache,
        pieces: list[tuple[slice, int]],
    ) -> torch.Tensor:
        """Returns the next token after each of `tokens`, which has a row for each request.

        A token stands at `at` of its request, whose blocks are in `tables`, and its keys go to `slots`. Attention is
        computed for a piece of the rows at a time, over so many blocks, because it copies these blocks. Heads that
        share keys are further tokens to it.
        """
        s = self.shape
        rows, count = tokens.shape
        group = s.heads // s.kv_heads
        x = F.embedding(tokens.view(-1), self.embedding)
        places = at.view(-1)
        sees = torch.arange(tables.shape[1] * BLOCK, device=x.device) <= at.repeat(1, group)[:, None, :, None]

        def past(blocks: torch.Tensor, piece: slice, width: int) -> torch.Tensor:
            mine = tables[piece, :width]
            return blocks[mine].view(len(mine), -1, s.kv_heads, s.head).transpose(1, 2)

        for index, layer in enumerate(self.layers):
            q, k, v = F.linear(F.rms_norm(x, (s.width,)), layer.qkv).split(
                (s.width, s.kv_heads * s.head, s.kv_heads * s.head), dim=-1
            )
            q = self._turn(q.view(-1, s.heads, s.head), places)
            k = self._turn(k.view(-1, s.kv_heads, s.head), places)
            keys, values = cache.keys[index], cache.values[index]
            keys.view(-1, s.kv_heads, s.head).index_copy_(0, slots.view(-1), k)
            values.view(-1, s.kv_heads, s.head).index_copy_(0, slots.view(-1), v.view(-1, s.kv_heads, s.head))
            q = q.view(rows, count, s.kv_heads, group, s.head).permute(0, 2, 3, 1, 4).flatten(2, 3)
            seen = torch.cat(
                [
                    F.scaled_dot_product_attention(
                        q[piece],
                        past(keys, piece, width),
                        past(values, piece, width),
                        attn_mask=sees[piece, ..., : width * BLOCK],
                    )
                    for piece, width in pieces
                ]
            )
            seen = seen.reshape(rows, s.kv_heads, group, count, s.head).permute(0, 3, 1, 2, 4).reshape(-1, s.width)
            x = x + F.linear(seen, layer.out)
            gate, up = F.linear(F.rms_norm(x, (s.width,)), layer.up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(F.rms_norm(x, (s.width,)), self.embedding).argmax(-1)


class NoMemory(Exception):
    """The cache has no block now."""


class Cache:
    """Blocks of keys and values of all layers. Block 0 pads tables and always has memory.

    Slots that no token has are read, and masked: they must not be NaN, so memory begins as zeros.
    """

    def __init__(self, shape: Shape, most: int, device: str, arena: vramp.kv.Arena | None) -> None:
        self.arena = arena
        pages = 1 if arena is None else arena.pages
        self.per_page = (most if arena is None else arena.page) // (shape.token_bytes * BLOCK)
        most = self.per_page * shape.token_bytes * BLOCK
        # Work on the pages is queued there.
        self.stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
        form = (-1, BLOCK, shape.kv_heads, shape.head)
        tensors = [
            torch.zeros(most // 2, dtype=torch.bfloat16, device=device).view(form)
            if arena is None
            else arena.tensor(number, torch.bfloat16, form)
            for number in range(2 * shape.layers)
        ]
        self.keys, self.values = tensors[::2], tensors[1::2]
        self.pages = None if arena is None else arena.flat(torch.bfloat16).view(2 * shape.layers, pages, -1)
        # Free blocks by page. Those of pages in use are taken first, so that pages become empty.
        self.free: dict[int, list[int]] = {}
        self.absent = set(range(pages))
        self.commits: list[float] = []
        self._commit(0)
        self.free[0].remove(0)

    def _commit(self, page: int) -> None:
        if self.arena is not None and self.pages is not None:
            started = time.perf_counter()
            self.arena.commit(page, self.stream)
            self.commits.append(time.perf_counter() - started)
            self.pages[:, page].zero_()
        self.absent.discard(page)
        self.free[page] = list(range(page * self.per_page, (page + 1) * self.per_page))

    @property
    def used_pages(self) -> int:
        return len(self.free)

    @property
    def room(self) -> int:
        """Blocks that can be taken at most."""
        return sum(map(len, self.free.values())) + len(self.absent) * self.per_page

    def take(self) -> int:
        """Returns a free block. Raises NoMemory."""
        best = min((page for page, blocks in self.free.items() if blocks), key=lambda p: len(self.free[p]), default=None)
        if best is None:
            if not self.absent:
                raise NoMemory
            best = min(self.absent)
            try:
                self._commit(best)
            except vramp.OutOfMemoryError:
                raise NoMemory from None
        return self.free[best].pop()

    def give(self, blocks: Iterable[int]) -> None:
        """Takes blocks back. A page without blocks in use is parked."""
        for block in blocks:
            page = block // self.per_page
            self.free[page].append(block)
            if self.arena is not None and page and len(self.free[page]) == self.per_page:
                del self.free[page]
                self.absent.add(page)
                self.arena.park(page, self.stream)

    def release(self) -> int:
        """Gives what is parked to the card."""
        return self.arena.release() if self.arena is not None else 0


@dataclass(eq=False)
class Request:
    """What a user asked for."""

    tokens: list[int]
    """The prompt, and what was made."""
    answer: int
    came: float = 0.0
    made: list[int] = field(default_factory=list)
    blocks: array[int] = field(default_factory=lambda: array("q"))
    done: float | None = None


class Engine:
    """Runs requests in one batch."""

    def __init__(self, model: Model, cache: Cache, batch: int, device: str) -> None:
        self.model, self.cache, self.batch, self.device = model, cache, batch, device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.preempted = 0
        self.late = 0
        self.made = 0

    def submit(self, request: Request) -> None:
        request.came = time.perf_counter()
        self.waiting.append(request)

    def _grow(self, request: Request) -> None:
        """Gives a request blocks for its tokens. Raises NoMemory."""
        while len(request.blocks) * BLOCK < len(request.tokens):
            request.blocks.append(self.cache.take())

    def _drop(self, request: Request) -> None:
        self.cache.give(request.blocks)
        request.blocks = array("q")

    def _run(self, of: list[Request], at: list[range]) -> list[int]:
        """Computes the tokens of requests at these places, as many of each. Returns what follows each."""
        width = max(len(request.blocks) for request in of)
        tables = array("q")
        for request in of:
            tables.extend(request.blocks)
            tables.frombytes(bytes(tables.itemsize * (width - len(request.blocks))))
        pairs = list(zip(of, at, strict=True))
        tokens = [[request.tokens[place] for place in places] for request, places in pairs]
        slots = [[r.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places] for r, places in pairs]
        inputs = [torch.tensor(x) for x in (tokens, [list(places) for places in at], slots)]
        inputs.append(torch.frombuffer(tables, dtype=torch.int64).view(len(of), width))
        pieces = [
            (slice(first, first + PIECE), max(len(request.blocks) for request in of[first : first + PIECE]))
            for first in range(0, len(of), PIECE)
        ]
        with torch.inference_mode():
            made = self.model(*(x.to(self.device) for x in inputs), self.cache, pieces)
        return [int(token) for token in made.tolist()]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch:
            request = self.waiting[0]
            if self.cache.room < -(-len(request.tokens) // BLOCK):
                return
            try:
                self._grow(request)
            except NoMemory:
                self._drop(request)
                return
            self.waiting.popleft()
            # All tokens but the last, a piece at a time: their keys are what is wanted.
            last = len(request.tokens) - 1
            for start in range(0, last, 512):
                self._run([request], [range(start, min(start + 512, last))])
            self.running.append(request)

    def step(self) -> int:
        """Runs one step. Returns the tokens that it made."""
        self._admit()
        grown = 0
        while grown < len(self.running):
            try:
                self._grow(self.running[grown])
                grown += 1
            except NoMemory:
                # The youngest gives way, and is computed again later.
                youngest = self.running.pop()
                self._drop(youngest)
                self.waiting.appendleft(youngest)
                self.preempted += 1
        # Neighbours have about as many blocks.
        ready = sorted(self.running, key=lambda request: len(request.blocks))
        if not ready:
            return 0
        made = self._run(ready, [range(len(request.tokens) - 1, len(request.tokens)) for request in ready])
        for request, token in zip(ready, made, strict=True):
            request.made.append(token)
            request.tokens.append(token)
            if len(request.made) == request.answer:
                request.done = time.perf_counter()
                self._drop(request)
                self.running.remove(request)
                self.ended.append(request)
        self.made += len(made)
        return len(made)

    def give_up(self, before: float) -> None:
        """Gives up requests that came before a time, whose answers come too late."""
        late = [request for request in (*self.running, *self.waiting) if request.came < before]
        for request in late:
            self._drop(request)
        self.running = [request for request in self.running if request.came >= before]
        self.waiting = deque(request for request in self.waiting if request.came >= before)
        self.late += len(late)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running


def requests(count: int, shape: Shape, seed: int) -> Iterator[Request]:
    """Returns requests of lengths as chats have them: many short, some long."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(count):
        spread = torch.rand(3, generator=chance).tolist()
        prompt = int(shape.context * (0.05 + 0.45 * spread[0] ** 2))
        answer = max(4, int(shape.context * (0.02 + 0.3 * spread[1] ** 2)))
        first = int(spread[2] * 900)
        yield Request([(first + 7 * i) % shape.vocabulary for i in range(prompt)], answer)


def device_of(pool: vramp.Pool) -> str:
    """Returns where torch finds memory of the pool: a simulated card has the host's."""
    return "cpu" if pool.is_simulated else "cuda"


def arena_for(pool: vramp.Pool, shape: Shape, memory: int) -> vramp.kv.Arena:
    """Returns an arena of at most `memory` bytes in all tensors."""
    page = pool.device_info.page
    tensors = 2 * shape.layers
    pages = max(2, memory // (page * tensors))
    return vramp.kv.arena(pool, tensors=tensors, size=pages * page, page=page, superpage=page)


def make(shape: Shape, memory: int, batch: int, kind: str) -> Engine:
    """Returns an engine whose cache has at most `memory` bytes: `arena` or `fixed`."""
    pool = vramp.pool()
    device = device_of(pool)
    # cuDNN plans attention anew for each number of requests and blocks, and loads code for it: a full card has no room.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.no_grad():
        model = Model(shape, device)
        arena = arena_for(pool, shape, memory) if kind == "arena" else None
        return Engine(model, Cache(shape, memory // (2 * shape.layers), device, arena), batch, device)


def quantile(values: list[float], part: float) -> float:
    """Returns a quantile; zero of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def compare(shape: Shape, memory: int, batch: int) -> None:
    """Generates with both caches, the arena's under such a limit that requests are preempted."""
    made = {}
    for kind in ("fixed", "arena"):
        engine = make(shape, memory, batch, kind)
        if engine.cache.arena is not None:
            engine.cache.arena.limit = memory // 2
        # One at a time: a batch that is put together otherwise may round otherwise.
        for request in requests(4, shape, 1):
            engine.submit(request)
            while not engine.is_idle:
                engine.step()
        made[kind] = [request.made for request in engine.ended]
        print(f"{kind}: {engine.made} tokens, {engine.cache.used_pages} pages at the end")
    for number, (fixed, arena) in enumerate(zip(made["fixed"], made["arena"], strict=True)):
        if fixed != arena:
            first = next(at for at, (one, other) in enumerate(zip(fixed, arena, strict=True)) if one != other)
            raise SystemExit(f"request {number}: token {first} of {len(fixed)} differs from that of a fixed cache")
    print("the tokens are equal")


def time_steps(shape: Shape, memory: int, batch: int) -> None:
    """Prints the time of a decode step on both caches, alone and as a captured graph that is replayed over growth."""
    found: dict[str, dict[str, float]] = {"fixed": {}, "arena": {}}
    engines = {kind: make(shape, memory, batch, kind) for kind in found}
    inputs = {}
    length = shape.context // 2
    width = length // BLOCK
    for engine in engines.values():
        tables = torch.tensor([[engine.cache.take() for _ in range(width)] for _ in range(batch)], device=engine.device)
        for tensor in (*engine.cache.keys, *engine.cache.values):
            for blocks in tables:
                tensor[blocks] = 0.1
        at = torch.full((batch, 1), length - 1, device=engine.device)
        slots = tables[:, -1:] * BLOCK + BLOCK - 1
        tokens = torch.ones((batch, 1), dtype=torch.int64, device=engine.device)
        inputs[engine] = (tokens, at, slots, tables, engine.cache, [(slice(0, batch), width)])

    def timed(run: object, turns: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(turns):
            run()  # type: ignore[operator]
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / turns * 1e3

    with torch.inference_mode():
        runs = {kind: (lambda e=engine: e.model(*inputs[e])) for kind, engine in engines.items()}
        graphs = {}
        for kind, run in runs.items():
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
            graphs[kind] = (graph, out)
        engine = engines["arena"]
        before = graphs["arena"][1].clone()
        graphs["arena"][0].replay()
        before.copy_(graphs["arena"][1])
        grown = [engine.cache.take() for _ in range(engine.cache.per_page)]
        engine.cache.give(grown)
        engine.cache.release()
        graphs["arena"][0].replay()
        torch.cuda.synchronize()
        if not torch.equal(before, graphs["arena"][1]):
            raise SystemExit("a graph that is replayed over growth gave other tokens")
        for turn in range(5):
            for kind in (("fixed", "arena"), ("arena", "fixed"))[turn % 2]:
                step, graph = timed(runs[kind], 20), timed(graphs[kind][0].replay, 20)
                kept = found[kind]
                kept["step_ms"] = min(step, kept.get("step_ms", step))
                kept["graph_ms"] = min(graph, kept.get("graph_ms", graph))
    ratios = {name: found["arena"][name] / found["fixed"][name] for name in ("step_ms", "graph_ms")}
    print(json.dumps({**found, "ratio": ratios}))


def serve(
    engine: Engine, shape: Shape, seed: int, bursts: list[float], count: int, seconds: float, deadline: float
) -> None:
    """Serves bursts of requests for some seconds, then what is left of them. Talks to `share.py` by lines.

    A request is given up if it has no answer by so many seconds after it came.
    """
    for request in requests(4, shape, 99):
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
    engine.ended.clear()
    engine.cache.release()
    if engine.device == "cuda":
        # What torch needs besides is its own from now on, so that the rest of the card is for caches.
        torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    print("ready", flush=True)
    input()
    started, warm = time.perf_counter(), engine.made
    engine.cache.commits.clear()
    due = deque(sorted(bursts))
    released = started
    in_time = 0
    asked = 0
    while True:
        now = time.perf_counter()
        if due and now - started >= due[0]:
            due.popleft()
            for request in requests(count, shape, seed + len(due)):
                engine.submit(request)
                asked += 1
        engine.give_up(now - deadline)
        made = engine.step() if not engine.is_idle else 0
        if now - started < seconds:
            in_time = engine.made - warm
        if now - released > 0.05:
            released = now
            engine.cache.release()
        if engine.is_idle:
            if not due and now - started >= seconds:
                break
            time.sleep(0.002)
        elif not made:
            time.sleep(0.001)
    ended = [(request, request.done) for request in engine.ended if request.done is not None]
    waits = [done - request.came for request, done in ended]
    answered = sum(request.answer for request, done in ended if done - started < seconds)
    commits = engine.cache.commits
    print(
        json.dumps(
            {
                "asked": asked,
                "done": len(engine.ended),
                "late": engine.late,
                "tokens": in_time,
                "tokens_per_s": in_time / seconds,
                "answered_per_s": answered / seconds,
                "seconds_to_drain": time.perf_counter() - started,
                "wait_p50_s": quantile(waits, 0.5),
                "wait_p99_s": quantile(waits, 0.99),
                "commits": len(commits),
                "commit_p50_ms": 1e3 * quantile(commits, 0.5),
                "commit_p99_ms": 1e3 * quantile(commits, 0.99),
                "preempted": engine.preempted,
                "pages_at_end": engine.cache.used_pages,
            }
        ),
        flush=True,
    )


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the tokens of both caches")
    parser.add_argument("--step", action="store_true", help="time a decode step on both caches")
    parser.add_argument("--serve", action="store_true", help="serve bursts, for share.py")
    parser.add_argument("--kind", choices=("arena", "fixed"), default="arena")
    parser.add_argument("--memory", type=float, default=None, help="most GiB of the cache")
    parser.add_argument("--batch", type=int, default=None, help="most requests in a step")
    parser.add_argument("--requests", type=int, default=32, help="requests, of each burst with --serve")
    parser.add_argument("--bursts", default="0", help="seconds at which bursts begin, with commas")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for an answer, with --serve")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    is_simulated = vramp.pool().is_simulated
    shape = SMALL if is_simulated else Shape()
    memory = int((given.memory or (0.04 if is_simulated else 2)) * 2**30)
    batch = given.batch or (8 if is_simulated else 256)
    if given.check:
        return compare(shape, memory, batch)
    if given.step:
        if is_simulated:
            raise SystemExit("a decode step is timed on a card")
        return time_steps(shape, int((given.memory or 8) * 2**30), 32)
    engine = make(shape, memory, batch, given.kind)
    if given.serve:
        bursts = [float(at) for at in given.bursts.split(",")]
        return serve(engine, shape, given.seed, bursts, given.requests, given.seconds, given.deadline)
    for request in requests(given.requests, shape, given.seed):
        engine.submit(request)
    started = time.perf_counter()
    most = 0
    while not engine.is_idle:
        engine.step()
        most = max(most, engine.cache.used_pages)
    seconds = time.perf_counter() - started
    print(f"{len(engine.ended)} requests, {engine.made} tokens, {engine.made / seconds:.0f} a second")
    arena = engine.cache.arena
    if arena is not None:
        stats = arena.stats()
        print(f"pages: {most} at most, {stats.committed} now, {stats.parked} parked, {engine.preempted} preemptions")
        print(f"{engine.cache.release() / 2**20:.0f} MiB are the card's again")
    return None


if __name__ == "__main__":
    main()
