#!/usr/bin/env bash
# Trains on one machine: ./run_train.sh [CONFIG] [--section.key value …]
#
#   NGPU         processes; default: one for each CUDA device, or 2 on a machine without
#   CONFIG_FILE  the TOML, where none is given; default: the demo, train_configs/demo.toml
#   LOG_RANK     ranks whose output is shown, as "0,1"; default: 0
#   NO_COLOR     no colours, as where the output is no terminal
#
# Ctrl-C, SIGTERM, SIGUSR1, SIGHUP (a dropped ssh; not under nohup): the run saves a checkpoint after
# its step, and ends; Ctrl-C again: at once.
# Exit code 2: the configuration is wrong, one line says how, and nothing was started.
# Exit code 75: stopped by such a signal; the same command goes on.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
"$ROOT/scripts/setup.sh"
PY="${TORCHTITAN_DP_PYTHON:-$ROOT/.venv/bin/python}"
if [[ -n "${TORCHTITAN_DP_PYTHON:-}" ]]; then # the package is not installed there
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
fi

if [[ -n "${1:-}" && "$1" != -* ]]; then # the command takes it, also a shipped one's name
    config=()
elif [[ -n "${CONFIG_FILE:-}" ]]; then
    config=(--job.config_file "$CONFIG_FILE")
else # from any folder
    config=(--job.config_file "$ROOT/train_configs/demo.toml" --model.hf_assets_path "$ROOT/examples/pretrained")
fi
for arg in "$@"; do
    case "$arg" in
        -h | --help) exec "$PY" -m torchtitan_dp train --help ;;
        --job.config[_-]file | --job.config[_-]file=*) config=() ;;
    esac
done

# exec: a signal to this script is a signal to the launcher, which checks everything first.
# ${config[@]+…}: an empty array counts as unset in bash before 4.4.
exec "$PY" -m torchtitan_dp train ${config[@]+"${config[@]}"} "$@"
