"""Weights of vLLM engines that outlive them: the load format `vramp`, for vLLM 0.24 to 0.33.

    vllm serve MODEL --load-format vramp --model-loader-extra-config '{"base": "auto"}'

1. The first engine loads with the loader of the format `base`, "auto" by default, which gets the other keys of the extra
   configuration. When vLLM has put the weights into the form of its kernels, parameters are moved into kept memory, one
   name for each rank and card.
2. Engines that come meanwhile wait. Those that come later make the model without memory, on PyTorch's meta device, and map
   the parameters for reading only. Buffers, and tensors in attributes of modules, are copied: engines write those.
3. The entry is chosen by what decides the weights: the files of a local model, or the commit of one from a hub; the
   configuration, type, quantization and parallel sizes; the card; the versions of vLLM and PyTorch. `name` in the extra
   configuration replaces the model's part of the entry's name, and `directory` is the keeper's.
4. What cannot be mapped is loaded as usual, and a line in vLLM's log says why: another structure of the model than the
   publisher's, a step of quantization that reads weights, offloading, expert balancing, no keeper. So is a model of which
   nothing says which contents it has, unless it has a `name`.

Kept weights do not sleep, and cannot be reloaded in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import logging
import os
import re
import types
from collections.abc import Iterator
from typing import Any

import vramp
import vramp.keep

from .._errors import OptionError, UnsupportedError

__all__ = ["loader_class"]

_log = logging.getLogger("vllm.vramp")

LOADING = 3600.0
"""Seconds that another engine may take to load the weights."""

TOGETHER = ("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded")
"""Formats that all ranks load together: none may map while another loads."""

KERNELS = re.compile("USE|MOE|GEMM|MARLIN|FLASHINFER|BACKEND|FP8|FP4|INVARIANT|SCALE")
"""Environment variables of vLLM that choose the form of weights."""


def loader_class() -> type:
    """Returns the loader, a subclass of vLLM's, which is imported by then."""
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    class Loader(base_loader.BaseModelLoader):  # type: ignore[misc, name-defined, unused-ignore]
        """Maps kept weights, or loads and keeps them."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            extra = dict(load_config.model_loader_extra_config or {})
            self.directory = extra.pop("directory", None)
            self.name = extra.pop("name", None)
            self.base_format = extra.pop("base", "auto")
            self.extra = extra
            if self.base_format == "vramp":
                raise OptionError('"base" is the format that loads the weights first: "auto", or another of vLLM\'s')
            self.base = get_model_loader(
                dataclasses.replace(
                    load_config, load_format=self.base_format, model_loader_extra_config=extra
                )
            )

        def download_model(self, model_config: Any) -> None:
            self.base.download_model(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            self.base.load_weights(model, model_config)

        def get_all_weights(self, model_config: Any, model: Any) -> Any:
            """What vLLM's `reload_weights` reads. Raises before it has changed the model."""
            if getattr(model, "load_weights", None) is _refuse:
                _refuse()
            return self.base.get_all_weights(model_config, model)

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            as_usual = functools.partial(self.base.load_model, vllm_config, model_config, prefix)
            try:
                reason = _reason(vllm_config, self.base_format)
                contents = _contents(model_config, self.base_format)
                if contents is None and self.name is None:
                    reason = f'nothing says which contents it has: give it a "name" in {_EXTRA}'
                if reason is not None:
                    _log.warning("vramp does not keep the weights of %s: %s", model_config.model, reason)
                    return as_usual()
                keeper = vramp.keep.connect(self.directory)
                pool = _pool()
                says = _says(vllm_config, model_config, prefix, self.base_format, self.extra, pool)
                name = _name(self.name or model_config.model, vllm_config, [says, contents])
                found = _found(keeper, name, pool)
                loading = contextlib.ExitStack()
                if found is None:
                    # A draft that is never committed: one process at a time loads.
                    loading.enter_context(keeper.draft(f"{name}/loading", 1, pool=pool, timeout=LOADING))
                    found = _found(keeper, name, pool)
            except Exception as error:
                _log.warning("vramp does not keep the weights of %s: %s", model_config.model, _told(error))
                return as_usual()
            with loading:
                if found is None:
                    model = as_usual()
                    _publish(keeper, name, model, model_config, pool)
                    return model
            try:
                with _undone_after_error(vllm_config):
                    model = _mapped(found, vllm_config, model_config, prefix)
                _log.info("vramp mapped the weights of %s: %d MiB", name, found.kept.size >> 20)
                return model
            except Exception as error:
                _log.warning("vramp does not map %s, and vLLM loads the weights: %s", name, _told(error))
            del found
            return as_usual()

    return Loader


_EXTRA = "--model-loader-extra-config"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "these weights are kept memory for reading only: they did not sleep, and cannot be loaded again. "
        "For weights that change, use another load format"
    )


def _pool() -> vramp.Pool:
    import torch

    return vramp.pool(torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _found(keeper: vramp.keep.Keeper, name: str, pool: vramp.Pool) -> vramp.keep.KeptTensors | None:
    try:
        return keeper.tensors(name, pool=pool)
    except (vramp.NotKeptError, vramp.TornError):
        return None


def _publish(
    keeper: vramp.keep.Keeper, name: str, model: Any, model_config: Any, pool: vramp.Pool
) -> None:
    """Keeps the weights; a model whose weights cannot be kept serves as it is."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    try:
        weights = {id(tensor): tensor for _, _, _, tensor in vramp.keep._places(model)}
        storages = {vramp.keep._storage(tensor) for tensor in weights.values()}
        for tensor in weights.values():
            if tensor.device.type != _device(pool) or is_traceable_wrapper_subclass(tensor):
                raise UnsupportedError(f"it has a {type(tensor).__name__} of {tensor.device}")
        loose = _Loose(model)
        _check_sleep(loose, model_config)
        for path, _, _, tensor in loose.found:
            if vramp.keep._storage(tensor) in storages:
                raise UnsupportedError(f"{path} is a view of a weight")
        carrier = loose.with_model(lambda tensor: tensor.detach().clone())
        kept = keeper.publish(name, carrier, digest=_structure(model, loose), pool=pool)
        _finish(model)
        _log.info("vramp keeps the weights of %s: %d MiB", name, kept.kept.size >> 20)
    except Exception as error:
        # Weights that were moved already stay where they are: in memory of this process.
        _log.warning("vramp does not keep the weights of %s: %s", name, _told(error))


def _mapped(
    found: vramp.keep.KeptTensors, vllm_config: Any, model_config: Any, prefix: str
) -> Any:
    """Returns the model with kept weights. Raises if it is not exactly that of the publisher."""
    import torch

    model = _without_memory(vllm_config, model_config, prefix)
    before = {id(tensor): (owner, key, tensor) for _, owner, key, tensor in vramp.keep._places(model)}
    loose = _Loose(model)
    _check_sleep(loose, model_config)
    if found.kept.digest != _structure(model, loose):
        raise UnsupportedError("the model has another structure without memory than with weights")
    carrier = loose.with_model(lambda tensor: torch.empty_like(tensor, device="meta"))
    found.fill(carrier)
    values = [tensor.clone() for tensor in carrier.loose.buffers()]
    for (path, holder, key, old), value in zip(loose.found, values, strict=True):
        if not old.is_meta:
            old.copy_(value)
        else:
            _put(path, holder, key, value)
    for path, holder, key, old in loose.references:
        if old.is_meta:
            owner, name, _ = before[id(old)]
            _put(path, holder, key, getattr(owner, name))
    for path, holder, key, old in loose.empty:
        if old.is_meta:
            _put(path, holder, key, torch.empty_like(old, device=_device(found.kept.pool)))
    _finish(model)
    return model


def _check_sleep(loose: _Loose, model_config: Any) -> None:
    """Level 2 of sleep mode gives up what a load makes again, and kept weights are not loaded again."""
    lost = [path for path, _, _, tensor in loose.found if tensor.device.type != "cpu"]
    if lost and getattr(model_config, "enable_sleep_mode", False):
        raise UnsupportedError(f"sleep mode would lose what no parameter and no buffer has: {lost[0]}")


def _device(pool: vramp.Pool) -> str:
    """Returns where PyTorch finds memory of a pool."""
    return "cpu" if pool.is_simulated else "cuda"


def _put(path: str, holder: Any, key: Any, tensor: Any) -> None:
    if holder is None:
        raise UnsupportedError(f"{path} cannot be replaced")
    holder[key] = tensor


def _finish(model: Any) -> None:
    """Gives the process buffers of its own, which engines write, and refuses to load into the parameters."""
    copied = set()
    for _, owner, key, tensor in vramp.keep._places(model):
        if key in owner._buffers and id(tensor) not in copied:
            copied.add(id(tensor))
            tensor.data = tensor.detach().clone()
    model.load_weights = _refuse


class _Loose:
    """Tensors of a model that are neither parameters nor buffers, by where they are: path, holder, key, tensor."""

    SKIPPED = (
        "torch.", "transformers.", "logging", "threading", "vramp.", "vllm.config", "vllm.distributed",
        "vllm.compilation", "vllm.platforms", "vllm.logger",
    )  # fmt: skip
    """Modules of classes whose objects are not a part of a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.found: list[tuple[str, Any, Any, Any]] = []
        self.references: list[tuple[str, Any, Any, Any]] = []
        self.empty: list[tuple[str, Any, Any, Any]] = []
        self._weights = {id(tensor) for _, _, _, tensor in vramp.keep._places(model)}
        self._seen = {id(module) for module in model.modules()}
        for prefix, module in model.named_modules():
            own = ("_parameters", "_buffers", "_modules")
            for key, value in list(vars(module).items()):
                if key not in own:
                    self._look(f"{prefix}.{key}", vars(module), key, value)
        for name, _, _, tensor in vramp.keep._places(model):
            self._inside(name, tensor.__dict__)

    def with_model(self, made: Any) -> Any:
        """Returns a module of the model and of tensors made from the loose ones."""
        import torch

        carrier = torch.nn.Module()
        carrier.model = self.model
        carrier.loose = torch.nn.Module()
        for index, (_, _, _, tensor) in enumerate(self.found):
            carrier.loose.register_buffer(str(index), made(tensor))
        return carrier

    def _look(self, path: str, holder: Any, key: Any, value: Any) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            if id(value) in self._weights:
                self.references.append((path, holder, key, value))
            elif value.numel():
                self.found.append((path, holder, key, value))
            else:
                self.empty.append((path, holder, key, value))
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            self._inside(path, value)
        elif isinstance(value, functools.partial):
            self._inside(path, (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._inside(path, (value.__self__,))
        elif isinstance(value, types.FunctionType):
            cells = [cell for cell in value.__closure__ or () if _is_set(cell)]
            self._inside(path, tuple(cell.cell_contents for cell in cells))
        elif not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
            of = type(value).__module__
            if isinstance(value, torch.nn.Module) or not f"{of}.".startswith(self.SKIPPED):
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._inside(path, vars(value))

    def _inside(self, path: str, values: Any) -> None:
        if id(values) in self._seen:
            return
        if isinstance(values, (dict, list)):
            self._seen.add(id(values))
        items = list(values.items() if isinstance(values, dict) else enumerate(values))
        for key, value in items:
            self._look(f"{path}.{key}", values if isinstance(values, (dict, list)) else None, key, value)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _structure(model: Any, loose: _Loose) -> bytes:
    """Returns what two models have in common whose weights have the same places and meaning."""
    says: list[Any] = []
    for prefix, module in model.named_modules():
        for part in (module, getattr(module, "quant_method", None), getattr(module, "impl", None)):
            if part is not None and hasattr(part, "__dict__"):
                plain = {key: _plain(value) for key, value in vars(part).items()}
                says.append([prefix, type(part).__qualname__, [each for each in plain.items() if each[1] is not None]])
    for name, _, _, tensor in vramp.keep._places(model):
        says.append([name, type(tensor).__qualname__, str(tensor.dtype), [*tensor.shape]])
    for path, _, _, tensor in loose.found:
        says.append([path, str(tensor.dtype), [*tensor.shape]])
    return hashlib.sha256(json.dumps(says).encode()).digest()


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, (bool, int, float, str, enum.Enum, torch.dtype)):
        return str(value)
    return None


def _without_memory(vllm_config: Any, model_config: Any, prefix: str) -> Any:
    """Makes the model as after a load, without memory."""
    import torch
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    meta = torch.device("meta")
    with set_default_torch_dtype(model_config.dtype):
        with meta:
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        process_weights_after_loading(model, model_config, meta)
    return model.eval()


@contextlib.contextmanager
def _undone_after_error(vllm_config: Any) -> Iterator[None]:
    """Takes layers of a model that failed out of vLLM's tables, in which it could not be made a second time."""
    try:
        from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT as rotary
    except ImportError:
        rotary = {}
    compilation = vllm_config.compilation_config
    tables = [rotary, compilation.static_forward_context]
    before = [dict(table) for table in tables]
    experts = getattr(compilation, "static_all_moe_layers", [])
    count = len(experts)
    try:
        yield
    except BaseException:
        for table, old in zip(tables, before, strict=True):
            for key in [key for key in table if key not in old]:
                del table[key]
        del experts[count:]
        raise


def _reason(vllm_config: Any, base: str) -> str | None:
    """Returns why these weights are not kept; None if they may be."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_eplb", False):
        return "expert balancing moves them"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "a trainer writes them"
    offload = getattr(vllm_config, "offload_config", None)
    places = [vllm_config.cache_config, getattr(offload, "uva", None), getattr(offload, "prefetch", None)]
    if any(getattr(each, key, 0) for each in places for key in ("cpu_offload_gb", "offload_group_size")):
        return "some are offloaded to the host"
    if base in TOGETHER and parallel.world_size > 1:
        return f"ranks load `{base}` together"
    return None


def _contents(model_config: Any, base: str) -> Any:
    """Returns what stands for the contents of the model's files; None if that is not known."""
    if base == "dummy":
        return "dummy"
    path = getattr(model_config, "model_weights", None) or model_config.model
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            files = [(each.name, each.stat()) for each in entries if each.is_file()]
        return sorted([name, stat.st_size, stat.st_mtime_ns] for name, stat in files)
    if os.path.isfile(path):
        return [os.stat(path).st_size, os.stat(path).st_mtime_ns]
    return getattr(model_config.hf_config, "_commit_hash", None) if path == model_config.model else None


def _says(
    vllm_config: Any, model_config: Any, prefix: str, base: str, extra: Any, pool: vramp.Pool
) -> dict[str, Any]:
    """Returns what else decides the weights in memory."""
    import torch
    import vllm

    parallel = vllm_config.parallel_config
    experts = bool(getattr(parallel, "enable_expert_parallel", False))
    info = pool.device_info
    return {
        "model": model_config.model,
        "revision": model_config.revision,
        "config": model_config.hf_config.to_json_string(use_diff=False),
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization),
        "form": [str(getattr(model_config, key, None)) for key in ("model_impl", "convert_type", "runner_type")],
        "length": getattr(model_config, "max_model_len", None),
        "cache": str(getattr(vllm_config.cache_config, "cache_dtype", None)),
        "lora": getattr(vllm_config, "lora_config", None) is not None,
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank],
        "experts": [getattr(parallel, f"data_parallel_{key}", None) for key in ("size", "rank")] if experts else None,
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith("VLLM_") and KERNELS.search(key)
        },
        "card": info.uuid or info.id,
        "prefix": prefix,
        "base": [base, extra],
        "seed": model_config.seed if base == "dummy" else None,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }


def _name(model: str, vllm_config: Any, says: Any) -> str:
    """Returns the entry's name: readable, and different for different weights."""
    digest = hashlib.sha256(json.dumps(says, sort_keys=True, default=str).encode()).hexdigest()
    short = re.sub(r"[^A-Za-z0-9._-]", "-", model.rstrip("/").split("/")[-1])[:80] or "model"
    return f"vllm/{short}/{digest[:32]}/rank{vllm_config.parallel_config.rank}"
