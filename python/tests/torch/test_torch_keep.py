"""PyTorch tensors in kept memory, and the load format of vLLM with modules that have the names of vLLM 0.26."""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch
from support import address, run_script

import vramp
import vramp.keep

SECONDS = 60


@pytest.fixture
def keeper(tmp_path):
    """A keeper of the test; what it keeps is freed with it."""
    found = vramp.keep.connect(tmp_path / "keep")
    yield found
    gc.collect()
    if found.pid is not None:
        found.stop()


class Net(torch.nn.Module):
    """Tied weights, buffers of one storage, and a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.empty(8, 4), requires_grad=False)
        self.head = self.embed
        self.norm = torch.nn.Parameter(torch.empty(4, dtype=torch.bfloat16))
        both = torch.empty(6, dtype=torch.int32)
        self.register_buffer("left", both[:3], persistent=False)
        self.register_buffer("right", both[2:])


def filled(device="cuda"):
    """A module whose values are known."""
    net = Net().to("cpu")
    net.embed.data.copy_(torch.arange(32.0).view(8, 4))
    net.norm.data.copy_(torch.arange(4.0))
    net.left.copy_(torch.tensor([1, 2, 3], dtype=torch.int32))
    net.right.copy_(torch.tensor([3, 4, 5, 6], dtype=torch.int32))
    if device != "cpu":
        both = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32).to(device)
        net.embed.data, net.norm.data = net.embed.data.to(device), net.norm.data.to(device)
        net._buffers.update(left=both[:3], right=both[2:])
    return net


def values(net):
    return [each.detach().cpu().float().flatten().tolist() for each in (net.embed, net.head, net.norm, net.left, net.right)]


EXPECTED = values(filled("cpu"))

ANOTHER = """
import json, sys
sys.path.insert(0, {here!r})
import test_torch_keep as test, vramp.keep
keeper = vramp.keep.connect({directory!r}, start=False)
{body}
"""


def another(keeper, body):
    """The last line of another process, which has ended."""
    here = os.path.dirname(__file__)
    return json.loads(run_script(ANOTHER.format(here=here, directory=keeper.directory, body=body)).stdout.splitlines()[-1])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_published_module_is_the_same_memory_elsewhere(keeper, device):
    net = filled(device)
    embed = net.embed
    with_state = keeper.publish("net", net)
    assert values(net) == EXPECTED and net.embed.is_cuda and net.head is net.embed
    assert (net.embed is embed) == (device == "cuda") and not net.embed.requires_grad and net.norm.requires_grad
    kept = with_state.kept
    for tensor in (net.embed, net.norm, net.left, net.right):
        assert kept.ptr <= tensor.data_ptr() < kept.ptr + kept.size
    assert net.right.data_ptr() == net.left.data_ptr() + 8
    body = """
with test.torch.device("meta"):
    net = test.Net()
found = keeper.tensors("net")
found.fill(net)
named = found.tensors()
once = named["head"].data_ptr() == named["embed"].data_ptr()
print(json.dumps([test.values(net), net.head is net.embed, once, net.right.data_ptr() - net.left.data_ptr()]))
"""
    assert another(keeper, body) == [EXPECTED, True, True, 8]


def test_a_killed_loader_is_replaced_and_later_ones_map(keeper):
    body = """
net = test.filled()
def build():
    print("builds", flush=True)
    sys.stdin.read()
keeper.load("net", net, build)
"""
    start = "import vramp.torch\nvramp.torch.enable()\n" if "vramp.torch" in sys.modules else ""
    text = start + ANOTHER.format(here=os.path.dirname(__file__), directory=keeper.directory, body=body)
    first = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "builds\n"
    with pytest.raises(vramp.KeepTimeoutError, match=str(first.pid)):
        keeper.load("net", filled(), lambda: None, timeout=0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=SECONDS)
    built = []
    net = filled()
    keeper.load("net", net, lambda: built.append(1), digest="a")
    assert built == [1] and values(net) == EXPECTED
    # Another process maps what is there, and one with another digest loads.
    body = """
with test.torch.device("meta"):
    net = test.Net()
keeper.load("net", net, lambda: 1 / 0, digest="a")
print(json.dumps(test.values(net)))
"""
    assert another(keeper, body) == EXPECTED
    keeper.load("net", filled(), lambda: built.append(2), digest="b")
    assert built == [1, 2]


def test_a_module_that_does_not_fit_is_left_as_it_was(keeper):
    keeper.publish("net", filled())
    other = filled()
    other.norm = torch.nn.Parameter(torch.empty(5, dtype=torch.bfloat16, device="cuda"))
    other.register_buffer("more", torch.empty(1, device="cuda"))
    before = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    found = keeper.tensors("net")
    with pytest.raises(vramp.OptionError, match=r"2 tensors: norm is bfloat16 \[5\].*\[4\] is kept; more is missing"):
        found.fill(other)
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == before
    found.fill(other, strict=False)
    after = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    assert after["embed"] != before["embed"] and (after["norm"], after["more"]) == (before["norm"], before["more"])


def test_classes_and_attributes_of_parameters_survive_the_meta_device(keeper):
    class Sharded(torch.nn.Parameter):
        def rank(self):
            return self.own_rank

    keeper.publish("net", filled())
    with torch.device("meta"):
        net = Net()
    weight = net._parameters["embed"] = net._parameters["head"] = Sharded(net.embed.data, requires_grad=False)
    weight.own_rank = 3
    keeper.tensors("net").fill(net)
    assert type(net.embed) is Sharded and net.embed.rank() == 3 and net.head is net.embed
    assert isinstance(net.norm, torch.nn.Parameter) and net.norm.requires_grad and values(net) == EXPECTED


def test_a_dictionary_keeps_strides_and_empty_tensors(keeper):
    base = torch.arange(6.0).view(2, 3)
    made = {"t": base.t().cuda(), "host": base, "none": torch.empty(0, 3), "one": torch.tensor(7)}
    made["t"] = torch.empty_strided((3, 2), (1, 3), device="cuda")
    made["t"].copy_(base.t())
    keeper.publish("dict", made)
    found = keeper.tensors("dict").tensors()
    assert list(found) == list(made) and all(tensor.is_cuda for tensor in found.values())
    assert found["t"].stride() == (1, 3) and found["t"].t().cpu().equal(base)
    assert found["host"].cpu().equal(base) and found["none"].shape == (0, 3) and found["one"].item() == 7
    assert made["host"].device.type == "cpu"


def test_epochs_are_written_in_place(keeper):
    trained = keeper.publish("policy", {"w": torch.zeros(4)}, readonly=False)
    engine = keeper.tensors("policy")
    seen = engine.tensors()["w"]
    before = engine.kept.epoch
    engine.kept.unlock()
    with trained.writing() as tensors:
        tensors["w"].copy_(torch.tensor([1.0, 2, 3, 4]))
    assert engine.kept.read() == before + 1 and seen.cpu().tolist() == [1, 2, 3, 4]
    engine.kept.unlock()
    with pytest.raises(ZeroDivisionError), trained.writing():
        1 / 0
    with pytest.raises(vramp.KeepTimeoutError):
        engine.kept.read(timeout=0.05)


def test_weights_of_a_failed_publication_stay_valid(keeper):
    net = filled()
    with pytest.raises(vramp.KeepError):
        keeper.load("net", net, keeper.stop)
    gc.collect()
    assert values(net) == EXPECTED and net.embed.is_cuda


# The load format of vLLM.


class Parameter(torch.nn.Parameter):
    """As vLLM's, it keeps its loader behind a property."""

    @property
    def weight_loader(self):
        return self._weight_loader


class Impl:
    """A kernel that holds a parameter and a tensor of its own."""

    def __init__(self, sinks):
        self.sinks = sinks
        self.own = None


class Layer(torch.nn.Module):
    def __init__(self, config, prefix, rotary):
        super().__init__()
        if prefix in config.compilation_config.static_forward_context:
            raise ValueError(f"Duplicate layer name: {prefix}")
        config.compilation_config.static_forward_context[prefix] = self
        self.weight = Parameter(torch.empty(4, 4), requires_grad=False)
        self.weight._weight_loader = len
        self.rotary = rotary.setdefault("rotary", torch.nn.Module())
        if not hasattr(self.rotary, "cache"):
            self.rotary.register_buffer("cache", torch.tensor([0.5, 0.25]), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0))
        self.kv_cache = [torch.tensor([])]
        self.range = torch.tensor(200.0)
        self.impl = Impl(self.weight)

    def process(self, config):
        self.packed = torch.nn.Parameter(torch.empty_like(self.weight.view(2, 8)), requires_grad=False)
        self.packed.data.copy_(self.weight.view(2, 8))
        self.workspace = self.weight.new_empty(3)
        self.workspace.copy_(torch.tensor([7.0, 8.0, 9.0], device="cpu"))
        self.scale_cpu = torch.tensor(1.0, device="cpu")
        self.form = "meta form" if self.weight.is_meta and config.other_form else "form"
        if config.reads_weights and self.weight.max() > 0:
            self.doubled = True


class Model(torch.nn.Module):
    def __init__(self, config, rotary):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(config, f"layers.{index}", rotary) for index in range(2))

    def load_weights(self, weights):
        for _, weight in weights:
            weight.copy_(torch.tensor([0.0]).expand_as(weight))


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "vramp"
    model_loader_extra_config: dict = dataclasses.field(default_factory=dict)
    device: str | None = None


class Engine:
    """vLLM as the loader finds it: its tables, formats and configurations. Counts loads as usual."""

    def __init__(self, directory, files, monkeypatch):
        self.loads, self.rotary, self.formats, self.monkeypatch = 0, {}, {}, monkeypatch
        self.directory, self.files = os.fspath(directory), files
        self.other_form = self.reads_weights = self.sleeps = False
        self.hf_config = types.SimpleNamespace(to_json_string=lambda use_diff: "{}")
        engine = self

        class BaseModelLoader:
            def __init__(self, load_config):
                self.load_config = load_config

            def load_model(self, vllm_config, model_config, prefix=""):
                engine.loads += 1
                with torch.device("cuda"):
                    model = engine.initialize(vllm_config, model_config=model_config, prefix=prefix)
                self.load_weights(model, model_config)
                engine.process(model, model_config, torch.device("cuda"))
                return model.eval()

            def load_weights(self, model, model_config):
                for index, layer in enumerate(model.layers):
                    layer.weight.data.copy_(torch.arange(16.0).view(4, 4) + 100 * index)

            def get_all_weights(self, model_config, model):
                return []

        modules = {name: types.ModuleType(name) for name in (
            "vllm", "vllm.utils", "vllm.utils.torch_utils", "vllm.model_executor", "vllm.model_executor.layers",
            "vllm.model_executor.layers.rotary_embedding", "vllm.model_executor.model_loader",
            "vllm.model_executor.model_loader.base_loader", "vllm.model_executor.model_loader.utils",
        )}  # fmt: skip
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(modules[parent], own, module)
        modules["vllm"].__version__ = "0.26.0"
        modules["vllm.utils.torch_utils"].set_default_torch_dtype = lambda dtype: contextlib.nullcontext()
        modules["vllm.model_executor.layers.rotary_embedding"]._ROPE_DICT = self.rotary
        loader = modules["vllm.model_executor.model_loader"]
        loader._LOAD_FORMAT_TO_MODEL_LOADER = self.formats
        loader.get_model_loader = lambda config: self.formats[config.load_format](config)
        loader.register_model_loader = lambda name: lambda made: self.formats.setdefault(name, made)
        modules["vllm.model_executor.model_loader.base_loader"].BaseModelLoader = BaseModelLoader
        modules["vllm.model_executor.model_loader.utils"].initialize_model = self.initialize
        modules["vllm.model_executor.model_loader.utils"].process_weights_after_loading = self.process
        self.formats["auto"] = self.formats["fastsafetensors"] = BaseModelLoader

    def initialize(self, vllm_config, *, model_config, prefix):
        return Model(vllm_config, self.rotary)

    def process(self, model, model_config, device):
        for layer in model.layers:
            layer.process(self)

    def config(self, **parallel):
        sizes = dict(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0)
        return types.SimpleNamespace(
            other_form=self.other_form,
            reads_weights=self.reads_weights,
            parallel_config=types.SimpleNamespace(**{**sizes, **parallel}),
            cache_config=types.SimpleNamespace(cache_dtype="auto", cpu_offload_gb=0),
            compilation_config=types.SimpleNamespace(static_forward_context={}, static_all_moe_layers=[]),
        )

    def model_config(self):
        return types.SimpleNamespace(
            model=os.fspath(self.files), revision=None, hf_config=self.hf_config, dtype=torch.float32, quantization=None, seed=0,
            enable_sleep_mode=self.sleeps,
        )  # fmt: skip

    def loader(self, **extra):
        return self.formats["vramp"](LoadConfig(model_loader_extra_config={"directory": self.directory, **extra}))

    def load(self, config=None, **extra):
        """A model as a new engine gets it."""
        self.rotary.clear()
        return self.loader(**extra).load_model(vllm_config=config or self.config(), model_config=self.model_config())


@pytest.fixture
def engine(keeper, tmp_path, monkeypatch):
    files = tmp_path / "Ünder model"
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"1")
    made = Engine(keeper.directory, files, monkeypatch)
    from vramp.compat import vllm

    vllm._register_loader()
    yield made
    made.rotary.clear()


def contents(model):
    """All that a model computes with."""
    found = []
    for layer in model.layers:
        tensors = (layer.weight, layer.packed, layer.scale, layer.range, layer.workspace, layer.scale_cpu, layer.rotary.cache)
        found.append([tensor.cpu().flatten().tolist() for tensor in tensors])
        assert isinstance(layer.kv_cache, list) and layer.kv_cache[0].is_cuda and layer.workspace.is_cuda
        assert layer.impl.sinks is layer.weight and layer.weight.weight_loader is len
        assert type(layer.weight) is Parameter
    return found



def test_a_later_engine_maps_all_that_the_first_computes_with(engine, keeper):
    first = engine.load()
    expected = contents(first)
    assert expected[1][:2] == [[100.0 + each for each in range(16)]] * 2 and expected[0][3:] == [[200], [7, 8, 9], [1], [0.5, 0.25]]
    config = engine.config()
    second = engine.load(config)
    assert engine.loads == 1 and contents(second) == expected and not second.training
    assert list(config.compilation_config.static_forward_context.values()) == list(second.layers)
    names = [entry.name for entry in keeper.entries()]
    assert len(names) == 1 and names[0].startswith("vllm/-nder-model/") and names[0].endswith("/rank0")


def test_an_engine_waits_for_one_that_loads(engine, monkeypatch):
    process, draft = engine.process, vramp.keep.Keeper.draft
    loading, waits = threading.Event(), threading.Event()

    def slow(model, *arguments):
        process(model, *arguments)
        loading.set()
        assert model.layers[0].weight.is_meta or waits.wait(SECONDS)

    def asked(self, name, *arguments, **options):
        if loading.is_set() and name.endswith("/loading"):
            waits.set()
        return draft(self, name, *arguments, **options)

    engine.process = slow
    monkeypatch.setattr(vramp.keep.Keeper, "draft", asked)
    models = []
    threads = [threading.Thread(target=lambda: models.append(engine.load())) for _ in range(2)]
    threads[0].start()
    assert loading.wait(SECONDS)
    threads[1].start()
    for thread in threads:
        thread.join(SECONDS)
    assert engine.loads == 1 and contents(models[0]) == contents(models[1])


def test_engines_write_buffers_and_scratch_memory_of_their_own(engine, keeper):
    models = [engine.load(), engine.load()]
    with keeper.open(keeper.entries()[0].name) as kept:
        lengths = kept.size
    assert engine.loads == 1 and lengths
    for model in models:
        model.layers[0].rotary.cache.copy_(torch.tensor([3.0, 3.0]))
        model.layers[0].workspace.copy_(torch.tensor([3.0, 3.0, 3.0]))
    again = contents(engine.load())
    assert engine.loads == 1 and again[0][4:] == [[7, 8, 9], [1], [0.5, 0.25]]
    own = {address(tensor) for model in models for tensor in (model.layers[0].rotary.cache, model.layers[0].workspace)}
    assert len(own) == 4


def test_reloading_is_refused_before_anything_changes(engine):
    for _ in range(2):
        model = engine.load()
        before = contents(model)
        with pytest.raises(vramp.UnsupportedError, match="another load format"):
            engine.loader().get_all_weights(engine.model_config(), model)
        with pytest.raises(vramp.UnsupportedError, match="another load format"):
            model.load_weights([("weight", model.layers[0].weight)])
        assert contents(model) == before
    assert engine.loads == 1


@pytest.mark.parametrize(
    "change, reason",
    [("other_form", "another structure"), ("reads_weights", "meta")],
)
def test_a_model_that_cannot_be_made_without_memory_is_loaded_as_usual(engine, caplog, change, reason):
    setattr(engine, change, True)
    first = engine.load()
    expected = contents(first)
    config = engine.config()
    with caplog.at_level(logging.WARNING, "vllm.vramp"):
        second = engine.load(config)
    assert engine.loads == 2 and contents(second) == expected and reason in caplog.text
    # Nothing of the failed model is left in vLLM's tables.
    assert list(config.compilation_config.static_forward_context.values()) == list(second.layers)
    assert not any(each.cache.is_meta for each in engine.rotary.values())


@pytest.mark.parametrize("change", ["files", "config", "rank", "dtype", "base", "environment"])
def test_what_decides_weights_decides_the_entry(engine, change):
    engine.load()
    config, extra = engine.config(), {}
    if change == "files":
        (engine.files / "model.safetensors").write_bytes(b"22")
    elif change == "config":
        engine.hf_config.to_json_string = lambda use_diff: '{"a": 1}'
    elif change == "rank":
        config = engine.config(rank=1)
    elif change == "dtype":
        engine.model_config = lambda made=engine.model_config(): types.SimpleNamespace(**{**vars(made), "dtype": torch.float16})
    elif change == "base":
        extra = {"base": "fastsafetensors"}
    else:
        engine.monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    engine.load(config, **extra)
    assert engine.loads == 2


def test_what_cannot_be_kept_is_loaded_as_usual(engine, keeper, caplog):
    offloaded = engine.config()
    offloaded.cache_config.cpu_offload_gb = 1
    with caplog.at_level(logging.WARNING, "vllm.vramp"):
        engine.load(offloaded)
        engine.load(engine.config(enable_eplb=True))
        engine.load(engine.config(world_size=2), base="fastsafetensors")
        engine.files = "owner/of-a-hub"
        engine.load()
    for reason in ("offloaded", "balancing", "together", '"name"'):
        assert reason in caplog.text
    assert engine.loads == 4 and keeper.entries() == []
    engine.load(name="mine")
    engine.load(name="mine")
    assert engine.loads == 5 and keeper.entries()[0].name.startswith("vllm/mine/")


def test_sleep_that_would_lose_tensors_in_attributes_is_seen(engine, keeper, caplog):
    engine.sleeps = True
    with caplog.at_level(logging.WARNING, "vllm.vramp"):
        engine.load()
        assert keeper.entries() == [] and "does not keep" in caplog.text
        engine.sleeps = False
        engine.load()
        engine.sleeps = True
        engine.load()
    assert engine.loads == 3 and "does not map" in caplog.text and caplog.text.count("layers.0.range") == 2


def test_an_engine_without_a_keeper_loads_as_usual(engine, keeper, caplog, monkeypatch):
    def failed(directory):
        raise vramp.KeepError("no keeper")

    monkeypatch.setattr(vramp.keep, "connect", failed)
    with caplog.at_level(logging.WARNING, "vllm.vramp"):
        assert contents(engine.load())[0][0] == [float(each) for each in range(16)]
    assert "no keeper" in caplog.text and engine.loads == 1
    with pytest.raises(vramp.OptionError, match='"base"'):
        engine.loader(base="vramp")


def test_weights_serve_whose_publication_failed(engine, keeper, caplog, monkeypatch):
    process = engine.process

    def then_stopped(model, *arguments):
        process(model, *arguments)
        keeper.stop()

    engine.process = then_stopped
    with caplog.at_level(logging.WARNING, "vllm.vramp"):
        model = engine.load()
    assert "does not keep" in caplog.text and contents(model)[1][0][0] == 100
    model.load_weights([])


def test_a_view_of_a_weight_in_an_attribute_is_not_kept(engine, keeper, caplog):
    process = engine.process

    def viewed(model, *arguments):
        process(model, *arguments)
        model.layers[0].impl.own = model.layers[0].weight.data[:2]

    engine.process = viewed
    with caplog.at_level(logging.WARNING, "vllm.vramp"):
        engine.load()
    assert "impl.own is a view" in caplog.text and keeper.entries() == []
