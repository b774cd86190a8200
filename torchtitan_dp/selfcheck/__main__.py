"""Check that this machine computes private steps right: the first thing to run on a new one.

    python -m torchtitan_dp.selfcheck [--config FILE [--section.key value …]] [--json FILE]
    torchrun --nproc_per_node N -m torchtitan_dp.selfcheck …

Alone or under torchrun, on the devices and the mesh that will be trained on. Without `--config`
every gradient method is checked, on a mesh of all ranks as cp, and from 4 ranks on (an even number)
also on dp_shard 2 x cp; with it, what that file would use. It reads no record, and writes nothing
but `--json` and a temporary checkpoint, which it removes. Exit code 1 if a check fails, with one
line for each, 2 for a user's mistake.
"""

import os
import sys

import torch.distributed as dist

from torchtitan_dp.config.load import exit_on_mistake, write_json
from torchtitan_dp.process import die_with_parent
from torchtitan_dp.selfcheck import ranks as starting
from torchtitan_dp.selfcheck.checkpoints import place_of
from torchtitan_dp.selfcheck.checks import checks_of, machine_checks
from torchtitan_dp.selfcheck.machine import device_name, facts
from torchtitan_dp.selfcheck.options import parse
from torchtitan_dp.selfcheck.report import failure, for_programs, row
from torchtitan_dp.selfcheck.run import run
from torchtitan_dp.selfcheck.terms import default_terms, given_terms


def main(argv: list[str]) -> None:
    options, overrides = parse(argv, (__doc__ or "").splitlines()[0])
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with exit_on_mistake():
        terms = given_terms(overrides, world_size) if overrides else default_terms(world_size)
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
    os.umask(0o077)
    ranks = starting.start(options.backend)
    nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    place = place_of(terms[0].config if overrides else None, nodes)
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
        raise SystemExit(1)  # some rank may still be in a collective: nothing is waited for
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
