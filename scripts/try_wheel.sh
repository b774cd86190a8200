#!/usr/bin/env bash
# Builds the sdist and the wheel, installs the wheel in an empty environment, and runs every command
# outside the repository: ./scripts/try_wheel.sh [FOLDER]
#
#   FOLDER  gets the sdist and the wheel; default: they are removed, like all else that this makes
#   PYTHON  the Python (3.10 or newer) to try the wheel with; default: as for setup.sh
#
# The environment has the packages of constraints.txt, with the build of torch that pip finds first.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
PY="${TORCHTITAN_DP_PYTHON:-$ROOT/.venv/bin/python}"
BASE="${PYTHON:-$("$PY" -c 'import sys; print(sys._base_executable)')}"

keep=""
if [[ -n "${1:-}" ]]; then keep="$(mkdir -p "$1" && cd "$1" && pwd -P)"; fi
tmp="$(mktemp -d)"
trap 'rm -rf "$tmp"' EXIT
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

run() { # prints what the command printed only if it fails
    "$@" >"$tmp/log" 2>&1 || {
        local code=$?
        cat "$tmp/log" >&2
        echo "try_wheel.sh: failed with exit code $code: $*" >&2
        exit 1
    }
}

printed() { # what the command printed last has this in it
    grep -qF -- "$1" "$tmp/log" || {
        cat "$tmp/log" >&2
        echo "try_wheel.sh: this should have '$1' in it" >&2
        exit 1
    }
}

# From a copy of what git knows: setuptools writes into the tree. The wheel is the sdist's.
mkdir "$tmp/copy" "$tmp/dist"
git -C "$ROOT" ls-files -z | tar -C "$ROOT" --null -T - -c | tar -C "$tmp/copy" -x
cd "$tmp/copy"
run "$PY" -c 'from setuptools import build_meta; build_meta.build_sdist("../dist")'
cd "$tmp/dist"
run "$PY" -m pip wheel --no-deps --no-build-isolation ./*.tar.gz

run "$BASE" -m venv "$tmp/venv"
# Not compiled: most of it is never imported.
run "$tmp/venv/bin/python" -m pip install --no-compile -c "$ROOT/constraints.txt" ./*.whl
run "$tmp/venv/bin/python" -m pip check
run "$tmp/venv/bin/python" -c 'import platform, torch
print(f"Python {platform.python_version()}, torch {torch.__version__}")'
tried="$(tail -n 1 "$tmp/log")"

mkdir "$tmp/elsewhere"
cd "$tmp/elsewhere"
export HOME="$tmp/elsewhere" NGPU=1 OMP_NUM_THREADS=1
dp="$tmp/venv/bin/torchtitan-dp"
run "$dp" --help
printed "llama3_debug"
for command in $(sed -n 's/^  \([a-z]*\)  .*/\1/p' "$tmp/log"); do
    run "$dp" "$command" --help
    printed "usage: "
done

small=(--training.seq_len 128 --training.steps 2 --training.global_batch_size 4
    --validation.steps 1 --lr_scheduler.warmup_steps 1)
run "$dp" plan llama3_debug "${small[@]}"
printed "epsilon"
run "$dp" data llama3_debug "${small[@]}"
run "$dp" train llama3_debug "${small[@]}"
printed "done: 2 steps"
run "$dp" ledger outputs/llama3_debug
printed "epsilon"
run "$dp" release outputs/llama3_debug released
[[ -f released/README.md && -f released/privacy.json ]]
run "$dp" selfcheck
printed "passed"

if [[ -n "$keep" ]]; then cp "$tmp"/dist/* "$keep"; fi
echo "try_wheel.sh: passed: $(basename "$tmp"/dist/*.whl), $tried"
