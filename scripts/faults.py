"""Kills a training run at random moments, again and again, and checks what is left each time.

    python scripts/faults.py [--rounds 20] [--seed 0] [--folder DIR] [--json FILE]

Each round starts the same command, which goes on from what the round before left, and ends it:
SIGKILL to the launcher, to one rank or to all, at a random moment or in the middle of a save. Then
a scheduler's SIGTERM, a rank that hangs, a full disk, random bytes of a checkpoint overwritten, and
a run to the end. One record is a sparse file of 100 GiB. Two processes on CPU, minutes. Exits with
code 1 at the first thing that is lost, unaccounted or left over, and says what.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.faulting.damage import share_of_flips_told  # noqa: E402
from scripts.faulting.run import FaultyRun, require  # noqa: E402

INTERVAL = 3  # steps between checkpoints
KINDS = (
    "launcher",
    "one rank",
    "all",
    "launcher, in a save",
    "one rank, in a save",
    "all, in a save",
)


@dataclass
class Figures:
    """What a campaign has seen."""

    machine: str
    rounds: int
    seed: int
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    kills_before_the_first_step: int = 0
    kills_in_an_unfinished_save: int = 0
    most_steps_lost: int = 0
    longest_exit_s: float = 0.0
    hangs: int = 0
    stray_processes: int = 0
    steps_executed: int = 0
    checks: dict[str, str] = field(default_factory=dict)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--folder", type=Path, help="to work in and keep; default: a temporary one")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults_"))
    figures = Figures(
        f"{os.cpu_count()} CPU cores, {platform.system()}", options.rounds, options.seed
    )
    rng = random.Random(options.seed)
    run = FaultyRun(folder, INTERVAL)
    for number in range(options.rounds):
        kill_once(run, KINDS[number % len(KINDS)], rng, figures)
    figures.checks["SIGTERM"] = run.stop_by_sigterm()
    figures.checks["a rank hangs"] = run.hang_a_rank()
    figures.checks["full disk"] = run.fill_the_disk()
    figures.checks["damage"] = share_of_flips_told(run.newest(), rng)
    figures.checks["to the end"] = run.to_the_end()
    figures.steps_executed = len(run.begun())
    print(json.dumps(asdict(figures), indent=2))
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    if options.folder is None:
        shutil.rmtree(folder)


def kill_once(run: FaultyRun, kind: str, rng: random.Random, figures: Figures) -> None:
    """One start, one kill, and what must hold afterwards."""
    victim, _, moment = kind.partition(", ")
    before = run.begun()
    mode = rng.choice(("disabled", "async"))
    process = run.start(f"--checkpoint.async_mode={mode}")
    if moment:
        run.wait_for_a_save(process)
        time.sleep(rng.uniform(0, 0.03))
    else:
        run.wait(process, rng.uniform(0, 1.5) * run.startup_s)
    unfinished = run.unfinished_saves()
    begun = time.monotonic()
    run.kill(process, victim, rng)
    ended = process.dies(60)
    took = time.monotonic() - begun
    left = process.processes()
    process.end()
    figures.hangs += not ended
    figures.stray_processes += len(left)
    require(ended and not left, f"{left} live on after a kill of {kind}", process)
    steps = run.begun()
    require(steps[: len(before)] == before, "the account of executed steps was rewritten", process)
    lost = run.check_what_is_left(process)
    figures.kills[kind] += 1
    figures.kills_before_the_first_step += len(steps) == len(before)
    figures.kills_in_an_unfinished_save += unfinished > 0
    figures.most_steps_lost = max(figures.most_steps_lost, lost)
    figures.longest_exit_s = round(max(figures.longest_exit_s, took), 1)
    print(
        f"{kind} ({mode}): {len(steps) - len(before)} steps begun, {lost} lost, "
        f"all processes gone in {took:.1f} s",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
