"""PyTorch tensors in kept memory where loaders fail, grow, wait for each other, or find torn memory. On the simulated card."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

import vramp
import vramp.keep

SECONDS = 60


@pytest.fixture
def keeper(tmp_path):
    found = vramp.keep.connect(tmp_path / "keep")
    yield found
    gc.collect()
    if found.pid is not None:
        found.stop()


@pytest.fixture
def pool():
    return vramp.open("sim:h200")


def meta(features=1024):
    with torch.device("meta"):
        return torch.nn.Linear(features, features)


def build(module, value, dtype=torch.float32):
    module.to_empty(device="cpu").to(dtype)
    for tensor in module.parameters():
        tensor.data.fill_(value)


def sums(module):
    return [float(tensor.detach().double().mean()) for tensor in module.parameters()]


def drafts(keeper):
    return [entry.name for entry in keeper.entries() if entry.draft_pid is not None]


def test_a_loader_that_fails_leaves_the_name_to_others(keeper, pool):
    def fails():
        raise OSError("no checkpoint")

    try:
        keeper.load("model", meta(), fails, pool=pool)
    except OSError:
        # The exception has frames that refer to the draft.
        assert drafts(keeper) == []
    else:
        pytest.fail("it was built")
    first = meta()
    keeper.load("model", first, lambda: build(first, 3), pool=pool, timeout=1)
    assert sums(first) == [3, 3]


def test_a_publication_that_fails_half_way_leaves_the_name_and_the_weights(keeper, pool, monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    build(module, 5)
    copy, copied = vramp.keep._Draft._copy, []

    def fails(self, tensor):
        if len(copied) == 2:
            raise vramp.OutOfMemoryError("none left")
        copied.append(tensor)
        return copy(self, tensor)

    monkeypatch.setattr(vramp.keep._Draft, "_copy", fails)
    with pytest.raises(vramp.OutOfMemoryError):
        keeper.publish("model", module, pool=pool)
    assert keeper.entries() == [] and sums(module) == [5, 5, 5, 5]


def test_weights_that_are_larger_than_the_module_was_are_kept(keeper, pool):
    module, other = meta(), meta().double()
    keeper.load("model", module, lambda: build(module, 3, torch.float64), pool=pool)
    keeper.load("model", other, pytest.fail, pool=pool)
    assert sums(module) == sums(other) == [3, 3] and other.weight.dtype == torch.float64


def test_torn_weights_are_loaded_again(keeper, pool):
    module, other = meta(), meta()
    build(module, 3)
    keeper.publish("model", module, digest="a", pool=pool)
    del module
    gc.collect()
    keeper.open("model", readonly=False, lock="write", pool=pool).close()
    with pytest.raises(vramp.TornError):
        keeper.tensors("model", pool=pool)
    keeper.load("model", other, lambda: build(other, 4), digest="a", pool=pool)
    assert sums(other) == [4, 4]
    again = meta()
    keeper.load("model", again, pytest.fail, digest="a", pool=pool)
    assert sums(again) == [4, 4]


def test_loaders_that_wait_need_no_room_of_their_own(tmp_path, pool):
    command = ["keep", "--directory", str(tmp_path / "keep"), "--limit", "12MiB"]
    served = subprocess.Popen([sys.executable, "-m", "vramp", *command], stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None and "keeps memory" in served.stdout.readline()
    keeper = vramp.keep.connect(tmp_path / "keep", start=False)
    modules = [meta(1448) for _ in range(4)]
    built, failed = [], []

    def load(module):
        def building():
            while keeper.entries()[0].waiting < len(modules) - 1:
                pass
            built.append(module)
            build(module, 6)

        try:
            keeper.load("model", module, building, digest="a", pool=pool, timeout=SECONDS)
        except vramp.VrampError as error:
            failed.append(error)

    threads = [threading.Thread(target=load, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert failed == [] and len(built) == 1
    assert all(sums(module) == [6, 6] for module in modules)
    keeper.stop()
    served.communicate(timeout=SECONDS)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([torch.ones(2)], "dictionary"),
        ({1: torch.ones(2)}, "strings"),
        ({"a": 3}, "strings"),
        ({"a": torch.eye(3).to_sparse()}, "dense"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_moved(keeper, pool, tensors, why):
    with pytest.raises(vramp.OptionError, match=why):
        keeper.publish("model", tensors, pool=pool)
    assert keeper.entries() == []


def test_an_exception_while_writing_keeps_the_lock_until_all_is_written(keeper, pool):
    policy = keeper.publish("policy", {"a": torch.zeros(4)}, readonly=False, pool=pool)
    with pytest.raises(OSError), policy.writing() as tensors:
        tensors["a"][:2] = 1
        raise OSError
    with pytest.raises(vramp.KeepTimeoutError):
        keeper.tensors("policy", pool=pool, timeout=0)
    with policy.writing() as tensors:
        tensors["a"].fill_(2)
    assert keeper.tensors("policy", pool=pool).tensors()["a"].tolist() == [2, 2, 2, 2]


def test_writable_tensors_are_read_before_the_first_write(keeper, pool):
    policy = keeper.publish("policy", {"a": torch.ones(4)}, readonly=False, pool=pool)
    assert keeper.tensors("policy", pool=pool, timeout=0).tensors()["a"].tolist() == [1, 1, 1, 1]
    policy.close()
    assert [entry.state for entry in keeper.entries()] == ["whole"]
