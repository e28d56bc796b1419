#!/usr/bin/env python3
"""Checks CuPy, Numba, RMM and cuda.core on vramp, on a machine with a card.

    check-arrays.py [NAME...] [--list] [--timeout 300] [--device 0]

Needs the package vramp, and of the libraries those that are to be checked. NAME is a part of a check's
name; without one, all checks run. Each check is a process of its own. For each one a line of JSON is
printed, with the check's numbers, and PASS, FAIL or MISSING (a library is not installed) with its name.
Exits with 1 if a check failed, and with 2 if none ran.

- `math` checks compute the same with the library's own allocator and with vramp, and compare the bytes.
- `streams` and `threads` checks fill memory on many streams, and look for values of another stream.
- `oom` checks run out of memory, expect the library's exception, and allocate again.
- `cycles` checks allocate and free 100,000 times, and expect `live` to be what it was.
- `exit` checks end a process in several orders, and expect status 0 and nothing on stderr.
- `time` checks print the time of an allocation and free, beside that of the library's own pool in the
  same process, in turns. `ratio` is the median of vramp's over the median of the library's.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time

MIB = 1 << 20
CYCLES = 100_000
CHECKS = {}
# vramp must not cost more than this times the library's own pool.
MOST_RATIO = {"cupy": 1.5}


def check(*libraries, **environment):
    """Registers a function as a check that needs these modules."""

    def add(function):
        CHECKS[function.__name__.replace("_", "-")] = (function, libraries, environment)
        return function

    return add


class Failed(Exception):
    """Raised when an expectation does not hold."""


def expect(holds, what):
    if not holds:
        raise Failed(what)


def expect_equal(found, wanted, what):
    expect(found == wanted, f"{what}: {found!r} instead of {wanted!r}")


def the_pool():
    import vramp

    pool = vramp.pool(0)
    expect(not pool.is_simulated, "the pool is simulated: no card is usable")
    return pool


def settled(pool, live=0):
    """Expects a pool to be consistent and to have `live` bytes."""
    gc.collect()
    pool.audit()
    expect_equal(pool.stats().live, live, "live bytes at the end")


def in_threads(work, count=8):
    """Runs `work(number)` in threads, and raises what one of them raised."""
    failures = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def nanoseconds(cycle, size, count):
    for _ in range(count // 10):
        cycle(size)
    begin = time.perf_counter_ns()
    for _ in range(count):
        cycle(size)
    return (time.perf_counter_ns() - begin) / count


def in_turns(library, own, ours, sizes, count, rounds=7):
    """Times two functions that allocate and free `size` bytes, one after the other, `rounds` times."""
    result = {}
    for size in sizes:
        of_own, of_ours = [], []
        for _ in range(rounds):
            of_own.append(nanoseconds(own, size, count))
            of_ours.append(nanoseconds(ours, size, count))
        own_ns, ours_ns = statistics.median(of_own), statistics.median(of_ours)
        result[str(size)] = {
            "own_ns": round(own_ns),
            "vramp_ns": round(ours_ns),
            "ratio": round(ours_ns / own_ns, 2),
        }
    most = MOST_RATIO.get(library)
    if most is not None:
        worst = max(row["ratio"] for row in result.values())
        expect(worst <= most, f"ratio {worst} is above {most}: {result}")
    return result


# --- CuPy ---


def cupy_work(cupy):
    """Returns bytes that depend on many temporary arrays."""
    random = cupy.random.RandomState(7)
    x = random.standard_normal((700, 900))
    y = cupy.asarray(random.standard_normal((900, 700)))
    out = cupy.sort((x @ y).ravel())
    out = cupy.fft.irfft(cupy.fft.rfft(out))
    # Sums of integers: those of other numbers depend on the order, which differs from run to run.
    out = out + cupy.cumsum(cupy.rint(out * 100).astype(cupy.int64))
    parts = [out[i::13].copy() for i in range(13)]
    joined = cupy.concatenate(parts)
    return cupy.asnumpy(joined[cupy.argsort(joined)]).tobytes()


@check("cupy")
def math_cupy():
    import cupy

    import vramp.cupy

    wanted = cupy_work(cupy)
    vramp.cupy.install()
    pool = the_pool()
    found = [cupy_work(cupy) for _ in range(3)]
    expect(all(one == wanted for one in found), "the results differ")
    stats = pool.stats()
    expect(stats.allocated > 50, "the arrays did not come from vramp")
    cupy.fft.config.get_plan_cache().clear()
    vramp.cupy.uninstall()
    expect_equal(cupy_work(cupy), wanted, "after uninstall")
    return {"allocations": stats.allocated, "doctor": vramp.cupy.doctor()[0][2]}


def delayed(cupy):
    """Returns a kernel that writes a value after a time."""
    return cupy.RawKernel(
        r"""
extern "C" __global__ void delayed(float* out, int count, float value, long long clocks) {
  long long begin = clock64();
  while (clock64() - begin < clocks) {}
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    out[i] = value;
}
""",
        "delayed",
    )


@check("cupy")
def streams_cupy():
    """Slow writes on one stream must not reach an array that another stream got afterwards."""
    import cupy

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()
    kernel = delayed(cupy)
    count = MIB
    checked = 0
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(6)]
    kept = []
    for turn in range(240):
        stream = streams[turn % 6]
        with stream:
            array = cupy.empty(count, dtype=cupy.float32)
            kernel(
                (32,), (256,), (array, cupy.int32(count), cupy.float32(turn), cupy.int64(200_000))
            )
            if turn % 3 == 0:
                kept.append((turn, array, stream))
            # otherwise the array is dropped while the kernel runs
            del array
        if len(kept) > 12:
            expected, array, stream = kept.pop(0)
            with stream:
                expect(bool((array == expected).all()), f"array {expected} was overwritten")
            checked += 1
    kept.clear()
    array = stream = None
    for one in streams:
        one.synchronize()
    settled(pool)
    return {"checked": checked, "chunks_moved": pool.stats().chunks_moved}


@check("cupy")
def streams_cupy_record_use():
    """An array that a second stream reads is reused only after `record_use`'s work."""
    import cupy

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    kernel = delayed(cupy)
    count = 4 * MIB
    for turn in range(40):
        with first:
            array = cupy.full(count, turn, dtype=cupy.float32)
            event = first.record()
        with second:
            second.wait_event(event)
            held = cupy.empty(1, dtype=cupy.float32)
            kernel((1,), (1,), (held, cupy.int32(1), cupy.float32(0), cupy.int64(5_000_000)))
            total = array.sum()
        vramp.cupy.record_use(array, second)
        del array
        with first:
            again = cupy.full(count, -1, dtype=cupy.float32)
        with second:
            expect_equal(float(total), float(turn) * count, "the sum on the second stream")
        first.synchronize()
        del again, total, held
    settled(pool)


@check("cupy")
def streams_cupy_are_destroyed():
    """A thousand streams come and go, and vramp forgets each before CuPy destroys it."""
    import cupy

    import vramp.cupy
    from vramp._adaptors import streams_of

    vramp.cupy.install()
    pool = the_pool()
    for turn in range(1000):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.full(10_000, turn, dtype=cupy.int32)
            expect_equal(int(array.sum()), 10_000 * turn, "the sum")
        del array, stream
    expect(len(streams_of(pool)) < 20, f"{len(streams_of(pool))} streams are kept")
    settled(pool)


@check("cupy")
def threads_cupy():
    import cupy

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()

    def work(number):
        with cupy.cuda.Stream(non_blocking=True):
            for turn in range(200):
                size = 1000 + 7919 * turn % 500_000
                array = cupy.full(size, number, dtype=cupy.int64)
                array += turn
                expect_equal(int(array.sum()), size * (number + turn), f"thread {number}, {turn}")

    in_threads(work)
    settled(pool)


@check("cupy")
def threads_cupy_free_what_others_allocated():
    import cupy

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()
    queue = [[] for _ in range(8)]

    def work(number):
        for turn in range(300):
            queue[(number + 1) % 8].append(cupy.full(50_000, turn, dtype=cupy.int32))
            if len(queue[number]) > 4:
                queue[number].pop(0)

    in_threads(work)
    queue.clear()
    settled(pool)


@check("cupy", VRAMP_CONF="limit=2GiB")
def oom_cupy():
    import cupy

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()
    kept = cupy.zeros(MIB, dtype=cupy.uint8)
    for _ in range(3):
        try:
            cupy.zeros(8 << 30, dtype=cupy.uint8)
        except cupy.cuda.memory.OutOfMemoryError as error:
            expect(isinstance(error, MemoryError), "it is no MemoryError")
            expect("8,589,934,592" in str(error), f"the text is {error}")
            expect(error.__cause__ is not None, "the report is lost")
        else:
            raise Failed("8 GiB fitted into 2 GiB")
        big = cupy.ones(1 << 30, dtype=cupy.uint8)
        expect_equal(int(big[::4096].sum()), 1 << 18, "the sum after the recovery")
        del big
    cycle = [cupy.zeros(1500 * MIB, dtype=cupy.uint8)]
    cycle.append(cycle)
    del cycle
    cupy.zeros(1500 * MIB, dtype=cupy.uint8)
    del kept
    settled(pool)


@check("cupy")
def cycles_cupy():
    import cupy

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()
    kept = cupy.zeros(1000, dtype=cupy.uint8)
    before = pool.stats()
    alloc = cupy.cuda.alloc
    for turn in range(CYCLES):
        alloc(1 + 257 * turn % (4 * MIB))
    after = pool.stats()
    expect_equal(after.live, before.live, "live bytes")
    expect_equal(after.freed - before.freed, CYCLES, "frees")
    del kept
    settled(pool)
    return {"reserved": after.reserved, "misses": after.misses - before.misses}


@check("cupy")
def time_cupy():
    """Compares with cupy.cuda.MemoryPool."""
    import cupy

    import vramp.cupy

    own = cupy.cuda.MemoryPool().malloc
    vramp.cupy.install()
    the_pool()
    ours = cupy.cuda.get_allocator()
    result = {"null stream": in_turns("cupy", own, ours, (512, 64 << 10, 8 * MIB), 20_000)}
    with cupy.cuda.Stream(non_blocking=True):
        result["a stream"] = in_turns("cupy", own, ours, (512, 64 << 10, 8 * MIB), 20_000)
    return result


# --- Numba ---


def numba_kernels(cuda):
    @cuda.jit
    def scale(x, out, factor):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = x[i] * factor + i

    @cuda.jit
    def spin(out, value, turns):
        i = cuda.grid(1)
        total = 0.0
        for k in range(turns):
            total += k * 1e-9
        if i < out.size:
            out[i] = value + 0.0 * total

    return scale, spin


def numba_work():
    import numpy
    from numba import cuda

    scale, _ = numba_kernels(cuda)
    source = numpy.arange(300_000, dtype=numpy.float64)
    x = cuda.to_device(source)
    for turn in range(20):
        out = cuda.device_array_like(x)
        scale[1200, 256](x, out, 1.0 + turn / 64)
        x = out
    pinned = cuda.pinned_array(300_000, dtype=numpy.float64)
    x.copy_to_host(pinned)
    part = x[100:200].copy_to_host()
    expect((part == pinned[100:200]).all(), "a view differs")
    return pinned.tobytes()


@check("numba.cuda")
def math_numba():
    code = "import runpy, sys; m = runpy.run_path(sys.argv[1]); sys.stdout.buffer.write(m['numba_work']())"
    results = []
    for manager in ("default", "vramp.numba"):
        environment = dict(os.environ, NUMBA_CUDA_MEMORY_MANAGER=manager)
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, __file__],
            env=environment,
            capture_output=True,
            timeout=200,
        )
        expect(ran.returncode == 0, ran.stderr.decode()[-2000:])
        results.append(ran.stdout)
    expect(len(results[0]) == 2_400_000, "the result has the wrong length")
    expect(results[0] == results[1], "the results differ")


@check("numba.cuda", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
def streams_numba():
    """Arrays are dropped while a kernel on some stream still writes them."""
    import numpy
    from numba import cuda

    _, spin = numba_kernels(cuda)
    pool = the_pool()
    streams = [cuda.stream() for _ in range(6)]
    kept, checked = [], 0
    for turn in range(240):
        stream = streams[turn % 6]
        array = cuda.device_array(MIB, dtype=numpy.float32)
        spin[4096, 256, stream](array, numpy.float32(turn), 2000)
        if turn % 3 == 0:
            kept.append((turn, array, stream))
        del array
        if len(kept) > 12:
            wanted, array, stream = kept.pop(0)
            stream.synchronize()
            expect((array.copy_to_host() == wanted).all(), f"array {wanted} was overwritten")
            checked += 1
            del array
    del kept
    gc.collect()
    cuda.current_context().memory_manager.flush()
    settled(pool)
    return {"checked": checked}


@check("numba.cuda", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
def threads_numba():
    import numpy
    from numba import cuda

    scale, _ = numba_kernels(cuda)
    pool = the_pool()
    cuda.current_context()

    def work(number):
        for turn in range(60):
            x = cuda.to_device(numpy.full(20_000, number, dtype=numpy.float64))
            out = cuda.device_array_like(x)
            scale[80, 256](x, out, 2.0)
            found = out.copy_to_host()
            expect((found == 2.0 * number + numpy.arange(20_000)).all(), f"thread {number}, {turn}")

    in_threads(work)
    gc.collect()
    cuda.current_context().memory_manager.flush()
    settled(pool)


@check("numba.cuda", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba", VRAMP_CONF="limit=2GiB")
def oom_numba():
    import numpy
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    pool = the_pool()
    for _ in range(3):
        try:
            cuda.device_array(8 << 30, dtype=numpy.uint8)
        except CudaAPIError as error:
            expect_equal(int(error.code), 2, "the code")
        else:
            raise Failed("8 GiB fitted into 2 GiB")
        array = cuda.device_array(1500 * MIB, dtype=numpy.uint8)
        del array
    free, total = cuda.current_context().get_memory_info()
    expect(0 < free <= total == 2 << 30, f"memory info is {free}, {total}")
    cuda.current_context().memory_manager.flush()
    settled(pool)


@check("numba.cuda", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
def cycles_numba():
    from numba import cuda

    pool = the_pool()
    context = cuda.current_context()
    manager = context.memory_manager
    before = pool.stats()
    for turn in range(CYCLES):
        manager.memalloc(1 + 257 * turn % (4 * MIB))
    manager.flush()
    after = pool.stats()
    expect_equal(after.live, before.live, "live bytes")
    expect_equal(after.freed - before.freed, CYCLES, "frees")
    array = cuda.device_array(10)
    try:
        array.get_ipc_handle()
    except Exception as error:
        expect("IPC" in str(error), f"the text is {error}")
    else:
        raise Failed("an IPC handle of vramp's memory")
    del array
    manager.flush()
    settled(pool)


@check("numba.cuda", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
def time_numba():
    """Compares with Numba's own manager, which calls cuMemAlloc and cuMemFree."""
    from numba import cuda
    from numba.cuda.cudadrv import driver

    the_pool()
    context = cuda.current_context()
    ours = context.memory_manager
    own = driver.NumbaCUDAMemoryManager(context=context)
    own.initialize()
    return in_turns("numba", own.memalloc, ours.memalloc, (512, 64 << 10, 8 * MIB), 300)


# --- RMM ---


@check("rmm")
def math_rmm():
    import rmm

    import vramp.rmm

    def work():
        first = rmm.DeviceBuffer.to_device(bytes(range(256)) * 4096)
        copies = [rmm.DeviceBuffer(ptr=first.ptr, size=first.size) for _ in range(20)]
        copies[3].resize(100_000)
        first = copies[3].copy()
        return copies[-1].tobytes() + first.tobytes()

    wanted = work()
    vramp.rmm.install()
    pool = the_pool()
    expect_equal(work(), wanted, "the bytes")
    expect(pool.stats().allocated >= 20, "the buffers did not come from vramp")
    settled(pool)
    vramp.rmm.uninstall()
    expect_equal(work(), wanted, "after uninstall")


@check("rmm")
def threads_rmm():
    import rmm
    from rmm.pylibrmm.stream import Stream

    import vramp.rmm

    vramp.rmm.install()
    pool = the_pool()
    streams = [Stream() for _ in range(8)]

    def work(number):
        data = bytes([number]) * 100_000
        for _ in range(200):
            buffer = rmm.DeviceBuffer.to_device(data, stream=streams[number])
            copy = rmm.DeviceBuffer(ptr=buffer.ptr, size=buffer.size, stream=streams[number])
            del buffer
            streams[number].synchronize()
            expect_equal(copy.tobytes(), data, f"the bytes of thread {number}")

    in_threads(work)
    settled(pool)
    for stream in streams:
        vramp.rmm.forget_stream(stream)


@check("rmm", VRAMP_CONF="limit=2GiB")
def oom_rmm():
    import rmm

    import vramp.rmm

    vramp.rmm.install()
    pool = the_pool()
    for _ in range(3):
        try:
            rmm.DeviceBuffer(size=8 << 30)
        except MemoryError as error:
            expect("limit" in str(error), f"the text is {error}")
        else:
            raise Failed("8 GiB fitted into 2 GiB")
        rmm.DeviceBuffer(size=1500 * MIB)
    kept = [rmm.DeviceBuffer(size=500 * MIB) for _ in range(4)]

    def spill(nbytes):
        if not kept:
            return False
        kept.pop()
        return True

    rmm.mr.set_current_device_resource(vramp.rmm.spill_on_failure(spill))
    big = rmm.DeviceBuffer(size=1200 * MIB)
    expect_equal(len(kept), 1, "buffers that were not spilled")
    del big
    kept.clear()
    settled(pool)


@check("rmm")
def cycles_rmm():
    import vramp.rmm

    resource = vramp.rmm.install()
    pool = the_pool()
    before = pool.stats()
    for turn in range(CYCLES):
        size = 1 + 257 * turn % (4 * MIB)
        resource.deallocate(resource.allocate(size), size)
    after = pool.stats()
    expect_equal(after.live, before.live, "live bytes")
    expect_equal(after.freed - before.freed, CYCLES, "frees")
    settled(pool)


@check("rmm")
def time_rmm():
    """Compares with rmm.mr.PoolMemoryResource, called from Python as vramp's is."""
    import rmm

    import vramp.rmm

    own = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=256 * MIB)
    ours = vramp.rmm.resource()

    def cycle(resource):
        return lambda size: resource.deallocate(resource.allocate(size), size)

    return in_turns("rmm", cycle(own), cycle(ours), (512, 64 << 10, 8 * MIB), 20_000)


# --- cuda.core ---


@check("cuda.core", "cupy")
def math_cuda_core():
    import cupy
    from cuda.core import Device

    import vramp.cuda_core

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = vramp.cuda_core.MemoryResource()
    device.memory_resource = resource
    pool = the_pool()
    for turn in range(50):
        buffer = device.allocate(8 * 1000, stream=stream)
        expect(buffer.memory_resource is resource, "Device.allocate does not use the resource")
        second = resource.allocate(8 * 1000, stream=stream)
        stream.sync()
        array = cupy.from_dlpack(buffer).view(cupy.float64)
        array[...] = cupy.arange(1000) * turn
        cupy.cuda.Device().synchronize()
        second.copy_from(buffer, stream=stream)
        stream.sync()
        found = cupy.from_dlpack(second).view(cupy.float64)
        expect(bool((found == cupy.arange(1000) * turn).all()), f"turn {turn}")
        del array, found
        cupy.cuda.Device().synchronize()
        buffer.close()
        second.close(stream)
    resource.forget_stream(stream)
    settled(pool)


@check("cuda.core")
def streams_cuda_core():
    from cuda.core import Device

    import vramp.cuda_core

    device = Device(0)
    device.set_current()
    resource = vramp.cuda_core.MemoryResource()
    pool = the_pool()

    def work(number):
        device.set_current()
        for _ in range(20):
            stream = device.create_stream()
            host = resource.allocate(MIB, stream=stream)
            host.fill(number, stream=stream)
            other = resource.allocate(MIB, stream=stream)
            other.copy_from(host, stream=stream)
            host.close()
            other.close()
            resource.forget_stream(stream)
            stream.close()

    in_threads(work)
    buffer = resource.allocate(100, stream=device.default_stream)
    buffer.close()
    settled(pool)


@check("cuda.core", VRAMP_CONF="limit=2GiB")
def oom_cuda_core():
    from cuda.core import Device

    import vramp.cuda_core

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = vramp.cuda_core.MemoryResource()
    pool = the_pool()
    for _ in range(3):
        try:
            resource.allocate(8 << 30, stream=stream)
        except MemoryError as error:
            expect("limit" in str(error), f"the text is {error}")
        else:
            raise Failed("8 GiB fitted into 2 GiB")
        resource.allocate(1500 * MIB, stream=stream).close()
    settled(pool)


@check("cuda.core")
def cycles_cuda_core():
    from cuda.core import Device

    import vramp.cuda_core

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = vramp.cuda_core.MemoryResource()
    pool = the_pool()
    before = pool.stats()
    for turn in range(CYCLES):
        buffer = resource.allocate(1 + 257 * turn % (4 * MIB), stream=stream)
        if turn % 2:
            buffer.close()
    del buffer
    after = pool.stats()
    expect_equal(after.live, before.live, "live bytes")
    expect_equal(after.freed - before.freed, CYCLES, "frees")
    settled(pool)


@check("cuda.core")
def time_cuda_core():
    """Compares with the device's default memory resource, the driver's pool."""
    from cuda.core import Device

    import vramp.cuda_core

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    own, ours = device.memory_resource, vramp.cuda_core.MemoryResource()

    def cycle(resource):
        return lambda size: resource.allocate(size, stream=stream).close()

    return in_turns("cuda.core", cycle(own), cycle(ours), (512, 64 << 10, 8 * MIB), 5_000)


# --- together ---


@check("cupy", "numba.cuda", "torch", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
def together_in_one_pool():
    """PyTorch, CuPy and Numba allocate from one pool and reuse each other's memory."""
    import torch

    import vramp.torch

    vramp.torch.enable()
    import cupy
    import numpy
    from numba import cuda

    import vramp.cupy

    vramp.cupy.install()
    pool = the_pool()
    scale, _ = numba_kernels(cuda)
    start = pool.stats().live
    size = 16 * MIB

    tensor = torch.arange(size // 8, dtype=torch.float64, device="cuda")
    with_torch = pool.stats().live
    expect(with_torch >= start + size, "PyTorch does not allocate from the pool")
    array = cupy.asarray(tensor) * 2
    with_cupy = pool.stats().live
    expect(with_cupy >= with_torch + size, "CuPy does not allocate from the pool")
    cupy.cuda.Device().synchronize()
    out = cuda.device_array(size // 8, dtype=numpy.float64)
    with_numba = pool.stats().live
    expect(with_numba >= with_cupy + size, "Numba does not allocate from the pool")
    scale[size // 8 // 256, 256](cuda.as_cuda_array(array), out, 3.0)
    cuda.synchronize()
    back = torch.as_tensor(cupy.asarray(out), device="cuda")
    wanted = torch.arange(size // 8, dtype=torch.float64, device="cuda") * 7
    expect(bool(torch.equal(back, wanted)), "the numbers differ")
    del back, wanted, tensor, array, out
    gc.collect()
    torch.cuda.synchronize()
    cuda.current_context().memory_manager.flush()
    reserved = pool.stats().reserved
    # What one library freed serves the next: no more physical memory is needed.
    for _ in range(20):
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        del tensor
        torch.cuda.synchronize()
        array = cupy.zeros(size, dtype=cupy.uint8)
        del array
        cupy.cuda.Device().synchronize()
        out = cuda.device_array(size, dtype=numpy.uint8)
        del out
        cuda.current_context().memory_manager.flush()
    stats = pool.stats()
    expect(stats.reserved <= reserved, f"reserved grew from {reserved} to {stats.reserved}")
    pool.audit()
    return {"reserved": stats.reserved, "live": stats.live, "route": vramp.torch.route()}


@check("cupy", "numba.cuda", NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
def exit_in_several_orders():
    """Ends processes that still hold arrays, in module variables, cycles, threads and at exit."""
    common = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import cupy, vramp, vramp.cupy\nvramp.cupy.install()\nfrom numba import cuda\n"
    )
    programs = {
        "live arrays": "a = cupy.zeros(1000); b = cuda.device_array(1000)",
        "numba first": "b = cuda.device_array(1000); a = cupy.zeros(1000)",
        "a cycle": "x = [cupy.zeros(10), cuda.device_array(10)]; x.append(x)",
        "a stream": "s = cupy.cuda.Stream(); s.use(); a = cupy.zeros(10); b = cupy.arange(5)",
        "atexit": "import atexit; a = cupy.zeros(10); atexit.register(lambda: cupy.zeros(20))",
        "a thread": "import threading, time\n"
        "def work():\n  while True: cupy.zeros(100); vramp.pool(0).stats()\n"
        "threading.Thread(target=work, daemon=True).start(); time.sleep(0.5)",
        "in sys": "import sys; sys.kept = [cupy.zeros(10), cuda.device_array(10)]",
        "uninstalled": "a = cupy.zeros(10); vramp.cupy.uninstall()",
        "pool closed": "p = vramp.open('cuda:0')\nwith vramp.cupy.using(p): a = cupy.zeros(10)\ndel a; p.close()",
        "pool dropped": "p = vramp.open('cuda:0')\nwith vramp.cupy.using(p): a = cupy.zeros(10)\ndel p",
        "sys.exit": "import sys; a = cupy.zeros(10); sys.exit(0)",
    }
    bad = {}
    for name, program in programs.items():
        ran = subprocess.run(
            [sys.executable, "-c", common + program], capture_output=True, text=True, timeout=120
        )
        if ran.returncode != 0 or ran.stderr.strip():
            bad[name] = (ran.returncode, ran.stderr[-600:])
    expect(not bad, f"{bad}")
    return {"programs": len(programs)}


@check("rmm", "cuda.core")
def exit_rmm_and_cuda_core():
    common = "import rmm, vramp.rmm, vramp.cuda_core\nfrom cuda.core import Device\n"
    programs = {
        "rmm": "vramp.rmm.install(); b = rmm.DeviceBuffer(size=1000)",
        "rmm, resource dropped": "b = (vramp.rmm.install(), rmm.DeviceBuffer(size=10))[1]; vramp.rmm.uninstall()",
        "cuda.core": "d = Device(0); d.set_current(); s = d.create_stream()\n"
        "r = vramp.cuda_core.MemoryResource(); b = r.allocate(100, stream=s)",
        "cuda.core, a cycle": "d = Device(0); d.set_current(); s = d.create_stream()\n"
        "r = vramp.cuda_core.MemoryResource(); b = [r.allocate(100, stream=s), s, r]; b.append(b); del s, r",
    }
    bad = {}
    for name, program in programs.items():
        ran = subprocess.run(
            [sys.executable, "-c", common + program], capture_output=True, text=True, timeout=120
        )
        if ran.returncode != 0 or ran.stderr.strip():
            bad[name] = (ran.returncode, ran.stderr[-600:])
    expect(not bad, f"{bad}")


@check()
def doctors():
    """Prints what the adaptors say about this machine. Fails only if one raises."""
    result = {}
    for name in ("cupy", "numba", "rmm", "cuda_core"):
        checks = importlib.import_module(f"vramp.{name}").doctor()
        result[name] = [list(line) for line in checks]
    return result


# --- running ---


def missing(libraries):
    """Returns the libraries that cannot be found."""

    def found(name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in libraries if not found(name)]


def run_here(name):
    """Runs one check in this process and prints its result as JSON."""
    try:
        result = {"result": CHECKS[name][0]() or {}}
    except Failed as error:
        result = {"failed": str(error)}
    print("RESULT " + json.dumps(result), flush=True)
    return 0 if "result" in result else 1


def run_apart(name, timeout, device):
    """Runs one check in a process of its own. Returns a word and the line of JSON."""
    function, libraries, environment = CHECKS[name]
    absent = missing(libraries)
    if absent:
        return "MISSING", {"check": name, "missing": absent}
    settings = dict(os.environ, **environment)
    settings.setdefault("CUDA_VISIBLE_DEVICES", str(device))
    begin = time.monotonic()
    command = [sys.executable, os.path.abspath(__file__), "--here", name]
    line = {"check": name}
    try:
        ran = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "FAIL", {**line, "failed": f"no result after {timeout} s"}
    line["seconds"] = round(time.monotonic() - begin, 1)
    results = [text for text in ran.stdout.splitlines() if text.startswith("RESULT ")]
    if results:
        line.update(json.loads(results[-1][len("RESULT ") :]))
    if ran.returncode != 0 or not results:
        line["status"] = ran.returncode
        line["stderr"] = ran.stderr[-3000:]
        return "FAIL", line
    return "PASS", line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return run_here(options.here)
    chosen = [
        name for name in CHECKS if not options.names or any(part in name for part in options.names)
    ]
    if options.list:
        print("\n".join(chosen))
        return 0
    counts = {"PASS": 0, "FAIL": 0, "MISSING": 0}
    for name in chosen:
        word, line = run_apart(name, options.timeout, options.device)
        counts[word] += 1
        print(json.dumps(line))
        print(word, name, flush=True)
    print(json.dumps({"summary": counts}))
    if counts["FAIL"]:
        return 1
    return 0 if counts["PASS"] else 2


if __name__ == "__main__":
    sys.exit(main())
