"""`python -m vramp doctor`, and the version of package and library."""

from __future__ import annotations

import importlib
import os
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


def test_the_doctor_finds_a_machine_that_works() -> None:
    done = _command("doctor", VRAMP_CONF="limit=3GiB", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout
    lines = {line[5:21].strip(): line for line in done.stdout.splitlines()}
    assert lines["package"].startswith("ok")
    assert "simulated" in lines["device"]
    assert "hides every card" in lines["visible devices"]
    assert "limit=3GiB" in lines["VRAMP_CONF"]
    assert "3.00 GiB" in lines["limit"]
    assert metadata.version("numpy") in lines["numpy"]


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
        assert checks[1] == expected


def test_commands_are_explained() -> None:
    assert "doctor" in _command().stdout
    unknown = _command("docter")
    assert (unknown.returncode, "unknown command" in unknown.stderr) == (2, True)
    assert _command("doctor", "extra").returncode == 2


def test_the_versions_agree() -> None:
    assert vramp.__version__ == metadata.version("vramp")


def test_a_library_of_another_version_is_not_imported() -> None:
    code = """
from importlib import metadata
metadata.version = lambda name: "9.9.9"
import vramp
"""
    done = run_python(code)
    assert done.returncode != 0
    assert "ImportError: vramp 9.9.9 is installed, but its library" in done.stderr
