"""The command line of the audit: its options, and its result as lines, JSON and plots."""

import argparse
import math
from typing import Any

import numpy as np

from torchtitan_dp.audit.game import Outcome, cases
from torchtitan_dp.audit.one_run import CanaryAudit
from torchtitan_dp.config.load import parse_known
from torchtitan_dp.ledger import Settings
from torchtitan_dp.models.families import ModelArgs, trained_count
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.lower_bounds import expected_mu
from torchtitan_dp.privacy.pld import gaussian_epsilon

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


_LOW_IS_NO_PROOF = "a bound below the claim proves nothing: a better attack may exist"


def game_for_programs(
    outcomes: list[Outcome],
    *,
    mu_claimed: float,
    delta: float,
    steps: int,
    trials: int,
    confidence: float,
) -> dict[str, Any]:
    """Return the content of `--json` for a game of so many steps a trial."""
    worst = max(outcomes, key=lambda outcome: outcome.mu)
    return {
        "instrument": "game",
        "epsilon_lower_bound": gaussian_epsilon(worst.mu, delta),
        "epsilon_claimed": gaussian_epsilon(mu_claimed, delta),
        "confidence": confidence,
        "exceeds_claim": worst.mu > mu_claimed,
        "delta": delta,
        "mu_lower_bound": worst.mu,
        "mu_claimed": mu_claimed,
        "steps": steps,
        "trials": trials,
        "cases": {
            outcome.case: {
                "mu_lower_bound": outcome.mu,
                "false_positives": outcome.false_positives,
                "false_negatives": outcome.false_negatives,
            }
            for outcome in outcomes
        },
    }


def _down(lower_bound: float, decimals: int) -> str:
    """Format a lower bound, rounded down: never more than was shown."""
    return f"{math.floor(lower_bound * 10**decimals) / 10**decimals:.{decimals}f}"


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the result."""
    exceeds = result["exceeds_claim"]
    lines = [
        f"audit ({result['instrument']}): epsilon >= {_down(result['epsilon_lower_bound'], 2)} "
        f"at delta = {result['delta']:g}, with {result['confidence']:.4g} confidence; "
        f"claimed: {_claim(result['epsilon_claimed'])}"
    ]
    if result["instrument"] == "game":
        steps = "one step" if result["steps"] == 1 else f"a round of {result['steps']} steps"
        lines.append(
            f"      {steps}; mu >= {_down(result['mu_lower_bound'], 3)}, claimed: "
            f"{result['mu_claimed']:.3f}; 2 x {result['trials']} trials a case"
        )
        for name, case in result["cases"].items():
            verdict = "EXCEEDS the claim" if case["mu_lower_bound"] > result["mu_claimed"] else ""
            lines.append(
                f"      {name:16} mu >= {_down(case['mu_lower_bound'], 3):>6}   wrong: "
                f"{case['false_positives']:4} without, {case['false_negatives']:4} with   {verdict}"
            )
        lines.append(f"      about {steps} of a tiny model; {_LOW_IS_NO_PROOF}")
    elif result["instrument"] == "text":
        lines += _text_lines(result)
    else:
        most = result["epsilon_lower_bound_if_all_right"]
        lines += [
            f"      {result['correct']} of {result['guesses']} guesses right, on "
            f"{result['canaries']} canaries of which {result['included']} were included",
            f"      with all guesses right it would be {_down(most, 2)}: more cannot be shown by "
            "so many",
            f"      about these canaries, not about records; {_LOW_IS_NO_PROOF}",
        ]
    lines.append(
        "      FAULT: more leaks than is claimed; do not publish what this code trained"
        if exceeds
        else "      no fault found"
    )
    return lines


def _claim(value: float | None) -> str:
    return "nothing" if value is None else rounded_up(value, digits=3)


def _text_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of an attack on the exported model."""
    seen, members = result["detected"], result["included"]
    others = result["canaries"] - members
    spelt = "; ".join(
        f"{how} decoding spells {hits['included']} of {members} included secrets, "
        f"{hits['excluded']} of {others} excluded ones"
        for how, hits in result["extracted"].items()
    )
    return [
        f"      mu >= {_down(result['mu_lower_bound'], 3)}, claimed: "
        f"{_claim(result['mu_claimed'])} but for {result['mu_but_for']:g}; with all guesses right "
        f"{_down(result['mu_lower_bound_if_all_right'], 2)}",
        f"      {result['correct']} of {result['guesses']} guesses right, on {result['canaries']} "
        f"documents of which {members} were included",
        f"      with 1% false positives it detects {seen['share']:.1%} of members "
        f"({seen['at_least']:.1%} to {seen['at_most']:.1%}); the claim allows "
        f"{result['detected_at_most']:.1%}",
        f"      {spelt}",
        f"      by the exported model alone, about these documents; {_LOW_IS_NO_PROOF}",
    ]


def plot_canaries(audit: CanaryAudit, path: str) -> None:
    """Plot histograms of the scores by coin, and the edges of the guesses."""
    from matplotlib.figure import Figure

    result, figure = audit.result, Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    bins = np.histogram_bin_edges(audit.scores[np.isfinite(audit.scores)], bins=40).tolist()
    for label, which in (("excluded", ~audit.included), ("included", audit.included)):
        mine = audit.scores[which]  # in blue, and in orange
        axes.hist(mine, bins=bins, alpha=0.6, label=f"{label} ({len(mine)})")
    for side, edge in ((-1, np.max), (1, np.min)):
        if (audit.guesses == side).any():
            axes.axvline(edge(audit.scores[audit.guesses == side]), color="black", lw=1, ls="--")
    axes.set_xlabel(
        "score (nats by which the release finds the document likelier)"
        if result["instrument"] == "text"
        else "score (1 = what an included canary adds each time it is drawn)"
    )
    axes.set_ylabel("canaries")
    axes.set_title(
        f"{result['correct']} of {result['guesses']} guesses right (beyond the dashed lines): "
        f"epsilon >= {_down(result['epsilon_lower_bound'], 2)}, claimed "
        f"{_claim(result['epsilon_claimed'])}",
        fontsize="medium",
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_game(result: dict[str, Any], path: str) -> None:
    """Plot each case's bound on mu, and the claim."""
    from matplotlib.figure import Figure

    cases = result["cases"]
    bounds = [case["mu_lower_bound"] for case in cases.values()]
    figure = Figure(figsize=(7, 3.0), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:red" if bound > result["mu_claimed"] else "tab:blue" for bound in bounds]
    names = [name.replace("_", " ") for name in cases]
    bars = axes.barh(names, bounds, color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(result["mu_claimed"], color="black", lw=1, ls="--")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("lower bound on mu (dashed: the claim)")
    axes.set_title(
        f"one step, 2 x {result['trials']} trials a case, {result['confidence']:.4g} confidence",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)
