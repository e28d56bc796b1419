"""vramp.torch without PyTorch: a package of its name, a compiler that copies a file, and the simulator.

Each test starts interpreters of its own, because a process is enabled once. python/tests/torch tests the
same functions with PyTorch.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FAKE = Path(__file__).resolve().parent / "fake_torch"
ENABLE = "import vramp.torch as t; t.enable(); print(t.route())"


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the function that installs the compiled class."""
    built = tmp_path_factory.mktemp("extension") / "extension.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(FAKE / "extension.c")], check=True)
    return built


@dataclass
class Machine:
    """A machine with a PyTorch, a compiler, CUDA headers and a cache."""

    folder: Path
    variables: dict[str, str]
    removed: set[str] = field(default_factory=set)

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
        kept |= self.variables | variables
        return {name: value for name, value in kept.items() if name not in self.removed}

    def run(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.command("-c", code, **variables)

    def command(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(**variables),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, code: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=self.environment(**variables),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fails(self, code: str, error: str, *texts: str, **variables: str) -> str:
        """Runs a program that must end with an error whose text contains `texts`."""
        done = self.run(code, **variables)
        assert done.returncode == 1, done.stdout + done.stderr
        last = done.stderr[done.stderr.rindex("\nvramp.") + 1 :]
        assert last.split(":")[0].rsplit(".", 1)[1] == error, last
        for text in texts:
            assert text in last
        return last

    def doctor(self, **variables: str) -> list[tuple[str, bool | None, str]]:
        """Returns what vramp.torch.doctor() finds, which must compile nothing."""
        before = self.compiled()
        done = self.run("import vramp.torch as t; print(t.doctor())", **variables)
        assert done.returncode == 0, done.stderr
        assert self.compiled() == before
        found: list[tuple[str, bool | None, str]] = eval(done.stdout)
        return found

    def compiled(self) -> int:
        """Returns how often the compiler ran."""
        log = Path(self.variables["FAKE_COMPILER_LOG"])
        return len(log.read_text().splitlines()) if log.exists() else 0

    def cache(self) -> Path:
        return Path(self.variables["VRAMP_CACHE_DIR"])

    def cached(self) -> Path:
        (file,) = self.cache().glob("torch-*.so")
        return file


@pytest.fixture
def machine(tmp_path: Path, extension: Path) -> Machine:
    headers = tmp_path / "cuda" / "include"
    headers.mkdir(parents=True)
    (headers / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    variables = {
        "PYTHONPATH": str(FAKE),
        "VRAMP_DEVICE": "sim:h200",
        "VRAMP_CACHE_DIR": str(tmp_path / "cache" / "vramp"),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "CXX": shlex.join([sys.executable, str(FAKE / "compiler.py")]),
        "FAKE_EXTENSION": str(extension),
        "FAKE_COMPILER_LOG": str(tmp_path / "compiled"),
    }
    return Machine(tmp_path, variables, {"VRAMP_CONF"})


def without_compiler(machine: Machine) -> None:
    machine.removed |= {"CXX"}
    machine.variables["PATH"] = str(machine.folder)


# --- PyTorch ---


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"FAKE_TORCH_BROKEN": "ImportError"}, ["cannot be imported", "libcudart", "pip install torch"]),
        ({"FAKE_TORCH_BROKEN": "OSError"}, ["cannot be imported", "libcudart", "pip install torch"]),
        ({"FAKE_TORCH_CUDA": ""}, ["2.11.0+cu130 is built without CUDA"]),
        ({"FAKE_TORCH_VERSION": "2.8.1"}, ["2.8.1 is too old", "2.9 or newer"]),
        ({"FAKE_TORCH_VERSION": "1.13.1"}, ["1.13.1 is too old"]),
    ],
)
def test_a_pytorch_that_cannot_be_used_is_refused(
    machine: Machine, variables: dict[str, str], texts: list[str]
) -> None:
    machine.fails(ENABLE, "UnsupportedError", *texts, **variables)
    machine.fails("import vramp.torch as t; t.mem_pool()", "UnsupportedError", *texts, **variables)
    ((name, works, text),) = machine.doctor(**variables)
    assert (name, works) == ("torch", None) and all(part in text for part in texts)
    assert machine.compiled() == 0


def test_a_folder_named_torch_is_not_pytorch(machine: Machine) -> None:
    (machine.folder / "other" / "torch").mkdir(parents=True)
    other = {"PYTHONPATH": str(machine.folder / "other")}
    code = "import sys; sys.path = [p for p in sys.path if 'fake_torch' not in p]\n"
    hidden = "sys.path = [p for p in sys.path if 'site-packages' not in p or not __import__('os').path.exists(p + '/torch')]\n"
    machine.fails(code + hidden + ENABLE, "UnsupportedError", "is not PyTorch", **other)


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0a0+git1234", "2.15.1+cu130", "3.0.0"])
def test_newer_versions_are_compiled_for(machine: Machine, version: str) -> None:
    done = machine.run(ENABLE, FAKE_TORCH_VERSION=version)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr
    assert machine.cached().name.startswith(f"torch-{version.split('+')[0]}-")


def test_cuda_that_is_in_use_is_too_late(machine: Machine) -> None:
    machine.fails(ENABLE, "InUseError", "before anything uses it", FAKE_TORCH_INITIALIZED="1")
    found = machine.doctor(FAKE_TORCH_INITIALIZED="1")
    assert found[1][:2] == ("vramp.torch.enable()", False) and "already" in found[1][2]


def test_enabling_again_changes_nothing_and_another_route_is_refused(machine: Machine) -> None:
    code = """
import vramp, vramp.torch as t
assert t.route() is None and not t.is_enabled()
t.enable()
t.enable()
t.enable("compiled")
assert t.is_enabled()
import torch
torch.cuda.init()
t.enable()
for route, error in (("pluggable", vramp.InUseError), ("native", vramp.OptionError)):
    try:
        t.enable(route)
    except error as caught:
        print(caught)
import ctypes
kept, *_ = t._kept
print(ctypes.c_int.in_dll(kept, "vramp_test_installed").value)
print(t.doctor()[1])
print(t.mem_pool().allocator)
"""
    done = machine.run(code)
    assert done.returncode == 0, done.stderr
    first, second, installed, finding, allocator = done.stdout.splitlines()
    assert "compiled route" in first and "auto, compiled or pluggable" in second
    assert installed == "1" and allocator == "None"
    assert finding == "('vramp.torch.enable()', True, 'called: route compiled')"


def test_another_allocator_in_place_is_an_error_and_not_a_second_route(machine: Machine) -> None:
    machine.fails(ENABLE, "InUseError", "PyTorch's allocator is mine", FAKE_INSTALL_FAILS="PyTorch's allocator is mine")


# --- settings ---


def test_a_wrong_setting_can_be_corrected_in_the_process(machine: Machine) -> None:
    code = """
import os, vramp, vramp.torch as t
wrong = [("VRAMP_CONF", "limits=1GiB"), ("VRAMP_CONF", "limit=plenty"), ("VRAMP_DEVICE", "gpu:0")]
for name, value in wrong:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        t.enable()
        raise SystemExit(f"{name}={value} was accepted")
    except vramp.OptionError as error:
        assert name in str(error), error
    (settings,) = [text for name_, works, text in t.doctor() if works is False]
    assert name in settings
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before
    assert not t.is_enabled()
os.environ["VRAMP_CONF"] = "limit=1GiB"
t.enable()
print(t.route(), vramp.pool().limit)
"""
    done = machine.run(code)
    assert (done.returncode, done.stdout) == (0, f"compiled {1 << 30}\n"), done.stderr


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("max_split_size_mb:64, backend : cudaMallocAsync ", "backend:cudaMallocAsync"),
        ("roundup_power2_divisions:[256:1,512:2],throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom"),
    ],
)
def test_a_setting_that_contradicts_vramp_is_refused_by_name(
    machine: Machine, variable: str, setting: str, text: str
) -> None:
    variables = {variable: setting}
    machine.fails(ENABLE, "OptionError", f"{variable} has {text}", "remove the setting", **variables)
    machine.fails("import vramp.torch as t; t.mem_pool()", "OptionError", text, **variables)
    assert machine.doctor(**variables)[-1][:2] == ("settings", False)


def test_settings_that_change_nothing_are_named_by_the_doctor_alone(machine: Machine) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64,backend:native"}
    done = machine.run(ENABLE, **setting)
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")
    name, works, text = machine.doctor(**setting)[-1]
    assert (name, works) == ("PYTORCH_CUDA_ALLOC_CONF", True)
    assert "expandable_segments, max_split_size_mb" in text and "backend" not in text


def test_the_newer_variable_wins_and_an_empty_one_does_not_count() -> None:
    from vramp.torch import _settings

    both = {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2,"}
    assert _settings.read(both) == {"a": "1"}
    both["PYTORCH_ALLOC_CONF"] = ""
    assert _settings.read(both) == {"b": "2"}
    assert _settings.read({}) == {}
    assert _settings.read({"PYTORCH_ALLOC_CONF": "x:[1:2,>:3], y :z,,w"}) == {"x": "[1:2,>:3]", "y": "z", "w": ""}


# --- the compiler ---


@pytest.mark.parametrize(
    ("compiler", "texts"),
    [
        ("false", ["failed with status 1", "allocator.cpp"]),
        ("/nonexistent/g++", ["CXX=/nonexistent/g++: there is no such program"]),
        ("'g++", ["CXX='g++: No closing quotation"]),
        ("true", ["wrote no file"]),
        ("not_a_program", ["cannot be started: ", "Exec format error"]),
    ],
)
def test_a_compiler_that_does_not_work_is_an_error_and_another_one_works(
    machine: Machine, compiler: str, texts: list[str]
) -> None:
    if compiler == "not_a_program":
        program = machine.folder / compiler
        program.write_bytes(b"\x7fnothing")
        program.chmod(0o755)
        compiler = str(program)
    machine.fails(ENABLE, "CompileError", *texts, CXX=compiler)
    code = f"""
import os, vramp.torch as t
right, os.environ["CXX"] = os.environ["CXX"], {compiler!r}
try:
    t.enable()
except t.CompileError:
    assert t.route() is None
os.environ["CXX"] = right
t.enable()
print(t.route())
"""
    done = machine.run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")
    assert machine.compiled() == 1
    files = sorted(path.suffix for path in machine.cache().iterdir())
    assert files == [".lock", ".so"], "a failed compilation leaves no file"


def test_the_doctor_finds_a_compiler_that_is_not_there(machine: Machine) -> None:
    assert machine.doctor()[1][1] is True
    name, works, text = machine.doctor(CXX="/nonexistent/g++")[1]
    assert works is False and "there is no such program" in text


@pytest.mark.parametrize(
    ("variable", "text"),
    [("FAKE_COMPILER_FAILS", "text"), ("FAKE_SELF_TEST_FAILS", "1"), ("FAKE_SELF_TEST_CRASHES", "1")],
)
def test_a_compiled_file_that_does_not_work_is_an_error_and_not_kept(
    machine: Machine, variable: str, text: str
) -> None:
    reason = "signal 6" if "CRASHES" in variable else "status 1"
    machine.fails(ENABLE, "CompileError", "does not work with this PyTorch", reason, "CXX", **{variable: text})
    assert machine.compiled() == 1
    done = machine.run(ENABLE)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr
    assert machine.compiled() == 2


def test_without_a_compiler_the_pluggable_route_is_taken_with_a_warning(machine: Machine) -> None:
    without_compiler(machine)
    program = machine.folder / "program.py"
    program.write_text("import vramp.torch as t\nt.enable()\nprint(t.route())\n")
    done = machine.command(str(program))
    assert (done.returncode, done.stdout) == (0, "pluggable\n"), done.stderr
    assert f"{program}:2: RuntimeWarning: no C++ compiler found" in done.stderr
    assert "apt-get install g++" in done.stderr
    machine.fails("import vramp.torch as t; t.enable('compiled')", "NoCompilerError", "no C++ compiler found")
    quiet = machine.run("import vramp.torch as t; t.enable('pluggable')")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    name, works, text = machine.doctor()[1]
    assert (name, works) == ("vramp.torch.enable()", None) and "route pluggable" in text


def test_without_cuda_headers_the_pluggable_route_is_taken(machine: Machine) -> None:
    code = """
from pathlib import Path
import vramp.torch._build as build
build._header_folders = lambda: [Path("/nonexistent")]
"""
    done = machine.run(code + ENABLE)
    assert (done.returncode, done.stdout) == (0, "pluggable\n"), done.stderr
    assert "nvidia-cuda-runtime" in done.stderr


def test_headers_of_pytorchs_cuda_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from vramp.torch import _build

    folders = [tmp_path / name for name in ("empty", "unknown", "cuda12", "cuda13")]
    for folder, text in zip(folders[1:], ("", "#define CUDART_VERSION 12080\n", "#define CUDART_VERSION  13000\n")):
        folder.mkdir()
        (folder / "cuda_runtime_api.h").write_text(text)
    monkeypatch.setattr(_build, "_header_folders", lambda: folders)
    for cuda, expected in (("12.6", "cuda12"), ("13.0", "cuda13"), ("14.1", "unknown")):
        torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda))
        assert _build.cuda_headers(torch).name == expected


# --- the cache ---


def test_the_second_process_compiles_nothing(machine: Machine) -> None:
    for _ in range(2):
        done = machine.run(ENABLE)
        assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr
    assert machine.compiled() == 1
    # Not even a compiler is needed.
    without_compiler(machine)
    assert machine.doctor()[1][2].endswith("compiled already")
    assert machine.run(ENABLE).stdout == "compiled\n"


@pytest.mark.parametrize("kept", [0, 100, 4096, -1])
def test_a_cached_file_that_was_cut_off_is_compiled_again(machine: Machine, kept: int) -> None:
    assert machine.run(ENABLE).returncode == 0
    whole = machine.cached().read_bytes()
    machine.cached().write_bytes(whole[:kept])
    done = machine.run(ENABLE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "compiled\n", "")
    assert machine.compiled() == 2 and machine.cached().read_bytes() == whole


def test_what_a_killed_compilation_left_is_removed(machine: Machine) -> None:
    assert machine.run(ENABLE).returncode == 0
    left = machine.cached().with_name(f".{machine.cached().name}.99999")
    left.write_text("half")
    machine.cached().unlink()
    assert machine.run(ENABLE).returncode == 0
    assert not left.exists()


@pytest.mark.parametrize("place", ["a_file", "no_home"])
def test_a_cache_that_cannot_be_written_is_replaced_for_the_process(machine: Machine, place: str) -> None:
    temporary = machine.folder / "temporary"
    temporary.mkdir()
    machine.variables["TMPDIR"] = str(temporary)
    code = ENABLE
    if place == "a_file":
        # Also for root, to whom permissions do not apply.
        machine.cache().parent.write_text("")
    else:
        del machine.variables["VRAMP_CACHE_DIR"]
        machine.removed |= {"XDG_CACHE_HOME", "VRAMP_CACHE_DIR"}
        code = (
            "import pathlib\n"
            "def home(): raise RuntimeError('Could not determine home directory.')\n"
            "pathlib.Path.home = home\n"
        ) + code
    for number in (1, 2):
        done = machine.run(code)
        assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr
        assert "cannot write to the cache" in done.stderr and "VRAMP_CACHE_DIR" in done.stderr
        assert machine.compiled() == number
    assert list(temporary.iterdir()) == [], "the temporary folder is removed"
    if place == "a_file":
        assert "compiles in every process" in machine.doctor()[1][2]


def test_threads_that_enable_at_once_compile_and_install_once(machine: Machine) -> None:
    code = """
import ctypes, threading
import vramp.torch as t
barrier, failures = threading.Barrier(16), []
def enable():
    barrier.wait()
    try:
        t.enable()
        assert t.route() == "compiled"
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=enable) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
kept, *_ = t._kept
print(failures, ctypes.c_int.in_dll(kept, "vramp_test_installed").value)
"""
    done = machine.run(code)
    assert (done.returncode, done.stdout) == (0, "[] 1\n"), done.stderr
    assert machine.compiled() == 1


def test_processes_that_enable_at_once_compile_once(machine: Machine) -> None:
    gate = machine.folder / "gate"
    os.mkfifo(gate)
    started = [machine.start(ENABLE, FAKE_COMPILER_GATE=str(gate))]
    try:
        # Opens once the compiler of the first process waits at the gate.
        with open(gate, "w"):
            second = machine.start(ENABLE)
            started.append(second)
            while not _waits_for_a_lock(second.pid):
                assert second.poll() is None, "the second process did not wait"
        for process in started:
            out, errors = process.communicate(timeout=60)
            assert (process.returncode, out) == (0, "compiled\n"), errors
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
    assert machine.compiled() == 1


def _waits_for_a_lock(process: int) -> bool:
    """True if the kernel lists the process as one that waits for a file lock."""
    waiting = re.findall(r"-> FLOCK\s+\S+\s+\S+\s+(\d+)", Path("/proc/locks").read_text())
    return str(process) in waiting


# --- the pluggable route ---


def test_the_pluggable_route_serves_pytorchs_calls(machine: Machine) -> None:
    """Every hook is called as PyTorch calls it: by its address, and with pool ids of two numbers."""
    code = """
import ctypes
import vramp, vramp.torch as t
t.enable("pluggable")
import torch
allocator, hooks = torch.cuda.memory.current, torch.cuda.memory.current._allocator
assert set(vars(hooks)) == {name.removeprefix("set_") for name in torch.cuda.memory.TYPES}, vars(hooks)
hooks.init_fn(1)
block = allocator.malloc(5 << 20, 0, None)
hooks.record_stream_fn(block, 0x7F00)
size = ctypes.c_size_t()
assert hooks.base_alloc_fn(block + 700, ctypes.byref(size)) == block and size.value == 5 << 20
report = t.report()
assert report["live"] == 5 << 20 and report["allocated"] == 1, report
stats = torch._C._cuda_memoryStats(0)
assert stats["allocated_bytes"]["all"]["current"] == 5 << 20, stats
assert stats["allocation"]["all"]["allocated"] == 1
(segment,) = [s for s in torch._C._cuda_memorySnapshot()["segments"] if s["allocated_size"]]
assert segment["address"] <= block < segment["address"] + segment["total_size"]
allocator.free(block, 5 << 20, 0, None)
torch._C._cuda_resetAccumulatedMemoryStats(0)
torch._C._cuda_resetPeakMemoryStats(0)
stats = torch._C._cuda_memoryStats(0)
assert stats["allocation"]["all"] == {"current": 0, "peak": 0, "allocated": 0, "freed": 0}, stats["allocation"]
hooks.reset_fn()
t.trim()
for _ in range(2):
    hooks.begin_allocate_to_pool(0, 3, 0, 0x10)
    allocator.free(allocator.malloc(5 << 20, 0, 0x7F00), 5 << 20, 0, 0x7F00)
    hooks.end_allocate_to_pool_fn(0, 3, 0)
hooks.release_pool(0, 3, 0)
hooks.release_pool(0, 3, 0)
t.audit()
assert t.report()["live"] == 0
hooks.memory_fraction_fn(0.5, 0)
assert vramp.pool().limit == vramp.pool().device_info.memory // 2
for call in (lambda: t.report(64), lambda: t.trim(device=-1), t.mem_pool):
    try:
        call()
    except vramp.VrampError as error:
        print(error)
"""
    done = machine.run(code)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert "no device number 64" in first and "no device number -1" in second
    assert "no memory pools" in third


def test_an_allocator_that_pytorch_refuses_is_an_error(machine: Machine) -> None:
    code = """
import torch
torch.cuda.memory.current = object()
import vramp.torch as t
t.enable("pluggable")
"""
    machine.fails(code, "InUseError", "already initialized allocator")


def test_a_memory_pool_needs_no_enable_and_no_compiler(machine: Machine) -> None:
    code = """
import vramp, vramp.torch as t, torch
pool = t.mem_pool()
assert pool.allocator is t.mem_pool().allocator
assert t._pool_allocator.names == ("vramp_torch_pool_malloc", "vramp_torch_free")
block = t._pool_allocator.malloc(5 << 20, 0, None)
assert t.report()["live"] == 5 << 20
t._pool_allocator.free(block, 5 << 20, 0, None)
assert t._pool_allocator.malloc(1 << 50, 0, None) is None
print(t.route())
"""
    without_compiler(machine)
    done = machine.run(code)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    machine.fails("import vramp.torch as t; t.mem_pool()", "OptionError", "bypass", **expandable)


def test_the_pluggable_route_sends_no_tensors_on_a_card_and_the_receiver_learns_it(machine: Machine) -> None:
    code = """
import pickle, torch, vramp, vramp.torch as t
from multiprocessing.reduction import ForkingPickler
t.enable("pluggable")
for kind in (torch.Tensor, torch.Parameter, torch.UntypedStorage):
    assert type(pickle.loads(ForkingPickler.dumps(kind("cpu")))) is kind
    sent = ForkingPickler.dumps(kind("cuda"))
    try:
        pickle.loads(sent)
        print("received")
    except vramp.UnsupportedError as error:
        print(error)
"""
    done = machine.run(code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 and done.stdout.count("tensor.cpu()") == 3
    assert done.stderr.count("was not sent") == 3


RECEIVES = """
import pickle, sys, torch, vramp.torch
if sys.argv[1:] == ["late"]:
    torch.cuda.init()
try:
    tensor = pickle.loads(sys.stdin.buffer.read())
    print(tensor.device.type, vramp.torch.route())
except vramp.InUseError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["torch.Tensor", "torch.nn.parameter.Parameter"])
def test_a_process_that_receives_a_tensor_enables_itself_or_says_what_to_do(machine: Machine, kind: str) -> None:
    receiver = machine.folder / "receiver.py"
    receiver.write_text(RECEIVES)
    code = f"""
import subprocess, sys, torch, vramp.torch
from multiprocessing.reduction import ForkingPickler
vramp.torch.enable()
sent = ForkingPickler.dumps({kind}("cuda"))
for arguments in ([], ["late"]):
    subprocess.run([sys.executable, "receiver.py", *arguments], input=bytes(sent), check=True)
print(ForkingPickler.loads(ForkingPickler.dumps(torch.Tensor("cpu"))).device.type)
rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(torch.Tensor("cuda"))
print(rebuild(*arguments).device.type, len(arguments))
"""
    done = machine.run(code)
    assert done.returncode == 0, done.stderr
    enabled, refused, on_host, own = done.stdout.splitlines()
    assert enabled == "cuda compiled"
    assert "received a CUDA tensor of vramp" in refused and "vramp.torch.enable()" in refused
    assert on_host == "cpu"
    assert own == "cuda 2", "the arguments are PyTorch's, in its order"


# --- python -m vramp run ---


PROGRAM = """
import sys
import torch
import vramp.torch
print(vramp.torch.route(), __name__, sys.argv)
"""


def run(machine: Machine, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return machine.command("-m", "vramp", "run", *arguments, **variables)


def test_a_program_gets_its_arguments_and_the_path_that_python_gives_it(machine: Machine) -> None:
    folder = machine.folder / "programs"
    folder.mkdir()
    (folder / "beside.py").write_text("")
    (machine.folder / "in_the_current_folder.py").write_text("")
    program = folder / "program.py"
    more = """
import importlib.util, os, beside
print(__file__, __spec__, os.path.samefile(sys.path[0], os.path.dirname(__file__)))
print(importlib.util.find_spec("in_the_current_folder"))
"""
    program.write_text(PROGRAM + more)
    arguments = ["programs/program.py", "--quiet", "-m", "x", "--", "--events", "3"]
    ours, theirs = run(machine, *arguments), machine.command(*arguments)
    assert (ours.returncode, ours.stderr, theirs.stderr) == (0, "", "")
    assert ours.stdout.splitlines()[0].replace("compiled", "None") == theirs.stdout.splitlines()[0]
    assert ours.stdout.startswith("compiled __main__ ['programs/program.py', '--quiet', '-m'")
    assert ours.stdout.endswith("None True\nNone\n")
    assert theirs.stdout.endswith("None True\nNone\n")


def test_a_module_and_a_folder_are_run(machine: Machine) -> None:
    package = machine.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text(PROGRAM)
    (package / "__main__.py").write_text(PROGRAM)
    for arguments in (["-m", "package.tool", "-m", "7"], ["-m", "package", "-m", "7"], ["package", "-m", "7"]):
        done = run(machine, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("compiled __main__ [") and done.stdout.endswith("'-m', '7']\n")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["missing.py"], 2, "there is no file missing.py"),
        (["-m", "no_such_module"], 2, "there is no module no_such_module"),
        (["-m", "no_such_package.module"], 2, "there is no module no_such_package.module"),
        (["-m", ""], 2, "there is no module"),
        (["--events", "-1", "missing.py"], 2, "--events must not be negative"),
        (["--events", "many", "missing.py"], 2, "invalid int value"),
        (["--route", "native", "missing.py"], 2, "invalid choice"),
        ([], 2, "the following arguments are required"),
    ],
)
def test_a_program_that_cannot_be_run_is_named(
    machine: Machine, arguments: list[str], status: int, text: str
) -> None:
    done = run(machine, *arguments)
    assert done.returncode == status and text in done.stderr
    assert "Traceback" not in done.stderr and machine.compiled() == 0


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('over')", 1, "over\n"),
        ("import sys; sys.exit()", 0, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_the_exit_status_is_that_of_the_program(machine: Machine, code: str, status: int, text: str) -> None:
    program = machine.folder / "program.py"
    program.write_text(code)
    done = run(machine, str(program))
    assert done.returncode == status and done.stderr.endswith(text)


def test_a_failure_to_enable_is_one_line_and_the_program_does_not_run(machine: Machine) -> None:
    program = machine.folder / "program.py"
    program.write_text("print('ran')")
    for variables, text in (
        ({"VRAMP_CONF": "limit=plenty"}, "limit=plenty"),
        ({"FAKE_TORCH_CUDA": ""}, "built without CUDA"),
        ({"CXX": "false"}, "failed with status 1"),
    ):
        machine.removed.discard("VRAMP_CONF")
        done = run(machine, str(program), **variables)
        assert (done.returncode, done.stdout) == (1, "") and text in done.stderr
        assert done.stderr.startswith("vramp run: ") and "Traceback" not in done.stderr


ALLOCATES = """
import torch
torch.cuda.init()
allocator = torch.cuda.memory.current
blocks = [allocator.malloc(30 << 20, 0, None) for _ in range(10)]
for block in blocks:
    allocator.free(block, 30 << 20, 0, None)
"""


IMPORTS_A_SAVER = """
import subprocess, sys
from torch_memory_saver import configure_subprocess, torch_memory_saver
print(type(torch_memory_saver).__module__)
if "child" not in sys.argv:
    subprocess.run([sys.executable, "program.py", "child"], check=True)
"""


@pytest.mark.parametrize(("compat", "expected"), [(None, "vramp.compat.torch_memory_saver"), ("off", "theirs")])
def test_a_program_of_torch_memory_saver_gets_vramps_unless_it_wants_the_other(
    machine: Machine, compat: str | None, expected: str
) -> None:
    (machine.folder / "program.py").write_text(IMPORTS_A_SAVER)
    installed = machine.folder / "torch_memory_saver.py"
    installed.write_text("class Saver:\n    pass\nSaver.__module__ = 'theirs'\n")
    with installed.open("a") as more:
        more.write("torch_memory_saver = Saver()\nconfigure_subprocess = None\n")
    variables = {"VRAMP_COMPAT": compat} if compat else {}
    done = run(machine, "--quiet", "program.py", **variables)
    assert done.stdout.splitlines() == [expected] * 2, done.stderr
    # Without `run` nothing changes.
    assert machine.command("program.py").stdout.splitlines() == ["theirs"] * 2


RUNS_OUT = """
import sys, threading, torch
torch.cuda.init()
allocator = torch.cuda.memory.current
kept = [allocator.malloc(30 << 20, 0, None) for _ in range(10)]
error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
def fail(error=error):
    raise error
match sys.argv[1]:
    case "thread":
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    case "caught":
        try:
            fail()
        except torch.OutOfMemoryError:
            pass
    case "other":
        fail(ValueError("wrong"))
    case "hook":
        sys.excepthook = lambda *arguments: print("the program's own")
        fail()
    case _:
        fail()
"""


@pytest.mark.parametrize(
    ("how", "status", "written"),
    [("plain", 1, True), ("thread", 0, True), ("hook", 1, True), ("caught", 0, False), ("other", 1, False)],
)
def test_a_program_that_runs_out_of_memory_leaves_a_snapshot_if_nothing_catches_the_error(
    machine: Machine, how: str, status: int, written: bool
) -> None:
    (machine.folder / "program.py").write_text(RUNS_OUT)
    options = ["--route", "pluggable", "--quiet", "--snapshot-on-oom", "at.pickle"]
    done = run(machine, *options, "program.py", how)
    path = machine.folder / "at.pickle"
    assert (done.returncode, path.exists()) == (status, written), done.stderr
    assert done.stderr.count("vramp explain") == written and done.stderr.count("snapshot") == 0, done.stderr
    if written:
        explained = machine.run("import vramp; print(vramp.explain('at.pickle')[0].peak_live_bytes)")
        assert explained.stdout == f"{300 << 20}\n", explained.stderr


def test_a_snapshot_that_cannot_be_written_leaves_the_programs_own_error(machine: Machine) -> None:
    (machine.folder / "program.py").write_text(RUNS_OUT)
    options = ["--route", "pluggable", "--quiet", "--snapshot-on-oom", "no/such/folder.pickle"]
    done = run(machine, *options, "program.py", "plain")
    assert done.returncode == 1 and "no snapshot was written" in done.stderr
    assert "OutOfMemoryError: CUDA out of memory" in done.stderr


def test_snapshots_of_each_error_need_the_compiled_route(machine: Machine) -> None:
    (machine.folder / "program.py").write_text(RUNS_OUT)
    done = run(machine, "--route", "pluggable", "--quiet", "--snapshot-on-oom=all", "program.py", "caught")
    assert done.returncode == 0 and "needs a C++ compiler" in done.stderr


def test_the_memory_is_reported_at_the_end_unless_it_is_to_be_quiet(machine: Machine) -> None:
    program = machine.folder / "program.py"
    program.write_text(ALLOCATES)
    route = ["--route", "pluggable"]
    done = run(machine, *route, str(program))
    assert (done.returncode, done.stdout) == (0, "")
    first, second = done.stderr.splitlines()
    assert re.fullmatch(
        r"vramp: device 0: peak \d+\.\d\d MiB reserved for 300\.00 MiB allocated \(overhead 1\.\d{3}\)", first
    )
    assert "PyTorch's allocator would have reserved" in second
    few = run(machine, *route, "--events", "5", str(program)).stderr.splitlines()
    assert few[0] == first and few[1].endswith("no comparison with PyTorch: 20 events, and --events kept 5")
    assert run(machine, *route, "--events", "0", str(program)).stderr.splitlines() == [first]
    assert run(machine, *route, "--quiet", str(program)).stderr == ""


def test_a_run_opens_the_devices_alone_that_the_program_uses(machine: Machine) -> None:
    allocates = ALLOCATES.replace("malloc(30 << 20, 0,", "malloc(30 << 20, 2,").replace("30 << 20, 0,", "30 << 20, 2,")
    program = machine.folder / "program.py"
    program.write_text(allocates + """
from vramp._native import opened
opened_devices = lambda: [device for device in range(4) if opened(device)]
print(opened_devices())
for device in range(4):
    if device != 2:
        torch._C._cuda_resetPeakMemoryStats(device)
        torch._C._cuda_resetAccumulatedMemoryStats(device)
    print(sum(value for value in torch.cuda.memory_stats(device).values() if value > 0) > 0)
print([len(trace) > 0 for trace in torch._C._cuda_memorySnapshot(None)["device_traces"]], opened_devices())
""")
    done = run(machine, "--route", "pluggable", str(program), FAKE_TORCH_DEVICES="4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["[2]", "False", "False", "True", "False", "[False, False, True, False] [2]"]
    assert re.findall(r"device (\d)", done.stderr) == ["2", "2"]


CHILD = """
import sys, sitecustomize
print(any("_inherit" in path for path in sys.path), "vramp" in sys.modules, sitecustomize.own)
import importlib.util
importlib.util.find_spec("torch")
import torch, vramp.torch
print(vramp.torch.route())
vramp.torch.enable()
"""


def test_processes_that_the_program_starts_are_enabled_too(machine: Machine) -> None:
    own = machine.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("own = 'own'")
    (machine.folder / "child.py").write_text(CHILD)
    program = machine.folder / "program.py"
    program.write_text("""
import multiprocessing, subprocess, sys
def work():
    import torch, vramp.torch
    print(vramp.torch.route(), flush=True)
if __name__ == "__main__":
    subprocess.run([sys.executable, "child.py"], check=True)
    nested = "import subprocess, sys; subprocess.run([sys.executable, 'child.py'], check=True)"
    subprocess.run([sys.executable, "-c", nested], check=True)
    spawned = multiprocessing.get_context("spawn").Process(target=work)
    spawned.start()
    spawned.join()
""")
    variables = {"PYTHONPATH": f"{own}{os.pathsep}{machine.variables['PYTHONPATH']}"}
    for route in ("compiled", "pluggable"):
        done = run(machine, "--quiet", "--route", route, str(program), **variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        child = ["False False own", route]
        assert done.stdout.splitlines() == [*child, *child, route]


def test_a_process_that_cannot_be_enabled_goes_on_without(machine: Machine) -> None:
    program = machine.folder / "program.py"
    program.write_text("""
import os, subprocess, sys
code = "import torch, sys; print('vramp.torch' in sys.modules)"
for name, value in (("VRAMP_CONF", "limit=plenty"), ("FAKE_TORCH_CUDA", "")):
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, name: value})
subprocess.run([sys.executable, "-c", "import sys; print('vramp' in sys.modules, 'torch' in sys.modules)"], check=True)
subprocess.run([sys.executable, "-I", "-c", "print('isolated')"], check=True)
""")
    done = run(machine, "--quiet", str(program))
    assert done.returncode == 0 and done.stdout == "True\nFalse\nFalse False\nisolated\n", done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"vramp: process \d+ uses PyTorch's own allocator: .*limit=plenty.*", line)


def test_nothing_is_reported_for_a_program_that_does_not_use_cuda(machine: Machine) -> None:
    program = machine.folder / "program.py"
    program.write_text("import torch")
    done = run(machine, str(program))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_reports_nothing(machine: Machine) -> None:
    program = machine.folder / "program.py"
    program.write_text(ALLOCATES + "import os, sys\nif os.fork() == 0: sys.exit(0)\nos.wait()\n")
    done = run(machine, "--route", "pluggable", str(program))
    assert done.returncode == 0 and done.stderr.count("peak") == 1, done.stderr
