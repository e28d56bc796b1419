"""Runs NVIDIA's CUDA samples without vramp and under `vramp exec`, and compares what they say.

    git clone --depth 1 https://github.com/NVIDIA/cuda-samples
    python bench/peers/cuda_samples.py cuda-samples --exec 'vramp exec' --modes record,pool,record+pool

Each sample is built with nvcc twice, with the static CUDA runtime and the shared one, and run natively twice: what differs
between these two runs (times, addresses) is no difference. Compared are the exit code or signal, and the output without
numbers. The result is a JSON line for each sample and a summary; the exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

INTRO, CONCEPTS, FEATURES = "0_Introduction", "2_Concepts_and_Techniques", "3_CUDA_Features"
LIBRARIES, DOMAIN, SPEED = "4_CUDA_Libraries", "5_Domain_Specific", "6_Performance"

SAMPLES: dict[str, tuple[str, str]] = {
    # name: (folder, words for nvcc)
    "vectorAdd": (INTRO, ""),
    "asyncAPI": (INTRO, ""),
    "clock": (INTRO, ""),
    "cudaOpenMP": (INTRO, "-Xcompiler -fopenmp"),
    "matrixMul": (INTRO, ""),
    "matrixMulDrv": (INTRO, "-lcuda"),
    "mergeSort": (INTRO, ""),
    "simpleAtomicIntrinsics": (INTRO, ""),
    "simpleCallback": (INTRO, ""),
    "simpleCooperativeGroups": (INTRO, ""),
    "simpleCubemapTexture": (INTRO, ""),
    "simpleDrvRuntime": (INTRO, "-lcuda"),
    "simpleHyperQ": (INTRO, ""),
    "simpleIPC": (INTRO, "-lrt"),
    "simpleMultiCopy": (INTRO, ""),
    "simpleMultiGPU": (INTRO, ""),
    "simpleP2P": (INTRO, ""),
    "simplePitchLinearTexture": (INTRO, ""),
    "simpleStreams": (INTRO, ""),
    "simpleTemplates": (INTRO, ""),
    "simpleTexture": (INTRO, ""),
    "simpleZeroCopy": (INTRO, ""),
    "template": (INTRO, ""),
    "UnifiedMemoryStreams": (INTRO, "-Xcompiler -fopenmp -lcublas"),
    "vectorAddDrv": (INTRO, "-lcuda"),
    "vectorAddMMAP": (INTRO, "-lcuda"),
    "vectorAdd_nvrtc": (INTRO, "-lcuda -lnvrtc"),
    "convolutionSeparable": (CONCEPTS, ""),
    "convolutionTexture": (CONCEPTS, ""),
    "histogram": (CONCEPTS, ""),
    "inlinePTX": (CONCEPTS, ""),
    "radixSortThrust": (CONCEPTS, ""),
    "reduction": (CONCEPTS, ""),
    "reductionMultiBlockCG": (CONCEPTS, "-rdc=true"),
    "sortingNetworks": (CONCEPTS, ""),
    "streamOrderedAllocation": (CONCEPTS, ""),
    "streamOrderedAllocationIPC": (CONCEPTS, "-lcuda -lrt"),
    "streamOrderedAllocationP2P": (CONCEPTS, ""),
    "threadFenceReduction": (CONCEPTS, ""),
    "threadMigration": (CONCEPTS, "-lcuda"),
    "globalToShmemAsyncCopy": (FEATURES, ""),
    "graphMemoryFootprint": (FEATURES, ""),
    "graphMemoryNodes": (FEATURES, ""),
    "jacobiCudaGraphs": (FEATURES, ""),
    "memMapIPCDrv": (FEATURES, "-lcuda -lrt"),
    "simpleCudaGraphs": (FEATURES, ""),
    "cdpSimpleQuicksort": (FEATURES, "-rdc=true -lcudadevrt"),
    "batchCUBLAS": (LIBRARIES, "-lcublas"),
    "conjugateGradient": (LIBRARIES, "-lcublas -lcusparse"),
    "conjugateGradientCudaGraphs": (LIBRARIES, "-lcublas -lcusparse"),
    "conjugateGradientMultiBlockCG": (LIBRARIES, "-rdc=true"),
    "conjugateGradientPrecond": (LIBRARIES, "-lcublas -lcusparse"),
    "conjugateGradientUM": (LIBRARIES, "-lcublas -lcusparse"),
    "matrixMulCUBLAS": (LIBRARIES, "-lcublas"),
    "simpleCUBLAS": (LIBRARIES, "-lcublas"),
    "simpleCUBLAS_LU": (LIBRARIES, "-lcublas"),
    "simpleCUFFT": (LIBRARIES, "-lcufft"),
    "BlackScholes": (DOMAIN, ""),
    "MonteCarloMultiGPU": (DOMAIN, "-lcurand"),
    "convolutionFFT2D": (DOMAIN, "-lcufft"),
    "transpose": (SPEED, ""),
}

KERNELS = {"matrixMulDrv", "vectorAddDrv", "vectorAddMMAP", "simpleDrvRuntime", "threadMigration", "memMapIPCDrv"}
"""Samples that load a kernel from a file of fat binary code beside them."""


def build(sample: str, source: Path, out: Path, runtime: str) -> str | None:
    """Builds a sample into a folder of its own. Returns why not, or none."""
    folder, words = SAMPLES[sample]
    place = source / "Samples" / folder / sample
    target = out / runtime / sample
    target.mkdir(parents=True, exist_ok=True)
    parts = sorted(part for pattern in ("*.cu", "*.cpp", "*.c") for part in place.glob(pattern))
    kernels = [part for part in parts if part.name.endswith("_kernel.cu")] if sample in KERNELS | {"vectorAdd_nvrtc"} else []
    included = {"convolutionFFT2D.cuh"}
    parts = [part for part in parts if part not in kernels and part.name not in included]
    if "IPC" in sample:
        parts.append(source / "Common" / "helper_multiprocess.cpp")
    common = ["-std=c++17", "-O1", "-Wno-deprecated-gpu-targets", "-I", str(source / "Common"), "-arch=native"]
    command = ["nvcc", *common, *map(str, parts), "-o", str(target / sample), f"-cudart={runtime}", *words.split()]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        return (built.stderr + built.stdout)[-300:]
    for kernel in kernels:
        if sample == "vectorAdd_nvrtc":
            (target / kernel.name).write_bytes(kernel.read_bytes())
            continue
        name = target / (kernel.stem + "64.fatbin")
        subprocess.run(["nvcc", *common[:3], "-fatbin", str(kernel), "-o", str(name), "-I", str(source / "Common")], check=False)
    data = place / "data"
    if data.is_dir():
        (target / "data").symlink_to(data)
    return None


def normal(text: str) -> list[str]:
    """The lines of an output without numbers, sorted: threads and processes write in any order."""
    return sorted(re.sub(r"0x[0-9a-fA-F]+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "N", line).strip() for line in text.splitlines())


def run(command: list[str], folder: Path, limit: float) -> tuple[int, list[str], str]:
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        return 1000, ["no end within the time limit"], ""
    return ended.returncode, normal(ended.stdout), ended.stderr


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("samples", type=Path)
    options.add_argument("--exec", default="vramp exec", help="the command")
    options.add_argument("--modes", default="record,pool")
    options.add_argument("--only", help="names of samples, with commas")
    options.add_argument("--runtimes", default="static,shared")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--limit", type=float, default=60, help="seconds for a run")
    given = options.parse_args()
    names = given.only.split(",") if given.only else list(SAMPLES)
    different = 0
    counts = {"built": 0, "not built": 0, "runs": 0, "different": 0}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        work = [(name, runtime) for runtime in given.runtimes.split(",") for name in names]
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            built = list(pool.map(lambda each: build(each[0], given.samples.resolve(), out, each[1]), work))
        for (name, runtime), why in zip(work, built):
            if why is not None:
                counts["not built"] += 1
                print(json.dumps({"sample": name, "runtime": runtime, "not built": why}), flush=True)
                continue
            counts["built"] += 1
            place = out / runtime / name
            program = [str(place / name)]
            native = [run(program, place, given.limit) for _ in range(2)]
            steady = native[0][1] == native[1][1]
            row: dict[str, object] = {"sample": name, "runtime": runtime, "native": native[0][0]}
            for mode in given.modes.split(","):
                words = []
                for part in mode.split("+"):
                    words += ["--record", str(place / "run.vtrace")] if part == "record" else shlex.split(f"--{part}")
                code, lines, stderr = run([*shlex.split(given.exec), *words, "--", *program], place, given.limit)
                counts["runs"] += 1
                same = code in (native[0][0], native[1][0]) and (not steady or lines == native[0][1])
                row[mode] = "same" if same else {"code": code, "stderr": stderr[-400:], "lines": [
                    line for line in lines if line not in native[0][1]][:8]}
                if not same:
                    different += 1
            print(json.dumps(row), flush=True)
    counts["different"] = different
    print(json.dumps(counts))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
