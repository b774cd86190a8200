#!/usr/bin/env bash
# What one GPU can show, in parts of at most 8 minutes each:
#
#   ./scripts/gpu_report.sh [--dry_run] [PART …]      default: all parts, in the order below
#
#   GPU_REPORT       the folder of the results; default: outputs/gpu_report
#   GPU_REPORT_LIMIT seconds a part may take; default: 480
#
# A part leaves PART.log, what it measured in PART.result.json, and PART.json: its status, seconds
# and command. report.md is written anew after each. Parts that have succeeded are not run again:
# remove their PART.json for that. Benchmarks that ran out of time go on where they were.
# Exit code 1 if a part failed. Without a CUDA device each part says so, and nothing is run.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
"$ROOT/scripts/setup.sh"
PY="${TORCHTITAN_DP_PYTHON:-$ROOT/.venv/bin/python}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
OUT="${GPU_REPORT:-$ROOT/outputs/gpu_report}"
LIMIT="${GPU_REPORT_LIMIT:-480}"

dry_run=""
if [[ "${1:-}" == --dry_run ]]; then
    dry_run=1
    shift
fi
wanted=("$@")
known=()
failed=0
device="$("$PY" -c 'import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name())')"
# The longest rows: at 64k tokens TorchTitan's logits alone take 100 GB.
gib="$("$PY" -c 'import torch
c = torch.cuda; print(c.get_device_properties(0).total_memory >> 30 if c.is_available() else 0)')"
long=32k long_tokens=32768
((gib < 120)) || long=64k long_tokens=65536
[[ -n "$dry_run" ]] || (umask 077 && mkdir -p "$OUT/runs")

part() { # name, command …: run it, unless it is not wanted or done
    local name="$1" status code=0 began
    shift
    known+=("$name")
    if [[ ${#wanted[@]} -gt 0 && " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [[ -n "$dry_run" ]]; then
        echo "$name: $*"
        return
    fi
    if grep -qs '"status": "ok"' "$OUT/$name.json"; then
        echo "$name: done already"
        return
    fi
    began=$SECONDS
    if [[ "$device" == False ]]; then
        status="no CUDA device"
    else
        echo "$name: running, $LIMIT s at most ($OUT/$name.log)"
        timeout --kill-after=30 "$LIMIT" "$@" >"$OUT/$name.log" 2>&1 || code=$?
        case $code in
            0) status="ok" ;;
            124 | 137) status="out of time" ;;
            *) status="failed with exit code $code" ;;
        esac
    fi
    [[ "$status" == ok || "$status" == "no CUDA device" ]] || failed=1
    echo "$name: $status"
    "$PY" scripts/benchmarking/gpu_parts.py report "$OUT" "$name" "$status" $((SECONDS - began)) "$*"
}

train() { # name, more overrides: twelve steps of the debug model
    local name="$1"
    shift
    part "$name" env NGPU=1 ./run_train.sh --job.dump_folder "$OUT/runs/$name" \
        --training.steps 12 --checkpoint.interval 6 --validation.freq 6 "$@"
}

rows() { # name, tokens, arms, more: throughput and memory of 1B against plain TorchTitan
    local name="$1" tokens="$2" arms="$3"
    shift 3
    part "$name" "$PY" scripts/benchmark.py --config train_configs/llama3_1b_64k.toml --devices 1 \
        --arms "$arms" --batch_sizes 1 --microbatches 2 --rounds 5 --training.seq_len "$tokens" \
        --json "$OUT/$name.result.json" "$@"
}

parts="scripts/benchmarking/gpu_parts.py"
# First what decides whether to train here at all: kernels, the privacy of every method, a run.
part machine "$PY" "$parts" machine --json "$OUT/machine.result.json"
# By name: to collect all tests would take most of a part's time.
mapfile -t kernels < <(grep -rl --include="test_*.py" "pytest\.mark\.cuda" tests | grep -v selfcheck/)
part tests ./scripts/run_tests.sh -m cuda -q -rf --junitxml "$OUT/tests.xml" "${kernels[@]}"
part selfcheck env TORCH_LOGS=recompiles "$PY" -m torchtitan_dp.selfcheck \
    --json "$OUT/selfcheck.result.json"
# Two ranks on one device: NCCL refuses that, gloo does not.
part two_ranks env TORCH_LOGS=recompiles "$PY" -m torch.distributed.run --standalone \
    --nproc_per_node 2 -m torchtitan_dp.selfcheck --backend cpu:gloo,cuda:gloo \
    --json "$OUT/two_ranks.result.json"
train train
# Stopped by a signal; the same command goes on from what was saved.
part resume env NGPU=1 bash scripts/benchmarking/stop_and_resume.sh "$OUT/runs/resume"
# Then what it costs.
rows rows_16k 16384 microbatch
part plan_16k "$PY" "$parts" plan "$OUT/rows_16k.result.json" --json "$OUT/plan_16k.result.json"
buckets=(--training.seq_len 2048 --training.mixed_precision_param bfloat16 --data.length_buckets)
train compile --compile.enable "${buckets[@]}"
train mbs4_compiled --training.local_batch_size 4 --compile.enable "${buckets[@]}"
# Then the rest, the tests of the selfcheck itself among it.
part selfcheck_tests ./scripts/run_tests.sh -m cuda -q -rf \
    --junitxml "$OUT/selfcheck_tests.xml" tests/selfcheck/test_cuda.py
train offload --activation_checkpoint.mode full --activation_checkpoint.offload_inputs
train mbs4 --training.local_batch_size 4
rows rows_16k_compiled 16384 microbatch --compile.enable
rows rows_2k 2048 microbatch
rows rows_2k_compiled 2048 microbatch --compile.enable
rows rows_2k_mbs4 2048 "V2,ghost" --batch_sizes 4
rows rows_2k_mbs4_compiled 2048 V2 --batch_sizes 4 --compile.enable
rows "rows_$long" "$long_tokens" "microbatch + AC"
rows "rows_${long}_compiled" "$long_tokens" "microbatch + AC" --compile.enable
part plan "$PY" "$parts" plan "$OUT"/rows_{2k,16k,"$long"}.result.json \
    --json "$OUT/plan.result.json"

for name in ${wanted[@]+"${wanted[@]}"}; do
    [[ " ${known[*]} " == *" $name "* ]] || {
        echo "gpu_report.sh: no part '$name'; there are: ${known[*]}" >&2
        exit 2
    }
done
[[ -n "$dry_run" ]] || echo "report: $OUT/report.md"
exit $failed
