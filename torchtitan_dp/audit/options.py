"""The command line of `python -m torchtitan_dp.audit`."""

import argparse

from torchtitan_dp.config.load import parse_known

TRIALS = 2000
CANARIES = 1000
GUESSES = 0.2  # of the canaries: near the best for claims from 3 to 12
# A game's claim is met exactly, so that its bound is above it with the whole risk; the canaries'
# bound is far below a true claim.
CONFIDENCE = {"game": 0.999, "canaries": 0.95}


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the audit's own options, and leave the configuration's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.audit",
        description=description,
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--instrument",
        choices=("game", "canaries"),
        default="canaries",
        help="game: single steps of a tiny model, with a unit and without; canaries: one training "
        "run of the configured model with units that are known by chance (default)",
    )
    for name, kind, metavar, says in (
        ("--trials", int, "N", f"game: steps with the unit, and as many without ({TRIALS})"),
        ("--canaries", int, "N", f"canaries: how many ({CANARIES})"),
        ("--guesses", float, "F", f"canaries: the share that is guessed at ({GUESSES})"),
        ("--confidence", float, "P", f"of the bound ({CONFIDENCE})"),
        ("--folder", str, "DIR", "canaries: of the audited run (<job.dump_folder>_audit)"),
        ("--json", str, "FILE", "write the result there; - is stdout"),
        ("--plot", str, "FILE.png", "draw it"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=says)
    return parse_known(parser, argv)


def check(options: argparse.Namespace) -> None:
    """Fill in what was not given, in place.

    Raises:
        ValueError: one line for the user.
    """
    belongs = {"trials": "game", "canaries": "canaries", "guesses": "canaries"}
    for name, instrument in {**belongs, "folder": "canaries"}.items():
        if getattr(options, name) is not None and options.instrument != instrument:
            raise ValueError(
                f"--{name} = {getattr(options, name)}: only --instrument {instrument} has it; "
                "remove it"
            )
    defaults = {
        "trials": TRIALS,
        "canaries": CANARIES,
        "guesses": GUESSES,
        "confidence": CONFIDENCE[options.instrument],
    }
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if not 0 < options.confidence < 1:
        raise ValueError(f"--confidence = {options.confidence}: must be between 0 and 1 (0.95)")
    if options.trials < 1:
        raise ValueError(f"--trials = {options.trials}: must be at least 1")
    if not 0 < options.guesses <= 1:
        raise ValueError(f"--guesses = {options.guesses}: a share, above 0 and at most 1")
    if round(options.guesses * options.canaries) < 1:
        raise ValueError(
            f"--canaries = {options.canaries}: with --guesses = {options.guesses} none would be "
            f"guessed at; plant more (the default is {CANARIES})"
        )
