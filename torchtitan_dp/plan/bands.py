"""The table of bands of `--recommend`: what noise that is correlated over steps would change."""

import math
from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.checkpoint.terms import best_of, noise_by_bands
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger.spending import before

WORTH = 0.9
"""Correlated noise is recommended where it leaves at most this share of the noise in the sum of
all updates, a heuristic: a single step is noisier, and the learning rate has to be found anew."""


@dataclass(frozen=True)
class Bands:
    """Noise by the number of bands, for the batch and steps that were asked for."""

    rows: dict[int, tuple[float, float, float]]  # sigma; noise in a step, and in the sum, over C
    asked: int
    scale: float  # of noise over C to its norm in the mean gradient, of a step
    steps: int

    @property
    def best(self) -> int:
        """The bands that are recommended; 1 where independent noise is as good."""
        best = best_of(self.rows)
        return best if self.rows[best][2] <= WORTH * self.rows[1][2] else 1

    def over_run(self, bands: int) -> float:
        """Return the noise averaged over the run, in units of C."""
        return self.rows[bands][2] * self.scale / math.sqrt(self.steps)

    def sentence(self) -> str:
        """Return the recommended bands, and what they change."""
        if self.best == 1:
            return "noise correlated over steps: independent noise is as good for this run"
        noise = self.rows[self.best][1] / self.rows[1][1]
        return (
            f"noise correlated over steps: privacy.noise = 'banded', privacy.bands = {self.best}: "
            f"{self.over_run(self.best):.3g} C averaged over the run, where independent noise has "
            f"{self.over_run(1):.3g} C; a step has {noise:.2g} times the noise, so that AdamW "
            "wants about twice the learning rate (docs/tuning.md)"
        )

    def table(self) -> Table:
        """List the rows."""
        heads = ("bands", "sigma", "a step", "the run")
        table = Table(*(Column(head, justify="right") for head in heads), "")
        for bands, (sigma, in_step, _) in self.rows.items():
            marks = ["asked"] * (bands == self.asked) + ["recommended"] * (bands == self.best)
            cells = (f"{bands}", f"{sigma:.4g}", f"{in_step * self.scale:.3g}")
            style = "bold" if bands == self.best else None
            table.add_row(*cells, f"{self.over_run(bands):.3g}", ", ".join(marks), style=style)
        return table

    def for_programs(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "bands": self.best,
            "reason": self.sentence(),
            "rows": [
                {"bands": bands, "noise_multiplier": sigma, "noise_over_run": self.over_run(bands)}
                for bands, (sigma, *_) in self.rows.items()
            ],
        }


def weigh_bands(config: JobConfig, plan: Plan, trained: int) -> Bands | None:
    """Weigh bands at the batch and steps asked for; None where noise cannot be correlated.

    Args:
        config: one that `recommend.refuse` lets pass.
        trained: the number of trained parameters.
    """
    privacy, settings = config.privacy, plan.settings
    if privacy.secure_noise or settings.mechanism.largest_share > 1:
        return None
    rows = noise_by_bands(config, settings.implied_units, before(plan.ledger))
    if settings.bands not in rows:
        sigma = settings.mechanism.noise_multiplier
        rows[settings.bands] = (sigma, *settings.mechanism.noise_of_run(plan.steps))
    scale = math.sqrt(trained) / settings.expected_batch_size
    return Bands(dict(sorted(rows.items())), settings.bands, scale, max(plan.steps, 1))
