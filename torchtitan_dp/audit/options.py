"""The audit's own options: what they mean, and which of them an instrument has."""

import argparse
from typing import Any

from torchtitan_dp.audit.game import cases
from torchtitan_dp.config.load import parse_known
from torchtitan_dp.ledger import Settings
from torchtitan_dp.models.families import ModelArgs, trained_count
from torchtitan_dp.privacy.lower_bounds import expected_mu

_CANARIES = 1000
_ONE_RUN = "canaries, text"
_OPTIONS: tuple[tuple[str, Any, str, Any, str, str], ...] = (  # not of every instrument
    ("trials", int, "N", 2000, "game", "steps with the unit, and as many without"),
    ("canaries", int, "N", _CANARIES, _ONE_RUN, "how many"),
    # The default share is near the best for claims from 3 to 12.
    ("guesses", float, "F", 0.2, _ONE_RUN, "the share to guess at"),
    ("folder", str, "DIR", None, _ONE_RUN, "of the audited run (<job.dump_folder>_audit)"),
)
"""Name, type, metavar, default, instruments and meaning."""

# A correct step meets a game's claim exactly; the canaries' bound is far below a true claim.
_CONFIDENCE = {"game": 0.999, "canaries": 0.95, "text": 0.95}


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the audit's own options, and return the configuration's command line too."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.audit",
        description=description,
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--instrument",
        choices=("game", "canaries", "text"),
        default="canaries",
        help="game: single steps of a tiny model, with a unit and without; canaries: one training "
        "run of the configured model with units that are included by chance (default); text: such "
        "a run with documents, and an attack on the exported model alone",
    )
    for name, kind, metavar, default, of, meaning in _OPTIONS:
        text = f"{of}: {meaning}" + (f" ({default})" if default is not None else "")
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    text = f"of the bound ({_CONFIDENCE})"
    parser.add_argument("--confidence", type=float, metavar="P", help=text)
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is stdout")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    return parse_known(parser, argv)


def check(options: argparse.Namespace) -> None:
    """Check the options, and set missing ones to their defaults, in place."""
    for name, _, _, default, of, _ in _OPTIONS:
        if (given := getattr(options, name)) is None:
            setattr(options, name, default)
        elif options.instrument not in of.split(", "):
            known = of.replace(", ", " and ")
            raise ValueError(f"--{name} = {given}: only --instrument {known} has it; remove it")
    if options.confidence is None:
        options.confidence = _CONFIDENCE[options.instrument]
    if not 0 < options.confidence < 1:
        raise ValueError(f"--confidence = {options.confidence}: must be between 0 and 1 (0.95)")
    if options.trials < 1:
        raise ValueError(f"--trials = {options.trials}: must be at least 1")
    if not 0 < options.guesses <= 1:
        raise ValueError(f"--guesses = {options.guesses}: a share, above 0 and at most 1")
    if round(options.guesses * options.canaries) < 1:
        raise ValueError(
            f"--canaries = {options.canaries}: with --guesses = {options.guesses} none would be "
            f"guessed at; plant more (the default is {_CANARIES})"
        )


def check_power(options: argparse.Namespace, args: ModelArgs, settings: Settings) -> None:
    """Refuse, by ValueError, an audit that could not detect a fault, or not be run."""
    if options.instrument == "text":
        return
    if options.instrument == "canaries":
        if options.canaries > (values := trained_count(args)):
            raise ValueError(
                f"--canaries = {options.canaries}: each needs a value of its own, and the model "
                f"trains {values:,}; ask for fewer"
            )
        return
    sigma, confidence = settings.mechanism.noise_multiplier, share_of(options.confidence)

    def suffice(trials: int) -> bool:
        expected = expected_mu(2 / sigma, trials, confidence)
        return expected > settings.mechanism.claimed_mu(trials=trials, confidence=confidence)

    if not suffice(options.trials):
        proposed = (digit * 10**power for power in range(1, 6) for digit in range(1, 10))
        enough = next((trials for trials in proposed if suffice(trials)), None)
        remedy = (
            f"{enough:,} suffice"
            if enough is not None
            else "audit another noise (--privacy.target_epsilon None --privacy.noise_multiplier 1)"
        )
        raise ValueError(
            f"--trials = {options.trials}: too few to tell sigma = {sigma:.4g} from half of it; "
            f"{remedy}"
        )


def share_of(confidence: float) -> float:
    """Return the confidence of each case with which all cases together have `confidence`."""
    return 1 - (1 - confidence) / len(cases(2))
