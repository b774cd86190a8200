"""An audit's result as lines and plots."""

import math
from typing import Any

import numpy as np

from torchtitan_dp.audit.released import TextAudit
from torchtitan_dp.privacy.accounting import rounded_up

_LOW_IS_NO_PROOF = "a bound below the claim proves nothing: a better attack may exist"


def _down(lower_bound: float, decimals: int) -> str:
    """Format a lower bound, rounded down: never more than was shown."""
    return f"{math.floor(lower_bound * 10**decimals) / 10**decimals:.{decimals}f}"


def _claim(value: float | None) -> str:
    return "nothing" if value is None else rounded_up(value, digits=3)


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of a result, the content of `--json`."""
    of_instrument = _game_lines if result["instrument"] == "game" else _text_lines
    lines = [
        f"epsilon >= {_down(result['epsilon_lower_bound'], 2)} at delta = {result['delta']:g}, "
        f"with {result['confidence']:.4g} confidence; claimed: {_claim(result['epsilon_claimed'])}",
        *of_instrument(result),
        "FAULT: more leaks than is claimed; do not publish what this code trained"
        if result["exceeds_claim"]
        else "no fault found",
    ]
    first, *others = lines
    return [f"audit ({result['instrument']}): {first}", *(f"      {line}" for line in others)]


def _game_lines(result: dict[str, Any]) -> list[str]:
    steps = "one step" if result["steps"] == 1 else f"a round of {result['steps']} steps"
    lines = [
        f"{steps}; mu >= {_down(result['mu_lower_bound'], 3)}, claimed: "
        f"{result['mu_claimed']:.3f}; 2 x {result['trials']} trials a case"
    ]
    for name, case in result["cases"].items():
        verdict = "EXCEEDS the claim" if case["mu_lower_bound"] > result["mu_claimed"] else ""
        lines.append(
            f"{name:16} mu >= {_down(case['mu_lower_bound'], 3):>6}   wrong: "
            f"{case['false_positives']:4} without, {case['false_negatives']:4} with   {verdict}"
        )
    return [*lines, f"about {steps} of a tiny model; {_LOW_IS_NO_PROOF}"]


def _text_lines(result: dict[str, Any]) -> list[str]:
    seen, members = result["detected"], result["included"]
    others = result["canaries"] - members
    spelt = "; ".join(
        f"{how} decoding spells {hits['included']} of {members} included secrets, "
        f"{hits['excluded']} of {others} excluded ones"
        for how, hits in result["extracted"].items()
    )
    return [
        f"mu >= {_down(result['mu_lower_bound'], 3)}, claimed: {_claim(result['mu_claimed'])} "
        f"but for {result['mu_but_for']:g}; with all guesses right "
        f"{_down(result['mu_lower_bound_if_all_right'], 2)}",
        f"{result['correct']} of {result['guesses']} guesses right, on {result['canaries']} "
        f"documents of which {members} were included",
        f"with 1% false positives it detects {seen['share']:.1%} of members "
        f"({seen['at_least']:.1%} to {seen['at_most']:.1%}); the claim allows "
        f"{result['detected_at_most']:.1%}",
        spelt,
        f"by the exported model alone, about these documents; {_LOW_IS_NO_PROOF}",
    ]


def plot_texts(audit: TextAudit, path: str) -> None:
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
    axes.set_xlabel("score (nats by which the release finds the document likelier)")
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
    bars = axes.barh([name.replace("_", " ") for name in cases], bounds, color=colors)
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
