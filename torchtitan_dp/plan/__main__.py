"""The plan of a run: its epsilon, samples, noise, cost and memory, before anything is started.

    python -m torchtitan_dp.plan --job.config_file FILE [--section.key value …] [--world_size N]
                                 [--ranks_here R] [--memory_gib G] [--json FILE] [--recommend]

Checks everything that one process can check: `run_train.sh` runs it first. A user's mistake is one
line and exit code 2. A prediction of memory (`memory`) takes longer, and is made with
`--memory_gib` (then a run that does not fit is a mistake too), or `--json`. The share of noise in
an update is always shown (`signal`), and the memory of hosts if it is large; `--ranks_here`, which
each start gives, compares that with this machine's. `--recommend` compares batches and steps.
"""

import argparse
import math
import os
import sys
from contextlib import nullcontext

from torchtitan_dp.config.load import exit_on_mistake, load_config, parse_known, write_json
from torchtitan_dp.plan.memory import DEFAULT_GIB, predict, predicting, show_memory
from torchtitan_dp.plan.recommend import refuse
from torchtitan_dp.plan.report import for_programs, make_report, show


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the plan's own options, and leave the configuration's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.plan",
        description=(__doc__ or "").splitlines()[0],
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    for name, kind, metavar, says in (
        ("--world_size", int, "N", "processes; default: NGPU, else 1"),
        ("--ranks_here", int, "R", "that start here: exit with code 2 if the host is too small"),
        ("--units", int, "N", "plan for so many records or units, before there are any"),
        ("--memory_gib", float, "G", "of a GPU: exit with code 2 if the run does not fit"),
        ("--json", str, "FILE", "write the plan there; - is stdout"),
        ("--tflops", float, "F", "that a device sustains, in TFLOP/s: also estimate the time"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=says)
    parser.add_argument(
        "--recommend",
        action="store_true",
        help="list batches, steps and adapters by the noise they leave at the same compute",
    )
    parser.add_argument("--no_memory", action="store_true", help="--json without memory: quick")
    return parse_known(parser, argv)


def world_size_of(options: argparse.Namespace) -> int:
    """Return the number of processes, the options checked; ValueError, one line."""
    for name, unit in (("memory_gib", "GiB"), ("tflops", "TFLOP/s")):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{name} = {value}: must be a positive number of {unit}")
    given = options.world_size
    text = os.environ.get("NGPU", "1") if given is None else str(given)
    if not (text.isdecimal() and int(text) >= 1):
        name = "NGPU" if given is None else "--world_size"
        raise ValueError(f"{name} = '{text}': must be a number of processes, 1 or more")
    if options.units is not None and options.units < 1:
        raise ValueError(f"--units = {options.units}: must be 1 or more")
    if options.ranks_here is not None and not 1 <= options.ranks_here <= int(text):
        raise ValueError(
            f"--ranks_here = {options.ranks_here}: must be from 1 to {text}, all ranks"
        )
    return int(text)


def main(argv: list[str]) -> None:
    options, overrides = parse(argv)
    with exit_on_mistake():
        world_size = world_size_of(options)
        config = load_config(overrides, world_size)
        if options.recommend:
            refuse(config)
    asked = options.memory_gib is not None or options.json
    predicts = asked and config.privacy.enable and not options.no_memory
    memory_gib = options.memory_gib or DEFAULT_GIB
    # Kept noise takes memory, and how many bands `auto` is, follows from the report.
    waits = config.privacy.noise == "banded" and config.privacy.bands == "auto"
    at_once = predicts and not waits
    beside = predicting(overrides, world_size, memory_gib) if at_once else nullcontext()
    with beside as predicted:
        with exit_on_mistake():
            report = make_report(
                config,
                world_size,
                ranks_here=options.ranks_here,
                units=options.units,
                tflops=options.tflops,
                recommends=options.recommend,
            )
        show(report)
        if report.spent is None:
            if asked:
                print("      nothing more is predicted without privacy", file=sys.stderr)
            return
        memory = predicted() if predicted else None
        if predicts and waits:
            bands = report.spent.plan.settings.bands
            memory = predict([*overrides, f"--privacy.bands={bands}"], world_size, memory_gib)
    if options.json:
        write_json(options.json, for_programs(report, report.spent, memory))
    if memory is not None:
        with exit_on_mistake():
            show_memory(memory, config, limited=options.memory_gib is not None)


if __name__ == "__main__":
    main(sys.argv[1:])
