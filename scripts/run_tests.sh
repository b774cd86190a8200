#!/usr/bin/env bash
# Runs the tests: ./scripts/run_tests.sh [pytest arguments]. Without arguments, the whole suite.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
PY="${TORCHTITAN_DP_PYTHON:-$ROOT/.venv/bin/python}"

cd "$ROOT"
# The distributed tests start several processes: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PY" -m pytest "${@:--q}"
