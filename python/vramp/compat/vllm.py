"""Sleep mode of vLLM 0.24 to 0.33.

    vllm serve MODEL --enable-sleep-mode --sleep-mode-backend vramp

1. vLLM calls `register`, the entry point `vramp` of the group `vllm.general_plugins`, in each of its processes. It
   registers the backend by name, where vLLM has such names (from 0.26 on). It never raises: vLLM would not start.
2. If vramp is PyTorch's allocator by then, `register` replaces vLLM's `get_mem_allocator_instance`: vLLM's pools are
   then regions, for its own backend `cumem` too. So run vLLM with `python -m vramp run`. Otherwise nothing changes.
3. `suspend` copies weights, `runtime` and `cudagraph` to pinned host memory; other tags lose their contents. `resume`
   brings tags back at their addresses. What sleeps or is awake already is left as it is.
4. A sleep and a wake-up collect garbage and release idle memory, as vLLM's own do.
5. `suspend(2)` gives the contents of weights up, and `discard` those of its tags and the copies that they have.
6. `suspend_communicators` lets memory of NCCL leave with the weights. Callbacks of `vramp.around_sleep` are called too.

Deliberately absent: durable copies, and two engines of one process: their tags are the same regions.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import vramp

from .._errors import UnsupportedError
from .._native import opened, opened_devices

__all__ = ["Allocator", "Backend", "allocator", "register", "suspend_communicators"]

_log = logging.getLogger("vllm.vramp")
"""Below vLLM's own logger, which has a handler."""

BACKED_UP = ("default", "weights", "runtime", "cudagraph")
"""Tags whose contents are copied. Those of others, such as `kv_cache`, are lost in a sleep."""
DEFERRABLE = ("weights", "kv_cache")
"""Tags that a wake-up of chosen tags leaves asleep. Every other tag wakes with any."""


class Allocator:
    """vLLM's protocol of a memory allocator that sleeps, by regions."""

    def __init__(self) -> None:
        # In the order of their first use.
        self._tags: dict[str, None] = {}
        self._graph_pool: Any = None

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Within it, this thread allocates in the region of the tag."""
        name = "default" if tag is None else tag
        # vLLM pauses weights and caches while graphs exist, and runs no collective on them.
        pins = name == "cudagraph"
        with vramp.region(name, backup="host" if name in BACKED_UP else "none", graph_pins=pins):
            self._tags.setdefault(name)
            yield

    @contextmanager
    def cudagraph_pool(self) -> Iterator[Any]:
        """Within it, captures into the pool whose id it returns allocate in the region `cudagraph`."""
        if self._graph_pool is None:
            import torch

            self._graph_pool = torch.cuda.MemPool()
        with self.use_memory_pool("cudagraph"):
            yield self._graph_pool.id

    def sleep(self, offload_tags: Iterable[str] | str | None = None) -> None:
        """Pauses all tags, and gives up the contents of all but these and `default`.

        Raises UnsupportedError, and pauses none, if a tag to keep has no backup.
        """
        wanted = _listed(("default",) if offload_tags is None else offload_tags)
        lost = [tag for tag in self._existing() if tag in wanted and tag not in BACKED_UP]
        if lost:
            raise UnsupportedError(
                f"contents of {', '.join(lost)} would be lost: only {', '.join(BACKED_UP)} have a backup"
            )
        kept = [tag for tag in self._existing() if tag in wanted or tag == "default"]
        awake = {each.tag for each in vramp.status() if each.phase == "awake"}
        if kept:
            vramp.pause(kept)
        try:
            # Last: what is given up cannot be taken back. What sleeps already keeps its copy.
            self.discard([tag for tag in self._existing() if tag in awake and tag not in kept])
        except BaseException:
            if again := [tag for tag in kept if tag in awake]:
                vramp.resume(again)
            raise
        _release_idle()

    def discard(self, tags: Iterable[str] | str) -> None:
        """Pauses tags, gives their contents up, and frees copies of them."""
        wanted = _listed(tags)
        names = [tag for tag in self._existing() if tag in wanted]
        if names:
            vramp.pause(names, discard=True)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Resumes tags, and all that are not deferrable; without an argument, all tags."""
        _release_idle()
        wanted = None if tags is None else _listed(tags)
        names = [tag for tag in self._existing() if wanted is None or tag in wanted or tag not in DEFERRABLE]
        if names:
            vramp.resume(names)

    def get_current_usage(self) -> int:
        """Returns the bytes of all tags, on the card or asleep."""
        return sum(each.on_card + each.asleep for each in vramp.status() if each.tag in self._tags)

    def _existing(self) -> list[str]:
        """Returns the tags in which memory was allocated."""
        there = {status.tag for status in vramp.status()}
        return [tag for tag in list(self._tags) if tag in there]


def _release_idle() -> None:
    """Returns to the card what only garbage holds, and what is free in pools."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    for device in opened_devices():
        if (shared := opened(device)) is not None:
            shared.trim()


def _listed(tags: Iterable[str] | str) -> tuple[str, ...]:
    return (tags,) if isinstance(tags, str) else tuple(tags)


allocator = Allocator()
"""The allocator of the process."""


class Backend:
    """vLLM's interface of a sleep-mode backend."""

    def __init__(self) -> None:
        self._state = "RUNNING"

    def suspend(self, level: int = 1) -> None:
        """Pauses all tags. Level 2 gives up the contents of weights too. After an error the state is as before."""
        if level not in (1, 2):
            raise UnsupportedError(f"sleep level {level}: use 1 or 2")
        kept = ("runtime", "cudagraph")
        allocator.sleep(("weights", *kept) if level == 1 else kept)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Resumes tags. After an error the state is SUSPENDED, and a later call goes on."""
        self._state = "RESUMING"
        try:
            allocator.wake_up(tags)
        except BaseException:
            self._state = "SUSPENDED"
            raise
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Pauses tags and gives their contents up."""
        allocator.discard(tags)
        self._state = "SUSPENDED"

    def state(self) -> str:
        """Returns RUNNING, SUSPENDED or RESUMING."""
        return self._state

    @classmethod
    def is_supported(cls) -> bool:
        """Returns True if vramp is PyTorch's allocator: vLLM's pools are regions only then."""
        import vramp.torch

        return vramp.torch.is_enabled()

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Returns True: communicators are outside of regions."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Returns False, as vLLM's own backend does."""
        return False

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Returns False, as vLLM's own backend does."""
        return False

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """Returns False."""
        return False


_suspension: Any = None
"""What `suspend_communicators` began."""


def suspend_communicators(worker: Any = None) -> str | None:
    """Suspends the communicators of vLLM's groups while weights sleep, so that what NCCL has on the card is free too.
    Returns None, or why it does nothing: NCCL before 2.29.7, or no group of several processes.

    Call it in each worker: `llm.collective_rpc(vramp.compat.vllm.suspend_communicators)`. All workers sleep and wake up
    together, as vLLM has them do. Not with vLLM's own `--enable-nccl-comm-suspend`.
    """
    global _suspension
    from vllm.distributed import parallel_state

    import vramp.nccl

    groups = [group for known in list(parallel_state._groups.values()) if (group := known()) is not None]
    found = [getattr(getattr(group, "device_communicator", None), "pynccl_comm", None) for group in groups]
    comms = [comm for comm in found if getattr(comm, "comm", None) is not None]
    if not comms:
        return "this process has no communicator of several processes"
    if _suspension is None or not _suspension.is_active:
        _suspension = vramp.nccl.suspend_in_sleep(*comms, tags="weights")
    reason: str | None = _suspension.reason
    return reason


def register() -> None:
    """Registers the backend and the load format with vLLM, and takes its pools if vramp is PyTorch's allocator.

    Never raises: what cannot be done is a line in vLLM's log. Calling it again changes nothing.
    """
    try:
        import vllm.device_allocator as device_allocator

        _register_backend()
        import vramp.torch

        if vramp.torch.is_enabled():
            _take_pools(device_allocator)
    except Exception as error:
        _log.warning("vramp does not serve the sleep mode of this vLLM: %s: %s", type(error).__name__, error)
    try:
        _register_loader()
    except Exception as error:
        _log.warning("vramp does not load weights for this vLLM: %s: %s", type(error).__name__, error)


def _register_loader() -> None:
    try:
        from vllm.model_executor import model_loader
    except ModuleNotFoundError:
        return
    if "vramp" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from .vllm_loader import loader_class

        model_loader.register_model_loader("vramp")(loader_class())


def _register_backend() -> None:
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ModuleNotFoundError:
        # Before 0.26 the worker asks the allocator itself.
        return
    try:
        SleepModeBackendFactory.register_backend("vramp", __name__, "Backend")
    except ValueError:
        # It was registered before.
        pass


def _take_pools(device_allocator: Any) -> None:
    original = device_allocator.get_mem_allocator_instance
    # Modules that were imported before have the function under the same name.
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and vars(module).get("get_mem_allocator_instance") is original:
            setattr(module, "get_mem_allocator_instance", _instance)


def _instance() -> Allocator:
    """Returns the allocator, in place of vLLM's own."""
    return allocator
