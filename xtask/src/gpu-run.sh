#!/usr/bin/env bash
# Runs everything in this folder on a machine with a card and leaves the results as files in $OUT.
# Ends with 1 if anything failed; summary.txt says what.
set -uo pipefail
cd "$(dirname "$0")"
OUT=${OUT:-results}
mkdir -p "$OUT"
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

note machine uname -a
note card nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
note conformance timeout 300 bin/conformance
note facts timeout 300 bin/facts
note torture timeout 300 bin/torture cuda --seconds "${TORTURE_SECONDS:-20}"
note torture-vpmm timeout 300 bin/torture cuda --preset vpmm --seconds 10 --fill 20
note lifecycle timeout 900 bin/vramp-bench lifecycle --device cuda:0 --steps "${LIFECYCLE_STEPS:-20000}"
note larger-than-the-card timeout 120 bin/larger_than_the_card cuda
note spill-soak timeout 900 bin/spill_soak cuda --seconds "${SOAK_SECONDS:-20}"
note overhead timeout 120 bin/overhead cuda:0
for test in tests/*; do
    note "$(basename "$test")" timeout 300 "$test"
done
note info timeout 60 bin/vramp info
for trace in traces/*.pickle* traces/*.vtrace; do
    [ -e "$trace" ] || continue
    for device in cuda sim:h200; do
        name=replay-$(basename "$trace")-${device//:/-}
        note "$name" timeout 600 bin/vramp replay "$trace" --allocator all --device "$device" --json
    done
done
note tiers timeout 60 bin/vramp tiers --directory . --measure
for bench in reserve copy "disk --dir ."; do
    # shellcheck disable=SC2086
    note "bench-${bench%% *}" timeout 300 bin/vramp bench $bench --json
done
note bench-graphs timeout 300 bin/vramp bench graphs --device cuda --json
note read-in-place timeout 120 bin/read_in_place cuda:0
note bench-spill timeout 300 bin/vramp bench spill --device cuda --json
# PyTorch's jobs, where somebody says which: WORKLOADS=file.py, and what else in TORCH_ARGS.
if [ -n "${WORKLOADS:-}" ]; then
    # shellcheck disable=SC2086
    note torch-workloads timeout "${TORCH_SECONDS:-3600}" \
        python3 torch/torch-workloads.py "$WORKLOADS" ${TORCH_ARGS:-}
fi
# What vramp promises in PyTorch: CHECK_TORCH=1, and what else in CHECK_ARGS, such as a part of names.
if [ -n "${CHECK_TORCH:-}" ]; then
    # shellcheck disable=SC2086
    note check-torch timeout 3600 python3 torch/check-torch.py ${CHECK_ARGS:-}
fi
# What models allocate while a graph is captured: RECORD_CAPTURES=1, into $OUT/captures.
if [ -n "${RECORD_CAPTURES:-}" ]; then
    note record-captures timeout 1800 python3 torch/record-captures.py "$OUT/captures"
fi
# What captures need in an arena: those that came along, and those made just now.
graphs() {
    local capture
    for capture in "$2"/*.pickle.gz; do
        [ -e "$capture" ] || continue
        note "$1-$(basename "$capture" .pickle.gz)" timeout 300 bin/vramp graph "$capture" --json
    done
}
graphs graph captures
graphs graph-recorded "$OUT/captures"
exit "$failed"
