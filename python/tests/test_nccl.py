"""NCCL around the sleep of regions, with a small library in its place."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import MIB
from nccl_library import Fake

import vramp
import vramp.nccl

@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        gc.collect()
        opened.audit()


def block(pool: vramp.Pool, tag: str = "weights", size: int = 8 * MIB) -> vramp.Allocation:
    with vramp.region(tag, device=pool):
        return pool.malloc(size)


def test_a_registration_ends_before_a_pause_and_is_made_again(fake: Fake, pool: vramp.Pool) -> None:
    [comm], weights = fake.make(), block(pool)
    numpy.asarray(weights)[:] = 7
    for make, calls in [
        (vramp.nccl.register, ("register", "deregister")),
        (vramp.nccl.register_window, ("window1", "no-window")),
    ]:
        with make(comm, weights, library=fake.library) as registered:
            assert fake.taken(comm) == calls[0] and registered.handle
            assert (registered.ptr, registered.size) == (weights.ptr, weights.size)
            for _ in range(3):
                vramp.pause(device=pool)
                assert registered.handle is None and pool.stats().reserved == 0
                assert fake.taken(comm) == calls[1]
                vramp.resume(device=pool)
                assert registered.handle and fake.taken(comm) == calls[0]
                assert pool.sharing.pinned > 0
        assert fake.taken(comm) == calls[1] and registered.handle is None
        registered.close()
        assert fake.taken(comm) == "" and pool.sharing.pinned == 0
    assert (numpy.asarray(weights) == 7).all()


def test_communicators_are_suspended_behind_the_registrations(fake: Fake, pool: vramp.Pool) -> None:
    [comm], weights = fake.make(), block(pool)
    # In either order of the calls.
    suspension = vramp.nccl.suspend_in_sleep(comm, tags="weights", device=pool, library=fake.path)
    assert suspension.is_active and suspension.reason is None and suspension.nbytes == MIB
    window = vramp.nccl.register_window(comm, weights, flags=0, library=fake.path)
    other = block(pool, "other")
    fake.taken(comm)
    vramp.pause("other", device=pool)
    assert fake.taken(comm) == ""
    vramp.pause(device=pool)
    assert fake.taken(comm) == "no-window suspend"
    with pytest.raises(vramp.InUseError, match="is suspended"):
        vramp.nccl.register(comm, other, library=fake.path)
    vramp.resume("weights", device=pool)
    assert fake.taken(comm) == "resume window0"
    vramp.resume(device=pool)
    suspension.close()
    suspension.close()
    assert not suspension.is_active
    vramp.pause(device=pool)
    vramp.resume(device=pool)
    assert fake.taken(comm) == "no-window window0"
    window.close()
    fake.taken(comm)
    # Closed while the memory sleeps it has nothing to end, and a suspension resumes.
    window = vramp.nccl.register_window(comm, weights, library=fake.path)
    suspension = vramp.nccl.suspend_in_sleep(comm, tags="weights", device=pool, library=fake.path)
    vramp.pause(device=pool)
    window.close()
    suspension.close()
    assert fake.taken(comm) == "window1 no-window suspend resume"
    vramp.resume(device=pool)
    assert fake.taken(comm) == ""


def test_what_the_engine_suspended_itself_stays_its_own(fake: Fake, pool: vramp.Pool) -> None:
    comms = [fake.make()[0] for _ in range(2)]
    weights = block(pool)
    fake.library.ncclCommSuspend(ctypes.c_void_p(comms[0]), 1)
    with vramp.nccl.suspend_in_sleep(*comms, comms[1], device=pool, library=fake.library):
        vramp.pause(device=pool)
        vramp.resume(device=pool)
    assert [fake.taken(comm) for comm in comms] == ["suspend", "suspend resume"]
    weights.free()


def test_failures_name_the_call_and_leave_what_was(fake: Fake, pool: vramp.Pool) -> None:
    comms = [fake.make()[0] for _ in range(2)]
    weights = block(pool)
    window = vramp.nccl.register_window(comms[0], weights, library=fake.library)
    vramp.nccl.suspend_in_sleep(*comms, device=pool, library=fake.library)
    fake.fail(comms[1], 1)
    with pytest.raises(vramp.CallbackError, match=r"ncclCommSuspend of NCCL 2\.29\.7 failed: invalid usage") as raised:
        vramp.pause(device=pool)
    assert isinstance(raised.value.__cause__, vramp.nccl.NcclError)
    assert raised.value.callback == "NCCL communicators"
    assert [fake.taken(comm) for comm in comms] == ["window1 no-window suspend resume window1", "suspend"]
    vramp.pause(device=pool)
    fake.fail(comms[0], 1)
    with pytest.raises(vramp.CallbackError, match="ncclCommResume") as raised:
        vramp.resume(device=pool)
    # The communicator is suspended, so neither is the window there. The memory is.
    assert "ncclCommWindowRegister" in str(raised.value) and window.handle is None
    assert pool.sharing.pinned == 0 and vramp.status(pool)[0].phase == "awake"
    vramp.resume(device=pool)
    assert window.handle
    [comm] = fake.make()
    fake.fail(comm, 1)
    with pytest.raises(vramp.nccl.NcclError, match="ncclCommRegister"):
        vramp.nccl.register(comm, weights, library=fake.library)
    window.close()
    assert pool.sharing.pinned == 0


def test_calls_that_do_not_block_are_waited_for(fake: Fake, pool: vramp.Pool) -> None:
    [comm], weights = fake.make(), block(pool)
    fake.library.fake_delay(ctypes.c_void_p(comm), 3)
    with vramp.nccl.register_window(comm, weights, library=fake.library) as window:
        assert window.handle
        for call in (vramp.pause, vramp.resume):
            fake.library.fake_delay(ctypes.c_void_p(comm), 3)
            call(device=pool)
        assert window.handle


def test_all_ranks_pause_together(fake: Fake) -> None:
    comms, done = fake.make(4), []

    def rank(comm: int) -> None:
        with vramp.open("sim:h200", limit="64MiB") as pool:
            weights = block(pool)
            with vramp.nccl.register_window(comm, weights, library=fake.library):
                with vramp.nccl.suspend_in_sleep(comm, device=pool, library=fake.library):
                    for _ in range(20):
                        vramp.pause(device=pool)
                        assert pool.stats().reserved == 0
                        vramp.resume(device=pool)
            done.append(fake.taken(comm))

    threads = [threading.Thread(target=rank, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert done == ["window1" + " no-window suspend resume window1" * 20 + " no-window"] * 4


def test_pressure_leaves_the_regions_of_communicators_awake(fake: Fake) -> None:
    with vramp.open("sim:h200", limit="128MiB") as pool:
        [comm], weights, other = fake.make(), block(pool, size=40 * MIB), block(pool, "other", 40 * MIB)
        window = vramp.nccl.register_window(comm, weights, library=fake.library)
        vramp.on_pressure(["weights", "other"], device=pool)
        more = pool.malloc(60 * MIB)
        assert fake.taken(comm) == "window1"
        assert [found.phase for found in vramp.status(pool)] == ["asleep", "awake"]
        window.close()
        more.free()
        vramp.resume(device=pool)
        assert not weights.is_freed and not other.is_freed


def test_memory_outside_of_regions_is_pinned_and_wrong_memory_refused(fake: Fake, pool: vramp.Pool) -> None:
    [comm], outside = fake.make(), pool.malloc(8 * MIB)
    with vramp.nccl.register(comm, outside, library=fake.library) as registered:
        assert registered.handle and pool.sharing.pinned > 0
        vramp.pause(device=pool)
        vramp.resume(device=pool)
        assert fake.taken(comm) == "register"
    for wrong, error in [
        (numpy.zeros(4), TypeError),
        (Interface(4096), vramp.UnknownPointerError),
    ]:
        with pytest.raises(error):
            vramp.nccl.register(comm, wrong, library=fake.library)
    with pytest.raises(TypeError, match="a communicator is"):
        vramp.nccl.register("comm", outside, library=fake.library)
    with pytest.raises(TypeError, match="pass the communicators"):
        vramp.nccl.suspend_in_sleep(library=fake.library)
    with pytest.raises(vramp.RangeError):
        vramp.nccl.register_window(comm, outside, flags=-1, library=fake.library)
    assert fake.taken(comm) == "deregister" and pool.sharing.pinned == 0


class Interface:
    """An array of the device that is no memory of vramp."""

    def __init__(self, address: int) -> None:
        self.nbytes = 16
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (16,), "typestr": "|u1", "version": 3}


class Pynccl:
    """As vLLM's communicator."""

    class Library:
        def __init__(self, library: ctypes.CDLL) -> None:
            self.lib = library

    def __init__(self, fake: Fake, comm: int) -> None:
        self.nccl, self.comm = Pynccl.Library(fake.library), ctypes.c_void_p(comm)


def test_an_old_library_does_nothing_and_says_so(
    tmp_path: Path, pool: vramp.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    old = Fake(tmp_path, "-DOLD")
    [comm], weights = old.make(), block(pool)
    with caplog.at_level(logging.WARNING, "vramp.nccl"):
        suspension = vramp.nccl.suspend_in_sleep(Pynccl(old, comm), device=pool)
    assert not suspension.is_active and suspension.nbytes == 0
    assert suspension.reason is not None and "NCCL 2.27.3 cannot suspend" in suspension.reason
    assert suspension.reason in caplog.text
    with vramp.nccl.register_window(Pynccl(old, comm), weights):
        vramp.pause(device=pool)
        vramp.resume(device=pool)
    suspension.close()
    assert old.taken(comm) == "window1 no-window window1 no-window"


class Group:
    """As a process group of torch.distributed that makes its communicator at the first collective."""

    def __init__(self) -> None:
        self.number = 0

    def _get_backend(self, _device: object) -> Any:
        return self

    def _comm_ptr(self) -> int:
        return self.number


def test_a_process_group_is_suspended_once_it_has_a_communicator(
    fake: Fake, pool: vramp.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Torch:
        device = staticmethod(lambda name: name)

        class cuda:
            is_initialized = staticmethod(lambda: False)

    monkeypatch.setitem(sys.modules, "torch", Torch)
    [comm], weights, group = fake.make(), block(pool), Group()
    with pytest.raises(vramp.OptionError, match="run a collective first"):
        vramp.nccl.register(group, weights, library=fake.library)
    with vramp.nccl.suspend_in_sleep(group, device=pool, library=fake.library) as suspension:
        vramp.pause(device=pool)
        vramp.resume(device=pool)
        assert suspension.nbytes == 0
        group.number = comm
        vramp.pause(device=pool)
        vramp.resume(device=pool)
        assert suspension.nbytes == MIB
    assert fake.taken(comm) == "suspend resume"


def test_the_loaded_library_is_found_and_of_two_one_has_to_be_named(tmp_path: Path) -> None:
    program = """
import ctypes, sys, vramp, vramp.nccl
pool = vramp.open("sim:h200")
with vramp.region("weights", device=pool):
    weights = pool.malloc(1 << 20)
try:
    vramp.nccl.register(1, weights)
except vramp.UnsupportedError as error:
    assert "no NCCL" in str(error), error
fake, comms = ctypes.CDLL(sys.argv[1]), (ctypes.c_void_p * 1)()
fake.fake_make(1, comms)
with vramp.nccl.register(comms[0], weights) as registered:
    vramp.pause(device=pool)
    vramp.resume(device=pool)
    assert registered.handle
ctypes.CDLL(sys.argv[2])
try:
    vramp.nccl.register(comms[0], weights)
except vramp.OptionError as error:
    assert sys.argv[2] in str(error) and "library=" in str(error), error
else:
    raise SystemExit("two libraries")
"""
    fakes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fakes.append(Fake(tmp_path / name))
    subprocess.run([sys.executable, "-c", program, *(str(each.path) for each in fakes)], check=True)
