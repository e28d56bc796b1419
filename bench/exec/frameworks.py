"""Small jobs of other people's libraries, for `bench/exec/costs.py`: each prints what it computed, without times.

    python frameworks.py cupy|numba|jax|torch|conv|graph|llama
    python frameworks.py steady cupy|torch       # seconds of a steady loop, the least of seven, as JSON
    python frameworks.py hold GIB SECONDS        # JAX keeps arrays and computes with them
"""

import json
import sys
import time


def cupy_job():
    import cupy as cp

    cp.random.seed(1)
    total = 0
    for step in range(200):
        a = cp.arange(10_000 + 37 * step, dtype=cp.float64)
        b = cp.sort(cp.sin(a))
        total += int((b * 1000).astype(cp.int64).sum())
    m = cp.arange(512 * 512, dtype=cp.float64).reshape(512, 512) % 7
    print("cupy", total, float((m @ m).sum()))


def numba_job():
    import numpy as np
    from numba import cuda

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] + y[i]

    sums = []
    for step in range(50):
        x = cuda.to_device(np.arange(10_000 + step, dtype=np.float64))
        out = cuda.device_array_like(x)
        add[64, 256](x, x, out)
        sums.append(out.copy_to_host().sum())
    print("numba", sum(sums))


def jax_job():
    import jax
    import jax.numpy as jnp

    key = jax.random.PRNGKey(0)

    @jax.jit
    def step(w, x):
        return w - 0.01 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w)) ** 2))(w)

    w = jax.random.normal(key, (256, 256))
    for i in range(20):
        w = step(w, jax.random.normal(jax.random.fold_in(key, i), (512 + i, 256)))
    print("jax", f"{float(jnp.abs(w).sum()):.2f}")


def torch_job():
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(20):
        x = torch.randn(64 + 16 * step, 1024, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("torch", f"{loss.item():.5f}", torch.cuda.get_allocator_backend())


def conv_job():
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)).cuda()
    out = sum(float(model(torch.randn(n, 3, 64, 64, device="cuda")).sum()) for n in range(1, 12))
    print("conv", f"{out:.1f}")


def graph_job():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512).cuda()
    x = torch.randn(64, 512, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = model(x).relu() + 1
    total = 0.0
    for step in range(10):
        x.fill_(step)
        graph.replay()
        total += float(y.sum())
    print("graph", f"{total:.1f}")


def llama_job():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000)
    model = LlamaForCausalLM(config).cuda().eval()
    out = model.generate(torch.arange(16, device="cuda")[None], max_new_tokens=32, do_sample=False)
    print("llama", out[0].tolist())


def steady(which):
    if which == "cupy":
        import cupy as cp

        def step():
            a = cp.arange(1_000_000, dtype=cp.float32)
            return (a * 2 + 1).sum() + cp.sqrt(a).sum()

        wait = cp.cuda.Device().synchronize
    else:
        import torch

        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
        x = torch.randn(512, 2048, device="cuda")

        def step():
            model(x).square().mean().backward()

        wait = torch.cuda.synchronize
    for _ in range(50):
        step()
    took = []
    for _ in range(7):
        wait()
        start = time.perf_counter()
        for _ in range(300):
            step()
        wait()
        took.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(took)}))


def hold(gib, seconds):
    import jax
    import jax.numpy as jnp

    count = max(1, int(gib * 4))
    arrays = [jnp.full((64, 1024, 1024), i, jnp.float32) for i in range(count)]
    add = jax.jit(lambda a: a + 1, donate_argnums=0)
    jax.block_until_ready(arrays)
    print("ready", flush=True)
    rounds = [0] * count
    end = time.time() + seconds
    step = 0
    while time.time() < end:
        i = step * 7 % count
        arrays[i] = add(arrays[i])
        rounds[i] += 1
        step += 1
        if step % 32 == 0:
            jax.block_until_ready(arrays[i])
    wrong = sum(int(jnp.sum(a != i + n)) for i, (a, n) in enumerate(zip(arrays, rounds)))
    print(json.dumps({"wrong": wrong, "steps": step}))
    sys.exit(4 if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(float(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "steady":
        steady(sys.argv[2])
    else:
        globals()[sys.argv[1] + "_job"]()
