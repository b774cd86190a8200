"""Check that this machine computes private steps right: the first thing to run on a new one.

    python -m torchtitan_dp.selfcheck [--config FILE [--section.key value …]] [--json FILE]
    torchrun --nproc_per_node N -m torchtitan_dp.selfcheck …

Alone or under torchrun, on the devices and the mesh of the training. Without `--config` it checks
every gradient method, on a mesh of all ranks as cp, and from 4 ranks on (an even number) also on
dp_shard 2 x cp; with it, what that file would use. It reads no record, and writes only `--json` and
a temporary checkpoint. Exit code 1 if a check fails, in one line each; 2 for a user's mistake.
"""

import argparse
import math
import os
import platform
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import exit_on_mistake, fail, write_json
from torchtitan_dp.distributed.devices import capability, device_name, libraries
from torchtitan_dp.ledger import versions
from torchtitan_dp.process import die_with_parent
from torchtitan_dp.selfcheck.checks import checks_of, free_memory_gib, machine_checks
from torchtitan_dp.selfcheck.run import Outcome, run, start
from torchtitan_dp.selfcheck.small import default_terms, given_terms


def main(argv: list[str]) -> None:
    options, overrides = parse(argv, (__doc__ or "").splitlines()[0])
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with exit_on_mistake():
        terms = given_terms(overrides, world_size) if overrides else default_terms(world_size)
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
    os.umask(0o077)
    ranks = start(options.backend)
    nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    place = checkpoint_place(terms[0].config if overrides else None, nodes)
    device, found = device_name(ranks.device), facts(ranks.device)

    def say(line: str) -> None:
        if ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)

    say(f"selfcheck: {world_size} x {device}")
    for name, value in found.items():
        say(f"  {name}: {value}")
    checks = [*machine_checks(ranks), *checks_of(ranks, terms, place, every=not overrides)]
    outcomes = run(ranks, checks, lambda outcome: say(row(outcome)))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        say(failure(outcome))
    if options.json and ranks.rank == 0:
        write_json(options.json, for_programs(device, found, outcomes))
    say(f"selfcheck: {len(outcomes) - len(failed)} of {len(outcomes)} passed")
    if failed:
        raise SystemExit(1)  # some rank may still be in a collective: do not wait for it
    dist.destroy_process_group()


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse selfcheck's own options, and return the configuration's command line too, if any."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.selfcheck",
        description=description,
        epilog="With --config any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        "--job.config_file",
        dest="config",
        metavar="FILE",
        help="the TOML of a run: check what it would use (default: every gradient method)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is stdout")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="of the process group, for ranks that share a device: cpu:gloo,cuda:gloo",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.config is not None:
        return options, ["--job.config_file", options.config, *overrides]
    if overrides:
        fail(f"{overrides[0]}: without --config there is nothing to override; name a TOML")
    return options, []


def checkpoint_place(config: JobConfig | None, nodes: int) -> str:
    """Return the folder to try checkpoints in: where the run's will lie, if that is known.

    Args:
        nodes: the number of machines: several need a shared folder.
    """
    if config is None:
        return os.getcwd() if nodes > 1 else tempfile.gettempdir()
    folder = os.path.abspath(config.job.dump_folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def facts(device: torch.device) -> dict[str, str]:
    """Collect what a bug report needs to state of the machine, in the order of the table."""
    found = {"free memory": f"{free_memory_gib(device)[0]:.1f} GiB a rank"}
    if (compute := capability(device)) is not None:
        found["compute capability"] = ".".join(map(str, compute))
        found["driver"] = _driver()
    found |= libraries(device)
    found |= {name: version for name, version in versions().items() if version != "unknown"}
    return found | {"python": platform.python_version(), "host": platform.platform()}


def _driver() -> str:
    """Return the NVIDIA driver's version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (nvidia-smi does not answer)"
    return done.stdout.split("\n")[0].strip()


def row(outcome: Outcome) -> str:
    """Format an outcome as a line of the table."""
    line = f"  {'ok' if outcome.passed else 'FAILED':6}  {outcome.name:80}  "
    if outcome.value is None or outcome.bound is None:
        return line + outcome.error
    return f"{line}{outcome.value:9.3g}  <= {outcome.bound:.3g}"


def failure(outcome: Outcome) -> str:
    """Return one line: what failed, and what to do."""
    found = outcome.error
    if outcome.value is not None:
        found = f"{outcome.value:.3g} (the limit is {outcome.bound:.3g})"
    return f"FAILED: {outcome.name}: {found}; {outcome.remedy}"


def for_programs(device: str, facts: dict[str, str], outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the content of `--json`; JSON has no NaN."""
    return {
        "device": device,
        "facts": facts,
        "passed": all(outcome.passed for outcome in outcomes),
        "checks": [
            {
                "name": one.name,
                "passed": one.passed,
                "value": one.value if math.isfinite(one.value or 0.0) else None,
                "bound": one.bound,
            }
            for one in outcomes
        ],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
