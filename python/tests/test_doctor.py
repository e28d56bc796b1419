"""`python -m vramp doctor`, and the version of package and library."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from importlib import metadata

import pytest
from conftest import run_python

import vramp
from vramp import _doctor


def _command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vramp", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("named", ["sim", ""])
def test_the_simulator_alone_is_no_machine_that_works(named: str) -> None:
    done = _command("doctor", VRAMP_CONF="limit=3GiB", CUDA_VISIBLE_DEVICES="", VRAMP_DEVICE=named)
    assert done.returncode == 3, done.stdout
    assert "\nvramp works on the simulator only" in done.stdout
    assert "FAIL card" in done.stdout
    lines = {line[5:21].strip(): line for line in done.stdout.splitlines()}
    assert lines["package"].startswith("ok")
    assert "simulated" in lines["device"]
    assert "hides every card" in lines["visible devices"]
    assert "limit=3GiB" in lines["VRAMP_CONF"]
    assert "3.00 GiB" in lines["limit"]
    assert metadata.version("numpy") in lines["numpy"]
    assert lines["other processes"].startswith("ok")
    assert "exported 1 MiB and opened it" in lines["other processes"]
    assert "none with a link" in lines["other cards"]
    assert "possible, off (option rdma=on); dma-buf: yes" in lines["network cards"]


def test_exec_ends_as_its_program() -> None:
    script = "echo $LD_PRELOAD; trap '' TERM; kill -TERM $$; kill -XFSZ $$; exit 3"
    done = _command("exec", "--limit", "1GiB", "--", "sh", "-c", script)
    # Python ignores the last signal, and programs must not inherit that.
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    assert done.stdout.endswith("libvramp_preload.so\n")
    done = _command("exec", "--limit", "1GiB", "--", sys.executable, "-m", "vramp", "doctor", VRAMP_DEVICE="sim")
    assert "this process runs under it (limit)" in done.stdout


def test_programs_without_python_load_the_library() -> None:
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    preloaded.append(vramp.library_path())
    done = subprocess.run(["true"], env={**os.environ, "LD_PRELOAD": ":".join(preloaded)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        ("sharing=none", "other processes", "for this process only (set the option sharing=posix-fd)"),
        ("sharing=fabric", "other processes", "file descriptors, on this machine: the device refused"),
        ("device=sim:h200x3:1", "other cards", "0, 2; with access: none yet"),
        ("device=sim:h200x3:1,peers=all", "other cards", "0, 2; with access: 0, 2"),
        ("rdma=auto", "network cards", "GPUDirect RDMA: on"),
    ],
)
def test_the_doctor_says_what_of_sharing_is_on(settings: str, name: str, words: str) -> None:
    # Without the libraries, whose import takes seconds.
    code = f"""
import vramp
from vramp import _doctor
for name, ok, text in _doctor._sharing(vramp.pool()):
    if name == {name!r}:
        print(ok, text)
"""
    done = run_python(code, VRAMP_CONF=settings)
    assert words in done.stdout and "False" not in done.stdout, done.stderr


def test_the_doctor_finds_settings_that_do_not_work() -> None:
    done = _command("doctor", VRAMP_CONF="limits=1")
    assert done.returncode == 1
    assert "FAIL pool" in done.stdout and "unknown option 'limits'" in done.stdout


def test_checks_of_integrations_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def doctor() -> list[_doctor.Check]:
            return [("numpy streams", False, "none")]

    class Broken:
        @staticmethod
        def doctor() -> list[_doctor.Check]:
            raise ValueError("no card")

    for module, expected in (
        (Module, ("numpy streams", False, "none")),
        (Broken, ("numpy", False, "its check failed: ValueError: no card")),
    ):
        monkeypatch.setattr(importlib, "import_module", lambda _, module=module: module)
        checks = list(_doctor._library("numpy", ("numpy",), "vramp._doctor"))
        assert checks[-1] == expected
        assert checks[0] == ("numpy", True, metadata.version("numpy")) or module is Broken


def test_a_library_has_one_line_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def doctor() -> list[_doctor.Check]:
            return [("numpy", True, "9.9"), ("numpy device", None, "none")]

    monkeypatch.setattr(importlib, "import_module", lambda _: Module)
    checks = list(_doctor._library("numpy", ("numpy",), "vramp._doctor"))
    assert checks == Module.doctor()


@pytest.mark.parametrize(
    ("visible", "missing", "device", "ok", "words"),
    [
        ("7", f"{_doctor._NO_DEVICE}; check it", "", False, "CUDA_VISIBLE_DEVICES=7 names no card"),
        ("7", f"{_doctor._NO_DEVICE}; check it", "sim:h200", None, "names no card"),
        ("", f"{_doctor._NO_DEVICE}; check it", "", None, "hides every card"),
        ("-1", f"{_doctor._NO_DEVICE}; check it", "", None, "hides every card"),
        ("7", "no CUDA driver library found", "", None, "CUDA_VISIBLE_DEVICES=7"),
        ("0", None, "", None, "CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_cards_that_do_not_exist_are_a_failure_beside_a_driver(
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    missing: str | None,
    device: str,
    ok: bool | None,
    words: str,
) -> None:
    monkeypatch.setenv("VRAMP_DEVICE", device)
    monkeypatch.delenv("VRAMP_CONF", raising=False)
    name, found, text = _doctor._visible_devices(visible, missing)
    assert (name, found) == ("visible devices", ok) and words in text


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("VRAMP_DEVICE", "gpu", "VRAMP_DEVICE=gpu is invalid: use cuda, sim or sim:CARD"),
        ("VRAMP_CONF", "limit=80", "VRAMP_CONF is invalid: the limit is below 2 MiB; write a unit"),
    ],
)
def test_each_wrong_setting_is_named(variable: str, value: str, words: str) -> None:
    done = _command("doctor", **{variable: value})
    assert done.returncode == 1
    assert f"FAIL pool             {words}" in done.stdout


def test_commands_are_explained() -> None:
    shown = _command().stdout
    assert all(command in shown for command in ("doctor", "run", "explain", "report"))
    unknown = _command("explian")
    assert (unknown.returncode, "'explain'" in unknown.stderr) == (2, True)
    assert _command("doctor", "extra").returncode == 2


def test_the_versions_agree() -> None:
    assert vramp.__version__ == metadata.version("vramp")


def test_an_import_loads_neither_the_analysis_nor_the_metadata_of_packages() -> None:
    code = """
import sys, vramp
slow = ["importlib.metadata", "vramp._analysis", "vramp._controller", "numpy"]
print([name for name in slow if name in sys.modules])
assert vramp.explain and vramp.Controller and "explain" in dir(vramp)
from vramp import *
print(replay.__module__)
try:
    vramp.nothing
except AttributeError as error:
    print(error)
"""
    done = run_python(code)
    expected = ["[]", "vramp._analysis", "module 'vramp' has no attribute 'nothing'"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_library_of_another_version_is_not_imported() -> None:
    code = """
import os
from importlib import metadata
metadata.version = lambda name: "9.9.9"
isdir = os.path.isdir
os.path.isdir = lambda path: isdir(path) and not str(path).endswith(".dist-info")
import vramp
"""
    done = run_python(code)
    assert done.returncode != 0
    assert "ImportError: vramp 9.9.9 is installed, but its library" in done.stderr
