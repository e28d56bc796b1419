"""Weights of vLLM engines that outlive them: the load format `vramp`, for vLLM 0.24 to 0.33.

    vllm serve MODEL --load-format vramp --model-loader-extra-config '{"base": "auto"}'

1. The first engine loads with the loader of the format `base`, "auto" by default, which gets the other keys of the extra
   configuration. When vLLM has put the weights into the form of its kernels, parameters and buffers are moved into kept
   memory, one name for each rank.
2. Engines that come meanwhile wait. Those that come later make the model without memory, on PyTorch's meta device, and map
   what is kept for reading only.
3. The entry is chosen by what decides the weights: the model, its revision and configuration, the type, quantization,
   parallel sizes, and the versions of vLLM and PyTorch. `name` in the extra configuration replaces the model's part of the
   entry's name, and `directory` is the keeper's.

A model is loaded as usual, and not kept, if a module has tensors that are neither parameters nor buffers (as multi-head
latent attention computes for itself): a line in vLLM's log names them. So is one whose weights change while it serves (LoRA
does not change them; `reload_weights` does).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import vramp
import vramp.keep

__all__ = ["loader_class"]

_log = logging.getLogger("vllm.vramp")

LOADING = 3600.0
"""Seconds that another engine may take to load the weights."""


def loader_class() -> type:
    """Returns the loader, a subclass of vLLM's, which is imported by then."""
    import torch
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    class Loader(base_loader.BaseModelLoader):  # type: ignore[misc, name-defined, unused-ignore]
        """Maps kept weights, or loads and keeps them."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            extra = dict(load_config.model_loader_extra_config or {})
            self.directory = extra.pop("directory", None)
            self.name = extra.pop("name", None)
            self.base_format = extra.pop("base", "auto")
            base = dataclasses.replace(
                load_config, load_format=self.base_format, model_loader_extra_config=extra
            )
            self.base = get_model_loader(base)

        def download_model(self, model_config: Any) -> None:
            self.base.download_model(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            self.base.load_weights(model, model_config)

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            keeper = vramp.keep.connect(self.directory)
            pool = vramp.pool(torch.cuda.current_device() if torch.cuda.is_available() else 0)
            digest = _digest(vllm_config, model_config, prefix, self.base_format)
            name = _name(self.name or model_config.model, vllm_config, prefix, digest)
            found = _found(keeper, name, pool)
            if found is None:
                # A draft that is never committed: one process at a time loads.
                with keeper.draft(f"{name}/loading", 1, pool=pool, timeout=LOADING):
                    found = _found(keeper, name, pool)
                    if found is None:
                        model = self.base.load_model(vllm_config, model_config, prefix)
                        _publish(keeper, name, model, pool, digest)
                        return model
            model = _without_memory(vllm_config, model_config, prefix)
            found.fill(model)
            for module in model.modules():
                for key, tensor in list(_plain_tensors(module)):
                    if tensor.is_meta:
                        # Empty ones, which vLLM replaces; the publisher had no others.
                        setattr(module, key, torch.empty_like(tensor, device=pool_device(pool)))
            _log.info("vramp mapped the weights of %s", name)
            return model.eval()

    return Loader


def pool_device(pool: vramp.Pool) -> str:
    """Returns where PyTorch finds memory of a pool."""
    return "cpu" if pool.is_simulated else "cuda"


def _found(keeper: vramp.keep.Keeper, name: str, pool: vramp.Pool) -> vramp.keep.KeptTensors | None:
    try:
        return keeper.tensors(name, pool=pool)
    except (vramp.NotKeptError, vramp.TornError):
        return None


def _publish(
    keeper: vramp.keep.Keeper, name: str, model: Any, pool: vramp.Pool, digest: bytes
) -> None:
    """Keeps the weights; a model whose weights cannot be kept serves as it is."""
    loose = [
        f"{prefix}.{key}"
        for prefix, module in model.named_modules()
        for key, tensor in _plain_tensors(module)
        if tensor.numel()
    ]
    if loose:
        _log.warning(
            "vramp does not keep %s: it has tensors that are neither parameters nor buffers: %s", name, ", ".join(loose[:5])
        )
        return
    kept = keeper.publish(name, model, digest=digest, pool=pool)
    _log.info("vramp keeps the weights of %s: %d MiB", name, kept.kept.size >> 20)


def _plain_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    import torch

    for holder in (module, getattr(module, "impl", None)):
        for key, value in getattr(holder, "__dict__", {}).items():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    yield key, tensor


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
    return model


def _digest(vllm_config: Any, model_config: Any, prefix: str, base: str) -> bytes:
    """Returns what stands for the contents of the weights in memory."""
    import torch
    import vllm

    parallel = vllm_config.parallel_config
    says = {
        "model": model_config.model,
        "revision": model_config.revision,
        "config": model_config.hf_config.to_json_string(use_diff=False),
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization),
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank],
        "experts": bool(getattr(parallel, "enable_expert_parallel", False)),
        "prefix": prefix,
        "base": base,
        "seed": model_config.seed if base == "dummy" else None,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(says, sort_keys=True).encode()).digest()


def _name(model: str, vllm_config: Any, prefix: str, digest: bytes) -> str:
    """Returns the entry's name: readable, and different for different weights."""
    short = "".join(each if each.isalnum() or each in "._-" else "-" for each in model.split("/")[-1])[:80]
    rank = vllm_config.parallel_config.rank
    return f"vllm/{short}/{digest.hex()[:16]}/rank{rank}"
