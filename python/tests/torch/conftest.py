"""Runs PyTorch's memory functions on PyTorch's own allocator or on vramp, on the fake CUDA runtime or a card.

    VRAMP_TEST_ALLOCATOR  `vramp` (default) or `native`; native shows that a test asks what PyTorch does
    VRAMP_TEST_DEVICE     `fake` (default) or `cuda`

The fake runtime has to be loaded before torch, so pytest starts itself again with LD_PRELOAD. That happens
only when all arguments are in this folder: other tests must not run on the fake runtime.
"""

import gc
import os
import pathlib
import runpy
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ALLOCATOR = os.environ.get("VRAMP_TEST_ALLOCATOR", "vramp")
DEVICE = os.environ.get("VRAMP_TEST_DEVICE", "fake")
# An H200's.
CARD_BYTES = 150_754_820_096
STARTED = "VRAMP_TEST_FAKE_STARTED"

for name, value, known in (
    ("VRAMP_TEST_ALLOCATOR", ALLOCATOR, ("vramp", "native")),
    ("VRAMP_TEST_DEVICE", DEVICE, ("fake", "cuda")),
):
    if value not in known:
        raise pytest.UsageError(f"{name}={value}: use one of {', '.join(known)}")

NEEDS_START = DEVICE == "fake" and STARTED not in os.environ


def pytest_configure(config):
    """Starts pytest again on the fake runtime, once."""
    if not NEEDS_START:
        # The reason of every skipped test is printed.
        config.option.reportchars += "s"
        return
    paths = [pathlib.Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not paths or not all(path.is_relative_to(HERE) for path in paths):
        return
    build = runpy.run_path(str(HERE / "fake_cuda" / "build.py"))
    environment = dict(os.environ)
    environment["LD_PRELOAD"] = ":".join(map(str, build["build"]()))
    environment["FAKE_CUDA_MEMORY"] = str(CARD_BYTES)
    environment["FAKE_CUDA_DEVICES"] = "1"
    environment[STARTED] = "1"
    # vramp opens the fake libcuda as it would a card's.
    environment.pop("VRAMP_DEVICE", None)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture:
        capture.stop_global_capturing()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "pytest"] + sys.argv[1:], environment)


def pytest_ignore_collect():
    """True while the fake runtime is needed and not loaded."""
    return True if NEEDS_START else None


def pytest_terminal_summary(terminalreporter):
    """Says so if this folder was left out."""
    if NEEDS_START:
        terminalreporter.write_line(f"left out: {HERE}, which needs a run of its own: pytest {HERE}")


def pytest_report_header():
    """Names allocator and device."""
    return [f"vramp: allocator {ALLOCATOR}, device {DEVICE}"]


if not NEEDS_START:
    # Tests beside this folder choose the simulator.
    os.environ.pop("VRAMP_DEVICE", None)
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("torch sees no CUDA device")
    if ALLOCATOR == "vramp":
        import vramp.torch

        vramp.torch.enable()
    torch.cuda.init()


@pytest.fixture(autouse=True)
def leaves_nothing():
    """Every test begins and ends with no tensor, no history and no limit of an earlier test."""
    import support

    support.tidy()
    before = support.allocated()
    fraction = torch.cuda.get_per_process_memory_fraction(0)
    yield
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._set_memory_metadata("")
    torch.cuda.set_per_process_memory_fraction(fraction, 0)
    gc.collect()
    support.tidy()
    assert support.allocated() == before, "the test left allocated memory behind"
