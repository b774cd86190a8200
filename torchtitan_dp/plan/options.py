"""The command line of `python -m torchtitan_dp.plan`."""

import argparse
import math
import os

from torchtitan_dp.config.load import parse_known


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the plan's own options, and leave the configuration's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.plan",
        description=description,
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    for name, kind, metavar, says in (
        ("--world_size", int, "N", "processes; default: NGPU, else 1"),
        ("--memory_gib", float, "G", "of a GPU: exit with code 2 if the run does not fit"),
        ("--json", str, "FILE", "write the plan there; - is stdout"),
        ("--tflops", float, "F", "that a device sustains, in TFLOP/s: also estimate the time"),
        ("--plot", str, "FILE.png", "draw a rank's memory, by category"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=says)
    parser.add_argument(
        "--recommend",
        action="store_true",
        help="list batches, steps and adapters by the noise they leave at the same compute",
    )
    parser.add_argument("--no_memory", action="store_true", help="--json without memory: quick")
    return parse_known(parser, argv)


def check(options: argparse.Namespace) -> int:
    """Check the options, and return the number of processes.

    Raises:
        ValueError: one line for the user.
    """
    for name, unit in (("memory_gib", "GiB"), ("tflops", "TFLOP/s")):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{name} = {value}: must be a positive number of {unit}")
    given = options.world_size
    text = os.environ.get("NGPU", "1") if given is None else str(given)
    if not (text.isdecimal() and int(text) >= 1):
        name = "NGPU" if given is None else "--world_size"
        raise ValueError(f"{name} = '{text}': must be a number of processes, 1 or more")
    return int(text)
