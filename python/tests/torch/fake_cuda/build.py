"""Builds the fake CUDA runtime for the installed torch and prints the value of LD_PRELOAD.

    LD_PRELOAD=$(python python/tests/torch/fake_cuda/build.py) python program.py

Environment of the program: FAKE_CUDA_MEMORY, bytes of a device (default 1 GiB); FAKE_CUDA_DEVICES, number
of devices (default 1); CUDA_VISIBLE_DEVICES, numbers of those to use. The libraries lie in target/fake-cuda and are built again when a source changes.

The library's SONAME is libcudart.so.N of torch's CUDA, so that the loader takes it for that library.
"""

import hashlib
import importlib.util
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parents[3] / "target" / "fake-cuda"


def site_packages():
    """The folder that contains torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("the fake CUDA runtime is for PyTorch: install torch")
    return pathlib.Path(spec.origin).parents[1]


def cuda_headers(site):
    """Include folders with cuda_runtime_api.h, cuda.h and crt/host_defines.h, and the major version."""
    folders = sorted(site.glob("nvidia/cu*/include")) + sorted(site.glob("nvidia/cuda_runtime/include"))
    folders += [site / "triton/backends/nvidia/include", pathlib.Path("/usr/local/cuda/include")]
    folders = [folder for folder in folders if folder.is_dir()]
    for name in ("cuda_runtime_api.h", "cuda.h", "crt/host_defines.h"):
        if not any((folder / name).exists() for folder in folders):
            raise SystemExit(f"{name} is in none of {', '.join(map(str, folders))}: install a CUDA build of torch")
    runtimes = sorted(site.glob("nvidia/cu*/lib/libcudart.so.*")) + sorted(site.glob("nvidia/cuda_runtime/lib/libcudart.so.*"))
    if not runtimes:
        raise SystemExit(f"{site} has no libcudart.so: install a CUDA build of torch")
    return folders, runtimes[0].name


def build():
    """Returns the paths to preload: the runtime, and a driver library that depends on it."""
    folders, soname = cuda_headers(site_packages())
    sources = sorted(HERE.glob("*.cpp")) + [HERE / "unused.c"]
    digest = hashlib.sha256(soname.encode() + "".join(map(str, folders)).encode())
    for source in sources + sorted(HERE.glob("*.hpp")) + [pathlib.Path(__file__)]:
        digest.update(source.read_bytes())
    out = OUT / digest.hexdigest()[:16]
    runtime, driver = out / soname, out / "libcuda.so.1"
    if driver.exists():
        return [runtime, driver]
    out.mkdir(parents=True, exist_ok=True)
    versions = out / "versions.map"
    versions.write_text(soname + " { global: cuda*; __cuda*; fake_cuda*; cu*; local: *; };\n")
    unused = out / "unused.o"
    run(["gcc", "-O1", "-fPIC", "-c", str(HERE / "unused.c"), "-o", str(unused)])
    include = [word for folder in folders for word in ("-isystem", str(folder))]
    run(
        ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Wno-cast-function-type", "-fPIC", "-shared"]
        + include
        + [str(source) for source in sources if source.suffix == ".cpp"]
        + [str(unused), f"-Wl,-soname,{soname}", f"-Wl,--version-script,{versions}", "-o", str(runtime)]
    )
    empty = out / "empty.c"
    empty.write_text("")
    run(
        ["gcc", "-shared", "-fPIC", str(empty), "-Wl,--no-as-needed", str(runtime), "-Wl,-soname,libcuda.so.1"]
        + ["-o", str(driver)]
    )
    return [runtime, driver]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    sys.stdout.write(":".join(map(str, build())))
