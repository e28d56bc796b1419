"""What holds for every adaptor: nothing is imported early, and a missing library is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = {
    "cupy": ("cupy", "install()", "cupy-cuda13x"),
    "numba": ("numba", "install()", "numba-cuda[cu13]"),
    "rmm": ("rmm", "resource()", "rmm-cu13"),
    "cuda_core": ("cuda", "MemoryResource", "cuda-core"),
}


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("name", MODULES)
def test_importing_an_adaptor_does_not_import_its_library(name: str) -> None:
    library = MODULES[name][0]
    out = run(f"import sys, vramp.{name}; print({library!r} in sys.modules)")
    assert out.strip() == "False"


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_library_is_an_import_error_that_says_what_to_install(name: str) -> None:
    library, use, distribution = MODULES[name]
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {library!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import vramp.{name} as adaptor
try:
    adaptor.{use}
except ImportError as error:
    print(error)
(check,) = adaptor.doctor()
print(check[1])
"""
    out = run(code)
    assert f"pip install {distribution}" in out
    assert out.splitlines()[-1] == "None", "the doctor says so, and it is no failure"


@pytest.mark.parametrize("name", MODULES)
def test_every_adaptor_says_what_it_cannot_do(name: str) -> None:
    out = run(f"import vramp.{name}; print(vramp.{name}.__doc__)")
    assert "What it cannot do:" in out


def test_every_adaptor_uses_the_one_pool_of_the_device() -> None:
    """CuPy, Numba, RMM and cuda.core get the same object, and so does `vramp.pool`."""
    out = run(
        "import vramp, vramp._adaptors as a\n"
        "import vramp.cupy as c, vramp.numba as n, vramp.rmm as r, vramp.cuda_core as k\n"
        "print(all(m.device_pool is a.device_pool for m in (c, n, r, k)))\n"
        "print(vramp.pool(0) is vramp.pool(0))\n"
    )
    assert out.split() == ["True", "True"]
