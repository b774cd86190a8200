#!/usr/bin/env bash
# Asks a run of the debug model to stop after its first checkpoint, and lets the same command end it.
#
#   bash scripts/benchmarking/stop_and_resume.sh FOLDER
#
# Fails unless the first call ends with 75, which says that it was stopped, and the second with 0.
set -euo pipefail

folder="$1"
run=(./run_train.sh train_configs/llama3_debug.toml --job.dump_folder "$folder")
run+=(--training.steps 40 --checkpoint.interval 5)
"${run[@]}" &
launcher=$!
until [[ -d "$folder/checkpoint/step-5" ]]; do
    kill -0 "$launcher" || {
        echo "the run ended before its first checkpoint" >&2
        exit 1
    }
    sleep 1
done
kill -USR1 "$launcher"
code=0
wait "$launcher" || code=$?
[[ $code == 75 ]] || {
    echo "a run that was asked to stop ended with $code, not 75" >&2
    exit 1
}
"${run[@]}"
