#!/usr/bin/env bash
# Builds the harness for each allocator on a machine with a card, CUDA, g++ and torch, and runs the
# same loops on all of them: one JSON line each on standard output.
#
#   run.sh LIBVRAMP_FOLDER VRAMP_H_FOLDER [SNAPSHOT.pickle.gz...]
set -euo pipefail
library=$(realpath "$1") header=$(realpath "$2")
shift 2
traces=("$@")
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
cuda=${CUDA_HOME:-/usr/local/cuda}
torch=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__))')
nvidia=$torch/../nvidia/cu13/lib
common=(-O2 -I"$here" -I"$cuda/include" -L"$cuda/lib64" -lcudart -lpthread)
paths=-Wl,--allow-shlib-undefined,--disable-new-dtags,-rpath,$torch/lib,-rpath,$nvidia,-rpath,$cuda/lib64,-rpath,$library
g++ -std=c++17 "$here/driver_replay.cpp" -o "$build/driver" "${common[@]}" "$paths" &
g++ -std=c++17 "$here/vramp_replay.cpp" -o "$build/vramp" -I"$header" -L"$library" -lvramp "${common[@]}" "$paths" &
g++ -std=c++20 "$here/torch_replay.cpp" -o "$build/torch" -I"$torch/include" -L"$torch/lib" -lc10_cuda -lc10 "${common[@]}" "$paths" &
bins=()
for trace in "${traces[@]}"; do
    bin=$build/$(basename "${trace%%.*}").bin
    python3 "$here/trace-to-bin.py" "$trace" "$bin"
    bins+=("$bin")
done
wait
for allocator in vramp torch expandable driver; do
    program=$allocator
    unset PYTORCH_CUDA_ALLOC_CONF
    if [ "$allocator" = expandable ]; then
        program=torch
        export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    fi
    "$build/$program" hot --n 5000 --cap 0.2
    "$build/$program" threads --secs 0.5
    for bin in "${bins[@]}"; do
        "$build/$program" replay "$bin" --passes 2 --noprobe
    done
done
rm -rf "$build"
