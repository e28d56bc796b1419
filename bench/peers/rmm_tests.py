#!/usr/bin/env python3
"""Builds RMM's own tests on vramp's resource, and runs them.

    rmm_tests.py RMM GOOGLETEST OUT -- COMPILER-OPTIONS...

RMM and GOOGLETEST are checkouts. The options name the include folders of vramp, CCCL, rapids-logger and CUDA, and
the libraries vramp, rmm, rapids_logger and cudart. RMM's library is that of the same checkout.

In the tests `rmm::mr::cuda_memory_resource` and the current device's resource become vramp's, so that its adaptors
and pools stand on vramp too, and each stream is forgotten before it is destroyed. Without arguments after OUT the
programs of an earlier call are run: on another machine too.
"""

import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent

# Tests of resources and containers that have no kernels of their own. Not here: those of what vramp has no part in
# (streams, logger, prefetch, managed, system and pinned memory, the driver's own pools).
TESTS = """
mr/mr_ref_cuda_tests mr/mr_ref_default_tests mr/mr_ref_thread_safe_tests mr/mr_ref_pool_tests mr/mr_ref_arena_tests
mr/mr_ref_binning_tests mr/mr_ref_fixed_size_tests mr/mr_ref_statistics_tests mr/mr_ref_tracking_tests
mr/mr_ref_failure_callback_tests mr/mr_ref_aligned_tests mr/mr_ref_limiting_tests mr/mr_ref_callback_tests
mr/mr_ref_logging_tests mr/adaptor_tests mr/cccl_adaptor_tests mr/pool_mr_tests mr/arena_mr_tests mr/binning_mr_tests
mr/callback_mr_tests mr/statistics_mr_tests mr/tracking_mr_tests mr/limiting_mr_tests mr/failure_callback_mr_tests
mr/aligned_mr_tests mr/polymorphic_allocator_tests mr/stream_allocator_adaptor_tests device_uvector_tests
device_scalar_tests
""".split()

REPLACED = [
    (r"\brmm::mr::cuda_memory_resource\b", "vramp_tests::resource"),
    (r"\brmm::cuda_stream\b", "vramp_tests::stream"),
]


# What vramp does otherwise.
LEFT_OUT = {
    "mr_ref_default_tests": "DefaultTest.GetCurrentDeviceResourceRef",  # the default is vramp here
    "device_uvector_tests": "DeviceUVectorAlignmentTest.LargeAlignment",  # alignments above 256 are served
    "device_scalar_tests": "DeviceScalarAlignmentTest.LargeAlignment",  # as above
}


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    rmm, googletest, out = map(pathlib.Path, sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    if "--" in sys.argv:
        build(rmm, googletest, out, sys.argv[sys.argv.index("--") + 1 :])
    passed = {test: run(out / name(test)) for test in TESTS}
    failed = [test for test in TESTS if not passed[test]]
    print(f"{sum(passed.values())} tests of {len(TESTS) - len(failed)} programs passed")
    print("".join(f"failed: {it}\n" for it in failed), end="")
    sys.exit(bool(failed))


def name(test):
    return test.rsplit("/", 1)[-1]


def build(rmm, googletest, out, options):
    tests = out / "tests"
    for source in (rmm / "cpp/tests").rglob("*.[ch]pp"):
        text = source.read_text()
        for old, new in REPLACED:
            text = re.sub(old, new, text)
        copy = tests / source.relative_to(rmm / "cpp/tests")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    includes = [f"-I{googletest}/{part}{folder}" for part in ("googletest", "googlemock") for folder in ("/include", "")]
    compiler = ["g++", "-std=c++20", "-O0", "-w", "-pthread", f"-I{HERE}", f"-I{rmm}/cpp/include", *includes]
    libraries = [it for it in options if it.startswith(("-l", "-L", "-Wl"))]
    compiler += [it for it in options if it not in libraries]
    parts = {
        "gtest": googletest / "googletest/src/gtest-all.cc",
        "gmock": googletest / "googlemock/src/gmock-all.cc",
        "main": HERE / "rmm_tests_main.cpp",
    }
    for part, source in parts.items():
        if not (out / f"{part}.o").exists():
            subprocess.run([*compiler, "-c", source, "-o", out / f"{part}.o"], check=True)
    common = [out / f"{part}.o" for part in parts]
    for test in TESTS:
        source, program = tests / f"{test}.cpp", out / name(test)
        if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
            continue
        print("building", test, flush=True)
        command = [*compiler, "-include", HERE / "rmm_tests.hpp", source, *common, "-o", program, *libraries]
        if subprocess.run(command).returncode:
            print(f"{test} does not compile", flush=True)


def run(program):
    """Returns the number of tests that passed; zero if one failed."""
    if not program.exists():
        return 0
    try:
        command = [program.resolve(), f"--gtest_filter=*-{LEFT_OUT.get(program.name, '')}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        print(f"{program.name}: no end after 600 seconds", flush=True)
        return 0
    lines = done.stdout.splitlines()
    last = [line for line in lines if "PASSED" in line or "FAILED" in line or "SKIPPED" in line]
    print(f"{program.name}: status {done.returncode}; {'; '.join(last[-8:])}", flush=True)
    if done.returncode:
        print("\n".join(lines[-30:]) + done.stderr[-2000:])
    passed = re.search(r"PASSED\s*\] (\d+) test", done.stdout)
    return int(passed[1]) if passed and done.returncode == 0 else 0


if __name__ == "__main__":
    main()
