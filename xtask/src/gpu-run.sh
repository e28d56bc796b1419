#!/usr/bin/env bash
# Runs everything in this folder on a machine with a card and leaves the results as files in $OUT.
# Ends with 1 if anything failed; summary.txt says what. PARTS chooses some of card, traces, bench, python and
# graphs; all by default.
set -uo pipefail
cd "$(dirname "$0")"
OUT=${OUT:-results}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
: > "$OUT/summary.txt"
failed=0

# note NAME COMMAND...: runs it, its output in $OUT/NAME.txt, its errors in $OUT/NAME.err.
note() {
    local name=$1 start=$SECONDS status=0
    shift
    "$@" > "$OUT/$name.txt" 2> "$OUT/$name.err" || status=$?
    [ -s "$OUT/$name.err" ] || rm -f "$OUT/$name.err"
    [ "$status" -eq 0 ] || failed=1
    echo "$name: status $status, $((SECONDS - start)) s" | tee -a "$OUT/summary.txt"
}

# The Python package, and PyTorch and the other libraries on it where they are installed.
export PYTHONPATH=$PWD/site PYTHONDONTWRITEBYTECODE=1 VRAMP_CACHE_DIR=$PWD/cache
has() {
    python3 -c "import $1" 2> /dev/null
}
# tests NAME SECONDS FOLDER: tests in Python, with the pytest that came along.
tests() {
    note "$1" timeout "$2" env PYTHONPATH="$PYTHONPATH$(printf ':%s' "$PWD"/pytest/*.whl)" \
        python3 -m pytest -q -rs -p no:cacheprovider "$3"
}

part_card() {
    note conformance timeout 300 bin/vramp-check conformance cuda:0
    note facts timeout 300 bin/facts
    note torture timeout 300 bin/vramp-check torture cuda --seconds "${TORTURE_SECONDS:-20}"
    note torture-vpmm timeout 300 bin/vramp-check torture cuda --preset vpmm --seconds 10 --fill 20
    note kv-soak timeout 300 bin/vramp-check kv-soak cuda --operations "${KV_OPERATIONS:-100000}"
    note lifecycle timeout 900 bin/vramp-check lifecycle --device cuda:0 --steps "${LIFECYCLE_STEPS:-20000}"
    note larger-than-the-card timeout 120 bin/larger_than_the_card cuda
    note spill-soak timeout 900 bin/vramp-check spill-soak cuda --seconds "${SOAK_SECONDS:-20}"
    note sleep-soak timeout 900 bin/vramp-check sleep-soak cuda --moves "${SLEEP_MOVES:-1000}"
    note overhead timeout 120 bin/overhead cuda:0
    note cudarc timeout 300 bin/card
    note cudarc-hit timeout 120 bin/hit
    for test in tests/*; do
        note "$(basename "$test")" timeout 300 "$test"
    done
}

part_traces() {
    note info timeout 60 bin/vramp info
    for trace in traces/*.pickle* traces/*.vtrace; do
        [ -e "$trace" ] || continue
        for device in cuda sim:h200; do
            name=replay-$(basename "$trace")-${device//:/-}
            note "$name" timeout 600 bin/vramp replay "$trace" --allocator all --device "$device" --json
        done
    done
}

part_bench() {
    note tiers timeout 60 bin/vramp tiers --directory . --measure
    for bench in reserve copy "disk --dir ."; do
        # shellcheck disable=SC2086
        note "bench-${bench%% *}" timeout 300 bin/vramp bench $bench --json
    done
    note bench-graphs timeout 300 bin/vramp bench graphs --device cuda --json
    note read-in-place timeout 120 bin/read_in_place cuda:0
    note bench-spill timeout 300 bin/vramp bench spill --device cuda --json
}

part_python() {
    note python-doctor timeout 300 python3 -m vramp doctor
    tests python-card 600 python/tests_card
    if has torch; then
        # shellcheck disable=SC2086
        note check-torch timeout 3600 python3 bench/check-torch.py ${CHECK_ARGS:-}
        # shellcheck disable=SC2086
        note check-programs timeout 3600 python3 bench/check-programs.py ${PROGRAM_ARGS:-}
        for allocator in vramp native; do
            VRAMP_TEST_DEVICE=cuda VRAMP_TEST_ALLOCATOR=$allocator tests "torch-$allocator" 1800 python/tests/torch
        done
    else
        echo "torch: left out, because python3 cannot import it" | tee -a "$OUT/summary.txt"
    fi
    if has cupy || has numba.cuda || has rmm || has cuda.core; then
        note check-arrays timeout 3600 python3 bench/check-arrays.py
    else
        echo "check-arrays: left out, because python3 has none of its libraries" | tee -a "$OUT/summary.txt"
    fi
    # Pauses and resumes, beside torch_memory_saver where it is installed.
    savers=vramp,vramp-ahead
    llamas=plain,vramp-awake,vramp-regions,vramp
    if has torch_memory_saver; then
        savers=$savers,torch_memory_saver
        llamas=$llamas,torch_memory_saver
    fi
    note sleep-device timeout 600 python3 bench/sleep-device.py --systems "$savers"
    if has torch; then
        note sleep-llama timeout 600 python3 bench/sleep-llama.py --savers "$llamas"
    fi
    # PyTorch's jobs, where WORKLOADS=file.py names them; TORCH_ARGS has further arguments.
    if [ -n "${WORKLOADS:-}" ]; then
        # shellcheck disable=SC2086
        note torch-workloads timeout "${TORCH_SECONDS:-3600}" \
            python3 bench/torch-workloads.py "$WORKLOADS" ${TORCH_ARGS:-}
    fi
    # What models allocate while a graph is captured: RECORD_CAPTURES=1, into $OUT/captures.
    if [ -n "${RECORD_CAPTURES:-}" ]; then
        note record-captures timeout 1800 python3 bench/record-captures.py "$OUT/captures"
    fi
}

# What captures need in an arena: those that came along, and those made just now.
graphs() {
    local capture
    for capture in "$2"/*.pickle.gz; do
        [ -e "$capture" ] || continue
        note "$1-$(basename "$capture" .pickle.gz)" timeout 300 bin/vramp graph "$capture" --json
    done
}

part_graphs() {
    graphs graph captures
    graphs graph-recorded "$OUT/captures"
}

note machine uname -a
note card nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
for part in ${PARTS:-card traces bench python graphs}; do
    if ! declare -F "part_$part" > /dev/null; then
        echo "there is no part $part" | tee -a "$OUT/summary.txt"
        failed=1
    else
        "part_$part"
    fi
done
exit "$failed"
