"""Functions of Python that free memory before a request fails."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from conftest import GIB, MIB, run_python

import vramp


@pytest.fixture
def small() -> Iterator[vramp.Pool]:
    """A pool of 1 GiB."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        if not opened.is_closed:
            opened.audit()


def test_a_handler_frees_memory_and_the_request_succeeds(small: vramp.Pool) -> None:
    cache = [small.malloc(256 * MIB) for _ in range(4)]
    requests: list[int] = []

    def drop(requested: int) -> bool:
        requests.append(requested)
        if not cache:
            return False
        cache.pop().free()
        return True

    with small.on_shortage(drop) as registration:
        assert not registration.is_closed
        block = small.malloc(512 * MIB)
        assert requests == [512 * MIB] * 2 and len(cache) == 2
        with pytest.raises(vramp.OutOfMemoryError):
            small.malloc(2 * GIB)
        assert cache == [] and requests[-1] == 2 * GIB
    assert registration.is_closed
    calls = len(requests)
    with pytest.raises(vramp.OutOfMemoryError):
        small.malloc(2 * GIB)
    assert len(requests) == calls
    block.free()


def test_a_request_inside_a_handler_calls_no_handler(small: vramp.Pool) -> None:
    calls: list[int] = []

    def allocate(requested: int) -> bool:
        calls.append(requested)
        small.malloc(MIB).free()
        with pytest.raises(vramp.OutOfMemoryError):
            small.malloc(3 * GIB)
        return False

    with small.on_shortage(allocate), pytest.raises(vramp.OutOfMemoryError):
        small.malloc(2 * GIB)
    assert set(calls) == {2 * GIB}


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt(), Stop(), None])
def test_a_failure_of_a_handler_is_reported_and_frees_nothing(
    small: vramp.Pool, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    held = [small.malloc(GIB)]
    reported: list[tuple[type[BaseException], object]] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda report: reported.append((report.exc_type, report.object))
    )

    def fail(requested: int) -> bool:
        if error is not None:
            raise error
        return None  # type: ignore[return-value]

    def free(requested: int) -> bool:
        if not held:
            return False
        held.pop().free()
        return True

    with small.on_shortage(fail):
        with pytest.raises(vramp.OutOfMemoryError):
            small.malloc(GIB)
        # All handlers run.
        with small.on_shortage(free):
            small.malloc(GIB).free()
    kind = TypeError if error is None else type(error)
    # One call for the first request, and one for the second before it succeeded.
    assert reported == [(kind, fail)] * 2


def test_eight_threads_share_a_cache_through_handlers(small: vramp.Pool) -> None:
    lock = threading.Lock()
    cache: list[vramp.Allocation] = []
    dropped: list[int] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def drop(requested: int) -> bool:
        # Threads that hold the lock allocate hits only, and those need no handler.
        with lock:
            taken, cache[:] = cache[:], []
        dropped.append(len(taken))
        for block in taken:
            block.free()
        small.malloc(4096).free()
        return bool(taken)

    def work(seed: int) -> None:
        try:
            barrier.wait()
            for step in range(300):
                try:
                    block = small.malloc((seed * 7 + step * 13) % 60 * MIB + MIB)
                except vramp.OutOfMemoryError:
                    continue  # other threads held all of it, and the cache was empty
                with lock:
                    cache.append(block)
                for _ in range(20):
                    small.malloc(4096).free()
                if step % 50 == 0:
                    small.trim()
                    small.stats()
        except BaseException as error:
            failures.append(error)

    with small.on_shortage(drop):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
    assert failures == []
    # 8 * 300 blocks of 30 MiB on average in 1 GiB.
    assert sum(dropped) > 1000
    cache.clear()
    gc.collect()
    assert small.stats().live == 0


def test_a_handler_may_wait_for_a_thread_that_allocates(small: vramp.Pool) -> None:
    held = [small.malloc(GIB)]

    def ask(requested: int) -> bool:
        def free() -> None:
            if held:
                held.pop().free()
                small.malloc(3 * MIB).free()
                freed.append(True)

        freed: list[bool] = []
        thread = threading.Thread(target=free)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
        return bool(freed)

    with small.on_shortage(ask):
        small.malloc(GIB).free()


@pytest.mark.parametrize("holds_interpreter", [False, True])
def test_a_request_of_c_code_calls_the_handler(
    small: vramp.Pool, holds_interpreter: bool
) -> None:
    kind = ctypes.PyDLL if holds_interpreter else ctypes.CDLL
    library = kind(vramp.library_path())
    handle, address = ctypes.c_uint64(small.handle), ctypes.c_void_p()
    stream = ctypes.c_uint64()
    assert library.vramp_stream_create(handle, ctypes.byref(stream)) == 0
    held = [small.malloc(GIB)]
    threads: list[int] = []

    def free(requested: int) -> bool:
        threads.append(threading.get_ident())
        if not held:
            return False
        held.pop().free()
        return True

    def request() -> None:
        size = ctypes.c_uint64(GIB)
        status.append(library.vramp_malloc(handle, size, stream, ctypes.byref(address)))

    with small.on_shortage(free):
        status: list[int] = []
        thread = threading.Thread(target=request)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the thread hangs"
    assert status == [0] and threads == [thread.ident]
    assert address.value is not None
    small.deallocate(address.value)


def test_a_registration_ends_once_and_drops_its_handler(small: vramp.Pool) -> None:
    class Handler:
        def __call__(self, requested: int) -> bool:
            return False

    for end in ("close", "pool"):
        handler = Handler()
        gone = weakref.ref(handler)
        registration = small.on_shortage(handler)
        del handler
        gc.collect()
        assert gone() is not None
        if end == "pool":
            small.close()
        registration.close()
        registration.close()
        assert registration.is_closed and gone() is None
        assert repr(registration) == "<vramp.Registration, closed>"
    with pytest.raises(vramp.ClosedError):
        small.on_shortage(Handler())


def test_the_close_of_a_pool_drops_handlers_whose_registration_is_gone() -> None:
    class Handler:
        def __call__(self, requested: int) -> bool:
            return False

    handler = Handler()
    gone = weakref.ref(handler)
    pool = vramp.open("sim")
    pool.on_shortage(handler)
    del handler
    gc.collect()
    assert gone() is not None
    del pool
    gc.collect()
    vramp.library_path()
    with vramp.open("sim"):
        assert gone() is None


def test_a_handler_may_end_its_own_registration(small: vramp.Pool) -> None:
    calls: list[int] = []

    def once(requested: int) -> bool:
        calls.append(requested)
        registration.close()
        return True

    registration = small.on_shortage(once)
    with pytest.raises(vramp.OutOfMemoryError):
        small.malloc(2 * GIB)
    assert calls == [2 * GIB] and registration.is_closed


def test_a_close_waits_for_a_call_on_another_thread(small: vramp.Pool) -> None:
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def wait(requested: int) -> bool:
        inside.set()
        assert go_on.wait(60)
        order.append("handler")
        return False

    def request() -> None:
        with pytest.raises(vramp.OutOfMemoryError):
            small.malloc(2 * GIB)

    registration = small.on_shortage(wait)
    thread = threading.Thread(target=request)
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.05, go_on.set).start()
    registration.close()
    order.append("closed")
    thread.join(60)
    assert order == ["handler", "closed"]


def test_what_is_no_function_is_refused(small: vramp.Pool) -> None:
    with pytest.raises(TypeError, match="function of the requested bytes"):
        small.on_shortage(5)  # type: ignore[arg-type]


def test_a_hundred_thousand_registrations_are_independent(small: vramp.Pool) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    calls = [0]

    def count(requested: int) -> bool:
        calls[0] += 1
        return False

    def round_of(number: int) -> None:
        registrations = [small.on_shortage(count) for _ in range(number)]
        calls[0] = 0
        with pytest.raises(vramp.OutOfMemoryError):
            small.malloc(2 * GIB)
        assert calls[0] == number
        # In the order of registration, and in the opposite one.
        for registration in registrations[: number // 2] + registrations[: number // 2 - 1 : -1]:
            registration.close()

    round_of(100_000)
    gc.collect()
    before, objects = resident(), len(gc.get_objects())
    round_of(100_000)
    gc.collect()
    assert resident() - before < 8 * MIB
    assert len(gc.get_objects()) <= objects + 50


FORKED = """
import os, sys, vramp
pool = vramp.open("sim", limit="1GiB")
calls = []
registration = pool.on_shortage(lambda requested: calls.append(requested) is not None)
child = os.fork()
if child == 0:
    for call in (lambda: pool.malloc(2 << 30), lambda: pool.on_shortage(print)):
        try:
            call()
        except vramp.ForkedError:
            continue
        os._exit(3)
    os._exit(len(calls))
assert os.waitpid(child, 0)[1] == 0
try:
    pool.malloc(2 << 30)
except vramp.OutOfMemoryError:
    print(len(calls))
registration.close()
"""


def test_no_handler_is_called_in_a_forked_child() -> None:
    done = run_python(FORKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
