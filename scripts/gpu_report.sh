#!/usr/bin/env bash
# What one GPU can show in so many minutes; scripts/benchmarking/gpu_parts.py has the options.
#
#   ./scripts/gpu_report.sh --minutes N [--out FOLDER] [--dry_run | --rehearse] [PART …]
#   ./scripts/gpu_report.sh --row ARM T MBS CONFIG [--section.key value …]
#   ./scripts/gpu_report.sh --predict FOLDER
#
# A second call of --minutes goes on where the first ended, if outputs/ was kept.
# On a bare machine without network and .venv, wheels that scripts/gpu_wheels.sh left in .whl/ are
# installed aside, in TMPDIR, and its own python3 is used.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G ".whl/*.whl" >/dev/null && [[ -z "${TORCHTITAN_DP_PYTHON:-}" && ! -e .venv ]]; then
    TORCHTITAN_DP_PYTHON="$(command -v python3)"
    site="${TMPDIR:-/tmp}/torchtitan_dp_site"
    [[ -d "$site" ]] || "$TORCHTITAN_DP_PYTHON" -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --target "$site" .whl/*.whl
    export TORCHTITAN_DP_PYTHON PYTHONPATH="$PYTHONPATH:$site"
fi
./scripts/setup.sh
# One machine: names need not resolve, and only the loopback interface may be there.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
# Several parts share its cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" TORCHINDUCTOR_COMPILE_THREADS=2
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}" PYTHONUNBUFFERED=1
exec "${TORCHTITAN_DP_PYTHON:-$ROOT/.venv/bin/python}" scripts/benchmarking/gpu_parts.py "$@"
