"""Stands in for a job's Python: setup.sh's questions, a plan and a launcher, all without torch.

    program = write(folder)             # TORCHTITAN_DP_PYTHON=program

The plan chooses a degree, refuses `--mistake` with exit code 2, and lasts for ever with
`--slow-plan`, as a selfcheck does with `--slow-check`. The launcher counts steps, ten a second, and
answers SIGTERM and SIGUSR1 as the real one: it saves (into `folder/saved-NODE`), and exits with 75.
`--steps N` ends it with 0 after that step, `--deaf` has it ignore SIGUSR1, `--fault` ends it with 1
at once.
"""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import os, runpy, signal, sys, time
from pathlib import Path

folder, argv = Path({folder!r}), sys.argv[1:]
if argv[0] != "-m":  # what setup.sh asks of a Python
    os.execv(sys.executable, [sys.executable, *argv])
module = argv[1]
if module == "torchtitan_dp.plan":
    if "--mistake" in argv:
        print("error: mistake = 1: omit it", file=sys.stderr)
        raise SystemExit(2)
    print("planning", file=sys.stderr)
    print("--parallelism.context_parallel_degree=2")
    while "--slow-plan" in argv:
        time.sleep(0.1)
    raise SystemExit(0)

def option(name, default):
    return argv[argv.index(name) + 1] if name in argv else default

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
signal.signal(signal.SIGUSR1, lambda *_: asked.append("SIGUSR1"))
node = os.environ["SLURM_NODEID"]
started = "selfcheck" if "torchtitan_dp.selfcheck" in argv else "launched"
print(f"{{started}} on node {{node}}: {{' '.join(argv)}}", flush=True)
if "--fault" in argv:
    raise SystemExit(1)
if started == "selfcheck":
    while "--slow-check" in argv and not asked:
        time.sleep(0.1)
    raise SystemExit(75 if asked else 0)
saved = folder / f"saved-{{node}}"
step = int(saved.read_text()) if saved.exists() else 0
print(f"training starts at step {{step + 1}} on node {{node}}", flush=True)
last = int(option("--steps", 1000000))
while step < last:
    step += 1
    time.sleep(0.1)
    if asked and not ("--deaf" in argv and asked == ["SIGUSR1"]):
        saved.write_text(str(step))
        print(f"stopped by {{asked[0]}} at step {{step}} on node {{node}}, saved", flush=True)
        raise SystemExit(75)
print(f"done on node {{node}}", flush=True)
"""


def write(folder: Path) -> Path:
    """Write the program, whose folder is this one; its path."""
    program = folder / "python"
    program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o700)
    return program
