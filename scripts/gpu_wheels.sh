#!/usr/bin/env bash
# Fetches into .whl/ what a machine with PyTorch and its usual company lacks to run
# scripts/gpu_report.sh without a network: the pinned versions, for Python 3.12 on x86-64.
#
#   ./scripts/gpu_wheels.sh [PACKAGE …]     default: the packages below; more where it lacks more
#
#   PYTHON_VERSION  default: 3.12
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=(torchtitan opacus dp-accounting pld-accounting transformers tomli torchdata datasets tyro
    docstring-parser typeguard dm-tree multiprocess dill pytest)
platforms=() pins=()
for tag in manylinux1 manylinux2014 manylinux_2_{17,24,27,28,31,34,35}; do
    platforms+=(--platform "${tag}_x86_64")
done
for package in "${packages[@]}" "$@"; do
    pin="$(grep -i "^$package==" constraints.txt | grep -v "python_full_version <" | head -n 1 || true)"
    [[ -n "$pin" ]] || { echo "gpu_wheels.sh: $package: constraints.txt has none" >&2; exit 2; }
    pins+=("${pin%% *}")
done
python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d .whl "${pins[@]}"
du -sh .whl
