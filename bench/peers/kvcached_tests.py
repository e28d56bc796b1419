"""Runs kvcached's own tests on vramp, those for a GPU among them, but what needs vLLM, SGLang or kernels.

    git clone https://github.com/ovg-project/kvcached
    pip install torch numpy posix_ipc pyyaml aiohttp fastapi httpx pytest pytest-asyncio      # and vramp
    python bench/peers/kvcached_tests.py kvcached

kvcached is not installed: its Python is imported from the checkout, and `kvcached.vmm_ops` is vramp's. Without a card
it is simulated, and torch.cuda says that there is one. Tests of the manifest `cpu` bring operations of their own for what
they test, so they run apart from the others.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import types

ON_CARD = (
    "test_kvcache_manager.py",
    "test_page_allocator_snapshot.py",
    "test_alloc_kv_cache_alignment.py",
    "test_hetero_contiguous_layout.py",
    "test_hybrid_contiguous_layout.py",
)
ALONE = ("test_prealloc_gil_deadlock.py",)
"""Starts programs of its own."""


def stand_in() -> None:
    """Lets this process find vramp's operations, and torch a card."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("VRAMP_DEVICE", "sim:h200")
    import vramp.compat.kvcached

    vramp.compat.kvcached.install()
    if not torch.cuda.is_available():
        memory = vramp.pool(0).device_info.memory
        fakes = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=memory),
        }
        for name, fake in fakes.items():
            setattr(torch.cuda, name, fake)


def main() -> None:
    """Runs all groups. The exit status is 1 if a test failed."""
    checkout = pathlib.Path(sys.argv[1]).resolve()
    manifest = (checkout / "tests/manifests/cpu.txt").read_text().splitlines()
    cpu = [line.partition("#")[0].strip() for line in manifest]
    groups = [[test for test in cpu if test], *([f"tests/{name}" for name in names] for names in (ON_CARD, ALONE))]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        # Imported by each Python of the run, those that tests start included.
        pathlib.Path(folder, "sitecustomize.py").write_text("import kvcached_tests\nkvcached_tests.stand_in()\n")
        here = str(pathlib.Path(__file__).resolve().parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, here, str(checkout)))}
        for group in groups:
            command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *group]
            failed |= subprocess.run(command, cwd=checkout, env=environment).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
