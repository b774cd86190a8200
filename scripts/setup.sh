#!/usr/bin/env bash
# Makes .venv at the root of the repository with the pinned packages of constraints.txt.
# Silent when it is done already. Callers then use .venv/bin/python.
#
#   PYTHON                the Python (3.10 or newer) to build .venv with; default: the one that
#                         .venv has, else python3
#   TORCH_BUILD           "cuda": makes .venv-cuda instead, with PyPI's CUDA build of torch, also
#                         where pip would take another; it runs without a GPU too
#   TORCHTITAN_DP_PYTHON  a Python that has everything already, for clusters with their own
#                         torch. It is used as it is: no .venv is made and nothing is installed.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
NAME=".venv${TORCH_BUILD:+-$TORCH_BUILD}"
VENV="$ROOT/$NAME"
LOG="$VENV-setup.log" # the lock of this script as well

fail() {
    echo "setup.sh: $*" >&2
    exit 1
}

version() { # of the Python in $1; fails where it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

[[ "${TORCH_BUILD:-cuda}" == cuda ]] || fail "TORCH_BUILD=$TORCH_BUILD: set it to cuda, or unset it"

if [[ -n "${TORCHTITAN_DP_PYTHON:-}" ]]; then
    version "$TORCHTITAN_DP_PYTHON" >/dev/null ||
        fail "TORCHTITAN_DP_PYTHON=$TORCHTITAN_DP_PYTHON does not run; name a Python, or unset it"
    # Its packages are the cluster's own. Another torch than a tested one may do; the trainer extends
    # this TorchTitan alone.
    wrong="$("$TORCHTITAN_DP_PYTHON" - "$ROOT" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

sys.path.insert(0, sys.argv[1])
from torchtitan_dp.base.process import untested

try:
    found = version("torchtitan")
    if not found.startswith("0.2.2"):
        print(f"torchtitan is {found}, not 0.2.2", end="; ")
    sys.stderr.writelines(f"setup.sh: {line}\n" for line in untested())
except PackageNotFoundError as error:
    print(f"{error.args[0]} is not installed", end="; ")
PY
    )"
    [[ -z "$wrong" ]] ||
        fail "TORCHTITAN_DP_PYTHON=$TORCHTITAN_DP_PYTHON: ${wrong}install it there, or unset this"
    exit 0
fi

if [[ -z "${PYTHON:-}" ]] && version "$VENV/bin/python" >/dev/null; then
    PYTHON="$VENV/bin/python"
fi
PYTHON="${PYTHON:-python3}"
remedy="install Python 3.10 or newer and run again with PYTHON=/path/to/python3"
PY_VERSION="$(version "$PYTHON")" || fail "no working Python at '$PYTHON': $remedy"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$PYTHON' is Python $PY_VERSION: $remedy"

# A change of the pins, of the Python or of the place (the install is editable) asks for a new one.
stamp="$(
    {
        cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
        echo "$PY_VERSION $ROOT"
    } | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
)"
is_done() {
    [[ "$(cat "$VENV/.setup-stamp" 2>/dev/null)" == "$stamp" && -x "$VENV/bin/python" ]]
}
if is_done; then exit 0; fi

exec 9>>"$LOG" || fail "cannot write in $ROOT; run scripts/setup.sh as its owner first"
if command -v flock >/dev/null && ! flock -n 9; then
    echo "Waiting for another process that sets up $NAME…"
    flock 9
    if is_done; then exit 0; fi
fi

case "$(cat "$VENV/.setup-stamp" 2>/dev/null)" in
    "" | incomplete) why="first time, a few minutes" ;;
    *) why="the pins, the Python or the place changed" ;;
esac
echo "Setting up $NAME for Python $PY_VERSION ($why; log: $NAME-setup.log)…"
: >"$LOG"

# One that was stopped half-way starts afresh.
if [[ "$(cat "$VENV/.setup-stamp" 2>/dev/null)" == incomplete ]] ||
    [[ "$(version "$VENV/bin/python")" != "$PY_VERSION" ]] ||
    ! "$VENV/bin/python" -m pip --version >>"$LOG" 2>&1; then
    # PYTHON may be .venv's own: its base makes the new one.
    PYTHON="$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')"
    "$PYTHON" -m venv --clear "$VENV" >>"$LOG" 2>&1 ||
        fail "could not make $NAME (on Debian and Ubuntu, install python3-venv); see $LOG"
fi
echo incomplete >"$VENV/.setup-stamp"

# pip takes the first of the pin's builds that its indexes and links list; a later one has a label.
pin="$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")"
build=() # of torch, where it is not left to pip; three equal signs take no version with a label
[[ -z "${TORCH_BUILD:-}" ]] || build=("torch===$pin")
listed="$("$VENV/bin/python" -m pip index versions torch --disable-pip-version-check --no-input \
    --retries 1 --timeout 15 2>>"$LOG" || true)"
torch="$(echo "$listed" | sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' |
    grep -E "^${pin//./\\.}([+]|$)" | head -n 1 || true)"
[[ -z "${TORCH_BUILD:-}" ]] || torch="$pin"
case "$torch" in
    "") echo "torch $pin: pip's indexes do not say which build" ;;
    *+cpu) echo "torch $torch: the build without CUDA" ;;
    *+*) echo "torch $torch" ;;
    *) echo "torch $torch: PyPI's, with CUDA, several gigabytes (CONTRIBUTING.md: how to get others)" ;;
esac

install() {
    local watcher="" code=0
    if [[ -t 1 ]]; then # what pip does, until it is done
        (while sleep 1; do
            printf '\r\033[K%.78s' "$(grep -aE '^ *(Collecting|Downloading|Installing) ' "$LOG" | tail -n 1 || true)"
        done) 9>&- &
        watcher=$!
    fi
    PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input \
        -c "$ROOT/constraints.txt" "$@" >>"$LOG" 2>&1 || code=$?
    [[ -z "$watcher" ]] || { kill "$watcher" && printf '\r\033[K'; }
    ((code == 0)) || fail "pip could not install the packages (network? disk?); see $LOG, then run again"
}
# The build backend comes first, and is pinned as well: no build isolation.
echo "Installing torch, transformers and what they need…"
install setuptools
# `compat`: else a folder named torchtitan_dp beside a script, as of this clone, hides the package.
# ${build[@]+…}: an empty array counts as unset in bash before 4.4.
install --no-build-isolation --config-settings editable_mode=compat -e "${ROOT}[test]" ${build[@]+"${build[@]}"}

echo "$stamp" >"$VENV/.setup-stamp"
