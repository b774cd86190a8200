#!/usr/bin/env bash
# Runs the tests: ./scripts/run_tests.sh [pytest arguments].
#
#   ./scripts/run_tests.sh        what needs no other process, and one run of two processes: minutes
#   ./scripts/run_tests.sh all    what CI runs
#   ./scripts/run_tests.sh -m thorough   further cases of what CI checks in others
#   ./scripts/run_tests.sh -m mutants    every fault of tests/hazards against its test
#   ./scripts/run_tests.sh -m cuda   what needs a CUDA device, which all others are not shown
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
PY="${TORCHTITAN_DP_PYTHON:-$ROOT/.venv/bin/python}"

cd "$ROOT"
# A test may start several processes: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cores="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
# A file stays on one core, for its fixtures; tests/conftest.py says which files come first.
parallel=(-q --dist loadfile --no-loadscope-reorder)
case "${1:-}" in
    "")
        export TORCHTITAN_DP_QUICK_TESTS=1
        echo "Quick tests: those that start other processes are skipped ($0 all runs them)…"
        set -- "${parallel[@]}" -n "$cores" -m "not slow"
        ;;
    # One more than there are cores: tests of what hangs wait.
    all) set -- "${parallel[@]}" -n "$((cores + 1))" --durations=10 "${@:2}" ;;
esac
exec "$PY" -m pytest "$@"
